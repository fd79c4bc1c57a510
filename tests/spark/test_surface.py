"""What a person would try first works, or says in one sentence what to write instead."""

from __future__ import annotations

import random
from datetime import UTC, datetime, timedelta
from decimal import Decimal

import pytest
from cases import full
from pyspark.sql import functions as F
from spark_fixtures import contents

from mapstate import (
    ArgMax,
    ArgMin,
    Avg,
    BoolAnd,
    BoolOr,
    Collect,
    Count,
    CountDistinct,
    First,
    Last,
    LastN,
    Max,
    StdDev,
    StdDevPop,
    Sum,
    TopN,
    Variance,
    VariancePop,
    errors,
    newStream,
    opaque,
    open_reader,
)


def test_last_without_an_order_says_what_to_write():
    for kind in (First, Last):
        with pytest.raises(errors.ConfigurationError, match=rf"{kind.__name__}\('x', by='time'\)"):
            kind("x")


@pytest.mark.spark
def test_an_aggregate_may_be_of_an_expression(spark, tmp_path):
    url = f"sqlite:///{tmp_path}/state.db"
    frame = spark.createDataFrame([("a", 1, "x"), ("a", 2, "yy"), ("b", 5, None)], "k string, n bigint, s string")

    def job():
        return (
            newStream("s", frame)
            .groupBy("k")
            .persistentAggregate(
                opaque(url),
                double=Sum(F.col("n") * 2),
                longest=Max(F.length("s")),
                mean=Avg(F.col("n").cast("double")),
                rows=Count(),
                last=Last(F.upper("s"), by=F.col("n")),
            )
        )

    job()(frame, 0)
    job()(frame, 1)  # another driver finds the same fields in the ledger
    assert contents(url, "s") == {
        ("a",): {"double": 12, "longest": 2, "mean": 1.5, "rows": 4, "last": "YY"},
        ("b",): {"double": 20, "longest": None, "mean": 5.0, "rows": 2, "last": None},
    }
    with open_reader(url, "s") as reader:
        assert reader.ledger().fields[0].aggregator == "Sum(*(n, 2))"
        assert reader.get(["a"]) == reader.get(("a",))


@pytest.mark.spark
def test_an_expression_of_a_python_function_or_a_lambda_has_the_same_name_in_each_run(spark, tmp_path):
    """Spark's text of these holds addresses, numbers and the path of this file, which another run does not have."""
    url = f"sqlite:///{tmp_path}/state.db"
    frame = spark.createDataFrame([("a", 1), ("a", 2)], "k string, n bigint")

    def job(name="s"):
        plus, times = (F.udf(function, "bigint") for function in (lambda n: n + 1, lambda n: n * 100))
        return (
            newStream(name, frame)
            .groupBy("k")
            .persistentAggregate(
                opaque(url),
                plus=Sum(plus(F.col("n") + 0)),
                times=Sum(times("n").alias("times")),
                listed=Sum(F.aggregate(F.array("n"), F.lit(0).cast("bigint"), lambda one, other: one + other)),
                some=Count(where=plus("n") > 2),
                raw=Count(where=F.lit(b"x") == F.col("k").cast("binary")),
            )
        )

    job()(frame, 0)
    job()(frame, 1)
    assert contents(url, "s") == {("a",): {"plus": 10, "times": 600, "listed": 6, "some": 2, "raw": 0}}
    with open_reader(url, "s") as reader:
        named = [field.aggregator for field in reader.ledger().fields]
    assert named[:2] == ["Sum(<lambda>((n + 0)))", "Sum(times)"]
    assert not any("@" in name or ".py" in name or "_1" in name for name in named)


@pytest.mark.spark
def test_expressions_of_one_name_are_refused_if_they_differ(spark, tmp_path):
    frame = spark.createDataFrame([("a", 1, 1000)], ["k", "n", "*(n, 2)"])
    one, seven = F.udf(lambda: 1, "bigint"), F.udf(lambda: 7, "bigint")
    n = F.col("n")

    def keep(*keys, **aggregates):
        return newStream("s", frame).groupBy("k", *keys).persistentAggregate(opaque(url), **aggregates)

    url = f"sqlite:///{tmp_path}/state.db"
    for mistake in (
        lambda: keep(a=Sum(one()), b=Sum(seven())),
        lambda: keep(a=Sum(n * F.lit(1.0)), b=Sum(n * F.lit(Decimal("1.0")))),
        lambda: keep("*(n, 2)", a=Sum(n * 2)),
        lambda: newStream("s", frame).groupBy("k").aggregate(a=Sum(one()), b=Sum(seven())),
    ):
        with pytest.raises(errors.DuplicateNameError, match="another expression or a column has, too"):
            mistake()
    same = seven()
    keep(
        one=Sum(one().alias("one")),
        sum=Sum(same),
        mean=Avg(same),
        rows=Count(F.col("K")),
        **{f"n{at}": Sum(n * 3, where="k = 'a'") for at in range(2)},
    )(frame, 0)
    assert contents(url, "s") == {("a",): {"one": 1, "sum": 7, "mean": 7.0, "rows": 1, "n0": 3, "n1": 3}}


@pytest.mark.spark
def test_an_aggregate_may_be_of_some_rows_only(spark, tmp_path):
    url = f"sqlite:///{tmp_path}/state.db"
    rows = [("a", 1, 200), ("a", 2, 500), ("a", 4, 503), ("b", 8, 200), ("b", None, 500)]
    frame = spark.createDataFrame(rows, "k string, n bigint, status int")
    failed = F.col("status") >= 500
    aggregates = {
        "all": Count(),
        "failed": Count(where="status >= 500"),
        "known": Count("n", where=failed),
        "sum": Sum("n", where=failed),
        "double": Sum(F.col("n") * 2, where="status >= 500"),
        "mean": Avg("n", where=failed),
        "greatest": Max("n", where=failed),
        "first": First("n", by="status", where=failed),
        "last": Last("status", by="n", where=F.col("status") == 200),
    }
    wanted = {
        "a": dict(zip(aggregates, (3, 2, 2, 6, 12, 3.0, 4, 2, 200), strict=True)),
        "b": dict(zip(aggregates, (2, 1, 0, None, None, None, None, None, 200), strict=True)),
    }
    job = newStream("s", frame).groupBy("k").persistentAggregate(opaque(url), **aggregates)
    job(frame, 0)
    assert contents(url, "s") == {(key,): values for key, values in wanted.items()}
    with open_reader(url, "s") as reader:
        assert reader.ledger().fields[1].aggregator == "Count(CASE WHEN status >= 500 THEN 1 END)"
    of_batch = newStream("t", frame).groupBy("k").aggregate(**aggregates)
    seen = []
    of_batch.foreachBatch(lambda rows, _: seen.extend(rows.collect()))(frame, 0)
    assert {row["k"]: {name: row[name] for name in aggregates} for row in seen} == wanted


@pytest.mark.spark
def test_variances_and_booleans_are_sparks_own(spark, tmp_path):
    """Two batches, keys with one value, with nulls only, with NaN; large numbers that differ a little."""
    url = f"sqlite:///{tmp_path}/state.db"
    chance = random.Random(7)
    rows = [("many", 1e9 + chance.random(), chance.random() < 0.99) for _ in range(400)]
    rows += [("one", 3.5, True), ("none", None, None), ("nan", float("nan"), False), ("nan", 1.0, None)]
    rows += [("some", 2.0, None), ("some", None, True), ("some", 4.0, True)]
    chance.shuffle(rows)
    frame = spark.createDataFrame(rows, "k string, x double, b boolean")
    kinds = {"v": Variance, "vp": VariancePop, "s": StdDev, "sp": StdDevPop}
    aggregates = {name: kind("x") for name, kind in kinds.items()} | {"every": BoolAnd("b"), "any": BoolOr("b")}
    job = newStream("s", frame).groupBy("k").persistentAggregate(opaque(url), **aggregates)
    halves = frame.limit(200), frame.offset(200)
    for at, half in enumerate(halves):
        job(half, at)
    whole = halves[0].union(halves[1]).groupBy("k")
    spark_says = whole.agg(
        F.variance("x").alias("v"),
        F.var_pop("x").alias("vp"),
        F.stddev("x").alias("s"),
        F.stddev_pop("x").alias("sp"),
        F.bool_and("b").alias("every"),
        F.bool_or("b").alias("any"),
    ).collect()
    kept = contents(url, "s")
    assert len(kept) == len(spark_says) == 5
    for row in spark_says:
        for name in aggregates:
            # Doubles at 1e9 are 1e-7 apart, and so are two means of them.
            close = row[name] and pytest.approx(row[name], rel=1e-7 if row["k"] == "many" else 1e-12, nan_ok=True)
            assert kept[row["k"],][name] == close, (row["k"], name)


@pytest.mark.spark
@pytest.mark.parametrize("serializer", ["json", full("msgpack")])
def test_values_that_are_kept_up_to_a_bound_are_sparks_own(serializer, spark, tmp_path):
    """Every type with an order, in two batches; nulls, NaN, both zeros, duplicates."""
    url = f"sqlite:///{tmp_path}/state.db"
    frame = spark.sql("""
        SELECT id % 3 AS k, id AS n, id % 5 AS few,
               CASE id % 7 WHEN 0 THEN NULL WHEN 1 THEN double('NaN') WHEN 2 THEN -0.0D WHEN 3 THEN 0.0D
                           ELSE id % 4 / 4D END AS x,
               cast(id % 6 AS decimal(10, 2)) AS m, concat('ü', id % 9) AS s, id % 2 = 0 AS b,
               timestamp_seconds(id % 8 * 86400 * 200) AS at, date_from_unix_date(int(id % 8 * 300)) AS day,
               cast(concat('', id % 4) AS binary) AS raw
        FROM range(60)
    """)
    columns = ["n", "few", "x", "m", "s", "b", "at", "day", "raw"]

    def last(by, name):
        """The values of ``name`` in the rows with the greatest ``by``, as Spark sorts pairs."""
        pair = F.when(F.col(by).isNotNull(), F.struct(F.col(by).alias("by"), F.col(name).alias("value")))
        return F.slice(F.sort_array(F.collect_list(pair), asc=False), 1, 4)["value"]

    aggregates = {f"all_{name}": Collect(name, most=60) for name in columns}
    aggregates |= {f"distinct_{name}": CountDistinct(name, most=60) for name in columns}
    aggregates |= {f"top_{name}": TopN(4, name) for name in columns}
    aggregates |= {f"last_{name}": LastN(name, 4, by="few") for name in columns}
    aggregates |= {f"by_{name}": LastN("n", 4, by=name) for name in columns}
    job = newStream("s", frame).groupBy("k").persistentAggregate(opaque(url, serializer=serializer), **aggregates)
    for at, half in enumerate((frame.where("n < 25"), frame.where("n >= 25"))):
        job(half, at)
    wanted = frame.groupBy("k").agg(
        *(F.sort_array(F.collect_list(name)).alias(f"all_{name}") for name in columns),
        *(F.count_distinct(name).alias(f"distinct_{name}") for name in columns),
        *(F.slice(F.sort_array(F.collect_list(name), asc=False), 1, 4).alias(f"top_{name}") for name in columns),
        *(last("few", name).alias(f"last_{name}") for name in columns),
        *(last(name, "n").alias(f"by_{name}") for name in columns),
    )
    kept = contents(url, "s")
    shown = spark.createDataFrame([(key, *values.values()) for (key,), values in kept.items()], wanted.schema)
    # In pairs Spark takes both zeros for one, and leaves them as they come.
    shown, wanted = (one.withColumn("last_x", F.transform("last_x", lambda x: x + 0.0)) for one in (shown, wanted))
    assert len(kept) == 3
    assert repr(sorted(shown.collect())) == repr(sorted(wanted.collect()))


@pytest.mark.spark
@pytest.mark.parametrize("apply_on", ["executors", full("driver")])
def test_the_most_frequent_values_and_the_row_of_the_greatest(apply_on, spark, tmp_path):
    """Also as new values, which a DataFrame with the result types holds."""
    url = f"sqlite:///{tmp_path}/state.db"
    rows = [("a", "x", 1, [1, None]), ("a", "y", 9, [2]), ("a", "y", 9, [2, 0]), ("a", None, 7, None)]
    frame = spark.createDataFrame(rows, "k string, s string, n int, tags array<int>")
    seen = []
    counted = newStream("s", frame).groupBy("k")
    job = counted.persistentAggregate(
        opaque(url, apply_on=apply_on),
        often=TopN(1, "s", by="count", most=2),
        longest=ArgMax("tags", by="n"),
        shortest=ArgMin("tags", by="n", where="n < 9"),
    )
    job.newValuesStream().foreachBatch(lambda batch, _: seen.extend(batch.collect()))
    job(frame, 0)
    job(spark.createDataFrame([("a", "x", 0, [5])] * 2, frame.schema), 1)
    assert contents(url, "s") == {
        ("a",): {"often": [{"value": "x", "count": 3}], "longest": [2, 0], "shortest": [5]},
    }
    assert [row.asDict(recursive=True) for row in seen] == [
        {"k": "a", "often": [{"value": "y", "count": 2}], "longest": [2, 0], "shortest": [1, None]},
        {"k": "a", "often": [{"value": "x", "count": 3}], "longest": [2, 0], "shortest": [5]},
    ]
    with pytest.raises(Exception, match="a key has 3 values, and at most 2 fit"):
        job(spark.createDataFrame([("a", "z", 0, None)], frame.schema), 2)


@pytest.mark.spark
def test_a_second_state_counts_some_of_the_new_values_only(spark, tmp_path):
    """How many users have more than two visits; a user that crosses the line is counted from then on."""
    url = f"sqlite:///{tmp_path}/state.db"
    frame = spark.createDataFrame([("a",), ("a",), ("a",), ("b",)], "k string")
    job = newStream("s", frame).groupBy("k").persistentAggregate(opaque(url, name="first"), visits=Count())
    job.newValuesStream().persistentAggregate(
        opaque(url, name="second"), often=Count(where="visits > 2"), theirs=Sum("visits", where="visits > 2")
    )
    job(frame, 0)
    assert contents(url, "second") == {(): {"often": 1, "theirs": 3}}
    job(spark.createDataFrame([("b",), ("b",), ("a",)], "k string"), 1)
    assert contents(url, "second") == {(): {"often": 2, "theirs": 7}}
    with pytest.raises(errors.ConfigurationError, match="BoolOr cannot take those back"):
        job.newValuesStream().persistentAggregate(opaque(url, name="third"), any=BoolOr(F.col("visits") > 2))


@pytest.mark.spark
def test_more_values_than_the_bound_end_the_batch_and_nothing_counts(spark, tmp_path):
    url = f"sqlite:///{tmp_path}/state.db"
    frame = spark.createDataFrame([("a", 1), ("a", 2), ("a", 2)], "k string, n bigint")
    counted = newStream("s", frame).groupBy("k")
    job = counted.persistentAggregate(opaque(url), rows=Count(), different=CountDistinct("n", most=2))
    job(frame, 0)
    with pytest.raises(Exception, match="a key has 3 values, and at most 2 fit"):
        job(spark.createDataFrame([("a", 3)], "k string, n bigint"), 1)
    assert contents(url, "s") == {("a",): {"rows": 3, "different": 2}}
    for wrong in (0, True, None):
        with pytest.raises(errors.ConfigurationError, match="needs most="):
            Collect("n", most=wrong)


@pytest.mark.spark
def test_a_trigger_may_be_an_interval(spark, visits, tmp_path):
    visits.put("0", [("a", 1)])
    counts = newStream("visits", visits.stream(spark)).groupBy("user_id")
    job = counts.persistentAggregate(opaque(f"sqlite:///{tmp_path}/state.db"), n=Count())
    query = job.start(visits.checkpoint, trigger="0 seconds")
    query.processAllAvailable()
    query.stop()
    assert contents(f"sqlite:///{tmp_path}/state.db", "visits") == {("a",): {"n": 1}}


def test_seconds_may_be_a_timedelta_and_an_option_that_is_none_is_named_with_all_there_are():
    assert opaque("redis://", ttl=timedelta(minutes=1), patience=timedelta(0)).ttl == 60
    with pytest.raises(errors.ConfigurationError, match="no option 'tll'; it has name, serializer, blocks, ttl"):
        opaque("memory://", tll=3)  # type: ignore[call-arg]


@pytest.mark.spark
def test_keys_may_be_expressions_and_structs(spark, tmp_path):
    url = f"sqlite:///{tmp_path}/state.db"
    hour = datetime(2026, 1, 1, 5, tzinfo=UTC)
    frame = spark.createDataFrame(
        [("de", hour), ("DE", hour + timedelta(minutes=59)), ("fr", hour)], "k string, at timestamp"
    )
    window = F.window("at", "1 hour")
    for name, stream, key in (
        ("named", newStream("s", frame).groupBy(window, F.upper("k").alias("country")), ("DE",)),
        ("added", newStream("s", frame.withColumn("window", window)).groupBy(["window", F.upper("k")]), ("DE",)),
        ("start", newStream("s", frame.withColumn("window", window)).groupBy("window.start"), ()),
    ):
        job = stream.persistentAggregate(opaque(url, name=name), rows=Count())
        job(frame if name == "named" else frame.withColumn("window", window), 0)
        with open_reader(url, name) as reader:
            start = (hour,) if name == "start" else (hour, hour + timedelta(hours=1))
            assert reader.get((*start, *key)) == {"rows": 2 if key else 3}
            columns = [field.name for field in reader.ledger().keys]
            assert (
                columns == ["window_start", "window_end", "country" if name == "named" else "upper(k)"][: len(columns)]
            )
    assert newStream("s", frame).groupBy(F.col("k"))._keys == newStream("s", frame).groupBy("k")._keys
    newStream("s", frame).groupBy("k").persistentAggregate(opaque(url, name="plain"), rows=Count())(frame, 0)
    with open_reader(url, "plain") as reader, pytest.raises(errors.KeyEncodingError, match="3 is a int"):
        reader.get(3)


@pytest.mark.spark
def test_first_mistakes_are_told_with_what_to_write(spark, tmp_path):
    url = f"sqlite:///{tmp_path}/state.db"
    frame = spark.createDataFrame([("a", 1)], "k string, n int").withColumn("s", F.struct("k", "n"))
    stream = newStream("s", frame)

    def keep(**aggregates):
        return stream.groupBy("k").persistentAggregate(opaque(url), **aggregates)

    for mistake, words in (
        (lambda: newStream(frame, "s"), "newStream takes a name first"),
        (
            lambda: stream.groupBy("k").persistentAggregate(opaque(url), Count()),
            r"a name, such as visits=Count\(\)$",
        ),
        (lambda: stream.persistentAggregate(opaque(url), Sum(F.col("n") * 2)), r"such as visits=Sum\(Column<"),
        (lambda: stream.aggregate(Sum(F.col("n") * 2)), r"Sum\(Column<.* is no BatchAggregator"),
        (lambda: stream.groupBy(3), "column names and expressions, not 3"),
        (lambda: stream.groupBy(F.col("nn")), "the key Column<'nn'> cannot be computed.*nn"),
        (lambda: stream.groupBy(F.upper("k").alias("k")), "has the name of a column: .* alias"),
        (lambda: stream.groupBy(F.upper("k").alias("K")), "has the name of a column: .* alias"),
        (lambda: newStream("s", frame.withColumn("S_K", F.lit(1))).groupBy("s"), "'s' is a struct.*'s_k'"),
        (lambda: stream.groupBy("s.x"), "no column 's.x'"),
        (lambda: newStream("s", frame.withColumn("s_k", F.lit(1))).groupBy("s"), "'s' is a struct.*'s_k'"),
        (lambda: keep(n=Sum(F.col("nn") * 2)), "cannot be computed. Spark says: .*UNRESOLVED_COLUMN.*nn"),
        (lambda: keep(n=Sum(F.sum("n"))), "cannot be computed. Spark says: .*MISSING_GROUP_BY"),
        (lambda: keep(n=Count(where="nn > 1")), "cannot be computed. Spark says: .*UNRESOLVED_COLUMN"),
        (lambda: keep(n=Count(where="n")), "cannot be computed. Spark says: .*BOOLEAN"),
        (lambda: keep(n=Count(where="n >>>")), "cannot be computed. Spark says: .*PARSE_SYNTAX_ERROR"),
        (lambda: Count(where=3), "where is a condition, a Column or text of Spark SQL, not 3"),
        (lambda: keep(n=Last("s", by="n")), r"take a field of it, F.col\('s.name'\), or its text, F.to_json\('s'\)"),
        (lambda: TopN("n", 3), "how many values it shows, such as TopN"),
        (lambda: LastN("n", 3), "the column that orders the rows: LastN"),
        (lambda: keep(n=LastN("s", 3, by="n")), "F.to_json"),
        (lambda: TopN(3, "n", by="count"), "needs most=, how many values a key may hold"),
        (lambda: TopN(3, "n", most=5), "most= is for by='count'"),
        (lambda: TopN(3, "n", by="rows"), "by='value' or by='count', not by='rows'"),
    ):
        with pytest.raises(errors.ConfigurationError, match=words):
            mistake()
    job = (
        newStream("s", spark.readStream.format("rate").load())
        .groupBy("value")
        .persistentAggregate(opaque(url), n=Count())
    )
    with pytest.raises(errors.ConfigurationError, match="an interval such as '10 seconds'"):
        job.start(str(tmp_path / "checkpoint"), trigger=10)
    assert not (tmp_path / "state.db").exists()
