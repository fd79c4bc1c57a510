"""A state as a DataFrame of Spark: planned on the driver's machine, read on executors, in processes of Spark's own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import closing
from importlib import import_module
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from msgspec import MsgspecError, convert, json
from msgspec.structs import asdict, replace
from pyspark.sql.types import StructType

from mapstate.aggregators.aggregator import Aggregator
from mapstate.backends import resolve
from mapstate.backing_map import Backend
from mapstate.capabilities import Snapshots
from mapstate.errors import (
    ConfigurationError,
    KeyEncodingError,
    StaleBatchError,
    StoreUnavailableError,
    UnknownColumnError,
    UsageError,
)
from mapstate.keys import Key
from mapstate.protocol.ledger_record import LedgerRecord, encode_ledger
from mapstate.protocol.stored_ledger import decode_ledger
from mapstate.reader import StateReader
from mapstate.reader.aliased import version_of
from mapstate.reader.changes import Position, check_is_of
from mapstate.reader.forms import JsonKeys, time_asked
from mapstate.reader.rolling import At, End, end_of, end_time, readable_fields, shown_fields
from mapstate.reader.tables import Columns, types_of
from mapstate.serializers import key_codec
from mapstate.spark.executor.task import arrow_schema
from mapstate.values import bare, column_type

try:
    from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition
except ModuleNotFoundError as error:
    if error.name != "pyspark.sql.datasource":
        raise
    raise UsageError(
        "the format mapstate needs PySpark 4.0 or newer, and this is 3.5. Nothing was read. Take stateQuery, or "
        "open_reader(...).to_pandas(). See docs/versions.md#the-oldest-pyspark"
    ) from error

if TYPE_CHECKING:
    import pyarrow as pa

_PAGE = 2_000  # keys of a request, and of an Arrow batch
_MOST_PARTITIONS = 8
_KEYS_EACH = 100_000  # of a partition, if the user names no number
_NOW = 60_000_000  # microseconds for which a plan is one of now, or the unit of its rolling windows


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
        source = self._source.of_version()
        types = source.types(source.ledger())
        return ", ".join(f"`{name.replace('`', '``')}` {kind}" for name, kind in types.items())

    def reader(self, schema: StructType) -> DataSourceReader:
        """The plan of one query."""
        return StateScan(self._source, schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        """What follows the state, for one streaming query."""
        return StateChanges(self._source, schema)


class ScanTask(InputPartition):
    """What one task reads: some keys, or a part of the scan.

    ``state`` is the version that the plan is of. ``ledger`` is that of the plan, None for the one that the task finds;
    ``txid`` the oldest from which a stream reads.
    ``lacks_of`` is how far another version was followed: the task gives its keys in that part that ``state`` lacks.
    ``end`` is where rolling windows end for all tasks; None for a state without, and where the only task says it.
    """

    def __init__(
        self,
        state: str,
        ledger: bytes | None,
        part: str,
        keys: Sequence[Key] | None,
        *,
        txid: int = -1,
        end: End | None = None,
        lacks_of: Position | None = None,
    ) -> None:
        super().__init__(part)
        self.state = state
        self.ledger = ledger
        self.keys = keys
        self.txid = txid
        self.end = end
        self.lacks_of = lacks_of


class StateScan(DataSourceReader):
    """The plan of a DataFrame: which keys, which columns, as of which batch.

    Spark keeps it for every query of that DataFrame or view, and tells a task nothing that tells these apart. So a task
    that begins after another commit cannot know whether its query was planned before that.
    """

    def __init__(self, source: _Source, schema: StructType) -> None:
        self._source, self._name = source.of_version(), source.state
        source = self._source
        self._schema = schema
        self._ledger = source.ledger()
        source.check_columns(self._ledger, schema)
        if source.starting_from is not None:
            raise ConfigurationError("startingFrom is an option of readStream. Nothing was read.")
        if source.on_swap is not None:
            raise ConfigurationError("onSwap is an option of readStream. Nothing was read.")
        at = source.end_asked(self._ledger)
        self._is_now = at is None
        self._end = None if source.as_of == "scan" else end_of(self._ledger, at)

    def partitions(self) -> list[ScanTask]:
        """The tasks, as of the batch of now unless ``asOf`` says otherwise."""
        source, ledger = self._source, self._ledger
        keys = source.keys_of(ledger)
        if source.as_of == "scan":
            return [ScanTask(source.state, None, "", keys)]
        planned = None if source.as_of == "page" else encode_ledger(ledger)
        if keys is not None:
            return [ScanTask(source.state, planned, "", some, end=self._end) for some in source.divided(keys) or [[]]]
        with closing(source.reader(None)) as reader:
            parts = reader.parts(source.tasks(ledger.keys_held()))
        return [ScanTask(source.state, planned, part, None, end=self._end) for part in parts]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of one task. Errors: see `StateReader.scan`; StaleBatchError where the planned batch is gone."""
        assert isinstance(partition, ScanTask)  # noqa: S101  for the type checker
        source, to = self._source, version_of(self._source.url, self._name)
        if source.as_of == "scan":
            source = source._replace(state=to)
        elif to != source.state:
            raise StaleBatchError(
                f"{self._name!r} was swapped to {to!r} since Spark planned this read of {source.state!r}, and Spark "
                "keeps that plan for each query of a DataFrame. Nothing was read. Load it anew for each query."
            )
        planned = None if partition.ledger is None else decode_ledger(partition.ledger, source.state)
        shape = arrow_schema(self._schema)
        with closing(source.reader(source.ledger() if source.as_of == "scan" else planned)) as reader:
            ledger = reader.ledger()
            if planned is not None and planned.contents() != ledger.contents():
                raise StaleBatchError(
                    f"state {source.state!r} has gone on since Spark planned this read, and Spark keeps that plan for "
                    "each query of a DataFrame or a view. Nothing was read. Load it anew for each query; or take asOf "
                    "= scan, where each scan is one task and as of its own start."
                )
            source.check_columns(ledger, self._schema)
            end = partition.end
            if source.as_of == "scan":
                end = end_of(ledger, source.end_asked(ledger))
            elif end is not None and self._is_now:
                self._check_now(ledger, end)
            key_columns = {key.name for key in ledger.keys}
            of_windows = [name for name in self._schema.fieldNames() if name not in key_columns]
            shown = shown_fields(ledger, source.aggregators(), of_windows)
            columns = Columns(ledger.keys, shown, self._schema.fieldNames())
            asked: dict[str, Any] = {} if end is None else {"at": end, "columns": of_windows}
            pages: Iterable[tuple[Any, Any, Any]]
            if partition.keys is not None:
                pages = (reader.found(keys, **asked) for keys in pages_of(partition.keys))
            else:
                parts = reader.parts(1) if source.as_of == "scan" else [partition.value]
                pages = chain.from_iterable(reader.part(part, _PAGE, made=columns, **asked) for part in parts)
            for batch in columns.batches(pages):
                yield batch if batch.schema == shape else batch.cast(shape)

    def _check_now(self, ledger: LedgerRecord, end: End) -> None:
        """Raise StaleBatchError where windows that shall end now would end at a time of before: in an old plan."""
        late = end_of(ledger, None)
        if late is None or ledger.rolling is None or late.unit - end.unit <= 1:
            return
        if (late.unit - end.unit) * ledger.rolling.definition.unit > _NOW:
            raise StaleBatchError(
                f"the rolling windows of state {self._source.state!r} end at {end_time(ledger, end)} since Spark "
                "planned this read, and Spark keeps that plan for each query of a DataFrame or a view. Nothing was "
                "read. Load it anew for each query; or give the option at, a time; or take asOf = scan, where each "
                "scan is one task and ends at its own start."
            )


class StateChanges(DataSourceStreamReader):
    """What follows a state that keeps its changes: all keys at first, and then those that each commit has written."""

    def __init__(self, source: _Source, schema: StructType) -> None:
        self._source = source
        self._schema = schema
        source.check_columns(source.of_version().ledger(), schema)
        if source.as_of is not None:
            raise ConfigurationError("asOf is an option of read, not of readStream. Nothing was read.")
        if source.keys is not None:
            raise ConfigurationError("keys is an option of read, not of readStream. Nothing was read.")
        if source.at is not None:
            raise ConfigurationError("at is an option of read, not of readStream. Nothing was read.")

    def initialOffset(self) -> dict[str, Any]:
        """Where a new query begins: before the state, or with ``startingFrom`` "now" after it."""
        now = self._position()
        return asdict(now if self._source.starting_from == "now" else replace(now, txid=-1))

    def latestOffset(self) -> dict[str, Any]:  # type: ignore[override]  # PySpark 4.0 and 4.1 call it so, and all may
        """The last commit. The errors of `StateReader.position`."""
        return asdict(self._position())

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[ScanTask]:
        """The tasks of one micro-batch. The errors of `StateReader.changed_keys`."""
        since, until = convert(start, Position), convert(end, Position)
        source, restarts = self._source.of_version(), self._source.on_swap == "restart"
        if restarts and since.txid >= 0 and since.version not in ("", until.version):
            return self._restarted(since, until)
        if restarts and until.version:  # what was planned before a swap
            source = source._replace(state=until.version)
        with closing(source.reader(None)) as reader:
            if since == until:
                return []
            if since.txid < 0:
                ledger = reader.ledger()
                check_is_of(ledger, until)
                tasks = source.tasks(ledger.keys_held())
                return [ScanTask(source.state, None, part, None, txid=until.txid) for part in reader.parts(tasks)]
            keys = reader.changed_keys(since, until)
        return [ScanTask(source.state, None, "", some, txid=until.txid) for some in source.divided(keys)]

    def _restarted(self, since: Position, until: Position) -> list[ScanTask]:
        """The tasks of a micro-batch behind a swap: all of the version of ``until``, and each key that it lacks.

        Raises StateNotFoundError where one of the versions is gone, ConfigurationError, and as `check_is_of`.
        """
        old, new = (self._source._replace(state=time.version) for time in (since, until))
        with closing(old.reader(None)) as before, closing(new.reader(None)) as reader:
            parts = before.parts(old.tasks(before.ledger().keys_held()))
            ledger = reader.ledger()
            check_is_of(ledger, until)
            new.check_columns(ledger, self._schema)
            if ledger.keys != before.ledger().keys:
                raise ConfigurationError(
                    f"{new.state!r} has other key columns than {old.state!r}. Nothing was read. Start a new query."
                )
            whole = reader.parts(new.tasks(ledger.keys_held()))
        tasks = [ScanTask(new.state, None, part, None, txid=until.txid) for part in whole]
        return tasks + [ScanTask(new.state, None, part, None, txid=until.txid, lacks_of=since) for part in parts]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of one task, as of the end of the micro-batch or a later commit; nulls for a key that is gone."""
        assert isinstance(partition, ScanTask)  # noqa: S101  for the type checker
        source = self._source._replace(state=partition.state)
        shape = arrow_schema(self._schema)
        with closing(source.reader(None)) as reader:
            ledger = reader.ledger()
            if ledger.next_txid <= partition.txid:
                raise StoreUnavailableError(
                    f"the store answers as before txid {partition.txid} of state {source.state!r}: a replica that is "
                    "behind, or a restored copy. Nothing was given out. Name the primary in the URL."
                )
            fields = shown_fields(ledger, source.aggregators())
            columns = Columns(ledger.keys, fields, self._schema.fieldNames())
            if partition.keys is None and partition.lacks_of is None:
                for batch in columns.batches(reader.part(partition.value, _PAGE, made=columns)):
                    yield batch.cast(shape)
                return
            for asked in self._asked(partition):
                now, keys, values = reader.found(asked)
                if partition.lacks_of is None:
                    yield columns.batch(keys, now, values).cast(shape)
                there = set(keys)
                gone = [key for key in asked if key not in there]
                if gone:
                    yield columns.absent(gone).cast(shape)

    def _asked(self, partition: ScanTask) -> Iterator[Sequence[Key]]:
        """The keys of a task, a page at a time. Of another version also those that it has removed since."""
        since = partition.lacks_of
        if since is None:
            yield from pages_of(partition.keys or [])
            return
        with closing(self._source._replace(state=since.version).reader(None)) as before:
            for _, keys, _ in before.part(partition.value, _PAGE):
                yield keys
            yield from pages_of(before.changed_keys(since, before.position()))  # also what went while it was listed

    def _position(self) -> Position:
        with closing(self._source.of_version().reader(None)) as reader:
            return reader.position()


def pages_of(keys: Sequence[Key], size: int = _PAGE) -> list[Sequence[Key]]:
    """The keys, at most ``size`` at a time."""
    return [keys[i : i + size] for i in range(0, len(keys), size)]


class _Source(NamedTuple):
    """The options of one read."""

    url: str
    state: str
    as_of: str | None
    partitions: int | None
    own: str
    starting_from: str | None
    on_swap: str | None
    keys: str | None
    at: str | None

    @classmethod
    def of(cls, options: Mapping[str, str]) -> _Source:
        """Those of the user; Spark ignores the case of their names. Raises ConfigurationError."""
        given = {name.lower(): value for name, value in options.items()}
        if "checkpointlocation" in given:  # Spark gives it to a sink alone
            raise ConfigurationError(
                "the format mapstate is read, and is no sink. Nothing was written. Keep a state with "
                "persistentAggregate(...).start(...). See docs/versions.md#declarative-pipelines"
            )
        unknown = given.keys() - {
            "url",
            "state",
            "numpartitions",
            "asof",
            "aggregators",
            "startingfrom",
            "onswap",
            "keys",
            "at",
            "path",
        }
        if unknown or not given.get("url") or not given.get("state"):
            wrong = f"{min(unknown)!r} is no option" if unknown else 'option("url", ...) and option("state", ...) lack'
            raise ConfigurationError(
                f"{wrong}. A read of mapstate takes url and state, and may take numPartitions, aggregators, "
                "asOf, at and keys (read), startingFrom and onSwap (readStream). Nothing was read."
            )
        number = given.get("numpartitions")
        if number is not None and not (number.isascii() and number.isdigit() and 0 < int(number) <= 10_000):
            raise ConfigurationError(f"numPartitions is a number from 1 to 10000, not {number!r}. Nothing was read.")
        for name, most in (
            ("asOf", ("batch", "scan", "page")),
            ("startingFrom", ("state", "now")),
            ("onSwap", ("refuse", "restart")),
        ):
            if given.get(name.lower()) not in (None, *most):
                raise ConfigurationError(
                    f"{name} is {' or '.join(map(repr, most))}, not {given[name.lower()]!r}. Nothing was read."
                )
        if number not in (None, "1") and given.get("asof") == "scan":
            raise ConfigurationError(f"asOf = scan is one task, and numPartitions says {number}. Nothing was read.")
        return cls(
            url=given["url"],
            state=given["state"],
            as_of=given.get("asof"),
            partitions=None if number is None else int(number),
            own=given.get("aggregators", ""),
            starting_from=given.get("startingfrom"),
            on_swap=given.get("onswap"),
            keys=given.get("keys"),
            at=given.get("at"),
        )

    def __repr__(self) -> str:
        return f"_Source({self.state!r})"  # the URL may have a password

    def aggregators(self) -> Mapping[str, Aggregator]:
        """The user's own ones, by field. Raises ConfigurationError."""
        if not self.own:
            return {}
        module, _, name = self.own.partition(":")
        try:
            loaded = getattr(import_module(module), name)
        except (ImportError, AttributeError, ValueError) as error:
            raise ConfigurationError(
                f"aggregators is 'module:NAME', and {self.own!r} cannot be imported ({error}). Nothing was read."
            ) from error
        if not isinstance(loaded, Mapping):
            raise ConfigurationError(f"{self.own!r} is no dict of aggregators by field. Nothing was read.")
        return loaded

    def reader(self, as_of: LedgerRecord | None) -> StateReader:
        """A reader in this process; of a store with snapshots, as of one moment."""
        backend = resolve(self.url)
        if not backend.shared_between_processes:
            raise UsageError(
                f"the store of state {self.state!r} lives in one process, and Spark reads it in others. Nothing was "
                "read. Take open_reader(...).to_arrow() there."
            )
        return StateReader(_AtOneMoment(backend), self.state, "committed", self.aggregators(), as_of=as_of)

    def of_version(self) -> Self:
        """The same of the version to which the name leads now."""
        return self._replace(state=version_of(self.url, self.state))

    def ledger(self) -> LedgerRecord:
        with closing(self.reader(None)) as reader:
            return reader.ledger()

    def tasks(self, keys: int | None) -> int:
        """How many tasks share some keys, None for unknown ones: as many as the user says, or one per 100,000."""
        most = _MOST_PARTITIONS if keys is None else min(_MOST_PARTITIONS, 1 + keys // _KEYS_EACH)
        return self.partitions or most

    def divided(self, keys: Sequence[Key]) -> list[Sequence[Key]]:
        return pages_of(keys, max(_PAGE, -(-len(keys) // self.tasks(len(keys)))))

    def keys_of(self, ledger: LedgerRecord) -> list[Key] | None:
        """The keys of the option, each once; None for all of the state. Raises ConfigurationError."""
        if self.keys is None:
            return None
        codec = key_codec(ledger)
        try:
            asked = json.encode({"keys": json.decode(self.keys, type=list[Any])})
            return list(codec.decode_all(list(dict.fromkeys(codec.encode_all(JsonKeys(ledger.keys).decode(asked))))))
        except (MsgspecError, RecursionError, UsageError, KeyEncodingError) as error:
            raise ConfigurationError(
                f"keys is a JSON list of keys, as in a POST to mapstate serve, and this one is none: {error}"
            ) from error

    def end_asked(self, ledger: LedgerRecord) -> At:
        """When rolling windows shall end. Raises UsageError, and ConfigurationError where tasks would not agree."""
        at = None if self.at is None else time_asked(ledger, self.at)
        if ledger.rolling is not None and self.as_of == "page" and at in (None, "watermark"):
            raise ConfigurationError(
                f"asOf = page reads state {self.state!r} as of several batches, and its rolling windows end at one "
                "time: give it, option at, as a time. Nothing was read."
            )
        return at

    def check_columns(self, ledger: LedgerRecord, schema: StructType) -> None:
        """Raises UnknownColumnError, ConfigurationError where the state has no such columns, and errors of `types`."""
        types = self.types(ledger, schema.fieldNames())
        for field in schema:
            if field.name not in types:
                raise UnknownColumnError(
                    f"state {self.state!r} has no column {field.name!r}; it has {', '.join(types)}. Nothing was read.",
                    column=field.name,
                )
            if field.dataType.simpleString() != bare(types[field.name]):
                raise ConfigurationError(
                    f"the column {field.name!r} of state {self.state!r} is a {types[field.name]}, and the schema says "
                    f"{field.dataType.simpleString()}. Nothing was read. Cast it after the read."
                )

    def types(self, ledger: LedgerRecord, columns: Sequence[str] | None = None) -> dict[str, str]:
        """The Spark type of each column: JSON text where a result has none. ``columns`` as of `readable_fields`."""
        types = types_of(ledger.keys, readable_fields(ledger, self.aggregators(), columns))
        return {name: column_type(kind) for name, kind in types.items()}


class _AtOneMoment:
    """A backend that opens snapshots, where its store offers them."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.shared_between_processes = backend.shared_between_processes

    def open(self, state: str, *, ttl: float | None = None) -> Any:
        backend = self._backend
        return backend.open_snapshot(state) if isinstance(backend, Snapshots) else backend.open(state, ttl=ttl)
