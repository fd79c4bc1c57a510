"""Corrections of windows: no row is late as long as its window is there, and none is counted nowhere."""

from __future__ import annotations

import datetime as dt
import random
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from cases import full
from clicks import CONFIGS, USERS, WINDOWS, Clicks, Names
from every_store import AEROSPIKE, FULL, REDIS, url_of
from processes import FIXTURES, with_modules
from pyspark.sql import functions as F
from rolled import Row
from spark_fixtures import AVAILABLE
from windows_job import IndexPut
from windows_oracle import Oracle

from mapstate import LIFETIME, Count, RollingWindows, TumblingDurationWindow, errors, newStream, opaque, open_reader
from mapstate.backends import resolve
from mapstate.capabilities import FencedWrites
from mapstate.keys import is_index_key
from mapstate.maps.operator_list import entry_key
from mapstate.maps.pane_index import pane_of
from mapstate.operations.compare import compare
from mapstate.operations.forget import forget, listed
from mapstate.operations.swap import swap
from mapstate.operations.vacuum import vacuum
from mapstate.protocol.ledger import Ledger
from mapstate.protocol.stored_ledger import record_pages
from mapstate.reader import windows as reads_of_windows
from mapstate.testing import Fail, FaultyBackend, HasKey

pytestmark = pytest.mark.spark

SCHEMA = "at bigint, user string, n bigint"


@pytest.fixture(params=[full("sqlite"), REDIS, FULL[-1], AEROSPIKE])
def url(request: Any, tmp_path: Path) -> str:
    return url_of(request, tmp_path)


@pytest.fixture
def clicks(tmp_path: Path) -> Clicks:
    return Clicks(tmp_path)


def frame(spark: Any, rows: list[Row]) -> Any:
    return spark.createDataFrame(rows, SCHEMA)


def rows_of(draw: random.Random, start: int, stop: int, count: int, users: str = USERS) -> list[Row]:
    return [Row(draw.randrange(start, stop), draw.choice(users), draw.randint(-9, 9)) for _ in range(count)]


def run(spark: Any, clicks: Clicks, url: Any, kind: str, **more: Any) -> Any:
    """A batch for each file that has come."""
    state = clicks.windowed(spark, url, kind, **more)
    state.start(clicks.checkpoint, trigger=AVAILABLE).awaitTermination()
    return state


def begun(spark: Any, clicks: Clicks, url: str, kind: str, **more: Any) -> Any:
    """Three batches: windows are gone, final and open."""
    draw = random.Random(kind)
    for at in range(0, 300, 100):
        clicks.put([*rows_of(draw, at, at + 100, 30), Row(at + 99, "x", 1)])
    return run(spark, clicks, url, kind, **more)


def late(url: str) -> list[Row]:
    """Rows of each window that is there, also of final ones, of keys that there are and new ones; and of one ahead."""
    draw, purged = random.Random(7), ledger(url).windows.purged
    return [*rows_of(draw, purged, 299, 40, USERS + "new"), Row(345, "x", 5), Row(purged, "other", 2)]


def ledger(url: str) -> Any:
    with open_reader(url, "windows") as reader:
        return reader.ledger()


def correct(spark: Any, clicks: Clicks, state: Any, rows: list[Row], name: str = "a") -> Any:
    done = state.correct(add=frame(spark, rows), id=name)
    if not done.was_done:
        clicks.rows += rows
    return done


def check(clicks: Clicks, url: str, kind: str, **aggregators: Any) -> None:
    """All windows of each key, and all keys of each window, by brute force."""
    oracle = Oracle(CONFIGS[kind].length, CONFIGS[kind].slide)
    with open_reader(url, "windows", aggregators=aggregators) as reader:
        kept, right = reader.ledger().windows, dict[tuple[Any, str], list[int]]()
        assert kept is not None
        for row in clicks.rows:
            for end in oracle.ends(row.at or 0):
                if end > kept.purged:
                    right.setdefault((end, row.user), []).append(row.n)
        assert right
        for user in {row.user for row in clicks.rows}:
            found = {(one.end, user): one.value for one in reader.windows(user)}
            assert {key: (value["rows"], value["total"]) for key, value in found.items()} == {
                key: (len(own), sum(own)) for key, own in right.items() if key[1] == user
            }, user
            assert all(value["names"] == sorted(right[key]) for key, value in found.items() if aggregators)
        for end in {end for end, _ in right}:
            shown = {key[0]: value["rows"] for key, value in reader.window(end)}
            assert shown == {user: len(own) for (until, user), own in right.items() if until == end}, end


@pytest.mark.parametrize("kind", [full("tumbling"), full("sliding"), "gaps", "blocks"])
def test_rows_are_added_to_windows_final_or_not_and_batches_go_on(spark, clicks, url, kind):
    state = begun(spark, clicks, url, kind)
    before, rows = ledger(url), late(url)
    done = correct(spark, clicks, state, rows)
    assert (done.rows, done.was_done) == (len(rows), False)
    check(clicks, url, kind)
    after = ledger(url)
    assert (after.last_commit, after.previous) == (before.last_commit, before.previous)
    assert after.windows.purged == before.windows.purged
    assert correct(spark, clicks, state, rows[::-1]) == done._replace(was_done=True)
    with pytest.raises(errors.UsageError, match="counts other rows under the id 'a'"):
        correct(spark, clicks, state, rows[1:])
    assert ledger(url) == after
    draw = random.Random(kind)
    for at in (300, 400):  # what was added is in windows that fire, and goes with them
        clicks.put([*rows_of(draw, at, at + 100, 30), Row(at + 99, "x", 1)])
        run(spark, clicks, url, kind)
        check(clicks, url, kind)
    clicks.put([Row(5_000, "x", 1)])
    clicks.put([Row(6_000, "x", 1)])
    run(spark, clicks, url, kind)
    check(clicks, url, kind)
    assert panes(url) <= {"5000", "6000", "4995", "5995", "5990"}
    assert vacuum(url, "windows").unreadable == 0


@pytest.mark.parametrize("kind", ["tumbling", full("sliding"), full("gaps"), "blocks"])
def test_each_final_window_that_a_correction_changed_is_passed_on_whole(spark, clicks, url, kind):
    begun(spark, clicks, url, kind)
    state, fired, touched = clicks.windowed(spark, url, kind), {}, {}
    state.firedWindowsStream().foreachBatch(lambda rows, number: fired.update({number: rows.collect()}))
    if kind == "tumbling":
        state.newValuesStream().foreachBatch(lambda rows, number: touched.update({number: rows.collect()}))
    mark, purged, oracle = ledger(url).final_mark(), ledger(url).windows.purged, Oracle(*_sizes(kind))
    for number, rows in (
        (-1, [Row(purged + 6, "new", 1), Row(purged + 6, "y", 1), Row(purged + 26, "z", 2)]),
        (-2, late(url)),
    ):
        done = state.correct(add=frame(spark, rows), id=str(number), emit=True)
        clicks.rows += rows
        ends = {end for row in rows for end in oracle.ends(row.at) if purged < end <= mark}
        right: dict[Any, list[int]] = {}
        for row in clicks.rows:
            for end in ends.intersection(oracle.ends(row.at or 0)):
                right.setdefault((end, row.user), []).append(row.n)
        found = {(row.window_end, row.user): (row.rows, row.total) for row in fired.pop(number)}
        assert ends
        assert found == {key: (len(own), sum(own)) for key, own in right.items()}
        if kind == "tumbling":
            assert len(touched.pop(number)) == done.keys
    state.correct(add=frame(spark, [Row(299, "x", 1)]), id="open", emit=True)  # its windows have not fired
    assert not fired


def _sizes(kind: str) -> tuple[int, int]:
    return CONFIGS[kind].length, CONFIGS[kind].slide


def panes(url: str) -> set[str]:
    """Those that have a record of a value, where a purge may remove them."""
    store: Any = resolve(url).open("windows")
    if not isinstance(store, FencedWrites):
        return set()
    keys = [key for page in record_pages(store, 1000) for key in page]
    return {pane_of(key)[0] for key in keys if not is_index_key(key)}


def test_aggregates_in_python_take_rows_of_windows(spark, clicks, tmp_path):
    url = f"sqlite:///{tmp_path}/state.db"
    state = begun(spark, clicks, url, "tumbling", names=Names())
    correct(spark, clicks, state, late(url))
    check(clicks, url, "tumbling", names=Names())


def test_windows_of_timestamps_and_columns_that_a_step_makes(spark, tmp_path):
    url, first = f"sqlite:///{tmp_path}/state.db", dt.datetime(2026, 11, 20, tzinfo=dt.UTC)

    def of(*hours: float) -> Any:
        return spark.createDataFrame(
            [(first + dt.timedelta(hours=hour), "x") for hour in hours], "at timestamp, u string"
        )

    rows = newStream("visits", of()).transform(lambda df: df.selectExpr("at + interval 1 hour at", "upper(u) user"))
    counts = rows.window(TumblingDurationWindow.of("1 hour"), timestampField="at", retention="3 hours")
    state = counts.groupBy("user").persistentAggregate(opaque(url, name="windows"), rows=Count())
    for number, hour in enumerate((0, 9.5, 9.6)):
        state(of(hour), number)
    with pytest.raises(errors.UsageError, match="windows that are gone.*begin at 2026-11-20T06:00:00.000000Z. Nothing"):
        state.correct(add=of(5, 6.2, 9.5, 20), id="a")
    state.correct(add=of(6.2, 9.5, 20), id="a")
    with open_reader(url, "windows") as reader:
        found = {one.start.hour: one.value["rows"] for one in reader.windows("X") if isinstance(one.start, dt.datetime)}
        assert found == {7: 1, 10: 3, 21: 1}
        assert reader.watermark().time == first + dt.timedelta(hours=10.6)


@pytest.mark.parametrize("kind", [full("tumbling"), "sliding", "gaps", full("blocks")])
def test_rows_that_would_be_nowhere_are_refused_by_name(spark, clicks, tmp_path, kind):
    url = f"sqlite:///{tmp_path}/state.db"
    state = begun(spark, clicks, url, kind)
    before, grid = ledger(url), CONFIGS[kind].panes("bigint", 0)
    purged = before.windows.purged
    first = grid.start(purged - 1)
    while grid.last_end(first) > purged:
        first = grid.before(first)
    for rows, text in (
        ([Row(first, "x", 1), Row(first, "y", 1), Row(290, "x", 1)], f"in panes that begin at {first}. Nothing"),
        ([Row(at, "x", 1) for at in range(0, 200, 10)], r"in panes that begin at 0, .*, \.\.\.\. Nothing"),
        ([Row(None, "x", 1), Row(290, "x", 1), Row(1 << 62, "x", 1)], "2 rows to add have no time"),
    ):
        with pytest.raises(errors.UsageError, match=text):
            correct(spark, clicks, state, rows)
    assert ledger(url) == before
    check(clicks, url, kind)
    correct(spark, clicks, state, [Row(grid.after(first), "x", 1)])
    check(clicks, url, kind)


def test_a_forgotten_key_and_rows_to_take_back_are_refused(spark, clicks, tmp_path):
    url = f"sqlite:///{tmp_path}/state.db"
    state = begun(spark, clicks, url, "tumbling")
    forget(url, "windows", {"user": "x"}, id="ticket", followers_have=0)
    before = ledger(url)
    with pytest.raises(errors.UsageError, match="1 keys of the rows to add were forgotten"):
        correct(spark, clicks, state, [Row(290, "x", 1), Row(290, "y", 1)])
    with pytest.raises(errors.ConfigurationError, match="rows of windows are added, or of those that fire a span"):
        state.correct(retract=frame(spark, [Row(290, "y", 1)]), id="a")
    assert ledger(url) == before
    clicks.rows = [row for row in clicks.rows if row.user != "x"]
    correct(spark, clicks, state, [Row(290, "y", 1)])
    check(clicks, url, "tumbling")


def test_a_rollback_takes_it_back_with_the_keys_that_it_brought(spark, clicks, url):
    state = begun(spark, clicks, url, "tumbling")
    before, kept = ledger(url), list(clicks.rows)
    correct(spark, clicks, state, late(url))
    Ledger(resolve(url).open("windows"), "windows").rollback()
    clicks.rows = kept
    check(clicks, url, "tumbling")
    assert ledger(url).last_commit == before.last_commit
    assert listed(url, "windows", "correction") == []
    clicks.put([*rows_of(random.Random(5), 300, 400, 30, USERS + "new"), Row(399, "x", 1)])
    state = run(spark, clicks, url, "tumbling")
    check(clicks, url, "tumbling")
    assert not correct(spark, clicks, state, [Row(350, "other", 1)]).was_done
    check(clicks, url, "tumbling")


def test_a_reader_of_a_final_window_does_not_get_a_part_of_a_correction(spark, clicks, tmp_path, monkeypatch):
    url = f"sqlite:///{tmp_path}/state.db"
    state = begun(spark, clicks, url, "tumbling")
    monkeypatch.setattr(reads_of_windows, "_PAGE", 1)
    with open_reader(url, "windows") as reader:
        end = ledger(url).windows.purged + 10
        assert end <= reader.watermark().time
        rows = reader.window(end)
        next(rows)
        correct(spark, clicks, state, [Row(end - 1, user, 1) for user in (*USERS, "new")])
        with pytest.raises(errors.StaleBatchError, match="or the state was corrected"):
            list(rows)
    check(clicks, url, "tumbling")


def test_a_new_version_without_it_is_no_version_to_swap_to(spark, clicks, tmp_path):
    url = f"sqlite:///{tmp_path}/state.db"
    correct(spark, clicks, begun(spark, clicks, url, "tumbling"), late(url))
    again = clicks.windowed(spark, url, "tumbling", "windows.v2")
    again.start(f"{clicks.checkpoint}-v2", trigger=AVAILABLE).awaitTermination()
    with pytest.raises(errors.UsageError, match="lacks corrections of 'windows'"):
        swap(url, {"windows": "windows.v2"}, max_lag=10**6)


def test_a_correction_in_the_midst_of_a_comparison_of_windows_ends_it(spark, clicks, tmp_path):
    url, seen = f"sqlite:///{tmp_path}/state.db", list[int]()
    state = begun(spark, clicks, url, "tumbling")
    again = clicks.windowed(spark, url, "tumbling", "windows.v2")
    again.start(f"{clicks.checkpoint}-v2", trigger=AVAILABLE).awaitTermination()
    assert compare(url, "windows", "windows.v2", page_size=3).is_equal

    def on_page(count: int) -> None:
        if not seen:
            correct(spark, clicks, state, [Row(260, user, 1) for user in (*USERS, "new")])
        seen.append(count)

    with pytest.raises(errors.StaleBatchError, match="was corrected"):
        compare(url, "windows", "windows.v2", page_size=3, on_page=on_page)
    assert not compare(url, "windows", "windows.v2").is_equal


# Rolling windows


def features(spark: Any, clicks: Clicks, url: Any, rows: list[Row], **more: Any) -> Any:
    clicks.put([*rows, Row(max(row.at or 0 for row in rows), "x", 1)])
    state = clicks.declared(spark, url, **more)
    state.start(clicks.checkpoint, trigger=AVAILABLE).awaitTermination()
    return state


def past(url: str, newest: int, *, has_lifetime: bool) -> list[Row]:
    """Rows of all times that count, also of keys that are new."""
    with open_reader(url, "features") as reader:
        kept = reader.ledger().rolling
        assert kept is not None
        first = 0 if has_lifetime else kept.first_time()
    draw = random.Random(newest)
    return [*rows_of(draw, first, newest + 1, 40, USERS + "new"), Row(first, "other", 2), Row(newest, "last", 3)]


@pytest.mark.parametrize(("windows", "own"), [(WINDOWS, {}), (WINDOWS[:3], {"names": Names()}), full(WINDOWS[:3], {})])
def test_rows_are_added_to_rolling_windows_and_batches_go_on(spark, clicks, url, windows, own):
    draw, more = random.Random(3), {"windows": windows, **own}
    for at in (0, 100, 200):
        state = features(spark, clicks, url, rows_of(draw, at, at + 100, 30), **more)
    rows = past(url, max(row.at or 0 for row in clicks.rows), has_lifetime=LIFETIME in windows)
    with open_reader(url, "features") as reader:
        before = reader.ledger()
    done = correct(spark, clicks, state, rows)
    assert (done.rows, done.was_done) == (len(rows), False)
    clicks.check(url, windows, own=bool(own))
    with open_reader(url, "features") as reader:
        assert reader.ledger().last_windows() == before.last_windows()
    assert correct(spark, clicks, state, rows[::-1]) == done._replace(was_done=True)
    Ledger(resolve(url).open("features"), "features").rollback()
    kept, clicks.rows = clicks.rows, clicks.rows[: -len(rows)]
    clicks.check(url, windows, own=bool(own))
    assert not state.correct(add=frame(spark, rows), id="a").was_done
    clicks.rows = kept
    for at in (290, 400):  # each key is in some window
        users = sorted({row.user for row in clicks.rows})
        of_each = [Row(at + 90, user, 1) for user in users]
        state = features(spark, clicks, url, [*rows_of(draw, at, at + 90, 30), *of_each], **more)
        clicks.check(url, windows, own=bool(own))
    rows = past(url, max(row.at or 0 for row in clicks.rows), has_lifetime=LIFETIME in windows)
    correct(spark, clicks, state, rows, "b")
    clicks.check(url, windows, own=bool(own))


def test_rows_that_no_rolling_window_would_have_are_refused(spark, clicks, tmp_path):
    url, draw = f"sqlite:///{tmp_path}/state.db", random.Random(3)
    for at in (0, 300):
        state = features(spark, clicks, url, rows_of(draw, at, at + 100, 30), windows=WINDOWS[:3])
    newest = max(row.at or 0 for row in clicks.rows)
    with open_reader(url, "features") as reader:
        before = reader.ledger()
        first = before.rolling.first_time()
    for rows, text in (
        ([Row(first - 1, "x", 1), Row(None, "y", 1), Row(290, "x", 1)], "2 rows to add have no time, or one that no"),
        ([Row(newest + 1, "x", 1), Row(290, "x", 1)], "1 rows to add are later than the latest row. Nothing"),
    ):
        with pytest.raises(errors.UsageError, match=text):
            correct(spark, clicks, state, rows)
    forget(url, "features", {"user": "x"}, id="ticket", followers_have=0)
    with pytest.raises(errors.UsageError, match="1 keys of the rows to add were forgotten"):
        correct(spark, clicks, state, [Row(390, "x", 1), Row(390, "y", 1)])
    with pytest.raises(errors.ConfigurationError, match="rows of windows are added"):
        state.correct(retract=frame(spark, [Row(390, "y", 1)]), id="a")
    correct(spark, clicks, state, [Row(first, "y", 1), Row(newest, "y", 1)])
    with open_reader(url, "features") as reader:
        assert reader.get("x") is None
        assert reader.ledger().rolling == before.rolling


def test_features_of_timestamps_take_rows_up_to_the_clock(spark, tmp_path):
    url, now = f"sqlite:///{tmp_path}/state.db", dt.datetime.now(dt.UTC)

    def of(*minutes: float) -> Any:
        return spark.createDataFrame(
            [(now + dt.timedelta(minutes=minute), "x") for minute in minutes], "at timestamp, user string"
        )

    windows = RollingWindows.of("1 hour", "7 days")
    rows = newStream("visits", of()).window(windows, timestampField="at", ahead="1 hour")
    state = rows.groupBy("user").persistentAggregate(opaque(url, name="features"), rows=Count())
    for number, minute in enumerate((-300, -30, -20)):
        state(of(minute), number)
    with pytest.raises(errors.UsageError, match="2 rows to add are later than the latest row and than the driver's"):
        state.correct(add=of(-5, 30, 50), id="a")
    state.correct(add=of(-5, -25, -400, -60 * 24 * 6), id="a")
    with open_reader(url, "features") as reader:
        assert reader.get("x") == {"rows_1_hour": 4, "rows_7_days": 7}


# Crashes


POINTS: dict[str, dict[str, Any]] = {
    "begin": {"method": "swap", "call": 1},
    "records": {"method": "multi_put", "call": 1},
    "index": {"method": "multi_put", "where": IndexPut()},
    "entry": {"method": "multi_put", "where": HasKey(entry_key(0))},
    "commit": {"method": "swap", "call": 2},
}


def test_a_step_that_gives_other_times_each_time_loses_no_row(spark, clicks, tmp_path):
    """The checks and the attempt are of the same rows: one that came late in between was counted nowhere."""
    url = f"sqlite:///{tmp_path}/state.db"
    drawn = F.udf(lambda at: at or random.SystemRandom().randrange(1, 300), "bigint").asNondeterministic()("at")
    stream = newStream("clicks", spark.createDataFrame([], SCHEMA)).transform(lambda rows: rows.withColumn("at", drawn))
    state = stream.tumblingWindow(10, timestampField="at", retention=100).groupBy("user")
    counts = state.persistentAggregate(opaque(url, "windows"), rows=Count())
    for batch, at in enumerate((100, 200, 300)):
        counts(frame(spark, [Row(at, "x", 1)]), batch)
    added = 0
    for at in range(20):
        with suppress(errors.UsageError):
            added += counts.correct(add=frame(spark, [Row(0, "late", 1)]), id=f"{at}").rows
        with open_reader(url, "windows") as reader:
            assert sum(window.value["rows"] for window in reader.windows("late")) == added
    assert 0 < added < 20


@pytest.mark.parametrize("between", [False, full(True)])
@pytest.mark.parametrize(
    ("point", "after"),
    [
        *(full("begin", True), full("records", False), ("records", True), full("index", False), ("index", True)),
        *(full("entry", False), full("entry", True), full("commit", False), ("commit", True)),
    ],
)
def test_it_is_there_once_after_a_crash_at_each_write(spark, clicks, tmp_path, monkeypatch, point, after, between):
    """As a driver leaves it that was killed: nothing is given up. A batch may come in between."""
    url = f"sqlite:///{tmp_path}/state.db"
    state = begun(spark, clicks, url, "sliding")
    rows, faults = late(url), tmp_path / "faults"
    faults.mkdir()
    backend: Any = FaultyBackend(
        resolve(url), faults, (Fail(**POINTS[point], after=after, error=errors.CorruptStoreError),)
    )
    with monkeypatch.context() as patch:
        patch.setattr(Ledger, "give_up_operator", lambda *_: None)
        with pytest.raises(errors.CorruptStoreError):
            clicks.windowed(spark, backend, "sliding").correct(add=frame(spark, rows), id="a")
    counts = (point, after) == ("commit", True)
    clicks.rows += rows * counts
    check(clicks, url, "sliding")
    if between:
        clicks.put([Row(300, "x", 1), Row(301, "new", 1)])
        run(spark, clicks, url, "sliding")
        check(clicks, url, "sliding")
    rows = [row for row in rows if counts or (row.at or 0) >= ledger(url).windows.purged]
    assert correct(spark, clicks, state, rows).was_done == counts
    check(clicks, url, "sliding")
    assert correct(spark, clicks, state, rows).was_done
    assert [entry.id for entry in listed(url, "windows", "correction")] == ["a"]
    for at in (5_000, 6_000, 7_000):
        clicks.put([Row(at, "x", 1)])
    run(spark, clicks, url, "sliding")
    check(clicks, url, "sliding")
    vacuum(url, "windows")  # what the orphaned attempt has left in panes that are gone since
    assert panes(url) <= {f"{at + more}" for at in (5_000, 6_000, 7_000) for more in (-20, -15, -10, -5, 0)}


@pytest.mark.parametrize("at", ["multi_put", full("index")])
def test_a_driver_that_is_killed_leaves_nothing_behind(spark, clicks, url, tmp_path, at):
    """The process is gone, with its JVM; a worker may go on."""
    state = begun(spark, clicks, url, "tumbling")
    rows, script = late(url), tmp_path / "job.py"
    where = ", where=IndexPut()" if at == "index" else ""
    script.write_text(
        "import os\n"
        "from pathlib import Path\n"
        "from clicks import Clicks\n"
        "from visits_job import session\n"
        "from windows_job import IndexPut\n"
        "from mapstate.backends import resolve\n"
        "from mapstate.testing import FaultyBackend, Kill\n"
        f"fault = Kill(method='multi_put', call=1, after=True, who=os.getpgrp(){where})\n"
        f"backend = FaultyBackend(resolve({url!r}), {str(tmp_path)!r}, (fault,))\n"
        "spark = session('local[2]')\n"
        f"state = Clicks(Path({str(tmp_path)!r})).windowed(spark, backend, 'tumbling')\n"
        f"rows = {[tuple(row) for row in rows]!r}\n"
        f"state.correct(add=spark.createDataFrame(rows, {SCHEMA!r}), id='a')\n"
    )
    env = with_modules(str(FIXTURES))
    killed = subprocess.run([sys.executable, str(script)], check=False, start_new_session=True, env=env)
    assert killed.returncode == -signal.SIGKILL
    assert ledger(url).in_flight.name == "a correction"
    check(clicks, url, "tumbling")
    assert not correct(spark, clicks, state, rows).was_done
    check(clicks, url, "tumbling")
