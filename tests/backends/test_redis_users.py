"""What a Redis user of an ACL has to be allowed: all that docs/redis.md says, and nothing else."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from driven_reader import WAYS
from one_ledger import OneLedger
from redis_groups import RedisCluster
from servers import GivenRedis
from test_redis_shapes import KEYS, OPENING, commit, count

from mapstate.backends import resolve
from mapstate.backends.redis.cluster_writer import by_slot_group
from mapstate.errors import CorruptRecordError, StoreAuthError
from mapstate.maps import OpaqueMap
from mapstate.maps.serialized import SerializedMap
from mapstate.operations.vacuum import vacuum
from mapstate.serializers import RecordCodec, serializer

pytestmark = pytest.mark.redis

DOCS = (Path(__file__).resolve().parents[2] / "docs" / "redis.md").read_text()
ADMIN = {
    "acl",
    "config",
    "cluster",
    "migrate",
    "restore-asking",
    "select",
    "client",
    "hello",
}  # what the test itself asks
THEIRS = {"rpush", "del", "command"}  # what it does as somebody else
LOGIN = {"auth"}  # which needs no right


def documented(where: str) -> tuple[set[str], set[str], list[str]]:
    """What a reader may, what a job may, and of which keys."""
    [cells] = re.findall(rf"^\| {where} \| `(.*)` \| `(.*)` \| `(.*)` \|$", DOCS, re.MULTILINE)
    reader, job, keys = (cell.replace("\\|", "|").lower().split() for cell in cells)
    return set(reader), set(reader) | set(job), keys


def allow(server: GivenRedis, where: str) -> None:
    reader, job, keys = documented(where)
    with server.client() as admin:
        for name, commands in (("reader", reader), ("job", job)):
            rights = [f"+{one}" for one in sorted(commands)]
            admin.execute_command("ACL", "SETUSER", name, "on", ">s3cret", *(f"~{key}" for key in keys), *rights)
        admin.config_resetstat()


def asked(server: GivenRedis) -> set[str]:
    """The commands that were run there since; what users may not run is not counted."""
    with server.client() as admin:
        found = admin.info("commandstats")
    ran = {name.removeprefix("cmdstat_") for name, one in found.items() if one["calls"] > one.get("rejected_calls", 0)}
    return names(ran) - LOGIN


def names(commands: set[str]) -> set[str]:
    """Without subcommands, which not every Redis counts, and without what the test asks."""
    return {one.partition("|")[0] for one in commands} - ADMIN


def live(url: str) -> None:
    """All that a job does with a state, and an operator's vacuum."""
    store: Any = resolve(url).open("visits")
    store.probe()
    ledger, attempt = OneLedger.open_and_begin(store, OPENING, 0)
    assert store.claim(attempt.txid, 0, "me") == "me"
    count(store, ledger, attempt, KEYS)
    commit(ledger, attempt)
    store.keep_report(b"{}", 9)
    attempt = ledger.begin(1)
    codec = RecordCodec(serializer("json"), "visits", "opaque", OPENING.fields, ledger.record.field_counts)
    writer = store.writer(attempt.token)
    state: Any = OpaqueMap(SerializedMap(writer, codec), attempt.view, written_once=True)
    state.begin_commit(attempt.txid)
    state.multi_update(["user-0"], [lambda _: None])
    writer.multi_get(["user-1"])  # and nothing is put
    getattr(writer, "close", lambda: None)()
    commit(ledger, attempt)
    count(store, ledger, ledger.begin(2), ["user-2"])
    commit(ledger, ledger.begin(2))
    store.multi_put(["user-3"], store.multi_get(["user-3"]))  # as without a fence
    done = vacuum(url, "visits")
    assert (done.rewritten, done.dropped) == (1, 1)


def read(url: str, odd: Callable[[str], AbstractContextManager[None]] | None = None) -> None:
    """All that a service does. ``odd`` has a key of another type at a place, where that is told by its type."""
    for way in WAYS.values():
        with way["open_reader"](url, "visits") as reader:
            if odd is not None:
                with odd("user-odd"), pytest.raises(CorruptRecordError, match="list"):
                    reader.get("user-odd")
            assert reader.multi_get(["user-0", "user-1"]) == [None, {"n": 1}]
            assert dict(reader.scan(7)) == {(key,): {"n": 1} for key in KEYS[1:]}
            with suppress(CorruptRecordError):  # what this test keeps as a report is none
                reader.reports()


@contextmanager
def a_list(client: Any, name: str) -> Iterator[None]:
    client.rpush(name, "theirs")
    yield
    client.delete(name)


@pytest.mark.parametrize(("layout", "more"), [("string", ""), ("hash", ""), ("packed", "&buckets=7")])
def test_users_of_one_server_need_what_is_documented_for_their_layout_and_nothing_else(start_redis, layout, more):
    server = start_redis()
    allow(server, f"`layout={layout}`")
    job, reader = (f"redis://{who}:s3cret@127.0.0.1:{server.port}?layout={layout}{more}" for who in ("job", "reader"))
    live(job)
    may_read, may_all = map(names, documented(f"`layout={layout}`")[:2])
    ran = asked(server)
    with server.client() as admin:
        admin.config_resetstat()
    with server.client() as admin:
        read(reader, (lambda key: a_list(admin, f"visits:{key}")) if layout == "string" else None)
    assert asked(server) - THEIRS == may_read
    assert ran | may_read == may_all
    with pytest.raises(StoreAuthError):
        resolve(reader).open("visits").multi_put(["user-1"], [b"1"])
    with pytest.raises(StoreAuthError):
        resolve(job).open("others").multi_put(["user-1"], [b"1"])


def test_users_of_a_cluster_need_what_is_documented_and_nothing_else(start_cluster):
    cluster: RedisCluster = start_cluster()
    for node in cluster.masters:
        allow(node, "in a cluster")
    job, reader = (cluster.url.replace("://", f"://{who}:s3cret@") for who in ("job", "reader"))
    live(job)
    may_read, may_all = map(names, documented("in a cluster")[:2])
    ran = set().union(*map(asked, cluster.masters))
    for node in cluster.masters:
        with node.client() as admin:
            admin.config_resetstat()
    slot = resolve(job).open("visits")._groups[0].slot
    source, target = cluster.masters[slot * 3 // 16384], cluster.masters[(slot * 3 // 16384 + 1) % 3]
    cluster.begin_move(slot, source, target)
    cluster.move_keys(slot, source, target)  # what is asked for there is ASKed for
    resolve(reader).open("visits").multi_get(KEYS)
    cluster.end_move(slot, source, target)
    with cluster.client() as admin:
        groups = resolve(job).open("visits")._groups
        read(reader, lambda key: a_list(admin, f"visits:{{{by_slot_group([key], len(groups))[0].group}}}:{key}"))
    assert set().union(*map(asked, cluster.masters)) - THEIRS == may_read
    assert ran | may_read == may_all
    with pytest.raises(StoreAuthError):
        resolve(reader).open("visits").multi_put(["user-1"], [b"1"])


def test_a_database_of_its_own_and_a_prefix_need_what_is_documented(start_redis):
    server = start_redis()
    reader, job, keys = documented("`layout=string`")
    rights = [f"+{one}" for one in sorted(reader | job)]
    with server.client() as admin:
        admin.execute_command("ACL", "SETUSER", "job", "on", ">s3cret", *(f"~app/{key}" for key in keys), *rights)
        url = f"redis://job:s3cret@127.0.0.1:{server.port}/3?prefix=app/"
        with pytest.raises(StoreAuthError, match="(?i)select"):
            live(url)
        admin.execute_command("ACL", "SETUSER", "job", "+select")
    live(url)
    read(url)
