"""Measure a question of the benchmark: by turns, as ratios within a turn, with their spread."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

__all__ = ["ROOT", "Answer", "Goal", "Row", "by_turns", "ratios", "spread", "timed"]

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests/fixtures"))  # where the servers are


class Goal(msgspec.Struct, frozen=True):
    """``at most 1.15`` or ``at least 3``."""

    bound: str
    number: float

    def __str__(self) -> str:
        return f"at {self.bound} {self.number:g}"

    def reached(self, measured: float) -> bool:
        """Whether a figure meets the goal."""
        return measured <= self.number if self.bound == "most" else measured >= self.number


class Row(msgspec.Struct):
    """One line of the table. ``values`` has the ratio of each turn; empty if it was not measured, and why."""

    what: str
    against: str
    values: list[float]
    goal: Goal | None = None
    note: str = ""

    @property
    def measured(self) -> float:
        """The median."""
        return statistics.median(self.values)

    def line(self) -> str:
        """The line as Markdown."""
        goal = "" if self.goal is None else str(self.goal)
        if not self.values:
            return f"| {self.what} | {self.against} | {goal} | not measured | | {self.note} |"
        missed = "" if self.goal is None or self.goal.reached(self.measured) else ", missed"
        numbers = f"{self.measured:.2f}{missed} | {min(self.values):.2f} to {max(self.values):.2f}, {len(self.values)}"
        return f"| {self.what} | {self.against} | {goal} | {numbers} | {self.note} |"


class Answer(msgspec.Struct):
    """The answer to a question: its rows, the settings, and further results as Markdown."""

    rows: list[Row]
    how: str
    more: str = ""
    figures: dict[str, float] = {}


def timed(work: Callable[[], Any]) -> float:
    """Measure the seconds of ``work``."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def by_turns(ways: dict[str, Callable[[], Any]], turns: int, warm_up: int = 1) -> dict[str, list[float]]:
    """Seconds of each way in each turn. Each turn starts with another way; a way may return its own seconds."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    names = list(ways)
    for turn in range(-warm_up, turns):
        for at in range(len(names)):
            name = names[(at + turn) % len(names)]
            started = time.perf_counter()
            own = ways[name]()
            taken = own if isinstance(own, float) else time.perf_counter() - started
            if turn >= 0:
                seconds[name].append(taken)
    return seconds


def ratios(over: Iterable[float], under: Iterable[float]) -> list[float]:
    """The ratio of each turn."""
    return [a / b for a, b in zip(over, under, strict=True)]


def spread(values: Sequence[float], scale: float = 1.0) -> str:
    """Median, and least to greatest value."""
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{middle * scale:.2f} ({low * scale:.2f} to {high * scale:.2f})"


def table(head: str, lines: Iterable[Sequence[str]]) -> str:
    """Make a Markdown table; ``head`` has its columns, with bars between."""
    bars = "|".join("---" for _ in head.split("|"))
    return "\n".join([f"| {head} |", f"|{bars}|", *(f"| {' | '.join(line)} |" for line in lines)])
