"""The calls of the service, as a Starlette application."""

from __future__ import annotations

import asyncio
import datetime as dt
import re
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from http import HTTPStatus
from importlib.resources import files
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Match, Route
from starlette.types import Receive, Scope, Send

from mapstate.aggregators.aggregator import Aggregator
from mapstate.backing_map import Backend
from mapstate.errors import CorruptRecordError, LedgerError, MapStateError, MissingKeysError, UsageError, check_range
from mapstate.keys import Key
from mapstate.protocol.ledger_record import LedgerRecord
from mapstate.protocol.windows import WindowCommit
from mapstate.reader.times import watermark_of
from mapstate.serve import answers
from mapstate.serve.answers import BadRequest, Busy, Problem, View, as_of, line, lines, problem_of
from mapstate.serve.commits import Commits
from mapstate.serve.drpc import Calls, Execute, Functions
from mapstate.serve.guard import Guard
from mapstate.serve.metrics import Metrics
from mapstate.serve.openapi import openapi
from mapstate.serve.states import OpenState, States
from mapstate.values import plain

MOST_KEYS = 10_000  # of one POST
MOST_SCANS = 16
MOST_SECONDS = 60.0  # of one wait
_CLOSE_SECONDS = 2.0  # for the connections to the store to be closed
_WAIT = {"min_batch", "wait"}  # parameters
_PAGE = 2_000  # keys of a page of a scan
_PART = 256 << 10  # bytes that wait in a connection at one time
_PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'; base-uri 'none'",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}

Call = Callable[[Request], Awaitable[Response]]


def make_app(
    store: Backend | str,
    *,
    token: str | None = None,
    aggregators: Mapping[str, Mapping[str, Aggregator]] | None = None,
    local_only: bool = False,
    functions: str | None = None,
    timeout: float = 10.0,
) -> Starlette:
    """The service as an ASGI application: for ``mapstate serve``, or mounted in a server of your own.

    Args:
        store: The URL of a store, or its backend. It is only read.
        token: What a caller has to send as ``Authorization: Bearer``; None asks for nothing. The page itself and
            ``/health`` and ``/ready`` hold no data, and need none.
        aggregators: A user's own aggregators by state and field, if readers shall show their results.
        local_only: Refuse requests that were sent to another name than this machine's own, as a page of another site
            can make a browser do.
        functions: The name of a module whose functions ``POST /drpc/NAME`` calls, each with states and the arguments.
        timeout: Seconds within which a request is answered, a 503 at worst.

    Raises:
        ConfigurationError: The URL cannot be used, or the module cannot be imported or has no function.

    """
    if token is not None and not token.strip():
        raise UsageError("the token is empty. Nothing was started.")
    check_range("timeout", timeout, 0.001, 86_400, " of seconds")
    states = States(store, aggregators=aggregators)
    drpc = None if functions is None else Functions(states, functions)
    service = _Service(states, {} if drpc is None else drpc.functions)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        if drpc is not None:
            drpc.close()
        await asyncio.wait({asyncio.create_task(service.close())}, timeout=_CLOSE_SECONDS)

    handlers: Any = {Problem: _of_problem, MapStateError: service.failed, HTTPException: _of_http}
    handlers |= {ClientDisconnect: _of_disconnect, Exception: _of_defect}
    app = Starlette(routes=service.routes(), lifespan=lifespan, exception_handlers=handlers)
    app.router.redirect_slashes = False  # to what the client calls this host
    app.add_middleware(Guard, token=token, local_only=local_only, metrics=service.metrics, seconds=timeout)
    return app


class _Service:
    def __init__(self, states: States, functions: Mapping[str, Execute]) -> None:
        self._states = states
        self._functions = functions
        self._commits = Commits(states)
        self.metrics = Metrics(states)
        self._scans = 0

    def routes(self) -> list[Route]:
        """All calls. The one that is called most comes first."""
        routes = [
            Route("/states/{state}/values", self.values, methods=["GET"]),
            Route("/states/{state}/values", self.many_values, methods=["POST"]),
            Route("/states", self.all_states, methods=["GET"]),
            Route("/states/{state}", self.one_state, methods=["GET"]),
            Route("/states/{state}/scan", self.scan, methods=["GET"]),
            Route("/states/{state}/windows", self.windows, methods=["GET"]),
            Route("/states/{state}/windows/{end}", self.window, methods=["GET"]),
            Route("/events", self.events, methods=["GET"]),  # like scan and window, without HEAD: see below
            Route("/metrics", self.measured, methods=["GET"]),
            Route("/openapi.json", self.document, methods=["GET"]),
            Route("/health", _health, methods=["GET"]),
            Route("/ready", self.ready, methods=["GET"]),
            Route("/", _page_file("page.html", "text/html"), methods=["GET"]),
            Route("/page.css", _page_file("page.css", "text/css"), methods=["GET"]),
            Route("/page.js", _page_file("page.js", "text/javascript"), methods=["GET"]),
        ]
        for route in routes:
            if route.endpoint in (self.scan, self.window, self.events) and route.methods is not None:
                route.methods.discard("HEAD")  # it would read all, and send nothing
        return [*routes, Calls(self._functions).route()] if self._functions else routes

    async def close(self) -> None:
        await self._commits.close()
        await self._states.close()

    async def values(self, request: Request) -> Response:
        state = await self._state(request)

        async def ask(known: View) -> Response:
            others = answers.others_of(known.ledger, _WAIT)
            key = answers.key_of(request, known.ledger.keys, others)
            at = answers.at_of(known.ledger, request.query_params.get("at") if "at" in others else None)
            values, view = await state.multi_get([key], known, at)
            shown = known.forms.key(key)
            return answers.json_answer(request, view, lambda: {"key": shown, "value": view.forms.values(values)[0]})

        return await state.by_schema(ask)

    async def many_values(self, request: Request) -> Response:
        answers.check_names(request, _WAIT)
        body = await answers.body_of(request)
        state = await self._state(request)

        async def ask(known: View) -> Response:
            keys, at, columns = known.forms.asked_in(body)
            if len(keys) > MOST_KEYS:
                raise Problem(413, f"At most {MOST_KEYS} keys in one request; this one has {len(keys)}.")
            values, view = await state.multi_get(keys, known, answers.at_of(known.ledger, at), columns)
            return answers.json_answer(request, view, lambda: {"values": view.forms.values(values)})

        return await state.by_schema(ask)

    async def all_states(self, request: Request) -> Response:
        answers.check_names(request, set())
        documents = await asyncio.gather(*(self._summary(name) for name in await self._states.names()))
        return Response(
            line({"states": [document for document in documents if document]}), media_type="application/json"
        )

    async def one_state(self, request: Request) -> Response:
        answers.check_names(request, _WAIT)
        state = await self._state(request)
        ledger = await state.ledger()
        document = answers.state_document(state.name, ledger, await state.reports(ledger))
        if ledger.time_type is not None:
            done = ledger.last_windows() or WindowCommit()
            mark = watermark_of(done, ledger.final_mark(), ledger.time_type)
            document["watermark"] = plain(mark.time)
            document["inputs"] = {name: plain(seen.latest) for name, seen in mark.inputs.items()}
        return Response(line({**document, "as_of": as_of(ledger)}), media_type="application/json")

    async def scan(self, request: Request) -> Response:
        cursor, given = request.query_params.get("cursor", ""), request.query_params.get("limit")
        if given is not None and not re.fullmatch(r"(?=0*[1-9])\d{1,18}", given, re.ASCII):
            raise BadRequest("limit is a number from 1 on.")
        limit = None if given is None else int(given)
        answers.check_names(request, {"limit", "cursor", "columns", "at", *_WAIT})
        columns = request.query_params["columns"].split(",") if "columns" in request.query_params else None
        state = await self._state(request)
        size = _PAGE if limit is None else min(limit, _PAGE)
        start = answers.cursor_of(cursor)

        async def parse(known: View) -> Any:
            return answers.at_of(known.ledger, request.query_params.get("at"))

        at = await state.by_schema(parse) if "at" in request.query_params else None
        pages = state.reader.pages_as_of(size, columns=columns, at=at, cursor=start)

        async def sent() -> AsyncGenerator[bytes, None]:
            count, last = 0, start
            try:
                async for page in pages:
                    rows = state.view(page.ledger).forms.rows(page.rows)
                    count += len(rows)
                    behind: dict[str, Any] = {} if page.cursor is None else {"cursor": answers.cursor_text(page.cursor)}
                    # A page of the store that is read in parts has the cursor in front of it until the last part.
                    is_last = limit is not None and count >= limit and page.cursor not in (None, last)
                    if is_last and page.problem is not None:
                        behind["problem"] = problem_of(page.problem).document
                    head = {"as_of": answers.as_of_end(page.ledger, page.end), "keys": len(rows)}
                    yield lines([head, *rows, {"is_end": False, **behind}])
                    if is_last:
                        return
                    last = page.cursor or last
                yield lines([{"is_end": True, "keys": count}])
            except (CorruptRecordError, MissingKeysError) as error:  # after all keys that can be read
                yield lines([{"is_end": True, "keys": count, "problem": problem_of(error).document}])

        return await self._streamed(sent())

    async def windows(self, request: Request) -> Response:
        state = await self._state(request)

        async def ask(known: View) -> Response:
            rest = _with_windows(known).keys[1:]
            key = answers.key_of(request, rest, {"since", "until", *_WAIT})
            since, until = (
                answers.time_of(known.ledger, request.query_params.get(name)) for name in ("since", "until")
            )
            windows, ledger = await state.windows(key, since, until)
            view = state.view(ledger, known)
            values = view.forms.values([window.value for window in windows])
            shown = [
                {"start": plain(window.start), "end": plain(window.end), "is_final": window.final, "value": value}
                for window, value in zip(windows, values, strict=True)
            ]
            return answers.json_answer(request, view, lambda: {"windows": shown})

        return await state.by_schema(ask)

    async def window(self, request: Request) -> Response:
        answers.check_names(request, _WAIT)
        state = await self._state(request)

        async def parse(known: View) -> tuple[View, Any]:
            return known, answers.time_of(_with_windows(known), request.path_params["end"])

        view, end = await state.by_schema(parse)
        rows = state.reader.window(end)
        forms = view.forms.of_window

        async def sent() -> AsyncGenerator[bytes, None]:
            page, count = list[tuple[Key, dict[str, Any]]](), 0
            async for row in rows:
                page.append(row)
                if len(page) == _PAGE:
                    yield lines(forms.rows(page))
                    count, page = count + len(page), []
            yield lines([*forms.rows(page), {"is_end": True, "keys": count + len(page)}])

        return await self._streamed(sent())

    async def events(self, request: Request) -> Response:
        """Server-sent events: one per commit, also of those that a client which comes back has missed."""
        answers.check_names(request, set())
        events = self._commits.events(request.headers.get("last-event-id"))

        async def sent() -> AsyncGenerator[bytes, None]:
            async with aclosing(events):
                async for event, at in events:
                    head = f"event: {event['event']}\n" if event else ": mapstate\n"
                    head += f"id: {at}\n" if at else ""
                    yield head.encode() + (b"data: %b\n\n" % line(event) if event else b"\n")

        return _Stream(sent(), "text/event-stream")

    async def document(self, request: Request) -> Response:
        root: str = request.scope.get("root_path", "")
        return Response(line(openapi(self._functions, root)), media_type="application/json")

    async def measured(self, _: Request) -> Response:
        return Response(await self.metrics.text(), media_type=self.metrics.media_type)

    async def ready(self, request: Request) -> Response:
        """Whether the store answers. Anybody may ask, so the answer says nothing else."""
        try:
            await self._states.check_answers()
        except (MapStateError, TimeoutError) as error:
            raise Problem(503, "The store does not answer.", retry_after=1, error=type(error).__name__) from None
        return await _health(request)

    async def failed(self, request: Request, error: MapStateError) -> Response:
        """The answer for an error of mapstate. A state that is gone is not sought again for a while."""
        name = request.path_params.get("state", "")
        await self._states.lose_if_gone(name, error)
        if name and isinstance(error, UsageError) and not self._states.is_open(name):
            return Busy(f"State {name!r} was closed meanwhile.").response()  # for another request
        return problem_of(error).response()

    async def _summary(self, name: str) -> dict[str, Any] | None:
        try:
            ledger = await (await self._states.state(name)).ledger()
        except MapStateError as error:
            await self._states.lose_if_gone(name, error)
            if isinstance(error, LedgerError):
                return None  # dropped since the listing
            return {"name": name, "problem": problem_of(error).document}
        return {**answers.state_document(name, ledger), "as_of": as_of(ledger)}

    async def _state(self, request: Request) -> OpenState:
        """The state that the path names, once it has the batch that the query asks for."""
        name = request.path_params["state"]
        query = request.scope["query_string"]
        asked = request.query_params if b"min_batch" in query or b"wait" in query or b"%" in query else {}
        least, seconds = asked.get("min_batch"), asked.get("wait", "10")
        if not re.fullmatch(r"\d{1,4}(\.\d{1,3})?", seconds, re.ASCII) or float(seconds) > MOST_SECONDS:
            raise BadRequest(f"wait is a number of seconds, at most {MOST_SECONDS:g}; key.wait is a key column.")
        if least is not None:
            if not re.fullmatch(r"([0-9a-f]{12}-)?\d{1,18}", least, re.ASCII):
                raise BadRequest("min_batch is a number from 0 on or an as_of.commit; key.min_batch is a key column.")
            request.scope["mapstate.request"].wait(float(seconds))
            by_key = request.method == "GET" and request.scope["path"].endswith(("/values", "/windows"))
            by_key = by_key and "key.min_batch" not in request.query_params
            await self._commits.reached(name, least, float(seconds), by_key=by_key)
        return await self._states.state(name)

    async def _streamed(self, chunks: AsyncGenerator[bytes, None]) -> Response:
        """An answer whose first chunk is there, so that a request that cannot be met has the status of its error."""
        if self._scans >= MOST_SCANS:
            raise Busy(f"{self._scans} scans are under way.")
        self._scans += 1
        try:
            chunk = await anext(chunks)
        except BaseException:
            self._scans -= 1
            raise

        async def sent() -> AsyncGenerator[bytes, None]:
            nonlocal chunk  # the one that is held, while the client takes it
            async with aclosing(chunks):
                try:
                    while chunk:
                        for i in range(0, len(chunk), _PART):
                            yield chunk[i : i + _PART]
                        chunk = await anext(chunks, b"")
                except MapStateError as error:
                    yield lines([{"is_end": False, "problem": problem_of(error).document}])

        def ended() -> None:
            self._scans -= 1

        return _Stream(sent(), "application/x-ndjson", ended)


def _with_windows(known: View) -> LedgerRecord:
    if known.ledger.windows is None:
        raise BadRequest(f"State {known.ledger.state!r} has no windows by time.")
    return known.ledger


class _Stream(StreamingResponse):
    """An answer in chunks, whose generator is closed when the client has all of it, or has gone."""

    def __init__(
        self, chunks: AsyncGenerator[bytes, None], media_type: str, ended: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__(chunks, media_type=media_type, headers={"Cache-Control": "no-store"})
        self._chunks = chunks
        self._ended = ended

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with aclosing(self._chunks):
                await super().__call__(scope, receive, send)
        finally:
            self._ended()


async def _health(_: Request) -> Response:
    return Response(line({"status": "ok", "at": dt.datetime.now(dt.UTC)}), media_type="application/json")


def _page_file(name: str, media_type: str) -> Call:
    content = files("mapstate.serve").joinpath("page", name).read_bytes()

    async def answer(_: Request) -> Response:
        return Response(content, media_type=media_type, headers=_PAGE_HEADERS)

    return answer


async def _of_problem(_: Request, error: Problem) -> Response:
    return error.response()


async def _of_http(request: Request, error: HTTPException) -> Response:
    detail = {404: "There is no such call. /openapi.json has all of them.", 405: "This call has another method."}
    answer = Problem(error.status_code, detail.get(error.status_code, "")).response()
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        of_path = [route for route in request.app.routes if route.matches(request.scope)[0] is not Match.NONE]
        answer.headers["Allow"] = ", ".join(sorted(set().union(*(route.methods for route in of_path))))
    return answer


async def _of_disconnect(*_: Any) -> Response:
    return BadRequest("The client has gone.").response()


async def _of_defect(*_: Any) -> Response:
    return Problem(500, "The service has a defect; its log has the error. Nothing was written.").response()
