"""Rolling windows: a state whose values are tiles, an attempt after the other, a vacuum, an operator, and readers.

Ledger, txids and the one rule are the library's own; the arithmetic of tiles is `model.rolling_tiles`. New in the
ledger are the horizon and the definition of the windows. Claims, late writers and other stores are in other worlds:
they do not ask what a value is. So an attempt is one actor here, and one that died is one that has no steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, NamedTuple

from mapstate.schema import StateType
from model.protocol import LOST, STALE, ModelAttempt, Protocol, Record, Refused
from model.rolling_tiles import NEVER, Definition, Row, Tiles, Undo, Window, folded, right, slice_of, undo, undone
from model.world import Label, ViolationError, with_item

__all__ = ["Ledger", "Rolling", "RollingProtocol", "RollingSteps", "Stored"]

Plan = tuple[tuple[int, int], ...]
"""The rows of an attempt: the key of each, and how far it is from where its source is."""


@dataclass(frozen=True, kw_only=True)
class Rolling:
    """A world with rolling windows.

    ``definitions``  with which drivers come; the first one makes the ledger
    ``plans``        what an attempt may bring; attempts have these menus by turns
    ``first``        where clock and source begin
    ``ahead``        rows further than this from the driver's clock are set aside
    ``strides``      how far the clock and the source may go in one step, and how often they do: ``most_strides``
    ``drivers``      that come, ``restarts`` of them with another definition than the ledger's
    ``asked``        the times that a reader asks for, counted from the first that it may ask for. Without any, it asks
                     for all times, and so does an audit of each state
    """

    name: str
    definitions: tuple[Definition, ...]
    plans: tuple[tuple[Plan, ...], ...]
    keys: int = 2
    first: int = 20
    ahead: int = 100
    strides: tuple[tuple[int, int], ...] = ((3, 3),)
    most_strides: int = 2
    batches: int = 3
    attempts: int = 4
    drivers: int = 2
    restarts: int = 0
    vacuums: int = 0
    rollbacks: int = 0
    advances: int = 0
    reads: int = 0
    asked: tuple[int, ...] = ()
    type: StateType = "opaque"

    def start(self) -> _State:
        """Nothing is stored, nobody runs."""
        return _State(Ledger(), (None,) * self.keys, self.first, self.first)


class Ledger(NamedTuple):
    """The library's ledger by its number, and what rolling windows add to it. All of it changes in one write.

    ``marks``  of the last batches, as many as a rollback needs: the watermark after each, the latest row time, the
               horizon at its commit, which only a mutant minds, and the number of keys
    ``least``  the watermark of each later batch, at least, by an operator's word
    """

    number: int = 0
    horizon: int = NEVER
    least: int = NEVER
    definition: int = 0
    marks: tuple[tuple[int, int, int, int], ...] = ()

    @property
    def watermark(self) -> int:
        """After the last batch."""
        return self.marks[-1][0] if self.marks else NEVER

    @property
    def latest(self) -> int:
        """The latest row time of all batches, no later than the clocks of their drivers."""
        return self.marks[-1][1] if self.marks else NEVER

    @property
    def held(self) -> int:
        """The number of keys with a value."""
        return self.marks[-1][3] if self.marks else 0


class Stored(NamedTuple):
    """A record; one without a value is of a key that a vacuum has removed. ``at`` is the clock at its put."""

    txid: int
    value: Tiles | None
    undo: Undo
    at: int


class _Attempt(NamedTuple):
    """An attempt, or a vacuum, whose ``mark`` is None. ``at`` is the next key; it folds at ``horizon``.

    ``added`` is the number of keys that it has given a value for the first time, less those that it has removed.
    """

    txid: int
    ledger: int
    horizon: int
    definition: int
    rows: tuple[Row, ...] = ()
    mark: tuple[int, int] | None = None
    at: int = 0
    added: int = 0


class _Reader(NamedTuple):
    ledger: Ledger
    truth: tuple[tuple[Row, ...], ...]
    found: tuple[Tiles | None, ...] = ()
    is_overtaken: bool = False


class _Used(NamedTuple):
    attempts: int = 0
    drivers: int = 0
    restarts: int = 0
    strides: int = 0
    vacuums: int = 0
    rollbacks: int = 0
    advances: int = 0
    reads: int = 0


class _State(NamedTuple):
    """Everything at one moment.

    ``has_driver``  whether a driver lives that has opened the state; ``attempt`` is its, or a vacuum's
    ``truth``       the audit: the rows of the batches that count, and that were not set aside
    ``highest``     the highest watermark of all attempts, which only a mutant minds
    """

    ledger: Ledger
    records: tuple[Stored | None, ...]
    clock: int
    source: int
    has_driver: bool = False
    attempt: _Attempt | None = None
    reader: _Reader | None = None
    truth: tuple[tuple[Row, ...], ...] = ()
    highest: int = NEVER
    used: _Used = _Used()


class RollingProtocol(Protocol):
    """What rolling windows add to the protocol, one method per question. A mutant answers one of them wrongly."""

    # The horizon

    def horizon(self, ledger: Ledger, definition: Definition, highest: int) -> int:  # noqa: ARG002  mutants ask
        """The horizon after a begin: by the watermark committed before it, or by an operator's word."""
        return max(ledger.horizon, self.due(max(ledger.watermark, ledger.least), definition))

    def due(self, watermark: int, definition: Definition) -> int:
        """The first time that may be asked for at a watermark."""
        return NEVER if watermark == NEVER else definition.floor(watermark - definition.retention)

    def at_commit(self, ledger: Ledger, definition: Definition) -> int:  # noqa: ARG002
        """The horizon after a commit."""
        return ledger.horizon

    def at_rollback(self, before: Ledger, after: Ledger, definition: Definition) -> int:  # noqa: ARG002
        """The horizon after a rollback."""
        return before.horizon

    def may_open(self, ledger: Ledger, own: Definition, other: Definition) -> bool:
        """Whether a driver that brings the other definition is accepted."""
        return own.can_become(other, ledger.horizon)

    # Attempts

    def is_taken(self, time: int, watermark: int) -> bool:  # noqa: ARG002
        """Whether a row of this time goes into its tile, at a committed watermark. However old it is."""
        return True

    def fold_at(self, ledger: Ledger, definition: Definition, watermark: int, clock: int) -> int:  # noqa: ARG002
        """The horizon by which an attempt folds that will have this watermark."""
        return ledger.horizon

    def vacuum_at(self, ledger: Ledger, definition: Definition) -> int:  # noqa: ARG002
        """The horizon by which a vacuum tells whether a key's rows are too old."""
        return ledger.horizon

    def fold_key_at(self, horizon: int, value: Tiles) -> int:  # noqa: ARG002
        """The horizon by which an attempt folds this value."""
        return horizon

    def undo(self, before: Tiles | None, after: Tiles, own: Sequence[int | None]) -> Undo:  # noqa: ARG002
        """What the record keeps of the value before. ``own`` are the tiles of the batch's rows."""
        return undo(before, after)

    def committed_value(self, view: int, newest: int, record: Stored | None) -> Any:
        """The value that counts, for an attempt and for a reader: by the one rule. Or STALE, LOST."""
        return self.shown(view, newest, None if record is None else as_opaque(record))

    removes_at_once = False

    def held(self, ledger: Ledger, added: int) -> int:
        """The number of keys after a vacuum."""
        return ledger.held + added

    def expires(self, record: Stored, clock: int, definition: Definition) -> bool:  # noqa: ARG002
        """Whether the store drops a record by itself."""
        return False

    # Readers

    minds_overtaken = True

    def compared(self, ledger: Ledger) -> tuple[Any, ...]:
        """What a reader compares of the ledger before its read and after it."""
        return self.ledger(ledger.number).contents() if ledger.number else (), ledger.horizon, ledger.definition

    def readable_from(self, ledger: Ledger, definition: Definition) -> int:  # noqa: ARG002
        """The first time that a reader accepts."""
        return ledger.horizon

    def end(self, definition: Definition, time: int) -> int:
        """Where the windows end that a reader answers for a time."""
        return definition.floor(time)

    def answer(self, value: Tiles, window: Window, end: int, until: int) -> Any:
        """A window's aggregates."""
        return slice_of(value, window.begin(end), until)


@lru_cache(1 << 16)
def as_opaque(record: Stored) -> Record:
    """The record as the one rule knows it: with the value before."""
    return record.txid, record.value, undone(record.value or (), record.undo)


class RollingSteps:
    """Every step that can be taken next, and what has to be true after it."""

    def __init__(self, world: Rolling, protocol: RollingProtocol) -> None:
        self.world = world
        self.protocol = protocol
        self._most_rows = max(len(plan) for menu in world.plans for plan in menu)
        self._wrong_answer = cache(self._first_wrong_answer)

    def of(self, state: _State) -> Iterator[tuple[Label, _State]]:
        """Each step, and the state after it."""
        world, used, attempt = self.world, state.used, state.attempt
        if used.drivers < world.drivers:
            yield from self._come(state)
        if attempt is not None:
            yield self._commit(state, attempt) if attempt.at == world.keys else self._put(state, attempt)
        elif used.strides < world.most_strides:
            yield from self._go_on(state)
        if state.has_driver and (attempt is None or attempt.mark is None):
            yield from self._begin(state, state.ledger)
        if state.ledger.number:
            if used.rollbacks < world.rollbacks:
                yield from self._rollback(state)
            if used.vacuums < world.vacuums:
                yield from self._vacuum(state)
            if used.advances < world.advances and attempt is None:
                yield self._advance(state)
            if state.reader is not None or used.reads < world.reads:
                yield self._read(state)

    def check(self, state: _State) -> None:
        """Raise ViolationError if not all readable times give what is right, or the number of keys is another one."""
        ledger = state.ledger
        found = tuple(self._value(ledger.number, record) for record in state.records)
        if ledger.number and not self.world.asked:  # else there are readers: it would take too long
            self._check_answers(ledger, state.truth, found, "reads as")
        if ledger.marks and ledger.held != len(found) - found.count(None):
            raise ViolationError(f"the ledger says {ledger.held} keys, and these have values: {found}")

    # The driver

    def _come(self, state: _State) -> Iterator[tuple[Label, _State]]:
        """A driver: the first one, a restart, or one that takes over. It opens the state with its first begin."""
        world, ledger = self.world, state.ledger
        own = world.definitions[ledger.definition]
        for number, definition in enumerate(world.definitions):
            is_other = number != ledger.definition
            if is_other and (state.used.restarts == world.restarts or not ledger.number):
                continue
            used = state.used._replace(restarts=state.used.restarts + is_other)
            if is_other and not self.protocol.may_open(ledger, own, definition):
                yield ("StateSchemaError", "for a driver with definition", number), state._replace(used=used)
                continue
            used = used._replace(drivers=used.drivers + 1)
            yield from self._begin(state._replace(used=used), ledger._replace(definition=number), comes=True)

    def _begin(self, state: _State, ledger: Ledger, *, comes: bool = False) -> Iterator[tuple[Label, _State]]:
        world, protocol, used = self.world, self.protocol, state.used
        batch, serial = len(state.truth), used.attempts
        if batch == world.batches or serial == world.attempts:
            return
        if comes:
            answer = protocol.open_and_begin(ledger.number, 0, used.drivers, batch, "refuse", 1, serial)
        else:
            answer = protocol.begin(ledger.number, used.drivers, batch, serial)
        if not isinstance(answer, ModelAttempt):
            raise ViolationError(f"batch {batch} is refused: {answer}")
        definition = world.definitions[ledger.definition]
        horizon = protocol.horizon(ledger, definition, state.highest)
        after = ledger._replace(number=answer.ledger, horizon=horizon)
        name = ("a driver comes with definition", ledger.definition, "and begins") if comes else ("begins",)
        for plan in world.plans[serial % len(world.plans)]:
            rows = self._rows(plan, state)
            attempt = self._attempt(answer, after, rows, state.clock)
            assert attempt.mark is not None
            yield (
                (*name, f"batch {batch} as txid {answer.txid} with", rows or "no rows"),
                state._replace(
                    ledger=after,
                    has_driver=True,
                    attempt=attempt,
                    highest=max(state.highest, attempt.mark[0]),
                    used=used._replace(attempts=serial + 1),
                ),
            )

    def _rows(self, plan: Plan, state: _State) -> tuple[Row, ...]:
        """The rows of a plan that are not set aside."""
        first = self._most_rows * state.used.attempts
        rows = [Row(key, state.source + off, (-3) ** (first + at)) for at, (key, off) in enumerate(plan)]
        return tuple(row for row in rows if row.time <= state.clock + self.world.ahead)

    def _attempt(self, answer: ModelAttempt, ledger: Ledger, rows: tuple[Row, ...], clock: int) -> _Attempt:
        definition = self.world.definitions[ledger.definition]
        latest = max([ledger.latest, *(min(row.time, clock) for row in rows)])
        watermark = max(ledger.watermark, ledger.least, NEVER if latest == NEVER else latest - definition.lag)
        horizon = self.protocol.fold_at(ledger, definition, watermark, clock)
        return _Attempt(answer.txid, answer.ledger, horizon, ledger.definition, rows, (watermark, latest))

    def _put(self, state: _State, attempt: _Attempt) -> tuple[Label, _State]:
        """The next key, if there is anything to put. A late writer is refused: the attempt's own fence is the last."""
        key, record = attempt.at, state.records[attempt.at]
        after = state._replace(attempt=attempt._replace(at=key + 1))
        taken = [row for row in attempt.rows if self.protocol.is_taken(row.time, state.ledger.watermark)]
        rows = tuple(row for row in taken if row.key == key)
        value = self._value(attempt.ledger, record)
        if attempt.mark is None:
            return self._sweep(after, attempt, key, value)
        if not rows:
            return ("has nothing for key", key), after
        definition = self.world.definitions[attempt.definition]
        horizon = self.protocol.fold_key_at(attempt.horizon, value or ())
        new = folded(definition, horizon, value or (), rows)
        before = self.protocol.undo(value, new, [definition.tile(row.time, horizon) for row in rows])
        after = after._replace(attempt=attempt._replace(at=key + 1, added=attempt.added + (value is None)))
        return self._stored(after, key, Stored(attempt.txid, new, before, state.clock))

    def _stored(self, state: _State, key: int, record: Stored) -> tuple[Label, _State]:
        starts = tuple(start for start, _ in record.value or ())
        return ("puts key", key, "with tiles at", starts), state._replace(records=with_item(state.records, key, record))

    def _value(self, ledger: int, record: Stored | None) -> Tiles | None:
        """What counts of a record, for an attempt, a vacuum and the audit."""
        if not ledger:
            return None
        found = self.protocol.committed_value(self.protocol.view(ledger), self.protocol.newest(ledger), record)
        if found in (STALE, LOST):
            raise ViolationError(f"{found}: {record}")
        return found  # type: ignore[no-any-return]

    def _commit(self, state: _State, attempt: _Attempt) -> tuple[Label, _State]:
        ledger, batch = state.ledger, len(state.truth)
        if attempt.mark is None:
            answer = self.protocol.commit_vacuum(ledger.number, attempt.txid, fenced=True)
        else:
            answer = self.protocol.commit(ledger.number, state.used.drivers, 0, batch, attempt.txid)
        if isinstance(answer, Refused):
            raise ViolationError(f"txid {attempt.txid} is not committed: {answer}")
        if attempt.mark is None:
            held = self.protocol.held(ledger, attempt.added)
            marks = tuple((*mark[:3], held) if mark is ledger.marks[-1] else mark for mark in ledger.marks)
            return ("the vacuum ends",), state._replace(
                ledger=ledger._replace(number=answer, marks=marks), attempt=None
            )
        last = (*attempt.mark, ledger.horizon, ledger.held + attempt.added)
        after = ledger._replace(number=answer, marks=(*ledger.marks[-1:], last))
        after = after._replace(horizon=self.protocol.at_commit(after, self.world.definitions[after.definition]))
        return (
            ("commits", f"batch {batch}", "with watermark", after.watermark),
            state._replace(ledger=after, attempt=None, truth=(*state.truth, attempt.rows)),
        )

    def _go_on(self, state: _State) -> Iterator[tuple[Label, _State]]:
        definition = self.world.definitions[state.ledger.definition]
        for by_clock, by_source in self.world.strides:
            clock = state.clock + by_clock
            records = tuple(
                None if record is None or self.protocol.expires(record, clock, definition) else record
                for record in state.records
            )
            source = min(clock, state.source + by_source)
            used = state.used._replace(strides=state.used.strides + 1)
            label = ("time goes on, by clock and source to", clock, source)
            yield label, state._replace(clock=clock, source=source, records=records, used=used)

    # Operators

    def _rollback(self, state: _State) -> Iterator[tuple[Label, _State]]:
        """The last batch is taken back, and the checkpoint rewound. Only if nothing has begun since."""
        ledger = state.ledger
        answer = self.protocol.rollback(ledger.number)
        if isinstance(answer, Refused):
            return
        after = ledger._replace(number=answer, marks=ledger.marks[:-1])
        horizon = self.protocol.at_rollback(ledger, after, self.world.definitions[ledger.definition])
        used = state.used._replace(rollbacks=state.used.rollbacks + 1)
        yield (
            ("the last batch is rolled back",),
            state._replace(
                ledger=after._replace(horizon=horizon),
                has_driver=False,
                attempt=None,
                truth=state.truth[:-1],
                used=used,
            ),
        )

    def _advance(self, state: _State) -> tuple[Label, _State]:
        """An operator says that the stream is as far as the clock."""
        used = state.used._replace(advances=state.used.advances + 1)
        ledger = state.ledger._replace(least=max(state.ledger.least, state.clock))
        return ("the watermark is advanced to", state.clock), state._replace(ledger=ledger, used=used)

    def _vacuum(self, state: _State) -> Iterator[tuple[Label, _State]]:
        """It settles orphaned records, and removes idle keys. It takes over from an attempt that does not go on."""
        ledger, used = state.ledger, state.used._replace(vacuums=state.used.vacuums + 1)
        takes_over = self.protocol.has_attempt_at_work(ledger.number)
        answer = self.protocol.begin_vacuum(ledger.number, used.vacuums, take_over=takes_over)
        if not isinstance(answer, ModelAttempt):
            raise ViolationError(f"a vacuum is refused: {answer}")
        definition = self.world.definitions[ledger.definition]
        horizon = self.protocol.vacuum_at(ledger, definition)
        yield (
            ("a vacuum begins", answer.txid, "by taking over" if takes_over else ""),
            state._replace(
                ledger=ledger._replace(number=answer.ledger),
                has_driver=state.has_driver and not takes_over,
                attempt=_Attempt(answer.txid, answer.ledger, horizon, ledger.definition),
                used=used,
            ),
        )

    def _sweep(self, state: _State, vacuum: _Attempt, key: int, value: Tiles | None) -> tuple[Label, _State]:
        """A key whose rows are too old has no value from the vacuum's end on; the next vacuum removes its record."""
        record = state.records[key]
        removed = state._replace(records=with_item(state.records, key, None))
        if value is None:
            return ("the vacuum", "has nothing for" if record is None else "removes", "key", key), removed
        if not folded(self.world.definitions[vacuum.definition], vacuum.horizon, value):
            attempt = vacuum._replace(at=key + 1, added=vacuum.added - 1)
            if self.protocol.removes_at_once:
                return ("the vacuum removes", "key", key), removed._replace(attempt=attempt)
            gone = Stored(vacuum.txid, None, undo(value, ()), state.clock)
            records = with_item(state.records, key, gone)
            return ("the vacuum gives no value to key", key), state._replace(records=records, attempt=attempt)
        if record is not None and record.txid in self.protocol.ledger(vacuum.ledger).view():
            return ("the vacuum", "has nothing for", "key", key), state
        return self._stored(state, key, Stored(vacuum.txid, value, undo(value, value), state.clock))

    # Readers

    def _read(self, state: _State) -> tuple[Label, _State]:
        """A reader's next step: the ledger, each key, the ledger again."""
        reader, protocol, used = state.reader, self.protocol, state.used
        if reader is None:
            return ("reads the ledger",), state._replace(reader=_Reader(state.ledger, state.truth))
        key = len(reader.found)
        if key < self.world.keys:
            number = reader.ledger.number
            newest = protocol.newest(number) if protocol.minds_overtaken else 1 << 62
            found = protocol.committed_value(protocol.view(number), newest, state.records[key])
            after = reader._replace(
                found=(*reader.found, None if found == STALE else found),
                is_overtaken=reader.is_overtaken or found == STALE,
            )
            return ("reads key", key), state._replace(reader=after)
        if reader.is_overtaken or protocol.compared(reader.ledger) != protocol.compared(state.ledger):
            return ("reads the ledger again, and starts over",), state._replace(reader=None)
        self._check_answers(reader.ledger, reader.truth, reader.found, "is read as", used.reads)
        used = used._replace(reads=used.reads + 1)
        return ("reads the ledger again",), state._replace(reader=None, used=used)

    def _check_answers(
        self,
        ledger: Ledger,
        truth: tuple[tuple[Row, ...], ...],
        found: tuple[Tiles | None, ...],
        verb: str,
        number: int = 0,
    ) -> None:
        definition = self.world.definitions[ledger.definition]
        since = self.protocol.readable_from(ledger, definition)
        if ledger.marks and since > max(ledger.watermark, ledger.least):
            raise ViolationError(f"no read as of the watermark {ledger.watermark}: the first readable time is {since}")
        for key, value in enumerate(found):
            rows = tuple(row for batch in truth for row in batch if row.key == key)
            wrong = self._wrong_answer(definition, since, ledger.latest, rows, value, number)
            if wrong is not None:
                raise ViolationError(f"key {key} {verb} {wrong}")

    def _first_wrong_answer(
        self,
        definition: Definition,
        since: int,
        latest: int,
        rows: tuple[Row, ...],
        value: Tiles | None,
        number: int,
    ) -> str | None:
        """Every window as of each time, and live: from what is stored, and from the rows."""
        if not rows and not value:
            return None
        protocol, unit = self.protocol, definition.unit
        times, clocks = self._times(definition, since, latest, rows, number)
        asked = [(time, definition.floor(time), protocol.end(definition, time), 0) for time in times]
        asked += [(clock, definition.floor(clock), definition.floor(clock), unit) for clock in clocks]
        for time, end, answered, more in asked:
            for window in definition.windows:
                expected = right(rows, window, end, end + more)
                got = protocol.answer(value or (), window, answered, answered + more)
                if got != expected:
                    how = "live at" if more else "as of"
                    return f"{got} {how} {time} where {expected} is right, in {window}"
        return None

    def _times(
        self, definition: Definition, since: int, latest: int, rows: tuple[Row, ...], number: int
    ) -> tuple[Sequence[int], Sequence[int]]:
        """The times that are asked for, and the clocks of live reads."""
        world = self.world
        longest = max(window.length or 0 for window in definition.windows)
        first = max(since, min((row.time for row in rows), default=latest) - 1)
        if not world.asked:
            last = max([latest, first, *(row.time for row in rows)]) + longest + 2 * definition.unit
            return range(first, last), range(max(latest, first), last)
        own = [world.asked[(number + at) % len(world.asked)] for at in range(4)]
        times = [
            first,
            first + own[0],
            first + own[1],
            max(first, latest - own[2]),
            max(first, latest - definition.lag),
        ]
        return times, [latest, latest + own[3]]
