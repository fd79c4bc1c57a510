"""What an error advises, done literally, until the job ends right."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from mapstate.backends import resolve
from mapstate.errors import DataError, MapStateError, StateNotFoundError, StoreUnavailableError, UsageError
from mapstate.operations.drop import drop
from mapstate.protocol.ledger import Ledger

if TYPE_CHECKING:
    from fuzz.steps import Start
    from fuzz.world import Query, World

__all__ = ["ADVICE", "Advice", "settle"]

UNION, WRAP = "union the parts", "with_empty_batches, and mapstate rewind"
UNION_AND_RESET = "union the parts, reset and replay"
OF_ITS_SESSION = "toArrow() and createDataFrame of its session"
KEPT_WINDOWS, OTHER_STATE = "the windows that the state has", "another state, with a new checkpoint"
MOST_ADVICE = 6
"""Pieces of advice that one start may need."""


class Advice(NamedTuple):
    """What an operator reads in a message, and does before the next start.

    ``is_possible`` here: a checkpoint may be lost for good. ``do`` may raise MapStateError, which says that it is not.
    """

    name: str
    pattern: str
    do: Callable[[World, Query], None]
    is_possible: Callable[[World, Query], bool] = lambda _world, _query: True


def _united(_: World, query: Query) -> None:
    query.changes |= {"parts": 1, "united": False}


def _united_and_reset(world: World, query: Query) -> None:
    _united(world, query)
    _reset_and_replay(world, query)


def _wrapped(world: World, query: Query) -> None:
    query.changes |= {"wrapped": True, "anew": False}  # the wrapper gets the states, so they are built once
    try:
        _rewind_each(world, query)
    except StateNotFoundError:
        _reset_and_replay(world, query)


def _grouped_by_fields(_: World, query: Query) -> None:
    query.by_fields = True


def _of_its_session(_: World, query: Query) -> None:
    query.changes |= {"through": OF_ITS_SESSION}


def _with_ttl(seconds: int) -> Callable[[World, Query], None]:
    def start_with_it(_: World, query: Query) -> None:
        query.options = query.options | {"ttl": seconds}

    return start_with_it


def _put_back_newer(_: World, query: Query) -> None:
    query.put_back_newer()


def _rewind_each(world: World, query: Query) -> None:
    for state in query.state_names:
        world.rewind(query, state)


def _adopt_at_the_end(world: World, query: Query) -> None:
    offsets = world.offsets(query)
    query.lose()
    query.starts_at = offsets
    query.options = {"on_new_owner": "adopt"}


def _adopt_unchecked(_: World, query: Query) -> None:
    query.options = {"on_new_owner": "adopt_unchecked"}


def _reset_and_replay(world: World, query: Query) -> None:
    query.options = {"on_new_owner": "reset"}
    for state in query.states:
        if state.type == "non_transactional":
            for name in query.state_names:
                with suppress(StateNotFoundError):
                    drop(world.url, name, force=True)
            query.options = {}
            break
    _forget(world, query)


def _forget(world: World, query: Query) -> None:
    """Nothing counts: the state and the checkpoint are new."""
    query.lose()
    query.kept_frames.clear()
    query.inexact = False
    names = {state.name for state in query.states}
    world.forgotten = [one for one in world.forgotten if one.state not in names]
    if query is world.queries[0]:
        world.by_hand, world.expired, world.corrections = [], 0, []


def _windows_of_the_ledger(world: World, query: Query) -> None:
    """Declares the windows that the ledger has, as the message lists them."""
    for state in query.states:
        ledger = Ledger(resolve(world.url).open(state.name), state.name).load()
        if state.rolling is not None and ledger is not None and ledger.rolling is not None:
            kept = state.rolling.with_windows_of(ledger.rolling.definition)
            query.declare([replace(state, rolling=kept)])


def _name_another_state(world: World, query: Query) -> None:
    _forget(world, query)
    query.name_others()
    if world.store_copy is not None:
        world.store_copy = world.store_copy._replace(by_hand=[], corrections=[], forgotten=[])


def _plain_function(world: World, query: Query) -> None:
    if query.kept_frames:  # rows that a function keeps for a later batch are lost with its run
        _reset_and_replay(world, query)
    query.changes |= {"parts": 1, "threads": "", "through": "", "group": "", "around": "", "gathers": False}


def _seed_again(world: World, query: Query) -> None:
    from fuzz.upkeep import seed

    seed(world, query)


ADVICE = [
    Advice("seed again", "call seed again", _seed_again),
    Advice(KEPT_WINDOWS, "Windows may be left out", _windows_of_the_ledger),
    Advice(OTHER_STATE, "Or name another state, with a new checkpoint", _name_another_state),
    Advice(UNION_AND_RESET, "Union the parts, then reset", _united_and_reset),
    Advice(UNION, "Union the parts", _united),
    Advice(
        WRAP,
        "with_empty_batches",
        _wrapped,
        lambda _, query: query.leaves_out and not query.changes.get("wrapped"),
    ),
    Advice("group by the struct's fields", "group by its fields", _grouped_by_fields),
    Advice("make the frame with the batch's session", "Make it with the rows.sparkSession", _of_its_session),
    Advice("the ttl of before", "Open it with ttl=3600", _with_ttl(3600)),
    Advice("ttl=0", "with ttl=0", _with_ttl(0)),
    Advice(
        "put the newer checkpoint back",
        "(Put|Restore) (back )?the (newer |old )?checkpoint|[Pp]ut the newer checkpoint back",
        _put_back_newer,
        lambda _, query: query.newer is not None,
    ),
    Advice("mapstate rewind", "mapstate rewind", _rewind_each, lambda _, query: query.checkpoint.exists()),
    Advice("stop the other copy", "stop one of them|second copy|newer driver", lambda _world, _query: None),
    Advice(
        "adopt where the state ends",
        "'adopt'|starts? a new checkpoint where the state ends|after-a-restored-checkpoint",
        _adopt_at_the_end,
        lambda world, query: world.offsets(query) is not None,
    ),
    Advice(
        "adopt unchecked",
        "adopt_unchecked",
        _adopt_unchecked,
        lambda world, query: not query.has_committed and not world.counted,
    ),
    Advice("reset and replay", "[Rr]eset|'reset'|new checkpoint|mapstate drop|replay", _reset_and_replay),
]
"""In no order: an operator takes any that is possible."""


def settle(world: World, step: Start) -> None:
    """Start the queries and do what their errors advise, until they end well and the counts are right.

    Raises FailureError, and RefusedError where no advice is left.
    """
    from fuzz.world import FailureError

    followed: dict[tuple[Query, object, str], str] = {}
    has_come = False  # what is wrong in a state that was not called is for the next call to say
    for count in range(MOST_ADVICE):
        failed = world.start(step)
        if failed is None:
            world.note("ended well")
            world.counted = len(world.files)
            for query in world.queries:
                query.options = {}
            try:
                world.check()
            except FailureError:
                if has_come or all(query.was_called for query in world.queries):
                    raise
                has_come = True
                world.note("no state was called: a file comes, so that one is")
                world.add_file_for_all(2 if step.habit.gathers else 1)
                continue
            return
        query, error = failed
        world.note(_told(error))
        if not isinstance(error, MapStateError) and type(error).__name__ != "DiedError":
            raise FailureError("an error of another kind", _told(error)) from error
        state = error.facts.get("state") if isinstance(error, MapStateError) else None
        signature = query, state, f"{type(error).__name__} {re.sub('[0-9a-f-]{36}|[0-9]+', '#', str(error))[:90]}"
        if signature in followed:
            raise FailureError(
                "advice that does not help", f"{followed[signature]!r} led to the same error: {_told(error)}"
            )
        name = _advised(world, query, error, random.Random(f"{world.job.seed} {count} {world.runs}"))
        world.note(f"advice: {name}")
        if not name.startswith("start again"):
            followed[signature] = name
        if step.habit.around == "swallow":
            _rewind_what_was_swallowed(world)
        step = replace(step, fault=None, killed=False, changed=())
    raise FailureError("advice that does not help", f"after {MOST_ADVICE} pieces: {', '.join(followed.values())}")


def _rewind_what_was_swallowed(world: World) -> None:
    """Spark has finished batches whose errors the function swallowed: an operator has seen them in the log."""
    for query in world.queries:
        query.changes |= {"around": ""}
        for state in query.state_names:
            try:
                world.rewind(query, state)
            except StateNotFoundError:  # it never began: rewinding the checkpoint is a new one
                _reset_and_replay(world, query)
                break
            except MapStateError as refusal:
                world.note(f"mapstate rewind: {_told(refusal)}")


def _advised(world: World, query: Query, error: Exception, chance: random.Random) -> str:
    """Do what the error advises; what it was."""
    from fuzz.world import RefusedError

    if not isinstance(error, MapStateError) or isinstance(error, StoreUnavailableError):
        if chance.random() < 0.5:  # the code is repaired before any error of ours says so
            _united(world, query)
            return "start again, and the parts are united"
        return "start again"
    text = str(error)
    possible = [one for one in ADVICE if re.search(one.pattern, text) and one.is_possible(world, query)]
    if any(one.name in (UNION_AND_RESET, UNION, WRAP) for one in possible):
        possible = possible[:1]  # the code is repaired first, whatever else is said
    if any(one.name == KEPT_WINDOWS for one in possible):
        _check_that_windows_differ(world, query, text)
        possible = [one for one in possible if one.name in (KEPT_WINDOWS, OTHER_STATE)]
    chance.shuffle(possible)
    for advice in possible:
        try:
            advice.do(world, query)
        except MapStateError as refusal:
            world.note(f"{advice.name}: {_told(refusal)}")
        else:
            return advice.name
    if isinstance(error, UsageError) and not isinstance(error, DataError):
        _plain_function(world, query)
        return "call the states in the query's own thread, once, with the frame of the batch"
    raise RefusedError(f"no advice that can be done here: {_told(error)}") from error


def _check_that_windows_differ(world: World, query: Query, text: str) -> None:
    """Raises FailureError for a refusal of what can always be changed: lag, retention, a window less."""
    from fuzz.world import FailureError

    for state in query.states:
        ledger = Ledger(resolve(world.url).open(state.name), state.name).load()
        if state.rolling is not None and ledger is not None and ledger.rolling is not None:
            kept = state.rolling.with_windows_of(ledger.rolling.definition)
            if not {*state.rolling.windows} <= {*kept.windows}:
                return
    raise FailureError("refused without need", text)


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:400]}"
