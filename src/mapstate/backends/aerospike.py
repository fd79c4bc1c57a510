r"""Aerospike: a cluster named by ``aerospike://host:3000/namespace/set``.

A state lives in a set of its own, by default of its own name, readable by any client::

    user-42     a record: in one bin a list, [val, txid], [curr, prev, txid] or, non-transactional, [val]
    \ledger     the ledger, a blob
    \reports    the last batch reports, a list of blobs

and its claims, each a record with a ttl, in the set ``mapstate.claims``. docs/aerospike.md has the layout and what
has to be configured.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any
from urllib.parse import parse_qsl, quote, unquote, urlsplit

import aerospike

from mapstate.backends import password_in
from mapstate.backends.aerospike_store import CLAIMS, AerospikeStore
from mapstate.errors import ConfigurationError

__all__ = ["AerospikeBackend"]

_LONGEST_TTL = 10 * 365 * 86_400
_NAMESPACE = re.compile(r"[A-Za-z0-9_-]{1,31}")
_SET = re.compile(r"[A-Za-z0-9_.-]{1,63}")
_BIN = re.compile(r"[A-Za-z0-9_-]{1,15}")
_PARAMETERS: dict[str, Callable[[str], Any]] = {
    "bin": str,
    "batch_size": int,
    "timeout": float,
    "connect_timeout": float,
    "retries": int,
    "claim_ttl": int,
    "use_services_alternate": lambda text: {"true": True, "1": True, "false": False, "0": False}[text.lower()],
    "tls_name": str,
    "tls_cafile": str,
    "tls_certfile": str,
    "tls_keyfile": str,
    "password_env": str,
}


@dataclass(frozen=True, repr=False)
class AerospikeBackend:
    """Where an Aerospike cluster is, how to reach it, and the set of the state.

    ``aerospike://user:password@host:3000,other:3000/namespace/set?batch_size=250``. Without a set it is the state's
    name. A set holds one state. The URL's parameters are the fields from ``bin`` on.

    ``bin``              of the records, up to 15 letters, digits, ``_ -``
    ``batch_size``       records per request
    ``timeout``          seconds for a request with the client's own repetitions; ``connect_timeout`` for a node
    ``retries``          how often reads, puts and claims are tried again, after growing pauses, where the cluster is
                         busy; none begins later than two ``timeout`` after the first
    ``claim_ttl``        seconds that a claim is kept, longer than any attempt lasts; 0 is for ever
    ``use_services_alternate``  the addresses that the servers have for clients outside their network
    ``tls_...``          with ``tls_cafile`` connections are TLS; file names are those of the machine that connects
    ``password_env``     the environment variable with the password, on each machine that connects; instead of one here
    """

    hosts: tuple[tuple[str, int], ...]
    namespace: str
    set: str | None = None
    username: str | None = None
    password: str | None = None
    bin: str = "record"
    batch_size: int = 250
    timeout: float = 10.0
    connect_timeout: float = 5.0
    retries: int = 3
    claim_ttl: int = 86_400
    use_services_alternate: bool = False
    tls_name: str | None = None
    tls_cafile: str | None = None
    tls_certfile: str | None = None
    tls_keyfile: str | None = None
    password_env: str | None = None

    shared_between_processes = True
    native_records = True

    def __post_init__(self) -> None:
        for name, fits, expected in (
            ("hosts", all(host and 0 < port < 2**16 for host, port in self.hosts) and self.hosts, "host:port, ..."),
            ("namespace", _NAMESPACE.fullmatch(self.namespace), "of 1 to 31 letters, digits, '_ -'"),
            ("set", self.set is None or _SET.fullmatch(self.set), "of 1 to 63 letters, digits, '_ . -'"),
            ("password_env", self.password_env != "", "the name of an environment variable"),
            ("bin", _BIN.fullmatch(self.bin), "of 1 to 15 letters, digits, '_ -'"),
            ("batch_size", 1 <= self.batch_size <= 5000, "from 1 to 5000"),
            ("timeout", 0 < self.timeout < 2**20, "a number of seconds above 0"),
            ("connect_timeout", 0 < self.connect_timeout < 2**20, "a number of seconds above 0"),
            ("retries", self.retries >= 0, "from 0 up"),
            ("claim_ttl", 0 <= self.claim_ttl <= _LONGEST_TTL, f"from 0 to {_LONGEST_TTL} seconds"),
        ):
            if not fits:
                raise ConfigurationError(f"{name} is {expected}, not {getattr(self, name)!r}")
        if self.password_env is not None and self.password is not None:
            raise ConfigurationError("there is a password and a password_env: leave one of them out")
        if (self.username is None) != (self.password is None and self.password_env is None):
            raise ConfigurationError(
                "a user and a password go together: aerospike://user:password@host:3000/namespace, or "
                "aerospike://user@host:3000/namespace?password_env=NAME"
            )
        if self.tls_cafile is None and (self.tls_name or self.tls_certfile or self.tls_keyfile):
            raise ConfigurationError("tls_ parameters do nothing without tls_cafile")

    @classmethod
    def from_url(cls, url: str) -> AerospikeBackend:
        """The backend that a URL names. Raises ConfigurationError.

        What cannot be read is not repeated there: it may be a piece of the password.
        """
        try:
            parts = urlsplit(url)
            user, at, places = parts.netloc.rpartition("@")
            split = [urlsplit(f"//{place}") for place in places.split(",")]
            hosts = tuple((one.hostname or "", one.port or 3000) for one in split)
        except ValueError:
            parts, user, at, hosts = urlsplit(""), "", "", ()
        name, colon, password = user.partition(":")
        namespace, _, name_of_set = parts.path.strip("/").partition("/")
        if parts.scheme != "aerospike" or not namespace or parts.fragment or "@" in parts.path + parts.query:
            raise ConfigurationError(
                "this is no URL like aerospike://user:password@host:3000,other:3000/namespace/set?parameter=value. It "
                "is not shown, because it may hold a password; in the password, and wherever there is an '@', write "
                "special characters percent-encoded: urllib.parse.quote(password, safe='')"
            )
        given: dict[str, Any] = {}
        for parameter, text in parse_qsl(parts.query, keep_blank_values=True):
            if parameter not in _PARAMETERS:
                raise ConfigurationError(
                    f"aerospike:// has no parameter {parameter!r}; it has {', '.join(_PARAMETERS)}"
                )
            try:
                given[parameter] = _PARAMETERS[parameter](text)
            except (ValueError, KeyError) as error:
                raise ConfigurationError(f"the parameter {parameter} cannot be {text!r}") from error
        return cls(
            hosts,
            namespace,
            name_of_set or None,
            username=unquote(name) if at else None,
            password=unquote(password) if at and (colon or "password_env" not in given) else None,
            **given,
        )

    def __repr__(self) -> str:
        user = "" if self.username is None else quote(self.username, safe="") + ("@" if self.password_env else ":***@")
        default = {one.name: one.default for one in fields(self)}
        changed = [(name, getattr(self, name)) for name in _PARAMETERS if getattr(self, name) != default[name]]
        query = "&".join(f"{name}={quote(str(value))}" for name, value in changed)
        return f"AerospikeBackend('aerospike://{user}{self.address}{'?' if query else ''}{query}')"

    @property
    def address(self) -> str:
        """Hosts, namespace and set, for messages."""
        hosts = ",".join(f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in self.hosts)
        return f"{hosts}/{self.namespace}{'/' if self.set else ''}{self.set or ''}"

    def open(self, state: str, *, ttl: float | None = None) -> AerospikeStore:
        """See `Backend.open`. Makes no connection."""
        if ttl is not None and not 0 < ttl <= _LONGEST_TTL:
            raise ConfigurationError(f"ttl is a number of seconds from 0 to {_LONGEST_TTL}, not {ttl!r}")
        name = self.set or state
        if not _SET.fullmatch(name) or name == CLAIMS:
            raise ConfigurationError(f"{name!r} cannot name a set of Aerospike: give the URL one, /namespace/set")
        return AerospikeStore(self, state, name, ttl)

    def client(self) -> Any:
        """The client of this process, made and connected at first use: one does not survive a fork.

        A client that a fork inherited is neither used nor let go: closing it would wait for threads that are
        not there.
        """
        place = (os.getpid(), self)
        found = _clients.get(place)
        if found is None:
            made = self.connect()
            found = _clients.setdefault(place, made)
            if found is not made:  # another thread was faster
                made.close()
        return found

    def connect(self) -> Any:
        """A new client, connected. What a stand-in for it replaces."""
        return aerospike.client(self.config())

    def config(self) -> dict[str, Any]:
        """What the client is made with. Names that it does not know are refused, and not passed over."""
        config: dict[str, Any] = {
            "hosts": [(host, port, self.tls_name) if self.tls_name else (host, port) for host, port in self.hosts],
            "validate_keys": True,
            "connect_timeout": int(self.connect_timeout * 1000),
            "use_services_alternate": self.use_services_alternate,
            "send_bool_as": aerospike.AS_BOOL,
        }
        if self.username is not None:
            password = self.password if self.password_env is None else password_in(self.password_env)
            config |= {"user": self.username, "password": password}
        if self.tls_cafile is not None:
            files = {"cafile": self.tls_cafile, "certfile": self.tls_certfile, "keyfile": self.tls_keyfile}
            config["tls"] = {"enable": True} | {name: file for name, file in files.items() if file is not None}
        return config


_clients: dict[tuple[int, AerospikeBackend], Any] = {}
