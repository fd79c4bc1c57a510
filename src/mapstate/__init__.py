"""mapstate: exact, live aggregates of a Spark stream in an external store, readable as of a whole batch.

Importing this loads no driver and no Spark: `newStream` and `Topology` are fetched from `mapstate.spark` when they
are used.
"""

from typing import TYPE_CHECKING, Any

from mapstate.aggregators import (
    ArgMax,
    ArgMin,
    Avg,
    BoolAnd,
    BoolOr,
    Collect,
    CombinerAggregator,
    Count,
    CountDistinct,
    First,
    Last,
    Max,
    Min,
    ReducerAggregator,
    StdDev,
    StdDevPop,
    Sum,
    TopN,
    Variance,
    VariancePop,
)
from mapstate.batch_report import BatchReport
from mapstate.errors import (
    ConfigurationError,
    DataError,
    LedgerError,
    MapStateError,
    MissingDriverError,
    StoreError,
)
from mapstate.reader import StateReader, open_reader
from mapstate.spec import non_transactional, opaque, transactional

if TYPE_CHECKING:
    from mapstate.spark import Topology, newStream

__all__ = [
    "ArgMax",
    "ArgMin",
    "Avg",
    "BatchReport",
    "BoolAnd",
    "BoolOr",
    "Collect",
    "CombinerAggregator",
    "ConfigurationError",
    "Count",
    "CountDistinct",
    "DataError",
    "First",
    "Last",
    "LedgerError",
    "MapStateError",
    "Max",
    "Min",
    "ReducerAggregator",
    "StateReader",
    "StdDev",
    "StdDevPop",
    "StoreError",
    "Sum",
    "TopN",
    "Topology",
    "Variance",
    "VariancePop",
    "newStream",
    "non_transactional",
    "opaque",
    "open_reader",
    "transactional",
]


def __getattr__(name: str) -> Any:
    if name not in ("Topology", "newStream"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from mapstate import spark

        return getattr(spark, name)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("mapstate"):
            raise
        raise MissingDriverError(
            f"{name} needs the package {error.name!r}, which is not installed: pip install 'mapstate[spark]'",
            package=error.name,
        ) from error
