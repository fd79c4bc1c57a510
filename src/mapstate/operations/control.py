"""A word to a running topology, from any process: for an operator, without Spark.

The command is written into the topology's control record, which its driver reads; see
`mapstate.protocol.control`. It stays there until a driver obeys it, also one that a supervisor starts again.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple, Self

from mapstate.backends import check_state_name, resolve
from mapstate.backing_map import Backend, close_if_possible
from mapstate.capabilities import FenceToken, ListsStates
from mapstate.errors import CorruptRecordError, UsageError
from mapstate.protocol import control
from mapstate.protocol.control import CONTROL_SUFFIX, ControlRecord, DriverRecord, decode_control, is_control
from mapstate.protocol.ledger_record import now
from mapstate.protocol.stored_ledger import ledger_store

OBEY_SECONDS = 30.0
_POLL_SECONDS = 0.1

Event = Callable[[ControlRecord | None], ControlRecord]


class Control:
    """The control record of one topology in its store. Not thread-safe."""

    def __init__(self, backend_or_url: Backend | str, topology: str) -> None:
        self.topology = topology
        self._opened = resolve(backend_or_url).open(check_state_name(f"{topology}{CONTROL_SUFFIX}"))
        self._store = ledger_store(self._opened)

    def read(self) -> ControlRecord | None:
        """The record; None where there is none. Raises CorruptRecordError, StoreError."""
        return self._load()[0]

    def change(self, event: Event) -> ControlRecord:
        """Write what ``event`` makes of the record, by compare-and-set. Raises its errors, and those of `read`.

        After a StoreError the change may have been written or not.
        """
        while True:  # another turn means that somebody else has written
            record, version = self._load()
            after = event(record)
            if after == record:
                return after
            token = FenceToken(0, after.revision, closed=True)  # nobody writes records under this name
            if self._store.swap(control.encode_control(after), version, token) is not None:
                return after

    def close(self) -> None:
        """Close the store."""
        close_if_possible(self._opened)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _load(self) -> tuple[ControlRecord | None, Any]:
        stored = self._store.load()
        return (None, None) if stored is None else (decode_control(stored[0], self.topology), stored[1])


_SILENCE = 10.0
"""Seconds at least: on a busy machine a driver that polls often may be late by more than a few polls."""


class Watch:
    """Whether a driver is dead: no beat for its ``silence``, or `_SILENCE` where that is shorter.

    The time of a look does not count: the store may hang.
    """

    def __init__(self, record: ControlRecord) -> None:
        self._driver, self._paused = record.driver, 0.0

    def dead(self, record: ControlRecord, pause: float) -> DriverRecord | None:
        """The driver, if it is dead by the record as it is ``pause`` seconds after the look before."""
        self._paused = self._paused + pause if record.driver == self._driver else 0.0
        self._driver = record.driver
        if self._driver is None or self._paused < max(self._driver.silence, _SILENCE):
            return None
        return self._driver


class Obeyed(NamedTuple):
    """``is_obeyed`` is False if no driver has obeyed the command in time. It stays in ``record`` all the same.

    ``dead`` was the driver, and was found dead. ``is_superseded``: a later command says otherwise.
    """

    record: ControlRecord
    is_obeyed: bool
    dead: DriverRecord | None = None
    is_superseded: bool = False


class ListedTopology(NamedTuple):
    """One topology. ``record`` is None if it cannot be read, and ``problem`` says why. ``is_dead``: its driver is."""

    name: str
    record: ControlRecord | None
    problem: str = ""
    is_dead: bool = False


def activate(backend_or_url: Backend | str, name: str, *, timeout: float = OBEY_SECONDS) -> Obeyed:
    """Let an inactive topology go on. Does nothing to an active one.

    Raises:
        NotAliveError: There is no such topology, or it was removed.
        UsageError: It is KILLED.
        StoreError: The store failed.

    """
    return _command(backend_or_url, name, timeout, {"status": "ACTIVE"}, control.activate, at=now())


def deactivate(backend_or_url: Backend | str, name: str, *, timeout: float = OBEY_SECONDS) -> Obeyed:
    """Stop the queries of a topology after the batch under way, whatever time it takes. The driver lives on.

    Raises the errors of `activate`.
    """
    return _command(backend_or_url, name, timeout, {"status": "INACTIVE"}, control.deactivate, at=now())


def rebalance(backend_or_url: Backend | str, name: str, *, partitions: int, timeout: float = OBEY_SECONDS) -> Obeyed:
    """Spread batches over so many partitions, from the next one on. Raises the errors of `activate`."""
    return _command(backend_or_url, name, timeout, {"partitions": partitions}, control.rebalance, partitions=partitions)


def kill(backend_or_url: Backend | str, name: str, *, wait: float = 30.0, timeout: float = OBEY_SECONDS) -> Obeyed:
    """End a topology. No further batch begins; the one under way has ``wait`` seconds, and is then given up.

    A batch that is given up does not count, and whoever goes on from the checkpoint gets its rows. States and
    checkpoints stay. Obeyed means REMOVED, by the driver or for a dead one; ``timeout`` seconds are added to ``wait``.

    Raises the errors of `activate`, and UsageError for a ``wait`` out of range.
    """
    return _command(backend_or_url, name, wait + timeout, {}, control.kill, wait=wait, at=now())


def topology(backend_or_url: Backend | str, name: str) -> ControlRecord:
    """The control record of a topology. Raises NotAliveError, StoreError; CorruptRecordError for any other record."""
    with Control(backend_or_url, name) as commands:
        return control.present(commands.read(), name)


def list_topologies(backend_or_url: Backend | str) -> list[ListedTopology]:
    """The topologies of a store, by name, without those that were removed. Reads only.

    Waits for a beat of each driver: a second, or the ten of a dead one; of none that may be silent for more than 30.
    Raises UsageError if the store cannot list, and StoreError.
    """
    backend = resolve(backend_or_url)
    if not isinstance(backend, ListsStates):
        raise UsageError(f"{type(backend).__name__} offers no ListsStates, so it cannot list its topologies.")
    stored = [stored for page in backend.states() for stored in page]
    records = [entry for entry in stored if entry[0].endswith(CONTROL_SUFFIX) and is_control(entry[1])]
    with ThreadPoolExecutor(32) as pool:  # which mostly wait
        listed = pool.map(lambda entry: _listed(backend, entry[0].removesuffix(CONTROL_SUFFIX), entry[1]), records)
        return sorted(topology for topology in listed if topology.record is None or topology.record.status != "REMOVED")


def _listed(backend: Backend, name: str, data: bytes) -> ListedTopology:
    try:
        record = decode_control(data, name)
        return ListedTopology(name, record, is_dead=_is_dead(backend, record))
    except CorruptRecordError as error:
        return ListedTopology(name, None, error.message)


def _is_dead(backend: Backend, record: ControlRecord) -> bool:
    """Watches the driver until it beats: a time of another machine's clock proves nothing."""
    driver, watch = record.driver, Watch(record)
    if driver is None or driver.silence > OBEY_SECONDS:
        return False
    with Control(backend, record.topology) as commands:
        while record.driver == driver and watch.dead(record, _POLL_SECONDS) is None:
            time.sleep(_POLL_SECONDS)
            record = commands.read() or record
    return record.driver == driver


def _command(
    backend_or_url: Backend | str, name: str, timeout: float, asked: dict[str, Any], rule: Any, **values: Any
) -> Obeyed:
    """Change the record by a rule, and wait. It says what was ``asked`` until a later command says otherwise."""
    with Control(backend_or_url, name) as commands:
        record = commands.change(partial(rule, topology=name, **values))
        command, end, is_superseded = record.command, time.monotonic() + timeout, False
        watch, dead = Watch(record), None
        while record.obeyed < command and record.driver and not is_superseded and time.monotonic() <= end:
            time.sleep(_POLL_SECONDS)
            record = commands.read() or record
            dead = watch.dead(record, _POLL_SECONDS)
            if dead is not None or (record.driver is None and record.status == "KILLED"):  # it ended without obeying
                record = commands.change(partial(control.bury, topology=name, dead=dead, at=now()))
            is_superseded = any(getattr(record, field) != value for field, value in asked.items())
        is_obeyed = record.obeyed >= command and not is_superseded
        return Obeyed(record, is_obeyed, None if record.driver else dead, is_superseded)
