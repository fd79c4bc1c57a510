"""Pools of connections, made with the parameters of a backend."""

from __future__ import annotations

import asyncio
import os
import socket
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from redis import exceptions as driver
from redis.backoff import NoBackoff
from redis.credentials import CredentialProvider

from mapstate.backends.redis.problems import SECRETS
from mapstate.errors import ConfigurationError, MissingDriverError
from mapstate.urls import password_of


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
    if password_of(backend) or backend.username or backend.credentials:  # refused here where there is no file
        login["credential_provider"] = Login(backend)  # because some pools show a password in their repr
    connection = module("connection")
    if backend.KIND == "socket":
        kind = connection.UnixDomainSocketConnection
        return connection.ConnectionPool(connection_class=kind, path=backend.path, db=backend.db, **options, **login)
    tls = _tls_options(backend) if backend.tls else {}
    if backend.KIND == "sentinels":
        tls |= {"ssl": True} if backend.tls else {}
        shared = options | tls | (login if backend.sentinel_login else {})
        sentinel = module("sentinel").Sentinel(backend.sentinels, sentinel_kwargs=shared)
        options |= {"db": backend.db, "socket_keepalive": True}
        return module("sentinel").SentinelConnectionPool(backend.master, sentinel, **options, **login, **tls)
    host, port = (backend.host, backend.port) if node is None else node
    options |= {"host": host, "port": port, "socket_keepalive": True} | ({"db": backend.db} if node is None else {})
    kind = connection.SSLConnection if backend.tls else connection.Connection
    return connection.ConnectionPool(connection_class=kind, **options, **login, **tls)


class Login(CredentialProvider):
    """What redis-py asks for user and password for each new connection.

    It closes a connection whose login failed with an error of its own only. So the errors here are of that kind.
    """

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self._provider = _provider_of(backend.credentials, os.getpid()) if backend.credentials else None

    def get_credentials(self) -> Any:
        provider = self._provider
        if provider is None:
            return self._of_backend()
        try:
            return _remembered(provider.get_credentials())
        except Exception as error:  # noqa: BLE001  whatever a provider raises
            raise driver.AuthenticationError(_unknown_login(self._backend.credentials, error)) from None

    async def get_credentials_async(self) -> Any:
        provider = self._provider
        if provider is None:
            return self._of_backend()
        if type(provider).get_credentials_async is CredentialProvider.get_credentials_async:
            return await asyncio.to_thread(self.get_credentials)
        try:
            return _remembered(await provider.get_credentials_async())
        except Exception as error:  # noqa: BLE001  whatever a provider raises
            raise driver.AuthenticationError(_unknown_login(self._backend.credentials, error)) from None

    def _of_backend(self) -> tuple[str, ...]:
        try:
            password = password_of(self._backend) or ""
        except ConfigurationError as error:
            raise driver.AuthenticationError(str(error)) from None
        user = self._backend.username
        return _remembered((user, password) if user else (password,))


def _remembered(login: Any) -> tuple[str, ...]:
    """User and password, or a password alone, which is among `SECRETS` from now on. Raises TypeError."""
    if (
        not isinstance(login, tuple | list)
        or not 1 <= len(login) <= 2
        or not all(isinstance(part, str) for part in login)
    ):
        raise TypeError
    if login[-1] and login[-1] not in SECRETS:
        SECRETS.append(login[-1])
    return tuple(login)


@cache
def _provider_of(credentials: str, _pid: int) -> CredentialProvider:
    """What the factory returns, once in each process. Raises ConfigurationError."""
    module, _, factory = credentials.partition(":")
    try:
        provider = getattr(import_module(module), factory)()
    except (ConfigurationError, MissingDriverError):
        raise
    except Exception as error:  # noqa: BLE001  whatever a factory raises
        raise ConfigurationError(_unknown_login(credentials, error)) from None
    if not isinstance(provider, CredentialProvider):
        kind = type(provider).__name__
        raise ConfigurationError(f"credentials={credentials} returned a {kind}, which is no redis.CredentialProvider")
    return provider


def _unknown_login(credentials: str, error: Exception) -> str:
    """The message where a factory or its provider failed. The error's own text may hold a secret."""
    module, _, factory = credentials.partition(":")
    return (
        f"credentials={credentials} gave no user and password on {socket.gethostname()}: {type(error).__name__}, whose "
        "text is not shown because it may hold a secret. The driver, each executor and each reader need the module. To "
        f"see the error there: python -c 'import {module}; {module}.{factory}().get_credentials()'. "
        "See docs/operating.md#passwords"
    )


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
