"""What only operators ask of a Redis: the list of states, a scan in parts, the removal of a state, a checkup."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from mapstate.backends.redis.connection import EXEC, INFO, MULTI, Server, command, get_and_watch, incarnation_of
from mapstate.backends.redis.hash_layouts import PackedLayout
from mapstate.backends.redis.layout import Layout, StringLayout, escaped
from mapstate.backends.redis.listing import ScanPosition, Walk, digest_of, torn, walked, walked_nodes
from mapstate.backing_map import close_if_possible
from mapstate.capabilities import FenceToken, Scan, state_in
from mapstate.errors import CorruptRecordError, FencedError, StoreError, StoreFullError, StoreUnavailableError
from mapstate.findings import DistinctKeys, Finding, Unreadable

_LEDGER = b"!ledger"
_COUNT = 1000  # keys of the database that one request walks through: about a millisecond of the server's time
_REMOVED = 1000  # records on a page of a state that is dropped
_PACKED_FORMS = (b"listpack", b"ziplist")
_SAMPLE = 20  # records that a checkup looks at
_LOOK = 10_000  # keys of the server that one request walks through to find them

_BITS = 64
_END = 1 << _BITS
"""The place behind the last one."""

_LEAST_KEYS = 5_000
"""Keys of the database for each part, at least: a table of so many keys has far more slots than there are parts."""

Page = list[tuple[str, bytes]]


def states_on_server(server: Server, prefix: bytes, records: str | None) -> Iterator[Page]:
    """See `ListsStates.states`. Errors: see `walked`.

    Where ``records`` have a name of their own, only the state that has them, which its ledger names.
    """

    def ledgers_of(names: Sequence[bytes]) -> list[bytes | None]:
        ledgers: list[bytes | None] = server.ask(command(b"MGET", *(prefix + name + _LEDGER for name in names)), 1)[0]
        return ledgers

    if records is None:
        yield from _states(walked(server, _scan_for(prefix, _LEDGER), ScanPosition()), prefix, _LEDGER, ledgers_of)
    else:
        ledger = server.ask(command(b"GET", records.encode() + _LEDGER), 1)[0]
        yield [] if ledger is None else [(state_in(ledger) or records, ledger)]


def states_in_cluster(cluster: Any, prefix: bytes, request: Callable[..., Any]) -> Iterator[Page]:
    """See `ListsStates.states`: node after node. ``request`` makes a `Request`. Errors: see `walked_nodes`."""
    from redis.crc import key_slot

    start, end = prefix + b"{", b"}" + _LEDGER

    def ledgers_of(names: Sequence[bytes]) -> list[bytes | None]:
        # MGET replies nothing for a key of another type, where GET raises.
        asked = [request(key_slot(name), (command(b"MGET", start + name + end),)) for name in names]
        return [reply.found[0][0] for reply in cluster.ask(asked)]

    yield from _states(walked_nodes(cluster, cluster.shape(), _scan_for(start, end)), start, end, ledgers_of)


def _scan_for(start: bytes, end: bytes) -> Callable[[bytes], bytes]:
    pattern = escaped(start) + b"*" + end
    return lambda cursor: command(b"SCAN", cursor, b"MATCH", pattern, b"COUNT", b"%d" % _COUNT)


def _states(
    walk: Walk, start: bytes, end: bytes, ledgers_of: Callable[[Sequence[bytes]], list[bytes | None]]
) -> Iterator[Page]:
    """The states of each page, without those under another prefix that begins with this one."""
    seen = set[bytes]()
    barred = {*b"{}"} if start.endswith(b"{") else set[int]()
    for (listed,), _ in walk:
        names = [key[len(start) : -len(end)] for key in dict.fromkeys(listed)]
        new = [name for name in names if name not in seen and barred.isdisjoint(name)]
        seen.update(new)
        page = []
        for name, ledger in zip(new, ledgers_of(new) if new else [], strict=True):
            text = name.decode(errors="backslashreplace")
            state = None if ledger is None else state_in(ledger)
            elsewhere = state is not None and state != text and text.endswith(state)
            if ledger is not None and not elsewhere:
                page.append((text, ledger))
        yield page


def parts_of(server: Server, layout: Layout, most: int) -> list[str]:
    """See `ScansParts.scan_parts`: ranges of SCAN, or of hash shards. One part for a hash, or without INFO."""
    keys, *info = server.ask(command(b"DBSIZE") + INFO, 3, optional=2)
    name = digest_of(incarnation_of(*info))
    starts, end = [0], _END
    if not name:
        most = 1
    if isinstance(layout, PackedLayout):
        count, end = min(most, layout.shards), layout.shards
        starts = [number * end // count for number in range(count)]
    elif isinstance(layout, StringLayout):
        bits = max(0, min(most, keys // _LEAST_KEYS).bit_length() - 1)
        starts = [number << (_BITS - bits) for number in range(1 << bits)]
    return [f"{start} {until} {name}" for start, until in zip(starts, [*starts[1:], end], strict=True)]


def walked_part(server: Server, layout: Layout, part: str, page_size: int) -> Walk:
    """Walk through a part. Errors: see `walked`, and StoreUnavailableError where keys of two parts are mixed."""
    start, end, name = part.split(" ")
    if isinstance(layout, PackedLayout):
        until = int(end)
        return walked(server, lambda at: layout.scan(at, page_size, until), ScanPosition(start.encode(), name or None))
    if int(end) - int(start) == _END:
        return walked(server, lambda at: layout.scan(at, page_size), ScanPosition(b"0", name or None))
    table = TablePart(server, layout, int(end))
    position = ScanPosition(cursor_at(int(start)), name)
    return walked(server, lambda at: table.scan(at, page_size), position, table.step)


def place_of(cursor: bytes) -> int:
    """Where a cursor of SCAN is in the order of the slots."""
    return int(f"{int(cursor):0{_BITS}b}"[::-1], 2)


def cursor_at(place: int) -> bytes:
    """The cursor of a place."""
    return b"%d" % int(f"{place:0{_BITS}b}"[::-1], 2)


class TablePart:
    """The places below ``end`` of a server's hash table.

    A cursor of SCAN is a slot of the table as a number with its bits reversed: slots come in the order of their
    ``place``, the reversed bits. The place of a key never changes while its server runs, however the table grows or
    shrinks, so a part is a range of places. SCAN does not stop at the end of a range. But it visits at most ten times
    COUNT slots and one; and where COUNT is 1, it stops after the first slot with a key in it. Both hold since Redis 2.8
    and are not documented: the cursors that come back tell whether they held.
    """

    def __init__(self, server: Server, layout: Layout, end: int) -> None:
        self._server = server
        self._layout = layout
        self._end = end

    def scan(self, cursor: bytes, page_size: int) -> bytes:
        """SCAN that does not pass the end, if that can be told."""
        return self._layout.scan(cursor, self._count(cursor, page_size))

    def step(self, before: bytes, after: bytes, found: list[bytes]) -> tuple[bytes | None, list[bytes]]:
        """The next cursor, None at the end, and what was found of this part, after a `scan` from cursor to cursor.

        Raises StoreUnavailableError where keys of this part and of the next one are mixed.
        """
        place = place_of(after) or _END
        if place_of(before) < place < self._end:
            return after, found
        if place == self._end:
            return None, found
        if place < self._end or self._count(before, _END) > 1:
            raise torn(self._server, "Redis moved its keys about")
        return None, []  # the slots up to the end were empty: what was found is behind it

    def _count(self, cursor: bytes, most: int) -> int:
        slots = (self._end - place_of(cursor)) >> (_BITS - int(cursor).bit_length())  # or more
        return max(1, min(most, (slots - 1) // 10))


def once_each(where: Any, pages: Iterable[list[str]]) -> Iterator[list[str]]:
    """The pages; raises StoreUnavailableError after them if a key came twice, as where the table has shrunk."""
    listed, count = DistinctKeys(), 0
    for page in pages:
        listed.update(page)
        count += len(page)
        yield page
    if len(listed) != count:
        raise torn(where, "Redis moved its keys about and gave one twice")


def dropped(store: Any, state: str, token: FenceToken, finish: Callable[[], bool]) -> Iterator[int]:
    """See `Drops.drop`: page by page of records under an open fence.

    Then ``finish`` removes the other keys, and returns False where the ledger has changed.
    """
    writer: Any = store.writer(token)
    foreign = Unreadable(state)
    try:
        for page in foreign.listed(store.scan(_REMOVED)):
            keys, _ = foreign.read(store.multi_get, page)  # which raises for keys of another type
            writer.multi_rewrite(keys, [None] * len(keys))
            yield len(keys)
    finally:
        close_if_possible(writer)
    if not finish():
        raise FencedError(
            f"the ledger of state {state!r} has changed: the removal with txid {token.txid} ends here. Run it again.",
            state=state,
            txid=token.txid,
        )
    if foreign.count:
        raise foreign.error()


def removed_if(server: Server, names: Sequence[bytes], ledger: bytes) -> bool:
    """Remove the ``names`` in one transaction, if the first of them, the ledger's, is at ``ledger``."""
    conn, replies = server.watched(get_and_watch(names[0])[1])
    if replies[0] != ledger:
        server.unwatch(conn)
        return False
    return server.tell(MULTI + command(b"DEL", *names) + EXEC, 3, conn)[-1] is not None


class RedisFacts(NamedTuple):
    """What a server says of itself, and of one state.

    ``info``        INFO, by name; empty where the user may not run it
    ``config``      CONFIG GET, by name; empty where it is forbidden, as managed services do
    ``clock``       seconds that the server's clock is ahead of this machine's
    ``ledger_ttl``  of the ledger's key, in milliseconds; negative is none
    ``ttls``        of some records, alike
    ``forms``       OBJECT ENCODING of some hash shards, None for an absent one; empty for other layouts, None where
                    the user may not run it
    """

    info: dict[str, str]
    config: dict[str, str]
    clock: float | None
    ledger_ttl: int | None
    ttls: list[int]
    forms: Sequence[bytes | None] | None = ()


def judge(facts: RedisFacts, replay_horizon: float) -> list[Finding]:
    """The findings, also those that need no action. Pure."""
    findings = [_ledger_ttl(facts), *_record_ttls(facts, replay_horizon), *_packing(facts), _clock(facts)]
    if not facts.info:
        unseen = (
            "this user may not run INFO, so eviction, memory and persistence cannot be seen; and a job of this user "
            "does not notice a restart or a failover of the server within a batch"
        )
        return [*findings, Finding("error", "server", unseen, "INFO", "Allow the user INFO.")]
    return [_version(facts), _eviction(facts), _memory(facts), *_persistence(facts), *_replicas(facts), *findings]


def _version(facts: RedisFacts) -> Finding:
    version = facts.info.get("redis_version", "0")
    old = [int(part) for part in re.findall(r"\d+", version)[:2]] < [6, 2]
    return Finding("error" if old else "ok", "version", version, "6.2 or newer", "Upgrade the server." if old else "")


def _eviction(facts: RedisFacts) -> Finding:
    policy = _setting(facts, "maxmemory-policy", "maxmemory_policy", "unknown")
    limited = int(_setting(facts, "maxmemory", "maxmemory", "0")) > 0
    setting = f"maxmemory-policy {policy}, maxmemory {'set' if limited else 'not set'}"
    if policy == "noeviction":
        return Finding("ok", "eviction", setting, "noeviction")
    if policy.startswith("volatile-"):
        expiring = any(ttl >= 0 for ttl in facts.ttls)
        risk = (
            "it may drop keys with a ttl, such as records of this state, but never the ledger"
            if expiring
            else ("it may drop keys with a ttl only: records of states with one, but never a ledger")
        )
        advice = "Set maxmemory-policy noeviction." if expiring else ""
        return Finding("warning" if expiring else "ok", "eviction", f"{setting}: {risk}", "noeviction", advice)
    advice = "CONFIG SET maxmemory-policy noeviction; a record that was evicted already is counted anew from nothing."
    if limited or policy == "unknown":
        risk = "it may drop any record, and the ledger" if limited else "it cannot be seen"
        return Finding("error" if limited else "warning", "eviction", f"{setting}: {risk}", "noeviction", advice)
    return Finding("warning", "eviction", f"{setting}: once it is, any record may be dropped", "noeviction", advice)


def _memory(facts: RedisFacts) -> Finding:
    used, most = int(facts.info.get("used_memory", "0")), int(_setting(facts, "maxmemory", "maxmemory", "0"))
    if not most:
        return Finding("ok", "memory", f"{used} bytes used, maxmemory not set", "room")
    share = used / most
    severity = "error" if share >= 1 else "warning" if share > 0.9 else "ok"
    advice = "" if severity == "ok" else "Raise maxmemory: where there is no room, batches fail until there is."
    return Finding(severity, "memory", f"{used} of {most} bytes used, {share:.0%}", "at most 90%", advice)  # type: ignore[arg-type]


def _persistence(facts: RedisFacts) -> Iterator[Finding]:
    info, save = facts.info, facts.config.get("save")
    expected = "appendonly yes, appendfsync everysec or always"
    if info.get("aof_enabled") == "1":
        sync = facts.config.get("appendfsync", "unknown")
        setting = f"appendonly yes, appendfsync {sync}"
        if info.get("aof_last_write_status", "ok") != "ok":
            yield Finding("error", "persistence", f"{setting}; its last write failed", expected, "Look at the disk.")
        elif sync not in ("always", "everysec"):
            advice = "CONFIG SET appendfsync everysec."
            yield Finding("warning", "persistence", f"{setting}: a crash loses what was not flushed", expected, advice)
        else:
            lost = "; a power failure may lose the last second, which the next batch reports" * (sync != "always")
            yield Finding("ok", "persistence", setting + lost, expected)
        return
    advice = "CONFIG SET appendonly yes, and in redis.conf."
    if save == "":
        lost = "neither AOF nor RDB: a restart loses everything"
        yield Finding("error", "persistence", lost, expected, advice)
        return
    kept = "RDB only" if save else "no AOF (whether RDB is on cannot be seen)"
    setting = f"{kept}: a crash loses all batches since the last snapshot, and the next batch is refused"
    yield Finding("warning", "persistence", setting, expected, advice)
    if info.get("rdb_last_bgsave_status", "ok") != "ok":
        yield Finding(
            "error", "persistence", "the last RDB snapshot failed", "ok", "Look at the server's log and disk."
        )


def _replicas(facts: RedisFacts) -> Iterator[Finding]:
    if facts.info.get("role") == "slave":
        advice = "Name the primary in the URL."
        yield Finding("error", "replication", "this server is a replica, and takes no writes", "a primary", advice)
        return
    count = int(facts.info.get("connected_slaves", "0"))
    if not count:
        yield Finding("ok", "replication", "no replicas", "none, or min-replicas-to-write of 1 or more")
        return
    least = facts.config.get("min-replicas-to-write", facts.config.get("min-slaves-to-write", "unknown"))
    risky = least in ("0", "unknown")
    setting = f"{count} replicas, min-replicas-to-write {least}"
    if risky:
        setting += ": a failover may lose batches that were acknowledged, and the next one is refused"
    advice = "CONFIG SET min-replicas-to-write 1, and see that each replica has appendonly yes." if risky else ""
    expected = "min-replicas-to-write of 1 or more, replicas with AOF"
    yield Finding("warning" if risky else "ok", "replication", setting, expected, advice)


def _clock(facts: RedisFacts) -> Finding:
    if facts.clock is None:
        return Finding(
            "warning", "clock", "it cannot be seen: this user may not run TIME", "at most 5 s off", "Allow TIME."
        )
    off = abs(facts.clock) > 5
    setting = f"the server's clock is {abs(facts.clock):.1f} s {'ahead' if facts.clock > 0 else 'behind'}"
    advice = "Synchronize the clocks (ntp): a ttl and a new ledger's first txid are taken from them." if off else ""
    return Finding("warning" if off else "ok", "clock", setting, "at most 5 s", advice)


def _ledger_ttl(facts: RedisFacts) -> Finding:
    if facts.ledger_ttl is None:
        return Finding(
            "warning", "ledger", "its ttl cannot be seen: this user may not run PTTL", "no ttl", "Allow PTTL."
        )
    if facts.ledger_ttl < 0:
        return Finding("ok", "ledger", "its key does not expire", "no ttl")
    setting = f"its key expires in {facts.ledger_ttl / 1000:.0f} s, and the state with it"
    return Finding("error", "ledger", setting, "no ttl", "PERSIST it at once, and find out who set that.")


def _record_ttls(facts: RedisFacts, replay_horizon: float) -> Iterator[Finding]:
    expiring = [ttl / 1000 for ttl in facts.ttls if ttl >= 0]
    if not expiring:
        return
    setting = f"{len(expiring)} of {len(facts.ttls)} records looked at expire, the last in {max(expiring):.0f} s"
    expected = f"more than the replay horizon of {replay_horizon:.0f} s"
    short = max(expiring) < replay_horizon
    advice = "Give the spec a longer ttl, or none: a replay counts a key that has expired from nothing."
    yield Finding("warning" if short else "ok", "ttl", setting, expected, advice if short else "")


def _packing(facts: RedisFacts) -> Iterator[Finding]:
    expected = "listpack (ziplist in Redis 6)"
    if facts.forms is None:
        unseen = "the form of the hashes cannot be seen: this user may not run OBJECT ENCODING"
        yield Finding("warning", "packing", unseen, expected, "Allow OBJECT|ENCODING.")
        return
    forms = [form for form in facts.forms if form is not None]
    if not forms:
        return
    loose = sum(form not in _PACKED_FORMS for form in forms)
    setting = f"{loose} of {len(forms)} hashes looked at are kept as hashtable"
    advice = (
        "Their memory is that of keys. A record or key is longer than hash-max-listpack-value, or a hash shard has "
        "more than hash-max-listpack-entries (hash-max-ziplist-... in Redis 6): raise those, or make a state with "
        "blocks. A hashtable stays one until the server is started again."
    )
    yield Finding("warning" if loose else "ok", "packing", setting, expected, advice if loose else "")


def _setting(facts: RedisFacts, config: str, info: str, default: str) -> str:
    return facts.config.get(config, facts.info.get(info, default))


def allowed(ask: Callable[[], Any]) -> Any:
    """Return what ``ask`` returns, None where this user may not run the command or the server lacks it."""
    try:
        return ask()
    except (StoreUnavailableError, StoreFullError):
        raise
    except StoreError:
        return None


def sampled(store: Scan) -> list[str]:
    """Some keys of a state; none where there are none, or where the user may not list them."""
    with suppress(CorruptRecordError):  # a whole scan reports names that are no keys
        return (allowed(lambda: next(store.scan(_LOOK), [])) or [])[:_SAMPLE]
    return []


def facts_of(ask: Callable[[bytes], Any], ttls: Sequence[bytes]) -> RedisFacts:
    """The facts that a server tells. ``ttls`` are commands for the ttl of the ledger, and of some records."""
    before = time.time()
    clock = ask(command(b"TIME"))
    middle = (before + time.time()) / 2
    answers = [ask(command) for command in ttls]
    info = (ask(command(b"INFO")) or b"").decode().splitlines()
    config: list[bytes] = []
    for name in (b"maxmemory*", b"save", b"append*", b"min-*-to-write"):
        config += ask(command(b"CONFIG", b"GET", name)) or []
    texts = [text.decode() for text in config]
    return RedisFacts(
        info=dict(line.split(":", 1) for line in info if ":" in line),
        config=dict(zip(texts[::2], texts[1::2], strict=True)),
        clock=None if clock is None else int(clock[0]) + int(clock[1]) / 1e6 - middle,
        ledger_ttl=answers[0] if answers else None,
        ttls=[ttl for ttl in answers[1:] if ttl is not None],
    )


def check_server(store: Scan, server: Server, layout: Layout, ledger: bytes, replay_horizon: float) -> list[Finding]:
    """The findings of a state on one server."""
    some = layout.ttls(lambda: sampled(store))
    facts = facts_of(lambda asked: allowed(lambda: server.ask(asked, 1)[0]), [command(b"PTTL", ledger), *some])
    asked = layout.encodings()
    forms = allowed(lambda: server.ask(b"".join(asked), len(asked))) if asked else []
    return judge(facts._replace(forms=forms), replay_horizon)
