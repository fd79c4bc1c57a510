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
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import msgspec

from mapstate.aggregators.counted import CountWindows
from mapstate.errors import ConfigurationError, UsageError
from mapstate.protocol.ledger_record import Commit, LedgerRecord, digest_of, now
from mapstate.protocol.opening import open_ledger
from mapstate.protocol.seed_ledgers import SeedLedgers
from mapstate.protocol.seeding import is_complete
from mapstate.spark.driver import repeats
from mapstate.spark.driver.access import Access, configured, is_connect, java_class
from mapstate.spark.driver.executors import check_executors
from mapstate.spark.driver.frames import ONE_DRAW, through
from mapstate.spark.driver.job import Follower, StreamPlan
from mapstate.spark.driver.offsets import PlannedBatches
from mapstate.spark.driver.query_run import QueryRun, has_ended
from mapstate.spark.driver.retry_policy import Decision, RetryPolicy
from mapstate.spark.driver.state import StateDriver

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
_log = logging.getLogger("mapstate")


class SeedReport(NamedTuple):
    """What a state was seeded with; of a dry run, with what it would be. ``bytes`` are those of the stage."""

    state: str
    rows: int
    keys: int | None
    buckets: int | None
    bytes: int | None = None
    is_dry_run: bool = False

    def __str__(self) -> str:
        held = "an unknown number of" if self.keys is None else f"{self.keys:,}"
        text = f"{self.state}: {self.rows:,} rows, {held} keys"
        if self.buckets is not None:
            text += f", {self.buckets} buckets"
        if self.bytes is not None:
            text += f", {self.bytes / 1e6:,.1f} MB staged"
        return f"{text}. Nothing was written." if self.is_dry_run else text


class SeedSettings(NamedTuple):
    """How a query's batch 0 is loaded. ``reports`` get what a dry run finds; else it is None."""

    buckets: int | None = None
    reports: list[SeedReport] | None = None


class _Stage(NamedTuple):
    """What is staged: ``lines`` are keys with their partials, or rows; ``rows`` are rows of the history."""

    name: str
    files: list[str]
    lines: int
    rows: int
    buckets: int

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
        counts_windows = any(isinstance(one, CountWindows) for one in job.aggregators.values())
        for why, is_so in (
            ("it is non-transactional", job.spec.type == "non-transactional"),
            ("it has windows", job.windows is not None or counts_windows),
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
            self._requests.ask(lambda: ledgers.open_seeds([digest], initial=False))
            stage = self._found(held.record) or self._patiently(partial(self._made, ledgers, digest))
            while (seed := held.record.seed) is not None and seed.done < seed.buckets:
                self._patiently(partial(self._bucket, ledgers, stage))
                self._say(held.record)
            done = Commit(batch_id=0, txid=0, owner=owner, at=now(), run=self._run.run_id)
            done = msgspec.structs.replace(done, offsets=planned.offsets(self._access, owner, None))
            self._requests.ask(lambda: ledgers.end(plan, [done]))
        except BaseException as error:
            repeats.give_up(ledgers, error)
            raise
        self._say(None)
        self._remove()
        return held.record.last_commit

    def _digest(self, fingerprint: str) -> str:
        job = self._state.job
        return digest_of(json.dumps([fingerprint, job.spec.state, job.keys, job.fields, [*job.columns.items()]]))

    def _patiently(self, work: Callable[[], T]) -> T:
        """What ``work`` returns; after what another attempt may put right it is begun anew, as a batch is."""
        policy = RetryPolicy([self._state.spec], self._access.may_go_on)
        while True:
            try:
                return work()
            except Exception as error:
                if policy.after(error) is not Decision.BEGIN_ANEW:
                    raise
                _log.warning("a part of the seed of %s is begun anew: %s", self._plan.stream, error)

    def _rows(self) -> DataFrame:
        """The rows of batch 0 as the state takes them. Nothing is read yet."""
        frame = through(self._state.branch.steps, self._df, 0)
        self._state.check_columns(frame)
        return self._state.keyed(frame)

    def _found(self, record: LedgerRecord) -> _Stage | None:
        """The stage that the ledger names; None without one, and where files of it are gone."""
        seed, rows = record.seed, self._rows()
        if seed is None or seed.stage is None:
            return None
        with suppress(Exception):  # Spark's own, of a path that is not there
            files = self._files(seed.stage, self._state.grouping_of(rows, record).of(rows).schema)
            if len(files) == seed.files:
                return _Stage(seed.stage, files, 0, seed.staged, seed.buckets)
        _log.warning("state %s: the stage %s is gone, so its seed begins anew", record.state, seed.stage)
        return None

    def _made(self, ledgers: SeedLedgers, digest: str) -> _Stage:
        (held,) = ledgers.ledgers
        stage = self._staged(f"seed-{digest}-{held.session}", held.record)
        sizes = {"files": len(stage.files), "rows": stage.rows, "buckets": stage.buckets}
        self._requests.ask(lambda: ledgers.staged(0, stage.name, **sizes))
        self._say(held.record)
        return stage

    def _staged(self, name: str, record: LedgerRecord) -> _Stage:
        """Reads the history and writes it, grouped: the only time that it is read."""
        from pyspark.sql import functions as F

        session, rows, wanted = self._df.sparkSession, self._rows(), self._settings.buckets
        grouping = self._state.grouping_of(rows, record)
        partitions = int(session.conf.get("spark.sql.shuffle.partitions") or 1)
        partitions = max(partitions, (wanted or 1) * self._access.parallelism())
        with configured(self._df, {**ONE_DRAW, **_AS_WRITTEN, "spark.sql.shuffle.partitions": str(partitions)}):
            grouped = grouping.of(rows)
            grouped.write.mode("overwrite").option("maxRecordsPerFile", 0).parquet(f"{self._root}/{name}")
        files = self._files(name, grouped.schema)
        counted = F.count(F.lit(1)) if grouping.partials is None else F.sum("rows")
        read = session.read.schema(grouped.schema).parquet(f"{self._root}/{name}")
        ((lines, count),) = read.agg(F.count(F.lit(1)), counted).collect()
        buckets = wanted or -(-lines // MOST_IN_BUCKET)
        return _Stage(name, files, lines, count or 0, max(1, min(buckets, len(files))))

    def _files(self, name: str, schema: Any) -> list[str]:
        """The files of a stage, in order. Raises Spark's error where there is none."""
        found = self._df.sparkSession.read.schema(schema).parquet(f"{self._root}/{name}").inputFiles()
        return sorted(f"{self._root}/{name}/{file.rpartition('/')[2]}" for file in found)

    def _bucket(self, ledgers: SeedLedgers, stage: _Stage) -> None:
        """An attempt at the bucket that comes next: the ledger says which one that is."""
        session, rows, (held,) = self._df.sparkSession, self._rows(), ledgers.ledgers
        attempt = self._requests.ask(lambda: ledgers.begin_bucket(0))
        record = held.record
        schema = self._state.grouping_of(rows, record).of(rows).schema
        files = [] if record.seed is None else stage.of_bucket(record.seed.done)
        staged = session.read.schema(schema).parquet(*files) if files else session.createDataFrame([], schema)
        result = self._state.attempt_staged(rows, staged, record, attempt)
        done, keys, delta = result.rows, result.keys, result.keys_delta
        self._requests.ask(lambda: ledgers.commit_bucket(0, attempt.txid, rows=done, keys=keys, keys_delta=delta))

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
        if state.grouping_of(self._rows(), record).partials is not None:
            keys = stage.lines
        path, store = _path_of(self._df, f"{self._root}/{name}")
        size = int(store.getContentSummary(path).getLength())
        return SeedReport(state.spec.state, stage.rows, keys, stage.buckets, size, is_dry_run=True)

    def _remove(self) -> None:
        """Deletes what is staged. What stays of it does no harm: no ledger names it any more."""
        try:
            delete(self._df, self._root)
        except Exception as error:  # noqa: BLE001  the seed counts, whatever a file system says
            _log.warning("the stage in %s is not deleted, and not needed any more: %s", self._root, error)


def delete(df: DataFrame, place: str) -> None:
    """Deletes a directory, as Spark names it. Raises whatever Hadoop raises."""
    path, store = _path_of(df, place)
    store.delete(path, True)


def _path_of(df: DataFrame, place: str) -> tuple[Any, Any]:
    session: Any = df.sparkSession
    path = java_class(session.sparkContext._jvm, "org.apache.hadoop.fs.Path")(place)
    return path, path.getFileSystem(session._jsparkSession.sessionState().newHadoopConf())
