"""The ledger's rules, event by event, as pure functions; then all of them in random order."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from mapstate.capabilities import FenceToken
from mapstate.errors import (
    FencedError,
    MapStateError,
    MissingBatchesError,
    ReplannedBatchError,
    RollbackError,
    StaleBatchError,
    StateOwnershipError,
    StateSchemaError,
    UsageError,
)
from mapstate.protocol.following import check_follower
from mapstate.protocol.ledger_record import (
    AlreadyCommitted,
    Attempt,
    BatchPlan,
    Commit,
    LedgerRecord,
    OpenRequest,
    encode_ledger,
)
from mapstate.protocol.opening import open_ledger
from mapstate.protocol.records import OpaqueValue
from mapstate.protocol.stored_ledger import decode_ledger
from mapstate.protocol.transitions import begin, commit
from mapstate.protocol.upkeep import begin_operator, commit_vacuum
from mapstate.protocol.ways_back import can_all_roll_back, give_up, rollback
from mapstate.protocol.windows import WindowCommit, WindowDefinition, WindowsRecord
from mapstate.schema import Field, KeyField

START = 1000
VISITS = Field("visits", "Count", "bigint")
BYTES = Field("bytes", "Sum(bytes)", "bigint")
KINDS = ["opaque", "transactional", "non-transactional"]


def opening(kind="opaque", owner="query-1", session="session-1", **changes):
    fields = {
        "state": "visits_by_user",
        "type": kind,
        "serializer": "json",
        "keys": (KeyField("user_id", "string"),),
        "fields": (VISITS,),
        "owner": owner,
        "session": session,
        "clock_txid": START,
    }
    return OpenRequest(**(fields | changes))


def opened(kind="opaque", ledger=None, **changes):
    return open_ledger(ledger, opening(kind, **changes))


def began(ledger, batch_id, **options):
    after, result = begin(ledger, ledger.session, batch_id, **options)
    assert isinstance(result, Attempt), result
    return after, result


def committed(ledger, batch_id, **options):
    ledger, attempt = began(ledger, batch_id, **options)
    done = Commit(batch_id=batch_id, txid=attempt.txid, owner=ledger.owner, rows=3, keys=2, at="2026-11-21T00:00:00Z")
    return commit(ledger, ledger.session, done)


def with_batches(number, kind="opaque"):
    ledger = opened(kind)
    for batch_id in range(number):
        ledger = committed(ledger, batch_id)
    return ledger


def done(txid, batch_id, owner="query-1"):
    return Commit(batch_id=batch_id, txid=txid, owner=owner)


# open


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_opening_makes_a_ledger_that_is_due_batch_zero(kind):
    ledger = opened(kind)
    assert (ledger.epoch, ledger.owner, ledger.owners) == (1, "query-1", {"query-1": 0})
    assert (ledger.first_txid, ledger.next_txid, ledger.last_txid) == (START, START, None)
    assert ledger.field_counts == ((START, 1),)
    assert ledger.fence().closed
    assert ledger.fence() < FenceToken(1, START)
    _, attempt = began(ledger, 0)
    assert (attempt.batch_id, attempt.txid) == (0, START)


def test_a_ledger_may_start_at_txid_zero():
    ledger = committed(opened(clock_txid=0), 0)
    assert ledger.last_txid == 0
    assert 0 in ledger.view()
    ledger, attempt = began(ledger, 1)
    assert attempt.txid == 1
    assert commit(ledger, ledger.session, done(1, 1)).dead == ()


def test_opening_again_raises_the_epoch_and_keeps_all_else():
    before = with_batches(2)
    after = opened(ledger=before, session="session-2")
    assert after == msgspec.structs.replace(before, epoch=2, session="session-2")
    assert before.fence() < after.fence()


@pytest.mark.parametrize("kind", KINDS)
def test_another_owner_is_refused_by_default_with_the_facts(kind):
    ledger = with_batches(2, kind)
    with pytest.raises(StateOwnershipError) as caught:
        opened(kind, ledger=ledger, owner="query-2")
    assert (caught.value.owner, caught.value.asked_by) == ("query-1", "query-2")
    for said in ("query-1", "query-2", "batch 1", "2 keys", "adopt", "reset"):
        assert said in str(caught.value)


@pytest.mark.parametrize("kind", ["opaque", "transactional"])
@pytest.mark.parametrize("policy", ["refuse", "adopt"])
def test_an_owner_whose_first_batch_failed_leaves_the_state_to_another(kind, policy):
    ledger, left = began(opened(kind), 0)
    ledger = give_up(ledger, "session-1")
    assert ledger.fence().closed
    after = opened(kind, ledger=ledger, owner="query-2", session="session-2", on_new_owner=policy)
    assert (after.owner, after.owners, after.in_flight) == ("query-2", {"query-1": 0, "query-2": 0}, None)
    assert after.floor == left.txid + 1
    after = committed(after, 0)
    record = OpaqueValue(left.txid, 1, None)
    assert after.view().values([record], after.next_txid) == [None]
    with pytest.raises(StateOwnershipError, match="batch 0 committed"):
        opened(kind, ledger=after)


@pytest.mark.parametrize("kind", KINDS)
def test_an_owner_that_has_begun_nothing_leaves_the_state_to_another(kind):
    assert opened(kind, ledger=opened(kind), owner="query-2").owner == "query-2"


@pytest.mark.parametrize("kind", KINDS)
def test_an_owner_with_its_first_batch_in_flight_is_not_displaced_and_the_way_out_is_said(kind):
    ledger, attempt = began(opened(kind), 0, at="2026-11-21T00:00:00Z")
    way_out = "mapstate drop" if kind == "non-transactional" else "on_new_owner='reset'"
    with pytest.raises(StateOwnershipError, match=rf"txid {attempt.txid} is in flight since 2026-11-21.*{way_out}"):
        opened(kind, ledger=ledger, owner="query-2")


def test_a_non_transactional_owner_whose_first_batch_failed_keeps_what_it_may_have_written():
    ledger, _ = began(opened("non-transactional"), 0)
    with pytest.raises(StateOwnershipError, match="mapstate drop"):
        opened("non-transactional", ledger=give_up(ledger, "session-1"), owner="query-2")


def test_a_ledger_of_010_that_was_reset_does_not_yield_to_an_owner_before():
    ledger = opened(ledger=with_batches(2), owner="query-2", on_new_owner="reset")
    ledger = msgspec.structs.replace(ledger, owners=ledger.owners | {"query-1": 2})
    with pytest.raises(StateOwnershipError, match="nothing committed yet"):
        opened(ledger=ledger)


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_that_was_given_up_is_begun_again_by_its_own_driver(kind):
    ledger, attempt = began(with_batches(1, kind), 1)
    ledger = give_up(ledger, "session-1")
    with pytest.raises(FencedError):
        commit(ledger, "session-1", done(attempt.txid, 1))
    ledger, again = began(ledger, 1)
    assert (again.txid == attempt.txid) == (kind == "transactional")
    assert commit(ledger, "session-1", done(again.txid, 1)).last_txid == again.txid


def test_only_a_drivers_own_attempt_is_given_up():
    committed_all, (attempt, _) = with_batches(1), began(with_batches(1), 1)
    assert give_up(committed_all, "session-1") is committed_all
    assert give_up(attempt, "session-2") is attempt


@pytest.mark.parametrize("kind", KINDS)
def test_an_adopter_starts_at_batch_zero_above_what_is_there(kind):
    ledger = with_batches(3, kind)
    after = opened(kind, ledger=ledger, owner="query-2", on_new_owner="adopt")
    assert after.owners == {"query-1": 3, "query-2": 0}
    assert after.last_commit == ledger.last_commit
    assert after.last_txid == ledger.last_txid
    after, attempt = began(after, 0)
    assert attempt.txid == START + 3
    assert START + 2 in attempt.view


def test_an_adopters_batch_ids_are_never_compared_with_the_old_owners():
    ledger = opened(ledger=with_batches(3), owner="query-2", on_new_owner="adopt")
    ledger = committed(ledger, 0)  # the old owner had committed its batch 0 long ago
    assert ledger.last_txid == START + 3
    with pytest.raises(MissingBatchesError):
        began(ledger, 3)


def test_an_owner_that_comes_back_goes_on_where_it_was():
    ledger = opened(ledger=with_batches(3), owner="query-2", on_new_owner="adopt")
    ledger = committed(ledger, 0)
    ledger = opened(ledger=ledger, owner="query-1", on_new_owner="adopt")
    assert ledger.owners == {"query-1": 3, "query-2": 1}
    assert committed(ledger, 3).last_txid == START + 4


def test_an_attempt_that_was_left_behind_by_adoption_never_counts():
    ledger, left = began(with_batches(1), 1)
    ledger = opened(ledger=ledger, owner="query-2", session="session-2", on_new_owner="adopt")
    assert ledger.in_flight is None
    with pytest.raises(FencedError):
        commit(ledger, "session-1", done(left.txid, 1))
    ledger = committed(ledger, 0)
    assert left.txid not in ledger.view()
    assert ledger.dead == ((left.txid, left.txid),)


def test_a_transactional_attempt_in_flight_cannot_be_adopted():
    ledger, _ = began(with_batches(1, "transactional"), 1)
    with pytest.raises(StateOwnershipError, match="in flight"):
        opened("transactional", ledger=ledger, owner="query-2", on_new_owner="adopt")


@pytest.mark.parametrize("kind", ["opaque", "transactional"])
def test_reset_starts_empty_by_the_floor_and_keeps_the_txids_going(kind):
    ledger, _ = began(with_batches(2, kind), 2)
    after = opened(kind, ledger=ledger, owner="query-2", on_new_owner="reset")
    assert (after.floor, after.next_txid) == (START + 3, START + 3)
    assert (after.last_txid, after.last_commit, after.previous, after.in_flight, after.dead) == (None,) * 4 + ((),)
    after = committed(after, 0)
    assert after.last_txid == START + 3
    assert after.view().values([(START + 1, "old", "older")], after.next_txid) == [None]


@pytest.mark.parametrize("how", ["reset", "adopt", "refuse"])
@pytest.mark.parametrize("of_before", [False, True], ids=["", "a ledger of 0.1.0"])
def test_a_query_that_comes_back_behind_a_reset_has_counted_nothing(how, of_before):
    """Its checkpoint is at batch 1: the batch counts no more, and those before it are gone."""
    ledger = opened(ledger=with_batches(2), owner="query-2", on_new_owner="reset")
    if of_before and how != "refuse":  # it would not yield
        ledger = msgspec.structs.replace(ledger, owners={"query-2": 0, "query-1": 2})
    if how == "reset":
        ledger = committed(began(ledger, 0)[0], 0)
    back = opened(ledger=ledger, on_new_owner=how)
    assert back.last_txid is None
    for batch_id in (1, 2):
        with pytest.raises(MissingBatchesError):
            began(back, batch_id)
    assert isinstance(began(back, 0)[1], Attempt)


def test_reset_of_a_non_transactional_state_is_refused():
    with pytest.raises(UsageError):
        opened("non-transactional", ledger=with_batches(1, "non-transactional"), owner="q", on_new_owner="reset")


def test_reset_asked_by_the_owner_itself_changes_nothing():
    """A spec keeps its on_new_owner for ever; only a *new* owner starts empty."""
    ledger = opened(ledger=with_batches(2), on_new_owner="reset")
    assert (ledger.floor, ledger.last_txid) == (0, START + 1)


def test_after_a_reset_only_txids_above_the_floor_can_be_dead():
    ledger = opened(ledger=with_batches(2), owner="query-2", on_new_owner="reset")
    ledger, _ = began(ledger, 0)
    ledger = committed(ledger, 0)
    assert ledger.dead == ((START + 2, START + 2),)


# schema


@pytest.mark.parametrize(
    ("changes", "found", "asked"),
    [
        ({"type": "transactional"}, "opaque", "transactional"),
        ({"serializer": "msgpack"}, "json", "msgpack"),
        ({"keys": (KeyField("user_id", "bigint"),)}, "(user_id string)", "(user_id bigint)"),
        ({"keys": (KeyField("id", "string"),)}, "(user_id string)", "(id string)"),
        ({"keys": ()}, "(user_id string)", "()"),
        ({"fields": (BYTES,)}, "(visits Count bigint)", "none of this name"),
        ({"fields": (VISITS._replace(type="double"),)}, "(visits Count bigint)", "(visits Count double)"),
        ({"fields": (VISITS._replace(aggregator="Sum(x)"),)}, "(visits Count bigint)", "(visits Sum(x) bigint)"),
    ],
    ids=["type", "serializer", "key type", "key name", "no keys", "field gone", "field type", "aggregator"],
)
def test_another_schema_is_refused_naming_both(changes, found, asked):
    with pytest.raises(StateSchemaError) as caught:
        opened(ledger=with_batches(1), **changes)
    assert (caught.value.found, caught.value.expected) == (found, asked)
    assert found in str(caught.value)
    assert asked in str(caught.value)


def test_the_schema_is_checked_before_the_owner():
    with pytest.raises(StateSchemaError):
        opened(ledger=with_batches(1), owner="query-2", on_new_owner="reset", serializer="msgpack")


def test_fields_are_added_behind_those_that_are_there():
    ledger = with_batches(2)
    after = opened(ledger=ledger, fields=(BYTES, VISITS))
    assert after.fields == (VISITS, BYTES)
    assert after.field_counts == ((START, 1), (START + 2, 2))
    again = opened(ledger=after, fields=(VISITS, BYTES))
    assert (again.fields, again.field_counts) == (after.fields, after.field_counts)
    with pytest.raises(StateSchemaError):
        opened(ledger=after, fields=(VISITS,))


def test_an_opaque_attempt_that_was_in_flight_when_fields_were_added_keeps_its_own_layout():
    ledger, left = began(with_batches(1), 1)
    after = opened(ledger=ledger, fields=(VISITS, BYTES))
    assert after.field_counts[-1] == (left.txid + 1, 2)
    _, attempt = began(after, 1)
    assert attempt.txid == left.txid + 1


def test_fields_cannot_be_added_where_old_records_could_not_be_told():
    with pytest.raises(StateSchemaError, match="no txid"):
        opened("non-transactional", ledger=opened("non-transactional"), fields=(VISITS, BYTES))
    ledger, _ = began(opened("transactional"), 0)
    with pytest.raises(StateSchemaError, match="in flight"):
        opened("transactional", ledger=ledger, fields=(VISITS, BYTES))
    assert opened("transactional", ledger=opened("transactional"), fields=(VISITS, BYTES)).fields == (VISITS, BYTES)


# begin


def test_each_opaque_attempt_gets_a_txid_of_its_own():
    ledger, first = began(with_batches(1), 1)
    ledger, second = began(ledger, 1)
    ledger, third = began(opened(ledger=ledger), 1)
    assert [first.txid, second.txid, third.txid] == [START + 1, START + 2, START + 3]
    assert first.view == second.view == third.view
    ledger = commit(ledger, ledger.session, done(third.txid, 1))
    assert ledger.dead == ((first.txid, second.txid),)


def test_a_transactional_batch_keeps_its_txid_until_it_is_committed():
    ledger, first = began(with_batches(1, "transactional"), 1)
    ledger, again = began(ledger, 1)
    assert (again.txid, again.token) == (first.txid, first.token)
    ledger, later = began(opened("transactional", ledger=ledger), 1)
    assert later.txid == first.txid
    assert first.token < later.token
    ledger = commit(ledger, ledger.session, done(first.txid, 1))
    assert (ledger.dead, ledger.next_txid) == ((), first.txid + 1)


def test_an_attempt_may_write_and_nobody_else():
    ledger, attempt = began(opened(), 0)
    assert ledger.fence() == attempt.token == FenceToken(1, START)
    assert not attempt.token.closed
    after = commit(ledger, ledger.session, done(attempt.txid, 0))
    assert after.fence().closed
    assert after.fence() > attempt.token
    reopened = opened(ledger=ledger)
    assert reopened.fence().closed
    assert reopened.fence() > attempt.token


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_that_is_committed_already_is_never_redone(kind):
    ledger = with_batches(2, kind)
    after, result = begin(ledger, ledger.session, 1)
    assert after is ledger
    assert result == AlreadyCommitted(1, ledger.last_commit, ledger.view())


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_below_the_last_is_stale(kind):
    with pytest.raises(StaleBatchError) as caught:
        began(with_batches(2, kind), 0)
    assert (caught.value.found, caught.value.expected) == (0, 2)


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_above_the_next_is_a_gap_and_refused_unless_accepted(kind):
    ledger = with_batches(2, kind)
    with pytest.raises(MissingBatchesError) as caught:
        began(ledger, 4)
    assert (caught.value.found, caught.value.expected) == (4, 2)
    assert "on_gap='accept'" in str(caught.value)
    ledger = committed(ledger, 4, on_gap="accept")
    assert ledger.owners == {"query-1": 5}


def test_a_transactional_attempt_in_flight_is_repeated_before_any_other_batch():
    ledger, _ = began(with_batches(1, "transactional"), 1)
    with pytest.raises(MissingBatchesError) as caught:
        began(ledger, 2, on_gap="accept")
    assert "on_gap" not in str(caught.value)


def test_an_older_session_is_fenced_at_every_step():
    ledger, attempt = began(opened(), 0)
    ledger = opened(ledger=ledger, session="session-2")
    for call in (
        lambda: begin(ledger, "session-1", 0),
        lambda: commit(ledger, "session-1", done(attempt.txid, 0)),
    ):
        with pytest.raises(FencedError) as caught:
            call()
        assert caught.value.epoch == 2


def test_what_another_owner_committed_since_is_not_given_out_as_the_batchs_own():
    ledger = opened(ledger=with_batches(2), owner="query-2", on_new_owner="adopt")
    ledger = committed(ledger, 0)
    ledger = opened(ledger=ledger, owner="query-1", on_new_owner="adopt")
    _, result = begin(ledger, ledger.session, 1)
    assert result == AlreadyCommitted(1, None, ledger.view())


# commit


def test_commit_makes_the_attempt_count_with_what_is_known_of_it():
    ledger = with_batches(2)
    assert ledger.last_commit.batch_id == 1
    assert ledger.previous.batch_id == 0
    assert (ledger.last_txid, ledger.next_txid, ledger.in_flight) == (START + 1, START + 2, None)
    assert ledger.owners == {"query-1": 2}
    assert (ledger.last_commit.rows, ledger.last_commit.keys) == (3, 2)


def test_commit_said_twice_is_no_error_and_no_change():
    ledger = with_batches(2)
    assert commit(ledger, ledger.session, ledger.last_commit) is ledger


def test_only_the_attempt_in_flight_can_be_committed():
    ledger, first = began(with_batches(1), 1)
    ledger, second = began(ledger, 1)
    with pytest.raises(FencedError):
        commit(ledger, ledger.session, done(first.txid, 1))
    with pytest.raises(FencedError):
        commit(with_batches(1), "session-1", done(START + 1, 1))
    with pytest.raises(UsageError):
        commit(ledger, ledger.session, done(second.txid, 2))


def test_an_attempt_of_an_older_epoch_cannot_be_committed_by_the_new_one():
    ledger, attempt = began(opened(), 0)
    ledger = opened(ledger=ledger)
    with pytest.raises(FencedError):
        commit(ledger, ledger.session, done(attempt.txid, 0))


# rollback


@pytest.mark.parametrize(
    ("done_to_windows", "is_taken_back"),
    [
        (WindowCommit(before=19, watermark=19), True),
        (WindowCommit(before=10, watermark=19), True),  # no window ends there
        (WindowCommit(before=19, watermark=20), False),
        (WindowCommit(watermark=20), False),
        (None, False),  # what fired is unknown
    ],
)
def test_a_part_is_taken_back_only_where_no_window_has_fired(done_to_windows, is_taken_back):
    ledger = with_batches(1)
    windows = WindowsRecord(definition=WindowDefinition(length=10, slide=10)).emptied()
    last = msgspec.structs.replace(ledger.last_commit, windows=done_to_windows)
    of_windows = msgspec.structs.replace(ledger, windows=windows, last_commit=last)
    assert can_all_roll_back([ledger], 0)
    assert can_all_roll_back([ledger, of_windows], 0) is is_taken_back


def test_rollback_takes_the_last_batch_back_and_is_due_it_again():
    ledger = rollback(with_batches(3))
    assert ledger.last_commit.batch_id == 1
    assert (ledger.previous, ledger.last_txid, ledger.owners) == (None, START + 1, {"query-1": 2})
    assert START + 2 not in ledger.view()
    ledger, attempt = began(ledger, 2)
    assert attempt.txid == START + 3
    ledger = commit(ledger, ledger.session, done(attempt.txid, 2))
    assert ledger.dead == ((START + 2, START + 2),)


def test_rollback_of_the_only_batch_leaves_an_empty_state():
    ledger = rollback(with_batches(1))
    assert (ledger.last_commit, ledger.last_txid, ledger.owners) == (None, None, {"query-1": 0})
    ledger = committed(ledger, 0)
    assert ledger.dead == ((START, START),)


def test_rollback_drops_the_dead_that_the_commit_had_made():
    ledger, _ = began(with_batches(1), 1)
    ledger = committed(ledger, 1)
    assert ledger.dead == ((START + 1, START + 1),)
    ledger = rollback(ledger)
    assert ledger.dead == ()
    assert committed(ledger, 1).dead == ((START + 1, START + 2),)


@pytest.mark.parametrize("before", ["adopted records", "a vacuum", "a batch", "nothing"])
def test_rollback_leaves_what_counted_before_the_batch(before):
    ledger = with_batches(1 if before == "a batch" else 0)
    if before == "adopted records":  # see `mapstate.operations.adopt`: no batch, and what is there counts
        ledger = msgspec.structs.replace(ledger, first_txid=0, last_txid=START - 1, next_txid=START)
    if before == "a vacuum":
        ledger, attempt = begin_operator(with_batches(1), "v", "vacuum")
        ledger = commit_vacuum(ledger, attempt.txid)
    batch_id = ledger.owners[ledger.owner]
    after = rollback(committed(began(ledger, batch_id)[0], batch_id))
    assert after.view() == ledger.view()
    assert (after.last_commit, after.owners) == (ledger.last_commit, ledger.owners)


def test_a_commit_of_an_older_mapstate_is_rolled_back_to_the_commit_before_it():
    ledger = with_batches(2)
    older = msgspec.structs.replace(
        ledger, last_commit=msgspec.structs.replace(ledger.last_commit, last_txid_before=None)
    )
    assert rollback(older).last_txid == ledger.previous.txid


def test_rollback_goes_one_step_and_only_while_nothing_has_begun_after_it():
    once = rollback(with_batches(3))
    attempt, _ = began(with_batches(3), 3)
    left_behind = opened(ledger=attempt, owner="query-2", on_new_owner="adopt")
    vacuumed = begin_operator(with_batches(3), "vacuum", "vacuum")[0]
    for ledger in (once, attempt, left_behind, vacuumed, commit_vacuum(vacuumed, START + 3), opened()):
        with pytest.raises(RollbackError):
            rollback(ledger)
    assert rollback(opened(ledger=with_batches(3), owner="query-2", on_new_owner="adopt")).owners["query-1"] == 2


def test_rollback_of_a_batch_that_is_named_takes_no_other_back():
    ledger = with_batches(3)
    assert rollback(ledger, START + 2) == rollback(ledger)
    for other in (0, START + 1, START + 3):
        with pytest.raises(RollbackError, match=f"the last batch is 2 .*not txid {other}"):
            rollback(ledger, other)


@pytest.mark.parametrize("kind", ["transactional", "non-transactional"])
def test_only_opaque_states_can_be_rolled_back(kind):
    with pytest.raises(RollbackError, match=kind):
        rollback(with_batches(2, kind))


def test_a_batch_below_a_rolled_back_gap_is_not_taken_for_committed():
    """Batches 1 to 4 were given up, 5 came and was rolled back: batch 4 still never was here."""
    ledger = rollback(committed(with_batches(1), 5, on_gap="accept"))
    with pytest.raises(StaleBatchError):
        begin(ledger, ledger.session, 4)


# vacuum


def test_vacuum_is_an_attempt_with_a_txid_of_its_own_after_which_nothing_is_dead():
    ledger, _ = began(with_batches(1), 1)
    ledger = committed(ledger, 1)
    before = ledger
    ledger, attempt = begin_operator(ledger, "vacuum", "vacuum")
    assert (attempt.txid, attempt.token) == (START + 3, FenceToken(1, START + 3, nonce="vacuum"))
    assert START + 1 not in attempt.view
    ledger = commit_vacuum(ledger, attempt.txid)
    assert (ledger.dead, ledger.rewrites, ledger.last_txid) == ((), 1, attempt.txid)
    assert (ledger.last_commit, ledger.owners) == (before.last_commit, before.owners)
    assert ledger.fence().closed
    assert commit_vacuum(ledger, attempt.txid) is ledger
    assert begin(ledger, ledger.session, 1)[1].commit == before.last_commit
    assert committed(ledger, 2).dead == ()


def test_a_batch_that_begins_while_a_vacuum_runs_fences_it():
    ledger, vacuum = begin_operator(with_batches(1), "vacuum", "vacuum")
    ledger, attempt = began(ledger, 1)
    with pytest.raises(FencedError):
        commit_vacuum(ledger, vacuum.txid)
    ledger = commit(ledger, ledger.session, done(attempt.txid, 1))
    assert ledger.dead == ((vacuum.txid, vacuum.txid),)


def test_vacuum_waits_until_nothing_is_in_flight():
    ledger, _ = began(with_batches(1), 1)
    with pytest.raises(UsageError):
        begin_operator(ledger, "vacuum", "vacuum")
    ledger, _ = begin_operator(
        opened(ledger=ledger), "vacuum", "vacuum"
    )  # left behind by an older epoch: that one is fenced
    with pytest.raises(UsageError):
        commit(ledger, ledger.session, done(ledger.in_flight.txid, 1))


def test_vacuum_takes_over_where_the_driver_is_gone_and_fences_it_where_it_is_not():
    before, attempt = began(with_batches(1), 1)
    ledger, vacuum = begin_operator(before, "vacuum", "vacuum", take_over=True)
    assert (ledger.epoch, vacuum.txid) == (before.epoch + 1, attempt.txid + 1)
    with pytest.raises(FencedError):
        commit(ledger, before.session, done(attempt.txid, 1))
    ledger = commit_vacuum(ledger, vacuum.txid)
    assert (ledger.dead, ledger.last_txid, ledger.last_commit) == ((), vacuum.txid, before.last_commit)
    ledger = opened(ledger=ledger)
    assert isinstance(begin(ledger, ledger.session, 1)[1], Attempt)  # the batch that was left behind is still due


def test_rewrites_count_from_the_begin_of_a_vacuum_because_it_purges_before_its_end():
    before = with_batches(1)
    ledger, _ = begin_operator(before, "vacuum", "vacuum")
    assert ledger.rewrites == before.rewrites + 1


def test_without_a_fence_what_a_late_writer_brings_is_below_the_floor():
    ledger, late = began(with_batches(1), 1)
    ledger, vacuum = begin_operator(opened(ledger=ledger), "vacuum", "vacuum")
    ledger = commit_vacuum(ledger, vacuum.txid, fenced=False)
    assert ledger.floor == vacuum.txid
    assert ledger.view().values([OpaqueValue(late.txid, 1, None), OpaqueValue(vacuum.txid, 1, 1)], vacuum.txid) == [
        None,
        1,
    ]
    # the last batch's records are no longer told by their txid
    assert begin(ledger, ledger.session, 0)[1].commit is None


@pytest.mark.parametrize("kind", ["transactional", "non-transactional"])
def test_only_opaque_states_are_vacuumed(kind):
    with pytest.raises(UsageError):
        begin_operator(with_batches(1, kind), "vacuum", "vacuum")


# all of it, in any order


class Ledgers(RuleBasedStateMachine):
    """Random transitions, against a model that keeps sets of txids and nothing else.

    The model follows the words of the design: what was begun, what was committed, what was taken back.
    """

    kind = "opaque"

    @initialize()
    def create(self):
        self.ledger = open_ledger(None, opening(self.kind, "query-1", "s0"))
        self.openings = 1
        self.sessions = ["s0"]
        self.attempts = {}  # txid -> batch id, of those whose records may be in the store
        self.counts = set()
        self.due = {"query-1": 0}
        self.ever = set()
        self.fences = [self.ledger.fence()]
        self.open_tokens = set()

    def attempt(self, transition):
        """Applies a transition, unless it refuses; then nothing may have changed."""
        before = encode_ledger(self.ledger)
        try:
            result = transition()
        except MapStateError:
            assert encode_ledger(self.ledger) == before
            return None
        assert encode_ledger(self.ledger) == before, "a transition changed its argument"
        self.ledger = result if isinstance(result, LedgerRecord) else result[0]
        return result

    @rule(owner=st.sampled_from(["query-1", "query-2"]), how=st.sampled_from(["refuse", "adopt", "reset"]))
    def open(self, owner, how):
        same = owner == self.ledger.owner
        session = f"s{self.openings}"
        done = self.attempt(
            lambda: open_ledger(self.ledger, opening(self.kind, owner, session, on_new_owner=how, clock_txid=1))
        )
        if done is None:
            assert not same
            return
        self.openings += 1
        self.sessions.append(session)
        self.due.setdefault(owner, 0)
        yielded = not self.counts and self.ledger.floor == self.ledger.next_txid
        if not same and (how == "reset" or yielded):
            kept = {name: due for name, due in self.due.items() if not due}
            self.attempts, self.counts, self.due = {}, set(), kept | {owner: 0}
            assert self.ledger.floor == self.ledger.next_txid
        elif not same and not self.counts:
            self.due[owner] = 0

    @rule(step=st.integers(-2, 2), gap=st.sampled_from(["refuse", "accept"]), old=st.booleans())
    def begin(self, step, gap, old):
        session = self.sessions[0] if old else self.ledger.session
        batch_id = max(0, self.due[self.ledger.owner] + step)
        done = self.attempt(lambda: begin(self.ledger, session, batch_id, gap))
        if done is None:
            return
        assert session == self.ledger.session
        result = done[1]
        if isinstance(result, AlreadyCommitted):
            assert batch_id == self.due[self.ledger.owner] - 1
            return
        assert batch_id >= self.due[self.ledger.owner]
        assert batch_id == self.due[self.ledger.owner] or gap == "accept" or self.kind == "transactional"
        assert result.txid not in self.counts
        if self.kind == "transactional":
            assert self.attempts.get(result.txid, batch_id) == batch_id
        else:
            assert result.txid not in self.ever
        assert result.view == self.ledger.view()
        self.ever.add(result.txid)
        self.attempts[result.txid] = batch_id

    @rule(old=st.booleans(), back=st.integers(0, 2))
    def commit(self, old, back):
        session = self.sessions[0] if old else self.ledger.session
        txid = self.ledger.next_txid - 1 - back
        batch_id = self.attempts.get(txid)
        if batch_id is None:
            return
        in_flight = self.ledger.in_flight
        done = self.attempt(
            lambda: commit(self.ledger, session, Commit(batch_id=batch_id, txid=txid, owner=self.ledger.owner))
        )
        if done is None or txid in self.counts:
            return
        assert in_flight.txid == txid
        assert in_flight.epoch == self.ledger.epoch
        self.counts.add(txid)
        self.due[self.ledger.owner] = batch_id + 1

    @rule(old=st.booleans())
    def give_up(self, old):
        session = self.sessions[0] if old else self.ledger.session
        self.attempt(lambda: give_up(self.ledger, session))

    @rule()
    def rollback(self):
        last = self.ledger.last_commit
        if self.attempt(lambda: rollback(self.ledger)) is not None:
            assert self.counts, "something was rolled back that never counted"
            self.counts.discard(last.txid)
            self.due[last.owner] = last.batch_id

    @rule(finishes=st.booleans())
    def vacuum(self, finishes):
        done = self.attempt(lambda: begin_operator(self.ledger, "vacuum", "vacuum"))
        if done is None:
            return
        txid = done[1].txid
        assert txid not in self.ever
        self.ever.add(txid)
        if finishes:
            self.attempt(lambda: commit_vacuum(self.ledger, txid))
            assert self.ledger.last_txid == txid
            # Records of orphaned attempts are gone; those that count stay.
            self.attempts = {one: batch for one, batch in self.attempts.items() if one in self.counts}

    @invariant()
    def the_fence_never_moves_down_and_never_reopens(self):
        fence = self.ledger.fence()
        assert fence >= self.fences[-1]
        if not fence.closed:
            assert fence == self.fences[-1] or fence not in self.open_tokens
            self.open_tokens.add(fence)
        self.fences.append(fence)

    @invariant()
    def exactly_what_was_committed_counts(self):
        view = self.ledger.view()
        assert {txid for txid in self.attempts if txid in view} == self.counts & set(self.attempts)

    @invariant()
    def the_record_is_well_formed(self):
        ledger = self.ledger
        assert ledger.owners == self.due
        flat = [txid for span in ledger.dead for txid in span]
        assert flat == sorted(flat)
        assert all(low <= high for low, high in ledger.dead)
        assert all(one[1] < other[0] for one, other in zip(ledger.dead, ledger.dead[1:], strict=False))
        last = -1 if ledger.last_txid is None else ledger.last_txid
        assert not flat or flat[-1] < last
        assert last < ledger.next_txid
        assert ledger.next_txid > max(self.ever, default=-1)
        assert decode_ledger(encode_ledger(ledger), ledger.state) == ledger


class TransactionalLedgers(Ledgers):
    kind = "transactional"


class NonTransactionalLedgers(Ledgers):
    kind = "non-transactional"


for machine in (Ledgers, TransactionalLedgers, NonTransactionalLedgers):
    machine.TestCase.settings = settings(max_examples=100, stateful_step_count=40)

TestOpaqueLedgers = Ledgers.TestCase
TestTransactionalLedgers = TransactionalLedgers.TestCase
TestNonTransactionalLedgers = NonTransactionalLedgers.TestCase


def test_a_follower_may_lack_the_batch_that_comes_again_and_nothing_else():
    one, two = with_batches(1), with_batches(2)
    for found in ((None, None), (None, one), (one, one), (two, one), (two, two)):
        check_follower(found, "query-1", ["refuse", "refuse"], 1, None)
    check_follower((one, None), "query-1", ["refuse", "refuse"], 0, None)
    for lacks, batch_id, said in (
        ((one, None), 1, "a state that follows"),
        ((two, one), 2, "Rewind the checkpoint"),
    ):
        with pytest.raises(MissingBatchesError, match=said):
            check_follower(lacks, "query-1", ["refuse", "refuse"], batch_id, None)
    with pytest.raises(MissingBatchesError, match="Nothing was written. Restore both from one moment"):
        check_follower((with_batches(3), one), "query-1", ["refuse", "refuse"], 3, None)
    with pytest.raises(MissingBatchesError, match="has still to get batch 1: it was rolled back") as raised:
        check_follower((one, two), "query-1", ["refuse", "refuse"], 1, None)
    assert (raised.value.found, raised.value.expected) == (2, 1)


# batches that Spark planned anew


def planned(number, start, end, after=None):
    return BatchPlan(f"[{start}]", f"[{end}]", 1000 + number, None if after is None else 1000 + after)


def with_plans(*plans, kind="opaque"):
    ledger = opened(kind)
    for batch_id, plan in enumerate(plans):
        ledger = committed(ledger, batch_id, plan=plan, on_gap="accept")
    return ledger


FIRST, SECOND = planned(1, 0, 5), planned(2, 5, 8, after=1)


def test_a_committed_batch_with_the_plan_that_it_had_is_a_replay():
    for kind in KINDS:
        ledger = with_plans(FIRST, SECOND, kind=kind)
        after, attempt = begin(ledger, ledger.session, 1, plan=SECOND)
        assert after is ledger
        assert attempt == AlreadyCommitted(1, ledger.last_commit, ledger.view())


@pytest.mark.parametrize("end", [6, 8, 9])
def test_a_committed_batch_that_is_planned_anew_is_rolled_back_and_begun_in_one_step(end):
    ledger = with_plans(FIRST, SECOND)
    after, attempt = began(ledger, 1, plan=planned(3, 5, end, after=1))
    assert attempt.txid == ledger.next_txid
    assert ledger.last_txid not in attempt.view
    assert after == began(rollback(ledger), 1, plan=planned(3, 5, end, after=1))[0]
    again = committed(opened(ledger=after), 1, plan=planned(3, 5, end, after=1))
    assert again.last_commit.plan == planned(3, 5, end, after=1).digest()
    assert ledger.last_txid not in again.view()


@pytest.mark.parametrize(
    ("ledger", "why"),
    [
        (with_plans(FIRST, SECOND, kind="transactional"), "only opaque records"),
        (with_plans(FIRST, SECOND, kind="non-transactional"), "only opaque records"),
        (began(with_plans(FIRST, SECOND), 2)[0], "a later attempt has begun"),
        (
            commit_vacuum(begin_operator(with_plans(FIRST, SECOND), "v", "vacuum")[0], START + 2),
            "a later attempt has begun",
        ),
        (with_plans(FIRST, planned(2, 4, 8, after=1)), "do not start at the same offsets"),
        (with_plans(FIRST, planned(2, 5, 8, after=0)), "do not start at the same offsets"),
    ],
)
def test_a_batch_that_is_planned_anew_is_refused_where_it_cannot_take_the_others_place(ledger, why):
    with pytest.raises(ReplannedBatchError, match=why) as refused:
        begin(ledger, ledger.session, 1, plan=planned(3, 5, 9, after=1))
    assert refused.value.found == "[9]"


def test_a_batch_has_to_start_where_the_one_before_it_ended():
    ledger = with_plans(FIRST, SECOND)
    for wrong in (planned(3, 7, 9, after=2), planned(3, 8, 9, after=1)):
        with pytest.raises(ReplannedBatchError, match="count twice or not at all"):
            begin(ledger, ledger.session, 2, plan=wrong)
        began(ledger, 2, on_gap="accept", plan=wrong)
    began(ledger, 2, plan=planned(3, 8, 9, after=2))
    began(ledger, 2, plan=BatchPlan("[8]", "[9]"))


def test_what_another_query_planned_says_nothing_of_this_one():
    ledger = opened(ledger=with_plans(FIRST, SECOND), owner="query-2", on_new_owner="adopt")
    began(ledger, 0, plan=planned(7, 8, 9))


def test_a_transactional_attempt_is_repeated_with_its_own_plan_only():
    ledger, attempt = began(with_plans(FIRST, kind="transactional"), 1, plan=SECOND)
    ledger = opened("transactional", ledger=ledger)
    assert began(ledger, 1, plan=SECOND)[1].txid == attempt.txid
    with pytest.raises(ReplannedBatchError, match="has to be identical"):
        begin(ledger, ledger.session, 1, plan=planned(3, 5, 8, after=1))


def test_a_batch_that_is_given_by_hand_has_no_plan_and_keeps_the_rules_without_one():
    ledger = with_plans(FIRST, SECOND)
    assert isinstance(begin(ledger, ledger.session, 1)[1], AlreadyCommitted)
    began(ledger, 2)


def older(ledger, at=""):
    """The ledger as it would be of a mapstate that kept no plans."""
    offsets = {"last_commit": "[8]", "previous": '[{"logOffset":5,"source":"files","newest":1,"paths":[]}]'}
    commits = {
        name: msgspec.structs.replace(getattr(ledger, name), plan=None, offsets=text, at=at)
        for name, text in offsets.items()
    }
    return msgspec.structs.replace(ledger, **commits)


def test_without_a_plan_in_the_ledger_offsets_are_compared_and_the_time_of_the_commit():
    ledger = older(with_batches(2), at="2026-11-21T00:00:00+00:00")
    noon = 1_795_262_400_000  # of that day
    start = '[{"logOffset":5}]'
    replay = BatchPlan(start, "[8]", noon - 86_400_000, 3)
    assert isinstance(begin(ledger, ledger.session, 1, plan=replay)[1], AlreadyCommitted)
    for anew in (replay._replace(end="[9]"), replay._replace(planned_at=noon)):
        began(ledger, 1, plan=anew)
    with pytest.raises(ReplannedBatchError, match="do not start at the same"):
        begin(ledger, ledger.session, 1, plan=replay._replace(start='[{"logOffset":4}]'))
    began(ledger, 2, plan=BatchPlan("[8]", "[9]", noon, 4))
    with pytest.raises(ReplannedBatchError, match="count twice or not at all"):
        begin(ledger, ledger.session, 2, plan=BatchPlan("[7]", "[9]", noon, 4))


def test_a_commit_without_plan_and_offsets_is_judged_by_its_time():
    """As `mapstate adopt` makes it for a state that lost its ledger."""
    ledger = older(with_batches(2), at="2026-11-21T00:00:00+00:00")
    ledger = msgspec.structs.replace(ledger, last_commit=msgspec.structs.replace(ledger.last_commit, offsets=None))
    before = BatchPlan("[5]", "[8]", 1_795_000_000_000)
    assert isinstance(begin(ledger, ledger.session, 1, plan=before)[1], AlreadyCommitted)
    with pytest.raises(ReplannedBatchError, match="do not start at the same"):
        begin(ledger, ledger.session, 1, plan=before._replace(planned_at=1_796_000_000_000))


def test_a_batch_of_before_another_owner_that_is_planned_anew_is_refused():
    mine = with_plans(FIRST, SECOND)
    theirs = committed(opened(ledger=mine, owner="query-2", on_new_owner="adopt"), 0)  # at 2026-11-21
    again = opened(ledger=theirs, on_new_owner="adopt")
    assert begin(again, again.session, 1, plan=SECOND)[1] == AlreadyCommitted(1, None, again.view())
    with pytest.raises(ReplannedBatchError, match="before query query-2 took it"):
        begin(again, again.session, 1, plan=planned(1_796_000_000_000, 5, 9, after=1))


def test_what_follows_a_follower_is_asked_as_if_that_one_counted_the_batch_anew():
    first, second = with_plans(FIRST), with_plans(FIRST, SECOND._replace(upstream_txid=START))
    its_plan = check_follower((first, second), "query-1", ["refuse", "refuse"], 1, SECOND)
    third = with_plans(FIRST, SECOND._replace(upstream_txid=START), kind="transactional")
    with pytest.raises(ReplannedBatchError, match="only opaque records"):
        check_follower((second, third), "query-1", ["refuse", "refuse"], 1, its_plan)


def test_a_follower_of_a_state_that_counts_a_batch_anew_has_to_do_so_too():
    anew, how = planned(3, 5, 9, after=1), ["refuse", "refuse"]
    two, one = with_plans(FIRST, SECOND), with_plans(FIRST)
    for found in ((two, two), (two, one), (one, two)):
        check_follower(found, "query-1", how, 1, anew)
    stuck = began(two, 2)[0]
    for found in ((two, stuck), (one, stuck), (stuck, two)):
        with pytest.raises(ReplannedBatchError, match="a later attempt"):
            check_follower(found, "query-1", how, 1, anew)
    with pytest.raises(MissingBatchesError, match="rolled back or restored by itself"):
        check_follower((two, with_plans(FIRST, anew)), "query-1", how, 1, anew)


def test_a_follower_counts_a_batch_anew_for_a_later_commit_of_what_it_follows_and_for_no_earlier_one():
    ledger = with_plans(FIRST, SECOND._replace(upstream_txid=50))
    assert isinstance(begin(ledger, ledger.session, 1, plan=SECOND._replace(upstream_txid=50))[1], AlreadyCommitted)
    began(ledger, 1, plan=SECOND._replace(upstream_txid=51))
    with pytest.raises(FencedError, match="as of a later commit than txid 49"):
        begin(ledger, ledger.session, 1, plan=SECOND._replace(upstream_txid=49))
    behind = with_plans(FIRST)
    assert behind.next_txid > 50
    check_follower((behind, ledger), "query-1", ["refuse", "refuse"], 1, SECOND)
    restored = msgspec.structs.replace(behind, next_txid=50)  # it gives out its txids again
    with pytest.raises(MissingBatchesError, match="rolled back or restored by itself"):
        check_follower((restored, ledger), "query-1", ["refuse", "refuse"], 1, SECOND)


def test_a_state_and_its_follower_are_taken_over_with_the_same_batches():
    one, two = with_batches(1), with_batches(2)
    for found in ((None, None), (two, two), (opened(), None)):
        check_follower(found, "query-2", ["adopt", "adopt"], 1, None)
    for found in ((two, one), (two, None), (None, one)):
        with pytest.raises(MissingBatchesError, match="differ for ever"):
            check_follower(found, "query-2", ["adopt", "adopt"], 1, None)
    check_follower((two, one), "query-2", ["reset", "reset"], 1, None)
    with pytest.raises(MissingBatchesError, match="with nothing, and .* with batch 0 of query-1"):
        check_follower((two, one), "query-2", ["reset", "adopt"], 1, None)
    taken = open_ledger(two, opening(owner="query-2", on_new_owner="adopt"))
    check_follower((taken, two), "query-2", ["adopt", "adopt"], 1, None)  # the driver died before it opened the second
