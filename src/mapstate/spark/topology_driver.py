"""The driver's side of a batch that goes into several states.

Ledgers.begin       all states, in one write for each place
evaluate            the batch, once; each branch that feeds several states, once
apply               state by state, as `mapstate.spark.driver` does for one
account             rows sent, rows in and rows done, for each state
Ledgers.commit      all states, in one write for each place
on_finished         what the batch came to
downstream          the new values of each state, where somebody asked for them

A batch that fails is begun anew in all states, under new txids. One that fails each time stops the query, or its rows
are kept in quarantine and it is committed as an empty one.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

import msgspec

from mapstate.batch_report import BatchReport, FinishedBatch
from mapstate.errors import (
    CorruptRecordError,
    DataError,
    FencedError,
    IncompleteBatchError,
    MapStateError,
    StoreRestartedError,
    StoreUnavailableError,
    UsageError,
)
from mapstate.ledger import now
from mapstate.ledgers import Ledgers
from mapstate.retry import Patience
from mapstate.spark.applied import ONE_DRAW, Applied, computed_once
from mapstate.spark.driver import BatchDriver, BatchPlans, Job, give_up, keys_delta
from mapstate.spark.offsets import offsets_of
from mapstate.spark.quarantine import Quarantine
from mapstate.spark.query import QueryRun, check_running_increments, configured
from mapstate.transitions import AlreadyCommitted, Begun, Commit, LedgerRecord
from mapstate.values import cut

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = ["Branch", "OnFinished", "TopologyDriver"]

OnFinished = Callable[[FinishedBatch], None]
"""Gets what a batch came to in all states, after its commit."""

_log = logging.getLogger("mapstate")


@dataclass(frozen=True)
class Branch:
    """A state, and the functions that its rows of a batch come through."""

    job: Job
    functions: tuple[Callable[[DataFrame], DataFrame], ...] = ()


class _State(BatchDriver):
    """One state of several, whose ledger is held by `Ledgers`."""

    def open(self) -> Any:
        """The store, as a run of a query begins."""
        self._store = self._spec.open()
        self._committed = None
        return self._store

    def begins(self) -> None:
        """A foreachBatch call has come."""
        self._started = time.monotonic()

    def attempt(self, frame: DataFrame, record: Any, begun: Begun, sent: int | None) -> _Done:
        """One attempt at one state. Raises what failed, and IncompleteBatchError where a task ran twice."""
        self._check_columns(frame)
        task = self._task(frame, record, begun)
        applied = self._attempt(frame, task, last=True)
        if applied is None:
            raise IncompleteBatchError(
                f"state {self._spec.state!r}: a task of batch {begun.batch_id} ran twice, in each of the attempts that "
                "max_attempts in the recipes allows. Is speculation on, or do executors keep dying? Nothing was "
                "committed.",
                state=self._spec.state,
                batch_id=begun.batch_id,
            )
        rows, keys = self._account(applied.reports)
        if sent is not None and sent != rows:
            applied.release()
            raise IncompleteBatchError(
                f"state {self._spec.state!r}: {sent} rows of batch {begun.batch_id} were sent to it, and {rows} have "
                "arrived. Nothing was committed.",
                state=self._spec.state,
                found=rows,
                expected=sent,
            )
        return _Done(applied, rows, keys, sent, (begun.txid, task.attempt))

    def committed(self, commit: Commit, attempt: int, done: _Done | None) -> BatchReport:
        """Tells what the batch came to in this state."""
        reports = [] if done is None else done.applied.reports
        self._committed = None if done is None else done.vouched
        report = msgspec.structs.replace(
            self._report(commit, attempt, reports), rows_sent=None if done is None else done.sent
        )
        self._tell(report)
        return report


@dataclass(frozen=True)
class _Done:
    """What an attempt came to in one state; ``vouched`` is what the next batch's caches rest on."""

    applied: Applied
    rows: int
    keys: int
    sent: int | None
    vouched: tuple[int, str]


class TopologyDriver:
    """Runs the batches of one streaming query against several states. Driver only, one batch at a time."""

    def __init__(
        self, stream: str, branches: Sequence[Branch], finished: OnFinished, quarantine: str | None = None
    ) -> None:
        self._stream = stream
        self._branches = list(branches)
        self._states = [_State(branch.job) for branch in branches]
        self._specs = [branch.job.spec for branch in branches]
        self._finished = finished
        self._quarantine = None if quarantine is None else Quarantine(quarantine)
        self._attempts = max(spec.max_attempts for spec in self._specs)
        self._open: tuple[QueryRun, Ledgers] | None = None
        self._batch_plans = BatchPlans()
        self._patience = Patience(0, lambda: True)

    def run(self, batch_df: DataFrame, batch_id: int) -> None:
        """One foreachBatch call. See `Topology.__call__`."""
        run = QueryRun.of(batch_df, default=self._stream)
        for state in self._states:
            state.begins()
        seconds = max(spec.patience for spec in self._specs)
        self._patience = Patience(seconds, partial(QueryRun.may_go_on, batch_df))
        try:
            self._run(batch_df, batch_id, run)
        except BaseException as error:
            opened = self._open
            if run.run_id is not None:
                self._open = None  # Spark ends a query that raised; the next call is another start
            if opened is not None:
                give_up(opened[1], error)
            raise

    def _run(self, batch_df: DataFrame, batch_id: int, run: QueryRun) -> None:
        plan = self._batch_plans.next(batch_df, batch_id, run)
        if self._open is None or self._open[0] != run:
            check_running_increments(batch_df)
            ledgers, begun = Ledgers.open_and_begin(
                [state.open() for state in self._states],
                [state._opening(run.query_id) for state in self._states],
                batch_id,
                [spec.on_gap for spec in self._specs],
                plan,
            )
            self._open = (run, ledgers)
            opened = True
        else:
            ledgers = self._open[1]
            begun = self._patience.ask(lambda: ledgers.begin(batch_id, plan))
            opened = run.run_id is None  # called by hand, where another try of a batch is no other run
        if opened and self._quarantine is not None:
            due = batch_id if isinstance(begun[0], Begun) else batch_id + 1
            self._quarantine.forget(batch_df, run.query_id, due)
        if isinstance(begun[0], AlreadyCommitted):
            self._repeat(batch_df, ledgers, begun, run)  # type: ignore[arg-type]
        else:
            self._finish(batch_df, ledgers, begun, run)

    def _finish(self, batch_df: DataFrame, ledgers: Ledgers, begun: Sequence[Any], run: QueryRun) -> None:
        """Attempts until one can be committed, or the last one has failed."""
        with self._evaluated(batch_df) as kept:
            waits = 0
            for attempt in count(1):
                last = attempt - waits == self._attempts
                try:
                    done = self._attempt(kept, ledgers, begun)
                    commits = self._commit(batch_df, ledgers, begun, run, done)
                except StoreUnavailableError as error:
                    if any(spec.type == "non-transactional" for spec in self._specs):
                        raise  # what is in would count twice
                    self._patience.wait(error)
                    waits += 1
                    begun = self._begin_anew(ledgers, begun)
                except Exception as error:
                    if not self._may_begin_anew(batch_df, error):
                        raise
                    if last and self._quarantine is not None and _is_of_the_batch(error):
                        place = self._quarantine.keep(kept, run.query_id, begun[0].batch_id)
                        _log.exception(
                            "batch %d of %s failed in %d attempts; it counts as empty, and its rows are in %s",
                            *(begun[0].batch_id, self._stream, attempt, place),
                        )
                        commits = self._commit(kept, ledgers, self._begin_anew(ledgers, begun), run, None)
                        self._told(commits, attempt, None, place)
                        return
                    if last:
                        raise
                    _log.warning("batch %d of %s is begun anew: %s", begun[0].batch_id, self._stream, error)
                    begun = self._begin_anew(ledgers, begun)
                else:
                    self._told(commits, attempt, done)
                    self._downstream(done, begun[0].batch_id)
                    return

    def _attempt(self, kept: DataFrame, ledgers: Ledgers, begun: Sequence[Begun]) -> list[_Done]:
        """One attempt at all states. What it came to is the caller's to release. Raises whatever fails."""
        done: list[_Done] = []
        complete = False
        try:
            with self._frames(kept) as frames:
                for state, (frame, sent), record, one in zip(self._states, frames, ledgers.records, begun, strict=True):
                    done.append(state.attempt(frame, record, one, sent))
            complete = True
        finally:
            if not complete:
                _release(done)
        return done

    def _commit(
        self, batch_df: DataFrame, ledgers: Ledgers, begun: Sequence[Begun], run: QueryRun, done: Sequence[_Done] | None
    ) -> list[Commit]:
        """All states, or an error: what was committed of them is rolled back by the next begin."""
        at, offsets = now(), dict[Any, str | None]()
        for record in ledgers.records:  # mostly all build on the same ones, and each reading asks the JVM
            if _offsets_before(record) not in offsets:
                offsets[_offsets_before(record)] = offsets_of(
                    batch_df, self._batch_plans.plan, record.owner, record.committed
                )
        commits = [
            Commit(
                batch_id=one.batch_id,
                txid=one.txid,
                owner=record.owner,
                rows=0 if done is None else done[place].rows,
                keys=0 if done is None else done[place].keys,
                at=at,
                offsets=offsets[_offsets_before(record)],
                run=run.run_id,
                keys_delta=keys_delta(() if done is None else done[place].applied.reports),
            )
            for place, (one, record) in enumerate(zip(begun, ledgers.records, strict=True))
        ]
        try:
            self._patience.ask(lambda: ledgers.commit(commits))
        except BaseException:
            _release(done or ())
            raise
        return commits

    def _begin_anew(self, ledgers: Ledgers, begun: Sequence[Begun]) -> list[Begun]:
        again = self._patience.ask(lambda: ledgers.begin(begun[0].batch_id, self._batch_plans.plan))
        if any(isinstance(one, AlreadyCommitted) for one in again):
            raise FencedError(f"batch {begun[0].batch_id} was committed by another driver meanwhile")
        return again  # type: ignore[return-value]

    def _may_begin_anew(self, batch_df: DataFrame, error: Exception) -> bool:
        """Whether another attempt could end otherwise. A non-transactional state would count twice what is in."""
        if any(spec.type == "non-transactional" for spec in self._specs) or not QueryRun.may_go_on(batch_df):
            return False
        return _is_of_the_batch(error) or isinstance(error, (IncompleteBatchError, StoreRestartedError))

    def _told(
        self, commits: Sequence[Commit], attempt: int, done: Sequence[_Done] | None, quarantined: str | None = None
    ) -> None:
        reports = {
            spec.state: state.committed(commit, attempt, None if done is None else done[place])
            for place, (spec, state, commit) in enumerate(zip(self._specs, self._states, commits, strict=True))
        }
        self._tell(FinishedBatch(batch_id=commits[0].batch_id, states=reports, quarantined=quarantined))

    def _tell(self, finished: FinishedBatch) -> None:
        try:
            self._finished(finished)
        except Exception:  # noqa: BLE001  anybody's code, and the batch counts
            _log.exception("on_finished failed for batch %d; the batch counts", finished.batch_id)

    def _repeat(self, batch_df: DataFrame, ledgers: Ledgers, begun: Sequence[AlreadyCommitted], run: QueryRun) -> None:
        """Spark brings a batch again that counts already: only what comes after the commit may have missed it."""
        batch_id = begun[0].batch_id
        commits = [one.commit for one in begun]
        if run.run_id is not None and any(one is not None and one.run == run.run_id for one in commits):
            raise UsageError(
                f"batch {batch_id} was given to the stream {self._stream!r} twice in one run, and the second part "
                "would be lost. Union the frames first, or make each a stream of its own."
            )
        _log.info("batch %d of %s is committed already, nothing is written", batch_id, self._stream)
        reports = {
            spec.state: BatchReport.of_commit(commit)
            for spec, commit in zip(self._specs, commits, strict=True)
            if commit is not None
        }
        kept = None if self._quarantine is None else self._quarantine.kept(batch_df, run.query_id, batch_id)
        self._tell(FinishedBatch(batch_id=batch_id, states=reports, quarantined=kept, repeated=True))
        if kept is not None:
            return  # nothing went downstream, and a function may fail for these rows again
        for branch, state, ledger, one in zip(self._branches, self._states, ledgers.ledgers, begun, strict=True):
            if not branch.job.downstream:
                continue
            frame = batch_df
            for function in branch.functions:
                frame = frame.transform(function)
            state._repeat_downstream(frame, ledger, one)

    def _downstream(self, done: Sequence[_Done], batch_id: int) -> None:
        try:
            for state, one in zip(self._states, done, strict=True):
                state._new_values_downstream(one.applied, batch_id)
        finally:
            _release(done)

    @contextmanager
    def _evaluated(self, batch_df: DataFrame) -> Iterator[DataFrame]:
        """The batch, computed once for all states and all attempts, wherever it would be computed twice."""
        if len(self._states) == 1 and self._quarantine is None:
            yield batch_df
            return
        with configured(batch_df, ONE_DRAW):
            kept, release = self._computed(batch_df)
        try:
            yield kept
        finally:
            release()

    def _computed(self, batch_df: DataFrame) -> tuple[DataFrame, Callable[[], None]]:
        """An input that cannot be computed leaves no rows to keep: the query stops, whatever on_poison says."""
        for _ in range(self._attempts - 1):
            try:
                return computed_once(batch_df)
            except Exception as error:
                if not _is_of_the_batch(error) or not QueryRun.may_go_on(batch_df):
                    raise
                _log.warning("a batch of %s could not be computed (%s); once more", self._stream, type(error).__name__)
        return computed_once(batch_df)

    @contextmanager
    def _frames(self, kept: DataFrame) -> Iterator[list[tuple[DataFrame, int | None]]]:
        """The rows of each state, and how many were sent where that is known: of what is computed once."""
        made: list[tuple[tuple[Any, ...], DataFrame, int | None]] = []  # a function need not have a hash
        releases: list[Callable[[], None]] = []
        whole = len(self._states) > 1 or self._quarantine is not None

        def frame(functions: tuple[Any, ...]) -> tuple[DataFrame, int | None]:
            for there, one, rows in made:
                if there == functions:
                    return one, rows
            if not functions:
                one, rows = kept, kept.count() if whole else None
            else:
                one, rows = self._transformed(frame(functions[:-1])[0], functions[-1]), None
                if sum(other.functions[: len(functions)] == functions for other in self._branches) > 1:
                    with configured(kept, ONE_DRAW):
                        one, release = computed_once(one)
                    releases.append(release)
                    rows = one.count()
            made.append((functions, one, rows))
            return one, rows

        try:
            yield [frame(branch.functions) for branch in self._branches]
        finally:
            for release in releases:
                release()

    def _transformed(self, rows: DataFrame, function: Callable[[DataFrame], DataFrame]) -> DataFrame:
        """One function of a branch. What it raises of its own is the batch's: the stream itself has passed it."""
        from py4j.protocol import Py4JError
        from pyspark.errors import PySparkException

        try:
            return rows.transform(function)
        except (MapStateError, PySparkException, Py4JError):
            raise
        except Exception as error:
            name = getattr(function, "__name__", type(function).__name__)
            raise DataError(
                f"the function {name} in a transform of the stream {self._stream!r} raised {type(error).__name__}: "
                f"{cut(error)}",
                function=name,
            ) from error


def _offsets_before(record: LedgerRecord) -> tuple[str, str | None] | None:
    """What `offsets_of` builds on."""
    return None if record.committed is None else (record.committed.owner, record.committed.offsets)


def _is_of_the_batch(error: Exception) -> bool:
    """Whether a batch fails for what is in it, or for what computes it; not for its stores, nor for a wrong plan."""
    from py4j.protocol import Py4JError
    from pyspark.errors import AnalysisException, PySparkException

    if isinstance(error, (AnalysisException, CorruptRecordError)):
        return False
    return isinstance(error, (DataError, PySparkException, Py4JError))


def _release(done: Sequence[_Done]) -> None:
    for one in done:
        with suppress(Exception):
            one.applied.release()
