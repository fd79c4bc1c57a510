"""An option that another start of a job changes, on a state that exists: one test for each row of the page's table."""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import redis
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession
from spark_fixtures import AVAILABLE, contents, finish
from states import Job

from mapstate import (
    Count,
    SessionWindow,
    SlidingCountWindow,
    TumblingCountWindow,
    TumblingDurationWindow,
    newStream,
    non_transactional,
    opaque,
    open_reader,
    transactional,
)
from mapstate.errors import (
    ChangesGoneError,
    ConfigurationError,
    MissingBatchesError,
    StateOwnershipError,
    StateSchemaError,
    TooLargeError,
    UsageError,
)
from mapstate.operations.vacuum import vacuum
from mapstate.reader.changes import asked_for, position_of

PAGE = Path(__file__).resolve().parents[2] / "docs" / "operating.md"


class Restarts(NamedTuple):
    """A store, and a job that each call starts anew."""

    spark: SparkSession
    redis: str
    sqlite: str
    log: pytest.LogCaptureFixture
    folder: Path

    def keep(self, spec: Any, batch_id: int, *keys: str) -> dict[str, int]:
        """A start with this spec, one batch, and what the state holds then."""
        frame = self.spark.createDataFrame([(key,) for key in keys], "k string")
        newStream("s", frame).groupBy("k").persistentAggregate(spec, n=Count())(frame, batch_id)
        return {key[0]: row["n"] for key, row in contents(spec.backend, "s").items()}

    def windows(self, batch_id: int, *times: int, config: Any = None, spec: Any = None, **options: Any) -> list[int]:
        """The same with windows of ten by a ``bigint``; the ends of those that the batch fired."""
        fired: list[int] = []
        frame = self.spark.createDataFrame([(at,) for at in times], "at bigint")
        given: Any = {"timestampField": "at", "retention": 1000} | options
        stream = newStream("s", frame).window(config or TumblingDurationWindow.of(10), **given)
        counts = stream.persistentAggregate(spec or opaque(self.sqlite, "s"), n=Count())
        counts.firedWindowsStream().foreachBatch(
            lambda rows, _: fired.extend(row["window_end"] for row in rows.collect())
        )
        counts(frame, batch_id)
        return sorted(fired)

    def late(self) -> int | None:
        with open_reader(self.sqlite, "s") as reader:
            return reader.reports()[0].rows_late

    def warned(self) -> list[str]:
        """What the starts since the last call have warned of."""
        records = [record for record in self.log.records if record.name == "mapstate" and record.levelname == "WARNING"]
        said = [record.getMessage() for record in records]
        self.log.clear()
        return said

    def expires(self, key: str) -> bool:
        place = re.search(r"prefix=([^&]+)", self.redis)
        assert place is not None
        with redis.Redis.from_url(self.redis.partition("?")[0]) as client:
            return bool(client.pttl(f"{place[1]}s:{key}") > 0)

    def expire(self, key: str) -> None:
        """What the server does at the end of a ttl."""
        place = re.search(r"prefix=([^&]+)", self.redis)
        assert place is not None
        with redis.Redis.from_url(self.redis.partition("?")[0]) as client:
            assert client.pttl(f"{place[1]}s:{key}") > 0
            client.delete(f"{place[1]}s:{key}")


@pytest.fixture
def job(spark, redis_url, tmp_path, caplog) -> Restarts:
    caplog.set_level("WARNING", "mapstate")
    return Restarts(spark, redis_url, f"sqlite:///{tmp_path}/s.db", caplog, tmp_path)


Row = Callable[[Restarts], None]
ROWS: dict[str, Row] = {}


def row(text: str) -> Callable[[Row], Row]:
    """The test of one row of the table, by its first cell."""

    def add(test: Row) -> Row:
        ROWS[text] = test
        return test

    return add


@row("`name`, `prefix`, or another store")
def _(job: Restarts) -> None:
    job.keep(opaque(job.redis, "s"), 0, "a")
    for other in (opaque(job.redis, "t"), opaque(job.redis + "other/", "s"), opaque(job.sqlite, "s")):
        with pytest.raises(MissingBatchesError, match="there is no state .* here yet"):
            job.keep(other, 1, "a")
    assert job.keep(opaque(job.redis, "s"), 1, "a") == {"a": 2}


@row("the type of the state")
def _(job: Restarts) -> None:
    job.keep(opaque(job.sqlite, "s"), 0, "a")
    for other in (transactional, non_transactional):
        with pytest.raises(StateSchemaError, match="has the type opaque"):
            job.keep(other(job.sqlite, "s"), 1, "a")
    assert job.keep(opaque(job.sqlite, "s"), 1, "a") == {"a": 2}


@row("`serializer`, `blocks`")
def _(job: Restarts) -> None:
    job.keep(opaque(job.sqlite, "s"), 0, "a")
    with pytest.raises(StateSchemaError, match="has the serializer json"):
        job.keep(opaque(job.sqlite, "s", serializer="msgpack"), 1, "a")
    with pytest.raises(StateSchemaError, match="the job asks for blocks:7"):
        job.keep(opaque(job.sqlite, "s", blocks=7), 1, "a")
    assert job.keep(opaque(job.sqlite, "s"), 1, "a") == {"a": 2}


@row("`ttl` is put in")
def _(job: Restarts) -> None:
    job.keep(opaque(job.redis, "s"), 0, "a", "b")
    assert not job.warned()
    job.keep(opaque(job.redis, "s", ttl=3600), 1, "b", "c")
    assert [job.expires(key) for key in "abc"] == [False, True, True]
    (said,) = job.warned()
    assert "state s: ttl was none and is 3600 s: a record keeps" in said
    job.keep(opaque(job.redis, "s", ttl=3600), 2, "c")
    assert not job.warned()


@row("`ttl` is another number")
def _(job: Restarts) -> None:
    job.keep(opaque(job.redis, "s", ttl=3600), 0, "a")
    assert not job.warned()
    job.keep(opaque(job.redis, "s", ttl=7200.5), 1, "b")
    assert [said.partition(": a record")[0] for said in job.warned()] == ["state s: ttl was 3600 s and is 7200.5 s"]


@row("`ttl` is left out")
def _(job: Restarts) -> None:
    for keep in (opaque, transactional, non_transactional):
        job = job._replace(redis=job.redis + keep.__name__ + "/")
        job.keep(keep(job.redis, "s", ttl=3600), 0, "a")
        with pytest.raises(StateSchemaError, match=r"go on expiring unseen\. Nothing was .* ttl=3600, or with ttl=0"):
            job.keep(keep(job.redis, "s"), 1, "b")
        assert job.keep(keep(job.redis, "s", ttl=3600), 1, "a") == {"a": 2}
        with pytest.raises(StateSchemaError, match="go on expiring"):  # it says so at each start
            job.keep(keep(job.redis, "s"), 2, "b")


@row("`ttl=0`")
def _(job: Restarts) -> None:
    with_ttl, ended = opaque(job.redis, "s", ttl=3600), opaque(job.redis, "s", ttl=0)
    job.keep(with_ttl, 0, "a", "b", "c")
    assert job.keep(ended, 1, "b", "d") == {"a": 1, "b": 2, "c": 1, "d": 1}
    assert [job.expires(key) for key in "abcd"] == [True, False, True, False]
    said = job.warned()
    assert len(said) == 2
    assert "ttl was 3600 s and is ended" in said[0]
    assert "still expire, and count from nothing then" in said[1]
    job.expire("a")
    assert job.keep(ended, 2, "a")["a"] == 1  # as it said
    assert len(job.warned()) == 2
    with pytest.raises(StateSchemaError, match="expiring unseen"):
        job.keep(opaque(job.redis, "s"), 3, "c")
    assert vacuum(job.redis, "s").rewritten == 4
    assert not any(map(job.expires, "abcd"))
    with open_reader(job.redis, "s") as reader:
        assert (reader.ledger().has_had_ttl, reader.key_count()) == (False, 4)
    assert job.keep(ended, 3, "c") == {"a": 1, "b": 2, "c": 2, "d": 1}
    assert job.keep(opaque(job.redis, "s"), 4, "c")["c"] == 3
    assert not job.warned()


@row("`apply_on`, `partial_aggregation`, `chunk_size`, `chunk_bytes`, `max_attempts`, `patience`")
def _(job: Restarts) -> None:
    job.keep(opaque(job.sqlite, "s"), 0, *"abc")
    changed = [{"apply_on": "driver"}, {"partial_aggregation": "never"}, {"chunk_size": 1}, {"chunk_bytes": 1}]
    for batch_id, options in enumerate([*changed, {"max_attempts": 1}, {"patience": 0}], 1):
        found = job.keep(opaque(job.sqlite, "s", **options), batch_id, *"abcd")
        assert found == dict.fromkeys("abc", batch_id + 1) | {"d": batch_id}
    assert not job.warned()


@row("`on_new_owner`, `on_gap`")
def _(job: Restarts) -> None:
    job.keep(opaque(job.sqlite, "s"), 0, "a")
    assert job.keep(opaque(job.sqlite, "s", on_new_owner="reset"), 1, "a") == {"a": 2}  # the same query
    with pytest.raises(MissingBatchesError):
        job.keep(opaque(job.sqlite, "s"), 3, "a")
    assert job.keep(opaque(job.sqlite, "s", on_gap="accept"), 3, "a") == {"a": 3}
    (job.folder / "in").mkdir()
    (job.folder / "in" / "1.csv").write_text("a\n")
    rows = job.spark.readStream.schema("k string").csv(str(job.folder / "in"))

    def run(**options: Any) -> None:
        state = opaque(job.sqlite, "s", **options)
        counts = newStream("s", rows).groupBy("k").persistentAggregate(state, n=Count())
        try:
            finish(counts.start(str(job.folder / "checkpoint"), trigger=AVAILABLE))
        except StreamingQueryException as error:
            raise (counts.last_error or error) from error

    with pytest.raises(StateOwnershipError):
        run()
    run(on_new_owner="reset")
    assert contents(job.sqlite, "s") == {("a",): {"n": 1}}


def _changes(job: Restarts, kept: int | None, batch_id: int) -> Any:
    job.keep(opaque(job.sqlite, "s", changes=kept), batch_id, "a")
    with open_reader(job.sqlite, "s") as reader:
        return reader.ledger()


@row("`changes` is higher")
def _(job: Restarts) -> None:
    first = _changes(job, 1, 0)
    for batch_id in (1, 2, 3):
        _changes(job, 1, batch_id)
    assert not job.warned()
    ledger = _changes(job, 9, 4)
    (said,) = job.warned()
    assert "changes was 1 and is 9: transactions that are gone stay away" in said
    with pytest.raises(ChangesGoneError):
        asked_for(ledger, position_of(first), position_of(ledger))
    for batch_id in (5, 6, 7):
        later = _changes(job, 9, batch_id)
    assert len(asked_for(later, position_of(ledger), position_of(later))) == 3


@row("`changes` is lower")
def _(job: Restarts) -> None:
    first = _changes(job, 9, 0)
    for batch_id in (1, 2):
        second = _changes(job, 9, batch_id)
    assert len(asked_for(second, position_of(first), position_of(second))) == 2
    ledger = _changes(job, 1, 3)
    with pytest.raises(ChangesGoneError):
        asked_for(ledger, position_of(first), position_of(ledger))
    assert ledger.changes.removed > first.last_txid
    assert not job.warned()


@row("`changes` is left out")
def _(job: Restarts) -> None:
    _changes(job, 9, 0)
    with pytest.raises(StateSchemaError, match="those who follow it would miss keys"):
        _changes(job, None, 1)


@row("`changes=0`")
def _(job: Restarts) -> None:
    _changes(job, 9, 0)
    with pytest.raises(UsageError, match="keeps no changes"):
        position_of(_changes(job, 0, 1))
    _changes(job, None, 2)


@row("`layout`, `buckets`")
def _(job: Restarts) -> None:
    packed = f"{job.redis}&layout=packed&buckets="
    job.keep(opaque(f"{packed}4", "s"), 0, "a")
    for other in (job.redis, f"{job.redis}&layout=hash", f"{packed}5"):
        with pytest.raises(ConfigurationError, match="was made with layout packed, 4 buckets"):
            job.keep(opaque(other, "s"), 1, "a")
    assert job.keep(opaque(f"{packed}4", "s"), 1, "a") == {"a": 2}


@row("`records`")
def _(job: Restarts) -> None:
    place, _, prefix = job.redis.partition("prefix=")
    own, other = f"{place}records={prefix}own:", f"{place}records={prefix}other:"
    job.keep(opaque(own, "s"), 0, "a")
    for changed in (other, job.redis):
        with pytest.raises(MissingBatchesError, match="there is no state 's' here yet"):
            job.keep(opaque(changed, "s"), 1, "a")
    assert job.keep(opaque(own, "s"), 1, "a") == {"a": 2}


@row("timeouts, `retries`, `batch_size`, `synchronous`, login, TLS")
def _(job: Restarts) -> None:
    job.keep(opaque(job.redis, "s"), 0, "a")
    for batch_id, more in enumerate(("socket_timeout=9", "socket_connect_timeout=9", "retries=1"), 1):
        assert job.keep(opaque(f"{job.redis}&{more}", "s"), batch_id, "a") == {"a": batch_id + 1}
    job.keep(opaque(job.sqlite, "s"), 0, "a")
    for batch_id, more in enumerate(("timeout=9", "synchronous=normal"), 1):
        assert job.keep(opaque(f"{job.sqlite}?{more}", "s"), batch_id, "a") == {"a": batch_id + 1}
    assert not job.warned()


@row("`max_value_bytes` is lower")
def _(job: Restarts) -> None:
    job.keep(opaque(job.sqlite, "s"), 0, "a" * 30, "b")
    assert job.keep(opaque(job.sqlite, "s"), 1, "b") == {"a" * 30: 1, "b": 2}
    with pytest.raises(TooLargeError, match="this store takes at most 5"):
        job.keep(opaque(f"{job.sqlite}?max_value_bytes=5", "s"), 2, "b")
    assert contents(job.sqlite, "s") == {("a" * 30,): {"n": 1}, ("b",): {"n": 2}}


@row("length, slide or `startTime` of windows, gap of sessions")
def _(job: Restarts) -> None:
    job.windows(0, 5, 25)
    for config, options in (
        (TumblingDurationWindow.of(20), {}),
        (None, {"startTime": 5}),
        (SessionWindow.of(10), {}),
        (None, {"timestampField": None, "config": TumblingDurationWindow.of("10 seconds"), "retention": "1 hour"}),
    ):
        with pytest.raises(StateSchemaError, match="Nothing was written"):
            job.windows(1, 45, **{"config": config} | options)
    assert job.windows(1, 45, startTime=30) == [30]  # the same windows
    sessions = opaque(job.sqlite, "sessions")
    job.windows(0, 5, config=SessionWindow.of(10), spec=sessions)
    with pytest.raises(StateSchemaError, match="gap 10"):
        job.windows(1, 5, config=SessionWindow.of(11), spec=sessions)


@row("windows by number of rows: length or slide")
def _(job: Restarts) -> None:
    frame = job.spark.createDataFrame([("a",)] * 3, "k string")

    def keep(config: Any, batch_id: int) -> None:
        counts = (
            newStream("s", frame).window(config).groupBy("k").persistentAggregate(opaque(job.sqlite, "s"), n=Count())
        )
        counts(frame, batch_id)

    keep(SlidingCountWindow.of(4, 2), 0)
    for other in (SlidingCountWindow.of(6, 2), SlidingCountWindow.of(4, 1), TumblingCountWindow.of(4)):
        with pytest.raises(StateSchemaError, match="has the field"):
            keep(other, 1)
    keep(SlidingCountWindow.of(4, 2), 1)


@row("`lag` is longer")
def _(job: Restarts) -> None:
    assert job.windows(0, 5, 25) == [10]
    assert job.windows(1, 5, 26, lag=20) == []
    assert job.late() == 1
    (said,) = job.warned()
    assert "lag is longer: windows that have fired stay fired" in said
    assert job.windows(2, 22, 45, lag=20) == []
    assert job.late() == 0
    assert job.windows(3, 51, lag=20) == [30]
    assert not job.warned()


@row("`lag` is shorter")
def _(job: Restarts) -> None:
    assert job.windows(0, 5, 25, lag=20) == []
    assert job.windows(1, 25) == [10]
    assert not job.warned()


@row("`retention` is longer")
def _(job: Restarts) -> None:
    job.windows(0, 5, 25, retention=10)
    job.windows(1, 45, retention=10)
    job.windows(2, 65, retention=10)  # a begin removes by the watermark before it
    assert not job.warned()
    job.windows(3, 66, retention=1000)
    (said,) = job.warned()
    assert "retention is longer: windows that were removed stay away" in said
    with open_reader(job.sqlite, "s") as reader:
        assert [window.end for window in reader.windows(())] == [50, 70]


@row("`retention` is shorter")
def _(job: Restarts) -> None:
    job.windows(0, 5, 25)
    job.windows(1, 45)
    with open_reader(job.sqlite, "s") as reader:
        assert [window.end for window in reader.windows(())] == [10, 30, 50]
        job.windows(2, 46, retention=0)
        assert [window.end for window in reader.windows(())] == [50]
    assert not job.warned()


@row("rolling windows: a window more")
def _(job: Restarts) -> None:
    def spent(batch_id: int, *windows: tuple[int, int]) -> Any:
        frame = job.spark.createDataFrame([(5 + 100 * batch_id,)], "at bigint")
        stream = newStream("s", frame).rollingWindows(*windows, timestampField="at")
        stream.persistentAggregate(opaque(job.sqlite, "s"), n=Count())(frame, batch_id)
        with open_reader(job.sqlite, "s") as reader:
            return reader.get(())

    for batch_id in range(3):
        spent(batch_id, (1000, 10))
    with pytest.raises(StateSchemaError, match="does not keep where 2000 begins"):
        spent(3, (1000, 10), (2000, 10))
    assert spent(3, (1000, 10), (200, 20)) == {"n_1000": 4, "n_200": 3}


@row("`idle`, `ahead`")
def _(job: Restarts) -> None:
    now = dt.datetime.now(dt.UTC)

    def mark(batch_id: int, minutes: int, **options: Any) -> float:
        rows = job.spark.createDataFrame([(now + dt.timedelta(minutes=minutes),)], "at timestamp")
        stream = newStream("s", rows).tumblingWindow("1 minute", timestampField="at", **options)
        stream.persistentAggregate(opaque(job.sqlite, "s"), n=Count())(rows, batch_id)
        with open_reader(job.sqlite, "s") as reader:
            found: Any = reader.watermark().time
        return float((found - now).total_seconds() / 60)

    assert mark(0, -60) == -60
    assert mark(1, 30) == -60  # beyond the clock
    assert -1 < mark(2, 30, ahead="1 hour") < 10  # the clock's
    assert mark(3, -60, ahead="1 hour", idle="1 hour") < 10
    assert not job.warned()


@row("`inputs`")
def _(job: Restarts) -> None:
    def mark(batch_id: int, *rows: tuple[int, str], inputs: list[str]) -> Any:
        frame = job.spark.createDataFrame([*rows], "at bigint, source string")
        stream = newStream("s", frame).tumblingWindow(10, timestampField="at", inputs={"source": inputs})
        stream.persistentAggregate(opaque(job.sqlite, "s"), n=Count())(frame, batch_id)
        with open_reader(job.sqlite, "s") as reader:
            return reader.watermark().time

    assert mark(0, (25, "web"), (15, "app"), inputs=["web", "app"]) == 15
    assert mark(1, (40, "web"), (30, "app"), inputs=["web", "app", "new"]) == 15
    assert mark(2, (28, "new"), inputs=["web", "app", "new"]) == 28
    assert mark(3, (40, "web"), inputs=["web"]) == 40


@row("`timestampField`, `orderBy`")
def _(job: Restarts) -> None:
    def fired(batch_id: int, column: str) -> list[int]:
        found: list[int] = []
        frame = job.spark.createDataFrame([(5 + 20 * batch_id, 100 + 20 * batch_id)], "at bigint, other bigint")
        stream = newStream("s", frame).tumblingWindow(10, timestampField=column)
        counts = stream.persistentAggregate(opaque(job.sqlite, "s"), n=Count())
        counts.firedWindowsStream().foreachBatch(
            lambda rows, _: found.extend(one["window_end"] for one in rows.collect())
        )
        counts(frame, batch_id)
        return found

    assert fired(0, "at") == []
    assert fired(1, "other") == [10]


@row("`ticks`")
def _(job: Restarts) -> None:
    (job.folder / "in").mkdir()
    (job.folder / "in" / "1.csv").write_text("a\n")
    rows = job.spark.readStream.schema("k string").csv(str(job.folder / "in"))

    def run(*, ticks: bool) -> None:
        counts = newStream("s", rows, ticks=ticks).groupBy("k").persistentAggregate(opaque(job.sqlite, "s"), n=Count())
        query = counts.start(str(job.folder / "checkpoint"), trigger=AVAILABLE)
        finish(query)

    run(ticks=False)
    (job.folder / "in" / "2.csv").write_text("a\n")
    with pytest.raises(StreamingQueryException, match="sources"):
        run(ticks=True)
    run(ticks=False)
    assert contents(job.sqlite, "s") == {("a",): {"n": 2}}


WITHOUT_SPARK = {"`bin`", "`claim_ttl`"}  # by the stand-in of Aerospike, which lives in one process


@pytest.mark.spark
@pytest.mark.redis
@pytest.mark.parametrize("text", ROWS)
def test_an_option_that_changes_on_a_state_that_exists_does_what_its_row_says(text, job):
    ROWS[text](job)


def test_a_bin_that_changes_on_a_state_that_exists_is_refused(stand_in):
    backend = stand_in.backend()
    Job(backend).batch(a=1)
    for other in ("new", "records"):
        with pytest.raises(ConfigurationError, match=f"in the bin 'record', and the URL says '{other}'"):
            Job(replace(backend, bin=other))
    again = Job(backend)
    again.batch(a=2)


def test_a_claim_ttl_that_changes_is_that_of_new_claims(stand_in):
    backend = stand_in.backend()
    job = Job(backend)
    job.batch(a=1)
    changed = Job(replace(backend, claim_ttl=5))
    assert changed.store.claim(1, 0, "me") == "me"
    changed.batch(a=2)


def test_each_row_of_the_table_has_a_test():
    table = PAGE.read_text().partition("## Options that change")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (.+?) \| .+ \|$", table, re.MULTILINE)
    assert set(rows[1:]) == ROWS.keys() | WITHOUT_SPARK


@pytest.mark.spark
def test_the_longest_durations_that_are_accepted_run_through_batches(spark, tmp_path):
    url, longest, units = f"sqlite:///{tmp_path}/s.db", "3652500 days", 2**61
    for name, kind, options in (
        ("of-time", "timestamp", {"lag": longest, "retention": longest, "idle": longest, "ahead": longest}),
        ("of-units", "bigint", {"lag": units, "retention": units, "startTime": units}),
        ("of-one-window", "bigint", {"lag": 0, "retention": 0}),
    ):
        length = "1 hour" if kind == "timestamp" else units if name == "of-one-window" else 10
        for batch_id, at in enumerate((5, 10**9, 2**60)):
            time = dt.datetime.fromtimestamp(min(at, 10**10), dt.UTC) if kind == "timestamp" else at
            frame = spark.createDataFrame([(time,)], f"at {kind}")
            windows = newStream("s", frame).tumblingWindow(length, timestampField="at", **options)
            windows.persistentAggregate(opaque(url, name, patience=10**10), n=Count())(frame, batch_id)
        with open_reader(url, name) as reader:
            assert sum(report.rows - (report.rows_late or 0) for report in reader.reports()) == 3
