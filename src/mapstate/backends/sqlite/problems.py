"""SQLite's errors as ours, with what an operator can do."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from mapstate import errors
from mapstate.errors import MapStateError, cut

DRIVER_ERRORS = (sqlite3.Error, OSError, UnicodeError)
"""All that a transaction can raise by itself."""

_LOCKED = (
    errors.StoreUnavailableError,
    "was locked for more than TIMEOUT by another writer, of any state in it, by a backup or a sqlite3 shell: see fuser",
)
_WAITED = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PROTOCOL)
_NO_TEXT = "Could not decode to UTF-8"
_DAMAGED = (
    errors.CorruptStoreError,
    "is damaged, or no SQLite database. This call wrote nothing. Look at the path, or restore the file from a copy",
)
_CANNOT_OPEN = (
    errors.StoreUnavailableError,
    "cannot be opened: look whether it is a file, and whether this user may write to it and its directory",
)
_TRANSLATIONS: dict[int, tuple[type[MapStateError], str]] = {
    sqlite3.SQLITE_BUSY: _LOCKED,
    sqlite3.SQLITE_LOCKED: _LOCKED,
    sqlite3.SQLITE_PROTOCOL: _LOCKED,
    sqlite3.SQLITE_NOTADB: _DAMAGED,
    sqlite3.SQLITE_CORRUPT: _DAMAGED,
    sqlite3.SQLITE_CANTOPEN: _CANNOT_OPEN,
    sqlite3.SQLITE_PERM: _CANNOT_OPEN,
    sqlite3.SQLITE_IOERR: (errors.StoreUnavailableError, "could not be read or written by the operating system"),
    sqlite3.SQLITE_FULL: (errors.StoreFullError, "cannot grow: the disk or a quota is full. This call wrote nothing"),
    sqlite3.SQLITE_READONLY: (errors.StoreError, "may only be read by this user, or its directory or its disk may"),
    sqlite3.SQLITE_TOOBIG: (errors.TooLargeError, "takes no row of more than 10**9 bytes, key and record together"),
}


def problem_of(error: Exception, *, path: str, state: str, timeout: float) -> MapStateError:
    """Our error for one of SQLite's or of the operating system's. ``timeout`` is how long SQLite waited for a lock."""
    if isinstance(error, UnicodeEncodeError):
        return errors.KeyEncodingError(f"a key of state {state!r} is no valid text: {cut(error)}", state=state)
    code = getattr(error, "sqlite_errorcode", 0) if isinstance(error, sqlite3.Error) else sqlite3.SQLITE_CANTOPEN
    if isinstance(error, UnicodeError) or str(error).startswith(_NO_TEXT):
        code = sqlite3.SQLITE_CORRUPT  # the file has bytes that are no UTF-8, in a message or in a text column
    kind, trouble = _TRANSLATIONS.get(code & 0xFF, (errors.StoreError, "could not be read or written"))
    folder = Path(path).parent
    if kind is errors.StoreUnavailableError and not folder.is_dir():
        trouble = f"cannot be opened, because there is no directory {str(folder)!r}: make it first"
    trouble = trouble.replace("TIMEOUT", f"{timeout:g} s")
    return kind(
        f"the SQLite file {path!r} {trouble} ({cut(error)})",
        path=path,
        state=state,
        waited=code & 0xFF in _WAITED,
    )
