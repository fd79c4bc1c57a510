"""A task whose rows have times: those that may move the watermark go to the driver in its report."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from mapstate.protocol.windows import NEVER
from mapstate.spark.executor.report import TaskReport
from mapstate.spark.executor.task import BatchTask


class WindowReport(msgspec.Struct):
    """What a task of a state with windows says beside.

    ``late`` and ``between`` are rows; ``latest`` has the times of each input that may move the watermark, see
    `mapstate.protocol.windows.latest_without_hole`, and ``has_rows`` whether it had any; ``panes`` are those that the
    task wrote, ``newest`` is the latest time of rows that count in rolling windows.
    """

    late: int
    between: int
    latest: list[list[tuple[int, int, int]]]
    has_rows: list[bool]
    panes: list[int]
    newest: int | None = None


class TimedTask(BatchTask):
    """A task with columns beside the partials, see `mapstate.spark.driver.window_rows.BESIDE`.

    ``inputs`` and ``beside`` say how many there are, ``hole`` what parts two stretches of times, ``place`` which column
    is null in rows that count in no window.
    """

    def __init__(self, *, inputs: int, beside: int, hole: int, place: int = 0, **settings: Any) -> None:
        super().__init__(**settings)
        self.inputs = inputs
        self.beside = beside
        self.hole = hole
        self.place = place

    def counted(self, batches: Iterator[pa.RecordBatch], report: TaskReport) -> Iterator[pa.RecordBatch]:
        """The groups that lie in windows, without the columns beside."""
        found = report.windows = WindowReport(0, 0, [[] for _ in range(self.inputs)], [False] * self.inputs, [])
        for batch in super().counted(batches, report):
            columns, names = batch.columns, batch.schema.names
            end = len(columns) - (self.partials is not None)  # the number of rows stays last
            start = end - self.inputs - self.beside
            for at in range(self.inputs):
                marks = columns[start + at].drop_null()
                found.has_rows[at] |= len(marks) > 0
                found.latest[at] += _stretches(marks.filter(pc.not_equal(marks, NEVER)), self.hole)
            is_outside = pc.is_null(columns[self.place])
            outside = pc.sum(is_outside if self.partials is None else columns[-1].filter(is_outside)).as_py() or 0
            report.rows_done += outside
            kept = [*range(start), *range(end, len(columns))]
            inside = pa.RecordBatch.from_arrays([columns[at] for at in kept], [names[at] for at in kept])
            if outside:
                inside = inside.filter(pc.invert(is_outside))
            self.note(found, outside, columns[start + self.inputs : end], inside.columns[self.place])
            if inside.num_rows:
                yield inside

    def note(self, found: WindowReport, outside: int, beside: Sequence[pa.Array], places: pa.Array) -> None:
        """Notes what a batch has ``beside``: ``outside`` rows in no window, and others in ``places``."""
        raise NotImplementedError


def _stretches(times: pa.Array, hole: int) -> list[tuple[int, int, int]]:
    first, last = pc.min_max(times).as_py().values()
    if first is None or last - first <= hole:
        return [] if first is None else [(first, last, len(times))]
    times = times.sort()
    cuts = pc.indices_nonzero(pc.greater(pc.subtract(times[1:], times[:-1]), hole)).to_pylist()
    ends = zip([0, *(at + 1 for at in cuts)], [*cuts, len(times) - 1], strict=True)
    return [(times[start].as_py(), times[end].as_py(), end - start + 1) for start, end in ends]
