"""A whole store on LMDB, of docs/write-a-store.md."""

import json
import os
import threading
from contextlib import contextmanager
from dataclasses import dataclass

import lmdb

from mapstate.backing_map import check_lengths
from mapstate.capabilities import FenceToken
from mapstate.errors import (
    ConfigurationError,
    CorruptRecordError,
    FencedError,
    StoreError,
    StoreFullError,
    StoreUnavailableError,
    TooLargeError,
    shown,
)

MAX_KEY_BYTES = 511 - 65  # LMDB's limit, less the kind of an entry, a state's name and a NUL
_lock = threading.Lock()
_open = {}  # (pid, path): the open file, and how many calls use it


def _in_child():
    global _lock
    _lock = threading.Lock()  # another thread may have held it at the fork


os.register_at_fork(after_in_child=_in_child)


@dataclass(frozen=True)
class LmdbBackend:
    path: str
    max_bytes: int = 2**34

    shared_between_processes = True
    key_order = "key"

    def __post_init__(self):
        object.__setattr__(self, "path", os.path.abspath(self.path))  # executors have other working directories

    def open(self, state, *, ttl=None):
        if ttl is not None:
            raise ConfigurationError("LMDB has no expiry, so there is no ttl")
        return LmdbStore(self, state)

    @contextmanager
    def transaction(self, *, write=False):
        """One transaction, on the file that this process has open, and no process before a fork."""
        mine = os.getpid(), self.path
        try:
            with _lock:
                file, users = _open.get(mine, (None, 0))
                if file is None:
                    file = lmdb.open(self.path, subdir=False, map_size=self.max_bytes)
                    file.reader_check()  # forgets readers that were killed
                _open[mine] = file, users + 1
            try:
                with file.begin(write=write) as transaction:
                    yield transaction
            finally:
                with _lock:
                    file, users = _open.pop(mine)
                    if users > 1:
                        _open[mine] = file, users - 1
                    else:
                        file.close()
        except lmdb.MapFullError as error:
            raise StoreFullError(f"{self.path} has {self.max_bytes} bytes, its limit: raise max_bytes") from error
        except (lmdb.CorruptedError, lmdb.InvalidError, lmdb.VersionMismatchError) as error:
            raise StoreError(f"{self.path} is damaged, or no file of LMDB: {error}") from error
        except lmdb.Error as error:
            raise StoreUnavailableError(f"{self.path} cannot be opened, read or written: {error}") from error


class LmdbStore:
    thread_safe = True

    def __init__(self, backend, state):
        self._backend = backend
        self._state = state

    # Get and put

    def multi_get(self, keys):
        with self._backend.transaction() as transaction:
            return self._records(transaction, keys)

    def multi_put(self, keys, values):
        self.put(keys, values, None)

    def put(self, keys, values, token):
        check_lengths(keys, values, "values")
        for key in keys:
            if len(key.encode()) > MAX_KEY_BYTES:
                raise TooLargeError(
                    f"the key {shown(key)} has more than {MAX_KEY_BYTES} bytes; nothing was written", key=key
                )
        with self._backend.transaction(write=True) as transaction:
            self._check(transaction, token)
            for key, value in zip(keys, values, strict=True):
                transaction.put(self._place("record", key), value)

    # The ledger, its fence beside it, and claims

    def load(self):
        with self._backend.transaction() as transaction:
            entry = transaction.get(self._place("ledger"))
            return None if entry is None else (_parts(entry)[1], self._version(entry))

    def swap(self, record, expected, fence):
        with self._backend.transaction(write=True) as transaction:
            entry = transaction.get(self._place("ledger"))
            if expected != (None if entry is None else self._version(entry)):
                return None
            entry = json.dumps(fence).encode() + b"\n" + record
            transaction.put(self._place("ledger"), entry)
            for name in list(_names(transaction, self._place("claim"))):
                transaction.delete(name)
            return self._version(entry)

    def multi_get_with_ledger(self, keys):
        with self._backend.transaction() as transaction:
            entry = transaction.get(self._place("ledger"))
            ledger = None if entry is None else _parts(entry)[1]
            return ledger, self._records(transaction, keys), ledger

    def writer(self, token):
        return LmdbWriter(self, token)

    def claim(self, txid, partition, holder):
        place = self._place("claim", f"{txid}/{partition}")
        with self._backend.transaction(write=True) as transaction:
            transaction.put(place, holder.encode(), overwrite=False)
            return transaction.get(place).decode()

    def rewrite(self, keys, values, token):
        check_lengths(keys, values, "values")
        with self._backend.transaction(write=True) as transaction:
            self._check(transaction, token)
            for key, value in zip(keys, values, strict=True):
                place = self._place("record", key)
                if value is None:
                    transaction.delete(place)
                elif transaction.get(place) is not None:  # what is gone stays gone
                    transaction.put(place, value)

    # Scan

    def scan(self, page_size):
        prefix = after = self._place("record")
        strange = []
        while True:
            with self._backend.transaction() as transaction:
                names = [name for name, _ in zip(_names(transaction, prefix, after), range(page_size))]
            page = []
            for name in names:
                try:
                    page.append(name[len(prefix) :].decode())
                except UnicodeDecodeError:
                    strange.append(repr(name[len(prefix) :]))
            if page:
                yield page
            if not names:
                break
            after = names[-1] + b"\0"
        if strange:
            found = f"state {self._state!r}: {len(strange)} names are no keys: {', '.join(strange[:10])}"
            raise CorruptRecordError(found, keys=tuple(strange[:10]), count=len(strange))

    def _place(self, kind, name=""):
        return f"{kind[0]}{self._state}\0{name}".encode()

    def _records(self, transaction, keys):
        places = [self._place("record", key) for key in keys]
        return [None if len(place) > 511 else transaction.get(place) for place in places]

    def _version(self, entry):
        file = os.stat(self._backend.path)  # another one after the file was restored from a copy
        return entry, file.st_dev, file.st_ino

    def _check(self, transaction, token):
        """The fence is read in the transaction that writes: nobody can move it in between."""
        if token is None:
            return
        entry = transaction.get(self._place("ledger"))
        fence = None if entry is None else _parts(entry)[0]
        if token != fence or token.closed:
            raise FencedError(
                f"state {self._state!r}: the attempt with txid {token.txid} may not write now: the fence is at {fence}",
                state=self._state,
                txid=token.txid,
            )


class LmdbWriter:
    """What an attempt writes with: refused, once the ledger has gone on."""

    def __init__(self, store, token):
        self._store, self._token = store, token
        self.multi_get = store.multi_get

    def multi_put(self, keys, values):
        self._store.put(keys, values, self._token)

    def multi_rewrite(self, keys, values):
        self._store.rewrite(keys, values, self._token)


def _parts(entry):
    """The fence and the ledger."""
    fence, _, record = entry.partition(b"\n")
    return FenceToken(*json.loads(fence)), record


def _names(transaction, prefix, start=None):
    """What the names that begin with a prefix are, from ``start`` on."""
    cursor = transaction.cursor()
    found = cursor.set_range(start or prefix)
    while found and cursor.key().startswith(prefix):
        yield cursor.key()
        found = cursor.next()
