"""Export a whole state to a file: for an operator, without Spark.

Keys and values are collected in a SQLite file beside the target first, page by page, each key once. So an export that
was killed goes on where it ended, and every format is written in one go, in the order of the keys. The target
appears whole, by a rename, or not at all.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import starmap
from pathlib import Path
from typing import Any, NamedTuple, Self, TypedDict

import msgspec

from mapstate import errors
from mapstate.backends import check_state_name, resolve
from mapstate.backing_map import Backend
from mapstate.capabilities import Scan, Snapshots
from mapstate.errors import StoreError, UsageError, cut
from mapstate.keys import Key, StoreKey
from mapstate.protocol.ledger_record import LedgerRecord, encode_ledger
from mapstate.protocol.stored_ledger import check_page_size, decode_ledger
from mapstate.reader import StateReader, open_reader
from mapstate.reader.rolling import End, end_of, end_time, shown_fields
from mapstate.reader.tables import types_of
from mapstate.reader.times import Time
from mapstate.serializers import blocks_of, key_codec
from mapstate.serializers.value_types import WireForm, wire_type
from mapstate.values import item_type, struct_fields

_PAGE = 1000
_COMMIT = 1.0  # seconds of work that a kill may lose
_FORMAT = "1"
_SQLITE = b"SQLite format 3\0"


class Column(NamedTuple):
    """A column of an export: its name, and its Spark type."""

    name: str
    type: str


Write = Callable[[Sequence[Column], Iterator[list[tuple[Any, ...]]], Path], None]
"""Writes a file of some format, from its columns and pages of rows. The rows come in the order of the key texts."""


class Exported(NamedTuple):
    """The result of an export.

    ``rows``             keys in the file
    ``resumed``          of them, those that an interrupted export had read
    ``is_one_batch``     whether all of it is as of one batch, that of ``last``
    ``first``, ``last``  the ledger when the first and when the last key was read
    ``missing``          keys that the ledger counts, and that are not there; 0 also where that is unknown
    ``unreadable``       keys that hold no record of the state; they are left out
    ``unreadable_keys``  the first ten of them
    ``end``              where rolling windows end; None for a state without
    """

    rows: int
    resumed: int
    is_one_batch: bool
    first: LedgerRecord
    last: LedgerRecord
    missing: int = 0
    unreadable: int = 0
    unreadable_keys: tuple[str, ...] = ()
    end: Time | None = None


def export(
    backend_or_url: Backend | str,
    state: str,
    to: str | Path,
    write: Write,
    *,
    page_size: int = _PAGE,
    on_page: Callable[[int], None] | None = None,
) -> Exported:
    """Write all keys and their values to a file. The store is only read.

    Of a store with `Snapshots` the export is as of one batch, whatever is committed meanwhile. Of another store it is,
    if no batch was committed and no vacuum began meanwhile; the result says so. A state that is not opaque also needs
    that no batch is at work.

    What an interrupted export has read is in ``to`` with ``.part`` at its end. The next export to the same file goes
    on from there. It begins anew if the state has changed and the store offers a snapshot, or if the state was reset or
    has another schema or rolling windows: these end when an export begins, and lag and retention have to keep that end
    until the export is done.

    Args:
        backend_or_url: The store of the state.
        state: The state's name.
        to: The file. One that is there is replaced, at the end.
        write: Writes the format.
        page_size: Keys read at a time.
        on_page: Called after each page with the number of keys collected so far.

    Raises:
        UsageError: The store cannot list its keys; the file cannot be there, or is a SQLite database, which may hold
            states; or another export to it is at work.
        StateNotFoundError: There is no such state.
        LedgerLostError: There are records without a ledger.
        StoreFullError: There is no room for the file.
        StoreError: The store failed, or the file cannot be written.

    """
    backend, target = resolve(backend_or_url), Path(to)
    check_state_name(state)
    check_page_size(page_size)
    made = target.with_name(f"{target.name}.part-file")
    try:
        for path in (target, made):
            check_replaceable(path)
        with _ExportFile(target.with_name(f"{target.name}.part")) as part:
            done, columns = _collect(backend, state, part, page_size, on_page)
            write_file(made, target, part.rows(columns), columns, write)
            part.remove()
            return done
    except errors.MapStateError:  # an error of the store may be an OSError, too
        raise
    except (sqlite3.Error, OSError) as error:
        raise _problem(error, target) from error


def _collect(
    backend: Backend, state: str, part: _ExportFile, page_size: int, on_page: Callable[[int], None] | None
) -> tuple[Exported, list[Column]]:
    frozen = isinstance(backend, Snapshots)
    source = _Source(backend, part)
    with open_reader(source, state, follow=None) as reader:
        ledger = reader.ledger()
        start = part.resume(ledger, state, anew_if_changed=frozen)
        resumed = part.count()
        # A block may have keys that are collected and others: all are read again, and take the place of those.
        source.skip = resumed if blocks_of(ledger.serializer) is None else 0
        end = end_of(ledger, None)
        unreadable: tuple[int, tuple[str, ...]] = (0, ())
        expected = None
        try:
            _read_all(reader, ledger, part, page_size, on_page, end=end)
        except errors.MissingKeysError as error:
            expected = int(error.facts["expected"])
        except errors.CorruptRecordError as error:
            if "count" not in error.facts:
                raise
            unreadable = int(error.facts["count"]), tuple(error.facts["keys"])
        last = reader.ledger()
    rows = part.count()
    is_one_batch = start.is_whole and same_values(start.ledger, last)
    missing = 0 if expected is None or not is_one_batch else max(0, expected - rows)
    columns = list(starmap(Column, types_of(ledger.keys, shown_fields(ledger, {})).items()))
    time = None if end is None else end_time(ledger, end)
    return Exported(rows, resumed, is_one_batch, start.ledger, last, missing, *unreadable, time), columns


def _read_all(
    reader: StateReader,
    ledger: LedgerRecord,
    part: _ExportFile,
    page_size: int,
    on_page: Callable[[int], None] | None,
    *,
    end: End | None,
) -> None:
    """Collect every key that is not collected yet. Errors: see `StateReader.scan`, after all other keys."""
    codec = key_codec(ledger)
    page: list[tuple[Key, dict[str, Any]]] = []

    def keep() -> None:
        part.add(codec.encode_all([key for key, _ in page]), [(*key, *value.values()) for key, value in page])
        page.clear()
        if on_page is not None:
            on_page(part.added)

    # A field that is added meanwhile has no column in the file.
    names = [field.name for field in shown_fields(ledger, {}).fields]
    try:
        for row in reader.scan(page_size, columns=names, at=end):
            page.append(row)
            if len(page) >= page_size:
                keep()
    finally:
        if page:
            keep()
        part.commit()


def same_values(before: LedgerRecord, after: LedgerRecord) -> bool:
    """Whether all that was read between the two ledgers is as of one batch."""
    at_work = before.type != "opaque" and (before.in_flight is not None or after.in_flight is not None)
    is_same = before.contents() == after.contents() and before.undone == after.undone
    return is_same and not at_work


def check_replaceable(path: Path) -> None:
    """Raise UsageError where an export cannot replace the file, or would destroy states."""
    if not path.absolute().parent.is_dir() or (path.exists() and not path.is_file()):
        raise UsageError(
            f"{str(path)!r} cannot be the file of an export: it is no regular file, or lies in no directory"
        )
    if path.exists():
        with path.open("rb") as file:
            is_database = file.read(len(_SQLITE)) == _SQLITE
        if is_database:
            raise UsageError(f"{str(path)!r} is a SQLite database, which may hold states: no export replaces it")


def write_file(
    made: Path, target: Path, rows: Iterator[list[tuple[Any, ...]]], columns: list[Column], write: Write
) -> None:
    """Write the file beside its target, and rename it once it is on the disk."""
    try:
        write(columns, rows, made)
        with made.open("rb") as file:
            os.fsync(file.fileno())
        made.replace(target)
    except BaseException:
        made.unlink(missing_ok=True)
        raise
    folder = os.open(target.absolute().parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _problem(error: Exception, target: Path) -> StoreError | UsageError:
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return UsageError(f"another export to {str(target)!r} is at work. Nothing was written.")
    kind = errors.StoreFullError if code == sqlite3.SQLITE_FULL or getattr(error, "errno", None) == 28 else StoreError
    return kind(
        f"the file {str(target)!r} or its .part could not be written ({cut(error)}). What was in it stays. Look at the "
        "disk; or delete the .part, if no export has made it.",
        path=str(target),
    )


class _Source:
    """A backend whose store lists only the keys that are not collected yet, as of one moment where it can."""

    def __init__(self, backend: Backend, part: _ExportFile) -> None:
        self._backend = backend
        self._part = part
        self.skip = 0
        self.shared_between_processes = backend.shared_between_processes

    def __repr__(self) -> str:
        return repr(self._backend)

    def open(self, state: str, *, ttl: float | None = None) -> Any:
        backend = self._backend
        store: Any = backend.open_snapshot(state) if isinstance(backend, Snapshots) else backend.open(state, ttl=ttl)
        names = ("multi_get", "multi_put", "multi_get_with_ledger", "load", "swap", "close")
        methods: dict[str, Any] = {name: staticmethod(getattr(store, name)) for name in names if hasattr(store, name)}
        if isinstance(store, Scan):

            def scan(page_size: int) -> Iterator[list[StoreKey]]:
                pages = store.scan(page_size)
                return filter(None, map(self._part.not_yet, pages) if self.skip else pages)

            methods["scan"] = staticmethod(scan)
        return type("RemainingKeys", (), methods)()


class _Start(NamedTuple):
    """The ledger when the first key was read, and whether all keys so far are as of its batch."""

    ledger: LedgerRecord
    is_whole: bool


class _ExportFile:
    """The keys and rows that were collected so far. One process at a time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.added = 0

    def __enter__(self) -> Self:
        self._db = sqlite3.connect(self._path, isolation_level=None, timeout=0)
        try:
            self._check_own()
            self._db.execute("PRAGMA locking_mode = EXCLUSIVE")
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = NORMAL")
            self._db.execute("BEGIN IMMEDIATE")
            self._db.execute(
                "CREATE TABLE IF NOT EXISTS about (format TEXT, state TEXT, ledger BLOB, is_whole INTEGER)"
            )
            self._db.execute("CREATE TABLE IF NOT EXISTS rows (key PRIMARY KEY, row BLOB NOT NULL) WITHOUT ROWID")
        except BaseException:
            self._db.close()
            raise
        self._committed_at = time.monotonic()
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(sqlite3.Error):  # closed by `remove`, or the disk is full
            is_empty = not self.count()
            self._db.execute("COMMIT")
            if is_empty:
                self.remove()
        self._db.close()

    def _check_own(self) -> None:
        """Raise UsageError, before anything is written, for a database of somebody else."""
        tables = {name for (name,) in self._db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        if not tables <= {"about", "rows"}:
            raise UsageError(
                f"{str(self._path)!r} is a database that no export has made. Nothing was written. Export to a file of "
                "another name."
            )

    def resume(self, ledger: LedgerRecord, state: str, *, anew_if_changed: bool) -> _Start:
        """Keep what was collected if it can be gone on with, or begin anew."""
        about = self._db.execute("SELECT format, state, ledger, is_whole FROM about").fetchone()
        if about is not None and about[:2] == (_FORMAT, state):
            before = decode_ledger(about[2], state)
            is_whole = bool(about[3]) and same_values(before, ledger)
            is_of_one_time = ledger.rolling is None  # rolling windows end when an export begins
            if is_of_one_time and _same_state(before, ledger) and (is_whole or not anew_if_changed):
                self._db.execute("UPDATE about SET is_whole = ?", (is_whole,))
                self.added = self.count()
                self.commit()
                return _Start(before, is_whole)
        self._db.execute("DELETE FROM about")
        self._db.execute("DELETE FROM rows")
        self._db.execute("INSERT INTO about VALUES (?, ?, ?, 1)", (_FORMAT, state, encode_ledger(ledger)))
        self.commit()
        return _Start(ledger, True)

    def add(self, keys: list[StoreKey], rows: list[tuple[Any, ...]]) -> None:
        """Collect some keys. Of a key that a scan lists twice the last row stays."""
        pairs = zip(keys, map(_encoder.encode, rows), strict=True)
        self._db.executemany("REPLACE INTO rows VALUES (?, ?)", pairs)
        self.added += len(keys)
        if time.monotonic() - self._committed_at > _COMMIT:
            self.commit()

    def commit(self) -> None:
        """Keep what was added from a kill."""
        self._db.execute("COMMIT")
        self._db.execute("BEGIN IMMEDIATE")
        self._committed_at = time.monotonic()

    def count(self) -> int:
        """The number of keys."""
        number: int = self._db.execute("SELECT count(*) FROM rows").fetchone()[0]
        return number

    def not_yet(self, keys: list[StoreKey]) -> list[StoreKey]:
        """Those of some keys that are not collected."""
        marks = ",".join("?" * len(keys))
        known = {key for (key,) in self._db.execute(f"SELECT key FROM rows WHERE key IN ({marks})", keys)}  # noqa: S608
        return [key for key in keys if key not in known]

    def rows(self, columns: Sequence[Column]) -> Iterator[list[tuple[Any, ...]]]:
        """All rows, a page at a time, in the order of the key texts."""
        decoder = row_decoder([column.type for column in columns])
        cursor = self._db.execute("SELECT row FROM rows ORDER BY key")
        while page := cursor.fetchmany(_PAGE):
            yield [decoder.decode(row) for (row,) in page]

    def remove(self) -> None:
        """Delete the file. The export is whole."""
        self._db.close()
        for end in ("", "-wal", "-shm", "-journal"):
            self._path.with_name(f"{self._path.name}{end}").unlink(missing_ok=True)


_encoder = msgspec.msgpack.Encoder(decimal_format="string")


def row_decoder(types: Sequence[str]) -> msgspec.msgpack.Decoder[Any]:
    """Reads rows of values of these Spark types back from MessagePack."""
    return msgspec.msgpack.Decoder(tuple[tuple(map(_row_type, types))])  # type: ignore[misc]


def _row_type(name: str) -> Any:
    """The type by which a value is read back from MessagePack. A struct is a dict, or a tuple as it is stored."""
    if name.startswith("array<"):
        return list[_row_type(item_type(name))] | None  # type: ignore[misc]
    if name.startswith("struct<"):
        parts = {part: _row_type(kind) for part, kind in struct_fields(name)}
        named: Any = TypedDict("named", parts)  # type: ignore[misc]
        return named | tuple[tuple(parts.values())] | None  # type: ignore[misc]
    try:
        return wire_type(name, WireForm())
    except errors.UnsupportedTypeError:
        return Any


def _same_state(before: LedgerRecord, now: LedgerRecord) -> bool:
    """Whether keys that were read under the one ledger belong to the state of the other, in the same columns."""
    names = ("first_txid", "reset_txid", "keys", "fields")
    return all(getattr(before, name) == getattr(now, name) for name in names)
