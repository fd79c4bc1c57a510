"""Batch 0 of a query as a seed: its rows are staged on disk, grouped, and loaded bucket after bucket. Driver.

    open     the states are taken; from here on nobody can read them
    stage    `<checkpoint>/mapstate/seed-...`, one for each state: see `mapstate.spark.driver.seed_stage`
    load     for each bucket an attempt, as of any batch: its own txid, fence, claims, accounting, and one commit
    end      batch 0 counts

The history is read once, for all stages. `mapstate.protocol.seeding` has the rules of the ledger.
"""

from __future__ import annotations

import logging
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from mapstate.aggregators.counted import CountWindows
from mapstate.errors import ConfigurationError, UsageError
from mapstate.protocol.following import check_first
from mapstate.protocol.ledger_record import BatchPlan, Commit, LedgerRecord, now
from mapstate.protocol.opening import open_ledger
from mapstate.protocol.seed_ledgers import SeedLedgers
from mapstate.protocol.seeding import check_together, is_complete, with_windows
from mapstate.protocol.windows import WindowCommit
from mapstate.spark.driver import repeats
from mapstate.spark.driver.access import Access, is_connect
from mapstate.spark.driver.executors import check_executors
from mapstate.spark.driver.frames import Frames
from mapstate.spark.driver.initial_rows import Cut
from mapstate.spark.driver.job import Follower, StreamPlan
from mapstate.spark.driver.offsets import PlannedBatches
from mapstate.spark.driver.query_run import QueryRun, has_ended
from mapstate.spark.driver.retry_policy import Decision, RetryPolicy
from mapstate.spark.driver.seed_stage import SeedSettings, Stage, StateSeed, delete
from mapstate.spark.driver.state import StateDriver
from mapstate.spark.executor.error_text import mapstate_error

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

T = TypeVar("T")

_log = logging.getLogger("mapstate")


class SeedReport(NamedTuple):
    """What a state was seeded with; of a dry run, with what it would be. ``bytes`` are those of the stage.

    ``rows_forgotten`` were left out, because their keys were forgotten. Of a state whose rows have times,
    ``rows_expired`` were left out, because they are in no window any more, and ``rows_late`` of ``rows`` are in none.
    ``beside`` are those of the other states of the query.
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
    beside: tuple[SeedReport, ...] = ()

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
        if self.is_dry_run:
            text += ". Nothing was written."
        return "\n".join([text, *map(str, self.beside)])


def check_seed(plan: StreamPlan, df: DataFrame) -> None:
    """Raises ConfigurationError for what cannot be seeded, and UsageError under Spark Connect."""
    if is_connect(df):
        raise UsageError(
            "a seed reads and writes files beside the checkpoint in the process that calls it, and under Spark Connect "
            "batches run in a process of the server. Nothing was started. Seed with classic PySpark, and start with "
            "Spark Connect then."
        )
    for state, why in why_not_apart(plan):
        raise ConfigurationError(
            f"state {state!r} cannot be seeded: {why}. Nothing was written. Start its query over a source that has the "
            "history, whose batches are counted as any."
        )
    if not plan.branches:
        raise ConfigurationError(f"the stream {plan.stream!r} keeps no state of its own, so there is nothing to seed.")


def why_not_apart(plan: StreamPlan) -> Iterator[tuple[str, str]]:
    """Why states of a query cannot get rows beside its batches, each with the state's name."""
    for branch in plan.branches:
        job, functions = branch.job, [*branch.downstream, *branch.fired]
        definition = None if job.windows is None else job.windows.definition
        counts_windows = any(isinstance(aggregator, CountWindows) for aggregator in job.aggregators.values())
        for why, is_so in (
            ("it is non-transactional", job.spec.type == "non-transactional"),
            ("it has windows by number of rows", counts_windows),
            ("its windows go by the clock", definition is not None and definition.by_clock),
            (
                "another state follows it",
                any(isinstance(function, Follower) and function.branch for function in functions),
            ),
            ("functions or states of your own get the same batches", bool(plan.after_commit)),
        ):
            if is_so:
                yield job.spec.state, why


class Seeding:
    """Seeds the states of a query with its batch 0, or goes on where another driver has ended.

    The rows are computed once for all states, as those of a batch are: so all stages are of one reading, or all are
    made anew. Each state is loaded by itself, and the end shows all of a commit domain in one write.
    """

    def __init__(
        self, plan: StreamPlan, states: Sequence[StateDriver], df: DataFrame, access: Access, run: QueryRun
    ) -> None:
        self._plan, self._df, self._access, self._run = plan, df, access, run
        self._root, self._specs = "", [state.spec for state in states]
        self._requests = RetryPolicy(self._specs, access.may_go_on).requests
        self._seeds = [StateSeed(state, df, access, plan.seed) for state in states]
        self._names: list[str] = []  # of the stages that this driver has begun
        self._began = time.monotonic()
        self._cut: Cut | None = None
        self.ledgers: SeedLedgers | None = None

    def run(self, planned: PlannedBatches) -> list[Commit] | None:
        """The commits of batch 0; None where it counts already, and of a dry run.

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
        self._cut = None if self._plan.initial is None else Cut(self._plan.initial, plan.start)
        settings: SeedSettings = self._plan.seed
        owner, seeds = self._run.query_id, self._seeds
        offsets = planned.offsets(self._access, owner, None)
        if settings.reports is not None:
            self._set_up(offsets, [None] * len(seeds))
            records, reports = [open_ledger(None, seed.state.open_request(owner)) for seed in seeds], settings.reports
            self._check_cut(plan)

            def tried(seed: StateSeed, at: int, frame: DataFrame) -> None:
                stage, keys, size = seed.tried(f"seed-{at}", records[at], frame)
                report = SeedReport(seed.state.name, stage.rows, keys, stage.buckets, size, is_dry_run=True)
                reports.append(report.with_left_out(stage.forgotten, stage.windows))

            self._read(tried, records)
            return None
        stores, requests = [seed.state.open() for seed in seeds], [seed.state.open_request(owner) for seed in seeds]
        ledgers = SeedLedgers(stores, requests, [spec.on_gap for spec in self._specs])
        before = [self._requests.ask(held.load) for held in ledgers.ledgers]
        self._set_up(offsets, before)
        if all(is_complete(record, owner) for record in before):
            check_together([record for record in before if record is not None])
            self._remove()
            return None
        digests = [seed.digest(f"{plan.digest().fingerprint}{self._cut.text if self._cut else ''}") for seed in seeds]
        if digests != [record and record.seed and record.seed.stage and record.seed.plan for record in before]:
            self._check_cut(plan)  # else the history is not read any more
        self.ledgers = ledgers
        try:
            listed = [len(seed.entries) for seed in seeds]
            self._requests.ask(lambda: ledgers.open_seeds(digests, listed=listed, initial=self._cut is not None))
            if not self._found(ledgers.records):
                self._patiently(partial(self._made, ledgers, digests, plan))
            for i, (seed, held) in enumerate(zip(seeds, ledgers.ledgers, strict=True)):
                while (known := held.record.seed) is not None and not known.is_loaded:
                    self._patiently(partial(seed.bucket, ledgers, i, self._requests))
                    self._say(held.record)
            done = Commit(batch_id=0, txid=0, owner=owner, at=now(), run=self._run.run_id, offsets=offsets)
            self._requests.ask(lambda: ledgers.end(plan, [done] * len(seeds)))
        except BaseException as error:
            repeats.give_up(ledgers, error)
            raise
        self._say(None)
        self._remove()
        return [commit for record in ledgers.records if (commit := record.last_commit) is not None]

    def _set_up(self, offsets: str | None, records: Sequence[LedgerRecord | None]) -> None:
        is_beside_ended = any(is_complete(record, self._run.query_id) for record in records)
        for seed, record in zip(self._seeds, records, strict=True):
            seed.set_up(self._root, offsets, record if is_beside_ended else None)

    def _patiently(self, work: Callable[[], T]) -> T:
        """What ``work`` returns; after what another attempt may put right it is begun anew, as a batch is."""
        policy = RetryPolicy(self._specs, self._access.may_go_on)
        while True:
            try:
                return work()
            except Exception as raised:  # noqa: BLE001  raised again, or begun anew
                error = mapstate_error(raised)
                if policy.after(error) is not Decision.BEGIN_ANEW:
                    raise error from raised.__cause__
                _log.warning("a part of the seed of %s is begun anew: %s", self._plan.stream, error)

    def _found(self, records: Sequence[LedgerRecord]) -> bool:
        """Whether the stages of all that is not loaded are there, and of one reading."""
        every = [(seed, record, record.seed) for seed, record in zip(self._seeds, records, strict=True)]
        known = [(seed, record, own) for seed, record, own in every if own is not None]
        if any(own.reading is None for *_, own in known) or len({own.reading for *_, own in known}) > 1:
            return False
        return all([own.is_loaded or seed.has_stage(record) for seed, record, own in known])  # noqa: C419  say each

    def _made(self, ledgers: SeedLedgers, digests: Sequence[str], plan: BatchPlan) -> None:
        """Stages of all states, by one reading."""
        for name in self._names:  # of an attempt of this driver's own
            delete(self._df, f"{self._root}/{name}")
        reading = secrets.token_hex(8)
        self._names = [f"seed-{digest}-{reading}" for digest in digests]
        stages: list[Stage] = []
        self._check_cut(plan)

        def write(seed: StateSeed, at: int, frame: DataFrame) -> None:
            stages.append(seed.staged(self._names[at], ledgers.records[at], frame))

        self._read(write, ledgers.records)
        self._check_cut(plan, again=True)
        for i, stage in enumerate(stages):
            self._requests.ask(partial(ledgers.staged, i, stage.name, windows=stage.windows, **stage.sizes))
            self._say(ledgers.records[i])

    def _read(self, use: Callable[[StateSeed, int, DataFrame], None], records: Sequence[LedgerRecord]) -> None:
        """Computes the rows of batch 0, once for all states, and has each state's used: nothing of it is read again."""
        frames = Frames(replace(self._plan, quarantine=None))
        most = max(spec.max_attempts for spec in self._specs)
        for seed, record in zip(self._seeds, records, strict=True):
            seed.state.set_batch(with_windows(record, None))  # steps of others may ask what is late
        df = self._df if self._cut is None else self._cut.joined(self._df)
        with frames.evaluated(df, most) as rows, frames.of_branches(rows, 0) as sent:
            for i, (seed, (frame, _)) in enumerate(zip(self._seeds, sent, strict=True)):
                use(seed, i, frame)

    def _check_cut(self, plan: BatchPlan, *, again: bool = False) -> None:
        """Check that all of the history comes: before anything is written, and again when it is staged."""
        check_first(plan)
        if self._cut is None:
            self._access.check_whole()
        if self._cut is not None and (again or not self._cut.is_checked):
            self._cut.check()

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

    def _remove(self) -> None:
        """Deletes what is staged. What stays of it does no harm: no ledger names it any more."""
        try:
            delete(self._df, self._root)
        except Exception as error:  # noqa: BLE001  the seed counts, whatever a file system says
            _log.warning("the stage in %s is not deleted, and not needed any more: %s", self._root, error)
