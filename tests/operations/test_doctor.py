"""What the doctor finds: in a ledger, on each store, and in a Redis server's settings."""

from __future__ import annotations

import datetime as dt
import re
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from states import Bare, Job

from mapstate.backends import resolve
from mapstate.backends.memory import MemoryStore
from mapstate.backends.redis.operations import RedisFacts, judge
from mapstate.backends.sqlite import operations as sqlite_operations
from mapstate.batch_report import BatchReport
from mapstate.capabilities import Checkup
from mapstate.errors import StateNotFoundError, StoreAuthError
from mapstate.operations.doctor import examine
from mapstate.protocol import ledger, ledgers
from mapstate.protocol.ledger_record import Commit, PlanDigest, encode_ledger
from mapstate.protocol.stored_ledger import decode_ledger, ledger_store
from mapstate.schema import Field
from mapstate.spark.driver.state import encode_report


@pytest.fixture(params=["memory", "sqlite", pytest.param("redis", marks=pytest.mark.redis)])
def url(request: Any, tmp_path: Any) -> str:
    """A store of each kind, empty."""
    if request.param == "memory":
        return f"memory://{tmp_path.name}"
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/state.db"
    return request.getfixturevalue("redis_url")


def severities(findings: Any) -> dict[str, str]:
    return {one.subject: one.severity for one in findings}


def test_each_store_of_ours_is_looked_at(url):
    with pytest.raises(StateNotFoundError):
        examine(url, "s")
    job = Job(url)
    job.batch(a=1)
    assert isinstance(job.store, Checkup)
    found = examine(url, "s")
    assert {"in flight", "dead"} < severities(found).keys()
    assert all(one.found and one.expected and (one.severity == "ok" or one.advice) for one in found)


def test_memory_dies_with_its_process(tmp_path):
    Job(f"memory://{tmp_path.name}").batch(a=1)
    assert severities(examine(f"memory://{tmp_path.name}", "s"))["persistence"] == "warning"


def test_a_store_that_offers_little_is_told(tmp_path):
    store = Bare("multi_get", "multi_put")
    Job(store)
    (first, *_, _, _) = examine(store, "s")
    assert first.severity == "warning"
    missing = [one.found.split(":")[0] for one in examine(store, "s") if one.subject == "store"]
    assert missing == [f"the store offers no {name}" for name in ("LedgerStore", "FencedWrites", "Claims", "Scan")]


def ago(seconds: float) -> str:
    return (dt.datetime.now(dt.UTC) - dt.timedelta(seconds=seconds)).isoformat(timespec="milliseconds")


@pytest.mark.parametrize(
    ("quiet", "gap", "severity"), [(60, 30, "ok"), (7200, 30, "warning"), (7200, 3600, "ok"), (86_400, 3600, "warning")]
)
def test_an_attempt_is_orphaned_where_the_stream_was_quicker_before(quiet, gap, severity, tmp_path, monkeypatch):
    url = f"memory://{tmp_path.name}"
    job = Job(url)
    for n in range(2):
        attempt = job.attempt(a=n)
        at = ago(quiet + gap * (1 - n))
        job.ledger.commit(Commit(batch_id=n, txid=attempt.txid, owner="q", at=at))
        report = {"attempt": 1, "rows": 1, "keys_read": 1, "keys_cached": 0, "keys_written": 1, "keys_skipped": 0}
        one = BatchReport(batch_id=n, txid=attempt.txid, milliseconds=100, at=at, **report)
        job.store.keep_report(encode_report(one), 10)
        job.next += 1
    assert severities(examine(url, "s"))["in flight"] == "ok"
    for begun_at in (ago(quiet), ""):  # an older mapstate did not write when it was
        monkeypatch.setattr(ledgers, "now", lambda at=begun_at: at)
        job.attempt(a=7)
        assert severities(examine(url, "s"))["in flight"] == severity


@pytest.mark.parametrize(("age", "severity"), [(60, "ok"), (7200, "warning")])
def test_the_very_first_attempt_can_be_orphaned_too(age, severity, tmp_path, monkeypatch):
    url = f"memory://{tmp_path.name}"
    job = Job(url)
    monkeypatch.setattr(ledgers, "now", lambda: ago(age))
    start = time.monotonic()
    job.attempt(a=7)
    found = {one.subject: one for one in examine(url, "s")}["in flight"]
    seconds = int(re.search(r"begun (\d+) s ago", found.found)[1])
    assert found.severity == severity
    assert age <= seconds <= age + time.monotonic() - start + 1
    monkeypatch.setattr(ledgers, "now", lambda: "")
    job.attempt(a=7)
    assert severities(examine(url, "s"))["in flight"] == "ok"  # nothing tells how long


def test_a_batch_that_has_just_begun_after_a_long_pause_is_not_orphaned(tmp_path):
    url = f"memory://{tmp_path.name}"
    job = Job(url)
    attempt = job.attempt(a=1)
    job.ledger.commit(Commit(batch_id=0, txid=attempt.txid, owner="q", at=ago(86_400)))
    job.next += 1
    job.attempt(a=2)
    assert severities(examine(url, "s"))["in flight"] == "ok"


def test_a_vacuum_that_was_killed_looks_orphaned_after_a_while(tmp_path, monkeypatch):
    url = f"memory://{tmp_path.name}"
    job = Job(url)
    job.batch(a=1)
    monkeypatch.setattr(ledger, "now", lambda: ago(7200))
    job.ledger.operator.begin_operator("vacuum")
    found = {one.subject: one for one in examine(url, "s")}["in flight"]
    assert (found.severity, "--take-over" in found.advice) == ("warning", True)


def test_many_dead_ranges_call_for_a_vacuum_and_a_broken_report_is_said(tmp_path):
    url = f"memory://{tmp_path.name}"
    job = Job(url)
    for n in range(1002):
        job.attempt(a=n)
        job.batch(a=n)
    job.store.keep_report(b"{}", 10)
    found = {one.subject: one for one in examine(url, "s")}
    assert found["dead"].severity == "warning"
    assert "1002 dead txids in 1002 ranges" in found["dead"].found
    assert "vacuum" in found["dead"].advice
    assert found["batch reports"].severity == "warning"


def test_a_sqlite_file_is_judged_by_how_and_where_it_is(tmp_path, monkeypatch):
    path = tmp_path / "s.db"
    path.touch()

    def judged(synchronous: str = "full", journal: str = "wal", integrity: Any = ("ok",)) -> dict[str, str]:
        return severities(sqlite_operations.judge(str(path), synchronous, journal, list(integrity)))

    assert judged("normal")["synchronous"] == "warning"
    assert judged(journal="delete")["journal mode"] == "warning"
    assert judged(integrity=["row 7 missing"])["integrity_check"] == "error"
    monkeypatch.setattr(sqlite_operations.shutil, "disk_usage", lambda _: SimpleNamespace(free=2**20))
    assert judged()["disk"] == "error"
    mounts = tmp_path / "mounts"
    monkeypatch.setattr(sqlite_operations, "_MOUNTS", mounts)
    assert judged()["file system"] == "ok"
    mounts.write_text(f"/dev/sda / ext4 rw\nserver:/x {tmp_path} nfs4 rw\nserver:/y {tmp_path}/elsewhere ext4 rw\n")
    assert judged()["file system"] == "error"


def test_synchronous_is_what_the_url_asks_for(tmp_path):
    url = f"sqlite:///{tmp_path}/s.db?synchronous=normal"
    Job(url).batch(a=1)
    found = severities(examine(url, "s"))
    assert (found["synchronous"], found["integrity_check"], found["journal mode"]) == ("warning", "ok", "ok")


GOOD = RedisFacts(
    info={
        "redis_version": "7.2.4",
        "maxmemory_policy": "noeviction",
        "maxmemory": "0",
        "used_memory": "100",
        "aof_enabled": "1",
        "aof_last_write_status": "ok",
        "role": "master",
        "connected_slaves": "0",
    },
    config={"appendfsync": "always", "save": "", "min-replicas-to-write": "0"},
    clock=0.1,
    ledger_ttl=-1,
    ttls=[-1, -1],
)


@pytest.mark.parametrize(
    ("info", "config", "others", "subject", "severity"),
    [
        ({}, {}, {}, "version", "ok"),
        ({"redis_version": "5.0.14"}, {}, {}, "version", "error"),
        ({"redis_version": "6.0.20"}, {}, {}, "version", "error"),
        ({"redis_version": "6.2"}, {}, {}, "version", "ok"),
        ({"maxmemory_policy": "allkeys-lru", "maxmemory": "1000"}, {}, {}, "eviction", "error"),
        ({"maxmemory_policy": "allkeys-lru"}, {}, {}, "eviction", "warning"),
        ({"maxmemory": "1000"}, {"maxmemory-policy": "allkeys-lfu"}, {}, "eviction", "error"),
        ({"maxmemory_policy": "volatile-lru", "maxmemory": "1000"}, {}, {}, "eviction", "ok"),
        ({"maxmemory_policy": "volatile-lru", "maxmemory": "1000"}, {}, {"ttls": [10**9]}, "eviction", "warning"),
        ({"maxmemory": "1000", "used_memory": "950"}, {}, {}, "memory", "warning"),
        ({"maxmemory": "1000", "used_memory": "1000"}, {}, {}, "memory", "error"),
        ({"maxmemory": "1000"}, {}, {}, "memory", "ok"),
        ({}, {}, {}, "persistence", "ok"),
        ({}, {"appendfsync": "everysec"}, {}, "persistence", "ok"),
        ({}, {"appendfsync": "no"}, {}, "persistence", "warning"),
        ({"aof_last_write_status": "err"}, {}, {}, "persistence", "error"),
        ({"aof_enabled": "0"}, {}, {}, "persistence", "error"),
        ({"aof_enabled": "0"}, {"save": "3600 1"}, {}, "persistence", "warning"),
        ({"aof_enabled": "0", "rdb_last_bgsave_status": "err"}, {"save": "3600 1"}, {}, "persistence", "error"),
        ({}, {}, {}, "replication", "ok"),
        ({"connected_slaves": "1"}, {}, {}, "replication", "warning"),
        ({"connected_slaves": "1"}, {"min-replicas-to-write": "1"}, {}, "replication", "ok"),
        ({"role": "slave"}, {}, {}, "replication", "error"),
        ({}, {}, {"clock": -60.0}, "clock", "warning"),
        ({}, {}, {}, "clock", "ok"),
        ({}, {}, {"ledger_ttl": 5000}, "ledger", "error"),
        ({}, {}, {"ttls": [1000, 2000]}, "ttl", "warning"),
        ({}, {}, {"ttls": [1000, 10**9]}, "ttl", "ok"),
    ],
)
def test_a_redis_server_is_judged_by_what_it_can_lose(info, config, others, subject, severity):
    facts = GOOD._replace(info=GOOD.info | info, config=GOOD.config | config, **others)
    found = judge(facts, 86_400)
    assert severities(found)[subject] == severity
    assert all(one.advice for one in found if one.severity != "ok")


def test_where_config_or_info_is_forbidden_it_says_what_it_cannot_see():
    unseen = severities(judge(GOOD._replace(config={}), 60))
    assert (unseen["eviction"], unseen["persistence"]) == ("ok", "warning")  # appendfsync may be no
    blind = severities(judge(GOOD._replace(config={}, info={}), 60))
    assert blind["server"] == "error"
    assert severities(judge(GOOD._replace(clock=None), 60))["clock"] == "warning"
    assert severities(judge(GOOD._replace(ledger_ttl=None), 60))["ledger"] == "warning"
    assert "eviction" not in blind
    unknown = GOOD.info | {"aof_enabled": "0"}
    assert severities(judge(GOOD._replace(config={}, info=unknown), 60))["persistence"] == "warning"


@pytest.mark.redis
def test_a_real_server_that_evicts_and_forgets_is_an_error(start_redis):
    server = start_redis(maxmemory="50mb", **{"maxmemory-policy": "allkeys-lru"})
    Job(server.url, ttl=100).batch(a=1, b=2)
    with server.client() as client:
        client.config_set("save", "")
        client.config_set("appendonly", "no")
        client.execute_command("ACL", "SETUSER", "plain", "on", ">s3cret", "~*", "+@all", "-@dangerous", "-config")
        found = severities(examine(server.url, "s"))
        assert (found["eviction"], found["persistence"], found["ttl"]) == ("error", "error", "warning")
        assert (found["version"], found["clock"], found["ledger"], found["memory"]) == ("ok", "ok", "ok", "ok")
        assert severities(examine(server.url, "s", replay_horizon=10))["ttl"] == "ok"
        plain = replace(resolve(server.url), username="plain", password="s3cret")
        assert severities(examine(plain, "s"))["server"] == "error"  # INFO is dangerous, too
        client.execute_command("ACL", "SETUSER", "plain", "-time", "-pttl", "-scan")
        blind = severities(examine(plain, "s"))
        assert (blind["clock"], blind["ledger"], blind["records"]) == ("warning", "warning", "warning")
        client.execute_command("ACL", "SETUSER", "plain", "+info")
        assert severities(examine(plain, "s"))["eviction"] == "error"
        client.pexpire("s!ledger", 100_000)
        assert severities(examine(server.url, "s"))["ledger"] == "error"


def test_a_store_without_a_checkup_is_examined_all_the_same():
    class Backend:
        shared_between_processes = False
        store = MemoryStore()

        def open(self, state: str, *, ttl: float | None = None) -> Any:
            names = ("multi_get", "multi_put", "load", "swap", "writer", "claim", "scan")
            return type("Some", (), {name: staticmethod(getattr(self.store, name)) for name in names})()

    Job(Backend()).batch(a=1)
    checked = ("in flight", "dead", "last batch", "records", "keys")
    assert severities(examine(Backend(), "s")) == dict.fromkeys(checked, "ok")


@pytest.mark.parametrize(
    ("changes", "severity"),
    [
        ({"run": "r", "plan": None}, "warning"),
        ({"run": "r", "plan": PlanDigest(None, None, "s", "e")}, "warning"),
        ({"run": "r", "plan": PlanDigest("f", None, "s", "e")}, "ok"),
        ({"run": None, "plan": None}, "ok"),  # by hand
        ({"run": "r", "plan": PlanDigest("f", None, "s", "e"), "is_part": True}, "error"),
    ],
)
def test_a_last_batch_that_is_a_part_or_has_no_plan_is_said(changes, severity, tmp_path):
    url = f"sqlite:///{tmp_path}/state.db"
    Job(url).batch(a=1)
    store = ledger_store(resolve(url).open("s"))
    data, version = store.load()
    record = decode_ledger(data, "s")
    last = msgspec.structs.replace(record.last_commit, **changes)
    after = msgspec.structs.replace(record, last_commit=last)
    assert store.swap(encode_ledger(after), version, after.fence()) is not None
    assert severities(examine(url, "s"))["last batch"] == severity


def test_large_records_are_read_so_many_at_a_time_as_fit_into_memory(tmp_path, monkeypatch):
    job = Job(f"memory://{tmp_path.name}", fields=(Field("text", "Max(text)", "string"),))
    job.batch(**{f"k{i:03}": "x" * 300_000 for i in range(100)})
    asked: list[int] = []
    multi_get = MemoryStore.multi_get
    monkeypatch.setattr(MemoryStore, "multi_get", lambda self, keys: asked.append(len(keys)) or multi_get(self, keys))
    found = {one.subject: one.found for one in examine(f"memory://{tmp_path.name}", "s", count_keys=False)}
    assert found["records"] == "100 records were read"
    assert (sum(asked), max(asked)) == (100, 64)
    assert asked[1] * 300_000 < 9_000_000


def test_records_that_nobody_may_list_are_a_finding_and_those_that_nobody_may_read_an_error(tmp_path, monkeypatch):
    def refused(*_: Any) -> Any:
        raise StoreAuthError("no permission")

    job = Job(f"memory://{tmp_path.name}")
    job.batch(a=1)
    with monkeypatch.context() as patched:
        patched.setattr(MemoryStore, "scan", refused)
        (found,) = (one for one in examine(f"memory://{tmp_path.name}", "s") if one.subject == "records")
        assert (found.severity, found.found) == ("warning", "they were not examined: no permission")
    with monkeypatch.context() as patched:
        patched.setattr(MemoryStore, "multi_get", refused)
        with pytest.raises(StoreAuthError):
            examine(f"memory://{tmp_path.name}", "s")
