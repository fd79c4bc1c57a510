"""What Spark planned for a batch, and how far a committed batch has read its sources.

The plan is read on the driver before a batch begins, from the query's own offset log: it tells a replay from a batch
that was planned anew. The offsets are kept with the commit, so that a new checkpoint can start there. Where the
function is called by hand there is neither.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from mapstate.protocol.ledger_record import BatchPlan, Commit, by_partition
from mapstate.spark.driver.access import Access
from mapstate.spark.driver.query_run import QueryRun, SourceLog

NO_HOST = re.compile("^([A-Za-z0-9+.-]+:)///")  # the log has file:///x where _metadata.file_path has file:/x
_STORE = re.compile(r"\[[A-Za-z0-9+.-]+:(//[^/]*)?/")  # in a source's name
_MOST_PATHS = 200  # every reader reads the ledger, so it stays small
_log = logging.getLogger("mapstate")


class PlannedBatches:
    """What Spark has planned for the batches of a query, one after the other, asked once for each. Driver."""

    def __init__(self) -> None:
        self._known: tuple[QueryRun, int] | None = None
        self._offset_log: str | None = None
        self._sources: list[SourceLog | None] | None = None
        self.plan: BatchPlan | None = None

    def next(self, access: Access, batch_id: int, run: QueryRun, upstream_txid: int | None = None) -> BatchPlan | None:
        """The plan of the batch that comes; it is ``plan`` from here on.

        None where the function is called by hand. What Spark does not tell is logged as a warning, and then the batch
        cannot be told from a replay; `mapstate doctor` says so.
        """
        if run.run_id is None:
            self._known = self.plan = None
        elif self._known != (run, batch_id):
            if self._known is None or self._known[0] != run:
                self._offset_log = self._sources = None
            before = self.plan if self._known == (run, batch_id - 1) else None
            self._known, self.plan = (run, batch_id), self._plan_of(access, batch_id, before)
            if before is None and self.plan is not None:
                with suppress(Exception):  # whatever another Spark raises; an adoption is refused then
                    self.plan = self.plan._replace(filters=access.filters())
        if self.plan is not None:
            self.plan = self.plan._replace(upstream_txid=upstream_txid)
        return self.plan

    def offsets(self, access: Access, owner: str, before: Commit | None) -> str | None:
        """Where the batch ends in each source, as JSON: a list in the order of the plan. Never raises.

        An entry is the source's own offset. That of a file source says nothing outside its checkpoint, so it
        gets ``newest``, the latest modification time (in ms) of all files that were read up to here, and
        ``paths``, those of them that have exactly this time. ``before`` is the commit before this one, on
        which they build; ``owner`` the query that brings the batch.
        """
        if self.plan is None or self.plan.end.startswith("{"):  # of named sources nothing says which is which
            return None
        try:
            entries, old = json.loads(self.plan.end), json.loads((before and before.offsets) or "[]")
            same_log = before is not None and before.owner == owner
            for i, source in enumerate(self._sources_of(access, entries)):
                known = known_files(old, i, source, same_log=same_log)
                entries[i] = with_files(entries[i], source, known, access.text)
            return json.dumps(entries, separators=(",", ":"))
        except Exception as error:  # noqa: BLE001  whatever another Spark raises, the batch counts
            _log.debug("the files that end at %s are not known: %s", self.plan.end, error)
            return self.plan.end

    def _sources_of(self, access: Access, entries: list[Any]) -> list[SourceLog | None]:
        """The file sources of these offsets, asked once in a run."""
        if self._sources is None:
            try:
                self._sources = access.file_sources()
            except Exception as error:  # noqa: BLE001  it asks for what is private to Spark
                _log.debug("the file sources are not known: %s", error)
            if self._sources is None or len(self._sources) != len(entries):
                self._sources = [None] * len(entries)
            if any(_is_of_files(entry) and not log for entry, log in zip(entries, self._sources, strict=True)):
                _log.warning("a file source's log was not found: files_not_counted refuses if the checkpoint is lost")
        return self._sources

    def _plan_of(self, access: Access, batch_id: int, before: BatchPlan | None) -> BatchPlan | None:
        """What Spark planned for a batch. ``before`` is the plan of the one before it, if this run had that one."""
        try:
            log = self._offset_log = self._offset_log or f"{access.checkpoint()}/offsets"
            planned_at, end = _logged(access.text(f"{log}/{batch_id}"))
            if before is not None:
                return BatchPlan(before.end, _json(end), planned_at, before.planned_at)
            if batch_id == 0:
                return BatchPlan(_json(map(_parsed, access.initial(len(end)))), _json(end), planned_at)
            previous_planned_at, start = _logged(access.text(f"{log}/{batch_id - 1}"))
            return BatchPlan(_json(start), _json(end), planned_at, previous_planned_at)
        except Exception as error:  # noqa: BLE001  whatever another Spark raises
            _log.debug("the entry of batch %d in the offset log cannot be read: %s", batch_id, error)
        try:
            start, now = access.progress()
            return BatchPlan(_json(map(_parsed, start)), _json(map(_parsed, now)))
        except Exception as error:  # noqa: BLE001  the same
            _log.warning(
                "the source offsets of batch %d are not known, so a batch that Spark plans anew, from an older "
                "checkpoint, would be taken for a replay: %s",
                *(batch_id, error),
            )
            return None


def offsets_passed(plan: BatchPlan | None) -> int | None:
    """How many offsets a batch passes in all of its sources; None where they are no numbers by partition."""
    if plan is None:
        return None
    starts, ends = json.loads(plan.start), json.loads(plan.end)
    passed = 0
    for first, last in zip(starts, ends, strict=False):
        start, end = by_partition(first), by_partition(last)
        if start is None or end is None or not end.keys() <= start.keys():  # where a new partition starts is not known
            return None
        passed += sum(end[at] - start[at] for at in end)
    return passed if len(starts) == len(ends) else None


def _logged(text: str) -> tuple[int, Any]:
    """When a batch was planned, and where it ends in each source, by an entry of the offset log. Two forms are known.

    A list in the order of the plan; by name, where the user has named the sources. Raises ValueError for other forms.
    """
    version, metadata, *lines = text.splitlines()
    planned_at = json.loads(metadata)["batchTimestampMs"]
    if version == "v2":  # with the name of each source; it is its place unless the user has named it
        named = dict(line.partition(":")[::2] for line in lines)
        if set(named) != set(map(str, range(len(named)))):
            return planned_at, {name: _parsed(line) for name, line in named.items()}
        lines = [named[str(i)] for i in range(len(named))]
    elif version != "v1":
        raise ValueError(f"an offset log of form {version}")
    return planned_at, list(map(_parsed, lines))


def _parsed(text: str | None) -> Any:
    """An offset as Spark writes it: JSON, other text, or a dash for none."""
    try:
        return None if text in (None, "-") else json.loads(text)
    except ValueError:
        return text


def _json(entries: Any) -> str:
    return json.dumps(entries if isinstance(entries, dict) else list(entries), sort_keys=True, separators=(",", ":"))


def known_files(old: list[Any], at: int, source: SourceLog | None, *, same_log: bool) -> dict[str, Any]:
    """What the entries of the commit before this one know of the files of a source, or nothing.

    Found by its name, which another place may have had; where nobody can tell the name, by its place ``at``.
    """
    for entry in old[at : at + 1] + (old if source is not None else []):
        known = entry.get("before", entry) if isinstance(entry, dict) else {}
        if "newest" in known and (source is None or _is_same(known["source"], source.name)):
            if same_log and known.get("logOffset", -1) <= entry.get("logOffset", -1):
                return dict(known)
            # A number of another log means nothing, now and for all commits that follow.
            return {name: value for name, value in known.items() if name != "logOffset"}
    return {}


def with_files(entry: Any, source: SourceLog | None, known: dict[str, Any], text: Callable[[str], str]) -> Any:
    """A source's offset; that of files with what can start another checkpoint. ``text`` reads the log.

    Builds on what the last commit has ``known``: ``newest`` never goes down, also where a new owner's log begins with
    files that the state has counted long ago.
    """
    if source is None:
        return {**entry, "source": known["source"], "before": known} if known and _is_of_files(entry) else entry
    if entry is None:  # this query has read nothing of it so far
        return known or None
    entry = {**entry, "source": source.name}
    unknown = entry | ({"before": known} if known else {})
    try:
        files = _files(text, source, known.get("logOffset", -1) + 1, entry["logOffset"])
    except Exception as error:  # noqa: BLE001  a form that another Spark writes, or a store that fails
        _log.debug("the files of %s are not known: %s", source.name, error)
        return unknown
    files += [(path, known["newest"]) for path in known.get("paths", ())]
    newest = max((time for _, time in files), default=0)
    paths = {path for path, time in files if time == newest}
    return entry | {"newest": newest, "paths": sorted(paths)} if 0 < len(paths) <= _MOST_PATHS else unknown


def _files(text: Callable[[str], str], source: SourceLog, start: int, end: int) -> list[tuple[str, int]]:
    """Path and modification time of the files from entry ``start`` to ``end`` of a source's own log.

    Every so often an entry holds all before it, too, in their order, and is called ``.compact``.
    """
    files = []
    while end >= start:
        try:
            lines, end = text(f"{source.place}/{end}"), end - 1
        except Exception:  # noqa: BLE001  Python's, or one of many of Spark's
            lines, end = text(f"{source.place}/{end}.compact"), -1
        end_of_line = len(lines.rstrip())
        while (start_of_line := lines.rfind("\n", 0, end_of_line)) > 0:  # of a large log only the end is looked at
            file, end_of_line = json.loads(lines[start_of_line:end_of_line]), start_of_line
            if file["batchId"] < start:
                break
            files.append((NO_HOST.sub(r"\1/", file["path"]), file["timestamp"]))
    return files


def _is_of_files(entry: Any) -> bool:
    return isinstance(entry, dict) and set(entry) == {"logOffset"}


def _is_same(offset: str, other: str) -> bool:
    """Whether two names are of one source; Spark Connect has a path as it was given, mostly without its store."""
    paths = [_STORE.sub("[/", name) for name in (offset, other)]
    return offset == other or (paths[0] == paths[1] and (offset in paths or other in paths))
