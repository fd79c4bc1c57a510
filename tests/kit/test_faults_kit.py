"""The kit of faults does what its documentation says, and nothing behind one's back."""

from __future__ import annotations

import inspect
import os
import pickle
import secrets
import signal
import subprocess
import sys
import time
from typing import Any

import pytest
from one_ledger import OneLedger
from openings import opening

from mapstate import open_reader
from mapstate.backends import resolve
from mapstate.backing_map import Backend, IBackingMap
from mapstate.capabilities import Claims, FencedWrites, FenceToken, LedgerReads, LedgerStore, Scan
from mapstate.errors import (
    ConfigurationError,
    FencedError,
    MissingBatchesError,
    StoreLostError,
    StoreRestartedError,
    StoreUnavailableError,
    UsageError,
)
from mapstate.protocol.ledger_record import Commit, now
from mapstate.testing import (
    Begins,
    Commits,
    Fail,
    FaultyBackend,
    FaultyStore,
    ForgetfulBackend,
    ForgetfulStore,
    HasKey,
    Kill,
    Mark,
    Wait,
    crash_between,
    wait_for,
)

CAPABILITIES = (IBackingMap, LedgerStore, FencedWrites, Claims, Scan, LedgerReads)
OPEN = FenceToken(1, 1)


class DictMap:
    """A store with get and put only."""

    def __init__(self) -> None:
        self.records: dict[str, Any] = {}

    def multi_get(self, keys):
        return [self.records.get(key) for key in keys]

    def multi_put(self, keys, values):
        self.records.update(zip(keys, values, strict=True))


class Declares(DictMap):
    """A store with a capability that the kit has never heard of, and an attribute that is no method."""

    takes_records = True

    def multi_delete(self, keys):
        for key in keys:
            self.records.pop(key, None)


def committed(attempt, owner="q"):
    return Commit(batch_id=attempt.batch_id, txid=attempt.txid, owner=owner, at=now())


@pytest.fixture(params=["dict", "memory", "sqlite", pytest.param("redis", marks=pytest.mark.redis)])
def store(request, tmp_path):
    if request.param == "dict":
        return DictMap()
    urls = {"memory": f"memory://{secrets.token_hex(8)}", "sqlite": f"sqlite:///{tmp_path}/s.db"}
    found = resolve(urls.get(request.param) or request.getfixturevalue("redis_url")).open("s")
    return closed_at_the_end(request, found)


def closed_at_the_end(request, store):
    request.addfinalizer(getattr(store, "close", lambda: None))
    return store


def test_a_wrapper_has_the_capabilities_of_its_store_and_no_others(store):
    for wrapper in (FaultyStore(store), ForgetfulStore(store)):
        for capability in CAPABILITIES:
            assert isinstance(wrapper, capability) == isinstance(store, capability), capability.__name__


def test_a_wrapper_has_its_capabilities_where_isinstance_of_python_3_12_looks(store):
    """There it does not ask __getattr__."""
    wrapper = FaultyStore(store)
    for name in ("multi_get", "multi_put", "load", "swap", "writer", "claim", "scan", "multi_get_with_ledger"):
        assert (inspect.getattr_static(wrapper, name, None) is not None) == hasattr(store, name), name


def test_a_capability_that_comes_later_passes_through_with_faults_of_its_own():
    inner = Declares()
    wrapper = FaultyStore(inner, Fail(method="multi_delete", where=HasKey("b")))
    wrapper.multi_put(["a", "b"], [1, 2])
    wrapper.multi_delete(["a"])
    with pytest.raises(StoreUnavailableError):
        wrapper.multi_delete(["b"])
    assert inner.records == {"b": 2}
    assert wrapper.takes_records
    assert not hasattr(wrapper, "claim")
    assert not hasattr(ForgetfulStore(inner), "multi_delete")  # would delete behind its back


def test_a_call_that_fails_before_has_done_nothing():
    inner = DictMap()
    store = FaultyStore(inner, Fail(call=2, error=StoreUnavailableError))
    store.multi_put(["a"], [1])
    with pytest.raises(StoreUnavailableError, match="before the store had done anything"):
        store.multi_put(["b"], [2])
    assert inner.records == {"a": 1}
    store.multi_put(["b"], [2])
    assert inner.records == {"a": 1, "b": 2}
    assert store.fired("fail-before-multi_put-2")


def test_a_call_that_fails_after_has_done_all():
    inner = DictMap()
    store = FaultyStore(inner, Fail(after=True, error=FencedError))
    with pytest.raises(FencedError, match="after the store had done it"):
        store.multi_put(["a"], [1])
    assert inner.records == {"a": 1}


def test_after_a_put_that_is_left_under_way_is_when_it_is_done():
    class PutsLater(DictMap):
        sent = None

        def read_ahead(self, keys):
            pass

        def multi_put(self, keys, values):
            self.sent = (keys, values)

        def flush(self):
            if self.sent is not None:
                super().multi_put(*self.sent)

    inner = PutsLater()
    with pytest.raises(StoreUnavailableError):
        FaultyStore(inner, Fail(after=True)).multi_put(["a"], [b"1"])
    assert inner.records == {"a": b"1"}


def test_a_fault_is_addressed_by_its_keys_and_fires_as_often_as_it_shall():
    store = FaultyStore(DictMap(), Fail(method="multi_get", where=HasKey("a"), times=2), record=True)
    for _ in range(2):
        store.multi_get(["b"])
        with pytest.raises(StoreUnavailableError):
            store.multi_get(["b", "a"])
    store.multi_get(["a"])
    assert [(call.keys, call.outcome) for call in store.calls] == [
        (("b",), "done"),
        (("b", "a"), "StoreUnavailableError"),
        (("b",), "done"),
        (("b", "a"), "StoreUnavailableError"),
        (("a",), "done"),
    ]
    always = FaultyStore(DictMap(), Fail(times=None))
    for _ in range(5):
        with pytest.raises(StoreUnavailableError):
            always.multi_put(["a"], [1])


def test_at_one_call_one_fault_fires_and_the_next_call_has_the_next():
    store = FaultyStore(DictMap(), Fail(name="first"), Fail(name="second", error=FencedError))
    for error in (StoreUnavailableError, FencedError):
        with pytest.raises(error):
            store.multi_put(["a"], [1])
    store.multi_put(["a"], [1])


def test_a_fault_with_since_waits_for_the_other():
    store = FaultyStore(DictMap(), Fail(since="seen"), Mark(method="multi_get", where=HasKey("a"), name="seen"))
    store.multi_put(["a"], [1])
    store.multi_get(["a"])
    with pytest.raises(StoreUnavailableError):
        store.multi_put(["a"], [1])


def test_a_slow_call_waits_for_its_file_or_its_time(tmp_path):
    store = FaultyStore(DictMap(), Wait(until="go", seconds=30), folder=tmp_path)
    (tmp_path / "go").touch()
    started = time.monotonic()
    store.multi_put(["a"], [1])
    assert time.monotonic() - started < 25
    never = FaultyStore(DictMap(), Wait(until="never", seconds=0.05, name="other"), folder=tmp_path)
    with pytest.raises(TimeoutError, match="never"):
        never.multi_put(["a"], [1])
    started = time.monotonic()
    FaultyStore(DictMap(), Wait(seconds=0.1)).multi_put(["a"], [1])
    assert time.monotonic() - started >= 0.1
    with pytest.raises(ConfigurationError, match="folder"):
        FaultyStore(DictMap(), Wait(until="go")).multi_put(["a"], [1])


def test_a_writer_counts_its_own_puts_and_knows_its_token(store):
    if not isinstance(store, FencedWrites):
        return
    wrapper = FaultyStore(
        store, Fail(call=2, where=lambda call: call.token == OPEN, times=None), Mark(method="close"), record=True
    )
    wrapper.swap(b"{}", None, OPEN)
    for _ in range(2):
        writer = wrapper.writer(OPEN)
        writer.multi_put(["a"], [b"1"])
        with pytest.raises(StoreUnavailableError):
            writer.multi_put(["b"], [b"2"])
        assert hasattr(writer, "close") == hasattr(store.writer(OPEN), "close")
        getattr(writer, "close", print)()
    with pytest.raises(FencedError):
        wrapper.writer(FenceToken(1, 2)).multi_put(["c"], [b"3"])
    assert wrapper.multi_get(["a", "b", "c"]) == [b"1", None, None]
    assert [call.outcome for call in wrapper.calls if call.method == "multi_put"] == [
        *["done", "StoreUnavailableError"] * 2,
        "FencedError",
    ]


def test_the_ledgers_writes_are_addressed_by_their_batch(store):
    """And what the ledger makes of a lost reply is right."""
    wrapper = FaultyStore(
        store,
        Fail(method="swap", where=Begins(1), after=True, name="begin"),
        Fail(method="swap", where=Commits(1), after=True, name="commit"),
        Fail(method="swap", where=Commits(2), error=FencedError, name="before"),
    )
    if not isinstance(store, LedgerStore):
        with pytest.raises(AttributeError):
            _ = wrapper.swap
        return
    ledger, attempt = OneLedger.open_and_begin(wrapper, opening(state="s", keys=()), 0)
    ledger.commit(committed(attempt))
    assert not wrapper.fired("begin")
    attempt = ledger.begin(1)
    assert wrapper.fired("begin")
    assert not wrapper.fired("commit")
    ledger.commit(committed(attempt))
    assert wrapper.fired("commit")
    attempt = ledger.begin(2)
    with pytest.raises(FencedError):
        ledger.commit(committed(attempt))


def test_a_store_with_get_and_put_only_has_its_ledgers_writes_addressed_too():
    wrapper = FaultyStore(DictMap(), Mark(where=Commits(0), name="committed"))
    ledger, attempt = OneLedger.open_and_begin(wrapper, opening(state="s", keys=()), 0)
    assert not wrapper.fired("committed")
    ledger.commit(committed(attempt))
    assert wrapper.fired("committed")


def test_a_faulty_backend_is_pickled_and_fires_once_across_processes(tmp_path):
    backend = FaultyBackend(
        resolve(f"sqlite:///{tmp_path}/s.db"), str(tmp_path), (Fail(name="once", where=HasKey("a")),), record=True
    )
    assert isinstance(backend, Backend)
    assert backend.shared_between_processes
    again = pickle.loads(pickle.dumps(backend))
    assert again == backend
    assert hash(again) == hash(backend)
    assert again.path == backend.inner.path  # what else the inner backend has
    code = (
        "import pickle, sys; backend = pickle.loads(sys.stdin.buffer.read()); store = backend.open('s')\n"
        "try: store.multi_put(['a'], [b'1'])\n"
        "except Exception as error: print(type(error).__name__)"
    )
    done = subprocess.run([sys.executable, "-c", code], input=pickle.dumps(backend), capture_output=True, check=True)
    assert done.stdout == b"StoreUnavailableError\n"
    assert backend.fired("once")
    store = backend.open("s")
    store.multi_put(["a"], [b"1"])
    assert store.multi_get(["a"]) == [b"1"]
    store.close()
    outcomes = [(call.method, call.outcome, call.pid == os.getpid()) for call in backend.calls]
    assert outcomes == [
        ("multi_put", "StoreUnavailableError", False),
        ("multi_put", "done", True),
        ("multi_get", "done", True),
        ("close", "done", True),
    ]


@pytest.mark.parametrize("who", ["self", "group"])
def test_a_kill_leaves_a_mark_and_no_process(who, tmp_path):
    code = (
        "import os, sys; from mapstate.backends import resolve; from mapstate.testing import FaultyBackend, Kill\n"
        f"who = os.getpgrp() if '{who}' == 'group' else 'self'\n"
        f"inner = resolve('sqlite:///{tmp_path}/s.db')\n"
        f"store = FaultyBackend(inner, {str(tmp_path)!r}, (Kill(who=who, after=True),)).open('s')\n"
        "store.multi_put(['a'], [b'1']); print('alive')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, start_new_session=True, check=False)
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, b"")
    assert (tmp_path / "kill-after-multi_put").exists()
    store = resolve(f"sqlite:///{tmp_path}/s.db").open("s")
    assert store.multi_get(["a"]) == [b"1"]
    store.close()


def test_a_kill_does_not_take_the_callers_group_for_a_drivers():
    with pytest.raises(ConfigurationError, match="start_new_session"):
        FaultyStore(DictMap(), Kill(who=0)).multi_put(["a"], [1])


def test_a_store_that_forgets_shows_what_it_acknowledged_until_it_loses_it(store):
    forgetful = ForgetfulStore(store, last=2)
    for number in range(4):
        forgetful.multi_put(["a", f"b{number}"], [b"%d" % number, b"x"])
    keys = ["a", "b0", "b1", "b2", "b3"]
    assert forgetful.multi_get(keys) == [b"3", b"x", b"x", b"x", b"x"]
    assert store.multi_get(keys) == [b"1", b"x", b"x", None, None]
    if isinstance(store, Scan):
        assert {key for page in forgetful.scan(2) for key in page} == set(keys)
    assert forgetful.lose() == 2
    assert forgetful.multi_get(keys) == [b"1", b"x", b"x", None, None]
    assert forgetful.lose() == 0
    with pytest.raises(ConfigurationError):
        ForgetfulStore(store, last=0)


def test_a_store_that_forgets_loses_ledger_and_fence_with_the_records(store):
    if not isinstance(store, FencedWrites):
        return
    forgetful = ForgetfulStore(store, last=2)
    ledger, attempt = OneLedger.open_and_begin(forgetful, opening(state="s", keys=()), 0)
    first = forgetful.writer(attempt.token)
    first.multi_put(["a"], [b"[1,1,null]"])
    ledger.commit(committed(attempt))
    with pytest.raises(FencedError):
        first.multi_put(["a"], [b"late"])
    attempt = ledger.begin(1)
    forgetful.writer(attempt.token).multi_put(["a"], [b"[2,2,1]"])
    assert forgetful.multi_get(["a"]) == [b"[2,2,1]"]
    assert forgetful.lose() == 2  # the begin of batch 1, and its put
    assert forgetful.multi_get(["a"]) == [b"[1,1,null]"]
    with pytest.raises(FencedError):
        forgetful.writer(attempt.token).multi_put(["a"], [b"[2,2,1]"])
    with pytest.raises(StoreRestartedError, match="put back to an older copy"):
        ledger.commit(committed(attempt))


def test_an_attempt_that_lost_a_put_and_not_its_begin_cannot_be_committed():
    forgetful = ForgetfulStore(resolve(f"memory://{secrets.token_hex(8)}").open("s"), last=1)
    ledger, attempt = OneLedger.open_and_begin(forgetful, opening(state="s", keys=()), 0)
    writer = forgetful.writer(attempt.token)
    writer.multi_put(["a"], [b"[1,1,null]"])
    assert forgetful.lose() == 1
    writer.multi_put(["b"], [b"[1,1,null]"])  # the fence is where it was
    with pytest.raises(StoreRestartedError):
        ledger.commit(committed(attempt))
    again = ledger.begin(0)
    forgetful.writer(again.token).multi_put(["a", "b"], [b"[2,1,null]"] * 2)
    ledger.commit(committed(again))
    assert ledger.record.last_txid == again.txid


def test_a_stream_over_a_store_that_failed_over_stops_and_does_not_count_on():
    backend = ForgetfulBackend(resolve(f"memory://{secrets.token_hex(8)}"), last=2)
    ledger, attempt = OneLedger.open_and_begin(backend.open("s"), opening(state="s", keys=()), 0)
    assert backend.lose() == 1  # the begin was all there was
    with pytest.raises(StoreLostError):
        ledger.commit(committed(attempt))
    ledger, attempt = OneLedger.open_and_begin(backend.open("s"), opening(state="s", keys=()), 0)
    ledger.commit(committed(attempt))
    ledger.commit(committed(ledger.begin(1)))
    with open_reader(backend, "s") as reader:
        assert reader.ledger().last_commit.batch_id == 1
        assert backend.lose() == 2
        assert reader.ledger().last_commit.batch_id == 0
    with pytest.raises(MissingBatchesError):
        OneLedger.open_and_begin(backend.open("s"), opening(state="s", keys=()), 2)


def test_wait_for_ends_at_its_deadline():
    with pytest.raises(TimeoutError, match="the moon"):
        wait_for(lambda: False, "the moon", 0.05)


def checkpoint(place, commits, offsets):
    for log, ids in (("commits", commits), ("offsets", offsets)):
        (place / log).mkdir()
        for batch in ids:
            (place / log / str(batch)).write_text("v1\n{}")
            (place / log / f".{batch}.crc").write_bytes(b"crc")
    return place


def test_a_crash_between_takes_the_last_commit_back_with_its_checksum(tmp_path):
    place = checkpoint(tmp_path, range(11), range(11))
    assert crash_between(place) == 10
    assert not (place / "commits" / ".10.crc").exists()
    assert sorted(int(path.name) for path in (place / "commits").glob("[0-9]*")) == list(range(10))
    assert (place / "offsets" / "10").exists()
    with pytest.raises(UsageError, match="batch 9 has ended and batch 10 is the last one planned"):
        crash_between(place)  # did crash already; a second one would lose a batch
    assert (place / "commits" / "9").exists()


def test_a_crash_between_takes_a_file_uri_and_nothing_remote(tmp_path):
    assert crash_between(f"file://{checkpoint(tmp_path, [0], [0])}") == 0
    with pytest.raises(UsageError, match="no batch has ended"):
        crash_between(tmp_path)
    with pytest.raises(UsageError, match="not on this machine"):
        crash_between("s3a://bucket/checkpoint")
    with pytest.raises(UsageError, match="no batch has ended"):
        crash_between(tmp_path / "nowhere")


def test_importing_the_kit_loads_no_spark():
    code = "import sys, mapstate.testing; print(*{name.partition('.')[0] for name in sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"pyspark", "pyarrow", "psutil", "pytest", "hypothesis"} & set(done.stdout.split())
