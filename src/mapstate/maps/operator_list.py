r"""The list of what operators did to a state's past: which keys it has forgotten, and which corrections it counts.

An entry is a record under the one rule and the state's own fence, as those of a pane index are. The ledger has the
number of entries::

    \P|!n       entry n

A key stands there as a keyed hash. So the list says of a key whether it is there, and of no entry which key it is. Of a
correction there is a digest of its rows.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import msgspec

from mapstate.errors import CorruptRecordError, StoreLostError, cut
from mapstate.keys import INDEX, KeyCodec, StoreKey
from mapstate.maps.pane_index import batched, index_codec, pane_of
from mapstate.protocol.ledger_record import Attempt, LedgerRecord
from mapstate.schema import KeyField

_MARK = "!"
_READ = 1000  # entries at a time


class ListEntry(msgspec.Struct, frozen=True, kw_only=True):
    """What an operator did, once.

    ``id``        the operator's name for it, which makes it repeatable
    ``at``        the time of its begin, ISO 8601 in UTC
    ``txid``      of its attempt; None before it
    ``columns``   the key columns that say which keys; of a correction empty
    ``salt``      the key of the hash; of a correction empty
    ``digest``    the hash of the values of these columns; of a correction that of its rows
    ``owner``, ``batch_id``, ``offsets``  the last batch before it, and where that ended in the source
    ``keys``      how many keys had a value; of a correction how many it wrote
    ``rows``      of a correction
    ``purged``    the txid of the attempt that removed what the first one had left; None before it
    """

    kind: Literal["forget", "correction"] = "forget"
    id: str
    at: str
    txid: int | None = None
    columns: tuple[str, ...] = ()
    salt: str = ""
    digest: str
    owner: str = ""
    batch_id: int | None = None
    offsets: str | None = None
    keys: int = 0
    rows: int = 0
    purged: int | None = None

    def reaches(self, other: ListEntry) -> bool:
        """Whether it forgets the same keys as of the same batch or a later one of the same query."""
        mine, others = (one.batch_id if one.batch_id is not None else -1 for one in (self, other))
        return (self.id, self.digest, self.owner) == (other.id, other.digest, other.owner) and mine >= others


def entry_key(number: int) -> str:
    """The store's key of an entry."""
    return f"{INDEX}{_MARK}{number}"


def is_of_list(key: StoreKey) -> bool:
    """Whether a key is of the list, and not of a pane index or a change log."""
    return str(key).startswith(INDEX + _MARK)


def of_kind(entries: Iterable[ListEntry], kind: Literal["forget", "correction"]) -> dict[int, ListEntry]:
    """The entries of a whole list that are of a kind, by their numbers."""
    return {number: entry for number, entry in enumerate(entries) if entry.kind == kind}


def write_entries(writer: Any, ledger: LedgerRecord, attempt: Attempt, entries: Mapping[int, ListEntry]) -> None:
    """Write entries by their numbers, as the attempt's own records. They count with its commit."""
    keys = list(map(entry_key, entries))
    codec = index_codec(ledger.serializer, ledger.state)
    before = attempt.view.values(codec.loads(keys, writer.multi_get(keys)), attempt.txid)
    plain = [msgspec.json.decode(msgspec.json.encode(entry)) for entry in entries.values()]
    records = zip(plain, before, strict=True)
    writer.multi_put(keys, codec.dumps([(attempt.txid, value, was) for value, was in records]))


def read_list(store: Any, ledger: LedgerRecord) -> list[ListEntry]:
    """All entries. Raises StoreLostError where one has no record, and CorruptRecordError for one that is none."""
    codec, view, entries = index_codec(ledger.serializer, ledger.state), ledger.view(), list[ListEntry]()
    for keys in batched(map(entry_key, range(ledger.operations or 0)), _READ):
        values = view.values(codec.loads(keys, store.multi_get(keys)), ledger.next_txid - 1)
        for key, value in zip(keys, values, strict=True):
            if value is None:
                raise StoreLostError(
                    f"state {ledger.state!r}: {key!r}, an entry of its list of what operators did, has no record: it "
                    "was evicted, expired or deleted. Nothing was written. Restore the store, and rewind the "
                    "checkpoint.",
                    state=ledger.state,
                )
            entries.append(_entry(value, ledger.state, key))
    return entries


def _entry(value: Any, state: str, key: str) -> ListEntry:
    try:
        return msgspec.convert(value, ListEntry)
    except msgspec.ValidationError as error:
        raise CorruptRecordError(
            f"state {state!r}: {key!r} is no entry of a list of what operators did ({cut(error)}): another program "
            "wrote it, or a newer mapstate. Nothing was written.",
            state=state,
            key=key,
        ) from error


def digest_of(salt: str, columns: Sequence[str], parts: Sequence[str]) -> str:
    """The keyed hash of the values of some columns, which are given as a store's keys have them."""
    named = msgspec.json.encode([*zip(columns, parts, strict=True)])
    return hashlib.blake2b(named, key=bytes.fromhex(salt), digest_size=16).hexdigest()


class ListedKeys:
    """The keys of a state that some entries name. Entries with a column that the state lacks name none."""

    def __init__(self, fields: Sequence[KeyField], entries: Iterable[ListEntry]) -> None:
        self._codec = KeyCodec(fields)
        self._width = len(fields)
        places = {field.name: at for at, field in enumerate(fields)}
        self._digests: defaultdict[tuple[tuple[str, ...], str], set[str]] = defaultdict(set)
        for entry in entries:
            if set(entry.columns) <= places.keys():
                self._digests[entry.columns, entry.salt].add(entry.digest)
        self._places = {columns: [places[name] for name in columns] for columns, _ in self._digests}

    def __contains__(self, key: StoreKey) -> bool:
        parts = self._codec.parts_of(key)
        return len(parts) == self._width and any(
            digest_of(salt, columns, [parts[at] for at in self._places[columns]]) in digests
            for (columns, salt), digests in self._digests.items()
        )

    def has_rest(self, index_key: str, rest: str) -> bool:
        """Whether a record of the pane index names such a key by its ``rest``."""
        return f"{pane_of(index_key.removeprefix(INDEX))[0]}|{rest}" in self
