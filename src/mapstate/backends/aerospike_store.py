"""One state in Aerospike: the calls of the client, and what becomes of their results.

There is no fence: no write is atomic over two records. Each record refuses an older txid by a filter expression
(`FilteredWrites`), and what a late writer can still create is dead by the one rule.
"""

from __future__ import annotations

import math
import random
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import aerospike
from aerospike import exception as driver
from aerospike_helpers import expressions
from aerospike_helpers.batch.records import BatchRecords, Write
from aerospike_helpers.operations import operations

from mapstate.backends.aerospike_checkup import judge
from mapstate.backends.aerospike_codes import (
    BATCH_FAILED,
    FILTERED_OUT,
    NO_ANSWER,
    NOT_FOUND,
    OK,
    meaning,
)
from mapstate.backing_map import FenceToken, IBackingMap, check_lengths
from mapstate.errors import CorruptRecordError, FencedError, KeyEncodingError, MapStateError, StoreError, UsageError
from mapstate.findings import MOST_NAMED, Finding
from mapstate.keys import StoreKey
from mapstate.values import shown

if TYPE_CHECKING:
    from mapstate.backends.aerospike import AerospikeBackend

__all__ = ["CLAIMS", "AerospikeStore"]

T = TypeVar("T")

_Version = tuple[bytes, str | None]
"""The ledger, and the cluster that it was read in."""

CLAIMS = "mapstate.claims"
"""The set of the claims of all states of a namespace."""

_LEDGER, _REPORTS = "\\ledger", "\\reports"  # no encoded key can be equal to one of them


class AerospikeStore:
    """One state in Aerospike. Cheap to make; the client is the process's and stays open."""

    def __init__(self, backend: AerospikeBackend, state: str, name_of_set: str, ttl: float | None) -> None:
        self._backend = backend
        self._state = state
        self._set = name_of_set
        milliseconds = int(backend.timeout * 1000)
        # The client's own defaults give up after a second, and try no write again.
        self._once = {"total_timeout": milliseconds, "socket_timeout": milliseconds, "max_retries": 0}
        self._policy = {"total_timeout": milliseconds, "socket_timeout": max(1, milliseconds // 3), "max_retries": 2}
        # The ttl stands in the policy of each write: in that of a batch it would be passed over.
        self._put = {
            "key": aerospike.POLICY_KEY_SEND,
            "ttl": aerospike.TTL_NEVER_EXPIRE if ttl is None else math.ceil(ttl),
        }

    def multi_get(self, keys: Sequence[StoreKey]) -> list[Any]:
        """See `IBackingMap.multi_get`: a batch read per ``batch_size`` keys."""
        return self.read(keys, self.places(keys))

    def multi_put(self, keys: Sequence[StoreKey], values: Sequence[Any]) -> None:
        """See `IBackingMap.multi_put`: a batch write per ``batch_size`` keys, without a filter."""
        self.write(keys, values, self._put)

    def load(self) -> tuple[bytes, _Version] | None:
        """See `LedgerStore.load`: two requests. The version is the record and the cluster, as long as that is one."""
        found = self._retrying(self._ledger)
        return None if found is None else (found[0], (found[0], self._retrying(self._cluster)))

    def swap(self, record: bytes, expected: _Version | None, fence: FenceToken) -> _Version | None:  # noqa: ARG002
        """See `LedgerStore.swap`: a read, and a write that checks the generation. There is no fence to move.

        Raises StoreUnavailableError where the reply is lost: then ask `load`.
        """
        found = self._retrying(self._ledger)
        cluster = self._retrying(self._cluster)
        if (None if found is None else (found[0], cluster)) != expected:
            return None
        policy = self._once | {"key": aerospike.POLICY_KEY_SEND, "ttl": aerospike.TTL_NEVER_EXPIRE}
        if found is None:
            meta, policy["exists"] = {}, aerospike.POLICY_EXISTS_CREATE
        else:
            meta = {"gen": found[1]}
            policy |= {"gen": aerospike.POLICY_GEN_EQ, "exists": aerospike.POLICY_EXISTS_UPDATE}

        def put() -> bool:
            try:
                self._client.put(self._place(_LEDGER), {"ledger": bytearray(record)}, meta, policy)
            except (driver.RecordExistsError, driver.RecordGenerationError, driver.RecordNotFound):
                return False
            return True

        return (record, cluster) if self._retrying(put, retries=0) else None

    def filtered_writer(self, token: FenceToken) -> IBackingMap[Any, Any]:
        """See `FilteredWrites.filtered_writer`."""
        return _Writer(self, token)

    def claim(self, txid: int, partition: int, holder: str) -> str:
        """See `Claims.claim`: a create; a read where somebody was first."""
        place = (self._backend.namespace, CLAIMS, f"{self._set}/{txid}/{partition}")
        ttl = self._backend.claim_ttl or aerospike.TTL_NEVER_EXPIRE
        policy = self._policy | {"key": aerospike.POLICY_KEY_SEND, "ttl": ttl, "exists": aerospike.POLICY_EXISTS_CREATE}

        def create_or_read() -> str:
            while True:
                try:
                    self._client.put(place, {"holder": holder}, {}, policy)
                except driver.RecordExistsError:
                    with suppress(driver.RecordNotFound):  # it has expired in between
                        return str(self._client.get(place, self._policy)[2]["holder"])
                else:
                    return holder

        return self._retrying(create_or_read)

    def scan(self, page_size: int) -> Iterator[list[StoreKey]]:
        """See `Scan.scan`: a query over the set, without the records' values. Needs the user keys, and a server 6.0."""
        query = self._retrying(lambda: self._client.query(self._backend.namespace, self._set))  # it may connect first
        query.max_records = page_size
        query.paginate()
        unlisted: list[str] = []
        while True:
            # With values, the client would leave out in silence what it cannot convert.
            found = self._retrying(lambda: query.results({"total_timeout": 0}, {"nobins": True}), retries=0)
            keys = [self._key(one[0], unlisted) for one in found]
            page = [key for key in keys if key is not None and key not in (_LEDGER, _REPORTS)]
            if page:
                yield page
            if query.is_done():
                break
        if unlisted:
            raise CorruptRecordError(
                f"state {self._state!r}: the set {self._set!r} has a record without a user key, {unlisted[0]}: "
                "something else writes there, without POLICY_KEY_SEND. It cannot be listed, and was left as it is.",
                state=self._state,
                keys=unlisted[:MOST_NAMED],
                count=len(unlisted),
            )

    def keep_report(self, report: bytes, most: int) -> None:
        """See `Reports.keep_report`: a read and a write."""
        bins = {"reports": [bytearray(one) for one in [report, *self.reports()][:most]]}
        policy = self._once | {"key": aerospike.POLICY_KEY_SEND, "ttl": aerospike.TTL_NEVER_EXPIRE}
        self._retrying(lambda: self._client.put(self._place(_REPORTS), bins, {}, policy), retries=0)

    def reports(self) -> list[bytes]:
        """See `Reports.reports`."""
        found = self._retrying(lambda: self._get(_REPORTS))
        return [] if found is None else [bytes(one) for one in found[2]["reports"]]

    def drop(self, expected: _Version, token: FenceToken) -> Iterator[int]:
        """See `Drops.drop`: a page at a time, behind a look at the ledger. Claims expire by themselves."""
        for page in self.scan(self._backend.batch_size):
            self._check_dropping(expected, token)
            self._remove(page)
            yield len(page)
        self._check_dropping(expected, token)
        self._remove([_REPORTS])
        self._remove([_LEDGER])

    def _check_dropping(self, expected: _Version, token: FenceToken) -> None:
        found = self._retrying(self._ledger)
        if found is None or found[0] != expected[0]:
            raise FencedError(
                f"the ledger of state {self._state!r} has changed: the removal with txid {token.txid} ends here",
                state=self._state,
                txid=token.txid,
            )

    def _remove(self, keys: Sequence[StoreKey]) -> None:
        places = [self._place(key) for key in keys]
        self._retrying(lambda: self._checked(keys, self._client.batch_remove(places, self._policy), (OK, NOT_FOUND)))

    def checkup(self, replay_horizon: float) -> list[Finding]:  # noqa: ARG002
        """See `Checkup.checkup`: what one node says of the namespace."""
        reply = self._retrying(lambda: self._client.info_random_node(f"namespace/{self._backend.namespace}"))
        return list(judge(reply.partition("\t")[2].strip(), claims_expire=self._backend.claim_ttl > 0))

    def places(self, keys: Iterable[StoreKey]) -> list[Any]:
        """The client's key of each."""
        return [self._place(key) for key in keys]

    def read(self, keys: Sequence[StoreKey], places: list[Any]) -> list[Any]:
        """`multi_get` of keys whose `places` are known."""
        out: list[Any] = []
        for some, at in self._parts(keys, places):
            found = self._retrying(partial(self._read, some, at))
            out += [self._value(key, one) for key, one in zip(some, found, strict=True)]
        return out

    def write(
        self,
        keys: Sequence[StoreKey],
        values: Sequence[Any],
        policy: dict[str, Any],
        *,
        places: list[Any] | None = None,
        guard: dict[str, Any] | None = None,
        passed_over: int = OK,
    ) -> None:
        """Write each record under ``policy``, of a repeated key the last.

        ``places`` are those of the keys, where the caller has them. ``guard`` holds the filter of all records: the
        client compiles a filter for each policy that has one, so this one goes into the policy of the batch.
        ``passed_over`` is a result that is no error.
        """
        check_lengths(keys, values, "values")
        last = dict(zip(keys, values, strict=True))  # of two in one batch either may be applied last
        if places is None or len(last) < len(keys):
            places = self.places(last)
        policies = policy, self._policy | (guard or {})
        for some, at in self._parts(list(last), places):
            self._retrying(partial(self._write, some, at, last, policies, passed_over))

    def _write(
        self,
        keys: Sequence[StoreKey],
        places: list[Any],
        values: dict[Any, Any],
        policies: tuple[dict[str, Any], dict[str, Any]],
        fine: int,
    ) -> None:
        of_each, of_batch = policies
        # New ones for each try: the client writes its results into them.
        bins = [[operations.write(self._backend.bin, values[key])] for key in keys]
        batch = BatchRecords([Write(place, one, policy=of_each) for place, one in zip(places, bins, strict=True)])
        self._client.batch_write(batch, of_batch)
        self._checked(keys, batch, (OK, fine))

    def _read(self, keys: Sequence[StoreKey], places: list[Any]) -> list[Any]:
        return self._checked(keys, self._client.batch_read(places, [self._backend.bin], self._policy), (OK, NOT_FOUND))

    def _checked(self, keys: Sequence[StoreKey], batch: Any, fine: tuple[int, ...]) -> list[Any]:
        """The records of a batch, if each has a result that is ``fine``: a batch that fails raises nothing by itself.

        Where the whole call failed, records may say 0 or be missing; so its own result comes first.
        """
        if batch.result not in (OK, BATCH_FAILED):
            raise _BatchError(batch.result, f"the whole batch of {len(keys)} keys failed")
        found: list[Any] = batch.batch_records
        if len(found) != len(keys):
            raise _BatchError(NO_ANSWER, f"{len(found)} records came for {len(keys)} keys")
        for key, one in zip(keys, found, strict=True):
            if one.result not in fine:
                bad = sum(other.result not in fine for other in found)
                more = f": {one.message}" if one.message else ""
                raise _BatchError(
                    one.result, f"{bad} of {len(keys)} keys failed, the first is {shown(key)}{more}", key=key
                )
        return found

    def _parts(self, keys: Sequence[StoreKey], places: list[Any]) -> Iterator[tuple[Sequence[StoreKey], list[Any]]]:
        size = self._backend.batch_size
        for at in range(0, len(keys), size):
            yield keys[at : at + size], places[at : at + size]

    @property
    def _client(self) -> Any:
        return self._backend.client()

    def _place(self, key: StoreKey) -> tuple[str, str, Any]:
        """The client's key. A str would be cut at a NUL, and one that is not Unicode kills the process."""
        place: Any = key
        if isinstance(key, str):
            try:
                if "\0" in key or not key.isascii():
                    data = key.encode()
                    place = bytearray(data) if b"\0" in data else key
            except UnicodeEncodeError as error:
                what = f"state {self._state!r}: the key {shown(key)} is not Unicode: {error.reason}"
                raise KeyEncodingError(what, state=self._state) from error
        elif not -(1 << 63) <= key < 1 << 63:
            raise KeyEncodingError(
                f"state {self._state!r}: the key {shown(key)} has more than 64 bits", state=self._state
            )
        return self._backend.namespace, self._set, place

    def _key(self, place: Any, unlisted: list[str]) -> StoreKey | None:
        """The user key; None where there is none, whose digest goes to ``unlisted``."""
        key: Any = place[2]
        if isinstance(key, str | int):
            return key
        if isinstance(key, bytes | bytearray):
            return bytes(key).decode(errors="backslashreplace")
        unlisted.append(f"digest {bytes(place[3]).hex()}")
        return None

    def _value(self, key: StoreKey, one: Any) -> Any:
        if one.result == NOT_FOUND:
            return None
        bins = one.record[2]
        if self._backend.bin not in (bins or {}):
            raise CorruptRecordError(
                f"state {self._state!r}, key {shown(key)}: the record has no bin {self._backend.bin!r}. It was not "
                "written by this state, or with another bin in the URL; nothing was overwritten.",
                state=self._state,
                key=str(key),
            )
        return bins[self._backend.bin]

    def _get(self, key: str) -> Any:
        try:
            return self._client.get(self._place(key), self._policy)
        except driver.RecordNotFound:
            return None

    def _ledger(self) -> tuple[bytes, int] | None:
        """The ledger and its generation."""
        found = self._get(_LEDGER)
        return None if found is None else (bytes(found[2]["ledger"]), found[1]["gen"])

    def _cluster(self) -> str | None:
        """Names the cluster as long as no node leaves or joins it; None where it cannot say."""
        reply = self._client.info_random_node("cluster-stable:ignore-migrations=true")
        key = reply.partition("\t")[2].strip()
        return key if re.fullmatch("[0-9A-Fa-f]+", key) else None

    def _retrying(self, ask: Callable[[], T], retries: int | None = None) -> T:
        """What ``ask`` returns; tried again, after pauses, where the trouble may pass."""
        left = self._backend.retries if retries is None else retries
        deadline = time.monotonic() + 2 * self._backend.timeout
        pause = 0.05
        while True:
            try:
                return ask()
            except (driver.AerospikeError, _BatchError) as error:
                problem, may_pass = self._problem(error)
                if not may_pass or not left or time.monotonic() > deadline:
                    raise problem from error
            time.sleep(pause * random.uniform(0.5, 1))  # noqa: S311  jitter
            pause = min(2 * pause, 1.0)
            left -= 1

    def _problem(self, error: Any) -> tuple[MapStateError, bool]:
        """Our error for one of the client's, and whether it may pass by itself."""
        kind, what, may_pass = meaning(error.code)
        facts = {} if getattr(error, "key", None) is None else {"key": str(error.key)}
        text = f"state {self._state!r}: Aerospike at {self._backend.address} {what} It said: {error.msg} ({error.code})"
        return kind(text, state=self._state, store=self._backend.address, **facts), may_pass


class _Writer:
    """The map of one task. See `FilteredWrites.filtered_writer`."""

    def __init__(self, store: AerospikeStore, token: FenceToken) -> None:
        self._store = store
        self._token = token
        self._read: tuple[list[StoreKey], list[Any]] = [], []
        stored = expressions.ListGetByIndex(
            None,
            aerospike.LIST_RETURN_VALUE,
            expressions.ResultType.INTEGER,
            -1,
            expressions.ListBin(store._backend.bin),
        )
        # Where there is no record yet the server does not ask it.
        self._filter = {"expressions": expressions.LE(stored, token.txid).compile()}

    def multi_get(self, keys: Sequence[StoreKey]) -> list[Any]:
        """See `IBackingMap.multi_get`. Keeps the keys' places: the put of a chunk follows its get."""
        places = self._store.places(keys)
        self._read = list(keys), places
        return self._store.read(keys, places)

    def multi_put(self, keys: Sequence[StoreKey], values: Sequence[Any]) -> None:
        """Raises FencedError where a record has a later txid. Where a reply is lost, the same is put again."""
        self._guarded(keys, values, self._store._put)

    def multi_rewrite(self, keys: Sequence[StoreKey], values: Sequence[Any | None]) -> None:
        """See `Rewrites.multi_rewrite`; removes nothing: a late writer would find nothing newer than its own."""
        if None in values:
            raise UsageError(f"state {self._store._state!r}: in Aerospike a removed key has to leave its record behind")
        keep_ttl = {"ttl": aerospike.TTL_DONT_UPDATE, "exists": aerospike.POLICY_EXISTS_UPDATE}
        self._guarded(keys, values, self._store._put | keep_ttl, passed_over=NOT_FOUND)

    def _guarded(
        self, keys: Sequence[StoreKey], values: Sequence[Any], policy: dict[str, Any], *, passed_over: int = OK
    ) -> None:
        read, places = self._read
        known = places if read == keys else None
        try:
            self._store.write(keys, values, policy, places=known, guard=self._filter, passed_over=passed_over)
        except StoreError as error:
            if not isinstance(error.__cause__, _BatchError) or error.__cause__.code != FILTERED_OUT:
                raise
            raise FencedError(
                f"state {self._store._state!r}: the attempt with txid {self._token.txid} of epoch {self._token.epoch} "
                f"may no longer write: {error.__cause__.msg}, because its record is of a later one (or no list with a "
                "txid). A newer attempt or driver has taken over.",
                state=self._store._state,
                txid=self._token.txid,
                epoch=self._token.epoch,
            ) from None


class _BatchError(Exception):
    """A batch that failed, as the client would raise it if it did."""

    def __init__(self, code: int, msg: str, *, key: StoreKey | None = None) -> None:
        super().__init__(code, msg)
        self.code = code
        self.msg = msg
        self.key = key
