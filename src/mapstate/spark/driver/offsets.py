"""What Spark planned for a batch, and how far a committed batch has read its sources.

The plan is read on the driver before a batch begins, from the running query's own offset log: it tells a replay from a
batch that was planned anew. The offsets are kept with the commit, so that a new checkpoint can start there. Where the
function is called by hand there is neither.
"""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any

from mapstate.protocol.ledger_record import Commit
from mapstate.protocol.plans import BatchPlan
from mapstate.spark.driver.access import access_of
from mapstate.spark.driver.access_interface import QueryRun

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = ["PlannedBatches", "offsets_of", "plan_of"]

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
    access = access_of(batch_df)
    if not access.serves(batch_id):
        return None
    try:
        planned_at, end = _logged(access.logged(batch_id))
        if before is not None:
            return BatchPlan(before.end, _json(end), planned_at, before.planned_at)
        if batch_id == 0:
            return BatchPlan(_json(map(_parsed, access.initial(len(end)))), _json(end), planned_at)
        previous_planned_at, start = _logged(access.logged(batch_id - 1))
        return BatchPlan(_json(start), _json(end), planned_at, previous_planned_at)
    except Exception as error:  # noqa: BLE001  whatever another Spark raises
        _log.debug("the entry of batch %d in the offset log cannot be read: %s", batch_id, error)
    try:
        start, now = access.progress()
        return BatchPlan(_json(map(_parsed, start)), _json(map(_parsed, now)))
    except Exception as error:  # noqa: BLE001  the same
        _log.warning(
            "the source offsets of batch %d are not known, so a batch that Spark plans anew, from an older checkpoint, "
            "would be taken for a replay: %s",
            *(batch_id, error),
        )
        return None


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
        old = json.loads(before.offsets) if before is not None and before.offsets is not None else []
        same_log = before is not None and before.owner == owner
        entries = access_of(batch_df).with_files(json.loads(plan.end), old, same_log=same_log)
        return json.dumps(entries, separators=(",", ":"))
    except Exception as error:  # noqa: BLE001  whatever another Spark raises, the batch counts
        _log.debug("the files that end at %s are not known: %s", plan.end, error)
        return plan.end


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
        lines = [named[str(at)] for at in range(len(named))]
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
