"""Corrections: exact against plain Python, once whatever dies, and refused before anything is written."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from cases import full
from every_store import AEROSPIKE, FULL, REDIS, url_of
from processes import FIXTURES, with_modules
from pyspark.sql import functions as F
from spark_fixtures import AVAILABLE, Visits, contents
from typer.testing import CliRunner
from visits_job import SCHEMA

from mapstate import (
    Avg,
    Count,
    LastN,
    Max,
    SessionWindow,
    Sum,
    errors,
    newStream,
    non_transactional,
    opaque,
    open_reader,
    transactional,
)
from mapstate.backends import resolve
from mapstate.cli.commands import app
from mapstate.maps.operator_list import entry_key
from mapstate.operations.forget import forget, listed
from mapstate.operations.vacuum import vacuum
from mapstate.protocol.ledger import Ledger
from mapstate.testing import Fail, FaultyBackend, HasKey, Wait, crash_between, wait_for

pytestmark = pytest.mark.spark

FIRST = [(f"u{at % 7}", at) for at in range(100)]
LATE = [("u1", 4_000), ("new", 5), ("new", 6), ("u2", 1)]
WRONG = [("u3", 3), ("u3", 10), ("u4", 4)]
FENCED = [full("sqlite"), REDIS, FULL[-1]]


@pytest.fixture(params=[*FENCED, AEROSPIKE])
def url(request: Any, tmp_path: Path) -> str:
    return url_of(request, tmp_path)


def frame(spark: Any, rows: list[tuple[str, int]]) -> Any:
    return spark.createDataFrame(rows, SCHEMA)


def declared(spark: Any, visits: Visits, backend: Any, kind: Any = opaque, **aggregates: Any) -> Any:
    aggregates = aggregates or {"visits": Count(), "bytes": Sum("bytes")}
    rows = newStream("visits", visits.stream(spark))
    return rows.groupBy("user_id").persistentAggregate(kind(backend, max_attempts=1), **aggregates)


def run(state: Any, visits: Visits) -> None:
    state.start(visits.checkpoint, trigger=AVAILABLE).awaitTermination()


def counted(*added: list[tuple[str, int]], gone: list[tuple[str, int]] = ()) -> dict[Any, Any]:  # type: ignore[assignment]
    """The state that never saw ``gone``."""
    rows = Counter(row for part in added for row in part)
    rows.subtract(gone)
    out: dict[Any, Any] = {}
    for (user, size), times in rows.items():
        if times:
            value = out.setdefault((user,), {"visits": 0, "bytes": 0})
            value["visits"] += times
            value["bytes"] += times * size
    return out


@pytest.fixture
def state(spark: Any, visits: Visits, url: str) -> Any:
    """A state with two batches."""
    visits.put("0", FIRST[:50])
    visits.put("1", FIRST[50:])
    state = declared(spark, visits, url)
    run(state, visits)
    return state


def ledger(url: str, name: str = "visits") -> Any:
    with open_reader(url, name) as reader:
        return reader.ledger()


def test_rows_are_added_and_taken_back_and_the_stream_goes_on(spark, visits, url, state):
    before = ledger(url)
    done = state.correct(add=frame(spark, LATE), retract=frame(spark, WRONG), id="2026-11-20")
    assert (done.rows, done.keys, done.was_done) == (7, 5, False)
    assert str(done) == f"visits: applied as txid {before.next_txid}: 7 rows, 5 keys"
    assert contents(url, "visits") == counted(FIRST, LATE, gone=WRONG)
    after = ledger(url)
    assert (after.last_commit.batch_id, after.owner, after.operations) == (1, before.owner, 1)
    again = state.correct(add=frame(spark, LATE[::-1]), retract=frame(spark, WRONG), id="2026-11-20")
    assert again == done._replace(was_done=True)
    assert ledger(url) == after
    visits.put("2", [("u1", 5), ("new", 7)])
    run(declared(spark, visits, url), visits)
    assert contents(url, "visits") == counted(FIRST, LATE, [("u1", 5), ("new", 7)], gone=WRONG)
    assert vacuum(url, "visits").unreadable == 0


@pytest.mark.parametrize(
    "rows",
    [
        full({"add": LATE[1:]}),
        {"add": LATE, "retract": WRONG},
        full({"retract": LATE}),
        full({"add": [*LATE, ("u2", 1)]}),
        full({"retract": WRONG}),
    ],
)
def test_other_rows_under_the_same_id_are_refused(spark, visits, tmp_path, rows):
    url = f"sqlite:///{tmp_path}/state.db"
    visits.put("0", FIRST)
    state = declared(spark, visits, url)
    run(state, visits)
    state.correct(add=frame(spark, LATE), id="a")
    after = ledger(url)
    with pytest.raises(errors.UsageError, match="counts other rows under the id 'a', applied as txid"):
        state.correct(**{name: frame(spark, own) for name, own in rows.items()}, id="a")
    assert ledger(url) == after
    assert contents(url, "visits") == counted(FIRST, LATE)


def test_a_key_without_rows_is_gone_and_more_than_was_counted_is_refused(spark, url, state):
    users = [row for row in FIRST if row[0] == "u5"]
    state.correct(retract=frame(spark, users), id="a")
    assert contents(url, "visits") == counted(FIRST, gone=users)
    after = ledger(url)
    with pytest.raises(errors.UsageError, match="would come to less than nothing"):
        state.correct(retract=frame(spark, [("u5", 5)]), id="b")
    assert contents(url, "visits") == counted(FIRST, gone=users)
    assert [entry.id for entry in listed(url, "visits", "correction")] == ["a"]
    assert ledger(url).last_txid == after.last_txid
    vacuum(url, "visits")  # what failed is not in flight
    state.correct(add=frame(spark, users), id="b")
    assert contents(url, "visits") == counted(FIRST)


def test_each_aggregate_that_can_retract_is_as_if_the_rows_had_never_come(spark, tmp_path):
    url, types = f"sqlite:///{tmp_path}/state.db", "k string, n bigint, d decimal(10,2), f double"
    rows = [
        ("a", 1, "1.25", 0.5),
        ("a", None, None, None),
        ("a", 3, "2.50", 0.25),
        ("b", 7, "9.99", 8.0),
        ("b", 7, "1.00", 2.0),
    ]
    gone = [rows[0], rows[4]]

    def of(rows: list[Any]) -> Any:
        frame = spark.createDataFrame(rows, "k string, n bigint, d string, f double")
        return frame.withColumn("d", F.col("d").cast("decimal(10,2)"))

    def declared(name: str, rows: list[Any]) -> Any:
        kept = {"rows": Count(), "ns": Count("n"), "big": Count(where="n > 2"), "mean": Avg("n"), "d_mean": Avg("d")}
        kept |= {"n": Sum("n"), "d": Sum("d"), "f": Sum("f"), "twice": Sum(F.col("n") * 2), "f_mean": Avg("f")}
        stream = newStream(name, of(rows)).groupBy("k").persistentAggregate(opaque(url), **kept)
        stream(of(rows), 0)
        return stream

    assert of(rows).schema.simpleString() == spark.createDataFrame([], types).schema.simpleString()
    state = declared("all", rows)
    state.correct(retract=of(gone), id="a")
    declared("rest", [row for row in rows if row not in gone])
    assert contents(url, "all") == contents(url, "rest")
    state.correct(add=of(gone), id="b")
    declared("again", rows)
    assert contents(url, "all") == contents(url, "again")


def test_the_steps_of_the_stream_are_those_of_its_batches(spark, visits, tmp_path):
    url = f"sqlite:///{tmp_path}/state.db"
    visits.put("0", FIRST)
    rows = newStream("visits", visits.stream(spark)).transform(lambda df: df.where(F.col("bytes") % 2 == 0))
    state = rows.groupBy("user_id").persistentAggregate(opaque(url), visits=Count(), bytes=Sum(F.col("bytes") * 10))
    run(state, visits)
    extra = frame(spark, [*LATE, ("u1", 3)]).withColumn("more", F.lit(1))  # another column is left out
    done = state.correct(add=extra.select("more", "bytes", "user_id"), retract=frame(spark, WRONG), id="a")
    assert done.rows == 4
    even = [[(user, size) for user, size in part if size % 2 == 0] for part in (FIRST, LATE, WRONG)]
    right = counted(even[0], even[1], gone=even[2])
    assert contents(url, "visits") == {key: value | {"bytes": value["bytes"] * 10} for key, value in right.items()}


def test_aggregates_in_python_take_rows_that_never_came(spark, visits, tmp_path):
    url = f"sqlite:///{tmp_path}/state.db"
    visits.put("0", FIRST)
    state = declared(spark, visits, url, last=LastN("bytes", 2, by="bytes"), most=Max("bytes"))
    run(state, visits)
    state.correct(add=frame(spark, LATE), id="a")
    sizes = {user: sorted(size for name, size in FIRST + LATE if name == user) for user, _ in FIRST + LATE}
    found = contents(url, "visits")
    assert {user: (sorted(value["last"]), value["most"]) for (user,), value in found.items()} == {
        user: (own[-2:], own[-1]) for user, own in sizes.items()
    }
    after = ledger(url)
    with pytest.raises(errors.ConfigurationError, match=r"last=LastN\(.*\) cannot take rows back"):
        state.correct(retract=frame(spark, WRONG), id="b")
    assert ledger(url) == after


def test_one_aggregate_of_all_rows_and_columns_of_every_kind(spark, tmp_path):
    """Rows differ by what is in a map, and by which of two columns is null."""
    url, types = f"sqlite:///{tmp_path}/state.db", "a int, b int, more map<string,array<int>>, part struct<n:int>"
    rows = spark.createDataFrame([(None, 1, {"a": [1]}, (1,)), (2, 3, None, None)], types)
    state = newStream("all", rows).persistentAggregate(opaque(url), rows=Count(), a=Sum("a"))
    state(rows, 0)
    state.correct(retract=rows.limit(1), id="a")
    assert contents(url, "all") == {(): {"rows": 1, "a": 2}}
    for other in ((1, None, {"a": [1]}, (1,)), (None, 1, {"a": [2]}, (1,)), (None, 1, {"a": [1]}, (None,))):
        with pytest.raises(errors.UsageError, match="counts other rows"):
            state.correct(retract=spark.createDataFrame([other], types), id="a")
    assert state.correct(retract=rows.where("b = 1"), id="a").was_done
    state.correct(retract=rows.where("b = 3"), id="b")
    assert contents(url, "all") == {}


def test_a_count_of_all_rows_that_was_added_later_removes_no_key(spark, tmp_path):
    url = f"sqlite:///{tmp_path}/state.db"
    rows = newStream("visits", frame(spark, [])).groupBy("user_id")
    rows.persistentAggregate(opaque(url), bytes=Sum("bytes"))(frame(spark, [("x", 10), ("x", 20)]), 0)
    state = rows.persistentAggregate(opaque(url), bytes=Sum("bytes"), visits=Count())
    state(frame(spark, [("x", 5)]), 1)
    state.correct(retract=frame(spark, [("x", 5)]), id="a")
    assert contents(url, "visits") == {("x",): {"bytes": 30, "visits": 0}}
    assert ledger(url).keys_held() == 1
    with pytest.raises(errors.UsageError, match="Count of a key would come to less than nothing"):
        state.correct(retract=frame(spark, [("x", 10)]), id="b")
    # An id that counts is looked for before the job's own fields, some of which can take nothing back.
    other = rows.persistentAggregate(opaque(url), bytes=Sum("bytes"), visits=Count(), most=Max("bytes"))
    assert other.correct(retract=frame(spark, [("x", 5)]), id="a").was_done
    with pytest.raises(errors.UsageError, match="counts other rows under the id 'a'"):
        other.correct(retract=frame(spark, [("x", 6)]), id="a")
    with pytest.raises(errors.UsageError, match="declares other fields or options"):
        other.correct(add=frame(spark, [("x", 5)]), id="b")


def test_the_digest_is_of_what_is_in_a_column_in_any_time_zone(spark, tmp_path):
    url, types = f"sqlite:///{tmp_path}/state.db", "k string, part struct<t:timestamp,n:timestamp_ntz,s:string>"

    def of(text: str, micros: int = 1) -> Any:
        made = f"named_struct('t', timestamp_micros({micros}), 'n', timestamp_ntz'2026-01-01', 's', {text}) part"
        return spark.range(1).selectExpr("'x' k", made)

    state = newStream("all", of("'a'")).groupBy("k").persistentAggregate(opaque(url), rows=Count())
    state(of("'a'"), 0)
    assert of("'a'").schema.simpleString() == spark.createDataFrame([], types).schema.simpleString()
    zone = spark.conf.get("spark.sql.session.timeZone")
    try:
        spark.conf.set("spark.sql.session.timeZone", "UTC")
        state.correct(add=of("cast(null as string)"), id="a")
        spark.conf.set("spark.sql.session.timeZone", "Asia/Tokyo")
        assert state.correct(add=of("cast(null as string)"), id="a").was_done
    finally:
        spark.conf.set("spark.sql.session.timeZone", zone)
    for other in (of("'null'"), of("cast(null as string)", 2)):
        with pytest.raises(errors.UsageError, match="counts other rows"):
            state.correct(add=other, id="a")


@pytest.mark.parametrize(
    ("column", "why"),
    [
        pytest.param("array(parse_json('1'))", "a variant", marks=pytest.mark.since("4.0", "variants")),
        ("map(binary('a'), 1)", "a map with keys of type binary"),
        ("named_struct('m', map(array(1), 2))", "a map with keys of type array<int>"),
    ],
)
def test_a_column_without_a_digest_is_refused_by_name(spark, tmp_path, column, why):
    rows = spark.range(1).selectExpr("id", f"{column} part")
    state = newStream("all", rows).groupBy("id").persistentAggregate(opaque(f"sqlite:///{tmp_path}/s"), rows=Count())
    with pytest.raises(errors.ConfigurationError, match=f"cannot be told apart by part, which has {why}"):
        state.correct(add=rows, id="a")


# Readers, rollback, the change log


def test_a_rollback_takes_it_back_and_its_id_is_free_again(spark, visits, url, state):
    before, right = ledger(url), contents(url, "visits")
    state.correct(add=frame(spark, LATE), retract=frame(spark, WRONG), id="a")
    ran = CliRunner().invoke(app, ["rollback", url, "visits", "--yes"])
    assert ran.exit_code == 0, ran.output
    assert "correction 'a'" in ran.output
    assert contents(url, "visits") == right
    after = ledger(url)
    assert after.contents()[:5] == before.contents()[:5]
    assert (after.format, after.operations, after.last_commit) == (before.format, None, before.last_commit)
    assert listed(url, "visits", "correction") == []
    with pytest.raises(errors.RollbackError):  # its values before are gone
        Ledger(resolve(url).open("visits"), "visits").rollback()
    assert not state.correct(add=frame(spark, LATE[:1]), id="a").was_done
    assert contents(url, "visits") == counted(FIRST, LATE[:1])
    visits.put("2", [("u1", 5)])
    run(declared(spark, visits, url), visits)
    with pytest.raises(errors.RollbackError):
        Ledger(resolve(url).open("visits"), "visits").rollback(after.last_txid)
    assert contents(url, "visits") == counted(FIRST, LATE[:1], [("u1", 5)])


def test_the_command_ledger_lists_corrections_and_a_forget_beside_them(spark, url, state):
    state.correct(add=frame(spark, LATE), id="late rows")
    forget(url, "visits", {"user_id": "u2"}, id="ticket-7", followers_have=0)
    before = ledger(url)
    with pytest.raises(errors.UsageError, match="1 keys of the rows to add were forgotten"):
        state.correct(add=frame(spark, [("u2", 1), ("u1", 1)]), retract=frame(spark, [("u1", 1)]), id="ticket-7")
    assert ledger(url) == before
    state.correct(add=frame(spark, [("u1", 1)]), retract=frame(spark, [("u1", 1)]), id="ticket-7")
    right = counted(FIRST, LATE)
    del right["u2",]
    assert contents(url, "visits") == right
    assert forget(url, "visits", {"user_id": "u2"}, id="ticket-7", followers_have=0).was_done
    shown = CliRunner().invoke(app, ["ledger", url, "visits"]).output
    assert "late rows" in shown
    assert [entry.id for entry in listed(url, "visits", "correction")] == ["late rows", "ticket-7"]
    assert [entry.id for entry in listed(url, "visits")] == ["ticket-7"]
    with pytest.raises(errors.RollbackError):
        Ledger(resolve(url).open("visits"), "visits").rollback(ledger(url).last_commit.txid)


@pytest.mark.parametrize("url", FENCED, indirect=True)
def test_followers_get_the_keys_of_a_correction_and_of_one_that_was_taken_back(spark, visits, url):
    visits.put("0", FIRST)
    state = declared(spark, visits, url, partial(opaque, changes=10))
    run(state, visits)
    with open_reader(url, "visits") as reader:
        start = reader.position()
        state.correct(add=frame(spark, LATE), retract=frame(spark, WRONG[:2]), id="a")
        middle = reader.position()
        assert sorted(reader.changed_keys(start, middle)) == [("new",), ("u1",), ("u2",), ("u3",)]
        Ledger(resolve(url).open("visits"), "visits").rollback()
        visits.put("1", [("u6", 1)])
        run(declared(spark, visits, url, partial(opaque, changes=10)), visits)
        keys = sorted(reader.changed_keys(middle, reader.position()))
        assert keys == [("new",), ("u1",), ("u2",), ("u3",), ("u6",)]


# Batches


def test_a_batch_that_comes_again_does_not_undo_it_and_one_planned_anew_is_refused(spark, visits, url, state):
    saved = Path(f"{visits.checkpoint}-saved")
    crash_between(visits.checkpoint)
    shutil.copytree(visits.checkpoint, saved)
    state.correct(add=frame(spark, LATE), id="a")
    run(declared(spark, visits, url), visits)  # Spark brings batch 1 again
    assert contents(url, "visits") == counted(FIRST, LATE)
    visits.put("2", [("u1", 5)])
    shutil.rmtree(visits.checkpoint)
    shutil.copytree(saved, visits.checkpoint)
    for name in ("1", ".1.crc"):
        Path(visits.checkpoint, "offsets", name).unlink()
    for name in ("1", ".1.crc"):
        Path(visits.checkpoint, "sources", "0", name).unlink(missing_ok=True)
    query = declared(spark, visits, url)
    with pytest.raises(Exception, match="ReplannedBatchError"):
        run(query, visits)
    assert isinstance(query.last_error, errors.ReplannedBatchError)
    assert contents(url, "visits") == counted(FIRST, LATE)


@pytest.fixture
def faulty(url: str, tmp_path: Path) -> Callable[..., Any]:
    """The store with a fault."""

    def made(fault: Any) -> Any:
        folder = tmp_path / f"faults-{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        return FaultyBackend(resolve(url), folder, (fault,))

    return made


def release(backend: Any) -> None:
    Path(backend.folder, "go").touch()


def test_it_is_refused_while_a_running_query_has_a_batch_in_flight(spark, visits, url, state, faulty):
    visits.put("2", [("u1", 5)])
    backend = faulty(Wait(method="swap", call=2, until="go"))  # the commit
    query = declared(spark, visits, backend).start(visits.checkpoint, trigger=AVAILABLE)
    wait_for(lambda: ledger(url).in_flight is not None, "the batch to begin", 60)
    before = ledger(url)
    with pytest.raises(errors.UsageError, match=r"in flight \(batch 2\)"):
        state.correct(add=frame(spark, LATE), id="a")
    assert ledger(url) == before
    release(backend)
    query.awaitTermination()
    state.correct(add=frame(spark, LATE), id="a")
    assert contents(url, "visits") == counted(FIRST, [("u1", 5)], LATE)


@pytest.mark.parametrize("call", [full(1), 2])  # the begin, the commit
def test_a_batch_that_begins_meanwhile_fences_it_and_a_repeated_call_counts_once(
    spark, visits, url, state, faulty, call
):
    backend = faulty(Wait(method="swap", call=call, until="go"))
    correcting = declared(spark, visits, backend)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(lambda: correcting.correct(add=frame(spark, LATE), id="a"))
        folder = Path(backend.folder)
        wait_for(lambda: asked.done() or any(folder.iterdir()) or ledger(url).in_flight, "the call to come as far", 60)
        if call == 2:
            wait_for(lambda: asked.done() or has_entry(url), "the tasks to end", 60)
        visits.put("2", [("u1", 5)])
        run(declared(spark, visits, url), visits)
        release(backend)
        with pytest.raises(errors.FencedError):
            asked.result()
    assert contents(url, "visits") == counted(FIRST, [("u1", 5)])
    assert not state.correct(add=frame(spark, LATE), id="a").was_done
    assert contents(url, "visits") == counted(FIRST, [("u1", 5)], LATE)


def has_entry(url: str) -> bool:
    store: Any = resolve(url).open("visits")
    return store.multi_get([entry_key(0)]) != [None]


# Crashes


POINTS: dict[str, dict[str, Any]] = {
    "begin": {"method": "swap", "call": 1},
    "records": {"method": "multi_put", "call": 1},
    "entry": {"method": "multi_put", "where": HasKey(entry_key(0))},
    "commit": {"method": "swap", "call": 2},
}


@pytest.mark.parametrize(
    ("point", "after"),
    [
        *(("begin", False), full("begin", True), full("records", False), ("records", True)),
        *(("entry", False), full("entry", True), full("commit", False), ("commit", True)),
    ],
)
def test_it_is_there_once_after_a_crash_at_each_write(spark, visits, url, state, faulty, monkeypatch, point, after):
    """As a driver leaves it that was killed: nothing is given up."""
    fault = Fail(**POINTS[point], after=after, error=errors.CorruptStoreError)
    with monkeypatch.context() as patch:
        patch.setattr(Ledger, "give_up_operator", lambda *_: None)
        with pytest.raises(errors.CorruptStoreError):
            declared(spark, visits, faulty(fault)).correct(add=frame(spark, LATE), retract=frame(spark, WRONG), id="a")
    counts = point == "commit" and after
    assert contents(url, "visits") == counted(FIRST, *[LATE] * counts, gone=WRONG if counts else [])
    more = []
    if point == "commit" or not after:  # a batch may come in between
        more = [("u3", 9), ("new", 1)]
        visits.put("2", more)
        run(declared(spark, visits, url), visits)
    for was_done in (counts, True):
        done = state.correct(add=frame(spark, LATE), retract=frame(spark, WRONG), id="a")
        assert done.was_done == was_done
        assert contents(url, "visits") == counted(FIRST, LATE, more, gone=WRONG)
    assert [entry.id for entry in listed(url, "visits", "correction")] == ["a"]


def test_a_driver_that_is_killed_in_a_task_leaves_nothing_behind(spark, visits, url, state, tmp_path):
    """The process is gone, with its JVM; a worker may go on."""
    script = tmp_path / "job.py"
    script.write_text(
        "import os, sys\n"
        "from pathlib import Path\n"
        "from visits_job import SCHEMA, session\n"
        "from mapstate import Count, Sum, newStream, opaque\n"
        "from mapstate.backends import resolve\n"
        "from mapstate.testing import FaultyBackend, Kill\n"
        f"fault = Kill(method='multi_put', call=1, after=True, who=os.getpgrp())\n"
        f"backend = FaultyBackend(resolve({url!r}), {str(tmp_path)!r}, (fault,))\n"
        "spark = session('local[2]')\n"
        f"rows = spark.readStream.schema(SCHEMA).csv({str(visits.input)!r})\n"
        "state = newStream('visits', rows).groupBy('user_id').persistentAggregate(\n"
        "    opaque(backend), visits=Count(), bytes=Sum('bytes'))\n"
        f"state.correct(add=spark.createDataFrame({LATE!r}, SCHEMA), id='a')\n"
    )
    env = with_modules(str(FIXTURES))
    killed = subprocess.run([sys.executable, str(script)], check=False, start_new_session=True, env=env)
    assert killed.returncode == -signal.SIGKILL
    assert ledger(url).in_flight.name == "a correction"
    assert contents(url, "visits") == counted(FIRST)
    with pytest.raises(errors.UsageError, match="in flight"):
        vacuum(url, "visits")
    assert not state.correct(add=frame(spark, LATE), id="a").was_done
    assert contents(url, "visits") == counted(FIRST, LATE)


class Passed:
    """A function behind a state: the rows that it got, by number. It fails ``failures`` times at first."""

    def __init__(self, failures: int = 0) -> None:
        self.rows: dict[int, list[Any]] = {}
        self.failures = failures

    def __call__(self, rows: Any, number: int) -> None:
        if self.failures:
            self.failures -= 1
            raise ValueError("the sink is away")
        assert number not in self.rows
        self.rows[number] = sorted(map(tuple, rows.collect()))


def test_functions_get_the_new_values_of_a_correction_once_it_counts(spark, visits, url, state):
    new, both, state = Passed(failures=1), Passed(), declared(spark, visits, url)
    state.newValuesStream().foreachBatch(new)
    state.newValuesStream(old=True).foreachBatch(both)
    before, users = ledger(url), [row for row in FIRST if row[0] == "u5"]
    rows = {"add": frame(spark, LATE), "retract": frame(spark, WRONG + users)}
    with pytest.raises(errors.UsageError, match=r"functions get the new values of state 'visits'.*emit=True, or emit"):
        state.correct(**rows, id="a")
    assert ledger(url) == before
    with pytest.raises(ValueError, match="the sink is away"):
        state.correct(**rows, id="a", emit=True)
    right = counted(FIRST, LATE, gone=WRONG + users)
    assert contents(url, "visits") == right
    assert state.correct(**rows, id="a", emit=True).was_done
    was = counted(FIRST)

    def values(of: dict[Any, Any], user: str) -> tuple[Any, Any]:
        value = of.get((user,), {"visits": None, "bytes": None})
        return value["visits"], value["bytes"]

    written = sorted(["u1", "new", "u2", "u3", "u4", "u5"])
    assert new.rows == {-1: [(user, *values(right, user)) for user in written]}
    assert both.rows == {-1: [(user, *values(right, user), *values(was, user)) for user in written]}
    state.correct(add=frame(spark, LATE), id="b", emit=False)
    state.correct(add=frame(spark, LATE[:1]), id="c", emit=True)
    assert new.rows.keys() == both.rows.keys() == {-1, -3}
    assert [row[:2] for row in new.rows[-3]] == [("u1", values(right, "u1")[0] + 2)]


def test_no_function_is_called_where_a_batch_has_written_what_the_correction_wrote(spark, visits, url, state):
    passed, rows, state = Passed(), frame(spark, LATE), declared(spark, visits, url)
    state.newValuesStream().foreachBatch(passed)
    state.correct(add=rows, id="a", emit=False)
    visits.put("2", [("u1", 5), ("u6", 7)])
    run(declared(spark, visits, url), visits)
    renamed = newStream("visits", visits.stream(spark)).transform(lambda df: df.withColumn("who", F.col("user_id")))
    other = "declares other keys, fields or windows"
    jobs = [
        ("1 of the 3 keys", state),
        (other, declared(spark, visits, url, n=Count())),
        (other, renamed.groupBy("who").persistentAggregate(opaque(url), visits=Count(), bytes=Sum("bytes"))),
    ]
    before = ledger(url)
    for why, job in jobs:
        if job is not state:
            job.newValuesStream().foreachBatch(passed)
        with pytest.raises(errors.UsageError, match=f"counts, but .*{why}"):
            job.correct(add=rows, id="a", emit=True)
        assert ledger(url) == before
    assert not passed.rows
    assert state.correct(add=rows, id="a", emit=False).was_done


# What is refused


def _with_late(counts: Any) -> Any:
    counts.lateStream().foreachBatch(lambda df, batch_id: None)
    return counts


REFUSED: dict[str, Callable[..., Any]] = {
    "it is non-transactional": lambda rows, url: rows.groupBy("user_id").persistentAggregate(
        non_transactional(url), visits=Count()
    ),
    "it is transactional": lambda rows, url: rows.groupBy("user_id").persistentAggregate(
        transactional(url), visits=Count()
    ),
    "its windows go by the clock": lambda rows, url: (
        rows.tumblingWindow("1 hour").groupBy("user_id").persistentAggregate(opaque(url, name="w"), visits=Count())
    ),
    "its windows are sessions": lambda rows, url: (
        rows.window(SessionWindow.of(5), timestampField="bytes")
        .groupBy("user_id")
        .persistentAggregate(opaque(url, name="s"), visits=Count())
    ),
    "functions or states of your own": lambda rows, url: _with_late(
        rows.tumblingWindow(5, timestampField="bytes")
        .groupBy("user_id")
        .persistentAggregate(opaque(url, name="w"), visits=Count())
    ),
    "it follows another state": lambda rows, url: (
        rows.groupBy("user_id")
        .persistentAggregate(opaque(url), visits=Count())
        .newValuesStream()
        .groupBy("visits")
        .persistentAggregate(opaque(url, name="second"), users=Count())
    ),
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_cannot_be_corrected_is_refused_by_name_before_anything_is_written(spark, visits, tmp_path, why):
    state = REFUSED[why](newStream("visits", visits.stream(spark)), f"sqlite:///{tmp_path}/state.db")
    with pytest.raises(errors.ConfigurationError, match=f"cannot be corrected: {why}"):
        state.correct(add=frame(spark, LATE), id="a")
    assert not (tmp_path / "state.db").exists()


def test_calls_that_are_wrong_are_refused(spark, visits, tmp_path):
    url = f"sqlite:///{tmp_path}/state.db"
    state = declared(spark, visits, url, n=Count())
    late = frame(spark, LATE)
    for given, text in (
        ({"add": late, "id": " "}, "id is the correction's own name"),
        ({"id": "a"}, "rows to add, rows to retract"),
        ({"add": visits.stream(spark), "id": "a"}, "no stream"),
        ({"add": late.drop("bytes"), "id": "a"}, "bytes bigint. They have none there"),
        ({"add": late.withColumn("bytes", F.lit(1.0)), "id": "a"}, "bytes bigint. They have double there"),
    ):
        with pytest.raises((errors.UsageError, errors.ConfigurationError), match=text):
            state.correct(**given)
    with pytest.raises(errors.StateNotFoundError):
        state.correct(add=late, id="a")
    visits.put("0", FIRST)
    run(state, visits)
    with pytest.raises(errors.UsageError, match="declares other fields or options"):
        declared(spark, visits, url, n=Count(), most=Max("bytes")).correct(add=late, id="a")
    assert {key: value["n"] for key, value in contents(url, "visits").items()} == Counter((user,) for user, _ in FIRST)
