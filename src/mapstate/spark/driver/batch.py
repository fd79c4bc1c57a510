"""One batch on the driver, in all states of a query: begin, attempts until one is committed, and what follows.

    Ledgers.begin     a new txid for each state, and the view of what counts: one small write per commit domain
    Frames            the rows of each state, computed once
    StateDriver       one attempt at one state: the tasks run on the executors, and every row is accounted for
    Ledgers.commit    the batch counts in all states: one small write per commit domain
    downstream        reports, new values, and the functions after the commit

What follows an attempt that failed is `RetryPolicy`'s. A state by itself is a query with one branch.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from mapstate.batch_report import FinishedBatch, Span
from mapstate.errors import FencedError, StoreUnavailableError, UsageError
from mapstate.protocol.ledger_record import AlreadyCommitted, Attempt, Commit, LedgerRecord, now
from mapstate.protocol.ledgers import Ledgers
from mapstate.spark.driver import repeats
from mapstate.spark.driver.access import Access, access_of
from mapstate.spark.driver.apply import AttemptResult
from mapstate.spark.driver.calls import Calls, calls_of_run, in_parts, others_had_parts
from mapstate.spark.driver.executors import check_executors
from mapstate.spark.driver.frames import Frames, SentRows
from mapstate.spark.driver.job import Follower, StreamPlan
from mapstate.spark.driver.offsets import PlannedBatches, offsets_passed
from mapstate.spark.driver.quarantine import Quarantine
from mapstate.spark.driver.query_run import OF_ICEBERG, QueryRun, has_ended
from mapstate.spark.driver.retry_policy import Decision, RetryPolicy
from mapstate.spark.driver.state import StateDriver
from mapstate.spec import StateSpec

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

T = TypeVar("T")

_log = logging.getLogger("mapstate")


class BatchDriver:
    """Runs the batches of one streaming query against its states. Driver only, one batch at a time."""

    def __init__(self, plan: StreamPlan, *, feeds_from_source: bool = True) -> None:
        self._plan = plan
        self._feeds_from_source = feeds_from_source  # and not of what another state emits
        self._states = [(branch.make_driver or StateDriver)(branch) for branch in plan.branches]
        self._specs = [state.spec for state in self._states]
        self._max_attempts = max((spec.max_attempts for spec in self._specs), default=1)
        self._frames = Frames(plan)
        self._quarantine = None if plan.quarantine is None else Quarantine(plan.quarantine)
        self._planned = PlannedBatches()
        self._calls: tuple[QueryRun, Calls] | None = None
        self._open: tuple[QueryRun, Ledgers] | None = None

    @property
    def serves_query(self) -> bool:
        """Whether a streaming query has brought the last batch, and not a call by hand."""
        return self._open is not None and self._open[0].run_id is not None

    def run(self, batch_df: DataFrame, batch_id: int, upstream_txid: int | None = None) -> None:
        """One foreachBatch call. ``upstream_txid`` is as in `BatchPlan`.

        Raises LedgerError where the protocol refuses, DataError, StoreError, and Spark's own errors; then the
        batch is not committed, unless it is raised after the commit.
        """
        began = time.monotonic()
        access = access_of(batch_df)  # the batch is `_run`; around it: calls twice for a batch, or batches left out
        run = access.run(self._plan.stream, batch_id)
        calls = self._calls_of(run)
        sets_aside = self._quarantine is not None
        batch = _Batch(batch_df, batch_id, run, access, calls, self._specs, sets_aside=sets_aside, began=began)
        try:
            with calls.lock:
                before, calls.last = calls.last, batch_id
                if before == batch_id and calls.in_parts is None:
                    calls.note_second(batch_df)
                try:
                    self._run(batch, upstream_txid)
                    calls.failed = calls.frame = None
                except BaseException as error:
                    self._give_up(run, error)
                    calls.note_failed(error, batch_df, before, access)
                    raise
        finally:
            if calls.in_parts == batch_id and not access.is_over():
                others_had_parts(run, calls, batch.ask)

    def _calls_of(self, run: QueryRun) -> Calls:
        """The calls of this run for the same states; those by hand, and of a state that follows, are by themselves."""
        if run.run_id is None or not self._feeds_from_source:
            return Calls()
        if self._calls is None or self._calls[0] != run:
            specs = self._specs or [branch.job.spec for branch in repeats.branches_of(self._plan)]
            if not specs:
                return Calls()
            self._calls = run, calls_of_run(run, tuple((repr(spec.backend), spec.state) for spec in specs))
        return self._calls[1]

    def _give_up(self, run: QueryRun, error: BaseException) -> None:
        held = self._open
        if run.run_id is not None:
            self._open = None  # Spark ends a query that raised; the next call is another start
        if held is not None and held[0] == run:  # else it failed before this run opened its ledgers
            repeats.give_up(held[1], error)

    def _run(self, batch: _Batch, upstream_txid: int | None) -> None:
        for state in self._states:
            if not state.branch.steps:
                state.check_columns(batch.df)
        if batch.calls.in_parts is not None:
            raise self._in_parts(batch, batch.calls.in_parts, upstream_txid)
        if not self._states:
            self._call_after_commit_alone(batch)
            return
        is_new = self._open is None or self._open[0] != batch.run or batch.run.run_id is None  # as each call by hand
        if self._quarantine is not None and is_new:
            self._quarantine.list_kept(batch.df, batch.run.query_id, batch.batch_id)
        if self._plan.seed is not None and batch.batch_id == 0 and self._seed(batch):
            return
        ledgers, answers = self._begin(batch, upstream_txid)
        done = [answer for answer in answers if isinstance(answer, AlreadyCommitted)]
        attempts = self._repeat(batch, ledgers, done) if done else [new for new in answers if isinstance(new, Attempt)]
        if not attempts:
            return
        with self._evaluated(batch.df) as rows:
            results = self._until_committed(batch, rows, ledgers, attempts)
            if results is None:
                return
            try:
                for i, (state, result) in enumerate(zip(self._states, results, strict=True)):
                    if result.new_values is not None:
                        state.emit(result.new_values, batch.batch_id)
                    if state.branch.fired:
                        record = ledgers.ledgers[i].record
                        state.emit_fired(batch.df, record, record.last_commit, batch.batch_id)
            finally:
                _release(results)
            self._call_after_commit(rows, batch.batch_id)

    def _begin(self, batch: _Batch, upstream_txid: int | None) -> tuple[Ledgers, Sequence[Attempt | AlreadyCommitted]]:
        """Begins the batch in all states, or finds it committed in all of them. The first batch of a run opens them."""
        batch_id, run = batch.batch_id, batch.run
        plan = self._planned.next(batch.access, batch_id, run, upstream_txid)
        ledgers = None if self._open is None or self._open[0] != run else self._open[1]
        if ledgers is not None:
            answers = batch.ask(ledgers.begin, batch_id, plan)
        else:
            if batch.access.is_over():
                raise has_ended()
            if self._feeds_from_source:
                batch.access.check_running_increments()
                if batch_id == 0 and (plan is None or OF_ICEBERG in plan.end):
                    repeats.check_whole(batch.access, self._specs, run.query_id)
                if not batch.access.is_local():
                    check_executors(batch.df, self._plan.branches)
            stores = [state.open() for state in self._states]
            if self._plan.initial is not None:
                known = [batch.ask(repeats.ledger_of, spec) for spec in self._specs]
                self._plan.initial.check_counted(known, run.query_id, self._specs)
            for branch in self._plan.branches:
                others = [entry.function for entry in self._plan.after_commit if entry.branch is branch]
                functions = [*branch.downstream, *branch.fired, *others]
                if any(isinstance(function, Follower) for function in functions):
                    repeats.check_followers(branch, functions, run.query_id, batch_id, plan)
            requests = [state.open_request(run.query_id) for state in self._states]
            ledgers, answers = Ledgers.open_and_begin(stores, requests, batch_id, [s.on_gap for s in self._specs], plan)
            self._open = (run, ledgers)
            batch.calls.ledgers = ledgers
            batch.calls.plan = self._plan
        if self._quarantine is not None:
            self._quarantine.forget(batch.df, run.query_id, batch_id + isinstance(answers[0], AlreadyCommitted))
        return ledgers, answers

    def _seed(self, batch: _Batch) -> bool:
        """Batch 0 as a seed. False where it counts already, and only comes again."""
        from mapstate.spark.driver.seeding import Seeding

        seeding = Seeding(self._plan, self._states, batch.df, batch.access, batch.run)
        commits = seeding.run(self._planned)
        if commits is not None and seeding.ledgers is not None:
            self._open = batch.run, seeding.ledgers
            batch.calls.ledgers, batch.calls.plan = seeding.ledgers, self._plan
            if self._quarantine is not None:
                self._quarantine.forget(batch.df, batch.run.query_id, 0)
            self._report(batch, commits, [None] * len(commits), None)
        return commits is not None or self._plan.seed.reports is not None  # of a dry run

    def _until_committed(
        self, batch: _Batch, rows: DataFrame, ledgers: Ledgers, attempts: Sequence[Attempt]
    ) -> list[AttemptResult] | None:
        """Attempts until one is committed; its results, or None where the batch was set aside.

        Raises the error of the attempt after which `RetryPolicy` begins no other.
        """
        while True:
            results: list[AttemptResult] = []
            records = ledgers.records
            for state, record in zip(self._states, records, strict=True):
                state.set_batch(record)
            try:
                with batch.timed("attempt"):
                    with self._of_branches(rows, batch.batch_id) as frames:
                        for state, sent, record, attempt in zip(self._states, frames, records, attempts, strict=True):
                            results.append(state.attempt(sent, record, attempt))
                    commits = self._commit(batch, ledgers, records, attempts, results)
            except Exception as error:
                _release(results)
                decision = batch.policy.after(error)
                if decision is Decision.RAISE:
                    raise
                if decision is Decision.SET_ASIDE:
                    self._set_aside(batch, rows, ledgers)
                    return None
                _log.warning("batch %d of %s is begun anew: %s", batch.batch_id, self._plan.stream, error)
                attempts = self._begin_anew(batch, ledgers)
            except BaseException:
                _release(results)
                raise
            else:
                self._report(batch, commits, results, None)
                return results

    @property
    def _is_plain(self) -> bool:
        """Whether the rows of a batch go to one state as they are."""
        plan = self._plan
        return len(plan.branches) == 1 and not plan.branches[0].steps and not plan.after_commit and not self._quarantine

    def _evaluated(self, frame: DataFrame) -> AbstractContextManager[DataFrame]:
        return nullcontext(frame) if self._is_plain else self._frames.evaluated(frame, self._max_attempts)

    def _of_branches(self, rows: DataFrame, batch_id: int) -> AbstractContextManager[list[SentRows]]:
        return nullcontext([(rows, None)]) if self._is_plain else self._frames.of_branches(rows, batch_id)

    def _begin_anew(self, batch: _Batch, ledgers: Ledgers) -> list[Attempt]:
        answers = batch.ask(ledgers.begin, batch.batch_id, self._planned.plan)
        attempts = [attempt for attempt in answers if isinstance(attempt, Attempt)]
        if len(attempts) < len(answers):
            raise FencedError(f"batch {batch.batch_id} was committed by another driver meanwhile")
        return attempts

    def _commit(
        self,
        batch: _Batch,
        ledgers: Ledgers,
        records: Sequence[LedgerRecord],
        attempts: Sequence[Attempt],
        results: Sequence[AttemptResult],
    ) -> list[Commit]:
        """Commits the batch in all states, or raises: the next begin rolls back the states that were committed."""
        at, commits, plan = now(), list[Commit](), self._plan
        has_functions = plan.root or plan.after_commit or any(each.downstream or each.fired for each in plan.branches)
        offsets: dict[tuple[str, str | None] | None, str | None] = {}  # mostly one for all, and files are read for it
        for branch, attempt, record, result in zip(self._plan.branches, attempts, records, results, strict=True):
            last = record.last_commit
            before = None if last is None else (last.owner, last.offsets)
            if before not in offsets:
                offsets[before] = self._planned.offsets(batch.access, record.owner, last)
            commit = Commit(
                batch_id=attempt.batch_id,
                txid=attempt.txid,
                owner=record.owner,
                rows=result.rows,
                keys=result.keys,
                at=at,
                offsets=offsets[before],
                run=batch.run.run_id,
                keys_delta=result.keys_delta,
                followers=repeats.names_of_followers(plan, branch) if has_functions else (),
                windows=result.window_commit,
            )
            commits.append(commit)
        with batch.timed("commit"):
            batch.ask(ledgers.commit, commits, [result.panes for result in results])
        return commits

    def _set_aside(self, batch: _Batch, rows: DataFrame, ledgers: Ledgers) -> None:
        """Keeps the rows of a batch that failed, and commits it as an empty one."""
        assert self._quarantine is not None  # noqa: S101  the policy sets aside only with one
        directory = self._quarantine.place(batch.run.query_id, batch.batch_id)
        _log.exception(
            "batch %d of %s failed in %d attempts; it is to count as empty, with its rows in %s",
            *(batch.batch_id, self._plan.stream, batch.attempt, directory),
        )
        attempts = self._begin_anew(batch, ledgers)  # first: the batch may be another driver's by now
        self._quarantine.keep(rows, directory)
        commits = self._commit(batch, ledgers, ledgers.records, attempts, [AttemptResult([], None)] * len(attempts))
        self._report(batch, commits, [None] * len(attempts), directory)
        repeats.emit_nothing(self._plan, self._states, ledgers.records, batch.df, batch.batch_id)

    def _report(
        self, batch: _Batch, commits: Sequence[Commit], results: Sequence[AttemptResult | None], quarantined: str | None
    ) -> None:
        passed = offsets_passed(self._planned.plan) if self._feeds_from_source else None
        reports = {
            state.name: state.report(commit, batch.attempt, result, passed, batch.began)
            for state, commit, result in zip(self._states, commits, results, strict=True)
        }
        spans = tuple(batch.spans)
        self._finished(FinishedBatch(batch_id=batch.batch_id, states=reports, quarantined=quarantined, spans=spans))

    def _finished(self, finished: FinishedBatch) -> None:
        for function in self._plan.on_finished:
            try:
                function(finished)
            except Exception:  # noqa: BLE001  anybody's code, and the batch counts
                _log.exception("on_finished failed for batch %d; the batch counts", finished.batch_id)

    def _repeat(self, batch: _Batch, ledgers: Ledgers, done: Sequence[AlreadyCommitted]) -> list[Attempt]:
        """Spark brings a batch again that counts already: only what follows the commit may have missed it.

        Returns the attempts that count it anew, where more rows come than count.
        """
        repeat = repeats.Repeat(self._plan, self._states, ledgers, done, batch.df, batch.batch_id)
        by_hand = batch.run.run_id is None
        if by_hand and self._feeds_from_source:
            repeat.check_by_hand()
        kept = None if self._quarantine is None else self._quarantine.kept
        directory = kept and kept(batch.df, batch.run.query_id, batch.batch_id, repeat.commits)
        repeat.set_batch()
        was_seeded = repeat.was_seeded()
        if was_seeded or directory is not None or by_hand or not self._feeds_from_source:
            batch.df.write.format("noop").mode("overwrite").save()  # operators of Spark's own with state commit it, too
        elif repeat.has_more(self._frames, self._max_attempts):
            attempts = repeat.begin_anew(batch.calls.take_back, batch.ask, self._planned.plan)
            if attempts:
                return attempts
        _log.info("batch %d of %s is committed already, nothing is written", batch.batch_id, self._plan.stream)
        self._finished(repeat.finished(directory))
        if was_seeded:  # nothing of a seed goes downstream
            return []
        if directory is not None:  # nothing went downstream, and a function may fail for these rows again
            repeats.emit_nothing(self._plan, self._states, ledgers.records, batch.df, batch.batch_id, done=done)
            return []
        repeat.emit()
        if self._plan.after_commit:
            self._call_after_commit_alone(batch)
        return []

    def _in_parts(self, batch: _Batch, of: int, upstream_txid: int | None) -> UsageError:
        """The error of batch ``of``, which this run has given in parts. Takes back what counts of it, or marks it."""
        if batch.access.is_over():
            raise has_ended()
        if self._states and batch.calls.ledgers is None and batch.batch_id == of:  # each call before has failed
            self._begin(batch, upstream_txid)
        return in_parts(self._plan.stream, of, is_taken_back=batch.calls.take_back(of, batch.ask))

    def _call_after_commit_alone(self, batch: _Batch) -> None:
        batch.calls.plan = self._plan
        with self._frames.evaluated(batch.df, self._max_attempts) as rows:
            self._call_after_commit(rows, batch.batch_id)

    def _call_after_commit(self, rows: DataFrame, batch_id: int) -> None:
        """Calls the functions that get the batch's own rows."""
        drivers = {id(state.branch): state for state in self._states}
        for consumer in self._plan.after_commit:
            if consumer.branch is None:
                consumer.function(rows, batch_id)
            else:
                drivers[id(consumer.branch)].pass_on(consumer.function, rows, batch_id)


@dataclass
class _Batch:
    """One foreachBatch call. ``policy`` is made when something fails."""

    df: DataFrame
    batch_id: int
    run: QueryRun
    access: Access
    calls: Calls
    specs: Sequence[StateSpec]
    sets_aside: bool
    began: float
    spans: list[Span] = field(default_factory=list)
    _policy: RetryPolicy | None = None

    @property
    def policy(self) -> RetryPolicy:
        if self._policy is None:
            self._policy = RetryPolicy(self.specs, self.access.may_go_on, sets_aside=self.sets_aside)
        return self._policy

    @property
    def attempt(self) -> int:
        """The number of the present attempt."""
        return 1 if self._policy is None else self._policy.attempt

    def ask(self, request: Callable[..., T], *arguments: Any) -> T:
        """Return the reply of a store to a request that may be repeated, for as long as the patience lasts."""
        try:
            return request(*arguments)
        except StoreUnavailableError as error:
            self.policy.requests.wait(error)
        return self.policy.requests.ask(partial(request, *arguments))

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Notes a span around what is done within."""
        began, error = time.time_ns(), None
        try:
            yield
        except BaseException as raised:
            error = type(raised).__name__
            raise
        finally:
            self.spans.append(Span(name=name, began=began, ended=time.time_ns(), error=error))


def _release(results: Sequence[AttemptResult]) -> None:
    for result in results:
        if result.new_values is not None:
            with suppress(Exception):
                result.release()
