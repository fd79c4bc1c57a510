"""Fixtures for tests of a job: ``pytest_plugins = ["mapstate.testing.plugin"]`` in a test file or in conftest.py."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def spark() -> Iterator[Any]:
    """A Spark session for all tests: the active one, or a small one on this machine, which ends with the tests."""
    from pyspark.sql import SparkSession

    active = SparkSession.getActiveSession()
    session = active or SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
    yield session
    if active is None:
        session.stop()


@pytest.fixture
def store(tmp_path: Path) -> str:
    """The URL of a store without states, of this test alone: a SQLite file, which executors share."""
    return f"sqlite:///{tmp_path}/states.db"
