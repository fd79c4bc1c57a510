"""What a recount asks for: a history, where it ends, and which keys or windows are computed anew from it. Driver.

Its attempt is that of a correction, see `mapstate.spark.driver.correcting`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import partial, reduce
from operator import and_
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa

from mapstate.aggregators.columns import column_of
from mapstate.aggregators.recounted import PRESENT, RecountedFields
from mapstate.errors import INSIDE, ConfigurationError, FencedError, UsageError, shown
from mapstate.keys import KeyCodec, StoreKey, contains_none
from mapstate.maps.operator_list import ListedKeys, ListEntry, of_kind
from mapstate.maps.pane_index import (
    PanePages,
    batched,
    index_codec,
    index_keys,
    index_lost,
    key_pages,
    pane_of,
    record_lost,
    slices,
    store_key,
    windows_of_ledger,
)
from mapstate.protocol.cuts import RECOUNT
from mapstate.protocol.ledger_record import Attempt, LedgerRecord
from mapstate.protocol.seeding import first_pane
from mapstate.protocol.stored_ledger import read_ledger
from mapstate.protocol.windows import LATEST, PaneChange
from mapstate.reader.times import Time, number_of_caller
from mapstate.schema import time_text
from mapstate.spark.driver.apply import Grouping
from mapstate.spark.driver.initial_rows import Cut, InitialRows
from mapstate.spark.driver.job import Job
from mapstate.spark.driver.new_values import arrow_frame
from mapstate.spark.driver.spark35 import calls
from mapstate.spark.driver.state import StateDriver
from mapstate.spark.driver.window_rows import ANY_TIME
from mapstate.spark.driver.windows import WindowedState
from mapstate.spark.executor.task import arrow_schema, columns_to_python
from mapstate.spark.executor.window_task import Reads
from mapstate.spark.interfaces import kind_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


class Recount(NamedTuple):
    """The history, the ids of corrections whose rows it has, and what is computed anew from it.

    That are the ``keys`` of a state without windows, or the panes from ``since`` on and before ``until``.
    """

    history: InitialRows
    counted: Sequence[str]
    keys: DataFrame | None = None
    since: Time | None = None
    until: Time | None = None

    def frames(self) -> dict[str, DataFrame]:
        """The frames that a call has given, by their argument."""
        return {"recount": self.history.rows} | ({} if self.keys is None else {"keys": self.keys})

    def check(self, job: Job) -> None:
        """Raises UsageError where it does not say what is computed anew."""
        named = (self.keys is None, self.since is None, self.until is None)
        if named != ((True, False, False) if job.windows is not None else (False, True, True)):
            raise UsageError(
                f"state {job.spec.state!r} has {'windows' if job.windows else 'no windows'}. A recount of windows has "
                "since= and until=, between which they are computed anew, and that of other states has keys=. Nothing "
                "was written."
            )

    def why_not(self, job: Job) -> Iterator[str]:
        """Why a state cannot be recounted."""
        if not job.keys:
            yield "it has one key, so all of it would be computed anew"
        if job.spec.ttl:
            yield "its records expire, and the history has what is gone"

    def check_counted(self, state: str, known: Sequence[ListEntry]) -> None:
        """Raises UsageError where it may undo a correction, whose rows the history may not have."""
        lacking = [entry.id for entry in of_kind(known, "correction").values() if entry.id not in self.counted]
        if lacking:
            raise UsageError(
                f"state {state!r} counts corrections whose rows the history may lack, so a recount could undo them: "
                f"{', '.join(map(shown, lacking))}. Nothing was written. Name those whose rows it has, counted=[ID], "
                "and give it the rows of the others first."
            )

    def cut(self, offsets: str | None) -> Cut:
        """Where the history ends. Raises UsageError where nothing tells."""
        return Cut(self.history, offsets, RECOUNT)

    def wanted(self, job: Job) -> DataFrame:
        """The keys, each once, for `of_keys`."""
        assert self.keys is not None  # noqa: S101  see `check`
        return self.keys.select(*(column_of(name).alias(place) for name, place in _places(job).items())).distinct()

    def of_keys(self, rows: DataFrame, wanted: DataFrame, job: Job) -> DataFrame:
        """The rows of the keys; and a line with nulls for each key without rows. A null key is like any other."""
        from pyspark.sql import functions as F

        places = _places(job)
        is_same = reduce(and_, (F.col(place).eqNullSafe(column_of(name)) for name, place in places.items()))
        rows = rows.select(*map(column_of, job.columns), F.lit(True).alias(PRESENT))
        rows = rows.join(wanted, is_same, "left_semi")  # else all of the history would be shuffled
        names = [F.col(places[name]).alias(name) if name in places else column_of(name) for name in job.columns]
        return wanted.join(rows, is_same, "left").select(*names, PRESENT)


class Range:
    """The panes of a state that are computed anew: those of rows from one time on and before another one.

    Raises UsageError where no pane begins at one of them, for windows that are gone, and for times of another type.
    The state's driver takes no row for late from then on.
    """

    def __init__(self, recount: Recount, state: WindowedState, seen: LedgerRecord, *, may_be_gone: bool) -> None:
        self._state, kind = state, state.windows.type
        if seen.windows is None:
            raise UsageError(f"state {seen.state!r} has no windows, and the job declares some. Nothing was written.")
        panes, first = windows_of_ledger(seen).definition.panes, first_pane(windows_of_ledger(seen))
        self.since, self.until = (number_of_caller(at, kind, seen.state) for at in (recount.since, recount.until))
        for name, at in (("since", self.since), ("until", self.until)):
            if abs(at) > LATEST:
                raise UsageError(f"state {seen.state!r}: {name}= is {at}, a time that no row has. Nothing was written.")
            before = panes.pane(at)
            if before != at:
                before = panes.start(at) if before is None else before
                near = [time_text(of, kind) for of in (before, panes.after(before))]
                raise UsageError(
                    f"state {seen.state!r}: {name}= is {time_text(at, kind)}, where none of the panes begins of which "
                    f"its windows are made; they begin at {near[0]} and {near[1]}. Nothing was written."
                )
        if self.since >= self.until:
            raise UsageError(f"state {seen.state!r}: since= is not before until=. Nothing was written.")
        self.name = f"{self.since} {self.until}"
        if first is not None and self.since < first and not may_be_gone:
            raise UsageError(
                f"state {seen.state!r}: windows of rows since {time_text(self.since, kind)} are gone, past their "
                "retention, and so are parts of others. Nothing was written. Take "
                f"since={time_text(first, kind)} or later."
            )
        state.branch.taken = (self.since, ANY_TIME)

    def rows(self, rows: DataFrame) -> DataFrame:
        """Those with a time in the range."""
        from pyspark.sql import functions as F

        columns = list(map(column_of, self._state.job.columns))
        rows = rows.withColumn(PRESENT, F.lit(True)).select(*columns)
        placed, pane = self._state.keyed(rows), F.col(self._state.windows.column)
        number = pane if self._state.windows.type == "bigint" else F.unix_micros(pane)
        return placed.where((number >= self.since) & (number < self.until)).select(*columns)

    def gone(self, keyed: DataFrame, seen: LedgerRecord, known: Sequence[ListEntry]) -> list[StoreKey]:
        """The keys of the panes that no row has. Reads the index of the panes, and blocks.

        Keys that were forgotten are none of them: the history has to lack their rows, also those that came since.
        Raises StoreLostError, and FencedError where a batch has begun meanwhile.
        """
        state, gone, listed = self._state, list[StoreKey](), ListedKeys(seen.keys, of_kind(known, "forget").values())
        names, codec = [key.name for key in seen.keys], KeyCodec(seen.keys)
        there = set[StoreKey]()
        for batch in calls().to_arrow(keyed.select(*map(column_of, names)).distinct()).to_batches():
            there.update(codec.encode_columns(columns_to_python(batch.columns, names), batch.num_rows))
        windows = windows_of_ledger(seen)
        with closing(Reads(state.spec, seen, seen.view(), seen.next_txid - 1)) as reads:

            def check_ledger() -> None:
                now = read_ledger(reads.store, seen.state)
                if (now.epoch, now.windows) != (seen.epoch, seen.windows):
                    raise FencedError(
                        f"state {seen.state!r}: its query was started while the windows were read. Nothing was "
                        "written. Recount again, between two batches.",
                        state=seen.state,
                    )

            def lost(chunk: str) -> None:
                check_ledger()
                raise index_lost(seen.state, chunk)

            def keys_of(pane: str, rests: Sequence[str]) -> list[StoreKey]:
                names = [store_key(pane, rest, is_native_integer=False) for rest in rests]
                blocks = reads.records.blocks
                if blocks is None:
                    return names
                values = reads.values(names)
                if contains_none(values):
                    check_ledger()
                    raise record_lost(seen.state, pane, rests[values.index(None)])
                pairs = zip(names, values, strict=True)
                return [text for name, block in pairs for text in blocks.with_pane(name, block.texts())]

            panes = PanePages(seen.state, windows, reads.index).named(self.since, self.until)
            for part in slices(reads.index, map(reads.keys.text, panes), windows.width):
                for rests in key_pages(reads.index, part, lost):
                    keys = keys_of(part.pane, rests)
                    gone += [key for key in keys if key not in there and key not in listed]
        return gone

    def with_gone(self, rows: DataFrame, gone: Sequence[StoreKey]) -> DataFrame:
        """The rows, and a line with nulls for each key that goes."""
        from pyspark.sql.types import StructType

        job, time = self._state.job, self._state.windows.time
        names = [time, *(key.name for key in job.keys[1:])]
        if not gone:
            return rows
        schema = StructType([field for field in rows.schema.fields if field.name in names])
        columns = dict(zip(names, zip(*KeyCodec(job.keys).decode_all(gone), strict=True), strict=True))
        form = arrow_schema(schema)
        arrays = [pa.array(columns[field.name], field.type) for field in form]
        lines = arrow_frame(rows, schema, [pa.RecordBatch.from_arrays(arrays, schema=form)])
        return rows.unionByName(lines, allowMissingColumns=True)

    def unindex(
        self, gone: Sequence[StoreKey], writer: Any, seen: LedgerRecord, attempt: Attempt, panes: PaneChange | None
    ) -> None:
        """Takes keys out of the index of their panes, as a part of an attempt whose tasks are done.

        ``panes`` is what these have done: they may have moved a key within the index.
        """
        codec, rests = index_codec(seen.serializer, seen.state), defaultdict[str, set[str]](set)
        for pane, rest in map(pane_of, gone):
            rests[pane].add(rest)

        def read(names: Sequence[str]) -> list[tuple[Any, Any]]:
            """Each value as the attempt's tasks have left it, and the one before."""
            records = codec.loads(names, writer.multi_get(names))
            values = attempt.view.values(records, attempt.txid)
            return [
                (record[1] if record is not None and record[0] == attempt.txid else value, value)
                for record, value in zip(records, values, strict=True)
            ]

        width = max(windows_of_ledger(seen).width, 0 if panes is None else panes.width)
        for pane, some in rests.items():
            parts = list(slices(lambda names: [now for now, _ in read(names)], [pane], width))
            for names in batched([name for part in parts for name in index_keys(part)], self._state.spec.chunk_size):
                left = [([rest for rest in now if rest not in some], before) for now, before in read(names)]
                writer.multi_put(names, codec.dumps([(attempt.txid, *values) for values in left]))


def recount_of(stream: str, df: DataFrame, history: Any, counted: Sequence[str], **asked: Any) -> Recount | None:
    """What a call asks for; None without any of it. Raises UsageError and ConfigurationError."""
    if history is None and not counted and all(given is None for given in asked.values()):
        return None
    if history is None or isinstance(counted, str):
        raise UsageError(
            "a recount takes a history, recount=, and keys=, the keys to compute anew, or since= and until= of a state "
            "with windows; counted= is a list of ids. Nothing was written."
        )
    if not isinstance(history, InitialRows):
        raise ConfigurationError(
            f"recount is a history that says where it ends, InitialRows(rows, ends=...), not a {kind_of(history)}. "
            "Nothing was written. See docs/life.md#compute-keys-anew"
        )
    history.check(stream, df, "rows of a recount")
    return Recount(history, counted, **asked)


def set_up(state: StateDriver) -> StateDriver:
    """The driver of a state, for rows as `Recount.of_keys` and `Range.rows` give them."""
    state.make_fields, state.make_grouping = RecountedFields, partial(_with_presence, state.make_grouping)
    return state


def _places(job: Job) -> dict[str, str]:
    return {key.name: f"{INSIDE}{i}" for i, key in enumerate(job.keys)}


def _with_presence(make: Callable[..., Grouping], *settings: Any, **more: Any) -> Grouping:
    """A grouping that also says of each key whether it has rows."""
    from pyspark.sql import functions as F

    grouping = make(*settings, **more)
    if grouping.partials is not None:
        grouping.values.insert(0, F.max(PRESENT).alias(PRESENT))
        grouping.partials = [1 + grouping.partials[0], *grouping.partials[1:]]
    return grouping
