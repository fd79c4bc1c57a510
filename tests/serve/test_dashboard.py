"""The Grafana dashboard: its queries name metrics that the service gives."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from service import report
from starlette.testclient import TestClient
from states import Job, made_of_one_batch
from windowed import Row, Windowed

from mapstate.schema import Field
from mapstate.serve import make_app
from mapstate.spark.driver.state import encode_report

ROOT = Path(__file__).resolve().parents[2]
BOARD = json.loads((ROOT / "examples/grafana/mapstate.json").read_text())
QUERIES = [(panel["title"], target["expr"]) for panel in BOARD["panels"] for target in panel["targets"]]


@pytest.fixture(scope="module")
def metrics(tmp_path_factory):
    """The labels of each metric of a state with windows and a plain one, after a batch between two scrapes."""
    folder = tmp_path_factory.mktemp("metrics")
    found = {}
    for name, job in (("a", Job), ("b", Windowed)):
        url = f"sqlite:///{folder}/{name}.db"
        made_of_one_batch(url, "timed", (), (Field("n", "Count", "bigint"),), {}, "2026-11-21T10:00:00+00:00")
        made: Any = job(url) if job is Job else job(url, lag=0, kind="timestamp")
        with TestClient(make_app(url)) as client:
            for at in range(2):
                if job is Job:
                    made.batch(a=at)
                else:
                    made.commit(made.attempt(Row(10**15 + at, "a", 1)))
                made.store.keep_report(encode_report(report(at)), 100)
                client.get("/states/s")
                text = client.get("/metrics").text
        for family in text_string_to_metric_families(text):
            found |= {sample.name: set(sample.labels) for sample in family.samples}
    return found


@pytest.mark.parametrize(("title", "query"), QUERIES, ids=[query for _, query in QUERIES])
def test_a_query_names_metrics_that_are_there_with_the_labels_that_it_asks_for(title, query, metrics):
    names = re.findall(r"mapstate_\w+", query)
    assert names
    assert set(names) <= metrics.keys()
    labels = set(re.findall(r"(\w+)=~?\"", query)) | set(re.findall(r"by \((\w+)\)", query))
    assert labels <= set.union(*(metrics[name] for name in names))
    assert query.count("(") == query.count(")")
    assert all(name.endswith(("_total", "_bucket")) == ("rate(" in query) for name in names)


def test_every_metric_of_a_state_is_on_the_dashboard_or_part_of_another(metrics):
    shown = {name for _, query in QUERIES for name in re.findall(r"mapstate_\w+", query)}
    own = {name for name, labels in metrics.items() if labels == {"state"} and not name.endswith("_created")}
    derived = {"batch_id", "commit_timestamp_seconds", "batch_rows", "batch_keys_written", "batch_attempts"}
    derived |= {"attempt_in_flight", "batches_total", "dead_ranges", "offsets_passed_total", "rows_between_total"}
    assert own - shown == {f"mapstate_{name}" for name in derived}


def test_the_dashboard_asks_for_its_source_and_places_its_panels_apart():
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in BOARD["panels"]]
    assert len(set(places)) == len(places) == len({panel["id"] for panel in BOARD["panels"]})
    assert {panel["datasource"]["uid"] for panel in BOARD["panels"]} == {"${source}"}
    assert "http" not in json.dumps(BOARD)
