"""The whole contract of a store: the class that a store author subclasses."""

from __future__ import annotations

from mapstate.testing.contracts.ledger import LedgerContract
from mapstate.testing.contracts.map_state import MapStateContract
from mapstate.testing.contracts.replay import ReplayContract


class StoreContract(LedgerContract, MapStateContract, ReplayContract):
    """The whole contract. Fixtures: ``backend``, ``side_door``, and ``unreachable`` for a store with outages."""
