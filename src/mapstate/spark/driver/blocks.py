"""A state with blocks, batch by batch: a block's rows come to one task, one after the other."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from mapstate.aggregators.aggregator import Aggregator, NativeCombiner
from mapstate.aggregators.columns import column_of
from mapstate.aggregators.fields import Fields
from mapstate.errors import INSIDE, ConfigurationError, IncompleteBatchError
from mapstate.schema import Field, KeyField, KeyOrder
from mapstate.serializers.value_types import INTEGERS
from mapstate.spark.driver.apply import AttemptResult, Grouping
from mapstate.spark.driver.changes import LoggedState
from mapstate.spark.driver.event_time import TimedGrouping
from mapstate.spark.driver.query_run import SET_BY_STREAMS
from mapstate.spark.driver.state import StateDriver
from mapstate.spark.driver.windows import WindowedState
from mapstate.spark.executor.block_task import BlockTask, LoggedBlockTask, PaneBlockTask, shared_block
from mapstate.spec import StateSpec
from mapstate.values import struct_parts

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from mapstate.batch_report import BatchReport
    from mapstate.protocol.ledger_record import AlreadyCommitted, Commit, LedgerRecord
    from mapstate.spark.driver.job import Branch

_KEY_TYPES = ("string", *INTEGERS, "boolean", "date", "timestamp", "binary")  # whose text Spark writes as Python does
_PART_TYPES = (*INTEGERS, "double", "float", "boolean", "date", "timestamp", "timestamp_ntz", "string")
_BLOCK = f"{INSIDE}block"
_DAY = 86_400_000_000  # microseconds
_log = logging.getLogger("mapstate")

MANY_KEYS = 128
"""Keys of a block, above which the driver warns once in each run."""

_MANY_ROWS = 8
"""Rows of a key in the batch before, from which on rows are aggregated in front of the shuffle, too."""


def check_blocks(
    spec: StateSpec, keys: Sequence[KeyField], fields: Sequence[Field], aggregators: Iterable[Aggregator]
) -> None:
    """Raises ConfigurationError for a state that cannot have blocks."""
    why = None if keys else "it has one key"
    for key in keys:
        if key.type not in _KEY_TYPES:
            why = f"the key column {key.name!r} is a {key.type}, whose text Spark writes in another way"
    for field in fields:
        kinds = struct_parts(field.type) if field.type.startswith("struct<") else [field.type]
        if not all(kind in _PART_TYPES or kind.startswith("decimal(") for kind in kinds):
            why = f"the field {field.name!r} is a {field.type}, and values stand in columns of numbers, times or text"
    for aggregator in aggregators:
        if not isinstance(aggregator, NativeCombiner):
            why = f"{aggregator} is computed in Python, row by row"
    if why is not None:
        raise ConfigurationError(f"state {spec.state!r} has no blocks if {why}: leave blocks out. See docs/blocks.md")


class BlockGrouping(Grouping):
    """A grouping whose rows have the number of their block first, and come in its order, a block in one partition.

    Rows are shuffled by block and then aggregated once, or aggregated by key and then shuffled by block. Once is right
    because Spark takes a shuffle by block for one by block and key, unless a session says otherwise.
    """

    panes = 0  # key columns that no block tells

    def __init__(
        self,
        batch_df: DataFrame,
        keys: Sequence[KeyField],
        fields: Fields,
        rows_of: Sequence[str],
        *,
        blocks: int,
        **windows: Any,
    ) -> None:
        super().__init__(batch_df, keys, fields, rows_of, **windows)
        self._columns, self._blocks = keys[self.panes :], blocks
        self.may_skip_partial = True
        if batch_df.sparkSession.conf.get(SET_BY_STREAMS, "false") == "true":
            raise ConfigurationError(
                f"{SET_BY_STREAMS} is true in this session, so a block's rows would come to several tasks. No row was "
                "counted. Unset it."
            )

    def of(self, batch_df: DataFrame) -> DataFrame:
        from pyspark.sql import functions as F

        block = F.col(_BLOCK)
        if self.is_partial:
            rows = batch_df.groupBy(*self.keys).agg(*self.values)
            number = self._number(self.places[self.panes :])
            rows = rows.select(number.alias(_BLOCK), "*").repartition(block)
        else:
            number = self._number([column_of(key.name) for key in self._columns])
            rows = batch_df.withColumn(_BLOCK, number).repartition(block).groupBy(block, *self.keys).agg(*self.values)
        return self._sorted(rows)

    def by_key(self, rows: DataFrame) -> DataFrame:
        """Lines of a stage, each block's in one partition and one after the other."""
        return self._sorted(rows.repartition(_BLOCK))

    def _sorted(self, rows: DataFrame) -> DataFrame:
        return rows.sortWithinPartitions(*self.places[: self.panes], _BLOCK)

    def in_order(self, rows: DataFrame, order: KeyOrder | None) -> DataFrame:  # noqa: ARG002
        """The rows as they are: by block."""
        return rows

    def _number(self, keys: Sequence[Column]) -> Column:
        from pyspark.sql import functions as F

        pairs = zip(keys, self._columns, strict=True)
        text = F.concat_ws("|", *(F.coalesce(_text(key, of.type), F.lit("\\N")) for key, of in pairs))
        return F.pmod(F.crc32(text), F.lit(self._blocks)).cast("int")


def _text(key: Column, kind: str) -> Column:
    """A key column as `KeyCodec` writes it before it escapes anything, in any time zone of the session."""
    from pyspark.sql import functions as F

    if kind == "binary":
        return F.lower(F.hex(key))
    if kind != "timestamp":
        return key.cast("string")
    micros = F.unix_micros(key)
    of_day = F.pmod(micros, F.lit(_DAY))
    day = F.date_from_unix_date(F.round((micros - of_day) / F.lit(_DAY)).cast("int"))
    second = F.floor(of_day / F.lit(1_000_000)).cast("int")
    clock = [F.floor(second / F.lit(size)).cast("int") % F.lit(most) for size, most in ((3600, 24), (60, 60), (1, 60))]
    text = F.format_string("%sT%02d:%02d:%02d.%06dZ", day.cast("string"), *clock, of_day % F.lit(1_000_000))
    return F.when(key.isNotNull(), text)


class PaneBlockGrouping(BlockGrouping, TimedGrouping):
    """The same of a state with windows: in order of panes, and in each of blocks."""

    panes = 1


class BlockState(StateDriver):
    """A state whose spec says ``blocks``."""

    make_task: Callable[..., BlockTask] = BlockTask
    make_seed_task: Callable[..., BlockTask] = BlockTask

    def __init__(self, branch: Branch) -> None:
        super().__init__(branch)
        self.make_grouping = partial(BlockGrouping, blocks=self.spec.blocks or 1)
        self._has_many_rows = self._has_warned = False

    def set_batch(self, record: LedgerRecord, done: AlreadyCommitted | None = None) -> None:
        """See `StateDriver.set_batch`. Warns where blocks have become large."""
        super().set_batch(record, done)
        keys_of_block = (record.keys_held() or 0) // (self.spec.blocks or 1)
        if keys_of_block > MANY_KEYS and not self._has_warned:
            self._has_warned = True
            _log.warning(
                "state %s has some %d keys in each block: single reads and sparse batches move all of them. Seed a "
                "state with more blocks, and swap. See docs/blocks.md",
                *(self.name, keys_of_block),
            )

    def is_aggregated_twice(self, grouping: Grouping) -> bool:  # noqa: ARG002
        """See `StateDriver.is_aggregated_twice`. One shuffle is less, unless a key has many rows."""
        chosen = self.spec.partial_aggregation
        return chosen == "always" or (chosen == "auto" and self._has_many_rows)

    def check(self, result: AttemptResult, batch_id: int) -> None:
        """See `StateDriver.check`. Raises IncompleteBatchError also where two tasks have one block."""
        super().check(result, batch_id)
        shared = shared_block(result.reports)
        if shared is not None:
            raise IncompleteBatchError(
                f"state {self.name!r}: rows of block {shared} came to two tasks of batch {batch_id}, and one of them "
                "has overwritten what the other one wrote. This attempt is not committed."
            )

    def report(self, commit: Commit, *args: Any) -> BatchReport:
        """See `StateDriver.report`."""
        self._has_many_rows = commit.rows > _MANY_ROWS * commit.keys
        return super().report(commit, *args)


class LoggedBlockState(LoggedState, BlockState):
    """A state whose spec says ``blocks`` and ``changes``: its log names keys."""

    logged_task = LoggedBlockTask


class PaneBlockState(BlockState, WindowedState):
    """A state with windows whose spec says ``blocks``."""

    window_task = PaneBlockTask

    def __init__(self, branch: Branch) -> None:
        super().__init__(branch)
        self.make_grouping = partial(PaneBlockGrouping, blocks=self.spec.blocks or 1, windows=self.windows)
