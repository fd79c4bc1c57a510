"""List the states of a store: for an operator, without Spark."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from mapstate.backends import check_state_name, missing_file, resolve
from mapstate.backing_map import Backend
from mapstate.capabilities import ListsStates
from mapstate.errors import ConfigurationError, CorruptRecordError, StoreUnavailableError, UsageError
from mapstate.protocol.control import is_control
from mapstate.protocol.ledger_record import LedgerRecord
from mapstate.protocol.stored_ledger import decode_ledger


class ListedState(NamedTuple):
    """One state of a store.

    ``ledger``   None if it cannot be read
    ``problem``  why not, else empty
    """

    name: str
    ledger: LedgerRecord | None
    problem: str = ""


def list_states(backend_or_url: Backend | str) -> list[ListedState]:
    """The states of a store, by name. It only reads.

    A state has a ledger: records that lost theirs are not listed. Redis walks through the keys of the whole database,
    in small requests.

    Raises:
        UsageError: The store cannot list its states.
        StoreError: The store failed.

    """
    if missing := missing_file(backend_or_url):
        raise StoreUnavailableError(missing)
    return sorted(_listed(name, ledger) for page in _pages(backend_or_url) for name, ledger in page)


def state_names(backend_or_url: Backend | str) -> Iterator[list[str]]:
    """The names of the states, page by page, without a look into their ledgers. Raises the errors of `list_states`."""
    return ([name for name, _ in page] for page in _pages(backend_or_url))


def _pages(backend_or_url: Backend | str) -> Iterator[list[tuple[str, bytes]]]:
    backend = resolve(backend_or_url)
    if not isinstance(backend, ListsStates):
        raise UsageError(
            f"{type(backend).__name__} offers no ListsStates, so it cannot list its states. Name a state: mapstate "
            "ledger URL STATE"
        )
    return (
        [(name, ledger) for name, ledger in page if _is_state_name(name) and not is_control(ledger)]
        for page in backend.states()
    )


def _is_state_name(name: str) -> bool:
    try:
        check_state_name(name)
    except ConfigurationError:
        return False
    return True


def _listed(name: str, ledger: bytes) -> ListedState:
    try:
        return ListedState(name, decode_ledger(ledger, name))
    except CorruptRecordError as error:
        return ListedState(name, None, error.message)
