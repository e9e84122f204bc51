"""The protocol under random deaths, delays and damage, with ranks as threads: no committed step is ever lost while the
redundancy covers what happened, no rank ever disagrees with another, no wrong byte is ever loaded, nobody waits for
ever.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from memckpt.errors import NothingToRestore, SaveFailed
from tests.protocol.lives import Death, Life, Script, damage, describe, wipe
from tests.protocol.oracle import Oracle
from tests.ranks import fake_nodes

# A damaged replica that is about to be counted on is found, told and sent again.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*is not protected yet:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:damaged snapshots of run:RuntimeWarning"),
]

SAVE_POINTS = [
    "capture.slot", "capture.begun", "capture.copied", "capture.fenced",
    "replicate.chunk", "replicate.slot", "replicate.landed", "replicate.received", "replicate.sealed",
    "commit.seal", "commit.sealed", "commit.vote", "commit.counted", "commit.known", "commit.pinned",
    "before_seal", "after_seal",
]  # fmt: skip
RESTORE_POINTS = [
    "recover.inventoried", "recover.planned", "recover.checked", "recover.chunk", "recover.serve", "recover.fetched",
    "recover.sealed", "recover.loaded", "recover.agreed",
]  # fmt: skip
FETCHER_POINTS, SERVER_POINTS = {"recover.chunk", "recover.fetched", "recover.sealed"}, {"recover.serve"}
QUIET = settings(
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # what threads do is not the same twice
    suppress_health_check=list(HealthCheck),
    print_blob=True,
)


@contextmanager
def memory() -> Iterator[Path]:
    """A place for the memory of some fake nodes."""
    base = Path(tempfile.mkdtemp(prefix="memckpt-test-", dir="/dev/shm"))
    try:
        with fake_nodes(str(base)):
            yield base
    finally:
        shutil.rmtree(base, ignore_errors=True)


def play(scripts: list[Script], copies: int = 1) -> list[Life]:
    """Live through `scripts`, judged by the oracle."""
    oracle, lives = Oracle(len(scripts[0].nodes), copies), []
    with memory() as base:
        for number, script in enumerate(scripts, 1):
            life = Life(number, script, base)
            life.run()
            try:
                beyond = oracle.expected().floor is None
                allowed = (NothingToRestore, SaveFailed) if beyond else (SaveFailed,)
                unexpected = {r: e for r, e in life.errors.items() if not isinstance(e, allowed)}
                assert not unexpected, unexpected
                if not life.script.deaths:
                    assert all(told.returned for told in life.told.values()) or beyond, (
                        "nobody died and nobody came back"
                    )
                oracle.observe(life.told)
                lives.append(life)
            except AssertionError as error:
                error.add_note(f"life {describe(life)}")
                raise
            wipe(base, script.wiped)
            oracle.lost(script.wiped)
            if script.corrupt is not None:
                damage(base, script.corrupt, script.seed)
    return lives


@pytest.mark.parametrize("point", SAVE_POINTS)
@pytest.mark.parametrize("nth", [1, 3])
def test_death_while_saving(point: str, nth: int) -> None:
    """Rank 1 dies, and its node's memory goes with it."""
    lives = play(
        [
            Script(["a", "b"], steps=2, patient=True),
            Script(["a", "b"], steps=5, patient=True, deaths=[Death(1, point, nth)], wiped=["b"], seed=nth),
            Script(["b", "a"], steps=2, patient=True),
        ]
    )
    assert lives[1].dead == {1}, f"{point} was not passed {nth} times"
    assert all(told.returned for told in lives[2].told.values())


@pytest.mark.parametrize("point", RESTORE_POINTS)
@pytest.mark.parametrize("rank", [0, 1])
def test_death_while_restoring(point: str, rank: int) -> None:
    """Node b was lost; while its rank is served by the other one, one of the two dies."""
    lives = play(
        [
            Script(["a", "b"], steps=3, patient=True, wiped=["b"]),
            Script(["a", "b"], steps=2, deaths=[Death(rank, point, 1)], seed=rank),
            Script(["a", "b"], steps=2, patient=True, wiped=["a"]),
            Script(["b", "a"], steps=1),
        ]
    )
    elsewhere = SERVER_POINTS if rank else FETCHER_POINTS
    assert lives[1].dead == (set() if point in elsewhere else {rank})
    assert all(told.returned for told in lives[3].told.values())


@pytest.mark.parametrize("nodes", [["a", "b"], ["b", "a"]])
@pytest.mark.parametrize("chunk", [0, 1])
def test_damaged_bytes_are_never_loaded(nodes: list[str], chunk: int) -> None:
    """With nothing else lost, another holder has them whole, whichever of the newest snapshots was hit."""
    for number in range(4):
        lives = play(
            [
                Script(["a", "b"], steps=3, patient=True, corrupt=number, seed=chunk * (4 << 20) + 100_000),
                Script(nodes, steps=1),
            ]
        )
        assert [told.returned and told.returned[0] for told in lives[1].told.values()] == [3, 3]


@pytest.mark.parametrize("seed", range(8))
def test_one_rank_heard_of_the_commit_and_is_lost(seed: int) -> None:
    """What it told its user must come back, whatever the survivor made of the error that it got for the same vote."""
    death = Death(1, "training.heard", 3)
    play(
        [
            Script(["a", "b"], steps=4, waits=True, deaths=[death], wiped=["b"], delay_s=0.03, seed=seed),
            Script(["a", "b"], steps=1),
        ]
    )


@pytest.mark.filterwarnings("ignore:step .* was not committed")
@pytest.mark.parametrize("lost", ["a", "b"])
def test_bytes_that_change_on_their_way_are_not_committed(lost: str) -> None:
    """A replica that differs from its owner's snapshot is a no; what is told to be committed survives either node."""
    for flipped in range(6):
        first, second = play(
            [
                Script(["a", "b"], steps=4, patient=True, flipped=[flipped], wiped=[lost]),
                Script(["a", "b"], steps=1),
            ]
        )
        assert first.failed, "the change was noticed"
        assert max(told.committed for told in first.told.values()) == 4
        assert all(told.returned for told in second.told.values())


@st.composite
def deaths(draw: st.DrawFn, world: int) -> tuple[Death, ...]:
    """Nobody, one or two ranks, while saving or while restoring."""
    count = draw(st.sampled_from([0, 1, 1, 1, 2]))
    points = st.sampled_from([*SAVE_POINTS, *RESTORE_POINTS, "training.heard"])
    return tuple(Death(draw(st.integers(0, world - 1)), draw(points), draw(st.integers(1, 4))) for _ in range(count))


@st.composite
def runs(draw: st.DrawFn) -> list[Script]:
    """Some lives of a run of 2 to 4 ranks on 2 to 4 nodes, permuted from life to life; a last one without a failure."""
    world = draw(st.integers(2, 4))
    nodes = [f"n{i * draw(st.sampled_from([2, world])) // world}" for i in range(world)] if world == 4 else None
    nodes = nodes if nodes and len(set(nodes)) > 1 else [f"n{i}" for i in range(world)]
    scripts = []
    for _ in range(draw(st.integers(1, 3))):
        loss = draw(st.sampled_from(["nothing", "nothing", "node", "byte"]))
        scripts.append(
            Script(
                nodes=draw(st.permutations(nodes)),
                steps=draw(st.integers(1, 4)),  # with none, a rank that ends at once is a lost one to the others
                deaths=draw(deaths(world)),
                wiped=[draw(st.sampled_from(nodes))] if loss == "node" else [],
                corrupt=draw(st.integers(0, 100)) if loss == "byte" else None,
                patient=draw(st.booleans()),
                waits=draw(st.sampled_from([False, False, True])),
                delay_s=draw(st.sampled_from([0.0, 0.003, 0.03])),
                seed=draw(st.integers(0, 2**20)),
            )
        )
    return [*scripts, Script(nodes=draw(st.permutations(nodes)), steps=1)]


@settings(QUIET, max_examples=12, derandomize=True)
@given(runs())
def test_random_lives(scripts: list[Script]) -> None:
    play(scripts)


@pytest.mark.long
@pytest.mark.timeout(3600)
@settings(QUIET, max_examples=1000)
@given(runs())
def test_many_random_lives(scripts: list[Script]) -> None:
    play(scripts)
