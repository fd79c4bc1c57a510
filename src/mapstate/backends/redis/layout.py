"""What a layout of a state's records in Redis is, and the one with a Redis key per record.

A chunk of keys is one command, and so is its put (with a ttl, a SET for each record). It is packed as RESP by columns
instead of word by word: hiredis' packer, which redis-py calls for each command, takes the Python workers of a whole
opaque batch on Spark 1.46 times the processor time (1.32 to 1.77 in 10 turns), and all processes together 1.07 times
(0.97 to 1.36); with a ttl 1.41 and 1.11 times. Measured as `scripts/run python bench/million_rows.py` does, with
`StringLayout.get` and `put` on `hiredis.pack_command` in every other turn.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from itertools import compress
from typing import ClassVar

from mapstate.backends.redis.connection import command
from mapstate.backends.redis.problems import foreign_keys, too_large
from mapstate.errors import CorruptRecordError, KeyEncodingError, shown

_MOST_BYTES = 2**30  # client-query-buffer-limit: above it Redis closes the connection
_GLOB = re.compile(rb"([*?\[\]\\^])")


class PackedKeys:
    """The keys of a chunk as words of a command, each after ``head``: packed once, for its get and its put.

    ``names`` are the hash shards of the keys, as words; empty for other layouts.
    """

    __slots__ = ("_head", "joined", "keys", "names")

    def __init__(self, keys: Sequence[str], head: bytes, joined: bytes, names: bytes = b"") -> None:
        self.keys = keys
        self.joined = joined
        self.names = names
        self._head = head

    def __len__(self) -> int:
        return len(self.keys)

    def words(self) -> list[bytes]:
        """Each key without the dollar of its word: its size, a line break, and the key."""
        words = self.joined.split(b"\r\n$")[1:]
        if len(words) == len(self.keys):
            return words
        # A key contains the separator. Keys that mapstate encodes never do.
        texts = [self._head + key.encode() for key in self.keys]
        return [b"%d\r\n%b" % (len(text), text) for text in texts]


def packed_keys(keys: Sequence[str], head: bytes, limit: int) -> PackedKeys | None:
    """Pack all keys as one text, which is encoded once. None where a key is not ASCII, or longer than ``limit``."""
    lengths = list(map(len, keys))
    kinds = set(lengths)
    if max(kinds) > limit:
        return None
    name = head.decode()
    starts = {size: f"\r\n${size + len(head)}\r\n{name}" for size in kinds}
    pieces = [""] * (2 * len(keys))
    pieces[::2] = map(starts.__getitem__, lengths)
    pieces[1::2] = keys
    joined = "".join(pieces)
    return PackedKeys(keys, head, joined.encode()) if joined.isascii() else None


def sizes(items: Sequence[bytes], head: bytes = b"") -> list[bytes]:
    """What precedes each item as a word of a command: a dollar, its size, and ``head``."""
    lengths = list(map(len, items))
    starts = {size: b"\r\n$%d\r\n%b" % (size + len(head), head) for size in set(lengths)}
    return list(map(starts.__getitem__, lengths))


def interleaved(*columns: Sequence[bytes]) -> bytes:
    """The first of each column, the second of each, and so on. No Python code runs for each item."""
    pieces = [b""] * (len(columns) * len(columns[0]))
    for i, column in enumerate(columns):
        pieces[i :: len(columns)] = column
    return b"".join(pieces)


def escaped(name: bytes) -> bytes:
    """The SCAN pattern that matches this name only."""
    return _GLOB.sub(rb"\\\1", name)


class Layout(ABC):
    """Packs commands; sends nothing. ``head`` is the prefix of each key text.

    ``reserved`` key texts would be Redis keys with other contents. ``reads_types_as_absent`` says that a get replies
    nothing for a Redis key of another type, and a put replaces it, where other layouts get an error.
    """

    reads_types_as_absent: ClassVar[bool] = False

    def __init__(self, state: str, max_value_bytes: int, head: bytes = b"", reserved: Iterable[str] = ()) -> None:
        self._state = state
        self._limit = max_value_bytes
        self._head = head
        self._reserved = frozenset(reserved)

    def pack(self, keys: Sequence[str]) -> PackedKeys:
        """The keys, for `get` and `put`. There is at least one. Raises KeyEncodingError, TooLargeError."""
        packed = packed_keys(keys, self._head, self._limit)
        if packed is None or (self._reserved and not self._reserved.isdisjoint(keys)):
            texts = self.encoded(keys)
            packed = PackedKeys(keys, self._head, interleaved(sizes(texts, self._head), texts))
        return packed

    @abstractmethod
    def get(self, keys: PackedKeys) -> bytes:
        """One command. Its reply is the list of records."""

    @abstractmethod
    def put(self, keys: PackedKeys, values: Sequence[bytes], absent: Sequence[bool] | None = None) -> tuple[bytes, int]:
        """The commands that store all records, and the number of their replies.

        ``absent`` marks keys without a record. Where `reads_types_as_absent`, those are stored only if no Redis key of
        theirs exists; otherwise a reply is false.
        """

    def exist(self, keys: PackedKeys) -> bytes:  # noqa: ARG002
        """EXISTS of the Redis keys, empty unless `reads_types_as_absent`. Its reply is the number that exist."""
        return b""

    def types(self, keys: Sequence[str]) -> list[bytes]:  # noqa: ARG002
        """TYPE of each Redis key, none unless `reads_types_as_absent`."""
        return []

    @abstractmethod
    def rewrite(self, keys: Sequence[str], values: Sequence[bytes | None]) -> tuple[bytes, int]:
        """The commands of `Rewrites.multi_rewrite`, and the number of their replies."""

    @abstractmethod
    def scan(self, cursor: bytes, page_size: int) -> bytes:
        """One command. Its reply: the next cursor, b"0" at the end, and the argument of `scanned`."""

    @abstractmethod
    def scanned(self, found: list[bytes], unlisted: list[str]) -> list[str]:
        """The keys of a page. Names that are no key of this state go to ``unlisted``."""

    @abstractmethod
    def ttls(self, some: Callable[[], Iterable[str]]) -> list[bytes]:
        """PTTL commands for a sample. ``some`` returns its keys, where the layout needs keys."""

    def encodings(self) -> list[bytes]:
        """OBJECT ENCODING commands for a sample; none where the encoding does not matter."""
        return []

    def encoded(self, keys: Sequence[str]) -> list[bytes]:
        """The keys as bytes. Raises KeyEncodingError, TooLargeError."""
        try:
            texts = list(map(str.encode, keys))
        except UnicodeEncodeError as error:
            message = f"state {self._state!r}: the key {shown(error.object)} is not Unicode: {error.reason}"
            raise KeyEncodingError(message, state=self._state) from error
        if self._reserved and not self._reserved.isdisjoint(keys):
            taken = ", ".join(sorted(self._reserved.intersection(keys)))
            problem = f"state {self._state!r}: the key {taken!r} would be the Redis key of its ledger or fence"
            raise KeyEncodingError(f"{problem}: choose other `records`", state=self._state)
        self.check_sizes("the key", keys, texts)
        return texts

    def words(self, keys: PackedKeys, values: Sequence[bytes], start: bytes = b"") -> tuple[Sequence[bytes], ...]:
        """Keys and values as columns of words, with ``start`` before each pair. Raises TooLargeError."""
        lengths = list(map(len, values))
        kinds = set(lengths)
        if max(kinds) > self._limit:
            self.check_sizes("the record of key", keys.keys, values)
        starts = {size: b"\r\n$%d\r\n" % size for size in kinds}
        return [start + b"\r\n$"] * len(lengths), keys.words(), list(map(starts.__getitem__, lengths)), values

    def check_rewritten(self, keys: Sequence[str], values: Sequence[bytes | None]) -> None:
        """Raises TooLargeError for a record above the limit that is not removed."""
        kept = {key: value for key, value in zip(keys, values, strict=True) if value is not None}
        if kept:
            self.check_sizes("the record of key", list(kept), list(kept.values()))

    def check_sizes(self, subject: str, keys: Sequence[str], sized: Sequence[bytes]) -> None:
        """Raises TooLargeError where one of ``sized`` is above the limit. ``subject`` names it in the message."""
        if max(map(len, sized)) > self._limit:
            size, key = max((len(text), key[:200]) for key, text in zip(keys, sized, strict=True))
            raise too_large(self._state, f"{subject} {shown(key)} has", size, self._limit, key)

    def check_whole(self, subject: str, packed: bytes, key: str) -> None:
        """Raises TooLargeError where the commands of one call are too large for Redis. ``subject`` names the call."""
        if len(packed) > _MOST_BYTES:
            raise too_large(self._state, f"{subject} have", len(packed), _MOST_BYTES, key)

    def check_types(self, keys: Sequence[str], types: Sequence[bytes | None]) -> None:
        """Raises CorruptRecordError where one of these keys has another type than string, by the replies to TYPE."""
        other = {key: kind for key, kind in zip(keys, types, strict=True) if kind not in (b"none", b"string", None)}
        if other:
            raise self.foreign(list(other), list(other.values()))

    def foreign(self, keys: Sequence[str], types: Sequence[bytes | None]) -> CorruptRecordError:
        """The error for Redis keys of another type. ``types`` are replies to TYPE, None where it is not allowed."""
        return foreign_keys(self._state, self._head, keys, types[0])


def texts_of(found: list[bytes], unlisted: list[str], head: bytes = b"") -> list[str]:
    """The names without their ``head``, as text. One that is not UTF-8 goes to ``unlisted``, as its repr."""
    lines = b"\n".join([b"", *found])
    if lines.count(b"\n") == len(found):  # no name has a line break, like the keys that mapstate encodes
        with suppress(UnicodeDecodeError):
            return lines.replace(b"\n" + head, b"\n").decode().split("\n")[1:]
    texts = []
    for key in found:
        try:
            texts.append(key[len(head) :].decode())
        except UnicodeDecodeError:
            unlisted.append(repr(key))
    return texts


def _set_many(name: bytes, columns: Sequence[Sequence[bytes]]) -> bytes:
    """MSET or MSETNX."""
    return b"*%d\r\n%b%b\r\n" % (2 * len(columns[0]) + 1, name, interleaved(*columns))


class StringLayout(Layout):
    """A Redis key per record: ``head`` and the key's text. storm-redis calls it STRING.

    ``expiry`` in milliseconds, as text, from a record's last write.
    """

    reads_types_as_absent = True

    def __init__(
        self, state: str, max_value_bytes: int, head: bytes, expiry: bytes | None, reserved: Iterable[str] = ()
    ) -> None:
        super().__init__(state, max_value_bytes, head, reserved)
        self._expiry = expiry

    def get(self, keys: PackedKeys) -> bytes:
        return b"*%d\r\n$4\r\nMGET%b\r\n" % (len(keys.keys) + 1, keys.joined)

    def put(self, keys: PackedKeys, values: Sequence[bytes], absent: Sequence[bool] | None = None) -> tuple[bytes, int]:
        """MSET, and MSETNX for absent keys; or a SET for each record, where records expire."""
        if self._expiry is not None:
            put, replies = self._put_expiring(keys, values, absent, self._expiry)
        elif absent is None or not any(absent):
            put, replies = _set_many(b"$4\r\nMSET", self.words(keys, values)), 1
        elif all(absent):
            put, replies = _set_many(b"$6\r\nMSETNX", self.words(keys, values)), 1
        else:
            (start, *_), *words = self.words(keys, values)
            put, replies = b"", 2
            for name, which in ((b"$6\r\nMSETNX", absent), (b"$4\r\nMSET", [not is_new for is_new in absent])):
                columns = [list(compress(column, which)) for column in words]
                put += _set_many(name, [[start] * len(columns[0]), *columns])
        self.check_whole(f"the {len(keys.keys)} records of one put", put, keys.keys[0])
        return put, replies

    def exist(self, keys: PackedKeys) -> bytes:
        return b"*%d\r\n$6\r\nEXISTS%b\r\n" % (len(keys.keys) + 1, keys.joined)

    def types(self, keys: Sequence[str]) -> list[bytes]:
        return [command(b"TYPE", self._head + text) for text in self.encoded(keys)]

    def rewrite(self, keys: Sequence[str], values: Sequence[bytes | None]) -> tuple[bytes, int]:
        """A SET for each record, and one DEL for those that go."""
        kept = {key: value for key, value in zip(keys, values, strict=True) if value is not None}
        gone = [key for key, value in zip(keys, values, strict=True) if value is None]
        self.check_rewritten(keys, values)
        rewrite = b"".join(
            command(b"SET", self._head + text, value, b"XX", b"KEEPTTL")
            for text, value in zip(self.encoded(list(kept)) if kept else (), kept.values(), strict=True)
        )
        if gone:
            rewrite += b"*%d\r\n$3\r\nDEL%b\r\n" % (len(gone) + 1, self.pack(gone).joined)
        self.check_whole(f"the {len(keys)} records of one page", rewrite, keys[0])
        return rewrite, len(kept) + bool(gone)

    def scan(self, cursor: bytes, page_size: int) -> bytes:
        """SCAN, which walks through the whole database."""
        return command(b"SCAN", cursor, b"MATCH", escaped(self._head) + b"*", b"COUNT", b"%d" % page_size)

    def scanned(self, found: list[bytes], unlisted: list[str]) -> list[str]:
        """The names without ``head``, but for reserved ones."""
        texts = texts_of(found, unlisted, self._head)
        return [text for text in texts if text not in self._reserved] if self._reserved else texts

    def ttls(self, some: Callable[[], Iterable[str]]) -> list[bytes]:
        return [command(b"PTTL", self._head + key.encode()) for key in some()]

    def _put_expiring(
        self, keys: PackedKeys, values: Sequence[bytes], absent: Sequence[bool] | None, expiry: bytes
    ) -> tuple[bytes, int]:
        """A SET for each, with NX for the absent ones."""
        start, end = b"*5\r\n$3\r\nSET", b"\r\n$2\r\nPX\r\n$%d\r\n%b\r\n" % (len(expiry), expiry)
        columns = self.words(keys, values, start)
        ends = [end] * len(keys.keys)
        if absent is not None:
            if len(set(keys.keys)) < len(keys.keys):  # with NX the first value of a repeated key would stay
                last = {key: i for i, key in enumerate(keys.keys)}.values()
                absent, *columns = ([column[i] for i in last] for column in (absent, *columns))  # type: ignore[assignment]
            starts = [b"*6" + start[2:] + b"\r\n$" if new else raw for new, raw in zip(absent, columns[0], strict=True)]
            columns = (starts, *columns[1:])
            ends = [end + b"$2\r\nNX\r\n" if new else end for new in absent]
        return interleaved(*columns, ends), len(ends)
