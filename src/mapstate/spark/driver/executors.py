"""Whether the executors can run a job's tasks: asked before the first batch of a run, and found in failed tasks."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from mapstate.aggregators.aggregator import NativeCombiner
from mapstate.errors import ExecutorEnvironmentError, cut
from mapstate.spark.driver.access import access_of, is_connect
from mapstate.spark.driver.job import Branch, Follower
from mapstate.version import VERSION

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_WHAT_TO_DO = "See docs/cluster.md#an-executor-lacks-the-package"
_CANNOT_IMPORT = re.compile(
    r"(?:ModuleNotFoundError: No module named '[\w.]+'"
    r"|ImportError: cannot import name '\w+' from 'mapstate[\w.]*'"
    r"|AttributeError: Can't get attribute '\w+' on <module 'mapstate[\w.]*')"
)


def start_workers_as_here(frame: DataFrame) -> None:
    """With a local master, let Python workers be of the driver's own interpreter. Driver, before a stream is declared.

    Spark takes the ``python3`` of the PATH, which in a virtual environment that is not activated is another one. Not
    where PYSPARK_PYTHON or spark.pyspark.python names one, and not for functions that were declared before.
    """
    if is_connect(frame):
        return
    context = frame.sparkSession.sparkContext
    is_local = re.fullmatch(r"local(\[.*\])?", context.master or "") is not None
    if is_local and "PYSPARK_PYTHON" not in os.environ and not context.getConf().contains("spark.pyspark.python"):
        context.pythonExec = sys.executable


class _Found(NamedTuple):
    """What one task of the probe found, as the JSON of it comes back."""

    host: str
    python: str
    version: str | None
    error: str | None


def check_executors(batch_df: DataFrame, branches: Iterable[Branch]) -> None:
    """Run one short task on each executor, which imports mapstate and unpickles the specs and aggregators. Driver.

    Called in the first batch of a run, before anything is written. Raises ExecutorEnvironmentError, or Spark's own
    error where an executor's Python does not start. Runs nothing where no task of these states needs Python.

    Not guaranteed: executors that join later, or that have no free core. For these see `environment_error`.
    """
    from pyspark.cloudpickle import dumps

    needed = [branch for branch in _with_followers(branches) if _runs_python(branch)]
    if not needed:
        return
    parts = [(branch.job.spec, dict(branch.job.aggregators)) for branch in needed]
    probe = _probe(dumps(parts))  # type: ignore[no-untyped-call]
    answers = [_Found(*json.loads(answer)) for answer in access_of(batch_df).on_executors(probe)]
    unfit = [answer for answer in answers if answer.version != VERSION or answer.error is not None]
    if not unfit:
        return
    first = unfit[0]
    if first.version not in (None, VERSION):
        trouble = f"has mapstate {first.version}, and the driver has {VERSION}"
    else:
        trouble = f"lacks a package of this job: {cut(first.error)}"
    raise ExecutorEnvironmentError(
        f"the Python of the executor on {first.host} ({first.python}) {trouble}. Nothing was written. Install the "
        f"driver's packages for it. {_WHAT_TO_DO}",
        host=first.host,
        found=first.version,
        expected=VERSION,
    )


def environment_error(error: BaseException) -> ExecutorEnvironmentError | None:
    """The error that says which package an executor lacks, where a Spark job failed for that; else None. Driver."""
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    missing = _CANNOT_IMPORT.search(str(error)) if isinstance(error, (PySparkException, Py4JError)) else None
    if missing is None:
        return None
    return ExecutorEnvironmentError(
        f"an executor cannot import what a task needs: {missing[0]}. The batch is not committed. Install the driver's "
        f"packages on every executor, and start the query again. {_WHAT_TO_DO}",
        expected=VERSION,
    )


def _with_followers(branches: Iterable[Branch]) -> Iterator[Branch]:
    """The states, and those that follow their new values: these begin when the first ones have committed."""
    for branch in branches:
        yield branch
        followers = [function.branch for function in branch.downstream if isinstance(function, Follower)]
        yield from _with_followers(follower for follower in followers if follower is not None)


def _runs_python(branch: Branch) -> bool:
    """Whether tasks of this state run Python; the driver applies a native aggregate without."""
    is_native = all(isinstance(aggregator, NativeCombiner) for aggregator in branch.job.aggregators.values())
    return not branch.job.spec.is_applied_on_driver or bool(branch.steps) or not is_native


def _probe(parts: bytes) -> Callable[[], str]:
    """The task. It is a nested function, so it is pickled by value: an executor without mapstate can run it, too."""

    def verified() -> str:
        import json
        import pickle
        import socket
        import sys

        version: Any = None
        error = None
        try:
            import mapstate.version

            version = mapstate.version.VERSION
            import mapstate.spark.executor.task

            pickle.loads(parts)  # noqa: S301  the driver of this job has sent it, as it sends its tasks
        except Exception as caught:  # noqa: BLE001  unpickling runs anybody's code
            error = f"{type(caught).__name__}: {caught}"
        return json.dumps((socket.gethostname(), sys.executable, version, error))

    return verified
