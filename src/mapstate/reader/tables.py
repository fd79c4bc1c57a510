"""A state as a table of pyarrow, whose types are those of the ledger's schema."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mapstate.aggregators.fields import Fields, shown_as
from mapstate.errors import UnsupportedTypeError, cut, missing_driver
from mapstate.keys import Key
from mapstate.schema import KeyField
from mapstate.serializers.value_types import struct_fields

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["Columns", "array_of"]


class Columns:
    """The columns of a state: those of its keys, then its fields, or the ``chosen`` ones of them.

    Raises MissingDriverError without pyarrow, and UnsupportedTypeError for a type that Arrow lacks.
    """

    def __init__(self, keys: Sequence[KeyField], fields: Fields, chosen: Sequence[str] | None) -> None:
        self._arrow = _pyarrow()
        shown = {
            field.name: aggregator.result_type(field.type)
            for field, aggregator in zip(fields.fields, fields.aggregators, strict=True)
        }
        self._names = list(shown if chosen is None else chosen)
        self._json = {name for name in self._names if shown[name] == "any"}
        types = [(key.name, key.type) for key in keys]
        types += [(name, "string" if name in self._json else shown[name]) for name in self._names]
        self.schema = self._arrow.schema([(name, _arrow_type(self._arrow, kind)) for name, kind in types])

    def batch(self, page: Sequence[tuple[Key, dict[str, Any]]]) -> pa.RecordBatch:
        """One page of a scan."""
        keys = zip(*(key for key, _ in page), strict=True)
        fields = ([self._shown(name, own[name]) for _, own in page] for name in self._names)
        arrays = [
            array_of(self._arrow, field, list(values))
            for values, field in zip((*keys, *fields), self.schema, strict=True)
        ]
        if not arrays:  # an ungrouped state without its fields
            return self._arrow.RecordBatch.from_pylist([{}] * len(page), self.schema)
        return self._arrow.RecordBatch.from_arrays(arrays, schema=self.schema)

    def table(self, batches: Sequence[pa.RecordBatch]) -> pa.Table:
        """All pages, without a copy."""
        return self._arrow.Table.from_batches(batches, self.schema)

    def _shown(self, name: str, value: Any) -> Any:
        return shown_as(value, is_json=name in self._json)


def array_of(pa: Any, field: Any, values: Any) -> Any:
    """The values as an array of a field of a schema. Raises UnsupportedTypeError, where a value does not fit."""
    try:
        return pa.array(values, field.type)
    except (pa.ArrowException, OverflowError) as error:
        raise UnsupportedTypeError(
            f"a value of the column {field.name!r} does not fit into pyarrow's {field.type} ({cut(error)}). It can be "
            "read with get and scan, and exported as CSV or JSON lines.",
            column=field.name,
            type=str(field.type),
        ) from error


def _pyarrow() -> Any:
    try:
        import pyarrow as pa
    except ModuleNotFoundError as error:
        raise missing_driver("to_arrow", error, extra="tables") from error
    return pa


def _arrow_type(pa: Any, name: str) -> Any:
    """Arrow's type for one of Spark's."""
    if name.startswith("decimal("):
        precision, scale = name[len("decimal(") : -1].split(",")
        return pa.decimal128(int(precision), int(scale))
    if name.startswith("array<"):
        return pa.list_(_arrow_type(pa, name[len("array<") : -1]))
    if name.startswith("struct<"):
        return pa.struct([(field, _arrow_type(pa, kind)) for field, kind in struct_fields(name)])
    kinds = {
        "bigint": pa.int64(),
        "int": pa.int32(),
        "smallint": pa.int16(),
        "tinyint": pa.int8(),
        "double": pa.float64(),
        "float": pa.float32(),
        "string": pa.string(),
        "boolean": pa.bool_(),
        "date": pa.date32(),
        "timestamp": pa.timestamp("us", tz="UTC"),
        "timestamp_ntz": pa.timestamp("us"),
        "binary": pa.binary(),
    }
    if name not in kinds:
        raise UnsupportedTypeError(f"a table of pyarrow has no column of the type {name}: read with scan()", type=name)
    return kinds[name]
