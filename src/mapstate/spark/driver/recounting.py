"""What a recount asks for: a history, where it ends, and the keys that are computed anew from it. Driver.

Its attempt is that of a correction, see `mapstate.spark.driver.correcting`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial, reduce
from operator import and_
from typing import TYPE_CHECKING, Any, NamedTuple

from mapstate.aggregators.columns import column_of
from mapstate.aggregators.recounted import PRESENT, RecountedFields
from mapstate.errors import INSIDE, ConfigurationError, UsageError, shown
from mapstate.maps.operator_list import ListEntry, of_kind
from mapstate.protocol.cuts import RECOUNT
from mapstate.spark.driver.apply import Grouping
from mapstate.spark.driver.initial_rows import Cut, InitialRows
from mapstate.spark.driver.job import Job
from mapstate.spark.driver.state import StateDriver
from mapstate.spark.interfaces import kind_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


class Recount(NamedTuple):
    """The history, the keys, and the ids of corrections whose rows the history has."""

    history: InitialRows
    keys: DataFrame
    counted: Sequence[str]

    def why_not(self, job: Job) -> Iterator[str]:
        """Why a state cannot be recounted."""
        if job.windows is not None:
            yield "it has windows, and a recount is of keys with one value"
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


def recount_of(
    stream: str, df: DataFrame, history: Any, keys: DataFrame | None, counted: Sequence[str]
) -> Recount | None:
    """What a call asks for; None without any of it. Raises UsageError and ConfigurationError."""
    if history is None and keys is None and not counted:
        return None
    if history is None or keys is None or isinstance(counted, str):
        raise UsageError(
            "a recount takes a history, recount=, and keys=, the keys to compute anew; counted= is a list of ids. "
            "Nothing was written."
        )
    if not isinstance(history, InitialRows):
        raise ConfigurationError(
            f"recount is a history that says where it ends, InitialRows(rows, ends=...), not a {kind_of(history)}. "
            "Nothing was written. See docs/life.md#compute-keys-anew"
        )
    history.check(stream, df, "rows of a recount")
    return Recount(history, keys, counted)


def set_up(state: StateDriver) -> StateDriver:
    """The driver of a state, for rows as `Recount.of_keys` gives them."""
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
