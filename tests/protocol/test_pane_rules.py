"""The arithmetic of panes and the watermark, held against brute force."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from types import SimpleNamespace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mapstate.protocol import windows
from mapstate.protocol.windows import (
    NEVER,
    Input,
    PaneChange,
    Panes,
    WindowCommit,
    WindowDefinition,
    WindowsRecord,
    every_pane,
    fired_panes,
    runs_with,
    runs_without,
    watermark,
)
from mapstate.schema import KeyField

shapes = st.builds(Panes, st.integers(1, 12), st.integers(1, 12), st.integers(-15, 15))
times = st.integers(-60, 60)
marks = st.integers(-40, 40)


def ends_of(panes, time):
    """The ends of the windows that a time is in, one candidate after the other."""
    return [
        end
        for end in range(time + 1, time + panes.length + 1)
        if (end - panes.length - panes.offset) % panes.slide == 0
    ]


def all_panes(panes, low=-90, high=90):
    """The panes between two times, from the windows of each time."""
    found = {panes.pane(time) for time in range(low, high)} - {None}
    return sorted(pane for pane in found if low <= pane < high)


@given(shapes, times)
def test_the_windows_of_a_pane_are_those_of_each_of_its_rows(panes, time):
    pane = panes.pane(time)
    assert (pane is None) == (not ends_of(panes, time))
    if pane is not None:
        assert list(panes.ends(pane)) == ends_of(panes, time)
        assert panes.last_end(pane) == ends_of(panes, time)[-1]
        assert all(panes.pane(inside) == pane for inside in range(pane, time + 1))


@given(shapes, times)
def test_the_last_end_at_a_time_and_the_next_one_are_neighbours(panes, time):
    ends = [end for end in range(time - 30, time + 30) if (end - panes.length - panes.offset) % panes.slide == 0]
    assert panes.floor(time) == max(end for end in ends if end <= time)
    assert panes.next_end(time) == min(end for end in ends if end > time)


@given(shapes, times)
def test_a_window_is_a_whole_number_of_panes(panes, time):
    end = panes.next_end(time)
    inside = {panes.pane(moment) for moment in range(end - panes.length, end)}
    assert panes.panes(end) == sorted(inside)
    following = all_panes(panes, time, time + 40)
    assert [panes.after(pane) for pane in following[:-1]] == following[1:]


@given(shapes, st.sets(times), st.sets(times), times, times)
def test_runs_name_the_panes_that_were_added_and_not_removed(panes, added, removed, since, until):
    here = {pane for pane in map(panes.pane, added) if pane is not None}
    gone = {pane for pane in map(panes.pane, removed) if pane is not None}
    runs = runs_without(panes, runs_with(panes, (), here), gone)
    assert list(every_pane(panes, runs)) == sorted(here - gone)
    assert list(every_pane(panes, runs, since, until)) == sorted(p for p in here - gone if since <= p < until)
    assert all(panes.after(one[1]) < other[0] for one, other in pairwise(runs))
    assert runs == runs_with(panes, (), here - gone)


@given(shapes, st.sets(times), marks, marks, marks)
def test_a_batch_fires_each_window_between_its_watermarks_that_is_not_gone(panes, rows, before, more, purged):
    held = {pane for pane in map(panes.pane, rows) if pane is not None}
    definition = WindowDefinition(length=panes.length, slide=panes.slide, offset=panes.offset)
    record = WindowsRecord(definition=definition, panes=runs_with(panes, (), held), purged=panes.floor(purged))
    after = before + abs(more)
    expected = [
        (pane, ends)
        for pane in sorted(held)
        if (ends := [end for end in ends_of(panes, pane) if before < end <= after and end > record.purged])
    ]
    assert fired_panes(record, WindowCommit(watermark=after, before=before)) == expected


@given(shapes, st.sets(times), marks, st.integers(0, 20))
def test_a_begin_makes_due_the_panes_of_which_no_window_is_kept(panes, rows, mark, retention):
    held = {pane for pane in map(panes.pane, rows) if pane is not None}
    definition = WindowDefinition(length=panes.length, slide=panes.slide, offset=panes.offset, retention=retention)
    record = msgspec.structs.replace(WindowsRecord(definition=definition).emptied(), panes=runs_with(panes, (), held))
    after = record.begun(WindowCommit(watermark=mark))
    due = sorted(pane for pane in held if all(end <= mark - retention for end in ends_of(panes, pane)))
    assert list(after.due()) == due
    assert list(after.committed(PaneChange(purged=due)).due()) == []
    assert after.begun(WindowCommit(watermark=mark - 30)) == after, "what is purged never comes back"
    assert record.begun(None) == record.begun(WindowCommit()) == record


@pytest.mark.parametrize("height", [0, 1, 2])
@given(shapes, st.sets(times), st.lists(marks, min_size=1, max_size=3), st.integers(0, 20), st.booleans())
def test_what_ends_behind_the_last_removed_window_is_whole_and_a_watermark_goes_back_so_far(
    height, panes, rows, moves, retention, is_old
):
    held = {pane for pane in map(panes.pane, rows) if pane is not None}
    definition = WindowDefinition(length=panes.length, slide=panes.slide, offset=panes.offset, retention=retention)
    record = WindowsRecord(definition=definition)  # as an older mapstate wrote it
    gone: set[int] = set()
    with pytest.MonkeyPatch.context() as small:
        small.setattr(windows, "PAGE_SLIDES", 3)
        grid = panes.pages(height)
        pages = runs_with(grid, (), map(grid.pane, held))
        record = msgspec.structs.replace(record if is_old else record.emptied(), height=height, panes=pages)
        before = record.purged
        for mark in moves:
            record = record.begun(WindowCommit(watermark=mark))
            gone |= set(record.due(named=partial(every_pane, panes, runs_with(panes, (), held - gone))))
            record = record.committed(PaneChange(named=(height, runs_with(grid, (), map(grid.pane, held - gone)))))
            put_back = record.put_back(mark)
            assert before <= put_back.purged <= record.purged
            assert not gone & {
                pane for end in range(max(put_back.purged + 1, -99), 99) for pane in held if end in panes.ends(pane)
            }
            assert gone or height or put_back.purged == NEVER


def test_what_was_gone_before_the_ledger_said_what_was_removed_stays_gone():
    old = WindowsRecord(definition=WindowDefinition(length=10, slide=10), purged=40)
    assert old.begun(WindowCommit(watermark=10**9)).put_back(0).purged == 40
    assert old.put_back(0).purged == 40


@given(st.lists(st.tuples(marks, st.integers(0, 40)), min_size=1, max_size=3), marks, st.integers(0, 9))
def test_the_watermark_never_moves_back_and_waits_for_the_slowest_input(known, before, lag):
    inputs = {str(at): Input(latest, came) for at, (latest, came) in enumerate(known)}
    assert watermark(before, inputs, lag, 40) == max(before, min(latest for latest, _ in known) - lag)
    assert watermark(before, inputs | {"silent": Input()}, lag, 40) == before
    idle = watermark(before, inputs, lag, 40, idle=10)
    assert idle == max(before, min(latest + max(0, 30 - came) for latest, came in known) - lag)


def test_an_input_without_rows_keeps_its_time_and_one_with_rows_never_goes_back():
    known = Input(5, 7)
    assert known.noted(None, 9, has_rows=False) == known
    assert known.noted(None, 9, has_rows=True) == Input(5, 9)
    assert known.noted(3, 9, has_rows=True) == Input(5, 9)
    assert known.noted(8, 9, has_rows=True) == Input(8, 9)
    assert Input().noted(None, 9, has_rows=True).latest == NEVER


def test_a_run_of_more_windows_than_anybody_lists_is_named():
    definition = WindowDefinition(length=1, slide=1, retention=20_000_000)
    record = WindowsRecord(definition=definition, panes=((0, 9_999_999),)).committed(PaneChange({10_000_000}, [5], 1))
    assert record.panes == ((0, 4), (6, 10_000_000))
    assert not record.has_flaw([KeyField("window_start", "bigint")], [SimpleNamespace(windows=WindowCommit())])


@pytest.mark.parametrize("change", [{"length": 9}, {"slide": 9}, {"offset": 1}, {"by_clock": True}])
def test_records_of_other_windows_are_not_the_same(change):
    definition = WindowDefinition(length=10, slide=5)
    assert not definition.is_same(msgspec.structs.replace(definition, **change))
    assert definition.is_same(WindowDefinition(length=10, slide=5, lag=3, retention=4, idle=5))
