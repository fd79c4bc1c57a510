"""mapstate: exact, live aggregates of a Spark stream in an external store, readable as of a whole batch.

Importing this loads no driver, no Spark and no asyncio: `newStream`, `Topology` and the async reader are fetched when
they are used.
"""

from typing import TYPE_CHECKING, Any

from mapstate.aggregators import (
    ApproxCountDistinct,
    ApproxPercentiles,
    ApproxTopK,
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
    LastN,
    Max,
    Min,
    ReducerAggregator,
    SketchBytes,
    StdDev,
    StdDevPop,
    Sum,
    ThetaSketch,
    TopN,
    Variance,
    VariancePop,
)
from mapstate.batch_report import BatchReport
from mapstate.errors import ConfigurationError, DataError, LedgerError, MapStateError, StoreError, missing_driver
from mapstate.reader import StateReader, open_reader
from mapstate.spec import non_transactional, opaque, transactional
from mapstate.version import VERSION
from mapstate.windows import (
    LIFETIME,
    RollingWindows,
    SessionWindow,
    SlidingCountWindow,
    SlidingDurationWindow,
    TumblingCountWindow,
    TumblingDurationWindow,
)

if TYPE_CHECKING:
    from mapstate.reader import AsyncStateReader, open_async_reader
    from mapstate.spark import Topology, newStream

__all__ = [
    "LIFETIME",
    "ApproxCountDistinct",
    "ApproxPercentiles",
    "ApproxTopK",
    "ArgMax",
    "ArgMin",
    "AsyncStateReader",
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
    "LastN",
    "LedgerError",
    "MapStateError",
    "Max",
    "Min",
    "ReducerAggregator",
    "RollingWindows",
    "SessionWindow",
    "SketchBytes",
    "SlidingCountWindow",
    "SlidingDurationWindow",
    "StateReader",
    "StdDev",
    "StdDevPop",
    "StoreError",
    "Sum",
    "ThetaSketch",
    "TopN",
    "Topology",
    "TumblingCountWindow",
    "TumblingDurationWindow",
    "Variance",
    "VariancePop",
    "newStream",
    "non_transactional",
    "opaque",
    "open_async_reader",
    "open_reader",
    "transactional",
]

__version__ = VERSION


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


def __getattr__(name: str) -> Any:
    if name in ("AsyncStateReader", "open_async_reader"):
        from mapstate import reader

        return getattr(reader, name)
    if name not in ("Topology", "newStream"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from mapstate import spark

        return getattr(spark, name)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("mapstate"):
            raise
        raise missing_driver(name, error, extra="spark") from error
