"""A topology that runs under its control record: a loop in the driver that obeys an operator."""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any

from mapstate.backing_map import Backend
from mapstate.errors import FencedError, LedgerError, MapStateError, StoreError, StoreLostError
from mapstate.operations.control import Control
from mapstate.protocol import control
from mapstate.protocol.control import ControlRecord, DriverRecord
from mapstate.protocol.ledger_record import now
from mapstate.spark.driver.access import configured
from mapstate.spark.streams.query import Query

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.query import StreamingQuery

_SILENCE = 10  # looks at the record without a beat, after which another driver takes over

_log = logging.getLogger("mapstate")


class Gate:
    """Where each batch waits until batches may begin. Its methods may be called from any thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._is_open = self._has_ended = False
        self._inside = 0

    def __enter__(self) -> None:
        """Wait for the gate to open. Raises FencedError once it has ended."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_open or self._has_ended)
            if self._has_ended:
                raise FencedError("the topology takes no further batch; nothing of this one was begun.")
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._inside -= 1

    @property
    def is_empty(self) -> bool:
        """Whether no batch is under way. None begins behind a closed gate."""
        with self._changed:
            return not self._inside

    def open(self) -> None:
        self._set(is_open=True)

    def close(self) -> None:
        """Let no batch begin; those that come wait."""
        self._set(is_open=False)

    def end(self) -> None:
        """Have each batch that comes raise."""
        self._set(is_open=False, has_ended=True)

    def _set(self, *, is_open: bool, has_ended: bool = False) -> None:
        with self._changed:
            self._is_open, self._has_ended = is_open, has_ended
            self._changed.notify_all()


class Running:
    """One run of a topology, from the submission to the end."""

    def __init__(
        self,
        topology: str,
        queries: Mapping[str, Query],
        start: Callable[[str], StreamingQuery],
        store: Backend | str,
        *,
        poll: float,
    ) -> None:
        self._topology = topology
        self._queries = queries
        self._start = start
        self._control = Control(store, topology)
        self._poll = poll
        self._driver = DriverRecord(
            session=secrets.token_hex(8),
            host=socket.gethostname(),
            pid=os.getpid(),
            started=now(),
            at=now(),
            silence=_SILENCE * poll,
        )
        self._gate = Gate()
        self._partitions: int | None = None
        self._started: dict[str, Any] = {}
        self._stopping: threading.Thread | None = None
        self._gave_up = False  # Spark, to wait for a query that was to stop
        self._has_failed = False  # a batch, whose query may not have ended yet
        self._kill = -1, 0.0  # the number of the last kill, and when this driver first saw it, by its own clock
        self._is_store_lost = False

    def run(self, *, active: bool) -> None:
        """Runs until the topology is killed, its queries end, or one of them fails."""
        with self._control:
            record = self._submitted(active=active)
            is_killed = record.status == "KILLED"
            try:
                while not self._step(record):
                    threading.Event().wait(self._poll)
                    record = self._read(record)
            finally:
                try:
                    with self._beating():
                        self._end_queries()
                finally:
                    self._release()
            if is_killed:
                raise control.killed_before(self._topology)

    @contextmanager
    def _around(self, batch_df: DataFrame) -> Iterator[None]:
        """Has a batch wait at the gate, and spreads it over as many partitions as the record says."""
        with self._gate, ExitStack() as stack:
            if self._partitions is not None:
                partitions = {"spark.sql.shuffle.partitions": str(self._partitions)}
                stack.enter_context(configured(batch_df, partitions))
            try:
                yield
            except Exception:
                self._has_failed = True  # before the gate is empty
                raise

    def _submitted(self, *, active: bool) -> ControlRecord:
        """The record with this driver in it, once no other driver beats. Raises AlreadyAliveError, NotAliveError."""
        states = tuple(branch.job.spec.state for query in self._queries.values() for branch in query.plan.branches)
        stored = self._control.read()
        dead = None if stored is None else stored.driver
        if dead is not None:
            threading.Event().wait(dead.silence)
        name, driver = self._topology, self._driver
        return self._control.change(
            lambda record: control.submit(record, name, driver, states, active=active, at=now(), dead=dead)
        )

    def _read(self, last: ControlRecord) -> ControlRecord:
        """The record as `_beat` leaves it. While the store does not answer, the last one."""
        try:
            record = self._beat()
        except FencedError:
            stored = self._control.read()
            if stored is None:
                raise StoreLostError(
                    f"the control record of topology {self._topology!r} has vanished: its store was emptied or "
                    "replaced. The queries are stopped. See docs/operating.md#a-store-that-was-emptied"
                ) from None
            if stored.status == "REMOVED" and last.status == "KILLED" and not self._started:
                return stored  # by this driver, to which the store's answer was lost
            raise
        except StoreError as error:
            if not self._is_store_lost:
                _log.warning("the control record of %s is not reached; batches go on: %s", self._topology, error)
            self._is_store_lost = True
            return last
        self._is_store_lost = False
        return record

    @contextmanager
    def _beating(self) -> Iterator[None]:
        """Beats meanwhile: Spark may take longer to start or stop a query than another driver watches."""
        done = threading.Event()
        thread = threading.Thread(target=self._beat_until, args=(done,), name="mapstate-beat", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def _beat_until(self, done: threading.Event) -> None:
        with suppress(LedgerError):  # fenced; the next `_read` meets it, too
            while not done.wait(self._poll):
                with suppress(StoreError):
                    self._beat()

    def _beat(self) -> ControlRecord:
        """The record, with a beat of this driver. By one thread at a time."""
        return self._control.change(lambda record: control.beat(record, self._topology, self._driver.session, now()))

    def _step(self, record: ControlRecord) -> bool:
        """Does what the record asks for, as far as that is possible now. True at the end of the run."""
        if record.status == "REMOVED":
            return True
        if record.status != "KILLED":  # where it has ended, whatever became of its last batch
            self._check_failures()
        self._partitions = record.partitions
        is_done = self._go_on() if record.status == "ACTIVE" else self._hold(record)
        if is_done and record.status == "KILLED":
            return self._say(lambda record: control.remove(record, self._topology, self._driver.session, now()))
        if is_done and record.obeyed < record.command:
            self._say(lambda stored: control.obey(stored, self._topology, self._driver.session, record.command))
        if record.status == "KILLED" or self._stopping is not None or not self._started:
            return False
        if any(query.isActive for query in self._started.values()):
            return False
        self._check_failures()  # of one that was still running when this step began
        return True

    def _go_on(self) -> bool:
        if self._stopping is not None and not self._have_stopped(self._stopping):
            return False
        if not self._started:
            self._has_failed = False
            self._gate.open()
            with self._beating():
                for name, query in self._queries.items():
                    query.around = self._around
                    self._started[name] = self._start(name)
        self._gate.open()  # also where a command to stop was taken back before it was obeyed
        return True

    def _hold(self, record: ControlRecord) -> bool:
        """Stops the queries between two batches; of a killed topology, in one that takes too long. True if done."""
        if self._stopping is None:
            if not self._started:
                return True
            self._gate.close()
            if record.status == "KILLED":
                may_stop = self._gate.is_empty or self._has_waited(record)
            else:
                may_stop = self._gate.is_empty and not self._is_failing()
            if not may_stop:
                return False
            self._gate.end()
            self._stopping = self._stop_in_thread()
        return self._have_stopped(self._stopping)

    def _is_failing(self) -> bool:
        """Whether a query is about to end with the error of its batch. Raises the error once it has ended."""
        if not self._has_failed:
            return False
        if all(query.isActive for query in self._started.values()):
            return True
        self._check_failures()
        return False  # somebody else has stopped it

    def _has_waited(self, record: ControlRecord) -> bool:
        """Whether the wait of a kill is over. Not by the record's time, which is of another machine's clock."""
        number, since = self._kill
        if number != record.command:
            number, since = self._kill = record.command, time.monotonic()
        return time.monotonic() - since >= record.wait

    def _have_stopped(self, stopping: threading.Thread) -> bool:
        """Whether no query runs any more. Where Spark gave up to wait for one, all are stopped once more."""
        stopping.join(self._poll)
        if stopping.is_alive():
            return False
        are_active = any(query.isActive for query in self._started.values())  # raises where Spark has gone
        if are_active or self._gave_up or not self._gate.is_empty:
            self._stopping = self._stop_in_thread()
            return False
        self._stopping = None
        self._started.clear()
        return True

    def _stop_in_thread(self) -> threading.Thread:
        stopping = threading.Thread(target=self._stop_all, name="mapstate-stop", daemon=True)
        stopping.start()
        return stopping

    def _stop_all(self) -> None:
        self._gave_up = False
        for name, query in self._started.items():
            try:
                query.stop()
            except Exception:  # noqa: BLE001  Spark has waited for its stopTimeout, or has gone
                self._gave_up = True
                _log.exception("the query of %s could not be stopped", name)

    def _check_failures(self) -> None:
        """Raises the error of a query that has failed by itself."""
        if self._stopping is not None:
            return
        for name, query in self._started.items():
            if not query.isActive and query.exception() is not None:
                raise self._queries[name].last_error or query.exception()

    def _say(self, event: Callable[[ControlRecord | None], ControlRecord]) -> bool:
        """Writes the driver's word. False where the store does not answer: the next step says it."""
        try:
            self._control.change(event)
        except StoreError:
            return False
        return True

    def _end_queries(self) -> None:
        self._gate.end()
        if self._stopping is not None:
            self._stopping.join()
        self._stop_all()
        if not self._gave_up:  # else no batch passes the gate
            for query in self._queries.values():
                query.around = lambda _: nullcontext()

    def _release(self) -> None:
        try:
            self._control.change(lambda record: control.release(record, self._topology, self._driver.session))
        except FencedError:
            pass  # removed, or another driver's
        except MapStateError as error:
            _log.warning("the next driver of %s has to wait for this one's silence: %s", self._topology, error)
