"""The mapstate command: what it prints, how it ends, and what it never shows."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from types import NoneType
from typing import Any
from unittest.mock import patch

import msgspec
import pytest
import typer
from damaged import damaged_ledgers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from one_ledger import OneLedger
from states import Job, contents, messy
from test_checkpoint import checkpoint, files
from typer.testing import CliRunner

from mapstate import __version__, open_reader
from mapstate.backends import naming, resolve
from mapstate.batch_report import BatchReport
from mapstate.capabilities import FenceToken
from mapstate.cli.commands import app
from mapstate.errors import CorruptRecordError, MapStateError, StateNotFoundError
from mapstate.protocol.ledger_record import OpenRequest, encode_ledger
from mapstate.protocol.stored_ledger import decode_ledger
from mapstate.schema import Field, KeyField
from mapstate.spark.driver.state import encode_report

SECRET = "s3cret-p4ssword"
ADOPT = ["adopt", "--type", "opaque"]
ESCAPES = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202e\r\n"


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/state.db"


def run(*args: Any, answer: str | None = None) -> Any:
    return CliRunner().invoke(app, [str(one) for one in args], input=answer)


def test_the_version_is_that_of_the_package() -> None:
    done = run("--version")
    assert (done.exit_code, done.stdout) == (0, f"mapstate {__version__}\n")


def report(job: Job, batch_id: int) -> None:
    one = BatchReport(
        batch_id=batch_id,
        txid=1000 + batch_id,
        attempt=1,
        rows=77,
        keys_read=3,
        keys_cached=0,
        keys_written=3,
        keys_skipped=0,
        milliseconds=1234,
        at="2026-01-01T00:00:00.000+00:00",
    )
    job.store.keep_report(encode_report(one), 100)


@pytest.mark.parametrize(
    ("command", "rest"),
    [
        ("advance", ["s", "--to", "5", "--to", "6"]),
        ("export", ["s", "--to", "a.csv", "--to", "b.csv"]),
        ("forget", ["s", "a", "--id", "t", "--id", "u", "--yes"]),
        ("watch", ["s", "--count", "1", "--count=2"]),
        ("monitor", ["s", "-i", "1", "--interval", "1"]),
    ],
)
def test_an_option_that_is_given_twice_is_refused_and_none_of_both_counts(command, rest, url):
    Job(url).batch(a=1, b=2)
    done = run(command, url, *rest)
    assert done.exit_code == 2
    assert re.search(r"Option '--\w+' is given twice", done.stderr)
    assert contents(url) == {"a": 1, "b": 2}


@pytest.mark.parametrize(
    ("command", "rest", "twice"),
    [
        ("forget", ["--where", "k=a", "--where", "k=b", "--id", "t", "--yes"], "--where has 'k' twice"),
        ("swap", ["s=s.2", "s=s.3", "--force"], "mapstate swap has 's' twice"),
        ("compare", ["s", "s.2", "--tolerance", "n=1", "--tolerance", "n=5"], "--tolerance has 'n' twice"),
    ],
)
def test_a_name_that_is_given_twice_is_refused_and_neither_value_counts(command, rest, twice, url):
    for state in ("s", "s.2", "s.3"):
        Job(url, state=state).batch(a=1, b=2)
    done = run(command, url, *rest)
    assert (done.exit_code, done.stdout) == (2, "")
    assert twice in done.stderr
    assert contents(url) == {"a": 1, "b": 2}


@pytest.mark.parametrize("number", ["nan", "inf", "1e300"])
@pytest.mark.parametrize(
    ("command", "rest"),
    [
        ("watch", ["s", "--count", "2", "--interval"]),
        ("monitor", ["s", "--count", "1", "--interval"]),
        ("forget", ["s", "a", "--id", "t", "--yes", "--when-caught-up", "[]", "--wait"]),
        ("compare", ["s", "s", "--wait"]),
        ("kill", ["s", "--wait"]),
        ("serve", ["--timeout"]),
        ("swap", ["s", "--to", "s", "--max-lag"]),
    ],
)
def test_a_time_that_never_ends_is_refused(command, rest, number, url):
    Job(url).batch(a=1)
    done = run(command, url, *rest, number)
    assert done.exit_code == 2
    said = re.sub(r"[│\s]+", " ", done.stderr)  # without the lines of its box
    assert re.search("is a number up to 1,000,000,000|greater than or equal to 0", said), said


def test_drop_asks_and_removes_the_state_whole(url):
    Job(url).batch(a=1, b=2)
    declined = run("drop", url, "s", answer="n\n")
    assert declined.exit_code == 1
    assert "batch 0 was committed" in declined.stdout
    assert "stop it first" in declined.stdout
    assert contents(url) == {"a": 1, "b": 2}
    done = run("drop", url, "s", "--yes")
    assert (done.exit_code, done.stdout.splitlines()[-1]) == (0, "Done: 2 records removed, and the ledger.")
    gone = run("drop", url, "s", "--yes")
    assert gone.exit_code == 2
    assert "StateNotFoundError" in gone.stderr


def test_vacuum_says_that_there_was_nothing_to_do_and_takes_states_beside_it(url):
    job = Job(url)
    job.batch(a=1)
    done = run("vacuum", url, "s")
    assert (done.exit_code, done.stdout) == (0, "1 records scanned, 0 rewritten, 0 dropped; there was nothing to do\n")
    wrong = run("vacuum", url, "s", "--beside", "sqlite:///b.db")
    assert wrong.exit_code == 2
    assert "URL#STATE" in wrong.stderr
    job.attempt(a=1)
    job.batch(b=1)
    refused = run("vacuum", url, "s", "--beside", f"memory://{Path(url).parent.name}#s")
    assert refused.exit_code == 2
    assert "StateNotFoundError" in refused.stderr
    refused = run("vacuum", url, "s", "--gone", "s")
    assert (refused.exit_code, "'s' is said to be gone, and is in the store" in refused.stderr) == (2, True)
    assert run("vacuum", url, "s", "--gone", "other").exit_code == 0


def test_ledger_shows_a_person_what_is_there(url):
    messy(url)
    job = Job(url)
    report(job, 2)
    job.attempt(kept=1)
    done = run("ledger", url, "s")
    assert done.exit_code == 0
    for shown in (
        *(
            "s, opaque, json",
            "(k string)",
            "n=Sum(n)",
            "q, next batch 3",
            "batch 2 as txid 1005",
            "batch 1 as txid 1002",
        ),
        *(
            "batch 3 as txid 1006, begun at 20",
            "3 txids, 2 ranges: 1001, 1003-1004",
            "1 fields from txid 1000 on",
            "1234",
            "77",
        ),
    ):
        assert shown in done.stdout, shown


def test_ledger_as_json_has_all_of_it(url):
    messy(url)
    report(Job(url), 0)
    found = json.loads(run("ledger", url, "s", "--json").stdout)
    assert found["ledger"]["dead"] == [[1001, 1001], [1003, 1004]]
    assert found["reports"][0]["milliseconds"] == 1234


def test_reports_that_cannot_be_read_are_a_note_below_the_ledger(url):
    Job(url).store.keep_report(b"{}", 10)
    done = run("ledger", url, "s")
    assert (done.exit_code, "s, opaque, json" in done.stdout, "are kept" in done.stdout) == (0, True, False)
    assert done.stderr.startswith(
        "mapstate: the batch reports are not shown: a batch report of state 's' cannot be read"
    )
    done = run("ledger", url, "s", "--json")
    assert (done.exit_code, json.loads(done.stdout)["reports"]) == (0, None)


@pytest.mark.redis
@pytest.mark.parametrize("why", ["no permission", "WRONGTYPE"])
def test_a_store_that_gives_no_reports_still_shows_its_ledger_and_is_examined(why, start_redis):
    server = start_redis()
    url = server.url
    Job(url).batch(a=1)
    with server.client() as client:
        if why == "WRONGTYPE":
            client.set("s!reports", "something else")
        else:
            client.execute_command("ACL", "SETUSER", "reader", "on", f">{SECRET}", "~*", "+get", "+mget", "+scan")
            url = url.replace("redis://", f"redis://reader:{SECRET}@")
    done = run("ledger", url, "s")
    assert (done.exit_code, "batch 0 as txid 1000" in done.stdout) == (0, True)
    assert why in done.stderr
    done = run("doctor", url, "s", "--json")
    found = {one["subject"]: one for one in json.loads(done.stdout)}
    assert found["batch reports"]["severity"] == "warning"
    assert why in found["batch reports"]["found"]
    assert {"in flight", "dead"} < found.keys()
    assert SECRET not in done.output


def test_doctor_ends_with_1_where_there_is_an_error_and_0_where_not(url, monkeypatch):
    messy(url)
    done = run("doctor", url, "s", "--replay-horizon", "12h")
    assert (done.exit_code, "integrity_check: ok" in done.stdout) == (0, True)
    from mapstate.backends.sqlite import operations as sqlite_operations

    monkeypatch.setattr(sqlite_operations, "_REMOTE", ("",))
    done = run("doctor", url, "s")
    assert done.exit_code == 1
    assert "expected: a local disk" in done.stdout
    assert "Move the file" in done.stdout
    done = run("doctor", url, "s", "--json")
    assert done.exit_code == 1
    assert {"severity", "subject", "found", "expected", "advice"} == set(json.loads(done.stdout)[0])
    done = run("doctor", url, "s", "--replay-horizon", "soon")
    assert (done.exit_code, "90s, 30m, 12h or 1d" in done.stderr) == (2, True)


def test_vacuum_says_what_it_did(url):
    truth = messy(url)
    done = run("vacuum", url, "s")
    assert (done.exit_code, done.stdout) == (
        0,
        "6 records scanned, 2 rewritten, 3 dropped; committed as txid 1006\n",
    )
    assert contents(url) == truth
    Job(url).attempt(kept=9)
    assert run("vacuum", url, "s").exit_code == 2
    assert run("vacuum", url, "s", "--take-over").exit_code == 0
    assert contents(url) == truth


def test_doctor_and_vacuum_end_with_1_where_something_is_no_record_and_name_it(url):
    truth = messy(url)
    assert run("doctor", url, "s").exit_code == 0
    store = resolve(url).open("s")
    store.multi_put([f"odd-{at:02}" for at in range(12)], [b"nothing"] * 12)
    for command in ("doctor", "vacuum"):
        done = run(command, url, "s")
        assert done.exit_code == 1
        assert "odd-00" in done.output
        assert "and 2 more" in " ".join(done.output.split())
    assert run("vacuum", url, "s").stdout.startswith("15 records scanned, 0 rewritten, 0 dropped")
    store.close()
    with open_reader(url, "s") as reader:
        assert [value["n"] for value in reader.multi_get(list(truth))] == list(truth.values())


def test_rollback_asks_and_says_that_the_checkpoint_goes_with_it(url):
    job = Job(url)
    job.batch(a=1)
    job.batch(a=2)
    for answer in ("n\n", ""):
        assert run("rollback", url, "s", answer=answer).exit_code == 1
        assert contents(url) == {"a": 2}
    done = run("rollback", url, "s", answer="y\n")
    assert done.exit_code == 0
    assert "mapstate rewind" in done.stdout
    assert "waits for batch 1" in done.stdout
    assert contents(url) == {"a": 1}
    done = run("rollback", url, "s")  # refused before anybody is asked
    assert (done.exit_code, "RollbackError" in done.stderr, "Take it back" in done.stdout) == (2, True, False)


def test_rollback_takes_back_the_batch_it_asked_about_and_no_other(url, monkeypatch):
    job = Job(url)
    job.batch(a=1)
    job.batch(a=2)
    monkeypatch.setattr(typer, "confirm", lambda *_, **__: job.batch(a=3))  # the query had not been stopped
    done = run("rollback", url, "s")
    assert done.exit_code == 2
    assert "RollbackError: state 's': the last batch is 2 (txid 1002), not txid 1001" in done.stderr
    assert contents(url) == {"a": 3}


def test_rewind_asks_and_says_where_things_went(url, tmp_path):
    Job(url).batch(a=1)
    place = checkpoint(tmp_path / "c", range(4), range(3))
    before = files(place)
    assert run("rewind", url, "s", place, answer="n\n").exit_code == 1
    assert files(place) == before
    done = run("rewind", url, "s", place, "--yes")
    assert done.exit_code == 0
    assert "The next batch will be 1. These go aside: commits/2, commits/1, offsets/3, offsets/2" in done.stdout
    assert f"{place}.rewound-" in done.stdout
    assert "Nothing to do" in run("rewind", url, "s", place).stdout


@pytest.mark.parametrize("command", ["ledger", "doctor", "vacuum", "rollback", "drop", "export"])
def test_a_state_that_is_not_there_is_said_with_its_store_and_names_like_it(command, tmp_path):
    url = f"sqlite:///{tmp_path}/state.db"
    Job(url).batch(a=1)
    done = run(command, url, "ss", *(["--to", str(tmp_path / "x.csv")] if command == "export" else []))
    assert (done.exit_code, done.stdout) == (2, "")
    assert f"The store is SqliteBackend(path='{tmp_path}/state.db'" in done.stderr
    assert done.stderr.endswith(", which has 's'.\n") or command == "export"


def test_the_module_is_the_command(tmp_path):
    asked = [sys.executable, "-m", "mapstate", "ls", f"sqlite:///{tmp_path}/typo.db"]
    done = subprocess.run(asked, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == run(*asked[3:]).stderr


def test_a_store_is_named_without_its_password():
    backend = resolve(f"redis://me:{SECRET}@localhost:1/0?retries=0")
    with pytest.raises(StateNotFoundError) as caught, naming(backend):
        raise StateNotFoundError("there is no state 's' here.", state="s")
    shown = str(caught.value)
    assert shown.startswith("there is no state 's' here. The store is RedisBackend('redis://me:***@localhost:1/0")
    assert SECRET not in shown


def test_a_file_that_is_not_there_is_said_by_ls_and_serve(tmp_path):
    url = f"sqlite:///{tmp_path}/typo.db"
    done = run("ls", url)
    assert (done.exit_code, done.stdout) == (2, "")
    assert f"there is no file '{tmp_path}/typo.db'" in done.stderr
    assert f"max_value_bytes=999000000); {done.stderr.partition('Error: ')[2]}" in run("get", url, "s", "a").stderr
    with patch("mapstate.serve.server.run"):
        assert f"there is no file '{tmp_path}/typo.db'" in run("serve", url).stderr
    Job(url).batch(a=1)
    assert "1 states" in run("ls", url).stdout
    with patch("mapstate.serve.server.run"):
        assert run("serve", url).stderr == ""


def test_a_percent_sign_in_a_url_is_decoded(tmp_path):
    Job(f"sqlite:///{tmp_path}/a%20b%25%3F.db").batch(a=1)
    assert [path.name for path in tmp_path.glob("*.db")] == ["a b%?.db"]


@pytest.mark.parametrize(
    "words",
    [
        ["ls"],
        *(pytest.param(words, marks=pytest.mark.full) for words in (["ls", "--json"], ["ledger", "s"])),
        ["--help"],
        ["--version"],
        ["help"],
    ],
)
def test_output_that_cannot_be_written_ends_with_2_and_one_line(words, url, tmp_path):
    place = f"sqlite:///{tmp_path}/state.db"
    Job(place).batch(a=1)
    script = [Path(sys.executable).with_name("mapstate"), *words]
    environment = os.environ | {"MAPSTATE_URL": place}
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(script, env=environment, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr.count("\n"), "No space left" in done.stderr) == (2, 1, True)
    left, right = os.pipe()
    os.close(left)
    done = subprocess.run(script, env=environment, stdout=right, stderr=subprocess.PIPE, text=True, check=False)
    os.close(right)
    assert (done.returncode, done.stderr) == (2, "mapstate: BrokenPipeError: [Errno 32] Broken pipe\n")
    closed = ["sh", "-c", 'exec "$@" >&-', "sh", *script]
    done = subprocess.run(closed, env=environment, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (2, "mapstate: OSError: [Errno 9] Bad file descriptor\n")


def test_a_command_that_ends_by_itself_ends_as_it_says(tmp_path):
    (tmp_path / "no_config.py").write_text("import sys\nsys.exit('no config')\n")
    for words, code, said in (
        ("--show-completion bash", 0, ""),
        (f"serve sqlite:///{tmp_path}/state.db --functions no_config", 1, "no config"),
    ):
        script = [Path(sys.executable).with_name("mapstate"), *words.split()]
        in_bash = ["bash", "-c", '"$0" "$@"; exit $?', *script]  # a shell is found among the parents
        done = subprocess.run(in_bash, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert (done.returncode, *done.stderr.splitlines()[-1:]) == (code, *filter(None, [said]))


def test_without_typer_the_command_says_how_to_install_it_for_this_python():
    script = "import sys; sys.modules['typer'] = None; from mapstate.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    advice = f"which is not installed: {sys.executable} -m pip install 'mapstate[cli]'\n"
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"mapstate: the command needs the package 'typer', {advice}"


def test_the_help_of_a_command_keeps_its_brackets():
    shown = re.sub(r"[^\w,\[\]]+", " ", run("adopt", "--help").stdout)
    for text in ("[txid,curr,prev],", "[txid,val],"):
        assert text in shown


def test_help_says_what_to_do_after_an_error_and_prints_pages():
    shown = run("help", "MissingKeysError").stdout
    assert shown.startswith("MissingKeysError: A whole scan found fewer keys than the ledger says")
    assert "Restore the store, or accept the loss" in shown
    section = run("help", "operating#a-lost-ledger").stdout
    assert section.startswith("## A lost ledger\n")
    assert section.count("\n## ") == 0
    assert section.strip() in run("help", "operating").stdout
    assert "# The command line" in run("help").stdout
    assert "[Passwords](operating.md#passwords)" in run("help", "StoreAuthError").stdout
    assert run("help", "operating.md#passwords").stdout.startswith("## Passwords\n")
    reference = run("help", "reference/urls").stdout
    assert "    python -m pydoc mapstate.backends.resolve\n" in reference
    assert ":::" not in reference
    assert "options:" not in reference
    done = run("help", "MisingKeysError")
    assert (done.exit_code, done.stdout) == (2, "")
    assert "there is no error and no page of this name; there is MissingKeysError, " in done.stderr


@pytest.mark.parametrize("command", ["ledger", "doctor", "vacuum", "rollback"])
def test_an_error_is_one_message_and_exit_code_2(command, url):
    done = run(command, url, "nobody")
    assert done.exit_code == 2
    assert done.stderr.startswith("mapstate: StateNotFoundError: there is no state 'nobody' here")
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""


@pytest.mark.parametrize(
    "args",
    [
        ["ledger", f"redis://:{SECRET}@localhost:1/0?retries=0", "s"],
        ["doctor", f"redis://me:{SECRET}@localhost:1/0?retries=0", "s"],
        ["ledger", f"redis://:{SECRET}@localhost:x/0", "s"],
        ["ledger", f"nostore://:{SECRET}@localhost", "s"],
        ["ledger", "s", f"redis://:{SECRET}@localhost:1"],
        [f"redis://:{SECRET}@localhost:1", "s"],
        ["ledger", "my", "state", f"redis://:{SECRET}@localhost"],
        ["ledger", "my", "state", f"redis://:with space{SECRET}@localhost"],
        ["ledger", "my", "state", f"redis://localhost?password={SECRET}"],
        [f"--redis://:{SECRET}@localhost", "s"],
        ["ledger", f"--redis://:{SECRET}@localhost", "s"],
        ["ledger", "memory://", f"redis://:{SECRET}@localhost"],
        ["rewind", "memory://", f"redis://:{SECRET}@localhost", "c"],
        ["doctor", "--replay-horizon", f"redis://:{SECRET}@localhost", "s", "memory://"],
        [*ADOPT, "--key", f"redis://:{SECRET}@localhost", "--field", "n=Count bigint", "memory://", "s"],
        [*ADOPT, "--key", f"redis://:with {SECRET}@localhost", "--field", "n=Count bigint", "memory://", "s"],
        [*ADOPT, "--key", "k string", "--field", f"redis://:{SECRET}@localhost", "memory://", "s"],
        [*ADOPT, "--key", "k string", "--field", f"n=redis://:{SECRET}@localhost bigint", "memory://", "s"],
        ["adopt", "--type", f"me:{SECRET}@localhost", "--key", "k string", "--field", "n=Count bigint", "s"],
        ["doctor", "--replay-horizon", f"me:{SECRET}@localhost", "memory://", "s"],
        ["ledger", "memory://", f"me:{SECRET}@localhost"],
        ["ledger", f"redis:/me:{SECRET}@localhost", "s"],
        ["ledger", f"me:{SECRET}@localhost", "s"],
        ["ledger", f"@redis://me:{SECRET}@localhost", "s"],
        ["rewind", "memory://", "s", f"redis:/me:{SECRET}@localhost"],
        [f"me:{SECRET}@localhost"],
        ["ls", f"redis://:{SECRET}@localhost:1/0?retries=0"],
        ["ls", f"redis+cluster://:{SECRET}@localhost:1?retries=0"],
        ["ls", f"me:{SECRET}@localhost"],
        ["ls", "memory://", f"me:{SECRET}@localhost"],
        ["get", f"redis://:{SECRET}@localhost:1/0?retries=0", "s", "k"],
        ["get", f"redis:/me:{SECRET}@localhost", "s", "k"],
        ["get", f"redis:/me:{SECRET}@localhost"],
        ["get", "s", f"redis://:{SECRET}@localhost:1"],
        ["get", "memory://", f"redis://:{SECRET}@localhost:1", "k"],
        ["watch", f"redis://:{SECRET}@localhost:1/0?retries=0", "s"],
        ["watch", "--interval", f"redis://:{SECRET}@localhost:1", "s"],
        ["export", f"redis://:{SECRET}@localhost:1/0?retries=0", "s", "--to", "x.csv"],
        ["export", "memory://", "s", "--to", f"redis://:{SECRET}@localhost:1/x.csv"],
        ["export", "memory://", "s", "--to", "x", "--format", f"me:{SECRET}@localhost"],
        ["ledger", "a", "b", "c", f"me:{SECRET}@localhost"],
    ],
)
def test_a_password_is_never_shown(args):
    done = run(*args)
    assert done.exit_code == 2
    assert done.stderr
    assert SECRET not in re.sub(r"[\s│]", "", done.output + done.stderr + done.stdout)  # however it is wrapped


def test_the_url_is_taken_from_the_environment_where_none_is_given(url, monkeypatch, tmp_path):
    Job(url).batch(a=1)
    place = checkpoint(tmp_path / "c", range(4), range(3))
    done = run("ledger", "s")
    assert (done.exit_code, "MAPSTATE_URL" in done.stderr) == (2, True)
    monkeypatch.setenv("MAPSTATE_URL", url)
    for args in (
        ["ledger", "s"],
        ["ledger", "--json", "s"],
        ["doctor", "s", "--replay-horizon", "12h"],
        ["vacuum", "s"],
    ):
        assert run(*args).exit_code == 0, args
    assert "The next batch will be 1." in run("rewind", "s", place, "--yes").stdout
    assert "Missing argument" in run("ledger").stderr
    assert "batch 0 as txid 1000" in run("ledger", "s").stdout
    other = f"sqlite:///{tmp_path}/other.db"
    assert "StateNotFoundError" in run("ledger", other, "s").stderr  # an argument is more than the environment


def test_the_url_is_read_out_of_a_file_where_one_is_named(url, monkeypatch, tmp_path):
    Job(url).batch(a=1)
    file = tmp_path / "url"
    file.write_text(f"{url}\n")
    assert run("ledger", f"@{file}", "s").exit_code == 0
    monkeypatch.setenv("MAPSTATE_URL", f"@{file}")
    assert run("ledger", "s").exit_code == 0
    file.write_bytes(b"\xff" + SECRET.encode())
    for place in (f"@{file}", f"@{tmp_path}/nothing"):
        done = run("ledger", place, "s")
        assert (done.exit_code, place[1:] in done.stderr, SECRET in done.stderr) == (2, True, False)


def _with_escapes(url: str) -> None:
    """A ledger in which whoever may write to the store has put what a terminal would obey."""
    job = Job(url)
    job.batch(a=1)
    job.batch(a=2)
    record, version = job.store.load()
    found = decode_ledger(record, "s")
    at = msgspec.structs.replace(found.last_commit, offsets=ESCAPES, owner=ESCAPES)
    keys = tuple(one._replace(name=ESCAPES) for one in found.keys)
    evil = msgspec.structs.replace(found, keys=keys, owner=ESCAPES, owners={ESCAPES: 3}, last_commit=at)
    job.store.swap(encode_ledger(evil), version, evil.fence())


@pytest.mark.parametrize(
    "args",
    [
        ["ledger", "URL", "s"],
        ["ledger", "URL", "s", "--json"],
        ["doctor", "URL", "s"],
        ["doctor", "URL", "s", "--json"],
        ["rollback", "URL", "s"],
        ["rewind", "URL", "s", "CHECKPOINT"],
        ["vacuum", "URL", "s"],
        ["ls", "URL"],
        ["ls", "URL", "--json"],
        ["get", "URL", "s", "a"],
        ["get", "URL", "s", "a", "--json"],
        ["watch", "URL", "s", "--count", "1"],
        ["watch", "URL", "s", "--count", "1", "--json"],
        ["export", "URL", "s", "--to", "FILE"],
        ["export", "URL", "s", "--to", "FILE", "--json"],
    ],
)
def test_what_a_terminal_would_obey_is_shown_escaped(args, url, tmp_path):
    _with_escapes(url)
    place = checkpoint(tmp_path / "c", range(4), range(3))
    given = {"URL": url, "CHECKPOINT": place, "FILE": tmp_path / "x.csv"}
    done = run(*(given.get(one, one) for one in args), answer="n\n")
    assert not done.exception or isinstance(done.exception, SystemExit)
    shown = done.stdout + done.stderr
    between = "\n\t" if args[0] in ("ls", "get", "watch") else "\n"  # the tabs are the command's own
    assert [one for one in shown if not one.isprintable() and one not in between] == []
    if args[0] == "ledger":
        assert "u001b[2J" in shown or "x1b[2J" in shown


def test_a_mistake_in_the_arguments_still_says_what_it_is():
    assert "unexpected extra argument" in run("ledger", "my", "state", "redis://:p@localhost").stderr
    assert "(more)" in run("ledger", "my", "state", "more").stderr
    assert "--replay" in run("doctor", "--replay", "1d", "my", "state").stderr


def test_the_console_script_is_there_and_works(url):
    messy(url)
    script = Path(sys.executable).with_name("mapstate")
    done = subprocess.run([script, "ledger", url, "s"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "s, opaque, json" in done.stdout
    done = subprocess.run([script, "ledger", url, "nobody"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "Traceback" not in done.stderr
    assert "StateNotFoundError" in done.stderr


@pytest.mark.slow
@patch("time.sleep")  # a reader waits for a ledger that may still come
def test_whatever_a_ledger_is_damaged_to_each_command_and_reader_and_driver_says_so(waited, tmp_path_factory, rounds):
    @settings(max_examples=rounds(40, 150), deadline=None, suppress_health_check=list(HealthCheck))
    @given(data=st.data())
    def damages(data):
        folder = tmp_path_factory.mktemp("damaged")
        url = f"memory://{folder.name}"
        messy(url)
        job = Job(url)
        job.attempt(kept=1)
        place = checkpoint(folder / "c", range(4), range(3))
        store = job.store
        damaged = data.draw(damaged_ledgers(store.load()[0]))
        opening = OpenRequest(
            state="s",
            type="opaque",
            serializer="json",
            keys=(KeyField("k", "string"),),
            fields=(Field("n", "Sum(n)", "bigint"),),
            owner="q",
            clock_txid=1000,
        )

        def damage() -> None:
            store.swap(damaged, store.load()[1], FenceToken(1, 1))

        for args in (
            *(
                ["ledger"],
                ["ledger", "--json"],
                ["doctor"],
                ["vacuum"],
                ["vacuum", "--take-over"],
                ["rollback", "--yes"],
            ),
            ["rewind", "--yes"],
        ):
            damage()
            done = run(args[0], *args[1:], url, "s", *([place] if args[0] == "rewind" else []))
            assert isinstance(done.exception, SystemExit | NoneType), (args, damaged, done.exception)
            assert done.exit_code in (0, 1, 2)
        for use in (
            lambda: open_reader(url, "s").multi_get(["kept", "dead"]),
            lambda: list(open_reader(url, "s").scan()),
            lambda: list(open_reader(url, "s", consistency="latest").scan()),
            lambda: OneLedger.open_and_begin(store, opening, 3),
        ):
            damage()
            with suppress(MapStateError):
                use()

    damages()


@pytest.mark.parametrize(
    "change",
    [
        {"owner": "nobody"},
        {"keys": [["k", "decimal(1"]]},
        {"keys": [["k", "array<int>"]]},
        {"fields": [["n", "Sum(n)", "no type"]]},
        {"fields": []},
        {"layouts": []},
        {"layouts": [[1000, 0]]},
        {"layouts": [[1000, 7]]},
        {"serializer": "xml"},
        {"dead": [[5, 3]]},
        {"epoch": 2**70},
        {"last_txid": 10**9},
        {"in_flight": {"txid": 1006, "epoch": 1, "batch_id": 3, "at": "yesterday"}},
        None,
        42,
        [],
    ],
)
@pytest.mark.parametrize("command", ["ledger", "doctor", "vacuum", "rollback", "rewind"])
def test_a_damaged_ledger_is_one_error_of_every_command(command, change, url, tmp_path):
    messy(url)
    store = Job(url).store
    found, version = store.load()
    damaged = json.dumps(json.loads(found) | change if isinstance(change, dict) else change).encode()
    store.swap(damaged, version, FenceToken(1, 1))
    place = [checkpoint(tmp_path / "c", range(4), range(3))] if command == "rewind" else []
    done = run(command, url, "s", *place)
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith("mapstate: CorruptLedgerError: the ledger of state 's' cannot be read (")
    with pytest.raises(CorruptRecordError):
        open_reader(url, "s")
    assert store.load()[0] == damaged
