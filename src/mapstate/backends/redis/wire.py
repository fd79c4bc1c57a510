"""Redis commands packed as RESP, by columns instead of word by word; and values parsed from replies.

hiredis' packer, which redis-py calls for each command, takes the Python workers of a whole opaque batch on Spark 1.46
times the processor time (1.32 to 1.77 in 10 turns), and all processes together 1.07 times (0.97 to 1.36); with a ttl
1.41 and 1.11 times. Measured as `scripts/run python bench/million_rows.py` does, with `StringLayout.get` and `put` on
`hiredis.pack_command` in every other turn.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from mapstate.capabilities import FenceToken


def command(*words: bytes) -> bytes:
    """Pack one command of a few words."""
    return b"*%d\r\n%b" % (len(words), b"".join([b"$%d\r\n%b\r\n" % (len(word), word) for word in words]))


def commands(*each: tuple[bytes, ...]) -> bytes:
    """Pack commands of a few words, one after the other."""
    return b"".join([command(*words) for words in each])


def get_and_watch(key: bytes) -> tuple[bytes, bytes]:
    """GET of a key; and WATCH with GET of it."""
    get = command(b"GET", key)
    return get, command(b"WATCH", key) + get


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
    for at, column in enumerate(columns):
        pieces[at :: len(columns)] = column
    return b"".join(pieces)


def token_text(token: FenceToken) -> bytes:
    """A fence as it is stored: "epoch:txid:nonce", with ":closed" at its end where nobody may write."""
    nonce = b":%b" % token.nonce.encode() if token.nonce else b""
    return b"%d:%d%b%b" % (token.epoch, token.txid, nonce, b":closed" if token.closed else b"")


def token_of(text: bytes | None) -> FenceToken | None:
    """The fence that is stored as ``text``. Raises ValueError for a text that is none."""
    if text is None:
        return None
    epoch, txid, *more = text.decode().split(":")
    closed = bool(more) and more[-1] == "closed"
    nonce = more[:-1] if closed else more
    return FenceToken(int(epoch), int(txid), closed, "".join(nonce))


def incarnation_of(server: bytes | None, replication: bytes | None) -> bytes | None:
    """The incarnation of a server, which ends with its process or a failover. None where INFO is forbidden."""
    run = re.search(rb"run_id:(\w+)", server or b"")
    history = re.search(rb"master_replid:(\w+)", replication or b"")
    return None if run is None else run[1] + b"/" + (history[1] if history else b"")


INFO = command(b"INFO", b"server") + command(b"INFO", b"replication")
"""Two commands, whose replies `incarnation_of` takes."""

MULTI = command(b"MULTI")
DISCARD = command(b"DISCARD")
UNWATCH = command(b"UNWATCH")
EXEC = command(b"EXEC")
