"""The SQLite store: files, processes, forks, locks, full disks and damage; the rest is in test_contract_sqlite.py."""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from one_ledger import OneLedger
from states import Job

from mapstate import open_reader
from mapstate.backends import resolve
from mapstate.backends.sqlite import SqliteBackend, SqliteStore
from mapstate.backends.sqlite.problems import problem_of
from mapstate.backing_map import Backend
from mapstate.capabilities import FenceToken
from mapstate.errors import (
    ConfigurationError,
    CorruptLedgerError,
    CorruptRecordError,
    CorruptStoreError,
    FencedError,
    KeyEncodingError,
    MapStateError,
    StateNotFoundError,
    StoreError,
    StoreFullError,
    StoreRestartedError,
    StoreUnavailableError,
    TooLargeError,
)
from mapstate.operations.doctor import examine
from mapstate.operations.vacuum import vacuum
from mapstate.protocol.ledger_record import Commit, OpenRequest
from mapstate.schema import Field, KeyField

TOKEN = FenceToken(1, 5)
CLOSED = FenceToken(1, 5, closed=True)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "visits.db"


@pytest.fixture
def backend(path):
    return SqliteBackend(str(path))


@pytest.fixture
def store(backend):
    with contextlib.closing(backend.open("s")) as store:
        yield store


def rows(path, ask="SELECT key, record FROM mapstate_records ORDER BY state, key"):
    with contextlib.closing(sqlite3.connect(path)) as db:
        return db.execute(ask).fetchall()


def until(done, seconds=30):
    """Waits for ``done()``, which is expected soon."""
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.005)


@contextlib.contextmanager
def locked(path):
    """Another program in the middle of a write."""
    with contextlib.closing(sqlite3.connect(path, isolation_level=None, check_same_thread=False)) as db:
        db.execute("BEGIN IMMEDIATE")
        yield db
        if db.in_transaction:
            db.execute("ROLLBACK")


@contextlib.contextmanager
def running(code, *args, before=()):
    """Another process, at work on the same file. It is ours: in the end it is killed."""
    source = str(Path(sys.modules["mapstate"].__file__).parents[1])
    process = subprocess.Popen(
        [*before, sys.executable, "-u", "-c", code, *map(str, args)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": source},
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


# URLs


@pytest.mark.parametrize(
    ("url", "wanted"),
    [
        ("sqlite:////data/visits.db", SqliteBackend("/data/visits.db")),
        ("sqlite:////data/a%20b.db", SqliteBackend("/data/a b.db")),  # as in the URLs of Redis
        ("sqlite:////data/v.db?timeout=1.5", SqliteBackend("/data/v.db", timeout=1.5)),
        ("sqlite:////data/v.db?synchronous=normal&timeout=0", SqliteBackend("/data/v.db", 0, "normal")),
        ("sqlite:////data/v.db?max_value_bytes=1000", SqliteBackend("/data/v.db", max_value_bytes=1000)),
    ],
)
def test_a_url_names_a_file_and_how_to_open_it(url, wanted):
    backend = resolve(url)
    assert backend == wanted
    assert isinstance(backend, Backend)
    assert backend.shared_between_processes is True
    assert pickle.loads(pickle.dumps(backend)) == backend
    assert hash(backend) == hash(wanted)


def test_a_relative_path_is_made_absolute_where_the_url_is_resolved(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    backend = pickle.dumps(resolve("sqlite:///sub/../visits.db"))
    monkeypatch.chdir("/")
    assert Path(pickle.loads(backend).path).is_absolute()
    assert Path(pickle.loads(backend).path).resolve() == tmp_path / "visits.db"


@pytest.mark.parametrize("url", ["sqlite://", "sqlite:///", "sqlite:///:memory:", "sqlite:"])
def test_a_database_in_memory_is_refused_in_favour_of_memory(url):
    with pytest.raises(ConfigurationError, match="memory://"):
        SqliteBackend.from_url(url)


@pytest.mark.parametrize("url", ["sqlite://visits.db", "sqlite://host/visits.db", "sqlite:visits.db", "sqlite:/v.db"])
def test_a_url_with_too_few_slashes_says_how_many_it_takes(url):
    with pytest.raises(ConfigurationError, match="four slashes"):
        SqliteBackend.from_url(url)


def test_a_password_that_was_put_there_by_mistake_is_not_repeated():
    with pytest.raises(ConfigurationError) as caught:
        SqliteBackend.from_url("sqlite://user:hunter2@host/visits.db")
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    ("query", "named"),
    [
        ("timeuot=3", "timeuot"),
        ("mode=ro&uri=true", "'mode', 'uri'"),
        ("timeout=soon", "soon"),
        ("timeout=-1", "-1"),
        ("timeout=nan", "nan"),
        ("timeout=", "timeout"),
        ("synchronous=off", "off"),
        ("max_value_bytes=0", "max_value_bytes"),
        ("max_value_bytes=10000000000", "max_value_bytes"),
        ("max_value_bytes=x", "x"),
        ("max_value_bytes=1_0", "max_value_bytes cannot be '1_0'"),
        ("max_value_bytes=%D9%A3", "max_value_bytes cannot be"),
        ("max_value_bytes=+10%20", "max_value_bytes cannot be"),
        ("timeout=1_0", "timeout cannot be '1_0'"),
        ("timeout=%D9%A3", "timeout cannot be"),
        ("timeout=5&timeout=6", "timeout is given twice"),
        ("timeout=5&synchronous=full&timeout=5", "timeout is given twice"),
    ],
)
def test_a_parameter_that_is_unknown_or_wrong_is_named(query, named):
    with pytest.raises(ConfigurationError, match=named):
        resolve(f"sqlite:////data/v.db?{query}")


# Records


def test_what_is_put_is_there_for_others_and_in_the_file(backend, store, path):
    store.multi_put(["b", "a"], [b"2", b"1"])
    with contextlib.closing(backend.open("s")) as other:
        assert other.multi_get(["a", "no", "b", "a"]) == [b"1", None, b"2", b"1"]
    assert rows(path) == [("a", b"1"), ("b", b"2")]
    assert rows(path, "PRAGMA journal_mode") == [("wal",)]


def test_more_keys_than_a_statement_can_hold_are_read_in_order(store):
    keys = [f"k{at}" for at in range(65_001)]
    store.multi_put(keys, [key.encode() for key in keys])
    asked = [*reversed(keys), "no", *keys[:3]]
    assert store.multi_get(asked) == [None if key == "no" else key.encode() for key in asked]


@settings(max_examples=50)
@given(st.lists(st.tuples(st.text(max_size=5), st.binary(max_size=5)), max_size=20))
def test_any_text_is_a_key_and_any_bytes_a_record(tmp_path_factory, pairs):
    """NUL, quotes, wildcards, the empty text: a third party's codec may use them."""
    with contextlib.closing(SqliteBackend(str(tmp_path_factory.mktemp("any") / "x.db")).open("s")) as store:
        store.multi_put([key for key, _ in pairs], [value for _, value in pairs])
        wanted = dict(pairs)
        assert store.multi_get(list(wanted)) == list(wanted.values())
        assert sorted(key for page in store.scan(3) for key in page) == sorted(wanted)


def test_a_key_that_is_no_text_is_refused(store):
    store.multi_put(["a"], [b"1"])
    for call in (lambda: store.multi_get(["\ud800"]), lambda: store.multi_put(["b", "\ud800"], [b"1", b"2"])):
        with pytest.raises(KeyEncodingError):
            call()
    assert store.multi_get(["b"]) == [None]


def test_a_record_that_is_too_large_is_refused_before_anything_is_written(path):
    with contextlib.closing(SqliteBackend(str(path), max_value_bytes=10).open("s")) as store:
        store.multi_put(["a"], [b"x" * 10])
        for put in (store.multi_put, store.writer(TOKEN).multi_put):
            with pytest.raises(TooLargeError) as caught:
                put(["b", "c"], [b"", b"x" * 11])
            assert (caught.value.state, caught.value.key, caught.value.size) == ("s", "c", 11)
        assert store.multi_get(["a", "b"]) == [b"x" * 10, None]


# Files that are not there


def test_reading_a_file_that_is_not_there_does_not_make_it(store, path, tmp_path):
    assert store.load() is None
    assert store.multi_get(["a", "b"]) == [None, None]
    assert store.multi_get_with_ledger(["a"]) == (None, [None], None)
    assert list(store.scan(10)) == []
    with pytest.raises(FencedError):
        store.writer(TOKEN).multi_put(["a"], [b"1"])
    assert store.swap(b"new", b"old", TOKEN) is None
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(StateNotFoundError):
        open_reader(f"sqlite:///{path}", "s")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", ["empty", "other tables"])
def test_reading_a_file_without_our_tables_does_not_make_them(store, path, content):
    with contextlib.closing(sqlite3.connect(path)) as db, db:
        if content == "other tables":
            db.execute("CREATE TABLE theirs (a)")
        else:
            path.touch()
    assert (store.load(), store.multi_get(["a"]), list(store.scan(5))) == (None, [None], [])
    assert store.multi_get_with_ledger(["a"]) == (None, [None], None)
    assert store.swap(b"new", b"old", TOKEN) is None
    assert [name for (name,) in rows(path, "SELECT name FROM sqlite_master")] == (
        ["theirs"] if content == "other tables" else []
    )
    store.multi_put(["a"], [b"1"])
    assert store.multi_get(["a"]) == [b"1"]
    assert rows(path, "PRAGMA journal_mode") == [("wal",)]


def test_a_directory_that_is_not_there_is_named_on_write(tmp_path):
    with contextlib.closing(SqliteBackend(str(tmp_path / "no" / "visits.db")).open("s")) as store:
        assert store.load() is None
        for write in (
            lambda: store.multi_put(["a"], [b"1"]),
            lambda: store.swap(b"ledger", None, TOKEN),
            lambda: store.claim(1, 1, "me"),
        ):
            with pytest.raises(StoreUnavailableError, match="no directory") as caught:
                write()
            assert str(tmp_path / "no") in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_path_that_is_no_file_is_named(tmp_path):
    (tmp_path / "file").touch()
    for wrong in (tmp_path, tmp_path / "file" / "visits.db"):
        with (
            contextlib.closing(SqliteBackend(str(wrong)).open("s")) as store,
            pytest.raises(StoreUnavailableError) as caught,
        ):
            store.multi_put(["a"], [b"1"])
        assert str(wrong) in str(caught.value)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_that_may_not_be_written_is_named(tmp_path):
    tmp_path.chmod(0o500)
    with contextlib.closing(SqliteBackend(str(tmp_path / "visits.db")).open("s")) as store, pytest.raises(StoreError):
        store.multi_put(["a"], [b"1"])
    tmp_path.chmod(0o700)


def test_a_file_that_was_deleted_is_not_written_any_more(backend, store, path):
    """SQLite would go on with the file that has no name, and nobody would ever see what it writes."""
    ledger = OneLedger.open(store, opening())
    attempt = ledger.begin(0)
    writer = store.writer(attempt.token)
    writer.multi_put(["a"], [b"1"])
    for name in path.parent.iterdir():
        name.unlink()
    with pytest.raises(FencedError):
        writer.multi_put(["a"], [b"2"])
    assert store.multi_get(["a"]) == [None]
    assert store.load() is None
    assert not path.exists()


def test_a_file_that_was_replaced_is_the_one_that_is_read(backend, store, path, tmp_path):
    store.multi_put(["a"], [b"old"])
    with contextlib.closing(SqliteBackend(str(tmp_path / "other.db")).open("s")) as other:
        other.multi_put(["a"], [b"new"])
    assert store.multi_get(["a"]) == [b"old"]
    with contextlib.closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    (tmp_path / "other.db").replace(path)
    assert store.multi_get(["a"]) == [b"new"]


# Ledger, fence, claims


def opening(session="one", **changes):
    fields = {"state": "s", "type": "opaque", "serializer": "json", "keys": (), "fields": (), "owner": "q"}
    return OpenRequest(**(fields | {"clock_txid": 1000, "session": session} | changes))


def test_an_attempt_is_not_committed_to_a_copy_that_was_put_in_its_place(store, path):
    """The copy has the ledger with the attempt in flight, but not what the attempt wrote."""
    ledger = OneLedger.open(store, opening())
    attempt = ledger.begin(0)
    with contextlib.closing(sqlite3.connect(path)) as db:
        db.execute("VACUUM INTO ?", (f"{path}.copy",))
    store.writer(attempt.token).multi_put(["a"], [b"1"])
    Path(f"{path}.copy").rename(path)
    for name in (f"{path}-wal", f"{path}-shm"):
        Path(name).unlink(missing_ok=True)
    done = Commit(batch_id=0, txid=attempt.txid, owner="q")
    with pytest.raises(StoreRestartedError, match="can be begun anew"):
        ledger.commit(done)
    again = ledger.begin(0)
    store.writer(again.token).multi_put(["a"], [b"1"])
    ledger.commit(msgspec.structs.replace(done, txid=again.txid))
    assert ledger.record.dead == ((attempt.txid, attempt.txid),)


def test_the_first_claim_stands_until_the_next_swap(store):
    store.swap(b"one", None, TOKEN)
    assert store.claim(5, 0, "first") == "first"
    assert store.claim(5, 0, "second") == "first"
    assert store.claim(5, 0, "first") == "first"
    assert store.claim(5, 1, "second") == "second"
    assert store.claim(6, 0, "second") == "second"
    assert store.swap(b"two", b"wrong", CLOSED) is None
    assert store.claim(5, 0, "third") == "first"
    store.swap(b"two", store.load()[1], CLOSED)
    assert store.claim(5, 0, "third") == "third"


def test_ledger_and_records_are_read_from_one_snapshot(backend, store, monkeypatch):
    """A whole batch comes between the two reads; the reader sees none of it."""
    store.swap(b"old", None, TOKEN)
    store.multi_put(["a"], [b"old"])
    records = SqliteStore._records

    def batch_comes_between(self, db, keys):
        with contextlib.closing(backend.open("s")) as other:
            other.multi_put(["a"], [b"new"])
            assert other.swap(b"new", other.load()[1], CLOSED)
        return records(self, db, keys)

    monkeypatch.setattr(SqliteStore, "_records", batch_comes_between)
    assert store.multi_get_with_ledger(["a"]) == (b"old", [b"old"], b"old")
    monkeypatch.undo()
    assert store.multi_get_with_ledger(["a"]) == (b"new", [b"new"], b"new")


def test_rows_that_something_else_wrote_are_named_and_end_no_scan_no_vacuum_and_no_doctor(backend, path):
    """A record that is a number, a key that is no text: SQLite takes both."""
    counting = opening(state="visits", keys=(KeyField("k", "string"),), fields=(Field("n", "Count", "bigint"),))
    ledger, attempt = OneLedger.open_and_begin(backend.open("visits"), counting, 0)
    backend.open("visits").writer(attempt.token).multi_put(
        [f"k{at}" for at in range(9)], [b"[%d,1,null]" % attempt.txid] * 9
    )
    ledger.commit(Commit(batch_id=0, txid=attempt.txid, owner="q"))
    with contextlib.closing(sqlite3.connect(path)) as db, db:
        db.execute("UPDATE mapstate_records SET record = 5 WHERE key = 'k3'")
        db.execute("INSERT INTO mapstate_records VALUES ('visits', x'ff00', x'00')")
    seen = {}
    with open_reader(backend, "visits") as reader:
        with pytest.raises(CorruptRecordError, match="'k3'"):
            reader.get("k3")
        with pytest.raises(CorruptRecordError, match="2 keys") as caught:
            seen.update(reader.scan(2))
    assert set(seen) == {(f"k{at}",) for at in range(9) if at != 3}
    assert caught.value.keys == ["k3", repr(b"\xff\0")]
    assert any(one.found.startswith("2 keys cannot be read") for one in examine(backend, "visits"))
    assert vacuum(backend, "visits").unreadable == 2


def test_a_scan_lists_every_key_that_is_there_throughout(store):
    keys = [f"k{at:03}" for at in range(100)]
    store.multi_put(keys, [b"1"] * 100)
    pages = store.scan(7)
    seen = next(pages)
    store.multi_put(["k0000", "k500", *keys], [b"2"] * 102)  # nobody waits for the scan
    for page in pages:
        assert len(page) <= 7
        seen += page
    assert set(keys) <= set(seen)
    assert len(seen) == len(set(seen))
    assert "k500" in seen


# Threads


def test_a_store_may_be_opened_in_one_thread_and_used_in_others(store):
    store.multi_put(["a"], [b"1"])
    failures = []

    def work(name):
        try:
            for at in range(20):
                store.multi_put([f"{name}-{at}"], [b"1"])
                assert store.multi_get(["a", f"{name}-{at}"]) == [b"1", b"1"]
        except BaseException as error:  # noqa: BLE001  told to the test below
            failures.append(error)

    threads = [threading.Thread(target=work, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert sum(len(page) for page in store.scan(100)) == 81


def open_files(path):
    """Descriptors of this process on a database file."""
    found = 0
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the one that lists them
            found += descriptor.samefile(path)
    return found


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts descriptors as Linux shows them")
def test_close_closes_what_is_this_stores_and_nothing_else(backend, path):
    one, other = backend.open("s"), backend.open("t")
    one.multi_put(["a"], [b"1"])
    other.multi_put(["a"], [b"2"])
    for _ in range(5):
        one.multi_get(["a"])
    assert open_files(path) == 2
    one.close()
    one.close()
    assert other.multi_get(["a"]) == [b"2"]
    assert one.multi_get(["a"]) == [b"1"]  # opens again
    one.close()
    other.close()
    assert open_files(path) == 0


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts descriptors as Linux shows them")
def test_a_call_that_failed_leaves_no_connection_and_no_lock_behind(store, path):
    store.multi_put(["a"], [b"1"])
    with pytest.raises(KeyEncodingError):
        store.multi_put(["\ud800"], [b"1"])
    assert open_files(path) == 0
    with locked(path):
        pass
    store.multi_put(["a"], [b"2"])


def test_an_error_that_is_kept_keeps_no_lock(store, path):
    """A traceback holds what its frames held, and an open cursor among that would hold the transaction."""

    def fail(db):
        rows = db.execute("SELECT key FROM mapstate_records")
        db.execute("UPDATE mapstate_records SET record = 'x'")
        if next(rows):  # and two more to come
            raise sqlite3.OperationalError("made up")

    store.multi_put(["a", "b", "c"], [b"1"] * 3)
    with pytest.raises(StoreError) as caught:
        store._database.transaction("BEGIN IMMEDIATE", fail)
    with locked(path):
        assert caught.value.__traceback__ is not None
    assert store.multi_get(["a"]) == [b"1"]


def test_a_file_that_vanishes_while_it_is_opened_is_not_made_by_a_reader(store, path, monkeypatch):
    monkeypatch.setattr("mapstate.backends.sqlite.connection.identity_of", lambda path: (1, 1))
    with pytest.raises(StoreUnavailableError):
        store.load()
    assert not path.exists()


# Processes


WRITER = """
import sys
from mapstate.backends.sqlite import SqliteBackend
store = SqliteBackend(sys.argv[1]).open("s")
name, count = sys.argv[2], int(sys.argv[3])
print("ready")
sys.stdin.readline()
for at in range(count):
    store.multi_put([f"{name}-{at}", "shared"], [b"1", name.encode()])
print("done")
"""


def test_processes_that_start_on_no_file_at_once_all_write(path):
    with contextlib.ExitStack() as stack:
        processes = [stack.enter_context(running(WRITER, path, at, 25)) for at in range(4)]
        for process in processes:
            assert process.stdout.readline() == "ready\n"
        for process in processes:
            process.stdin.write("go\n")
            process.stdin.flush()
        for process in processes:
            assert process.stdout.readline() == "done\n"
    assert len(rows(path)) == 101


FENCED = """
import sys
from mapstate.backends.sqlite import SqliteBackend
from mapstate.capabilities import FenceToken
from mapstate.errors import FencedError
writer = SqliteBackend(sys.argv[1]).open("s").writer(FenceToken(1, 1000, nonce=sys.stdin.readline().strip()))
for line in sys.stdin:
    try:
        writer.multi_put(["a"], [line.strip().encode()])
        print("written")
    except FencedError as error:
        print("fenced", error.txid)
"""


def test_a_process_that_was_fenced_by_another_writes_no_more(store, path):
    ledger = OneLedger.open(store, opening())
    token = ledger.begin(0).token
    assert token[:2] == (1, 1000)
    with running(FENCED, path) as process:

        def ask(text):
            process.stdin.write(f"{text}\n")
            process.stdin.flush()
            return process.stdout.readline().strip()

        process.stdin.write(f"{token.nonce}\n")
        assert ask("1") == "written"
        ledger.begin(0)  # the attempt is begun anew
        assert ask("2") == "fenced 1000"
        ledger = OneLedger.open(store, opening("two"))
        assert ask("3") == "fenced 1000"
    assert store.multi_get(["a"]) == [b"1"]


def test_two_drivers_of_two_processes_are_told_apart(store, path):
    code = """
import sys
from mapstate.backends.sqlite import SqliteBackend
from mapstate.protocol.ledger_record import OpenRequest
from mapstate.protocol.ledgers import Ledgers
store = SqliteBackend(sys.argv[1]).open("s")
schema = {"type": "opaque", "serializer": "json", "keys": (), "fields": ()}
Ledgers([store], [OpenRequest(state="s", **schema, owner="q", clock_txid=1000)], ["refuse"]).open()
print("opened")
sys.stdin.readline()
"""
    mine = OneLedger.open(store, opening())
    attempt = mine.begin(0)
    with running(code, path) as process:
        assert process.stdout.readline() == "opened\n"
        with pytest.raises(FencedError):
            mine.commit(Commit(batch_id=0, txid=attempt.txid, owner="q"))


BIG_PUT = """
import sqlite3, sys
from itertools import count
from mapstate.backends.sqlite import SqliteBackend
from mapstate.backends.sqlite.connection import Connection
from mapstate.backends.sqlite.store import _ROWS_AT_ONCE
store = SqliteBackend(sys.argv[1]).open("s")
keys = [f"key-{at}" for at in range(150_000)]
store.multi_put(keys[:1000], [b"old"] * 1000)
print("ready")
sys.stdin.readline()
calls = count()
def execute(self, *args):
    if next(calls) == len(keys) // _ROWS_AT_ONCE * 9 // 10:
        sys.stdin.readline()  # until it is killed
    return sqlite3.Connection.execute(self, *args)
Connection.execute = execute
store.multi_put(keys, [b"new" * 100] * len(keys))
print("too late")
"""


def test_a_process_killed_in_mid_transaction_leaves_nothing_partial(store, path):
    with running(BIG_PUT, path) as process:
        assert process.stdout.readline() == "ready\n"
        wal = Path(f"{path}-wal")
        before = wal.stat().st_size
        process.stdin.write("go\n")
        process.stdin.flush()
        until(lambda: wal.stat().st_size > before + 1_000_000)  # it has begun to write
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        assert process.stdout.read() == ""
    assert {record for _, record in rows(path)} == {b"old"}
    assert sum(len(page) for page in store.scan(5000)) == 1000
    store.multi_put(["key-1"], [b"newer"])  # the lock went with the process
    assert store.multi_get(["key-1", "key-2", "key-2000"]) == [b"newer", b"old", None]
    assert rows(path, "PRAGMA integrity_check") == [("ok",)]


PUTS = """
import sys
from mapstate.backends.sqlite import SqliteBackend
store = SqliteBackend(sys.argv[1]).open("s")
keys = [f"key-{at}" for at in range(500)]
for at in range(10_000):
    store.multi_put(keys, [str(at).encode()] * 500)
    print(at)
"""


def test_a_process_killed_between_and_in_puts_leaves_whole_puts(store, path):
    for _ in range(3):
        with running(PUTS, path) as process:
            for _ in range(5):
                last = int(process.stdout.readline())
            process.send_signal(signal.SIGKILL)
            process.wait()
            last = max([last, *map(int, process.stdout.read().split())])
        [value] = set(store.multi_get([f"key-{at}" for at in range(500)]))
        assert int(value) in (last, last + 1)


FORK = """
import os, sys
from mapstate.backends.sqlite import SqliteBackend

backend = SqliteBackend(sys.argv[1])
store = backend.open("s")
store.multi_put(["a"], [b"parent"])
idle = backend.open("s")
idle.multi_get(["a"])
to_child, from_parent = os.pipe()
to_parent, from_child = os.pipe()
child = os.fork()
if child == 0:
    assert store.multi_get(["a"]) == [b"parent"]
    os.write(from_child, b".")
    os.read(to_child, 1)  # the parent has closed: in its eyes the last one
    store.multi_put(["b"], [b"child"])
    idle.multi_put(["c"], [b"child"])
    os.write(from_child, b".")
    os.read(to_child, 1)
    store.multi_put(["d"], [b"child"])
    os._exit(0)
os.read(to_parent, 1)
store.close()
idle.close()
os.write(from_parent, b".")
os.read(to_parent, 1)
print(store.multi_get(["a", "b", "c"]))
store.multi_put(["e"], [b"parent"])
os.write(from_parent, b".")
assert os.waitpid(child, 0)[1] == 0
print(store.multi_get(["d", "e"]))
"""


def test_what_a_child_commits_after_a_fork_is_not_lost(path):
    """With a connection open over the fork it would be: SQLite's locks do not pass to a child."""
    with running(FORK, path) as process:
        out, _ = process.communicate(timeout=60)
        assert process.returncode == 0
    assert out == "[b'parent', b'child', b'child']\n[b'child', b'parent']\n"
    assert len(rows(path)) == 5
    assert rows(path, "PRAGMA integrity_check") == [("ok",)]


FORK_WHILE_USED = """
import os, sys, threading
from mapstate.backends.sqlite import SqliteBackend

store = SqliteBackend(sys.argv[1]).open("s")
store.multi_put(["n"], [b"0"])
go_on = True

def work(name):
    at = 0
    while go_on:
        store.multi_put([f"{name}-{at % 50}"], [b"1"])
        at += 1

threads = [threading.Thread(target=work, args=(name,)) for name in range(3)]
for thread in threads:
    thread.start()
for at in range(20):
    child = os.fork()
    if child == 0:
        files = 0
        for name in os.listdir("/proc/self/fd") if os.path.exists("/proc/self/fd") else ():
            try:
                files += os.path.samefile(f"/proc/self/fd/{name}", sys.argv[1])
            except OSError:
                pass
        store.multi_put([f"child-{at}"], [b"1"])
        os._exit(files)
    status = os.waitpid(child, 0)[1]
    assert status == 0, f"{status >> 8} files were open over the fork"
go_on = False
for thread in threads:
    thread.join()
print(store.multi_get([f"child-{at}" for at in range(20)]) == [b"1"] * 20)
"""


@pytest.mark.full
@pytest.mark.slow
def test_a_fork_waits_for_the_calls_of_other_threads(path):
    with running(FORK_WHILE_USED, path) as process:
        out, _ = process.communicate(timeout=120)
        assert process.returncode == 0
    assert out == "True\n"
    assert rows(path, "PRAGMA integrity_check") == [("ok",)]


# Locks, full disks, damage


def test_a_locked_file_is_reported_in_bounded_time_with_who_may_hold_it(path):
    with contextlib.closing(SqliteBackend(str(path), timeout=0.2).open("s")) as store:
        store.multi_put(["a"], [b"1"])
        version = store.swap(b"ledger", None, TOKEN)
        with locked(path):
            for write in (
                lambda: store.multi_put(["a"], [b"2"]),
                lambda: store.writer(TOKEN).multi_put(["a"], [b"2"]),
                lambda: store.swap(b"new", version, CLOSED),
                lambda: store.claim(1, 1, "me"),
            ):
                started = time.monotonic()
                with pytest.raises(StoreUnavailableError) as caught:
                    write()
                assert 0.1 < time.monotonic() - started < 10
                assert str(path) in str(caught.value)
                for said in ("0.2 s", "another writer", "backup", "sqlite3 shell"):
                    assert said in str(caught.value)
                assert isinstance(caught.value.__cause__, sqlite3.OperationalError)
            assert store.multi_get_with_ledger(["a"]) == (b"ledger", [b"1"], b"ledger")  # readers do not wait
        store.multi_put(["a"], [b"2"])


def test_a_ledger_that_is_locked_is_an_error_after_the_timeout_and_not_after_eight(path, monkeypatch):
    opening = OpenRequest(
        state="s",
        type="opaque",
        serializer="json",
        keys=(),
        fields=(Field("n", "Count", "bigint"),),
        owner="q",
        clock_txid=1,
    )
    backend = SqliteBackend(str(path), timeout=0.5)
    with contextlib.closing(backend.open("s")) as store, contextlib.closing(backend.open("s")) as other:
        ledger = OneLedger.open(store, opening)
        attempt = ledger.begin(0)
        tries = []
        monkeypatch.setattr(
            "mapstate.backends.sqlite.connection.problem_of",
            lambda error, **facts: tries.append(error) or problem_of(error, **facts),
        )
        with locked(path):
            for change in (
                lambda: ledger.commit(Commit(batch_id=0, txid=attempt.txid, owner="q")),
                lambda: ledger.begin(0),
                lambda: OneLedger.open(other, opening),
            ):
                with pytest.raises(StoreUnavailableError, match=r"for more than 0\.5 s"):
                    change()
        assert len(tries) == 3  # each of them waits for the timeout
        ledger.commit(Commit(batch_id=0, txid=attempt.txid, owner="q"))


def test_a_lock_that_is_let_go_in_time_is_waited_for(store, path):
    store.multi_put(["a"], [b"1"])
    with locked(path) as db:
        close_if_possible = threading.Timer(0.1, lambda: db.execute("ROLLBACK"))
        close_if_possible.start()
        store.multi_put(["a"], [b"2"])
        close_if_possible.join()
    assert store.multi_get(["a"]) == [b"2"]


def limited(monkeypatch, pages):
    """A disk that ends after so many pages, as far as SQLite can see."""
    connect = sqlite3.connect

    def connect_limited(*args, **options):
        db = connect(*args, **options)
        db.execute(f"PRAGMA max_page_count = {pages}")
        return db

    monkeypatch.setattr("mapstate.backends.sqlite.connection.sqlite3.connect", connect_limited)


def test_a_full_disk_is_reported_and_nothing_of_the_put_is_there(store, path, monkeypatch):
    store.multi_put(["a"], [b"1"])
    store.swap(b"ledger", None, TOKEN)
    store.close()
    limited(monkeypatch, 20)
    keys = [f"k{at}" for at in range(1000)]
    for put in (store.multi_put, store.writer(TOKEN).multi_put):
        with pytest.raises(StoreFullError) as caught:
            put(["a", *keys], [b"2" * 1000] * 1001)
        assert str(path) in str(caught.value)
    with pytest.raises(StoreFullError):
        store.swap(b"x" * 1_000_000, store.load()[1], CLOSED)
    monkeypatch.undo()
    assert store.multi_get(["a", "k1"]) == [b"1", None]
    assert store.load()[0] == b"ledger"
    store.writer(TOKEN).multi_put(["a"], [b"3"])


FULL = """
import sys
from pathlib import Path
from mapstate.backends.sqlite import SqliteBackend
from mapstate.errors import StoreFullError
ballast = Path(sys.argv[1], "ballast")
ballast.write_bytes(b"x" * 300_000)
store = SqliteBackend(sys.argv[1] + "/visits.db").open("s")
store.multi_put(["a"], [b"1"])
try:
    store.multi_put([f"k{at}" for at in range(500)], [b"2" * 1000] * 500)
except StoreFullError as error:
    print(store.multi_get(["a", "k1"]), error.__cause__)
    ballast.unlink()
    store.multi_put(["b"], [b"3"])
    print(store.multi_get(["a", "b"]))
"""


def test_a_disk_that_is_really_full_is_reported_and_writes_go_on_when_there_is_room(tmp_path):
    """A disk of one megabyte, mounted where only the process of the test sees it."""
    command = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o size=1m small "$1" && shift && exec "$@"', "sh"]
    command.append(str(tmp_path))
    if not shutil.which("unshare") or subprocess.run([*command, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this user cannot mount a small disk")
    with running(FULL, tmp_path, before=command) as process:
        out, _ = process.communicate(timeout=60)
    assert out == "[b'1', None] database or disk is full\n[b'1', b'3']\n"


@pytest.mark.parametrize(
    "content", [b"not a database" * 100, b"SQLite format 3\x00" + b"\xff" * 8192], ids=["text", "header"]
)
def test_a_file_that_is_no_database_is_named_and_left_alone(store, path, content):
    path.write_bytes(content)
    for call in (
        lambda: store.multi_put(["a"], [b"1"]),
        lambda: store.multi_get(["a"]),
        store.load,
        lambda: store.swap(b"ledger", None, TOKEN),
        lambda: list(store.scan(1)),
    ):
        with pytest.raises(StoreError, match="no SQLite database") as caught:
            call()
        assert str(path) in str(caught.value)
        assert not isinstance(caught.value, StoreUnavailableError)
    assert path.read_bytes() == content


def test_a_damaged_database_is_named(store, path):
    store.multi_put([f"k{at}" for at in range(5000)], [b"1" * 50] * 5000)
    store.close()
    data = bytearray(path.read_bytes())
    data[4096:] = b"\xa5" * (len(data) - 4096)
    path.write_bytes(data)
    with pytest.raises(StoreError, match="damaged") as caught:
        store.multi_get([f"k{at}" for at in range(5000)])
    assert str(path) in str(caught.value)


def test_a_scan_of_a_file_whose_keys_are_out_of_order_ends(store, path):
    store.multi_put([f"k{at}" for at in range(5000)], [b"1" * 50] * 5000)
    store.close()
    path.write_bytes(path.read_bytes().replace(b"k49", b"a49"))
    with pytest.raises(CorruptStoreError, match="out of order"):
        for _ in zip(store.scan(10), range(2000), strict=False):
            pass


@pytest.mark.parametrize("encoding", ["UTF-8", "UTF-16le", "UTF-16be"])
def test_a_scan_follows_the_order_of_the_files_encoding(encoding, path):
    with contextlib.closing(sqlite3.connect(path)) as db:
        db.execute(f"PRAGMA encoding = '{encoding}'")
        db.execute("CREATE TABLE of_somebody_else (a)")
    keys = ["a", "Ā", "ü", "\U0001f600", "\uffee", "Z"]
    with contextlib.closing(SqliteBackend(str(path)).open("s")) as store:
        store.multi_put(keys, [b"1"] * len(keys))
        assert sorted(key for page in store.scan(1) for key in page) == sorted(keys)


@settings(max_examples=60)
@given(
    at=st.floats(0, 1, exclude_max=True),
    garbage=st.one_of(st.binary(min_size=1, max_size=600), st.integers(1, 255).map(lambda byte: bytes([byte]) * 4096)),
    cut=st.booleans(),
)
@example(at=0.0, garbage=b"\xff" * 4096, cut=False)
@example(at=0.9483024828342702, garbage=b"\x0b" * 4096, cut=False)  # a key is NULL
def test_whatever_a_file_is_damaged_to_it_is_an_error_of_ours(whole_file, at, garbage, cut):
    data, place = whole_file
    at = int(at * len(data))
    for left in place.parent.glob("damaged.db*"):
        left.unlink()
    place.write_bytes(data[:at] if cut else data[:at] + garbage + data[at + len(garbage) :])
    backend = SqliteBackend(str(place))
    for use in (
        lambda: open_reader(backend, "s").multi_get([f"key{at}" for at in range(400)]),
        lambda: list(open_reader(backend, "s").scan()),
        lambda: open_reader(backend, "s").reports(),
        lambda: examine(backend, "s"),
        lambda: vacuum(backend, "s", take_over=True),
        lambda: Job(backend).batch(key1=1),
    ):
        with contextlib.suppress(MapStateError):
            use()


@pytest.fixture(scope="module")
def whole_file(tmp_path_factory):
    """A file with a state in it, all of it out of the WAL, and where damaged copies of it go."""
    folder = tmp_path_factory.mktemp("whole")
    job = Job(SqliteBackend(str(folder / "whole.db")))
    for size in range(3):
        job.batch(**{f"key{at}": size for at in range(400)})
    job.store.close()
    rows(folder / "whole.db", "PRAGMA wal_checkpoint(TRUNCATE)")
    return (folder / "whole.db").read_bytes(), folder / "damaged.db"


@pytest.mark.parametrize("damage", ["in SQLite's own message", "a page", "a key that is no text"])
def test_a_damaged_file_is_a_corrupt_store(damage, path):
    backend = SqliteBackend(str(path))
    job = Job(backend)
    job.batch(**{f"key{at}": 1 for at in range(400)})
    job.store.close()
    rows(path, "PRAGMA wal_checkpoint(TRUNCATE)")
    if damage == "a key that is no text":
        with contextlib.closing(sqlite3.connect(path)) as db, db:
            db.execute("UPDATE mapstate_records SET key = CAST(x'80ff' AS TEXT) WHERE key = 'key7'")
    else:
        data = bytearray(path.read_bytes())
        if damage == "a page":
            data[4096:] = b"\xa5" * (len(data) - 4096)
        else:  # it repeats the name of a table whose definition it cannot read
            at = data.index(b"CREATE TABLE mapstate_records")
            data[at : at + 12] = b"CREATE\xff\xffBLE"[:12].ljust(12, b"\xff")
        path.write_bytes(data)
    with pytest.raises(CorruptStoreError, match="is damaged") as caught:
        list(open_reader(backend, "s").scan())
    assert str(path) in str(caught.value)


def test_doctor_finds_an_index_that_lacks_what_the_table_has(path):
    """SQLite's quick check does not: it compares no index with its table."""
    backend = SqliteBackend(str(path))
    for state in ("visits", "s"):
        with contextlib.closing(backend.open(state)) as store:
            store.swap(b"{}", None, TOKEN)
    job = Job(SqliteBackend(str(path.with_name("other.db"))))
    found = job.store.load()[0]
    job.store.close()
    with contextlib.closing(backend.open("s")) as store:
        store.swap(found, store.load()[1], TOKEN)
    rows(path, "PRAGMA wal_checkpoint(TRUNCATE)")
    root = rows(path, "SELECT rootpage FROM sqlite_master WHERE name = 'sqlite_autoindex_mapstate_ledgers_1'")[0][0]
    data = bytearray(path.read_bytes())
    at = data.index(b"visits", (root - 1) * 4096, root * 4096)
    data[at : at + 6] = b"visitz"
    path.write_bytes(data)
    assert rows(path, "PRAGMA quick_check") == [("ok",)]
    found = {one.subject: one for one in examine(backend, "s")}["integrity_check"]
    assert (found.severity, "missing from index" in found.found) == ("error", True)


@pytest.mark.parametrize("column", ["mapstate_ledgers", "mapstate_records"])
def test_a_number_where_a_record_should_be_is_a_corrupt_record(column, path):
    backend = SqliteBackend(str(path))
    job = Job(backend)
    job.batch(a=1)
    job.store.close()
    with contextlib.closing(sqlite3.connect(path)) as db, db:
        db.execute(f"UPDATE {column} SET record = 7")
    kind = CorruptLedgerError if column == "mapstate_ledgers" else CorruptRecordError
    for use in (
        lambda: open_reader(backend, "s").multi_get(["a"]),
        lambda: list(open_reader(backend, "s").scan()),
    ):
        with pytest.raises(kind):
            use()
    if kind is CorruptLedgerError:
        with pytest.raises(kind):
            vacuum(backend, "s")
    else:
        assert vacuum(backend, "s").unreadable_keys == ("a",)


def test_a_path_with_a_nul_is_refused_when_it_is_given():
    for make in (lambda: SqliteBackend("/tmp/a\0b.db"), lambda: resolve("sqlite:////tmp/a\0b.db")):
        with pytest.raises(ConfigurationError, match="NUL"):
            make()


def test_a_file_that_may_only_be_read_is_read(store, path, monkeypatch):
    store.multi_put(["a"], [b"1"])
    store.close()
    connect = sqlite3.connect

    def connect_read_only(*args, **options):
        db = connect(*args, **options)
        db.execute("PRAGMA query_only = 1")
        return db

    monkeypatch.setattr("mapstate.backends.sqlite.connection.sqlite3.connect", connect_read_only)
    assert store.multi_get(["a"]) == [b"1"]
    with pytest.raises(StoreError, match="only be read") as caught:
        store.multi_put(["a"], [b"2"])
    assert str(path) in str(caught.value)


def test_tables_of_others_under_our_names_are_an_error_and_left_alone(store, path):
    with contextlib.closing(sqlite3.connect(path)) as db, db:
        db.execute("CREATE TABLE mapstate_records (theirs)")
    with pytest.raises(StoreError) as caught:
        store.multi_put(["a"], [b"1"])
    assert str(path) in str(caught.value)
    assert rows(path, "SELECT * FROM mapstate_records") == []


def test_a_file_that_cannot_even_be_looked_at_is_an_error_and_not_an_absent_state(store, path):
    path.symlink_to(path)
    for read in (store.load, lambda: store.multi_get(["a"]), lambda: store.multi_get_with_ledger(["a"])):
        with pytest.raises(StoreUnavailableError) as caught:
            read()
        assert str(path) in str(caught.value)


@pytest.mark.parametrize("count", [1, 49, 50, 51, 100, 149])
@pytest.mark.parametrize("longest", [20, 100_000])
def test_chunks_of_every_length_are_stored_whether_records_go_many_to_a_statement_or_alone(tmp_path, count, longest):
    store = SqliteBackend(str(tmp_path / "state.db")).open("visits")
    keys = [f"user-{at}" for at in range(count)]
    for turn in range(2):
        values = [bytes([at % 256, turn]) for at in range(count - 1)] + [b"x" * longest]
        store.multi_put(keys, values)
        assert store.multi_get(keys) == values
    store.close()
