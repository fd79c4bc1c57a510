"""What a Redis server tells of itself and of one state, for `mapstate.backends.redis.checkup` to judge."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from mapstate.backends.redis.checkup import RedisFacts
from mapstate.backends.redis.wire import command
from mapstate.capabilities import Scan
from mapstate.errors import CorruptRecordError, StoreError, StoreFullError, StoreUnavailableError

_SAMPLE = 20  # records that a checkup looks at
_LOOK = 10_000  # keys of the server that one request walks through to find them


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
    found = [ask(one) for one in ttls]
    info = (ask(command(b"INFO")) or b"").decode().splitlines()
    config: list[bytes] = []
    for name in (b"maxmemory*", b"save", b"append*", b"min-*-to-write"):
        config += ask(command(b"CONFIG", b"GET", name)) or []
    texts = [text.decode() for text in config]
    return RedisFacts(
        info=dict(line.split(":", 1) for line in info if ":" in line),
        config=dict(zip(texts[::2], texts[1::2], strict=True)),
        clock=None if clock is None else int(clock[0]) + int(clock[1]) / 1e6 - middle,
        ledger_ttl=found[0] if found else None,
        ttls=[ttl for ttl in found[1:] if ttl is not None],
    )
