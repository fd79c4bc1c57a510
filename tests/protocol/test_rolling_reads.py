"""Rolling windows for readers: as of any time that is kept, whole batches, whoever writes meanwhile."""

from __future__ import annotations

import datetime as dt
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pandas as pd
import pytest
from cases import full
from driven_reader import WAYS
from every_store import AEROSPIKE, FULL, REDIS, url_of
from rolled import AGGREGATES, WINDOWS, Rolled, Row, shown, suffix
from states import Job, form_of

from mapstate import LIFETIME, Count, Sum
from mapstate.aggregators import tiles as of_tiles
from mapstate.aggregators.aggregator import CombinerAggregator, ReducerAggregator
from mapstate.backends import resolve
from mapstate.errors import (
    AggregatorError,
    CorruptRecordError,
    StaleBatchError,
    UnknownColumnError,
    UsageError,
    ValueOverflowError,
    WindowGoneError,
)
from mapstate.keys import KeyCodec
from mapstate.operations.doctor import examine
from mapstate.protocol.ledger_record import encode_ledger
from mapstate.reader import StateReader, open_reader, rolling
from mapstate.serializers import serializer, tiles

USERS = ["ann", "bob", "cyd", "eve"]


@pytest.fixture(params=WAYS)
def opened(request: Any) -> Callable[..., Any]:
    """Opens a reader, blocking or on an event loop."""
    return WAYS[request.param]["open_reader"]


@pytest.fixture(params=["memory", "sqlite", REDIS, FULL[-1], AEROSPIKE])
def url(request: Any, tmp_path: Any) -> str:
    """A store of each kind, empty."""
    return url_of(request, tmp_path)


@pytest.fixture
def clock(monkeypatch: Any) -> SimpleNamespace:
    """The clock of readers, in seconds."""
    clock = SimpleNamespace(now=0)
    monkeypatch.setattr(rolling, "time", SimpleNamespace(time_ns=lambda: clock.now * 1_000_000_000))
    return clock


def some(draw: random.Random, start: int) -> list[Row]:
    """The rows of a batch: most are of its time, some are late."""
    late = [Row(start - draw.randint(20, 200), draw.choice(USERS[:3]), draw.randint(-9, 9)) for _ in range(3)]
    return late + [Row(start + draw.randint(0, 20), draw.choice(USERS[:3]), draw.randint(-9, 9)) for _ in range(9)]


def made(url: str, batches: int = 5, **changes: Any) -> Rolled:
    """A state with some batches."""
    draw, job = random.Random(7), Rolled(url, **({"lag": 6, "serializer": form_of(url)} | changes))
    for batch in range(batches):
        job.batch(*some(draw, 20 * batch))
    return job


def first_time(job: Rolled) -> int:
    kept = job.record.rolling
    return kept.definition.time(kept.horizon) // job.scale


@pytest.mark.parametrize("kind", ["bigint", "timestamp"])
def test_every_way_of_asking_is_that_of_the_rows(url, opened, clock, kind):
    job = made(url, kind=kind, retention=10, startTime=3)
    first, times = first_time(job), []
    with opened(url, "s") as reader:
        for clock.now in (0, job.newest - 3, job.newest, job.newest + 1, job.newest + 33, 10**6):
            now = clock.now if kind == "timestamp" else None
            assert reader.multi_get(USERS) == [job.right(user, now=now) for user in USERS]
            assert dict(reader.scan()) == {(user,): job.right(user, now=now) for user in USERS[:3]}
        assert reader.multi_get(USERS, at="watermark") == [job.right(user, "watermark") for user in USERS]
        assert reader.watermark().time == job.time(job.mark)
        for at in range(first, job.newest + 30, 3):
            assert reader.get("ann", at=job.time(at)) == job.right("ann", at)
            times.append(at)
        users = [USERS[at % 4] for at in range(len(times))]
        one_each = reader.multi_get(users, at=[job.time(at) for at in times])
        assert one_each == [job.right(user, at) for user, at in zip(users, times, strict=True)]
        assert reader.multi_get(users, at=tuple(job.time(at) for at in times)) == one_each
        assert reader.multi_get([], at=job.time(first)) == reader.multi_get([], at=[]) == []


@pytest.mark.parametrize("has_numpy", [True, False])
@pytest.mark.parametrize("seed", [full(0), 1, full(2), 3])
def test_many_keys_at_once_are_those_of_the_rows(tmp_path, monkeypatch, has_numpy, seed):
    """Before, during and after a batch, also where older records are lists of tiles and where values are large."""
    if not has_numpy:
        monkeypatch.setattr(of_tiles, "numpy", lambda: None)
    draw, users = random.Random(seed), [f"u{at}" for at in range(40)]
    large = 1 << (54 if seed == 3 else 9)
    whole = AGGREGATES if seed else {name: AGGREGATES[name] for name in ("rows", "total")}
    job = Rolled(f"memory://{tmp_path.name}", lag=6, retention=10, serializer="msgpack", aggregates=whole)

    def rows(start: int) -> list[Row]:
        some = [draw.choice(users[:35]) for _ in range(60)]
        return [Row(start + draw.randint(-150, 20), user, draw.choice([-3, 1, 7, large])) for user in some]

    def right(user: str, at: Any) -> Any:
        values = job.right(user, at)
        return values and {name: value for name, value in values.items() if name.split("_")[0] in whole}

    def check(reader: Any) -> None:
        for at in (None, "watermark", first_time(job), job.newest + 44):
            of_each = [right(user, at) for user in users]
            assert reader.multi_get(users, at=at) == of_each
            for columns in (["total_10", "rows_lifetime"], ["total_40"]):
                asked = [values and {name: values[name] for name in columns} for values in of_each]
                assert reader.multi_get(users, at=at, columns=columns) == asked
        times = [first_time(job) + draw.randint(0, 90) for _ in users]
        assert reader.multi_get(users, at=times) == [right(user, at) for user, at in zip(users, times, strict=True)]

    for batch in range(8):
        with monkeypatch.context() as changed:
            if seed == 2 and batch < 5:
                changed.setattr(tiles, "packed", lambda numbers: None)
            attempted = job.attempt(*rows(20 * batch))
        with open_reader(job.backend, "s") as reader:
            if batch:
                check(reader)
            job.commit(attempted)
            check(reader)


def test_one_key_among_many_whose_sum_is_too_large_is_named(tmp_path):
    job = Rolled(f"memory://{tmp_path.name}", serializer="msgpack")
    job.batch(*(Row(at, f"u{at}") for at in range(40)))
    job.batch(Row(100, "u7", 1 << 62), Row(101, "u7", 1 << 62))
    with open_reader(job.backend, "s") as reader:
        users = [f"u{at}" for at in range(40)]
        with pytest.raises(ValueOverflowError, match="key 'u7'"):
            reader.multi_get(users)
        fine = reader.multi_get(users, columns=["rows_10", "least_lifetime"])
        assert fine[7] == {"rows_10": 2, "least_lifetime": 1}


def test_no_row_at_or_after_a_given_time_is_in_the_answer(url, opened):
    """A label's row never sees its future, whichever resolution."""
    job = Rolled(url, [(20, 5), LIFETIME], serializer=form_of(url))
    job.batch(*(Row(at, "ann", at) for at in range(40)))
    with opened(url, "s") as reader:
        for at in range(job.mark, 60):
            newest = reader.get("ann", at=at)["newest_lifetime"][0]
            assert newest < at
            assert newest == min(at - at % 5, 40) - 1


@pytest.mark.parametrize("kind", ["bigint", "timestamp"])
def test_an_answer_says_where_its_windows_end(url, opened, clock, kind):
    job = made(url, kind=kind)
    clock.now = job.newest + 7
    with opened(url, "s") as reader:
        answer = reader.answer(["ann", "bob"])
        newest = clock.now if kind == "timestamp" else job.newest
        assert answer.ends == [job.time(newest)] * 2
        assert answer.ledger == job.record
        assert reader.answer(["ann"], at="watermark").ends == [job.time(job.mark)]
        at = [job.time(job.mark), job.time(job.mark + 9)]
        assert reader.answer(["ann", "bob"], at=at).ends == at
        values, ledger = reader.multi_get_as_of(["ann"], at=job.time(job.mark))
        assert (values, ledger) == ([job.right("ann", job.mark)], job.record)
        pages = [page for page in reader.pages_as_of(at=job.time(job.mark)) if page.rows]  # a cluster has one per node
        assert {key: row for page in pages for key, row in page.rows}[("ann",)] == job.right("ann", job.mark)
        assert {page.end for page in pages} == {job.time(job.mark)}
        assert reader.answer([]).ends == []


def test_what_is_no_time(url, opened):
    numbers = made(url)
    with opened(url, "s") as reader:
        for wrong in (dt.datetime(2026, 1, 1, tzinfo=dt.UTC), 1.5, True, [dt.datetime(2026, 1, 1, tzinfo=dt.UTC)]):
            with pytest.raises(UsageError, match="are numbers"):
                reader.get("ann", at=wrong)
        for given, said in (
            ("now", "not 'now'"),
            ([numbers.mark], "not 1 times for 2 keys"),
            ([numbers.mark] * 3, "not 3 times for 2 keys"),
            ([], "not 0 times for 2 keys"),
        ):
            with pytest.raises(UsageError, match=f"a time for each key, {said}"):
                reader.multi_get(["ann", "bob"], at=given)
        with pytest.raises(UsageError, match="are numbers"):
            reader.multi_get(["ann", "bob"], at=[numbers.mark, "watermark"])
        with pytest.raises(UsageError, match="are numbers"):
            list(reader.scan(at=dt.datetime(2026, 1, 1, tzinfo=dt.UTC)))
        with pytest.raises(UsageError, match="a time for each key, not b"):
            reader.multi_get(["ann", "bob"], at=b"12")
        two = [numbers.mark, numbers.mark + 1]
        for container in (
            {*two},
            dict(zip(["ann", "bob"], two, strict=True)),
            dict.fromkeys(two),
            bytearray(b"ab"),
            memoryview(b"79"),
            np.array(numbers.mark),
            np.array(two)[:, None],
            pd.DataFrame({"at": two}),
        ):
            with pytest.raises(UsageError, match="a time for each key, not a "):
                reader.multi_get(["ann", "bob"], at=container)
            with pytest.raises(UsageError):
                list(reader.scan(at=container))
        for item in (np.array([numbers.mark]), np.array(numbers.mark), np.True_, np.float64(3), None, pd.NA):
            with pytest.raises(UsageError, match="are numbers"):
                reader.multi_get(["ann", "bob"], at=[numbers.mark, item])


def test_columns_that_are_no_list_of_names(url, opened):
    made(url)
    with opened(url, "s") as reader:
        for wrong in ("rows_10", b"rows_10", 5, [5], [None], [np.array(["rows_10", "rows_40"])]):
            with pytest.raises(UsageError, match="columns is a list of field names"):
                reader.get("ann", columns=wrong)
            with pytest.raises(UsageError, match="columns is a list of field names"):
                list(reader.scan(columns=wrong))


@pytest.mark.parametrize("form", ["json", "msgpack"])
def test_without_columns_there_are_the_keys(tmp_path, form):
    job = Rolled(f"memory://{tmp_path.name}", serializer=form)
    job.batch(*(Row(at, f"u{at % 20:02}") for at in range(60)))
    users = [f"u{at:02}" for at in range(20)]
    with open_reader(job.backend, "s") as reader:
        for many in (users[:1], users):
            assert reader.multi_get([*many, "nobody"], columns=[]) == [{}] * len(many) + [None]
        assert dict(reader.scan(columns=[])) == {(user,): {} for user in users}
        assert reader.to_arrow(columns=[]).to_pylist() == [{"user": user} for user in users]


def test_a_scan_has_one_time(url, opened):
    """It finds keys in an order of its own, so a time for each would be of any of them."""
    job = made(url)
    with opened(url, "s") as reader:
        for at in ([job.mark], [job.mark] * 3):
            for ask in (reader.scan, reader.pages, reader.to_arrow):
                with pytest.raises(UsageError, match="a scan has one time"):
                    list(ask(at=at))
        for wrong in ("nonsense", 1.5):
            with pytest.raises(UsageError):
                list(reader.scan(at=wrong))


def test_times_may_be_a_column_of_pandas_or_of_numpy(url, opened):
    job, seconds = made(url, kind="timestamp"), [100, 105]
    times = [job.time(second) for second in seconds]
    with opened(url, "s") as reader:
        right = reader.multi_get(["ann", "bob"], at=times)
        assert reader.multi_get(["ann", "bob"], at=pd.Series(times)) == right
        assert reader.multi_get(["ann", "bob"], at=pd.DatetimeIndex(times)) == right


def test_numbers_may_be_those_of_numpy(url, opened):
    job = made(url)
    with opened(url, "s") as reader:
        right = reader.multi_get(["ann", "bob"], at=[job.mark, job.mark + 5])
        assert reader.multi_get(["ann", "bob"], at=np.array([job.mark, job.mark + 5])) == right
        assert reader.get("ann", at=np.int64(job.mark)) == right[0]


def test_the_watermark_can_be_asked_for_before_any_row(url, opened):
    """With a unit of 1 and times that are counted from another one."""
    job = Rolled(url, [(10, 1)], startTime=3, serializer=form_of(url))
    job.attempt()
    with opened(url, "s") as reader:
        assert reader.get("ann", at="watermark") is None


@pytest.mark.parametrize(("batches", "mark"), [(1, -(10**9)), (2, 100)])
def test_the_watermark_is_that_of_the_batches_that_no_restart_takes_back(url, opened, batches, mark):
    """The first batch has none before it: then it is before any row."""
    job = Rolled(url)
    for end in (100, 140)[:batches]:
        job.batch(Row(end - 10, "ann", 3), Row(end, "ann", 4))
    last = msgspec.structs.replace(job.record.last_commit, apart_from=("a state in another store",))
    record = msgspec.structs.replace(job.record, last_commit=last)
    assert job.store.swap(encode_ledger(record), job.store.load()[1], record.fence())
    with opened(url, "s") as reader:
        right = shown(job.rows, "ann", WINDOWS, end=mark, until=mark)
        assert reader.multi_get(["ann", "bob"], at="watermark") == [right, None]


def test_a_time_has_a_zone(url, opened):
    made(url, kind="timestamp")
    with opened(url, "s") as reader:
        for wrong in (20, dt.datetime(2026, 1, 1), "2026-01-01", dt.date(2026, 1, 1)):
            with pytest.raises(UsageError, match=r"datetimes with a time zone|a time for each key"):
                reader.get("ann", at=wrong)
        west = dt.timezone(dt.timedelta(hours=-7))
        at = dt.datetime(1970, 1, 1, tzinfo=dt.UTC) + dt.timedelta(seconds=95)
        assert reader.get("ann", at=at.astimezone(west)) == reader.get("ann", at=at)


@pytest.mark.parametrize("kind", ["bigint", "timestamp"])
def test_before_the_horizon_a_time_is_gone(url, opened, kind):
    job = made(url, kind=kind, retention=10)
    first = first_time(job)
    with opened(url, "s") as reader:
        assert reader.get("ann", at=job.time(first)) == job.right("ann", first)
        for call in (
            lambda: reader.get("ann", at=job.time(first - 1)),
            lambda: reader.multi_get(["ann", "bob"], at=[job.time(first), job.time(first - 1)]),
            lambda: list(reader.scan(at=job.time(first - 1))),
            lambda: reader.to_arrow(at=job.time(first - 1)),
            lambda: reader.get("nobody", at=job.time(first - 1)),
        ):
            with pytest.raises(WindowGoneError, match="its tiles are kept whole from") as caught:
                call()
            assert str(job.time(first)) in str(caught.value)
            assert caught.value.facts["state"] == "s"


def test_a_state_without_rolling_windows_has_no_time(url, opened):
    job = Job(url)
    job.batch(a=1, b=2)
    with opened(url, "s") as reader:
        for call in (
            lambda: reader.get("a", at=5),
            lambda: reader.multi_get(["a"], at="watermark"),
            lambda: reader.multi_get([], at=5),
            lambda: reader.answer(["a"], at=[5]),
            lambda: list(reader.scan(at=5)),
            lambda: reader.to_arrow(at=5),
        ):
            with pytest.raises(UsageError, match="has no rolling windows, so at= has no meaning"):
                call()
        assert reader.get("a", columns=["n"]) == {"n": 1}
        assert reader.answer(["a"]).ends is None
        assert [page.end for page in reader.pages_as_of()][:1] == [None]
        for call in (lambda: reader.get("a", columns=["m"]), lambda: list(reader.scan(columns=["n", "m"]))):
            with pytest.raises(UnknownColumnError, match="has no field 'm'; it has n"):
                call()
        for wrong in ("n", b"n"):
            with pytest.raises(UsageError, match="columns is a list of field names"):
                reader.get("a", columns=wrong)


def test_columns_are_given_in_their_order_and_no_others(url, opened):
    job = made(url)
    chosen = ["total_40", "rows_lifetime", "newest_10"]
    right = {user: job.right(user) for user in USERS[:3]}
    with opened(url, "s") as reader:
        for user, whole in right.items():
            found = reader.get(user, columns=chosen)
            assert list(found.items()) == [(name, whole[name]) for name in chosen]
            for name in whole:
                assert reader.get(user, columns=[name]) == {name: whole[name]}
        assert reader.multi_get(["eve", "ann"], columns=["rows_10"]) == [None, {"rows_10": right["ann"]["rows_10"]}]
        assert dict(reader.scan(columns=["least_120"])) == {
            (user,): {"least_120": whole["least_120"]} for user, whole in right.items()
        }
        assert reader.get("ann", columns=[]) == {}
        assert reader.get("ann", columns=["rows_10", "rows_10"]) == {"rows_10": right["ann"]["rows_10"]}
        for call in (
            lambda: reader.get("ann", columns=["rows_10", "rows_11"]),
            lambda: reader.get("ann", columns=["rows"]),
            lambda: list(reader.scan(columns=["rows_11"])),
            lambda: reader.to_arrow(columns=["rows_11"]),
        ):
            with pytest.raises(UnknownColumnError, match="it has rows_10, rows_40"):
                call()


def test_a_table_has_a_column_for_each_window(url, opened):
    job = made(url)
    with opened(url, "s") as reader:
        table = reader.to_arrow()
        fields = [f"{field}_{suffix(one)}" for field in job.aggregates for one in WINDOWS]
        assert table.column_names == ["user", *fields]
        rows = {row.pop("user"): row for row in table.to_pylist()}
        assert rows == {user: job.right(user) for user in USERS[:3]}
        at = job.mark + 3
        some_columns = reader.to_arrow(columns=["rows_40", "newest_lifetime"], at=at)
        assert some_columns.column_names == ["user", "rows_40", "newest_lifetime"]
        for row in some_columns.to_pylist():
            right = job.right(row["user"], at)
            assert (row["rows_40"], row["newest_lifetime"]) == (right["rows_40"], right["newest_lifetime"])


def test_a_scan_ends_where_it_did_when_it_began(tmp_path, clock):
    url = f"memory://{tmp_path.name}"
    job = Rolled(url, [(10, 1), LIFETIME], kind="timestamp", lag=30)
    users = [f"user {at}" for at in range(40)]
    job.batch(*(Row(at, user, at) for at, user in enumerate(users)))
    before = list(job.rows)
    clock.now = 45
    with open_reader(url, "s") as reader:
        scan = reader.pages_as_of(10)
        pages = [next(scan)]
        clock.now = 70
        job.batch(*(Row(46 + at % 20, user, at) for at, user in enumerate(users)))
        pages += list(scan)
    found: dict[Any, Any] = {}
    for page in pages:
        if page.rows:
            assert page.end == job.time(45)
            rows = before if page.ledger.last_commit.batch_id == 0 else job.rows
            for (user,), value in page.rows:
                assert value == job.renamed(shown(rows, user, job.windows, end=45, until=46))
                found[user] = value
    assert set(found) == set(users)
    with open_reader(url, "s") as reader:
        at = [page.end for page in reader.pages_as_of(10, at="watermark") if page.rows]
        assert set(at) == {job.time(job.mark)}


# Beside a job


def test_a_scan_over_a_reset_with_another_unit_is_refused(tmp_path):
    """Its end is counted in units of the windows that were."""
    url = f"memory://{tmp_path.name}"
    Rolled(url, [(100, 10), LIFETIME]).batch(*(Row(1000, f"u{at:02}") for at in range(40)))
    with open_reader(url, "s") as reader:
        pages = reader.pages_as_of(5, at=1200)
        assert next(pages).end == 1200
        Rolled(url, [(100, 1), LIFETIME], owner="q2", on_new_owner="reset").batch(
            *(Row(1000, f"u{at:02}") for at in range(40))
        )
        with pytest.raises(StaleBatchError, match="Scan it from the start"):
            list(pages)
        assert {page.end for page in reader.pages_as_of(5, at=1205)} == {1205}


def test_a_scan_after_a_reset_is_checked_by_the_ledger_that_is_there(tmp_path):
    url = f"memory://{tmp_path.name}"
    job = Rolled(url)
    for at in (1000, 1100, 1200):
        job.batch(Row(at, "ann"))
    with open_reader(url, "s") as reader:
        assert len(list(reader.scan(at=1150))) == 1
        new = Rolled(url, owner="q2", on_new_owner="reset")
        new.batch(Row(50, "bob"))
        right = new.right("bob", 60)
        assert dict(reader.scan(at=60)) == {("bob",): right}
        assert reader.to_arrow(at=60).to_pylist() == [{"user": "bob"} | right]
        with pytest.raises(UsageError):
            list(reader.scan(at="nonsense"))


def test_a_scan_from_a_cursor_ends_where_the_scan_before_did(tmp_path, clock):
    url = f"sqlite:///{tmp_path}/states.db"
    job = Rolled(url, [(10, 5), LIFETIME], kind="timestamp", lag=60, serializer="msgpack")
    job.batch(*(Row(at, f"u{at:02}") for at in range(20)))
    clock.now = 30
    with open_reader(url, "s") as reader:
        page = next(reader.pages_as_of(5))
        clock.now = 300
        job.batch(Row(40, "later"))
        assert page.end == job.time(30)
        for at, end in ((None, 30), ("watermark", 30), (job.time(20), 20)):
            pages = [one for one in reader.pages_as_of(5, cursor=page.cursor, at=at) if one.rows]
            assert {one.end for one in pages} == {job.time(end)}
            assert {key for one in pages for key, _ in one.rows}.isdisjoint(key for key, _ in page.rows)
        assert {one.end for one in reader.pages_as_of(5) if one.rows} == {job.time(300)}


def test_an_attempt_is_seen_once_it_is_committed_and_one_that_died_never(url, opened):
    draw, job = random.Random(3), made(url, retention=15)
    with opened(url, "s") as reader, opened(url, "s") as kept_open:
        for batch in range(5, 11):
            before = [job.right(user) for user in USERS]
            at_mark = [job.right(user, "watermark") for user in USERS]
            for _ in range(draw.randint(0, 2)):  # each replay has other rows, and the keys that it came to
                job.attempt(*some(draw, 20 * batch + draw.choice([0, 500])), only=draw.sample(USERS, 2))
                assert reader.multi_get(USERS) == before
                assert reader.multi_get(USERS, at="watermark") == at_mark
                first = first_time(job)
                for at in range(first, job.newest + 9, 5):
                    assert reader.multi_get(USERS, at=at) == [job.right(user, at) for user in USERS]
            attempted = job.attempt(*some(draw, 20 * batch))
            assert reader.multi_get(USERS) == before
            job.commit(attempted)
            for own in (reader, kept_open):
                assert own.multi_get(USERS) == [job.right(user) for user in USERS]


class Between:
    """A backend without a joint read of ledger and records: ``calls`` run one by one, each in front of a read."""

    shared_between_processes = False

    def __init__(self, url: str, *calls: Callable[[], None]) -> None:
        self.store: Any = resolve(url).open("s")
        self.calls = list(calls)

    def open(self, state: str, *, ttl: float | None = None) -> Any:
        names = ("load", "swap", "multi_put")
        return type(
            "Some",
            (),
            {"multi_get": staticmethod(self._read)} | {n: staticmethod(getattr(self.store, n)) for n in names},
        )()

    def _read(self, keys: Any) -> Any:
        if self.calls:
            self.calls.pop(0)()
        return self.store.multi_get(keys)


@pytest.mark.parametrize("place", range(5))
def test_the_keys_of_an_answer_are_of_one_batch(tmp_path, place):
    """Batches come between the reads of a call, and an attempt that has written one key and not the other."""
    url = f"memory://{tmp_path.name}"
    job, draw = made(url), random.Random(place)
    right = [[job.right(user) for user in USERS]]

    def more(batches: int) -> None:
        for _ in range(batches):
            job.attempt(*some(draw, job.newest), only=["ann"])
            job.batch(*(Row(job.newest + 5, user, 2) for user in USERS[:3]), *some(draw, job.newest))
            right.append([job.right(user) for user in USERS])
        job.attempt(*some(draw, job.newest), only=["bob"])

    calls = [*[lambda: None] * place, lambda: more(1), lambda: more(2), lambda: more(1)]
    with open_reader(Between(url, *calls), "s") as reader:
        for _ in range(8):
            assert reader.multi_get(USERS) in right
        assert reader.multi_get(USERS) == right[-1]
    assert len(right) == 5


UNITS = b"\0" * 8  # the first unit


@pytest.mark.parametrize(
    ("value", "undo"),
    [
        ([None, UNITS + b"b\x00\x02\x01", b"b\x01\x01\x01"], None),
        ([None, UNITS + b"b\x00\x01\x01", b"b\x01\x01\x01"], None),
        ([None, UNITS + b"b\x00", b"b\x01"], [[77], None, UNITS + b"b", b"b"]),
        ([None, UNITS + b"b\x00", b"b\x01"], [[5], None, UNITS + b"b", b"b"]),
        ([None, UNITS + b"b\x00", b"b\x01"], [[1 << 63], None, UNITS + b"b", b"b"]),
        ([None, UNITS + b"b\x00", b"b\x01"], [[None], None, UNITS + b"b", b"b"]),
        ([None, UNITS + b"b\x00", b"b\x01"], [[0], None, UNITS + b"b\x05\x03", b"b\x01\x01"]),
        ([None, [0] * 8 + [ord("b")], []], None),
        ([True, [0, 2, -1], [1, 1, 1, 1]], None),
    ],
)
@pytest.mark.parametrize("keys", [["bad"], ["ann"] * 20 + ["bad"], ["bad"] + ["ann"] * 20])
def test_a_damaged_record_is_an_error_with_its_key(tmp_path, value, undo, keys):
    """Tiles that are out of order, and an undo of tiles that are not there, while a batch runs."""
    job = Rolled(f"memory://{tmp_path.name}", [(10, 1), LIFETIME], serializer="msgpack", aggregates={"n": Count()})
    job.batch(Row(1, "ann"))
    job.attempt(Row(2, "ann"))
    txid = job.record.in_flight.txid if undo else job.record.last_txid
    job.store.multi_put(["bad"], serializer("msgpack").encode_all([[txid, value, undo]]))
    with open_reader(job.backend, "s") as reader:
        with pytest.raises(CorruptRecordError, match="key 'bad'"):
            reader.multi_get(keys)
        with pytest.raises(CorruptRecordError, match="key 'bad'"):
            list(reader.scan())
        assert reader.get("ann")["n_10"] == 1
    assert [one.severity for one in examine(job.backend, "s") if "'bad'" in one.found] == ["error"]


def test_what_was_read_latest_has_the_rows_of_the_attempt(url, opened):
    job = made(url)
    rows = [Row(job.newest, "ann", 50), Row(job.newest - 60, "ann", 51)]
    with opened(url, "s", consistency="latest") as latest, opened(url, "s") as reader:
        assert latest.multi_get(USERS) == reader.multi_get(USERS) == [job.right(user) for user in USERS]
        attempted = job.attempt(*rows)
        assert latest.get("ann") == job.right("ann", rows=[*job.rows, *rows])
        assert latest.get("bob") == job.right("bob")
        assert reader.get("ann") == job.right("ann")
        job.commit(attempted)
        assert latest.get("ann") == reader.get("ann") == job.right("ann")


def test_a_reader_as_of_a_batch_and_before_one(url):
    job = made(url)
    ledger, before = job.record, [job.right(user) for user in USERS]
    mark, at_mark = job.mark, [job.right(user, "watermark") for user in USERS]
    backend = resolve(url)
    for step in range(3):
        with StateReader(backend, "s", "committed", {}, as_of=ledger) as reader:
            assert reader.multi_get(USERS) == before
            assert reader.multi_get(USERS, at="watermark") == at_mark
            assert dict(reader.scan(at=mark)) == {(u,): own for u, own in zip(USERS, at_mark, strict=True) if own}
            assert reader.watermark().time == mark
        if step == 0:
            job.attempt(Row(job.newest + 90, "ann"), Row(3, "bob"))
        elif step == 1:
            job.batch(Row(job.newest + 50, "ann"), Row(3, "bob"), Row(4, "eve"))
    with StateReader(backend, "s", "committed", {}, before=("q", job.next - 1)) as reader:
        assert reader.multi_get(USERS, at="watermark") == at_mark
        assert reader.watermark().time == mark
        assert reader.answer(["ann"], at="watermark").ends == [mark]
        assert reader.multi_get(USERS) == before
    job.batch(Row(job.newest + 1, "ann"))
    with (
        StateReader(backend, "s", "committed", {}, as_of=ledger) as reader,
        pytest.raises(StaleBatchError),
    ):
        reader.multi_get(USERS)


def test_a_rollback_is_seen_at_once(url, opened):
    job = made(url)
    with opened(url, "s") as reader:
        before = reader.multi_get(USERS)
        job.batch(Row(job.newest + 70, "ann", 4), Row(job.newest - 50, "bob"), Row(1, "eve"))
        assert reader.multi_get(USERS) == [job.right(user) for user in USERS] != before
        job.roll_back()
        assert reader.multi_get(USERS) == before == [job.right(user) for user in USERS]
        assert reader.watermark().time == job.mark


def test_other_windows_are_seen_by_a_reader_that_is_open(url, opened):
    job = made(url)
    with opened(url, "s") as reader:
        assert "rows_40" in reader.get("ann")
        other = job.restarted([(40, 20), LIFETIME], lag=6)
        other.begin()
        assert reader.get("ann") == other.right("ann")
        assert dict(reader.scan(columns=["rows_40"])).keys() == {("ann",), ("bob",), ("cyd",)}
        more = other.restarted([(40, 20), (30, 20), LIFETIME], lag=6)
        more.batch(Row(job.newest, "ann"))
        assert reader.get("ann", columns=["rows_30"]) == {"rows_30": more.right("ann")["rows_30"]}


class Names(CombinerAggregator):
    """A user's own."""

    def init(self, row: Any) -> Any:
        return [row["n"]]

    def combine(self, a: Any, b: Any) -> Any:
        return sorted(a + b)

    def result(self, value: Any) -> Any:
        return {"all": value}


class Rows(ReducerAggregator):
    """A user's own, which joins no tiles."""

    def init(self) -> Any:
        return 0

    def reduce(self, acc: Any, row: Any) -> Any:
        return acc + 1


def test_a_users_own_aggregator_is_given_to_the_reader(url, opened):
    own = {"names": Names(), "rows": Count(), "total": Sum("n")}
    job = made(url, aggregates=own)
    with opened(url, "s") as reader:
        for call in (lambda: reader.get("ann"), lambda: list(reader.scan()), reader.to_arrow):
            with pytest.raises(UsageError, match=r"a rolling window joins the values of its tiles.*aggregators="):
                call()
        asked = ["total_lifetime", "rows_10"]  # other columns need none
        rows = [row for row in job.rows if row.user == "ann"]
        right = {"total_lifetime": sum(row.n for row in rows), "rows_10": sum(row.at > job.newest - 11 for row in rows)}
        assert reader.get("ann", columns=asked) == right
        assert dict(reader.scan(columns=asked))[("ann",)] == right
        (row,) = [row for row in reader.to_arrow(columns=asked).to_pylist() if row["user"] == "ann"]
        assert row == {"user": "ann"} | right
        with pytest.raises(UsageError):
            reader.get("ann", columns=["names_10"])
        with pytest.raises(UnknownColumnError, match="it has names_10, "):
            reader.get("ann", columns=["rows_11"])
    with opened(url, "s", aggregators={"names": Rows()}) as reader, pytest.raises(UsageError):
        reader.get("ann")
    with opened(url, "s", aggregators={"names": Names()}) as reader:
        for user in USERS[:3]:
            found = reader.get(user)
            for window in WINDOWS:
                name = window if window == LIFETIME else window[0]
                low = -(10**9) if window == LIFETIME else (job.newest - window[0]) // window[1] * window[1]
                numbers = sorted(row.n for row in job.rows if row.user == user and low <= row.at)
                assert found[f"names_{name}"] == ({"all": numbers} if numbers else None)
                assert found[f"rows_{name}"] == len(numbers)


class Balance(CombinerAggregator):
    """Nothing where it is 0."""

    value_type = "bigint"

    def init(self, row: Any) -> Any:
        return row["n"]

    def combine(self, one: Any, other: Any) -> Any:
        return one + other or None


class Fussy(Balance):
    def combine(self, one: Any, other: Any) -> Any:
        if 13 in (one, other):
            raise ZeroDivisionError("13")
        return one + other


def test_tiles_that_remove_each_other_are_as_none(tmp_path):
    own = {"balance": Balance()}
    job = Rolled(f"memory://{tmp_path.name}", [(10, 1), (6, 2), LIFETIME], serializer="msgpack", aggregates=own)
    job.batch(Row(1, "k", 5), Row(2, "k", -5), Row(3, "k", 3), Row(1, "gone", 2), Row(2, "gone", -2))
    with open_reader(job.backend, "s", aggregators=own) as reader:
        for times in (1, 10):
            found = reader.multi_get(["k", "gone"] * times)
            assert found[-2:] == [dict.fromkeys(["balance_10", "balance_6", "balance_lifetime"], n) for n in (3, None)]


def test_a_users_aggregator_that_raises_in_a_read_names_the_key(tmp_path):
    own = {"sum": Fussy()}
    job = Rolled(f"memory://{tmp_path.name}", [(10, 1)], serializer="msgpack", aggregates=own)
    job.batch(*(Row(at, user, at) for user in ("ann", "bob") for at in (1, 2)), Row(3, "bob", 13))
    with open_reader(job.backend, "s", aggregators=own) as reader:
        assert reader.get("ann") == {"sum_10": 3}
        for keys in (["bob"], ["ann"] * 20 + ["bob"]):
            with pytest.raises(AggregatorError, match=r"key 'bob': .*combine raised ZeroDivisionError") as caught:
                reader.multi_get(keys)
            assert caught.value.key == "bob"


def test_a_state_without_a_batch_has_no_key(url, opened):
    job = Rolled(url, [(10, 1)], serializer=form_of(url))
    job.begin()
    with opened(url, "s") as reader:
        assert reader.multi_get(["ann"]) == reader.multi_get(["ann"], at=5) == [None]
        assert reader.multi_get(["ann"], at="watermark") == [None]
        assert reader.watermark().time is None
        assert list(reader.scan()) == []
    job.batch(Row(1, "ann"))
    with opened(url, "s") as reader:
        assert reader.multi_get(["ann", "bob"]) == [job.right("ann"), None]


# Keys and jobs that stand still

HOUR, DAY = 3600, 86_400
LONG: tuple[Any, ...] = ((HOUR, 300), (7 * DAY, 6 * HOUR), (30 * DAY, DAY), LIFETIME)


def check(job: Rolled, reader: Any, clock: Any, *times: int) -> None:
    """Every user as of now, the watermark, and these times."""
    for user in USERS:
        assert reader.get(user) == job.right(user, now=clock.now), user
        assert reader.get(user, at="watermark") == job.right(user, "watermark"), user
        for at in times:
            assert reader.get(user, at=job.time(at)) == job.right(user, at), (user, at)


def test_a_key_that_is_idle_for_forty_days_has_empty_windows_and_its_whole_lifetime(url, opened, clock):
    job = Rolled(url, LONG, kind="timestamp", lag=60, serializer=form_of(url))
    job.batch(*(Row(at, user, at) for at in range(0, 3 * DAY, 5000) for user in ("ann", "bob")))
    texts = KeyCodec(job.keys, native=job.form == "native").encode_all([("ann",)])
    before = job.store.multi_get(texts)
    for day in range(4, 44):
        job.batch(Row(day * DAY, "bob", day))
    clock.now = 43 * DAY + 100
    with opened(url, "s") as reader:
        check(job, reader, clock, 43 * DAY, 44 * DAY)
        idle = reader.get("ann")
        assert [idle[f"rows_{name}"] for name in ("3600_seconds", "604800_seconds", "2592000_seconds")] == [0, 0, 0]
        assert idle["rows_lifetime"] == 52
        assert job.store.multi_get(texts) == before
        job.batch(Row(43 * DAY + 200, "ann", 5), Row(30 * DAY, "ann", 7), Row(DAY, "ann", 8))
        clock.now += 300
        check(job, reader, clock, 43 * DAY + 150, 44 * DAY)
        assert job.store.multi_get(texts) != before


def test_reads_are_exact_before_while_and_after_a_job_is_three_days_behind(url, opened, clock):
    job, draw = Rolled(url, LONG, kind="timestamp", lag=600, serializer=form_of(url)), random.Random(3)

    def rows(hour: int) -> list[Row]:
        late = [Row(hour * HOUR - draw.randint(0, 90 * HOUR), draw.choice(USERS[:3]), draw.randint(-9, 9))]
        return late + [Row(hour * HOUR + draw.randint(0, 4 * HOUR), draw.choice(USERS[:3]), at) for at in range(9)]

    for hour in range(0, 48, 4):
        job.batch(*rows(hour))
    clock.now = 5 * DAY  # it was down for a weekend
    with opened(url, "s") as reader:
        check(job, reader, clock, 2 * DAY, 4 * DAY)
        for hour in range(48, 5 * 24, 4):
            attempt = job.attempt(*rows(hour))
            check(job, reader, clock, clock.now - HOUR)
            job.commit(attempt)
            check(job, reader, clock, clock.now - HOUR)
        assert job.newest > clock.now - 4 * HOUR


def test_history_first_and_then_the_stream_counts_each_row_once_and_readers_never_see_less(url, opened, clock):
    history, draw = Rolled(url, LONG, kind="timestamp", owner="of-history", serializer=form_of(url)), random.Random(5)
    seen = 0

    def batch(job: Rolled, start: int) -> Rolled:
        """The driver dies in the middle of it; the replay has other rows."""
        nonlocal seen
        rows = [Row(start + draw.randint(0, DAY), draw.choice(USERS[:3]), at) for at in range(draw.randint(20, 30))]
        job.attempt(*rows, only=USERS[:1])
        again = job.restarted(on_new_owner=job.opening.on_new_owner)
        again.batch(*rows[3:])
        clock.now = start + 2 * DAY
        check(again, reader, clock, start + DAY)
        counted = sum(found["rows_lifetime"] for _, found in reader.scan())
        assert counted == seen + len(rows) - 3
        seen = counted
        return again

    history.begin()
    with opened(url, "s") as reader:
        for day in range(5):
            history = batch(history, day * DAY)
        stream = history.restarted(owner="of-stream", on_new_owner="adopt_unchecked")
        for day in range(5, 9):
            stream = batch(stream, day * DAY)
