"""Recounts of windows: those of some times computed anew from a history, exact against brute force, or refused."""

from __future__ import annotations

import datetime as dt
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from cases import full
from clicks import CONFIGS
from every_store import AEROSPIKE, FULL, REDIS, url_of
from partitioned_log import SCHEMA, PartitionedLog
from processes import FIXTURES, with_modules
from pyspark.sql import functions as F
from spark_fixtures import AVAILABLE, DATA_SOURCE
from windows_oracle import Oracle

from mapstate import CombinerAggregator, Count, Max, TumblingDurationWindow, errors, newStream, opaque, open_reader
from mapstate.backends import resolve
from mapstate.capabilities import FencedWrites
from mapstate.keys import is_index_key
from mapstate.maps.pane_index import pane_of
from mapstate.operations.forget import forget, listed
from mapstate.operations.vacuum import vacuum
from mapstate.protocol.ledger import Ledger
from mapstate.protocol.stored_ledger import record_pages
from mapstate.spark import Coordinates, InitialRows
from mapstate.testing import Fail, FaultyBackend

pytestmark = [pytest.mark.spark, DATA_SOURCE]

USERS = ["x", "y", "a|b", None]
Counted = tuple[str | None, int]
"""The user and the time of a row."""


class Times(CombinerAggregator):
    """A combiner of one's own, which goes through Python."""

    def init(self, row: Any) -> Any:
        return [row["bytes"]]

    def combine(self, a: Any, b: Any) -> Any:
        return sorted(a + b)


@pytest.fixture(params=[full("sqlite"), REDIS, FULL[-1], AEROSPIKE])
def url(request: Any, tmp_path: Path) -> str:
    return url_of(request, tmp_path)


@pytest.fixture
def log(tmp_path: Path) -> PartitionedLog:
    return PartitionedLog(tmp_path)


def declared(spark: Any, log: PartitionedLog, backend: Any, kind: str, **more: Any) -> Any:
    """The bytes of a row are its time."""
    rows = newStream("visits", log.stream(spark)).transform(lambda frame: frame.withColumn("at", F.col("bytes")))
    windows = rows.window(CONFIGS[kind], timestampField="at", lag=5, retention=130)
    blocks = more.pop("blocks", 3 if kind == "blocks" else None)
    spec = opaque(backend, "windows", chunk_size=3, max_attempts=1, blocks=blocks)
    return windows.groupBy("user_id").persistentAggregate(spec, rows=Count(), last=Max("bytes"), **more)


def run(spark: Any, log: PartitionedLog, backend: Any, kind: str, rows: Iterable[Counted], **more: Any) -> Any:
    """A batch of these rows."""
    log.send(*rows)
    state = declared(spark, log, backend, kind, **more)
    state.start(str(log.folder.parent / "checkpoint"), trigger=AVAILABLE).awaitTermination()
    return state


def drawn(draw: random.Random, start: int, stop: int, count: int = 40, users: Any = USERS) -> list[Counted]:
    return [*((draw.choice(users), draw.randrange(start, stop)) for _ in range(count)), ("x", stop - 1)]


def begun(
    spark: Any, log: PartitionedLog, url: Any, kind: str, **more: Any
) -> tuple[Any, list[Counted], list[Counted]]:
    """Windows that are gone, final and open; the rows that belong there, and those that do not and were added."""
    draw = random.Random(kind)
    right = [row for at in (0, 100, 200) for row in drawn(draw, at, at + 100)]
    for at in range(0, len(right), 41):
        state = run(spark, log, url, kind, right[at : at + 41], **more)
    wrong = drawn(draw, 180, 300, 30, [*USERS, "ghost", "other"])
    rows = spark.createDataFrame([("visits", 0, 0, *row) for row in wrong], SCHEMA)
    state.correct(add=rows, id="wrong", **({"emit": False} if state.branch.fired else {}))
    return state, right, wrong


def history(spark: Any, log: PartitionedLog) -> InitialRows:
    return InitialRows(log.table(spark, ends=log.ends()), ends=Coordinates("topic", "partition", "offset"))


def ledger(url: Any) -> Any:
    with open_reader(url, "windows") as reader:
        return reader.ledger()


def check(url: Any, kind: str, rows: list[Counted], **aggregators: Any) -> None:
    """All windows of each key, and all keys of each window."""
    oracle, right = Oracle(CONFIGS[kind].length, CONFIGS[kind].slide), dict[tuple[int, Any], list[int]]()
    with open_reader(url, "windows", aggregators=aggregators) as reader:
        kept = reader.ledger().windows
        assert kept is not None
        for user, at in rows:
            for end in oracle.ends(at):
                if end > kept.purged:
                    right.setdefault((end, user), []).append(at)
        assert right
        for user in [*USERS, "ghost", "other"]:
            found: dict[Any, Any] = {(one.end, user): one.value for one in reader.windows(user)}
            own = {key: times for key, times in right.items() if key[1] == user}
            assert {key: (value["rows"], value["last"]) for key, value in found.items()} == {
                key: (len(times), max(times)) for key, times in own.items()
            }, user
            assert all(value["times"] == sorted(own[key]) for key, value in found.items() if aggregators)
        for end in range(kept.purged + 1, 340):
            if end in {of for of, _ in right}:
                shown = {key[0]: value["rows"] for key, value in reader.window(end)}
                assert shown == {user: len(times) for (until, user), times in right.items() if until == end}, end


@pytest.mark.parametrize("kind", [full("tumbling"), full("sliding"), "gaps", "blocks"])
def test_windows_are_computed_anew_and_batches_go_on(spark, log, url, kind):
    state, right, wrong = begun(spark, log, url, kind)
    check(url, kind, right + wrong)
    first = -(-ledger(url).windows.purged // 10) * 10
    for number, (since, until) in enumerate([(first + 40, 250), (first, 330)]):  # a part, and all that there is
        left = [row for row in wrong if not since <= row[1] < until]
        assert len(left) < len(wrong)
        asked = {"recount": history(spark, log), "since": since, "until": until, "counted": ["wrong", "0"]}
        done = state.correct(**asked, id=str(number))
        assert done.rows == sum(since <= at < until and (kind != "gaps" or at % 10 < 4) for _, at in right)
        wrong = left
        check(url, kind, right + wrong)
        assert state.correct(**asked, id=str(number)) == done._replace(was_done=True)
    draw = random.Random(1)
    for at in (300, 330):  # keys that had gone come back, into windows that fill
        more = drawn(draw, at - 4, at + 30, 20, [*USERS, "ghost"])
        right += more
        run(spark, log, url, kind, more)
        check(url, kind, right + wrong)
    assert vacuum(url, "windows").unreadable == 0
    check(url, kind, right + wrong)
    for at in (5_000, 6_000, 7_000):
        run(spark, log, url, kind, [("x", at)])
    vacuum(url, "windows")
    store: Any = resolve(url).open("windows")
    if isinstance(store, FencedWrites):
        left_over = {pane_of(key)[0] for page in record_pages(store, 1000) for key in page if not is_index_key(key)}
        assert all(int(pane) > 4_900 for pane in left_over)


def refused(state: Any, url: Any, match: str, kind: Any = errors.UsageError, **asked: Any) -> None:
    before = ledger(url)
    with pytest.raises(kind, match=match):
        state.correct(id="no", **asked)
    assert ledger(url) == before


def test_what_does_not_say_which_windows_is_refused(spark, log, tmp_path):
    url = f"sqlite:///{tmp_path}/state.db"
    state, right, wrong = begun(spark, log, url, "sliding")
    users = spark.createDataFrame([("x",)], "user_id string")
    asked: dict[str, Any] = {"recount": history(spark, log), "counted": ["wrong"]}
    for given in ({}, {"keys": users}, {"since": 200}, {"since": 200, "until": 300, "keys": users}):
        refused(state, url, "has windows. A recount of windows has since= and until=", **asked, **given)
    for at in ("2026-11-30", 1.5, True):
        refused(state, url, "are numbers", **asked, since=at, until=300)
    refused(state, url, "since= is 1000000.*0, a time that no row has", **asked, since=10**30, until=10**31)
    refused(state, url, "since= is 201, where none .* begin at 200 and 205", **asked, since=201, until=300)
    refused(state, url, "until= is 299, where none .* begin at 295 and 300", **asked, since=200, until=299)
    refused(state, url, "since= is not before until=", **asked, since=300, until=300)
    refused(state, url, "windows of rows since 0 are gone.* Take since=[0-9]+ or later", **asked, since=0, until=300)
    refused(state, url, "history, recount=", since=200, until=300)
    refused(state, url, "could undo them: 'wrong'", **asked | {"counted": []}, since=200, until=300)
    check(url, "sliding", right + wrong)
    plain = newStream("visits", log.stream(spark)).groupBy("user_id").persistentAggregate(opaque(url, "p"), n=Count())
    with pytest.raises(errors.UsageError, match="has no windows. .* has keys="):
        plain.correct(id="no", **asked, since=200, until=300)


def test_rows_that_were_late_count_then_and_aggregates_in_python_are_computed_anew(spark, log, tmp_path):
    url = f"sqlite:///{tmp_path}/state.db"
    state, right, wrong = begun(spark, log, url, "sliding", times=Times())
    late = [("x", 220), ("late", 221)]
    run(spark, log, url, "sliding", [*late, ("x", 300)], times=Times())
    right.append(("x", 300))
    check(url, "sliding", right + wrong, times=Times())
    asked = {"recount": history(spark, log), "since": 210, "until": 310, "counted": ["wrong"]}
    state.correct(**asked, id="a")
    right += late
    wrong = [row for row in wrong if row[1] < 210]
    check(url, "sliding", right + wrong, times=Times())
    with open_reader(url, "windows", aggregators={"times": Times()}) as reader:
        assert [window.start for window in reader.windows("late")] == [200, 210, 220]


@pytest.mark.parametrize("kind", ["sliding", full("blocks")])
def test_a_recount_is_taken_back_with_the_keys_that_it_removed(spark, log, url, kind):
    state, right, wrong = begun(spark, log, url, kind)
    asked = {"recount": history(spark, log), "since": 200, "until": 300, "counted": ["wrong"]}
    state.correct(**asked, id="a")
    left = [row for row in wrong if row[1] < 200]
    check(url, kind, right + left)
    Ledger(resolve(url).open("windows"), "windows").rollback()
    check(url, kind, right + wrong)
    assert not state.correct(**asked, id="a").was_done
    check(url, kind, right + left)


@pytest.mark.parametrize("kind", ["sliding", full("blocks")])
@pytest.mark.parametrize(
    ("method", "calls"),
    [
        ("multi_put", range(1, 60, 3)),
        *(full("multi_put", range(1, 60)), full("swap", range(1, 4)), full("multi_get", range(1, 60))),
    ],
)
def test_it_is_there_once_after_a_crash_at_any_write(spark, log, tmp_path, monkeypatch, kind, method, calls):
    """As a driver leaves it that was killed: nothing is given up."""
    url = f"sqlite:///{tmp_path}/state.db"
    state, right, wrong = begun(spark, log, url, kind)
    asked = {"recount": history(spark, log), "since": 200, "until": 300, "counted": ["wrong"]}
    left, died = [row for row in wrong if row[1] < 200], 0
    for call in calls:
        faults = tmp_path / f"faults {call}"
        faults.mkdir()
        fault = Fail(method=method, call=call, after=call % 2 == 0, error=errors.CorruptStoreError)
        backend: Any = FaultyBackend(resolve(url), faults, (fault,))
        with monkeypatch.context() as patch:
            patch.setattr(Ledger, "give_up_operator", lambda *_: None)
            try:
                declared(spark, log, backend, kind).correct(**asked, id="a")
                break
            except errors.CorruptStoreError:
                died += 1
        counts = any(entry.id == "a" for entry in listed(url, "windows", "correction"))
        check(url, kind, right + (left if counts else wrong))
    assert died > 1
    assert state.correct(**asked, id="a").was_done
    check(url, kind, right + left)
    more = drawn(random.Random(1), 296, 330, 20, [*USERS, "ghost"])
    run(spark, log, url, kind, more)
    check(url, kind, right + left + more)


@pytest.mark.parametrize("url", [REDIS, full("sqlite")], indirect=True)
@pytest.mark.parametrize(
    "where", [full("call=4"), "where=HasKey(entry_key(1))"], ids=["in its tasks", "behind what it removes"]
)
def test_a_driver_that_is_killed_leaves_nothing_behind(spark, log, url, tmp_path, where):
    """The process is gone, with its JVM; a worker may go on."""
    state, right, wrong = begun(spark, log, url, "sliding")
    script = tmp_path / "job.py"
    script.write_text(
        "import json, os\n"
        "from pathlib import Path\n"
        "from test_recount_windows import PartitionedLog, declared, history\n"
        "from visits_job import session\n"
        "from mapstate.backends import resolve\n"
        "from mapstate.maps.operator_list import entry_key\n"
        "from mapstate.testing import FaultyBackend, HasKey, Kill\n"
        "log = PartitionedLog.__new__(PartitionedLog)\n"
        f"log.folder, log.start = Path({str(log.folder)!r}), {log.start!r}\n"
        "log.parts = [[*map(json.loads, (log.folder / at).read_text().splitlines())] for at in '01']\n"
        f"fault = Kill(method='multi_put', {where}, after=True, who=os.getpgrp())\n"
        f"backend = FaultyBackend(resolve({url!r}), {str(tmp_path)!r}, (fault,))\n"
        "spark = session('local[2]')\n"
        "state = declared(spark, log, backend, 'sliding')\n"
        "state.correct(recount=history(spark, log), since=200, until=300, counted=['wrong'], id='a')\n"
    )
    env = with_modules(os.pathsep.join((str(FIXTURES), str(Path(__file__).parent))))
    killed = subprocess.run([sys.executable, str(script)], check=False, start_new_session=True, env=env)
    assert killed.returncode == -signal.SIGKILL
    assert ledger(url).in_flight.name == "a correction"
    check(url, "sliding", right + wrong)
    asked = {"recount": history(spark, log), "since": 200, "until": 300, "counted": ["wrong"]}
    assert not state.correct(**asked, id="a").was_done
    check(url, "sliding", right + [row for row in wrong if row[1] < 200])


@pytest.mark.parametrize("blocks", [full(None), 3])
def test_windows_that_are_final_are_passed_on_if_that_is_said(spark, log, tmp_path, blocks):
    url, passed, written = f"sqlite:///{tmp_path}/state.db", dict[int, list[Any]](), dict[int, list[Any]]()
    _, right, _ = begun(spark, log, url, "tumbling", blocks=blocks)
    state = declared(spark, log, url, "tumbling", blocks=blocks)
    state.firedWindowsStream().foreachBatch(lambda rows, number: passed.update({number: rows.collect()}))
    state.newValuesStream().foreachBatch(lambda rows, number: written.update({number: rows.collect()}))
    asked = {"recount": history(spark, log), "since": 200, "until": 300, "counted": ["wrong"]}
    refused(state, url, "emit=True, or emit=False", **asked)
    done = state.correct(**asked, id="a", emit=True)
    assert len(written[-2]) == done.keys
    assert {row.user_id for row in written.pop(-2) if row.rows is None} >= {"ghost", "other"}
    found = {(row.window_end, row.user_id): row.rows for row in passed.pop(-2)}
    mark = ledger(url).final_mark()
    assert found == {
        (end, user): sum(end - 10 <= at < end for own, at in right if own == user)
        for end in range(210, mark + 1, 10)
        for user in {user for user, at in right if end - 10 <= at < end}
    }


@pytest.mark.parametrize("kind", [full("tumbling"), "blocks"])
def test_keys_that_were_forgotten_do_not_come_back(spark, log, tmp_path, kind):
    url = f"sqlite:///{tmp_path}/state.db"
    state, right, wrong = begun(spark, log, url, kind)
    forget(url, "windows", {"user_id": "y"}, id="ticket-7", followers_have=0)
    asked = {"recount": history(spark, log), "since": 200, "until": 300, "counted": ["wrong"]}
    refused(state, url, "keys of the recount were forgotten", **asked)
    ends = Coordinates("topic", "partition", "offset", holes="allowed")
    came = [("y", 299), ("y", 305), ("x", 306), ("x", 307)]  # also into a window that is computed anew
    run(spark, log, url, kind, came)
    rows = history(spark, log).rows.where("user_id is null or user_id != 'y'")
    state.correct(**asked | {"recount": InitialRows(rows, ends=ends)}, id="a")
    left = [row for row in wrong if not 200 <= row[1] < 300]
    check(url, kind, [row for row in right + left if row[0] != "y"] + came)


def test_windows_of_all_rows_by_timestamps(spark, log, tmp_path):
    url, first = f"sqlite:///{tmp_path}/state.db", dt.datetime(2026, 11, 20, tzinfo=dt.UTC)
    log.send(*(("x", hour * 10) for hour in (0, 1, 1, 5)))  # in tenths of an hour
    rows = newStream("visits", log.stream(spark)).transform(
        lambda frame: frame.withColumn("at", F.timestamp_seconds(F.lit(first.timestamp()) + F.col("bytes") * 360))
    )
    windows = rows.window(TumblingDurationWindow.of("1 hour"), timestampField="at", retention="10 hours")
    state = windows.persistentAggregate(opaque(url, "windows"), rows=Count())
    state.start(str(tmp_path / "checkpoint"), trigger=AVAILABLE).awaitTermination()
    wrong = spark.createDataFrame([("visits", 0, 0, "x", at) for at in (10, 20, 50, 60)], SCHEMA)
    state.correct(add=wrong, id="wrong")
    asked = {"recount": history(spark, log), "counted": ["wrong"], "since": first + dt.timedelta(hours=1)}
    refused(state, url, "with a time zone", **asked, until=dt.datetime(2026, 11, 20, 3))
    until = first + dt.timedelta(hours=5, minutes=30)
    refused(state, url, "until= is 2026-11-20T05:30:00.000000Z, where none .* begin at 2026-11", **asked, until=until)
    state.correct(**asked, until=first + dt.timedelta(hours=6), id="a")
    with open_reader(url, "windows") as reader:
        found = {window.start: window.value["rows"] for window in reader.windows()}
        assert found == {first + dt.timedelta(hours=hour): count for hour, count in ((0, 1), (1, 2), (5, 1), (6, 1))}
