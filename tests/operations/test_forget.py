"""Forget on every store: the value, the value before, and each byte of the key are gone, and nothing brings it back."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from cases import full
from every_store import AEROSPIKE, CLUSTER, REDIS, url_of
from rolled import Rolled
from rolled import Row as RolledRow
from states import Job, LoggedJob, N, contents, made_of_one_batch, messy, stored
from typer.testing import CliRunner
from versions import Version
from windowed import Row, Windowed

from mapstate import open_reader
from mapstate.backends import resolve
from mapstate.cli.commands import app
from mapstate.errors import ChangesGoneError, ConfigurationError, DataError, FencedError, RollbackError, UsageError
from mapstate.keys import KeyCodec
from mapstate.maps.operator_list import ForgottenRows, ListedKeys, ListEntry, Place, digest_of
from mapstate.operations.doctor import examine
from mapstate.operations.drop import drop
from mapstate.operations.forget import forget, forget_listed, listed, when_caught_up
from mapstate.operations.swap import swap
from mapstate.operations.vacuum import vacuum
from mapstate.protocol.ledger import Ledger
from mapstate.protocol.ledger_record import AlreadyCommitted
from mapstate.schema import KeyField
from mapstate.testing import wait_for

SECRET = "kai-u5er"
MARKS = (SECRET, "4711471147", "4712471247")
"""Ten digits: four of them are in the hexadecimal digits of one salt in a thousand."""

FENCED = ["memory", "sqlite", REDIS, CLUSTER]


@pytest.fixture(params=[*FENCED, AEROSPIKE])
def url(request: Any, tmp_path: Any) -> str:
    """A store of each kind, empty."""
    return url_of(request, tmp_path)


def forgets(backend: Any, key: str = SECRET, **changes: Any) -> Any:
    return forget(backend, "s", {"k": key}, **{"id": "ticket-7", "followers_have": 0} | changes)


def names(url: str, *marks: str) -> list[str]:
    """The records with a key or its values in them, but for those without a value: Aerospike keeps their names."""
    found = {name: data for name, data in stored(url).items() if not isinstance(data, list) or data[:2] != [None, None]}
    return [name for name, data in found.items() if any(mark in f"{name} {data!r}" for mark in marks or MARKS)]


def held(url: str) -> int | None:
    with open_reader(url, "s") as reader:
        return reader.key_count()


def test_no_record_names_the_key_or_has_its_value(url):
    leaves_nothing(Job(url), url)


@pytest.mark.parametrize("url", FENCED, indirect=True)
def test_no_record_of_a_state_with_a_change_log_has_its_value(url):
    leaves_nothing(LoggedJob(url), url)


def leaves_nothing(job: Job, url: str) -> None:
    job.batch(**{SECRET: 4711471147, "other": 1})
    job.batch(**{SECRET: 4712471247})
    job.attempt(**{SECRET: 4711471147, "phantom": 5})
    job.ledger.ledgers.open()  # that attempt is left behind
    assert names(url)
    done = forgets(url)
    assert (done.keys, done.was_done, done.log_until) == (1, False, None)
    assert names(url) == []
    assert contents(url) == {"other": 1}
    assert held(url) == 1
    assert [one.severity for one in examine(url, "s") if one.subject == "records"] == ["ok"]


def test_rows_that_come_later_begin_the_key_from_nothing(url):
    job = Job(url)
    job.batch(**{SECRET: 4711471147, "other": 1})
    forgets(url)
    job.batch(**{SECRET: 2})
    assert contents(url) == {SECRET: 2, "other": 1}
    assert forgets(url).was_done
    assert contents(url) == {SECRET: 2, "other": 1}
    assert held(url) == 2
    assert vacuum(url, "s").unreadable == 0
    assert [entry.id for entry in listed(url, "s")] == ["ticket-7"]


def test_a_key_that_the_state_never_had_is_listed_all_the_same(url):
    Job(url).batch(other=1)
    assert forgets(url).keys == 0
    (entry,) = listed(url, "s")
    assert entry.purged
    job = Job(url)
    assert SECRET in ListedKeys(job.ledger.record.keys, [entry])
    assert "other" not in ListedKeys(job.ledger.record.keys, [entry])
    assert SECRET not in json.dumps(str(entry))


def test_an_id_stands_for_one_key(url):
    Job(url).batch(**{SECRET: 4711471147, "other": 1})
    first = forgets(url)
    again = forgets(url)
    assert (again.txid, again.keys, again.was_done) == (first.txid, 1, True)
    before = stored(url)
    with pytest.raises(UsageError, match="other keys under the id 'ticket-7'"):
        forgets(url, "other")
    assert stored(url) == before
    assert forgets(url, "other", id="ticket-8").keys == 1
    assert contents(url) == {}
    assert [entry.id for entry in listed(url, "s")] == ["ticket-7", "ticket-8"]


def test_messy_records_are_forgotten_one_by_one(url):
    truth = messy(url)
    for at, key in enumerate(["dead", "gone", "phantom", "touched", "left"]):
        Ledger(resolve(url).open("s"), "s")
        forgets(url, key, id=f"ticket-{at}")
        truth.pop(key, None)
        assert contents(url) == truth
        assert key not in names(url, key)


def test_it_is_refused_while_a_batch_is_in_flight(url):
    job = Job(url)
    job.batch(**{SECRET: 4711471147})
    job.attempt(**{SECRET: 1})
    before = stored(url)
    with pytest.raises(UsageError, match="in flight"):
        forgets(url)
    assert stored(url) == before


def test_columns_that_the_state_lacks_are_refused_by_name(url):
    Job(url).batch(other=1)
    with pytest.raises(UsageError, match="by 'user_id': its key columns are k"):
        forget(url, "s", {"user_id": "a"}, id="t")


@pytest.mark.parametrize("url", FENCED, indirect=True)
@pytest.mark.parametrize("kind", ["transactional", "non-transactional"])
def test_states_without_a_value_before_forget_in_one_attempt(url, kind):
    job = Job(url, type=kind)
    job.batch(**{SECRET: 4711471147, "other": 1})
    txid = job.ledger.record.next_txid
    assert forgets(url).keys == 1
    assert names(url) == []
    assert contents(url) == {"other": 1}
    assert held(url) == 1
    assert job.ledger.operator.load().next_txid == txid + 1
    job.batch(**{SECRET: 2})
    assert contents(url) == {SECRET: 2, "other": 1}


def test_beside_an_attempt_that_was_left_the_way_is_a_vacuum(url):
    job = Job(url)
    job.batch(**{SECRET: 4711471147})
    job.attempt(**{SECRET: 4712471247})
    with pytest.raises(UsageError, match="run mapstate vacuum --take-over of an opaque state"):
        forgets(url)
    vacuum(url, "s", take_over=True)
    assert forgets(url).keys == 1


def test_a_transactional_batch_that_has_to_be_repeated_is_not_replaced(url):
    job = Job(url, type="transactional")
    job.batch(**{SECRET: 4711471147})
    job.attempt(**{SECRET: 4712471247})
    job.ledger.ledgers.open()
    with pytest.raises(UsageError, match="has batch 1 in flight, which has to be repeated"):
        forgets(url)


def test_aerospike_keeps_the_name_of_the_key_without_any_value(stand_in):
    """A late writer could make a removed record anew there, as nothing fences it."""
    backend = stand_in.backend()
    job = Job(backend)
    job.batch(**{SECRET: 4711471147, "other": 1})
    late = job.attempt(**{SECRET: 4712471247})
    job.ledger.ledgers.open()
    done = forgets(backend)
    assert any("keeps a record without a value" in place for place in done.not_reached)
    assert any("underneath" in place for place in done.not_reached)
    assert contents(backend) == {"other": 1}
    ((_, *values),) = job.codec.loads([SECRET], job.store.multi_get([SECRET]))
    assert values == [None, None]
    with pytest.raises(FencedError):
        job.store.filtered_writer(late.token).multi_put(
            [SECRET], job.codec.dumps([(late.txid, 4712471247, 4711471147)])
        )
    assert contents(backend) == {"other": 1}
    assert forgets(backend).was_done


# It does not come back


def test_a_batch_that_comes_again_brings_nothing_back_and_none_is_rolled_back_over_it(url):
    job = Job(url)
    job.batch(**{SECRET: 4711471147, "other": 1})
    forgets(url)
    job.ledger.ledgers.open()
    assert isinstance(job.ledger.begin(0), AlreadyCommitted)
    with pytest.raises(RollbackError):
        job.ledger.operator.rollback()
    assert contents(url) == {"other": 1}


def test_the_list_is_there_after_a_vacuum_and_later_batches(url):
    job = Job(url)
    job.batch(**{SECRET: 4711471147, "other": 1})
    forgets(url)
    job.attempt(other=7)
    job.ledger.ledgers.open()
    job.batch(third=1)
    job.attempt(other=9)
    job.ledger.ledgers.open()
    job.batch(other=2)
    vacuum(url, "s")
    assert [entry.id for entry in listed(url, "s")] == ["ticket-7"]
    assert contents(url) == {"other": 2, "third": 1}


def test_a_copy_from_before_forgets_by_the_list_and_again_when_it_has_caught_up(tmp_path):
    url, copy = f"sqlite:///{tmp_path}/state.db", f"sqlite:///{tmp_path}/copy.db"
    for place in (url, copy):
        Job(place).batch(**{SECRET: 4711471147, "other": 1})
    Job(url).batch(**{SECRET: 4712471247})
    forgets(url)
    entries = listed(url, "s")
    (done,) = forget_listed(copy, "s", entries, followers_have=0)
    assert (done.keys, contents(copy)) == (1, {"other": 1})
    assert forget_listed(copy, "s", entries, followers_have=0) == []  # nothing has changed since
    Job(copy).batch(**{SECRET: 4712471247})  # the batch that the copy lacked comes again
    (done,) = forget_listed(copy, "s", entries, followers_have=0)
    assert (done.keys, contents(copy)) == (1, {"other": 1})
    Job(copy).batch(**{SECRET: 1})  # rows of later
    assert forget_listed(copy, "s", entries, followers_have=0) == []
    assert contents(copy) == {"other": 1, SECRET: 1}
    assert names(copy) == [SECRET]


# Windows and followers


def windows(url: str) -> dict[Any, Any]:
    with open_reader(url, "s") as reader:
        return {key: value["total"] for key, value in reader.scan()}


def test_all_windows_of_a_key_are_gone_and_the_others_are_purged_as_ever(url, tmp_path):
    job = Windowed(url, retention=20)
    job.batch(*[Row(at, user, 4711471147) for at in (1, 11, 21) for user in (SECRET, "b", "c")])
    assert names(url)
    assert forget(url, "s", {"user": SECRET}, id="t").keys == 3
    assert names(url, SECRET) == []
    twin = Windowed(f"memory://{tmp_path.name}-twin", retention=20)  # to which these rows never came
    twin.batch(*[Row(at, user, 4711471147) for at in (1, 11, 21) for user in ("b", "c")])
    job = job.restarted()
    for rows in ([Row(22, SECRET, 5), Row(45, "b", 1)], *([Row(at, "b", 1)] for at in (60, 80, 120))):
        for one in (job, twin):
            one.batch(*rows)
        assert windows(url) == windows(f"memory://{tmp_path.name}-twin")
    assert names(url, SECRET) == []
    with pytest.raises(UsageError, match="its key columns are user"):
        forget(url, "s", {"window_start": 20}, id="u")


def test_windows_are_whole_between_the_two_writes_of_a_forget(url, monkeypatch):
    """A pane that still named the key looked as if the store had lost its record."""
    job = Windowed(url, retention=60)
    job.batch(*[Row(at, user, 1) for at in (1, 11, 21) for user in (SECRET, "b")])
    with monkeypatch.context() as patch:
        patch.setattr("mapstate.operations.forget._Forgetting._second", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            forget(url, "s", {"user": SECRET}, id="t")
    with open_reader(url, "s") as reader:
        assert [key for key, _ in reader.window(10)] == [("b",)]
        job.restarted().batch(Row(45, "b", 1))
        assert [key for key, _ in reader.window(30)] == [("b",)]
    assert forget(url, "s", {"user": SECRET}, id="t").keys == 3
    assert names(url, SECRET) == []


def test_a_key_of_windows_that_came_back_between_the_two_writes_stays(url, monkeypatch):
    job = Windowed(url, retention=60)
    job.batch(*[Row(at, user, 4711471147) for at in (1, 21) for user in (SECRET, "b")])
    with monkeypatch.context() as patch:
        patch.setattr("mapstate.operations.forget._Forgetting._second", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            forget(url, "s", {"user": SECRET}, id="t")
    job.restarted().batch(Row(22, SECRET, 5), Row(45, "b", 1))
    assert forget(url, "s", {"user": SECRET}, id="t").keys == 2
    with open_reader(url, "s") as reader:
        assert {key: value["total"] for key, value in reader.window(30)} == {(SECRET,): 5, ("b",): 4711471147}
        assert [key for key, _ in reader.window(10)] == [("b",)]


def test_rolling_windows_forget_a_key(url):
    job = Rolled(url)
    job.batch(RolledRow(1, SECRET, 4711471147), RolledRow(2, "b", 1))
    assert SECRET in stored(url)
    assert forget(url, "s", {"user": SECRET}, id="t").keys == 1
    assert names(url) == []
    job.batch(RolledRow(3, SECRET, 5), RolledRow(3, "b", 1))
    assert job.right("b")


@pytest.mark.parametrize("url", FENCED, indirect=True)
def test_followers_are_told_and_the_log_goes_once_they_have_read_it(url):
    job = LoggedJob(url)
    job.batch(**{SECRET: 4711471147, "other": 1})
    with open_reader(url, "s") as reader:
        before = reader.position()
    done = forgets(url, followers_have=86_400)
    assert done.log_until
    assert all("#" in name for name in names(url))  # the change log has the name of the key
    with open_reader(url, "s") as reader:
        assert reader.changed_keys(before, reader.position()) == [(SECRET,)]
        removed = reader.position()
    assert forgets(url, followers_have=86_400).log_until
    assert forgets(url).log_until is None
    assert names(url) == []
    job.batch(other=2)
    with open_reader(url, "s") as reader:
        assert reader.changed_keys(removed, reader.position()) == [("other",)]
        with pytest.raises(ChangesGoneError):
            reader.changed_keys(before, reader.position())
    assert contents(url) == {"other": 2}


@pytest.mark.parametrize("time", [1e12, float("inf"), float("nan"), -1, "1d"])
def test_a_time_that_followers_cannot_have_is_refused_before_anything_is_written(time, url):
    Job(url).batch(**{SECRET: 4711471147})
    with pytest.raises(ConfigurationError, match="followers_have is a number of seconds from 0 to"):
        forget(url, "s", {"k": SECRET}, id="t", followers_have=time)
    assert contents(url) == {SECRET: 4711471147}


@pytest.mark.parametrize("name", [4711471147, None, True, "", " ", "\ud800", "x" * 201])
def test_an_id_that_no_list_can_hold_is_refused_before_anything_is_written(name, url):
    """A number was written as one, and then the list could not be read any more."""
    Job(url).batch(**{SECRET: 4711471147})
    with pytest.raises(UsageError, match="id is the forget's own name"):
        forgets(url, id=name)
    assert contents(url) == {SECRET: 4711471147}
    assert listed(url, "s") == []


@pytest.mark.parametrize("salt", ["", "ab", "x" * 32, b"0" * 32, 5])
def test_a_salt_is_32_digits(salt, url):
    Job(url).batch(**{SECRET: 4711471147})
    with pytest.raises(UsageError, match="32 hexadecimal digits"):
        forgets(url, salt=salt)
    assert contents(url) == {SECRET: 4711471147}


# The command


def run(*args: Any, answer: str | None = None) -> Any:
    return CliRunner().invoke(app, list(map(str, args)), input=answer)


def test_the_command_asks_and_says_what_it_cannot_reach(url):
    Job(url).batch(**{SECRET: 4711471147, "other": 1})
    assert run("forget", url, "s", SECRET, "--id", "t", answer="n\n").exit_code == 1
    assert contents(url) == {SECRET: 4711471147, "other": 1}
    done = run("forget", url, "s", SECRET, "--id", "t", answer="y\n")
    assert "s: 1 keys forgotten as txid 1001" in done.stdout
    assert "Not reached: exports, backups and snapshots of the store" in done.stdout
    again = json.loads(run("forget", url, "s", SECRET, "--id", "t", "--yes", "--json").stdout)
    assert [(one["keys"], one["was_done"]) for one in again] == [(1, True)]
    assert contents(url) == {"other": 1}
    assert "forgotten" in run("ledger", url, "s").stdout


def test_the_command_forgets_by_a_column_in_all_states_that_have_it(url):
    day, user = KeyField("day", "date"), KeyField("user", "string")
    made_of_one_batch(url, "by_day", (day, user), (N,), {f"2026-11-2{at}|{SECRET}": 4711471147 for at in range(3)})
    made_of_one_batch(url, "by_user", (user,), (N,), {SECRET: 4711471147, "other": 1})
    made_of_one_batch(url, "by_page", (KeyField("page", "string"),), (N,), {SECRET: 1})
    done = run("forget", url, "--where", f"user={SECRET}", "--id", "t", "--yes")
    assert "by_page is not keyed by user: it is left as it is" in done.stdout
    assert "by_day: 3 keys forgotten" in done.stdout
    assert "by_user: 1 keys forgotten" in done.stdout
    for state, left in (("by_day", 0), ("by_user", 1), ("by_page", 1)):
        with open_reader(url, state) as reader:
            assert len(list(reader.scan())) == reader.key_count() == left


def test_the_command_goes_on_past_an_alias_alone_and_has_one_hash_for_all(tmp_path):
    url = f"sqlite:///{tmp_path}/state.db"
    for state in ("v", "v.2", "w"):
        Job(url, state=state).batch(a=1, b=2)
    swap(url, {"v": "v.2"}, force=True)
    drop(url, "v", force=True)
    done = CliRunner().invoke(app, ["forget", url, "--where", "k=a", "--id", "one", "--yes"])
    assert done.exit_code == 0, done.output
    assert [open_reader(url, state).get("a") for state in ("v.2", "w")] == [None, None]
    ((first,), (second,)) = (listed(url, state) for state in ("v.2", "w"))
    assert first.digest == second.digest


def test_a_forget_that_ended_before_its_commit_leaves_nothing_that_is_foreign(tmp_path, monkeypatch):
    url = f"sqlite:///{tmp_path}/state.db"
    Job(url).batch(a=1, b=2)
    with monkeypatch.context() as patch:
        patch.setattr(Ledger, "commit_forget", interrupted)
        with pytest.raises(KeyboardInterrupt):
            forget(url, "s", {"k": "a"}, id="one")
    Job(url).batch(b=3)
    assert vacuum(url, "s").unreadable == 0
    assert "error" not in {finding.severity for finding in examine(url, "s")}
    assert forget(url, "s", {"k": "a"}, id="one").keys == 1
    assert open_reader(url, "s").multi_get(["a", "b"]) == [None, {"n": 3}]


def interrupted(*_: Any, **__: Any) -> None:
    raise KeyboardInterrupt


def test_the_command_writes_its_list_to_a_file_and_applies_it(tmp_path):
    url, copy, file = f"sqlite:///{tmp_path}/a.db", f"sqlite:///{tmp_path}/copy.db", tmp_path / "list"
    for place in (url, copy):
        Job(place).batch(**{SECRET: 4711471147, "other": 1})
    forgets(url)
    assert run("forget", url, "s", "--export", file).stdout.startswith("1 entries written")
    assert SECRET.encode() not in file.read_bytes()
    assert "1 keys forgotten" in run("forget", copy, "s", "--from", file, "--yes").stdout
    assert contents(copy) == {"other": 1}
    assert "nothing to do" in run("forget", copy, "s", "--from", file, "--yes").stdout


@pytest.mark.parametrize(
    "args", [["s"], ["s", "a"], ["--id", "t"], ["s", "--from", "x", "--id", "t"], ["s", "--where", "k", "--id", "t"]]
)
def test_the_command_is_refused_where_it_is_called_wrongly(args, tmp_path):
    url = f"memory://{tmp_path.name}"
    Job(url).batch(a=1)
    done = run("forget", url, *args, "--yes")
    assert done.exit_code == 2
    assert contents(url) == {"a": 1}


# Crashes


class Interrupted:
    """A job beside a forget that dies at each of its writes, in a process of its own."""

    def __init__(self, url: str, folder: Path) -> None:
        self.url, self.folder = url, folder

    def killed(self, method: str, call: int, *, after: bool) -> bool:
        """Whether the forget came to that write, and died there."""
        script = (
            "from mapstate.backends import resolve\nfrom mapstate.operations.forget import forget\n"
            "from mapstate.testing import FaultyBackend, Kill\n"
            f"fault = Kill(method={method!r}, call={call}, after={after})\n"
            f"forget(FaultyBackend(resolve({self.url!r}), {str(self.folder)!r}, (fault,)), 's', "
            f"{{'k': {SECRET!r}}}, id='ticket-7', followers_have=0)\n"
        )
        return subprocess.run([sys.executable, "-c", script], check=False).returncode == -signal.SIGKILL


@pytest.mark.parametrize("after", [full(False), True])
@pytest.mark.parametrize("comes_back", [full(False), True])
@pytest.mark.parametrize("place", [full("sqlite"), pytest.param("redis", marks=pytest.mark.redis)])
def test_a_forget_that_is_killed_at_any_write_is_run_again(request, tmp_path, place, after, comes_back):
    """Another batch may come before it is run again; its rows count, if they are later than the tombstone."""
    calls = [*(("swap", at) for at in (1, 2, 3, 4)), ("multi_put", 1), ("multi_put", 2), ("multi_rewrite", 1)]
    seen = []
    for method, call in [*calls, ("multi_rewrite", 2), ("scrub", 1), ("swap", 5)]:
        folder = tmp_path / f"{method}-{call}"
        folder.mkdir()
        url = f"sqlite:///{folder}/state.db"
        if place == "redis":
            url = f"{request.getfixturevalue('redis_url')}{folder.name}/"
        LoggedJob(url).batch(**{SECRET: 4711471147, "other": 1})
        seen.append(Interrupted(url, folder).killed(method, call, after=after))
        job = LoggedJob(url)  # another driver, which leaves what was in flight behind
        is_absent = SECRET not in contents(url)
        expected = {"other": 1}
        if comes_back:
            with open_reader(url, "s") as reader:
                base = (reader.get(SECRET) or {"n": 0})["n"]
            job.batch(**{SECRET: base + 5})
            expected |= {SECRET: 5} if is_absent else {}
        assert forgets(url).keys == 1
        assert contents(url) == expected
        assert held(url) == len(expected)
        values = b"".join(data or b"" for data in stored(url).values())
        assert not re.search(rb"\b471[16]\b", values)  # a hash of the list may hold the digits
        assert (SECRET in stored(url)) == (SECRET in expected)
    assert seen == [True] * 9 + [False]


@pytest.mark.parametrize(("method", "call"), [("multi_put", 1), ("swap", 2), ("multi_rewrite", 1)])
def test_a_forget_that_was_killed_is_run_again_without_a_driver_in_between(tmp_path, method, call):
    url = f"sqlite:///{tmp_path}/state.db"
    Job(url).batch(**{SECRET: 4711471147, "other": 1})
    assert Interrupted(url, tmp_path).killed(method, call, after=False)
    with pytest.raises(UsageError, match="in flight"):
        vacuum(url, "s")
    assert forgets(url).keys == 1
    assert contents(url) == {"other": 1}
    assert names(url) == []


# Bytes


def test_no_byte_is_left_in_the_file_of_sqlite(tmp_path):
    url = f"sqlite:///{tmp_path}/state.db"
    job = LoggedJob(url)
    for at in range(20):
        values = {f"key-{one}": one for one in range(at * 100, at * 100 + 300)}
        job.batch(**{SECRET: 471_147_114_711 + at} | values)
    marks = [SECRET.encode(), b"4711471147"]

    def found() -> list[str]:
        return [path.name for path in tmp_path.iterdir() if any(mark in path.read_bytes() for mark in marks)]

    assert found()
    done = forgets(url)
    assert found() == []
    assert not any("WAL" in place for place in done.not_reached)
    assert len(contents(url)) == 2200


@pytest.mark.redis
def test_no_byte_is_left_in_the_files_of_redis(start_redis):
    server = start_redis(appendonly="yes", dbfilename="dump.rdb")
    job = LoggedJob(server.url)
    job.batch(**{SECRET: 471_147_114_711, "other": 1})
    marks = [SECRET.encode(), b"4711471147"]
    with server.client() as client:
        client.config_set("save", "3600 1")
        client.save()

    def found() -> list[str]:
        files = [path for path in server.directory.rglob("*") if path.is_file()]
        return [path.name for path in files if any(mark in path.read_bytes() for mark in marks)]

    assert any("aof" in name for name in found())
    assert "dump.rdb" in found()
    done = forgets(server.url)
    wait_for(lambda: not found(), "the old AOF to be removed", 30)  # by a thread of the server
    assert not any("Redis" in place for place in done.not_reached)
    assert contents(server.url) == {"other": 1}


# Which rows of a history a new version leaves out


@pytest.mark.parametrize(
    "place",
    [
        ("visits", 0, 20),
        ("visits", 0, -1),
        ("visits", 2, 5),
        ("others", 0, 5),
        ("visits", 0.0, 5),
        (b"visits", 0, 5),
        (0, "visits", 5),
    ],
)
def test_a_place_outside_the_history_is_refused_and_not_taken_for_a_later_row(place):
    fields = (KeyField("user", "string"),)
    key, other = KeyCodec(fields).encode_columns([["u1", "u2"]], 2)
    salt, ends = "00" * 16, [{"visits": {"0": 20, "1": 7}}]
    digest = digest_of(salt, ("user",), KeyCodec(fields).parts_of(key))
    entry = ListEntry(
        id="a", at="", columns=("user",), salt=salt, digest=digest, offsets=json.dumps([{"visits": {"0": 10}}])
    )
    rows = ForgottenRows("s", fields, [entry], json.dumps(ends), has_places=True)
    right = [Place("visits", 0, 9), Place("visits", 0, 10), Place("visits", 0, 19), Place("visits", 1, 0)]
    assert rows.of([key] * 4, right) == [True, False, False, False]
    assert rows.of([other], [Place(*place)]) == [False]
    with pytest.raises(DataError, match="has a place outside the history"):
        rows.of([key], [Place(*place)])


def test_a_forget_that_waits_for_rows_in_the_source_forgets_them_too(url):
    job = Version(url, state="s")
    job.batch_to(5, **{SECRET: 4711471147, "other": 1})
    started, ended = threading.Event(), threading.Event()

    def run() -> None:
        started.wait(20)
        for end in (6, 7):
            attempt = job.attempt(**{SECRET: 4712471247})
            time_of_batch.wait(0.2)
            job.commit(attempt, end, **{SECRET: 4712471247})
        ended.set()

    time_of_batch = threading.Event()
    thread = threading.Thread(target=run)
    thread.start()
    started.set()
    done = when_caught_up(url, "s", '[{"t":{"0":7}}]', lambda: forgets(url), wait=60)
    thread.join()
    assert ended.is_set()
    assert done.offsets == '[{"t": {"0": 7}}]'
    assert names(url) == []
    assert open_reader(url, "s").multi_get([SECRET, "other"]) == [None, {"n": 1}]


def test_a_batch_that_begins_while_it_forgets_is_waited_for(url):
    job = Version(url, state="s")
    job.batch_to(5, **{SECRET: 4711471147})
    calls = []

    def do() -> Any:
        calls.append(1)
        if len(calls) == 1:
            attempt = job.attempt(other=1)
            thread = threading.Timer(0.3, lambda: job.commit(attempt, 6, other=1))
            thread.start()
        return forgets(url)

    when_caught_up(url, "s", '[{"t":{"0":5}}]', do, wait=60)
    assert len(calls) == 2
    assert names(url) == []


def test_a_batch_that_is_committed_before_the_ledger_is_read_again_is_waited_for(url):
    """The forget sees it in flight; when the ledger is read again, it is no more."""
    job = Version(url, state="s")
    job.batch_to(5, **{SECRET: 4711471147})
    calls = []

    def do() -> Any:
        calls.append(1)
        if len(calls) > 1:
            return forgets(url)
        attempt = job.attempt(**{SECRET: 1})
        try:
            return forgets(url)
        finally:
            job.commit(attempt, 6, **{SECRET: 1})

    assert when_caught_up(url, "s", '[{"t":{"0":5}}]', do, wait=60).offsets == '[{"t": {"0": 6}}]'
    assert len(calls) == 2
    assert names(url) == []


def test_what_can_never_be_forgotten_is_said_at_once(url):
    Version(url, state="s").batch_to(5, **{SECRET: 4711471147})
    with pytest.raises(UsageError, match="its key columns are"):
        when_caught_up(url, "s", '[{"t":{"0":5}}]', lambda: forget(url, "s", {"nope": 1}, id="t"), wait=60)


def test_what_has_not_caught_up_in_time_or_cannot_be_compared_is_not_forgotten(tmp_path):
    url = f"sqlite:///{tmp_path}/state.db"
    job = Version(url, state="s")
    ran = partial(CliRunner().invoke, app, catch_exceptions=False)
    job.batch_to(5, **{SECRET: 4711471147})
    words = ["forget", url, "s", SECRET, "--id", "t", "--yes", "--followers-have", "0s", "--when-caught-up"]
    for ends, why in (('{"t":{"0":6}}', "behind|by 1"), ("[{}]", "cannot be compared"), ("7", "offsets as JSON")):
        done = ran([*words, ends, "--wait", "0"])
        assert done.exit_code == 2
        assert re.search(why, done.stderr)
    assert open_reader(url, "s").get(SECRET) == {"n": 4711471147}
    assert ran([*words, '{"t":{"0":5}}']).exit_code == 0
    assert open_reader(url, "s").get(SECRET) is None
