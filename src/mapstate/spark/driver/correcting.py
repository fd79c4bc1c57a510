"""A correction of a state's past: rows are added or taken back, or keys are computed anew from a history. Driver.

It is an operator's attempt, as a vacuum is, whose tasks run as those of a batch. It adds an entry to the state's list
under an id: by that, and by a digest of the rows, it is there once, however often it is called. The rules of the ledger
are in `mapstate.protocol.upkeep`.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from mapstate.aggregators.recounted import PRESENT
from mapstate.aggregators.retraction import SIGN, correctable
from mapstate.backends import opened
from mapstate.backing_map import close_if_possible
from mapstate.errors import ConfigurationError, FencedError, MapStateError, UsageError
from mapstate.keys import StoreKey
from mapstate.maps.operator_list import ListEntry, check_id, of_kind, read_list, write_entries
from mapstate.maps.serialized import writer_of
from mapstate.operations.vacuum import check_able
from mapstate.protocol.joint import has_last_batch
from mapstate.protocol.ledger import Ledger, begin_operators, commit_corrections
from mapstate.protocol.ledger_record import Attempt, LedgerRecord, now
from mapstate.protocol.ledgers import commit_domains
from mapstate.protocol.opening import open_ledger
from mapstate.protocol.rolling import RollingDefinition
from mapstate.protocol.stored_ledger import read_ledger
from mapstate.protocol.upkeep import begin_operator, check_still_at
from mapstate.spark.driver.access import access_of, is_connect
from mapstate.spark.driver.apply import AttemptResult
from mapstate.spark.driver.corrected_rows import (
    check_columns,
    check_digest,
    computed,
    digest_of,
    forgotten_keys,
    given_rows,
    of_branches,
    placed,
    types_of,
    without_keys,
)
from mapstate.spark.driver.event_time import TimedState, window_reports
from mapstate.spark.driver.executors import check_executors
from mapstate.spark.driver.frames import every_step, through
from mapstate.spark.driver.job import Branch, Job, StreamPlan
from mapstate.spark.driver.recounting import Range, Recount, set_up
from mapstate.spark.driver.repeats import emit_correction, ledger_of
from mapstate.spark.driver.retry_policy import Decision, RetryPolicy
from mapstate.spark.driver.seeding import why_not_apart
from mapstate.spark.driver.state import StateDriver
from mapstate.spark.driver.window_rows import LateRows
from mapstate.spark.driver.windows import WindowedState
from mapstate.spec import StateSpec

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_log = logging.getLogger("mapstate")


class Corrected(NamedTuple):
    """The end of a correction. ``rows`` are those that the state got, ``keys`` those that it wrote.

    ``was_done`` says that it had been applied before, under the same id, and nothing was written now. ``beside`` are
    those of the other states of the query.
    """

    state: str
    id: str
    txid: int
    rows: int
    keys: int
    was_done: bool
    beside: tuple[Corrected, ...] = ()

    def __str__(self) -> str:
        before = " before" if self.was_done else ""
        text = f"{self.state}: applied{before} as txid {self.txid}: {self.rows:,} rows, {self.keys:,} keys"
        return "\n".join([text, *map(str, self.beside)])


def correct(
    plan: StreamPlan,
    df: DataFrame,
    asked: Branch | None,
    *,
    id: str,  # noqa: A002  as the method has it
    add: DataFrame | None,
    retract: DataFrame | None,
    emit: bool | None,
    recount: Recount | None,
    take_over: bool,
) -> Corrected:
    """See `Seedable.correct`. ``df`` is the stream. ``asked`` is the state that has the report; None: the first one."""
    given = {name: frame for name, frame in (("add", add), ("retract", retract)) if frame is not None}
    check_id("correction", id)
    if not plan.branches and asked is None:
        raise ConfigurationError(f"the stream {plan.stream!r} keeps no state, so there is nothing to correct.")
    if recount is not None and asked is None and len(plan.branches) > 1:
        names = ", ".join(known.job.spec.state for known in plan.branches)
        raise UsageError(f"a recount is of one state: call correct of one of {names}. Nothing was written.")
    branch = plan.branches[0] if asked is None else asked
    branches = [branch] if recount is not None or branch not in plan.branches else plan.branches
    _check(plan, df, branches, given, recount)
    heard = [known.job.spec.state for known in branches if known.downstream or known.fired]
    if emit is None and heard:
        raise UsageError(
            f"functions get the new values of state {heard[0]!r}. Nothing was written. Say whether they are called "
            "with those of the correction: emit=True, or emit=False. See docs/life.md#correct"
        )
    with ExitStack() as stack:
        parts = [
            _Part(known, stack.enter_context(opened(known.job.spec.backend, known.job.spec.state)), id)
            for known in branches
        ]
        correction = _Correction(parts, id, plan, take_over)
        correction.check_states()
        with correction.noted():
            done = _corrected(correction, df, add, retract) if recount is None else _recounted(correction, df, recount)
        _emit([(part, report) for part, report in zip(parts, done, strict=True) if emit and part.name in heard], df)
    mine = done[branches.index(branch)]
    return mine._replace(beside=tuple(report for report in done if report is not mine))


def _emit(parts: Sequence[tuple[_Part, Corrected]], df: DataFrame) -> None:
    """Calls the functions behind each state. An error of one keeps nothing from the others; the first is raised."""
    failed = list[Exception]()
    for part, report in parts:
        try:
            emit_correction(part.store, part.branch, df, report.txid)
        except Exception as error:  # noqa: BLE001  anybody's code
            failed.append(error)
    for other in failed[1:]:
        failed[0].add_note(f"Nor was all passed on that is behind another state: {other}")
    if failed:
        raise failed[0]


class _Part:
    """One of the states. ``seen`` and ``entry`` are the ledger and the entry of the list as the call found them."""

    def __init__(self, branch: Branch, store: Any, name: str) -> None:
        self.branch, self.store, self.name = branch, store, branch.job.spec.state
        check_able(store, self.name, "correction")
        self.seen = read_ledger(store, self.name)  # raises the better error if there is no ledger
        self.known = read_list(store, self.seen)
        self.entry = _listed(self.known, name)
        self.ledger = Ledger(store, self.name)
        self.frame: Any = None
        self.lines = 0  # of the frame that are no rows
        self.span: Range | None = None  # the windows that are computed anew
        self.position: LedgerRecord | None = None  # at whose last batch a history was cut

    def declare(self, job: Job) -> StateDriver:
        """The driver of the state, as this correction has its columns and aggregators."""
        kind = self.branch.make_driver
        self.state = (kind or StateDriver)(Branch(job, make_driver=kind))
        return self.state

    def verify(self, seen: LedgerRecord, known: Sequence[ListEntry], since: str | None) -> list[StoreKey]:
        """The keys that windows lose. Refuses what the ledger or the list forbid.

        Where other states count the rows ``since`` a time, what has become impossible by now is left out instead.
        """
        rows, gone, self.is_rest = self.frame, list[StoreKey](), since is not None
        if self.position is not None:
            check_still_at(seen, self.position)
        if self.span is not None:
            rows = self.state.keyed(rows)
            gone = self.span.gone(rows, seen, known)
        elif isinstance(self.state, TimedState):
            rows = placed(self.state, rows, seen, is_rest=self.is_rest)
        back = forgotten_keys(rows, seen, known, since)
        if back and since is None:
            rows_of = "rows to add" if self.position is None else "recount"
            raise UsageError(
                f"state {seen.state!r}: {len(back)} keys of the {rows_of} were forgotten, and nothing tells whether "
                "their rows are of a later time. Nothing was written. Leave these keys out."
            )
        if back:
            _log.warning("state %s: rows of %d keys that were forgotten since are left out", self.name, len(back))
            self.frame = without_keys(self.frame, [key.name for key in seen.keys], back)
        return gone

    def apply(
        self, gone: Sequence[StoreKey], attempt: Attempt, entry: ListEntry, known: Sequence[ListEntry]
    ) -> tuple[Corrected, AttemptResult]:
        """Writes the records of the attempt, and the entry as the next of those that are known."""
        record, frame = self.ledger.record, self.frame
        if self.span is not None:
            frame = self.span.with_gone(frame, gone)
        result = self.state.attempt((frame, None), record, attempt)
        last, count = record.last_commit, result.rows - self.lines - len(gone)
        if self.is_rest and (late := sum(report.late for report in window_reports(result.reports))):
            _log.warning("state %s: %d rows of windows that are gone since are left out", self.name, late)
            count -= late
        with writer_of(self.store, attempt.token, has_txids=True) as writer:
            if self.span is not None and self.state.spec.blocks is None:  # else the index names blocks, which stay
                self.span.unindex(gone, writer, record, attempt, result.panes)
            if last is not None:
                entry = msgspec.structs.replace(entry, owner=last.owner, batch_id=last.batch_id, offsets=last.offsets)
            entry = msgspec.structs.replace(entry, txid=attempt.txid, keys=result.keys, rows=count)
            write_entries(writer, record, attempt, {len(known): entry})
        return Corrected(self.name, entry.id, attempt.txid, count, result.keys, was_done=False), result


def _corrected(
    correction: _Correction, df: DataFrame, add: DataFrame | None, retract: DataFrame | None
) -> list[Corrected]:
    lacking = [part for part in correction.parts if part.entry is None]  # of the others the job may be another by now
    for part in lacking:
        job = part.branch.job
        if retract is not None:
            first = part.seen.first_fields()
            job = replace(job, aggregators=correctable(job.aggregators, first), columns={**job.columns, SIGN: "int"})
        part.declare(job)
    for part in lacking:
        correction.check(part, part.ledger.remember())
    branches = [part.branch for part in lacking]
    if lacking and not access_of(df).is_local():
        check_executors(df, branches)
    with ExitStack() as stack:
        rows = stack.enter_context(given_rows(df, add, retract))
        digest = digest_of(rows)
        for part in correction.parts:
            if part.entry is not None:
                _done_before(part.name, part.entry, digest)
        signs = [sign for sign, given in ((1, add), (-1, retract)) if given is not None]
        plan = replace(correction.plan, branches=branches, after_commit=[], quarantine=None)
        for part, frame in zip(lacking, stack.enter_context(of_branches(plan, rows, signs)), strict=True):
            part.frame = frame
            stack.callback(close_if_possible, part.state.open())
        return correction.run(digest, RetryPolicy(correction.specs, access_of(df).may_go_on))


def _recounted(correction: _Correction, df: DataFrame, recount: Recount) -> list[Corrected]:
    """The way of a recount. The rows of its keys are held as those of other corrections are, below the cut."""
    from pyspark.sql import functions as F

    (part,) = correction.parts
    branch, entry, seen = part.branch, part.entry, part.seen
    state = set_up(part.declare(replace(branch.job, columns={**branch.job.columns, PRESENT: "boolean"})))
    part.position = seen
    if entry is None:
        correction.check(part, part.ledger.remember())
        recount.check_counted(part.name, part.known)
    if isinstance(state, WindowedState):
        part.span = Range(recount, state, seen, may_be_gone=entry is not None)
    last = entry or seen.last_commit
    cut = recount.cut(None if last is None else last.offsets)
    if entry is None:
        cut.check()
        if not access_of(df).is_local():
            check_executors(df, [branch])
    rows = through(branch.steps, cut.below(df.schema.names), None)
    StateDriver(branch).check_columns(rows)
    with ExitStack() as stack:
        if part.span is not None:
            frame, place = part.span.rows(rows), f"{cut.place} {part.span.name}"
        else:
            keys = stack.enter_context(computed(recount.wanted(branch.job)))
            frame, place = recount.of_keys(rows, keys, branch.job), cut.place
        check_digest(part.name, frame)
        part.frame = stack.enter_context(computed(frame))
        digest = hashlib.blake2b(f"{digest_of(part.frame)} {place}".encode(), digest_size=16).hexdigest()
        if entry is not None:
            return [_done_before(part.name, entry, digest)]
        cut.check()  # that it was the same while it was read
        part.lines = part.frame.where(F.col(PRESENT).isNull()).count()
        stack.callback(close_if_possible, state.open())
        return correction.run(digest, RetryPolicy([branch.job.spec], access_of(df).may_go_on))


@dataclass
class _Correction:
    """The way of one call. ``done`` are the states that count it, by their names."""

    parts: Sequence[_Part]
    id: str
    plan: StreamPlan
    take_over: bool
    done: dict[str, Corrected] = field(default_factory=dict)

    @property
    def specs(self) -> list[StateSpec]:
        """Those of all states of the query."""
        return [branch.job.spec for branch in self.plan.branches]

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Adds to an error which states count it."""
        try:
            yield
        except Exception as error:
            counting = [part.name for part in self.parts if part.entry is not None or part.name in self.done]
            lacking = [part.name for part in self.parts if part.name not in counting]
            if counting and lacking:
                error.add_note(
                    f"The correction {self.id!r} counts in {', '.join(counting)}, and not in {', '.join(lacking)}. "
                    "Call it again with this id and the same rows: where it counts, nothing is written."
                )
            raise

    def check_states(self) -> None:
        """Raises UsageError where a state lacks it that is none of those for which it was made."""
        for part, other in product(self.parts, self.parts):
            if part.entry is not None and other.entry is None and other.name not in part.entry.states:
                raise UsageError(
                    f"state {part.name!r} counts the correction {self.id!r}, which was not for {other.name!r}. Nothing "
                    "was written. Under another id its rows would count twice there. To call it again, take a job with "
                    f"the states {', '.join(part.entry.states) or part.name} alone."
                )

    def check(self, part: _Part, seen: LedgerRecord) -> None:
        """Refuse before any row is computed."""
        begin_operator(seen, "", "correction", take_over=self.take_over)
        if seen.last_commit is None:
            raise UsageError(
                f"state {part.name!r} counts no batch yet, so there is nothing to correct. Nothing was written. Start "
                "the query first."
            )
        if seen.may_lose_last_batch():
            beside = {spec.state: ledger_of(spec) for spec in self.specs}
            for name in seen.last_commit.apart_from:
                other = beside.get(name)
                if other is None or not has_last_batch(seen, other):
                    raise UsageError(
                        f"state {part.name!r} was committed apart from {name!r}, which lacks its last batch, or which "
                        "the job does not declare: that batch may have to be rolled back. Nothing was written. Start "
                        "the query with all of its states, and correct after its next batch."
                    )
        as_job = open_ledger(seen, part.state.open_request(seen.owner))
        if msgspec.structs.replace(as_job, epoch=seen.epoch, session=seen.session) != seen:
            raise UsageError(
                f"state {part.name!r}: the job declares other fields or options than its last batch had. Nothing was "
                "written. Start the query with it once, and correct then."
            )

    def run(self, digest: str, policy: RetryPolicy) -> list[Corrected]:
        """Begins anew what another attempt may put right."""
        while True:
            try:
                self._apply(digest)
                return [self.done[part.name] for part in self.parts]
            except Exception as error:
                if policy.after(error) is not Decision.BEGIN_ANEW:
                    raise
                _log.warning("a correction of %s is begun anew: %s", self.parts[0].name, error)

    def _apply(self, digest: str) -> None:
        """One attempt in all states that lack it."""
        lacking, since = [], list[str]()
        for part in self.parts:
            seen = part.ledger.remember()
            known = read_list(part.store, seen)
            before = _listed(known, self.id)
            if before is None:
                if part.entry is not None:
                    part.entry = None
                    raise FencedError(
                        f"state {part.name!r}: the correction {self.id!r} was taken back meanwhile. Call it again.",
                        state=part.name,
                    )
                lacking.append((part, seen, known))
                continue
            since.append(before.at)
            if part.name not in self.done:
                self.done[part.name] = _done_before(part.name, before, digest)
        for part, seen, _ in lacking:
            self.check(part, seen)
        lost = [part.verify(seen, known, min(since, default=None)) for part, seen, known in lacking]
        domains = commit_domains([part.store for part, _, _ in lacking])
        attempts: dict[int, Attempt] = {}
        try:
            for domain in domains:
                ledgers, records = [lacking[i][0].ledger for i in domain], [lacking[i][1] for i in domain]
                made = begin_operators(ledgers, "correction", records, take_over=self.take_over)
                attempts.update(zip(domain, made, strict=True))
            self.take_over = False  # what begins from here on is another driver's
            states = tuple(part.name for part in self.parts) if self.parts[1:] else ()
            entry = ListEntry(kind="correction", id=self.id, at=now(), digest=digest, states=states)
            ends = [
                part.apply(gone, attempts[i], entry, known)
                for i, ((part, _, known), gone) in enumerate(zip(lacking, lost, strict=True))
            ]
            for part, _, _ in lacking:
                part.ledger.close_fences()  # of all of them, before the first one counts
            for domain in domains:
                changes = [(ends[i][0].txid, ends[i][1].keys_delta, ends[i][1].panes) for i in domain]
                commit_corrections([lacking[i][0].ledger for i in domain], changes)
                self.done.update((ends[i][0].state, ends[i][0]) for i in domain)
        except BaseException:
            for i, attempt in attempts.items():
                with suppress(MapStateError):
                    lacking[i][0].ledger.give_up_operator(attempt.txid)
            raise
        for report, _ in ends:
            _log.info("state %s: correction %r, txid %d, %d rows", report.state, self.id, report.txid, report.rows)


def _listed(known: Sequence[ListEntry], name: str) -> ListEntry | None:
    return next((entry for entry in of_kind(known, "correction").values() if entry.id == name), None)


def _done_before(state: str, entry: ListEntry, digest: str) -> Corrected:
    if entry.digest != digest or entry.txid is None:
        raise UsageError(
            f"state {state!r} counts other rows under the id {entry.id!r}, applied as txid {entry.txid} at {entry.at}. "
            "Nothing was written. Take another id."
        )
    return Corrected(state, entry.id, entry.txid, entry.rows, entry.keys, was_done=True)


def _check(
    plan: StreamPlan,
    df: DataFrame,
    branches: Sequence[Branch],
    rows: Mapping[str, DataFrame],
    recount: Recount | None,
) -> None:
    """Raises UsageError for a wrong call, and ConfigurationError for a state that cannot be corrected."""
    if bool(rows) == (recount is not None):
        raise UsageError(
            "correct takes rows to add, rows to retract, or both; or a recount alone. Nothing was written."
        )
    given = dict(rows) if recount is None else recount.frames()
    if is_connect(df) or any(map(is_connect, given.values())):
        raise UsageError(
            "a correction runs in the process that calls it, and under Spark Connect batches run in one of the server. "
            "Nothing was written. Correct with classic PySpark."
        )
    if any(frame.isStreaming for frame in given.values()):
        raise UsageError("correct takes rows that are there, and no stream: read them with spark.read.")
    for branch in branches:
        for why in _why_not(plan, branch, given, recount):
            raise ConfigurationError(
                f"state {branch.job.spec.state!r} cannot be corrected: {why}. Nothing was written. Build it anew "
                "beside this one, and swap. See docs/life.md#correct"
            )
    if recount is not None:
        (branch,) = branches
        recount.check(branch.job)
        kinds = {key.name: key.type for key in branch.job.keys}
        if recount.keys is not None:
            need = f"the keys of a recount of {branch.job.spec.state!r} need its key columns"
            check_columns(need, kinds, recount.keys)
        return
    check_digest(plan.stream, df)
    for frame in given.values():
        need = (
            f"the rows of a correction of {plan.stream!r} need the columns of the stream, as it was given to newStream"
        )
        check_columns(need, types_of(df), frame)


def _why_not(
    plan: StreamPlan, branch: Branch, given: Mapping[str, DataFrame], recount: Recount | None
) -> Iterator[str]:
    """Why a state cannot be corrected, or not by this."""
    if branch not in plan.branches:
        yield "it follows another state"
    definition = None if branch.job.windows is None else branch.job.windows.definition
    if not isinstance(definition, RollingDefinition | None) and definition.sessions:
        yield "its windows are sessions"
    elif definition is not None and "retract" in given:
        yield "rows of windows are added, or of those that fire a span of time is computed anew"
    elif isinstance(definition, RollingDefinition) and recount is not None:
        yield "it has rolling windows, to which rows are added"
    if branch.job.spec.type == "transactional":
        yield "it is transactional, and only opaque records keep the value before"
    if recount is not None:
        yield from recount.why_not(branch.job)
    yield from (why for state, why in why_not_apart(plan) if state == branch.job.spec.state)
    names = [known.job.spec.state for known in plan.branches]
    for known in plan.branches:
        is_other = recount is not None and known is not branch  # whose rows stay as they are
        for step in every_step(known.steps):
            asks = getattr(step, "asks", None)
            if isinstance(step, LateRows) and not (is_other and step.branch is not branch):
                yield f"the state {known.job.spec.state!r} counts late rows, and nothing tells which of these were late"
            if asks is not None and asks.state in names and not is_other:
                yield (
                    f"the rows of the state {known.job.spec.state!r} ask the state {asks.state!r} of the same batch, "
                    "and nothing tells what it would have said"
                )
