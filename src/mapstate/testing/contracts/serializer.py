"""The contract of a wire format: a value comes back equal and of its type, or is refused."""

from __future__ import annotations

from typing import Any

import pytest

from mapstate.errors import CorruptRecordError, SerializationError
from mapstate.schema import Field, StateType
from mapstate.serializers import RecordCodec, Serializer
from mapstate.testing.contracts.backing_map import VALUES, same

_KINDS: tuple[StateType, ...] = ("non-transactional", "transactional", "opaque")
_COUNT = Field("n", "Count", "bigint")


def record(kind: StateType, txid: int, value: Any, before: Any) -> Any:
    """A record of a state type."""
    return value if kind == "non-transactional" else (txid, value) if kind == "transactional" else (txid, value, before)


class SerializerContract:
    """Records of each state type as bytes and back. Fixture: ``serializer``."""

    @pytest.fixture
    def serializer(self) -> Serializer:
        """The format under test. To override."""
        raise NotImplementedError("the contract of a serializer needs a fixture `serializer`")

    def codec(self, serializer: Serializer, kind: StateType, *fields: Field) -> RecordCodec:
        """The codec of a state with these fields."""
        return RecordCodec(serializer, "visits", kind, fields, [(0, len(fields))])

    def _comes_back(self, codec: RecordCodec, records: list[Any]) -> None:
        data = codec.dumps(records)
        assert len(data) == len(records)
        assert all(type(record) is bytes for record in data)
        values = codec.loads([f"k{i}" for i in range(len(data))], data)
        pairs = list(zip(map(_plain, values), records, strict=True))
        assert [pair for pair in pairs if not same(*pair)] == []

    @pytest.mark.parametrize("kind", _KINDS)
    @pytest.mark.parametrize("type_name", list(VALUES))
    def test_values_of_each_type_come_back_equal_and_of_their_type(
        self, serializer: Serializer, kind: StateType, type_name: str
    ) -> None:
        values = VALUES[type_name]
        codec = self.codec(serializer, kind, Field("value", "Last", type_name))
        self._comes_back(codec, [record(kind, i, value, values[i - 1]) for i, value in enumerate(values)])

    @pytest.mark.parametrize("kind", _KINDS)
    def test_several_fields_come_back_with_their_nulls(self, serializer: Serializer, kind: StateType) -> None:
        fields = [Field(name, "Last", name) for name in VALUES]
        values = [tuple(VALUES[name][i] if i < len(VALUES[name]) else None for name in VALUES) for i in range(13)]
        codec = self.codec(serializer, kind, *fields)
        self._comes_back(codec, [record(kind, i, value, values[i - 1]) for i, value in enumerate(values)])

    @pytest.mark.parametrize("kind", ["transactional", "opaque"])
    def test_a_removed_key_and_a_null_are_told_apart(self, serializer: Serializer, kind: StateType) -> None:
        codec = self.codec(serializer, kind, Field("value", "Last", "bigint"))
        self._comes_back(codec, [record(kind, 0, None, (None,)), record(kind, 1, (None,), None)])

    def test_structs_inside_a_field_come_back(self, serializer: Serializer) -> None:
        codec = self.codec(serializer, "opaque", Field("mean", "Avg", "struct<sum:double,count:bigint>"))
        self._comes_back(codec, [(0, (1.5, 2), None), (1, (float("nan"), 2**63 - 1), (-0.0, 0)), (2, (None, 0), None)])

    @pytest.mark.parametrize("txid", [0, 1, 2**53 + 1, 2**63 - 1])
    def test_a_txid_of_any_size_comes_back(self, serializer: Serializer, txid: int) -> None:
        self._comes_back(self.codec(serializer, "opaque", _COUNT), [(txid, 1, None)])
        self._comes_back(self.codec(serializer, "transactional", _COUNT), [(txid, 1)])

    def test_many_records_come_back_in_order_and_none_at_all_is_no_error(self, serializer: Serializer) -> None:
        codec = self.codec(serializer, "opaque", _COUNT)
        assert codec.dumps([]) == []
        assert codec.loads([], []) == []
        self._comes_back(codec, [(i, i, i - 1) for i in range(10_000)])

    def test_an_absent_record_stays_absent_among_others(self, serializer: Serializer) -> None:
        codec = self.codec(serializer, "opaque", _COUNT)
        [data] = codec.dumps([(1, 2, None)])
        assert [record and tuple(record) for record in codec.loads(["a", "b", "c"], [None, data, None])] == [
            None,
            (1, 2, None),
            None,
        ]

    def test_equal_records_are_equal_bytes(self, serializer: Serializer) -> None:
        codec = self.codec(serializer, "opaque", _COUNT)
        assert codec.dumps([(1, 2, 1)] * 3) == codec.dumps([(1, 2, 1)]) * 3

    @pytest.mark.parametrize("value", [2**64, -(2**64) - 1, object(), float])
    def test_a_value_that_would_not_come_back_is_refused(self, serializer: Serializer, value: Any) -> None:
        codec = self.codec(serializer, "opaque", Field("value", "Own", "any"))
        with pytest.raises(SerializationError, match="visits"):
            codec.dumps([(0, 1, None), (0, value, None)])

    @pytest.mark.parametrize("damage", ["nothing", "half", "more", "other"])
    def test_a_record_that_cannot_be_read_is_an_error_that_names_it(self, serializer: Serializer, damage: str) -> None:
        codec = self.codec(serializer, "opaque", _COUNT)
        [good] = codec.dumps([(1, 2, 1)])
        bad = {"nothing": b"", "half": good[:-1], "more": good + good, "other": b"\x80\xff text"}[damage]
        with pytest.raises(CorruptRecordError, match="user-42") as caught:
            codec.loads(["user-7", "user-42"], [good, bad])
        assert caught.value.key == "user-42"

    def test_a_record_of_another_state_type_is_no_record_of_this(self, serializer: Serializer) -> None:
        [data] = self.codec(serializer, "transactional", _COUNT).dumps([(1, 2)])
        with pytest.raises(CorruptRecordError):
            self.codec(serializer, "opaque", _COUNT).loads(["a"], [data])


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, tuple) else value
