"""Retries: growing pauses between the tries of one request, and the bounds at which a caller gives up."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from typing import TypeVar

from mapstate.errors import MapStateError, StoreUnavailableError
from mapstate.waiting import pause

T = TypeVar("T")

_log = logging.getLogger("mapstate")


class Pauses:
    """Pauses between tries, each twice the one before, up to ``longest``; ``jitter`` shortens each by up to half."""

    def __init__(self, first: float, longest: float, *, jitter: bool = False) -> None:
        self.upcoming = first  # seconds that the next pause lasts at most
        self._longest = longest
        self._jitter = jitter

    def sleep(self, most: float = float("inf")) -> None:
        """Sleep for the upcoming pause, or for ``most`` seconds where that is less."""
        seconds = min(self.upcoming, most)
        pause(seconds * random.uniform(0.5, 1) if self._jitter else seconds)  # noqa: S311  no secret
        self.upcoming = min(2 * self.upcoming, self._longest)


class Retries:
    """The tries of one request of a store: at most ``retries`` after the first, none ``seconds`` after it ``began``."""

    def __init__(self, retries: int, seconds: float, began: float | None = None) -> None:
        self._left = retries
        self._deadline = (time.monotonic() if began is None else began) + seconds
        self._pauses = Pauses(0.05, 1.0, jitter=True)

    def are_over(self) -> bool:
        """True where no try is left. Otherwise pause, count a try, and return False."""
        if not self._left or time.monotonic() > self._deadline:
            return True
        self._pauses.sleep()
        self._left -= 1
        return False


def retried(
    request: Callable[[], T],
    trouble: tuple[MapStateError, bool],
    retries: Retries,
    errors: tuple[type[Exception], ...],
    problem_of: Callable[[Exception], tuple[MapStateError, bool]],
) -> T:
    """Repeat a request whose first try failed with ``trouble``, where ``problem_of`` says that an error may pass."""
    while True:
        problem, may_pass = trouble
        # Raised outside the except clause: the driver's error would be its context, and could hold a password.
        if not may_pass or retries.are_over():
            raise problem
        try:
            return request()
        except MapStateError:  # translated already; a StoreUnavailableError is one of the driver's OSErrors, too
            raise
        except errors as error:
            trouble = problem_of(error)


class Patience:
    """How long a batch's driver retries a store that does not answer, in ``seconds``, while it ``may_go_on``."""

    def __init__(self, seconds: float, may_go_on: Callable[[], bool]) -> None:
        self._seconds = seconds
        self._may_go_on = may_go_on
        self._until: float | None = None
        self._pauses = Pauses(0.1, 5.0)
        self.is_over = False
        """Whether `wait` has raised."""

    def wait(self, error: StoreUnavailableError) -> None:
        """Pause, each time longer. Raises ``error`` where the time is over or the query was stopped."""
        now = time.monotonic()
        if self._until is None:
            self._until = now + self._seconds
        if now >= self._until or not self._may_go_on():
            self.is_over = True
            if self._seconds and now >= self._until:
                error.add_note(f"The request was retried for {self._seconds:g} seconds (patience).")
            raise error
        left = self._until - now
        _log.warning("the store does not answer, and is retried in %.1f s: %s", min(self._pauses.upcoming, left), error)
        self._pauses.sleep(left)

    def ask(self, request: Callable[[], T]) -> T:
        """Return the reply to a request that may be repeated. Raises StoreUnavailableError where the time is over."""
        while True:
            try:
                reply = request()
            except StoreUnavailableError as error:
                self.wait(error)
            else:
                self._until, self._pauses = None, Pauses(0.1, 5.0)
                return reply
