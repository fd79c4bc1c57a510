"""Blocks: the records of a state whose keys share records, and their values as columns.

A key's block is the CRC-32 of its text, before anything in it is escaped, modulo the number of blocks. Its record is
one opaque value, whose value is a map of keys to values, in MessagePack whatever the serializer of other records::

    [txid, keys, [column, ...], new, [column before, ...], keys before, touched]

``keys`` are key texts, each with a line feed behind it. A field has a column for each part of its type, and one that
says which of its values are null, empty where none is. ``new`` is how many of the last keys are not in the value
before, whose columns stand as they were stored. ``keys before`` is null, unless a key is gone since. ``touched`` has a
bit for each key of the value before, set if the txid wrote it; it is null if the txid wrote all.

A store with types of its own has a list of this and the txid, which its filter of late writers reads.

A column of integers, also of decimals by their last digit, is packed as in `mapstate.serializers.packed`; one of
doubles is ``d`` and 8 bytes each, little-endian. A list has values of other types, and what does not fit.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from decimal import Decimal
from functools import partial
from sys import byteorder
from typing import Annotated, Any
from zlib import crc32

import msgspec

from mapstate.errors import ConfigurationError, CorruptRecordError, SerializationError, cut
from mapstate.key_types import split, text_of
from mapstate.schema import Field
from mapstate.serializers.one_by_one import UNREADABLE, read_each
from mapstate.serializers.packed import WIDTHS, number_at, packed, unpacked, with_number
from mapstate.serializers.value_types import INTEGERS, TXID, WireForm, wire_type
from mapstate.values import struct_parts

FEW = 4
"""Keys of a block that are read and written in its columns as they are."""

_DOUBLE = ord("d")
_COLUMNS = tuple[bytes | list[Any], ...]


class _Record(msgspec.Struct, array_like=True, forbid_unknown_fields=True, gc=False):
    """A record as it is stored."""

    txid: TXID
    keys: bytes
    columns: _COLUMNS
    new: Annotated[int, msgspec.Meta(ge=0)]
    before: _COLUMNS
    keys_before: bytes | None
    touched: bytes | None


_decode = msgspec.msgpack.Decoder(_Record).decode
_encode = msgspec.msgpack.Encoder().encode
_Take = Callable[[Sequence[Any]], list[Any]]  # some values of columns that are packed or lists


def form_of(spec: Any, *, native: bool) -> str:
    """The serializer of a state by its `StateSpec`. Raises ConfigurationError for one that cannot have blocks."""
    form = f"blocks:{spec.blocks}{':native' if native else ''}"
    for why, is_so in (
        ("nobody says how many: blocks=...", spec.blocks is None),
        (f"it is {spec.type}, and keeps no value before", spec.type != "opaque"),
        ("it has a ttl, which is that of a whole record", spec.ttl is not None),
        (f"it is written as {spec.serializer}", spec.serializer not in ("auto", form)),
    ):
        if is_so:
            raise ConfigurationError(f"a state has no blocks if {why}: leave blocks out. See docs/blocks.md")
    return form


def block_numbers(texts: Sequence[str], blocks: int) -> list[int]:
    """The block of each key text."""
    if "\\" in "".join(texts):
        texts = ["|".join(map(_unescaped, split(text))) if "\\" in text else text for text in texts]
    return [crc32(text.encode()) % blocks for text in texts]


def _unescaped(part: str) -> str:
    return part if part == "\\N" else text_of(part)


def block_names(numbers: Iterable[int], blocks: int) -> list[str]:
    """The keys of blocks in the store: the number, with as many digits as the last one has."""
    digits = len(str(blocks - 1))
    return [str(number).zfill(digits) for number in numbers]


def _all(counts: Sequence[int], columns: Sequence[Any]) -> list[Any]:
    """The values of columns, one behind the other. An empty column is so many zeros."""
    values: list[Any] = []
    for column, count in zip(columns, counts, strict=True):
        values += column if type(column) is not bytes else unpacked(column) if column else [0] * count
    return values


def _each(places: Sequence[int], columns: Sequence[Any]) -> list[Any]:
    """The value at a place of each column."""
    return [column and number_at(column, at) for column, at in zip(columns, places, strict=True)]


class Block(msgspec.Struct, gc=False):
    """The value of a block: its key texts, and its values in columns. Nobody changes it.

    Of one that a task has made, ``touched`` is that of its record; of others it is None.
    """

    keys: bytes
    columns: Sequence[Any]
    count: int
    touched: bytes | None = None

    def texts(self) -> list[str]:
        """The keys in the order of the values."""
        return self.keys.decode().split("\n")[:-1]

    def place(self, text: str) -> int | None:
        """The place of a key, None where it is not there."""
        at = (b"\n" + self.keys).find(f"\n{text}\n".encode())
        return None if at < 0 else self.keys.count(b"\n", 0, at)


class _Earlier(msgspec.Struct, gc=False):
    """The value before, in a record that was read: a `Block`, which is made when somebody asks."""

    codec: BlockCodec
    name: Any
    record: _Record
    block: Block | None = None

    def __getattr__(self, name: str) -> Any:
        """What a block has."""
        if self.block is None:
            self.block = self.codec.earlier(self.name, self.record)
        return getattr(self.block, name)


class _Part:
    """A part of a field's type: how its values become a column, and a column its values."""

    def __init__(self, kind: str) -> None:
        self._values = list[wire_type(kind, WireForm())]  # type: ignore[misc]
        self._is_double, self._is_integer = kind in ("double", "float"), kind in INTEGERS
        self.widths = {_DOUBLE: 8} if self._is_double else WIDTHS if self._is_integer or kind[:8] == "decimal(" else {}
        self._scale = int(kind[:-1].rpartition(",")[2]) if kind.startswith("decimal(") else None
        self.filler = 0 if self._is_integer else 0.0 if self._is_double else None if self._scale is None else Decimal(0)

    def pack(self, values: list[Any]) -> Any:
        """The column of some values."""
        if self._is_integer:
            return packed(values) or values
        if self._is_double:
            try:
                return b"d" + _little_endian(array("d", values)).tobytes()
            except TypeError:  # null
                return values
        return values if self._scale is None else self._packed_decimals(values, self._scale) or values

    def _packed_decimals(self, values: list[Any], scale: int) -> bytes | None:
        try:
            numbers = [int(value.scaleb(scale)) for value in values]
        except AttributeError:  # null
            return None
        is_exact = all(Decimal(number).scaleb(-scale) == value for number, value in zip(numbers, values, strict=True))
        return packed(numbers) if is_exact else None

    def listed(self, column: Any, count: int) -> list[Any]:
        """A list that was read. Raises one of `UNREADABLE` for one that has not so many values of the type."""
        if len(column) != count:
            raise ValueError(f"a column of {len(column)} values for {count} keys")
        values: list[Any] = msgspec.convert(column, self._values)
        return values

    def values(self, taken: list[Any]) -> list[Any]:
        """The values of what was taken from columns."""
        scale = self._scale
        if scale is None:
            return taken
        return [Decimal(number).scaleb(-scale) if type(number) is int else number for number in taken]

    def with_value(self, column: Any, at: int, value: Any) -> Any:
        """The column with another value at a place. The column stays as it is."""
        if self._is_integer and type(column) is bytes:
            changed = with_number(column, at, at + 1, value)
            return changed if type(changed) is bytes else self.pack(changed)
        values = self.values(_all([0], [column]))
        values[at] = value
        return self.pack(values)


class _Column:
    """A field: the columns of its parts, and the one of its nulls."""

    def __init__(self, kind: str) -> None:
        self._is_struct = kind.startswith("struct<")
        self.parts = [_Part(part) for part in (struct_parts(kind) if self._is_struct else [kind])]
        self.width = len(self.parts) + 1

    def pack(self, values: list[Any]) -> list[Any]:
        nulls = b""
        if None in values:
            nulls = packed([value is None for value in values]) or b""
            null = tuple(part.filler for part in self.parts)
            values = [(null if self._is_struct else null[0]) if value is None else value for value in values]
        by_part = map(list, zip(*values, strict=True)) if self._is_struct else [values]
        return [*(part.pack(of) for part, of in zip(self.parts, by_part, strict=True)), nulls]

    def values(self, columns: Sequence[Sequence[Any]], take: _Take) -> list[Any]:
        """The values in the columns of some blocks, part by part."""
        if self._is_struct:
            by_part = [part.values(take(of)) for part, of in zip(self.parts, columns, strict=False)]
            values: list[Any] = list(zip(*by_part, strict=True))
        else:
            values = self.parts[0].values(take(columns[0]))
        if any(columns[-1]):
            values = [None if null else value for value, null in zip(values, take(columns[-1]), strict=True)]
        return values

    def with_value(self, columns: Sequence[Any], at: int, value: Any) -> list[Any]:
        if value is None or columns[-1]:
            values = self.values([[of] for of in columns], partial(_all, [0]))
            values[at] = value
            return self.pack(values)
        parts = value if self._is_struct else (value,)
        pairs = zip(self.parts, columns, parts, strict=False)
        return [*(part.with_value(of, at, new) for part, of, new in pairs), b""]


class BlockCodec:
    """Encode and decode the records of blocks, with the methods of `RecordCodec`; and values of their keys.

    A record is ``(txid, block, block before)``, None where there is no key. With ``in_panes`` a block is of one pane,
    whose text its name begins with, and has the rests of keys; one that has lost all keys stays, because its pane names
    it.
    """

    def __init__(
        self, state: str, fields: Sequence[Field], blocks: int, *, in_panes: bool = False, native: bool = False
    ) -> None:
        self._state, self._number, self._in_panes, self._native = state, blocks, in_panes, native
        self._fields = [_Column(field.type) for field in fields]
        self._parts = [part for column in self._fields for part in (*column.parts, None)]
        self._ends = [0]
        for column in self._fields:
            self._ends.append(self._ends[-1] + column.width)
        self._sizes = {*self._ends[1:]}
        self._spans = [*zip(self._fields, self._ends, self._ends[1:], strict=False)]
        self._without_keys = Block(b"", (), 0) if in_panes else None

    @property
    def blocks(self) -> BlockCodec:
        """Itself: the codec of a state with blocks. See `RecordCodec.blocks`."""
        return self

    def block(self, keys: bytes, values: list[Any]) -> Block | None:
        """The block of some keys and their values, as `Fields` has them; None without a key."""
        if not values:
            return self._without_keys
        by_field: Iterable[Any] = [values]
        if len(self._fields) > 1:
            by_field = map(list, zip(*values, strict=True))
        elif (None,) in values:
            by_field = [[None if value == (None,) else value for value in values]]
        columns: list[Any] = []
        for field, of in zip(self._fields, by_field, strict=True):
            columns += field.pack(of)
        return Block(keys, columns, len(values))

    def values(self, block: Block) -> list[Any]:
        """The values of a block's keys."""
        return self.all_values([block])

    def value(self, block: Block, at: int) -> Any:
        """The value of the key at a place."""
        return self.all_values([block], partial(_each, [at]))[0]

    def made(self, blocks: Sequence[Any]) -> list[Block | None]:
        """The blocks of some records. Raises CorruptRecordError for a value before that cannot be read."""
        return [self.earlier(of.name, of.record) if type(of) is _Earlier else of for of in blocks]

    def columns(self, blocks: Sequence[Block], take: _Take | None = None) -> list[list[Any]]:
        """The values of each field, of all keys in some blocks; or of those keys that ``take`` takes."""
        take = take or partial(_all, [block.count for block in blocks])
        columns = list(zip(*[block.columns for block in blocks], strict=False))
        if len(columns) < self._ends[-1]:
            columns = list(zip(*map(self._with_added, blocks), strict=True)) or [()] * self._ends[-1]
        return [field.values(columns[start:end], take) for field, start, end in self._spans]

    def all_values(self, blocks: Sequence[Block], take: _Take | None = None) -> list[Any]:
        """The value of each such key."""
        values = self.columns(blocks, take)
        if len(values) > 1:
            return list(zip(*values, strict=True))
        return [(None,) if value is None else value for value in values[0]] if None in values[0] else values[0]

    def _with_added(self, block: Block) -> Sequence[Any]:
        """The columns of a block, with those of fields that were added since: all of these are null."""
        added = self._parts[len(block.columns) :]
        nulls = [b"b" + b"\1" * block.count if part is None else [None] * block.count for part in added]
        return [*block.columns, *nulls]

    def with_value(self, block: Block, at: int, value: Any) -> Block | None:
        """The block with another value at a place; None where only a new block would do."""
        if value is None or len(block.columns) < self._ends[-1]:
            return None
        values = value if len(self._fields) > 1 else (None if value == (None,) else value,)
        columns: list[Any] = []
        for start, field, of in zip(self._ends, self._fields, values, strict=False):
            columns += field.with_value(block.columns[start : start + field.width], at, of)
        return Block(block.keys, columns, block.count)

    def places_of(self, texts: Sequence[Any]) -> dict[Any, list[int]]:
        """The store's key of each block that has some of the key texts, with the places of these."""
        places: dict[Any, list[int]] = {}
        names = block_names(block_numbers(self.rests(texts), self._number), self._number)
        if self._in_panes:
            names = [f"{text.partition('|')[0]}|{name}" for text, name in zip(texts, names, strict=True)]
        for i, name in enumerate(names):
            places.setdefault(name, []).append(i)
        return places

    def with_pane(self, name: Any, rests: list[str]) -> list[str]:
        """The keys of the state, from those in a block with this name."""
        pane = name.partition("|")[0]  # of a record that another program wrote it is no pane
        return [f"{pane}|{rest}" for rest in rests] if self._in_panes else rests

    def rests(self, texts: Sequence[Any]) -> Sequence[Any]:
        """The keys as they stand in blocks."""
        return [text.partition("|")[2] for text in texts] if self._in_panes else texts

    def of_keys(
        self, texts: Sequence[Any], places: Mapping[Any, Sequence[int]], blocks: Sequence[Block | None]
    ) -> list[Any]:
        """The value of each key as it stands in blocks, from those under the names in ``places``."""
        out: list[Any] = [None] * len(texts)
        few: list[Block] = []
        few_of, at_each = list[int](), list[int]()
        for block, wanted in zip(blocks, places.values(), strict=True):
            if block is None:
                continue
            if len(wanted) > FEW:
                values = dict(zip(block.texts(), self.values(block), strict=True))
                for i in wanted:
                    out[i] = values.get(texts[i])
                continue
            for i in wanted:
                at = block.place(texts[i])
                if at is not None:
                    few.append(block)
                    few_of.append(i)
                    at_each.append(at)
        for i, value in zip(few_of, self.all_values(few, partial(_each, at_each)), strict=True):
            out[i] = value
        return out

    def by_key(self, blocks: Sequence[Block]) -> dict[str, list[Any]]:
        """For each key in some of the blocks, as it stands there, its values in their order."""
        values: dict[str, list[Any]] = {}
        for block in blocks:
            for text, value in zip(block.texts(), self.values(block), strict=True):
                values.setdefault(text, []).append(value)
        return values

    def on_page(self, page_size: int, held: int | None) -> int:
        """How many blocks have about so many keys; ``held`` is the number of all keys."""
        if self._in_panes:
            return max(1, page_size // 32)  # nobody counts them
        return max(1, page_size * self._number // max(held or 0, self._number))

    def without(self, name: Any, block: Block, keys: Any) -> tuple[Block | None, list[Any]]:
        """The block without some keys, itself if it has none of them; and which of them it had."""
        texts = self.with_pane(name, rests := block.texts())
        gone = {text: None for text in texts if text in keys}
        if not gone:
            return block, []
        values, left = self.values(block), [i for i, text in enumerate(texts) if text not in gone]
        return self.block("".join([f"{rests[i]}\n" for i in left]).encode(), [values[i] for i in left]), [*gone]

    def dumps(self, records: Sequence[Any]) -> list[Any]:
        """Encode one document per record. Raises SerializationError."""
        try:
            stored = [_encode(_document(*record)) for record in records]
        except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError) as error:
            raise SerializationError(
                f"state {self._state!r}: a value cannot be encoded: {cut(error)}", state=self._state
            ) from error

        return [[data, record[0]] for data, record in zip(stored, records, strict=True)] if self._native else stored

    def loads(self, keys: Sequence[Any], data: Sequence[Any]) -> list[Any]:
        """Decode the records; None stays None. Raises CorruptRecordError, with all such keys in ``keys``."""
        advice = "Restore the record, or delete it if its keys are lost."
        return read_each(keys, data, self._record, state=self._state, noun="block", advice=advice)

    def written(self, names: Sequence[Any], data: Sequence[Any], txid: int) -> list[tuple[Any, Any]]:
        """The keys that a txid wrote, each with the record that a state without blocks has. Errors: see `loads`."""
        out: list[tuple[Any, Any]] = []
        for name, record, item in zip(names, self.loads(names, data), data, strict=True):
            if record is None or record[0] != txid:
                continue
            touched = self._read(item).touched
            now, before = (
                {} if block is None else dict(zip(block.texts(), self.values(block), strict=True))
                for block in record[1:]
            )
            texts = [text for i, text in enumerate(before) if touched is None or touched[i >> 3] >> (i & 7) & 1]
            texts += [text for text in now if text not in before]
            records = [(txid, now.get(text), before.get(text)) for text in texts]
            out += zip(self.with_pane(name, texts), records, strict=True)
        return out

    def _read(self, stored: Any) -> _Record:
        if not self._native:
            return _decode(stored)
        data, txid = stored
        record = _decode(data)
        if record.txid != txid:
            raise ValueError(f"txid {txid} beside a block of txid {record.txid}")
        return record

    def _record(self, name: Any, stored: Any) -> tuple[int, Any, Any]:
        record = self._read(stored)
        now = self._block(record.keys, record.columns)
        count, new, keys_before = 0 if now is None else now.count, record.new, record.keys_before
        if new > count or (new and keys_before is not None):
            raise ValueError(f"{new} new keys of {count}")
        if record.touched is not None:
            known = count - new if keys_before is None else keys_before.count(b"\n")
            if len(record.touched) != (known + 7) // 8:
                raise ValueError(f"bits of {len(record.touched)} bytes for {known} keys")
        return record.txid, now, None if new == count and keys_before is None else _Earlier(self, name, record)

    def earlier(self, name: Any, record: _Record) -> Block:
        """The value before, in a record that was read. Raises CorruptRecordError."""
        keys = record.keys_before
        if keys is None:
            count = record.keys.count(b"\n") - record.new
            keys = b"\n".join([*record.keys.split(b"\n")[:count], b""])
        try:
            block = self._block(keys, record.before)
        except UNREADABLE as error:
            why = cut(error)
        else:
            if block is not None:
                return block
            why = "it has no key"
        raise CorruptRecordError(
            f"state {self._state!r}, block {name!r}: the value before in its record cannot be read ({why}). It was not "
            "overwritten. Restore the record.",
            state=self._state,
            key=str(name),
        )

    def _block(self, keys: bytes, columns: Sequence[Any]) -> Block | None:
        if not keys:
            if columns:
                raise ValueError("columns without a key")
            return self._without_keys
        if not keys.endswith(b"\n") or len(columns) not in self._sizes:
            raise ValueError(f"{len(columns)} columns")
        if not keys.isascii():
            keys.decode()
        count = keys.count(b"\n")
        for at, column in enumerate(columns):
            part = self._parts[at]
            if part is None:
                if column != b"" and (type(column) is not bytes or column[:1] != b"b" or len(column) != 1 + count):
                    raise ValueError(f"no column of the nulls of {count} keys")
            elif type(column) is not bytes:
                columns = [*columns[:at], part.listed(column, count), *columns[at + 1 :]]
            elif len(column) != 1 + count * part.widths[column[0]]:
                raise ValueError(f"a column of {len(column)} bytes for {count} keys")
        return Block(keys, columns, count)


def _document(txid: int, now: Block | None, before: Block | None) -> tuple[Any, ...]:
    keys, columns, count, touched = (
        (b"", (), 0, None) if now is None else (now.keys, now.columns, now.count, now.touched)
    )
    if before is None:
        return txid, keys, columns, count, (), None, touched
    if before.count and keys.startswith(before.keys):
        return txid, keys, columns, count - before.count, before.columns, None, touched
    return txid, keys, columns, 0, before.columns, before.keys, touched


def _little_endian(numbers: array[float]) -> array[float]:
    if byteorder == "big":
        numbers.byteswap()
    return numbers
