"""Who takes part in a world of windows: a driver with its tasks, and readers. They run the library's own code.

`Driver` is what the Spark driver does around that code. Each of its decisions that looks as if it could be simpler is
a method of `WindowRules`, and a mutant decides otherwise.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import pyarrow as pa
from pyspark.sql.types import ArrayType, LongType, StringType, StructField, StructType

from mapstate.aggregators import Collect, Max, Min
from mapstate.aggregators.fields import Fields
from mapstate.capabilities import FencedWrites
from mapstate.errors import (
    FencedError,
    StaleBatchError,
    UsageError,
    WindowGoneError,
)
from mapstate.keys import KeyCodec, is_index_key
from mapstate.maps.opaque import OpaqueMap
from mapstate.maps.pane_index import PaneIndex, PanePages, index_codec, pane_of, slices
from mapstate.maps.serialized import SerializedMap, writer_of
from mapstate.protocol import transitions
from mapstate.protocol.ledger import Ledger
from mapstate.protocol.ledger_record import AlreadyCommitted, Attempt, Commit, LedgerRecord, OpenRequest
from mapstate.protocol.ledgers import Ledgers, change_all
from mapstate.protocol.seeding import first_pane
from mapstate.protocol.sessions import FIRST, LAST, last_panes, pane_to_settle
from mapstate.protocol.stored_ledger import read_ledger
from mapstate.protocol.windows import (
    NEVER,
    Input,
    PaneChange,
    Panes,
    WindowCommit,
    WindowsRecord,
    fired_panes,
    watermark,
)
from mapstate.reader.committed import CommittedReads
from mapstate.reader.windows import WindowReads
from mapstate.schema import Field, KeyField, number_of
from mapstate.serializers import RecordCodec, serializer
from mapstate.spark.executor.session_task import FiredSessionTask, SessionRows, SettleTask
from mapstate.spark.executor.window_task import FiredTask, JoinTask, PurgeTask, Reads
from mapstate.spec import StateSpec
from model.actors import Actor, Killed
from model.window_oracle import USERS, Batch, Fired, Row, Setting
from model.window_stores import Stored, opened
from model.world import ViolationError

if TYPE_CHECKING:
    from model.windows import State, Version, WindowWorld

__all__ = ["LATE", "WINDOWS", "Corrector", "Driver", "Reader", "WindowRules", "pane_number", "values_of"]

WINDOWS, LATE = "windows", "late"

_ROWS = Collect("n", most=10**6)
_FIELDS = (Field("rows", "Collect(n)", "struct<values:array<bigint>>"),)
_USER = KeyField("user", "string")
_FIRST, _LAST = Field(FIRST, "Min(at)", "bigint"), Field(LAST, "Max(at)", "bigint")
_OF_SESSIONS = (*_FIELDS, _FIRST, _LAST)
_AGGREGATORS = {"rows": _ROWS, FIRST: Min("at"), LAST: Max("at")}
_KEYS = {WINDOWS: (KeyField("pane_start", "bigint"), _USER), LATE: (_USER,)}
_SHOWN = StructType(
    [
        StructField("window_start", LongType()),
        StructField("window_end", LongType()),
        StructField("user", StringType()),
        StructField("rows", ArrayType(LongType())),
    ]
)


class WindowRules:
    """The decisions of the driver and its tasks, and of what they call. A mutant has one of them wrong."""

    def patches(self) -> list[tuple[Any, str, Any]]:
        """What a mutant replaces in the library: owner, name, and the other thing."""
        return []

    def set_up(self, stores: Sequence[Stored]) -> None:
        """What a mutant changes in the stores."""

    def is_late(self, row: Row, panes: Panes, before: int, after: int) -> bool:  # noqa: ARG002
        """Whether a row is late, from the watermark before the batch and the one after it."""
        return row.at < (before + 1 if self.sessions else panes.floor(before))

    def bases_for_index(self, bases: list[Any], stored: list[Any]) -> list[Any]:  # noqa: ARG002
        """By what the index tells new keys: the values before the batch, and not the records that lie there."""
        return bases

    def index_view(self, attempt: Attempt) -> Any:
        """Under which view heads and chunks are read."""
        return attempt.view

    def purges_under(self, record: LedgerRecord, after: int) -> LedgerRecord:  # noqa: ARG002
        """The ledger that says which panes are due."""
        return record

    def corrects_from(self, record: LedgerRecord) -> int | None:
        """From which time on a correction takes rows; None: all."""
        return first_pane(_windows_of(record))

    def width(self, partitions: int) -> int:
        """What the commit says of partitions."""
        return partitions

    sessions = False
    settles = True
    mark_in_commit = True
    emits_before_commit = False
    emits_from_memory = False
    plans_tell = True


class Driver:
    """One foreachBatch call of one driver that has just started."""

    def __init__(self, world: WindowWorld, batch_id: int, rows: tuple[Row, ...], now: int) -> None:
        self.world = world
        self.rules = world.rules
        self.setting = world.setting
        self.batch_id = batch_id
        self.planned_rows = rows
        self.rows: tuple[Row, ...] = ()  # that the attempt at work counts
        self.now = now
        self.tasks: list[Actor] = []
        self.draw = random.Random(world.draw.random())
        self.has_opened = False
        self.actor = world.spawn("a driver", self._run)
        self._planned = world.plans[batch_id]
        self._plan = world.plan(batch_id) if self.rules.plans_tell else None

    def _run(self, actor: Actor) -> None:
        world = self.world
        stores = [opened(state.stored, actor) for state in world.states]
        requests = [_request(state.name, self.setting) for state in world.states]
        ledgers, answers = Ledgers.open_and_begin(stores, requests, self.batch_id, ["refuse"] * 2, self._plan)
        self.has_opened = True
        for _ in range(8):
            first = answers[0]
            if isinstance(first, AlreadyCommitted):
                if first.commit is not None:
                    self._emit(actor, ledgers.records[0], first.commit, again=True)
                return
            done = self._attempt(actor, ledgers.records, answers)
            if done is not None:
                break
            answers = ledgers.begin(self.batch_id, self._plan)  # the job failed, and tasks of it may go on
        else:
            raise ViolationError("a driver that is left alone does not come to an end")
        commits, change = done
        batch = Batch(self.batch_id, self.rows, self.now, self._planned, _least(ledgers.records[0]))
        for state, commit in zip(world.states, commits, strict=True):
            state.attempts[commit.txid] = batch
        if not self.rules.mark_in_commit:
            self._write_mark(ledgers, commits[0])
        if self.rules.emits_before_commit:
            record = transitions.commit(ledgers.records[0], ledgers.ledgers[0].session, commits[0], change)
            self._emit(actor, record, commits[0], again=False)
        ledgers.commit(commits, [change, None])
        if self.rules.emits_from_memory:
            return
        last = ledgers.records[0].last_commit
        assert last is not None
        self._emit(actor, ledgers.records[0], last, again=False)

    def _attempt(
        self, actor: Actor, records: Sequence[LedgerRecord], answers: Sequence[Any]
    ) -> tuple[list[Commit], PaneChange] | None:
        """Runs the tasks and purges. None where a task failed."""
        record, attempt = records[0], answers[0]
        last = record.last_windows() or WindowCommit()
        panes, expected = self.setting.definition.panes, self._mark(last, self.planned_rows)
        late = [row for row in self.planned_rows if self.rules.is_late(row, panes, last.watermark, expected)]
        inside = [row for row in self.planned_rows if row not in late and panes.pane(row.at) is not None]
        between = [row for row in self.planned_rows if row not in late and panes.pane(row.at) is None]
        partitions = self.draw.choice([1, 2, 3])
        spread: dict[int, list[Row]] = {}
        places: dict[tuple[int | None, str], int] = {}
        for row in inside:
            at = places.setdefault((panes.pane(row.at), row.user), self.draw.randrange(partitions))
            spread.setdefault(at, []).append(row)
        tries = [_Task(self, 1, records[1], answers[1], 0, late)]
        for at, own in spread.items():
            tries.append(_Task(self, 0, record, attempt, at, own))
            if self.draw.random() < 0.3:  # another try, which may find other rows
                some = [row for row in own if self.draw.random() < 0.7]
                tries.append(_Task(self, 0, record, attempt, at, some))
        own_tasks = [task.actor for task in tries]
        self.tasks += own_tasks
        if self.draw.random() < 0.05:
            self.draw.choice(own_tasks).kill()  # an executor dies
        actor.wait_for(own_tasks)
        won = {(task.state, task.partition): task for task in tries if task.actor.result}
        for task in tries:
            if task.actor.error is not None and not isinstance(task.actor.error, (Killed, FencedError)):
                raise task.actor.error
        if len(won) < len(spread) + 1:
            self.world.crashed = True
            return None
        counted = [row for task in won.values() if task.state == 0 for row in task.rows]
        self.rows = (*counted, *late, *between)
        mark = max(self._mark(last, self.rows), _least(record))
        purging = self.rules.purges_under(record, mark)
        assert purging.windows is not None
        purged = self._purge(actor, purging, attempt)
        settled = self._settle(actor, record, attempt, last)
        done = WindowCommit(
            watermark=mark,
            before=last.watermark,
            inputs=self._inputs(last, self.rows),
            late=len(late),
            between=len(between),
            settled=settled,
        )
        commits = [
            Commit(batch_id=self.batch_id, txid=attempt.txid, owner="q", rows=len(self.rows), windows=done),
            Commit(batch_id=self.batch_id, txid=answers[1].txid, owner="q", rows=len(late)),
        ]
        written = {pane for row in counted if (pane := panes.pane(row.at)) is not None}
        change = PaneChange(written, purged, self.rules.width(max(spread, default=-1) + 1))
        writing = PurgeTask(_spec(self.world, actor), record, attempt.token, attempt.view, attempt.txid)
        change, pages = PanePages(WINDOWS, purging.windows, writing.reads().index).changed(change)
        writing.write(pages)
        self.world.played.pages_written += len(pages)
        return commits, change

    def _mark(self, last: WindowCommit, rows: Sequence[Row]) -> int:
        """The watermark after a batch with these rows."""
        inputs = self._inputs(last, rows)
        return watermark(last.watermark, inputs, self.setting.definition.behind, self.now, idle=self.setting.idle)

    def _inputs(self, last: WindowCommit, rows: Sequence[Row]) -> dict[str, Input]:
        inputs = {}
        for source in self.setting.sources:
            own = [row.at for row in rows if row.source == source]
            near = [min(at, self.now) for at in own if at <= self.now + self.setting.ahead]
            known = last.inputs.get(source, Input())
            inputs[source] = known.noted(max(near, default=None), self.now, has_rows=bool(own))
        return inputs

    def _purge(self, actor: Actor, record: LedgerRecord, attempt: Attempt) -> list[int]:
        assert record.windows is not None
        spec = _spec(self.world, actor)
        reads = Reads(spec, record, attempt.view, attempt.txid)
        named = PanePages(WINDOWS, record.windows, reads.index).named
        due = list(record.windows.due(record.last_windows(), named))[
            : self.draw.choice([1, 10**6])
        ]  # the rest is for the next batch
        if not due:
            return []
        parts = list(slices(reads.index, [str(pane) for pane in due], record.windows.width))
        removed = PurgeTask(spec, record, attempt.token, attempt.view, attempt.txid).work(parts)
        self.world.played.purged += removed
        return due

    def _settle(self, actor: Actor, record: LedgerRecord, attempt: Attempt, last: WindowCommit) -> int:
        """Of sessions: joins what lies before a pane into it, and returns the pane."""
        windows = record.windows
        assert windows is not None
        pane = pane_to_settle(windows, last) if self.setting.sessions else None
        if pane is None:
            return last.settled
        spec = _spec(self.world, actor)
        reads = Reads(spec, record, attempt.view, attempt.txid)
        if self.rules.settles and windows.may_have(pane):
            parts = list(slices(reads.index, [str(pane)], windows.width))
            settings = spec, record, attempt.token, attempt.view, attempt.txid
            fields = Fields(_OF_SESSIONS, _AGGREGATORS)
            self.world.played.settled += SettleTask(*settings, pane=pane, fields=fields).work(parts)
        return pane

    def _emit(self, actor: Actor, record: LedgerRecord, commit: Commit, *, again: bool) -> None:
        """What the driver passes on of a batch that is committed: the windows that it has fired."""
        if again and self.rules.emits_from_memory:
            self.world.emitted(record, commit, [], again=True)
            return
        windows, done = record.windows, commit.windows
        assert windows is not None
        assert done is not None
        panes = windows.definition.panes
        reads = Reads(_spec(self.world, actor), record, record.view(), record.next_txid - 1)
        named = PanePages(WINDOWS, windows, reads.index).named
        if self.setting.sessions:
            due = last_panes(windows, done, named)
            ends = range(max(done.before, windows.purged) + 1, done.watermark + 1)
        else:
            fired = fired_panes(windows, done, named)
            due = [pane for pane, _ in fired]
            ends = range(fired[0][1][0], panes.floor(done.watermark) + 1) if fired else range(0)
        if not due:
            self.world.emitted(record, commit, [], again=again)
            return
        places = [(pane, partition) for pane in due for partition in range(windows.width)]
        columns = [pa.array(column, pa.int64()) for column in zip(*places, strict=True)] if places else []
        rows: list[Fired] = []
        if places:
            batch = pa.RecordBatch.from_arrays(columns, ["pane", "partition"])
            spec, fields = _spec(self.world, actor), Fields(_FIELDS, _AGGREGATORS)
            task, join = FiredTask(spec, record, ends), JoinTask(record, fields, _SHOWN)
            if self.setting.sessions:
                fields = Fields(_OF_SESSIONS, _AGGREGATORS)
                task, join = FiredSessionTask(spec, record, ends, fields), SessionRows(record, fields, _SHOWN)
            read = list(task(iter([batch])))
            if read:
                table = pa.Table.from_batches(read).sort_by([("window_end", "ascending"), ("rest", "ascending")])
                for one in join(iter(table.combine_chunks().to_batches())):
                    rows += [(row["window_end"], row["user"], tuple(row["rows"])) for row in one.to_pylist()]
        self.world.emitted(record, commit, sorted(rows), again=again)

    def _write_mark(self, ledgers: Ledgers, commit: Commit) -> None:
        """For a mutant: the watermark in a write of its own, in front of the commit."""

        def write(before: list[Any]) -> list[LedgerRecord]:
            last = before[0].last_commit
            if last is None or last.windows is None or commit.windows is None:
                return before
            windows = msgspec.structs.replace(last.windows, watermark=commit.windows.watermark)
            moved = msgspec.structs.replace(last, windows=windows)
            return [msgspec.structs.replace(before[0], last_commit=moved)]

        change_all([ledgers.ledgers[0]], write)
        ledgers.ledgers[0].mark_begun()


class _Task:
    """One try of one task of an attempt. Its result is whether it may count."""

    def __init__(
        self,
        driver: Driver | Corrector,
        state: int,
        record: LedgerRecord,
        attempt: Attempt,
        partition: int,
        rows: list[Row],
    ) -> None:
        self.driver = driver
        self.state = state
        self.partition = partition
        self._record = record
        self._attempt = attempt
        self.rows = rows
        self._holder = f"{random.Random(driver.draw.random()).random()}"
        self.actor = driver.world.spawn("a task", self.run)

    def run(self, actor: Actor) -> bool:
        """Whether it was the one that wrote."""
        state, attempt = self.driver.world.states[self.state], self._attempt
        store = opened(state.stored, actor)
        if store.claim(attempt.txid, self.partition, self._holder) != self._holder:
            self.driver.world.played.lost_claims += 1
            return False
        if not isinstance(store, FencedWrites):
            at = read_ledger(store, state.name).in_flight
            if at is None or (at.txid, at.nonce) != (attempt.txid, attempt.token.nonce):
                return False
        with writer_of(store, attempt.token) as writer:
            fields = _fields(state.name, self.driver.setting)
            codec = RecordCodec(serializer("json"), state.name, "opaque", fields, ((0, len(fields)),))
            records = SerializedMap(writer, codec)
            values: Any = OpaqueMap(records, attempt.view, written_once=True)
            values.begin_commit(attempt.txid)
            if self.state == 0:
                self._write_windows(writer, records, values)
            else:
                groups: dict[str, list[int]] = {}
                for row in self.rows:
                    groups.setdefault(row.user, []).append(row.name)
                keys = KeyCodec(_KEYS[LATE]).encode_all([(user,) for user in groups])
                values.multi_combine(keys, [(names,) for names in groups.values()], _ROWS.combine_all)
        return True

    def _write_windows(self, writer: Any, records: SerializedMap, values: Any) -> None:
        rules, attempt, panes = self.driver.rules, self._attempt, self.driver.setting.definition.panes
        index = PaneIndex(writer, index_codec("json", WINDOWS), rules.index_view(attempt), attempt.txid, self.partition)
        groups: dict[tuple[int | None, str], list[Row]] = {}
        for row in self.rows:
            groups.setdefault((panes.pane(row.at), row.user), []).append(row)
        keys = KeyCodec(_KEYS[WINDOWS]).encode_all(list(groups))
        fields = Fields(_fields(WINDOWS, self.driver.setting), _AGGREGATORS)
        own: list[Any] = [([row.name for row in rows],) for rows in groups.values()]
        if self.driver.setting.sessions:
            times = [[row.at for row in rows] for rows in groups.values()]
            own = [(names, min(at), max(at)) for names, at in zip(own, times, strict=True)]

        def combine(bases: list[Any], partials: list[Any]) -> list[Any]:
            index.note(keys, rules.bases_for_index(bases, records.multi_get(keys)))
            return fields.combine_all(bases, partials)

        values.multi_combine(keys, own, combine)
        index.write()


class Corrector:
    """One call of an operator who adds rows to windows. It may die at any step."""

    def __init__(self, world: WindowWorld, rows: tuple[Row, ...]) -> None:
        self.world = world
        self.rules = world.rules
        self.setting = world.setting
        self.draw = random.Random(world.draw.random())
        self.has_opened = False
        self._rows = rows
        self.actor = world.spawn("an operator", self._run)

    def _run(self, actor: Actor) -> None:
        world = self.world
        state, ledger = world.states[0], Ledger(opened(world.states[0].stored, actor), WINDOWS)
        with suppress(UsageError, FencedError, StaleBatchError, Killed):
            seen = ledger.remember()
            if not world.may_correct(seen):
                return
            world.crashed = True  # what it has written of panes may be left behind
            take_over = self.draw.random() < 0.3
            attempt = ledger.begin_operator("correction", take_over=take_over, seen=seen)
            self.has_opened = True
            record = ledger.record
            first = self.rules.corrects_from(record)
            rows = tuple(row for row in self._rows if first is None or row.at >= first)
            written, width = self._write(actor, record, attempt, rows)
            if self.draw.random() < 0.2:
                return
            writing = PurgeTask(_spec(world, actor), record, attempt.token, attempt.view, attempt.txid)
            change, pages = PanePages(WINDOWS, _windows_of(record), writing.reads().index).changed(
                PaneChange(written, (), width)
            )
            writing.write(pages)
            if self.draw.random() < 0.2:
                return
            known = first_pane(_windows_of(record))
            counted = tuple(row for row in self._rows if known is None or row.at >= known)
            state.attempts[attempt.txid] = Batch(-1, counted, 0, 0, NEVER, corrects=True)
            ledger.commit_correction(attempt.txid, panes=change)

    def _write(self, actor: Actor, record: LedgerRecord, attempt: Attempt, rows: Sequence[Row]) -> tuple[set[int], int]:
        """The panes that tasks have written, and how many tasks there were at most."""
        panes, spread = self.setting.definition.panes, dict[int, list[Row]]()
        places: dict[tuple[int, str], int] = {}
        for row in rows:
            pane = panes.pane(row.at)
            if pane is not None:
                spread.setdefault(places.setdefault((pane, row.user), self.draw.randrange(3)), []).append(row)
        for at, own in spread.items():
            if self.draw.random() < 0.1 or not _Task(self, 0, record, attempt, at, own).run(actor):
                raise FencedError("it dies here")
        return {pane for pane, _ in places}, self.rules.width(max(spread, default=-1) + 1)


class Reader:
    """One call of a reader: all windows of a user, or all users of a window."""

    def __init__(self, world: WindowWorld, user: str | None = None) -> None:
        self.world = world
        self._user = user or world.draw.choice([*USERS, None])
        panes = world.setting.definition.panes
        self._end = panes.floor(world.time + world.draw.randint(-25, 5))
        self.actor = world.spawn("a reader", self._run)

    def _run(self, actor: Actor) -> None:
        state = self.world.states[0]
        if state.newest is None:
            return
        store = opened(state.stored, actor)
        since = len(state.versions) - 1
        reopened = self.world.reopened
        reads = WindowReads(CommittedReads(store, WINDOWS, "committed", {}))
        if self._user is not None:
            windows, _ = reads.of_key(self._user, None, None)
            found = [(one.end, tuple(one.value["rows"]), one.final) for one in windows]
            self._check_key(found, state.versions[since:])
            final = {(number_of(end), self._user): names for end, names, is_final in found if is_final}
            self.world.saw_final(final, reopened)
        elif not self.world.setting.sessions:
            self._read_window(reads, state, since)

    def _check_key(self, found: list[Any], versions: Sequence[Version]) -> None:
        rights = []
        for record, batches in versions:
            assert record.windows is not None
            oracle = self.world.oracle(batches)
            mark = self.world.final_mark(record, batches)
            right = [
                (end, names, end <= mark)
                for end, user, names in oracle.windows()
                if user == self._user and end > record.windows.purged
            ]
            if found == right:
                self.world.played.reads += 1
                return
            rights.append(right)
        raise ViolationError(f"a reader saw {found} of {self._user}, and right was one of {rights}")

    def _read_window(self, reads: WindowReads, state: State, since: int) -> None:
        try:
            pages = [row for page in reads.of_window(self._end) for row in page]
        except (WindowGoneError, StaleBatchError):
            return
        versions = state.versions[since:]
        found = sorted((self._end, key[0], tuple(fields["rows"])) for key, fields in pages)
        finals = [one for one in versions if self.world.oracle(one.batches).mark >= self._end]
        if len(finals) < len(versions):
            return  # an open window: each page is as of a batch of its own
        rights = [[one for one in self.world.oracle(batches).windows() if one[0] == self._end] for _, batches in finals]
        if found not in rights:
            raise ViolationError(f"a reader saw the window {found}, and right was one of {rights}")
        self.world.played.pages += 1


def _fields(state: str, setting: Setting) -> tuple[Field, ...]:
    return _OF_SESSIONS if state == WINDOWS and setting.sessions else _FIELDS


def _windows_of(record: LedgerRecord) -> WindowsRecord:
    assert record.windows is not None
    return record.windows


def _least(record: LedgerRecord) -> int:
    return _windows_of(record).least


class _Backend(NamedTuple):
    """A store that is open already, as a spec names it."""

    stored: Stored
    actor: Actor

    @property
    def shared_between_processes(self) -> bool:
        return True

    def open(self, state: str, *, ttl: float | None = None) -> Any:  # noqa: ARG002
        return opened(self.stored, self.actor)


def _spec(world: WindowWorld, actor: Actor) -> StateSpec:
    return StateSpec(_Backend(world.states[0].stored, actor), "opaque", name=WINDOWS, chunk_size=2)


def _request(name: str, setting: Setting) -> OpenRequest:
    return OpenRequest(
        state=name,
        type="opaque",
        serializer="json",
        keys=_KEYS[name],
        fields=_fields(name, setting),
        owner="q",
        clock_txid=1000,
        windows=setting.definition if name == WINDOWS else None,
    )


def values_of(state: State, actor: Actor, users: str) -> list[Any]:
    """The values of users in the state of late rows."""
    reads = CommittedReads(opened(state.stored, actor), state.name, "committed", {})
    _, values = reads.read(KeyCodec(_KEYS[LATE]).encode_all([(user,) for user in users]))
    return [None if value is None else list(value[0]) for value in values]


def pane_number(key: str) -> int:
    """The pane of a record or of an index record."""
    if is_index_key(key):
        return int(key.split("|")[1])
    return int(pane_of(key)[0])
