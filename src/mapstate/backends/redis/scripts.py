"""The Lua scripts that Redis runs, for a cluster and for fields of many hashes: few, short, with every key declared.

A transaction under WATCH guards one slot per connection, because EXEC ends all its watches. A node of a cluster holds
many slots of a state, so a put is a script there, one for each slot group, and all of them are sent at once.

The scripts are files in ``lua/``, whose comments name KEYS, ARGV and the reply.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pkgutil import get_data

from mapstate.backends.redis.connection import command
from mapstate.backends.redis.layout import PackedKeys, interleaved, sizes


@cache
def script(*names: str) -> bytes:
    """The text of one script: these files of ``lua/``, one after the other, without their comments."""
    lines: list[bytes] = []
    for name in names:
        text = get_data(__package__, f"lua/{name}.lua")  # also finds it in a zip file, as Spark's --py-files are
        if text is None:
            raise FileNotFoundError(f"mapstate is installed without the Lua script {name}.lua: install it again")
        lines += [line for line in text.splitlines(keepends=True) if not line.startswith(b"--")]
    return b"".join(lines)


def guarded_put(
    fence: bytes, token: bytes, keys: PackedKeys, values: Sequence[bytes], expiry: bytes | None, *, absent: bytes
) -> bytes:
    """Stores all of a slot group's records where its fence is at ``token``, and no absent one has another type.

    ``absent`` is empty, or has a byte for each key, 1 where a get found none. The reply: [1]; or, and nothing was
    written, [0, the fence] or [2, number of a key from 1 on, its type].
    """
    if expiry is None:
        return _packed(script("fence_guard", "type_guard", "put"), fence, keys, [token, absent], values)
    return _packed(script("fence_guard", "type_guard", "put_expiring"), fence, keys, [token, absent, expiry], values)


def guarded_rewrite(fence: bytes, token: bytes, keys: PackedKeys, values: Sequence[bytes | None]) -> bytes:
    """Replaces and removes a slot group's records where its fence is at ``token``. The reply as of `guarded_put`."""
    return _packed(script("fence_guard", "rewrite"), fence, keys, [token], _marked(values))


def get_fields(count: int, names: bytes, fields: bytes) -> bytes:
    """One field of each hash; ``names`` and ``fields`` are words, ``count`` of each. The reply: their values."""
    return _of_hashes(script("get_fields"), count, count, names, fields)


def put_fields(count: int, names: bytes, pairs: bytes) -> bytes:
    """Sets one field of each hash; ``pairs`` are fields and values. No guard of its own. The reply: 1."""
    return _of_hashes(script("put_fields"), count, 2 * count, names, pairs)


def rewrite_fields(names: Sequence[bytes], fields: Sequence[bytes], values: Sequence[bytes | None]) -> bytes:
    """Replaces and removes a field of each hash where it is there. No guard of its own. The reply: 1."""
    pairs = [word for pair in zip(fields, _marked(values), strict=True) for word in pair]
    return command(b"EVAL", script("rewrite_fields"), b"%d" % len(names), *names, *pairs)


def fields_of(names: Sequence[bytes], start: int, most: int, count: int) -> bytes:
    """The fields of hash after hash, until there are ``most``.

    ``names`` are the hashes from number ``start`` on, out of ``count``. The reply: the number of the next hash, 0 at
    the end; the fields; and those of ``names`` that are no hash.
    """
    numbers = (b"%d" % start, b"%d" % most, b"%d" % count)
    return command(b"EVAL", script("fields_of"), b"%d" % len(names), *names, *numbers)


def compare_and_set(key: bytes, before: bytes | None, after: bytes) -> bytes:
    """Sets ``key``, which is never empty, where it is at ``before``. The reply: what it is at then."""
    return command(b"EVAL", script("compare_and_set"), b"1", key, before or b"", after)


def swap_ledger(
    keys: tuple[bytes, bytes, bytes], before: bytes | None, after: bytes, groups: bytes, closed: int | None
) -> bytes:
    """Sets the ledger and the number of slot ``groups`` where the ledger is at ``before``. The reply: 1 or 0.

    Drops the claims up to txid ``closed``. ``keys`` are those of the ledger, the number and the claims.
    """
    up_to = b"" if closed is None else b"%d" % closed
    return command(b"EVAL", script("swap_ledger"), b"3", *keys, before or b"", after, groups, up_to)


def claim(key: bytes, name: bytes, holder: bytes) -> bytes:
    """Create-if-absent in a hash. The reply: the holder."""
    return command(b"EVAL", script("claim"), b"1", key, name, holder)


def remove_equal(keys: Sequence[bytes], expected: bytes) -> bytes:
    """Removes all keys where the first is at ``expected``, or gone. The reply: 1 or 0."""
    return command(b"EVAL", script("remove_equal"), b"%d" % len(keys), *keys, expected)


def _of_hashes(text: bytes, count: int, more: int, names: bytes, packed: bytes) -> bytes:
    """EVAL with ``count`` names, and ``more`` words after them."""
    number = b"%d" % count
    words = count + more + 3
    start = b"*%d\r\n$4\r\nEVAL\r\n$%d\r\n%b\r\n$%d\r\n%b" % (words, len(text), text, len(number), number)
    return b"%b%b%b\r\n" % (start, names, packed)


def _marked(values: Sequence[bytes | None]) -> list[bytes]:
    """A word for each value: its first byte tells a removal from an empty record."""
    return [b"-" if value is None else b"+" + value for value in values]


def _packed(text: bytes, fence: bytes, keys: PackedKeys, first: Sequence[bytes], values: Sequence[bytes]) -> bytes:
    """EVAL for the records of a slot group."""
    words = (b"EVAL", text, b"%d" % (len(keys) + 1), fence)
    count = len(words) + len(keys) + len(first) + len(values)
    start = b"".join([b"\r\n$%d\r\n%b" % (len(word), word) for word in words])
    middle = b"".join([b"\r\n$%d\r\n%b" % (len(word), word) for word in first])
    return b"*%d%b%b%b%b\r\n" % (
        count,
        start,
        keys.joined,
        middle,
        interleaved(sizes(values), values),
    )
