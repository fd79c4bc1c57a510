"""Records on top, bytes below (or a store's own types): a backing map of records over a store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mapstate.backing_map import IBackingMap, check_lengths
from mapstate.serializers.serializer import RecordCodec

__all__ = ["SerializedMap"]


class SerializedMap:
    """An `IBackingMap` of records, over a store's map of what the codec makes of them; keys are the store's."""

    def __init__(self, store: IBackingMap[Any, Any], codec: RecordCodec) -> None:
        self._store = store
        self._codec = codec

    def multi_get(self, keys: Sequence[Any]) -> list[Any]:
        """See `IBackingMap.multi_get`. Raises CorruptRecordError."""
        return self._codec.loads(keys, self._store.multi_get(keys))

    def multi_put(self, keys: Sequence[Any], records: Sequence[Any]) -> None:
        """See `IBackingMap.multi_put`. Raises SerializationError before anything is written."""
        check_lengths(keys, records, "records")
        self._store.multi_put(keys, self._codec.dumps(records))
