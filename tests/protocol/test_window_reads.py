"""Windows for readers: as of whole batches, whole or gone, whoever purges meanwhile."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from driven_reader import WAYS
from states import Job
from windowed import NOW, TOTAL, Row, Windowed

from mapstate.aggregators import SketchBytes
from mapstate.aggregators.aggregator import CombinerAggregator
from mapstate.aggregators.results import joined, joins_of
from mapstate.backends import resolve
from mapstate.errors import KeyEncodingError, StaleBatchError, StoreLostError, UsageError, WindowGoneError
from mapstate.keys import KeyCodec, is_index_key
from mapstate.maps.opaque import OpaqueMap, replace_all
from mapstate.maps.serialized import SerializedMap, writer_of
from mapstate.protocol.ledger import Ledger
from mapstate.protocol.sessions import FIRST, LAST, pane_to_settle
from mapstate.reader import open_reader
from mapstate.reader.state_reader import StateReader
from mapstate.reader.times import InputMark, Watermark
from mapstate.reader.windows import Window
from mapstate.schema import Field

SHAPES = {
    "tumbling": {},
    "tumbling, late": {"offset": 3, "lag": 5, "retention": 10},
    "sliding": {"length": 20, "retention": 20},
    "sliding unevenly": {"length": 9, "slide": 6, "offset": 1, "lag": 2, "retention": 9},
    "with gaps": {"length": 6, "slide": 9, "retention": 5},
}
BATCHES = [
    [Row(1, "ann", 1), Row(4, "bob", 2), Row(12, "ann", 4)],
    [Row(13, "cyd", 8), Row(17, "ann", 16), Row(9, "ann", 32)],
    [],
    [Row(29, "bob", 64), Row(21, "ann", 128)],
    [Row(44, "ann", 256), Row(26, "cyd", 512)],
]


@pytest.fixture(params=WAYS)
def opened(request: Any) -> Callable[..., Any]:
    """Opens a reader, blocking or on an event loop."""
    return WAYS[request.param]["open_reader"]


@pytest.fixture(params=["memory", "sqlite", pytest.param("redis", marks=pytest.mark.redis)])
def url(request: Any, tmp_path: Any) -> str:
    """A store of each kind, empty."""
    if request.param == "memory":
        return f"memory://{tmp_path.name}"
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/state.db"
    return request.getfixturevalue("redis_url")


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


def shown(windows: list[Window]) -> dict[Any, int]:
    return {window.end: window.value["total"] for window in windows}


@pytest.mark.parametrize("shape", SHAPES)
def test_windows_of_a_key_are_the_sums_of_its_rows(url, opened, shape):
    job = Windowed(url, **SHAPES[shape])
    job.attempt(Row(3, "ann", 1000), Row(5, "eve", 1000))
    for rows in BATCHES:
        job.batch(*rows)
        job.attempt(Row(45, "ann", 1000), Row(45, "eve", 1000))
        with opened(url, "s") as reader:
            for user in ("ann", "bob", "cyd", "eve"):
                windows = reader.windows(user)
                assert shown(windows) == job.right(user)
                assert [window.end for window in windows] == sorted(window.end for window in windows)
                assert all(window.final == (window.end <= job.mark) for window in windows)
                assert all(window.end - window.start == job.definition.length for window in windows)
                assert shown(reader.windows((user,), since=20, until=30)) == {
                    end: total for end, total in job.right(user).items() if 20 < end <= 30
                }


@pytest.mark.parametrize("shape", SHAPES)
def test_a_window_has_every_key_of_it(url, opened, shape):
    job = Windowed(url, **SHAPES[shape])
    for rows in BATCHES:
        job.batch(*rows)
        job.attempt(Row(45, "ann", 1000), Row(45, "eve", 1000))
        users = {user: job.right(user) for user in ("ann", "bob", "cyd", "eve")}
        with opened(url, "s") as reader:
            for end in {end for windows in users.values() for end in windows}:
                found = {key: value["total"] for key, value in reader.window(end)}
                assert found == {(user,): windows[end] for user, windows in users.items() if end in windows}
            with pytest.raises(UsageError, match="no window of state 's' ends at"):
                list(reader.window(job.definition.panes.floor(40) + 1))
            gone = job.record.windows.purged
            if gone > 0:
                with pytest.raises(WindowGoneError, match="past its retention"):
                    list(reader.window(gone))


@pytest.mark.parametrize(("form", "grouped"), [("json", True), ("json", False), ("native", False), ("native", True)])
def test_a_window_of_many_keys_and_of_the_whole_stream(tmp_path, opened, form, grouped):
    job = Windowed(f"memory://{tmp_path.name}", serializer=form, grouped=grouped, length=20, retention=100)
    users = [f"user {at}" for at in range(700)] if grouped else ["all"]
    job.batch(*(Row(at % 30, user, at) for at, user in enumerate(users)))
    job.batch(*(Row(at % 30, f"{user}|\\P", at) for at, user in enumerate(users) if grouped))
    job.batch(Row(45, "ann", 1))
    with opened(f"memory://{tmp_path.name}", "s") as reader:
        found = dict(reader.window(20))
        if grouped:
            assert found == {
                (user,): {"total": total}
                for user in {r.user for rows in job.committed for r in rows}
                if (total := job.right(user).get(20)) is not None
            }
        else:
            assert found == {(): {"total": job.right("all")[20]}}
            assert shown(reader.windows())[20] == job.right("all")[20]


def test_times_are_datetimes_where_the_stream_has_timestamps(url, opened):
    second = 1_000_000
    job = Windowed(url, kind="timestamp", length=10 * second, slide=10 * second, retention=60 * second)
    job.batch(Row(1 * second, "ann", 1), Row(12 * second, "ann", 2))
    at = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
    with opened(url, "s") as reader:
        assert reader.windows("ann") == [
            Window(at, at.replace(second=10), {"total": 1}, final=True),
            Window(at.replace(second=10), at.replace(second=20), {"total": 2}, final=False),
        ]
        assert dict(reader.window(at.replace(second=10))) == {("ann",): {"total": 1}}
        inputs = {"": InputMark(at.replace(second=12), at.replace(second=1))}
        assert reader.watermark() == Watermark(at.replace(second=12), inputs)
        assert reader.get((at, "ann")) == {"total": 1}
        for wrong in (20, at.replace(tzinfo=None)):
            with pytest.raises(UsageError, match="datetimes with a time zone"):
                reader.windows("ann", since=wrong)
            with pytest.raises(UsageError, match="datetimes with a time zone"):
                list(reader.window(wrong))


def test_a_window_that_ends_after_the_year_9999_is_shown(url, opened):
    day = 86_400_000_000
    job = Windowed(url, kind="timestamp", length=day, slide=day)
    last = dt.datetime(9999, 12, 31, 23, tzinfo=dt.UTC)
    job.batch(Row((last - dt.datetime(1970, 1, 1, tzinfo=dt.UTC)) // dt.timedelta(microseconds=1), "ann", 1))
    with opened(url, "s") as reader:
        (window,) = reader.windows("ann")
    assert (window.start, window.end.year) == (last.replace(hour=0), 9999)


def test_what_the_watermark_hangs_on(url, opened):
    job = Windowed(url, sources=("web", "app"), lag=5)
    job.batch(Row(20, "ann", 1, "web"), now=7 * NOW)
    with opened(url, "s") as reader:
        first = dt.datetime(1970, 1, 1, 0, 0, 7, tzinfo=dt.UTC)
        assert reader.watermark() == Watermark(None, {"web": InputMark(20, first), "app": InputMark(None, None)})
        job.batch(Row(40, "ann", 1, "app"), now=9 * NOW)
        assert reader.watermark().time == 15
        assert reader.watermark().inputs["app"] == InputMark(40, first.replace(second=9))
        assert reader.key_count() is None


def test_a_rollback_takes_the_watermark_back(url, opened):
    job = Windowed(url)
    job.batch(Row(1, "ann", 1))
    job.batch(Row(15, "ann", 2), Row(2, "ann", 4))
    with opened(url, "s") as reader:
        assert [(window.end, window.final) for window in reader.windows("ann")] == [(10, True), (20, False)]
        Ledger(job.store, "s").rollback()
        assert reader.windows("ann") == [Window(0, 10, {"total": 1}, final=False)]
        assert reader.watermark().time == 1


@pytest.mark.parametrize("batches", [1, 2])
def test_before_a_batch_its_windows_are_not_final(url, batches):
    """What it wrote is left out, and so is what its watermark has ended."""
    job = Windowed(url)
    if batches == 2:
        job.batch(Row(1, "ann", 1))
    job.batch(Row(15, "ann", 2), Row(2, "ann", 4))
    with StateReader(resolve(url), "s", "committed", {}, before=("q", batches - 1)) as reader:
        kept = [Window(0, 10, {"total": 1}, final=False)]
        assert reader.windows("ann") == (kept if batches == 2 else [])
        assert dict(reader.window(10)) == ({("ann",): {"total": 1}} if batches == 2 else {})
        assert reader.watermark().time == (1 if batches == 2 else None)


def test_before_a_batch_that_has_joined_a_session_its_rows_are_where_they_were(url):
    """That batch puts the rows of earlier panes into a later one."""
    fields = (TOTAL, Field(FIRST, "Min(at)", "bigint"), Field(LAST, "Max(at)", "bigint"))

    def value(rows):
        return [sum(row.n for row in rows), min(row.at for row in rows), max(row.at for row in rows)]

    job = Windowed(url, sessions=True, fields=fields, value=value)
    job.batch(Row(5, "ann", 1), Row(12, "ann", 2))
    job.batch(Row(21, "ann", 4), Row(31, "ann", 8))

    def read():
        with StateReader(resolve(url), "s", "committed", {}, before=("q", 2)) as reader:
            return (
                reader.windows("ann"),
                reader.multi_get([(0, "ann"), (10, "ann"), (20, "ann")]),
                sorted(reader.scan()),
            )

    rows = read()
    assert [window.value for window in rows[0]] == [{"total": 15}]
    commit, change, kept = job.attempt()
    pane = pane_to_settle(job.record.windows, job.record.last_windows())
    assert pane == 20
    with writer_of(job.store, job.record.fence()) as writer:
        state = OpaqueMap(SerializedMap(writer, job._codec()), job.record.view())
        state.begin_commit(commit.txid)
        state.multi_combine(KeyCodec(job.keys).encode_all([(pane, "ann")]), [[7, 5, 21]], replace_all)
    assert read() == rows
    settled = msgspec.structs.replace(commit.windows, settled=pane)
    job.commit((msgspec.structs.replace(commit, windows=settled), change, kept))
    assert read() == rows


def test_a_purge_between_the_ledger_and_the_records_leaves_out_no_window(tmp_path):
    url = f"memory://{tmp_path.name}"
    job = Windowed(url, retention=10)
    job.batch(Row(1, "ann", 1), Row(12, "ann", 2))
    job.batch(Row(32, "ann", 4))
    with open_reader(Between(url, lambda: job.batch(Row(33, "ann", 8))), "s") as reader:
        assert shown(reader.windows("ann")) == job.right("ann") == {40: 12}
    assert job.record.windows.purged == 20


@pytest.mark.parametrize("shape", [{}, {"length": 20}])
def test_a_window_is_whole_or_gone_whenever_it_is_purged(tmp_path, shape):
    whole = gone = 0
    for place in range(12):
        url = f"memory://{tmp_path.name}{place}"
        job = Windowed(url, **shape)
        users = [f"user {at}" for at in range(450)]
        job.batch(*(Row(at % 10, user, at) for at, user in enumerate(users)))
        job.batch(Row(12, "ann", 2))
        right = {(user,): {"total": at} for at, user in enumerate(users)}

        def purge(job: Windowed = job) -> None:
            job.batch(Row(32, "ann", 4))
            job.batch(Row(33, "ann", 8))
            assert job.record.windows.purged >= 10

        backend = Between(url, *[lambda: None] * place, purge)
        with open_reader(backend, "s") as reader:
            try:
                assert dict(reader.window(10)) == right
                whole += 1
            except WindowGoneError:
                gone += 1
    assert whole
    assert gone >= 4


def test_a_batch_that_is_rolled_back_while_its_window_is_read_is_an_error(tmp_path):
    url = f"memory://{tmp_path.name}"
    job = Windowed(url)
    job.batch(Row(1, "ann", 1))
    job.batch(Row(2, "bob", 1), Row(12, "ann", 2))

    def roll_back() -> None:
        Ledger(job.store, "s").rollback()

    with open_reader(Between(url, roll_back), "s") as reader, pytest.raises(StaleBatchError, match="rolled back"):
        list(reader.window(10))


def test_a_batch_that_comes_and_is_rolled_back_while_its_window_is_read_is_no_lost_record(tmp_path):
    """The reader finds its key in the index, and then no record of it. Meanwhile another batch has ended the window."""
    stale = 0
    for place in range(6):
        url = f"memory://{tmp_path.name}{place}"
        job = Windowed(url)
        job.batch(Row(1, "ann", 1))

        def replace(job: Windowed = job) -> None:
            Ledger(job.store, "s").rollback()
            job.ledgers, job.next = None, 1
            job.batch(Row(12, "ann", 2))

        calls = [lambda job=job: job.batch(Row(2, "bob", 1)), *[lambda: None] * place, replace]
        with open_reader(Between(url, *calls), "s") as reader:
            try:
                assert dict(reader.window(10)) in [
                    {("ann",): {"total": 1}},
                    {("ann",): {"total": 1}, ("bob",): {"total": 1}},
                ]
            except StaleBatchError:
                stale += 1
    assert stale


def test_a_record_that_is_lost_is_noticed_in_a_final_window(url, opened):
    job = Windowed(url, retention=100)
    job.batch(Row(1, "ann", 1), Row(2, "bob", 2))
    job.batch(Row(15, "ann", 1))
    with job._writer(job._begin()) as writer:
        job._remove(writer, ["0|bob"])
    with opened(url, "s") as reader, pytest.raises(StoreLostError, match="'bob', which has no record"):
        list(reader.window(10))


def test_a_scan_gives_no_index_and_no_window_that_is_gone(url, opened):
    job = Windowed(url)
    job.batch(Row(1, "ann", 1), Row(2, "bob", 2))
    job.batch(Row(25, "ann", 4))
    job.batch()
    assert job.record.windows.purged == 20
    with opened(url, "s") as reader:
        assert dict(reader.scan()) == {(20, "ann"): {"total": 4}}
        job.batch(Row(39, "bob", 5))
        job._begin()  # what it purges is there still
        assert job.record.windows.purged == 30
        assert dict(reader.scan()) == {(30, "bob"): {"total": 5}}
        assert reader.count_keys().found == 1
    assert any(is_index_key(key) for page in job.store.scan(100) for key in page)


def test_keys_of_a_window_that_is_gone_are_gone_together(url, opened):
    """Also while a purge has removed some of them."""
    job = Windowed(url)
    job.batch(Row(1, "ann", 1), Row(2, "bob", 2))
    job.batch(Row(25, "ann", 4))
    with opened(url, "s") as reader:
        assert reader.multi_get([(0, "ann"), (0, "bob")]) == [{"total": 1}, {"total": 2}]
        with job._writer(job._begin()) as writer:
            job._remove(writer, ["0|bob"])
        assert reader.multi_get([(0, "ann"), (0, "bob"), (20, "ann")]) == [None, None, {"total": 4}]


def test_a_state_without_windows_has_none(url, opened):
    Job(url).batch(a=1)
    with opened(url, "s") as reader:
        for call in (reader.watermark, reader.windows, lambda: list(reader.window(10))):
            with pytest.raises(UsageError, match="has no windows"):
                call()


def test_a_wrong_key_is_an_error_also_where_no_window_is(url, opened):
    Windowed(url).batch()
    with opened(url, "s") as reader:
        assert reader.windows("ann") == []
        for key in ((), ("ann", "bob"), (1,)):
            with pytest.raises(KeyEncodingError):
                reader.windows(key)
        with pytest.raises(UsageError, match="numbers"):
            reader.windows("ann", until=dt.datetime(2026, 1, 1, tzinfo=dt.UTC))


class Longest(CombinerAggregator):
    """A user's own."""

    value_type = "string"

    def init(self, row: Any) -> Any:
        return row["user"]

    def combine(self, a: Any, b: Any) -> Any:
        return max(a, b, key=len)


def test_a_combiner_of_ones_own_joins_panes_if_it_is_given(url, opened):
    words = Field("word", "Longest", "string")
    job = Windowed(
        url, length=20, fields=(words,), value=lambda rows: max((row.user for row in rows), key=len), grouped=False
    )
    job.batch(Row(1, "a", 0), Row(12, "ccc", 0))
    job.batch(Row(33, "dd", 0))
    with opened(url, "s") as reader, pytest.raises(UsageError, match=r"aggregators=\{'word'"):
        reader.windows()
    with opened(url, "s", aggregators={"word": Longest()}) as reader:
        found = {window.end: window.value["word"] for window in reader.windows()}
        assert found == {20: "ccc", 30: "ccc", 40: "dd", 50: "dd"}
        assert list(reader.window(40)) == [((), {"word": "dd"})]


def test_a_sum_of_nulls_joins_with_numbers():
    fields = joins_of([TOTAL], {})
    assert joined(fields, [(None,), 3, (None,)]) == 3
    assert joined(fields, [(None,), (None,)]) == (None,)
    both = joins_of([TOTAL, Field("n", "Count", "bigint")], {})
    assert joined(both, [(None, 1), (2, 3), (None, 4)]) == (2, 8)


def test_a_reader_that_shows_sketches_as_bytes_joins_them_all_the_same():
    field = Field("users", "ApproxCountDistinct(user, log2k=12)", "struct<hll:binary,crc32:bigint>")
    (own,) = joins_of([field], {"users": SketchBytes()}).aggregators
    assert repr(own) == field.aggregator
