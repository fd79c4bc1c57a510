"""A store that does something nasty in the middle of a write, once. For tests through real Spark processes.

Wraps any backend. The fault fires in whatever process is writing, and leaves a mark in a folder, so
that it fires once however many processes take part.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mapstate.backing_map import Backend, FenceToken
from mapstate.errors import MapStateError

Kind = Literal["kill-group", "kill-worker", "stall"]


@dataclass(frozen=True)
class FaultyBackend:
    """``inner``, with one fault of ``kind`` after the ``after_puts``-th put of one task.

    ``kill-group``   SIGKILL to the process group ``group``: a whole driver with its JVM
    ``kill-worker``  SIGKILL to the writing process itself
    ``stall``        waits for the file ``go`` before its next put, then says in ``late`` how that went

    Several kinds hit one task each; a ``kill-worker`` beside a ``stall`` waits for it.
    """

    inner: Backend
    folder: str
    kinds: tuple[Kind, ...]
    after_puts: int = 1
    group: int = 0

    @property
    def shared_between_processes(self) -> bool:
        return self.inner.shared_between_processes

    def open(self, state: str, *, ttl: float | None = None) -> FaultyStore:
        return FaultyStore(self.inner.open(state, ttl=ttl), self)

    def fires(self, kind: Kind) -> bool:
        """True for the first caller of all processes."""
        try:
            os.close(os.open(Path(self.folder, kind), os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        except FileExistsError:
            return False
        return True

    def fired(self, kind: Kind) -> bool:
        return Path(self.folder, kind).exists()


class FaultyStore:
    def __init__(self, inner: Any, backend: FaultyBackend) -> None:
        self._inner = inner
        self._backend = backend
        self.multi_get = inner.multi_get
        self.multi_put = inner.multi_put
        self.load = inner.load
        self.swap = inner.swap
        self.claim = inner.claim
        self.scan = inner.scan

    def writer(self, token: FenceToken) -> FaultyWriter:
        return FaultyWriter(self._inner.writer(token), self._backend)


class FaultyWriter:
    def __init__(self, inner: Any, backend: FaultyBackend) -> None:
        self._inner = inner
        self._backend = backend
        self._puts = 0
        self._stalls = False
        self.multi_get = inner.multi_get

    def multi_put(self, keys: Any, values: Any) -> None:
        backend = self._backend
        if self._stalls:
            wait_for(lambda: Path(backend.folder, "go").exists(), "the file 'go'")
            self._stalls = False
            self._report_late(keys, values)
            return
        self._inner.multi_put(keys, values)
        self._puts += 1
        if self._puts != backend.after_puts:
            return
        for kind in backend.kinds:
            if backend.fires(kind):
                self._fire(kind)
                return

    def _fire(self, kind: Kind) -> None:
        if kind == "kill-group":
            os.killpg(self._backend.group, signal.SIGKILL)
            signal.pause()
        elif kind == "kill-worker":
            if "stall" in self._backend.kinds:
                wait_for(lambda: self._backend.fired("stall"), "the other task to stall")
            os.kill(os.getpid(), signal.SIGKILL)
        elif kind == "stall":
            self._stalls = True

    def _report_late(self, keys: Any, values: Any) -> None:
        outcome = "written"
        try:
            self._inner.multi_put(keys, values)
        except MapStateError as error:
            outcome = type(error).__name__
            raise
        finally:
            late = Path(self._backend.folder, "late.tmp")
            late.write_text(outcome)
            late.rename(Path(self._backend.folder, "late"))

    def close(self) -> None:
        close = getattr(self._inner, "close", None)
        if close is not None:
            close()


def wait_for(condition: Callable[[], bool], what: str, seconds: float = 60) -> None:
    """Polls until ``condition`` holds; TimeoutError after the deadline."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {seconds} s for {what}")
        time.sleep(0.02)
