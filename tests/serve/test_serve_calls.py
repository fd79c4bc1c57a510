"""The calls of `mapstate serve`, in this process: what they answer, and what they refuse."""

from __future__ import annotations

import asyncio
import datetime as dt
import json
import math
import secrets
import signal
import time
from decimal import Decimal
from typing import Any

import httpx2
import pytest
from openapi_spec_validator import validate
from prometheus_client.parser import text_string_to_metric_families
from seeded import Seed
from service import AT, VISITS, client_of, problem, report
from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.testclient import TestClient
from states import Job, Tens, made_of_one_batch
from windowed import Row, Windowed

from mapstate.aggregators import Count
from mapstate.backends import resolve
from mapstate.errors import ConfigurationError, UsageError
from mapstate.keys import KeyCodec
from mapstate.operations.advance import advance
from mapstate.operations.drop import drop
from mapstate.reader.async_reader import AsyncStateReader
from mapstate.schema import Field, KeyField
from mapstate.serve import make_app
from mapstate.spark.driver.state import encode_report
from mapstate.testing import wait_for


def lines_of(answer):
    assert answer.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in answer.text.splitlines()]


# One key, many keys


def test_a_value_comes_with_its_batch(visits):
    with client_of(visits) as client:
        answer = client.get("/states/visits/values", params={"user_id": "user-42"})
        assert answer.json() == {
            "state": "visits",
            "as_of": {"batch_id": 0, "txid": 1000, "committed_at": AT, "commit": answer.json()["as_of"]["commit"]},
            "key": {"user_id": "user-42"},
            "value": {"visits": 3, "bytes": 512},
        }
        assert client.get("/states/visits/values?user_id=nobody").json()["value"] is None
        many = client.post(
            "/states/visits/values", json={"keys": [{"user_id": one} for one in ("user-7", "x", "user-42")]}
        )
        assert many.json()["values"] == [{"visits": 1, "bytes": 1}, None, {"visits": 3, "bytes": 512}]
        assert client.post("/states/visits/values", json={"keys": []}).json()["values"] == []


def test_a_tag_holds_until_the_next_commit(url):
    job = Job(url)
    job.batch(a=1)
    with client_of(url) as client:
        first = client.get("/states/s/values?k=a")
        tag = first.headers["etag"]
        for given in (tag, f'"x", {tag}', f"W/{tag}", "*"):
            again = client.get("/states/s/values?k=a", headers={"If-None-Match": given})
            assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", tag)
        assert client.get("/states/s/values?k=a", headers={"If-None-Match": '"x"'}).status_code == 200
        job.attempt(a=9)  # not committed
        assert client.get("/states/s/values?k=a", headers={"If-None-Match": tag}).status_code == 304
        job.batch(a=5)
        new = client.get("/states/s/values?k=a", headers={"If-None-Match": tag})
        assert (new.status_code, new.json()["value"]) == (200, {"n": 5})
        assert new.headers["etag"] != tag


@pytest.mark.redis
@pytest.mark.parametrize("changes", [{"type": "transactional"}, {"ttl": 1000.0, "has_ttl": True}], ids=str)
def test_values_that_change_without_a_commit_have_no_tag(redis_url, changes):
    Job(redis_url, **changes).batch(a=1)
    with client_of(redis_url) as client:
        answer = client.get("/states/s/values?k=a")
        assert answer.json()["value"] == {"n": 1}
        assert "etag" not in answer.headers


TYPES: list[tuple[str, Any, Any, str]] = [
    ("string", "a b/c?&é\n", "a b/c?&é\n", "a b/c?&é\n"),
    ("string", "\\N", "\\N", "\\N"),
    ("bigint", 2**62, 2**62, str(2**62)),
    ("bigint", -3, "-3", "-3"),
    ("boolean", True, True, "true"),
    ("double", 0.1, 0.1, "0.1"),
    ("double", 3.0, 3, "3.0"),
    ("double", float("inf"), "Infinity", "Infinity"),
    ("decimal(10,2)", Decimal("1.50"), "1.50", "1.50"),
    ("date", dt.date(2026, 11, 21), "2026-11-21", "2026-11-21"),
    (
        "timestamp",
        dt.datetime(2026, 11, 21, 10, tzinfo=dt.UTC),
        "2026-11-21T10:00:00.000000Z",
        "2026-11-21T11:00:00+01:00",
    ),
    ("binary", b"\x00\xff", "00ff", "00ff"),
    ("string", None, None, "\\N"),
]


@pytest.mark.parametrize(("kind", "value", "in_json", "in_query"), TYPES, ids=[f"{one[0]} {one[2]!r}" for one in TYPES])
def test_keys_of_every_type_are_read_from_a_query_and_from_json(tmp_path, kind, value, in_json, in_query):
    url = f"sqlite:///{tmp_path}/s.db"
    fields = (KeyField("k", kind),)
    made_of_one_batch(url, "s", fields, VISITS, {str(KeyCodec(fields).encode((value,))): (1, 2)})
    with client_of(url) as client:
        by_json = client.post("/states/s/values", json={"keys": [{"k": in_json}]})
        assert by_json.json()["values"] == [{"visits": 1, "bytes": 2}]
        assert client.post("/states/s/values", json={"keys": [in_json]}).json()["values"] == by_json.json()["values"]
        (_, row, *_) = lines_of(client.get("/states/s/scan"))
        assert client.post("/states/s/values", json={"keys": [row["key"]]}).json()["values"] == [row["value"]]
        if (value, kind) != ("\\N", "string"):  # which is null in a query
            by_query = client.get("/states/s/values", params={"k": in_query})
            assert by_query.json()["value"] == {"visits": 1, "bytes": 2}
            assert by_query.json()["key"] == row["key"]


@pytest.mark.parametrize(
    "query",
    [
        *("", "?user=1", "?user_id=1&user_id=2", "?user_id=1&more=2", "?user_id=1&min_batch=x"),
        *("?user_id=%ff", "?user_id=a%c3"),
    ],
)
def test_a_query_that_is_no_key_is_refused(visits, query):
    with client_of(visits) as client:
        problem(client.get(f"/states/visits/values{query}"), 400)


@pytest.mark.parametrize(
    "call",
    [
        *("/states?x=1", "/states/visits?x=1", "/states/visits/scan?x=1", "/states/visits/scan?limit=1&limit=2"),
        *("/states/visits?min_batch=0&min_batch=1", "/states/visits?wait=x", "/states/visits/scan?wait=61"),
        *("/states/visits/values?user_id=u&wait=0.0001", "/states/visits/windows?wait=", "/states/visits?w%61it=-1"),
    ],
)
def test_a_parameter_that_would_not_count_is_refused(visits, call):
    with client_of(visits) as client:
        problem(client.get(call), 400)


@pytest.mark.parametrize("query", ["x=1", "min_batch=0&x=1", "user_id=u", "wait=x", "wait=1&wait=2"])
def test_a_parameter_beside_the_keys_that_would_not_count_is_refused(visits, query):
    with client_of(visits) as client:
        problem(client.post(f"/states/visits/values?{query}", json={"keys": []}), 400)
        assert client.post("/states/visits/values?min_batch=0&wait=1", json={"keys": []}).json()["values"] == []


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"x", b"[]", b"{}", b'{"keys": 1}', b'{"keys": [1]}', b'{"keys": [{}]}', b'{"keys": [{"user_id": 1}]}'),
        *(b'{"keys": [{"user_id": "a", "b": 1}]}', b'{"keys": [], "x": 1}', b"[" * 100_000, b"NaN"),
        *(b"\xff\xfe", b'{"keys": [{"user_id": "\\ud800"}]}', b'{"keys": [{"user_id": true}]}'),
        *(b'{"keys": [{"user_id": {}}]}', b'{"keys": ["a", {"user_id": "a"}]}', b'{"keys": ["a"], "x": 1}'),
        *(b'{"keys": ["\\ud800"]}', b'{"keys": [["a"]]}', b'{"keys": ["a"'),
    ],
)
def test_a_body_that_has_no_keys_is_refused(visits, body):
    with client_of(visits) as client:
        problem(client.post("/states/visits/values", content=body), 400)
        assert client.get("/states/visits/values?user_id=user-7").json()["value"] == {"visits": 1, "bytes": 1}


def test_numbers_beyond_their_type_are_refused(tmp_path):
    url = f"sqlite:///{tmp_path}/s.db"
    made_of_one_batch(url, "s", (KeyField("k", "bigint"), KeyField("d", "double")), VISITS, {})
    with client_of(url) as client:
        for key in ({"k": 2**63, "d": 1}, {"k": 1, "d": 10**400}, {"k": 1.5, "d": 1}):
            problem(client.post("/states/s/values", json={"keys": [key]}), 400)
    made_of_one_batch(url, "small", (KeyField("k", "tinyint"),), VISITS, {"-128": (1, 2)})
    with client_of(url) as client:
        assert client.get("/states/small/values?k=-128").json()["value"] == {"visits": 1, "bytes": 2}
        for bare in ("128", "-129", "-1_28"):
            assert "tinyint" in problem(client.post("/states/small/values", json={"keys": [bare]}), 400)
            assert "tinyint" in problem(client.get("/states/small/values", params={"k": bare}), 400)
        problem(client.post("/states/small/values", json={"keys": [128]}), 400)


def test_bare_keys_are_for_one_key_column_and_of_its_type(tmp_path):
    url = f"sqlite:///{tmp_path}/s.db"
    made_of_one_batch(url, "one", (KeyField("k", "bigint"),), VISITS, {"7": (1, 2)})
    made_of_one_batch(url, "two", (KeyField("k", "bigint"), KeyField("d", "double")), VISITS, {})
    with client_of(url) as client:
        found = client.post("/states/one/values", json={"keys": [7, "7", 8, None]}).json()["values"]
        assert found == [{"visits": 1, "bytes": 2}] * 2 + [None, None]
        for state, key in (("one", 2**63), ("one", 1.5), ("one", True), ("one", "x"), ("two", 7), ("two", [7, 1.0])):
            assert "bigint" in problem(client.post(f"/states/{state}/values", json={"keys": [key]}), 400)
        for wrong, keys in (("$.keys[1]", [7, [8]]), ("$.keys[1]", [{"k": 7}, {"q": 8}]), ("$.keys[1]", [{"k": 7}, 8])):
            assert wrong in problem(client.post("/states/one/values", json={"keys": keys}), 400)


def test_too_many_keys_and_too_long_bodies_are_refused(visits):
    with client_of(visits) as client:
        problem(client.post("/states/visits/values", json={"keys": [{"user_id": "a"}] * 10_001}), 413)
        problem(client.post("/states/visits/values", content=b"x" * (5 << 20)), 413)


@pytest.mark.parametrize("name", ["nobody", "a b", "%2e%2e%2fetc", "%00", "é", "x" * 64, "-a", "redis:%2f%2fh"])
def test_a_name_that_no_state_has_is_not_found(visits, name):
    with client_of(visits) as client:
        for call in ("", "/values?k=1", "/scan", "/windows?k=1", "/windows/1"):
            detail = problem(client.get(f"/states/{name}{call}"), 404)
            assert "redis:" not in detail


def test_a_state_that_is_being_seeded_is_no_answer_and_no_absent_key(url):
    seed = Seed(url)
    seed.staged()
    seed.bucket(a=1)
    with client_of(url) as client:
        for call in ("/values?k=a", "/values?k=nobody", "/scan"):
            answer = client.get(f"/states/visits{call}")
            assert "1 of 2 buckets" in problem(answer, 503)
            assert (answer.headers["retry-after"], answer.json()["error"]) == ("1", "SeedingError")
        seed.bucket(b=2)
        seed.end()
        assert client.get("/states/visits/values?k=a").status_code == 200


def test_what_is_no_call_is_not_found(visits):
    with client_of(visits) as client:
        problem(client.get("/states/visits/nothing"), 404)
        problem(client.get("/../../etc/passwd"), 404)
        problem(client.delete("/states/visits"), 405)
        problem(client.put("/states/visits/values"), 405)


# All states, one state


def test_states_are_listed_with_their_last_batch(visits):
    made_of_one_batch(visits, "also", (), VISITS, {str(KeyCodec(()).encode(())): (7, 8)})
    with client_of(visits) as client:
        also, own = client.get("/states").json()["states"]
        assert own["name"] == "visits"
        assert own["keys"] == [{"name": "user_id", "type": "string"}]
        assert own["fields"] == [
            {"name": "visits", "aggregator": "Count"},
            {"name": "bytes", "aggregator": "Sum(bytes)"},
        ]
        assert (own["rows"], own["keys_held"], own["as_of"]["batch_id"], own["type"]) == (1, 2, 0, "opaque")
        assert also["keys"] == []
        assert client.get("/states/also/values").json()["value"] == {"visits": 7, "bytes": 8}


def test_one_state_has_its_reports(url):
    job = Job(url)
    job.batch(a=1)
    job.store.keep_report(encode_report(report(0)), 100)
    with client_of(url) as client:
        one = client.get("/states/s").json()
        assert (one["as_of"]["batch_id"], one["reports"][0]["milliseconds"], one["owner"]) == (0, 250, "q")


def test_what_is_said_of_one_state_is_as_of_one_batch(tmp_path, monkeypatch):
    """Its reports and its watermark, too, where a batch is committed between two reads."""
    url = f"sqlite:///{tmp_path}/s.db"
    tens = Tens(url, "tens")
    tens.batch({0: {"a": 1}}, watermark=10)
    tens.store.keep_report(encode_report(report(0, txid=tens.record.last_txid)), 100)
    reports = AsyncStateReader.reports

    async def overtaken(self):
        tens.batch({10: {"a": 1}}, watermark=20)
        tens.store.keep_report(encode_report(report(tens.next - 1, txid=tens.record.last_txid)), 100)
        return await reports(self)

    with client_of(url) as client:
        client.get("/states/tens")
        monkeypatch.setattr(AsyncStateReader, "reports", overtaken)
        for batch_id in range(3):
            one = client.get("/states/tens").json()
            assert (one["as_of"]["batch_id"], one["watermark"]) == (batch_id, 10 + 10 * (batch_id > 0))
            assert [known["batch_id"] for known in one["reports"]] == list(range(batch_id, -1, -1))


class Halves(Count):
    """Its result is none of the types of JSON, whatever is stored."""

    def result(self, value):
        return math.nan if value == 1 else b"\x01"


def test_results_of_a_users_own_aggregator_have_the_forms_of_all_values(visits):
    with client_of(visits, aggregators={"visits": {"visits": Halves()}}) as client:
        body = {"keys": ["user-7", "user-42"]}
        values = client.post("/states/visits/values", json=body).json()["values"]
        assert [one["visits"] for one in values] == ["NaN", "01"]
        rows = lines_of(client.get("/states/visits/scan"))
        assert sorted(row["value"]["visits"] for row in rows if "value" in row) == ["01", "NaN"]


@pytest.mark.redis
def test_a_state_takes_few_connections_however_many_ask(start_redis):
    server = start_redis()
    Job(server.url).batch(a=1)
    app = make_app(server.url)

    async def ask():
        transport = httpx2.ASGITransport(app)
        opened = httpx2.AsyncClient(transport=transport, base_url="http://localhost")
        async with app.router.lifespan_context(app), opened as client:
            for path in ("/states", "/states/s", "/states/s/values?k=a&min_batch=0", "/metrics"):
                answers = await asyncio.gather(*(client.get(path) for _ in range(200)))
                assert {one.status_code for one in answers} == {200}
            with server.client() as own:
                return own.info("clients")["connected_clients"]

    assert asyncio.run(ask()) < 20


def test_a_cluster_and_memory_are_served(redis_cluster):
    prefix = f"test-{secrets.token_hex(6)}/"
    for store in (f"{redis_cluster.url}?prefix={prefix}", resolve("memory://served")):
        Job(store).batch(a=1, b=2)
        with client_of(store) as client:
            assert [one["name"] for one in client.get("/states").json()["states"]] == ["s"]
            assert client.get("/states/s/values?k=a").json()["value"] == {"n": 1}
            assert client.post("/states/s/values", json={"keys": [{"k": "b"}]}).json()["values"] == [{"n": 2}]
            assert lines_of(client.get("/states/s/scan"))[-1] == {"is_end": True, "keys": 2}
            assert client.get("/states/s/values?k=a&min_batch=0").status_code == 200


# Scans


def test_a_scan_gives_all_keys_page_by_page_and_goes_on_from_a_cursor(url):
    rows = {f"u{at:04d}": (at, 2 * at) for at in range(12_000)}
    made_of_one_batch(url, "s", (KeyField("k", "string"),), VISITS, rows)
    right = {key: {"visits": value[0], "bytes": value[1]} for key, value in rows.items()}
    with client_of(url) as client:
        lines = lines_of(client.get("/states/s/scan"))
        assert {line["key"]["k"]: line["value"] for line in lines if "key" in line} == right
        assert lines[-1] == {"is_end": True, "keys": 12_000}
        assert {line["as_of"]["batch_id"] for line in lines if "as_of" in line} == {0}
        seen, cursor, requests = {}, None, 0
        while True:
            params: Any = {"limit": 500} | ({"cursor": cursor} if cursor else {})
            lines = lines_of(client.get("/states/s/scan", params=params))
            seen |= {line["key"]["k"]: line["value"] for line in lines if "key" in line}
            requests += 1
            if lines[-1]["is_end"]:
                break
            cursor = lines[-1]["cursor"]
        assert seen == right
        assert requests > 10
        chosen = lines_of(client.get("/states/s/scan?columns=bytes&limit=1"))
        assert chosen[1]["value"] == {"bytes": right[chosen[1]["key"]["k"]]["bytes"]}


def test_a_cursor_is_of_one_state_as_it_is_now(url, monkeypatch):
    """Another state's scan went on behind it, and so did that of the same state, made anew: keys were left out."""
    for name in ("s", "other"):
        made_of_one_batch(url, name, (KeyField("k", "string"),), VISITS, {f"u{at:03d}": (at, at) for at in range(500)})
    with client_of(url) as client:
        cursor = lines_of(client.get("/states/s/scan?limit=10"))[-1]["cursor"]
        assert lines_of(client.get("/states/s/scan", params={"cursor": cursor}))[-1]["is_end"]
        refused = problem(client.get("/states/other/scan", params={"cursor": cursor}), 400)
        assert "no cursor of state 'other'" in refused
        drop(url, "s")
        monkeypatch.setattr("states.START", 2000)  # time has passed
        made_of_one_batch(url, "s", (KeyField("k", "string"),), VISITS, {f"w{at:03d}": (at, at) for at in range(500)})
        problem(client.get("/states/s/scan", params={"cursor": cursor}), 400)


@pytest.mark.redis
def test_pages_that_are_read_in_parts_go_on_from_their_cursor(redis_url):
    """Redis gives a small hash in one piece, whatever the limit; records that may be large are read some at a time."""
    url = f"{redis_url}{'&' if '?' in redis_url else '?'}layout=hash"
    rows: Any = {f"u{at}": "x" for at in range(100)}
    made_of_one_batch(url, "s", (KeyField("k", "string"),), (Field("most", "Max(page)", "string"),), rows)
    with client_of(url) as client:
        seen, params = set[str](), dict[str, Any]()
        for _ in range(20):
            lines = lines_of(client.get("/states/s/scan", params={"limit": 10} | params))
            seen |= {line["key"]["k"] for line in lines if "key" in line}
            if lines[-1]["is_end"]:
                break
            params = {"cursor": lines[-1]["cursor"]}
        assert (lines[-1]["is_end"], seen) == (True, set(rows))


@pytest.mark.parametrize(
    "query", ["cursor=x", "cursor=%F0", "cursor=eA==", "limit=0", "limit=-1", "limit=x", "columns=no", "x=1"]
)
def test_a_scan_that_cannot_be_made_is_refused_before_it_begins(visits, query):
    with client_of(visits) as client:
        problem(client.get(f"/states/visits/scan?{query}"), 400)


def test_a_scan_of_a_store_without_cursors_is_whole():
    backend = resolve("memory://no-cursors")
    Job(backend).batch(a=1, b=2)
    with client_of(backend) as client:
        lines = lines_of(client.get("/states/s/scan?limit=1"))
        assert [line["key"]["k"] for line in lines if "key" in line] == ["a", "b"]
        assert lines[-1] == {"is_end": True, "keys": 2}
        problem(client.get("/states/s/scan?cursor=eA=="), 400)


@pytest.fixture
def damaged(tmp_path):
    """A state whose key ``b`` cannot be read."""
    url = f"sqlite:///{tmp_path}/s.db"
    job = Job(url)
    job.batch(a=1, b=2, c=3)
    job.store.multi_put(["b"], [b"nothing"])
    return url


def test_a_record_that_cannot_be_read_stands_behind_all_others(damaged):
    with client_of(damaged) as client:
        lines = lines_of(client.get("/states/s/scan"))
        assert {line["key"]["k"] for line in lines if "key" in line} == {"a", "c"}
        assert lines[-1]["problem"]["error"] == "CorruptRecordError"
        problem(client.get("/states/s/values?k=b"), 409)
        assert client.get("/states/s/values?k=a").json()["value"] == {"n": 1}


def test_each_scan_up_to_a_limit_says_what_it_could_not_read(damaged):
    with client_of(damaged) as client:
        last, found = dict[str, Any](), []
        while not last.get("is_end"):
            cursor = {"cursor": last["cursor"]} if last else {}
            *lines, last = lines_of(client.get("/states/s/scan", params={"limit": 1} | cursor))
            found.append(([line["key"]["k"] for line in lines if "key" in line], "problem" in last))
    assert found == [(["a"], False), (["c"], True), ([], False)]


# Windows


def test_windows_that_are_open_again_are_sent_again(url):
    state = Windowed(url, lag=0)
    state.commit(state.attempt(Row(3, "a", 1), Row(12, "a", 2)))
    with client_of(url) as client:

        def asked(tag=None):
            return client.get("/states/s/windows?user=a", headers={"If-None-Match": tag} if tag else {})

        first = asked()
        assert asked(first.headers["etag"]).status_code == 304
        advance(url, "s", 3, back=True)
        again = asked(first.headers["etag"])
        for answer, finals in ((first, [True, False]), (again, [False, False])):
            assert [one["is_final"] for one in answer.json()["windows"]] == finals


def test_windows_of_a_key_and_of_all_keys(url):
    state = Windowed(url, lag=0)
    state.commit(state.attempt(Row(3, "a", 1), Row(12, "a", 2), Row(14, "b", 4)))
    with client_of(url) as client:
        one = client.get("/states/s").json()
        assert one["watermark"] == 14
        found = client.get("/states/s/windows?user=a").json()["windows"]
        assert found == [
            {"start": 0, "end": 10, "is_final": True, "value": {"total": 1}},
            {"start": 10, "end": 20, "is_final": False, "value": {"total": 2}},
        ]
        assert client.get("/states/s/windows?user=a&since=10").json()["windows"] == found[1:]
        assert client.get("/states/s/windows?user=a&until=10").json()["windows"] == found[:1]
        lines = lines_of(client.get("/states/s/windows/20"))
        assert {line["key"]["user"]: line["value"]["total"] for line in lines[:-1]} == {"a": 2, "b": 4}
        assert lines[-1] == {"is_end": True, "keys": 2}
        for wrong in ("windows/15", "windows/x", "windows?user=a&since=x", r"windows?user=a&until=\N", "windows"):
            problem(client.get(f"/states/s/{wrong}"), 400)


def test_a_window_that_is_gone_is_gone(tmp_path):
    url = f"sqlite:///{tmp_path}/s.db"
    state = Windowed(url, lag=0, retention=0)
    state.commit(state.attempt(Row(3, "a", 1), Row(42, "a", 2)))
    state.commit(state.attempt(Row(45, "a", 2)))
    with client_of(url) as client:
        problem(client.get("/states/s/windows/10"), 410)


def test_a_state_without_windows_says_so(visits):
    with client_of(visits) as client:
        problem(client.get("/states/visits/windows?user_id=a"), 400)
        problem(client.get("/states/visits/windows/10"), 400)


# Who may ask


def test_a_token_is_asked_for_by_every_call_that_gives_data(visits):
    with client_of(visits, token="secret-1") as client:
        for call in ("/states", "/states/visits", "/states/visits/values?user_id=a", "/states/visits/scan", "/events"):
            answer = client.get(call)
            problem(answer, 401)
            assert answer.headers["www-authenticate"] == "Bearer"
        for call in ("/metrics", "/openapi.json"):
            problem(client.get(call, headers={"Authorization": "Bearer secret-2"}), 401)
        for call in ("/", "/page.js", "/page.css", "/health"):
            assert client.get(call).status_code == 200
        assert client.get("/states", headers={"Authorization": "Bearer secret-1"}).status_code == 200
    for empty in ("", "  "):
        with pytest.raises(UsageError):
            make_app(visits, token=empty)


def test_below_a_path_of_another_application_only_the_page_and_health_need_no_token(visits):
    app = make_app(visits, token="secret-1")
    mounted = Starlette(routes=[Mount("/api", app)], lifespan=lambda _: app.router.lifespan_context(app))
    with TestClient(mounted) as client:
        for call in ("/api/", "/api/page.js", "/api/page.css", "/api/health"):
            assert client.get(call).status_code == 200
        for call in ("/api/states", "/api/events", "/api/api/health", "/api/states/health", "/api/metrics"):
            problem(client.get(call), 401)
        known = {"Authorization": "Bearer secret-1"}
        assert client.get("/api/states", headers=known).status_code == 200
        assert problem(client.get("/api/api/health", headers=known), 404)


def test_the_description_names_the_path_where_the_service_is(visits):
    app = make_app(visits)
    mounted = Starlette(routes=[Mount("/api", app)], lifespan=lambda _: app.router.lifespan_context(app))
    for application, place in ((app, "/"), (mounted, "/api"), (Starlette(routes=[Mount("/x", mounted)]), "/x/api")):
        with TestClient(application) as client:
            document = client.get(f"{place.rstrip('/')}/openapi.json").json()
            assert document["servers"] == [{"url": place}]
            validate(document)


@pytest.mark.parametrize("host", ["localhost", "localhost:8080", "127.0.0.1:1", "127.1.2.3", "[::1]:8080"])
def test_a_local_service_answers_to_its_own_names(visits, host):
    with client_of(visits, local_only=True) as client:
        assert client.get("/states", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "", "localhost@x", "::1"]
)
def test_a_local_service_answers_to_no_other_name(visits, host):
    with client_of(visits, local_only=True) as client:
        problem(client.get("/states", headers={"Host": host}), 403)


def test_a_local_service_answers_to_no_page_of_another_host(visits):
    """A browser says where a page is from that sends a request; it would send one without asking."""
    with client_of(visits, local_only=True) as client:
        for origin in ("https://evil.example", "null", "http://localhost.evil.example"):
            problem(client.get("/states", headers={"Host": "localhost", "Origin": origin}), 403)
        for origin in ("http://localhost:8080", "http://127.0.0.1:3000"):
            assert client.get("/states", headers={"Host": "localhost", "Origin": origin}).status_code == 200


def test_the_page_takes_nothing_from_other_hosts(visits):
    with client_of(visits) as client:
        page = client.get("/")
        assert "default-src 'self'" in page.headers["content-security-policy"]
        assert page.headers["x-content-type-options"] == "nosniff"
        for part in (page.text, client.get("/page.js").text, client.get("/page.css").text):
            assert "https://" not in part
            assert "//" not in part.replace("http://www.w3.org/2000/svg", "").replace("// ", "")


def test_a_url_that_cannot_be_used_is_an_error_at_once():
    with pytest.raises(ConfigurationError):
        make_app("nothing://here")


# An outage


def test_a_store_that_is_away_is_unavailable_and_comes_back(start_redis):
    server = start_redis(appendonly="yes", appendfsync="always")
    Job(server.url).batch(a=1)
    with client_of(f"{server.url}?retries=0") as client:
        assert client.get("/states/s/values?k=a").json()["value"] == {"n": 1}
        server.kill()
        answer = client.get("/states/s/values?k=a")
        assert "secret" not in problem(answer, 503)
        assert answer.headers["retry-after"] == "1"
        assert client.get("/health").status_code == 200
        server.restart()
        assert client.get("/states/s/values?k=a").json()["value"] == {"n": 1}


def test_a_cursor_ends_with_its_server(start_redis):
    server = start_redis(appendonly="yes", appendfsync="always")
    made_of_one_batch(server.url, "s", (KeyField("k", "string"),), VISITS, {f"u{at}": (1, 1) for at in range(2000)})
    with client_of(server.url) as client:
        cursor = lines_of(client.get("/states/s/scan?limit=100"))[-1]["cursor"]
        assert lines_of(client.get("/states/s/scan", params={"cursor": cursor}))[-1]["is_end"]
        server.restart()
        problem(client.get("/states/s/scan", params={"cursor": cursor}), 503)


# Metrics, and the description


def metrics_of(client):
    found = {}
    for family in text_string_to_metric_families(client.get("/metrics").text):
        for sample in family.samples:
            found[sample.name, sample.labels.get("state")] = sample.value
    return found


def test_metrics_come_at_once_while_the_store_hangs_or_is_away(start_redis, monkeypatch):
    monkeypatch.setattr("mapstate.serve.metrics._SECONDS", 0.5)
    server = start_redis(dbfilename="dump.rdb")  # a process, which can be stopped
    Job(server.url).batch(a=1)
    with client_of(server.url) as client:

        def up():
            began = time.monotonic()
            found = metrics_of(client)
            assert time.monotonic() - began < 10  # and not the timeout of the socket, again and again
            return found["mapstate_serve_store_up", None], found.get(("mapstate_up", "s"))

        assert up() == (1, 1)
        server.send(signal.SIGSTOP)
        wait_for(lambda: up()[1] == 0, "the state is not up")  # the list of the states holds for a while
        server.send(signal.SIGCONT)
        wait_for(lambda: up() == (1, 1), "the state is up again")
        server.kill()
        wait_for(lambda: up() == (0, 0), "the store is away")


def test_metrics_say_what_the_reports_say(url):
    job = Job(url)
    job.batch(a=1)
    job.store.keep_report(encode_report(report(0)), 100)
    with client_of(url) as client:
        before = metrics_of(client)
        assert before["mapstate_batch_id", "s"] == 0
        assert before["mapstate_batch_seconds", "s"] == 0.25
        assert before["mapstate_keys", "s"] == 1
        assert before["mapstate_rows_total", "s"] == 0
        for at in (1, 2, 3):
            job.batch(**{f"k{at}": 1})
            job.store.keep_report(encode_report(report(at, rows=100, rows_late=2, attempt=at)), 100)
        after = metrics_of(client)
        assert after["mapstate_rows_total", "s"] == 300
        assert after["mapstate_rows_late_total", "s"] == 6
        assert after["mapstate_batches_total", "s"] == 3
        assert after["mapstate_retried_batches_total", "s"] == 2
        assert after["mapstate_keys", "s"] == 4
        assert metrics_of(client)["mapstate_rows_total", "s"] == 300
        for at in (4, 5):
            job.batch(**{f"k{at}": 1})
        for at in (5, 4):  # the report of a driver that was taken over comes late
            job.store.keep_report(encode_report(report(at, rows=at)), 100)
        for _ in range(2):
            last = metrics_of(client)
            assert (last["mapstate_rows_total", "s"], last["mapstate_batch_rows", "s"]) == (309, 5)


def test_the_description_is_valid_and_names_every_call(visits):
    app = make_app(visits)
    with TestClient(app) as client:
        document = client.get("/openapi.json").json()
    validate(document)
    described = {(path, method.upper()) for path, calls in document["paths"].items() for method in calls}
    routes: Any = app.routes
    made = {(route.path, method) for route in routes for method in route.methods - {"HEAD"}}
    assert made - described == {(path, "GET") for path in ("/", "/page.css", "/page.js", "/openapi.json")}
    assert described <= made


# HTTP itself


def test_who_asks_by_another_method_is_told_which_there_are(visits):
    with client_of(visits) as client:
        for path, allowed in {
            "/states": "GET, HEAD",
            "/states/visits/values": "GET, HEAD, POST",
            "/states/visits/scan": "GET",
        }.items():
            answer = client.delete(path)
            problem(answer, 405)
            assert answer.headers["allow"] == allowed


def test_a_path_with_a_slash_more_is_no_call_and_redirects_nowhere(visits):
    with client_of(visits) as client:
        problem(client.get("/states/", follow_redirects=False), 404)


def test_what_was_posted_comes_again_whatever_tag_the_client_has(visits):
    with client_of(visits) as client:
        tag = client.get("/states/visits/values?user_id=user-42").headers["etag"]
        asked = {"keys": [{"user_id": "user-42"}]}
        answer = client.post("/states/visits/values", json=asked, headers={"If-None-Match": tag})
        assert answer.json()["values"] == [{"visits": 3, "bytes": 512}]


def test_a_token_is_a_bearer_in_any_case_and_one_host_is_asked(visits):
    with TestClient(make_app(visits, token="tok"), base_url="http://localhost") as client:
        for scheme, status in {"Bearer": 200, "bearer": 200, "BEARER": 200, "Basic": 401, "Bearer ": 401}.items():
            assert client.get("/states", headers={"Authorization": f"{scheme} tok"}).status_code == status
        assert client.get("/states", headers={"Authorization": "tok"}).status_code == 401
    with client_of(visits) as client:
        problem(client.get("/states", headers=[("Host", "localhost"), ("Host", "evil.example")]), 400)


def test_a_page_of_another_site_reads_nothing_and_may_link_here(visits):
    with TestClient(make_app(visits, local_only=True), base_url="http://localhost") as client:
        problem(client.get("/states", headers={"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"}), 403)
        assert client.get("/", headers={"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}).is_success
        assert client.get("/states", headers={"Sec-Fetch-Site": "same-origin"}).is_success


# Key columns with the names of parameters


def test_a_key_column_with_the_name_of_a_parameter_is_asked_for_by_another_one(url):
    fields = (KeyField("min_batch", "bigint"), KeyField("wait", "string"), KeyField("since", "string"))
    made_of_one_batch(url, "s", fields, VISITS, {str(KeyCodec(fields).encode((7, "a", "b"))): (3, 4)})
    call, key = "/states/s/values", {"key.min_batch": "7", "key.wait": "a", "since": "b"}
    with client_of(url) as client:
        assert client.get(call, params=key).json()["value"] == {"visits": 3, "bytes": 4}
        assert client.get(call, params={**key, "min_batch": "0", "wait": "1"}).json()["value"] == {
            "visits": 3,
            "bytes": 4,
        }
        problem(client.get(call, params={**key, "min_batch": "1", "wait": "0.05"}), 503)
        began = time.monotonic()
        for wrong in (
            {"min_batch": "7", "wait": "30", "since": "b"},
            {"min_batch": "7", "key.wait": "a", "since": "b"},
        ):
            assert "key.min_batch" in problem(client.get(call, params=wrong), 400)  # and nobody waits for batch 7
        assert "key.min_batch" in problem(client.get(call, params={"min_batch": "x"}), 400)
        assert time.monotonic() - began < 25
        assert "key.wait" in problem(client.get(call, params={"key.min_batch": 7, "wait": "1", "since": "b"}), 400)
        body = {"keys": [{"min_batch": 7, "wait": "a", "since": "b"}]}
        assert client.post(f"{call}?min_batch=0", json=body).json()["values"] == [{"visits": 3, "bytes": 4}]
        assert client.get("/states/s/scan?min_batch=0").status_code == 200


def test_two_key_columns_that_have_one_parameter_are_refused(url):
    fields = (KeyField("wait", "string"), KeyField("key.wait", "string"))
    made_of_one_batch(url, "s", fields, VISITS, {str(KeyCodec(fields).encode(("a", "b"))): (3, 4)})
    with client_of(url) as client:
        assert "POST" in problem(client.get("/states/s/values", params={"key.wait": "a"}), 400)
        body = {"keys": [{"wait": "a", "key.wait": "b"}]}
        assert client.post("/states/s/values", json=body).json()["values"] == [{"visits": 3, "bytes": 4}]
