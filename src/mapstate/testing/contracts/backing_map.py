"""The contract of get and put, for stores and for wrappers of them."""

from __future__ import annotations

import datetime as dt
import math
from contextlib import suppress
from decimal import Decimal
from typing import Any, ClassVar, Protocol

import pytest

from mapstate.backing_map import IBackingMap
from mapstate.errors import TooLargeError, UsageError
from mapstate.keys import KeyCodec
from mapstate.maps.serialized import SerializedMap
from mapstate.protocol.stored_ledger import LEDGER_KEY
from mapstate.schema import Field, KeyField, StateType
from mapstate.serializers import RecordCodec, serializer
from mapstate.testing.contracts.capabilities import Contract, needs

VALUES: dict[str, list[Any]] = {
    "bigint": [0, 1, -1, 255, 256, 2**31 - 1, -(2**31), 2**53 + 1, 2**63 - 1, -(2**63)],
    "double": [0.0, -0.0, 1.0, 0.1, 1e308, 5e-324, -2.5, 2.0**53, math.nan, math.inf, -math.inf],
    "decimal(38,18)": [Decimal(0), Decimal("1.10"), Decimal("-0.000000000000000001"), Decimal("9" * 20)],
    "string": ["", "a", "a\0b", "\0", "é", "e\u0301", "\U0001f600", "日本", "null", '"', "\\", "\n\r\t", " "],
    "boolean": [True, False],
    "date": [dt.date(1, 1, 1), dt.date(2026, 11, 21), dt.date(9999, 12, 31)],
    "timestamp": [
        dt.datetime(1, 1, 1, tzinfo=dt.UTC),
        dt.datetime(1969, 12, 31, 23, 59, 59, 999_999, tzinfo=dt.UTC),
        dt.datetime(2026, 11, 21, 12, 30, 0, 1, tzinfo=dt.UTC),
    ],
    "timestamp_ntz": [dt.datetime(2026, 3, 29, 2, 30), dt.datetime(9999, 12, 31, 23, 59, 59, 999_999)],  # noqa: DTZ001
    "binary": [b"", b"\0", b"a\0b", bytes(range(256))],
}
"""Values at the edges of what a state can hold, by the name of their type."""

ODD_RECORDS = {
    "nothing": b"",
    "NUL": b"before\0after",
    "NUL at the end": b"before\0",
    "every byte": bytes(range(256)),
    "line breaks": b"\r\n$-1\r\n",
    "the word null": b"null",
    "a zero": b"0",
    "no UTF-8": b"\xff\xfe",
    "a number": b"12",
}
"""Contents that a store may get wrong, by name."""

_TEXTS = ("a", "A", "a ", " a", "aa", "a|b", "a:b", "a/b", "a.b", "*", "?", "%", "_", "[a]", "'", '"', "`", "\\", "--")
_ODD_TEXTS = ("é", "e\u0301", "\U0001f600", "日本", "\u202eabc", "\xa0", "a\0b", "a\nb", "", "null", "None", "0", "1e3")


def same(one: Any, other: Any) -> bool:
    """Whether both are equal and of one type, also inside tuples. NaN equals NaN here, and -0.0 differs from 0.0."""
    if type(one) is not type(other):
        return False
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, float) and math.isnan(one):
        return math.isnan(other)
    if isinstance(one, float) and math.copysign(1, one) != math.copysign(1, other):
        return False
    return bool(one == other)


class SideDoor(Protocol):
    """Reads and writes stored records with the driver's own calls, past a store, which may be wrong in both directions.

    ``key`` is the text that a store gets, ``record`` what it stores: bytes, or what a store of records takes.
    """

    def read(self, state: str, key: str) -> Any | None:
        """Return the record as it is stored, None where there is none."""
        ...

    def write(self, state: str, key: str, record: Any) -> None:
        """Store a record, as another program would."""
        ...


class BackingMapContract(Contract):
    """Get and put of any `IBackingMap` of records by key text. Fixtures: ``store``, empty, and ``side_door``.

    A store of bytes inherits the rest. A store of other records overrides ``serializer``, the name of their form in the
    ledger, and `a_record`, `odd_record`, `big_record`, `values_of`.
    """

    state: ClassVar[str] = "visits"
    serializer: ClassVar[str] = "json"

    @pytest.fixture
    def store(self) -> IBackingMap[str, Any]:
        """The empty map under test, of the state named ``state``. To override."""
        raise NotImplementedError("a contract needs a fixture `store`, or `backend` for a store that is opened")

    @pytest.fixture
    def side_door(self) -> SideDoor:
        """Reads and writes stored records past the store. To override."""
        raise NotImplementedError("a contract needs a fixture `side_door`: see mapstate.testing.contracts.SideDoor")

    def a_record(self, number: int, txid: int = 0) -> Any:
        """An ordinary record with ``txid``; each number gives another one."""
        return b"[%d,%d,null]" % (txid, number)

    def odd_record(self, kind: str) -> Any:
        """A record with contents that a store may get wrong, one of `ODD_RECORDS`."""
        return ODD_RECORDS[kind]

    def big_record(self, size: int) -> Any:
        """A record that the store counts as ``size`` bytes."""
        return (b"big\0" * (size // 4 + 1))[:size]

    def values_of(self, type_name: str) -> list[Any]:
        """Values of a type at the limits of what a state in this store can hold."""
        return VALUES[type_name]

    def records_of(self, store: Any, kind: StateType, fields: tuple[Field, ...]) -> IBackingMap[str, Any]:
        """A map of records of a state type, ``(txid, curr, prev)`` and so on, over a store or its writer."""
        return SerializedMap(
            store, RecordCodec(serializer(self.serializer), self.state, kind, fields, [(0, len(fields))])
        )

    # Get

    def test_absent_keys_are_none(self, store: Any) -> None:
        assert store.multi_get(["a"]) == [None]
        assert store.multi_get(["a", "b", "c"]) == [None, None, None]

    def test_a_record_comes_back_as_it_was_put(self, store: Any) -> None:
        store.multi_put(["a"], [self.a_record(1)])
        assert store.multi_get(["a"]) == [self.a_record(1)]

    def test_records_come_in_the_order_of_the_keys_that_were_asked_for(self, store: Any) -> None:
        store.multi_put(["c", "a", "b"], [self.a_record(3), self.a_record(1), self.a_record(2)])
        for keys in ("abc", "cba", "bca"):
            assert store.multi_get(list(keys)) == [self.a_record(" abc".index(key)) for key in keys]

    def test_an_absent_key_among_others_keeps_its_place(self, store: Any) -> None:
        store.multi_put(["a", "b"], [self.a_record(1), self.a_record(2)])
        assert store.multi_get(["x", "b", "y", "a"]) == [None, self.a_record(2), None, self.a_record(1)]

    def test_a_repeated_key_is_answered_at_each_of_its_places(self, store: Any) -> None:
        store.multi_put(["a", "b"], [self.a_record(1), self.a_record(2)])
        one, two = self.a_record(1), self.a_record(2)
        assert store.multi_get(["a", "b", "a", "x", "x", "a"]) == [one, two, one, None, None, one]

    def test_no_keys_are_an_empty_answer_and_nothing_to_put(self, store: Any) -> None:
        assert store.multi_get([]) == []
        store.multi_put([], [])
        assert store.multi_get([]) == []

    def test_keys_may_come_in_any_sequence(self, store: Any) -> None:
        store.multi_put(("a", "b"), (self.a_record(1), self.a_record(2)))
        assert store.multi_get(("b", "a")) == [self.a_record(2), self.a_record(1)]

    # Put

    def test_what_is_put_is_really_stored(self, store: Any, side_door: SideDoor) -> None:
        store.multi_put(["a", "b"], [self.a_record(1), self.a_record(2)])
        assert side_door.read(self.state, "a") == self.a_record(1)
        assert side_door.read(self.state, "b") == self.a_record(2)
        assert side_door.read(self.state, "c") is None

    def test_what_is_stored_is_what_is_read(self, store: Any, side_door: SideDoor) -> None:
        store.multi_put(["b"], [self.a_record(2)])
        side_door.write(self.state, "a", self.a_record(1))
        assert store.multi_get(["a", "b", "c"]) == [self.a_record(1), self.a_record(2), None]

    def test_a_put_replaces_what_was_there(self, store: Any, side_door: SideDoor) -> None:
        for number in (1, 2):
            store.multi_put(["a"], [self.a_record(number)])
            assert store.multi_get(["a"]) == [self.a_record(number)]
            assert side_door.read(self.state, "a") == self.a_record(number)

    def test_a_put_leaves_other_keys_alone(self, store: Any) -> None:
        store.multi_put(["a", "b"], [self.a_record(1), self.a_record(2)])
        store.multi_put(["b", "c"], [self.a_record(3), self.a_record(4)])
        assert store.multi_get(["a", "b", "c"]) == [self.a_record(1), self.a_record(3), self.a_record(4)]

    def test_of_a_repeated_key_the_last_record_stays(self, store: Any, side_door: SideDoor) -> None:
        store.multi_put(["a", "b", "a"], [self.a_record(1), self.a_record(2), self.a_record(3)])
        assert store.multi_get(["a", "b"]) == [self.a_record(3), self.a_record(2)]
        assert side_door.read(self.state, "a") == self.a_record(3)

    def test_a_put_of_unequal_lengths_is_refused_and_writes_nothing(self, store: Any, side_door: SideDoor) -> None:
        for keys, records in ((["a", "b"], [self.a_record(1)]), (["a"], [self.a_record(1), self.a_record(2)])):
            with pytest.raises(UsageError):
                store.multi_put(keys, records)
        assert side_door.read(self.state, "a") is None
        assert side_door.read(self.state, "b") is None

    @pytest.mark.parametrize("size", [1, 2, 9, 10, 99, 100, 1000, 5000])
    def test_a_chunk_of_any_size_is_stored_and_read_whole(self, store: Any, size: int) -> None:
        keys = [f"{'k' * (i % 23)}{i}" for i in range(size)]
        records = [self.a_record(i) for i in range(size)]
        store.multi_put(keys, records)
        assert store.multi_get(keys) == records
        assert store.multi_get([*reversed(keys), "no"]) == [*reversed(records), None]

    def test_a_chunk_is_in_the_store_and_not_only_in_the_answer(self, store: Any, side_door: SideDoor) -> None:
        keys = [f"k{i}" for i in range(100)]
        store.multi_put(keys, [self.a_record(i) for i in range(100)])
        assert [side_door.read(self.state, key) for key in keys] == [self.a_record(i) for i in range(100)]

    # Keys and records at the edges

    def test_keys_that_look_alike_are_different_keys(self, store: Any, side_door: SideDoor) -> None:
        """Every key that `mapstate.keys` can make: no control characters, never empty; and the ledger's own."""
        codec = KeyCodec([KeyField("text", "string")])
        keys: list[Any] = [codec.encode((text,)) for text in (*_TEXTS, *_ODD_TEXTS)]
        keys += [codec.encode((None,)), KeyCodec([]).encode(()), LEDGER_KEY]
        keys.append("k" * min(1000, self.max_key_bytes or 1000))
        records = [self.a_record(i) for i in range(len(keys))]
        assert store.multi_get(keys) == [None] * len(keys)
        store.multi_put(keys, records)
        assert store.multi_get(keys) == records
        assert [side_door.read(self.state, key) for key in keys] == records

    @pytest.mark.parametrize("kind", list(ODD_RECORDS))
    def test_an_odd_record_comes_back_unchanged(self, store: Any, side_door: SideDoor, kind: str) -> None:
        record = self.odd_record(kind)
        store.multi_put(["before", "odd", "after"], [self.a_record(1), record, self.a_record(2)])
        assert store.multi_get(["before", "odd", "after"]) == [self.a_record(1), record, self.a_record(2)]
        assert side_door.read(self.state, "odd") == record

    def test_a_record_of_a_megabyte_comes_back_unchanged(self, store: Any, side_door: SideDoor) -> None:
        size = min(1_000_000, self.max_value_bytes or 1_000_000)
        record = self.big_record(size)
        store.multi_put(["a", "big"], [self.a_record(1), record])
        assert store.multi_get(["big", "a"]) == [record, self.a_record(1)]
        assert side_door.read(self.state, "big") == record

    @needs("max_value_bytes")
    def test_a_record_at_the_limit_is_stored_and_one_above_it_refuses_the_whole_put(
        self, store: Any, side_door: SideDoor
    ) -> None:
        limit = self.max_value_bytes or 0
        keys = ["a", "big", "c"]
        store.multi_put(keys, [self.a_record(1), self.big_record(limit), self.a_record(3)])
        assert store.multi_get(keys) == [self.a_record(1), self.big_record(limit), self.a_record(3)]
        with pytest.raises(TooLargeError) as caught:
            store.multi_put(["d", "big", "f"], [self.a_record(4), self.big_record(limit + 1), self.a_record(6)])
        assert "big" in str(caught.value), "the message names the key"
        assert [side_door.read(self.state, key) for key in ("d", "big", "f")] == [None, self.big_record(limit), None]

    @needs("max_key_bytes")
    def test_a_key_at_the_limit_is_stored_and_one_above_it_refuses_the_whole_put(
        self, store: Any, side_door: SideDoor
    ) -> None:
        longest = "é" + "k" * ((self.max_key_bytes or 0) - 2)  # the first character has two bytes
        longer = longest + "k"
        store.multi_put(["a", longest], [self.a_record(1), self.a_record(2)])
        assert store.multi_get([longest, "a"]) == [self.a_record(2), self.a_record(1)]
        with pytest.raises(TooLargeError) as caught:
            store.multi_put(["b", longer, "c"], [self.a_record(3)] * 3)
        assert longer[:50] in str(caught.value), "the message names the key"
        assert [side_door.read(self.state, key) for key in ("b", longest, "c")] == [None, self.a_record(2), None]
        with suppress(TooLargeError):  # it may refuse to read such a key, too
            assert store.multi_get([longer]) == [None]

    @pytest.mark.parametrize("type_name", list(VALUES))
    def test_values_of_each_type_come_back_equal_and_of_their_type(self, store: Any, type_name: str) -> None:
        values = self.values_of(type_name)
        records = self.records_of(store, "opaque", (Field("value", "Last", type_name),))
        keys = [f"k{i}" for i in range(len(values) + 1)]
        written = [(i, value, values[i - 1]) for i, value in enumerate(values)] + [(0, None, None)]
        records.multi_put(keys, written)
        read = [tuple(record or ()) for record in records.multi_get(keys)]
        assert [record for record, other in zip(read, written, strict=True) if not same(record, other)] == []
