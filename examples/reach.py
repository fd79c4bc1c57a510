"""Reach, Trident's second example: how many different people may have seen a URL.

    scripts/run python examples/reach.py

It keeps two states, each with a set of people as the value: who tweeted a URL, and who follows whom. A request goes
from a URL to its tweeters, and from these to their followers. It counts each person once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pyspark.sql import DataFrame, SparkSession

from mapstate import CombinerAggregator, Count, newStream, opaque
from mapstate.spark import Collector, QueryFunction, newStaticState


class People(CombinerAggregator):
    """Collect the different values of a column, sorted."""

    def __init__(self, column: str) -> None:
        self.column = column

    def columns(self) -> Sequence[str]:
        """See `Aggregator.columns`."""
        return (self.column,)

    def init(self, row: Mapping[str, Any]) -> list[str]:
        """Start with the row's own value."""
        return [row[self.column]]

    def combine(self, a: list[str], b: list[str]) -> list[str]:
        """Unite two sets."""
        return sorted({*a, *b})


class Expand(QueryFunction):
    """Emit a row for each person in a state's set; no row for an absent key."""

    def batch_retrieve(self, state: Any, keys: Sequence[tuple[Any, ...]]) -> Sequence[Any]:
        """Read all keys in one bulk call."""
        return [value["people"] if value else [] for value in state.multi_get(keys)]

    def execute(self, key: tuple[Any, ...], result: list[str], collector: Collector) -> None:  # noqa: ARG002
        """Emit a row per person."""
        for person in result:
            collector.emit(person)


def tweeters(tweets: DataFrame, store: str) -> Any:
    """Keep who tweeted a URL, from a stream of (url, tweeter)."""
    return newStream("tweeters", tweets).groupBy("url").persistentAggregate(opaque(store), people=People("tweeter"))


def followers(follows: DataFrame, store: str) -> Any:
    """Keep who follows a person, from a stream of (person, follower)."""
    grouped = newStream("followers", follows).groupBy("person")
    return grouped.persistentAggregate(opaque(store), people=People("follower"))


def reach(spark: SparkSession, store: str, urls: Sequence[str]) -> dict[str, int]:
    """Count the different people who follow a tweeter of each URL. A URL without tweets is left out."""
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
    """Run the command: both states from made-up tweets, then three requests."""
    spark = SparkSession.builder.appName("reach").config("spark.log.level", "ERROR").getOrCreate()
    store = "memory://reach"
    tweets = spark.createDataFrame(TWEETS, "url string, tweeter string")
    follows = spark.createDataFrame(FOLLOWS, "person string, follower string")
    tweeters(tweets, store)(tweets, 0)
    followers(follows, store)(follows, 0)
    print(reach(spark, store, ["foo.com/blog/1", "engineering.twitter.com/blog/5", "nobody.com"]))


if __name__ == "__main__":
    main()
