"""How the records of a state lie in Redis, and the commands that read and write them there.

A chunk of keys goes out as one command and its records as one (with a ttl, as a SET each).
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence

from mapstate.backends.redis.scripts import rewrite_fields
from mapstate.backends.redis.wire import PackedKeys, command, interleaved, packed_keys, sizes
from mapstate.errors import CorruptRecordError, KeyEncodingError, TooLargeError

__all__ = ["HashLayout", "Layout", "StringLayout", "escaped"]

_MOST_BYTES = 2**30  # client-query-buffer-limit: above it Redis hangs up
_GLOB = re.compile(rb"([*?\[\]\\^])")


def escaped(name: bytes) -> bytes:
    """A name in which no character is a pattern to SCAN."""
    return _GLOB.sub(rb"\\\1", name)


class Layout(ABC):
    """Packs commands; sends nothing. ``head`` stands in front of each key text.

    ``reserved`` key texts would be Redis keys that hold something else.
    """

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
        """One command, whose reply is the list of records."""

    @abstractmethod
    def put(self, keys: PackedKeys, values: Sequence[bytes]) -> tuple[bytes, int]:
        """The commands that store all of them, and how many replies they have."""

    @abstractmethod
    def rewrite(self, keys: Sequence[str], values: Sequence[bytes | None]) -> tuple[bytes, int]:
        """The commands of `Rewrites.multi_rewrite`, and how many replies they have."""

    @abstractmethod
    def scan(self, cursor: bytes, page_size: int) -> bytes:
        """One command, whose reply is the next cursor, b"0" at the end, and what `scanned` takes."""

    @abstractmethod
    def scanned(self, found: list[bytes]) -> list[str]:
        """The keys of a page. Raises CorruptRecordError."""

    @abstractmethod
    def ttls(self, some: Callable[[], Iterable[str]]) -> list[bytes]:
        """Commands for a sample, ``some`` keys where it needs any. Each reply: in how many milliseconds it expires."""

    def encodings(self) -> list[bytes]:
        """Commands for a sample, whose replies say in which form Redis keeps a hash; none where all forms are well."""
        return []

    def encoded(self, keys: Sequence[str]) -> list[bytes]:
        """The keys as bytes. Raises KeyEncodingError, TooLargeError."""
        try:
            texts = list(map(str.encode, keys))
        except UnicodeEncodeError as error:
            what = f"state {self._state!r}: the key {error.object!r} is not Unicode: {error.reason}"
            raise KeyEncodingError(what, state=self._state) from error
        if self._reserved and not self._reserved.isdisjoint(keys):
            taken = ", ".join(sorted(self._reserved.intersection(keys)))
            what = f"state {self._state!r}: the key {taken!r} would be a Redis key in which its ledger or fence lies"
            raise KeyEncodingError(f"{what}: choose other `records`", state=self._state)
        self.check_sizes("the key", keys, texts)
        return texts

    def words(self, keys: PackedKeys, values: Sequence[bytes], start: bytes = b"") -> tuple[Sequence[bytes], ...]:
        """Keys and values as columns of words, ``start`` in front of each pair. Raises TooLargeError."""
        lengths = list(map(len, values))
        kinds = set(lengths)
        if max(kinds) > self._limit:
            self.check_sizes("the record of key", keys.keys, values)
        starts = {size: b"\r\n$%d\r\n" % size for size in kinds}
        return [start + b"\r\n$"] * len(keys), keys.words(), list(map(starts.__getitem__, lengths)), values

    def check_rewritten(self, keys: Sequence[str], values: Sequence[bytes | None]) -> None:
        """Raises TooLargeError where one of the records that are to be kept is."""
        kept = {key: value for key, value in zip(keys, values, strict=True) if value is not None}
        if kept:
            self.check_sizes("the record of key", list(kept), list(kept.values()))

    def check_sizes(self, what: str, keys: Sequence[str], sized: Sequence[bytes]) -> None:
        """Raises TooLargeError where one of them is."""
        if max(map(len, sized)) > self._limit:
            size, key = max((len(one), key[:200]) for key, one in zip(keys, sized, strict=True))
            raise self._too_large(f"{what} {key!r} has", size, self._limit, key)

    def check_whole(self, what: str, packed: bytes, key: str) -> None:
        """Raises TooLargeError where the commands of one call are too much for Redis at once."""
        if len(packed) > _MOST_BYTES:
            raise self._too_large(f"{what} have", len(packed), _MOST_BYTES, key)

    def _too_large(self, what: str, size: int, limit: int, key: str) -> TooLargeError:
        return TooLargeError(
            f"state {self._state!r}: {what} {size} bytes, and the limit is {limit}. Nothing of this call was sent. "
            "For a single one the limit is max_value_bytes, for a put it is Redis' own: lower the chunk_size.",
            state=self._state,
            key=key,
            size=size,
        )

    def _texts(self, found: list[bytes]) -> list[str]:
        try:
            return [key.decode() for key in found]
        except UnicodeDecodeError as error:
            raise CorruptRecordError(
                f"state {self._state!r}: one of its Redis keys is not UTF-8, {error.object!r}: something else "
                "writes under this state's name",
                state=self._state,
            ) from error


class StringLayout(Layout):
    """A Redis key per record: ``head`` and the key's text. storm-redis calls it STRING.

    ``expiry`` in milliseconds, as text, from a record's last write.
    """

    def __init__(
        self, state: str, max_value_bytes: int, head: bytes, expiry: bytes | None, reserved: Iterable[str] = ()
    ) -> None:
        super().__init__(state, max_value_bytes, head, reserved)
        self._expiry = expiry

    def get(self, keys: PackedKeys) -> bytes:
        """MGET."""
        return b"*%d\r\n$4\r\nMGET%b\r\n" % (len(keys) + 1, keys.joined)

    def put(self, keys: PackedKeys, values: Sequence[bytes]) -> tuple[bytes, int]:
        """MSET, or a SET per record where they expire."""
        if self._expiry is None:
            words = interleaved(*self.words(keys, values))
            put, replies = b"*%d\r\n$4\r\nMSET%b\r\n" % (2 * len(keys) + 1, words), 1
        else:
            end = b"\r\n$2\r\nPX\r\n$%d\r\n%b\r\n" % (len(self._expiry), self._expiry)
            columns = self.words(keys, values, b"*5\r\n$3\r\nSET")
            put, replies = interleaved(*columns, [end] * len(keys)), len(keys)
        self.check_whole(f"the {len(keys)} records of one put", put, keys.keys[0])
        return put, replies

    def rewrite(self, keys: Sequence[str], values: Sequence[bytes | None]) -> tuple[bytes, int]:
        """A SET or a DEL per record."""
        texts = self.encoded(keys)
        self.check_rewritten(keys, values)
        rewrite = b"".join(
            command(b"DEL", self._head + text)
            if value is None
            else command(b"SET", self._head + text, value, b"XX", b"KEEPTTL")
            for text, value in zip(texts, values, strict=True)
        )
        self.check_whole(f"the {len(keys)} records of one page", rewrite, keys[0])
        return rewrite, len(keys)

    def scan(self, cursor: bytes, page_size: int) -> bytes:
        """SCAN, which passes over the whole database."""
        return command(b"SCAN", cursor, b"MATCH", escaped(self._head) + b"*", b"COUNT", b"%d" % page_size)

    def scanned(self, found: list[bytes]) -> list[str]:
        """What is behind ``head``, without what is reserved."""
        texts = self._texts([key[len(self._head) :] for key in found])
        return [text for text in texts if text not in self._reserved] if self._reserved else texts

    def ttls(self, some: Callable[[], Iterable[str]]) -> list[bytes]:
        """PTTL of each."""
        return [self.ttl_of(key) for key in some()]

    def ttl_of(self, key: str) -> bytes:
        """PTTL of the record."""
        return command(b"PTTL", self._head + key.encode())


class HashLayout(Layout):
    """One Redis hash holds all records, by their key's text. storm-redis calls it HASH. Records do not expire."""

    def __init__(self, state: str, max_value_bytes: int, name: bytes) -> None:
        super().__init__(state, max_value_bytes)
        self._name = name

    def get(self, keys: PackedKeys) -> bytes:
        """HMGET."""
        return self._packed(b"HMGET", len(keys), keys.joined)

    def put(self, keys: PackedKeys, values: Sequence[bytes]) -> tuple[bytes, int]:
        """HSET."""
        put = self._packed(b"HSET", 2 * len(keys), interleaved(*self.words(keys, values)))
        self.check_whole(f"the {len(keys)} records of one put", put, keys.keys[0])
        return put, 1

    def rewrite(self, keys: Sequence[str], values: Sequence[bytes | None]) -> tuple[bytes, int]:
        """One script: there is no HSET that only replaces."""
        texts = self.encoded(keys)
        self.check_rewritten(keys, values)
        rewrite = rewrite_fields([self._name] * len(texts), texts, values)
        self.check_whole(f"the {len(keys)} records of one page", rewrite, keys[0])
        return rewrite, 1

    def scan(self, cursor: bytes, page_size: int) -> bytes:
        """HSCAN; records come with their keys."""
        return command(b"HSCAN", self._name, cursor, b"COUNT", b"%d" % page_size)

    def scanned(self, found: list[bytes]) -> list[str]:
        """Every second of them: the others are records."""
        return self._texts(found[::2])

    def ttls(self, some: Callable[[], Iterable[str]]) -> list[bytes]:  # noqa: ARG002  all of them expire together
        """PTTL of the hash."""
        return [command(b"PTTL", self._name)]

    def _packed(self, name: bytes, words: int, packed: bytes) -> bytes:
        start = b"*%d\r\n$%d\r\n%b\r\n$%d\r\n%b" % (words + 2, len(name), name, len(self._name), self._name)
        return b"%b%b\r\n" % (start, packed)
