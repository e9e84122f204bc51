"""What the structure promises: imports point down, verbs are apart, importing does nothing, names are described."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import memckpt

PACKAGE = Path(memckpt.__file__).parent

# From the top down; a module may import from its own layer and from those below.
LAYERS = [
    "cli demo __main__",
    "resilient",
    "checkpointer",
    "ending",
    "generation banner",
    "durable due sharing telling meter protection",
    "tally",
    "engine assembly",
    "outgoing",
    "capture replicate commit decide persist recover attempt reshard fetch stored",
    "session slots plan division assembly lineage inventory placement phases verdict options redundancy reports",
    "arena fence lock slotfile budget policy storage",
    "files process surroundings preemption hooks",
    "comm",
    "restore chunks state fill filling rng sources modules optimizers",
    "seal layout header overlap leaves tree strided dtypes",
    "errors faults _native",
]
GROUPS = {"format", "memory", "recovery", "saving", "state"}
VERBS = {"capture", "replicate", "commit", "decide", "persist", "recover"}
RANK = {name: i for i, names in enumerate(LAYERS) for name in names.split()}


def modules() -> Iterator[tuple[str, ast.Module, str]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        text = path.read_text()
        yield ".".join(path.relative_to(PACKAGE).with_suffix("").parts), ast.parse(text), text


def imports(tree: ast.Module) -> Iterator[tuple[str, bool]]:
    """Modules imported, without the package's name, and whether at import time (not in a function)."""
    typing_only: set[int] = set()
    inner: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            typing_only |= {id(n) for n in ast.walk(node)}
        if isinstance(node, ast.FunctionDef):
            inner |= {id(n) for n in ast.walk(node)}
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.Import):
            yield from ((alias.name, id(node) not in inner) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                is_module = node.module in ("memckpt", *(f"memckpt.{group}" for group in GROUPS))
                yield (full if is_module else str(node.module)), id(node) not in inner


def top(name: str) -> str:
    """The part of a module's name that has a layer: a package's as a whole, or a module's in the grouped ones."""
    parts = name.removeprefix("memckpt.").split(".")
    return parts[1] if parts[0] in GROUPS and len(parts) > 1 else parts[0]


def test_imports_point_down() -> None:
    wrong = []
    for name, tree, _ in modules():
        me = top(name)
        if me == "__init__":
            continue
        assert me in RANK, f"{me} has no layer; give it one"
        for target, at_import in imports(tree):
            if target.startswith("memckpt.") and at_import and RANK[top(target)] < RANK[me]:
                wrong.append(f"{name} imports {target}")
    assert not wrong


def test_verbs_do_not_import_verbs() -> None:
    wrong = [
        f"{name} imports {target}"
        for name, tree, _ in modules()
        if top(name) in VERBS
        for target, _ in imports(tree)
        if top(target) in VERBS - {name} and target.startswith("memckpt.")
    ]
    assert not wrong


def test_mpi4py_is_imported_in_one_module() -> None:
    users = {name for name, tree, _ in modules() for target, _ in imports(tree) if target.split(".")[0] == "mpi4py"}
    assert users <= {"comm.mpi", "cli.mpicheck"}


def test_no_module_grows_beyond_500_lines() -> None:
    assert {name: text.count("\n") for name, _, text in modules() if text.count("\n") > 500} == {}


def test_importing_starts_nothing() -> None:
    code = (
        "import sys, threading, memckpt, memckpt.checkpointer, memckpt.comm\n"
        "assert 'mpi4py' not in sys.modules\n"
        "assert threading.active_count() == 1\n"
        "import logging; assert not logging.getLogger().handlers\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)
    light = "import sys, memckpt; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", light], check=True, timeout=60)


def public() -> Iterator[tuple[str, object]]:
    for name in memckpt.__all__:
        value = getattr(memckpt, name)
        yield name, value
        if inspect.isclass(value) and not issubclass(value, BaseException):
            for member, function in vars(value).items():
                if not member.startswith("_") and inspect.isfunction(function):
                    yield f"{name}.{member}", function


@pytest.mark.parametrize(("name", "value"), list(public()), ids=[name for name, _ in public()])
def test_public_names_are_described(name: str, value: object) -> None:
    """numpydoc: every parameter, what is returned, and whether a call is collective."""
    doc = inspect.getdoc(value)
    assert doc, f"{name} has no docstring"
    if not inspect.isfunction(value):
        return
    assert re.search(r"\b(Collective|Local|local|collective)\b", doc), f"{name}: collective or local?"
    parameters = [p for p in inspect.signature(value).parameters if p != "self"]
    for parameter in parameters:
        assert re.search(rf"^\**{parameter}\b|, \**{parameter}\b|`{parameter}`", doc, re.M), f"{name}: {parameter}?"
