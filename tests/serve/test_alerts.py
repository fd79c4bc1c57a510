"""The alerts for Prometheus: their metrics are there, and in its own rule tests each fires, and is silent."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from test_dashboard import metrics  # noqa: F401  a fixture

RULES = Path(__file__).resolve().parents[2] / "examples/prometheus/mapstate.yaml"
ALERTS = {rule["alert"]: rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]}
STATE = '{state="visits",instance="i"}'
HEALTHY = {
    'mapstate_serve_store_up{instance="i"}': "1x200",
    f"mapstate_up{STATE}": "1x200",
    f"mapstate_commit_age_seconds{STATE}": "20x200",
    f"mapstate_attempt_in_flight{STATE}": "1 0 1 1 0" + " 1" * 195,
    f"mapstate_batch_id{STATE}": "0+3x200",
    f"mapstate_retried_batches_total{STATE}": "0+0x100 1+0x100",
    f"mapstate_busy_seconds_total{STATE}": "0+30x200",
    f"mapstate_rows_late_total{STATE}": "0+1x200",
    f"mapstate_rows_total{STATE}": "0+1000x200",
    f"mapstate_watermark_timestamp_seconds{STATE}": "0+60x200",
    f"mapstate_dead_ranges{STATE}": "3x200",
}
"""A sample each minute, and ``AxN`` is A and N more: nothing here is a reason for an alert."""

TROUBLE: dict[str, dict[str, str]] = {
    "MapstateServiceGone": dict.fromkeys(HEALTHY, "1 1 1 stale"),
    "MapstateStoreDown": {'mapstate_serve_store_up{instance="i"}': "0x200", f"mapstate_up{STATE}": "0x200"},
    "MapstateStateUnreadable": {f"mapstate_up{STATE}": "0x200"},
    "MapstateNoCommit": {f"mapstate_commit_age_seconds{STATE}": "0+60x200"},
    "MapstateAttemptLeft": {f"mapstate_attempt_in_flight{STATE}": "1x200", f"mapstate_batch_id{STATE}": "7x200"},
    "MapstateRetries": {f"mapstate_retried_batches_total{STATE}": "0+1x200"},
    "MapstateBusy": {f"mapstate_busy_seconds_total{STATE}": "0+58x200"},
    "MapstateLateRows": {f"mapstate_rows_late_total{STATE}": "0+20x200"},
    "MapstateWatermarkBehind": {f"mapstate_watermark_timestamp_seconds{STATE}": "0x200"},
    "MapstateVacuumDue": {f"mapstate_dead_ranges{STATE}": "0+20x200"},
}
"""What is different of the healthy series where exactly this one fires."""


def at_two_hours(series: dict[str, str], firing: str | None) -> dict[str, Any]:
    """A rule test of promtool: which alerts there are after two hours."""
    own = {"MapstateStoreDown": {"instance": "i"}, "MapstateServiceGone": {}}
    labels = own.get(firing or "", {"instance": "i", "state": "visits"})
    expected = {"exp_labels": labels | {"severity": ALERTS[firing]["labels"]["severity"]}} if firing else None
    return {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "alert_rule_test": [
            {"eval_time": "2h", "alertname": name, "exp_alerts": [expected] if name == firing else []}
            for name in ALERTS
        ],
    }


def test_each_alert_has_a_case_and_names_metrics_that_are_there(metrics):  # noqa: F811
    assert TROUBLE.keys() == ALERTS.keys()
    for rule in ALERTS.values():
        assert set(re.findall(r"mapstate_\w+", rule["expr"])) <= metrics.keys()
        assert rule["annotations"]["summary"].endswith((".", "?"))
    named = {name for rule in ALERTS.values() for name in re.findall(r"mapstate_\w+", rule["expr"])}
    assert named == {series.partition("{")[0] for series in HEALTHY}


@pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool here: apt-get install prometheus has it")
@pytest.mark.parametrize("firing", [None, *TROUBLE])
def test_an_alert_fires_alone_in_its_trouble_and_none_does_where_all_is_well(firing, tmp_path):
    series = HEALTHY | (TROUBLE[firing] if firing else {})
    test = at_two_hours(series, firing)
    for alert in test["alert_rule_test"]:
        for one in alert["exp_alerts"]:  # Prometheus fills in the numbers
            one["exp_annotations"] = {"summary": text_of(alert["alertname"])}
    place = tmp_path / "test.yaml"
    place.write_text(yaml.safe_dump({"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": [test]}))
    done = subprocess.run(["promtool", "test", "rules", str(place)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def text_of(alert: str) -> str:
    """The summary as it is at two hours of the trouble."""
    values = {"MapstateNoCommit": "2h 0m 0s", "MapstateWatermarkBehind": "2h 0m 0s", "MapstateVacuumDue": "2400"}
    text = str(ALERTS[alert]["annotations"]["summary"]).replace("{{ $labels.state }}", "visits")
    return re.sub(r"\{\{ \$value.*?\}\}", values.get(alert, ""), text)
