"""Source offsets in the ledger: where a state ends, told so that a new checkpoint can start there."""

from __future__ import annotations

import json
import os
import shutil
from types import SimpleNamespace
from typing import Any
from urllib.parse import unquote

import pytest
from spark_fixtures import Visits

from mapstate import Count, Sum, newStream, opaque, open_reader
from mapstate.errors import UsageError
from mapstate.protocol.ledger_record import Commit
from mapstate.protocol.plans import BatchPlan
from mapstate.spark.driver.offsets import offsets_of, plan_of
from mapstate.spark.driver.uncounted_files import files_not_counted

pytestmark = pytest.mark.spark

AVAILABLE = {"availableNow": True}


@pytest.fixture
def url(tmp_path: Any) -> str:
    return f"sqlite:///{tmp_path}/state.db"


def run(frame: Any, url: str, checkpoint: Any, **options: Any) -> None:
    counts = (
        newStream("visits", frame)
        .groupBy("user_id")
        .persistentAggregate(opaque(url, **options), visits=Count(), bytes=Sum("bytes"))
    )
    counts.start(checkpoint, trigger=AVAILABLE).awaitTermination(120)


def contents(url: str) -> dict[Any, Any]:
    with open_reader(url, "visits") as reader:
        return dict(reader.scan())


def offsets(url: str) -> str:
    with open_reader(url, "visits") as reader:
        return reader.ledger().last_commit.offsets


def put(visits: Visits, name: str, rows: list[tuple[str, int]], ms: int) -> str:
    """A file with a modification time of its own."""
    visits.put(name, rows)
    path = visits.input / f"{name}.csv"
    os.utime(path, ns=(ms * 1_000_000, ms * 1_000_000))
    return path.as_uri().replace("file:///", "file:/")


T = 1_700_000_000_000


def test_a_new_checkpoint_goes_on_exactly_where_the_state_ends(url, spark, visits, tmp_path):
    """Three checkpoints, files of one millisecond on both sides of the cut, and names that need escaping."""
    put(visits, "0", [("a", 1), ("b", 1)], T)
    one = put(visits, "first of two", [("a", 10)], T + 1)
    two = put(visits, "second%of+two", [("a", 100), ("é", 5)], T + 1)
    first = visits.stream(spark)
    run(first, url, visits.checkpoint)
    (entry,) = json.loads(offsets(url))
    assert (entry["logOffset"], entry["newest"]) == (2, T + 1)
    assert sorted(map(unquote, entry["paths"])) == sorted([unquote(one), unquote(two)])
    put(visits, "of the same time", [("a", 1000)], T + 1)
    put(visits, "3", [("b", 7)], T + 2)
    for at in range(2):
        shutil.rmtree(visits.checkpoint)
        rest = visits.stream(spark).where(files_not_counted(offsets(url)))
        run(rest, url, visits.checkpoint, on_new_owner="adopt")
        assert contents(url) == visits.truth()
        put(visits, f"later-{at}", [("a", 3), ("c", at)], T + 3 + at)
    # a query that stopped among files that the state had counted long ago has not gone back
    shutil.rmtree(visits.checkpoint)
    rest = visits.stream(spark).where(files_not_counted(offsets(url)))
    counts = newStream("visits", rest).groupBy("user_id")
    job = counts.persistentAggregate(opaque(url, on_new_owner="adopt"), visits=Count(), bytes=Sum("bytes"))
    before = json.loads(offsets(url))[0]["newest"]

    class StopError(Exception):
        pass

    def stop(*_: Any) -> None:
        raise StopError

    with pytest.raises(Exception, match="StopError"):
        job.newValuesStream().foreachBatch(stop).start(visits.checkpoint, trigger=AVAILABLE).awaitTermination(120)
    assert json.loads(offsets(url))[0]["newest"] == before
    shutil.rmtree(visits.checkpoint)
    run(visits.stream(spark).where(files_not_counted(offsets(url))), url, visits.checkpoint, on_new_owner="adopt")
    assert contents(url) == visits.truth()


def test_over_many_batches_and_a_compacted_log_the_newest_is_right(url, spark, visits):
    for n in range(12):
        put(visits, f"{n:02}", [("a", n)], T + n)
    run(visits.stream(spark), url, visits.checkpoint)
    assert json.loads(offsets(url))[0]["newest"] == T + 11
    put(visits, "late", [("a", 5)], T + 4)  # older than what was read
    run(visits.stream(spark), url, visits.checkpoint)
    (entry,) = json.loads(offsets(url))
    assert (entry["logOffset"], entry["newest"], entry["paths"]) == (12, T + 11, [f"file:{visits.input}/11.csv"])
    assert contents(url) == visits.truth()


def test_each_source_has_its_entry_in_the_order_of_the_plan(url, spark, visits, tmp_path):
    put(visits, "0", [("a", 1)], T)
    rate = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 3).load()
    union = visits.stream(spark).union(rate.selectExpr("'r'", "value"))
    query = (
        newStream("visits", union)
        .groupBy("user_id")
        .persistentAggregate(opaque(url), visits=Count())
        .start(visits.checkpoint, trigger={"once": True})
    )
    query.awaitTermination(120)
    file, counted = json.loads(offsets(url))
    assert (file["logOffset"], file["newest"]) == (0, T)
    own = (visits.checkpoint / "offsets" / "0").read_text().splitlines()
    assert counted == json.loads(own[-1])


def test_a_batch_that_is_given_by_hand_has_no_offsets(url, spark):
    frame = spark.createDataFrame([("a", 1)], "user_id string, bytes bigint")
    newStream("visits", frame).groupBy("user_id").persistentAggregate(opaque(url), visits=Count())(frame, 0)
    assert offsets(url) is None
    with pytest.raises(UsageError, match="do not tell which files"):
        files_not_counted(None)
    with pytest.raises(UsageError, match="source 1"):
        files_not_counted('[{"logOffset":3,"newest":1,"paths":[]}]', 1)


class Listed:
    """What py4j gives for a Scala Seq, an Option, a Map and an offset."""

    def __init__(self, *items: Any) -> None:
        self._items = items

    def size(self):
        return len(self._items)

    def apply(self, at):
        return self._items[at]

    def get(self, *_: Any):
        return self._items[0]

    def isDefined(self):
        return bool(self._items)

    def json(self):
        return self._items[0]


NO_JVM: Any = SimpleNamespace(
    sparkSession=SimpleNamespace(sparkContext=SimpleNamespace(_jvm=None, getLocalProperty=lambda _: None))
)


def test_a_spark_whose_offset_log_is_elsewhere_tells_the_offsets_of_its_progress(monkeypatch):
    from mapstate.spark.driver import access as module

    start, end = (Listed(Listed(Listed(offset))) for offset in ("3", '{"visits":{"1":7,"0":42}}'))
    query = SimpleNamespace(
        sources=lambda: Listed("a source"), committedOffsets=lambda: start, availableOffsets=lambda: end
    )
    monkeypatch.setattr(module._ClassicAccess, "_execution", query)
    plan = plan_of(NO_JVM, 4, None)
    assert plan == BatchPlan("[3]", '[{"visits":{"0":42,"1":7}}]')
    assert plan.digest().fingerprint is None


def test_a_spark_that_tells_nothing_of_a_batch_is_warned_of_and_fails_no_batch(monkeypatch, caplog):
    from mapstate.spark.driver import access as module

    monkeypatch.setattr(module._ClassicAccess, "_execution", object())
    assert plan_of(NO_JVM, 0, None) is None
    assert "would be taken for a replay" in caplog.text
    assert offsets_of(NO_JVM, None, "q", Commit(batch_id=0, txid=1, owner="q", offsets="[]")) is None


@pytest.mark.parametrize("version", [1, 2])
def test_a_source_that_has_not_begun_is_null_and_kafkas_own_json_is_kept(monkeypatch, version):
    from mapstate.spark.driver import access as module

    kafka = '{"visits":{"0":42,"1":7}}'
    lines = [kafka, "-", "no json"] if version == 1 else ["2:no json", f"0:{kafka}", "1:-"]
    entry = "\n".join([f"v{version}", '{"batchTimestampMs":17}', *lines])
    log = SimpleNamespace(get=lambda _: Listed("an entry"), serialize=lambda _, out: out.append(entry))
    source = SimpleNamespace(getClass=lambda: SimpleNamespace(getSimpleName=lambda: "KafkaMicroBatchStream"))
    query = SimpleNamespace(offsetLog=lambda: log, sources=lambda: Listed(source, source, source))
    monkeypatch.setattr(module._ClassicAccess, "_execution", query)
    monkeypatch.setattr(module, "_java_class", lambda *_: Written)
    plan = plan_of(NO_JVM, 1, None)
    assert (plan.planned_at, plan.previous_planned_at) == (17, 17)
    assert json.loads(offsets_of(NO_JVM, plan, "q", None)) == [json.loads(kafka), None, "no json"]


class Written(list[int]):
    """A ByteArrayOutputStream."""

    def toString(self, _: str) -> str:
        return "".join(self)


def test_where_the_files_cannot_be_read_the_next_batch_makes_up_for_it(url, spark, visits, monkeypatch):
    from mapstate.spark.driver import access as module

    put(visits, "0", [("a", 1)], T)
    run(visits.stream(spark), url, visits.checkpoint)
    put(visits, "1", [("a", 1)], T + 9)
    with monkeypatch.context() as patch:
        patch.setattr(module, "_files", lambda *_: 1 / 0)
        run(visits.stream(spark), url, visits.checkpoint)
    with pytest.raises(UsageError):
        files_not_counted(offsets(url))
    put(visits, "2", [("a", 1)], T + 5)
    run(visits.stream(spark), url, visits.checkpoint)
    assert json.loads(offsets(url))[0]["newest"] == T + 9
    with monkeypatch.context() as patch:  # nor are more paths kept than every reader shall read
        patch.setattr(module, "_MOST_PATHS", 0)
        put(visits, "3", [("a", 1)], T + 10)
        run(visits.stream(spark), url, visits.checkpoint)
    with pytest.raises(UsageError):
        files_not_counted(offsets(url))
    put(visits, "4", [("a", 1)], T + 2)
    run(visits.stream(spark), url, visits.checkpoint)
    assert json.loads(offsets(url))[0]["newest"] == T + 10
