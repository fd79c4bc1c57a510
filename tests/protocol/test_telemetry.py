"""What OpenTelemetry gets of a job's batches."""

from __future__ import annotations

import sys
from typing import Any

import msgspec
import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from service import report

from mapstate.batch_report import FinishedBatch, Span
from mapstate.errors import MissingDriverError
from mapstate.telemetry import Telemetry


class Taken:
    """All that was given to OpenTelemetry."""

    def __init__(self):
        self.exporter, self.reader = InMemorySpanExporter(), InMemoryMetricReader()
        self.tracers = TracerProvider()
        self.tracers.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.meters = MeterProvider([self.reader])
        self.telemetry = Telemetry(tracer_provider=self.tracers, meter_provider=self.meters)

    def spans(self):
        return {span.name: span for span in self.exporter.get_finished_spans()}

    def sums(self, state):
        data: Any = self.reader.get_metrics_data()
        found = {}
        for metric in data.resource_metrics[0].scope_metrics[0].metrics:
            for point in metric.data.data_points:
                if point.attributes["mapstate.state"] == state:
                    found[metric.name] = point.sum if metric.name.endswith("duration") else point.value
        return found


@pytest.fixture
def taken():
    made = Taken()
    yield made
    made.meters.shutdown()
    made.tracers.shutdown()


def test_a_batch_of_a_topology_is_a_span_with_one_for_each_state(taken):
    states = {"a": report(3), "b": report(3, milliseconds=100, attempt=2, rows_late=4)}
    taken.telemetry(FinishedBatch(batch_id=3, states=states))
    batch = taken.spans()["mapstate.batch"]
    assert batch.attributes["mapstate.batch_id"] == 3
    assert batch.end_time - batch.start_time == 250_000_000  # of the state that took longest
    own = [span for span in taken.exporter.get_finished_spans() if span.name == "mapstate.state"]
    assert {span.attributes["mapstate.state"]: span.end_time - span.start_time for span in own} == {
        "a": 250_000_000,
        "b": 100_000_000,
    }
    assert {span.parent.span_id for span in own} == {batch.context.span_id}
    assert taken.sums("b") == {
        "mapstate.batches": 1,
        "mapstate.rows": 10,
        "mapstate.keys_written": 5,
        "mapstate.rows_late": 4,
        "mapstate.retried_batches": 1,
        "mapstate.batch.duration": 0.1,
    }


def test_attempts_are_spans_in_the_batch_and_each_commit_is_in_its_attempt(taken):
    spans = (
        Span(name="attempt", began=1_000, ended=2_000, error="DataError"),
        Span(name="commit", began=3_500, ended=3_700, error="StoreUnavailableError"),
        Span(name="attempt", began=3_000, ended=3_800, error="StoreUnavailableError"),
        Span(name="commit", began=4_000, ended=4_500),
    )
    taken.telemetry(FinishedBatch(batch_id=3, states={"a": report(3)}, spans=spans))
    found = {span.start_time: span for span in taken.exporter.get_finished_spans()}
    batch = taken.spans()["mapstate.batch"]
    assert [(found[at].name, found[at].end_time) for at in (1_000, 3_500, 3_000, 4_000)] == [
        (f"mapstate.{span.name}", span.ended) for span in spans
    ]
    assert [found[at].parent.span_id for at in (1_000, 3_000, 4_000)] == [batch.context.span_id] * 3
    assert found[3_500].parent.span_id == found[3_000].context.span_id
    assert [found[at].attributes.get("error.type") for at in (1_000, 3_500, 4_000)] == [
        "DataError",
        "StoreUnavailableError",
        None,
    ]
    assert [found[at].status.is_ok for at in (1_000, 4_000)] == [False, True]


def test_a_batch_that_is_reported_again_is_not_counted_again(taken):
    taken.telemetry(FinishedBatch(batch_id=3, states={"a": report(3)}))
    taken.telemetry(FinishedBatch(batch_id=3, states={"a": report(3)}, repeated=True))
    of_state = taken.telemetry.of_state("a")
    of_state(msgspec.structs.replace(report(3), attempt=0, milliseconds=0))
    assert taken.sums("a")["mapstate.batches"] == 1
    assert len([span for span in taken.exporter.get_finished_spans() if span.name == "mapstate.batch"]) == 3
    of_state(report(4))
    assert taken.sums("a")["mapstate.rows"] == 20


def test_a_batch_belongs_to_the_span_that_is_current(taken):
    tracer = taken.tracers.get_tracer("a job")
    with tracer.start_as_current_span("job") as job:
        taken.telemetry(FinishedBatch(batch_id=0, states={"a": report(0, at="")}))
    assert taken.spans()["mapstate.batch"].parent.span_id == job.get_span_context().span_id


def test_without_opentelemetry_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(MissingDriverError, match=r"mapstate\[otel\]"):
        Telemetry()
