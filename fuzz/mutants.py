"""Guards of the library, each switched off: what shows that the fuzzer can find something.

A mutant is found if a job fails under it that is right without it. To add one, write a function that builds the guard
the wrong way, and name what it replaces: the module, and the name in it, with a dot where it is a method.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from typing import Any, NamedTuple

import msgspec

from mapstate.protocol.ledger_record import AlreadyCommitted, OpenRequest
from mapstate.spark.driver.access_interface import QueryRun

__all__ = ["MUTANTS", "Mutant"]


class Mutant(NamedTuple):
    """A guard that is off: ``built`` gets what stands at ``target`` and returns what takes its place meanwhile."""

    name: str
    module: str
    target: str
    built: Callable[[Any], Any]

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Within, the guard is off."""
        *parents, name = self.target.split(".")
        owner: Any = import_module(self.module)
        for parent in parents:
            owner = getattr(owner, parent)
        guard = getattr(owner, name)
        setattr(owner, name, self.built(guard))
        try:
            yield
        finally:
            setattr(owner, name, guard)


def _always(value: Any) -> Callable[[Any], Any]:
    return lambda _guard: lambda *_arguments, **_named: value


def _every_call_by_hand(_run: Any) -> Any:
    return lambda _access, default: QueryRun(default, None)


def _second_part_taken_for_a_replay(repeat: Any) -> Any:
    def without_run(driver: Any, batch: Any, ledgers: Any, done: Any) -> None:
        repeat(driver, replace(batch, run=batch.run._replace(run_id=None)), ledgers, done)

    return without_run


def _gaps_accepted(begin: Any) -> Any:
    def accepting(ledger: Any, session: str, batch_id: int, _on_gap: str = "", nonce: str = "", **named: Any) -> Any:
        return begin(ledger, session, batch_id, "accept", nonce, **named)

    return accepting


def _adopted_unasked(with_owner: Any) -> Any:
    def adopting(ledger: Any, opening: OpenRequest) -> Any:
        asked = "adopt" if opening.on_new_owner == "refuse" else opening.on_new_owner
        return with_owner(ledger, msgspec.structs.replace(opening, on_new_owner=asked))

    return adopting


def _never_stale(_already_committed: Any) -> Any:
    return lambda ledger, batch_id, _due: AlreadyCommitted(batch_id, ledger.last_commit, ledger.view())


def _null_as_no_text(_around_nulls: Any) -> Any:
    def as_empty(column: Any, to_text: Any) -> Any:
        return [("", text) for text in to_text(["" if value is None else value for value in column])]

    return as_empty


_TRANSITIONS, _OPENING = "mapstate.protocol.transitions", "mapstate.protocol.opening"

MUTANTS = [
    Mutant(
        "every call is taken for one by hand",
        "mapstate.spark.driver.access",
        "_ClassicAccess.run",
        _every_call_by_hand,
    ),
    Mutant(
        "a second part of a batch is taken for its replay",
        "mapstate.spark.driver.batch",
        "BatchDriver._repeat",
        _second_part_taken_for_a_replay,
    ),
    Mutant("missing batches are accepted", _TRANSITIONS, "begin", _gaps_accepted),
    Mutant("a batch that was planned anew is a replay", _TRANSITIONS, "is_replanned", _always(False)),
    Mutant("a batch may start anywhere", _TRANSITIONS, "check_follows", _always(None)),
    Mutant("a batch that is older than the state is a replay", _TRANSITIONS, "_already_committed", _never_stale),
    Mutant("a state is adopted by every query", _OPENING, "_with_owner", _adopted_unasked),
    Mutant("a null in a key is an empty text", "mapstate.keys", "_around_nulls", _null_as_no_text),
]
"""A guard that is built anew gets its mutant in the same commit."""
