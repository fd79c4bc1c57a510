"""Keys: one text exactly where Spark's GROUP BY sees one key."""

from __future__ import annotations

import datetime as dt
import math
import re
import struct
import unicodedata
from decimal import Decimal

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from mapstate.errors import KeyEncodingError, UnsupportedTypeError
from mapstate.keys import GLOBAL_KEY, KeyCodec
from mapstate.schema import KeyField

NAN = math.nan
NAIVE = dt.datetime(2026, 1, 2, 3)
zones = st.integers(-14 * 60, 14 * 60).map(lambda minutes: dt.timezone(dt.timedelta(minutes=minutes)))
awkward = st.text(alphabet="\\|\0\n\t\x7f\x1f|NEGx01ab \x85\u2028é💥", max_size=6)
integers = st.integers(-(1 << 63), (1 << 63) - 1) | st.integers(-2, 2)
days = st.dates()
VALUES = {
    "string": awkward | st.text(max_size=8) | st.sampled_from(["", "\0", "|", "\\", "\\N", "\\E", "\\G", "N", "a|b"]),
    "bigint": integers,
    "int": st.integers(-3, 3),
    "boolean": st.booleans(),
    "double": st.floats() | st.sampled_from([0.0, -0.0, NAN, -NAN, math.inf, -math.inf, 1e300, 5e-324, 3.0]),
    "float": st.floats(width=32),
    "decimal(38,18)": st.decimals(allow_nan=False, allow_infinity=False, places=6)
    | st.sampled_from([Decimal(text) for text in ("0", "-0", "0.00", "-0.0", "1", "1.0", "1.50", "1E+3", "1000")]),
    "date": days,
    "timestamp": st.datetimes(NAIVE.replace(year=2), NAIVE.replace(year=9998), timezones=zones),
    "timestamp_ntz": st.datetimes(),
    "binary": st.binary(max_size=4),
}


def alike(kind, value):
    """What two equal keys have in common, by other means than text."""
    if value is None:
        return ("null",)
    if kind in ("double", "float"):
        return "NaN" if math.isnan(value) else value + 0.0
    if kind == "timestamp":
        return value.astimezone(dt.UTC)
    return value


schemas = st.lists(st.sampled_from(list(VALUES)), max_size=4)


@st.composite
def schemas_with_keys(draw, number):
    kinds = draw(schemas)
    one = st.tuples(*(st.none() | VALUES[kind] for kind in kinds))
    return kinds, [draw(one) for _ in range(number)]


def codec(*kinds):
    return KeyCodec([KeyField(f"k{at}", kind) for at, kind in enumerate(kinds)])


def all_alike(kinds, key):
    return tuple(alike(kind, value) for kind, value in zip(kinds, key, strict=True))


@settings(max_examples=200)
@given(schemas_with_keys(1))
def test_a_key_comes_back_as_an_equal_key(drawn):
    kinds, [key] = drawn
    back = codec(*kinds).decode(codec(*kinds).encode(key))
    assert isinstance(back, tuple)
    assert all_alike(kinds, back) == all_alike(kinds, key)
    assert [type(value) for value in back] == [type(value) for value in key]


@settings(max_examples=200)
@given(schemas_with_keys(2))
@example((["string", "string"], [("a|", "b"), ("a", "|b")]))
@example((["string", "string"], [("a\\", "b"), ("a", "\\b")]))
@example((["string"], [("",), (None,)]))
@example((["string"], [("\\N",), (None,)]))
@example((["string"], [("\\E",), ("",)]))
@example((["double"], [(-0.0,), (0.0,)]))
@example((["decimal(38,18)"], [(Decimal("1E+3"),), (Decimal("1000.00"),)]))
def test_two_keys_have_one_text_exactly_where_they_are_equal(drawn):
    kinds, (one, other) = drawn
    same_text = codec(*kinds).encode(one) == codec(*kinds).encode(other)
    assert same_text == (all_alike(kinds, one) == all_alike(kinds, other))


@settings(max_examples=200)
@given(st.sampled_from(list(VALUES)), st.data())
def test_texts_of_neighbours_differ(kind, data):
    """Small pools, so that equal and nearly equal keys do come together."""
    pool = data.draw(st.lists(st.none() | VALUES[kind], min_size=2, max_size=6))
    two = codec(kind, kind)
    keys = [(one, other) for one in pool for other in pool]
    texts = two.encode_columns([[key[0] for key in keys], [key[1] for key in keys]], len(keys))
    assert len(set(texts)) == len({all_alike((kind, kind), key) for key in keys})


@settings(max_examples=200)
@given(schemas_with_keys(1))
def test_a_text_can_be_typed_in_a_shell(drawn):
    kinds, [key] = drawn
    text = codec(*kinds).encode(key)
    assert text
    assert not [char for char in text if unicodedata.category(char) == "Cc"]
    assert text.encode()


@settings(max_examples=200)
@given(schemas_with_keys(5))
def test_columns_give_the_texts_that_single_keys_give(drawn):
    kinds, keys = drawn
    columns = [list(column) for column in zip(*keys, strict=True)]
    texts = [codec(*kinds).encode(key) for key in keys]
    assert codec(*kinds).encode_columns(columns, len(keys)) == texts
    assert codec(*kinds).encode_all(keys) == texts
    one_by_one = [codec(*kinds).decode(text) for text in texts]
    assert list(map(repr, codec(*kinds).decode_all(texts))) == list(map(repr, one_by_one))


def test_many_texts_are_decoded_as_each_alone():
    two = codec("string", "timestamp")
    texts = ["a|2026-11-22T10:00:00.000000Z", "b|2026-11-22T10:00:00.000000Z"]
    texts.append(two.encode(("a|b", None)))
    for some in (texts, texts[:2], texts[:1], []):
        assert two.decode_all(some) == [two.decode(text) for text in some]
    assert codec().decode_all(["\\G", "\\G"]) == [(), ()]
    native = KeyCodec([KeyField("k", "bigint")], native=True)
    assert native.decode_all([3, "\\N"]) == [(3,), (None,)]
    for no_key in ("a", "a|b|c", "a|yesterday"):
        for some in ([no_key], [texts[0], no_key], [no_key, no_key]):
            with pytest.raises(KeyEncodingError, match=re.escape(no_key)):
                two.decode_all(some)
    with pytest.raises(KeyEncodingError):
        native.decode_all([3, "4"])


def test_texts_are_those_of_the_documentation():
    """They are in stores: another text is another key, and a migration."""
    for kinds, key, text in [
        (["string"], ("user-42",), "user-42"),
        (["string", "date"], ("user-42", dt.date(2026, 11, 21)), "user-42|2026-11-21"),
        (["string", "string"], (None, "a|b"), r"\N|a\|b"),
        (["string"], ("",), r"\E"),
        ([], (), r"\G"),
        (["string"], ("tab\there\\\0\x1f",), r"tab\there\\\0\x1f"),
        (["bigint", "boolean"], (-7, True), "-7|true"),
        (["double"], (-0.0,), "0.0"),
        (["double"], (3,), "3.0"),
        (["double"], (NAN,), "NaN"),
        (["decimal(10,2)"], (Decimal("-1.50"),), "-1.5"),
        (["decimal(10,2)"], (2,), "2"),
        (["binary"], (b"\x00\xff",), "00ff"),
        (["binary"], (b"",), r"\E"),
        (["timestamp_ntz"], (NAIVE,), "2026-01-02T03:00:00.000000"),
        (["timestamp"], (dt.datetime(2026, 1, 2, 3, tzinfo=dt.UTC),), "2026-01-02T03:00:00.000000Z"),
    ]:
        assert codec(*kinds).encode(key) == text


def test_one_instant_in_two_zones_is_one_key():
    utc = dt.datetime(2026, 7, 1, 12, tzinfo=dt.UTC)
    tokyo = utc.astimezone(dt.timezone(dt.timedelta(hours=9)))
    assert codec("timestamp").encode(tokyo) == codec("timestamp").encode(utc)
    assert codec("timestamp").decode(codec("timestamp").encode(tokyo)) == (utc,)


def test_a_bare_value_stands_for_a_key_of_one_column():
    assert codec("string").encode("a") == codec("string").encode(("a",))
    assert codec("string").encode(None) == codec("string").encode((None,))
    assert codec("string").encode_all(["a", ("a",), None]) == ["a", "a", "\\N"]


def test_a_list_stands_for_a_tuple():
    assert codec("string", "bigint").encode(["DE", 1]) == codec("string", "bigint").encode(("DE", 1))
    assert codec("string", "bigint").encode_all([["DE", 1], ("DE", 1)]) == ["DE|1"] * 2
    assert codec("string").encode_all([["a"], ("a",), "a"]) == ["a"] * 3
    assert codec().encode_all([[]]) == ["\\G"]


def test_the_ungrouped_key_is_the_empty_tuple():
    assert codec().encode(GLOBAL_KEY) == "\\G"
    assert codec().encode_columns([], 3) == ["\\G"] * 3
    assert codec().encode_all([GLOBAL_KEY] * 3) == ["\\G"] * 3
    assert codec().decode("\\G") == ()
    with pytest.raises(KeyEncodingError):
        codec().decode("anything else")


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("bigint", True),
        ("bigint", 1.0),
        ("bigint", "1"),
        ("boolean", 1),
        ("double", True),
        ("double", "1.0"),
        ("double", Decimal(1)),
        ("double", 10**400),
        ("decimal(10,2)", 1.5),
        ("decimal(10,2)", True),
        ("decimal(10,2)", Decimal("NaN")),
        ("decimal(10,2)", Decimal("sNaN")),
        ("decimal(10,2)", Decimal("Infinity")),
        ("date", NAIVE),
        ("date", "2026-01-01"),
        ("timestamp", NAIVE),
        ("timestamp", dt.date(2026, 1, 1)),
        ("timestamp", 0),
        ("timestamp_ntz", dt.datetime(2026, 1, 1, tzinfo=dt.UTC)),
        ("binary", "text"),
        ("string", b"bytes"),
        ("string", 1),
        ("string", "\ud800"),
    ],
    ids=repr,
)
def test_a_value_of_another_type_is_refused_with_the_column_and_the_schema(kind, value):
    with pytest.raises(KeyEncodingError) as caught:
        codec("string", kind).encode((None, value))
    assert "k1" in str(caught.value)
    assert kind in str(caught.value)
    assert caught.value.column == "k1"


@pytest.mark.parametrize("key", [(), ("a", "b"), ("a", None, "c"), ["a", "b"]])
def test_a_key_with_another_number_of_values_is_refused(key):
    with pytest.raises(KeyEncodingError, match="k0 string"):
        codec("string").encode(key)
    with pytest.raises(KeyEncodingError, match="k0 string") as caught:
        codec("string").encode_all(["a", key, "b"])
    assert caught.value.key == repr(key)


@pytest.mark.parametrize(
    "kind",
    [
        "string collate UNICODE_CI",
        "array<int>",
        "map<string,int>",
        "struct<a:int>",
        "variant",
        "interval day",
        "void",
        "",
    ],
)
def test_a_type_that_has_no_one_equality_cannot_be_a_key(kind):
    with pytest.raises(UnsupportedTypeError) as caught:
        codec("string", kind)
    assert caught.value.column == "k1"
    assert caught.value.type == kind


@settings(max_examples=200)
@given(
    schemas,
    awkward | st.text(max_size=20) | st.sampled_from(["1|2", "\\", "\\q", "a|", "|", "\\x", "NaN|", "\\ledger"]),
)
def test_a_text_that_is_no_key_is_refused_and_nothing_else(kinds, text):
    try:
        key = codec(*kinds).decode(text)
    except KeyEncodingError as error:
        key = (text,) * len(kinds) if error.key == text else None
    assert len(key) == len(kinds)


def test_the_place_of_a_kept_ledger_is_no_key():
    from mapstate.protocol.stored_ledger import LEDGER_KEY

    for kind in VALUES:
        with pytest.raises(KeyEncodingError):
            codec(kind).decode(LEDGER_KEY)


@given(st.floats(width=64, allow_nan=False, allow_infinity=False))
def test_a_float_column_is_keyed_as_spark_holds_it_in_32_bits(value):
    """A reader types 0.1; Arrow hands a task the nearest float of 32 bits, widened."""
    assume(abs(value) < 3.4e38)
    widened = struct.unpack("f", struct.pack("f", value))[0]
    assert codec("float").encode(value) == codec("float").encode(widened)


@pytest.mark.parametrize("value", [1e300, -3.5e38])
def test_a_number_that_a_float_column_does_not_hold_is_not_the_key_of_infinity(value):
    with pytest.raises(KeyEncodingError, match="not a float"):
        codec("float").encode(value)
    assert codec("float").encode(math.inf) == "Infinity"
