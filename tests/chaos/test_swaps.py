"""Swaps there and back under load: two jobs commit, `mapstate serve` answers, and processes read without a pause.

The value of each key is the batch and the version, so an answer of two versions shows, and so does a step back. A
reader that looks at the alias in each call never goes back in the log of its source: each batch is one offset. The
service looks once a second, so of its answers each version never goes back.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager
from http.client import HTTPConnection
from typing import Any

import pytest
from service import serving
from versions import Version

from mapstate import open_reader
from mapstate.errors import UsageError
from mapstate.operations.swap import swap
from mapstate.testing import wait_for

pytestmark = pytest.mark.redis

NAMES = ("v", "v.2")
KEYS = ["a", "b", "c"]
BASE = 10  # the last digit of a value is the version

processes = multiprocessing.get_context("spawn")


def value(batch: int, version: int) -> int:
    return BASE * batch + version


def of(found: set[int], state: str) -> int:
    """The batch of an answer. Raises AssertionError for one of two versions, or of another than it says."""
    assert len(found) == 1, f"{found} in one answer"
    batch, version = divmod(found.pop(), BASE)
    assert NAMES[version] == state, f"a value of {NAMES[version]} as {state}"
    return batch


def count(url: str, ended: Any, at: Any, wrong: Any) -> None:
    """Both jobs, one batch at a time: now the one is ahead, now the other."""
    with reported(wrong):
        jobs = [Version(url, state=name) for name in NAMES]
        for turn in itertools.count(1):
            for version in (0, 1) if turn % 3 else (1, 0):
                jobs[version].batch_to(turn, **dict.fromkeys(KEYS, value(turn, version)))
            at.value = turn
            if ended.is_set():
                return


def read(url: str, ended: Any, calls: Any, wrong: Any) -> None:
    """A reader that looks at the alias in each call."""
    with reported(wrong), open_reader(url, "v", follow=0) as reader:
        last = 0
        while not ended.is_set():
            values, ledger = reader.multi_get_as_of(KEYS)
            batch = of({one["n"] for one in values}, ledger.state)
            assert batch >= last, f"back from {last} to {batch}"
            last = batch
            calls.value += 1


def ask(port: int, ended: Any, calls: Any, wrong: Any) -> None:
    """A client of the service: one key, and several."""
    with reported(wrong):
        connection, last = HTTPConnection("127.0.0.1", port, timeout=30), Counter[str]()
        body = json.dumps({"keys": KEYS})
        tags = dict[str, tuple[str, int]]()
        while not ended.is_set():
            connection.request("POST", "/states/v/values", body)
            answer = connection.getresponse()
            document = json.loads(answer.read())
            assert answer.status == 200, document
            state = document.get("version", "v")
            batch = of({one["n"] for one in document["values"]}, state)
            assert batch >= last[state], f"{state} back from {last[state]} to {batch}"
            last[state] = batch
            connection.request("GET", "/states/v/values?k=a")
            answer = connection.getresponse()
            document = json.loads(answer.read())
            assert answer.status == 200, document
            tag = answer.headers["ETag"]
            shown = (document.get("version", "v"), document["value"]["n"])
            assert tags.setdefault(tag, shown) == shown, f"{tag} of two answers"
            calls.value += 1


@contextmanager
def reported(wrong: Any) -> Any:
    try:
        yield
    except BaseException as error:
        wrong.put(repr(error))
        raise


def wait_until(is_so: Callable[[], bool], goal: str, wrong: Any) -> None:
    wait_for(lambda: is_so() or not wrong.empty(), goal, 120)


def test_no_request_fails_and_no_reader_goes_back_by_swaps_under_load(redis_url, rounds):
    times = rounds(20, 1000)
    for name in NAMES:
        Version(redis_url, state=name).batch_to(0, **dict.fromkeys(KEYS, NAMES.index(name)))
    ended, wrong, at = processes.Event(), processes.Queue(), processes.Value("q", 0)
    calls = [processes.Value("q", 0) for _ in range(4)]
    with serving(redis_url) as served:
        work: list[tuple[Any, ...]] = [(count, redis_url, at), *((read, redis_url, one) for one in calls[:2])]
        work += [(ask, served.port, one) for one in calls[2:]]
        started = [processes.Process(target=job, args=(place, ended, number, wrong)) for job, place, number in work]
        for one in started:
            one.start()
        try:
            wait_until(lambda: all(one.value for one in (at, *calls)), "all have begun", wrong)
            done = refused = 0
            while done < times and wrong.empty():
                least = 1 + min(one.value for one in calls[:2])
                try:
                    swap(redis_url, {"v": NAMES[(done + 1) % 2]})
                except UsageError:  # it is behind just then
                    refused += 1
                    continue
                done += 1
                wait_until(lambda least=least: all(one.value > least for one in calls[:2]), "reads", wrong)
        finally:
            ended.set()
            for one in started:
                one.join(60)
                one.kill()
        assert wrong.empty(), wrong.get()
        assert [one.exitcode for one in started] == [0] * len(started)
    assert done == times, f"{refused} refused, {at.value} batches of each, calls: {[one.value for one in calls]}"
    with open_reader(redis_url, "v") as reader:
        assert reader.ledger().state == NAMES[times % 2]
