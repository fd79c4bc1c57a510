"""The records of one state: a set of Aerospike, read and written in batches, and the filtered writer of a task."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import aerospike
from aerospike_helpers import expressions
from aerospike_helpers.batch.records import BatchRecords, Write
from aerospike_helpers.operations import operations

from mapstate.backends.aerospike.connection import (
    BATCH_FAILED,
    FILTERED_OUT,
    NO_ANSWER,
    NOT_FOUND,
    OK,
    BatchError,
    Connection,
)
from mapstate.backing_map import check_lengths
from mapstate.capabilities import FenceToken
from mapstate.errors import CorruptRecordError, FencedError, KeyEncodingError, StoreError, UsageError, shown
from mapstate.keys import StoreKey

CLAIMS = "mapstate.claims"
"""The set of the claims of all states of a namespace."""

LEDGER = "\\ledger"
"""The user key of the ledger. No encoded key is equal to it."""


class Records:
    """Bulk gets and puts. ``set_name`` is the set of the state, ``ttl`` in seconds."""

    def __init__(
        self,
        connection: Connection,
        state: str,
        namespace: str,
        set_name: str,
        *,
        bin: str,  # noqa: A002  the field's word
        batch_size: int,
        ttl: float | None,
    ) -> None:
        self.namespace = namespace
        self.set_name = set_name
        self.bin = bin
        self.batch_size = batch_size
        self._connection = connection
        self._state = state
        # The ttl belongs into the policy of each write: the client ignores that of the batch.
        self.put_policy = {
            "key": aerospike.POLICY_KEY_SEND,
            "ttl": aerospike.TTL_NEVER_EXPIRE if ttl is None else math.ceil(ttl),
        }

    def places(self, keys: Iterable[StoreKey]) -> list[Any]:
        return [self.place(key) for key in keys]

    def place(self, key: StoreKey) -> tuple[str, str, Any]:
        """The client's key. The client cuts a str at a NUL, and one that is not Unicode kills the process."""
        user_key: Any = key
        if isinstance(key, str):
            try:
                if "\0" in key or not key.isascii():
                    data = key.encode()
                    user_key = bytearray(data) if b"\0" in data else key
            except UnicodeEncodeError as error:
                message = f"state {self._state!r}: the key {shown(key)} is not Unicode: {error.reason}"
                raise KeyEncodingError(message, state=self._state) from error
        elif not -(1 << 63) <= key < 1 << 63:
            raise KeyEncodingError(
                f"state {self._state!r}: the key {shown(key)} has more than 64 bits", state=self._state
            )
        return self.namespace, self.set_name, user_key

    def read(self, keys: Sequence[StoreKey], places: list[Any]) -> list[Any]:
        """The record of each key, None where it is absent. ``places`` are those of the keys."""
        out: list[Any] = []
        for some, at in self._batches(keys, places):
            records = self._connection.retrying(partial(self._read, some, at))
            out += [self._value(key, record) for key, record in zip(some, records, strict=True)]
        return out

    def write(
        self,
        keys: Sequence[StoreKey],
        values: Sequence[Any],
        policy: dict[str, Any],
        *,
        places: list[Any] | None = None,
        guard: dict[str, Any] | None = None,
        accepted: int = OK,
    ) -> None:
        """Write each record under ``policy``, of a repeated key the last; ``accepted`` is a code that is no error.

        ``guard`` holds the filter of all records, for the batch's policy: the client compiles one for each policy.
        """
        check_lengths(keys, values, "values")
        last = dict(zip(keys, values, strict=True))  # the server applies two writes of one batch in any order
        if places is None or len(last) < len(keys):
            places = self.places(last)
        policies = policy, self._connection.policy | (guard or {})
        for some, at in self._batches(list(last), places):
            self._connection.retrying(partial(self._write, some, at, last, policies, accepted))

    def remove(self, keys: Sequence[StoreKey]) -> None:
        places, connection = self.places(keys), self._connection

        def remove() -> None:
            self._checked(keys, connection.client.batch_remove(places, connection.policy), (OK, NOT_FOUND))

        connection.retrying(remove)

    def _read(self, keys: Sequence[StoreKey], places: list[Any]) -> list[Any]:
        connection = self._connection
        return self._checked(keys, connection.client.batch_read(places, [self.bin], connection.policy), (OK, NOT_FOUND))

    def _write(
        self,
        keys: Sequence[StoreKey],
        places: list[Any],
        values: dict[Any, Any],
        policies: tuple[dict[str, Any], dict[str, Any]],
        accepted: int,
    ) -> None:
        of_each, of_batch = policies
        # Built anew for each try: the client writes its results into them.
        bins = [[operations.write(self.bin, values[key])] for key in keys]
        batch = BatchRecords([Write(place, record, policy=of_each) for place, record in zip(places, bins, strict=True)])
        self._connection.client.batch_write(batch, of_batch)
        self._checked(keys, batch, (OK, accepted))

    def _checked(self, keys: Sequence[StoreKey], batch: Any, accepted: tuple[int, ...]) -> list[Any]:
        """The records of a batch, for which the client raises nothing. The result of the whole call comes first."""
        if batch.result not in (OK, BATCH_FAILED):
            raise BatchError(batch.result, f"the whole batch of {len(keys)} keys failed")
        records: list[Any] = batch.batch_records
        if len(records) != len(keys):
            raise BatchError(NO_ANSWER, f"{len(records)} records came for {len(keys)} keys")
        for key, record in zip(keys, records, strict=True):
            if record.result not in accepted:
                bad = sum(other.result not in accepted for other in records)
                more = f": {record.message}" if record.message else ""
                raise BatchError(
                    record.result, f"{bad} of {len(keys)} keys failed, the first is {shown(key)}{more}", key=key
                )
        return records

    def _batches(self, keys: Sequence[StoreKey], places: list[Any]) -> Iterator[tuple[Sequence[StoreKey], list[Any]]]:
        size = self.batch_size
        for i in range(0, len(keys), size):
            yield keys[i : i + size], places[i : i + size]

    def _value(self, key: StoreKey, record: Any) -> Any:
        if record.result == NOT_FOUND:
            return None
        bins = record.record[2]
        if self.bin not in (bins or {}):
            raise CorruptRecordError(
                f"state {self._state!r}, key {shown(key)}: the record has no bin {self.bin!r}. It was not "
                "written by this state, or with another bin in the URL; it was not overwritten.",
                state=self._state,
                key=str(key),
            )
        return bins[self.bin]


class Writer:
    """The map of one task, see `FilteredWrites.filtered_writer`: the server refuses a put over a later txid."""

    def __init__(self, records: Records, token: FenceToken, state: str) -> None:
        self._records = records
        self._token = token
        self._state = state
        self._read: tuple[list[StoreKey], list[Any]] = [], []
        stored = expressions.ListGetByIndex(
            None, aerospike.LIST_RETURN_VALUE, expressions.ResultType.INTEGER, -1, expressions.ListBin(records.bin)
        )
        # The server evaluates the filter for records that exist only.
        self._filter = {"expressions": expressions.LE(stored, token.txid).compile()}

    def multi_get(self, keys: Sequence[StoreKey]) -> list[Any]:
        """See `IBackingMap.multi_get`. Keeps the keys' places: the put of a chunk follows its get."""
        places = self._records.places(keys)
        self._read = list(keys), places
        return self._records.read(keys, places)

    def multi_put(self, keys: Sequence[StoreKey], values: Sequence[Any]) -> None:
        """Raises FencedError where a record has a later txid. A put whose reply is lost is repeated."""
        self._guarded(keys, values, self._records.put_policy)

    def multi_rewrite(self, keys: Sequence[StoreKey], values: Sequence[Any | None]) -> None:
        """See `Rewrites.multi_rewrite`. Removes nothing: a late writer's filter would find no newer record."""
        if None in values:
            raise UsageError(f"state {self._state!r}: in Aerospike a removed key has to leave its record behind")
        keep_ttl = {"ttl": aerospike.TTL_DONT_UPDATE, "exists": aerospike.POLICY_EXISTS_UPDATE}
        self._guarded(keys, values, self._records.put_policy | keep_ttl, accepted=NOT_FOUND)

    def _guarded(
        self, keys: Sequence[StoreKey], values: Sequence[Any], policy: dict[str, Any], *, accepted: int = OK
    ) -> None:
        read, places = self._read
        known = places if read == keys else None
        try:
            self._records.write(keys, values, policy, places=known, guard=self._filter, accepted=accepted)
        except StoreError as error:
            if not isinstance(error.__cause__, BatchError) or error.__cause__.code != FILTERED_OUT:
                raise
            raise FencedError(
                f"state {self._state!r}: the attempt with txid {self._token.txid} of epoch {self._token.epoch} "
                f"may no longer write: {error.__cause__.msg}, because its record has a later txid (or is no list with "
                "a txid). A newer attempt or driver has taken over.",
                state=self._state,
                txid=self._token.txid,
                epoch=self._token.epoch,
            ) from None
