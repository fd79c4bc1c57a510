"""Batch reports: kept beside the ledger, told to whoever asks, and never in a batch's way."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from mapstate import Count, Sum, newStream, opaque, open_reader, transactional
from mapstate.backends import resolve
from mapstate.batch_report import BatchReport
from mapstate.capabilities import FenceToken, Reports
from mapstate.errors import CorruptRecordError, FencedError, StoreAuthError, StoreUnavailableError
from mapstate.protocol.ledgers import Ledgers
from mapstate.reader.scans import read_reports
from mapstate.spark.driver.state import encode_report


@pytest.fixture(params=["memory", "sqlite", pytest.param("redis", marks=pytest.mark.redis)])
def url(request: Any, tmp_path: Any) -> str:
    """A store of each kind, empty."""
    if request.param == "memory":
        return f"memory://{tmp_path.name}"
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/state.db"
    return request.getfixturevalue("redis_url")


def report(batch_id: int) -> BatchReport:
    return BatchReport(
        batch_id=batch_id,
        txid=batch_id + 5,
        attempt=1,
        rows=9,
        keys_read=1,
        keys_cached=2,
        keys_written=3,
        keys_skipped=0,
        milliseconds=7,
        at="2026-01-01T00:00:00.000+00:00",
    )


def test_the_newest_reports_are_kept_and_come_first(url):
    store = resolve(url).open("s")
    other = resolve(url).open("other")
    assert isinstance(store, Reports)
    assert read_reports(store, "s") == []
    for one in (store, other):
        one.swap(b"ledger", None, FenceToken(1, 1))
    for batch_id in range(5):
        store.keep_report(encode_report(report(batch_id)), 3)
        other.keep_report(b"{}", 1)
    assert read_reports(store, "s") == [report(4), report(3), report(2)]
    assert [key for page in store.scan(10) for key in page] == []
    assert len(other.reports()) == 1
    with pytest.raises(CorruptRecordError, match="batch report of state 'other'"):
        read_reports(other, "other")


def test_offsets_are_in_a_report_only_where_they_are_known(tmp_path):
    store = resolve(f"memory://{tmp_path.name}").open("s")
    known = msgspec.structs.replace(report(1), offsets_passed=410)
    assert b"offsets_passed" not in encode_report(report(0))  # as reports of before
    for one in (report(0), known):
        store.keep_report(encode_report(one), 3)
    assert read_reports(store, "s") == [known, report(0)]


def test_a_report_says_so_where_rows_were_aggregated_behind_the_shuffle_alone(tmp_path):
    store = resolve(f"memory://{tmp_path.name}").open("s")
    alone = msgspec.structs.replace(report(1), partial_aggregation=False)
    assert b"partial_aggregation" not in encode_report(report(0))  # as reports of before
    for one in (report(0), alone):
        store.keep_report(encode_report(one), 3)
    assert read_reports(store, "s") == [alone, report(0)]


def test_a_store_that_keeps_no_reports_has_none():
    assert read_reports(object(), "s") == []


def test_a_sqlite_file_of_before_reports_gets_its_table_with_the_first(tmp_path):
    path = tmp_path / "old.db"
    with contextlib.closing(resolve(f"sqlite:///{path}").open("s")) as store:
        store.swap(b"ledger", None, FenceToken(1, 1))
        with contextlib.closing(sqlite3.connect(path)) as db:
            assert db.execute("SELECT count(*) FROM sqlite_master WHERE name = 'mapstate_reports'").fetchone() == (0,)
        assert store.reports() == []
        assert store.load()[0] == b"ledger"
        store.keep_report(b"one", 5)
        assert store.reports() == [b"one"]


def visits(spark, spec):
    frame = spark.createDataFrame([("a", 1), ("b", 2), ("a", 3)], "user_id string, bytes bigint")
    job = newStream("visits", frame).groupBy("user_id").persistentAggregate(spec, n=Count(), bytes=Sum("bytes"))
    return frame, job


def contents(url):
    with open_reader(url, "visits") as reader:
        return dict(reader.scan())


@pytest.mark.spark
def test_on_batch_gets_what_the_store_keeps_before_downstream_does(url, spark):
    frame, job = visits(spark, opaque(url, repeat="allowed"))
    seen: list[Any] = []
    job = job.on_batch(seen.append).newValuesStream().foreachBatch(lambda _, n: seen.append(n))
    job(frame, 0)
    job(frame, 1)
    job(frame, 1)  # counts already: only downstream gets it again
    assert [one if isinstance(one, int) else one.batch_id for one in seen] == [0, 0, 1, 1, 1]
    first = seen[0]
    with open_reader(url, "visits") as reader:
        assert reader.reports() == [seen[2], first]
        assert (reader.ledger().previous.txid, reader.ledger().previous.at) == (first.txid, first.at)
    assert (first.attempt, first.rows, first.keys_read, first.keys_written) == (1, 3, 2, 2)
    assert first.keys_skipped == 0
    assert first.milliseconds > 0


@pytest.mark.spark
def test_keys_that_a_replay_had_applied_already_are_skipped(url, spark, monkeypatch):
    frame, job = visits(spark, transactional(url))
    with monkeypatch.context() as patch:
        patch.setattr(Ledgers, "commit", lambda *_: (_ for _ in ()).throw(FencedError("died before the commit")))
        with pytest.raises(FencedError):
            job(frame, 0)
    seen: list[BatchReport] = []
    job.on_batch(seen.append)(frame, 0)
    assert [(one.keys_written, one.keys_skipped, one.keys_read, one.rows) for one in seen] == [(0, 2, 2, 3)]
    assert contents(url) == {("a",): {"n": 2, "bytes": 4}, ("b",): {"n": 1, "bytes": 2}}


@pytest.mark.spark
def test_an_on_batch_that_raises_is_logged_and_the_next_is_called(url, spark, caplog):
    frame, job = visits(spark, opaque(url))
    seen: list[BatchReport] = []
    job = job.on_batch(lambda _: 1 / 0).on_batch(seen.append)
    with caplog.at_level("INFO", "mapstate"):
        job(frame, 0)
    assert len(seen) == 1
    assert [one.getMessage() for one in caplog.records if one.levelname == "ERROR"] == [
        "state visits: on_batch failed for batch 0; the batch counts"
    ]
    line = next(one.getMessage() for one in caplog.records if one.levelname == "INFO")
    assert "attempt 1, 3 rows, 2 keys, 2 read, 2 written, 0 skipped, " in line
    assert contents(url)[("a",)] == {"n": 2, "bytes": 4}


@pytest.mark.spark
@pytest.mark.parametrize("error", [StoreUnavailableError("no answer"), RuntimeError("a store's own")])
def test_a_report_that_cannot_be_kept_fails_no_batch(error, spark, tmp_path, caplog, monkeypatch):
    from mapstate.backends.memory import MemoryStore

    def refuse(*_: Any) -> None:
        raise error

    monkeypatch.setattr(MemoryStore, "keep_report", refuse)
    url = f"memory://{tmp_path.name}"
    frame, job = visits(spark, opaque(url))
    job(frame, 0)
    assert contents(url)[("b",)] == {"n": 1, "bytes": 2}
    (warned,) = [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]
    assert warned == f"state visits: the report of batch 0 is not kept; the batch counts. {error}"


@pytest.mark.spark
@pytest.mark.redis
def test_a_job_whose_acl_lacks_LPUSH_counts_with_a_warning(redis_server, redis_url, spark, caplog):
    user = f"no-lpush-{os.getpid()}"
    with redis_server.client() as admin:
        admin.execute_command("ACL", "SETUSER", user, "on", ">s3cret", "~*", "+@all", "-lpush")
        try:
            backend = replace(resolve(redis_url), username=user, password="s3cret")
            with pytest.raises(StoreAuthError, match="LPUSH, LTRIM"):
                backend.open("visits").keep_report(b"{}", 5)
            frame, job = visits(spark, opaque(backend))
            job(frame, 0)
            job(frame, 1)
        finally:
            admin.execute_command("ACL", "DELUSER", user)
    assert contents(redis_url) == {("a",): {"n": 4, "bytes": 8}, ("b",): {"n": 2, "bytes": 4}}
    warned = [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]
    assert len(warned) == 2
    assert all("the batch counts" in one and "LPUSH" in one and "s3cret" not in one for one in warned)
