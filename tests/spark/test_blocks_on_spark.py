"""States with blocks on Spark: each key is in the block where readers look, every way counts alike; refusals."""

from __future__ import annotations

import asyncio
import datetime as dt
import itertools
import random
import re
import sqlite3
from collections import Counter
from types import SimpleNamespace
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from cases import full
from every_store import AEROSPIKE, FULL, REDIS, url_of
from pyspark.sql import functions as F
from spark_fixtures import AVAILABLE, DATA_SOURCE, Visits, contents, finish

from mapstate import (
    Avg,
    Collect,
    Count,
    Last,
    Max,
    Min,
    RollingWindows,
    Sum,
    Topology,
    errors,
    newStream,
    opaque,
    open_async_reader,
    open_reader,
)
from mapstate.backends import opened, resolve
from mapstate.cli.export import FORMATS
from mapstate.operations.adopt import adopt
from mapstate.operations.compare import compare
from mapstate.operations.doctor import examine, recount
from mapstate.operations.export import export
from mapstate.operations.forget import forget
from mapstate.operations.vacuum import vacuum
from mapstate.protocol.stored_ledger import record_pages
from mapstate.schema import Field, KeyField
from mapstate.spark.driver import blocks as driver_blocks
from mapstate.spark.driver import on_driver
from mapstate.spark.driver import state as driver_state
from mapstate.spark.driver.apply import AttemptResult
from mapstate.spark.driver.blocks import BlockGrouping
from mapstate.spark.driver.query_run import SET_BY_STREAMS
from mapstate.spark.executor import block_task, task
from mapstate.spark.executor.task import REPORT_COLUMN, reports_of
from mapstate.testing import Fail, FaultyBackend

pytestmark = pytest.mark.spark

UTC = dt.UTC
KEYS: dict[str, list[Any]] = {
    "string": [None, "", "a", "a|b", "a\\b", "\\N", "line\nfeed", "\x85", "é", *(f"user-{i}" for i in range(40))],
    "tinyint": [None, *range(-128, 128, 17)],
    "bigint": [None, 0, -1, 2**63 - 1, -(2**63)],
    "boolean": [None, True, False],
    "date": [None, dt.date(1, 1, 1), dt.date(1582, 10, 4), dt.date(1970, 1, 1), dt.date(9999, 12, 31)],
    "timestamp": [
        None,
        dt.datetime(1, 1, 1, tzinfo=UTC),
        dt.datetime(1582, 10, 4, 23, 59, 59, 999_999, UTC),
        dt.datetime(1969, 12, 31, 23, 59, 59, 999_999, UTC),
        *(dt.datetime(2026, 3, 8, 5, minute, 1, 5, UTC) for minute in range(0, 60, 10)),  # a clock goes forward
        *(dt.datetime(2026, 11, 1, 4, minute, tzinfo=UTC) for minute in range(0, 60, 10)),  # and back
        dt.datetime(9999, 12, 30, 23, 59, 59, 999_999, UTC),
    ],
    "binary": [None, b"", b"\0", b"a|b", bytes(range(256))],
}


@pytest.fixture(params=[full("memory"), full("sqlite"), REDIS, FULL[-1], AEROSPIKE])
def url(request: Any, tmp_path: Any) -> str:
    return url_of(request, tmp_path)


def job(spark: Any, url: Any, schema: str = "user_id string, bytes bigint", by: Any = ("user_id",), **more: Any) -> Any:
    options = {"blocks": 7, "name": "s"} | more.pop("options", {})
    fields = more or {"visits": Count(), "bytes": Sum("bytes")}
    rows = newStream("rows", spark.createDataFrame([], schema))
    return rows.groupBy(*by).persistentAggregate(opaque(url, **options), **fields)


@pytest.mark.parametrize("kinds", [*((kind,) for kind in KEYS), ("string", "timestamp", "bigint")], ids=" ".join)
def test_each_key_is_in_the_block_where_readers_look(spark, tmp_path, kinds):
    url, draw = f"sqlite:///{tmp_path}/state.db", random.Random(1)
    if len(kinds) == 1:
        keys = [(value,) for value in KEYS[kinds[0]]]
    else:
        keys = [*{tuple(draw.choice(KEYS[kind]) for kind in kinds) for _ in range(200)}]
    columns = [f"k{i}" for i in range(len(kinds))]
    schema = ", ".join(f"{name} {kind}" for name, kind in zip(columns, kinds, strict=True))
    state = job(spark, url, schema, columns, n=Count(), options={"blocks": 1000})
    frame = spark.createDataFrame([key for key in keys for _ in range(2)], schema).repartition(3)
    state(frame, 0)
    state(frame, 1)
    with open_reader(url, "s") as reader:
        assert reader.multi_get(keys) == [{"n": 4}] * len(keys)
        assert {*dict(reader.scan())} == {*keys}
    assert [found.severity for found in examine(url, "s") if found.subject in ("records", "keys")] == ["ok", "ok"]


def amounts(seed: int, users: int = 60) -> list[tuple[str | None, int | None]]:
    draw = random.Random(seed)
    return [
        (draw.choice([None, "a|b", *(f"user-{i}" for i in range(users))]), draw.choice([None, 0, 1, -7, 2**40]))
        for _ in range(300)
    ]


FIELDS: dict[str, Any] = {
    "n": Count(),
    "total": Sum("bytes"),
    "mean": Avg("bytes"),
    "least": Min("bytes"),
    "most": Max("bytes"),
    "last": Last("user_id", by="bytes"),
}


ONE, THREE, ALL = ["n"], ["n", "total", "most"], [*FIELDS]
PAIRED = [("executors", "always", ONE), ("driver", "never", ONE), ("executors", "auto", ONE)]
PAIRED += [("driver", "always", THREE), ("executors", "never", THREE), ("driver", "auto", THREE)]
EVERY_WAY = itertools.product(["executors", "driver"], ["always", "never", "auto"], [ONE, THREE, ALL])


@pytest.mark.parametrize(("where", "plan", "fields"), [way if way in PAIRED else full(*way) for way in EVERY_WAY])
def test_every_way_counts_as_a_record_per_key_does(spark, url, monkeypatch, where, plan, fields):
    monkeypatch.setattr(driver_state, "SMALL_IN_A_ROW", 0 if where == "driver" else 99)
    monkeypatch.setattr(block_task, "MOST_ROWS", 20)
    monkeypatch.setattr(driver_blocks, "_MANY_ROWS", 5)
    aggregates = {name: FIELDS[name] for name in fields}
    options = {"partial_aggregation": plan}
    state = job(spark, url, options=options, **aggregates)
    plain = job(spark, url, options={"name": "plain", "blocks": None}, **aggregates)
    reports: list[Any] = []
    state.on_batch(reports.append)
    for batch_id, users in enumerate([60, 60, 3, 60, 200]):
        frame = spark.createDataFrame(amounts(batch_id, users), "user_id string, bytes bigint").repartition(4)
        state(frame, batch_id)
        plain(frame, batch_id)
        assert contents(url, "s") == contents(url, "plain")
    with open_reader(url, "s") as reader, open_reader(url, "plain") as other:
        assert reader.key_count() == other.key_count() == len(dict(other.scan()))
    twice = {"always": [True] * 5, "never": [False] * 5, "auto": [False, False, False, True, False]}[plan]
    assert [report.partial_aggregation for report in reports] == twice
    keys = [len({user for user, _ in amounts(batch_id, users)}) for batch_id, users in enumerate([60, 60, 3, 60, 200])]
    assert [report.keys_written for report in reports] == keys


def noted(state: Any, rows_of: dict[int, list[Any]]) -> Any:
    """The state, whose new and old values of each batch are kept."""

    def note(rows: Any, batch_id: int) -> None:
        rows_of[batch_id] = sorted(map(repr, rows.collect()))

    return state.newValuesStream(old=True).foreachBatch(note)


@pytest.mark.parametrize("where", ["executors", "driver"])
@pytest.mark.parametrize("fields", [["n", "total", "most"], full([*FIELDS])], ids=len)
def test_new_and_old_values_are_those_of_a_record_per_key_also_of_a_batch_that_comes_again(
    spark, url, monkeypatch, where, fields
):
    monkeypatch.setattr(driver_state, "SMALL_IN_A_ROW", 0 if where == "driver" else 99)
    monkeypatch.setattr(block_task, "MOST_ROWS", 20)
    aggregates, draw = {name: FIELDS[name] for name in fields}, random.Random(2)
    blocks, plain = dict[int, list[Any]](), dict[int, list[Any]]()
    options = {"repeat": "allowed", "blocks": 7}
    state = noted(job(spark, url, options=options, **aggregates), blocks)
    other = noted(job(spark, url, options=options | {"name": "plain", "blocks": None}, **aggregates), plain)
    for batch_id, users in enumerate([60, 60, 3, 0, 60, 200]):
        rows = amounts(batch_id, users)[: draw.choice([2, 300])] if users else []
        frame = spark.createDataFrame(rows, "user_id string, bytes bigint").repartition(4)
        for one in (state, other):
            one(frame, batch_id)
        assert blocks[batch_id] == plain[batch_id]
        assert len(plain[batch_id]) == len({user for user, _ in rows})
        at_once = blocks.pop(batch_id)
        state(spark.createDataFrame(rows[:1], frame.schema), batch_id)  # read back, whatever rows come
        assert blocks[batch_id] == at_once


def test_states_that_follow_one_with_blocks_are_those_that_follow_one_without(spark, url):
    """Keys are removed from blocks and come back; each batch comes again, and so is read back, too."""
    schema, draw = "user_id string, bytes bigint", random.Random(5)
    seen: list[dict[int, list[Any]]] = [{}, {}]

    def chain(blocks: int | None, rows_of: dict[int, list[Any]]) -> Any:
        def spec(name: str) -> Any:
            return opaque(url, f"{name}{blocks}", blocks=blocks, repeat="allowed")

        rows = newStream("rows", spark.createDataFrame([], schema)).groupBy("user_id")
        counts = rows.persistentAggregate(spec("counts"), n=Count(), bytes=Sum("bytes"))
        levels = counts.newValuesStream().groupBy("n").persistentAggregate(spec("levels"), users=Count())
        noted(levels, rows_of)
        return levels.newValuesStream().groupBy("users").persistentAggregate(spec("sizes"), levels=Count())

    jobs = [chain(blocks, rows_of) for blocks, rows_of in zip((3, None), seen, strict=True)]
    users = Counter[str]()
    removed = 0
    for batch_id in range(8):
        chosen = [f"u{draw.randint(0, 12)}" for _ in range(draw.choice([0, 4, 12]))]
        users.update(chosen)
        frame = spark.createDataFrame([(user, 1) for user in chosen], schema)
        for job_of in jobs:
            job_of(frame, batch_id)
        assert seen[0] == seen[1]
        removed += sum(", users=None" in row for row in seen[0][batch_id])
        levels = Counter(users.values())
        assert contents(url, "levels3") == {(n,): {"users": number} for n, number in levels.items()}
        sizes = Counter(levels.values())
        assert contents(url, "sizes3") == {(n,): {"levels": number} for n, number in sizes.items()}
        before = seen[0].pop(batch_id)
        jobs[0](frame, batch_id)
        assert seen[0][batch_id] == before
    assert removed


def test_what_a_later_attempt_wrote_over_is_no_new_value_and_stops_a_state_that_follows(spark, url, caplog):
    """A forget writes the whole block."""
    schema = "user_id string, bytes bigint"
    frame = spark.createDataFrame([(f"u{i}", 1) for i in range(4)], schema)
    got: list[int] = []
    options = {"blocks": 1, "repeat": "allowed"}
    state = job(spark, url, n=Count(), options=options)
    state.newValuesStream().foreachBatch(lambda rows, _: got.append(rows.count()))(frame, 0)
    forget(url, "s", {"user_id": "u3"}, id="ticket")
    state(frame, 0)
    assert got == [4, 0]
    assert "lack 4 of 4 keys" in caplog.text
    second = job(spark, url, n=Count(), options=options).newValuesStream().groupBy("n")
    with pytest.raises(errors.IncompleteBatchError, match="lack 4 of 4 keys"):
        second.persistentAggregate(opaque(url, "second", on_gap="accept"), users=Count())(frame, 0)


def test_rows_that_do_not_come_block_by_block_are_refused(spark, tmp_path, monkeypatch):
    url = f"sqlite:///{tmp_path}/state.db"
    frame = spark.createDataFrame(amounts(1), "user_id string, bytes bigint").repartition(4)
    monkeypatch.setattr(block_task, "MOST_ROWS", 5)
    plain = BlockGrouping.of
    options = {"apply_on": "executors", "max_attempts": 1}
    lost = errors.IncompleteBatchError
    for grouped, why, error in (
        (lambda rows: rows.sort("key0"), "did not come one after the other", lost),
        (lambda rows: rows.coalesce(1).sortWithinPartitions("key0"), "one after", lost),
        (
            lambda rows: rows.repartition(4, "key0").sortWithinPartitions("block"),
            "two tasks",
            lost,
        ),
        (lambda rows: rows.drop("block").withColumn("x", F.lit(3)), "look for it in another", errors.KeyEncodingError),
    ):
        state = job(spark, url, options=options)

        def wrong(self: Any, batch_df: Any, grouped: Any = grouped) -> Any:
            rows = grouped(plain(self, batch_df).withColumnRenamed("__mapstate_block", "block"))
            first = "x" if "x" in rows.columns else "block"
            return rows.select(first, *(name for name in rows.columns if name != first))

        monkeypatch.setattr(BlockGrouping, "of", wrong)
        with pytest.raises(error, match=why):
            state(frame, 0)
    monkeypatch.setattr(BlockGrouping, "of", plain)
    job(spark, url)(frame, 0)
    assert contents(url, "s") == {
        (user,): {"visits": count, "bytes": total(user, amounts(1))}
        for user, count in Counter(user for user, _ in amounts(1)).items()
    }


def total(user: str | None, rows: list[tuple[str | None, int | None]]) -> int | None:
    counted = [amount for name, amount in rows if name == user and amount is not None]
    return sum(counted) if counted else None


def test_a_block_in_two_tasks_is_refused(spark, tmp_path, monkeypatch):
    url = f"sqlite:///{tmp_path}/state.db"
    state = job(spark, url, options={"blocks": 1, "apply_on": "driver", "max_attempts": 1})
    frame = spark.createDataFrame([(f"u{i}", 1) for i in range(40)], "user_id string, bytes bigint")
    partitions = itertools.count()
    monkeypatch.setattr(task, "partition_id", lambda: next(partitions))

    def as_two_tasks(rows: Any, task: Any, batches: Any) -> Any:
        (batch,) = batches
        lines = [[*task(iter([half]))][-1] for half in (batch.slice(0, 20), batch.slice(20))]
        return AttemptResult(reports_of([line.column(REPORT_COLUMN)[0].as_py() for line in lines]), None)

    monkeypatch.setattr(on_driver, "_applied", as_two_tasks)
    with pytest.raises(errors.IncompleteBatchError, match="rows of block 0 came to two tasks of batch 0"):
        state(frame, 0)
    assert contents(url, "s") == {}


def test_a_block_that_two_tasks_have_is_found_by_their_reports():
    draw = random.Random(6)
    for blocks in (1, 7, 64, 5000):
        reading: Any = object.__new__(block_task.BlockTask)
        reading.spec, reading.partials, reading.only_notes = SimpleNamespace(blocks=blocks), [1], False
        task_of = [draw.randrange(3) for _ in range(blocks)]
        for shared in (None, draw.randrange(blocks)):
            reports = [task.TaskReport(partition=number, holder="") for number in range(4)]  # the last has no rows
            for report in reports[:3]:
                own = [i for i, number in enumerate(task_of) if number == report.partition or i == shared]
                rows = pa.record_batch([pa.array(own, pa.int32()), pa.array([1] * len(own), pa.int64())], ["b", "rows"])
                assert sum(part.num_rows for part in reading.counted(iter([rows]), report)) == len(own)
            assert block_task.shared_block(reports) == shared


@pytest.mark.parametrize("where", ["executors", "driver"])
def test_a_key_that_is_no_text_is_refused_and_harms_no_other(spark, tmp_path, monkeypatch, where):
    monkeypatch.setattr(driver_state, "SMALL_IN_A_ROW", 0 if where == "driver" else 99)
    url, schema = f"sqlite:///{tmp_path}/state.db", "user_id string, bytes bigint"
    state = job(spark, url, n=Count(), options={"blocks": 2})
    state(spark.createDataFrame([(f"u{i}", i) for i in range(40)], schema), 0)
    before = contents(url, "s")
    for name in ("X'7A7AFF41'", "X'FF'"):
        broken = spark.range(30).selectExpr(f"if(id = 7, cast({name} as string), concat('u', id)) user_id", "id bytes")
        with pytest.raises(errors.SerializationError, match="make_valid_utf8"):
            state(broken, 1)
        assert contents(url, "s") == before
    state(spark.createDataFrame([("u1", 1)], schema), 1)
    assert contents(url, "s") == before | {("u1",): {"n": 2}}


def test_a_session_in_which_blocks_would_be_split_is_refused(spark, tmp_path, visits):
    url = f"sqlite:///{tmp_path}/state.db"
    visits.put("0", [(f"u{i % 50}", i) for i in range(200)])
    state = declared(spark, visits, url)
    state.start(visits.checkpoint, trigger=AVAILABLE).awaitTermination()
    more = spark.createDataFrame([("u1", 1)], "user_id string, bytes bigint")
    spark.conf.set(SET_BY_STREAMS, "true")
    try:
        with pytest.raises(errors.ConfigurationError, match="would come to several tasks"):
            state.correct(id="c", add=more)
    finally:
        spark.conf.unset(SET_BY_STREAMS)
    assert contents(url, "visits") == visits.truth()
    assert state.correct(id="c", add=more).keys == 1


def test_an_export_that_goes_on_has_every_key_of_every_block(spark, url, tmp_path):
    state = job(spark, url, "user_id bigint, bytes bigint", n=Count())
    state(spark.range(100).selectExpr("id user_id", "id bytes"), 0)

    def stop(keys: int) -> None:
        if keys >= 20:
            raise KeyboardInterrupt

    to = f"{tmp_path}/state.csv"
    with pytest.raises(KeyboardInterrupt):
        export(url, "s", to, FORMATS["csv"], page_size=10, on_page=stop)
    state(spark.range(100, 110).selectExpr("id user_id", "id bytes"), 1)
    done = export(url, "s", to, FORMATS["csv"])
    assert (done.rows, done.missing) == (110, 0)


@pytest.mark.parametrize(
    ("made", "why"),
    [
        (lambda spark, url: job(spark, url, tags=Collect("user_id", most=3)), "the field 'tags' is a"),
        (lambda spark, url: job(spark, url, "x double, bytes bigint", ("x",)), "the key column 'x' is a double"),
        (lambda spark, url: job(spark, url, "x decimal(3,1), bytes bigint", ("x",)), "is a decimal"),
        (
            lambda spark, url: newStream("rows", spark.range(0)).persistentAggregate(
                opaque(url, "s", blocks=3), n=Count()
            ),
            "it has one key",
        ),
        (
            lambda spark, url: (
                newStream("rows", spark.createDataFrame([], "at timestamp, k string"))
                .window(RollingWindows.of("1 hour"), timestampField="at", lag="0 seconds")
                .groupBy("k")
                .persistentAggregate(opaque(url, "s", blocks=3), n=Count())
            ),
            "rolling windows has no blocks",
        ),
    ],
)
def test_what_has_no_blocks_is_refused_where_it_is_declared(spark, tmp_path, made, why):
    with pytest.raises(errors.ConfigurationError, match=why):
        made(spark, f"sqlite:///{tmp_path}/state.db")


def test_the_number_of_blocks_is_fixed(spark, tmp_path):
    url = f"sqlite:///{tmp_path}/state.db"
    frame = spark.createDataFrame(amounts(1), "user_id string, bytes bigint")
    job(spark, url)(frame, 0)
    for options in ({"blocks": 8}, {"blocks": None}):
        with pytest.raises(errors.StateSchemaError, match="has the serializer blocks:7"):
            job(spark, url, options=options)(frame, 1)
    job(spark, url, options={"blocks": None, "name": "plain"})(frame, 0)
    with pytest.raises(errors.StateSchemaError, match="has the serializer json, the job asks for blocks:7"):
        job(spark, url, options={"name": "plain"})(frame, 1)


def test_a_job_whose_blocks_have_very_many_keys_says_so_once(spark, tmp_path, caplog):
    state = job(spark, f"sqlite:///{tmp_path}/state.db", n=Count(), options={"blocks": 2})
    for batch_id, users in enumerate((258, 260, 300)):
        state(spark.range(users).selectExpr("cast(id as string) user_id", "id bytes"), batch_id)
        said = [record.getMessage() for record in caplog.records if "keys in each block" in record.getMessage()]
        assert [text[:45] for text in said] == ["state s has some 129 keys in each block: singl"[:45]] * min(
            batch_id, 1
        )


def test_an_added_field_is_null_until_its_key_has_rows(spark, tmp_path):
    url = f"sqlite:///{tmp_path}/state.db"
    schema = "user_id string, bytes bigint"
    job(spark, url, n=Count())(spark.createDataFrame([("a", 1), ("b", 2)], schema), 0)
    more = job(spark, url, n=Count(), total=Sum("bytes"), mean=Avg("bytes"))
    more(spark.createDataFrame([("b", 5), ("c", 7)], schema), 1)
    nothing = {"total": None, "mean": None}
    expected = {
        ("a",): {"n": 1, **nothing},
        ("b",): {"n": 2, "total": 5, "mean": 5.0},
        ("c",): {"n": 1, "total": 7, "mean": 7.0},
    }
    assert contents(url, "s") == expected
    more(spark.createDataFrame([("a", 3)], schema), 2)
    assert contents(url, "s") == expected | {("a",): {"n": 2, "total": 3, "mean": 3.0}}


def test_a_state_that_follows_may_have_blocks_and_loses_keys(spark, url, visits):
    rows = newStream("visits", visits.stream(spark))
    counts = rows.groupBy("user_id").persistentAggregate(opaque(url), visits=Count())
    by_visits = counts.newValuesStream().groupBy("visits")
    levels = by_visits.persistentAggregate(opaque(url, "levels", blocks=3), users=Count())
    draw = random.Random(3)
    users = Counter[str]()
    for name in "0123":
        visits.put(name, [(f"u{draw.randint(0, 9)}", 1) for _ in range(20)])
        users.update(user for user, _ in visits.rows(name))
        levels.start(visits.checkpoint, trigger=AVAILABLE).awaitTermination()
        expected = {(visits,): {"users": number} for visits, number in Counter(users.values()).items()}
        assert contents(url, "levels") == expected


def declared(spark: Any, visits: Visits, backend: Any, **options: Any) -> Any:
    rows = newStream("visits", visits.stream(spark)).groupBy("user_id")
    return rows.persistentAggregate(opaque(backend, blocks=5, **options), visits=Count(), bytes=Sum("bytes"))


def test_history_corrections_upkeep_and_exports_of_a_state_with_blocks(spark, url, visits, tmp_path):
    visits.put("0", [(f"u{i % 50}", i) for i in range(200)])
    state = declared(spark, visits, url)
    assert state.seed(visits.checkpoint, buckets=3).keys == 50
    assert contents(url, "visits") == visits.truth()
    visits.put("1", [(f"u{i % 70}", i) for i in range(100)])
    state.start(visits.checkpoint, trigger=AVAILABLE).awaitTermination()
    late = spark.createDataFrame([("u1", 4_000), ("new", 5)], "user_id string, bytes bigint")
    assert state.correct(id="late", add=late).keys == 2
    assert state.correct(id="late", add=late).was_done
    state.correct(id="wrong", retract=late)
    assert contents(url, "visits") == visits.truth()
    counted = recount(url, "visits", dry_run=True)
    assert (counted.found, counted.held) == (70, 70)
    assert [found.severity for found in examine(url, "visits") if found.subject in ("records", "keys")] == ["ok", "ok"]
    assert export(url, "visits", f"{tmp_path}/state.csv", FORMATS["csv"]).rows == 70
    with pytest.raises(errors.UsageError, match="cannot be adopted"):
        adopt(
            url,
            "visits",
            type="opaque",
            keys=[KeyField("user_id", "string")],
            fields=[Field("n", "Count", "bigint")],
            owner="q",
            serializer="blocks:5",
        )
    job(spark, url, options={"blocks": None, "name": "plain"})(late, 0)
    done = compare(url, "visits", "plain")
    assert (done.how, done.equal + done.different, done.only_in_first, done.only_in_second) == ("as they are", 1, 69, 1)
    visits.put("2", [("u1", 1)])
    state.start(visits.checkpoint, trigger=AVAILABLE).awaitTermination()
    assert contents(url, "visits") == visits.truth()


@pytest.mark.parametrize("by", ["user_id", "day"])
def test_a_key_that_is_forgotten_leaves_its_block_and_comes_back_from_nothing(spark, url, tmp_path, by):
    """A bigint key and a block may have one name."""
    schema = "user_id bigint, day date, bytes bigint"
    days = [dt.date(2026, 1, 1), dt.date(2026, 1, 2)]
    rows = [(user, day, 4711471147) for user in range(40) for day in days]
    state = job(spark, url, schema, ("user_id", "day"), options={"blocks": 5}, total=Sum("bytes"))
    state(spark.createDataFrame(rows, schema), 0)
    state(spark.createDataFrame(rows, schema), 1)
    value: Any = 3 if by == "user_id" else days[0]
    gone = {key[:2] for key in rows if value in key[:2]}
    expected = {key[:2]: {"total": 2 * 4711471147} for key in rows if key[:2] not in gone}
    done = forget(url, "s", {by: value}, id="ticket")
    assert done.keys == len(gone) == (2 if by == "user_id" else 40)
    assert contents(url, "s") == expected
    assert forget(url, "s", {by: value}, id="ticket").was_done
    with opened(resolve(url), "s") as store:
        names = [name for page in record_pages(store, 1000) for name in page]
        stored = [record for record in store.multi_get(names) if record is not None]
    data = [record if isinstance(record, bytes) else msgspec.msgpack.encode(record) for record in stored]
    texts = {text for record in data for text in re.findall(rb"\d+\|[\d-]+", record)}
    assert texts == {f"{user}|{day}".encode() for user, day in expected}
    state(spark.createDataFrame([(3, days[0], 5), (1, days[1], 1)], schema), 2)
    expected |= {(3, days[0]): {"total": 5}, (1, days[1]): {"total": 2 * 4711471147 + 1}}
    assert contents(url, "s") == expected
    assert [found.severity for found in examine(url, "s") if found.subject in ("records", "keys")] == ["ok", "ok"]


def test_a_forget_of_blocks_that_died_between_its_writes_goes_on(spark, url, monkeypatch):
    schema = "user_id string, bytes bigint"
    state = job(spark, url, n=Count(), options={"blocks": 2})
    state(spark.createDataFrame([(f"u{i}", 1) for i in range(20)], schema), 0)
    with monkeypatch.context() as patch:
        patch.setattr("mapstate.operations.forget._Forgetting._second", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            forget(url, "s", {"user_id": "u7"}, id="ticket")
    expected = {(f"u{i}",): {"n": 1} for i in range(20) if i != 7}
    assert contents(url, "s") == expected
    state(spark.createDataFrame([("u7", 1), ("u8", 1)], schema), 1)
    expected |= {("u7",): {"n": 1}, ("u8",): {"n": 2}}
    assert forget(url, "s", {"user_id": "u7"}, id="ticket").keys == 1
    assert contents(url, "s") == expected


def test_readers_of_every_kind_read_blocks(spark, url, visits):
    visits.put("0", [(f"u{i % 500}", i) for i in range(2000)])
    state = declared(spark, visits, url)
    state.start(visits.checkpoint, trigger=AVAILABLE).awaitTermination()
    truth = visits.truth()
    with open_reader(url, "visits") as reader:
        assert reader.get("u7") == truth[("u7",)]
        assert reader.multi_get(["u1", "none", ("u3",), "u1"]) == [truth[("u1",)], None, truth[("u3",)], truth[("u1",)]]
        assert reader.get("u7", columns=["bytes"]) == {"bytes": truth[("u7",)]["bytes"]}
        pages = [page for page in reader.pages(100) if page]
        assert len(pages) > 1
        assert dict(item for page in pages for item in page) == truth
        assert {row["user_id"] for row in reader.to_arrow(100).to_pylist()} == {user for (user,) in truth}
        if not url.startswith("memory"):
            first = next(reader.pages_as_of(100))
            rest = [row for page in reader.pages_as_of(100, cursor=first.cursor) for row in page.rows]
            assert dict([*first.rows, *rest]) == truth
        parts = [reader.part(part, 50) for part in reader.parts(4)]
        assert {key for part in parts for _, keys, _ in part for key in keys} == {*truth}

    async def read() -> Any:
        async with open_async_reader(url, "visits") as reader:
            return await reader.get("u9"), [key async for key, _ in reader.scan(50)]

    value, keys = asyncio.run(read())
    assert (value, {*keys}) == (truth[("u9",)], {*truth})


@DATA_SOURCE
@pytest.mark.parametrize("url", [full("sqlite"), REDIS, FULL[-1], AEROSPIKE], indirect=True)
def test_a_frame_reads_blocks(spark, url, visits):
    visits.put("0", [(f"u{i % 500}", i) for i in range(2000)])
    declared(spark, visits, url).start(visits.checkpoint, trigger=AVAILABLE).awaitTermination()
    truth = visits.truth()
    frame = spark.read.format("mapstate").options(url=url, state="visits").load()
    assert {(row.user_id,): {"visits": row.visits, "bytes": row.bytes} for row in frame.collect()} == truth
    assert frame.where("user_id = 'u7'").collect()[0].visits == truth[("u7",)]["visits"]


@pytest.mark.parametrize("call", [full(1), 2, full(3)])
def test_a_failed_attempt_is_taken_back_by_the_next_one_and_by_a_vacuum(spark, tmp_path, visits, call):
    url = f"sqlite:///{tmp_path}/state.db"
    visits.put("0", [(f"u{i % 50}", i) for i in range(200)])
    declared(spark, visits, url, apply_on="executors", chunk_size=1).start(
        visits.checkpoint, trigger=AVAILABLE
    ).awaitTermination()
    before = contents(url, "visits")
    visits.put("1", [(f"u{i % 70}", i) for i in range(140)])
    faulty = FaultyBackend(resolve(url), f"{tmp_path}/faults", (Fail(method="multi_put", call=call),))
    query = declared(spark, visits, faulty, apply_on="executors", chunk_size=1, max_attempts=1).start(
        visits.checkpoint, trigger=AVAILABLE
    )
    with pytest.raises(Exception, match="Fail|fault|store"):
        query.awaitTermination()
    assert contents(url, "visits") == before
    done = vacuum(url, "visits", take_over=True)
    assert contents(url, "visits") == before
    assert done.unreadable == 0
    declared(spark, visits, url).start(visits.checkpoint, trigger=AVAILABLE).awaitTermination()
    assert contents(url, "visits") == visits.truth()


def test_a_topology_counts_a_state_with_blocks_beside_one_without(spark, url, visits):
    topology = Topology("both")
    stream = topology.newStream("visits", visits.stream(spark))
    stream.groupBy("user_id").persistentAggregate(opaque(url, "blocks", blocks=4), visits=Count(), bytes=Sum("bytes"))
    stream.groupBy("user_id").persistentAggregate(opaque(url, "plain"), visits=Count(), bytes=Sum("bytes"))
    for name in "01":
        visits.put(name, [(f"u{i % 30}", i) for i in range(90)])
        finish(topology.start(visits.checkpoint, trigger=AVAILABLE))
        assert contents(url, "blocks") == contents(url, "plain") == visits.truth()


def test_what_is_stored_is_what_the_docs_say(spark, tmp_path):
    url = f"sqlite:///{tmp_path}/state.db"
    job(spark, url, options={"blocks": 1})(
        spark.createDataFrame([("a", 1), ("b", 300)], "user_id string, bytes bigint"), 0
    )
    with sqlite3.connect(f"{tmp_path}/state.db") as db:
        tables = [name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        records = [row for name in tables if "record" in name for row in db.execute(f'SELECT * FROM "{name}"')]
    (data,) = [value for row in records for value in row if isinstance(value, bytes)]
    txid, keys, columns, new, before, keys_before, touched = msgspec.msgpack.decode(data)
    order = keys.decode().split("\n")[:-1]
    assert sorted(order) == ["a", "b"]
    sizes = {"a": 1, "b": 300}
    assert columns == [b"b\1\1", b"", b"h" + b"".join(sizes[key].to_bytes(2, "little") for key in order), b""]
    assert (new, before, keys_before, touched) == (2, [], None, None)
    with open_reader(url, "s") as reader:
        assert reader.ledger().last_txid == txid
        assert reader.ledger().serializer == "blocks:1"
