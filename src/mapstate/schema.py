"""The schema of a state: what its keys, its fields and its ledger have in common."""

from __future__ import annotations

from typing import Literal, NamedTuple

StateType = Literal["non-transactional", "transactional", "opaque"]


OnNewOwner = Literal["refuse", "adopt", "adopt_unchecked", "reset"]


OnGap = Literal["refuse", "accept"]


KeyOrder = Literal["hash", "key"] | int


class Field(NamedTuple):
    """One aggregate of the state: its name, its aggregator's name and the type it accumulates."""

    name: str
    aggregator: str
    type: str


class KeyField(NamedTuple):
    """One grouping column: its name, and its Spark type as ``DataType.simpleString()`` writes it."""

    name: str
    type: str
