"""The driver's side of a batch: begin, let the tasks run, look at what they say, commit.

Ledger.begin        one small write: a new txid, and the view of what counts
apply               the batch, grouped by Catalyst, through `mapstate.spark.task` on the executors
account             one line per task: errors, lost claims, rows in and rows done
Ledger.commit       one small write: the whole batch counts
downstream          the new values, where somebody asked for them
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

from mapstate.aggregators.aggregator import Aggregator
from mapstate.aggregators.fields import Fields
from mapstate.backing_map import Reports, let_go
from mapstate.batch_report import MOST_REPORTS, BatchReport, encode_report
from mapstate.errors import (
    FencedError,
    IncompleteBatchError,
    MapStateError,
    StateSchemaError,
    StoreError,
    StoreRestartedError,
    StoreUnavailableError,
    UsageError,
)
from mapstate.keys import KeyField
from mapstate.ledger import Ledger, clock_txid, now
from mapstate.ledgers import Ledgers
from mapstate.retry import Patience
from mapstate.spark.applied import INSIDE, Applied, apply_on_driver, apply_on_executors, new_values_type, read_back
from mapstate.spark.offsets import offsets_of, plan_of
from mapstate.spark.plan import Plan
from mapstate.spark.query import QueryRun, check_running_increments
from mapstate.spark.task import BatchTask, TaskReport
from mapstate.spec import StateSpec
from mapstate.transitions import (
    AlreadyCommitted,
    BatchPlan,
    Begun,
    Commit,
    Field,
    LedgerRecord,
    Opening,
    check_follower,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = [
    "BatchDriver",
    "BatchPlans",
    "Downstream",
    "Follower",
    "Job",
    "OnBatch",
    "Replacing",
    "give_up",
    "keys_delta",
]

Downstream = Callable[["DataFrame", int], None]
"""Gets a batch's new values and its batch id."""


@dataclass(frozen=True)
class Follower:
    """What lies behind a state's commit, and gets besides a batch the txid under which the state has committed it.

    ``job`` is what is kept in a state that has to hold the same batches.
    """

    function: Callable[[DataFrame, int, int | None], None]
    job: Job | None = None

    def __call__(self, rows: DataFrame, batch_id: int, txid: int | None = None) -> None:
        """Passes them on."""
        self.function(rows, batch_id, txid)


@dataclass(frozen=True)
class Replacing(Follower):
    """A follower that gets a batch's new values with the old ones, of an opaque state; see `new_values_type`.

    Where those of a batch that counts already cannot all be read back any more, the query stops.
    """


OnBatch = Callable[[BatchReport], None]
"""Gets what a batch came to, after its commit."""

_log = logging.getLogger("mapstate")


@dataclass(frozen=True)
class Job:
    """What shall be kept, and where: all that does not change from batch to batch.

    ``columns`` are the input columns that are read, by name, with their Spark types. ``downstream`` gets a batch's new
    values, ``after`` its rows, as they came.
    """

    stream: str
    spec: StateSpec
    keys: tuple[KeyField, ...]
    fields: tuple[Field, ...]
    aggregators: Mapping[str, Aggregator]
    columns: Mapping[str, str]
    downstream: tuple[Downstream | Follower, ...] = ()
    after: tuple[Downstream | Follower, ...] = ()
    on_batch: tuple[OnBatch, ...] = ()


class BatchPlans:
    """What Spark has planned for the batches of a query, one after the other, asked once for each. Driver."""

    def __init__(self) -> None:
        self._known: tuple[QueryRun, int] | None = None
        self.plan: BatchPlan | None = None

    def next(
        self, batch_df: DataFrame, batch_id: int, run: QueryRun, upstream_txid: int | None = None
    ) -> BatchPlan | None:
        """The plan of the batch that comes, see `plan_of`; it is ``plan`` from here on."""
        if run.run_id is None:
            self._known = self.plan = None
        elif self._known != (run, batch_id):
            before = self.plan if self._known == (run, batch_id - 1) else None
            self._known, self.plan = (run, batch_id), plan_of(batch_df, batch_id, before)
        if self.plan is not None:
            self.plan = self.plan._replace(upstream_txid=upstream_txid)
        return self.plan


def give_up(ledger: Ledger | Ledgers, error: BaseException) -> None:
    """After a batch that failed: nothing it began may write any more. As well as the store lets it be done.

    Not where the store itself is the trouble: it would be waited for once more. A fence that moved because the store
    was emptied or put back is no second driver: then what the store says is raised instead.
    """
    if isinstance(error, FencedError):
        ledger.say_what_fenced()
    elif isinstance(error, Exception) and not isinstance(error, StoreError):
        with suppress(MapStateError):
            ledger.give_up()


class BatchDriver:
    """Runs the batches of one streaming query against one state. Driver only, one batch at a time."""

    def __init__(self, job: Job, *, of_stream: bool = True) -> None:
        self._job = job
        self._of_stream = of_stream  # and not of what another state emits
        self._spec = job.spec
        self._open: tuple[QueryRun, Ledger] | None = None
        self._store: Any = None
        self._committed: tuple[int, str] | None = None
        self._started = 0.0
        self._plan: Plan | None = None
        self._batch_plans = BatchPlans()
        self._counts_as: int | None = None
        self._patience = Patience(0, lambda: True)
        self._old = any(isinstance(function, Replacing) for function in job.downstream)

    def run(self, batch_df: DataFrame, batch_id: int, upstream_txid: int | None = None) -> None:
        """One foreachBatch call. See `PersistentAggregate.__call__`; ``upstream_txid`` is as in `BatchPlan`."""
        self._started = time.monotonic()
        self._check_columns(batch_df)
        run = QueryRun.of(batch_df, default=self._job.stream)
        self._patience = Patience(self._spec.patience, partial(QueryRun.may_go_on, batch_df))
        try:
            self._run(batch_df, batch_id, run, upstream_txid)
        except BaseException as error:
            opened = self._open
            if run.run_id is not None:
                self._open = None  # Spark ends a query that raised; the next call is another start
            if opened is not None:
                give_up(opened[1], error)
            raise

    def open_for(self, batch_df: DataFrame, batch_id: int) -> None:
        """Takes the state before its batch is planned: for queries of it that are answered on the driver, there."""
        run = QueryRun.of(batch_df, default=self._job.stream)
        if self._open is None or self._open[0] != run:
            self._check_rows(batch_df)
            self._store = self._spec.open()
            _check_followers(self._job, run.query_id, batch_id, self._batch_plans.next(batch_df, batch_id, run))
            self._open = (run, Ledger.open(self._store, self._opening(run.query_id)))
            self._committed = None

    def _run(self, batch_df: DataFrame, batch_id: int, run: QueryRun, upstream_txid: int | None) -> None:
        plan = self._batch_plans.next(batch_df, batch_id, run, upstream_txid)
        if self._open is None or self._open[0] != run:
            self._check_rows(batch_df)
            self._store = self._spec.open()
            _check_followers(self._job, run.query_id, batch_id, plan)
            opening = self._opening(run.query_id)
            ledger, begun = Ledger.open_and_begin(self._store, opening, batch_id, self._spec.on_gap, plan)
            self._open = (run, ledger)
            self._committed = None
        else:
            ledger = self._open[1]
            begun = self._patience.ask(lambda: ledger.begin(batch_id, self._spec.on_gap, plan))
        if not isinstance(begun, AlreadyCommitted):
            self._new_values_downstream(self._finish(batch_df, ledger, begun, run), batch_id)
        elif run.run_id is not None and begun.commit is not None and begun.commit.run == run.run_id:
            raise UsageError(
                f"state {self._spec.state!r}: batch {batch_id} was given to this state twice in one run, and the "
                "second part would be lost. Union the frames first, or give each a state of its own name."
            )
        else:
            self._repeat_downstream(batch_df, ledger, begun)

    def _check_rows(self, batch_df: DataFrame) -> None:
        if self._of_stream:
            check_running_increments(batch_df)

    def _check_columns(self, batch_df: DataFrame) -> None:
        """The batch has the columns that the job was made for. Raises StateSchemaError."""
        found = {field.name: field.dataType.simpleString() for field in batch_df.schema.fields}
        for name, expected in self._job.columns.items():
            if found.get(name) != expected:
                raise StateSchemaError(
                    f"state {self._spec.state!r}: the batch brings the column {name!r} as "
                    f"{found.get(name, 'nothing')}, the stream given to newStream had it as {expected}. Nothing was "
                    "written.",
                    state=self._spec.state,
                    found=found.get(name),
                    expected=expected,
                )

    def _opening(self, query_id: str) -> Opening:
        spec = self._spec
        return Opening(
            state=spec.state,
            type=spec.type,
            serializer=spec.serializer,
            keys=self._job.keys,
            fields=self._job.fields,
            owner=query_id,
            clock_txid=clock_txid(),
            on_new_owner=spec.on_new_owner,
            has_ttl=spec.ttl is not None,
        )

    def _finish(self, batch_df: DataFrame, ledger: Ledger, begun: Begun, run: QueryRun) -> Applied:
        """Attempts until one can be committed, at most as many as the recipe allows."""
        waits = 0
        for attempt in count(1):
            last = attempt - waits == self._spec.max_attempts
            task = self._task(batch_df, ledger.record, begun)
            try:
                applied = self._attempt(batch_df, task, last=last)
            except StoreUnavailableError as error:
                if self._spec.type == "non-transactional":
                    raise  # what is in would count twice
                self._patience.wait(error)
                waits += 1
                begun = self._begin_anew(ledger, begun)
                continue
            if applied is not None:
                rows, keys = self._account(applied.reports)
                done = Commit(
                    batch_id=begun.batch_id,
                    txid=begun.txid,
                    owner=ledger.record.owner,
                    rows=rows,
                    keys=keys,
                    at=now(),
                    offsets=offsets_of(batch_df, self._batch_plans.plan, ledger.record.owner, ledger.record.committed),
                    run=run.run_id,
                    keys_delta=keys_delta(applied.reports),
                )
                try:
                    self._patience.ask(lambda done=done: ledger.commit(done))  # type: ignore[misc]
                except StoreRestartedError as error:
                    applied.release()
                    if last:
                        raise
                    _log.warning("batch %d is begun anew: %s", begun.batch_id, error)
                    begun = self._begin_anew(ledger, begun)
                    continue
                self._committed = (begun.txid, task.attempt)
                self._counts_as = begun.txid
                self._tell(self._report(done, attempt, applied.reports))
                return applied
            if last:
                break
            begun = self._begin_anew(ledger, begun)
        raise IncompleteBatchError(
            f"state {self._spec.state!r}: in each of {self._spec.max_attempts} attempts at batch {begun.batch_id} "
            "a task ran twice, so none could be committed. Is speculation on, or do executors keep dying? "
            "max_attempts in the recipe allows more.",
            state=self._spec.state,
            batch_id=begun.batch_id,
        )

    def _begin_anew(self, ledger: Ledger, begun: Begun) -> Begun:
        again = self._patience.ask(lambda: ledger.begin(begun.batch_id, self._spec.on_gap, self._batch_plans.plan))
        if isinstance(again, AlreadyCommitted):
            raise FencedError(f"batch {begun.batch_id} was committed by another driver meanwhile")
        return again

    def _attempt(self, batch_df: DataFrame, task: BatchTask, *, last: bool) -> Applied | None:
        """One attempt; None where it has to be begun anew. Raises what a task reported."""
        from py4j.protocol import Py4JError
        from pyspark.errors import AnalysisException, PySparkException

        on_driver = self._spec.apply_on == "driver" or not self._spec.backend.shared_between_processes
        try:
            plan = self._planned(batch_df, task.fields)
            rows = plan.of(batch_df)
            applied = apply_on_driver(rows, task, plan) if on_driver else apply_on_executors(rows, task)
        except (PySparkException, Py4JError) as error:
            # A worker died, or the input failed. The non-transactional type would count twice what is in.
            no_use = isinstance(error, AnalysisException) or last
            if no_use or self._spec.type == "non-transactional" or not QueryRun.may_go_on(batch_df):
                raise
            _log.warning(
                "state %s: the job of batch %d failed (%s); beginning it anew",
                *(self._spec.state, task.batch_id, type(error).__name__),
            )
            return None
        for report in applied.reports:
            if report.error is not None:
                applied.release()
                raise report.error.rebuild()
        if any(report.lost_claim for report in applied.reports):
            applied.release()
            _log.warning(
                "state %s: a task of batch %d ran twice; beginning it anew",
                *(self._spec.state, task.batch_id),
            )
            return None
        return applied

    def _task(self, batch_df: DataFrame, record: LedgerRecord, begun: Begun) -> BatchTask:
        fields = Fields(record.fields, self._job.aggregators)
        vouched = None
        if self._committed is not None and self._committed[0] == begun.view.last:
            vouched = self._committed[1]
        return BatchTask(
            spec=self._spec,
            fields=fields,
            layouts=record.layouts,
            keys=self._job.keys,
            partials=self._planned(batch_df, fields).partials,
            begun=begun,
            new_values=new_values_type(batch_df, self._job.keys, fields, old=self._old)
            if self._job.downstream
            else None,
            old_values=self._old,
            rows_of=list(self._job.columns),
            committed=vouched,
        )

    def _planned(self, batch_df: DataFrame, fields: Fields) -> Plan:
        if self._plan is None or not self._plan.fits(batch_df, fields):
            self._plan = Plan(batch_df, self._job.keys, fields, list(self._job.columns))
        return self._plan

    def _account(self, reports: list[TaskReport]) -> tuple[int, int]:
        """Rows and keys of the batch. Raises IncompleteBatchError unless all is accounted for."""
        rows_in, rows_done = sum(one.rows_in for one in reports), sum(one.rows_done for one in reports)
        partitions = [one.partition for one in reports]
        if rows_in != rows_done or len(set(partitions)) != len(partitions):
            raise IncompleteBatchError(
                f"state {self._spec.state!r}: {rows_in} rows went into the batch, {rows_done} are accounted for by "
                f"{len(partitions)} tasks of {len(set(partitions))} partitions. Nothing was committed.",
                state=self._spec.state,
                found=rows_done,
                expected=rows_in,
            )
        return rows_done, sum(one.keys for one in reports)

    def _report(self, done: Commit, attempt: int, tasks: list[TaskReport]) -> BatchReport:
        skipped = sum(one.skipped for one in tasks)
        return BatchReport(
            batch_id=done.batch_id,
            txid=done.txid,
            attempt=attempt,
            rows=done.rows,
            keys_read=sum(one.read for one in tasks),
            keys_cached=sum(one.cached for one in tasks),
            keys_written=done.keys - skipped,
            keys_skipped=skipped,
            milliseconds=int((time.monotonic() - self._started) * 1000),
            at=done.at,
            partitions=len(tasks),
        )

    def _tell(self, done: BatchReport) -> None:
        """Logs, keeps and passes on what a batch came to. It is committed: nothing here may fail it."""
        state = self._spec.state
        _log.info(
            "state %s: batch %d committed as txid %d: attempt %d, %d rows, %d keys, %d of them cached, %d read, "
            "%d written, %d skipped, %d ms, at %s",
            *(state, done.batch_id, done.txid, done.attempt, done.rows, done.keys_written + done.keys_skipped),
            *(done.keys_cached, done.keys_read, done.keys_written, done.keys_skipped, done.milliseconds, done.at),
        )
        if isinstance(self._store, Reports):
            try:
                self._store.keep_report(encode_report(done), MOST_REPORTS)
            except Exception as error:  # noqa: BLE001  the batch counts, whatever a store says
                _log.warning(
                    "state %s: the report of batch %d is not kept; the batch counts. %s", state, done.batch_id, error
                )
        for function in self._job.on_batch:
            try:
                function(done)
            except Exception:  # noqa: BLE001  anybody's code, and the batch counts
                _log.exception("state %s: on_batch failed for batch %d; the batch counts", state, done.batch_id)

    def _repeat_downstream(self, batch_df: DataFrame, ledger: Ledger, done: AlreadyCommitted) -> None:
        """Spark brings a batch again that counts already: only what lies downstream may have missed it."""
        _log.info("state %s: batch %d is committed already, nothing is written", self._spec.state, done.batch_id)
        self._counts_as = None if done.commit is None else done.commit.txid
        if not self._job.downstream:
            return
        fields = Fields(ledger.record.fields, self._job.aggregators)
        if done.commit is None or self._spec.type == "non-transactional":
            _log.warning(
                "state %s: the new values of batch %d cannot be told from later ones any more; downstream gets none",
                *(self._spec.state, done.batch_id),
            )
        found = read_back(batch_df, self._spec, fields, ledger.record, done.commit, old=self._old)
        if done.commit is None or found.missing:
            self._check_complete(done, found.missing)
        self._new_values_downstream(found, done.batch_id)

    def _check_complete(self, done: AlreadyCommitted, missing: int) -> None:
        """What follows the state cannot be exact without all new values. Raises IncompleteBatchError."""
        if done.commit is None:
            lost = "cannot be told from later ones any more: another query has committed since, or the state was reset"
        else:
            lost = (
                f"lack {missing} of {done.commit.keys} keys: their records have expired or were evicted, or the batch "
                "removed them and a vacuum came since, or a later attempt wrote them"
            )
        if self._old:
            raise IncompleteBatchError(
                f"state {self._spec.state!r}: the new values of batch {done.batch_id}, which is committed already, "
                f"{lost}. A state that follows this one would be wrong without them; it got nothing. Restore both "
                "stores and the checkpoint from one moment, or begin both states anew under other names.",
                state=self._spec.state,
                batch_id=done.batch_id,
            )
        if done.commit is not None:
            _log.warning("state %s: the new values of batch %d %s", self._spec.state, done.batch_id, lost)

    def _new_values_downstream(self, applied: Applied, batch_id: int) -> None:
        try:
            if applied.new_values is not None:
                inside = [name for name in applied.new_values.columns if name.startswith(INSIDE)]
                plain = applied.new_values.drop(*inside)
                for function in self._job.downstream:
                    rows = applied.new_values if isinstance(function, Replacing) else plain
                    self.pass_on(function, rows, batch_id)
        finally:
            applied.release()

    def pass_on(self, function: Downstream | Follower, rows: DataFrame, batch_id: int) -> None:
        """Calls what lies behind the commit of the present batch."""
        if isinstance(function, Follower):
            function(rows, batch_id, self._counts_as)
        else:
            function(rows, batch_id)


def _check_followers(job: Job, query_id: str, batch_id: int, plan: BatchPlan | None) -> None:
    """`check_follower` of all states that follow this one, and of those that follow them, before anything is written.

    Raises MissingBatchesError and ReplannedBatchError, not for a state whose ``on_gap`` is "accept".
    """
    behind = [one.job for one in (*job.downstream, *job.after) if isinstance(one, Follower)]
    for follower in [one for one in behind if one is not None]:
        pair, its_plan = [job.spec, follower.spec], plan
        if all(spec.on_gap != "accept" for spec in pair):
            on_new_owners = [spec.on_new_owner for spec in pair]
            its_plan = check_follower([_ledger_of(spec) for spec in pair], query_id, on_new_owners, batch_id, plan)
        _check_followers(follower, query_id, batch_id, its_plan)


def _ledger_of(spec: StateSpec) -> LedgerRecord | None:
    store = spec.open()
    try:
        found = Ledger(store, spec.state).load()
    finally:
        let_go(store)
    return None if found is None else found[0]


def keys_delta(reports: Sequence[TaskReport]) -> int | None:
    """How many keys an attempt added, less those that it removed; None if one of its tasks cannot tell."""
    deltas = [one.keys_delta for one in reports]
    return None if None in deltas else sum(one for one in deltas if one is not None)
