"""Blocks: their records by brute force, and the merge in columns beside the one key by key."""

from __future__ import annotations

import datetime as dt
import math
import random
import time
from decimal import Decimal
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import msgspec
import pyarrow as pa
import pytest

from mapstate import Avg, Count, Max, Min, Sum, opaque, open_reader
from mapstate.aggregators.fields import Fields
from mapstate.backends.memory import MemoryBackend
from mapstate.errors import ConfigurationError, CorruptRecordError, KeyEncodingError, ValueOverflowError
from mapstate.keys import KeyCodec
from mapstate.maps import OpaqueMap
from mapstate.maps.serialized import Room, SerializedMap
from mapstate.protocol.ledger_record import Commit, OpenRequest
from mapstate.protocol.ledgers import Ledgers
from mapstate.protocol.records import CommitView
from mapstate.reader.tables import Columns
from mapstate.schema import Field, KeyField
from mapstate.serializers import blocks_of, record_codec, serializer
from mapstate.serializers.blocks import Block, BlockCodec, block_names, block_numbers
from mapstate.spark.executor.block_columns import BlockColumns, BlockRows, merged
from mapstate.spark.executor.block_task import whole_blocks

AGGREGATORS = {
    "n": Count(),
    "total": Sum("amount"),
    "mean": Avg("amount"),
    "least": Min("amount"),
    "most": Max("price"),
}
FIELDS = [
    Field("n", "Count", "bigint"),
    Field("total", "Sum(amount)", "bigint"),
    Field("mean", "Avg(amount)", "struct<sum:decimal(38,0),count:bigint>"),
    Field("least", "Min(amount)", "bigint"),
    Field("most", "Max(price)", "double"),
]
NAMES = [
    "",
    "a",
    "ab",
    "b",
    "a|b",
    "a\\b",
    "line\nfeed",
    "tab\t",
    "é",
    "\x85",
    "\\N",
    "N",
    *(f"user-{i}" for i in range(60)),
]
BIG = 2**63 - 1


def codec(fields: Any = FIELDS, blocks: int = 5) -> BlockCodec:
    return BlockCodec("s", fields, blocks)


def block_of(blocks: BlockCodec, values: dict[str, Any]) -> Block | None:
    return blocks.block("".join(f"{key}\n" for key in values).encode(), list(values.values()))


def as_dict(blocks: BlockCodec, block: Block | None) -> dict[str, Any]:
    return {} if block is None else dict(zip(block.texts(), blocks.values(block), strict=True))


class Store(dict[str, bytes]):
    """A map of bytes, in which an orphaned attempt may leave any part of what it wrote."""

    def multi_get(self, keys: Any) -> list[Any]:
        return [self.get(key) for key in keys]

    def multi_put(self, keys: Any, values: Any) -> None:
        self.update(zip(keys, values, strict=True))


@pytest.mark.parametrize("seed", range(60))
def test_a_history_of_attempts_counts_as_one_key_by_key_does(seed):
    draw = random.Random(seed)
    count, fields = draw.choice([1, 2, 5, 40]), Fields(FIELDS, AGGREGATORS)
    keys, store, truth = KeyCodec([KeyField("k", "string")]), Store(), dict[str, Any]()
    last, dead = None, list[tuple[int, int]]()
    removes = draw.random() < 0.5

    def combine_all(olds: list[Any], rows: list[Any]) -> list[Any]:
        values = fields.combine_all(olds, rows)
        return [None if removes and old and value[0] % 2 else value for old, value in zip(olds, values, strict=True)]

    for txid in range(draw.randint(3, 12)):
        chosen = draw.sample(NAMES, draw.choice([1, 3, 20, len(NAMES)]))
        texts = keys.encode_columns([chosen], len(chosen))
        amounts = [draw.choice([None, 0, 1, -1, 127, 128, -129, 2**15, 2**31, 2**40]) for _ in texts]
        partials = [
            (
                draw.randint(1, 9),
                amount,
                (None if amount is None else Decimal(amount), int(amount is not None)),
                amount,
                None if amount is None else amount / 3,
            )
            for amount in amounts
        ]
        by_block: dict[int, tuple[list[str], list[Any]]] = {}
        for text, number, partial in zip(texts, block_numbers(texts, count), partials, strict=True):
            rows = by_block.setdefault(number, ([], []))
            rows[0].append(text)
            rows[1].append(partial)
        blocks = codec(blocks=count)
        view = CommitView(last, dead)
        state = OpaqueMap(SerializedMap(store, blocks), view, written_once=True)
        state.begin_commit(txid)
        counts = draw.random() < 0.6
        written = sorted(by_block) if counts else [number for number in by_block if draw.random() < 0.7]
        state.multi_combine(
            block_names(written, count),
            [by_block[number] for number in written],
            lambda old, rows, of=blocks: merged(of, old, rows, combine_all),
        )
        olds = [truth.get(text) for text in texts]
        news = combine_all(olds, partials)
        names = block_names(written, count)
        expected = {
            text: (txid, value, old)
            for text, number, value, old in zip(texts, block_numbers(texts, count), news, olds, strict=True)
            if number in written
        }
        for read in (names, [*store]):  # at once, and with what others wrote
            pairs = codec(blocks=count).written(read, store.multi_get(read), txid)
            assert (len(pairs), dict(pairs)) == (len(expected), expected)
        if counts:
            first = 0 if last is None else last + 1
            dead += [(first, txid - 1)] if first < txid else []
            last = txid
            truth |= dict(zip(texts, news, strict=True))
            truth = {text: value for text, value in truth.items() if value is not None}
        found = dict[str, Any]()
        names = list(store)
        for name, block in zip(
            names,
            CommitView(last, dead).values(codec(blocks=count).loads(names, store.multi_get(names)), txid),
            strict=True,
        ):
            values = as_dict(codec(blocks=count), block)
            assert block_names(block_numbers([*values], count), count) == [name] * len(values)
            found |= values
        assert found == truth
        for text in texts[:5]:
            own = codec(blocks=count)
            places = own.places_of([text])
            block = CommitView(last, dead).values(own.loads([*places], store.multi_get([*places])), txid)
            assert own.of_keys([text], places, block) == [truth.get(text)]
        places = own.places_of(texts)
        found_blocks = CommitView(last, dead).values(own.loads([*places], store.multi_get([*places])), txid)
        assert own.of_keys(texts, places, found_blocks) == [truth.get(text) for text in texts]


COLUMNAR = [Field("n", "Count", "bigint"), Field("total", "Sum(x)", "bigint"), Field("sum", "Sum(d)", "double")]
COLUMNAR += [Field("least", "Min(x)", "bigint"), Field("most", "Max(i)", "int")]
OF_COLUMNS = {"n": Count(), "total": Sum("x"), "sum": Sum("d"), "least": Min("x"), "most": Max("i")}


def rows_of(texts: list[str], count: int, draw: random.Random, nulls: float, big: float) -> list[pa.Array]:
    numbers = block_numbers(KeyCodec([KeyField("k", "string")]).encode_columns([texts], len(texts)), count)
    ordered = sorted(zip(numbers, texts, strict=True), key=lambda pair: pair[0])

    def whole() -> int | None:
        if draw.random() < nulls:
            return None
        return draw.choice([BIG, -BIG]) if draw.random() < big else draw.randint(-300, 300)

    amounts = [whole() for _ in ordered]
    return [
        pa.array([number for number, _ in ordered], pa.int32()),
        pa.array([text for _, text in ordered], pa.string()),
        pa.array([draw.randint(1, 300) for _ in ordered], pa.int64()),
        pa.array(amounts, pa.int64()),
        pa.array([int(amount is not None) for amount in amounts], pa.int64()),
        pa.array([draw.choice([0.0, -0.0, math.nan, math.inf, 1.5, -2.25]) for _ in ordered], pa.float64()),
        pa.array([draw.randint(-9, 9) for _ in ordered], pa.int64()),
        pa.array([draw.randint(-9, 9) for _ in ordered], pa.int32()),
        pa.array([1] * len(ordered), pa.int64()),
    ]


@pytest.mark.parametrize("seed", range(80))
def test_the_merge_in_columns_is_the_merge_key_by_key(seed):
    draw = random.Random(seed)
    count, fields = draw.choice([1, 3, 17]), Fields(COLUMNAR, OF_COLUMNS)
    sizes = [1, 2, 1, 1, 1]
    nulls, big, names = draw.choice([0.0, 0.05]), draw.choice([0.0, 0.02]), NAMES if draw.random() < 0.3 else NAMES[12:]
    own, columns, keys = codec(COLUMNAR, count), BlockColumns(fields, sizes, 1), KeyCodec([KeyField("k", "string")])
    assert columns.fits
    stored: dict[int, Block | None] = {}
    taken = 0

    def in_python(arrays: Any, rows: int) -> tuple[list[Any], list[Any]]:
        texts, *partials = [array.to_pylist() for array in arrays]
        per_field, at = [], 0
        for size in sizes:
            per_field.append(partials[at : at + size])
            at += size
        return keys.encode_columns([texts], rows), fields.from_columns(per_field)

    for _ in range(6):
        chosen = draw.sample(names, draw.choice([1, 5, len(names)]))
        rows = BlockRows(rows_of(chosen, count, draw, nulls, big), in_python)
        bases = [stored.get(number) for number in rows.numbers]
        quick = columns.merged(bases, rows, is_plain=rows.is_plain())
        try:
            slow = merged(own, bases, rows.of_blocks(), fields.combine_all)
        except ValueOverflowError:
            assert quick is None
            return
        if quick is not None:
            taken += 1
            for one, other in zip(quick, slow, strict=True):
                assert msgspec.msgpack.encode(one and (one.keys, one.columns, one.touched)) == msgspec.msgpack.encode(
                    other and (other.keys, other.columns, other.touched)
                )
        stored.update(zip(rows.numbers, slow, strict=True))
    assert taken or nulls or big


def test_an_overflow_in_columns_is_left_to_python_which_names_it():
    fields = Fields(COLUMNAR[:1], OF_COLUMNS)
    own = codec(COLUMNAR[:1], 1)
    base = block_of(own, {"a": BIG})
    arrays = [pa.array([0], pa.int32()), pa.array(["a"]), pa.array([1], pa.int64()), pa.array([1], pa.int64())]
    rows = BlockRows(arrays, lambda *_: (["a"], [1]))
    assert BlockColumns(fields, [1], 1).merged([base], rows, is_plain=True) is None
    with pytest.raises(ValueOverflowError):
        merged(own, [base], rows.of_blocks(), fields.combine_all)


VALUES: dict[str, list[Any]] = {
    "bigint": [0, 1, -1, 127, 128, 2**31, BIG, -BIG - 1, None],
    "int": [0, 7, None],
    "double": [0.0, -0.0, 1.5, math.inf, None],
    "float": [0.5, None],
    "boolean": [True, False, None],
    "date": [dt.date(1, 1, 1), dt.date(9999, 12, 31), None],
    "timestamp": [dt.datetime(2026, 1, 1, 1, 2, 3, 4, dt.UTC), None],
    "timestamp_ntz": [dt.datetime(2026, 1, 1, 1, 2, 3, 4), None],
    "string": ["", "a\nb", "é", None],
    "decimal(10,2)": [Decimal("1.50"), Decimal("-0.01"), None],
    "decimal(38,4)": [Decimal("1234567890123456789012345678901234.5678"), Decimal("0.0001"), None],
    "struct<by:timestamp,value:string>": [(dt.datetime(2026, 1, 1, tzinfo=dt.UTC), "x"), (None, None), None],
    "struct<sum:decimal(38,0),count:bigint>": [(Decimal(3), 2), (None, 0), (Decimal(2) ** 80, 1), None],
}


@pytest.mark.parametrize("kind", VALUES)
@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside another field"])
def test_each_type_of_value_comes_back(kind, beside):
    fields = [Field("f", "F", kind), *([Field("n", "Count", "bigint")] if beside else [])]
    own = codec(fields)
    for values in ([value for value in VALUES[kind] if value is not None], VALUES[kind]):
        given = [(value, 1) if beside else (None,) if value is None else value for value in values]
        block = block_of(own, {f"k{i}": value for i, value in enumerate(given)})
        ((_, now, before),) = own.loads(["0"], own.dumps([(7, block, block)]))
        for read in (now, before):
            assert own.values(read) == given
            assert [own.value(read, i) for i in range(len(given))] == given
            assert list(map(repr, own.values(read))) == list(map(repr, given))
        for i, value in enumerate(given):
            changed = own.with_value(now, i, given[0])
            assert changed is None or own.values(changed) == [*given[:i], given[0], *given[i + 1 :]], value
        assert own.values(now) == given


@pytest.mark.parametrize("seed", range(40))
def test_many_blocks_read_at_once_have_the_values_that_each_was_made_of(seed):
    draw = random.Random(seed)
    kinds = draw.sample([*VALUES], draw.choice([1, 2, 4]))
    fields = [Field(f"f{i}", "F", kind) for i, kind in enumerate(kinds)]
    own, older, count = codec(fields, 6), codec(fields[:1], 6), len(fields)
    texts = [f"k{i}" for i in range(60)]
    by_block: dict[int, list[str]] = {}
    for text, number in zip(texts, block_numbers(texts, 6), strict=True):
        by_block.setdefault(number, []).append(text)
    records, truth, nulls = dict[str, Any](), dict[str, Any](), draw.choice([0, 0.3, 1])

    def made(its: list[str], width: int) -> dict[str, Any]:
        rows = [
            tuple(
                draw.choice([*VALUES[kind][:-1], *([None] if draw.random() < nulls else [])]) for kind in kinds[:width]
            )
            for _ in its
        ]
        return dict(
            zip(its, rows if width > 1 else [(None,) if row == (None,) else row[0] for row in rows], strict=True)
        )

    for number, its in by_block.items():
        writer, width = (older, 1) if draw.random() < 0.3 else (own, count)
        before = made(draw.sample(its, draw.randint(1, len(its))), width)
        now = made([*before, *(text for text in its if text not in before)], width)
        if draw.random() < 0.3:  # a key is gone
            now = dict(draw.sample([*now.items()], draw.randint(0, len(now))))
        txid = draw.choice([7, 8])  # of which 8 does not count
        (name,) = block_names([number], 6)
        (records[name],) = writer.dumps([(txid, block_of(writer, now), block_of(writer, before))])
        counts = now if txid == 7 else before
        if width < count:
            counts = {
                text: ((None,) if value == (None,) else (value,)) + (None,) * (count - 1)
                for text, value in counts.items()
            }
        truth |= counts
    names = ["absent", *records]
    blocks = CommitView(7).values(own.loads(names, [None, *records.values()]), 8)
    there = [block for block in own.made(blocks) if block is not None]
    found = dict(zip((text for block in there for text in block.texts()), own.all_values(there), strict=True))
    assert found == truth
    assert {text: repr(value) for text, value in found.items()} == {text: repr(value) for text, value in truth.items()}
    rows = [value if count > 1 else (None if value == (None,) else value,) for value in found.values()]
    assert list(map(repr, zip(*own.columns(there), strict=True))) == list(map(repr, rows))
    assert own.all_values([]) == []
    for asked in (texts, draw.sample(texts, 5), ["nobody", "k", *draw.choices(texts, k=9)]):
        places = own.places_of(asked)
        read = CommitView(7).values(own.loads([*places], [records.get(name) for name in places]), 8)
        assert list(map(repr, own.of_keys(asked, places, read))) == [repr(truth.get(text)) for text in asked]


KEYS: dict[str, list[Any]] = {
    "string": ["a", "b", "é", "", "a|b", "a\\b", "\\N", "line\nfeed", None, *(f"user-{i}" for i in range(30))],
    "plain string": [f"user-{i}" for i in range(30)],
    "bigint": [0, 7, -7, BIG, *range(100, 120)],
    "boolean": [True, False],
    "date": [dt.date(1, 1, 1), dt.date(2026, 3, 1), dt.date(9999, 12, 31)],
    "timestamp": [dt.datetime(2026, 1, day, 1, 2, 3, 4, dt.UTC) for day in range(1, 30)],
}
SHOWN = {
    "struct<by:timestamp,value:string>": "ArgMax(x, by=t)",
    "struct<sum:decimal(38,0),count:bigint>": "Avg(amount)",
}


@pytest.mark.parametrize("seed", range(60))
def test_a_table_of_blocks_is_that_of_their_keys_one_by_one(seed, monkeypatch):
    draw = random.Random(seed)
    key_kinds = draw.sample([*KEYS], draw.choice([1, 1, 2]))
    columns = [KeyField(f"k{i}", kind.removeprefix("plain ")) for i, kind in enumerate(key_kinds)]
    fields = [
        Field(f"f{i}", SHOWN.get(kind, "Own"), kind)
        for i, kind in enumerate(draw.sample([*VALUES], draw.choice([1, 3])))
    ]
    backend, nulls = MemoryBackend(f"blocks-{seed}"), draw.choice([0, 0.3])
    spec = opaque(backend, "s", blocks=draw.choice([1, 7]))
    keys, store = KeyCodec(columns), spec.open()
    ledgers = Ledgers([store], [opening(spec, columns, fields)], ["refuse"])
    ledgers.open()
    blocks = record_codec(ledgers.records[0])
    assert isinstance(blocks, BlockCodec)
    asked = [*{tuple(draw.choice(KEYS[kind]) for kind in key_kinds) for _ in range(80)}]
    truth: dict[Any, Any] = {}
    for batch_id, counts in enumerate([True, False, True, False]):
        (attempt,) = ledgers.begin(batch_id - (batch_id > 1))
        state = OpaqueMap(SerializedMap(store, blocks), attempt.view, written_once=True)
        state.begin_commit(attempt.txid)
        chosen = draw.sample(asked, draw.randint(1, len(asked)))
        texts = keys.encode_all(chosen)
        new = [
            tuple(draw.choice([*VALUES[of.type][:-1], *([None] if draw.random() < nulls else [])]) for of in fields)
            for _ in texts
        ]
        new = [None if batch_id and draw.random() < 0.1 else row for row in new]
        values = [row if row is None or len(fields) > 1 or row == (None,) else row[0] for row in new]
        places = blocks.places_of(texts)
        state.multi_combine(
            [*places],
            [([texts[i] for i in of], [values[i] for i in of]) for of in places.values()],
            lambda old, rows: merged(blocks, old, rows, lambda _, partials: partials),
        )
        if counts:
            ledgers.commit([Commit(batch_id=batch_id - (batch_id > 1), txid=attempt.txid, owner="test")])
            truth = {key: row for key, row in (truth | dict(zip(chosen, new, strict=True))).items() if row is not None}
    with open_reader(backend, "s") as reader:
        rows = {key: tuple(named.values()) for key, named in reader.scan()}
        assert rows.keys() == truth.keys()
        for i, of in enumerate(fields):
            if of.type not in SHOWN:
                assert {key: repr(row[i]) for key, row in rows.items()} == {
                    key: repr(row[i]) for key, row in truth.items()
                }
        ((shown, found, stored),) = reader.part("", 1000)
        one_by_one = Columns(columns, shown).batch(found, shown, stored)
        table = reader.to_arrow()
        assert table.equals(pa.Table.from_batches([one_by_one]))
        assert list(map(repr, table.to_pylist())) == list(map(repr, one_by_one.to_pylist()))
        names = ["f0", "k0"]
        made = Columns(columns, shown, names)
        (batch,) = made.batches(reader.part("", made=made))
        assert batch.equals(one_by_one.select(names))
        assert reader.count_keys().found == len(truth)
        if "string" not in key_kinds:  # no key has an escape, so no page goes key by key
            monkeypatch.delattr(Columns, "batch")
            assert reader.to_arrow().equals(table)


def test_a_scan_names_a_block_whose_value_before_cannot_be_read_behind_all_others():
    spec = opaque(MemoryBackend("blocks-unreadable"), "s", blocks=9)
    columns, store = [KeyField("k", "string")], spec.open()
    ledgers = Ledgers([store], [opening(spec, columns, FIELDS[:1])], ["refuse"])
    ledgers.open()
    own = codec(FIELDS[:1], 9)
    (attempt,) = ledgers.begin(0)
    places = own.places_of([f"k{i}" for i in range(40)])
    assert len(places) == 9
    for name, of in places.items():
        store.multi_put([name], own.dumps([(attempt.txid, block_of(own, {f"k{i}": i for i in of}), None)]))
    ledgers.commit([Commit(batch_id=0, txid=attempt.txid, owner="test")])
    (attempt,) = ledgers.begin(1)  # and it dies
    store.multi_put(
        ["4"], [msgspec.msgpack.encode([attempt.txid, b"a\nb\n", [b"b\1\2", b""], 1, [b"b", b""], None, None])]
    )
    with open_reader(spec.backend, "s") as reader:
        found = []
        with pytest.raises(
            CorruptRecordError, match="1 keys cannot be read: '4'.*block '4': the value before"
        ) as raised:
            found.extend(key for (key,), _ in reader.scan())
        assert raised.value.facts["keys"] == ["4"]
        with pytest.raises(CorruptRecordError, match="1 keys cannot be read: '4'.*block '4': the value before"):
            reader.to_arrow()
        with pytest.raises(CorruptRecordError, match="block '4'"):
            reader.get(f"k{places['4'][0]}")
    assert {*found} == {f"k{i}" for i in range(40)} - {f"k{i}" for i in places["4"]}


def opening(spec: Any, columns: Any, fields: Any) -> OpenRequest:
    return OpenRequest(
        state="s",
        type="opaque",
        serializer=spec.serializer,
        keys=tuple(columns),
        fields=tuple(fields),
        owner="test",
        clock_txid=280_000_000,
    )


def test_a_field_that_was_added_later_is_null_in_older_blocks():
    older, newer = codec(FIELDS[:1]), codec(FIELDS[:2])
    block = block_of(older, {"a": 3, "b": 4})
    ((_, now, before),) = newer.loads(["0"], older.dumps([(7, block, block)]))
    assert newer.values(now) == newer.values(before) == [(3, None), (4, None)]
    assert newer.value(now, 1) == (4, None)
    fields = Fields(FIELDS[:2], AGGREGATORS)
    (after,) = merged(newer, [now], [(["b"], [(1, 5)])], fields.combine_all)
    ((_, now, before),) = newer.loads(["0"], newer.dumps([(8, after, now)]))
    assert as_dict(newer, now) == {"a": (3, None), "b": (5, 5)}
    assert as_dict(newer, before) == {"a": (3, None), "b": (4, None)}


def test_a_removed_key_comes_back_with_the_value_before():
    own = codec(FIELDS[:1])
    base = block_of(own, {"a": 1, "b": 2, "c": 3})

    def combine(olds: list[Any], partials: list[Any]) -> list[Any]:
        return [None if partial is None else (old or 0) + partial for old, partial in zip(olds, partials, strict=True)]

    (after,) = merged(own, [base], [(["b", "d", "e"], [None, 4, None])], combine)
    assert as_dict(own, after) == {"a": 1, "c": 3, "d": 4}
    ((_, now, before),) = own.loads(["0"], own.dumps([(7, after, base)]))
    assert (as_dict(own, now), as_dict(own, before)) == ({"a": 1, "c": 3, "d": 4}, {"a": 1, "b": 2, "c": 3})
    (nothing,) = merged(own, [base], [(["a", "b", "c"], [None, None, None])], combine)
    assert nothing is None
    ((_, now, before),) = own.loads(["0"], own.dumps([(7, None, base)]))
    assert (now, as_dict(own, before)) == (None, {"a": 1, "b": 2, "c": 3})


@pytest.mark.parametrize(
    "record",
    [
        b"",
        b"[1,2]",
        msgspec.msgpack.encode([7, 3, 1]),
        msgspec.msgpack.encode([7, b"a\n", [b"b\1", b""], 2, [], None, None]),
        msgspec.msgpack.encode([7, b"a\n", [b"b\1"], 1, [], None, None]),
        msgspec.msgpack.encode([7, b"a\n", [b"b\1\2", b""], 1, [], None, None]),
        msgspec.msgpack.encode([7, b"a", [b"b\1", b""], 1, [], None, None]),
        msgspec.msgpack.encode([7, b"a\n", [b"", b""], 1, [], None, None]),
        msgspec.msgpack.encode([7, b"a\n", [b"x\1", b""], 1, [], None, None]),
        msgspec.msgpack.encode([7, b"a\n", [["text"], b""], 1, [], None, None]),
        msgspec.msgpack.encode([7, b"a\n", [b"d" + bytes(8), b""], 1, [], None, None]),
        msgspec.msgpack.encode([7, b"\xff\n", [b"b\1", b""], 1, [], None, None]),
        msgspec.msgpack.encode([7, b"a\n", [b"b\1", b"b\1\1"], 1, [], None, None]),
        msgspec.msgpack.encode([7, b"a\n", [b"b\1", ["b"]], 1, [], None, None]),
        msgspec.msgpack.encode([7, b"a\n", [b"b\1", b"x\1"], 1, [], None, None]),
        msgspec.msgpack.encode([7, b"a\n", [b"b\1", [1, 2]], 1, [], None, None]),
        msgspec.msgpack.encode([7, b"a\n", [b"b\1", b""], 1, [], None, b"\0"]),
        msgspec.msgpack.encode([7, b"a\n", [b"b\1", b""], 0, [b"b\1", b""], None, b"\0\0"]),
        msgspec.msgpack.encode([7, b"", [], 0, [b"b" + bytes(9), b""], b"\n" * 9, b"\0"]),
        msgspec.msgpack.encode([-7, b"a\n", [b"b\1", b""], 1, [], None, None]),
    ],
)
def test_a_record_that_is_no_block_is_refused_by_its_name(record):
    own = codec(FIELDS[:1])
    with pytest.raises(CorruptRecordError, match="block '3'") as raised:
        own.loads(["2", "3"], [*own.dumps([(7, block_of(own, {"a": 1}), None)]), record])
    assert raised.value.facts["keys"] == ["3"]


@pytest.mark.parametrize(
    "damage",
    [lambda data, _: data, lambda data, txid: [data, txid + 1], lambda data, _: [data], lambda *_: ["a", 7]],
    ids=["bytes", "another txid", "no txid", "text"],
)
def test_in_a_store_with_types_of_its_own_the_txid_stands_beside_the_block(damage):
    plain, native = codec(FIELDS[:1]), BlockCodec("s", FIELDS[:1], 5, native=True)
    records = [(7, block_of(plain, {"a": 1}), None), (8, block_of(plain, {"b": 2}), block_of(plain, {"b": 1}))]
    data = plain.dumps(records)
    stored = native.dumps(records)
    assert stored == [[data[0], 7], [data[1], 8]]
    read = native.loads(["2", "3"], [[bytearray(data[0]), 7], None])
    assert (read[0][0], as_dict(native, read[0][1]), read[1]) == (7, {"a": 1}, None)
    assert native.written(["2", "3"], stored, 8) == [("b", (8, 2, 1))]
    with pytest.raises(CorruptRecordError, match="block '3'") as raised:
        native.loads(["2", "3"], [stored[0], damage(data[1], 8)])
    assert raised.value.facts["keys"] == ["3"]


def test_a_value_before_that_cannot_be_read_is_refused_when_it_is_asked_for():
    own = codec(FIELDS[:1])
    ((_, now, before),) = own.loads(
        ["3"], [msgspec.msgpack.encode([7, b"a\nb\n", [b"b\1\2", b""], 1, [b"b", b""], None, None])]
    )
    assert as_dict(own, now) == {"a": 1, "b": 2}
    with pytest.raises(CorruptRecordError, match="block '3': the value before") as raised:
        own.values(before)
    assert raised.value.facts["key"] == "3"


def test_a_block_is_told_by_the_checksum_of_the_unescaped_text():
    keys = KeyCodec([KeyField("a", "string"), KeyField("b", "string")])
    texts = keys.encode_all([("x", "y"), ("a|b", "c\\d"), (None, ""), ("\\N", "\n")])
    from zlib import crc32

    raw = ["x|y", "a|b|c\\d", "\\N|", "\\N|\n"]
    assert block_numbers(texts, 1000) == [crc32(text.encode()) % 1000 for text in raw]
    assert block_names([0, 7, 999], 1000) == ["000", "007", "999"]
    assert block_names([0], 1) == ["0"]


def test_a_block_under_a_name_without_a_pane_has_no_key_of_that_name():
    """Another program wrote it, or a copy of another state was put back: readers and the doctor name it, and go on."""
    codec = BlockCodec("s", FIELDS[:1], 7, in_panes=True)
    (text,) = codec.with_pane("3", ["a"])
    assert "3" not in codec.places_of([text])
    with pytest.raises(KeyEncodingError):
        KeyCodec([KeyField("window_start", "timestamp"), KeyField("a", "string")]).decode(text)


def test_the_serializer_names_the_blocks():
    forms = ("json", "7", "native", "blocks:", "blocks:07", "blocks:0", "blocks:x", "7:native", "blocks::native")
    assert [blocks_of(form) for form in forms] == [None] * 9
    assert [blocks_of(form) for form in ("blocks:7", "blocks:7:native")] == [7, 7]
    assert [serializer(form).name for form in ("blocks:7", "blocks:7:native")] == ["msgpack", "native"]
    ledger = SimpleNamespace(serializer="blocks:7", state="s", fields=FIELDS, windows=None)
    assert isinstance(record_codec(ledger), BlockCodec)
    with pytest.raises(ConfigurationError):
        serializer("blocks:x")


def test_what_has_no_blocks_is_refused_with_its_reason():
    url = "memory://blocks-refused"
    spec = opaque(url, "s", blocks=20)
    assert (spec.serializer, spec.blocks) == ("blocks:20", 20)
    assert opaque(spec.backend, "s", blocks=20, serializer="blocks:20") == spec
    for options, why in (
        ({"ttl": 3.0}, "a ttl"),
        ({"serializer": "json"}, "written as json"),
        ({"blocks": 0}, "blocks is an int"),
        ({"blocks": True}, "blocks is an int"),
        ({"serializer": "blocks:21"}, "written as blocks:21"),
    ):
        with pytest.raises(ConfigurationError, match=why):
            opaque(url, "s", **({"blocks": 20} | options))
    assert isinstance(spec.backend, MemoryBackend)
    with pytest.raises(ConfigurationError, match="nobody says how many"):
        opaque(url, "s", serializer="blocks:20")


def test_chunks_end_between_blocks_whatever_their_size():
    draw = random.Random(5)
    numbers = sorted(draw.choices(range(40), k=500))
    for rows, chunk_bytes, most in ((1, 1, 64), (7, 1 << 20, 3), (500, 1 << 20, 1), (50, 300, 2000)):
        batches = [
            pa.record_batch(
                [pa.array(numbers[i : i + rows], pa.int32()), pa.array(range(i, min(i + rows, 500)))], ["b", "x"]
            )
            for i in range(0, 500, rows)
        ]
        chunks = [
            (columns[0].to_pylist(), columns[1].to_pylist())
            for columns in whole_blocks(iter(batches), Room(None, most), chunk_bytes)
        ]
        assert [number for chunk, _ in chunks for number in chunk] == numbers
        assert [place for _, places in chunks for place in places] == [*range(500)]
        assert all(before[-1] < after[0] for (before, _), (after, _) in pairwise(chunks))
        assert len(chunks) > 1


def test_a_block_of_very_many_keys_is_merged_in_one_pass():
    fields, own = Fields(FIELDS[2:3], AGGREGATORS), codec(FIELDS[2:3], 1)
    base = block_of(own, {f"k{i}": (Decimal(i), 1) for i in range(10_000)})
    began = time.process_time()
    (after,) = merged(own, [base], [([f"k{i}" for i in range(1_000)], [(Decimal(1), 1)] * 1_000)], fields.combine_all)
    assert as_dict(own, after)["k999"] == (Decimal(1_000), 2)
    assert time.process_time() - began < 1  # 17 s where each key was put into its columns by itself
