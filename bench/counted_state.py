"""A state that counts rows by user, applied batch by batch without Spark: a task called with Arrow batches."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import pyarrow as pa
from measuring import timed

from mapstate import Count, opaque, open_reader
from mapstate.aggregators.fields import Fields
from mapstate.protocol.ledger_record import Commit, LedgerRecord, OpenRequest
from mapstate.protocol.ledgers import Ledgers
from mapstate.schema import Field, KeyField
from mapstate.spark.executor.task import BatchTask

__all__ = ["ARROW_ROWS", "STATE", "CountedState", "arrow_batches", "chunks", "processor_time", "run_task"]

STATE = "visits"
ARROW_ROWS = 10_000  # rows of each batch that Spark sends to Python
_KEYS = (KeyField("user_id", "string"),)


def arrow_batches(users: Sequence[str], counts: int = 1) -> list[pa.RecordBatch]:
    """Make the input of a task, as the aggregation does: each user once, with ``counts`` rows."""
    out = []
    for start in range(0, len(users), ARROW_ROWS):
        some = users[start : start + ARROW_ROWS]
        numbers = pa.array([counts] * len(some), pa.int64())
        out.append(pa.RecordBatch.from_arrays([pa.array(some), numbers, numbers], ["key0", "partial0_0", "rows"]))
    return out


def run_task(task: BatchTask, batches: Iterable[pa.RecordBatch]) -> None:
    """Run one task in this process."""
    line = list(task(iter(batches)))[-1].column(0)[0].as_py()
    assert '"error":null' in line, line


class CountedState:
    """Run batches one after the other, each by one task in this process."""

    def __init__(self, url: str, name: str = STATE, **options: Any) -> None:
        self.url, self.name = url, name
        self.spec = opaque(url, name, **options)
        self.store = self.spec.open()
        one = Count()
        self._fields = Fields([Field("n", one.describe(), "bigint")], {"n": one})
        opening = OpenRequest(
            state=name,
            type="opaque",
            serializer=self.spec.serializer,
            keys=_KEYS,
            fields=self._fields.fields,
            owner="bench",
            clock_txid=280_000_000,
        )
        self.ledgers = Ledgers([self.store], [opening], ["refuse"])
        self.ledgers.open()
        self.batches = 0

    @property
    def record(self) -> LedgerRecord:
        """The ledger as of the last batch."""
        return self.ledgers.records[0]

    def apply(self, batches: Iterable[pa.RecordBatch]) -> float:
        """Begin and commit one batch; the seconds of its task."""
        return self.apply_by(partial(run_task, batches=batches))

    def apply_by(self, run: Callable[[BatchTask], None]) -> float:
        """Begin and commit one batch, whose tasks ``run`` runs; its seconds."""
        (attempt,) = self.ledgers.begin(self.batches)
        task = BatchTask(
            spec=self.spec,
            fields=self._fields,
            field_counts=self.record.field_counts,
            keys=_KEYS,
            partials=[1],
            attempt=attempt,
            new_values=None,
        )
        seconds = timed(partial(run, task))
        self.ledgers.commit([Commit(batch_id=self.batches, txid=attempt.txid, owner="bench")])
        self.batches += 1
        return seconds

    def check(self, users: Sequence[str], expected: int) -> None:
        """Read every user's count."""
        with open_reader(self.url, self.name) as reader:
            for some in chunks(users, 50_000):
                assert reader.multi_get(some) == [{"n": expected}] * len(some), "counted wrong"


def processor_lines(prefix: str, processor: dict[str, float]) -> list[tuple[str, str]]:
    """The figures of `processor_time`, as lines of a table."""
    return [(f"{prefix}, {name.replace('_cpu', '')}, processor time", f"{own:.2f}") for name, own in processor.items()]


def processor_time(
    state: CountedState, batches: Sequence[pa.RecordBatch], keys: int, servers: Sequence[Any], rounds: int = 5
) -> dict[str, float]:
    """Measure the processor microseconds per key, of this process and of these clients' servers."""

    def of_servers() -> float:
        spent = [client.info("cpu") for client in servers]
        return sum(one["used_cpu_user"] + one["used_cpu_sys"] for one in spent)

    before = time.process_time(), of_servers()
    for _ in range(rounds):
        state.apply(batches)
    after = time.process_time(), of_servers()
    scale = 1e6 / keys / rounds
    return {"client_cpu": (after[0] - before[0]) * scale, "server_cpu": (after[1] - before[1]) * scale}


def chunks(items: Sequence[Any], size: int) -> Iterable[Sequence[Any]]:
    """Split ``items`` into lists of ``size``."""
    return (items[start : start + size] for start in range(0, len(items), size))
