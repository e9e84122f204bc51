"""The README's code and commands, and the examples, are what they say: run, killed, run again, compared."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from memckpt.demo import job

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
needs_mpi = pytest.mark.skipif(importlib.util.find_spec("mpi4py") is None, reason="needs memckpt[mpi]")


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Memory of its own for this test, and root allowed under mpirun."""
    return {**job.environment(tmp_path), "MEMCKPT_SHM": str(tmp_path), "PYTHONWARNINGS": "error"}


def run(environment: dict[str, str], *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*command], env=environment, capture_output=True, text=True, timeout=100)


def python(environment: dict[str, str], *command: str) -> subprocess.CompletedProcess[str]:
    return run(environment, sys.executable, *command)


def last_line(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line for line in done.stdout.splitlines() if "parameters" in line]
    assert len(lines) == 1, done.stdout
    return lines[0]


def left(tmp_path: Path) -> list[Path]:
    return list(tmp_path.rglob("*.safetensors"))


def test_readme_begins_with_what_matters() -> None:
    top = "\n".join(README.splitlines()[:40])
    assert "memckpt demo --json" in top
    assert "-m pytest" in top
    assert "| what fails |" in top
    code = re.findall(r"```python\n(.*?)```", README, re.S)
    assert len(code) == 1
    assert len(code[0].splitlines()) <= 15
    assert code[0] in top


def test_readme_has_exactly_the_two_commands_that_ci_runs() -> None:
    commands = [line for line in README.splitlines() if line.startswith("python3 -m venv")]
    assert len(commands) == 2
    for command in commands:
        assert command.index("torch==") < command.index("'.[") or command.index("torch==") < command.index("-e '.[")
    assert "memckpt demo" in commands[0]
    assert commands[1].endswith("pytest")


def test_readme_code_runs(environment: dict[str, str], tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README, re.S)
    script = tmp_path / "readme.py"
    script.write_text(code + "print(step)\n")
    done = python(environment, str(script))
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == "99"
    assert left(tmp_path) == []


@pytest.mark.parametrize("name", ["docs/architecture.md", "README.md", "CONTRIBUTING.md"])
def test_links_lead_somewhere(name: str) -> None:
    page = ROOT / name
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), target


def test_plain_loop_goes_on_after_a_kill(environment: dict[str, str], tmp_path: Path) -> None:
    loop = str(ROOT / "examples" / "plain_loop.py")
    expected = last_line(python(environment, loop, "--name", "uninterrupted"))
    killed = python(environment, loop, "--die-at", "20")
    assert killed.returncode == -9, killed.stderr
    assert left(tmp_path)
    again = python(environment, loop)
    assert last_line(again) == expected
    assert re.search(r"starting at step 1?[0-9]$", again.stdout, re.M), again.stdout
    assert left(tmp_path) == []


@needs_mpi
@pytest.mark.mpi
def test_mpi_train_goes_on_after_a_kill(environment: dict[str, str], tmp_path: Path) -> None:
    start = [job.mpirun(), "--oversubscribe", "-n", "2", sys.executable, str(ROOT / "examples" / "mpi_train.py")]
    expected = last_line(run(environment, *start, "--name", "uninterrupted"))
    killed = run(environment, *start, "--die-at", "20")
    assert "parameters" not in killed.stdout
    again = run(environment, *start)
    assert last_line(again) == expected
    assert re.search(r"^step (18|19|20)$", again.stdout.splitlines()[0]), again.stdout
    assert left(tmp_path) == []


@needs_mpi
@pytest.mark.mpi
def test_in_job_recovery_ends_like_an_uninterrupted_run(environment: dict[str, str], tmp_path: Path) -> None:
    start = [job.mpirun(), "--with-ft", "ulfm", "--oversubscribe", "-n", "3", sys.executable]
    start.append(str(ROOT / "examples" / "in_job_recovery.py"))
    expected = last_line(run(environment, *start, "--name", "uninterrupted", "--die-at", "0"))
    recovered = run(environment, *start)
    assert last_line(recovered) == expected
    assert len(re.findall(r"rank 1: step (\d+)", recovered.stdout)) == 2, recovered.stdout
    assert left(tmp_path) == []
