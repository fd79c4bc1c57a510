"""What every Redis backend is told: who logs in, TLS, how long to wait; and how its URL says so."""

from __future__ import annotations

import math
import re
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self
from urllib.parse import parse_qsl, quote, unquote, urlsplit

from redis.backoff import NoBackoff
from redis.credentials import UsernamePasswordCredentialProvider
from redis.retry import Retry

from mapstate.backends import password_in
from mapstate.errors import ConfigurationError

__all__ = ["Address", "RedisSettings", "Url", "shown_address"]

Address = tuple[str, int]
"""Host and port."""

_LONGEST_TTL = 1e10
_PREFIX = re.compile(r"[A-Za-z0-9_./-]*")
_BOOLEANS = {"true": True, "1": True, "false": False, "0": False}
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(?:([^/?#]*)@)?([^/?#@]*)([^?#]*)(?:\?([^#]*))?")
_HOST = re.compile(r"(\[[0-9A-Fa-f:.%]+\]|[^\[\]:,]*)(?::(\d{1,5}))?")


def boolean(text: str) -> bool:
    """True or False. KeyError for anything else."""
    return _BOOLEANS[text.lower()]


class Url(NamedTuple):
    """The pieces of a URL, decoded. ``hosts`` are as many as it names, at least one; `None` is no port."""

    scheme: str
    username: str | None
    password: str | None
    hosts: tuple[tuple[str, int | None], ...]
    path: str
    query: str

    @classmethod
    def read(cls, url: str) -> Url:
        """Raises ValueError, which repeats nothing: what cannot be read may be a piece of a password."""
        found = _URL.fullmatch(url)
        if found is None:
            raise ValueError("not a URL")
        scheme, login, netloc, path, query = found.groups(default="")
        if "@" in path + query:
            raise ValueError("an '@' that is not the end of the login")
        user, colon, password = login.partition(":")
        hosts = []
        for one in netloc.split(","):
            host = _HOST.fullmatch(one)
            if host is None:
                raise ValueError("not a host")
            urlsplit(f"//{host[1]}")  # knows characters that look like others
            hosts.append((host[1].strip("[]").lower(), None if host[2] is None else int(host[2])))
        return cls(
            scheme.lower(),
            unquote(user) or None,
            unquote(password) if colon else None,
            tuple(hosts),
            unquote(path),
            query,
        )


@dataclass(frozen=True, repr=False, kw_only=True)
class RedisSettings:
    """The parameters that are the same for one server, a pair behind sentinels, and a cluster.

    ``password_env``     the environment variable with the password, on each machine that connects; instead of one here
    ``prefix``           in front of every Redis key: letters, digits, ``_ . / -``
    ``socket_timeout``   seconds to wait for a reply; ``socket_connect_timeout`` for a connection
    ``retries``          how often reads, connects and fenced puts are tried again, after growing pauses of up to a
                         second; none begins later than two ``socket_timeout`` after the first
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

    PARAMETERS: ClassVar[Mapping[str, Callable[[str], Any]]] = {
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
        if self.password_env is not None and self.password is not None:
            raise ConfigurationError("there is a password and a password_env: leave one of them out")
        if self.username and self.password is None and self.password_env is None:
            raise ConfigurationError(
                "there is a user but no password: a password alone is written redis://:password@host, and a user "
                "without one redis://user:@host; one in an environment variable is redis://user@host?password_env=NAME"
            )
        if not self.tls and any(name.startswith("ssl_") for name in self._changed()):
            raise ConfigurationError("ssl_ parameters do nothing on redis://; the scheme with TLS is rediss://")

    def _rules(self) -> list[tuple[str, object, str]]:
        """The name of a field, whether it fits, and what is expected of it."""
        seconds = "a number of seconds above 0"
        return [
            ("password_env", self.password_env != "", "the name of an environment variable"),
            ("prefix", _PREFIX.fullmatch(self.prefix), "of letters, digits, '_ . / -' (the first ':' ends it)"),
            ("socket_timeout", 0 < self.socket_timeout < math.inf, seconds),
            ("socket_connect_timeout", 0 < self.socket_connect_timeout < math.inf, seconds),
            ("retries", self.retries >= 0, "from 0 up"),
            ("max_value_bytes", self.max_value_bytes > 0, "from 1 up"),
            ("ssl_cert_reqs", self.ssl_cert_reqs in ("none", "optional", "required"), "none, optional or required"),
        ]

    @classmethod
    def from_url(cls, url: str) -> Self:
        """The backend that a URL names. Raises ConfigurationError.

        What cannot be read is not repeated there: it may be a piece of the password.
        """
        read: tuple[Url, dict[str, Any]] | None = None
        with suppress(ValueError):  # raised below, where it has no context that would hold the URL
            parts = Url.read(url)
            if parts.scheme in cls.SCHEMES:
                read = parts, cls._place(parts)
        if read is None:
            raise ConfigurationError(
                f"this is no URL like {cls.EXAMPLE}?parameter=value, with numbers for port and "
                "db. It is not shown, because it may hold a password; in the password, and wherever there is an '@', "
                "write special characters percent-encoded: urllib.parse.quote(password, safe='')"
            )
        parts, given = read
        for name, text in parse_qsl(parts.query, keep_blank_values=True):
            if name not in cls.PARAMETERS:
                known = ", ".join(cls.PARAMETERS)
                raise ConfigurationError(f"{parts.scheme}:// has no parameter {name!r}; it has {known}")
            try:
                given[name] = cls.PARAMETERS[name](text)
            except (ValueError, KeyError) as error:
                raise ConfigurationError(f"the parameter {name} cannot be {text!r}") from error
        return cls(username=parts.username, password=parts.password, tls=parts.scheme.startswith("rediss"), **given)

    @classmethod
    def _place(cls, url: Url) -> dict[str, Any]:
        """The fields that say where it is. Raises ValueError."""
        raise NotImplementedError

    def __repr__(self) -> str:
        user = quote(self.username or "", safe="")
        user = f"{user}:***@" if self.password is not None else f"{user}@" if user else ""
        query = "&".join(f"{name}={quote(str(value))}" for name, value in self._changed().items())
        return f"{type(self).__name__}('{self._url(user)}{'?' if query else ''}{query}')"

    def __getstate__(self) -> dict[str, Any]:
        """What travels is what was given, and nothing that was worked out from it meanwhile."""
        return {one.name: getattr(self, one.name) for one in fields(self)}

    def _url(self, user: str) -> str:
        """The URL up to its parameters; ``user`` is what stands before the host."""
        raise NotImplementedError

    def _changed(self) -> dict[str, Any]:
        """The parameters that are not at their default."""
        mine = [one for one in fields(self) if one.name in self.PARAMETERS]
        given = {one.name: (getattr(self, one.name), one.default) for one in mine}
        return {name: value for name, (value, default) in given.items() if value != default}

    @property
    def secret(self) -> str | None:
        """The password, wherever it is; what messages must not show. Raises ConfigurationError."""
        return self.password if self.password_env is None else password_in(self.password_env)

    def connection_options(self) -> dict[str, Any]:
        """What redis-py needs for a connection, but for the place. Raises ConfigurationError."""
        options: dict[str, Any] = {
            "socket_timeout": self.socket_timeout,
            "socket_connect_timeout": self.socket_connect_timeout,
            "protocol": 2,  # nothing is pushed between replies
            "retry": Retry(NoBackoff(), 0),  # what the driver sends again by itself is under no WATCH
        }
        if self.username or self.secret:  # as a provider, because some pools show a password in their repr
            options["credential_provider"] = UsernamePasswordCredentialProvider(self.username, self.secret)
        return options

    def tls_options(self) -> dict[str, Any]:
        """The same for TLS; none without."""
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
        """A ttl in milliseconds, as text. Raises ConfigurationError, also for a name that cannot be one here."""
        if ttl is not None and not 0 < ttl <= _LONGEST_TTL:
            raise ConfigurationError(f"ttl is a number of seconds from 0 to {_LONGEST_TTL:.0f}, not {ttl!r}")
        if ":" in state or "!" in state:
            raise ConfigurationError(f"{state!r} cannot name a state in Redis: ':' and '!' end the name there")
        return None if ttl is None else b"%d" % math.ceil(ttl * 1000)


def shown_address(address: Address) -> str:
    """``host:port``."""
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
