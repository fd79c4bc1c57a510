"""How tests open a state of their own."""

from __future__ import annotations

from typing import Any

from mapstate.keys import KeyField
from mapstate.transitions import Field, Opening


def opening(**changes: Any) -> Opening:
    """A driver that counts by a key, but for what is said."""
    counts = {
        "state": "visits",
        "type": "opaque",
        "serializer": "json",
        "keys": (KeyField("k", "string"),),
        "fields": (Field("n", "Count", "bigint"),),
        "owner": "q",
        "clock_txid": 1000,
    }
    return Opening(**(counts | changes))
