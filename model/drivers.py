"""The steps of drivers: what begins, commits and is begun anew."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from model.protocol import REMOVE, ModelAttempt, Protocol, Refused
from model.tasks import Tasks
from model.world import Driver, Label, State, ViolationError, World, with_item

__all__ = ["Drivers"]


class Drivers:
    """What a driver may do next. See `mapstate.spark.driver.batch`."""

    def __init__(self, world: World, protocol: Protocol, tasks: Tasks) -> None:
        self.world = world
        self.protocol = protocol
        self._tasks = tasks

    def steps(self, state: State, at: int, driver: Driver) -> Iterator[tuple[Label, State]]:
        """Each step of one driver, and the state after it."""
        if driver.phase in ("start", "idle"):
            yield from self._begin(state, at, driver)
        elif driver.phase == "raise":
            yield from self._raise_fence(state, at, driver)
        elif driver.phase == "run":
            yield from self._run(state, at, driver)
        elif driver.phase == "close":
            yield from self._close_fence(state, at, driver)
        elif driver.phase == "committed":
            query, batch = driver.query, driver.batch
            checkpoints = with_item(state.checkpoints, query, max(state.checkpoints[query], batch + 1))
            yield (
                (f"driver {at}", "Spark's own commit of batch", batch),
                state._replace(checkpoints=checkpoints).with_driver(at, driver._replace(phase="idle", batch=batch + 1)),
            )

    def _begin(self, state: State, at: int, driver: Driver) -> Iterator[tuple[Label, State]]:
        """`Ledgers.open_and_begin`, or `Ledgers.begin` of a later batch."""
        world, used = self.world, state.used
        if driver.batch >= world.batches or used.attempts >= world.attempts:
            return
        label = (f"driver {at}", "begins batch", driver.batch)
        if driver.phase == "start":
            policy = world.policy(at, driver.query)
            incarnation = 1 if world.clock_stands else 1 + used.losses
            answer = self.protocol.open_and_begin(
                state.ledger, driver.query, at, driver.batch, policy, incarnation, used.attempts
            )
            made = state.ledger == 0 and not isinstance(answer, Refused)
            if made and not self.protocol.may_make_ledger(state.records):
                answer = Refused("LedgerLostError")
            if not isinstance(answer, Refused):
                state = self._owned(state, driver.query, policy)
        elif state.ledger == 0:
            answer = Refused("StoreLostError")
        else:
            answer = self.protocol.begin(state.ledger, at, driver.batch, used.attempts)
        yield from self._begun(state, at, driver, answer, label)

    def _owned(self, state: State, query: int, policy: str) -> State:
        """The audit of an opening: a reset by a new owner starts empty, and no batch of any query counts."""
        if state.owner not in (None, query) and policy == "reset":
            nothing = (None,) * self.world.keys
            state = state._replace(truth=nothing, history=(), counted=(0,) * self.world.queries)
            if self.protocol.reset_deletes:
                state = state._replace(records=(None,) * self.world.keys)
        return state._replace(owner=query)

    def _all_intact(self, state: State, last: int | None) -> bool:
        return all(self.protocol.is_intact(fence, last) for fence in state.fences)

    def _begun(self, state: State, at: int, driver: Driver, answer: Any, label: Label) -> Iterator[tuple[Label, State]]:
        world, used = self.world, state.used
        if isinstance(answer, Refused):
            yield (*label, answer.error), state.with_driver(at, driver.gone())
            return
        if isinstance(answer, ModelAttempt) and not self._all_intact(state, self.protocol.last(answer.view)):
            yield (*label, "MissingBatchesError"), state.with_driver(at, driver.gone())
            return
        number = answer if isinstance(answer, int) else answer.ledger
        claims = state.claims if world.store != "fenced" or number == state.ledger else ()
        if isinstance(answer, int):
            if state.counted[driver.query] <= driver.batch and not used.rollbacks + used.losses:
                batch = f"batch {driver.batch} of query {driver.query}"
                raise ViolationError(f"Spark goes on behind {batch}, which does not count")
            after = state._replace(ledger=number, claims=claims)
            yield (*label, "committed already"), after.with_driver(at, driver._replace(phase="committed", reports=()))
            return
        used = used._replace(attempts=used.attempts + 1)
        written = state._replace(ledger=number, claims=claims, used=used)
        if used.lost_replies < world.lost_replies:
            again = used._replace(lost_replies=used.lost_replies + 1)
            yield (*label, "and gets no reply"), written._replace(used=again).with_driver(at, driver)
        after_begin = driver._replace(
            phase="raise" if world.store == "cluster" else "run",
            serial=used.attempts,
            txid=answer.txid,
            view=answer.view,
            token=answer.token,
            raised=0,
            reports=(None,) * world.tasks,
            incarnation=used.losses if world.loss != "node" else 0,
            incarnations=state.incarnations,
        )
        if after_begin.phase == "raise":
            yield (*label, answer.txid), written.with_driver(at, after_begin)
        else:
            yield from self._launched(written, at, after_begin, (*label, answer.txid))

    def _raise_fence(self, state: State, at: int, driver: Driver) -> Iterator[tuple[Label, State]]:
        assert driver.token is not None
        node = driver.raised
        used, fence = state.used, state.fences[node]
        if not self.protocol.is_intact(fence, self.protocol.last(driver.view)):
            yield (f"driver {at}", "finds that a node lost a batch, key", node), state.with_driver(at, driver.gone())
            return
        if used.lost_replies < self.world.lost_replies:
            late = (*state.late, (node, fence, driver.token))
            again = state._replace(late=late, used=used._replace(lost_replies=used.lost_replies + 1))
            yield (f"driver {at}", "gets no reply to the fence of key", node), again
        raised = self.protocol.raised(fence, fence, driver.token)
        state = state._replace(fences=with_item(state.fences, node, raised))
        incarnations = with_item(driver.incarnations, node, state.incarnations[node])
        driver = driver._replace(raised=node + 1, incarnations=incarnations)
        label = (f"driver {at}", "raises the fence of key", node)
        if driver.raised < self.world.keys:
            yield label, state.with_driver(at, driver)
        else:
            yield from self._launched(state, at, driver._replace(phase="run"), label)

    def _launched(self, state: State, at: int, driver: Driver, label: Label) -> Iterator[tuple[Label, State]]:
        """The first try of each task; an opaque attempt may hold anything."""
        world = self.world
        if world.loss == "node" and self.protocol.fence(state.ledger) == driver.token:
            incarnations = zip(driver.incarnations, state.incarnations, strict=True)
            may_commit = all(self.protocol.may_commit(begun_in=then, now=now) for then, now in incarnations)
            if may_commit:
                self._check_nothing_is_lost(state)
        plans = world.plans
        if world.type == "transactional":
            plans = (plans[driver.batch % len(plans)],)
        for plan in plans:
            tries = [self._tasks.new(at, driver, partition, plan) for partition in range(world.tasks)]
            yield (*label, "with", plan), state.with_driver(at, driver).with_tries(*tries)

    def _run(self, state: State, at: int, driver: Driver) -> Iterator[tuple[Label, State]]:
        world, used = self.world, state.used
        lost = "lost" in driver.reports
        if not lost and None not in driver.reports:
            if world.store == "cluster" and self.protocol.closes_fences:
                yield from self._close_fence(state, at, driver._replace(phase="close", raised=0))
            else:
                yield from self._commit(state, at, driver)
            return
        if (lost or used.failures < world.failures) and used.attempts < world.attempts:
            again = state if lost else state._replace(used=used._replace(failures=used.failures + 1))
            yield from self._begin_anew(again, at, driver, (f"driver {at}", "begins anew batch", driver.batch))
        if used.surrenders < world.surrenders:
            given_up = self.protocol.give_up(state.ledger, at) if state.ledger else 0
            after = state._replace(ledger=given_up, used=used._replace(surrenders=used.surrenders + 1))
            yield (f"driver {at}", "gives up batch", driver.batch), after.with_driver(at, driver.gone())
        if used.copies < world.copies:
            copied = state._replace(used=used._replace(copies=used.copies + 1))
            plans = world.plans if world.type == "opaque" else (world.plans[driver.batch % len(world.plans)],)
            for partition, report in enumerate(driver.reports):
                if report is None:
                    for plan in plans:
                        copy = self._tasks.new(at, driver, partition, plan, 1 + used.copies)
                        yield (f"driver {at}", "tries task again", partition, plan), copied.with_tries(copy)

    def _close_fence(self, state: State, at: int, driver: Driver) -> Iterator[tuple[Label, State]]:
        """`Fences.close`, one after the other; and then the commit."""
        node = driver.raised
        if node == self.world.keys:
            yield from self._commit(state, at, driver)
            return
        label = (f"driver {at}", "closes the fence of key", node)
        assert driver.token is not None
        closed = driver.token._replace(closed=True)
        lived = self.protocol.may_commit(begun_in=driver.incarnations[node], now=state.incarnations[node])
        if state.fences[node] not in (driver.token, closed) or not lived:
            yield (*label, "in vain"), state.with_driver(at, driver.gone())
            return
        fences = with_item(state.fences, node, closed)
        yield label, state._replace(fences=fences).with_driver(at, driver._replace(raised=node + 1))

    def _begin_anew(self, state: State, at: int, driver: Driver, label: Label) -> Iterator[tuple[Label, State]]:
        """The same batch once more, by the driver that has opened the state."""
        answer: Any = Refused("StoreLostError")
        if state.ledger:
            answer = self.protocol.begin(state.ledger, at, driver.batch, state.used.attempts)
            if isinstance(answer, int):
                answer = Refused("FencedError")  # committed by another driver meanwhile
        yield from self._begun(state, at, driver, answer, label)

    def _commit(self, state: State, at: int, driver: Driver) -> Iterator[tuple[Label, State]]:
        label: Label = (f"driver {at}", "commits batch", driver.batch, driver.txid)
        if state.ledger == 0:
            yield (*label, "StoreLostError"), state.with_driver(at, driver.gone())
            return
        answer = self.protocol.commit(state.ledger, at, driver.query, driver.batch, driver.txid)
        if isinstance(answer, Refused):
            put_back = self.world.loss == "back" and driver.incarnation < state.used.losses
            if put_back and state.used.attempts < self.world.attempts:  # StoreRestartedError, of an older ledger
                yield from self._begin_anew(state, at, driver, (*label, answer.error, "begins anew"))
                return
            yield (*label, answer.error), state.with_driver(at, driver.gone())
            return
        incarnation = state.used.losses if self.world.loss != "node" else 0
        if answer != state.ledger and not self.protocol.may_commit(begun_in=driver.incarnation, now=incarnation):
            label = (*label, "StoreRestartedError")
            if state.used.attempts < self.world.attempts:
                yield from self._begin_anew(state, at, driver, (*label, "begins anew"))
            else:
                yield label, state.with_driver(at, driver.gone())
            return
        if answer != state.ledger:
            claims = () if self.world.store == "fenced" else state.claims
            if self.world.store == "cluster":
                claims = tuple(claim for claim in claims if claim[0] > driver.txid)
            state = self._counted(state, driver)._replace(ledger=answer, claims=claims)
        committed = driver._replace(phase="committed", reports=())
        yield label, state.with_driver(at, committed)
        used = state.used
        if used.lost_replies < self.world.lost_replies:
            again = state._replace(used=used._replace(lost_replies=used.lost_replies + 1))
            yield (*label, "and gets no reply"), again

    def _check_nothing_is_lost(self, state: State) -> None:
        """A node may lose what it acknowledged, and then readers see that; but no attempt may go on top of it."""
        view, newest = self.protocol.view(state.ledger), self.protocol.newest(state.ledger)
        for key, record in enumerate(state.records):
            found = self.protocol.shown(view, newest, record)
            if found != state.truth[key]:
                raise ViolationError(f"an attempt counts on key {key} as {found} where {state.truth[key]} is right")

    def _counted(self, state: State, driver: Driver) -> State:
        """The audit of a commit: what the tasks said that they had done is in."""
        query, batch = driver.query, driver.batch
        if state.counted[query] != batch:
            raise ViolationError(
                f"batch {batch} of query {query} is committed where batch {state.counted[query]} was due"
            )
        truth: list[int | None] = list(state.truth)
        for operations in driver.reports:
            for key, operation in operations:
                truth[key] = None if operation == REMOVE else (truth[key] or 0) + operation
        left = self.world.rollbacks - state.used.rollbacks
        return state._replace(
            truth=tuple(truth),
            history=(*state.history, (state.truth, query, batch))[-left:] if left else (),
            counted=with_item(state.counted, query, batch + 1),
        )
