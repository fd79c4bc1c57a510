"""Several ledgers: begun together, committed together, reconciled after a crash between two commits."""

from __future__ import annotations

import secrets

import pytest
from one_ledger import OneLedger, committed_in
from openings import opening

from mapstate.backends import resolve
from mapstate.backends.memory import MemoryBackend
from mapstate.backends.sqlite import SqliteBackend
from mapstate.errors import (
    FencedError,
    LedgerLostError,
    MissingBatchesError,
    RollbackError,
    StoreRestartedError,
    StoreUnavailableError,
    UsageError,
)
from mapstate.operations.vacuum import vacuum
from mapstate.protocol.ledger import Ledger
from mapstate.protocol.ledger_record import AlreadyCommitted, Attempt, Commit, now
from mapstate.protocol.ledgers import KnownLedger, Ledgers, commit_domains
from mapstate.testing import Begins, Commits, Fail, FaultyStore

NAMES = ("by_user", "by_page")
REFUSE = ("refuse", "refuse")


def started(stores, batch_id, on_gaps=REFUSE, **how):
    return Ledgers.open_and_begin(stores, [opening(state=name, **how) for name in NAMES], batch_id, on_gaps)


def commits(ledgers, attempt):
    owner = ledgers.records[0].owner
    return [Commit(batch_id=one.batch_id, txid=one.txid, owner=owner, at=now()) for one in attempt]


def last(ledgers):
    return [one.last_commit and one.last_commit.batch_id for one in ledgers.records]


@pytest.fixture
def together():
    """Two states in one commit domain."""
    backend = MemoryBackend(secrets.token_hex(8))
    return [backend.open(name) for name in NAMES]


@pytest.fixture
def apart(tmp_path):
    """Two states in two commit domains."""
    return [MemoryBackend(secrets.token_hex(8)).open(NAMES[0]), SqliteBackend(str(tmp_path / "b.db")).open(NAMES[1])]


def left_apart(stores, batch_id=0, **how):
    """A driver dies between its two commits."""
    ledgers, attempt = started(stores, batch_id, **how)
    done = commits(ledgers, attempt)
    committed_in(ledgers, 0, done)
    return ledgers, done


def test_the_states_of_one_store_are_one_commit_domain_and_of_two_stores_two(together, apart):
    assert commit_domains(together) == [[0, 1]]
    assert commit_domains(apart) == [[0], [1]]
    assert commit_domains([*together, apart[1]]) == [[0, 1], [2]]


@pytest.mark.parametrize("kind", ["opaque", "transactional", "non-transactional"])
def test_states_of_one_commit_domain_begin_and_commit_in_one_write_each(together, kind):
    watched = [FaultyStore(one, record=True) for one in together]
    ledgers, attempt = started(watched, 0, type=kind)
    ledgers.commit(commits(ledgers, attempt))
    assert last(ledgers) == [0, 0]
    again = ledgers.begin(1)
    ledgers.commit(commits(ledgers, again))
    assert last(ledgers) == [1, 1]
    assert [call.method for call in watched[0].calls].count("swap_all") == 4
    assert not [call for one in watched for call in one.calls if call.method == "swap"]


def test_a_batch_that_one_state_refuses_begins_in_none(together):
    OneLedger.open_and_begin(together[1], opening(state=NAMES[1], owner="another"), 0)
    before = together[1].load()
    with pytest.raises(Exception, match="belongs to"):
        started(together, 0)
    assert (together[0].load(), together[1].load()) == (None, before)


def test_a_batch_that_counts_is_begun_in_no_state(together, apart):
    for stores in (together, apart):
        ledgers, attempt = started(stores, 0)
        ledgers.commit(commits(ledgers, attempt))
        again, done = started(stores, 0)
        assert [type(one) for one in done] == [AlreadyCommitted] * 2
        assert last(again) == [0, 0]


def test_requests_whose_replies_are_lost_are_retried(together):
    faulty = [
        FaultyStore(
            one,
            Fail(method="swap_all", where=Begins(1), after=True, error=StoreUnavailableError, name="begin"),
            Fail(method="swap_all", where=Commits(1), after=True, error=StoreUnavailableError, name="commit"),
        )
        for one in together
    ]
    ledgers, attempt = started(faulty, 0)
    ledgers.commit(commits(ledgers, attempt))
    ledgers.commit(commits(ledgers, ledgers.begin(1)))
    assert faulty[0].fired("begin")
    assert faulty[0].fired("commit")
    assert last(ledgers) == [1, 1]
    assert [one.dead for one in ledgers.records] == [(), ()]


def test_a_state_that_is_a_batch_ahead_is_rolled_back_and_begun_anew(apart):
    first, attempt = started(apart, 0)
    first.commit(commits(first, attempt))
    left_apart(apart, 1)
    ledgers, attempt = started(apart, 1)
    assert last(ledgers) == [0, 0]
    ledgers.commit(commits(ledgers, attempt))
    assert last(ledgers) == [1, 1]


def test_the_driver_before_commits_nothing_once_all_are_opened(apart):
    old, done = left_apart(apart)
    new, attempt = started(apart, 0)
    with pytest.raises(FencedError):
        committed_in(old, 1, done)
    new.commit(commits(new, attempt))
    assert last(new) == [0, 0]


def test_what_the_driver_before_has_committed_everywhere_meanwhile_stays(apart):
    """It lives until the last state is opened; here it commits just before that."""
    old, attempt = started(apart, 0)
    done = commits(old, attempt)
    committed_in(old, 0, done)
    inner = apart[1].load

    def load():
        apart[1].load = inner
        found = inner()
        committed_in(old, 1, done)
        return found

    apart[1].load = load
    new, attempt = started(apart, 0)
    assert last(new) == [0, 0]
    assert [type(one) for one in attempt] == [AlreadyCommitted] * 2


def test_a_store_that_was_restarted_behind_the_first_commit_has_the_batch_begun_anew_in_all(apart):
    ledgers, attempt = started(apart, 0)
    second = ledgers.ledgers[1]
    second.at_begin = KnownLedger(second.record, "another incarnation")
    with pytest.raises(StoreRestartedError):
        ledgers.commit(commits(ledgers, attempt))
    assert last(ledgers) == [0, None]
    again = ledgers.begin(0)
    assert [type(one) for one in again] == [Attempt, Attempt]
    assert last(ledgers) == [None, None]
    ledgers.commit(commits(ledgers, again))
    assert last(ledgers) == [0, 0]


@pytest.mark.parametrize("gave_up", [False, True])
def test_what_another_query_left_apart_is_even_before_it_is_adopted(apart, gave_up):
    left_apart(apart)
    if gave_up:  # its next driver dies once it has opened a state that holds nothing, which yields then
        OneLedger.open(apart[1], opening(state=NAMES[1]))
    ledgers, attempt = started(apart, 0, owner="new", on_new_owner="adopt_unchecked")
    assert last(ledgers) == [None, None]
    ledgers.commit(commits(ledgers, attempt))
    assert [one.owners for one in ledgers.records] == [{"q": 0, "new": 1}] * 2


def test_queries_that_take_turns_and_leave_states_apart_are_reconciled(apart):
    first, attempt = started(apart, 0, owner="new")
    first.commit(commits(first, attempt))
    left_apart(apart, 0, owner="q", on_new_owner="adopt_unchecked")
    ledgers, attempt = started(apart, 0, owner="new", on_new_owner="adopt_unchecked")
    assert [type(one) for one in attempt] == [AlreadyCommitted] * 2
    assert [one.last_commit.owner for one in ledgers.records] == ["new", "new"]


def further_alone(store, name, batches, owner="q"):
    for batch_id in batches:
        alone, attempt = OneLedger.open_and_begin(store, opening(state=name, owner=owner), batch_id)
        alone.commit(Commit(batch_id=batch_id, txid=attempt.txid, owner=owner, at=now()))


@pytest.mark.parametrize("place", ["together", "apart"])
@pytest.mark.parametrize("ahead", [0, 1])
def test_states_that_one_query_left_two_batches_apart_are_not_adopted(place, ahead, request):
    stores = request.getfixturevalue(place)
    ledgers, attempt = started(stores, 0)
    ledgers.commit(commits(ledgers, attempt))
    further_alone(stores[ahead], NAMES[ahead], [1, 2])
    before = [one.load() for one in stores]
    lacks, has = NAMES[1 - ahead], NAMES[ahead]
    with pytest.raises(MissingBatchesError, match=f"'{lacks}' counts .* up to batch 0, and state '{has}' .* batch 2"):
        started(stores, 0, owner="new", on_new_owner="adopt_unchecked")
    assert [one.load() for one in stores] == before
    on_gaps = ["refuse", "refuse"]
    on_gaps[1 - ahead] = "accept"
    accepted, attempt = started(stores, 0, on_gaps, owner="new", on_new_owner="adopt_unchecked")
    accepted.commit(commits(accepted, attempt))
    _, attempt = started(stores, 1, owner="new", on_new_owner="adopt_unchecked")
    assert [type(one) for one in attempt] == [Attempt, Attempt]


def test_states_that_two_queries_kept_are_adopted_wherever_each_ended(together):
    further_alone(together[0], NAMES[0], [0, 1, 2], owner="q")
    further_alone(together[1], NAMES[1], [0], owner="p")
    ledgers, _ = started(together, 0, owner="new", on_new_owner="adopt_unchecked")
    assert last(ledgers) == [2, 0]


@pytest.mark.parametrize("kind", ["opaque", "transactional", "non-transactional"])
def test_a_state_that_joins_with_another_query_takes_the_only_batch_of_none_back(together, kind):
    alone, attempt = OneLedger.open_and_begin(together[0], opening(state=NAMES[0], type=kind), 0)
    alone.commit(Commit(batch_id=0, txid=attempt.txid, owner="q"))
    ledgers, attempt = started(together, 0, type=kind, owner="new", on_new_owner="adopt_unchecked")
    assert last(ledgers) == [0, None]
    ledgers.commit(commits(ledgers, attempt))
    assert [one.owners for one in ledgers.records] == [{"q": 1, "new": 1}, {"new": 1}]


def test_a_state_that_joins_another_query_in_another_store_takes_no_batch_back(apart):
    alone, attempt = OneLedger.open_and_begin(apart[1], opening(state=NAMES[1]), 0)
    alone.commit(Commit(batch_id=0, txid=attempt.txid, owner="q"))
    ledgers, _ = started(apart, 0, owner="new", on_new_owner="adopt_unchecked")
    assert last(ledgers) == [None, 0]


@pytest.mark.parametrize("place", ["together", "apart"])
@pytest.mark.parametrize("reset", [0, 1])
def test_a_state_that_is_reset_takes_the_only_batch_of_an_adopted_one_not_back(place, reset, request):
    stores = request.getfixturevalue(place)
    ledgers, attempt = started(stores, 0)
    ledgers.commit(commits(ledgers, attempt))
    openings = [
        opening(state=name, owner="new", on_new_owner="reset" if at == reset else "adopt_unchecked")
        for at, name in enumerate(NAMES)
    ]
    ledgers, _ = Ledgers.open_and_begin(stores, openings, 0, REFUSE)
    assert last(ledgers) == ([None, 0] if reset == 0 else [0, None])


def test_one_state_rolled_back_by_hand_takes_the_others_back_with_it(together):
    ledgers, attempt = started(together, 0)
    ledgers.commit(commits(ledgers, attempt))
    Ledger(together[1], NAMES[1]).rollback()
    again, attempt = started(together, 0)
    assert [type(one) for one in attempt] == [Attempt, Attempt]
    assert last(again) == [None, None]


def test_a_state_that_cannot_be_rolled_back_is_an_error_that_says_why(apart):
    left_apart(apart)
    vacuum = Ledger(apart[0], NAMES[0])
    vacuum.commit_vacuum(vacuum.begin_operator("vacuum").txid)
    before = [one.load() for one in apart]
    with pytest.raises(RollbackError, match=r"'by_user' is ahead of .*'by_page'.*can only be rolled back"):
        started(apart, 0)
    assert [one.load() for one in apart] == before


@pytest.fixture
def urls(tmp_path):
    """Two states in two stores, for a vacuum."""
    return [f"memory://{secrets.token_hex(8)}", f"sqlite:///{tmp_path}/b.db"]


def opened(urls):
    return [resolve(url).open(name) for url, name in zip(urls, NAMES, strict=True)]


def dies_between_its_commits(stores, batch_id=0):
    """The second store is out of reach when its commit is due."""
    second = FaultyStore(
        stores[1], Fail(method="swap", where=Commits(batch_id), times=99, error=StoreUnavailableError, name="commit")
    )
    ledgers, attempt = started([stores[0], second], batch_id)
    with pytest.raises(StoreUnavailableError):
        ledgers.commit(commits(ledgers, attempt))
    assert last(ledgers) == [batch_id, None]


def test_a_vacuum_between_two_commits_that_rewrites_nothing_keeps_the_rollback_possible(urls):
    stores = opened(urls)
    dies_between_its_commits(stores)
    assert vacuum(urls[0], NAMES[0]).txid is None
    ledgers, attempt = started(stores, 0)
    ledgers.commit(commits(ledgers, attempt))
    assert last(ledgers) == [0, 0]


def test_a_vacuum_between_two_commits_that_would_rewrite_is_refused_with_the_reason(urls):
    stores = opened(urls)
    started(stores, 0)
    dies_between_its_commits(stores)
    stores[0].multi_put(["k"], [b"[1000,5,null]"])  # of the attempt that nobody committed
    before = [one.load() for one in stores]
    with pytest.raises(UsageError, match=r"batch 0 was committed apart from 'by_page'.*Nothing was written"):
        vacuum(urls[0], NAMES[0])
    beside = [(urls[1], NAMES[1])]
    with pytest.raises(UsageError, match=r"another last batch than 'by_page'.*Start the job"):
        vacuum(urls[0], NAMES[0], beside=beside)
    assert [one.load() for one in stores] == before
    ledgers, attempt = started(stores, 0)  # as the message says
    ledgers.commit(commits(ledgers, attempt))
    assert last(ledgers) == [0, 0]
    assert vacuum(urls[0], NAMES[0], beside=beside).dropped == 1


def test_a_vacuum_beside_a_driver_that_commits_meanwhile_is_refused(urls):
    stores = opened(urls)
    started(stores, 0)
    ledgers, attempt = started(stores, 0)
    ledgers.commit(commits(ledgers, attempt))
    stores[0].multi_put(["k"], [b"[1000,5,null]"])
    seen = ledgers.records[0]
    attempt = ledgers.begin(1)
    committed_in(ledgers, 0, commits(ledgers, attempt))
    with pytest.raises(FencedError, match="has changed"):
        Ledger(stores[0], NAMES[0]).begin_operator("vacuum", seen=seen)


@pytest.mark.parametrize("place", ["together", "apart"])
def test_a_ledger_that_one_state_lost_is_told_at_once(place, request):
    stores = request.getfixturevalue(place)
    ledgers, attempt = started(stores, 0)
    ledgers.commit(commits(ledgers, attempt))
    stores[0].multi_put(["k"], [b"[1000,5,null]"])
    stores[0]._ledger = None
    with pytest.raises(LedgerLostError, match="'by_user' has records but no ledger"):
        started(stores, 1)


def test_a_state_that_lost_a_batch_takes_no_other_back(apart):
    ledgers, attempt = started(apart, 0)
    ledgers.commit(commits(ledgers, attempt))
    Ledger(apart[1], NAMES[1]).rollback()
    before = [one.load() for one in apart]
    with pytest.raises(MissingBatchesError):
        started(apart, 1)
    assert [one.load() for one in apart] == before


def test_a_state_that_joins_later_starts_with_the_batch_that_comes(together):
    alone, attempt = OneLedger.open_and_begin(together[0], opening(state=NAMES[0]), 0)
    alone.commit(Commit(batch_id=0, txid=attempt.txid, owner="q"))
    with pytest.raises(MissingBatchesError):
        started(together, 1)
    ledgers, attempt = started(together, 1, on_gaps=("refuse", "accept"))
    ledgers.commit(commits(ledgers, attempt))
    assert last(ledgers) == [1, 1]
