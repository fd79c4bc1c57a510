"""Recounts: keys computed anew from a history, exact against plain Python, where the last batch ended or refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from cases import full
from every_store import AEROSPIKE, FULL, REDIS, url_of
from partitioned_log import SCHEMA, PartitionedLog
from pyspark.sql import functions as F
from spark_fixtures import AVAILABLE, DATA_SOURCE, Visits, contents
from typer.testing import CliRunner

from mapstate import (
    CombinerAggregator,
    Count,
    LastN,
    Max,
    ReducerAggregator,
    Sum,
    errors,
    newStream,
    opaque,
    open_reader,
)
from mapstate.backends import resolve
from mapstate.cli.commands import app
from mapstate.maps.operator_list import entry_key
from mapstate.operations.forget import forget, listed
from mapstate.operations.swap import swap
from mapstate.operations.vacuum import vacuum
from mapstate.protocol.ledger import Ledger
from mapstate.spark import Coordinates, InitialRows, StartsAt
from mapstate.testing import Fail, FaultyBackend, HasKey, Wait, wait_for

pytestmark = [pytest.mark.spark, DATA_SOURCE]

PLACES = Coordinates("topic", "partition", "offset")
STORES = [REDIS, full("sqlite"), FULL[-1], AEROSPIKE]


@pytest.fixture(params=STORES)
def url(request: Any, tmp_path: Path) -> str:
    return url_of(request, tmp_path)


@pytest.fixture
def lite(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/state.db"


@pytest.fixture
def log(tmp_path: Path) -> PartitionedLog:
    """Each user's bytes fall, so what is last is not the greatest."""
    log = PartitionedLog(tmp_path)
    log.send(*((f"u{at % 7}", 300 - at) for at in range(100)))
    return log


class Largest(CombinerAggregator):
    """A combiner of one's own, which keeps no smaller values."""

    value_type = "bigint"

    def columns(self) -> list[str]:
        return ["bytes"]

    def init(self, row: Any) -> Any:
        return row["bytes"]

    def combine(self, a: Any, b: Any) -> Any:
        return max(a, b)


class Seen(ReducerAggregator):
    """A reducer of one's own, which reads all columns of a row."""

    def init(self) -> Any:
        return []

    def reduce(self, acc: Any, row: Any) -> Any:
        assert set(row) == {"topic", "partition", "offset", "user_id", "bytes"}, row
        return sorted([*acc, row["bytes"]])


def declared(spark: Any, log: PartitionedLog, backend: Any, **spec: Any) -> Any:
    aggregates = spec.pop("aggregates", None) or {"visits": Count(), "bytes": Sum("bytes"), "most": Max("bytes")}
    rows = newStream("visits", log.stream(spark)).groupBy("user_id")
    return rows.persistentAggregate(opaque(backend, max_attempts=1, **spec), **aggregates)


def run(state: Any, log: PartitionedLog) -> None:
    state.start(str(log.folder.parent / "checkpoint"), trigger=AVAILABLE).awaitTermination()


def truth(log: PartitionedLog, wrong: Any = ()) -> dict[Any, Any]:
    """By plain Python: the log, and rows that were counted by mistake."""
    out: dict[Any, Any] = {}
    for user, size in [row for part in log.parts for row in part] + [*wrong]:
        known = out.setdefault((user,), {"visits": 0, "bytes": 0, "most": size})
        known["visits"] += 1
        known["bytes"] += size
        known["most"] = max(known["most"], size)
    return out


def history(spark: Any, log: PartitionedLog, ends: Any = None, of: Any = PLACES, change: Any = list) -> InitialRows:
    """All rows of the log, or those below some offsets."""
    return InitialRows(log.table(spark, ends=ends or log.ends(), change=change), ends=of)


def keys(spark: Any, *users: str | None) -> Any:
    return spark.createDataFrame([(user,) for user in users], "user_id string")


def ledger(url: Any, name: str = "visits") -> Any:
    with open_reader(url, name) as reader:
        return reader.ledger()


WRONG = [("u1", 9_000), ("u2", 9_001), ("ghost", 9_002)]


def made_wrong(spark: Any, state: Any) -> None:
    """What should never have been counted; the history lacks it."""
    state.correct(add=spark.createDataFrame([("visits", 0, 0, *row) for row in WRONG], SCHEMA), id="wrong")


def test_keys_are_computed_anew_and_the_stream_goes_on(spark, log, url):
    state = declared(spark, log, url)
    run(state, log)
    made_wrong(spark, state)
    assert contents(url, "visits") == truth(log, WRONG)
    before = ledger(url)
    asked = {"recount": history(spark, log), "keys": keys(spark, "u1", "ghost", "never", "u1"), "counted": ["wrong"]}
    done = state.correct(**asked, id="a")
    rows = sum(user == "u1" for part in log.parts for user, _ in part)
    assert (done.rows, done.keys, done.was_done) == (rows, 3, False)
    right = truth(log, WRONG[1:2])
    assert contents(url, "visits") == right
    after = ledger(url)
    assert (after.last_commit.batch_id, after.last_commit.offsets) == (0, before.last_commit.offsets)
    assert after.keys_held() == len(right)
    log.send(("u1", 5), ("ghost", 7))
    again = state.correct(**asked | {"recount": history(spark, log)}, id="a")  # rows beyond the position are left out
    assert again == done._replace(was_done=True)
    assert ledger(url) == after
    run(declared(spark, log, url), log)
    assert contents(url, "visits") == truth(log, WRONG[1:2])
    assert state.correct(**asked | {"recount": history(spark, log)}, id="a").was_done  # also after a batch
    assert ledger(url).keys_held() == len(right) + 1
    vacuum(url, "visits")
    assert contents(url, "visits") == truth(log, WRONG[1:2])


@pytest.mark.parametrize(
    "aggregates",
    [
        {"own": Largest()},
        full({"own": Largest(), "visits": Count()}),
        {"own": Seen()},
        full({"last": LastN("bytes", 2, by="offset"), "most": Max("bytes")}),
        full({"most": Max("bytes")}),
    ],
    ids=lambda of: " ".join(map(str, of.values())),
)
def test_every_aggregator_is_as_if_the_rows_had_never_come(spark, log, lite, aggregates):
    state = declared(spark, log, lite, aggregates=aggregates)
    run(state, log)
    right = contents(lite, "visits")
    made_wrong(spark, state)
    assert contents(lite, "visits") != right
    state.correct(recount=history(spark, log), keys=keys(spark, "u1", "u2", "ghost"), counted=["wrong"], id="a")
    assert contents(lite, "visits") == right


@pytest.mark.parametrize("counts", [{"rows": Seen(), "own": Largest()}, {"visits": Count(), "most": Max("bytes")}])
def test_rows_come_in_many_parts_of_a_task(spark, log, lite, counts):
    """A reducer's rows that wait for the value before them get none; whole chunks are of keys without rows."""
    state = declared(spark, log, lite, aggregates=counts, chunk_bytes=60, chunk_size=2)
    run(state, log)
    right = contents(lite, "visits")
    made_wrong(spark, state)
    gone = [f"never{at}" for at in range(20)]
    done = state.correct(
        recount=history(spark, log), keys=keys(spark, "ghost", *gone, "u1", "u2"), counted=["wrong"], id="a"
    )
    assert (done.rows, done.keys) == (sum(user in ("u1", "u2") for part in log.parts for user, _ in part), 23)
    assert contents(lite, "visits") == right
    assert ledger(lite).keys_held() == len(right)


def test_a_null_key_and_keys_of_several_columns_are_like_any_other(spark, log, lite):
    log.send((None, 5), (None, 6), ("u1", 5))
    rows = newStream("visits", log.stream(spark)).transform(lambda df: df.where("bytes % 2 = 1"))
    state = rows.groupBy("user_id", "partition").persistentAggregate(opaque(lite), most=Max("bytes"), visits=Count())
    run(state, log)
    right = contents(lite, "visits")
    assert (None, 0) in right or (None, 1) in right
    extra = [("visits", 0, 0, None, 999), ("visits", 1, 0, None, 999), ("visits", 1, 0, "x", 999)]
    state.correct(add=spark.createDataFrame(extra, SCHEMA), id="wrong")
    asked = [(None, 0), (None, 1), ("x", 1), ("x", None)]
    frame = spark.createDataFrame(asked, "user_id string, partition int").withColumn("more", F.lit(1))
    done = state.correct(recount=history(spark, log), keys=frame, counted=["wrong"], id="a")
    assert (done.rows, done.keys) == (1, 4)
    assert contents(lite, "visits") == right


def test_keys_that_are_drawn_are_drawn_once(spark, log, lite):
    log.send(*((f"many{at}", at) for at in range(300)))
    state = declared(spark, log, lite)
    run(state, log)
    drawn = spark.range(300).where("rand() < 0.5").selectExpr("concat('many', id) user_id")
    state.correct(recount=history(spark, log), keys=drawn, id="a")
    assert contents(lite, "visits") == truth(log)


@pytest.mark.parametrize("aggregates", [{"visits": Count(), "most": Max("bytes")}, full({"most": Max("user_id")})])
def test_other_keys_of_a_block_stay_as_they_are(spark, log, url, aggregates):
    log.send(*((f"more{at}", at) for at in range(40)))
    state = declared(spark, log, url, blocks=4, aggregates=aggregates)
    run(state, log)
    right = contents(url, "visits")
    made_wrong(spark, state)
    wrong = contents(url, "visits")
    asked = keys(spark, "u1", "ghost", "never", *(f"more{at}" for at in range(3)))
    done = state.correct(recount=history(spark, log), keys=asked, counted=["wrong"], id="a")
    assert done.keys == 6
    assert contents(url, "visits") == right | {("u2",): wrong["u2",]}
    assert ledger(url).keys_held() == len(right)
    state.correct(recount=history(spark, log), keys=keys(spark, "u2"), counted=["wrong", "a"], id="b")
    assert contents(url, "visits") == right


# Where the history ends


def refused(state: Any, url: str, match: str, kind: Any = errors.UsageError, **asked: Any) -> None:
    before, values = ledger(url), contents(url, "visits")
    with pytest.raises(kind, match=match):
        state.correct(**{"id": "a"} | asked)
    assert (ledger(url), contents(url, "visits")) == (before, values)


def without(*gone: tuple[int, int]) -> Any:
    return lambda rows: [row for row in rows if (row[1], row[2]) not in gone]


@pytest.mark.parametrize(
    ("ends", "of", "change", "match"),
    [
        ((50, 50), StartsAt({"visits": {"0": 50, "1": 51}}), list, "ends at 51 by StartsAt, .* last batch ended at 50"),
        ((50, 50), StartsAt({"visits": {"0": 50}}), list, "names no such partition by StartsAt, and the last batch"),
        (
            (50, 49),
            PLACES,
            list,
            "offsets 49 to 49 of partition visits 1 are in neither: .* the last batch ended at 50",
        ),
        ((50, 50), PLACES, without((0, 7)), "1 offsets .* visits 0 below the end of the last batch, 50, .* one is 7"),
        ((50, 50), PLACES, lambda rows: [*rows, rows[0]], "whose offset is there before"),
        ((50, 50), PLACES, lambda rows: [*rows, ("visits", 2, 0, "u1", 1)], "no end of, such as visits 2"),
        ((50, 50), PLACES, lambda rows: [*rows, ("visits", None, 0, "u1", 1)], "1 rows of the history have no topic"),
    ],
)
def test_a_history_that_does_not_end_where_the_last_batch_did_is_refused(spark, log, lite, ends, of, change, match):
    state = declared(spark, log, lite)
    run(state, log)
    assert log.ends() == (50, 50)
    refused(state, lite, match, recount=history(spark, log, ends, of, change), keys=keys(spark, "u1"))


def test_a_history_that_names_where_the_last_batch_ended_counts_whole(spark, log, lite):
    state = declared(spark, log, lite)
    run(state, log)
    named = {
        "recount": history(spark, log, (50, 50), StartsAt({"visits": {"0": 50, "1": 50}})),
        "keys": keys(spark, "u1"),
    }
    done = state.correct(**named, id="a")
    log.send(("u1", 1))
    run(declared(spark, log, lite), log)
    assert state.correct(**named, id="a") == done._replace(was_done=True)
    assert contents(lite, "visits") == truth(log)
    refused(state, lite, "last batch ended at 51", **named, counted=["a"], id="b")


def test_a_history_of_what_the_stream_passed_over_may_have_holes_if_that_is_said(spark, log, lite):
    log.start = {"0": 10, "1": 0}
    state = declared(spark, log, lite)
    run(state, log)
    asked = {"change": without(*((0, at) for at in range(10)))}
    refused(
        state, lite, "10 offsets of partition visits 0", recount=history(spark, log, **asked), keys=keys(spark, "u1")
    )
    right, places = contents(lite, "visits"), Coordinates("topic", "partition", "offset", holes="before")
    state.correct(recount=history(spark, log, of=places, **asked), keys=keys(spark, "u1"), id="a")
    assert contents(lite, "visits") == right


def test_where_nothing_tells_where_the_last_batch_ended_it_is_refused(spark, visits: Visits, lite):
    visits.put("0", [("u1", 1)])
    state = newStream("visits", visits.stream(spark)).groupBy("user_id").persistentAggregate(opaque(lite), n=Count())
    state.start(visits.checkpoint, trigger=AVAILABLE).awaitTermination()
    rows = spark.createDataFrame([("u1", 1)], "user_id string, bytes bigint")
    asked = {"recount": InitialRows(rows, ends=StartsAt({"visits": {"0": 1}})), "keys": keys(spark, "u1")}
    why = r"Spark told no end by partition of source 0, which is .*logOffset.*\. Build the state anew beside this one"
    refused(state, lite, why, **asked)
    by_hand = newStream("visits", visits.stream(spark)).groupBy("user_id").persistentAggregate(opaque(lite), n=Count())
    by_hand.correct(add=rows, id="b")  # which has the offsets of files, and the id is asked for first
    with pytest.raises(errors.UsageError, match="Spark told no end"):
        state.correct(**asked, id="b")


@pytest.fixture
def faulty(url: str, tmp_path: Path) -> Callable[..., Any]:
    """The store with a fault."""

    def made(fault: Any) -> Any:
        folder = tmp_path / f"faults-{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        return FaultyBackend(resolve(url), folder, (fault,))

    return made


def test_a_batch_that_is_committed_while_the_history_is_read_is_not_lost(spark, log, lite):
    hooks: list[Any] = []

    def step(df: Any) -> Any:
        while hooks:
            hooks.pop()()
        return df

    def state() -> Any:
        rows = newStream("visits", log.stream(spark)).transform(step).groupBy("user_id")
        counts = {"visits": Count(), "bytes": Sum("bytes"), "most": Max("bytes")}
        return rows.persistentAggregate(opaque(lite, max_attempts=1), **counts)

    run(state(), log)

    def batch() -> None:
        log.send(("u1", 5_000))
        run(state(), log)

    correcting, asked = state(), {"recount": history(spark, log), "keys": keys(spark, "u1")}
    hooks.append(batch)
    with pytest.raises(errors.FencedError, match="Recount again"):
        correcting.correct(**asked, id="a")
    assert not hooks
    assert contents(lite, "visits") == truth(log)
    hooks.append(lambda: Ledger(resolve(lite).open("visits"), "visits").rollback())
    with pytest.raises(errors.FencedError, match="Recount again"):
        correcting.correct(recount=history(spark, log), keys=keys(spark, "u1"), id="a")
    assert not hooks
    assert listed(lite, "visits", "correction") == []


@pytest.mark.parametrize("call", [1, full(2)])  # the begin, the commit
def test_a_batch_that_begins_meanwhile_fences_it_and_a_repeated_call_counts_once(spark, log, url, faulty, call):
    state = declared(spark, log, url)
    run(state, log)
    made_wrong(spark, state)
    backend = faulty(Wait(method="swap", call=call, until="go"))
    correcting, asked = declared(spark, log, backend), {"keys": keys(spark, "u1", "ghost"), "counted": ["wrong"]}
    before = history(spark, log)
    with ThreadPoolExecutor(1) as pool:
        called = pool.submit(lambda: correcting.correct(recount=before, **asked, id="a"))
        folder = Path(backend.folder)
        wait_for(lambda: called.done() or any(folder.iterdir()) or ledger(url).in_flight, "the call to come as far", 60)
        if call == 2:
            store: Any = resolve(url).open("visits")
            wait_for(lambda: called.done() or store.multi_get([entry_key(1)]) != [None], "the tasks to end", 60)
        log.send(("u1", 5_000))
        run(declared(spark, log, url), log)
        Path(backend.folder, "go").touch()
        with pytest.raises(errors.FencedError):
            called.result()
    assert contents(url, "visits") == truth(log, WRONG)
    assert not state.correct(recount=history(spark, log), **asked, id="a").was_done
    assert contents(url, "visits") == truth(log, WRONG[1:2])


def test_a_history_that_changes_while_it_is_read_is_refused(spark, log, lite, tmp_path):
    hooks: list[Any] = []
    place = str(tmp_path / "table")

    def step(df: Any) -> Any:
        while hooks:
            hooks.pop()()
        return df

    rows = newStream("visits", log.stream(spark)).transform(step).groupBy("user_id")
    state = rows.persistentAggregate(opaque(lite), visits=Count())
    run(state, log)
    right = contents(lite, "visits")
    log.table(spark, ends=log.ends()).write.partitionBy("offset").parquet(place)
    read = spark.read.schema(SCHEMA).parquet(place)

    def lost() -> None:
        for folder in Path(place).glob("offset=7"):
            for file in folder.iterdir():
                file.unlink()

    spark.conf.set("spark.sql.files.ignoreMissingFiles", "true")
    hooks.append(lost)
    try:
        with pytest.raises(errors.UsageError, match=r"changed while it was read: .* Call correct again"):
            state.correct(recount=InitialRows(read, ends=PLACES), keys=keys(spark, "u1"), id="a")
    finally:
        spark.conf.unset("spark.sql.files.ignoreMissingFiles")
    assert contents(lite, "visits") == right


# Corrections, forgotten keys, swaps, followers


def test_a_recount_that_would_undo_corrections_is_refused_until_they_are_named(spark, log, lite):
    state = declared(spark, log, lite)
    run(state, log)
    late = [("visits", 0, 0, "u1", 9_000)]
    state.correct(add=spark.createDataFrame(late, SCHEMA), id="late")
    asked = {"recount": history(spark, log), "keys": keys(spark, "u2")}
    refused(state, lite, "corrections whose rows the history may lack, .*: 'late'[.]", **asked, counted=["other"])
    refused(state, lite, "counted= is a list of ids", **asked, counted="late")
    state.correct(**asked, counted=["late"], id="a")
    assert contents(lite, "visits") == truth(log, [("u1", 9_000)])
    for entry in ("late", "a"):
        with pytest.raises(errors.UsageError, match=f"counts other rows under the id {entry!r}"):
            state.correct(recount=history(spark, log), keys=keys(spark, "u3"), id=entry)
    with pytest.raises(errors.UsageError, match="counts other rows under the id 'a'"):
        state.correct(add=spark.createDataFrame(late, SCHEMA), id="a")
    with pytest.raises(errors.UsageError, match="the history may lack, .*: 'a'[.]"):
        state.correct(**asked, counted=["late"], id="b")
    assert state.correct(**asked, id="a").was_done


def test_keys_that_were_forgotten_do_not_come_back(spark, log, lite):
    state = declared(spark, log, lite)
    run(state, log)
    forget(lite, "visits", {"user_id": "u1"}, id="ticket-7", followers_have=0)
    asked = {"recount": history(spark, log), "keys": keys(spark, "u1", "u2")}
    refused(state, lite, "1 keys of the recount were forgotten", **asked)
    right = contents(lite, "visits")
    state.correct(**asked | {"keys": keys(spark, "u2")}, id="a")
    assert contents(lite, "visits") == right
    assert ("u1",) not in right


def test_it_is_listed_taken_back_and_asked_for_by_a_swap(spark, log, url):
    state = declared(spark, log, url)
    run(state, log)
    made_wrong(spark, state)
    wrong = contents(url, "visits")
    asked = {"recount": history(spark, log), "keys": keys(spark, "u1", "u2", "ghost"), "counted": ["wrong"]}
    state.correct(**asked, id="a")
    shown = json.loads(CliRunner().invoke(app, ["ledger", url, "visits", "--json"]).output)
    assert [entry["id"] for entry in shown["corrections"]] == ["wrong", "a"]
    ran = CliRunner().invoke(app, ["rollback", url, "visits", "--yes"])
    assert ran.exit_code == 0, ran.output
    assert contents(url, "visits") == wrong
    assert not state.correct(**asked, id="a").was_done
    assert contents(url, "visits") == truth(log)
    rows = newStream("visits", log.stream(spark)).groupBy("user_id")
    newer = rows.persistentAggregate(opaque(url, name="v.2"), visits=Count(), bytes=Sum("bytes"), most=Max("bytes"))
    newer.start(str(log.folder.parent / "second"), trigger=AVAILABLE).awaitTermination()
    with pytest.raises(errors.UsageError, match="lacks corrections of 'visits', .*: 'wrong', 'a'"):
        swap(url, {"visits": "v.2"})
    swap(url, {"visits": "v.2"}, counted=["wrong", "a"])


@pytest.mark.parametrize("url", STORES[:3], indirect=True)
def test_followers_get_its_keys(spark, log, url):
    state = declared(spark, log, url, changes=10)
    run(state, log)
    made_wrong(spark, state)
    with open_reader(url, "visits") as reader:
        start = reader.position()
        state.correct(recount=history(spark, log), keys=keys(spark, "u1", "ghost"), counted=["wrong"], id="a")
        assert sorted(reader.changed_keys(start, reader.position())) == [("ghost",), ("u1",)]


# Crashes


POINTS: dict[str, dict[str, Any]] = {
    "begin": {"method": "swap", "call": 1},
    "records": {"method": "multi_put", "call": 1},
    "entry": {"method": "multi_put", "where": HasKey(entry_key(1))},
    "commit": {"method": "swap", "call": 2},
}


@pytest.mark.parametrize(
    ("point", "after"),
    [
        *(full("begin", False), full("begin", True), full("records", False), ("records", True)),
        *(full("entry", False), ("entry", True), full("commit", False), ("commit", True)),
    ],
)
@pytest.mark.parametrize("is_between", [True, full(False)])
def test_it_is_there_once_after_a_crash_at_each_write(spark, log, url, faulty, monkeypatch, point, after, is_between):
    """As a driver leaves it that was killed: nothing is given up. A batch may come in between."""
    state = declared(spark, log, url)
    run(state, log)
    made_wrong(spark, state)
    fault = Fail(**POINTS[point], after=after, error=errors.CorruptStoreError)
    asked = {"keys": keys(spark, "u1", "ghost"), "counted": ["wrong"]}
    with monkeypatch.context() as patch:
        patch.setattr(Ledger, "give_up_operator", lambda *_: None)
        with pytest.raises(errors.CorruptStoreError):
            declared(spark, log, faulty(fault)).correct(recount=history(spark, log), **asked, id="a")
    counts = point == "commit" and after
    assert contents(url, "visits") == truth(log, WRONG[1:2] if counts else WRONG)
    if is_between:
        log.send(("u1", 9), ("ghost", 1))
        run(declared(spark, log, url), log)
        assert contents(url, "visits") == truth(log, WRONG[1:2] if counts else WRONG)
    for was_done in (counts, True):
        assert state.correct(recount=history(spark, log), **asked, id="a").was_done == was_done
        assert contents(url, "visits") == truth(log, WRONG[1:2])
    assert [entry.id for entry in listed(url, "visits", "correction")] == ["wrong", "a"]
    assert ledger(url).keys_held() == len(truth(log, WRONG[1:2]))


# What is refused


def test_calls_that_are_wrong_are_refused(spark, log, lite):
    state = declared(spark, log, lite)
    run(state, log)
    rows, asked = log.table(spark, ends=log.ends()), keys(spark, "u1")
    ended = InitialRows(rows, ends=PLACES)
    for given, text in (
        (
            {"recount": rows, "keys": asked},
            r"a history that says where it ends, InitialRows\(rows, ends=...\), not a Data",
        ),
        ({"recount": ended}, "has no windows. A recount of windows .* and that of other states has keys="),
        ({"keys": asked}, "a recount takes a history"),
        ({"add": rows, "counted": ["x"]}, "a recount takes a history"),
        ({"recount": ended, "keys": asked, "add": rows}, "or a recount"),
        (
            {"recount": ended, "keys": asked.withColumnRenamed("user_id", "user")},
            "user_id string. They have none there",
        ),
        ({"recount": ended, "keys": asked.select(F.lit(1).alias("user_id"))}, "user_id string. They have int there"),
        ({"recount": ended, "keys": log.stream(spark).select("user_id")}, "no stream"),
        ({"recount": InitialRows(rows.drop("bytes"), ends=PLACES), "keys": asked}, "need the columns of the stream"),
        (
            {"recount": InitialRows(rows, ends=Coordinates("topic", "user_id", "offset")), "keys": asked},
            "a partition is",
        ),
        ({"recount": InitialRows(rows, ends="end"), "keys": asked}, "a Coordinates or a StartsAt"),
    ):
        refused(state, lite, text, (errors.UsageError, errors.ConfigurationError), **given)


REFUSED: dict[str, Callable[..., Any]] = {
    "it has one key": lambda rows, url: rows.persistentAggregate(opaque(url), most=Max("bytes")),
    "its records expire": lambda rows, _: rows.groupBy("user_id").persistentAggregate(
        opaque("redis://127.0.0.1:1", ttl=60), most=Max("bytes")
    ),
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_cannot_be_recounted_is_refused_by_name_before_anything_is_written(spark, log, tmp_path, why):
    state = REFUSED[why](newStream("visits", log.stream(spark)), f"sqlite:///{tmp_path}/state.db")
    with pytest.raises(errors.ConfigurationError, match=f"cannot be corrected: {why}"):
        state.correct(recount=history(spark, log), keys=keys(spark, "u1"), id="a")
    assert not (tmp_path / "state.db").exists()


def test_functions_behind_the_state_get_the_keys_if_that_is_said(spark, log, lite):
    run(declared(spark, log, lite), log)
    state, passed = declared(spark, log, lite), dict[int, list[Any]]()
    state.newValuesStream().foreachBatch(lambda df, number: passed.update({number: df.collect()}))
    asked = {"recount": history(spark, log), "keys": keys(spark, "u1", "nobody")}
    refused(state, lite, "Say whether they are called", **asked)
    assert not state.correct(**asked, emit=False, id="a").was_done
    assert (contents(lite, "visits"), passed) == (truth(log), {})
    for is_again in (False, True):
        assert state.correct(**asked, counted=["a"], emit=True, id="b").was_done is is_again
        value = truth(log)[("u1",)]
        found = {row.user_id: row.asDict() for row in passed.pop(-2)}
        assert found["u1"] == {"user_id": "u1", **value}
        assert set(found) <= {"u1", "nobody"}


def test_a_batch_in_flight_is_ended_first_or_left_behind(spark, log, url, faulty):
    state = declared(spark, log, url)
    run(state, log)
    log.send(("u1", 5))
    with pytest.raises(Exception, match="CorruptStoreError"):
        run(declared(spark, log, faulty(Fail(method="swap", call=2, error=errors.CorruptStoreError))), log)
    if ledger(url).in_flight is not None and ledger(url).in_flight.epoch == ledger(url).epoch:
        refused(state, url, r"in flight \(batch 1\)", recount=history(spark, log), keys=keys(spark, "u1"))
    state.correct(recount=history(spark, log), keys=keys(spark, "u1"), take_over=True, id="a")
    run(declared(spark, log, url), log)
    assert contents(url, "visits") == truth(log)
