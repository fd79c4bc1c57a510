"""Corrections of states that count together: in all of them once, whatever dies between two stores, or in none."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from cases import full
from every_store import AEROSPIKE, FULL, REDIS, url_of
from partitioned_log import SCHEMA as PLACED
from partitioned_log import PartitionedLog
from pyspark.sql import functions as F
from spark_fixtures import AVAILABLE, DATA_SOURCE, Visits, contents
from visits_job import SCHEMA

from mapstate import Count, Max, Sum, Topology, TumblingDurationWindow, errors, newStream, opaque, open_reader
from mapstate.backends import resolve
from mapstate.maps.operator_list import entry_key
from mapstate.operations.forget import forget, listed
from mapstate.protocol.ledger import Ledger
from mapstate.spark import Coordinates, InitialRows
from mapstate.testing import Fail, FaultyBackend, HasKey, Wait, wait_for

pytestmark = pytest.mark.spark

FIRST = [(f"u{at % 7}", at) for at in range(100)]
LATE = [("u1", 4_000), ("new", 5), ("new", 6), ("u2", 1)]
WRONG = [("u3", 3), ("u3", 10), ("u4", 4)]
Row = tuple[str, int]


@pytest.fixture(params=[REDIS, full("sqlite"), FULL[-1], AEROSPIKE])
def url(request: Any, tmp_path: Path) -> str:
    return url_of(request, tmp_path)


@pytest.fixture
def other(tmp_path: Path) -> str:
    """Another store."""
    return f"sqlite:///{tmp_path}/other.db"


def frame(spark: Any, rows: list[Row]) -> Any:
    return spark.createDataFrame(rows, SCHEMA)


def declared(spark: Any, visits: Visits, one: Any, two: Any = None, **more: Any) -> tuple[Any, Any, Any]:
    """A topology with the states ``users`` and ``total``, and both."""
    topology = Topology("site")
    rows = topology.newStream("visits", visits.stream(spark))
    even = rows.transform(lambda rows: rows.where(F.col("bytes") % 2 == 0))
    users = rows.groupBy("user_id").persistentAggregate(
        opaque(one, "users", max_attempts=1), visits=Count(), bytes=Sum("bytes")
    )
    total = even.persistentAggregate(opaque(two or one, "total", max_attempts=1), visits=Count(), **more)
    return topology, users, total


def run(topology: Any, visits: Visits) -> None:
    topology.start(visits.checkpoint, trigger=AVAILABLE).awaitTermination()


def counted(*added: list[Row], gone: list[Row] = ()) -> tuple[dict[Any, Any], dict[Any, Any]]:  # type: ignore[assignment]
    """Both states that never saw ``gone``."""
    rows = Counter(row for part in added for row in part)
    rows.subtract(gone)
    users: dict[Any, Any] = {}
    for (user, size), times in rows.items():
        value = users.setdefault((user,), {"visits": 0, "bytes": 0})
        value["visits"] += times
        value["bytes"] += times * size
    return users, {(): {"visits": sum(times for (_, size), times in rows.items() if size % 2 == 0)}}


def found(one: str, two: str | None = None) -> tuple[dict[Any, Any], dict[Any, Any]]:
    return contents(one, "users"), contents(two or one, "total")


@pytest.mark.parametrize("apart", [False, True], ids=["one store", "two stores"])
@pytest.mark.parametrize("by", [0, full(1), full(2)], ids=["topology", "users", "total"])
def test_all_states_of_a_stream_get_the_rows(spark, visits, url, other, apart, by):
    two = other if apart else url
    visits.put("0", FIRST)
    places = declared(spark, visits, url, two)
    run(places[0], visits)
    done = places[by].correct(add=frame(spark, LATE), retract=frame(spark, WRONG), id="a")
    reports = sorted([done, *done.beside])
    assert [(one.state, one.rows, one.keys, one.was_done) for one in reports] == [
        ("total", 4, 1, False),
        ("users", 7, 5, False),
    ]
    assert done.state == ("users", "users", "total")[by]
    assert [line.split(":")[0] for line in str(done).splitlines()] == [done.state, done.beside[0].state]
    assert found(url, two) == counted(FIRST, LATE, gone=WRONG)
    again = places[0].correct(add=frame(spark, LATE[::-1]), retract=frame(spark, WRONG), id="a")
    assert [again.was_done, again.beside[0].was_done] == [True, True]
    visits.put("1", [("u1", 5), ("new", 8)])
    run(declared(spark, visits, url, two)[0], visits)
    assert found(url, two) == counted(FIRST, LATE, [("u1", 5), ("new", 8)], gone=WRONG)
    with pytest.raises(errors.UsageError, match="counts other rows under the id 'a'"):
        places[0].correct(add=frame(spark, LATE), id="a")


POINTS: dict[str, dict[str, Any]] = {
    "begin": {"method": "swap", "call": 1},
    "records": {"method": "multi_put", "call": 1},
    "entry": {"method": "multi_put", "where": HasKey(entry_key(0))},
    "commit": {"method": "swap", "call": 2},
}


@pytest.fixture
def faulty(tmp_path: Path) -> Callable[..., Any]:
    """A store with a fault."""

    def made(url: str, fault: Any) -> Any:
        folder = tmp_path / f"faults-{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        return FaultyBackend(resolve(url), folder, (fault,))

    return made


@pytest.mark.parametrize("url", ["sqlite"], indirect=True)
@pytest.mark.parametrize("where", [full(0), 1], ids=["the first store", "the second store"])
@pytest.mark.parametrize(
    ("point", "after"),
    [
        *(("begin", False), full("begin", True), full("records", False), ("records", True)),
        *(full("entry", False), full("entry", True), ("commit", False), ("commit", True)),
    ],
)
def test_a_crash_at_each_write_of_two_stores_leaves_what_the_same_call_ends(
    spark, visits, url, other, faulty, monkeypatch, where, point, after
):
    """As a driver leaves it that was killed: nothing is given up."""
    visits.put("0", FIRST)
    run(declared(spark, visits, url, other)[0], visits)
    places: list[Any] = [url, other]
    places[where] = faulty(places[where], Fail(**POINTS[point], after=after, error=errors.CorruptStoreError))
    rows = {"add": frame(spark, LATE), "retract": frame(spark, WRONG)}
    with monkeypatch.context() as patch:
        patch.setattr(Ledger, "give_up_operator", lambda *_: None)
        with pytest.raises(errors.CorruptStoreError) as raised:
            declared(spark, visits, *places)[1].correct(**rows, id="a")
    before, right = counted(FIRST), counted(FIRST, LATE, gone=WRONG)
    counts = [point == "commit" and (where == 1 or after), point == "commit" and where == 1 and after]
    assert found(url, other) == ((right if counts[0] else before)[0], (right if counts[1] else before)[1])
    noted = "\n".join(getattr(raised.value, "__notes__", ()))
    assert ("counts in users, and not in total" in noted) == (point == "commit" and where == 1)
    more: list[Row] = []
    if not after:  # a batch may come in between
        more = [("u3", 9), ("new", 2)]
        visits.put("1", more)
        run(declared(spark, visits, url, other)[0], visits)
    for was_done in (counts, [True, True]):
        done = declared(spark, visits, url, other)[1].correct(**rows, id="a")
        assert [done.was_done, done.beside[0].was_done] == was_done
        assert found(url, other) == counted(FIRST, LATE, more, gone=WRONG)


@pytest.mark.parametrize("url", [REDIS, "sqlite"], indirect=True)
@pytest.mark.parametrize("after", [False, True])
def test_states_of_one_store_count_it_in_one_write(spark, visits, url, faulty, monkeypatch, after):
    visits.put("0", FIRST)
    run(declared(spark, visits, url)[0], visits)
    fault = Fail(method="swap_all", call=2, after=after, error=errors.CorruptStoreError)
    backend = faulty(url, fault)
    with monkeypatch.context() as patch:
        patch.setattr(Ledger, "give_up_operator", lambda *_: None)
        with pytest.raises(errors.CorruptStoreError):
            declared(spark, visits, backend)[1].correct(add=frame(spark, LATE), id="a")
    assert found(url) == (counted(FIRST, LATE) if after else counted(FIRST))
    assert declared(spark, visits, url)[1].correct(add=frame(spark, LATE), id="a").was_done == after
    assert found(url) == counted(FIRST, LATE)


@pytest.mark.parametrize("url", ["sqlite"], indirect=True)
def test_a_batch_between_two_stores_fences_the_second_and_the_same_call_ends_it(spark, visits, url, other, faulty):
    visits.put("0", FIRST)
    run(declared(spark, visits, url, other)[0], visits)
    backend = faulty(other, Wait(method="swap", call=2, until="go"))
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(lambda: declared(spark, visits, url, backend)[1].correct(add=frame(spark, LATE), id="a"))
        wait_for(lambda: asked.done() or bool(listed(url, "users", "correction")), "the first commit", 60)
        visits.put("1", [("u1", 6)])
        run(declared(spark, visits, url, other)[0], visits)
        Path(backend.folder, "go").touch()
        with pytest.raises(errors.FencedError) as raised:
            asked.result()
    assert "counts in users, and not in total" in raised.value.__notes__[-1]
    assert found(url, other) == (counted(FIRST, LATE, [("u1", 6)])[0], counted(FIRST, [("u1", 6)])[1])
    done = declared(spark, visits, url, other)[0].correct(add=frame(spark, LATE), id="a")
    assert [done.was_done, done.beside[0].was_done] == [True, False]
    assert found(url, other) == counted(FIRST, LATE, [("u1", 6)])


@pytest.mark.parametrize("url", ["sqlite"], indirect=True)
def test_what_one_state_refuses_is_written_in_none(spark, visits, url, other):
    visits.put("0", FIRST)

    topology, users, _ = declared(spark, visits, url, other)
    run(topology, visits)
    before = [ledger(url, "users"), ledger(other, "total")]
    more = declared(spark, visits, url, other, most=Max("bytes"))[1]
    with pytest.raises(errors.ConfigurationError, match=r"most=Max\(.*\) cannot take rows back"):
        more.correct(retract=frame(spark, WRONG), id="a")
    with pytest.raises(errors.UsageError, match="state 'total': the job declares other fields"):
        more.correct(add=frame(spark, LATE), id="a")
    lone = newStream("visits", visits.stream(spark)).groupBy("user_id")
    alone = lone.persistentAggregate(opaque(url, "users", max_attempts=1), visits=Count(), bytes=Sum("bytes"))
    with pytest.raises(errors.UsageError, match=r"apart from 'total', which lacks its last batch, or which the job"):
        alone.correct(add=frame(spark, LATE), id="a")
    assert [ledger(url, "users"), ledger(other, "total")] == before
    forget(url, "users", {"user_id": "u2"}, id="ticket-7", beside=[(other, "total")])
    after = [ledger(url, "users"), before[1]]
    with pytest.raises(errors.UsageError, match="1 keys of the rows to add were forgotten"):
        users.correct(add=frame(spark, LATE), id="a")
    assert [ledger(url, "users"), ledger(other, "total")] == after


@pytest.mark.parametrize("url", ["sqlite"], indirect=True)
def test_a_state_that_is_a_batch_ahead_of_another_is_not_corrected(spark, visits, url, other):
    for number in range(2):
        visits.put(str(number), FIRST[number * 50 :][:50])
        run(declared(spark, visits, url, other)[0], visits)
    Ledger(resolve(other).open("total"), "total").rollback()
    before = [ledger(url, "users"), ledger(other, "total")]
    with pytest.raises(errors.UsageError, match="'users' was committed apart from 'total', which lacks its last batch"):
        declared(spark, visits, url, other)[0].correct(add=frame(spark, LATE), id="a")
    assert [ledger(url, "users"), ledger(other, "total")] == before


def ledger(url: str, name: str) -> Any:
    with open_reader(url, name) as reader:
        return reader.ledger()


@pytest.mark.parametrize("url", [REDIS, full("sqlite")], indirect=True)
def test_windows_and_functions_beside_another_state(spark, visits, url):
    visits.put("0", FIRST)
    got: dict[tuple[str, int], list[Any]] = {}

    def topology() -> Any:
        made = Topology("site")
        rows = made.newStream("visits", visits.stream(spark))
        users = rows.groupBy("user_id").persistentAggregate(opaque(url, "users"), visits=Count())
        windows = rows.window(TumblingDurationWindow.of(10), timestampField="bytes", retention=50)
        hourly = windows.groupBy("user_id").persistentAggregate(opaque(url, "hourly"), visits=Count())
        for name, stream in (("users", users.newValuesStream()), ("hourly", hourly.firedWindowsStream())):
            stream.foreachBatch(
                lambda rows, number, name=name: got.setdefault((name, number), []).extend(map(tuple, rows.collect()))
            )
        return made

    run(topology(), visits)
    visits.put("1", [("u6", 98)])
    run(topology(), visits)
    got.clear()
    before = [ledger(url, "users"), ledger(url, "hourly")]
    with pytest.raises(errors.UsageError, match="rows to add are of windows that are gone"):
        topology().correct(add=frame(spark, [("u1", 1)]), id="a", emit=True)
    with pytest.raises(errors.ConfigurationError, match="'hourly' cannot be corrected: rows of windows are added"):
        topology().correct(retract=frame(spark, [("u1", 90)]), id="a", emit=True)
    with pytest.raises(errors.UsageError, match="Say whether they are called"):
        topology().correct(add=frame(spark, [("u1", 80)]), id="a")
    assert [ledger(url, "users"), ledger(url, "hourly")] == before
    topology().correct(add=frame(spark, [("u1", 80), ("u1", 99)]), id="a", emit=True)
    assert got["users", -1] == [("u1", 17)]
    assert sum(row[-1] for row in got["hourly", -1]) == 11, "the window that was final, whole"
    with open_reader(url, "hourly") as reader:
        assert dict(reader.window(90))["u1",]["visits"] == 2 + (80 % 7 == 1)


@DATA_SOURCE
@pytest.mark.parametrize("url", [REDIS, full("sqlite")], indirect=True)
@pytest.mark.parametrize("apart", [False, full(True)], ids=["one store", "two stores"])
def test_one_state_is_recounted_and_the_others_stay(spark, url, other, tmp_path, apart):
    log = PartitionedLog(tmp_path)
    log.send(*((f"u{at % 7}", 300 - at) for at in range(100)))
    made = Topology("site")
    rows = made.newStream("visits", log.stream(spark))
    users = rows.groupBy("user_id").persistentAggregate(opaque(url, "users"), visits=Count(), bytes=Sum("bytes"))
    rows.persistentAggregate(opaque(other if apart else url, "total"), visits=Count())
    made.start(str(tmp_path / "checkpoint"), trigger=AVAILABLE).awaitTermination()
    wrong = spark.createDataFrame([("visits", 0, 0, "u1", 7)] * 3, PLACED)
    made.correct(add=wrong, id="wrong")
    history = InitialRows(log.table(spark, ends=log.ends()), ends=Coordinates("topic", "partition", "offset"))
    keys = spark.createDataFrame([("u1",)], "user_id string")
    with pytest.raises(errors.UsageError, match=r"a recount is of one state: call correct of one of users, total"):
        made.correct(recount=history, keys=keys, id="again", counted=["wrong"])
    done = users.correct(recount=history, keys=keys, id="again", counted=["wrong"])
    assert (done.state, done.beside) == ("users", ())
    assert contents(url, "users") == log.truth()
    assert contents(other if apart else url, "total") == {(): {"visits": 103}}


# What a job has beside its states


def late_states(rows: Any, url: str) -> tuple[Any, Any]:
    windows = rows.window(TumblingDurationWindow.of(10), timestampField="bytes", retention=50).groupBy("user_id")
    hourly = windows.persistentAggregate(opaque(url, "hourly"), visits=Count())
    return hourly, hourly.lateStream()


def asking(rows: Any, url: str) -> list[Any]:
    users = rows.groupBy("user_id").persistentAggregate(opaque(url, "users"), visits=Count(), bytes=Sum("bytes"))
    fresh = rows.stateQuery(users, ["user_id"], {"visits": "had"}).transform(lambda rows: rows.where("had is null"))
    return [users, fresh.persistentAggregate(opaque(url, "fresh"), visits=Count())]


def late_alone(rows: Any, url: str) -> list[Any]:
    hourly, late = late_states(rows, url)
    return [hourly, late.groupBy("user_id").persistentAggregate(opaque(url, "late"), visits=Count())]


def late_merged(rows: Any, url: str) -> list[Any]:
    hourly, late = late_states(rows, url)
    merged = rows.transform(lambda rows: rows.where("bytes = 1")).merge(late).groupBy("user_id")
    return [hourly, merged.persistentAggregate(opaque(url, "late"), visits=Count())]


@DATA_SOURCE
@pytest.mark.parametrize(
    ("job", "why"),
    [
        (late_alone, "the state 'late' counts late rows"),
        (late_merged, "the state 'late' counts late rows"),
        (asking, "the rows of the state 'fresh' ask the state 'users' of the same batch"),
    ],
)
def test_what_depends_on_the_batch_of_a_row_is_refused(spark, tmp_path, job, why):
    log, url = PartitionedLog(tmp_path), f"sqlite:///{tmp_path}/state.db"
    log.send(*((f"u{at % 7}", at) for at in range(100)))
    made = Topology("site")
    first, last = job(made.newStream("visits", log.stream(spark)), url)
    made.start(str(tmp_path / "checkpoint"), trigger=AVAILABLE).awaitTermination()
    before = [ledger(url, state.name) for state in (first, last)]
    rows = spark.createDataFrame([("visits", 0, 0, "u1", 95)], PLACED)
    history = InitialRows(log.table(spark, ends=log.ends()), ends=Coordinates("topic", "partition", "offset"))
    again = {"recount": history, "keys": spark.createDataFrame([("u1",)], "user_id string")}
    calls = [(made, {"add": rows}), (last, again), (first, {"recount": history, "since": 0, "until": 100})]
    for state, given in calls:
        with pytest.raises((errors.ConfigurationError, errors.UsageError)) as raised:
            state.correct(**given, id="a")
        if state is last and job is asking:
            assert "it has one key" in str(raised.value)
        elif state is not first or job is not asking:
            assert f"cannot be corrected: {why}" in str(raised.value)
    assert [ledger(url, state.name) for state in (first, last)] == before
    if job is asking:  # its own rows ask nothing, and those of the other stay as they are
        first.correct(**again, id="a")
        assert contents(url, "users") == log.truth()


def test_a_step_before_several_states_is_computed_once(spark, visits, tmp_path):
    url = f"sqlite:///{tmp_path}/state.db"
    visits.put("0", FIRST)
    made = Topology("site")
    half = made.newStream("visits", visits.stream(spark)).transform(lambda rows: rows.where("rand() < 0.5"))
    users = half.groupBy("user_id").persistentAggregate(opaque(url, "users"), visits=Count())
    half.persistentAggregate(opaque(url, "total"), visits=Count())
    run(made, visits)
    users.correct(add=frame(spark, [("u1", at) for at in range(1000)]), id="a")
    counts = sum(value["visits"] for value in contents(url, "users").values())
    assert contents(url, "total") == {(): {"visits": counts}}
    assert 300 < counts < 800


def test_an_id_of_a_job_without_a_state_is_not_applied_to_it_later(spark, visits, tmp_path):
    url = f"sqlite:///{tmp_path}/state.db"
    visits.put("0", FIRST)

    def job(*, more: bool) -> Any:
        made = Topology("site")
        rows = made.newStream("visits", visits.stream(spark))
        users = rows.groupBy("user_id").persistentAggregate(opaque(url, "users"), visits=Count())
        if more:
            rows.persistentAggregate(opaque(url, "total", on_gap="accept"), visits=Count())
        return made, users

    run(job(more=False)[0], visits)
    job(more=False)[1].correct(add=frame(spark, LATE), id="a")
    visits.put("1", [("u1", 5)])
    run(job(more=True)[0], visits)
    with pytest.raises(errors.UsageError, match="'a', which was not for 'total'.*the states users alone") as raised:
        job(more=True)[1].correct(add=frame(spark, LATE), id="a")
    assert not hasattr(raised.value, "__notes__")
    assert contents(url, "total") == {(): {"visits": 1}}
    assert job(more=False)[1].correct(add=frame(spark, LATE), id="a").was_done


def test_functions_behind_one_state_are_called_whatever_those_behind_another_do(spark, visits, tmp_path):
    url = f"sqlite:///{tmp_path}/state.db"
    visits.put("0", FIRST)
    got: dict[str, list[Any]] = {"users": [], "sizes": []}
    fails = ["sizes"]

    def job() -> Any:
        made = Topology("site")
        rows = made.newStream("visits", visits.stream(spark))
        users = rows.groupBy("user_id").persistentAggregate(opaque(url, "users"), visits=Count())
        sizes = rows.groupBy("bytes").persistentAggregate(opaque(url, "sizes"), visits=Count())

        def passed(rows: Any, _: int, name: str) -> None:
            if name in fails:
                raise ValueError(f"the sink of {name} is away")
            got[name] += map(tuple, rows.collect())

        for name, state in (("users", users), ("sizes", sizes)):
            state.newValuesStream().foreachBatch(lambda rows, number, name=name: passed(rows, number, name))
        return made

    fails.clear()
    run(job(), visits)
    fails.append("sizes")
    got["users"].clear()
    got["sizes"].clear()
    late = frame(spark, [("u1", 4000)])
    with pytest.raises(ValueError, match="the sink of sizes is away"):
        job().correct(add=late, id="a", emit=True)
    assert got == {"users": [("u1", 16)], "sizes": []}
    fails.clear()
    visits.put("1", [("u1", 5)])
    run(job(), visits)
    got["sizes"].clear()
    with pytest.raises(errors.UsageError, match="state 'users': .*have been written or removed since"):
        job().correct(add=late, id="a", emit=True)
    assert got["sizes"] == [(4000, 1)]


@pytest.mark.parametrize("what", ["windows", "forgotten"])
def test_what_has_become_impossible_between_two_stores_is_left_out_of_the_second(
    spark, visits, tmp_path, other, faulty, what
):
    """As late rows are, and those of keys that are gone: else no call could end it."""
    url = f"sqlite:///{tmp_path}/state.db"
    visits.put("0", FIRST)

    def job(place: Any) -> Any:
        made = Topology("site")
        rows = made.newStream("visits", visits.stream(spark))
        rows.persistentAggregate(opaque(url, "total", max_attempts=1), visits=Count())
        if what == "windows":
            windows = rows.window(TumblingDurationWindow.of(10), timestampField="bytes", retention=50)
            windows.groupBy("user_id").persistentAggregate(opaque(place, "second", max_attempts=1), visits=Count())
        else:
            users = rows.groupBy("user_id")
            users.persistentAggregate(opaque(place, "second", max_attempts=1), visits=Count())
        return made

    run(job(other), visits)
    late = [("u1", 55), ("u2", 55), ("u3", 95), ("u3", 96)]
    gone = [("u1", 1)] if what == "forgotten" else []  # windows take none back
    rows = {"add": frame(spark, late)} | ({"retract": frame(spark, gone)} if gone else {})
    backend = faulty(other, Fail(method="swap", call=2, error=errors.CorruptStoreError))
    with pytest.raises(errors.CorruptStoreError) as raised:
        job(backend).correct(**rows, id="a")
    assert "counts in total, and not in second" in raised.value.__notes__[-1]
    before = contents(other, "second") if what == "forgotten" else {}
    if what == "windows":
        visits.put("1", [("u6", 120)])
        run(job(other), visits)
        visits.put("2", [("u6", 121)])
        run(job(other), visits)
    else:
        for user in ("u1", "u2"):
            forget(other, "second", {"user_id": user}, id=user, beside=[(url, "total")])
    done = job(other).correct(**rows, id="a")
    assert (done.was_done, done.beside[0].was_done, done.beside[0].rows, done.beside[0].keys) == (True, False, 2, 1)
    if what == "windows":
        with open_reader(other, "second") as reader:
            assert dict(reader.window(100))["u3",]["visits"] == 2 + sum(at % 7 == 3 for at in range(90, 100))
    else:
        right = {key: value for key, value in before.items() if key[0] not in ("u1", "u2")}
        right["u3",] = {"visits": right["u3",]["visits"] + 2}
        assert contents(other, "second") == right
    assert job(other).correct(**rows, id="a").beside[0].was_done
    with pytest.raises(errors.UsageError, match="counts other rows under the id 'a'"):
        job(other).correct(add=frame(spark, late[2:]), id="a")


@pytest.mark.parametrize("url", ["sqlite"], indirect=True)
def test_what_counts_in_part_is_named_also_where_another_job_asks(spark, visits, url, other, faulty):
    visits.put("0", FIRST)
    run(declared(spark, visits, url, other)[0], visits)
    backend = faulty(other, Fail(method="swap", call=2, error=errors.CorruptStoreError))
    with pytest.raises(errors.CorruptStoreError):
        declared(spark, visits, url, backend)[0].correct(add=frame(spark, LATE), id="a")
    for given, more in (({"add": frame(spark, LATE)}, {"most": Max("bytes")}), ({"add": frame(spark, WRONG)}, {})):
        with pytest.raises(errors.UsageError, match="declares other fields|counts other rows") as raised:
            declared(spark, visits, url, other, **more)[0].correct(**given, id="a")
        assert "counts in users, and not in total" in raised.value.__notes__[-1]
