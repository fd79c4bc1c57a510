"""The rules of sessions, held against brute force."""

from __future__ import annotations

from itertools import pairwise

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from mapstate.protocol.sessions import Piece, last_panes, pane_to_settle, sessions_of
from mapstate.protocol.windows import (
    NEVER,
    PaneChange,
    Panes,
    WindowCommit,
    WindowDefinition,
    WindowsRecord,
)

gaps = st.integers(1, 12)
times = st.lists(st.integers(-60, 60), max_size=12)


def brute_force(rows, gap):
    """The times of each session."""
    found = []
    for time in sorted(rows):
        if found and time - found[-1][-1] <= gap:
            found[-1].append(time)
        else:
            found.append([time])
    return found


def record_of(gap, **changes):
    definition = WindowDefinition(length=gap, slide=gap, sessions=True, **changes)
    return WindowsRecord(definition=definition).emptied()


def pieces_of(rows, gap):
    panes = Panes(gap, gap)
    own = {}
    for time in sorted(rows):
        own.setdefault(panes.pane(time), []).append(time)
    return {pane: Piece(held[0], held[-1], held) for pane, held in sorted(own.items())}


@given(gaps, times)
def test_the_pieces_of_panes_come_to_the_sessions_of_rows(gap, rows):
    found = [
        [time for piece in session for time in piece.value]
        for session in sessions_of(pieces_of(rows, gap).values(), record_of(gap))
    ]
    assert found == brute_force(rows, gap)
    assert all(later[0] - earlier[-1] > gap for earlier, later in pairwise(found))


@given(gaps, times, times, st.integers(-60, 80))
def test_a_row_that_is_not_late_changes_no_session_that_is_final(gap, rows, later, mark):
    definition = WindowDefinition(length=gap, slide=gap, sessions=True)
    taken = [time for time in later if time >= definition.fired_before(mark)]
    final = [session for session in brute_force(rows, gap) if session[-1] + gap <= mark]
    after = [session for session in brute_force([*rows, *taken], gap) if session[-1] + gap <= mark]
    assert after == final
    before, now = pieces_of(rows, gap), pieces_of([*rows, *taken], gap)
    touched = {pane for pane in now if now[pane] != before.get(pane)}
    assert not touched & {Panes(gap, gap).pane(time) for session in final for time in session}


@given(gaps, times, st.integers(-60, 60), st.integers(0, 30), st.integers(-80, 20))
def test_the_panes_of_the_last_rows_of_fired_sessions_are_found(gap, rows, before, moved, purged):
    record = msgspec.structs.replace(record_of(gap), purged=purged)
    record = record.committed(PaneChange(set(pieces_of(rows, gap))))
    found = last_panes(record, WindowCommit(before=before, watermark=before + moved))
    fired = [session for session in brute_force(rows, gap) if max(before, purged) < session[-1] + gap <= before + moved]
    assert {Panes(gap, gap).pane(session[-1]) for session in fired} <= set(found)
    assert not found or max(before, purged) < before + moved


@given(gaps, times, st.integers(-60, 60), st.integers(0, 20))
def test_what_is_joined_into_the_settled_pane_is_all_that_readers_need(gap, rows, mark, retention):
    record = record_of(gap, retention=retention).committed(PaneChange(set(pieces_of(rows, gap))))
    last = WindowCommit(watermark=mark)
    record = record.begun(last)
    pane = pane_to_settle(record, last)
    assert pane is not None
    assert pane + gap <= mark  # so no row that is not late goes into it
    pieces = pieces_of(rows, gap)
    for session in sessions_of(pieces.values(), record):
        own = [at for at, piece in pieces.items() if piece in session]
        if own[0] < pane in own:
            held = [piece for piece in session if piece.first < pane + gap]
            pieces[pane] = Piece(session[0].first, held[-1].last, [time for piece in held for time in piece.value])
    after = WindowCommit(watermark=mark, settled=pane)
    assert pane_to_settle(record, after) is None
    assert after.without_rows().settled == pane
    gone = set(record.due(after))
    assert gone == {at for at in pieces if at < pane}
    left = sessions_of([piece for at, piece in pieces.items() if at not in gone], record)
    whole = [[time for piece in session for time in piece.value] for session in left]
    assert [own for own in whole if own[-1] + gap > record.purged] == [
        own for own in brute_force(rows, gap) if own[-1] + gap > record.purged
    ]


@given(gaps, times, times, st.integers(-60, 80), st.integers(0, 20))
def test_sessions_that_end_behind_the_last_removed_one_are_whole_when_the_watermark_is_put_back(
    gap, rows, later, mark, retention
):
    record = record_of(gap, retention=retention)
    record = record.committed(PaneChange(set(pieces_of(rows, gap)))).begun(WindowCommit(watermark=mark))
    wrong = WindowCommit(watermark=mark)
    pane = pane_to_settle(record, wrong)
    assert pane is not None
    after = msgspec.structs.replace(wrong, settled=pane)
    pieces = pieces_of(rows, gap)
    gone = set(record.due(after))
    back = record.put_back(mark)
    to = max(back.purged, -100)
    commit = back.commit_put_back(after, to, 0)
    over = {at for at in range(-200, 100) if at % gap == 0 and back.is_expired(at, commit)}
    assert gone & set(pieces) <= over
    taken = [time for time in later if time >= back.definition.fired_before(to)]
    assert not over & set(pieces_of(taken, gap))
    right = [own for own in brute_force([*rows, *taken], gap) if own[-1] + gap > back.purged]
    now = {at: piece for at, piece in pieces_of([*rows, *taken], gap).items() if at not in over}
    if pane in pieces:  # what was joined into it
        own = next(own for own in brute_force(rows, gap) if pane <= own[-1] and own[0] < pane + gap)
        joined = [time for time in own if time < pane + gap] + [t for t in taken if pane <= t < pane + gap]
        if pane in now:
            now[pane] = Piece(min(joined), max(joined), sorted(joined))
    found = [[time for piece in session for time in piece.value] for session in sessions_of(now.values(), back)]
    assert [own for own in found if own[-1] + gap > back.purged] == right


def test_sessions_that_an_earlier_mapstate_fired_as_two_stay_two():
    """There rows exactly a gap apart were two sessions, and a row exactly at the watermark was not late."""
    old = WindowsRecord(definition=WindowDefinition(length=10, slide=10, sessions=True), panes=((0, 30),))
    pieces = [Piece(0, 0, "a"), Piece(10, 10, "b"), Piece(20, 20, "c"), Piece(30, 30, "d")]
    assert [len(session) for session in sessions_of(pieces, old)] == [1, 1, 1, 1]
    new = old.begun(WindowCommit(watermark=20))  # "a" and "b" have fired
    assert [len(session) for session in sessions_of(pieces, new)] == [1, 1, 2]
    assert new.definition.fired_before(20) == 21
    later = new.begun(WindowCommit(watermark=40))
    assert sessions_of(pieces, later) == sessions_of(pieces, new)
    assert record_of(10).apart == NEVER


def test_nothing_is_settled_before_anything_is_purged():
    record = record_of(5)
    assert pane_to_settle(record, None) is None
    assert pane_to_settle(record.begun(WindowCommit()), WindowCommit()) is None
    assert WindowCommit().settled == NEVER
