"""The inputs and windows of Storm's own tests of windows by time, by that of the rows and by the clock.

Storm's windows are ``(start, end]`` of whole milliseconds: ours of timestamps with ``startTime="1 millisecond"``. Each
row has a bit of its own, so the sum of a window says which rows are in it.
"""

from __future__ import annotations

from uuid import uuid4

import pytest

from mapstate import Collect, SlidingDurationWindow, Sum, TumblingDurationWindow, newStream, opaque, open_reader
from mapstate.protocol.windows import NEVER, Input, Panes, watermark

TWENTY_BY_TEN = SlidingDurationWindow.of("20 milliseconds", "10 milliseconds")


class Storm:
    """Windows of 20 ms that slide by 10 ms. Times and ends are Storm's: whole ms, an end is inside of its window."""

    def __init__(self, spark, lag=5, url=None):
        self.spark, self.fired = spark, []
        self.times = {}
        self.url = url or f"memory://{uuid4().hex}"
        stream = newStream("tuples", spark.createDataFrame([], "ts timestamp, bit bigint"))
        windows = stream.window(
            TWENTY_BY_TEN, timestampField="ts", lag=f"{lag} milliseconds" if lag else 0, startTime="1 millisecond"
        )
        self.windows = windows.persistentAggregate(opaque(self.url, "windows", repeat="allowed"), rows=Sum("bit"))
        self.windows.firedWindowsStream().foreachBatch(self._take)

    def _take(self, rows, _):
        shown = rows.selectExpr("unix_millis(window_end) as end", "rows")
        found = [{row.end - 1: self._rows(row.rows)} for row in shown.collect()]
        assert found == [{row.end - 1: self._rows(row.rows)} for row in shown.collect()]  # as often as one asks
        self.fired.append({end: rows for one in found for end, rows in sorted(one.items())})

    def _rows(self, bits):
        return [time for bit, time in sorted(self.times.items(), key=lambda item: item[1]) if bits & bit]

    def batch(self, batch_id, *times):
        """Rows that come together. Returns the windows that they fire: the rows of each, by its end."""
        rows = []
        for time in times:
            bit = 1 << len(self.times)
            self.times[bit] = time
            rows.append((time, bit))
        return self._applied(batch_id, rows)

    def again(self, batch_id, *times):
        """A batch that was applied before."""
        return self._applied(batch_id, [(time, 1 << at) for at, time in enumerate(times)])

    def _applied(self, batch_id, rows):
        self.fired.clear()
        frame = self.spark.createDataFrame(rows, "ms bigint, bit bigint")
        self.windows(frame.selectExpr("timestamp_millis(ms) as ts", "bit"), batch_id)
        assert len(self.fired) <= 1
        return self.fired[0] if self.fired else {}

    def late(self):
        with open_reader(self.url, "windows") as reader:
            return reader.reports()[0].rows_late


@pytest.mark.spark
def test_three_windows_come_with_one_watermark_and_empty_ones_do_not_come(spark):
    storm = Storm(spark)
    assert storm.batch(0, 603, 605, 607) == {}
    first = {610: [603, 605, 607], 620: [603, 605, 607, 618], 630: [618, 626]}
    assert storm.batch(1, 618, 626, 636) == first
    assert storm.batch(2, 825, 826, 827, 839) == {640: [626, 636], 650: [636], 830: [825, 826, 827]}


@pytest.mark.spark
@pytest.mark.parametrize(
    ("lag", "times"),
    [
        (5, [603, 605, 607, 618, 626, 632, 629, 636]),
        (8, [603, 605, 607, 618, 626, 629, 636, 637, 638, 639]),
    ],
)
def test_a_row_behind_the_latest_one_is_in_its_windows(spark, lag, times):
    storm = Storm(spark, lag)
    third = {630: [618, 626, 629]}
    assert storm.batch(0, *times) == {610: [603, 605, 607], 620: [603, 605, 607, 618]} | third


@pytest.mark.spark
def test_the_row_behind_the_watermark_is_late_and_the_only_one(spark):
    storm = Storm(spark)
    fired = {}
    for batch_id, time in enumerate([603, 605, 607, 618, 626, 636]):
        fired |= storm.batch(batch_id, time)
        assert storm.late() == 0
    assert fired == {610: [603, 605, 607], 620: [603, 605, 607, 618], 630: [618, 626]}
    assert storm.batch(6, 600) == {}
    assert storm.late() == 1


@pytest.mark.spark
def test_a_row_at_a_watermark_on_the_end_of_a_window_is_in_it(spark):
    """Storm accepts it and gives it out in no window (D40a)."""
    storm = Storm(spark)
    assert storm.batch(0, 603, 615) == {}  # the watermark is 610
    assert storm.batch(1, 610, 616) == {610: [603, 610]}
    assert storm.late() == 0


@pytest.mark.spark
def test_without_a_lag_a_row_out_of_order_is_in_windows_or_late(spark):
    """In Storm it can be neither (D40b)."""
    storm = Storm(spark, lag=0)
    assert storm.batch(0, 621, 609) == {610: [609], 620: [609]}
    assert storm.batch(1, 615, 622) == {}
    assert storm.late() == 1
    assert storm.batch(2, 641) == {630: [621, 622], 640: [621, 622]}


@pytest.mark.spark
def test_a_batch_that_comes_again_adds_nothing_and_fires_the_same(spark):
    """Storm adds its rows again (D36) and gives out another result (D37)."""
    storm = Storm(spark)
    times = [603, 605, 607, 618, 626, 636]
    fired = storm.batch(0, *times)
    assert fired == {610: [603, 605, 607], 620: [603, 605, 607, 618], 630: [618, 626]}
    assert storm.again(0, *times) == fired
    assert storm.batch(1, 661) == {640: [626, 636], 650: [636]}


@pytest.mark.spark
def test_windows_go_on_after_a_restart(spark):
    """Storm leaves rows of the store out of windows then, and its sliding windows fail (D38)."""
    before = Storm(spark)
    assert before.batch(0, 603, 605, 607) == {}
    after = Storm(spark, url=before.url)
    after.times = before.times
    assert after.batch(1, 618, 636) == {610: [603, 605, 607], 620: [603, 605, 607, 618], 630: [618]}


class StormByClock:
    """Windows by the driver's clock. Times and ends are whole ms, an end is inside of its window, as in Storm."""

    def __init__(self, spark, monkeypatch, length, slide, url=None):
        self.spark, self.now, self.fired = spark, 0, {}
        self.url = url or f"memory://{uuid4().hex}"
        monkeypatch.setattr("time.time_ns", lambda: self.now * 1_000_000)
        monkeypatch.setattr("mapstate.spark.driver.event_time._ticks", lambda: self.now * 1_000)
        stream = newStream("tuples", spark.createDataFrame([], "row bigint"))
        config = SlidingDurationWindow.of(f"{length} milliseconds", f"{slide} milliseconds")
        start = f"{(1 - length) % slide} milliseconds"  # so that windows end at each multiple of the slide
        windows = stream.window(config, startTime=start)
        spec = opaque(self.url, "windows", repeat="allowed")
        self.windows = windows.persistentAggregate(spec, rows=Collect("row", most=100))
        self.windows.firedWindowsStream().foreachBatch(self._take)

    def _take(self, rows, _):
        shown = rows.selectExpr("unix_millis(window_end) as end", "rows").orderBy("end")
        self.fired = {row.end - 1 - NOW: row.rows for row in shown.collect()}

    def batch(self, batch_id, now, *rows):
        """Rows that come at a time after NOW. Returns the windows that they fire: the rows of each, by its end."""
        self.now, self.fired = NOW + now, {}
        self.windows(self.spark.createDataFrame([(row,) for row in rows], "row bigint"), batch_id)
        return self.fired


NOW = 999_999_999_600  # a multiple of each slide


@pytest.mark.spark
def test_by_the_clock_a_window_holds_what_came_within_its_length(spark, monkeypatch):
    storm = StormByClock(spark, monkeypatch, 1000, 100)
    old, recent, new = range(1, 6), range(6, 11), range(11, 21)
    assert storm.batch(0, -1000, *old) == {}
    assert storm.batch(1, 0, *recent) == {end: [*old] for end in range(-1000, 0, 100)}
    assert storm.batch(2, 101) == {0: [*recent], 100: [*recent]}
    assert storm.batch(3, 150, *new) == {}
    assert storm.batch(4, 201) == {200: [*recent, *new]}


@pytest.mark.spark
def test_by_the_clock_a_window_of_no_rows_does_not_come(spark, monkeypatch):
    storm = StormByClock(spark, monkeypatch, 100, 60)
    assert storm.batch(0, 1, *range(1, 11)) == {}
    assert [storm.batch(at, 60 * at + 1) for at in (1, 2, 3)] == [{60: [*range(1, 11)]}, {}, {}]


@pytest.mark.spark
def test_by_the_clock_a_batch_that_comes_again_later_fires_the_same_and_windows_go_on(spark, monkeypatch):
    """Storm adds its rows again (D36), and leaves rows of its store out of windows after a restart (D38)."""
    before = StormByClock(spark, monkeypatch, 20, 20)
    assert before.batch(0, 5, 1, 2) == {}
    assert before.batch(1, 25, 3) == {20: [1, 2]}
    after = StormByClock(spark, monkeypatch, 20, 20, url=before.url)
    assert after.batch(1, 70, 3) == {20: [1, 2]}
    assert after.batch(2, 71, 4) == {40: [3]}
    assert after.batch(3, 81) == {80: [4]}


def test_the_watermark_is_behind_the_latest_time_of_the_slowest_input():
    def after(before=NEVER, **latest):
        return watermark(before, {name: Input(time) for name, time in latest.items()}, 5, now=0)

    assert after(s1=NEVER) == NEVER
    assert after(s1=max(100, 110)) == 105
    assert after(s1=max(100, 110, 104)) == 105
    assert after(s1=110, s2=NEVER) == NEVER
    assert after(s1=110, s2=98) == 93
    assert after(105, s1=115) == 110


def test_a_row_is_late_by_the_watermark_where_each_millisecond_is_a_window():
    """Storm compares with the watermark itself, also where all windows of the row are open."""
    assert [time < Panes(1, 1).floor(105) for time in (104, 105, 106, 115)] == [True, False, False, False]
    assert not Panes(20, 10, 1).floor(105) > 104


def test_the_lengths_of_windows_are_those_that_were_given():
    tumbling = TumblingDurationWindow.of("20 seconds").panes("timestamp", 0)
    sliding = SlidingDurationWindow.of("50 seconds", "10 seconds").panes("timestamp", 0)
    assert (tumbling.length, tumbling.slide) == (20_000_000, 20_000_000)
    assert (sliding.length, sliding.slide) == (50_000_000, 10_000_000)
