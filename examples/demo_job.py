"""The streaming job of the demo, an ordinary one: visits and seconds per user.

    python examples/demo_job.py VISITS STORE CHECKPOINT

It reads the CSV files of a directory, one per micro-batch, and ends after the last. It knows nothing
of the demo around it (demo.py), which kills it and starts it again.
"""

import sys

from pyspark.sql import SparkSession

from mapstate import Count, Sum, newStream, opaque
from mapstate.operations.checkpoint import clear_first_offsets


def main(visits: str, store: str, checkpoint: str) -> None:
    spark = (
        SparkSession.builder.appName("demo")
        .master("local[2]")
        .config("spark.sql.shuffle.partitions", 2)
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.log.level", "WARN")
        .getOrCreate()
    )
    stream = (
        spark.readStream.schema("user_id string, page string, seconds bigint")
        .option("maxFilesPerTrigger", 1)
        .csv(visits)
    )
    counts = (
        newStream("visits", stream)
        .groupBy("user_id")
        .persistentAggregate(
            # So few keys per write that a batch takes a while: the demo kills this job in the middle of one.
            opaque(store, name="visits_by_user", chunk_size=4),
            visits=Count(),
            seconds=Sum("seconds"),
        )
    )
    clear_first_offsets(checkpoint)  # of a run that was killed before its first batch
    counts.start(checkpoint, trigger={"availableNow": True}).awaitTermination()


if __name__ == "__main__":
    main(*sys.argv[1:])
