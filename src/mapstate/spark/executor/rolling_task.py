"""What runs on an executor for a state with rolling windows: a key's rows, tile by tile, into its record."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from mapstate.aggregators.folding import Folding, check_type
from mapstate.aggregators.tiles import TileFields, assembled
from mapstate.keys import StoreKey
from mapstate.maps import MapState
from mapstate.maps.serialized import Room
from mapstate.protocol.rolling import MOST_STORED
from mapstate.serializers.tiles import Tiles
from mapstate.spark.executor.task import Chunk, columns_to_python, slices
from mapstate.spark.executor.window_task import TimedTask, WindowReport

_ROWS = 10_000

_Part = tuple[Sequence[StoreKey], list[int], list[list[Any]], list[int]]
"""Of each tile of some keys: the key, the tile, the values by field, and the number of rows."""


class RollingTask(TimedTask):
    """A task of a state with rolling windows.

    Behind the key columns comes the tile. The rows of a key are neighbours, in the order of their tiles; where they are
    aggregated, there is one for each tile. ``joins``: these are units, and the task joins them into the tiles.
    """

    fields: TileFields

    def __init__(self, *, joins: bool = False, **settings: Any) -> None:
        super().__init__(beside=1, place=len(settings["keys"]), **settings)
        self.in_tiles = True
        self.joins = joins

    def note(self, found: WindowReport, outside: int, beside: Sequence[pa.Array], places: pa.Array) -> None:
        found.late += outside
        found.newest = _latest(found.newest, beside[0].filter(pc.is_valid(places)))
        if outside:
            found.beyond = _latest(found.beyond, beside[0].filter(pc.is_null(places)))

    def native_chunks(self, batches: Iterator[pa.RecordBatch], room: Room) -> Iterator[Chunk]:
        return self._by_key(self._native_parts(batches), room)

    def folded_chunks(self, batches: Iterator[pa.RecordBatch], room: Room, state: MapState[Any]) -> Iterator[Chunk]:  # noqa: ARG002
        return self._by_key(self._folded_parts(batches), room)

    def _columns(self, batches: Iterator[pa.RecordBatch], names: Sequence[str]) -> Iterator[list[Any]]:
        """The rows of each part of the batches as columns of Python, the keys as one."""
        codec, width = self.key_codec(), len(self.keys)
        for part in (part for batch in batches for part in slices(batch, lambda: _ROWS, self.spec.chunk_bytes)):
            columns = columns_to_python(part.columns, names)
            yield [codec.encode_columns(columns[:width], part.num_rows), *columns[width:]]

    def _native_parts(self, batches: Iterator[pa.RecordBatch]) -> Iterator[_Part]:
        sizes = self.partials or ()
        names = [*(key.name for key in self.keys), "tile"]
        for field, size in zip(self.fields.fields, sizes, strict=True):
            names += [field.name] * size
        for texts, tiles, *partials, rows in self._columns(batches, [*names, "rows"]):
            per_field, i = [], 0
            for size in sizes:
                per_field.append(partials[i : i + size])
                i += size
            yield texts, tiles, assembled(self.fields, per_field), rows

    def _folded_parts(self, batches: Iterator[pa.RecordBatch]) -> Iterator[_Part]:
        """Raw rows: those of a tile are folded in Python."""
        names = list(self.rows_of)
        place: tuple[StoreKey, int] | None = None
        foldings: list[Folding] = []
        count = 0
        for texts, tiles, *columns in self._columns(batches, [*(key.name for key in self.keys), "tile", *names]):
            for text, tile, *values in zip(texts, tiles, *columns, strict=True):
                if (text, tile) != place:
                    if place is not None:
                        yield self._tile(place, foldings, count)
                    place, foldings, count = (text, tile), self.fields.start(), 0
                row = dict(zip(names, values, strict=True))
                for folding in foldings:
                    folding.add(row)
                count += 1
        if place is not None:
            yield self._tile(place, foldings, count)

    def _tile(self, place: tuple[StoreKey, int], foldings: Sequence[Folding], rows: int) -> _Part:
        values = []
        for folding, field, aggregator in zip(foldings, self.fields.fields, self.fields.aggregators, strict=True):
            partial = folding.partial()
            value = check_type(partial.onto(None), field.type, aggregator) if isinstance(partial, Folding) else partial
            values.append([value])
        return [place[0]], [place[1]], values, [rows]

    def _by_key(self, parts: Iterable[_Part], room: Room) -> Iterator[Chunk]:
        """Chunks of complete keys: a part may begin and end inside of a key."""
        keys: list[StoreKey] = []
        partials: list[Tiles] = []
        rows = 0
        for texts, tiles, columns, counts in parts:
            for text, places in groupby(range(len(texts)), texts.__getitem__):
                first, *others = places
                end = first + 1 + len(others)
                if keys and keys[-1] == text:
                    starts, held = partials[-1]
                    starts.extend(tiles[first:end])
                    for column, more in zip(held, columns, strict=True):
                        column.extend(more[first:end])
                    self._join_last(partials, MOST_STORED)
                else:
                    self._join_last(partials)
                    if len(keys) >= room.keys:
                        yield keys, partials, rows, ()
                        keys, partials, rows = [], [], 0
                    keys.append(text)
                    partials.append(Tiles(tiles[first:end], [column[first:end] for column in columns]))
                rows += sum(counts[first:end])
        self._join_last(partials)
        if keys:
            yield keys, partials, rows, ()

    def _join_last(self, partials: list[Tiles], most: int = 0) -> None:
        """Joins the units of the last key, where they are more than ``most``: a busy key has years of them."""
        if self.joins and partials and len(partials[-1].starts) > most:
            partials[-1] = self.fields.joined(partials[-1])


def _latest(known: int | None, times: pa.Array) -> int | None:
    latest = pc.max(times).as_py()
    return known if latest is None else latest if known is None else max(known, latest)
