"""What is sent from the driver to executors has to be picklable."""

from __future__ import annotations

from typing import Any

from mapstate.errors import NotPicklableError, cut


def ensure_picklable(subject: str, thing: Any) -> None:
    """Raises NotPicklableError, with the attribute that is to blame, unless ``thing`` can be sent to executors."""
    from pyspark.cloudpickle import dumps, loads

    try:
        loads(dumps(thing))  # type: ignore[no-untyped-call]
    except Exception as error:
        culprit = ""
        for name, value in getattr(thing, "__dict__", {}).items():
            try:
                dumps(value)  # type: ignore[no-untyped-call]
            except Exception:  # noqa: BLE001  pickling runs anybody's code
                culprit = f": its attribute {name!r}, a {kind_of(value)}, cannot be pickled"
                break
        raise NotPicklableError(
            f"{subject} cannot be sent to executors{culprit} ({type(error).__name__}: {cut(error)}). Keep settings in "
            "it, and make connections and locks where they are used."
        ) from error


def kind_of(thing: Any) -> str:
    """The class of a thing, or of a class itself, for a message."""
    return f"class {thing.__name__}" if isinstance(thing, type) else type(thing).__name__
