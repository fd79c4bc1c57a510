"""The control record's rules: each event on each status, and records that no event can have left."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from mapstate.errors import (
    AlreadyAliveError,
    CorruptLedgerError,
    CorruptRecordError,
    FencedError,
    NotAliveError,
    UsageError,
)
from mapstate.protocol import control
from mapstate.protocol.control import ControlRecord, DriverRecord, decode_control, encode_control
from mapstate.protocol.stored_ledger import decode_ledger

AT, LATER = "2026-11-24T10:00:00.000+00:00", "2026-11-24T10:00:30.500+00:00"


def driver(session="a", beat=0):
    return DriverRecord(session=session, host="here", pid=7, started=AT, at=AT, silence=10.0, beat=beat)


RUNNING = driver()


def record(status, running: DriverRecord | None = RUNNING, **fields: Any):
    return ControlRecord(topology="site", status=status, since=AT, revision=5, command=3, driver=running, **fields)


RECORDS = {
    "none": None,
    **{status: record(status) for status in ("ACTIVE", "INACTIVE", "KILLED")},
    **{f"{status} alone": record(status, None) for status in ("ACTIVE", "INACTIVE", "KILLED", "REMOVED")},
}
EVENTS: dict[str, Any] = {
    "submit": lambda one: control.submit(one, "site", driver("b"), ("visits",), active=True, at=LATER),
    "submit inactive": lambda one: control.submit(one, "site", driver("b"), ("visits",), active=False, at=LATER),
    "take over": lambda one: control.submit(one, "site", driver("b"), ("visits",), active=True, at=LATER, dead=RUNNING),
    "activate": lambda one: control.activate(one, "site", LATER),
    "deactivate": lambda one: control.deactivate(one, "site", LATER),
    "rebalance": lambda one: control.rebalance(one, "site", 7),
    "kill": lambda one: control.kill(one, "site", 5.0, LATER),
    "bury": lambda one: control.bury(one, "site", driver("a"), LATER),
    "bury none": lambda one: control.bury(one, "site", None, LATER),
    "bury too late": lambda one: control.bury(one, "site", driver("a", beat=-1), LATER),
    "beat": lambda one: control.beat(one, "site", "a", LATER),
    "obey": lambda one: control.obey(one, "site", "a", 3),
    "remove": lambda one: control.remove(one, "site", "a", LATER),
    "release": lambda one: control.release(one, "site", "a"),
    "beat of another": lambda one: control.beat(one, "site", "b", LATER),
    "remove of another": lambda one: control.remove(one, "site", "b", LATER),
}
ALIVE, NOT, USAGE, FENCED = AlreadyAliveError, NotAliveError, UsageError, FencedError
# the status behind each event, or its error; "alone" is without a driver
TABLE = """
                   none      ACTIVE    INACTIVE  KILLED    ACTIVE a. INACT. a. KILLED a. REMOVED
submit             ACTIVE    ALIVE     ALIVE     ALIVE     ACTIVE    INACTIVE  KILLED    ACTIVE
submit inactive    INACTIVE  ALIVE     ALIVE     ALIVE     ACTIVE    INACTIVE  KILLED    INACTIVE
take over          ACTIVE    ACTIVE    INACTIVE  KILLED    ACTIVE    INACTIVE  KILLED    NOT
activate           NOT       ACTIVE    ACTIVE    USAGE     ACTIVE    ACTIVE    USAGE     NOT
deactivate         NOT       INACTIVE  INACTIVE  USAGE     INACTIVE  INACTIVE  USAGE     NOT
rebalance          NOT       ACTIVE    INACTIVE  USAGE     ACTIVE    INACTIVE  USAGE     NOT
kill               NOT       KILLED    KILLED    KILLED    REMOVED   REMOVED   REMOVED   NOT
bury               NOT       ACTIVE    INACTIVE  REMOVED   ACTIVE    INACTIVE  KILLED    REMOVED
bury none          NOT       ACTIVE    INACTIVE  KILLED    ACTIVE    INACTIVE  REMOVED   REMOVED
bury too late      NOT       ACTIVE    INACTIVE  KILLED    ACTIVE    INACTIVE  KILLED    REMOVED
beat               FENCED    ACTIVE    INACTIVE  KILLED    FENCED    FENCED    FENCED    FENCED
obey               FENCED    ACTIVE    INACTIVE  KILLED    FENCED    FENCED    FENCED    FENCED
remove             FENCED    USAGE     USAGE     REMOVED   FENCED    FENCED    FENCED    REMOVED
release            FENCED    ACTIVE    INACTIVE  KILLED    FENCED    FENCED    FENCED    FENCED
beat of another    FENCED    FENCED    FENCED    FENCED    FENCED    FENCED    FENCED    FENCED
remove of another  FENCED    FENCED    FENCED    FENCED    FENCED    FENCED    FENCED    REMOVED
"""
CASES = [
    (line[:18].strip(), name, expected)
    for line in TABLE.splitlines()[2:]
    for name, expected in zip(RECORDS, line[18:].split(), strict=True)
]


@pytest.mark.parametrize(("event", "before", "expected"), CASES, ids=[f"{one[0]}, {one[1]}" for one in CASES])
def test_each_event_on_each_status(event, before, expected):
    found = RECORDS[before]
    if expected in globals():
        with pytest.raises(globals()[expected]) as caught:
            EVENTS[event](found)
        assert "site" in str(caught.value)
        if expected == "USAGE":
            assert found.status in str(caught.value)
        return
    after = EVENTS[event](found)
    assert after.status == expected
    assert decode_control(encode_control(after), "site") == after
    assert after == found or after.revision > (0 if found is None else found.revision)
    if found is not None and (after.status, after.partitions) != (found.status, found.partitions):
        is_of_driver = event in ("remove", "bury", "bury none", "submit", "submit inactive", "take over")
        assert after.command == found.command + (not is_of_driver)


def test_a_driver_that_is_buried_is_none():
    """The next one need not wait, and the one that was buried is fenced."""
    buried = EVENTS["bury"](record("ACTIVE"))
    assert buried.driver is None
    assert EVENTS["bury too late"](record("ACTIVE")) == record("ACTIVE")
    with pytest.raises(FencedError, match="taken for dead"):
        EVENTS["beat"](buried)


def test_every_event_has_its_line():
    assert {event for event, _, _ in CASES} == set(EVENTS)


def test_a_command_that_changes_nothing_is_no_command():
    """Its number would be that of the command before, which may not be obeyed yet."""
    for found, event in ((record("ACTIVE"), "activate"), (record("INACTIVE"), "deactivate")):
        assert EVENTS[event](found) is found
    again = record("ACTIVE", partitions=7)
    assert EVENTS["rebalance"](again) is again


def test_a_kill_may_wait_anew_and_counts_from_then():
    first = control.kill(record("ACTIVE"), "site", 60, AT)
    second = control.kill(first, "site", 1, LATER)
    assert (second.status, second.wait, second.since, second.command) == ("KILLED", 1, LATER, first.command + 1)
    for wait in (-1, float("nan"), float("inf"), 1e9):
        with pytest.raises(UsageError):
            control.kill(record("ACTIVE"), "site", wait, AT)


def test_only_a_driver_that_is_silent_since_the_same_beat_is_taken_over():
    with pytest.raises(AlreadyAliveError):
        control.submit(record("ACTIVE", driver(beat=1)), "site", driver("b"), (), active=True, at=LATER, dead=RUNNING)
    with pytest.raises(AlreadyAliveError):
        control.submit(record("ACTIVE", driver("c")), "site", driver("b"), (), active=True, at=LATER, dead=RUNNING)


def test_what_was_removed_is_submitted_anew_without_its_past():
    removed = control.remove(record("KILLED", partitions=9), "site", "a", LATER)
    new = control.submit(removed, "site", driver("b"), ("visits",), active=True, at=LATER)
    assert (new.status, new.partitions, new.obeyed) == ("ACTIVE", None, new.command)
    assert new.command >= removed.command
    assert new.revision > removed.revision


@pytest.mark.parametrize(
    "change",
    [
        {"control": 2},
        {"topology": "other"},
        {"status": "DEAD"},
        {"since": "yesterday"},
        {"since": ""},
        {"wait": -1},
        {"partitions": 0},
        {"driver": {"session": "a"}},
        {"driver": {**msgspec.to_builtins(driver()), "silence": 1e300}},
        {"driver": {**msgspec.to_builtins(driver()), "at": "2026-11-24T10:00:00"}},
        {"revision": "5"},
    ],
    ids=str,
)
def test_what_no_event_has_left_is_corrupt(change):
    written = json.dumps(json.loads(encode_control(record("ACTIVE"))) | change).encode()
    with pytest.raises(CorruptRecordError, match="site"):
        decode_control(written, "site")


@pytest.mark.parametrize("data", [b"", b"{}", b"[" * 100_000, b'{"control":1}', b"\xff"], ids=range(5))
def test_other_bytes_are_corrupt(data):
    with pytest.raises(CorruptRecordError):
        decode_control(data, "site")


def test_a_control_record_is_told_from_a_ledger():
    with pytest.raises(CorruptLedgerError, match="mapstate list"):
        decode_ledger(encode_control(record("ACTIVE")), "site.control")
