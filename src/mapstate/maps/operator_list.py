r"""The list of what operators did to a state's past: which keys it has forgotten, and which corrections it counts.

An entry is a record under the one rule and the state's own fence, as those of a pane index are. The ledger has the
number of entries::

    \P|!n       entry n

A key stands there as a keyed hash. So the list says of a key whether it is there, and of no entry which key it is. Of a
correction there is a digest of its rows.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import msgspec

from mapstate.errors import CorruptRecordError, DataError, StoreLostError, UsageError, cut, shown
from mapstate.keys import INDEX, KeyCodec, StoreKey, is_index_key
from mapstate.maps.pane_index import batched, index_codec, pane_of
from mapstate.protocol.ledger_record import Attempt, LedgerRecord, by_partition
from mapstate.protocol.ways_back import behind_by
from mapstate.schema import KeyField

if TYPE_CHECKING:
    from mapstate.serializers.blocks import BlockCodec

_MARK = "!"
_READ = 1000  # entries at a time
_LONGEST_ID = 200  # characters
_SALT = re.compile("[0-9a-f]{32}")


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
    ``states``    those that a correction is of, where these are several
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
    states: tuple[str, ...] = ()
    purged: int | None = None

    def reaches(self, other: ListEntry) -> bool:
        """Whether it forgets the same keys as of the same batch or a later one of the same query."""
        mine, others = (entry.batch_id if entry.batch_id is not None else -1 for entry in (self, other))
        return (self.id, self.digest, self.owner) == (other.id, other.digest, other.owner) and mine >= others


def check_id(kind: str, name: Any, salt: Any = None) -> None:
    """Raise UsageError for an id, or the key of a hash, that no list can hold."""
    is_text = isinstance(name, str) and name == name.encode(errors="ignore").decode()
    if not is_text or not name.strip() or len(name) > _LONGEST_ID:
        raise UsageError(
            f"id is the {kind}'s own name, a text of at most {_LONGEST_ID} characters, not {shown(name)}: by it a "
            "second call writes nothing. Nothing was written."
        )
    if salt is not None and not (isinstance(salt, str) and _SALT.fullmatch(salt)):
        raise UsageError("salt is the key of the hash, 32 hexadecimal digits. Nothing was written.")


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
        places = {field.name: i for i, field in enumerate(fields)}
        self._digests: defaultdict[tuple[tuple[str, ...], str], set[str]] = defaultdict(set)
        for entry in entries:
            if set(entry.columns) <= places.keys():
                self._digests[entry.columns, entry.salt].add(entry.digest)
        self._places = {columns: [places[name] for name in columns] for columns, _ in self._digests}

    def __contains__(self, key: StoreKey) -> bool:
        parts = self._codec.parts_of(key)
        return len(parts) == self._width and any(
            digest_of(salt, columns, [parts[i] for i in self._places[columns]]) in digests
            for (columns, salt), digests in self._digests.items()
        )

    def has_rest(self, index_key: str, rest: str) -> bool:
        """Whether a record of the pane index names such a key by its ``rest``."""
        return f"{pane_of(index_key.removeprefix(INDEX))[0]}|{rest}" in self


def left_of(blocks: BlockCodec | None, keys: ListedKeys, record_key: StoreKey, value: Any) -> tuple[Any, list[Any]]:
    """What is left of a record's value without these keys, and which of the state's keys went.

    The record is one of the keys', of a pane index, or a block; ``blocks`` is the codec of a state with blocks.
    """
    if is_index_key(record_key):
        if blocks is not None:
            return value, []  # it names blocks, which stay
        rests = value if isinstance(value, list) else []
        named = [rest for rest in rests if isinstance(rest, str) and keys.has_rest(str(record_key), rest)]
        return ([rest for rest in rests if rest not in named] if named else value), []
    if blocks is None:
        return None, [record_key]
    return blocks.without(record_key, value, keys)


class Place(NamedTuple):
    """Where a row is in its source, as Kafka names it."""

    topic: str
    partition: int
    offset: int


class ForgottenRows:
    """Which rows of a history a state that is made of it leaves out: those of listed keys, below their positions.

    Of an entry that is as of the ``end`` of the history or later, these are all rows of its keys. For another one each
    row has to have a `Place` inside the history. Picklable. Raises UsageError where nothing tells which rows are meant.
    """

    def __init__(
        self, state: str, fields: Sequence[KeyField], entries: Sequence[ListEntry], end: str | None, *, has_places: bool
    ) -> None:
        self._state, self._end = state, end
        names = {field.name for field in fields}
        whole: list[ListEntry] = []
        self._below: list[tuple[ListedKeys, dict[tuple[str, str], int]]] = []
        self._lasts = _numbers(end, max)
        for entry in entries:
            behind = behind_by(end, entry.offsets)
            if not set(entry.columns) <= names:
                raise self._refused(entry, f"its key columns lack {', '.join(map(shown, entry.columns))}")
            if behind is None:
                raise self._refused(
                    entry, "where that was in the source cannot be compared with the end of the history"
                )
            if not behind:
                whole.append(entry)
                continue
            if not has_places:
                why = f"the history goes on after that ({behind[0]}), and nothing tells which rows came before it"
                raise self._refused(entry, f"{why}: name their columns with positions=")
            ends = _numbers(entry.offsets, min)
            if not {topic for topic, _ in self._lasts} <= {topic for topic, _ in ends}:
                raise self._refused(entry, "the history is of a topic that was none of its source then")
            self._below.append((ListedKeys(fields, [entry]), ends))
        self._whole = ListedKeys(fields, whole)
        self.needs_places = bool(self._below)

    def _refused(self, entry: ListEntry, why: str) -> UsageError:
        return UsageError(
            f"state {self._state!r} cannot leave out what was forgotten under the id {shown(entry.id)}: {why}. Nothing "
            "was written. Or seed it without version_of, and apply the list when it has caught up: mapstate forget "
            f"{self._state} --from FILE. See docs/life.md#seed"
        )

    def copied(self, entry: ListEntry, owner: str, txid: int, at: str) -> ListEntry:
        """The entry as the state has done it: no further than the history goes."""
        offsets = _earlier(entry.offsets, self._end) if behind_by(entry.offsets, self._end) else entry.offsets
        done = {"txid": txid, "purged": txid, "keys": 0, "owner": owner, "batch_id": 0, "offsets": offsets, "at": at}
        return msgspec.structs.replace(entry, **done)

    def of(self, keys: Sequence[StoreKey], places: Sequence[Place] | None) -> list[bool]:
        """Of each row whether it is left out. Raises DataError for a row without its place, where one is needed."""
        known = {
            key: (key in self._whole, [ends for listed, ends in self._below if key in listed]) for key in set(keys)
        }
        out = []
        for i, key in enumerate(keys):
            is_whole, below = known[key]
            out.append(is_whole or any(self._is_below(places[i], ends) for ends in below if places is not None))
        return out

    def _is_below(self, place: Place, ends: Mapping[tuple[str, str], int]) -> bool:
        if None in place:
            raise DataError(
                f"state {self._state!r}: a row of a key that was forgotten has no place in its source: {place}. "
                "Nothing counts. Give the rows the columns that positions= names."
            )
        partition = (place.topic, str(place.partition))
        if not 0 <= place.offset < self._lasts.get(partition, 0):  # what lies nowhere would pass for a later row
            raise DataError(
                f"state {self._state!r}: a row of a key that was forgotten has a place outside the history: {place}. "
                "Nothing counts. Give positions= the columns of topic, partition and offset, as the source has them."
            )
        # A partition that was not there then has later rows only.
        return place.offset < ends.get(partition, 0)


def _earlier(offsets: str | None, others: str | None) -> str:
    """In each partition the earlier one of two offsets."""
    known, others_ends = json.loads(offsets or "[]"), json.loads(others or "[]")
    for ends_of, other in zip(known, others_ends, strict=True):
        for topic, ends in ends_of.items():
            ends |= {partition: min(end, other.get(topic, {}).get(partition, 0)) for partition, end in ends.items()}
    return json.dumps(known, separators=(",", ":"))


def _numbers(offsets: str | None, chosen: Callable[[int, int], int]) -> dict[tuple[str, str], int]:
    """The offsets of all sources by topic and partition; the ``chosen`` one where two sources have it."""
    numbers: dict[tuple[str, str], int] = {}
    for offset in json.loads(offsets or "[]"):
        for place, number in (by_partition(offset) or {}).items():
            numbers[place] = chosen(number, numbers.get(place, number))
    return numbers
