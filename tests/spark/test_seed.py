"""A state that is seeded: batch 0 in buckets, whatever dies, and what is refused before anything is written."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from cases import full
from every_store import AEROSPIKE
from pyspark.errors import StreamingQueryException
from pyspark.sql import functions as F
from spark_fixtures import AVAILABLE, ONE_STORE_OF_BYTES, Visits, contents

from mapstate import (
    Count,
    LastN,
    Sum,
    Topology,
    TumblingCountWindow,
    errors,
    newStream,
    non_transactional,
    opaque,
    open_reader,
    transactional,
)
from mapstate.backends import resolve
from mapstate.testing import Fail, FaultyBackend

pytestmark = pytest.mark.spark


def declared(spark: Any, visits: Visits, url: Any, kind: Any = opaque, **aggregates: Any) -> Any:
    aggregates = aggregates or {"visits": Count(), "bytes": Sum("bytes")}
    rows = newStream("visits", visits.stream(spark))
    return rows.groupBy("user_id").persistentAggregate(kind(url, max_attempts=1), **aggregates)


@pytest.fixture
def history(visits: Visits) -> Visits:
    """A thousand rows in four files."""
    rows = [(f"u{at % 37}", at) for at in range(1_000)]
    for at in range(4):
        visits.put(f"{at}", rows[at::4])
    return visits


@pytest.mark.parametrize("each_url", [*ONE_STORE_OF_BYTES, AEROSPIKE], indirect=True)
@pytest.mark.parametrize("kind", [opaque, full(transactional)])
def test_the_history_is_batch_0_and_the_stream_goes_on_after_it(spark, history, each_url, kind):
    counts = declared(spark, history, each_url, kind)
    reports: list[Any] = []
    counts.on_batch(reports.append)
    seeded = counts.seed(history.checkpoint, buckets=4)
    assert str(seeded) == "visits: 1,000 rows, 37 keys"
    assert [(report.batch_id, report.rows, report.keys_written) for report in reports] == [(0, 1_000, 37)]
    assert contents(each_url, "visits") == history.truth()
    assert not Path(history.checkpoint, "mapstate").exists()
    with open_reader(each_url, "visits") as reader:
        last = reader.ledger().last_commit
        assert (last.batch_id, last.rows, last.keys, last.seeded) == (0, 1_000, 37, True)
    assert counts.seed(history.checkpoint) == seeded  # a second call, as a supervisor makes it, begins nothing
    history.put("more", [("u1", 5), ("new", 7)])
    declared(spark, history, each_url, kind).start(history.checkpoint, trigger=AVAILABLE).awaitTermination()
    assert contents(each_url, "visits") == history.truth()
    with pytest.raises(errors.UsageError, match="there is nothing to seed"):
        counts.seed(history.checkpoint)


def test_the_checkpoint_of_another_query_that_was_seeded_is_refused(spark, history, tmp_path):
    url, another = f"sqlite:///{tmp_path}/state.db", str(tmp_path / "another")
    declared(spark, history, url).seed(history.checkpoint)
    declared(spark, history, f"{url}-2").seed(another)
    with pytest.raises(errors.StateOwnershipError, match="belongs to streaming query"):
        declared(spark, history, url).seed(another)
    assert contents(url, "visits") == history.truth()


def failed(
    spark: Any, history: Visits, url: str, folder: Path, *, call: int, after: bool, kind: Any = opaque, buckets: int = 3
) -> Any:
    """A seed whose driver dies at this write of the ledger; the ledger that it leaves."""
    fault = Fail(method="swap", call=call, after=after, error=errors.CorruptStoreError, name=f"{call}{after}")
    counts = declared(spark, history, FaultyBackend(resolve(url), folder, (fault,)), kind)
    with pytest.raises(errors.CorruptStoreError):
        counts.seed(history.checkpoint, buckets=buckets)
    with open_reader(url, "visits") as reader:
        return reader.ledger()


@pytest.mark.parametrize("kind", [opaque, full(transactional)])
@pytest.mark.parametrize("after", [full(False), True])
def test_a_seed_that_died_goes_on_and_loads_nothing_twice(spark, history, tmp_path, after, kind):
    """Its writes: the opening, the stage, begin and commit of each of six buckets, and the end."""
    url, done = f"sqlite:///{tmp_path}/state.db", 0
    for call in (2, 3, 4, 5):  # of each driver
        ledger = failed(spark, history, url, tmp_path, call=call, after=after, kind=kind, buckets=6)
        assert ledger.seed.done >= done
        done = ledger.seed.done
        with open_reader(url, "visits") as reader, pytest.raises(errors.SeedingError, match="being"):
            reader.get("u1")
    query = declared(spark, history, url, kind).start(history.checkpoint, trigger=AVAILABLE)
    with pytest.raises(StreamingQueryException, match="call seed again"):
        query.awaitTermination()
    before = txids(url)
    declared(spark, history, url, kind).seed(history.checkpoint)
    assert contents(url, "visits") == history.truth()
    counted = {key: txid for key, txid in before.items() if txid in ledger.view()}
    assert len(counted) > 5
    assert counted.items() <= txids(url).items()


def txids(url: str) -> dict[str, int]:
    store: Any = resolve(url).open("visits")
    keys = [key for page in store.scan(100) for key in page if "u" in key]
    return {
        key: int(record.split(b",")[0].strip(b"[")) for key, record in zip(keys, store.multi_get(keys), strict=True)
    }


def test_a_stage_that_is_gone_begins_the_seed_anew(spark, history, tmp_path):
    url = f"sqlite:///{tmp_path}/state.db"
    left = failed(spark, history, url, tmp_path, call=5, after=False)
    assert left.seed.done == 1
    for file in next(Path(history.checkpoint, "mapstate").iterdir()).glob("*.parquet"):
        file.unlink()
        break  # one file of several is enough
    counts = declared(spark, history, url)
    counts.seed(history.checkpoint, buckets=2)
    assert contents(url, "visits") == history.truth()
    with open_reader(url, "visits") as reader:
        assert reader.ledger().floor > left.last_txid


def test_a_checkpoint_that_is_lost_gives_the_seed_to_nobody_but_a_reset(spark, history, tmp_path):
    url = f"sqlite:///{tmp_path}/state.db"
    failed(spark, history, url, tmp_path, call=5, after=False)
    shutil.rmtree(history.checkpoint)

    def seed(policy: Any) -> None:
        declared(spark, history, url, partial(opaque, on_new_owner=policy)).seed(history.checkpoint, buckets=2)

    for policy in ("refuse", "adopt"):
        with pytest.raises(errors.StateOwnershipError, match="1 of 3 buckets"):
            seed(policy)
    seed("reset")
    assert contents(url, "visits") == history.truth()


def test_batch_0_that_is_planned_anew_begins_anew_or_is_refused(spark, history, tmp_path):
    url, offsets = f"sqlite:///{tmp_path}/state.db", Path(history.checkpoint, "offsets", "0")
    failed(spark, history, url, tmp_path, call=5, after=False)
    history.put("later", [("u1", 5)])
    for file in (offsets, offsets.with_name(".0.crc")):
        file.unlink()
    counts = declared(spark, history, url)
    counts.seed(history.checkpoint, buckets=3)
    assert contents(url, "visits") == history.truth()
    for folder in ("offsets", "commits"):
        for name in ("0", ".0.crc"):
            Path(history.checkpoint, folder, name).unlink()
    with pytest.raises(errors.ReplannedBatchError, match="it is a seed, which is not rolled back"):
        counts.seed(history.checkpoint)


def test_batch_0_that_comes_again_after_its_end_gives_nothing_downstream(spark, history, tmp_path):
    url, seen = f"sqlite:///{tmp_path}/state.db", list[Any]()
    counts = declared(spark, history, url)
    job = counts.newValuesStream().foreachBatch(lambda df, batch_id: seen.append((batch_id, df.count())))
    counts.seed(history.checkpoint, buckets=3)
    for name in ("0", ".0.crc"):
        Path(history.checkpoint, "commits", name).unlink()
    history.put("later", [("u1", 5)])
    job.start(history.checkpoint, trigger=AVAILABLE).awaitTermination()
    assert seen == [(1, 1)]
    assert contents(url, "visits") == history.truth()


def test_aggregates_in_python_are_staged_as_rows(spark, history, tmp_path):
    url = f"sqlite:///{tmp_path}/state.db"
    counts = declared(spark, history, url, counted=Count(), last=LastN("bytes", 2, by="bytes"))
    counts.seed(history.checkpoint, buckets=3)
    rows = [row for name in history.names() for row in history.rows(name)]
    for (user,), value in contents(url, "visits").items():
        sizes = sorted(size for name, size in rows if name == user)
        assert value["counted"] == len(sizes)
        assert sorted(value["last"]) == sizes[-2:]


def test_a_transform_goes_over_the_history_and_the_change_log_starts_after_it(spark, history, tmp_path):
    url = f"sqlite:///{tmp_path}/state.db"
    rows = newStream("visits", history.stream(spark)).transform(lambda df: df.where(F.col("bytes") % 2 == 0))
    counts = rows.persistentAggregate(opaque(url, changes=10), visits=Count())
    counts.seed(history.checkpoint)
    assert contents(url, "visits") == {(): {"visits": 500}}
    with open_reader(url, "visits") as reader:
        position, ledger = reader.position(), reader.ledger()
        assert ledger.changes.since == ledger.last_txid + 1
    history.put("more", [("u1", 2)])
    counts.start(history.checkpoint, trigger=AVAILABLE).awaitTermination()
    with open_reader(url, "visits") as reader:
        assert list(reader.changed_keys(position, reader.position())) == [()]


def test_a_dry_run_says_how_much_it_is_and_leaves_nothing(spark, history, tmp_path):
    url = f"sqlite:///{tmp_path}/state.db"
    found = declared(spark, history, url).seed(history.checkpoint, dry_run=True, buckets=2)
    assert (found.rows, found.keys, found.buckets) == (1_000, 37, 2)
    assert found.bytes > 1_000
    assert str(found).startswith("visits: 1,000 rows, 37 keys, 2 buckets, 0.0 MB staged. Nothing was written")
    assert [path.name for path in Path(history.checkpoint).parent.glob("checkpoint*")] == []
    with pytest.raises(errors.StateNotFoundError):
        open_reader(url, "visits")


REFUSED: dict[str, Callable[..., Any]] = {
    "it is non-transactional": lambda rows, url: rows.groupBy("user_id").persistentAggregate(
        non_transactional(url), visits=Count()
    ),
    "its windows go by the clock": lambda rows, url: (
        rows.tumblingWindow("1 hour").groupBy("user_id").persistentAggregate(opaque(url, name="w"), visits=Count())
    ),
    "it has windows by number of rows": lambda rows, url: (
        rows.window(TumblingCountWindow.of(3)).groupBy("user_id").persistentAggregate(opaque(url), visits=Count())
    ),
    "another state follows it": lambda rows, url: (
        rows.groupBy("user_id")
        .persistentAggregate(opaque(url), visits=Count())
        .newValuesStream()
        .groupBy("visits")
        .persistentAggregate(opaque(url, name="second"), users=Count())
    ),
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_cannot_be_seeded_is_refused_by_name_before_anything_is_written(spark, history, tmp_path, why):
    state = REFUSED[why](newStream("visits", history.stream(spark)), f"sqlite:///{tmp_path}/state.db")
    with pytest.raises(errors.ConfigurationError, match=f"cannot be seeded: {why}"):
        state.seed(history.checkpoint)
    assert not Path(history.checkpoint).exists()
    assert not (tmp_path / "state.db").exists()


def test_functions_of_ones_own_are_refused_too(spark, history, tmp_path):
    topology, url = Topology("site"), f"sqlite:///{tmp_path}/state.db"
    rows = topology.newStream("visits", history.stream(spark))
    state = rows.groupBy("user_id").persistentAggregate(opaque(url, name="one"), visits=Count())
    rows.foreachBatch(lambda df, batch_id: None)
    with pytest.raises(errors.ConfigurationError, match="functions or states of your own"):
        state.seed(history.checkpoint)


def test_a_source_without_rows_leaves_the_state_as_it_is(spark, visits, tmp_path):
    with pytest.raises(errors.UsageError, match="its source is empty"):
        declared(spark, visits, f"sqlite:///{tmp_path}/state.db").seed(visits.checkpoint)
