"""How Spark is asked to start a query."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import TYPE_CHECKING, Any

from mapstate.backends import opened
from mapstate.capabilities import Probes
from mapstate.errors import ConfigurationError, MapStateError, UsageError
from mapstate.operations.checkpoint import check_first_offsets
from mapstate.protocol.ledger import Ledger
from mapstate.protocol.opening import open_ledger
from mapstate.spark.driver.access import access_of, is_connect
from mapstate.spark.driver.job import Branch
from mapstate.spark.driver.repeats import branches_of
from mapstate.spark.driver.state import StateDriver

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.query import StreamingQuery

_SETTING = "spark.sql.streaming.checkpointLocation"


def start_query(
    query: Any,
    checkpointLocation: str | None,
    options: Mapping[str, str],
    *,
    trigger: str | Mapping[str, Any] | None,
    name: str | None,
    mode: str,
) -> StreamingQuery:
    """Start a `Query`, which imports this file only now. See `Startable.start`."""
    df, plan = query.df, query.plan
    query.last_error = query.served = None
    if not df.isStreaming:
        raise UsageError("this DataFrame is no stream: read it with spark.readStream")
    branches = [*branches_of(plan)]
    if plan.branches and mode.lower() != "append":
        access_of(df).check_increments(mode)
    if trigger is not None and not isinstance(trigger, (str, Mapping)):
        raise ConfigurationError(
            f"trigger is an interval such as '10 seconds', or {{'availableNow': True}}, not {trigger!r}"
        )
    place = checkpointLocation or options.get("checkpointLocation")
    called: Any = query
    sent: AbstractContextManager[None] = nullcontext()
    if is_connect(df):  # which pickles it
        from mapstate.spark.driver.connect import ServedQuery, starting

        sent = starting()
        called = ServedQuery.of(query, df, branches, place)
    elif branches and checkpointLocation == "" and place is None and df.sparkSession.conf.get(_SETTING, None) is None:
        raise UsageError(
            "start needs a checkpointLocation: without one Spark begins anew at each start, and the second start is "
            "refused, because the state is the first one's. Nothing was started. checkpointLocation=None is for a "
            "query that is started once"
        )
    else:
        _check_states(df, branches, place)
    with sent:
        writer = df.writeStream.foreachBatch(called).outputMode(mode)
    if trigger is not None:
        writer = writer.trigger(**({"processingTime": trigger} if isinstance(trigger, str) else trigger))
    if name is not None:
        writer = writer.queryName(name)
    if checkpointLocation:
        check_first_offsets(str(checkpointLocation))
        writer = writer.option("checkpointLocation", str(checkpointLocation))
    started: StreamingQuery = writer.options(**options).start()
    if is_connect(df):
        query.served = started
    else:
        _say_last(started, lambda: query.last_error)
    return started


def _check_states(df: DataFrame, branches: Sequence[Branch], place: str | None) -> None:
    """Raise what the first batch would, but for the text that Spark puts around it."""
    query_id = ""
    if place:
        with suppress(Exception):  # not there yet, or Spark itself cannot read it
            query_id = json.loads(access_of(df).text(f"{place}/metadata"))["id"]
    for branch in branches:
        with opened(branch.job.spec.backend, branch.job.spec.state) as store:
            if isinstance(store, Probes):
                store.probe()
            ledger = Ledger(store, branch.job.spec.state).load() if query_id else None
            if ledger is not None and ledger.owner != query_id:
                open_ledger(ledger, (branch.make_driver or StateDriver)(branch).open_request(query_id))


def _say_last(query: StreamingQuery, error_of: Callable[[], MapStateError | None]) -> None:
    """Have what the query raises end with the message of our error, below all that Spark says of its own."""

    def awaitTermination(timeout: int | None = None) -> bool | None:
        try:
            return wait(timeout)
        except Exception as error:
            if (ours := error_of()) is not None:
                error.add_note(f"{type(ours).__name__}: {ours}")
            raise

    wait, query.awaitTermination = query.awaitTermination, awaitTermination  # type: ignore[method-assign]
