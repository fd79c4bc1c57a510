"""One pass over all records of a state: for a vacuum, the doctor, an adoption, and a batch that comes again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from mapstate.findings import Unreadable
from mapstate.keys import StoreKey, is_index_key
from mapstate.maps.pane_index import index_codec
from mapstate.maps.serialized import Room
from mapstate.protocol.ledger_record import LedgerRecord
from mapstate.protocol.refusals import newer_than_ledger, newer_txids
from mapstate.protocol.stored_ledger import read_ledger
from mapstate.schema import Field
from mapstate.serializers import blocks_of, record_codec


class CodecWithIndex:
    """The codec of all records of a state: its own, and those of what stands beside them."""

    def __init__(self, ledger: LedgerRecord) -> None:
        self.ledger = ledger
        self._own = record_codec(ledger)
        self._index = index_codec(ledger.serializer, ledger.state)

    def keys_with_value(self, keys: Sequence[StoreKey], values: Sequence[Any]) -> list[StoreKey]:
        """The keys of the state that have a value: those of the records, or in the blocks."""
        pairs = zip(keys, values, strict=True)
        there = [(key, value) for key, value in pairs if value is not None and not is_index_key(key)]
        if self._own.blocks is None:
            return [key for key, _ in there]
        return [text for key, block in there for text in self._own.blocks.with_pane(key, block.texts())]

    def loads(self, keys: Sequence[StoreKey], data: Sequence[Any]) -> list[Any]:
        if not any(map(is_index_key, keys)):
            return self._own.loads(keys, data)
        return [self._of(key).loads([key], [record])[0] for key, record in zip(keys, data, strict=True)]

    def dumps(self, keys: Sequence[StoreKey], records: Sequence[Any]) -> list[Any]:
        if not any(map(is_index_key, keys)):
            return self._own.dumps(records)
        return [self._of(key).dumps([record])[0] for key, record in zip(keys, records, strict=True)]

    def _of(self, key: StoreKey) -> Any:
        return self._index if is_index_key(key) else self._own


def measured_fields(ledger: LedgerRecord) -> Sequence[Field] | None:
    """The fields by which a `Room` tells the size of records; None where only records tell it."""
    return None if ledger.rolling is not None or blocks_of(ledger.serializer) is not None else ledger.fields


def all_records(
    pages: Iterable[list[StoreKey]],
    get: Callable[[list[StoreKey]], Sequence[Any]],
    fields: Sequence[Field] | None,
    loads: Callable[[list[StoreKey], Sequence[Any]], list[Any]],
    unreadable: Unreadable | None = None,
) -> Iterator[tuple[list[StoreKey], list[Any], int]]:
    """Read listed keys, and yield part by part: the keys, the record of each or None, and the number of keys read.

    A part has as many keys as its records have room in memory; ``fields`` are the `measured_fields`.
    ``unreadable`` notes keys that cannot be read or listed, and the part comes without them. Where it is None, their
    error is raised.
    """
    room = Room(fields)

    def read(keys: list[StoreKey]) -> list[Any]:
        data = get(keys)
        room.learn(data)
        return loads(keys, data)

    for page in pages if unreadable is None else unreadable.listed(pages):
        for part in room.parts(page):
            keys, records = (part, read(part)) if unreadable is None else unreadable.read(read, part)
            yield keys, records or [], len(part)


def check_known(store: Any, state: str, keys: Iterable[StoreKey], records: Iterable[Any], newest: int) -> None:
    """Raise StaleBatchError for records above txid ``newest``, and above what the ledger has given out since."""
    if newer_txids(keys, records, newest):
        known = read_ledger(store, state).next_txid - 1
        unknown = newer_txids(keys, records, known)
        if unknown:
            raise newer_than_ledger(state, unknown, known)
