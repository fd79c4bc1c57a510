"""The table of what the chaos tests tried, at the end of a run.

A plugin of the whole run, not of tests/chaos: the process that writes the table need not be one that ran those tests.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

TABLE = pytest.StashKey[dict[str, Counter[str]]]()
TRIED = "chaos: tried"  # a property of a test's report


@pytest.fixture
def tally(request: pytest.FixtureRequest) -> Callable[..., None]:
    """``tally("SIGKILL of the driver", kills=1, checks=12)`` adds to the table at the end of the run.

    To be called once something was tried *and found right*.
    """
    tried = request.node.user_properties
    return lambda what, **counts: tried.append((TRIED, (what, counts)))


class _Collector:
    """Reports reach it from every process that runs tests."""

    def __init__(self, table: dict[str, Counter[str]]) -> None:
        self._table = table

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "teardown":  # the last report of a test, which has all of it
            return
        for name, value in report.user_properties:
            if name == TRIED:
                what, counts = value
                self._table.setdefault(what, Counter()).update(counts)


def pytest_configure(config: pytest.Config) -> None:
    """Begins an empty table."""
    config.pluginmanager.register(_Collector(config.stash.setdefault(TABLE, {})))


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """The table, as docs/guarantees.md has it."""
    table = config.stash[TABLE]
    if not table:
        return
    terminalreporter.section(f"chaos: {config.getoption('--chaos')}")
    terminalreporter.write_line("| what was tried and found right | how often |\n|---|---|")
    for what, counts in sorted(table.items()):
        numbers = ", ".join(f"{number:,} {unit.replace('_', ' ')}" for unit, number in counts.items())
        terminalreporter.write_line(f"| {what} | {numbers} |")
