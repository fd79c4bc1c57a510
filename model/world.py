"""What a model explores: a small world, and the states that it can be in.

A value is a number. Each try of a task adds a power of four of its own, so that a sum tells which tries are in
it, and which are in it twice. A state is made of tuples and numbers only: it is compared, hashed and never changed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from mapstate.capabilities import FenceToken
from mapstate.schema import OnNewOwner, StateType
from model.protocol import REMOVE, Record

__all__ = [
    "Driver",
    "Drivers",
    "Label",
    "Loss",
    "Reader",
    "State",
    "Store",
    "Try",
    "Used",
    "Vacuum",
    "ViolationError",
    "World",
    "with_item",
]

Drivers = tuple[tuple[int, OnNewOwner], ...]
"""The query of each driver, and what its spec says of a new owner."""

Label = tuple[Any, ...]
"""Who did what, for the trace of a counterexample."""

Store = Literal["fenced", "filtered", "cluster"]
Loss = Literal["flush", "ledger", "back", "node"]


class ViolationError(Exception):
    """Something that must never be."""


@dataclass(frozen=True, kw_only=True)
class World:
    """Who takes part, and how often what may happen.

    ``store``       "fenced": ledger and fence in one write. "filtered": no fence, each record refuses older
                    txids. "cluster": a fence per key, raised one after the other after the ledger's write
    ``partitions``  the partition of each key
    ``drivers``     in the order in which they come: the query whose checkpoint they run on, and what the
                    spec says of a new owner. Two on one query: a restart, or a second copy
    ``batches``     that each query brings
    ``attempts``    in all
    ``plans``       what an attempt may hold, for each key: 0 not there, 1 counted, 2 removed. Opaque attempts choose
                    any, and so does each further try of a task; transactional ones are told by their batch
    ``copies``      further tries of a task
    ``failures``    jobs that fail and are begun anew by their driver, while their tasks go on
    ``surrenders``  drivers whose batch fails for good, and who say so in the ledger
    ``lost_replies``  to a write of the ledger, or of a cluster's fence; what was sent twice may arrive late
    ``reads``       snapshots that a reader takes, one key after the other
    ``losses``      the store is emptied, loses its ledger alone, or is put back to a copy; or a cluster's node with one
                    key and its fence is
    ``clock_stands``  a new ledger would give out the txids of the one that was lost
    """

    name: str
    store: Store = "fenced"
    type: StateType = "opaque"
    partitions: tuple[int, ...] = (0,)
    drivers: Drivers = ((0, "refuse"), (0, "refuse"))
    batches: int = 2
    attempts: int = 3
    plans: tuple[tuple[int, ...], ...] = ((1,), (0,))
    copies: int = 0
    failures: int = 0
    surrenders: int = 0
    lost_replies: int = 0
    reads: int = 0
    vacuums: int = 0
    rollbacks: int = 0
    losses: int = 0
    loss: Loss = "flush"
    clock_stands: bool = False
    expiries: int = 0

    @property
    def keys(self) -> int:
        """How many keys there are."""
        return len(self.partitions)

    @property
    def tasks(self) -> int:
        """How many tasks an attempt has."""
        return max(self.partitions) + 1

    @property
    def queries(self) -> int:
        """How many checkpoints there are."""
        return max(query for query, _ in self.drivers) + 1

    def policy(self, driver: int, query: int) -> OnNewOwner:
        """What the spec of a driver says of a new owner; one more driver has that of its query."""
        of = self.drivers[driver : driver + 1] or [one for one in self.drivers if one[0] == query]
        return of[0][1]

    def operations(self, plan: tuple[int, ...], partition: int, weight: int, *, twice: bool) -> tuple[Any, ...]:
        """What a task has to do: pairs of a key and what is added to it, or REMOVE."""
        out = []
        for key, kind in enumerate(plan):
            if kind and self.partitions[key] == partition:
                out.append((key, weight if kind == 1 else REMOVE))
                if twice:
                    out.append((key, 2 * weight))
        return tuple(out)

    def start(self) -> State:
        """Nothing is stored, nobody runs."""
        return State(
            ledger=0,
            fences=(None,) * (self.keys if self.store == "cluster" else 0),
            records=(None,) * self.keys,
            claims=(),
            checkpoints=(0,) * self.queries,
            drivers=(),
            tries=(),
            vacuums=(),
            reader=None,
            late=(),
            truth=(None,) * self.keys,
            history=(),
            counted=(0,) * self.queries,
            owner=None,
            saved=None,
            incarnations=(0,) * (self.keys if self.store == "cluster" else 0),
            used=Used(),
        )


class Used(NamedTuple):
    """How often what happened."""

    attempts: int = 0
    copies: int = 0
    failures: int = 0
    lost_replies: int = 0
    reads: int = 0
    vacuums: int = 0
    rollbacks: int = 0
    losses: int = 0
    expiries: int = 0
    surrenders: int = 0


class Driver(NamedTuple):
    """A driver, alive or not: a dead one is one that takes no more steps.

    ``phase``    "start", "raise" and "close" (fences of a cluster), "run", "committed", "idle", "gone" (it was
                 refused)
    ``serial``   the number of its attempt, which stands for the attempt's random name
    ``reports``  by partition: None, "lost" (a claim), or what the task has done
    ``incarnation``  how often the store had lost something when it began; see `LedgerStore.load`
    ``incarnations``    the same of each node of a cluster, when its fence was raised; see `SpreadFences`
    """

    query: int
    phase: str
    batch: int
    serial: int = 0
    txid: int = 0
    view: int = 0
    token: FenceToken | None = None
    raised: int = 0
    reports: tuple[Any, ...] = ()
    incarnation: int = 0
    incarnations: tuple[int, ...] = ()

    def gone(self) -> Driver:
        """The same driver after it was refused: nothing of it matters any more."""
        return Driver(self.query, "gone", 0)


class Try(NamedTuple):
    """One try of a task. It outlives its driver, its job and its attempt.

    ``at``       0 claims; then a get and a put for each operation by turns; then it reports
    ``read``     the record that the last get found
    """

    driver: int
    serial: int
    txid: int
    view: int
    token: FenceToken
    partition: int
    holder: int
    operations: tuple[tuple[int, int], ...]
    at: int = 0
    read: Record | None = None


class Vacuum(NamedTuple):
    """A vacuum at work.

    ``at`` counts the raised fences, then a get and a put for each key by turns, then the closed fences. ``seen`` is
    the ledger of a vacuum that only reads so far; 0 once it has begun an attempt.
    """

    txid: int
    view: int
    token: FenceToken | None
    incarnation: int
    incarnations: tuple[int, ...] = ()
    at: int = 0
    read: Record | None = None
    seen: int = 0

    def next(self, read: Record | None = None) -> Vacuum:
        """The same vacuum, one step on."""
        return self._replace(at=self.at + 1, read=read)


class Reader(NamedTuple):
    """A snapshot that is being taken: the ledger, what was found so far, and what has to come out."""

    ledger: int
    expected: tuple[int | None, ...]
    found: tuple[Any, ...] = ()
    absent: bool = False


class State(NamedTuple):
    """Everything at one moment. From ``truth`` on it is the audit, which the protocol does not see.

    ``truth``    by key: the sum of what is in the batches that count
    ``history``  of the last batches, as many as may still be rolled back: the truth in front of it, its query, its id
    ``counted``  by query: how many batches count
    ``owner``    the query that opened the state last
    ``late``     moves of a fence that were sent twice, and arrive a second time some day: from what was read, to what
    ``saved``    a copy of the store that may be put back, or of one key and its fence
    ``incarnations``    how often each node of a cluster was put back
    """

    ledger: int
    fences: tuple[FenceToken | None, ...]
    records: tuple[Record | None, ...]
    claims: tuple[tuple[int, int, int], ...]
    checkpoints: tuple[int, ...]
    drivers: tuple[Driver, ...]
    tries: tuple[Try, ...]
    vacuums: tuple[Vacuum, ...]
    reader: Reader | None
    late: tuple[tuple[int, FenceToken | None, FenceToken], ...]
    truth: tuple[int | None, ...]
    history: tuple[tuple[tuple[int | None, ...], int, int], ...]
    counted: tuple[int, ...]
    owner: int | None
    saved: tuple[Any, ...] | None
    incarnations: tuple[int, ...]
    used: Used

    def with_driver(self, at: int, driver: Driver) -> State:
        """The same, but for one driver."""
        return self._replace(drivers=with_item(self.drivers, at, driver))

    def with_tries(self, *tries: Try) -> State:
        """The same with more tries. They are kept in an order of their own, whoever came first."""
        return self._replace(tries=tuple(sorted((*self.tries, *tries), key=_order)))

    def with_try(self, at: int, one: Try) -> State:
        """The same, but for one try."""
        return self._replace(tries=with_item(self.tries, at, one))

    def with_vacuum(self, at: int, vacuum: Vacuum | None) -> State:
        """The same, but for one vacuum, which ends where it is None."""
        own = () if vacuum is None else (vacuum,)
        return self._replace(vacuums=(*self.vacuums[:at], *own, *self.vacuums[at + 1 :]))


def with_item(items: tuple[Any, ...], at: int, item: Any) -> tuple[Any, ...]:
    """The same tuple but for one place."""
    return (*items[:at], item, *items[at + 1 :])


def _order(one: Try) -> tuple[int, ...]:
    return one.driver, one.serial, one.partition, one.holder
