"""Word count, Trident's first example: the exact count of each word in a directory of text files.

    scripts/run python examples/word_count.py --texts README.md --store sqlite:///words.db --checkpoint words.checkpoint

It reads the files that have come since the last run. Then it answers a request as Trident's DRPC would: the count of
each requested word, and their sum.
"""

from __future__ import annotations

import argparse
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from mapstate import Count, Sum, newStream, opaque
from mapstate.operations.checkpoint import clear_first_offsets
from mapstate.spark import newStaticState


def split(lines: DataFrame) -> DataFrame:
    """Give a row per word, in lower case."""
    return lines.select(F.explode(F.regexp_extract_all(F.lower("value"), F.lit(r"(\w+)"))).alias("word"))


def word_counts(lines: DataFrame, store: str) -> Any:
    """Build the job: a state of words, from a stream of lines."""
    words = newStream("word_counts", lines).transform(split)
    return words.groupBy("word").persistentAggregate(opaque(store), count=Count())


def ask(spark: SparkSession, store: str, text: str) -> tuple[dict[str, int | None], int]:
    """Return the count of each word of a text, and their sum. A word without a count is None."""
    request = newStream("request", spark.createDataFrame([(text,)], "value string")).transform(split)
    asked = request.stateQuery(newStaticState(opaque(store, name="word_counts")), "word", ["count"])
    counts = {row["word"]: row["count"] for row in asked.toDF().collect()}
    return counts, asked.aggregate(sum=Sum("count")).toDF().collect()[0]["sum"]


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description="Counts words exactly once, and answers for some of them.")
    parser.add_argument("--texts", required=True, help="a directory of text files, or a pattern")
    parser.add_argument("--store", required=True, help="sqlite:///words.db, redis://localhost:6379/0, ...")
    parser.add_argument("--checkpoint", required=True, help="directory for Spark's progress; belongs to the store")
    parser.add_argument("--ask", default="the man on the moon", help="words to ask for")
    options = parser.parse_args()
    spark = SparkSession.builder.appName("word_count").config("spark.log.level", "ERROR").getOrCreate()
    lines = spark.readStream.text(options.texts)
    clear_first_offsets(options.checkpoint)  # of a run that was killed before its first batch
    word_counts(lines, options.store).start(options.checkpoint, trigger={"availableNow": True}).awaitTermination()
    print(*ask(spark, options.store, options.ask))


if __name__ == "__main__":
    main()
