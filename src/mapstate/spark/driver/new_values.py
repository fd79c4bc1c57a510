"""New values on the driver: their columns, and how they are read back for a batch that counts already."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from mapstate.aggregators.fields import Fields
from mapstate.capabilities import Scan
from mapstate.errors import INSIDE, UsageError
from mapstate.keys import KeyCodec, StoreKey
from mapstate.maps.record_pass import all_records, measured_fields
from mapstate.protocol.ledger_record import Commit, LedgerRecord
from mapstate.protocol.stored_ledger import record_pages
from mapstate.schema import KeyField
from mapstate.serializers import key_codec, record_codec
from mapstate.spark.driver.access import configured
from mapstate.spark.driver.spark35 import calls
from mapstate.spark.executor.task import REPORT_COLUMN, arrow_schema
from mapstate.spec import StateSpec
from mapstate.values import column_type

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructType

OLD_COLUMN = f"{INSIDE}old_"
WAS_THERE = f"{INSIDE}was_there"
IS_THERE = f"{INSIDE}is_there"
_PAGE = 5000
_MOST_RECORDS = "spark.sql.execution.arrow.maxRecordsPerBatch"
_MOST_LOCAL = "spark.sql.execution.arrow.localRelationThreshold"  # bytes; above it a batch of Arrow is a partition
# How PySpark takes a table: 0 records a batch is no bound for Spark, and an error here; instants are in UTC already.
_AS_ARROW = {_MOST_RECORDS: "10000", "spark.sql.session.timeZone": "UTC"}


def read_back(
    batch_df: DataFrame, spec: StateSpec, fields: Fields, ledger: LedgerRecord, commit: Commit | None, *, old: bool
) -> tuple[DataFrame, int]:
    """The new values of a batch that is committed already, and how many of them are missing.

    Scans the state, page by page, for the records with the batch's txid. Without a ``commit`` there are none: another
    query has committed since, or the state was reset. ``old`` values are the previous ones of these records, which are
    right because the committed attempt wrote each record once. A record is missing that has expired, was evicted, was
    removed by the batch and then by a vacuum, or was written by a later attempt.
    """
    schema = new_values_type(batch_df, ledger.keys, fields, old=old)
    batches: list[pa.RecordBatch] = []
    read = 0
    if commit is not None and spec.type != "non-transactional":
        store: Any = spec.open()
        can_scan = isinstance(store, Scan)
        if not can_scan:
            raise UsageError(
                f"the store of state {spec.state!r} cannot list its keys, so the new values of batch "
                f"{commit.batch_id} cannot be read back for what lies downstream"
            )
        codec = record_codec(ledger)
        keys = key_codec(ledger)
        seen: set[StoreKey] = set()  # a scan may give a key twice
        page = _PAGE if codec.blocks is None else codec.blocks.on_page(_PAGE, ledger.keys_held())
        loads = codec.loads if codec.blocks is None else partial(codec.blocks.written, txid=commit.txid)
        pages = record_pages(store, page)
        for texts, records, _ in all_records(pages, store.multi_get, measured_fields(ledger), loads):
            pairs = zip(texts, records, strict=True) if codec.blocks is None else records
            written = {text: record for text, record in pairs if record is not None and record[0] == commit.txid}
            if ledger.windows is not None:  # a purge leaves such records, and a recount has the value before
                written = {
                    text: record for text, record in written.items() if record[1] is not None or record[2] is not None
                }
            fresh = {text: record for text, record in written.items() if text not in seen}
            seen.update(fresh)
            if fresh:
                batches.append(_page(schema, keys, fields, fresh, old=old))
        read = len(seen)
    missing = 0 if commit is None else commit.keys - read
    return new_values_frame(batch_df, schema, batches), missing


def _page(
    schema: StructType, keys: KeyCodec, fields: Fields, records: dict[StoreKey, Any], *, old: bool
) -> pa.RecordBatch:
    """New values by key text, as tasks give them out."""
    arrow = arrow_schema(schema)
    rows = [
        [*keys.decode(text), *fields.shown(record[1]), *(fields.with_presence(record[1], record[2]) if old else ())]
        for text, record in records.items()
    ]
    columns = list(zip(*rows, strict=True))
    arrays = [pa.array(column, arrow.field(i).type) for i, column in enumerate(columns)]
    return pa.RecordBatch.from_arrays([*arrays, pa.nulls(len(rows), pa.string())], schema=arrow)


def new_values_type(batch_df: DataFrame, keys: Sequence[KeyField], fields: Fields, *, old: bool = False) -> StructType:
    """The schema of new values: the key columns, one column per aggregate, and the tasks' own last.

    With ``old``, the aggregates before the batch stand behind them, and whether the key was there and is there.
    """
    from pyspark.sql.types import BooleanType, StringType, StructField, StructType

    columns = [StructField(key.name, batch_df.schema[key.name].dataType) for key in keys]
    shown = shown_types(fields)
    columns += [StructField(name, kind) for name, kind in shown.items()]
    if old:
        columns += [StructField(f"{OLD_COLUMN}{i}", kind) for i, kind in enumerate(shown.values())]
        columns += [StructField(WAS_THERE, BooleanType()), StructField(IS_THERE, BooleanType())]
    return StructType([*columns, StructField(REPORT_COLUMN, StringType())])


def new_values_frame(batch_df: DataFrame, schema: StructType, batches: list[pa.RecordBatch]) -> DataFrame:
    """New values that the driver holds, as a frame. Driver."""
    return arrow_frame(batch_df, schema, batches).drop(REPORT_COLUMN)


def arrow_frame(
    batch_df: DataFrame, schema: StructType, batches: list[pa.RecordBatch], *, rows_of_task: int | None = None
) -> DataFrame:
    """Rows that the driver holds, as a frame. Driver.

    With ``rows_of_task`` it has a partition for so many rows, and a size that Spark does not know.
    """
    form = arrow_schema(schema)
    # PySpark cannot take a table without a chunk if a column is an array.
    table = pa.Table.from_batches(batches, schema=form) if batches else form.empty_table()
    settings = _AS_ARROW if rows_of_task is None else _AS_ARROW | {_MOST_RECORDS: str(rows_of_task), _MOST_LOCAL: "0"}
    with configured(batch_df, settings):
        return calls().from_arrow(batch_df.sparkSession)(table, schema)


def shown_types(fields: Fields) -> dict[str, Any]:
    """The Spark type of each field's `result` as rows show it."""
    kinds = zip(fields.fields, fields.types, strict=True)
    return {field.name: calls().from_ddl(column_type(kind)) for field, kind in kinds}
