"""What runs on an executor for sessions beside what windows have: the sessions that have fired, and those to settle.

See `mapstate.protocol.sessions`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from mapstate.aggregators.fields import Fields
from mapstate.aggregators.joins import joined
from mapstate.errors import ConfigurationError, DataError
from mapstate.keys import KeyCodec
from mapstate.maps.map_state import replace_all
from mapstate.maps.opaque import OpaqueMap
from mapstate.maps.serialized import SerializedMap, writer_of
from mapstate.protocol.ledger_record import LedgerRecord
from mapstate.protocol.pane_index import Slice, index_lost, is_native_integer, key_pages, slices, store_key
from mapstate.protocol.sessions import FIRST, LAST
from mapstate.protocol.windows import WindowsRecord
from mapstate.serializers import RecordCodec, serializer
from mapstate.spark.executor.window_task import (
    FiredTask,
    JoinTask,
    Page,
    PurgeTask,
    Reads,
)
from mapstate.windows import number_of, time_of

if TYPE_CHECKING:
    from mapstate.spec import StateSpec


class _Pieces:
    """The pieces of sessions under one ledger."""

    def __init__(self, reads: Reads, record: LedgerRecord, fields: Fields) -> None:
        self._reads = reads
        self._windows = _windows(record)
        self._fields = fields
        self._kind = record.keys[0].type
        self._keys = KeyCodec(record.keys[:1])
        self._is_int = is_native_integer(record)
        names = [field.name for field in record.fields]
        self._first, self._last = names.index(FIRST), names.index(LAST)
        self._done = record.last_windows()

    def text(self, pane: int) -> str:
        """A pane as keys have it."""
        return str(self._keys.encode(time_of(pane, self._kind)))

    def last(self, value: Any) -> int:
        """The last time of a piece."""
        return number_of(value[self._last])

    def are_one(self, value: Any, later: Any) -> bool:
        """Whether two neighbouring pieces are of one session."""
        return self._windows.are_one(self.last(value), number_of(later[self._first]))

    def at(self, pane: int, rests: Sequence[str]) -> list[Any]:
        """The pieces of some keys in a pane; None where a key has none."""
        if not rests or self._windows.is_over(pane, self._done) or not self._windows.may_have(pane):
            return [None] * len(rests)
        text = self.text(pane)
        return self._reads.values([store_key(text, rest, is_native_integer=self._is_int) for rest in rests])

    def whole(self, pane: int, rests: Sequence[str], values: Sequence[Any]) -> list[list[Any]]:
        """The pieces of each session up to the one in this pane."""
        gap = self._windows.definition.length
        sessions = [[value] for value in values]
        going = list(range(len(rests)))
        while going:
            pane -= gap
            before = zip(going, self.at(pane, [rests[at] for at in going]), strict=True)
            going = []
            for at, value in before:
                if value is not None and self.are_one(value, sessions[at][0]):
                    sessions[at].insert(0, value)
                    going.append(at)
        return sessions

    def joined(self, session: Sequence[Any]) -> Any:
        """The value of a session."""
        return joined(self._fields, session)


class FiredSessionTask(FiredTask):
    """Reads the sessions that have fired, by the panes of their last rows. See `FiredTask`."""

    def __init__(self, spec: StateSpec, record: LedgerRecord, ends: range, fields: Fields) -> None:
        super().__init__(spec, record, ends)
        self.fields = fields

    def _pages(self, reads: Reads, pane: int, partition: int) -> Iterator[Page]:
        pieces = _Pieces(reads, self.record, self.fields)
        gap = _windows(self.record).definition.length
        text = pieces.text(pane)
        for part in slices(reads.index, [text], partition + 1, first=partition):
            for rests in self.rests(reads, part):
                for start in range(0, len(rests), self.spec.chunk_size):
                    some = rests[start : start + self.spec.chunk_size]
                    values = pieces.at(pane, some)
                    after = pieces.at(pane + gap, some)
                    ended = [
                        at
                        for at, (value, other) in enumerate(zip(values, after, strict=True))
                        if value is not None
                        and pieces.last(value) + gap in self.ends
                        and (other is None or not pieces.are_one(value, other))
                    ]
                    own = [some[at] for at in ended]
                    whole = pieces.whole(pane, own, [values[at] for at in ended])
                    self.check_present(reads, text, some, values)
                    ends = [pieces.last(values[at]) + gap for at in ended]
                    yield Page(pane, own, [pieces.joined(session) for session in whole], [ends])


class SessionRows(JoinTask):
    """Fired sessions as rows. See `JoinTask`."""

    def _starts(self, ends: pa.Array, values: Sequence[Any]) -> pa.Array:
        at = [field.name for field in self.fields.fields].index(FIRST)
        return pa.array([number_of(value[at]) for value in values], ends.type)

    def _shown(self, values: Sequence[Any]) -> Sequence[Sequence[Any]]:
        kept = [at for at, field in enumerate(self.fields.fields) if field.name not in (FIRST, LAST)]
        return [[row[at] for at in kept] for row in super()._shown(values)]


class SettleTask(PurgeTask):
    """Joins the pieces of sessions before a pane into those of the pane. Picklable. See `PurgeTask` for its rows.

    No row goes into these panes any more, so a task that runs twice writes the same.
    """

    def __init__(self, *settings: Any, pane: int, fields: Fields) -> None:
        super().__init__(*settings)
        self._pane = pane
        self.fields = fields

    def work(self, parts: Sequence[Slice]) -> int:
        """The number of pieces that something was joined into. Raises FencedError, StoreLostError."""
        spec, record = self.spec, self.record
        is_int, count = is_native_integer(record), 0

        def lost(chunk: str) -> None:  # no purge comes before the pane is settled
            raise index_lost(spec.state, chunk)

        with closing(self.reads()) as reads, writer_of(reads.store, self.token) as writer:
            pieces = _Pieces(reads, record, self.fields)
            codec = RecordCodec(serializer(spec.serializer), spec.state, "opaque", record.fields, record.field_counts)
            state: OpaqueMap[Any] = OpaqueMap(SerializedMap(writer, codec), self.view, written_once=True)
            state.begin_commit(self.txid)
            for part in parts:
                for rests in key_pages(reads.index, part, lost):
                    for start in range(0, len(rests), spec.chunk_size):
                        some = rests[start : start + spec.chunk_size]
                        there = [pair for pair in zip(some, pieces.at(self._pane, some), strict=True) if pair[1]]
                        own = [rest for rest, _ in there]
                        sessions = pieces.whole(self._pane, own, [value for _, value in there])
                        longer = [at for at, session in enumerate(sessions) if len(session) > 1]
                        keys = [store_key(part.pane, own[at], is_native_integer=is_int) for at in longer]
                        if keys:
                            values = [self._joined(pieces, sessions[at]) for at in longer]
                            state.multi_combine(keys, values, replace_all)
                            count += len(keys)
        return count

    def _joined(self, pieces: _Pieces, session: Sequence[Any]) -> Any:
        """Raises ConfigurationError: what cannot be joined is of earlier batches, and no row of this one is wrong."""
        try:
            return pieces.joined(session)
        except DataError as error:
            raise ConfigurationError(
                f"state {self.spec.state!r}: a session of earlier batches cannot be joined into one value: "
                f"{error.message} Nothing of this batch counts, and no batch will until that is put right. See "
                "docs/windows.md#sessions",
                state=self.spec.state,
            ) from error


def _windows(record: LedgerRecord) -> WindowsRecord:
    if record.windows is None:
        raise AssertionError("the ledger of a state with sessions says so")
    return record.windows
