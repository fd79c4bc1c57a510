"""The parameters of every Redis backend: login, TLS, timeouts, retries; and the pools of connections made with them."""

from __future__ import annotations

import math
import socket
from dataclasses import dataclass, fields
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, Self

from redis.backoff import NoBackoff
from redis.credentials import UsernamePasswordCredentialProvider

from mapstate.errors import ConfigurationError

_LONGEST_TTL = 1e10


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


def new_pool(backend: Any, node: Any = None, *, asynchronous: bool = False) -> Any:
    """A pool of redis-py or ``redis.asyncio`` for a backend, in a cluster to ``node``. Raises ConfigurationError."""

    def module(name: str) -> Any:  # of redis.asyncio only an async reader imports any
        return import_module(f"redis.asyncio.{name}" if asynchronous else f"redis.{name}")

    options: dict[str, Any] = {
        "max_connections": 2**31,  # as many as calls run at one time
        "socket_timeout": backend.socket_timeout,
        "socket_connect_timeout": backend.socket_connect_timeout,
        "protocol": 2,  # RESP 3 pushes messages between replies
        "retry": module("retry").Retry(NoBackoff(), 0),  # the driver's own retries are under no WATCH
    }
    login = {}
    if backend.username or backend.secret:  # a provider, because some pools show a password in their repr
        login["credential_provider"] = UsernamePasswordCredentialProvider(backend.username, backend.secret)
    connection = module("connection")
    if backend.KIND == "socket":
        kind = connection.UnixDomainSocketConnection
        return connection.ConnectionPool(connection_class=kind, path=backend.path, db=backend.db, **options, **login)
    tls = _tls_options(backend) if backend.tls else {}
    if backend.KIND == "sentinels":
        tls |= {"ssl": True} if backend.tls else {}
        own = options | tls | (login if backend.sentinel_login else {})
        sentinel = module("sentinel").Sentinel(backend.sentinels, sentinel_kwargs=own)
        options |= {"db": backend.db, "socket_keepalive": True}
        return module("sentinel").SentinelConnectionPool(backend.master, sentinel, **options, **login, **tls)
    host, port = (backend.host, backend.port) if node is None else node
    options |= {"host": host, "port": port, "socket_keepalive": True} | ({"db": backend.db} if node is None else {})
    kind = connection.SSLConnection if backend.tls else connection.Connection
    return connection.ConnectionPool(connection_class=kind, **options, **login, **tls)


def _tls_options(backend: Any) -> dict[str, Any]:
    options = {name: getattr(backend, name) for name in backend.__getstate__() if name.startswith("ssl_")}
    options["ssl_check_hostname"] &= backend.ssl_cert_reqs != "none"
    for name in ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile"):
        if options[name] is not None and not Path(options[name]).is_file():
            raise ConfigurationError(
                f"{name}: there is no file {options[name]!r} on {socket.gethostname()}; each machine that connects "
                "needs it"
            )
    return options
