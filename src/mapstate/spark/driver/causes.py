"""Why an attempt failed: the row of the retry policy's table that an error belongs to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Any

from mapstate.errors import (
    CorruptRecordError,
    DataError,
    IncompleteBatchError,
    MapStateError,
    StaleBatchError,
    StoreRestartedError,
    StoreUnavailableError,
    cut,
)
from mapstate.spark.executor.error_text import mapstate_error

LOST_ATTEMPT_ERRORS = (IncompleteBatchError, StaleBatchError, StoreRestartedError)
"""Attempts that were lost by no row of theirs: no batch is set aside for them."""


class Cause(Enum):
    """Why an attempt failed."""

    LOST_ATTEMPT = "another attempt may end otherwise"
    UNAVAILABLE_STORE = "the store does not answer"
    DATA = "what is in the batch"
    FINAL = "no attempt can end otherwise"


def cause_of(error: Exception) -> Cause:
    """The row of the table that an error belongs to.

    A Spark job that failed may have lost a worker, or may have met the batch's own data: nothing in the error tells
    which. It counts as a lost attempt, and after the last one a batch may be set aside for it. A damaged record is the
    store's: every batch with its key would be set aside.
    """
    from py4j.protocol import Py4JError
    from pyspark.errors import (
        AnalysisException,
        PySparkAttributeError,
        PySparkException,
        PySparkTypeError,
        PySparkValueError,
    )

    error = mapstate_error(error)
    if isinstance(error, (CorruptRecordError, AnalysisException)):
        return Cause.FINAL
    if isinstance(error, (PySparkAttributeError, PySparkTypeError, PySparkValueError)):
        return Cause.FINAL  # of the plan, on the driver
    if isinstance(error, StoreUnavailableError):
        return Cause.UNAVAILABLE_STORE
    if isinstance(error, LOST_ATTEMPT_ERRORS):
        return Cause.LOST_ATTEMPT
    if isinstance(error, DataError):
        return Cause.DATA
    if isinstance(error, (PySparkException, Py4JError)):
        return Cause.LOST_ATTEMPT
    return Cause.FINAL


@contextmanager
def named_cause(step: Any, stream: str) -> Iterator[None]:
    """Around one step of a stream. An error of a user's own function is the batch's: the empty stream has passed it."""
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    try:
        yield
    except (MapStateError, PySparkException, Py4JError):
        raise
    except Exception as error:
        function = getattr(step, "function", step)
        name = str(getattr(function, "__name__", type(function).__name__))
        raise DataError(
            f"the function {name} in a transform of the stream {stream!r} raised {type(error).__name__}: {cut(error)}",
            function=name,
        ) from error
