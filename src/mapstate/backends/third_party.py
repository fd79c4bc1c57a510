"""Stores of other packages, found by the scheme of a URL through the entry point group ``mapstate.backends``."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from mapstate.backing_map import Backend
from mapstate.errors import ConfigurationError, MapStateError, MissingDriverError, UnknownSchemeError

_GROUP = "mapstate.backends"


def backend_of(scheme: str, url: str, *, known: Iterable[str]) -> Backend:
    """The backend that a package's entry point makes of the URL. Errors: see `mapstate.backends.resolve`."""
    points = entry_points(group=_GROUP)
    backends = {
        (point.dist.name if point.dist else point.value, point.value): point for point in points if point.name == scheme
    }
    if not backends:
        there = ", ".join(f"{name}://" for name in sorted({*known, *(point.name for point in points)}))
        file = "" if scheme else " A file's URL is sqlite:///visits.db, or sqlite:////data/visits.db from the root."
        raise UnknownSchemeError(
            f"no store answers to {scheme + '://' if scheme else 'a URL without a scheme'}; there is {there}, and "
            f"what packages add through the entry point group {_GROUP!r}: is the one that has it installed here?{file}",
            scheme=scheme,
        )
    if len(backends) > 1:
        packages = " and ".join(sorted(package for package, _ in backends))
        raise ConfigurationError(f"{scheme}:// is claimed by {packages}: uninstall all but one", scheme=scheme)
    ((package, _), point) = backends.popitem()
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
    except Exception as error:  # noqa: BLE001  another package's code may raise anything
        problem = f"{where}, and that could not read the URL: {type(error).__name__}"
    raise ConfigurationError(f"{problem}. Its message is not repeated here, because it may hold a password")
