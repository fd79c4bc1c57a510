"""Windows for a reader: the watermark, the windows of one key, and the keys of one window."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

from mapstate.aggregators.fields import Fields
from mapstate.aggregators.results import joined, joins_of
from mapstate.errors import (
    DataError,
    StaleBatchError,
    StoreLostError,
    UsageError,
    WindowGoneError,
    of_key,
    window_in_range,
)
from mapstate.keys import Key, KeyCodec, StoreKey
from mapstate.maps.pane_index import PaneKeys, PanePages, batched, index_codec, index_lost, key_pages, slices
from mapstate.protocol.ledger_record import LedgerRecord
from mapstate.protocol.sessions import FIRST, LAST, piece_of, sessions_of
from mapstate.protocol.ways_back import goes_on
from mapstate.protocol.windows import NEVER, WindowsRecord
from mapstate.reader.committed import CommittedReads, Opened
from mapstate.reader.times import Time, Watermark, clamped, number_of_caller, shown_time, watermark_of
from mapstate.schema import time_of

WindowPage = list[tuple[Key, dict[str, Any]]]

_TRIES = 1000
_PAGE = 1000  # records


class Window(NamedTuple):
    """One window of one key: ``[start, end)``. A ``final`` one changes only if its batch is rolled back, or corrected.

    ``value`` has the aggregates by name. Of a session, ``start`` is its first row, ``end`` a gap after its last one.
    """

    start: Time
    end: Time
    value: dict[str, Any]
    final: bool


class _ChangedError(Exception):
    """Another ledger is there than the one that names what is read."""

    def __init__(self, opened: Opened) -> None:
        self.opened = opened


class WindowReads:
    """The reads of windows, for one call of a reader."""

    def __init__(self, reads: CommittedReads) -> None:
        self._reads = reads
        self._seen: LedgerRecord | None = None  # which `of_window` has read last

    def watermark(self) -> Watermark:
        ledger = self._reads.opened(newest=True).ledger
        kind = self._time_type(ledger) if ledger.rolling is None else ledger.rolling.definition.type
        return watermark_of(self._reads.last_windows(ledger), self._reads.final_mark(ledger), kind)

    def of_key(self, key: Any, since: Time | None, until: Time | None) -> tuple[list[Window], LedgerRecord]:
        rest = tuple(key) if isinstance(key, tuple | list) else (key,)
        known = self._reads.opened(newest=True)
        kind = self._time_type(known.ledger)
        low = None if since is None else number_of_caller(since, kind, self._reads.state)
        high = None if until is None else number_of_caller(until, kind, self._reads.state)
        text = KeyCodec(known.ledger.keys[1:]).encode(rest)  # a key of other columns is an error, also without a pane
        known, panes = self._panes_of(known, low, high)
        for _ in range(_TRIES):
            texts = known.keys.encode_all([(time_of(pane, kind), *rest) for pane in panes])
            opened, values = self._reads.read_keys(known, texts) if texts else (known, [])
            if not texts:
                self._reads.check_scanned()
            is_same = opened.keys is known.keys  # else the texts are of another schema
            known, now = self._panes_of(opened, low, high)
            if is_same and now == panes and known is opened:
                return self._windows(opened, dict(zip(panes, values, strict=True)), text, low, high), opened.ledger
            panes = now  # a batch has opened or removed windows meanwhile
        raise self._changed_too_often()

    def named(self, opened: Opened | None, since: int, until: int | None) -> tuple[Opened, list[int]]:
        """The panes of `Named`, with the ledger as of which they are: this one, or a newer one."""
        opened = opened or self._reads.opened(newest=True)
        for _ in range(_TRIES):
            pages = PanePages(self._reads.state, self._record(opened.ledger), partial(self._index, opened))
            try:
                return opened, list(pages.named(since, until))
            except _ChangedError as changed:
                opened = changed.opened
        raise self._changed_too_often()

    def _index(self, opened: Opened, keys: list[str]) -> list[Any]:
        now, values = self._reads.read(list(keys), codec=index_codec(opened.ledger.serializer, self._reads.state))
        if now.data != opened.data:
            raise _ChangedError(now)
        return values

    def of_window(self, end: Time) -> Iterator[WindowPage]:
        opened = self._reads.opened(newest=True)
        windows = self._record(opened.ledger)
        if windows.definition.sessions:
            raise UsageError(
                f"the windows of state {self._reads.state!r} are sessions, each of which ends at a time of its own. "
                "Nothing was read. windows(key) has those of a key, firedWindowsStream() all that end."
            )
        number = number_of_caller(end, self._time_type(opened.ledger), self._reads.state)
        grid = windows.definition.panes
        if grid.floor(number) != number:
            raise UsageError(
                f"no window of state {self._reads.state!r} ends at {end}. Nothing was read. The last end before it is "
                f"{shown_time(grid.floor(number), self._time_type(opened.ledger))}."
            )
        opened, panes_of = self.named(opened, number - grid.length, number)
        self._ensure_kept(opened.ledger, number)  # as of which the panes are named
        panes = [pane for pane in grid.panes(number) if pane in panes_of]
        step = max(1, _PAGE // max(1, len(panes)))
        seen: set[str] = set()
        for pane in panes:
            for rests in self._rests(opened, pane, number):
                new = [rest for rest in rests if rest not in seen]
                if len(panes) > 1:
                    seen.update(new)
                yield from filter(None, (self._page(number, panes, some) for some in batched(new, step)))

    def _page(self, end: int, panes: Sequence[int], rests: Sequence[str]) -> WindowPage:
        keys = PaneKeys(self._reads.opened().ledger)
        texts = [text for pane in panes for text in keys.of(keys.text(pane), rests)]
        opened, values = self._reads.read(texts)
        self._ensure_kept(opened.ledger, end)
        joins = self._joins(opened) if len(panes) > 1 else None
        page: WindowPage = []
        codec = KeyCodec(opened.ledger.keys[1:])
        for rest, values_of in zip(rests, zip(*batched(values, len(rests)), strict=True), strict=True):
            parts = [value for value in values_of if value is not None]
            if parts:
                blocks = opened.codec.blocks
                for key, of_key in ({rest: parts} if blocks is None else blocks.by_key(parts)).items():
                    (fields,) = opened.fields.named([of_key[0] if joins is None else self._joined(joins, of_key, key)])
                    page.append((codec.decode(key) if opened.ledger.keys[1:] else (), fields or {}))
            elif end <= self._reads.final_mark(opened.ledger):
                raise StoreLostError(
                    f"state {self._reads.state!r}: the pane index names the key {rest!r}, which has no record: it was "
                    "evicted, expired or deleted. Restore the store.",
                    state=self._reads.state,
                )
        return page

    def _rests(self, opened: Opened, pane: int, end: int) -> Iterator[list[str]]:
        codec = index_codec(opened.ledger.serializer, opened.ledger.state)

        def read(keys: list[str]) -> list[Any]:
            now, values = self._reads.read(list(keys), codec=codec)
            self._ensure_kept(now.ledger, end)  # else an index that a purge has removed would be a window without keys
            return values

        def lost(chunk: str) -> None:
            is_final = end <= self._reads.final_mark(self._reads.opened().ledger)
            if is_final and not self._reads.latest:
                raise index_lost(self._reads.state, chunk)

        for part in slices(read, [PaneKeys(opened.ledger).text(pane)], self._record(opened.ledger).width):
            yield from key_pages(read, part, lost)

    def _windows(
        self, opened: Opened, values: dict[int, Any], key: StoreKey, low: int | None, high: int | None
    ) -> list[Window]:
        windows = self._record(opened.ledger)
        low = windows.purged if low is None else max(low, windows.purged)
        if windows.definition.sessions:
            return self._sessions(opened, list(values.values()), key, low, high)
        grid, kind = windows.definition.panes, self._time_type(opened.ledger)
        mark = self._reads.final_mark(opened.ledger)
        panes: dict[int, list[Any]] = {}
        for pane, value in values.items():
            for end in grid.ends(pane) if value is not None else ():
                if low < end and (high is None or end <= high):
                    panes.setdefault(end, []).append(value)
        joins = self._joins(opened) if grid.length > grid.slide and panes else None
        ends = sorted(panes)
        joined_values = [panes[end][0] if joins is None else self._joined(joins, panes[end], key) for end in ends]
        return [
            Window(clamped(end - grid.length, kind), clamped(end, kind), value or {}, final=end <= mark)
            for end, value in zip(ends, opened.fields.named(joined_values), strict=True)
        ]

    def _sessions(
        self, opened: Opened, values: Sequence[Any], key: StoreKey, low: int, high: int | None
    ) -> list[Window]:
        windows, kind = self._record(opened.ledger), self._time_type(opened.ledger)
        gap, mark = windows.definition.length, self._reads.final_mark(opened.ledger)
        sessions = []
        pieces = map(piece_of(opened.ledger.fields), (value for value in values if value is not None))
        for session in sessions_of(pieces, windows):
            end = session[-1].last + gap
            if end <= low or (high is not None and end > high):
                continue
            parts = [piece.value for piece in session]
            (shown,) = opened.fields.named(
                [self._joined(self._joins(opened), parts, key) if len(parts) > 1 else parts[0]]
            )
            fields = {name: value for name, value in (shown or {}).items() if name not in (FIRST, LAST)}
            sessions.append(Window(clamped(session[0].first, kind), clamped(end, kind), fields, final=end <= mark))
        return sessions

    def _panes_of(self, opened: Opened, low: int | None, high: int | None) -> tuple[Opened, list[int]]:
        windows = self._record(opened.ledger)
        if windows.definition.sessions:  # one may have rows in any of them
            low, high = self._reads.last_windows(opened.ledger).settled, None
        else:
            low = max(windows.purged, NEVER if low is None else low) - windows.definition.length
        opened, panes = self.named(opened, low, high)
        windows, done = self._record(opened.ledger), self._reads.last_windows(opened.ledger)
        return opened, [pane for pane in panes if not windows.is_expired(pane, done)]

    def _joined(self, joins: Fields, values: Sequence[Any], key: StoreKey) -> Any:
        """The values of a key's panes together. Raises the errors of `joined`, with the key."""
        try:
            with window_in_range("pane", "Cast the column to one with room, and give the state another name."):
                return joined(joins, values)
        except DataError as error:
            raise of_key(error, self._reads.state, key) from error

    def _joins(self, opened: Opened) -> Fields:
        return joins_of(opened.ledger.fields, self._reads.aggregators)

    def _ensure_kept(self, ledger: LedgerRecord, end: int) -> None:
        """Raise where the window is gone, or where this ledger of the read does not count what the one before did."""
        seen = self._seen or ledger
        self._reads.check_same_state(seen, ledger)
        windows = self._record(ledger)
        if end <= windows.purged:
            kind = self._time_type(ledger)
            raise WindowGoneError(
                f"the window of state {self._reads.state!r} that ends at {clamped(end, kind)} is gone: it is past its "
                f"retention. Windows that end after {shown_time(windows.purged, kind)} are there. A longer retention= "
                "keeps them longer. See docs/windows.md#reading-windows",
                state=self._reads.state,
            )
        if not goes_on(seen, ledger) or ledger.operations != seen.operations:
            raise StaleBatchError(
                f"a batch of state {self._reads.state!r} was rolled back or planned anew, its watermark put back, or "
                "the state was corrected or made to forget a key, while a window was read. Read the window again.",
                state=self._reads.state,
            )
        self._seen = ledger

    def _record(self, ledger: LedgerRecord) -> WindowsRecord:
        if ledger.windows is None:
            raise UsageError(
                f"state {self._reads.state!r} has no windows that fire by time: get() and multi_get() read its keys, "
                "also those with windows by count or with rolling windows"
            )
        return ledger.windows

    def _time_type(self, ledger: LedgerRecord) -> str:
        self._record(ledger)
        return ledger.keys[0].type

    def _changed_too_often(self) -> StaleBatchError:
        return StaleBatchError(
            f"state {self._reads.state!r}: windows came and went within each of {_TRIES} reads in a row.",
            state=self._reads.state,
        )
