"""Compare two versions of a state while their jobs run: for an operator, without Spark. See docs/life.md.

The two are never at the same offsets. So the ledgers of both are read first, then P: the further position of the two.
When both versions have passed P, their records are read. A record whose txid is not above the last txid of its first
ledger *stood still*: nothing was committed to it since a position at or before P, and it was read at P or behind. So
its value is that of its version at P. Of a key that stood still in both, both values are exact as of P. All others are
in motion, and are read again by the same rule with a P of their own. `model.comparing` plays this, and what is wrong.
"""

from __future__ import annotations

import heapq
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from errno import ENOSPC
from hashlib import blake2b
from itertools import accumulate, count, groupby, repeat, starmap
from math import inf
from operator import itemgetter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import msgspec

from mapstate import errors
from mapstate.backends import opened
from mapstate.backing_map import Backend
from mapstate.errors import MapStateError, StaleBatchError, StoreError, StoreFullError, UsageError, check_range, cut
from mapstate.keys import StoreKey
from mapstate.maps.pane_index import is_native_integer
from mapstate.maps.record_pass import measured_fields
from mapstate.maps.serialized import Room
from mapstate.operations.export import Column, Write, check_replaceable, row_decoder, same_values, write_file
from mapstate.operations.swap import complete
from mapstate.protocol.ledger_record import LedgerRecord
from mapstate.protocol.ways_back import behind_by, further, goes_on, is_behind, keeps_absent, offsets_of, stood_still
from mapstate.reader.committed import CommittedReads
from mapstate.reader.rolling import Asked, check_columns, shown_fields
from mapstate.reader.tables import types_of
from mapstate.schema import number_of
from mapstate.serializers import key_codec, record_codec
from mapstate.values import are_numbers, difference
from mapstate.waiting import pause

_PAGE = 1000
_PAUSE = 0.05
_MOST = 10
_ROW = msgspec.msgpack.Encoder(decimal_format="string")


class Difference(NamedTuple):
    """A key whose values differ, and the compared fields of both versions. A key column has its place in ``key``."""

    key: tuple[Any, ...]
    first: dict[str, Any]
    second: dict[str, Any]


class Compared(NamedTuple):
    """The result of a comparison. Each key is in one of the five numbers.

    ``equal``, ``different``            keys in both versions
    ``only_in_first``, ``only_in_second``  keys that the other version does not have
    ``in_motion``   keys that batches have written in each pass, so that nothing is known of them
    ``passes``      how often keys were read
    ``fields``      those that were compared
    ``positions``   the offsets as of which the keys are, one of each pass; empty where ``how`` is not "offsets"
    ``how``         "offsets"; "final windows", which need none; or "as they are": the offsets cannot be compared, and
                    no batch was committed while both were read
    ``largest``     the ten largest differences
    """

    equal: int
    different: int
    only_in_first: int
    only_in_second: int
    in_motion: int
    passes: int
    fields: list[str]
    positions: list[str]
    how: str
    largest: list[Difference]

    @property
    def is_equal(self) -> bool:
        """Whether no compared key differs. False where no key was compared: all were in motion, or none was there."""
        return bool(self.equal) and not (self.different or self.only_in_first or self.only_in_second)


def compare(
    backend_or_url: Backend | str,
    first: str,
    second: str,
    *,
    fields: Sequence[str] | None = None,
    tolerances: Mapping[str, float] | None = None,
    sample: float = 1.0,
    passes: int = 3,
    wait: float = 600.0,
    to: str | Path | None = None,
    write: Write | None = None,
    page_size: int = _PAGE,
    on_page: Callable[[int], None] | None = None,
) -> Compared:
    """Compare the values of two states of a store, each as of the same position of their source, while jobs run.

    States with windows are compared by key and window, those that are final in both and gone in none. Stores are only
    read. What was read is in a temporary SQLite file, about as large as both states; memory holds a page.

    Args:
        backend_or_url: The store of both.
        first: A state, by its own name: no alias is followed.
        second: Another one, with the same key columns.
        fields: Those to compare; None: all that both have.
        tolerances: By field, how far two numbers may be apart and count as equal: finite, and at least 0.
        sample: The part of the keys to compare, by a hash of the key, above 0 and up to 1.
        passes: How often a key is read that is in motion.
        wait: Seconds to wait, in each pass, until both versions have passed the further position of the two.
        to: A file for the keys that differ; one that is there is replaced at the end. With ``write``, its format.
        write: See `mapstate.operations.export.Write`.
        page_size: Keys read at a time.
        on_page: Called after each page with the number of keys so far.

    Raises:
        UsageError: The two cannot be compared: other key columns, windows of another kind, rolling windows, a ttl, no
            common field, offsets that cannot be compared while a job runs, or one version stayed behind.
        StaleBatchError: A state was reset, rolled back, made anew, put back or corrected meanwhile.
        CorruptRecordError: A key cannot be read.
        StateNotFoundError: There is no such state.
        StoreFullError: There is no room for the temporary file, or for ``to``.
        StoreError: The store failed, or a file.

    """
    check_range("sample", sample, 0.0, 1.0, " of all keys")
    check_range("passes", passes, 1, 1000, " of passes")
    if not sample or first == second:
        raise UsageError("a comparison needs two states, and a sample above 0. Nothing was read.")
    if not all(0 <= number < inf for number in (tolerances or {}).values()):
        raise UsageError(f"a tolerance is a finite number of at least 0, not as in {tolerances}. Nothing was read.")
    made = None if to is None else Path(to).with_name(f"{Path(to).name}.part-file")
    for path in () if to is None or made is None else (Path(to), made):
        check_replaceable(path)
    with ExitStack() as stack:
        folder = stack.enter_context(TemporaryDirectory(prefix="mapstate-compare-"))
        versions = [_Version(stack.enter_context(opened(backend_or_url, name)), name) for name in (first, second)]
        names = _common(versions, fields)
        check_columns(first, [*(tolerances or {})], names)
        far = {name: (tolerances or {}).get(name, 0.0) for name in names}
        try:
            with closing(sqlite3.connect(f"{folder}/rows.db", isolation_level=None)) as db:
                work = _Comparison(db, versions, far, page_size, on_page)
                done = work.run(sample, passes, wait)
                if to is not None and made is not None and write is not None:
                    write_file(made, Path(to), work.differing(), work.columns, write)
                return done
        except MapStateError:  # an error of the store may be an OSError, too
            raise
        except (sqlite3.Error, OSError) as error:
            code = getattr(error, "sqlite_errorcode", 0) & 0xFF
            is_full = code == sqlite3.SQLITE_FULL or getattr(error, "errno", None) == ENOSPC
            raise (StoreFullError if is_full else StoreError)(
                f"the comparison could not write {str(to)!r} or its temporary file in {folder} ({cut(error)}). Nothing "
                "else was written. Look at the disk; TMPDIR and SQLITE_TMPDIR name another one."
            ) from error


class _Codec:
    """The codec of a state, which keeps the records that it has read last."""

    def __init__(self, ledger: LedgerRecord) -> None:
        codec = record_codec(ledger)
        self.blocks, self._loads, self.records = codec.blocks, codec.loads, list[Any]()

    def loads(self, keys: Sequence[Any], data: Sequence[Any]) -> list[Any]:
        self.records = self._loads(keys, data)
        return self.records


class _Version:
    """One of the two states.

    ``first``    the ledger from which on its records have to stand still
    ``last``     the ledger after all reads of a pass
    """

    def __init__(self, store: Any, state: str) -> None:
        self.state, self.reads = state, CommittedReads(store, state, "committed", {})
        self.first = self.last = ledger = complete(self.reads.ledger())
        if ledger.rolling is not None or ledger.has_had_ttl:
            kind = "a ttl, so keys go by the clock" if ledger.has_had_ttl else "rolling windows"
            raise UsageError(f"state {state!r} has {kind}: it cannot be compared. Nothing was read.")
        if ledger.windows is not None and ledger.windows.definition.has_parts:
            raise UsageError(
                f"state {state!r} has sliding windows or sessions, whose records are parts of windows: they cannot be "
                "compared. Nothing was read. Compare the keys of StateReader.window(end)."
            )
        self.codec: Any = _Codec(ledger)
        self.keys = key_codec(ledger)
        self.room = Room(measured_fields(ledger))
        self.types = types_of((), shown_fields(ledger, {}))
        self.asked = Asked(state)

    def floor(self, ledger: LedgerRecord) -> int:
        """Where the last final window ends."""
        windows: Any = ledger.windows
        return int(windows.definition.panes.floor(self.reads.final_mark(ledger)))

    def read(self, names: list[StoreKey], *, is_listing: bool) -> tuple[LedgerRecord, list[tuple[StoreKey, Any, Any]]]:
        """The ledger, and of each key that has a record the key, the record and the value.

        Of a state with blocks ``names`` are those of blocks where ``is_listing``, and the record is that of its block.
        """
        blocks, texts = self.codec.blocks, names
        places = {} if blocks is None or is_listing else blocks.places_of(texts)
        try:
            opened_as, values = self.reads.read([*places] or names, None, self.room, self.codec)
        except errors.CorruptRecordError:
            self.still(self.reads.ledger())  # a record may have a field that was added meanwhile
            raise
        records = self.codec.records
        if places:
            of_key = {i: record for record, of in zip(records, places.values(), strict=True) for i in of}
            records, values = (
                [of_key[i] for i in range(len(texts))],
                blocks.of_keys(blocks.rests(texts), places, values),
            )
        elif blocks is not None:
            there = [of for of in zip(names, records, values, strict=True) if of[2] is not None]
            texts = [text for name, _, block in there for text in blocks.with_pane(name, block.texts())]
            records = [record for _, record, block in there for _ in range(block.count)]
            values = blocks.all_values([block for *_, block in there])
        values = self.reads.without_gone(opened_as.ledger, texts, values)
        rows = zip(texts, records, self.asked.named(opened_as.fields, values), strict=True)
        return opened_as.ledger, [row for row in rows if row[1] is not None]

    def end_of(self, key: StoreKey) -> int:
        """Where the window of a key ends."""
        windows: Any = self.first.windows
        return int(windows.definition.panes.last_end(number_of(self.keys.decode(key)[0])))

    def has_lost(self, key: StoreKey) -> bool:
        """Whether the window of a key may have been removed while both were read."""
        windows: Any = self.last.windows
        start = number_of(self.keys.decode(key)[0])
        return bool(windows.is_expired(start, self.reads.last_windows(self.last)))

    def still(self, ledger: LedgerRecord) -> LedgerRecord:
        """Return the ledger. StaleBatchError unless all that counted under ``first`` has counted since, likewise."""
        forms = [(of.keys, of.fields, of.type) for of in (self.first, ledger)]
        if forms[0] != forms[1] or not goes_on(self.first, ledger):
            raise self.changed("was reset, rolled back, made anew or given a field, or its watermark put back,")
        return ledger

    def changed(self, why: str) -> StaleBatchError:
        return StaleBatchError(
            f"state {self.state!r} {why} meanwhile, so nothing is known of the keys that were read. Nothing was "
            "written. Compare again.",
            state=self.state,
        )


def _common(versions: Sequence[_Version], fields: Sequence[str] | None) -> list[str]:
    """The fields to compare. Raises UsageError where the keys, windows or fields of the two have nothing in common."""
    one, other = versions
    windows = [version.first.windows for version in versions]
    same = [None if record is None else (record.definition.panes, record.definition.by_clock) for record in windows]
    if one.first.keys != other.first.keys or same[0] != same[1]:
        columns = (", ".join(f"{key.name} {key.type}" for key in version.first.keys) for version in versions)
        columns_of, others = columns
        raise UsageError(
            f"{one.state!r} has the key columns ({columns_of}) and {other.state!r} has ({others}), or they have other "
            "windows: they cannot be compared. Nothing was read."
        )
    if is_native_integer(one.first) != is_native_integer(other.first):
        raise UsageError(
            f"the keys of {one.state!r} and {other.state!r} are text in one, as with blocks, and numbers in the other: "
            "they cannot be compared. Nothing was read."
        )
    for version in versions:
        check_columns(version.state, fields or [], [*version.types])
    names = [*fields] if fields else [name for name in one.types if name in other.types]
    if not names:
        raise UsageError(f"{one.state!r} and {other.state!r} have no field in common. Nothing was read.")
    return names


class _Comparison:
    """The rows of the two versions in a file, until they are compared in the order of their keys."""

    def __init__(
        self,
        db: sqlite3.Connection,
        versions: Sequence[_Version],
        far: Mapping[str, float],
        page_size: int,
        on_page: Callable[[int], None] | None,
    ) -> None:
        self._db, self._versions, self._names, self._far = db, versions, [*far], far
        self._page_size, self._on_page, self._keys_read = page_size, on_page, 0
        self._decoders = [row_decoder([version.types[name] for name in far]) for version in versions]
        self._numbers = dict.fromkeys(("equal", "different", "first", "second"), 0)
        self._largest: list[tuple[float, int, Difference]] = []
        self._order = count()
        self._by_windows = versions[0].first.windows is not None
        db.execute("PRAGMA journal_mode = OFF")
        db.execute("PRAGMA synchronous = OFF")
        db.execute("CREATE TABLE seen (key, which INTEGER, still INTEGER, value BLOB)")
        db.execute("CREATE TABLE moving (key)")
        db.execute("CREATE TABLE differing (key, kind INTEGER, first BLOB, second BLOB)")

    def run(self, sample: float, passes: int, wait: float) -> Compared:
        """All passes."""
        self._sample = sample
        first, second = self._versions
        has_txids = "non-transactional" not in (first.first.type, second.first.type)
        by_offsets = has_txids and further(offsets_of(first.first), offsets_of(second.first)) is not None
        how = "final windows" if self._by_windows else "offsets" if by_offsets else "as they are"
        positions: list[str] = []
        done = moving = 0
        for done in range(1, passes + 1):
            position = self._waited(wait) if how == "offsets" else None
            positions += [] if position is None else [position]
            self._db.execute("BEGIN")
            for which, version in enumerate(self._versions):
                self._read(which, version, self._listed(version) if done == 1 else None, position)
            self._db.execute("DELETE FROM moving")
            self._compare([self._is_sure(version, position, is_listing=done == 1) for version in self._versions])
            self._db.execute("DELETE FROM seen")
            self._db.execute("COMMIT")
            moving = self._db.execute("SELECT count(*) FROM moving").fetchone()[0]
            if not moving:
                break
        numbers, largest = self._numbers, [row for *_, row in sorted(self._largest, reverse=True)]
        return Compared(
            *(numbers["equal"], numbers["different"], numbers["first"], numbers["second"], moving, done),
            *(self._names, positions, how, largest),
        )

    def _waited(self, wait: float) -> str:
        """Wait until both versions have passed the further position of the two, which is returned.

        Until then the ledger from which on records have to stand still is the last one that is not beyond it.
        """
        end = time.monotonic() + wait
        for version in self._versions:
            version.first = version.still(complete(version.reads.ledger()))
        position = further(*(offsets_of(version.first) for version in self._versions))
        if position is None:
            raise self._versions[0].changed("got another source")
        while True:
            behind = False
            for version in self._versions:
                ledger = version.still(complete(version.reads.ledger()))
                behind = behind or is_behind(ledger, position)
                if behind_by(offsets_of(ledger), position) == []:
                    version.first = ledger
            if not behind:
                return position
            if time.monotonic() > end:
                late = {version.state: behind_by(position, offsets_of(version.first)) for version in self._versions}
                said = "; ".join(f"{state!r} by {', '.join(by or [])}" for state, by in late.items() if by)
                raise UsageError(
                    f"after {wait:g} s one version is still behind the other: {said}. Nothing was written. See that "
                    "both jobs run, and give --wait SECONDS."
                )
            pause(_PAUSE)

    def _listed(self, version: _Version) -> Iterator[list[StoreKey]]:
        for page, _ in version.reads.pages(version.first, self._page_size):
            yield page if version.codec.blocks is not None else [key for key in page if self._is_asked(key)]

    def _is_asked(self, key: StoreKey) -> bool:
        most = int(self._sample * 2**64)
        return self._sample >= 1 or int.from_bytes(blake2b(str(key).encode(), digest_size=8).digest()) < most

    def _moving(self) -> Iterator[list[StoreKey]]:
        cursor = self._db.execute("SELECT key FROM moving")
        while page := cursor.fetchmany(self._page_size):
            yield [key for (key,) in page]

    def _read(
        self, which: int, version: _Version, listed: Iterable[list[StoreKey]] | None, position: str | None
    ) -> None:
        until = min(version.floor(version.first) for version in self._versions) if self._by_windows else None
        for page in self._moving() if listed is None else listed:
            for part in version.room.parts(page):
                ledger, read = version.read(part, is_listing=listed is not None)
                self._check(version, ledger, position)
                rows = list(self._rows(which, version, read, until, by_txid=position is not None))
                self._db.executemany("INSERT INTO seen VALUES (?, ?, ?, ?)", rows)
                self._keys_read += max(len(part), len(read))
                if self._on_page is not None:
                    self._on_page(self._keys_read)

    def _rows(
        self, which: int, version: _Version, pairs: list[tuple[StoreKey, Any, Any]], until: int | None, *, by_txid: bool
    ) -> Iterator[tuple[StoreKey, int, bool, bytes | None]]:
        for key, record, value in pairs:
            if (until is not None and version.end_of(key) > until) or not self._is_asked(key):
                continue
            still = not by_txid or stood_still(record[0], version.first)
            if value is None and still and version.codec.blocks is not None:
                continue  # its block is there without it, maybe since it was forgotten
            row = None if value is None else _ROW.encode(tuple(value[name] for name in self._names))
            yield key, which, still, row

    def _check(self, version: _Version, ledger: LedgerRecord, position: str | None) -> None:
        """Raise an error unless what was read under a ledger tells what it was at the position."""
        first = version.first
        version.still(ledger)
        is_corrected = self._by_windows and ledger.operations != first.operations
        if is_corrected or (position is not None and is_behind(ledger, position)):
            raise version.changed("was corrected, or had keys forgotten, or was put back")
        if position is None and not self._by_windows and not same_values(first, ledger):
            raise UsageError(
                f"the offsets of {self._versions[0].state!r} and {self._versions[1].state!r} cannot be compared, and a "
                f"batch of {version.state!r} was committed or at work: such states cannot be compared while jobs run. "
                "Nothing was written. Stop both jobs at the same end of their source."
            )

    def _is_sure(self, version: _Version, position: str | None, *, is_listing: bool) -> bool:
        """Whether a key that was not found had no value all the time, by the ledger after all reads.

        A listing of blocks does not tell of which block a key is gone that a batch removed meanwhile.
        """
        version.last = version.reads.ledger()
        self._check(version, version.last, position)
        is_known = not is_listing or version.codec.blocks is None
        return position is None or (is_known and keeps_absent(version.first, version.last))

    def _compare(self, sure: list[bool]) -> None:
        """Compare what was read, in the order of the keys. Keys in motion are to be read again."""
        rows = self._db.execute("SELECT key, which, still, value FROM seen ORDER BY key, which")
        for key, versions in groupby(rows, key=itemgetter(0)):
            values: list[tuple[Any, Any]] = [(sure[0], None), (sure[1], None)]
            for _, which, still, value in versions:
                values[which] = still, value
            (is_still, one), (is_other_still, other) = values
            if self._by_windows and any(version.has_lost(key) for version in self._versions):
                continue
            if not (is_still and is_other_still):
                self._db.execute("INSERT INTO moving VALUES (?)", (key,))
            elif one is not None or other is not None:
                self._note(key, one, other)

    def _note(self, key: StoreKey, one: bytes | None, other: bytes | None) -> None:
        kind = "second" if one is None else "first" if other is None else "different"
        if one is not None and other is not None:
            values = self._decoders[0].decode(one), self._decoders[1].decode(other)
            size = self._apart(*values)
            if size is None:
                self._numbers["equal"] += 1
                return
            named = [dict(zip(self._names, value, strict=True)) for value in values]
            entry = (size, next(self._order), Difference(self._versions[0].keys.decode(key), *named))
            (heapq.heappushpop if len(self._largest) >= _MOST else heapq.heappush)(self._largest, entry)
        self._numbers[kind] += 1
        place = ("different", "first", "second").index(kind)
        self._db.execute("INSERT INTO differing VALUES (?, ?, ?, ?)", (key, place, one, other))

    def _apart(self, ones: Sequence[Any], others: Sequence[Any]) -> float | None:
        """How large the largest difference of two values is; None where none counts."""
        largest: float | None = None
        for name, one, other in zip(self._names, ones, others, strict=True):
            size = difference(one, other)
            if size > self._far[name]:
                largest = max(largest or 0.0, size if size < inf or are_numbers(one, other) else 0.0)
        return largest

    @property
    def columns(self) -> list[Column]:
        """Of the file: the key columns, which version has the key, and both values of each field."""
        columns = {key.name: key.type for key in self._versions[0].first.keys}
        out = [("difference", "string")]
        for version, place in zip(self._versions, ("first", "second"), strict=True):
            out += [(f"{place}_{name}", version.types[name]) for name in self._names]
        for name, kind in out:
            columns[next(text for text in accumulate(repeat("_"), initial=name) if text not in columns)] = kind
        return [*starmap(Column, columns.items())]

    def differing(self) -> Iterator[list[tuple[Any, ...]]]:
        """The rows of the file, in the order of the key texts."""
        first, second = self._versions
        kinds = ("different", f"only in {first.state}", f"only in {second.state}")
        nothing = (None,) * len(self._names)
        cursor = self._db.execute("SELECT key, kind, first, second FROM differing ORDER BY key")
        while page := cursor.fetchmany(_PAGE):
            yield [
                (
                    *(*first.keys.decode(key), kinds[kind]),
                    *(nothing if one is None else self._decoders[0].decode(one)),
                    *(nothing if other is None else self._decoders[1].decode(other)),
                )
                for key, kind, one, other in page
            ]
