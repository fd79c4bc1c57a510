"""Batch 0 of a query as a seed: its rows are staged on disk, grouped, and loaded bucket after bucket. Driver.

    open     the state is taken; from here on nobody can read it
    stage    `<checkpoint>/mapstate/seed-...`: one row per key with its partials, or the rows of each key
    load     for each bucket an attempt, as of any batch: its own txid, fence, claims, accounting, and one commit
    end      batch 0 counts

The stage is the only reading of the history. `mapstate.protocol.seeding` has the rules of the ledger.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from copy import copy
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import msgspec
import pyarrow as pa

from mapstate.aggregators.columns import column_of
from mapstate.aggregators.counted import CountWindows
from mapstate.backends import opened
from mapstate.errors import INSIDE, ConfigurationError, UsageError
from mapstate.keys import KeyCodec
from mapstate.maps.operator_list import ForgottenRows, ListEntry, Place, write_entries
from mapstate.maps.pane_index import windows_of_ledger
from mapstate.maps.serialized import writer_of
from mapstate.protocol.ledger_record import Attempt, Commit, LedgerRecord, digest_of, now
from mapstate.protocol.opening import open_ledger
from mapstate.protocol.seed_ledgers import SeedLedgers
from mapstate.protocol.seeding import first_pane, is_complete, with_windows
from mapstate.protocol.windows import NEVER, WindowCommit
from mapstate.schema import KeyField
from mapstate.spark.driver import repeats
from mapstate.spark.driver.access import Access, configured, is_connect, java_class
from mapstate.spark.driver.apply import Grouping, apply_on_executors
from mapstate.spark.driver.event_time import TimedState, window_reports
from mapstate.spark.driver.executors import check_executors
from mapstate.spark.driver.frames import ONE_DRAW, through
from mapstate.spark.driver.job import Follower, StreamPlan
from mapstate.spark.driver.offsets import PlannedBatches
from mapstate.spark.driver.query_run import QueryRun, has_ended
from mapstate.spark.driver.retry_policy import Decision, RetryPolicy
from mapstate.spark.driver.sessions import SessionState
from mapstate.spark.driver.state import StateDriver
from mapstate.spark.driver.window_rows import TILE, beside_of
from mapstate.spark.driver.windows import WindowedState
from mapstate.spark.executor.error_text import each_with_errors_as_text, mapstate_error
from mapstate.spark.executor.task import columns_to_python
from mapstate.spark.executor.window_task import TimedTask

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

T = TypeVar("T")

MOST_IN_BUCKET = 1_000_000
"""Lines of the stage in a bucket, unless somebody says how many buckets there are."""

_AS_WRITTEN = {
    "spark.sql.adaptive.enabled": "false",  # which would join partitions, and a key's rows have to stay together
    "spark.sql.parquet.datetimeRebaseModeInWrite": "CORRECTED",
    "spark.sql.parquet.int96RebaseModeInWrite": "CORRECTED",
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
}
_INTEGERS = ("tinyint", "smallint", "int", "bigint")
_PLACES = (("topic", ("string",)), ("partition", _INTEGERS), ("offset", _INTEGERS))
_FORGOTTEN = f"{INSIDE}forgotten"
_log = logging.getLogger("mapstate")


class SeedReport(NamedTuple):
    """What a state was seeded with; of a dry run, with what it would be. ``bytes`` are those of the stage.

    ``rows_forgotten`` were left out, because their keys were forgotten. Of a state whose rows have times,
    ``rows_expired`` were left out, because they are in no window any more, and ``rows_late`` of ``rows`` are in none.
    """

    state: str
    rows: int
    keys: int | None
    buckets: int | None
    bytes: int | None = None
    is_dry_run: bool = False
    rows_forgotten: int = 0
    rows_expired: int = 0
    rows_late: int = 0

    def with_left_out(self, forgotten: int, windows: WindowCommit | None) -> SeedReport:
        """With the rows that are in no record."""
        done = windows or WindowCommit()
        return self._replace(rows_forgotten=forgotten, rows_expired=done.expired, rows_late=done.late)

    def __str__(self) -> str:
        held = "an unknown number of" if self.keys is None else f"{self.keys:,}"
        text = f"{self.state}: {self.rows:,} rows, {held} keys"
        if self.rows_forgotten:
            text += f", {self.rows_forgotten:,} rows forgotten"
        if self.rows_expired:
            text += f", {self.rows_expired:,} rows expired"
        if self.buckets is not None:
            text += f", {self.buckets} buckets"
        if self.bytes is not None:
            text += f", {self.bytes / 1e6:,.1f} MB staged"
        return f"{text}. Nothing was written." if self.is_dry_run else text


class SeedSettings(NamedTuple):
    """How a query's batch 0 is loaded.

    ``reports``    get what a dry run finds; else it is None
    ``entries``    of the list of the version that it is built for
    ``positions``  the columns with the topic, the partition and the offset of a row
    """

    buckets: int | None = None
    reports: list[SeedReport] | None = None
    entries: Sequence[ListEntry] = ()
    positions: tuple[str, str, str] | None = None


class _Stage(NamedTuple):
    """What is staged: ``lines`` are keys with their partials, or rows; ``rows`` are rows of the history.

    ``forgotten`` are rows that are left out: lines without contents stand for them. ``windows`` is what the commit of
    all of them says of times.
    """

    name: str
    files: list[str]
    lines: int
    rows: int
    buckets: int
    forgotten: int = 0
    windows: WindowCommit | None = None

    def of_bucket(self, at: int) -> list[str]:
        """The files of a bucket: each has whole partitions by key."""
        count = len(self.files)
        return self.files[at * count // self.buckets : (at + 1) * count // self.buckets]


def check_seed(plan: StreamPlan, df: DataFrame) -> None:
    """Raises ConfigurationError for what cannot be seeded, and UsageError under Spark Connect."""
    if is_connect(df):
        raise UsageError(
            "a seed reads and writes files beside the checkpoint in the process that calls it, and under Spark Connect "
            "batches run in a process of the server. Nothing was started. Seed with classic PySpark, and start with "
            "Spark Connect then."
        )
    for state, why in why_not_alone(plan):
        raise ConfigurationError(
            f"state {state!r} cannot be seeded: {why}. Nothing was written. Start its query over a source that has the "
            "history, whose batches are counted as any."
        )
    if not plan.branches:
        raise ConfigurationError(f"the stream {plan.stream!r} keeps no state of its own, so there is nothing to seed.")


def why_not_alone(plan: StreamPlan) -> Iterator[tuple[str, str]]:
    """Why a state of a query cannot get rows beside its batches, each with the state's name."""
    names = ", ".join(branch.job.spec.state for branch in plan.branches)
    for branch in plan.branches:
        job, functions = branch.job, [*branch.downstream, *branch.fired]
        definition = None if job.windows is None else job.windows.definition
        counts_windows = any(isinstance(one, CountWindows) for one in job.aggregators.values())
        for why, is_so in (
            ("it is non-transactional", job.spec.type == "non-transactional"),
            ("it has windows by number of rows", counts_windows),
            ("its windows go by the clock", definition is not None and definition.by_clock),
            ("another state follows it", any(isinstance(one, Follower) and one.branch for one in functions)),
            (f"the states {names} count together, and this is for one state", len(plan.branches) > 1),
            (
                "functions or states of your own get the same batches",
                bool(plan.after_commit),
            ),
        ):
            if is_so:
                yield job.spec.state, why


class Seeding:
    """Seeds the state of a query with its batch 0, or goes on where another driver has ended."""

    def __init__(self, plan: StreamPlan, state: StateDriver, df: DataFrame, access: Access, run: QueryRun) -> None:
        self._plan, self._state, self._df, self._access, self._run = plan, state, df, access, run
        self._settings: SeedSettings = plan.seed
        self._requests = RetryPolicy([state.spec], access.may_go_on).requests
        self._root = ""
        self._forgotten: ForgottenRows | None = None
        self._began = time.monotonic()
        self.ledgers: SeedLedgers | None = None

    def run(self, planned: PlannedBatches) -> Commit | None:
        """The commit of batch 0; None where it counts already, and of a dry run.

        Raises LedgerError where the protocol refuses, DataError, StoreError, and Spark's own errors.
        """
        check_seed(self._plan, self._df)
        if self._access.is_over():
            raise has_ended()
        plan = planned.next(self._access, 0, self._run)
        if plan is None or plan.planned_at is None:
            raise UsageError(
                "this batch has no plan of Spark's, or it cannot be read from the checkpoint, so nothing would tell "
                "whether a seed goes on with the same rows. Nothing was written. Call seed, or start the query "
                "without a seed: one attempt counts the whole batch."
            )
        self._access.check_running_increments()
        if not self._access.is_local():
            check_executors(self._df, self._plan.branches)
        self._root = f"{self._access.checkpoint()}/mapstate"
        state, owner, on_gap = self._state, self._run.query_id, self._state.spec.on_gap
        offsets, entries = planned.offsets(self._access, owner, None), self._settings.entries
        if entries:
            has_places = self._settings.positions is not None
            self._forgotten = ForgottenRows(state.name, _row_keys(state), entries, offsets, has_places=has_places)
            self._check_places(self._forgotten)
        if self._settings.reports is not None:
            self._settings.reports.append(self._tried())
            return None
        ledgers = SeedLedgers([state.open()], [state.open_request(owner)], [on_gap])
        (held,) = ledgers.ledgers
        if is_complete(self._requests.ask(held.load), owner):
            self._remove()
            return None
        self.ledgers = ledgers
        try:
            digest = self._digest(str(plan.digest().fingerprint))
            self._requests.ask(lambda: ledgers.open_seeds([digest], listed=len(entries)))
            stage = self._found(held.record) or self._patiently(partial(self._made, ledgers, digest))
            while (seed := held.record.seed) is not None and seed.done < seed.buckets:
                self._patiently(partial(self._bucket, ledgers, stage))
                self._say(held.record)
            done = Commit(batch_id=0, txid=0, owner=owner, at=now(), run=self._run.run_id, offsets=offsets)
            self._requests.ask(lambda: ledgers.end(plan, [done]))
        except BaseException as error:
            repeats.give_up(ledgers, error)
            raise
        self._say(None)
        self._remove()
        return held.record.last_commit

    def _digest(self, fingerprint: str) -> str:
        job = self._state.job
        entries = [(entry.id, entry.digest, entry.offsets) for entry in self._settings.entries]
        parts: list[Any] = [fingerprint, job.spec.state, job.keys, job.fields, [*job.columns.items()], entries]
        return digest_of(json.dumps(parts if job.windows is None else [*parts, repr(job.windows)]))

    def _patiently(self, work: Callable[[], T]) -> T:
        """What ``work`` returns; after what another attempt may put right it is begun anew, as a batch is."""
        policy = RetryPolicy([self._state.spec], self._access.may_go_on)
        while True:
            try:
                return work()
            except Exception as raised:  # noqa: BLE001  raised again, or begun anew
                error = mapstate_error(raised)
                if policy.after(error) is not Decision.BEGIN_ANEW:
                    raise error from raised.__cause__
                _log.warning("a part of the seed of %s is begun anew: %s", self._plan.stream, error)

    def _rows(self, record: LedgerRecord) -> DataFrame:
        """The rows of batch 0 as the state takes them under this ledger. Nothing is read yet."""
        self._state.set_batch(record)
        frame = through(self._state.branch.steps, self._df, 0)
        self._state.check_columns(frame)
        if self._forgotten is not None:
            frame = self._marked(frame, self._forgotten)
        return self._state.keyed(frame)

    def _check_places(self, forgotten: ForgottenRows) -> None:
        """Raises ConfigurationError where the columns of a row's place have other types than Kafka's."""
        if not forgotten.needs_places or self._settings.positions is None:
            return
        frame = through(self._state.branch.steps, self._df, 0).select(*map(column_of, self._settings.positions))
        for field, (what, types) in zip(frame.schema.fields, _PLACES, strict=True):
            if (found := field.dataType.simpleString()) not in types:
                raise ConfigurationError(
                    f"positions are the columns of topic, partition and offset, and {field.name} {found} is no {what}: "
                    f"that is {' or '.join(types)}. Nothing was written."
                )

    def _marked(self, frame: DataFrame, forgotten: ForgottenRows) -> DataFrame:
        """The columns that the state reads, and which rows are left out: those have no contents any more."""
        from pyspark.sql.types import BooleanType, StructField, StructType

        job, places = self._state.job, (self._settings.positions or ()) if forgotten.needs_places else ()
        keys = _row_keys(self._state)
        rows = frame.select(*map(column_of, dict.fromkeys([*(key.name for key in keys), *places, *job.columns])))
        shape = StructType([StructField(field.name, field.dataType) for field in rows.schema])
        return rows.mapInArrow(_Marking(forgotten, keys, places), shape.add(_FORGOTTEN, BooleanType()))

    def _grouping(self, rows: DataFrame, record: LedgerRecord) -> Grouping:
        """How lines of the stage are made: as a batch is grouped, with what is left out apart."""
        from pyspark.sql import functions as F

        grouping = self._state.grouping_of(rows, record)
        if self._forgotten is not None:
            grouping = copy(grouping)
            grouping.keys = [*grouping.keys, F.col(_FORGOTTEN)]
        return grouping

    def _found(self, record: LedgerRecord) -> _Stage | None:
        """The stage that the ledger names; None without one, and where files of it are gone."""
        seed, rows = record.seed, self._rows(record)
        if seed is None or seed.stage is None:
            return None
        with suppress(Exception):  # Spark's own, of a path that is not there
            files = self._files(seed.stage, self._grouping(rows, record).of(rows).schema)
            if len(files) == seed.files:
                return _Stage(seed.stage, files, 0, seed.staged, seed.buckets)
        _log.warning("state %s: the stage %s is gone, so its seed begins anew", record.state, seed.stage)
        return None

    def _made(self, ledgers: SeedLedgers, digest: str) -> _Stage:
        (held,) = ledgers.ledgers
        stage = self._staged(f"seed-{digest}-{held.session}", held.record)
        sizes = {"files": len(stage.files), "rows": stage.rows, "buckets": stage.buckets, "forgotten": stage.forgotten}
        self._requests.ask(lambda: ledgers.staged(0, stage.name, windows=stage.windows, **sizes))
        self._say(held.record)
        return stage

    def _staged(self, name: str, record: LedgerRecord) -> _Stage:
        """Reads the history and writes it, grouped: the only time that it is read."""
        from pyspark.sql import functions as F

        record = with_windows(record, None)
        session, rows, wanted = self._df.sparkSession, self._rows(record), self._settings.buckets
        grouping = self._grouping(rows, record)
        partitions = int(session.conf.get("spark.sql.shuffle.partitions") or 1)
        partitions = max(partitions, (wanted or 1) * self._access.parallelism())
        with configured(self._df, {**ONE_DRAW, **_AS_WRITTEN, "spark.sql.shuffle.partitions": str(partitions)}):
            grouped = grouping.of(rows)
            if isinstance(self._state, SessionState):
                grouped = self._state.as_staged(grouped, grouping)
            grouped.write.mode("overwrite").option("maxRecordsPerFile", 0).parquet(f"{self._root}/{name}")
        files = self._files(name, grouped.schema)
        read = session.read.schema(grouped.schema).parquet(f"{self._root}/{name}")
        counted = F.lit(1) if grouping.partials is None else F.col("rows")
        forgotten = 0
        if self._forgotten is not None:
            ((forgotten,),) = read.where(_FORGOTTEN).agg(F.sum(counted)).collect()
            read = read.where(f"not {_FORGOTTEN}")
        windows = _windows_of(read, self._state, rows, record)
        live = _live(self._state, read, grouping, with_windows(record, windows))
        ((lines, count),) = live.agg(F.count(F.lit(1)), F.sum(counted)).collect()
        if live is not read and windows is not None:
            ((every,),) = read.agg(F.sum(counted)).collect()
            windows = msgspec.structs.replace(windows, expired=(every or 0) - (count or 0))
        buckets = max(1, min(wanted or -(-lines // MOST_IN_BUCKET), len(files)))
        return _Stage(name, files, lines, count or 0, buckets, forgotten or 0, windows)

    def _files(self, name: str, schema: Any) -> list[str]:
        """The files of a stage, in order. Raises Spark's error where there is none."""
        found = self._df.sparkSession.read.schema(schema).parquet(f"{self._root}/{name}").inputFiles()
        return sorted(f"{self._root}/{name}/{file.rpartition('/')[2]}" for file in found)

    def _bucket(self, ledgers: SeedLedgers, stage: _Stage) -> None:
        """An attempt at the bucket that comes next: the ledger says which one that is."""
        session, (held,) = self._df.sparkSession, ledgers.ledgers
        attempt = self._requests.ask(lambda: ledgers.begin_bucket(0))
        record = held.record
        rows = self._rows(record)
        schema = self._grouping(rows, record).of(rows).schema
        files = [] if record.seed is None else stage.of_bucket(record.seed.done)
        staged = session.read.schema(schema).parquet(*files) if files else session.createDataFrame([], schema)
        if self._forgotten is not None:
            staged = staged.where(f"not {_FORGOTTEN}").drop(_FORGOTTEN)
        staged = _live(self._state, staged, self._state.grouping_of(rows, record), record)
        if record.seed is not None and record.seed.done == 0 and self._forgotten is not None:
            self._copy_list(self._forgotten, record, attempt)
        result = self._state.attempt_staged(rows, staged, record, attempt)
        done = {"rows": result.rows, "keys": result.keys, "keys_delta": result.keys_delta, "panes": result.panes}
        self._requests.ask(lambda: ledgers.commit_bucket(0, attempt.txid, **done))

    def _copy_list(self, forgotten: ForgottenRows, record: LedgerRecord, attempt: Attempt) -> None:
        """Writes the list of the other version, whose rows this state never counts."""
        known, at = enumerate(self._settings.entries), now()
        entries = {number: forgotten.copied(entry, record.owner, attempt.txid, at) for number, entry in known}
        with opened(self._state.spec.backend, self._state.name) as store, writer_of(store, attempt.token) as writer:
            write_entries(writer, record, attempt, entries)

    def _say(self, record: LedgerRecord | None) -> None:
        """A line for who looks on, and for the log; None ends what stands on a terminal."""
        seed, line = None if record is None else record.seed, "\n"
        if record is not None and seed is not None:
            minutes = (time.monotonic() - self._began) / 60
            line = f"state {record.state}: {seed.progress}, {seed.rows:,} of {seed.staged:,} rows, {minutes:.1f} min"
            _log.info("seed of %s", line)
            line = f"\r\x1b[K{line}"
        if sys.stderr is not None and sys.stderr.isatty():
            sys.stderr.write(line)
            sys.stderr.flush()

    def _tried(self) -> SeedReport:
        """What would be staged: it is, in the scratch place of a dry run."""
        state, name = self._state, "seed"
        record = open_ledger(None, state.open_request(self._run.query_id))
        stage, keys = self._staged(name, record), None
        if state.job.windows is None and state.grouping_of(self._rows(record), record).partials is not None:
            keys = stage.lines
        path, store = _path_of(self._df, f"{self._root}/{name}")
        size = int(store.getContentSummary(path).getLength())
        found = SeedReport(state.spec.state, stage.rows, keys, stage.buckets, size, is_dry_run=True)
        return found.with_left_out(stage.forgotten, stage.windows)

    def _remove(self) -> None:
        """Deletes what is staged. What stays of it does no harm: no ledger names it any more."""
        try:
            delete(self._df, self._root)
        except Exception as error:  # noqa: BLE001  the seed counts, whatever a file system says
            _log.warning("the stage in %s is not deleted, and not needed any more: %s", self._root, error)


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
            kept = batch.take(pa.array([None if is_out else at for at, is_out in enumerate(out)], pa.int32()))
        return pa.RecordBatch.from_arrays([*kept.columns, pa.array(out, pa.bool_())], [*batch.schema.names, _FORGOTTEN])


def delete(df: DataFrame, place: str) -> None:
    """Deletes a directory, as Spark names it. Raises whatever Hadoop raises."""
    path, store = _path_of(df, place)
    store.delete(path, True)


def _path_of(df: DataFrame, place: str) -> tuple[Any, Any]:
    session: Any = df.sparkSession
    path = java_class(session.sparkContext._jvm, "org.apache.hadoop.fs.Path")(place)
    return path, path.getFileSystem(session._jsparkSession.sessionState().newHadoopConf())
