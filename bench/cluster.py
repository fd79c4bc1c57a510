"""A cluster of three on this machine beside a single server: keys per second of the same batches.

This process calls a task with Arrow batches, for a state on each. All servers share the machine's cores with the
task, so a cluster cannot be faster here. The figures show the cost of spreading a chunk over nodes and slot groups.

    packed      the same commands on both, packed beforehand and sent to all nodes at once: what servers and sockets
                take by themselves, and what a library that takes no time would reach
    grouped     the state again, with keys in order of their slot groups, which are known beforehand: telling groups
                apart costs nothing
    unguarded   the same with a plain MSET for each slot group, which no fence guards
    few         as many slot groups as docs/performance.md recommends for three masters that stay three
    in order    the state again, slot group after slot group, as Spark brings the keys of a large batch: `key_order`
"""

from __future__ import annotations

from measuring import Answer, Goal, Row, by_turns, ratios, spread, table  # isort: skip  # finds the servers

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any
from unittest.mock import patch

from counted_state import ARROW_ROWS, STATE, CountedState, arrow_batches, chunks, processor_lines, processor_time
from redis_groups import RedisCluster
from servers import GivenRedis, RedisServer

from mapstate.backends.redis import cluster_writer
from mapstate.backends.redis.backend import RedisBackend
from mapstate.backends.redis.cluster_store import RedisClusterBackend
from mapstate.backends.redis.cluster_writer import GroupKeys, SlotGroup, by_slot_group
from mapstate.backends.redis.connection import command
from mapstate.backends.redis.layout import PackedKeys, StringLayout
from mapstate.spec import CHUNK_SIZE

_PAYLOAD = b"[280000009,3,2]"
_TOKEN = b"1:280000009:nonce"
_LIMIT = 2**29
_GROUPS = RedisClusterBackend().buckets
_FEW = 24
_GROUPED = "cluster of three, grouped beforehand"
_UNGUARDED = "cluster of three, grouped beforehand, unguarded"
_IN_ORDER = "cluster of three, in order"

_Round = list[tuple[Any, list[bytes]]]
"""The commands for each connection, sent at once."""


def sent(rounds: list[_Round]) -> Callable[[], None]:
    """Send the packed rounds one after the other, each to all its connections before the first reply."""

    def send() -> None:
        for one in rounds:
            for conn, commands in one:
                conn.send_packed_command(commands, check_health=False)
            for conn, commands in one:
                for _ in commands:
                    reply = conn.read_response()
                    assert not isinstance(reply, Exception), reply

    return send


def to_one(conn: Any, users: list[str]) -> list[_Round]:
    """Pack MGET and MSET of each chunk."""
    layout, rounds = StringLayout(STATE, _LIMIT, b"ready:", None), list[_Round]()
    for some in chunks(users, CHUNK_SIZE):
        keys = layout.pack(list(some))
        put, _ = layout.put(keys, [_PAYLOAD] * len(keys))
        rounds += [[(conn, [layout.get(keys)])], [(conn, [put])]]
    return rounds


def to_nodes(conns: list[Any], users: list[str]) -> list[_Round]:
    """Pack fence and MGET, and the script with its guard, for each slot group's share of each chunk."""
    groups = [SlotGroup(b"ready", number, STATE, _LIMIT, None) for number in range(_GROUPS)]
    of = [conns[one.slot * len(conns) // 16384] for one in groups]
    rounds: list[_Round] = [
        [(conn, [command(b"SET", one.fence, _TOKEN)])] for conn, one in zip(of, groups, strict=True)
    ]
    for some in chunks(users, RedisClusterBackend.chunk_size):
        gets: dict[Any, list[bytes]] = {conn: [] for conn in conns}
        puts: dict[Any, list[bytes]] = {conn: [] for conn in conns}
        for part in by_slot_group(some, _GROUPS):
            group, conn = groups[part.group], of[part.group]
            keys = group.pack(part.keys)
            gets[conn] += group.fenced_get(keys)
            puts[conn].append(group.fenced_put(_TOKEN, keys, [_PAYLOAD] * len(keys), b""))
        rounds += [list(gets.items()), list(puts.items())]
    return rounds


class Grouped:
    """Users in order of their slot groups, chunk by chunk, and a table of each chunk's parts."""

    def __init__(self, users: list[str]) -> None:
        assert RedisClusterBackend.chunk_size == ARROW_ROWS, "a chunk is a batch from Arrow"
        self.users: list[str] = []
        self._places: dict[str, list[tuple[int, list[int]]]] = {}
        for some in chunks(users, ARROW_ROWS):
            places, start = [], 0
            for part in by_slot_group(some, _GROUPS):
                places.append((part.group, [*range(start, start + len(part.keys))]))
                start += len(part.keys)
                self.users += part.keys
            self._places[self.users[-start]] = places

    def parts(self, keys: Sequence[str], _: int) -> list[GroupKeys]:
        """Replace `by_slot_group`."""
        return [GroupKeys(group, at, list(keys[at[0] : at[-1] + 1])) for group, at in self._places[keys[0]]]

    def apply(self, state: CountedState, batches: Sequence[Any], *, guarded: bool = True) -> float:
        """Apply one batch; its seconds."""
        with ExitStack() as patches:
            patches.enter_context(patch.object(cluster_writer, "by_slot_group", self.parts))
            if not guarded:
                patches.enter_context(patch.object(SlotGroup, "fenced_put", _mset))
                patches.enter_context(patch.object(cluster_writer.ClusterWriter, "_check_done", lambda *_: None))
            return state.apply(batches)


def _mset(group: SlotGroup, _: bytes, keys: PackedKeys, values: Sequence[bytes], __: object) -> bytes:
    """Replace `SlotGroup.fenced_put`. Its reply, OK, is not that of the script, and nothing checks it."""
    return group._layout.put(keys, values)[0]


def connected(server: GivenRedis) -> Any:
    """Open a connection, and keep it to the end."""
    return RedisBackend(port=server.port).pool().get_connection()


def ask(keys: int = 100_000, turns: int = 9) -> Answer:
    users = [f"user-{at}" for at in range(keys)]
    batches = arrow_batches(users)
    with RedisServer().start() as server, RedisCluster() as nodes:
        states = {
            "single": CountedState(server.url),
            "cluster of three": CountedState(nodes.url),
            f"cluster of three, {_FEW} slot groups": CountedState(f"{nodes.url}?buckets={_FEW}", f"{STATE}-{_FEW}"),
        }
        grouped = Grouped(users)
        in_order = arrow_batches(grouped.users)
        states |= {
            _GROUPED: CountedState(nodes.url, f"{STATE}-grouped"),
            _UNGUARDED: CountedState(nodes.url, f"{STATE}-unguarded"),
            _IN_ORDER: CountedState(nodes.url, f"{STATE}-in-order"),
        }
        one_after_another = arrow_batches([key for part in by_slot_group(users, _GROUPS) for key in part.keys])
        seconds = by_turns(
            {
                **{name: partial(state.apply, batches) for name, state in states.items()},
                _GROUPED: partial(grouped.apply, states[_GROUPED], in_order),
                _UNGUARDED: partial(grouped.apply, states[_UNGUARDED], in_order, guarded=False),
                _IN_ORDER: partial(states[_IN_ORDER].apply, one_after_another),
                "single, packed beforehand": sent(to_one(connected(server), users)),
                "cluster of three, packed beforehand": sent(to_nodes([connected(one) for one in nodes.masters], users)),
            },
            turns,
            warm_up=2,
        )
        clients = [node.client() for node in nodes.masters]
        processor = processor_time(states["cluster of three"], batches, keys, clients)
        for client in clients:
            client.close()
        for state in states.values():
            state.check(users, state.batches)
    return Answer(
        [
            Row(
                "Redis Cluster of three on this machine, keys per second",
                "single Redis",
                ratios(seconds["single"], seconds[_IN_ORDER]),
                Goal("least", 0.7),
            ),
            Row(
                "the same, keys in any order, as those of a small batch",
                "single Redis",
                ratios(seconds["single"], seconds["cluster of three"]),
            ),
            Row(
                "the same, keys in order of slot groups that are known beforehand",
                "single Redis",
                ratios(seconds["single"], seconds[_GROUPED]),
                note="what the goal above would be if telling slot groups apart took no time",
            ),
            Row(
                "the same again, a plain MSET for each slot group that no fence guards",
                "single Redis",
                ratios(seconds["single"], seconds[_UNGUARDED]),
                note="what the scripts that check the fence take; not a state that anybody may use",
            ),
            Row(
                f"the same with {_FEW} slot groups, eight for each master",
                "single Redis",
                ratios(seconds["single"], seconds[f"cluster of three, {_FEW} slot groups"]),
            ),
            Row(
                "the same commands on three, packed beforehand",
                "the same commands on one, packed beforehand",
                ratios(seconds["single, packed beforehand"], seconds["cluster of three, packed beforehand"]),
                note="what the goal above would be for a library that takes no time itself",
            ),
        ],
        f"{keys:,} keys a batch, {_GROUPS} slot groups where nothing is said, chunks of 2,000 keys and of 10,000 in "
        f"the cluster: each store's default; {turns} turns after 2 to warm up",
        table(
            "state on | microseconds a key",
            [
                *((name, spread(own, 1e6 / keys)) for name, own in seconds.items()),
                *processor_lines("cluster", processor),
            ],
        ),
        {f"cluster.{name}": own for name, own in processor.items()},
    )
