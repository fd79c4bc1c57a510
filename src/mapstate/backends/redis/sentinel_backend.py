"""The backend for a Redis primary with replicas, found by sentinels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from mapstate.backends.redis.backend import OneServer
from mapstate.backends.redis.connection import driver_module
from mapstate.urls import Address


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

    KIND: ClassVar[str] = "sentinels"

    def new_pool(self, node: Any = None, *, asynchronous: bool = False) -> Any:  # noqa: ARG002
        driver = driver_module("sentinel", asynchronous=asynchronous)
        options = self.connection_options(asynchronous=asynchronous)
        tls = {"ssl": True, **self.tls_options()} if self.tls else {}
        plain = {name: value for name, value in options.items() if name != "credential_provider"}
        sentinel = driver.Sentinel(self.sentinels, sentinel_kwargs=(options if self.sentinel_login else plain) | tls)
        pool = driver.SentinelConnectionPool
        return pool(self.master, sentinel, db=self.db, socket_keepalive=True, **options, **tls)
