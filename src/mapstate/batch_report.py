"""Counts and times of a batch: one small report per commit, which no rule of the protocol uses."""

from __future__ import annotations

import msgspec

MOST_REPORTS = 100
"""The number of a state's last reports that its store keeps."""


class BatchReport(msgspec.Struct, frozen=True, kw_only=True):
    """One committed batch, as its driver saw it.

    ``attempt``       the number of the committed attempt in this foreachBatch call, from 1 up
    ``rows``          rows that arrived, also those that are late or between two windows
    ``keys_read``     keys read from the store
    ``keys_cached``   0: workers have no caches any more
    ``keys_written``  keys written
    ``keys_skipped``  keys that an earlier attempt at the same transactional batch had written
    ``milliseconds``  from the begin of the foreachBatch call to the commit
    ``at``            the time of the commit, ISO 8601 in UTC
    ``partitions``    the number of partitions whose tasks have reported
    ``offsets_passed``  in all partitions of all sources, None for sources that have no numbers by partition
    ``rows_sent``     rows sent to this state, None if nobody has counted them
    ``rows_late``     of a state with windows: rows whose first window had fired before, or without a usable time
    ``rows_between``  of a state with windows: rows between two windows
    ``partial_aggregation``  False if Spark aggregated the rows behind the shuffle alone, see the option of this name
    ``watermark``     of a state with windows, after the batch: microseconds since 1970, or in the column's own units
    """

    batch_id: int
    txid: int
    attempt: int
    rows: int
    keys_read: int
    keys_cached: int
    keys_written: int
    keys_skipped: int
    milliseconds: int
    at: str
    partitions: int = 0
    rows_sent: int | None = None
    rows_late: int = 0
    rows_between: int = 0
    watermark: int | None = None
    offsets_passed: int | None = None
    partial_aggregation: bool = True


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """Where a batch's time went on the driver: an ``attempt``, or the ``commit`` at the end of one.

    ``began``, ``ended``  in nanoseconds since 1970, by the driver's clock
    ``error``             the class of what it raised, None where it succeeded
    """

    name: str
    began: int
    ended: int
    error: str | None = None


class FinishedBatch(msgspec.Struct, frozen=True, kw_only=True):
    """One batch that is committed in all states of a topology's stream.

    ``states``       the report of each state, by its name. A repeated batch has the ledger's counts, without states in
                     which another query has committed since
    ``quarantined``  where the rows are, if the batch failed each time and counts as an empty one. A repeated batch has
                     it only while the rows still exist
    ``repeated``     an earlier run has committed the batch, and may have called the callback already
    ``spans``        attempts and commits, in the order of their ends; those of a repeated batch are not known
    """

    batch_id: int
    states: dict[str, BatchReport]
    quarantined: str | None = None
    repeated: bool = False
    spans: tuple[Span, ...] = ()
