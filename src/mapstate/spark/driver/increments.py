"""Whether the rows of a query are increments: totals would be added up."""

from __future__ import annotations

from typing import Any

from mapstate.errors import UsageError

_SENDS_TOTALS = ("Aggregate", "Distinct")


def check_plan(plan: Any, output_mode: str) -> None:
    """Before rows of a query are added to a state, in a mode that is not append. Driver.

    ``plan`` is the JVM's. Raises UsageError if a streaming aggregation would send each key's total again and again.
    Other stateful operators send a row once also in update mode, and what a user's own sends is the user's.
    """
    if plan.getClass().getSimpleName() in _SENDS_TOTALS and plan.isStreaming():
        raise UsageError(
            f"the stream is aggregated before it comes here, and outputMode={output_mode.lower()!r} sends totals, not "
            "increments: a state would add totals up. Nothing was written. Aggregate here instead, by "
            "newStream(...).groupBy(...).persistentAggregate(...); or use a watermark and outputMode='append'. See "
            "docs/guarantees.md#rows-are-increments"
        )
    children = plan.children()
    for at in range(children.size()):
        check_plan(children.apply(at), output_mode)
