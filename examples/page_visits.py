"""Page visits: visits per user, an alert at a limit, and how many users have how many visits.

    scripts/run python examples/page_visits.py --visits visits --store sqlite:///visits.db --checkpoint checkpoint

--visits is a directory of CSV files, "user,page" a line. Three things follow one stream:

- the state `visits_by_user`;
- an alert once a user reaches --limit, from the new and the old value of each key;
- the state `users_by_visits`, counts of counts. A user who moves from 3 visits to 4 leaves one group for the other,
  exactly once, also after the replay of a batch.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from pyspark.sql import DataFrame, SparkSession

from mapstate import Count, newStream, opaque, open_reader
from mapstate.operations.checkpoint import clear_first_offsets


def page_visits(visits: DataFrame, store: str, limit: int, alert: Callable[[str, int], None]) -> Any:
    """Build the job. It calls ``alert(user, visits)`` at least once per user: again only after a crash."""
    by_user = newStream("visits_by_user", visits).groupBy("user").persistentAggregate(opaque(store), visits=Count())

    def tell(crossed: DataFrame, _batch_id: int) -> None:
        for row in crossed.toLocalIterator():
            alert(row["user"], row["visits"])

    by_user = (
        by_user.newValuesStream(old=True)
        .transform(lambda rows: rows.where(f"visits >= {limit} AND coalesce(old_visits, 0) < {limit}"))
        .foreachBatch(tell)
    )
    by_visits = by_user.newValuesStream().groupBy("visits")
    return by_visits.persistentAggregate(opaque(store, name="users_by_visits"), users=Count())


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description="Counts visits per user, and users per number of visits.")
    parser.add_argument("--visits", required=True, help="a directory of CSV files: user,page")
    parser.add_argument("--store", required=True, help="sqlite:///visits.db, redis://localhost:6379/0, ...")
    parser.add_argument("--checkpoint", required=True, help="directory for Spark's progress; belongs to the store")
    parser.add_argument("--limit", type=int, default=100, help="visits of a user at which there is an alert")
    options = parser.parse_args()
    spark = SparkSession.builder.appName("page_visits").config("spark.log.level", "ERROR").getOrCreate()
    visits = spark.readStream.schema("user string, page string").csv(options.visits)
    job = page_visits(visits, options.store, options.limit, lambda user, n: print(f"{user} has come {n} times"))
    clear_first_offsets(options.checkpoint)  # of a run that was killed before its first batch
    job.start(options.checkpoint, trigger={"availableNow": True}).awaitTermination()
    with open_reader(options.store, "users_by_visits") as state:
        for (n,), value in sorted(state.scan()):
            print(f"{value['users']} users with {n} visits")


if __name__ == "__main__":
    main()
