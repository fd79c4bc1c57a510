"""Vacuum on every store that can have one: values stay, what is dead goes, and it harms nobody."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from states import Bare, Job, N, contents, messy, stored

from mapstate import open_reader
from mapstate.backends import resolve
from mapstate.backends.memory import MemoryStore
from mapstate.backends.redis.store import RedisStore
from mapstate.capabilities import FencedWrites, FenceToken, Rewrites
from mapstate.errors import (
    CorruptLedgerError,
    CorruptRecordError,
    FencedError,
    LedgerLostError,
    StateNotFoundError,
    StoreRestartedError,
    StoreUnavailableError,
    UsageError,
)
from mapstate.findings import Unreadable
from mapstate.operations import vacuum as of_vacuum
from mapstate.operations.doctor import recount
from mapstate.operations.drop import drop
from mapstate.operations.vacuum import Vacuumed, vacuum
from mapstate.protocol.ledger_record import Commit
from mapstate.schema import Field


@pytest.fixture(params=["memory", "sqlite", pytest.param("redis", marks=pytest.mark.redis)])
def url(request: Any, tmp_path: Any) -> str:
    """A store of each kind, empty."""
    if request.param == "memory":
        return f"memory://{tmp_path.name}"
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/state.db"
    return request.getfixturevalue("redis_url")


def test_values_are_the_same_and_nothing_is_dead_any_more(url):
    truth = messy(url)
    assert contents(url) == truth
    pages = []
    done = vacuum(url, "s", page_size=2, on_page=pages.append)
    assert contents(url) == truth
    txid = done.txid
    assert {key: record for key, record in stored(url).items() if key != "kept"} == {
        "dead": b"[%d,2,2]" % txid,
        "touched": b"[%d,1,1]" % txid,
    }
    assert set(stored(url)) == set(truth)
    assert (done.scanned, done.rewritten, done.dropped) == (6, 2, 3)
    assert pages[-1] == done
    assert len(pages) > 1 or "redis" in str(url)
    with open_reader(url, "s") as reader:
        ledger = reader.ledger()
    assert (ledger.dead, ledger.in_flight, ledger.last_txid, ledger.last_commit.batch_id) == ((), None, txid, 2)


def test_a_second_vacuum_changes_no_record(url):
    messy(url)
    vacuum(url, "s")
    before = stored(url)
    again = vacuum(url, "s")
    assert (again.scanned, again.rewritten, again.dropped) == (3, 0, 0)
    assert stored(url) == before


def test_a_vacuum_with_nothing_to_rewrite_begins_no_attempt(url):
    job = Job(url)
    job.attempt(a=7)
    job.batch(a=1)
    before = job.ledger.record
    assert before.dead
    assert vacuum(url, "s")[:4] == (1, 0, 0, None)
    with open_reader(url, "s") as reader:
        assert reader.ledger() == msgspec.structs.replace(before, dead=())
    job.ledger.rolled_back()
    assert contents(url) == {}


def test_a_batch_that_comes_while_a_vacuum_reads_keeps_its_orphaned_attempts(url):
    job = Job(url)
    job.attempt(a=7)
    job.batch(a=1)

    class Reads:
        """A batch is begun, left behind and committed while the vacuum reads."""

        shared_between_processes = True

        def open(self, state: str, *, ttl: float | None = None) -> Any:
            store = Wrapped(resolve(url).open(state), lambda inner: inner)
            read = store.multi_get

            def multi_get(keys: Any) -> Any:
                found = read(keys)
                job.attempt(a=20, phantom=5)
                job.batch(b=1)
                return found

            store.multi_get = multi_get
            return store

    with pytest.raises(FencedError, match="has begun"):
        vacuum(Reads(), "s")
    assert contents(url) == {"a": 1, "b": 1}


def test_the_stream_counts_on_above_a_vacuum(url):
    messy(url)
    vacuum(url, "s")
    job = Job(url)
    job.attempt(dead=7, new=1)
    job.batch(kept=5, phantom=1)
    assert contents(url) == {"kept": 5, "dead": 2, "touched": 1, "phantom": 1}


def test_what_a_reset_left_is_dropped_and_what_came_after_it_stays(url):
    messy(url)
    job = Job(url, owner="new", on_new_owner="reset")
    job.batch(touched=3)
    assert vacuum(url, "s").dropped == 5
    assert set(stored(url)) == {"touched"}
    assert contents(url) == {"touched": 3}


def test_a_reader_beside_it_sees_the_values_at_every_moment(url):
    truth = messy(url)
    old = open_reader(url, "s")
    keys = [*truth, "gone", "phantom", "left"]
    expected = [truth.get(key) for key in keys]

    def seen() -> list[Any]:
        return [value and value["n"] for value in old.multi_get(keys)]

    assert seen() == expected

    def examined(_: Any) -> None:
        assert seen() == expected
        assert contents(url) == truth

    vacuum(url, "s", page_size=1, on_page=examined)
    assert seen() == expected
    old.close()


class Beside:
    """A backend whose store does something after its n-th read of records through a writer."""

    shared_between_processes = True

    def __init__(self, url: str, after: int, then: Any) -> None:
        self.url, self.after, self.then = url, after, then

    def open(self, state: str, *, ttl: float | None = None) -> Any:
        return Wrapped(resolve(self.url).open(state, ttl=ttl), self.writer)

    def writer(self, inner: Any) -> Any:
        read = inner.multi_get

        def multi_get(keys: Any) -> Any:
            found = read(keys)
            self.after -= 1
            if self.after == 0:
                self.then()
            return found

        inner.multi_get = multi_get
        return inner


class Wrapped:
    """A store with writers of another kind, and one key on a page of one, which SCAN does not promise."""

    def __init__(self, store: Any, writer: Any) -> None:
        for name in ("multi_get", "multi_put", "load", "swap"):
            setattr(self, name, getattr(store, name))
        self._store, self._writer = store, writer

    def writer(self, token: Any) -> Any:
        return self._writer(self._store.writer(token))

    def scan(self, page_size: int) -> Any:
        pages = self._store.scan(page_size)
        return ([key] for page in pages for key in page) if page_size == 1 else pages


def test_a_batch_that_begins_meanwhile_fences_it_and_loses_nothing(url):
    truth = messy(url)
    job = Job(url)
    backend = Beside(url, 2, lambda: job.batch(kept=8, dead=3))
    with pytest.raises(FencedError):
        vacuum(backend, "s", page_size=1)
    assert contents(url) == truth | {"kept": 8, "dead": 3}
    vacuum(url, "s")
    assert contents(url) == truth | {"kept": 8, "dead": 3}
    assert set(stored(url)) == set(truth)


def test_a_page_of_records_that_are_newer_is_a_fence_too(url):
    job = Job(url)
    job.attempt(phantom=1)
    job.batch(a=1, b=1, c=1)
    with pytest.raises(FencedError):
        vacuum(Beside(url, 1, lambda: job.batch(a=2, b=2, c=2)), "s", page_size=1)
    assert contents(url) == {"a": 2, "b": 2, "c": 2}


def test_one_that_died_half_way_is_left_behind_by_the_next(url):
    truth = messy(url)

    def die() -> None:
        raise StoreUnavailableError("died")

    with pytest.raises(StoreUnavailableError):
        vacuum(Beside(url, 4, die), "s", page_size=1)
    assert contents(url) == truth
    with pytest.raises(UsageError, match="in flight"):
        vacuum(url, "s")
    done = vacuum(url, "s", take_over=True)
    assert contents(url) == truth
    assert set(stored(url)) == set(truth)
    assert vacuum(url, "s")._replace(txid=0) == Vacuumed(3, 0, 0, 0)
    assert done.scanned <= 6


def test_an_attempt_in_flight_is_in_its_way_unless_it_takes_over(url):
    truth = messy(url)
    job = Job(url)
    attempt = job.attempt(kept=100, fresh=1)
    with pytest.raises(UsageError, match="in flight"):
        vacuum(url, "s")
    vacuum(url, "s", take_over=True)
    assert contents(url) == truth
    assert set(stored(url)) == set(truth)
    with pytest.raises(FencedError):
        job.store.writer(attempt.token).multi_put(["kept"], [b"[1,1,1]"])


@pytest.mark.redis
def test_a_record_with_a_ttl_keeps_the_time_it_has_left(redis_url, redis_server):
    job = Job(redis_url, ttl=1000)
    job.batch(a=1)
    job.attempt(a=2)
    job.batch(b=1)
    backend = resolve(redis_url)
    key = f"{backend.prefix}s:a"
    with redis_server.client() as client:
        client.pexpire(key, 500_000)
        assert vacuum(redis_url, "s").rewritten == 1
        assert 400_000 < client.pttl(key) <= 500_000

        job.attempt(a=2)  # and what expires between its get and its put stays away
        job.batch(b=1)
        assert vacuum(Beside(redis_url, 1, lambda: client.delete(key)), "s").rewritten == 1
        assert client.get(key) is None


@pytest.mark.redis
@pytest.mark.parametrize("kind", ["redis", "cluster"])
def test_after_the_end_of_a_ttl_no_record_expires_any_more(kind, request):
    url = request.getfixturevalue(f"{kind}_url")
    server = request.getfixturevalue("redis_server" if kind == "redis" else "redis_cluster")
    prefix = resolve(url).prefix

    def left() -> set[bool]:
        with server.client() as client:
            return {client.pttl(key) > 0 for key in client.scan_iter(f"{prefix}s:*")}

    job = Job(url, ttl=1000)
    job.batch(kept=1, dead=2, gone=3, touched=0)
    job.attempt(dead=20, phantom=5, gone=None)
    job.batch(gone=None, touched=1)
    assert vacuum(url, "s").dropped == 2
    assert left() == {True}
    Job(url, ttl=0).batch(new=7)
    truth = contents(url)
    assert left() == {True, False}

    def die(_: Vacuumed) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        vacuum(url, "s", page_size=1, on_page=die)
    with open_reader(url, "s") as reader:
        assert reader.ledger().has_had_ttl  # some may still expire
    resolve(url).open("s").multi_put(["foreign"], [b"{"])
    assert vacuum(url, "s", take_over=True).unreadable == 1
    with open_reader(url, "s") as reader:
        assert reader.ledger().has_had_ttl  # nobody knows of that key
    with server.client() as client:
        client.delete(*[key for key in client.scan_iter(f"{prefix}s:*") if key.endswith(b"foreign")])
    assert vacuum(url, "s").rewritten == len(truth)
    assert left() == {False}
    assert contents(url) == truth
    with open_reader(url, "s") as reader:
        assert (reader.ledger().has_had_ttl, reader.key_count()) == (False, len(truth))
    Job(url).batch(new=8)
    assert contents(url) == truth | {"new": 8}


def test_fields_added_since_are_kept_apart(url):
    job = Job(url)
    job.batch(a=1, b=2)
    wider = Job(url, fields=(N, Field("m", "Sum(m)", "bigint")))
    wider.attempt(a=(5, 6), b=(7, 8))
    wider.batch(c=(3, 4))
    vacuum(url, "s")
    with open_reader(url, "s") as reader:
        found = {key[0]: (value["n"], value["m"]) for key, value in reader.scan()}
    assert found == {"a": (1, None), "b": (2, None), "c": (3, 4)}


def test_records_older_than_their_ledger_are_said_and_nothing_is_dropped(url):
    messy(url)
    store = resolve(url).open("s")
    store.multi_put(["old"], [b"[5,1,null]"])
    before = stored(url)
    with pytest.raises(LedgerLostError):
        vacuum(url, "s")
    assert stored(url)["old"] == before["old"]


def test_refusals(url):
    with pytest.raises(StateNotFoundError):
        vacuum(url, "s")
    Job(url, type="transactional")
    with pytest.raises(UsageError, match="transactional"):
        vacuum(url, "s")
    with pytest.raises(UsageError, match="page_size"):
        vacuum(url, "s", page_size=0)


@pytest.mark.parametrize("number", [0, -1, 1.5, True])
def test_a_scan_has_one_part_at_least(url, number):
    Job(url)
    with open_reader(url, "s") as reader, pytest.raises(UsageError, match="an int from 1 to"):
        reader.parts(number)


class ListsAtOnce(MemoryStore):
    """A third party's store: when its scan returns, it has listed all keys."""

    shared_between_processes = False
    before_swap: Any = None

    def open(self, state: str, *, ttl: float | None = None) -> Any:
        return self

    def scan(self, page_size: int) -> Any:
        return iter(list(super().scan(page_size)))

    def swap(self, *args: Any) -> Any:
        race, self.before_swap = self.before_swap, None
        if race is not None:
            race()
        return super().swap(*args)


def test_a_phantom_of_just_before_its_begin_is_found_where_the_scan_lists_at_once():
    store = ListsAtOnce()
    job = Job(store)
    job.attempt(dead=1)
    job.batch(a=1)

    def race() -> None:
        job.attempt(a=2, phantom=1)
        job.batch(a=3)

    store.before_swap = race
    assert vacuum(store, "s").dropped == 2
    assert contents(store) == {"a": 3}


def test_a_store_that_cannot_fence_or_scan_is_refused_with_the_reason():
    with pytest.raises(UsageError, match="late writers"):
        vacuum(Bare("multi_get", "multi_put", "scan"), "s")
    with pytest.raises(UsageError, match="list its keys"):
        vacuum(Bare("multi_get", "multi_put", "writer"), "s")


def test_where_a_writer_cannot_remove_tombstones_are_left(url):
    class Writer:
        def __init__(self, inner: Any) -> None:
            self.multi_get, self.multi_put = inner.multi_get, inner.multi_put

    class Backend:
        shared_between_processes = True

        def open(self, state: str, *, ttl: float | None = None) -> Any:
            return Wrapped(resolve(url).open(state), Writer)

    truth = messy(url)
    done = vacuum(Backend(), "s")
    assert contents(url) == truth
    assert stored(url)["gone"] == b"[%d,null,null]" % done.txid
    with open_reader(url, "s") as reader:
        assert reader.ledger().dead == ()


def test_every_store_of_ours_rewrites(url):
    job = Job(url)
    assert isinstance(job.store, FencedWrites)
    attempt = job.attempt(a=1, b=2)
    writer = job.store.writer(attempt.token)
    assert isinstance(writer, Rewrites)
    writer.multi_get(["a"])
    writer.multi_rewrite(["a", "b", "never"], [b"x", None, b"y"])
    assert stored(url) == {"a": b"x"}
    writer.multi_rewrite([], [])
    late = attempt.token._replace(txid=attempt.txid - 1)
    with pytest.raises(FencedError):
        job.store.writer(late).multi_rewrite(["a"], [None])
    with pytest.raises(UsageError):
        writer.multi_rewrite(["a"], [])
    assert stored(url) == {"a": b"x"}


RESTARTS = {
    "a scan": lambda url: dict(open_reader(url, "s").scan(100)),
    "a count": lambda url: recount(url, "s"),
    "a vacuum": lambda url: vacuum(url, "s", page_size=100),
    "a drop": lambda url: drop(url, "s"),
}


@pytest.mark.redis
@pytest.mark.parametrize("use", RESTARTS)
def test_what_lists_keys_over_a_restart_of_the_server_says_so_and_changes_no_value(start_redis, monkeypatch, use):
    """A cursor means nothing to another process: keys are passed over, dead ones among them."""
    server = start_redis(appendonly="yes", appendfsync="always")
    job = Job(server.url)
    job.batch(**{f"k{at}": 1 for at in range(3000)})
    job.attempt(**{f"k{at}": 10**6 for at in range(200)})
    job.batch(k2999=2)
    plain, listed = RedisStore.scan, []

    def scan(self: Any, page_size: int) -> Any:
        for page in plain(self, page_size):
            yield page
            listed.append(page)
            if len(listed) == 1:  # a drop may have no third page, because the table shrinks under it
                server.restart()

    with monkeypatch.context() as patch:
        patch.setattr(RedisStore, "scan", scan)
        with pytest.raises((StoreUnavailableError, StoreRestartedError, FencedError)):
            RESTARTS[use](server.url)
    if use != "a drop":
        assert contents(server.url) == {f"k{at}": 1 + (at == 2999) for at in range(3000)}
    else:
        drop(server.url, "s")
        with server.client() as client:
            assert client.keys() == []


def test_a_key_is_not_passed_over_for_another_one_that_looks_the_same():
    """Aerospike has the keys 5 and "5"."""

    def read(keys):
        if "5" in keys:
            raise CorruptRecordError("no", state="s", key="5")
        return list(keys)

    unreadable = Unreadable("s")
    assert unreadable.read(read, [4, 5, "5", 6]) == ([4, 5, 6], [4, 5, 6])
    assert (unreadable.count, unreadable.keys) == (1, ["5"])


def followed(job: Job, **values: Any) -> None:
    """A batch of a state that "second" follows."""
    attempt = job.attempt(**values)
    done = Commit(batch_id=job.next, txid=attempt.txid, owner="q", rows=1, keys=len(values), followers=("second",))
    job.ledger.commit(done)
    job.next += 1


def test_no_word_says_that_a_state_is_gone_which_may_have_to_be_rolled_back(url):
    job = Job(url)
    job.batch(a=1)
    record = job.ledger.record
    last = msgspec.structs.replace(record.last_commit, apart_from=("pages",))
    with pytest.raises(UsageError, match="was committed apart from 'pages'"):
        of_vacuum.check_beside(msgspec.structs.replace(record, last_commit=last), url, [(None, "pages")], "vacuum")


def test_the_set_of_a_url_that_has_this_state_has_no_follower(stand_in):
    """Aerospike keeps one state in a set, so the name of the follower leads to the ledger of this one."""
    backend = stand_in.backend(set="of-s")
    job = Job(backend)
    followed(job, a=1)
    job.attempt(orphan=1)
    with pytest.raises(UsageError, match="followed by 'second', which is not in its store"):
        vacuum(backend, "s", take_over=True)
    store: Any = stand_in.backend(set="another").open("second")
    assert store.swap(b"{", None, FenceToken(1, 1, closed=True)) is not None
    with pytest.raises(CorruptLedgerError, match="'second' cannot be read"):
        vacuum(backend, "s", beside=[(stand_in.backend(set="another"), "second")], take_over=True)
    assert vacuum(backend, "s", beside=[(None, "second")], take_over=True).txid is not None


def test_a_batch_that_comes_after_the_followers_were_asked_fences_it(url, monkeypatch):
    first, second = Job(url), Job(url, state="second")
    first.attempt(orphan=1)  # so that there is something to rewrite
    followed(first, a=1)
    second.batch(x=1)
    ask = of_vacuum.check_beside

    def asked(*args: Any) -> None:
        ask(*args)
        followed(first, b=1)

    monkeypatch.setattr(of_vacuum, "check_beside", asked)
    with pytest.raises(FencedError, match="a batch, or another operator's attempt, has begun"):
        vacuum(url, "s")
    monkeypatch.undo()
    with pytest.raises(FencedError, match="'second' follows state 's'"):
        vacuum(url, "s")
    second.batch(x=2)
    assert vacuum(url, "s").dropped == 1


def test_each_place_of_a_follower_that_is_given_is_asked(tmp_path):
    url, places = f"sqlite:///{tmp_path}/s.db", [f"sqlite:///{tmp_path}/{name}.db" for name in "ab"]
    first = Job(url)
    first.attempt(orphan=1)
    followed(first, a=1)
    for place in places:
        Job(place, state="second").batch(x=1)
    followed(first, b=1)
    Job(places[1], state="second").batch(x=2)  # the other one lacks the batch
    for beside in ([(place, "second") for place in places], [(place, "second") for place in places[::-1]]):
        with pytest.raises(FencedError, match="'second' follows state 's'"):
            vacuum(url, "s", beside=beside)
