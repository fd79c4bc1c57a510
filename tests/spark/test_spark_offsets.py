"""Source offsets in the ledger: where a state ends, told so that a new checkpoint can start there."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from typing import Any, cast
from urllib.parse import unquote

import pytest
from spark_fixtures import Visits

from mapstate import Count, Sum, newStream, opaque, open_reader
from mapstate.errors import UsageError
from mapstate.protocol.ledger_record import BatchPlan, Commit
from mapstate.spark.driver import offsets as module
from mapstate.spark.driver import uncounted_files
from mapstate.spark.driver.offsets import PlannedBatches, known_files, offsets_passed, with_files
from mapstate.spark.driver.query_run import QueryRun, SourceLog
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


def test_sources_that_are_read_twice_have_the_files_that_they_have_read(url, spark, visits, tmp_path):
    """Of a frame that a plan has twice there is one log, and the offset twice."""
    put(visits, "0", [("a", 1)], T)
    put(visits, "1", [("a", 1)], T + 1)
    (tmp_path / "others").mkdir()
    others = visits.input.rename(tmp_path / "others" / "input")
    visits.input.mkdir()
    put(visits, "2", [("a", 1)], T + 7)
    here = visits.stream(spark)
    there = spark.readStream.schema(here.schema).option("maxFilesPerTrigger", 1).csv(str(others))
    rate = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 3).load()
    rate = rate.selectExpr("'r' user_id", "value bytes")
    rate.union(here).union(rate).union(there).union(here).createOrReplaceTempView("every")
    run(spark.table("every").where("bytes >= 0"), url, visits.checkpoint)
    entries = json.loads(offsets(url))
    assert [entry.get("newest") for entry in entries] == [None, T + 7, None, T + 1, T + 7]
    assert [entry.get("logOffset") for entry in entries] == [None, 0, None, 1, 0]
    assert [len(entry.get("paths", ())) for entry in entries] == [0, 1, 0, 1, 1]


@pytest.mark.parametrize("prefix", ["viewfs:///here", "file:"])
def test_a_checkpoint_is_read_where_spark_puts_it(url, spark, visits, prefix):
    """Hadoop's viewfs is another file system, here mounted on the local one. No character of a place is escaped."""
    checkpoint = visits.checkpoint.with_name("check%20point #1")
    spark.conf.set("fs.viewfs.mounttable.default.link./here", "file:/")
    for n in range(3):
        put(visits, f"{n}", [("a", n)], T + n)
    try:
        run(visits.stream(spark), url, f"{prefix}{checkpoint}")
    finally:
        spark.conf.unset("fs.viewfs.mounttable.default.link./here")
    assert (checkpoint / "offsets" / "0").exists()
    (entry,) = json.loads(offsets(url))
    assert (entry["logOffset"], entry["newest"]) == (2, T + 2)
    assert contents(url) == visits.truth()


def test_a_batch_that_is_given_by_hand_has_no_offsets(url, spark):
    frame = spark.createDataFrame([("a", 1)], "user_id string, bytes bigint")
    newStream("visits", frame).groupBy("user_id").persistentAggregate(opaque(url), visits=Count())(frame, 0)
    assert offsets(url) is None
    with pytest.raises(UsageError, match="do not tell which files"):
        files_not_counted(None)
    with pytest.raises(UsageError, match="source 1"):
        files_not_counted('[{"logOffset":3,"newest":1,"paths":[]}]', 1)


class Planned:
    """What a batch asks of a Spark that has, or has not, what is in these texts by their places."""

    def __init__(self, texts: dict[str, str], sources: int = 1, progress: Any = None) -> None:
        self.texts = texts
        self._sources = sources
        self._progress = progress

    def checkpoint(self) -> str:
        return "c"

    def file_sources(self) -> list[None]:
        return [None] * self._sources

    def text(self, place: str) -> str:
        return self.texts[place]

    def progress(self) -> Any:
        return self._progress or self.texts["progress"]


@pytest.fixture
def planned_by() -> Callable[[Planned, int], PlannedBatches]:
    """The batches of a query, with this one planned."""

    def plan(spark: Planned, batch_id: int) -> PlannedBatches:
        planned = PlannedBatches()
        planned.next(cast("Any", spark), batch_id, QueryRun("q", "r"))
        return planned

    return plan


def test_a_spark_whose_offset_log_is_elsewhere_tells_the_offsets_of_its_progress(planned_by):
    planned = planned_by(Planned({}, progress=(["3"], ['{"visits":{"1":7,"0":42}}'])), 4)
    assert planned.plan == BatchPlan("[3]", '[{"visits":{"0":42,"1":7}}]')
    assert planned.plan.digest().fingerprint is None


def test_a_spark_that_tells_nothing_of_a_batch_is_warned_of_and_fails_no_batch(planned_by, caplog):
    planned = planned_by(Planned({}), 0)
    assert planned.plan is None
    assert "would be taken for a replay" in caplog.text
    assert planned.offsets(None, "q", Commit(batch_id=0, txid=1, owner="q", offsets="[]")) is None


@pytest.mark.parametrize("version", [1, 2])
def test_a_source_that_has_not_begun_is_null_and_kafkas_own_json_is_kept(planned_by, version):
    kafka = '{"visits":{"0":42,"1":7}}'
    lines = [kafka, "-", "no json"] if version == 1 else ["2:no json", f"0:{kafka}", "1:-"]
    entry = "\n".join([f"v{version}", '{"batchTimestampMs":17}', *lines])
    planned = planned_by(Planned({"c/offsets/0": entry, "c/offsets/1": entry}, 3), 1)
    assert (planned.plan.planned_at, planned.plan.previous_planned_at) == (17, 17)
    assert json.loads(planned.offsets(None, "q", None)) == [json.loads(kafka), None, "no json"]


def test_where_the_files_cannot_be_read_the_next_batch_makes_up_for_it(url, spark, visits, monkeypatch):
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


def test_a_number_of_another_log_is_forgotten_also_by_the_commits_that_follow():
    """A state goes on with a new checkpoint, whose first commit cannot read its files."""
    log = SourceLog("FileStreamSource[file:/in]", "c/sources/0")
    texts = {f"c/sources/0/{n}": f'v1\n{{"path":"file:///in/{n}","timestamp":{n},"batchId":{n}}}' for n in range(7)}

    def broken(_: str) -> str:
        raise OSError

    old = {"logOffset": 5, "source": log.name, "newest": 3, "paths": ["file:/old"]}
    first = with_files({"logOffset": 4}, log, known_files([old], 0, log, same_log=False), broken)
    assert "newest" not in first
    second = with_files({"logOffset": 5}, log, known_files([first], 0, log, same_log=True), broken)
    third = with_files({"logOffset": 6}, log, known_files([second], 0, log, same_log=True), texts.__getitem__)
    assert (third["newest"], third["paths"]) == (6, ["file:/in/6"])
    texts["c/sources/0/6"] = texts["c/sources/0/0"]
    third = with_files({"logOffset": 6}, log, known_files([second], 0, log, same_log=True), texts.__getitem__)
    assert third["newest"] == 5  # and not 3, which is all that the old commit knew


def test_where_nothing_was_known_the_whole_log_is_read_as_soon_as_it_can_be():
    log = SourceLog("FileStreamSource[file:/in]", "c/sources/0")
    texts = {f"c/sources/0/{n}": f'v1\n{{"path":"file:///in/{n}","timestamp":{9 - n},"batchId":{n}}}' for n in range(2)}
    first = with_files({"logOffset": 0}, log, {}, {}.__getitem__)
    assert first == {"logOffset": 0, "source": log.name}
    second = with_files({"logOffset": 1}, log, known_files([first], 0, log, same_log=True), texts.__getitem__)
    assert (second["newest"], second["paths"]) == (9, ["file:/in/0"])


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("file:/in", "/in", True),
        ("hdfs://name/in", "/in", True),
        ("s3a://eu/in", "s3a://us/in", False),
        ("file:/in", "file:/out", False),
        ("file:/in", "in", False),
    ],
)
def test_a_source_is_the_same_whether_its_store_was_named_or_not(one, other, same):
    old = {"logOffset": 1, "source": f"FileStreamSource[{one}]", "newest": 1, "paths": []}
    source = SourceLog(f"FileStreamSource[{other}]", "c/sources/0")
    assert known_files([None, old], 0, source, same_log=True) == (old if same else {})


def test_what_was_known_of_files_is_kept_while_nobody_can_tell_which_source_they_are_of():
    """A state goes on with a new checkpoint; a commit that is read later builds on what the old one knew."""
    log = SourceLog("FileStreamSource[file:/in]", "c/sources/0")
    old = {"logOffset": 5, "source": log.name, "newest": 3, "paths": ["file:/old"]}
    unknown = with_files({"logOffset": 0}, None, known_files([old], 0, None, same_log=False), {}.__getitem__)
    assert "newest" not in unknown
    files = {"c/sources/0/1": 'v1\n{"path":"file:///in/1","timestamp":1,"batchId":1}', "c/sources/0/0": "v1"}
    known = known_files([unknown], 0, log, same_log=True)
    assert with_files({"logOffset": 1}, log, known, files.__getitem__)["newest"] == 3
    assert with_files({"offset": 0}, None, known, files.__getitem__) == {"offset": 0}
    assert with_files({"logOffset": 0}, None, {}, files.__getitem__) == {"logOffset": 0}


def test_a_source_that_brings_nothing_for_a_while_forgets_nothing(url, spark, visits, tmp_path):
    """Two lost checkpoints; in between the query stops early, and one of two directories is empty."""
    for n in range(4):
        put(visits, f"{n}", [("a", n)], T + n)
    others = tmp_path / "others"
    others.mkdir()
    (others / "b.csv").write_text("b,1\n")

    def both() -> tuple[Any, Any]:
        here = visits.stream(spark)
        return here, spark.readStream.schema(here.schema).csv(str(others))

    def rest() -> Any:
        here, there = (frame.where(files_not_counted(offsets(url), at)) for at, frame in enumerate(both()))
        return here.union(there)

    here, there = both()
    run(here.union(there), url, visits.checkpoint)
    (others / "b.csv").unlink()
    shutil.rmtree(visits.checkpoint)
    counts = newStream("visits", rest()).groupBy("user_id")
    job = counts.persistentAggregate(opaque(url, on_new_owner="adopt"), visits=Count(), bytes=Sum("bytes"))

    def stop(*_: Any) -> None:
        raise ValueError("enough")

    with pytest.raises(Exception, match="enough"):
        job.newValuesStream().foreachBatch(stop).start(visits.checkpoint, trigger=AVAILABLE).awaitTermination(120)
    known = [entry["newest"] for entry in json.loads(offsets(url))]
    assert known[0] == T + 3
    assert known[1] > T + 3  # the file that has gone
    (others / "c.csv").write_text("c,1\n")
    shutil.rmtree(visits.checkpoint)
    run(rest(), url, visits.checkpoint, on_new_owner="adopt")
    truth = visits.truth() | {("b",): {"visits": 1, "bytes": 1}, ("c",): {"visits": 1, "bytes": 1}}
    assert contents(url) == truth


def a_state(spark: Any, url: str, name: str, ends: Any) -> Any:
    """A state whose last batch ends there, of a stream by hand."""
    frame = spark.createDataFrame([("a", 1)], "user_id string, bytes bigint")
    counts = newStream("visits", frame).groupBy("user_id").persistentAggregate(opaque(url, name), visits=Count())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PlannedBatches, "offsets", lambda *_: None if ends is None else json.dumps(ends))
        counts(frame, 0)
    return counts


def known_to_kafka(monkeypatch: pytest.MonkeyPatch, *bounds: Any) -> None:
    texts = [None if each is None else tuple(map(json.dumps, each)) for each in bounds]
    monkeypatch.setattr(uncounted_files, "_kafka_bounds", lambda _: texts)


def test_a_start_is_the_later_of_what_was_counted_and_what_is_there(url, spark, monkeypatch, caplog):
    ends = {"t": {"0": 40, "1": 0, "2": 7}}
    counts = a_state(spark, url, "s", [ends, {"logOffset": 3}, None])
    first = {"t": {"0": 40, "1": 0, "2": 9, "3": 0, "4": 2}, "u": {"0": 5}}
    latest = {"t": {"0": 40, "1": 6, "2": 9, "3": 3, "4": 2}, "u": {"0": 8}}
    known_to_kafka(monkeypatch, (first, latest), None, ({"v": {"0": 3}}, {"v": {"0": 4}}))
    start, files, empty = counts.starting_offsets()
    assert json.loads(start.json) == {"t": {"0": 40, "1": 0, "2": 9, "3": -2, "4": -2}, "u": {"0": -2}}
    assert start.lost == (("t", 2, 7, 9), ("t", 4, 0, 2))
    assert (files, empty) == (None, ('{"v": {"0": -2}}', ()))
    warned = [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]
    assert warned == [
        "topic t, partition 2: offsets 7 to below 9 are removed, and were not counted",
        "topic t, partition 4: offsets 0 to below 2 are removed, and were not counted",
    ]


@pytest.mark.parametrize(
    ("ends", "why"),
    [
        ([{"t": {"0": 5}}], None),
        ([{"t": {"0": 6}}], "partition 0 of topic 't' was counted up to offset 6, and does not reach it"),
        ([{"t": {"0": 4, "1": 0}}], "partition 1 of topic 't' was counted up to offset 0"),
        ([{"t": {"0": 4}, "gone": {"0": 1}}], "partition 0 of topic 'gone'"),
        ([{"t": {"0": 4}}, {"t": {"0": 4}}], "no start is right for s: .* reads 1 sources, 1 of Kafka"),
        ([{"logOffset": 3, "newest": 1, "paths": []}], "no start is right for s: .* reads 1 sources, 1 of Kafka"),
        ([], "no start is right"),
        ([7], "no start is right for s: .* reads 1 sources, 1 of Kafka"),
        (None, "no start is right"),
    ],
)
def test_where_no_start_is_right_there_is_an_error(ends, why, url, spark, monkeypatch):
    counts = a_state(spark, url, "s", ends)
    known_to_kafka(monkeypatch, ({"t": {"0": 0}}, {"t": {"0": 5}}))
    if why is None:
        assert counts.starting_offsets() == [('{"t": {"0": 5}}', ())]
    else:
        with pytest.raises(UsageError, match=why):
            counts.starting_offsets()


def test_states_that_end_apart_have_no_common_start(url, spark, monkeypatch):
    first, other = (a_state(spark, url, name, [{"t": {"0": end}}]) for end, name in enumerate(("s", "o")))
    first.query.plan.branches += other.query.plan.branches
    known_to_kafka(monkeypatch, ({"t": {"0": 0}}, {"t": {"0": 5}}))
    with pytest.raises(UsageError, match="no start is right for (s, o|o, s)"):
        first.starting_offsets()
    first.query.plan.branches.pop()
    first.newValuesStream().persistentAggregate(opaque(url, "o"), n=Count())  # a state that follows is one, too
    with pytest.raises(UsageError, match="no start is right for (s, o|o, s)"):
        first.starting_offsets()


def test_a_stream_without_kafka_is_told_how_files_go_on(url, spark, visits):
    put(visits, "0", [("a", 1)], T)
    run(visits.stream(spark), url, visits.checkpoint)
    counts = newStream("visits", visits.stream(spark)).groupBy("user_id").persistentAggregate(opaque(url), n=Count())
    with pytest.raises(UsageError, match="files_not_counted"):
        counts.starting_offsets()


@pytest.mark.parametrize(
    ("start", "end", "passed"),
    [
        ([{"t": {"0": 5, "1": 7}}], [{"t": {"0": 9, "1": 7}}], 4),
        ([{"t": {"0": 5}}, {"u": {"0": 0}}], [{"t": {"0": 5}}, {"u": {"0": 410}}], 410),
        ([{"t": {"0": 5, "1": 7}}], [{"t": {"0": 9}}], 4),  # a partition was deleted
        ([{"t": {"0": 5}}], [{"t": {"0": 9, "1": 7}}], None),  # one is new, and nobody tells where it begins
        ([None], [{"t": {"0": 9}}], None),
        ([{"logOffset": 1}], [{"logOffset": 2}], None),
        ([3], [5], None),
        ([], [{"t": {"0": 9}}], None),
        ({"named": {"t": {"0": 1}}}, {"named": {"t": {"0": 2}}}, None),
    ],
)
def test_offsets_are_counted_where_they_are_numbers_by_partition(start, end, passed):
    assert offsets_passed(BatchPlan(json.dumps(start), json.dumps(end))) == passed
    assert offsets_passed(None) is None
