"""The stores that come with mapstate, one file or package each, and how a URL finds its own.

A store of your own is named by an instance of its `Backend` class, or by URL. For a URL, its package declares an entry
point in the group ``mapstate.backends``: the scheme, and a callable that takes the URL and returns the backend. Only
the driver looks it up; executors get the pickled backend. No package can take over a scheme of mapstate's own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any

from mapstate.backing_map import Backend, close_if_possible
from mapstate.capabilities import ListsStates
from mapstate.errors import ConfigurationError, MapStateError, StateNotFoundError, missing_driver, shown
from mapstate.urls import LIKE_A_URL

__all__ = ["resolve"]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}")
_MOST_PAGES = 10  # of states that are listed to find like names: a server may have millions of keys

_BUILT_IN = {
    "aerospike": "aerospike:AerospikeBackend",
    "memory": "memory:MemoryBackend",
    "sqlite": "sqlite:SqliteBackend",
    **dict.fromkeys(("redis", "rediss"), "redis:RedisBackend"),
    **dict.fromkeys(("unix", "redis+unix"), "redis:RedisUnixBackend"),
    **dict.fromkeys(("redis+sentinel", "rediss+sentinel"), "redis:RedisSentinelBackend"),
    **dict.fromkeys(("redis+cluster", "rediss+cluster"), "redis:RedisClusterBackend"),
}


def resolve(backend_or_url: Backend | str) -> Backend:
    """The backend that a URL names, or the backend itself. Driver, once per spec. Makes no connection.

    Raises UnknownSchemeError, MissingDriverError, ConfigurationError.
    """
    if not isinstance(backend_or_url, str):
        if isinstance(backend_or_url, type) or not isinstance(backend_or_url, Backend):
            raise ConfigurationError(
                f"a state needs a store's URL or a Backend instance, not a {type(backend_or_url).__name__}"
            )
        return backend_or_url
    scheme, separator, _ = backend_or_url.partition("://")  # no parser: the rest may hold a password
    scheme = scheme.lower() if separator else ""
    if scheme not in _BUILT_IN:
        from mapstate.backends.third_party import backend_of  # importlib.metadata takes long to import

        return backend_of(scheme, backend_or_url, known=_BUILT_IN)
    backend: Backend = _built_in(scheme)(backend_or_url)
    return backend


def _built_in(scheme: str) -> Any:
    module, _, name = _BUILT_IN[scheme].partition(":")
    try:
        return getattr(import_module(f"{__name__}.{module}"), name).from_url
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("mapstate"):
            raise
        raise missing_driver(f"{scheme}://", error, extra=module) from error


def check_state_name(name: str) -> str:
    """Return the name if it can name a state. Raises ConfigurationError."""
    if type(name) is not str or not _NAME.fullmatch(name):
        shown = "a URL" if LIKE_A_URL.search(repr(name)) else repr(name)  # which may hold a password
        raise ConfigurationError(
            f"{shown} cannot name a state: up to 63 letters, digits, '_', '.' and '-', starting with a letter or digit"
        )
    return name


@contextmanager
def opened(backend_or_url: Backend | str, state: str) -> Iterator[Any]:
    """The store of a state, closed in the end. Errors: see `naming`."""
    backend = resolve(backend_or_url)
    store = backend.open(check_state_name(state))
    try:
        with naming(backend):
            yield store
    finally:
        close_if_possible(store)


@contextmanager
def naming(backend: Backend) -> Iterator[None]:
    """Have a StateNotFoundError name the store, and the states there with names like it."""
    try:
        yield
    except StateNotFoundError as error:
        names: list[str] = []
        if isinstance(backend, ListsStates):
            with suppress(MapStateError):
                names = [name for page in islice(backend.states(), _MOST_PAGES) for name, _ in page]
        like = ", ".join(map(shown, get_close_matches(error.state, names)))
        where = f"{error} The store is {backend!r}{like and f', which has {like}'}."
        if missing := missing_file(backend):
            where = f"{where[:-1]}; {missing}"
        raise StateNotFoundError(where, **error.facts) from None


def missing_file(backend_or_url: Backend | str) -> str:
    """What to say of a SQLite file that is not there; empty for any other store."""
    from mapstate.backends.sqlite import SqliteBackend  # imported where it is needed, as each store

    backend = resolve(backend_or_url)
    if not isinstance(backend, SqliteBackend) or Path(backend.path).exists():
        return ""
    return f"there is no file {backend.path!r}. The start of its job makes a SQLite file."
