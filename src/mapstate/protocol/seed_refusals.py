"""The errors of a state whose seed is not complete. See `mapstate.protocol.seeding`."""

from __future__ import annotations

from mapstate.errors import SeedingError, StateOwnershipError, UsageError
from mapstate.protocol.ledger_record import LedgerRecord


def being_seeded(ledger: LedgerRecord) -> SeedingError:
    """The error of a state whose seed is not complete."""
    seed, state = ledger.seed, ledger.state
    facts = {} if seed is None else {"done": seed.done, "buckets": seed.buckets}
    return SeedingError(
        f"state {state!r} is being seeded: {'' if seed is None else seed.progress}. It can be read, and its query goes "
        "on, from the end of the seed on. Nothing was written. If no driver is at work on it, call seed again with the "
        "same checkpoint: it goes on. See docs/life.md#seed",
        state=state,
        **facts,
    )


def seeded_by_another(ledger: LedgerRecord, asked_by: str) -> StateOwnershipError:
    """The error of a query that finds a state which another one seeds: it could adopt a part of the history alone."""
    seed = ledger.seed
    return StateOwnershipError(
        f"state {ledger.state!r} is being seeded by streaming query {ledger.owner}: {seed and seed.progress}. This is "
        f"query {asked_by}. Nothing was written. Seed it to its end with that query's checkpoint; or begin anew, "
        "without what is loaded, with on_new_owner='reset'. See docs/life.md#seed",
        state=ledger.state,
        owner=ledger.owner,
        asked_by=asked_by,
    )


def without_history(ledger: LedgerRecord) -> SeedingError:
    """The error of a job without the initial rows with which the seed has begun."""
    return SeedingError(
        f"state {ledger.state!r} is being seeded with initialRows, and this job has none: their history would be lost. "
        "Nothing was written. Call seed of the job that has them; or begin anew with a new checkpoint and "
        "on_new_owner='reset'. See docs/life.md#history-from-another-place",
        state=ledger.state,
    )


def without_list(ledger: LedgerRecord) -> SeedingError:
    """The error of a call without the list of forgotten keys with which the seed has begun."""
    return SeedingError(
        f"state {ledger.state!r} is being seeded without the rows of keys that another version has forgotten, and this "
        "call names no version, so that they would come back. Nothing was written. Call seed with the same version_of; "
        "or begin anew with a new checkpoint and on_new_owner='reset'. See docs/life.md#seed",
        state=ledger.state,
    )


def of_another_reading(
    first: str,
    other: str,
    why: str = "is of another reading of the history: for a while the job had only one of them.",
) -> UsageError:
    """The error of a state that does not fit one of the same topology whose seed has ended."""
    return UsageError(
        f"state {first!r} counts its seed already, and state {other!r}, of the same topology, {why} "
        "Nothing was written. Seed with the job and the checkpoint of before; then remove the other state, "
        "mapstate drop, and add it, once with on_gap='accept'. Or seed all of them, with a new checkpoint and "
        "on_new_owner='reset'. See docs/life.md#seed",
        state=other,
    )
