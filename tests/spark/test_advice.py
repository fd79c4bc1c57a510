"""What the pages and the errors advise after a loss, a move or a change, done literally until the counts are right.

`tests/docs/test_advice_table.py` has the table of all advice: what of it is followed here, and what in other files.
"""

from __future__ import annotations

import shutil
import sqlite3
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from cases import full
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from spark_fixtures import AVAILABLE, DATA_SOURCE, Visits, contents
from typer.testing import CliRunner

from mapstate import (
    CombinerAggregator,
    Count,
    Max,
    Sum,
    Topology,
    TumblingDurationWindow,
    errors,
    newStream,
    non_transactional,
    opaque,
    open_reader,
    transactional,
)
from mapstate.cli.commands import app
from mapstate.operations.doctor import recount
from mapstate.spark import files_not_counted
from mapstate.testing import Fail, FaultyBackend

pytestmark = pytest.mark.spark

STATE = "visits"


class Job:
    """A job that counts the visits of files; its store and its checkpoint can be copied, lost and put back."""

    def __init__(self, spark: SparkSession, visits: Visits, folder: Path) -> None:
        self.spark, self.visits, self.folder = spark, visits, folder
        self.url = f"sqlite:///{folder}/state.db"
        self.checkpoint = visits.checkpoint
        self.aggregates: dict[str, Any] = {"visits": Count(), "bytes": Sum("bytes")}
        self._files = 0

    def put(self, batches: int = 1) -> None:
        """So many files, each of which is a batch."""
        for _ in range(batches):
            at = self._files = self._files + 1
            self.visits.put(f"{at}", [("all", at), (f"u{at}", 1), (f"u{at - 1}", at)])

    def state(self, spec: Callable[..., Any] = opaque, where: Any = None, **options: Any) -> Any:
        rows = self.visits.stream(self.spark)
        rows = rows if where is None else rows.where(where)
        return (
            newStream(STATE, rows).groupBy("user_id").persistentAggregate(spec(self.url, **options), **self.aggregates)
        )

    def run(self, **options: Any) -> None:
        job = self.state(**options)
        try:
            job.start(self.checkpoint, trigger=AVAILABLE).awaitTermination(120)
        except Exception as error:
            raise (job.last_error or error) from error

    def refused(self, error: type[errors.MapStateError], match: str, **options: Any) -> None:
        before = contents(self.url, STATE)
        with pytest.raises(error, match=match):
            self.run(**options)
        assert contents(self.url, STATE) == before

    def not_counted(self) -> Any:
        with open_reader(self.url, STATE) as reader:
            return files_not_counted(reader.ledger().last_commit.offsets)

    def copy_of_the_store(self) -> str:
        return backup(self.url)

    def copy_of_the_checkpoint(self) -> Path:
        return Path(shutil.copytree(self.checkpoint, self.folder / f"checkpoint-{self._files}"))

    def is_right(self) -> bool:
        return contents(self.url, STATE) == self.visits.truth()


def backup(url: str) -> str:
    """The URL of a copy that SQLite makes, of one moment."""
    path = url.removeprefix("sqlite:///")
    with closing(sqlite3.connect(path)) as source, closing(sqlite3.connect(f"{path}-copy")) as target:
        source.backup(target)
    return f"{url}-copy"


@pytest.fixture
def job(spark: SparkSession, visits: Visits, tmp_path: Path) -> Job:
    return Job(spark, visits, tmp_path)


def mapstate(*args: Any) -> str:
    done = CliRunner().invoke(app, [str(one) for one in args])
    assert done.exit_code == 0, done.output
    return done.output


def by_another_program(url: str, statement: str, *values: Any) -> None:
    """One row of the store's file is changed, or more."""
    with closing(sqlite3.connect(url.removeprefix("sqlite:///"))) as db:
        assert db.execute(statement, values).rowcount > 0
        db.commit()


def record_of(url: str, key: str) -> bytes:
    with closing(sqlite3.connect(url.removeprefix("sqlite:///"))) as db:
        ((record,),) = db.execute("SELECT record FROM mapstate_records WHERE key = ?", [key])
        return bytes(record)


def in_one_batch(job: Job) -> None:
    """All files that are there come in one batch, so that it is planned otherwise when others have come."""
    files = job.spark.readStream.schema("user_id string, bytes bigint").csv(str(job.visits.input))
    job.visits.stream = lambda spark: files  # type: ignore[method-assign]


def test_the_old_checkpoint_put_back_goes_on(job):
    job.put(2)
    job.run()
    job.put()
    old, job.checkpoint = job.checkpoint, job.folder / "new"
    job.refused(errors.StateOwnershipError, "Restore the old checkpoint")
    job.checkpoint = old
    job.run()
    assert job.is_right()


@pytest.mark.full
def test_a_second_job_takes_a_state_of_another_name(job):
    job.put(2)
    job.run()
    old, job.checkpoint = job.checkpoint, job.folder / "new"
    job.refused(errors.StateOwnershipError, "or name another state")
    job.run(name="second")
    job.checkpoint = old
    job.put()
    job.run()
    assert job.is_right()
    assert contents(job.url, "second") != job.visits.truth()
    job.checkpoint = job.folder / "new"
    job.run(name="second")
    assert contents(job.url, "second") == job.visits.truth()


def test_a_lost_checkpoint_of_files_goes_on_where_the_state_ends(job):
    job.put(3)
    job.run()
    job.put(2)
    job.checkpoint = job.folder / "new"
    rest = job.not_counted()
    job.run(where=rest, on_new_owner="adopt")
    assert job.is_right()
    job.put()
    job.run(where=rest)  # the condition stays for as long as this checkpoint
    assert job.is_right()


@pytest.mark.parametrize("spec", [opaque, pytest.param(transactional, marks=pytest.mark.full)])
def test_a_state_that_is_reset_counts_the_replay_alone(job, spec):
    job.put(3)
    job.run(spec=spec)
    job.put()
    job.checkpoint = job.folder / "new"
    job.refused(errors.StateOwnershipError, "'reset' starts empty", spec=spec)
    job.run(spec=spec, on_new_owner="reset")
    assert job.is_right()


def test_a_first_batch_that_was_never_committed_is_begun_anew(job):
    job.put(2)
    faults = (Fail(method="multi_put", call=1, name="first", error=errors.TooLargeError),)
    backend, job.url = job.url, FaultyBackend(opaque(job.url).backend, str(job.folder), faults)
    with pytest.raises(errors.TooLargeError):
        job.run()
    job.url = backend
    old = job.copy_of_the_checkpoint()
    job.checkpoint = job.folder / "new"
    job.run()  # of an opaque state a new checkpoint takes over what holds nothing
    assert job.is_right()
    job.checkpoint = old
    job.refused(errors.StateOwnershipError, "Its checkpoint is new or another one")


def test_a_non_transactional_state_without_a_batch_is_dropped_and_replayed(job):
    job.put(2)
    backend = job.url
    faults = (Fail(method="multi_put", call=1, name="first", error=errors.StoreFullError),)
    job.url = FaultyBackend(opaque(job.url).backend, str(job.folder), faults)
    with pytest.raises(errors.StoreFullError):
        job.run(spec=non_transactional)
    job.url, job.checkpoint = backend, job.folder / "new"
    with pytest.raises(errors.StateOwnershipError, match="mapstate drop --force"):
        job.run(spec=non_transactional)
    mapstate("drop", job.url, STATE, "--force", "--yes")
    job.run(spec=non_transactional)
    assert job.is_right()


def test_a_store_put_back_from_a_copy_is_right_after_a_rewind(job):
    job.put(2)
    job.run()
    copy = job.copy_of_the_store()
    job.put(2)
    job.run()
    job.url = copy
    job.put()
    job.refused(errors.MissingBatchesError, "Rewind the checkpoint")
    mapstate("rewind", job.url, STATE, job.checkpoint, "--yes")
    job.run()
    assert job.is_right()


@pytest.mark.full
def test_a_store_put_back_from_a_copy_is_right_after_a_reset_and_a_replay(job):
    job.put(2)
    job.run()
    copy = job.copy_of_the_store()
    job.put(2)
    job.run()
    job.url = copy
    job.put()
    job.refused(errors.MissingBatchesError, "Rewind the checkpoint")
    job.checkpoint = job.folder / "new"
    job.run(on_new_owner="reset")
    assert job.is_right()


def test_who_accepts_a_gap_lacks_the_lost_batches_and_nothing_else(job):
    job.put(2)
    job.run()
    copy = job.copy_of_the_store()
    job.put()
    lost = job.visits.rows("3")
    job.run()
    job.url = copy
    job.put()
    job.refused(errors.MissingBatchesError, "on_gap='accept'")
    job.run(on_gap="accept")
    job.put()
    job.run()
    found, truth = contents(job.url, STATE), job.visits.truth()
    for user, size in lost:
        truth[user,] = {"visits": truth[user,]["visits"] - 1, "bytes": truth[user,]["bytes"] - size}
    assert found == {key: value for key, value in truth.items() if value["visits"]}


@pytest.mark.parametrize(
    "way",
    ["newer checkpoint", pytest.param("store of the same moment", marks=pytest.mark.full), "where the state ends"],
)
def test_a_checkpoint_that_is_older_by_more_than_a_batch_is_refused_until_it_is_right(job, way):
    job.put()
    job.run()
    old, store = job.copy_of_the_checkpoint(), job.copy_of_the_store()
    job.put(3)
    job.run()
    newer, job.checkpoint = job.checkpoint, old
    job.put()
    job.refused(errors.StaleBatchError, "See mapstate help operating#after-a-restored-checkpoint")
    if way == "newer checkpoint":
        job.checkpoint = newer
        job.run()
    elif way == "store of the same moment":
        job.url = store
        job.run()
    else:
        job.checkpoint = job.folder / "new"
        job.run(where=job.not_counted(), on_new_owner="adopt")
    assert job.is_right()


@pytest.mark.parametrize(
    "way",
    [
        pytest.param("the checkpoint that last wrote", marks=pytest.mark.full),
        "store from before, and rewind",
        "where it ends",
    ],
)
def test_a_transactional_batch_that_was_planned_anew_is_refused_until_it_is_right(job, way):
    """Spark plans it otherwise: rows have come since, and all that is there goes into one batch."""
    in_one_batch(job)
    job.put()
    job.run(spec=transactional)
    old, store = job.copy_of_the_checkpoint(), job.copy_of_the_store()
    job.put()
    job.run(spec=transactional)
    newer, job.checkpoint = job.checkpoint, old
    job.put()
    job.refused(errors.ReplannedBatchError, "cannot be counted anew", spec=transactional)
    if way == "the checkpoint that last wrote":
        job.checkpoint = newer
        job.run(spec=transactional)
    elif way == "store from before, and rewind":
        job.url = store  # before batch 1, which the message names
        mapstate("rewind", job.url, STATE, job.checkpoint, "--yes")
        job.run(spec=transactional)
    else:
        job.checkpoint = job.folder / "new"
        job.run(spec=transactional, where=job.not_counted(), on_new_owner="adopt")
    assert job.is_right()


@pytest.mark.parametrize(
    "way", ["the checkpoint with that plan", pytest.param("reset and replay", marks=pytest.mark.full)]
)
def test_a_transactional_attempt_that_lost_its_plan_gets_it_back_or_is_replayed(job, way):
    in_one_batch(job)
    job.put()
    job.run(spec=transactional)
    old = job.copy_of_the_checkpoint()
    job.put()
    url, faults = job.url, (Fail(method="multi_put", call=1, name="cut", error=errors.TooLargeError),)
    job.url = FaultyBackend(opaque(url).backend, str(job.folder), faults)
    with pytest.raises(errors.TooLargeError):
        job.run(spec=transactional)
    job.url, newer, job.checkpoint = url, job.checkpoint, old
    job.put()
    job.refused(errors.ReplannedBatchError, "is transactional and has batch 1 in flight", spec=transactional)
    if way == "the checkpoint with that plan":
        job.checkpoint = newer
        job.run(spec=transactional)
    else:
        job.checkpoint = job.folder / "new"
        job.refused(errors.StateOwnershipError, "cannot be adopted", spec=transactional, on_new_owner="adopt")
        job.run(spec=transactional, on_new_owner="reset")
    assert job.is_right()


def test_a_copy_of_a_checkpoint_that_went_its_own_way_is_put_away(job):
    job.put(2)
    job.run()
    other = job.copy_of_the_checkpoint()
    job.put()
    job.run()
    first, job.checkpoint = job.checkpoint, other
    job.visits.put("3", [("other", 1)])  # the copy plans batch 2 with what is there now
    job.run()
    assert job.is_right()
    job.put()
    job.checkpoint = first
    job.refused(errors.ReplannedBatchError, "two copies of one checkpoint")
    job.checkpoint = other
    job.run()
    assert job.is_right()


@pytest.mark.parametrize("way", ["copy and rewind", "recount"])
def test_keys_that_are_missing_come_back_with_a_copy_or_are_written_off(job, way):
    job.put(2)
    job.run()
    copy = job.copy_of_the_store()
    job.put()
    job.run()
    by_another_program(job.url, "DELETE FROM mapstate_records WHERE key = 'u1'")
    with pytest.raises(errors.MissingKeysError, match="how-many-keys"):
        contents(job.url, STATE)
    if way == "copy and rewind":
        job.url = copy
        mapstate("rewind", job.url, STATE, job.checkpoint, "--yes")
        job.put()
        job.run()
        assert job.is_right()
    else:
        assert recount(job.url, STATE, dry_run=True).found == 4
        mapstate("recount", job.url, STATE, "--yes")
        job.put()
        job.run()
        truth = job.visits.truth()
        del truth["u1",]
        assert contents(job.url, STATE) == truth


def test_the_last_batch_taken_back_is_counted_again_after_a_rewind(job):
    job.put(2)
    job.run()
    mapstate("rollback", job.url, STATE, "--yes")
    job.put()
    job.refused(errors.MissingBatchesError, "Rewind the checkpoint")
    mapstate("rewind", job.url, STATE, job.checkpoint, "--yes")
    job.run()
    assert job.is_right()


@pytest.mark.full
@pytest.mark.redis
def test_a_state_moves_to_another_store_by_a_replay(job, redis_url):
    job.put(3)
    job.run()
    job.url, job.checkpoint = redis_url, job.folder / "new"
    job.put()
    job.run()
    assert job.is_right()


def test_a_field_that_is_added_begins_with_the_next_row_of_a_key(job):
    job.put(2)
    job.run()
    job.aggregates["largest"] = Max("bytes")
    job.put()
    job.run()
    found = contents(job.url, STATE)
    assert {key: (each["visits"], each["bytes"]) for key, each in found.items()} == {
        key: (each["visits"], each["bytes"]) for key, each in job.visits.truth().items()
    }
    assert (found["all",]["largest"], found["u1",]["largest"]) == (3, None)


@pytest.mark.full
def test_another_aggregate_takes_another_name_and_a_replay(job):
    job.put(2)
    job.run()
    job.aggregates = {"visits": Count(), "bytes": Max("bytes")}
    job.put()
    job.refused(errors.StateSchemaError, "or name another state, with a new checkpoint")
    job.checkpoint = job.folder / "new"
    job.run(name="largest")
    assert {key: each["visits"] for key, each in contents(job.url, "largest").items()} == {
        key: each["visits"] for key, each in job.visits.truth().items()
    }


@pytest.mark.full
def test_a_state_that_a_job_begins_late_counts_from_there_and_its_past_by_a_query_of_its_own(job):
    job.put(2)
    frame = job.visits.stream(job.spark)
    seen = []

    def run(function: Any) -> None:
        query = frame.writeStream.foreachBatch(function).option("checkpointLocation", str(job.checkpoint))
        query.trigger(availableNow=True).start().awaitTermination(120)

    run(lambda rows, batch_id: seen.append(batch_id))
    job.put()
    with pytest.raises(Exception, match="MissingBatchesError.*on_gap='accept'"):
        run(job.state())
    run(job.state(on_gap="accept"))
    job.put()
    run(job.state())
    late = Visits.__new__(Visits)
    late._files = {name: job.visits.rows(name) for name in ("3", "4")}
    assert contents(job.url, STATE) == late.truth()
    assert seen == [0, 1]
    job.checkpoint = job.folder / "past"
    job.run(name="past")
    assert contents(job.url, "past") == job.visits.truth()


class Site(Job):
    """A topology of two states, which may lie in two stores."""

    stores: tuple[str, ...] = ()

    def run(self, **options: Any) -> None:
        topology = Topology("site")
        stream = topology.newStream("visits", self.visits.stream(self.spark))
        by_user = stream.groupBy("user_id")
        by_user.persistentAggregate(opaque(self.stores[0], STATE, **options), visits=Count(), bytes=Sum("bytes"))
        stream.persistentAggregate(opaque(self.stores[1], "all", **options), visits=Count())
        try:
            topology.start(str(self.checkpoint), trigger=AVAILABLE).awaitTermination(120)
        except Exception as error:
            raise (topology.last_error or error) from error

    def is_right(self) -> bool:
        truth = self.visits.truth()
        found = contents(self.stores[1], "all")[()]["visits"]
        return contents(self.stores[0], STATE) == truth and found == sum(one["visits"] for one in truth.values())


@pytest.fixture(params=[pytest.param(1, marks=pytest.mark.full), 2], ids=["one store", "two stores"])
def site(spark: SparkSession, visits: Visits, tmp_path: Path, request: Any) -> Site:
    one = Site(spark, visits, tmp_path)
    one.stores = (one.url, one.url if request.param == 1 else f"sqlite:///{tmp_path}/second.db")
    return one


@pytest.mark.full
def test_the_last_batch_of_a_topology_is_taken_back_in_all_of_its_states(site):
    site.put(3)
    site.run()
    for url, state in zip(site.stores, (STATE, "all"), strict=True):
        mapstate("rollback", url, state, "--yes")
    mapstate("rewind", site.url, STATE, site.checkpoint, "--yes")
    site.put()
    site.run()
    assert site.is_right()


@pytest.mark.full
def test_states_of_a_topology_in_two_stores_are_reset_together_and_replayed(site):
    site.put(3)
    site.run()
    site.put()
    site.checkpoint = site.folder / "new"
    with pytest.raises(errors.StateOwnershipError):
        site.run()
    site.run(on_new_owner="reset")
    assert site.is_right()


@pytest.mark.parametrize("way", ["one moment", pytest.param("reset", marks=pytest.mark.full)])
def test_states_of_a_topology_that_went_apart_are_restored_from_one_moment_or_reset(site, way):
    if site.stores[0] == site.stores[1]:
        pytest.skip("states of one store do not go apart")
    site.put(2)
    site.run()
    stores = [backup(url) for url in site.stores]
    site.put()
    site.run()
    site.put()
    good = site.stores
    faults = (Fail(method="multi_put", call=1, name="cut", error=errors.TooLargeError),)
    site.stores = (FaultyBackend(opaque(good[0]).backend, str(site.folder), faults), good[1])
    with pytest.raises(errors.TooLargeError):
        site.run()
    site.stores = (good[0], stores[1])  # the second one comes back from a copy, alone
    with pytest.raises(errors.MissingBatchesError, match="Rewind the checkpoint"):
        site.run()
    mapstate("rewind", site.stores[1], "all", site.checkpoint, "--yes")
    with pytest.raises(errors.RollbackError, match="Restore all of them from one moment"):
        site.run()
    if way == "one moment":
        site.stores = tuple(stores)
        mapstate("rewind", site.stores[0], STATE, site.checkpoint, "--yes")
        site.run()
    else:
        site.checkpoint = site.folder / "new"
        site.run(on_new_owner="reset")
    assert site.is_right()


class Chain(Job):
    """A state, and one of all of its users that follows it."""

    def state(self, spec: Callable[..., Any] = opaque, where: Any = None, **options: Any) -> Any:
        first = super().state(spec, where, **options)
        first.newValuesStream().persistentAggregate(
            opaque(self.url, "all", **options), users=Count(), visits=Sum("visits")
        )
        return first

    def is_right(self) -> bool:
        truth = self.visits.truth()
        every = {"users": len(truth), "visits": sum(one["visits"] for one in truth.values())}
        return contents(self.url, STATE) == truth and contents(self.url, "all") == {(): every}


@pytest.fixture
def chain(spark: SparkSession, visits: Visits, tmp_path: Path) -> Chain:
    return Chain(spark, visits, tmp_path)


@pytest.mark.full
def test_states_that_follow_each_other_are_begun_anew_together(chain):
    chain.put(2)
    Job.state(chain).start(chain.checkpoint, trigger=AVAILABLE).awaitTermination(120)  # the second one comes later
    chain.put()
    with pytest.raises(errors.MissingBatchesError, match="state 'all'"):
        chain.run()
    chain.checkpoint = chain.folder / "new"
    chain.run(on_new_owner="reset")
    assert chain.is_right()


@pytest.mark.full
def test_states_that_follow_each_other_are_restored_from_one_moment(chain):
    chain.put(2)
    chain.run()
    store, checkpoint = chain.copy_of_the_store(), chain.copy_of_the_checkpoint()
    chain.put(2)
    chain.run()
    chain.url, chain.checkpoint = store, checkpoint
    chain.put()
    chain.run()
    assert chain.is_right()


@pytest.mark.parametrize("states", [full((STATE, "all")), (STATE,)], ids=["in both", "in the first alone"])
def test_a_state_that_follows_another_is_taken_back_with_it(chain, states):
    """If the checkpoint is the same, the second one notices by itself that the first counts another commit."""
    chain.put(2)
    chain.run()
    for state in states:
        mapstate("rollback", chain.url, state, "--yes")
    mapstate("rewind", chain.url, STATE, chain.checkpoint, "--yes")
    chain.put()
    chain.run()
    assert chain.is_right()


@pytest.mark.full
def test_a_state_that_follows_one_that_was_taken_back_is_taken_back_before_a_new_checkpoint(chain):
    chain.put(2)
    chain.run()
    mapstate("rollback", chain.url, STATE, "--yes")
    rest = chain.not_counted()
    chain.put()
    chain.checkpoint = chain.folder / "new"
    chain.refused(errors.MissingBatchesError, "they would differ for ever", where=rest, on_new_owner="adopt")
    mapstate("rollback", chain.url, "all", "--yes")
    chain.run(where=rest, on_new_owner="adopt")
    assert chain.is_right()


@DATA_SOURCE
@pytest.mark.parametrize("lost", ["restored", pytest.param("reset", marks=pytest.mark.full)])
def test_who_follows_a_state_that_went_back_reads_it_anew(job, lost):
    copy: dict[str, int] = {}

    def follow(checkpoint: str) -> None:
        frame = job.spark.readStream.format("mapstate").option("url", job.url).option("state", STATE).load()

        def keep(rows: Any, _: int) -> None:
            copy.update({row.user_id: row.visits for row in rows.collect()})

        query = frame.writeStream.foreachBatch(keep).option("checkpointLocation", str(job.folder / checkpoint))
        query.trigger(availableNow=True).start().awaitTermination(120)

    job.put(2)
    job.run(changes=1000)
    store = job.copy_of_the_store()
    job.put()
    job.run(changes=1000)
    follow("first")
    if lost == "restored":
        job.url = store
        mapstate("rewind", job.url, STATE, job.checkpoint, "--yes")
        job.put()
        job.run(changes=1000)
    else:
        job.checkpoint = job.folder / "new"
        job.put()
        job.run(changes=1000, on_new_owner="reset")
        with pytest.raises(Exception, match="ChangesGoneError"):
            follow("first")
    copy.clear()
    follow("second")
    assert copy == {key: one["visits"] for (key,), one in job.visits.truth().items()}
    assert job.is_right()


@pytest.mark.parametrize("damage", [full(b"garbage"), b'[9000000000000000,{"visits":1,"bytes":1},null]'])
def test_a_record_that_mapstate_did_not_write_is_restored(job, damage):
    job.put(2)
    job.run()
    good = record_of(job.url, "all")
    by_another_program(job.url, "UPDATE mapstate_records SET record = ? WHERE key = 'all'", damage)
    with pytest.raises((errors.CorruptRecordError, errors.StaleBatchError), match="all"):
        contents(job.url, STATE)
    job.put()
    with pytest.raises((errors.CorruptRecordError, errors.StaleBatchError), match="all"):
        job.run()
    by_another_program(job.url, "UPDATE mapstate_records SET record = ? WHERE key = 'all'", good)
    job.run()
    assert job.is_right()


@pytest.mark.full
def test_a_damaged_ledger_is_dropped_with_its_state_and_the_source_replayed(job):
    job.put(2)
    job.run()
    by_another_program(job.url, "UPDATE mapstate_ledgers SET record = ?", b"{damaged")
    job.put()
    with pytest.raises(errors.CorruptLedgerError):
        job.run()
    mapstate("drop", job.url, STATE, "--force", "--yes")
    job.checkpoint = job.folder / "new"
    job.run()
    assert job.is_right()


def test_a_damaged_file_is_restored_from_a_copy_and_the_checkpoint_rewound(job):
    job.put(2)
    job.run()
    copy = job.copy_of_the_store()
    job.put()
    job.run()
    job.url = f"sqlite:///{job.folder}/damaged.db"  # one that no process has open
    (job.folder / "damaged.db").write_bytes(b"no SQLite file at all" * 500)
    job.put()
    with pytest.raises(errors.CorruptStoreError):
        job.run()
    shutil.copy(copy.removeprefix("sqlite:///"), job.folder / "damaged.db")
    mapstate("rewind", job.url, STATE, job.checkpoint, "--yes")
    job.run()
    assert job.is_right()


class Breaks(CombinerAggregator):
    """Counts, but for a size that it cannot bear."""

    def __init__(self, worst: int | None) -> None:
        self.worst = worst

    def init(self, row: Any) -> int:
        if row["bytes"] == self.worst:
            raise ValueError("too much")
        return 1

    def combine(self, a: int, b: int) -> int:
        return a + b

    def zero(self) -> int:
        return 0

    def __repr__(self) -> str:
        return "Breaks"


def test_a_batch_counts_once_after_an_aggregator_was_repaired(job):
    job.aggregates = {"visits": Breaks(3), "bytes": Sum("bytes")}
    job.put(2)
    job.run()
    job.put()
    job.refused(errors.AggregatorError, "too much")
    job.aggregates["visits"] = Breaks(None)
    job.run()
    assert job.is_right()


@pytest.mark.full
def test_a_sum_that_left_64_bits_is_cast_under_another_name_and_replayed(job):
    most = 2**63 - 1
    job.visits.put("0", [("all", most)])
    job.run()
    job.put()
    job.refused(errors.ValueOverflowError, "64 bits")
    job.aggregates["bytes"] = Sum(F.col("bytes").cast("decimal(38,0)"))
    job.checkpoint = job.folder / "new"
    job.run(name="wider")
    assert contents(job.url, "wider") == job.visits.truth()


def test_a_value_that_does_not_fit_is_changed_by_a_transform(job):
    job.visits.put("0", [("all", 1), ("x" * 100_000, 1)])
    job.url = f"{job.url}?max_value_bytes=1000"

    def run(transform: Callable[[Any], Any]) -> Any:
        longest = newStream(STATE, job.visits.stream(job.spark)).transform(transform)
        state = longest.groupBy(F.lit("k").alias("k")).persistentAggregate(opaque(job.url), longest=Max("user_id"))
        try:
            state.start(job.checkpoint, trigger=AVAILABLE).awaitTermination(120)
        except Exception as error:
            raise (state.last_error or error) from error

    with pytest.raises(errors.TooLargeError):
        run(lambda rows: rows)
    run(lambda rows: rows.withColumn("user_id", F.substring("user_id", 1, 10)))
    assert contents(job.url, STATE) == {("k",): {"longest": "x" * 10}}


class Windows(Job):
    """Counts per ten of ``bytes``, which stand for times."""

    length = 10

    def state(self, spec: Callable[..., Any] = opaque, where: Any = None, **options: Any) -> Any:
        window = TumblingDurationWindow.of(self.length)
        windows = newStream(STATE, self.visits.stream(self.spark)).window(
            window, timestampField="bytes", retention=1_000_000
        )
        return windows.groupBy("user_id").persistentAggregate(spec(self.url, **options), visits=Count())

    def is_right(self, name: str = STATE) -> bool:
        sizes = [size for at in self.visits.names() for _, size in self.visits.rows(at)]
        per_window = Counter(size // self.length * self.length for size in sizes)
        return contents(self.url, name) == {(start, "u"): {"visits": number} for start, number in per_window.items()}


@pytest.fixture
def windows(spark: SparkSession, visits: Visits, tmp_path: Path) -> Windows:
    one = Windows(spark, visits, tmp_path)
    for at in range(3):
        visits.put(f"{at}", [("u", at * 20), ("u", at * 20 + 11)])
    one.run()
    return one


@pytest.mark.full
def test_a_record_of_a_window_that_was_lost_comes_back_with_a_copy_and_a_rewind(windows):
    copy = windows.copy_of_the_store()
    windows.visits.put("3", [("u", 70)])
    windows.run()
    assert windows.is_right()
    by_another_program(windows.url, "DELETE FROM mapstate_records WHERE key = '20|u'")
    with open_reader(windows.url, STATE) as reader, pytest.raises(errors.StoreLostError, match="Restore the store"):
        list(reader.window(30))
    windows.url = copy
    mapstate("rewind", windows.url, STATE, windows.checkpoint, "--yes")
    windows.run()
    assert windows.is_right()


@pytest.mark.full
def test_windows_of_another_length_take_another_name_and_a_replay(windows):
    assert windows.is_right()
    windows.length = 30
    windows.visits.put("3", [("u", 70)])
    with pytest.raises(errors.StateSchemaError):
        windows.run()
    windows.checkpoint = windows.folder / "new"
    windows.run(name="longer")
    assert windows.is_right("longer")


@pytest.mark.redis
def test_a_user_of_the_store_gets_the_right_that_it_lacks_or_its_password(job, start_redis, monkeypatch):
    server = start_redis()
    with server.client() as admin:
        admin.execute_command(
            "ACL", "SETUSER", "writer", "on", ">s3cret", "~*", "+@all", "-hset", "-mset", "-set", "-evalsha", "-eval"
        )
        job.url = server.url.replace("redis://", "redis://writer@") + "?password_env=STORE_PASSWORD"
        job.put(2)
        with pytest.raises(errors.ConfigurationError, match="STORE_PASSWORD, which is not set"):
            job.run(apply_on="driver")
        monkeypatch.setenv("STORE_PASSWORD", "s3cret")
        with pytest.raises(errors.StoreAuthError):
            job.run(apply_on="driver")
        admin.execute_command("ACL", "SETUSER", "writer", "+@all")
    job.run(apply_on="driver")
    assert job.is_right()
