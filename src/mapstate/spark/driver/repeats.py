"""What only trouble and rare shapes run.

Batches that come again or were set aside, calls without a whole batch, states that follow another one, a run's end.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, Any

import msgspec

from mapstate import errors
from mapstate.aggregators.fields import Fields
from mapstate.backends import opened
from mapstate.batch_report import BatchReport, FinishedBatch
from mapstate.errors import StaleBatchError, UsageError, shown
from mapstate.maps.operator_list import of_kind, read_list
from mapstate.maps.pane_index import windows_of_ledger
from mapstate.protocol import ledger as trouble
from mapstate.protocol.following import check_follower
from mapstate.protocol.ledger import Ledger
from mapstate.protocol.ledger_record import AlreadyCommitted, Attempt, BatchPlan, Commit, LedgerRecord
from mapstate.protocol.ledgers import Ledgers
from mapstate.protocol.stored_ledger import read_ledger
from mapstate.protocol.ways_back import can_all_roll_back
from mapstate.protocol.windows import WindowCommit
from mapstate.spark.driver.access import Access
from mapstate.spark.driver.frames import Frames, every_step, through
from mapstate.spark.driver.job import Branch, Downstream, Follower, StreamPlan, followers_of
from mapstate.spark.driver.new_values import new_values_frame, new_values_type, read_back
from mapstate.spark.driver.state import StateDriver
from mapstate.spec import StateSpec

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


_log = logging.getLogger("mapstate")


def emit_nothing(
    plan: StreamPlan,
    states: Sequence[StateDriver],
    records: Sequence[LedgerRecord],
    df: DataFrame,
    batch_id: int,
    *,
    done: Sequence[AlreadyCommitted] = (),
) -> None:
    """A batch that was set aside is an empty one for the states that follow. Plain functions are not called.

    ``done`` is of one that comes again.
    """
    for state, known in zip(states, done, strict=False):
        state.committed_as = None if known.commit is None else known.commit.txid
    empty = df.sparkSession.createDataFrame([], df.schema)
    for state, record in zip(states, records, strict=True):
        fields = Fields(record.fields, state.job.aggregators)
        for function in state.branch.downstream:
            if isinstance(function, Follower) and function.branch is not None:
                keyed = state.keyed(through(state.branch.steps, empty, batch_id))
                schema = new_values_type(keyed, state.job.keys, fields, old=function.retracts)
                state.pass_on(function, new_values_frame(keyed, schema, []), batch_id)
        state.emit_fired(df, record, None, batch_id)
        for consumer in plan.after_commit:
            is_state = isinstance(consumer.function, Follower) and consumer.function.branch is not None
            if consumer.branch is state.branch and is_state:
                state.pass_on(consumer.function, empty, batch_id)
    for consumer in plan.after_commit:
        if consumer.set_aside is not None:
            consumer.set_aside(empty, batch_id)


@dataclass(frozen=True)
class Repeat:
    """A batch that counts in all states, and comes again. ``df`` has its rows."""

    plan: StreamPlan
    states: Sequence[StateDriver]
    ledgers: Ledgers
    done: Sequence[AlreadyCommitted]
    df: DataFrame
    batch_id: int

    @property
    def commits(self) -> list[Commit | None]:
        """By state; None where it cannot be told from later ones."""
        return [state_done.commit for state_done in self.done]

    def was_seeded(self) -> bool:
        """Whether the batch is the seed of the states."""
        return any(commit is not None and commit.seeded for commit in self.commits)

    def check_by_hand(self) -> None:
        """Raises StaleBatchError unless every state says that a call by hand may bring a batch again."""
        for spec in (state.spec for state in self.states):
            if spec.repeat != "allowed":
                raise StaleBatchError(
                    f"state {spec.state!r} counts batch {self.batch_id} of a call by hand already, and nothing tells "
                    "whether these are the same rows. Nothing was written. Give other rows the next number; "
                    "repeat='allowed' skips a batch that counts.",
                    state=spec.state,
                    found=self.batch_id,
                    expected=self.batch_id + 1,
                )

    def set_batch(self) -> None:
        """The states' present batch is this one."""
        for state, record, state_done in zip(self.states, self.ledgers.records, self.done, strict=True):
            state.set_batch(record, state_done)

    def begin_anew(
        self, take_back: Callable[..., bool], ask: Callable[..., Any], plan: BatchPlan | None
    ) -> list[Attempt]:
        """Takes back or marks what counts, and begins the batch anew. Raises IncompleteBatchError behind a mark.

        Empty where ``on_gap`` accepts the mark.
        """
        take_back(self.batch_id, ask, may_roll_back=self._may_roll_back)
        answers = ask(self.ledgers.begin, self.batch_id, plan)
        return [attempt for attempt in answers if isinstance(attempt, Attempt)]

    def has_more(self, frames: Frames, max_attempts: int) -> bool:
        """Whether more rows come than count: a driver died between two parts of the batch, or the code is another.

        Counts the rows of each branch. Fewer rows do not matter: those that count did come.
        """
        with frames.evaluated(self.df, max_attempts) as rows, frames.of_branches(rows, self.batch_id) as sent:
            counts = [frame.count() if known is None else known for frame, known in sent]
        return any(
            done is not None and not done.is_part and rows_now > done.rows
            for done, rows_now in zip(self.commits, counts, strict=True)
        )

    @property
    def _may_roll_back(self) -> bool:
        """Not where no state counts a row: the batch may be set aside."""
        return any(done is not None and done.rows for done in self.commits)

    def finished(self, quarantined: str | None) -> FinishedBatch:
        """What `on_finished` gets."""
        each = zip(self.states, self.commits, strict=True)
        reports = {state.spec.state: report_of(done) for state, done in each if done is not None}
        return FinishedBatch(batch_id=self.batch_id, states=reports, quarantined=quarantined, repeated=True)

    def emit(self) -> None:
        """Emits what a crash may have kept from it: new values and windows fired. Raises IncompleteBatchError."""
        for state, record, state_done in zip(self.states, self.ledgers.records, self.done, strict=True):
            _emit_again(state, self.df, record, state_done)
            _emit_fired_again(state, self.df, record, state_done)


def _emit_again(state: StateDriver, df: DataFrame, record: LedgerRecord, done: AlreadyCommitted) -> None:
    """Emits the new values of a batch that counts already: a crash may have come before they were emitted.

    ``df`` has the rows of the batch. Raises IncompleteBatchError where a follower needs all of them and some are
    gone.
    """
    state.committed_as = None if done.commit is None else done.commit.txid
    _log.info("state %s: batch %d is committed already, nothing is written", state.spec.state, done.batch_id)
    if not state.branch.downstream:
        return
    if done.commit is None or state.spec.type == "non-transactional":
        _log.warning(
            "state %s: the new values of batch %d cannot be told from later ones any more; downstream gets none",
            *(state.spec.state, done.batch_id),
        )
    fields = Fields(record.fields, state.job.aggregators)
    frame = state.keyed(through(state.branch.steps, df, done.batch_id))
    new_values, missing = read_back(frame, state.spec, fields, record, done.commit, old=state.retracts)
    if done.commit is None or missing:
        _check_complete(state, record, done, missing)
    state.emit(new_values, done.batch_id)


def _emit_fired_again(state: StateDriver, df: DataFrame, record: LedgerRecord, done: AlreadyCommitted) -> None:
    """Passes on the windows that a batch has fired that counts already. Raises IncompleteBatchError."""
    lost, commit = "", done.commit
    if commit is None:
        lost = _FORGOTTEN
    elif followers_of(state.branch.fired):
        with opened(state.spec.backend, state.spec.state) as store:
            entries = of_kind(read_list(store, record), "forget").values()
        ids = [shown(entry.id) for entry in entries if (entry.txid or 0) > commit.txid]
        lost = f"lack the keys that were forgotten since: {', '.join(ids)}" if ids else ""
    if lost and state.branch.fired:
        windows = f"the windows that batch {done.batch_id} fired {lost}"
        if _is_lacked(state.branch.fired, record, done):
            raise _incomplete(state, done, windows)
        _log.warning("state %s: %s", state.spec.state, windows)
    state.emit_fired(df, record, done.commit, done.batch_id)


def report_of(commit: Commit) -> BatchReport:
    """The report of a batch that an earlier run committed: ``attempt`` is 0, and there are no times."""
    return BatchReport(
        batch_id=commit.batch_id,
        txid=commit.txid,
        attempt=0,
        rows=commit.rows,
        keys_read=0,
        keys_cached=0,
        keys_written=commit.keys,
        keys_skipped=0,
        milliseconds=0,
        at=commit.at,
        **({} if commit.windows is None else commit.windows.reported()),
    )


_FORGOTTEN = "cannot be told from later ones any more: another query has committed since, or the state was reset"


def _is_lacked(functions: Iterable[Downstream | Follower], record: LedgerRecord, done: AlreadyCommitted) -> bool:
    """Whether a state that follows has still to get the batch."""
    known = [ledger_of(branch.job.spec) for branch in followers_of(functions)]
    return any(ledger is None or ledger.owners.get(record.owner, 0) <= done.batch_id for ledger in known)


def _check_complete(state: StateDriver, record: LedgerRecord, done: AlreadyCommitted, missing: int) -> None:
    lost = _FORGOTTEN
    if done.commit is not None:
        lost = (
            f"lack {missing} of {done.commit.keys} keys: their records have expired or were evicted, they were "
            "forgotten, or the batch removed them and a vacuum came since, or a later attempt wrote them"
        )
    if state.retracts and _is_lacked(state.branch.downstream, record, done):
        raise _incomplete(state, done, f"the new values of batch {done.batch_id}, which is committed already, {lost}")
    if done.commit is not None:
        _log.warning("state %s: the new values of batch %d %s", state.spec.state, done.batch_id, lost)


def _incomplete(state: StateDriver, done: AlreadyCommitted, lost: str) -> errors.IncompleteBatchError:
    return errors.IncompleteBatchError(
        f"state {state.spec.state!r}: {lost}. A state that follows this one would be wrong without them; it got "
        "nothing. Restore both stores and the checkpoint from one moment, or begin both states anew under other names.",
        state=state.spec.state,
        batch_id=done.batch_id,
    )


def take_back(ledgers: Ledgers | None, plan: StreamPlan, batch_id: int, *, may_roll_back: bool = True) -> bool:
    """Undo or mark what counts of a batch that came in parts; returns whether nothing is left of it.

    Where all states of the query are behind one of the user's own, there are no ``ledgers``, and they are marked.
    """
    if ledgers is not None:
        return trouble.take_back(ledgers, batch_id, may_roll_back=may_roll_back and _can_follow_back(plan, batch_id))
    for spec in [] if plan.branches else [branch.job.spec for branch in branches_of(plan)]:
        with opened(spec.backend, spec.state) as store:
            ledger = Ledger(store, spec.state)
            if ledger.load() is not None:
                ledger.mark_part(batch_id)
    return False


def _can_follow_back(plan: StreamPlan, batch_id: int) -> bool:
    """Whether all that follow the states of a query can go back with them, and count the batch anew.

    Of a user's own state nobody knows.
    """
    if any(entry.set_aside is not None for entry in plan.after_commit):
        return False
    specs = [branch.job.spec for branch in branches_of(plan) if branch not in plan.branches]
    ledgers = (ledger_of(spec) for spec in specs)
    return all(spec.type == "opaque" for spec in specs) and can_all_roll_back([*filter(None, ledgers)], batch_id)


def branches_of(plan: StreamPlan) -> Iterator[Branch]:
    """The states of a query, and all that follow them."""
    others = [function for entry in plan.after_commit for function in (entry.function, *entry.downstream)]
    branches = [*plan.branches, *followers_of(others)]
    while branches:
        branch = branches.pop()
        yield branch
        branches += followers_of([*branch.downstream, *branch.fired])


def names_of_followers(plan: StreamPlan, branch: Branch) -> tuple[str, ...]:
    """The states that follow a state of the plan, or ask it after its commit."""
    later, place = followers_of([*branch.downstream, *branch.fired]), (branch.job.spec.backend, branch.job.spec.state)
    for known in branches_of(root := plan.root or plan):
        asked = [step.asks for step in every_step(known.steps) if getattr(step, "asks", None) is not None]
        if known not in root.branches and place in [(spec.backend, spec.state) for spec in asked]:
            later.append(known)
    return tuple(dict.fromkeys(known.job.spec.state for known in later))


def give_up(ledgers: Ledgers, error: BaseException) -> None:
    """Closes the fences after a batch that failed, as well as the stores let it be done.

    Not where the store itself is the trouble: it would be waited for once more. A fence that moved because a store was
    emptied or put back is no second driver: then that is raised instead.
    """
    if isinstance(error, errors.FencedError):
        with suppress(errors.StoreError):  # that somebody else took over stays the error
            trouble.say_what_fenced(ledgers)
    elif isinstance(error, Exception) and not isinstance(error, errors.StoreError):
        with suppress(errors.MapStateError):
            trouble.give_up(ledgers)


def check_followers(
    branch: Branch, functions: Iterable[Downstream | Follower], query_id: str, batch_id: int, plan: BatchPlan | None
) -> None:
    """`check_follower` of a state and all that follow it, directly or after another one, before anything is written.

    Raises MissingBatchesError and ReplannedBatchError, not for a state whose ``on_gap`` is "accept".
    """
    for function in functions:
        follower = function.branch if isinstance(function, Follower) else None
        if follower is None:
            continue
        if isinstance(function, Follower) and function.retracts:
            _check_fields(follower, ledger_of(follower.job.spec), query_id)
        specs, its_plan = [branch.job.spec, follower.job.spec], plan
        if all(spec.on_gap != "accept" for spec in specs):
            ledgers = [ledger_of(spec) for spec in specs]
            its_plan = check_follower(ledgers, query_id, [spec.on_new_owner for spec in specs], batch_id, plan)
        check_followers(follower, follower.downstream, query_id, batch_id, its_plan)


def _check_fields(follower: Branch, ledger: LedgerRecord | None, query_id: str) -> None:
    """Raises StateSchemaError for a field that is new: it would lack all that the first state holds already."""
    if ledger is None or ledger.last_commit is None:
        return
    known = {field.name for field in ledger.fields}
    added = ", ".join(field.name for field in follower.job.fields if field.name not in known)
    is_reset = ledger.owner != query_id and follower.job.spec.on_new_owner == "reset"
    if added and not is_reset:
        raise errors.StateSchemaError(
            f"state {ledger.state!r} follows the new values of another state and has batches already, so {added} would "
            "lack all that the first state holds. Nothing was written. Begin a second state of another name, over a "
            "first state that begins anew, too.",
            state=ledger.state,
            found=", ".join(sorted(known)),
            expected=added,
        )


def ledger_of(spec: StateSpec) -> LedgerRecord | None:
    """The ledger in the state's store, None where there is none yet."""
    with opened(spec.backend, spec.state) as store:
        return Ledger(store, spec.state).load()


def emit_correction(store: Any, branch: Branch, df: DataFrame, txid: int) -> None:
    """Calls the functions behind a state with what a correction has written, and with its windows that are final.

    Their batch has the number -1 less that of the correction's entry. Raises UsageError where some of what it has
    written is not there any more as it was written, or the job declares other fields: nothing tells what to pass on.
    """
    record = read_ledger(store, branch.job.spec.state)
    entries, last = of_kind(read_list(store, record), "correction"), record.last_commit
    number, entry = next(((-1 - i, entry) for i, entry in entries.items() if entry.txid == txid), (0, None))
    state: Any = (branch.make_driver or StateDriver)(branch)
    asked, kept = state.open_request(record.owner), None if record.windows is None else record.windows.definition
    if entry is None or last is None:
        raise _not_emitted(record, txid, "was taken back meanwhile")
    if (asked.keys, asked.fields, asked.windows) != (record.keys, record.fields, kept):
        raise _not_emitted(
            record, txid, "counts, but the job declares other keys, fields or windows than the state has"
        )
    frame = state.keyed(through(branch.steps, df.sparkSession.createDataFrame([], df.schema), None))
    commit = msgspec.structs.replace(last, txid=txid, keys=entry.keys)
    fields = Fields(record.fields, branch.job.aggregators)
    new_values, missing = read_back(frame, branch.job.spec, fields, record, commit, old=state.retracts)
    if missing:
        why = f"counts, but {missing} of the {entry.keys} keys that it wrote have been written or removed since"
        raise _not_emitted(record, txid, why)
    state.committed_as = txid
    state.emit(new_values, number)
    if branch.fired:
        parts = [state.fired(frame, record, windows) for windows in _final_windows(state, new_values, record)]
        frames = [part.rows for part in parts if part.has_windows]
        for function in branch.fired if frames else ():
            state.pass_on(function, reduce(type(frames[0]).unionByName, frames), number)


def _not_emitted(record: LedgerRecord, txid: int, why: str) -> UsageError:
    return UsageError(
        f"state {record.state!r}: the correction with txid {txid} {why}. So no function behind it was called. Read "
        "what was corrected, and pass it on by hand; emit=False calls none.",
        state=record.state,
    )


def _final_windows(state: Any, new_values: DataFrame, record: LedgerRecord) -> list[WindowCommit]:
    """The final windows of the panes that have new values, each run of them as if a batch had fired it."""
    from pyspark.sql import functions as F

    panes, column = windows_of_ledger(record).definition.panes, state.windows.column
    number = F.col(column) if state.windows.type == "bigint" else F.unix_micros(column)
    changed, final = new_values.select(number).distinct().collect(), panes.floor(record.final_mark())
    ends = {end for (pane,) in changed for end in panes.ends(pane) if end <= final}
    starts = sorted(end for end in ends if end - panes.slide not in ends)
    stops = sorted(end for end in ends if end + panes.slide not in ends)
    return [WindowCommit(before=start - 1, watermark=stop) for start, stop in zip(starts, stops, strict=True)]


def check_whole(access: Access, specs: Sequence[StateSpec], query_id: str) -> None:
    """Before batch 0 of a query that does not count yet: raises UsageError where its source lacks what has expired."""
    try:
        access.check_whole()
    except UsageError:
        ledgers = list(map(ledger_of, specs))
        if not all(ledger is not None and ledger.owners.get(query_id) for ledger in ledgers):
            raise
