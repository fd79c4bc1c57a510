"""The ledger in its store: compare-and-set, lost replies, lost stores; over all that a store may offer."""

from __future__ import annotations

import contextlib
import sqlite3

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from one_ledger import OneLedger

from mapstate.backends.memory import MemoryStore
from mapstate.backends.sqlite import SqliteBackend, SqliteStore
from mapstate.errors import (
    CorruptRecordError,
    FencedError,
    LedgerLostError,
    MapStateError,
    MissingBatchesError,
    StateNotFoundError,
    StateOwnershipError,
    StoreLostError,
    StoreRestartedError,
    StoreUnavailableError,
    UsageError,
)
from mapstate.maps import OpaqueMap
from mapstate.maps.serialized import SerializedMap
from mapstate.protocol.ledger import Ledger, give_up, say_what_fenced
from mapstate.protocol.ledger_record import AlreadyCommitted, Commit, OpenRequest, encode_ledger, now
from mapstate.protocol.opening import clock_txid
from mapstate.protocol.records import OpaqueValue
from mapstate.protocol.stored_ledger import LEDGER_KEY, decode_ledger, ledger_store, read_ledger
from mapstate.schema import Field, KeyField
from mapstate.serializers import RecordCodec, serializer

START = 1000
VISITS = Field("visits", "Count", "bigint")


class PlainStore:
    """What a store author has to write, and nothing beside it."""

    def __init__(self):
        self.records = {}

    def multi_get(self, keys):
        return [self.records.get(key) for key in keys]

    def multi_put(self, keys, values):
        self.records.update(zip(keys, values, strict=True))


def drop_ledger(store):
    if isinstance(store, PlainStore):
        del store.records[LEDGER_KEY]
    elif isinstance(store, MemoryStore):
        store._ledger = None
    else:
        with contextlib.closing(sqlite3.connect(store._database.path)) as db, db:
            db.execute("DELETE FROM mapstate_ledgers")


@pytest.fixture(params=["memory", "sqlite", "plain"])
def store(request, tmp_path):
    if request.param == "memory":
        yield MemoryStore()
    elif request.param == "plain":
        yield PlainStore()
    else:
        with contextlib.closing(SqliteBackend(str(tmp_path / "ledger.db")).open("s")) as store:
            yield store


def opening(owner="query-1", session="", **changes):
    return OpenRequest(
        **{
            "state": "s",
            "type": "opaque",
            "serializer": "json",
            "keys": (KeyField("k", "string"),),
            "fields": (VISITS,),
            "owner": owner,
            "session": session,
            "clock_txid": START,
        }
        | changes
    )


def opened(store, **changes):
    return OneLedger.open(store, opening(**changes))


def done(attempt, owner="query-1"):
    return Commit(batch_id=attempt.batch_id, txid=attempt.txid, owner=owner)


def run_batch(ledger, batch_id):
    attempt = ledger.begin(batch_id)
    ledger.commit(done(attempt, ledger.record.owner))
    return attempt


def run_vacuum(operator):
    operator.commit_vacuum(operator.begin_operator("vacuum").txid)


def stored(store):
    """The bytes of the ledger, None where there is none."""
    found = ledger_store(store).load()
    return None if found is None else found[0]


def test_a_ledger_lives_in_its_store(store):
    ledger = opened(store)
    assert run_batch(ledger, 0).txid == START
    assert run_batch(ledger, 1).txid == START + 1
    assert read_ledger(store, "s") == ledger.record
    again = opened(store)
    assert (again.record.epoch, again.record.last_commit.batch_id) == (2, 1)
    assert run_batch(again, 2).txid == START + 2


def test_openings_without_a_session_are_told_apart(store):
    assert opened(store).record.session != opened(store).record.session


def test_a_state_that_is_not_there_is_named():
    for store in (MemoryStore(), PlainStore()):
        with pytest.raises(StateNotFoundError) as caught:
            read_ledger(store, "visits")
        assert caught.value.state == "visits"


def test_a_refused_batch_leaves_everything_as_it_was(store):
    with pytest.raises(MissingBatchesError):
        OneLedger.open_and_begin(store, opening(), 7)
    assert stored(store) is None
    run_batch(opened(store), 0)
    before = stored(store)
    for refused, batch_id in ((opening(), 7), (opening(owner="query-2"), 0)):
        with pytest.raises((MissingBatchesError, StateOwnershipError)):
            OneLedger.open_and_begin(store, refused, batch_id)
        assert stored(store) == before
    ledger, attempt = OneLedger.open_and_begin(store, opening(), 1)
    assert (attempt.txid, ledger.record.epoch) == (START + 1, 2)
    assert ledger.record.fence() == attempt.token


# Two drivers


def test_a_driver_that_was_replaced_is_fenced_at_its_next_step(store):
    old = opened(store)
    attempt = old.begin(0)
    new = opened(store)
    for step in (lambda: old.begin(0), lambda: old.commit(done(attempt))):
        with pytest.raises(FencedError):
            step()
    assert run_batch(new, 0).txid == START + 1
    assert attempt.txid not in new.record.view()


class Restarting:
    """A store whose incarnations can be told apart, as those of a server."""

    def __init__(self):
        self.incarnation = 0
        self.held = None

    def load(self):
        return None if self.held is None else (self.held, (self.held, self.incarnation))

    def swap(self, record, expected, fence):
        if expected != (None if self.held is None else (self.held, self.incarnation)):
            return None
        self.held = record
        return record, self.incarnation


@pytest.mark.parametrize("what", ["batch", "vacuum"])
def test_what_was_begun_in_one_incarnation_of_the_store_is_not_committed_in_the_next(what):
    """A server started again, or its replica, has the ledger; records that it acknowledged may be lost."""
    store = Restarting()
    ledger, vacuum = OneLedger.open(store, opening()), Ledger(store, "s")

    def begin():
        return ledger.begin(1) if what == "batch" else vacuum.begin_operator("vacuum", take_over=True)

    def commit(attempt):
        ledger.commit(done(attempt)) if what == "batch" else vacuum.commit_vacuum(attempt.txid)

    run_batch(ledger, 0)
    attempt = begin()
    store.incarnation += 1
    with pytest.raises(StoreRestartedError, match="may have lost records"):
        commit(attempt)
    again = begin()
    commit(again)
    assert read_ledger(store, "s").last_txid == again.txid
    store.incarnation += 1  # between two batches nothing can be lost that the ledger does not tell
    if what == "batch":
        run_batch(ledger, 2)


def test_a_recount_beside_an_attempt_hides_no_other_incarnation():
    """It changes the ledger, but not the attempt; the failover may come before it or after it."""
    store = Restarting()
    ledger = OneLedger.open(store, opening())
    run_batch(ledger, 0)
    attempt = ledger.begin(1)
    operators = Ledger(store, "s")
    operators.remember()
    operators.recount(operators.record, 7)
    store.incarnation += 1
    with pytest.raises(StoreRestartedError, match="may have lost records"):
        ledger.commit(done(attempt))
    again = ledger.begin(1)
    ledger.commit(done(again))
    assert (ledger.record.last_txid, ledger.record.dead) == (again.txid, ((attempt.txid, attempt.txid),))


def test_a_recount_passes_for_a_restart_only_where_it_has_changed_the_ledger_beside_an_attempt():
    """Not where a driver gives its attempt up during the count, nor where the number is an equal one."""
    store = Restarting()
    ledger = OneLedger.open(store, opening())
    run_batch(ledger, 0)
    operators = Ledger(store, "s")

    def recount(number, meanwhile=lambda: None):
        operators.remember()
        meanwhile()
        operators.recount(operators.record, number)

    ledger.begin(1)
    recount(7, lambda: give_up(ledger.ledgers))
    assert operators.record.keys_held() == 7
    attempt = ledger.begin(1)
    recount(7)
    ledger.commit(done(attempt))


def test_a_recount_beside_a_vacuum_is_refused():
    """The vacuum could not tell it from a restart."""
    store = Restarting()
    run_batch(OneLedger.open(store, opening()), 0)
    operators, vacuum = Ledger(store, "s"), Ledger(store, "s")
    attempt = vacuum.begin_operator("vacuum", take_over=True)
    operators.remember()
    with pytest.raises(UsageError, match="has a vacuum in flight"):
        operators.recount(operators.record, 9)
    vacuum.commit_vacuum(attempt.txid)
    assert vacuum.record.last_txid == attempt.txid


def test_a_recount_beside_a_batch_that_was_committed_meanwhile_is_refused_with_an_equal_number_too():
    store = Restarting()
    ledger = OneLedger.open(store, opening())
    run_batch(ledger, 0)
    operators = Ledger(store, "s")
    counted = operators.remember()
    run_batch(ledger, 1)
    with pytest.raises(UsageError, match="a batch was committed"):
        operators.recount(counted, counted.keys_held())


class Between:
    """Runs something once, just before the next swap: the worst moment for another driver to act."""

    def __init__(self, store, what):
        self._store = ledger_store(store)
        self._what = what

    def load(self):
        return self._store.load()

    def swap(self, record, expected, fence):
        what, self._what = self._what, None
        if what is not None:
            what()
        return self._store.swap(record, expected, fence)


def test_of_two_that_open_at_once_the_later_has_the_state(store):
    others = []
    mine = OneLedger.open(Between(store, lambda: others.append(opened(store))), opening())
    assert (others[0].record.epoch, mine.record.epoch) == (1, 2)
    with pytest.raises(FencedError):
        others[0].begin(0)
    run_batch(mine, 0)


def test_a_driver_that_is_overtaken_between_read_and_write_changes_nothing(store):
    opened(store, session="first")
    others = []
    mine = OneLedger(Between(store, lambda: others.append(opened(store))), opening(session="first"))
    with pytest.raises(FencedError):
        mine.begin(0)
    assert read_ledger(store, "s") == others[0].record
    run_batch(others[0], 0)


def test_a_vacuum_of_another_process_and_a_batch_that_begins_do_not_lose_each_other(store):
    driver = opened(store)
    run_batch(driver, 0)
    vacuum = Ledger(store, "s").begin_operator("vacuum")
    attempt = driver.begin(1)  # knows nothing of it yet
    assert attempt.txid == vacuum.txid + 1
    with pytest.raises(FencedError):
        Ledger(store, "s").commit_vacuum(vacuum.txid)
    driver.commit(done(attempt))
    assert driver.record.dead == ((vacuum.txid, vacuum.txid),)


@pytest.mark.parametrize("store", ["memory", "sqlite"], indirect=True)
def test_the_fence_of_the_store_follows_the_ledger(store):
    old = opened(store)
    first = old.begin(0)
    store.writer(first.token).multi_put(["a"], [b"1"])
    second = old.begin(0)
    with pytest.raises(FencedError):
        store.writer(first.token).multi_put(["a"], [b"2"])
    writer = store.writer(second.token)
    writer.multi_put(["a"], [b"3"])
    old.commit(done(second))
    with pytest.raises(FencedError):
        writer.multi_put(["a"], [b"4"])
    third = old.begin(1)
    opened(store)
    with pytest.raises(FencedError):
        store.writer(third.token).multi_put(["a"], [b"5"])
    assert store.multi_get(["a"]) == [b"3"]


@pytest.mark.parametrize("store", ["memory", "sqlite"], indirect=True)
def test_a_closed_token_lets_nobody_write(store):
    ledger = opened(store)
    for closed in (ledger.record.fence(), run_batch(ledger, 0) and ledger.record.fence()):
        assert closed.closed
        with pytest.raises(FencedError):
            store.writer(closed).multi_put(["a"], [b"1"])
    assert store.multi_get(["a"]) == [None]


# Lost replies


class Lossy:
    """Loses the replies of writes by script: ``"applied"`` and ``"lost"`` writes raise, others go through.

    ``on_applied`` runs between an ``"applied"`` write and its error.
    """

    on_applied = None

    def __init__(self, store, script=()):
        self._store = store
        self.script = list(script)

    def _lossy(self, write, *args):
        fate = self.script.pop(0) if self.script else "ok"
        if fate == "lost":
            raise StoreUnavailableError("never arrived")
        result = write(*args)
        if fate == "applied":
            if self.on_applied is not None:
                self.on_applied()
            raise StoreUnavailableError("the reply was lost")
        return result


class LossySwaps(Lossy):
    def load(self):
        return self._store.load()

    def swap(self, record, expected, fence):
        return self._lossy(self._store.swap, record, expected, fence)


class LossyPuts(Lossy):
    def multi_get(self, keys):
        return self._store.multi_get(keys)

    def multi_put(self, keys, values):
        self._lossy(self._store.multi_put, keys, values)


def lossy(store):
    return LossyPuts(store) if isinstance(store, PlainStore) else LossySwaps(store)


STEPS = {
    "open": lambda store, ledger: opened(store, session="two"),
    "open and begin": lambda store, ledger: OneLedger.open_and_begin(store, opening(session="two"), 2),
    "begin": lambda store, ledger: ledger.begin(ledger.record.owners["query-1"]),
    "commit": lambda store, ledger: ledger.commit(done(ledger.begin(2))),
    "rollback": lambda store, ledger: ledger.operator.rollback(),
    "begin vacuum": lambda store, ledger: ledger.operator.begin_operator("vacuum"),
    "commit vacuum": lambda store, ledger: run_vacuum(ledger.operator),
}


def result_of(step, store, script, writes_before=0):
    wrapped = lossy(store)
    ledger = OneLedger.open(wrapped, opening(session="one"))
    for batch_id in range(2):
        run_batch(ledger, batch_id)
    wrapped.script = ["ok"] * writes_before + list(script)
    STEPS[step](wrapped, ledger)
    assert wrapped.script == []
    after = decode_ledger(stored(store), "s")
    if after.in_flight is None:
        return after
    in_flight = msgspec.structs.replace(after.in_flight, nonce="", at="")  # which are random, and of the clock
    return msgspec.structs.replace(after, in_flight=in_flight)


@pytest.mark.parametrize("script", [["applied"], ["lost"], ["lost", "lost", "applied"]], ids="-".join)
@pytest.mark.parametrize("step", list(STEPS))
def test_a_lost_reply_neither_loses_nor_doubles_a_transition(step, script, store):
    writes_before = 1 if step.startswith("commit") else 0
    with_faults = result_of(step, store, script, writes_before)
    assert with_faults == result_of(step, MemoryStore() if isinstance(store, SqliteStore) else type(store)(), [])


@settings(max_examples=100)
@given(
    st.booleans(),
    st.lists(st.sampled_from(["ok", "applied", "lost"]), max_size=40),
    st.lists(st.sampled_from(["attempt", "commit", "open"]), max_size=12),
)
def test_whatever_replies_are_lost_the_ledger_is_as_if_none_was(plain, script, steps):
    """A driver that is told of a failure is replaced, as Spark does it; batches are never skipped or redone."""
    if any(script[at : at + 8].count("ok") == 0 for at in range(max(1, len(script) - 7))):
        script = []  # a store that never answers is another test
    store = PlainStore() if plain else MemoryStore()
    wrapped = lossy(store)
    wrapped.script = script
    ledger, batch_id, attempts = opened(wrapped), 0, 0
    for step in steps:
        if step == "open":
            ledger = opened(wrapped)
            continue
        attempt = ledger.begin(batch_id)
        assert attempt.txid == START + attempts
        attempts += 1
        if step == "commit":
            ledger.commit(done(attempt))
            batch_id += 1
    record = decode_ledger(stored(store), "s")
    assert record.next_txid == START + attempts
    assert record.epoch == 1 + steps.count("open")
    assert record.owners == {"query-1": batch_id}


def test_a_commit_whose_reply_was_lost_to_a_newer_driver_counts_once(store):
    wrapped = lossy(store)
    old = opened(wrapped)
    attempt = old.begin(0)
    news = []
    wrapped.script, wrapped.on_applied = ["applied"], lambda: news.append(opened(store))
    with pytest.raises(FencedError):
        old.commit(done(attempt))
    result = news[0].begin(0)
    assert isinstance(result, AlreadyCommitted)
    assert result.commit.txid == attempt.txid


def test_a_store_that_stays_away_is_reported_as_that(store):
    wrapped = lossy(store)
    ledger = opened(wrapped)
    before = stored(store)
    wrapped.script = ["lost"] * 100
    with pytest.raises(StoreUnavailableError):
        ledger.begin(0)
    assert len(wrapped.script) > 80
    assert stored(store) == before
    wrapped.script = []
    assert run_batch(ledger, 0).txid == START


def test_a_ledger_that_others_change_all_the_time_gives_up(store):
    class Contended(Between):
        def swap(self, record, expected, fence):
            return None

    opened(store, session="one")
    ledger = OneLedger(Contended(store, None), opening(session="one"))
    with pytest.raises(FencedError, match="tries"):
        ledger.begin(0)


# Loss


@pytest.mark.parametrize("step", ["begin", "commit", "rollback", "begin vacuum"])
def test_a_ledger_that_vanished_stops_the_stream_and_is_not_made_anew(step, store):
    ledger = opened(store)
    run_batch(ledger, 0)
    attempt = ledger.begin(1) if step == "commit" else None
    drop_ledger(store)
    with pytest.raises(StoreLostError) as caught:
        ledger.commit(done(attempt)) if attempt else STEPS[step](store, ledger)
    assert caught.value.state == "s"
    assert stored(store) is None


def test_a_ledger_that_was_lost_and_made_anew_fences_the_driver_of_the_old_one(store):
    old = opened(store)
    old.begin(0)
    drop_ledger(store)
    new = opened(store)
    assert new.record.epoch == 1
    with pytest.raises(FencedError):
        old.begin(0)


def test_a_ledger_put_back_from_an_older_copy_takes_no_commit(store):
    ledger = opened(store)
    run_batch(ledger, 0)
    copy = stored(store)
    attempt = ledger.begin(1)
    drop_ledger(store)
    ledger_store(store).swap(copy, None, decode_ledger(copy, "s").fence())
    with pytest.raises(StoreRestartedError, match="put back to an older copy"):
        ledger.commit(done(attempt))
    assert stored(store) == copy
    ledger.commit(done(ledger.begin(1)))  # as a driver does
    assert ledger.record.last_commit.batch_id == 1


def test_a_copy_of_before_the_driver_opened_is_no_second_driver(store):
    run_batch(opened(store), 0)
    copy = stored(store)
    ledger = opened(store)
    attempt = ledger.begin(1)

    def put_back():
        drop_ledger(store)
        ledger_store(store).swap(copy, None, decode_ledger(copy, "s").fence())

    put_back()
    with pytest.raises(StoreRestartedError, match="put back to an older copy"):
        ledger.commit(done(attempt))
    with pytest.raises(StoreRestartedError, match="Start the query again"):
        ledger.begin(1)
    with pytest.raises(StoreRestartedError):
        say_what_fenced(ledger.ledgers)
    run_batch(opened(store), 1)  # as the message says
    ledger = opened(store)
    run_batch(ledger, 2)
    put_back()
    with pytest.raises(
        MissingBatchesError, match=r"brings batch 3, .* still to get batch 1.*with_empty_batches.*Rewind"
    ):
        ledger.begin(3)
    assert stored(store) == copy


def test_a_second_driver_is_still_told_as_one(store):
    ledger = opened(store)
    ledger.begin(0)
    opened(store).begin(0)
    say_what_fenced(ledger.ledgers)
    with pytest.raises(FencedError, match="Two running copies"):
        ledger.begin(0)


def test_records_older_than_their_ledger_are_met_with_an_error_and_not_overwritten(store):
    codec = RecordCodec(serializer("json"), "s", "opaque", [VISITS], [(0, 1)])
    records = SerializedMap(store, codec)
    attempt = opened(store).begin(0)
    records.multi_put(["a"], [OpaqueValue(START - 1, 41, 40)])
    state = OpaqueMap(records, attempt.view)
    state.begin_commit(attempt.txid)
    for key in ("a", "b"):  # one chunk, one of them old
        with pytest.raises(LedgerLostError) as caught:
            state.multi_update([key, "a"], [lambda value: 1] * 2)
        assert (caught.value.found, caught.value.first_txid) == (START - 1, START)
    assert records.multi_get(["a", "b"]) == [(START - 1, 41, 40), None]


@pytest.mark.parametrize("store", ["memory", "sqlite"], indirect=True)  # which can list their keys
@pytest.mark.parametrize("txid", [START - 1, START, START + 5], ids=["older", "as the new one's", "newer"])
def test_no_ledger_is_made_where_records_lie_without_one(store, txid):
    """Whatever the clock says: a txid that is given out again would make an earlier incarnation's record count."""
    codec = RecordCodec(serializer("json"), "s", "opaque", [VISITS], [(0, 1)])
    SerializedMap(store, codec).multi_put(["a"], [OpaqueValue(txid, 41, 40)])
    for make in (lambda: opened(store), lambda: OneLedger.open_and_begin(store, opening(), 0)):
        with pytest.raises(LedgerLostError, match="records but no ledger"):
            make()
    assert ledger_store(store).load() is None


@pytest.mark.parametrize("store", ["memory", "sqlite"], indirect=True)
def test_a_driver_that_makes_the_ledger_at_the_same_moment_is_no_lost_ledger(store):
    """The second one found none, and then the records of the first one's batch."""
    ledger = ledger_store(store)
    load = ledger.load

    def made_meanwhile():
        found = load()
        if found is None:
            store.load = load
            first = opened(store)
            attempt = first.begin(0)
            store.writer(attempt.token).multi_put(["a"], [b"[%d,1,null]" % attempt.txid])
        return found

    store.load = made_meanwhile
    second = opened(store)
    assert second.record.epoch == 2


# Damage


def swapped_for(store, data):
    """The store with other bytes where its ledger was."""
    version = ledger_store(store).load()
    ledger_store(store).swap(data, None if version is None else version[1], Ledger(store, "s").record.fence())


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: b"not a ledger",
        lambda data: data[:-5],
        lambda data: b"null",
        lambda data: b"[]",
        lambda data: data.replace(b'"format":1', b'"format":2'),
        lambda data: data.replace(b'"state":"s"', b'"state":"other"'),
        lambda data: data.replace(b'"epoch":1', b'"epoch":"1"'),
        lambda data: data.replace(b'"type":"opaque"', b'"type":"clear"'),
        lambda data: b"\xff" + data,
        lambda data: data.replace(b"query-1", b"\xff\xfe"),
        lambda data: b"[" * 100_000,
    ],
    ids=["empty", "text", "cut", "null", "list", "format", "state", "types", "kind", "byte", "utf-8", "deep"],
)
def test_a_damaged_ledger_is_an_error_everywhere_and_never_overwritten(store, damage):
    first = opened(store)
    damaged = damage(stored(store))
    swapped_for(store, damaged)
    for step in (
        lambda: opened(store),
        lambda: opened(store, owner="query-2", on_new_owner="reset"),
        lambda: OneLedger.open_and_begin(store, opening(), 0),
        lambda: read_ledger(store, "s"),
        lambda: first.begin(0),
        lambda: Ledger(store, "s").rollback(),
    ):
        with pytest.raises(CorruptRecordError) as caught:
            step()
        assert caught.value.state == "s"
    assert stored(store) == damaged


@settings(max_examples=300)
@given(st.data())
def test_a_ledger_with_any_byte_changed_is_read_or_refused_and_nothing_else(data):
    store = MemoryStore()
    run_batch(opened(store), 0)
    good = stored(store)
    at = data.draw(st.integers(0, len(good)))
    noise = data.draw(st.binary(max_size=3))
    bad = good[:at] + noise + good[at + data.draw(st.integers(0, 3)) :]
    with contextlib.suppress(CorruptRecordError):
        assert encode_ledger(decode_ledger(bad, "s"))


# Small things


def test_a_new_ledgers_txids_come_from_the_clock(monkeypatch):
    assert 0 <= clock_txid() <= clock_txid()
    monkeypatch.setattr("time.time", lambda: 0.0)
    assert clock_txid() == 0
    monkeypatch.setattr("time.time", lambda: 1767225600.0 + 12.34)
    assert clock_txid() == 123


def test_an_attempt_says_when_it_was_begun_and_one_of_an_older_mapstate_is_read_all_the_same(store):
    before = now()
    ledger = opened(store)
    for begin in (lambda: ledger.begin(0), lambda: ledger.operator.begin_operator("vacuum", take_over=True)):
        begin()
        in_flight = read_ledger(store, "s").in_flight
        assert before <= in_flight.at <= now()
    without = stored(store).replace(f',"at":"{in_flight.at}"'.encode(), b"")
    assert without != stored(store)
    assert decode_ledger(without, "s").in_flight == msgspec.structs.replace(in_flight, at="")


def test_a_ledger_is_one_line_of_json_that_can_be_read_in_a_shell(store):
    run_batch(opened(store), 0)
    text = stored(store).decode()
    assert "\n" not in text
    assert '"committed":{"batch_id":0,"txid":1000' in text


def test_every_refusal_is_one_of_ours(store):
    ledger = opened(store)
    for step in (
        lambda: ledger.begin(5),
        ledger.operator.rollback,
        lambda: ledger.operator.commit_vacuum(5),
        lambda: ledger.commit(Commit(batch_id=0, txid=5, owner="query-1")),
    ):
        before = stored(store)
        with pytest.raises(MapStateError):
            step()
        assert stored(store) == before
