"""Rolling windows on real Spark, held against brute force over the raw rows."""

from __future__ import annotations

import datetime as dt
import random
import shutil
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from cases import full
from every_store import AEROSPIKE, FULL, REDIS, url_of
from pyspark.sql import DataFrame, SparkSession
from rolled import Row, floor, inside, shown, suffix
from spark_fixtures import AVAILABLE
from states import form_of

from mapstate import (
    LIFETIME,
    CombinerAggregator,
    Count,
    LastN,
    Max,
    Min,
    ReducerAggregator,
    RollingWindows,
    Sum,
    Topology,
    errors,
    newStream,
    opaque,
    transactional,
)
from mapstate.backends import resolve
from mapstate.protocol.ledgers import Ledgers
from mapstate.protocol.rolling import RollingDefinition, RollingRecord, RollingWindow
from mapstate.protocol.stored_ledger import read_ledger
from mapstate.protocol.windows import LATEST, NEVER
from mapstate.reader import open_reader
from mapstate.serializers import serializer
from mapstate.spark.driver.job import Windows
from mapstate.spark.driver.window_rows import TILE, with_tiles
from mapstate.spark.streams.rolling import RollingStream

pytestmark = pytest.mark.spark

SCHEMA = "at bigint, user string, n bigint"
WINDOWS: tuple[Any, ...] = ((10, 1), (40, 5), (120, 20), LIFETIME)
FIRST, LAST = -62_135_596_800_000_000, 253_402_300_799_999_999
DAY = 86_400_000_000


@pytest.fixture(params=[*FULL, REDIS, AEROSPIKE])
def url(request: Any, tmp_path: Any) -> str:
    return url_of(request, tmp_path)


def frame(spark: SparkSession, rows: list[Row]) -> DataFrame:
    return spark.createDataFrame(rows, SCHEMA)


# The tile of a row


def tiles_by_catalyst(spark: SparkSession, record: RollingRecord, times: list[int | None], **options: Any) -> list[Any]:
    definition = record.definition
    windows = Windows(definition=definition, column=TILE, type=definition.type, time="at")
    taken = options.get("taken", (max(record.first_time(), -LATEST), LATEST))
    given = spark.createDataFrame([(at, time) for at, time in enumerate(times)], "id int, at bigint")
    if definition.type == "timestamp":
        given = given.selectExpr("id", "timestamp_micros(at) as at")
    placed = with_tiles(given, windows, ["id"], 0, record=record, taken=taken)
    rows = placed.selectExpr("monotonically_increasing_id() as place", TILE).orderBy("place").collect()
    return [row[TILE] for row in rows]


def cases() -> list[RollingRecord]:
    hour = 3_600_000_000
    of_time = (
        RollingWindow("1_hour", hour, hour // 12),
        RollingWindow("7_days", 7 * DAY, 6 * hour),
        RollingWindow("30_days", 30 * DAY, DAY),
    )
    lifetime = RollingWindow(LIFETIME, 0, 0)
    found = []
    for windows, kind, unit, offset, horizon in (
        ((*of_time, lifetime), "timestamp", hour // 12, 0, 1_790_000_000_000_000),
        (of_time, "timestamp", hour // 12, 5 * hour + 7, 1_790_000_000_000_000),
        ((*of_time, lifetime), "timestamp", hour // 12, DAY, -1_000_000_000_000),
        ((of_time[0],), "timestamp", hour // 12, 0, -61_000_000_000_000_000),
        (of_time, "timestamp", hour // 12, 0, None),
        ((RollingWindow("10", 10, 3), RollingWindow("50", 50, 9), lifetime), "bigint", 3, 2, 1000),
        ((RollingWindow("10", 10, 3), RollingWindow("50", 50, 9)), "bigint", 3, 0, -1000),
        ((RollingWindow("9", 9, 1), RollingWindow("30", 30, 7), RollingWindow("31", 31, 3)), "bigint", 1, 0, 0),
    ):
        definition = RollingDefinition(windows=windows, type=kind, unit=unit, offset=offset)
        found.append(
            RollingRecord(definition=definition, horizon=NEVER if horizon is None else definition.units(horizon))
        )
    return found


@pytest.mark.parametrize("at", range(len(cases())))
def test_the_tile_of_a_row_is_that_of_python(spark, at):
    record, draw = cases()[at], random.Random(at)
    definition = record.definition
    levels = definition.levels(record.horizon)
    horizon = 0 if record.horizon == NEVER else record.horizon
    times: list[int | None] = [None]
    edges = [horizon, horizon + 1, horizon + 7]
    for step, least in levels:
        if least != NEVER:
            edges += [least, least + step, least + 3 * step]
    reach = 40 * max(one.resolution for one in definition.windows)
    times += [definition.time(horizon) + draw.randint(-2 * reach, reach) for _ in range(150)]
    for edge in edges:
        times += [definition.time(edge) + by for by in (-1, 0, 1)]
    if definition.type == "timestamp":
        times += [FIRST + definition.unit, LAST - definition.unit, -1, 0, 1]
    else:
        times += [-LATEST, LATEST, -1, 0, 1]
    first = max(record.first_time(), -LATEST)
    expected = []
    for one in times:
        (tile,) = record.tiling.tiles([definition.units(one)]) if one is not None else (None,)
        expected.append(tile if one is not None and one >= first else None)
    found = tiles_by_catalyst(spark, record, times)
    assert dict(zip(times, found, strict=True)) == dict(zip(times, expected, strict=True))
    assert sum(tile is not None for tile in found) > 50


def test_a_time_that_python_has_not_is_none(spark):
    record = cases()[4]
    unit = record.definition.unit
    assert tiles_by_catalyst(spark, record, [FIRST + unit - 1, LAST - unit + 1, FIRST, LAST]) == [None] * 4
    record = cases()[5]
    assert tiles_by_catalyst(spark, record, [-LATEST - 1, LATEST + 1, (1 << 63) - 1, -(1 << 63)]) == [None] * 4


# Batches against brute force


class Site:
    """A topology: rolling windows, a state of the rows that are set aside, and a plain state beside them."""

    def __init__(self, spark: SparkSession, url: str, name: str, **options: Any) -> None:
        self.spark, self.url, self.name = spark, url, name
        self.windows = options.pop("windows", WINDOWS)
        self.by: tuple[str, ...] = options.pop("by", ("user",))
        self.own = options.pop("own", {})
        self.lag = options.get("lag", 0)
        self.unit = min(one[1] for one in self.windows if one != LIFETIME)
        self.topology = Topology("site")
        stream = self.topology.newStream("clicks", frame(spark, []))
        rolling = stream.window(RollingWindows.of(*self.windows), timestampField="at", **options)
        grouped: Any = rolling.groupBy(*self.by) if self.by else rolling
        form = "native" if form_of(url) == "native" else "msgpack"  # JSON is below
        spec = opaque(url, name, repeat="allowed", chunk_size=3, serializer=form)
        aggregates = {"rows": Count(), "total": Sum("n"), "least": Min("n"), "newest": LastN("n", 2, by="at")}
        self.kept = grouped.persistentAggregate(spec, **aggregates, **self.own)
        self.kept.lateStream().persistentAggregate(opaque(url, f"{name}-late", repeat="allowed"), rows=Count())
        stream.groupBy("user").persistentAggregate(opaque(url, f"{name}-all", repeat="allowed"), rows=Count())
        self.rows: list[Row] = []
        self.late: list[Row] = []
        self.batch_id = 0

    def send(self, rows: list[Row]) -> None:
        self.topology(frame(self.spark, rows), self.batch_id)

    def batch(self, rows: list[Row]) -> None:
        """What the driver sets aside is worked out from the ledger's horizon alone, before it begins."""
        first = self.first()
        self.send(rows)
        self.rows += [row for row in rows if row.at is not None and row.at >= first]
        self.late += [row for row in rows if row.at is None or row.at < first]
        self.batch_id += 1

    def first(self) -> int:
        """The beginning of the longest window that ends at the horizon of the batch to come, from its rows alone."""
        times = [row.at for row in self.rows if row.at is not None]
        if LIFETIME in self.windows or not times or self.batch_id == 0:
            return -(10**15)
        end = floor(max(times) - self.lag, self.unit)
        return min(floor(end - length, step) for length, step in self.windows)

    def right(self, user: str, end: int, until: int) -> dict[str, Any] | None:
        return shown(self.rows, user, self.windows, end=end, until=until)

    def check(self) -> None:
        """All keys, as of all times that can be asked for."""
        own = {name: type(one)() for name, one in self.own.items()}
        newest = max(row.at for row in self.rows if row.at is not None)
        with open_reader(self.url, self.name, aggregators=own) as reader:
            kept = reader.ledger().rolling
            assert kept is not None
            users = sorted({row.user for row in self.rows + self.late})
            keys: list[Any] = users if self.by else [()] * len(users)
            users = users if self.by else ["all"] * len(users)
            if not self.by:
                self.rows = [row._replace(user="all") for row in self.rows]
            ends = [(None, newest, newest + self.unit)]
            first = max(kept.definition.time(kept.horizon), newest - 20)
            ends += [(at, floor(at, self.unit), floor(at, self.unit)) for at in range(first, newest + 70, 9)]
            for at, end, until in ends:
                end = floor(end, self.unit)  # noqa: PLW2901
                until = end + self.unit if at is None else until  # noqa: PLW2901
                for user, found in zip(users, reader.multi_get(keys, at=at), strict=True):
                    right = self.right(user, end, until)
                    if right is None:
                        assert found is None, (user, at, found)
                        continue
                    assert {name: found[name] for name in right} == right, (user, at)
                    if self.own:
                        for window in self.windows:
                            mine = inside(self.rows, user, window, end=end, until=until)
                            assert found[f"names_{suffix(window)}"] == sorted(row.n for row in mine)
            reports = reader.reports()
            assert sum(report.rows_late for report in reports) == len(self.late)
            assert sum(report.rows for report in reports) == len(self.rows) + len(self.late)
        with open_reader(self.url, f"{self.name}-late") as late, open_reader(self.url, f"{self.name}-all") as plain:
            assert (late.get(()) or {"rows": 0})["rows"] == len(self.late)
            assert sum(value["rows"] for _, value in plain.scan()) == len(self.rows) + len(self.late)


class Names(CombinerAggregator):
    """A user's own: all values of the rows, which go through Python."""

    def init(self, row: Any) -> Any:
        return [row["n"]]

    def combine(self, a: Any, b: Any) -> Any:
        return sorted(a + b)

    def zero(self) -> Any:
        return []


def drawn(draw: random.Random, now: int, users: str, most: int = 25) -> list[Row]:
    return [
        Row(None if draw.random() < 0.05 else now + draw.randint(-180, 15), draw.choice(users), draw.randint(-9, 9))
        for _ in range(draw.randint(0, most))
    ]


def dies(*_: Any, **__: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("name", "options"),
    [
        full("native", {}),
        ("own", {"own": {"names": Names()}, "lag": 7}),
        full("bounded", {"windows": WINDOWS[:3], "lag": 3}),
        full("ungrouped", {"by": (), "retention": 11}),
    ],
)
def test_rolling_windows_are_those_of_brute_force(spark, url, monkeypatch, name, options):
    """Attempts fail in front of their commit, and replays hold fewer, more and other rows."""
    site, draw, now = Site(spark, url, name, **options), random.Random(name), 0
    for batch in range(4):
        now += draw.choice([8, 30, 90])
        rows = [*drawn(draw, now, "xyz"), Row(now, "x", batch)]
        if batch in (1, 2, 3):
            with monkeypatch.context() as patch:
                patch.setattr(Ledgers, "commit", dies)
                with pytest.raises(KeyboardInterrupt):
                    site.send([*rows, Row(now + 5000, "y", 9), *drawn(draw, now, "xyz")])
            site.check()
            rows = {1: rows[::2], 2: rows + drawn(draw, now, "xyzw"), 3: drawn(draw, now, "wxyz")}[batch]
        site.batch(rows)
        site.check()
    if name == "bounded":
        assert any(row.at is not None for row in site.late)
    assert site.late


def test_many_keys_of_several_partitions_and_chunks(spark, tmp_path):
    """A key's tiles are more than one Arrow batch, and a chunk is three keys."""
    site = Site(spark, f"sqlite:///{tmp_path}/s.db", "many", own={"names": Names()})
    users = [f"user {at}" for at in range(40)]
    with_small = {"spark.sql.execution.arrow.maxRecordsPerBatch": "7"}
    before = {name: spark.conf.get(name) for name in with_small}
    try:
        for name, value in with_small.items():
            spark.conf.set(name, value)
        for start in (0, 50):
            site.batch([Row(start + (at * 7) % 40, user, at) for at in range(9) for user in users])
        site.batch([Row(300, user, 1) for user in users[::3]] + [Row(260 + at, "user 1", at) for at in range(30)])
    finally:
        for name, value in before.items():
            spark.conf.set(name, value)
    site.check()


@pytest.mark.parametrize("url", [REDIS], indirect=True)
def test_the_tiles_of_a_key_are_neighbours_also_where_the_driver_applies_a_small_batch(spark, url):
    """From the fourth small batch on. Each key has rows in many tiles, in no order."""
    rows, draw = [], random.Random("small")
    rolling = newStream("clicks", frame(spark, [])).rollingWindows(*WINDOWS, timestampField="at")
    job = rolling.groupBy("user").persistentAggregate(opaque(url, "small"), rows=Count(), total=Sum("n"))
    with ExitStack() as stack:
        for batch in range(5):
            more = [Row(200 * batch + draw.randint(0, 150), draw.choice("vwxyz"), at) for at in range(60)]
            job(frame(spark, more), batch)
            rows += more
            reader = stack.enter_context(open_reader(url, "small"))
            for user, found in zip("vwxyz", reader.multi_get(list("vwxyz")), strict=True):
                own = [row.n for row in rows if row.user == user]
                assert (found["rows_lifetime"], found["total_lifetime"]) == (len(own), sum(own))
        assert reader.reports()[0].partitions == 1  # on the driver


def test_rows_beyond_ahead_and_keys_with_only_such_rows(spark, tmp_path, monkeypatch, caplog):
    now = dt.datetime(2026, 11, 28, 12, tzinfo=dt.UTC)
    clock = SimpleNamespace(now=now)
    monkeypatch.setattr(time, "time_ns", lambda: int(clock.now.timestamp()) * 1_000_000_000)
    url, schema = f"sqlite:///{tmp_path}/s.db", "at timestamp, user string"
    stream = newStream("clicks", spark.createDataFrame([], schema))
    rolling = stream.rollingWindows("1 hour", "24 hours", timestampField="at", lag="10 minutes", ahead="5 minutes")
    kept = rolling.groupBy("user").persistentAggregate(opaque(url, repeat="allowed"), n=Count(), last=Max("at"))
    late: list[Any] = []
    kept.lateStream().foreachBatch(lambda rows, _: late.extend((row["user"], row["at"]) for row in rows.collect()))

    def at(**ago: Any) -> dt.datetime:
        return clock.now - dt.timedelta(**ago)

    def batch(number: int, *rows: Any) -> None:
        late.clear()
        caplog.clear()
        kept(spark.createDataFrame(list(rows), schema), number)

    batch(
        0, (at(minutes=-5), "ann"), (at(minutes=-6), "ann"), (None, "bob"), (at(days=-3000), "eve"), (at(days=9), "cyd")
    )
    assert sorted(user for user, _ in late) == ["ann", "bob", "eve"]
    (warning,) = [record.getMessage() for record in caplog.records if "set aside" in record.getMessage()]
    assert all(one.isoformat()[:19] in warning.replace(" ", "T") for one in (at(days=-3000), now)), warning
    clock.now += dt.timedelta(minutes=10)
    batch(1, (at(minutes=1), "dan"))
    clock.now += dt.timedelta(minutes=10)
    batch(2, (at(days=3), "fay"), (at(hours=23), "dan"), (at(minutes=0), "dan"))
    assert [user for user, _ in late] == ["fay"]
    assert "set aside" not in caplog.text  # it is too old
    with open_reader(url, "clicks") as reader:
        found = {key[0]: value for key, value in reader.scan()}
        assert set(found) == {"ann", "cyd", "dan"}
        assert (found["dan"]["n_1_hour"], found["dan"]["n_24_hours"]) == (2, 3)
        assert (found["ann"]["n_1_hour"], found["cyd"]["n_24_hours"]) == (1, 0)
        assert found["ann"]["last_1_hour"] == now + dt.timedelta(minutes=5)
        assert [report.rows_late for report in reader.reports()] == [1, 0, 3]
        assert reader.multi_get(["bob", "eve", "fay"]) == [None] * 3
        mark = reader.watermark().time
        assert mark == clock.now - dt.timedelta(minutes=10)


def test_a_restart_with_another_declaration(spark, tmp_path):
    url = f"sqlite:///{tmp_path}/s.db"
    first = Site(spark, url, "s")
    first.batch([Row(at, user, at) for at in range(0, 60, 3) for user in "xy"])
    first.batch([Row(100, "x", 1)])
    first.batch([Row(101, "x", 1)])

    def restarted(*windows: Any, **options: Any) -> Site:
        site = Site(spark, url, "s", windows=windows, **options)
        site.rows, site.late, site.batch_id, site.unit = list(first.rows), [], first.batch_id, 1
        return site

    for windows, options, said in (
        ([*WINDOWS[:3], (39, 1)], {}, "does not keep where 39 begins"),
        (WINDOWS, {"startTime": 3}, "the job asks for"),
    ):
        with pytest.raises(errors.StateSchemaError, match=said):
            restarted(*windows, **options).batch([Row(102, "x", 1)])
    plain = newStream("clicks", frame(spark, [])).groupBy("user")
    with pytest.raises(errors.StateSchemaError, match=r"the job asks for \(none\)"):
        plain.persistentAggregate(opaque(url, "s", repeat="allowed"), rows=Count())(frame(spark, []), 3)
    other = restarted((40, 5), (30, 5), LIFETIME)
    other.batch([Row(102, "x", 1), Row(70, "z", 1)])
    other.check()


# Quarantine, and batches that are planned anew


class Days:
    """A query that runs once a day over the files that have come since, on a checkpoint that can be put back."""

    def __init__(self, spark: SparkSession, url: str, folder: Path, windows: Any = WINDOWS, **topology: Any) -> None:
        self.spark, self.url, self.folder, self.windows = spark, url, folder, windows
        self.options = topology
        self.files: dict[str, list[Row]] = {}
        self.finished: list[Any] = []
        (folder / "input").mkdir()

    def day(self, name: str, *rows: Row) -> None:
        self.files[name] = list(rows)
        own = self.folder / "input" / f"{name}.csv"
        own.write_text("".join(f"{row.at},{row.user},{row.n}\n" for row in rows))
        stream = self.spark.readStream.schema(SCHEMA).csv(f"{self.folder}/input")
        topology = Topology("site", **self.options).on_finished(self.finished.append)
        rolling = topology.newStream("clicks", stream).window(RollingWindows.of(*self.windows), timestampField="at")
        aggregates = {"rows": Count(), "total": Sum("n"), "least": Min("n"), "newest": LastN("n", 2, by="at")}
        kept = rolling.groupBy("user").persistentAggregate(opaque(self.url, "s"), **aggregates)
        kept.lateStream().persistentAggregate(opaque(self.url, "late"), rows=Count())
        topology.start(f"{self.folder}/checkpoint", trigger=AVAILABLE).awaitTermination(240)

    def copy(self, name: str) -> None:
        shutil.copytree(self.folder / "checkpoint", self.folder / name)

    def restore(self, name: str) -> None:
        shutil.rmtree(self.folder / "checkpoint")
        shutil.copytree(self.folder / name, self.folder / "checkpoint")

    def check(self, *, without: Sequence[str] = ()) -> None:
        """Each key, as of now and as of each time from the horizon on, by the rows of the files."""
        rows = [row for name, own in self.files.items() for row in own if name not in without]
        newest = max(row.at or 0 for row in rows)
        unit = min(one[1] for one in self.windows if one != LIFETIME)
        users = sorted({row.user for own in self.files.values() for row in own})
        with open_reader(self.url, "s") as reader, open_reader(self.url, "late") as late:
            record = reader.ledger()
            assert record.rolling is not None
            horizon = record.rolling.horizon
            first = newest if horizon == NEVER else record.rolling.definition.time(horizon)
            assert first <= newest
            for at in (None, *range(first, newest + 130, 7)):
                end = floor(newest if at is None else at, unit)
                until = end + unit if at is None else end
                right = [shown(rows, user, self.windows, end=end, until=until) for user in users]
                assert reader.multi_get(users, at=at) == right, at
            assert record.keys_held() == len({row.user for row in rows}) == len(list(reader.scan()))
            assert late.get(()) is None
            assert reader.watermark().time == newest


@pytest.mark.parametrize("url", [FULL[1], REDIS], indirect=True)
def test_a_row_in_quarantine_is_in_no_tile_and_counts_once_where_it_is_sent_again(spark, url, tmp_path):
    kept, large = tmp_path / "kept", 1 << 62
    days = Days(spark, url, tmp_path, on_poison="quarantine", quarantine=str(kept))
    days.day("a", Row(5, "x", large), Row(6, "y", 1), Row(60, "y", 2))
    others = [Row(7, "y", 3), Row(61, "new", 4), Row(500, "y", 9)]  # one of them would move the watermark
    days.day("poison", Row(5, "x", large), *others)
    days.check(without=["poison"])
    days.day("b", Row(62, "x", 5), Row(3, "y", 6))
    days.day("c", Row(64, "x", 5))  # its begin folds by the watermark of the batch before
    days.check(without=["poison"])
    assert [one.quarantined is not None for one in days.finished] == [False, True, False, False]
    again = spark.read.parquet(str(kept)).where(f"n < {large}").select("at", "user", "n").collect()
    assert sorted(map(tuple, again)) == sorted(map(tuple, others))
    days.day("again", *(Row(*row) for row in again))
    days.check(without=["poison"])


@pytest.mark.parametrize("url", [FULL[1], REDIS], indirect=True)
@pytest.mark.parametrize("windows", [WINDOWS, full(((10, 2), (60, 10)))], ids=["a lifetime", "none"])
def test_a_batch_of_rolling_windows_that_is_planned_anew_counts_once(spark, url, tmp_path, windows):
    """The one before is taken back, with all that it folded, whatever rows its plan has now."""
    days = Days(spark, url, tmp_path, windows)
    days.day("a", *(Row(at, user, at) for at in range(0, 90, 7) for user in "xyz"))
    days.day("b", Row(95, "x", 1), Row(100, "new", 2))
    days.copy("before")
    days.day("c", Row(99, "x", 3), Row(80, "y", 4), Row(99, "gone", 5))
    days.check()
    days.day("c", Row(99, "x", 30), Row(99, "z", 6))  # it has its name, so Spark takes no notice of it
    days.restore("before")
    days.day("d", Row(101, "y", 7), Row(60, "x", 8))
    days.check()
    assert [one.batch_id for one in days.finished] == [0, 1, 2, 2]


@pytest.mark.full
@pytest.mark.parametrize("url", [FULL[1], REDIS], indirect=True)
def test_rolling_windows_that_are_two_batches_ahead_of_a_checkpoint_refuse_it(spark, url, tmp_path):
    days = Days(spark, url, tmp_path)
    days.day("a", *(Row(at, user, at) for at in range(0, 90, 7) for user in "xyz"))
    days.copy("before")
    days.day("b", Row(95, "x", 1))
    days.day("c", Row(99, "x", 3), Row(80, "y", 4))
    store: Any = resolve(url).open("s")
    before = store.load(), store.multi_get(["x", "y", "z"])
    days.restore("before")
    with pytest.raises(Exception, match="the checkpoint is older than the state. Nothing was written"):
        days.day("d", Row(101, "y", 7))
    assert (store.load(), store.multi_get(["x", "y", "z"])) == before
    days.check(without=["d"])


# Errors of one key


class Less(CombinerAggregator):
    """A user's own, which does not join everything, and may give a key up."""

    def init(self, row: Any) -> Any:
        return row["n"]

    def combine(self, a: Any, b: Any) -> Any:
        if a + b == 99:
            raise RuntimeError("99")
        return a + b or None

    def zero(self) -> Any:
        return 0


@pytest.mark.parametrize("windows", ["rolling", full("sliding"), full("none")])
@pytest.mark.parametrize(
    ("own", "first", "then", "error"),
    [
        (Sum("n"), 1 << 62, 1 << 62, errors.ValueOverflowError),
        (Less(), 90, 9, errors.AggregatorError),
        (Less(), 90, -90, errors.AggregatorError),
    ],
    ids=["a sum", "a combiner that raises", "a key that is given up"],
)
def test_an_error_of_a_batch_names_the_one_key_that_it_is_of(spark, tmp_path, windows, own, first, then, error):
    url, user = f"sqlite:///{tmp_path}/s.db", "\n" * 150
    stream: Any = newStream("clicks", frame(spark, []))
    if windows == "rolling":
        stream = stream.rollingWindows((10, 1), LIFETIME, timestampField="at")
    elif windows == "sliding":
        stream = stream.slidingWindow(10, 5, timestampField="at")
    kept = stream.groupBy("user").persistentAggregate(opaque(url, "s", repeat="allowed"), own=own)
    kept(frame(spark, [Row(1, one, first) for one in (user, "a", "z")]), 0)
    rows = frame(spark, [Row(1, user, then), *(Row(1, one, 1) for one in "abyz")])
    if (then, windows) in ((-90, "rolling"), (-90, "none")):  # where such a key, or its tile, may be removed
        kept(rows, 1)
        return
    with pytest.raises(error, match=r"^state 's', key '\S{100,130}: ") as caught:
        kept(rows, 1)
    assert user in caught.value.facts["key"].replace("\\n", "\n")
    with open_reader(url, "s") as reader:
        last = reader.ledger().last_commit
        assert last is not None
        assert last.batch_id == 0


def test_a_damaged_record_of_tiles_fails_its_batch_with_its_key(spark, tmp_path):
    url = f"sqlite:///{tmp_path}/s.db"
    stream = newStream("clicks", frame(spark, [])).rollingWindows((10, 1), LIFETIME, timestampField="at")
    kept = stream.groupBy("user").persistentAggregate(opaque(url, "s", repeat="allowed"), n=Count())
    kept(frame(spark, [Row(1, one, 1) for one in "axz"]), 0)
    store = resolve(url).open("s")
    txid = read_ledger(store, "s").last_txid
    store.multi_put(["x"], serializer("json").encode_all([[txid, [True, [0, 2, -1], [1, 1, 1, 1]], None]]))
    with pytest.raises(errors.CorruptRecordError, match="key 'x': .*out of order"):
        kept(frame(spark, [Row(2, one, 1) for one in "axz"]), 1)
    with open_reader(url, "s", consistency="latest") as reader:
        assert reader.get("a")["n_10"] == 1


# What is refused


def test_what_rolling_windows_refuse(spark, tmp_path):
    url = f"sqlite:///{tmp_path}/s.db"
    stream = newStream("clicks", frame(spark, []))
    rolling = stream.rollingWindows((10, 1), LIFETIME, timestampField="at")
    assert isinstance(rolling, RollingStream)
    by_user = rolling.groupBy("user")
    for spec, aggregate, said in (
        (opaque("redis://localhost", ttl=60.0), Count(), "rolling windows are kept without a ttl"),
        (opaque(url, changes=10), Count(), "rolling windows keep no change log"),
        (transactional(url), Count(), "kept by opaque states only, and this one is transactional"),
        (opaque(url), Total(), "n=Total is a reducer"),
    ):
        with pytest.raises(errors.ConfigurationError, match=said):
            by_user.persistentAggregate(spec, n=aggregate)
    named = newStream("x", spark.createDataFrame([], "at bigint, n_10 string"))
    grouped = named.rollingWindows((10, 1), timestampField="at").groupBy("n_10")
    with pytest.raises(errors.DuplicateNameError, match="n_10"):
        grouped.persistentAggregate(opaque(url), n=Count())
    kept = by_user.persistentAggregate(opaque(url, repeat="allowed"), n=Count())
    with pytest.raises(errors.UsageError, match="rolling windows have no new values"):
        kept.newValuesStream()
    with pytest.raises(errors.UsageError, match="rolling windows do not fire"):
        kept.firedWindowsStream()
    for call, said in (
        (lambda: stream.window(RollingWindows.of((10, 1))), "name the column that has them, timestampField='at'"),
        (lambda: stream.rollingWindows((10, 1), timestampField="at", idle=5), "idle compares with the clock"),
        (lambda: stream.rollingWindows("1 hour", timestampField="at"), "own units"),
        (lambda: stream.rollingWindows(timestampField="at"), "at least one with a length"),
    ):
        with pytest.raises(errors.ConfigurationError, match=said):
            call()
    with pytest.raises(errors.UnknownColumnError):
        stream.rollingWindows((10, 1), timestampField="when")
    with pytest.raises(errors.UnsupportedTypeError):
        stream.rollingWindows((10, 1), timestampField="user")
    kept(frame(spark, [Row(1, "x", 1)]), 0)
    with open_reader(url, "clicks") as reader:
        with pytest.raises(errors.UsageError, match="no windows that fire by time"):
            reader.windows("x")
        assert msgspec.to_builtins(reader.ledger().rolling.definition)["unit"] == 1


class Total(ReducerAggregator):
    def init(self) -> int:
        return 0

    def reduce(self, acc: int, row: Any) -> int:
        return acc + 1
