"""The client of one process, as the store of one state uses it: retries, and the client's errors as ours."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

from aerospike import exception as driver

from mapstate.backends.aerospike.codes import meaning
from mapstate.errors import MapStateError
from mapstate.keys import StoreKey
from mapstate.retry import Retries, retried

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
        """The client of this process."""
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
