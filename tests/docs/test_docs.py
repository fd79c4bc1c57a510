"""README and docs are run: each Python block, in order, page by page."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from processes import with_fast_java
from visits_job import at_last

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
NOTES = [ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", ROOT / "examples" / "mapstate-postgresql" / "README.md"]
FOLDERS = ("bench", "compose", "docs", "examples", "fuzz", "model", "scripts", "src", "tests")
OF_PROCESSES = ("tutorial.md", "connect.md", "testing-your-job.md")  # test_tutorial.py and so on
IN_PROCESSES = [ROOT / "docs" / name for name in OF_PROCESSES]
NO_MODULES = {"mapstate.backends": "an entry point group too", "mapstate.claims": "a set in Aerospike"}
NAMED = re.compile(r"# (\w+\.py)\n")
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path) -> list[str]:
    return [code for language, code in BLOCK.findall(page.read_text()) if language == "python"]


def save_named(page: Path, folder: Path) -> list[str]:
    """Save the blocks that begin with the name of their file. Returns the names."""
    named = {found[1]: code for code in blocks(page) if (found := NAMED.match(code))}
    for name, code in named.items():
        (folder / name).write_text(code)
    return list(named)


def test_every_block_says_what_language_it_is():
    for page in PAGES:
        assert all(language for language, _ in BLOCK.findall(page.read_text())), (
            f"{name_of(page)} has a block of no language"
        )


def test_links_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{name_of(page)} links to {target}"


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", BLOCK.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def test_anchors_lead_somewhere():
    linked = [
        (page, (page.parent / target).resolve() if target else page, anchor)
        for page in PAGES + NOTES
        for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#([^)]+)\)", page.read_text())
    ]
    linked += [
        (path, ROOT / target, anchor)
        for folder in ("src", "examples", "bench", "fuzz", "model")
        for path in (ROOT / folder).rglob("*.py")
        for target, anchor in re.findall(r"\b(docs/[\w/-]+\.md)#([\w-]+)", path.read_text())
    ]
    assert len(linked) > 30
    assert [f"{path.name}: {page.name}#{anchor}" for path, page, anchor in linked if anchor not in anchors(page)] == []


@pytest.mark.parametrize("page", PAGES + NOTES, ids=name_of)
def test_every_path_of_a_page_exists(page: Path):
    text = re.sub(r"https?://\S+", "", page.read_text())
    paths = set(re.findall(rf"(?<![\w./{{-])(?:{'|'.join(FOLDERS)})/[\w./-]*[\w/]", text))
    paths = {path for path in paths if not path.startswith("tests/data/states/")}
    assert [path for path in sorted(paths) if not any((base / path).exists() for base in (ROOT, page.parent))] == []


def test_the_results_are_those_of_the_answers(monkeypatch: pytest.MonkeyPatch):
    """The line that names the machine has the versions of whoever made them."""
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    bench = import_module("run")
    assert set(bench.kept_answers()) == set(bench.QUESTIONS)
    made, found = (
        [line for line in text.splitlines() if not re.match(r"\d+ cores, ", line)]
        for text in (bench.results(bench.kept_answers()), bench.RESULTS.read_text())
    )
    assert found == made


def exists(name: str) -> bool:
    """Whether a dotted name is a module, or something in one."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        try:
            found: Any = import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        try:
            for part in parts[end:]:
                found = getattr(found, part)
        except AttributeError:
            return False
        return True
    return False


@pytest.mark.parametrize("page", PAGES + NOTES, ids=name_of)
def test_every_module_of_a_page_exists(page: Path):
    names = set(re.findall(r"`((?:mapstate|model)(?:\.\w+)+)", page.read_text())) - set(NO_MODULES)
    assert [name for name in sorted(names) if not exists(name)] == []


# The public methods of Storm 2's Stream, GroupedStream, TridentState and TridentTopology.
TRIDENT = {
    "Stream": "addSharedMemory aggregate applyAssembly batchGlobal broadcast chainedAgg each filter flatMap "
    "getOutputFields global groupBy identityPartition localOrShuffle map max maxBy min minBy name parallelismHint "
    "partition partitionAggregate partitionBy partitionPersist peek persistentAggregate project setCPULoad "
    "setMemoryLoad shuffle slidingWindow stateQuery toStream tumblingWindow window",
    "GroupedStream": "aggPartition aggregate chainedAgg each getGroupFields getOutputFields name partitionAggregate "
    "persistentAggregate singleEmitPartitioner stateQuery toStream",
    "TridentState": "addSharedMemory newValuesStream parallelismHint setCPULoad setMemoryLoad",
    "TridentTopology": "build join merge multiReduce newDRPCStream newStaticState newStream setMasterCoordResources "
    "setResourceDefaults",
}


def test_the_port_table_names_every_method_and_says_code_only_where_there_is_some():
    page = (ROOT / "docs" / "coming-from-trident.md").read_text()
    sections = dict(re.findall(r"^(##+ [^\n]+)\n(.*?)(?=^##|\Z)", page, re.MULTILINE | re.DOTALL))
    for kind, methods in TRIDENT.items():
        first_cells = re.findall(r"^\| (.*?) \|", sections[f"### {kind}"], re.MULTILINE)
        assert set(methods.split()) <= set(re.findall(r"`(\w+)", " ".join(first_cells))), kind
    anchors = {
        re.sub(r"[^\w -]", "", title.lstrip("# ").lower()).replace(" ", "-"): body for title, body in sections.items()
    }
    found = re.findall(r"\[code\]\(#([^)]+)\)", page)
    assert len(found) > 20
    assert [anchor for anchor in found if "```python" not in anchors.get(anchor, "")] == []


@pytest.mark.spark
@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page) and page not in IN_PROCESSES], ids=name_of)
def test_python_blocks_run(page: Path, spark: Any, tmp_path: Path, capsys: Any, request: Any, monkeypatch: Any):
    # PostgreSQL starts first, because its user cannot enter tmp_path.
    servers = (
        {"postgresql_url": request.getfixturevalue("postgresql_url")} if "postgresql_url" in page.read_text() else {}
    )
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "mapstate-postgresql" / "src"))
    if save_named(page, tmp_path):
        monkeypatch.syspath_prepend(str(tmp_path))

    def run() -> None:
        names: dict[str, Any] = {}
        for code in blocks(ROOT / "README.md"):  # other pages speak of the state that the README makes
            exec(code, names)
        if page.name == "README.md":
            assert "{'visits': 3, 'bytes': 512}" in capsys.readouterr().out
            return
        names = {name: names[name] for name in ("spark", "url", "logs", "checkpoint")} | servers
        if "other_redis_url" in page.read_text():
            start_redis = request.getfixturevalue("start_redis")
            names |= {"redis_url": start_redis().url, "other_redis_url": start_redis().url}
        for code in blocks(page):
            exec(code, names)

    at_last(run)  # a page that follows a state starts Spark's workers


@pytest.mark.slow
def test_the_quickstart_runs_as_pasted_into_python():
    (quickstart,) = blocks(ROOT / "README.md")
    pasted = subprocess.run(
        [sys.executable, "-i", "-q"],
        input=f"{quickstart}\n",
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env=with_fast_java(),
    )
    assert pasted.stdout.splitlines()[-1:] == ["{'visits': 3, 'bytes': 512}"], pasted.stderr
