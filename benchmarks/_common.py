"""What all benchmarks share: interleaved timing, a description of the machine, one shape of result.

A result's ratio is its value over the value it is measured against; which way is good is said by the benchmark.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypedDict

import torch
from rich.console import Console
from rich.table import Table

from memckpt import _native


class Against(NamedTuple):
    """What a value is measured against."""

    name: str
    value: float


class Result(TypedDict):
    """One measured value; `ratio` is None where there is nothing to measure against."""

    name: str
    value: float
    unit: str
    against: str | None
    ratio: float | None


def against(name: str, value: float) -> Against:
    """Name a limit or competitor and give its value, in the unit of the result."""
    return Against(name, value)


def result(name: str, value: float, unit: str, limit: Against | None = None) -> Result:
    """One entry of the report."""
    if limit is None:
        return {"name": name, "value": round(value, 4), "unit": unit, "against": None, "ratio": None}
    named = f"{limit.name}: {limit.value:.4g} {unit}"
    return {
        "name": name,
        "value": round(value, 4),
        "unit": unit,
        "against": named,
        "ratio": round(value / limit.value, 4),
    }


def interleave(cases: Mapping[str, Callable[[], object]], rounds: int, warmup: int = 1) -> dict[str, float]:
    """Median seconds of each case; the cases take turns, so that a busy spell of the machine hits all alike.

    Parameters
    ----------
    cases
        What to time, by name.
    rounds, warmup
        Timed rounds, and rounds before them that do not count.
    """
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    order = list(cases)
    for turn in range(-warmup, rounds):
        for name in order:
            begin = time.perf_counter()
            cases[name]()
            end = time.perf_counter()
            if turn >= 0:
                seconds[name].append(end - begin)
        order.append(order.pop(0))  # nobody always comes after the same one
    return {name: statistics.median(values) for name, values in seconds.items()}


def machine() -> dict[str, Any]:
    """What the numbers were measured on."""
    model = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo") as cpuinfo:
            model = next((line.split(":", 1)[1].strip() for line in cpuinfo if line.startswith("model name")), model)
    except OSError:
        pass
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "cpu_path": _native.cpu_features()["path"],
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "load_1min": round(os.getloadavg()[0], 2),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def report(benchmark: str, results: list[Result], *, as_json: bool) -> None:
    """Print the results: one JSON object as the last output, or a table."""
    if as_json:
        print(json.dumps({"benchmark": benchmark, "machine": machine(), "results": results}), flush=True)
        return
    console = Console()
    console.print(", ".join(f"{key} {value}" for key, value in machine().items()), highlight=False, soft_wrap=True)
    table = Table(title=benchmark)
    for column in ("name", "value", "unit", "against", "ratio"):
        table.add_column(column, justify="right" if column in ("value", "ratio") else "left")
    for r in results:
        ratio = "" if r["ratio"] is None else f"{r['ratio']:.3f}"
        table.add_row(r["name"], f"{r['value']:.4g}", r["unit"], r["against"] or "", ratio)
    console.print(table)
