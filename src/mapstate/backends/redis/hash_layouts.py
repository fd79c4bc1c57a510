"""The layouts with the records of a state in Redis hashes: all in one, or packed in many small ones, the hash shards.

Redis keeps a hash of few short fields as one piece of memory (listpack; ziplist in Redis 6), without the dictionary
entry, the object and the string header that a key of its own costs: half of the memory of a plain counter. No command
reads fields of many hashes, so a chunk is sent as a script, which takes Redis longer than an MGET. Blocks
(`mapstate.serializers.blocks`) take less of both, so hash shards are deprecated.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from zlib import crc32

from mapstate.backends.redis.connection import command
from mapstate.backends.redis.layout import Layout, PackedKeys, interleaved, texts_of
from mapstate.backends.redis.scripts import fields_of, get_fields, put_fields, rewrite_fields

_SAMPLE = 50  # shards that a checkup looks at
_MOST_ASKED = 1000  # shards that a page of a scan reads, however empty they are


class _Fields(Layout):
    """Records are fields of hashes, by their key's text. They do not expire."""

    @abstractmethod
    def _put(self, keys: PackedKeys, pairs: bytes) -> bytes:
        """The command that stores fields."""

    @abstractmethod
    def _hashes_of(self, texts: Sequence[bytes]) -> list[bytes]:
        """The hash of each key."""

    def put(
        self,
        keys: PackedKeys,
        values: Sequence[bytes],
        absent: Sequence[bool] | None = None,  # noqa: ARG002
    ) -> tuple[bytes, int]:
        put = self._put(keys, interleaved(*self.words(keys, values)))
        self.check_whole(f"the {len(keys)} records of one put", put, keys.keys[0])
        return put, 1

    def rewrite(self, keys: Sequence[str], values: Sequence[bytes | None]) -> tuple[bytes, int]:
        """One script: no command replaces existing fields only."""
        texts = self.encoded(keys)
        self.check_rewritten(keys, values)
        rewrite = rewrite_fields(self._hashes_of(texts), texts, values)
        self.check_whole(f"the {len(keys)} records of one page", rewrite, keys[0])
        return rewrite, 1


class HashLayout(_Fields):
    """One Redis hash holds all records. storm-redis calls it HASH."""

    def __init__(self, state: str, max_value_bytes: int, name: bytes) -> None:
        super().__init__(state, max_value_bytes)
        self._name = name

    def get(self, keys: PackedKeys) -> bytes:
        return self._packed(b"HMGET", len(keys), keys.joined)

    def _put(self, keys: PackedKeys, pairs: bytes) -> bytes:
        return self._packed(b"HSET", 2 * len(keys), pairs)

    def _hashes_of(self, texts: Sequence[bytes]) -> list[bytes]:
        return [self._name] * len(texts)

    def scan(self, cursor: bytes, page_size: int) -> bytes:
        """HSCAN, which replies the records, too."""
        return command(b"HSCAN", self._name, cursor, b"COUNT", b"%d" % page_size)

    def scanned(self, found: list[bytes], unlisted: list[str]) -> list[str]:
        """Every second item: the others are records."""
        return texts_of(found[::2], unlisted)

    def ttls(self, some: Callable[[], Iterable[str]]) -> list[bytes]:  # noqa: ARG002  the hash expires as a whole
        return [command(b"PTTL", self._name)]

    def _packed(self, name: bytes, words: int, packed: bytes) -> bytes:
        start = b"*%d\r\n$%d\r\n%b\r\n$%d\r\n%b" % (words + 2, len(name), name, len(self._name), self._name)
        return b"%b%b\r\n" % (start, packed)


class PackedLayout(_Fields):
    """Hash shards, each named by ``head`` and a number with as many digits as the last one has.

    A key's shard is the CRC-32 of its UTF-8 text modulo the number of ``shards``.
    """

    def __init__(self, state: str, max_value_bytes: int, head: bytes, shards: int) -> None:
        super().__init__(state, max_value_bytes)
        self.shards = shards
        self._name = b"%b%%0%dd" % (head.replace(b"%", b"%%"), len(str(shards - 1)))
        self._word = b"\r\n$%d\r\n%b" % (len(self._name % 0), self._name)

    def pack(self, keys: Sequence[str]) -> PackedKeys:
        """The keys, and the names of their shards. Errors: see `Layout.pack`."""
        packed = super().pack(keys)
        numbers = self._numbers(map(str.encode, keys))
        return PackedKeys(keys, b"", packed.joined, b"".join(map(self._word.__mod__, numbers)))

    def get(self, keys: PackedKeys) -> bytes:
        """A script with an HGET for each."""
        return get_fields(len(keys), keys.names, keys.joined)

    def _put(self, keys: PackedKeys, pairs: bytes) -> bytes:
        return put_fields(len(keys), keys.names, pairs)

    def _hashes_of(self, texts: Sequence[bytes]) -> list[bytes]:
        return [self._name % number for number in self._numbers(texts)]

    def scan(self, cursor: bytes, page_size: int, until: int | None = None) -> bytes:
        """A script with HKEYS of shard after shard, until it has a page. The cursor is the number of the next shard."""
        start, last = int(cursor), until or self.shards
        end = min(last, start + _MOST_ASKED)
        return fields_of([self._name % number for number in range(start, end)], start, page_size, last)

    def scanned(self, found: list[bytes], unlisted: list[str]) -> list[str]:
        return texts_of(found, unlisted)

    def ttls(self, some: Callable[[], Iterable[str]]) -> list[bytes]:  # noqa: ARG002  found by their names
        """PTTL of shards from all over the state."""
        return [command(b"PTTL", name) for name in self._sample()]

    def encodings(self) -> list[bytes]:
        """OBJECT ENCODING of the same shards."""
        return [command(b"OBJECT", b"ENCODING", name) for name in self._sample()]

    def _sample(self) -> list[bytes]:
        count = min(_SAMPLE, self.shards)
        return [self._name % (i * self.shards // count) for i in range(count)]

    def _numbers(self, texts: Iterable[bytes]) -> list[int]:
        shards = self.shards
        return [hashed % shards for hashed in map(crc32, texts)]
