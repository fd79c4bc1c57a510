"""The rules of a seed, in the ledger: its buckets, its end, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from one_ledger import OneLedger
from openings import opening
from seeded import DONE, PLAN, Seed
from states import N
from typer.testing import CliRunner

from mapstate import RollingWindows
from mapstate.backends import resolve
from mapstate.cli.commands import app
from mapstate.errors import (
    CorruptLedgerError,
    CorruptStoreError,
    FencedError,
    IncompleteBatchError,
    MissingBatchesError,
    ReplannedBatchError,
    RollbackError,
    SeedingError,
    StateOwnershipError,
    UsageError,
)
from mapstate.protocol import cuts, seeding, upkeep
from mapstate.protocol.ledger import Ledger
from mapstate.protocol.ledger_record import (
    FORMAT,
    FORMAT_WITH_ROLLING,
    FORMAT_WITH_SEED,
    AlreadyCommitted,
    BatchPlan,
    Commit,
    encode_ledger,
)
from mapstate.protocol.ledgers import Ledgers, change_all
from mapstate.protocol.opening import open_ledger
from mapstate.protocol.seed_ledgers import SeedLedgers
from mapstate.protocol.stored_ledger import decode_ledger
from mapstate.protocol.transitions import begin
from mapstate.protocol.ways_back import can_all_roll_back, take_back
from mapstate.protocol.windows import Input, WindowCommit
from mapstate.testing import Fail, FaultyBackend

LATER = BatchPlan("[9]", "[12]", 2, 1)


@pytest.fixture
def url(tmp_path: Any) -> str:
    return f"memory://{tmp_path.name}"


def test_a_seed_counts_as_batch_0_with_the_sums_of_its_buckets(url):
    seed = Seed(url)
    assert seed.record.format == FORMAT_WITH_SEED
    seed.staged()
    first, second = seed.bucket(a=1, b=2), seed.bucket(c=3)
    assert seed.record.seed.progress == "2 of 2 buckets"
    ledger = seed.end()
    last = ledger.last_commit
    assert (last.batch_id, last.txid, last.rows, last.keys, last.keys_held, last.seeded) == (0, second, 20, 3, 3, True)
    assert (last.owner, last.offsets, last.plan) == ("q", "[9]", PLAN.digest())
    assert (ledger.seed, ledger.format, ledger.owners, ledger.keys_held()) == (None, FORMAT, {"q": 1}, 3)
    assert first in ledger.view()
    assert decode_ledger(encode_ledger(ledger), "visits") == ledger
    _, attempt = begin(ledger, ledger.session, 1, plan=LATER)
    assert attempt.txid == second + 2  # one that nobody uses: no version of mapstate rolls a seed back


def test_a_crash_costs_one_attempt_and_a_lost_reply_nothing(url):
    seed = Seed(url)
    seed.staged()
    first = seed.bucket()
    lost = seed.ledgers.begin_bucket(0)
    again = Seed(url)
    assert again.record.seed == seed.record.seed
    with pytest.raises(FencedError):
        seed.ledgers.commit_bucket(0, lost.txid, rows=10, keys=3, keys_delta=3)
    with pytest.raises(FencedError):
        seed.ledgers.end(PLAN, [DONE])
    second = again.bucket()
    again.ledgers.commit_bucket(0, second, rows=10, keys=3, keys_delta=3)
    ledger = again.end()
    assert again.end() == ledger
    assert [txid in ledger.view() for txid in (first, lost.txid, second)] == [True, False, True]
    assert ledger.dead == ((lost.txid, lost.txid),)


def test_a_transactional_bucket_is_repeated_under_its_txid_and_another_stage_is_not(url):
    seed = Seed(url, type="transactional")
    seed.staged()
    lost = seed.ledgers.begin_bucket(0)
    again = Seed(url, type="transactional")
    assert again.ledgers.begin_bucket(0).txid == lost.txid
    again.staged("b")
    assert again.ledgers.begin_bucket(0).txid == lost.txid + 1 == again.record.floor


@pytest.mark.parametrize("how", ["stage", "plan"])
def test_another_stage_or_plan_begins_anew_and_nothing_of_before_counts(url, how):
    seed = Seed(url)
    seed.staged()
    first = seed.bucket()
    again = Seed(url, "p" if how == "stage" else "other")
    again.staged("b", rows=10, buckets=1)
    assert (again.record.seed.done, again.record.seed.rows, again.record.last_txid) == (0, 0, None)
    second = again.bucket(a=1)
    ledger = again.end()
    assert ledger.last_commit.keys_held == 1
    assert ledger.floor == second > first


def test_a_stage_that_is_named_twice_after_a_lost_reply_is_the_same(url):
    seed = Seed(url)
    seed.staged()
    before = seed.record
    seed.staged()
    assert seed.record == before


def test_the_stage_says_how_far_the_rows_have_come_and_the_end_commits_it(url):
    windows = RollingWindows.of((10, 1), (40, 5)).definition("bigint", startTime=0, lag=2, retention=3, idle=None)
    done = WindowCommit(watermark=100, inputs={"": Input(102, 1)}, newest=102, late=1)
    seed = Seed(url, rolling=windows)
    seed.staged(rows=10, buckets=1, windows=done)
    assert seed.record.rolling.horizon == 97
    again = Seed(url, rolling=windows)
    assert again.record.seed.windows == done
    assert decode_ledger(encode_ledger(again.record), "visits") == again.record
    earlier = msgspec.structs.replace(done, watermark=90, newest=92)
    again.staged("b", rows=10, buckets=1, windows=earlier)
    assert again.record.rolling.horizon == 87
    again.bucket(a=1)
    ledger = again.end()
    assert ledger.last_commit.windows == earlier
    assert ledger.format == FORMAT_WITH_ROLLING
    after, _ = begin(ledger, ledger.session, 1, plan=LATER)
    assert after.rolling.horizon == 87


def test_an_unknown_number_of_keys_stays_unknown(url):
    seed = Seed(url)
    seed.staged()
    seed.bucket(delta=None)
    seed.bucket()
    assert seed.end().keys_held() is None


def test_a_failed_first_batch_is_hidden(url):
    ledgers = SeedLedgers([resolve(url).open("visits")], [opening(type="transactional", fields=(N,))], ["refuse"])
    ledgers.open()
    (attempt,) = ledgers.begin(0, PLAN)
    seed = Seed(url, type="transactional")
    seed.staged(rows=10, buckets=1)
    assert seed.bucket() > attempt.txid
    assert seed.end().floor > attempt.txid


@pytest.mark.parametrize(("rows", "buckets"), [(20, 1), (10, 2)])
def test_a_seed_ends_only_with_all_of_its_rows(url, rows, buckets):
    seed = Seed(url)
    seed.staged(rows=rows, buckets=buckets)
    seed.bucket()
    with pytest.raises(IncompleteBatchError, match=f"{rows} rows of the history were staged, and 10 are loaded"):
        seed.end()


def test_only_an_empty_state_is_seeded(url):
    seed = Seed(url)
    seed.staged(rows=10, buckets=1)
    seed.bucket()
    ledger = seed.end()
    assert Seed(url).record.last_commit == ledger.last_commit  # of a topology, whose other states go on
    seed = Seed(url)
    seed.ledgers.begin(1, LATER)
    seed.ledgers.commit([Commit(batch_id=1, txid=seed.record.in_flight.txid, owner="q")])
    with pytest.raises(UsageError, match="a seed fills a state that holds nothing"):
        Seed(url)


def test_a_call_without_the_list_of_the_seed_is_refused(url):
    Seed(url, "with a list", listed=2)
    with pytest.raises(SeedingError, match="names no version"):
        Seed(url)
    seed = Seed(url, "with another list", listed=3)
    seed.staged(rows=10, buckets=1, forgotten=4)
    assert seed.record.operations is None  # nobody has written it yet
    seed.bucket()
    assert seed.record.operations == 3
    assert Seed(url, "with a third one", listed=1).record.operations is None
    seed = Seed(url, "with a third one", listed=1)
    seed.staged(rows=10, buckets=1, forgotten=4)
    seed.bucket()
    ledger = seed.end()
    assert (ledger.operations, ledger.format, ledger.last_commit.forgotten) == (1, FORMAT_WITH_SEED, 4)
    assert decode_ledger(encode_ledger(ledger), "visits") == ledger


def test_a_job_without_the_initial_rows_of_the_seed_is_refused(url):
    seed = Seed(url, "with a history", initial=True)
    with pytest.raises(SeedingError, match="this job has none"):
        Seed(url)
    seed = Seed(url, "with a history", initial=True)
    seed.staged(rows=10, buckets=1)
    with pytest.raises(SeedingError, match="this job has none"):
        Seed(url, "of the stream alone")
    seed = Seed(url, "with another history", initial=True)
    assert (seed.record.seed.stage, seed.record.seed.initial) == (None, True)


def test_nobody_else_counts_on_a_seed_that_is_not_complete(url):
    seed = Seed(url)
    with pytest.raises(MissingBatchesError, match="has still to get batch 0"):
        begin(seed.record, seed.record.session, 3, plan=LATER)
    seed.staged()
    seed.bucket()
    ledger = seed.record
    with pytest.raises(SeedingError, match="1 of 2 buckets"):
        begin(ledger, ledger.session, 0, plan=PLAN)
    with pytest.raises(MissingBatchesError, match="has still to get batch 0"):
        begin(ledger, ledger.session, 3, plan=LATER)
    for policy in ("refuse", "adopt", "adopt_unchecked"):
        with pytest.raises(StateOwnershipError, match="seeded by streaming query q: 1 of 2 buckets"):
            open_ledger(ledger, opening(owner="other", on_new_owner=policy, fields=(N,)))
    reset = open_ledger(ledger, opening(owner="other", on_new_owner="reset", session="s", fields=(N,)))
    assert (reset.seed, reset.last_txid, reset.floor, reset.format) == (None, None, ledger.next_txid, FORMAT)
    assert begin(reset, "s", 0)[1].txid == ledger.next_txid


def test_nor_does_an_operator_change_it(url):
    Seed(url).staged()
    tool = Ledger(resolve(url).open("visits"), "visits")
    for change in (
        tool.rollback,
        lambda: tool.begin_operator("vacuum"),
        tool.remember,
        lambda: tool.mark_part(0),
        lambda: tool.advance(5),
    ):
        with pytest.raises(SeedingError, match="call seed again"):
            change()
    dropped = upkeep.begin_drop(tool.load(), "visits", "s", 5000)
    assert decode_ledger(encode_ledger(dropped), "visits").seed is None


def test_a_complete_seed_comes_again_and_is_never_rolled_back(url):
    seed = Seed(url)
    seed.staged(rows=10, buckets=1)
    seed.bucket()
    ledger = seed.end()
    assert isinstance(begin(ledger, ledger.session, 0, plan=PLAN)[1], AlreadyCommitted)
    with pytest.raises(ReplannedBatchError, match="it is a seed"):
        begin(ledger, ledger.session, 0, plan=PLAN._replace(end="[10]", planned_at=7))
    with pytest.raises(RollbackError, match="a seed is not rolled back"):
        Ledger(resolve(url).open("visits"), "visits").rollback()
    assert not can_all_roll_back([ledger], 0)
    assert take_back(ledger, 0, can_roll_back=False).last_commit.is_part


@pytest.mark.parametrize("flaw", [{"done": 3}, {"rows": -1}, {"done": 0}])
def test_a_damaged_seed_is_no_seed(url, flaw):
    seed = Seed(url)
    seed.staged()
    seed.bucket()
    damaged = msgspec.structs.replace(seed.record, seed=msgspec.structs.replace(seed.record.seed, **flaw))
    with pytest.raises(CorruptLedgerError, match="its seed is none"):
        decode_ledger(encode_ledger(damaged), "visits")
    older = encode_ledger(seed.record).replace(b'"format":6', b'"format":1')
    with pytest.raises(CorruptLedgerError, match="in format 1 is there"):
        decode_ledger(older, "visits")


def test_nothing_is_staged_loaded_or_ended_without_a_seed():
    ledger = open_ledger(None, opening(session="s"))
    with pytest.raises(UsageError, match="is not being seeded"):
        seeding.staged(ledger, "s", "a", files=1, rows=1, buckets=1)
    with pytest.raises(FencedError):
        seeding.staged(ledger, "other", "a", files=1, rows=1, buckets=1)


def test_mapstate_ledger_shows_what_a_seed_left_out(tmp_path):
    url = f"sqlite:///{tmp_path}/state.db"
    windows = RollingWindows.of((10, 1), (40, 5)).definition("bigint", startTime=0, lag=2, retention=3, idle=None)
    seed, done = Seed(url, rolling=windows), WindowCommit(watermark=100, inputs={"": Input(102, 1)}, newest=102)
    seed.staged(rows=10, buckets=1, forgotten=3, windows=msgspec.structs.replace(done, expired=4))
    seed.bucket(a=1)
    seed.end()
    shown = CliRunner().invoke(app, ["ledger", url, "visits"]).output
    assert ", 10 rows, 3 rows forgotten, 4 rows expired, 1 keys, at 2026-11-28" in shown


@pytest.mark.parametrize("domains", [1, 2])
def test_states_of_a_stream_end_together_and_nothing_begins_beside_one_that_has_ended(tmp_path, domains):
    """Of two stores: the driver dies between the ends, and whoever comes instead of its seed writes nothing."""
    backends = [resolve(f"sqlite:///{tmp_path}/{at if domains > 1 else 'both'}.db") for at in (0, 1)]
    end = Fail(method="swap", call=5, error=CorruptStoreError, name="end")  # after the opening, the stage, and a bucket
    stores: list[Any] = [FaultyBackend(one, tmp_path, (end,) * at).open(f"s{at}") for at, one in enumerate(backends)]
    requests = [opening(state=f"s{at}", owner="q", fields=(N,)) for at in (0, 1)]
    driver = SeedLedgers(stores, requests, ["refuse"] * 2)
    driver.open_seeds(["p", "p"])
    for at in (0, 1):
        driver.staged(at, "seed-a", files=1, rows=5, buckets=1)
        attempt = driver.begin_bucket(at)
        driver.commit_bucket(at, attempt.txid, rows=5, keys=1, keys_delta=1)
    if domains == 2:
        with pytest.raises(CorruptStoreError):
            driver.end(PLAN, [DONE, DONE])
        before = [ledger.load() for ledger in driver.ledgers]
        with pytest.raises(SeedingError, match="'s1' is being seeded: 1 of 1 buckets"):
            Ledgers.open_and_begin(stores, requests, 0, ["refuse"] * 2, PLAN)
        with pytest.raises(UsageError, match="'s0' counts its seed already, and state 's1'"):
            SeedLedgers(stores, requests, ["refuse"] * 2).open_seeds(["p", "other"])
        assert [ledger.load() for ledger in driver.ledgers] == before
        driver = SeedLedgers(stores, requests, ["refuse"] * 2)
        driver.open_seeds(["p", "p"])
    driver.end(PLAN, [DONE, DONE])
    assert [record.last_commit.rows for record in driver.records] == [5, 5]
    assert [record.seed for record in driver.records] == [None, None]


@pytest.mark.parametrize("how", ["another", "unknown"])
def test_a_state_does_not_end_beside_one_of_another_reading(tmp_path, how):
    """An older mapstate that writes the ledger leaves out which reading it is of: then it is unknown."""
    stores = [resolve(f"sqlite:///{tmp_path}/{at}.db").open(f"s{at}") for at in (0, 1)]
    requests = [opening(state=f"s{at}", owner="q", fields=(N,)) for at in (0, 1)]
    loaded(stores, requests, ["p", "p"])
    lone = loaded(stores[:1], requests[:1], ["p"], "seed-b" if how == "another" else "seed-a")
    lone.end(PLAN, [DONE])
    ledger = lone.records[0]
    assert decode_ledger(encode_ledger(ledger), "s0") == ledger
    assert ledger.last_commit.reading == ("b" if how == "another" else "a")
    if how == "unknown":
        older = encode_ledger(ledger).replace(b',"reading":"a"', b"")
        assert older != encode_ledger(ledger)
        change_all(lone.ledgers, lambda _: [decode_ledger(older, "s0")])
    with pytest.raises(UsageError, match="'s0' counts its seed already, and state 's1'.*another reading"):
        SeedLedgers(stores, requests, ["refuse"] * 2).open_seeds(["p", "p"])
    assert SeedLedgers(stores[1:], requests[1:], ["refuse"]).ledgers[0].load().seed.is_loaded


def test_states_of_two_readings_are_not_seeded_together_after_later_batches(tmp_path):
    records = []
    for state, stage in (("s0", "seed-a"), ("s1", "seed-b")):
        store: Any = resolve(f"sqlite:///{tmp_path}/{state}.db").open(state)
        request = opening(state=state, owner="q", fields=(N,))
        loaded([store], [request], ["p"], stage).end(PLAN, [DONE])
        ledger, attempt = OneLedger.open_and_begin(store, request, 1)
        ledger.commit(Commit(batch_id=1, txid=attempt.txid, owner="q"))
        records.append(decode_ledger(store.load()[0], state))
    assert [record.last_commit.reading for record in records] == ["a", "b"]
    with pytest.raises(UsageError, match="'s0'.*'s1'.*another reading"):
        seeding.check_together(records)


def loaded(stores: Sequence[Any], requests: Sequence[Any], plans: Sequence[str], stage: str = "seed-a") -> SeedLedgers:
    """A driver with nothing left to do but the end."""
    driver = SeedLedgers(stores, requests, ["refuse"] * len(stores))
    driver.open_seeds(plans)
    for at in range(len(stores)):
        driver.staged(at, stage, files=1, rows=5, buckets=1)
        attempt = driver.begin_bucket(at)
        driver.commit_bucket(at, attempt.txid, rows=5, keys=1, keys_delta=1)
    return driver


def test_a_seed_is_begun_anew_only_once_no_older_driver_can_end_another_state(tmp_path, monkeypatch):
    """Of a job that names its states in the other order: it ends one when the new job has taken only the other one."""
    requests = [opening(state=f"s{at}", owner="q", fields=(N,)) for at in (0, 1)]
    olds, news = (list[Any](resolve(f"sqlite:///{tmp_path}/{at}.db").open(f"s{at}") for at in (0, 1)) for _ in range(2))
    old = loaded(olds[::-1], requests[::-1], ["p", "p"])
    end, take, ends = olds[1].swap, news[1].swap, list[Any]()

    def taken(*given: Any) -> Any:
        ends[:] = ends or [end(*ending)]
        return take(*given)

    def ended(*given: Any) -> Any:
        ending[:] = given
        monkeypatch.setattr(news[1], "swap", taken)
        with pytest.raises(UsageError, match="'s1' counts its seed already, and state 's0'"):
            SeedLedgers(news, requests, ["refuse"] * 2).open_seeds(["other", "other"])
        return ends[0]

    ending = list[Any]()
    monkeypatch.setattr(olds[1], "swap", ended)
    with pytest.raises(FencedError):
        old.end(PLAN, [DONE, DONE])
    again = SeedLedgers(news, requests, ["refuse"] * 2)
    again.open_seeds(["p", "p"])
    again.end(PLAN, [DONE, DONE])
    assert [record.last_commit.rows for record in again.records] == [5, 5]


def test_no_state_ends_while_another_one_lacks_something(tmp_path):
    """The store of the second state is put back to a copy from before its bucket."""
    stores: list[Any] = [resolve(f"sqlite:///{tmp_path}/{at}.db").open(f"s{at}") for at in (0, 1)]
    driver = loaded(stores, [opening(state=f"s{at}", owner="q", fields=(N,)) for at in (0, 1)], ["p", "p"])
    ledger = driver.ledgers[1].record
    seed = msgspec.structs.replace(ledger.seed, done=0, rows=0, keys=0, keys_delta=0)
    change_all([driver.ledgers[1]], lambda _: [msgspec.structs.replace(ledger, seed=seed, last_txid=None)])
    with pytest.raises(IncompleteBatchError, match="'s1': 5 rows of the history were staged, and 0 are loaded"):
        driver.end(PLAN, [DONE, DONE])
    assert driver.ledgers[0].load().seed is not None


# -- where a history and a table meet

DELTA = {"index": -1, "isStartingVersion": False, "reservoirId": "r", "reservoirVersion": 4, "sourceVersion": 1}
ICEBERG = {"position": 0, "scan_all_files": False, "snapshot_id": 7, "version": 1}


def starts(*entries: Any, tables: bool = True) -> Any:
    return cuts.starts_of(json.dumps(entries), tables=tables)


def test_a_table_starts_at_its_first_version_or_snapshot():
    assert starts(DELTA, {"visits": {"0": 5}}) == {("delta", "version"): 4, ("visits", "0"): 5}
    assert starts(ICEBERG) == {("iceberg", "snapshot"): 7}
    cuts.check_starts(starts(DELTA), {("delta", "version"): 4})
    for named in ({("delta", "version"): 5}, {("delta", "version"): 3}, {("iceberg", "snapshot"): 4}):
        with pytest.raises(UsageError, match="by StartsAt"):
            cuts.check_starts(starts(DELTA), named)


@pytest.mark.parametrize(
    "entries",
    [
        [None],  # all of a Delta table
        [DELTA | {"index": 0}],
        [DELTA | {"isStartingVersion": True}],
        [ICEBERG | {"position": 1}],
        [ICEBERG | {"scan_all_files": True}],  # what the table had before, too
        [ICEBERG | {"snapshot_id": -1, "position": -1}],  # the table has none yet
        [DELTA, DELTA],
    ],
)
def test_a_table_that_starts_elsewhere_cannot_meet_a_history(entries):
    with pytest.raises(UsageError, match="have to meet the stream|two sources read"):
        starts(*entries)
    with pytest.raises(UsageError, match="have to meet the stream"):
        starts(DELTA, tables=False)  # rows have no coordinates in it
