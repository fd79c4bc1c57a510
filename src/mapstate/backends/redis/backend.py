"""Backends for one Redis server: at an address, behind a socket, or found by sentinels."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Self
from urllib.parse import quote

from redis.connection import Connection, ConnectionPool, SSLConnection, UnixDomainSocketConnection
from redis.sentinel import Sentinel, SentinelConnectionPool

from mapstate.backends.redis.connection import MOST_CONNECTIONS, Access, Server, pool_of
from mapstate.backends.redis.hash_layout import HashLayout
from mapstate.backends.redis.layout import Layout, StringLayout
from mapstate.backends.redis.packed_layout import PackedLayout
from mapstate.backends.redis.settings import RedisSettings
from mapstate.backends.redis.store import KEY_ENDS, RedisStore
from mapstate.errors import ConfigurationError
from mapstate.urls import Address, Parameters, Url, boolean, shown_address

__all__ = ["OneServer", "RedisBackend", "RedisSentinelBackend", "RedisUnixBackend"]

_MOST_HASHES = 10**9


@dataclass(frozen=True, repr=False, kw_only=True)
class OneServer(RedisSettings):
    """The parameters that are the same wherever one server holds all of a state.

    ``layout``   "string": a Redis key per record. "hash": one Redis hash with all records. "packed": many small hashes,
                 for less memory. Records in hashes have no ttl
    ``buckets``  with layout=packed: the number of hash shards, one for each 32 to 64 expected keys. Fixed when the
                 state is made, and checked from then on
    ``records``  where storm-redis left the records of a state: the name of its hash, or the prefix of each key, which
                 may be empty. It names the records of one state, so no two states can have it
    """

    db: int = 0
    layout: str = "string"
    buckets: int | None = None
    records: str | None = None

    PARAMETERS: ClassVar[Parameters] = {
        **RedisSettings.PARAMETERS,
        "layout": str,
        "buckets": int,
        "records": str,
    }

    def _rules(self) -> list[tuple[str, object, str]]:
        whole, packed = self.records is None or not self.prefix, self.layout == "packed"
        return [
            *super()._rules(),
            ("db", self.db >= 0, "from 0 up"),
            ("layout", self.layout in ("string", "hash", "packed"), "string, hash or packed"),
            ("buckets", packed == (self.buckets is not None), "given with layout=packed, and only there"),
            ("buckets", self.buckets is None or 0 < self.buckets <= _MOST_HASHES, f"from 1 to {_MOST_HASHES}"),
            ("records", whole, "a whole name, without a prefix"),
            ("records", self.records is None or not packed, "for the layouts of storm-redis, string and hash"),
            ("records", self.layout == "string" or self.records != "", "the name of a hash where layout is hash"),
        ]

    @property
    def address(self) -> str:
        """The server's address, for messages."""
        raise NotImplementedError

    def open(self, state: str, *, ttl: float | None = None) -> RedisStore:
        """See `Backend.open`. Makes no connection."""
        expiry = self.expiry(state, ttl)
        if expiry is not None and self.layout != "string":
            raise ConfigurationError(
                f"layout={self.layout} has no ttl: Redis expires a hash as a whole. Leave out the ttl, or keep the "
                "state with layout=string"
            )
        name = (self.prefix + state if self.records is None else self.records).encode()
        access = Access(self.address, self.retries, self.socket_timeout, lambda: self.secret, self.pool)
        layout, text = self._layout_of(state, name, expiry)
        return RedisStore(Server(access, state), state, name, layout, layout_text=text, commit_domain=self.reached)

    def _layout_of(self, state: str, name: bytes, expiry: bytes | None) -> tuple[Layout, bytes]:
        """The layout of a state's records, and the text by which the state notes it."""
        limit = self.max_value_bytes
        if self.buckets is not None:
            return PackedLayout(state, limit, name + b":", self.buckets), b"packed, %d buckets" % self.buckets
        if self.layout == "hash":
            return HashLayout(state, limit, name), b"hash"
        if self.records is None:
            return StringLayout(state, limit, name + b":", expiry), b"string"
        return StringLayout(state, limit, name, expiry, reserved=KEY_ENDS), b"string, records at " + name

    def pool(self) -> ConnectionPool:
        """The connections of this process; see `pool_of`."""
        return pool_of(self.reached, self._new_pool)

    @cached_property
    def reached(self) -> Self:
        """The backend without the fields that place the records. Backends for which it is equal share connections."""
        return replace(self, prefix="", layout="string", buckets=None, records=None)

    def _new_pool(self) -> ConnectionPool:
        raise NotImplementedError


@dataclass(frozen=True, repr=False, kw_only=True)
class RedisBackend(OneServer):
    """Where a Redis server is and how to reach it.

    ``redis://user:password@host:port/db?prefix=app/&retries=3``, and ``rediss://`` for TLS. The URL's parameters are
    the fields of `RedisSettings`, ``layout``, ``buckets`` and ``records``.
    """

    host: str = "localhost"
    port: int = 6379

    PARAMETERS: ClassVar[Parameters] = OneServer.PARAMETERS
    EXAMPLE: ClassVar[str] = "redis://user:password@host:port/db"
    SCHEMES: ClassVar[tuple[str, ...]] = ("redis", "rediss")

    def _rules(self) -> list[tuple[str, object, str]]:
        return [*super()._rules(), ("port", 0 < self.port < 2**16, "from 1 to 65535")]

    @classmethod
    def _place(cls, url: Url) -> dict[str, Any]:
        ((host, port),) = url.hosts
        return {
            "host": host or "localhost",
            "port": 6379 if port is None else port,
            "db": int(url.path.strip("/") or 0),
        }

    def _url(self, user: str) -> str:
        return f"{'rediss' if self.tls else 'redis'}://{user}{self.address}/{self.db}"

    @property
    def address(self) -> str:
        """``host:port``, for messages."""
        return shown_address((self.host, self.port))

    def _new_pool(self) -> ConnectionPool:
        return ConnectionPool(
            connection_class=SSLConnection if self.tls else Connection,
            max_connections=MOST_CONNECTIONS,
            host=self.host,
            port=self.port,
            db=self.db,
            socket_keepalive=True,
            **self.connection_options(),
            **self.tls_options(),
        )


@dataclass(frozen=True, repr=False, kw_only=True)
class RedisUnixBackend(OneServer):
    """A Redis server on this machine, behind a socket: ``unix://user:password@/run/redis.sock?db=0``."""

    path: str = ""

    PARAMETERS: ClassVar[Parameters] = {**OneServer.PARAMETERS, "db": int}
    EXAMPLE: ClassVar[str] = "unix://user:password@/path/to/redis.sock"
    SCHEMES: ClassVar[tuple[str, ...]] = ("unix", "redis+unix")

    def _rules(self) -> list[tuple[str, object, str]]:
        absolute = self.path.startswith("/") and len(self.path) > 1
        return [*super()._rules(), ("path", absolute, "a whole one, from / on: unix:///run/redis.sock")]

    @classmethod
    def _place(cls, url: Url) -> dict[str, Any]:
        if url.hosts != (("", None),):
            raise ValueError("a host")
        return {"path": url.path}

    def _url(self, user: str) -> str:
        return f"unix://{user}{quote(self.path)}"

    @property
    def address(self) -> str:
        """The socket's path, for messages."""
        return self.path

    def _new_pool(self) -> ConnectionPool:
        return ConnectionPool(
            connection_class=UnixDomainSocketConnection,
            max_connections=MOST_CONNECTIONS,
            path=self.path,
            db=self.db,
            **self.connection_options(),
        )


@dataclass(frozen=True, repr=False, kw_only=True)
class RedisSentinelBackend(OneServer):
    """A primary with replicas. Sentinels name it each time that a connection is made.

    ``redis+sentinel://user:password@host:26379,host2:26379/mymaster/db?parameter=value``, and ``rediss+sentinel://``
    for TLS, to the sentinels too. User and password are those of the servers.

    ``sentinel_login``  the sentinels ask for the same user and password
    ``retries``         is 20 here, because a failover takes a while. One that takes two ``socket_timeout`` is an error
    """

    sentinels: tuple[Address, ...] = ()
    master: str = ""
    sentinel_login: bool = False
    retries: int = 20

    PARAMETERS: ClassVar[Parameters] = {
        **OneServer.PARAMETERS,
        "sentinel_login": boolean,
    }
    EXAMPLE: ClassVar[str] = "redis+sentinel://user:password@host:26379,host2:26379/mymaster/db"
    SCHEMES: ClassVar[tuple[str, ...]] = ("redis+sentinel", "rediss+sentinel")

    def _rules(self) -> list[tuple[str, object, str]]:
        ports = all(host and 0 < port < 2**16 for host, port in self.sentinels)
        return [
            *super()._rules(),
            ("sentinels", self.sentinels and ports, "one or more hosts, with ports from 1 to 65535"),
            ("master", self.master, "the name by which the sentinels know the primary: .../mymaster/0"),
        ]

    @classmethod
    def _place(cls, url: Url) -> dict[str, Any]:
        master, _, db = url.path.strip("/").partition("/")
        hosts = tuple((host, 26379 if port is None else port) for host, port in url.hosts)
        return {"sentinels": hosts, "master": master, "db": int(db or 0)}

    def _url(self, user: str) -> str:
        return f"{'rediss' if self.tls else 'redis'}+sentinel://{user}{self._hosts}/{quote(self.master)}/{self.db}"

    @property
    def _hosts(self) -> str:
        return ",".join(map(shown_address, self.sentinels))

    @property
    def address(self) -> str:
        """The primary's name and its sentinels, for messages."""
        return f"{self.master} (sentinels {self._hosts})"

    def _new_pool(self) -> ConnectionPool:
        options = self.connection_options()
        tls = {"ssl": True, **self.tls_options()} if self.tls else {}
        plain = {name: value for name, value in options.items() if name != "credential_provider"}
        sentinel: Any = Sentinel(  # type: ignore[no-untyped-call]
            self.sentinels, sentinel_kwargs=(options if self.sentinel_login else plain) | tls
        )
        return SentinelConnectionPool(  # type: ignore[no-untyped-call]
            self.master,
            sentinel,
            max_connections=MOST_CONNECTIONS,
            db=self.db,
            socket_keepalive=True,
            **options,
            **tls,
        )
