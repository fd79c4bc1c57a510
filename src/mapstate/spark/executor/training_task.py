"""Training sets on an executor: what rolling windows held for the key of each row, as of its time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from mapstate.aggregators.fields import Fields
from mapstate.aggregators.folding import Folding
from mapstate.aggregators.tiles import Answers, assembled
from mapstate.keys import StoreKey
from mapstate.protocol.stored_ledger import decode_ledger
from mapstate.protocol.windows import NEVER, WindowCommit
from mapstate.reader.committed import CommittedReads
from mapstate.reader.rolling import Asked, RollingFields
from mapstate.serializers import key_codec
from mapstate.serializers.tiles import Tiles
from mapstate.spark.executor.batch_fold import same_key
from mapstate.spark.executor.error_text import each_with_errors_as_text
from mapstate.spark.executor.query_task import AskedState
from mapstate.spark.executor.task import arrow_to_python
from mapstate.spark.interfaces import MapGet
from mapstate.spec import StateSpec


@dataclass(frozen=True)
class PlannedState(AskedState):
    """A state with rolling windows as of one ledger, whichever task opens it and when. Picklable."""

    ledger: bytes = b""
    columns: tuple[str, ...] = ()

    def open(self, before: tuple[str, int] | None, now: int | None = None) -> Any:  # noqa: ARG002
        return _PlannedReads(self)


class _PlannedReads:
    """Reads of a state as of one ledger."""

    def __init__(self, planned: PlannedState) -> None:
        spec, given = planned.source, planned.aggregators or {}
        if not isinstance(spec, StateSpec):
            raise TypeError("a user's own state has no ledger")
        ledger = decode_ledger(planned.ledger, spec.state)
        if ledger.rolling is None:
            raise TypeError("the ledger of a state with rolling windows says so")
        self._record = ledger.rolling
        self._columns = planned.columns
        self._keys = key_codec(ledger)
        self._shown = RollingFields(ledger, ledger.rolling, given)
        self._reads = CommittedReads(spec.backend.open(spec.state), spec.state, "committed", given, as_of=ledger)
        self._known: dict[StoreKey, Any] = {}

    def as_of(self, keys: Sequence[Sequence[Any]]) -> list[Mapping[str, Any] | None]:
        """The columns of each key, whose last part is a time. A key that the call before had is not read again."""
        texts = self._keys.encode_all([key[:-1] for key in keys])
        new = [text for text in dict.fromkeys(texts) if text not in self._known]
        known = {text: self._known[text] for text in texts if text in self._known}
        if new:
            known.update(zip(new, self._reads.read(new)[1], strict=True))
        self._known = known
        timed = [i for i, key in enumerate(keys) if key[-1] is not None]
        asked = Asked(self._reads.state, at=[keys[at][-1] for at in timed], columns=self._columns)
        ends = asked.ends(self._record, WindowCommit(), NEVER, len(timed))
        texts = [texts[at] for at in timed]
        fields, values = asked.answered(self._shown, texts, [known[text] for text in texts], ends)
        answers: list[Mapping[str, Any] | None] = [None] * len(keys)
        for at, answer in zip(timed, asked.named(fields, values), strict=True):
            answers[at] = answer
        return answers

    def close(self) -> None:
        self._reads.close()


class AsOf(MapGet):
    """The columns of a key as of a time; nulls where it is absent, or the time is null."""

    def batch_retrieve(self, state: Any, keys: Sequence[tuple[Any, ...]]) -> Sequence[Any]:
        answers: Sequence[Any] = state.as_of(keys)
        return answers


class HistoryTask:
    """Answers queries out of the rows of history. Picklable; run by `mapInArrow`.

    The columns are: ``keys`` of the key, a time in full units, whether the row is a query, then what is of history, and
    what is of queries. Of history these are the columns ``read``, or, of each field, ``widths`` columns of partials.
    The rows of a key are neighbours, those of its history first, in the order of time.
    """

    def __init__(
        self,
        fields: Fields,
        answers: Answers,
        *,
        unit: int,
        keys: int,
        read: Sequence[str],
        widths: Sequence[int],
        added: pa.Schema,
    ) -> None:
        self._fields = fields
        self._answers = answers
        self._unit = unit
        self._keys = keys
        self._read = read
        self._widths = widths
        self._added = added

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return each_with_errors_as_text(self._answered(batches))

    def _answered(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        behind = self._keys + 2 + len(self._read) + sum(self._widths)
        last: tuple[Any, ...] | None = None
        history = _History(self._fields)
        for batch in batches:
            *of_keys, times, is_query = (arrow_to_python(column, "a key") for column in batch.columns[: self._keys + 2])
            keys = list(zip(*of_keys, strict=True)) if of_keys else [()] * batch.num_rows
            values = self._values(batch.filter(pc.invert(batch.column(self._keys + 1))))
            asked: list[tuple[Tiles | None, int]] = []
            for key, time, asks in zip(keys, times, is_query, strict=True):
                if last is None or not same_key(last, key):
                    last, history = key, _History(self._fields)
                if not asks:
                    history.add(time // self._unit, next(values))
                    continue
                tiles = history.closed()
                asked.append((None, 0) if time is None or not tiles.starts else (tiles, time // self._unit))
            if asked:
                yield self._beside(batch.filter(batch.column(self._keys + 1)).columns[behind:], asked)

    def _values(self, rows: pa.RecordBatch) -> Iterator[Any]:
        names = self._read or ["a partial aggregate"] * sum(self._widths)
        columns = [
            arrow_to_python(column, name) for column, name in zip(rows.columns[self._keys + 2 :], names, strict=False)
        ]
        if not self._widths:
            return (dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True))
        ends = list(accumulate(self._widths))
        per_field = [columns[end - width : end] for end, width in zip(ends, self._widths, strict=True)]
        return zip(*assembled(self._fields, per_field), strict=True)

    def _beside(self, rows: Sequence[pa.Array], asked: Sequence[tuple[Any, int]]) -> pa.RecordBatch:
        answers = self._answers
        values = answers.values([tiles for tiles, _ in asked], [(end, end) for _, end in asked])
        shown = zip(*map(answers.fields.shown, values), strict=True)
        added = [pa.array(column, field.type) for column, field in zip(shown, self._added, strict=True)]
        return pa.RecordBatch.from_arrays([*rows, *added], names=[str(i) for i in range(len(rows) + len(added))])


class _History:
    """The tiles of a key, each a unit long. Its rows come in the order of time."""

    def __init__(self, fields: Fields) -> None:
        self._fields = fields
        self._tiles = Tiles([], [[] for _ in fields.fields])
        self._foldings: list[Folding] = []

    def add(self, unit: int, values: Any) -> None:
        starts, columns = self._tiles
        if isinstance(values, dict):
            if starts[-1:] != [unit]:
                self.closed().starts.append(unit)
                self._foldings = self._fields.start()
            for folding in self._foldings:
                folding.add(values)
            return
        starts.append(unit)
        for column, value in zip(columns, values, strict=True):
            column.append(value)

    def closed(self) -> Tiles:
        if self._foldings:
            fields, foldings, self._foldings = self._fields, self._foldings, []
            (value,) = fields.combine_all([None], [fields.finish(foldings)])
            for column, stored in zip(self._tiles.columns, fields.split(value), strict=True):
                column.append(stored)
        return self._tiles
