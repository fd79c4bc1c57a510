"""The calls of `mapstate serve`, in this process: what they answer, and what they refuse."""

from __future__ import annotations

import asyncio
import datetime as dt
import json
import secrets
import threading
import time
from collections import Counter
from decimal import Decimal
from functools import partial
from typing import Any

import pytest
from openapi_spec_validator import validate
from prometheus_client.parser import text_string_to_metric_families
from service import report
from starlette.testclient import TestClient
from states import Job, made_of_one_batch
from windowed import Row, Windowed

from mapstate.backends import resolve
from mapstate.batch_report import encode_report
from mapstate.errors import ConfigurationError, UsageError
from mapstate.keys import KeyCodec
from mapstate.operations.drop import drop
from mapstate.reader import open_reader
from mapstate.reader.async_reader import AsyncStateReader
from mapstate.schema import Field, KeyField
from mapstate.serve import commits as commits_module
from mapstate.serve import make_app
from mapstate.serve import states as states_module
from mapstate.serve.commits import Commits

VISITS = (Field("visits", "Count", "bigint"), Field("bytes", "Sum(bytes)", "bigint"))
ROWS = {"user-42": (3, 512), "user-7": (1, 1)}
AT = "2026-11-21T10:00:00.000+00:00"


@pytest.fixture(params=["sqlite", pytest.param("redis", marks=pytest.mark.redis)])
def url(request, tmp_path):
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/s.db"
    return request.getfixturevalue("redis_url")


@pytest.fixture
def visits(url):
    made_of_one_batch(url, "visits", (KeyField("user_id", "string"),), VISITS, ROWS, AT)
    return url


def client_of(store, **options):
    return TestClient(make_app(store, **options), raise_server_exceptions=False)


def lines_of(answer):
    assert answer.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in answer.text.splitlines()]


def problem(answer, status):
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    document = answer.json()
    assert document["status"] == status
    assert {"type", "title", "detail"} <= document.keys()
    return document["detail"]


# One key, many keys


def test_a_value_comes_with_its_batch(visits):
    with client_of(visits) as client:
        answer = client.get("/states/visits/values", params={"user_id": "user-42"})
        assert answer.json() == {
            "state": "visits",
            "as_of": {"batch_id": 0, "txid": 1000, "committed_at": AT},
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
    "query", ["", "?user=1", "?user_id=1&user_id=2", "?user_id=1&more=2", "?user_id=1&min_batch=x"]
)
def test_a_query_that_is_no_key_is_refused(visits, query):
    with client_of(visits) as client:
        problem(client.get(f"/states/visits/values{query}"), 400)


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


def test_a_new_state_is_found_by_its_name_before_it_is_listed(url, monkeypatch):
    monkeypatch.setattr(states_module, "_REFRESH", 1000)
    with client_of(url) as client:
        problem(client.get("/states/s/values?k=a"), 404)
        assert client.get("/states").json() == {"states": []}
        Job(url).batch(a=1)
        assert client.get("/states/s/values?k=a").json()["value"] == {"n": 1}
        assert [one["name"] for one in client.get("/states").json()["states"]] == ["s"]


def test_a_lost_ledger_is_a_conflict_and_is_not_sought_by_each_request(url, monkeypatch):
    job = Job(url)
    job.batch(a=1)
    monkeypatch.setattr(states_module, "_REMEMBERED", 0.2)
    with client_of(url) as client:
        assert client.get("/states/s/values?k=a").status_code == 200
        remove_ledger(job.store)
        scans = counted_scans(job.store, monkeypatch)
        for _ in range(20):
            problem(client.get("/states/s/values?k=a"), 409)
        assert scans["s"] <= 2
        time.sleep(0.25)
        problem(client.get("/states/s/values?k=a"), 404)  # the service asks for the ledger alone then


@pytest.mark.parametrize("call", ["/states", "/metrics"])
def test_a_state_that_is_gone_is_not_sought_by_what_asks_for_all(url, monkeypatch, call):
    job = Job(url)
    job.batch(a=1)
    with client_of(url) as client:
        assert client.get("/states/s/values?k=a").status_code == 200
        remove_ledger(job.store)
        scans = counted_scans(job.store, monkeypatch)
        for _ in range(5):
            assert client.get(call).status_code == 200
    assert scans["s"] <= 2


def test_a_state_that_is_gone_is_not_sought_for_those_who_listen(tmp_path, monkeypatch):
    monkeypatch.setattr(states_module, "_REFRESH", 4)
    url = f"sqlite:///{tmp_path}/s.db"
    job, app = Job(url), make_app(url)
    job.batch(a=1)

    async def heard():
        async with app.router.lifespan_context(app):
            (event,) = await first_events(app, 1, lambda: remove_ledger(job.store))
            assert (event["event"], event["state"]) == ("problem", "s")
            scans = counted_scans(job.store, monkeypatch)
            commit = partial(made_of_one_batch, url, "more", (KeyField("k", "string"),), VISITS, ROWS)
            events = await first_events(app, 2, commit)  # after some more looks at all states
            assert [(one["event"], one["state"]) for one in events] == [("problem", "s"), ("commit", "more")]
            assert scans["s"] <= 1  # by the new state, which looks for records that were left

    asyncio.run(heard())


def counted_scans(store, monkeypatch):
    scans, plain = Counter[str](), type(store).scan

    def counted(self, *arguments):
        scans["s"] += 1
        return plain(self, *arguments)

    monkeypatch.setattr(type(store), "scan", counted)
    return scans


def remove_ledger(store):
    if hasattr(store, "_database"):
        store._database.transaction("BEGIN IMMEDIATE", lambda db: db.execute("DELETE FROM mapstate_ledgers"))
    else:
        from mapstate.backends.redis.wire import command

        store._server.tell(command(b"DEL", store._ledger), 1)


@pytest.mark.parametrize("fields", [(KeyField("k", "bigint"),), (KeyField("other", "string"), KeyField("k", "bigint"))])
def test_a_state_that_is_made_again_with_other_keys_is_read_by_these(url, fields):
    made_of_one_batch(url, "s", (KeyField("k", "string"),), VISITS, {"x": (1, 2)})
    with client_of(url) as client, open_reader(url, "s") as reader:
        assert client.get("/states/s/values?k=x").json()["value"] == {"visits": 1, "bytes": 2}
        assert reader.get("x") == {"visits": 1, "bytes": 2}
        drop(url, "s")
        key = tuple(range(len(fields))) if len(fields) == 1 else ("o", 1)
        made_of_one_batch(url, "s", fields, VISITS, {str(KeyCodec(fields).encode(key)): (3, 4)})
        assert reader.get(key) == {"visits": 3, "bytes": 4}
        named = {field.name: part for field, part in zip(fields, key, strict=True)}
        assert client.get("/states/s/values", params=named).json()["value"] == {"visits": 3, "bytes": 4}
        answer = client.post("/states/s/values", json={"keys": [named]})
        assert answer.json()["values"] == [{"visits": 3, "bytes": 4}]
        problem(client.get("/states/s/values?more=x"), 400)


def test_a_state_that_is_made_again_with_its_key_columns_changed_round_is_read_by_these(url):
    """The old names and types fit the request, too."""
    a, b = KeyField("a", "string"), KeyField("b", "string")
    made_of_one_batch(url, "s", (a, b), VISITS, {str(KeyCodec((a, b)).encode(("1", "2"))): (1, 2)})
    with client_of(url) as client:
        ask = {"a": "1", "b": "2"}
        assert client.get("/states/s/values", params=ask).json()["value"] == {"visits": 1, "bytes": 2}
        drop(url, "s")
        made_of_one_batch(url, "s", (b, a), VISITS, {str(KeyCodec((b, a)).encode(("2", "1"))): (3, 4)})
        assert client.get("/states/s/values", params=ask).json()["value"] == {"visits": 3, "bytes": 4}
        drop(url, "s")
        made_of_one_batch(url, "s", (a, b), VISITS, {str(KeyCodec((a, b)).encode(("1", "2"))): (5, 6)})
        answer = client.post("/states/s/values", json={"keys": [ask]})
        assert answer.json()["values"] == [{"visits": 5, "bytes": 6}]


def test_a_state_that_is_closed_within_a_request_is_to_be_asked_for_again(visits, monkeypatch):
    """Another request has found it gone, or too many are open."""
    with client_of(visits) as client:
        assert client.get("/states/visits/values?user_id=user-7").status_code == 200

        async def closed(*_):
            raise UsageError("the reader is not open")

        monkeypatch.setattr(states_module.OpenState, "multi_get", closed)
        problem(client.get("/states/visits/values?user_id=user-7"), 400)
        monkeypatch.setattr(states_module.States, "is_open", lambda *_: False)
        answer = client.get("/states/visits/values?user_id=user-7")
        assert "closed" in problem(answer, 503)
        assert answer.headers["retry-after"] == "1"


def test_the_state_that_was_not_asked_for_longest_is_closed_for_another(url, monkeypatch):
    monkeypatch.setattr(states_module, "MOST_OPEN", 1)
    monkeypatch.setattr(states_module, "_MORE_OPEN", 1)
    for name in "abc":
        made_of_one_batch(url, name, (KeyField("k", "string"),), VISITS, ROWS)

    async def ask():
        states = states_module.States(url)
        for name in "aba":
            await states.state(name)
        first, second = await asyncio.gather(states.state("c"), states.state("c"))
        assert first is second
        assert [name for name in "abc" if states.is_open(name)] == ["a", "c"]
        await states.close()

    asyncio.run(ask())


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
        for wrong in ("windows/15", "windows/x", "windows?user=a&since=x", "windows"):
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


# Waiting, and events


def test_a_request_waits_for_a_batch(url):
    job = Job(url)
    job.batch(a=1)
    with client_of(url) as client:
        assert client.get("/states/s/values?k=a&min_batch=0").json()["value"] == {"n": 1}
        detail = problem(client.get("/states/s/values?k=a&min_batch=1&wait=0.05"), 503)
        assert "Batch 1" in detail
        later = threading.Timer(0.3, lambda: job.batch(a=2))
        later.start()
        assert client.get("/states/s/values?k=a&min_batch=1&wait=20").json()["value"] == {"n": 2}
        later.join()
        for wrong in (
            "min_batch=-1",
            "min_batch=x",
            "min_batch=1&wait=61",
            "min_batch=1&wait=-1",
            "min_batch=1&wait=nan",
        ):
            problem(client.get(f"/states/s/values?k=a&{wrong}"), 400)


def test_a_batch_of_an_owner_before_is_not_the_one_that_is_waited_for(tmp_path):
    url = f"sqlite:///{tmp_path}/s.db"
    job = Job(url)
    for at in range(3):
        job.batch(a=at)
    other = Job(url, owner="other", on_new_owner="adopt")
    with client_of(url) as client:
        problem(client.get("/states/s/values?k=a&min_batch=1&wait=0.05"), 503)
        for at in range(2):
            other.batch(a=at)
        assert client.get("/states/s/values?k=a&min_batch=1").status_code == 200


def test_who_waits_for_a_batch_does_not_wait_for_the_listing_of_states(tmp_path, monkeypatch):
    job, go_on = Job(f"sqlite:///{tmp_path}/s.db"), threading.Event()
    job.batch(a=1)
    monkeypatch.setattr(states_module.States, "_list", lambda _: go_on.wait(60) and [])

    async def wait():
        states = states_module.States(f"sqlite:///{tmp_path}/s.db")
        commits = Commits(states)
        listening: Any = asyncio.ensure_future(anext(commits.events()))
        reached = asyncio.create_task(commits.reached("s", 1, 30))
        await asyncio.to_thread(job.batch, a=2)
        await reached
        assert not listening.done()  # the states are not known yet
        go_on.set()
        assert await listening is None
        await commits.close()
        await states.close()

    asyncio.run(wait())


def test_no_state_is_held_up_by_another_one_that_does_not_answer(tmp_path, monkeypatch):
    url, go_on = f"sqlite:///{tmp_path}/s.db", asyncio.Event()
    job, ledger = Job(url), AsyncStateReader.ledger
    job.batch(a=1)
    made_of_one_batch(url, "slow", (KeyField("k", "string"),), VISITS, ROWS)

    async def held(self):
        if self._state == "slow":
            await go_on.wait()
        return await ledger(self)

    monkeypatch.setattr(AsyncStateReader, "ledger", held)

    async def wait():
        states = states_module.States(url)
        commits = Commits(states)
        events = commits.events()
        listening: Any = asyncio.ensure_future(anext(events))
        for batch_id in (1, 2):
            reached = asyncio.create_task(commits.reached("s", batch_id, 30))
            await asyncio.to_thread(job.batch, a=batch_id)
            await reached
        assert not listening.done()
        go_on.set()
        assert await listening is None
        await asyncio.to_thread(job.batch, a=3)
        found = 0
        while found < 3:  # batches that came before the first comment may be events, too
            event = await anext(events)
            assert event is not None
            assert (event["event"], event["state"]) == ("commit", "s")
            found = event["as_of"]["batch_id"]
        await commits.close()
        await states.close()

    asyncio.run(wait())


async def asgi_events(app, most, do):
    async with app.router.lifespan_context(app):
        return await first_events(app, most, do)


async def first_events(app, most, do):
    """The first events that the application sends; ``do`` is called once it has said that it listens."""
    sent: asyncio.Queue[Any] = asyncio.Queue()
    gone = asyncio.Event()

    async def receive():
        await gone.wait()
        return {"type": "http.disconnect"}

    scope: dict[str, Any] = {
        "type": "http",
        "method": "GET",
        "path": "/events",
        "query_string": b"",
        "headers": [],
        "root_path": "",
    }
    scope |= {"asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1", "scheme": "http"}
    task = asyncio.create_task(app(scope, receive, sent.put))
    events: list[Any] = []
    is_done = False
    while len(events) < most:
        message = await asyncio.wait_for(sent.get(), 20)
        if message["type"] == "http.response.body" and message["body"].startswith(b"event"):
            events.append(json.loads(message["body"].split(b"data: ")[1]))
        elif message["type"] == "http.response.body" and not is_done:
            is_done = True
            await asyncio.to_thread(do)
    gone.set()
    await asyncio.wait_for(task, 20)
    return events


def test_an_event_comes_for_each_commit_with_its_report(url):
    job = Job(url)
    job.batch(a=1)
    job.store.keep_report(encode_report(report(0)), 100)

    def two_batches():
        for at in (1, 2):
            job.batch(a=at)
            job.store.keep_report(encode_report(report(at)), 100)

    events = asyncio.run(asgi_events(make_app(url), 2, two_batches))
    assert [(one["event"], one["state"], one["as_of"]["batch_id"]) for one in events] == [
        ("commit", "s", 1),
        ("commit", "s", 2),
    ]
    assert [one["report"]["rows"] for one in events] == [10, 10]


def test_an_event_comes_for_a_commit_without_a_report(tmp_path):
    url = f"sqlite:///{tmp_path}/s.db"
    job = Job(url)
    job.batch(a=1)
    (event,) = asyncio.run(asgi_events(make_app(url), 1, lambda: job.batch(b=1)))
    assert (event["as_of"]["batch_id"], event["report"], event["keys_held"]) == (1, None, 2)


def test_a_batch_that_was_rolled_back_is_no_event(url, monkeypatch):
    monkeypatch.setattr(commits_module, "_INTERVAL", 2.0)  # all that is done is done between two looks
    job = Job(url)
    job.batch(a=1)

    def batches():
        job.batch(a=2)
        job.store.keep_report(encode_report(report(1)), 100)
        job.ledger.rollback()
        job.next = 1
        job.batch(a=3)
        last = job.ledger.record.last_commit
        assert last is not None
        assert last.txid > 1001
        job.store.keep_report(encode_report(report(1, txid=last.txid)), 100)
        job.batch(a=4)

    events = asyncio.run(asgi_events(make_app(url), 2, batches))
    assert 1001 not in [one["as_of"]["txid"] for one in events]


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
    with client_of(f"{server.url}?retries=0&socket_timeout=1") as client:
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
