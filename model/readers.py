"""The steps of a reader: the ledger, each key, the ledger again."""

from __future__ import annotations

from collections.abc import Iterator

from model.protocol import LOST, STALE, Protocol
from model.world import Label, Reader, State, ViolationError, World

__all__ = ["Readers"]


class Readers:
    """A snapshot, one key after the other. See `mapstate.reader`.

    Ledger and keys are of one incarnation of the store. When a copy is put back the reader starts over, because its
    connection to a Redis does; SQLite has one snapshot for all of it.
    """

    def __init__(self, world: World, protocol: Protocol) -> None:
        self.world = world
        self.protocol = protocol

    def steps(self, state: State) -> Iterator[tuple[Label, State]]:
        """The reader's next step, and the state after it. Raises ViolationError for a snapshot that is none."""
        reader = state.reader
        if reader is None:
            if state.ledger and state.used.reads < self.world.reads:
                yield ("the reader reads the ledger",), state._replace(reader=Reader(state.ledger, state.truth))
            return
        protocol = self.protocol
        key = len(reader.found)
        if key < self.world.keys:
            record = state.records[key]
            newest = protocol.newest(reader.ledger) if protocol.minds_stale_records else 1 << 62
            found = protocol.shown(protocol.view(reader.ledger), newest, record)
            if found == STALE:
                yield ("the reader was overtaken at key", key), state._replace(reader=None)
                return
            if found == LOST and state.used.losses:
                yield ("the reader is told LedgerLostError at key", key), self._ended(state)
                return
            after = reader._replace(found=(*reader.found, found), absent=reader.absent or record is None)
            yield ("the reader gets key", key, found), state._replace(reader=after)
            return
        label = ("the reader looks at the ledger again",)
        if protocol.looks_again(reader.ledger, state.ledger, absent=reader.absent):
            yield label, state._replace(reader=None)
            return
        if reader.found != reader.expected:
            raise ViolationError(f"a reader found {reader.found} where {reader.expected} was committed")
        yield label, self._ended(state)

    def _ended(self, state: State) -> State:
        return state._replace(reader=None, used=state.used._replace(reads=state.used.reads + 1))
