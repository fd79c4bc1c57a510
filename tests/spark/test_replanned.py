"""Batches that Spark plans anew, because its checkpoint is older than the state: no row is lost, none counts twice."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest
from spark_fixtures import AVAILABLE, Visits, contents, finish
from visits_job import SCHEMA

from mapstate import Count, Sum, Topology, newStream, non_transactional, opaque, transactional
from mapstate.errors import ReplannedBatchError
from mapstate.protocol.ledger import Ledger
from mapstate.protocol.ledger_record import encode_ledger
from mapstate.protocol.stored_ledger import decode_ledger, ledger_store, read_ledger

pytestmark = pytest.mark.spark

FAILS = "if(bytes = 11, raise_error('made to fail'), bytes) as bytes"

ROWS = [("ann", 1), ("bob", 2), ("ann", 3), ("cyd", 4), ("bob", 5), ("ann", 6), ("dan", 7), ("ann", 8), ("eve", 9)]


class Days:
    """A query that runs once a day, over all files that have come since; its checkpoint can be copied and put back."""

    def __init__(self, spark: Any, visits: Visits, states: Any) -> None:
        self.spark = spark
        self.visits = visits
        self.states = states
        self.checkpoint = visits.checkpoint
        self._day = 0

    def rows(self, rows: list[tuple[str, int]]) -> None:
        self._day += 1
        self.visits.put(f"day-{self._day}", rows)

    def run(self) -> None:
        frame = self.spark.readStream.schema(SCHEMA).csv(str(self.visits.input))
        job = self.states(frame)
        try:
            finish(job.start(str(self.checkpoint), trigger=AVAILABLE))
        except Exception as error:
            raise (job.last_error or error) from error

    def day(self, *rows: tuple[str, int]) -> None:
        self.rows(list(rows or ROWS))
        self.run()

    def copy(self) -> Path:
        copy = self.checkpoint.with_name(f"copy-{self._day}")
        shutil.copytree(self.checkpoint, copy)
        return copy

    def restore(self, copy: Path) -> None:
        shutil.rmtree(self.checkpoint)
        shutil.copytree(copy, self.checkpoint)


def counting(spec: Any) -> Any:
    def states(frame: Any) -> Any:
        return (
            newStream("visits", frame).groupBy("user_id").persistentAggregate(spec, visits=Count(), bytes=Sum("bytes"))
        )

    return states


def ledger(url: Any, state: str = "visits") -> Any:
    return read_ledger(opaque(url, state).open(), state)


def test_a_checkpoint_that_is_one_batch_older_loses_no_row(spark, visits, each_url):
    days = Days(spark, visits, counting(opaque(each_url)))
    days.day()
    backup = days.copy()
    days.day(("ann", 10), ("fay", 11))
    days.restore(backup)
    days.day(("gil", 12))
    assert contents(each_url, "visits") == visits.truth()
    days.day(("ann", 13))
    assert contents(each_url, "visits") == visits.truth()
    assert ledger(each_url).last_commit.batch_id == 2


def test_the_newer_form_of_the_offset_log_is_read_too(spark, visits, tmp_path):
    url, setting = f"sqlite:///{tmp_path}/state.db", "spark.sql.streaming.offsetLog.formatVersion"
    before = spark.conf.get(setting, None)
    if before is None:
        pytest.skip("this Spark knows one form only")
    spark.conf.set(setting, "2")
    try:
        days = Days(spark, visits, counting(opaque(url)))
        days.day()
        backup = days.copy()
        days.day(("ann", 10))
        days.restore(backup)
        days.day(("ann", 11))
    finally:
        spark.conf.set(setting, before)
    assert (days.checkpoint / "offsets" / "1").read_text().startswith("v2")
    assert contents(url, "visits") == visits.truth()
    assert ledger(url).last_commit.plan.fingerprint is not None


def test_a_key_that_only_the_batch_rolled_back_had_is_absent_again(spark, visits, each_url):
    days = Days(spark, visits, counting(opaque(each_url)))
    days.day()
    backup = days.copy()
    days.day(("fay", 11))
    days.visits.put("day-2", [("gil", 12)])  # the file is replaced before the batch is planned anew
    days.restore(backup)
    days.run()
    assert contents(each_url, "visits") == visits.truth()


def test_an_entry_of_the_offset_log_that_is_lost_loses_no_row(spark, visits, tmp_path):
    url = f"sqlite:///{tmp_path}/state.db"
    days = Days(spark, visits, counting(opaque(url)))
    days.day()
    days.day(("ann", 10))
    for folder in ("offsets", "commits"):
        for name in ("1", ".1.crc"):
            (days.checkpoint / folder / name).unlink()
    days.day(("ann", 11))
    assert contents(url, "visits") == visits.truth()


def test_a_batch_that_is_planned_anew_again_and_again_counts_once(spark, visits, tmp_path):
    url = f"sqlite:///{tmp_path}/state.db"
    days = Days(spark, visits, counting(opaque(url)))
    days.day()
    backup = days.copy()
    for _ in range(3):
        days.day()
        days.restore(backup)
    days.run()
    assert contents(url, "visits") == visits.truth()


def test_a_copy_of_a_checkpoint_that_goes_its_own_way_is_refused_when_the_first_comes_back(spark, visits, tmp_path):
    url = f"sqlite:///{tmp_path}/state.db"
    days = Days(spark, visits, counting(opaque(url)))
    days.day()
    green = days.copy()
    days.day(("ann", 10))
    blue, days.checkpoint = days.checkpoint, green
    days.day(("ann", 11))  # counts both days, in the place of the second
    assert contents(url, "visits") == visits.truth()
    before = ledger(url)
    days.checkpoint = blue  # it has the second day alone behind it, and would bring the third again
    days.rows([("ann", 12)])
    with pytest.raises(ReplannedBatchError, match="two copies of one checkpoint") as refused:
        days.run()
    assert json.loads(refused.value.found) == [{"logOffset": 1}]
    after = ledger(url)
    assert after == before, "nothing was written"
    days.checkpoint = green
    days.run()
    assert contents(url, "visits") == visits.truth()


@pytest.mark.parametrize("make", [transactional, non_transactional])
def test_what_cannot_be_rolled_back_is_refused_and_nothing_is_written(spark, visits, tmp_path, make):
    url = f"sqlite:///{tmp_path}/state.db"
    days = Days(spark, visits, counting(make(url)))
    days.day()
    backup = days.copy()
    days.day(("ann", 10))
    newer, before, found = days.copy(), ledger(url), contents(url, "visits")
    days.restore(backup)
    with pytest.raises(ReplannedBatchError, match="only opaque records keep the value before") as refused:
        days.day(("ann", 11))
    assert "Nothing was written. Put the newer checkpoint back" in str(refused.value)
    assert ledger(url) == before
    assert contents(url, "visits") == found
    days.restore(newer)  # as the error says
    days.run()
    assert contents(url, "visits") == visits.truth()


def test_a_batch_behind_which_another_has_begun_is_refused(spark, visits, tmp_path):
    url = f"sqlite:///{tmp_path}/state.db"
    days = Days(spark, visits, counting(opaque(url)))
    days.day()
    backup = days.copy()
    days.day(("ann", 10))
    days.rows([("ann", 11)])
    failing = days.states
    days.states = lambda frame: failing(frame.selectExpr("user_id", FAILS))
    with pytest.raises(Exception, match="made to fail"):
        days.run()
    days.states = failing
    newer = days.copy()
    days.restore(backup)
    with pytest.raises(ReplannedBatchError, match="a later attempt has begun"):
        days.run()
    days.restore(newer)
    days.run()
    assert contents(url, "visits") == visits.truth()


def test_a_transactional_attempt_is_not_begun_again_with_another_plan(spark, visits, tmp_path):
    url = f"sqlite:///{tmp_path}/state.db"
    days = Days(spark, visits, counting(transactional(url)))
    days.day()
    backup = days.copy()
    days.rows([("ann", 11)])
    right = days.states
    days.states = lambda frame: right(frame.selectExpr("user_id", FAILS))
    with pytest.raises(Exception, match="made to fail"):
        days.run()
    days.states, newer, before = right, days.copy(), ledger(url)
    assert before.in_flight is not None
    days.restore(backup)
    with pytest.raises(ReplannedBatchError, match="a replay has to be identical"):
        days.day(("ann", 12))
    assert ledger(url) == before
    days.restore(newer)
    days.run()
    days.run()
    assert contents(url, "visits") == visits.truth()


def test_a_state_of_before_plans_were_kept_is_judged_by_what_its_ledger_has(spark, visits, tmp_path):
    url = f"sqlite:///{tmp_path}/state.db"
    days = Days(spark, visits, counting(opaque(url)))
    days.day()
    backup = days.copy()
    days.day(("ann", 10))
    forget_plans(url)
    days.restore(backup)
    days.day(("ann", 11))
    assert contents(url, "visits") == visits.truth()
    forget_plans(url)
    days.day(("ann", 12))
    assert contents(url, "visits") == visits.truth()


def forget_plans(url: str) -> None:
    store = ledger_store(opaque(url, "visits").open())
    found = store.load()
    assert found is not None
    record = decode_ledger(found[0], "visits")
    commits = {
        name: msgspec.structs.replace(one, plan=None) if one is not None else None
        for name, one in (("last_commit", record.last_commit), ("previous", record.previous))
    }
    older = msgspec.structs.replace(record, **commits)
    assert store.swap(encode_ledger(older), found[1], older.fence())


def topology(urls: list[str], **options: Any) -> Any:
    def states(frame: Any) -> Any:
        visits = Topology("all").newStream("visits", frame)
        visits.groupBy("user_id").persistentAggregate(opaque(urls[0], "by_user", **options), visits=Count())
        visits.groupBy("bytes").persistentAggregate(opaque(urls[1], "by_size", **options), visits=Count())
        return visits

    return states


@pytest.mark.parametrize("stores", [pytest.param("one store", marks=pytest.mark.full), "two stores"])
def test_all_states_of_a_topology_count_a_batch_anew_that_was_planned_anew(spark, visits, tmp_path, stores):
    urls = [f"sqlite:///{tmp_path}/{'state' if stores == 'one store' else at}.db" for at in range(2)]
    days = Days(spark, visits, topology(urls))
    days.day()
    backup = days.copy()
    days.day(("ann", 10), ("fay", 11))
    days.restore(backup)
    days.day(("gil", 12))
    truth = visits.truth()
    assert contents(urls[0], "by_user") == {key: {"visits": one["visits"]} for key, one in truth.items()}
    assert sum(one["visits"] for one in contents(urls[1], "by_size").values()) == len(ROWS) + 3


def test_no_state_of_a_topology_is_rolled_back_where_one_of_them_cannot_be(spark, visits, tmp_path):
    urls = [f"sqlite:///{tmp_path}/{at}.db" for at in range(2)]
    days = Days(spark, visits, topology(urls))
    days.day()
    backup = days.copy()
    days.day(("ann", 10), ("fay", 11))
    days.restore(backup)
    Ledger(opaque(urls[1], "by_size").open(), "by_size").begin_operator("vacuum")
    before = [ledger(urls[0], "by_user"), ledger(urls[1], "by_size")]
    with pytest.raises(ReplannedBatchError, match="state 'by_size'"):
        days.day(("gil", 12))
    assert [ledger(urls[0], "by_user"), ledger(urls[1], "by_size")] == before


def chain(urls: list[str], levels: int = 3) -> Any:
    """Visits by user; users by their number of visits; how many such numbers there are."""

    def states(frame: Any) -> Any:
        job = counting(opaque(urls[0]))(frame)
        job = job.newValuesStream().groupBy("visits").persistentAggregate(opaque(urls[1], "second"), users=Count())
        if levels == 3:
            job = job.newValuesStream().groupBy("users").persistentAggregate(opaque(urls[2], "third"), numbers=Count())
        return job

    return states


def check_chain(urls: list[str], visits: Visits) -> None:
    truth = visits.truth()
    assert contents(urls[0], "visits") == truth
    users = Counter(one["visits"] for one in truth.values())
    assert contents(urls[1], "second") == {(number,): {"users": many} for number, many in users.items()}
    numbers = Counter(users.values())
    assert contents(urls[2], "third") == {(many,): {"numbers": found} for many, found in numbers.items()}


@pytest.mark.full
def test_states_that_follow_new_values_go_with_the_state_that_they_follow(spark, visits, tmp_path):
    urls = [f"sqlite:///{tmp_path}/{at}.db" for at in range(3)]
    days = Days(spark, visits, chain(urls))
    days.day()
    backup = days.copy()
    days.day(("ann", 10), ("fay", 11), ("bob", 1))
    check_chain(urls, visits)
    days.restore(backup)
    days.day(("gil", 12), ("fay", 13))
    check_chain(urls, visits)
    days.day(("gil", 12))
    check_chain(urls, visits)


@pytest.mark.parametrize("stuck", [pytest.param(1, marks=pytest.mark.full), 2])
def test_nothing_is_rolled_back_where_a_state_that_follows_cannot_be(spark, visits, tmp_path, stuck):
    urls = [f"sqlite:///{tmp_path}/{at}.db" for at in range(3)]
    names = ["visits", "second", "third"]
    days = Days(spark, visits, chain(urls))
    days.day()
    backup = days.copy()
    days.day(("ann", 10), ("fay", 11))
    days.restore(backup)
    Ledger(opaque(urls[stuck], names[stuck]).open(), names[stuck]).begin_operator("vacuum")
    before = [ledger(url, name) for url, name in zip(urls, names, strict=True)]
    with pytest.raises(ReplannedBatchError, match=f"state '{names[stuck]}'"):
        days.day(("gil", 12))
    assert [ledger(url, name) for url, name in zip(urls, names, strict=True)] == before


@pytest.mark.parametrize("stop_behind", [0, pytest.param(1, marks=pytest.mark.full)])
def test_a_driver_that_dies_between_states_that_follow_each_other_leaves_nothing_wrong(
    spark, visits, tmp_path, stop_behind
):
    urls = [f"sqlite:///{tmp_path}/{at}.db" for at in range(3)]
    days = Days(spark, visits, chain(urls))
    days.day()
    backup = days.copy()
    days.day(("ann", 10), ("fay", 11), ("bob", 1))
    days.restore(backup)
    whole = days.states
    days.states = lambda frame: failing_behind(whole(frame), stop_behind)
    with pytest.raises(Exception, match="the driver dies here"):
        days.day(("gil", 12), ("fay", 13))
    days.states = whole
    if stop_behind:  # and the checkpoint is put back once more
        days.restore(backup)
    days.day(("ann", 14))
    days.run()
    check_chain(urls, visits)


def failing_behind(job: Any, level: int) -> Any:
    """The same states, with a driver that ends as soon as one of them is committed."""
    state = job
    for _ in range(2 - level):
        state = state.source

    def die(*_: Any) -> None:
        raise RuntimeError("the driver dies here")

    state.branch.downstream.insert(0, die)  # in front of the state that follows
    return job
