"""What a batch asks of its Spark beside the DataFrame API, and what the answers are made of."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

__all__ = ["Access", "Files", "LoggedBatch", "QueryRun", "logged_batch", "parsed"]


class QueryRun(NamedTuple):
    """The query of a checkpoint, and one start of it; None where the function is called by hand."""

    query_id: str
    run_id: str | None


class LoggedBatch(NamedTuple):
    """An entry of a query's offset log: when it was planned (in ms), and where it ends in each source.

    ``ends`` is a list in the order of the plan; by name, where the user has named the sources.
    """

    planned_at: int | None
    ends: Any


class Access(Protocol):
    """Driver; made for each question, from the frame of a batch."""

    @property
    def origin(self) -> object:
        """What columns belong to: they are of no use in another one."""

    def run(self, default: str) -> QueryRun:
        """The run that calls; ``default`` owns the state where the function is called by hand."""

    def may_go_on(self) -> bool:
        """False once somebody has stopped the query: jobs that failed since were cancelled."""

    def check_increments(self, output_mode: str) -> None:
        """Before a query of this frame starts whose rows are added to a state.

        Raises UsageError if a streaming aggregation would send each key's total again and again. Other stateful
        operators send a row once also in update mode, and what a user's own sends is the user's.
        """

    def check_running_increments(self) -> None:
        """The same of the query that calls, for its first batch. Nothing to check where called by hand."""

    def serves(self, batch_id: int) -> bool:
        """Whether a query calls, and this is the id of its batch and not one of the user's own."""

    def logged(self, batch_id: int) -> LoggedBatch:
        """The entry of a batch in the offset log of the query that calls. Raises whatever Spark raises."""

    def initial(self, count: int) -> list[Any]:
        """Where the first batch starts in each of ``count`` sources: what a source has written down, or None."""

    def progress(self) -> tuple[list[Any], list[Any]]:
        """Where the present batch starts and ends in each source, where the log cannot be read."""

    def with_files(self, entries: list[Any], before: list[Any], *, same_log: bool) -> list[Any]:
        """Offsets of a batch, those of file sources with what can start another checkpoint. ``before`` are earlier."""

    def is_local(self) -> bool:
        """Whether tasks run in the process of the driver, so that no executor can be lost."""

    def on_executors(self, ask: Callable[[], str]) -> list[str]:
        """What ``ask`` returns on each executor that is there, some of them more than once."""

    def plan_rows(self) -> None:
        """Plan the frame and begin its job, so that what Spark cannot run raises here."""

    def partitioning(self) -> str | None:
        """How the plan of the frame spreads its rows, None where nobody can tell."""

    def release(self) -> None:
        """Release the storage of a frame that `localCheckpoint` has made."""

    def files(self, place: str) -> Files:
        """A file or directory that Spark has written."""


class Files(Protocol):
    """A place in Spark's file system."""

    def exists(self) -> bool:
        """Whether something is there."""

    def names(self) -> list[str]:
        """The names in a directory."""

    def delete(self) -> None:
        """Remove it, and all below it."""


def logged_batch(text: str) -> LoggedBatch:
    """An entry of an offset log, of which two forms are known. Raises ValueError for any other."""
    version, metadata, *lines = text.splitlines()
    planned_at = json.loads(metadata)["batchTimestampMs"]
    if version == "v2":  # with the name of each source; it is its place unless the user has named it
        named = dict(line.partition(":")[::2] for line in lines)
        if set(named) != set(map(str, range(len(named)))):
            return LoggedBatch(planned_at, {name: _offset(line) for name, line in named.items()})
        lines = [named[str(at)] for at in range(len(named))]
    elif version != "v1":
        raise ValueError(f"an offset log of form {version}")
    return LoggedBatch(planned_at, [_offset(line) for line in lines])


def parsed(text: str) -> Any:
    """An offset as Spark writes it: JSON, or other text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _offset(line: str) -> Any:
    return None if line == "-" else parsed(line)
