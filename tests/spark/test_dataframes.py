"""States as DataFrames: ``spark.read.format("mapstate")``."""

from __future__ import annotations

import json
from importlib import import_module
from itertools import permutations

import pytest
from cases import full
from every_store import AEROSPIKE, REDIS
from py4j.protocol import Py4JJavaError
from pyspark.errors import AnalysisException, PySparkException, StreamingQueryException
from pyspark.sql import functions as F
from spark_fixtures import DATA_SOURCE
from states import Job, made_of_one_batch

from mapstate import Avg, Count, Max, Min, Sum, TopN, newStream, opaque, open_reader
from mapstate.keys import KeyCodec
from mapstate.schema import Field, KeyField

pytestmark = [pytest.mark.spark, DATA_SOURCE]

PUSHDOWN = "spark.sql.python.filterPushdown.enabled"
USERS = (KeyField("user", "string"),)
N = (Field("n", "Sum(n)", "bigint"),)


@pytest.fixture(params=[pytest.param("sqlite", marks=pytest.mark.full), REDIS, AEROSPIKE])
def url(request, tmp_path):
    return f"sqlite:///{tmp_path}/state.db" if request.param == "sqlite" else request.getfixturevalue(request.param)


@pytest.fixture(params=["true", full("false")])
def pushdown(spark, request):
    """With and without the filters of a query in the plan of the read."""
    spark.conf.set(PUSHDOWN, request.param)
    yield request.param == "true"
    spark.conf.unset(PUSHDOWN)


def frame(spark, url, state="s", schema=None, **options):
    reader = spark.read.format("mapstate").options(url=url, state=state, **options)
    return (reader if schema is None else reader.schema(schema)).load()


def rows(found):
    return {row[0]: row[1] for row in found.collect()}


EVERY_TYPE = {
    "string": "case when id % 7 = 0 then null else concat('ü', cast(id as string)) end",
    "tinyint": "cast(id % 5 as tinyint)",
    "bigint": "id",
    "double": "case when id = 1 then double('NaN') when id = 2 then double('-Infinity') else id / 3 end",
    "boolean": "id % 2 = 0",
    "date": "date_add(date'2026-01-01', cast(id as int))",
    "timestamp": "timestamp_micros(id * 1000001)",
    "decimal(12,3)": "cast(id / 8 as decimal(12,3))",
    "binary": "cast(cast(id as string) as binary)",
}


def test_a_frame_has_the_columns_types_and_values_of_the_state(spark, url, tmp_path):
    spark.range(40).selectExpr("id", *(f"{sql} `{kind}`" for kind, sql in EVERY_TYPE.items())).write.parquet(
        f"{tmp_path}/in"
    )
    source = spark.readStream.schema(spark.read.parquet(f"{tmp_path}/in").schema).parquet(f"{tmp_path}/in")
    counts = (
        newStream("all", source)
        .groupBy(*EVERY_TYPE)
        .persistentAggregate(
            opaque(url, name="s"),
            **{"count of rows": Count()},
            low=Min("string"),
            high=Max("decimal(12,3)"),
            mean=Avg("double"),
            total=Sum("decimal(12,3)"),
            top=TopN(2, "bigint"),
            at=Max("timestamp"),
        )
    )
    counts.start(tmp_path / "checkpoint", trigger={"availableNow": True}).awaitTermination()
    found = frame(spark, url, numPartitions=3)
    groups = [F.col(f"`{kind}`") for kind in EVERY_TYPE]
    own = (
        spark.read.parquet(f"{tmp_path}/in")
        .groupBy(*groups)
        .agg(
            F.count("*").alias("count of rows"),
            F.min("string").alias("low"),
            F.max("`decimal(12,3)`").alias("high"),
            F.avg("double").alias("mean"),
            F.sum("`decimal(12,3)`").cast("decimal(38,3)").alias("total"),
            F.array(F.max("bigint")).alias("top"),
            F.max("timestamp").alias("at"),
        )
    )
    types = [(field.name, field.dataType.simpleString()) for field in found.schema]
    assert types == [(field.name, field.dataType.simpleString()) for field in own.schema]
    assert sorted(map(repr, found.collect())) == sorted(map(repr, own.collect()))
    assert found.count() == 40


@pytest.mark.parametrize("parts", [full(1), full(2), 5, full(64)])
def test_the_partitions_of_a_frame_have_each_key_once(spark, url, parts):
    many = {f"user-{at}": at for at in range(12_000)}
    made_of_one_batch(url, "s", USERS, N, many)
    found = frame(spark, url, numPartitions=parts)
    assert rows(found) == many
    assert found.count() == len(many)
    assert found.rdd.getNumPartitions() == (2 if url.startswith("redis") and parts > 1 else parts)


def test_a_state_without_keys_and_one_without_rows(spark, url):
    made_of_one_batch(url, "s", (), N, {str(KeyCodec(()).encode(())): 5})
    assert [row.asDict() for row in frame(spark, url, numPartitions=4).collect()] == [{"n": 5}]
    assert frame(spark, url, schema="n bigint").count() == 1
    made_of_one_batch(url, "empty", USERS, N, {})
    assert frame(spark, url, "empty", numPartitions=4).collect() == []


def test_a_schema_says_which_columns_are_read(spark, url):
    fields = (Field("n", "Sum(n)", "bigint"), Field("name", "Max(name)", "string"))
    made_of_one_batch(
        url, "s", (KeyField("a", "string"), KeyField("b", "int")), fields, {"x|1": (5, "é"), "y|2": (6, None)}
    )
    assert set(map(tuple, frame(spark, url, schema="name string, a string").collect())) == {(None, "y"), ("é", "x")}
    assert frame(spark, url, schema="b int").agg(F.sum("b")).first()[0] == 3
    for schema, message in (
        ("a string, c int", "no column 'c'; it has a, b, n, name"),
        ("n int", "'n' of state 's' is a big"),
    ):
        with pytest.raises(PySparkException, match=message):
            frame(spark, url, schema=schema).collect()


EVERY_KEY = (("s", "string"), ("i", "int"), ("d", "date"), ("b", "boolean"), ("x", "double"), ("t", "timestamp"))


def test_keys_are_read_as_a_scan_reads_them_each_once(spark, url):
    texts = [
        f"{s}|{i}|2026-01-02|{b}|{x}|2026-01-02T03:04:05.000006Z"
        for s in ("a", "\\N", "ü")
        for i in (1, 2)
        for b in ("true", "false")
        for x in ("0.0", "1.5")
    ]
    fields = tuple(KeyField(*one) for one in EVERY_KEY)
    made_of_one_batch(url, "s", fields, N, {text: at for at, text in enumerate(texts)})
    at = {"d": "2026-01-02", "b": True, "t": "2026-01-02T03:04:05.000006Z"}
    keys = [
        {"s": "a", "i": 1, "x": 0, **at},
        {"s": "a", "i": 1, "x": -0.0, **at},
        {"s": None, "i": "2", "x": 1.5, **at},
        {"s": "nobody", "i": 2, "x": 1.5, **at},
    ]
    where = "i = 1 and s = 'a' and x = 0 and b or i = 2 and s is null and x = 1.5 and b"
    for how in ("batch", "scan", "page"):
        found = frame(spark, url, keys=json.dumps(keys), asOf=how)
        assert sorted(map(repr, found.collect())) == sorted(map(repr, frame(spark, url).where(where).collect()))
        assert found.count() == 2
    assert frame(spark, url, keys="[]").count() == 0


@pytest.mark.redis
def test_named_keys_are_looked_up_and_no_other_is_read(spark, redis_server, redis_url):
    made_of_one_batch(redis_url, "s", USERS, N, {f"user-{at}": at for at in range(5_000)})
    asked = [f"user-{at}" for at in range(4_001)]
    found = frame(spark, redis_url, keys=json.dumps([*asked, "nobody"]), numPartitions=2)
    with redis_server.client() as client:
        client.config_resetstat()
        assert rows(found) == {f"user-{at}": at for at in range(4_001)}
        assert "cmdstat_scan" not in client.info("commandstats")
        client.config_resetstat()
        assert frame(spark, redis_url).where("n = 7").count() == 1
        assert "cmdstat_scan" in client.info("commandstats")


@pytest.mark.parametrize(
    "given", ["a", '"a"', '["a", 1]', '[{"user": "a", "n": 1}]', '["a"], "keys": ["b"]', "[[]]", "[" * 5_000]
)
def test_what_is_no_list_of_keys_is_refused(spark, tmp_path, given):
    url = f"sqlite:///{tmp_path}/state.db"
    made_of_one_batch(url, "s", USERS, N, {"a": 1})
    with pytest.raises(PySparkException, match="keys is a JSON list of keys"):
        frame(spark, url, keys=given).collect()


def test_no_query_over_a_frame_finds_what_another_one_asked_for(spark, tmp_path, pushdown):
    """Spark keeps the plan of a read for all queries over it: what filters did to that plan, they did to all."""
    url = f"sqlite:///{tmp_path}/state.db"
    made_of_one_batch(url, "s", USERS, N, {f"user-{at}": at for at in range(50)})
    queries = {
        "some": lambda d: (d.where("user in ('user-1', 'user-2')").count(), 2),
        "all": lambda d: (d.count(), 50),
        "both": lambda d: (d.where("user = 'user-3'").unionAll(d).count(), 51),
    }
    for order in permutations(queries, 3):
        found = frame(spark, url)
        for name in order:
            rows_there, expected = queries[name](found)
            assert rows_there == expected, order
    found = frame(spark, url)
    assert found.where("user in ('user-1', 'nobody')").count() == 1
    found.write.parquet(f"{tmp_path}/out")
    assert spark.read.parquet(f"{tmp_path}/out").count() == 50


def as_frame(spark, url, how):
    found = frame(spark, url, asOf=how)
    return lambda: found


def as_temporary_view(spark, url, how):
    frame(spark, url, asOf=how).createOrReplaceTempView(f"of_frame_{how}")
    return lambda: spark.table(f"of_frame_{how}")


def as_view_in_sql(spark, url, how):
    spark.sql(
        f"CREATE OR REPLACE TEMPORARY VIEW source_{how} USING mapstate OPTIONS (url '{url}', state 's', asOf '{how}')"
    )
    spark.sql(f"CREATE OR REPLACE TEMPORARY VIEW of_source_{how} AS SELECT * FROM source_{how} WHERE n >= 0")
    return lambda: spark.sql(f"SELECT * FROM of_source_{how}")


@pytest.mark.parametrize("made", [as_frame, pytest.param(as_temporary_view, marks=pytest.mark.full), as_view_in_sql])
def test_each_query_is_of_the_batch_that_is_committed_or_an_error(spark, tmp_path, pushdown, made):
    """Spark keeps the plan of a read, for all queries that it does not happen to plan anew."""
    url = f"sqlite:///{tmp_path}/state.db"
    job = Job(url)
    queries = [
        lambda table: rows(table()),
        lambda table: rows(table().where("k = 'a'").unionAll(table().where("k = 'b'"))),
        lambda table: rows(table().join(table().select("k"), "k")),
    ]
    job.batch(a=0, b=0)
    scanned, planned = made(spark, url, "scan"), None
    for at, query in enumerate([*queries, *reversed(queries)]):
        job.batch(a=at, b=at)
        assert query(scanned) == {"a": at, "b": at}
        if planned is None:
            planned = made(spark, url, "batch")
            assert query(planned) == {"a": at, "b": at}
            continue
        try:
            assert query(planned) == {"a": at, "b": at}
        except (PySparkException, Py4JJavaError) as error:  # the latter where several stages fail at one time
            assert "has gone on since Spark planned this read" in str(error)  # noqa: PT017


@pytest.mark.parametrize("how", ["scan", "batch"])
def test_a_stream_joined_with_a_state_has_the_values_of_its_batch_or_ends(spark, tmp_path, how):
    url = f"sqlite:///{tmp_path}/state.db"
    job = Job(url)
    job.batch(k=0)
    (tmp_path / "in").mkdir()
    for at in range(5):
        (tmp_path / f"in/{at}.csv").write_text("k\n")
    seen = []

    def keep(found, batch_id):
        seen.append([row["n"] for row in found.collect()])
        job.batch(k=len(seen))

    source = spark.readStream.schema("k string").option("maxFilesPerTrigger", 1).csv(f"{tmp_path}/in")
    joined = source.join(frame(spark, url, asOf=how), "k").writeStream.foreachBatch(keep)
    query = joined.option("checkpointLocation", f"{tmp_path}/checkpoint").trigger(availableNow=True).start()
    try:
        query.awaitTermination()
    except StreamingQueryException as error:
        assert how == "batch"
        assert "has gone on since Spark planned this read" in str(error)  # noqa: PT017
        assert seen == [[0]]
    else:
        assert seen == [[0], [1], [2], [3], [4]]


def test_a_frame_is_of_one_batch_while_others_are_committed(spark, url, tmp_path):
    """Each batch adds one to each key: of two batches, values would differ."""
    users = 3_000
    (tmp_path / "in").mkdir()
    text = "".join(f"user-{at}\n" for at in range(users))
    for at in range(12):
        (tmp_path / f"in/{at}.csv").write_text(text)
    source = spark.readStream.schema("user string").option("maxFilesPerTrigger", 1).csv(f"{tmp_path}/in")
    counts = newStream("visits", source).groupBy("user").persistentAggregate(opaque(url, name="s"), n=Count())
    query = counts.start(tmp_path / "checkpoint", trigger={"availableNow": True})
    seen, refused = set(), 0
    while query.isActive:
        try:
            found = frame(spark, url, numPartitions=3).groupBy("n").count().collect()
        except PySparkException as error:
            if not any(known in str(error) for known in ("by two batches since", "has gone on", "StateNotFoundError")):
                raise
            refused += 1
            continue
        assert [row["count"] for row in found] in ([users], []), found
        seen.update(row["n"] for row in found)
    query.awaitTermination()
    assert rows(frame(spark, url)) == {f"user-{at}": 12 for at in range(users)}
    assert seen or refused


def test_a_batch_that_is_gone_is_an_error_and_others_are_read_if_asked_for(spark, url):
    job = Job(url)
    job.batch(a=1, b=1)
    planned, scanned, paged = (frame(spark, url, asOf=how).rdd for how in ("batch", "scan", "page"))
    assert [one.getNumPartitions() for one in (planned, scanned, paged)] == [1, 1, 1]
    assert rows(planned) == rows(scanned) == rows(paged) == {"a": 1, "b": 1}
    job.attempt(a=7)
    assert rows(planned) == {"a": 1, "b": 1}  # what is not committed counts for nobody
    job.batch(a=3)
    with pytest.raises(PySparkException, match="has gone on since Spark planned this read"):
        rows(planned)
    assert rows(scanned) == rows(paged) == rows(frame(spark, url)) == {"a": 3, "b": 1}


def test_rows_of_windows_are_panes(spark, url, tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in/0.csv").write_text("2026-01-01 00:00:10Z,a\n2026-01-01 00:00:20Z,a\n2026-01-01 00:01:10Z,b\n")
    source = spark.readStream.schema("at timestamp, user string").csv(f"{tmp_path}/in")
    counts = (
        newStream("visits", source)
        .tumblingWindow("1 minute", timestampField="at", retention="1 hour")
        .groupBy("user")
        .persistentAggregate(opaque(url, name="s"), n=Count())
    )
    counts.start(tmp_path / "checkpoint", trigger={"availableNow": True}).awaitTermination()
    with open_reader(url, "s") as reader:
        scanned = {(*key, value["n"]) for key, value in reader.scan()}
    found = frame(spark, url)
    instants = found.withColumn("window", F.unix_timestamp(found.columns[0])).select("window", "user", "n")
    assert {tuple(row) for row in instants.collect()} == {(int(at.timestamp()), user, n) for at, user, n in scanned}


OWN = """
from mapstate import ReducerAggregator

class Longest(ReducerAggregator):
    def init(self):
        return ""

    def reduce(self, state, row):
        return max(state, row["word"], key=len)

    def result(self, state):
        return len(state)

    def result_type(self, stored):
        return "bigint"

OWN = {"longest": Longest()}
NONE = 3
"""


def test_results_of_own_aggregators_need_them_by_name(spark, url, tmp_path, monkeypatch):
    module = f"own_{tmp_path.name}_{url.partition(':')[0]}".replace("-", "_")
    (tmp_path / f"{module}.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    spark.sparkContext.addPyFile(str(tmp_path / f"{module}.py"))
    own = import_module(module).OWN
    (tmp_path / "in").mkdir()
    (tmp_path / "in/0.csv").write_text("a,short\na,longer\nb,x\n")
    source = spark.readStream.schema("user string, word string").csv(f"{tmp_path}/in")
    counts = newStream("words", source).groupBy("user").persistentAggregate(opaque(url, name="s"), **own)
    counts.start(tmp_path / "checkpoint", trigger={"availableNow": True}).awaitTermination()
    assert rows(frame(spark, url)) == {"a": '"longer"', "b": '"x"'}
    assert rows(frame(spark, url, aggregators=f"{module}:OWN")) == {"a": 6, "b": 1}
    for given, message in ((f"{module}:NOT", "cannot be imported"), (f"{module}:NONE", "no dict of aggregators")):
        with pytest.raises(PySparkException, match=message):
            frame(spark, url, aggregators=given)


def test_what_cannot_be_read_is_an_error_of_mapstate_before_a_job(spark, url, tmp_path):
    made_of_one_batch(url, "s", USERS, N, {"a": 1})
    wrong = {
        "no option": {"url": url, "state": "s", "partitions": "3"},
        "lack": {"url": url},
        "number from 1 to 10000": {"url": url, "state": "s", "numPartitions": "0"},
        "'batch' or 'scan' or 'page'": {"url": url, "state": "s", "asOf": "now"},
        "is one task, and numPartitions says 2": {"url": url, "state": "s", "asOf": "scan", "numPartitions": "2"},
        "StateNotFoundError": {"url": url, "state": "t"},
        "lives in one process": {"url": f"memory://{tmp_path.name}", "state": "s"},
    }
    for message, options in wrong.items():
        with pytest.raises(AnalysisException, match=message):
            spark.read.format("mapstate").options(**options).load()


def test_no_password_is_in_a_plan_or_an_error(spark, tmp_path):
    with pytest.raises(PySparkException) as caught:
        frame(spark, "redis://user:s3cr3t@localhost:1/0?retries=0")
    assert "s3cr3t" not in str(caught.value)
    url = f"sqlite:///{tmp_path}/state.db"
    made_of_one_batch(url, "s", USERS, N, {"a": 1})
    assert "state.db" not in frame(spark, url)._jdf.queryExecution().toString()
