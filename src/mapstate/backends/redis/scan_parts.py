"""Where a scan of one Redis goes on, and how it is divided, so that several processes walk through parts at one time.

A cursor of SCAN is a slot of the server's hash table as a number with its bits reversed: slots come in the order of
their ``place``, the reversed bits. The place of a key never changes while its server runs, however the table grows or
shrinks, so a part is a range of places. SCAN does not stop at the end of a range. But it visits at most ten times COUNT
slots and one; and where COUNT is 1, it stops after the first slot with a key in it. Both hold since Redis 2.8 and are
not documented: the cursors that come back tell whether they held.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

from mapstate.backends.redis.layout import Layout, StringLayout
from mapstate.backends.redis.packed_layout import PackedLayout
from mapstate.backends.redis.wire import ScanPosition
from mapstate.distinct_keys import DistinctKeys
from mapstate.errors import StoreUnavailableError, UsageError

_CURSOR = re.compile(r"(end|\d{1,20})-([0-9a-f]*)", re.ASCII)
_BITS = 64
_END = 1 << _BITS
"""The place behind the last one."""

_LEAST_KEYS = 5_000
"""Keys of the database for each part, at least: a table of so many keys has far more slots than there are parts."""


def cursor_of(position: ScanPosition) -> str:
    """The cursor that a reader gets for a position."""
    return f"{'end' if position.at is None else position.at.decode()}-{position.server}"


def position_of(cursor: str, state: str) -> ScanPosition:
    """The position of a cursor. Raises UsageError."""
    if not cursor:
        return ScanPosition(b"0", None)
    found = _CURSOR.fullmatch(cursor)
    if found is None or (found[1] != "end" and int(found[1]) >= _END):
        raise UsageError(f"this is no cursor of a scan of state {state!r}. Nothing was read.")
    return ScanPosition(None if found[1] == "end" else found[1].encode(), found[2])


def parts_of(layout: Layout, most: int, keys: int, server: str) -> list[str]:
    """See `ScansParts.scan_parts`, for a database with so many ``keys``. ``server`` is its name, empty if unknown."""
    starts, end = [0], _END
    if not server:
        most = 1
    if isinstance(layout, PackedLayout):
        count, end = min(most, layout.shards), layout.shards
        starts = [number * end // count for number in range(count)]
    elif isinstance(layout, StringLayout):
        bits = max(0, min(most, keys // _LEAST_KEYS).bit_length() - 1)
        starts = [number << (_BITS - bits) for number in range(1 << bits)]
    return [f"{start} {until} {server}" for start, until in zip(starts, [*starts[1:], end], strict=True)]


def part_of(part: str, layout: Layout, state: str) -> tuple[Any, ScanPosition]:
    """What lists a part, in place of the layout, and where it begins."""
    start, end, server = part.split(" ")
    if isinstance(layout, PackedLayout):
        return _ShardPart(layout, int(end)), ScanPosition(start.encode(), server or None)
    if int(end) - int(start) == _END:
        return layout, ScanPosition(b"0", server or None)
    return _TablePart(layout, int(end), state), ScanPosition(cursor_at(int(start)), server)


def once_each(state: str, pages: Iterable[tuple[list[str], ScanPosition]]) -> Iterator[list[str]]:
    """The pages; raises StoreUnavailableError after them if a key came twice, as where the table has shrunk."""
    listed, count = DistinctKeys(), 0
    for page, _ in pages:
        listed.update(page)
        count += len(page)
        if page:
            yield page
    if len(listed) != count:
        raise _torn(state)


def place_of(cursor: bytes) -> int:
    """Where a cursor of SCAN is in the order of the slots."""
    return int(f"{int(cursor):0{_BITS}b}"[::-1], 2)


def cursor_at(place: int) -> bytes:
    """The cursor of a place."""
    return b"%d" % int(f"{place:0{_BITS}b}"[::-1], 2)


class _TablePart:
    """A range of places, in place of a `StringLayout`."""

    def __init__(self, layout: Layout, end: int, state: str) -> None:
        self._layout = layout
        self._end = end
        self._state = state
        self.scanned = layout.scanned

    def scan(self, cursor: bytes, page_size: int) -> bytes:
        """SCAN that does not pass the end, if that can be told."""
        return self._layout.scan(cursor, self._count(cursor, page_size))

    def step(self, before: bytes, after: bytes, found: list[bytes]) -> tuple[bytes | None, list[bytes]]:
        """See `Layout.step`. Raises StoreUnavailableError where keys of this part and of the next one are mixed."""
        place = place_of(after) or _END
        if place_of(before) < place < self._end:
            return after, found
        if place == self._end:
            return None, found
        if place < self._end or self._count(before, _END) > 1:
            raise _torn(self._state)
        return None, []  # the slots up to the end were empty: what was found is behind it

    def _count(self, cursor: bytes, most: int) -> int:
        slots = (self._end - place_of(cursor)) >> (_BITS - int(cursor).bit_length())  # or more
        return max(1, min(most, (slots - 1) // 10))


class _ShardPart:
    """A range of hash shards, in place of a `PackedLayout`."""

    def __init__(self, layout: PackedLayout, end: int) -> None:
        self._layout = layout
        self._end = end
        self.step, self.scanned = layout.step, layout.scanned

    def scan(self, cursor: bytes, page_size: int) -> bytes:
        return self._layout.scan(cursor, page_size, self._end)


def _torn(state: str) -> StoreUnavailableError:
    return StoreUnavailableError(
        f"state {state!r}: Redis moved its keys about during the scan, which may have missed keys or given one twice: "
        "scan again",
        state=state,
    )
