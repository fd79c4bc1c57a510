"""What the contracts do in another process, which gets nothing but the pickled backend."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from mapstate.capabilities import FenceToken, close_if_possible
from mapstate.errors import FencedError

_SECONDS = 60


def elsewhere(work: Callable[..., Any], backend: Any, state: str, *arguments: Any) -> Any:
    """Run ``work`` in a spawned process, which opens the state itself. Returns or raises what it does."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_opened, work, pickle.dumps(backend), state, arguments).result(_SECONDS)


def _opened(work: Callable[..., Any], pickled: bytes, state: str, arguments: tuple[Any, ...]) -> Any:
    store = pickle.loads(pickled).open(state)
    try:
        return work(store, *arguments)
    finally:
        close_if_possible(store)


def put_and_get(store: Any, keys: list[str], records: list[Any], asked: list[str]) -> list[Any]:
    """Put, and return the result of a get after it."""
    store.multi_put(keys, records)
    return list(store.multi_get(asked))


def swap_once(store: Any, record: bytes, fence: FenceToken) -> tuple[bytes | None, bool]:
    """Return the ledger before the swap, and whether the swap was done."""
    found = store.load()
    version = None if found is None else found[1]
    return found and found[0], store.swap(record, version, fence) is not None


def put_fenced(store: Any, writes_through: str, token: FenceToken, keys: list[str], records: list[Any]) -> bool:
    """Return whether a writer with this token may put."""
    try:
        getattr(store, writes_through)(token).multi_put(keys, records)
    except FencedError:
        return False
    return True


def forked_after_use(store: Any, records: dict[str, list[Any]]) -> dict[str, list[int]]:
    """Put and get in a parent and its children at one time. Returns the wrong records of each process.

    The store is used before the fork, so its open connections are shared unless it prevents that.
    """
    store.multi_put(["before"], [records["parent"][0]])
    ends = {}
    for name in [name for name in records if name != "parent"]:
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            _child(store, name, records[name], writing)
        os.close(writing)
        ends[name] = pid, reading
    wrong = {"parent": _read_wrong(store, "parent", records["parent"])}
    for name, (pid, reading) in ends.items():
        with os.fdopen(reading, "rb") as pipe:
            said = pipe.read()
        os.waitpid(pid, 0)
        wrong[name] = pickle.loads(said) if said else [-1]  # it died, or raised
    wrong["afterwards"] = [
        at for name, own in records.items() for at, record in enumerate(own) if not _has(store, f"{name}-{at}", record)
    ]
    return wrong


def _child(store: Any, name: str, records: list[Any], writing: int) -> None:
    """Does not return."""
    try:
        signal.alarm(_SECONDS // 2)
        said = pickle.dumps(_read_wrong(store, name, records))
        close_if_possible(store)
        os.write(writing, said)
    finally:
        os._exit(0)


def _read_wrong(store: Any, name: str, records: list[Any]) -> list[int]:
    wrong = []
    for at, record in enumerate(records):
        store.multi_put([f"{name}-{at}"], [record])
        if not _has(store, f"{name}-{at}", record):
            wrong.append(at)
    return wrong


def _has(store: Any, key: str, record: Any) -> bool:
    return bool(store.multi_get([key]) == [record])
