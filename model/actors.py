"""Actors that run the library's own code, a step at a time, in an order that a seed decides.

An actor is a thread. It stops before each access to a store and goes on when the world says so; only one runs at a
time, so that a seed stands for one schedule. A crash is an actor that is not continued, or ended where it stands.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

__all__ = ["Actor", "Killed"]

_STACK = 256 * 1024


class Killed(BaseException):
    """The process ends here."""


class Actor:
    """``run`` is called with the actor, and calls `pause` before each step that others may come in front of."""

    def __init__(self, name: str, run: Callable[[Actor], Any]) -> None:
        self.name = name
        self.ended = False
        self.result: Any = None
        self.error: BaseException | None = None
        self._run = run
        self._awaited: list[Actor] = []
        self._killed = False
        self._go = threading.Semaphore(0)
        self._stopped = threading.Semaphore(0)
        self._thread: threading.Thread | None = None

    @property
    def is_waiting(self) -> bool:
        """Whether it waits for other actors to end."""
        return any(not other.ended for other in self._awaited)

    def step(self) -> None:
        """Run up to the next pause, or to the end."""
        if self.ended:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, daemon=True)
            self._thread.start()
        self._go.release()
        self._stopped.acquire()

    def kill(self) -> None:
        """End it where it stands."""
        self._killed = True
        if self._thread is None:
            self.ended = True
        while not self.ended:
            self.step()

    def pause(self) -> None:
        """Called by what runs inside: let others go first. Raises Killed."""
        self._stopped.release()
        self._go.acquire()
        if self._killed:
            raise Killed

    def wait_for(self, others: Iterable[Actor]) -> None:
        """Called by what runs inside: go on when these have ended."""
        self._awaited = list(others)
        while self.is_waiting:
            self.pause()

    def _work(self) -> None:
        self._go.acquire()
        try:
            self.result = None if self._killed else self._run(self)
        except BaseException as error:  # noqa: BLE001  the world looks at it
            self.error = error
        self.ended = True
        self._stopped.release()
