"""The filtered writer of a task: the server refuses a put over a record with a later txid."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import aerospike
from aerospike_helpers import expressions

from mapstate.backends.aerospike.codes import FILTERED_OUT, NOT_FOUND, OK
from mapstate.backends.aerospike.connection import BatchError
from mapstate.backends.aerospike.records import Records
from mapstate.capabilities import FenceToken
from mapstate.errors import FencedError, StoreError, UsageError
from mapstate.keys import StoreKey


class Writer:
    """The map of one task. See `FilteredWrites.filtered_writer`."""

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
