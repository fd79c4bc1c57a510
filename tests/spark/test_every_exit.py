"""One value looks the same wherever it leaves the library, whatever the time zones of process and session."""

from __future__ import annotations

import datetime as dt
import json
import os
import subprocess
import sys
from collections.abc import Callable
from decimal import Decimal
from functools import cache
from typing import Any

import pyarrow as pa
import pytest
from processes import FIXTURES
from pyarrow import parquet
from spark_fixtures import DATA_SOURCE

pytestmark = [pytest.mark.spark, DATA_SOURCE]

NAN, INF = float("nan"), float("inf")
ROWS = ("some", "low", "high", "odd", "null")


def utc(text: str) -> dt.datetime:
    return dt.datetime.fromisoformat(text).replace(tzinfo=dt.UTC)


def local(text: str) -> dt.datetime:
    return dt.datetime.fromisoformat(text)


# By type: the values of the rows, and how each of them looks in JSON.
EXPECTED: dict[str, tuple[pa.DataType, list[tuple[Any, Any]]]] = {
    "tinyint": (pa.int8(), [(1, 1), (-128, -128), (127, 127), (0, 0)]),
    "smallint": (pa.int16(), [(1, 1), (-(2**15), -(2**15)), (2**15 - 1, 2**15 - 1), (0, 0)]),
    "int": (pa.int32(), [(1, 1), (-(2**31), -(2**31)), (2**31 - 1, 2**31 - 1), (0, 0)]),
    "bigint": (pa.int64(), [(1, 1), (-(2**63), -(2**63)), (2**63 - 1, 2**63 - 1), (0, 0)]),
    "float": (pa.float32(), [(0.5, 0.5), (-INF, "-Infinity"), (INF, "Infinity"), (NAN, "NaN")]),
    "double": (pa.float64(), [(0.1, 0.1), (-INF, "-Infinity"), (INF, "Infinity"), (NAN, "NaN")]),
    "decimal(12,3)": (
        pa.decimal128(12, 3),
        [
            (Decimal("1.500"), "1.500"),
            (Decimal("-999999999.999"), "-999999999.999"),
            (Decimal("999999999.999"), "999999999.999"),
            (Decimal("0.000"), "0.000"),
        ],
    ),
    "string": (pa.string(), [("ü|,\"' \\", "ü|,\"' \\"), ("", ""), ("null", "null"), ("NaN", "NaN")]),
    "boolean": (pa.bool_(), [(True, True), (False, False), (True, True), (False, False)]),
    "date": (
        pa.date32(),
        [
            (dt.date(2026, 1, 2), "2026-01-02"),
            (dt.date(1, 1, 1), "0001-01-01"),
            (dt.date(9999, 12, 31), "9999-12-31"),
            (dt.date(1970, 1, 1), "1970-01-01"),
        ],
    ),
    "timestamp": (
        pa.timestamp("us", "UTC"),
        [
            (utc("2026-01-02T03:04:05.678901"), "2026-01-02T03:04:05.678901Z"),
            (utc("0001-01-01T00:00:00"), "0001-01-01T00:00:00.000000Z"),
            (utc("9999-12-31T23:59:59.999999"), "9999-12-31T23:59:59.999999Z"),
            (utc("2026-11-01T06:30:00"), "2026-11-01T06:30:00.000000Z"),  # the second 01:30 of that night in New York
        ],
    ),
    "timestamp_ntz": (
        pa.timestamp("us"),
        [
            (local("2026-01-02T03:04:05.678901"), "2026-01-02T03:04:05.678901"),
            (local("0001-01-01T00:00:00"), "0001-01-01T00:00:00.000000"),
            (local("9999-12-31T23:59:59.999999"), "9999-12-31T23:59:59.999999"),
            (local("2026-03-08T02:30:00"), "2026-03-08T02:30:00.000000"),  # not there in New York
        ],
    ),
    "binary": (pa.binary(), [(b"\x00\xff", "00ff"), (b"", ""), (b"\xff" * 9, "ff" * 9), (b"text", "74657874")]),
}
ZONES = [
    ("America/New_York", "Asia/Kolkata"),
    *(pytest.param(zones, marks=pytest.mark.full) for zones in (("Asia/Tokyo", "UTC"), ("UTC", "America/St_Johns"))),
]
WINDOW = ["2026-01-02T03:04:05.000000Z", "2026-01-02T03:04:06.000000Z", "2026-01-02T03:04:05.678901Z"]
MARK = "2026-01-02T03:04:07.000000Z"
LISTS = {"times": "timestamp", "locals": "timestamp_ntz", "binaries": "binary"}
COLUMNS = ("new values", "DataFrame", "stateQuery", "to_arrow", "to_pandas", "export Parquet", "DRPC")
TEXTS = {"get": "null", "export CSV": ""}  # and what null is there
OBJECTS = ("GET", "POST", "GET scan", "functions", "get --json", "watch --json", "export JSON")


def expected() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for at, row in enumerate(ROWS):
        shown = {kind: values[at][1] if at < len(values) else None for kind, (_, values) in EXPECTED.items()}
        time = shown["timestamp"]
        inner = {"bytes": "00ff", "sum": "1.500", "x": "Infinity"}
        nested = None if time is None else {"at": time, "days": [time[:10], None], "inner": inner}
        floats = ["NaN", "-Infinity", 0.1]
        found[row] = {
            "row": row,
            "nested": nested,
            "own": {"a": None, "floats": floats, "bytes": "00ff"},
            **shown,
            **{f"k {kind}": part for kind, part in shown.items()},
            **{name: [one for one in [shown[kind]] if one is not None] for name, kind in LISTS.items()},
        }
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Callable[[tuple[str, str]], Any]:
    """What each exit shows, by the time zones of the process and of its session. Each is a process of its own."""

    def run(zones: tuple[str, str]) -> Any:
        folder = tmp_path_factory.mktemp("exits")
        columns = {
            f"{letter} {kind}": pa.array([*(value for value, _ in values), None], type_)
            for letter in "kv"
            for kind, (type_, values) in EXPECTED.items()
        }
        parquet.write_table(pa.table({"row": ROWS, **columns}), folder / "input.parquet")
        options = json.dumps({"folder": str(folder), "zone": zones[1]})
        done = subprocess.run(
            [sys.executable, str(FIXTURES / "exits_job.py"), options],
            env=os.environ | {"TZ": zones[0]},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
        return json.loads((folder / "found.json").read_text())

    return cache(run)


def shown_by(exit_name: str, kind: str, value: Any) -> Any:
    """What an exit shows where the value is ``value`` in JSON: the rows of the table in docs/reference/types.md."""
    is_any, is_struct = kind == "own", kind == "nested"
    if exit_name == "functions" and is_struct and value is not None:
        return [value["at"], value["days"], list(value["inner"].values())]
    if exit_name == "to_pandas":
        if kind == "times":
            return [one.removesuffix("Z") for one in value]
        if value is None and kind.removeprefix("k ") in ("float", "double"):
            return "NaN"
        if value is None and kind.removeprefix("k ") in ("timestamp", "timestamp_ntz"):
            return "NaT"
    if exit_name in TEXTS and value is None:
        return TEXTS[exit_name]
    if (exit_name in TEXTS and type(value) is not str) or (exit_name in COLUMNS and is_any):
        return json.dumps(value, separators=(",", ":"))
    return value


@pytest.mark.parametrize("exit_name", [*COLUMNS, *TEXTS, *OBJECTS])
@pytest.mark.parametrize("zones", ZONES, ids=str)
def test_a_value_of_each_type_is_the_same_by_each_exit(found, zones, exit_name):
    rows = found(zones)[exit_name]
    keys = [f"k {kind}" for kind in EXPECTED] if exit_name != "functions" else []
    columns = ["row", *EXPECTED, *keys, *LISTS, "nested", "own"]
    wanted = {
        row: {kind: shown_by(exit_name, kind, values[kind]) for kind in columns} for row, values in expected().items()
    }
    assert rows == wanted


@pytest.mark.parametrize("zones", ZONES, ids=str)
def test_windows_and_watermarks_are_the_same_by_each_exit(found, zones):
    shown = found(zones)
    for exit_name in ("windows", "windows/END", "get windows", "windows --json"):
        assert shown[exit_name] == WINDOW, exit_name
    assert shown["watermarks"] == [MARK, MARK]
    assert shown["watermark of windows"] == f"1 windows; the watermark is {MARK}"
    assert [line.split()[-1] for line in shown["ledger"]] == [MARK, MARK, MARK]


@pytest.mark.parametrize("zones", ZONES, ids=str)
def test_rows_of_a_function_have_the_types_of_spark_that_no_state_has(found, zones):
    assert found(zones)["types of rows"] == {
        "days": "P1DT7384.000005S",
        "months": "-P14M",
        "years": ["P12M", None],
        "by_month": {"P2M": {"interval year": "P0M"}},
        "by_decimal": {"1.50": "2026-01-02T03:04:05.678901Z"},
        "by_boolean": {"true": {"2026-01-02": "NaN"}},
        "by_text": {"a": [{"at": "9999-12-31T23:59:59.999999Z", "bytes": "00ff"}]},
    }
    assert "take to_json of it" in found(zones)["variants"]
