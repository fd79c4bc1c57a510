"""The tables of docs/reference/, made from the code: test_reference.py compares the pages with them."""

from __future__ import annotations

import ast
import datetime as dt
import inspect
import json
import re
from collections.abc import Iterable
from dataclasses import MISSING, fields
from decimal import Decimal
from pathlib import Path
from typing import Any

import mapstate
from mapstate import aggregators, errors
from mapstate.aggregators.aggregator import Aggregator, NativeCombiner
from mapstate.aggregators.retraction import retractable
from mapstate.backends.aerospike import backend as aerospike
from mapstate.backends.aerospike.backend import AerospikeBackend
from mapstate.backends.redis import backend as redis
from mapstate.backends.redis import cluster_backend as cluster
from mapstate.backends.redis.backend import RedisBackend
from mapstate.backends.redis.cluster_backend import RedisClusterBackend
from mapstate.backends.redis.sentinel_backend import RedisSentinelBackend
from mapstate.backends.redis.unix_backend import RedisUnixBackend
from mapstate.backends.sqlite import backend as sqlite
from mapstate.backends.sqlite.backend import SqliteBackend
from mapstate.batch_report import MOST_REPORTS
from mapstate.errors import ConfigurationError, MapStateError, UnsupportedTypeError
from mapstate.keys import KeyCodec
from mapstate.maps.serialized import CHUNK_BYTES
from mapstate.schema import Field, KeyField
from mapstate.serializers import RecordCodec, serializer
from mapstate.serializers.value_types import WireForm, wire_type
from mapstate.spec import _NAME, CHUNK_SIZE, StateOptions, StateSpec

ROOT = Path(__file__).resolve().parents[2]
INTEGERS = ("tinyint", "smallint", "int", "bigint")
NUMBERS = (*INTEGERS, "float", "double", "decimal(10,2)")
# A value of each Spark type, as a row and a key have it.
VALUES: dict[str, Any] = {
    **dict.fromkeys(INTEGERS, 42),
    "float": 0.5,
    "double": 0.5,
    "decimal(10,2)": Decimal("12.50"),
    "string": "DE",
    "boolean": True,
    "date": dt.date(2026, 11, 21),
    "timestamp": dt.datetime(2026, 11, 21, 9, 30, tzinfo=dt.UTC),
    "timestamp_ntz": dt.datetime(2026, 11, 21, 9, 30),
    "binary": b"\x01\xff",
}
NO_ORDER = ("array<int>", "map<string,int>", "struct<a:int>")
TYPES = (*VALUES, *NO_ORDER)
BY = "decimal(9,9)"  # the type of the column `time`, which no other type is taken for


def row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


# The arguments of the built-in aggregators, as a user writes them.
ARGUMENTS = {"column": '"x"', "by": 'by="time"', "most": "most=100"}
OTHERS = ["Count()", 'TopN(3, "x")', 'TopN(3, "x", by="count", most=100)']


def built_in() -> dict[str, NativeCombiner]:
    """Each aggregator that mapstate itself computes, by the call that makes it."""
    calls = OTHERS.copy()
    for name in sorted(aggregators.__all__):
        kind = getattr(aggregators, name)
        if isinstance(kind, type) and issubclass(kind, NativeCombiner) and name not in ("NativeCombiner", "TopN"):
            given = [ARGUMENTS[argument] for argument in inspect.signature(kind).parameters if argument != "where"]
            calls.append(f"{name}({', '.join(given)})")
    return {call: eval(call, vars(aggregators)) for call in sorted(calls)}


def _forms(aggregator: NativeCombiner) -> dict[str, tuple[str, str]]:
    """What it stores and shows of a column ``x`` of each type that it takes."""
    found = {}
    for kind in TYPES:
        try:
            stored = aggregator.bind({"x": kind, "time": BY})
        except UnsupportedTypeError:
            continue
        found[kind] = stored, aggregator.result_type(stored)
    return found


def _of_second_state(aggregator: Aggregator) -> str:
    monotone: dict[str, type[Aggregator]]
    for monotone, said in (
        ({}, "yes"),
        ({"x": aggregators.Max}, "if `x` only grows"),
        ({"x": aggregators.Min}, "if `x` only falls"),
    ):
        try:
            retractable("x", aggregator, grouped=False, monotone=monotone)
        except ConfigurationError:
            continue
        return said
    return "refused"


def _listed(kinds: Iterable[str]) -> str:
    kinds = list(kinds)
    if kinds == list(TYPES):
        return "any"
    text = ", ".join(f"`{kind}`" for kind in kinds)
    for group, name in ((list(VALUES), "any with an order"), (NUMBERS, "numbers"), (INTEGERS, "integers")):
        text = text.replace(", ".join(f"`{kind}`" for kind in group), name)
    return text.replace("`array<int>`", "arrays")


def _of_type(kind: str, pair: tuple[str, str]) -> tuple[str, str]:
    """The forms with ``T`` for the column's own type."""
    stored, shown = (re.sub(rf"(?<![\w(]){re.escape(kind)}(?![\w(])", "T", form) for form in pair)
    return stored, shown


def aggregator_rows() -> list[str]:
    lines = []
    for call, aggregator in built_in().items():
        forms = _forms(aggregator)
        own = {_of_type(kind, pair) for kind, pair in forms.items() if kind != "bigint"}  # which may be a count's
        if len(own) == 1 < len(set(forms.values())):
            forms = dict.fromkeys(forms, own.pop())
        groups: dict[tuple[str, str], list[str]] = {}
        for kind, pair in forms.items():
            groups.setdefault(pair, []).append(kind)
        for (stored, shown), kinds in groups.items():
            cells = (f"`{form}`".replace(BY, "B") for form in (stored, shown))
            lines.append(row(f"`{call}`", _listed(kinds), *cells, _of_second_state(aggregator)))
    return lines


def _stored(kind: str, form: str) -> str:
    codec = RecordCodec(serializer(form), "s", "non-transactional", [Field("x", "Last", kind)], [(0, 1)])
    [data] = codec.dumps([VALUES[kind]])
    return data.decode() if isinstance(data, bytes) else repr(data[0])


def type_rows() -> list[str]:
    lines = []
    for kind, value in VALUES.items():
        text = KeyCodec([KeyField("k", kind)]).encode((value,))
        python = "decimal.Decimal" if type(value) is Decimal else type(value).__module__ + "." + type(value).__name__
        wire_type(kind, WireForm())
        cells = (text, python.removeprefix("builtins."), _stored(kind, "json"), _stored(kind, "native"))
        lines.append(row(f"`{kind}`", *(f"`{cell}`" for cell in cells)))
    return lines


def _default(value: Any) -> str:
    return json.dumps(value) if isinstance(value, str) else str(value)


def _meanings(doc: str) -> dict[str, str]:
    """The aligned list of a docstring: what it says of each name."""
    found: dict[str, str] = {}
    name = ""
    for line in doc.splitlines():
        item = re.match(r" {4}``(\w+)`` +(\S.*)", line)
        if item:
            name = item[1]
            found[name] = item[2]
        elif name and line.startswith(" " * 8):
            found[name] += " " + line.strip()
        else:
            name = ""
    return {name: re.sub(r"``", "`", text) for name, text in found.items()}


def option_rows() -> list[str]:
    meanings = _meanings(StateSpec.__doc__ or "")
    by_name = {field.name: field for field in fields(StateSpec)}
    lines = []
    for name in ("name", *StateOptions.__annotations__):
        default = by_name[name].default
        shown = f"the store's, else {CHUNK_SIZE}" if name == "chunk_size" else f"`{_default(default)}`"
        lines.append(row(f"`{name}`", shown, meanings[name]))
    return lines


SCHEMES: dict[str, tuple[Any, Any]] = {
    "redis": (RedisBackend, RedisBackend.PARAMETERS),
    "unix": (RedisUnixBackend, RedisUnixBackend.PARAMETERS),
    "redis+sentinel": (RedisSentinelBackend, RedisSentinelBackend.PARAMETERS),
    "redis+cluster": (RedisClusterBackend, RedisClusterBackend.PARAMETERS),
    "sqlite": (SqliteBackend, sqlite._PARAMETERS),
    "aerospike": (AerospikeBackend, aerospike._PARAMETERS),
}


def url_rows() -> list[str]:
    """A row for each parameter, type and default, with the schemes that have it so."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for scheme, (backend, parameters) in SCHEMES.items():
        defaults = {field.name: field.default for field in fields(backend)}
        for name, convert in parameters.items():
            kind = {"boolean": "true or false", "str": "text"}.get(convert.__name__, convert.__name__)
            default = defaults[name]
            assert default is not MISSING
            found.setdefault((name, kind, _default(default)), []).append(scheme)
    return [
        row(f"`{name}`", kind, f"`{default}`", ", ".join(f"`{scheme}`" for scheme in schemes))
        for (name, kind, default), schemes in sorted(found.items())
    ]


def _anchors() -> dict[str, set[str]]:
    """The places in the pages that the messages of each error name."""
    found: dict[str, set[str]] = {}
    for path in sorted((ROOT / "src").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in errors.__all__:
                text = " ".join(
                    part.value
                    for part in ast.walk(node)
                    if isinstance(part, ast.Constant) and isinstance(part.value, str)
                )
                found.setdefault(node.func.id, set()).update(re.findall(r"docs/([\w-]+\.md#[\w-]+)", text))
    return found


def _built_ins(kind: type[MapStateError]) -> str:
    own = [base.__name__ for base in kind.__mro__[1:] if base.__module__ in ("builtins", "_pickle")]
    return ", ".join(f"`{name}`" for name in own if name not in ("Exception", "BaseException", "object"))


def error_rows() -> list[str]:
    page = (ROOT / "docs" / "operating.md").read_text()
    refusals = page.partition("## Each refusal, and what to do")[2].partition("\n##")[0]
    named = set(re.findall(r"`(\w+Error)`", "\n".join(line.split(" | ")[0] for line in refusals.splitlines())))
    anchors = _anchors()
    lines = []
    for name in errors.__all__:
        kind = getattr(errors, name)
        places = sorted(anchors.get(name, set()))
        if name in named:
            places.insert(0, "operating.md#each-refusal-and-what-to-do")
        links = ", ".join(f"[{_title(place)}](../{place})" for place in dict.fromkeys(places))
        parent = "" if kind is MapStateError else f"`{kind.__bases__[0].__name__}`"
        said = (kind.__doc__ or "").split("\n")[0].split(". ")[0].rstrip(".")
        lines.append(row(f"`{name}`", said, parent, _built_ins(kind), links))
    return lines


def _title(place: str) -> str:
    """The heading of an anchor in a page."""
    page, _, anchor = place.partition("#")
    for title in re.findall(r"^#+ (.+)$", (ROOT / "docs" / page).read_text(), re.MULTILINE):
        if re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") == anchor:
            return str(title)
    raise LookupError(f"{place} is no heading")


def limit_rows() -> list[str]:
    """What can be no longer, larger or more, and the error for it."""

    def longest(pattern: re.Pattern[str]) -> int:
        return max(length for length in range(1, 200) if pattern.fullmatch("a" * length))

    names = (aerospike._NAMESPACE, aerospike._SET, aerospike._BIN)
    too_large, refused, overflow = "`TooLargeError`", "`ConfigurationError`", "`ValueOverflowError`"
    keys = f"`chunk_size`, {CHUNK_SIZE:,}; `redis+cluster` {RedisClusterBackend.chunk_size:,}"
    options = StateSpec(mapstate.opaque("memory://").backend, "opaque")
    return [
        row("name of a state, stream or topology", f"{longest(_NAME)} characters: letters, digits, `_ . -`", refused),
        row("key columns", "none; types with an order, see [types](types.md)", "`UnsupportedTypeError`"),
        row("text of a key", "none of mapstate's own; the store's, below", too_large),
        row("integers", "64 bits", overflow),
        row("decimals", "38 digits", overflow),
        row("keys per chunk", keys, "none: more chunks"),
        row("bytes per chunk", f"`chunk_bytes`, {CHUNK_BYTES // 2**20} MiB", "none: fewer keys in a chunk"),
        row("attempts at a batch", f"`max_attempts`, {options.max_attempts}", "the last attempt's own"),
        row("batch reports of a state", f"{MOST_REPORTS}", "none: the oldest go"),
        row("record or key in Redis", f"`max_value_bytes`, {RedisBackend().max_value_bytes // 2**20} MiB", too_large),
        row("hash shards of a packed layout", f"`buckets`, {redis._MOST_HASHES:,}", refused),
        row("slot groups in a Redis Cluster", f"`buckets`, {cluster._MOST_BUCKETS:,}", refused),
        row("record in SQLite", f"`max_value_bytes`, {sqlite._MAX_VALUE_BYTES:,} bytes", too_large),
        row("record in Aerospike", "the namespace's `max-record-size`, 1 MiB", too_large),
        row("namespace, set and bin in Aerospike", "{}, {} and {} characters".format(*map(longest, names)), refused),
        row("ttl in Aerospike", f"{aerospike._LONGEST_TTL // 86_400:,} days", refused),
    ]


TABLES = {
    ("aggregators", "What each stores"): aggregator_rows,
    ("types", "Keys and values"): type_rows,
    ("specs", "Options"): option_rows,
    ("urls", "Parameters"): url_rows,
    ("errors", "All errors"): error_rows,
    ("limits", "Limits"): limit_rows,
}
"""The rows of each table, by its page and the heading in front of it."""
