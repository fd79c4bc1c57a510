"""The steps of tasks: a claim, gets and puts by turns, a report."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mapstate.capabilities import FenceToken
from model.protocol import Protocol, Refused
from model.world import Driver, Label, State, Try, World, with_item

__all__ = ["Tasks"]


class Tasks:
    """What a try of a task may do next. See `mapstate.spark.executor.task`."""

    def __init__(self, world: World, protocol: Protocol) -> None:
        self.world = world
        self.protocol = protocol

    def new(self, at: int, driver: Driver, partition: int, plan: tuple[int, ...], holder: int = 0) -> Try:
        """A try of a task, of the attempt of the driver in place ``at``."""
        world = self.world
        unit = driver.query * 4 + driver.batch if world.type == "transactional" else 2 * driver.serial + holder
        operations = world.operations(plan, partition, 4**unit, twice=self.protocol.writes_keys_twice)
        assert driver.token is not None
        return Try(
            *(at, driver.serial, driver.txid, driver.view, driver.token, partition, holder, operations),
            at=0 if self.protocol.has_to_claim(empty=not operations) else 1,
        )

    def steps(self, state: State, at: int, one: Try) -> Iterator[tuple[Label, State]]:
        """Each step of one try, and the state after it."""
        who = f"task {one.partition}/{one.holder} of txid {one.txid}"
        if one.at == 0:
            yield self._claim(state, at, one, who)
            return
        place, is_put = divmod(one.at - 1, 2)
        if place == len(one.operations):
            yield (who, "reports"), self._report(state, at, one, one.operations)
        elif is_put:
            yield from self._put(state, at, one, place, who)
        else:
            yield from self._get(state, at, one, one.operations[place][0], who)

    def _claim(self, state: State, at: int, one: Try, who: str) -> tuple[Label, State]:
        held = next((held for txid, place, held in state.claims if (txid, place) == (one.txid, one.partition)), None)
        if held is not None:
            return (who, "loses its claim"), self._report(state, at, one, "lost")
        claims = tuple(sorted((*state.claims, (one.txid, one.partition, one.holder))))
        return (who, "claims"), state._replace(claims=claims).with_try(at, one._replace(at=1))

    def _get(self, state: State, at: int, one: Try, key: int, who: str) -> Iterator[tuple[Label, State]]:
        if not self.may_write(state, one.token, key):
            yield (who, "is fenced at the get of key", key), self._report(state, at, one, None)
            return
        after = one._replace(at=one.at + 1, read=state.records[key])
        yield (who, "gets key", key), state.with_try(at, after)

    def may_write(self, state: State, token: FenceToken | None, key: int) -> bool:
        """What the store says to a put of one key; also to the get before it."""
        if self.world.store == "filtered" or token is None:
            return True
        fence = state.fences[key] if self.world.store == "cluster" else self.protocol.fence(state.ledger)
        return self.protocol.may_write(fence, token)

    def _put(self, state: State, at: int, one: Try, place: int, who: str) -> Iterator[tuple[Label, State]]:
        key, operation = one.operations[place]
        record = self.protocol.applied(one.view, one.txid, one.read, operation)
        if isinstance(record, Refused):
            yield (who, record.error, "at key", key), self._report(state, at, one, None)
            return
        after = one._replace(at=one.at + 1, read=None)
        if record is None:
            yield (who, "has key in already", key), state.with_try(at, after)
            return
        allowed = self.may_write(state, one.token, key) and (
            self.world.store != "filtered" or self.protocol.may_replace(state.records[key], one.txid)
        )
        if not allowed:
            yield (who, "is refused the put of key", key), self._report(state, at, one, None)
            return
        records = with_item(state.records, key, self.protocol.stored(record))
        yield (who, "puts key", key, record), state._replace(records=records).with_try(at, after)

    def _report(self, state: State, at: int, one: Try, report: Any) -> State:
        """The end of a try: done (its operations), "lost", or None for an error. Only its driver's attempt hears it."""
        state = state._replace(tries=state.tries[:at] + state.tries[at + 1 :])
        driver = state.drivers[one.driver]
        if driver.phase != "run" or driver.serial != one.serial or driver.reports[one.partition] is not None:
            return state
        after = (
            driver.gone()
            if report is None
            else driver._replace(reports=with_item(driver.reports, one.partition, report))
        )
        return state.with_driver(one.driver, after)
