"""A seed of several states of one stream: all have rows of one reading, and those of one store appear at once."""

from __future__ import annotations

import datetime as dt
import json
import random
import shutil
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from cases import full
from chain import put_file
from clicks import FIRING, USERS, Clicks, Names
from every_store import FULL, REDIS, url_of
from pyspark.errors import StreamingQueryException
from pyspark.sql import functions as F
from rolled import Row
from spark_fixtures import AVAILABLE

from mapstate import (
    LIFETIME,
    Count,
    RollingWindows,
    SessionWindow,
    Sum,
    Topology,
    errors,
    opaque,
    open_reader,
)
from mapstate.backends import resolve
from mapstate.operations.drop import drop
from mapstate.spark.driver.event_time import TimedState
from mapstate.testing import Fail, FaultyBackend

pytestmark = pytest.mark.spark

DIED = errors.CorruptStoreError
NAMES = ("users", "names", "sessions", "late")


@pytest.fixture(params=[FULL[0], REDIS, FULL[2]])
def each_url(request: Any, tmp_path: Path) -> str:
    return url_of(request, tmp_path)


@pytest.fixture
def clicks(tmp_path: Path) -> Clicks:
    found = Clicks(tmp_path)
    found.history(random.Random(1))
    return found


def rows_of(spark: Any, clicks: Clicks) -> Any:
    return spark.readStream.schema("at bigint, user string, n bigint").csv(str(clicks.input))


def site(
    spark: Any,
    clicks: Clicks,
    url: Any,
    reports: list[Any] | None = None,
    topology: Topology | None = None,
    **backends: Any,
) -> dict[str, Any]:
    """States that are staged as partials, as rows and as pieces, and one of the rows that another one leaves out."""
    topology = topology or Topology("site")
    topology.on_finished((reports if reports is not None else []).append)
    stream = topology.newStream("clicks", rows_of(spark, clicks))

    def spec(name: str) -> Any:
        return opaque(backends.get(name, url), name, max_attempts=1)

    positive = stream.transform(lambda df: df.where("n > 0"))
    sessions = stream.window(SessionWindow.of(7), timestampField="at", **FIRING)
    kept: dict[str, Any] = {
        "users": stream.groupBy("user").persistentAggregate(spec("users"), rows=Count(), total=Sum("n")),
        "names": positive.persistentAggregate(spec("names"), names=Names()),
        "sessions": sessions.groupBy("user").persistentAggregate(spec("sessions"), rows=Count(), total=Sum("n")),
    }
    kept["late"] = kept["sessions"].lateStream().groupBy("user").persistentAggregate(spec("late"), rows=Count())
    return kept


def shown(url: Any, name: str) -> Any:
    """What a reader sees of a state; of windows those that are not gone."""
    with open_reader(url, name, aggregators={"names": Names()} if name == "names" else {}) as reader:
        return {user: reader.windows(user) for user in USERS} if name == "sessions" else dict(reader.scan())


@pytest.mark.parametrize(
    "deaths", [full(()), (("sessions", 4), ("late", 3), ("late", 2))], ids=["at once", "with deaths"]
)
def test_all_states_of_a_stream_are_seeded_as_one_batch_would_count_them(spark, clicks, tmp_path, deaths):
    finished: list[Any] = []
    urls = [f"sqlite:///{tmp_path}/{name}.db" for name in ("seeded", "twin")]
    for name, call in deaths:  # within the buckets of a state; then in front of the end of the last one
        fault = Fail(method="swap", call=call, error=errors.CorruptStoreError, name=f"{name}-{call}")
        own = {name: FaultyBackend(resolve(urls[0]), clicks.input.parent, (fault,))}
        with pytest.raises(errors.CorruptStoreError):
            site(spark, clicks, urls[0], **own)["names"].seed(clicks.checkpoint, buckets=2)
    done = site(spark, clicks, urls[0], finished)["names"].seed(clicks.checkpoint, buckets=2)
    assert [done.state, *(one.state for one in done.beside)] == ["names", *(one for one in NAMES if one != "names")]
    assert str(done).count("\n") == len(NAMES) - 1
    assert [sorted(one.states) for one in finished] == [sorted(NAMES)]
    assert not Path(clicks.checkpoint, "mapstate").exists()
    twin = Clicks(tmp_path / "twin")
    twin.put(clicks.rows)
    site(spark, twin, urls[1])["users"].start(twin.checkpoint, trigger={"once": True}).awaitTermination()
    for own, url in zip((clicks, twin), urls, strict=True):
        own.put([Row(2_003, user, 4) for user in USERS])
        site(spark, own, url)["users"].start(own.checkpoint, trigger={"once": True}).awaitTermination()
    for name in NAMES:
        found = shown(urls[0], name)
        assert found, name
        assert found == shown(urls[1], name), name


def test_a_row_too_far_beyond_the_clock_is_late_and_counts_nowhere_else(spark, clicks, tmp_path, monkeypatch):
    """The clock goes on while stages are written."""
    read, reads = TimedState._read_clock, list[int]()

    def read_later(state: TimedState, record: Any) -> None:
        read(state, record)
        state.near += len(reads) * 60_000_000
        reads.append(1)

    monkeypatch.setattr(TimedState, "_read_clock", read_later)
    now, shape = dt.datetime.now(dt.UTC), "%Y-%m-%dT%H:%M:%S+00:00"
    times = [now - dt.timedelta(minutes=5), now + dt.timedelta(hours=1, seconds=30)]
    put_file(tmp_path / "input", 9, [f"{time.strftime(shape)},u" for time in times])
    rows = spark.readStream.schema("at timestamp, user string").option("pathGlobFilter", "*9.csv")
    stream = Topology("site").newStream("clicks", rows.csv(str(clicks.input)))
    rolling = stream.window(RollingWindows.of("1 hour", LIFETIME), timestampField="at", ahead="1 hour")
    url = f"sqlite:///{tmp_path}/state.db"
    counts = rolling.groupBy("user").persistentAggregate(opaque(url, "users"), rows=Count())
    counts.lateStream().persistentAggregate(opaque(url, "late"), rows=Count())
    done = counts.seed(clicks.checkpoint)
    assert (done.rows, done.rows_late, [one.rows for one in done.beside]) == (2, 1, [1])


def test_states_are_seeded_together_in_every_store(spark, clicks, each_url):
    done = plain(spark, clicks, each_url, each_url)["total"].seed(clicks.checkpoint, buckets=2)
    assert visible([each_url, each_url]) == {"users": done.rows, "total": done.rows}
    assert 150 < done.rows < 400


def plain(
    spark: Any, clicks: Clicks, first: Any, second: Any, *, more: Any = None, policy: Any = "refuse", **options: Any
) -> dict[str, Any]:
    """Two states, in one store or in two, behind a transform that gives other rows each time."""
    stream = Topology("site").newStream("clicks", rows_of(spark, clicks)).transform(lambda df: df.where(F.rand() < 0.5))
    own: Any = {"max_attempts": 1, "on_new_owner": policy, **options}
    kept: dict[str, Any] = {
        "users": stream.groupBy("user").persistentAggregate(opaque(first, "users", **own), rows=Count()),
        "total": stream.persistentAggregate(opaque(second, "total", **own), rows=Count()),
    }
    return kept if more is None else kept | {"more": stream.persistentAggregate(more, rows=Count())}


def visible(urls: Sequence[str]) -> dict[str, int]:
    """How many rows can be read, by state."""
    found = {}
    for url, name in zip(urls, ("users", "total"), strict=True):
        try:
            with open_reader(url, name) as reader:
                found[name] = sum(value["rows"] for _, value in reader.scan())
        except (errors.SeedingError, errors.StateNotFoundError):
            continue
    return found


def ledgers(urls: Sequence[str]) -> list[Any]:
    found = []
    for url, name in zip(urls, ("users", "total"), strict=True):
        with open_reader(url, name) as reader:
            found.append(reader.ledger())
    return found


DEATHS: dict[str, list[tuple[int, str, int, bool]]] = {
    "one": [  # of which state the call is, the call, its number in this driver, and whether it had been done
        *((0, "swap_all", 1, after) for after in (False, True)),  # both are taken
        *((at, "swap", 1, after) for at in (0, 1) for after in (False, True)),  # the stages: others after the first one
        *((0, "swap", 2, True), (1, "swap", 2, False)),  # buckets
        *((0, "swap_all", 2, after) for after in (False, True)),  # the end
    ],
    "two": [
        *((at, "swap", 1, after) for at in (0, 1) for after in (False, True)),
        *((at, "swap", 2, after) for at in (0, 1) for after in (False, True)),
        *((0, "swap", 3, True), (1, "swap", 3, False)),
        *((0, "swap", 2, after) for after in (False, True)),
    ],
}


def dies(spark: Any, clicks: Clicks, urls: Sequence[str], death: tuple[int, str, int, bool]) -> None:
    at, method, call, after = death
    for state in (0, 1):
        (clicks.input.parent / f"{state}").mkdir(exist_ok=True)
    fault = Fail(method=method, call=call, after=after, error=errors.CorruptStoreError, name=str(death))
    backends: list[Any] = [
        FaultyBackend(resolve(url), clicks.input.parent / f"{state}", (fault,) if state == at else ())
        for state, url in enumerate(urls)
    ]
    with pytest.raises(errors.CorruptStoreError):
        plain(spark, clicks, *backends)["users"].seed(clicks.checkpoint, buckets=2)


def of(tmp_path: Path, store: str) -> list[str]:
    return [f"sqlite:///{tmp_path}/{name}.db" for name in ("aa" if store == "one" else "ab")]


@pytest.mark.parametrize("store", [full("one"), "two"])
def test_a_seed_of_two_states_that_died_goes_on_with_rows_of_one_reading(spark, clicks, tmp_path, store):
    urls, seen = of(tmp_path, store), list[dict[str, int]]()
    for at, death in enumerate(DEATHS[store]):
        dies(spark, clicks, urls, death)
        seen.append(visible(urls))
        (tmp_path / str(death[0]) / str(death)).rename(tmp_path / f"{at}-done")  # so that it may come again
    assert not any(seen[:-1])
    assert [*seen[-1]] == (["users", "total"] if store == "one" else ["users"])
    rows = seen[-1]["users"]
    shutil.rmtree(Path(clicks.checkpoint, "mapstate"))  # all is loaded
    if store == "two":
        query = plain(spark, clicks, *urls)["users"].start(clicks.checkpoint, trigger=AVAILABLE)
        with pytest.raises(StreamingQueryException, match="'total' is being seeded.*call seed again"):
            query.awaitTermination()
    clicks.put([Row(2_001, "x", 1)])
    done = plain(spark, clicks, *urls)["total"].seed(clicks.checkpoint, buckets=2)
    assert (done.rows, done.beside[0].rows) == (rows, rows)
    assert visible(urls) == {"users": rows, "total": rows}
    assert 150 < rows < 400
    plain(spark, clicks, *urls)["users"].start(clicks.checkpoint, trigger=AVAILABLE).awaitTermination()
    for url, name in zip(urls, ("users", "total"), strict=True):
        with open_reader(url, name) as reader:
            assert reader.ledger().last_commit.batch_id == 1


def test_beside_a_state_that_has_ended_no_other_seed_begins(spark, clicks, tmp_path):
    urls = of(tmp_path, "two")
    dies(spark, clicks, urls, (1, "swap", 5, False))  # the opening, the stage, the only bucket, and the end
    assert [*visible(urls)] == ["users"]
    for url, name in ((urls[0], "third"), (f"sqlite:///{tmp_path}/c.db", "third")):
        kept = plain(spark, clicks, *urls, more=opaque(url, name))
        with pytest.raises(errors.UsageError, match="'users' counts its seed already, and state 'third'"):
            kept["total"].seed(clicks.checkpoint)
        with pytest.raises(errors.StateNotFoundError):
            open_reader(url, name)
    for name in ("0", ".0.crc"):
        Path(clicks.checkpoint, "offsets", name).unlink()
    with pytest.raises(errors.UsageError, match="was batch 0 planned anew"):
        plain(spark, clicks, *urls)["total"].seed(clicks.checkpoint)
    assert [*visible(urls)] == ["users"]
    shutil.rmtree(clicks.checkpoint)
    done = plain(spark, clicks, *urls, policy="reset")["total"].seed(clicks.checkpoint)
    assert visible(urls) == {"users": done.rows, "total": done.rows}


def alone(spark: Any, clicks: Clicks, backend: Any, name: str) -> Any:
    """The job of before, with one of its states."""
    stream = Topology("site").newStream("clicks", rows_of(spark, clicks)).transform(lambda df: df.where(F.rand() < 0.5))
    groups = stream.groupBy("user") if name == "users" else stream
    return groups.persistentAggregate(opaque(backend, name, max_attempts=1), rows=Count())


@pytest.mark.parametrize("store", ["one", "two"])
def test_a_state_that_a_job_left_out_for_a_while_does_not_end_with_another_reading(spark, clicks, tmp_path, store):
    urls = of(tmp_path, store)
    dies(spark, clicks, urls, (1, "swap", 3, False))  # users is loaded, and total is not
    shutil.rmtree(Path(clicks.checkpoint, "mapstate"))
    ends = FaultyBackend(resolve(urls[1]), tmp_path, [Fail(method="swap", call=5, after=True, name="end", error=DIED)])
    with pytest.raises(DIED):
        alone(spark, clicks, ends, "total").seed(clicks.checkpoint)
    seen = visible(urls)
    assert [*seen] == ["total"]
    with pytest.raises(errors.UsageError, match="'total' counts its seed already, and state 'users'.*another reading"):
        plain(spark, clicks, *urls)["users"].seed(clicks.checkpoint)
    assert visible(urls) == seen
    ends = FaultyBackend(resolve(urls[0]), tmp_path, [Fail(method="swap", call=2, after=True, name="last", error=DIED)])
    with pytest.raises(DIED):
        alone(spark, clicks, ends, "users").seed(clicks.checkpoint)
    seen = visible(urls)
    assert [*seen] == ["users", "total"]
    both = plain(spark, clicks, *urls)["users"]
    with pytest.raises(errors.UsageError, match="another reading"):
        both.seed(clicks.checkpoint)
    with pytest.raises(StreamingQueryException, match="another reading"):
        both.start(clicks.checkpoint, trigger=AVAILABLE).awaitTermination()
    assert visible(urls) == seen
    assert alone(spark, clicks, urls[0], "users").seed(clicks.checkpoint).rows == seen["users"]
    with pytest.raises(errors.UsageError, match="another reading"):  # also where Spark counts batch 0
        both.seed(clicks.checkpoint)
    clicks.put([Row(2_001, "x", 1)] * 200)
    before = ledgers(urls)
    with pytest.raises(StreamingQueryException, match="'users' counts its seed already.*'total'.*another reading"):
        both.start(clicks.checkpoint, trigger=AVAILABLE).awaitTermination()  # batch 1
    assert ledgers(urls) == before
    drop(urls[1], "total")
    again = plain(spark, clicks, *urls, on_gap="accept")
    again["users"].start(clicks.checkpoint, trigger=AVAILABLE).awaitTermination()
    found = visible(urls)
    assert found["users"] - seen["users"] == found["total"] > 0


@pytest.mark.full
def test_a_state_that_a_job_left_out_while_batch_0_ended_is_refused_with_what_to_do(spark, clicks, tmp_path):
    urls = of(tmp_path, "two")
    dies(spark, clicks, urls, (1, "swap", 5, False))
    stream = Topology("site").newStream("clicks", rows_of(spark, clicks))
    alone = stream.groupBy("user").persistentAggregate(opaque(urls[0], "users"), rows=Count())
    rows = alone.seed(clicks.checkpoint).rows
    with pytest.raises(errors.UsageError, match="'total' is being seeded, 1 of 1 buckets.*Remove it, mapstate drop"):
        plain(spark, clicks, *urls)["users"].seed(clicks.checkpoint)
    drop(urls[1], "total")
    clicks.put([Row(2_001, "x", 1)] * 200)
    again = plain(spark, clicks, *urls, on_gap="accept")
    again["users"].start(clicks.checkpoint, trigger=AVAILABLE).awaitTermination()
    found = visible(urls)
    assert found["users"] - rows == found["total"] > 0


@pytest.mark.full
def test_a_seed_removes_rows_that_batches_set_aside_before_it(spark, clicks, tmp_path):
    """Stores and checkpoint were put back to where nothing was counted; the rows counted, and stayed set aside."""
    url, kept, query_id = f"sqlite:///{tmp_path}/states.db", tmp_path / "kept", str(uuid.uuid4())
    Path(clicks.checkpoint).mkdir()
    Path(clicks.checkpoint, "metadata").write_text(json.dumps({"id": query_id}))
    places = [kept / "site" / "clicks" / f"query_id={query_id}" / f"batch_id={number}" for number in (0, 2)]
    for place in places:
        spark.range(3).write.parquet(str(place))

    def seeded(*, dry_run: bool) -> None:
        topology = Topology("site", on_poison="quarantine", quarantine=str(kept))
        site(spark, clicks, url, topology=topology)["users"].seed(clicks.checkpoint, dry_run=dry_run)

    seeded(dry_run=True)
    assert all(list(place.glob("*.parquet")) for place in places)
    seeded(dry_run=False)
    assert not any(list(place.glob("*.parquet")) for place in places)


def test_a_dry_run_says_how_much_each_state_is(spark, clicks, tmp_path):
    url = f"sqlite:///{tmp_path}/state.db"
    found = site(spark, clicks, url)["users"].seed(clicks.checkpoint, dry_run=True)
    assert found.rows == len(clicks.rows)
    assert all(one.bytes > 100 and one.is_dry_run for one in (found, *found.beside))
    with pytest.raises(errors.StateNotFoundError):
        open_reader(url, "users")


def test_each_state_names_its_version_or_none(spark, clicks, tmp_path):
    kept = plain(spark, clicks, *of(tmp_path, "one"))
    for named in ("before", {"users": "before"}, {"users": "before", "total": None, "more": None}):
        with pytest.raises(errors.ConfigurationError, match="version that each of users, total is built for, or None"):
            kept["users"].seed(clicks.checkpoint, version_of=named)
    assert not Path(clicks.checkpoint).exists()
