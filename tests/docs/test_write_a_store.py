"""The stores of docs/write-a-store.md, held to the contract: what the page says of them is so."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

import psycopg
import pytest
from test_docs import ROOT, blocks

from mapstate.testing.contracts import CAPABILITIES

PAGE = ROOT / "docs" / "write-a-store.md"


def run(folder: Path, file: str, *options: str, **environment: str) -> tuple[set[str], set[str], str]:
    """The tests of a file that passed, those that did not, and what pytest printed."""
    command = [sys.executable, "-m", "pytest", file, *options, "-q", "--tb=short", "-p", "no:cacheprovider"]
    ran = subprocess.run(
        [*command, "--junitxml=report.xml"],
        cwd=folder,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    passed, failed = set(), set()
    for case in ET.parse(folder / "report.xml").iter("testcase"):
        (failed if any(case.find(end) is not None for end in ("failure", "error", "skipped")) else passed).add(
            str(case.get("name"))
        )
    return passed, failed, ran.stdout[-3000:]


@pytest.mark.slow
def test_the_small_store_of_the_page_has_the_one_defect_that_the_page_says(postgresql_url, tmp_path, rounds):
    of_page = blocks(PAGE)
    store, table, contract = [
        next(code for code in of_page if start in code)
        for start in ("class SmallStore", "CREATE TABLE IF NOT EXISTS small", "class TestSmall")
    ]
    made = "\n".join(line for line in table.splitlines() if line.startswith(("with psycopg", "    db.execute")))
    exec(made, {"psycopg": psycopg, "postgresql_url": postgresql_url})
    url = "import os\n\npostgresql_url = os.environ['MAPSTATE_TEST_POSTGRESQL_URL']"
    (tmp_path / "test_small.py").write_text(f"{url}\n{store}\n{contract}")
    slow = "test_whatever_crashes_and_comes_again_the_sum_is_that_of_the_batches_that_ended"
    fewer = rounds([f"--deselect=test_small.py::TestSmall::{slow}[{seed}]" for seed in (1, 2, 3)], [])
    passed, failed, printed = run(tmp_path, "test_small.py", *fewer, MAPSTATE_TEST_POSTGRESQL_URL=postgresql_url)
    assert failed == {"test_a_store_that_cannot_be_reached_says_so_at_each_call"}, printed
    assert len(passed) > 50


@pytest.mark.slow
def test_the_store_on_lmdb_of_the_page_passes_the_contract(tmp_path):
    for file in (ROOT / "examples" / "lmdb").glob("*.py"):
        shutil.copy(file, tmp_path)
    passed, failed, printed = run(tmp_path, "test_lmdb_store.py")
    assert failed == set(), printed
    assert passed >= {
        "test_a_fork_after_use_shares_nothing_that_mixes_answers",
        "test_a_spec_that_is_opened_in_a_spawned_process_sees_the_same_state",
        "test_an_attempt_in_another_process_writes_until_it_is_fenced",
        "test_of_concurrent_writers_none_writes_once_the_fence_has_moved",
    }
    assert len(passed) > 100


def test_the_page_has_every_capability():
    table = [line.split("|")[1].strip(" `") for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    assert set(table) == set(CAPABILITIES)
