"""The fields of a state with rolling windows: what a batch makes of a key's tiles, and what readers see of them.

See `mapstate.protocol.rolling` and `mapstate.serializers.tiles`.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from itertools import compress, count, groupby
from operator import itemgetter, ne
from typing import Any

from mapstate.aggregators.aggregator import Aggregator, CombinerAggregator, NativeCombiner
from mapstate.aggregators.bulk_tiles import FEWEST, ManyTiles, is_packed, numpy
from mapstate.aggregators.fields import NULL, Fields
from mapstate.aggregators.folding import adds_up, called, checked_sum, folded
from mapstate.aggregators.sketches import SKETCHES
from mapstate.errors import DataError, ValueOverflowError
from mapstate.protocol.rolling import MOST_STORED, RollingDefinition, Tiling, columns_of
from mapstate.schema import Field
from mapstate.serializers.packed import number_at, with_number
from mapstate.serializers.tiles import BASE, Edit, StoredTiles, Tiles, tiles_of

_Join = tuple[list[Any], int, Tiles, int]
"""The columns of a value and the place of a tile, and a partial and the place of the tile that is joined to it."""


_Moves = tuple[list[int], list[Any], list[int]]
_MOST_REMEMBERED = 256
"""The most starts of a value whose tiles a task remembers, and the most ends of which a reader knows the plan."""


class TileFields(Fields):
    """The fields of a task: its values and its partials are `Tiles`. ``tiling`` is that of the attempt's horizon."""

    def __init__(self, fields: Sequence[Field], aggregators: Mapping[str, Aggregator], tiling: Tiling) -> None:
        super().__init__(fields, aggregators)
        self._tiling = tiling
        self._keeps_base = tiling.tiles([BASE]) == [BASE]
        self._kinds = [field.type for field in fields]
        self._moves: dict[bytes, _Moves] = {}

    def combine_all(self, bases: list[Any], partials: list[Any]) -> list[Any]:
        """The new tiles of a chunk: the old ones folded, and the batch's added.

        Raises ValueOverflowError, and AggregatorError if a user's aggregator raised.
        """
        joins: list[_Join] = []
        pairs = zip(bases, partials, strict=True)
        out = [self._edited(base, new, joins) or self._placed(tiles_of(base), new, joins) for base, new in pairs]
        for number, (field, aggregator) in enumerate(zip(self.fields, self.aggregators, strict=True)):
            old = [number_at(columns[number], i) for columns, i, _, _ in joins]
            new = [partial.columns[number][place] for _, _, partial, place in joins]
            if isinstance(aggregator, NativeCombiner):
                both = aggregator.combine_all(old, new) if joins else []
            else:
                both = [folded(aggregator, field.type, pair) for pair in zip(old, new, strict=True)]
            for (columns, i, _, _), value in zip(joins, both, strict=True):
                columns[number] = with_number(columns[number], i, i + 1, value)
        return [value.done() if type(value) is Edit else value for value in out]

    def _edited(self, before: Any, partial: Tiles, joins: list[_Join]) -> Edit | None:
        """A packed value with the batch's tiles, and those joined that no window tells apart any more.

        None where a loop over all tiles has to: where the base changes, and where tiles go or cannot be joined.
        """
        if type(before) is not StoredTiles:
            return None
        added = partial.starts
        units, targets, moving = self._moves.get(before.starts) or self._moves_of(before)
        changes_base = BASE in (*targets[:1], *added[:1]) or (before.base is not None and not self._keeps_base)
        if changes_base or targets[:1] in ([], [None]) or len(units) + len(added) >= MOST_STORED:
            return None
        edit, first = Edit(before, units), len(units)
        for i in moving:
            if i < first:
                first, end = bisect_left(targets, targets[i]), bisect_right(targets, targets[i])
                parts = [[number_at(column, place) for place in range(first, end)] for column in edit.columns]
                try:
                    values = [*map(folded, self.aggregators, self._kinds, parts)]
                except DataError:
                    return None
                edit.replace(first, end, targets[i], values)
        for place, start in enumerate(added):  # ascending, so no place found before moves
            i = bisect_left(edit.units, start)
            if edit.units[i : i + 1] == [start]:
                edit.note(start)
                joins.append((edit.columns, i, partial, place))
            else:
                edit.replace(i, i, start, [column[place] for column in partial.columns])
        return edit

    def _moves_of(self, before: StoredTiles) -> _Moves:
        """The tiles of a value, the tile of each by now, and the places of those that move, from the last on.

        Remembered, because the tiles of keys that have rows all the time begin at the same times.
        """
        if len(self._moves) >= _MOST_REMEMBERED:
            self._moves.clear()
        units = before.units()
        targets: list[Any] = self._tiling.tiles(units)
        moves = units, targets, [*reversed([*compress(count(), map(ne, targets, units))])]
        self._moves[before.starts] = moves
        return moves

    def _placed(self, before: Tiles | None, partial: Tiles, joins: list[_Join]) -> Tiles:
        if before is None:
            return self._checked(partial)
        after, put_off = self._folded(before)
        for place, start in enumerate(partial.starts):  # as above
            i = bisect_left(after.starts, start)
            if i < len(after.starts) and after.starts[i] == start:
                joins.append((after.columns, i, partial, place))
                continue
            after.starts.insert(i, start)
            for column, added in zip(after.columns, partial.columns, strict=True):
                column.insert(i, added[place])
        return self._checked(after, put_off)

    def joined(self, units: Tiles) -> Tiles:
        """The tiles of a key, of the units of its history. Raises ValueOverflowError where they are too many."""
        return self._checked(*self._folded(units))

    def _folded(self, before: Tiles) -> tuple[Tiles, DataError | None]:
        """A copy, with those tiles joined that no window tells apart any more, and without those that none has.

        Tiles whose values cannot be joined stay as they are, which is never wrong: the read that joins them raises. The
        error is returned, too.
        """
        targets = self._tiling.tiles(before.starts)
        if targets == before.starts:
            return Tiles(list(before.starts), [list(column) for column in before.columns]), None
        put_off: DataError | None = None
        starts: list[int] = []
        columns: list[list[Any]] = [[] for _ in before.columns]
        for target, places in groupby(enumerate(targets), itemgetter(1)):
            if target is None:
                continue
            (first, _), *others = places
            end = first + 1 + len(others)
            parts = [column[first:end] for column in before.columns]
            kept = [target]
            if others:
                try:
                    parts = [
                        [folded(aggregator, field.type, part)]
                        for aggregator, field, part in zip(self.aggregators, self.fields, parts, strict=True)
                    ]
                except DataError as error:
                    kept, put_off = before.starts[first:end], error
            starts += kept
            for column, part in zip(columns, parts, strict=True):
                column.extend(part)
        return Tiles(starts, columns), put_off

    def _checked(self, tiles: Tiles, put_off: DataError | None = None) -> Tiles:
        if len(tiles.starts) <= MOST_STORED:
            return tiles
        why = (
            "Its rows are of too many times: give them in the order of their times, in smaller batches, with a new "
            "checkpoint. Or the watermark stands, so that old tiles are not joined: mapstate ledger shows it, mapstate "
            "advance --to moves it"
            if put_off is None
            else f"Old tiles cannot be joined: {put_off.message}"
        )
        raise ValueOverflowError(
            f"a key has rows in {len(tiles.starts)} tiles, and at most {MOST_STORED} fit: nothing of this batch "
            f"counts. {why}. See docs/features.md#history-first"
        )


def assembled(fields: Fields, columns: list[list[list[Any]]]) -> list[list[Any]]:
    """The partials of each field, from its native columns."""
    natives: list[Any] = fields.aggregators
    return [native.assemble(column) for native, column in zip(natives, columns, strict=True)]


class Answers:
    """What readers see of tiles: a column for each field and window, as plain values that `fields` shows.

    ``joining`` are the fields of `mapstate.aggregators.results.joins_of`, ``columns`` those to make, None for all;
    names that there are not are left out.
    """

    def __init__(self, joining: Fields, definition: RollingDefinition, columns: Sequence[str] | None = None) -> None:
        self._definition = definition
        places = {
            name: place for name, *place in columns_of([field.name for field in joining.fields], definition.windows)
        }
        chosen = [name for name in dict.fromkeys(places if columns is None else columns) if name in places]
        fields = [joining.fields[places[name][0]]._replace(name=name) for name in chosen]
        self.fields = Fields(fields, {name: _shown(joining.aggregators[places[name][0]]) for name in chosen})
        self._is_single = len(chosen) == 1
        self._nothing = [_nothing(joining.aggregators[places[name][0]]) for name in chosen]
        used = {place for _, place in map(places.__getitem__, chosen)}
        windows = definition.windows
        self._windows = [windows[place] for place in sorted(used)]
        order = {place: step for step, place in enumerate(sorted(used))}
        wanted: dict[int, dict[int, int]] = {}  # of a field: where the answer for each window goes
        for out, name in enumerate(chosen):
            field, place = places[name]
            wanted.setdefault(field, {})[order[place]] = out
        self._wanted = [(i, joining.aggregators[i], joining.fields[i].type, outs) for i, outs in wanted.items()]
        self._plans: dict[tuple[int, ...], list[_Plan]] = {}
        self._of_ends: dict[int, tuple[list[int], list[_Plan]]] = {}

    def values(self, found: Sequence[Any], ends: Sequence[tuple[int, int]]) -> list[Any]:
        """A value for each committed one: of the windows that end at its end, with the rows before its second number.

        Raises ValueOverflowError, and AggregatorError if a user's aggregator raised.
        """
        if not self._nothing:  # only the keys are asked for
            return [None if value is None else () for value in found]
        out: list[Any] = [None] * len(found)
        many = [i for i, value in enumerate(found) if is_packed(value)] if len(found) >= FEWEST else []
        columns, done = self._at_once([found[i] for i in many], [ends[i] for i in many])
        left: Iterable[int] = range(len(found))
        if len(columns) == len(self._nothing):
            rows = zip(*(columns[place] for place in range(len(columns))), strict=True)
            for i, row in zip(many, rows, strict=True):
                out[i] = row
            left = sorted(set(left) - set(many))
        places = {i: place for place, i in enumerate(many)} if done else {}
        for i in left:
            value, (end, until) = found[i], ends[i]
            if value is None:
                continue
            lows, plan = self._of_ends.get(end) or self._plan(end)
            if i in places:
                plan = [step for step in plan if step[0] not in done]
            answer = self._of(tiles_of(value), lows, plan, until)
            if i in places:
                for place, column in columns.items():
                    answer[place] = column[places[i]]
            out[i] = tuple(answer)
        if self._is_single:
            return [None if values is None else NULL if values[0] is None else values[0] for values in out]
        return out

    def _at_once(self, values: Sequence[Any], ends: Sequence[tuple[int, int]]) -> tuple[dict[int, list[Any]], set[int]]:
        """Columns for packed values, by their places, and the fields of which they are; none where a loop has to."""
        np = numpy() if values else None
        tiles = None if np is None else ManyTiles(np, values)
        if tiles is None or not tiles.fits:
            return {}, set()
        if ends.count(ends[0]) == len(ends):
            ends = ends[:1]
        lows = [[self._definition.low(window, end) for end, _ in ends] for window in self._windows]
        cuts = tiles.cuts([*lows, [until for _, until in ends]])
        columns: dict[int, list[Any]] = {}
        done: set[int] = set()
        for i, aggregator, kind, outs in self._wanted:
            with_base = [step for step, window in enumerate(outs) if not self._windows[window].length]
            nothing = self._nothing[next(iter(outs.values()))]
            joined = tiles.joined((i, aggregator, kind), cuts[[*outs]], cuts[-1], with_base, nothing)
            if joined is not None:
                done.add(i)
                columns |= zip(outs.values(), joined, strict=True)
        return columns, done

    def _plan(self, end: int) -> tuple[list[int], list[_Plan]]:
        """Where the windows begin, from the last beginning on, and for each field where their answers go."""
        lows = [self._definition.low(window, end) for window in self._windows]
        order = tuple(sorted(range(len(lows)), key=lows.__getitem__, reverse=True))
        if order not in self._plans:
            self._plans[order] = [
                (i, aggregator, kind, adds_up(aggregator, kind), [outs.get(step) for step in order])
                for i, aggregator, kind, outs in self._wanted
            ]
        if len(self._of_ends) >= _MOST_REMEMBERED:
            self._of_ends.clear()
        self._of_ends[end] = planned = [lows[step] for step in order], self._plans[order]
        return planned

    def _of(self, tiles: Tiles, lows: Sequence[int], plan: Sequence[_Plan], until: int) -> list[Any]:
        """Each tile is looked at once."""
        starts, columns = tiles
        answer = list(self._nothing)
        high = bisect_left(starts, until)
        cuts = [bisect_left(starts, low, 0, high) for low in lows]
        for i, aggregator, kind, is_sum, outs in plan:
            column = columns[i]
            if is_sum and None not in column:
                total, top = 0, high
                for cut, place in zip(cuts, outs, strict=True):
                    total += sum(column[cut:top])
                    top = cut
                    if place is not None and cut < high:
                        answer[place] = checked_sum(aggregator, total)
                continue
            value, top = None, high
            for cut, place in zip(cuts, outs, strict=True):
                if cut < top:
                    part = folded(aggregator, kind, column[cut:top])
                    value = part if value is None else folded(aggregator, kind, (part, value))
                    top = cut
                if place is not None and cut < high:
                    answer[place] = value
        return answer


_Plan = tuple[int, Any, str, bool, list[int | None]]
"""Of a field: its place, its aggregator and type, whether its values are integers to add up, and where answers go."""


class _OfWindow(Aggregator):
    """Shows the values of a user's own aggregator, and nothing for a window without a row."""

    def __init__(self, own: Aggregator) -> None:
        self._own = own

    def result(self, value: Any) -> Any:
        return None if value is None else called(self._own, self._own.result, value)

    def result_type(self, value_type: str) -> str:
        return self._own.result_type(value_type)

    def describe(self) -> str:
        return self._own.describe()


def _shown(aggregator: Aggregator) -> Aggregator:
    return aggregator if type(aggregator).__module__.startswith("mapstate.") else _OfWindow(aggregator)


def _nothing(aggregator: Aggregator) -> Any:
    """The value of no rows. A sketch shows null of none."""
    return (
        aggregator.zero()
        if isinstance(aggregator, CombinerAggregator) and not isinstance(aggregator, SKETCHES)
        else None
    )
