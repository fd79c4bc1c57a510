"""A seed of a state whose rows have times: it is what batches of the same rows would be."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from cases import full
from clicks import CONFIGS, USERS, WINDOWS, Clicks, Names
from every_store import AEROSPIKE, FULL, REDIS, url_of
from rolled import Row
from spark_fixtures import AVAILABLE

from mapstate import LIFETIME, errors, open_reader
from mapstate.backends import resolve
from mapstate.testing import Fail, FaultyBackend

pytestmark = pytest.mark.spark


@pytest.fixture(params=[*FULL[:2], REDIS, FULL[2], AEROSPIKE])
def each_url(request: Any, tmp_path: Path) -> str:
    return url_of(request, tmp_path)


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/state.db"


@pytest.fixture
def clicks(tmp_path: Path) -> Clicks:
    return Clicks(tmp_path)


@pytest.mark.parametrize(
    ("windows", "own"),
    [full(WINDOWS, {}), full(WINDOWS[:3], {}), (WINDOWS, {"names": Names()}), full(WINDOWS[1:3], {})],
)
def test_a_seed_of_rolling_windows_is_what_batches_would_be(spark, clicks, url, windows, own):
    draw = random.Random(repr(windows))
    clicks.history(draw)
    counts = clicks.declared(spark, url, windows, **own)
    done = counts.seed(clicks.checkpoint, buckets=4)
    gone = clicks.check(url, windows, own=bool(own))
    assert bool(gone) == (LIFETIME not in windows)
    assert (done.rows, done.rows_expired, done.rows_late) == (len(clicks.rows) - gone, gone, 2)
    for end in (2_030, 2_031, 2_500):
        clicks.put([Row(draw.randint(end - 150, end), draw.choice(USERS), 5) for _ in range(30)] + [Row(end, "x", 1)])
        again = clicks.declared(spark, url, windows, **own)
        again.start(clicks.checkpoint, trigger=AVAILABLE).awaitTermination()
        if LIFETIME in windows:  # else rows that come late are set aside
            clicks.check(url, windows, own=bool(own))


def test_a_seed_of_rolling_windows_is_the_same_in_every_store(spark, clicks, each_url):
    clicks.history(random.Random(each_url.partition(":")[0]))
    clicks.declared(spark, each_url).seed(clicks.checkpoint, buckets=3)
    clicks.check(each_url)


def failed(spark: Any, clicks: Clicks, url: str, folder: Path, *, call: int, after: bool) -> Any:
    """A seed whose driver dies at this write of the ledger; the ledger that it leaves."""
    fault = Fail(method="swap", call=call, after=after, error=errors.CorruptStoreError, name=f"{call}{after}")
    counts = clicks.declared(spark, FaultyBackend(resolve(url), folder, (fault,)), WINDOWS[:3])
    with pytest.raises(errors.CorruptStoreError):
        counts.seed(clicks.checkpoint, buckets=5)
    with open_reader(url, "features") as reader:
        with pytest.raises(errors.SeedingError, match="being"):
            reader.multi_get(["x"], at=2_000)
        return reader.ledger()


@pytest.mark.parametrize("after", [full(False), True])
def test_a_seed_of_rolling_windows_that_died_goes_on_with_the_same_horizon(spark, clicks, url, tmp_path, after, rounds):
    clicks.history(random.Random(3))
    staged = None
    for call in rounds((2, 5), (2, 3, 4, 5)):
        seed = failed(spark, clicks, url, tmp_path, call=call, after=after).seed
        staged = staged or seed.windows
        assert seed.windows == staged
    assert seed.done >= 2
    assert staged.watermark == 1_997
    clicks.declared(spark, url, WINDOWS[:3]).seed(clicks.checkpoint)
    assert clicks.check(url, WINDOWS[:3])


def test_a_lost_stage_is_made_anew_with_all_of_its_units(spark, clicks, url, tmp_path):
    """Rows of the lost one were joined by its horizon, and those of the new one are by its own."""
    clicks.history(random.Random(4))
    left = failed(spark, clicks, url, tmp_path, call=5, after=False)
    assert left.seed.done == 1
    for file in next(Path(clicks.checkpoint, "mapstate").iterdir()).glob("*.parquet"):
        file.unlink()
    done = clicks.declared(spark, url, WINDOWS[:3]).seed(clicks.checkpoint, buckets=2)
    assert clicks.check(url, WINDOWS[:3]) == done.rows_expired


@pytest.mark.full
def test_windows_that_are_changed_begin_the_seed_anew(spark, clicks, url, tmp_path):
    clicks.history(random.Random(5))
    left = failed(spark, clicks, url, tmp_path, call=5, after=False)
    more = {"options": {"retention": 50}}
    clicks.declared(spark, url, WINDOWS[:3], **more).seed(clicks.checkpoint, buckets=2)
    assert clicks.check(url, WINDOWS[:3])
    with open_reader(url, "features") as reader:
        ledger = reader.ledger()
        assert ledger.floor > left.last_txid
        assert ledger.rolling.definition.time(ledger.rolling.horizon) == 1_997 - 50


@pytest.mark.full
def test_years_of_a_busy_key_are_a_few_tiles(spark, clicks, url):
    """More units than a key has room for: 10,000. A task gets them in more than one part."""
    clicks.put([Row(at, user, at % 7) for at in range(12_000) for user in "xy"])
    clicks.declared(spark, url).seed(clicks.checkpoint, buckets=1)
    clicks.check(url)
    store: Any = resolve(url).open("features")
    assert all(len(record) < 2_000 for record in store.multi_get(["x", "y"]))


@pytest.mark.full
def test_one_may_look_into_a_seed_of_rolling_windows(spark, clicks, url, tmp_path):
    clicks.history(random.Random(7))
    failed(spark, clicks, url, tmp_path, call=9, after=True)
    with open_reader(url, "features", consistency="latest") as reader:
        found = reader.multi_get(list(USERS), at=1_999)
        assert 0 < sum(one is not None for one in found) < len(USERS)


def test_a_dry_run_of_rolling_windows_says_what_is_left_out(spark, clicks, url):
    clicks.history(random.Random(6))
    found = clicks.declared(spark, url, WINDOWS[:3]).seed(clicks.checkpoint, dry_run=True)
    assert found.rows + found.rows_expired == len(clicks.rows)
    assert (found.keys, found.buckets, found.rows_late) == (None, 1, 2)
    assert f"{found.rows_expired:,} rows expired" in str(found)
    with pytest.raises(errors.StateNotFoundError):
        open_reader(url, "features")


# Windows that fire


def pair(folder: Path, draw: random.Random) -> tuple[Clicks, Clicks]:
    """The same history for a seed and, in the order of time, for batches."""
    rows = [Row(draw.randint(0, 300), draw.choice(USERS), draw.randint(-9, 9)) for _ in range(250)]
    rows += [Row(300, "x", 3), Row(None, "v", 1), *(Row(at, "old", at) for at in range(9))]
    seeded, batched = (Clicks(folder / name) for name in ("seeded", "batched"))
    for at in range(3):
        batched.put([row for row in rows if (row.at or 0) * 3 // 301 == at])
    draw.shuffle(rows)
    for at in range(3):
        seeded.put(rows[at::3])
    return seeded, batched


def run(clicks: Clicks, spark: Any, url: str, kind: str, name: str, **own: Any) -> list[Any]:
    """Counts what is due; the windows that are fired."""
    fired: list[Any] = []
    counts = clicks.windowed(spark, url, kind, name, **own)
    job = counts.firedWindowsStream().foreachBatch(lambda df, _: fired.extend(map(tuple, df.collect())))
    job.start(clicks.checkpoint, trigger=AVAILABLE).awaitTermination()
    return sorted(fired)


def windows_of(url: str, name: str, purged: Any, *, own: bool) -> Any:
    with open_reader(url, name, aggregators={"names": Names()} if own else {}) as reader:
        return {user: [one for one in reader.windows(user) if one.end > purged] for user in [*USERS, "old"]}


@pytest.mark.parametrize(
    ("kind", "own"),
    [
        *((kind, {}) if kind == "sliding" else full(kind, {}) for kind in CONFIGS),
        *(full("tumbling", {"names": Names()}), ("sessions", {"names": Names()})),
    ],
)
def test_a_seed_of_windows_is_what_batches_in_order_would_be(spark, tmp_path, url, kind, own):
    draw = random.Random(kind)
    seeded, batched = pair(tmp_path, draw)
    done = seeded.windowed(spark, url, kind, "seeded", **own).seed(seeded.checkpoint, buckets=4)
    assert done.rows + done.rows_expired == len(seeded.rows)
    assert done.rows_late == 1
    assert done.rows_expired > 0
    assert run(batched, spark, url, kind, "batched", **own)
    with open_reader(url, "seeded") as reader:
        purged, watermark = reader.ledger().windows.purged, reader.watermark().time
        assert watermark == 295 - (kind == "sessions")
    before = windows_of(url, "seeded", purged, own=bool(own))
    assert before == windows_of(url, "batched", purged, own=bool(own))
    assert any(one.final for one in before["x"])
    for end in (306, 340, 2_000, 2_001):
        more = [Row(end - draw.randint(0, 8), draw.choice(USERS), 5) for _ in range(20)] + [Row(end, "x", 1)]
        seeded.put(more)
        batched.put(more)
    fired = run(seeded, spark, url, kind, "seeded", **own)
    assert fired == run(batched, spark, url, kind, "batched", **own)
    assert len(fired) > 10
    assert windows_of(url, "seeded", -1, own=bool(own)) == windows_of(url, "batched", -1, own=bool(own))
    stores: list[Any] = [resolve(url).open(name) for name in ("seeded", "batched")]
    keys = [sorted(str(key) for page in store.scan(100) for key in page) for store in stores]
    plain = [[key for key in found if "\\P" not in key] for found in keys]
    assert plain[0] == plain[1]  # nothing of before is left


@pytest.mark.parametrize("kind", ["sliding", "sessions", "blocks"])
def test_a_seed_of_windows_is_the_same_in_every_store(spark, clicks, each_url, kind):
    clicks.history(random.Random(8))
    done = clicks.windowed(spark, each_url, kind).seed(clicks.checkpoint, buckets=3)
    assert clicks.check_fired(each_url, kind) == done.rows_expired > 0
    with open_reader(each_url, "windows") as reader:
        assert (reader.key_count(), reader.ledger().last_commit.keys_held) == (None, None)
        assert reader.watermark().time == 1_995 - (kind == "sessions")


@pytest.mark.parametrize("kind", [full("sliding"), "sessions", "blocks"])
def test_a_seed_of_windows_that_died_goes_on(spark, clicks, url, tmp_path, kind, rounds):
    clicks.history(random.Random(9))
    for call in rounds((2, 5), (2, 3, 4, 5)):
        fault = Fail(method="swap", call=call, after=call % 2 > 0, error=errors.CorruptStoreError, name=f"{call}")
        counts = clicks.windowed(spark, FaultyBackend(resolve(url), str(tmp_path), (fault,)), kind)
        with pytest.raises(errors.CorruptStoreError):
            counts.seed(clicks.checkpoint, buckets=6)
        with open_reader(url, "windows") as reader, pytest.raises(errors.SeedingError):
            reader.windows("x")
    for file in next(Path(clicks.checkpoint, "mapstate").iterdir()).glob("*.parquet"):
        file.unlink()
    done = clicks.windowed(spark, url, kind).seed(clicks.checkpoint, buckets=2)
    assert clicks.check_fired(url, kind) == done.rows_expired
    with open_reader(url, "windows") as reader:
        windows = reader.ledger().windows
        assert windows.removed == windows.purged  # what was left out does not come back


@pytest.mark.parametrize("buckets", [full(1), 5])
@pytest.mark.parametrize("own", [full({}), {"names": Names()}])
def test_sessions_at_both_ends_of_a_history(spark, tmp_path, url, buckets, own):
    """The watermark is 294, and sessions that end at 252 or before are gone."""
    seeded, batched = Clicks(tmp_path / "seeded"), Clicks(tmp_path / "batched")
    lasts = {"whole": 300, "gone": 245, "late": 246, "open": 300}
    history = [Row(at, user, 1) for user, last in lasts.items() for at in range(last % 7, last + 1, 7)]
    history += [Row(None, "late", 1), Row(300, "next", 1)]
    for at in range(3):
        batched.put([row for row in history if (row.at or 0) // 101 == at])
        seeded.put(random.Random(at).sample(history[at::3], len(history[at::3])))
    done = seeded.windowed(spark, url, "sessions", "seeded", **own).seed(seeded.checkpoint, buckets=buckets)
    assert (done.rows_expired, done.rows_late) == (36, 1)
    assert seeded.check_fired(url, "sessions", "seeded", **own) == 36
    with open_reader(url, "seeded", aggregators=own) as reader:
        assert reader.windows("gone") == []
        assert [(one.start, one.end, one.final) for one in reader.windows("late")] == [(1, 253, True)]
        assert [(one.start, one.end, one.final) for one in reader.windows("whole")] == [(6, 307, False)]
    for name in ("0", ".0.crc"):
        Path(seeded.checkpoint, "commits", name).unlink()  # batch 0 comes again
    more = [[Row(307, "whole", 1), Row(308, "next", 1), Row(295, "new", 1)], [Row(400, "far", 1)], [Row(401, "far", 1)]]
    for rows in more:
        seeded.put(rows)
        batched.put(rows)
    fired = run(seeded, spark, url, "sessions", "seeded", **own)
    assert [one[:4] for one in fired] == [
        *((6, 307, "open", 43), (6, 314, "whole", 44), (295, 302, "new", 1)),
        *((300, 307, "next", 1), (308, 315, "next", 1)),
    ]
    after = [one for one in run(batched, spark, url, "sessions", "batched", **own) if one[1] > 294]
    assert fired == after
