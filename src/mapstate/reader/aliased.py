"""Readers of a name: of the version to which its alias leads, or of the state of that name where it has no alias."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import closing, nullcontext
from datetime import timedelta
from functools import partial, wraps
from math import inf
from operator import methodcaller
from threading import Lock
from types import FunctionType
from typing import Any

from mapstate.aggregators.aggregator import Aggregator
from mapstate.backends import naming, resolve
from mapstate.backing_map import Backend, close_if_possible
from mapstate.errors import MapStateError, StateNotFoundError
from mapstate.protocol.alias import ALIAS_SUFFIX, AliasRecord, decode_alias, is_alias
from mapstate.protocol.stored_ledger import ledger_store
from mapstate.reader.capabilities import ThreadSafe
from mapstate.reader.committed import FOLLOW, CommittedReads, Consistency, checked
from mapstate.reader.state_reader import StateReader


def open_reader(
    backend_or_url: Backend | str,
    state: str,
    *,
    consistency: Consistency = "committed",
    aggregators: Mapping[str, Aggregator] | None = None,
    max_age: float | timedelta | None = None,
    follow: float | None = FOLLOW,
) -> StateReader:
    """Open a reader of one state, in any process, while the stream runs.

    Args:
        backend_or_url: The store of the state.
        state: The state's name, or an alias of it.
        consistency: "committed" reads whole batches only. "latest" also reads a batch that is not committed, and may
            be rolled back. Transactional and non-transactional states are always read latest, because they keep no
            older value.
        aggregators: A user's own aggregators by field name, if readers shall show their `result`.
        max_age: How old the last commit may be for an answer, in seconds or as a timedelta, by this machine's clock.
            Older ones are a StaleBatchError; `StateReader.ledger` still tells. See docs/readers.md#how-old.
        follow: After so many seconds a call looks at the alias of the name again, if it has one; 0: in each call.
            None reads the state of this name, whatever its alias says. See docs/life.md#rebuild-and-swap.

    Raises:
        StateNotFoundError: There is no such state.
        LedgerLostError: There are records without a ledger. To find them, all keys may be listed.
        ConfigurationError: An argument cannot be used.
        StoreError: The store failed.

    """
    bound = checked(consistency, max_age, follow)
    backend = resolve(backend_or_url)
    reader = reader_of(
        backend, state=state, consistency=consistency, aggregators=aggregators or {}, max_age=bound, follow=follow
    )
    try:
        reader.ledger()
    except StateNotFoundError:
        with naming(backend):
            raise
    return reader


def reader_of(backend: Backend, *, follow: float | None, **options: Any) -> StateReader:
    """A reader of a name, with the options of `StateReader`, which has not read yet."""
    return StateReader(backend, **options) if follow is None else AliasReader(backend, follow=follow, **options)


class Alias:
    """The alias of a name in its store. Any thread may look, and none goes back to a lower number."""

    def __init__(self, backend: Backend, name: str) -> None:
        self._name, self._opened = name, backend.open(f"{name}{ALIAS_SUFFIX}")
        self._store, self._lock = ledger_store(self._opened), Lock()
        self._turn = nullcontext() if isinstance(self._opened, ThreadSafe) else Lock()
        self.last: AliasRecord | None = None

    def read(self) -> AliasRecord | None:
        """Read it, if there is one, into ``last``. Raises CorruptRecordError, and the errors of the store."""
        with self._turn:
            stored = self._store.load()
        if stored is not None and is_alias(stored[0]):
            alias = decode_alias(stored[0], self._name)
            with self._lock:
                if self.last is None or alias.number >= self.last.number:
                    self.last = alias
        return self.last

    def close(self) -> None:
        """Close the store."""
        with self._turn:
            close_if_possible(self._opened)


def alias_of(backend_or_url: Backend | str, name: str) -> AliasRecord | None:
    """The alias of a name now; None where it has none. Errors: see `Alias.read`."""
    with closing(Alias(resolve(backend_or_url), name)) as alias:
        return alias.read()


def version_of(backend_or_url: Backend | str, name: str) -> str:
    """The version that readers of a name read now, for one that reads it once. Errors: see `Alias.read`."""
    alias = alias_of(backend_or_url, name)
    return name if alias is None else alias.to


class AliasReader(StateReader):
    """A reader of what its name leads to, see `open_reader`. Each call reads one version, with the reader of that one.

    The readers of earlier versions stay open for the scans that have begun.
    """

    def __init__(self, backend: Backend, *, state: str, follow: float, **options: Any) -> None:
        self._open = partial(StateReader, backend, **options)
        self._versions = {state: self._open(state=state)}
        self._state, self._follow, self._due = state, follow, -inf
        self._alias = Alias(backend, state)

    def _of_version(self, ask: Callable[[StateReader], Any]) -> Any:
        """The answer of one version. ``follow=0`` looks behind its reads: the old version may be ahead by then."""
        while True:
            seen, began = self._alias.last, time.monotonic()
            if self._follow and began >= self._due:
                self._alias.read()
                self._due = began + self._follow
            try:
                answer, problem = ask(self._seen()), None
            except MapStateError as error:  # a name may be an alias alone
                answer, problem = None, error
            if self._follow or self._due == inf or self._alias.read() == seen:
                if problem is not None:
                    raise problem
                return answer

    def _seen(self) -> StateReader:
        """The reader of the version that was seen last."""
        to = self._state if self._alias.last is None else self._alias.last.to
        return self._versions.get(to) or self._versions.setdefault(to, self._open(state=to))

    @property
    def _reads(self) -> CommittedReads:  # type: ignore[override]  # for what shows or asks nothing of the store
        return self._seen()._reads

    def close(self) -> None:
        """See `StateReader.close`."""
        self._due = inf
        self._alias.close()
        for reader in self._versions.values():
            reader.close()


def _of_current(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def call(self: AliasReader, *args: Any, **kwargs: Any) -> Any:
        return self._of_version(methodcaller(name, *args, **kwargs))

    return call


for _name, _method in [*vars(StateReader).items()]:
    is_public = not _name.startswith("_") or _name == "__arrow_c_stream__"
    if isinstance(_method, FunctionType) and is_public and _name not in vars(AliasReader):
        setattr(AliasReader, _name, _of_current(_name, _method))
