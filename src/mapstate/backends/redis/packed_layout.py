"""Many small hashes, each with the records of a bucket of keys: half of the memory of a plain counter.

Redis keeps a hash of few short fields as one piece of memory (listpack, in Redis 6 ziplist), without the dictionary
entry, the object and the string header that each key of its own costs. There is no command that reads fields of many
hashes, so a chunk goes out as a script, and takes Redis some three times as long.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from zlib import crc32

from mapstate.backends.redis.layout import Layout, texts_of
from mapstate.backends.redis.scripts import fields_of, get_fields, put_fields, rewrite_fields
from mapstate.backends.redis.wire import PackedKeys, command, interleaved

__all__ = ["PackedLayout"]

_SAMPLE = 50  # hashes that a checkup looks at
_MOST_ASKED = 1000  # hashes that a page of a scan looks into, however empty they are


class PackedLayout(Layout):
    """``buckets`` hashes, ``head`` and a number of as many digits as the last one has. Records do not expire.

    A key's number is the CRC-32 of its UTF-8 text modulo ``buckets``, as in a cluster.
    """

    def __init__(self, state: str, max_value_bytes: int, head: bytes, buckets: int) -> None:
        super().__init__(state, max_value_bytes)
        self._buckets = buckets
        self._name = b"%b%%0%dd" % (head.replace(b"%", b"%%"), len(str(buckets - 1)))
        self._word = b"\r\n$%d\r\n%b" % (len(self._name % 0), self._name)

    def pack(self, keys: Sequence[str]) -> PackedKeys:
        """The keys, and the names of their hashes. Errors as of `Layout.pack`."""
        packed = super().pack(keys)
        numbers = self._numbers(map(str.encode, keys))
        return PackedKeys(keys, b"", packed.joined, b"".join(map(self._word.__mod__, numbers)))

    def get(self, keys: PackedKeys) -> bytes:
        """A script that asks HGET for each."""
        return get_fields(len(keys), keys.names, keys.joined)

    def put(
        self,
        keys: PackedKeys,
        values: Sequence[bytes],
        absent: Sequence[bool] | None = None,  # noqa: ARG002
    ) -> tuple[bytes, int]:
        """A script that does HSET for each."""
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
        """A script that asks HKEYS of one hash after the other, until it has a page; the cursor is the next one."""
        start = int(cursor)
        end = min(self._buckets, start + _MOST_ASKED)
        return fields_of([self._name % number for number in range(start, end)], start, page_size, self._buckets)

    def scanned(self, found: list[bytes], unlisted: list[str]) -> list[str]:
        """All of them."""
        return texts_of(found, unlisted)

    def ttls(self, some: Callable[[], Iterable[str]]) -> list[bytes]:  # noqa: ARG002  found by their names
        """PTTL of hashes from all over the state."""
        return [command(b"PTTL", name) for name in self._sample()]

    def encodings(self) -> list[bytes]:
        """OBJECT ENCODING of the same."""
        return [command(b"OBJECT", b"ENCODING", name) for name in self._sample()]

    def _sample(self) -> list[bytes]:
        count = min(_SAMPLE, self._buckets)
        return [self._name % (at * self._buckets // count) for at in range(count)]

    def _numbers(self, texts: Iterable[bytes]) -> list[int]:
        buckets = self._buckets
        return [hashed % buckets for hashed in map(crc32, texts)]
