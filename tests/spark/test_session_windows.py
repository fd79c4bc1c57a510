"""Sessions on real Spark, held against brute force over the raw rows."""

from __future__ import annotations

import datetime as dt
import os
import random
import sqlite3
from typing import Any

import pytest
from cases import full
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from sessions_oracle import Oracle, Session
from windows_oracle import Row

from mapstate import (
    Collect,
    Count,
    ReducerAggregator,
    SessionWindow,
    SlidingDurationWindow,
    Sum,
    Topology,
    TumblingDurationWindow,
    errors,
    newStream,
    opaque,
)
from mapstate.backends import resolve
from mapstate.capabilities import JointLedgers
from mapstate.keys import is_index_key
from mapstate.protocol.ledgers import Ledgers
from mapstate.protocol.windows import every_pane
from mapstate.reader import open_reader
from mapstate.schema import number_of
from mapstate.spark.driver import windows as driver
from mapstate.spark.driver.sessions import SessionState

pytestmark = pytest.mark.spark


@pytest.fixture
def url(each_url: str) -> str:
    return each_url


def frame(spark: SparkSession, rows: list[Row]) -> DataFrame:
    return spark.createDataFrame(rows, "at bigint, user string, n bigint")


class Site:
    """A topology with sessions, the state of their late rows, and the state of the sessions that have fired."""

    def __init__(self, spark: SparkSession, url: str, name: str, gap: int, lag: int) -> None:
        self.spark, self.url, self.name = spark, url, name
        self.fired: list[list[Session]] = []
        self.dies_downstream = False
        self.topology = Topology("site")
        stream = self.topology.newStream("clicks", frame(spark, []))
        windows = stream.window(SessionWindow.of(gap), timestampField="at", lag=lag).groupBy("user")
        visits = windows.persistentAggregate(opaque(url, name, repeat="allowed"), rows=Count(), total=Sum("n"))
        visits.lateStream().persistentAggregate(opaque(url, f"{name}-late", repeat="allowed"), rows=Count())
        visits.firedWindowsStream().foreachBatch(self.take)
        fired = opaque(url, f"{name}-fired", repeat="allowed")
        visits.firedWindowsStream().persistentAggregate(fired, sessions=Count(), total=Sum("total"))

    def take(self, rows: DataFrame, _: int) -> None:
        found = sorted(tuple(row) for row in rows.collect())
        self.fired += [found] if found else []
        if self.dies_downstream:
            raise KeyboardInterrupt

    def batch(self, batch_id: int, rows: list[Row]) -> None:
        self.topology(frame(self.spark, rows), batch_id)

    def check(self, oracle: Oracle) -> bool:
        """Held against brute force. Returns whether a session has rows before the pane that is settled."""
        with open_reader(self.url, self.name) as visits:
            ledger = visits.ledger()
            assert ledger.windows is not None
            purged, last = ledger.windows.purged, ledger.last_windows()
            right = [one for one in oracle.sessions() if one[1] > purged]
            # Where ledgers change one after the other, the last batch may be taken back.
            final_at = oracle.mark if isinstance(resolve(self.url).open(self.name), JointLedgers) else oracle.before
            found = [
                (start, end, user, value["rows"], value["total"])
                for user in "xyz"
                for start, end, value, final in visits.windows(user)
                if final == (number_of(end) <= (final_at or 0)) and set(value) == {"rows", "total"}
            ]
            assert sorted(found) == right
            for start, end, user, *_ in right:
                assert [(one.start, one.end) for one in visits.windows(user, since=end - 1, until=end)] == [
                    (start, end)
                ]
            held = set(every_pane(ledger.windows.definition.panes, ledger.windows.panes))
            assert {key[0] for key, _ in visits.scan()} <= held
            assert last is not None
            return any(start < last.settled for start, *_ in right)


def dies(*_: Any, **__: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(("gap", "lag"), [(10, 3), pytest.param(7, 0, marks=pytest.mark.full)])
def test_sessions_are_those_of_brute_force(spark, url, monkeypatch, gap, lag):
    """Attempts fail in front of their commit, behind it and downstream; replays hold other rows; rows are late."""
    if lag == 0:  # executors purge and settle where they apply the state
        monkeypatch.setattr(driver, "_ON_DRIVER", -1)
    draw = random.Random(gap * 10 + lag)
    site, oracle = Site(spark, url, f"of-{gap}-{lag}", gap, lag), Oracle(gap, lag)
    now, sent, is_settled = 100, 0, False
    fired: list[list[Session]] = []
    taken: list[list[Session]] = []
    for batch_id in range(10):
        now += draw.choice([4, 8, 20])
        while True:
            rows = [
                Row(None if draw.random() < 0.05 else now + draw.randint(-25, 8), draw.choice("yz"), draw.randint(1, 9))
                for _ in range(draw.choice([0, 3, 6]))
            ]
            rows += [Row(now + at, "x", draw.randint(1, 9)) for at in range(-20, 1, 5)]  # a session that goes on
            crash = draw.choice(["", "", "before the commit", "before the function", "in the function"])
            if crash != "before the commit":
                break
            with monkeypatch.context() as patch:
                patch.setattr(Ledgers, "commit", dies)
                with pytest.raises(KeyboardInterrupt):
                    site.batch(batch_id, rows)
        sessions = oracle.add(rows)
        sent += len(rows)
        fired += [sessions] if sessions else []
        taken += [sessions] if sessions else []
        if crash == "before the function":
            with monkeypatch.context() as patch:
                patch.setattr(SessionState, "emit_fired", dies)
                with pytest.raises(KeyboardInterrupt):
                    site.batch(batch_id, rows)
        elif crash == "in the function" and sessions:
            site.dies_downstream = True
            with pytest.raises(KeyboardInterrupt):
                site.batch(batch_id, rows)
            site.dies_downstream = False
            taken.append(sessions)
        site.batch(batch_id, rows)
        assert site.fired == taken
        is_settled |= site.check(oracle)
    assert oracle.late
    assert fired
    assert is_settled
    with open_reader(url, site.name) as visits, open_reader(url, f"{site.name}-late") as late:
        assert late.get(()) == {"rows": len(oracle.late)}
        assert sum(report.rows for report in visits.reports()) == sent
        assert sum(report.rows_late for report in visits.reports()) == len(oracle.late)
    with open_reader(url, f"{site.name}-fired") as of_fired:
        totals = [one[4] for sessions in fired for one in sessions]
        assert of_fired.get(()) == {"sessions": len(totals), "total": sum(totals)}


def test_sessions_of_timestamps_and_of_the_whole_stream(spark, url):
    def at(text: str) -> dt.datetime:
        return dt.datetime.fromisoformat(f"2026-11-22T{text}+00:00")

    stream = newStream("clicks", spark.createDataFrame([], "at timestamp"))
    visits = stream.window(SessionWindow.of("30 minutes"), timestampField="at")
    counts = visits.persistentAggregate(opaque(url, repeat="allowed"), rows=Count())
    found: list[Any] = []
    columns = ("unix_seconds(window_start)", "unix_seconds(window_end)", "rows")
    counts.firedWindowsStream().foreachBatch(lambda rows, _: found.extend(rows.selectExpr(*columns).collect()))
    times = ["10:20:00", "10:50:00", "11:20:01", "12:00:00"]
    counts(spark.createDataFrame([(at(time),) for time in times], "at timestamp"), 0)
    first, second = (int(at(time).timestamp()) for time in ("10:20:00", "11:20:01"))
    assert sorted(map(tuple, found)) == [(first, first + 1800 + 1800, 2), (second, second + 1800, 1)]
    with open_reader(url, "clicks") as reader:
        assert [(window.start, window.final) for window in reader.windows()] == [
            (at("10:20:00"), True),
            (at("11:20:01"), True),
            (at("12:00:00"), False),
        ]
        with pytest.raises(errors.UsageError, match="are sessions"):
            list(reader.window(at("11:20:01")))


def test_a_session_that_has_outgrown_its_bound_sets_no_batch_aside(spark, tmp_path):
    """Its rows came with earlier batches, each within the bound; those of this one are right."""
    url = f"sqlite:///{tmp_path}/state.db"
    topology = Topology("site", on_poison="quarantine", quarantine=str(tmp_path / "kept"))
    stream = topology.newStream("clicks", frame(spark, [])).window(SessionWindow.of(10), timestampField="at")
    stream.groupBy("user").persistentAggregate(opaque(url, "lists", repeat="allowed"), numbers=Collect("n", most=3))

    def batches() -> None:
        for batch_id in range(20):
            topology(frame(spark, [Row(5 * batch_id, "x", batch_id)]), batch_id)

    with pytest.raises(errors.ConfigurationError, match="session of earlier batches"):
        batches()
    assert not (tmp_path / "kept").exists()


def test_a_lost_part_of_the_index_stops_the_query_before_sessions_are_cut(spark, tmp_path):
    """Sessions that go on are joined pane by pane, by the index of each."""
    url = f"sqlite:///{tmp_path}/state.db"
    stream = newStream("clicks", frame(spark, [])).window(SessionWindow.of(10), timestampField="at")
    counts = stream.groupBy("user").persistentAggregate(opaque(url, "counts", repeat="allowed"), rows=Count())

    def batches(start: int, end: int) -> None:
        for batch_id in range(start, end):
            counts(frame(spark, [Row(5 * batch_id, f"u{at:03}", 1) for at in range(450)]), batch_id)

    batches(0, 4)
    with sqlite3.connect(url.removeprefix("sqlite:///")) as file:
        keys = [key for (key,) in file.execute("SELECT key FROM mapstate_records")]
        lost = [(key,) for key in keys if is_index_key(key) and key.count("|") == 3]
        assert lost
        file.executemany("DELETE FROM mapstate_records WHERE key = ?", lost)
    with pytest.raises(errors.StoreLostError, match="part of the index of a pane"):
        batches(4, 8)


class Names(ReducerAggregator):
    def init(self) -> list[int]:
        return []

    def reduce(self, acc: list[int], row: Any) -> list[int]:
        return [*acc, row["n"]]


def test_what_sessions_refuse(spark):
    stream = newStream("clicks", frame(spark, []))
    visits = stream.window(SessionWindow.of(10), timestampField="at").groupBy("user")
    for make, error, said in (
        (lambda: stream.window(SessionWindow.of("1 hour")), errors.ConfigurationError, "timestampField='at'"),
        (lambda: stream.window(SessionWindow.of(9), timestampField="at", startTime=3), errors.ConfigurationError,
         "leave out startTime"),
        (lambda: stream.window(SessionWindow.of(0), timestampField="at"), errors.ConfigurationError, "above 0"),
        (lambda: visits.persistentAggregate(opaque("memory://s"), n=Names()), errors.ConfigurationError, "a session"),
        (lambda: visits.persistentAggregate(opaque("memory://s"), session_last=Count()), errors.DuplicateNameError,
         "'session_last'"),
        (lambda: visits.persistentAggregate(opaque("memory://s"), n=Count()).newValuesStream(), errors.UsageError,
         "sessions"),
    ):  # fmt: skip
        with pytest.raises(error, match=said):
            make()


START = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
BATCHES = [[0, 29, 60], [1, 100], [5, 31, 61, 79, 80]]
"""Seconds. Where the watermarks of both are with a delay of 20 and windows or a gap of 30, there are rows."""

DELAY, STEP = 20, 60  # the latest time goes from 0 to 60, and then to 100


def counted_by_spark(spark, folder, window):
    """What Spark counts of `BATCHES`, one a micro-batch."""
    source = folder / "in"
    source.mkdir(parents=True)
    for number, seconds in enumerate([*BATCHES, [5000], [9000]]):  # the last two end all windows
        path = source / f"{number}.csv"
        path.write_text("".join(f"{second}\n" for second in seconds))
        os.utime(path, (1_000_000_000 + number, 1_000_000_000 + number))
    read = spark.readStream.schema("second bigint").option("maxFilesPerTrigger", 1).csv(str(source))
    rows = read.selectExpr(f"timestamp_seconds(second + {int(START.timestamp())}) as at", "second", "second < 0 as one")
    windows = (
        rows.withWatermark("at", f"{DELAY} seconds")
        .groupBy(window, "one")
        .agg(F.collect_list("second").alias("seconds"))
    )
    found: set[int] = set()
    write = windows.writeStream.foreachBatch(lambda some, _: found.update(*(row.seconds for row in some.collect())))
    started = write.option("checkpointLocation", str(folder / "at")).trigger(availableNow=True).start()
    started.awaitTermination()
    return found


def counted_here(spark, folder, config, lag):
    stream = newStream("rows", spark.createDataFrame([], "at timestamp, second bigint"))
    windows = stream.window(config, timestampField="at", lag=f"{lag} seconds", retention="1 day")
    kept = windows.persistentAggregate(opaque(f"sqlite:///{folder}/{lag}.db"), seconds=Collect("second", most=100))
    for batch_id, seconds in enumerate(BATCHES):
        rows = [(START + dt.timedelta(seconds=second), second) for second in seconds]
        kept(spark.createDataFrame(rows, "at timestamp, second bigint"), batch_id)
    with open_reader(f"sqlite:///{folder}/{lag}.db", "rows") as reader:
        return {second for one in reader.windows() for second in one.value["seconds"]}


@pytest.mark.parametrize(
    ("window", "config", "late_here", "more"),
    [
        full(lambda: F.window("at", "30 seconds"), TumblingDurationWindow.of("30 seconds"), {1, 31}, 0),
        full(
            lambda: F.window("at", "30 seconds", "10 seconds"),
            SlidingDurationWindow.of("30 seconds", "10 seconds"),
            {1, 31, 61, 79},
            20,
        ),
        (lambda: F.session_window("at", "30 seconds"), SessionWindow.of("30 seconds"), {1, 31, 61, 79}, 30),
    ],
    ids=["tumbling", "sliding", "sessions"],
)
def test_what_spark_counts_and_is_late_here_and_the_lag_with_which_nothing_is(
    spark, tmp_path, window, config, late_here, more
):
    """The table of docs/windows.md#from-sparks-windows.

    Proof: let Spark count a row of batch n. Its end in the second column is after M(n-2) - delay, where M(n) is the
    latest time as of batch n. Its end in the third column is earlier by the difference that the last column adds. So it
    is after M(n-2) - delay - difference, which is at least M(n-1) - lag.
    """
    rows = {second for seconds in BATCHES for second in seconds}
    of_spark = counted_by_spark(spark, tmp_path, window()) - {5000, 9000}
    assert rows - of_spark == {5}
    ours = counted_here(spark, tmp_path, config, DELAY)
    assert of_spark - ours == late_here
    assert ours - of_spark == set()
    assert counted_here(spark, tmp_path, config, DELAY + STEP + more) >= of_spark


def test_sessions_are_those_of_spark(spark):
    """Also of rows exactly a gap apart, in one batch or in two, whatever the watermark."""
    draw = random.Random(5)
    rows = [Row(10 * draw.randrange(90), draw.choice("xyz"), 1) for _ in range(60)]  # steps of ten: many a gap apart
    rows.sort()
    timed = frame(spark, rows).selectExpr("timestamp_seconds(at) as at", "user")
    found = timed.groupBy(F.session_window("at", "30 seconds"), "user").count()
    shown = found.selectExpr("unix_seconds(session_window.start)", "unix_seconds(session_window.end)", "user", "count")
    stream = newStream("clicks", frame(spark, [])).window(SessionWindow.of(30), timestampField="at", retention=1000)
    counts = stream.groupBy("user").persistentAggregate(opaque("memory://of-spark"), rows=Count())
    for batch_id, start in enumerate(range(0, 60, 20)):  # in order, so that none is late before the last row at a time
        own = [row for row in rows if rows[start].at < row.at or batch_id == 0]
        until = rows[start + 20].at if start < 40 else 10**9
        counts(frame(spark, [row for row in own if row.at <= until]), batch_id)
    with open_reader("memory://of-spark", "clicks") as reader:
        ours = [(one.start, one.end, user, one.value["rows"]) for user in "xyz" for one in reader.windows(user)]
        assert sum(report.rows_late for report in reader.reports()) == 0
    assert sorted(ours) == sorted(map(tuple, shown.collect()))
