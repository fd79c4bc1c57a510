"""Which node of a cluster has which slot, and how many of them are asked at once, whatever moves meanwhile."""

from __future__ import annotations

import os
import re
from binascii import crc_hqx
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from redis import exceptions as driver
from redis.connection import ConnectionPool

from mapstate.backends.redis.connection import Patience
from mapstate.backends.redis.problems import DRIVER_ERRORS, NOT_DONE, problem_of
from mapstate.backends.redis.settings import Address
from mapstate.backends.redis.wire import INFO, command, life
from mapstate.errors import StoreError, StoreUnavailableError

__all__ = ["Ahead", "Cluster", "Reply", "Request", "Seeds", "Shape", "slot_of"]

SLOTS = 16384
_ASKING = command(b"ASKING")
_MOVING = re.compile(rb"\[(\d+)-[<>]-")  # in CLUSTER NODES, of the node that is asked
_REDIRECTS = 5  # in a row, without a pause


def slot_of(tag: bytes) -> int:
    """The slot of a Redis key whose hash tag, or which as a whole, is this."""
    return crc_hqx(tag, 0) % SLOTS


class Request(NamedTuple):
    """Commands about keys of one slot, each with one reply."""

    slot: int
    commands: tuple[bytes, ...]


class Reply(NamedTuple):
    """The replies to a request, and the life of the node that gave them, before and after, where it was asked."""

    found: list[Any]
    life_before: bytes | None = None
    life_after: bytes | None = None


class Ahead(NamedTuple):
    """Requests that were sent. One of the two is called, once."""

    read: Callable[[], list[Reply]]
    """Their replies. What failed, was redirected or could not be sent is asked again, as `Cluster.ask` does."""

    drop: Callable[[], None]
    """Lets the connections go, half read as they are."""


class Shape(NamedTuple):
    """A cluster at one moment: the node of each slot, each of them with its life, and the slots on the move."""

    owners: tuple[Address, ...]
    masters: dict[Address, bytes | None]
    moving: frozenset[bytes]


class Seeds(Protocol):
    """What a `Cluster` has to know of the backend that it belongs to."""

    @property
    def nodes(self) -> tuple[Address, ...]:
        """Where to ask first."""

    @property
    def address(self) -> str:
        """For messages."""

    @property
    def secret(self) -> str | None:
        """What messages must not show."""

    @property
    def retries(self) -> int:
        """See `Patience`."""

    @property
    def socket_timeout(self) -> float:
        """Seconds."""

    def pool_to(self, node: Address) -> ConnectionPool:
        """The connections of this process to one node."""


_ByNode = dict[Address, list[tuple[int, tuple[bytes, ...]]]]
"""What each node is asked: the number of a request, and its commands."""

_Sent = tuple[ConnectionPool, Any, list[tuple[int, tuple[bytes, ...]]]]
"""A connection that is to be read from, where it goes back to, and what was asked on it."""

_slots: dict[tuple[int, Any], tuple[Address, ...]] = {}
"""The owner of each slot as of the last look, by process and backend."""


class Cluster:
    """A cluster as the store of one state talks to it. Holds no connection by itself."""

    def __init__(self, backend: Seeds, state: str) -> None:
        self._backend = backend
        self._state = state

    def ask(self, requests: Sequence[Request], *, repeat: bool = True, lives: bool = False) -> list[Reply]:
        """The replies to each request: one round trip to each node for all that it has to answer.

        What was redirected, or failed where that may pass, is asked again; with ``repeat`` off only what certainly was
        not done. Raises StoreUnavailableError where it does not pass, and the errors of `problem_of`. With ``lives``
        each node says who it is, before and after.
        """
        replies: list[Reply | None] = [None] * len(requests)
        asking: dict[int, Address] = {}
        patience = Patience(self._backend.retries, self._backend.socket_timeout)
        redirects = 0
        while True:
            left = [at for at, reply in enumerate(replies) if reply is None]
            if not left:
                return [reply for reply in replies if reply is not None]
            troubles = self._round(requests, left, asking, replies, lives=lives)
            if not troubles:
                continue
            asking = {}
            problem = self._worst(troubles, repeat=repeat)
            moved = all(isinstance(error, driver.MovedError | driver.AskError) for error in troubles.values())
            redirects = redirects + 1 if moved else 0
            if not (moved and redirects <= _REDIRECTS) and patience.ends():
                raise problem
            for at, error in troubles.items():
                if isinstance(error, driver.AskError):
                    asking[at] = (error.host, error.port)
            if len(asking) < len(troubles):
                self._look(forced=True)
                self._believe([error for error in troubles.values() if type(error) is driver.MovedError])

    def ask_ahead(self, requests: Sequence[Request]) -> Ahead:
        """Sends requests that may be asked again, once, and leaves their replies for later."""
        replies: list[Reply | None] = [None] * len(requests)
        pid = os.getpid()
        owners = _slots.get((pid, self._backend))
        sent: list[_Sent] = []
        troubles: dict[int, Exception] = {}
        if owners is not None:
            by_node: _ByNode = {}
            for at, request in enumerate(requests):
                by_node.setdefault(owners[request.slot], []).append((at, request.commands))
            troubles = self._send(by_node, sent, b"")

        def read() -> list[Reply]:
            if os.getpid() != pid:
                sent.clear()  # a fork leaves its parent's replies alone
            self._receive(sent, replies, troubles, lives=False)
            missing = [at for at, reply in enumerate(replies) if reply is None]
            for at, reply in zip(missing, self.ask([requests[at] for at in missing]), strict=True):
                replies[at] = reply
            return [reply for reply in replies if reply is not None]

        return Ahead(read, lambda: _let_go(sent))

    def shape(self) -> Shape:
        """Who has what, and who they are, as of now."""
        self._look(forced=True)
        owners = self._owners()
        masters = {node: self.ask_node(node, [command(b"CLUSTER", b"NODES")]) for node in sorted(set(owners))}
        moving = {slot for reply in masters.values() for slot in _MOVING.findall(reply.found[0])}
        return Shape(owners, {node: reply.life_after for node, reply in masters.items()}, frozenset(moving))

    def known(self) -> list[Address]:
        """The nodes that this process has met; asks nothing."""
        return sorted(set(_slots.get((os.getpid(), self._backend), ())))

    def ask_node(self, node: Address, commands: Sequence[bytes]) -> Reply:
        """The replies of one node, and who it is; tried again where it does not answer. Raises StoreError."""
        patience = Patience(self._backend.retries, self._backend.socket_timeout)
        while True:
            replies: list[Reply | None] = [None]
            trouble = self._exchange({node: [(0, tuple(commands))]}, replies, lives=True)
            if replies[0] is not None:
                return replies[0]
            problem, may_pass = self._problem(trouble[0])
            if not may_pass or patience.ends():
                raise problem

    def _round(
        self,
        requests: Sequence[Request],
        left: Sequence[int],
        asking: dict[int, Address],
        replies: list[Reply | None],
        *,
        lives: bool,
    ) -> dict[int, Exception]:
        """Asks once what is left; fills in replies, and returns what went wrong, by request."""
        try:
            owners = self._owners()
        except StoreUnavailableError as error:
            return dict.fromkeys(left, error)
        by_node: _ByNode = {}
        for at in left:
            commands = requests[at].commands
            if at in asking:
                commands = tuple(one for own in commands for one in (_ASKING, own))
            by_node.setdefault(asking.get(at) or owners[requests[at].slot], []).append((at, commands))
        troubles = self._exchange(by_node, replies, lives=lives)
        for at in asking:
            reply = replies[at]
            if reply is not None:
                replies[at] = reply._replace(found=reply.found[1::2])
        return troubles

    def _exchange(self, by_node: _ByNode, replies: list[Reply | None], *, lives: bool) -> dict[int, Exception]:
        """Sends to all nodes, and then reads from each."""
        sent: list[_Sent] = []
        troubles = self._send(by_node, sent, INFO if lives else b"")
        return self._receive(sent, replies, troubles, lives=lives)

    def _send(self, by_node: _ByNode, sent: list[_Sent], around: bytes) -> dict[int, Exception]:
        """The first half: adds to ``sent`` the connections that were taken; returns what went wrong, by request."""
        troubles: dict[int, Exception] = {}
        try:
            for node, asked in by_node.items():
                pool = self._backend.pool_to(node)
                packed = b"".join([around, *(one for _, commands in asked for one in commands), around])
                try:
                    conn = pool.get_connection()
                except DRIVER_ERRORS as error:
                    troubles |= dict.fromkeys((at for at, _ in asked), error)
                    continue
                sent.append((pool, conn, asked))
                try:
                    conn.send_packed_command([packed], check_health=False)  # type: ignore[no-untyped-call]
                except DRIVER_ERRORS as error:
                    troubles |= dict.fromkeys((at for at, _ in asked), error)
        except BaseException:
            _let_go(sent)
            raise
        return troubles

    def _receive(
        self, sent: list[_Sent], replies: list[Reply | None], troubles: dict[int, Exception], *, lives: bool
    ) -> dict[int, Exception]:
        """The second half: reads from each node, and gives the connections back."""
        try:
            for _, conn, asked in sent:
                if asked[0][0] not in troubles:
                    troubles |= _read(conn, asked, replies, lives=lives)
        finally:
            _let_go(sent, replies)
        return troubles

    def _worst(self, troubles: dict[int, Exception], *, repeat: bool) -> StoreError:
        """What to raise if it does not pass. Raises it at once where that is certain."""
        worst: StoreError | None = None
        for error in troubles.values():
            if isinstance(error, StoreError):
                worst = worst or error
                continue
            problem, may_pass = self._problem(error)
            if not may_pass or not (repeat or isinstance(error, NOT_DONE)):
                raise problem
            worst = worst or problem
        assert worst is not None  # noqa: S101  there is trouble
        return worst

    def _problem(self, error: Exception) -> tuple[StoreError, bool]:
        backend = self._backend
        if isinstance(error, driver.MovedError | driver.AskError | driver.TryAgainError):
            text = f"state {self._state!r}: the cluster at {backend.address} is being rearranged: {error}"
            return StoreUnavailableError(text, state=self._state, store=backend.address), True
        return problem_of(error, state=self._state, store=backend.address, secret=backend.secret)

    def _owners(self) -> tuple[Address, ...]:
        """The node of each slot."""
        self._look(forced=False)
        return _slots[os.getpid(), self._backend]

    def _believe(self, moved: Sequence[driver.MovedError]) -> None:
        """A node that has given a slot away knows to whom, before others do."""
        owners = list(self._owners())
        for one in moved:
            if one.host:
                owners[one.slot_id] = (one.host, one.port)
        _slots[os.getpid(), self._backend] = tuple(owners)

    def _look(self, *, forced: bool) -> None:
        """Asks the cluster who has what. Raises StoreError where no node tells."""
        known = _slots.get((os.getpid(), self._backend))
        if known is not None and not forced:
            return
        trouble: StoreError | None = None
        for node in dict.fromkeys((*(known or ()), *self._backend.nodes)):
            replies: list[Reply | None] = [None]
            failed = self._exchange({node: [(0, (command(b"CLUSTER", b"SLOTS"),))]}, replies, lives=False)
            if replies[0] is None:
                trouble, may_pass = self._problem(failed[0])
                if not may_pass:
                    raise trouble
                continue
            owners = _owners_in(replies[0].found[0], node)
            if owners is not None:
                _slots[os.getpid(), self._backend] = owners
                return
            trouble = trouble or StoreUnavailableError(
                f"state {self._state!r}: the cluster at {self._backend.address} has slots that nobody serves. Look at "
                "CLUSTER INFO: a master without a replica is down, or slots were never assigned.",
                state=self._state,
                store=self._backend.address,
            )
        if trouble is not None and known is None:
            raise trouble


def _read(
    conn: Any, asked: list[tuple[int, tuple[bytes, ...]]], replies: list[Reply | None], *, lives: bool
) -> dict[int, Exception]:
    """Reads all replies of one node, in order, fills them in, and returns what went wrong, by request."""
    troubles: dict[int, Exception] = {}
    found: dict[int, list[Any]] = {}
    try:
        before = life(*_info(conn)) if lives else None
        for at, commands in asked:
            own = [_reply(conn) for _ in commands]
            failed = next((one for one in own if isinstance(one, Exception)), None)
            if failed is None:
                found[at] = own
            else:
                troubles[at] = failed
        after = life(*_info(conn)) if lives else None
    except DRIVER_ERRORS as error:  # the connection broke: what was read of it is whole, but its node is in doubt
        return troubles | dict.fromkeys((at for at, _ in asked if at not in troubles), error)
    for at, own in found.items():
        replies[at] = Reply(own, before, after)
    return troubles


def _let_go(sent: list[_Sent], replies: Sequence[Reply | None] | None = None) -> None:
    """Gives connections back, closed where they may be half read."""
    while sent:
        pool, conn, asked = sent.pop()
        if replies is None or any(replies[at] is None for at, _ in asked):
            conn.disconnect()
        pool.release(conn)


def _reply(conn: Any) -> Any:
    """One reply, also where it is an error of the command; raises where the connection broke."""
    try:
        return conn.read_response()
    except driver.ResponseError as error:
        return error


def _info(conn: Any) -> list[bytes | None]:
    """The replies to INFO, None where this user may not ask."""
    return [None if isinstance(one, Exception) else one for one in (_reply(conn), _reply(conn))]


def _owners_in(slots: list[Any], asked: Address) -> tuple[Address, ...] | None:
    """The node of each slot out of CLUSTER SLOTS, None unless each has one. ``asked`` said so."""
    owners: list[Address | None] = [None] * SLOTS
    for first, last, (host, port, *_), *_ in slots:
        name = host.decode() if host else asked[0]  # a node that does not know its own address
        owners[first : last + 1] = [(name, port)] * (last + 1 - first)
    whole = tuple(one for one in owners if one is not None)
    return whole if len(whole) == SLOTS else None
