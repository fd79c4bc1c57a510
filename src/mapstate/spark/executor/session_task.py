"""What runs on an executor for the sessions of `mapstate.protocol.sessions`: those that have fired, those to settle."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from mapstate.aggregators.fields import Fields
from mapstate.aggregators.results import joined
from mapstate.errors import ConfigurationError, DataError
from mapstate.maps.opaque import OpaqueMap, replace_all
from mapstate.maps.pane_index import Slice, batched, index_lost, key_pages, windows_of_ledger
from mapstate.maps.serialized import SerializedMap, writer_of
from mapstate.protocol.ledger_record import LedgerRecord
from mapstate.protocol.sessions import FIRST, LAST, Piece, piece_of
from mapstate.schema import number_of
from mapstate.serializers import RecordCodec, serializer
from mapstate.spark.executor.window_task import FiredTask, JoinTask, Page, PurgeTask, Reads

if TYPE_CHECKING:
    from mapstate.spec import StateSpec


class _Pieces:
    """The pieces of sessions under one ledger."""

    def __init__(self, reads: Reads, record: LedgerRecord, fields: Fields) -> None:
        self._reads = reads
        self._windows = windows_of_ledger(record)
        self._fields = fields
        self._piece = piece_of(record.fields)
        self._done = record.last_windows()

    def at(self, pane: int, rests: Sequence[str]) -> list[Piece | None]:
        if not rests or self._windows.is_expired(pane, self._done) or not self._windows.may_have(pane):
            return [None] * len(rests)
        values = self._reads.values_in(pane, rests)
        return [None if value is None else self._piece(value) for value in values]

    def are_one(self, piece: Piece, later: Piece | None) -> bool:
        return later is not None and self._windows.are_one(piece.last, later.first)

    def whole(self, pane: int, rests: Sequence[str], pieces: Sequence[Piece]) -> list[list[Piece]]:
        """The pieces of each session up to the one in this pane."""
        sessions = [[piece] for piece in pieces]
        going = list(range(len(rests)))
        while going:
            pane -= self._windows.definition.length
            before = zip(going, self.at(pane, [rests[i] for i in going]), strict=True)
            going = []
            for i, piece in before:
                if piece is not None and self.are_one(piece, sessions[i][0]):
                    sessions[i].insert(0, piece)
                    going.append(i)
        return sessions

    def joined(self, session: Sequence[Piece]) -> Any:
        return joined(self._fields, [piece.value for piece in session])


class FiredSessionTask(FiredTask):
    """Reads the sessions that have fired, by the panes of their last rows. See `FiredTask`."""

    def __init__(self, spec: StateSpec, record: LedgerRecord, ends: range, fields: Fields) -> None:
        super().__init__(spec, record, ends)
        self.fields = fields

    def _page(self, reads: Reads, pane: int, rests: Sequence[str]) -> Page:
        pieces = _Pieces(reads, self.record, self.fields)
        gap = windows_of_ledger(self.record).definition.length
        parts = pieces.at(pane, rests)
        self.check_present(reads, pane, rests, parts)
        ended = [
            (rest, piece)
            for rest, piece, later in zip(rests, parts, pieces.at(pane + gap, rests), strict=True)
            if piece is not None and piece.last + gap in self.ends and not pieces.are_one(piece, later)
        ]
        last = [piece for _, piece in ended]
        own_rests = [rest for rest, _ in ended]
        values = [pieces.joined(session) for session in pieces.whole(pane, own_rests, last)]
        return Page(pane, own_rests, values, [[piece.last + gap for piece in last]])


class SessionRows(JoinTask):
    """Fired sessions as rows. See `JoinTask`."""

    def _starts(self, ends: pa.Array, values: Sequence[Any]) -> pa.Array:
        at = [field.name for field in self.fields.fields].index(FIRST)
        return pa.array([number_of(value[at]) for value in values], ends.type)

    def _shown(self, values: Sequence[Any]) -> Sequence[Sequence[Any]]:
        kept = [i for i, field in enumerate(self.fields.fields) if field.name not in (FIRST, LAST)]
        return [[row[at] for at in kept] for row in super()._shown(values)]


class SettleTask(PurgeTask):
    """Joins the pieces of sessions before a pane into those of the pane; may run twice. See `PurgeTask`."""

    def __init__(self, *settings: Any, pane: int, fields: Fields) -> None:
        super().__init__(*settings)
        self._pane = pane
        self.fields = fields

    def work(self, parts: Sequence[Slice]) -> int:
        """The number of pieces that something was joined into. Raises FencedError, StoreLostError."""
        spec, record = self.spec, self.record
        count = 0

        def lost(chunk: str) -> None:  # no purge comes before the pane is settled
            raise index_lost(spec.state, chunk)

        with closing(self.reads()) as reads, writer_of(reads.store, self.token) as writer:
            pieces = _Pieces(reads, record, self.fields)
            codec = RecordCodec(serializer(spec.serializer), spec.state, "opaque", record.fields, record.field_counts)
            state: OpaqueMap[Any] = OpaqueMap(SerializedMap(writer, codec), self.view, written_once=True)
            state.begin_commit(self.txid)
            for part in parts:
                for page in key_pages(reads.index, part, lost):
                    for rests in batched(page, spec.chunk_size):
                        both = zip(rests, pieces.at(self._pane, rests), strict=True)
                        there = {rest: piece for rest, piece in both if piece is not None}
                        sessions = zip(there, pieces.whole(self._pane, [*there], [*there.values()]), strict=True)
                        longer = {rest: self._joined(pieces, session) for rest, session in sessions if len(session) > 1}
                        if longer:
                            state.multi_combine(reads.keys.of(part.pane, longer), [*longer.values()], replace_all)
                            count += len(longer)
        return count

    def _joined(self, pieces: _Pieces, session: Sequence[Piece]) -> Any:
        """Raises ConfigurationError: what cannot be joined is of earlier batches, and no row of this one is wrong."""
        try:
            return pieces.joined(session)
        except DataError as error:
            raise ConfigurationError(
                f"state {self.spec.state!r}: a session of earlier batches cannot be joined into one value: "
                f"{error.message} This batch is not committed, and no batch will until that is put right. See "
                "docs/windows.md#sessions",
                state=self.spec.state,
            ) from error
