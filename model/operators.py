"""The steps of operators, vacuum and rollback, and what a store may do to us."""

from __future__ import annotations

from collections.abc import Iterator

from model.protocol import ModelAttempt, Protocol, Refused
from model.tasks import Tasks
from model.world import Label, State, Used, Vacuum, ViolationError, World, with_item

__all__ = ["Operators"]


class Operators:
    """Vacuum, rollback, losses and expiry."""

    def __init__(self, world: World, protocol: Protocol, tasks: Tasks) -> None:
        self.world = world
        self.protocol = protocol
        self._tasks = tasks

    def steps(self, state: State) -> Iterator[tuple[Label, State]]:
        """Each of these steps, and the state after it."""
        world, used = self.world, state.used
        for at, vacuum in enumerate(state.vacuums):
            yield from self._vacuum(state, at, vacuum)
        if state.ledger == 0:
            return
        if used.vacuums < world.vacuums:
            yield from self._begin_vacuum(state)
        if used.rollbacks < world.rollbacks:
            yield from self._rollback(state)
        if used.losses < world.losses:
            yield from self._loss(state)
        if used.expiries < world.expiries:
            yield from self._expiry(state)

    def _begin_vacuum(self, state: State) -> Iterator[tuple[Label, State]]:
        used = state.used._replace(vacuums=state.used.vacuums + 1)
        reading = Vacuum(0, self.protocol.view(state.ledger), None, used.losses, seen=state.ledger)
        if self.protocol.may_look(state.ledger, fenced=self.world.store != "filtered"):
            yield ("a vacuum reads",), state._replace(vacuums=(*state.vacuums, reading), used=used)
        for take_over in (False, True):
            answer = self.protocol.begin_vacuum(state.ledger, used.vacuums, take_over=take_over)
            if isinstance(answer, ModelAttempt):
                vacuum = Vacuum(answer.txid, answer.view, answer.token, used.losses, state.incarnations)
                yield (
                    ("a vacuum begins", answer.txid, "by taking over" if take_over else ""),
                    state._replace(ledger=answer.ledger, vacuums=(*state.vacuums, vacuum), used=used),
                )

    def _read(self, state: State, at: int, vacuum: Vacuum) -> Iterator[tuple[Label, State]]:
        """It reads one key after the other, and forgets what is dead where there is nothing to rewrite."""
        if vacuum.at < self.world.keys:
            record = state.records[vacuum.at]
            newest, everything = self.protocol.newest(vacuum.seen) + 1, self.world.store == "filtered"
            due = record is not None and self.protocol.swept(vacuum.view, newest, record, everything=everything)
            if not due:
                yield ("the vacuum reads key", vacuum.at), state.with_vacuum(at, vacuum.next())
            return  # else it begins an attempt, as it can without having looked
        answer = self.protocol.forget_dead(state.ledger, vacuum.seen) if state.ledger else Refused("StoreLostError")
        if not isinstance(answer, Refused):
            state = state._replace(ledger=answer)
        yield ("the vacuum finds nothing to rewrite",), state.with_vacuum(at, None)

    def _vacuum(self, state: State, at: int, vacuum: Vacuum) -> Iterator[tuple[Label, State]]:
        if vacuum.seen:
            yield from self._read(state, at, vacuum)
            return
        keys = self.world.keys
        fences = keys if self.world.store == "cluster" and vacuum.token is not None else 0
        if vacuum.at < fences:
            assert vacuum.token is not None
            fence = state.fences[vacuum.at]
            raised = self.protocol.raised(fence, fence, vacuum.token)
            after = state._replace(fences=with_item(state.fences, vacuum.at, raised))
            yield ("the vacuum raises the fence of key", vacuum.at), after.with_vacuum(at, vacuum.next())
            return
        key, is_put = divmod(vacuum.at - fences, 2)
        closing = vacuum.at - fences - 2 * keys
        closes = fences if self.protocol.closes_fences else 0
        if 0 <= closing < closes:
            assert vacuum.token is not None
            same = state.fences[closing] == vacuum.token and state.incarnations[closing] == vacuum.incarnations[closing]
            closed = with_item(state.fences, closing, vacuum.token._replace(closed=True)) if same else state.fences
            after = state._replace(fences=closed).with_vacuum(at, vacuum.next() if same else None)
            yield ("the vacuum closes the fence of key", closing, "" if same else "in vain"), after
            return
        if closing == closes:
            fenced = self.world.store != "filtered"
            if state.ledger and self.protocol.may_commit(begun_in=vacuum.incarnation, now=state.used.losses):
                answer = self.protocol.commit_vacuum(state.ledger, vacuum.txid, fenced=fenced)
                if not isinstance(answer, Refused):
                    state = state._replace(ledger=answer)
            yield ("the vacuum ends",), state.with_vacuum(at, None)
        elif not self._tasks.may_write(state, vacuum.token, key):
            yield ("the vacuum is fenced",), state.with_vacuum(at, None)
        elif not is_put:
            yield ("the vacuum gets key", key), state.with_vacuum(at, vacuum.next(state.records[key]))
        else:
            yield ("the vacuum puts key", key), self._sweep(state, at, vacuum, key)

    def _sweep(self, state: State, at: int, vacuum: Vacuum, key: int) -> State:
        filtered = self.world.store == "filtered"
        after = state.with_vacuum(at, vacuum.next())
        if vacuum.read is None:
            return after
        swept = self.protocol.swept(vacuum.view, vacuum.txid, vacuum.read, everything=filtered)
        if swept is None:
            return after
        if filtered and not self.protocol.may_replace(state.records[key], vacuum.txid):
            return state.with_vacuum(at, None)
        return after._replace(records=with_item(state.records, key, None if isinstance(swept, str) else swept))

    def _rollback(self, state: State) -> Iterator[tuple[Label, State]]:
        """An operator takes the last batch back, and rewinds the checkpoint with it."""
        answer = self.protocol.rollback(state.ledger)
        if isinstance(answer, Refused):
            return
        if not state.history:
            raise ViolationError("a rollback where no batch counts")
        truth, query, batch = state.history[-1]
        yield (
            ("the last batch is rolled back",),
            state._replace(
                ledger=answer,
                claims=state.claims if self.world.store == "filtered" else (),
                truth=truth,
                history=state.history[:-1],
                counted=with_item(state.counted, query, batch),
                checkpoints=with_item(state.checkpoints, query, min(state.checkpoints[query], batch)),
                used=state.used._replace(rollbacks=state.used.rollbacks + 1),
            ),
        )

    def _loss(self, state: State) -> Iterator[tuple[Label, State]]:
        used = state.used._replace(losses=state.used.losses + 1)
        nobody = (None,) * self.world.keys
        gone = state._replace(
            ledger=0, truth=nobody, history=(), counted=(0,) * self.world.queries, owner=None, used=used
        )
        if self.world.loss == "node":
            yield from self._node_loss(state, used)
        elif self.world.loss == "ledger":
            yield ("the ledger is lost",), gone
        elif self.world.loss == "flush":
            yield (
                ("the store is emptied",),
                gone._replace(records=nobody, fences=(None,) * len(state.fences), claims=()),
            )
        elif state.saved is None:
            saved = tuple(getattr(state, name) for name in _SAVED)
            yield ("a copy of the store is made",), state._replace(saved=saved)
        else:
            back = dict(zip(_SAVED, state.saved, strict=True))
            yield ("the copy is put back",), state._replace(**back, reader=None, used=used)

    def _node_loss(self, state: State, used: Used) -> Iterator[tuple[Label, State]]:
        """A replica that lagged behind takes the place of the node with one key, its record and its fence."""
        if state.saved is None:
            for key, own in enumerate(zip(state.records, state.fences, strict=True)):
                yield ("the replica of the node lags behind here, key", key), state._replace(saved=(key, *own))
            return
        key, record, fence = state.saved
        yield (
            ("fails over: the node of key", key),
            state._replace(
                records=with_item(state.records, key, record),
                fences=with_item(state.fences, key, fence),
                incarnations=with_item(state.incarnations, key, state.incarnations[key] + 1),
                saved=None,
                used=used,
            ),
        )

    def _expiry(self, state: State) -> Iterator[tuple[Label, State]]:
        """A record that counts, and that nobody is working on, reaches the end of its ttl."""
        used = state.used._replace(expiries=state.used.expiries + 1)
        view = self.protocol.view(state.ledger)
        for key, record in enumerate(state.records):
            busy = any(key == of for one in state.tries if one.at > 1 for of, _ in one.operations)
            if record is not None and not busy and self.protocol.shown(view, record[0], record) == record[1]:
                yield (
                    ("expires: key", key),
                    state._replace(
                        records=with_item(state.records, key, None),
                        truth=with_item(state.truth, key, None),
                        history=tuple(
                            (with_item(truth, key, None), query, batch) for truth, query, batch in state.history
                        ),
                        used=used,
                    ),
                )


_SAVED = ("ledger", "fences", "records", "claims", "truth", "history", "counted", "owner")
