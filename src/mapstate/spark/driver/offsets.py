"""What Spark planned for a batch, and how far a committed batch has read its sources.

The plan is read on the driver before a batch begins, from the running query's own offset log: it tells a replay from a
batch that was planned anew. The offsets are kept with the commit, so that a new checkpoint can start there. Where the
function is called by hand there is neither.
"""

from __future__ import annotations

import json
import logging
import re
from typing import TYPE_CHECKING, Any

from mapstate.protocol.ledger_record import Commit
from mapstate.protocol.plans import BatchPlan
from mapstate.spark.driver.query import QueryRun, java_class, running_query

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = ["NO_HOST", "PlannedBatches", "offsets_of", "plan_of"]

_MOST_PATHS = 200  # every reader reads the ledger, so it stays small

NO_HOST = re.compile("^([A-Za-z0-9+.-]+:)///")  # the log has file:///x where _metadata.file_path has file:/x

_log = logging.getLogger("mapstate")


class PlannedBatches:
    """What Spark has planned for the batches of a query, one after the other, asked once for each. Driver."""

    def __init__(self) -> None:
        self._known: tuple[QueryRun, int] | None = None
        self.plan: BatchPlan | None = None

    def next(
        self, batch_df: DataFrame, batch_id: int, run: QueryRun, upstream_txid: int | None = None
    ) -> BatchPlan | None:
        """The plan of the batch that comes, see `plan_of`; it is ``plan`` from here on."""
        if run.run_id is None:
            self._known = self.plan = None
        elif self._known != (run, batch_id):
            before = self.plan if self._known == (run, batch_id - 1) else None
            self._known, self.plan = (run, batch_id), plan_of(batch_df, batch_id, before)
        if self.plan is not None:
            self.plan = self.plan._replace(upstream_txid=upstream_txid)
        return self.plan


def plan_of(batch_df: DataFrame, batch_id: int, before: BatchPlan | None) -> BatchPlan | None:
    """What Spark planned for a batch; None where the function is called by hand, or with a batch id of the user's own.

    Driver, once per batch. ``before`` is the plan of the batch before it, if this run of the query had that one. What
    Spark does not tell is logged as a warning, and then the batch cannot be told from a replay.
    """
    context = batch_df.sparkSession.sparkContext
    query, jvm = running_query(batch_df), context._jvm
    if query is None or context.getLocalProperty("streaming.sql.batchId") not in (str(batch_id), None):
        return None
    try:
        planned_at, end = _logged(query, jvm, batch_id)
        if before is not None:
            return BatchPlan(before.end, _json(end), planned_at, before.planned_at)
        previous_planned_at, start = _logged(query, jvm, batch_id - 1) if batch_id > 0 else (None, _initial(query))
        return BatchPlan(_json(start), _json(end), planned_at, previous_planned_at)
    except Exception as error:  # noqa: BLE001  whatever another Spark raises
        _log.debug("the entry of batch %d in the offset log cannot be read: %s", batch_id, error)
    try:
        start, end = (_progress(query, progress) for progress in (query.committedOffsets(), query.availableOffsets()))
        return BatchPlan(_json(start), _json(end))
    except Exception as error:  # noqa: BLE001  the same
        _log.warning(
            "the source offsets of batch %d are not known, so a batch that Spark plans anew, from an older checkpoint, "
            "would be taken for a replay: %s",
            *(batch_id, error),
        )
        return None


def _logged(query: Any, jvm: Any, batch_id: int) -> tuple[int, Any]:
    """When a batch was planned, and where it ends in each source, by the query's own log. Two forms of it are known.

    A list in the order of the plan; by name, where the user has named the sources.
    """
    log, out = query.offsetLog(), java_class(jvm, "java.io.ByteArrayOutputStream")()
    log.serialize(log.get(batch_id).get(), out)  # the whole entry in one call to the JVM
    version, metadata, *lines = out.toString("UTF-8").splitlines()
    if version == "v2":  # with the name of each source; it is its place unless the user has named it
        named = dict(line.partition(":")[::2] for line in lines)
        if set(named) != set(map(str, range(len(named)))):
            return json.loads(metadata)["batchTimestampMs"], {name: _offset(line) for name, line in named.items()}
        lines = [named[str(at)] for at in range(len(named))]
    elif version != "v1":
        raise ValueError(f"an offset log of form {version}")
    return json.loads(metadata)["batchTimestampMs"], [_offset(line) for line in lines]


def _offset(line: str) -> Any:
    return None if line == "-" else _parsed(line)


def _initial(query: Any) -> list[Any]:
    """Where the first batch starts: what a source has written down for itself, or None."""
    sources, found = query.sources(), list[Any]()
    for at in range(sources.size()):
        try:
            found.append(_parsed(sources.apply(at).initialOffset().json()))
        except Exception:  # noqa: BLE001  a source of the older kind, which starts with all that it has
            found.append(None)
    return found


def _progress(query: Any, progress: Any) -> list[Any]:
    sources = query.sources()
    offsets = [progress.get(sources.apply(at)) for at in range(sources.size())]
    return [_parsed(one.get().json()) if one.isDefined() else None for one in offsets]


def offsets_of(batch_df: DataFrame, plan: BatchPlan | None, owner: str, before: Commit | None) -> str | None:
    """Where the batch ends in each source, as JSON: a list in the order of the plan. Never raises.

    An entry is the source's own offset. That of a file source says nothing outside its checkpoint, so it
    gets ``newest``, the latest modification time (in ms) of all files that were read up to here, and
    ``paths``, those of them that have exactly this time. ``before`` is the commit before this one, on
    which they build; ``owner`` the query that brings the batch.
    """
    if plan is None or plan.end.startswith("{"):  # of named sources nothing says which is which
        return None
    try:
        query, jvm = running_query(batch_df), batch_df.sparkSession.sparkContext._jvm
        entries = json.loads(plan.end)
        sources = None if query is None else query.sources()
        old = json.loads(before.offsets) if before is not None and before.offsets is not None else []
        same_log = before is not None and before.owner == owner
        for at, entry in enumerate(entries):
            if sources is None or sources.size() != len(entries):
                break
            if sources.apply(at).getClass().getSimpleName() == "FileStreamSource":
                known = old[at] if at < len(old) else None
                entries[at] = _with_files(jvm, sources.apply(at), entry, known, same_log=same_log)
        return json.dumps(entries, separators=(",", ":"))
    except Exception as error:  # noqa: BLE001  whatever another Spark raises, the batch counts
        _log.debug("the files that end at %s are not known: %s", plan.end, error)
        return plan.end


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _json(entries: Any) -> str:
    return json.dumps(entries, sort_keys=True, separators=(",", ":"))


def _with_files(jvm: Any, source: Any, entry: Any, old: Any, *, same_log: bool) -> Any:
    """A file source's entry with what can start another checkpoint.

    Builds on the entry of the last commit that knew: ``newest`` never goes down, also where a new owner's
    log begins with files that the state has counted long ago.
    """
    name = source.toString()
    known = old.get("before", old) if isinstance(old, dict) and old.get("source") == name else None
    try:
        start = known["logOffset"] + 1 if known is not None and same_log else None
        files = [] if start == entry["logOffset"] + 1 else _files(jvm, source, start, entry["logOffset"])
    except Exception as error:  # noqa: BLE001  reads what is private to Spark
        _log.debug("the files of %s are not known: %s", name, error)
        return {**entry, "source": name} | ({} if known is None else {"before": known})
    times = [time for _, time in files] + ([] if known is None else [known["newest"]])
    if not times:
        return {**entry, "source": name}
    newest = max(times)
    paths = {path for path, time in files if time == newest}
    if known is not None and known["newest"] == newest:
        paths.update(known["paths"])
    if len(paths) > _MOST_PATHS:
        return {**entry, "source": name} | ({} if known is None else {"before": known})
    return {**entry, "source": name, "newest": newest, "paths": sorted(paths)}


def _files(jvm: Any, source: Any, start: int | None, end: int) -> list[tuple[str, int]]:
    """Path and modification time of the files from log entry ``start`` to ``end``, from the source's own log."""
    field = source.getClass().getDeclaredField("metadataLog")
    field.setAccessible(True)
    log = field.get(source)
    found = []
    last = _option(jvm, end)
    for pair in log.get(last if start == end else _option(jvm, start), last):
        out = java_class(jvm, "java.io.ByteArrayOutputStream")()
        log.serialize(pair._2(), out)  # all of them in one call to the JVM
        entries = map(json.loads, out.toString("UTF-8").splitlines()[1:])
        found += [(NO_HOST.sub(r"\1/", entry["path"]), entry["timestamp"]) for entry in entries]
    return found


def _option(jvm: Any, number: int | None) -> Any:
    """A Scala Option of a Long; a Long by itself would come back as a Python int."""
    longs = java_class(jvm, "java.util.stream.LongStream")
    boxed = (longs.empty() if number is None else longs.of(number)).boxed().findFirst()
    return java_class(jvm, "scala.jdk.javaapi.OptionConverters").toScala(boxed)
