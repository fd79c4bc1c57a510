"""Redis: one server, or a pair behind one address, named by ``redis://`` or ``rediss://``.

A state ``visits`` lives under these Redis keys, readable in ``redis-cli``::

    visits:user-42     a record, one per key
    visits!ledger      the ledger
    visits!fence       who may write: "epoch:txid:nonce", or "epoch:txid:closed" when nobody may
    visits!claims      a hash, "txid/partition" to holder; goes with the next change of the ledger
    visits!reports     a list, the last batch reports, newest first

A chunk of keys goes out as one MGET and its records as one MSET (with a ttl, as a SET each). They are
packed here: joining the pieces takes three quarters of the time of hiredis' packer, and with a ttl a third.
A put is refused by Redis itself: the fence is under WATCH from the get on, and EXEC does nothing once it
has moved.
"""

from __future__ import annotations

import math
import os
import random
import re
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import parse_qsl, quote, unquote, urlsplit

from redis import exceptions as driver
from redis.backoff import NoBackoff
from redis.connection import Connection, ConnectionPool, SSLConnection
from redis.credentials import UsernamePasswordCredentialProvider
from redis.retry import Retry

from mapstate.backends.redis_checkup import RedisFacts, judge
from mapstate.backing_map import FenceToken, IBackingMap, check_lengths
from mapstate.errors import (
    ConfigurationError,
    CorruptRecordError,
    FencedError,
    KeyEncodingError,
    StoreAuthError,
    StoreError,
    StoreFullError,
    StoreUnavailableError,
    TooLargeError,
)
from mapstate.findings import Finding

__all__ = ["RedisBackend", "RedisStore"]

T = TypeVar("T")

_Version = tuple[bytes, bytes | None]
"""The ledger, and the life of the server that it was read in."""

_LONGEST_TTL = 1e10
_MOST_BYTES = 2**30  # client-query-buffer-limit: above it Redis hangs up
_PUT_TRIES = 8
_SAMPLE = 20  # records that a checkup looks at
_PREFIX = re.compile(r"[A-Za-z0-9_./-]*")
_GLOB = re.compile(rb"([*?\[\]\\^])")
_BOOLEANS = {"true": True, "1": True, "false": False, "0": False}
_PARAMETERS: dict[str, Callable[[str], Any]] = {
    "prefix": str,
    "socket_timeout": float,
    "socket_connect_timeout": float,
    "retries": int,
    "max_value_bytes": int,
    "ssl_ca_certs": str,
    "ssl_certfile": str,
    "ssl_keyfile": str,
    "ssl_cert_reqs": str,
    "ssl_check_hostname": lambda text: _BOOLEANS[text.lower()],
}


@dataclass(frozen=True, repr=False)
class RedisBackend:
    """Where a Redis server is and how to reach it.

    ``redis://user:password@host:port/db?prefix=app/&retries=3``, and ``rediss://`` for TLS. The URL's
    parameters are the fields from ``prefix`` on.

    ``prefix``           in front of every Redis key: letters, digits, ``_ . / -``
    ``socket_timeout``   seconds to wait for a reply; ``socket_connect_timeout`` for a connection
    ``retries``          how often reads, connects and fenced puts are tried again, after growing pauses;
                         none begins later than two ``socket_timeout`` after the first
    ``max_value_bytes``  the largest key or record; the server's own limit is ``proto-max-bulk-len``
    ``ssl_...``          as in redis-py; file names are those of the machine that connects
    """

    host: str = "localhost"
    port: int = 6379
    db: int = 0
    username: str | None = None
    password: str | None = None
    tls: bool = False
    prefix: str = ""
    socket_timeout: float = 10.0
    socket_connect_timeout: float = 5.0
    retries: int = 5
    max_value_bytes: int = 512 * 2**20
    ssl_ca_certs: str | None = None
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    ssl_cert_reqs: str = "required"
    ssl_check_hostname: bool = True

    shared_between_processes = True

    def __post_init__(self) -> None:
        seconds = "a number of seconds above 0"
        for name, fits, expected in (
            ("prefix", _PREFIX.fullmatch(self.prefix), "of letters, digits, '_ . / -' (the first ':' ends it)"),
            ("port", 0 < self.port < 2**16, "from 1 to 65535"),
            ("db", self.db >= 0, "from 0 up"),
            ("socket_timeout", 0 < self.socket_timeout < math.inf, seconds),
            ("socket_connect_timeout", 0 < self.socket_connect_timeout < math.inf, seconds),
            ("retries", self.retries >= 0, "from 0 up"),
            ("max_value_bytes", self.max_value_bytes > 0, "from 1 up"),
            ("ssl_cert_reqs", self.ssl_cert_reqs in ("none", "optional", "required"), "none, optional or required"),
        ):
            if not fits:
                raise ConfigurationError(f"{name} is {expected}, not {getattr(self, name)!r}")
        if self.username and self.password is None:
            raise ConfigurationError(
                "there is a user but no password: a password alone is written redis://:password@host, and a user "
                "without one redis://user:@host"
            )
        if not self.tls and any(name.startswith("ssl_") for name in self._changed()):
            raise ConfigurationError("ssl_ parameters do nothing on redis://; the scheme with TLS is rediss://")

    @classmethod
    def from_url(cls, url: str) -> RedisBackend:
        """The backend that a URL names. Raises ConfigurationError.

        What cannot be read is not repeated there: it may be a piece of the password.
        """
        try:
            parts = urlsplit(url)
            port = 6379 if parts.port is None else parts.port
            db = int(parts.path.strip("/") or 0)
        except ValueError:
            parts, port, db = urlsplit(""), 0, 0
        if parts.scheme not in ("redis", "rediss") or parts.fragment or "@" in parts.path + parts.query:
            raise ConfigurationError(
                "this is no URL like redis://user:password@host:port/db?parameter=value, with numbers for port and "
                "db. It is not shown, because it may hold a password; in the password, and wherever there is an '@', "
                "write special characters percent-encoded: urllib.parse.quote(password, safe='')"
            )
        given: dict[str, Any] = {}
        for name, text in parse_qsl(parts.query, keep_blank_values=True):
            if name not in _PARAMETERS:
                known = ", ".join(_PARAMETERS)
                raise ConfigurationError(f"{parts.scheme}:// has no parameter {name!r}; it has {known}")
            try:
                given[name] = _PARAMETERS[name](text)
            except (ValueError, KeyError) as error:
                raise ConfigurationError(f"the parameter {name} cannot be {text!r}") from error
        return cls(
            host=parts.hostname or "localhost",
            port=port,
            db=db,
            username=unquote(parts.username) if parts.username else None,
            password=None if parts.password is None else unquote(parts.password),
            tls=parts.scheme == "rediss",
            **given,
        )

    def __repr__(self) -> str:
        scheme = "rediss" if self.tls else "redis"
        user = "" if self.password is None else f"{quote(self.username or '', safe='')}:***@"
        query = "&".join(f"{name}={quote(str(value))}" for name, value in self._changed().items())
        return f"RedisBackend('{scheme}://{user}{self.address}/{self.db}{'?' if query else ''}{query}')"

    def _changed(self) -> dict[str, Any]:
        """The parameters that are not at their default."""
        given = {one.name: (getattr(self, one.name), one.default) for one in fields(self) if one.name in _PARAMETERS}
        return {name: value for name, (value, default) in given.items() if value != default}

    @property
    def address(self) -> str:
        """``host:port``, for messages."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def open(self, state: str, *, ttl: float | None = None) -> RedisStore:
        """See `Backend.open`. Makes no connection."""
        if ttl is not None and not 0 < ttl <= _LONGEST_TTL:
            raise ConfigurationError(f"ttl is a number of seconds from 0 to {_LONGEST_TTL:.0f}, not {ttl!r}")
        if ":" in state or "!" in state:
            raise ConfigurationError(f"{state!r} cannot name a state in Redis: ':' and '!' end the name there")
        return RedisStore(self, state, ttl)

    def pool(self) -> ConnectionPool:
        """The connections of this process, made at first use; a fork never uses its parent's."""
        pid = os.getpid()
        pool = _pools.get((pid, self))
        if pool is None:
            for inherited in [one for one in _pools if one[0] != pid]:
                del _pools[inherited]  # closes the copies here, and not the parent's connections
            pool = _pools.setdefault((pid, self), self._new_pool())
        return pool

    def _new_pool(self) -> ConnectionPool:
        same = ("host", "port", "db", "socket_timeout", "socket_connect_timeout")
        options = {name: getattr(self, name) for name in same}
        if self.username or self.password:  # as a provider, because some pools show a password in their repr
            options["credential_provider"] = UsernamePasswordCredentialProvider(self.username, self.password)
        if self.tls:
            options |= {name: getattr(self, name) for name in _PARAMETERS if name.startswith("ssl_")}
            options["ssl_check_hostname"] &= self.ssl_cert_reqs != "none"
            for name in ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile"):
                if options[name] is not None and not Path(options[name]).is_file():
                    raise ConfigurationError(
                        f"{name}: there is no file {options[name]!r} on {socket.gethostname()}; each machine that "
                        "connects needs it"
                    )
        return ConnectionPool(
            connection_class=SSLConnection if self.tls else Connection,
            max_connections=2**31,
            protocol=2,  # nothing is pushed between replies
            retry=Retry(NoBackoff(), 0),  # what the driver sends again by itself is under no WATCH
            socket_keepalive=True,
            **options,
        )


_pools: dict[tuple[int, RedisBackend], ConnectionPool] = {}


class RedisStore:
    """One state in Redis. Cheap to make; holds no connection while nothing is asked of it."""

    def __init__(self, backend: RedisBackend, state: str, ttl: float | None) -> None:
        self._backend = backend
        self._state = state
        self._expiry = None if ttl is None else b"%d" % math.ceil(ttl * 1000)
        name = (backend.prefix + state).encode()
        self._head, self._ledger, self._fence = name + b":", name + b"!ledger", name + b"!fence"
        self._claims, self._reports = name + b"!claims", name + b"!reports"

    def multi_get(self, keys: Sequence[str]) -> list[bytes | None]:
        """See `IBackingMap.multi_get`: one MGET."""
        if not keys:
            return []
        records: list[bytes | None] = self._ask(self._mget(keys), 1)[0]
        return records

    def multi_put(self, keys: Sequence[str], values: Sequence[bytes]) -> None:
        """See `IBackingMap.multi_put`: one transaction without a fence, not repeated if its reply is lost."""
        check_lengths(keys, values, "values")
        if keys:
            put, replies = self._put(keys, values)
            conn = self._retrying(self._take)
            self._retrying(lambda: self._finish(conn, put, replies), retries=0)

    def multi_get_with_ledger(self, keys: Sequence[str]) -> tuple[bytes | None, list[bytes | None], bytes | None]:
        """See `LedgerReads.multi_get_with_ledger`: one round trip."""
        ledger = _command(b"GET", self._ledger)
        if not keys:
            before, after = self._ask(ledger + ledger, 2)
            return before, [], after
        before, records, after = self._ask(ledger + self._mget(keys) + ledger, 3)
        return before, records, after

    def load(self) -> tuple[bytes, _Version] | None:
        """See `LedgerStore.load`. The version is the record, and the life of the server, where it may be asked."""
        ask = _command(b"GET", self._ledger) + _INFO
        record, *info = self._retrying(lambda: self._finish(self._take(), ask, 3, optional=2))
        return None if record is None else (record, (record, _life(*info)))

    def swap(self, record: bytes, expected: _Version | None, fence: FenceToken) -> _Version | None:
        """See `LedgerStore.swap`. Raises StoreUnavailableError where the reply is lost: then ask `load`."""
        conn, (found, *info) = self._retrying(lambda: self._watch(self._take(), self._ledger, _INFO, 2, optional=2))
        life = _life(*info)
        if (None if found is None else (found, life)) != expected:
            self._unwatch(conn)
            return None
        ledger = _command(b"SET", self._ledger, record) + _command(b"SET", self._fence, _text(fence))
        change = _MULTI + ledger + _command(b"DEL", self._claims) + _EXEC
        done = self._retrying(lambda: self._finish(conn, change, 5), retries=0)[-1]
        return None if done is None else (record, life)

    def writer(self, token: FenceToken) -> IBackingMap[str, bytes]:
        """See `FencedWrites.writer`. It holds a connection from a get to its put, or to ``close()``."""
        return _Writer(self, token)

    def claim(self, txid: int, partition: int, holder: str) -> str:
        """See `Claims.claim`: one round trip."""
        name = b"%d/%d" % (txid, partition)
        claim = _command(b"HSETNX", self._claims, name, holder.encode()) + _command(b"HGET", self._claims, name)
        found: bytes = self._ask(_MULTI + claim + _EXEC, 4)[-1][-1]
        return found.decode()

    def scan(self, page_size: int) -> Iterator[list[str]]:
        """See `Scan.scan`. SCAN passes over the whole database, so other states there cost time."""
        options = (b"MATCH", _GLOB.sub(rb"\\\1", self._head) + b"*", b"COUNT", b"%d" % page_size)
        cursor, page = b"0", list[str]()
        while True:
            ((cursor, found),) = self._ask(_command(b"SCAN", cursor, *options), 1)
            try:
                page += [key[len(self._head) :].decode() for key in found]
            except UnicodeDecodeError as error:
                raise CorruptRecordError(
                    f"state {self._state!r}: one of its Redis keys is not UTF-8, {error.object!r}: something else "
                    "writes under this state's name",
                    state=self._state,
                ) from error
            if page and (cursor == b"0" or len(page) >= page_size):
                yield page
                page = []
            if cursor == b"0":
                return

    def keep_report(self, report: bytes, most: int) -> None:
        """See `Reports.keep_report`: one transaction."""
        push = _command(b"LPUSH", self._reports, report) + _command(b"LTRIM", self._reports, b"0", b"%d" % (most - 1))
        conn = self._retrying(self._take)
        self._retrying(lambda: self._finish(conn, _MULTI + push + _EXEC, 4), retries=0)

    def reports(self) -> list[bytes]:
        """See `Reports.reports`."""
        found: list[bytes] = self._ask(_command(b"LRANGE", self._reports, b"0", b"-1"), 1)[0]
        return found

    def checkup(self, replay_horizon: float) -> list[Finding]:
        """See `Checkup.checkup`. What the user may not ask is left out, and said."""
        before = time.time()
        clock = self._allowed(_command(b"TIME"))
        middle = (before + time.time()) / 2
        page = next(self.scan(_SAMPLE), [])[:_SAMPLE]
        asked = [self._ledger, *(self._head + key.encode() for key in page)]
        ttls = [self._allowed(_command(b"PTTL", key)) for key in asked]
        info = (self._allowed(_command(b"INFO")) or b"").decode().splitlines()
        config: list[bytes] = []
        for name in (b"maxmemory*", b"save", b"append*", b"min-*-to-write"):
            config += self._allowed(_command(b"CONFIG", b"GET", name)) or []
        texts = [text.decode() for text in config]
        facts = RedisFacts(
            info=dict(line.split(":", 1) for line in info if ":" in line),
            config=dict(zip(texts[::2], texts[1::2], strict=True)),
            clock=0.0 if clock is None else int(clock[0]) + int(clock[1]) / 1e6 - middle,
            ledger_ttl=-1 if ttls[0] is None else ttls[0],
            ttls=[ttl for ttl in ttls[1:] if ttl is not None],
        )
        return judge(facts, replay_horizon)

    def _allowed(self, command: bytes) -> Any:
        """The reply, None where this user or this server has no such command."""
        try:
            return self._ask(command, 1)[0]
        except (StoreUnavailableError, StoreFullError):
            raise
        except StoreError:
            return None

    def close(self) -> None:
        """Closes this process's idle connections to the server. The store stays usable."""
        self._backend.pool().disconnect(inuse_connections=False)

    # Packing

    def _mget(self, keys: Sequence[str]) -> bytes:
        texts = self._encoded(keys)
        return b"*%d\r\n$4\r\nMGET%b\r\n" % (len(keys) + 1, _interleaved(_sizes(texts, self._head), texts))

    def _put(self, keys: Sequence[str], values: Sequence[bytes]) -> tuple[bytes, int]:
        """The transaction that stores all of them, and how many replies it has."""
        texts = self._encoded(keys)
        self._check_sizes("the record of key", keys, values)
        columns = (_sizes(texts, self._head), texts, _sizes(values), values)
        if self._expiry is None:
            put, replies = b"*%d\r\n$4\r\nMSET%b\r\n" % (2 * len(keys) + 1, _interleaved(*columns)), 3
        else:
            start, end = b"*5\r\n$3\r\nSET", b"\r\n$2\r\nPX\r\n$%d\r\n%b\r\n" % (len(self._expiry), self._expiry)
            put, replies = _interleaved([start] * len(keys), *columns, [end] * len(keys)), len(keys) + 2
        if len(put) > _MOST_BYTES:
            raise self._too_large(f"the {len(keys)} records of one put have", len(put), _MOST_BYTES, keys[0])
        return _MULTI + put + _EXEC, replies

    def _rewrite(self, keys: Sequence[str], values: Sequence[bytes | None]) -> tuple[bytes, int]:
        """The transaction of `Rewrites.multi_rewrite`, and how many replies it has."""
        texts = self._encoded(keys)
        kept = {key: value for key, value in zip(keys, values, strict=True) if value is not None}
        if kept:
            self._check_sizes("the record of key", list(kept), list(kept.values()))
        rewrite = b"".join(
            _command(b"DEL", self._head + text)
            if value is None
            else _command(b"SET", self._head + text, value, b"XX", b"KEEPTTL")
            for text, value in zip(texts, values, strict=True)
        )
        if len(rewrite) > _MOST_BYTES:
            raise self._too_large(f"the {len(keys)} records of one page have", len(rewrite), _MOST_BYTES, keys[0])
        return _MULTI + rewrite + _EXEC, len(keys) + 2

    def _encoded(self, keys: Sequence[str]) -> list[bytes]:
        try:
            texts = list(map(str.encode, keys))
        except UnicodeEncodeError as error:
            what = f"state {self._state!r}: the key {error.object!r} is not Unicode: {error.reason}"
            raise KeyEncodingError(what, state=self._state) from error
        self._check_sizes("the key", keys, texts)
        return texts

    def _check_sizes(self, what: str, keys: Sequence[str], sized: Sequence[bytes]) -> None:
        limit = self._backend.max_value_bytes
        if max(map(len, sized)) > limit:
            size, key = max((len(one), key[:200]) for key, one in zip(keys, sized, strict=True))
            raise self._too_large(f"{what} {key!r} has", size, limit, key)

    def _too_large(self, what: str, size: int, limit: int, key: str) -> TooLargeError:
        return TooLargeError(
            f"state {self._state!r}: {what} {size} bytes, and the limit is {limit}. Nothing of this call was sent. "
            "For a single one the limit is max_value_bytes, for a put it is Redis' own: lower the chunk_size.",
            state=self._state,
            key=key,
            size=size,
        )

    # Sending

    def _ask(self, commands: bytes, replies: int) -> list[Any]:
        """The replies to what may be asked again."""
        return self._retrying(lambda: self._finish(self._take(), commands, replies))

    def _retrying(self, ask: Callable[[], T], retries: int | None = None) -> T:
        """What ``ask`` returns; tried again, after pauses, where the trouble may pass."""
        left = self._backend.retries if retries is None else retries
        deadline = time.monotonic() + 2 * self._backend.socket_timeout
        pause = 0.05
        while True:
            try:
                return ask()
            except (driver.RedisError, OSError, UnicodeError) as error:
                problem, may_pass = self._problem(error)
            if not may_pass or not left or time.monotonic() > deadline:
                raise problem  # not above, where it would have the driver's error as its context
            time.sleep(pause * random.uniform(0.5, 1))  # noqa: S311  jitter
            pause = min(2 * pause, 1.0)
            left -= 1

    def _take(self) -> Connection:
        return self._backend.pool().get_connection()

    def _finish(self, conn: Connection, commands: bytes, replies: int, *, optional: int = 0) -> list[Any]:
        """`_exchange`, and the connection goes back to the pool."""
        found = self._exchange(conn, commands, replies, optional=optional)
        self._backend.pool().release(conn)
        return found

    def _exchange(self, conn: Any, commands: bytes, replies: int, *, optional: int = 0) -> list[Any]:
        """Sends, and reads each reply; raises the first that is an error, also inside that of EXEC.

        The last ``optional`` ones may be refused, and are None then. After any error the connection is closed,
        because it may be half read.
        """
        try:
            conn.send_packed_command([commands], check_health=False)
            found = [conn.read_response() for _ in range(replies - optional)]
            for _ in range(optional):
                try:
                    found.append(conn.read_response())
                except driver.ResponseError:
                    found.append(None)
            if commands.endswith(_EXEC) and found[-1] is not None:
                _raise_first(found[-1])
        except BaseException:
            conn.disconnect()
            self._backend.pool().release(conn)
            raise
        return found

    def _watch(
        self, conn: Connection, key: bytes, more: bytes = b"", replies: int = 0, *, optional: int = 0
    ) -> tuple[Connection, list[Any]]:
        """Puts ``key`` under WATCH and reads it, and then asks for ``more``: one round trip.

        MULTI and DISCARD come first. Where an ACL forbids MULTI that has to show before there is anything
        to write: what follows a refused MULTI would be run at once, unguarded.
        """
        commands = _MULTI + _DISCARD + _command(b"WATCH", key) + _command(b"GET", key) + more
        return conn, self._exchange(conn, commands, 4 + replies, optional=optional)[3:]

    def _unwatch(self, conn: Connection) -> None:
        with suppress(driver.RedisError, OSError):
            self._finish(conn, _UNWATCH, 1)

    def _problem(self, error: Exception) -> tuple[StoreError, bool]:
        """Our error for one of the driver's, chained where that is safe, and whether it may pass by itself."""
        text = str(error).partition("discarded because of: ")[2] or str(error) or type(error).__name__
        secret = self._backend.password
        shown = text.replace(secret, "***") if secret else text
        kind, what, may_pass = _kind(error, text)
        problem = kind(
            f"state {self._state!r}: Redis at {self._backend.address} {what} It said: {shown}",
            state=self._state,
            store=self._backend.address,
        )
        if shown == text and not isinstance(error, UnicodeError):  # that holds what it could not encode
            problem.__cause__ = error.with_traceback(None)  # whose frames hold the password
        return problem, may_pass


class _Writer:
    """The map of one task. See `FencedWrites.writer`.

    One chunk at a time: EXEC ends every WATCH of its connection, so a second chunk under watch there
    would go unguarded.
    """

    def __init__(self, store: RedisStore, token: FenceToken) -> None:
        self._store = store
        self._token = token
        self._watching: Any = None

    def multi_get(self, keys: Sequence[str]) -> list[bytes | None]:
        """WATCH, GET fence, MGET: one round trip. Raises FencedError."""
        if not keys:
            return []
        mget = self._store._mget(keys)
        self._watching, (records,) = self._store._retrying(lambda: self._watch(mget, 1))
        return records  # type: ignore[no-any-return]

    def multi_put(self, keys: Sequence[str], values: Sequence[bytes]) -> None:
        """MULTI, MSET, EXEC: one round trip, and one before it where no get was. Raises FencedError.

        Where the reply is lost the same bytes go out again, under the fence again: no other attempt has
        begun then, and in this one nobody else writes these keys.
        """
        check_lengths(keys, values, "values")
        if not keys:
            return
        self._send(*self._store._put(keys, values))

    def multi_rewrite(self, keys: Sequence[str], values: Sequence[bytes | None]) -> None:
        """See `Rewrites.multi_rewrite`: as `multi_put`, with a SET or a DEL per key. Needs Redis 6.0."""
        check_lengths(keys, values, "values")
        if keys:
            self._send(*self._store._rewrite(keys, values))

    def _send(self, put: bytes, replies: int) -> None:
        """A transaction under the fence; again where somebody has touched that, and has left it as it was."""
        for _ in range(_PUT_TRIES):
            done = self._store._retrying(lambda: self._store._finish(self._taken() or self._watch()[0], put, replies))
            if done[-1] is not None:
                return
        raise self._fenced("touched again and again")

    def close(self) -> None:
        """Lets the connection go. Closing twice is no error."""
        conn = self._taken()
        if conn is not None:
            self._store._unwatch(conn)

    def __del__(self) -> None:
        with suppress(Exception):
            conn = self._taken()
            if conn is not None:
                conn.disconnect()
                self._store._backend.pool().release(conn)

    def _watch(self, more: bytes = b"", replies: int = 0) -> tuple[Connection, list[Any]]:
        conn = self._taken() or self._store._take()
        conn, (fence, *rest) = self._store._watch(conn, self._store._fence, more, replies)
        if fence != _text(self._token) or self._token.closed:
            self._store._unwatch(conn)
            raise self._fenced("gone (was the store flushed?)" if fence is None else f"at {fence.decode()}")
        return conn, rest

    def _taken(self) -> Any:
        """The connection under watch, if there is one; now it is the caller's."""
        conn, self._watching = self._watching, None
        return conn if conn is not None and conn.pid == os.getpid() else None

    def _fenced(self, found: str) -> FencedError:
        return FencedError(
            f"state {self._store._state!r}: the attempt with txid {self._token.txid} of epoch {self._token.epoch} may "
            f"no longer write: the fence is {found}. It has ended, or a newer attempt or driver has taken over.",
            state=self._store._state,
            txid=self._token.txid,
            epoch=self._token.epoch,
        )


def _text(token: FenceToken) -> bytes:
    nonce = b":%b" % token.nonce.encode() if token.nonce else b""
    return b"%d:%d%b%b" % (token.epoch, token.txid, nonce, b":closed" if token.closed else b"")


def _command(*words: bytes) -> bytes:
    return b"*%d\r\n%b" % (len(words), b"".join([b"$%d\r\n%b\r\n" % (len(word), word) for word in words]))


def _sizes(items: Sequence[bytes], head: bytes = b"") -> list[bytes]:
    """What comes before each item as a word of a command, up to and with ``head``."""
    sizes = list(map(len, items))
    starts = {size: b"\r\n$%d\r\n%b" % (size + len(head), head) for size in set(sizes)}
    return list(map(starts.__getitem__, sizes))


def _interleaved(*columns: Sequence[bytes]) -> bytes:
    """The first of each column, the second of each, and so on; no Python code runs per item."""
    pieces = [b""] * (len(columns) * len(columns[0]))
    for at, column in enumerate(columns):
        pieces[at :: len(columns)] = column
    return b"".join(pieces)


def _raise_first(replies: list[Any]) -> None:
    for reply in replies:
        if isinstance(reply, Exception):
            raise reply


def _life(server: bytes | None, replication: bytes | None) -> bytes | None:
    """Names one life of a server: it ends with its process, and with a failover. None where INFO is forbidden."""
    run = re.search(rb"run_id:(\w+)", server or b"")
    history = re.search(rb"master_replid:(\w+)", replication or b"")
    return None if run is None else run[1] + b"/" + (history[1] if history else b"")


_INFO = _command(b"INFO", b"server") + _command(b"INFO", b"replication")
_MULTI, _DISCARD, _UNWATCH, _EXEC = map(_command, (b"MULTI", b"DISCARD", b"UNWATCH", b"EXEC"))

_REFUSED = (
    driver.AuthenticationError,
    driver.AuthenticationWrongNumberOfArgsError,
    driver.AuthorizationError,
    driver.NoPermissionError,
)
_NOT_READY = (driver.BusyLoadingError, driver.ClusterDownError, driver.ReadOnlyError)
_UNREACHABLE = (driver.ConnectionError, driver.TimeoutError, OSError, UnicodeError)
_CLUSTER = (driver.MovedError, driver.AskError, driver.ClusterCrossSlotError)


def _kind(error: Exception, text: str) -> tuple[type[StoreError], str, bool]:
    """Our class for an error of the driver, what to say, and whether the trouble may pass by itself."""
    if isinstance(error, _REFUSED) or text.startswith(("NOPERM", "DENIED")):
        advice = (
            "refused the user, the password or a command. A reader's ACL needs GET, MGET and SCAN (and LRANGE for "
            "batch reports), a job's also SET, MSET, DEL, HSETNX, HGET, WATCH, UNWATCH, LPUSH, LTRIM, MULTI, EXEC and "
            "DISCARD."
        )
        return StoreAuthError, advice, False
    if isinstance(error, driver.OutOfMemoryError) or text.startswith(("OOM", "MISCONF")):
        advice = "is full, or cannot save. Give it memory (maxmemory) or disk; it must not evict (noeviction)."
        return StoreFullError, advice, False
    if isinstance(error, _NOT_READY) or text.startswith(("READONLY", "LOADING", "MASTERDOWN", "NOREPLICAS", "BUSY")):
        return StoreUnavailableError, "takes no writes: it is a replica, still loading, or not ready.", True
    if isinstance(error, _UNREACHABLE):
        advice = "cannot be reached or does not answer. Look at address, network, TLS and the server's log."
        return StoreUnavailableError, advice, True
    if isinstance(error, _CLUSTER):
        return StoreError, "belongs to a cluster, and redis:// speaks to one server.", False
    return StoreError, "refused a command; something else may use the state's Redis keys.", False
