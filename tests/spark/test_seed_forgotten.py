"""A version that is seeded beside one that has forgotten keys: their rows stay forgotten, and later ones count."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
from cases import full
from partitioned_log import PartitionedLog
from spark_fixtures import AVAILABLE, DATA_SOURCE, ONE_STORE_OF_BYTES, contents

from mapstate import (
    LIFETIME,
    Count,
    LastN,
    SessionWindow,
    SlidingDurationWindow,
    Sum,
    Topology,
    TumblingDurationWindow,
    errors,
    newStream,
    opaque,
    open_reader,
    transactional,
)
from mapstate.backends import resolve
from mapstate.operations.forget import forget, forget_listed, listed
from mapstate.operations.swap import swap
from mapstate.testing import Fail, FaultyBackend

pytestmark = [pytest.mark.spark, DATA_SOURCE]

PLACES = ("topic", "partition", "offset")


@pytest.fixture
def log(tmp_path: Any) -> PartitionedLog:
    return PartitionedLog(tmp_path)


def declared(
    spark: Any, log: PartitionedLog, url: Any, name: str = "visits.v2", kind: Any = opaque, **aggregates: Any
) -> Any:
    aggregates = aggregates or {"visits": Count(), "bytes": Sum("bytes")}
    rows = newStream("visits", log.stream(spark)).groupBy("user_id")
    return rows.persistentAggregate(kind(url, name, max_attempts=1), **aggregates)


def run(spark: Any, log: PartitionedLog, url: Any, name: str, kind: Any = opaque) -> None:
    place = str(log.folder.parent / name)
    declared(spark, log, url, name, kind).start(place, trigger=AVAILABLE).awaitTermination()


def served(spark: Any, log: PartitionedLog, url: Any, kind: Any = opaque) -> tuple[int, int]:
    """The version that serves has forgotten u1, and gone on; where it was then."""
    log.send(*((f"u{at % 7}", at) for at in range(200)))
    run(spark, log, url, "visits", kind)
    forget(url, "visits", {"user_id": "u1"}, id="ticket-7")
    ends = log.ends()
    log.send(*((f"u{at % 7}", at) for at in range(50)))
    run(spark, log, url, "visits", kind)
    return ends


def checkpoint(log: PartitionedLog) -> str:
    return str(log.folder.parent / "visits.v2")


@pytest.mark.parametrize("each_url", ONE_STORE_OF_BYTES, indirect=True)
@pytest.mark.parametrize("kind", [opaque, full(transactional)])
def test_a_new_version_lacks_what_was_forgotten_and_has_what_came_since(spark, log, each_url, kind):
    ends = served(spark, log, each_url, kind)
    right = log.truth(without="u1", below=ends)
    assert contents(each_url, "visits") == right
    counts = declared(spark, log, each_url, kind=kind)
    settings = {"version_of": "visits", "positions": PLACES}
    lost = sum(row[0] == "u1" for part, end in zip(log.parts, ends, strict=True) for row in part[:end])
    tried = counts.seed(checkpoint(log), dry_run=True, **settings)
    assert (tried.rows, tried.rows_forgotten) == (250 - lost, lost)
    done = counts.seed(checkpoint(log), buckets=3, **settings)
    assert (done.rows, done.rows_forgotten) == (250 - lost, lost)
    assert str(done) == f"visits.v2: {250 - lost} rows, 7 keys, {lost} rows forgotten"
    assert counts.seed(checkpoint(log), **settings) == done
    assert contents(each_url, "visits.v2") == right
    (entry,) = listed(each_url, "visits.v2")
    assert (entry.id, entry.offsets) == ("ticket-7", listed(each_url, "visits")[0].offsets)
    log.send(("u1", 5))
    for name in ("visits", "visits.v2"):
        run(spark, log, each_url, name, kind)
    assert contents(each_url, "visits.v2") == contents(each_url, "visits") == log.truth(without="u1", below=ends)
    assert forget_listed(each_url, "visits.v2", listed(each_url, "visits")) == []
    swap(each_url, {"visits": "visits.v2"})
    assert forget(each_url, "visits.v2", {"user_id": "u1"}, id="ticket-8").keys == 1


def test_rolling_windows_lack_what_was_forgotten_too(spark, log, tmp_path):
    url = f"sqlite:///{tmp_path}/state.db"
    ends = served(spark, log, url)
    rows = newStream("visits", log.stream(spark)).rollingWindows((50, 10), LIFETIME, timestampField="bytes")
    counts = rows.groupBy("user_id").persistentAggregate(opaque(url, "visits.v2"), visits=Count())
    done = counts.seed(checkpoint(log), buckets=3, version_of="visits", positions=PLACES)
    right = log.truth(without="u1", below=ends)
    with open_reader(url, "visits.v2") as reader:
        found = {key: value["visits_lifetime"] for key, value in reader.scan()}
        assert reader.watermark().time == 199
    assert found == {key: value["visits"] for key, value in right.items()}
    assert done.rows_forgotten > 0
    assert done.rows + done.rows_forgotten == 250


WINDOWS: dict[str, Any] = {
    "tumbling": TumblingDurationWindow.of(10),
    "sliding": SlidingDurationWindow.of(25, 10),
    "gaps": SlidingDurationWindow.of(4, 10),
    "sessions": SessionWindow.of(3),
}


@pytest.mark.parametrize("kind", ["tumbling", *(full(kind) for kind in WINDOWS if kind != "tumbling")])
def test_windows_that_fire_lack_what_was_forgotten_too(spark, log, tmp_path, kind):
    """They are those of a history that never had the rows."""
    url = f"sqlite:///{tmp_path}/state.db"
    more = {"last": LastN("bytes", 2, by="offset")} if kind in ("tumbling", "gaps") else {}  # staged as rows

    def windowed(name: str, without: str = "false") -> Any:
        rows = newStream("visits", log.stream(spark).where(f"not ({without})"))
        windows = rows.window(WINDOWS[kind], timestampField="bytes", lag=5, retention=165)
        return windows.groupBy("user_id").persistentAggregate(opaque(url, name, max_attempts=1), visits=Count(), **more)

    def counted(name: str, without: str = "false") -> dict[str, Any]:
        windowed(name, without).start(str(tmp_path / name), trigger=AVAILABLE).awaitTermination()
        with open_reader(url, name) as reader:
            return {f"u{at}": reader.windows(f"u{at}") for at in range(7)} | {"": [reader.watermark().time]}

    log.send(*((f"u{at % 7}", at) for at in range(200)))
    counted("visits")
    forget(url, "visits", {"user_id": "u1"}, id="ticket-7")
    ends = log.ends()
    log.send(*((f"u{at % 7}", at) for at in range(50)))
    out = " or ".join(f"partition = {at} and offset < {end}" for at, end in enumerate(ends))
    out = f"user_id = 'u1' and ({out})"
    done = windowed("visits.v2").seed(checkpoint(log), buckets=3, version_of="visits", positions=PLACES)
    right = windowed("right", out).seed(str(tmp_path / "right"), buckets=2)
    assert done.rows_forgotten == 250 - right.rows - right.rows_expired > 0
    assert done == right._replace(state="visits.v2", rows_forgotten=done.rows_forgotten)
    assert done.rows_expired > 0
    log.send(("u1", 206), ("u2", 198), ("u3", 260))
    found = counted("visits.v2")
    assert found == counted("right", out)
    assert all(found.values())
    swap(url, {"visits": "visits.v2"}, force=True)  # the other one has not read the last rows


def test_no_place_is_needed_where_the_history_ends_with_what_was_forgotten(spark, log, tmp_path):
    url = f"sqlite:///{tmp_path}/state.db"
    log.send(("u1", 1), ("u2", 2), ("u3", 3))
    run(spark, log, url, "visits")
    forget(url, "visits", {"user_id": "u1"}, id="ticket-7")
    counts = declared(spark, log, url, visits=Count(), last=LastN("bytes", 2, by="offset"))  # staged as rows
    assert counts.seed(checkpoint(log), version_of="visits").rows_forgotten == 1
    assert contents(url, "visits.v2") == {("u2",): {"visits": 1, "last": [2]}, ("u3",): {"visits": 1, "last": [3]}}


@pytest.mark.parametrize("after", [full(False), True])
def test_a_seed_that_died_goes_on_with_the_list_and_never_without(spark, log, tmp_path, after, rounds):
    url = f"sqlite:///{tmp_path}/state.db"
    ends = served(spark, log, url)
    settings: Any = {"version_of": "visits", "positions": PLACES}
    for call in rounds((3, 5), (2, 3, 4, 5)):
        fault = Fail(method="swap", call=call, after=after, error=errors.CorruptStoreError, name=f"{call}{after}")
        counts = declared(spark, log, FaultyBackend(resolve(url), tmp_path, (fault,)))
        with pytest.raises(errors.CorruptStoreError):
            counts.seed(checkpoint(log), buckets=6, **settings)
    counts = declared(spark, log, url)
    with pytest.raises(errors.SeedingError, match="call names no version"):
        counts.seed(checkpoint(log))
    forget(url, "visits", {"user_id": "u2"}, id="ticket-9")  # meanwhile: the seed begins anew with the longer list
    later = log.ends()
    counts.seed(checkpoint(log), buckets=2, **settings)
    right = log.truth(without="u1", below=ends)
    right.pop(("u2",))
    assert later == log.ends()
    assert contents(url, "visits.v2") == right == contents(url, "visits")
    assert [entry.id for entry in listed(url, "visits.v2")] == ["ticket-7", "ticket-9"]


def site(spark: Any, log: PartitionedLog, urls: Sequence[Any], suffix: str = "") -> dict[str, Any]:
    """States by user, of windows and of the rows that these leave out, and one of all rows; the last one apart."""
    stream = Topology("site").newStream("visits", log.stream(spark))

    def kept(rows: Any, name: str, url: Any = urls[0]) -> Any:
        return rows.persistentAggregate(opaque(url, f"{name}{suffix}", max_attempts=1), visits=Count())

    windows = stream.window(TumblingDurationWindow.of(10), timestampField="bytes", lag=5, retention=500)
    found = {"users": kept(stream.groupBy("user_id"), "users"), "windows": kept(windows.groupBy("user_id"), "windows")}
    found["late"] = kept(found["windows"].lateStream().groupBy("user_id"), "late")
    return found | {"total": kept(stream, "total", urls[1])}


@pytest.mark.parametrize("deaths", [(), full((("windows", 3), ("late", 3), ("total", 3)))], ids=["at once", "deaths"])
def test_states_that_are_seeded_together_leave_out_what_the_version_of_each_has_forgotten(spark, log, tmp_path, deaths):
    urls = [f"sqlite:///{tmp_path}/{name}.db" for name in "ab"]
    log.send(*((f"u{at % 7}", at) for at in range(200)))
    site(spark, log, urls)["users"].start(str(tmp_path / "before"), trigger=AVAILABLE).awaitTermination()
    forget(urls[0], "users", {"user_id": "u1"}, id="ticket-7", beside=[(urls[1], "total")])
    forget(urls[0], "windows", {"user_id": "u2"}, id="ticket-8", beside=[(urls[1], "total")])
    forget(urls[0], "late", {"user_id": "u3"}, id="ticket-9", beside=[(urls[1], "total")])
    ends = log.ends()
    log.send(*((f"u{at % 7}", at) for at in range(50)))
    site(spark, log, urls)["users"].start(str(tmp_path / "before"), trigger=AVAILABLE).awaitTermination()
    built = {f"{name}.v2": name for name in ("users", "windows", "late")} | {"total.v2": None}
    settings: Any = {"version_of": built, "positions": PLACES, "buckets": 2}
    for name, call in deaths:
        fault = Fail(method="swap", call=call, error=errors.CorruptStoreError, name=f"{name}-{call}")
        faulty = [FaultyBackend(resolve(url), tmp_path, (fault,)) for url in urls]
        with pytest.raises(errors.CorruptStoreError):
            site(spark, log, faulty, ".v2")["users"].seed(checkpoint(log), **settings)
    done = site(spark, log, urls, ".v2")["users"].seed(checkpoint(log), **settings)
    reports = {report.state: report for report in (done, *done.beside)}

    def count(user: str) -> int:
        return sum(row[0] == user for part, end in zip(log.parts, ends, strict=True) for row in part[:end])

    forgotten = {name: report.rows_forgotten for name, report in reports.items()}
    assert forgotten == {"users.v2": count("u1"), "windows.v2": count("u2"), "late.v2": 0, "total.v2": 0}
    assert contents(urls[0], "users.v2") == contents(urls[0], "users")
    assert contents(urls[1], "total.v2") == contents(urls[1], "total")
    with open_reader(urls[0], "windows.v2") as reader:  # of which no row is late
        found = {f"u{at}": sum(one.value["visits"] for one in reader.windows(f"u{at}")) for at in range(7)}
    rows = Counter(user for part in log.parts for user, _ in part)
    assert found == {user: count_of - (user == "u2") * count("u2") for user, count_of in rows.items()}
    assert [[entry.id for entry in listed(urls[0], name)] for name in ("users.v2", "windows.v2", "late.v2")] == [
        ["ticket-7"],
        ["ticket-8"],
        ["ticket-9"],
    ]
    swap(urls[0], {"users": "users.v2"})


def test_a_list_that_grows_between_the_ends_of_two_stores_is_that_of_the_beginning(spark, log, tmp_path):
    urls = [f"sqlite:///{tmp_path}/{name}.db" for name in "ab"]

    def job(backends: Sequence[Any], suffix: str = "") -> Any:
        rows = Topology("site").newStream("visits", log.stream(spark)).groupBy("user_id")
        rows.persistentAggregate(opaque(backends[0], f"users{suffix}", max_attempts=1), visits=Count())
        return rows.persistentAggregate(opaque(backends[1], f"sizes{suffix}", max_attempts=1), bytes=Sum("bytes"))

    beside: dict[str, Any] = {"users": [(urls[1], "sizes")], "sizes": [(urls[0], "users")]}
    log.send(*((f"u{at % 7}", at) for at in range(200)))
    job(urls).start(str(tmp_path / "before"), trigger=AVAILABLE).awaitTermination()
    for url, name in zip(urls, beside, strict=True):
        forget(url, name, {"user_id": "u1"}, id="ticket-7", beside=beside[name])
    settings: Any = {"version_of": {f"{name}.v2": name for name in beside}, "positions": PLACES}
    fault = Fail(method="swap", call=5, error=errors.CorruptStoreError)  # the end in the second store
    with pytest.raises(errors.CorruptStoreError):
        job([urls[0], FaultyBackend(resolve(urls[1]), tmp_path, (fault,))], ".v2").seed(checkpoint(log), **settings)
    users, later = contents(urls[0], "users.v2"), {"user_id": "u2"}
    for url, name in zip(urls, beside, strict=True):
        forget(url, name, later, id="ticket-9", beside=beside[name])
    job(urls, ".v2").seed(checkpoint(log), **settings)
    assert contents(urls[0], "users.v2") == users
    assert contents(urls[1], "sizes.v2").keys() == users.keys()
    assert ("u2",) in users
    assert ("u1",) not in users
    for url, name in zip(urls, beside, strict=True):
        assert [entry.id for entry in listed(url, f"{name}.v2")] == ["ticket-7"]
        with pytest.raises(errors.UsageError, match="ticket-9"):
            swap(url, {name: f"{name}.v2"})
        others = [(one, f"{other}.v2") for one, other in beside[name]]
        forget_listed(url, f"{name}.v2", listed(url, name), beside=others)
        assert contents(url, f"{name}.v2") == contents(url, name)
        swap(url, {name: f"{name}.v2"})


@pytest.mark.full
def test_what_was_forgotten_beyond_the_end_of_the_history_is_not_taken_as_done(spark, log, tmp_path):
    """The plan of batch 0 was written, and the seed died; then the other version went on, and forgot."""
    url = f"sqlite:///{tmp_path}/state.db"
    served(spark, log, url)
    settings: Any = {"version_of": "visits", "positions": PLACES}
    fault = Fail(method="swap", call=2, after=False, error=errors.CorruptStoreError, name="dies")
    with pytest.raises(errors.CorruptStoreError):
        declared(spark, log, FaultyBackend(resolve(url), tmp_path, (fault,))).seed(checkpoint(log), **settings)
    log.send(("u2", 4), ("u2", 5), ("u2", 6))
    run(spark, log, url, "visits")
    forget(url, "visits", {"user_id": "u2"}, id="ticket-9")
    declared(spark, log, url).seed(checkpoint(log), **settings)
    run(spark, log, url, "visits.v2")  # the rows between come back
    with pytest.raises(errors.UsageError, match="has not forgotten what 'visits' has, under the id 'ticket-9'"):
        swap(url, {"visits": "visits.v2"})
    (done,) = forget_listed(url, "visits.v2", listed(url, "visits"))
    assert done.keys == 1
    assert contents(url, "visits.v2") == contents(url, "visits")
    swap(url, {"visits": "visits.v2"})


def refused(
    spark: Any, log: PartitionedLog, url: str, match: str, rows: Any = None, by: str = "user_id", **settings: Any
) -> None:
    stream = newStream("visits", log.stream(spark) if rows is None else rows)
    counts = stream.groupBy(by).persistentAggregate(opaque(url, "visits.v2", max_attempts=1), visits=Count())
    with pytest.raises(errors.MapStateError, match=match):
        counts.seed(checkpoint(log), version_of="visits", **settings)
    with pytest.raises(errors.StateNotFoundError):
        open_reader(url, "visits.v2")


def test_what_the_list_cannot_be_compared_with_is_refused_before_anything_is_written(spark, log, tmp_path):
    url = f"sqlite:///{tmp_path}/state.db"
    served(spark, log, url)
    refuse = partial(refused, spark, log, url)
    refuse("the history goes on after that .*name their columns with positions=")
    (tmp_path / "visits.v2").rename(tmp_path / "left-1")
    refuse("its key columns lack 'user_id'", by="bytes", positions=PLACES)
    (tmp_path / "visits.v2").rename(tmp_path / "left-2")
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "one.csv").write_text("u1,4\n")
    files = spark.readStream.schema("user_id string, bytes bigint").csv(str(tmp_path / "files"))
    refuse("cannot be compared with the end of the history", rows=files)
    with pytest.raises(errors.ConfigurationError, match="topic, partition and offset"):
        declared(spark, log, url).seed(checkpoint(log), version_of="visits", positions=["offset"])
    with pytest.raises(errors.StateNotFoundError):
        declared(spark, log, url).seed(checkpoint(log), version_of="others")


def test_a_row_without_its_place_stops_the_seed(spark, log, tmp_path):
    url = f"sqlite:///{tmp_path}/state.db"
    served(spark, log, url)
    rows = newStream("visits", log.stream(spark)).transform(
        lambda df: df.selectExpr("*", "cast(null as bigint) as none")
    )
    counts = rows.groupBy("user_id").persistentAggregate(opaque(url, "visits.v2", max_attempts=1), visits=Count())
    with pytest.raises(errors.DataError, match="has no place in its source"):
        counts.seed(checkpoint(log), version_of="visits", positions=("topic", "partition", "none"))


@pytest.mark.parametrize(
    ("places", "match"),
    [
        (("partition", "topic", "offset"), "partition int is no topic: that is string"),
        full(("topic", "part_double", "offset"), "part_double double is no partition"),
        full(("topic", "partition", "topic"), "topic string is no offset"),
        full(("topic_bytes", "partition", "offset"), "topic_bytes binary is no topic"),
    ],
)
def test_columns_that_are_no_place_are_refused_before_anything_is_written(spark, log, tmp_path, places, match):
    url = f"sqlite:///{tmp_path}/state.db"
    served(spark, log, url)
    others = ("*", "cast(partition as double) part_double", "cast(topic as binary) topic_bytes")
    rows = newStream("visits", log.stream(spark)).transform(lambda df: df.selectExpr(*others))
    counts = rows.groupBy("user_id").persistentAggregate(opaque(url, "visits.v2", max_attempts=1), visits=Count())
    with pytest.raises(errors.ConfigurationError, match=match):
        counts.seed(checkpoint(log), version_of="visits", positions=places)
    with pytest.raises(errors.StateNotFoundError):
        open_reader(url, "visits.v2")
