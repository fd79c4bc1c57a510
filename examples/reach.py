"""Reach, Trident's second example: how many different people may have seen a URL.

    scripts/run python examples/reach.py

Two states: who tweeted a URL, and who follows whom. A request goes from a URL to its tweeters, from these to their
followers, and counts each person once. Both are kept by streams, with the set of people as a value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pyspark.sql import DataFrame, SparkSession

from mapstate import CombinerAggregator, Count, newStream, opaque
from mapstate.spark import Collector, QueryFunction, newStaticState


class People(CombinerAggregator):
    """The different values of a column, sorted."""

    def __init__(self, column: str) -> None:
        self.column = column

    def columns(self) -> Sequence[str]:
        """See `Aggregator.columns`."""
        return (self.column,)

    def init(self, row: Mapping[str, Any]) -> list[str]:
        """One."""
        return [row[self.column]]

    def combine(self, a: list[str], b: list[str]) -> list[str]:
        """Both, each once."""
        return sorted({*a, *b})


class Expand(QueryFunction):
    """A row for each person in a state's set; none where there is no such key."""

    def batch_retrieve(self, state: Any, keys: Sequence[tuple[Any, ...]]) -> Sequence[Any]:
        """One bulk read."""
        return [found["people"] if found else [] for found in state.multi_get(keys)]

    def execute(self, key: tuple[Any, ...], result: list[str], collector: Collector) -> None:  # noqa: ARG002
        """A row each."""
        for person in result:
            collector.emit(person)


def tweeters(tweets: DataFrame, store: str) -> Any:
    """The state of who tweeted a URL, from a stream of (url, tweeter)."""
    return newStream("tweeters", tweets).groupBy("url").persistentAggregate(opaque(store), people=People("tweeter"))


def followers(follows: DataFrame, store: str) -> Any:
    """The state of who follows somebody, from a stream of (person, follower)."""
    grouped = newStream("followers", follows).groupBy("person")
    return grouped.persistentAggregate(opaque(store), people=People("follower"))


def reach(spark: SparkSession, store: str, urls: Sequence[str]) -> dict[str, int]:
    """How many different people follow somebody who tweeted each URL; a URL that nobody tweeted is left out."""
    request = newStream("reach", spark.createDataFrame([(url,) for url in urls], "url string"))
    reached = (
        request.stateQuery(newStaticState(opaque(store, "tweeters")), "url", "tweeter string", query=Expand())
        .stateQuery(newStaticState(opaque(store, "followers")), "tweeter", "follower string", query=Expand())
        .transform(lambda rows: rows.select("url", "follower").distinct())
        .groupBy("url")
        .aggregate(reach=Count())
    )
    return {row["url"]: row["reach"] for row in reached.toDF().collect()}


TWEETS = [("foo.com/blog/1", name) for name in ("sally", "bob", "tim", "george", "nathan")] + [
    ("engineering.twitter.com/blog/5", name) for name in ("adam", "david", "sally", "nathan")
]
FOLLOWS = [
    (person, follower)
    for person, names in {
        "sally": "bob tim alice adam jim chris jai",
        "bob": "sally nathan jim mary david vivian",
        "tim": "alex",
        "nathan": "sally bob adam harry chris vivian emily jordan",
        "adam": "david carissa",
        "mike": "john bob",
        "john": "alice nathan jim mike bob",
    }.items()
    for follower in names.split()
]


def main() -> None:
    """The command: both states from made-up tweets, then three requests."""
    spark = SparkSession.builder.appName("reach").config("spark.log.level", "ERROR").getOrCreate()
    store = "memory://reach"
    tweets = spark.createDataFrame(TWEETS, "url string, tweeter string")
    follows = spark.createDataFrame(FOLLOWS, "person string, follower string")
    tweeters(tweets, store)(tweets, 0)
    followers(follows, store)(follows, 0)
    print(reach(spark, store, ["foo.com/blog/1", "engineering.twitter.com/blog/5", "nobody.com"]))


if __name__ == "__main__":
    main()
