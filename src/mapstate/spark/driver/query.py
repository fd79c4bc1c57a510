"""Which streaming query a foreachBatch call serves, whether that query is still wanted, its settings and its mode."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from mapstate.errors import UsageError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = ["QueryRun", "check_increments", "check_running_increments", "configured", "java_class", "running_query"]

_SENDS_TOTALS = ("Aggregate", "Distinct")

_classes: dict[str, tuple[Any, Any]] = {}


class QueryRun(NamedTuple):
    """The query of a checkpoint, and one start of it."""

    query_id: str
    run_id: str | None

    @classmethod
    def of(cls, batch_df: DataFrame, default: str) -> QueryRun:
        """The run that calls; ``default`` owns the state where the function is called by hand."""
        context = batch_df.sparkSession.sparkContext
        query_id = context.getLocalProperty("sql.streaming.queryId")
        # A streaming query runs its jobs in a group of its own, named after the run.
        return cls(query_id or default, context.getLocalProperty("spark.jobGroup.id") if query_id else None)

    @staticmethod
    def may_go_on(batch_df: DataFrame) -> bool:
        """False once somebody has stopped the query: jobs that failed since were cancelled."""
        context = batch_df.sparkSession.sparkContext
        if context.getLocalProperty("sql.streaming.queryId") is None:
            return True
        if context._jvm is None:
            return False  # the whole session was stopped
        execution = running_query(batch_df)
        return execution is not None and bool(execution.isActive())


def running_query(batch_df: DataFrame) -> Any | None:
    """The JVM's StreamExecution that calls; None where the function is called by hand. Driver."""
    session: Any = batch_df.sparkSession
    query_id = session.sparkContext.getLocalProperty("sql.streaming.queryId")
    if query_id is None:
        return None
    uuid = java_class(session.sparkContext._jvm, "java.util.UUID").fromString(query_id)
    return session._jsparkSession.sharedState().activeStreamingQueries().get(uuid)


def check_increments(df: DataFrame, output_mode: str) -> None:
    """Before a query starts whose rows are added to a state. Driver.

    Raises UsageError if a streaming aggregation would send each key's total again and again. Other stateful operators
    send a row once also in update mode, and what a user's own sends is the user's.
    """
    if output_mode.lower() != "append":
        _check_plan(cast("Any", df)._jdf.queryExecution().analyzed(), output_mode)


def check_running_increments(batch_df: DataFrame) -> None:
    """`check_increments` of the query that calls, for its first batch. Nothing to check where called by hand."""
    execution = running_query(batch_df)
    if execution is not None:
        mode = str(execution.outputMode().toString())
        if mode.lower() != "append":
            _check_plan(execution.analyzedPlan(), mode)


def _check_plan(plan: Any, output_mode: str) -> None:
    if plan.getClass().getSimpleName() in _SENDS_TOTALS and plan.isStreaming():
        raise UsageError(
            f"the stream is aggregated before it comes here, and outputMode={output_mode.lower()!r} sends totals, not "
            "increments: a state would add totals up. Nothing was written. Aggregate here instead, by "
            "newStream(...).groupBy(...).persistentAggregate(...); or use a watermark and outputMode='append'. See "
            "docs/guarantees.md#rows-are-increments"
        )
    children = plan.children()
    for at in range(children.size()):
        _check_plan(children.apply(at), output_mode)


def java_class(jvm: Any, name: str) -> Any:
    """A class of the JVM by its whole name, looked up once: each dot is a call to the JVM."""
    known = _classes.get(name)
    if known is None or known[0] is not jvm:
        found = jvm
        for part in name.split("."):
            found = getattr(found, part)
        known = _classes[name] = jvm, found
    return known[1]


@contextmanager
def configured(batch_df: DataFrame, settings: Mapping[str, str]) -> Iterator[None]:
    """Spark's SQL settings for the plans that run inside, in the query's own copy of the session. Driver."""
    conf = batch_df.sparkSession.conf
    before = {name: conf.get(name, None) for name in settings}
    for name, value in settings.items():
        conf.set(name, value)
    try:
        yield
    finally:
        for name, was in before.items():
            if was is None:
                conf.unset(name)
            else:
                conf.set(name, was)
