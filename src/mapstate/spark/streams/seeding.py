"""A seed: Spark is asked for batch 0 alone, and the driver of the batches stages and loads it."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from mapstate.errors import ConfigurationError, UsageError, check_range
from mapstate.maps.operator_list import ListEntry
from mapstate.operations.forget import listed
from mapstate.protocol.ledger_record import LedgerRecord
from mapstate.protocol.seeding import check_together
from mapstate.reader.aliased import version_of as version_read
from mapstate.spark.driver.access import access_of
from mapstate.spark.driver.repeats import ledger_of
from mapstate.spark.driver.seed_stage import SeedSettings, delete
from mapstate.spark.driver.seeding import SeedReport, check_seed
from mapstate.spark.streams.starting import start_query


def seed_query(
    query: Any,
    checkpoint: str,
    *,
    dry_run: bool,
    buckets: int | None,
    options: Mapping[str, str],
    version_of: str | Mapping[str, str | None] | None,
    positions: Sequence[str] | None,
    state: str | None,
) -> SeedReport:
    """See `Startable.seed`, which imports this file only now. ``state`` has the report; None: the first one."""
    if buckets is not None:
        check_range("buckets", buckets, 1, 100_000)
    if not checkpoint:
        raise UsageError("seed needs the checkpointLocation of the query that goes on after it. Nothing was started.")
    check_seed(query.plan, query.df)
    specs = [branch.job.spec for branch in query.plan.branches]
    entries = {} if version_of is None else _entries(specs, version_of)
    if positions is not None and len(positions) != 3:
        raise ConfigurationError(f"positions are the columns of topic, partition and offset, not {positions!r}")
    places: Any = None if positions is None else tuple(positions)
    if not dry_run and _has_batch(query.df, str(checkpoint), specs):
        return _together(_reports(specs), state)
    place = f"{checkpoint}-dry-run-{secrets.token_hex(4)}" if dry_run else str(checkpoint)
    reports: list[SeedReport] = []
    declared, query.plan.seed = query.plan.seed, SeedSettings(buckets, reports if dry_run else None, entries, places)
    try:
        # once: all that is there now is one batch, whatever bound the source has
        started = start_query(query, place, options, trigger={"once": True}, name=None, mode="append")
        try:
            started.awaitTermination()
        except BaseException as error:
            started.stop()
            if isinstance(error, Exception) and query.last_error is not None:
                raise query.last_error from error
            raise
    finally:
        query.plan.seed = declared
        if dry_run:
            delete(query.df, place)
    if not dry_run:
        return _together(_reports(specs), state)
    return _together(reports or [SeedReport(spec.state, 0, 0, None, is_dry_run=True) for spec in specs], state)


def _together(reports: Sequence[SeedReport], state: str | None) -> SeedReport:
    """The report of a state, with those of the other ones."""
    mine = next(report for report in reports if state in (report.state, None))
    return mine._replace(beside=tuple(report for report in reports if report is not mine))


def _has_batch(df: Any, checkpoint: str, specs: Sequence[Any]) -> bool:
    """Whether the query has ended its batch 0. False where a state is another query's, as its start says."""
    with suppress(Exception):  # there is none yet
        access_of(df).text(f"{checkpoint}/commits/0")
        query_id = json.loads(access_of(df).text(f"{checkpoint}/metadata"))["id"]
        return all(ledger is None or ledger.owner == query_id for ledger in map(ledger_of, specs))
    return False


def _reports(specs: Sequence[Any]) -> list[SeedReport]:
    """What each state was seeded with. Raises UsageError where one was not, or by another reading than the others."""
    ledgers = [ledger_of(spec) for spec in specs]
    reports = [_report_of(spec, ledger) for spec, ledger in zip(specs, ledgers, strict=True)]
    check_together([ledger for ledger in ledgers if ledger is not None])
    return reports


def _report_of(spec: Any, ledger: LedgerRecord | None) -> SeedReport:
    last = None if ledger is None else ledger.last_commit
    if ledger is not None and ledger.seed is not None:
        raise UsageError(
            f"state {spec.state!r} is being seeded, {ledger.seed.progress}, and batch 0 of this checkpoint has ended "
            "without it: for a while the job did not have this state. Nothing was written. Remove it, mapstate drop, "
            "and run it once with on_gap='accept': it counts from the next batch on. Or seed all states of the stream, "
            "with a new checkpoint and on_new_owner='reset'. See docs/life.md#seed",
            state=spec.state,
        )
    if last is None or not last.seeded:
        raise UsageError(
            f"state {spec.state!r} counts batches after its first one, or its source is empty, or it has no batch of "
            "this checkpoint: there is nothing to seed. Nothing was written. Start the query."
        )
    return SeedReport(spec.state, last.rows, last.keys_held, None).with_left_out(last.forgotten, last.windows)


def _entries(specs: Sequence[Any], version_of: str | Mapping[str, str | None]) -> dict[str, list[ListEntry]]:
    """By state what the version has forgotten that it is built for. Raises ConfigurationError, and as `_listed`."""
    states = [spec.state for spec in specs]
    if isinstance(version_of, str) and len(states) == 1:
        version_of = {states[0]: version_of}
    if isinstance(version_of, str) or {*version_of} != {*states}:
        raise ConfigurationError(
            f"version_of names the version that each of {', '.join(states)} is built for, or None: they are seeded "
            f"together, and {version_of!r} does not. Nothing was written. Give it as {{{states[0]!r}: 'NAME', ...}}. "
            "See docs/life.md#seed"
        )
    return {spec.state: _listed(spec, name) for spec in specs if (name := version_of[spec.state]) is not None}


def _listed(spec: Any, name: str) -> list[ListEntry]:
    """What the version that readers of a name read has forgotten. Raises UsageError where it has not ended that."""
    version = version_read(spec.backend, name)
    entries = listed(spec.backend, version)
    if unfinished := [entry.id for entry in entries if entry.purged is None]:
        raise UsageError(
            f"state {version!r} has not ended to forget what it was asked under the id {unfinished[0]!r}. Nothing was "
            f"written. Run mapstate forget {version} again with this id, and then seed."
        )
    return entries
