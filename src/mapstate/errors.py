"""Every error that mapstate raises, in one tree. Some are also the built-in error in parentheses.

    MapStateError
    ├── ConfigurationError            a request that cannot be met, raised before anything runs (ValueError)
    │   ├── UnknownSchemeError        no store answers to this URL scheme
    │   ├── MissingDriverError        a package of an extra is not installed (ImportError)
    │   ├── UnknownColumnError        a key or an aggregate names a missing column (KeyError)
    │   ├── UnsupportedTypeError      a column's type cannot be a key or a value (TypeError)
    │   ├── DuplicateNameError        two outputs, or an output and a key, have one name
    │   ├── NotPicklableError         a spec or an aggregator cannot be sent to executors (PicklingError)
    │   └── ExecutorEnvironmentError  an executor lacks a package, or has another mapstate (ImportError)
    ├── UsageError                    a call with wrong arguments, or in a wrong order (ValueError)
    ├── CheckpointError               the files of a checkpoint cannot be read or moved (OSError)
    ├── DataError                     the batch or the store holds data that the state cannot take
    │   ├── KeyEncodingError          a key does not fit the state's key schema (ValueError)
    │   ├── SerializationError        the serializer cannot hold a value (ValueError)
    │   ├── ValueOverflowError        a sum left its type's range (OverflowError)
    │   ├── TooLargeError             a key or value is above the store's limit (ValueError)
    │   ├── AggregatorError           a user's aggregator raised
    │   ├── UpdaterError              a user's own state, or its updater, raised
    │   └── CorruptRecordError        a stored record cannot be read back (ValueError)
    │       └── CorruptLedgerError    the state's ledger cannot be read back
    ├── LedgerError                   the protocol refused
    │   ├── StateNotFoundError        a reader asked for a state without a ledger (LookupError)
    │   ├── StateOwnershipError       another streaming query owns the state
    │   ├── StateSchemaError          type, serializer, keys or fields differ from the ledger's
    │   ├── SeedingError              the state is being seeded, and its history is not whole yet
    │   ├── StaleBatchError           the batch is older than the state
    │   ├── MissingBatchesError       the state lacks batches that Spark has already finished
    │   ├── ReplannedBatchError       Spark planned a batch anew, over other input than the state counts
    │   ├── FencedError               a newer attempt or driver has taken over
    │   ├── RollbackError             the last batch can no longer be rolled back
    │   ├── IncompleteBatchError      the tasks account for other rows than went in
    │   ├── LedgerLostError           records are older than their ledger
    │   ├── MissingKeysError          the state has fewer keys than its ledger says
    │   ├── StoreLostError            the ledger vanished while the stream was running
    │   ├── StoreRestartedError       the store may have lost writes of the attempt in flight
    │   ├── ChangesGoneError          the changes since then are not kept any more (LookupError)
    │   ├── WindowGoneError           the window is past its retention (LookupError)
    │   ├── AlreadyAliveError         another driver runs the topology
    │   └── NotAliveError             there is no such topology (LookupError)
    ├── DRPCError                     a request to a DRPC server failed
    └── StoreError                    the store failed
        ├── StoreUnavailableError     no connection, or no answer in time (ConnectionError, TimeoutError)
        ├── StoreAuthError            the store refused the user or the password (PermissionError)
        ├── StoreFullError            the store is out of memory or disk
        └── CorruptStoreError         the store's file is damaged

A message says what happened, what was written, and what to do. It is the only positional argument. Further facts are
keyword-only attributes. Errors pickle, because executors send them to the driver. They never hold a password.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pickle import PicklingError
from typing import Any, get_args

__all__ = [
    "AggregatorError",
    "AlreadyAliveError",
    "ChangesGoneError",
    "CheckpointError",
    "ConfigurationError",
    "CorruptLedgerError",
    "CorruptRecordError",
    "CorruptStoreError",
    "DRPCError",
    "DataError",
    "DuplicateNameError",
    "ExecutorEnvironmentError",
    "FencedError",
    "IncompleteBatchError",
    "KeyEncodingError",
    "LedgerError",
    "LedgerLostError",
    "MapStateError",
    "MissingBatchesError",
    "MissingDriverError",
    "MissingKeysError",
    "NotAliveError",
    "NotPicklableError",
    "ReplannedBatchError",
    "RollbackError",
    "SeedingError",
    "SerializationError",
    "StaleBatchError",
    "StateNotFoundError",
    "StateOwnershipError",
    "StateSchemaError",
    "StoreAuthError",
    "StoreError",
    "StoreFullError",
    "StoreLostError",
    "StoreRestartedError",
    "StoreUnavailableError",
    "TooLargeError",
    "UnknownColumnError",
    "UnknownSchemeError",
    "UnsupportedTypeError",
    "UpdaterError",
    "UsageError",
    "ValueOverflowError",
    "WindowGoneError",
]

_PAGE = re.compile(r"\bSee docs/([\w/-]+)\.md")


class MapStateError(Exception):
    """Root of the tree.

    Args:
        message: The text that ``str()`` returns.
        facts: Plain values (str, int, bool, None, or lists of them), also readable as attributes. An error has to
            survive both pickle and the row in which a task reports it.

    """

    def __init__(self, message: str, /, **facts: Any) -> None:
        super().__init__(message)
        self.message = _PAGE.sub(r"See mapstate help \1", message)  # which opens where the package is installed
        self.facts = facts

    def __str__(self) -> str:
        return self.message  # KeyError would quote it

    def __getattr__(self, name: str) -> Any:
        facts = self.__dict__.get("facts", {})
        if name in facts:
            return facts[name]
        raise AttributeError(name)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.message, self.facts)


def _rebuild(cls: type[MapStateError], message: str, facts: dict[str, Any]) -> MapStateError:
    return cls(message, **facts)


class ConfigurationError(MapStateError, ValueError):
    """A request that cannot be met; raised before anything runs, except for a session that outgrows a bound."""


class UnknownSchemeError(ConfigurationError):
    """No store answers to this URL scheme."""


class MissingDriverError(ConfigurationError, ImportError):
    """A package of an extra is not installed, such as a store's driver; the message names the extra."""


class UnknownColumnError(ConfigurationError, KeyError):
    """A key or an aggregate names a column that the stream does not have."""


class UnsupportedTypeError(ConfigurationError, TypeError):
    """A column's type cannot serve as this key or in this aggregate."""


class DuplicateNameError(ConfigurationError):
    """Two outputs, or an output and a key, share a name."""


class NotPicklableError(ConfigurationError, PicklingError):
    """A spec or an aggregator cannot be sent to executors; the message names the attribute."""


class ExecutorEnvironmentError(ConfigurationError, ImportError):
    """An executor lacks a package that the job's tasks import, or has another version of mapstate than the driver."""


class UsageError(MapStateError, ValueError):
    """A call with wrong arguments, or in a wrong order."""


class CheckpointError(MapStateError, OSError):
    """The files of a streaming checkpoint cannot be read or moved aside."""


class DataError(MapStateError):
    """The batch or the store holds data that the state cannot take."""


class KeyEncodingError(DataError, ValueError):
    """A key does not fit the state's key schema."""


class SerializationError(DataError, ValueError):
    """The state's serializer cannot hold a value without changing it."""


class ValueOverflowError(DataError, OverflowError):
    """A sum left the range of its type: 64 bits for integers, 38 digits for decimals."""


class TooLargeError(DataError, ValueError):
    """A key or a value is above the store's limit."""


class AggregatorError(DataError):
    """A user's aggregator raised; the message names its error."""


class UpdaterError(DataError):
    """A user's own state or its StateUpdater raised; the message names its error."""


class CorruptRecordError(DataError, ValueError):
    """A stored record cannot be read back. It is never treated as absent."""


class CorruptLedgerError(CorruptRecordError):
    """The state's ledger cannot be read, or contradicts itself. It is never treated as absent."""


class LedgerError(MapStateError):
    """The protocol refused; this call committed nothing."""


class StateNotFoundError(LedgerError, LookupError):
    """A reader asked for a state that has no ledger in this store."""


class StateOwnershipError(LedgerError):
    """Another streaming query owns the state: a lost checkpoint, or a second job."""


class StateSchemaError(LedgerError):
    """Type, serializer, key schema or fields differ from those in the ledger."""


class StaleBatchError(LedgerError):
    """The batch is older than the state (old checkpoint, overtaken driver), or an answer is too old for its reader."""


class MissingBatchesError(LedgerError):
    """The state lacks batches that Spark finished: the store lost them, or the job ran without the state."""


class ReplannedBatchError(LedgerError):
    """Spark planned a batch anew that the state counts or has in flight, and it cannot be counted anew.

    ``found`` and ``expected`` are source offsets as JSON, where they are known.
    """


class FencedError(LedgerError):
    """A newer attempt, or a newer driver, has taken over; this one may no longer write."""


class RollbackError(LedgerError):
    """The last batch can no longer, or not for this type of state, be rolled back."""


class SeedingError(LedgerError):
    """The state is being seeded: nobody can read it, or count on it, before its history is whole."""


class IncompleteBatchError(LedgerError):
    """The tasks account for other rows than went into the batch; nothing is committed."""


class LedgerLostError(LedgerError):
    """Records are older than their ledger: it was evicted, deleted or recreated."""


class MissingKeysError(LedgerError):
    """A whole scan found fewer keys than the ledger says: records were deleted or lost."""


class StoreLostError(LedgerError):
    """The ledger vanished while the stream was running; no new one is made."""


class StoreRestartedError(LedgerError):
    """The store was restarted or replaced under an attempt and may have lost its writes; nothing is committed."""


class ChangesGoneError(LedgerError, LookupError):
    """The follower is too far behind: its changes were removed, or the state was made anew."""


class WindowGoneError(LedgerError, LookupError):
    """A reader asked for a window that is past its retention. Windows that end later are there."""


class AlreadyAliveError(LedgerError):
    """Another driver runs a topology of this name."""


class NotAliveError(LedgerError, LookupError):
    """There is no such topology: nobody has submitted it, or it was killed and is removed."""


class DRPCError(MapStateError):
    """A request to a DRPC server failed: its function raised, or it was not answered. ``status`` is that of HTTP."""


class StoreError(MapStateError):
    """The store failed. The error of its driver is chained and never raised by itself."""


class StoreUnavailableError(StoreError, ConnectionError, TimeoutError):
    """The store cannot be reached or did not answer, after bounded retries."""


class StoreAuthError(StoreError, PermissionError):
    """The store refused the user or the password."""


class StoreFullError(StoreError):
    """The store is out of memory or disk."""


class CorruptStoreError(StoreError):
    """The store's file is damaged, or is not a file of this store."""


def missing_driver(user: str, error: ModuleNotFoundError, extra: str) -> MissingDriverError:
    """The error for a failed import: ``user`` needs the package, and ``extra`` installs it."""
    return MissingDriverError(
        f"{user} needs the package {error.name!r}, which is not installed: "
        f"{sys.executable or 'python'} -m pip install 'mapstate[{extra}]'",
        package=error.name,
    )


_MOST_SHOWN = 100


def shown(value: object) -> str:
    """The first hundred characters of a key's, a value's or a record's repr, for a message."""
    try:
        return cut(repr(value[: _MOST_SHOWN + 1] if isinstance(value, str | bytes | bytearray) else value))
    except Exception:  # noqa: BLE001  an int of 5,000 digits has no repr, nor may an object of a user's
        return f"a value of type {type(value).__name__}"


def of_key(error: MapStateError, state: str, key: object) -> MapStateError:
    """The error of one key's value: its message begins with the state and the key. One that has a key is as it was."""
    if error.facts.get("key") is not None:
        return error
    named = f"state {state!r}, key {shown(key)}: {error.message.removeprefix(f'state {state!r}: ')}"
    return type(error)(named, **error.facts | {"state": state, "key": str(key)})


def of_first_key(
    error: MapStateError, state: str, keys: Sequence[object], alone: Callable[[int], object]
) -> MapStateError:
    """`of_key` for an error of several keys: of the first for which ``alone``, by its place, raises one like it."""
    for i, key in enumerate(keys):
        try:
            alone(i)
        except type(error) as own:
            return of_key(own, state, key)
    return error


@contextmanager
def window_in_range(part: str, advice: str) -> Iterator[None]:
    """Around the join of a window's parts: says that it is a read that fails, and not a batch."""
    try:
        yield
    except ValueOverflowError as error:
        raise ValueOverflowError(
            f"a window's value left its range, though each {part}'s is in it. Nothing was given out. {advice}",
            **error.facts,
        ) from error


def check_range(name: str, value: Any, least: float, most: float = 2**31 - 1, unit: str = "") -> None:
    """Raise ConfigurationError unless a value is a number between both ends; an int if ``least`` is one."""
    kind = int if isinstance(least, int) else int | float
    if not isinstance(value, kind) or isinstance(value, bool) or not least <= value <= most:
        number = "an int" if kind is int else "a number"
        raise ConfigurationError(f"{name} is {number}{unit} from {least:g} to {most:,}, not {shown(value)}")


def check_names(lacks: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raise ConfigurationError unless all names are known. ``lacks`` begins its message: "a spec has no option"."""
    known = list(known)
    unknown = sorted(set(given).difference(known))
    if unknown:
        raise ConfigurationError(f"{lacks} {', '.join(map(shown, unknown))}; it has {', '.join(known)}")


def check_choice(name: str, value: Any, choices: Any) -> None:
    """Raise ConfigurationError unless a value is one of a Literal's."""
    if value not in get_args(choices):
        raise ConfigurationError(f"{name} is one of {', '.join(get_args(choices))}, not {shown(value)}")


def cut(text: object) -> str:
    """The first hundred characters of a text that may hold a value, such as another library's error."""
    text = str(text)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


INSIDE = "__mapstate_"
"""The names of columns that begin so are mapstate's."""


def check_unique(names: Sequence[str]) -> None:
    """Raises DuplicateNameError for a name that comes twice, or that is one of mapstate's own."""
    folded = [name.casefold() for name in names]  # as Spark compares them
    for name in names:
        if folded.count(name.casefold()) > 1 or name.casefold().startswith(INSIDE):
            raise DuplicateNameError(
                f"the name {name!r} is taken: key columns, aggregates and what an updater emits each need a name of "
                f"their own, and those that begin with {INSIDE} are mapstate's",
                name=name,
            )
