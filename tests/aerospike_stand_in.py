"""A stand-in for an Aerospike cluster and its Python client, for machines that have no server.

It answers the calls that mapstate makes, and no others, as client 19.3 and server 8.1 were seen to answer them; each
of these facts is a test in test_aerospike_stand_in.py. It is no Aerospike: one node, nothing on a disk, one filter
expression. Digests and the form of an expression are the real client's own.

`Cluster` is the server's side. It lives in the process that makes it, and listens on a port; `StandInBackend` reaches
it from any process of the machine that can import this module.
"""

from __future__ import annotations

import os
import threading
import time
import warnings
from dataclasses import dataclass, field
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

import aerospike
import msgspec
from aerospike import exception as driver
from aerospike_helpers import expressions
from aerospike_helpers.batch.records import BatchRecord, BatchRecords

from mapstate.backends.aerospike import AerospikeBackend

NAMESPACE = "test"
DEFAULT_TTL = 30 * 86_400  # of the namespace, for who asks for none
MAX_RECORD = 2**20 - 64  # with its overhead, just under 1 MiB
EPOCH = 1_900_000_000.0

OK, NOT_FOUND, GENERATION, EXISTS, TOO_BIG, FORBIDDEN, FILTERED = 0, 2, 3, 5, 13, 22, 27

_SECRET = b"not a secret"
_MAP_KEYS = (str, int, bytes)
_BASE = {"total_timeout", "socket_timeout", "max_retries", "sleep_between_retries", "compress"}
_BASE |= {"connect_timeout", "expressions"}
_EACH_WRITE = {"key", "commit_level", "gen", "exists", "durable_delete", "on_locking_only", "ttl"}
POLICIES = {
    "read": _BASE | {"key", "replica", "deserialize", "read_touch_ttl_percent", "read_mode_ap", "read_mode_sc"},
    "write": _BASE | _EACH_WRITE | {"replica", "compression_threshold"},
    "batch": _BASE
    | {"concurrent", "allow_inline", "allow_inline_ssd", "deserialize", "replica", "respond_all_keys"}
    | {"read_touch_ttl_percent", "read_mode_ap", "read_mode_sc"},
    "batch_write": _EACH_WRITE | {"expressions"},
    "query": _BASE | {"deserialize", "replica", "short_query", "expected_duration", "partition_filter"},
}
_ERRORS = {
    one.code: one
    for one in vars(driver).values()
    if isinstance(one, type) and isinstance(getattr(one, "code", None), int)
}


@dataclass
class Record:
    """One record on the server. ``expires`` is a time of the cluster's own clock."""

    bins: dict[str, Any]
    user_key: Any = None
    gen: int = 0
    expires: float | None = None


@dataclass
class Fault:
    """What the next ``times`` calls of ``method`` come to, instead of being done.

    ``record`` is the place of the one that fails in a batch; without it the whole call fails. Then records say 0, or
    with ``missing`` are not there. A put that was ``done`` has lost its reply only.
    """

    method: str
    code: int
    record: int | None = None
    missing: bool = False
    done: bool = False
    times: int = 1


@dataclass
class Cluster:
    """The records of one namespace, and a clock that a test moves; where it ``ticks``, it goes on by itself too."""

    ttl_allowed: bool = True
    ticks: bool = False
    key: str = "A1B2C3"
    faults: list[Fault] = field(default_factory=list)
    calls: list[tuple[str, int]] = field(default_factory=list)
    now: float = EPOCH

    def __post_init__(self) -> None:
        self.records: dict[tuple[str, bytes], Record] = {}
        self._made = time.monotonic()
        self.lock = threading.Lock()
        self._listener = Listener(("127.0.0.1", 0), authkey=_SECRET, backlog=64)
        self.port: int = self._listener.address[1]  # type: ignore[assignment]
        threading.Thread(target=self._listen, daemon=True).start()

    def close(self) -> None:
        """No more connections."""
        self._listener.close()

    def _listen(self) -> None:
        while True:
            try:
                conn = self._listener.accept()
            except (OSError, EOFError):
                return
            threading.Thread(target=self._serve, args=(conn,), daemon=True).start()

    def _serve(self, conn: Connection) -> None:
        with conn:
            while True:
                try:
                    name, args = conn.recv()
                except (EOFError, OSError):
                    return
                with self.lock:
                    conn.send(getattr(self, name)(*args))

    # What a client asks: one call each, under the lock

    def fault(self, method: str, size: int) -> Fault | None:
        """The fault that this call meets; it is written down."""
        self.calls.append((method, size))
        for one in self.faults:
            if one.method == method and one.times:
                one.times -= 1
                return one
        return None

    def each(self, name: str, arguments: list[tuple[Any, ...]]) -> list[Any]:
        """The answers to a call with each of these: what a batch is."""
        return [getattr(self, name)(*one) for one in arguments]

    def get(self, place: tuple[str, bytes]) -> tuple[dict[str, int], dict[str, Any]] | None:
        """Meta and bins."""
        record = self._live(place)
        return None if record is None else (self._meta(record), record.bins)

    def put(self, place: tuple[str, bytes], user_key: Any, bins: dict[str, Any], policy: dict[str, Any]) -> int:
        """The result code of one write. ``policy`` has the generation asked for, and a filter's bin and number."""
        record = self._live(place)
        exists = policy.get("exists", aerospike.POLICY_EXISTS_IGNORE)
        if record is None and exists == aerospike.POLICY_EXISTS_UPDATE:
            return NOT_FOUND
        if record is not None:
            if exists == aerospike.POLICY_EXISTS_CREATE:
                return EXISTS
            if policy["filter"] is not None and not _passes(*policy["filter"], record):
                return FILTERED
            if policy.get("gen") == aerospike.POLICY_GEN_EQ and policy["generation"] != record.gen:
                return GENERATION
        after = {**(record.bins if record else {}), **bins}
        if len(msgspec.msgpack.encode([user_key, after])) > MAX_RECORD:
            return TOO_BIG
        ttl = policy.get("ttl", aerospike.TTL_NAMESPACE_DEFAULT)
        expires = record.expires if record else None
        if ttl == aerospike.TTL_NEVER_EXPIRE:
            expires = None
        elif ttl != aerospike.TTL_DONT_UPDATE:
            if not self.ttl_allowed:
                return FORBIDDEN
            expires = self._time() + (ttl or DEFAULT_TTL)
        kept = record.user_key if record else None
        sent = policy.get("key") == aerospike.POLICY_KEY_SEND
        gen = (record.gen if record else 0) % 65_535 + 1
        self.records[place] = Record(after, user_key if sent else kept, gen, expires)
        return OK

    def remove(self, place: tuple[str, bytes]) -> int:
        """The result code of one removal."""
        return NOT_FOUND if self.records.pop(place, None) is None else OK

    def page(self, name_of_set: str, after: bytes, most: int) -> list[tuple[bytes, Any, dict[str, int], Any]]:
        """Digest, user key, meta and bins of the next records of a set, in the order of the digests."""
        digests = sorted(digest for at, digest in self.records if at == name_of_set and digest > after)
        found = [(digest, self._live((name_of_set, digest))) for digest in digests]
        live = [(digest, one.user_key, self._meta(one), one.bins) for digest, one in found if one is not None]
        return live[: most or None]

    def info(self, command: str) -> str:
        """A node's answer."""
        if command.startswith("cluster-stable:"):
            return f"{command}\t{self.key}\n"
        if command == f"namespace/{NAMESPACE}":
            nsup = 120 if self.ttl_allowed else 0
            facts = f"nsup-period={nsup};evicted_objects=0;effective_replication_factor=1;stop_writes=false"
            return f"{command}\t{facts};storage-engine=memory;strong-consistency=false\n"
        return f"{command}\tERROR\n"

    def _time(self) -> float:
        return self.now + (time.monotonic() - self._made if self.ticks else 0)

    def _live(self, place: tuple[str, bytes]) -> Record | None:
        record = self.records.get(place)
        if record is not None and record.expires is not None and record.expires <= self._time():
            del self.records[place]
            return None
        return record

    def _meta(self, record: Record) -> dict[str, int]:
        left = aerospike.TTL_NEVER_EXPIRE if record.expires is None else int(record.expires - self._time())
        return {"gen": record.gen, "ttl": left}


def _passes(bin_name: str, most: int, record: Record) -> bool:
    """Whether the last of a list bin is at most ``most``. Unknown is no."""
    found = record.bins.get(bin_name)
    return isinstance(found, list) and bool(found) and type(found[-1]) is int and found[-1] <= most


def _asked(policy: dict[str, Any] | None, gen: int = 0) -> dict[str, Any]:
    """A write's policy as the server gets it, with its one kind of filter as bin and number."""
    asked = dict(policy or {}) | {"generation": gen, "filter": None}
    compiled = asked.pop("expressions", None)
    if compiled is not None:
        bins = [part[2]["bin"] for part in compiled if part[2] and "bin" in part[2]]
        last = expressions.ListGetByIndex(
            None, aerospike.LIST_RETURN_VALUE, expressions.ResultType.INTEGER, -1, expressions.ListBin(bins[0])
        )
        most = compiled[-1][2]["val"]
        if compiled != expressions.LE(last, most).compile():
            raise NotImplementedError(f"the stand-in knows one filter, and this is another: {compiled}")
        asked["filter"] = bins[0], most
    return asked


class StandInClient:
    """What `aerospike.client(config)` returns, as far as mapstate uses it."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._strict = config.get("validate_keys", False)
        self._pid = os.getpid()
        self._lock = threading.Lock()
        host, port = config["hosts"][0][:2]
        try:
            self._conn: Connection | None = Client((host, port), authkey=_SECRET)
        except OSError as error:
            raise _error(-10, "Failed to connect") from error

    def __reduce__(self) -> Any:
        raise TypeError("cannot pickle 'aerospike.Client' object")

    def close(self) -> None:
        """Every later call fails."""
        if self._conn is not None:
            self._conn.close()
            self._conn = None

    def get(self, key: Any, policy: dict[str, Any] | None = None) -> Any:
        """One record: key, meta and bins. Raises RecordNotFound."""
        self._check("read", policy)
        self._meet("get", 1)
        found = self._ask("get", _place(key))
        if found is None:
            raise _error(NOT_FOUND)
        return (key, *found)

    def put(
        self, key: Any, bins: dict[str, Any], meta: dict[str, Any] | None = None, policy: dict[str, Any] | None = None
    ) -> None:
        """One write. Raises by its result."""
        self._check("write", policy)
        asked = _asked(policy, (meta or {}).get("gen", 0))
        fault = self._ask("fault", "put", 1)
        if fault is not None and not fault.done:
            raise _error(fault.code)
        code = self._ask("put", _place(key), _user_key(key), {name: stored(one) for name, one in bins.items()}, asked)
        if code != OK or fault is not None:
            raise _error(code or fault.code)

    def batch_read(self, keys: list[Any], bins: list[str], policy: dict[str, Any] | None = None) -> BatchRecords:
        """Raises nothing for what goes wrong on the server."""
        self._check("batch", policy)
        records = [BatchRecord(key) for key in keys]
        batch = BatchRecords(records)
        fault = self._ask("fault", "batch_read", len(keys))
        if fault is not None and fault.record is None:
            return _failed(batch, fault)
        answers = self._ask("each", "get", [(_place(key),) for key in keys])
        for at, (one, found) in enumerate(zip(records, answers, strict=True)):
            if fault is not None and at == fault.record:
                one.result = fault.code
            elif found is None:
                one.result = NOT_FOUND
            else:
                meta, all_bins = found
                one.record = (one.key, meta, {name: all_bins[name] for name in bins if name in all_bins})
        return _judged(batch)

    def batch_write(self, batch: BatchRecords, policy: dict[str, Any] | None = None) -> BatchRecords:
        """Raises nothing for what goes wrong on the server. Goes from the last to the first: no order is promised."""
        self._check("batch", policy)
        of_all = _asked(policy)["filter"]
        wanted = []
        for one in batch.batch_records:
            self._check("batch_write", one.policy)
            asked = _asked(one.policy)
            if asked["filter"] is None:
                asked["filter"] = of_all
            wanted.append(({op["bin"]: stored(op["val"]) for op in one.ops}, asked))
        fault = self._ask("fault", "batch_write", len(wanted))
        if fault is not None and fault.record is None:
            return _failed(batch, fault)
        puts = []
        for at, (one, (bins, asked)) in reversed(list(enumerate(zip(batch.batch_records, wanted, strict=True)))):
            if fault is not None and at == fault.record:
                one.result = fault.code
            else:
                puts.append((one, (_place(one.key), _user_key(one.key), bins, asked)))
        results = self._ask("each", "put", [put for _, put in puts])
        for (one, _), result in zip(puts, results, strict=True):
            one.result = result
        return _judged(batch)

    def batch_remove(self, keys: list[Any], policy: dict[str, Any] | None = None) -> BatchRecords:
        """Raises nothing for what goes wrong on the server."""
        self._check("batch", policy)
        records = [BatchRecord(key) for key in keys]
        batch = BatchRecords(records)
        fault = self._ask("fault", "batch_remove", len(keys))
        if fault is not None and fault.record is None:
            return _failed(batch, fault)
        results = self._ask("each", "remove", [(_place(key),) for key in keys])
        for one, result in zip(records, results, strict=True):
            one.result = result
        return _judged(batch)

    def query(self, namespace: str, name_of_set: str) -> StandInQuery:
        """All records of a set."""
        return StandInQuery(self, namespace, name_of_set)

    def info_random_node(self, command: str, policy: dict[str, Any] | None = None) -> str:
        """A node's answer to an info command."""
        assert policy is None
        self._meet("info", 1)
        reply: str = self._ask("info", command)
        return reply

    def _meet(self, method: str, size: int) -> None:
        fault = self._ask("fault", method, size)
        if fault is not None:
            raise _error(fault.code)

    def _check(self, kind: str, policy: dict[str, Any] | None) -> None:
        """Unknown names are passed over, or with validate_keys refused."""
        unknown = (policy or {}).keys() - POLICIES[kind]
        if unknown and self._strict:
            raise _error(-2, f'"{min(unknown)}" is an invalid policy dictionary key')

    def _ask(self, name: str, *args: Any) -> Any:
        assert os.getpid() == self._pid, "this client was made before the fork"
        if self._conn is None:
            raise _error(11, "No connection to aerospike cluster")
        try:
            with self._lock:
                self._conn.send((name, args))
                return self._conn.recv()
        except (EOFError, OSError) as error:
            raise _error(-10, "Failed to connect") from error


class StandInQuery:
    """A query without a predicate."""

    def __init__(self, client: StandInClient, namespace: str, name_of_set: str) -> None:
        self._client = client
        self._namespace = namespace
        self._set = name_of_set
        self._after = b""
        self._paginated = self._done = False
        self.max_records = 0

    def paginate(self) -> None:
        """The next `results` carries on where the last one ended."""
        self._paginated = True

    def is_done(self) -> bool:
        """Whether the last page was the last."""
        return self._done

    def results(self, policy: dict[str, Any], options: dict[str, Any]) -> list[Any]:
        """Key, meta and bins of up to ``max_records`` records."""
        self._client._check("query", policy)
        self._client._meet("query", 1)
        found = self._client._ask("page", self._set, self._after if self._paginated else b"", self.max_records)
        self._done = len(found) < self.max_records or not self.max_records
        self._after = found[-1][0] if found else self._after
        return [
            ((self._namespace, self._set, key, bytearray(digest)), meta, None if options.get("nobins") else bins)
            for digest, key, meta, bins in found
        ]


@dataclass(frozen=True, repr=False)
class StandInBackend(AerospikeBackend):
    """An Aerospike backend whose client is the stand-in's."""

    def connect(self) -> Any:
        """See `AerospikeBackend.connect`."""
        return StandInClient(self.config())


def _place(key: Any) -> tuple[str, bytes]:
    """Set and digest. A bytes key is taken for text, and both are cut at the first NUL."""
    namespace, name_of_set, user_key = key
    if namespace != NAMESPACE:
        raise _error(20)
    if isinstance(user_key, bytes):
        user_key = user_key.partition(b"\0")[0].decode()
    return name_of_set, bytes(aerospike.calc_digest(namespace, name_of_set, user_key))


def _user_key(key: Any) -> Any:
    user_key = key[2]
    if isinstance(user_key, bytes):
        user_key = user_key.decode()
    return user_key.partition("\0")[0] if isinstance(user_key, str) else user_key


def stored(value: Any) -> Any:
    """A value after its way through the client and back. Raises as the client does."""
    kind = type(value)
    if kind is int and not -(1 << 63) <= value < 1 << 63:
        raise _error(-2, "integer value exceeds sys.maxsize")
    if kind is str:
        if not _is_unicode(value):
            raise _error(-1, "Unicode value not encoded in utf-8.")
        return value.partition("\0")[0]
    if kind is list:
        return [stored(one) for one in value]
    if kind is dict:
        for key in value:
            if type(key) not in _MAP_KEYS:
                _warn_of_map_key(key)
        return {stored(key): stored(one) for key, one in value.items() if type(key) in _MAP_KEYS}
    if kind is bytearray:
        return bytes(value)
    if value is None or kind in (bool, int, float, bytes):
        return value
    raise _error(-1, "Unable to serialize unknown Python native type.")


def _is_unicode(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _warn_of_map_key(key: Any) -> None:
    """Leaves the pair out, or refuses the write where the warning is an error."""
    if not isinstance(key, bool | float | None):
        stored(key)  # no type of Aerospike's at all
    shown = "NIL" if key is None else str(key).lower()
    text = f"Attempted to store a map with key {shown}, which is an invalid type"
    try:
        warnings.warn(text, DeprecationWarning, stacklevel=2)
    except DeprecationWarning as error:
        raise _error(-2, text) from error


def _failed(batch: BatchRecords, fault: Fault) -> BatchRecords:
    batch.result = fault.code
    if fault.missing:
        batch.batch_records = []
    return batch


def _judged(batch: BatchRecords) -> BatchRecords:
    bad = any(one.result not in (OK, NOT_FOUND, FILTERED) for one in batch.batch_records)
    batch.result = -16 if bad else OK
    return batch


def _error(code: int, text: str = "") -> driver.AerospikeError:
    error: driver.AerospikeError = _ERRORS.get(code, driver.ServerError)(text)
    error.code, error.msg, error.in_doubt = code, text or f"result code {code}", False
    return error
