"""Linear DRPC: requests that wait are computed together by one Spark job, which ends when all of its rows are done."""

from __future__ import annotations

import asyncio
import json
import re
import secrets
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from mapstate.aggregators.columns import column_of
from mapstate.backends import check_state_name
from mapstate.drpc import PORT
from mapstate.errors import ConfigurationError, UsageError, check_range, cut, missing_driver
from mapstate.spark.driver.access import access_of
from mapstate.spark.driver.spark35 import calls
from mapstate.spark.executor.task import arrow_schema
from mapstate.spark.steps.columns import column_names
from mapstate.spark.streams.stream import Stream, newStream
from mapstate.values import plain

try:
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
except ModuleNotFoundError as error:
    raise missing_driver("DRPCServer", error, extra="serve") from error

from mapstate.errors import MapStateError
from mapstate.serve.answers import Problem, problem_of
from mapstate.serve.drpc import MOST_WAITING, Calls, Execute
from mapstate.serve.guard import Guard
from mapstate.serve.server import listening, server_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_MOST_OF_A_JOB = 1_000
_YEARS = re.compile(r'(ype":)"interval (?:year|month)[^"]*"')  # a quote inside of a column's name is escaped
_LOCAL = ("localhost", "127.0.0.1", "::1")

Steps = Callable[[Stream], Stream]


class DRPCServer:
    """Answers ``POST /drpc/NAME`` with what Spark jobs compute. In the driver, beside its queries.

    A job takes tenths of a second at best: for answers in milliseconds see ``mapstate serve --functions``.

    Args:
        spark: The session whose jobs compute. Its queries run on.
        host: The address to listen on. Another one than this machine's own needs a ``token``.
        port: 0 takes a free one.
        token: What a caller has to send as ``Authorization: Bearer``.
        most_waiting: Requests that wait at one time; one more is a 503.
        timeout: Seconds until a request is a 504. The job ends, too, once nobody waits for it.

    """

    def __init__(
        self,
        spark: SparkSession,
        *,
        host: str = "127.0.0.1",
        port: int = PORT,
        token: str | None = None,
        most_waiting: int = MOST_WAITING,
        timeout: float = 60.0,
    ) -> None:
        is_local = host in _LOCAL
        if token is None and not is_local:
            raise UsageError(f"on {host} other machines can call all functions: give a token. Nothing was started.")
        if token is not None and not token.strip():
            raise UsageError("the token is empty. Nothing was started.")
        self._spark = spark
        self._place = host, port
        self._functions: dict[str, Execute] = {}
        self._jobs: list[_Jobs] = []
        check_range("timeout", timeout, 0.001, 86_400, " of seconds")
        calls = Calls(self._functions, most_waiting=most_waiting)
        handlers: Any = {Problem: _of_problem, MapStateError: _of_error, HTTPException: _of_http}
        self._app = Starlette(routes=[calls.route()], exception_handlers=handlers)
        self._app.add_middleware(Guard, token=token, local_only=is_local and token is None, seconds=timeout)
        self._open = ExitStack()
        self._has_ended = False
        self.address = ""

    def function(self, name: str, steps: Steps) -> Self:
        """One more function. ``steps`` takes a stream of ``request_id`` and ``args`` to rows with ``request_id``.

        It is called on the driver once per job, with all requests that wait. The rows of a request, without its
        ``request_id``, are its result; a request without rows gets an empty list. Raises ConfigurationError.
        """
        check_state_name(name)
        if name in self._functions:
            raise ConfigurationError(f"there is a function {name!r} already")
        jobs = _Jobs(self._spark, name, steps)
        self._jobs.append(jobs)
        self._functions[name] = jobs.execute
        return self

    def start(self) -> Self:
        """Takes requests, in threads of its own, once.

        Raises ConfigurationError where the address cannot be bound, UsageError where it was started before.
        """
        if self.address or self._has_ended:
            raise UsageError(f"it runs already: {self.address}" if self.address else "it has run: make another one")
        bound, self.address = self._open.enter_context(listening(*self._place))
        server = server_of(self._app)
        thread = threading.Thread(target=lambda: server.run(sockets=[bound]), name="mapstate-drpc", daemon=True)
        thread.start()

        def end() -> None:
            server.should_exit = True
            thread.join()

        self._open.callback(end)
        return self

    @property
    def port(self) -> int:
        """The port that it listens on."""
        return int(self.address.rstrip("/").rpartition(":")[2])

    def stop(self) -> None:
        """Ends it; requests under way have five seconds."""
        self._open.close()
        for jobs in self._jobs:
            jobs.stop()
        self.address, self._has_ended = "", True

    def __enter__(self) -> Self:
        return self if self.address else self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()


class _Request(NamedTuple):
    args: str
    loop: asyncio.AbstractEventLoop
    answer: asyncio.Future[Any]

    def set(self, result: Any, error: BaseException | None = None) -> None:
        """Answers, from any thread, unless nobody waits any more."""
        if isinstance(error, StopIteration) or not isinstance(error, Exception | None):  # which no future can hold
            error = RuntimeError(repr(error))

        def done() -> None:
            if not self.answer.done():
                if error is None:
                    self.answer.set_result(result)
                else:
                    self.answer.set_exception(error)

        with suppress(RuntimeError):  # the server has stopped
            self.loop.call_soon_threadsafe(done)


class _Jobs:
    """The jobs of one function: one at a time, in a thread of its own."""

    def __init__(self, spark: SparkSession, name: str, steps: Steps) -> None:
        self._spark, self._name, self._steps = spark, name, steps
        self._access = access_of(spark.range(0))
        self._changed = threading.Condition()
        self._waiting: list[_Request] = []
        self._running: tuple[str, list[_Request]] | None = None
        self._is_ending = False
        self._has_ended = False
        self._thread: threading.Thread | None = None

    async def execute(self, args: str) -> Any:
        """The rows of one request. Raises what the job raises."""
        loop = asyncio.get_running_loop()
        request = _Request(args, loop, loop.create_future())
        with self._changed:
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name=f"mapstate-drpc-{self._name}", daemon=True)
                self._thread.start()
            self._waiting.append(request)
            self._changed.notify_all()
        try:
            return await request.answer
        finally:
            if request.answer.cancelled():
                self._abandon(request)

    def stop(self) -> None:
        """Ends after the job that runs."""
        with self._changed:
            self._has_ended = True
            self._changed.notify_all()

    def _abandon(self, request: _Request) -> None:
        """Forget a request for which nobody waits, and end a job that has only such ones, without waiting for Spark."""
        with self._changed:
            if request in self._waiting:
                self._waiting.remove(request)
            running = self._running
            if running is None or self._is_ending or not all(request.answer.cancelled() for request in running[1]):
                return
            self._is_ending = True
        threading.Thread(
            target=self._end, args=running[:1], name=f"mapstate-drpc-{self._name}-end", daemon=True
        ).start()

    def _end(self, tag: str) -> None:
        """Cancel a job until it has ended: it may not have reached Spark yet."""
        has_ended = False
        while not has_ended:
            with suppress(Exception):  # the next time, or Spark has gone and the job with it
                self._access.cancel(tag)
            with self._changed:
                has_ended = self._changed.wait_for(lambda: self._running is None or self._running[0] != tag, 0.5)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._has_ended)
                if self._has_ended:
                    return
                taken, self._waiting = self._waiting[:_MOST_OF_A_JOB], self._waiting[_MOST_OF_A_JOB:]
            self._run(taken)

    def _run(self, requests: list[_Request]) -> None:
        """One job for all who wait; if it fails, one for each half: a request fails for its own arguments only."""
        tag = f"mapstate-drpc-{secrets.token_hex(8)}"
        with self._changed:
            requests = [request for request in requests if not request.answer.cancelled()]
            if not requests:
                return
            self._running, self._is_ending = (tag, requests), False
        try:
            try:
                with self._access.tagged(tag):
                    results = self._computed(tag, [request.args for request in requests])
            finally:
                with self._changed:
                    self._running = None
                    self._changed.notify_all()
        except BaseException as error:  # noqa: BLE001  anybody's function, which may also call sys.exit
            if len(requests) == 1:
                requests[0].set(None, error)
            else:
                half = (len(requests) + 1) // 2
                self._run(requests[:half])
                self._run(requests[half:])
            return
        for request, result in zip(requests, results, strict=True):
            request.set(result)

    def _computed(self, tag: str, args: Sequence[str]) -> list[list[Any]]:
        import pyarrow as pa

        ids = [f"{tag}-{i}" for i in range(len(args))]  # which no function makes up, nor keeps from another job
        form = calls().from_ddl("request_id string, args string")
        requests = calls().from_arrow(self._spark)(pa.table([ids, list(args)], form.names), form)
        rows = self._steps(newStream(self._name, requests)).toDF()
        names = rows.columns
        if "request_id" not in names:
            raise ConfigurationError(
                f"the rows of the function {self._name!r} have no column request_id, but {', '.join(names)}"
            )
        column_names(rows.schema, names, f"the result of the function {self._name!r}")  # an object has each name once
        kinds = {field.name: field.dataType.simpleString() for field in rows.schema}
        rows = _in_months(rows)
        access_of(rows).plan_rows()  # as for `collected`
        table = (
            calls().to_arrow(rows).cast(arrow_schema(rows.schema))
        )  # rows of Python have no instants, but local times
        answers: dict[Any, list[Any]] = {request_id: [] for request_id in ids}
        for row in table.to_pylist():
            request = row.pop("request_id")
            if not isinstance(request, str) or request not in answers:
                raise ConfigurationError(
                    f"the function {self._name!r} gave a row with the request_id {cut(request)!r}, which none of its "
                    "requests has. Nothing was answered. Give each row the request_id of its request, unchanged."
                )
            answers[request].append({name: plain(value, kinds[name]) for name, value in row.items()})
        return [*answers.values()]


def _in_months(rows: DataFrame) -> DataFrame:
    """Cast intervals of years and months, also inside of other values, to numbers of months: Arrow gets no others."""
    from pyspark.sql.types import StructType

    for kind in ("interval month", "integer") if _YEARS.search(rows.schema.json()) else ():
        made = StructType.fromJson(json.loads(_YEARS.sub(rf'\1"{kind}"', rows.schema.json())))
        rows = rows.select(*(column_of(column.name).cast(column.dataType).alias(column.name) for column in made))
    return rows


async def _of_problem(_: Any, error: Any) -> Any:
    return error.response()


async def _of_error(_: Any, error: Any) -> Any:
    return problem_of(error).response()


async def _of_http(_: Any, error: Any) -> Any:
    return Problem(error.status_code, "There is one call: POST /drpc/NAME.").response()
