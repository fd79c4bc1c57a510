"""Records as bytes: what comes back, what is refused, and what damage looks like."""

from __future__ import annotations

import datetime as dt
import json
import math
from decimal import Decimal

import msgspec
import pyarrow as pa
import pytest
from aerospike_stand_in import stored
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mapstate.aggregators import CombinerAggregator, Count, Fields
from mapstate.aggregators.fields import NULL
from mapstate.errors import (
    AggregatorError,
    ConfigurationError,
    CorruptRecordError,
    SerializationError,
    UnsupportedTypeError,
)
from mapstate.protocol.records import OpaqueValue, TransactionalValue
from mapstate.reader.tables import arrow_type
from mapstate.schema import Field
from mapstate.serializers import JsonSerializer, MessagePackSerializer, RecordCodec, serializer

FORMATS = ["json", "msgpack", "native"]
KINDS = ["opaque", "transactional", "non-transactional"]
longs = st.integers(-(1 << 63), (1 << 63) - 1)
texts = st.text(max_size=6) | st.sampled_from(["", "\n", "a\nb", "NaN", "\0", "\\", '"', "null"])
NAIVE = dt.datetime(2026, 1, 1)
instants = st.datetimes(
    NAIVE.replace(year=2),
    NAIVE.replace(year=9998),
    timezones=st.sampled_from([dt.UTC, dt.timezone(dt.timedelta(hours=-7, minutes=30))]),
)
decimals = st.decimals(-(10**36), 10**36, places=2) | st.sampled_from([Decimal("1E+3"), Decimal("-0.00"), Decimal(0)])
floats = st.floats() | st.sampled_from([math.nan, math.inf, -math.inf, -0.0, 1e308, 5e-324, 1e16])
VALUES = {
    "bigint": longs,
    "int": st.integers(-(1 << 31), (1 << 31) - 1),
    "smallint": st.integers(-5, 5),
    "tinyint": st.integers(-5, 5),
    "double": floats,
    "float": st.floats(width=32),
    "string": texts,
    "boolean": st.booleans(),
    "date": st.dates(),
    "timestamp": instants,
    "timestamp_ntz": st.datetimes(),
    "binary": st.binary(max_size=4),
    "decimal(38,2)": decimals,
    "struct<sum:decimal(38,0),count:bigint>": st.tuples(st.none() | decimals, st.none() | longs),
    "struct<sum:double,count:bigint>": st.tuples(st.none() | floats, longs),
    "struct<by:timestamp,value:string>": st.tuples(instants, st.none() | texts),
    "struct<by:decimal(10,2),value:binary>": st.tuples(decimals, st.none() | st.binary(max_size=3)),
    "struct<by:bigint,value:array<double>>": st.tuples(longs, st.none() | st.lists(st.none() | floats, max_size=3)),
    "struct<values:array<string>,counts:array<bigint>>": st.tuples(
        *[st.lists(part, max_size=3) for part in (texts, longs)]
    ),
    **{
        f"struct<values:array<{name}>>": st.tuples(st.lists(part, max_size=3))
        for name, part in {"timestamp": instants, "decimal(10,2)": decimals, "binary": st.binary(max_size=3)}.items()
    },
}
plain = st.recursive(
    st.none() | st.booleans() | longs | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)


def fields(*types):
    return [Field(f"f{at}", "Own", kind) for at, kind in enumerate(types)]


def codec(form, kind, types, field_counts=None):
    return RecordCodec(serializer(form), "visits", kind, fields(*types), field_counts or [(0, len(types))])


def record(kind, txid, curr, prev=None):
    if kind == "opaque":
        return OpaqueValue(txid, curr, prev)
    return TransactionalValue(txid, curr) if kind == "transactional" else curr


def may_be_null(name, number):
    """By itself, only what built-in aggregators leave null: an average has its count, an own value is any."""
    return number > 1 or not name.startswith(("struct<", "any"))


def alike(value):
    """A value in a form that shows what == hides: types, NaN, signs, zones."""
    if isinstance(value, (tuple, list)):
        return tuple(alike(part) for part in value)
    if isinstance(value, dict):
        return {key: alike(part) for key, part in value.items()}
    if isinstance(value, dt.datetime):
        return value.replace(fold=0) if value.tzinfo is None else value.astimezone(dt.UTC)
    return type(value), repr(value)


# There and back


@settings(max_examples=300)
@given(
    st.sampled_from(FORMATS),
    st.sampled_from(KINDS),
    st.lists(st.sampled_from(list(VALUES)), min_size=1, max_size=4),
    st.data(),
)
def test_every_value_comes_back_as_it_was(form, kind, types, data):
    parts = [(st.none() if may_be_null(name, len(types)) else st.nothing()) | VALUES[name] for name in types]
    one = st.tuples(*parts)
    one = st.none() | (one.map(lambda value: NULL if value[0] is None else value[0]) if len(types) == 1 else one)
    txids = st.integers(0, 1 << 53)
    records = [record(kind, *data.draw(st.tuples(txids, one, one))) for _ in range(data.draw(st.integers(0, 3)))]
    at_work = codec(form, kind, types)
    written = at_work.dumps(records)
    assert len(written) == len(records)
    assert all(type(one) is (list if form == "native" else bytes) for one in written)
    if form == "native":  # on its way through a client that knows a few types, and cuts text at a NUL
        assert alike(stored(written)) == alike(written)
    back = at_work.loads([f"k{at}" for at in range(len(records))], written)
    assert alike(back) == alike(records)


@settings(max_examples=200)
@given(st.sampled_from(FORMATS), st.sampled_from(KINDS), plain, plain)
def test_what_an_own_aggregator_accumulates_comes_back_as_it_was(form, kind, curr, prev):
    at_work = codec(form, kind, ["any"])
    [written] = at_work.dumps([record(kind, 1, curr, prev)])
    [back] = at_work.loads(["k"], [stored(written) if form == "native" else written])
    assert back == record(kind, 1, curr, prev)
    assert alike(back) == alike(tuple(record(kind, 1, curr, prev)) if kind != "non-transactional" else curr)
    at_work = codec(form, kind, ["any", "bigint"])
    [back] = at_work.loads(["k"], at_work.dumps([record(kind, 1, (curr, 3), (prev, None))]))
    assert back == record(kind, 1, (curr, 3), (prev, None))


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("kind", KINDS)
def test_absent_is_none_and_never_asked_of_the_format(form, kind):
    at_work = codec(form, kind, ["bigint"])
    [data] = at_work.dumps([record(kind, 3, 5, 4)])
    assert at_work.loads(["a", "b", "c"], [None, data, None]) == [None, record(kind, 3, 5, 4), None]
    assert at_work.loads([], []) == []
    assert at_work.dumps([]) == []


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("name", [name for name in VALUES if may_be_null(name, 1)])
def test_a_value_that_is_null_is_not_a_removed_one(form, name):
    at_work = codec(form, "opaque", [name])
    back = at_work.loads(["a", "b"], at_work.dumps([OpaqueValue(1, NULL, None), OpaqueValue(1, None, NULL)]))
    assert back == [(1, NULL, None), (1, None, NULL)]


def test_zero_and_empty_values_are_values():
    for form in FORMATS:
        for name, value in (("bigint", 0), ("string", ""), ("boolean", False), ("binary", b""), ("double", 0.0)):
            at_work = codec(form, "opaque", [name])
            [back] = at_work.loads(["a"], at_work.dumps([OpaqueValue(0, value, value)]))
            assert alike(back) == alike((0, value, value))


# Wire forms: other programs read them, and states of Storm are taken over


@pytest.mark.parametrize(
    ("kind", "types", "one", "wire"),
    [
        ("opaque", ["bigint"], OpaqueValue(8, 6, 4), b"[8,6,4]"),
        ("opaque", ["bigint"], OpaqueValue(0, 0, None), b"[0,0,null]"),
        ("transactional", ["bigint"], TransactionalValue(8, 3), b"[8,3]"),
        ("non-transactional", ["bigint"], 3, b"3"),
        ("opaque", ["bigint", "double"], OpaqueValue(8, (6, 1.5), None), b"[8,[6,1.5],null]"),
        ("non-transactional", ["bigint", "string"], (3, "a\nb"), b'[3,"a\\nb"]'),
        ("opaque", ["bigint"], OpaqueValue(8, NULL, None), b"[8,[null],null]"),
        ("non-transactional", ["double"], math.nan, b'"NaN"'),
        ("non-transactional", ["double"], -math.inf, b'"-Infinity"'),
        ("non-transactional", ["decimal(38,2)"], Decimal("1.50"), b'"1.50"'),
        ("non-transactional", ["date"], dt.date(2026, 11, 21), b'"2026-11-21"'),
        ("non-transactional", ["binary"], b"\x00", b'"AA=="'),
        ("transactional", ["struct<sum:double,count:bigint>"], TransactionalValue(1, (2.5, 2)), b"[1,[2.5,2]]"),
        ("opaque", ["any"], OpaqueValue(1, {"a": [1]}, "x"), b'[1,{"a":[1]},"x"]'),
    ],
    ids=str,
)
def test_json_is_that_of_storm_redis_and_readable_in_a_shell(kind, types, one, wire):
    at_work = codec("json", kind, types)
    assert at_work.dumps([one]) == [wire]
    [back] = at_work.loads(["k"], [wire])
    assert alike(back) == alike(one)
    json.loads(wire)


def test_json_of_others_is_read_whatever_its_spaces():
    assert codec("json", "opaque", ["bigint"]).loads(["k"], [b" [ 8, 6,\n4 ] "]) == [(8, 6, 4)]
    assert codec("json", "opaque", ["double"]).loads(["k"], [b"[8,6,null]"]) == [(8, 6.0, None)]


def test_messagepack_holds_the_same_arrays():
    [data] = codec("msgpack", "opaque", ["bigint"]).dumps([OpaqueValue(8, 6, None)])
    assert data == bytes([0x93, 8, 6, 0xC0])
    [data] = codec("msgpack", "non-transactional", ["double", "binary"]).dumps([(math.nan, b"x")])
    assert math.isnan(msgspec.msgpack.decode(data)[0])


def test_a_chunk_of_texts_with_line_breaks_stays_one_document_each():
    at_work = codec("json", "non-transactional", ["string"])
    values = ["a\nb", "\n", "", "\r\n", "\u2028", "\x0b\x85"]
    assert at_work.loads(values, at_work.dumps(values)) == values


# Fields that were added later


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("kind", ["opaque", "transactional"])
def test_records_from_before_a_field_was_added_are_widened(form, kind):
    one = codec(form, kind, ["bigint"])
    two = codec(form, kind, ["bigint", "double"], [(0, 1), (10, 2)])
    three = codec(form, kind, ["bigint", "double", "any"], [(0, 1), (10, 2), (20, 3)])
    data = [
        *one.dumps([record(kind, 0, 5, 4), record(kind, 9, NULL, None), record(kind, 9, None, 0)]),
        *two.dumps([record(kind, 10, (5, math.nan), (4, None))]),
        *three.dumps([record(kind, 20, (5, 0.5, [1]), None), record(kind, 99, None, (5, 0.5, [1]))]),
    ]
    keys = list("abcdef")
    assert alike(three.loads(keys, data)) == alike(
        [
            record(kind, 0, (5, None, None), (4, None, None)),
            record(kind, 9, (None, None, None), None),
            record(kind, 9, None, (0, None, None)),
            record(kind, 10, (5, math.nan, None), (4, None, None)),
            record(kind, 20, (5, 0.5, [1]), None),
            record(kind, 99, None, (5, 0.5, [1])),
        ]
    )
    assert three.loads(["a"], [None]) == [None]


@pytest.mark.parametrize("form", FORMATS)
def test_a_record_wider_or_narrower_than_its_txid_says_is_corrupt(form):
    wide = codec(form, "opaque", ["bigint", "double"])
    [data] = wide.dumps([OpaqueValue(9, (1, 1.0), None)])
    with pytest.raises(CorruptRecordError):
        codec(form, "opaque", ["bigint", "double"], [(0, 1), (10, 2)]).loads(["k"], [data])
    [data] = codec(form, "opaque", ["bigint"]).dumps([OpaqueValue(10, 1, None)])
    with pytest.raises(CorruptRecordError):
        codec(form, "opaque", ["bigint", "double"], [(0, 1), (10, 2)]).loads(["k"], [data])


@pytest.mark.parametrize("form", FORMATS)
def test_a_widened_single_struct_keeps_its_parts(form):
    struct = "struct<by:bigint,value:string>"
    one = codec(form, "opaque", [struct])
    two = codec(form, "opaque", [struct, "bigint"], [(0, 1), (10, 2)])
    data = one.dumps([OpaqueValue(1, (1, "a"), (None, None))])
    assert two.loads(["k"], data) == [(1, ((1, "a"), None), ((None, None), None))]


# Damage


def schemas_of_all_types():
    return [[name] for name in [*VALUES, "any"]] + [["bigint", "double", "any"], ["decimal(38,2)", "timestamp"]]


noise = st.one_of(
    st.binary(max_size=40),
    st.text(alphabet='[]{},:"0123456789-.eENaInfulst \\u\n', max_size=40).map(str.encode),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just("9" * 50),
        lambda inner: st.lists(inner, max_size=4),
        max_leaves=6,
    ).map(lambda value: json.dumps(value).encode()),
    st.recursive(
        st.none() | st.booleans() | longs | st.floats() | st.text(max_size=5) | st.binary(max_size=5),
        lambda inner: st.lists(inner, max_size=4),
        max_leaves=6,
    ).map(msgspec.msgpack.encode),
)


@settings(max_examples=500)
@given(
    st.sampled_from(FORMATS),
    st.sampled_from(KINDS),
    st.sampled_from(schemas_of_all_types()),
    st.booleans(),
    noise,
)
@example("json", "opaque", ["bigint"], False, b"")
@example("json", "opaque", ["any"], False, b"[1," + b"[" * 200_000)
@example("msgpack", "opaque", ["any"], False, b"\x93\x01" + b"\x91" * 200_000)
@example("json", "opaque", ["string"], False, b'[1,"\xff",null]')
@example("json", "opaque", ["bigint"], False, b"[-1,5,null]")
@example("json", "opaque", ["bigint"], True, b"[-1,5,null]")
@example("json", "opaque", ["double"], False, b'[1,"nan",null]')
@example("json", "opaque", ["timestamp"], False, b'[1,"2026-01-01T00:00:00",null]')
@example("json", "opaque", ["timestamp_ntz"], False, b'[1,"2026-01-01T00:00:00Z",null]')
@example("msgpack", "opaque", ["timestamp"], False, msgspec.msgpack.encode([1, "2026-01-01T00:00:00", None]))
def test_damaged_records_are_never_taken_for_absent_ones(form, kind, types, later, noise):
    """Either a record of the right shape comes out, or CorruptRecordError with state and key."""
    field_counts = [(0, 1), (5, len(types))] if later and kind != "non-transactional" else None
    at_work = codec(form, kind, types, field_counts)
    good = at_work.dumps([record(kind, 7, None, None)])
    got = outcome(at_work, [*good, noise])
    if isinstance(got, CorruptRecordError):
        assert (got.state, got.key) == ("visits", "user-42")
        assert "visits" in str(got)
        assert "user-42" in str(got)
    elif kind == "non-transactional":
        assert got is not None or noise.strip() in (b"null", b"\xc0")
    else:
        txid, *values = got
        assert type(txid) is int
        assert txid >= 0
        for value in values:
            assert value is None or _fits(value, types), value


def outcome(at_work, data):
    try:
        return at_work.loads(["before", "user-42"], data)[1]
    except CorruptRecordError as error:
        return error


def _fits(value, types):
    parts = value if len(types) > 1 or value == NULL else (value,)
    return len(parts) == len(types) and all(
        part is None or _is_a(name, part) for name, part in zip(types, parts, strict=True)
    )


def _is_a(name, value):
    if name.startswith("struct<"):
        return type(value) is tuple and len(value) == name.count(":")
    if name.startswith("decimal("):
        return type(value) is Decimal
    if name == "timestamp":
        return type(value) is dt.datetime and value.tzinfo is not None
    if name == "timestamp_ntz":
        return type(value) is dt.datetime and value.tzinfo is None
    kinds = {"double": float, "float": float, "string": str, "boolean": bool, "date": dt.date, "binary": bytes}
    return name == "any" or type(value) is kinds.get(name, int)


@pytest.mark.parametrize("word", ["nan", "inf", "1.5", "", "-NaN", "infinity"])
def test_a_word_that_stands_for_no_number_is_damage(word):
    with pytest.raises(CorruptRecordError):
        codec("json", "opaque", ["double"]).loads(["k"], [json.dumps([1, word, None]).encode()])


def test_one_damaged_record_of_a_chunk_is_the_one_that_is_named():
    at_work = codec("json", "opaque", ["bigint"])
    with pytest.raises(CorruptRecordError) as caught:
        at_work.loads(["a", "b", "c"], [b"[1,2,3]", None, b"[1,2]"])
    assert (caught.value.state, caught.value.key) == ("visits", "c")


# What would come back changed


class Text(str):
    __slots__ = ()


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(
    "value",
    [
        (1, 2),
        {1, 2},
        {1: "a"},
        {None: 1},
        1 << 63,
        -(1 << 63) - 1,
        Decimal("1.5"),
        dt.date(2026, 1, 1),
        dt.datetime(2026, 1, 1, tzinfo=dt.UTC),
        Text("a"),
        object(),
        [1, (2,)],
        {"a": {2: 1}},
        "\ud800",
        bytearray(b"x"),
        (None,),
    ],
    ids=lambda value: repr(value)[:20].partition(" at 0x")[0],
)
def test_an_own_value_that_would_come_back_changed_is_refused(form, value):
    """Inside a list, where (None,) is no longer the sign for a null."""
    with pytest.raises(SerializationError):
        codec(form, "opaque", ["any"]).dumps([OpaqueValue(1, None, None), OpaqueValue(1, [value], None)])
    with pytest.raises(SerializationError):
        codec(form, "opaque", ["any", "bigint"]).dumps([OpaqueValue(1, (value, 1), None)])


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, b"x", [b"x"], {"a": math.nan}], ids=repr)
def test_json_refuses_what_only_messagepack_can_hold(value):
    with pytest.raises(SerializationError):
        codec("json", "opaque", ["any"]).dumps([OpaqueValue(1, value, None)])
    at_work = codec("msgpack", "opaque", ["any"])
    [back] = at_work.loads(["k"], at_work.dumps([OpaqueValue(1, value, None)]))
    assert alike(back) == alike((1, value, None))


class Says(CombinerAggregator):
    """Says one type and gives a value, whatever that is."""

    def __init__(self, kind, value):
        self.value_type = kind
        self.value = value

    def init(self, row):
        return self.value

    def combine(self, a, b):
        return b


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("bigint", 2.5),
        ("bigint", 2.0),
        ("bigint", "2"),
        ("bigint", True),
        ("bigint", 1 << 63),
        ("bigint", [1]),
        ("string", 1),
        ("string", b"x"),
        ("boolean", 1),
        ("double", "1.5"),
        ("double", "NaN"),
        ("double", Decimal("1.5")),
        ("decimal(38,2)", 1.5),
        ("decimal(38,2)", Decimal("NaN")),
        ("date", "2026-01-01"),
        ("binary", "eA=="),
        ("timestamp", NAIVE),
        ("timestamp_ntz", NAIVE.replace(tzinfo=dt.UTC)),
        ("struct<a:bigint,b:string>", (1,)),
        ("struct<a:bigint,b:string>", (1, 2)),
        ("struct<a:bigint,b:string>", 1),
        ("int", 1 << 31),
        ("int", 1 << 40),
        ("smallint", -(1 << 15) - 1),
        ("tinyint", 300),
        ("float", 1e300),
        ("float", -3.5e38),
        ("float", 1),
        ("decimal(5,2)", Decimal("1.234")),
        ("decimal(5,2)", Decimal(1000)),
        ("decimal(5,2)", Decimal("1E+400")),
        ("decimal(5,2)", Decimal("Infinity")),
        ("decimal(5,2)", Decimal("sNaN")),
        ("timestamp", dt.datetime(9999, 12, 31, 23, tzinfo=dt.timezone(dt.timedelta(hours=-5)))),
        ("timestamp", dt.datetime(1, 1, 1, tzinfo=dt.timezone(dt.timedelta(hours=5)))),
        ("struct<a:int>", (None,)),
        ("struct<a:bigint,b:array<smallint>>", (1, [1 << 15])),
    ],
    ids=repr,
)
def test_an_own_value_of_another_type_than_it_says_is_refused_before_the_write(name, value):
    """value_type='bigint' and then 2.5: once stored, it could never be read again."""
    own = Says(name, value)
    for others in ({}, {"n": Count()}):
        aggregators = {"own": own} | others
        schema = [Field(field, one.describe(), one.bind({})) for field, one in aggregators.items()]
        at_work = Fields(schema, aggregators)
        foldings = at_work.start()
        for folding in foldings:
            folding.add({})
        stored = RecordCodec(serializer("json"), "visits", "opaque", schema, [(0, len(schema))])
        with pytest.raises((SerializationError, AggregatorError)):
            stored.dumps([OpaqueValue(1, new, None) for new in at_work.combine_all([None], [at_work.finish(foldings)])])


@pytest.mark.parametrize(
    ("name", "value", "held"),
    [
        ("float", 0.1, 0.10000000149011612),
        ("float", 1e-60, 0.0),
        ("float", math.inf, math.inf),
        ("decimal(5,2)", Decimal("1.5"), Decimal("1.50")),
        ("decimal(5,2)", Decimal("1.5000"), Decimal("1.50")),
        ("decimal(5,2)", Decimal("-0"), Decimal("0.00")),
        ("decimal(38,0)", Decimal("1E+30"), Decimal(10**30)),
        ("decimal(38,38)", Decimal("0.5"), Decimal("0.5" + "0" * 37)),
        ("int", -(1 << 31), -(1 << 31)),
        ("tinyint", 127, 127),
        (
            "timestamp",
            dt.datetime(2026, 1, 1, 12, tzinfo=dt.timezone(dt.timedelta(hours=1, seconds=20))),
            dt.datetime(2026, 1, 1, 10, 59, 40, tzinfo=dt.UTC),
        ),
        ("struct<a:float,b:decimal(5,2)>", (0.1, Decimal(1)), (0.10000000149011612, Decimal("1.00"))),
        ("struct<a:int,b:array<float>>", (None, [0.1, None]), (None, [0.10000000149011612, None])),
        ("any", 0.1, 0.1),
    ],
    ids=repr,
)
def test_an_own_value_looks_the_same_wherever_it_leaves(name, value, held):
    for others in ({}, {"n": Count()}):
        aggregators = {"own": Says(name, value)} | others
        schema = [Field(field, one.describe(), one.bind({})) for field, one in aggregators.items()]
        at_work = Fields(schema, aggregators)
        foldings = at_work.start()
        for folding in foldings:
            folding.add({})
        [new] = at_work.combine_all([None], [at_work.finish(foldings)])
        assert repr(at_work.split(new)[0]) == repr(held)
        for form in FORMATS:
            stored = RecordCodec(serializer(form), "visits", "opaque", schema, [(0, len(schema))])
            [back] = stored.loads(["k"], stored.dumps([OpaqueValue(1, new, None)]))
            assert repr(back[1]) == repr(new)
    if name != "any" and "struct" not in name:
        [in_table] = pa.array([held], arrow_type(pa, name)).to_pylist()
        assert in_table == held
        assert str(in_table) == str(held)


def test_a_refused_value_names_its_state():
    with pytest.raises(SerializationError) as caught:
        codec("json", "opaque", ["any"]).dumps([OpaqueValue(1, {1, 2}, None)])
    assert caught.value.state == "visits"


# Names


def test_serializers_are_found_by_name():
    assert type(serializer("json")) is JsonSerializer
    assert type(serializer("msgpack")) is MessagePackSerializer
    with pytest.raises(ConfigurationError, match="json, msgpack"):
        serializer("pickle")


@pytest.mark.parametrize(
    "name", ["array<int>", "decimal(5)", "struct<a:array<array<int>>>", "struct<a:map<int,int>>", "variant", ""]
)
def test_a_type_that_cannot_be_stored_is_refused(name):
    with pytest.raises(UnsupportedTypeError):
        codec("json", "opaque", [name])
