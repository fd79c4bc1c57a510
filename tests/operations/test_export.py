"""Exports: what is in the file, as of which batch, and what a kill leaves."""

from __future__ import annotations

import csv
import datetime as dt
import io
import json
import os
import signal
import sqlite3
import subprocess
import sys
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from pyarrow import parquet
from states import Bare, Job, N, contents, made_of_one_batch, messy
from typer.testing import CliRunner

from mapstate import open_reader
from mapstate.backends import resolve
from mapstate.backends.sqlite import SqliteBackend
from mapstate.cli.commands import app
from mapstate.cli.export import FORMATS
from mapstate.errors import (
    StoreAuthError,
    StoreError,
    StoreFullError,
    StoreUnavailableError,
    UnsupportedTypeError,
    UsageError,
)
from mapstate.operations.export import export
from mapstate.protocol.ledger import Ledger
from mapstate.schema import Field, KeyField

MANY = {f"key-{at:05}": at for at in range(5000)}


@pytest.fixture(params=["memory", "sqlite", pytest.param("redis", marks=pytest.mark.redis)])
def any_url(request: Any, tmp_path: Any) -> str:
    """A store of each kind, empty."""
    if request.param == "memory":
        return f"memory://{tmp_path.name}"
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/state.db"
    return request.getfixturevalue("redis_url")


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/state.db"


def run(*args: Any) -> Any:
    return CliRunner().invoke(app, [str(one) for one in args])


def rows_of(path: Path) -> dict[str, int]:
    """The rows of JSON lines. No key comes twice."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    found = {row["k"]: row["n"] for row in rows}
    assert len(found) == len(rows)
    return found


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if not path.name.startswith("state.db")}


# What is in it


@pytest.mark.parametrize("form", list(FORMATS))
def test_the_file_holds_every_key_with_its_committed_value(form, any_url, tmp_path):
    truth = messy(any_url)
    Job(any_url).attempt(kept=99, more=1)  # not committed
    to = tmp_path / f"x.{form}"
    done = export(any_url, "s", to, FORMATS[form])
    if form == "csv":
        found = {row["k"]: int(row["n"]) for row in csv.DictReader(to.read_text().splitlines())}
    elif form == "jsonl":
        found = rows_of(to)
    else:
        found = {row["k"]: row["n"] for row in parquet.read_table(to).to_pylist()}
    assert found == truth
    assert (done.rows, done.resumed, done.is_one_batch, done.last.last_commit.batch_id) == (3, 0, True, 2)
    assert files(tmp_path) == {to.name}


DAY = dt.date(2026, 11, 21)
PARTS = {"x": Decimal("1.50"), "y": [DAY]}
NAMES = {"avg": "Avg(x)", "days": "Collect(x, 5)", "top": "TopN(2, x by count)"}
TYPES = {
    "s": ("string", 'a,"b"\n é', 'a,"b"\n é', None),
    "e": ("string", "", "", None),
    "n": ("bigint", None, None, None),
    "i": ("bigint", -(2**63), -(2**63), None),
    "f": ("double", float("inf"), "Infinity", None),
    "d": ("decimal(10,2)", Decimal("3.10"), "3.10", None),
    "t": ("timestamp", dt.datetime(2026, 11, 21, 10, tzinfo=dt.UTC), "2026-11-21T10:00:00.000000Z", None),
    "z": ("timestamp_ntz", dt.datetime(2026, 11, 21, 10), "2026-11-21T10:00:00.000000", None),
    "y": ("date", dt.date(2026, 11, 21), "2026-11-21", None),
    "b": ("binary", b"\x00\xff", "00ff", None),
    "a": ("any", {"x": [1, None]}, {"x": [1, None]}, '{"x":[1,null]}'),
    "st": ("struct<x:decimal(5,2),y:array<date>>", (Decimal("1.50"), [DAY]), {"x": "1.50", "y": [str(DAY)]}, PARTS),
    "avg": ("struct<sum:double,count:bigint>", (3.0, 2), 1.5, 1.5),
    "days": ("struct<values:array<date>>", ([DAY, DAY],), [str(DAY)] * 2, [DAY, DAY]),
    "top": (
        "struct<values:array<decimal(5,2)>,counts:array<bigint>>",
        ([Decimal("1.50")], [3]),
        [{"value": "1.50", "count": 3}],
        [{"value": Decimal("1.50"), "count": 3}],
    ),
}
"""Fields: their type, their stored value, its form in JSON, and what Parquet has if that is not the stored value."""


@pytest.fixture
def typed(url: str) -> str:
    fields = tuple(Field(name, NAMES.get(name, "Own"), kind) for name, (kind, *_) in TYPES.items())
    keys = (KeyField("when", "timestamp"), KeyField("n_key", "int"))
    row = tuple(value for _, value, _, _ in TYPES.values())
    made_of_one_batch(url, "typed", keys, fields, {"2026-11-21T10:00:00.000000Z|7": row, "\\N|8": row})
    return url


def test_json_lines_have_a_form_for_every_type(typed, tmp_path):
    export(typed, "typed", tmp_path / "x.jsonl", FORMATS["jsonl"])
    first, second = map(json.loads, (tmp_path / "x.jsonl").read_text().splitlines())
    forms = {name: form for name, (_, _, form, _) in TYPES.items()}
    assert first == {"when": "2026-11-21T10:00:00.000000Z", "n_key": 7} | forms
    assert second == {"when": None, "n_key": 8} | forms


def test_parquet_has_the_types_of_the_ledger(typed, tmp_path):
    export(typed, "typed", tmp_path / "x.parquet", FORMATS["parquet"])
    table = parquet.read_table(tmp_path / "x.parquet")
    expected = {name: value if other is None else other for name, (_, value, _, other) in TYPES.items()}
    when = dt.datetime(2026, 11, 21, 10, tzinfo=dt.UTC)
    assert table.to_pylist() == [{"when": when, "n_key": 7} | expected, {"when": None, "n_key": 8} | expected]
    kinds = {field.name: str(field.type) for field in table.schema}
    assert (kinds["n_key"], kinds["d"], kinds["t"], kinds["z"]) == (
        *("int32", "decimal128(10, 2)"),
        *("timestamp[us, tz=UTC]", "timestamp[us]"),
    )


def test_a_mean_that_does_not_fit_into_its_type_is_named_with_its_column(url, tmp_path):
    """The mean of decimals has four places more than they have, but no more digits."""
    fields = (Field("mean", "Avg(x)", "struct<sum:decimal(38,2),count:bigint>"),)
    made_of_one_batch(url, "means", (KeyField("k", "string"),), fields, {"a": (Decimal("9" * 36 + ".00"), 1)})
    with pytest.raises(UnsupportedTypeError, match="'mean' does not fit into pyarrow's decimal128"):
        export(url, "means", tmp_path / "x.parquet", FORMATS["parquet"])
    export(url, "means", tmp_path / "x.csv", FORMATS["csv"])
    assert (tmp_path / "x.csv").read_text() == f"k,mean\na,{'9' * 36}.000000\n"
    with open_reader(url, "means") as reader, pytest.raises(UnsupportedTypeError, match="'mean' does not fit"):
        reader.to_arrow()


def test_csv_tells_null_from_empty_text(typed, tmp_path):
    export(typed, "typed", tmp_path / "x.csv", FORMATS["csv"])
    text = (tmp_path / "x.csv").read_text()
    assert text.startswith("when,n_key,s,e,n,i,")
    assert '2026-11-21T10:00:00.000000Z,7,"a,""b""\n é","",,-9223372036854775808,Infinity,3.10,' in text
    rows = list(csv.reader(io.StringIO(text, newline="")))
    assert rows[1][2] == TYPES["s"][1]
    assert rows[2][0] == ""
    assert rows[1][-5:-2] == ['{"x":[1,null]}', '{"x":"1.50","y":["2026-11-21"]}', "1.5"]


def test_an_empty_state_gives_an_empty_file(url, tmp_path):
    Job(url)
    for form in FORMATS:
        done = export(url, "s", tmp_path / f"x.{form}", FORMATS[form])
        assert (done.rows, done.is_one_batch) == (0, True)
    assert (tmp_path / "x.csv").read_text() == "k,n\n"
    assert parquet.read_table(tmp_path / "x.parquet").schema.names == ["k", "n"]


def test_without_pyarrow_parquet_says_how_to_have_it(url, tmp_path, monkeypatch):
    messy(url)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    done = run("export", url, "s", "--to", tmp_path / "x.parquet")
    assert (done.exit_code, "mapstate[tables]" in done.stderr) == (2, True)
    assert run("export", url, "s", "--to", tmp_path / "x.csv").exit_code == 0


# As of one batch


def test_of_a_snapshot_the_export_is_of_one_batch_whatever_is_committed_meanwhile(url, tmp_path):
    job = Job(url)
    job.batch(**MANY)
    done = export(
        *(url, "s", tmp_path / "x.jsonl", FORMATS["jsonl"]),
        page_size=500,
        on_page=lambda _: job.batch(**dict.fromkeys(MANY, -job.next), new=job.next),
    )
    assert rows_of(tmp_path / "x.jsonl") == MANY
    assert (done.is_one_batch, done.last.last_commit.batch_id) == (True, 0)
    assert job.next > 5


@pytest.mark.redis
def test_of_another_store_it_says_between_which_batches_it_was_made(redis_url, tmp_path):
    job = Job(redis_url)
    job.batch(**MANY)
    seen = []

    def page(keys: int) -> None:
        if not seen:
            job.batch(**dict.fromkeys(MANY, -1))
        seen.append(keys)

    done = export(redis_url, "s", tmp_path / "x.jsonl", FORMATS["jsonl"], page_size=500, on_page=page)
    assert not done.is_one_batch
    assert (done.first.last_commit.batch_id, done.last.last_commit.batch_id) == (0, 1)
    found = rows_of(tmp_path / "x.jsonl")
    assert set(found) == set(MANY)
    assert all(value in (MANY[key], -1) for key, value in found.items())
    quiet = run("export", redis_url, "s", "--to", tmp_path / "y.jsonl")
    assert "It is as of batch 1 (txid 1001)." in quiet.stdout


def test_the_command_says_what_the_export_is_of(tmp_path):
    url = f"memory://{tmp_path.name}"
    job = Job(url)
    job.batch(a=1)
    to = tmp_path / "x.csv"
    (tmp_path / "x.csv.part").unlink(missing_ok=True)
    done = run("export", url, "s", "--to", to, "--json")
    document = json.loads(done.stdout)
    assert document.pop("seconds") >= 0
    assert document == {
        "file": str(to),
        "format": "csv",
        "rows": 1,
        "resumed": 0,
        "missing": 0,
        "unreadable": 0,
        "unreadable_keys": [],
        "is_one_batch": True,
        "first": {"batch_id": 0, "txid": 1000},
        "last": {"batch_id": 0, "txid": 1000},
    }


def test_a_transactional_state_with_a_batch_at_work_is_of_no_one_batch(url, tmp_path):
    job = Job(url)
    job.batch(a=1)
    assert export(url, "s", tmp_path / "x.csv", FORMATS["csv"]).is_one_batch
    url = f"sqlite:///{tmp_path}/other.db"
    job = Job(url, type="transactional")
    job.ledger.begin(0)
    assert not export(url, "s", tmp_path / "x.csv", FORMATS["csv"]).is_one_batch


@pytest.mark.parametrize("form", list(FORMATS))
def test_a_field_that_is_added_meanwhile_is_left_out(form, tmp_path):
    url = f"memory://{tmp_path.name}"
    Job(url).batch(**MANY)

    def page(keys: int) -> None:
        if keys == 2500:
            Job(url, fields=(N, Field("m", "Count", "bigint"))).batch(**{"key-04999": (-1, 1)})

    to = tmp_path / f"x.{form}"
    done = export(url, "s", to, FORMATS[form], page_size=500, on_page=page)
    assert (done.rows, done.is_one_batch) == (5000, False)
    if form == "jsonl":
        assert rows_of(to) == MANY | {"key-04999": -1}
        assert '"m"' not in to.read_text()


# Interrupted


class EndsHereError(Exception):
    pass


def interrupt(backend: Any, to: Path, after: int) -> int:
    """An export that ends after some pages, as an error in it would. Returns how many keys it has read."""
    read = []

    def page(keys: int) -> None:
        read.append(keys)
        if len(read) == after:
            raise EndsHereError

    with pytest.raises(EndsHereError):
        export(backend, "s", to, FORMATS["jsonl"], page_size=500, on_page=page)
    assert not to.exists()
    return read[-1]


@pytest.mark.parametrize("store", ["memory", "sqlite", pytest.param("redis", marks=pytest.mark.redis)])
def test_an_interrupted_export_goes_on_where_it_ended(store, tmp_path, request):
    url = {"memory": f"memory://{tmp_path.name}", "sqlite": f"sqlite:///{tmp_path}/state.db"}.get(store)
    url = url or request.getfixturevalue("redis_url")
    Job(url).batch(**MANY)
    to = tmp_path / "x.jsonl"
    read = interrupt(url, to, 4)
    done = export(url, "s", to, FORMATS["jsonl"], page_size=500)
    assert read <= done.resumed < 5000
    assert (done.rows, done.is_one_batch) == (5000, True)
    assert rows_of(to) == MANY
    assert files(tmp_path) == {to.name}


def test_after_a_batch_an_interrupted_export_begins_anew_where_it_can_be_of_one_batch(url, tmp_path):
    job = Job(url)
    job.batch(**MANY)
    interrupt(url, tmp_path / "x.jsonl", 4)
    job.batch(**{"key-00000": -1, "key-04999": None})
    done = export(url, "s", tmp_path / "x.jsonl", FORMATS["jsonl"])
    assert (done.resumed, done.rows, done.is_one_batch) == (0, 4999, True)
    assert rows_of(tmp_path / "x.jsonl") == contents(url)


def test_an_interrupted_export_begins_anew_where_the_store_was_put_back_and_went_on_otherwise(tmp_path):
    """The new batches have the txids of those that were lost."""
    path, url = tmp_path / "s.db", f"sqlite:///{tmp_path}/s.db"

    def batch(at: str, **values: int) -> None:
        job = Job(url)
        job.at = f"2026-11-21T{at}:00.000+00:00"
        job.batch(**values)
        job.store.close()

    batch("10:00", **MANY)
    copy = path.read_bytes()
    batch("10:01", **dict.fromkeys(MANY, -1))
    interrupt(url, tmp_path / "x.jsonl", 4)
    for left in path.parent.glob("s.db-*"):
        left.unlink()
    path.write_bytes(copy)
    batch("10:02", **dict.fromkeys(MANY, -2))
    done = export(url, "s", tmp_path / "x.jsonl", FORMATS["jsonl"])
    assert (done.resumed, done.is_one_batch) == (0, True)
    assert rows_of(tmp_path / "x.jsonl") == contents(url) == dict.fromkeys(MANY, -2)


def test_an_export_over_a_batch_that_was_taken_back_is_of_no_one_batch(tmp_path):
    url = f"memory://{tmp_path.name}"
    job = Job(url)
    job.batch(**MANY)

    def page(keys: int) -> None:
        if keys == 500:
            job.batch(**dict.fromkeys(MANY, -1))
        if keys == 1000:
            Ledger(job.store, "s").rollback()

    done = export(url, "s", tmp_path / "x.jsonl", FORMATS["jsonl"], page_size=500, on_page=page)
    assert not done.is_one_batch
    assert (done.first.last_commit, done.first.undone) == (done.last.last_commit, done.last.undone - 1)


def test_after_a_batch_an_interrupted_export_of_another_store_goes_on_and_says_so(tmp_path):
    url = f"memory://{tmp_path.name}"
    job = Job(url)
    job.batch(**MANY)
    interrupt(url, tmp_path / "x.jsonl", 4)
    job.batch(**dict.fromkeys(MANY, -1))
    done = export(url, "s", tmp_path / "x.jsonl", FORMATS["jsonl"])
    assert (done.resumed, done.rows, done.is_one_batch) == (2000, 5000, False)
    assert (done.first.last_commit.batch_id, done.last.last_commit.batch_id) == (0, 1)
    values = list(rows_of(tmp_path / "x.jsonl").values())
    assert (values[0], values[-1]) == (0, -1)


def test_what_was_read_of_another_state_is_not_used(tmp_path):
    url, other = f"memory://{tmp_path.name}", f"memory://{tmp_path.name}-other"
    Job(url).batch(**MANY)
    interrupt(url, tmp_path / "x.jsonl", 4)
    Job(other, fields=(Field("m", "Sum(n)", "bigint"),)).batch(a=1)
    done = export(other, "s", tmp_path / "x.jsonl", FORMATS["jsonl"])
    assert (done.resumed, done.rows) == (0, 1)


def test_a_killed_export_leaves_no_file_and_the_next_one_goes_on(url, tmp_path):
    job = Job(url)
    for at in range(0, 40_000, 5000):
        job.batch(**{f"key-{number:05}": number for number in range(at, at + 5000)})
    to, part = tmp_path / "x.jsonl", tmp_path / "x.jsonl.part"
    code = (
        "import sys, time\n"
        "from mapstate.operations.export import export\n"
        "from mapstate.cli.export import FORMATS\n"
        "def page(keys):\n"
        "    time.sleep(0.15)\n"  # so that pages are kept long before the last one is read
        "    print(keys, flush=True)\n"
        "    if keys >= 20_000:\n"
        "        time.sleep(600)\n"  # until it is killed
        "export(sys.argv[1], 's', sys.argv[2], FORMATS['jsonl'], on_page=page)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code, url, str(to)], stdout=subprocess.PIPE, text=True)
    with process:
        for line in process.stdout:
            if int(line) >= 20_000:
                process.send_signal(signal.SIGKILL)
                break
    assert process.returncode == -signal.SIGKILL
    assert not to.exists()
    assert part.exists()
    done = run("export", url, "s", "--to", to, "--json")
    document = json.loads(done.stdout)
    assert 5000 <= document["resumed"] < 40_000
    assert (document["rows"], document["is_one_batch"]) == (40_000, True)
    assert rows_of(to) == {f"key-{number:05}": number for number in range(40_000)}
    assert files(tmp_path) == {to.name}


def test_an_interrupted_command_says_where_to_go_on(url, tmp_path):
    Job(url).batch(**MANY)
    to = tmp_path / "x.csv"

    def ended(*_: Any, **__: Any) -> Any:
        to.with_name("x.csv.part").touch()
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mapstate.cli.export.export_state", ended)
        done = run("export", url, "s", "--to", to)
    assert done.exit_code == 130
    assert done.stderr.startswith(f"mapstate: what was read is in {to}.part. Export again to go on, or delete it.\n")


def test_a_kill_while_the_file_is_written_leaves_the_old_file(url, tmp_path):
    Job(url).batch(**MANY)
    to = tmp_path / "x.jsonl"
    to.write_text("the old one\n")
    code = (
        "import os, signal, sys\n"
        "from mapstate.operations.export import export\n"
        "def write(columns, pages, to):\n"
        "    to.write_text('half')\n"
        "    next(pages)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "export(sys.argv[1], 's', sys.argv[2], write)\n"
    )
    killed = subprocess.run([sys.executable, "-c", code, url, str(to)], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert to.read_text() == "the old one\n"
    done = export(url, "s", to, FORMATS["jsonl"])
    assert (done.resumed, rows_of(to)) == (5000, MANY)
    assert files(tmp_path) == {to.name}


def test_two_exports_to_one_file_do_not_mix(url, tmp_path):
    Job(url).batch(**MANY)
    to = tmp_path / "x.jsonl"

    def again(_: int) -> None:
        with pytest.raises(UsageError, match="another export to .* is at work"):
            export(url, "s", to, FORMATS["jsonl"])

    export(url, "s", to, FORMATS["jsonl"], page_size=2500, on_page=again)
    assert rows_of(to) == MANY


# What is wrong


def test_keys_that_cannot_be_read_are_named_and_all_others_exported(url, tmp_path):
    truth = messy(url)
    store = resolve(url).open("s")
    store.multi_put([f"odd-{at}" for at in range(3)], [b"nothing"] * 3)
    store.close()
    done = run("export", url, "s", "--to", tmp_path / "x.jsonl")
    assert (done.exit_code, rows_of(tmp_path / "x.jsonl")) == (1, truth)
    assert "3 keys cannot be read, and were left out: 'odd-0'" in done.stderr


def test_missing_keys_are_counted(url, tmp_path):
    Job(url).batch(a=1, b=2, c=3)
    with sqlite3.connect(tmp_path / "state.db") as db:
        db.execute("DELETE FROM mapstate_records WHERE key = 'b'")
    db.close()
    done = run("export", url, "s", "--to", tmp_path / "x.jsonl")
    assert (done.exit_code, rows_of(tmp_path / "x.jsonl")) == (1, {"a": 1, "c": 3})
    assert "1 keys are missing: the ledger counts 3" in done.stderr


def test_no_key_is_missing_where_an_export_went_on(url, tmp_path):
    Job(url).batch(**MANY)
    interrupt(url, tmp_path / "x.jsonl", 4)
    assert export(url, "s", tmp_path / "x.jsonl", FORMATS["jsonl"]).missing == 0


def test_a_store_that_cannot_list_its_keys_cannot_be_exported(tmp_path):
    backend = Bare("multi_get", "multi_put", "load", "swap", "writer")
    Job(backend).batch(a=1)
    with pytest.raises(UsageError, match="cannot list its keys"):
        export(backend, "s", tmp_path / "x.csv", FORMATS["csv"])


@pytest.mark.parametrize("error", [StoreUnavailableError, StoreAuthError])
def test_an_error_of_the_store_is_not_taken_for_one_of_the_file(error, tmp_path, monkeypatch):
    url = f"memory://{tmp_path.name}"
    Job(url).batch(a=1)

    def fail(*_: Any) -> Any:
        raise error("the store at host:1 fails")

    monkeypatch.setattr("mapstate.backends.memory.MemoryStore.scan", fail)
    with pytest.raises(error, match="the store at host:1 fails"):
        export(url, "s", tmp_path / "x.csv", FORMATS["csv"])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("to", ["", "nowhere/x.csv"])
def test_a_file_that_cannot_be_there_is_refused_before_anything_is_read(to, url, tmp_path):
    with pytest.raises(UsageError, match="cannot be the file of an export"):
        export(url, "s", tmp_path / to, FORMATS["csv"])
    done = run("export", url, "s", "--to", tmp_path / "x.txt")
    assert (done.exit_code, "--format names it" in done.stderr) == (2, True)


@pytest.mark.parametrize("end", ["", ".part", ".part-file", ".tmp"])
def test_an_export_never_replaces_the_file_of_a_state(end, tmp_path):
    store = f"sqlite:///{tmp_path}/x.csv{end}"
    truth = messy(store)
    done = run("export", store, "s", "--to", tmp_path / "x.csv")
    assert contents(store) == truth
    assert done.exit_code == (0 if end == ".tmp" else 2)
    assert ("UsageError" in done.stderr) == (end != ".tmp")


def test_a_target_that_is_no_regular_file_is_refused(url, tmp_path):
    Job(url).batch(a=1)
    (tmp_path / "null").symlink_to("/dev/null")
    os.mkfifo(tmp_path / "fifo")
    for name in ("null", "fifo"):
        with pytest.raises(UsageError, match="no regular file"):
            export(url, "s", tmp_path / name, FORMATS["csv"])
        assert not (tmp_path / name).is_file()
    assert files(tmp_path) == {"null", "fifo"}


def test_an_export_that_reads_nothing_leaves_nothing(tmp_path):
    done = run("export", f"sqlite:///{tmp_path}/none.db", "s", "--to", tmp_path / "x.csv")
    assert (done.exit_code, "StateNotFoundError" in done.stderr) == (2, True)
    assert list(tmp_path.iterdir()) == []


def test_a_part_that_is_no_database_is_named(url, tmp_path):
    Job(url).batch(a=1)
    (tmp_path / "x.csv.part").write_text("something else, of some length, that no SQLite has written" * 20)
    with pytest.raises(StoreError, match="delete the .part, if no export has made it"):
        export(url, "s", tmp_path / "x.csv", FORMATS["csv"])


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has a device that is always full")
def test_a_full_disk_is_said_and_the_old_file_stays(url, tmp_path):
    Job(url).batch(a=1)
    (tmp_path / "x.csv").write_text("old")

    def write(*_: Any) -> None:
        with Path("/dev/full").open("w") as file:
            file.write("x" * 100_000)

    with pytest.raises(StoreFullError, match="What was in it stays"):
        export(url, "s", tmp_path / "x.csv", write)
    assert (tmp_path / "x.csv").read_text() == "old"


def test_a_snapshot_ends_with_a_fork(url):
    Job(url).batch(a=1)
    store = SqliteBackend.from_url(url).open_snapshot("s")
    assert store.load() is not None
    child = os.fork()
    if not child:
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    with pytest.raises(UsageError, match="forked"):
        store.load()


def test_the_snapshot_of_a_file_that_is_not_there_is_empty(tmp_path):
    store = SqliteBackend(str(tmp_path / "none.db")).open_snapshot("s")
    assert store.load() is None
    assert list(store.scan(10)) == []
    store.close()
    assert not (tmp_path / "none.db").exists()
