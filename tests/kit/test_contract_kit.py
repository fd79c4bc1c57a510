"""The contract kit is tested: right stores pass it, and each broken one is caught by the test that is there for it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from mapstate.testing.contracts import CAPABILITIES, BackingMapContract, StoreContract, instead_of, needs

TESTS = Path(__file__).resolve().parents[1]

# What fails of a broken store: these tests, and no others.
CAUGHT_BY = {
    "TestRight": set(),
    "TestExpiring": set(),
    "TestSpread": set(),
    "TestRepeatedKeysAnsweredOnce": {
        "test_a_repeated_key_is_answered_at_each_of_its_places",
        "test_a_writer_reads_and_writes_as_its_store_does",
        "test_updates_of_a_repeated_key_apply_in_order",
    },
    "TestEmptyIsAbsent": {"test_an_odd_record_comes_back_unchanged"},
    "TestFailsWithoutKeys": {
        "test_no_keys_are_an_empty_answer_and_nothing_to_put",
        "test_an_attempt_that_is_the_fence_writes_chunk_after_chunk",
        "test_batches_add_up",
    },
    "TestReadsItsOwnCache": {
        "test_two_live_instances_agree",
        "test_what_others_write_is_seen_at_once",
        "test_a_state_that_is_dropped_leaves_nothing_and_no_other_state_is_touched",
        "test_a_vacuum_replaces_and_removes_what_is_there_and_makes_nothing",
    },
    "TestDropsOneKey": {
        "test_a_chunk_of_any_size_is_stored_and_read_whole",
        "test_many_keys_of_a_batch_get_their_own_totals",
        "test_a_state_that_is_dropped_leaves_nothing_and_no_other_state_is_touched",
    },
    "TestFirstRecordOfARepeatedKeyStays": {"test_of_a_repeated_key_the_last_record_stays"},
    "TestTakesTheShorterLength": {"test_a_put_of_unequal_lengths_is_refused_and_writes_nothing"},
    "TestPartialPutWithoutRaising": {
        "test_a_record_at_the_limit_is_stored_and_one_above_it_refuses_the_whole_put",
    },
    "TestCutsLongKeys": {
        "test_a_key_at_the_limit_is_stored_and_one_above_it_refuses_the_whole_put",
        "test_keys_that_look_alike_are_different_keys",
    },
    "TestRaisesAfterAPartialPut": {
        "test_a_record_at_the_limit_is_stored_and_one_above_it_refuses_the_whole_put",
        "test_a_key_at_the_limit_is_stored_and_one_above_it_refuses_the_whole_put",
    },
    "TestSwallowsAFailedPut": {"test_a_store_that_cannot_be_reached_says_so_at_each_call"},
    "TestAnswersNoneWhereItFails": {"test_a_store_that_cannot_be_reached_says_so_at_each_call"},
    "TestTruncatesAtNul": {
        "test_an_odd_record_comes_back_unchanged",
        "test_a_record_of_a_megabyte_comes_back_unchanged",
        "test_a_record_at_the_limit_is_stored_and_one_above_it_refuses_the_whole_put",
    },
    "TestIntToFloat": {"test_values_of_each_type_come_back_equal_and_of_their_type"},
    "TestKeysWithoutCase": {"test_keys_that_look_alike_are_different_keys"},
    "TestSharesStateBetweenNames": {"test_states_do_not_mix"},
    "TestHoldsAClientInTheRecipe": {"test_a_spec_is_the_same_after_it_was_used_and_holds_no_client"},
    "TestRecipeComparesByIdentity": {"test_a_spec_is_equal_after_it_was_sent"},
    "TestShowsItsPassword": {"test_a_spec_shows_no_password"},
    "TestListsTheFirstStateOnly": {"test_the_states_of_a_store_are_listed_each_once_with_its_ledger"},
    "TestListsStatesTwice": {"test_the_states_of_a_store_are_listed_each_once_with_its_ledger"},
    "TestDeclaresWhatItDoesNotHave": {
        "test_it_offers_what_it_declares_and_nothing_else",
        "test_a_reader_gets_ledger_and_records_in_one_call",
    },
    "TestHasWhatItDoesNotDeclare": {
        "test_it_offers_what_it_declares_and_nothing_else",
        "test_a_reader_is_told_that_the_store_cannot_be_scanned",
    },
    "TestIgnoresTheTtl": {
        "test_records_expire",
        "test_records_of_an_attempt_expire_and_its_ledger_does_not",
        "test_each_put_of_a_record_renews_its_ttl",
        "test_without_a_ttl_records_stay",
    },
    "TestLosesTheTtlOfFencedPuts": {"test_records_of_an_attempt_expire_and_its_ledger_does_not"},
    "TestExpiresFromTheFirstWrite": {"test_each_put_of_a_record_renews_its_ttl"},
    "TestSwapsWithoutComparing": {
        "test_a_ledger_is_not_made_twice",
        "test_a_ledger_that_was_never_there_is_not_replaced",
        "test_of_two_drivers_with_one_version_one_changes_the_ledger",
        "test_a_swap_that_loses_moves_no_fence",
        "test_claims_stand_while_the_ledger_stands",
        "test_a_driver_begins_and_commits_and_the_next_one_goes_on",
        "test_of_two_drivers_that_begin_at_once_the_later_one_commits",
        "test_a_driver_that_was_replaced_commits_nothing",
    },
    "TestASwapThatLosesMovesTheFence": {"test_a_swap_that_loses_moves_no_fence"},
    "TestLooksAtTheEpochOnly": {
        "test_an_attempt_that_is_not_the_fence_writes_nothing",
        "test_a_put_with_reads_under_way_is_refused_at_the_latest_when_the_writer_is_flushed",
        "test_an_attempt_of_the_same_number_but_another_name_writes_nothing",
        "test_each_chunk_of_a_writer_is_guarded",
        "test_an_older_attempt_never_replaces_what_a_later_one_wrote",
        "test_of_concurrent_writers_none_writes_once_the_fence_has_moved",
        "test_what_a_fenced_attempt_is_told_reaches_the_driver",
        "test_a_vacuum_replaces_and_removes_what_is_there_and_makes_nothing",
    },
    "TestChecksTheFenceBeforeItWrites": {"test_of_concurrent_writers_none_writes_once_the_fence_has_moved"},
    "TestRewritesWhatIsCompared": {"test_an_attempt_goes_on_under_a_ledger_that_is_compared_alone"},
    "TestIgnoresTheNonce": {"test_an_attempt_of_the_same_number_but_another_name_writes_nothing"},
    "TestOrdersTheTokens": {
        "test_tokens_are_compared_and_not_ordered",
        "test_ledgers_of_several_states_change_together_with_their_fences",
    },
    "TestMovesFencesWithoutComparing": {
        "test_a_fence_moves_from_where_it_is_expected_and_else_stays",
        "test_each_record_is_behind_the_fence_of_its_part",
    },
    "TestOneFenceGuardsAll": {"test_each_record_is_behind_the_fence_of_its_part"},
    "TestDropsClaimsTooEarly": {"test_claims_outlive_the_write_that_begins_the_next_attempt"},
    "TestAhead": set(),
    "TestLosesWhatIsUnderWay": {"test_what_is_put_with_reads_under_way_is_there_when_the_writer_is_flushed"},
    "TestFlushSwallowsWhatItFinds": {
        "test_a_put_with_reads_under_way_is_refused_at_the_latest_when_the_writer_is_flushed"
    },
    "TestClaimsAlwaysGranted": {
        "test_the_first_holder_of_a_claim_keeps_it",
        "test_of_many_that_claim_at_once_one_holds",
        "test_claims_of_two_states_do_not_mix",
        "test_claims_stand_while_the_ledger_stands",
    },
    "TestOneClaimForAllPartitions": {"test_the_first_holder_of_a_claim_keeps_it"},
    "TestScansItsLedgerToo": {
        "test_a_scan_lists_every_key_of_its_state_and_no_other",
        "test_a_ledger_is_no_record_of_its_state",
    },
    "TestScanLosesTheLastPage": {
        "test_a_scan_lists_every_key_of_its_state_and_no_other",
        "test_a_scan_lists_what_is_there_throughout_though_others_write_meanwhile",
        "test_a_reader_scans_what_counts",
        "test_the_ledger_knows_how_many_keys_a_scan_finds",
        "test_records_that_cannot_be_read_are_named_and_end_no_scan",
        "test_a_vacuum_does_its_work_beside_what_it_cannot_read_and_says_so",
        "test_a_reader_goes_on_from_any_cursor_of_a_scan_or_gets_none",
        "test_the_parts_of_a_scan_have_every_key_once_in_any_order",
    },
    "TestScansFrom": set(),
    "TestGoesOnTooFar": {"test_a_reader_goes_on_from_any_cursor_of_a_scan_or_gets_none"},
    "TestTakesAnyCursor": {"test_a_reader_goes_on_from_any_cursor_of_a_scan_or_gets_none"},
    "TestScansParts": set(),
    "TestPartsOverlap": {"test_the_parts_of_a_scan_have_every_key_once_in_any_order"},
    "TestDropsWithoutComparing": {"test_a_drop_ends_where_somebody_else_has_changed_the_ledger"},
    "TestDropLeavesReports": {"test_a_state_that_is_dropped_leaves_nothing_and_no_other_state_is_touched"},
    "TestScanEndsAtWhatIsNoRecord": {
        "test_records_that_cannot_be_read_are_named_and_end_no_scan",
        "test_a_vacuum_does_its_work_beside_what_it_cannot_read_and_says_so",
    },
    "TestAVacuumMakesRecords": {"test_a_vacuum_replaces_and_removes_what_is_there_and_makes_nothing"},
}
# These are so wrong that much fails: this test among it.
CAUGHT_AMONG_OTHERS_BY = {
    "TestWrongOrder": "test_records_come_in_the_order_of_the_keys_that_were_asked_for",
    "TestLeavesOutAbsentKeys": "test_an_absent_key_among_others_keeps_its_place",
    "TestWrongInBothDirections": "test_what_is_put_is_really_stored",
    "TestIgnoresTheFence": "test_an_attempt_that_is_not_the_fence_writes_nothing",
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory, pytestconfig):
    """Of each class in broken_stores.py: its tests, and those that failed.

    All of them with ``--chaos full``. Else those that are there for its defect.
    """
    report = tmp_path_factory.mktemp("broken") / "report.xml"
    asked = [f"broken_stores.py::{store}::{name}" for store, names in CAUGHT_BY.items() for name in sorted(names)]
    asked += [f"broken_stores.py::{store}::{name}" for store, name in CAUGHT_AMONG_OTHERS_BY.items()]
    if pytestconfig.getoption("--chaos") == "full":
        asked = ["broken_stores.py", "--numprocesses=6"]  # most of the time they wait: for another writer, for a ledger
    command = [sys.executable, "-m", "pytest", *asked, "-q", "--tb=no", "-p", "no:cacheprovider"]
    ran = subprocess.run(
        [*command, f"--junitxml={report}"],
        cwd=TESTS / "fixtures",
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert ran.returncode == 1, ran.stdout[-2000:] + ran.stderr[-2000:]  # some have failed
    found: dict[str, tuple[set[str], set[str]]] = {}
    for case in ET.parse(report).iter("testcase"):
        tests, failed = found.setdefault(case.get("classname").rpartition(".")[2], (set(), set()))
        name = case.get("name").partition("[")[0]
        assert case.find("error") is None, f"{name} did not even start"
        assert case.find("skipped") is None, f"{name} was skipped"
        tests.add(name)
        if case.find("failure") is not None:
            failed.add(name)
    return found


def test_each_broken_store_is_known():
    stores = re.findall(r"^class (Test\w+)", (TESTS / "fixtures" / "broken_stores.py").read_text(), re.MULTILINE)
    assert set(stores) == CAUGHT_BY.keys() | CAUGHT_AMONG_OTHERS_BY.keys()
    assert len(stores) > 30


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "store", [name if tests else pytest.param(name, marks=pytest.mark.full) for name, tests in CAUGHT_BY.items()]
)
def test_a_defect_is_caught_by_the_tests_that_are_there_for_it_and_by_no_others(outcomes, store):
    assert outcomes[store][1] == CAUGHT_BY[store]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("store", list(CAUGHT_AMONG_OTHERS_BY))
def test_a_store_that_is_all_wrong_fails_where_it_should(outcomes, store):
    assert CAUGHT_AMONG_OTHERS_BY[store] in outcomes[store][1]


LIMITS = {"max_value_bytes": 10, "max_key_bytes": 10}


def names_of(cls):
    return {name for name in dir(cls) if name.startswith("test_") and callable(getattr(cls, name))}


def test_what_a_store_is_without_is_not_tested_and_the_refusal_is_instead():
    everything = names_of(type("Full", (StoreContract,), LIMITS))
    without_ttl = names_of(type("Less", (StoreContract,), {"without": {"ttl": "none"}} | LIMITS))
    assert everything - without_ttl == {
        "test_records_expire",
        "test_records_of_an_attempt_expire_and_its_ledger_does_not",
        "test_each_put_of_a_record_renews_its_ttl",
        "test_without_a_ttl_records_stay",
    }
    assert without_ttl - everything == {"test_a_ttl_is_refused_when_the_state_is_opened"}


def test_every_capability_has_tests_that_hang_on_it():
    everything = names_of(type("Full", (StoreContract,), LIMITS))
    for name in CAPABILITIES:
        changes = {"without": {name: "none"}} | {limit: size for limit, size in LIMITS.items() if limit != name}
        assert everything - names_of(type("Less", (StoreContract,), changes)), name


def test_what_a_subclass_has_again_is_tested_again():
    less = type("Less", (StoreContract,), {"without": {"ttl": "none"}} | LIMITS)
    again = type("Again", (less,), {"without": {}})
    assert names_of(again) == names_of(type("Full", (StoreContract,), LIMITS))


def test_without_a_fence_there_is_nothing_that_hangs_on_one():
    cls: Any = type("Less", (StoreContract,), {"without": {"guarded_writes": "none"}})
    assert cls.lacking()["fenced_writes"] == "it has no guarded_writes"
    assert "test_without_a_ledger_no_attempt_writes" not in names_of(cls)


def test_a_test_of_the_contract_cannot_be_overridden():
    for instead in (None, lambda self: None, pytest.mark.skip(lambda self: None)):
        if instead is not None:
            with pytest.raises(TypeError, match=r"overrides test_absent_keys_are_none .*without"):
                type("Cheats", (BackingMapContract,), {"test_absent_keys_are_none": instead})


def test_a_capability_that_there_is_not_and_a_missing_reason_are_refused():
    with pytest.raises(TypeError, match="without speed; what there is: conditional_writes"):
        type("Odd", (BackingMapContract,), {"without": {"speed": "slow"}})
    with pytest.raises(TypeError, match="the reason"):
        type("Mute", (BackingMapContract,), {"without": {"ttl": " "}})
    for mark in (needs, instead_of):
        with pytest.raises(TypeError, match="no capability speed"):
            mark("speed")


def test_a_contract_without_fixtures_says_which_it_needs(tmp_path):
    (tmp_path / "test_it.py").write_text(
        "from mapstate.testing.contracts import StoreContract\nclass TestIt(StoreContract): pass\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(tmp_path)]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert "needs a fixture `backend`" in ran.stdout


def test_what_a_store_declares_is_printed(tmp_path):
    (tmp_path / "test_it.py").write_text(
        "import pytest\n"
        "from mapstate.backends.memory import MemoryBackend\n"
        "from mapstate.testing.contracts import BackendContract\n"
        "class TestIt(BackendContract):\n"
        "    without = {'ttl': 'keeps no time'}\n"
        "    @pytest.fixture\n"
        "    def backend(self): return MemoryBackend('printed')\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "absent_keys", str(tmp_path)]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stdout
    printed = ran.stdout.partition("contracts of mapstate")[2]
    assert "test_it.py::TestIt" in printed
    assert "has      conditional_writes, guarded_writes, scan" in printed
    assert "without  ttl: keeps no time" in printed


def test_the_first_party_stores_skip_nothing():
    for path in TESTS.rglob("test_contract_*.py"):
        if path.name != Path(__file__).name:
            text = path.read_text()
            assert "skip" not in text, path.name
            assert "xfail" not in text, path.name


def test_only_the_contracts_import_pytest():
    code = "import sys, mapstate.testing, mapstate.testing.containers; print('pytest' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.stdout == "False\n", ran.stderr
