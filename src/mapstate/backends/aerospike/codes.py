"""Aerospike's result codes as our errors. A batch has them as numbers, and the client's exceptions have them, too."""

from __future__ import annotations

from mapstate.errors import StoreAuthError, StoreError, StoreFullError, StoreUnavailableError, TooLargeError

OK = 0
NOT_FOUND = 2
FILTERED_OUT = 27
BATCH_FAILED = -16  # of a batch in which some records failed: each has its own code
NO_ANSWER = -15  # of no single record; also ours, for a batch with fewer records than keys

_UNREACHABLE = (
    StoreUnavailableError,
    (
        "cannot be reached, or did not answer in time. Look at addresses, network, TLS and the server's log; from "
        "outside its network it may need use_services_alternate=true."
    ),
    True,
)
_BUSY = (
    StoreUnavailableError,
    "is busy, or its cluster is changing. The batch can be tried again; if this goes on, look at its queues and disks.",
    True,
)
_AUTH = (
    StoreAuthError,
    "refused the user or the password. A reader needs the privilege read, a job read-write, on the namespace.",
    False,
)
_FULL = (StoreFullError, "is full (stop-writes). Give the namespace memory or disk; it must not evict.", False)
_TOO_LARGE = (
    TooLargeError,
    "refused a record as too large: the limit is max-record-size of the namespace, 1 MiB at most by default.",
    False,
)
_NO_NAMESPACE = (StoreError, "has no such namespace. Look at the URL: aerospike://host:3000/namespace.", False)
_FORBIDDEN = (
    StoreError,
    (
        "forbids this. With a ttl, also that of claims, the namespace needs nsup-period above 0 (or "
        "allow-ttl-without-nsup); other reasons are a set's own stop-writes or a truncation that is under way."
    ),
    False,
)
_OTHER = (StoreError, "refused a command; something else may use this set.", False)
_MEANINGS: dict[int, tuple[type[StoreError | TooLargeError], str, bool]] = {
    8: _FULL,
    13: _TOO_LARGE,
    20: _NO_NAMESPACE,
    22: _FORBIDDEN,
    **dict.fromkeys((9, -4, -6, -7, -8, -9, -10, -12, -14, NO_ANSWER), _UNREACHABLE),
    **dict.fromkeys((7, 11, 14, 18, 28, 150, 152, 211, 212), _BUSY),
    **dict.fromkeys((51, 52, 53, 60, 62, 63, 64, 65, 80, 81, 82), _AUTH),
}


def meaning(code: int) -> tuple[type[StoreError | TooLargeError], str, bool]:
    """Our class for a result code, its message, and whether the error may pass by itself."""
    return _MEANINGS.get(code, _OTHER)
