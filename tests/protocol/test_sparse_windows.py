"""Windows with gaps between them: the ledger stays small, and nobody walks the gaps."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from windowed import Row, Windowed

from mapstate import open_reader
from mapstate.errors import CorruptLedgerError, StoreLostError, WindowGoneError
from mapstate.keys import is_index_key
from mapstate.maps import pane_index
from mapstate.maps.pane_index import PanePages
from mapstate.protocol import ledger_record, stored_ledger, windows
from mapstate.protocol.ledger import Ledger
from mapstate.protocol.ledger_record import encode_ledger
from mapstate.protocol.sessions import last_panes
from mapstate.protocol.stored_ledger import read_ledger, record_pages
from mapstate.protocol.windows import (
    PaneChange,
    Panes,
    WindowCommit,
    WindowDefinition,
    WindowsRecord,
    fired_panes,
)
from mapstate.reader.windows import WindowReads
from mapstate.spark.executor.window_task import FiredTask

MINUTE = 60
DAY = 86_400
YEAR = 31_557_600


@pytest.fixture(params=[pytest.param("sqlite", marks=pytest.mark.full), pytest.param("redis", marks=pytest.mark.redis)])
def url(request: Any, tmp_path: Any) -> str:
    """A store of each kind, empty."""
    return f"sqlite:///{tmp_path}/state.db" if request.param == "sqlite" else request.getfixturevalue("redis_url")


class Counting:
    """A store that counts what is read of it."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.reads = self.keys = self.ledgers = self.bytes = 0

    def multi_get(self, keys: Any) -> Any:
        found = self._store.multi_get(keys)
        self.reads += 1
        self.keys += len(keys)
        self.bytes += sum(len(data) for data in found if data)
        return found

    def load(self) -> Any:
        stored = self._store.load()
        self.ledgers += 1
        self.bytes += len(stored[0])
        return stored

    def close(self) -> None:
        """Nothing: whoever made the store closes it."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def every_three_minutes(job: Windowed, count: int, *, batches: int = 20) -> None:
    """Rows of which each is in a window of its own, with two empty ones behind."""
    each = -(-count // batches)
    for start in range(0, count, each):
        job.batch(*(Row(180 * at, "ann", 1) for at in range(start, min(count, start + each))))


def size(job: Windowed) -> int:
    return len(encode_ledger(job.record))


def pages_of(job: Windowed) -> PanePages:
    record, codec = read_ledger(job.store, "s"), pane_index.index_codec("json", "s")
    assert record.windows is not None

    def read(keys: list[str]) -> list[Any]:
        return record.view().values(codec.loads(keys, job.store.multi_get(keys)), record.next_txid - 1)

    return PanePages("s", record.windows, read)


def test_the_ledger_stays_small_however_many_windows_stand_alone(url):
    job = Windowed(url, length=MINUTE, slide=MINUTE, retention=30 * DAY)
    sizes = []
    for start in range(0, 7000, 350):
        job.batch(*(Row(180 * at, "ann", 1) for at in range(start, start + 350)))
        sizes.append(size(job))
    assert max(sizes) < 20_000
    assert sizes[-1] < 2_000
    with open_reader(url, "s") as reader:
        found = {window.end: window.value["total"] for window in reader.windows("ann")}
        assert found == job.right("ann")
        assert len(found) == 7000
        some = reader.windows("ann", since=180 * 3000, until=180 * 3010)
        assert [window.end for window in some] == [180 * at + 60 for at in range(3000, 3010)]
        assert dict(reader.window(180 * 3000 + 60)) == {("ann",): {"total": 1}}


def test_three_weeks_in_one_batch_are_taken(url):
    job = Windowed(url, length=MINUTE, slide=MINUTE, retention=30 * DAY)
    every_three_minutes(job, 10_080, batches=1)
    job.batch(Row(180 * 10_079, "ann", 1), Row(180 * 10_080, "ann", 1))
    assert size(job) < 20_000
    with open_reader(url, "s") as reader:
        assert {window.end: window.value["total"] for window in reader.windows("ann")} == job.right("ann")


def test_what_is_over_is_purged_window_by_window_and_its_pages_with_it(url):
    job = Windowed(url, length=MINUTE, slide=MINUTE, retention=DAY)
    every_three_minutes(job, 600, batches=4)
    for at in (600, 800, 1000, 1100):
        job.batch(Row(180 * at, "ann", 1))
        with open_reader(url, "s") as reader:
            assert {window.end: window.value["total"] for window in reader.windows("ann")} == job.right("ann")
    job.batch(Row(180 * 10_000, "ann", 1))
    job.batch()
    assert list(pages_of(job).named()) == [180 * 10_000]
    records = [key for page in record_pages(job.store, 1000) for key in page if not is_index_key(key)]
    assert records == [f"{180 * 10_000}|ann"]
    values = pages_of(job)._read([key for page in record_pages(job.store, 1000, index=True) for key in page])
    assert len([value for value in values if value is not None]) <= 2 + job.record.windows.height


@pytest.mark.parametrize("kind", ["bigint", "timestamp"])
def test_a_row_a_year_in_windows_of_a_second_costs_what_its_panes_cost(url, kind):
    second, year = (1, YEAR) if kind == "bigint" else (10**6, YEAR * 10**6)
    job = Windowed(url, length=second, slide=second, retention=9000 * year, kind=kind)
    years = list(range(-1900, 7000, 5))
    for start in range(0, len(years), 500):
        job.batch(*(Row(year * at, "ann", 1) for at in years[start : start + 500]))
    assert size(job) < 40_000
    store = Counting(job.store)
    job.store, kept = store, job.store
    assert list(pages_of(job).named()) == [job.definition.panes.pane(year * at) for at in years]
    assert store.keys < 4 * len(years)
    job.store = kept
    with open_reader(url, "s") as reader:
        assert len(reader.windows("ann")) == len(years)


def fired(job: Windowed, store: Any, ends: range) -> list[int]:
    """The ends of the windows that a batch has fired, as its task reads them."""
    assert job.record.windows is not None
    done = job.record.last_windows()
    assert done is not None
    panes = [pane for pane, _ in fired_panes(job.record.windows, done, pages_of(job).named)]
    places = [(pane, at) for pane in panes for at in range(job.record.windows.width)]
    batch = pa.RecordBatch.from_arrays(list(map(pa.array, zip(*places, strict=True))), ["pane", "partition"])
    spec: Any = SimpleNamespace(state="s", serializer="json", chunk_size=2000, open=lambda: store)
    task = FiredTask(spec, job.record, ends)
    return [end for page in task.pages(iter([batch])) for ends_of_key in page.ends for end in ends_of_key]


def test_the_ledger_is_read_once_where_a_hundred_small_windows_fire(url):
    job = Windowed(url, length=MINUTE, slide=MINUTE, retention=30 * DAY)
    every_three_minutes(job, 7000)
    job.batch(*(Row(180 * at, "ann", 1) for at in range(7000, 7101)))
    store = Counting(job.store)
    ends = fired(job, store, range(180 * 6999 + 61, 180 * 7100 + 1))
    assert ends == [180 * at + 60 for at in range(7000, 7100)]
    assert store.ledgers == 1
    assert store.bytes < 40_000


def test_a_batch_that_is_rolled_back_leaves_the_panes_as_they_were(url, monkeypatch):
    monkeypatch.setattr(pane_index, "MOST_RUNS", 10)
    job = Windowed(url, length=MINUTE, slide=MINUTE, retention=30 * DAY)
    every_three_minutes(job, 10, batches=1)
    before = list(pages_of(job).named())
    for _ in range(3):  # the batch in which the ledger begins to name pages comes again and again
        job.batch(*(Row(180 * at, "ann", 1) for at in range(10, 3000, 7)))
        Ledger(job.store, "s").rollback()
        job.committed.pop()
        job = job.restarted()
        assert read_ledger(job.store, "s").windows.height > 0
        assert list(pages_of(job).named()) == before
    job.batch(Row(180 * 5000, "ann", 1))
    assert list(pages_of(job).named()) == [*before, 180 * 5000]
    with open_reader(url, "s") as reader:
        assert {window.end: window.value["total"] for window in reader.windows("ann")} == job.right("ann")


def test_a_window_whose_page_is_purged_while_it_is_read_is_gone_and_not_empty(url, monkeypatch):
    monkeypatch.setattr(pane_index, "MOST_RUNS", 1)
    job = Windowed(url, length=MINUTE, slide=MINUTE, retention=MINUTE)
    job.batch(Row(0, "ann", 1), Row(600, "ann", 1))
    right = WindowReads.named

    def named(*arguments: Any) -> Any:
        monkeypatch.setattr(WindowReads, "named", right)
        for at in (DAY, DAY + 1):
            job.batch(Row(at, "ann", 1))
        return right(*arguments)

    monkeypatch.setattr(WindowReads, "named", named)
    with open_reader(url, "s") as reader, pytest.raises(WindowGoneError):
        list(reader.window(MINUTE))


def test_a_page_that_is_lost_is_an_error_for_readers_and_for_the_job(url):
    job = Windowed(url, length=MINUTE, slide=MINUTE, retention=30 * DAY)
    every_three_minutes(job, 2000)
    found = [str(key) for keys in record_pages(job.store, 1000, index=True) for key in keys if "@1|" in str(key)]
    page = max(found, key=lambda key: int(key.rpartition("|")[2]))
    attempt = job._begin()
    with job._writer(attempt) as writer:
        job._remove(writer, [page])
    with open_reader(url, "s") as reader, pytest.raises(StoreLostError, match="@1"):
        reader.windows("ann")
    job = job.restarted()
    with pytest.raises(StoreLostError, match="@1"):
        job.attempt(Row(180 * 2000, "ann", 1))


def test_a_ledger_that_names_thousands_of_runs_is_read_and_goes_on(url, monkeypatch):
    """As an older mapstate left it."""
    monkeypatch.setattr(pane_index, "MOST_RUNS", 10_000)
    job = Windowed(url, length=MINUTE, slide=MINUTE, retention=30 * DAY)
    every_three_minutes(job, 3000)
    assert len(job.record.windows.panes) == 3000
    assert b"height" not in encode_ledger(job.record)
    monkeypatch.undo()
    job = job.restarted()
    with open_reader(url, "s") as reader:
        assert {window.end: window.value["total"] for window in reader.windows("ann")} == {
            180 * at + 60: 1 for at in range(3000)
        }
        job.batch(Row(180 * 3000, "ann", 1))
        assert len(job.record.windows.panes) < 500
        assert {window.end: window.value["total"] for window in reader.windows("ann")} == job.right("ann")


def test_an_older_mapstate_refuses_a_ledger_with_pages(url, monkeypatch):
    job = Windowed(url, length=MINUTE, slide=MINUTE, retention=30 * DAY)
    every_three_minutes(job, 600, batches=2)
    assert job.record.format == ledger_record.FORMAT_WITH_PAGES
    monkeypatch.setattr(stored_ledger, "format_of", lambda *_: ledger_record.FORMAT_WITH_WINDOWS)
    with pytest.raises(CorruptLedgerError, match="in format 4"):
        read_ledger(job.store, "s")


shapes = st.builds(Panes, st.integers(1, 12), st.integers(1, 12), st.integers(-15, 15))


class Pages:
    """A record of windows with its pages, batch by batch. The last batch can be taken back."""

    def __init__(self, panes: Panes, *, sessions: bool = False) -> None:
        self.definition = WindowDefinition(
            length=panes.length, slide=panes.slide, offset=panes.offset, sessions=sessions
        )
        self.record = WindowsRecord(definition=self.definition)
        self.stored: dict[str, tuple[Any, Any]] = {}
        self.last: set[str] = set()

    def read(self, keys: list[str]) -> list[Any]:
        return [self.stored.get(key, (None, None))[0] for key in keys]

    @property
    def pages(self) -> PanePages:
        return PanePages("s", self.record, self.read)

    def batch(self, written: set[int], purged: set[int]) -> None:
        change, pages = self.pages.changed(PaneChange(written, purged))
        for key, (runs, before) in pages.items():
            assert (self.stored.get(key, (None, None))[0] or before) == before
            self.stored[key] = (runs, before)
        self.last = set(pages)
        self.record = self.record.committed(change)

    def roll_back(self) -> None:
        for key in self.last:
            self.stored[key] = (self.stored[key][1], None)
        self.last = set()


@given(shapes, st.data())
def test_pages_name_the_panes_that_were_written_and_not_purged(panes, data):
    with pytest.MonkeyPatch.context() as patched:
        most = data.draw(st.integers(1, 4))
        patched.setattr(pane_index, "MOST_RUNS", most)
        patched.setattr(windows, "PAGE_SLIDES", data.draw(st.integers(2, 4)))
        pages, here, maybe = Pages(panes), set(), set()
        for _ in range(data.draw(st.integers(1, 6))):
            times = data.draw(st.sets(st.integers(-60, 60), max_size=12))
            written = {pane for pane in map(panes.pane, times) if pane is not None}
            purged = set(sorted(here)[: data.draw(st.integers(0, 6))])
            if data.draw(st.booleans()):
                pages.batch(written, purged)
                here = (here | written) - purged
            else:
                maybe |= written if pages.record.height == 0 else set()  # a rollback leaves the ledger's own runs
                pages.batch(written, set())
                pages.roll_back()
            since, until = data.draw(st.integers(-70, 70)), data.draw(st.integers(-70, 70))
            assert set(pages.pages.named(since, until)) >= {pane for pane in here if since <= pane < until}
            listed = list(pages.pages.named())
            assert all(one < other for one, other in pairwise(listed))
            assert len(pages.record.panes) <= most
            assert here <= set(listed) <= here | maybe


def test_a_search_for_fired_sessions_reads_the_pages_of_its_times_alone():
    pages = Pages(Panes(10, 10), sessions=True)
    pages.batch(set(range(0, 10**6, 500)), set())
    read: list[str] = []

    def reading(keys: list[str]) -> list[Any]:
        read.extend(keys)
        return pages.read(keys)

    named = PanePages("s", pages.record, reading).named
    found = last_panes(pages.record, WindowCommit(before=500_000, watermark=502_000), named)
    assert found == [500_000, 500_500, 501_000, 501_500]
    assert len(read) < 10


def test_a_damaged_height_is_found():
    record = WindowsRecord(definition=WindowDefinition(length=10, slide=10))
    for height in (-1, 9):
        assert msgspec.structs.replace(record, height=height).has_flaw([SimpleNamespace(type="bigint")], [])
    assert not msgspec.structs.replace(record, height=8).has_flaw([SimpleNamespace(type="bigint")], [])
