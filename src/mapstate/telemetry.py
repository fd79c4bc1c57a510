"""Batches for OpenTelemetry: spans and some metrics per committed batch, from its reports."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Sequence
from typing import Any

from mapstate.batch_report import BatchReport, FinishedBatch, Span
from mapstate.errors import missing_driver

_COUNTERS = {
    "batches": "batches that were committed",
    "rows": "rows that arrived",
    "keys_written": "keys that were written",
    "rows_late": "rows whose first window had fired before, or without a usable time",
    "retried_batches": "batches that were not committed at the first attempt",
}


class Telemetry:
    """Gives OpenTelemetry what a job reports of its batches: ``topology.on_finished(Telemetry())``.

    For a state by itself: ``state.on_batch(Telemetry().of_state("visits_by_user"))``. On the driver, once per batch,
    after its commit. Without providers it takes those that the program has set for all its libraries.

    A span ``mapstate.batch`` reaches from the begin of the foreachBatch call to the commit, and belongs to the span
    that is current, if there is one. In it are a span ``mapstate.state`` for each state and, of a topology, a span
    ``mapstate.attempt`` for each attempt with a ``mapstate.commit`` at its end; of one that failed, ``error.type`` is
    the class of the error. A batch that raised has no spans. The metrics begin with ``mapstate.`` and have the
    attribute ``mapstate.state``: counters of batches, rows, keys_written, rows_late and retried_batches, and a
    histogram ``batch.duration`` in seconds. A batch that a later run reports once more is a span, and is not counted.

    Raises MissingDriverError where OpenTelemetry's API is not installed.
    """

    def __init__(self, *, tracer_provider: Any = None, meter_provider: Any = None) -> None:
        try:
            from opentelemetry import metrics, trace
        except ModuleNotFoundError as error:
            raise missing_driver("Telemetry", error, extra="otel") from error
        self._in_span = trace.set_span_in_context
        self._failed = trace.StatusCode.ERROR
        self._tracer = trace.get_tracer("mapstate", tracer_provider=tracer_provider)
        meter = metrics.get_meter("mapstate", meter_provider=meter_provider)
        self._counters = {
            name: meter.create_counter(f"mapstate.{name}", description=text) for name, text in _COUNTERS.items()
        }
        self._duration = meter.create_histogram(
            "mapstate.batch.duration", "s", "from the begin of the foreachBatch call to the commit"
        )

    def __call__(self, finished: FinishedBatch) -> None:
        """Take a finished batch of a topology."""
        reports = finished.states
        if not reports:
            return
        spans = [_span_of(report) for report in reports.values()]
        end = max(end for _, end in spans)
        attributes: dict[str, Any] = {"mapstate.batch_id": finished.batch_id, "mapstate.repeated": finished.repeated}
        if finished.quarantined is not None:
            attributes["mapstate.quarantined"] = finished.quarantined
        span = self._tracer.start_span(
            "mapstate.batch", start_time=min(start for start, _ in spans), attributes=attributes
        )
        context = self._in_span(span)
        self._attempts(finished.spans, context)
        for name, report in reports.items():
            self._state(name, report, context)
            if not finished.repeated:
                self._count(name, report)
        span.end(end)

    def of_state(self, name: str) -> Callable[[BatchReport], None]:
        """A function for ``on_batch`` of the state with this name."""

        def take(report: BatchReport) -> None:
            self(FinishedBatch(batch_id=report.batch_id, states={name: report}, repeated=report.attempt == 0))

        return take

    def _attempts(self, spans: Sequence[Span], context: Any) -> None:
        inner: list[Span] = []
        for part in spans:  # a commit ends before its attempt; that of a batch that was set aside is in none
            if part.name == "attempt":
                outer = self._span(part, context)
                for error in inner:
                    self._span(error, self._in_span(outer))
                inner = []
            else:
                inner.append(part)
        for error in inner:
            self._span(error, context)

    def _span(self, part: Span, context: Any) -> Any:
        attributes = {} if part.error is None else {"error.type": part.error}
        span = self._tracer.start_span(f"mapstate.{part.name}", context, start_time=part.began, attributes=attributes)
        if part.error is not None:
            span.set_status(self._failed)
        span.end(part.ended)
        return span

    def _state(self, name: str, report: BatchReport, context: Any) -> None:
        start, end = _span_of(report)
        attributes: dict[str, Any] = {
            "mapstate.state": name,
            "mapstate.txid": report.txid,
            "mapstate.attempt": report.attempt,
            "mapstate.rows": report.rows,
            "mapstate.keys_written": report.keys_written,
            "mapstate.rows_late": report.rows_late,
        }
        self._tracer.start_span("mapstate.state", context, start_time=start, attributes=attributes).end(end)

    def _count(self, name: str, report: BatchReport) -> None:
        attributes = {"mapstate.state": name}
        added = {
            "batches": 1,
            "rows": report.rows,
            "keys_written": report.keys_written,
            "rows_late": report.rows_late,
            "retried_batches": int(report.attempt > 1),
        }
        for counter, number in added.items():
            self._counters[counter].add(number, attributes)
        self._duration.record(report.milliseconds / 1000, attributes)


def _span_of(report: BatchReport) -> tuple[int, int]:
    """When the batch began and was committed, in nanoseconds since 1970."""
    at = dt.datetime.fromisoformat(report.at) if report.at else dt.datetime.now(dt.UTC)
    end = round(at.timestamp() * 1000) * 1_000_000
    return end - report.milliseconds * 1_000_000, end
