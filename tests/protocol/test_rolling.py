"""Rolling windows without a job: what they are, which tile a time is in, and records of tiles, held against rows."""

from __future__ import annotations

import copy
import datetime as dt
import json
import math
import random
import secrets
from decimal import Decimal
from functools import reduce
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from rolled import Rolled, Row, floor
from test_joins import ALL, COLUMNS
from test_serializers import VALUES, alike

from mapstate import LIFETIME, Count, RollingWindows, Sum, open_reader
from mapstate.aggregators import tiles as of_tiles
from mapstate.aggregators.aggregator import CombinerAggregator
from mapstate.aggregators.bulk_tiles import FEWEST
from mapstate.aggregators.results import joins_of
from mapstate.aggregators.sketches import SKETCHES
from mapstate.aggregators.tiles import Answers, TileFields
from mapstate.errors import ConfigurationError, CorruptRecordError, DuplicateNameError, ValueOverflowError, check_unique
from mapstate.protocol.rolling import RollingDefinition, RollingRecord, RollingWindow, Tiling, columns_of
from mapstate.protocol.windows import NEVER, WindowCommit
from mapstate.schema import Field
from mapstate.serializers import RecordCodec, serializer
from mapstate.serializers.tiles import BASE, Earlier, StoredTiles, Tiles, tiles_of, undo_of

DATA = Path(__file__).parents[1] / "data" / "rolling"
FORMS = ["json", "msgpack", "native"]
SECOND, MINUTE, HOUR, DAY = 1_000_000, 60_000_000, 3_600_000_000, 86_400_000_000


def defined(*windows: Any, kind: Any = "timestamp", **options: Any) -> RollingDefinition:
    given = {"startTime": 0, "lag": 0, "retention": 0, "idle": None} | options
    return RollingWindows.of(*windows).definition(kind, **given)


# What is declared


@pytest.mark.parametrize(
    ("length", "resolution"),
    [
        ("12 seconds", SECOND),
        ("11 minutes", SECOND),
        ("12 minutes", MINUTE),
        ("59 minutes", MINUTE),
        ("1 hour", 5 * MINUTE),
        ("11 hours", 5 * MINUTE),
        ("12 hours", HOUR),
        ("24 hours", HOUR),
        ("71 hours", HOUR),
        ("3 days", 6 * HOUR),
        ("7 days", 6 * HOUR),
        ("11 days", 6 * HOUR),
        ("12 days", DAY),
        ("30 days", DAY),
        ("365 days", DAY),
    ],
)
def test_the_default_resolution_is_at_most_a_twelfth(length, resolution):
    (window,) = defined(length).windows
    assert window.resolution == resolution
    assert window.length >= 12 * resolution


@pytest.mark.parametrize(
    ("kind", "length", "name", "span"),
    [
        ("timestamp", "24 hours", "24_hours", DAY),
        ("timestamp", "1 DAY", "1_day", DAY),
        ("timestamp", "interval 90 minutes", "90_minutes", 90 * MINUTE),
        ("timestamp", "1 hour 30 minutes", "1_hour_30_minutes", 90 * MINUTE),
        ("timestamp", dt.timedelta(days=7), "7_days", 7 * DAY),
        ("timestamp", dt.timedelta(days=1), "1_day", DAY),
        ("timestamp", dt.timedelta(minutes=90), "90_minutes", 90 * MINUTE),
        ("timestamp", dt.timedelta(seconds=61), "61_seconds", 61 * SECOND),
        ("bigint", 3600, "3600", 3600),
    ],
)
def test_a_window_is_named_as_it_was_written(kind, length, name, span):
    given = (length, 60) if kind == "bigint" else length
    (window,) = defined(given, kind=kind).windows
    assert (window.name, window.length) == (name, span)


def test_a_declaration_has_all_that_the_arithmetic_needs():
    options = {"startTime": "3 hours", "lag": "10 minutes", "retention": "1 hour", "idle": "2 hours"}
    found = defined("1 hour", ("30 days", "1 hour"), LIFETIME, **options)
    assert found == RollingDefinition(
        windows=(
            RollingWindow("1_hour", HOUR, 5 * MINUTE),
            RollingWindow("30_days", 30 * DAY, HOUR),
            RollingWindow("lifetime", 0, 0),
        ),
        type="timestamp",
        unit=5 * MINUTE,
        offset=3 * HOUR,
        lag=10 * MINUTE,
        retention=HOUR,
        idle=2 * HOUR,
    )
    assert found.has_lifetime
    assert not defined("1 hour").has_lifetime


@pytest.mark.parametrize(
    ("kind", "windows", "said"),
    [
        ("timestamp", [], "at least one with a length"),
        ("timestamp", [LIFETIME], "at least one with a length"),
        ("timestamp", ["1 second"], "it is shorter than 12 seconds"),
        ("bigint", [100], "its times are a bigint"),
        ("bigint", ["1 hour"], "a number of the time column's own units"),
        ("timestamp", [100], "a duration such as '10 minutes'"),
        ("timestamp", [("1 hour", "2 hours")], "is longer than the window"),
        ("timestamp", [("1 hour", "0 seconds")], "above 0"),
        ("timestamp", ["0 hours"], "above 0"),
        ("timestamp", ["4000000 days"], "at most 3,652,500 days"),
        ("bigint", [((1 << 61) + 1, 5)], "at most 2,305,843,009,213,693,952"),
        ("timestamp", [("1 hour", "5 minutes"), ("2 hours", "7 minutes")], "no multiple of 300 s"),
        ("timestamp", [("1 hour", "5 minutes", "1 minute")], "a duration such as"),
    ],
)
def test_what_cannot_be_declared(kind, windows, said):
    with pytest.raises(ConfigurationError, match=said):
        defined(*windows, kind=kind)


@pytest.mark.parametrize(
    "windows",
    [
        ["1 hour", "1 hour"],
        ["1 hour", ("1 hour", "1 minute")],
        ["1 hour", "1 HOUR"],
        [dt.timedelta(hours=1), "1 hour"],
        [LIFETIME, "1 hour", LIFETIME],
    ],
)
def test_a_window_stands_once(windows):
    with pytest.raises(DuplicateNameError, match="stands twice"):
        defined(*windows)


def test_too_many_tiles_are_refused_with_the_window_that_needs_them():
    with pytest.raises(ConfigurationError, match=r"need 8,6\d\d tiles a key, and 1,000.*'30_days' by 300 s"):
        defined("1 hour", ("30 days", "5 minutes"))
    with pytest.raises(ConfigurationError, match=r"need 2,\d\d\d tiles.*lag and retention by 300 s"):
        defined("1 hour", retention="7 days")
    assert defined("1 hour", ("7 days", "1 hour"), retention="1 hour").most_tiles() <= 1000
    assert defined(("998 hours", "1 hour")).most_tiles() == 1000
    with pytest.raises(ConfigurationError, match="1,001 tiles"):
        defined(("999 hours", "1 hour"))


def test_what_rolling_windows_cost_is_as_documented():
    assert defined("1 hour", "24 hours", "7 days", "30 days", LIFETIME).most_tiles() <= 100
    assert defined("1 hour", "24 hours", ("7 days", "1 hour"), "30 days", LIFETIME).most_tiles() <= 220


# Which tile a time is in


@st.composite
def definitions(draw: Any) -> RollingDefinition:
    """Of a bigint, with resolutions that are multiples of one, and that need not divide each other."""
    unit = draw(st.sampled_from([1, 2, 5]))
    windows = []
    for at in range(draw(st.integers(1, 4))):
        resolution = unit * (1 if at == 0 else draw(st.integers(1, 8)))
        length = draw(st.integers(resolution, 60))
        windows.append(RollingWindow(f"w{at}", length, resolution))
    if draw(st.booleans()):
        windows.append(RollingWindow(LIFETIME, 0, 0))
    return RollingDefinition(
        windows=tuple(draw(st.permutations(windows))),
        type="bigint",
        unit=unit,
        offset=draw(st.integers(0, 50)),
        lag=draw(st.integers(0, 20)),
        retention=draw(st.integers(0, 20)),
    )


def cuts(definition: RollingDefinition, horizon: int, until: int) -> set[int]:
    """All times, in units, at which a window begins or ends that may be asked for: one end after the other."""
    unit, found = definition.unit, set()
    for end in range(horizon, until):
        found.add(end)
        for window in definition.windows:
            if window.length:
                low = floor(end * unit - window.length, window.resolution)
                assert low % unit == 0
                found.add(low // unit)
    return found


@settings(max_examples=200)
@given(definitions(), st.integers(-60, 60))
def test_no_window_begins_or_ends_inside_of_a_tile_and_no_tile_is_finer_than_that(definition, horizon):
    times = range(horizon - 80, horizon + 20)
    needed = cuts(definition, horizon, horizon + 80)
    tiles = dict(zip(times, Tiling(definition, horizon).tiles(times), strict=True))
    oldest = BASE if definition.has_lifetime else None
    for time, tile in tiles.items():
        before = [cut for cut in needed if cut <= time]
        assert tile == (max(before) if before else oldest), (time, sorted(needed))


@settings(max_examples=100)
@given(definitions(), st.integers(-60, 60), st.integers(0, 40), st.integers(-120, 120))
def test_folding_at_a_later_horizon_is_folding_once(definition, horizon, more, time):
    (tile,) = Tiling(definition, horizon).tiles([time])
    (later,) = Tiling(definition, horizon + more).tiles([time])
    if tile is None:
        assert later is None
        return
    assert Tiling(definition, horizon).tiles([tile]) == [tile]
    assert tile <= time
    assert Tiling(definition, horizon + more).tiles([tile]) == [later]


def test_without_a_horizon_each_unit_is_a_tile():
    definition = defined((10, 5), (40, 20), LIFETIME, kind="bigint")
    assert Tiling(definition, NEVER).tiles([-(1 << 61), -7, 0, 1 << 61]) == [-(1 << 61), -7, 0, 1 << 61]
    assert Tiling(definition, NEVER).tiles([BASE]) == [BASE]


@settings(max_examples=60)
@given(definitions())
def test_a_declaration_needs_at_most_so_many_tiles(definition):
    """A key with a row in each unit, folded at any horizon that the lag and the retention allow."""
    most = 0
    for latest in range(100, 140):
        horizon = definition.units(definition.time(latest) - definition.lag - definition.retention)
        tiles = set(Tiling(definition, horizon).tiles(range(-100, latest + 1))) - {None}
        most = max(most, len(tiles))
    steps = sorted(window.resolution for window in definition.windows if window.length)
    if all(coarse % fine == 0 for fine, coarse in pairwise(steps)):
        assert most <= definition.most_tiles()
    else:  # beside each other's cuts there may be one more
        assert most <= definition.most_tiles() + len(steps)
    assert definition.most_tiles() <= most + 2 * len(definition.windows) + 2


@settings(max_examples=100)
@given(definitions(), st.lists(st.integers(-200, 200), max_size=8))
def test_the_horizon_follows_the_committed_watermark_and_never_moves_back(definition, marks):
    record, horizons = RollingRecord(definition=definition), [NEVER]
    assert record.begun(None) is record
    assert record.begun(WindowCommit()) is record
    assert record.first_time() == NEVER
    for at, mark in enumerate(marks):
        record = record.begun(WindowCommit(watermark=mark))
        horizons.append(record.horizon)
        latest = max(marks[: at + 1])
        due = floor(latest - definition.retention, definition.unit, definition.offset)
        assert definition.time(record.horizon) == due
    assert horizons == sorted(horizons)
    assert record.emptied() == RollingRecord(definition=definition)


@settings(max_examples=100)
@given(definitions(), st.integers(-40, 40), st.integers(-200, 200))
def test_a_row_counts_if_a_window_can_still_have_it(definition, horizon, time):
    record = RollingRecord(definition=definition, horizon=horizon)
    (tile,) = record.tiling.tiles([definition.units(time)])
    assert (tile is not None) == (time >= record.first_time())


@settings(max_examples=200)
@given(definitions(), st.integers(-40, 40), st.integers(1, 60), st.integers(1, 12))
def test_a_window_can_be_added_only_where_its_cuts_are(definition, horizon, length, resolution):
    more = RollingWindow("more", length, resolution)
    assume(resolution <= length)
    if resolution % definition.unit:
        assert not definition.has_cuts_of(more, horizon)
        return
    alone = RollingDefinition(windows=(more,), type="bigint", unit=definition.unit)
    if definition.has_cuts_of(more, horizon):
        assert cuts(alone, horizon, horizon + 100) <= cuts(definition, horizon, horizon + 200)
    lifetime = RollingWindow(LIFETIME, 0, 0)
    assert definition.has_cuts_of(lifetime, horizon) == definition.has_lifetime
    assert definition.has_cuts_of(lifetime, NEVER)


# Tiles against rows

YEARS = [-62_135_000_000, -(10**9), 0, 253_402_000_000]  # 1, 1938, 1970 and 9999, in seconds

wires = st.sampled_from(["json", "msgpack"])
rows = st.lists(
    st.builds(Row, st.integers(-150, 150), st.sampled_from(["ann", "bob"]), st.integers(-9, 9)), max_size=12
)


@settings(max_examples=60)
@given(definitions(), st.lists(rows, min_size=1, max_size=5), st.sampled_from([1, 7]), wires, st.data())
def test_every_answer_is_that_of_the_rows(definition, batches, scale, form, data):
    windows = [LIFETIME if not one.length else (one.length, one.resolution) for one in definition.windows]
    lengths = [one if one == LIFETIME else one[0] for one in windows]
    assume(len(set(lengths)) == len(lengths))
    assume(definition.unit == min(one.resolution for one in definition.windows if one.length))
    job = Rolled(
        f"memory://{secrets.token_hex(8)}",
        windows,
        startTime=definition.offset,
        lag=definition.lag,
        retention=definition.retention,
        serializer=form,
    )
    _check_batches(job, batches, scale, data)


@settings(max_examples=20)
@given(
    st.lists(rows, min_size=1, max_size=4),
    st.sampled_from([-62_135_000_000, 253_402_000_000, 0, -(10**9)]),
    wires,
    st.data(),
)
def test_every_answer_is_that_of_the_rows_where_times_are_timestamps(batches, around, form, data):
    """Of the years 1, 9999, 1970 and 1938."""
    url, windows = f"memory://{secrets.token_hex(8)}", [(60, 5), (240, 30), LIFETIME]
    job = Rolled(url, windows, kind="timestamp", startTime=10, serializer=form)
    moved = [[row._replace(at=row.at + around) for row in batch] for batch in batches]
    _check_batches(job, moved, 1, data, around)


def _check_batches(job: Rolled, batches: Any, scale: int, data: Any, around: int = 0) -> None:
    for batch in batches:
        job.batch(*(row._replace(at=(row.at - around) // scale + around) for row in batch))
        kept = job.record.rolling
        assert kept is not None
        if not job.rows:
            continue
        first = kept.definition.time(kept.horizon) // job.scale if kept.horizon != NEVER else around - 200
        at = data.draw(st.integers(first, max(first, around + 300)))
        with open_reader(job.backend, "s") as reader:
            for user in ("ann", "bob"):
                assert reader.get(user, at=job.time(at)) == job.right(user, at)
                assert reader.get(user, at="watermark") == job.right(user, "watermark")
                if job.kind == "bigint":
                    assert reader.get(user) == job.right(user)
            assert sum(map(len, batches[: len(job.committed)])) == len(job.rows) + len(job.late)


def test_a_shorter_window_of_a_coarser_resolution_may_begin_before_a_longer_one(tmp_path):
    job = Rolled(f"memory://{tmp_path.name}", [(10, 10), (12, 1), (11, 11)])
    job.batch(*(Row(at, "ann", at) for at in range(40)))
    with open_reader(job.backend, "s") as reader:
        for at in range(job.mark, 60):
            assert reader.get("ann", at=at) == job.right("ann", at)


@pytest.mark.parametrize("one", ALL, ids=repr)
def test_every_built_in_aggregator_over_tiles_is_that_of_the_rows(one):
    draw = random.Random(repr(one))
    definition = defined((10, 2), (24, 6), LIFETIME, kind="bigint")
    field = Field("f", one.describe(), one.bind(COLUMNS))
    history: list[tuple[int, dict[str, Any]]] = []
    value: Any = None
    for batch in range(6):
        times = [8 * batch + draw.randint(-14, 8) for _ in range(12)]
        new = [(time, _made(draw, len(history) + at)) for at, time in enumerate(times)]
        tiling = Tiling(definition, NEVER if batch < 2 else definition.units(8 * batch - 8))
        placed: dict[int, list[Any]] = {}
        for time, row in new:
            placed.setdefault(tiling.tiles([definition.units(time)])[0] or 0, []).append(one.init(row))
        partial = Tiles(sorted(placed), [[_combined(one, placed[start]) for start in sorted(placed)]])
        (value,) = TileFields([field], {"f": one}, tiling).combine_all([value], [partial])
        history += new
        answers = Answers(joins_of([field], {}), definition)
        for end in range(definition.units(8 * batch), definition.units(8 * batch + 20)):
            found = answers.fields.named(answers.values([value], [(end, end)]))[0]
            for name, length, step in (("10", 10, 2), ("24", 24, 6), ("lifetime", 0, 0)):
                low = floor(2 * end - length, step) if length else -(10**9)
                own = [one.init(row) for time, row in history if low <= time < 2 * end]
                right = one.result(_combined(one, own)) if own else _of_nothing(one)
                assert _near(found[f"f_{name}"], right), (name, end, found[f"f_{name}"], right)


class Longest(CombinerAggregator):
    """A combiner of a user's own, which has null for no text."""

    def bind(self, columns):
        return "string"

    def init(self, row):
        return row["s"] * (row["t"] % 3) or None

    def zero(self):
        return None

    def combine(self, a, b):
        return max(a or "", b or "", key=len) or None


@pytest.mark.parametrize("windows", [[(10, 2), (24, 6), LIFETIME], [(10, 2), (24, 6)]])
@pytest.mark.parametrize("one", [*(one for one in ALL if not isinstance(one, SKETCHES)), Longest()], ids=repr)
def test_a_packed_value_is_changed_as_a_plain_one_is_and_comes_back(one, windows):
    """Through records, batch by batch, with numbers that need more and more bytes, and fewer again."""
    draw = random.Random(repr(one))
    definition = defined(*windows, kind="bigint")
    own = {"f": one, "n": Count(), "sum": Sum("n")}
    fields = [Field(name, each.describe(), each.bind(COLUMNS)) for name, each in own.items()]
    codec = RecordCodec(serializer("msgpack"), "s", "opaque", fields, [(0, 3)], in_tiles=True)
    answers = Answers(joins_of(fields, {"f": one}), definition, ["sum_10", "sum_24", "sum_lifetime"])
    base: Any = None
    kept, horizon = 0, NEVER
    for batch in range(1, 40):
        at = batch * 3
        horizon = max(horizon, NEVER if batch < 3 else definition.units(at - draw.choice([0, 6, 60])))
        tiling = Tiling(definition, horizon)
        placed: dict[int, list[list[Any]]] = {}
        for number in range(draw.choice([1, 1, 2, 9])):
            row = _made(draw, batch + number)
            row["n"] = row["n"] and row["n"] * 10 ** draw.choice([0, 1, 3, 12, 16] if batch % 9 > 5 else [0])
            (start,) = tiling.tiles([definition.units(at - draw.choice([0, 0, 1, 9, 90]))])
            if start is not None:
                placed.setdefault(start, []).append([each.init(row) for each in own.values()])
        if not placed:
            continue
        partial = Tiles(
            sorted(placed),
            [
                [_combined(each, [values[number] for values in placed[start]]) for start in sorted(placed)]
                for number, each in enumerate(own.values())
            ],
        )
        before = tiles_of(base)
        make = TileFields(fields, own, tiling)
        (right,) = make.combine_all([copy.deepcopy(before)], [copy.deepcopy(partial)])
        (value,) = make.combine_all([base], [partial])
        kept += type(value) is StoredTiles
        [(_, curr, prev)] = codec.loads(["k"], codec.dumps([(batch, value, base)]))
        assert alike(tiles_of(curr)) == alike(right)
        assert alike(tiles_of(prev)) == alike(before)
        for found in (curr, prev):
            end = (definition.units(at + draw.randint(0, 16)),) * 2
            apart = answers.values([tiles_of(found)], [end])
            assert alike(answers.values([found] * FEWEST, [end] * FEWEST)) == alike(apart * FEWEST)
        base = curr
    assert kept > 10


def _combined(one: Any, values: list[Any]) -> Any:
    return reduce(one.combine, values)


def _made(draw: random.Random, at: int) -> dict[str, Any]:
    n = draw.randint(-9, 9)
    return {
        "n": n if at % 3 else None,
        "d": draw.randint(-40, 40) / 4,
        "b": draw.random() < 0.5,
        "t": at,
        "s": f"x{at % 5}",
        "dec": Decimal(n) / 4,
    }


def _of_nothing(one: Any) -> Any:
    """A sketch shows null of no row."""
    return None if isinstance(one, SKETCHES) else one.result(one.zero())


def _near(found: Any, right: Any) -> bool:
    if isinstance(right, float) and isinstance(found, float):
        return math.isclose(found, right, rel_tol=1e-9, abs_tol=1e-9)
    return type(found) is type(right) and (found == right or str(found) == str(right))


# A value, and what undoes a batch

floats = st.sampled_from([0.0, -0.0, math.nan, 1.5, math.inf]) | st.none()


@st.composite
def values(draw: Any, kinds: Any = None) -> Tiles:
    """Tiles with two columns, or one of each kind; some with a base tile."""
    starts = sorted(draw(st.sets(st.integers(-20, 20) | st.just(BASE), max_size=6)))
    columns = [floats, st.integers(0, 3)] if kinds is None else [st.none() | VALUES[kind] for kind in kinds]
    return Tiles(starts, [[draw(column) for _ in starts] for column in columns])


@st.composite
def changed(draw: Any, before: Tiles) -> Tiles:
    """What a batch may make of tiles: some go, some come, some change, and some values are equal and not the same."""
    kept = [at for at in range(len(before.starts)) if draw(st.integers(0, 3))]
    pairs = {before.starts[at]: [column[at] for column in before.columns] for at in kept}
    for start in draw(st.sets(st.integers(-20, 20) | st.just(BASE), max_size=4)):
        pairs[start] = [draw(floats), draw(st.integers(0, 3))]
    starts = sorted(pairs)
    return Tiles(starts, [[pairs[start][at] for start in starts] for at in range(2)])


TWO = [Field("x", "Sum(x)", "double"), Field("n", "Count", "bigint")]


@settings(max_examples=150)
@given(st.sampled_from(FORMS), st.data())
def test_the_value_before_comes_back_exactly(form, data):
    before = data.draw(values())
    after = data.draw(changed(before))
    as_was = alike(before), alike(after)
    assert alike(Earlier(after, lambda: undo_of(before, after)).tiles()) == as_was[0]
    codec = RecordCodec(serializer(form), "s", "opaque", TWO, [(0, 2)], in_tiles=True)
    [(txid, curr, prev)] = codec.loads(["k"], codec.dumps([(7, after, before)]))
    assert txid == 7
    assert alike(tiles_of(curr)) == as_was[1]
    assert alike(tiles_of(prev)) == as_was[0]
    [again] = codec.loads(["k"], codec.dumps([(8, after, prev)]))  # what an attempt that died left is built upon
    assert alike(tiles_of(again[2])) == as_was[0]
    assert (alike(before), alike(after)) == as_was


@pytest.mark.parametrize("form", FORMS)
def test_an_undo_has_only_what_its_batch_changed_also_after_an_attempt_that_died(form, tmp_path):
    job = Rolled(f"memory://{tmp_path.name}", [(150, 1)], serializer=form, lag=150)
    job.batch(*(Row(at, "ann", 10**6 + at) for at in range(100)))
    for at in (50, 60):
        attempted = job.attempt(Row(at, "ann", 1))
        [data] = job.store.multi_get(["ann"])
        [(_, curr, prev)] = job.codec().loads(["ann"], [data])
        gone, back = prev.undo()
        assert (len(tiles_of(curr).starts), gone, len(tiles_of(back).starts)) == (100, [], 1)
    job.commit(attempted)


@pytest.mark.parametrize("form", FORMS)
def test_zeros_and_numbers_that_are_none_come_back_with_their_sign(form):
    codec = RecordCodec(serializer(form), "s", "opaque", TWO, [(0, 2)], in_tiles=True)
    before = Tiles([BASE, 1, 2, 3], [[0.0, -0.0, math.nan, 0.0], [1, 2, 3, 4]])
    after = Tiles([BASE, 1, 2, 5], [[-0.0, 0.0, float("nan"), -0.0], [1, 2, 3, 4]])
    [(_, curr, prev)] = codec.loads(["k"], codec.dumps([(7, after, before)]))
    assert (alike(tiles_of(curr)), alike(tiles_of(prev))) == (alike(after), alike(before))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("was", "now"), [(1, 1.0), (1.0, 1), (1, True), (True, 1)])
def test_numbers_that_are_equal_and_of_another_type_come_back(form, was, now):
    field = [Field("own", "Own", "any")]
    codec = RecordCodec(serializer(form), "s", "opaque", field, [(0, 1)], in_tiles=True)
    [(_, _, prev)] = codec.loads(["k"], codec.dumps([(7, Tiles([1], [[now]]), Tiles([1], [[was]]))]))
    assert alike(tiles_of(prev)) == alike(Tiles([1], [[was]]))


@settings(max_examples=100)
@given(st.sampled_from(FORMS), st.lists(st.sampled_from(list(VALUES)), min_size=1, max_size=4), st.data())
def test_tiles_of_every_type_come_back_as_they_were(form, kinds, data):
    fields = [Field(f"f{at}", "Own", kind) for at, kind in enumerate(kinds)]
    codec = RecordCodec(serializer(form), "s", "opaque", fields, [(0, len(kinds))], in_tiles=True)
    one, other = data.draw(values(kinds)), data.draw(values(kinds))
    written = codec.dumps([(1, one, None), (2, one, other)])
    assert all(type(record) is (list if form == "native" else bytes) for record in written)
    found = codec.loads(["a", "b"], written)
    assert [record[0] for record in found] == [1, 2]
    assert found[0][2] is None
    assert alike([tiles_of(record[1]) for record in found]) == alike([one, one])
    assert alike(tiles_of(found[1][2])) == alike(other)


@pytest.mark.parametrize("form", FORMS)
def test_a_field_that_was_added_later_is_null_in_older_tiles(form):
    old = RecordCodec(serializer(form), "s", "opaque", TWO[:1], [(0, 1)], in_tiles=True)
    new = RecordCodec(serializer(form), "s", "opaque", TWO, [(0, 1), (5, 2)], in_tiles=True)
    before, after = Tiles([1, 4], [[0.5, -0.0]]), Tiles([BASE, 4], [[0.5, 2.0]])
    [(_, curr, prev)] = new.loads(["k"], old.dumps([(4, after, before)]))
    assert alike(tiles_of(curr)) == alike(Tiles([BASE, 4], [[0.5, 2.0], [None, None]]))
    assert alike(tiles_of(prev)) == alike(Tiles([1, 4], [[0.5, -0.0], [None, None]]))
    wide = Tiles([1], [[0.5], [3]])
    assert alike(tiles_of(new.loads(["k"], new.dumps([(5, wide, None)]))[0][1])) == alike(wide)


@pytest.mark.parametrize("form", ["json", "msgpack"])
def test_a_record_that_is_none_is_corrupt(form):
    at_work = serializer(form)
    codec = RecordCodec(at_work, "s", "opaque", TWO, [(0, 2)], in_tiles=True)
    for wrong in (
        [1, [False, [1, 2], [0.5], [1, 2]], None],
        [1, [False, [1], [0.5], [1]], [[], False, [1, 1], [0.5], [1, 1]]],
        [1, [False, ["1"], [0.5], [1]], None],
        [1, [False, [1], [0.5]], None],
        [1, 3, None],
    ):
        with pytest.raises(CorruptRecordError, match="key 'k'"):
            codec.loads(["k"], at_work.encode_all([wrong]))


@pytest.mark.parametrize(
    "wrong",
    [
        [None, b"\0" * 8 + b"b\x01\x02", [0.5, 0.5], b"b\x01"],
        [None, b"\0" * 8 + b"b\x01\x02", [0.5], b"b\x01\x02"],
        [None, b"\0" * 8 + b"h\x01", [0.5], b"b\x01"],
        [None, b"\0" * 8 + b"x\x01", [0.5], b"b\x01"],
        [None, b"\0" * 8, [], b"b"],
        [None, b"\0" * 8 + b"b", [], b""],
        [None, [1], [0.5], b"b\x01"],
        [False, [1], [0.5], b"b"],
        [False, b"\0" * 8 + b"b\x01", [0.5] * 10, [1] * 10],
        [[0.5], b"\0" * 8 + b"b", [], b"b"],
    ],
)
@pytest.mark.parametrize("is_undo", [False, True])
def test_packed_columns_that_do_not_fit_are_corrupt(wrong, is_undo):
    at_work = serializer("msgpack")
    codec = RecordCodec(at_work, "s", "opaque", TWO, [(0, 2)], in_tiles=True)
    right = [[0.5, 3], b"\0" * 8 + b"b\x01", [0.5], b"b\x01"]
    [(_, curr, prev)] = codec.loads(["k"], at_work.encode_all([[1, right, [[None], *right]]]))
    assert tiles_of(curr) == tiles_of(prev) == Tiles([BASE, 1], [[0.5, 0.5], [3, 1]])
    with pytest.raises(CorruptRecordError, match="key 'k'"):
        codec.loads(["k"], at_work.encode_all([[1, right, [[], *wrong]] if is_undo else [1, wrong, None]]))


# Written once, read in each run: tests/data/rolling

GOLDEN_FIELDS = [
    Field("rows", "Count", "bigint"),
    Field("spend", "Sum(amount)", "decimal(38,2)"),
    Field("mean", "Avg(x)", "struct<sum:double,count:bigint>"),
    Field("first", "Min(at)", "timestamp"),
    Field("raw", "Max(raw)", "binary"),
    Field("newest", "LastN(2, name by at)", "struct<by:array<timestamp>,value:array<string>>"),
]
NOON = dt.datetime(2026, 11, 28, 12, tzinfo=dt.UTC)


def _row(at: int) -> list[Any]:
    if at == 3:
        return [None] * 6
    mean = (math.nan if at == 1 else -0.0, at)
    times = [NOON, NOON - dt.timedelta(microseconds=1)]
    return [at + 1, Decimal(f"-{at}.50"), mean, NOON, bytes([at, 255]), (times, ["ann", None])]


def _golden(*starts: int, but: int = 0) -> Tiles:
    rows = [_row(at + but) for at in range(len(starts))]
    return Tiles(list(starts), [[row[column] for row in rows] for column in range(6)])


GOLDEN: dict[str, tuple[int, Tiles, Tiles | None]] = {
    "a new key": (1000, _golden(5_907_612), None),
    "no tile": (1001, _golden(), _golden(7)),
    "before 1970, and nothing changed": (1002, _golden(-5, -1, 0, 3), _golden(-5, -1, 0, 3)),
    "a base tile that stays": (1003, _golden(BASE, 24, 25, 1 << 40), _golden(BASE, 24, 25)),
    "folded into a new base tile": (1004, _golden(BASE, 24), _golden(1, 2, 12, 24, but=1)),
}


@pytest.mark.parametrize(("form", "kept"), [*((form, form) for form in FORMS), ("msgpack", "msgpack-lists")])
def test_records_that_were_written_before_are_read(form, kept):
    codec = RecordCodec(serializer(form), "s", "opaque", GOLDEN_FIELDS, [(0, 6)], in_tiles=True)
    stored = json.loads((DATA / f"{kept}.json").read_text())
    assert list(stored) == list(GOLDEN)
    for name, (txid, after, before) in GOLDEN.items():
        data = _of_text(stored[name]) if form == "native" else bytes.fromhex(stored[name])
        [(found, curr, prev)] = codec.loads(["k"], [data])
        assert (found, alike(tiles_of(curr)), alike(tiles_of(prev))) == (txid, alike(after), alike(before)), name
        [written] = codec.dumps([(txid, after, before)])
        assert (alike(written) == alike(data)) == (kept == form), f"{name}: other versions read these records too"


def _of_text(value: Any) -> Any:
    """Bytes of a native record, which JSON has none of."""
    if isinstance(value, dict):
        return float(value["float"]) if "float" in value else bytes.fromhex(value["bytes"])
    return [_of_text(one) for one in value] if isinstance(value, list) else value


# What a batch can come to


def test_a_batch_of_too_many_tiles_counts_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(of_tiles, "MOST_STORED", 20)
    job = Rolled(f"memory://{tmp_path.name}", [(10, 1), (40, 5)], lag=30)
    job.batch(*(Row(at, "ann") for at in range(20)))
    with pytest.raises(ValueOverflowError, match="a key has rows in 21 tiles, and at most 20 fit"):
        job.attempt(Row(21, "ann"), Row(3, "bob"))
    with pytest.raises(ValueOverflowError, match="in 25 tiles"):
        job.attempt(*(Row(at, "eve") for at in range(100, 125)))
    with open_reader(job.backend, "s") as reader:
        assert (reader.get("ann"), reader.get("bob")) == (job.right("ann"), None)
    job.batch(Row(100, "bob"))
    job.batch(Row(90, "ann"))  # its tiles are folded first
    with open_reader(job.backend, "s") as reader:
        assert (reader.get("ann"), reader.get("bob")) == (job.right("ann"), job.right("bob"))


def test_tiles_that_cannot_be_joined_say_so_where_they_are_too_many(tmp_path, monkeypatch):
    large = 1 << 62
    job = Rolled(f"memory://{tmp_path.name}", [(10, 1), (40, 20), LIFETIME])
    job.batch(*(Row(at, "ann", large) for at in range(4)))
    job.batch(Row(200, "bob"))
    job.batch(Row(201, "bob"))
    monkeypatch.setattr(of_tiles, "MOST_STORED", 4)
    with pytest.raises(ValueOverflowError, match=r"Old tiles cannot be joined: Sum\(n\) left its range"):
        job.attempt(Row(202, "ann"))


def test_a_fold_that_overflows_is_put_off_and_only_the_read_that_joins_it_raises(tmp_path):
    large = 1 << 62
    job = Rolled(f"memory://{tmp_path.name}", [(10, 1), (40, 20), LIFETIME])
    job.batch(Row(1, "ann", large), Row(2, "ann", large), Row(3, "bob", 7))
    job.batch(Row(200, "ann", 5), Row(200, "bob", 8))
    job.batch(Row(201, "ann", 6))  # its watermark folds all that is older
    job.batch(Row(202, "ann", 7))
    fine = ["total_10", "total_40", "rows_lifetime", "newest_lifetime", "least_lifetime"]
    with open_reader(job.backend, "s") as reader:
        assert reader.get("bob") == job.right("bob")
        right = job.right("ann")
        assert right["total_lifetime"] > 1 << 63
        assert reader.get("ann", columns=fine) == {name: right[name] for name in fine}
        for call in (
            lambda: reader.multi_get(["bob", "ann"]),
            lambda: reader.get("ann", columns=["total_lifetime"]),
            lambda: list(reader.scan()),
        ):
            with pytest.raises(ValueOverflowError, match="key 'ann': a window's value left its range") as caught:
                call()
            assert caught.value.facts["key"] == "ann"
        assert {key: value["rows_lifetime"] for key, value in reader.scan(columns=["rows_lifetime"])} == {
            ("ann",): 5,
            ("bob",): 2,
        }
    job.batch(Row(2, "ann", -large), Row(203, "ann"))  # a late row makes it fit again
    with open_reader(job.backend, "s") as reader:
        assert reader.get("ann") == job.right("ann")


class InPlace(CombinerAggregator):
    """A user's own, which changes its arguments, though it must not."""

    def init(self, row: Any) -> Any:
        return [row["n"]]

    def combine(self, a: Any, b: Any) -> Any:
        a += b
        a.sort()
        b.clear()
        return a


def test_an_aggregator_that_changes_its_arguments_changes_no_record(tmp_path):
    own = {"names": InPlace(), "rows": Count()}
    job = Rolled(f"memory://{tmp_path.name}", [(10, 1), (40, 20), LIFETIME], aggregates=own)
    job.batch(*(Row(at, "ann", at) for at in (1, 2, 2, 3, 25)))
    with open_reader(job.backend, "s", aggregators={"names": InPlace()}) as reader:

        def check() -> None:
            for _ in range(2):
                for at in range(job.record.rolling.horizon, 130, 7):
                    if at < job.record.rolling.horizon or at < 0:
                        continue
                    found = reader.get("ann", at=at)
                    for name, length, step in (("10", 10, 1), ("40", 40, 20), ("lifetime", 0, 0)):
                        low = floor(at - length, step) if length else -(10**9)
                        numbers = sorted(row.n for row in job.rows if low <= row.at < at)
                        assert (found[f"names_{name}"] or []) == numbers
                        assert found[f"rows_{name}"] == len(numbers)

        job.attempt(Row(30, "ann", 300), Row(2, "ann", 9))
        check()
        job.batch(Row(31, "ann", 30), Row(3, "ann", 4))
        check()
        job.attempt(Row(90, "ann", 300))
        check()
        job.batch(Row(90, "ann", 90), Row(1, "ann", 6))
        job.batch(Row(91, "ann", 91))
        check()


def test_a_field_and_a_window_are_a_column_and_names_that_collide_are_refused():
    windows = defined((10, 1), (40, 5), LIFETIME, kind="bigint").windows
    names = [name for name, _, _ in columns_of(["n", "n_10"], windows)]
    assert names == ["n_10", "n_40", "n_lifetime", "n_10_10", "n_10_40", "n_10_lifetime"]
    check_unique(names)
    with pytest.raises(DuplicateNameError):
        check_unique(["n_10", *(name for name, _, _ in columns_of(["n"], windows))])


def test_many_records_of_before_a_field_was_added_are_read_as_a_few_are():
    count, total = Field("n", "Count()", "bigint"), Field("m", "Sum(x)", "bigint")
    form, window = serializer("msgpack"), RollingWindow("w", 5, 1)
    old = RecordCodec(form, "s", "opaque", (count,), ((10, 1),), in_tiles=True)
    new = RecordCodec(form, "s", "opaque", (count, total), ((10, 1), (50, 2)), in_tiles=True)
    written = (20, Tiles([1, 2, 3], [[1, 3, 4]]), Tiles([1, 2], [[1, 2]]))
    records = new.loads(["k"] * 20, old.dumps([written] * 20))
    answers = Answers(joins_of([count, total], {}), RollingDefinition(windows=(window,), type="bigint", unit=1))
    for at in (1, 2):  # the value after the batch, and before it
        values = [record[at] for record in records]
        one = answers.values(values[:1], [(5, 5)])
        assert answers.values(values, [(5, 5)] * 20) == one * 20
        assert one == [(8 if at == 1 else 3, None)]
