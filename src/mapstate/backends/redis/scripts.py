"""What Redis runs by itself, in a cluster and for fields of hashes: few, short, and with every key declared.

A transaction under WATCH guards one slot per connection: EXEC ends all its watches. A node holds many slots of a
state, so there a put is a script, and as many of them as there are groups go out at once.
"""

from __future__ import annotations

from collections.abc import Sequence

from mapstate.backends.redis.wire import PackedKeys, command, interleaved, sizes

__all__ = [
    "claim",
    "compare_and_set",
    "fields_of",
    "get_fields",
    "guarded_put",
    "guarded_rewrite",
    "put_fields",
    "remove_equal",
    "rewrite_fields",
    "swap_ledger",
]

_PAIRS = 2000  # Lua's unpack takes 8000 words

_GUARD = b"""
local fence = redis.call('GET', KEYS[1])
if fence ~= ARGV[1] then return {0, fence} end
"""

# Of keys that were absent, a string that is there now may be what this very put has written before.
_ABSENT = (
    _GUARD
    + b"""
local absent, names = ARGV[2], {}
for at = 1, #absent do
  if string.byte(absent, at) == 1 then names[#names + 1] = KEYS[at + 1] end
end
local there = 0
for at = 1, #names, %d do
  there = there + redis.call('EXISTS', unpack(names, at, math.min(at + %d, #names)))
end
if there > 0 then
  for at = 1, #absent do
    if string.byte(absent, at) == 1 then
      local kind = redis.call('TYPE', KEYS[at + 1]).ok
      if kind ~= 'none' and kind ~= 'string' then return {2, at, kind} end
    end
  end
end
"""
    % (2 * _PAIRS, 2 * _PAIRS - 1)
)

_PUT = (
    _ABSENT
    + b"""
local keys, values, pairs, last = KEYS, ARGV, {}, 0
for at = 2, #keys do pairs[last + 1], pairs[last + 2] = keys[at], values[at + 1]; last = last + 2 end
for at = 1, last, %d do redis.call('MSET', unpack(pairs, at, math.min(at + %d, last))) end
return {1}
"""
    % (2 * _PAIRS, 2 * _PAIRS - 1)
)

_PUT_EXPIRING = (
    _ABSENT
    + b"""
for at = 2, #KEYS do redis.call('SET', KEYS[at], ARGV[at + 2], 'PX', ARGV[3]) end
return {1}
"""
)

_REWRITE = (
    _GUARD
    + b"""
for at = 2, #KEYS do
  if ARGV[at] == '-' then redis.call('DEL', KEYS[at])
  else redis.call('SET', KEYS[at], string.sub(ARGV[at], 2), 'XX', 'KEEPTTL') end
end
return {1}
"""
)

_GET_FIELDS = b"""
local found = {}
for at = 1, #KEYS do found[at] = redis.call('HGET', KEYS[at], ARGV[at]) end
return found
"""

_PUT_FIELDS = b"""
for at = 1, #KEYS do redis.call('HSET', KEYS[at], ARGV[2 * at - 1], ARGV[2 * at]) end
return 1
"""

_REWRITE_FIELDS = b"""
for at = 1, #KEYS do
  local field, value = ARGV[2 * at - 1], ARGV[2 * at]
  if value == '-' then redis.call('HDEL', KEYS[at], field)
  elseif redis.call('HEXISTS', KEYS[at], field) == 1 then redis.call('HSET', KEYS[at], field, string.sub(value, 2)) end
end
return 1
"""

_FIELDS_OF = b"""
local found, other, at = {}, {}, 0
while at < #KEYS and #found < tonumber(ARGV[2]) do
  at = at + 1
  local fields = redis.pcall('HKEYS', KEYS[at])
  if fields.err == nil then
    for _, field in ipairs(fields) do found[#found + 1] = field end
  elseif string.find(fields.err, 'WRONGTYPE', 1, true) then other[#other + 1] = KEYS[at]
  else return fields end
end
local next = ARGV[1] + at
if next >= tonumber(ARGV[3]) then next = 0 end
return {string.format('%d', next), found, other}
"""

_COMPARE_AND_SET = b"""
local found = redis.call('GET', KEYS[1])
if (found or '') == ARGV[1] then redis.call('SET', KEYS[1], ARGV[2]); return ARGV[2] end
return found
"""

_SWAP_LEDGER = b"""
if (redis.call('GET', KEYS[1]) or '') ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[2])
redis.call('SET', KEYS[2], ARGV[3])
if ARGV[4] ~= '' then
  for _, claim in ipairs(redis.call('HKEYS', KEYS[3])) do
    if tonumber(string.match(claim, '^%d+')) <= tonumber(ARGV[4]) then redis.call('HDEL', KEYS[3], claim) end
  end
end
return 1
"""

_REMOVE_EQUAL = b"""
local found = redis.call('GET', KEYS[1])
if found and found ~= ARGV[1] then return 0 end
for at = 1, #KEYS do redis.call('DEL', KEYS[at]) end
return 1
"""

_CLAIM = b"""
redis.call('HSETNX', KEYS[1], ARGV[1], ARGV[2])
return redis.call('HGET', KEYS[1], ARGV[1])
"""


def guarded_put(
    fence: bytes, token: bytes, keys: PackedKeys, values: Sequence[bytes], expiry: bytes | None, *, absent: bytes
) -> bytes:
    """Stores all of a group's records where its fence is at ``token``, and no absent one is of another type.

    ``absent`` is empty, or has a byte for each key, 1 where a get gave nothing. The reply: [1]; or [0, the fence]; or
    [2, number of a key from 1 on, its type], and nothing was written.
    """
    if expiry is None:
        return _packed(_PUT, fence, keys, [token, absent], values)
    return _packed(_PUT_EXPIRING, fence, keys, [token, absent, expiry], values)


def guarded_rewrite(fence: bytes, token: bytes, keys: PackedKeys, values: Sequence[bytes | None]) -> bytes:
    """Replaces and removes a group's records where its fence is at ``token``. The reply as of `guarded_put`."""
    return _packed(_REWRITE, fence, keys, [token], _marked(values))


def get_fields(count: int, names: bytes, fields: bytes) -> bytes:
    """One field of each hash; ``names`` and ``fields`` are words, ``count`` of each. The reply: their values."""
    return _of_hashes(_GET_FIELDS, count, count, names, fields)


def put_fields(count: int, names: bytes, pairs: bytes) -> bytes:
    """Sets one field of each hash; ``pairs`` are fields and values. No guard of its own. The reply: 1."""
    return _of_hashes(_PUT_FIELDS, count, 2 * count, names, pairs)


def rewrite_fields(names: Sequence[bytes], fields: Sequence[bytes], values: Sequence[bytes | None]) -> bytes:
    """Replaces and removes a field of each hash where it is there. No guard of its own. The reply: 1."""
    pairs = [word for pair in zip(fields, _marked(values), strict=True) for word in pair]
    return command(b"EVAL", _REWRITE_FIELDS, b"%d" % len(names), *names, *pairs)


def fields_of(names: Sequence[bytes], start: int, most: int, count: int) -> bytes:
    """The fields of these hashes, up to that with which there are ``most``.

    ``names`` are those from number ``start`` on, out of ``count``. The reply: the number of the next hash, 0 at the
    end, the fields, and those of ``names`` that are no hash.
    """
    numbers = (b"%d" % start, b"%d" % most, b"%d" % count)
    return command(b"EVAL", _FIELDS_OF, b"%d" % len(names), *names, *numbers)


def compare_and_set(key: bytes, before: bytes | None, after: bytes) -> bytes:
    """Sets ``key``, which is never empty, where it is at ``before``. The reply: what it is at then."""
    return command(b"EVAL", _COMPARE_AND_SET, b"1", key, before or b"", after)


def swap_ledger(
    keys: tuple[bytes, bytes, bytes], before: bytes | None, after: bytes, buckets: bytes, closed: int | None
) -> bytes:
    """Sets ledger and number of buckets where the ledger is at ``before``; drops the claims up to ``closed``. 1 or 0.

    ``keys`` of ledger, buckets and claims.
    """
    up_to = b"" if closed is None else b"%d" % closed
    return command(b"EVAL", _SWAP_LEDGER, b"3", *keys, before or b"", after, buckets, up_to)


def claim(key: bytes, name: bytes, holder: bytes) -> bytes:
    """Create-if-absent in a hash. The reply: the holder."""
    return command(b"EVAL", _CLAIM, b"1", key, name, holder)


def remove_equal(keys: Sequence[bytes], expected: bytes) -> bytes:
    """Removes all keys where the first is at ``expected``, or gone. The reply: 1 or 0."""
    return command(b"EVAL", _REMOVE_EQUAL, b"%d" % len(keys), *keys, expected)


def _of_hashes(script: bytes, count: int, more: int, names: bytes, packed: bytes) -> bytes:
    """EVAL with ``count`` names and ``more`` words behind them."""
    number = b"%d" % count
    words = count + more + 3
    start = b"*%d\r\n$4\r\nEVAL\r\n$%d\r\n%b\r\n$%d\r\n%b" % (words, len(script), script, len(number), number)
    return b"%b%b%b\r\n" % (start, names, packed)


def _marked(values: Sequence[bytes | None]) -> list[bytes]:
    """A word for each: what is removed is told from a record that is empty."""
    return [b"-" if value is None else b"+" + value for value in values]


def _packed(script: bytes, fence: bytes, keys: PackedKeys, first: Sequence[bytes], values: Sequence[bytes]) -> bytes:
    """EVAL of a group."""
    words = (b"EVAL", script, b"%d" % (len(keys) + 1), fence)
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
