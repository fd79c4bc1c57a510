"""The seed of one state: its stage, and the attempts that load it. Driver; `Seeding` is that of a query.

A line of the stage is a key with its partials, or a row; of rolling windows it is a key and a unit, of windows that
fire a key and a pane. Lines that count together are in one file.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from copy import copy
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import pyarrow as pa

from mapstate.aggregators.columns import column_of
from mapstate.backends import opened
from mapstate.errors import INSIDE, ConfigurationError
from mapstate.keys import KeyCodec
from mapstate.maps.operator_list import ForgottenRows, ListEntry, Place, write_entries
from mapstate.maps.pane_index import windows_of_ledger
from mapstate.maps.serialized import writer_of
from mapstate.protocol.ledger_record import Attempt, LedgerRecord, digest_of, now
from mapstate.protocol.seed_ledgers import SeedLedgers
from mapstate.protocol.seeding import first_pane, with_windows
from mapstate.protocol.windows import NEVER, WindowCommit
from mapstate.retry import Patience
from mapstate.schema import KeyField
from mapstate.spark.driver.access import Access, configured, java_class
from mapstate.spark.driver.apply import Grouping, apply_on_executors
from mapstate.spark.driver.event_time import TimedState, window_reports
from mapstate.spark.driver.frames import ONE_DRAW, through
from mapstate.spark.driver.initial_rows import PLACES
from mapstate.spark.driver.sessions import SessionState
from mapstate.spark.driver.state import StateDriver
from mapstate.spark.driver.window_rows import TILE, beside_of
from mapstate.spark.driver.windows import WindowedState
from mapstate.spark.executor.error_text import each_with_errors_as_text
from mapstate.spark.executor.task import columns_to_python
from mapstate.spark.executor.window_task import TimedTask

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

MOST_IN_BUCKET = 1_000_000
"""Lines of the stage in a bucket, unless somebody says how many buckets there are."""

_AS_WRITTEN = {
    "spark.sql.adaptive.enabled": "false",  # which would join partitions, and a key's rows have to stay together
    "spark.sql.parquet.datetimeRebaseModeInWrite": "CORRECTED",
    "spark.sql.parquet.int96RebaseModeInWrite": "CORRECTED",
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
}
_FORGOTTEN = f"{INSIDE}forgotten"
_log = logging.getLogger("mapstate")


class SeedSettings(NamedTuple):
    """How a query's batch 0 is loaded.

    ``reports``    get what a dry run finds, as `SeedReport`; else it is None
    ``entries``    by state, of the list of the version that it is built for
    ``positions``  the columns with the topic, the partition and the offset of a row
    """

    buckets: int | None = None
    reports: list[Any] | None = None
    entries: Mapping[str, Sequence[ListEntry]] = MappingProxyType({})
    positions: tuple[str, str, str] | None = None


class Stage(NamedTuple):
    """What is staged: ``lines`` are keys with their partials, or rows; ``rows`` are rows of the history.

    ``forgotten`` are rows that are left out: lines without contents stand for them. ``windows`` is what the commit of
    all of them says of times.
    """

    name: str
    files: int
    lines: int
    rows: int
    buckets: int
    forgotten: int
    windows: WindowCommit | None

    @property
    def sizes(self) -> dict[str, int]:
        """What the ledger keeps of them."""
        return {"files": self.files, "rows": self.rows, "buckets": self.buckets, "forgotten": self.forgotten}


class StateSeed:
    """The seed of one state. ``at`` is the state's place."""

    def __init__(self, state: StateDriver, df: DataFrame, access: Access, settings: SeedSettings) -> None:
        self.state, self._df, self._access, self._settings = state, df, access, settings
        self._root, self._stage = "", list[str]()  # the files of the stage that is loaded
        self.entries = settings.entries.get(state.name, ())
        self._forgotten: ForgottenRows | None = None

    def set_up(self, root: str, offsets: str | None, beside_ended: LedgerRecord | None = None) -> None:
        """``root`` is where stages are, ``offsets`` where the history ends. Raises ConfigurationError.

        ``beside_ended`` is the ledger, if a state of the stream has ended its seed. Then the list is that with which
        this one has begun: its rows are loaded. What was forgotten since is asked for by a swap.
        """
        self._root, state = root, self.state
        if beside_ended is not None:
            self.entries = self.entries[: 0 if beside_ended.seed is None else beside_ended.seed.listed]
        if self.entries:
            has_places = self._settings.positions is not None
            self._forgotten = ForgottenRows(state.name, _row_keys(state), self.entries, offsets, has_places=has_places)
            self._check_places(self._forgotten)

    def digest(self, fingerprint: str) -> str:
        """Of batch 0, the job, and the list."""
        job = self.state.job
        entries = [(entry.id, entry.digest, entry.offsets) for entry in self.entries]
        parts: list[Any] = [fingerprint, job.spec.state, job.keys, job.fields, [*job.columns.items()], entries]
        return digest_of(json.dumps(parts if job.windows is None else [*parts, repr(job.windows)]))

    def _rows(self, record: LedgerRecord, frame: DataFrame | None = None) -> DataFrame:
        """The rows of batch 0 as the state takes them under this ledger; only the columns, unless it gets a ``frame``.

        That has passed steps which ask what states count, so these look at no clock again.
        """
        if frame is None:
            self.state.set_batch(record)
            frame = through(self.state.branch.steps, self._df, 0)
        self.state.check_columns(frame)
        if self._forgotten is not None:
            frame = self._marked(frame, self._forgotten)
        return self.state.keyed(frame)

    def _check_places(self, forgotten: ForgottenRows) -> None:
        """Raises ConfigurationError where the columns of a row's place have other types than Kafka's."""
        if not forgotten.needs_places or self._settings.positions is None:
            return
        frame = through(self.state.branch.steps, self._df, 0).select(*map(column_of, self._settings.positions))
        for field, (what, types) in zip(frame.schema.fields, PLACES, strict=True):
            if (actual := field.dataType.simpleString()) not in types:
                raise ConfigurationError(
                    f"positions are the columns of topic, partition and offset, and {field.name} {actual} is no {what}"
                    f": that is {' or '.join(types)}. Nothing was written."
                )

    def _marked(self, frame: DataFrame, forgotten: ForgottenRows) -> DataFrame:
        """The columns that the state reads, and which rows are left out: those have no contents any more."""
        from pyspark.sql.types import BooleanType, StructField, StructType

        job, places = self.state.job, (self._settings.positions or ()) if forgotten.needs_places else ()
        keys = _row_keys(self.state)
        rows = frame.select(*map(column_of, dict.fromkeys([*(key.name for key in keys), *places, *job.columns])))
        shape = StructType([StructField(field.name, field.dataType) for field in rows.schema])
        return rows.mapInArrow(_Marking(forgotten, keys, places), shape.add(_FORGOTTEN, BooleanType()))

    def _grouping(self, rows: DataFrame, record: LedgerRecord) -> Grouping:
        """How lines of the stage are made: as a batch is grouped, with what is left out apart."""
        from pyspark.sql import functions as F

        grouping = self.state.grouping_of(rows, record)
        if self._forgotten is not None:
            grouping = copy(grouping)
            grouping.keys = [*grouping.keys, F.col(_FORGOTTEN)]
        return grouping

    def has_stage(self, record: LedgerRecord) -> bool:
        """Whether all files are there of the stage that the ledger names."""
        seed, rows = record.seed, self._rows(record)
        if seed is None or seed.stage is None:
            return False
        with suppress(Exception):  # Spark's own, of a path that is not there
            self._stage = self._files(seed.stage, self._grouping(rows, record).of(rows).schema)
            if len(self._stage) == seed.files:
                return True
        _log.warning("state %s: the stage %s is gone, so its seed begins anew", record.state, seed.stage)
        return False

    def staged(self, name: str, record: LedgerRecord, frame: DataFrame) -> Stage:
        """Writes the history, grouped. ``frame`` has its rows after `StateDriver.set_batch` and the state's steps."""
        from pyspark.sql import functions as F

        record = with_windows(record, None)
        session, rows, wanted = self._df.sparkSession, self._rows(record, frame), self._settings.buckets
        grouping = self._grouping(rows, record)
        partitions = int(session.conf.get("spark.sql.shuffle.partitions") or 1)
        partitions = max(partitions, (wanted or 1) * self._access.parallelism())
        with configured(self._df, {**ONE_DRAW, **_AS_WRITTEN, "spark.sql.shuffle.partitions": str(partitions)}):
            grouped = grouping.of(rows)
            if isinstance(self.state, SessionState):
                grouped = self.state.as_staged(grouped, grouping)
            grouped.write.mode("overwrite").option("maxRecordsPerFile", 0).parquet(f"{self._root}/{name}")
        self._stage = files = self._files(name, grouped.schema)
        read = session.read.schema(grouped.schema).parquet(f"{self._root}/{name}")
        counted = F.lit(1) if grouping.partials is None else F.col("rows")
        forgotten = 0
        if self._forgotten is not None:
            ((forgotten,),) = read.where(_FORGOTTEN).agg(F.sum(counted)).collect()
            read = read.where(f"not {_FORGOTTEN}")
        windows = _windows_of(read, self.state, rows, record)
        live = _live(self.state, read, grouping, with_windows(record, windows))
        ((lines, count),) = live.agg(F.count(F.lit(1)), F.sum(counted)).collect()
        if live is not read and windows is not None:
            ((every,),) = read.agg(F.sum(counted)).collect()
            windows = msgspec.structs.replace(windows, expired=(every or 0) - (count or 0))
        buckets = max(1, min(wanted or -(-lines // MOST_IN_BUCKET), len(files)))
        return Stage(name, len(files), lines, count or 0, buckets, forgotten or 0, windows)

    def _files(self, name: str, schema: Any) -> list[str]:
        """The files of a stage, in order. Raises Spark's error where there is none."""
        files = self._df.sparkSession.read.schema(schema).parquet(f"{self._root}/{name}").inputFiles()
        return sorted(f"{self._root}/{name}/{file.rpartition('/')[2]}" for file in files)

    def _of_bucket(self, at: int, buckets: int) -> list[str]:
        """The files of a bucket: each has whole partitions by key."""
        count = len(self._stage)
        return self._stage[at * count // buckets : (at + 1) * count // buckets]

    def bucket(self, ledgers: SeedLedgers, at: int, requests: Patience) -> None:
        """An attempt at the bucket that comes next: the ledger says which one that is."""
        session, attempt = self._df.sparkSession, requests.ask(lambda: ledgers.begin_bucket(at))
        record = ledgers.ledgers[at].record
        rows, seed = self._rows(record), record.seed
        schema = self._grouping(rows, record).of(rows).schema
        files = [] if seed is None else self._of_bucket(seed.done, seed.buckets)
        staged = session.read.schema(schema).parquet(*files) if files else session.createDataFrame([], schema)
        if self._forgotten is not None:
            staged = staged.where(f"not {_FORGOTTEN}").drop(_FORGOTTEN)
        staged = _live(self.state, staged, self.state.grouping_of(rows, record), record)
        if seed is not None and seed.done == 0 and self._forgotten is not None:
            self._copy_list(self._forgotten, record, attempt)
        result = self.state.attempt_staged(rows, staged, record, attempt)
        done = {"rows": result.rows, "keys": result.keys, "keys_delta": result.keys_delta, "panes": result.panes}
        requests.ask(lambda: ledgers.commit_bucket(at, attempt.txid, **done))

    def _copy_list(self, forgotten: ForgottenRows, record: LedgerRecord, attempt: Attempt) -> None:
        """Writes the list of the other version, whose rows this state never counts."""
        known, i = enumerate(self.entries), now()
        entries = {number: forgotten.copied(entry, record.owner, attempt.txid, i) for number, entry in known}
        with opened(self.state.spec.backend, self.state.name) as store, writer_of(store, attempt.token) as writer:
            write_entries(writer, record, attempt, entries)

    def tried(self, name: str, record: LedgerRecord, frame: DataFrame) -> tuple[Stage, int | None, int]:
        """What is staged in the scratch place of a dry run, with the number of keys, and its bytes."""
        stage, keys = self.staged(name, record, frame), None
        if self.state.job.windows is None and self.state.grouping_of(frame, record).partials is not None:
            keys = stage.lines
        path, store = _path_of(self._df, f"{self._root}/{stage.name}")
        return stage, keys, int(store.getContentSummary(path).getLength())


def _row_keys(state: StateDriver) -> Sequence[KeyField]:
    """The key columns that rows have before they are `StateDriver.keyed`."""
    return state.job.keys[1:] if isinstance(state, WindowedState) else state.job.keys


def _live(state: StateDriver, staged: DataFrame, grouping: Grouping, record: LedgerRecord) -> DataFrame:
    """What a seed loads of staged rows: without those whose windows are all gone."""
    if isinstance(state, SessionState):
        return state.live(staged, grouping, record)
    first, place, rolling = None, _place(record), record.rolling
    if isinstance(state, WindowedState):
        first = first_pane(windows_of_ledger(record))
        place = place if state.windows.type == "bigint" else f"unix_micros({place})"
    elif rolling is not None and rolling.first_time() != NEVER:
        first = rolling.definition.units(rolling.first_time())
    return staged if first is None else staged.where(f"not coalesce({place} < {first}L, false)")


def _windows_of(staged: DataFrame, state: StateDriver, rows: DataFrame, record: LedgerRecord) -> WindowCommit | None:
    """What the commit of the seed says of times: tasks note those of the stage as those of a batch."""
    if not isinstance(state, TimedState):
        return None
    task, grouping = state.task(rows, record, Attempt(0, record.next_txid, record.view(), record.fence()), is_seed=True)
    if not isinstance(task, TimedTask):
        raise TypeError("a state whose rows have times has tasks that note them")
    task.place, task.only_notes = 0, True
    names = [_place(record), *beside_of(state.windows), *(["rows"] if grouping.partials is not None else [])]
    result = apply_on_executors(staged.select(*names), task)
    state.check(result, 0)
    return state.window_commit(record, window_reports(result.reports))


def _place(record: LedgerRecord) -> str:
    """The column of grouped rows that is null where they are in no window."""
    return "key0" if record.rolling is None else TILE


class _Marking:
    """Takes what is in rows of forgotten keys out of them, and says in one more column which these are. Executor.

    The columns of the keys come first, then those of a row's place, where one is needed.
    """

    def __init__(self, forgotten: ForgottenRows, keys: Sequence[KeyField], places: Sequence[str]) -> None:
        self._forgotten, self._keys, self._places = forgotten, keys, places

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return each_with_errors_as_text(map(self._of, batches))

    def _of(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        names = [key.name for key in self._keys]
        texts = KeyCodec(self._keys).encode_columns(
            columns_to_python([*map(batch.column, names)], names), batch.num_rows
        )
        columns = [batch.column(name).to_pylist() for name in self._places]
        out = self._forgotten.of(texts, [*map(Place._make, zip(*columns, strict=True))] if columns else None)
        kept = batch
        if any(out):
            kept = batch.take(pa.array([None if is_out else i for i, is_out in enumerate(out)], pa.int32()))
        return pa.RecordBatch.from_arrays([*kept.columns, pa.array(out, pa.bool_())], [*batch.schema.names, _FORGOTTEN])


def delete(df: DataFrame, place: str) -> None:
    """Deletes a directory, as Spark names it. Raises whatever Hadoop raises."""
    path, store = _path_of(df, place)
    store.delete(path, True)


def _path_of(df: DataFrame, place: str) -> tuple[Any, Any]:
    session: Any = df.sparkSession
    path = java_class(session.sparkContext._jvm, "org.apache.hadoop.fs.Path")(place)
    return path, path.getFileSystem(session._jsparkSession.sessionState().newHadoopConf())
