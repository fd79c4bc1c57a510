"""A service while states change: states that come, go or are made again, waits for a batch, and events."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections import Counter
from functools import partial
from typing import Any

import pytest
from service import ROWS, VISITS, client_of, problem, report
from states import Job, made_of_one_batch
from versions import Version

from mapstate.errors import StateNotFoundError, UsageError
from mapstate.keys import KeyCodec
from mapstate.operations.drop import drop
from mapstate.operations.swap import swap
from mapstate.reader import open_reader
from mapstate.schema import KeyField
from mapstate.serve import make_app
from mapstate.serve import states as states_module
from mapstate.serve.commits import Commits
from mapstate.spark.driver.state import encode_report

# Which states there are


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
    monkeypatch.setattr(states_module, "_REMEMBERED", 1000.0)
    with client_of(url) as client:
        assert client.get("/states/s/values?k=a").status_code == 200
        remove_ledger(job.store)
        scans = counted_scans(job.store, monkeypatch)
        for _ in range(20):
            problem(client.get("/states/s/values?k=a"), 409)
        assert scans["s"] <= 2


def test_after_a_while_a_lost_ledger_is_a_state_that_is_not_there(url, monkeypatch):
    job = Job(url)
    job.batch(a=1)
    monkeypatch.setattr(states_module, "_REMEMBERED", 0.0)
    with client_of(url) as client:
        assert client.get("/states/s/values?k=a").status_code == 200
        remove_ledger(job.store)
        problem(client.get("/states/s/values?k=a"), 409)
        problem(client.get("/states/s/values?k=a"), 404)  # the service asks for the ledger alone now


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
        from mapstate.backends.redis.connection import command

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


def test_a_state_that_was_not_there_when_its_caller_had_gone_is_sought_anew(url):
    async def ask():
        states = states_module.States(url)
        gone = asyncio.create_task(states.state("s"))
        await asyncio.sleep(0)
        gone.cancel()
        await asyncio.wait([gone, *states._open.values()])
        assert not states.is_open("s")
        await asyncio.to_thread(Job(url).batch, a=1)
        assert (await (await states.state("s")).ledger()).state == "s"
        await states.close()

    asyncio.run(ask())


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


# Waiting, and events


def test_an_opening_that_fails_in_any_way_is_tried_again(visits, monkeypatch):
    def failing(*_):
        raise RuntimeError("no thread can be started")

    with client_of(visits) as client:
        with monkeypatch.context() as patch:
            patch.setattr(states_module, "check_is_there", failing)
            problem(client.get("/states/visits/values?user_id=user-7"), 500)
        assert client.get("/states/visits/values?user_id=user-7").status_code == 200
        assert [one["name"] for one in client.get("/states").json()["states"]] == ["visits"]


def test_a_request_waits_for_a_batch_however_its_name_is_written(url):
    job = Job(url)
    job.batch(a=1)
    with client_of(url) as client:
        ask = "/states/s/values?k=a&min%5Fbatch="
        answer = client.get(f"{ask}1&wait=0.1")
        assert "Batch 1" in problem(answer, 503)
        problem(client.get(f"{ask}x"), 400)
        assert client.get(f"{ask}0").status_code == 200


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
    other = Job(url, owner="other", on_new_owner="adopt_unchecked")
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
        reached = asyncio.create_task(commits.reached("s", "1", 30))
        await asyncio.to_thread(job.batch, a=2)
        await reached
        assert not listening.done()  # the states are not known yet
        go_on.set()
        assert (await listening)[0] is None
        await commits.close()
        await states.close()

    asyncio.run(wait())


def test_no_state_is_held_up_by_another_one_that_does_not_answer(tmp_path, monkeypatch):
    url, go_on = f"sqlite:///{tmp_path}/s.db", asyncio.Event()
    job, ledger = Job(url), states_module.OpenState.ledger
    job.batch(a=1)
    made_of_one_batch(url, "slow", (KeyField("k", "string"),), VISITS, ROWS)

    async def held(self):
        if self.reader._state == "slow":
            await go_on.wait()
        return await ledger(self)

    monkeypatch.setattr(states_module.OpenState, "ledger", held)

    async def wait():
        states = states_module.States(url)
        commits = Commits(states)
        events = commits.events()
        listening: Any = asyncio.ensure_future(anext(events))
        for batch_id in (1, 2):
            reached = asyncio.create_task(commits.reached("s", str(batch_id), 30))
            await asyncio.to_thread(job.batch, a=batch_id)
            await reached
        assert not listening.done()
        go_on.set()
        assert (await listening)[0] is None
        await asyncio.to_thread(job.batch, a=3)
        found = 0
        while found < 3:  # batches that came before the first comment may be events, too
            event, _ = await anext(events)
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
    return [event for event, _ in (await heard(app, most, do))[1:]]


async def heard(app, most, do=lambda: None, last_id=None):
    """The first events that the application sends, each with its id; first what it says when it listens.

    Then ``do`` is called.
    """
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
        "headers": [] if last_id is None else [(b"last-event-id", last_id.encode())],
        "root_path": "",
    }
    scope |= {"asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1", "scheme": "http"}
    task = asyncio.create_task(app(scope, receive, sent.put))
    events: list[Any] = []
    deadline = time.monotonic() + 20  # a heartbeat does not move it
    while len(events) <= most:
        message = await asyncio.wait_for(sent.get(), deadline - time.monotonic())
        if message["type"] != "http.response.body":
            continue
        assert message["body"].endswith(b"\n\n")
        lines = dict(line.split(": ", 1) for line in message["body"].decode().splitlines() if line)
        if lines.get("event"):
            event = json.loads(lines["data"])
            assert event["event"] == lines["event"]
            events.append((event, lines.get("id")))
        elif not events:
            events.append((None, lines.get("id")))
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
    job, ledger, no_read = Job(url), states_module.OpenState.ledger, threading.Lock()
    job.batch(a=1)

    async def held(self):
        with no_read:  # of this state, one at a time
            return await ledger(self)

    monkeypatch.setattr(states_module.OpenState, "ledger", held)

    def batches():
        with no_read:
            job.batch(a=2)
            job.store.keep_report(encode_report(report(1)), 100)
            job.ledger.rolled_back()
            job.next = 1
            job.batch(a=3)
            last = job.ledger.record.last_commit
            assert last is not None
            assert last.txid > 1001
            job.store.keep_report(encode_report(report(1, txid=last.txid)), 100)
            job.batch(a=4)

    events = asyncio.run(asgi_events(make_app(url), 2, batches))
    assert 1001 not in [one["as_of"]["txid"] for one in events]


# Ids of events, and names of commits


def commits_of(events):
    """The batches of some events of one state; "gap" for a gap."""
    return [event["as_of"]["batch_id"] if event["event"] == "commit" else event["event"] for event, _ in events[1:]]


def back(url, most, last_id, do=lambda: None, app=None):
    """What a client hears that comes back, to this service or to another one of the store."""
    app = app or make_app(url)

    async def listen():
        async with app.router.lifespan_context(app):
            return await heard(app, most, do, last_id)

    return asyncio.run(listen())


def reported(job, *batches):
    for at in batches:
        job.batch(a=at)
        job.store.keep_report(encode_report(report(at)), 100)


def test_a_client_that_comes_back_hears_what_was_committed_meanwhile(url):
    job = Job(url)
    reported(job, 0)
    first = back(url, 1, None, lambda: reported(job, 1))
    assert commits_of(first) == [1]
    reported(job, 2, 3)
    again = back(url, 3, first[1][1], lambda: reported(job, 4))
    assert commits_of(again) == [2, 3, 4]
    assert [event["report"]["batch_id"] for event, _ in again[1:]] == [2, 3, 4]
    for (_, last_id), left in zip(again[1:], ([3, 4], [4]), strict=False):  # wherever the connection broke
        assert commits_of(back(url, len(left), last_id)) == left


def test_a_client_that_has_heard_nothing_yet_comes_back_to_all_that_was_committed_since(url):
    """An EventSource sends the id of a comment, too."""
    (_, last_id), *_ = back(url, 0, None)
    job = Job(url)
    job.batch(a=1)
    made_of_one_batch(url, "more", (KeyField("k", "string"),), VISITS, ROWS)
    events = back(url, 2, last_id)
    assert sorted((event["event"], event["state"]) for event, _ in events[1:]) == [("commit", "more"), ("commit", "s")]
    job.batch(a=2)
    again = back(url, 1, events[-1][1])
    assert [(event["state"], event["as_of"]["batch_id"]) for event, _ in again[1:]] == [("s", 1)]


def test_two_clients_of_one_service_hear_each_what_they_lack_and_nothing_twice(url):
    job, app = Job(url), make_app(url)

    async def listen():
        async with app.router.lifespan_context(app):
            first = await heard(app, 1, lambda: reported(job, 0))
            listens = threading.Event()
            staying = asyncio.create_task(heard(app, 4, listens.set))
            await asyncio.to_thread(listens.wait, 20)
            reported(job, 1)
            again = await heard(app, 2, lambda: reported(job, 2), first[1][1])
            reported(job, 3)
            last = await heard(app, 2, lambda: reported(job, 4), again[2][1])
            return again, last, await staying

    again, last, stayed = asyncio.run(listen())
    assert commits_of(again) == [1, 2]
    assert commits_of(last) == [3, 4]
    assert commits_of(stayed) == [1, 2, 3, 4]


def test_an_id_of_no_service_is_a_gap_and_no_silence(url):
    job = Job(url)
    job.batch(a=1)
    for wrong in ("17", "{}x", '{"s":["x"]}', "too many states"):
        (event, last_id), (commit, _) = back(url, 2, wrong, lambda: job.batch(a=2))[1:]
        assert (event, last_id) == ({"event": "gap", "state": None}, None)
        assert commit["event"] == "commit"


def test_more_commits_than_the_store_tells_of_are_a_gap(url):
    job = Job(url)
    job.batch(a=0)
    ((_, last_id),) = back(url, 0, None)
    for at in range(1, 5):
        job.batch(a=at)  # without reports a ledger tells of two
    events = back(url, 3, last_id)
    assert commits_of(events) == ["gap", 3, 4]
    assert (events[1][0]["state"], events[1][0]["as_of"]["batch_id"]) == ("s", 4)
    assert commits_of(back(url, 3, events[1][1])) == ["gap", 3, 4]  # the connection broke behind the gap
    assert commits_of(back(url, 1, events[2][1])) == [4]


@pytest.mark.parametrize("change", ["drop", "reset", "adopt_unchecked"])
def test_an_id_of_before_a_state_was_another_is_a_gap(url, monkeypatch, change):
    job = Job(url)
    reported(job, 0, 1)
    ((_, last_id),) = back(url, 0, None)
    commit = as_of(url)["commit"]
    monkeypatch.setattr("states.START", 2000)  # time has passed
    job = another(url, change)
    for at in range(3):
        job.batch(a=at)
    events = back(url, 2, last_id)
    assert commits_of(events) == ["gap", 2]
    assert commits_of(back(url, 1, events[2][1], lambda: job.batch(a=3))) == [3]
    with client_of(url) as client:
        assert "no commit of state 's'" in problem(client.get(f"/states/s/values?k=a&min_batch={commit}"), 410)
        assert client.get("/states/s/values?k=a&min_batch=0").status_code == 200  # no number tells whose it is
        assert as_of(url)["commit"].partition("-")[0] != commit.partition("-")[0]


def another(url, change):
    if change == "drop":
        drop(url, "s")
        return Job(url)
    job = Job(url, owner="other", on_new_owner=change)
    job.next = 0
    return job


def as_of(url):
    with client_of(url) as client:
        return client.get("/states/s/values?k=a").json()["as_of"]


def test_a_state_that_was_dropped_while_a_client_was_away_is_a_problem(url):
    Job(url).batch(a=1)
    made_of_one_batch(url, "more", (KeyField("k", "string"),), VISITS, ROWS)
    ((_, last_id),) = back(url, 0, None)
    drop(url, "s")
    ((event, last_id),) = back(url, 1, last_id)[1:]
    assert (event["event"], event["state"], event["problem"]["status"]) == ("problem", "s", 404)
    Job(url).batch(a=1)
    assert commits_of(back(url, 1, last_id)) == [0]


def test_a_listener_that_is_far_behind_is_cut_off_and_comes_back_to_the_rest(tmp_path, monkeypatch):
    monkeypatch.setattr("mapstate.serve.commits._MOST_BEHIND", 3)
    url = f"sqlite:///{tmp_path}/s.db"
    job = Job(url)
    reported(job, *range(8))

    async def listen():
        states = states_module.States(url)
        commits, found, last_id = Commits(states), list[Any](), "{}"
        while len(found) < 8:
            events = [one async for one in commits.events(last_id)]  # until it is cut off
            found += [event["as_of"]["batch_id"] for event, _ in events if event]
            last_id = events[-1][1]
            if len(found) == 6:
                break
        await commits.close()
        await states.close()
        return found

    assert asyncio.run(listen()) == [0, 1, 2, 3, 4, 5]


def test_a_named_commit_is_waited_for_and_a_later_one_does(url):
    job = Job(url)
    job.batch(a=1)
    first = as_of(url)["commit"]
    with client_of(url) as client:
        assert client.get(f"/states/s/values?k=a&min_batch={first}").json()["value"] == {"n": 1}
        mark, _, txid = first.partition("-")
        problem(client.get(f"/states/s/values?k=a&min_batch={mark}-{int(txid) + 1}&wait=0.05"), 503)
        later = threading.Timer(0.3, lambda: job.batch(a=2))
        later.start()
        asked = client.get(f"/states/s/values?k=a&min_batch={mark}-{int(txid) + 1}&wait=20")
        later.join()
        assert asked.json()["value"] == {"n": 2}
        assert client.get(f"/states/s/scan?min_batch={first}").status_code == 200
        for wrong in (f"{mark}-", mark, f"x{mark}-1", f"{mark}--1"):
            problem(client.get(f"/states/s/values?k=a&min_batch={wrong}"), 400)


def test_a_state_that_becomes_another_one_ends_the_wait_for_a_commit_of_it(url):
    job = Job(url)
    job.batch(a=1)
    mark = as_of(url)["commit"].partition("-")[0]
    with client_of(url) as client:
        later = threading.Timer(0.3, lambda: Job(url, owner="other", on_new_owner="reset"))
        later.start()
        began = time.monotonic()
        problem(client.get(f"/states/s/values?k=a&min_batch={mark}-999999&wait=50"), 410)
        later.join()
        assert time.monotonic() - began < 40


def test_a_commit_of_another_state_is_refused_and_no_etag_is_of_two(url):
    for name in "st":
        made_of_one_batch(url, name, (KeyField("k", "string"),), VISITS, ROWS)
    with client_of(url) as client:
        of_s, of_t = (client.get(f"/states/{name}/values?k=user-7") for name in "st")
        assert of_s.headers["etag"] != of_t.headers["etag"]
        assert of_s.json()["as_of"]["txid"] == of_t.json()["as_of"]["txid"]
        commit = of_s.json()["as_of"]["commit"]
        problem(client.get(f"/states/t/values?k=user-7&min_batch={commit}"), 410)
        other = client.get("/states/t/values?k=user-7", headers={"If-None-Match": of_s.headers["etag"]})
        assert other.status_code == 200


def test_a_state_that_is_not_there_yet_is_waited_for(url):
    with client_of(url) as client:
        assert "no state 's'" in problem(client.get("/states/s/values?k=a&min_batch=0&wait=0.3"), 404)
        later = threading.Timer(0.3, lambda: Job(url).batch(a=1))
        later.start()
        assert client.get("/states/s/values?k=a&min_batch=0&wait=20").json()["value"] == {"n": 1}
        later.join()

    async def listen():
        states = states_module.States(url)
        commits = Commits(states)
        events = commits.events()
        assert (await anext(events))[0] is None
        with pytest.raises(StateNotFoundError):
            await commits.reached("t", "0", 1)
        await asyncio.to_thread(made_of_one_batch, url, "t", (KeyField("k", "string"),), VISITS, ROWS)
        event, _ = await anext(events)
        await commits.close()
        await states.close()
        return event

    assert asyncio.run(listen())["event"] == "commit"  # nobody else hears that a request waited


def test_a_swap_is_an_event_of_its_own_and_one_that_was_away_hears_a_gap(url):
    versions = [Version(url, state=name) for name in ("v", "v.2")]
    for at in (5, 6):
        for job in versions:
            job.batch_to(at, a=at)
    with_id = back(url, 1, None, lambda: versions[0].batch_to(7, a=7))
    last_id = next(last_id for event, last_id in with_id[1:] if event["state"] == "v")

    def swapped():
        versions[1].batch_to(7, a=7)
        swap(url, {"v": "v.2"})

    def of_name(events):
        return [(event["event"], event.get("version")) for event, _ in events if event and event["state"] == "v"]

    assert of_name(back(url, 3, None, swapped)) == [("swapped", "v.2"), ("commit", "v.2")]
    assert of_name(back(url, 3, last_id)) == [("gap", "v.2"), ("commit", "v.2")]
