"""Fences apart from the ledger, on a store in memory that can lose and restore each of them."""

from __future__ import annotations

from typing import Any

import pytest
from one_ledger import OneLedger
from openings import opening

from mapstate.capabilities import Fence, FenceToken, SpreadFences
from mapstate.errors import (
    FencedError,
    MissingBatchesError,
    StaleBatchError,
    StoreRestartedError,
    StoreUnavailableError,
)
from mapstate.protocol.ledger_record import AlreadyCommitted, Attempt, Commit, encode_ledger
from mapstate.protocol.stored_ledger import decode_ledger


class Spread:
    """A ledger, and fences that move by themselves; ``before_move`` and ``before_swap`` are called once."""

    def __init__(self, fences: int = 3) -> None:
        self.record: bytes | None = None
        self.at: list[FenceToken | None] = [None] * fences
        self.incarnations = [0] * fences
        self.before_move: Any = None
        self.after_swap: Any = None

    def load(self) -> tuple[bytes, bytes] | None:
        return None if self.record is None else (self.record, self.record)

    def swap(self, record: bytes, expected: bytes | None, fence: FenceToken) -> bytes | None:
        if self.record != expected:
            return None
        self.record = record
        call, self.after_swap = self.after_swap, None
        if call is not None:
            call()
        return record

    def fences(self) -> list[Fence]:
        return [Fence(*one) for one in zip(self.at, self.incarnations, strict=True)]

    def move_fences(self, before: Any, after: FenceToken) -> list[Fence]:
        call, self.before_move = self.before_move, None
        if call is not None:
            call()
        self.at = [after if one == was else one for one, was in zip(self.at, before, strict=True)]
        return self.fences()


@pytest.fixture
def store() -> Spread:
    return Spread()


def start(store: Spread, batch_id: int, on_gap: Any = "refuse", **options: Any) -> tuple[OneLedger, Attempt]:
    ledger, attempt = OneLedger.open_and_begin(store, opening(**options), batch_id, on_gap)
    assert isinstance(attempt, Attempt)
    return ledger, attempt


def commit(ledger: OneLedger, attempt: Attempt | AlreadyCommitted) -> None:
    assert isinstance(attempt, Attempt)
    ledger.commit(Commit(batch_id=attempt.batch_id, txid=attempt.txid, owner="q"))


def test_a_store_of_fences_is_known_by_its_methods(store):
    assert isinstance(store, SpreadFences)


def test_all_fences_are_raised_when_a_batch_begins_and_closed_when_it_commits(store):
    ledger, attempt = start(store, 0)
    assert store.at == [attempt.token] * 3
    commit(ledger, attempt)
    assert store.at == [attempt.token._replace(closed=True)] * 3
    assert ledger.record.last_txid == attempt.txid
    again = ledger.begin(1)
    assert store.at == [again.token] * 3


def test_a_batch_that_is_committed_already_moves_no_fence(store):
    ledger, attempt = start(store, 0)
    commit(ledger, attempt)
    before = list(store.at)
    assert isinstance(OneLedger.open_and_begin(store, opening(), 0)[1], AlreadyCommitted)
    assert store.at == before


@pytest.mark.parametrize("kind", ["opaque", "transactional"])
def test_an_attempt_that_is_begun_anew_gets_past_the_fences_of_the_one_before(store, kind):
    ledger, attempt = start(store, 0, type=kind)
    for _ in range(20):
        again: Any = ledger.begin(0)
        assert store.at == [again.token] * 3
        assert again.token.rank > attempt.token.rank
        attempt = again
    ledger.ledgers.ledgers[0].close_fences()  # and its commit is lost
    again = ledger.begin(0)
    assert store.at == [again.token] * 3
    _, later = start(store, 0, type=kind)
    assert store.at == [later.token] * 3


def test_a_late_driver_moves_no_fence_that_a_newer_one_has_raised(store):
    ledger, attempt = start(store, 0)
    _, newer = start(store, 0)
    with pytest.raises(FencedError):
        commit(ledger, attempt)
    assert store.at == [newer.token] * 3
    store.move_fences([attempt.token] * 3, attempt.token)  # a move that was sent twice, and comes late
    assert store.at == [newer.token] * 3


def test_a_driver_that_is_overtaken_between_its_write_and_its_fences_is_fenced(store):
    store.after_swap = lambda: start(store, 0)
    with pytest.raises(FencedError):
        start(store, 0)
    newest = decode_ledger(store.record, "visits").fence()
    assert store.at == [newest] * 3


def test_a_fence_that_moved_while_it_was_read_is_read_again(store):
    ledger, attempt = start(store, 0)
    commit(ledger, attempt)

    def another_begins() -> None:
        start(store, 1)

    store.before_move = another_begins  # after this driver's write, so this one is the older one
    with pytest.raises(FencedError):
        ledger.begin(1)


@pytest.mark.parametrize("found", ["gone", "open", "older"])
def test_a_server_that_lost_what_a_committed_batch_wrote_is_noticed_and_stays_so(store, found):
    ledger, attempt = start(store, 0)
    older = store.at[1]
    commit(ledger, attempt)
    second = ledger.begin(1)
    raised = store.at[1]
    commit(ledger, second)
    store.at[1] = {"gone": None, "open": raised, "older": older}[found]
    before = list(store.at)
    for _ in range(3):
        with pytest.raises(MissingBatchesError, match=r"fence 1 is .*on_gap='accept'"):
            start(store, 2)
        with pytest.raises(MissingBatchesError):
            ledger.begin(2)
    assert store.at == before
    assert decode_ledger(store.record, "visits").in_flight is None
    _, accepted = start(store, 2, on_gap="accept")
    assert store.at == [accepted.token] * 3


def test_a_loss_between_the_look_and_the_fences_is_noticed_and_stays_so(store):
    ledger, attempt = start(store, 0)
    raised = store.at[1]
    commit(ledger, attempt)

    def lose() -> None:
        store.at[1] = raised

    store.before_move = lose
    with pytest.raises(MissingBatchesError):
        ledger.begin(1)
    with pytest.raises(MissingBatchesError):
        start(store, 1)


def test_a_reset_minds_no_loss(store):
    ledger, attempt = start(store, 0)
    commit(ledger, attempt)
    store.at[1] = None
    _, attempt = start(store, 0, owner="other", on_new_owner="reset")
    assert store.at == [attempt.token] * 3


def test_a_ledger_that_was_put_back_alone_is_noticed_and_stays_so(store):
    ledger, attempt = start(store, 0)
    commit(ledger, attempt)
    saved = store.record
    for batch_id in (1, 2, 3):
        commit(ledger, ledger.begin(batch_id))
    before = list(store.at)
    store.record = saved
    for _ in range(10):  # however often it is opened, which makes its epoch overtake that of the fences
        with pytest.raises(StaleBatchError, match="older copy"):
            start(store, 1)
        assert store.record == saved
    assert store.at == before


def test_a_driver_whose_ledger_is_behind_reads_it_again(store):
    ledger, attempt = start(store, 0)
    commit(ledger, attempt)
    start(store, 1)  # so that what `ledger` knows is older than the fences
    with pytest.raises(FencedError, match="opened again"):
        ledger.begin(1)


@pytest.mark.parametrize("what", ["another incarnation", "the fence is lost"])
def test_an_attempt_during_which_a_server_failed_over_is_not_committed(store, what):
    ledger, attempt = start(store, 0)
    if what == "another incarnation":
        store.incarnations[2] += 1
    else:
        store.at[2] = None
    with pytest.raises(StoreRestartedError):
        commit(ledger, attempt)
    assert ledger.record.last_commit is None
    again = ledger.begin(0)
    commit(ledger, again)
    assert ledger.record.dead == ((attempt.txid, attempt.txid),)


def test_a_begin_whose_fences_could_not_be_raised_is_an_error_and_the_next_one_works(store):
    def fail() -> None:
        raise StoreUnavailableError("a node is down")

    store.before_move = fail
    with pytest.raises(StoreUnavailableError):
        start(store, 0)
    ledger, attempt = start(store, 0)
    commit(ledger, attempt)
    assert store.at == [attempt.token._replace(closed=True)] * 3


def test_a_commit_whose_reply_was_lost_is_said_twice(store):
    ledger, attempt = start(store, 0)
    done = Commit(batch_id=0, txid=attempt.txid, owner="q")

    def lose() -> None:
        raise StoreUnavailableError("no reply")

    store.after_swap = lose
    ledger.commit(done)
    ledger.commit(done)
    assert ledger.record.last_commit == done


def test_a_rolled_back_batch_can_be_begun_again(store):
    ledger, attempt = start(store, 0)
    commit(ledger, attempt)
    commit(ledger, ledger.begin(1))
    ledger.operator.rollback()
    ledger, attempt = start(store, 1)
    commit(ledger, attempt)
    assert encode_ledger(ledger.record) == store.record


def test_a_vacuum_raises_and_closes_like_a_batch(store):
    ledger, attempt = start(store, 0)
    commit(ledger, attempt)
    operator = ledger.operator
    attempt = operator.begin_operator("vacuum")
    assert store.at == [attempt.token] * 3
    operator.commit_vacuum(attempt.txid)
    assert store.at == [attempt.token._replace(closed=True)] * 3
    commit(*start(store, 1))
