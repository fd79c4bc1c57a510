"""States that follow the new values of another state: both have to hold the same batches."""

from __future__ import annotations

from collections.abc import Iterable

from mapstate.backends import opened
from mapstate.errors import StateSchemaError
from mapstate.protocol.following import check_follower
from mapstate.protocol.ledger import Ledger
from mapstate.protocol.ledger_record import LedgerRecord
from mapstate.protocol.plans import BatchPlan
from mapstate.spark.driver.job import Branch, Downstream, Follower
from mapstate.spec import StateSpec


def check_followers(
    branch: Branch, functions: Iterable[Downstream | Follower], query_id: str, batch_id: int, plan: BatchPlan | None
) -> None:
    """`check_follower` of a state and all that follow it, directly or after another one, before anything is written.

    Raises MissingBatchesError and ReplannedBatchError, not for a state whose ``on_gap`` is "accept".
    """
    for function in functions:
        follower = function.branch if isinstance(function, Follower) else None
        if follower is None:
            continue
        if isinstance(function, Follower) and function.retracts:
            _check_fields(follower, ledger_of(follower.job.spec), query_id)
        specs, its_plan = [branch.job.spec, follower.job.spec], plan
        if all(spec.on_gap != "accept" for spec in specs):
            ledgers = [ledger_of(spec) for spec in specs]
            its_plan = check_follower(ledgers, query_id, [spec.on_new_owner for spec in specs], batch_id, plan)
        check_followers(follower, follower.downstream, query_id, batch_id, its_plan)


def _check_fields(follower: Branch, ledger: LedgerRecord | None, query_id: str) -> None:
    """Raises StateSchemaError for a field that is new: it would lack all that the first state holds already."""
    if ledger is None or ledger.last_commit is None:
        return
    known = {field.name for field in ledger.fields}
    added = ", ".join(field.name for field in follower.job.fields if field.name not in known)
    is_reset = ledger.owner != query_id and follower.job.spec.on_new_owner == "reset"
    if added and not is_reset:
        raise StateSchemaError(
            f"state {ledger.state!r} follows the new values of another state and has batches already, so {added} would "
            "lack all that the first state holds. Nothing was written. Begin a second state of another name, over a "
            "first state that begins anew, too.",
            state=ledger.state,
            found=", ".join(sorted(known)),
            expected=added,
        )


def ledger_of(spec: StateSpec) -> LedgerRecord | None:
    """The ledger in the state's store, None where there is none yet."""
    with opened(spec.backend, spec.state) as store:
        return Ledger(store, spec.state).load()
