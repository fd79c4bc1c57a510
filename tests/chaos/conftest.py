"""How often the chaos tests try each thing.

``--chaos subset``, which every `make test` runs, tries little and takes five minutes at most; `make chaos`
(``--chaos full``) tries all of it, what is marked ``full`` too.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

FULL_TIMEOUT = 4 * 3600


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """In the full run a test takes as long as its rounds do."""
    if config.getoption("--chaos") == "full":
        for item in items:
            if "chaos" in item.path.parts:
                item.add_marker(pytest.mark.timeout(FULL_TIMEOUT))


@pytest.fixture
def store_at(request: Any, tmp_path: Path) -> Callable[[str], str]:
    """``store_at("packed")``: the URL of an empty store, on SQLite, on Redis, or there with packed records."""

    def url(kind: str) -> str:
        if kind == "sqlite":
            return f"sqlite:///{tmp_path}/state.db"
        more = {"redis": "", "packed": "&layout=packed&buckets=40"}[kind]
        return f"{request.getfixturevalue('redis_url')}{more}"

    return url
