"""Records on top, bytes below (or a store's own types): a backing map of records over a store, and its writer."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec

from mapstate.backing_map import IBackingMap, check_lengths
from mapstate.capabilities import FencedWrites, FenceToken, FilteredWrites
from mapstate.schema import Field
from mapstate.serializers.serializer import RecordCodec

__all__ = ["CHUNK_BYTES", "Room", "SerializedMap", "writer_of"]

CHUNK_BYTES = 8 * 2**20
"""What the records of a chunk, or of a page, come to at most, where nothing else is asked for."""

_PROBE = 64
_SAMPLE = 64
_MAY_BE_LARGE = ("string", "binary", "any")


class Room:
    """How many keys are read at one time, so that their records stay below a number of bytes.

    A record's size is known when it has been read or written: so the first keys are few, where a field may be large,
    and each following chunk has as many as fit by the mean of the last one. Fields of fixed size are not measured.
    """

    def __init__(self, fields: Sequence[Field], most_keys: int = sys.maxsize, most_bytes: int = CHUNK_BYTES) -> None:
        self._most_keys = most_keys
        self._most_bytes = most_bytes
        self.measures = any(kind in field.type for field in fields for kind in _MAY_BE_LARGE)
        self.keys = min(most_keys, _PROBE) if self.measures else most_keys

    def learn(self, stored: Sequence[Any]) -> None:
        """Takes in how large records are, as the store has them; None is none."""
        if not self.measures:
            return
        some = [one for one in stored[:: len(stored) // _SAMPLE + 1] if one is not None]
        if some:
            sizes = (len(one) if isinstance(one, bytes) else len(msgspec.msgpack.encode(one)) for one in some)
            self.keys = max(1, min(self._most_keys, self._most_bytes * len(some) // max(1, sum(sizes))))

    def parts(self, page: list[Any]) -> Iterator[list[Any]]:
        """The page, as many keys at a time as there is room for by then."""
        at = 0
        while at < len(page):
            part = page[at : at + self.keys]
            yield part
            at += len(part)


class SerializedMap:
    """An `IBackingMap` of records, over a store's map of what the codec makes of them; keys are the store's.

    ``room`` learns from each chunk how large records are.
    """

    def __init__(self, store: IBackingMap[Any, Any], codec: RecordCodec, room: Room | None = None) -> None:
        self._store = store
        self._codec = codec
        self._room = room if room is not None and room.measures else None

    def multi_get(self, keys: Sequence[Any]) -> list[Any]:
        """See `IBackingMap.multi_get`. Raises CorruptRecordError."""
        stored = self._store.multi_get(keys)
        if self._room is not None:
            self._room.learn(stored)
        return self._codec.loads(keys, stored)

    def multi_put(self, keys: Sequence[Any], records: Sequence[Any]) -> None:
        """See `IBackingMap.multi_put`. Raises SerializationError before anything is written."""
        check_lengths(keys, records, "records")
        stored = self._codec.dumps(records)
        if self._room is not None:
            self._room.learn(stored)
        self._store.multi_put(keys, stored)


@contextmanager
def writer_of(store: Any, token: FenceToken, *, has_txids: bool = True) -> Iterator[Any]:
    """The map that an attempt writes to, guarded as well as the store can; closed at the end, unless it is the store.

    Once per task, and by a vacuum. ``has_txids`` is False for a non-transactional state, whose records have no txid to
    filter by.
    """
    if isinstance(store, FencedWrites):
        writer = store.writer(token)
    elif has_txids and isinstance(store, FilteredWrites):
        writer = store.filtered_writer(token)
    else:
        writer = store
    try:
        yield writer
    finally:
        close = None if writer is store else getattr(writer, "close", None)
        if close is not None:
            close()
