"""Windows in random worlds: what every reader and every function downstream gets, held against raw rows.

`Oracle` is the specification: rows of the batches that count, and brute force. Everything else is the library's own:
ledgers, fences, map states, pane index, purge, firing, readers. `Driver` is what the Spark driver does around them,
with one method of `WindowRules` for each decision that looks as if it could be simpler; a mutant decides otherwise.
Batches come again with other rows or other plans, drivers and tasks die or go on late, operators roll back.
"""

from __future__ import annotations

import random
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from unittest.mock import patch

import msgspec

from mapstate.errors import FencedError, RollbackError, StaleBatchError, UsageError
from mapstate.keys import INDEX
from mapstate.maps import pane_index
from mapstate.protocol import windows
from mapstate.protocol.ledger import Ledger
from mapstate.protocol.ledger_record import BatchPlan, Commit, LedgerRecord
from mapstate.protocol.windows import NEVER
from model.actors import Actor
from model.window_actors import LATE, WINDOWS, Corrector, Driver, Reader, WindowRules, pane_number, values_of
from model.window_oracle import USERS, Batch, Fired, Oracle, Row, Setting
from model.window_stores import Stored, opened
from model.world import ViolationError

__all__ = ["Played", "State", "Version", "WindowWorld", "play"]

_TOO_LONG = 100_000


@dataclass
class Played:
    """What a world was about, so that a search that finds nothing has looked at something."""

    reads: int = 0
    pages: int = 0
    fired: int = 0
    repeats: int = 0
    late: int = 0
    kills: int = 0
    fenced: int = 0
    rollbacks: int = 0
    replans: int = 0
    lost_claims: int = 0
    purged: int = 0
    settled: int = 0
    pages_written: int = 0
    final: int = 0
    advances: int = 0
    put_back: int = 0
    corrections: int = 0
    taken_back: int = 0
    steps: int = 0

    def add(self, other: Played) -> None:
        """Sum up."""
        for name in self.__dataclass_fields__:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def __str__(self) -> str:
        return ", ".join(f"{getattr(self, name):,} {name}" for name in self.__dataclass_fields__)


def play(seed: int, setting: Setting, rules: WindowRules | None = None, *, batches: int = 5) -> Played:
    """One random world, to its end. Raises ViolationError."""
    own = rules or WindowRules()
    with ExitStack() as patched:
        patched.enter_context(patch.object(pane_index, "CHUNK_KEYS", 2))
        patched.enter_context(patch.object(pane_index, "MOST_RUNS", setting.most_runs))
        patched.enter_context(patch.object(windows, "PAGE_SLIDES", 2))
        for owner, name, other in own.patches():
            patched.enter_context(patch.object(owner, name, other))
        world = WindowWorld(random.Random(f"{seed} {setting}"), setting, own)
        try:
            world.play(batches)
        finally:
            world.end()
        return world.played


class Version(NamedTuple):
    """A ledger that was there at some time, and the batches that count under it."""

    record: LedgerRecord
    batches: tuple[Batch, ...]

    @property
    def counted(self) -> tuple[Batch, ...]:
        """Without what an operator has put back, or corrected."""
        return tuple(batch for batch in self.batches if batch.back is None and not batch.corrects)


@dataclass
class State:
    """One of the two states, and its audit: what each attempt had, and what counts under each ledger."""

    name: str
    stored: Stored
    by_txid: dict[int | None, tuple[Batch, ...]] = field(default_factory=lambda: {None: ()})
    by_mark: dict[tuple[int, int, int | None], tuple[Batch, ...]] = field(default_factory=dict)
    attempts: dict[int, Batch] = field(default_factory=dict)
    versions: list[Version] = field(default_factory=list)

    @property
    def newest(self) -> Version | None:
        """The ledger as it is."""
        return self.versions[-1] if self.versions else None


class WindowWorld:
    """One schedule: Spark brings batches, drivers and tasks die or are late, readers read, operators step in."""

    def __init__(self, draw: random.Random, setting: Setting, rules: WindowRules) -> None:
        self.draw = draw
        self.setting = setting
        self.rules = rules
        self.played = Played()
        self.states = [State(name, Stored(setting.store, self._changed)) for name in (WINDOWS, LATE)]
        rules.sessions = setting.sessions
        rules.set_up([state.stored for state in self.states])
        self.actors: list[Actor] = []
        self.readers: list[Actor] = []
        self.left_behind: list[Actor] = []
        self._drivers: list[Driver] = []
        self._correctors: list[Corrector] = []
        self.crashed = False
        self.names = 0
        self.time = 20
        self.clock = 0
        self.least = NEVER
        self.planned = 0
        self.plans: dict[int, int] = {}
        self.spark = 0
        self.reopened = 0
        self._is_rolling_back = False
        self._final: dict[tuple[int, str], tuple[int, ...]] = {}
        self._oracles: dict[tuple[Batch, ...], Oracle] = {}

    # Schedule

    def play(self, batches: int) -> None:
        """So many batches, each until Spark goes on. Raises ViolationError."""
        draw = self.draw
        while self.spark < batches:
            self.time += draw.choice([0, 2, 5, 13])
            self._bring(self.spark, self._rows())
        for reader in list(self.readers):
            self._finish(reader)
        self._check_all()

    def end(self) -> None:
        """End all threads."""
        for actor in self.actors:
            actor.kill()

    def _bring(self, batch_id: int, rows: tuple[Row, ...]) -> None:
        """A batch until Spark's own commit, or until a checkpoint is put back."""
        draw = self.draw
        self._plan(batch_id)
        for attempt in range(40):
            self.clock = max(self.clock, self.time) + draw.choice([0, 1, 7])
            if attempt and draw.random() < 0.6:
                rows = self._rows()  # the replay holds other rows
            older = batch_id > 0 and draw.random() < 0.1  # a checkpoint that lacks the mark of its last batch
            driver = Driver(self, batch_id - older, rows, self.clock)
            steps = draw.choice([1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144])
            self._drivers.append(driver)
            is_killed = attempt < 5 and draw.random() < 0.5
            if self._drive(driver, steps if is_killed else _TOO_LONG, may_die=attempt < 20) and not older:
                break
        else:
            raise ViolationError(f"batch {batch_id} is never counted")
        newest = self.states[0].newest
        counted = () if newest is None else newest.counted
        if not counted or counted[-1].plan != self.plans[batch_id]:
            raise ViolationError(f"Spark goes on, and batch {batch_id} counts as of another plan")
        self.spark = batch_id + 1
        if draw.random() < 0.1:
            self._plan_anew()
        elif draw.random() < 0.1:
            self._roll_back()
        elif draw.random() < 0.2 and not self.setting.sessions:
            self._correct_between()

    def _drive(self, driver: Driver, steps: int, *, may_die: bool) -> bool:
        """True where it came to its end."""
        actor = driver.actor
        for _ in range(steps):
            ready = [one for one in (actor, *driver.tasks) if not one.ended and not one.is_waiting]
            self.draw.choice(ready).step()
            self.played.steps += 1
            if actor.ended:
                break
            if may_die and self._are_apart() and self.draw.random() < 0.3:  # a driver that dies between two commits
                for _ in range(30):
                    self._others()
                break
            self._others()
        for task in driver.tasks:
            self._leave(task)
        if not actor.ended:
            self.crashed = True
            self.played.kills += 1
            self._leave(actor)
            return False
        if actor.error is None:
            return True
        if isinstance(actor.error, FencedError):
            self.played.fenced += 1
            return False
        if isinstance(actor.error, StaleBatchError) and driver.batch_id < self.spark:
            return False  # the checkpoint may be two batches older than the state
        raise ViolationError(f"batch {driver.batch_id}: {type(actor.error).__name__}: {actor.error}") from actor.error

    def _are_apart(self) -> bool:
        """Whether one of the two states counts a batch that the other one lacks."""
        return len({None if state.newest is None else state.newest.counted for state in self.states}) > 1

    def _stop_who_has_not_opened(self) -> None:
        """In front of a checkpoint that is put back: a driver that opens the state behind that has the older one."""
        begins: list[Driver | Corrector] = [*self._drivers, *self._correctors]
        for one in begins:
            if not one.has_opened:
                one.actor.kill()

    def _leave(self, actor: Actor) -> None:
        """A process that ends here, or that nobody waits for any more."""
        if actor.ended or self.draw.random() < 0.5:
            actor.kill()
        else:
            self.left_behind.append(actor)

    def _others(self) -> None:
        draw, dice = self.draw, self.draw.random()
        if dice < 0.06 and len(self.readers) < 3:
            self.readers.append(Reader(self).actor)
        elif dice < 0.065:
            self._advance()
        elif dice < (0.075 if self._is_dragged else 0.07):
            self._put_back()
        elif dice < 0.095 and not self.setting.sessions:
            self._correct()
        elif dice < 0.4 and self.readers:
            self._read_on(draw.choice(self.readers))
        elif dice < 0.55 and self.left_behind:
            actor = draw.choice(self.left_behind)
            if not actor.is_waiting:
                actor.step()
            if actor.ended:
                self.left_behind.remove(actor)
                if isinstance(actor.error, ViolationError):
                    raise actor.error

    def _read_on(self, reader: Actor) -> None:
        reader.step()
        if reader.ended:
            self.readers.remove(reader)
            if reader.error is not None:
                raise ViolationError(f"a reader: {type(reader.error).__name__}: {reader.error}") from reader.error

    def _finish(self, reader: Actor) -> None:
        while reader in self.readers:
            self._read_on(reader)

    def spawn(self, name: str, run: Any) -> Actor:
        """An actor of this world."""
        actor = Actor(name, run)
        self.actors.append(actor)
        return actor

    # Input

    def _rows(self) -> tuple[Row, ...]:
        out = []
        sources = (*self.setting.sources, *(("other",) if len(self.setting.sources) > 1 else ()))
        for _ in range(self.draw.choice([0, 1, 2, 3, 4])):
            self.names += 1
            at = self.time + (self.draw.randint(-14, 8) if self.draw.random() < 0.98 else 70)
            out.append(Row(at, self.draw.choice(USERS), self.draw.choice(sources), self.names))
        return tuple(out)

    def _plan(self, batch_id: int) -> None:
        self.planned += 1
        self.plans[batch_id] = self.planned

    def plan(self, batch_id: int) -> BatchPlan:
        """Spark's plan, as the library sees it: the checkpoint keeps it, so a replay has the same."""
        before = self.plans.get(batch_id - 1)
        return BatchPlan(f"[{batch_id}]", f"[{batch_id + 1}]", self.plans[batch_id], before)

    # Operators

    def _is_undoable(self) -> bool:
        """Whether all states count the last batch, and no attempt has begun behind it."""
        for state in self.states:
            record = None if state.newest is None else state.newest.record
            if record is None or record.last_commit is None or record.in_flight is not None:
                return False
            if (record.next_txid, self.spark) != (record.last_commit.txid + 1, record.last_commit.batch_id + 1):
                return False
        return True

    def _plan_anew(self) -> None:
        """A checkpoint is put back that is one batch older; Spark plans the batch anew, with other rows."""
        if self._is_undoable():
            self._stop_who_has_not_opened()
            self.played.replans += 1
            self.spark -= 1
            self.crashed = True

    def _roll_back(self) -> None:
        """An operator takes the last batch back in all states, and rewinds the checkpoint."""
        if not self._is_undoable():
            return
        self._stop_who_has_not_opened()

        def run(actor: Actor) -> None:
            for state in self.states:
                Ledger(opened(state.stored, actor), state.name).rollback()

        actor = self.spawn("an operator", run)
        self._is_rolling_back = True
        while not actor.ended:
            actor.step()
        self._is_rolling_back = False
        if actor.error is not None:
            raise ViolationError(f"a rollback: {actor.error}") from actor.error
        self.played.rollbacks += 1
        self.spark -= 1
        self.crashed = True

    def _advance(self) -> None:
        """An operator's word for the watermark, in the midst of a batch; mostly it is refused."""
        to = self.time + self.draw.randint(-10, 10)
        take_over = self.draw.random() < 0.3

        def run(actor: Actor) -> None:
            self.crashed |= take_over  # it ends an attempt that may have written
            with suppress(UsageError, FencedError):
                Ledger(opened(self.states[0].stored, actor), WINDOWS).advance(to, take_over=take_over)
                self.least = max(self.least, to)
                self.played.advances += 1

        if self.states[0].newest is not None:
            self.readers.append(self.spawn("an operator", run))

    @property
    def _is_dragged(self) -> bool:
        last = None if self.states[0].newest is None else self.states[0].newest.record.last_windows()
        return last is not None and last.watermark > self.time + 20

    def _put_back(self) -> None:
        """An operator puts the watermark back, in the midst of a batch, as far as it goes; mostly it is refused."""
        to, take_over = self.time - self.draw.randint(0, 25), self.draw.random() < 0.3

        def run(actor: Actor) -> None:
            self.crashed |= take_over
            ledger = Ledger(opened(self.states[0].stored, actor), WINDOWS)
            for further in range(0, 60, 5):  # until no window behind it is gone
                with suppress(UsageError, FencedError):
                    ledger.advance(to + further, take_over=take_over, back_at=10**9)
                    break

        if self.states[0].newest is not None:
            self.readers.append(self.spawn("an operator", run))

    def _correct(self) -> None:
        """An operator adds rows, in the midst of a batch; mostly it is refused."""
        if self.states[0].newest is None:
            return
        self._correctors.append(Corrector(self, self._rows()))
        self.readers.append(self._correctors[-1].actor)

    def _correct_between(self) -> None:
        """An operator adds rows between two batches, and may take that back."""
        correcting = Corrector(self, self._rows()).actor
        while not correcting.ended:
            correcting.step()
        newest = self.states[0].newest
        known = None if newest is None else newest.record.correction
        if correcting.error is not None or known is None or self.draw.random() < 0.5:
            return

        def run(actor: Actor) -> None:
            with suppress(RollbackError):
                Ledger(opened(self.states[0].stored, actor), WINDOWS).rollback(known.txid)
                self.played.taken_back += 1

        self._finish_alone(self.spawn("an operator", run))

    def may_correct(self, record: LedgerRecord) -> bool:
        """Whether nothing that is due would be refused behind a correction."""
        newest = self.states[0].newest
        if newest is None or not newest.counted or record.may_lose_last_batch():
            return False
        return newest.counted[-1].plan == self.plans[newest.counted[-1].batch_id]

    # Audit

    def oracle(self, batches: tuple[Batch, ...]) -> Oracle:
        """What is right when these batches count."""
        if batches not in self._oracles:
            self._oracles[batches] = Oracle(self.setting, batches)
        return self._oracles[batches]

    def _changed(self, stored: Stored) -> None:
        """A ledger was written: what counts under it, and what has to be true at once."""
        state = next(one for one in self.states if one.stored is stored)
        assert stored.ledger is not None
        record = msgspec.json.decode(stored.ledger[0], type=LedgerRecord)
        before = state.newest
        if before is not None and state.name == WINDOWS:
            self._note_reopened(record, before)
        last = record.last_txid
        is_new = last not in state.by_txid
        if is_new:
            assert last is not None
            batch = state.attempts[last]
            if before is not None and any(batch.batch_id == other.batch_id for other in before.counted):
                raise ViolationError(f"batch {batch.batch_id} counts twice in {state.name}")
            state.by_txid[last] = (*(() if before is None else before.batches), batch)
        elif state.name == WINDOWS:
            self._note_put_back(state, record)
        if record.last_commit is not None and record.last_commit.windows is not None:
            done = record.last_commit
            state.by_mark[done.txid, record.last_commit.windows.watermark, last] = state.by_txid[last]
        state.versions.append(Version(record, state.by_txid[last]))
        if is_new and state.name == WINDOWS:
            self._check_commit(record, state.by_txid[last])

    def _note_reopened(self, record: LedgerRecord, before: Version) -> None:
        """What an operator rolls back, or Spark plans anew, opens windows again; nothing else does."""
        if record.operations != before.record.operations:
            self._reopen()
        was, now = before.record.last_commit, record.last_commit
        if was is None or (now is not None and now.txid >= was.txid):
            return
        batch = before.counted[-1]
        if batch.plan != self.plans[batch.batch_id] or self._is_rolling_back:
            self._reopen()

    def _reopen(self) -> None:
        self.reopened += 1
        self._final.clear()

    def final_mark(self, record: LedgerRecord, batches: tuple[Batch, ...]) -> int:
        """Up to where windows are final: the last batch may be rolled back until a batch has begun behind it."""
        last = record.last_commit
        if self.setting.store != "fenced" and last is not None and record.next_txid == last.txid + 1:
            at = max(at for at, batch in enumerate(batches) if batch.back is None)
            batches = (*batches[:at], *batches[at + 1 :])
        return self.oracle(batches).mark

    def saw_final(self, found: dict[tuple[int, str], tuple[int, ...]], reopened: int) -> None:
        """A reader saw these windows as final, and had begun when windows had been reopened so often."""
        if reopened != self.reopened:
            return
        for window, names in found.items():
            if self._final.setdefault(window, names) != names:
                raise ViolationError(f"{window} was final with {self._final[window]}, and is {names}")
            self.played.final += 1

    def _note_put_back(self, state: State, record: LedgerRecord) -> None:
        """If an operator has put the watermark back in this ledger, what counts as of its commits has it put back."""
        before = state.newest
        if before is None or before.record.windows is None or record.windows is None:
            return
        was, least = before.record.windows.least, record.windows.least
        self.least = min(self.least, least) if least < was else self.least
        last, done = before.record.last_windows(), record.last_windows()
        is_other = before.record.next_txid != record.next_txid or before.record.last_txid != record.last_txid
        if is_other or least > was or last is None or done is None or (done == last and least == was):
            return  # a begin, a rollback, an advance
        self._reopen()
        self.played.put_back += 1
        to = least if least < was else done.watermark
        undoable = (record.last_commit, record.correction)
        for txid in {record.last_txid, *(one.last_txid_before for one in undoable if one is not None)} - {None}:
            state.by_txid[txid] = (*state.by_txid[txid], Batch(-1, (), 0, 0, NEVER, to))

    def _check_commit(self, record: LedgerRecord, batches: tuple[Batch, ...]) -> None:
        oracle, done = self.oracle(batches), record.last_windows()
        assert done is not None
        batch = batches[-1]
        if batch.least < self.least and not batch.corrects:
            raise ViolationError(f"batch {batch.batch_id} was advanced to {batch.least}, and not to {self.least}")
        if done.watermark != oracle.mark:
            raise ViolationError(f"batch {batch.batch_id}: the watermark is {done.watermark}, not {oracle.mark}")
        if done.late != len(oracle.late_of_last) and not batch.corrects:
            raise ViolationError(f"batch {batch.batch_id}: {done.late} rows late, not {oracle.late_of_last}")
        self.played.late += done.late
        self.played.corrections += batch.corrects
        self._check_directory(record)

    def _check_directory(self, record: LedgerRecord) -> None:
        """The ledger names every pane that has a value; without crashes also every pane that has a record."""
        assert record.windows is not None
        records, view = self.states[0].stored.records, record.view()

        def read(keys: list[str]) -> list[Any]:
            found = [msgspec.json.decode(records[key]) if key in records else None for key in keys]
            return view.values(found, record.next_txid - 1)

        named = set(pane_index.PanePages(WINDOWS, record.windows, read).named())
        for key, data in records.items():
            if key.startswith(f"{INDEX}@"):
                continue
            pane, (txid, curr, prev) = pane_number(key), msgspec.json.decode(data)
            value = curr if txid in view else prev
            if pane not in named and value is not None and (txid in view or not self.crashed):
                raise ViolationError(f"{key} is left behind: the ledger does not name its pane")
            if pane not in named and not self.crashed and self.setting.store == "fenced":
                raise ViolationError(f"the purge left {key}")

    def emitted(self, record: LedgerRecord, commit: Commit, fired: list[Fired], *, again: bool) -> None:
        """What a driver has passed on."""
        done = commit.windows
        known = self.states[0].by_mark
        batches = None if done is None else known.get((commit.txid, done.watermark, record.last_txid))
        if batches is None:
            if not fired:
                return  # nobody was called
            raise ViolationError(f"batch {commit.batch_id} was passed on and does not count: {fired}")
        assert record.windows is not None
        right = [one for one in self.oracle(batches).fired if one[0] > record.windows.purged]
        if not again and len(right) < len(self.oracle(batches).fired):
            raise ViolationError(f"batch {commit.batch_id}: its windows are gone before they were passed on")
        if fired != right:
            raise ViolationError(f"batch {commit.batch_id} {'again ' * again}fired {fired}, not {right}")
        self.played.fired += len(fired)
        self.played.repeats += again

    def _check_all(self) -> None:
        """In the end both states count the same batches, and each row is in its windows or late."""
        ledgers = [state.newest for state in self.states]
        assert ledgers[0] is not None
        assert ledgers[1] is not None
        if ledgers[0].counted != ledgers[1].counted:
            raise ViolationError("the two states count different batches")
        for user in USERS:
            self._finish_alone(Reader(self, user).actor)
        late: dict[str, list[int]] = {}
        for row in self.oracle(ledgers[0].batches).late:
            late.setdefault(row.user, []).append(row.name)
        actor = self.spawn("a reader", lambda own: values_of(self.states[1], own, USERS))
        self._finish_alone(actor)
        found = dict(zip(USERS, actor.result, strict=True))
        if {user: sorted(names) for user, names in late.items()} != {u: n for u, n in found.items() if n is not None}:
            raise ViolationError(f"late rows are {found}, not {late}")

    def _finish_alone(self, actor: Actor) -> None:
        while not actor.ended:
            actor.step()
        if actor.error is not None:
            raise ViolationError(f"{actor.name}: {type(actor.error).__name__}: {actor.error}") from actor.error
