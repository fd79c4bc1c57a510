"""The ledgers of the states of one topology: begun together, and committed together.

After any crash and any replay all of them hold the same batches, with the same contents:

- Ledgers of one place (`JointLedgers`) change in one write, so they are never apart.
- Those of several places are committed one after the other. A driver that died in between leaves some of them a batch
  ahead. The next one opens them all, which fences the dead one everywhere, and only then rolls those back
  that are ahead, and begins the batch in all of them anew. So these states have to be opaque.

Leaving what is committed as it is, and doing the batch in the others alone, would be wrong: a replay may hold other
rows. So would a rollback before all are opened: the driver before may still live, and commit the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec

from mapstate import transitions
from mapstate.backing_map import JointLedgers
from mapstate.errors import MissingBatchesError
from mapstate.ledger import Ledger, change_all, now
from mapstate.transitions import AlreadyCommitted, BatchPlan, Begun, Commit, LedgerRecord, OnGap, Opening

__all__ = ["Ledgers", "places_of"]

_Open = Callable[[LedgerRecord | None], LedgerRecord]


def places_of(stores: Sequence[Any]) -> list[list[int]]:
    """Which of these stores can change their ledgers in one write: their places in the sequence, group by group."""
    groups: dict[Any, list[int]] = {}
    for at, store in enumerate(stores):
        name = (type(store), store.ledger_place()) if isinstance(store, JointLedgers) else at
        groups.setdefault(name, []).append(at)
    return list(groups.values())


class Ledgers:
    """A driver's hold on all ledgers of a topology, as `Ledger` is on one. Not thread-safe.

    Sequences of arguments and results are in the order of the states.
    """

    def __init__(self, stores: Sequence[Any], openings: Sequence[Opening], on_gaps: Sequence[OnGap]) -> None:
        self.ledgers = [Ledger(store, one.state) for store, one in zip(stores, openings, strict=True)]
        self._groups = places_of(stores)
        self._on_gaps = on_gaps
        self._opens = [_opened(ledger, one) for ledger, one in zip(self.ledgers, openings, strict=True)]

    @classmethod
    def open_and_begin(
        cls,
        stores: Sequence[Any],
        openings: Sequence[Opening],
        batch_id: int,
        on_gaps: Sequence[OnGap],
        plan: BatchPlan | None = None,
    ) -> tuple[Ledgers, list[Begun | AlreadyCommitted]]:
        """Takes all states, and begins a batch in all of them or in none, see `begin`.

        One write where all ledgers are of one place; else two for each place. Of one place, a batch that is refused
        leaves everything as it was; of several, it may leave states that were opened and nothing else.
        Raises as `Ledger.open_and_begin` and `begin` do.
        """
        self = cls(stores, openings, on_gaps)
        if len(self._groups) == 1:
            return self, self._begin(batch_id, self._opens, plan)
        found = self._load()
        try:
            self._even([one(record) for one, record in zip(self._opens, found, strict=True)], batch_id, plan)
        except MissingBatchesError:
            for ledger, record in zip(self.ledgers, found, strict=True):
                if record is None:
                    ledger.check_not_lost()
            raise
        for group in self._groups:
            change_all(self._of(group), partial(self._opened, group), may_create=True)
        return self, self.begin(batch_id, plan)

    @property
    def records(self) -> list[LedgerRecord]:
        """The ledgers as this driver last read or wrote them."""
        return [one.record for one in self.ledgers]

    def begin(self, batch_id: int, plan: BatchPlan | None = None) -> list[Begun | AlreadyCommitted]:
        """Starts an attempt in all states, all of them `Begun` or all `AlreadyCommitted`: one write for each place.

        A state that is a batch ahead, or that counts the batch with another plan, is rolled back in the same write.
        Raises as `Ledger.begin` does, and RollbackError.
        """
        return self._begin(batch_id, None, plan)

    def commit(self, done: Sequence[Commit]) -> None:
        """Makes an attempt count in all states: one write for each place, one after the other.

        Raises as `Ledger.commit` does; then some places may have committed, and the next `begin` rolls them back.
        """
        for one in self.ledgers:
            one.close_fences()
        done = [msgspec.structs.replace(one, apart_from=self._apart_from(place)) for place, one in enumerate(done)]
        for group in self._groups:
            change_all(self._of(group), partial(self._committed, group, done), same_life=True)

    def say_what_fenced(self) -> None:
        """See `Ledger.say_what_fenced`."""
        for one in self.ledgers:
            one.say_what_fenced()

    def give_up(self) -> None:
        """See `transitions.give_up`: in all states, one write for each place."""
        for group in self._groups:
            change_all(self._of(group), partial(self._given_up, group))

    def _begin(
        self, batch_id: int, opens: Sequence[_Open] | None, plan: BatchPlan | None
    ) -> list[Begun | AlreadyCommitted]:
        nonces, at = [one.nonce() for one in self.ledgers], now()
        accept_loss = [one == "accept" for one in self._on_gaps]
        begun: dict[int, Begun | AlreadyCommitted] = {}
        for group in self._groups:

            def begin(found: list[Any], group: list[int] = group) -> list[tuple[LedgerRecord, Any]]:
                records = [None if place in group else one.record for place, one in enumerate(self.ledgers)]
                for place, record in zip(group, found, strict=True):
                    records[place] = record if opens is None else opens[place](record)
                return self._even(records, batch_id, plan, group, nonces=nonces, at=at)

            results = change_all(
                self._of(group),
                begin,
                may_create=opens is not None,
                looks=True,
                accept_loss=[accept_loss[place] for place in group],
            )
            for place, one in zip(group, results, strict=True):
                self.ledgers[place].has_begun(one, accept_loss=accept_loss[place])
                begun[place] = one
        return [begun[place] for place in range(len(self.ledgers))]

    def _even(
        self,
        records: Sequence[Any],
        batch_id: int,
        plan: BatchPlan | None,
        group: Sequence[int] | None = None,
        *,
        nonces: Sequence[str] = (),
        at: str = "",
    ) -> list[tuple[LedgerRecord, Begun | AlreadyCommitted]]:
        """What begins in a group of states, or in all, where these are the ledgers of all. Writes nothing."""
        sessions = [one.session for one in self.ledgers]
        for one, record in zip(self.ledgers, records, strict=True):
            one.check_not_put_back(record, batch_id)
        even = transitions.even_out(records, sessions, batch_id)
        transitions.check_adopted(even, self._on_gaps)
        names = nonces or [""] * len(even)
        begun = [
            transitions.begin(record, session, batch_id, on_gap, nonce, at=at, plan=plan)
            for record, session, on_gap, nonce in zip(even, sessions, self._on_gaps, names, strict=True)
        ]
        done = [isinstance(one, AlreadyCommitted) for _, one in begun]
        if any(done) and not all(done):
            has, lacks = even[done.index(True)].state, even[done.index(False)].state
            raise MissingBatchesError(
                f"Spark brings batch {batch_id}, which state {has!r} counts and state {lacks!r} of the same topology "
                "does not: something else has written one of them, or it was put back alone. Nothing was written. "
                "Restore all of them from one moment and rewind the checkpoint, or reset them all.",
                state=lacks,
                expected=batch_id,
            )
        return [begun[place] for place in (range(len(even)) if group is None else group)]

    def _opened(self, group: Sequence[int], found: Sequence[Any]) -> list[tuple[LedgerRecord, None]]:
        return [(self._opens[place](one), None) for place, one in zip(group, found, strict=True)]

    def _given_up(self, group: Sequence[int], found: Sequence[Any]) -> list[tuple[LedgerRecord, None]]:
        return [
            (transitions.give_up(one, self.ledgers[place].session), None)
            for place, one in zip(group, found, strict=True)
        ]

    def _committed(
        self, group: Sequence[int], done: Sequence[Commit], found: Sequence[Any]
    ) -> list[tuple[LedgerRecord, None]]:
        for place, one in zip(group, found, strict=True):
            self.ledgers[place].check_not_put_back(one)
        return [
            (transitions.commit(one, self.ledgers[place].session, done[place]), None)
            for place, one in zip(group, found, strict=True)
        ]

    def _apart_from(self, place: int) -> tuple[str, ...]:
        """The states that are committed in another write than that of ``place``."""
        own = next(group for group in self._groups if place in group)
        return tuple(one.record.state for at, one in enumerate(self.ledgers) if at not in own)

    def _of(self, group: Sequence[int]) -> list[Ledger]:
        return [self.ledgers[place] for place in group]

    def _load(self) -> list[LedgerRecord | None]:
        found = [one.load() for one in self.ledgers]
        return [None if one is None else one[0] for one in found]


def _opened(ledger: Ledger, opening: Opening) -> _Open:
    """See `Ledger.opening`."""
    opened = ledger.opening(opening)
    return lambda found: opened(found)[0]
