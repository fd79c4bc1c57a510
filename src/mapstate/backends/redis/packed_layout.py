"""The packed layout: records in many small hashes, the hash shards, for half of the memory of a plain counter.

Redis keeps a hash of few short fields as one piece of memory (listpack; ziplist in Redis 6), without the dictionary
entry, the object and the string header that a key of its own costs. No command reads fields of many hashes, so a chunk
is sent as a script, which takes Redis longer than an MGET (``bench/redis_memory.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from zlib import crc32

from mapstate.backends.redis.layout import Layout, texts_of
from mapstate.backends.redis.scripts import fields_of, get_fields, put_fields, rewrite_fields
from mapstate.backends.redis.wire import PackedKeys, command, interleaved

_SAMPLE = 50  # shards that a checkup looks at
_MOST_ASKED = 1000  # shards that a page of a scan reads, however empty they are


class PackedLayout(Layout):
    """Hash shards, each named by ``head`` and a number with as many digits as the last one has. Records do not expire.

    A key's shard is the CRC-32 of its UTF-8 text modulo the number of ``shards``.
    """

    def __init__(self, state: str, max_value_bytes: int, head: bytes, shards: int) -> None:
        super().__init__(state, max_value_bytes)
        self.shards = shards
        self._name = b"%b%%0%dd" % (head.replace(b"%", b"%%"), len(str(shards - 1)))
        self._word = b"\r\n$%d\r\n%b" % (len(self._name % 0), self._name)

    def pack(self, keys: Sequence[str]) -> PackedKeys:
        """The keys, and the names of their shards. Errors as of `Layout.pack`."""
        packed = super().pack(keys)
        numbers = self._numbers(map(str.encode, keys))
        return PackedKeys(keys, b"", packed.joined, b"".join(map(self._word.__mod__, numbers)))

    def get(self, keys: PackedKeys) -> bytes:
        """A script with an HGET for each."""
        return get_fields(len(keys), keys.names, keys.joined)

    def put(
        self,
        keys: PackedKeys,
        values: Sequence[bytes],
        absent: Sequence[bool] | None = None,  # noqa: ARG002
    ) -> tuple[bytes, int]:
        """A script with an HSET for each."""
        put = put_fields(len(keys), keys.names, interleaved(*self.words(keys, values)))
        self.check_whole(f"the {len(keys)} records of one put", put, keys.keys[0])
        return put, 1

    def rewrite(self, keys: Sequence[str], values: Sequence[bytes | None]) -> tuple[bytes, int]:
        """A script, as for one hash."""
        texts = self.encoded(keys)
        self.check_rewritten(keys, values)
        names = [self._name % number for number in self._numbers(texts)]
        rewrite = rewrite_fields(names, texts, values)
        self.check_whole(f"the {len(keys)} records of one page", rewrite, keys[0])
        return rewrite, 1

    def scan(self, cursor: bytes, page_size: int) -> bytes:
        """A script with HKEYS of shard after shard, until it has a page. The cursor is the number of the next shard."""
        start = int(cursor)
        end = min(self.shards, start + _MOST_ASKED)
        return fields_of([self._name % number for number in range(start, end)], start, page_size, self.shards)

    def scanned(self, found: list[bytes], unlisted: list[str]) -> list[str]:
        """All of them."""
        return texts_of(found, unlisted)

    def ttls(self, some: Callable[[], Iterable[str]]) -> list[bytes]:  # noqa: ARG002  found by their names
        """PTTL of shards from all over the state."""
        return [command(b"PTTL", name) for name in self._sample()]

    def encodings(self) -> list[bytes]:
        """OBJECT ENCODING of the same shards."""
        return [command(b"OBJECT", b"ENCODING", name) for name in self._sample()]

    def _sample(self) -> list[bytes]:
        count = min(_SAMPLE, self.shards)
        return [self._name % (at * self.shards // count) for at in range(count)]

    def _numbers(self, texts: Iterable[bytes]) -> list[int]:
        shards = self.shards
        return [hashed % shards for hashed in map(crc32, texts)]
