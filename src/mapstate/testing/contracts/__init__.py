"""The contract of a store, as test classes: a subclass says how to open the store, and inherits every test.

    class TestVisitsStore(StoreContract):
        without = {"ttl": "its server knows no expiry"}

        @pytest.fixture
        def backend(self): ...      # names an empty store
        @pytest.fixture
        def side_door(self, backend): ...      # reads and writes past it

    BackingMapContract       get and put; any `IBackingMap`, a wrapper too: fixtures ``store`` and ``side_door``
    └── BackendContract      what opens it: backends, processes, ttl, scan; fixtures ``backend`` and ``side_door``
    LedgerContract           compare-and-set, fence, claims
    MapStateContract         Trident's behaviour over the store
    ReplayContract           crashes, replays, late tasks, readers
    StoreContract            the four from `BackendContract` on: what a store author subclasses
    SerializerContract       a wire format; fixture ``serializer``

A store that lacks something says so in ``without``, with the reason. docs/write-a-store.md shows a whole store.
This package needs pytest, and nothing else in mapstate does.
"""

import pytest

pytest.register_assert_rewrite(
    *(f"mapstate.testing.contracts.{name}" for name in ("backing_map", "backend", "ledger", "map_state", "replay")),
    "mapstate.testing.contracts.serializer",
)

from mapstate.testing.contracts.backend import BackendContract  # noqa: E402  rewritten from here on
from mapstate.testing.contracts.backing_map import BackingMapContract, SideDoor  # noqa: E402
from mapstate.testing.contracts.capabilities import CAPABILITIES, instead_of, needs  # noqa: E402
from mapstate.testing.contracts.ledger import LedgerContract  # noqa: E402
from mapstate.testing.contracts.map_state import MapStateContract  # noqa: E402
from mapstate.testing.contracts.replay import ReplayContract  # noqa: E402
from mapstate.testing.contracts.serializer import SerializerContract  # noqa: E402

__all__ = [
    "CAPABILITIES",
    "BackendContract",
    "BackingMapContract",
    "LedgerContract",
    "MapStateContract",
    "ReplayContract",
    "SerializerContract",
    "SideDoor",
    "StoreContract",
    "instead_of",
    "needs",
]


class StoreContract(LedgerContract, MapStateContract, ReplayContract):
    """The whole contract. Fixtures: ``backend``, ``side_door``, and ``unreachable`` for a store with outages."""
