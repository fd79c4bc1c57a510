"""How Spark is asked to start a query."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mapstate.errors import ConfigurationError, UsageError
from mapstate.operations.checkpoint import check_first_offsets
from mapstate.spark.driver.access import access_of, is_connect
from mapstate.spark.driver.job import Branch

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.query import StreamingQuery


_SETTING = "spark.sql.streaming.checkpointLocation"


def start_query(
    function: Callable[[DataFrame, int], None],
    df: DataFrame,
    branches: Sequence[Branch],
    *,
    checkpointLocation: str | None,
    trigger: str | Mapping[str, Any] | None,
    queryName: str | None,
    outputMode: str,
    options: Mapping[str, str],
) -> StreamingQuery:
    """Start the query of a stream, whose batches ``function`` applies to ``branches``. See `Startable.start`."""
    if not df.isStreaming:
        raise UsageError("this DataFrame is no stream: read it with spark.readStream")
    if branches and outputMode.lower() != "append":
        access_of(df).check_increments(outputMode)
    place = checkpointLocation or options.get("checkpointLocation")
    called: Any = function
    if is_connect(df):  # which pickles it
        from mapstate.spark.driver.connect import ServedQuery

        called = ServedQuery.of(function, df, branches, place)
    elif branches and checkpointLocation == "" and place is None and df.sparkSession.conf.get(_SETTING, None) is None:
        raise UsageError(
            "start needs a checkpointLocation: without one Spark begins anew at each start, and the second start is "
            "refused, because the state is the first one's. Nothing was started. checkpointLocation=None is for a "
            "query that is started once"
        )
    writer = df.writeStream.foreachBatch(called).outputMode(outputMode)
    if trigger is not None:
        if not isinstance(trigger, (str, Mapping)):
            raise ConfigurationError(
                f"trigger is an interval such as '10 seconds', or {{'availableNow': True}}, not {trigger!r}"
            )
        writer = writer.trigger(**({"processingTime": trigger} if isinstance(trigger, str) else trigger))
    if queryName is not None:
        writer = writer.queryName(queryName)
    if checkpointLocation:
        check_first_offsets(str(checkpointLocation))
        writer = writer.option("checkpointLocation", str(checkpointLocation))
    return writer.options(**options).start()
