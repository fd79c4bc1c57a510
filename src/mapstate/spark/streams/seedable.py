"""What seeds the states of a stream: no batch comes here."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mapstate.spark.driver.access import is_connect

if TYPE_CHECKING:
    from mapstate.spark.driver.seeding import SeedReport


class Seedable(ABC):
    """What a history is counted for, as batch 0 of a query."""

    @abstractmethod
    def _to_start(self) -> Any:
        """See `Startable`."""

    def __getstate__(self) -> object:
        """Raises UnservedError for a foreachBatch of a Connect client's own, before its query starts."""
        from mapstate.spark.driver.connect import is_started, unserved

        if not is_started.get() and is_connect(self._to_start().df):
            raise unserved()
        return super().__getstate__()

    def seed(
        self,
        checkpointLocation: str,
        *,
        dry_run: bool = False,
        buckets: int | None = None,
        options: Mapping[str, str] | None = None,
        version_of: str | Mapping[str, str | None] | None = None,
        positions: Sequence[str] | None = None,
    ) -> SeedReport:
        """Counts all that the source has now as batch 0 of the query, in parts that survive a crash. Then `start`.

        For states that hold nothing; all of the stream are seeded together, and ``beside`` of a state's report are the
        others: the report of a stream or a topology is that of its first state. The history is read once, and staged
        below the checkpoint. Until all of it is loaded, readers get a SeedingError. After a crash call it again, with
        the same checkpoint: it goes on. Nothing is passed downstream. Driver; returns when batch 0 counts.

        ``dry_run``  stages in a scratch place beside the checkpoint, says how much it is, and deletes it again
        ``buckets``  how many parts; a crash costs at most one of them. None: about a million keys in each
        ``options``  as of `start`
        ``version_of``  the name for which this version is built: rows of keys that it has forgotten are left out. Of
            several states that of each, or None, by the state's name
        ``positions``  the columns with the topic, the partition and the offset of a row, as Kafka's are named: needed
            for keys that were forgotten before the end of the history

        Raises ConfigurationError for a state that cannot be seeded, UsageError where a batch counts already, and what a
        batch raises.
        """
        from mapstate.spark.streams.seeding import seed_query

        return seed_query(
            self._to_start(),
            checkpointLocation,
            dry_run=dry_run,
            buckets=buckets,
            options=options or {},
            version_of=version_of,
            positions=positions,
            state=self._state(),
        )

    def _state(self) -> str | None:
        """The state whose report a seed returns; None for the first one."""
        return None
