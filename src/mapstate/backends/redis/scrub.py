"""Removes what a Redis server keeps in its files of keys that were replaced or removed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mapstate.backends.redis.connection import command
from mapstate.backends.redis.operations import allowed
from mapstate.retry import Pauses

_AT_WORK = ("aof_rewrite_in_progress", "aof_rewrite_scheduled", "rdb_bgsave_in_progress")


def scrub_node(ask: Callable[[bytes], Any]) -> list[str]:
    """Rewrite the AOF of one server, and its RDB where it has one. Returns where bytes may still be.

    ``ask`` sends one command. Waits until both are written.
    """

    def facts() -> dict[str, str]:
        lines = [*(ask(command(b"INFO", b"persistence")) or b"").decode().splitlines()]
        return dict(line.split(":", 1) for line in lines if ":" in line)

    def idle() -> dict[str, str]:
        pauses = Pauses(0.01, 0.5)
        while True:
            info = facts()
            if not any(int(info.get(name, "0")) for name in _AT_WORK):
                return info
            pauses.sleep()

    def rewritten(asked: bytes, status: str) -> bool:
        idle()  # one that is at work began before the keys were removed
        return allowed(lambda: ask(command(asked))) is not None and idle().get(status) == "ok"

    first = allowed(facts)
    if not first:
        return ["the AOF and the RDB of Redis: this user may not run INFO"]
    left = []
    if first.get("aof_enabled") == "1" and not rewritten(b"BGREWRITEAOF", "aof_last_bgrewrite_status"):
        left.append("the AOF of Redis: it did not run BGREWRITEAOF, see its log and the user's rights")
    config = allowed(lambda: ask(command(b"CONFIG", b"GET", b"save"))) or [b"save", b""]
    has_rdb = any(int(first.get(name, "0")) for name in ("rdb_saves", "rdb_last_load_keys_loaded"))
    if not config[1] and not has_rdb:
        left.append("an RDB file of an earlier run of Redis, if there is one: this run writes none")
    elif not rewritten(b"BGSAVE", "rdb_last_bgsave_status"):
        left.append("the RDB of Redis: it did not run BGSAVE, see its log and the user's rights")
    roles = (allowed(lambda: ask(command(b"INFO", b"replication"))) or b"").decode()
    if "connected_slaves:" in roles and "connected_slaves:0" not in roles:
        left.append("the files of the replicas of Redis: run BGREWRITEAOF and BGSAVE there")
    return left
