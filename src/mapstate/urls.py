"""The URL of a store: its parts, its typed parameters, its password, and how all of it is shown without the password.

``scheme://user:password@host:port,host2:port/path?name=value``. No message repeats a URL that cannot be read: any
piece of it may be a piece of the password.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, quote, unquote, urlsplit

from mapstate.errors import ConfigurationError, check_names, shown

Address = tuple[str, int]
"""Host and port."""

Parameters = Mapping[str, Callable[[str], Any]]
"""The parameters that a scheme has: for each name, what makes its value of the text. It raises ValueError."""

LIKE_A_URL = re.compile(r":/|:.*@", re.DOTALL)
"""Text that may be a store's URL, perhaps misspelt: no message repeats it, because it may hold a password."""

_BOOLEANS = {"true": True, "1": True, "false": False, "0": False}
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(?:([^/?#]*)@)?([^/?#@]*)([^?#]*)(?:\?([^#]*))?")
_NUMBER = re.compile(r"[0-9A-Za-z.+-]*")  # Python also reads 1_0, digits of any script, and blanks around them
_HOST = re.compile(r"(\[[0-9A-Fa-f:.%]+\]|[^\[\]:,]*)(?::([0-9]{1,5}))?")


class Url(NamedTuple):
    """The parts of a URL, decoded but for ``query``; None for a user, password or port that it does not have."""

    scheme: str
    username: str | None
    password: str | None
    hosts: tuple[tuple[str, int | None], ...]
    path: str
    query: str

    @classmethod
    def read(cls, url: str) -> Url:
        """Raises ValueError, which repeats nothing of the URL."""
        parts = _URL.fullmatch(url)
        if parts is None:
            raise ValueError("not a URL")
        scheme, login, netloc, path, query = parts.groups()
        if "@" in path + (query or ""):
            raise ValueError("an '@' that is not the end of the login")
        user, colon, password = (login or "").partition(":")
        hosts = []
        for part in netloc.split(","):
            host = _HOST.fullmatch(part)
            if host is None:
                raise ValueError("not a host")
            urlsplit(f"//{host[1]}")  # refuses characters that normalize to a delimiter
            hosts.append((host[1].strip("[]").lower(), None if host[2] is None else int(host[2])))
        username = None if login is None else unquote(user)
        secret = unquote(password) if colon else None
        return cls(scheme.lower(), username, secret, tuple(hosts), unquote(path), query or "")


def unreadable(example: str, more: str = "") -> ConfigurationError:
    """The error for a URL that cannot be read. ``example`` is one that can, ``more`` what else it needs."""
    return ConfigurationError(
        f"this is no URL like {example}?parameter=value{more}. It is not shown, because it may hold a password. In the "
        "password, and wherever there is an '@', write special characters percent-encoded: "
        "urllib.parse.quote(password, safe='')"
    )


def boolean(text: str) -> bool:
    """The value of a parameter that is true, 1, false or 0. Raises ValueError."""
    value = _BOOLEANS.get(text.lower())
    if value is None:
        raise ValueError("neither true nor false")
    return value


def _parsed(kind: Callable[[str], Any], text: str) -> Any:
    if kind in (int, float) and not _NUMBER.fullmatch(text):
        raise ValueError("no number as URLs have them")
    return kind(text)


_CONVERT: Parameters = {"str": str, "int": int, "float": float, "bool": boolean}


def parameters_of(kind: Any, without: Collection[str]) -> Parameters:
    """The parameters of a backend's URL: its fields, but for those that the URL has elsewhere."""
    return {part.name: _CONVERT[part.type.removesuffix(" | None")] for part in fields(kind) if part.name not in without}


def parameters_in(scheme: str, query: str, known: Parameters) -> dict[str, Any]:
    """The parameters of a URL, each of its type. Raises ConfigurationError, also for one that is given twice."""
    pairs = parse_qsl(query, keep_blank_values=True)
    given = dict(pairs)
    if not given.keys() <= known.keys():
        check_names(f"{scheme}:// has no parameter", given, known)
    if len(given) < len(pairs):
        names = [name for name, _ in pairs]
        raise ConfigurationError(f"the parameter {max(names, key=names.count)} is given twice: leave one of them out")
    values: dict[str, Any] = {}
    for name, text in given.items():
        try:
            values[name] = _parsed(known[name], text)
        except ValueError as error:
            raise ConfigurationError(f"the parameter {name} cannot be {shown(text)}") from error
    return values


def shown_parameters(backend: Any, known: Parameters) -> str:
    """A backend's parameters that are not at their default, as the end of a URL with its question mark; or nothing."""
    given = [(field.name, getattr(backend, field.name)) for field in fields(backend) if field.name in known]
    defaults = {field.name: field.default for field in fields(backend)}
    query = "&".join(f"{name}={quote(str(value))}" for name, value in given if value != defaults[name])
    return f"?{query}" if query else ""


def shown_address(address: Address) -> str:
    """``host:port``, as a URL has it."""
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def shown_login(username: str | None, password: str | None) -> str:
    """The login in front of a URL's host, its ``@`` included, with the password masked; empty where there is none."""
    user = quote(username or "", safe="")
    return f"{user}:***@" if password is not None else f"{user}@" if user else ""


def check_password(backend: Any) -> None:
    """Raises ConfigurationError unless the password of a backend comes from one place at most."""
    places = ("password", "password_env", "password_file", "credentials")
    given = [name for name in places if getattr(backend, name, None) is not None]
    if len(given) > 1:
        raise ConfigurationError(f"there is a {given[0]} and a {given[1]}: leave one of them out")


def password_of(backend: Any) -> str | None:
    """The password of a backend on this machine: its own, or what its variable or its file holds now.

    Called where a store connects: a pickled backend, and a log of it, holds the name only. Raises ConfigurationError.
    """
    if backend.password_file is not None:
        return _password_in_file(backend.password_file)
    if backend.password_env is None:
        return backend.password  # type: ignore[no-any-return]
    variable = backend.password_env
    password = os.environ.get(variable)
    if password:
        return password
    trouble = "not set" if password is None else "empty"
    raise ConfigurationError(
        f"password_env names the environment variable {variable}, which is {trouble} "
        f"on {socket.gethostname()}. Nothing was written from there. Set it for the driver and for every executor. "
        "See docs/operating.md#passwords",
        variable=variable,
    )


def _password_in_file(name: str) -> str:
    try:
        password, trouble = Path(name).read_text(encoding="utf-8-sig").rstrip("\r\n"), "it is empty"
    except (OSError, UnicodeError) as error:
        password, trouble = "", "it is no UTF-8" if isinstance(error, UnicodeError) else str(error.strerror)
    if password:
        return password
    raise ConfigurationError(
        f"password_file names the file {name!r}, which gives no password on {socket.gethostname()}: {trouble}. Each "
        "machine that connects needs it. See docs/operating.md#passwords"
    )


def quoted(text: str) -> str:
    """The text for a message, unless it may be a URL."""
    return "a URL, which is not shown" if LIKE_A_URL.search(text) else repr(text)
