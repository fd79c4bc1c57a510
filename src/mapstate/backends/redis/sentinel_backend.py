"""The backend for a Redis primary with replicas, found by sentinels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar
from urllib.parse import quote

from mapstate.backends.redis.backend import OneServer
from mapstate.backends.redis.connection import MOST_CONNECTIONS
from mapstate.backends.redis.settings import driver_module
from mapstate.urls import Address, Parameters, Url, boolean, shown_address


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

    def new_pool(self, *, asynchronous: bool = False) -> Any:
        driver = driver_module("sentinel", asynchronous=asynchronous)
        options = self.connection_options(asynchronous=asynchronous)
        tls = {"ssl": True, **self.tls_options()} if self.tls else {}
        plain = {name: value for name, value in options.items() if name != "credential_provider"}
        sentinel = driver.Sentinel(self.sentinels, sentinel_kwargs=(options if self.sentinel_login else plain) | tls)
        return driver.SentinelConnectionPool(
            self.master,
            sentinel,
            max_connections=MOST_CONNECTIONS,
            db=self.db,
            socket_keepalive=True,
            **options,
            **tls,
        )
