"""Which streaming query a foreachBatch call serves, whether that query is still wanted, and its settings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = ["QueryRun", "configured", "java_class", "running_query"]

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
