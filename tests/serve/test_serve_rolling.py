"""Rolling windows over HTTP: when they end, their tags, and what is refused."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from every_store import AEROSPIKE, CLUSTER, REDIS, url_of
from openapi_spec_validator import validate
from rolled import HOURS, MINUTE, T0, TENS, Rolled, Row, keyed
from service import client_of, problem
from states import Job, made_of_one_batch

from mapstate import LIFETIME, ApproxPercentiles, Count
from mapstate.aggregators.aggregator import CombinerAggregator
from mapstate.reader import rolling
from mapstate.schema import Field, KeyField
from mapstate.serve.drpc import PinnedStates
from mapstate.serve.states import States
from mapstate.values import plain

ROWS = [Row(3, "a", 5), Row(8, "a", 7), Row(12, "b", 1), Row(21, "a", 2), Row(23, "b", 4), Row(24, "c", 9)]


@pytest.fixture(params=["sqlite", REDIS, CLUSTER, AEROSPIKE])
def url(request: Any, tmp_path: Path) -> str:
    return url_of(request, tmp_path)


@pytest.fixture
def tens(url: Any) -> Rolled:
    state = keyed(url, retention=50)
    state.batch(*ROWS[:3])
    state.batch(*ROWS[3:])
    return state


def lines_of(answer: Any) -> list[Any]:
    assert answer.status_code == 200, answer.text
    return [json.loads(line) for line in answer.text.splitlines()]


def test_one_key_as_of_now_a_time_and_the_watermark(url, tens):
    with client_of(url) as client:
        now = client.get("/states/s/values?k=a").json()
        assert now["value"] == tens.right("a")
        assert (now["as_of"]["end"], now["as_of"]["watermark"], now["as_of"]["batch_id"]) == (20, 24, 1)
        for at, end in (("10", 10), ("12", 10), ("-7", -10), ("watermark", 20), ("1000", 1000)):
            found = client.get("/states/s/values", params={"k": "a", "at": at}).json()
            assert (found["value"], found["as_of"]["end"]) == (tens.right("a", end), end)
        absent = client.get("/states/s/values?k=nobody&at=10").json()
        assert (absent["value"], absent["as_of"]["end"]) == (None, 10)


def test_many_keys_of_one_time_and_of_a_time_for_each(url, tens):
    def asked(**body: Any) -> Any:
        return client.post("/states/s/values", json=body).json()

    keys = ["a", "nobody", "b"]
    with client_of(url) as client:
        same = asked(keys=keys, at=15)
        assert same["values"] == [tens.right(key, 15) for key in keys]
        assert same["as_of"]["end"] == 15
        each = asked(keys=["a", "a", "b"], at=[5, "20", 1000])
        assert each["values"] == [tens.right("a", 5), tens.right("a", 20), tens.right("b", 1000)]
        assert each["as_of"]["end"] == [5, 20, 1000]
        assert asked(keys=["a"], at=[15])["as_of"]["end"] == [15]
        some = asked(keys=["a", "b"], at=None, columns=["total_10", "rows_lifetime"])
        whole = [tens.right(key) for key in ("a", "b")]
        assert some["values"] == [{name: one[name] for name in ("total_10", "rows_lifetime")} for one in whole]
        assert asked(keys=[], at=15) | {"as_of": None} == {"state": "s", "as_of": None, "values": []}
        marked = asked(keys=["a"], at="watermark")
        assert (marked["values"], marked["as_of"]["end"]) == ([tens.right("a", 24)], 20)


def test_a_scan_has_one_end(url, tens):
    with client_of(url) as client:
        for at, end, asked in ((None, 20, None), ("15", 15, 15), ("watermark", 20, "watermark")):
            query = {"at": at} if at else {}
            *lines, last = lines_of(client.get("/states/s/scan", params=query))
            heads = [line["as_of"] for line in lines if "as_of" in line]  # of each page: a cluster has one per node
            assert {(head["end"], head["watermark"]) for head in heads} == {(end, 24)}
            assert {line["key"]["k"]: line["value"] for line in lines if "key" in line} == {
                key: tens.right(key, asked) for key in "abc"
            }
            assert [line["is_end"] for line in lines if "is_end" in line] == [False] * len(heads)
            assert last == {"is_end": True, "keys": 3}
        chosen = lines_of(client.get("/states/s/scan?at=15&columns=total_100"))
        assert {row["key"]["k"]: row["value"] for row in chosen if "key" in row} == {
            key: {"total_100": tens.right(key, 15)["total_100"]} for key in "abc"
        }


@pytest.mark.parametrize("url", ["sqlite", REDIS], indirect=True)
def test_a_cursor_of_rolling_windows_goes_on_with_their_end_or_is_refused(url, monkeypatch):
    """With other columns, another time, and after the horizon has moved on; for another state it is none."""
    users = [f"u{at:03d}" for at in range(300)]
    state = keyed(url, HOURS)
    state.batch(*(Row(T0 - at * MINUTE, user, at) for at, user in enumerate(users)))
    keyed(url, HOURS, state="other").batch(*(Row(T0, user, 1) for user in users))
    Job(url, state="plain").batch(**dict.fromkeys(users, 1))
    clock = SimpleNamespace(now=T0)
    monkeypatch.setattr("mapstate.reader.rolling.time.time_ns", lambda: clock.now * 1000)
    iso = {minutes: f"2026-11-27T10:{minutes:02d}:00.000000Z" for minutes in (0, 30)}

    def scan(name: str = "s", **params: Any) -> Any:
        return client.get(f"/states/{name}/scan", params=params)

    def check(answer: Any, end: str, columns: list[str] | None = None, **asked: Any) -> list[str]:
        lines = lines_of(answer)
        assert {line["as_of"]["end"] for line in lines if "as_of" in line} == {end}
        found = {line["key"]["k"]: line["value"] for line in lines if "key" in line}
        for key, value in found.items():
            right = state.right(key, **asked) or {}
            assert value == {name: right[name] for name in columns or right}, key
        return sorted(found)

    with client_of(url) as client:
        page = scan(limit=20)
        first, cursor = check(page, iso[0], now=T0), lines_of(page)[-1]["cursor"]
        rest = sorted(set(users) - set(first))
        assert len(first) >= 20
        assert rest
        clock.now = T0 + 30 * MINUTE
        for params, columns in (({}, None), ({"at": "watermark"}, None), ({"columns": "rows_1_hour"}, ["rows_1_hour"])):
            assert check(scan(cursor=cursor, **params), iso[0], columns, now=T0) == rest
        assert check(scan(cursor=cursor, at=iso[30]), iso[30], at=T0 + 30 * MINUTE) == rest
        assert check(scan(), iso[30], now=clock.now) == users
        assert "no field 'n'" in problem(scan(cursor=cursor, columns="n"), 400)
        for name in ("other", "plain"):
            assert f"no cursor of state '{name}'" in problem(scan(name, cursor=cursor), 400)
        plain_cursor = lines_of(scan("plain", limit=20))[-1]["cursor"]
        assert "no cursor of state 's'" in problem(scan(cursor=plain_cursor), 400)
        assert "no rolling windows" in problem(scan("plain", cursor=plain_cursor, at=iso[0]), 400)
        state.batch(Row(T0 + 300 * MINUTE, "u000", 1))
        state.batch(Row(T0 + 301 * MINUTE, "u000", 1))
        assert "as long as a scan takes" in problem(scan(cursor=cursor), 410)
        later = "2026-11-27T15:00:00.000000Z"
        assert check(scan(cursor=cursor, at=later), later, at=T0 + 300 * MINUTE)
        reset = keyed(url, TENS, on_new_owner="reset", owner="new")
        reset.batch(*(Row(3, user, 1) for user in users))
        problem(scan(cursor=cursor), 400)


def test_timestamps_are_text_with_a_zone(url):
    state = keyed(url, HOURS)
    state.batch(Row(T0 - 90 * MINUTE, "a", 3), Row(T0 - 7 * MINUTE, "a", 4))
    with client_of(url) as client:
        found = client.get("/states/s/values", params={"k": "a", "at": "2026-11-27T12:02:00+02:00"}).json()
        assert found["value"] == state.right("a", T0)
        assert found["as_of"]["end"] == "2026-11-27T10:00:00.000000Z"
        assert found["as_of"]["watermark"] == "2026-11-27T09:53:00.000000Z"
        live = client.get("/states/s/values?k=a").json()
        assert live["value"]["total_lifetime"] == 7
        assert live["as_of"]["end"] > "2026-11-27"
        for at in ("2026-11-27T10:00:00", "10", "now", ""):
            detail = problem(client.get("/states/s/values", params={"k": "a", "at": at}), 400)
            assert "2026-11-27T10:00:00Z" in detail
        many = client.post("/states/s/values", json={"keys": ["a"], "at": 5})
        assert "2026-11-27T10:00:00Z" in problem(many, 400)


@pytest.mark.parametrize("windows", [TENS, HOURS])
def test_before_the_first_batch_there_is_nothing_and_no_end(url, windows):
    keyed(url, windows).attempt(Row(3, "a", 5))
    with client_of(url) as client:
        found = client.get("/states/s/values?k=a&at=watermark").json()
        assert (found["value"], found["as_of"]["end"], found["as_of"]["watermark"]) == (None, None, None)
        now = client.get("/states/s/values?k=a").json()
        assert (now["value"], now["as_of"]["end"] is None) == (None, windows is TENS)
        assert lines_of(client.get("/states/s/scan?at=watermark"))[-1] == {"is_end": True, "keys": 0}


def test_what_is_refused(url, tens):
    with client_of(url) as client:
        for answer in (
            client.get("/states/s/values?k=a&at=-100"),
            client.post("/states/s/values", json={"keys": ["a", "b"], "at": [15, -100]}),
            client.get("/states/s/scan?at=-100"),
        ):
            assert "-40 on" in problem(answer, 410), answer.text
            assert answer.json()["error"] == "WindowGoneError"
        for at in ("x", "1_0", "9" * 30, "2026-11-27T10:00:00Z", "1.5"):
            assert "number" in problem(client.get("/states/s/values", params={"k": "a", "at": at}), 400)
        for body in (
            {"keys": ["a"], "at": [1, 2]},
            {"keys": ["a"], "at": []},
            {"keys": ["a"], "at": ["watermark"]},
            {"keys": ["a"], "at": True},
            {"keys": ["a"], "at": 1.5},
            {"keys": ["a"], "at": {}},
            {"keys": ["a"], "columns": "total_10"},
            {"keys": ["a"], "columns": ["total"]},
            {"keys": ["a"], "end": 5},
        ):
            problem(client.post("/states/s/values", json=body), 400)


def test_another_state_has_no_time(url):
    Job(url).batch(a=1)
    made_of_one_batch(url, "of_at", (KeyField("at", "string"),), (Field("n", "Count", "bigint"),), {"15": 3})
    with client_of(url) as client:
        for answer in (
            client.get("/states/s/values?k=a&at=15"),
            client.post("/states/s/values", json={"keys": ["a"], "at": 15}),
            client.post("/states/s/values", json={"keys": ["a"], "at": "watermark"}),
            client.get("/states/s/scan?at=15"),
        ):
            assert "no rolling windows" in problem(answer, 400)
        plain_answer = client.post("/states/s/values", json={"keys": ["a"], "columns": ["n"]}).json()
        assert plain_answer["values"] == [{"n": 1}]
        assert plain_answer["as_of"].keys() == {"batch_id", "txid", "committed_at", "commit"}
        assert client.get("/states/of_at/values?at=15").json()["value"] == {"n": 3}  # its key column, as ever
        assert "rolling_windows" not in client.get("/states/s").json()


def test_a_key_column_at_is_named_with_key_in_front(url):
    state = keyed(url, key="at")
    state.batch(Row(3, "x", 5), Row(21, "x", 7))
    with client_of(url) as client:
        found = client.get("/states/s/values", params={"key.at": "x", "at": "watermark"}).json()
        assert found["value"] == state.right("x", 21)
        problem(client.get("/states/s/values?at=x"), 400)


def test_a_tag_holds_until_the_next_commit_or_the_next_end(url, tens):
    def asked(tag: str | None, at: str = "") -> Any:
        return client.get(f"/states/s/values?k=a{at}", headers={"If-None-Match": tag} if tag else {})

    with client_of(url) as client:
        tags = {at: asked(None, at).headers["etag"] for at in ("", "&at=10", "&at=15", "&at=watermark")}
        assert len({tags["&at=10"], tags["&at=15"], tags["&at=watermark"]}) == 3
        for at, tag in tags.items():
            assert asked(tag, at).status_code == 304
        assert asked(None, "&at=12").headers["etag"] == tags["&at=10"]  # of the same tile
        tens.attempt(Row(30, "a", 1))  # not committed
        assert asked(tags["&at=15"], "&at=15").status_code == 304
        tens.batch(Row(24, "c", 1))
        for at, tag in tags.items():
            assert asked(tag, at).status_code == 200


def test_a_tag_of_now_ends_with_the_tile(url, monkeypatch):
    state = keyed(url, HOURS)
    state.batch(Row(T0, "a", 3))
    with client_of(url) as client:

        def asked(minutes: float, tag: str | None = None) -> Any:
            monkeypatch.setattr("mapstate.reader.rolling.time.time_ns", lambda: int(T0 + minutes * MINUTE) * 1000)
            return client.get("/states/s/values?k=a", headers={"If-None-Match": tag} if tag else {})

        tag = asked(1).headers["etag"]
        assert asked(4.9, tag).status_code == 304
        later = asked(5, tag)
        assert (later.status_code, later.json()["as_of"]["end"]) == (200, "2026-11-27T10:05:00.000000Z")
        assert asked(66, tag).json()["value"] == state.right("a", now=T0 + 65 * MINUTE)


def test_a_tag_is_another_where_the_windows_are(url):
    state = keyed(url)
    state.batch(Row(3, "a", 5))
    with client_of(url) as client:
        tag = client.get("/states/s/values?k=a&at=10").headers["etag"]
        again = keyed(url, ((10, 5), (100, 10)))
        again.next = 1
        again.attempt()  # which opens it
        other = client.get("/states/s/values?k=a&at=10", headers={"If-None-Match": tag})
        assert other.status_code == 200
        assert "rows_lifetime" not in other.json()["value"]


def test_the_state_says_its_windows(url, tens):
    keyed(url, HOURS, state="hours", lag="10 minutes").batch(Row(T0, "a", 1))
    with client_of(url) as client:
        document = client.get("/states/s").json()
        assert document["rolling_windows"] == {
            "windows": [
                {"name": "10", "length": 10, "resolution": 5},
                {"name": "100", "length": 100, "resolution": 10},
                {"name": "lifetime", "length": None, "resolution": None},
            ],
            "times": "bigint",
            "unit": 5,
            "lag": 0,
            "retention": 50,
            "horizon": -40,
        }
        assert (document["watermark"], document["inputs"], document["has_windows"]) == (24, {"": 24}, False)
        hours = client.get("/states/hours").json()
        assert hours["rolling_windows"]["windows"][1] == {"name": "24_hours", "length": 86400, "resolution": 3600}
        named = {name: hours["rolling_windows"][name] for name in ("times", "unit", "lag", "retention", "horizon")}
        assert named == {"times": "timestamp", "unit": 300, "lag": 600, "retention": 0, "horizon": None}
        assert hours["watermark"] == plain(hours["watermark"]) == "2026-11-27T09:50:00.000000Z"
        listed = {one["name"]: one for one in client.get("/states").json()["states"]}
        assert listed["s"]["rolling_windows"] == document["rolling_windows"]
        validate(client.get("/openapi.json").json())


def test_the_watermark_is_a_metric(url):
    state = keyed(url, HOURS)
    state.batch(Row(T0, "a", 1))
    keyed(url, state="tens").batch(Row(3, "a", 1))
    with client_of(url) as client:
        head = "mapstate_watermark_timestamp_seconds{state="
        lines = [line for line in client.get("/metrics").text.splitlines() if line.startswith(head)]
        assert [line.split(" ")[0] for line in lines] == [f'{head}"s"}}']
        assert float(lines[0].split(" ")[1]) == T0 / 1e6


def test_requests_at_one_time_get_their_own_times(url, tens):
    """They are merged into few reads; one of a time that is gone fails alone."""
    from mapstate.serve.states import States

    async def main() -> None:
        states = States(url)
        state = await states.state("s")
        view = state.view(await state.ledger())
        times: list[Any] = [None, "watermark", *range(-100, 40, 5)]
        asked = [(key, at) for at in times for key in ("a", "b", "nobody")]
        reads = states.reads()
        found: Any = await asyncio.gather(
            *(state.multi_get([key], view, at) for key, at in asked),
            state.multi_get(["a", "b"], view, [10, 20]),
            state.multi_get(["a", "b"], view, [10, -100]),
            return_exceptions=True,
        )
        for (key, at), one in zip(asked, found, strict=False):
            if isinstance(at, int) and at < -40:
                assert type(one).__name__ == "WindowGoneError", (key, at, one)
                continue
            assert not isinstance(one, BaseException), (key, at, one)
            end = 24 if at in (None, "watermark") else at
            assert one[0] == [tens.right(key, at)]
            assert one[1].head["as_of"]["end"] == end // 5 * 5
        listed = found[-2]
        assert listed[0] == [tens.right("a", 10), tens.right("b", 20)]
        assert listed[1].head["as_of"]["end"] == [10, 20]
        assert type(found[-1]).__name__ == "WindowGoneError"
        assert states.reads() - reads < len(asked)
        await states.close()

    asyncio.run(main())


class Names(CombinerAggregator):
    def init(self, row: Any) -> Any:
        return [row["n"]]

    def combine(self, one: Any, other: Any) -> Any:
        return one + other


def test_columns_that_need_no_aggregator_of_a_user_are_served_without_it(tmp_path):
    url = f"sqlite:///{tmp_path}/states.db"
    job = Rolled(url, [(10, 1), LIFETIME], aggregates={"rows": Count(), "names": Names()})
    job.batch(Row(1, "ann"), Row(2, "ann"))
    with client_of(url) as client:
        found = client.post("/states/s/values", json={"keys": ["ann"], "columns": ["rows_10"]})
        assert found.json()["values"] == [{"rows_10": 2}]
        assert client.post("/states/s/values", json={"keys": ["ann"], "columns": []}).json()["values"] == [{}]
        head, row, *_ = lines_of(client.get("/states/s/scan?columns=rows_lifetime"))
        assert (head["keys"], row["value"]) == (1, {"rows_lifetime": 2})
        assert "aggregators=" in problem(client.get("/states/s/values?user=ann"), 400)


def test_reads_whose_sketches_are_joined_at_random_have_no_tag(tmp_path):
    url = f"sqlite:///{tmp_path}/states.db"
    for state, own, tagged in (("s", Count(), True), ("p", ApproxPercentiles("n", [0.5]), False)):
        Rolled(url, [(10, 1), LIFETIME], state=state, aggregates={"own": own}).batch()
        with client_of(url) as client:
            found = client.get(f"/states/{state}/values?user=ann")
            assert ("etag" in found.headers, found.headers["cache-control"] == "no-store") == (tagged, not tagged)


def test_the_reads_of_a_call_have_one_now(tmp_path, monkeypatch):
    url, clock = f"sqlite:///{tmp_path}/states.db", SimpleNamespace(now=30)
    monkeypatch.setattr(rolling, "time", SimpleNamespace(time_ns=lambda: clock.now * 1_000_000_000))
    job = Rolled(url, [(10, 1), LIFETIME], kind="timestamp", aggregates={"rows": Count()})
    job.batch(*(Row(at, "ann") for at in range(30)))

    def function(states: PinnedStates) -> list[Any]:
        found = [states["s"].get("ann")]
        clock.now = 36
        found += [states["s"].get("ann"), states["s"].get("ann", at="watermark")]
        states.begin()
        return [*found, states["s"].get("ann")]

    async def main() -> list[Any]:
        opened = States(url)
        try:
            return await asyncio.to_thread(function, PinnedStates(opened))
        finally:
            await opened.close()

    first, second, marked, later = (one["rows_10_seconds"] for one in asyncio.run(main()))
    assert (first, second, marked, later) == (10, 10, 10, 4)


def test_a_value_out_of_its_range_fails_alone(url):
    state = keyed(url)
    state.batch(Row(3, "big", 2**62), Row(8, "big", 2**62), Row(8, "a", 1))
    with client_of(url) as client:
        answer = client.get("/states/s/values?k=big&at=10")
        assert "columns" in problem(answer, 500)
        assert client.get("/states/s/values?k=a&at=10").json()["value"] == state.right("a", 10)
        some = client.post("/states/s/values", json={"keys": ["big"], "at": 10, "columns": ["rows_10"]})
        assert some.json()["values"] == [{"rows_10": 2}]
