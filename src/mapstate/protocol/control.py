"""The control record of a topology: an operator's last command to its driver, and the driver's own word.

One pure function per event, as in `mapstate.protocol.transitions`. Each takes the record as it was read, None where
there is none, and returns the record to write. `mapstate.operations.control` runs them against a store. A record stays
when its topology is REMOVED, so the number of a command is never given out twice.

    submitted ──> ACTIVE <──> INACTIVE        rebalance: in both
                    └── kill ──┴──> KILLED ──> REMOVED ──> submitted
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from mapstate.errors import AlreadyAliveError, CorruptRecordError, FencedError, NotAliveError, UsageError, cut, shown
from mapstate.protocol.ledger_record import CONTROL_MARK, are_times

CONTROL_SUFFIX = ".control"
"""Behind the topology's name: the name under which a store keeps the record, where it keeps the ledger of a state."""

Status = Literal["ACTIVE", "INACTIVE", "KILLED", "REMOVED"]

_FORMAT = 1
_MOST_WAIT = 31 * 86_400.0


class DriverRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A driver that runs a topology.

    ``session``   a random name of this start
    ``host``, ``pid``  for people
    ``started``   ISO 8601 in UTC, as ``at``
    ``beat``      rises as long as the driver lives
    ``at``        the time of the last beat, by the driver's clock; for people, no rule uses it
    ``silence``   seconds without a beat after which another driver may take over
    """

    session: str
    host: str
    pid: int
    started: str
    beat: int = 0
    at: str
    silence: float


class ControlRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The control record of one topology.

    ``control``     the format; the first field of the JSON, and none of a ledger
    ``revision``    rises with each write
    ``command``     the number of the last command
    ``obeyed``      the number of the last command that a driver has obeyed
    ``since``       the time of the last change of ``status``, by the clock of the one who made it; ISO 8601 in UTC
    ``wait``        seconds that the batch under way has to end, of KILLED
    ``partitions``  of the plans of batches; None: as many as Spark's shuffles have
    ``states``      the names of the topology's states
    ``driver``      None: none runs, and the last one ended in order
    """

    control: int = _FORMAT
    topology: str
    status: Status
    since: str
    revision: int = 0
    command: int = 0
    obeyed: int = 0
    wait: float = 0.0
    partitions: int | None = None
    states: tuple[str, ...] = ()
    driver: DriverRecord | None = None


def submit(
    record: ControlRecord | None,
    topology: str,
    driver: DriverRecord,
    states: tuple[str, ...],
    *,
    active: bool,
    at: str,
    dead: DriverRecord | None = None,
) -> ControlRecord:
    """A driver takes the topology: a new one, or one whose driver has ended or fallen silent.

    A topology that is known keeps its status and its partitions. So what a crash has interrupted goes on, also a kill.

    Args:
        record: The record.
        topology: Its name.
        driver: The driver that starts.
        states: The names of the states.
        active: The status of a new topology.
        at: The present time.
        dead: A driver that was found here, and has not beaten for its ``silence`` since.

    Raises:
        AlreadyAliveError: Another driver runs it.
        NotAliveError: It was removed meanwhile.

    """
    if record is not None and record.status == "REMOVED" and dead is not None:
        raise killed_before(topology)
    if record is None or record.status == "REMOVED":
        numbers = {} if record is None else {"revision": record.revision, "command": record.command}
        status: Status = "ACTIVE" if active else "INACTIVE"
        new = ControlRecord(topology=topology, status=status, since=at, states=states, driver=driver, **numbers)
        return _next(new, obeyed=new.command)
    running = record.driver
    if running is not None and running != dead:
        raise AlreadyAliveError(
            f"topology {topology!r} runs already, since {running.started} on {running.host} as process {running.pid}. "
            "Nothing was started. Stop it by mapstate kill, or give this one another name.",
            topology=topology,
        )
    return _next(record, driver=driver, states=states)


def killed_before(topology: str) -> NotAliveError:
    """The error of a start that finds a kill under way."""
    return NotAliveError(
        f"topology {topology!r} was killed before this start could run it. It is removed now, and nothing was run. "
        "Start the job once more to submit it anew.",
        topology=topology,
    )


def activate(record: ControlRecord | None, topology: str, at: str) -> ControlRecord:
    """Batches go on. Raises NotAliveError, UsageError."""
    return _changed(record, topology, "activate", "ACTIVE", at)


def deactivate(record: ControlRecord | None, topology: str, at: str) -> ControlRecord:
    """No further batch. Raises NotAliveError, UsageError."""
    return _changed(record, topology, "deactivate", "INACTIVE", at)


def rebalance(record: ControlRecord | None, topology: str, partitions: int) -> ControlRecord:
    """So many partitions from the next batch on. Raises NotAliveError, UsageError."""
    # A hundred thousand take Spark seconds per batch; more take minutes, or the driver's memory.
    if type(partitions) is not int or not 1 <= partitions <= 100_000:
        raise UsageError(f"partitions is an int from 1 to 100,000, not {shown(partitions)}. Nothing was written.")
    record = _living(record, topology, "rebalance")
    if record.partitions == partitions:
        return record
    return _next(record, partitions=partitions, command=record.command + 1)


def kill(record: ControlRecord | None, topology: str, wait: float, at: str) -> ControlRecord:
    """No further batch, ``wait`` seconds for the one under way, and then the end. Raises NotAliveError, UsageError.

    Another kill sets another wait. Without a driver the topology is REMOVED at once.
    """
    if type(wait) not in (int, float) or not 0 <= wait <= _MOST_WAIT:
        raise UsageError(f"a kill waits for 0 to {_MOST_WAIT:g} seconds, not {shown(wait)}. Nothing was written.")
    record = present(record, topology)
    killed = _next(record, status="KILLED", since=at, wait=wait, command=record.command + 1)
    return _removed(killed, at) if record.driver is None else killed


def bury(record: ControlRecord | None, topology: str, dead: DriverRecord | None, at: str) -> ControlRecord:
    """The driver is ``dead``, or there was none. A KILLED topology is REMOVED. Raises NotAliveError."""
    if record is not None and (record.status == "REMOVED" or record.driver != dead):
        return record
    record = present(record, topology)
    return _removed(record, at) if record.status == "KILLED" else _next(record, driver=None)


def beat(record: ControlRecord | None, topology: str, session: str, at: str) -> ControlRecord:
    """The driver lives. Raises FencedError."""
    record, driver = _own(record, topology, session)
    return _next(record, driver=msgspec.structs.replace(driver, beat=driver.beat + 1, at=at))


def obey(record: ControlRecord | None, topology: str, session: str, command: int) -> ControlRecord:
    """The driver has done what the command asks for. Raises FencedError."""
    record, _ = _own(record, topology, session)
    return record if record.obeyed >= command else _next(record, obeyed=command)


def remove(record: ControlRecord | None, topology: str, session: str, at: str) -> ControlRecord:
    """The driver of a killed topology has stopped its queries. Raises FencedError, UsageError."""
    if record is not None and record.status == "REMOVED":
        return record  # by this driver, to which the store's answer was lost
    record, _ = _own(record, topology, session)
    if record.status != "KILLED":
        raise UsageError(f"topology {topology!r} is {record.status}: it cannot remove itself.")
    return _removed(record, at)


def release(record: ControlRecord | None, topology: str, session: str) -> ControlRecord:
    """The driver ends in order, and the next one need not wait. Raises FencedError."""
    record, _ = _own(record, topology, session)
    return _next(record, driver=None)


def _next(record: ControlRecord, **changes: Any) -> ControlRecord:
    return msgspec.structs.replace(record, revision=record.revision + 1, **changes)


def _removed(record: ControlRecord, at: str) -> ControlRecord:
    return _next(record, status="REMOVED", since=at, obeyed=record.command, partitions=None, driver=None)


def _changed(record: ControlRecord | None, topology: str, event: str, status: Status, at: str) -> ControlRecord:
    record = _living(record, topology, event)
    if record.status == status:
        return record
    return _next(record, status=status, since=at, command=record.command + 1)


def present(record: ControlRecord | None, topology: str) -> ControlRecord:
    """The record of a topology that is there. Raises NotAliveError."""
    if record is None or record.status == "REMOVED":
        raise NotAliveError(
            f"there is no topology {topology!r} here. Nothing was written. Check the name and the store: it is the one "
            "that the job gave to run(store=...).",
            topology=topology,
        )
    return record


def _living(record: ControlRecord | None, topology: str, event: str) -> ControlRecord:
    record = present(record, topology)
    if record.status == "KILLED":
        raise UsageError(f"topology {topology!r} is KILLED: it takes no {event!r}. Nothing was written.")
    return record


def _own(record: ControlRecord | None, topology: str, session: str) -> tuple[ControlRecord, DriverRecord]:
    driver = None if record is None else record.driver
    if record is None or driver is None or driver.session != session:
        now = "none" if driver is None else f"the one on {driver.host}, process {driver.pid}"
        raise FencedError(
            f"this driver of topology {topology!r} has been taken over, or was silent and taken for dead: its driver "
            f"is now {now}. The queries of this one are stopped.",
            topology=topology,
        )
    return record, driver


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(ControlRecord)


def is_control(data: object) -> bool:
    """Whether this is a control record, where a ledger may be, or what another program wrote."""
    return isinstance(data, bytes) and data.startswith(CONTROL_MARK)


def encode_control(record: ControlRecord) -> bytes:
    """Encode a record as JSON, which can be read in the store's own shell."""
    return _encoder.encode(record)


def decode_control(data: bytes, topology: str) -> ControlRecord:
    """Decode a record. Raises CorruptRecordError for anything else."""
    try:
        record = _decoder.decode(data)
    except (msgspec.MsgspecError, ValueError, TypeError, RecursionError) as error:
        raise _corrupt(topology, cut(error)) from error
    flaw = _flaw(record, topology)
    if flaw is not None:
        raise _corrupt(topology, flaw)
    return record


def _flaw(record: ControlRecord, topology: str) -> str | None:
    driver = record.driver
    times = [record.since] if driver is None else [record.since, driver.started, driver.at]
    numbers = [record.wait] if driver is None else [record.wait, driver.silence]
    for is_flaw, flaw in (
        (record.topology != topology, f"it is that of {cut(record.topology)}"),
        (record.control != _FORMAT, f"it is in format {record.control}"),
        (not all(times) or not are_times(times), "a time is not ISO 8601 with an offset"),
        (not all(0 <= number <= _MOST_WAIT for number in numbers), "its seconds are out of range"),
        (record.partitions is not None and record.partitions < 1, "its partitions are no number from 1 up"),
    ):
        if is_flaw:
            return flaw
    return None


def _corrupt(topology: str, why: str) -> CorruptRecordError:
    return CorruptRecordError(
        f"the control record of topology {topology!r} cannot be read ({why}): a state has this name, or another "
        "program or a newer mapstate wrote it. Nothing was written.",
        topology=topology,
    )
