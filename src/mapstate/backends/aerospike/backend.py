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
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import aerospike

from mapstate import urls
from mapstate.backends.aerospike.connection import Connection
from mapstate.backends.aerospike.records import CLAIMS, Records
from mapstate.backends.aerospike.store import AerospikeStore
from mapstate.errors import ConfigurationError
from mapstate.urls import Address, Url

_LONGEST_TTL = 10 * 365 * 86_400
_NAMESPACE = re.compile(r"[A-Za-z0-9_-]{1,31}")
_SET = re.compile(r"[A-Za-z0-9_.-]{1,63}")
_BIN = re.compile(r"[A-Za-z0-9_-]{1,15}")
_EXAMPLE = "aerospike://user:password@host:3000,other:3000/namespace/set"


@dataclass(frozen=True, repr=False)
class AerospikeBackend:
    """Where an Aerospike cluster is, how to reach it, and the set of the state.

    ``aerospike://user:password@host:3000,other:3000/namespace/set?batch_size=250``. Without a set, the state's name is
    that of its set. A set holds one state. The URL's parameters are the fields from ``bin`` on.

    ``bin``              of the records, up to 15 letters, digits, ``_ -``
    ``batch_size``       records per request
    ``timeout``          seconds for a request with the client's own repetitions; ``connect_timeout`` for a node
    ``retries``          of a read, put or claim, with growing pauses, where the cluster is busy; none begins later
                         than two ``timeout`` after the first try
    ``claim_ttl``        seconds that a claim is kept, longer than any attempt lasts; 0 is for ever
    ``use_services_alternate``  the addresses that the servers have for clients outside their network
    ``tls_...``          with ``tls_cafile`` connections are TLS; file names are those of the machine that connects
    ``password_env``     the environment variable with the password, on each machine that connects; instead of one here
    ``password_file``    the file with the password, read when a process connects
    """

    hosts: tuple[Address, ...]
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
    password_file: str | None = None

    shared_between_processes = True
    native_records = True

    def __post_init__(self) -> None:
        for name, fits, expected in (
            ("hosts", all(host and 0 < port < 2**16 for host, port in self.hosts) and self.hosts, "host:port, ..."),
            ("namespace", _NAMESPACE.fullmatch(self.namespace), "of 1 to 31 letters, digits, '_ -'"),
            ("set", self.set is None or _SET.fullmatch(self.set), "of 1 to 63 letters, digits, '_ . -'"),
            ("password_env", self.password_env != "", "the name of an environment variable"),
            ("password_file", self.password_file != "", "the name of a file"),
            ("bin", _BIN.fullmatch(self.bin), "of 1 to 15 letters, digits, '_ -'"),
            ("batch_size", 1 <= self.batch_size <= 5000, "from 1 to 5000"),
            ("timeout", 0.001 <= self.timeout <= 86_400, "a number of seconds from 0.001 to 86400"),
            ("connect_timeout", 0.001 <= self.connect_timeout <= 86_400, "a number of seconds from 0.001 to 86400"),
            ("retries", 0 <= self.retries < 2**31, "from 0 to 2147483647"),
            ("claim_ttl", 0 <= self.claim_ttl <= _LONGEST_TTL, f"from 0 to {_LONGEST_TTL} seconds"),
        ):
            if not fits:
                raise ConfigurationError(f"{name} is {expected}, not {getattr(self, name)!r}")
        urls.check_password(self)
        passwords = (self.password, self.password_env, self.password_file)
        if (self.username is None) != (passwords == (None, None, None)):
            raise ConfigurationError(
                "a user and a password go together: aerospike://user:password@host:3000/namespace, or "
                "aerospike://user@host:3000/namespace?password_env=NAME"
            )
        if self.tls_cafile is None and (self.tls_name or self.tls_certfile or self.tls_keyfile):
            raise ConfigurationError("tls_ parameters do nothing without tls_cafile")

    @classmethod
    def from_url(cls, url: str) -> AerospikeBackend:
        """The backend that a URL names. Raises ConfigurationError, which does not repeat a URL that cannot be read."""
        try:
            parts: Url | None = Url.read(url)
        except ValueError:
            parts = None  # raised below, where the error has no context that holds the URL
        namespace, _, set_name = ("" if parts is None else parts.path.strip("/")).partition("/")
        if parts is None or parts.scheme != "aerospike" or not namespace:
            raise urls.unreadable(_EXAMPLE)
        given = urls.parameters_in(parts.scheme, parts.query, _PARAMETERS)
        password = parts.password
        if password is None and parts.username is not None and not {"password_env", "password_file"} & given.keys():
            password = ""  # a user whose password is empty
        return cls(
            tuple((host, port or 3000) for host, port in parts.hosts),
            namespace,
            set_name or None,
            username=parts.username,
            password=password,
            **given,
        )

    def __repr__(self) -> str:
        login = urls.shown_login(self.username, self.password)
        return f"AerospikeBackend('aerospike://{login}{self.address}{urls.shown_parameters(self, _PARAMETERS)}')"

    @property
    def address(self) -> str:
        hosts = ",".join(map(urls.shown_address, self.hosts))
        return f"{hosts}/{self.namespace}{'/' if self.set else ''}{self.set or ''}"

    def open(self, state: str, *, ttl: float | None = None) -> AerospikeStore:
        """See `Backend.open`. Makes no connection."""
        if ttl is not None and not 0 < ttl <= _LONGEST_TTL:
            raise ConfigurationError(f"ttl is a number of seconds from 0 to {_LONGEST_TTL}, not {ttl!r}")
        name = self.set_of(state)
        if not _SET.fullmatch(name) or name == CLAIMS:
            raise ConfigurationError(f"{name!r} cannot name a set of Aerospike: give the URL one, /namespace/set")
        connection = self._connection(state)
        records = Records(connection, state, self.namespace, name, bin=self.bin, batch_size=self.batch_size, ttl=ttl)
        return AerospikeStore(connection, records, state, claim_ttl=self.claim_ttl)

    def states(self) -> Iterator[list[tuple[str, bytes]]]:
        """See `ListsStates.states`: the sets of the namespace that hold a ledger, or the one of the URL."""
        from mapstate.backends.aerospike.operations import states_in

        return states_in(self._connection("*"), self.namespace, self.set)

    def _connection(self, state: str) -> Connection:
        return Connection(self, state)

    def set_of(self, state: str) -> str:
        """The set of a state: the URL's, or else the one that has the state's name."""
        return self.set or state

    def client(self) -> Any:
        """The process's own client: closing the parent's after a fork would wait for threads that are not there."""
        place = (os.getpid(), self)
        client = _clients.get(place)
        if client is None:
            made = self.connect()
            client = _clients.setdefault(place, made)
            if client is not made:  # another thread connected meanwhile
                made.close()
        return client

    def connect(self) -> Any:
        """A new client, connected. A stand-in overrides this."""
        return aerospike.client(self.config())

    def config(self) -> dict[str, Any]:
        """The configuration of the client, which refuses names that it does not know."""
        config: dict[str, Any] = {
            "hosts": [(host, port, self.tls_name) if self.tls_name else (host, port) for host, port in self.hosts],
            "validate_keys": True,
            "connect_timeout": int(self.connect_timeout * 1000),
            "use_services_alternate": self.use_services_alternate,
            "send_bool_as": aerospike.AS_BOOL,
        }
        if self.username is not None:
            config |= {"user": self.username, "password": urls.password_of(self)}
        if self.tls_cafile is not None:
            files = {"cafile": self.tls_cafile, "certfile": self.tls_certfile, "keyfile": self.tls_keyfile}
            config["tls"] = {"enable": True} | {name: file for name, file in files.items() if file is not None}
        return config


_clients: dict[tuple[int, AerospikeBackend], Any] = {}
_PARAMETERS = urls.parameters_of(AerospikeBackend, ("hosts", "namespace", "set", "username", "password"))
