"""The native code without Python, under the sanitizers."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = [str(ROOT / "tests" / "native" / "stress.cpp")] + [
    str(p) for p in sorted((ROOT / "csrc").glob("*.cpp")) if p.name != "bindings.cpp"
]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("sanitizers", ["address,undefined", "thread"])
def test_sanitizers_find_nothing(sanitizers: str, tmp_path: Path) -> None:
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    program = tmp_path / "stress"
    flags = ["-std=c++17", "-O1", "-g", "-pthread", f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all"]
    built = subprocess.run(
        [compiler, *flags, f"-I{ROOT / 'csrc'}", *SOURCES, "-o", str(program)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    command = [str(program), str(tmp_path), "1", "2"]
    if shutil.which("setarch"):
        command = ["setarch", "-R", *command]  # TSan cannot cope with much address space randomization
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "ok"
