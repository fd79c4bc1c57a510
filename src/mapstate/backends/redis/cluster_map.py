"""The map of a cluster: which node has which slot, and requests to many nodes at once, while slots move."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from redis import exceptions as driver
from redis.connection import ConnectionPool
from redis.crc import REDIS_CLUSTER_HASH_SLOTS

from mapstate.backends.redis.backend import RedisSettings
from mapstate.backends.redis.connection import INFO, command, incarnation_of
from mapstate.backends.redis.problems import DRIVER_ERRORS, NOT_DONE, problem_of
from mapstate.errors import StoreError, StoreUnavailableError
from mapstate.retry import Retries
from mapstate.urls import Address

_ASKING = command(b"ASKING")
_MOVING = re.compile(rb"\[(\d+)-[<>]-")  # in CLUSTER NODES, of the node that is asked
_REDIRECTS = 5  # in a row, without a pause


class Request(NamedTuple):
    """Commands about keys of one slot, each with one reply."""

    slot: int
    commands: tuple[bytes, ...]


class Reply(NamedTuple):
    """The replies to a request, and the node's incarnation before and after them, where the caller wants it."""

    found: list[Any]
    incarnation_before: bytes | None = None
    incarnation_after: bytes | None = None


class PendingReply(NamedTuple):
    """Requests that were sent. The caller calls one of the two, once."""

    read: Callable[[], list[Reply]]
    """Return their replies. Retries, as `ClusterMap.ask` does, what failed, was redirected or could not be sent."""

    drop: Callable[[], None]
    """Close the connections, half read as they are."""


class ClusterLayout(NamedTuple):
    """A cluster at one moment: the node of each slot, each of them with its incarnation, and the slots on the move."""

    owners: tuple[Address, ...]
    masters: dict[Address, bytes | None]
    moving: frozenset[bytes]


_ByNode = dict[Address, list[tuple[int, tuple[bytes, ...]]]]
"""For each node, its requests: the number of each, and its commands."""

_Sent = tuple[ConnectionPool, Any, list[tuple[int, tuple[bytes, ...]]]]
"""A pool, a connection of it with replies under way, and the requests that were sent on it."""

_slots: dict[tuple[int, Any], tuple[Address, ...]] = {}
"""The node of each slot as last reported, by process and by what `RedisSettings.reached` is."""


class ClusterMap:
    """A cluster, for the store of one state. Holds no connection between requests.

    ``settings``  how it is reached; ``nodes`` are asked first
    ``pool``      returns the connections of this process to a node
    """

    def __init__(
        self,
        settings: RedisSettings,
        nodes: Sequence[Address],
        pool: Callable[[Address], ConnectionPool],
        state: str,
    ) -> None:
        self.settings = settings
        self._nodes = nodes
        self.pool = pool
        self.state = state
        self._owner = settings.reached

    def ask(self, requests: Sequence[Request], *, repeat: bool = True, incarnations: bool = False) -> list[Reply]:
        """The replies to each request: one round trip to each node, for all of its requests.

        Retries a request that was redirected, or failed with an error that may pass; with ``repeat`` off only one that
        certainly was not done. Raises StoreUnavailableError where the error does not pass, and the errors of
        `problem_of`. With ``incarnations`` each node names its own, before and after.
        """
        replies: list[Reply | None] = [None] * len(requests)
        asking: dict[int, Address] = {}
        retries = Retries(self.settings.retries, 2 * self.settings.socket_timeout)
        redirects = 0
        while True:
            left = [i for i, reply in enumerate(replies) if reply is None]
            if not left:
                return [reply for reply in replies if reply is not None]
            troubles = self._round(requests, left, asking, replies, incarnations=incarnations)
            if not troubles:
                continue
            asking = {}
            problem = self._worst(troubles, repeat=repeat)
            moved = all(isinstance(error, driver.MovedError | driver.AskError) for error in troubles.values())
            redirects = redirects + 1 if moved else 0
            if not (moved and redirects <= _REDIRECTS) and retries.are_over():
                raise problem
            for i, error in troubles.items():
                if isinstance(error, driver.AskError):
                    asking[i] = (error.host, error.port)
            if len(asking) < len(troubles):
                self._refresh(forced=True)
                self._believe([error for error in troubles.values() if type(error) is driver.MovedError])

    def ask_ahead(self, requests: Sequence[Request]) -> PendingReply:
        """Send requests that may be repeated, and leave their replies for later."""
        replies: list[Reply | None] = [None] * len(requests)
        pid = os.getpid()
        owners = _slots.get((pid, self._owner))
        sent: list[_Sent] = []
        troubles: dict[int, Exception] = {}
        if owners is not None:
            by_node: _ByNode = {}
            for i, request in enumerate(requests):
                by_node.setdefault(owners[request.slot], []).append((i, request.commands))
            troubles = self._send(by_node, sent, b"")

        def read() -> list[Reply]:
            if os.getpid() != pid:
                sent.clear()  # a fork does not read its parent's replies
            self._receive(sent, replies, troubles, incarnations=False)
            missing = [i for i, reply in enumerate(replies) if reply is None]
            for i, reply in zip(missing, self.ask([requests[i] for i in missing]), strict=True):
                replies[i] = reply
            return [reply for reply in replies if reply is not None]

        return PendingReply(read, lambda: _release(sent))

    def shape(self) -> ClusterLayout:
        """The cluster as of now. Asks every node."""
        self._refresh(forced=True)
        owners = self._owners()
        masters = {node: self.ask_node(node, [command(b"CLUSTER", b"NODES")]) for node in sorted(set(owners))}
        moving = {slot for reply in masters.values() for slot in _MOVING.findall(reply.found[0])}
        return ClusterLayout(
            owners, {node: reply.incarnation_after for node, reply in masters.items()}, frozenset(moving)
        )

    def known(self) -> list[Address]:
        """The nodes that this process knows. Makes no request."""
        return sorted(set(_slots.get((os.getpid(), self._owner), ())))

    def ask_node(self, node: Address, commands: Sequence[bytes]) -> Reply:
        """The replies of one node, and its incarnation. Retries where it does not answer. Raises StoreError."""
        retries = Retries(self.settings.retries, 2 * self.settings.socket_timeout)
        while True:
            replies: list[Reply | None] = [None]
            trouble = self._exchange({node: [(0, tuple(commands))]}, replies, incarnations=True)
            if replies[0] is not None:
                return replies[0]
            problem, may_pass = self._problem(trouble[0])
            if not may_pass or retries.are_over():
                raise problem

    def _round(
        self,
        requests: Sequence[Request],
        left: Sequence[int],
        asking: dict[int, Address],
        replies: list[Reply | None],
        *,
        incarnations: bool,
    ) -> dict[int, Exception]:
        """Send once what is ``left``; fill in replies, and return the errors by request."""
        try:
            owners = self._owners()
        except StoreUnavailableError as error:
            return dict.fromkeys(left, error)
        by_node: _ByNode = {}
        for i in left:
            commands = requests[i].commands
            if i in asking:
                commands = tuple(part for command in commands for part in (_ASKING, command))
            by_node.setdefault(asking.get(i) or owners[requests[i].slot], []).append((i, commands))
        troubles = self._exchange(by_node, replies, incarnations=incarnations)
        for i in asking:
            reply = replies[i]
            if reply is not None:
                replies[i] = reply._replace(found=reply.found[1::2])
        return troubles

    def _exchange(self, by_node: _ByNode, replies: list[Reply | None], *, incarnations: bool) -> dict[int, Exception]:
        """Send to all nodes, then read from each."""
        sent: list[_Sent] = []
        troubles = self._send(by_node, sent, INFO if incarnations else b"")
        return self._receive(sent, replies, troubles, incarnations=incarnations)

    def _send(self, by_node: _ByNode, sent: list[_Sent], around: bytes) -> dict[int, Exception]:
        """The first half: add the connections to ``sent``, and return the errors by request."""
        troubles: dict[int, Exception] = {}
        try:
            for node, asked in by_node.items():
                pool = self.pool(node)
                packed = b"".join([around, *(command for _, commands in asked for command in commands), around])
                try:
                    conn = pool.get_connection()
                except DRIVER_ERRORS as error:
                    troubles |= dict.fromkeys((i for i, _ in asked), error)
                    continue
                sent.append((pool, conn, asked))
                try:
                    conn.send_packed_command([packed], check_health=False)  # type: ignore[no-untyped-call]
                except DRIVER_ERRORS as error:
                    troubles |= dict.fromkeys((i for i, _ in asked), error)
        except BaseException:
            _release(sent)
            raise
        return troubles

    def _receive(
        self, sent: list[_Sent], replies: list[Reply | None], troubles: dict[int, Exception], *, incarnations: bool
    ) -> dict[int, Exception]:
        """The second half: read from each node, and release the connections."""
        try:
            for _, conn, asked in sent:
                if asked[0][0] not in troubles:
                    troubles |= _read(conn, asked, replies, incarnations=incarnations)
        finally:
            _release(sent, replies)
        return troubles

    def _worst(self, troubles: dict[int, Exception], *, repeat: bool) -> StoreError:
        """The error to raise where no try is left. Raises at once an error that cannot pass."""
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
        if isinstance(error, driver.MovedError | driver.AskError | driver.TryAgainError):
            text = f"state {self.state!r}: the cluster at {self.settings.address} is being rearranged: {error}"
            return StoreUnavailableError(text, state=self.state, store=self.settings.address), True
        settings = self.settings
        return problem_of(error, state=self.state, store=settings.address, login_changes=settings.login_changes)

    def _owners(self) -> tuple[Address, ...]:
        """The node of each slot."""
        self._refresh(forced=False)
        return _slots[os.getpid(), self._owner]

    def _believe(self, moved: Sequence[driver.MovedError]) -> None:
        """Note the new nodes of slots: a node that lost a slot knows its new node before others do."""
        owners = list(self._owners())
        for answer in moved:
            if answer.host:
                owners[answer.slot_id] = (answer.host, answer.port)
        _slots[os.getpid(), self._owner] = tuple(owners)

    def _refresh(self, *, forced: bool) -> None:
        """Ask the cluster for the node of each slot. Raises StoreError where no node replies."""
        known = _slots.get((os.getpid(), self._owner))
        if known is not None and not forced:
            return
        trouble: StoreError | None = None
        for node in dict.fromkeys((*(known or ()), *self._nodes)):
            replies: list[Reply | None] = [None]
            failed = self._exchange({node: [(0, (command(b"CLUSTER", b"SLOTS"),))]}, replies, incarnations=False)
            if replies[0] is None:
                trouble, may_pass = self._problem(failed[0])
                if not may_pass:
                    raise trouble
                continue
            owners = _owners_in(replies[0].found[0], node)
            if owners is not None:
                _slots[os.getpid(), self._owner] = owners
                return
            trouble = trouble or StoreUnavailableError(
                f"state {self.state!r}: the cluster at {self.settings.address} has slots that no node serves. Look at "
                "CLUSTER INFO: a master without a replica is down, or slots were never assigned.",
                state=self.state,
                store=self.settings.address,
            )
        if trouble is not None and known is None:
            raise trouble


def _read(
    conn: Any, asked: list[tuple[int, tuple[bytes, ...]]], replies: list[Reply | None], *, incarnations: bool
) -> dict[int, Exception]:
    """Read all replies of one node, in order, fill them in, and return the errors by request."""
    troubles: dict[int, Exception] = {}
    answers: dict[int, list[Any]] = {}
    try:
        before = incarnation_of(*_info(conn)) if incarnations else None
        for i, commands in asked:
            replies_of = [_reply(conn) for _ in commands]
            failed = next((reply for reply in replies_of if isinstance(reply, Exception)), None)
            if failed is None:
                answers[i] = replies_of
            else:
                troubles[i] = failed
        after = incarnation_of(*_info(conn)) if incarnations else None
    except DRIVER_ERRORS as error:  # the replies read so far are whole, but their node is in doubt
        return troubles | dict.fromkeys((i for i, _ in asked if i not in troubles), error)
    for i, replies_of in answers.items():
        replies[i] = Reply(replies_of, before, after)
    return troubles


def _release(sent: list[_Sent], replies: Sequence[Reply | None] | None = None) -> None:
    """Release connections, closed where they may be half read."""
    while sent:
        pool, conn, asked = sent.pop()
        if replies is None or any(replies[i] is None for i, _ in asked):
            conn.disconnect()
        pool.release(conn)


def _reply(conn: Any) -> Any:
    """One reply, or the error of its command as a value. Raises where the connection broke."""
    try:
        return conn.read_response()
    except driver.ResponseError as error:
        return error


def _info(conn: Any) -> list[bytes | None]:
    """The replies to INFO, None where this user may not run it."""
    return [None if isinstance(reply, Exception) else reply for reply in (_reply(conn), _reply(conn))]


def _owners_in(slots: list[Any], asked: Address) -> tuple[Address, ...] | None:
    """The node of each slot, from the reply of ``asked`` to CLUSTER SLOTS; None unless each slot has one."""
    owners: list[Address | None] = [None] * REDIS_CLUSTER_HASH_SLOTS
    for first, last, (host, port, *_), *_ in slots:
        name = host.decode() if host else asked[0]  # a node that does not know its own address
        owners[first : last + 1] = [(name, port)] * (last + 1 - first)
    whole = tuple(owner for owner in owners if owner is not None)
    return whole if len(whole) == REDIS_CLUSTER_HASH_SLOTS else None
