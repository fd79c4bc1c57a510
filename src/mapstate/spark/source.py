"""A state as a DataFrame of Spark: ``spark.read.format("mapstate")``.

Spark runs all of this in Python processes of its own: `MapStateDataSource` and the planning on the driver's machine,
once for each query; `StateScan.read` on executors, once for each partition.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import closing
from importlib import import_module
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from mapstate.aggregators.aggregator import Aggregator
from mapstate.aggregators.results import results_of
from mapstate.backends import resolve
from mapstate.backing_map import Backend
from mapstate.capabilities import Snapshots
from mapstate.errors import ConfigurationError, KeyEncodingError, UnknownColumnError, UsageError
from mapstate.keys import Key, KeyCodec
from mapstate.protocol.ledger_record import LedgerRecord, encode_ledger
from mapstate.protocol.stored_ledger import decode_ledger
from mapstate.reader import StateReader
from mapstate.reader.tables import Columns, types_of
from mapstate.serializers import serializer
from mapstate.spark.executor.arrow import arrow_schema

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.datasource import Filter

__all__ = ["MapStateDataSource", "Part", "StateScan"]

_PAGE = 2_000  # keys of a request, and of an Arrow batch
_MOST_PARTITIONS = 8
_KEYS_EACH = 100_000  # of a partition, if the user names no number
_MOST_LOOKED_UP = 50_000  # keys; beyond them the state is scanned
_LOOKED_UP: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "boolean": (bool,),
    **dict.fromkeys(("tinyint", "smallint", "int", "bigint"), (int,)),
    "date": (dt.date,),
}
"""The types of key columns whose equality filters become keys, and the types of their values."""


class MapStateDataSource(DataSource):
    """Reads a state: ``spark.read.format("mapstate").option("url", ...).option("state", ...).load()``.

    Spark finds it by itself on a machine where mapstate is installed, through the package ``pyspark_mapstate``.
    Elsewhere: ``spark.dataSource.register(MapStateDataSource)``. docs/dataframes.md has its options.

    Raises:
        ConfigurationError: An option is missing, unknown or cannot be used.
        StateNotFoundError: There is no such state.
        StoreError: The store failed.

    """

    def __init__(self, options: MutableMapping[str, str]) -> None:
        super().__init__(options)
        self._source = _Source.of(options)

    @classmethod
    def name(cls) -> str:
        """What ``format`` takes."""
        return "mapstate"

    def schema(self) -> str:
        """The columns of the keys, then those of the fields, by the ledger."""
        types = self._source.types(self._source.ledger())
        return ", ".join(f"`{name.replace('`', '``')}` {kind}" for name, kind in types.items())

    def reader(self, schema: StructType) -> DataSourceReader:
        """The plan of one query."""
        return StateScan(self._source, schema)


class Part(InputPartition):
    """What one task reads: some keys, or a part of the scan. ``ledger`` is that of the plan, None for any batch."""

    def __init__(self, ledger: bytes | None, part: str, keys: Sequence[Key] | None) -> None:
        super().__init__(part)
        self.ledger = ledger
        self.keys = keys


class StateScan(DataSourceReader):
    """The plan of one query: which keys, which columns, as of which batch."""

    def __init__(self, source: _Source, schema: StructType) -> None:
        self._source = source
        self._schema = schema
        self._ledger = source.ledger()
        self._keys: list[Key] | None = None
        self.pushFilters = _PushedFilters(self)  # type: ignore[method-assign]
        types = source.types(self._ledger)
        for field in schema:
            if field.name not in types:
                raise UnknownColumnError(
                    f"state {source.state!r} has no column {field.name!r}; it has {', '.join(types)}. Nothing was "
                    "read.",
                    column=field.name,
                )
            if field.dataType.simpleString() != types[field.name]:
                raise ConfigurationError(
                    f"the column {field.name!r} of state {source.state!r} is a {types[field.name]}, and the schema "
                    f"says {field.dataType.simpleString()}. Nothing was read. Cast it after the read."
                )

    def look_up(self, filters: Sequence[Filter]) -> Sequence[Filter]:
        """Read only the keys that can pass the filters, where these name them. Spark applies all filters again."""
        if self._ledger.windows is None:
            self._keys = keys_of(self._ledger, filters)
        return filters

    def partitions(self) -> list[Part]:
        """The tasks, all as of one batch unless ``asOf`` is "page"."""
        source, ledger = self._source, self._ledger
        planned = encode_ledger(ledger) if source.one_batch else None
        if self._keys is not None:
            pages = range(0, len(self._keys), _PAGE)
            return [Part(planned, "", self._keys[at : at + _PAGE]) for at in pages] or [Part(planned, "", [])]
        held = ledger.keys_held()
        most = _MOST_PARTITIONS if held is None else min(_MOST_PARTITIONS, 1 + held // _KEYS_EACH)
        with closing(source.reader(None)) as reader:
            return [Part(planned, part, None) for part in reader.parts(source.partitions or most)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of one task. Errors as of `StateReader.scan`; StaleBatchError where the planned batch is gone."""
        assert isinstance(partition, Part)  # noqa: S101  for the type checker
        source = self._source
        as_of = None if partition.ledger is None else decode_ledger(partition.ledger, source.state)
        shape = arrow_schema(self._schema)
        fields = results_of(self._ledger.fields, source.aggregators())
        columns = Columns(self._ledger.keys, fields, self._schema.fieldNames())
        with closing(source.reader(as_of)) as reader:
            found = reader.part(partition.value, _PAGE) if partition.keys is None else [reader.found(partition.keys)]
            for now, keys, values in found:
                batch = columns.batch(keys, now, values)
                yield batch if batch.schema == shape else batch.cast(shape)


class _PushedFilters:
    """`StateScan.look_up`, for Spark to call where ``spark.sql.python.filterPushdown.enabled`` is set.

    Where it is not, Spark refuses a reader with a ``pushFilters`` of its own, instead of leaving that alone. It knows
    its own by ``__func__``.
    """

    __func__ = property(lambda _: getattr(DataSourceReader, "pushFilters", None))  # PySpark 4.0 has none

    def __init__(self, scan: StateScan) -> None:
        self._scan = scan

    def __call__(self, filters: Sequence[Filter]) -> Sequence[Filter]:
        return self._scan.look_up(filters)


def keys_of(ledger: LedgerRecord, filters: Sequence[Filter]) -> list[Key] | None:
    """The keys that can pass all of the filters; None where they are not named, or too many."""
    from pyspark.sql.datasource import EqualNullSafe, EqualTo, In

    named: dict[str, list[Any]] = {}
    for one in filters:
        if isinstance(one, EqualTo | EqualNullSafe | In) and len(one.attribute) == 1:
            values = list(dict.fromkeys(one.value if isinstance(one, In) else [one.value]))
            name = one.attribute[0]
            if name not in named or len(values) < len(named[name]):
                named[name] = values
    columns, count = [], 1
    for field in ledger.keys:
        kinds = _LOOKED_UP.get(field.type, ())
        values = named.get(field.name, [])
        if field.name not in named or not all(type(value) in kinds for value in values):
            return None
        columns.append(values)
        count *= len(values)
    if count > _MOST_LOOKED_UP or not columns:
        return None
    keys = list(product(*columns))
    codec = KeyCodec(ledger.keys, native=serializer(ledger.serializer).native)
    try:
        codec.encode_all(keys)
    except KeyEncodingError:  # the scan finds nothing, and says so in Spark's way
        return None
    return keys


class _Source(NamedTuple):
    """The options of one read."""

    url: str
    state: str
    one_batch: bool
    partitions: int | None
    own: str

    @classmethod
    def of(cls, options: Mapping[str, str]) -> _Source:
        """Those of the user; Spark ignores the case of their names. Raises ConfigurationError."""
        given = {name.lower(): value for name, value in options.items()}
        unknown = given.keys() - {"url", "state", "numpartitions", "asof", "aggregators", "path"}
        if unknown or not given.get("url") or not given.get("state"):
            wrong = f"{min(unknown)!r} is no option" if unknown else 'option("url", ...) and option("state", ...) lack'
            raise ConfigurationError(
                f"{wrong}. A read of mapstate takes url and state, and may take numPartitions, asOf and aggregators. "
                "Nothing was read."
            )
        number, as_of = given.get("numpartitions"), given.get("asof", "batch")
        if number is not None and not (number.isascii() and number.isdigit() and 0 < int(number) <= 10_000):
            raise ConfigurationError(f"numPartitions is a number from 1 to 10000, not {number!r}. Nothing was read.")
        if as_of not in ("batch", "page"):
            raise ConfigurationError(f"asOf is 'batch' or 'page', not {as_of!r}. Nothing was read.")
        partitions = None if number is None else int(number)
        return cls(given["url"], given["state"], as_of == "batch", partitions, given.get("aggregators", ""))

    def __repr__(self) -> str:
        return f"_Source({self.state!r})"  # the URL may have a password

    def aggregators(self) -> Mapping[str, Aggregator]:
        """The user's own ones, by field. Raises ConfigurationError."""
        if not self.own:
            return {}
        module, _, name = self.own.partition(":")
        try:
            found = getattr(import_module(module), name)
        except (ImportError, AttributeError, ValueError) as error:
            raise ConfigurationError(
                f"aggregators is 'module:NAME', and {self.own!r} cannot be imported ({error}). Nothing was read."
            ) from error
        if not isinstance(found, Mapping):
            raise ConfigurationError(f"{self.own!r} is no dict of aggregators by field. Nothing was read.")
        return found

    def reader(self, as_of: LedgerRecord | None) -> StateReader:
        """A reader in this process; of a store with snapshots, as of one moment."""
        backend = resolve(self.url)
        if not backend.shared_between_processes:
            raise UsageError(
                f"the store of state {self.state!r} lives in one process, and Spark reads it in others. Nothing was "
                "read. Take open_reader(...).to_arrow() there."
            )
        return StateReader(_AtOneMoment(backend), self.state, "committed", self.aggregators(), as_of=as_of)

    def ledger(self) -> LedgerRecord:
        """The ledger now."""
        with closing(self.reader(None)) as reader:
            return reader.ledger()

    def types(self, ledger: LedgerRecord) -> dict[str, str]:
        """The Spark type of each column: JSON text where a result has none."""
        types = types_of(ledger.keys, results_of(ledger.fields, self.aggregators()))
        return {name: "string" if kind == "any" else kind for name, kind in types.items()}


class _AtOneMoment:
    """A backend that opens snapshots, where its store offers them."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.shared_between_processes = backend.shared_between_processes

    def open(self, state: str, *, ttl: float | None = None) -> Any:
        """See `Backend.open`."""
        backend = self._backend
        return backend.open_snapshot(state) if isinstance(backend, Snapshots) else backend.open(state, ttl=ttl)
