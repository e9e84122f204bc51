"""What is built on the five methods: hostile messages, choice of transport."""

from __future__ import annotations

import struct

import pytest

from memckpt.comm import LocalComm, LocalGroup, broadcast, detect, gather, wait
from memckpt.comm import trees as trees_module
from memckpt.comm.base import FIRST_TAG, Request
from memckpt.errors import DeadlineExceeded, PeerLost, ProtocolError, UsageError

pytestmark = pytest.mark.timeout(60)


class Scripted(Request):
    """A request that is complete at its n-th test, or raises."""

    def __init__(self, tests: int, error: Exception | None = None, peer: int | None = 3) -> None:
        self.what, self.peer, self.tag, self.nbytes = "send" if peer is not None else "reduction", peer, 7, 0
        self.left, self.error = tests, error

    def test(self) -> bool:
        self.left -= 1
        if self.error is not None and self.left <= 0:
            raise self.error
        return self.left <= 0


def test_wait_ends_when_all_are_complete() -> None:
    requests = [Scripted(1), Scripted(5), Scripted(100)]
    wait(requests, 10.0, "three")
    assert all(request.left <= 0 for request in requests)
    wait([], 0.0, "none")


def test_wait_raises_at_once_for_one_lost_peer() -> None:
    with pytest.raises(PeerLost, match="gone"):
        wait([Scripted(10**9), Scripted(3, PeerLost("gone"))], 10.0, "two")


def test_wait_names_what_and_whom() -> None:
    with pytest.raises(
        DeadlineExceeded, match=r"the vote: no answer within 0.02 s; .*send to rank 3 \(tag 7\)"
    ) as caught:
        wait([Scripted(10**9)], 0.02, "the vote")
    assert caught.value.rank == 3
    with pytest.raises(DeadlineExceeded, match="reduction with all ranks") as caught:
        wait([Scripted(10**9, peer=None), *[Scripted(10**9, peer=peer) for peer in range(20)]], 0.02, "the vote")
    assert caught.value.rank is None
    assert "and 13 more" in str(caught.value)


def test_wait_polls_and_does_not_sleep_when_that_got_something_done() -> None:
    polls = 0

    def poll() -> bool:
        nonlocal polls
        polls += 1
        return True

    wait([Scripted(3000)], 10.0, "busy", poll)
    assert polls == 2999


def test_wait_passes_on_what_poll_raises() -> None:
    def poll() -> None:
        raise KeyError("stop")

    with pytest.raises(KeyError):
        wait([Scripted(10**9)], 10.0, "stopped", poll)


@pytest.mark.parametrize(
    ("size", "body"),
    [
        (-2, b""),
        (2**40, b""),
        (5, b"1234"),  # shorter than announced
        (3, b"abc"),  # too short for a frame
        (12, struct.pack("<IQ", 7, 0)),  # no such rank
        (12, struct.pack("<IQ", 1, 1)),  # longer than the message
        (24, struct.pack("<IQ", 1, 0) * 2),  # twice the same rank
        (12, struct.pack("<IQ", 0, 0)),  # the root's own rank
    ],
)
def test_a_peer_that_breaks_the_protocol_is_refused(size: int, body: bytes) -> None:
    root, peer = LocalGroup(2).comms
    peer.isend(struct.pack("<q", size), 0, trees_module._GATHER)
    peer.isend(body, 0, trees_module._GATHER + 1)
    with pytest.raises(ProtocolError) as caught:
        gather(root, b"mine", 0, 5.0)
    assert caught.value.rank in (None, 1)


def test_the_bound_holds_for_the_sum_too() -> None:
    root, peer = LocalGroup(2).comms
    assert gather(peer, bytes(60), 0, 5.0, limit=100) is None
    with pytest.raises(UsageError, match="more than 100 bytes"):
        gather(root, bytes(60), 0, 5.0, limit=100)


def test_broadcast_needs_bytes_at_the_root() -> None:
    with pytest.raises(UsageError):
        broadcast(LocalComm(), None, 0, 1.0)


def test_detect_passes_a_communicator_through_and_falls_back_to_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK"):
        monkeypatch.delenv(name, raising=False)
    comm = LocalComm()
    assert detect(comm) is comm
    assert (detect().kind, detect().size, detect().name) == ("local", 1, "one process")


def test_tags_of_users_do_not_meet_those_of_the_trees() -> None:
    assert max(trees_module._GATHER, trees_module._BROADCAST) + 1 < FIRST_TAG
