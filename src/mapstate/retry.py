"""Patience with a store that does not answer for a while: growing pauses, up to a time limit."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TypeVar

from mapstate.errors import StoreUnavailableError

__all__ = ["Patience"]

T = TypeVar("T")

_FIRST_PAUSE = 0.1
_LONGEST_PAUSE = 5.0

_log = logging.getLogger("mapstate")


class Patience:
    """How long the driver of a batch waits for its store, in seconds from the first time that it does not answer.

    Driver, one for each batch. ``may_go_on`` says whether the query is still wanted.
    """

    def __init__(self, seconds: float, may_go_on: Callable[[], bool]) -> None:
        self._seconds = seconds
        self._may_go_on = may_go_on
        self._until: float | None = None
        self._pause = _FIRST_PAUSE

    def wait(self, error: StoreUnavailableError) -> None:
        """Pauses, each time longer. Raises ``error`` where the time is over or the query was stopped."""
        now = time.monotonic()
        if self._until is None:
            self._until = now + self._seconds
        if now >= self._until or not self._may_go_on():
            if self._seconds:
                error.add_note(f"The store was asked again for {self._seconds:g} seconds (patience).")
            raise error
        pause = min(self._pause, self._until - now)
        _log.warning("the store does not answer and is asked again in %.1f s: %s", pause, error)
        time.sleep(pause)
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)

    def ask(self, question: Callable[[], T]) -> T:
        """The answer to what may be asked twice. Raises StoreUnavailableError where the time is over."""
        while True:
            try:
                return question()
            except StoreUnavailableError as error:
                self.wait(error)
