"""Answers that are older than a reader bears, or not whole yet: refused, by every call, on every store."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from driven_reader import WAYS
from redis.exceptions import ResponseError
from seeded import Seed
from states import START, Job
from windowed import Row, Windowed

from mapstate import StateReader
from mapstate.backends import resolve
from mapstate.errors import ConfigurationError, FencedError, SeedingError, StaleBatchError, StateNotFoundError
from mapstate.protocol.ledger_record import encode_ledger
from mapstate.protocol.stored_ledger import decode_ledger
from mapstate.reader.changes import Position

HOUR = 3600.0


@pytest.fixture(params=WAYS)
def opened(request: Any) -> Callable[..., Any]:
    """Opens a reader, blocking or on an event loop."""
    way: Callable[..., Any] = WAYS[request.param]["open_reader"]
    return way


@pytest.fixture(
    params=["memory", "sqlite", *(pytest.param(on, marks=pytest.mark.redis) for on in ("redis", "cluster"))]
)
def url(request: Any, tmp_path: Any) -> str:
    """A store of each kind, empty."""
    if request.param in ("redis", "cluster"):
        found: str = request.getfixturevalue(f"{request.param}_url")
        return found
    return f"memory://{tmp_path.name}" if request.param == "memory" else f"sqlite:///{tmp_path}/state.db"


def ago(seconds: float) -> str:
    """The time of a commit, as a driver writes it."""
    return (dt.datetime.now(dt.UTC) - dt.timedelta(seconds=seconds)).isoformat(timespec="milliseconds")


def date(url: str, at: str) -> None:
    """Gives the last commit of the state ``s`` another time."""
    store: Any = resolve(url).open("s")
    data, version = store.load()
    ledger = decode_ledger(data, "s")
    assert ledger.last_commit is not None
    ledger = msgspec.structs.replace(ledger, last_commit=msgspec.structs.replace(ledger.last_commit, at=at))
    assert store.swap(encode_ledger(ledger), version, ledger.fence()) is not None


WITHOUT_WINDOWS: dict[str, Callable[[Any], Any]] = {
    "get": lambda reader: reader.get("a"),
    "multi_get": lambda reader: reader.multi_get(["a", "nobody"]),
    "multi_get_as_of": lambda reader: reader.multi_get_as_of(["nobody"]),
    "answer": lambda reader: reader.answer(["nobody"]).values,
    "key_count": lambda reader: reader.key_count(),
    "count_keys": lambda reader: reader.count_keys(),
    "scan": lambda reader: list(reader.scan()),
    "pages": lambda reader: list(reader.pages()),
    "pages_as_of": lambda reader: list(reader.pages_as_of()),
    "to_arrow": lambda reader: reader.to_arrow(),
    "to_pandas": lambda reader: reader.to_pandas(),
    "to_polars": lambda reader: reader.to_polars(),
    "position": lambda reader: reader.position(),
    "changed_keys": lambda reader: reader.changed_keys(Position(START, START), Position(START, START)),
}
WITH_WINDOWS: dict[str, Callable[[Any], Any]] = {
    "watermark": lambda reader: reader.watermark(),
    "windows": lambda reader: reader.windows("ann"),
    "windows of nothing": lambda reader: reader.windows("ann", since=10**6),
    "windows_as_of": lambda reader: reader.windows_as_of("ann"),
    "window": lambda reader: list(reader.window(10)),
    "get": lambda reader: reader.get((0, "ann")),
}


def test_each_call_of_a_reader_is_tried_here_or_gives_no_value():
    calls = {name for name in dir(StateReader) if not name.startswith("_") and callable(getattr(StateReader, name))}
    own = {"found", "part", "parts"}  # of Spark's partitions, which no caller bounds
    assert calls - own - {"ledger", "reports", "close"} == ({*WITHOUT_WINDOWS, *WITH_WINDOWS} - {"windows of nothing"})


@pytest.mark.parametrize("shape", ["plain", "windows"])
def test_no_call_answers_as_of_a_commit_that_is_older_than_max_age(url, opened, shape):
    if shape == "plain":
        Job(url, changes=10).batch(a=1)
    else:
        Windowed(url).batch(Row(1, "ann", 1))
    date(url, ago(HOUR))
    calls = WITHOUT_WINDOWS if shape == "plain" else WITH_WINDOWS
    with opened(url, "s") as reader:
        right = {name: call(reader) for name, call in calls.items()}
    with opened(url, "s", max_age=60) as reader:
        for call in calls.values():
            with pytest.raises(StaleBatchError, match=r"'s': batch 0 was committed 36\d\d\.\d s ago.*max_age is 60 s"):
                call(reader)
        assert reader.ledger().last_commit.batch_id == 0  # it looks, and says how old the state is
        assert reader.reports() == []
        assert reader.multi_get([]) == []
        date(url, ago(0))
        for name, call in calls.items():
            found = call(reader)
            assert name.endswith(("as_of", "count_keys", "to_arrow", "to_pandas", "to_polars")) or found == right[name]
    for bound in (dt.timedelta(hours=2), 2 * HOUR, None):
        date(url, ago(HOUR))
        with opened(url, "s", max_age=bound) as reader:
            assert next(iter(calls.values()))(reader) == right[next(iter(calls))]


def test_a_scan_ends_where_the_commit_grows_too_old(url, opened):
    job = Job(url)
    job.at = ago(0)
    job.batch(**{f"k{at}": at for at in range(50)})
    with opened(url, "s", max_age=60) as reader:
        rows = reader.scan(10)
        next(rows)
        date(url, ago(HOUR))
        with pytest.raises(StaleBatchError, match="max_age"):
            list(rows)


def test_an_age_that_is_not_known_is_refused(url, opened):
    job = Job(url)
    with opened(url, "s", max_age=60) as reader:
        with pytest.raises(StaleBatchError, match="no batch is committed, or its time is not known"):
            reader.get("a")
        job.batch(a=1)  # by a driver that keeps no time
        with pytest.raises(StaleBatchError, match="its time is not known"):
            reader.get("a")
        date(url, ago(-HOUR))  # a clock that is ahead would let each answer pass an hour longer
        with pytest.raises(StaleBatchError, match="the commit is in the future"):
            reader.get("a")
        date(url, ago(-30))
        assert reader.get("a") == {"n": 1}


def test_a_rollback_shows_an_older_commit(url, opened):
    job = Job(url)
    for value, age in ((1, HOUR), (2, 0)):
        job.at = ago(age)
        job.batch(a=value)
    with opened(url, "s", max_age=60) as reader:
        assert reader.get("a") == {"n": 2}
        job.ledger.rolled_back()
        with pytest.raises(StaleBatchError, match="batch 0 was committed"):
            reader.get("a")


@pytest.mark.parametrize("bound", [0, -1, True, float("nan"), float("inf"), "60", dt.timedelta(0)])
def test_a_bound_that_is_none_is_refused(opened, bound, tmp_path):
    with pytest.raises(ConfigurationError, match="max_age is a number of seconds from 0.001"):
        opened(f"sqlite:///{tmp_path}/state.db", "s", max_age=bound)


def test_a_state_that_is_gone_is_named_as_without_a_bound(tmp_path, opened):
    with pytest.raises(StateNotFoundError):
        opened(f"sqlite:///{tmp_path}/state.db", "s", max_age=60)


@pytest.mark.redis
def test_a_primary_that_was_cut_off_still_answers_and_max_age_refuses_it(start_sentinels, opened):
    pair = start_sentinels()
    job = Job(pair.url)
    job.at = ago(HOUR)
    job.batch(a=1)
    with pair.primary.client() as client:
        assert client.wait(1, 10_000) == 1
        client.config_set("min-replicas-to-write", 1)
    with opened(pair.url, "s") as unbounded, opened(pair.url, "s", max_age=60) as reader:
        assert unbounded.get("a") == {"n": 1}
        pair.cut_off()
        new = Job(pair.replica.url)
        new.at = ago(0)
        new.batch(a=2)
        with pair.primary.client() as client, pytest.raises(ResponseError, match="NOREPLICAS"):
            client.set("other", 1)
        assert unbounded.get("a") == {"n": 1}  # writes are refused there, and reads are not
        with pytest.raises(StaleBatchError, match="batch 0 was committed"):
            reader.get("a")
    with opened(pair.replica.url, "s", max_age=60) as reader:
        assert reader.get("a") == {"n": 2}


def test_every_call_says_how_far_the_seed_is_and_the_whole_is_seen_at_once(url, opened):
    seed = Seed(url, changes=10)
    with opened(url, "visits") as reader, opened(url, "visits", consistency="latest") as looks_in:

        def check(progress: str) -> None:
            for call in WITHOUT_WINDOWS.values():
                with pytest.raises(SeedingError, match=f"'visits' is being seeded: {progress}"):
                    call(reader)
            assert reader.ledger().seed is not None

        check("its history is being staged")
        seed.staged()
        check("0 of 2 buckets")
        seed.attempt(a=7, lost=1)
        seed = Seed(url, changes=10)
        seed.bucket(a=1, b=2)
        check("1 of 2 buckets")
        assert looks_in.get("b") == {"n": 2}
        seed.attempt(c=9)
        again = Seed(url, changes=10)
        with pytest.raises((FencedError, StaleBatchError)):
            seed.bucket(c=9)
        again.bucket(c=3)
        check("2 of 2 buckets")
        again.end()
        assert sorted(reader.scan()) == [(("a",), {"n": 1}), (("b",), {"n": 2}), (("c",), {"n": 3})]
        assert reader.key_count() == 3
        assert reader.get("lost") is None
