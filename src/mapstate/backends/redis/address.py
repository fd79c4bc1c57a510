"""The URLs of the Redis backends: read, checked and shown. No batch runs any of this."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import fields
from functools import cache
from typing import Any, NamedTuple
from urllib.parse import quote

from mapstate import urls
from mapstate.errors import ConfigurationError
from mapstate.urls import Parameters, Url, shown_address

_SHORTEST, _LONGEST = 0.001, 86_400  # seconds that a socket waits
_MOST = 2**31 - 1
MOST_HASHES = 10**9
MOST_SLOT_GROUPS = 1024
_PREFIX = re.compile(r"[A-Za-z0-9_./-]*")
_FACTORY = re.compile(r"\w+(\.\w+)*:\w+")
_LOGIN = {"username", "password", "tls"}


class Place(NamedTuple):
    """What differs between the kinds of address.

    ``given``    the fields that the URL gives in front of its parameters
    ``read``     returns them; raises ValueError
    ``address``  a backend's address for messages; ``shown`` the path of its URL, and where that is not the address, too
    """

    schemes: tuple[str, ...]
    example: str
    given: set[str]
    read: Callable[[Url], dict[str, Any]]
    address: Callable[[Any], str]
    shown: Callable[[Any], str]


def _number(text: str) -> int:
    if not re.fullmatch("[0-9]*", text):  # int() also reads 1_0, and digits of any script
        raise ValueError("no number of a database")
    return int(text or 0)


def _read_server(url: Url) -> dict[str, Any]:
    ((host, port),) = url.hosts
    return {
        "host": host or "localhost",
        "port": 6379 if port is None else port,
        "db": _number(url.path.strip("/")),
    }


def _read_socket(url: Url) -> dict[str, Any]:
    if url.hosts != (("", None),):
        raise ValueError("a host")
    return {"path": url.path}


def _read_sentinels(url: Url) -> dict[str, Any]:
    master, _, db = url.path.strip("/").partition("/")
    hosts = tuple((host, 26379 if port is None else port) for host, port in url.hosts)
    return {"sentinels": hosts, "master": master, "db": _number(db)}


def _read_cluster(url: Url) -> dict[str, Any]:
    if url.path.strip("/") not in ("", "0"):
        raise ValueError("a cluster has database 0 only")
    return {"nodes": tuple((host or "localhost", 6379 if port is None else port) for host, port in url.hosts)}


def _hosts(addresses: Any) -> str:
    return ",".join(map(shown_address, addresses))


PLACES = {
    "server": Place(
        ("redis", "rediss"),
        "redis://user:password@host:port/db",
        {"host", "port", "db"},
        _read_server,
        lambda node: shown_address((node.host, node.port)),
        lambda node: f"{node.address}/{node.db}",
    ),
    "socket": Place(
        ("unix", "redis+unix"),
        "unix://user:password@/path/to/redis.sock",
        {"path"},
        _read_socket,
        lambda socket: socket.path,
        lambda socket: quote(socket.path),
    ),
    "sentinels": Place(
        ("redis+sentinel", "rediss+sentinel"),
        "redis+sentinel://user:password@host:26379,host2:26379/mymaster/db",
        {"sentinels", "master", "db"},
        _read_sentinels,
        lambda group: f"{group.master} (sentinels {_hosts(group.sentinels)})",
        lambda group: f"{_hosts(group.sentinels)}/{quote(group.master)}/{group.db}",
    ),
    "cluster": Place(
        ("redis+cluster", "rediss+cluster"),
        "redis+cluster://user:password@host:port,host2:port",
        {"nodes"},
        _read_cluster,
        lambda cluster: _hosts(cluster.nodes),
        lambda cluster: cluster.address,
    ),
}
"""By `RedisSettings.KIND`."""


@cache
def parameters_of(kind: Any) -> Parameters:
    """The parameters of a backend's URL: its fields, but for login and address."""
    return urls.parameters_of(kind, _LOGIN | PLACES[kind.KIND].given)


def fields_in(kind: Any, url: str) -> dict[str, Any]:
    """The fields that a URL gives to a backend. Raises ConfigurationError, as of `RedisSettings.from_url`."""
    place = PLACES[kind.KIND]
    read: tuple[Url, dict[str, Any]] | None = None
    with suppress(ValueError):  # raised below, where the error has no context that holds the URL
        parts = Url.read(url)
        if parts.scheme in place.schemes:
            read = parts, place.read(parts)
    if read is None:
        raise urls.unreadable(place.example, ", with numbers for port and db")
    parts, given = read
    given |= urls.parameters_in(parts.scheme, parts.query, parameters_of(kind))
    tls = parts.scheme.startswith("rediss")
    return {"username": parts.username or None, "password": parts.password, "tls": tls, **given}


def shown(one: Any) -> str:
    """The URL of a backend, with the password masked."""
    place = PLACES[one.KIND]
    login = urls.shown_login(one.username, one.password)
    parameters = urls.shown_parameters(one, parameters_of(one.__class__))
    return f"{place.schemes[one.tls]}://{login}{place.shown(one)}{parameters}"


def check(one: Any) -> None:
    """Raises ConfigurationError for a field of a backend that does not fit."""
    for name, fits, expected in _rules(one):
        if not fits:
            raise ConfigurationError(f"{name} is {expected}, not {getattr(one, name)!r}")
    urls.check_password(one)
    elsewhere = (one.password_env, one.password_file, one.credentials)
    if one.username and one.password is None and not any(elsewhere):
        raise ConfigurationError(
            "there is a user but no password: a password alone is written redis://:password@host, and a user "
            "without one redis://user:@host; one in an environment variable is redis://user@host?password_env=NAME"
        )
    ssl = [field for field in fields(one) if field.name.startswith("ssl_")]
    if not one.tls and any(getattr(one, field.name) != field.default for field in ssl):
        raise ConfigurationError("ssl_ parameters do nothing on redis://; the scheme with TLS is rediss://")


def _rules(url: Any) -> Iterator[tuple[str, object, str]]:
    """The name of a field, whether it fits, and what is expected of it."""
    seconds = f"a number of seconds from {_SHORTEST} to {_LONGEST}"
    yield "password_env", url.password_env != "", "the name of an environment variable"
    yield "password_file", url.password_file != "", "the name of a file"
    yield "credentials", url.credentials is None or _FACTORY.fullmatch(url.credentials), "module:factory"
    yield "username", not (url.username and url.credentials), "what credentials gives, too: leave it out of the URL"
    yield "prefix", _PREFIX.fullmatch(url.prefix), "of letters, digits, '_ . / -' (the first ':' ends it)"
    yield "socket_timeout", _SHORTEST <= url.socket_timeout <= _LONGEST, seconds
    yield "socket_connect_timeout", _SHORTEST <= url.socket_connect_timeout <= _LONGEST, seconds
    yield "retries", 0 <= url.retries <= _MOST, f"from 0 to {_MOST}"
    yield "max_value_bytes", 1 <= url.max_value_bytes <= _MOST, f"from 1 to {_MOST}"
    yield "ssl_cert_reqs", url.ssl_cert_reqs in ("none", "optional", "required"), "none, optional or required"
    if url.KIND == "cluster":
        yield "nodes", _are_hosts(url.nodes), "one or more hosts, with ports from 1 to 65535"
        yield "buckets", 0 < url.buckets <= MOST_SLOT_GROUPS, f"from 1 to {MOST_SLOT_GROUPS}"
        return
    whole, packed = url.records is None or not url.prefix, url.layout == "packed"
    yield "db", 0 <= url.db <= MOST_HASHES, f"from 0 to {MOST_HASHES}"
    yield "layout", url.layout in ("string", "hash", "packed"), "string, hash or packed"
    yield "buckets", packed == (url.buckets is not None), "given with layout=packed, and only there"
    yield "buckets", url.buckets is None or 0 < url.buckets <= MOST_HASHES, f"from 1 to {MOST_HASHES}"
    yield "records", whole, "a whole name, without a prefix"
    yield "records", url.records is None or not packed, "for the layouts of storm-redis, string and hash"
    yield "records", url.layout == "string" or url.records != "", "the name of a hash where layout is hash"
    if url.KIND == "server":
        yield "port", 0 < url.port < 2**16, "from 1 to 65535"
    elif url.KIND == "socket":
        absolute = url.path.startswith("/") and len(url.path) > 1
        yield "tls", not url.tls, "for an address: behind a socket there is none"
        yield "path", absolute, "a whole one, from / on: unix:///run/redis.sock"
    else:
        yield "sentinels", _are_hosts(url.sentinels), "one or more hosts, with ports from 1 to 65535"
        yield "master", url.master, "the name by which the sentinels know the primary: .../mymaster/0"


def _are_hosts(addresses: Any) -> bool:
    return bool(addresses) and all(host and 0 < port < 2**16 for host, port in addresses)
