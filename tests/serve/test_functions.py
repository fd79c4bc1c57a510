"""Functions over readers: ``mapstate serve --functions``."""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor, as_completed
from http.server import BaseHTTPRequestHandler, HTTPServer
from itertools import islice
from urllib.parse import unquote

import pytest
from openapi_spec_validator import validate
from service import client_of, serving
from starlette.applications import Starlette
from starlette.testclient import TestClient
from states import Job, made_of_one_batch

from mapstate.drpc import DRPCClient
from mapstate.errors import ConfigurationError, DRPCError
from mapstate.operations.drop import drop
from mapstate.schema import Field, KeyField
from mapstate.serve import make_app
from mapstate.serve.answers import Problem
from mapstate.serve.drpc import Calls
from mapstate.serve.guard import Guard
from mapstate.testing import wait_for

N = (Field("n", "Sum(n)", "bigint"),)
MODULE = '''
import threading
import time
from json import dumps  # of another module, and so no function of this one

entered, go_on = threading.Event(), threading.Event()
during = []

def total(states, args):
    """The sum over some keys, read one by one."""
    return {"total": sum(states["s"].get(key)["n"] for key in args.split())}

def twice(states, args):
    first = states["s"].get("a")
    while during:
        during.pop()()
    return [first, states["s"].get("b"), states["other"].get("a")]

def swallows(states, args):
    first = states["s"].get("a")
    while during:
        during.pop()()
    try:
        return [first, states["s"].get("b")]
    except Exception:
        return "swallowed"

def always(states, args):
    states["s"].get("a")
    during[0]()
    return states["s"].get("a")

def fails(states, args):
    raise ValueError(args)

def stops(states, args):
    return next(iter(()))

def waits(states, args):
    entered.set()
    go_on.wait(30)
    return "done"

def _hidden(states, args):
    return 1
'''


@pytest.fixture
def module(tmp_path, monkeypatch):
    name = f"functions_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    return name


@pytest.fixture
def url(tmp_path):
    made = f"sqlite:///{tmp_path}/s.db"
    made_of_one_batch(made, "other", (KeyField("k", "string"),), N, {"a": 7})
    return made


def asked(client, name, args=""):
    answer = client.post(f"/drpc/{name}", content=args.encode())
    return answer.status_code, answer.json()


def test_a_function_reads_states(url, module):
    Job(url).batch(a=1, b=2, c=40)
    with client_of(url, functions=module) as client:
        assert asked(client, "total", "a c") == (200, {"result": {"total": 41}})
        assert asked(client, "twice") == (200, {"result": [{"n": 1}, {"n": 2}, {"n": 7}]})
        for name in ("_hidden", "dumps", "nothing", "..%2Ftotal"):
            assert asked(client, name)[0] == 404
        assert client.get("/drpc/total").status_code == 405
        assert client.post("/drpc/total", content=b"\xff").status_code == 400
        assert client.post("/drpc/total", content=b"a" * (5 << 20)).status_code == 413
        assert asked(client, "total", "nobody")[1]["error"] == "TypeError"
        assert client.get("/states/s/values?k=a").json()["value"] == {"n": 1}
        document = client.get("/openapi.json").json()
        validate(document)
        described = {path.rpartition("/")[2] for path in document["paths"] if path.startswith("/drpc/")}
        assert described == {"total", "twice", "swallows", "always", "fails", "stops", "waits"}


def test_a_state_that_is_not_there_is_not_found(url, module):
    with client_of(url, functions=module) as client:
        status, document = asked(client, "total", "a")
        assert (status, document["error"]) == (404, "StateNotFoundError")
        Job(url).batch(a=1)
        assert asked(client, "total", "a") == (200, {"result": {"total": 1}})
        drop(url, "s")
        assert [asked(client, "total", "a")[0] for _ in range(2)] == [404, 404]
        Job(url).batch(a=2)
        wait_for(
            lambda: asked(client, "total", "a") == (200, {"result": {"total": 2}}), "the state that was made again"
        )


@pytest.mark.parametrize("name", ["twice", "swallows"])
def test_all_reads_of_a_call_are_of_one_batch(url, module, name):
    """A batch between two reads has the function called once more."""
    job = Job(url)
    job.batch(a=1, b=1)
    with client_of(url, functions=module) as client:
        sys.modules[module].during.append(lambda: job.batch(a=2, b=2))
        status, document = asked(client, name)
        assert (status, document["result"][:2]) == (200, [{"n": 2}, {"n": 2}])


def test_a_function_that_never_sees_one_batch_is_refused_for_now(url, module):
    job = Job(url)
    job.batch(a=1)
    with client_of(url, functions=module) as client:
        sys.modules[module].during.append(lambda: job.batch(a=1))
        answer = client.post("/drpc/always")
        assert (answer.status_code, answer.json()["error"]) == (503, "StaleBatchError")
        assert answer.headers["retry-after"] == "1"


def test_what_a_function_raises_is_said_without_a_password(url, module):
    with client_of(url, functions=module) as client:
        status, document = asked(client, "fails", "no such page")
        assert (status, document["detail"], document["error"]) == (500, "no such page", "ValueError")
        assert "s3cr3t" not in asked(client, "fails", "cannot reach redis://u:s3cr3t@host")[1]["detail"]
        assert asked(client, "fails", "")[0] == 500
        assert asked(client, "stops")[0] == 500
        assert len(asked(client, "fails", "x" * 10_000)[1]["detail"]) < 200


def test_bounds_of_time_and_number():
    """A request that waits too long is a 504, and one too many a 503."""
    import asyncio

    go_on = threading.Event()

    async def waits(args: str) -> str:
        await asyncio.to_thread(go_on.wait, 30)
        return args

    async def of_problem(_, error):
        return error.response()

    def app(seconds):
        calls = Calls({"waits": waits}, most_waiting=3)
        made = Starlette(routes=[calls.route()], exception_handlers={Problem: of_problem})
        made.add_middleware(Guard, token=None, local_only=False, seconds=seconds)
        return made

    with TestClient(app(0.05)) as client:
        assert asked(client, "waits")[0] == 504
        go_on.set()  # its thread, too, for which the loop waits at its end
    go_on.clear()
    with TestClient(app(60.0)) as client, ThreadPoolExecutor(6) as pool:
        answers = [pool.submit(asked, client, "waits", "x") for _ in range(6)]
        refused = list(islice(as_completed(answers), 3))
        assert [one.result()[0] for one in refused] == [503] * 3
        go_on.set()
        assert [one.result() for one in answers if one not in refused] == [(200, {"result": "x"})] * 3


def test_a_module_without_functions_is_refused(url, tmp_path, monkeypatch):
    (tmp_path / "empty_of_functions.py").write_text("from json import dumps\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("empty_of_functions", "no_such_module_at_all"):
        with pytest.raises(ConfigurationError, match=name):
            make_app(url, functions=name)


def test_the_command_and_the_client(url, module, tmp_path, monkeypatch):
    """Two hundred threads, a connection each, and functions of the working directory."""
    Job(url).batch(a=1, b=2)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TOKEN_OF_TEST", "word")
    with serving(url, "--functions", module, "--token-env", "TOKEN_OF_TEST") as served:
        with DRPCClient("127.0.0.1", served.port, token="word") as client:
            assert client.execute("total", "a b") == {"total": 3}
            with ThreadPoolExecutor(200) as pool:
                found = list(pool.map(lambda _: client.execute("total", "a"), range(1000)))
            assert found == [{"total": 1}] * 1000
            with pytest.raises(DRPCError, match="no such page") as caught:
                client.execute("fails", "no such page")
            assert caught.value.status == 500
        with DRPCClient("127.0.0.1", served.port) as client, pytest.raises(DRPCError, match="token") as caught:
            client.execute("total", "a")
        assert caught.value.status == 401
        assert "word" not in repr(client)
        other = DRPCClient("127.0.0.1", served.port, token="word")
        assert other.execute("total", "a") == {"total": 1}
        served.process.kill()
        served.process.wait()
        with pytest.raises(DRPCError) as caught:
            other.execute("total", "a")
        assert caught.value.status is None
        other.close()


class Proxy(BaseHTTPRequestHandler):
    """Answers each call with what its path says: ``/drpc/STATUS BODY``."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        status, _, body = unquote(self.path.removeprefix("/drpc/")).partition(" ")
        self.send_response(int(status))
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *_: object) -> None:
        """Says nothing."""


def test_an_answer_of_a_proxy_is_an_error_with_its_status():
    """It was no answer, which a client sends again for ever; or an AttributeError."""
    server = HTTPServer(("127.0.0.1", 0), Proxy)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    with DRPCClient("127.0.0.1", server.server_port) as client:
        for status, body in (
            (502, "<html>"),
            (413, ""),
            (500, '"no"'),
            (502, '{"result": 1}'),
            (200, "{}"),
            (200, "[]"),
        ):
            with pytest.raises(DRPCError, match=rf"failed \({status}\): this is no answer of a DRPC server") as caught:
                client.execute(f"{status} {body}")
            assert caught.value.status == status
        assert client.execute('200 {"result": null}') is None
        with pytest.raises(UnicodeEncodeError):  # which no second call sends either
            client.execute("200", "\ud800")
    server.shutdown()
    thread.join()
    server.server_close()
