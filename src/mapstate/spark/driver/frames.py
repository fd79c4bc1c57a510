"""The rows of one batch on their way to each state: computed once for all of them, then through each branch's steps."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from mapstate.errors import DataError, MapStateError, cut
from mapstate.spark.driver.access import access_of, configured
from mapstate.spark.driver.job import Step, StreamPlan
from mapstate.spark.driver.retry_policy import Cause, cause_of
from mapstate.spark.driver.spark35 import calls

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

ONE_DRAW: Mapping[str, str] = {
    "spark.sql.shuffle.orderIndependentChecksum.enabled": "true",
    "spark.sql.shuffle.orderIndependentChecksum.enableFullRetryOnMismatch": "true",
}
"""Where an executor dies, Spark computes again what it held of the shuffle. An input that is not deterministic then
draws other rows, and tasks that have ended took the first ones. With these settings (Spark 4.1) the job fails instead.
"""

SentRows = tuple["DataFrame", int | None]
"""The rows of a branch, and how many they are where somebody has counted them in front of the shuffle."""

_log = logging.getLogger("mapstate")


def through(steps: Sequence[Step], frame: DataFrame, batch_id: int | None) -> DataFrame:
    """The frame after all steps."""
    for step in steps:
        frame = step(frame, batch_id)
    return frame


def every_step(steps: Sequence[Step]) -> Iterator[Any]:
    """Each step, and those of the streams that one of them merges."""
    for step in steps:
        yield step
        for part in getattr(step, "parts", ()):
            yield from every_step(part)


def computed_once(frame: DataFrame) -> tuple[DataFrame, Callable[[], None]]:
    """The frame, computed now, in two replicas and never again; and the function that releases it."""
    kept = calls().stored(frame)
    return kept, access_of(kept).release


class Frames:
    """Computes the rows of a query's branches, batch by batch. Driver."""

    def __init__(self, plan: StreamPlan) -> None:
        self._plan = plan
        self._steps = [branch.steps for branch in plan.branches]

    @property
    def _is_shared(self) -> bool:
        consumers = len(self._plan.branches) + len(self._plan.after_commit)
        return consumers > 1 or self._plan.quarantine is not None

    @contextmanager
    def evaluated(self, batch_df: DataFrame, max_attempts: int) -> Iterator[DataFrame]:
        """The batch, computed once for all consumers and all attempts, where it would be computed twice.

        An input that cannot be computed leaves no rows to set aside: Spark's own error is raised.
        """
        if not self._is_shared:
            yield batch_df
            return
        kept, release = self._computed(batch_df, max_attempts)
        try:
            yield kept
        finally:
            release()

    def _computed(self, batch_df: DataFrame, max_attempts: int) -> tuple[DataFrame, Callable[[], None]]:
        for attempt in range(1, max_attempts + 1):
            try:
                with configured(batch_df, ONE_DRAW):
                    return computed_once(batch_df)
            except Exception as error:
                if attempt == max_attempts or cause_of(error) is not Cause.LOST_ATTEMPT:
                    raise
                if not access_of(batch_df).may_go_on():
                    raise
                _log.warning(
                    "a batch of %s could not be computed (%s); once more", self._plan.stream, type(error).__name__
                )
        raise AssertionError("max_attempts is at least 1")

    @contextmanager
    def of_branches(self, kept: DataFrame, batch_id: int | None) -> Iterator[list[SentRows]]:
        """The rows of each branch. A step that leads to several branches is computed once for all of them."""
        made: list[tuple[tuple[Step, ...], SentRows]] = []  # a step need not have a hash
        releases: list[Callable[[], None]] = []

        def rows(steps: tuple[Step, ...]) -> SentRows:
            for known, sent in made:
                if _are_equal(known, steps):
                    return sent
            if not steps:
                sent = kept, kept.count() if self._is_shared else None
            else:
                before = rows(steps[:-1])[0]
                with _named_cause(steps[-1], self._plan.stream):
                    frame = steps[-1](before, batch_id)
                sent = frame, None
                if sum(_are_equal(other[: len(steps)], steps) for other in self._steps) > 1:
                    with configured(kept, ONE_DRAW):
                        frame, release = computed_once(frame)
                    releases.append(release)
                    sent = frame, frame.count()
            made.append((steps, sent))
            return sent

        try:
            yield [rows(steps) for steps in self._steps]
        finally:
            for release in releases:
                release()


def _are_equal(some: tuple[Step, ...], others: tuple[Step, ...]) -> bool:
    """Whether the steps are the same: computed once then. A user's function may compare in any way."""
    try:
        return bool(some == others)
    except Exception:  # noqa: BLE001  anybody's code
        return False


@contextmanager
def _named_cause(step: Any, stream: str) -> Iterator[None]:
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
