"""A query that adopts a state starts where the state ends, in each source, or is refused before anything is written."""

from __future__ import annotations

import json
import secrets
from typing import Any

import msgspec
import pytest
from openings import opening

from mapstate.backends.memory import MemoryBackend
from mapstate.errors import IncompleteBatchError, ReplannedBatchError, RollbackError
from mapstate.protocol import ways_back
from mapstate.protocol.following import digest_of_files
from mapstate.protocol.ledger import Ledger, take_back
from mapstate.protocol.ledger_record import AlreadyCommitted, Attempt, BatchPlan, Commit, encode_ledger, now
from mapstate.protocol.ledgers import Ledgers
from mapstate.protocol.stored_ledger import decode_ledger

FILES = {"logOffset": 7, "source": "FileStreamSource[file:/in]", "newest": 17, "paths": ["file:/in/a"]}
KAFKA = {"t": {"0": 10, "1": 20}}
DELTA = {"index": -1, "isStartingVersion": False, "reservoirId": "r", "reservoirVersion": 4, "sourceVersion": 1}
ICEBERG = {"position": 0, "scan_all_files": False, "snapshot_id": 7, "version": 1}
KNOWN = (digest_of_files(FILES),)


def plan(*starts: Any, filters: tuple[str, ...] = ()) -> BatchPlan:
    return BatchPlan(json.dumps(starts), '["end"]', 1, filters=filters)


def ended(store: Any, offsets: str | None, *, batches: int = 1) -> Ledgers:
    """The state ``visits`` of query "q", with batches of which the last one ends at ``offsets``."""
    ledgers, answers = Ledgers.open_and_begin([store], [opening()], 0, ["refuse"])
    for batch_id in range(batches):
        if batch_id:
            answers = ledgers.begin(batch_id)
        attempt = answers[0]
        ledgers.commit([Commit(batch_id=batch_id, txid=attempt.txid, owner="q", at=now(), offsets=offsets, rows=5)])
    return ledgers


def store() -> Any:
    return MemoryBackend(secrets.token_hex(8)).open("visits")


def adopt(store: Any, start: BatchPlan | None, on_gap: Any = "refuse", policy: Any = "adopt") -> Any:
    request = opening(owner="new", on_new_owner=policy)
    return Ledgers.open_and_begin([store], [request], 0, [on_gap], start)[1][0]


@pytest.mark.parametrize(
    ("ends", "start"),
    [
        ([KAFKA], plan(KAFKA)),
        ([KAFKA], plan(KAFKA | {"new topic": {"0": 0}})),
        ([KAFKA], plan({"t": {"0": 10, "1": 20, "2": 0}})),  # a partition that was added
        ([KAFKA], plan(KAFKA, 0)),  # a source that was added
        ([4711], plan(4711)),
        ([None, KAFKA], plan(None, KAFKA)),  # which had nothing yet
        ([FILES], plan(None, filters=KNOWN)),
        ([FILES, KAFKA], plan(None, KAFKA, filters=("0" * 16, *KNOWN))),
        ([DELTA], plan(DELTA)),  # by startingVersion
    ],
)
def test_a_query_that_starts_where_the_state_ends_goes_on(ends, start):
    place = store()
    ended(place, json.dumps(ends))
    assert isinstance(adopt(place, start), Attempt)


ELSEWHERE = [
    ([KAFKA], plan({"t": {"0": 9, "1": 20}}), "starts earlier, so rows would count twice"),
    ([KAFKA], plan({"t": {"0": 9, "1": 21}}), "starts earlier"),
    ([KAFKA], plan({"t": {"0": 10}}), "starts elsewhere"),
    ([KAFKA], plan({"u": {"0": 10, "1": 20}}), "starts elsewhere"),
    ([4711], plan(4712), "starts elsewhere"),  # of such a source nobody knows what is later
    ([KAFKA, KAFKA], plan(KAFKA), "has other sources"),
    ([KAFKA], plan(None), "cannot be compared"),  # Spark does not tell
    ([None], plan(KAFKA), "cannot be compared"),
    (None, plan(KAFKA), "cannot be compared"),  # a batch that was given by hand
    ([KAFKA], None, "cannot be compared"),  # a call by hand, or an offset log that cannot be read
    ([FILES], plan(None), "reads its files without files_not_counted"),
    ([FILES], plan(None, filters=("0" * 16,)), "without files_not_counted"),  # of where it ended before
    ([FILES], plan({"logOffset": 7}, filters=KNOWN), "without files_not_counted"),  # the number of another log
    ([{"logOffset": 7, "source": "s"}], plan(None, filters=KNOWN), "cannot be compared"),  # too many files to name
    ([DELTA], plan(None), "cannot be compared"),  # all of the table
    ([DELTA], plan(DELTA | {"reservoirVersion": 3}), "starts elsewhere"),
    ([DELTA | {"index": 0}], plan(DELTA), "starts elsewhere"),  # in the middle of a version
    ([DELTA], plan(DELTA | {"reservoirId": "another table"}), "starts elsewhere"),
    ([ICEBERG | {"position": 2}], plan(ICEBERG | {"snapshot_id": 8}), "starts elsewhere"),  # maybe the next one
    ([{"logOffset": 7}], plan({"logOffset": 7}), "cannot be compared"),  # two logs of one number: an owner comes back
]


@pytest.mark.parametrize("on_gap", ["refuse", "accept"])
@pytest.mark.parametrize(("ends", "start", "why"), ELSEWHERE)
def test_a_query_that_starts_elsewhere_is_refused_and_nothing_is_written(ends, start, why, on_gap):
    place = store()
    ended(place, None if ends is None else json.dumps(ends))
    before = place.load()
    with pytest.raises(ReplannedBatchError, match=why):
        adopt(place, start, on_gap)
    assert place.load() == before
    assert isinstance(adopt(place, start, policy="adopt_unchecked"), Attempt)


def test_a_partition_that_starts_later_is_a_loss_that_has_to_be_accepted():
    place = store()
    ended(place, json.dumps([KAFKA]))
    later = plan({"t": {"0": 10, "1": 25}})
    with pytest.raises(ReplannedBatchError, match="starts later, so rows would be lost"):
        adopt(place, later)
    assert isinstance(adopt(place, later, "accept"), Attempt)


def test_a_query_that_died_behind_the_adoption_is_compared_again():
    place = store()
    ended(place, json.dumps([KAFKA]))
    assert isinstance(adopt(place, plan(KAFKA)), Attempt)  # and dies
    with pytest.raises(ReplannedBatchError, match="starts earlier"):
        adopt(place, plan({"t": {"0": 0, "1": 0}}), policy="refuse")
    assert isinstance(adopt(place, plan(KAFKA), policy="refuse"), Attempt)


def test_an_owner_that_comes_back_is_compared_too_but_not_for_what_it_committed():
    place = store()
    ended(place, json.dumps([KAFKA]))
    request = opening(owner="new", on_new_owner="adopt")
    ledgers, (attempt,) = Ledgers.open_and_begin([place], [request], 0, ["refuse"], plan(KAFKA))
    end = json.dumps([{"t": {"0": 30, "1": 20}}])
    ledgers.commit([Commit(batch_id=0, txid=attempt.txid, owner="new", at=now(), offsets=end)])
    back = opening(owner="q", on_new_owner="adopt")
    for start, batch_id in ((plan(KAFKA), 1), (None, 1)):
        with pytest.raises(ReplannedBatchError):
            Ledgers.open_and_begin([place], [back], batch_id, ["refuse"], start)
    _, (done,) = Ledgers.open_and_begin([place], [back], 0, ["refuse"], None)
    assert isinstance(done, AlreadyCommitted)
    _, (attempt,) = Ledgers.open_and_begin([place], [back], 1, ["refuse"], plan(json.loads(end)[0]))
    assert isinstance(attempt, Attempt)


# -- a first batch of a Delta table that has lost its rows


def first(version: int, end: dict[str, Any]) -> BatchPlan:
    return BatchPlan(json.dumps([DELTA | {"reservoirVersion": version}, None]), json.dumps([DELTA | end, KAFKA]), 1)


@pytest.mark.parametrize("kind", ["opaque", "transactional", "non-transactional"])
@pytest.mark.parametrize(
    ("version", "end"), [(4, {}), (5, {}), (5, {"index": 3}), (5, {"index": -20, "sourceVersion": 3})]
)
def test_a_first_batch_that_starts_beyond_its_end_is_refused_and_nothing_is_written(kind, version, end):
    place, requests = store(), [opening(type=kind)]
    with pytest.raises(ReplannedBatchError, match=f"up to version 4 .* starts at version {version}: startingVersion"):
        Ledgers.open_and_begin([place], requests, 0, ["refuse"], first(version, end))
    assert place.load() is None
    Ledgers.open_and_begin([place], requests, 0, ["refuse"], first(3, end))  # and dies
    before = place.load()
    with pytest.raises(ReplannedBatchError, match="so the rows of the batch would be lost"):
        Ledgers.open_and_begin([place], requests, 0, ["refuse"], first(version, end))
    assert place.load() == before


@pytest.mark.parametrize("end", [{"index": 3}, {"index": -20, "sourceVersion": 3}, {"reservoirVersion": 5}])
def test_a_first_batch_that_has_rows_of_its_first_version_or_ends_before_it_goes_on(end):
    assert isinstance(Ledgers.open_and_begin([store()], [opening()], 0, ["refuse"], first(4, end))[1][0], Attempt)


def test_a_first_batch_that_counts_already_is_left_alone_whatever_its_start_has_become():
    place = store()
    ledgers, (attempt,) = Ledgers.open_and_begin([place], [opening()], 0, ["refuse"], first(3, {}))
    ledgers.commit([Commit(batch_id=0, txid=attempt.txid, owner="q", at=now(), offsets=first(3, {}).end)])
    _, (done,) = Ledgers.open_and_begin([place], [opening()], 0, ["refuse"], first(7, {}))
    assert isinstance(done, AlreadyCommitted)
    later = BatchPlan(first(7, {}).end, first(7, {"reservoirVersion": 9}).end, 2, 1)
    assert isinstance(Ledgers.open_and_begin([place], [opening()], 1, ["refuse"], later)[1][0], Attempt)


# -- a batch of which a part was committed


def taken_back(kind: Any = "opaque", batches: int = 2) -> tuple[Any, Ledgers, bool]:
    place = store()
    ledgers, (attempt,) = Ledgers.open_and_begin([place], [opening(type=kind)], 0, ["refuse"])
    for batch_id in range(batches):
        if batch_id:
            (attempt,) = ledgers.begin(batch_id)
        ledgers.commit([Commit(batch_id=batch_id, txid=attempt.txid, owner="q", at=now(), rows=5)])
    return place, ledgers, take_back(ledgers, batches - 1)


def test_a_part_is_rolled_back_and_the_batch_is_due_again():
    _, ledgers, is_taken_back = taken_back()
    assert is_taken_back
    (record,) = ledgers.records
    assert (record.last_commit.batch_id, record.owners["q"]) == (0, 1)
    assert isinstance(ledgers.begin(1)[0], Attempt)


@pytest.mark.parametrize("kind", ["transactional", "non-transactional"])
def test_a_part_that_cannot_be_rolled_back_refuses_the_next_start_until_it_is_accepted(kind):
    place, ledgers, is_taken_back = taken_back(kind)
    assert not is_taken_back
    request = opening(type=kind)
    for batch_id in (1, 2):
        with pytest.raises(IncompleteBatchError, match="counts only a part of batch 1, 5 rows"):
            ledgers.begin(batch_id)
        with pytest.raises(IncompleteBatchError):
            Ledgers.open_and_begin([place], [request], batch_id, ["refuse"])
    with pytest.raises(IncompleteBatchError):
        Ledgers.open_and_begin(
            [place], [opening(type=kind, owner="new", on_new_owner="adopt_unchecked")], 0, ["refuse"]
        )
    ledgers, (attempt,) = Ledgers.open_and_begin([place], [request], 2, ["accept"])
    ledgers.commit([Commit(batch_id=2, txid=attempt.txid, owner="q", at=now())])
    assert isinstance(ledgers.begin(3)[0], Attempt)


def test_states_of_one_stream_are_all_taken_back_or_all_marked():
    backend = MemoryBackend(secrets.token_hex(8))
    stores = [backend.open("one"), backend.open("two")]
    requests = [opening(state="one"), opening(state="two", type="transactional")]
    ledgers, attempts = Ledgers.open_and_begin(stores, requests, 0, ["refuse"] * 2)
    ledgers.commit([Commit(batch_id=0, txid=one.txid, owner="q", at=now()) for one in attempts])
    assert not take_back(ledgers, 0)
    assert [record.last_commit.is_part for record in ledgers.records] == [True, True]


def test_a_part_is_marked_where_a_vacuum_began_since_the_ledger_was_read():
    place = store()
    ledgers = ended(place, None)
    Ledger(place, "visits").begin_operator("vacuum")
    assert not take_back(ledgers, 0)
    assert ledgers.records[0].last_commit.is_part
    with pytest.raises(IncompleteBatchError, match="counts only a part of batch 0"):
        Ledgers.open_and_begin([place], [opening()], 1, ["refuse"])


def test_a_transactional_attempt_of_a_part_is_not_begun_again_under_its_txid():
    """It would skip the keys that the part has written."""
    place, request = store(), opening(type="transactional")
    ledgers, (attempt,) = Ledgers.open_and_begin([place], [request], 0, ["refuse"])
    assert not take_back(ledgers, 0)
    (record,) = ledgers.records
    assert record.in_flight.is_part
    assert decode_ledger(encode_ledger(record), "visits") == record
    with pytest.raises(IncompleteBatchError, match=f"a part of batch 0, as txid {attempt.txid}, and would skip"):
        ledgers.begin(0)
    with pytest.raises(IncompleteBatchError):
        Ledgers.open_and_begin([place], [request], 0, ["refuse"])
    _, (again,) = Ledgers.open_and_begin([place], [request], 0, ["accept"])
    assert again.txid == attempt.txid
    assert b"is_part" not in place.load()[0]
    new = opening(type="transactional", owner="new", on_new_owner="reset")
    assert isinstance(Ledgers.open_and_begin([place], [new], 0, ["refuse"])[1][0], Attempt)


def test_an_opaque_attempt_of_a_part_is_begun_anew_and_needs_no_mark():
    ledgers, _ = Ledgers.open_and_begin([store()], [opening()], 0, ["refuse"])
    assert take_back(ledgers, 0)
    assert isinstance(ledgers.begin(0)[0], Attempt)


def test_a_mark_is_read_back_and_a_whole_batch_has_none_in_its_json():
    _, ledgers, _ = taken_back("transactional")
    (record,) = ledgers.records
    assert decode_ledger(encode_ledger(record), "visits") == record
    assert b"is_part" in encode_ledger(record)
    _, ledgers, _ = taken_back()
    assert b"is_part" not in encode_ledger(ledgers.records[0])


def test_nothing_is_taken_back_over_a_later_attempt():
    _, ledgers, _ = taken_back("transactional")
    record = ledgers.records[0]
    opaque = msgspec.structs.replace(record, type="opaque")
    later = msgspec.structs.replace(opaque, next_txid=opaque.next_txid + 1)
    with pytest.raises(RollbackError):
        ways_back.take_back(later, 1, can_roll_back=True)
    assert ways_back.take_back(opaque, 0, can_roll_back=True) is opaque  # another batch
