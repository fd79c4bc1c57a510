"""The rows of a correction: computed once, told from others by a digest, and shaped as the state takes them. Driver."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from mapstate.aggregators.columns import column_of
from mapstate.aggregators.retraction import SIGN
from mapstate.errors import INSIDE, ConfigurationError, UsageError
from mapstate.keys import KeyCodec
from mapstate.maps.operator_list import ListedKeys, ListEntry, of_kind
from mapstate.maps.pane_index import windows_of_ledger
from mapstate.protocol.ledger_record import LedgerRecord
from mapstate.protocol.seeding import first_pane
from mapstate.protocol.windows import LATEST, NEVER, WindowCommit
from mapstate.schema import time_text
from mapstate.spark.driver.access import configured
from mapstate.spark.driver.event_time import TimedState
from mapstate.spark.driver.frames import ONE_DRAW, Frames, computed_once
from mapstate.spark.driver.job import StreamPlan
from mapstate.spark.driver.spark35 import calls
from mapstate.spark.driver.state import StateDriver
from mapstate.spark.driver.window_rows import ANY_TIME, TILE, beside_of
from mapstate.spark.executor.task import columns_to_python

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import DataType

_MOST_NAMED = 5  # panes
_NESTED = ("array", "map", "struct")
_AS_JSON = {
    "ignoreNullFields": "false",
    "timeZone": "UTC",
    "timestampFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSSXXX",
    "timestampNTZFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSS",
}


def check_digest(state: str, rows: DataFrame) -> None:
    """Raises ConfigurationError for a column by which rows cannot be told apart."""
    for field in rows.schema.fields:
        if (why := _why_no_digest(field.dataType)) is not None:
            raise ConfigurationError(
                f"the rows of a correction of {state!r} cannot be told apart by {field.name}, which has {why}. "
                "Nothing was written. Give newStream a DataFrame without it, or with its to_json."
            )


def _why_no_digest(kind: DataType) -> str | None:
    """What in a type has no text of its own as JSON; None without any."""
    parts = [getattr(kind, name) for name in ("keyType", "elementType", "valueType") if hasattr(kind, name)]
    parts += [field.dataType for field in getattr(kind, "fields", ())]
    if kind.typeName() == "variant":
        return "a variant"
    if hasattr(kind, "keyType") and parts[0].typeName() in ("binary", "struct", "array", "map", "variant"):
        return f"a map with keys of type {parts[0].simpleString()}"
    return next((why for why in map(_why_no_digest, parts) if why is not None), None)


def digest_of(rows: DataFrame) -> str:
    """A digest of the rows, in whatever order they come and whatever the session's time zone is."""
    from pyspark.sql import functions as F

    def text_of(name: str, kind: str) -> Column:
        return F.to_json(column_of(name), _AS_JSON) if kind.startswith(_NESTED) else column_of(name)

    fields = [(field.name, field.dataType.simpleString()) for field in rows.schema.fields]
    nulls = [column_of(name).isNull() for name, _ in fields]  # a hash passes over nulls
    values = [text_of(name, kind) for name, kind in fields]
    sums = [F.sum(F.xxhash64(F.lit(seed), *nulls, *values).cast("decimal(38,0)")) for seed in (1, 2)]
    (digest,) = rows.agg(F.count(F.lit(1)), *sums).collect()
    text = ",".join(map(str, [*(name for name, _ in fields), *digest]))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def given_rows(df: DataFrame, add: DataFrame | None, retract: DataFrame | None) -> AbstractContextManager[DataFrame]:
    """All rows with the stream's own columns and a sign, computed once: the digest is of the rows that count."""
    from pyspark.sql import functions as F

    columns = [column_of(name) for name in df.schema.names]
    parts = [
        frame.select(*columns, F.lit(sign).cast("int").alias(SIGN))
        for sign, frame in ((1, add), (-1, retract))
        if frame is not None
    ]
    return computed(parts[0] if len(parts) == 1 else parts[0].union(parts[1]))


@contextmanager
def of_branches(plan: StreamPlan, rows: DataFrame, signs: Sequence[int]) -> Iterator[list[DataFrame]]:
    """The rows as each state takes them: after the stream's steps, with their sign where some are taken back.

    Computed once, so that the checks and the attempt are of the same rows where a step does not give the same twice.
    """
    from pyspark.sql import functions as F

    with ExitStack() as stack:
        parts = [
            stack.enter_context(Frames(plan).of_branches(rows.where(F.col(SIGN) == sign).drop(SIGN), None))
            for sign in signs
        ]
        sent = []
        for branch, by_sign in zip(plan.branches, zip(*parts, strict=True), strict=True):
            frames = []
            for sign, (frame, _) in zip(signs, by_sign, strict=True):
                StateDriver(branch).check_columns(frame)
                kept = frame.select(*map(column_of, branch.job.columns)) if branch.job.columns else frame
                frames.append(kept.withColumn(SIGN, F.lit(sign).cast("int")) if -1 in signs else kept)
            united = frames[0] if len(frames) == 1 else frames[0].unionByName(frames[1])
            sent.append(stack.enter_context(computed(united)) if branch.steps else united)
        yield sent


@contextmanager
def computed(rows: DataFrame) -> Iterator[DataFrame]:
    """The rows as they are held on the executors, until the end of the block."""
    with configured(rows, ONE_DRAW):
        kept, release = computed_once(rows)
    try:
        yield kept
    finally:
        release()


def placed(state: TimedState, frame: DataFrame, seen: LedgerRecord, *, is_rest: bool) -> DataFrame:
    """The rows that are in windows, with their keys. No row is late as long as one of its windows is there.

    Raises UsageError for rows of windows that are gone, and for rows without a time: both would be nowhere. With
    ``is_rest`` other states count them already, and those that have gone since are left out, as late rows are.
    """
    from pyspark.sql import functions as F

    if seen.windows is None:
        return _in_tiles(state, frame, seen, is_rest=is_rest)
    kind = state.windows.type
    windows, state.branch.taken = windows_of_ledger(seen), (-LATEST, ANY_TIME)
    rows, pane, first = state.keyed(frame), state.windows.column, first_pane(windows)
    has_none = F.col(pane).isNull()
    if windows.definition.panes.has_gaps:
        has_none = F.col(list(beside_of(state.windows))[-1]) > 0
    number = F.col(pane) if kind == "bigint" else F.unix_micros(pane)
    first = -LATEST if first is None else first
    panes = F.array_sort(F.collect_set(F.when(number < first, number)))
    timeless, gone = rows.agg(F.count_if(has_none), F.slice(panes, 1, _MOST_NAMED + 1)).collect()[0]
    whys = [f"{timeless} rows to add have no time, or one that no window can have"] if timeless else []
    if gone:
        named = ", ".join([*(time_text(at, kind) for at in gone[:_MOST_NAMED]), *["..."] * (len(gone) > _MOST_NAMED)])
        whys.append(f"rows to add are of windows that are gone, past their retention: in panes that begin at {named}")
    _refuse(seen.state, () if is_rest else whys)
    state.branch.taken = (first, ANY_TIME)
    return rows.where(number >= first)


def _in_tiles(state: TimedState, frame: DataFrame, seen: LedgerRecord, *, is_rest: bool) -> DataFrame:
    """`placed` for rolling windows: rows that a window has which can be asked for, up to the end of those of now."""
    from pyspark.sql import functions as F

    state.set_batch(seen)
    has_clock, last = state.windows.type != "bigint", (seen.last_windows() or WindowCommit()).newest
    if state.branch.taken is not None:
        end = max(state.near if has_clock else NEVER, NEVER if last is None else last)
        state.branch.taken = (state.branch.taken[0], end)
    rows, is_late = state.keyed(frame), F.col(TILE).isNull()
    has_time = F.col(list(beside_of(state.windows))[-1]).isNotNull()
    old, ahead = rows.agg(F.count_if(is_late & ~has_time), F.count_if(is_late & has_time)).collect()[0]
    whys = [f"{old} rows to add have no time, or one that no window has which can be asked for"] if old else []
    limit = " and than the driver's clock" if has_clock else ""
    whys += [f"{ahead} rows to add are later than the latest row{limit}"] if ahead else []
    _refuse(seen.state, () if is_rest else whys)
    return rows.where(~is_late)


def _refuse(state: str, whys: Sequence[str]) -> None:
    if whys:
        why = "; ".join(whys)
        raise UsageError(f"state {state!r}: {why}. Nothing was written. Leave these rows out.", state=state)


def forgotten_keys(
    frame: DataFrame, seen: LedgerRecord, known: Sequence[ListEntry], since: str | None
) -> list[tuple[Any, ...]]:
    """The keys that would get rows although they were forgotten: nothing tells whether the rows are later.

    Of those forgotten ``since`` a time also the keys of which rows would be taken back.
    """
    from pyspark.sql import functions as F

    forgotten = [entry for entry in of_kind(known, "forget").values() if entry.at >= (since or "")]
    if not forgotten or not seen.keys:
        return []
    listed, codec, names = ListedKeys(seen.keys, forgotten), KeyCodec(seen.keys), [key.name for key in seen.keys]
    rows = frame.where(F.col(SIGN) > 0) if SIGN in frame.columns and since is None else frame
    back = list[tuple[Any, ...]]()
    for batch in calls().to_arrow(rows.select(*map(column_of, names)).distinct()).to_batches():
        texts = codec.encode_columns(columns_to_python(batch.columns, names), batch.num_rows)
        back += [codec.decode(text) for text in texts if text in listed]
    return back


def without_keys(frame: DataFrame, names: Sequence[str], keys: Sequence[tuple[Any, ...]]) -> DataFrame:
    """The rows without those of some keys, by the key columns that they have: panes come later."""
    there = [name for name in names if name in frame.columns]
    schema = frame.select(*map(column_of, there)).schema
    values = {tuple(value for name, value in zip(names, key, strict=True) if name in there) for key in keys}
    gone = frame.sparkSession.createDataFrame(list(values), schema).toDF(*(f"{INSIDE}{i}" for i in range(len(there))))
    is_same = [column_of(name).eqNullSafe(column_of(f"{INSIDE}{i}")) for i, name in enumerate(there)]
    return frame.join(gone, is_same, "left_anti")


def check_columns(text: str, kinds: Mapping[str, str], frame: DataFrame) -> None:
    """Raises ConfigurationError where a frame lacks a column, or has it with another type."""
    types = types_of(frame)
    for name, kind in kinds.items():
        if types.get(name) != kind:
            raise ConfigurationError(
                f"{text}: {name} {kind}. They have {types.get(name, 'none')} there. Nothing was written."
            )


def types_of(frame: DataFrame) -> dict[str, str]:
    """The type of each column, as Spark writes it."""
    return {field.name: field.dataType.simpleString() for field in frame.schema.fields}
