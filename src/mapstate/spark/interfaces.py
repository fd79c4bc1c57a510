"""What a user writes: Trident's QueryFunction, StateFactory, Aggregator and collector."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from mapstate.errors import NotPicklableError, cut


class Collector:
    """Takes what a function emits: Trident's TridentCollector."""

    def __init__(self) -> None:
        self.emitted: list[tuple[Any, ...]] = []

    def emit(self, *values: Any) -> None:
        """One row, of as many values as the function has output columns."""
        self.emitted.append(values)


class QueryFunction(ABC):
    """Trident's QueryFunction: asks a state for many keys at once, then emits for each row. Picklable.

    Runs on executors. ``state`` is a `StateReader` where the state is one of mapstate's, and else what the
    state factory made.
    """

    @abstractmethod
    def batch_retrieve(self, state: Any, keys: Sequence[tuple[Any, ...]]) -> Sequence[Any]:
        """One result per key, in order. The keys of a chunk are distinct; called once per chunk."""

    @abstractmethod
    def execute(self, key: tuple[Any, ...], result: Any, collector: Collector) -> None:
        """Emits the values to add to one row: once for one row, several times for several rows, or not at all."""


class MapGet(QueryFunction):
    """The fields of a key; nulls where it is absent. One row in, one row out."""

    columns: Sequence[str] | None = None  # which a task asks for: those that are shown, where others need more

    def batch_retrieve(self, state: Any, keys: Sequence[tuple[Any, ...]]) -> Sequence[Any]:
        """See `QueryFunction.batch_retrieve`."""
        answers: Sequence[Any] = state.multi_get(keys, columns=self.columns)
        return answers

    def execute(self, key: tuple[Any, ...], result: Any, collector: Collector) -> None:  # noqa: ARG002
        """See `QueryFunction.execute`; ``result`` is the values of the fields, or None for each."""
        collector.emit(*result)


class SnapshotGet(MapGet):
    """The fields of an ungrouped aggregate, added to every row."""


class TupleCollectionGet(QueryFunction):
    """Every row with every key of the state and its fields: a scan per chunk of rows, so for small states."""

    columns: Sequence[str] | None = None  # as of `MapGet`

    def batch_retrieve(self, state: Any, keys: Sequence[tuple[Any, ...]]) -> Sequence[Any]:
        return [dict(state.scan(columns=self.columns)).items()] * len(keys)

    def execute(self, key: tuple[Any, ...], result: Any, collector: Collector) -> None:  # noqa: ARG002
        """See `QueryFunction.execute`; ``result`` is pairs of a key's and its fields' values."""
        for values in result:
            collector.emit(*values)


@runtime_checkable
class StateFactory(Protocol):
    """Makes a user's own state on an executor, once per task. Picklable."""

    def make_state(self, partition: int, partitions: int) -> Any:
        """The state of one partition out of so many."""
        ...


class BatchAggregator(ABC):
    """Trident's Aggregator: sees the rows of a group of a batch one by one, and emits whenever it likes. Picklable.

    ``output`` are the columns that it emits, as DDL. Runs on executors; a task that Spark tries again begins anew.
    """

    output: str

    @abstractmethod
    def init(self, batch_id: int | None, collector: Collector) -> Any:
        """What to begin with, once per group; where there is one group, also in an empty batch."""

    @abstractmethod
    def aggregate(self, value: Any, row: Mapping[str, Any], collector: Collector) -> Any:
        """The value with one more row; rows come in any order."""

    @abstractmethod
    def complete(self, value: Any, collector: Collector) -> None:
        """There are no more rows. What was emitted for this group is given out now."""


class State(Protocol):
    """Trident's State: what a `StateFactory` makes. Executor; one object per task. It may have a ``close()``."""

    def begin_commit(self, txid: int) -> None:
        """A batch begins in this partition: ``txid`` is Spark's batch id.

        The same txid comes again after a crash, with the same rows or with others, and may come to two objects at
        once where Spark tries a task twice. A new checkpoint begins at 0 again.
        """
        ...

    def commit(self, txid: int) -> None:
        """All updates of the batch have been given. Other partitions may still be at work, and may fail."""
        ...


class StateUpdater(ABC):
    """Trident's StateUpdater: updates a state with the rows of a partition. Picklable.

    ``output`` are the columns that it emits, as DDL; by default none.
    """

    output: str = ""

    @abstractmethod
    def update_state(self, state: Any, rows: Sequence[Mapping[str, Any]], collector: Collector) -> None:
        """Updates the state, and emits what shall be its new values. Executor.

        Called between `State.begin_commit` and `State.commit`, once for each ``chunk_size`` rows; once with no rows
        where the partition is empty.
        """


def ensure_picklable(subject: str, thing: Any) -> None:
    """Raises NotPicklableError, with the attribute that is to blame, unless ``thing`` can be sent to executors."""
    from pyspark.cloudpickle import dumps, loads

    try:
        loads(dumps(thing))  # type: ignore[no-untyped-call]
    except Exception as error:
        culprit = ""
        for name, value in getattr(thing, "__dict__", {}).items():
            try:
                dumps(value)  # type: ignore[no-untyped-call]
            except Exception:  # noqa: BLE001  pickling runs anybody's code
                culprit = f": its attribute {name!r}, a {kind_of(value)}, cannot be pickled"
                break
        raise NotPicklableError(
            f"{subject} cannot be sent to executors{culprit} ({type(error).__name__}: {cut(error)}). Keep settings in "
            "it, and make connections and locks where they are used."
        ) from error


def kind_of(thing: Any) -> str:
    """The class of a thing, or of a class itself, for a message."""
    return f"class {thing.__name__}" if isinstance(thing, type) else type(thing).__name__
