"""What a batch came to: counts and times, one small report per commit.

Reports are kept beside the ledger and are no part of the protocol: nothing is decided by them, and a batch
whose report could not be kept counts all the same.
"""

from __future__ import annotations

from typing import Any

import msgspec

from mapstate.capabilities import Reports
from mapstate.errors import CorruptRecordError, cut
from mapstate.protocol.ledger_record import Commit, is_time

__all__ = ["MOST_REPORTS", "BatchReport", "FinishedBatch", "encode_report", "read_reports"]

MOST_REPORTS = 100
"""How many of a state's reports its store keeps: the last ones."""


class BatchReport(msgspec.Struct, frozen=True, kw_only=True):
    """One committed batch, as its driver saw it.

    ``attempt``       which attempt of this foreachBatch call was committed, from 1 up
    ``keys_read``     keys that were asked of the store; ``keys_cached`` were known to the workers
    ``keys_written``  keys that were put; ``keys_skipped`` were in already, of an earlier attempt at a
                      transactional batch
    ``rows``          that arrived and are in; ``rows_sent`` to this state, None where nobody has counted them
    ``partitions``    whose tasks have reported
    ``milliseconds``  from the begin of the foreachBatch call to the commit
    ``at``            the commit's time, ISO 8601 in UTC
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

    @classmethod
    def of_commit(cls, commit: Commit) -> BatchReport:
        """What is left of a batch that an earlier run has committed: ``attempt`` 0, and no times."""
        return cls(
            batch_id=commit.batch_id,
            txid=commit.txid,
            attempt=0,
            rows=commit.rows,
            keys_read=0,
            keys_cached=0,
            keys_written=commit.keys,
            keys_skipped=0,
            milliseconds=0,
            at=commit.at,
        )


class FinishedBatch(msgspec.Struct, frozen=True, kw_only=True):
    """One batch that is committed in all states of a topology's stream.

    ``states``       by the state's name. Of a repeated batch what its ledger says, and nothing of a state in which
                     another query has committed since
    ``quarantined``  where its rows are, if it failed each time and counts as an empty one; of a repeated batch, if they
                     are still there
    ``repeated``     an earlier run has committed it, and may or may not have told so
    """

    batch_id: int
    states: dict[str, BatchReport]
    quarantined: str | None = None
    repeated: bool = False


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(BatchReport)


def encode_report(report: BatchReport) -> bytes:
    """The report as a store keeps it: JSON."""
    return _encoder.encode(report)


def read_reports(store: Any, state: str) -> list[BatchReport]:
    """The reports that a store has kept, newest first; none where it keeps none. Readers and tools.

    Raises CorruptRecordError for what no mapstate wrote, and StoreError.
    """
    if not isinstance(store, Reports):
        return []
    try:
        reports = [_decoder.decode(one) for one in store.reports()]
        _check_times(reports)
    except (msgspec.MsgspecError, ValueError, TypeError, RecursionError) as error:
        raise CorruptRecordError(
            f"a batch report of state {state!r} cannot be read ({cut(error)}): something else wrote there. The state "
            "itself is not touched by that; the reports may be deleted.",
            state=state,
        ) from error
    return reports


def _check_times(reports: list[BatchReport]) -> None:
    if not all(is_time(one.at) for one in reports):
        raise ValueError("a time is not ISO 8601 with an offset")
