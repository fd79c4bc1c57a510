"""States with windows in their store, step by step: readers, vacuum, and whoever else walks all records."""

from __future__ import annotations

import sqlite3
from typing import Any

import pyarrow as pa
import pytest
from states import START, Tens
from windowed import Row, Windowed

from mapstate import errors, opaque, open_reader
from mapstate.backends import resolve
from mapstate.keys import is_index_key
from mapstate.maps.pane_index import index_keys, slices
from mapstate.operations.adopt import adopt
from mapstate.operations.advance import advance
from mapstate.operations.doctor import examine
from mapstate.operations.drop import drop
from mapstate.operations.vacuum import vacuum
from mapstate.protocol.ledger import Ledger
from mapstate.protocol.stored_ledger import record_pages
from mapstate.reader.windows import Window
from mapstate.schema import Field, KeyField
from mapstate.spark.executor.window_task import FiredTask


@pytest.fixture
def url(tmp_path: Any) -> str:
    return f"sqlite:///{tmp_path}/state.db"


def keys_of(store: Any, *, index: bool) -> set[str]:
    return {key for page in record_pages(store, 100, index=True) for key in page if is_index_key(key) is index}


def test_a_reader_shows_live_and_final_windows(url):
    state = Tens(url, "s")
    with pytest.raises(errors.StateNotFoundError):
        open_reader(url, "s")
    state.batch({5: {"a": 1, "b": 2}}, watermark=5)
    with open_reader(url, "s") as reader:
        assert reader.windows("a") == [Window(0, 10, {"n": 1}, final=False)]
        state.batch({7: {"a": 1}, 12: {"a": 4}}, watermark=12)
        assert reader.windows("a") == [Window(0, 10, {"n": 2}, final=True), Window(10, 20, {"n": 4}, final=False)]
        assert reader.windows("a", since=10) == reader.windows("a")[1:]
        assert reader.windows("a", until=10) == reader.windows("a")[:1]
        assert reader.windows("nobody") == []
        assert sorted(reader.window(10)) == [(("a",), {"n": 2}), (("b",), {"n": 2})]
        assert reader.watermark().time == 12
        assert reader.key_count() is None
        assert reader.get((0, "a")) == {"n": 2}
        assert sorted(reader.scan()) == [((0, "a"), {"n": 2}), ((0, "b"), {"n": 2}), ((10, "a"), {"n": 4})]
        with pytest.raises(errors.UsageError, match="no window .* ends at 13"):
            list(reader.window(13))


@pytest.mark.parametrize("how", ["made anew", "put back", "put back and passed", "repeated and vacuumed"])
def test_a_final_window_that_is_another_one_by_now_is_not_read_on(url, monkeypatch, how):
    monkeypatch.setattr("mapstate.reader.windows._PAGE", 3)
    state = Tens(url, "s", retention=100)
    state.batch({5: dict.fromkeys("abcdefgh", 1)}, watermark=4)
    state.batch({25: {"a": 1}}, watermark=25)
    with open_reader(url, "s") as reader:
        pages = reader.window(10)
        assert next(pages) == (("a",), {"n": 1})
        if how == "made anew":
            drop(url, "s")
            monkeypatch.setattr("states.START", 2 * START)
            state = Tens(url, "s", retention=100)
        elif how == "repeated and vacuumed":
            Ledger(state.store, "s").rollback()
            state.next, state.opened = state.next - 1, False
        else:
            advance(url, "s", 5, back=True)
        state.batch({6: dict.fromkeys("abcdefghi", 6)}, watermark=25 if "and" in how else 5)
        if how == "repeated and vacuumed":
            state.write(state.begin(), {20: {"orphan": 1}})
            assert vacuum(url, "s", take_over=True).txid is not None
        why = "was reset, dropped or made anew" if how == "made anew" else "its watermark put back"
        with pytest.raises(errors.StaleBatchError, match=why):
            list(pages)


def test_sliding_windows_join_their_panes(url):
    state = Tens(url, "s", slide=5)
    state.batch({2: {"a": 1}, 6: {"a": 2}, 11: {"a": 4, "b": 8}}, watermark=11)
    with open_reader(url, "s") as reader:
        found = [(window.end, window.value["n"], window.final) for window in reader.windows("a")]
        assert found == [(5, 1, True), (10, 3, True), (15, 6, False), (20, 4, False)]
        assert sorted(reader.window(15)) == [(("a",), {"n": 6}), (("b",), {"n": 8})]


def test_an_orphaned_attempt_is_seen_nowhere_and_its_keys_are_new_to_the_next(url):
    state = Tens(url, "s")
    state.batch({5: {"a": 1}}, watermark=5)
    state.write(state.begin(), {0: {"a": 7, "orphan": 1}, 30: {"far": 1}})
    with open_reader(url, "s") as reader:
        assert reader.windows("a") == [Window(0, 10, {"n": 1}, final=False)]
        assert dict(reader.window(10)) == {("a",): {"n": 1}}
        state.batch({6: {"orphan": 2}}, watermark=20)
        assert sorted(reader.window(10)) == [(("a",), {"n": 1}), (("orphan",), {"n": 2})]


@pytest.mark.parametrize("slide", [10, 5])
def test_a_purge_between_ledger_and_records_is_noticed(url, slide, monkeypatch):
    """The reader has read the ledger, and then a whole batch purges the windows that it asks for."""
    state = Tens(url, "s", slide=slide, retention=0)
    state.batch({5: {"a": 1}, 16: {"a": 3}}, watermark=5)
    state.batch({17: {"a": 1}}, watermark=17)
    reader = open_reader(url, "s")
    reader.windows("a")
    store = reader._reads.store
    multi_get, ledgers = store.multi_get_with_ledger, []

    def purges_first(keys: Any) -> Any:
        if not ledgers:
            ledgers.append(state.record)
            attempt = state.begin()
            purge(state, attempt)
            state.commit(attempt, purged=[0, 5] if slide == 5 else [0], watermark=17)
        return multi_get(keys)

    monkeypatch.setattr(store, "multi_get_with_ledger", purges_first)
    ends = [window.end for window in reader.windows("a")]
    assert ends == ([20] if slide == 10 else [20, 25])
    with pytest.raises(errors.WindowGoneError):
        list(reader.window(10))


def purge(state: Tens, attempt: Any) -> None:
    """What a purge removes of the panes before 10: records first, and then the index."""
    gone = [key for key in keys_of(state.store, index=False) if int(key.partition("|")[0]) < 10]
    with_index = [key for key in keys_of(state.store, index=True) if int(key.split("|")[1]) < 10]
    writer = state.store.writer(attempt.token)
    writer.multi_get([*gone, *with_index])
    writer.multi_rewrite([*gone, *with_index], [None] * (len(gone) + len(with_index)))


def test_a_key_of_a_final_window_without_its_record_is_an_error(url):
    state = Tens(url, "s")
    state.batch({5: {"a": 1, "b": 1}}, watermark=15)
    attempt = state.begin()
    state.store.writer(attempt.token).multi_rewrite(["0|b"], [None])
    with open_reader(url, "s") as reader, pytest.raises(errors.StoreLostError, match="'b'"):
        list(reader.window(10))


def test_a_lost_part_of_the_index_is_an_error_for_readers_and_where_a_window_fires(url):
    state = Tens(url, "s")
    state.batch({5: {f"k{at:03}": 1 for at in range(450)}}, watermark=15)
    (chunk, *_) = [key for key in keys_of(state.store, index=True) if key.count("|") == 3]
    attempt = state.begin()
    state.store.writer(attempt.token).multi_rewrite([chunk], [None])
    with open_reader(url, "s") as reader, pytest.raises(errors.StoreLostError, match="index of a pane"):
        list(reader.window(10))
    fired = FiredTask(opaque(url, "s"), state.record, range(10, 11, 10))
    panes = pa.RecordBatch.from_pydict({"pane": [0], "partition": [0]})
    with pytest.raises(errors.StoreLostError, match="index of a pane"):
        list(fired.pages(iter([panes])))


def test_windows_that_a_later_attempt_writes_are_passed_on_by_nobody(url):
    """A correction writes records of windows whose batch counts while its driver reads them."""
    state = Tens(url, "s")
    state.batch({5: {"a": 1}}, watermark=15)
    fired = FiredTask(opaque(url, "s"), state.record, range(10, 11, 10))
    state.write(state.begin(), {0: {"a": 2}})
    panes = pa.RecordBatch.from_pydict(
        {"pane": [0] * state.record.windows.width, "partition": [*range(state.record.windows.width)]}
    )
    with pytest.raises(errors.FencedError, match="an operator has taken over"):
        list(fired.pages(iter([panes])))


def test_a_vacuum_rewrites_the_index_by_its_own_codec(url):
    """Else an orphaned head would count, once its txid is forgotten."""
    state = Tens(url, "s")
    state.batch({5: {"a": 1}}, watermark=5)
    state.write(state.begin(), {0: {"orphan": 1}, 30: {"far": 1}})
    state.write(state.begin(), {0: {"other": 1}}, partition=7)
    state.batch({6: {"b": 2}}, watermark=20)
    before = keys_of(state.store, index=True)
    vacuum(url, "s")
    with open_reader(url, "s") as reader:
        assert reader.ledger().dead == ()
        assert sorted(reader.window(10)) == [(("a",), {"n": 1}), (("b",), {"n": 2})]
    assert keys_of(state.store, index=True) < before
    assert keys_of(state.store, index=False) == {"0|a", "0|b"}
    state.ledgers, _ = state.ledgers.open_and_begin([state.store], [state.opening], state.next, ["refuse"])


def test_a_vacuum_drops_what_a_late_write_left_in_a_pane_that_is_gone(url):
    state = Tens(url, "s", retention=0)
    state.batch({5: {"a": 1}}, watermark=25)
    attempt = state.begin()
    purge(state, attempt)
    state.write(attempt, {0: {"late": 1}})
    state.commit(attempt, purged=[0], watermark=25)
    assert state.record.windows is not None
    assert state.record.windows.purged == 20
    vacuum(url, "s")
    assert keys_of(state.store, index=False) == set()


def test_what_else_walks_records_leaves_the_index_alone(url):
    state = Tens(url, "s")
    state.batch({5: {"a": 1}, 12: {"b": 1}}, watermark=12)
    assert [finding for finding in examine(url, "s") if finding.severity == "error"] == []
    assert sum(drop(url, "s", force=True).records for _ in range(1)) >= 2
    assert list(record_pages(resolve(url).open("s"), 10, index=True)) == []


def test_a_lost_ledger_of_windows_cannot_be_made_again(url):
    Tens(url, "s").batch({5: {"a": 1}}, watermark=5)
    with sqlite3.connect(url.removeprefix("sqlite:///")) as file:
        file.execute("DELETE FROM mapstate_ledgers")
    with pytest.raises(errors.UsageError, match="has windows"):
        adopt(
            url,
            "s",
            type="opaque",
            keys=(KeyField("window_start", "bigint"), KeyField("k", "string")),
            fields=(Field("n", "Count", "bigint"),),
        )


def test_a_state_keeps_its_windows(url):
    Tens(url, "s").batch({5: {"a": 1}}, watermark=5)
    shown = r"\(length 10, slide 10, startTime 0\), the job asks for \(length 10, slide 20, startTime 0\)"
    with pytest.raises(errors.StateSchemaError, match=shown):
        Tens(url, "s", slide=20).begin()
    again = Tens(url, "s", retention=50)
    again.next = 1
    again.begin()
    assert again.record.windows is not None
    assert again.record.windows.definition.retention == 50
    assert again.record.windows.purged == -50  # the last end of a window at the watermark less the retention


def test_index_keys_end_with_the_head(url):
    state = Tens(url, "s")
    state.batch({5: {f"user-{at}": 1 for at in range(450)}}, watermark=5)
    with open_reader(url, "s") as reader:
        assert len(dict(reader.window(10))) == 450
    codec_reads = reader._reads
    assert codec_reads is not None
    found = keys_of(state.store, index=True)
    (part,) = slices(lambda keys: [[2, "x"] if "\\P|0|0" in keys else None for _ in keys], ["0"], 1)
    assert index_keys(part)[-1] == "\\P|0|0"
    assert set(index_keys(part)) == found


def test_windows_of_timestamps_are_shown_in_seconds(url):
    hour = 3_600_000_000
    Windowed(url, kind="timestamp", length=hour, slide=hour).batch(Row(5, "ann", 1))
    with pytest.raises(errors.StateSchemaError, match=r"length 3600 s, .* \(sessions, gap 0.000001 s\)"):
        Windowed(url, kind="timestamp", length=1, slide=1, sessions=True).attempt()


def test_windows_that_a_later_batch_has_purged_are_passed_on_by_nobody(url):
    """The driver of the batch reads late: of its pane there is no record left, and no index that would name one."""
    job = Windowed(url)
    job.batch(Row(5, "ann", 1))
    job.batch(Row(15, "ann", 2))
    late = job.record
    read = FiredTask(opaque(url, "s"), late, range(10, 11))
    places = [pa.RecordBatch.from_pydict({"pane": [0], "partition": [at]}) for at in range(late.windows.width)]
    assert sum(batch.num_rows for batch in read(iter(places))) == 1
    job.batch(Row(25, "ann", 4))
    assert not any(key.startswith("0|") for key in keys_of(job.store, index=False))
    with pytest.raises(errors.FencedError, match="a later batch has begun"):
        list(read(iter(places)))
