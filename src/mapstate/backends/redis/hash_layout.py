"""The layout with one Redis hash for all records of a state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from mapstate.backends.redis.layout import Layout, texts_of
from mapstate.backends.redis.scripts import rewrite_fields
from mapstate.backends.redis.wire import PackedKeys, command, interleaved


class HashLayout(Layout):
    """One Redis hash holds all records, by their key's text. storm-redis calls it HASH. Records do not expire."""

    def __init__(self, state: str, max_value_bytes: int, name: bytes) -> None:
        super().__init__(state, max_value_bytes)
        self._name = name

    def get(self, keys: PackedKeys) -> bytes:
        """HMGET."""
        return self._packed(b"HMGET", len(keys), keys.joined)

    def put(
        self,
        keys: PackedKeys,
        values: Sequence[bytes],
        absent: Sequence[bool] | None = None,  # noqa: ARG002
    ) -> tuple[bytes, int]:
        """HSET."""
        put = self._packed(b"HSET", 2 * len(keys), interleaved(*self.words(keys, values)))
        self.check_whole(f"the {len(keys)} records of one put", put, keys.keys[0])
        return put, 1

    def rewrite(self, keys: Sequence[str], values: Sequence[bytes | None]) -> tuple[bytes, int]:
        """One script: no command replaces existing fields only."""
        texts = self.encoded(keys)
        self.check_rewritten(keys, values)
        rewrite = rewrite_fields([self._name] * len(texts), texts, values)
        self.check_whole(f"the {len(keys)} records of one page", rewrite, keys[0])
        return rewrite, 1

    def scan(self, cursor: bytes, page_size: int) -> bytes:
        """HSCAN, which replies the records, too."""
        return command(b"HSCAN", self._name, cursor, b"COUNT", b"%d" % page_size)

    def scanned(self, found: list[bytes], unlisted: list[str]) -> list[str]:
        """Every second item: the others are records."""
        return texts_of(found[::2], unlisted)

    def ttls(self, some: Callable[[], Iterable[str]]) -> list[bytes]:  # noqa: ARG002  the hash expires as a whole
        """PTTL of the hash."""
        return [command(b"PTTL", self._name)]

    def _packed(self, name: bytes, words: int, packed: bytes) -> bytes:
        start = b"*%d\r\n$%d\r\n%b\r\n$%d\r\n%b" % (words + 2, len(name), name, len(self._name), self._name)
        return b"%b%b\r\n" % (start, packed)
