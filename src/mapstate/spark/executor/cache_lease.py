"""A cache that outlives its batch, and the proof it needs.

Trident's cache is right because a key stays in one task. On Spark a partition may run on another worker
in the next batch, and come back. So a worker may use what it kept for a partition only if *the last attempt
that it finished for that partition is the last committed one*: then nobody else has written to it since.
Otherwise it starts empty. And a task that has put nothing leaves no lease: it may be an empty copy that came
after its attempt was committed, with what another copy wrote to; a put would have met the fence.

From the task's start to its end there is no lease, so that a task that dies
leaves none.

An attempt is told by a random name and not by its txid, and only the driver that committed it vouches for
it: a store that went back to an older copy gives out the same txids again, and a driver that was started
anew may know more fields than the records that were kept.

The partition is told by its number and by how keys are spread over partitions; where that is anything
else than Spark's hash of the keys over a fixed number, nothing is kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from mapstate.maps import CachedMap
from mapstate.spec import StateSpec


class Lease(NamedTuple):
    """What a worker kept of one partition, as of an attempt."""

    attempt: str
    cache: CachedMap[str, Any]


_leases: dict[tuple[Any, ...], Lease] = {}


@contextmanager
def lease(
    spec: StateSpec, spread: str, partition: int, *, attempt: str, committed: str | None, records: Any
) -> Iterator[Any]:
    """``records`` behind what this worker kept of a partition, if the lease holds. Executor, once per task.

    ``committed`` is the last committed attempt, if the driver vouches for it. What the task leaves in the
    cache is kept under ``attempt`` if it ends well. Leases of this state that nothing can use any more
    are let go.
    """
    state = (spec.backend, spec.state)
    name = (*state, spread, partition)
    held = _leases.pop(name, None)
    for other in [one for one in _leases if one[:2] == state and _leases[one].attempt not in (attempt, committed)]:
        del _leases[other]
    if held is None or committed is None or held.attempt != committed:
        held = Lease(attempt, CachedMap(records, spec.cache_size))
    held.cache.backing = records
    before = held.cache.puts
    yield held.cache
    if held.cache.puts > before:
        _leases[name] = Lease(attempt, held.cache)
