"""What every Redis backend has, and that of one server at an address."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from functools import cached_property, partial
from typing import Any, ClassVar, Self

from redis.connection import ConnectionPool

from mapstate.backends.redis.connection import Server, pool_of
from mapstate.backends.redis.layout import Layout, StringLayout
from mapstate.backends.redis.store import KEY_ENDS, RedisStore
from mapstate.backing_map import Backend
from mapstate.errors import ConfigurationError
from mapstate.schema import KeyOrder

_LONGEST_TTL = 1e10


@dataclass(frozen=True, repr=False, kw_only=True)
class RedisSettings:
    """The parameters that one server, a pair behind sentinels, and a cluster have in common.

    ``password_env``     the environment variable with the password, on each machine that connects; instead of one here
    ``password_file``    the file with the password, read for each new connection
    ``credentials``      "module:factory", which each process calls once: it returns a ``redis.CredentialProvider``,
                         which is asked for user and password for each new connection
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
    password_file: str | None = None
    credentials: str | None = None

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
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @property
    def address(self) -> str:
        """Where the server or servers are, for messages."""
        from mapstate.backends.redis.address import PLACES

        return PLACES[self.KIND].address(self)

    @property
    def login_changes(self) -> bool:
        """True where a connection may log in with another password than the one before."""
        return self.password_file is not None or self.credentials is not None

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
        return self.open_with(partial(pool_of, self), state, ttl)

    def on_event_loop(self) -> Backend:
        from mapstate.backends.redis.async_pools import AsyncPools

        return AsyncPools(self)

    def open_with(self, pool: Callable[..., ConnectionPool], state: str, ttl: float | None) -> Any:
        """`open`, with the connections that ``pool`` returns; for a cluster, those to a node."""
        raise NotImplementedError

    def pool(self, node: Any = None) -> ConnectionPool:
        """The connections of this process, of a cluster to ``node``."""
        return pool_of(self, node)


@dataclass(frozen=True, repr=False, kw_only=True)
class OneServer(RedisSettings):
    """The parameters that are the same wherever one server holds all of a state.

    ``layout``   "string": a Redis key per record. "hash": one Redis hash with all records. "packed", deprecated: many
                 small hashes. Records in hashes have no ttl
    ``buckets``  with layout=packed: the number of hash shards, one for each 32 to 64 expected keys. Fixed when the
                 state is made, and checked from then on
    ``records``  where storm-redis left the records of a state: the name of its hash, or the prefix of each key, which
                 may be empty. It names the records of one state, so no two states can have it
    """

    db: int = 0
    layout: str = "string"
    buckets: int | None = None
    records: str | None = None

    RECORDS: ClassVar[dict[str, Any]] = {"prefix": "", "layout": "string", "buckets": None, "records": None}
    key_order: ClassVar[KeyOrder] = "hash"

    def open_with(self, pool: Callable[[], ConnectionPool], state: str, ttl: float | None) -> RedisStore:
        """`open`, with the connections of ``pool``."""
        expiry = self.expiry(state, ttl)
        if expiry is not None and self.layout != "string":
            raise ConfigurationError(
                f"layout={self.layout} has no ttl: Redis expires a hash as a whole. Leave out the ttl, or keep the "
                "state with layout=string"
            )
        name = (self.prefix + state if self.records is None else self.records).encode()
        layout, text = self._layout_of(state, name, expiry)
        return RedisStore(Server(self, pool, state), state, name, layout, layout_text=text, commit_domain=self.reached)

    def states(self) -> Iterator[list[tuple[str, bytes]]]:
        """See `ListsStates.states`: SCAN through the whole database. States of every layout.

        Where the URL has ``records``, the one state that has them.
        """
        from mapstate.backends.redis.operations import states_on_server

        return states_on_server(Server(self, self.pool, "*"), self.prefix.encode(), self.records)

    def _layout_of(self, state: str, name: bytes, expiry: bytes | None) -> tuple[Layout, bytes]:
        """The layout of a state's records, and the text by which the state notes it."""
        limit = self.max_value_bytes
        if self.layout != "string":
            from mapstate.backends.redis.hash_layouts import HashLayout, PackedLayout

            if self.buckets is None:
                return HashLayout(state, limit, name), b"hash"
            return PackedLayout(state, limit, name + b":", self.buckets), b"packed, %d buckets" % self.buckets
        if self.records is None:
            return StringLayout(state, limit, name + b":", expiry), b"string"
        return StringLayout(state, limit, name, expiry, reserved=KEY_ENDS), b"string, records at " + name


@dataclass(frozen=True, repr=False, kw_only=True)
class RedisBackend(OneServer):
    """Where a Redis server is and how to reach it.

    ``redis://user:password@host:port/db?prefix=app/&retries=3``, and ``rediss://`` for TLS. The URL's parameters are
    the fields of `RedisSettings`, ``layout``, ``buckets`` and ``records``.
    """

    host: str = "localhost"
    port: int = 6379

    KIND: ClassVar[str] = "server"
