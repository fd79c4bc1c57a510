"""One state in Aerospike: its ledger, claims, reports and listing, beside its records.

There is no fence: no write is atomic over two records. Each record refuses an older txid by a filter expression
(`FilteredWrites`), and what a late writer can still create is dead by the one rule.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, Literal

import aerospike
from aerospike import exception as driver

from mapstate.backends.aerospike.connection import Connection
from mapstate.backends.aerospike.records import CLAIMS, LEDGER, Records, Writer
from mapstate.backing_map import IBackingMap
from mapstate.capabilities import FenceToken
from mapstate.errors import ConfigurationError, FencedError
from mapstate.findings import Finding, Unreadable, not_listed
from mapstate.keys import StoreKey

_Version = tuple[bytes, str | None]
"""The ledger, and the cluster that it was read from."""

_REPORTS = "\\reports"

_PARTITIONS = 4096  # of every namespace


class AerospikeStore:
    """One state in Aerospike. The client is the process's. ``claim_ttl`` in seconds; 0 keeps claims for ever."""

    thread_safe: Literal[True] = True

    def __init__(self, connection: Connection, records: Records, state: str, *, claim_ttl: int) -> None:
        self._connection = connection
        self._records = records
        self._state = state
        self._claim_ttl = claim_ttl

    def multi_get(self, keys: Sequence[StoreKey]) -> list[Any]:
        return self._records.read(keys, self._records.places(keys))

    def multi_put(self, keys: Sequence[StoreKey], values: Sequence[Any]) -> None:
        """See `IBackingMap.multi_put`: a batch write per ``batch_size`` keys, without a filter."""
        self._records.write(keys, values, self._records.put_policy)

    def load(self) -> tuple[bytes, _Version] | None:
        """See `LedgerStore.load`: two requests. The version is the record and the cluster, where that has a name."""
        ledger = self._connection.retrying(self._ledger)
        return None if ledger is None else (ledger[0], (ledger[0], self._connection.retrying(self._cluster)))

    def probe(self) -> None:
        """See `Probes.probe`. Only reads, so a right to write that is missing comes out with the first batch."""
        self.load()

    def swap(self, record: bytes, expected: _Version | None, fence: FenceToken) -> _Version | None:  # noqa: ARG002
        """See `LedgerStore.swap`: moves no fence. Raises StoreUnavailableError where the reply is lost: ask `load`."""
        connection = self._connection
        ledger = connection.retrying(self._ledger)
        cluster = connection.retrying(self._cluster)
        if (None if ledger is None else (ledger[0], cluster)) != expected:
            return None
        policy = connection.once | {"key": aerospike.POLICY_KEY_SEND, "ttl": aerospike.TTL_NEVER_EXPIRE}
        if ledger is None:
            meta, policy["exists"] = {}, aerospike.POLICY_EXISTS_CREATE
        else:
            meta = {"gen": ledger[1]}
            policy |= {"gen": aerospike.POLICY_GEN_EQ, "exists": aerospike.POLICY_EXISTS_UPDATE}

        def put() -> bool:
            try:
                bins = {"ledger": bytearray(record), "bin": self._records.bin}
                connection.client.put(self._records.place(LEDGER), bins, meta, policy)
            except (driver.RecordExistsError, driver.RecordGenerationError, driver.RecordNotFound):
                return False
            return True

        return (record, cluster) if connection.retrying(put, retries=0) else None

    def filtered_writer(self, token: FenceToken) -> IBackingMap[Any, Any]:
        return Writer(self._records, token, self._state)

    def claim(self, txid: int, partition: int, holder: str) -> str:
        """See `Claims.claim`: a create; a read where another holder was first."""
        connection, records = self._connection, self._records
        place = (records.namespace, CLAIMS, f"{records.set_name}/{txid}/{partition}")
        ttl = self._claim_ttl or aerospike.TTL_NEVER_EXPIRE
        policy = connection.policy | {"key": aerospike.POLICY_KEY_SEND, "ttl": ttl}
        policy["exists"] = aerospike.POLICY_EXISTS_CREATE

        def create_or_read() -> str:
            while True:
                try:
                    connection.client.put(place, {"holder": holder}, {}, policy)
                except driver.RecordExistsError:
                    with suppress(driver.RecordNotFound):  # it has expired in between
                        return str(connection.client.get(place, connection.policy)[2]["holder"])
                else:
                    return holder

        return connection.retrying(create_or_read)

    def scan(self, page_size: int) -> Iterator[list[StoreKey]]:
        """See `Scan.scan`: a query over the set, without the records' values. Needs user keys, and a server 6.0."""
        return self._listed({"total_timeout": 0}, page_size)

    def scan_parts(self, most: int) -> list[str]:
        """See `ScansParts.scan_parts`: ranges of the namespace's partitions."""
        count = min(most, _PARTITIONS)
        starts = [number * _PARTITIONS // count for number in range(count)]
        ends = [*starts[1:], _PARTITIONS]
        return [f"{start} {end}" for start, end in zip(starts, ends, strict=True)]

    def scan_part(self, part: str, page_size: int) -> Iterator[list[StoreKey]]:
        start, end = map(int, part.split(" "))
        part_filter = {"begin": start, "count": end - start}
        return self._listed({"total_timeout": 0, "partition_filter": part_filter}, page_size)

    def _listed(self, policy: dict[str, Any], page_size: int) -> Iterator[list[StoreKey]]:
        connection, records = self._connection, self._records
        query = connection.retrying(lambda: connection.client.query(records.namespace, records.set_name))
        query.max_records = page_size
        query.paginate()
        unlisted: list[str] = []
        while True:
            # With values, the client silently leaves out records that it cannot convert.
            listed = connection.retrying(lambda: query.results(policy, {"nobins": True}), retries=0)
            keys = [_user_key(record[0], unlisted) for record in listed]
            page = [key for key in keys if key is not None and key not in (LEDGER, _REPORTS)]
            if page:
                yield page
            if query.is_done():
                break
        if unlisted:
            problem = (
                f"the set {records.set_name!r} has a record without a user key, {unlisted[0]}: something else writes"
            )
            more = "there, without POLICY_KEY_SEND. It cannot be listed, and was left as it is."
            raise not_listed(self._state, unlisted, f"{problem} {more}")

    def keep_report(self, report: bytes, most: int) -> None:
        connection = self._connection
        bins = {"reports": [bytearray(kept) for kept in [report, *self.reports()][:most]]}
        policy = connection.once | {"key": aerospike.POLICY_KEY_SEND, "ttl": aerospike.TTL_NEVER_EXPIRE}
        place = self._records.place(_REPORTS)
        connection.retrying(lambda: connection.client.put(place, bins, {}, policy), retries=0)

    def reports(self) -> list[bytes]:
        record = self._connection.retrying(lambda: self._get(_REPORTS))
        return [] if record is None else [bytes(kept) for kept in record[2]["reports"]]

    def drop(self, expected: _Version, token: FenceToken) -> Iterator[int]:
        """See `Drops.drop`: page by page, each after a check of the ledger. Claims expire by themselves."""
        foreign = Unreadable(self._state)
        for page in foreign.listed(self.scan(self._records.batch_size)):
            self._check_dropping(expected, token)
            self._records.remove(page)
            yield len(page)
        self._check_dropping(expected, token)
        self._records.remove([_REPORTS])
        self._records.remove([LEDGER])
        if foreign.count:
            raise foreign.error()

    def checkup(self, replay_horizon: float) -> list[Finding]:  # noqa: ARG002
        from mapstate.backends.aerospike.operations import judge

        connection = self._connection
        request = f"namespace/{self._records.namespace}"
        reply = connection.retrying(lambda: connection.client.info_random_node(request))
        return list(judge(reply.partition("\t")[2].strip(), claims_expire=self._claim_ttl > 0))

    def _check_dropping(self, expected: _Version, token: FenceToken) -> None:
        ledger = self._connection.retrying(self._ledger)
        if ledger is None or ledger[0] != expected[0]:
            raise FencedError(
                f"the ledger of state {self._state!r} has changed: the removal with txid {token.txid} ends here",
                state=self._state,
                txid=token.txid,
            )

    def _get(self, key: str) -> Any:
        connection = self._connection
        try:
            return connection.client.get(self._records.place(key), connection.policy)
        except driver.RecordNotFound:
            return None

    def _ledger(self) -> tuple[bytes, int] | None:
        """The ledger and its generation. Raises ConfigurationError if the records are in another bin."""
        record = self._get(LEDGER)
        name = self._records.bin
        if record is not None and record[2].get("bin", name) != name:
            raise ConfigurationError(
                f"state {self._state!r} has its records in the bin {record[2]['bin']!r}, and the URL says {name!r}: "
                "none would be found. Nothing was written. Put the state's own bin into the URL: bin=..."
            )
        return None if record is None else (bytes(record[2]["ledger"]), record[1]["gen"])

    def _cluster(self) -> str | None:
        """Names the cluster as long as no node leaves or joins it; None where the node cannot say."""
        reply = self._connection.client.info_random_node("cluster-stable:ignore-migrations=true")
        key = reply.partition("\t")[2].strip()
        return key if re.fullmatch("[0-9A-Fa-f]+", key) else None


def _user_key(place: Any, unlisted: list[str]) -> StoreKey | None:
    """The user key; None where a record has none, whose digest goes to ``unlisted``."""
    key: Any = place[2]
    if isinstance(key, str | int):
        return key
    if isinstance(key, bytes | bytearray):
        return bytes(key).decode(errors="backslashreplace")
    unlisted.append(f"digest {bytes(place[3]).hex()}")
    return None
