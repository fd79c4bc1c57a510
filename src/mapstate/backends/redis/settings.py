"""The parameters of every Redis backend: login, TLS, timeouts, retries; and the pools of connections that they make."""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, Self

from redis.backoff import NoBackoff
from redis.connection import ConnectionPool
from redis.credentials import UsernamePasswordCredentialProvider

from mapstate.backing_map import Backend
from mapstate.errors import ConfigurationError

_LONGEST_TTL = 1e10
_MOST_CONNECTIONS = 2**31
"""The limit of a pool, which is none: it holds as many connections as calls run at one time."""


@dataclass(frozen=True, repr=False, kw_only=True)
class RedisSettings:
    """The parameters that one server, a pair behind sentinels, and a cluster have in common.

    ``password_env``     the environment variable with the password, on each machine that connects; instead of one here
    ``prefix``           in front of every Redis key: letters, digits, ``_ . / -``
    ``socket_timeout``   seconds to wait for a reply; ``socket_connect_timeout`` for a connection
    ``retries``          of a read, a connect or a fenced put, with growing pauses of up to a second; none begins later
                         than two ``socket_timeout`` after the first try
    ``max_value_bytes``  the largest key or record; the server's own limit is ``proto-max-bulk-len``
    ``ssl_...``          as in redis-py; file names are those of the machine that connects
    """

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
    password_env: str | None = None

    KIND: ClassVar[str] = ""
    """The name of its place in `mapstate.backends.redis.address`."""

    RECORDS: ClassVar[dict[str, Any]] = {"prefix": ""}
    """The fields that place the records on a server, at their defaults."""

    shared_between_processes: ClassVar[bool] = True

    def __post_init__(self) -> None:
        from mapstate.backends.redis.address import check

        check(self)
        self.__dict__["_shown"] = repr(self)  # the driver asks for it in each batch

    @classmethod
    def from_url(cls, url: str) -> Self:
        """The backend that a URL names. Raises ConfigurationError, which does not repeat a URL that cannot be read."""
        from mapstate.backends.redis.address import fields_in

        return cls(**fields_in(cls, url))

    def __repr__(self) -> str:
        if "_shown" in self.__dict__:
            return str(self.__dict__["_shown"])
        from mapstate.backends.redis.address import shown

        return f"{type(self).__name__}('{shown(self)}')"

    def __getstate__(self) -> dict[str, Any]:
        """Pickle the fields only, without what cached properties hold."""
        return {one.name: getattr(self, one.name) for one in fields(self)}

    @property
    def address(self) -> str:
        """Where the server or servers are, for messages."""
        from mapstate.backends.redis.address import PLACES

        return PLACES[self.KIND].address(self)

    @property
    def secret(self) -> str | None:
        """The password, which messages must not show. Raises ConfigurationError."""
        if self.password_env is None:
            return self.password
        from mapstate.urls import password_in

        return password_in(self.password_env)

    @cached_property
    def reached(self) -> Self:
        """The backend without the fields that place the records. Backends for which it is equal share connections."""
        bare = object.__new__(type(self))
        bare.__dict__.update(self.__getstate__() | self.RECORDS)
        return bare

    def expiry(self, state: str, ttl: float | None) -> bytes | None:
        """A ttl in milliseconds, as text. Raises ConfigurationError, also for a name that Redis keys cannot hold."""
        if ttl is not None and not 0 < ttl <= _LONGEST_TTL:
            raise ConfigurationError(f"ttl is a number of seconds from 0 to {_LONGEST_TTL:.0f}, not {ttl!r}")
        if ":" in state or "!" in state:
            raise ConfigurationError(f"{state!r} cannot name a state in Redis: ':' and '!' end the name there")
        return None if ttl is None else b"%d" % math.ceil(ttl * 1000)

    def open(self, state: str, *, ttl: float | None = None) -> Any:
        """See `Backend.open`. Makes no connection."""
        return self.open_with(self.pool, state, ttl)

    def on_event_loop(self) -> Backend:
        from mapstate.backends.redis.async_pools import AsyncPools

        return AsyncPools(lambda node: self.new_pool(node, asynchronous=True), self.open_with)

    def open_with(self, pool: Callable[..., ConnectionPool], state: str, ttl: float | None) -> Any:
        """`open`, with the connections that ``pool`` returns; for a cluster, those to a node."""
        raise NotImplementedError

    def pool(self, node: Any = None) -> ConnectionPool:
        """The connections of this process, of a cluster to ``node``. Where `reached` is equal, they are shared."""
        pid = os.getpid()
        pool = _pools.get((pid, self.reached, node))
        if pool is None:
            for known in list(_pools):  # a copy: other threads add theirs meanwhile
                if known[0] != pid:
                    _pools.pop(known, None)  # closes this process's copies, not the parent's connections
            pool = _pools.setdefault((pid, self.reached, node), self.new_pool(node))
        return pool

    def new_pool(self, node: Any = None, *, asynchronous: bool = False) -> Any:
        """A pool of redis-py, or one of ``redis.asyncio``."""
        driver = driver_module("connection", asynchronous=asynchronous)
        return driver.ConnectionPool(
            connection_class=driver.SSLConnection if self.tls else driver.Connection,
            socket_keepalive=True,
            **self.host_options(node),
            **self.connection_options(asynchronous=asynchronous),
            **self.tls_options(),
        )

    def host_options(self, node: Any) -> dict[str, Any]:
        """Options of redis-py for the address."""
        raise NotImplementedError

    def connection_options(self, *, asynchronous: bool = False) -> dict[str, Any]:
        """Options of redis-py for a connection, without the address. Raises ConfigurationError."""
        retry = driver_module("retry", asynchronous=asynchronous).Retry
        options: dict[str, Any] = {
            "max_connections": _MOST_CONNECTIONS,
            "socket_timeout": self.socket_timeout,
            "socket_connect_timeout": self.socket_connect_timeout,
            "protocol": 2,  # RESP 3 pushes messages between replies
            "retry": retry(NoBackoff(), 0),  # the driver's own retries are under no WATCH
        }
        if self.username or self.secret:  # a provider, because some pools show a password in their repr
            options["credential_provider"] = UsernamePasswordCredentialProvider(self.username, self.secret)
        return options

    def tls_options(self) -> dict[str, Any]:
        """Options of redis-py for TLS; none where it is off."""
        if not self.tls:
            return {}
        options = {name: getattr(self, name) for name in self.__getstate__() if name.startswith("ssl_")}
        options["ssl_check_hostname"] &= self.ssl_cert_reqs != "none"
        for name in ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile"):
            if options[name] is not None and not Path(options[name]).is_file():
                raise ConfigurationError(
                    f"{name}: there is no file {options[name]!r} on {socket.gethostname()}; each machine that "
                    "connects needs it"
                )
        return options


_pools: dict[tuple[int, RedisSettings, Any], ConnectionPool] = {}


def driver_module(name: str, *, asynchronous: bool) -> Any:
    """A module of redis-py, or its twin of ``redis.asyncio``, which only an async reader imports."""
    return import_module(f"redis.asyncio.{name}" if asynchronous else f"redis.{name}")
