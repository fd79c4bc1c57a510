"""How a scan of one Redis is divided, so that several processes walk through parts at one time.

A cursor of SCAN is a slot of the server's hash table as a number with its bits reversed: slots come in the order of
their ``place``, the reversed bits. The place of a key never changes while its server runs, however the table grows or
shrinks, so a part is a range of places. SCAN does not stop at the end of a range. But it visits at most ten times COUNT
slots and one; and where COUNT is 1, it stops after the first slot with a key in it. Both hold since Redis 2.8 and are
not documented: the cursors that come back tell whether they held.
"""

from __future__ import annotations

from mapstate.backends.redis.connection import Server
from mapstate.backends.redis.hash_layouts import PackedLayout
from mapstate.backends.redis.layout import Layout, StringLayout
from mapstate.backends.redis.listing import ScanPosition, Walk, digest_of, torn, walked
from mapstate.backends.redis.wire import INFO, command, incarnation_of

_BITS = 64
_END = 1 << _BITS
"""The place behind the last one."""

_LEAST_KEYS = 5_000
"""Keys of the database for each part, at least: a table of so many keys has far more slots than there are parts."""


def parts_of(server: Server, layout: Layout, most: int) -> list[str]:
    """See `ScansParts.scan_parts`: ranges of SCAN, or of hash shards. One part for a hash, or without INFO."""
    keys, *info = server.ask(command(b"DBSIZE") + INFO, 3, optional=2)
    name = digest_of(incarnation_of(*info))
    starts, end = [0], _END
    if not name:
        most = 1
    if isinstance(layout, PackedLayout):
        count, end = min(most, layout.shards), layout.shards
        starts = [number * end // count for number in range(count)]
    elif isinstance(layout, StringLayout):
        bits = max(0, min(most, keys // _LEAST_KEYS).bit_length() - 1)
        starts = [number << (_BITS - bits) for number in range(1 << bits)]
    return [f"{start} {until} {name}" for start, until in zip(starts, [*starts[1:], end], strict=True)]


def walked_part(server: Server, layout: Layout, part: str, page_size: int) -> Walk:
    """Walk through a part. Errors as of `walked`, and StoreUnavailableError where keys of two parts are mixed."""
    start, end, name = part.split(" ")
    if isinstance(layout, PackedLayout):
        until = int(end)
        return walked(server, lambda at: layout.scan(at, page_size, until), ScanPosition(start.encode(), name or None))
    if int(end) - int(start) == _END:
        return walked(server, lambda at: layout.scan(at, page_size), ScanPosition(b"0", name or None))
    table = TablePart(server, layout, int(end))
    position = ScanPosition(cursor_at(int(start)), name)
    return walked(server, lambda at: table.scan(at, page_size), position, table.step)


def place_of(cursor: bytes) -> int:
    """Where a cursor of SCAN is in the order of the slots."""
    return int(f"{int(cursor):0{_BITS}b}"[::-1], 2)


def cursor_at(place: int) -> bytes:
    """The cursor of a place."""
    return b"%d" % int(f"{place:0{_BITS}b}"[::-1], 2)


class TablePart:
    """The places below ``end`` of a server's hash table."""

    def __init__(self, server: Server, layout: Layout, end: int) -> None:
        self._server = server
        self._layout = layout
        self._end = end

    def scan(self, cursor: bytes, page_size: int) -> bytes:
        """SCAN that does not pass the end, if that can be told."""
        return self._layout.scan(cursor, self._count(cursor, page_size))

    def step(self, before: bytes, after: bytes, found: list[bytes]) -> tuple[bytes | None, list[bytes]]:
        """The next cursor, None at the end, and what was found of this part, after a `scan` from cursor to cursor.

        Raises StoreUnavailableError where keys of this part and of the next one are mixed.
        """
        place = place_of(after) or _END
        if place_of(before) < place < self._end:
            return after, found
        if place == self._end:
            return None, found
        if place < self._end or self._count(before, _END) > 1:
            raise torn(self._server, "Redis moved its keys about")
        return None, []  # the slots up to the end were empty: what was found is behind it

    def _count(self, cursor: bytes, most: int) -> int:
        slots = (self._end - place_of(cursor)) >> (_BITS - int(cursor).bit_length())  # or more
        return max(1, min(most, (slots - 1) // 10))
