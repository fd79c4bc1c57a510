"""Aggregates of one batch, merges and ways to spread rows; Trident's own integration numbers."""

from __future__ import annotations

from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from mapstate import Avg, CombinerAggregator, Count, Max, Min, Sum, errors, newStream, opaque
from mapstate.spark import BatchAggregator, Collector, newStaticState
from mapstate.trident import FirstN, batchGlobal, global_

pytestmark = pytest.mark.spark


def split(rows: DataFrame) -> DataFrame:
    """Trident's Split: a row per word."""
    words = rows.select("*", F.explode(F.split("args", " ")).alias("word"))
    return words.where("word <> ''").select("word")


def sentences(spark: SparkSession, *args: str) -> DataFrame:
    return spark.createDataFrame([(one,) for one in args], "args string")


def rows_of(stream: Any) -> list[tuple[Any, ...]]:
    return sorted((tuple(row) for row in stream.toDF().collect()), key=repr)


def test_tridents_word_count_numbers(spark, tmp_path):
    """hello the man said, the; the man on the moon, where are you; empty batches in between change nothing."""
    spec = opaque(f"memory://{tmp_path.name}", name="words")
    feeder = newStream("words", sentences(spark)).transform(split)
    words = feeder.groupBy("word").persistentAggregate(spec, count=Count())
    state = newStaticState(spec)

    def asked(args: str) -> list[Any]:
        request = newStream("request", sentences(spark, args)).transform(split)
        counts = request.groupBy("word").aggregate(asked=Count()).stateQuery(state, "word", ["count"])
        return rows_of(counts.aggregate(sum=Sum("count")))

    batches = [("hello the man said", "the"), (), ("the man on the moon", "where are you"), ()]
    said = []
    for batch_id, batch in enumerate(batches):
        words(sentences(spark, *batch), batch_id)
        said.append((asked("the"), asked("hello")) if batch_id < 2 else (asked("the"), asked("man where you the")))
    assert said == [([(2,)], [(1,)])] * 2 + [([(4,)], [(8,)])] * 2


def test_an_empty_request_counts_0_and_eight_numbers_count_8(spark):
    for args, count in (("", 0), ("1 2 3 4 5 6 7 8", 8)):
        stream = newStream("numbers", sentences(spark, args)).transform(split)
        assert rows_of(stream.aggregate(n=Count())) == [(count,)]
        assert rows_of(stream.aggregate(CountBatch())) == [(count,)]


class CountBatch(BatchAggregator):
    """Trident's CountAsAggregator."""

    output = "count bigint"

    def init(self, batch_id: int | None, collector: Collector) -> int:
        return 0

    def aggregate(self, value: int, row: Any, collector: Collector) -> int:
        return value + 1

    def complete(self, value: int, collector: Collector) -> None:
        collector.emit(value)


class LongWords(BatchAggregator):
    """Emits while it goes, and may emit nothing."""

    output = "longer string, place bigint"

    def init(self, batch_id: int | None, collector: Collector) -> Any:
        return batch_id

    def aggregate(self, value: Any, row: Any, collector: Collector) -> Any:
        if len(row["word"]) > 3:
            collector.emit(row["word"], value)
        return value

    def complete(self, value: Any, collector: Collector) -> None:
        pass


class Longest(CombinerAggregator):
    value_type = "string"

    def columns(self) -> list[str]:
        return ["word"]

    def init(self, row: Any) -> Any:
        return row["word"]

    def combine(self, a: Any, b: Any) -> Any:
        return max(a, b, key=lambda one: (len(one), one))

    def zero(self) -> Any:
        return "-"


def test_a_chain_gives_every_combination_and_no_rows_where_one_emits_nothing(spark):
    words = newStream("words", sentences(spark, "hello the moon")).transform(split)
    chain = words.chainedAgg().aggregate(n=Count()).aggregate(LongWords()).aggregate(longest=Longest()).chainEnd()
    assert chain.schema.names == ["n", "longer", "place", "longest"]
    assert rows_of(chain) == [(3, "hello", None, "hello"), (3, "moon", None, "hello")]
    nothing = newStream("nothing", sentences(spark, "the")).transform(split)
    assert rows_of(nothing.chainedAgg().aggregate(n=Count()).aggregate(LongWords()).chainEnd()) == []
    none = newStream("none", sentences(spark)).transform(split)
    assert rows_of(none.aggregate(n=Count(), longest=Longest())) == [(0, "-")]


def test_what_no_rows_come_to(spark):
    """Min of nothing emits nothing; Sum of nothing is Trident's 0; Sum of 1.5 and 1.5 is 3.0."""
    numbers = spark.createDataFrame([(1.5, 1), (1.5, None)], "x double, i int")
    some, none = (newStream("s", frame) for frame in (numbers, numbers.where("x > 5")))
    assert rows_of(some.aggregate(x=Sum("x"), i=Sum("i"), n=Count("i"), mean=Avg("i"), least=Min("x"))) == [
        (3.0, 1, 1, 1.0, 1.5)
    ]
    assert rows_of(none.aggregate(x=Sum("x"), n=Count())) == [(0.0, 0)]
    assert rows_of(none.aggregate(n=Count(), least=Min("x"))) == []
    assert rows_of(none.groupBy("i").aggregate(n=Count())) == []
    assert rows_of(none.minBy("x")) == []
    assert rows_of(some.minBy("i")) == [(1.5, 1)]


def test_aggregates_by_key_native_and_in_python(spark):
    frame = spark.createDataFrame([("a", 1.0), ("b", 2.0), (None, 5.0), ("a", 4.0)], "word string, x double")
    by_word = newStream("s", frame).groupBy("word")
    assert rows_of(by_word.aggregate(n=Count(), most=Max("x"))) == [("a", 2, 4.0), ("b", 1, 2.0), (None, 1, 5.0)]
    rows = newStream("s", frame.where("word IS NOT NULL")).groupBy("word").aggregate(CountBatch(), longest=Longest())
    assert rows_of(rows) == [("a", 2, "a"), ("b", 1, "b")]
    nan = spark.createDataFrame([(float("nan"),), (float("nan"),), (0.0,)], "x double")
    grouped = newStream("s", nan).groupBy("x").aggregate(CountBatch())
    assert sorted(row["count"] for row in grouped.toDF().collect()) == [1, 2]


def test_rows_by_their_place_minBy_maxBy_FirstN(spark):
    frame = spark.createDataFrame([("a", 3), ("b", 1), ("c", None), ("d", 3), ("e", 2)], "k string, n int")
    stream = newStream("s", frame)
    assert rows_of(stream.minBy("n")) == [("b", 1)]
    assert rows_of(stream.maxBy("n")) == [("a", 3)]
    assert rows_of(stream.applyAssembly(FirstN(2, "n"))) == [("b", 1), ("e", 2)]
    assert rows_of(stream.applyAssembly(FirstN(3, "n", reverse=True))) == [("a", 3), ("d", 3), ("e", 2)]
    assert len(rows_of(stream.applyAssembly(FirstN(4)))) == 4


def test_rows_are_spread_as_asked(spark):
    frame = spark.createDataFrame([("abc"[n % 3], n) for n in range(30)], "k string, n int")
    stream = newStream("s", frame)
    assert [count for (count,) in rows_of(stream.applyAssembly(global_).partitionAggregate(CountBatch()))] == [30]
    assert rows_of(stream.applyAssembly(batchGlobal).partitionAggregate(n=Count())) == [(30,)]
    assert rows_of(stream.broadcast(3).partitionAggregate(CountBatch())) == [(30,)] * 3
    by_k = rows_of(stream.partitionBy("k", partitions=4).transform(
        lambda rows: rows.select("k", F.spark_partition_id().alias("at")).distinct()))  # fmt: skip
    assert len(by_k) == 3
    even = stream.shuffle(3).chainedAgg().partitionAggregate(n=Count()).partitionAggregate(total=Sum("n")).chainEnd()
    found = rows_of(even)
    assert [n for n, _ in found] == [10] * 3
    assert sum(total for _, total in found) == sum(range(30))


def test_merges_and_several_groupings_of_one_stream(spark, tmp_path):
    """Trident's split-merge and multiple-groupings tests."""
    requests = newStream("drpc", sentences(spark, "hello the man"))
    words = requests.transform(split)
    lengths = requests.transform(lambda rows: rows.select(F.length("args").cast("string").alias("word")))
    assert rows_of(words.merge(lengths)) == [("13",), ("hello",), ("man",), ("the",)]
    the = newStream("drpc", sentences(spark, "the"))
    native, own = (the.groupBy("args").aggregate(one) for one in (CountBatch(), CountBatch()))
    assert rows_of(native.merge(own)) == [("the", 1)] * 2
    both = requests.merge(newStream("other", sentences(spark, "on the moon"))).transform(split)
    url = f"memory://{tmp_path.name}"
    both.groupBy("word").persistentAggregate(opaque(url, "words"), n=Count())
    assert both.schema.names == ["word"]
    assert rows_of(both.groupBy("word").aggregate(n=Count()))[-1] == ("the", 2)
    with pytest.raises(errors.ConfigurationError, match="different DataFrames"):
        words.merge(the)


BAD = [
    (lambda s: s.aggregate(), "at least one"),
    (lambda s: s.aggregate(Count()), "is no BatchAggregator"),
    (lambda s: s.aggregate(n=CountBatch()), "no aggregator"),
    (lambda s: s.aggregate(CountBatch(), count=Count()), "'count'"),
    (lambda s: s.groupBy("args").aggregate(args=Count()), "'args'"),
    (lambda s: s.minBy("nix"), "'nix'"),
    (lambda s: s.applyAssembly(FirstN(2, "nix")), "'nix'"),
    (lambda s: FirstN(0), "from 1 to"),
    (lambda s: s.shuffle(0), "from 1 to"),
    (lambda s: s.partitionBy("nix"), "'nix'"),
]


@pytest.mark.parametrize("case", range(len(BAD)))
def test_what_cannot_be_aggregated_is_refused_before_anything_runs(case, spark):
    ask, message = BAD[case]
    with pytest.raises(errors.ConfigurationError, match=message):
        ask(newStream("s", sentences(spark)))
