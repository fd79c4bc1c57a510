"""What follows an attempt that failed: the one table, for all states and topologies.

    cause                                         opaque, transactional          non-transactional
    an attempt that another one may put right     begun anew, `max_attempts`     raised: a part may count
    a store that does not answer                  begun anew, within `patience`  raised
    the batch's own data                          raised; with a quarantine      raised
                                                  begun anew, then set aside
    a damaged record, the plan, usage, schema,
    ownership, a fence, a package that an
    executor lacks                                raised                         raised

A store that does not answer at begin or commit is retried within `patience`, whatever the type: both are safe to
repeat. The last error is raised as it is, with the number of attempts in a note.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum

from mapstate.errors import (
    CorruptRecordError,
    DataError,
    IncompleteBatchError,
    StaleBatchError,
    StoreRestartedError,
    StoreUnavailableError,
)
from mapstate.retry import Patience
from mapstate.spark.driver.executors import environment_error
from mapstate.spark.executor.error_text import mapstate_error
from mapstate.spec import StateSpec

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


class Decision(Enum):
    """What the driver does next."""

    BEGIN_ANEW = "begin anew"
    SET_ASIDE = "set the batch aside"
    RAISE = "raise"


class RetryPolicy:
    """Decides for one batch; the driver asks it after each attempt that failed. Driver, made anew for each batch.

    ``is_wanted`` says whether the query is still running: a query that was stopped fails its jobs, and begins nothing.
    """

    def __init__(self, specs: Sequence[StateSpec], is_wanted: Callable[[], bool], *, sets_aside: bool = False) -> None:
        self._counts_twice = any(spec.type == "non-transactional" for spec in specs)
        patience = max((spec.patience for spec in specs), default=0)
        self.requests = Patience(patience, is_wanted)
        """Of a store, for what may be asked twice. Each has the whole patience: it may fail again after the tasks."""
        self._attempts = Patience(patience, is_wanted)
        self._is_wanted = is_wanted
        self._sets_aside = sets_aside
        self._data_errors = 0
        self.max_attempts = max((spec.max_attempts for spec in specs), default=1)
        self.attempt = 1
        self._waits = 0

    def after(self, raised: Exception) -> Decision:
        """What follows an attempt that failed; pauses before a store that did not answer is retried.

        Raises a better error than ``raised`` itself: the store's, if patience is over; one of mapstate's that is in the
        text of Spark's; ExecutorEnvironmentError.
        """
        missing = environment_error(raised)
        if missing is not None:
            raise missing from raised
        error = mapstate_error(raised)
        cause = cause_of(error)
        if cause is Cause.UNAVAILABLE_STORE and not self._counts_twice:
            try:
                if self.requests.is_over:
                    raise error
                self._attempts.wait(error)  # type: ignore[arg-type]
            except StoreUnavailableError:
                self._note(error)
                raise
            self._waits += 1
            self.attempt += 1
            return Decision.BEGIN_ANEW
        decision = self._decided(cause, is_a_job=not isinstance(error, LOST_ATTEMPT_ERRORS))
        if decision is Decision.BEGIN_ANEW:
            self.attempt += 1
        elif cause is not Cause.FINAL:
            self._note(error)
        if decision is Decision.RAISE and error is not raised:
            raise error from raised
        return decision

    def _note(self, error: Exception) -> None:
        if self.attempt > 1:
            waits = f", and {self._waits} of these met a store that did not answer" if self._waits else ""
            error.add_note(f"This was attempt {self.attempt}; max_attempts is {self.max_attempts}{waits}.")

    def _decided(self, cause: Cause, *, is_a_job: bool) -> Decision:
        if cause is Cause.FINAL or cause is Cause.UNAVAILABLE_STORE or self._counts_twice:
            return Decision.RAISE
        is_last = self.attempt - self._waits >= self.max_attempts
        if cause is Cause.DATA:
            if not self._sets_aside:
                return Decision.RAISE
            self._data_errors += 1
            return self._if_wanted(Decision.SET_ASIDE if is_last or self._data_errors > 1 else Decision.BEGIN_ANEW)
        if is_last:
            return self._if_wanted(Decision.SET_ASIDE if self._sets_aside and is_a_job else Decision.RAISE)
        return self._if_wanted(Decision.BEGIN_ANEW)

    def _if_wanted(self, decision: Decision) -> Decision:
        return decision if self._is_wanted() else Decision.RAISE
