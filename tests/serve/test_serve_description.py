"""The description of the calls, against a live service: requests by chance, answers by their schemas."""

from __future__ import annotations

from collections import Counter

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rolled import Row, keyed
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from service import serving
from states import Job, Tens, made_of_one_batch

from mapstate.schema import Field, KeyField


@pytest.fixture(scope="module")
def api(tmp_path_factory):
    url = f"sqlite:///{tmp_path_factory.mktemp('service')}/s.db"
    Job(url).batch(a=1)
    made_of_one_batch(url, "visits", (KeyField("user_id", "string"),), (Field("n", "Count", "bigint"),), {"u": 1})
    state = Tens(url, "tens")
    attempt = state.begin()
    state.write(attempt, {0: {"a": 3}})
    state.commit(attempt, {0}, watermark=12)
    keyed(url, state="rolling").batch(Row(3, "a", 1))
    with serving(url) as served:
        yield schemathesis.openapi.from_url(f"{served.address}/openapi.json").exclude(path="/events")  # without an end


CHECKS = [not_a_server_error, content_type_conformance, response_schema_conformance, status_code_conformance]
CALLS = ["/states", "/states/{state}", "/states/{state}/values", "/states/{state}/scan", "/states/{state}/windows"]
CALLS += ["/states/{state}/windows/{end}", "/metrics", "/health", "/ready"]


def test_every_call_but_events_is_tried(api):
    assert {operation.ok().path for operation in api.get_all_operations()} == set(CALLS)


@pytest.mark.parametrize("path", CALLS)
def test_a_call_answers_as_it_is_described(api, path):
    for method in api[path]:
        seen = statuses(api[path][method])
        assert len(seen) > 1 or "{" not in path, "only one kind of answer was tried"


def statuses(operation):
    """Tries a call, mostly for a state, and half of the time for a window, that is there. How often it answered how."""
    seen = Counter[int]()

    @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(
        operation.as_strategy(),
        st.sampled_from(["s", "visits", "tens", "rolling", None]),
        st.sampled_from(["10", None]),
    )
    def answers(case, state, end):
        for name, value in (("state", state), ("end", end)):
            if value is not None and name in (case.path_parameters or {}):
                case.path_parameters[name] = value
        for name in ("min_batch", "wait"):  # which would wait
            (case.query or {}).pop(name, None)
        response = case.call()
        seen[response.status_code] += 1
        case.validate_response(response, checks=CHECKS)

    answers()
    return seen
