"""How large a chunk, or a page, gets: in keys, and in bytes where values are large."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
import pytest
from one_ledger import OneLedger

from mapstate import CombinerAggregator, Max, Sum, opaque, open_reader
from mapstate.aggregators.fields import Fields
from mapstate.backends.memory import MemoryStore
from mapstate.errors import ConfigurationError
from mapstate.maps.serialized import Room
from mapstate.operations.vacuum import vacuum
from mapstate.protocol.ledger_record import Commit, OpenRequest
from mapstate.schema import Field, KeyField
from mapstate.spark.executor.task import BatchTask, slices

KEYS = 2000
LARGE = 10_000
BYTES = 200_000


class Longest(CombinerAggregator):
    """An aggregator of one's own: it folds rows in Python."""

    def init(self, row: Any) -> str:
        return row["x"]

    def combine(self, a: str, b: str) -> str:
        return max(a, b)

    def zero(self) -> str:
        return ""


class Job:
    """Batches of one state, each of them one task in this process; ``calls`` are what its records came to."""

    def __init__(self, url: str, field: Field, aggregator: Any, **options: Any) -> None:
        self.spec = opaque(url, "s", **options)
        self.fields = Fields((field,), {"x": aggregator})
        self.native = self.fields.native
        self.ledger = OneLedger.open(
            self.spec.open(),
            OpenRequest(
                state="s",
                type="opaque",
                serializer="json",
                keys=(KeyField("k", "string"),),
                fields=(field,),
                owner="q",
                clock_txid=5,
            ),
        )
        self.next = 0

    def batch(self, values: pa.Array) -> None:
        attempt = self.ledger.begin(self.next)
        columns = {"k": [f"k{at}" for at in range(len(values))], "x": values}
        task = BatchTask(
            spec=self.spec,
            fields=self.fields,
            field_counts=self.ledger.record.field_counts,
            keys=self.ledger.record.keys,
            partials=[1] if self.native else None,
            attempt=attempt,
            new_values=None,
            rows_of=("x",),
        )
        whole = pa.RecordBatch.from_pydict(columns | ({"n": [1] * len(values)} if self.native else {}))
        report = json.loads(list(task(iter([whole])))[-1].column(0)[0].as_py())
        assert (report["error"], report["rows_in"], report["rows_done"]) == (None, len(values), len(values))
        self.ledger.commit(Commit(batch_id=self.next, txid=attempt.txid, owner="q", keys=len(values)))
        self.next += 1


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Keys and bytes of each bulk get of the memory store."""
    seen = []
    get = MemoryStore.multi_get

    def counted(self: Any, keys: Any) -> Any:
        found = get(self, keys)
        seen.append((len(keys), sum(len(one) for one in found if one is not None)))
        return found

    monkeypatch.setattr(MemoryStore, "multi_get", counted)
    return seen


def letters(letter: str, size: int = LARGE) -> list[str]:
    return [letter * size] * KEYS


@pytest.mark.parametrize("aggregator", [Max("x"), Longest()], ids=["native", "folded"])
def test_a_chunk_of_large_values_has_fewer_keys(aggregator, calls, tmp_path):
    url = f"memory://{tmp_path.name}"
    job = Job(url, Field("x", "x", "string"), aggregator, chunk_bytes=BYTES)
    job.batch(pa.array(letters("a")))
    assert max(keys for keys, _ in calls) <= BYTES // LARGE  # of what the batch brings, when nothing is stored yet
    calls.clear()
    job.batch(pa.array(letters("b")))
    assert max(size for _, size in calls) <= BYTES * 1.1
    calls.clear()
    job.batch(pa.array([""] * KEYS))  # small rows on large records: what comes back counts as well
    assert max(size for _, size in calls[2:]) <= BYTES * 1.1
    assert max(size for _, size in calls[:2]) <= 64 * LARGE * 2.1  # before the first record was seen


def test_a_chunk_of_small_values_has_as_many_keys_as_ever(calls, tmp_path):
    job = Job(f"memory://{tmp_path.name}", Field("x", "x", "bigint"), Sum("x"))
    for _ in range(2):
        job.batch(pa.array(range(KEYS)))
    assert [keys for keys, _ in calls] == [KEYS, KEYS]
    job = Job(f"memory://{tmp_path.name}-2", Field("x", "x", "string"), Max("x"))
    for _ in range(2):
        calls.clear()
        job.batch(pa.array(letters("a", 10)))
        assert [keys for keys, _ in calls] == [64, KEYS - 64]


def test_pages_of_large_records_are_read_in_parts(calls, tmp_path):
    url = f"memory://{tmp_path.name}"
    job = Job(url, Field("x", "x", "string"), Max("x"))
    job.batch(pa.array(letters("a", 100_000)))
    most = 8 * 2**20
    for use in (
        lambda reader: list(reader.scan(page_size=KEYS)),
        lambda _: vacuum(url, "s", page_size=KEYS),
    ):
        calls.clear()
        with open_reader(url, "s") as reader:
            use(reader)
        assert sum(keys for keys, _ in calls) >= KEYS
        assert max(size for _, size in calls) <= most * 1.1


def test_a_room_never_gets_smaller_than_one_key_and_never_larger_than_was_asked_for():
    room = Room((Field("x", "x", "string"),), 100, 1000)
    room.learn([b"x" * 5000])
    assert room.keys == 1
    room.learn([None, b"x" * 10])
    assert room.keys == 100
    room.learn([[["x" * 400], 7]])  # of a store with types of its own
    assert room.keys == 2
    room.learn([None, None])
    room.learn([])
    assert room.keys == 2
    assert list(room.parts(list("abc"))) == [["a", "b"], ["c"]]


def test_a_slice_is_measured_by_what_it_holds_and_not_by_what_it_was_cut_from():
    values = pa.array(["x" * 1000] * 10 + ["y"] * 990)
    batch = pa.RecordBatch.from_arrays([values], ["v"]).slice(2)
    sizes = [part.num_rows for part in slices(batch, lambda: 500, 3000)]
    assert sum(sizes) == 998
    assert all(size <= 2 for size in sizes[:4])
    assert max(sizes) > 100  # and not split for what other slices hold
    whole = pa.Table.from_batches(list(slices(batch, lambda: 500, 3000))).column("v").to_pylist()
    assert whole == batch.column(0).to_pylist()


@pytest.mark.parametrize("value", [0, -1, 1.5, True])
def test_chunk_bytes_is_a_whole_number_above_0(value):
    with pytest.raises(ConfigurationError, match="chunk_bytes"):
        opaque("memory://", "s", chunk_bytes=value)
