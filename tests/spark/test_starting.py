"""What `start` finds out before a query begins, how a query ends that fails later, and how columns are named."""

from __future__ import annotations

import shutil
import socket
import sqlite3
import threading
import traceback
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import functions as F
from spark_fixtures import AVAILABLE, Visits

from mapstate import ArgMax, Count, CountDistinct, Max, Sum, errors, newStream, opaque, open_reader

pytestmark = pytest.mark.spark


def counts(spark: Any, visits: Visits, url: str, **aggregates: Any) -> Any:
    rows = newStream("visits", visits.stream(spark))
    return rows.groupBy("user_id").persistentAggregate(opaque(url), **(aggregates or {"visits": Count()}))


def test_a_store_that_cannot_be_used_is_an_error_of_start_itself(spark, visits, tmp_path):
    visits.put("1", [("a", 1)])
    text = tmp_path / "notes.txt"
    text.write_text("no database " * 100)
    for url, kind, message in (
        (f"sqlite:///{tmp_path}/gone/state.db", errors.StoreUnavailableError, "there is no directory"),
        (f"sqlite:///{text}", errors.CorruptStoreError, "is damaged, or no SQLite database"),
        ("redis://127.0.0.1:1/0?retries=0", errors.StoreUnavailableError, "cannot be reached"),
    ):
        with pytest.raises(kind, match=message):
            counts(spark, visits, url).start(visits.checkpoint, trigger=AVAILABLE)
    assert not Path(visits.checkpoint).exists()  # Spark has begun nothing


def test_a_sqlite_file_that_another_writer_has_locked_is_an_error_of_start(spark, visits, tmp_path):
    url = f"sqlite:///{tmp_path}/state.db"
    visits.put("1", [("a", 1)])
    counts(spark, visits, url).start(visits.checkpoint, trigger=AVAILABLE).awaitTermination()
    with closing(sqlite3.connect(tmp_path / "state.db", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(errors.StoreUnavailableError, match=r"locked for more than 0\.1 s"):
            counts(spark, visits, f"{url}?timeout=0.1").start(visits.checkpoint, trigger=AVAILABLE)


def test_a_port_of_http_is_named_for_what_it_is(spark, visits):
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            with server.accept()[0] as client:
                client.recv(1000)
                client.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        url = f"redis://127.0.0.1:{server.getsockname()[1]}/0?retries=0"
        with pytest.raises(errors.StoreError, match="is no Redis server: another kind of server answers"):
            counts(spark, visits, url).start(visits.checkpoint, trigger=AVAILABLE)
        thread.join()


def test_a_query_that_fails_later_ends_with_our_sentence(spark, visits, tmp_path):
    url = f"sqlite:///{tmp_path}/state.db"
    visits.put("1", [("a", 1)])
    counts(spark, visits, url).start(visits.checkpoint, trigger=AVAILABLE).awaitTermination()
    job = counts(spark, visits, url)
    query = job.start(f"{visits.checkpoint}-new", trigger=AVAILABLE)
    with pytest.raises(StreamingQueryException) as caught:
        query.awaitTermination()
    last = "".join(traceback.format_exception(caught.value)).splitlines()[-1]
    assert last == f"StateOwnershipError: {job.last_error}"


@pytest.mark.parametrize("scheme", ["", "file:"])
def test_the_checkpoint_of_another_query_is_an_error_of_start_itself(spark, visits, tmp_path, scheme):
    url = f"sqlite:///{tmp_path}/state.db"
    visits.put("1", [("a", 1)])
    counts(spark, visits, url).start(visits.checkpoint, trigger=AVAILABLE).awaitTermination()
    another = tmp_path / "another"
    counts(spark, visits, f"{url}-2").start(another, trigger=AVAILABLE).awaitTermination()
    visits.put("2", [("a", 1)])
    before = sorted(another.rglob("*"))
    with pytest.raises(errors.StateOwnershipError) as caught:
        counts(spark, visits, url).start(f"{scheme}{another}", trigger=AVAILABLE)
    assert sorted(another.rglob("*")) == before  # Spark has begun nothing
    job = counts(spark, visits, url)
    writer = visits.stream(spark).writeStream.foreachBatch(job).option("checkpointLocation", str(another))
    with pytest.raises(StreamingQueryException):
        writer.trigger(**AVAILABLE).start().awaitTermination()
    assert str(caught.value) == str(job.last_error)  # of the first batch
    rows = newStream("visits", visits.stream(spark)).groupBy("user_id")
    taken = rows.persistentAggregate(opaque(url, on_new_owner="reset", on_gap="accept"), visits=Count())
    taken.start(another, trigger=AVAILABLE).awaitTermination()


def test_a_query_that_owned_a_state_before_it_was_reset_counts_anew_or_is_refused(spark, visits, tmp_path):
    """Its number is of what is gone: else the batch that it brings passes for counted."""
    url, first, copy = f"sqlite:///{tmp_path}/state.db", tmp_path / "first", tmp_path / "copy"

    def run(checkpoint: Path) -> None:
        rows = newStream("visits", visits.stream(spark)).groupBy("user_id")
        running = rows.persistentAggregate(opaque(url, on_new_owner="reset"), visits=Count())
        query = running.start(checkpoint, trigger=AVAILABLE)
        try:
            query.awaitTermination()
        except StreamingQueryException:
            raise running.last_error from None

    visits.put("1", [("a", 1), ("b", 1)])
    run(first)
    shutil.copytree(first, copy)
    shutil.rmtree(copy / "commits")  # as it was before Spark's own commit
    run(tmp_path / "other")
    visits.put("2", [("a", 1)])
    for _ in range(2):  # batch 0 once more, and then the next one
        run(copy)
    with open_reader(url, "visits") as state:
        assert dict(state.scan()) == {("a",): {"visits": 2}, ("b",): {"visits": 1}}
    run(tmp_path / "another")
    visits.put("3", [("c", 1)])
    with pytest.raises(errors.MissingBatchesError, match="has still to get batch 0.*another query reset the state"):
        run(copy)


NESTED = "n int, customer struct<country string, id string>"
BUYERS = [(1, ("de", "c1")), (2, ("at", "c2")), (3, ("de", "c1")), (4, ("de", "c3"))]


def test_an_aggregator_takes_the_field_of_a_struct_as_a_key_does(spark, tmp_path):
    url = f"sqlite:///{tmp_path}/state.db"
    aggregates = {
        "buyers": CountDistinct("customer.id", most=10),
        "last": Max("customer.id"),
        "of": ArgMax("customer.id", by="n"),
        "same": Max(F.col("customer.id")),
    }
    rows = newStream("buyers", spark.createDataFrame(BUYERS, NESTED))
    rows.groupBy("customer.country").persistentAggregate(opaque(url), **aggregates)(
        spark.createDataFrame(BUYERS, NESTED), 0
    )
    with open_reader(url, "buyers") as reader:
        assert reader.get("de") == {"buyers": 2, "last": "c3", "of": "c3", "same": "c3"}
        assert reader.get("at") == {"buyers": 1, "last": "c2", "of": "c2", "same": "c2"}
    found = rows.aggregate(ids=CountDistinct("customer.id", most=10)).persistentAggregate(
        opaque(f"{url}-2"), ids=Sum("ids")
    )
    found(spark.createDataFrame(BUYERS, NESTED), 0)
    with open_reader(f"{url}-2", "buyers") as reader:
        assert reader.get(()) == {"ids": 3}
    with pytest.raises(errors.UnknownColumnError, match=r"'customer\.name'"):
        rows.groupBy("n").persistentAggregate(opaque(url), x=Max("customer.name"))


def test_columns_that_differ_in_case_alone_are_two_where_spark_tells_them_apart(spark, tmp_path):
    frame = spark.createDataFrame([(1, 2, 30), (1, 5, 60)], "k int, v int, V int").toDF("k", "v", "V")
    url = f"sqlite:///{tmp_path}/state.db"

    def job() -> Any:
        return newStream("s", frame).groupBy("k").persistentAggregate(opaque(url), small=Sum("v"), large=Sum("V"))

    with pytest.raises(errors.DuplicateNameError, match="cannot tell apart: v, V"):
        job()
    spark.conf.set("spark.sql.caseSensitive", "true")
    try:
        job()(frame, 0)
    finally:
        spark.conf.unset("spark.sql.caseSensitive")
    with open_reader(url, "s") as reader:
        assert reader.get(1) == {"small": 7, "large": 90}
