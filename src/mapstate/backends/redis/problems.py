"""Errors of a Redis server or of redis-py as ours, and whether they may pass by themselves."""

from __future__ import annotations

import logging
import re
import warnings
from collections import deque
from collections.abc import Sequence

from redis import exceptions as driver

from mapstate.capabilities import FenceToken
from mapstate.errors import (
    ConfigurationError,
    CorruptRecordError,
    FencedError,
    StoreAuthError,
    StoreError,
    StoreFullError,
    StoreUnavailableError,
    TooLargeError,
)

DRIVER_ERRORS = (driver.RedisError, OSError, UnicodeError, MemoryError)
"""All that a connection can raise."""

_IN_SCRIPT = re.compile(r"Error running script .*@user_script: ?\d+: -?")  # as Redis 6 puts it before the error itself
_ECHO = re.compile(r",? with args beginning with:.*", re.DOTALL)  # the first of what was sent, perhaps a part of it
_REFUSED = (
    driver.AuthenticationWrongNumberOfArgsError,
    driver.AuthorizationError,
    driver.NoPermissionError,
)
_NOT_READY = (driver.BusyLoadingError, driver.ClusterDownError, driver.ReadOnlyError)
_UNREACHABLE = (driver.ConnectionError, driver.TimeoutError, OSError, UnicodeError)
_REDIRECTED = (driver.MovedError, driver.AskError, driver.TryAgainError)
_CLUSTER = (*_REDIRECTED, driver.ClusterCrossSlotError)

_SHAPES = {  # what a server says that is another one than the URL names
    "DB index is out of range": "has no database of this number: see its setting 'databases'.",
    "SELECT is not allowed in cluster mode": "belongs to a cluster, which has no databases: use redis+cluster://.",
    "cluster support disabled": "is one server and no cluster: use redis://.",
    "SENTINEL": "is no sentinel: redis+sentinel:// takes their addresses, mostly port 26379, and not the server's.",
    "unknown command": "lacks a command. A sentinel answers so: use redis+sentinel://HOST:PORT/NAME. So does a server "
    "whose commands were renamed.",
}

_PROTECTED = (
    "is in protected mode, where it answers its own machine alone. Give it a password (requirepass), and the URL the "
    "same, or set protected-mode no where only your own machines reach it."
)

NOT_DONE = (*_REDIRECTED, *_NOT_READY)
"""Errors after which a command was not run, so that any command can be sent again."""


SECRETS: deque[str] = deque(maxlen=100)
"""What this process logged in with, the last ones: no message shows them."""


def problem_of(error: Exception, *, state: str, store: str, login_changes: bool) -> tuple[StoreError, bool]:
    """Our error for one of the driver's, and whether it may pass by itself. Chained where that shows no secret.

    ``store`` is the server's address. Where ``login_changes``, the next connection may have another password.
    """
    text = str(error).partition("discarded because of: ")[2] or str(error) or type(error).__name__
    text = _IN_SCRIPT.sub("", text)
    shown = text
    for secret in sorted(SECRETS, key=len, reverse=True):  # one may begin with another
        shown = shown.replace(secret, "***")
    shown = _ECHO.sub("", shown)
    kind, advice, may_pass = _kind(error, text)
    may_pass |= login_changes and isinstance(error, driver.AuthenticationError)
    problem = kind(f"state {state!r}: Redis at {store} {advice} It said: {shown}", state=state, store=store)
    if shown == text and not isinstance(error, UnicodeError):  # it holds the text that it could not encode
        problem.__cause__ = error.with_traceback(None)  # whose frames hold the password
    return problem, may_pass


def _kind(error: Exception, text: str) -> tuple[type[StoreError], str, bool]:
    """Our class for an error of the driver, its message, and whether it may pass by itself."""
    if isinstance(error, driver.AuthenticationError):
        advice = "refused the password, or the URL has none (redis://:password@host). See docs/operating.md#passwords."
        return StoreAuthError, advice, False
    if "protected mode" in text:
        return StoreAuthError, _PROTECTED, False
    if isinstance(error, _REFUSED) or text.startswith(("NOPERM", "DENIED", "The user executing the script can't")):
        advice = (
            "refused the user, the password or a command. A reader's ACL needs GET, MGET, EXISTS, TYPE and SCAN (and "
            "LRANGE for batch reports), a job's also SET, MSET, MSETNX, DEL, HSETNX, HGET, WATCH, UNWATCH, LPUSH, "
            "LTRIM, MULTI, EXEC, DISCARD and INFO. See docs/redis.md for those of hashes and of a cluster."
        )
        return StoreAuthError, advice, False
    if isinstance(error, driver.OutOfMemoryError) or text.startswith(("OOM", "MISCONF")):
        advice = "is full, or cannot save. Give it memory (maxmemory) or disk; it must not evict (noeviction)."
        return StoreFullError, advice, False
    if isinstance(error, _NOT_READY) or text.startswith(("READONLY", "LOADING", "MASTERDOWN", "NOREPLICAS", "BUSY")):
        return StoreUnavailableError, "takes no writes: it is a replica, still loading, or not ready.", True
    if isinstance(error, MemoryError):
        advice = (
            "announced a reply that does not fit into this process's memory. Check that a Redis server answers at this "
            "address; if it does, lower chunk_size or chunk_bytes."
        )
        return StoreError, advice, False
    if isinstance(error, _UNREACHABLE):
        advice = "cannot be reached or does not answer. Check address, network, TLS and the server's log."
        if "while writing to socket" in text:
            advice += (
                f" If it closes each connection of another machine, it {_PROTECTED}"
                " If it closed the connection because of the command: before Redis 7 a command has at most 1,048,576 "
                "words, and a key of a put takes two or three; use fewer keys at a time, or a smaller chunk_size."
            )
        return StoreUnavailableError, advice, True
    if isinstance(error, _CLUSTER):
        return StoreError, "belongs to a cluster, and redis:// speaks to one server: use redis+cluster://.", False
    if isinstance(error, driver.InvalidResponse):
        return StoreError, "is no Redis server: another kind of server answers at this port, such as for HTTP.", False
    for said, advice in _SHAPES.items():
        if said in text:
            return StoreError, advice, False
    return StoreError, "refused a command; something else may use the state's Redis keys.", False


def another_layout(
    state: str, kept_in: bytes, found: bytes | None, asked: bytes, *, has_ledger: bool, groups: bool = False
) -> ConfigurationError:
    """The error for a state with another layout: every record would seem absent, and be counted from nothing.

    In a cluster the number of slot ``groups`` is the layout. ``kept_in`` is the key that notes it.
    """
    name, wanted = kept_in.decode(errors="backslashreplace"), asked.decode()
    if found is None:
        lost = "the number of its slot groups" if groups else "the layout of its records"
        value = wanted if groups else f"'{wanted}'"
        return ConfigurationError(
            f"state {state!r}: the key {name!r}, {lost}, was deleted or evicted. The ledger is as it was. If the URL "
            f"has the {'number' if groups else 'layout'} that the state was made with, set it again: "
            f"redis-cli {'-c ' * groups}SET {name!r} {value}. Then run mapstate doctor, because other keys may be "
            "gone, too."
        )
    there = found.decode(errors="replace")
    made = f"{there} slot groups" if groups else f"layout {there}"
    place = (
        "number into the URL: buckets=..." if groups else "layout into the URL: layout=..., buckets=..., records=..."
    )
    left = f" The state has no ledger. If it has no record either, delete the key {name!r}, which is all that is left."
    return ConfigurationError(
        f"state {state!r} was made with {made}, and the URL says {wanted}: its records would not be found. Nothing was "
        f"written. Put the state's own {place}{'' if has_ledger else left}"
    )


def warn_of_packed(state: str) -> None:
    """Warn that a state is made with a layout that will go. In the log, too: Python shows its warning to few."""
    text = (
        f"state {state!r} is made with layout=packed, which is deprecated and will go. For little memory take "
        "opaque(..., blocks=...); leave layout out for a state that has no blocks. See docs/redis.md#hashes"
    )
    logging.getLogger("mapstate").warning(text)
    warnings.warn(text, DeprecationWarning, stacklevel=3)


def too_large(state: str, subject: str, size: int, limit: int, key: str) -> TooLargeError:
    """The error for a key, a record or a call above its limit in bytes."""
    return TooLargeError(
        f"state {state!r}: {subject} {size} bytes, and the limit is {limit}. Nothing of this call was sent. "
        "The limit of one key or record is max_value_bytes; that of a put is Redis' own: lower the chunk_size.",
        state=state,
        key=key,
        size=size,
    )


def foreign_keys(state: str, head: bytes, keys: Sequence[str], type_: bytes | None) -> CorruptRecordError:
    """The error for Redis keys of another type, which the first one has; None where it is not known."""
    more = f" (and {len(keys) - 1} more keys like it)" if len(keys) > 1 else ""
    kind = "something else" if type_ is None else f"a {type_.decode()}"
    key, name = keys[0][:100], (head + keys[0].encode())[:100].decode(errors="replace")
    return CorruptRecordError(
        f"state {state!r}, key {key!r}: the Redis key {name!r} is {kind}{more}. Something else writes "
        "under this state's name. It was not overwritten. Delete it, or restore the record that was there.",
        state=state,
        key=keys[0],
        keys=list(keys),
    )


def fenced(state: str, token: FenceToken, found: bytes | str | None) -> FencedError:
    """The error of an attempt that may no longer write. ``found`` is the fence, or a text about it."""
    if isinstance(found, str):
        at = found
    else:
        at = "gone (was the store flushed?)" if found is None else f"at {found.decode()}"
    return FencedError(
        f"state {state!r}: the attempt with txid {token.txid} of epoch {token.epoch} may no longer write: the fence "
        f"is {at}. It has ended, or a newer attempt or driver has taken over.",
        state=state,
        txid=token.txid,
        epoch=token.epoch,
    )
