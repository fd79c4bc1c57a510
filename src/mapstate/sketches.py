"""Sketches as bytes, in the binary form of Apache DataSketches: how they are merged, and sets of several keys.

`theta_union`, `theta_intersection` and `theta_difference` take the bytes of theta sketches, such as a reader gives with
`mapstate.aggregators.SketchBytes`, or Spark's `theta_sketch_agg`. They run wherever the package ``datasketches`` is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from mapstate.errors import CorruptRecordError, MissingDriverError, UsageError, cut

_DEVIATIONS = 2
_UNREADABLE = (ValueError, IndexError, RuntimeError, MemoryError, TypeError)


def datasketches(who: object) -> Any:
    """The package ``datasketches``. Raises MissingDriverError, which names ``who`` needs it."""
    try:
        import datasketches as package
    except ModuleNotFoundError as error:
        raise MissingDriverError(
            f"{who} needs the package {error.name!r}, which is not installed here; this process wrote nothing. "
            "Install it for the driver, each executor and each reader: pip install 'mapstate[sketches]'",
            package=error.name,
        ) from error
    return package


def read_sketch(kind: Any, sketch: bytes) -> Any:
    """The sketch of a class of ``datasketches``. Raises CorruptRecordError for bytes of another kind."""
    with _damage_named(kind.__name__):
        return kind.deserialize(bytes(sketch))


@contextmanager
def _damage_named(kind: str) -> Iterator[None]:
    """Raise what ``datasketches`` finds in the bytes of a sketch as a CorruptRecordError."""
    try:
        yield
    except _UNREADABLE as error:
        raise CorruptRecordError(f"the bytes are not those of a {kind}: {cut(error)}") from error


def bounds(sketch: Any) -> dict[str, int]:
    """The estimate of a sketch of distinct values, and bounds that hold in 95 of 100 cases, all rounded."""
    lower, upper = sketch.get_lower_bound(_DEVIATIONS), sketch.get_upper_bound(_DEVIATIONS)
    return {"estimate": round(sketch.get_estimate()), "lower": round(lower), "upper": round(upper)}


def theta_union(sketches: Iterable[bytes], *, log2k: int = 12) -> bytes:
    """The theta sketch of the values that are in any of the sketches.

    Args:
        sketches: The bytes of theta sketches. None is no sketch, and adds nothing: a key that is absent.
        log2k: The size of the result: at most about 2**log2k hashes. 5 to 26.

    Raises:
        CorruptRecordError: Bytes are no theta sketch.
        UsageError: ``log2k`` is out of its range.
        MissingDriverError: The package ``datasketches`` is not installed.

    """
    if not 5 <= log2k <= 26:
        raise UsageError(f"log2k of theta_union is a whole number from 5 to 26, not {log2k!r}")
    package = datasketches("theta_union")
    union = package.theta_union(log2k)
    for sketch in sketches:
        if sketch is not None:
            _add(package, union, sketch)
    return theta_bytes(union.get_result())


def theta_intersection(sketches: Iterable[bytes]) -> bytes:
    """The theta sketch of the values that are in all of the sketches.

    The error of a small intersection of large sets is that of the large sets, see docs/sketches.md.

    Raises:
        CorruptRecordError: Bytes are no theta sketch.
        UsageError: There is no sketch to begin with. A key that is absent has no sketch: ask before for None.
        MissingDriverError: The package ``datasketches`` is not installed.

    """
    package = datasketches("theta_intersection")
    intersection = package.theta_intersection()
    for sketch in sketches:
        _add(package, intersection, sketch)
    if not intersection.has_result():
        raise UsageError("theta_intersection takes one sketch or more, and got none")
    return theta_bytes(intersection.get_result())


def theta_difference(sketch: bytes, without: bytes) -> bytes:
    """The theta sketch of the values that are in the first sketch and not in the second.

    Raises CorruptRecordError and MissingDriverError, as `theta_union`.
    """
    package = datasketches("theta_difference")
    parts = _theta(package, sketch), _theta(package, without)
    with _damage_named("compact_theta_sketch"):
        return theta_bytes(package.theta_a_not_b().compute(*parts))


def theta_estimate(sketch: bytes) -> dict[str, int]:
    """The number of distinct values in a theta sketch: ``estimate``, ``lower`` and ``upper``.

    The bounds hold in 95 of 100 cases. Raises CorruptRecordError and MissingDriverError, as `theta_union`.
    """
    return bounds(_theta(datasketches("theta_estimate"), sketch))


def _add(package: Any, operation: Any, sketch: bytes) -> None:
    part = _theta(package, sketch)
    with _damage_named("compact_theta_sketch"):
        operation.update(part)


def _theta(package: Any, sketch: bytes) -> Any:
    return read_sketch(package.compact_theta_sketch, sketch)


def theta_bytes(sketch: Any) -> bytes:
    """The bytes of a compact theta sketch, compressed, as Spark 4.3 writes them."""
    data: bytes = sketch.serialize(compress=True)
    return data
