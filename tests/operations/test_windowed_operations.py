"""What operators do to a state with windows: each is right, or refused before it writes."""

from __future__ import annotations

import datetime as dt
import json
from contextlib import suppress
from pathlib import Path
from types import NoneType
from typing import Any
from unittest.mock import patch

import msgspec
import pytest
from damaged import damaged_ledgers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner
from windowed import Row, Windowed

from mapstate import open_reader
from mapstate.backends import resolve
from mapstate.capabilities import FenceToken
from mapstate.cli.commands import app
from mapstate.cli.export import FORMATS
from mapstate.errors import FencedError, MapStateError, StateNotFoundError, UsageError
from mapstate.keys import is_index_key
from mapstate.operations.advance import advance
from mapstate.operations.checkpoint import rewind
from mapstate.operations.doctor import examine, recount, window_findings
from mapstate.operations.drop import drop
from mapstate.operations.export import export
from mapstate.operations.vacuum import vacuum
from mapstate.protocol import upkeep, ways_back
from mapstate.protocol.ledger import Ledger
from mapstate.protocol.stored_ledger import read_ledger
from mapstate.protocol.windows import NEVER, Input, fired_panes
from mapstate.spark.driver.repeats import report_of

SECOND = 1_000_000
EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)


@pytest.fixture(params=["memory", "sqlite", pytest.param("redis", marks=pytest.mark.redis)])
def url(request: Any, tmp_path: Path) -> str:
    """A store of each kind, empty."""
    if request.param == "memory":
        return f"memory://{tmp_path.name}"
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/state.db"
    return request.getfixturevalue("redis_url")


def run(*args: Any) -> Any:
    return CliRunner().invoke(app, [str(one) for one in args])


def listed(url: str) -> list[str]:
    return sorted({str(key) for page in resolve(url).open("s").scan(100) for key in page})


def windows_of(url: str, *users: str) -> dict[str, dict[Any, int]]:
    with open_reader(url, "s") as reader:
        return {user: {own.end: own.value["total"] for own in reader.windows(user)} for user in users}


def test_a_vacuum_forgets_dead_txids_and_no_orphaned_index_counts(url):
    job = Windowed(url, retention=100)
    job.batch(Row(1, "ann", 1))
    job.attempt(Row(2, "eve", 2), Row(3, "ann", 4), Row(34, "eve", 8))
    job.batch(Row(4, "bob", 16))
    assert job.record.dead
    users = {"ann": {10: 1}, "bob": {10: 16}, "eve": {}}
    assert windows_of(url, *users) == users
    done = vacuum(url, "s")
    assert done.unreadable == 0
    assert done.rewritten >= 1
    assert windows_of(url, *users) == users
    with open_reader(url, "s") as reader:
        assert reader.ledger().dead == ()
        assert dict(reader.window(10)) == {("ann",): {"total": 1}, ("bob",): {"total": 16}}
        with pytest.raises(StopIteration):
            next(reader.window(40))
    assert [key for key in listed(url) if "eve" in key or "|30|" in key] == []
    job.batch(Row(5, "eve", 32), Row(15, "ann", 64))
    assert windows_of(url, "eve") == {"eve": {10: 32}}
    with open_reader(url, "s") as reader:
        assert {key for key, _ in reader.window(10)} == {("ann",), ("bob",), ("eve",)}


def test_a_vacuum_removes_what_an_orphaned_attempt_left_in_windows_that_are_gone(url):
    job = Windowed(url)
    job.batch(Row(1, "ann", 1))
    job.attempt(Row(2, "eve", 2))
    job.batch(Row(35, "ann", 4))
    job.batch()
    assert job.record.windows.purged == 30
    assert "0|eve" in listed(url)
    assert vacuum(url, "s").dropped >= 1
    assert [key for key in listed(url) if "eve" in key or "P|0|" in key] == []
    assert windows_of(url, "ann") == {"ann": {40: 4}}


def test_a_vacuum_leaves_a_foreign_key_alone(url):
    job = Windowed(url)
    job.batch(Row(1, "ann", 1))
    with job._writer(job._begin()) as writer:
        codec = job._codec()
        writer.multi_put(["no pane|x"], codec.dumps([(job.record.next_txid - 1, 1, None)]))
    job.batch(Row(35, "ann", 4))
    assert vacuum(url, "s").unreadable == 0


def test_a_drop_removes_the_index(url):
    job = Windowed(url)
    job.batch(Row(1, "ann", 1), Row(12, "bob", 1))
    assert any(map(is_index_key, listed(url)))
    drop(url, "s")
    assert listed(url) == []
    with pytest.raises(StateNotFoundError):
        open_reader(url, "s")


def test_the_number_of_keys_is_not_counted(url):
    job = Windowed(url)
    job.batch(Row(1, "ann", 1))
    before = resolve(url).open("s").load()
    with pytest.raises(UsageError, match="has windows"):
        recount(url, "s")
    assert resolve(url).open("s").load() == before
    vacuum(url, "s")
    with open_reader(url, "s") as reader:
        assert reader.ledger().last_commit.keys_held is None
    assert "has windows" in run("ledger", url, "s").output or "memory" in url


def test_an_export_has_the_records_and_no_index(url, tmp_path):
    job = Windowed(url)
    job.batch(Row(1, "ann", 1), Row(12, "bob", 2))
    done = export(url, "s", tmp_path / "x.jsonl", FORMATS["jsonl"])
    assert (done.rows, done.unreadable, done.is_one_batch) == (2, 0, True)
    rows = [json.loads(line) for line in (tmp_path / "x.jsonl").read_text().splitlines()]
    assert rows == [
        {"window_start": 0, "user": "ann", "total": 1},
        {"window_start": 10, "user": "bob", "total": 2},
    ]


def test_a_reset_begins_without_windows_and_watermark(url):
    Windowed(url).batch(Row(1, "ann", 1), Row(45, "ann", 2))
    again = Windowed(url, owner="r", on_new_owner="reset")
    again.batch(Row(3, "ann", 4))
    with open_reader(url, "s") as reader:
        assert reader.watermark().time == 3
        assert reader.windows("ann")[0].value == {"total": 4}
        assert dict(reader.window(10)) == {("ann",): {"total": 4}}
        assert len(reader.windows("ann")) == 1
    vacuum(url, "s")
    assert windows_of(url, "ann") == {"ann": {10: 4}}


def test_a_new_owner_goes_on_with_the_windows(url):
    Windowed(url).batch(Row(1, "ann", 1), Row(12, "ann", 2))
    other = Windowed(url, owner="r", on_new_owner="adopt_unchecked")
    other.batch(Row(5, "ann", 4), Row(13, "ann", 8))
    assert windows_of(url, "ann") == {"ann": {20: 10}}
    assert other.record.last_windows().late == 1


def test_a_checkpoint_is_rewound_behind_a_rollback(url, tmp_path):
    job = Windowed(url)
    job.batch(Row(1, "ann", 1))
    job.batch(Row(12, "ann", 2))
    place = tmp_path / "checkpoint"
    for name in ("offsets", "commits"):
        (place / name).mkdir(parents=True)
        for number in range(2):
            (place / name / str(number)).write_text("")
    (place / "metadata").write_text(json.dumps({"id": "q"}))
    Ledger(job.store, "s").rollback()
    assert rewind(url, "s", place).batch_id == 1
    again = Windowed(url)
    again.next = 1
    again.batch(Row(9, "ann", 4))
    assert windows_of(url, "ann") == {"ann": {10: 5}}


def test_the_doctor_reads_the_index_and_says_nothing_of_healthy_windows(url):
    job = Windowed(url)
    job.batch(Row(1, "ann", 1), Row(12, "bob", 2))
    found = {one.subject: one for one in examine(url, "s")}
    assert (found["records"].severity, found["records"].found) == ("ok", "2 records were read")
    assert (found["keys"].severity, found["watermark"].severity) == ("ok", "ok")
    with job._writer(job._begin()) as writer:
        writer.multi_put([key for key in listed(url) if is_index_key(key)][:1], [b"["])
    (broken,) = (one for one in examine(url, "s") if one.severity == "error" and one.subject == "records")
    assert "1 keys cannot be read" in broken.found


def test_the_doctor_lists_windows_of_the_future(url):
    job = Windowed(url, kind="timestamp", length=10 * SECOND, slide=10 * SECOND)
    job.batch(Row(3 * SECOND, "ann", 1), Row(33 * SECOND, "ann", 1))
    at = EPOCH + dt.timedelta(seconds=31)
    assert [one.severity for one in window_findings(job.record, at)] == ["ok", "ok"]
    future, _ = window_findings(job.record, EPOCH + dt.timedelta(seconds=29))
    assert future.severity == "warning"
    assert "1 panes start after the present time: 1970-01-01T00:00:30.000000Z" in future.found
    assert future.advice


def test_the_doctor_names_the_input_that_holds_the_watermark_back(url):
    job = Windowed(url, sources=("web", "app"))
    job.batch(Row(50, "ann", 1, "web"))
    (found,) = window_findings(job.record)
    assert (found.severity, found.found) == ("warning", "none yet: no rows came yet of the inputs 'app'")
    job.batch(Row(12, "ann", 1, "app"))
    (found,) = window_findings(job.record)
    assert (found.severity, found.found) == ("warning", "12: the input 'app' is 38 behind 'web'")
    job.batch(Row(48, "ann", 1, "app"))
    (found,) = window_findings(job.record)
    assert (found.severity, found.found) == ("ok", "48: the input 'app' is 2 behind 'web'")


def test_an_advance_is_taken_by_the_next_batch_and_fires_its_windows(url):
    job = Windowed(url, lag=5)
    job.batch(Row(12, "ann", 1), Row(27, "ann", 2))
    assert job.mark == 22
    assert advance(url, "s", 31) == (22, 31)
    with open_reader(url, "s") as reader:
        assert reader.watermark().time == 22  # nothing happens before a batch
    (found,) = window_findings(read_ledger(job.store, "s"))
    assert found.found == "22, and the next batch advances it to 31"
    job.batch()
    assert job.mark == 31
    with open_reader(url, "s") as reader:
        assert [(own.end, own.final) for own in reader.windows("ann")] == [(30, True)]
    job.batch(Row(29, "ann", 4), Row(50, "bob", 8))
    assert (job.record.last_windows().late, job.mark) == (1, 45)


def test_an_advance_outlasts_an_orphaned_attempt_and_a_rollback_and_not_a_reset(url):
    job = Windowed(url)
    job.batch(Row(12, "ann", 1))
    job.attempt(Row(13, "ann", 2))
    with pytest.raises(UsageError, match="in flight"):
        advance(url, "s", 25)
    assert read_ledger(job.store, "s").windows.least == NEVER
    advance(url, "s", 25, take_over=True)
    with pytest.raises(FencedError):
        job.ledgers.begin(1)
    job = job.restarted()
    job.batch(Row(14, "ann", 4))
    assert job.mark == 25
    Ledger(job.store, "s").rollback()
    assert read_ledger(job.store, "s").last_windows().watermark == 12
    job = job.restarted()
    job.batch(Row(15, "ann", 8))
    assert (job.mark, job.record.last_windows().late) == (25, 0)
    other = Windowed(url, owner="q2", on_new_owner="reset")
    other.batch(Row(1, "ann", 1))
    assert other.mark == 1


def test_an_advance_that_is_wrong_writes_nothing(url):
    job = Windowed(url, kind="timestamp", length=60 * SECOND, slide=60 * SECOND)
    job.batch(Row(100 * SECOND, "ann", 1))
    stored = job.store.load()
    for to, wrong in (
        (EPOCH + dt.timedelta(seconds=100), "forward only"),
        (dt.datetime.now(dt.UTC) + dt.timedelta(hours=1), "in the future"),
        (500, "are datetimes with a time zone"),
        (dt.datetime(2026, 1, 1), "are datetimes with a time zone"),
    ):
        with pytest.raises(UsageError, match=wrong):
            advance(url, "s", to)
    assert advance(url, "s", EPOCH + dt.timedelta(seconds=200), dry_run=True).to == EPOCH + dt.timedelta(seconds=200)
    assert job.store.load() == stored
    done = run("advance", url, "s", "--to", "1970-01-01T00:03:20.000000Z", "--yes")
    assert done.exit_code == 0
    assert done.stdout.splitlines()[-1] == "Done: the next batch takes it, also one without rows."
    assert "advanced to 1970-01-01T00:03:20.000000Z" in run("ledger", url, "s").output or url.startswith("memory")
    assert run("advance", url, "s", "--to", "1970-01-01T00:03:20.000000Z", "--yes").exit_code == 2


def test_a_time_that_no_row_may_have_is_no_watermark(url):
    job = Windowed(url)
    job.batch(Row(1, "ann", 1))
    with pytest.raises(UsageError, match="up to 2305843009213693952"):
        advance(url, "s", (1 << 61) + 1)
    assert advance(url, "s", 1 << 61) == (1, 1 << 61)


def test_a_watermark_that_is_put_back_opens_what_is_not_gone_and_the_next_batch_drags_it_no_more(url):
    job = Windowed(url, lag=5, retention=10)
    job.batch(Row(12, "ann", 1), Row(27, "ann", 2))
    job.batch(Row(41, "ann", 4), Row(10**15, "eve", 8))  # milliseconds among seconds
    job.batch(Row(42, "ann", 16))
    assert job.record.last_windows().late == 1
    with open_reader(url, "s") as reader:
        assert reader.windows("ann") == []
    with pytest.raises(UsageError, match="end at 50 or before are gone"):
        advance(url, "s", 49, back=True)
    with pytest.raises(UsageError, match="back only"):
        advance(url, "s", 10**15, back=True)
    stored = job.store.load()
    assert advance(url, "s", 50, back=True, dry_run=True) == (10**15 - 5, 50)
    assert job.store.load() == stored
    advance(url, "s", 50, back=True)
    job = job.restarted()
    job.batch(Row(49, "ann", 1), Row(53, "ann", 32), Row(61, "ann", 64))
    assert (job.mark, job.record.last_windows().late) == (56, 1)
    with open_reader(url, "s") as reader:
        found = [(own.end, own.value["total"], own.final) for own in reader.windows("ann")]
        assert found == [(60, 32, False), (70, 64, False)]
    job.batch(Row(66, "ann", 128))
    assert job.mark == 61


def test_windows_that_fired_and_have_their_records_are_open_again_and_fire_again(url):
    job = Windowed(url, retention=100)
    job.batch(Row(1, "ann", 1), Row(12, "ann", 2), Row(25, "ann", 4))
    job.batch(Row(63, "eve", 8))
    with open_reader(url, "s") as reader:
        assert [own.final for own in reader.windows("ann")] == [True] * 3
        advance(url, "s", 15, back=True)
        assert [(own.end, own.final) for own in reader.windows("ann")] == [(10, True), (20, False), (30, False)]
        assert reader.watermark().time == 15
        assert reader.watermark().inputs[""].latest == 15
    job = job.restarted()
    job.batch(Row(9, "ann", 16), Row(12, "ann", 32), Row(31, "ann", 64))
    last = job.record.last_windows()
    assert (last.before, last.watermark, last.late) == (15, 31, 1)
    assert [ends for _, ends in fired_panes(job.record.windows, last)] == [[20], [30]]
    assert windows_of(url, "ann") == {"ann": {10: 1, 20: 34, 30: 4, 40: 64}}


def test_a_rollback_behind_a_watermark_that_was_put_back_brings_no_wrong_one_back(url):
    job = Windowed(url, retention=10**9)
    job.batch(Row(10**6, "eve", 1))
    job.batch(Row(10**6 + 1, "eve", 1))
    advance(url, "s", 10**6, back=True)
    advance(url, "s", 10**6 + 50)
    advance(url, "s", 40, back=True)
    assert read_ledger(job.store, "s").windows.least == 40  # the word before is taken back, too
    Ledger(job.store, "s").rollback()
    assert read_ledger(job.store, "s").last_windows().watermark == 40
    job = job.restarted()
    job.batch(Row(45, "ann", 1))
    assert (job.mark, job.record.last_windows().late) == (45, 0)


def test_a_window_behind_a_watermark_that_was_put_back_is_not_final_where_the_batch_may_be_taken_back(url):
    job = Windowed(url, retention=10**9)
    job.batch(Row(60, "eve", 1))
    job.batch(Row(90, "eve", 1))
    last = msgspec.structs.replace(job.record.last_commit, apart_from=("late",))
    apart = msgspec.structs.replace(job.record, last_commit=last)
    assert [apart.final_mark(), job.record.final_mark()] == [60, 90]
    for to in (40, 75):
        back = upkeep.advance(apart, to, "", back_at=0)
        assert back.final_mark() == min(to, 60) == ways_back.rollback(back).final_mark()


def test_a_watermark_is_put_back_with_nothing_in_flight_or_by_taking_over(url):
    job = Windowed(url)
    job.batch(Row(12, "ann", 1))
    job.attempt(Row(13, "ann", 2))
    stored = job.store.load()
    with pytest.raises(UsageError, match="in flight"):
        advance(url, "s", 5, back=True)
    assert job.store.load() == stored
    advance(url, "s", 11, back=True, take_over=True)
    with pytest.raises(FencedError):
        job.ledgers.begin(1)


def test_the_command_says_what_opens_again(tmp_path):
    url = f"sqlite:///{tmp_path}/state.db"
    job = Windowed(url, retention=100)
    job.batch(Row(12, "ann", 1), Row(40, "ann", 1))
    assert run("advance", url, "s", "--yes").exit_code == 2
    assert run("advance", url, "s", "--to", "50", "--back-to", "20", "--yes").exit_code == 2
    done = run("advance", url, "s", "--back-to", "15", "--yes")
    assert done.exit_code == 0
    assert "windows that end later and are not gone open and fire again" in done.stdout
    assert done.stdout.splitlines()[-1] == "Done: what has fired later is open again."
    assert json.loads(run("advance", url, "s", "--back-to", "14", "--yes", "--json").stdout) == {
        "watermark": 15,
        "to": 14,
    }


def test_the_doctor_says_that_a_clock_jumped_that_rows_are_late_and_what_moved_no_watermark(url):
    job = Windowed(url, kind="timestamp", length=10 * SECOND, slide=10 * SECOND)
    job.batch(Row(3 * SECOND, "ann", 1), Row(93 * SECOND, "ann", 1))
    clock, *_ = window_findings(job.record, EPOCH + dt.timedelta(seconds=30))
    assert (clock.severity, clock.subject) == ("warning", "clock")
    assert "--back-to" in clock.advice
    attempted, *rest = job.attempt(Row(94 * SECOND, "ann", 1))
    done = msgspec.structs.replace(attempted.windows, jump=3600 * SECOND)
    job.commit((msgspec.structs.replace(attempted, windows=done), *rest))
    clock, *_ = window_findings(job.record, EPOCH + dt.timedelta(seconds=95))
    assert "jumped by 3600 s" in clock.found
    report = report_of(attempted)
    late = msgspec.structs.replace(report, rows=10, rows_late=6)
    by_subject = {one.subject: one for one in window_findings(job.record, reports=[late, report])}
    assert (by_subject["late rows"].severity, by_subject["late rows"].found) == (
        "warning",
        "6 of 11 rows of the last 2 batches",
    )


def test_the_doctor_lists_windows_of_numbers_that_moved_no_watermark(url):
    job = Windowed(url)
    job.batch(Row(3, "ann", 1))
    attempted, change, kept = job.attempt(Row(4, "ann", 1), Row(10**15, "eve", 1))
    done = msgspec.structs.replace(attempted.windows, watermark=4, inputs={"": Input(4, 1)})
    job.commit((msgspec.structs.replace(attempted, windows=done), change, kept))
    future, *_ = window_findings(job.record)
    assert future.severity == "warning"
    assert "1 panes start after the latest time that counts: 1000000000000000" in future.found


def test_windows_by_the_clock_are_put_back_too(url):
    clocked = Windowed(url, by_clock=True, kind="timestamp")
    clocked.batch(Row(0, "ann", 1))
    advance(url, "s", EPOCH - dt.timedelta(seconds=9), back=True)
    assert read_ledger(clocked.store, "s").last_windows().watermark == -9 * SECOND


def test_the_commands_show_windows_and_watermark(tmp_path):
    url = f"sqlite:///{tmp_path}/state.db"
    job = Windowed(url, kind="timestamp", length=60 * SECOND, slide=60 * SECOND, lag=SECOND)
    job.batch(Row(1 * SECOND, "ann", 1), Row(130 * SECOND, "ann", 2))
    job.batch()
    shown = run("ledger", url, "s").output
    spans = "length 60 s, slide 60 s, lag 1 s, retention 0 s"
    for part in (spans, "1970-01-01T00:02:09.000000Z", "runs, from 1970-01-01"):
        assert part in shown
    assert "what ends at 1970-01-01T00:02:00.000000Z or before" in shown
    assert "not known: the state has windows" in shown
    done = run("windows", url, "s", "ann", "--json")
    assert done.exit_code == 0
    assert json.loads(done.stdout.splitlines()[0]) == {
        "key": {
            "window_start": "1970-01-01T00:02:00.000000Z",
            "window_end": "1970-01-01T00:03:00.000000Z",
            "final": False,
        },
        "value": {"total": 2},
    }
    assert run("windows", url, "s", "ann", "--since", "1970-01-01T00:03:00.000000Z").exit_code == 1
    for option in ("--since", "--until"):  # a null would be no bound
        assert "a time cannot be null" in run("windows", url, "s", "ann", option, r"\N").stderr
    assert run("windows", url, "s", "ann", "--until", "1970-01-01T00:03:00.000000Z").exit_code == 0
    assert run("windows", url, "s", "ann", "bob").exit_code == 2
    assert run("recount", url, "s", "--yes").exit_code == 2


@pytest.mark.slow
@patch("time.sleep")  # a reader waits for a ledger that may still come
def test_whatever_a_ledger_with_windows_is_damaged_to_each_command_and_reader_says_so(waited, tmp_path_factory, rounds):
    @settings(max_examples=rounds(40, 150), deadline=None, suppress_health_check=list(HealthCheck))
    @given(data=st.data())
    def damages(data):
        url = f"memory://{tmp_path_factory.mktemp('damaged').name}"
        job = Windowed(url, length=20, retention=10)
        job.batch(Row(1, "ann", 1), Row(12, "bob", 2))
        job.batch(Row(45, "ann", 4))
        damaged = data.draw(damaged_ledgers(job.store.load()[0]))

        def damage() -> None:
            job.store.swap(damaged, job.store.load()[1], FenceToken(1, 1))

        for command in (
            *(
                ["ledger"],
                ["ledger", "--json"],
                ["doctor"],
                ["vacuum"],
                ["vacuum", "--take-over"],
                ["rollback", "--yes"],
            ),
            *(["windows", "ann"], ["windows", "ann", "--since", "5"], ["recount", "--yes"]),
        ):
            damage()
            done = run(command[0], url, "s", *command[1:])
            assert isinstance(done.exception, SystemExit | NoneType), (command, damaged, done.exception)
            assert done.exit_code in (0, 1, 2)
        for read in (
            lambda reader: reader.watermark(),
            lambda reader: reader.windows("ann"),
            lambda reader: list(reader.window(40)),
            lambda reader: list(reader.scan()),
        ):
            damage()
            with suppress(MapStateError), open_reader(url, "s") as reader:
                read(reader)

    damages()
