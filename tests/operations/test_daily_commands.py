"""The commands of every day: which states there are, and what is in them. Their JSON, their completion, their end."""

from __future__ import annotations

import datetime as dt
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aerospike_stand_in import NAMESPACE, Cluster, StandInBackend
from one_ledger import OneLedger
from states import Bare, Job, made_of_one_batch, messy
from typer.testing import CliRunner

from mapstate.backends.redis import RedisBackend
from mapstate.capabilities import FenceToken
from mapstate.cli.commands import app
from mapstate.errors import UsageError
from mapstate.operations.states import list_states
from mapstate.protocol.ledger_record import OpenRequest, encode_ledger
from mapstate.protocol.stored_ledger import decode_ledger
from mapstate.reader import StateReader
from mapstate.reader.forms import typed_keys
from mapstate.schema import Field, KeyField

SCRIPT = Path(sys.executable).with_name("mapstate")
LEDGER_JSON = {"batch_id", "txid", "committed_at", "keys_held"}


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/state.db"


def run(*args: Any, answer: str | None = None) -> Any:
    return CliRunner().invoke(app, [str(one) for one in args], input=answer)


COUNTRIES = (KeyField("country", "string"), KeyField("day", "date"))
VISITS = (Field("visits", "Count", "bigint"), Field("bytes", "Sum(bytes)", "bigint"))


@pytest.fixture
def countries(url: str) -> str:
    made_of_one_batch(
        url, "by_country", COUNTRIES, VISITS, {"DE|2026-11-21": (3, 512), "FR|2026-11-22": (1, 7), "\\N|\\N": (9, 0)}
    )
    return url


# ls


def test_ls_lists_every_state_with_its_last_commit_and_its_keys(countries):
    messy(countries)
    done = run("ls", countries)
    assert (done.exit_code, done.stderr) == (0, "")
    header, first, second, last = done.stdout.splitlines()
    assert header.split("\t") == ["state", "type", "keys", "fields", "last commit", "committed at", "keys held"]
    assert first.split("\t")[:5] == [
        "by_country",
        "opaque",
        "(country string, day date)",
        "visits=Count, bytes=Sum(bytes)",
        "batch 0",
    ]
    assert second.split("\t") == ["s", "opaque", "(k string)", "n=Sum(n)", "batch 2", "", "3"]
    assert last == "2 states"
    found = json.loads(run("ls", countries, "--json").stdout)
    assert [one["state"] for one in found] == ["by_country", "s"]
    assert set(found[0]) == {"state", "type", "keys", "fields", "owner", "problem"} | LEDGER_JSON
    assert (found[1]["batch_id"], found[1]["txid"], found[1]["keys_held"]) == (2, 1005, 3)
    assert found[0]["keys"] == [{"name": "country", "type": "string"}, {"name": "day", "type": "date"}]


def test_ls_of_a_store_without_states_is_no_error(url, tmp_path):
    (tmp_path / "state.db").touch()
    assert run("ls", url).stdout.splitlines()[-1] == "0 states"
    assert json.loads(run("ls", url, "--json").stdout) == []


def test_ls_names_a_ledger_that_cannot_be_read_and_ends_with_1(url):
    job = Job(url)
    job.store.swap(b"{}", job.store.load()[1], FenceToken(1, 1))
    done = run("ls", url)
    assert (done.exit_code, "cannot be read" in done.stdout) == (1, True)
    assert "mapstate: s: the ledger of state 's' cannot be read" in done.stderr
    done = run("ls", url, "--json")
    assert (done.exit_code, set(json.loads(done.stdout)[0])) == (1, {"state", "problem"})


def test_a_store_that_cannot_list_its_states_says_so():
    with pytest.raises(UsageError, match=r"Bare offers no ListsStates, .* Name a state"):
        list_states(Bare("multi_get"))


@pytest.mark.redis
@pytest.mark.parametrize("layout", ["", "&layout=hash", "&layout=packed&buckets=4"])
def test_ls_finds_states_of_every_layout_among_the_keys_of_other_programs(layout, redis_url, redis_server):
    url = f"{redis_url}{layout}"
    messy(url)
    prefix = RedisBackend.from_url(redis_url).prefix
    with redis_server.client() as client:
        client.mset({f"{prefix}other:{at}": "x" for at in range(3000)})
        client.set(f"{prefix}s:odd!ledger", "a record of s whose key ends like a ledger")
        client.rpush(f"{prefix}list!ledger", "no ledger")
    found = list_states(redis_url)
    assert [(one.name, one.ledger.last_commit.batch_id) for one in found] == [("s", 2)]
    assert "1 states" in run("ls", redis_url).stdout


@pytest.mark.redis
def test_ls_lists_no_state_of_another_prefix(redis_url):
    longer = f"{redis_url}other-"
    Job(redis_url).batch(a=1)
    Job(longer).batch(a=1)
    assert [one.name for one in list_states(redis_url)] == ["s"]
    assert [one.name for one in list_states(longer)] == ["s"]


@pytest.mark.redis
@pytest.mark.parametrize("layout", ["string", "hash"])
def test_ls_finds_the_state_of_records_with_a_name_of_their_own(layout, redis_url):
    backend = replace(RedisBackend.from_url(redis_url), prefix="", layout=layout, records="ls-of-records:")
    Job(backend).batch(a=1)
    try:
        assert [(one.name, one.problem) for one in list_states(backend)] == [("s", "")]
        assert list_states(replace(backend, records="ls-of-nothing:")) == []
    finally:
        from mapstate.operations.drop import drop

        drop(backend, "s")


@pytest.mark.redis
def test_ls_of_a_server_that_restarts_meanwhile_says_that_states_may_be_missing(start_redis):
    from mapstate.errors import StoreUnavailableError

    server = start_redis()
    with server.client() as client:
        client.mset({f"other:{at}": "x" for at in range(5000)})
    pages = RedisBackend.from_url(server.url).states()
    next(pages)
    server.restart()
    with server.client() as client:
        client.mset({f"other:{at}": "x" for at in range(5000)})
    with pytest.raises(StoreUnavailableError, match="some may be missing"):
        list(pages)


def test_ls_finds_the_sets_of_aerospike_that_hold_a_ledger():
    cluster = Cluster()
    try:
        backend = StandInBackend((("127.0.0.1", cluster.port),), NAMESPACE)
        for name in ("one", "two"):
            store = backend.open(name)
            fields = (Field("n", "Count", "bigint"),)
            asked = {"state": name, "type": "opaque", "serializer": "native", "owner": "q", "clock_txid": 1000}
            OneLedger.open(store, OpenRequest(**asked, keys=(), fields=fields))
            store.claim(1, 0, "me")
        backend.open("no-ledger").multi_put(["a"], [[1, None, 1]])
        assert [(one.name, one.problem) for one in list_states(backend)] == [("one", ""), ("two", "")]
        inside = replace(backend, set="three")
        OneLedger.open(inside.open("named"), OpenRequest(**asked | {"state": "named"}, keys=(), fields=fields))
        assert [(one.name, one.problem) for one in list_states(inside)] == [("named", "")]
    finally:
        cluster.close()


# get


def test_get_takes_several_key_columns_by_their_types(countries):
    done = run("get", countries, "by_country", "DE", "2026-11-21")
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout == "country\tday\tvisits\tbytes\nDE\t2026-11-21\t3\t512\n"
    several = run("get", countries, "by_country", "FR", "2026-11-22", "\\N", "\\N", "--json")
    assert [json.loads(line) for line in several.stdout.splitlines()] == [
        {"key": {"country": "FR", "day": "2026-11-22"}, "value": {"visits": 1, "bytes": 7}},
        {"key": {"country": None, "day": None}, "value": {"visits": 9, "bytes": 0}},
    ]


def test_get_of_an_absent_key_ends_with_1_and_shows_the_others(countries):
    done = run("get", countries, "by_country", "DE", "2026-11-21", "DE", "2026-11-22")
    assert (done.exit_code, len(done.stdout.splitlines())) == (1, 2)
    assert done.stderr == "mapstate: state 'by_country' has no key DE 2026-11-22\n"
    assert run("get", countries, "by_country", "\x1b", "2026-11-22").stderr.endswith("has no key \\x1b 2026-11-22\n")
    done = run("get", countries, "by_country", "DE", "2026-11-22", "--json")
    assert (done.exit_code, json.loads(done.stdout)["value"], done.stderr) == (1, None, "")


def test_get_takes_the_url_from_the_environment_or_from_a_file(countries, monkeypatch, tmp_path):
    monkeypatch.setenv("MAPSTATE_URL", countries)
    key = ("by_country", "DE", "2026-11-21")
    assert run("get", *key).exit_code == 0
    monkeypatch.delenv("MAPSTATE_URL")
    assert "MAPSTATE_URL" in run("get", *key).stderr
    (tmp_path / "url").write_text(countries)
    assert run("get", f"@{tmp_path}/url", *key).exit_code == 0
    assert "there is no state" in run("get", countries).stderr


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["DE"], "keyed by (country string, day date), so a key is 2 arguments, and there are 1"),
        (["DE", "2026-11-21", "FR"], "2 arguments, and there are 3"),
        ([], "and there are 0"),
        (["DE", "today"], "key column 'day' is a date, such as 2026-11-21; this is none: 'today'"),
    ],
)
def test_a_key_that_does_not_fit_says_what_would(args, said, countries):
    done = run("get", countries, "by_country", *args)
    assert (done.exit_code, said in done.stderr) == (2, True), done.stderr


def test_the_key_of_a_state_without_key_columns_needs_no_argument(url):
    made_of_one_batch(url, "total", (), (Field("n", "Count", "bigint"),), {"\\G": 5})
    assert run("get", url, "total").stdout == "n\n5\n"
    assert "a key is 0 arguments" in run("get", url, "total", "x").stderr


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        ("string", "a|b\\", "a|b\\"),
        ("string", "", ""),
        ("string", "\\N", None),
        ("bigint", "-7", -7),
        ("tinyint", "-128", -128),
        ("bigint", "9223372036854775807", 2**63 - 1),
        ("decimal(10,2)", "-99999999.99", Decimal("-99999999.99")),
        ("double", "1e-7", 1e-7),
        ("boolean", "true", True),
        ("double", "1.5", 1.5),
        ("double", "-Infinity", float("-inf")),
        ("decimal(10,2)", "1.5", Decimal("1.50")),
        ("date", "2026-11-21", dt.date(2026, 11, 21)),
        ("timestamp", "2026-11-21T10:00:00Z", dt.datetime(2026, 11, 21, 10, tzinfo=dt.UTC)),
        ("timestamp", "2026-11-21T12:00:00+02:00", dt.datetime(2026, 11, 21, 10, tzinfo=dt.UTC)),
        ("timestamp", "2026-11-21T10:00:00.0000010Z", dt.datetime(2026, 11, 21, 10, 0, 0, 1, tzinfo=dt.UTC)),
        ("timestamp_ntz", "2026-11-21T10:00:00", dt.datetime(2026, 11, 21, 10)),
        ("binary", "00ff", b"\x00\xff"),
        ("binary", "", b""),
    ],
)
def test_a_key_is_read_by_the_type_of_its_column(kind, text, value):
    ((found,),) = typed_keys([text], [KeyField("k", kind)])
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("bigint", "1.5"),
        ("boolean", "yes"),
        ("date", "21.11.2026"),
        ("timestamp", "2026-11-21T10:00:00"),
        ("timestamp", "2026-11-21T10:00:00.0000001Z"),
        ("timestamp_ntz", "2026-11-21T10:00:00.1234567"),
        ("binary", "xyz"),
        ("decimal(10,2)", "much"),
        ("decimal(10,2)", "1.555"),
        ("double", "much"),
        *((kind, text) for kind in ("bigint", "tinyint") for text in ("1_0", "\uff11", "+1", " 1", "01", "", "2e1")),
        *(("tinyint", "128"), ("tinyint", "-129"), ("smallint", "32768"), ("int", "2147483648")),
        *(("bigint", "9223372036854775808"), ("bigint", "-9223372036854775809"), ("bigint", "9" * 5000)),
        *((kind, text) for kind in ("double", "decimal(10,2)") for text in ("1_0", "\uff11", " 1", "inf", "nan ")),
        *(("double", "1e999"), ("float", "1e999"), ("decimal(10,2)", "100000000.00"), ("decimal(10,2)", "1e8")),
        *(("boolean", text) for text in ("True", "1", "TRUE", " true")),
    ],
)
def test_a_text_of_another_type_is_refused(kind, text):
    with pytest.raises(UsageError, match="key column 'k' is a"):
        typed_keys([text], [KeyField("k", kind)])


def test_values_of_every_type_have_a_form_in_json(url):
    kinds = {
        "f": ("double", float("nan"), "NaN"),
        "g": ("double", float("-inf"), "-Infinity"),
        "d": ("decimal(10,2)", Decimal("3.10"), "3.10"),
        "t": ("timestamp", dt.datetime(2026, 11, 21, 10, tzinfo=dt.UTC), "2026-11-21T10:00:00.000000Z"),
        "z": ("timestamp_ntz", dt.datetime(2026, 11, 21, 10), "2026-11-21T10:00:00.000000"),
        "y": ("date", dt.date(2026, 11, 21), "2026-11-21"),
        "b": ("binary", b"\x00\xff", "00ff"),
        "n": ("bigint", None, None),
        "a": ("any", {"x": [1, None, "é"]}, {"x": [1, None, "é"]}),
    }
    fields = tuple(Field(name, "Own", kind) for name, (kind, _, _) in kinds.items())
    made_of_one_batch(url, "typed", (), fields, {"\\G": tuple(value for _, value, _ in kinds.values())})
    (row,) = map(json.loads, run("get", url, "typed", "--json").stdout.splitlines())
    assert row == {"key": {}, "value": {name: form for name, (_, _, form) in kinds.items()}}


# watch


def test_watch_shows_lines_where_there_is_no_terminal_and_ends_after_its_count(countries):
    keys = ("DE", "2026-11-21", "XX", "2026-11-21")
    done = run("watch", countries, "by_country", *keys, "--count", "2", "--interval", "0.05")
    assert (done.exit_code, done.stderr) == (0, "")
    look = ["# by_country: batch 0, committed at an unknown time, 3 keys", "DE\t2026-11-21\t3\t512"]
    assert done.stdout.splitlines() == [*look, "XX\t2026-11-21\tnull\tnull"] * 2


def test_watch_without_keys_shows_the_first_ones_and_those_that_come(url):
    job = Job(url)
    job.batch(a=1)
    process = subprocess.Popen(
        [SCRIPT, "watch", url, "s", "--json", "--interval", "0.05", "--limit", "2"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        first = json.loads(process.stdout.readline())
        assert set(first) == {"state", "is_exact", "rows"} | LEDGER_JSON
        assert (first["batch_id"], first["rows"]) == (0, [{"key": {"k": "a"}, "value": {"n": 1}}])
        job.batch(a=2, b=5, c=7)
        for line in process.stdout:
            look = json.loads(line)
            if look["batch_id"] == 1:
                break
            assert look["rows"] == first["rows"]
        assert look["rows"] == [{"key": {"k": "a"}, "value": {"n": 2}}, {"key": {"k": "b"}, "value": {"n": 5}}]
        process.send_signal(signal.SIGINT)
        process.stdout.read()
        assert (process.wait(30), process.stderr.read()) == (0, "")


def test_a_look_has_the_keys_of_a_batch_that_was_committed_after_they_were_listed(url, monkeypatch):
    job = Job(url)
    job.batch(a=1)
    read, asked = StateReader.multi_get_as_of, []

    def late(reader, keys):
        asked.append([key for (key,) in keys])
        if asked.count(["a"]) == 2:
            asked.append(["a"])
            job.batch(a=2, b=5)
        return read(reader, keys)

    monkeypatch.setattr(StateReader, "multi_get_as_of", late)
    looks = run("watch", url, "s", "--json", "--count", "2", "--interval", "0.05").stdout.splitlines()
    shown = [{row["key"]["k"]: row["value"]["n"] for row in json.loads(look)["rows"]} for look in looks]
    assert shown == [{"a": 1}, {"a": 2, "b": 5}]


def test_every_look_of_a_watch_is_of_one_batch(url):
    job = Job(url)
    job.batch(**{f"k{at:02}": 0 for at in range(20)})
    process = subprocess.Popen(
        [SCRIPT, "watch", url, "s", "--json", "--interval", "0.05"], stdout=subprocess.PIPE, text=True
    )
    looks = []
    with process:
        for line in process.stdout:
            looks.append(json.loads(line))
            if len(looks) >= 20 and looks[-1]["batch_id"] > looks[0]["batch_id"]:
                break
            for _ in range(3):
                job.batch(**{f"k{at:02}": job.next for at in range(20)})
        process.send_signal(signal.SIGINT)
        process.stdout.read()
    assert process.returncode == 0
    for look in looks:
        values = {row["value"]["n"] for row in look["rows"]}
        assert len(values) == 1
        assert look["is_exact"]
        assert values == {look["batch_id"]}


def test_on_a_terminal_watch_is_a_table_that_is_redrawn(countries):
    primary, secondary = pty.openpty()
    command = [SCRIPT, "watch", countries, "by_country", "--count", "2", "--interval", "0.05"]
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "100"}
    with subprocess.Popen(command, stdout=secondary, stderr=secondary, stdin=secondary, env=environment) as process:
        os.close(secondary)
        shown = "".join(_read(primary))
        assert process.wait(30) == 0
    os.close(primary)
    assert shown.count("by_country: batch 0") >= 2
    assert "\x1b[1A" in shown or "\x1b[2K" in shown  # the second look is drawn over the first
    assert "country" in shown


def _read(primary: int) -> Iterator[str]:
    """What comes out of a terminal until its other end is closed."""
    while select.select([primary], [], [], 60)[0]:
        try:
            data = os.read(primary, 65_536)
        except OSError:  # how Linux ends it
            return
        if not data:
            return
        yield data.decode()


# Progress


@pytest.mark.parametrize("command", ["vacuum", "doctor", "recount"])
def test_on_a_terminal_a_long_command_shows_its_rate_and_its_end(command, url):
    messy(url)
    primary, secondary = pty.openpty()
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "120"}
    with subprocess.Popen(
        [SCRIPT, command, url, "s", "--json"], stdout=subprocess.PIPE, stderr=secondary, env=environment
    ) as process:
        os.close(secondary)
        shown = "".join(_read(primary))
        document = process.stdout.read()
    os.close(primary)
    assert process.returncode == 0, shown
    json.loads(document)  # the progress is on standard error
    assert re.search(r"\d/s", shown)
    assert "ETA" in shown


# JSON


@pytest.mark.parametrize(
    ("args", "fields"),
    [
        (["ledger"], {"ledger", "keys_held", "reports"}),
        (["vacuum"], {"scanned", "rewritten", "dropped", "txid", "unreadable", "unreadable_keys", "idle"}),
        (["recount", "--yes"], {"found", "held_before", "written"}),
        (["rollback", "--yes"], {"batch_id", "txid", "next_batch_id"}),
        (["drop", "--yes"], {"records", "foreign", "foreign_keys"}),
    ],
)
def test_the_json_of_a_command_is_one_document_on_standard_output(args, fields, url):
    messy(url)
    done = run(args[0], url, "s", "--json", *args[1:])
    assert done.exit_code == 0, done.stderr
    assert set(json.loads(done.stdout)) == fields


def test_with_json_nobody_is_asked_and_nothing_is_written_without_yes(url):
    job = Job(url)
    job.batch(a=1)
    record, version = job.store.load()
    ledger = decode_ledger(record, "s")
    wrong = msgspec.structs.replace(ledger, last_commit=msgspec.structs.replace(ledger.last_commit, keys_held=5))
    job.store.swap(encode_ledger(wrong), version, ledger.fence())
    done = run("recount", url, "s", "--json", answer="y\n")
    assert (done.exit_code, done.stdout) == (2, "")
    assert "Write 1 into the ledger, and accept the difference as lost? --yes says yes" in done.stderr
    done = run("recount", url, "s", "--json", "--yes")
    assert (done.exit_code, json.loads(done.stdout)) == (0, {"found": 1, "held_before": 5, "written": True})
    for command in ("drop", "rollback"):
        assert run(command, url, "s", "--json", answer="y\n").exit_code == 2
    assert run("get", url, "s", "a").exit_code == 0


# Completion


def completed(words: list[str], **variables: str) -> list[str]:
    environment = {name: value for name, value in os.environ.items() if name != "MAPSTATE_URL"} | variables
    environment |= {
        "_MAPSTATE_COMPLETE": "complete_bash",
        "COMP_WORDS": " ".join(words),
        "COMP_CWORD": str(len(words) - 1),
    }
    done = subprocess.run([SCRIPT], capture_output=True, text=True, env=environment, check=False)
    assert done.stderr == ""
    return done.stdout.split()


def test_a_shell_completes_commands_options_and_the_names_of_states(countries):
    messy(countries)
    assert completed(["mapstate", "do"]) == ["doctor"]
    assert "--json" in completed(["mapstate", "ls", "--j"])
    assert completed(["mapstate", "get", countries, "by"]) == ["by_country"]
    assert completed(["mapstate", "ledger", countries, "by"]) == ["by_country"]
    assert completed(["mapstate", "watch", ""], MAPSTATE_URL=countries) == ["by_country", "s"]
    assert completed(["mapstate", "vacuum", ""], MAPSTATE_URL=countries) == ["by_country", "s"]
    assert completed(["mapstate", "get", countries, "by_country", ""]) == []
    assert completed(["mapstate", "get", "redis://localhost:1/0?retries=0", ""]) == []


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_for_each_shell_is_there(shell):
    environment = os.environ | {"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    done = subprocess.run(
        [SCRIPT, "--show-completion", shell], capture_output=True, text=True, env=environment, check=False
    )
    assert (done.returncode, "_MAPSTATE_COMPLETE" in done.stdout) == (0, True)


def test_the_interval_of_a_watch_is_kept(countries):
    began = time.monotonic()
    assert run("watch", countries, "by_country", "--count", "3", "--interval", "0.2").exit_code == 0
    assert time.monotonic() - began > 0.4
