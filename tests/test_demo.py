"""The demonstration's judge must not be fooled: most tests here hand it logs that prove nothing."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from memckpt.cli import demo as command
from memckpt.demo import job as jobs
from memckpt.demo.gpt import GPT, GPTConfig
from memckpt.demo.history import Comparison, History
from memckpt.demo.log import AnyEvent, Entered, Finished, Follower, Log, Restored, Started, Stepped, now, start_time
from memckpt.demo.observer import choose, permuted
from memckpt.demo.text import Batches, standard_library
from memckpt.demo.verdict import Recovery, Verdict, conclude

RANKS, STEPS, KILLED_AT = 2, 6, 103.5


def stepped(rank: int, step: int, at: float, loss: float | None = None) -> Stepped:
    value = 1.0 / step + rank if loss is None else loss
    return Stepped(at, rank, step, value.hex(), f"digest-{rank}-{step}")


def life(pid: int, rank: int, first: int, last: int, at: float, **more: object) -> list[tuple[int, AnyEvent]]:
    """Entered, restored at `first` - 1, one step a second up to `last`."""
    restored = {"step": first - 1, "source": "own", "sources": [], "nbytes": 8, "rejected": [], "protected": True}
    restored |= {"seconds": {"load": 0.01}, **more}
    events: list[AnyEvent] = [
        Started(at, pid, 1, rank, "n"),
        Entered(at, rank, 1, {"regroup": 0.1}),
        Restored(at, rank, **restored),  # type: ignore[arg-type]
    ]
    events += [stepped(rank, step, at + step - first + 1) for step in range(first, last + 1)]
    if last == STEPS:
        events.append(Finished(at + 100, rank, last, f"final-{rank}.bin"))
    return [(pid, event) for event in events]


def good() -> list[tuple[int, AnyEvent]]:
    """Rank 1 (process 11) is killed in step 4; process 12 takes over at step 2, and step 3 is done again."""
    return (
        life(10, 0, 1, 3, 100.0)
        + life(11, 1, 1, 3, 100.0)
        + life(10, 0, 3, STEPS, 104.0)
        + life(12, 1, 3, STEPS, 104.0, source="peer")
    )


def judge(tmp_path: Path, events: list[tuple[int, AnyEvent]], **more: object) -> Verdict:
    log, reference_log = tmp_path / "log", tmp_path / "reference"
    for directory in (log, reference_log):
        directory.mkdir(exist_ok=True)
        for rank in range(RANKS):
            if not (directory / f"final-{rank}.bin").exists():
                (directory / f"final-{rank}.bin").write_bytes(bytes([rank]) * 9)
    reference = History.of(life(1, 0, 1, STEPS, 50.0) + life(2, 1, 1, STEPS, 50.0))
    history = History.of(events)
    told = {"rank": 1, "pid": 11, "at": KILLED_AT, "in_job": True, "restarted_at": KILLED_AT, **more}
    recovery = Recovery(before=history.before(KILLED_AT), after=history, log=log, **told)  # type: ignore[arg-type]
    comparison = Comparison()
    comparison.steps(reference.lives, recovery.lives, RANKS, STEPS)
    comparison.finals(reference, reference_log, history, log, RANKS)
    return conclude("x", "in-job", 0, STEPS, "SIGKILL", RANKS, recovery, comparison, 1.0)


def test_a_good_recovery_is_proved(tmp_path: Path) -> None:
    verdict = judge(tmp_path, good())
    assert verdict.problems == []
    assert verdict.proved
    assert verdict.bitwise_equal
    assert (verdict.killed_at_step, verdict.recovered_step, verdict.lost_steps) == (4, 2, 1)
    assert (verdict.source, verdict.sources) == ("peer", ["own", "peer"])
    assert verdict.compared == {"losses": 14, "digests": 14, "final_nbytes": 18}
    assert verdict.seconds["regroup"] == pytest.approx(0.1)
    assert verdict.seconds["detect"] == pytest.approx(0.4)
    assert verdict.seconds["total"] == pytest.approx(0.5)
    assert verdict.seconds["first_step"] == pytest.approx(1.5)
    assert {"inventory", "fetch", "verify", "load"} <= set(verdict.seconds)


def test_detection_ends_when_the_first_survivor_saw_the_loss(tmp_path: Path) -> None:
    timeline = {"seen": KILLED_AT + 0.2, "gather": 0.05, "regroup": 0.15}
    events = [
        (
            pid,
            Entered(e.at, e.rank, 2, timeline if pid == 10 else {})
            if isinstance(e, Entered) and e.at > KILLED_AT
            else e,
        )
        for pid, e in good()
    ]
    seconds = judge(tmp_path, events).seconds
    assert seconds["detect"] == pytest.approx(0.2)
    assert seconds["leave"] == pytest.approx(0.05)
    assert seconds["regroup"] == pytest.approx(0.15)


def replaced(old: type, **new: object) -> list[tuple[int, AnyEvent]]:
    """`good()` with its last event of type `old` changed."""
    events = good()
    at = max(i for i, (_, event) in enumerate(events) if isinstance(event, old))
    pid, event = events[at]
    events[at] = (pid, type(event)(**{**{f: getattr(event, f) for f in event.__struct_fields__}, **new}))
    return events


@pytest.mark.parametrize(
    ("events", "words"),
    [
        (replaced(Stepped, loss=(0.0).hex()), "loss"),
        (replaced(Stepped, digest="other"), "parameters differ"),
        (replaced(Restored, source="none"), "neither from own nor from a peer"),
        (replaced(Restored, source="own"), "not from a peer"),
        (replaced(Restored, step=1), "different steps"),
        ([e for e in good() if not (e[0] == 12 and isinstance(e[1], Finished))], "no final state"),
        ([e for e in good() if not (e[0] == 12 and isinstance(e[1], Stepped) and e[1].step == 5)], "never finished"),
        (life(10, 0, 1, STEPS, 100.0) + life(11, 1, 1, STEPS, 100.0), "did not restore after the failure"),
        ([(11 if pid == 12 else pid, e) for pid, e in good()], "went on as if nothing had happened"),
        ([(13 if pid == 10 and e.at >= 104 else pid, e) for pid, e in good()], "though it was not the victim"),
        (
            life(10, 0, 1, 3, 100.0)
            + life(11, 1, 1, 3, 100.0)
            + life(10, 0, 1, STEPS, 104.0, source="none")
            + life(12, 1, 1, STEPS, 104.0, source="none"),
            "started over",
        ),
    ],
)
def test_what_proves_nothing_is_not_called_proved(
    tmp_path: Path, events: list[tuple[int, AnyEvent]], words: str
) -> None:
    verdict = judge(tmp_path, events)
    assert not verdict.proved
    assert any(words in problem for problem in verdict.problems), verdict.problems


def test_other_final_bytes_are_not_equal(tmp_path: Path) -> None:
    (tmp_path / "log").mkdir()
    (tmp_path / "log" / "final-1.bin").write_bytes(b"\1" * 8 + b"\0")
    verdict = judge(tmp_path, good())
    assert not verdict.bitwise_equal
    assert not verdict.proved


def test_more_than_two_lost_steps_are_told(tmp_path: Path) -> None:
    verdict = judge(
        tmp_path,
        life(10, 0, 1, 4, 99.0) + life(11, 1, 1, 4, 99.0)
        + life(10, 0, 2, STEPS, 104.0) + life(12, 1, 2, STEPS, 104.0, source="peer"),
    )  # fmt: skip
    assert verdict.lost_steps == 3
    assert not verdict.proved


def test_a_step_that_a_survivor_finished_after_the_kill_counts_as_lost(tmp_path: Path) -> None:
    events = good()
    events.insert(6, (10, stepped(0, 4, 103.9)))
    verdict = judge(tmp_path, events)
    assert verdict.killed_at_step == 4
    assert verdict.lost_steps == 2


def test_choice_is_decided_by_the_seed_and_reaches_every_rank() -> None:
    choices = [choose(seed, 24, 4) for seed in range(200)]
    assert choices == [choose(seed, 24, 4) for seed in range(200)]
    assert {c.rank for c in choices} == {0, 1, 2, 3}
    assert {c.step for c in choices} == set(range(6, 19))
    assert all(0 < c.fraction < 1 for c in choices)


def test_permutation_moves_somebody_and_loses_nobody() -> None:
    nodes = ["a", "a", "b", "b"]
    for seed in range(50):
        moved = permuted(seed, nodes)
        assert moved != nodes
        assert sorted(moved) == nodes


def test_log_is_read_while_it_grows_and_whole_lines_only(tmp_path: Path) -> None:
    log, follower = Log(tmp_path), Follower(tmp_path)
    assert follower.poll() == []
    log.write(Started(now(), os.getpid(), start_time(os.getpid()), 0, "n"))
    path = tmp_path / f"{os.getpid()}.jsonl"
    with path.open("ab") as file:
        file.write(b'{"event":"entered","at":1.0,')
        file.flush()
        (first,) = follower.poll()
        assert first[0] == os.getpid()
        assert isinstance(first[1], Started)
        assert follower.poll() == []
        file.write(b'"rank":1,"generation":2,"timeline":{}}\n')
    assert follower.poll() == [(os.getpid(), Entered(1.0, 1, 2, {}))]
    with pytest.raises(FileExistsError):
        Log(tmp_path)


def test_model_is_the_same_for_the_same_seed_and_dropout_needs_the_random_state() -> None:
    losses = []
    for seed in (1, 1, 2):
        torch.manual_seed(0)
        model = GPT(GPTConfig(layers=1))
        torch.manual_seed(seed)
        inputs = torch.arange(64)[None]
        losses.append(model(inputs, inputs + 1).item().hex())
    assert losses[0] == losses[1] != losses[2]
    assert model.head.weight is model.token.weight


def test_batches_go_on_from_their_state_across_epochs_and_differ_by_rank() -> None:
    text = standard_library(4096)
    assert len(text) == 4096

    def batches(rank: int) -> Batches:
        return Batches(text, context=16, batch=8, rank=rank, world=4, seed=3)

    ours, other = batches(0), batches(1)
    assert not torch.equal(ours.next()[0], other.next()[0])
    for _ in range(30):
        state = ours.state_dict()
        expected = [ours.next() for _ in range(5)]
        other.load_state_dict(state)
        again = batches(0)
        again.load_state_dict(state)
        for inputs, targets in expected:
            got_inputs, got_targets = again.next()
            assert torch.equal(inputs, got_inputs)
            assert torch.equal(targets, got_targets)
            assert torch.equal(inputs[:, 1:], targets[:, :-1])


def fake_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> jobs.Job:
    """A `Job` whose mpirun is a shell script."""
    fake = tmp_path / "mpirun"
    fake.write_text(f"#!/bin/sh\n{script}\n")
    fake.chmod(0o755)
    monkeypatch.setattr(jobs, "mpirun", lambda: str(fake))
    return jobs.Job([], tmp_path, tmp_path / "out")


def test_kill_ends_the_whole_job_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bystander = subprocess.Popen(["sleep", "20"])
    job = fake_job(tmp_path, monkeypatch, "echo here; sleep 20 & (sleep 20 & wait) & wait")
    try:
        while len(job.members()) < 4:
            assert job.poll() is None
        assert not job.signal(bystander.pid, signal.SIGKILL)
        assert not job.signal(os.getpid(), signal.SIGKILL)
        killed = job.kill()
        assert len(killed) == 4
        assert job.members() == {}
        assert job.poll() is not None
        assert bystander.poll() is None
        assert job.tail() == "here"
    finally:
        bystander.kill()
        bystander.wait()


def test_orphans_of_a_dead_mpirun_are_ended_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = fake_job(tmp_path, monkeypatch, "sleep 20 & wait")
    while len(members := job.members()) < 2:
        assert job.poll() is None
    (orphan,) = [pid for pid in members if pid != job._mpirun.pid]
    assert job.signal(job._mpirun.pid, signal.SIGKILL)
    job._mpirun.wait()
    assert set(job.members()) == {orphan}
    assert job.kill() == [orphan]


def arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command.add_parser(parser.add_subparsers())
    return parser.parse_args(["demo", *words])


@pytest.mark.parametrize(
    "words",
    [
        "--active 1",
        "--steps 3",
        "--spares 0",
        "--signal STOP --scenario relaunch",
        "--signal STOP --scenario storage",
        "--seed -1",
    ],
)
def test_settings_that_would_prove_nothing_are_refused(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.run(arguments(*words.split())) == 2
    assert words.split()[0] in capsys.readouterr().err


def test_no_mpirun_is_a_clear_failure(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    monkeypatch.setenv("PATH", "/nowhere")
    assert command.run(arguments("--json", "--seed", "1")) == 1
    out, err = capsys.readouterr()
    assert '"proved":false' in out
    assert "memckpt[mpi]" in err


def test_a_verdict_is_plain_json(tmp_path: Path) -> None:
    import msgspec

    verdict = judge(tmp_path, good())
    decoded = msgspec.json.decode(msgspec.json.encode(verdict))
    must = {"run", "recovered_step", "killed_at_step", "source", "lost_steps", "bitwise_equal", "seconds"}
    assert must <= set(decoded)
