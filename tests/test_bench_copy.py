"""The copy benchmark runs, checks its results and reports them in the agreed shape."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from memckpt import _native

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "bench_copy.py"


def test_smoke() -> None:
    command = [sys.executable, str(SCRIPT), "--json", "--size", "8", "--rounds", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=100)
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["benchmark"] == "copy"
    assert found["machine"]["cores"] >= 1
    names = [r["name"] for r in found["results"]]
    assert names.count("copy_crc_sse42") == int("sse42" in str(_native.cpu_features()["paths"]))
    assert [n for n in names if n != "copy_crc_sse42"] == ["copy", "copy_crc", "scatter_crc", "copy_small"]
    for r in found["results"]:
        assert set(r) == {"name", "value", "unit", "against", "ratio"}
        assert r["value"] > 0
        assert r["ratio"] > 0
