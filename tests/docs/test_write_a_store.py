"""The store that docs/write-a-store.md begins with, held to the contract: what the page says of it is so."""

from __future__ import annotations

import os
import subprocess
import sys
from xml.etree import ElementTree as ET

import psycopg
import pytest
from test_docs import ROOT, blocks

from mapstate.testing.contracts import CAPABILITIES


@pytest.mark.slow
def test_the_small_store_of_the_page_has_the_one_defect_that_the_page_says(postgresql_url, tmp_path):
    of_page = blocks(ROOT / "docs" / "write-a-store.md")
    store, table, contract = [
        next(code for code in of_page if start in code)
        for start in ("class SmallStore", "CREATE TABLE IF NOT EXISTS small", "class TestSmall")
    ]
    made = "\n".join(line for line in table.splitlines() if line.startswith(("with psycopg", "    db.execute")))
    exec(made, {"psycopg": psycopg, "postgresql_url": postgresql_url})
    url = "import os\n\npostgresql_url = os.environ['MAPSTATE_TEST_POSTGRESQL_URL']"
    (tmp_path / "test_small.py").write_text(f"{url}\n{store}\n{contract}")
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider", "--junitxml=report.xml"]
    environment = os.environ | {"MAPSTATE_TEST_POSTGRESQL_URL": postgresql_url}
    ran = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=280, check=False
    )
    cases = list(ET.parse(tmp_path / "report.xml").iter("testcase"))
    failed = {case.get("name") for case in cases if case.find("failure") is not None or case.find("error") is not None}
    assert failed == {"test_a_store_that_cannot_be_reached_says_so_at_each_call"}, ran.stdout[-3000:]
    assert len(cases) > 50


def test_the_page_has_every_capability():
    page = (ROOT / "docs" / "write-a-store.md").read_text()
    table = [line.split("|")[1].strip(" `") for line in page.splitlines() if line.startswith("| `")]
    assert set(table) == set(CAPABILITIES)
