"""Runs the tests of what touches Spark on each PySpark with each Python that mapstate supports: `make matrix`.

    make matrix ARGS="--pyspark 4.0 --python 3.13"     one pair
    make matrix ARGS="--short"                         a minute for each pair

All that it installs is below .venv/matrix: an environment for each Python that .venv is not of, and each PySpark that
.venv does not have, once for all Pythons. A Python that is not on this machine is named at the end, and a failure only
where it was asked for.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MATRIX = ROOT / ".venv" / "matrix"
PYSPARKS = {"3.5": "3.5.7", "4.0": "4.0.5", "4.1": "4.1.4", "4.2": "4.2.1", "4.3": "4.3.0"}
PYTHONS = ("3.11", "3.12", "3.13")
PYTHONS_OF = {"3.5": ("3.11",)}  # it imports distutils, which later ones do not have
WHOLE = [
    f"tests/spark/test_{name}.py"
    for name in (
        "blocks_on_spark",
        "connect",
        "connect_around",
        "dataframes",
        "drpc",
        "following",
        "foreach_batch",
        "keys_beside_spark",
        "new_values",
        "output_modes",
        "partial_aggregation",
        "pipelines",
        "replanned",
        "spark35",
        "spark_faults",
        "spark_offsets",
        "spark_sketches",
        "spark_stream",
        "topology",
        "windows",
    )
]
SHORT = [
    f"tests/spark/test_{test}"
    for test in (
        "connect.py::test_the_ledger_says_which_query_and_which_run_a_batch_is_of[sqlite]",
        "dataframes.py::test_a_frame_has_the_columns_types_and_values_of_the_state[sqlite]",
        "replanned.py::test_a_checkpoint_that_is_one_batch_older_loses_no_row[sqlite]",
        "spark_faults.py::test_a_worker_killed_in_mid_write_on_local_is_begun_anew[sqlite]",
        "spark_stream.py::test_every_key_is_right_after_several_batches[sqlite-opaque]",
        "windows.py::test_a_window_of_timestamps[sqlite]",
    )
]
SHORTEST = SHORT[-2:]
QUIET = [  # PySpark 4.0 leaves sockets to the garbage collector
    "-W",
    "ignore::ResourceWarning",
    "-W",
    "ignore::pytest.PytestUnraisableExceptionWarning",
]
PIP = ["-m", "pip", "--disable-pip-version-check", "--no-input", "install", "--quiet"]


def environment_of(python: str) -> Path | None:
    """The virtual environment of a Python, made if need be; None where the machine has no such Python."""
    if python == version_of(Path(sys.executable)):
        return ROOT / ".venv"
    place = MATRIX / f"python-{python}"
    ready = place / "ready"
    if not ready.exists():
        found = shutil.which(f"python{python}")
        if found is None or version_of(Path(found)) != python:
            return None
        print(f"matrix: making an environment of Python {python}", flush=True)
        subprocess.run([found, "-m", "venv", "--clear", place], check=True)
        subprocess.run(
            [place / "bin" / "python", *PIP, "-c", "constraints.txt", "-e", ".[all,dev]"], cwd=ROOT, check=True
        )
        ready.touch()
    return place


def version_of(python: Path) -> str:
    """Such as 3.12; empty for what does not run."""
    said = subprocess.run(
        [python, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"], capture_output=True, text=True, check=False
    )
    return said.stdout.strip()


def pyspark_of(version: str) -> Path | None:
    """A directory with this PySpark, fetched if need be; None for the one that environments have."""
    release = PYSPARKS[version]
    if f"pyspark=={release}\n" in (ROOT / "constraints.txt").read_text():
        return None
    place = MATRIX / f"pyspark-{release}"
    ready = place / "ready"
    if not ready.exists():
        print(f"matrix: fetching PySpark {release}", flush=True)
        shutil.rmtree(place, ignore_errors=True)
        subprocess.run([sys.executable, *PIP, "--no-compile", "--target", place, f"pyspark=={release}"], check=True)
        ready.touch()
    return place


def run(pyspark: str, python: str, tests: list[str]) -> str:
    """Runs the tests on one pair, and says how they ended."""
    if python not in PYTHONS_OF.get(pyspark, PYTHONS):
        return f"not run: PySpark {pyspark} takes Python {', '.join(PYTHONS_OF[pyspark])}"
    venv = environment_of(python)
    if venv is None:
        return f"not run: no python{python} here"
    servers = ROOT / ".venv" / "bin"  # which `make` has put there
    environment = os.environ | {"MAPSTATE_VENV": str(venv), "PATH": f"{os.environ['PATH']}:{servers}"}
    place = pyspark_of(pyspark)
    if place is not None:
        environment["MAPSTATE_PYSPARK"] = str(place)
    found = f"import pyspark, sys; assert pyspark.__version__ == {PYSPARKS[pyspark]!r}, pyspark.__version__"
    command: list[str | Path] = [ROOT / "scripts" / "run", "python"]
    subprocess.run([*command, "-c", found], env=environment, cwd=ROOT, check=True)
    # Of the short set each test is named, also one that otherwise runs in `make chaos` only.
    # Neither set has the quick settings of `make test`.
    how = ["-n", "2", "--dist", "loadfile", "--chaos", "none"] if tests is WHOLE else ["--chaos", "full"]
    pytest = ["-m", "pytest", "-q", "-p", "no:cacheprovider", *how, *QUIET, *tests]
    done = subprocess.run([*command, *pytest], env=environment, cwd=ROOT, check=False)
    return "passed" if done.returncode == 0 else f"failed: exit code {done.returncode}"


def main() -> int:
    """Run all pairs that were asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pyspark", choices=PYSPARKS, action="append", help="this one only; may be given again")
    parser.add_argument("--oldest", action="store_true", help="the oldest one that runs on the Python of .venv only")
    parser.add_argument("--python", choices=PYTHONS, action="append", help="this one only; may be given again")
    parser.add_argument("--short", action="store_true", help="a few tests of each pair")
    parser.add_argument("--shortest", action="store_true", help="two tests, as in every run of the tests")
    parser.add_argument("--fetch", action="store_true", help="only fetch the PySparks")
    asked = parser.parse_args()
    if asked.oldest:
        own = version_of(Path(sys.executable))
        asked.pyspark = [next(one for one in PYSPARKS if own in PYTHONS_OF.get(one, PYTHONS))]
    results = {}
    for pyspark in asked.pyspark or PYSPARKS:
        for python in asked.python or PYTHONS_OF.get(pyspark, PYTHONS):
            if asked.fetch:
                pyspark_of(pyspark)
                continue
            results[pyspark, python] = run(
                pyspark, python, SHORTEST if asked.shortest else SHORT if asked.short else WHOLE
            )
            print(f"matrix: PySpark {PYSPARKS[pyspark]}, Python {python}: {results[pyspark, python]}", flush=True)
    print(*(f"PySpark {PYSPARKS[one]:8} Python {other:6} {how}" for (one, other), how in results.items()), sep="\n")
    return any(how.startswith("failed") or (asked.python and how != "passed") for how in results.values())


if __name__ == "__main__":
    sys.exit(main())
