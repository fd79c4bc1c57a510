"""A job that obeys `mapstate activate`, `deactivate`, `rebalance` and `kill`: visits by page, from JSON files.

    MAPSTATE_URL=redis://localhost python examples/site_job.py INPUT CHECKPOINT

Whatever supervises it may start it again at any time. It ends with 0 when it was killed by `mapstate kill`, with 3
when it found such a kill half done, and must not be started again then; see docs/running.md.
"""

from __future__ import annotations

import os
import sys

from pyspark.sql import SparkSession

from mapstate import Count, Sum, Topology, opaque
from mapstate.errors import NotAliveError


def main(folder: str, checkpoint: str, url: str) -> None:
    spark = SparkSession.builder.appName("site").getOrCreate()
    visits = spark.readStream.schema("page string, bytes bigint").json(folder)
    topology = Topology("site")
    by_page = topology.newStream("visits", visits).groupBy("page")
    by_page.persistentAggregate(opaque(url, name="visits_by_page"), visits=Count(), bytes=Sum("bytes"))
    try:
        topology.run(checkpoint, store=url, trigger="1 second")
    except NotAliveError as error:
        print(error, file=sys.stderr)
        sys.exit(3)
    spark.stop()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], os.environ["MAPSTATE_URL"])
