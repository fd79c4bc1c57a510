"""The stores that a service is tried on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from service import AT, ROWS, VISITS
from states import made_of_one_batch

from mapstate.schema import KeyField


@pytest.fixture(params=[pytest.param("sqlite", marks=pytest.mark.full), pytest.param("redis", marks=pytest.mark.redis)])
def url(request: Any, tmp_path: Path) -> str:
    """The URL of an empty store."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/s.db"
    found: str = request.getfixturevalue("redis_url")
    return found


@pytest.fixture
def visits(url: str) -> str:
    """The URL of a store with a state ``visits`` of one batch: `ROWS`, committed at `AT`."""
    made_of_one_batch(url, "visits", (KeyField("user_id", "string"),), VISITS, ROWS, AT)
    return url
