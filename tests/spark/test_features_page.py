"""docs/features.md: its table of what a key costs, held against what is stored."""

from __future__ import annotations

import datetime as dt
import re
import sqlite3
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from mapstate import LIFETIME, Count, RollingWindows, Sum, newStream, opaque, open_reader
from mapstate.errors import StateSchemaError, WindowGoneError
from mapstate.schema import Field
from mapstate.serializers import RecordCodec, serializer
from mapstate.serializers.tiles import tiles_of

PAGE = Path(__file__).resolve().parents[2] / "docs" / "features.md"
MINUTE = 60_000_000
DAY = 24 * 60 * MINUTE
WINDOWS = RollingWindows.of("1 hour", "24 hours", "7 days", "30 days", LIFETIME)
EVERY = {"every 5 minutes": 5 * MINUTE, "every 2 hours": DAY // 12, "every week": 7 * DAY}

pytestmark = pytest.mark.spark


def records(spark: Any, path: Path, form: str) -> dict[str, bytes]:
    """The record of a key for each step between two rows, after a month."""
    job = (
        newStream("payments", spark.createDataFrame([], "card string, at timestamp, amount bigint"))
        .window(WINDOWS, timestampField="at", lag="10 minutes")
        .groupBy("card")
        .persistentAggregate(
            opaque(f"sqlite:///{path}", "cards", serializer=form), payments=Count(), spend=Sum("amount")
        )
    )
    first, last = 20_000 * DAY, 20_031 * DAY
    for batch_id in range(3):  # the third folds by the watermark of the first
        end = last + batch_id * 5 * MINUTE
        rows = [(every, at) for every, step in EVERY.items() for at in range(first, last, step) if not batch_id]
        rows += [(every, end) for every in EVERY]
        frame = spark.createDataFrame(rows, "card string, at bigint")
        job(frame.selectExpr("card", "timestamp_micros(at) at", "100 + pmod(at, 900) amount"), batch_id)
    with sqlite3.connect(path) as database:
        return dict(database.execute("select key, record from mapstate_records where state = 'cards'").fetchall())


def test_what_a_key_costs_is_what_is_stored(spark, tmp_path):
    packed, text = (records(spark, tmp_path / f"{form}.db", form) for form in ("msgpack", "json"))
    fields = [Field("payments", "Count", "bigint"), Field("spend", "Sum(amount)", "bigint")]
    codec = RecordCodec(serializer("msgpack"), "cards", "opaque", fields, [(0, 2)], in_tiles=True)
    tiles = {every: len(tiles_of(codec.loads([every], [record])[0][1]).starts) for every, record in packed.items()}
    rows = [f"| {every} | {tiles[every]} | {len(packed[every]):,} | {len(text[every]):,} |" for every in EVERY]
    found = re.findall(r"^\| every .*\|$", PAGE.read_text(), re.MULTILINE)
    assert found == rows


class Restarts:
    """A state whose job each batch starts anew, with times that are a number of minutes."""

    def __init__(self, spark: Any) -> None:
        self.spark, self.url, self.batch_id = spark, f"memory://{uuid4().hex}", 0

    def batch(self, *times: int, windows: Any = ((60, 5), LIFETIME), fields: Any = ("n",), **options: Any) -> None:
        """A start with these windows, and one batch."""
        frame = self.spark.createDataFrame([(at,) for at in times], "at bigint")
        stream = newStream("s", frame).rollingWindows(*windows, timestampField="at", **options)
        stream.persistentAggregate(opaque(self.url, "s"), **{name: Count() for name in fields})(frame, self.batch_id)
        self.batch_id += 1

    def get(self, at: Any = None, column: str = "n_60") -> Any:
        with open_reader(self.url, "s") as reader:
            return reader.get((), at=at)[column]


def test_times_can_be_asked_for_from_the_watermark_before_less_the_retention(spark):
    job = Restarts(spark)
    job.batch(1000, lag=10, retention=20)
    assert job.get(at=0) == 0  # nothing is joined before there is a watermark
    job.batch(1100, lag=10, retention=20)
    with pytest.raises(WindowGoneError, match="from 970 on"):
        job.get(at=969)
    assert [job.get(at=at) for at in (970, 1000, 1004, 1005, 1059, 1060, 1065)] == [0, 0, 0, 1, 1, 1, 0]
    assert (job.get(at="watermark"), job.get()) == (0, 1)


def test_rows_that_are_set_aside_are_counted_and_in_the_late_stream(spark):
    now, url, late = dt.datetime.now(dt.UTC), f"memory://{uuid4().hex}", []

    def batch(batch_id: int, *ages: dt.timedelta | None) -> None:
        rows = [(None if age is None else now - age, number) for number, age in enumerate(ages)]
        frame = spark.createDataFrame(rows, "at timestamp, number int")
        stream = newStream("s", frame).rollingWindows("1 hour", timestampField="at")
        kept = stream.persistentAggregate(opaque(url, "s"), n=Count())
        kept.lateStream().foreachBatch(lambda rows, _: late.append(sorted(row.number for row in rows.collect())))
        kept(frame, batch_id)

    batch(0, dt.timedelta(0))
    batch(1, dt.timedelta(0), None, dt.timedelta(hours=-1), dt.timedelta(minutes=59), dt.timedelta(days=3))
    with open_reader(url, "s") as reader:
        assert [report.rows_late for report in reader.reports()] == [3, 0]
        assert reader.get(()) == {"n_1_hour": 3}
    assert late[-1] == [1, 2, 4]


@pytest.mark.full
def test_each_change_at_a_restart_does_what_its_row_says(spark):
    job = Restarts(spark)
    job.batch(1000, 1030)
    job.batch(1100, lag=50)  # at once: the watermark is at 1050
    with open_reader(job.url, "s") as reader:
        assert reader.watermark().time == 1050
    job.batch(1110, lag=50)
    job.batch(1110, lag=50, retention=30)  # longer: the horizon stays
    with pytest.raises(WindowGoneError, match="from 1050 on"):
        job.get(at=1049)
    assert job.get(at=1060) == 2
    job.batch(1200, lag=50, retention=30)
    job.batch(1200, lag=50, retention=30)
    with pytest.raises(WindowGoneError, match="from 1120 on"):
        job.get(at=1119)
    assert job.get(at=1120) == 3
    job.batch(1200, lag=50)  # shorter
    with pytest.raises(WindowGoneError, match="from 1150 on"):
        job.get(at=1149)
    for windows in (((60, 5), (120, 10), LIFETIME), ((60, 5), (59, 1), LIFETIME)):
        with pytest.raises(StateSchemaError, match="does not keep where"):
            job.batch(1200, windows=windows)
    job.batch(1200, lag=50, windows=((60, 5), (40, 10), LIFETIME))  # more, and all of its beginnings are there
    assert (job.get(), job.get(column="n_40")) == (4, 4)
    job.batch(1200, lag=50, windows=((40, 10),), fields=("n", "more"))  # less, with a field more
    assert (job.get(column="n_40"), job.get(column="more_40")) == (5, 1)
    with pytest.raises(StateSchemaError, match="lifetime"):
        job.batch(1200, lag=50)
    with pytest.raises(StateSchemaError, match="startTime"):
        job.batch(1200, windows=((40, 10),), fields=("n", "more"), startTime=1)
