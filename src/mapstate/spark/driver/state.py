"""One state's part in each batch: its task, its result, its report, and what follows its commit."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from mapstate.aggregators.fields import Fields
from mapstate.batch_report import MOST_REPORTS, BatchReport
from mapstate.capabilities import Reports
from mapstate.errors import INSIDE
from mapstate.protocol.ledger_record import AlreadyCommitted, Attempt, Commit, LedgerRecord, OpenRequest
from mapstate.protocol.opening import clock_txid
from mapstate.protocol.refusals import other_column, ran_twice, unaccounted
from mapstate.spark.driver.apply import AttemptResult, Grouping, apply_on_executors
from mapstate.spark.driver.frames import SentRows
from mapstate.spark.driver.job import Branch, Downstream, Follower
from mapstate.spark.driver.new_values import new_values_type
from mapstate.spark.executor.task import BatchTask

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_log = logging.getLogger("mapstate")

MOST_SMALL = 5_000  # keys; more are faster on executors
MANY_ROWS = 400_000  # a task; see bench/partial_aggregate.py
SPARSE_IN_A_ROW = 3  # batches of many rows and few of a key, before one is aggregated behind the shuffle alone
SMALL_IN_A_ROW = 3
"""Batches of at most `MOST_SMALL` keys, before the driver applies one without being asked."""


class StateDriver:
    """Applies the batches of a query to one state; the ledger is the caller's. Driver only, one batch at a time.

    ``committed_as`` is the txid under which the state counts the present batch; None if nobody can tell.
    """

    make_grouping: Callable[..., Grouping] = Grouping
    make_task: Callable[..., BatchTask] = BatchTask
    make_seed_task: Callable[..., BatchTask] = BatchTask
    make_fields: Callable[..., Fields] = Fields

    def __init__(self, branch: Branch) -> None:
        self.branch = branch
        self.job = branch.job
        self.spec = branch.job.spec
        self.name = self.spec.state
        self.committed_as: int | None = None
        self._store: Any = None
        self._grouping: Grouping | None = None
        self._key_order = self.spec.key_order
        self._on_driver = self.spec.is_applied_on_driver
        self._small_batches = self._sparse_batches = 0  # in a row, of those that were committed last
        self._sparse_needed = {"never": 0, "always": float("inf")}.get(self.spec.partial_aggregation, SPARSE_IN_A_ROW)

    def open(self) -> Any:
        """The store. Once in each run of a query."""
        self._store = self.spec.open()
        return self._store

    def open_request(self, owner: str) -> OpenRequest:
        """What this job asks of the state's ledger."""
        return OpenRequest(
            state=self.name,
            type=self.spec.type,
            serializer=self.spec.serializer,
            keys=self.job.keys,
            fields=self.job.fields,
            owner=owner,
            clock_txid=clock_txid(),
            on_new_owner=self.spec.on_new_owner,
            ttl=self.spec.ttl,
        )

    def check_columns(self, frame: DataFrame) -> None:
        """Raises StateSchemaError unless the rows have the columns that the job was made for."""
        types = {field.name: field.dataType.simpleString() for field in frame.schema.fields}
        for name, expected in self.job.columns.items():
            if types.get(name) != expected:
                raise other_column(self.name, name, types.get(name), expected)

    def set_batch(self, record: LedgerRecord, done: AlreadyCommitted | None = None) -> None:
        """The present batch has begun, or it is ``done`` already. For states with windows, which say what is late."""

    def emit_fired(self, frame: DataFrame, record: LedgerRecord, done: Commit | None, batch_id: int) -> None:
        """Calls what gets the windows that a commit has fired. For states with windows."""

    def keyed(self, frame: DataFrame) -> DataFrame:
        """The rows of the present batch with their key columns."""
        return frame

    def attempt(self, sent: SentRows, record: LedgerRecord, attempt: Attempt) -> AttemptResult:
        """One attempt. The caller releases its result.

        Raises what a task reported, Spark's own errors, and IncompleteBatchError where a task ran twice or rows are
        missing.
        """
        frame, rows_sent = sent
        if self.branch.steps:  # else they are the batch's own, which were checked before it began
            self.check_columns(frame)
        frame = self.keyed(frame)
        task, grouping = self.task(frame, record, attempt)
        grouping.is_partial = self.is_aggregated_twice(grouping)
        return self._checked(grouping.of(frame), task, grouping, rows_sent)

    def is_aggregated_twice(self, grouping: Grouping) -> bool:
        """Whether rows are aggregated in front of the shuffle, too."""
        return self._sparse_batches < self._sparse_needed or not grouping.may_skip_partial

    def attempt_staged(
        self, frame: DataFrame, staged: DataFrame, record: LedgerRecord, attempt: Attempt
    ) -> AttemptResult:
        """An attempt of a seed at ``staged`` rows, which were grouped already: no new values, and no log of changes."""
        task, grouping = self.task(frame, record, attempt, is_seed=True)
        return self._checked(grouping.by_key(staged), task, grouping, None)

    def _checked(self, rows: DataFrame, task: BatchTask, grouping: Grouping, rows_sent: int | None) -> AttemptResult:
        result = self._applied(rows, task, grouping)
        try:
            result.rows_sent = rows_sent
            self.check(result, task.batch_id)
        except BaseException:
            result.release()
            raise
        return result

    def _applied(self, rows: DataFrame, task: BatchTask, grouping: Grouping) -> AttemptResult:
        order = self._key_order
        if self._on_driver:
            from mapstate.spark.driver.on_driver import apply_on_driver

            return apply_on_driver(grouping.in_order(rows, order), task, grouping)
        if self._small_batches >= SMALL_IN_A_ROW:
            if grouping.is_collected and self.spec.may_be_applied_on_driver:
                from mapstate.spark.driver.on_driver import apply_if_small

                result = apply_if_small(rows, task, grouping, MOST_SMALL)
                if result is not None:
                    return result
                self._small_batches = 0
            else:
                order = None
        return apply_on_executors(grouping.in_order(rows, order), task)

    def grouping_of(self, frame: DataFrame, record: LedgerRecord) -> Grouping:
        """How the rows of each batch are grouped; ``frame`` has their columns."""
        fields = self.make_fields(record.fields, self.job.aggregators)
        if self._grouping is None or not self._grouping.fits(frame, fields):
            self._grouping = self.make_grouping(frame, self.job.keys, fields, list(self.job.columns))
        return self._grouping

    def task(
        self, frame: DataFrame, record: LedgerRecord, attempt: Attempt, *, is_seed: bool = False
    ) -> tuple[BatchTask, Grouping]:
        grouping, fields = self.grouping_of(frame, record), self.make_fields(record.fields, self.job.aggregators)
        retracts = self.retracts
        new_values = None
        if self.branch.downstream and not is_seed:
            new_values = new_values_type(frame, self.job.keys, fields, old=retracts)
        task = (self.make_seed_task if is_seed else self.make_task)(
            spec=self.spec,
            fields=fields,
            field_counts=record.field_counts,
            keys=self.job.keys,
            partials=grouping.partials,
            attempt=attempt,
            new_values=new_values,
            old_values=retracts,
            rows_of=list(self.job.columns),
        )
        return task, grouping

    @property
    def retracts(self) -> bool:
        """Whether a follower needs the old values."""
        return any(map(_wants_old, self.branch.downstream))

    def check(self, result: AttemptResult, batch_id: int) -> None:
        """Raises the first error that a task reported, and IncompleteBatchError unless every row is accounted for."""
        for report in result.reports:
            if report.error is not None:
                raise report.error.rebuild()
        if any(report.lost_claim for report in result.reports):
            raise ran_twice(self.name, batch_id)
        rows_in = sum(report.rows_in for report in result.reports)
        partitions = [report.partition for report in result.reports]
        rows_sent = rows_in if result.rows_sent is None else result.rows_sent
        if rows_in != result.rows or len(set(partitions)) != len(partitions) or rows_sent != rows_in:
            raise unaccounted(self.name, batch_id, (rows_sent, rows_in, result.rows), partitions)

    def report(
        self, commit: Commit, number: int, result: AttemptResult | None, passed: int | None, began: float
    ) -> BatchReport:
        """Reports the batch, which is committed: no error of a report may fail it. No result: it counts as empty."""
        self.committed_as = commit.txid
        self._small_batches = self._small_batches + 1 if commit.keys <= MOST_SMALL else 0
        self._sparse_batches = self._sparse_batches + 1 if self._is_sparse(commit, result) else 0
        report = msgspec.structs.replace(
            self.make_report(commit, number, result),
            offsets_passed=passed,
            milliseconds=int((time.monotonic() - began) * 1000),
        )
        _log.info(
            "state %s: batch %d committed as txid %d: attempt %d, %d rows%s, %d keys, %d read, %d written, %d skipped, "
            "%d ms, at %s",
            *(self.name, report.batch_id, report.txid, report.attempt, report.rows),
            "" if passed is None else f" of {passed} offsets",
            *(report.keys_written + report.keys_skipped, report.keys_read, report.keys_written),
            *(report.keys_skipped, report.milliseconds, report.at),
        )
        if isinstance(self._store, Reports):
            try:
                self._store.keep_report(encode_report(report), MOST_REPORTS)
            except Exception as error:  # noqa: BLE001  the batch counts, whatever a store says
                _log.warning(
                    "state %s: the report of batch %d is not kept; the batch counts. %s",
                    *(self.name, report.batch_id, error),
                )
        for function in self.branch.on_batch:
            try:
                function(report)
            except Exception:  # noqa: BLE001  anybody's code, and the batch counts
                _log.exception("state %s: on_batch failed for batch %d; the batch counts", self.name, report.batch_id)
        return report

    def _is_sparse(self, commit: Commit, result: AttemptResult | None) -> bool:
        """Whether aggregating once is faster. The bounds are wider once that is done: no change to and fro at them."""
        tasks = [0] if result is None else [task.rows_in for task in result.reports] or [0]
        margin = 1.5 if self._sparse_batches >= SPARSE_IN_A_ROW else 1.0
        is_even = max(tasks) * len(tasks) <= 2 * margin * commit.rows
        return is_even and 4 * margin * commit.keys >= commit.rows >= len(tasks) * MANY_ROWS / margin

    def make_report(self, commit: Commit, number: int, result: AttemptResult | None) -> BatchReport:
        """The report of a batch."""
        tasks = [] if result is None else result.reports
        skipped = sum(task.skipped for task in tasks)
        return BatchReport(
            batch_id=commit.batch_id,
            txid=commit.txid,
            attempt=number,
            rows=commit.rows,
            keys_read=sum(task.keys for task in tasks),
            keys_cached=0,
            keys_written=commit.keys - skipped,
            keys_skipped=skipped,
            milliseconds=0,
            at=commit.at,
            partitions=len(tasks),
            rows_sent=None if result is None else result.rows_sent,
            partial_aggregation=result is None or self._grouping is None or self._grouping.is_partial,
        )

    def emit(self, new_values: DataFrame, batch_id: int) -> None:
        """Calls what lies downstream with the batch's new values."""
        plain = new_values.drop(*(name for name in new_values.columns if name.startswith(INSIDE)))
        for function in self.branch.downstream:
            self.pass_on(function, new_values if _wants_old(function) else plain, batch_id)

    def pass_on(self, function: Downstream | Follower, rows: DataFrame, batch_id: int) -> None:
        """Calls a function after the commit of the present batch."""
        if isinstance(function, Follower):
            function(rows, batch_id, self.committed_as)
        else:
            function(rows, batch_id)


def _wants_old(function: Downstream | Follower) -> bool:
    return isinstance(function, Follower) and function.retracts


def encode_report(report: BatchReport) -> bytes:
    """Encode a report as JSON, as a store keeps it. Without windows or offsets it has no numbers of them."""
    encoded = msgspec.json.encode(report).replace(b',"partial_aggregation":true', b"")
    encoded = encoded.replace(b',"offsets_passed":null', b"")
    return encoded.replace(b',"rows_late":0,"rows_between":0,"watermark":null', b"")
