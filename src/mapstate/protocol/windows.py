"""Windows by time: which window a time is in, when a window is final, and what a ledger keeps of that.

Pure arithmetic on integers: microseconds since 1970 for a ``timestamp``, the column's own numbers for a ``bigint``.
A window is ``[start, start + length)``. The time axis is cut at every start and every end, and what lies between two
cuts is a pane: a row is in one pane, a window is a whole number of panes, and a slide has at most two. The driver, each
task and each reader use these rules; `mapstate.protocol.transitions` puts their results into the ledger. What looks
like a simplification of one usually is a counterexample: docs/windows.md lists those that are known.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, NamedTuple

import msgspec

from mapstate.errors import DataError

__all__ = [
    "LATEST",
    "MOST_PANES",
    "MOST_RUNS",
    "NEVER",
    "Input",
    "PaneChange",
    "Panes",
    "Runs",
    "WindowCommit",
    "WindowDefinition",
    "WindowsRecord",
    "every_pane",
    "fired_panes",
    "runs_with",
    "runs_without",
    "watermark",
]

NEVER = -(1 << 62)
"""The watermark before any row. It is earlier than every time that counts."""

LATEST = 1 << 61
"""The latest time, in units of the time column, with which a row counts; -`LATEST` is the earliest."""

MOST_PANES = 1000
"""The most panes of one window."""

MOST_RUNS = 10_000
"""The most runs of panes in one ledger."""

_MOST_SLIDES = 10_000_000  # of one run: more is damage, because each pane was written

Runs = tuple[tuple[int, int], ...]
"""Panes as inclusive ranges ``(first, last)`` of neighbours, by their starts, ascending."""


@dataclass(frozen=True)
class Panes:
    """Windows of ``length``, of which one starts at every multiple of ``slide`` from ``offset`` on.

    With ``slide > length`` there are times between windows.
    """

    length: int
    slide: int
    offset: int = 0

    def next_end(self, time: int) -> int:
        """The first end of a window after a time: where the first window of a row ends, if it is in any."""
        first = self.offset + self.length
        return first + ((time - first) // self.slide + 1) * self.slide

    def floor(self, time: int) -> int:
        """The last end of a window at or before a time."""
        return self.next_end(time) - self.slide

    @property
    def has_gaps(self) -> bool:
        """Whether there are times between windows."""
        return self.length < self.slide

    @property
    def cut(self) -> int:
        """Where inside of a slide the second pane begins; 0 if a slide is one pane."""
        return self.length % self.slide if self.length > self.slide else 0

    def pane(self, time: int) -> int | None:
        """The start of a row's pane; None between windows."""
        inside = (time - self.offset) % self.slide
        if inside >= self.length:
            return None
        return time - inside + (self.cut if self.cut and inside >= self.cut else 0)

    def after(self, pane: int) -> int:
        """The start of the next pane."""
        inside = (pane - self.offset) % self.slide
        return pane + (self.cut if inside < self.cut else self.slide - inside)

    def panes(self, end: int) -> list[int]:
        """The panes of the window that ends there."""
        found, pane = [], end - self.length
        while pane < end:
            found.append(pane)
            pane = self.after(pane)
        return found

    def ends(self, pane: int) -> range:
        """The ends of the windows that a pane is in."""
        first = self.next_end(pane)
        return range(first, pane + self.length + 1, self.slide)

    def last_end(self, pane: int) -> int:
        """The end of the last window that a pane is in."""
        return self.ends(pane)[-1]


class Input(msgspec.Struct, frozen=True):
    """What is known of one input of a stream.

    ``latest``  its latest event time that moves the watermark; `NEVER` before one
    ``at``      when rows last came, by the driver's clock
    """

    latest: int = NEVER
    at: int = 0

    def noted(self, latest: int | None, now: int, *, has_rows: bool) -> Input:
        """After a batch, of whose rows ``latest`` is the latest time that moves the watermark; None without one."""
        if not has_rows:
            return self
        return Input(self.latest if latest is None else max(self.latest, latest), now)


class WindowDefinition(msgspec.Struct, frozen=True, kw_only=True):
    """The windows of a state. ``lag``, ``retention`` and ``idle`` may change; the others stay.

    ``by_clock``   a row's time is that of its batch, by the driver's clock
    ``sessions``   the windows are sessions, whose gap is ``length`` and ``slide``; see `mapstate.protocol.sessions`
    ``lag``        how far behind the latest row a row may be
    ``retention``  how far the watermark passes a window's end before the window is removed
    ``idle``       an input without rows for longer is taken to go on by the clock; None: never
    """

    length: int
    slide: int
    offset: int = 0
    by_clock: bool = False
    sessions: bool = False
    lag: int = 0
    retention: int = 0
    idle: int | None = None

    @property
    def panes(self) -> Panes:
        """The arithmetic of these windows."""
        return Panes(self.length, self.slide, self.offset)

    def is_same(self, other: WindowDefinition) -> bool:
        """Whether records of the one can be those of the other."""
        return (self.panes, self.by_clock, self.sessions) == (other.panes, other.by_clock, other.sessions)

    @property
    def has_parts(self) -> bool:
        """Whether a window of a key can be several records."""
        return self.sessions or self.length > self.slide

    def fired_before(self, mark: int) -> int:
        """The last end that has fired at a watermark: earlier rows are late."""
        return mark if self.sessions else self.panes.floor(mark)


class WindowCommit(msgspec.Struct, frozen=True, kw_only=True):
    """What a batch did to the windows of its state. It counts, and is rolled back, with the batch.

    ``watermark``  after the batch: no window that ends here or before changes any more
    ``before``     the watermark before the batch, by which its rows were late
    ``inputs``     by name, after the batch
    ``late``       rows that were in no window any more, or without a time
    ``between``    rows between two windows
    ``settled``    of sessions: the pane in which everything before it has been joined, see `mapstate.protocol.sessions`
    """

    watermark: int = NEVER
    before: int = NEVER
    inputs: dict[str, Input] = {}
    late: int = 0
    between: int = 0
    settled: int = NEVER

    def reported(self) -> dict[str, Any]:
        """What a `BatchReport` says of it."""
        mark = None if self.watermark == NEVER else self.watermark
        return {"rows_late": self.late, "rows_between": self.between, "watermark": mark}

    def without_rows(self) -> WindowCommit:
        """The commit of a batch after this one that moves nothing."""
        return WindowCommit(watermark=self.watermark, before=self.watermark, inputs=self.inputs, settled=self.settled)


class PaneChange(NamedTuple):
    """What an attempt did to panes: those that it wrote, and those that it purged to the end.

    ``width`` is the highest partition of its tasks, and one.
    """

    written: Collection[int] = ()
    purged: Collection[int] = ()
    width: int = 0


class WindowsRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What the ledger of a state with windows keeps beside its commits.

    ``panes``   where there may be records. It may name too many, never too few
    ``width``   the highest partition that has written a pane's index, and one
    ``purged``  windows that end here or before are gone. A begin moves it, and never back
    ``least``   the watermark of each later batch, at least: an operator's word. It only rises, and outlasts a rollback
    """

    definition: WindowDefinition
    panes: Runs = ()
    width: int = 0
    purged: int = NEVER
    least: int = NEVER

    def begun(self, committed: WindowCommit | None) -> WindowsRecord:
        """After a begin. The committed watermark decides what is purged, never the attempt's own rows."""
        if committed is None or committed.watermark == NEVER:
            return self
        definition = self.definition
        due = definition.panes.floor(committed.watermark - definition.retention)
        return self if due <= self.purged else msgspec.structs.replace(self, purged=due)

    def is_over(self, pane: int, committed: WindowCommit | None) -> bool:
        """Whether no reader needs a pane any more: its windows are all gone, or a later pane has its sessions."""
        if self.definition.sessions:
            return committed is not None and pane < committed.settled
        return self.definition.panes.last_end(pane) <= self.purged

    def due(self, committed: WindowCommit | None = None) -> Iterator[int]:
        """The panes that are over: what an attempt after that commit may purge, in order."""
        panes = every_pane(self.definition.panes, self.panes)
        return takewhile(lambda pane: self.is_over(pane, committed), panes)

    def committed(self, change: PaneChange) -> WindowsRecord:
        """After a commit. Raises DataError where the panes are of too many different times."""
        panes = self.definition.panes
        runs = runs_without(panes, runs_with(panes, self.panes, change.written), change.purged)
        if len(runs) > MOST_RUNS or any(_slides(self.definition, run) > _MOST_SLIDES for run in runs):
            raise DataError(
                f"{len(runs)} runs of windows would be open, from {runs[0][0]} to {runs[-1][1]}. A ledger names "
                f"{MOST_RUNS} runs of {_MOST_SLIDES} windows at most. Nothing was committed. Leave out rows with times "
                "that are wrong; or take a shorter lag or retention, or longer windows."
            )
        return msgspec.structs.replace(self, panes=runs, width=max(self.width, change.width))

    def has_flaw(self, keys: Sequence[Any], commits: Iterable[Any]) -> bool:
        """Whether this is damaged: no event leaves it in a ledger with these key columns and commits."""
        definition = self.definition
        slides = (_slides(definition, run) for run in self.panes)
        bounds = [bound for span in self.panes for bound in span]
        small = (
            definition.length < 1 or definition.slide < 1 or min(definition.lag, definition.retention, self.width) < 0
        )
        return (
            small
            or not keys
            or keys[0].type not in ("timestamp", "bigint")
            or bounds != sorted(bounds)
            or any(definition.panes.pane(bound) != bound for bound in bounds)
            or max(slides, default=0) > _MOST_SLIDES
            or len(self.panes) > MOST_RUNS
            or any(one.windows is None for one in commits)
            or (definition.sessions and (definition.length != definition.slide or definition.by_clock))
        )

    def emptied(self) -> WindowsRecord:
        """After a reset: without anything that was counted."""
        return WindowsRecord(definition=self.definition)


def watermark(before: int, inputs: Mapping[str, Input], lag: int, now: int, *, idle: int | None = None) -> int:
    """The watermark after a batch. It never moves back, and waits for the slowest input, also for one without rows yet.

    An input that is ``idle`` goes on by the clock from where it was: so it neither holds the others back nor leaves its
    own last window open.
    """
    if not inputs or any(known.latest == NEVER for known in inputs.values()):
        return before
    silent = [0 if idle is None else max(0, now - known.at - idle) for known in inputs.values()]
    return max(before, min(known.latest + more - lag for known, more in zip(inputs.values(), silent, strict=True)))


def every_pane(panes: Panes, runs: Runs, since: int = NEVER, until: int | None = None) -> Iterator[int]:
    """The panes of the runs that start from ``since`` on and before ``until``."""
    for first, last in runs:
        pane = first
        if pane < since:
            if last < since:
                continue
            pane = _at_or_after(panes, first, since)
        while pane <= last and (until is None or pane < until):
            yield pane
            pane = panes.after(pane)


def _at_or_after(panes: Panes, first: int, time: int) -> int:
    """The first pane from ``time`` on. ``first`` is a pane before it."""
    pane = first + (time - first) // panes.slide * panes.slide
    while pane < time:
        pane = panes.after(pane)
    return pane


def fired_panes(record: WindowsRecord, done: WindowCommit) -> list[tuple[int, list[int]]]:
    """The panes of the windows that a batch has fired and that are not gone, each with the ends of those windows."""
    panes = record.definition.panes
    low, high = max(panes.floor(done.before), record.purged), panes.floor(done.watermark)
    if low >= high:
        return []
    found = []
    for pane in every_pane(panes, record.panes, low - panes.length, high):
        ends = [end for end in panes.ends(pane) if low < end <= high]
        if ends:
            found.append((pane, ends))
    return found


def runs_with(panes: Panes, runs: Runs, added: Iterable[int]) -> Runs:
    """The runs with more panes."""
    out: list[tuple[int, int]] = []
    for first, last in sorted([*runs, *((pane, pane) for pane in set(added))]):
        if out and first <= panes.after(out[-1][1]):
            out[-1] = out[-1][0], max(out[-1][1], last)
        else:
            out.append((first, last))
    return tuple(out)


def runs_without(panes: Panes, runs: Runs, removed: Iterable[int]) -> Runs:
    """The runs without some panes."""
    gone = set(removed)
    if not gone:
        return runs
    kept: list[tuple[int, int]] = []
    for first, last in runs:
        start: int | None = None
        pane, before = first, first
        if not any(first <= other <= last for other in gone):
            kept.append((first, last))
            continue
        while pane <= last:
            if pane in gone:
                if start is not None:
                    kept.append((start, before))
                start = None
            elif start is None:
                start = pane
            before, pane = pane, panes.after(pane)
        if start is not None:
            kept.append((start, before))
    return tuple(kept)


def _slides(definition: WindowDefinition, run: tuple[int, int]) -> int:
    return (run[1] - run[0]) // max(1, definition.slide)
