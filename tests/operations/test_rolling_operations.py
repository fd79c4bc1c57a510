"""What operators do to a state with rolling windows, and what the commands show of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aerospike_stand_in import NAMESPACE, Cluster, StandInBackend
from every_store import AEROSPIKE, CLUSTER, REDIS, url_of
from rolled import HOURS, MINUTE, T0, TENS, Rolled, Row, keyed
from states import Job, form_of
from typer.testing import CliRunner

from mapstate import CombinerAggregator, Count, open_reader
from mapstate.backends import resolve
from mapstate.batch_report import BatchReport
from mapstate.capabilities import FencedWrites
from mapstate.cli.commands import app
from mapstate.cli.export import FORMATS
from mapstate.errors import StateNotFoundError, UsageError, WindowGoneError
from mapstate.operations.adopt import adopt
from mapstate.operations.advance import advance
from mapstate.operations.doctor import examine, recount, window_findings
from mapstate.operations.drop import drop
from mapstate.operations.export import export
from mapstate.operations.vacuum import vacuum
from mapstate.protocol.ledger import Ledger
from mapstate.protocol.ledger_record import Commit
from mapstate.protocol.stored_ledger import LEDGER_KEY, read_ledger
from mapstate.schema import Field, KeyField
from mapstate.serializers import RecordCodec, serializer
from mapstate.serializers.tiles import Tiles, tiles_of


@pytest.fixture(params=["memory", "sqlite", REDIS, CLUSTER, AEROSPIKE])
def url(request: Any, tmp_path: Path) -> str:
    """A store of each kind, empty."""
    return url_of(request, tmp_path)


def run(*args: Any) -> Any:
    return CliRunner().invoke(app, [str(one) for one in args])


def of_batches(url: str, windows: Any = TENS, **changes: Any) -> Rolled:
    """Two batches; the second one folds tiles of the first."""
    state = keyed(url, windows, **changes)
    state.batch(Row(3, "a", 5), Row(8, "a", 7), Row(12, "b", 1))
    state.batch(Row(21, "a", 2), Row(23, "b", 4), Row(124, "c", 9))
    state.batch(Row(126, "a", 3))
    return state


def check(url: str, state: Rolled, *ends: int) -> None:
    """Every key is right as of now, the watermark and later times."""
    with open_reader(url, "s") as reader:
        for key in "abc":
            assert reader.get(key) == state.right(key), key
            for end in (126, 130, 190, *ends):
                assert reader.get(key, at=end) == state.right(key, end), (key, end)


# The commands that look


def test_get_shows_values_as_of_a_time(url):
    state = of_batches(url, retention=200)
    now = run("get", url, "s", "a", "--json")
    assert json.loads(now.stdout) == {"key": {"k": "a"}, "value": state.right("a")}
    for at, end in (("20", 20), ("22", 20), ("watermark", 126)):
        done = run("get", url, "s", "a", "b", "--at", at, "--json")
        rows = [json.loads(line) for line in done.stdout.splitlines()]
        assert [row["value"] for row in rows] == [state.right(key, end) for key in ("a", "b")]
    done = run("get", url, "s", "a", "--at", "20", "--columns", "total_100,rows_lifetime")
    assert done.stdout.splitlines() == ["k\ttotal_100\trows_lifetime", "a\t12\t2"]
    assert done.stderr == "as of 20\n"
    header = run("get", url, "s", "a").stdout.splitlines()[0]
    assert header.split("\t") == ["k", *(state.right("a", 0) or {})]
    gone = run("get", url, "s", "a", "--at", "-1000")
    assert (gone.exit_code, "kept whole from" in gone.stderr) == (2, True)
    for wrong in ("x", "2026-11-27T10:00:00Z", "1.5"):
        assert "this is none" in run("get", url, "s", "a", "--at", wrong).stderr
    assert "no field 'total'" in run("get", url, "s", "a", "--columns", "total").stderr
    absent = run("get", url, "s", "nobody", "--at", "20")
    assert (absent.exit_code, "no key nobody" in absent.stderr) == (1, True)


def test_get_has_no_time_for_another_state(url):
    Job(url).batch(a=1)
    for at in ("20", "watermark"):
        done = run("get", url, "s", "a", "--at", at)
        assert (done.exit_code, "no rolling windows" in done.stderr) == (2, True), done.stderr
    assert run("get", url, "s", "a", "--columns", "n").stdout.splitlines() == ["k\tn", "a\t1"]


def test_get_of_timestamps(url):
    state = keyed(url, HOURS)
    state.batch(Row(T0 - 90 * MINUTE, "a", 3), Row(T0 - 7 * MINUTE, "a", 4))
    done = run("get", url, "s", "a", "--at", "2026-11-27T12:00:00+02:00", "--json")
    assert json.loads(done.stdout)["value"] == state.right("a", T0)
    said = run("get", url, "s", "a", "--at", "2026-11-27T10:03:00Z").stderr
    assert said == "as of 2026-11-27T10:00:00.000000Z\n"
    assert "2026-11-27T10:00:00Z" in run("get", url, "s", "a", "--at", "2026-11-27T10:00:00").stderr


def test_the_ledger_says_its_windows_and_from_when_on_they_can_be_read(url):
    state = of_batches(url, retention=50)
    text = " ".join(run("ledger", url, "s").stdout.split())
    assert "rolling windows 10 by 5, 100 by 10, lifetime" in text
    assert "unit 5, lag 0, retention 50" in text
    assert "watermark 126" in text
    assert "can be read as of 70 or later" in text
    document = json.loads(run("ledger", url, "s", "--json").stdout)
    assert document["ledger"]["rolling"]["horizon"] == 14
    keyed(url, HOURS, state="hours", lag="10 minutes").batch(Row(T0, "a", 1))
    text = " ".join(run("ledger", url, "hours").stdout.split())
    assert "1_hour by 300 s, 24_hours by 3600 s, lifetime unit 300 s, lag 600 s" in text
    assert "can be read as of any time" in text
    assert state.record.rolling is not None
    assert run("ls", url).exit_code == 0


def test_watch_shows_the_windows(url):
    state = of_batches(url)
    look = json.loads(run("watch", url, "s", "--count", "1", "--json").stdout)
    found = {row["key"]["k"]: row["value"] for row in look["rows"]}
    assert found == {key: state.right(key) for key in "abc"}
    lines = run("watch", url, "s", "a", "--count", "1").stdout.splitlines()
    assert lines[1].split("\t")[0] == "a"


def test_an_advance_says_which_tiles_may_be_joined_where_a_watermark_stands(url):
    """A begin takes the operator's word, so the batch that could not be written is."""
    state = of_batches(url, lag=100)
    done = run("advance", url, "s", "--back-to", "5", "--yes")
    assert (done.exit_code, "cannot be put back" in done.stderr) == (2, True), done.stderr
    done = run("advance", url, "s", "--to", "120", "--yes")
    assert (done.exit_code, "can be read from then on" in done.stderr + done.stdout) == (0, True), done.stderr
    (found,) = [one for one in examine(url, "s") if one.subject == "watermark"]
    assert found.found.endswith("and the next batch advances it to 120")
    attempted = state.attempt(Row(130, "a", 1))
    with open_reader(url, "s") as reader:
        assert reader.get("a", at="watermark") == state.right("a", 120)  # though no commit has it
        with pytest.raises(WindowGoneError):
            reader.get("a", at=110)
    state.commit(attempted)
    with open_reader(url, "s") as reader:
        assert reader.watermark().time == 120
        assert {key: reader.get(key) for key in "abc"} == {key: state.right(key) for key in "abc"}
    assert "mapstate get" in run("windows", url, "s", "a").stderr


def test_no_advance_goes_beyond_the_rows_where_times_are_numbers(url):
    """They have no clock, and the watermark of rolling windows cannot be put back."""
    state = of_batches(url, lag=100)
    before = state.store.load()
    with pytest.raises(UsageError, match="up to the latest row, 126"):
        advance(url, "s", 127)
    assert state.store.load() == before
    assert advance(url, "s", 126).to == 126
    with pytest.raises(UsageError, match="window that can still be asked for"):
        advance(url, "s", 3, back=True)
    (found,) = [one for one in examine(url, "s") if one.subject == "watermark"]
    assert found.severity == "ok"
    kept = msgspec.structs.replace(state.record.rolling, least=500)
    (found,) = window_findings(msgspec.structs.replace(state.record, rolling=kept))
    assert (found.severity, "the latest row is of 126" in found.found) == ("warning", True)


def test_the_doctor_says_that_a_watermark_stands(url):
    state = of_batches(url)
    attempted = state.attempt(Row(900, "a", 1))
    assert state.ledgers is not None
    last = state.record.last_windows()
    stands = msgspec.structs.replace(last, before=last.watermark, newest=900)
    state.ledgers.commit(
        [Commit(batch_id=state.next, txid=attempted[0].txid, owner="q", rows=1, keys_delta=0, windows=stands)]
    )
    (found,) = [one for one in examine(url, "s") if one.subject == "watermark"]
    assert (found.severity, "the latest row is of 900" in found.found) == ("warning", True)


def test_the_doctor_advises_nothing_that_is_refused_where_a_clock_is_wrong(url):
    """The watermark of rolling windows is not put back."""
    record = of_batches(url, HOURS).record
    assert record.last_commit is not None
    done = msgspec.structs.replace(record.last_windows(), jump=9 * MINUTE)
    record = msgspec.structs.replace(record, last_commit=msgspec.structs.replace(record.last_commit, windows=done))
    numbers = dict.fromkeys(("keys_read", "keys_cached", "keys_written", "keys_skipped", "milliseconds"), 0)
    reports = [BatchReport(batch_id=0, txid=1, attempt=1, rows=3, at="", rows_late=3, **numbers)]
    found = {one.subject: one for one in window_findings(record, reports=reports)}
    assert [found[name].severity for name in ("clock", "late rows")] == ["warning"] * 2
    assert not [one for one in found.values() if "--back-to" in one.advice]
    assert "are that clock and those of the sources right" in found["late rows"].advice


# Export


def rows_of(path: Path) -> dict[str, Any]:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return {row.pop("k"): row for row in rows}


def test_an_export_has_all_columns_as_of_its_start(url, tmp_path):
    state = of_batches(url)
    to = tmp_path / "x.jsonl"
    done = json.loads(run("export", url, "s", "--to", to, "--json").stdout)
    assert (done["rows"], done["end"], done["is_one_batch"]) == (3, 125, True)
    assert rows_of(to) == {key: state.right(key) for key in "abc"}
    assert "Its windows end at 125." in run("export", url, "s", "--to", to).stdout
    for form in ("csv", "parquet"):
        assert export(url, "s", tmp_path / f"x.{form}", FORMATS[form]).rows == 3
    Job(url, state="plain").batch(a=1)
    assert "end" not in json.loads(run("export", url, "plain", "--to", to, "--json").stdout)


class Names(CombinerAggregator):
    """A user's own."""

    def init(self, row: Any) -> Any:
        return str(row["n"])

    def combine(self, a: Any, b: Any) -> Any:
        return a + b

    def zero(self) -> Any:
        return ""


def test_a_command_that_needs_a_users_own_combiner_names_its_field(url, tmp_path):
    job = Rolled(url, serializer=form_of(url), aggregates={"names": Names(), "rows": Count()})
    job.batch(Row(5, "ann", 3), Row(7, "ann", 4))
    for command in (["get", url, "s", "ann"], ["export", url, "s", "--to", tmp_path / "all.csv"]):
        done = run(*command)
        assert (done.exit_code, "the field 'names' is a Names" in done.stderr) == (2, True), done.output
    assert not list(tmp_path.glob("all*"))
    shown = run("get", url, "s", "ann", "--columns", "rows_10,rows_lifetime", "--json")
    assert json.loads(shown.stdout)["value"] == {"rows_10": 2, "rows_lifetime": 2}, shown.output
    for command in (["ledger", url, "s"], ["recount", url, "s", "--yes"]):
        assert run(*command).exit_code == 0, command


def test_an_interrupted_export_begins_anew(url, tmp_path):
    state = of_batches(url)
    to, part = tmp_path / "x.jsonl", tmp_path / "x.jsonl.part"

    def stop(keys: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export(url, "s", to, FORMATS["jsonl"], page_size=1, on_page=stop)
    assert part.exists()
    done = export(url, "s", to, FORMATS["jsonl"])
    assert (done.rows, done.resumed) == (3, 0)
    assert rows_of(to)["a"] == state.right("a")


# The commands that write


def test_the_doctor_finds_nothing_wrong(url):
    of_batches(url)
    findings = examine(url, "s")
    of_servers = ("persistence", "consistency")
    assert [one for one in findings if one.severity != "ok" and not one.subject.endswith(of_servers)] == []
    assert any(one.found == "3 keys" for one in findings)


def test_a_vacuum_settles_what_orphaned_attempts_have_left(url):
    if url.startswith("memory"):
        pytest.skip("a store of one process")
    state = of_batches(url)
    state.attempt(Row(500, "a", 77), Row(3, "new", 1), Row(24, "b", 5))
    state.attempt(Row(130, "b", 5))
    right = {key: state.right(key) for key in "abc"}
    assert run("vacuum", url, "s").exit_code == 2  # an attempt is in flight
    done = vacuum(url, "s", take_over=True)
    written = (2, 1) if isinstance(state.store, FencedWrites) else (4, 0)  # without a fence all, the new key as absent
    assert (done.rewritten, done.dropped, done.unreadable) == (*written, 0)
    with open_reader(url, "s") as reader:
        assert {key[0]: value for key, value in reader.scan()} == right
    check(url, state)
    record = read_ledger(resolve(url).open("s"), "s")
    assert (record.dead, record.keys_held()) == ((), 3)
    again = state.restarted()
    again.batch(Row(131, "a", 4), Row(24, "b", 5))
    with open_reader(url, "s") as reader:
        for key in "ab":
            assert reader.get(key, at=135) == again.right(key, 135)


def test_a_vacuum_keeps_the_keys_of_orphaned_attempts_as_absent_where_the_store_has_no_fence():
    cluster = Cluster()
    try:
        backend = StandInBackend((("127.0.0.1", cluster.port),), NAMESPACE)
        state = keyed(backend)
        state.batch(Row(3, "a", 5), Row(12, "b", 1))
        state.batch(Row(121, "a", 2), Row(124, "c", 9))
        state.attempt(Row(500, "a", 77), Row(3, "new", 1))
        for _ in range(2):
            assert vacuum(backend, "s", take_over=True).rewritten == 4
            with open_reader(backend, "s") as reader:
                found = {key[0]: value for key, value in reader.scan()}
                assert found == {key: state.right(key) for key in "abc"}
    finally:
        cluster.close()


def test_a_vacuum_that_dies_changes_no_value(url, monkeypatch):
    state = of_batches(url)
    state.attempt(Row(500, "a", 77), Row(24, "b", 5))

    def dies(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("mapstate.operations.vacuum.Ledger.commit_vacuum", dies)
        with pytest.raises(KeyboardInterrupt):
            vacuum(url, "s", take_over=True)
    check(url, state)
    assert vacuum(url, "s", take_over=True).rewritten == (2 if isinstance(state.store, FencedWrites) else 3)
    check(url, state)


BOUNDED = ((10, 5), (100, 10))


def with_an_idle_key(url: Any, **changes: Any) -> Rolled:
    """Three keys, of which "a" has no row in any window that can be asked for any more: the horizon is 500."""
    state = keyed(url, BOUNDED, **changes)
    state.batch(Row(3, "a", 5), Row(8, "a", 7), Row(12, "b", 1))
    state.batch(Row(500, "b", 2), Row(404, "c", 9))
    state.batch(Row(503, "b", 4))
    return state


def held(url: Any) -> int | None:
    return read_ledger(resolve(url).open("s"), "s").keys_held()


def stored_keys(url: Any) -> int:
    """How many records there are, whatever counts of them."""
    return sum(key != LEDGER_KEY for page in resolve(url).open("s").scan(100) for key in page)


def check_without(url: Any, state: Rolled) -> None:
    """The key that was idle is gone, and the others are right."""
    with open_reader(url, "s") as reader:
        for end in (503, 510, 590, 700):
            right = [None, *(state.right(key, end) for key in "bc")]
            assert reader.multi_get(list("abc"), at=end) == right, end
        assert {key[0] for key, _ in reader.scan()} == {"b", "c"}


def test_a_key_whose_windows_are_all_empty_is_gone_after_a_vacuum(url):
    goes_idle(url)


def test_an_idle_key_is_absent_where_the_store_has_no_fence():
    cluster = Cluster()
    try:
        goes_idle(StandInBackend((("127.0.0.1", cluster.port),), NAMESPACE))
    finally:
        cluster.close()


def goes_idle(url: Any) -> None:
    """A key that is idle, vacuumed away, and comes again."""
    state = with_an_idle_key(url)
    fenced = isinstance(state.store, FencedWrites)
    with open_reader(url, "s") as reader:
        assert reader.get("a") == state.right("a")  # zeros, for as long as the record is there
    assert (held(url), stored_keys(url)) == (3, 3)
    done = vacuum(url, "s")
    assert (done.idle, done.dropped) == (1, 1 if fenced else 0)
    assert (held(url), stored_keys(url)) == (2, 2 if fenced else 3)
    check_without(url, state)
    of_servers = ("persistence", "consistency")
    assert [one for one in examine(url, "s") if one.severity != "ok" and not one.subject.endswith(of_servers)] == []
    again = vacuum(url, "s")
    assert (again.idle, held(url)) == (0, 2)
    later = state.restarted()
    later.committed = [[row for row in state.rows if row.user != "a"]]
    later.batch(Row(520, "a", 4))
    assert held(url) == 3
    with open_reader(url, "s") as reader:
        for end in (520, 540, 700):
            assert reader.multi_get(list("abc"), at=end) == [later.right(key, end) for key in "abc"]


def test_a_key_stays_for_as_long_as_a_time_can_be_asked_for_at_which_it_has_a_row(url):
    state = keyed(url, BOUNDED)
    state.batch(Row(100, "a", 5), Row(120, "b", 1))
    state.batch(Row(900, "b", 2))  # the watermark is 900 from here on, and the horizon 120
    assert vacuum(url, "s").idle == 0
    with open_reader(url, "s") as reader:
        for end in (120, 150, 195, 900):
            assert reader.multi_get(list("ab"), at=end) == [state.right(key, end) for key in "ab"]
    state = state.restarted()
    state.batch(Row(901, "b", 2))
    assert vacuum(url, "s").idle == 1


def test_no_key_is_idle_where_there_is_a_lifetime(url):
    state = keyed(url)
    state.batch(Row(3, "a", 5), Row(12, "b", 1))
    state.batch(Row(5000, "b", 2))
    state.batch(Row(5001, "b", 2))
    done = vacuum(url, "s")
    assert (done.idle, done.dropped, held(url)) == (0, 0, 2)
    with open_reader(url, "s") as reader:
        assert reader.get("a", at=6000) == state.right("a", 6000)


@pytest.mark.parametrize("step", ["before its commit", "after it"])
def test_a_vacuum_of_idle_keys_that_dies_leaves_a_number_of_keys_that_is_right(url, step, monkeypatch):
    state = with_an_idle_key(url)
    before = {key: state.right(key) for key in "abc"}

    def dies(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    ledgers = "mapstate.operations.vacuum.Ledger"
    with monkeypatch.context() as patched:
        if step == "before its commit":
            patched.setattr(f"{ledgers}.commit_vacuum", dies)
        else:
            real, calls = Ledger.begin_operator, []

            def second(*args: Any, **options: Any) -> Any:
                calls.append(1)
                return dies() if len(calls) > 1 else real(*args, **options)

            patched.setattr(f"{ledgers}.begin_operator", second)
        with pytest.raises(KeyboardInterrupt):
            vacuum(url, "s")
    if step == "before its commit":
        assert held(url) == 3
        with open_reader(url, "s") as reader:
            assert {key: reader.get(key) for key in "abc"} == before
    else:
        assert held(url) == 2
        check_without(url, state)
    later = state.restarted()
    later.batch(Row(504, "c", 6))  # fences the vacuum
    assert held(url) == (3 if step == "before its commit" else 2)
    done = vacuum(url, "s")
    assert (done.idle, held(url)) == (1 if step == "before its commit" else 0, 2)
    assert stored_keys(url) == (2 if isinstance(state.store, FencedWrites) else 3)
    check_without(url, later)


def test_a_batch_that_begins_between_both_attempts_of_a_vacuum_fences_only_the_second(url, monkeypatch):
    if url.startswith("memory"):
        pytest.skip("a store of one process")
    state = with_an_idle_key(url)
    commit, later = Ledger.commit_vacuum, state.restarted()

    def then_a_batch(self: Any, *args: Any, **options: Any) -> None:
        commit(self, *args, **options)
        later.attempt(Row(504, "c", 6))

    with monkeypatch.context() as patched:
        patched.setattr("mapstate.operations.vacuum.Ledger.commit_vacuum", then_a_batch)
        assert vacuum(url, "s").idle == 1
    check_without(url, state)
    assert held(url) == 2
    assert vacuum(url, "s", take_over=True).idle == 0
    assert held(url) == 2
    check_without(url, state)


@pytest.mark.redis
def test_a_vacuum_of_idle_keys_covers_up_no_lost_record(redis_url, redis_server, caplog):
    with_an_idle_key(redis_url)
    with redis_server.client() as client:
        assert client.delete(f"{resolve(redis_url).prefix}s:c") == 1
    assert vacuum(redis_url, "s").idle == 1
    assert held(redis_url) == 2
    assert "found 1 keys, and the ledger says 2" in caplog.text


def test_keys_are_counted(url):
    state = of_batches(url)
    assert recount(url, "s").found == 3
    assert run("recount", url, "s", "--yes").exit_code == 0
    with open_reader(url, "s") as reader:
        assert reader.key_count() == 3
    check(url, state)


def test_a_rolling_state_is_dropped(url):
    of_batches(url)
    assert drop(url, "s").records == 3
    with pytest.raises(StateNotFoundError):
        open_reader(url, "s")
    keyed(url, ((20, 10),)).batch(Row(3, "a", 5))  # with other windows


def test_records_of_tiles_are_not_adopted(url):
    """What their windows are was in the ledger alone."""
    state = of_batches(url)
    keys = [key for page in state.store.scan(100) for key in page if key != LEDGER_KEY]
    resolve(url).open("lost").multi_put(keys, state.store.multi_get(keys))
    schema: Any = {"type": "opaque", "keys": state.keys, "fields": state.opening.fields}
    with pytest.raises(UsageError, match="has rolling windows"):
        adopt(url, "lost", **schema, owner=None, serializer=state.form)
    with pytest.raises(UsageError):
        adopt(url, "s", **schema, owner=None, serializer=state.form)
    check(url, state)


def test_a_page_of_removed_keys_is_not_taken_for_tiles(url):
    """They have the same form in any state."""
    store = resolve(url).open("lost")
    form = serializer(form_of(url))
    records = [[7, None, None], [8, None, None]]
    if form.native:
        records = [[None, None, 7], [None, None, 8]]
    store.multi_put(["a", "b"], records if form.native else form.encode_all(records))
    schema: Any = {"type": "opaque", "keys": (KeyField("k", "string"),), "fields": (Field("n", "Sum(n)", "bigint"),)}
    assert adopt(url, "lost", **schema, owner=None, serializer=form_of(url)).records == 2


def test_a_record_of_a_removed_key_is_read_back(url):
    """A store without a fence keeps such records in a vacuum."""
    state = of_batches(url)
    codec = RecordCodec(serializer(state.form), "s", "opaque", state.fields, state.record.field_counts, in_tiles=True)
    before = Tiles([5, 6], [[1, 2], [3, 4], [None, 6]])
    records: list[Any] = [(7, None, None), (8, None, before), (9, before, None), (10, before, before)]
    read = codec.loads(["a", "b", "c", "d"], codec.dumps(records))
    assert [(txid, tiles_of(now), tiles_of(was)) for txid, now, was in read] == records
