"""Pools of connections, made with the parameters of a backend."""

from __future__ import annotations

import socket
from importlib import import_module
from pathlib import Path
from typing import Any

from redis.backoff import NoBackoff
from redis.credentials import UsernamePasswordCredentialProvider

from mapstate.errors import ConfigurationError


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
