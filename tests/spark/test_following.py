"""``spark.readStream.format("mapstate")``: a stream follows a state by its change log."""

from __future__ import annotations

import json
import random
import signal
from pathlib import Path
from typing import Any

import pytest
from cases import full
from pyspark.errors import PySparkException, StreamingQueryException
from pyspark.sql import functions as F
from spark_fixtures import DATA_SOURCE, run_job
from visits_job import at_last, started

from mapstate import Count, Last, Max, Sum, TumblingDurationWindow, newStream, opaque, open_reader
from mapstate.backends import opened, resolve
from mapstate.errors import ConfigurationError, CorruptStoreError, MapStateError
from mapstate.operations.checkpoint import rewind
from mapstate.operations.doctor import examine
from mapstate.operations.forget import forget
from mapstate.operations.vacuum import vacuum
from mapstate.protocol.ledger import Ledger
from mapstate.protocol.stored_ledger import record_pages
from mapstate.testing import Commits, Fail, FaultyBackend

pytestmark = [pytest.mark.spark, DATA_SOURCE]

NOW = {"availableNow": True}


@pytest.fixture(params=[pytest.param("sqlite", marks=pytest.mark.full), pytest.param("redis", marks=pytest.mark.redis)])
def url(request, tmp_path):
    return f"sqlite:///{tmp_path}/state.db" if request.param == "sqlite" else request.getfixturevalue("redis_url")


@pytest.fixture
def orders(tmp_path):
    """A state of totals by country, and what runs it."""
    return Orders(tmp_path)


class Orders:
    def __init__(self, path: Path):
        self.path = path
        (path / "in").mkdir()
        self.files = 0

    def come(self, *rows):
        (self.path / "in" / f"{self.files:03}.csv").write_text("".join(f"{c},{n}\n" for c, n in rows))
        self.files += 1

    def count(self, spark, url, *, changes=1000, **options):
        source = spark.readStream.schema("country string, n int").option("maxFilesPerTrigger", 1)
        kept = (
            newStream("totals", source.csv(f"{self.path}/in"))
            .groupBy("country")
            .persistentAggregate(opaque(url, changes=changes, **options), total=Sum("n"), orders=Count())
        )
        kept.start(self.path / "checkpoint", trigger=NOW).awaitTermination()


class Copy:
    """What follows: keeps the rows of each micro-batch, in a file, because that is where Spark Connect has them too."""

    def __init__(self, spark, url, path, state="totals", **options):
        self.frame = spark.readStream.format("mapstate").options(url=url, state=state, **options).load()
        self.checkpoint = f"{path}/following"
        self.folder = path / "followed"
        self.folder.mkdir(parents=True, exist_ok=True)

    @property
    def batches(self):
        files = sorted(self.folder.iterdir(), key=lambda file: int(file.name))
        return [{row[0]: (row[1], row[2]) for row in json.loads(file.read_text())} for file in files]

    @property
    def rows(self):
        return {key: row for batch in self.batches for key, row in batch.items()}

    def there(self):
        return {key: row for key, row in self.rows.items() if row != (None, None)}

    def writer(self):
        folder = str(self.folder)

        def take(rows, batch_id):
            came = rows.collect()
            assert len({row[0] for row in came}) == len(came), "a key comes once"
            Path(folder, f"{batch_id}").write_text(json.dumps(came))

        return self.frame.writeStream.foreachBatch(take).option("checkpointLocation", self.checkpoint)

    def catch_up(self):
        at_last(lambda: self.writer().trigger(**NOW).start().awaitTermination())
        return self.batches[-1] if self.batches else None


def contents(url, state="totals"):
    with open_reader(url, state) as reader:
        return {key[0]: tuple(value.values()) for key, value in reader.scan()}


@pytest.mark.parametrize("blocks", [None, full(2)])
def test_a_stream_has_the_state_at_first_and_then_what_each_commit_wrote(blocks, spark, url, orders, tmp_path):
    orders.come(("DE", 1), ("FR", 2))
    orders.count(spark, url, blocks=blocks)
    copy = Copy(spark, url, tmp_path)
    assert copy.frame.dtypes == [("country", "string"), ("total", "bigint"), ("orders", "bigint")]
    assert copy.catch_up() == {"DE": (1, 1), "FR": (2, 1)}
    orders.come(("DE", 10))
    orders.come(("IT", 3), ("DE", 1))
    orders.count(spark, url, blocks=blocks)
    assert copy.catch_up() == {"DE": (12, 3), "IT": (3, 1)}, "not those that nobody wrote, and each once"
    done = len(copy.batches)
    copy.catch_up()
    assert copy.batches[done:] in ([], [{}]), "nothing was written since"
    assert copy.rows == contents(url)
    found = {found.subject: found.severity for found in examine(url, "totals")}
    assert (found["records"], found["keys"]) == ("ok", "ok"), "the log is neither"


def test_a_stream_may_begin_with_what_comes(spark, url, orders, tmp_path):
    orders.come(("DE", 1), ("FR", 2))
    orders.count(spark, url)
    copy = Copy(spark, url, tmp_path, startingFrom="now")
    copy.catch_up()
    assert copy.rows == {}
    orders.come(("IT", 3))
    orders.count(spark, url)
    assert copy.catch_up() == {"IT": (3, 1)}


def test_many_keys_in_many_tasks_and_batches(spark, url, orders, tmp_path):
    orders.come(*((f"c{at}", at) for at in range(9000)))
    orders.count(spark, url)
    copy = Copy(spark, url, tmp_path, numPartitions=3)
    assert len(copy.catch_up()) == 9000
    for some in range(3):
        orders.come(*((f"c{at}", 1) for at in range(some, 9000, 4)))
    orders.count(spark, url)
    assert len(copy.catch_up()) == 6750
    assert copy.rows == contents(url)


def test_a_batch_that_was_rolled_back_is_taken_back(spark, url, orders, tmp_path):
    orders.come(("DE", 1))
    orders.count(spark, url)
    copy = Copy(spark, url, tmp_path)
    copy.catch_up()
    orders.come(("DE", 5), ("FR", 5))
    orders.count(spark, url)
    copy.catch_up()
    Ledger(resolve(url).open("totals"), "totals").rollback()
    rewind(url, "totals", f"{tmp_path}/checkpoint")
    vacuum(url, "totals")
    assert copy.catch_up() == {"DE": (1, 1), "FR": (None, None)}, "a key that is gone has nulls"
    orders.count(spark, url)
    assert copy.catch_up() == {"DE": (6, 2), "FR": (5, 1)}


def test_a_running_stream_follows_a_running_stream(spark, url, orders, tmp_path):
    orders.come(("DE", 1))
    orders.count(spark, url)
    copy = Copy(spark, url, tmp_path)

    def started():
        query = copy.writer().trigger(processingTime="0 seconds").start()
        query.processAllAvailable()
        return query

    query = at_last(started)
    try:
        for at in range(5):
            orders.come((f"c{at}", at), ("DE", at))
            orders.count(spark, url)
            query.processAllAvailable()
            assert copy.rows == contents(url)
    finally:
        query.stop()


def test_who_comes_too_late_is_told(spark, url, orders, tmp_path):
    orders.come(("DE", 1))
    orders.count(spark, url, changes=2)
    copy = Copy(spark, url, tmp_path)
    copy.catch_up()
    for at in range(4):
        orders.come((f"c{at}", at))
    orders.count(spark, url, changes=2)
    with pytest.raises(PySparkException, match="ChangesGoneError"):
        copy.catch_up()


def test_what_cannot_be_followed_is_refused(spark, url, orders, tmp_path):
    orders.come(("DE", 1))
    orders.count(spark, url, changes=None)
    with pytest.raises(PySparkException, match="changes=1000"):
        Copy(spark, url, tmp_path).catch_up()
    for wrong in ({"asOf": "page"}, {"keys": "[]"}, {"startingFrom": "yesterday"}):
        with pytest.raises(PySparkException, match=next(iter(wrong))):
            Copy(spark, url, tmp_path, **wrong).catch_up()
    with pytest.raises(PySparkException, match="readStream"):
        spark.read.format("mapstate").options(url=url, state="totals", startingFrom="now").load().collect()
    windowed = spark.readStream.schema("at timestamp").csv(f"{orders.path}/in")
    with pytest.raises(ConfigurationError, match="no change log"):
        newStream("w", windowed).window(TumblingDurationWindow.of("1 hour"), timestampField="at").persistentAggregate(
            opaque(url, changes=5), n=Count()
        )


def test_a_state_applied_on_the_driver_and_one_that_follows_keep_their_changes(spark, url, orders, tmp_path):
    orders.come(("DE", 1), ("FR", 2))
    source = spark.readStream.schema("country string, n int").csv(f"{orders.path}/in")
    first = (
        newStream("first", source)
        .groupBy("country")
        .persistentAggregate(opaque(url, apply_on="driver", changes=10), orders=Count(), n=Sum("n"))
    )
    second = (
        first.newValuesStream().groupBy("orders").persistentAggregate(opaque(url, name="totals", changes=10), k=Count())
    )
    second.start(tmp_path / "checkpoint", trigger=NOW).awaitTermination()
    for state, expected in (("first", {"DE": 1, "FR": 1}), ("totals", {1: 2})):
        frame = spark.readStream.format("mapstate").options(url=url, state=state).load()
        found = frame.select(F.col(frame.columns[0]), F.col(frame.columns[1])).writeStream.format("memory")
        found = found.queryName(f"found_{state}").trigger(**NOW)
        at_last(lambda found=found: found.start().awaitTermination())
        assert dict(map(tuple, spark.table(f"found_{state}").collect())) == expected


@pytest.mark.parametrize("blocks", [full(None), 2])
def test_a_follower_of_a_seed_begins_with_all_of_it_and_misses_nothing_after(blocks, spark, url, orders, tmp_path):
    orders.come(("DE", 1), ("FR", 2), ("IT", 5))

    def state(backend, *, fails=False):
        source = spark.readStream.schema("country string, n int").csv(f"{orders.path}/in")
        stream = newStream("totals", source).transform(
            lambda df: df.where(F.raise_error(F.lit("no")).cast("boolean")) if fails else df
        )
        spec = opaque(backend, changes=1000, max_attempts=1, blocks=blocks)
        return stream.groupBy("country").persistentAggregate(spec, total=Sum("n"), orders=Count())

    place = str(tmp_path / "checkpoint")
    with pytest.raises(StreamingQueryException):  # the state is there then, and empty
        state(url, fails=True).start(place, trigger=NOW).awaitTermination()
    (tmp_path / "early").mkdir()
    early = Copy(spark, url, tmp_path / "early", startingFrom="now")
    assert not early.catch_up()
    fault = Fail(method="swap", call=4, error=CorruptStoreError, name="dies")
    with pytest.raises(CorruptStoreError):
        state(FaultyBackend(resolve(url), tmp_path, [fault])).seed(place, buckets=2)
    with pytest.raises(PySparkException, match="SeedingError.*being seeded: 0 of 2"):
        Copy(spark, url, tmp_path).catch_up()
    with pytest.raises(PySparkException, match="SeedingError"):
        early.catch_up()
    state(url).seed(place, buckets=2)
    with pytest.raises(PySparkException, match="ChangesGoneError"):
        early.catch_up()
    copy = Copy(spark, url, tmp_path)
    assert copy.catch_up() == contents(url) == {"DE": (1, 1), "FR": (2, 1), "IT": (5, 1)}
    orders.come(("DE", 10), ("ES", 4))
    state(url).start(place, trigger=NOW).awaitTermination()
    assert copy.catch_up() == {"DE": (11, 2), "ES": (4, 1)}
    assert copy.rows == contents(url)


def test_a_state_that_counts_what_another_ones_change_log_brings_is_seeded_with_all_of_it(spark, url, orders, tmp_path):
    orders.come(("DE", 1), ("FR", 2))
    orders.count(spark, url)

    def copied():
        frame = spark.readStream.format("mapstate").options(url=url, state="totals").load()
        rows = newStream("copied", frame).groupBy("country")
        return rows.persistentAggregate(
            opaque(url, name="copied"), total=Last("total", by="orders"), orders=Max("orders")
        )

    place = str(tmp_path / "of-copy")
    assert copied().seed(place, buckets=2).rows == 2
    assert contents(url, "copied") == contents(url)
    orders.come(("DE", 10), ("ES", 4))
    orders.count(spark, url)
    copied().start(place, trigger=NOW).awaitTermination()
    assert contents(url, "copied") == contents(url) == {"DE": (11, 2), "FR": (2, 1), "ES": (4, 1)}


class Version:
    """A state with a change log, and three who follow it, more or less often."""

    def __init__(self, spark, url, folder, name, blocks):
        self.spark, self.url, self.folder, self.name, self.blocks = spark, url, folder, name, blocks
        self.faults = 0
        self.open()
        self.batch([("u1", 1)], 0)
        with open_reader(url, name) as reader:
            self.copies = [dict(reader.scan()) for _ in range(3)]
            self.positions = [reader.position() for _ in range(3)]

    def open(self, *faults, **options):
        """As a driver does that is started again."""
        self.faults += 1
        folder = self.folder / f"{self.name}-{self.faults}"
        folder.mkdir()
        backend = FaultyBackend(resolve(self.url), folder, faults)
        spec = opaque(backend, self.name, blocks=self.blocks, changes=1000, **options)
        rows = newStream("rows", self.spark.createDataFrame([], ROWS)).groupBy("user_id")
        self.state = rows.persistentAggregate(spec, total=Sum("n"), most=Max("n"))

    def batch(self, rows, batch_id):
        self.state(self.spark.createDataFrame(rows, ROWS).repartition(3), batch_id)

    def fails(self, rows, batch_id, fault):
        self.open(fault, max_attempts=1, patience=0)
        with pytest.raises(MapStateError, match="a test's fault"):
            self.batch(rows, batch_id)
        self.open()

    def roll_back(self):
        Ledger(resolve(self.url).open(self.name), self.name).rollback()
        self.open()

    def vacuum(self):
        vacuum(self.url, self.name, take_over=True)
        self.open()

    def forget(self, user, name):
        return forget(self.url, self.name, {"user_id": user}, id=name).keys

    def correct(self, rows, name):
        return self.state.correct(id=name, add=self.spark.createDataFrame(rows, ROWS)).keys

    def follow(self, at, unsure=()):
        """The keys that changed since, which one of those who follow reads, but for keys of which nobody is sure."""
        with open_reader(self.url, self.name) as reader:
            start, self.positions[at] = self.positions[at], reader.position()
            keys = reader.changed_keys(start, self.positions[at])
            assert len({*keys}) == len(keys)
            for key, value in zip(keys, reader.multi_get(keys), strict=True):
                self.copies[at].pop(key, None)
                if value is not None:
                    self.copies[at][key] = value
            assert self.copies[at] == dict(reader.scan())
        return sorted((key for key in keys if key not in unsure), key=repr)


def test_a_key_of_a_block_that_is_forgotten_is_named_until_followers_have_read_of_it(spark, url, orders, tmp_path):
    def named():
        with opened(resolve(url), "totals") as store:
            pages = [page for page in record_pages(store, 1000, index=True) if page]
            return [
                key for page in pages for key, data in zip(page, store.multi_get(page), strict=True) if b"DE" in data
            ]

    orders.come(("DE", 1), ("FR", 2), ("IT", 3))
    orders.count(spark, url, blocks=1)
    copy, late = Copy(spark, url, tmp_path), Copy(spark, url, tmp_path / "late")
    assert copy.catch_up() == late.catch_up() == {"DE": (1, 1), "FR": (2, 1), "IT": (3, 1)}
    done = forget(url, "totals", {"country": "DE"}, id="ticket")
    assert done.keys == 1
    assert done.log_until is not None
    assert copy.catch_up() == {"DE": (None, None)}, "and no other key of its block"
    assert len(named()) == 2, "the logs of its batch and of its removal"
    assert forget(url, "totals", {"country": "DE"}, id="ticket", followers_have=0).log_until is None
    assert named() == []
    with pytest.raises(PySparkException, match="ChangesGoneError"):
        late.catch_up()
    orders.come(("DE", 5))
    orders.count(spark, url, blocks=1)
    assert copy.catch_up() == {"DE": (5, 1)}
    assert copy.there() == contents(url)


ROWS = "user_id string, n bigint"
USERS = [None, "a|b", "line\nfeed", "é", *(f"u{at}" for at in range(12))]


@pytest.mark.parametrize("seed", [0, *map(full, range(1, 20))])
def test_the_changes_of_blocks_are_those_of_a_record_per_key(seed, spark, url, tmp_path):
    chance = random.Random(seed)
    both = [Version(spark, url, tmp_path, f"v{blocks}", blocks) for blocks in (None, chance.choice((1, 4)))]
    last, can_roll_back, unsure, forgotten = 0, True, [set(), set(), set()], set()

    def in_both(act, *given):
        first, second = (act(one, *given) for one in both)
        assert first == second, (seed, act, given)

    def rows():
        return [(chance.choice(USERS), chance.choice((None, 1, -3, 2**40))) for _ in range(chance.choice((1, 4, 30)))]

    def one_step(kind, name):
        """The last batch after it, and whether that may be rolled back."""
        if kind == "batch" or (kind == "roll back" and not (can_roll_back and last)):
            in_both(Version.batch, rows(), last + 1)
            return last + 1, True
        if kind == "roll back":
            if chance.random() < 0.5:
                in_both(Version.follow, 0, unsure[0])  # and so has seen what is taken back now
                unsure[0] = set()
            in_both(Version.roll_back)
            return last - 1, False
        if kind == "fails":
            came = rows()
            fault = chance.choice(
                (
                    Fail(method="multi_put", call=1, times=None),  # nothing is there
                    Fail(method="multi_put", call=2, times=None),  # all records and no log
                    Fail(method="swap", where=Commits(last + 1), error=CorruptStoreError),  # all
                    Fail(method="multi_put", call=1),  # what one task wrote, and not the other
                )
            )
            in_part = bool(fault.times) and fault.method == "multi_put"
            if in_part:
                unsure[:] = [keys | {(user,) for user, _ in came} for keys in unsure]
            in_both(Version.fails, came, last + 1, fault)
            if in_part or chance.random() < 0.7:  # else it comes again and again, until a commit
                in_both(Version.batch, rows(), last + 1)  # the replay has other rows
                return last + 1, True
        else:
            user, known = chance.choice(USERS), [row for row in rows() if row[0] not in forgotten]
            forgotten.update({user} if kind == "forget" else ())
            given = {"vacuum": (), "forget": (user, name), "correct": (known or [("new", 1)], name)}
            in_both(getattr(Version, kind), *given[kind])
        return last, False

    for step in range(12):
        kind = chance.choice(["batch", "batch", "batch", "fails", "fails", "roll back", "vacuum", "forget", "correct"])
        last, can_roll_back = one_step(kind, f"{kind}-{step}")
        for at in range(3):
            if chance.random() < 0.5:
                in_both(Version.follow, at, unsure[at])
                unsure[at] = set()
    for at in range(3):
        in_both(Version.follow, at, unsure[at])
    assert contents(url, both[0].name) == contents(url, both[1].name)


KILLS: dict[str, dict[str, Any]] = {
    "before the log's put": {"method": "multi_put", "call": 2},
    "after the log's put": {"method": "multi_put", "call": 2, "after": True},
    "before the removal": {"method": "multi_rewrite"},
    "after the removal": {"method": "multi_rewrite", "after": True},
    "before the commit": {"method": "swap", "where": "Commits"},
    "after the commit": {"method": "swap", "where": "Commits", "after": True},
}


@pytest.mark.slow
@pytest.mark.redis
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("number", "blocks"), [full(1, None), (1, 3), full(len(KILLS), None), full(len(KILLS), 3)], ids=str
)
def test_a_copy_is_right_whenever_the_driver_is_killed_and_replays_other_rows(
    number, blocks, spark, visits, tmp_path, redis_url
):
    url, steps = redis_url, random.sample(list(KILLS), number)
    options = {"url": url, "input": str(visits.input), "checkpoint": str(visits.checkpoint), "changes": 3}
    options["blocks"] = blocks
    for at in range(4):
        visits.put(f"{at}", [(f"u{at}", at), ("all", 1)])
    assert started(spark, options).awaitTermination(240)
    copy = Copy(spark, url, tmp_path, state="visits")
    copy.catch_up()
    for at, step in enumerate(steps):
        batch, fields = 4 + at, KILLS[step]
        where = {"where": ["Commits", batch]} if "where" in fields else {}
        folder = tmp_path / f"kill-{at}"
        folder.mkdir()
        visits.put(f"{batch}", [(f"before-{at}", 1)])
        fault = ["Kill", {"who": "driver", **fields, **where}]
        died = run_job(options | {"folder": str(folder), "faults": [fault]})
        assert died.returncode == -signal.SIGKILL, (steps, step, died.stderr[-2000:])
        copy.catch_up()
        assert copy.there() == contents(url, "visits"), (steps, step)
        if step != "after the commit":
            visits.put(f"{batch}", [(f"instead-{at}", 2)])
        assert started(spark, options).awaitTermination(240), (steps, step)
        copy.catch_up()
        assert copy.there() == contents(url, "visits"), (steps, step)
    assert contents(url, "visits") == {key[0]: tuple(value.values()) for key, value in visits.truth().items()}
