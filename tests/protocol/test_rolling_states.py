"""A state with rolling windows from one driver to the next: restarts with other windows, resets, rollbacks."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path
from typing import Any

import msgspec
import pytest
from every_store import AEROSPIKE, FULL, REDIS, url_of
from openings import opening
from rolled import WINDOWS, Rolled, Row, suffix

from mapstate import LIFETIME, Count, Max, RollingWindows, open_reader
from mapstate.errors import (
    ConfigurationError,
    CorruptLedgerError,
    StateOwnershipError,
    StateSchemaError,
    WindowGoneError,
)
from mapstate.protocol.ledger import Ledger, take_back
from mapstate.protocol.ledger_record import FORMAT_WITH_ROLLING, Commit, LedgerRecord, encode_ledger
from mapstate.protocol.opening import open_ledger, what_remains
from mapstate.protocol.rolling import RollingRecord, RollingWindow
from mapstate.protocol.stored_ledger import decode_ledger, ledger_bytes, read_ledger
from mapstate.protocol.windows import NEVER, WindowCommit, WindowDefinition


@pytest.fixture(params=["memory", "sqlite", REDIS, FULL[-1], AEROSPIKE])
def job(request: Any, tmp_path: Path) -> Rolled:
    """Five batches; "idle" and "old" have rows in the first one only."""
    return made(url_of(request, tmp_path))


def made(url: str) -> Rolled:
    job = Rolled(url, WINDOWS, lag=4)
    job.batch(*(Row(at, user, at) for at in range(0, 60, 3) for user in ("ann", "idle")), Row(-500, "old", 9))
    for start in (60, 90, 120):
        job.batch(*(Row(at, "ann", at) for at in range(start, start + 30, 4)), Row(start - 50, "bob", start))
    job.batch(Row(151, "ann", 1))
    return job


def check(job: Rolled, *, until: int = 40) -> None:
    """Every readable time, of every key."""
    with open_reader(job.backend, "s") as reader:
        kept = reader.ledger().rolling
        assert kept is not None
        first = kept.definition.time(kept.horizon)
        for user in ("ann", "bob", "idle", "old"):
            assert reader.get(user) == job.right(user)
            assert reader.get(user, at="watermark") == job.right(user, "watermark")
            for at in range(first, job.newest + until):
                assert reader.get(user, at=at) == job.right(user, at), (user, at)
        with pytest.raises(WindowGoneError):
            reader.get("ann", at=first - 1)


def test_every_time_from_the_horizon_on_can_be_read(job):
    check(job)
    assert job.record.rolling.horizon == job.record.previous.windows.watermark


def test_a_window_less_is_taken_at_once(job):
    less = job.restarted([(40, 5), LIFETIME], lag=4)
    less.batch()
    assert less.record.rolling.definition.unit == 1  # as it was
    check(less)
    less.batch(Row(160, "ann", 3), Row(20, "bob", 4), Row(170, "idle", 5))
    check(less)
    again = less.restarted([(40, 5), LIFETIME], lag=4)
    again.batch(Row(200, "ann", 3))
    check(again)


LEFT = [left for count in range(1, len(WINDOWS)) for left in combinations(WINDOWS, count) if left != (LIFETIME,)]


@pytest.mark.parametrize("left", LEFT, ids=str)
def test_whichever_windows_are_left_they_are_right_and_those_that_are_gone_do_not_come_back(tmp_path, left):
    """At once, for keys that are not written, too; and the state's unit stays, though theirs may be coarser."""
    job = made(f"memory://{tmp_path.name}")
    less = job.restarted(left, lag=4)
    less.attempt()
    check(less)
    less.batch(Row(160, "ann", 3), Row(20, "bob", 4), Row(150, "idle", 5))
    less.batch(Row(163, "ann", 3))  # its begin folds by the watermark of the batch before
    less.batch(Row(164, "ann", 3), Row(164, "bob", 2), Row(130, "bob", 2))
    assert less.record.rolling.definition.unit == 1
    check(less)
    for more in [one for one in WINDOWS if one not in left]:
        with pytest.raises(StateSchemaError, match=f"does not keep where {suffix(more)} begins"):
            less.restarted([*left, more], lag=4).begin()
    check(less)


def test_windows_that_are_left_have_to_be_windows_of_one_state(tmp_path):
    """Else the declaration is refused, which comes before anything is opened."""
    windows = [(10, 1), (40, 4), (60, 6), LIFETIME]
    job = Rolled(f"memory://{tmp_path.name}", windows)
    job.batch(Row(3, "ann"), Row(60, "bob"))
    before = job.store.load()
    with pytest.raises(ConfigurationError, match="'60' is no multiple of 4, the finest one.*a window by a finer one"):
        job.restarted([(40, 4), (60, 6), LIFETIME])
    with pytest.raises(ConfigurationError, match="at least one with a length"):
        job.restarted([LIFETIME])
    assert job.store.load() == before
    less = job.restarted([(10, 1), (60, 6)])
    less.batch(Row(61, "ann"))
    check(less)


def test_without_a_lifetime_what_is_older_than_all_windows_goes(job):
    less = job.restarted([(10, 1), (40, 5)], lag=4)
    less.batch(Row(155, "ann", 3), Row(0, "ann", 7), Row(0, "new", 7))
    assert less.late == [Row(0, "ann", 7), Row(0, "new", 7)]
    check(less)
    with open_reader(job.backend, "s") as reader:
        assert reader.get("new") is None
        assert reader.get("old")["rows_40"] == 0
    with pytest.raises(StateSchemaError, match="a lifetime cannot"):
        less.restarted([(10, 1), (40, 5), LIFETIME], lag=4).begin()


@pytest.mark.parametrize("more", [(20, 5), (40, 10), (15, 15), (120, 40), (9, 1)])
def test_a_window_more_that_the_tiles_can_serve_is_there_at_once_for_idle_keys_too(job, more):
    windows = [*(one for one in WINDOWS if one == LIFETIME or one[0] != more[0]), more]
    asked = job.restarted(windows, lag=4)
    if not job.record.rolling.definition.has_cuts_of(RollingWindow("m", *more), job.record.rolling.horizon):
        with pytest.raises(StateSchemaError, match=f"does not keep where {more[0]} begins"):
            asked.begin()
        assert more == (120, 40)  # it may begin before each cut that is kept
        return
    asked.attempt()
    check(asked)
    asked.batch(Row(155, "ann", 3), Row(100, "idle", 7))
    check(asked)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ((130, 20), "130 begins"),
        ((39, 1), "39 begins"),
        ((100, 5), "100 begins"),
    ],
)
def test_a_window_more_whose_cuts_are_gone_is_refused(job, more, said):
    before = job.store.load()
    with pytest.raises(StateSchemaError, match=f"{said}.*features#changes-at-a-restart") as caught:
        job.restarted([*WINDOWS, more], lag=4).begin()
    assert "A window can be added whose resolution is a multiple of 1 and" in str(caught.value)
    assert job.store.load() == before
    job.batch(Row(160, "ann"))
    check(job)


def test_before_the_first_watermark_every_window_can_be_added(tmp_path):
    job = Rolled(f"memory://{tmp_path.name}", [(10, 1)])
    job.batch(*(Row(at, "ann", at) for at in range(-90, 30)))
    more = job.restarted([(10, 1), (100, 25), LIFETIME])
    more.batch(Row(31, "ann"))
    check(more)


@pytest.mark.parametrize(
    ("windows", "options"),
    [([(39, 3), LIFETIME], {}), (WINDOWS, {"startTime": 2}), (WINDOWS, {"kind": "timestamp"})],
)
def test_the_unit_the_start_and_the_type_of_times_stay(job, windows, options):
    with pytest.raises(StateSchemaError, match="its ledger has the rolling windows .* the job asks for"):
        job.restarted(windows, **options).begin()
    check(job)


def test_a_finer_unit_is_refused(tmp_path):
    job = Rolled(f"memory://{tmp_path.name}", [(40, 5)])
    job.batch(Row(1, "ann"))
    job.batch(Row(50, "ann"))
    with pytest.raises(StateSchemaError, match="does not keep where 10 begins"):
        job.restarted([(40, 5), (10, 1)]).begin()


def test_a_longer_retention_grows_with_the_watermark_and_a_shorter_one_is_taken_at_once(job):
    horizon = job.record.rolling.horizon
    assert horizon == job.record.previous.windows.watermark == 144
    longer = job.restarted(lag=4, retention=30)
    longer.batch(Row(160, "ann"))
    assert longer.record.rolling.horizon == horizon
    check(longer)
    longer.batch(Row(200, "ann"))
    longer.batch(Row(201, "ann"), Row(170, "idle"))
    assert longer.record.rolling.horizon == 200 - 4 - 30
    check(longer)
    shorter = longer.restarted(lag=4)
    shorter.batch(Row(202, "ann"))
    assert shorter.record.rolling.horizon == 201 - 4
    check(shorter)


def test_lag_is_taken_at_once_and_the_watermark_never_moves_back(job):
    mark = job.mark
    more = job.restarted(lag=40)
    more.batch(Row(152, "ann"))
    assert more.record.last_windows().watermark == mark
    less = more.restarted(lag=0)
    less.batch(Row(153, "ann"))
    assert less.record.last_windows().watermark == 153
    check(less)


def test_a_field_more_is_null_before(tmp_path):
    job = Rolled(f"memory://{tmp_path.name}", [(10, 1), LIFETIME], aggregates={"rows": Count()})
    job.batch(Row(1, "ann", 5), Row(2, "idle", 4))
    job.batch(Row(20, "ann", 7))
    more = job.restarted(aggregates={"rows": Count(), "most": Max("n")})
    more.batch(Row(21, "ann", 3))
    with open_reader(job.backend, "s") as reader:
        assert reader.get("ann") == {"rows_10": 2, "rows_lifetime": 3, "most_10": 3, "most_lifetime": 3}
        assert reader.get("idle") == {"rows_10": 0, "rows_lifetime": 1, "most_10": None, "most_lifetime": None}


# Who owns it, and what is taken back


def test_another_query_adopts_the_horizon_with_the_state(job):
    horizon = job.record.rolling.horizon
    with pytest.raises(StateOwnershipError):
        job.restarted(owner="other", lag=4).begin()
    other = job.restarted(owner="other", on_new_owner="adopt_unchecked", lag=4)
    other.begin()
    assert other.record.rolling.horizon == job.record.last_windows().watermark >= horizon
    check(other)
    other.batch(Row(160, "ann"), Row(-900, "bob", 2))
    check(other)


def test_a_reset_empties_the_windows_and_their_horizon(job):
    other = job.restarted(owner="other", on_new_owner="reset", lag=4)
    other.committed = []
    other.begin()
    assert other.record.rolling == RollingRecord(definition=job.opening.rolling)
    with open_reader(job.backend, "s") as reader:
        assert reader.get("ann") is None
        assert list(reader.scan()) == []
    other.batch(Row(-500, "ann", 2), Row(-490, "bob", 1))
    with open_reader(job.backend, "s") as reader:
        assert reader.get("ann") == other.right("ann")
        assert reader.get("idle") is None


@pytest.mark.parametrize(
    ("windows", "options"),
    [
        (((7, 1), (90, 9)), {"startTime": 3}),
        ((*WINDOWS, (3000, 5)), {}),
        (((40, 20), LIFETIME), {"kind": "timestamp"}),
    ],
)
def test_a_reset_takes_any_windows_and_no_one_else_does(job, windows, options):
    for on_new_owner in ("refuse", "adopt_unchecked"):
        with pytest.raises(StateSchemaError):
            job.restarted(windows, owner="other", on_new_owner=on_new_owner, **options).begin()
    with pytest.raises(StateSchemaError):
        job.restarted(windows, on_new_owner="reset", **options).begin()  # its own query
    other = job.restarted(windows, owner="other", on_new_owner="reset", **options)
    other.committed, other.unit = [], min(window[1] for window in windows if window != LIFETIME)
    other.begin()
    with open_reader(job.backend, "s") as reader:
        assert list(reader.scan()) == []
    for start in (0, 200, 400):
        other.batch(*(Row(at, "ann", at) for at in range(start, start + 200, 7)), Row(start - 50, "bob", start))
    with open_reader(job.backend, "s") as reader:
        assert reader.get("ann", at="watermark") == other.right("ann", "watermark")
        for user in ("ann", "bob"):
            for at in range(600, 700, 3):
                assert reader.get(user, at=other.time(at)) == other.right(user, at)
        assert reader.get("idle") is None


def test_a_rollback_takes_back_what_was_folded_too(job):
    before = list(job.rows)
    job.batch(Row(260, "ann", 3), Row(150, "ann", 9), Row(260, "idle", 8), Row(20, "old", 1))
    check(job)
    job.roll_back()
    assert job.rows == before
    check(job)
    job.batch(Row(170, "ann", 4), Row(3, "idle", 3))
    check(job)


def test_an_attempt_that_dies_moves_no_horizon_and_leaves_nothing(job):
    job.attempt(Row(5000, "ann", 3), Row(5000, "idle", 3), Row(20, "old", 2), only=["ann", "idle"])
    check(job)
    job.attempt(Row(161, "ann", 3), only=["ann"])  # the replay has other rows, and dies too
    check(job)
    again = job.restarted(lag=4)
    assert again.next == job.next
    again.batch(Row(161, "ann", 3), Row(20, "old", 1))  # and fewer
    check(again)
    again.batch(Row(170, "idle", 3))
    check(again)


def test_a_batch_that_came_in_parts_is_taken_back(job):
    job.batch(Row(180, "ann", 3), Row(180, "old", 3))
    Ledger(job.store, "s").mark_part(job.next - 1)
    job.ledgers.ledgers[0].load()
    assert take_back(job.ledgers, job.next - 1)
    again = job.restarted(lag=4)
    again.committed.pop()
    assert again.next == job.next - 1
    check(again)
    again.batch(Row(181, "ann", 4))
    check(again)


def test_a_batch_that_counts_as_an_empty_one_moves_nothing(job):
    """One whose rows are in quarantine."""
    job.begin()
    record = job.record
    job.ledgers.commit([Commit(batch_id=job.next, txid=record.in_flight.txid, owner="q")], [None])
    job.next += 1
    done = job.record.last_commit.windows
    assert (done.watermark, done.newest, done.taken) == (job.mark, job.newest, None)
    check(job)


# The ledger


def test_an_older_version_refuses_the_ledger(job):
    data = ledger_bytes(job.store, "s")
    stored = msgspec.json.decode(data)
    assert stored["format"] == FORMAT_WITH_ROLLING == 7
    assert decode_ledger(data, "s") == job.record

    class Older(msgspec.Struct):
        """What every version before this one reads first, and knows no more formats of."""

        format: int

    assert msgspec.json.decode(data, type=Older).format not in (1, 2, 3, 4, 5, 6)
    for other in (2, 3, 4, 6, 8):
        with pytest.raises(CorruptLedgerError, match="in format"):
            decode_ledger(msgspec.json.encode(stored | {"format": other}), "s")
    without = {name: value for name, value in stored.items() if name != "rolling"}
    with pytest.raises(CorruptLedgerError, match=r"in format 7 is there, where .* in format"):
        decode_ledger(msgspec.json.encode(without), "s")


def test_a_ledger_from_before_tiles_were_packed_becomes_the_newer_one(job):
    stored = msgspec.json.decode(ledger_bytes(job.store, "s"))
    older = decode_ledger(msgspec.json.encode(stored | {"format": 5}), "s")
    assert older == job.record
    assert msgspec.json.decode(encode_ledger(older))["format"] == 7


@pytest.mark.parametrize(
    "damage",
    [
        {"windows": []},
        {"type": "string"},
        {"unit": 0},
        {"unit": 7},
        {"lag": -1},
        {"retention": -1},
        {"windows": [{"name": "a", "length": 5, "resolution": 0}]},
        {"windows": [{"name": "a", "length": -5, "resolution": 1}]},
        {"windows": [{"name": "a", "length": 5, "resolution": 1}] * 2},
    ],
    ids=str,
)
def test_a_ledger_whose_rolling_windows_are_none_is_corrupt(job, damage):
    stored = msgspec.json.decode(encode_ledger(job.record))
    stored["rolling"]["definition"] |= damage
    with pytest.raises(CorruptLedgerError):
        decode_ledger(msgspec.json.encode(stored), "s")


def test_a_plain_ledger_says_nothing_of_rolling_windows():
    record = open_ledger(None, opening())
    assert b"rolling" not in encode_ledger(record)
    assert record.format != FORMAT_WITH_ROLLING
    commit = WindowCommit()
    assert (commit.taken, commit.newest) == (None, None)


def rolling(*windows, **options):
    given = {"startTime": 0, "lag": 0, "retention": 0, "idle": None} | options
    return opening(rolling=RollingWindows.of(*windows).definition("timestamp", **given))


def test_a_state_gets_rolling_windows_when_it_is_made_and_keeps_them():
    plain, made = open_ledger(None, opening()), open_ledger(None, rolling("1 hour", LIFETIME))
    assert made.rolling.horizon == NEVER
    for ledger, asked, found in (
        (plain, rolling("1 hour"), r"the rolling windows \(none\), the job asks for \(1_hour by 300 s"),
        (made, opening(), r"\(1_hour by 300 s, lifetime, startTime 0 s\), the job asks for \(none\)"),
    ):
        with pytest.raises(StateSchemaError, match=found):
            open_ledger(ledger, asked)
    with pytest.raises(StateSchemaError):
        open_ledger(made, opening(windows=WindowDefinition(length=10, slide=10)))
    assert open_ledger(made, rolling(LIFETIME, "1 hour")).rolling.definition.windows[0].name == "lifetime"


def test_a_driver_says_what_stays_for_a_while(job):
    before = job.record
    longer = open_ledger(before, job.restarted(retention=30).opening)
    assert list(what_remains(before, longer)) == [
        "retention is longer: times that could not be asked for stay so, and it grows with the watermark"
    ]
    assert list(what_remains(longer, open_ledger(longer, job.opening))) == []
    assert list(what_remains(before, before)) == list(what_remains(None, before)) == []


def test_a_ledger_comes_back_as_it_was(job):
    assert decode_ledger(encode_ledger(job.record), "s") == job.record
    assert isinstance(read_ledger(job.store, "s"), LedgerRecord)
