"""The aggregators that keep a sketch of Apache DataSketches. See docs/sketches.md for errors and sizes.

Spark computes the sketch of a batch, and tasks merge it with the stored one. No sketch can take a row back.
"""

from __future__ import annotations

import math
import re
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Self, cast

from mapstate.aggregators.aggregator import Aggregator, Row, column_type
from mapstate.aggregators.columns import column_of
from mapstate.aggregators.of_column import FLOATS, INTEGERS, OfColumn, unsupported
from mapstate.errors import ConfigurationError
from mapstate.serializers.value_types import CHECKED, with_checksum
from mapstate.sketches import bounds, datasketches, read_sketch, theta_bytes

if TYPE_CHECKING:
    from pyspark.sql import Column

_BOUNDS = "estimate:bigint,lower:bigint,upper:bigint"
_MOST_TRACKED = 1_000_000


class _Sketch(OfColumn):
    """A sketch of a column, stored as its bytes and their checksum. Nulls are left out."""

    form: ClassVar[str]
    """The name of the bytes in the type of the stored value."""
    _kind: ClassVar[str]
    """The class of ``datasketches`` that reads the bytes."""
    _takes: ClassVar[tuple[str, ...]] = ("int", "bigint", "string")
    _shows: ClassVar[str] = f"struct<{_BOUNDS}>"
    _since: ClassVar[tuple[int, int]] = (4, 1)
    """The first version of Spark that has the aggregate function."""

    def bind(self, columns: Mapping[str, str]) -> str:
        """See `Aggregator.bind`. Raises also MissingDriverError, and ConfigurationError for a Spark that is too old."""
        import pyspark

        kind = column_type(columns, self.column, self)
        if kind.partition("(")[0] not in self._takes:
            raise unsupported(self, self.column, kind, f"one of {', '.join(self._takes)} (cast it)")
        self._package()
        if tuple(map(int, pyspark.__version__.split(".")[:2])) < self._since:
            raise ConfigurationError(
                f"{self} needs Spark {'.'.join(map(str, self._since))}, whose aggregate function makes such sketches; "
                f"this is Spark {pyspark.__version__}. Of the sketches, it has ApproxCountDistinct only."
            )
        return f"struct<{self.form}{CHECKED}"

    def assemble(self, columns: list[list[Any]]) -> list[Any]:
        """See `NativeCombiner.assemble`. Raises MissingDriverError, before its task writes anything."""
        self._package()
        return [None if sketch is None else with_checksum(bytes(sketch)) for sketch in columns[0]]

    def init(self, row: Row) -> Any:
        sketch, value = self._empty(self._package()), row[self.column]
        if value is not None:
            sketch.update(self._item(value))
        return with_checksum(self._bytes(sketch))

    def zero(self) -> Any:
        return with_checksum(self._bytes(self._empty(self._package())))

    def combine_all(self, stored: list[Any], partials: list[Any]) -> list[Any]:
        package = self._package()
        pairs = zip(stored, partials, strict=True)
        parts = ([self._read(part[0]) for part in pair if part is not None] for pair in pairs)
        return [with_checksum(self._merged(package, sketches)) for sketches in parts]

    def result(self, value: Any) -> Any:
        return None if value is None else self._shown(self._read(value[0]))

    def result_type(self, value_type: str) -> str:  # noqa: ARG002  always the same
        return self._shows

    def _package(self) -> Any:
        return datasketches(type(self).__name__)  # a reader's aggregator has no column to describe

    def _read(self, sketch: bytes) -> Any:
        return read_sketch(getattr(self._package(), self._kind), sketch)

    def _item(self, value: Any) -> Any:
        return value

    @abstractmethod
    def _empty(self, package: Any) -> Any:
        """A sketch of no values, which takes some."""

    def _bytes(self, sketch: Any) -> bytes:
        return cast("bytes", sketch.serialize())

    def _merged(self, package: Any, sketches: list[Any]) -> bytes:
        first, *others = sketches or [self._empty(package)]
        for other in others:
            first.merge(other)
        return self._bytes(first)

    @abstractmethod
    def _shown(self, sketch: Any) -> Any:
        """The result of a sketch."""


class _Distinct(_Sketch):
    """A sketch of the different values of a column, of the size ``2**log2k``."""

    _sizes: ClassVar[tuple[int, int]]

    def __init__(self, column: str | Column, *, log2k: int = 12, where: str | Column | None = None) -> None:
        super().__init__(column, where=where)
        self.log2k = _within(self, "log2k", log2k, *self._sizes)

    def describe(self) -> str:
        return f"{type(self).__name__}({self.column}, log2k={self.log2k})"

    @classmethod
    def of_ledger(cls, description: str) -> Self:
        shows = super().of_ledger(description)
        match = re.search(r", log2k=(\d+)\)$", description)
        shows.log2k = int(match[1]) if match else 12
        return shows

    def _shown(self, sketch: Any) -> Any:
        return bounds(sketch)


class ApproxCountDistinct(_Distinct):
    """About how many different values a column has, by a HyperLogLog sketch: ``estimate``, ``lower`` and ``upper``.

    The bounds hold in 95 of 100 cases. Nulls and empty text do not count. ``log2k`` is the size, 4 to 21: a full sketch
    has a little more than ``2**log2k / 2`` bytes, and a relative standard error of ``1.04 / sqrt(2**log2k)``: 1.6 %
    for 12. The column is an int, a bigint or a string.

    Example:
        ``ApproxCountDistinct("user_id")`` shows ``{'estimate': 15304, 'lower': 14817, 'upper': 15807}``.

    """

    form = "hll"
    _kind = "hll_sketch"
    _since = (3, 5)
    _sizes = (4, 21)

    def partials(self, value_type: str) -> list[Column]:  # noqa: ARG002  always bytes
        from pyspark.sql import functions as F

        return [F.hll_sketch_agg(column_of(self.column), self.log2k)]

    def _empty(self, package: Any) -> Any:
        return package.hll_sketch(self.log2k)

    def _bytes(self, sketch: Any) -> bytes:
        return cast("bytes", sketch.serialize_compact())

    def _merged(self, package: Any, sketches: list[Any]) -> bytes:
        union = package.hll_union(self.log2k)
        for sketch in sketches:
            union.update(sketch)
        return self._bytes(union.get_result(package.HLL_4))  # half the bytes of Spark's HLL_8, the same answers


class ThetaSketch(_Distinct):
    """The different values of a column as a set: ``estimate``, ``lower`` and ``upper`` of their number.

    The sets of several keys have a union, an intersection and a difference: see `mapstate.sketches`. The bounds hold in
    95 of 100 cases. Nulls and empty text do not count. ``log2k`` is the size, 5 to 26: a full sketch has up to
    ``8 * 2**log2k`` bytes, and a relative standard error of ``1 / sqrt(2**log2k)``: 1.6 % for 12. The column is an int,
    a bigint or a string. Needs Spark 4.1.
    """

    form = "theta"
    _kind = "compact_theta_sketch"
    _sizes = (5, 26)

    def partials(self, value_type: str) -> list[Column]:  # noqa: ARG002  always bytes
        from pyspark.sql import functions as F

        return [F.theta_sketch_agg(column_of(self.column), self.log2k)]

    def _empty(self, package: Any) -> Any:
        return package.update_theta_sketch(self.log2k)

    def _bytes(self, sketch: Any) -> bytes:
        return theta_bytes(sketch.compact())

    def _merged(self, package: Any, sketches: list[Any]) -> bytes:
        union = package.theta_union(self.log2k)
        for sketch in sketches:
            union.update(sketch)
        return theta_bytes(union.get_result())


class ApproxPercentiles(_Sketch):
    """About which values of a column have the ``ranks``, by a KLL sketch: an array in the order of ``ranks``.

    Each entry has ``rank``, ``estimate``, ``lower`` and ``upper``, the last three as doubles. The value of the exact
    rank lies between the bounds in 99 of 100 cases. Nulls and NaN do not count; null of no values. ``k`` is the size, 8
    to 65535: a full sketch has about ``25 * k`` bytes, and 200 an error of 1.33 % of the ranks. Needs Spark 4.1.

        ApproxPercentiles("milliseconds", [0.5, 0.99])  # [{'rank': 0.5, 'estimate': 12.0, 'lower': ...}, ...]
    """

    form = "kll"
    _kind = "kll_doubles_sketch"
    _takes = (*INTEGERS, *FLOATS, "decimal")
    _shows = "array<struct<rank:double,estimate:double,lower:double,upper:double>>"

    def __init__(
        self, column: str | Column, ranks: Sequence[float], *, k: int = 200, where: str | Column | None = None
    ) -> None:
        given: Any = ranks
        if not isinstance(given, list | tuple) or not given:
            raise ConfigurationError(f"ApproxPercentiles needs a list of ranks such as [0.5, 0.99], not {given!r}")
        for rank in given:
            if type(rank) not in (int, float) or not 0 <= rank <= 1:
                raise ConfigurationError(f"a rank of ApproxPercentiles is from 0 to 1, not {rank!r}: 0.99 for 99 %")
        super().__init__(column, where=where)
        self.ranks = tuple(map(float, ranks))
        self.k = _within(self, "k", k, 8, 65535)

    def describe(self) -> str:
        """See `Aggregator.describe`. Readers take the ranks from it."""
        return f"ApproxPercentiles({self.column}, ranks={' '.join(map(repr, self.ranks))}, k={self.k})"

    @classmethod
    def of_ledger(cls, description: str) -> Self:
        column, ranks, k = description.partition("(")[2].removesuffix(")").rsplit(", ", 2)
        parts = ranks.removeprefix("ranks=").split()
        return cls(column, [float(part) for part in parts], k=int(k.removeprefix("k=")))

    def partials(self, value_type: str) -> list[Column]:  # noqa: ARG002  always bytes
        """See `NativeCombiner.partials`. Sketches of doubles: datasketches merges those of longs 100 times slower."""
        from pyspark.sql import functions as F

        return [F.kll_sketch_agg_double(column_of(self.column).cast("double"), self.k)]

    def _item(self, value: Any) -> Any:
        return float(value)

    def _empty(self, package: Any) -> Any:
        return package.kll_doubles_sketch(self.k)

    def _shown(self, sketch: Any) -> Any:
        if sketch.is_empty():
            return None
        error = sketch.normalized_rank_error(as_pmf=False) if sketch.is_estimation_mode() else 0.0
        asked = [near for rank in self.ranks for near in (rank, max(0.0, rank - error), min(1.0, rank + error))]
        values = sketch.get_quantiles(asked, inclusive=True)  # as Spark's kll_sketch_get_quantile
        return [
            {"rank": rank, "estimate": values[i], "lower": values[i + 1], "upper": values[i + 2]}
            for i, rank in zip(range(0, len(values), 3), self.ranks, strict=True)
        ]


class ApproxTopK(_Sketch):
    """About which ``k`` values of a column are most frequent, by a sketch of frequent items: an array, the first first.

    Each entry has ``item``, ``estimate``, ``lower`` and ``upper``; the bounds always hold. An item is text: an integer
    as Spark casts it. ``tracked`` is how many different values a sketch tells apart, at least: with no more of them in
    a key all counts are exact. The error is at most ``3.5 / m`` of all rows, where ``m`` is the power of 2 that is
    ``tracked / 0.75`` or above it. A full sketch has up to ``0.75 * m`` values, each with 12 bytes and its text. Nulls
    are left out. Needs Spark 4.1.

        ApproxTopK(3, "url")  # [{'item': '/', 'estimate': 120, 'lower': 120, 'upper': 120}, ...]
    """

    form = "top_k"
    _kind = "frequent_strings_sketch"
    _takes = (*INTEGERS, "string")
    _shows = f"array<struct<item:string,{_BOUNDS}>>"

    def __init__(self, k: int, column: str | Column, *, tracked: int = 1000, where: str | Column | None = None) -> None:
        super().__init__(column, where=where)
        self.tracked = _within(self, "tracked", tracked, 1, _MOST_TRACKED)
        self.k = _within(self, "k", k, 1, tracked)

    def describe(self) -> str:
        """See `Aggregator.describe`. Readers take ``k`` from it."""
        return f"ApproxTopK({self.k}, {self.column}, tracked={self.tracked})"

    @classmethod
    def of_ledger(cls, description: str) -> Self:
        k, _, rest = description.partition("(")[2].removesuffix(")").partition(", ")
        column, _, tracked = rest.rpartition(", tracked=")
        return cls(int(k), column, tracked=int(tracked))

    def partials(self, value_type: str) -> list[Column]:  # noqa: ARG002  always bytes
        """See `NativeCombiner.partials`. A struct of Spark's, whose first part is the sketch."""
        from pyspark.sql import functions as F

        return [F.call_function("approx_top_k_accumulate", column_of(self.column).cast("string"), F.lit(self.tracked))]

    def assemble(self, columns: list[list[Any]]) -> list[Any]:
        return super().assemble([[None if part is None else next(iter(part.values())) for part in columns[0]]])

    def _item(self, value: Any) -> Any:
        return str(value)

    def _empty(self, package: Any) -> Any:
        return package.frequent_strings_sketch(max(3, math.ceil(math.log2(math.ceil(self.tracked / 0.75)))))

    def _shown(self, sketch: Any) -> Any:
        kind = self._package().frequent_items_error_type.NO_FALSE_POSITIVES  # as Spark's approx_top_k_estimate
        entries = sorted(sketch.get_frequent_items(kind), key=lambda entry: (-entry[1], entry[0]))
        return [
            {"item": item, "estimate": estimate, "lower": lower, "upper": upper}
            for item, estimate, lower, upper in entries[: self.k]
        ]


class SketchBytes(Aggregator):
    """For a reader of any sketch: shows its bytes, in the form of Apache DataSketches, for `mapstate.sketches`.

    open_reader(url, "visitors", aggregators={"users": SketchBytes()})
    """

    def result(self, value: Any) -> Any:
        """The bytes; None where a key has no sketch."""
        return None if value is None else value[0]


SKETCHES = (ApproxCountDistinct, ApproxPercentiles, ApproxTopK, ThetaSketch)
"""All aggregators that keep a sketch."""


def _within(who: Aggregator, name: str, value: Any, least: int, most: int) -> int:
    if type(value) is not int or not least <= value <= most:
        raise ConfigurationError(f"{name} of {type(who).__name__} is a whole number from {least} to {most}: {value!r}")
    return value
