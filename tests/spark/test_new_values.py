"""New values as a stream: a second state that follows a first one, exactly, whatever is replayed."""

from __future__ import annotations

import signal
from collections import Counter
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from cases import full
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from spark_fixtures import Visits, run_job

from mapstate import (
    Avg,
    Count,
    Last,
    Max,
    Min,
    ReducerAggregator,
    Sum,
    Topology,
    errors,
    newStream,
    opaque,
    open_reader,
    transactional,
)
from mapstate.backends import resolve
from mapstate.operations.checkpoint import rewind
from mapstate.operations.drop import drop
from mapstate.operations.forget import forget, listed
from mapstate.operations.vacuum import vacuum
from mapstate.protocol.ledger import Ledger
from mapstate.spark.driver import repeats
from mapstate.testing import Commits, Fail, FaultyBackend, crash_between

pytestmark = pytest.mark.spark

AVAILABLE = {"availableNow": True}
FAILS = Fail(method="swap", where=Commits(1), name="fail", error=errors.StoreFullError)


@pytest.fixture(params=[pytest.param("memory", marks=pytest.mark.full), pytest.param("redis", marks=pytest.mark.redis)])
def url(request: Any, tmp_path: Path) -> str:
    return f"memory://{tmp_path.name}" if request.param == "memory" else request.getfixturevalue("redis_url")


def contents(url: str, state: str) -> dict[Any, Any]:
    with open_reader(url, state) as reader:
        return dict(reader.scan())


def counts_of(visits: Visits, spark: SparkSession, spec: Any) -> Any:
    stream = newStream("visits", visits.stream(spark)).groupBy("user_id")
    return stream.persistentAggregate(spec, visits=Count(), bytes=Sum("bytes"))


def counts_of_counts(counts: Any, spec: Any) -> Any:
    by_visits = counts.newValuesStream().groupBy("visits")
    return by_visits.persistentAggregate(spec, users=Count(), bytes=Sum("bytes"), mean=Avg("bytes"))


def truth(visits: Visits) -> dict[Any, Any]:
    """How many users have how many visits, from the files alone."""
    users = list(visits.truth().values())
    out = {}
    for n in {one["visits"] for one in users}:
        sizes = [one["bytes"] for one in users if one["visits"] == n]
        out[(n,)] = {"users": len(sizes), "bytes": sum(sizes), "mean": sum(sizes) / len(sizes)}
    return out


def run(job: Any, visits: Visits) -> None:
    job.start(visits.checkpoint, trigger=AVAILABLE).awaitTermination()


BATCHES = [
    [("a", 1), ("b", 2), ("c", 3), ("a", 4)],
    [("a", 5), ("b", 6), ("d", 7)],
    [("c", 0), ("d", 1), ("b", 1)],
]


def test_counts_of_counts_are_right_after_each_batch_and_a_group_without_rows_is_gone(url, spark, visits):
    second = counts_of_counts(counts_of(visits, spark, opaque(url)), opaque(url, name="by_visits"))
    for at, rows in enumerate(BATCHES):
        visits.put(f"{at}", rows)
        run(second, visits)
        assert contents(url, "by_visits") == truth(visits)
    assert contents(url, "visits") == visits.truth()
    assert set(truth(visits)) == {(2,), (3,)}  # and 1, where everybody was, is not there with a zero


def test_what_lies_between_the_two_commits_is_made_up_for_though_the_replay_has_other_rows(
    url, spark, visits, tmp_path
):
    """The second state's store fails at its commit; the batch comes again with other rows, then once more."""
    visits.put("0", BATCHES[0])
    backend = FaultyBackend(resolve(url), str(tmp_path), (FAILS,))
    first = opaque(url)
    run(counts_of_counts(counts_of(visits, spark, first), opaque(backend, name="by_visits")), visits)
    visits.put("1", BATCHES[1])
    failing = counts_of_counts(counts_of(visits, spark, first), opaque(backend, name="by_visits"))
    with pytest.raises(StreamingQueryException):
        run(failing, visits)
    assert backend.fired("fail")
    applied, expected = visits.truth(), truth(visits)
    assert contents(url, "visits") == applied
    visits.put("1", [("z", 1)])  # too late: the first state has committed what came first
    got: list[Any] = []
    good = counts_of_counts(counts_of(visits, spark, first), opaque(url, name="by_visits"))
    good = good.newValuesStream(old=True).foreachBatch(
        lambda rows, batch_id: got.append((batch_id, sorted(tuple(row) for row in rows.select(
            "visits", "users", "old_users").collect())))
    )  # fmt: skip
    run(good, visits)
    assert contents(url, "visits") == applied
    assert contents(url, "by_visits") == expected
    crash_between(visits.checkpoint)
    run(good, visits)
    assert contents(url, "by_visits") == expected
    # one visit: b and c, then c and d; two: a, then b; three: nobody, then a
    assert got == [(1, [(1, 2, 2), (2, 1, 1), (3, 1, None)])] * 2


@pytest.mark.slow
@pytest.mark.redis
def test_a_driver_killed_between_the_two_commits_loses_nothing(redis_url, spark, visits, tmp_path):
    """SIGKILL after the first state's commit, before the second's."""
    for at, rows in enumerate(BATCHES[:2]):
        visits.put(f"{at}", rows)
    died = run_job(
        {
            "url": redis_url,
            "input": str(visits.input),
            "checkpoint": str(visits.checkpoint),
            "folder": str(tmp_path),
            "second": "by_visits",
            "faults": [["Kill", {"method": "swap", "where": ["Commits", 1], "who": "driver"}]],
        }
    )
    assert died.returncode == -signal.SIGKILL, died.stderr
    assert contents(redis_url, "visits") == visits.truth()
    assert contents(redis_url, "by_visits") != truth(visits)
    expected = truth(visits)
    visits.put("1", [("other", 1)])
    run(counts_of_counts(counts_of(visits, spark, opaque(redis_url)), opaque(redis_url, name="by_visits")), visits)
    assert contents(redis_url, "by_visits") == expected


def test_several_branches_a_third_state_and_a_sink_follow_one_state(url, spark, visits, tmp_path):
    alerts: list[Any] = []
    counts = counts_of(visits, spark, opaque(url))
    counts = (
        counts.newValuesStream(old=True)
        .transform(lambda rows: rows.where("visits >= 2 AND (old_visits IS NULL OR old_visits < 2)"))
        .foreachBatch(lambda rows, n: alerts.append((n, sorted(row["user_id"] for row in rows.collect()))))
    )  # fmt: skip
    second = (
        counts.newValuesStream()
        .transform(lambda rows: rows.where("bytes > 1").withColumn("big", F.col("bytes") > 5))
        .groupBy("big")
        .persistentAggregate(opaque(url, name="big"), users=Count())
    )
    third = second.newValuesStream().persistentAggregate(opaque(url, name="all"), users=Sum("users"), groups=Count())
    branch = third.source.source.newValuesStream().write("json", path=str(tmp_path / "out"))
    both = second.newValuesStream()
    assert both.schema.names == ["big", "users"]
    for at, rows in enumerate(BATCHES):
        visits.put(f"{at}", rows)
    run(branch, visits)
    assert alerts == [(0, ["a"]), (1, ["b"]), (2, ["c", "d"])]
    users = [one for one in visits.truth().values() if one["bytes"] > 1]
    expected = Counter(one["bytes"] > 5 for one in users)
    assert contents(url, "big") == {(big,): {"users": n} for big, n in expected.items()}
    assert contents(url, "all") == {(): {"users": len(users), "groups": len(expected)}}
    rows = spark.read.json(str(tmp_path / "out")).collect()
    assert Counter(row["batch_id"] for row in rows) == {0: 3, 1: 3, 2: 3}


class Newest(ReducerAggregator):
    """The last number; a negative one removes the key."""

    def init(self) -> Any:
        return {}

    def reduce(self, acc: Any, row: Any) -> Any:
        return None if row["bytes"] < 0 else {"n": row["bytes"]}


def test_a_key_that_is_removed_takes_its_contribution_along(url, spark):
    def frame(*rows: tuple[str, int]) -> DataFrame:
        return spark.createDataFrame(list(rows), "user_id string, bytes bigint")

    first = newStream("s", frame()).groupBy("user_id").persistentAggregate(opaque(url, "first"), newest=Newest())
    second = first.newValuesStream().persistentAggregate(opaque(url, "second"), keys=Count())
    second(frame(("a", 1), ("b", 1)), 0)
    second(frame(("a", -1), ("c", 1), ("d", -1)), 1)
    assert contents(url, "second") == {(): {"keys": 2}}
    second(frame(("a", 1), ("b", -1), ("c", -1)), 2)
    assert contents(url, "second") == {(): {"keys": 1}}


@pytest.mark.parametrize(
    "digits", [pytest.param(1, marks=pytest.mark.full), 34, 35, pytest.param(38, marks=pytest.mark.full)]
)
def test_decimals_of_any_length_are_taken_back_exactly(digits, spark, tmp_path):
    """Spark rounds to 34 digits where it negates a decimal."""
    url = f"sqlite:///{tmp_path}/state.db"
    schema = "user string, amount decimal(38,2)"
    counts = newStream("visits", spark.createDataFrame([], schema)).groupBy("user")
    first = counts.persistentAggregate(opaque(url), last=Max("amount"), n=Count())
    first.newValuesStream().groupBy("n").persistentAggregate(
        opaque(url, name="second"), sum=Sum("last"), mean=Avg("last"), rows=Count()
    )
    # Without the second user there would be no rows, and no sum, behind the last batch.
    long = Decimal(f"{'1' * digits}E-2")
    for batch, rows in enumerate(([("a", long), ("b", Decimal(2)), ("c", None)], [("a", None)])):
        first(spark.createDataFrame(rows, schema), batch)
    assert contents(url, "second") == {
        (1,): {"sum": 2, "mean": 2, "rows": 2},
        (2,): {"sum": long, "mean": long, "rows": 1},
    }


@pytest.mark.full
def test_the_greatest_of_what_only_grows_is_exact_in_a_second_state(url, spark, visits):
    """The most visits of any user of a country: no old value is ever greater than the new one in its place."""

    def job() -> Any:
        stream = visits.stream(spark).withColumn("country", F.substring("user_id", 1, 1))
        by_user = newStream("visits", stream).groupBy("country", "user_id")
        counts = by_user.persistentAggregate(opaque(url), n=Count(), most=Max("bytes"), least=Min("bytes"))
        by_country = counts.newValuesStream().groupBy("country")
        return by_country.persistentAggregate(
            opaque(url, name="by_country"), users=Count(), n=Max("n"), most=Max("most"), least=Min("least")
        )

    for at, rows in enumerate([[("at1", 5), ("at2", 2), ("be1", 7)], [("at1", 1), ("be2", 3)], [("at2", 9)] * 3]):
        visits.put(f"{at}", rows)
        run(job(), visits)
        users: dict[str, list[int]] = {}
        for name in visits._files:
            for user, size in visits.rows(name):
                users.setdefault(user, []).append(size)
        expected = {}
        for country in {user[0] for user in users}:
            sizes = [found for user, found in users.items() if user[0] == country]
            expected[(country,)] = {
                "users": len(sizes),
                "n": max(map(len, sizes)),
                "most": max(map(max, sizes)),
                "least": min(map(min, sizes)),
            }
        assert contents(url, "by_country") == expected
        assert crash_between(visits.checkpoint) == at
    run(job(), visits)
    assert contents(url, "by_country") == expected


@pytest.mark.parametrize("added", [Max("n"), Sum("n")])
def test_a_field_that_is_added_to_a_second_state_is_refused_before_anything_is_written(url, spark, added):
    """It would lack the keys that no later batch touches."""
    frame = spark.createDataFrame([("u", "p", 1)] * 5, "user string, page string, bytes bigint")
    later = spark.createDataFrame([("u", "q", 1)], "user string, page string, bytes bigint")

    def second(**more: Any) -> Any:
        first = newStream("s", frame).groupBy("user", "page").persistentAggregate(opaque(url, "first"), n=Count())
        by_user = first.newValuesStream().groupBy("user")
        return by_user.persistentAggregate(opaque(url, "second"), pages=Count(), **more)

    second()(frame, 0)
    with pytest.raises(errors.StateSchemaError, match="'second' follows .* so more would lack"):
        second(more=added)(later, 1)
    assert contents(url, "first") == {("u", "p"): {"n": 5}}
    second()(later, 1)
    assert contents(url, "second") == {("u",): {"pages": 2}}


def test_a_second_state_that_was_begun_later_is_told(url, spark):
    frame = spark.createDataFrame([("a", 1)], "user_id string, bytes bigint")
    by_user = newStream("s", frame).groupBy("user_id")
    by_user.persistentAggregate(opaque(url, "first"), n=Count())(frame, 0)
    first = by_user.persistentAggregate(opaque(url, "first"), n=Count())
    second = (
        first.newValuesStream().groupBy("n").persistentAggregate(opaque(url, "second", on_gap="accept"), keys=Count())
    )
    with pytest.raises(errors.MissingBatchesError, match="begun later"):
        second(frame, 1)


def test_states_that_are_apart_are_not_taken_over_together(spark, tmp_path):
    """A batch that only the first counts, and then a new checkpoint; or a first that was rolled back by itself."""
    url = f"sqlite:///{tmp_path}/state.db"

    def frame(*rows: tuple[str, int]) -> DataFrame:
        return spark.createDataFrame(list(rows), "user_id string, bytes bigint")

    again: Any = {"on_new_owner": "adopt_unchecked", "repeat": "allowed"}

    def job(query: str, second: Any = url, **options: Any) -> Any:
        grouped = newStream(query, frame()).groupBy("user_id")
        first = grouped.persistentAggregate(opaque(url, "first", **again), n=Count())
        spec = opaque(second, "second", **again, **options)
        return first.newValuesStream().groupBy("n").persistentAggregate(spec, users=Count())

    job("q1")(frame(("a", 1), ("a", 1), ("b", 1), ("c", 1)), 0)
    with pytest.raises(errors.StoreFullError):
        job("q1", FaultyBackend(resolve(url), str(tmp_path), (FAILS,)))(frame(("b", 1), ("c", 1)), 1)
    before = contents(url, "first")
    with pytest.raises(errors.MissingBatchesError, match=r"batch 1 of q1, .* with batch 0 of q1: .* for ever"):
        job("q2")(frame(("a", 1)), 0)
    assert contents(url, "first") == before
    job("q1")(frame(), 1)
    job("q2")(frame(("a", 1)), 0)
    assert contents(url, "second") == {(2,): {"users": 2}, (3,): {"users": 1}}
    Ledger(opaque(url, "first").open(), "first").rollback()
    for _ in range(2):
        with pytest.raises(errors.MissingBatchesError, match="rolled back or restored by itself"):
            job("q2")(frame(("b", 1)), 0)
    Ledger(opaque(url, "second").open(), "second").rollback()
    job("q2")(frame(("b", 1)), 0)
    assert contents(url, "second") == {(2,): {"users": 2}, (3,): {"users": 1}}
    assert contents(url, "first") == {("a",): {"n": 2}, ("b",): {"n": 3}, ("c",): {"n": 2}}


def test_new_values_that_cannot_all_be_read_back_stop_the_query_and_not_the_count(url, spark, caplog):
    frame = spark.createDataFrame([("a", 1), ("b", 1)], "user_id string, bytes bigint")

    def first() -> Any:
        spec = opaque(url, "first", repeat="allowed")
        return newStream("s", frame).groupBy("user_id").persistentAggregate(spec, n=Count())

    def second() -> Any:
        return first().newValuesStream().groupBy("n").persistentAggregate(opaque(url, "second"), keys=Count())

    second()(frame, 0)
    store: Any = opaque(url, "first").open()
    record = store.multi_get(["a"])[0]
    store.multi_put(["a"], [record.replace(b"[", b"[9", 1)])  # as if a later attempt had written it
    second()(frame, 0)  # the second state has all of it
    Ledger(opaque(url, "second").open(), "second").rollback()
    with pytest.raises(errors.IncompleteBatchError, match="lack 1 of 2 keys"):
        second()(frame, 0)
    got: list[Any] = []
    plain = first().newValuesStream().foreachBatch(lambda rows, _: got.append(rows.count()))
    plain(frame, 0)
    assert got == [1]
    assert "lack 1 of 2 keys" in caplog.text


def test_a_second_sum_may_change_by_more_than_64_bits(spark, tmp_path):
    url, most, schema = f"memory://{tmp_path.name}", 5 * 10**18, "k string, at bigint, x bigint"
    first = newStream("s", spark.createDataFrame([], schema)).groupBy("k")
    states = first.persistentAggregate(opaque(url, "first"), last=Last("x", by="at"))
    states.newValuesStream().persistentAggregate(opaque(url, "second"), total=Sum("last"))
    for batch_id, x in enumerate((-most, most)):
        states(spark.createDataFrame([("a", batch_id, x)], schema), batch_id)
        assert contents(url, "second") == {(): {"total": x}}
    with pytest.raises(errors.ValueOverflowError):
        states(spark.createDataFrame([("b", 2, most)], schema), 2)


def behind(spark: SparkSession, spec: Any = None, **options: Any) -> Any:
    frame = spark.createDataFrame([], "k string, i bigint")
    grouped = newStream("first", frame).groupBy("k")
    return grouped.persistentAggregate(spec or opaque("memory://"), n=Count()).newValuesStream(**options)


NEXT = opaque("memory://", "next")
BAD = [
    (lambda s: behind(s).persistentAggregate(NEXT, m=Max("k")), errors.ConfigurationError, "Max.*Count, Sum and Avg"),
    (lambda s: behind(s).persistentAggregate(NEXT, m=Min("n")), errors.ConfigurationError, "does not keep"),
    (lambda s: behind(s).groupBy("n").persistentAggregate(NEXT, m=Max("n")), errors.ConfigurationError, "Max"),
    (
        lambda s: behind(s).transform(lambda rows: rows.where("n < 3")).persistentAggregate(NEXT, m=Max("n")),
        errors.ConfigurationError,
        "without a transform",
    ),
    (lambda s: behind(s).persistentAggregate(NEXT, m=Newest()), errors.ConfigurationError, "Newest"),
    (
        lambda s: behind(s).persistentAggregate(opaque("memory://"), m=Count()),
        errors.ConfigurationError,
        "needs a name",
    ),
    (
        lambda s: behind(s).persistentAggregate(opaque("memory://", "first"), m=Count()),
        errors.DuplicateNameError,
        "follow itself",
    ),
    (
        lambda s: [each.persistentAggregate(NEXT, m=Count()) for each in [behind(s)] * 2],
        errors.DuplicateNameError,
        "state 'next' already",
    ),
    (
        lambda s: behind(s, transactional("memory://")).persistentAggregate(NEXT, m=Count()),
        errors.ConfigurationError,
        "has to be opaque",
    ),
    (lambda s: behind(s, transactional("memory://"), old=True), errors.ConfigurationError, "no old values"),
    (lambda s: behind(s, old=True).persistentAggregate(NEXT, m=Count()), errors.ConfigurationError, "without old"),
    (
        lambda s: behind(s).transform(lambda rows: rows.withColumnRenamed("k", "Batch_Id")).write("json", path="nix"),
        errors.DuplicateNameError,
        "which write adds",
    ),
    (lambda s: behind(s).groupBy("nix"), errors.UnknownColumnError, "'nix'"),
    (lambda s: behind(s).persistentAggregate(NEXT, m=Sum("k")), errors.UnsupportedTypeError, "a number"),
]


@pytest.mark.parametrize("case", range(len(BAD)))
def test_a_second_state_that_could_not_be_exact_is_refused_before_anything_runs(case, spark):
    ask, kind, message = BAD[case]
    with pytest.raises(kind, match=message):
        ask(spark)


def test_new_values_on_the_driver_come_where_arrow_batches_have_no_bound_and_in_the_year_1(spark, tmp_path):
    """The session's time zone is west of Greenwich, where that is the year 0."""
    rows = spark.sql("SELECT 'a' AS k, TIMESTAMP '0001-01-01T00:00:00Z' AS t UNION ALL SELECT 'b', NULL")
    name = "spark.sql.execution.arrow.maxRecordsPerBatch"
    before = spark.conf.get(name)
    got = []
    job = (
        newStream("visits", rows)
        .groupBy("k", "t")
        .persistentAggregate(opaque(f"memory://{tmp_path.name}", "s", repeat="allowed"), n=Count(), last=Max("t"))
        .newValuesStream()
        .foreachBatch(
            lambda new, _: got.append(
                sorted(map(tuple, new.selectExpr("k", "n", "unix_seconds(t)", "unix_seconds(last)").collect()))
            )
        )
    )
    spark.conf.set(name, 0)
    try:
        job(rows, 0)
        job(rows, 0)  # read back
        assert spark.conf.get(name) == "0"
        assert spark.conf.get("spark.sql.session.timeZone") == "America/St_Johns"
    finally:
        spark.conf.set(name, before)
    year_1 = -62_135_596_800
    assert got == [[("a", 1, year_1, year_1), ("b", 1, None, None)]] * 2


# Keys that are forgotten while a state that follows has still to get them


def followed(spark: SparkSession, visits: Visits, url: str, place: Any, kind: str) -> Any:
    """A state, and one that follows its new values or the windows that it fires. The time of a row is its bytes."""
    rows = newStream("visits", visits.stream(spark))
    counts: Any
    if kind == "fired":
        windows = rows.tumblingWindow(10, timestampField="bytes", retention=1_000).groupBy("user_id")
        counts = windows.persistentAggregate(opaque(url, "counts", max_attempts=1), visits=Count())
        second = counts.firedWindowsStream().groupBy("window_end")
    else:
        counts = rows.groupBy("user_id").persistentAggregate(opaque(url, "counts", max_attempts=1), visits=Count())
        second = counts.newValuesStream().groupBy("visits")
    second.persistentAggregate(opaque(place, "second", max_attempts=1), users=Count())
    return counts


FOLLOWED = {"new values": {(1,): {"users": 2}, (2,): {"users": 1}}, "fired": {(10,): {"users": 2}}}
FORGOTTEN = {"user_id": "x"}


def between(spark: SparkSession, visits: Visits, url: str, other: str, kind: str, folder: Path) -> None:
    """Two batches, of which the second one counts in the first state alone."""
    visits.put("a", [("x", 1), ("y", 2)])
    run(followed(spark, visits, url, other, kind), visits)
    visits.put("b", [("x", 200), ("z", 200)])
    folder.mkdir()
    fault = Fail(method="multi_put", call=1, error=errors.CorruptStoreError)
    with pytest.raises(StreamingQueryException):
        run(followed(spark, visits, url, FaultyBackend(resolve(other), folder, (fault,)), kind), visits)
    with open_reader(url, "counts") as counts, open_reader(other, "second") as second:
        assert (counts.ledger().last_commit.batch_id, second.ledger().last_commit.batch_id) == (1, 0)


@pytest.mark.parametrize(
    ("kind", "is_apart"), [full("new values", False), ("new values", True), ("fired", False), full("fired", True)]
)
def test_no_key_is_forgotten_that_a_state_that_follows_has_still_to_get(spark, visits, tmp_path, kind, is_apart):
    url = f"sqlite:///{tmp_path}/counts.db"
    other = f"sqlite:///{tmp_path}/second.db" if is_apart else url
    between(spark, visits, url, other, kind, tmp_path / "faults")
    beside = [(other, "second")] if is_apart else []
    if is_apart:
        with pytest.raises(errors.UsageError, match="followed by 'second', which is not in its store"):
            forget(url, "counts", FORGOTTEN, id="ticket")
    with pytest.raises(errors.FencedError, match="'second' follows state 'counts' and counts another last"):
        forget(url, "counts", FORGOTTEN, id="ticket", beside=beside)
    assert listed(url, "counts") == []
    run(followed(spark, visits, url, other, kind), visits)
    assert contents(other, "second") == FOLLOWED[kind]
    assert forget(url, "counts", FORGOTTEN, id="ticket", beside=beside).keys > 0


def test_a_state_that_follows_and_is_gone_does_not_keep_a_key_from_being_forgotten(spark, visits, tmp_path):
    url = f"sqlite:///{tmp_path}/counts.db"
    between(spark, visits, url, url, "new values", tmp_path / "faults")
    gone = [(None, "second"), (None, "another")]
    with pytest.raises(errors.UsageError, match="'second' is said to be gone, and is in the store"):
        forget(url, "counts", FORGOTTEN, id="ticket", beside=gone)
    drop(url, "second", force=True)  # its attempt is in flight
    with pytest.raises(errors.UsageError, match=r"is not in its store.*--gone second\)"):
        forget(url, "counts", FORGOTTEN, id="ticket", beside=gone[1:])
    assert listed(url, "counts") == []
    assert forget(url, "counts", FORGOTTEN, id="ticket", beside=gone).keys == 1


@pytest.mark.parametrize("kind", [full("new values"), "fired"])
def test_a_batch_that_comes_again_needs_no_key_that_all_have_got(spark, visits, tmp_path, kind):
    """The driver died in front of Spark's own commit: what follows counts the batch, and a key is forgotten since."""
    url = f"sqlite:///{tmp_path}/counts.db"
    for name, rows in (("a", [("x", 1), ("y", 2)]), ("b", [("x", 200), ("z", 200)])):
        visits.put(name, rows)
        run(followed(spark, visits, url, url, kind), visits)
    crash_between(visits.checkpoint)
    forget(url, "counts", FORGOTTEN, id="ticket")
    run(followed(spark, visits, url, url, kind), visits)
    assert contents(url, "second") == FOLLOWED[kind]


def test_windows_that_lack_forgotten_keys_are_not_passed_on(spark, visits, tmp_path, monkeypatch):
    """A commit of an older version names no state that follows, so nothing kept the key from being forgotten."""
    url = f"sqlite:///{tmp_path}/counts.db"
    with monkeypatch.context() as older:
        older.setattr(repeats, "names_of_followers", lambda *_: ())
        between(spark, visits, url, url, "fired", tmp_path / "faults")
    forget(url, "counts", FORGOTTEN, id="ticket")
    with pytest.raises(StreamingQueryException, match="lack the keys that were forgotten since: 'ticket'"):
        run(followed(spark, visits, url, url, "fired"), visits)
    with open_reader(url, "second") as second:
        assert second.ledger().last_commit.batch_id == 0


def test_no_vacuum_drops_a_removed_key_that_a_state_that_follows_has_still_to_get(spark, visits, tmp_path):
    url, other = f"sqlite:///{tmp_path}/counts.db", f"sqlite:///{tmp_path}/third.db"

    def chain(place: Any) -> Any:
        levels = counts_of_counts(counts_of(visits, spark, opaque(url)), opaque(url, name="by_visits", max_attempts=1))
        sizes = levels.newValuesStream().groupBy("users")
        return sizes.persistentAggregate(opaque(place, name="sizes", max_attempts=1), levels=Count())

    visits.put("a", [("x", 1), ("y", 2)])
    run(chain(other), visits)
    visits.put("b", [("x", 1), ("y", 2)])  # so nobody has one visit
    (tmp_path / "faults").mkdir()
    fault = Fail(method="multi_put", call=1, error=errors.CorruptStoreError)
    with pytest.raises(StreamingQueryException):
        run(chain(FaultyBackend(resolve(other), tmp_path / "faults", (fault,))), visits)
    with pytest.raises(errors.UsageError, match="is followed by 'sizes', which is not in its store"):
        vacuum(url, "by_visits")
    with pytest.raises(errors.FencedError, match="'sizes' follows state 'by_visits' and counts another last"):
        vacuum(url, "by_visits", beside=[(other, "sizes")])
    run(chain(other), visits)
    assert vacuum(url, "by_visits", beside=[(other, "sizes")]).dropped == 1
    assert contents(other, "sizes") == {(2,): {"levels": 1}}


@pytest.mark.parametrize("kind", [full("new values"), "fired"])
def test_a_state_that_follows_and_went_back_is_refused_before_the_first_one_goes_on(spark, visits, tmp_path, kind):
    url, place = f"sqlite:///{tmp_path}/counts.db", f"sqlite:///{tmp_path}/second.db"
    for name, rows in (("a", [("x", 1), ("y", 2)]), ("b", [("x", 200), ("z", 200)])):
        visits.put(name, rows)
        run(followed(spark, visits, url, place, kind), visits)
    Ledger(resolve(place).open("second"), "second").rollback()
    visits.put("c", [("y", 400)])
    for _ in range(2):
        with pytest.raises(StreamingQueryException, match="'second' that follows state 'counts' lacks batch 1.*Rewind"):
            run(followed(spark, visits, url, place, kind), visits)
        with open_reader(url, "counts") as counts:
            assert counts.ledger().last_commit.batch_id == 1
    rewind(place, "second", visits.checkpoint)
    run(followed(spark, visits, url, place, kind), visits)
    more = {(210,): {"users": 2}} if kind == "fired" else {(1,): {"users": 1}, (2,): {"users": 2}}
    assert contents(place, "second") == FOLLOWED[kind] | more


def test_a_state_that_is_new_behind_another_one_is_refused_before_that_goes_on(spark, visits, tmp_path):
    url = f"sqlite:///{tmp_path}/counts.db"
    visits.put("a", [("x", 1), ("y", 2)])
    run(counts_of(visits, spark, opaque(url)), visits)
    visits.put("b", [("x", 200)])
    with pytest.raises(StreamingQueryException, match="'visits' lacks batch 0.*written. Restore both"):
        run(counts_of_counts(counts_of(visits, spark, opaque(url)), opaque(url, name="by_visits")), visits)
    with open_reader(url, "visits") as counts:
        assert counts.ledger().last_commit.batch_id == 0


def test_a_first_state_whose_ledger_is_lost_says_so_itself(redis_url, redis_server, spark, visits):
    visits.put("a", [("x", 1), ("y", 2)])
    chain = counts_of_counts(counts_of(visits, spark, opaque(redis_url)), opaque(redis_url, name="by_visits"))
    run(chain, visits)
    with redis_server.client() as client:
        (ledger,) = [key for key in client.scan_iter("*visits*ledger") if b"by_visits" not in key]
        client.delete(ledger)
    visits.put("b", [("x", 200)])
    with pytest.raises(StreamingQueryException, match="LedgerLostError"):
        run(counts_of_counts(counts_of(visits, spark, opaque(redis_url)), opaque(redis_url, name="by_visits")), visits)


BEHIND_WINDOWS = ("behind fired windows", "of a state that follows, too")


@pytest.mark.parametrize(
    "kind", [full("the state that is asked"), "another one that is asked", full(BEHIND_WINDOWS[0]), BEHIND_WINDOWS[1]]
)
def test_what_a_query_after_the_commit_has_still_to_ask_is_not_forgotten(spark, visits, tmp_path, kind):
    url, place = f"sqlite:///{tmp_path}/counts.db", f"sqlite:///{tmp_path}/second.db"

    def chain(second: Any) -> Any:
        topology = Topology("site")
        rows = topology.newStream("visits", visits.stream(spark))
        counts = rows.groupBy("user_id").persistentAggregate(opaque(url, "counts", max_attempts=1), visits=Count())
        sums = rows.groupBy("user_id").persistentAggregate(opaque(url, "sums", max_attempts=1), visits=Count())
        asked = rows.stateQuery(counts, ["user_id"], {"visits": "seen"}, when="after")
        if kind == "another one that is asked":
            asked = rows.stateQuery(counts, ["user_id"], {"visits": "first"}, when="after")
            asked = asked.stateQuery(sums, ["user_id"], {"visits": "seen"}, when="after")
        if kind in BEHIND_WINDOWS:
            windows = rows.tumblingWindow(10, timestampField="bytes", retention=1_000).groupBy("user_id")
            fired = windows.persistentAggregate(opaque(url, "windows", max_attempts=1), n=Count()).firedWindowsStream()
            if kind == "of a state that follows, too":
                spec = opaque(url, "firings", max_attempts=1)
                sums = fired.groupBy("user_id").persistentAggregate(spec, visits=Count())
            asked = fired.stateQuery(sums, ["user_id"], {"visits": "seen"})
        asked.groupBy("seen").persistentAggregate(opaque(second, "second", max_attempts=1), rows=Count())
        return topology

    visits.put("a", [("x", 1), ("y", 2)])
    run(chain(place), visits)
    visits.put("b", [("x", 200), ("z", 200)])
    (tmp_path / "faults").mkdir()
    fault = Fail(method="multi_put", call=1, error=errors.CorruptStoreError)
    with pytest.raises(StreamingQueryException):
        run(chain(FaultyBackend(resolve(place), tmp_path / "faults", (fault,))), visits)
    name = {"the state that is asked": "counts", "of a state that follows, too": "firings"}.get(kind, "sums")
    with pytest.raises(errors.FencedError, match=f"'second' follows state '{name}'"):
        forget(url, name, FORGOTTEN, id="ticket", beside=[(place, "second")])
    with open_reader(url, "counts") as counts:
        assert counts.ledger().last_commit.followers == (() if kind in BEHIND_WINDOWS else ("second",))
    run(chain(place), visits)
    once = {"behind fired windows": {1: 1, 2: 1}, "of a state that follows, too": {1: 2}}.get(kind, {1: 3, 2: 1})
    assert contents(place, "second") == {(seen,): {"rows": rows} for seen, rows in once.items()}
    assert forget(url, name, FORGOTTEN, id="ticket", beside=[(place, "second")]).keys == 1


def test_a_state_beside_that_has_nothing_to_do_with_another_one_is_not_asked(spark, visits, tmp_path):
    url, place = f"sqlite:///{tmp_path}/counts.db", f"sqlite:///{tmp_path}/second.db"
    visits.put("a", [("x", 1), ("y", 2)])
    run(followed(spark, visits, url, place, "new values"), visits)
    other = newStream("other", spark.createDataFrame([("x",)], "user_id string")).groupBy("user_id")
    other.persistentAggregate(opaque(url, "sums"), n=Count())(spark.createDataFrame([("x",)], "user_id string"), 0)
    for name in ("counts", "sums"):
        assert forget(url, name, FORGOTTEN, id="ticket", beside=[(place, "second")]).keys == 1
