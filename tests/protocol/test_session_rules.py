"""The rules of sessions, held against brute force."""

from __future__ import annotations

from itertools import pairwise

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
        if found and time - found[-1][-1] < gap:
            found[-1].append(time)
        else:
            found.append([time])
    return found


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
        for session in sessions_of(pieces_of(rows, gap).values(), gap)
    ]
    assert found == brute_force(rows, gap)
    assert all(later[0] - earlier[-1] >= gap for earlier, later in pairwise(found))


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
    record = WindowsRecord(definition=WindowDefinition(length=gap, slide=gap, sessions=True), purged=purged)
    record = record.committed(PaneChange(set(pieces_of(rows, gap))))
    found = last_panes(record, WindowCommit(before=before, watermark=before + moved))
    fired = [session for session in brute_force(rows, gap) if max(before, purged) < session[-1] + gap <= before + moved]
    assert {Panes(gap, gap).pane(session[-1]) for session in fired} <= set(found)
    assert not found or max(before, purged) < before + moved


@given(gaps, times, st.integers(-60, 60), st.integers(0, 20))
def test_what_is_joined_into_the_settled_pane_is_all_that_readers_need(gap, rows, mark, retention):
    definition = WindowDefinition(length=gap, slide=gap, sessions=True, retention=retention)
    record = WindowsRecord(definition=definition).committed(PaneChange(set(pieces_of(rows, gap))))
    last = WindowCommit(watermark=mark)
    record = record.begun(last)
    pane = pane_to_settle(record, last)
    assert pane is not None
    assert pane + gap <= mark  # so no row that is not late goes into it
    pieces = pieces_of(rows, gap)
    for session in sessions_of(pieces.values(), gap):
        own = [at for at, piece in pieces.items() if piece in session]
        if own[0] < pane in own:
            held = [piece for piece in session if piece.first < pane + gap]
            pieces[pane] = Piece(session[0].first, held[-1].last, [time for piece in held for time in piece.value])
    after = WindowCommit(watermark=mark, settled=pane)
    assert pane_to_settle(record, after) is None
    assert after.without_rows().settled == pane
    gone = set(record.due(after))
    assert gone == {at for at in pieces if at < pane}
    left = sessions_of([piece for at, piece in pieces.items() if at not in gone], gap)
    whole = [[time for piece in session for time in piece.value] for session in left]
    assert [own for own in whole if own[-1] + gap > record.purged] == [
        own for own in brute_force(rows, gap) if own[-1] + gap > record.purged
    ]


def test_nothing_is_settled_before_anything_is_purged():
    record = WindowsRecord(definition=WindowDefinition(length=5, slide=5, sessions=True))
    assert pane_to_settle(record, None) is None
    assert pane_to_settle(record.begun(WindowCommit()), WindowCommit()) is None
    assert WindowCommit().settled == NEVER
