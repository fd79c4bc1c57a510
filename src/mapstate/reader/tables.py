"""A state as a table of pyarrow, whose types are those of the ledger's schema."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

from mapstate.aggregators.aggregator import Aggregator
from mapstate.aggregators.fields import Fields
from mapstate.aggregators.folding import called
from mapstate.errors import UnsupportedTypeError, cut, missing_driver
from mapstate.keys import Key, StoreKey
from mapstate.schema import KeyField
from mapstate.values import column_type, in_column, item_type, struct_fields

if TYPE_CHECKING:
    import pyarrow as pa

    from mapstate.reader.committed import Opened
    from mapstate.serializers.blocks import Block


class Columns:
    """The ``names`` of a state's columns, None for all. Raises MissingDriverError and UnsupportedTypeError."""

    def __init__(self, keys: Sequence[KeyField], fields: Fields, names: Sequence[str] | None = None) -> None:
        self._arrow = driver("pyarrow", "to_arrow")
        types = types_of(keys, fields)
        names = list(types) if names is None else names
        i = {key.name: place for place, key in enumerate(keys)}
        self._from_keys = [i.get(name) for name in names]
        self._shown = {name: kind for name in names if column_type(kind := types[name]) != kind}
        self.schema = self._arrow.schema([(name, arrow_type(self._arrow, column_type(types[name]))) for name in names])

    def batch(self, keys: Sequence[Key], fields: Fields, values: Sequence[Any]) -> pa.RecordBatch:
        """Some keys with their values, which have the ``fields``: those of the state, or more."""
        return self._of_columns(list(zip(*keys, strict=True)), fields, fields.columns(values), len(keys))

    def of_blocks(self, opened: Opened, texts: Sequence[StoreKey], blocks: Sequence[Block]) -> pa.RecordBatch | None:
        """The same of some blocks and their keys; None where these do not come in columns."""
        of_keys, codec, fields = opened.keys.columns_of(texts), opened.codec.blocks, opened.fields
        if of_keys is None or codec is None:
            return None
        of_fields = [
            column
            if type(aggregator).result is Aggregator.result
            else [called(aggregator, aggregator.result, value) for value in column]
            for aggregator, column in zip(fields.aggregators, codec.columns(blocks), strict=True)
        ]
        return self._of_columns(of_keys, fields, of_fields, len(texts))

    def batches(self, pages: Iterable[tuple[Fields, Any, Any]]) -> Iterator[pa.RecordBatch]:
        """The pages of `StateReader.part`, which is given these columns."""
        for fields, keys, values in pages:
            yield values if keys is None else self.batch(keys, fields, values)

    def _of_columns(
        self, of_keys: Sequence[Any], fields: Fields, of_fields: Sequence[Any], rows: int
    ) -> pa.RecordBatch:
        by_name = dict(zip([field.name for field in fields.fields], of_fields, strict=True))
        arrays: list[Any] = []
        for field, place in zip(self.schema, self._from_keys, strict=True):
            column: Any = by_name.get(field.name, ()) if place is None else of_keys[place] if rows else ()
            if field.name in self._shown:
                column = [in_column(value, self._shown[field.name]) for value in column]
            arrays.append(array_of(self._arrow, field, column))
        return self._of(arrays, rows)

    def absent(self, keys: Sequence[Key]) -> pa.RecordBatch:
        of_keys = list(zip(*keys, strict=True))
        arrays = [
            self._arrow.nulls(len(keys), field.type) if place is None else array_of(self._arrow, field, of_keys[place])
            for field, place in zip(self.schema, self._from_keys, strict=True)
        ]
        return self._of(arrays, len(keys))

    def _of(self, arrays: list[Any], rows: int) -> pa.RecordBatch:
        if arrays:
            return self._arrow.RecordBatch.from_arrays(arrays, schema=self.schema)
        return self._arrow.RecordBatch.from_pylist([{}] * rows, self.schema)  # an ungrouped state without its fields

    def table(self, batches: Iterable[pa.RecordBatch]) -> pa.Table:
        return self._arrow.Table.from_batches(batches, self.schema)


def types_of(keys: Sequence[KeyField], fields: Fields) -> dict[str, str]:
    """The Spark type of each column, "any" for the result of an aggregator without one."""
    names = [field.name for field in fields.fields]
    return {key.name: key.type for key in keys} | dict(zip(names, fields.types, strict=True))


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


def driver(name: str, user: str) -> Any:
    """The library of that name, which ``user`` needs. Raises MissingDriverError."""
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        raise missing_driver(user, error, extra="polars" if name == "polars" else "tables") from error


def arrow_type(pa: Any, name: str) -> Any:
    """Arrow's type for one of Spark's. Raises UnsupportedTypeError."""
    if name.startswith("decimal("):
        precision, scale = name[len("decimal(") : -1].split(",")
        return pa.decimal128(int(precision), int(scale))
    if name.startswith("array<"):
        return pa.list_(arrow_type(pa, item_type(name)))
    if name.startswith("struct<"):
        return pa.struct([(field, arrow_type(pa, kind)) for field, kind in struct_fields(name)])
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
