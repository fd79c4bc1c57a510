"""Map states, which turn replays into exactly once, and wrappers for backing maps."""

from mapstate.maps.opaque import MapState, OpaqueMap, TransactionStatus
from mapstate.maps.transactional import NonTransactionalMap, TransactionalMap
from mapstate.maps.wrappers import CachedMap, MicroBatchBackingMap, SnapshottableMap

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
