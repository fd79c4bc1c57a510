"""What a person would try first works, or says in one sentence what to write instead."""

from __future__ import annotations

from datetime import timedelta

import pytest
from pyspark.sql import functions as F
from spark_fixtures import contents

from mapstate import Avg, Count, First, Last, Max, Sum, errors, newStream, opaque, open_reader


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
def test_a_trigger_may_be_an_interval(spark, visits, tmp_path):
    visits.put("0", [("a", 1)])
    counts = newStream("visits", visits.stream(spark)).groupBy("user_id")
    job = counts.persistentAggregate(opaque(f"sqlite:///{tmp_path}/state.db"), n=Count())
    query = job.start(visits.checkpoint, trigger="0 seconds")
    query.processAllAvailable()
    query.stop()
    assert contents(f"sqlite:///{tmp_path}/state.db", "visits") == {("a",): {"n": 1}}


def test_seconds_may_be_a_timedelta_and_an_option_that_is_none_is_named_with_all_there_are():
    assert opaque("memory://", ttl=timedelta(minutes=1), patience=timedelta(0)).ttl == 60
    with pytest.raises(errors.ConfigurationError, match="no option tll; it has name, serializer, cache_size, ttl"):
        opaque("memory://", tll=3)  # type: ignore[call-arg]
