"""Rows of another place in front of a stream's own: what a user says of them, and how they meet batch 0. Driver.

`mapstate.protocol.cuts` has the rules; here Spark counts what a history has.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from mapstate.aggregators.columns import column_of
from mapstate.errors import INSIDE, ConfigurationError, UsageError, check_choice, shown
from mapstate.protocol.cuts import (
    SEED,
    Held,
    Holes,
    Meeting,
    Partition,
    check_meets,
    check_reading,
    check_starts,
    lacks_history,
    starts_of,
    unread,
    without_place,
)
from mapstate.protocol.ledger_record import LedgerRecord, by_partition
from mapstate.spark.driver.access import is_connect

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from mapstate.spec import StateSpec

INTEGERS = ("tinyint", "smallint", "int", "bigint")
PLACES = (("topic", ("string",)), ("partition", INTEGERS), ("offset", INTEGERS))
"""What the columns of a row's place are, with their types."""

_BITS = 15
_CHUNK = 1 << _BITS  # offsets in a bitmap, which is Spark's, of 4 KB
_TOPIC, _PARTITION, _OFFSET, _START = (f"{INSIDE}{name}" for name in ("topic", "partition", "offset", "start"))
_log = logging.getLogger("mapstate")


@dataclass(frozen=True)
class Coordinates:
    """The history has the place of each row in the stream's topics: names of its columns, which Kafka's source has.

    Rows at or above the stream's start are left out. The history has to reach the start in each partition, and has no
    offset below it twice.

    ``topic``, ``partition``, ``offset``  columns of string, integer, and integer
    ``holes``  offsets that may lack below the start: "refused", none; "before", those below the first one of their
               partition, where the history begins later than the topic; "allowed", any, where the topic is compacted or
               has transactions, or rows were filtered. Nothing tells then whether a row is lost there
    """

    topic: str
    partition: str
    offset: str
    holes: Holes = "refused"

    def __post_init__(self) -> None:
        check_choice("holes", self.holes, Holes)

    def names(self) -> tuple[str, str, str]:
        """The columns of topic, partition and offset."""
        return self.topic, self.partition, self.offset


@dataclass(frozen=True)
class StartsAt:
    """The history ends below these offsets, and the stream has to start exactly there. Nothing looks into its rows.

    Of a recount the last batch has to have ended there.

    ``offsets``  by topic and partition, as Kafka's startingOffsets: {"visits": {"0": 4711}}, or its JSON. Of a table
                 the first version or snapshot that the stream reads: {"delta": {"version": 43}} behind ``versionAsOf``
                 42, {"iceberg": {"snapshot": 5014180040331708816}} behind that of its parent
    """

    offsets: Mapping[str, Mapping[str, int]] | str

    def named(self) -> dict[Partition, int]:
        """The offsets by topic and partition. Raises ConfigurationError."""
        given: Any = self.offsets
        try:
            given = json.loads(given) if isinstance(given, str) else json.loads(json.dumps(given))
        except (TypeError, ValueError):
            given = None
        partitions = by_partition(given) if isinstance(given, dict) else None
        if not partitions or min(partitions.values()) < 0:
            raise ConfigurationError(
                'StartsAt has offsets of at least 0 by topic and partition, {"visits": {"0": 4711}}, not '
                f"{shown(self.offsets)}"
            )
        return partitions


@dataclass(frozen=True, eq=False)
class InitialRows:
    """A history from another place than the stream, which `seed` counts in front of the stream's own rows.

    Or of which `correct` computes keys anew, with ``recount=``: then it has all rows that the state counts.

    ``rows``  a DataFrame of Spark's with the columns and types of the stream's; it may have others
    ``ends``  how the history and the stream meet

    Raises ConfigurationError. See docs/life.md#history-from-another-place.
    """

    rows: DataFrame
    ends: Coordinates | StartsAt

    def check(self, stream: str, df: DataFrame, called: str = "initialRows") -> None:
        """Raise ConfigurationError where the rows cannot be those of this stream. ``called`` says what they are."""
        if not isinstance(self.ends, Coordinates | StartsAt):
            raise ConfigurationError(f"ends is a Coordinates or a StartsAt, not {shown(self.ends)}")
        if is_connect(df) or self.rows.isStreaming or not df.isStreaming:
            raise ConfigurationError(
                f"the {called} of {stream!r} are rows of a table or a file in front of a stream of classic "
                "PySpark's: give InitialRows a batch DataFrame, spark.read, and newStream a streaming one"
            )
        kinds = {field.name: field.dataType.simpleString() for field in self.rows.schema.fields}
        for field in df.schema.fields:
            if kinds.get(field.name) != field.dataType.simpleString():
                raise ConfigurationError(
                    f"the {called} of {stream!r} need the columns of the stream: {field.name} "
                    f"{field.dataType.simpleString()}. They have {kinds.get(field.name, 'none')} there"
                )
        if isinstance(self.ends, StartsAt):
            self.ends.named()
            return
        for name, (what, types) in zip(self.ends.names(), PLACES, strict=True):
            if kinds.get(name) not in types:
                raise ConfigurationError(
                    f"the {called} of {stream!r} have {kinds.get(name, 'none')} as {name}, and a {what} is "
                    f"{' or '.join(types)}"
                )

    def check_counted(self, known: Iterable[LedgerRecord | None], owner: str, specs: Iterable[StateSpec]) -> None:
        """Raise UsageError for a batch that would count without the history. ``known`` are the ledgers before it."""
        for ledger, spec in zip(known, specs, strict=True):
            if lacks_history(ledger, owner, resets=spec.on_new_owner == "reset"):
                raise UsageError(
                    f"the stream has initialRows, and state {spec.state!r} counts nothing yet: the history would be "
                    "lost. Nothing was written. Call seed, with this checkpoint or a new one, and start then; or take "
                    "initialRows away. See docs/life.md#history-from-another-place"
                )


class Cut:
    """Where initial rows meet a stream's batch 0, or a recount's history its last batch. Made for each call."""

    def __init__(self, initial: InitialRows, offsets: str | None, meeting: Meeting = SEED) -> None:
        """Raises UsageError where the ``offsets``, as Spark has written them down, name no partitions."""
        self._initial, self._meeting = initial, meeting
        self._starts = starts_of(offsets, tables=isinstance(initial.ends, StartsAt), meeting=meeting)
        self._seen: dict[Partition, Held] | None = None

    @property
    def text(self) -> str:
        """What tells this cut from others, beside the offsets."""
        return f" {self._initial.ends!r}"

    @property
    def place(self) -> str:
        """Where the history ends, in one text."""
        ends = self._initial.ends
        return repr(sorted((self._starts if isinstance(ends, Coordinates) else ends.named()).items()))

    @property
    def is_checked(self) -> bool:
        """Whether `check` has found what the history has."""
        return self._seen is not None

    def check(self) -> None:
        """Check that the history meets the stream; again, that it is still the same. Raises UsageError."""
        ends = self._initial.ends
        if isinstance(ends, StartsAt):
            check_starts(self._starts, ends.named(), self._meeting)
            return
        held = self._held(ends)
        if self._seen is not None:
            check_reading(self._seen, held, self._meeting)
            return
        hole = partial(self._first_hole, ends)
        check_meets(self._starts, held, ends.holes, hole, self._meeting)
        self._seen = held
        rows = sum(partition.rows for partition in held.values())
        _log.info("%d rows of history are below %s, %s", rows, self._meeting.place, self._starts)

    def joined(self, df: DataFrame) -> DataFrame:
        """The rows of batch 0 with those of the history in front: the stream's columns."""
        return df.select(*map(column_of, df.schema.names)).union(self.below(df.schema.names))

    def below(self, columns: Sequence[str]) -> DataFrame:
        """The rows of the history that are below the offsets."""
        rows, ends = self._initial.rows, self._initial.ends
        if isinstance(ends, Coordinates):
            rows = self._placed(ends).where(f"{_OFFSET} < {_START}")
        return rows.select(*map(column_of, columns))

    def _placed(self, ends: Coordinates) -> DataFrame:
        """The rows, their places, and where the stream starts in each partition; null where it does not read it."""
        from pyspark.sql import functions as F

        rows, names = self._initial.rows, ends.names()
        starts = rows.sparkSession.createDataFrame(
            [(*partition, start) for partition, start in self._starts.items()],
            f"{_TOPIC} string, {_PARTITION} string, {_START} bigint",
        )
        types = zip((_TOPIC, _PARTITION, _OFFSET), names, ("string", "string", "bigint"), strict=True)
        places = [column_of(name).cast(kind).alias(alias) for alias, name, kind in types]
        return rows.select("*", *places).join(F.broadcast(starts), [_TOPIC, _PARTITION], "left")

    def _by_chunk(self, ends: Coordinates) -> DataFrame:
        """What each partition has, by `_CHUNK` offsets below the start; null is all that is not there."""
        from pyspark.sql import functions as F

        is_below, has_place = (
            F.expr(f"{_OFFSET} < {_START}"),
            F.expr(f"{_TOPIC} || {_PARTITION} || {_OFFSET} is not null"),
        )
        offset, known = F.col(_OFFSET), F.col(_START).isNotNull()
        below = F.when(is_below, offset)
        keys = [F.when(known, F.col(name)).alias(name) for name in (_TOPIC, _PARTITION)]
        return (
            self._placed(ends)
            .groupBy(*keys, F.shiftright(below, _BITS).alias("chunk"))
            .agg(
                F.count(below).alias("rows"),
                F.bitmap_construct_agg(F.pmod(below, F.lit(_CHUNK))).alias("bits"),
                F.min(below).alias("first"),
                F.max(below).alias("last"),
                F.max(offset).alias("reach"),
                F.bit_xor(F.when(is_below, F.xxhash64(offset))).alias("mix"),
                F.count_if(~has_place).alias("nowhere"),
                F.count_if(has_place & ~known).alias("unread"),
                F.min(F.when(has_place & ~known, F.struct(_TOPIC, _PARTITION))).alias("one"),
            )
        )

    def _held(self, ends: Coordinates) -> dict[Partition, Held]:
        """What the history has in each partition of the stream. Raises UsageError for what it has elsewhere."""
        from pyspark.sql import functions as F

        held = dict[Partition, Held]()
        for topic, partition, *found, nowhere, other, one in (
            self._by_chunk(ends)
            .groupBy(_TOPIC, _PARTITION)
            .agg(
                F.sum("rows"),
                F.sum(F.bitmap_count("bits")),
                F.min("first"),
                F.max("last"),
                F.max("reach"),
                F.bit_xor("mix"),
                F.sum("nowhere"),
                F.sum("unread"),
                F.min("one"),
            )
            .collect()
        ):
            if nowhere:
                raise without_place(nowhere, self._meeting)
            if other:
                raise unread(tuple(one), other, self._meeting)
            held[topic, partition] = Held(*found)
        return held

    def _first_hole(self, ends: Coordinates, partition: Partition, at: int) -> int:
        """The first offset from ``at`` on that a partition lacks."""
        from pyspark.sql import functions as F

        is_own = (F.col(_TOPIC) == partition[0]) & (F.col(_PARTITION) == partition[1])
        chunks = self._by_chunk(ends).where(is_own).where("chunk is not null").orderBy("chunk")
        for chunk, bits in chunks.select("chunk", "bits").toLocalIterator():
            if chunk * _CHUNK > at:
                break
            if bits.count(0xFF) == len(bits):
                at = (chunk + 1) * _CHUNK
                continue
            while at < (chunk + 1) * _CHUNK and bits[at % _CHUNK // 8] >> at % 8 & 1:
                at += 1
            if at < (chunk + 1) * _CHUNK:
                break
        return at
