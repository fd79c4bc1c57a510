"""What follows the commit of a batch that brings nothing new: one that counts already, or that was set aside."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mapstate.aggregators.fields import Fields
from mapstate.errors import IncompleteBatchError
from mapstate.protocol.ledger_record import AlreadyCommitted, LedgerRecord
from mapstate.spark.driver.frames import through
from mapstate.spark.driver.job import Follower, StreamPlan
from mapstate.spark.driver.new_values import new_values_frame, new_values_type, read_back
from mapstate.spark.driver.state import StateDriver

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_log = logging.getLogger("mapstate")


def emit_nothing(
    plan: StreamPlan,
    states: Sequence[StateDriver],
    records: Sequence[LedgerRecord],
    df: DataFrame,
    batch_id: int,
    *,
    done: Sequence[AlreadyCommitted] = (),
) -> None:
    """A batch that was set aside is an empty one for the states that follow. Plain functions are not called.

    ``done`` is of one that comes again.
    """
    for state, known in zip(states, done, strict=False):
        state.committed_as = None if known.commit is None else known.commit.txid
    empty = df.sparkSession.createDataFrame([], df.schema)
    for state, record in zip(states, records, strict=True):
        fields = Fields(record.fields, state.job.aggregators)
        for function in state.branch.downstream:
            if isinstance(function, Follower) and function.branch is not None:
                keyed = state.keyed(through(state.branch.steps, empty, batch_id))
                schema = new_values_type(keyed, state.job.keys, fields, old=function.retracts)
                state.pass_on(function, new_values_frame(keyed, schema, []), batch_id)
        state.emit_fired(df, record, None, batch_id)
        for behind in plan.behind:
            is_state = isinstance(behind.function, Follower) and behind.function.branch is not None
            if behind.branch is state.branch and is_state:
                state.pass_on(behind.function, empty, batch_id)
    for behind in plan.behind:
        if behind.set_aside is not None:
            behind.set_aside(empty, batch_id)


def emit_again(state: StateDriver, df: DataFrame, record: LedgerRecord, done: AlreadyCommitted) -> None:
    """Emits the new values of a batch that counts already: a crash may have come before they were emitted.

    ``df`` has the rows of the batch. Raises IncompleteBatchError where a follower needs all of them and some are
    gone.
    """
    state.committed_as = None if done.commit is None else done.commit.txid
    _log.info("state %s: batch %d is committed already, nothing is written", state.spec.state, done.batch_id)
    if not state.branch.downstream:
        return
    if done.commit is None or state.spec.type == "non-transactional":
        _log.warning(
            "state %s: the new values of batch %d cannot be told from later ones any more; downstream gets none",
            *(state.spec.state, done.batch_id),
        )
    fields = Fields(record.fields, state.job.aggregators)
    frame = state.keyed(through(state.branch.steps, df, done.batch_id))
    new_values, missing = read_back(frame, state.spec, fields, record, done.commit, old=state.retracts)
    if done.commit is None or missing:
        _check_complete(state, done, missing)
    state.emit(new_values, done.batch_id)


def emit_fired_again(state: StateDriver, df: DataFrame, record: LedgerRecord, done: AlreadyCommitted) -> None:
    """Passes on the windows that a batch has fired that counts already. Raises IncompleteBatchError."""
    if done.commit is None and state.branch.fired:
        windows = f"the windows that batch {done.batch_id} fired {_FORGOTTEN}"
        if any(isinstance(function, Follower) and function.branch is not None for function in state.branch.fired):
            raise _incomplete(state, done, windows)
        _log.warning("state %s: %s", state.spec.state, windows)
    state.emit_fired(df, record, done.commit, done.batch_id)


_FORGOTTEN = "cannot be told from later ones any more: another query has committed since, or the state was reset"


def _check_complete(state: StateDriver, done: AlreadyCommitted, missing: int) -> None:
    lost = _FORGOTTEN
    if done.commit is not None:
        lost = (
            f"lack {missing} of {done.commit.keys} keys: their records have expired or were evicted, or the batch "
            "removed them and a vacuum came since, or a later attempt wrote them"
        )
    if state.retracts:
        raise _incomplete(state, done, f"the new values of batch {done.batch_id}, which is committed already, {lost}")
    if done.commit is not None:
        _log.warning("state %s: the new values of batch %d %s", state.spec.state, done.batch_id, lost)


def _incomplete(state: StateDriver, done: AlreadyCommitted, lost: str) -> IncompleteBatchError:
    return IncompleteBatchError(
        f"state {state.spec.state!r}: {lost}. A state that follows this one would be wrong without them; it got "
        "nothing. Restore both stores and the checkpoint from one moment, or begin both states anew under other names.",
        state=state.spec.state,
        batch_id=done.batch_id,
    )
