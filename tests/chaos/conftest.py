"""How often the chaos tests try each thing, and the table of what was tried.

``--chaos subset``, which every `make test` runs, tries little and takes five minutes at most; `make chaos`
(``--chaos full``) tries all of it, what is marked ``full`` too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

TALLY = pytest.StashKey[dict[str, Counter[str]]]()
FULL_TIMEOUT = 4 * 3600


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """In the full run a test takes as long as its rounds do."""
    if config.getoption("--chaos") == "full":
        for item in items:
            if "chaos" in item.path.parts:
                item.add_marker(pytest.mark.timeout(FULL_TIMEOUT))


@pytest.fixture
def rounds(request: pytest.FixtureRequest) -> Callable[[int, int], int]:
    """``rounds(few, many)``: few in the subset, many in the full run."""
    full = request.config.getoption("--chaos") == "full"
    return lambda few, many: many if full else few


@pytest.fixture
def tally(request: pytest.FixtureRequest) -> Callable[..., None]:
    """``tally("SIGKILL of the driver", kills=1, checks=12)`` adds to the table at the end of the run.

    To be called once something was tried *and found right*.
    """
    table = request.config.stash.setdefault(TALLY, {})

    def add(what: str, **counts: int) -> None:
        table.setdefault(what, Counter()).update(counts)

    return add


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """The table, as docs/guarantees.md has it."""
    table = config.stash.get(TALLY, {})
    if not table:
        return
    terminalreporter.section(f"chaos: {config.getoption('--chaos')}")
    terminalreporter.write_line("| what was tried and found right | how often |\n|---|---|")
    for what, counts in sorted(table.items()):
        numbers = ", ".join(f"{number:,} {unit.replace('_', ' ')}" for unit, number in counts.items())
        terminalreporter.write_line(f"| {what} | {numbers} |")
