"""A fast path gives what the plain one gives, byte for byte, or leaves it to that."""

from __future__ import annotations

import gc
import sys
import typing
from contextlib import suppress
from decimal import Decimal
from itertools import repeat
from zlib import crc32

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mapstate import Count, Sum
from mapstate.aggregators.fields import Fields
from mapstate.aggregators.retraction import RetractableAvg, RetractableRows, RetractableSum
from mapstate.backends.redis.connection import command
from mapstate.backends.redis.hash_layouts import HashLayout, PackedLayout
from mapstate.backends.redis.layout import StringLayout
from mapstate.backends.redis.scripts import script
from mapstate.errors import (
    LedgerLostError,
    MapStateError,
    MissingBatchesError,
    StaleBatchError,
    TooLargeError,
    ValueOverflowError,
)
from mapstate.key_types import SPECIAL, escape
from mapstate.keys import KeyCodec
from mapstate.protocol.records import CommitView
from mapstate.schema import Field, KeyField
from mapstate.serializers import RecordCodec, serializer

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8) | st.sampled_from(["\r\n$", "a\r\n$3\r\nb", "é"])
longs = st.integers(-(1 << 63), (1 << 63) - 1)


def outcome(work):
    try:
        return work()
    except MapStateError as error:
        return type(error), str(error)


@given(
    st.lists(st.tuples(texts, st.binary(max_size=12)), min_size=1, max_size=8), st.sampled_from(["v:", "", "ä:", "%d%"])
)
def test_packed_commands_are_those_of_the_plain_packer(records, head):
    keys, values = [key for key, _ in records], [value for _, value in records]
    names = [(head + key).encode() for key in keys]
    pairs = [word for name, value in zip(names, values, strict=True) for word in (name, value)]
    strings = StringLayout("s", 100, head.encode(), None)
    packed = strings.pack(keys)
    assert strings.get(packed) == command(b"MGET", *names)
    assert strings.put(packed, values) == (command(b"MSET", *pairs), 1)
    expiring = StringLayout("s", 100, head.encode(), b"99")
    sets = [command(b"SET", name, value, b"PX", b"99") for name, value in zip(names, values, strict=True)]
    assert expiring.put(expiring.pack(keys), values) == (b"".join(sets), len(keys))
    hashed = HashLayout("s", 100, b"name")
    packed = hashed.pack(keys)
    fields = [word for key, value in zip(keys, values, strict=True) for word in (key.encode(), value)]
    assert hashed.get(packed) == command(b"HMGET", b"name", *(key.encode() for key in keys))
    assert hashed.put(packed, values) == (command(b"HSET", b"name", *fields), 1)
    many = PackedLayout("s", 100, head.encode(), 11)
    packed = many.pack(keys)
    hashes = [b"%b%02d" % (head.encode(), crc32(key.encode()) % 11) for key in keys]
    number, own = b"%d" % len(keys), [key.encode() for key in keys]
    assert many.get(packed) == command(b"EVAL", script("get_fields"), number, *hashes, *own)
    assert many.put(packed, values) == (command(b"EVAL", script("put_fields"), number, *hashes, *fields), 1)


class AtMostTen(Count):
    """Another way to combine, and no fast one."""

    def combine_all(self, stored, partials):
        return [min(10, one) for one in super().combine_all(stored, partials)]


def test_a_subclass_that_combines_in_its_own_way_is_not_passed_by():
    own = Fields([Field("n", "AtMostTen", "bigint")], {"n": AtMostTen()})
    assert own.combine_all([9, 1], [5, 1]) == [10, 2]
    two = Fields([Field("n", "AtMostTen", "bigint"), Field("m", "Count", "bigint")], {"n": AtMostTen(), "m": Count()})
    assert two.combine_all([(9, 9)], [(5, 5)]) == [(10, 14)]
    rows = Fields([Field("n", "NetRows", "bigint")], {"n": RetractableRows()})
    with pytest.raises(MissingBatchesError):
        rows.combine_all([1, 3], [-2, 1])


@pytest.mark.parametrize("one", [RetractableSum("x"), RetractableAvg("x")])
def test_a_net_total_that_could_not_be_taken_back_any_more_is_refused(one):
    with pytest.raises(ValueOverflowError, match="cannot be taken back"):
        one.combine_all([(1.5, 1), (1e308, 1)], [(1.5, 1), (1e308, 1)])
    assert one.combine_all([(1e308, 1), None], [(-1e308, -1), (1.5, 1)]) == [(None, 0), (1.5, 1)]


def test_a_net_sum_of_integers_may_change_by_more_than_64_bits():
    one, most = RetractableSum("x"), 5 * 10**18
    ((change, _),) = one.assemble([[Decimal(2 * most)], [0], [2]])
    assert (change, type(change)) == (2 * most, int)
    assert one.combine_all([(-most, 1)], [(2 * most, 0)]) == [(most, 1)]
    with pytest.raises(ValueOverflowError):
        one.combine_all([(most, 1)], [(2 * most, 0)])


@pytest.mark.parametrize("key", ["x" * 101, "é" * 51])
def test_a_key_above_the_limit_is_refused_whatever_it_is_made_of(key):
    with pytest.raises(TooLargeError):
        StringLayout("s", 100, b"v:", None).pack(["a", key])


@given(st.lists(texts, max_size=8))
def test_key_texts_are_escaped_where_the_pattern_says_so(column):
    assert KeyCodec([KeyField("k", "string")]).encode_columns([column], len(column)) == [
        SPECIAL.sub(escape, text) if text else "\\E" for text in column
    ]


def one_by_one(view, records, newest):
    return [view.values([record], newest)[0] for record in records]


def by_the_rule(view, records, newest):
    """The one rule, as docs/protocol.md has it."""
    out = []
    for record in records:
        if record is None or record[0] < view.floor:
            out.append(None)
        elif record[0] < view.first_txid:
            raise LedgerLostError("")
        elif record[0] in view:
            out.append(record[1])
        elif record[0] > newest:
            raise StaleBatchError("")
        else:
            out.append(record[2])
    return out


txids = st.integers(0, 30)
ranges = st.lists(st.tuples(txids, txids).map(sorted).map(tuple), max_size=2).map(
    lambda found: [one for at, one in enumerate(sorted(found)) if not at or one[0] > sorted(found)[at - 1][1]]
)
views = st.builds(CommitView, st.none() | txids, ranges, st.integers(0, 5), st.integers(0, 8))


@given(views, st.lists(st.none() | st.tuples(txids, st.none() | longs, st.none() | longs), max_size=6), txids)
def test_values_of_a_chunk_are_those_of_the_rule(view, records, newest):
    def kind(work):
        try:
            return work()
        except MapStateError as error:
            return type(error)

    assert kind(lambda: view.values(records, newest)) == kind(lambda: by_the_rule(view, records, newest))
    assert kind(lambda: one_by_one(view, records, newest)) == kind(lambda: by_the_rule(view, records, newest))


numbers = {
    "bigint": (Sum("x"), st.none() | longs | st.integers(-9, 9)),
    "double": (Sum("x"), st.none() | st.floats()),
}


@pytest.mark.parametrize("kind", numbers)
@given(data=st.data())
def test_sums_of_a_chunk_are_those_of_its_pairs(kind, data):
    one, values = numbers[kind]
    pairs = data.draw(st.lists(st.tuples(values, values), max_size=6))
    expected = [sum_of(a, b) for a, b in pairs]
    if kind == "bigint" and any(total is not None and not -(1 << 63) <= total < 1 << 63 for total in expected):
        with pytest.raises(ValueOverflowError):
            one.combine_all([a for a, _ in pairs], [b for _, b in pairs])
        return
    assert repr(one.combine_all([a for a, _ in pairs], [b for _, b in pairs])) == repr(expected)


def sum_of(a, b):
    """The sum of two as Spark has it: null is nothing."""
    there = [value for value in (a, b) if value is not None]
    return sum(there[1:], there[0]) if there else None


def test_a_null_of_a_single_field_is_not_added_to():
    fields = Fields([Field("n", "Sum(x)", "bigint")], {"n": Sum("x")})
    assert fields.combine_all([(None,), None, 3], [1, 2, None]) == [1, 2, 3]
    assert fields.combine_all([(None,), 5], [None, 1]) == [(None,), 6]
    assert fields.combine_all([1, 5], [2, 1]) == [3, 6]


records = st.lists(st.none() | st.tuples(st.integers(0, 1 << 40), st.none() | longs, st.none() | longs), max_size=6)


@given(records, st.sampled_from(["json", "msgpack"]), st.booleans())
def test_a_chunk_is_read_as_its_records_are_one_by_one(chunk, form, damaged):
    codec = RecordCodec(serializer(form), "s", "opaque", [Field("n", "Count", "bigint")], [(0, 1)])
    stored = iter(codec.dumps([one for one in chunk if one is not None]))
    data = [None if one is None else next(stored) for one in chunk]
    if damaged:
        data.append(b"[1,2")
    keys = list(map(str, range(len(data))))
    single = outcome(lambda: [codec.loads([key], [one])[0] for key, one in zip(keys, data, strict=True)])
    assert outcome(lambda: codec.loads(keys, data)) == single
    if not damaged:
        assert single == chunk


def test_garbage_is_collected_again_after_a_chunk():
    from mapstate.spark.executor.task import _without_gc

    assert gc.isenabled()
    for _ in repeat(None, 2):
        with suppress(ZeroDivisionError), _without_gc():
            assert not gc.isenabled()
            _ = 1 / 0
        assert gc.isenabled()
    gc.disable()
    try:
        with _without_gc():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


@pytest.mark.parametrize(("state_type", "record"), [("opaque", [4, 3, 1]), ("transactional", [4, 1])])
@pytest.mark.parametrize("field_counts", [[(0, 1)], [(0, 1), (5, 2)]])
def test_records_of_a_native_store_are_read_without_looking_at_their_types_again(state_type, record, field_counts):
    """typing hashes a type in Python. For each record that costs more than all the rest of reading it."""
    fields = [Field("n", "Count()", "bigint"), Field("sum", "Sum(x)", "decimal(10,2)")][: field_counts[-1][1]]
    codec = RecordCodec(serializer("native"), "s", state_type, fields, field_counts)
    expected = codec.loads(["k"], [record])
    asked = []
    sys.setprofile(lambda frame, event, _: asked.append(event) if frame.f_code.co_filename == typing.__file__ else None)
    try:
        records = codec.loads(["k"] * 100, [record] * 100)
    finally:
        sys.setprofile(None)
    assert records == expected * 100
    assert not asked
