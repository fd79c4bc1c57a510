"""Map states, which turn replays into exactly once, and wrappers for backing maps."""

from mapstate.maps.cached import CachedMap
from mapstate.maps.map_state import MapState, TransactionStatus
from mapstate.maps.micro_batch import MicroBatchBackingMap
from mapstate.maps.non_transactional import NonTransactionalMap
from mapstate.maps.opaque import OpaqueMap
from mapstate.maps.snapshottable import SnapshottableMap
from mapstate.maps.transactional import TransactionalMap

__all__ = [
    "CachedMap",
    "MapState",
    "MicroBatchBackingMap",
    "NonTransactionalMap",
    "OpaqueMap",
    "SnapshottableMap",
    "TransactionStatus",
    "TransactionalMap",
]
