"""The parameters of every Redis backend: login, TLS, timeouts, retries; and the URL that gives them."""

from __future__ import annotations

import math
import re
import socket
from contextlib import suppress
from dataclasses import dataclass, fields
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, Self

from redis.backoff import NoBackoff
from redis.credentials import UsernamePasswordCredentialProvider

from mapstate.errors import ConfigurationError
from mapstate.urls import (
    Parameters,
    Url,
    boolean,
    check_password,
    parameters_in,
    secret_of,
    shown_login,
    shown_parameters,
    unreadable,
)

_LONGEST_TTL = 1e10
_SHORTEST, _LONGEST = 0.001, 86_400  # seconds that a socket waits
_MOST = 2**31 - 1
_PREFIX = re.compile(r"[A-Za-z0-9_./-]*")


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
    password_env: str | None = None
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

    PARAMETERS: ClassVar[Parameters] = {
        "prefix": str,
        "socket_timeout": float,
        "socket_connect_timeout": float,
        "retries": int,
        "max_value_bytes": int,
        "ssl_ca_certs": str,
        "ssl_certfile": str,
        "ssl_keyfile": str,
        "ssl_cert_reqs": str,
        "ssl_check_hostname": boolean,
        "password_env": str,
    }
    EXAMPLE: ClassVar[str] = ""
    SCHEMES: ClassVar[tuple[str, ...]] = ()
    shared_between_processes: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for name, fits, expected in self._rules():
            if not fits:
                raise ConfigurationError(f"{name} is {expected}, not {getattr(self, name)!r}")
        check_password(self.password, self.password_env)
        if self.username and self.password is None and self.password_env is None:
            raise ConfigurationError(
                "there is a user but no password: a password alone is written redis://:password@host, and a user "
                "without one redis://user:@host; one in an environment variable is redis://user@host?password_env=NAME"
            )
        if not self.tls and any(name.startswith("ssl_") for name in self._changed()):
            raise ConfigurationError("ssl_ parameters do nothing on redis://; the scheme with TLS is rediss://")

    def _rules(self) -> list[tuple[str, object, str]]:
        """The name of a field, whether it fits, and what is expected of it."""
        seconds = f"a number of seconds from {_SHORTEST} to {_LONGEST}"
        return [
            ("password_env", self.password_env != "", "the name of an environment variable"),
            ("prefix", _PREFIX.fullmatch(self.prefix), "of letters, digits, '_ . / -' (the first ':' ends it)"),
            ("socket_timeout", _SHORTEST <= self.socket_timeout <= _LONGEST, seconds),
            ("socket_connect_timeout", _SHORTEST <= self.socket_connect_timeout <= _LONGEST, seconds),
            ("retries", 0 <= self.retries <= _MOST, f"from 0 to {_MOST}"),
            ("max_value_bytes", 1 <= self.max_value_bytes <= _MOST, f"from 1 to {_MOST}"),
            ("ssl_cert_reqs", self.ssl_cert_reqs in ("none", "optional", "required"), "none, optional or required"),
        ]

    @classmethod
    def from_url(cls, url: str) -> Self:
        """The backend that a URL names. Raises ConfigurationError, which does not repeat a URL that cannot be read."""
        read: tuple[Url, dict[str, Any]] | None = None
        with suppress(ValueError):  # raised below, where the error has no context that holds the URL
            parts = Url.read(url)
            if parts.scheme in cls.SCHEMES:
                read = parts, cls._place(parts)
        if read is None:
            raise unreadable(cls.EXAMPLE, ", with numbers for port and db")
        parts, given = read
        given |= parameters_in(parts.scheme, parts.query, cls.PARAMETERS)
        tls = parts.scheme.startswith("rediss")
        return cls(username=parts.username or None, password=parts.password, tls=tls, **given)

    @classmethod
    def _place(cls, url: Url) -> dict[str, Any]:
        """The fields for the address in a URL. Raises ValueError."""
        raise NotImplementedError

    def __repr__(self) -> str:
        url = self._url(shown_login(self.username, self.password))
        return f"{type(self).__name__}('{url}{shown_parameters(self._changed())}')"

    def __getstate__(self) -> dict[str, Any]:
        """Pickle the fields only, without what cached properties hold."""
        return {one.name: getattr(self, one.name) for one in fields(self)}

    def _url(self, user: str) -> str:
        """The URL up to its parameters; ``user`` is the login in front of the host."""
        raise NotImplementedError

    def _changed(self) -> dict[str, Any]:
        """The parameters that are not at their default."""
        mine = [one for one in fields(self) if one.name in self.PARAMETERS]
        given = {one.name: (getattr(self, one.name), one.default) for one in mine}
        return {name: value for name, (value, default) in given.items() if value != default}

    @property
    def secret(self) -> str | None:
        """The password, which messages must not show. Raises ConfigurationError."""
        return secret_of(self.password, self.password_env)

    def connection_options(self, *, asynchronous: bool = False) -> dict[str, Any]:
        """Options of redis-py for a connection, without the address. Raises ConfigurationError."""
        retry = driver_module("retry", asynchronous=asynchronous).Retry
        options: dict[str, Any] = {
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
        options = {name: getattr(self, name) for name in self.PARAMETERS if name.startswith("ssl_")}
        options["ssl_check_hostname"] &= self.ssl_cert_reqs != "none"
        for name in ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile"):
            if options[name] is not None and not Path(options[name]).is_file():
                raise ConfigurationError(
                    f"{name}: there is no file {options[name]!r} on {socket.gethostname()}; each machine that "
                    "connects needs it"
                )
        return options

    def expiry(self, state: str, ttl: float | None) -> bytes | None:
        """A ttl in milliseconds, as text. Raises ConfigurationError, also for a name that Redis keys cannot hold."""
        if ttl is not None and not 0 < ttl <= _LONGEST_TTL:
            raise ConfigurationError(f"ttl is a number of seconds from 0 to {_LONGEST_TTL:.0f}, not {ttl!r}")
        if ":" in state or "!" in state:
            raise ConfigurationError(f"{state!r} cannot name a state in Redis: ':' and '!' end the name there")
        return None if ttl is None else b"%d" % math.ceil(ttl * 1000)


def driver_module(name: str, *, asynchronous: bool) -> Any:
    """A module of redis-py, or its twin of ``redis.asyncio``, which only an async reader imports."""
    return import_module(f"redis.asyncio.{name}" if asynchronous else f"redis.{name}")
