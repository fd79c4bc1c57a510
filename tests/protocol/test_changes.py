"""Those who follow a state by its change log: whatever happens meanwhile, they come to have what the state has."""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress

import msgspec
import pytest
from cases import full
from every_store import FULL, REDIS, url_of
from states import Job, LoggedJob, contents, stored

from mapstate import AsyncStateReader, StateReader, opaque, open_async_reader, open_reader, transactional
from mapstate.errors import (
    ChangesGoneError,
    ConfigurationError,
    FencedError,
    StateSchemaError,
    StoreLostError,
    UsageError,
)
from mapstate.maps.change_log import ChangeLog
from mapstate.maps.pane_index import index_codec
from mapstate.operations.drop import drop
from mapstate.operations.vacuum import vacuum
from mapstate.protocol.changes import ChangesRecord
from mapstate.protocol.ledger_record import encode_ledger
from mapstate.protocol.stored_ledger import decode_ledger
from mapstate.reader.changes import Position

KEYS = [f"k{at}" for at in range(8)]


@pytest.fixture(params=["sqlite", REDIS, FULL[-1]])
def url(request, tmp_path):
    return url_of(request, tmp_path)


class Follower:
    """Follows a state as a stream does: first by a scan, then by the changes; it may read values late."""

    def __init__(self, url):
        self.url = url
        self.copy = {}
        self.at = None
        self.planned = None

    def plan(self):
        with open_reader(self.url, "s") as reader:
            self.planned = reader.position()

    def read(self):
        """The values of the planned batch, which may be those of a later one."""
        with open_reader(self.url, "s") as reader:
            if self.at is None:
                self.copy = {key[0]: value["n"] for key, value in reader.scan()}
            else:
                keys = reader.changed_keys(self.at, self.planned)
                assert len(set(keys)) == len(keys)
                for key, value in zip(keys, reader.multi_get(keys), strict=True):
                    self.copy.pop(key[0], None)
                    if value is not None:
                        self.copy[key[0]] = value["n"]
        self.at, self.planned = self.planned, None

    def catch_up(self):
        if self.planned is not None:
            self.read()
        self.plan()
        self.read()


def some_values(chance):
    return {key: chance.choice((None, chance.randrange(1000))) for key in chance.sample(KEYS, chance.randrange(5))}


@pytest.mark.parametrize("seed", [*range(10), *map(full, range(10, 40))])
def test_who_follows_comes_to_have_what_the_state_has(url, seed):
    chance = random.Random(seed)
    job = LoggedJob(url)
    followers = [Follower(url) for _ in range(3)]
    for _ in range(25):
        step = chance.random()
        if step < 0.4:
            job.batch(partitions=chance.randrange(1, 4), **some_values(chance))
        elif step < 0.6:
            job.attempt(partitions=chance.randrange(1, 4), **some_values(chance))
        elif step < 0.7:
            job = LoggedJob(url)
        elif step < 0.8:
            vacuum(url, "s", take_over=True)
            job = LoggedJob(url)
        else:
            if chance.random() < 0.5:
                followers[0].catch_up()  # and so has seen what is taken back now
            last = job.ledger.record.last_commit
            if (
                last is not None
                and job.ledger.record.next_txid == last.txid + 1
                and job.ledger.record.in_flight is None
            ):
                job.ledger.rolled_back()
                job = LoggedJob(url)
        for one in followers:
            act = chance.random()
            if act < 0.3 and one.planned is None:
                one.plan()
            elif act < 0.6 and one.planned is not None:
                one.read()
    job.batch(**some_values(chance))
    for one in followers:
        one.catch_up()
        assert one.copy == contents(url), seed


def test_a_rolled_back_batch_is_taken_back_by_who_has_seen_it_also_after_a_vacuum(url):
    job, one = LoggedJob(url), Follower(url)
    job.batch(a=1, b=1)
    one.catch_up()
    job.batch(b=2, c=2)
    one.catch_up()
    job.ledger.rolled_back()
    vacuum(url, "s")
    one.catch_up()
    assert one.copy == {"a": 1, "b": 1} == contents(url)


def test_the_changes_of_a_batch_are_its_keys_and_no_others(url):
    job = LoggedJob(url)
    job.batch(**{f"k{at}": at for at in range(3000)})
    with open_reader(url, "s") as reader:
        before = reader.position()
        job.attempt(x=1)
        job.batch(partitions=2, k5=None, k7=8, new=1)
        assert sorted(reader.changed_keys(before, reader.position())) == [("k5",), ("k7",), ("new",), ("x",)]
        assert sorted(reader.changed_keys(Position(before.txid - 1, before.origin), before)) == sorted(
            (f"k{at}",) for at in range(3000)
        )
        assert reader.changed_keys(reader.position(), reader.position()) == []
        assert sum(1 for _ in reader.scan()) == 3000, "a scan shows no record of the log"


def test_a_state_is_followed_on_an_event_loop_too(url):
    job = LoggedJob(url)
    job.batch(a=1, b=1)

    async def follow():
        async with open_async_reader(url, "s") as reader:
            before = await reader.position()
            job.batch(b=2, c=2)
            return await reader.changed_keys(before, await reader.position())

    assert sorted(asyncio.run(follow())) == [("b",), ("c",)]


def test_the_asynchronous_reader_has_all_methods_of_the_other():
    def public(of):
        return {name for name in dir(of) if not name.startswith("_") and callable(getattr(of, name))}

    assert public(StateReader) - public(AsyncStateReader) == {"found", "part", "parts"}  # for Spark's partitions


def test_only_as_many_transactions_are_kept_and_who_is_later_is_told(url):
    job = LoggedJob(url, changes=3)
    job.batch(partitions=2, k0=0, k=0)
    with open_reader(url, "s") as reader:
        late = reader.position()
        sizes = []
        for at in range(1, 12):
            job.attempt(partitions=2, a=1, b=1)
            job.batch(**{f"k{at}": at})
            sizes.append(len(stored(url)))
        assert sizes[-1] - sizes[-2] == 1, "the new key alone: the log does not grow"
        with pytest.raises(ChangesGoneError, match="not kept any more"):
            reader.changed_keys(late, reader.position())
        now = reader.position()
        assert reader.changed_keys(Position(now.txid - 2, now.origin), now) == [("a",), ("b",), ("k11",)]


def test_who_has_seen_a_rolled_back_batch_of_which_the_log_is_gone_is_told(url):
    job, one = LoggedJob(url, changes=1), Follower(url)
    job.batch(a=1)
    one.catch_up()
    job.ledger.rolled_back()
    job = LoggedJob(url, changes=1)
    job.batch(b=1)
    job.attempt(c=1)  # from its begin on the log of the first batch is not kept
    with pytest.raises(ChangesGoneError, match="not kept any more"):
        one.catch_up()


def test_a_log_that_is_not_whole_is_an_error(url):
    job = LoggedJob(url)
    with open_reader(url, "s") as reader:
        job.batch(a=1)
        before = reader.position()
        job.batch(**{f"k{at}": at for at in range(500)})
        logged = [key for key in stored(url) if key.startswith(f"\\P|#{reader.position().txid}|")]
        assert len(logged) == 3, "two full chunks and a head"
        for key in logged:
            record = job.store.multi_get([key])[0]
            erase(job, key)
            with pytest.raises(StoreLostError, match="not whole"):
                reader.changed_keys(before, reader.position())
            job.store.multi_put([key], [record])
        assert len(reader.changed_keys(before, reader.position())) == 500


def erase(job, key):
    """As an eviction does it: whatever the fence."""
    attempt = job.ledger.begin(job.next)
    job.store.writer(attempt.token).multi_rewrite([key], [None])


def test_a_late_writer_writes_no_log(url):
    job = LoggedJob(url)
    attempt = job.attempt(a=1)
    log = ChangeLog(job.store.writer(attempt.token), index_codec("json", "s"), attempt.view, attempt.txid, 1)
    log.note(["late"], [None])
    LoggedJob(url).batch(a=2)
    with pytest.raises(FencedError):
        log.write()


def test_a_reset_and_a_state_made_anew_end_what_follows(url):
    LoggedJob(url).batch(a=1)
    with open_reader(url, "s") as reader:
        before = reader.position()
        job = LoggedJob(url, owner="other", on_new_owner="reset")
        with pytest.raises(ChangesGoneError):
            reader.changed_keys(before, reader.position())
        job.batch(b=1)
        now = reader.position()
        job.batch(c=1)
        assert reader.changed_keys(now, reader.position()) == [("c",)]
        drop(url, "s", force=True)
        anew = LoggedJob(url)
        anew.batch(a=1)
        with pytest.raises(ChangesGoneError, match=r"another state|not kept"):
            reader.changed_keys(now, reader.position())


def test_a_position_of_another_state_or_owner_is_refused(url):
    LoggedJob(url).batch(a=1)
    LoggedJob(url, state="other").batch(b=1)
    with open_reader(url, "s") as reader, open_reader(url, "other") as other:
        own, foreign = reader.position(), other.position()
        assert (own.txid, own.origin) == (foreign.txid, foreign.origin), "they begin at one moment"
        for start, end in ((foreign, own), (own, foreign)):
            with pytest.raises(ChangesGoneError, match="of another state"):
                reader.changed_keys(start, end)

        async def follow():
            async with open_async_reader(url, "s") as later:
                return await later.changed_keys(foreign, await later.position())

        with pytest.raises(ChangesGoneError, match="of another state"):
            asyncio.run(follow())
        LoggedJob(url, owner="heir", on_new_owner="adopt_unchecked").batch(c=1)
        with pytest.raises(ChangesGoneError, match="another owner"):
            reader.changed_keys(own, reader.position())


def test_a_position_that_was_stored_without_a_mark_is_taken(url):
    job = LoggedJob(url)
    job.batch(a=1)
    with open_reader(url, "s") as reader:
        now = msgspec.to_builtins(reader.position())
        before = msgspec.convert({name: now[name] for name in ("txid", "origin")}, Position)
        job.batch(b=1)
        assert reader.changed_keys(before, reader.position()) == [("b",)]


def test_a_store_that_was_put_back_is_noticed(url):
    job = LoggedJob(url)
    job.batch(a=1)
    with open_reader(url, "s") as reader:
        now = reader.position()
        ahead = Position(now.txid + 5, now.origin)
        with pytest.raises(ChangesGoneError, match="put back"):
            reader.changed_keys(ahead, now)


def test_a_job_asks_for_the_log_or_ends_it(url):
    plain = Job(url)
    plain.batch(a=1)
    with open_reader(url, "s") as reader:
        with pytest.raises(UsageError, match="changes=1000"):
            reader.position()
        job = LoggedJob(url)
        start = reader.position()
        job.batch(b=1)
        assert reader.changed_keys(start, reader.position()) == [("b",)], "from then on"
        with pytest.raises(StateSchemaError, match="changes=0"):
            Job(url)
        job = LoggedJob(url, changes=0)
        job.batch(c=1)
        job.batch(d=1)
        with pytest.raises(UsageError, match="changes=1000"):
            reader.position()
        assert [key for key in stored(url) if key.startswith("\\P|#")] == [f"\\P|#{job.ledger.record.last_txid}|0"]
        plain = Job(url)
        plain.batch(e=1)
        vacuum(url, "s")
        assert [key for key in stored(url) if key.startswith("\\P|")] == []
        LoggedJob(url).batch(f=1)
        with pytest.raises(ChangesGoneError):
            reader.changed_keys(start, reader.position())


def test_a_job_that_goes_on_without_the_log_opens_its_state_as_it_is(url):
    """A correction compares the two, and refuses other options."""
    LoggedJob(url).batch(a=1)
    job = LoggedJob(url, changes=0)
    job.batch(b=1)
    before = job.ledger.record
    since = LoggedJob(url, changes=0).ledger.record.changes.since
    assert since == before.changes.since < before.next_txid
    assert LoggedJob(url).ledger.record.changes.since == before.next_txid, "what it did not log is a gap"


def test_a_vacuum_leaves_the_log_that_is_kept(url):
    job = LoggedJob(url)
    job.batch(a=1)
    with open_reader(url, "s") as reader:
        before = reader.position()
        job.attempt(x=1)
        job.batch(a=None)
        vacuum(url, "s")
        assert sorted(reader.changed_keys(before, reader.position())) == [("a",), ("x",)]


def test_the_ledger_of_such_a_state_has_a_format_of_its_own_and_no_flaw(url):
    job = LoggedJob(url)
    job.batch(a=1)
    record = job.ledger.record
    assert record.format == 3
    assert decode_ledger(encode_ledger(record), "s") == record
    for flaw in ({"kept": -1}, {"width": -1}, {"removed": 1 << 40}, {"since": 1 << 40}):
        damaged = msgspec.structs.replace(record, changes=msgspec.structs.replace(record.changes, **flaw))
        with pytest.raises(Exception, match="its change log is none"):
            decode_ledger(encode_ledger(damaged), "s")
    with suppress(Exception):
        decode_ledger(encode_ledger(record).replace(b'"format":3', b'"format":1'), "s")
        pytest.fail("an older format has no change log")


def test_what_cannot_be_logged_is_refused():
    with pytest.raises(ConfigurationError, match="opaque states without a ttl"):
        transactional("memory://", changes=5)
    with pytest.raises(ConfigurationError, match="opaque states without a ttl"):
        opaque("redis://", changes=5, ttl=60)
    for wrong in (-1, True, "5"):
        with pytest.raises(ConfigurationError, match="changes is an int from 0 to"):
            opaque("memory://", changes=wrong)


def test_a_rolled_back_transaction_is_forgotten_when_it_is_not_kept():
    record = ChangesRecord(kept=2, since=5, removed=5).rolled_back(7).rolled_back(9)
    assert record.begun(9).undone == (7, 9), "somebody may have read 7, and the keys from 8 on are kept"
    assert record.begun(10).undone == (9,)
