"""What a user declares and writes: the states of a job, and the foreachBatch function that calls them.

A habit is one way to write that function. Each of its parts is in somebody's job, in a tutorial or in a bug report.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

from fuzz.rolling import Rolling
from mapstate.errors import MapStateError
from mapstate.spark import with_empty_batches

__all__ = ["THROUGH", "Built", "Call", "DiedError", "Gives", "Habit", "State", "build", "run_habit"]

Gives = Literal["every row", "rows where v > 3", "rows where v > 3, if there is one"]
"""Which rows the function gives to its states: those have to count, each of them once."""

Call = Callable[[Any, int], None]


class Built(NamedTuple):
    """What a job declares: what its function calls, and the states, which `with_empty_batches` takes."""

    calls: list[Call]
    states: list[Any]


class DiedError(Exception):
    """What a fault raises in place of a death: no code of a job handles it."""


@dataclass(frozen=True)
class State:
    """One state: ``rows=Count(), total=Sum("v")`` by these columns.

    ``window``    the length of tumbling windows over the column ``t``, in its units, and ``lag`` theirs
    ``rolling``   its rolling windows, with the same ``lag``
    ``followed``  a second state follows its new values, and counts the keys by their number of rows
    ``blocks``    the number of blocks in which both keep their keys; None for a record for each key
    """

    name: str
    type: Literal["opaque", "transactional", "non_transactional"] = "opaque"
    keys: tuple[str, ...] = ("s",)
    window: int | None = None
    lag: int = 0
    followed: bool = False
    rolling: Rolling | None = None
    blocks: int | None = None

    def __str__(self) -> str:
        windows = f".tumblingWindow({self.window}, lag={self.lag})" if self.window else ""
        windows += f".window({self.rolling}, lag={self.lag})" if self.rolling else ""
        follower = f", followed by {self.name}.by_rows" if self.followed else ""
        blocks = f", in {self.blocks} blocks" if self.blocks else ""
        return f"{self.name} = {self.type}{windows}.groupBy{self.keys}{blocks}{follower}"


def build(
    states: Sequence[State],
    together: str,
    rows: Any,
    backend: Any,
    options: dict[str, Any],
    stop: Callable[[], None] | None = None,
) -> Built:
    """The jobs of these states: one with all of them, or one for each. ``stop`` is called downstream."""
    import mapstate

    topology = mapstate.Topology("site") if together == "topology" else None
    if topology is not None:
        streams = [topology.newStream("visits", rows)] * len(states)
    elif together == "stream":
        streams = [mapstate.newStream("visits", rows)] * len(states)
    else:
        streams = [mapstate.newStream(f"visits.{state.name}", rows) for state in states]
    states_kept: list[Any] = []
    for state, stream in zip(states, streams, strict=True):
        given = dict(options) | ({"blocks": state.blocks} if state.blocks else {})
        lag = given.pop("lag", state.lag)
        spec = getattr(mapstate, state.type)
        fields = {"rows": mapstate.Count(), "total": mapstate.Sum("v")}
        source: Any = stream
        if state.window:
            source = stream.tumblingWindow(state.window, timestampField="t", lag=lag, retention=10**6)
        elif state.rolling:
            source = state.rolling.of(stream, state.lag)
        kept = (source.groupBy(*state.keys) if state.keys else source).persistentAggregate(
            spec(backend, state.name, **given), **fields
        )
        if stop is not None:
            beside = kept.lateStream() if state.rolling else kept.newValuesStream()
            beside.foreachBatch(lambda _rows, _batch_id: stop())
        if state.followed:
            by_rows = kept.newValuesStream().groupBy("rows")
            by_rows.persistentAggregate(
                mapstate.opaque(backend, f"{state.name}.by_rows", **given), keys=mapstate.Count()
            )
        states_kept.append(kept)
    return Built([topology] if topology is not None else list(states_kept), states_kept)


@dataclass(frozen=True)
class Habit:
    """How the function is written.

    ``parts``    the frames that it splits the batch into; ``united``: and unites again before the call
    ``threads``  "": the query's own thread; "pool of one", "pool of two"; "inheritable": an InheritableThread for each
    ``through``  what it passes the frame through, see `THROUGH`
    ``group``    the job group that it sets: "", a name, or "uuid"
    ``around``   "", "swallow" (it logs what a call raises) or "retry" (up to three times)
    ``early``    it returns if the batch is empty
    ``anew``     it builds its states in each call
    ``gathers``  it calls for every second batch, with the rows of two
    ``wrapped``  it is given to with_empty_batches, as an error advises
    """

    parts: int = 1
    united: bool = False
    threads: str = ""
    through: str = ""
    group: str = ""
    around: str = ""
    early: bool = False
    anew: bool = False
    gathers: bool = False
    wrapped: bool = False

    def lines(self, gives: Gives) -> list[str]:
        """The function as a human would write it."""
        call = {"": "{call}", "swallow": "try: {call}  except Exception: log it", "retry": "up to 3 times: {call}"}
        call_text = call[self.around].format(call="counts(part, batch_id)")
        where = {"": "", "inheritable": " in an InheritableThread each"}
        where |= {name: f" in a ThreadPoolExecutor({size})" for name, size in _POOLS.items()}
        return [
            line
            for line, is_there in (
                ("keep the frame if batch_id % 2 == 0, else unite it with the one that was kept", self.gathers),
                (f"spark.sparkContext.setJobGroup({self.group!r}, ...)", bool(self.group)),
                ("rows = rows.where('v > 3')", gives != "every row"),
                ("if rows.isEmpty(): return", self.early or gives == "rows where v > 3, if there is one"),
                (f"rows = rows through {self.through}", bool(self.through)),
                ("counts = the states, built anew", self.anew),
                (f"parts = rows in {self.parts} parts{', united' * self.united}", self.parts > 1),
                (f"for each part and each of counts{where[self.threads]}: {call_text}", True),
                ("and each_batch = with_empty_batches(each_batch, *counts)", self.wrapped),
            )
            if is_there
        ]


def _view(rows: Any, _: Any) -> Any:
    rows.createOrReplaceTempView("batch_rows")
    return rows.sparkSession.table("batch_rows")


def _united_with_none(rows: Any, _: Any) -> Any:
    return rows.union(rows.limit(0))


THROUGH: dict[str, Callable[[Any, Any], Any]] = {
    "": lambda rows, _: rows,
    "a temp view": _view,
    "cache()": lambda rows, _: rows.cache(),
    "localCheckpoint()": lambda rows, _: rows.localCheckpoint(),
    "repartition(2)": lambda rows, _: rows.repartition(2),
    "a union with no rows": _united_with_none,
    "toArrow() and createDataFrame of its session": lambda rows, _: rows.sparkSession.createDataFrame(rows.toArrow()),
    "collect() and createDataFrame of the first session": lambda rows, spark: spark.createDataFrame(
        rows.collect(), rows.schema
    ),
}
"""What a function passes a frame through, given the frame and the session in which the query was started."""


def run_habit(
    habit: Habit,
    gives: Gives,
    built: Built,
    rows: Any,
    batch_id: int,
    *,
    spark: Any,
    kept_frames: dict[int, Any],
    between: Callable[[], None],
    report: Callable[[Exception], None],
) -> None:
    """One call of the function.

    ``between`` is called after each call of a state; it may raise `DiedError`. ``report`` gets what a call raised at
    last, whether the function passes it on or not.
    """

    def function(rows: Any, batch_id: int) -> None:
        def call(one: Call, part: Any) -> None:
            one(part, batch_id)
            between()

        frames = _frames(habit, gives, rows, batch_id, spark, kept_frames)
        _done(habit.threads, [partial(_guarded, habit.around, partial(call, *both), report) for both in _each(frames)])

    def _each(frames: list[Any]) -> list[tuple[Call, Any]]:
        return [(one, part) for part in frames for one in built.calls]

    wrapped = with_empty_batches(function, *built.states) if habit.wrapped else function
    try:
        wrapped(rows, batch_id)
    except MapStateError as error:
        if habit.wrapped:
            report(error)
        raise


def _frames(habit: Habit, gives: Gives, rows: Any, batch_id: int, spark: Any, kept_frames: dict[int, Any]) -> list[Any]:
    if habit.gathers:
        kept_frames[batch_id] = rows
        if batch_id % 2 == 0:
            return []
        rows = kept_frames[batch_id - 1].union(rows)
    if habit.group:
        group = str(uuid.UUID(int=batch_id + 7)) if habit.group == "uuid" else habit.group
        spark.sparkContext.setJobGroup(group, "set by the user's function")
    if gives != "every row":
        rows = rows.where("v > 3")
    if (habit.early or gives == "rows where v > 3, if there is one") and rows.isEmpty():
        return []
    rows = THROUGH[habit.through](rows, spark)
    parts = [rows.where(f"v % {habit.parts} = {part}") for part in range(habit.parts)] if habit.parts > 1 else [rows]
    if habit.united:
        first, *others = parts
        for other in others:
            first = first.union(other)
        return [first]
    return parts


def _guarded(around: str, call: Callable[[], None], report: Callable[[Exception], None]) -> None:
    tries = 3 if around == "retry" else 1
    for attempt in range(tries):
        try:
            return call()
        except DiedError:
            raise
        except Exception as error:
            if attempt == tries - 1:
                report(error)
                if around != "swallow":
                    raise
    return None


_POOLS = {"pool of one": 1, "pool of two": 2}


def _done(threads: str, work: Sequence[Callable[[], None]]) -> None:
    if threads in _POOLS:
        with ThreadPoolExecutor(_POOLS[threads]) as pool:
            for future in [pool.submit(one) for one in work]:
                future.result()
    elif threads == "inheritable":
        _in_inheritable_threads(work)
    else:
        for one in work:
            one()


def _in_inheritable_threads(work: Sequence[Callable[[], None]]) -> None:
    from pyspark import InheritableThread

    errors: list[BaseException] = []

    def noted(one: Callable[[], None]) -> None:
        try:
            one()
        except Exception as error:
            errors.append(error)

    threads = [InheritableThread(target=partial(noted, one)) for one in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
