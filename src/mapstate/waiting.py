"""How a pause waits: it blocks the thread, or lets an event loop go on."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextvars import ContextVar


def _block(seconds: float) -> None:
    time.sleep(seconds)


pause_by: ContextVar[Callable[[float], object]] = ContextVar("pause_by", default=_block)
"""What `pause` calls. `mapstate.event_loop` sets it for the calls that it runs."""


def pause(seconds: float) -> None:
    """Wait for so many seconds."""
    pause_by.get()(seconds)
