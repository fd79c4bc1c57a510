"""A correction of a state's past: rows are added or taken back, or keys are computed anew from a history. Driver.

It is an operator's attempt, as a vacuum is, whose tasks run as those of a batch. It adds an entry to the state's list
under an id: by that, and by a digest of the rows, it is there once, however often it is called. The rules of the ledger
are in `mapstate.protocol.upkeep`.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import reduce
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from mapstate.aggregators.columns import column_of
from mapstate.aggregators.fields import Fields
from mapstate.aggregators.recounted import PRESENT
from mapstate.aggregators.retraction import SIGN, correctable
from mapstate.backends import opened
from mapstate.backing_map import close_if_possible
from mapstate.capabilities import FencedWrites
from mapstate.errors import ConfigurationError, MapStateError, UsageError
from mapstate.keys import KeyCodec
from mapstate.maps.operator_list import ListedKeys, ListEntry, check_id, of_kind, read_list, write_entries
from mapstate.maps.pane_index import windows_of_ledger
from mapstate.maps.serialized import writer_of
from mapstate.operations.vacuum import check_able
from mapstate.protocol.ledger import Ledger
from mapstate.protocol.ledger_record import LedgerRecord, now
from mapstate.protocol.opening import open_ledger
from mapstate.protocol.rolling import RollingDefinition
from mapstate.protocol.seeding import first_pane
from mapstate.protocol.stored_ledger import read_ledger
from mapstate.protocol.upkeep import begin_operator, check_still_at
from mapstate.protocol.windows import LATEST, WindowCommit
from mapstate.schema import time_text
from mapstate.spark.driver.access import access_of, configured, is_connect
from mapstate.spark.driver.executors import check_executors
from mapstate.spark.driver.frames import ONE_DRAW, computed_once, through
from mapstate.spark.driver.job import Branch, StreamPlan
from mapstate.spark.driver.new_values import read_back
from mapstate.spark.driver.recounting import Range, Recount, set_up
from mapstate.spark.driver.retry_policy import Decision, RetryPolicy
from mapstate.spark.driver.row_digest import check_digest, digest_of
from mapstate.spark.driver.seeding import why_not_apart
from mapstate.spark.driver.spark35 import calls
from mapstate.spark.driver.state import StateDriver
from mapstate.spark.driver.window_rows import ANY_TIME, beside_of
from mapstate.spark.driver.windows import WindowedState
from mapstate.spark.executor.task import columns_to_python

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_MOST_NAMED = 5  # panes
_log = logging.getLogger("mapstate")


class Corrected(NamedTuple):
    """The end of a correction. ``rows`` are those that the state got, ``keys`` those that it wrote.

    ``was_done`` says that it had been applied before, under the same id, and nothing was written now.
    """

    state: str
    id: str
    txid: int
    rows: int
    keys: int
    was_done: bool

    def __str__(self) -> str:
        before = " before" if self.was_done else ""
        return f"{self.state}: applied{before} as txid {self.txid}: {self.rows:,} rows, {self.keys:,} keys"


def correct(
    plan: StreamPlan,
    df: DataFrame,
    branch: Branch,
    *,
    id: str,  # noqa: A002  as the method has it
    add: DataFrame | None,
    retract: DataFrame | None,
    emit: bool | None,
    recount: Recount | None,
    take_over: bool,
) -> Corrected:
    """See `PersistentAggregate.correct`. ``df`` is the stream, and ``branch`` the state."""
    given = {name: frame for name, frame in (("add", add), ("retract", retract)) if frame is not None}
    check_id("correction", id)
    _check(plan, df, branch, given, recount)
    has_functions = bool(branch.downstream or branch.fired)
    if emit is None and has_functions:
        raise UsageError(
            f"functions get the new values of state {branch.job.spec.state!r}. Nothing was written. Say whether they "
            "are called with those of the correction: emit=True, or emit=False. See docs/life.md#correct"
        )
    with opened(branch.job.spec.backend, branch.job.spec.state) as store:
        if recount is not None:
            done = _recounted(store, df, branch, recount, id, take_over=take_over)
        else:
            done = _corrected(store, df, branch, id=id, add=add, retract=retract, take_over=take_over)
        if emit and has_functions:
            _emit(store, branch, df, done)
    return done


def _corrected(
    store: Any,
    df: DataFrame,
    branch: Branch,
    *,
    id: str,  # noqa: A002
    add: DataFrame | None,
    retract: DataFrame | None,
    take_over: bool,
) -> Corrected:
    job, make_driver = branch.job, branch.make_driver or StateDriver
    check_able(store, job.spec.state, "correction")
    seen = read_ledger(store, job.spec.state)  # raises the better error if there is no ledger
    entry = _listed(read_list(store, seen), id)
    if entry is not None:  # the job may be another one by now
        with _given(df, add, retract) as rows:
            return _done_before(job.spec.state, entry, digest_of(rows))
    if retract is not None:
        signed = correctable(job.aggregators, seen.first_fields(fenced=isinstance(store, FencedWrites)))
        job = replace(job, aggregators=signed, columns={**job.columns, SIGN: "int"})
    state = make_driver(Branch(job, make_driver=branch.make_driver))
    correction = _Correction(store, state, id, take_over)
    correction.check(correction.ledger.remember())
    if not access_of(df).is_local():
        check_executors(df, [branch])
    with _given(df, add, retract) as rows:
        digest = digest_of(rows)
        taken = _taken(rows, branch, [sign for sign, part in ((1, add), (-1, retract)) if part is not None])
        # The checks and the attempt are of the same rows, also where a step does not give the same twice.
        computed = _computed(taken) if branch.steps else nullcontext(taken)
        with computed as frame, closing(_Opened(state)):
            return correction.run(frame, digest, RetryPolicy([job.spec], access_of(df).may_go_on))


def _recounted(store: Any, df: DataFrame, branch: Branch, recount: Recount, name: str, *, take_over: bool) -> Corrected:
    """The way of a recount. The rows of its keys are held as those of other corrections are, below the cut."""
    from pyspark.sql import functions as F

    job, kind = replace(branch.job, columns={**branch.job.columns, PRESENT: "boolean"}), branch.make_driver
    state = set_up((kind or StateDriver)(Branch(job, make_driver=kind)))
    check_able(store, job.spec.state, "correction")
    seen = read_ledger(store, job.spec.state)
    known = read_list(store, seen)
    entry = _listed(known, name)
    correction = _Correction(store, state, name, take_over, seen)
    if entry is None:
        correction.check(correction.ledger.remember())
        recount.check_counted(job.spec.state, known)
    if isinstance(state, WindowedState):
        correction.span = Range(recount, state, seen, may_be_gone=entry is not None)
    last = entry or seen.last_commit
    cut = recount.cut(None if last is None else last.offsets)
    if entry is None:
        cut.check()
        if not access_of(df).is_local():
            check_executors(df, [branch])
    rows = through(branch.steps, cut.below(df.schema.names), None)
    StateDriver(branch).check_columns(rows)
    with ExitStack() as stack:
        if correction.span is not None:
            frame, place = correction.span.rows(rows), f"{cut.place} {correction.span.name}"
        else:
            keys = stack.enter_context(_computed(recount.wanted(job)))
            frame, place = recount.of_keys(rows, keys, branch.job), cut.place
        check_digest(job.spec.state, frame)
        held = stack.enter_context(_computed(frame))
        digest = hashlib.blake2b(f"{digest_of(held)} {place}".encode(), digest_size=16).hexdigest()
        if entry is not None:
            return _done_before(job.spec.state, entry, digest)
        cut.check()  # that it was the same while it was read
        lines = held.where(F.col(PRESENT).isNull()).count()
        stack.enter_context(closing(_Opened(state)))
        return correction.run(held, digest, RetryPolicy([job.spec], access_of(df).may_go_on), lines)


@dataclass
class _Correction:
    """The way of one call. ``position`` is the ledger at whose last batch a history was cut; None without one.

    ``span`` are the windows that are computed anew.
    """

    _store: Any
    _state: StateDriver
    _id: str
    _take_over: bool
    _position: LedgerRecord | None = None
    span: Range | None = None

    def __post_init__(self) -> None:
        self.ledger = Ledger(self._store, self._state.name)

    def check(self, seen: LedgerRecord) -> None:
        """Refuse before any row is computed."""
        begin_operator(seen, "", "correction", take_over=self._take_over)
        name = self._state.name
        if seen.last_commit is None:
            raise UsageError(
                f"state {name!r} counts no batch yet, so there is nothing to correct. Nothing was written. Start the "
                "query first."
            )
        if seen.may_lose_last_batch():
            raise UsageError(
                f"state {name!r} was committed apart from others of its topology, and its last batch may have to be "
                "rolled back. Nothing was written. Start the query, and correct after its next batch."
            )
        as_job = open_ledger(seen, self._state.open_request(seen.owner))
        if msgspec.structs.replace(as_job, epoch=seen.epoch, session=seen.session) != seen:
            raise UsageError(
                f"state {name!r}: the job declares other fields or options than its last batch had. Nothing was "
                "written. Start the query with it once, and correct then."
            )

    def run(self, frame: DataFrame, digest: str, policy: RetryPolicy, lines: int = 0) -> Corrected:
        """Begins anew what another attempt may put right. ``lines`` of the frame are no rows."""
        while True:
            try:
                return self._applied(frame, digest, lines)
            except Exception as error:
                if policy.after(error) is not Decision.BEGIN_ANEW:
                    raise
                _log.warning("a correction of %s is begun anew: %s", self._state.name, error)

    def _applied(self, frame: DataFrame, digest: str, lines: int) -> Corrected:
        seen = self.ledger.remember()
        known = read_list(self._store, seen)
        before = _listed(known, self._id)
        if before is not None:
            return _done_before(self._state.name, before, digest)
        self.check(seen)
        if self._position is not None:
            check_still_at(seen, self._position)
        rows, gone = frame, {}
        if self.span is not None:
            rows = self._state.keyed(frame)
            gone = self.span.gone(rows, seen, known)
        elif isinstance(self._state, WindowedState):
            rows = _placed(self._state, frame, seen)
        self._check_forgotten(rows, seen, known)
        attempt = self.ledger.begin_operator("correction", take_over=self._take_over, seen=seen)
        try:
            result = self._state.attempt((frame, None), self.ledger.record, attempt)
            last, count, keys = seen.last_commit, result.rows - lines, result.keys
            if self.span is not None and gone:
                with writer_of(self._store, attempt.token, has_txids=True) as writer:
                    keys += self.span.remove(gone, writer, seen, attempt, result.panes)
            entry = ListEntry(
                kind="correction",
                id=self._id,
                at=now(),
                txid=attempt.txid,
                digest=digest,
                owner="" if last is None else last.owner,
                batch_id=None if last is None else last.batch_id,
                offsets=None if last is None else last.offsets,
                keys=keys,
                rows=count,
            )
            with writer_of(self._store, attempt.token, has_txids=True) as writer:
                write_entries(writer, seen, attempt, {len(known): entry})
            self.ledger.commit_correction(attempt.txid, keys_delta=result.keys_delta, panes=result.panes)
        except BaseException:
            with suppress(MapStateError):
                self.ledger.give_up_operator(attempt.txid)
            raise
        _log.info("state %s: correction %r, txid %d, %d rows", seen.state, self._id, attempt.txid, count)
        return Corrected(seen.state, self._id, attempt.txid, count, keys, was_done=False)

    def _check_forgotten(self, frame: DataFrame, seen: LedgerRecord, known: Sequence[ListEntry]) -> None:
        """Raises UsageError where a key that was forgotten would get rows: nothing tells whether they are later."""
        from pyspark.sql import functions as F

        forgotten = of_kind(known, "forget").values()
        if not forgotten or not seen.keys:
            return
        listed, codec, names = ListedKeys(seen.keys, forgotten), KeyCodec(seen.keys), [key.name for key in seen.keys]
        added = frame.where(F.col(SIGN) > 0) if SIGN in frame.columns else frame
        back = 0
        for batch in calls().to_arrow(added.select(*map(column_of, names)).distinct()).to_batches():
            texts = codec.encode_columns(columns_to_python(batch.columns, names), batch.num_rows)
            back += sum(text in listed for text in texts)
        if back:
            raise UsageError(
                f"state {seen.state!r}: {back} keys of the {'rows to add' if self._position is None else 'recount'} "
                "were forgotten, and nothing tells whether their rows are of a later time. Nothing was written. Leave "
                "these keys out."
            )


def _listed(known: Sequence[ListEntry], name: str) -> ListEntry | None:
    return next((entry for entry in of_kind(known, "correction").values() if entry.id == name), None)


def _done_before(state: str, entry: ListEntry, digest: str) -> Corrected:
    if entry.digest != digest or entry.txid is None:
        raise UsageError(
            f"state {state!r} counts other rows under the id {entry.id!r}, applied as txid {entry.txid} at {entry.at}. "
            "Nothing was written. Take another id."
        )
    return Corrected(state, entry.id, entry.txid, entry.rows, entry.keys, was_done=True)


def _emit(store: Any, branch: Branch, df: DataFrame, done: Corrected) -> None:
    """Calls the functions behind the state with what a correction has written, and with its windows that are final.

    Their batch has the number -1 less that of the correction's entry. Raises UsageError where some of what it has
    written is not there any more as it was written, or the job declares other fields: nothing tells what to pass on.
    """
    record = read_ledger(store, done.state)
    entries, last = of_kind(read_list(store, record), "correction"), record.last_commit
    number = next((-1 - i for i, entry in entries.items() if entry.txid == done.txid), None)
    if number is None or last is None:
        raise _not_emitted(done, "it was taken back meanwhile")
    state = (branch.make_driver or StateDriver)(branch)
    asked, kept = state.open_request(record.owner), None if record.windows is None else record.windows.definition
    if (asked.keys, asked.fields, asked.windows) != (record.keys, record.fields, kept):
        raise _not_emitted(done, "the job declares other keys, fields or windows than the state has")
    frame = state.keyed(through(branch.steps, df.sparkSession.createDataFrame([], df.schema), None))
    commit = msgspec.structs.replace(last, txid=done.txid, keys=done.keys)
    fields = Fields(record.fields, branch.job.aggregators)
    new_values, missing = read_back(frame, branch.job.spec, fields, record, commit, old=state.retracts)
    if missing:
        raise _not_emitted(done, f"{missing} of the {done.keys} keys that it wrote have been written or removed since")
    state.committed_as = done.txid
    state.emit(new_values, number)
    if isinstance(state, WindowedState) and branch.fired:
        parts = [state.fired(frame, record, windows) for windows in _final_windows(state, new_values, record)]
        frames = [part.rows for part in parts if part.has_windows]
        for function in branch.fired if frames else ():
            state.pass_on(function, reduce(type(frames[0]).unionByName, frames), number)


def _not_emitted(done: Corrected, why: str) -> UsageError:
    return UsageError(
        f"state {done.state!r}: the correction {done.id!r} counts, as txid {done.txid}, but {why}. So no function was "
        "called. Read what was corrected, and pass it on by hand; emit=False calls none.",
        state=done.state,
    )


def _final_windows(state: WindowedState, new_values: DataFrame, record: LedgerRecord) -> list[WindowCommit]:
    """The final windows of the panes that have new values, each run of them as if a batch had fired it."""
    from pyspark.sql import functions as F

    panes, column = windows_of_ledger(record).definition.panes, state.windows.column
    number = F.col(column) if state.windows.type == "bigint" else F.unix_micros(column)
    changed, final = new_values.select(number).distinct().collect(), panes.floor(record.final_mark())
    ends = {end for (pane,) in changed for end in panes.ends(pane) if end <= final}
    starts = sorted(end for end in ends if end - panes.slide not in ends)
    stops = sorted(end for end in ends if end + panes.slide not in ends)
    return [WindowCommit(before=start - 1, watermark=stop) for start, stop in zip(starts, stops, strict=True)]


class _Opened:
    """The store that a state's driver has opened for itself, until it is closed."""

    def __init__(self, state: StateDriver) -> None:
        self._store = state.open()

    def close(self) -> None:
        close_if_possible(self._store)


def _placed(state: WindowedState, frame: DataFrame, seen: LedgerRecord) -> DataFrame:
    """The rows that are in windows, with their keys. No row is late as long as one of its windows is there.

    Raises UsageError for rows of windows that are gone, and for rows without a time: both would be nowhere.
    """
    from pyspark.sql import functions as F

    windows, kind, state.branch.taken = windows_of_ledger(seen), state.windows.type, (-LATEST, ANY_TIME)
    rows, pane, first = state.keyed(frame), state.windows.column, first_pane(windows)
    has_none = F.col(pane).isNull()
    if windows.definition.panes.has_gaps:
        has_none = F.col(list(beside_of(state.windows))[-1]) > 0
    number = F.col(pane) if kind == "bigint" else F.unix_micros(pane)
    first = -LATEST if first is None else first
    panes = F.array_sort(F.collect_set(F.when(number < first, number)))
    timeless, gone = rows.agg(F.count_if(has_none), F.slice(panes, 1, _MOST_NAMED + 1)).collect()[0]
    whys = [f"{timeless} rows to add have no time, or one that no window can have"] if timeless else []
    if gone:
        named = ", ".join([*(time_text(at, kind) for at in gone[:_MOST_NAMED]), *["..."] * (len(gone) > _MOST_NAMED)])
        whys.append(f"rows to add are of windows that are gone, past their retention: in panes that begin at {named}")
    if whys:
        why = "; ".join(whys)
        raise UsageError(f"state {seen.state!r}: {why}. Nothing was written. Leave these rows out.", state=seen.state)
    state.branch.taken = (first, ANY_TIME)
    return rows.where(F.col(pane).isNotNull())


def _check(
    plan: StreamPlan, df: DataFrame, branch: Branch, rows: Mapping[str, DataFrame], recount: Recount | None
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
    spec = branch.job.spec
    whys = [] if branch in plan.branches else ["it follows another state"]
    definition = None if branch.job.windows is None else branch.job.windows.definition
    if isinstance(definition, RollingDefinition):
        whys.append("it has rolling windows")
    elif definition is not None and definition.sessions:
        whys.append("its windows are sessions")
    elif definition is not None and "retract" in given:
        whys.append("rows of windows are added, or a span of time is computed anew")
    if spec.type == "transactional":
        whys.append("it is transactional, and only opaque records keep the value before")
    whys += [] if recount is None else recount.why_not(branch.job)
    whys += [why for state, why in why_not_apart(plan) if state == spec.state]
    if len(plan.branches) > 1:
        names = ", ".join(branch.job.spec.state for branch in plan.branches)
        whys.append(f"the states {names} count together, and this is for one state")
    if whys:
        raise ConfigurationError(
            f"state {spec.state!r} cannot be corrected: {whys[0]}. Nothing was written. Build it anew beside this one, "
            "and swap. See docs/life.md#correct"
        )
    if recount is not None:
        recount.check(branch.job)
        kinds = {key.name: key.type for key in branch.job.keys}
        if recount.keys is not None:
            _check_columns(f"the keys of a recount of {spec.state!r} need its key columns", kinds, recount.keys)
        return
    check_digest(spec.state, df)
    for frame in given.values():
        need = "need the columns of the stream, as it was given to newStream"
        _check_columns(f"the rows of a correction of {spec.state!r} {need}", _types(df), frame)


def _check_columns(text: str, kinds: Mapping[str, str], frame: DataFrame) -> None:
    types = _types(frame)
    for name, kind in kinds.items():
        if types.get(name) != kind:
            raise ConfigurationError(
                f"{text}: {name} {kind}. They have {types.get(name, 'none')} there. Nothing was written."
            )


def _types(frame: DataFrame) -> dict[str, str]:
    return {field.name: field.dataType.simpleString() for field in frame.schema.fields}


def _given(df: DataFrame, add: DataFrame | None, retract: DataFrame | None) -> AbstractContextManager[DataFrame]:
    """All rows with the stream's own columns and a sign, computed once: the digest is of the rows that count."""
    from pyspark.sql import functions as F

    columns = [column_of(name) for name in df.schema.names]
    parts = [
        frame.select(*columns, F.lit(sign).cast("int").alias(SIGN))
        for sign, frame in ((1, add), (-1, retract))
        if frame is not None
    ]
    return _computed(parts[0] if len(parts) == 1 else parts[0].union(parts[1]))


@contextmanager
def _computed(rows: DataFrame) -> Iterator[DataFrame]:
    with configured(rows, ONE_DRAW):
        kept, release = computed_once(rows)
    try:
        yield kept
    finally:
        release()


def _taken(rows: DataFrame, branch: Branch, signs: Sequence[int]) -> DataFrame:
    """The rows as the state takes them: after the stream's own steps, with their sign where some are taken back."""
    from pyspark.sql import functions as F

    state, frames = StateDriver(branch), []
    for sign in signs:
        frame = through(branch.steps, rows.where(F.col(SIGN) == sign).drop(SIGN), None)
        state.check_columns(frame)
        frame = frame.select(*map(column_of, branch.job.columns)) if branch.job.columns else frame
        frames.append(frame.withColumn(SIGN, F.lit(sign).cast("int")) if -1 in signs else frame)
    return frames[0] if len(frames) == 1 else frames[0].unionByName(frames[1])
