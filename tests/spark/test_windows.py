"""Windows by time on real Spark, held against brute force over the raw rows."""

from __future__ import annotations

import datetime as dt
import random
import time
from decimal import Decimal
from typing import Any

import pytest
from cases import full
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from windows_oracle import Oracle, Row, Windows

from mapstate import (
    Avg,
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
    transactional,
)
from mapstate.backends import resolve
from mapstate.capabilities import JointLedgers
from mapstate.operations import advance as operation
from mapstate.operations.advance import advance
from mapstate.operations.doctor import window_findings
from mapstate.protocol.ledger import Ledger
from mapstate.protocol.ledger_record import AlreadyCommitted
from mapstate.protocol.ledgers import Ledgers
from mapstate.protocol.windows import NEVER, every_pane
from mapstate.reader import open_reader
from mapstate.spark.driver import event_time
from mapstate.spark.driver.windows import WindowedState, _spread
from mapstate.spark.executor import window_task
from mapstate.testing import wait_for

pytestmark = pytest.mark.spark


@pytest.fixture
def url(each_url: str) -> str:
    return each_url


def frame(spark: SparkSession, rows: list[Row]) -> DataFrame:
    return spark.createDataFrame(rows, "at bigint, user string, n bigint")


CASES = [(20, 10, 0, 3), (6, 9, 0, 2), (10, 10, 0, 0), (10, 10, 3, 5), (9, 6, 1, 2)]


class Site:
    """A topology with windows, the state of their late rows, and the state of the windows that have fired."""

    def __init__(
        self, spark: SparkSession, url: str, name: str, config: Any, *, blocks: int | None = None, **options: Any
    ) -> None:
        self.spark, self.url, self.name, self.length = spark, url, name, config.length
        self.fired: list[Windows] = []
        self.dies_downstream = False
        self.topology = Topology("site")
        stream = self.topology.newStream("clicks", frame(spark, []))
        windows = stream.window(config, timestampField="at", **options).groupBy("user")
        kept = opaque(url, name, repeat="allowed", blocks=blocks)
        counts = windows.persistentAggregate(kept, rows=Count(), total=Sum("n"))
        counts.lateStream().persistentAggregate(opaque(url, f"{name}-late", repeat="allowed"), rows=Count())
        counts.firedWindowsStream().foreachBatch(self.take)
        fired = opaque(url, f"{name}-fired", repeat="allowed")
        counts.firedWindowsStream().persistentAggregate(fired, windows=Count(), total=Sum("total"))

    def take(self, rows: DataFrame, _: int) -> None:
        self.fired.append(_by_end(rows, self.length))
        if self.dies_downstream:
            raise KeyboardInterrupt

    def batch(self, batch_id: int, rows: list[Row]) -> None:
        self.topology(frame(self.spark, rows), batch_id)

    def check(self, oracle: Oracle, fired: list[Windows], sent: int) -> None:
        with (
            open_reader(self.url, self.name) as recent,
            open_reader(self.url, f"{self.name}-late") as late,
            open_reader(self.url, f"{self.name}-fired") as of_fired,
        ):
            assert (late.get(()) or {"rows": 0})["rows"] == len(oracle.late)
            totals = [total for windows in fired for _, total in windows.values()]
            assert of_fired.get(()) == ({"windows": len(totals), "total": sum(totals)} if totals else None)
            reports = recent.reports()
            assert reports[0].watermark == oracle.mark
            assert sum(report.rows for report in reports) == sent
            assert sum(report.rows_late for report in reports) == len(oracle.late)
            record = recent.ledger()
            assert record.windows is not None
            held = list(every_pane(record.windows.definition.panes, record.windows.panes))
            gone = oracle.floor(None if oracle.before is None else oracle.before - record.windows.definition.retention)
            assert record.windows.purged == max(gone, NEVER) or oracle.before is None
            assert {key[0] for key, _ in recent.scan()} <= set(held)

    def check_readers(self, oracle: Oracle) -> None:
        with open_reader(self.url, self.name) as recent:
            # Where ledgers change one after the other, the last batch may be taken back.
            final_at = oracle.mark if isinstance(resolve(self.url).open(self.name), JointLedgers) else oracle.before
            assert recent.watermark().time == final_at
            record = recent.ledger().windows
            assert record is not None
            there = {key: value for key, value in oracle.windows().items() if key[0] > record.purged}
            for user in "xyz":
                found = [(end, value["rows"], value["total"], final) for _, end, value, final in recent.windows(user)]
                right = [(end, *value, end <= (final_at or 0)) for (end, own), value in there.items() if own == user]
                assert found == sorted(right)
            for end in {end for end, _ in there}:
                of_window = {key: (value["rows"], value["total"]) for key, value in recent.window(end)}
                assert of_window == {(user,): value for (own, user), value in there.items() if own == end}
            if record.purged > 0:
                with pytest.raises(errors.WindowGoneError):
                    list(recent.window(record.purged))


def dies(*_: Any, **__: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("blocks", [None, 2])
def test_windows_are_those_of_brute_force(spark, url, monkeypatch, rounds, blocks):
    """Attempts fail in front of their commit, behind it and downstream; replays hold other rows; rows are late."""
    for case in CASES if url.startswith("memory") else CASES[: rounds(1, 2)]:
        _held_against_brute_force(spark, url, monkeypatch, *case, blocks)


def _held_against_brute_force(spark, url, monkeypatch, length, slide, offset, lag, blocks):
    draw = random.Random(length * 1000 + slide * 100 + lag)
    config = SlidingDurationWindow.of(length, slide)
    site = Site(
        spark,
        url,
        f"of-{length}-{slide}-{offset}-{lag}",
        config,
        blocks=blocks,
        lag=lag,
        startTime=offset,
        retention=10,
    )
    oracle, now, sent = Oracle(length, slide, offset, lag), 100, 0
    fired: list[Windows] = []
    taken: list[Windows] = []
    for batch_id in range(8):
        now += draw.choice([0, 8, 20])
        while True:
            rows = [
                Row(
                    None if draw.random() < 0.05 else now + draw.randint(-40, 8),
                    draw.choice("xyz"),
                    draw.randint(1, 9),
                )
                for _ in range(draw.choice([0, 4, 9]))
            ]
            crash = draw.choice(["", "", "before the commit", "before the function", "in the function"])
            if crash != "before the commit":
                break
            with monkeypatch.context() as patch:
                patch.setattr(Ledgers, "commit", dies)
                with pytest.raises(KeyboardInterrupt):
                    site.batch(batch_id, rows)
        windows = oracle.add(rows)
        sent += len(rows)
        fired += [windows] if windows else []
        taken += [windows] if windows else []
        if crash == "before the function":
            with monkeypatch.context() as patch:
                patch.setattr(WindowedState, "emit_fired", dies)
                with pytest.raises(KeyboardInterrupt):
                    site.batch(batch_id, rows)
        elif crash == "in the function" and windows:
            site.dies_downstream = True
            with pytest.raises(KeyboardInterrupt):
                site.batch(batch_id, rows)
            site.dies_downstream = False
            taken.append(windows)
        site.batch(batch_id, rows)
        assert site.fired == taken
        site.check_readers(oracle)
    site.check(oracle, fired, sent)
    assert oracle.late
    assert fired


def _by_end(rows: DataFrame, length: int) -> Windows:
    found = {}
    for row in rows.collect():
        assert row.window_start == row.window_end - length
        assert (row.window_end, row.user) not in found
        found[row.window_end, row.user] = row.rows, row.total
    return found


def test_a_window_of_timestamps(spark, url):
    def at(text: str) -> dt.datetime:
        return dt.datetime.fromisoformat(text + "+00:00")

    rows = [(at("2026-11-22 10:05:00"),), (at("2026-11-22 10:59:59.999999"),), (at("2026-11-22 11:00:00"),), (None,)]
    stream = newStream("clicks", spark.createDataFrame(rows, "at timestamp"))
    counts = stream.tumblingWindow("1 hour", timestampField="at").persistentAggregate(
        opaque(url, repeat="allowed"), rows=Count()
    )
    found: list[Any] = []
    columns = ("unix_micros(window_start)", "unix_micros(window_end)", "rows")
    counts.firedWindowsStream().foreachBatch(lambda rows, _: found.extend(rows.selectExpr(*columns).collect()))
    late: list[Any] = []
    counts.lateStream().foreachBatch(lambda rows, _: late.extend(rows.collect()))
    counts(spark.createDataFrame(rows, "at timestamp"), 0)
    start = int(at("2026-11-22 10:00:00").timestamp() * 1e6)
    assert [tuple(row) for row in found] == [(start, start + 3_600_000_000, 2)]
    assert [row["at"] for row in late] == [None]
    with open_reader(url, "clicks") as reader:
        assert reader.watermark().time == at("2026-11-22 11:00:00")
        assert [(window.end, window.final) for window in reader.windows()] == [
            (at("2026-11-22 11:00:00"), True),
            (at("2026-11-22 12:00:00"), False),
        ]


def test_spark_takes_fired_windows_for_rows_of_any_number_and_spreads_their_slices(spark, tmp_path):
    """By the number of their panes it would broadcast all of them in a join."""
    rows = newStream("rows", frame(spark, []))
    counts = (
        rows.tumblingWindow(10, timestampField="at")
        .groupBy("user")
        .persistentAggregate(opaque(f"sqlite:///{tmp_path}/s.db", "s"), n=Count())
    )
    sizes = []

    def measure(fired: DataFrame, _: int) -> None:
        sizes.append(int(str(fired._jdf.queryExecution().optimizedPlan().stats().sizeInBytes())))
        assert fired.count() == 1

    counts.firedWindowsStream().foreachBatch(measure)
    for batch_id, at in enumerate((1, 20)):
        counts(spark.createDataFrame([(at, "a", 1)], rows.schema), batch_id)
    assert len(sizes) == 1
    assert sizes[0] > 2**40
    slices = [("pane", at, 0, ["x" * 1000] * 200) for at in range(300)]  # Arrow would make one partition of so much
    spread = _spread(frame(spark, []), slices, "pane string, partition int, full int, rests array<string>")
    assert spread.rdd.getNumPartitions() == spark.sparkContext.defaultParallelism
    assert spread.count() == 300


def test_a_row_of_the_future_makes_no_other_row_late(spark, tmp_path):
    url, now = f"sqlite:///{tmp_path}/state.db", dt.datetime.now(dt.UTC)
    stream = newStream("clicks", spark.createDataFrame([], "at timestamp"))
    in_half_an_hour = dt.timedelta(seconds=(now.timestamp() + 1800) % 3600)  # no window ends while the test runs
    windows = stream.tumblingWindow("1 hour", timestampField="at", startTime=in_half_an_hour)
    counts = windows.persistentAggregate(opaque(url, repeat="allowed"), rows=Count())
    for batch_id, times in enumerate([[now, now.replace(year=2999)], [now - dt.timedelta(minutes=1)]]):
        counts(spark.createDataFrame([(time,) for time in times], "at timestamp"), batch_id)
    with open_reader(url, "clicks") as reader:
        assert sum(window.value["rows"] for window in reader.windows()) == 3
        assert [report.rows_late for report in reader.reports()] == [0, 0]


def test_no_aggregate_takes_a_late_row(spark, tmp_path):
    """Spark would keep them all for Collect, and its sum of them would overflow."""
    url = f"sqlite:///{tmp_path}/state.db"
    stream = newStream("clicks", frame(spark, []))
    counts = stream.tumblingWindow(10, timestampField="at", retention=100).persistentAggregate(
        opaque(url, repeat="allowed"), total=Sum("n"), all=Collect("n", most=2), rows=Count()
    )
    counts(frame(spark, [Row(5, "a", 1), Row(25, "a", 2)]), 0)
    counts(frame(spark, [Row(at, "a", 2**62) for at in (6, 7, 8, None)] + [Row(26, "a", 4)]), 1)
    with open_reader(url, "clicks") as reader:
        assert [window.value for window in reader.windows()] == [
            {"total": 1, "all": [1], "rows": 1},
            {"total": 6, "all": [2, 4], "rows": 2},
        ]
        assert [report.rows_late for report in reader.reports()] == [4, 0]


def test_a_sum_of_doubles_is_the_same_whoever_joins_the_panes(spark, url, monkeypatch):
    """In another order than that of time, a one beside the large numbers would be lost or kept."""
    schema, fired, due = "at bigint, user bigint, x double", {}, WindowedState._due

    def as_they_come(*args: Any) -> Any:
        panes, ends = due(*args)
        return panes[::-1], ends

    monkeypatch.setattr(WindowedState, "_due", as_they_come)
    windows = newStream("clicks", spark.createDataFrame([], schema)).slidingWindow(60, 10, timestampField="at")
    counts = windows.groupBy("user").persistentAggregate(opaque(url, repeat="allowed"), x=Sum("x"))

    def keep(rows: DataFrame, _batch_id: int) -> None:
        fired.update({(row.user, row.window_end): row.x for row in rows.collect()})

    counts.firedWindowsStream().foreachBatch(keep)
    parts = [1e16, 1.0, -1e16, 1.0, 1e16, 1.0]
    counts(spark.createDataFrame([(10 * at, user, x) for at, x in enumerate(parts) for user in range(20)], schema), 0)
    counts(spark.createDataFrame([(60, 1, 0.0)], schema), 1)
    with open_reader(url, "clicks") as reader:
        seen = {(user, window.end): window.value["x"] for user in range(20) for window in reader.windows(user)}
    assert len(fired) == 20 * len(parts)
    assert fired == {at: seen[at] for at in fired}


def test_own_aggregators_fill_windows(spark, tmp_path):
    """Raw rows go through Python; a reducer fills tumbling windows only."""
    url = f"sqlite:///{tmp_path}/state.db"
    stream = newStream("clicks", frame(spark, []))
    windows = stream.tumblingWindow(10, timestampField="at", retention=100).groupBy("user")
    counts = windows.persistentAggregate(opaque(url, repeat="allowed"), names=Names(), rows=Count())
    counts(frame(spark, [Row(5, "a", 1), Row(6, "a", 2), Row(None, "a", 3), Row(25, "b", 4)]), 0)
    counts(frame(spark, [Row(7, "a", 9), Row(26, "b", 5)]), 1)
    with open_reader(url, "clicks", aggregators={"names": Names()}) as reader:
        assert [(window.end, window.value) for window in reader.windows("a")] == [(10, {"names": [1, 2], "rows": 2})]
        assert [report.rows_late for report in reader.reports()] == [1, 1]
    with pytest.raises(errors.ConfigurationError, match="names=Names is a reducer"):
        stream.slidingWindow(10, 5, timestampField="at").persistentAggregate(
            opaque(url, "x", repeat="allowed"), names=Names()
        )
    named_as_ours = type("Count", (Count,), {"__module__": __name__})()
    windows.persistentAggregate(opaque(url, "tumbling", repeat="allowed"), rows=named_as_ours)
    for joined in (
        stream.slidingWindow(10, 5, timestampField="at"),
        stream.window(SessionWindow.of(10), timestampField="at"),
    ):
        with pytest.raises(errors.ConfigurationError, match="rows=Count has the name of a built-in aggregator"):
            joined.persistentAggregate(opaque(url, "y", repeat="allowed"), rows=named_as_ours)


class Names(ReducerAggregator):
    def init(self) -> list[int]:
        return []

    def reduce(self, acc: list[int], row: Any) -> list[int]:
        return sorted([*acc, row["n"]])


def test_several_inputs_wait_for_each_other_and_an_idle_one_goes_on(spark, tmp_path):
    now = dt.datetime.now(dt.UTC)

    def batch(*rows: tuple[str, int]) -> DataFrame:
        return spark.createDataFrame([(name, now - dt.timedelta(minutes=ago)) for name, ago in rows], schema)

    schema, url = "source string, at timestamp", f"sqlite:///{tmp_path}/state.db"
    stream = newStream("clicks", spark.createDataFrame([], schema))
    of = {"timestampField": "at", "inputs": {"source": ["web", "app"]}}
    counts = stream.tumblingWindow("1 minute", **of).persistentAggregate(
        opaque(url, "both", repeat="allowed"), rows=Count()
    )
    reader = None
    for batch_id, (rows, expected) in enumerate(
        [([("web", 50)], None), ([("app", 60), ("other", 1)], 60), ([("web", 10)], 60), ([("app", 20)], 20)]
    ):
        counts(batch(*rows), batch_id)
        reader = reader or open_reader(url, "both")
        mark: Any = reader.watermark().time
        minutes = None if mark is None else round((now - mark).total_seconds() / 60)
        assert minutes == expected
    idle = stream.tumblingWindow("1 minute", idle="1 millisecond", **of)
    of_idle = idle.persistentAggregate(opaque(url, "idle", repeat="allowed"), rows=Count())
    of_idle(batch(("web", 50), ("app", 10)), 0)
    with open_reader(url, "idle") as state:
        marks: list[Any] = [state.watermark().time]
        of_idle(batch(("app", 5)), 1)
        marks.append(state.watermark().time)
        assert marks[1] > marks[0]  # by the clock, though "web" had no rows


def test_windows_by_the_clock(spark, tmp_path, monkeypatch):
    url, clock = f"sqlite:///{tmp_path}/state.db", [1_000_000_000_000_000]
    monkeypatch.setattr(time, "time_ns", lambda: clock[0] * 1000)
    stream = newStream("clicks", frame(spark, []))
    counts = stream.window(TumblingDurationWindow.of("10 seconds")).persistentAggregate(
        opaque(url, repeat="allowed"), rows=Count()
    )
    fired: list[int] = []
    counts.firedWindowsStream().foreachBatch(lambda rows, _: fired.extend(row["rows"] for row in rows.collect()))
    for batch_id, seconds in enumerate([0, 4, 7, -3, 20]):
        clock[0] += seconds * 1_000_000
        counts(frame(spark, [Row(1, "a", 1)]), batch_id)
    assert fired == [2, 2]  # the fourth batch came while the clock was back, and its window was open
    with pytest.raises(errors.UsageError, match="no row is late"):
        counts.lateStream()


def test_a_number_that_is_wrong_moves_no_watermark_and_a_backlog_does(spark, tmp_path, caplog):
    """Milliseconds among seconds, in the first batch too; rows far behind them, none further apart than ``ahead``."""
    url, name = f"sqlite:///{tmp_path}/state.db", "clicks"
    stream = newStream(name, frame(spark, [])).tumblingWindow(10, timestampField="at", ahead=50)
    counts = stream.groupBy("user").persistentAggregate(opaque(url, repeat="allowed"), rows=Count())
    wrong = 10**15

    def batch(batch_id: int, *times: int) -> list[Any]:
        counts(frame(spark, [Row(at, "x", 1) for at in times]), batch_id)
        with open_reader(url, name) as state:
            (report, *_) = state.reports()
            return [report.watermark, report.rows_late]

    assert batch(0, 1, wrong, 7, 12) == [12, 0]
    assert "times up to 1000000000000000 move no watermark" in caplog.text
    assert batch(1, 13, wrong + 1, *range(20, 400, 40)) == [380, 0]  # a backlog, whose rows are near each other
    assert batch(2, 9000, wrong) == [380, 0]  # a stream that jumps waits for an operator's word
    assert "say so by mapstate advance --to" in caplog.text
    with open_reader(url, name) as state:
        future, *_ = window_findings(state.ledger())
        assert future.found == "2 panes start after the latest time that counts: 9000, 1000000000000000"
    advance(url, name, 8950)
    assert batch(3, 9001) == [9001, 0]
    with open_reader(url, name) as state:
        assert [(one.end, one.value["rows"], one.final) for one in state.windows("x", since=8000, until=10_000)] == [
            (9010, 2, False)
        ]


class Clock:
    """The driver's clock, and the machine's ticks."""

    def __init__(self, monkeypatch: Any) -> None:
        self.now, self.ticks = 1_000_000_000_000_000, 5_000_000
        monkeypatch.setattr(time, "time_ns", lambda: self.now * 1000)
        monkeypatch.setattr(event_time, "_ticks", lambda: self.ticks)

    def go_on(self, seconds: int, *, jump: int = 0) -> None:
        self.now += (seconds + jump) * 1_000_000
        self.ticks += seconds * 1_000_000

    def at(self, seconds: int) -> dt.datetime:
        return dt.datetime.fromtimestamp(1_000_000_000 + seconds, dt.UTC)


YEARS = 10 * 365 * 86_400


@pytest.mark.parametrize("jump", [YEARS, full(-YEARS)])
def test_no_idle_input_goes_on_by_a_clock_that_jumped(spark, each_url, monkeypatch, caplog, jump):
    clock, schema = Clock(monkeypatch), "at timestamp, user string"

    def started() -> Any:
        stream = newStream("clicks", spark.createDataFrame([], schema))
        windows = stream.tumblingWindow("10 seconds", timestampField="at", idle="5 seconds")
        return windows.groupBy("user").persistentAggregate(opaque(each_url), rows=Count())

    def watermark() -> Any:
        with open_reader(each_url, "clicks") as state:
            return state.watermark().time

    counts = started()
    counts(spark.createDataFrame([(clock.at(0), "x")], schema), 0)
    clock.go_on(15)
    counts(spark.createDataFrame([], schema), 1)
    assert watermark() == clock.at(10)
    clock.go_on(10, jump=jump)
    counts(spark.createDataFrame([], schema), 2)
    assert watermark() == clock.at(20)  # by the ticks of the machine
    assert "windows do not follow it" in caplog.text.lower()
    clock.go_on(10)
    counts(spark.createDataFrame([(clock.at(34), "x")], schema), 3)
    assert watermark() == clock.at(34)
    with open_reader(each_url, "clicks") as state:
        assert state.reports()[0].rows_late == 0
        assert "jumped" in next(window_findings(state.ledger(), clock.at(40))).found
    counts = started()  # and behind a restart it is doubted
    counts(spark.createDataFrame([], schema), 4)
    assert watermark() == clock.at(34)
    clock.go_on(15)
    counts(spark.createDataFrame([], schema), 5)
    assert watermark() == clock.at(44)


@pytest.mark.parametrize("jump", [YEARS, full(-YEARS)])
def test_windows_by_the_clock_do_not_follow_a_jump_and_a_restart_by_a_wrong_clock_is_refused(
    spark, each_url, monkeypatch, jump
):
    clock = Clock(monkeypatch)

    def started() -> Any:
        stream = newStream("clicks", frame(spark, []))
        return stream.window(TumblingDurationWindow.of("10 seconds")).persistentAggregate(
            opaque(each_url), rows=Count()
        )

    def windows() -> list[Any]:
        with open_reader(each_url, "clicks") as state:
            return [(one.start, one.value["rows"]) for one in state.windows(())]

    counts = started()
    counts(frame(spark, [Row(1, "a", 1)]), 0)
    clock.go_on(2, jump=jump)
    counts(frame(spark, [Row(1, "a", 1)]), 1)
    assert windows() == [(clock.at(0), 2)]
    counts = started()
    with pytest.raises(errors.ConfigurationError, match="Nothing was written"):
        counts(frame(spark, [Row(1, "a", 1)]), 2)
    assert windows() == [(clock.at(0), 2)]
    clock.go_on(1, jump=-jump)
    counts = started()
    counts(frame(spark, [Row(1, "a", 1)]), 2)
    assert windows() == [(clock.at(0), 3)]


def test_an_operator_says_that_windows_by_the_clock_were_down_for_long_or_wrong(spark, each_url, monkeypatch):
    clock = Clock(monkeypatch)

    def batch(batch_id: int) -> Any:
        stream = newStream("clicks", frame(spark, []))
        windows = stream.window(TumblingDurationWindow.of("10 seconds"))
        windows.persistentAggregate(opaque(each_url), rows=Count())(frame(spark, [Row(1, "a", 1)]), batch_id)
        with open_reader(each_url, "clicks") as state:
            return state.watermark().time

    batch(0)
    clock.go_on(30 * 86_400)
    with pytest.raises(errors.ConfigurationError, match="--to the present time"):
        batch(1)
    advance(each_url, "clicks", clock.at(30 * 86_400))
    assert batch(1) == clock.at(30 * 86_400)
    clock.go_on(-3600)  # it had been an hour ahead
    with pytest.raises(errors.ConfigurationError, match="--back-to"):
        batch(2)
    monkeypatch.setattr(operation, "number_of", lambda _: clock.now)
    advance(each_url, "clicks", clock.at(30 * 86_400 - 3600), back=True)
    assert batch(2) == clock.at(30 * 86_400 - 3600)


def test_a_source_that_pauses_fires_by_ticks(spark, tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.csv").write_text("x\n")
    rows = spark.readStream.schema("user string").csv(str(tmp_path / "in"))
    counts = (
        newStream("clicks", rows, ticks=True)
        .tumblingWindow("1 second")
        .persistentAggregate(opaque(f"sqlite:///{tmp_path}/state.db"), rows=Count())
    )
    fired: list[int] = []
    counts.firedWindowsStream().foreachBatch(lambda rows, _: fired.extend(row["rows"] for row in rows.collect()))
    query = counts.start(str(tmp_path / "checkpoint"), trigger="200 milliseconds")
    try:
        wait_for(lambda: bool(fired) or not query.isActive, "a window that fires without rows", 60)
    finally:
        query.stop()
    assert fired == [1]


def test_an_advance_fires_with_the_next_batch_also_behind_an_attempt_that_died(spark, tmp_path):
    url, checkpoint = f"sqlite:///{tmp_path}/state.db", str(tmp_path / "checkpoint")
    source = tmp_path / "in"
    source.mkdir()
    rows = spark.readStream.schema("at bigint, user string").csv(str(source))
    dies = [False]

    def run() -> None:
        bad = 31 if dies[0] else -1
        keep = F.udf(lambda at: bool(1 // (at != bad)), "boolean")
        stream = newStream("clicks", rows.where(keep("at"))).tumblingWindow(10, timestampField="at").groupBy("user")
        counts = stream.persistentAggregate(opaque(url, repeat="allowed"), rows=Count())
        counts.firedWindowsStream().foreachBatch(
            lambda found, _: fired.extend((row["window_end"], row["rows"]) for row in found.collect())
        )
        counts.start(checkpoint, trigger={"availableNow": True}).awaitTermination()

    fired: list[tuple[int, int]] = []
    (source / "1.csv").write_text("12,ann\n13,ann\n24,ann\n")
    run()
    assert fired == [(20, 2)]
    advance(url, "clicks", 33)
    (source / "2.csv").write_text("31,ann\n")
    dies[0] = True
    with pytest.raises(StreamingQueryException):
        run()
    assert fired == [(20, 2)]
    dies[0] = False
    run()
    assert fired == [(20, 2), (30, 1)]
    (source / "3.csv").write_text("29,ann\n34,ann\n")
    run()
    with open_reader(url, "clicks") as state:
        assert [(own.end, own.value["rows"], own.final) for own in state.windows("ann", since=30)] == [(40, 2, False)]
        assert state.reports()[0].rows_late == 1
        assert state.watermark().time == 34


@pytest.mark.parametrize(
    ("config", "field"),
    [
        (TumblingDurationWindow.of(10), "at"),
        full(SlidingDurationWindow.of(25, 10), "at"),
        (TumblingDurationWindow.of("1 millisecond"), None),
    ],
)
def test_no_batch_makes_spark_compile_what_the_batch_before_it_ran(spark, tmp_path, config, field):
    """The watermark and the clock differ from batch to batch; the code that Spark generates has neither."""
    for number in range(4):
        frame(spark, [Row(100 * number + at, "x", at) for at in range(30)]).write.parquet(f"{tmp_path}/{number}")
    stream = newStream("clicks", spark.read.parquet(f"{tmp_path}/0"))
    windows = stream.window(config, timestampField=field, lag=1 if field else 0).groupBy("user")
    counts = windows.persistentAggregate(opaque(f"memory://{tmp_path.name}"), rows=Count())
    compiled = []
    for number in range(4):
        counts(spark.read.parquet(f"{tmp_path}/{number}"), number)
        metrics = spark.sparkContext._jvm.org.apache.spark.metrics.source.CodegenMetrics
        compiled.append(metrics.METRIC_COMPILATION_TIME().getCount())
    assert compiled[0] > 0
    assert compiled[1] == compiled[3], compiled


def test_a_batch_that_is_not_known_any_more_is_an_error_for_the_state_that_follows(spark, url, monkeypatch):
    site = Site(spark, url, "forgotten", TumblingDurationWindow.of(10))
    for batch_id, at in enumerate([5, 25]):
        site.batch(batch_id, [Row(at, "x", 1)])
    begin = Ledgers.begin

    def forgets(*arguments: Any) -> list[Any]:
        return [AlreadyCommitted(done.batch_id, None, done.view) for done in begin(*arguments)]

    monkeypatch.setattr(Ledgers, "begin", forgets)
    site.batch(1, [Row(25, "x", 1)])  # the state that follows has it
    fired = f"{site.name}-fired"
    Ledger(resolve(url).open(fired), fired).rollback()
    with pytest.raises(errors.IncompleteBatchError, match="the windows that batch 1 fired cannot be told from later"):
        site.batch(1, [Row(25, "x", 1)])


def test_fired_windows_that_another_query_hides_are_an_error_for_the_state_that_follows(spark, tmp_path):
    """A dies after the commit, B, which nothing follows, commits to the state, and A comes again."""
    url = f"sqlite:///{tmp_path}/state.db"
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.csv").write_text("5\n25\n")
    rows = spark.readStream.schema("at bigint").csv(str(tmp_path / "in"))
    windows = newStream("clicks", rows).tumblingWindow(10, timestampField="at")

    def counted() -> Any:
        return windows.persistentAggregate(
            opaque(url, "recent", on_new_owner="adopt_unchecked", repeat="allowed"), rows=Count()
        )

    def run(counts: Any, owner: str) -> None:
        counts.start(str(tmp_path / owner), trigger={"availableNow": True}).awaitTermination(60)

    def dies(_: DataFrame, __: int) -> None:
        raise RuntimeError("dies here")

    followed, fails = counted(), counted()
    fails.firedWindowsStream().foreachBatch(dies)
    for counts in (fails, followed):
        counts.firedWindowsStream().persistentAggregate(opaque(url, "all", repeat="allowed"), windows=Count())
    with pytest.raises(StreamingQueryException, match="dies here"):
        run(fails, "a")
    run(counted(), "b")
    with pytest.raises(StreamingQueryException, match="(?s)MissingBatchesError.*differ for ever"):
        run(followed, "a")


def test_rows_whose_windows_no_calendar_holds_are_late(spark, tmp_path):
    url = f"sqlite:///{tmp_path}/state.db"
    stream = newStream("clicks", spark.sql("select timestamp'2026-11-22 10:00:00Z' at"))
    for config in (
        SlidingDurationWindow.of("10 minutes", "1 minute"),
        TumblingDurationWindow.of("1 week"),
        SessionWindow.of("1 hour"),
    ):
        name = type(config).__name__ + str(getattr(config, "slide", ""))[:1]
        counts = stream.window(config, timestampField="at").persistentAggregate(
            opaque(url, name, repeat="allowed"), rows=Count()
        )
        fired: list[int] = []
        counts.firedWindowsStream().foreachBatch(
            lambda rows, _, to=fired: to.extend(row.rows for row in rows.collect())
        )
        times = ["0001-01-01 00:00:00Z", "9999-12-31 23:59:59.999999Z", "2026-11-01 10:00:00Z"]
        counts(spark.sql(" union all ".join(f"select timestamp'{time}' at" for time in times)), 0)
        counts(spark.sql("select timestamp'2026-11-20 10:00:00Z' at"), 1)
        assert set(fired) == {1}
        with open_reader(url, name) as state:
            assert [report.rows_late for report in state.reports()] == [0, 2]
            assert all(window.value == {"rows": 1} for window in state.windows())


def test_a_function_sees_the_rows_of_each_window_also_behind_a_crash(spark, url):
    def build() -> Any:
        stream = newStream("clicks", frame(spark, []))
        windows = stream.slidingWindow(10, 5, timestampField="at").groupBy("user")
        lists = windows.persistentAggregate(opaque(url, "lists", repeat="allowed"), numbers=Collect("n", most=3))
        spans = F.expr("array_max(numbers) - array_min(numbers)").alias("span")
        lists.firedWindowsStream().transform(lambda rows: rows.select("window_end", "user", spans)).foreachBatch(take)
        return lists

    def take(rows: DataFrame, _: int) -> None:
        passed_on.append(sorted(map(tuple, rows.collect())))
        if dies:
            raise KeyboardInterrupt

    passed_on: list[Any] = []
    dies = False
    build()(frame(spark, [Row(3, "x", 1), Row(4, "x", 5), Row(7, "y", 2)]), 0)
    dies = True
    with pytest.raises(KeyboardInterrupt):
        build()(frame(spark, [Row(6, "x", 9), Row(10, "z", 0)]), 1)
    dies = False
    build()(frame(spark, [Row(6, "x", 100)]), 1)  # counts already, whatever it holds
    assert passed_on == [[(5, "x", 4)], *2 * [[(10, "x", 8), (10, "y", 0)]]]
    with pytest.raises(errors.ValueOverflowError):
        build()(frame(spark, [Row(12, "x", n) for n in range(4)]), 2)
    with open_reader(url, "lists") as state:
        found = [(own.end, own.value["numbers"]) for own in state.windows("x")]
    assert found == [(5, [1, 5]), (10, [1, 5, 9]), (15, [9])]


def test_what_a_purge_leaves_in_a_store_that_cannot_remove_is_no_new_value(spark, tmp_path, monkeypatch):
    """Not where a batch comes again, and its new values are read out of the store, either."""
    monkeypatch.setattr(window_task, "FencedWrites", type("None", (), {}))
    url, passed_on, dies = f"memory://{tmp_path.name}", list[Any](), [False]

    def build() -> Any:
        stream = newStream("clicks", frame(spark, []))
        windows = stream.tumblingWindow(10, timestampField="at", retention=0).groupBy("user")
        counts = windows.persistentAggregate(opaque(url, "counts", repeat="allowed"), rows=Count())
        counts.newValuesStream().foreachBatch(take)
        return counts

    def take(rows: DataFrame, batch_id: int) -> None:
        passed_on.append((batch_id, [(row["window_start"], row["rows"]) for row in rows.collect()]))
        if dies[0]:
            raise KeyboardInterrupt

    build()(frame(spark, [Row(5, "x", 1)]), 0)
    build()(frame(spark, [Row(25, "x", 1)]), 1)
    dies[0] = True
    with pytest.raises(KeyboardInterrupt):
        build()(frame(spark, [Row(45, "x", 1)]), 2)  # it removes the first window
    dies[0] = False
    build()(frame(spark, [Row(45, "x", 1)]), 2)
    assert passed_on[2:] == 2 * [(2, [(40, 1)])]


def test_what_windows_refuse(spark):
    stream = newStream("clicks", frame(spark, []))
    by_ten = {"timestampField": "at"}
    numbers: Any = [0, 1]
    for make, error, said in (
        (lambda: stream.window("10 minutes"), errors.ConfigurationError, "TumblingDurationWindow.of"),  # type: ignore[call-overload]
        (lambda: stream.tumblingWindow("1 hour", timestampField="when"), errors.UnknownColumnError, "'when'"),
        (lambda: stream.tumblingWindow("1 hour", timestampField="user"), errors.UnsupportedTypeError, "is a string"),
        (lambda: stream.tumblingWindow("1 hour", timestampField="at"), errors.ConfigurationError, "own units"),
        (lambda: stream.tumblingWindow("soon"), errors.ConfigurationError, "such as '10 minutes'"),
        (lambda: stream.tumblingWindow("1 month"), errors.ConfigurationError, "such as '10 minutes'"),
        (lambda: stream.tumblingWindow(0, **by_ten), errors.ConfigurationError, "above 0"),
        (lambda: stream.slidingWindow(5000, 1, **by_ten), errors.ConfigurationError, "5000 panes"),
        (lambda: stream.tumblingWindow("1 hour", lag="1 minute"), errors.ConfigurationError, "timestampField='at'"),
        (lambda: stream.tumblingWindow(10, idle="1 minute", **by_ten), errors.ConfigurationError, "leave it out"),
        (lambda: stream.tumblingWindow(10, inputs={"user": []}, **by_ten), errors.ConfigurationError, "at least one"),
        (lambda: stream.tumblingWindow(10, inputs={"user": numbers}, **by_ten), errors.ConfigurationError, "are texts"),
        (lambda: stream.tumblingWindow(10, inputs={"n": ["1"]}, **by_ten), errors.UnknownColumnError, "of text"),
        (lambda: stream.tumblingWindow(10, inputs=["user"], **by_ten), errors.ConfigurationError, "names one column"),
        (lambda: stream.tumblingWindow(10, timestampField=F.col("at")), errors.ConfigurationError, "name of a column"),
        (lambda: stream.tumblingWindow(10, lag=-1, **by_ten), errors.ConfigurationError, "lag is"),
        (lambda: stream.tumblingWindow(10, retention=-1, **by_ten), errors.ConfigurationError, "retention is"),
        (lambda: stream.slidingWindow(10, 0, **by_ten), errors.ConfigurationError, "above 0"),
        (lambda: _keep(stream, transactional("memory://w")), errors.ConfigurationError, "opaque states only"),
        (lambda: _keep(stream, opaque("redis://", ttl=5)), errors.ConfigurationError, "without a ttl"),
        (lambda: _keep(stream, window_end=Count()), errors.DuplicateNameError, "'window_end'"),
        (lambda: newStream("s", frame(spark, []), ticks=True), errors.ConfigurationError, "is none"),
        (lambda: _sliding(stream).newValuesStream(), errors.UsageError, "panes"),
        (lambda: _sliding(stream).lateStream().persistentAggregate(opaque("memory://w", "l"), n=Count()),
         errors.ConfigurationError, "needs a topology"),
    ):  # fmt: skip
        with pytest.raises(error, match=said):
            make()
    for gap in (0, -1, "10 minutes"):
        with pytest.raises(errors.ConfigurationError, match="gap of sessions"):
            stream.window(SessionWindow.of(gap), timestampField="at")


def _keep(stream: Any, spec: Any = None, **aggregates: Any) -> Any:
    windows = stream.tumblingWindow(10, timestampField="at")
    return windows.persistentAggregate(spec or opaque("memory://w"), **(aggregates or {"n": Count()}))


def _sliding(stream: Any) -> Any:
    return stream.slidingWindow(10, 5, timestampField="at").persistentAggregate(opaque("memory://w"), n=Count())


@pytest.mark.parametrize(
    ("aggregate", "rows", "error"),
    [
        (Sum("n"), [(3, 2**62, None), (7, 2**62, None)], errors.ValueOverflowError),
        (Avg("amount"), [(3, 0, Decimal(10**16))], errors.SerializationError),
    ],
)
def test_what_cannot_be_given_out_of_a_window_says_that_its_batch_counts(spark, tmp_path, aggregate, rows, error):
    url, schema = f"memory://{tmp_path.name}", "at bigint, n bigint, amount decimal(38,18), user string"
    stream = newStream("clicks", spark.createDataFrame([], schema)).slidingWindow(10, 5, timestampField="at")
    counts = stream.groupBy("user").persistentAggregate(opaque(url, repeat="allowed"), found=aggregate)
    counts.firedWindowsStream().foreachBatch(lambda fired, _: fired.collect())
    others = [(3, 1, Decimal(1), user) for user in "abyz"]
    counts(spark.createDataFrame([*((*row, "x" * 200) for row in rows), *others], schema), 0)
    for _ in range(2):
        with pytest.raises(error, match=r"key 'x{99}\S*: a window .*The batch that fired it counts") as caught:
            counts(spark.createDataFrame([(30, 0, None, "a")], schema), 1)
        assert caught.value.facts["key"] == "x" * 200
    with open_reader(url, "clicks") as reader:
        last = reader.ledger().last_commit
        assert last is not None
        assert last.batch_id == 1
        if error is errors.ValueOverflowError:
            for read in (lambda: reader.windows("x" * 200), lambda: list(reader.window(10))):
                with pytest.raises(error, match=r"key 'x{99}\S*: a window's value left its range, though each pane's"):
                    read()
            assert reader.windows("a")[0].value == {"found": 1}
