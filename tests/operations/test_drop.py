"""Removing a state whole: who is refused, what a live driver finds, and what an interrupted removal leaves."""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest
from one_ledger import OneLedger
from openings import opening
from states import Job, contents

from mapstate import open_reader
from mapstate.backends import resolve
from mapstate.backends.memory import MemoryStore
from mapstate.errors import (
    CorruptRecordError,
    FencedError,
    MapStateError,
    StateNotFoundError,
    StateOwnershipError,
    StoreLostError,
    StoreUnavailableError,
    UsageError,
)
from mapstate.operations.drop import drop
from mapstate.protocol.ledger_record import DROPPER


@pytest.fixture(params=["memory", "sqlite", pytest.param("redis", marks=pytest.mark.redis)])
def url(request: Any, tmp_path: Any) -> str:
    """A store of each kind, empty."""
    if request.param == "memory":
        return f"memory://{tmp_path.name}"
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/state.db"
    return request.getfixturevalue("redis_url")


@pytest.mark.redis
@pytest.mark.parametrize("layout", ["string", "hash", "packed&buckets=7"])
def test_no_key_of_a_dropped_state_stays_in_redis(redis_url, redis_server, layout):
    url = f"{redis_url}{'&' if '?' in redis_url else '?'}layout={layout}"
    job = Job(url)
    job.batch(**{f"k{at}": at for at in range(2500)})
    job.store.keep_report(b"report", 10)
    prefix = resolve(url).prefix
    with redis_server.client() as client:
        assert client.keys(f"{prefix}s*")
        pages = []
        assert drop(url, "s", on_page=pages.append).records == 2500
        assert client.keys(f"{prefix}s*") == []
    assert pages[-1].records == 2500
    assert pages[-1].ledger.last_commit.keys == 2500


def test_a_state_with_an_attempt_in_flight_is_dropped_by_force_alone(url):
    job = Job(url)
    job.batch(a=1)
    attempt = job.attempt(a=2)
    with pytest.raises(UsageError, match=rf"txid {attempt.txid} in flight.*--force"):
        drop(url, "s")
    assert contents(url) == {"a": 1}
    drop(url, "s", force=True)
    with pytest.raises(StateNotFoundError):
        open_reader(url, "s")


def test_a_live_driver_finds_its_state_gone_and_brings_nothing_back(url):
    job = Job(url)
    job.batch(a=1)
    drop(url, "s")
    with pytest.raises(StoreLostError):
        job.ledger.begin(1)
    job = Job(url)
    attempt = job.attempt(a=1)
    drop(url, "s", force=True)
    with pytest.raises(FencedError):
        job.store.writer(attempt.token).multi_put(["a"], [b"[1,1,null]"])
    with pytest.raises(StateNotFoundError):
        drop(url, "s")


def test_a_state_of_the_same_name_begins_anew(url):
    Job(url).batch(a=1)
    drop(url, "s")
    job = Job(url, owner="another")
    job.batch(b=2)
    assert contents(url) == {"b": 2}


class Interrupted:
    """A backend whose store dies before it has removed all."""

    shared_between_processes = True

    def __init__(self, url: str) -> None:
        self._url = url

    def open(self, state: str, *, ttl: float | None = None) -> Any:
        store = resolve(self._url).open(state, ttl=ttl)

        class Dies:
            def __getattr__(self, name: str) -> Any:
                return getattr(store, name)

            multi_get, multi_put = store.multi_get, store.multi_put
            load, swap, scan = store.load, store.swap, store.scan

            def drop(self, expected: Any, token: Any) -> Any:
                writer = store.writer(token)
                page = next(store.scan(2))[:2]
                writer.multi_rewrite(page, [None] * len(page))
                raise StoreUnavailableError("died")
                yield

        return Dies()


@pytest.mark.parametrize("policy", ["refuse", "adopt", "reset"])
def test_a_removal_that_was_interrupted_lets_nobody_count_on_what_is_left(url, policy):
    Job(url).batch(a=1, b=2, c=3)
    with pytest.raises(StoreUnavailableError):
        drop(Interrupted(url), "s")
    assert contents(url) == {}
    for owner in ("q", "another"):
        with pytest.raises(StateOwnershipError, match="Run mapstate drop again"):
            Job(url, owner=owner, on_new_owner=policy)
    assert drop(url, "s").ledger.owner == DROPPER  # as the message says
    job = Job(url)
    job.batch(a=1)
    assert contents(url) == {"a": 1}


def test_records_without_a_ledger_are_dropped(url):
    job = Job(url)
    job.batch(a=1, b=2)
    records = dict(zip("ab", job.store.multi_get(["a", "b"]), strict=True))
    drop(url, "s")
    job.store.multi_put(list(records), list(records.values()))
    assert drop(url, "s")[:2] == (None, 2)
    Job(url).batch(c=1)
    assert contents(url) == {"c": 1}


def test_a_ledger_that_cannot_be_read_is_dropped_by_force(url):
    store = resolve(url).open("s")
    job = Job(url)
    store.swap(b"no ledger", store.load()[1], job.ledger.record.fence())
    with pytest.raises(CorruptRecordError):
        drop(url, "s")
    drop(url, "s", force=True)
    assert store.load() is None


def test_a_dry_run_changes_nothing_and_names_what_is_there(url):
    Job(url).batch(a=1)
    before = resolve(url).open("s").load()
    assert drop(url, "s", dry_run=True).ledger.last_commit.keys == 1
    assert resolve(url).open("s").load() == before


def test_a_store_that_cannot_remove_a_state_says_so():
    class Small:
        shared_between_processes = False

        def open(self, state: str, *, ttl: float | None = None) -> Any:
            store = MemoryStore()
            return type("Bare", (), {name: staticmethod(getattr(store, name)) for name in ("multi_get", "multi_put")})()

    with pytest.raises(UsageError, match="offers no Drops"):
        drop(Small(), "s")


@pytest.mark.redis
def test_a_driver_that_opens_meanwhile_is_not_possible_and_a_second_drop_ends_the_first(redis_url):
    Job(redis_url).batch(**{f"k{at}": at for at in range(2500)})
    store = resolve(redis_url).open("s")
    raised: list[MapStateError] = []

    def again(_: Any) -> None:
        if not raised:
            raised.append(UsageError("once"))
            with pytest.raises(StateOwnershipError):
                OneLedger.open(store, opening(state="s"))
            drop(redis_url, "s")

    with pytest.raises(FencedError):
        drop(redis_url, "s", on_page=again)
    assert list(islice(store.scan(10), 1)) == []
    assert store.load() is None


@pytest.mark.redis
def test_a_state_of_bare_keys_is_not_dropped_with_the_whole_database(redis_server):
    url = f"{redis_server.url}?records="
    with redis_server.client() as client:
        client.flushdb()
        Job(url).batch(a=1)
        client.set("somebody", "else")
        before = sorted(client.keys())
        with pytest.raises(UsageError, match="offers no Drops"):
            drop(url, "s", force=True)
        assert sorted(client.keys()) == before
        client.flushdb()
