"""Collect, CountDistinct, TopN and LastN keep several values of a column in a sorted array, up to a bound."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Literal, Self, cast

from mapstate.aggregators.aggregator import Row
from mapstate.aggregators.columns import column_of
from mapstate.aggregators.extremes import order_of
from mapstate.aggregators.of_column import OfColumn, check_ordered, only_where
from mapstate.errors import ConfigurationError, ValueOverflowError

if TYPE_CHECKING:
    from pyspark.sql import Column

_EMPTY: tuple[list[Any]] = ([],)


class Collect(OfColumn):
    """All values of a column, sorted, as an array; nulls are left out. At most ``most`` of one key.

    A key with more ends the batch with a ValueOverflowError, and the batch is not committed.
    """

    def __init__(self, column: str | Column, *, most: int, where: str | Column | None = None) -> None:
        if not _is_number(most):
            raise ConfigurationError(f"{type(self).__name__} needs most=, how many values a key may hold, not {most!r}")
        super().__init__(column, where=where)
        self.most = most

    def bind(self, columns: Mapping[str, str]) -> str:
        return f"struct<values:array<{check_ordered(self, self.column, columns)}>>"

    def partials(self, value_type: str) -> list[Column]:  # noqa: ARG002  the column's own type
        from pyspark.sql import functions as F

        return [F.collect_list(column_of(self.column))]

    def set_stored(self, value_type: str) -> None:  # noqa: ARG002  for TopN
        """For a reader that joins stored values: what its ledger's text does not say. It sets no bound."""
        self.most = sys.maxsize

    def assemble(self, columns: list[list[Any]]) -> list[Any]:
        """See `NativeCombiner.assemble`. Raises ValueOverflowError."""
        return [self._kept(values) for values in columns[0]]

    def init(self, row: Row) -> Any:
        value = row[self.column]
        return _EMPTY if value is None else ([value],)

    def zero(self) -> Any:
        return _EMPTY

    def combine_all(self, stored: list[Any], partials: list[Any]) -> list[Any]:
        """See `NativeCombiner.combine_all`. Raises ValueOverflowError."""
        return [
            self._kept([*(old or _EMPTY)[0], *(new or _EMPTY)[0]]) for old, new in zip(stored, partials, strict=True)
        ]

    def result(self, value: Any) -> Any:
        """The values."""
        return None if value is None else list(value[0])

    def result_type(self, value_type: str) -> str:
        return value_type.removeprefix("struct<values:").removesuffix(">")

    def _kept(self, values: Iterable[Any]) -> tuple[list[Any]]:
        kept = sorted(values, key=_place)
        self._check_fit(len(kept))
        return (kept,)

    def _check_fit(self, values: int) -> None:
        if values > self.most:
            raise ValueOverflowError(
                f"{self}: a key has {values} values, and at most {self.most} fit (most=): nothing of this batch "
                "counts. Raise most=, or keep a count or a sketch instead.",
                aggregator=self.describe(),
            )


class CountDistinct(Collect):
    """How many different values a column has, exactly: a bigint. Nulls do not count. At most ``most`` of one key.

    The state keeps the values themselves. Where a key has more, see `Collect`; for many, keep a sketch.
    """

    def partials(self, value_type: str) -> list[Column]:  # noqa: ARG002  the column's own type
        from pyspark.sql import functions as F

        return [F.collect_set(column_of(self.column))]

    def result(self, value: Any) -> Any:
        """The number of values."""
        return 0 if value is None else len(value[0])

    def result_type(self, value_type: str) -> str:  # noqa: ARG002  always a count
        return "bigint"

    def _kept(self, values: Iterable[Any]) -> tuple[list[Any]]:
        return super()._kept(next(same) for _, same in groupby(sorted(values, key=_place), order_of))


class TopN(Collect):
    """The ``n`` greatest values of a column, greatest first, as an array; nulls are left out.

    With ``by="count"``, the ``n`` most frequent values, as an array of structs of ``value`` and ``count``; of values
    with one count the least comes first. To be exact, the state keeps the counts of all values, of one key at most
    ``most``. Where a key has more, see `Collect`. For many, keep a sketch.
    """

    def __init__(
        self,
        n: int,
        column: str | Column,
        *,
        by: Literal["value", "count"] = "value",
        most: int | None = None,
        where: str | Column | None = None,
    ) -> None:
        if by not in ("value", "count"):
            raise ConfigurationError(f"TopN is by='value' or by='count', not by={by!r}")
        if by == "value" and most is not None:
            raise ConfigurationError("TopN by value keeps n values: most= is for by='count'")
        if not _is_number(n):
            raise ConfigurationError(f"TopN needs how many values it shows, such as TopN(3, 'price'), not {n!r}")
        super().__init__(column, most=n if by == "value" else cast("int", most), where=where)
        self.n = n
        self.by = by

    @classmethod
    def of_ledger(cls, description: str) -> Self:
        shows = super().of_ledger(description)
        match = re.match(r"TopN\((\d+), ", description)
        shows.n = int(match[1]) if match else 0
        return shows

    def set_stored(self, value_type: str) -> None:
        super().set_stored(value_type)
        self.by = "count" if ",counts:" in value_type else "value"
        if self.by == "value":
            self.most = self.n

    def bind(self, columns: Mapping[str, str]) -> str:
        kind = super().bind(columns)
        return kind if self.by == "value" else kind.removesuffix(">") + ",counts:array<bigint>>"

    def describe(self) -> str:
        """See `Aggregator.describe`. Another ``n`` is another field: what was passed over is not kept."""
        return f"TopN({self.n}, {self.column}{' by count' if self.by == 'count' else ''})"

    def partials(self, value_type: str) -> list[Column]:
        from pyspark.sql import functions as F

        if self.by == "count":
            return super().partials(value_type)
        values = F.collect_list(column_of(self.column))
        return [F.slice(F.sort_array(values, asc=False), 1, self.most)]

    def assemble(self, columns: list[list[Any]]) -> list[Any]:
        """See `NativeCombiner.assemble`. Raises ValueOverflowError."""
        if self.by == "value":
            return super().assemble(columns)
        return [self._counted((value, 1) for value in values) for values in columns[0]]

    def init(self, row: Row) -> Any:
        value = row[self.column]
        if self.by == "value" or value is None:
            return super().init(row) if self.by == "value" else self.zero()
        return [value], [1]

    def zero(self) -> Any:
        return super().zero() if self.by == "value" else ([], [])

    def combine_all(self, stored: list[Any], partials: list[Any]) -> list[Any]:
        """See `NativeCombiner.combine_all`. Raises ValueOverflowError."""
        if self.by == "value":
            return super().combine_all(stored, partials)
        none = self.zero()
        return [
            self._counted([*zip(*(old or none), strict=True), *zip(*(new or none), strict=True)])
            for old, new in zip(stored, partials, strict=True)
        ]

    def result(self, value: Any) -> Any:
        """The ``n`` values, or values with their counts."""
        if value is None or len(value) == 1:
            return super().result(value)
        most_frequent = sorted(zip(*value, strict=True), key=itemgetter(1), reverse=True)[: self.n]
        return [{"value": value, "count": count} for value, count in most_frequent]

    def result_type(self, value_type: str) -> str:
        values, counts, _ = value_type.partition(">,counts:array<bigint>>")
        if not counts:
            return super().result_type(value_type)
        kind = values.removeprefix("struct<values:array<")
        return f"array<struct<value:{kind},count:bigint>>"

    def _kept(self, values: Iterable[Any]) -> tuple[list[Any]]:
        return (sorted(values, key=_place, reverse=True)[: self.most],)

    def _counted(self, pairs: Iterable[tuple[Any, int]]) -> tuple[list[Any], list[int]]:
        values: list[Any] = []
        counts: list[int] = []
        in_order = sorted(pairs, key=lambda pair: _place(pair[0]))
        for _, same in groupby(in_order, lambda pair: order_of(pair[0])):
            together = list(same)
            values.append(together[0][0])
            counts.append(sum(count for _, count in together))
        self._check_fit(len(values))
        return values, counts


class LastN(OfColumn):
    """The values of a column in the ``n`` rows with the greatest ``by``, the last one first, as an array.

    Rows without a ``by`` do not count. Of several rows with the same ``by``, the greatest value comes first.
    """

    def __init__(
        self, column: str | Column, n: int, by: str | Column | None = None, *, where: str | Column | None = None
    ) -> None:
        if not _is_number(n) or by is None:
            raise ConfigurationError(
                f"LastN needs how many values it keeps, and the column that orders the rows: LastN({column!r}, 3, "
                "by='time')"
            )
        self.column = cast("str", column)
        self.by = cast("str", only_where(by, where))
        self.n = n

    @classmethod
    def of_ledger(cls, description: str) -> Self:
        shows = super().of_ledger(description)
        match = re.match(r"LastN\((\d+), ", description)
        shows.n = int(match[1]) if match else 1
        return shows

    def columns(self) -> Sequence[str]:
        return (self.column, self.by)

    def bind(self, columns: Mapping[str, str]) -> str:
        by, value = (check_ordered(self, name, columns) for name in (self.by, self.column))
        return f"struct<by:array<{by}>,value:array<{value}>>"

    def describe(self) -> str:
        """See `Aggregator.describe`. Another ``n`` is another field: what was passed over is not kept."""
        return f"LastN({self.n}, {self.column} by {self.by})"

    def partials(self, value_type: str) -> list[Column]:  # noqa: ARG002  the columns' own types
        from pyspark.sql import functions as F

        by = column_of(self.by)
        pair = F.when(by.isNotNull(), F.struct(by.alias("by"), column_of(self.column).alias("value")))
        last = F.slice(F.sort_array(F.collect_list(pair), asc=False), 1, self.n)
        return [last["by"], last["value"]]

    def assemble(self, columns: list[list[Any]]) -> list[Any]:
        return list(zip(*columns, strict=True))

    def init(self, row: Row) -> Any:
        by = row[self.by]
        return self.zero() if by is None else ([by], [row[self.column]])

    def zero(self) -> Any:
        return [], []

    def combine_all(self, stored: list[Any], partials: list[Any]) -> list[Any]:
        return [self.fold([old or self.zero(), new or self.zero()]) for old, new in zip(stored, partials, strict=True)]

    def fold(self, values: Sequence[Any]) -> Any:
        pairs = [pair for bys, chosen in values for pair in zip(bys, chosen, strict=True)]
        pairs.sort(key=lambda pair: (order_of(pair[0]), _place(pair[1]), _place(pair[0])), reverse=True)
        kept = pairs[: self.n]
        return [by for by, _ in kept], [value for _, value in kept]

    def result(self, value: Any) -> Any:
        """The values."""
        return None if value is None else list(value[1])

    def result_type(self, value_type: str) -> str:
        return value_type[value_type.index(",value:") + len(",value:") : -1]


def _place(value: Any) -> tuple[Any, ...]:
    """A sort key: Spark's order, and -0.0 before 0.0, so that equal values have one order."""
    return (1, value, math.copysign(1.0, value)) if value == 0.0 and type(value) is float else order_of(value)


def _is_number(value: Any) -> bool:
    return type(value) is int and value > 0
