"""The client of one process, as the store of a state uses it: retries, and the result codes as our errors."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

from aerospike import exception as driver

from mapstate import errors
from mapstate.errors import MapStateError
from mapstate.keys import StoreKey
from mapstate.retry import Retries, retried

OK = 0
NOT_FOUND = 2
FILTERED_OUT = 27
BATCH_FAILED = -16  # of a batch in which some records failed: each has its own code
NO_ANSWER = -15  # of no single record; also ours, for a batch with fewer records than keys

_UNREACHABLE = (
    errors.StoreUnavailableError,
    (
        "cannot be reached, or did not answer in time. Look at addresses, network, TLS and the server's log; from "
        "outside its network it may need use_services_alternate=true."
    ),
    True,
)
_BUSY = (
    errors.StoreUnavailableError,
    "is busy, or its cluster is changing. The batch can be tried again; if this goes on, look at its queues and disks.",
    True,
)
_AUTH = (
    errors.StoreAuthError,
    "refused the user or the password. A reader needs the privilege read, a job read-write, on the namespace.",
    False,
)
_FULL = (errors.StoreFullError, "is full (stop-writes). Give the namespace memory or disk; it must not evict.", False)
_TOO_LARGE = (
    errors.TooLargeError,
    "refused a record as too large: the limit is max-record-size of the namespace, 1 MiB at most by default.",
    False,
)
_NO_NAMESPACE = (errors.StoreError, "has no such namespace. Look at the URL: aerospike://host:3000/namespace.", False)
_FORBIDDEN = (
    errors.StoreError,
    (
        "forbids this. With a ttl, also that of claims, the namespace needs nsup-period above 0 (or "
        "allow-ttl-without-nsup); other reasons are a set's own stop-writes or a truncation that is under way."
    ),
    False,
)
_OTHER = (errors.StoreError, "refused a command; something else may use this set.", False)
_MEANINGS: dict[int, tuple[type[errors.StoreError | errors.TooLargeError], str, bool]] = {
    8: _FULL,
    13: _TOO_LARGE,
    20: _NO_NAMESPACE,
    22: _FORBIDDEN,
    **dict.fromkeys((9, -4, -6, -7, -8, -9, -10, -12, -14, NO_ANSWER), _UNREACHABLE),
    **dict.fromkeys((7, 11, 14, 18, 28, 150, 152, 211, 212), _BUSY),
    **dict.fromkeys((51, 52, 53, 60, 62, 63, 64, 65, 80, 81, 82), _AUTH),
}


def meaning(code: int) -> tuple[type[errors.StoreError | errors.TooLargeError], str, bool]:
    """Our class for a result code, its message, and whether the error may pass by itself."""
    return _MEANINGS.get(code, _OTHER)


T = TypeVar("T")


class BatchError(Exception):
    """A failed batch, as the client would raise it if it raised for batches."""

    def __init__(self, code: int, msg: str, *, key: StoreKey | None = None) -> None:
        super().__init__(code, msg)
        self.code = code
        self.msg = msg
        self.key = key


class Connection:
    """The client for the store of one state. ``access`` is the `AerospikeBackend`."""

    def __init__(self, access: Any, state: str) -> None:
        self._access = access
        self._state = state
        milliseconds = int(access.timeout * 1000)
        # The client's own defaults give up after a second, and never retry a write.
        self.once = {"total_timeout": milliseconds, "socket_timeout": milliseconds, "max_retries": 0}
        """The policy of a request that must not be sent twice."""
        self.policy = {"total_timeout": milliseconds, "socket_timeout": max(1, milliseconds // 3), "max_retries": 2}
        """The policy of a request that may be repeated."""

    @property
    def client(self) -> Any:
        return self._access.client()

    def retrying(self, request: Callable[[], T], retries: int | None = None) -> T:
        """Return what ``request`` returns; retry where the error may pass by itself."""
        began, errors = time.monotonic(), (driver.AerospikeError, BatchError)
        try:
            return request()
        except errors as error:
            trouble = self._problem(error)
        limits = Retries(self._access.retries if retries is None else retries, 2 * self._access.timeout, began)
        return retried(request, trouble, limits, errors, self._problem)

    def _problem(self, error: Any) -> tuple[MapStateError, bool]:
        kind, advice, may_pass = meaning(error.code)
        facts = {} if getattr(error, "key", None) is None else {"key": str(error.key)}
        address = self._access.address
        text = f"state {self._state!r}: Aerospike at {address} {advice} It said: {error.msg} ({error.code})"
        problem = kind(text, state=self._state, store=address, **facts)
        problem.__cause__ = error
        return problem, may_pass
