"""Every error that mapstate raises, in one tree.

    MapStateError
    ├── ConfigurationError            what was asked for cannot be done; raised before anything runs
    │   ├── UnknownSchemeError        no store answers to this URL scheme
    │   ├── MissingDriverError        a driver package is not installed (names the extra)
    │   ├── UnknownColumnError        a key or an aggregate names a column that is not there
    │   ├── UnsupportedTypeError      a column's type cannot be a key or a value here
    │   ├── DuplicateNameError        two outputs, or an output and a key, have one name
    │   └── NotPicklableError         a recipe or aggregator cannot travel to executors
    ├── UsageError                    calls in an order, or of a shape, that cannot be right
    ├── CheckpointError               the files of a checkpoint cannot be read or moved
    ├── DataError                     this batch holds something that the state cannot
    │   ├── KeyEncodingError          a key does not fit the state's key schema
    │   ├── SerializationError        a value the serializer cannot hold
    │   ├── ValueOverflowError        a sum that left its type's range
    │   ├── TooLargeError             a key or value above the store's limit
    │   ├── AggregatorError           a user's aggregator raised
    │   ├── UpdaterError              a user's own state, or its updater, raised
    │   └── CorruptRecordError        a stored record that cannot be read back
    │       └── CorruptLedgerError    the state's ledger cannot be
    ├── LedgerError                   the protocol refused
    │   ├── StateNotFoundError        a reader asked for a state that has no ledger
    │   ├── StateOwnershipError       another streaming query owns the state
    │   ├── StateSchemaError          type, serializer, keys or fields differ from the ledger's
    │   ├── StaleBatchError           the batch is older than the state
    │   ├── MissingBatchesError       the state lacks batches that Spark has already finished
    │   ├── ReplannedBatchError       Spark planned a batch anew, over other input than the state counts
    │   ├── FencedError               a newer attempt or driver has taken over
    │   ├── RollbackError             the last batch can no longer be rolled back
    │   ├── IncompleteBatchError      rows in and rows accounted for differ
    │   ├── LedgerLostError           records are older than their ledger
    │   ├── MissingKeysError          the state has fewer keys than its ledger says
    │   ├── StoreLostError            the ledger vanished while the stream was running
    │   └── StoreRestartedError       the store may have lost writes of the attempt in flight
    └── StoreError                    the store, as such
        ├── StoreUnavailableError     cannot be reached, or did not answer in time
        ├── StoreAuthError            refused the user or the password
        ├── StoreFullError            out of memory or disk
        ├── CorruptStoreError         its file is damaged
        └── PartialWriteError         a bulk put was applied in part

Every message says what was found, what was expected and what an operator can do. The message is
the only positional argument; extra facts are keyword-only attributes. Errors pickle, because
executors send them to the driver, and they never hold a password.
"""

from __future__ import annotations

from typing import Any, Self

__all__ = [
    "AggregatorError",
    "CheckpointError",
    "ConfigurationError",
    "CorruptLedgerError",
    "CorruptRecordError",
    "CorruptStoreError",
    "DataError",
    "DuplicateNameError",
    "FencedError",
    "IncompleteBatchError",
    "KeyEncodingError",
    "LedgerError",
    "LedgerLostError",
    "MapStateError",
    "MissingBatchesError",
    "MissingDriverError",
    "MissingKeysError",
    "NotPicklableError",
    "PartialWriteError",
    "ReplannedBatchError",
    "RollbackError",
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
]


class MapStateError(Exception):
    """Root of the tree.

    ``facts`` are the keyword arguments, also readable as attributes: plain values only (str, int,
    bool, None, or lists of them), so that an error survives both pickle and the row in which a task
    reports it.
    """

    def __init__(self, message: str, /, **facts: Any) -> None:
        super().__init__(message)
        self.message = message
        self.facts = facts

    def __getattr__(self, name: str) -> Any:
        facts = self.__dict__.get("facts", {})
        if name in facts:
            return facts[name]
        raise AttributeError(name)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.message, self.facts)

    @classmethod
    def because(cls, cause: BaseException, message: str, /, **facts: Any) -> Self:
        """An error of this class with ``cause`` chained, for ``raise X.because(e, "...")``."""
        error = cls(message, **facts)
        error.__cause__ = cause
        return error


def _rebuild(cls: type[MapStateError], message: str, facts: dict[str, Any]) -> MapStateError:
    return cls(message, **facts)


class ConfigurationError(MapStateError):
    """What was asked for cannot be done; raised on the driver, before anything runs."""


class UnknownSchemeError(ConfigurationError):
    """No store answers to this URL scheme."""


class MissingDriverError(ConfigurationError):
    """A store's driver package is not installed; the message names the extra to install."""


class UnknownColumnError(ConfigurationError):
    """A key or an aggregate names a column that the stream does not have."""


class UnsupportedTypeError(ConfigurationError):
    """A column's type cannot serve as this key or in this aggregate."""


class DuplicateNameError(ConfigurationError):
    """Two outputs, or an output and a key, share a name."""


class NotPicklableError(ConfigurationError):
    """A recipe or an aggregator cannot travel to executors; the message names the attribute."""


class UsageError(MapStateError):
    """Calls in an order, or with lengths, that cannot be right."""


class CheckpointError(MapStateError):
    """The files of a streaming checkpoint cannot be read, or moved aside."""


class DataError(MapStateError):
    """The batch or the store holds something that the state cannot."""


class KeyEncodingError(DataError):
    """A key does not fit the state's key schema."""


class SerializationError(DataError):
    """A value that the state's serializer cannot hold without changing it."""


class ValueOverflowError(DataError):
    """A sum left the range of its type: 64 bits for integers, 38 digits for decimals."""


class TooLargeError(DataError):
    """A key or a value above what the store takes."""


class AggregatorError(DataError):
    """A user's aggregator raised; its own error is named in the message."""


class UpdaterError(DataError):
    """A user's own state or its StateUpdater raised; its own error is named in the message."""


class CorruptRecordError(DataError):
    """A stored record that cannot be read back. Never treated as absent."""


class CorruptLedgerError(CorruptRecordError):
    """The state's ledger cannot be read, or contradicts itself. Never treated as absent."""


class LedgerError(MapStateError):
    """The protocol refused; nothing was written."""


class StateNotFoundError(LedgerError):
    """A reader asked for a state that has no ledger in this store."""


class StateOwnershipError(LedgerError):
    """Another streaming query owns the state: a lost checkpoint, or a second job."""


class StateSchemaError(LedgerError):
    """Type, serializer, key schema or fields differ from those in the ledger."""


class StaleBatchError(LedgerError):
    """The batch is older than the state: an old checkpoint, or a driver that was overtaken."""


class MissingBatchesError(LedgerError):
    """Spark finished batches that the state does not have: the store lost them, or was left out."""


class ReplannedBatchError(LedgerError):
    """Spark brings a batch with another plan than the state counts or has in flight, and it cannot be counted anew.

    ``found`` and ``expected`` are source offsets as JSON, where they are known.
    """


class FencedError(LedgerError):
    """A newer attempt, or a newer driver, has taken over; this one may no longer write."""


class RollbackError(LedgerError):
    """The last batch can no longer, or not for this type of state, be rolled back."""


class IncompleteBatchError(LedgerError):
    """Rows that went into a batch and rows that the tasks accounted for differ; not committed."""


class LedgerLostError(LedgerError):
    """Records were met that are older than their ledger: it was evicted, deleted or recreated."""


class MissingKeysError(LedgerError):
    """A whole scan found fewer keys than the ledger says: something else deleted records, or the store lost them."""


class StoreLostError(LedgerError):
    """The ledger vanished while the stream was running; nothing was written."""


class StoreRestartedError(LedgerError):
    """The store was restarted or replaced under an attempt, which may have lost writes; not committed."""


class StoreError(MapStateError):
    """The store as such; what its driver raised is chained, never let out by itself."""


class StoreUnavailableError(StoreError):
    """The store cannot be reached or did not answer, after bounded retries."""


class StoreAuthError(StoreError):
    """The store refused the user or the password."""


class StoreFullError(StoreError):
    """The store is out of memory or disk."""


class CorruptStoreError(StoreError):
    """The store's own file is damaged, or is no file of this store."""


class PartialWriteError(StoreError):
    """A bulk put was applied in part; the attempt must not be committed."""
