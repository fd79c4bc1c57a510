"""The backend for a Redis server on this machine, behind a socket."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar
from urllib.parse import quote

from mapstate.backends.redis.backend import OneServer
from mapstate.backends.redis.connection import MOST_CONNECTIONS
from mapstate.backends.redis.settings import driver_module
from mapstate.urls import Parameters, Url


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

    def new_pool(self, *, asynchronous: bool = False) -> Any:
        driver = driver_module("connection", asynchronous=asynchronous)
        return driver.ConnectionPool(
            connection_class=driver.UnixDomainSocketConnection,
            max_connections=MOST_CONNECTIONS,
            path=self.path,
            db=self.db,
            **self.connection_options(asynchronous=asynchronous),
        )
