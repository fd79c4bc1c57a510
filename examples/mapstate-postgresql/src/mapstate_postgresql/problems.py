"""The only translation of psycopg's errors into mapstate's."""

from __future__ import annotations

import psycopg

from mapstate.errors import (
    KeyEncodingError,
    MapStateError,
    StoreAuthError,
    StoreError,
    StoreFullError,
    StoreUnavailableError,
    TooLargeError,
)

__all__ = ["problem_of"]

# By how the SQLSTATE begins; the first that fits.
_KINDS: tuple[tuple[str, type[MapStateError], str], ...] = (
    ("28", StoreAuthError, "refused the user or the password"),
    ("42501", StoreAuthError, "does not let this user do that: GRANT it the tables, or CREATE on the schema"),
    ("53300", StoreUnavailableError, "has no connection left (max_connections)"),
    ("53", StoreFullError, "is out of disk or memory. This call wrote nothing"),
    ("54", TooLargeError, "takes no key of more than about 2,700 bytes, and no put of 1 GB"),
    ("25006", StoreUnavailableError, "takes no writes: it is a standby"),
    ("57014", StoreUnavailableError, "did not answer within the timeout"),
    ("57P", StoreUnavailableError, "is being shut down or started"),
    ("40", StoreUnavailableError, "gave the statement up in favour of another one"),
    ("08", StoreUnavailableError, "cannot be reached or does not answer"),
)


def problem_of(error: Exception, state: str, address: str) -> MapStateError:
    """Translate psycopg's error into mapstate's, with the original chained."""
    code = getattr(error, "sqlstate", None) or ""
    kind, text = next(((kind, text) for start, kind, text in _KINDS if code.startswith(start)), (StoreError, ""))
    if isinstance(error, UnicodeError | psycopg.DataError):
        kind, text = KeyEncodingError, "takes no key like that: text without NUL and lone surrogates"
    elif not code and "authentication failed" in str(error):
        kind, text = StoreAuthError, "refused the user or the password"
    elif not code and isinstance(error, psycopg.OperationalError):
        kind, text = StoreUnavailableError, "cannot be reached or does not answer. Look at address, network and TLS"
    reply = str(error).strip().partition("\n")[0]
    problem = kind(
        f"state {state!r}: PostgreSQL at {address} {text or 'refused a statement'}. It said: {reply}", state=state
    )
    problem.__cause__ = error.with_traceback(None)
    return problem
