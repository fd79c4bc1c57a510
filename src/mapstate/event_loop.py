"""Run blocking code on an event loop: it waits in a greenlet of its own, and the loop goes on.

So a store's requests exist once. Its code calls `wait_for` where its connection is one of asyncio, and knows nothing of
it otherwise.

    task of the loop                      greenlet
    ────────────────                      ────────
    await on_loop(store.load) ──────────> store.load()
                                            connection.read_response()
    await the reply           <──────────     wait_for(reply)
           └─────────────────────────────>    the reply, or CancelledError
    the result                <──────────   return
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, ParamSpec, TypeVar

import greenlet

from mapstate.waiting import pause_by

P = ParamSpec("P")
T = TypeVar("T")


async def on_loop(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Return what ``function`` returns, which waits by `wait_for` and `mapstate.waiting.pause`.

    Cancelling the task raises CancelledError in the function, where it waits.
    """

    def call() -> T:
        pause_by.set(lambda seconds: wait_for(asyncio.sleep(seconds)))  # a greenlet has a context of its own
        return function(*args, **kwargs)

    caller: Any = greenlet.greenlet(call)
    outcome = caller.switch()
    while not caller.dead:
        try:
            reply = await outcome
        except BaseException as error:  # noqa: BLE001  raised in the function, which may catch it
            outcome = caller.throw(error)
        else:
            outcome = caller.switch(reply)
    result: T = outcome
    return result


def wait_for(awaitable: Awaitable[T]) -> T:
    """Return the result of ``awaitable``, and let the event loop go on meanwhile. Inside of `on_loop` only."""
    result: T = greenlet.getcurrent().parent.switch(awaitable)
    return result
