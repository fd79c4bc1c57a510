"""The stores that come with mapstate, one file or package each, and how a URL finds its own.

A store of your own is named by an instance of its `Backend` class, or by URL through an entry point in
the group ``mapstate.backends``: the URL's scheme, and a callable that takes the URL.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

from mapstate.backing_map import Backend
from mapstate.errors import ConfigurationError, MissingDriverError, UnknownSchemeError

__all__ = ["resolve"]

_BUILT_IN = {
    "aerospike": "mapstate.backends.aerospike:AerospikeBackend",
    "memory": "mapstate.backends.memory:MemoryBackend",
    "sqlite": "mapstate.backends.sqlite:SqliteBackend",
    "redis": "mapstate.backends.redis:RedisBackend",
    "rediss": "mapstate.backends.redis:RedisBackend",
    "unix": "mapstate.backends.redis:RedisUnixBackend",
    "redis+unix": "mapstate.backends.redis:RedisUnixBackend",
    "redis+sentinel": "mapstate.backends.redis:RedisSentinelBackend",
    "rediss+sentinel": "mapstate.backends.redis:RedisSentinelBackend",
    "redis+cluster": "mapstate.backends.redis:RedisClusterBackend",
    "rediss+cluster": "mapstate.backends.redis:RedisClusterBackend",
}


def resolve(backend_or_url: Backend | str) -> Backend:
    """The backend that a URL names, or the backend itself. On the driver, once per recipe.

    Raises UnknownSchemeError, MissingDriverError, ConfigurationError. No connection is made.
    """
    if not isinstance(backend_or_url, str):
        if isinstance(backend_or_url, type) or not isinstance(backend_or_url, Backend):
            raise ConfigurationError(
                f"a state needs a store's URL or a Backend instance, not a {type(backend_or_url).__name__}"
            )
        return backend_or_url
    scheme, separator, _ = backend_or_url.partition("://")  # and nothing else: the rest may hold a password
    scheme = scheme.lower() if separator else ""
    from_url = _built_in(scheme) if scheme in _BUILT_IN else _third_party(scheme)
    backend: Backend = from_url(backend_or_url)
    return backend


def _built_in(scheme: str) -> Any:
    module, _, name = _BUILT_IN[scheme].partition(":")
    try:
        return getattr(import_module(module), name).from_url
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if missing.startswith("mapstate"):
            raise
        extra = module.rpartition(".")[2]
        raise MissingDriverError(
            f"{scheme}:// needs the package {missing!r}, which is not installed: pip install 'mapstate[{extra}]'",
            package=missing,
        ) from error


def _third_party(scheme: str) -> Any:
    found = {point.name: point for point in entry_points(group="mapstate.backends")}
    if scheme not in found:
        known = ", ".join(f"{one}://" for one in sorted({*_BUILT_IN, *found}))
        raise UnknownSchemeError(
            f"no store answers to {scheme + '://' if scheme else 'a URL without a scheme'}; there is {known}, and "
            "what packages add through the entry point group 'mapstate.backends'",
            scheme=scheme,
        )
    return found[scheme].load()
