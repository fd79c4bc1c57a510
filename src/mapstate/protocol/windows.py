"""Windows by time: which window a time is in, when a window is final, and what a ledger keeps of that.

Pure arithmetic on integers: microseconds since 1970 for a ``timestamp``, the column's own numbers for a ``bigint``.
A window is ``[start, start + length)``. The time axis is cut at every start and every end, and what lies between two
cuts is a pane: a row is in one pane, a window is a whole number of panes, and a slide has at most two. The driver, each
task and each reader use these rules; `mapstate.protocol.transitions` puts their results into the ledger. What looks
like a simplification of one usually is a counterexample: docs/windows.md lists those that are known.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, takewhile
from typing import Any, NamedTuple

import msgspec

NEVER = -(1 << 62)
"""The watermark before any row. It is earlier than every time that counts."""

LATEST = 1 << 61
"""The latest time, in units of the time column, with which a row counts; -`LATEST` is the earliest."""

MOST_PANES = 1000
"""The most panes of one window."""

MOST_RUNS = 500
"""The most runs of panes that a ledger names itself. More are in pages: `mapstate.maps.pane_index`."""

PAGE_SLIDES = 256
"""The slides of a page of panes, or the pages below a page; less than `MOST_RUNS`, so that each level has fewer."""

_MOST_HEIGHT = 9  # 256**8 slides are all times

Runs = tuple[tuple[int, int], ...]
"""Panes as inclusive ranges ``(first, last)`` of neighbours, by their starts, ascending."""

Named = Callable[[int, int | None], Iterable[int]]
"""The panes that may have records and start from one time on and before another one; None: without an end."""


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

    def before(self, pane: int) -> int:
        """The start of the pane before."""
        return pane - ((pane - self.offset) % self.slide or self.slide - self.cut)

    def start(self, time: int) -> int:
        """The start of the slide of a time."""
        return time - (time - self.offset) % self.slide

    def pages(self, level: int) -> Panes:
        """What the pages of a level span, as windows side by side; of level 0 these panes themselves."""
        span = self.slide * PAGE_SLIDES**level
        return Panes(span, span, self.offset) if level else self

    def panes(self, end: int) -> list[int]:
        """The panes of the window that ends there."""
        return list(every_pane(self, ((end - self.length, end),), until=end))

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

    @property
    def reach(self) -> int:
        """How far a window that a row is in may begin before it, or end behind it."""
        return max(self.length, self.slide)

    def fired_before(self, mark: int) -> int:
        """The first time at which a row is not late: of sessions, a row exactly a gap behind one belongs to it."""
        return mark + 1 if self.sessions else self.panes.floor(mark)

    @property
    def behind(self) -> int:
        """How far the watermark is behind the latest row. No row at the watermark of sessions is waited for."""
        return self.lag + self.sessions


class WindowCommit(msgspec.Struct, frozen=True, kw_only=True):
    """What a batch did to the windows of its state. It counts, and is rolled back, with the batch.

    ``watermark``  after the batch: no window that ends here or before changes any more
    ``before``     the watermark before the batch, by which its rows were late
    ``inputs``     by name, after the batch
    ``late``       rows that were in no window any more, or without a time
    ``between``    rows between two windows
    ``settled``    of sessions: the pane in which everything before it has been joined, see `mapstate.protocol.sessions`
    ``clock``      the driver's clock at the batch; 0 if unknown
    ``jump``       how far that clock had jumped within the run, which no window follows; 0 within a minute
    ``taken``      of rolling windows: the first and the last time with which a row of the batch counts
    ``newest``     of rolling windows: the latest time of all rows that count
    ``expired``    of a seed: rows that are in no window any more, as of its own watermark. In the JSON only if any
    """

    watermark: int = NEVER
    before: int = NEVER
    inputs: dict[str, Input] = {}
    late: int = 0
    between: int = 0
    settled: int = NEVER
    clock: int = 0
    jump: int = 0
    taken: tuple[int, int] | None = None
    newest: int | None = None
    expired: int = 0

    @property
    def safe(self) -> int:
        """The watermark that is left if the batch is taken back, also after an operator has put it back."""
        return min(self.before, self.watermark)

    def reported(self) -> dict[str, Any]:
        """What a `BatchReport` says of it."""
        mark = None if self.watermark == NEVER else self.watermark
        return {"rows_late": self.late, "rows_between": self.between, "watermark": mark}

    def without_rows(self) -> WindowCommit:
        """The commit of a batch after this one that moves nothing."""
        return msgspec.structs.replace(self, before=self.watermark, late=0, between=0, expired=0, taken=None)


class PaneChange(NamedTuple):
    """What an attempt did to panes: those that it wrote, and those that it purged to the end.

    ``width`` is the highest partition of its tasks, and one; ``named`` the `WindowsRecord`'s ``height`` and ``panes``
    after it, where pages are beside the ledger.
    """

    written: Collection[int] = ()
    purged: Collection[int] = ()
    width: int = 0
    named: tuple[int, Runs] | None = None


class WindowsRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What the ledger of a state with windows keeps beside its commits.

    ``panes``    where there may be records. It may name too many, never too few
    ``height``   the level of ``panes``: 0 for panes, else for pages that say which panes there are. It never sinks
    ``width``    the highest partition that has written a pane's index, and one
    ``purged``   windows that end here or before are gone. A begin moves it; back only as far as ``removed``
    ``removed``  no window that ends later has lost a record to a purge; windows that end before may be whole, too
    ``least``    the watermark of each later batch, at least: an operator's word, which outlasts a rollback
    ``apart``    of sessions: what ended here or before was fired by a mapstate for which rows a gap apart were two
    """

    definition: WindowDefinition
    panes: Runs = ()
    height: int = 0
    width: int = 0
    purged: int = NEVER
    least: int = NEVER
    removed: int = -NEVER  # in a ledger that was written before, unknown until a begin; so is the next
    apart: int = -NEVER

    def begun(self, committed: WindowCommit | None) -> WindowsRecord:
        """After a begin. The committed watermark decides what is purged, never the attempt's own rows."""
        mark = NEVER if committed is None else committed.watermark
        due = NEVER if mark == NEVER else self.definition.panes.floor(mark - self.definition.retention)
        grid, pages = self.definition.panes, self.definition.panes.pages(self.height)  # any pane of a page may be due
        spans = [(first, grid.before(pages.after(last))) for first, last in self.panes if due > self.purged]
        ends = [min(self._last_end(last), due) for first, last in spans if self._last_end(first) <= due]
        removed = max([min(self.removed, self.purged), *ends])
        return msgspec.structs.replace(self, purged=max(self.purged, due), removed=removed, apart=min(self.apart, mark))

    def advanced(self, to: int) -> WindowsRecord:
        """After an operator's word that the watermark is there at least."""
        return msgspec.structs.replace(self, least=to)

    def put_back(self, to: int) -> WindowsRecord:
        """After an operator has put the watermark back. What ends after ``removed`` is whole, and there again."""
        return msgspec.structs.replace(self, purged=min(self.purged, self.removed), least=min(self.least, to))

    def commit_put_back(self, done: WindowCommit, to: int, now: int) -> WindowCommit:
        """The same for a commit, by the operator's clock. ``before`` stays: what ends after ``to`` fires once more."""
        latest, settled = to + self.definition.behind, max(NEVER, self.purged - self.definition.length)
        return msgspec.structs.replace(
            done,
            watermark=min(done.watermark, to),
            inputs={name: Input(min(known.latest, latest), min(known.at, now)) for name, known in done.inputs.items()},
            settled=min(done.settled, settled),
            clock=min(done.clock, now),
        )

    def are_one(self, last: int, first: int) -> bool:
        """Of sessions: whether two rows of a key, with none between them, are of one session."""
        gap = self.definition.length
        return first - last < gap or (first - last == gap and first > self.apart)

    def _last_end(self, pane: int) -> int:
        """Where the last window ends that may have records in a pane."""
        return self.definition.panes.last_end(pane) + (self.definition.length if self.definition.sessions else 0)

    def is_expired(self, pane: int, committed: WindowCommit | None) -> bool:
        """Whether no reader needs a pane any more: its windows are all gone, or a later pane has its sessions."""
        if self.definition.sessions:
            return committed is not None and pane < committed.settled
        return self.definition.panes.last_end(pane) <= self.purged

    def due(self, committed: WindowCommit | None = None, named: Named | None = None) -> Iterator[int]:
        """The panes that are over: what an attempt after that commit may purge, in order."""
        until = (committed or WindowCommit()).settled if self.definition.sessions else self.purged
        panes = (named or self.named)(NEVER, until)
        return takewhile(lambda pane: self.is_expired(pane, committed), panes)

    def may_have(self, pane: int) -> bool:
        """Whether ``panes`` names a pane, by itself or by its page."""
        grid = self.definition.panes.pages(self.height)
        return any(first <= pane < grid.after(last) for first, last in self.panes)

    @property
    def named(self) -> Named:
        """What ``panes`` names, where no pages are beside it."""
        return partial(every_pane, self.definition.panes, self.panes)

    def committed(self, change: PaneChange) -> WindowsRecord:
        """After a commit."""
        panes, width = self.definition.panes, max(self.width, change.width)
        runs = runs_without(panes, runs_with(panes, self.panes, change.written), change.purged)
        height, runs = change.named or (self.height, runs)
        return msgspec.structs.replace(self, panes=runs, height=height, width=width)

    def has_flaw(self, keys: Sequence[Any], commits: Iterable[Any]) -> bool:
        """Whether this is damaged: no event leaves it in a ledger with these key columns and commits."""
        definition = self.definition
        bounds = [bound for span in self.panes for bound in span]
        small = (
            min(definition.length, definition.slide) < 1 or min(definition.lag, definition.retention, self.width) < 0
        )
        return (
            small
            or not keys
            or keys[0].type not in ("timestamp", "bigint")
            or bounds != sorted(bounds)
            or self.height not in range(_MOST_HEIGHT)
            or any(definition.panes.pages(self.height).pane(bound) != bound for bound in bounds)
            or any(commit.windows is None for commit in commits)
            or (definition.sessions and (definition.length != definition.slide or definition.by_clock))
        )

    def emptied(self) -> WindowsRecord:
        """After a reset: without anything that was counted."""
        return WindowsRecord(definition=self.definition, height=self.height, removed=NEVER, apart=NEVER)


def watermark(before: int, inputs: Mapping[str, Input], lag: int, now: int, *, idle: int | None = None) -> int:
    """The watermark after a batch. It never moves back, and waits for the slowest input, also for one without rows yet.

    An input that is ``idle`` goes on by the clock from where it was: so it neither holds the others back nor leaves its
    own last window open.
    """
    if not inputs or any(known.latest == NEVER for known in inputs.values()):
        return before
    silent = [0 if idle is None else max(0, now - known.at - idle) for known in inputs.values()]
    return max(before, min(known.latest + more - lag for known, more in zip(inputs.values(), silent, strict=True)))


def latest_without_hole(times: Iterable[tuple[int, int, int]], known: int, hole: int) -> int:
    """The latest time that no ``hole`` parts from ``known``, or from the median where that is `NEVER`.

    ``times`` are stretches without a hole: the first time, the last one, and how many there are.
    """
    ordered = sorted(times)
    if known == NEVER and ordered:
        counts = list(accumulate(count for _, _, count in ordered))
        known = ordered[bisect_right(counts, counts[-1] // 2)][0]
    for first, last, _ in ordered:
        known = max(known, last) if first - known <= hole else known
    return known


def every_pane(panes: Panes, runs: Runs, since: int = NEVER, until: int | None = None) -> Iterator[int]:
    """The panes of the runs that start from ``since`` on and before ``until``."""
    for first, last in runs:
        pane = max(first, panes.start(since))
        while pane <= last and (until is None or pane < until):
            if pane >= since:
                yield pane
            pane = panes.after(pane)


def fired_panes(record: WindowsRecord, done: WindowCommit, named: Named | None = None) -> list[tuple[int, list[int]]]:
    """The panes of the windows that a batch has fired and that are not gone, each with the ends of those windows."""
    panes = record.definition.panes
    low, high = max(panes.floor(done.before), record.purged), panes.floor(done.watermark)
    if low >= high:
        return []
    fired = []
    for pane in (named or record.named)(low - panes.length, high):
        ends = [end for end in panes.ends(pane) if low < end <= high]
        if ends:
            fired.append((pane, ends))
    return fired


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
    gone, kept = sorted(removed), []
    for first, last in runs:
        start = first
        for pane in gone[bisect_left(gone, first) : bisect_right(gone, last)]:
            if start < pane:
                kept.append((start, panes.before(pane)))
            start = panes.after(pane)
        if start <= last:
            kept.append((start, last))
    return tuple(kept)
