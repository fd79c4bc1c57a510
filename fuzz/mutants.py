"""Guards of the library, each switched off: what shows that the fuzzer can find something.

A mutant is found if a job fails under it that is right without it. To add one, write a function that builds the guard
the wrong way, and name what it replaces: the module, and the name in it, with a dot where it is a method.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any, NamedTuple

import msgspec

from mapstate.aggregators.columns import column_of
from mapstate.aggregators.tiles import TileFields
from mapstate.protocol.ledger_record import AlreadyCommitted, OpenRequest, format_of
from mapstate.protocol.rolling import Tiling
from mapstate.protocol.windows import NEVER
from mapstate.serializers.tiles import Tiles, Undo, undo_of
from mapstate.spark.driver.query_run import QueryRun
from mapstate.spark.driver.window_rows import TILE

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
    return lambda _access, default, _batch_id=None: QueryRun(default, None)


def _pool_by_hand(run: Any) -> Any:
    def known_by_thread(access: Any, default: str, batch_id: int | None = None) -> QueryRun:
        is_own = access.context.getLocalProperty("sql.streaming.queryId") is not None
        return run(access, default, batch_id) if is_own else QueryRun(default, None)

    return known_by_thread


def _part_kept(_take_back: Any) -> Any:
    return lambda _ledgers, _batch_id, **_named: True


def _mark_not_checked(begin: Any) -> Any:
    def without_marks(ledger: Any, *arguments: Any, **named: Any) -> Any:
        marked = {
            name: msgspec.structs.replace(one, is_part=False)
            for name in ("last_commit", "in_flight")
            if (one := getattr(ledger, name)) is not None
        }
        return begin(msgspec.structs.replace(ledger, **marked), *arguments, **named)

    return without_marks


def _gaps_of_a_run_accepted(begin: Any) -> Any:
    def accepting(ledgers: Any, batch_id: int, plan: Any = None) -> Any:
        given = [ledger.on_gap for ledger in ledgers.ledgers]
        for ledger in ledgers.ledgers:
            ledger.on_gap = "accept"
        try:
            return begin(ledgers, batch_id, plan)
        finally:
            for ledger, on_gap in zip(ledgers.ledgers, given, strict=True):
                ledger.on_gap = on_gap

    return accepting


def _null_struct_of_nulls(_fields_of: Any) -> Any:
    def fields(struct: Any) -> dict[str, Any]:
        names = struct.dataType.names
        return {f"{struct.name}_{name}": column_of(struct.name).getField(name) for name in names}

    return fields


def _ttl_left_out(open_ledger: Any) -> Any:
    def opened(ledger: Any, opening: OpenRequest) -> Any:
        is_left_out = ledger is not None and opening.ttl is None
        return open_ledger(msgspec.structs.replace(ledger, has_had_ttl=False) if is_left_out else ledger, opening)

    return opened


def _gaps_accepted(begin: Any) -> Any:
    def accepting(ledger: Any, session: str, batch_id: int, _on_gap: str = "", nonce: str = "", **named: Any) -> Any:
        return begin(ledger, session, batch_id, "accept", nonce, **named)

    return accepting


def _adopted_unasked(with_owner: Any) -> Any:
    def adopting(ledger: Any, opening: OpenRequest) -> Any:
        asked = "adopt_unchecked" if opening.on_new_owner == "refuse" else opening.on_new_owner
        return with_owner(ledger, msgspec.structs.replace(opening, on_new_owner=asked))

    return adopting


def _never_stale(_already_committed: Any) -> Any:
    return lambda ledger, batch_id, _due: AlreadyCommitted(batch_id, ledger.last_commit, ledger.view())


def _null_as_no_text(_around_nulls: Any) -> Any:
    def as_empty(column: Any, to_text: Any) -> Any:
        return [("", text) for text in to_text(["" if value is None else value for value in column])]

    return as_empty


def _only_tiles_with_rows(_undo_of: Any) -> Any:
    def undo(before: Tiles, after: Tiles) -> Undo:
        found = undo_of(before, after)
        kept = [at for at, start in enumerate(found.back.starts) if start in after.starts]
        columns = [[column[at] for at in kept] for column in found.back.columns]
        return Undo(found.gone, Tiles([found.back.starts[at] for at in kept], columns))

    return undo


def _folded_by_own_rows(make_fields: Any) -> Any:
    class Fields(TileFields):
        kept: Any = None

        def combine_all(self, bases: Any, partials: Any) -> Any:
            definition = self.kept.definition
            newest = max(start for partial in partials for start in partial.starts)
            due = newest - (definition.lag + definition.retention) // definition.unit
            given = self._tiling
            self._tiling = Tiling(definition, max(self.kept.horizon, due))
            try:
                return super().combine_all(bases, partials)
            finally:
                self._tiling = given

    def made(state: Any, record: Any) -> Any:
        fields = make_fields(state, record)
        fields.__class__, fields.kept = Fields, record.rolling
        return fields

    return made


def _rows_as_they_come(_of: Any) -> Any:
    def of(grouping: Any, batch_df: Any) -> Any:
        if grouping.partials is not None:
            return batch_df.groupBy(*grouping.keys, TILE).agg(*grouping.values).repartition(1)
        return batch_df.select(*grouping.keys, TILE, *grouping.values).repartition(1)

    return of


def _late_for_the_horizon(_first_time: Any) -> Any:
    return lambda record: NEVER if record.horizon == NEVER else record.definition.time(record.horizon)


def _beside_a_seed(begin: Any) -> Any:
    def begun(ledger: Any, *arguments: Any, **named: Any) -> Any:
        own = msgspec.structs.replace(
            ledger, seed=None, format=format_of(ledger.windows, ledger.changes, ledger.rolling)
        )
        return begin(own, *arguments, **named)

    return begun


def _of_the_name_itself(_seen: Any) -> Any:
    return lambda reader: reader._versions[reader._state]


_BATCH, _REPEATS = "mapstate.spark.driver.batch", "mapstate.spark.driver.repeats"
_LISTS, _ROLLING = "mapstate.maps.operator_list", "mapstate.spark.driver.rolling"
_TRANSITIONS, _OPENING = "mapstate.protocol.transitions", "mapstate.protocol.opening"
_BLOCKS = "mapstate.serializers.blocks"


def _now_as_before(record: Any) -> Any:
    def without_before(codec: Any, name: Any, data: Any) -> Any:
        txid, now, _ = record(codec, name, data)
        return txid, now, now

    return without_before


def _none_before(written: Any) -> Any:
    return lambda *arguments, **named: [
        (key, (txid, now, None)) for key, (txid, now, _) in written(*arguments, **named)
    ]


MUTANTS = [
    Mutant(
        "every call is taken for one by hand",
        "mapstate.spark.driver.access",
        "ClassicAccess.run",
        _every_call_by_hand,
    ),
    Mutant(
        "a call from a pool's thread is taken for one by hand",
        "mapstate.spark.driver.access",
        "ClassicAccess.run",
        _pool_by_hand,
    ),
    Mutant(
        "a second part of a batch is taken for its replay",
        "mapstate.spark.driver.calls",
        "Calls.note_second",
        _always(None),
    ),
    Mutant("a part that counts is not taken back", "mapstate.protocol.ledger", "take_back", _part_kept),
    Mutant("a batch that counts in part is taken for whole", _TRANSITIONS, "begin", _mark_not_checked),
    Mutant(
        "batches that a run left out are accepted",
        "mapstate.protocol.ledgers",
        "Ledgers.begin",
        _gaps_of_a_run_accepted,
    ),
    Mutant("adopt compares nothing", "mapstate.protocol.following", "check_start", _always(None)),
    Mutant("a number by hand that counts is skipped", _REPEATS, "Repeat.check_by_hand", _always(None)),
    Mutant("the rows of a batch that comes again are not counted", _REPEATS, "Repeat.has_more", _always(False)),
    Mutant(
        "a null struct is a struct of nulls",
        "mapstate.spark.streams.grouped",
        "_fields_of",
        _null_struct_of_nulls,
    ),
    Mutant("a ttl that is left out is accepted", "mapstate.protocol.ledgers", "open_ledger", _ttl_left_out),
    Mutant("missing batches are accepted", _TRANSITIONS, "begin", _gaps_accepted),
    Mutant("a batch that was planned anew is a replay", _TRANSITIONS, "is_replanned", _always(False)),
    Mutant("a batch may start anywhere", _TRANSITIONS, "check_follows", _always(None)),
    Mutant("a batch that is older than the state is a replay", _TRANSITIONS, "_already_committed", _never_stale),
    Mutant("a state is adopted by every query, from any start", _OPENING, "_with_owner", _adopted_unasked),
    Mutant("an undo has only the tiles that got rows", "mapstate.serializers.tiles", "undo_of", _only_tiles_with_rows),
    Mutant("an attempt folds by its own rows", _ROLLING, "RollingState.make_fields", _folded_by_own_rows),
    Mutant("a restart may have any window more", "mapstate.protocol.rolling", "RollingRecord.missing", _always([])),
    Mutant("the rows of a key are no neighbours", _ROLLING, "RollingGrouping.of", _rows_as_they_come),
    Mutant(
        "rows before the horizon are set aside",
        "mapstate.protocol.rolling",
        "RollingRecord.first_time",
        _late_for_the_horizon,
    ),
    Mutant("a batch begins beside a seed", _TRANSITIONS, "begin", _beside_a_seed),
    Mutant("any state is seeded", "mapstate.spark.driver.seeding", "why_not_apart", _always(())),
    Mutant("a correction is applied again", "mapstate.spark.driver.correcting", "_listed", _always(None)),
    Mutant("a key that is to be forgotten stays", _LISTS, "ListedKeys.__contains__", _always(False)),
    Mutant("a reader asks no alias", "mapstate.reader.aliased", "AliasReader._seen", _of_the_name_itself),
    Mutant("what an orphaned attempt wrote to a block counts", _BLOCKS, "BlockCodec._record", _now_as_before),
    Mutant("new values that are read back replace none", _BLOCKS, "BlockCodec.written", _none_before),
    Mutant("a null in a key is an empty text", "mapstate.keys", "_around_nulls", _null_as_no_text),
]
"""A guard that is built anew gets its mutant in the same commit."""
