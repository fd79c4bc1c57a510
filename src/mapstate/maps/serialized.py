"""A backing map of records over a store's map of bytes or native values, and the writer of an attempt."""

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

CHUNK_BYTES = 8 * 2**20
"""The default limit for the bytes of a chunk's or a page's records."""

_PROBE = 64
_SAMPLE = 64
_MAY_BE_LARGE = ("array", "string", "binary", "any")


class Room:
    """The number of keys to read at a time, so that their records stay below a number of bytes.

    A record's size is unknown before it is read or written. So the first chunk is small if a field may be large. Each
    next chunk has as many keys as fit by the mean size in the last one. Records of ``fields`` of fixed size are not
    measured; None stands for fields of any size.
    """

    def __init__(
        self, fields: Sequence[Field] | None, most_keys: int = sys.maxsize, most_bytes: int = CHUNK_BYTES
    ) -> None:
        self._most_keys = most_keys
        self._most_bytes = most_bytes
        self.measures = fields is None or any(kind in field.type for field in fields for kind in _MAY_BE_LARGE)
        self.keys = min(most_keys, _PROBE) if self.measures else most_keys

    def learn(self, stored: Sequence[Any]) -> None:
        """Measure a sample of stored records. None is an absent record."""
        if not self.measures:
            return
        sample = [record for record in stored[:: len(stored) // _SAMPLE + 1] if record is not None]
        if sample:
            sizes = (len(data) if isinstance(data, bytes) else len(msgspec.msgpack.encode(data)) for data in sample)
            self.keys = max(1, min(self._most_keys, self._most_bytes * len(sample) // max(1, sum(sizes))))

    def parts(self, page: list[Any]) -> Iterator[list[Any]]:
        """Split the page, each part by the room that is known when it is taken."""
        at = 0
        while at < len(page):
            part = page[at : at + self.keys]
            yield part
            at += len(part)


class SerializedMap:
    """An `IBackingMap` of records over a store's map, with its keys; ``room`` learns the size of records."""

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
        if len(keys) != len(records):
            check_lengths(keys, records, "records")
        stored = self._codec.dumps(records)
        if self._room is not None:
            self._room.learn(stored)
        self._store.multi_put(keys, stored)


@contextmanager
def writer_of(store: Any, token: FenceToken, *, has_txids: bool = True) -> Iterator[Any]:
    """Give the map to which an attempt writes: fenced or filtered if the store can, else the store itself.

    A task opens it once, and so does a vacuum. It is closed at the end, unless it is the store. ``has_txids`` is False
    for a non-transactional state, whose records have no txid to filter by.
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
