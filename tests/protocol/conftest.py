"""Long searches run only when asked for: ``pytest -m long`` or ``pytest --long``."""

from __future__ import annotations

import pytest


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "long: takes minutes; run with -m long")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    wanted = "long" in (config.getoption("-m") or "") or config.getoption("--long", default=False)
    for item in items:
        if item.get_closest_marker("long") and not wanted:
            item.add_marker(pytest.mark.skip(reason="a long search; run it with -m long"))
