"""Tests that take minutes run only when asked for: ``--campaign[=KILLS]``, and ``--long`` for all of them."""

from __future__ import annotations

import pytest

_OPTIONS = {
    "long": "searches and random runs that take minutes",
    "campaign": "real kills of real MPI jobs, judged by an oracle",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help=_OPTIONS["long"])
    parser.addoption(
        "--campaign", type=int, nargs="?", const=200, default=0, metavar="KILLS", help=_OPTIONS["campaign"]
    )


def pytest_configure(config: pytest.Config) -> None:
    for name, help_text in _OPTIONS.items():
        config.addinivalue_line("markers", f"{name}: {help_text}; runs only with --{name}")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for name in _OPTIONS:
        if not config.getoption(f"--{name}") and not config.getoption("--long"):
            skip = pytest.mark.skip(reason=f"runs only with --{name}")
            for item in items:
                if item.get_closest_marker(name):
                    item.add_marker(skip)
