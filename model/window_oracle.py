"""What is right of windows: rows of the batches that count, and brute force. It knows no panes and no records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mapstate.protocol.windows import NEVER, WindowDefinition

__all__ = ["SETTINGS", "USERS", "Batch", "Fired", "Oracle", "Row", "Setting"]

USERS = "xyz"


class Row(NamedTuple):
    """``name`` tells it from all other rows; a value is a list of names, and so says what is in it."""

    at: int
    user: str
    source: str
    name: int


class Batch(NamedTuple):
    """What the attempt that counts had of a batch. ``plan`` is Spark's, ``least`` an operator's.

    With ``back`` it is no batch: an operator has put the watermark back to there. Nor is it if it ``corrects``: then
    none of its rows is late, and none moves the watermark.
    """

    batch_id: int
    rows: tuple[Row, ...]
    now: int
    plan: int
    least: int
    back: int | None = None
    corrects: bool = False


Fired = tuple[int, str, tuple[int, ...]]
"""The end of a window, a user, and the names of the rows."""


@dataclass(frozen=True)
class Setting:
    """The windows of a world, and the kind of its store; see `model.world.World`."""

    length: int
    slide: int
    offset: int = 0
    lag: int = 0
    retention: int = 0
    idle: int | None = None
    sources: tuple[str, ...] = ("",)
    ahead: int = 10**6
    store: str = "fenced"
    sessions: bool = False
    most_runs: int = 500

    @property
    def definition(self) -> WindowDefinition:
        """As a job declares it."""
        return WindowDefinition(
            length=self.length,
            slide=self.slide,
            offset=self.offset,
            lag=self.lag,
            retention=self.retention,
            idle=self.idle,
            sessions=self.sessions,
        )


class Oracle:
    """What is right, from the rows of the batches that count. It knows no panes, no ledger and no records."""

    def __init__(self, setting: Setting, batches: Sequence[Batch]) -> None:
        self.setting = setting
        self.mark = NEVER
        self.late: list[Row] = []
        self.late_of_last: list[Row] = []
        self.fired: list[Fired] = []
        self._kept: list[Row] = []
        latest = dict.fromkeys(setting.sources, NEVER)
        since = dict.fromkeys(setting.sources, 0)
        before = NEVER
        for batch in batches:
            if batch.corrects:
                self._kept += batch.rows
                self.fired = [one for one in self.windows() if before < one[0] <= self.last_end(self.mark)]
                continue
            if batch.back is not None:
                self.mark = min(self.mark, batch.back)
                latest = {s: min(at, batch.back + setting.lag + setting.sessions) for s, at in latest.items()}
                self.fired = [one for one in self.fired if one[0] <= self.last_end(self.mark)]
                continue
            before = self.last_end(self.mark)
            self.late_of_last = [row for row in batch.rows if row.at < before + setting.sessions]
            self.late += self.late_of_last
            self._kept += [row for row in batch.rows if row.at >= before + setting.sessions]
            for source in setting.sources:
                own = [row.at for row in batch.rows if row.source == source]
                near = [min(at, batch.now) for at in own if at <= batch.now + setting.ahead]
                latest[source] = max([latest[source], *near])
                since[source] = batch.now if own else since[source]
            if NEVER not in latest.values():
                waited = 0 if setting.idle is None else setting.idle
                silent = {s: max(0, batch.now - since[s] - waited) * (setting.idle is not None) for s in latest}
                self.mark = max(self.mark, min(latest[s] + silent[s] - setting.lag - setting.sessions for s in latest))
            self.mark = max(self.mark, batch.least)
            self.fired = [one for one in self.windows() if before < one[0] <= self.last_end(self.mark)]

    def last_end(self, time: int) -> int:
        """The last end of a window at or before a time. A session may end at any time."""
        if self.setting.sessions:
            return time
        grid = (self.setting.offset + self.setting.length) % self.setting.slide
        return next(end for end in range(time, time - self.setting.slide, -1) if end % self.setting.slide == grid)

    def ends(self, at: int) -> list[int]:
        """The ends of the windows that a time is in."""
        grid = (self.setting.offset + self.setting.length) % self.setting.slide
        return [end for end in range(at + 1, at + self.setting.length + 1) if end % self.setting.slide == grid]

    def windows(self) -> list[Fired]:
        """All windows with rows."""
        found: dict[tuple[int, str], list[int]] = {}
        if self.setting.sessions:
            return self._sessions()
        for row in self._kept:
            for end in self.ends(row.at):
                found.setdefault((end, row.user), []).append(row.name)
        return sorted((end, user, tuple(sorted(names))) for (end, user), names in found.items())

    def _sessions(self) -> list[Fired]:
        """Rows of a user, none of them further than the gap from the next one."""
        found: list[Fired] = []
        open_until: dict[str, int] = {}
        for row in sorted(self._kept):
            gap = self.setting.length
            names: tuple[int, ...] = (row.name,)
            if row.user in open_until and row.at <= open_until[row.user]:
                session = next(one for one in found if one[:2] == (open_until[row.user], row.user))
                found.remove(session)
                names = (*session[2], row.name)
            open_until[row.user] = row.at + gap
            found.append((row.at + gap, row.user, tuple(sorted(names))))
        return sorted(found)


SETTINGS = (
    Setting(10, 10),
    Setting(10, 10, 3, lag=5, retention=10),
    Setting(20, 10, lag=3, ahead=0, store="filtered"),
    Setting(20, 10, retention=15, most_runs=1),
    Setting(9, 6, 1, lag=2, store="cluster"),
    Setting(6, 9, lag=2, retention=5, most_runs=2),
    Setting(2, 2, lag=2, retention=20, most_runs=2),
    Setting(3, 2, retention=9, most_runs=1, store="cluster"),
    Setting(2, 2, retention=4, most_runs=1, store="filtered"),
    Setting(10, 10, lag=2, sources=("a", "b"), ahead=3, store="filtered"),
    Setting(10, 5, lag=2, sources=("a", "b"), idle=10),
    Setting(10, 10, lag=1, store="cluster"),
    Setting(12, 12, lag=4, sessions=True),
    Setting(9, 9, lag=2, retention=5, sessions=True, store="filtered", most_runs=2),
    Setting(3, 3, lag=2, retention=5, sessions=True, most_runs=1),
    Setting(14, 14, sessions=True, store="cluster"),
)
