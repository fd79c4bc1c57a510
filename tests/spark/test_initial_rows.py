"""A history from another place than the stream: both meet exactly, or the seed is refused and nothing is written."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cases import full
from partitioned_log import SCHEMA, PartitionedLog
from spark_fixtures import AVAILABLE, DATA_SOURCE, ONE_STORE_OF_BYTES, contents

from mapstate import Count, Sum, Topology, errors, newStream, opaque, open_reader, transactional
from mapstate.backends import resolve
from mapstate.spark import Coordinates, InitialRows, StartsAt
from mapstate.spark.driver.query_run import check_whole
from mapstate.testing import Fail, FaultyBackend

pytestmark = [pytest.mark.spark, DATA_SOURCE]

PLACES = ("topic", "partition", "offset")


@pytest.fixture
def log(tmp_path: Any) -> PartitionedLog:
    log = PartitionedLog(tmp_path)
    log.send(*((f"u{at % 7}", at) for at in range(200)))
    return log


@pytest.fixture
def url(tmp_path: Any) -> str:
    return f"sqlite:///{tmp_path}/state.db"


def declared(
    spark: Any, log: PartitionedLog, url: Any, history: Any, ends: Any = None, kind: Any = opaque, **spec: Any
) -> Any:
    initial = InitialRows(history, ends=Coordinates(*PLACES) if ends is None else ends)
    rows = newStream("visits", log.stream(spark), initialRows=initial).groupBy("user_id")
    return rows.persistentAggregate(kind(url, max_attempts=1, **spec), visits=Count(), bytes=Sum("bytes"))


def checkpoint(log: PartitionedLog) -> str:
    return str(log.folder.parent / "checkpoint")


def starts(log: PartitionedLog, first: int, second: int) -> None:
    log.start = {"0": first, "1": second}


def refused(counts: Any, log: PartitionedLog, url: Any, match: str, dry_runs: Any = (False,)) -> None:
    """A new checkpoint each time, because one keeps its start."""
    for dry_run in dry_runs:
        shutil.rmtree(checkpoint(log), ignore_errors=True)
        with pytest.raises(errors.UsageError, match=match):
            counts.seed(checkpoint(log), dry_run=dry_run)
        with pytest.raises(errors.StateNotFoundError):
            open_reader(url, "visits")


@pytest.mark.parametrize("each_url", ONE_STORE_OF_BYTES, indirect=True)
@pytest.mark.parametrize(
    ("start", "kind"),
    [((60, 0), opaque), full((60, 0), transactional), full((80, 70), opaque), ((80, 70), transactional)],
)
def test_a_stream_that_starts_before_the_end_of_the_history_or_at_it_counts_each_row_once(
    spark, log, each_url, kind, start
):
    starts(log, *start)
    counts = declared(spark, log, each_url, log.table(spark, ends=(80, 70)), kind=kind)
    tried = counts.seed(checkpoint(log), dry_run=True)
    done = counts.seed(checkpoint(log), buckets=3)
    assert (tried.rows, done.rows) == (200, 200)
    assert contents(each_url, "visits") == log.truth()
    log.send(("u1", 5), ("new", 7))
    counts.start(checkpoint(log), trigger=AVAILABLE).awaitTermination()
    assert contents(each_url, "visits") == log.truth()
    with pytest.raises(errors.UsageError, match="there is nothing to seed"):
        counts.seed(checkpoint(log))


def test_a_stream_without_rows_yet_gets_its_history_as_batch_0(spark, log, url):
    starts(log, *log.ends())
    counts = declared(spark, log, url, log.table(spark, ends=log.ends()))
    assert counts.seed(checkpoint(log)).rows == 200
    assert contents(url, "visits") == log.truth()


def without(*gone: tuple[int, int]) -> Any:
    return lambda rows: [row for row in rows if (row[1], row[2]) not in gone]


def and_also(**changes: Any) -> Any:
    """One more row, that of partition 0 and offset 3 with changes."""
    return lambda rows: [
        *rows,
        *(tuple((dict(zip(PLACES, row[:3], strict=True)) | changes).values()) + row[3:] for row in rows[3:4]),
    ]


@pytest.mark.parametrize(
    ("start", "change", "match"),
    [
        ((81, 70), list, r"offsets 80 to 80 of partition visits 0 are in neither: .* ends at offset 79, .* at 81"),
        (
            (80, 70),
            without(*((1, at) for at in range(70))),
            "offsets 0 to 69 of partition visits 1 .* has none of visits 1",
        ),
        full((80, 70), without((0, 79)), "offsets 79 to 79 of partition visits 0"),
        ((80, 70), without((1, 17), (1, 30)), "2 offsets of partition visits 1 below .*70, .* the first one is 17"),
        full((80, 70), without((0, 0)), "1 offsets of partition visits 0 below .*80, .* the first one is 0"),
        full((80, 70), and_also(), "1 rows of partition visits 0 whose offset is there before"),
        ((80, 70), lambda rows: and_also()(without((0, 5))(rows)), "whose offset is there before"),
        full((80, 70), and_also(offset=None), "1 rows of the history have no topic, partition or offset"),
        ((80, 70), and_also(topic=None, offset=90), "1 rows of the history have no topic, partition or offset"),
        full((80, 70), and_also(partition=None), "1 rows of the history have no topic, partition or offset"),
        ((80, 70), and_also(topic="others"), "1 rows of partitions that the stream did not read .* others 0"),
        full((80, 70), and_also(partition=2, offset=0), "1 rows of partitions that the stream .* visits 2"),
        ((80, 70), and_also(offset=-1), "has the offset -1 in partition visits 0"),
    ],
)
def test_what_does_not_meet_is_refused_before_anything_is_written(spark, log, url, start, change, match):
    starts(log, *start)
    refused(declared(spark, log, url, log.table(spark, ends=(80, 70), change=change)), log, url, match)


def test_a_history_that_begins_later_or_has_holes_counts_if_that_is_said(spark, log, url):
    starts(log, 80, 70)
    begins_later = [(0, at) for at in range(12)]
    for holes, gone in (("before", begins_later), ("allowed", [*begins_later, (1, 17), (1, 69)])):
        store = url.replace("state", holes)
        shutil.rmtree(checkpoint(log), ignore_errors=True)
        reach = (80, 70 if holes == "before" else 75)  # beyond what is not there
        history = log.table(spark, ends=reach, change=without(*gone))
        counts = declared(spark, log, store, history, Coordinates(*PLACES, holes=holes))
        assert counts.seed(checkpoint(log)).rows == 200 - len(gone)
    with_a_hole = log.table(spark, ends=(80, 70), change=without((1, 17)))
    refused(
        declared(spark, log, url, with_a_hole, Coordinates(*PLACES, holes="before")), log, url, "the first one is 17"
    )
    ends_early = log.table(spark, ends=(80, 69))
    allowed = declared(spark, log, url, ends_early, Coordinates(*PLACES, holes="allowed"))
    refused(allowed, log, url, "offsets 69 to 69 of partition visits 1")
    twice = log.table(spark, ends=(80, 70), change=and_also())
    refused(declared(spark, log, url, twice, Coordinates(*PLACES, holes="allowed")), log, url, "there before")


def test_the_first_offset_that_lacks_is_found_in_a_long_history(spark, log, url):
    starts(log, 70_000, 0)
    rows = spark.range(70_000).selectExpr("'visits' topic", "0 partition", "id offset", "'u' user_id", "id bytes")
    for gone in ("offset = 65535", "offset between 40000 and 50000", "offset between 30000 and 68000"):
        history = rows.where(f"not ({gone})")
        first = gone.replace("between", "=").split()[2]
        refused(declared(spark, log, url, history), log, url, f"the first one is {first}")


def test_the_history_passes_the_steps_of_the_stream_in_all_states_of_a_topology(spark, log, tmp_path):
    url = f"sqlite:///{tmp_path}/state.db"
    starts(log, 60, 20)
    topology = Topology("site")
    initial = InitialRows(log.table(spark, ends=(80, 70)), ends=Coordinates(*PLACES))
    rows = topology.newStream("visits", log.stream(spark), initialRows=initial)
    rows.groupBy("user_id").persistentAggregate(opaque(url, "visits"), visits=Count(), bytes=Sum("bytes"))
    others = rows.transform(lambda df: df.where("bytes % 2 = 0")).groupBy("partition")
    even = others.persistentAggregate(opaque(url, "even"), rows=Count())
    even.seed(checkpoint(log), buckets=2)
    assert contents(url, "visits") == log.truth()
    right = {(at,): {"rows": sum(size % 2 == 0 for _, size in part)} for at, part in enumerate(log.parts)}
    assert contents(url, "even") == {key: value for key, value in right.items() if value["rows"]}


def test_a_query_that_is_started_without_its_seed_is_refused_and_the_seed_goes_on_with_its_plan(spark, log, url):
    starts(log, 60, 20)
    counts = declared(spark, log, url, log.table(spark, ends=(80, 70)))
    with pytest.raises(Exception, match="the history would be lost"):
        counts.start(checkpoint(log), trigger=AVAILABLE).awaitTermination()
    with pytest.raises(errors.UsageError, match="the history would be lost"):
        counts(log.table(spark, ends=(1, 1)), 0)
    with pytest.raises(errors.StateNotFoundError):
        open_reader(url, "visits")
    counts.seed(checkpoint(log))
    assert contents(url, "visits") == log.truth()
    log.send(("u1", 5))
    starts(log, *(end - (at == 0) for at, end in enumerate(log.ends())))
    adopts = declared(spark, log, url, log.table(spark, ends=(80, 70)), on_new_owner="reset")
    with pytest.raises(Exception, match="the history would be lost"):
        adopts.start(checkpoint(log) + "-2", trigger=AVAILABLE).awaitTermination()
    assert sum(value["visits"] for value in contents(url, "visits").values()) == 200


@pytest.mark.parametrize("after", [full(False), True])
def test_a_seed_that_died_goes_on_with_its_stage_whatever_has_become_of_the_history(spark, log, tmp_path, url, after):
    starts(log, 60, 20)
    history = log.table(spark, ends=(80, 70))
    for call in (1, 2, 4):  # of the ledger: its opening, the stage, and a part of it
        fault = Fail(method="swap", call=call, after=after, error=errors.CorruptStoreError, name=f"{call}{after}")
        counts = declared(spark, log, FaultyBackend(resolve(url), tmp_path, (fault,)), history)
        with pytest.raises(errors.CorruptStoreError):
            counts.seed(checkpoint(log), buckets=3)
    older = newStream("visits", log.stream(spark)).groupBy("user_id")
    with pytest.raises(errors.SeedingError, match="this job has none"):
        older.persistentAggregate(opaque(url, max_attempts=1), visits=Count(), bytes=Sum("bytes")).seed(checkpoint(log))
    log.send(("u1", 5))
    declared(spark, log, url, history.where("false")).seed(checkpoint(log))
    log.parts[0 if log.parts[0][-1] == ("u1", 5) else 1].pop()  # it comes with batch 1
    assert contents(url, "visits") == log.truth()


def live(spark: Any, place: Path) -> Any:
    """Rows that are read anew each time, as a database's."""

    def read(_: Iterator[Any]) -> Iterator[Any]:
        import pyarrow as pa

        rows = json.loads(place.read_text())
        names = ["topic", "partition", "offset", "user_id", "bytes"]
        types = [pa.string(), pa.int32(), pa.int64(), pa.string(), pa.int64()]
        yield pa.record_batch([pa.array(part, kind) for part, kind in zip(zip(*rows), types)], names)  # noqa: B905

    return spark.range(0, 1, 1, 1).mapInArrow(read, SCHEMA)


def test_a_history_that_changes_while_it_is_staged_is_not_counted(spark, log, tmp_path, url):
    starts(log, 80, 70)
    place = tmp_path / "rows.json"
    whole = [list(row) for row in log.table(spark, ends=(80, 70)).collect()]
    place.write_text(json.dumps(whole))
    changed: list[Any] = [whole[:-1]]

    def step(df: Any) -> Any:
        if changed and (checkpoint_of_seed := Path(checkpoint(log))).exists() and df.count() > 60:  # it is batch 0
            assert checkpoint_of_seed.exists()
            place.write_text(json.dumps(changed.pop()))
        return df

    initial = InitialRows(live(spark, place), ends=Coordinates(*PLACES))
    rows = newStream("visits", log.stream(spark), initialRows=initial).transform(step).groupBy("user_id")
    counts = rows.persistentAggregate(opaque(url, max_attempts=1), visits=Count(), bytes=Sum("bytes"))
    with pytest.raises(errors.UsageError, match=r"partition visits 1 had 70 rows below .*, and has 69. Nothing of it"):
        counts.seed(checkpoint(log))
    with open_reader(url, "visits") as reader, pytest.raises(errors.SeedingError):
        reader.get("u1")
    place.write_text(json.dumps([*whole, ["visits", 0, 80, *log.parts[0][80]]]))  # it has grown above the start
    counts.seed(checkpoint(log))
    assert contents(url, "visits") == log.truth()


def test_a_named_end_has_to_be_the_start_of_the_stream(spark, log, url):
    starts(log, 80, 70)
    history = log.table(spark, ends=(80, 70)).select("user_id", "bytes", *PLACES)  # in another order
    for named, match in (
        ({"visits": {"0": 80, "1": 71}}, "partition visits 1: the history ends at 71 by StartsAt, .* starts at 70"),
        ({"visits": {"0": 80}}, "partition visits 1: it names no such partition by StartsAt, .* starts at 70"),
        ({"visits": {"0": 80, "1": 70, "2": 0}}, "partition visits 2: .* ends at 0 by StartsAt, .* does not read it"),
    ):
        refused(declared(spark, log, url, history, StartsAt(named)), log, url, match, (True, False))
    shutil.rmtree(checkpoint(log))
    counts = declared(spark, log, url, history, StartsAt('{"visits": {"0": 80, "1": 70}}'))
    assert counts.seed(checkpoint(log)).rows == 200
    assert contents(url, "visits") == log.truth()


def test_a_history_and_a_stream_that_are_cut_by_a_time_count_each_row_once(spark, log, url):
    starts(log, 30, 20)  # well before the time, which `bytes` is here
    rows = newStream(
        "visits",
        log.stream(spark).where("bytes >= 100"),
        initialRows=InitialRows(
            log.table(spark, ends=(80, 70)).where("bytes < 100"), ends=StartsAt({"visits": {"0": 30, "1": 20}})
        ),
    ).groupBy("user_id")
    counts = rows.persistentAggregate(opaque(url, max_attempts=1), visits=Count(), bytes=Sum("bytes"))
    assert counts.seed(checkpoint(log)).rows == 200
    log.send(("u1", 500))
    counts.start(checkpoint(log), trigger=AVAILABLE).awaitTermination()
    assert contents(url, "visits") == log.truth()


def test_a_source_that_tells_no_start_by_partition_is_refused(spark, log, url, tmp_path):
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "one.csv").write_text("visits,0,0,u1,4\n")
    files = spark.readStream.schema(SCHEMA).csv(str(tmp_path / "files"))
    both = log.stream(spark).union(log.stream(spark))
    for stream, ticks, match in (
        (files, False, "tells no start by partition of source 0"),
        (log.stream(spark).union(files), False, "tells no start by partition of source 1"),
        (log.stream(spark), True, "tells no start by partition of source 1"),
        (both, False, "partition visits 0, which two sources read"),
    ):
        for ends in (Coordinates(*PLACES), StartsAt({"visits": {"0": 0, "1": 0}})):
            initial = InitialRows(log.table(spark, ends=(80, 70)), ends=ends)
            rows = newStream("visits", stream, ticks=ticks, initialRows=initial).groupBy("user_id")
            refused(rows.persistentAggregate(opaque(url, max_attempts=1), visits=Count()), log, url, match)


def test_rows_that_cannot_be_a_history_are_refused_where_they_are_declared(spark, log):
    table, stream = log.table(spark, ends=(8, 7)), log.stream(spark)
    for rows, df, ends, match in (
        (table, stream, None, "ends is a Coordinates or a StartsAt"),
        (stream, stream, Coordinates(*PLACES), "a batch DataFrame, spark.read"),
        (table, table, Coordinates(*PLACES), "newStream a streaming one"),
        (table.drop("bytes"), stream, Coordinates(*PLACES), "bytes bigint. They have none"),
        (
            table.selectExpr("topic", "partition", "offset", "user_id", "int(bytes) bytes"),
            stream,
            Coordinates(*PLACES),
            "They have int",
        ),
        (table, stream, Coordinates("topic", "partition", "at"), "have none as at, and a offset is"),
        (
            table,
            stream,
            Coordinates("partition", "partition", "offset"),
            "have int as partition, and a topic is string",
        ),
        (table, stream, StartsAt({"visits": {"0": -2}}), "StartsAt has offsets of at least 0"),
        (table, stream, StartsAt("earliest"), "StartsAt has offsets of at least 0"),
        (table, stream, StartsAt({"visits": {"0": True}}), "StartsAt has offsets of at least 0"),
    ):
        initial = InitialRows(rows, ends=ends)
        with pytest.raises(errors.ConfigurationError, match=match):
            newStream("visits", df, initialRows=initial)
        with pytest.raises(errors.ConfigurationError, match=match):
            Topology("site").newStream("visits", df, initialRows=initial)
    with pytest.raises(errors.ConfigurationError, match="holes"):
        Coordinates(*PLACES, holes="any")
    other = newStream("other", log.stream(spark))
    with pytest.raises(errors.ConfigurationError, match="merged have no initialRows"):
        newStream("visits", stream, initialRows=InitialRows(table, ends=Coordinates(*PLACES))).merge(other)


class JavaSource:
    """A source of the JVM, of a class that has no field of a table."""

    def __init__(self, name: str) -> None:
        self._name = name

    def getClass(self) -> Any:
        return self

    def getName(self) -> str:
        return self._name

    def getDeclaredField(self, name: str) -> Any:
        raise RuntimeError(f"no field {name}")


def test_a_seed_of_an_iceberg_table_of_which_nothing_tells_the_first_snapshot_is_refused():
    def execution(name: str) -> Any:
        sources = SimpleNamespace(size=lambda: 1, apply=lambda _: JavaSource(name))
        return SimpleNamespace(sources=lambda: sources)

    check_whole(execution("org.apache.spark.sql.kafka010.KafkaMicroBatchStream"))
    with pytest.raises(
        errors.UsageError, match=r"have expired, whose rows would lack \(.*no field table.*Nothing was w"
    ):
        check_whole(execution("org.apache.iceberg.spark.source.SparkMicroBatchStream"))
