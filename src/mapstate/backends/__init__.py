"""The stores that come with mapstate, one file or package each, and how a URL finds its own.

A store of your own is named by an instance of its `Backend` class, or by URL through an entry point in
the group ``mapstate.backends``: the URL's scheme, and a callable that takes the URL and returns the backend. It
is looked up on the driver alone; what travels to executors is the backend. A scheme of mapstate's own stays its own.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from mapstate.backing_map import Backend
from mapstate.errors import ConfigurationError, MapStateError, MissingDriverError, UnknownSchemeError

__all__ = ["resolve"]

_GROUP = "mapstate.backends"
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
    if scheme not in _BUILT_IN:
        return _third_party(scheme, backend_or_url)
    backend: Backend = _built_in(scheme)(backend_or_url)
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


def _third_party(scheme: str, url: str) -> Backend:
    """What another package's entry point makes of the URL. Its name alone says which package that is."""
    points = entry_points(group=_GROUP)
    found = {(_package(point), point.value): point for point in points if point.name == scheme}
    if not found:
        known = ", ".join(f"{one}://" for one in sorted({*_BUILT_IN, *(point.name for point in points)}))
        raise UnknownSchemeError(
            f"no store answers to {scheme + '://' if scheme else 'a URL without a scheme'}; there is {known}, and "
            f"what packages add through the entry point group {_GROUP!r}: is the one that has it installed here?",
            scheme=scheme,
        )
    if len(found) > 1:
        packages = " and ".join(sorted(package for package, _ in found))
        raise ConfigurationError(f"{scheme}:// is claimed by {packages}: uninstall all but one", scheme=scheme)
    ((package, _), point) = found.popitem()
    backend = _asked(_loaded(point, package), url, f"{scheme}:// comes from the package {package!r}")
    if isinstance(backend, type) or not isinstance(backend, Backend):
        raise ConfigurationError(
            f"{scheme}:// comes from the package {package!r}, whose entry point {point.value!r} gave a "
            f"{type(backend).__name__} and no Backend: that is a defect of the package",
            package=package,
        )
    return backend


def _loaded(point: EntryPoint, package: str) -> Any:
    try:
        return point.load()
    except ModuleNotFoundError as error:
        raise MissingDriverError(
            f"{point.name}:// comes from the package {package!r}, which needs the module {error.name!r}, and that is "
            f"not installed: install {package} again, with its dependencies",
            package=package,
        ) from error
    except Exception as error:
        raise ConfigurationError(
            f"{point.name}:// comes from the package {package!r}, whose entry point {point.value!r} cannot be loaded: "
            f"{type(error).__name__}: {error}",
            package=package,
        ) from error


def _asked(from_url: Any, url: str, where: str) -> Any:
    try:
        return from_url(url)
    except MapStateError:
        raise
    except Exception as error:  # noqa: BLE001  whatever a stranger's code raises
        problem = f"{where}, and that could not read the URL: {type(error).__name__}"
    raise ConfigurationError(f"{problem}. What it said is not repeated here, because it may hold a password")


def _package(point: EntryPoint) -> str:
    return point.value if point.dist is None else point.dist.name
