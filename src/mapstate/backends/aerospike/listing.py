"""The states of an Aerospike namespace: the sets that hold a ledger."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from aerospike import exception as driver

from mapstate.backends.aerospike.connection import Connection
from mapstate.backends.aerospike.store import CLAIMS, LEDGER


def states_in(connection: Connection, namespace: str, name_of_set: str | None) -> Iterator[list[tuple[str, bytes]]]:
    """See `ListsStates.states`: one page. A set has the name of its state, or, where it is given, another one."""
    sets = _sets(connection, namespace) if name_of_set is None else [name_of_set]
    page = []
    for one in sets:
        ledger = _ledger(connection, namespace, one)
        if ledger is not None:
            page.append((one if name_of_set is None else _named(ledger) or one, ledger))
    yield page


def _sets(connection: Connection, namespace: str) -> list[str]:
    """The sets of a namespace, but for that of the claims. Each node knows those of its own records."""
    replies = connection.retrying(lambda: connection.client.info_all(f"sets/{namespace}"))
    texts = [str(text) for error, text in replies.values() if error is None]
    found = {name for text in texts for name in re.findall(r"\bset(?:_name)?=([^:;\s]+)", text)}
    return sorted(found - {CLAIMS})


def _ledger(connection: Connection, namespace: str, name_of_set: str) -> bytes | None:
    def get() -> bytes | None:
        try:
            bins = connection.client.get((namespace, name_of_set, LEDGER), connection.policy)[2]
        except driver.RecordNotFound:
            return None
        ledger = bins.get("ledger")
        return bytes(ledger) if isinstance(ledger, bytes | bytearray) else None

    return connection.retrying(get)


def _named(ledger: bytes) -> str | None:
    """The state that a ledger names; None where it cannot be read."""
    try:
        state = json.loads(ledger)["state"]
    except (ValueError, TypeError, KeyError):
        return None
    return state if isinstance(state, str) else None
