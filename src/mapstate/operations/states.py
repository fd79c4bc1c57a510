"""List the states of a store: for an operator, without Spark."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from mapstate.backends import check_state_name, missing_file, resolve
from mapstate.backing_map import Backend
from mapstate.capabilities import ListsStates
from mapstate.errors import ConfigurationError, CorruptRecordError, StoreUnavailableError, UsageError
from mapstate.protocol.alias import ALIAS_SUFFIX, AliasRecord, decode_alias, is_alias
from mapstate.protocol.control import is_control
from mapstate.protocol.ledger_record import LedgerRecord
from mapstate.protocol.stored_ledger import decode_ledger


class ListedState(NamedTuple):
    """One state of a store.

    ``ledger``   None if it cannot be read, or where the name is an alias alone
    ``problem``  why not, else empty
    ``alias``    which version readers of the name read, where it has an alias
    """

    name: str
    ledger: LedgerRecord | None
    problem: str = ""
    alias: AliasRecord | None = None


def list_states(backend_or_url: Backend | str) -> list[ListedState]:
    """The states of a store, and the aliases, by name. It only reads.

    A state has a ledger: records that lost theirs are not listed. Redis walks through the keys of the whole database,
    in small requests.

    Raises:
        UsageError: The store cannot list its states.
        StoreError: The store failed.

    """
    if missing := missing_file(backend_or_url):
        raise StoreUnavailableError(missing)
    listed: dict[str, ListedState] = {}
    for name, data in sorted(state for page in _pages(backend_or_url) for state in page):
        known = listed.get(name) or ListedState(name, None)
        try:
            if is_alias(data):
                listed[name] = known._replace(alias=decode_alias(data, name))
            else:
                listed[name] = known._replace(ledger=decode_ledger(data, name))
        except CorruptRecordError as error:
            listed[name] = known._replace(problem=error.message)
    return list(listed.values())


def state_names(backend_or_url: Backend | str) -> Iterator[list[str]]:
    """The names of states and aliases, page by page; one with both comes twice. Raises the errors of `list_states`."""
    return ([name for name, _ in page] for page in _pages(backend_or_url))


def _pages(backend_or_url: Backend | str) -> Iterator[list[tuple[str, bytes]]]:
    backend = resolve(backend_or_url)
    if not isinstance(backend, ListsStates):
        raise UsageError(
            f"{type(backend).__name__} offers no ListsStates, so it cannot list its states. Name a state: mapstate "
            "ledger URL STATE"
        )
    return (
        [
            (name.removesuffix(ALIAS_SUFFIX) if is_alias(data) else name, data)
            for name, data in page
            if _is_state_name(name) and not is_control(data)
        ]
        for page in backend.states()
    )


def _is_state_name(name: str) -> bool:
    try:
        check_state_name(name)
    except ConfigurationError:
        return False
    return True
