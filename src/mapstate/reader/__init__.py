"""Read a state without Spark, as of a whole batch."""

from __future__ import annotations

from mapstate.reader.committed import Consistency
from mapstate.reader.counting import CountedKeys
from mapstate.reader.state_reader import StateReader, open_reader

__all__ = ["Consistency", "CountedKeys", "StateReader", "open_reader"]
