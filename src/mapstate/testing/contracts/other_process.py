"""What the contracts have done in another process, which gets nothing but the pickled recipe."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from mapstate.backing_map import FenceToken
from mapstate.errors import FencedError

__all__ = ["elsewhere", "forked_after_use", "put_and_get", "put_fenced", "swap_once"]

_SECONDS = 60


def elsewhere(work: Callable[..., Any], backend: Any, state: str, *arguments: Any) -> Any:
    """What ``work`` returns, or raises, in a process that was spawned for it and opens the state itself."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_opened, work, pickle.dumps(backend), state, arguments).result(_SECONDS)


def _opened(work: Callable[..., Any], recipe: bytes, state: str, arguments: tuple[Any, ...]) -> Any:
    store = pickle.loads(recipe).open(state)
    try:
        return work(store, *arguments)
    finally:
        getattr(store, "close", lambda: None)()


def put_and_get(store: Any, keys: list[str], records: list[Any], asked: list[str]) -> list[Any]:
    """Puts, and returns what it then finds."""
    store.multi_put(keys, records)
    return list(store.multi_get(asked))


def swap_once(store: Any, record: bytes, fence: FenceToken) -> tuple[bytes | None, bool]:
    """The ledger that was there, and whether it could be changed."""
    found = store.load()
    version = None if found is None else found[1]
    return found and found[0], store.swap(record, version, fence) is not None


def put_fenced(store: Any, writes_through: str, token: FenceToken, keys: list[str], records: list[Any]) -> bool:
    """Whether a writer with this token may put."""
    try:
        getattr(store, writes_through)(token).multi_put(keys, records)
    except FencedError:
        return False
    return True


def forked_after_use(store: Any, records: dict[str, list[Any]]) -> dict[str, list[int]]:
    """Puts and reads in a parent and its children at one time; by process, the places that were read wrong.

    The store was used before the fork: what it holds open is then shared, unless it sees to that.
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
        getattr(store, "close", lambda: None)()
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
