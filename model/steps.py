"""Every step that can be taken next, by anybody, and what has to be true after each.

Steps are as small as the store makes them: one read or write of the ledger, one claim, one get or put of one key.
Between any two, anybody else may take theirs. A crash is no step: who is dead takes none any more.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from model.drivers import Drivers
from model.operators import Operators
from model.protocol import LOST, STALE, Protocol
from model.readers import Readers
from model.tasks import Tasks
from model.world import Driver, Label, State, ViolationError, World, with_item

__all__ = ["Steps"]

_EXPECTED = {"StateOwnershipError"}


class Steps:
    """The steps of one world under one protocol."""

    def __init__(self, world: World, protocol: Protocol) -> None:
        self.world = world
        self.protocol = protocol
        self._tasks = Tasks(world, protocol)
        self._drivers = Drivers(world, protocol, self._tasks)
        self._operators = Operators(world, protocol, self._tasks)
        self._readers = Readers(world, protocol)
        self._can_finish: dict[tuple[Any, ...], str | None] = {}

    def of(self, state: State) -> Iterator[tuple[Label, State]]:
        """Each step from a state, and the state after it. Raises ViolationError for a step that is wrong in itself."""
        world = self.world
        if len(state.drivers) < len(world.drivers):
            query = world.drivers[len(state.drivers)][0]
            driver = Driver(query, "start", state.checkpoints[query])
            yield ("a driver comes", query), state._replace(drivers=(*state.drivers, driver))
        for at, driver in enumerate(state.drivers):
            if driver.phase != "gone":
                yield from self._drivers.steps(state, at, driver)
        for at, one in enumerate(state.tries):
            if at == 0 or one != state.tries[at - 1]:
                yield from self._tasks.steps(state, at, one)
        for at, (node, before, token) in enumerate(state.late):
            fences = with_item(state.fences, node, self.protocol.raised(state.fences[node], before, token))
            late = (*state.late[:at], *state.late[at + 1 :])
            yield ("arrives late: the fence of key", node, token), state._replace(fences=fences, late=late)
        yield from self._operators.steps(state)
        yield from self._readers.steps(state)

    def check(self, state: State) -> None:
        """Raises ViolationError unless what counts is what has been counted, and somebody can go on."""
        if state.ledger == 0:
            return
        if self.world.loss != "node" or not state.used.losses:  # then each beginning of an attempt is looked at
            self._check_values(state)
        if not state.used.losses:
            self._check_somebody_can_go_on(state)

    def _check_values(self, state: State) -> None:
        protocol = self.protocol
        view, newest = protocol.view(state.ledger), protocol.newest(state.ledger)
        flight = protocol.ledger(state.ledger).in_flight
        for key, record in enumerate(state.records):
            if protocol.type == "transactional" and record and flight and record[0] == flight.txid:
                continue  # of the attempt in flight, which will be finished
            found = protocol.shown(view, newest, record)
            if found != state.truth[key] and not (found in (LOST, STALE) and state.used.losses):
                raise ViolationError(f"key {key} reads as {found} where {state.truth[key]} is right: {record}")

    def _check_somebody_can_go_on(self, state: State) -> None:
        """A driver that comes now, and is left alone, ends its batch; whatever goes on elsewhere."""
        store = (state.ledger, state.fences, state.records, state.claims, state.checkpoints, state.counted)
        if store not in self._can_finish:
            self._can_finish[store] = next(
                (why for query in range(self.world.queries) if (why := self._refuses(state, query))), None
            )
        why = self._can_finish[store]
        if why is not None:
            raise ViolationError(why)

    def _refuses(self, state: State, query: int) -> str | None:
        batch, place = state.checkpoints[query], len(self.world.drivers)
        resets = state.owner not in (None, query) and self.world.policy(place, query) == "reset"
        if batch >= self.world.batches or batch > (0 if resets else state.counted[query]):
            return None  # behind a rollback the checkpoint has to be rewound; with a reset it has to be a new one
        alone = Steps(_unlimited(self.world), self.protocol)
        gone = tuple(driver.gone() for driver in state.drivers)
        gone += (Driver(0, "gone", 0),) * (place - len(gone))
        now = state._replace(
            drivers=(*gone, Driver(query, "start", batch)),
            tries=(),
            vacuums=(),
            reader=None,
            late=(),
            saved=None,
        )
        while now.checkpoints[query] == batch:
            driver = now.drivers[place]
            if driver.phase == "gone":
                return f"batch {batch} of query {query} is refused for ever"
            whose = alone._tasks.steps(now, 0, now.tries[0]) if now.tries else alone._drivers.steps(now, place, driver)
            label, now = next(whose)
            if label[-1] in _EXPECTED:
                return None
        alone._check_values(now)
        return None


def _unlimited(world: World) -> World:
    """The same world for a driver that is alone in it."""
    return replace(world, attempts=1 << 30, copies=0, failures=0, lost_replies=0)
