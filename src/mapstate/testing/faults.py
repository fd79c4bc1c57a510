"""Stores that fail on purpose, at a chosen call: for tests of stores, of jobs, and of mapstate itself.

    Fault               at which call, and how often; what happens there:
    ├── Fail            the call raises, before it was done or after
    ├── Wait            the call is slow: some seconds, or until a file is there
    ├── Kill            SIGKILL: the calling process, its executor, or a process group with a driver in it
    └── Mark            nothing but a mark, for another fault to wait for

`FaultyStore` wraps one store and `FaultyBackend` what opens it, so that faults reach Spark's executors.
`ForgetfulStore` and `ForgetfulBackend` acknowledge writes and lose the last of them. A wrapper has the
capabilities of the store that it wraps, and no others.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from dataclasses import fields as fields_of
from pathlib import Path
from typing import Any, Literal, NamedTuple

from mapstate.backing_map import Backend, check_lengths
from mapstate.capabilities import FenceToken, ReadsAhead
from mapstate.errors import ConfigurationError, FencedError, MapStateError, StoreUnavailableError
from mapstate.protocol.stored_ledger import LEDGER_KEY

_CALLS = "calls.jsonl"


class Call(NamedTuple):
    """One call to a store, as a fault's ``where`` gets it.

    ``number`` counts the calls of this method from 1, anew for each store that is opened and each writer: on
    Spark that is for each task. ``token`` is the writer's, or what a ``swap`` moves the fence to.
    """

    method: str
    number: int
    arguments: tuple[Any, ...] = ()
    token: FenceToken | None = None

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys that the call reads or writes, if any."""
        return tuple(self.arguments[0]) if self.method.startswith("multi_") and self.arguments else ()

    @property
    def ledger(self) -> dict[str, Any] | None:
        """The ledger that a call writes, or the first of several, parsed from JSON; None for any other call."""
        record = self.arguments[0] if self.method == "swap" else None
        if self.method == "swap_all":
            record = self.arguments[0][0].record
        if self.method == "multi_put" and LEDGER_KEY in self.keys:  # a store without compare-and-set
            record = self.arguments[1][self.keys.index(LEDGER_KEY)]
        return None if record is None else json.loads(record)


class RecordedCall(NamedTuple):
    """A call, and how it ended: "done", or the name of the error's class."""

    method: str
    keys: tuple[str, ...]
    outcome: str
    pid: int


@dataclass(frozen=True)
class HasKey:
    """``where``: the call reads or writes this key, spelled as the store has it."""

    key: str

    def __call__(self, call: Call) -> bool:
        return self.key in call.keys


@dataclass(frozen=True)
class Begins:
    """``where``: the ledger's write that begins an attempt at this batch.

    The method is ``swap``, or ``swap_all`` for several states of one store.
    """

    batch_id: int

    def __call__(self, call: Call) -> bool:
        at = (call.ledger or {}).get("in_flight")
        return at is not None and bool(at["batch_id"] == self.batch_id)


@dataclass(frozen=True)
class Commits:
    """``where``: the ledger's write that commits this batch, or that opens the state while it is the last one.

    The method is ``swap``, or ``swap_all`` for several states of one store.
    """

    batch_id: int

    def __call__(self, call: Call) -> bool:
        ledger = call.ledger or {"in_flight": "unknown"}
        done = ledger.get("committed")
        return ledger["in_flight"] is None and done is not None and bool(done["batch_id"] == self.batch_id)


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Something that happens at one call of a store. Frozen; picklable if ``where`` is.

    ``method``  of the store or its writer: "multi_put", "swap", "claim", "close", and so on
    ``call``    the number of the call (`Call.number`); None: any
    ``where``   a further condition on the call
    ``after``   False: before the call is done. True: afterwards, and its result is lost if this raises. A put that
                `ReadsAhead` lets return earlier is waited for
    ``since``   only once the fault of this name has fired
    ``times``   how often it fires, over all processes that share a folder; None: at each such call
    ``name``    of the mark that it leaves in the folder; two faults of one name fire once together

    At one call, before it or after it, one fault fires at most: the first that is due.
    """

    method: str = "multi_put"
    call: int | None = None
    where: Callable[[Call], bool] | None = None
    after: bool = False
    since: str | None = None
    times: int | None = 1
    name: str = ""

    @property
    def mark(self) -> str:
        """The fault's name, or one made of its kind and its call."""
        number = "" if self.call is None else f"-{self.call}"
        moment = "after" if self.after else "before"
        return self.name or f"{type(self).__name__.lower()}-{moment}-{self.method}{number}"

    def meets(self, call: Call) -> bool:
        """Whether the fault applies to this call, provided that it has not fired yet."""
        return (
            call.method == self.method
            and (self.call is None or call.number == self.call)
            and (self.where is None or self.where(call))
        )

    def fire(self, call: Call, folder: Path | None) -> None:
        """Do what the fault does. A fault of your own overrides this, and may raise."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Fail(Fault):
    """The call raises ``error``; with ``after``, although the store has done the call."""

    error: type[MapStateError] = StoreUnavailableError

    def fire(self, call: Call, folder: Path | None) -> None:  # noqa: ARG002
        when = "after the store had done it" if self.after else "before the store had done anything"
        raise self.error(f"a test's fault: {call.method} failed {when}")


@dataclass(frozen=True, kw_only=True)
class Wait(Fault):
    """The call takes ``seconds`` longer, or waits that long at most for the file ``until`` in the folder."""

    seconds: float = 60.0
    until: str | None = None

    def fire(self, call: Call, folder: Path | None) -> None:  # noqa: ARG002
        """Wait. Raises TimeoutError where the file does not appear."""
        if self.until is None:
            time.sleep(self.seconds)
        else:
            wait_for((_place(folder) / self.until).exists, f"the file {self.until!r}", self.seconds)


@dataclass(frozen=True, kw_only=True)
class Kill(Fault):
    """SIGKILL to ``who``.

    "self"      the process that calls: on Spark a Python worker, or the driver
    "executor"  the JVM that the calling Python worker works for
    a number    a process group. A driver, started in a group of its own, dies with its JVM; its Python workers
                are in another and live until they notice, as those of a real cluster do

    The calling process dies with them. With ``spare_caller`` it goes on, unless it is one of them: a worker then
    writes what it still has to write, after its driver's death.
    """

    who: Literal["self", "executor"] | int = "self"
    spare_caller: bool = False

    def fire(self, call: Call, folder: Path | None) -> None:  # noqa: ARG002
        """Kill. Does not return, unless the caller is spared."""
        if isinstance(self.who, int):
            if self.who <= 1:  # to killpg, 0 is the caller's own group
                raise ConfigurationError(f"{self.who} is no process group: start the driver with start_new_session")
            os.killpg(self.who, signal.SIGKILL)
        elif self.who == "executor":
            os.kill(calling_executor(), signal.SIGKILL)
        if not self.spare_caller:
            os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True, kw_only=True)
class Mark(Fault):
    """Only leaves its mark, for a fault with ``since`` or a test that waits for the file."""

    def fire(self, call: Call, folder: Path | None) -> None:
        """Do nothing: the mark exists already."""


@dataclass(frozen=True)
class FaultyBackend:
    """A backend whose stores have faults in every process that opens them. Picklable if its parts are.

    ``folder``  is on all machines the same and exists. Each fault leaves a file there, with the pid, so that it
                fires once however many processes take part
    ``record``  write each call down there; see `calls`
    """

    inner: Backend
    folder: str
    faults: tuple[Fault, ...] = ()
    record: bool = False

    def __post_init__(self) -> None:
        _pass_on(self, self.inner, lambda _, method: method)

    def __getattr__(self, name: str) -> Any:
        return _inner_attribute(self, "inner", name)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), tuple(getattr(self, field.name) for field in fields_of(self))

    @property
    def shared_between_processes(self) -> bool:
        return self.inner.shared_between_processes

    def open(self, state: str, *, ttl: float | None = None) -> FaultyStore:
        return FaultyStore(self.inner.open(state, ttl=ttl), *self.faults, folder=self.folder, record=self.record)

    def fired(self, name: str) -> bool:
        """Whether the fault of this name (`Fault.mark`) has fired, in any process."""
        return Path(self.folder, name).exists()

    @property
    def calls(self) -> list[RecordedCall]:
        """The calls so far, of all processes; in order within each."""
        return _recorded(Path(self.folder))


class FaultyStore:
    """A store, or any `IBackingMap`, with faults. Its writers have them too.

    Without a ``folder`` the faults are this object's own, and `calls` are kept in memory. Which
    methods it has is settled when it is made: those of ``inner``.
    """

    multi_get: Callable[[Sequence[Any]], list[Any]]
    multi_put: Callable[[Sequence[Any], Sequence[Any]], None]

    def __init__(
        self,
        inner: Any,
        *faults: Fault,
        folder: str | Path | None = None,
        record: bool = False,
        token: FenceToken | None = None,
    ) -> None:
        self._inner = inner
        self._faults = faults
        self._folder = None if folder is None else Path(folder)
        self._record = record
        self._token = token
        self._numbers: dict[str, int] = {}
        self._marks: set[str] = set()
        self._calls: list[RecordedCall] = []
        # Attributes of the object and not of the class: a wrapper of a store without claims has no `claim`,
        # and `isinstance` with a protocol, from Python 3.12 on, does not ask __getattr__.
        _pass_on(self, inner, self._guarded)

    def __getattr__(self, name: str) -> Any:
        return _inner_attribute(self, "_inner", name)

    @property
    def calls(self) -> list[RecordedCall]:
        """The calls so far, where they are recorded."""
        return list(self._calls) if self._folder is None else _recorded(self._folder)

    def fired(self, name: str) -> bool:
        """Whether the fault of this name (`Fault.mark`) has fired."""
        return name in self._marks if self._folder is None else (self._folder / name).exists()

    def _guarded(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            number = self._numbers[name] = self._numbers.get(name, 0) + 1
            given = (*arguments, *named.values())
            tokens = [value for value in given if isinstance(value, FenceToken)]
            call = Call(name, number, given, tokens[0] if tokens else self._token)
            outcome = "done"
            try:
                self._fire(call, after=False)
                if name == "swap_all":
                    arguments = ([swap._replace(store=_inside(swap.store)) for swap in arguments[0]],)
                result = method(*arguments, **named)
                self._fire(call, after=True)
            except Exception as error:
                outcome = type(error).__name__
                raise
            finally:
                if self._record:
                    self._write_down(RecordedCall(name, call.keys, outcome, os.getpid()))
            return self._writer(result, tokens[0]) if name in ("writer", "filtered_writer") else result

        return call

    def _writer(self, writer: Any, token: FenceToken) -> FaultyStore:
        mapped = FaultyStore(writer, *self._faults, folder=self._folder, record=self._record, token=token)
        mapped._marks, mapped._calls = self._marks, self._calls
        return mapped

    def _fire(self, call: Call, *, after: bool) -> None:
        for fault in self._faults:
            if fault.after != after or (fault.since is not None and not self.fired(fault.since)):
                continue
            if not fault.meets(call):
                continue
            if after and isinstance(self._inner, ReadsAhead):
                self._inner.flush()  # a put may have returned before it was done
            if self._first(fault):
                fault.fire(call, self._folder)
                return

    def _first(self, fault: Fault) -> bool:
        """Leave the fault's mark. Returns False where it has fired as often as it may, in any process."""
        if fault.times is None:
            self._leave(fault.mark)
            return True
        names = (fault.mark if i == 1 else f"{fault.mark}.{i}" for i in range(1, fault.times + 1))
        return any(self._leave(name) for name in names)

    def _leave(self, mark: str) -> bool:
        if self._folder is None:
            there = mark in self._marks
            self._marks.add(mark)
            return not there
        try:
            with (self._folder / mark).open("x") as file:
                file.write(f"{os.getpid()}\n")
        except FileExistsError:
            return False
        return True

    def _write_down(self, call: RecordedCall) -> None:
        if self._folder is None:
            self._calls.append(call)
            return
        place = os.open(self._folder / _CALLS, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o644)
        try:
            os.write(place, json.dumps(call).encode() + b"\n")  # one write: lines of two processes do not mix
        finally:
            os.close(place)


@dataclass(frozen=True)
class ForgetfulBackend:
    """A store whose replica lags by the ``last`` writes, and which fails over to it with `lose`.

    In front of ``inner``, which is the replica. Within this process, all that open a state through equal
    backends see the same, so a stream over it is applied on the driver.
    """

    inner: Backend
    last: int = 1

    shared_between_processes = False

    def open(self, state: str, *, ttl: float | None = None) -> ForgetfulStore:
        with _lock:
            if (self, state) not in _forgetful:
                _forgetful[self, state] = ForgetfulStore(self.inner.open(state, ttl=ttl), last=self.last)
            return _forgetful[self, state]

    def lose(self) -> int:
        """Lose the last writes of each opened state, as `ForgetfulStore.lose`. Returns how many."""
        with _lock:
            return sum(store.lose() for (backend, _), store in _forgetful.items() if backend == self)


class ForgetfulStore:
    """A store, or any `IBackingMap`, that acknowledges writes and can lose the ``last`` of them.

    A put and a change of the ledger are one write each. ``inner`` gets them that many writes later, in order.
    It has the capabilities of ``inner`` among those that this module knows: a method it does not know
    could see what the replica does not have yet. Claims are never lost. A version of the ledger is of one
    incarnation, which ends with `lose`; those of ``inner`` are not told apart.
    """

    def __init__(self, inner: Any, *, last: int = 1) -> None:
        if last < 1:
            raise ConfigurationError(f"a store that forgets loses at least the last write, not {last}")
        self._inner = inner
        self._last = last
        self._lock = threading.RLock()
        self._waiting: deque[_Write] = deque()
        self._incarnation = 0
        self._replicated_fence: FenceToken | None = None
        known = {
            "load": self._load,
            "swap": self._swap,
            "writer": self._writer,
            "scan": self._scan,
            "multi_get_with_ledger": self._multi_get_with_ledger,
        }
        for name, method in known.items():
            if hasattr(inner, name):
                self.__dict__[name] = method
        for name in ("claim", "close"):
            if hasattr(inner, name):
                self.__dict__[name] = getattr(inner, name)

    def multi_get(self, keys: Sequence[Any]) -> list[Any]:
        with self._lock:
            newer = {key: value for write in self._waiting for key, value in write.records.items()}
            return [newer.get(key, old) for key, old in zip(keys, self._inner.multi_get(keys), strict=True)]

    def multi_put(self, keys: Sequence[Any], values: Sequence[Any]) -> None:
        check_lengths(keys, values, "values")
        if keys:
            self._add(_Write(dict(zip(keys, values, strict=True))))

    def lose(self) -> int:
        """Go back by ``last`` writes, at most to the start. Returns how many were lost.

        A new incarnation begins, as `LedgerStore.load` asks: an attempt that began before cannot be committed after.
        """
        with self._lock:
            self._incarnation += 1
            lost = len(self._waiting)
            self._waiting.clear()
            return lost

    def _add(self, write: _Write) -> None:
        with self._lock:
            self._waiting.append(write)
            while len(self._waiting) > self._last:
                oldest = self._waiting.popleft()
                if oldest.ledger is None:
                    self._inner.multi_put(list(oldest.records), list(oldest.records.values()))
                else:
                    ledger = self._inner.load()
                    self._inner.swap(oldest.ledger, None if ledger is None else ledger[1], oldest.fence)
                    self._replicated_fence = oldest.fence

    def _load(self) -> tuple[bytes, _Version] | None:
        with self._lock:
            waiting = [write.ledger for write in self._waiting if write.ledger is not None]
            ledger = None if waiting else self._inner.load()
            record = waiting[-1] if waiting else ledger and ledger[0]
            return None if record is None else (record, (record, self._incarnation))

    def _swap(self, record: bytes, expected: _Version | None, fence: FenceToken) -> _Version | None:
        with self._lock:
            ledger = self._load()
            if (ledger and ledger[1]) != expected:
                return None
            self._add(_Write({}, record, fence))
            return record, self._incarnation

    def _multi_get_with_ledger(self, keys: Sequence[str]) -> tuple[bytes | None, list[bytes | None], bytes | None]:
        with self._lock:
            there = self._load()
            ledger = there and there[0]
            return ledger, self.multi_get(keys), ledger

    def _scan(self, page_size: int) -> Iterator[list[str]]:
        with self._lock:
            newer = list({key: None for write in self._waiting for key in write.records})
        yield from self._inner.scan(page_size)
        for i in range(0, len(newer), page_size):
            yield newer[i : i + page_size]

    def _writer(self, token: FenceToken) -> _ForgetfulWriter:
        return _ForgetfulWriter(self, token)

    def put_fenced(self, token: FenceToken, keys: Sequence[str], values: Sequence[bytes]) -> None:
        """`multi_put`, if ``token`` is the fence. `lose` moves the fence back, too."""
        with self._lock:
            fences = [write.fence for write in self._waiting if write.fence is not None]
            fence = fences[-1] if fences else self._replicated_fence
            if fence != token or token.closed:
                raise FencedError(f"txid {token.txid} may no longer write: the fence is at {fence}", txid=token.txid)
            self.multi_put(keys, values)


_Version = tuple[bytes, int]
"""The ledger, and the incarnation of the store that it was read from."""


class _Write(NamedTuple):
    records: dict[Any, Any]
    ledger: bytes | None = None
    fence: FenceToken | None = None


class _ForgetfulWriter:
    def __init__(self, store: ForgetfulStore, token: FenceToken) -> None:
        self._store = store
        self._token = token
        self.multi_get = store.multi_get

    def multi_put(self, keys: Sequence[str], values: Sequence[bytes]) -> None:
        self._store.put_fenced(self._token, keys, values)


_lock = threading.Lock()
_forgetful: dict[tuple[ForgetfulBackend, str], ForgetfulStore] = {}


def wait_for(condition: Callable[[], object], event: str, seconds: float = 60) -> None:
    """Poll until ``condition`` holds. Raises TimeoutError after the deadline; ``event`` names it in the message."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {seconds} s for {event}")
        time.sleep(0.02)


def calling_executor() -> int:
    """The pid of the JVM that this Python worker works for: the parent of PySpark's daemon.

    Called in a task. In ``local`` mode that JVM is the driver's.
    """
    daemon = os.getppid()
    parent = subprocess.run(["ps", "-o", "ppid=", "-p", str(daemon)], capture_output=True, text=True, check=True)
    return int(parent.stdout)


def _inside(store: Any) -> Any:
    """The store that a `FaultyStore` wraps, or the store itself."""
    return store._inner if isinstance(store, FaultyStore) else store


def _pass_on(wrapper: Any, inner: Any, wrapped: Callable[[str, Any], Any]) -> None:
    for name in dir(inner):
        if not name.startswith("_") and not hasattr(type(wrapper), name) and callable(getattr(inner, name)):
            wrapper.__dict__[name] = wrapped(name, getattr(inner, name))


def _inner_attribute(wrapper: Any, place: str, name: str) -> Any:
    """An attribute of the inner store that is no method. AttributeError before the wrapper is complete."""
    if name.startswith("_") or place not in wrapper.__dict__:
        raise AttributeError(f"{type(wrapper).__name__} has no {name!r}")
    return getattr(wrapper.__dict__[place], name)


def _place(folder: Path | None) -> Path:
    if folder is None:
        raise ConfigurationError("a fault that waits for a file needs the store's folder")
    return folder


def _recorded(folder: Path) -> list[RecordedCall]:
    if not (folder / _CALLS).exists():
        return []
    lines = (folder / _CALLS).read_text().splitlines()
    return [RecordedCall(method, tuple(keys), outcome, pid) for method, keys, outcome, pid in map(json.loads, lines)]
