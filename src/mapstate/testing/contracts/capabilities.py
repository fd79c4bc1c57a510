"""The capabilities that a store may declare to lack, with a reason, and the tests that depend on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, TypeVar

import pytest

F = TypeVar("F", bound=Callable[..., None])

CAPABILITIES: Mapping[str, str] = {
    "conditional_writes": "its ledger changes by compare-and-set",
    "claims": "of several tries of a task it lets one write",
    "guarded_writes": "a fenced attempt cannot write over what a later one wrote",
    "fenced_writes": "a fenced attempt cannot write anything at all",
    "fence_with_ledger": "its fence moves with the ledger, in one write",
    "joint_ledgers": "ledgers of several states change in one write",
    "rewrites": "a vacuum replaces and removes records in one write",
    "drops": "removes a state whole",
    "ledger_reads": "reads ledger and records in one call",
    "reports": "keeps the last batch reports",
    "scan": "lists its keys",
    "states": "its backend lists its states",
    "snapshots": "its backend opens a state as of one moment",
    "ttl": "drops records by itself",
    "shared_between_processes": "two processes that open it see the same",
    "max_value_bytes": "refuses a record above a limit, before anything is written",
    "max_key_bytes": "refuses a key above a limit, before anything is written",
    "outages": "can be out of reach, and says so",
}

_IMPLIED = {
    "guarded_writes": ("fenced_writes", "fence_with_ledger", "rewrites"),
    "fenced_writes": ("fence_with_ledger", "rewrites"),
}


def needs(*capabilities: str) -> Callable[[F], F]:
    """Mark a test for stores that have all of these capabilities."""
    return _marked("_mapstate_needs", capabilities)


def instead_of(capability: str) -> Callable[[F], F]:
    """Mark a test for stores without this capability: it shows what they do instead."""
    return _marked("_mapstate_instead_of", (capability,))


def _marked(attribute: str, capabilities: tuple[str, ...]) -> Callable[[F], F]:
    unknown = set(capabilities) - CAPABILITIES.keys()
    if unknown:
        raise TypeError(f"there is no capability {', '.join(sorted(unknown))}; there is {', '.join(CAPABILITIES)}")

    def mark(test: F) -> F:
        setattr(test, attribute, capabilities)
        return test

    return mark


class Contract:
    """Base of the contracts: leaves out the tests of capabilities that a store declares to lack.

    ``without``          capabilities that the store lacks, by name, each with the reason
    ``max_value_bytes``  the largest record that the store takes, as the backend of these tests is set up. The
                         tests write such a record. None where there is no limit
    ``max_key_bytes``    the longest key that the store takes, in bytes of UTF-8. None where there is no limit

    The declarations are printed at the end of the run. A test of a contract cannot be overridden.
    """

    without: ClassVar[Mapping[str, str]] = {}
    max_value_bytes: ClassVar[int | None] = None
    max_key_bytes: ClassVar[int | None] = None

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if cls.__module__.startswith("mapstate.testing.contracts"):
            return  # a part of the kit
        unknown = cls.without.keys() - CAPABILITIES.keys()
        if unknown:
            known = ", ".join(CAPABILITIES)
            raise TypeError(f"{cls.__name__} is without {', '.join(sorted(unknown))}; what there is: {known}")
        if not all(reason.strip() for reason in cls.without.values()):
            raise TypeError(f"{cls.__name__}: each capability that a store is without comes with the reason")
        lacking = cls.lacking()
        for name, test in _tests(cls):
            if vars(cls).get(name) not in (None, test):
                raise TypeError(
                    f"{cls.__name__} overrides {name} of the contract. What the store is without is declared, with "
                    "the reason, in `without`; a test that it fails is a defect of the store"
                )
            needed = getattr(test, "_mapstate_needs", ())
            replaced = getattr(test, "_mapstate_instead_of", ())
            left_out = lacking.keys() & set(needed) or set(replaced) - lacking.keys()
            setattr(cls, name, None if left_out else test)

    @classmethod
    def lacking(cls) -> dict[str, str]:
        """The capabilities that the store lacks, also those that need a lacking one, with the reasons."""
        lacking = dict(cls.without)
        if cls.max_value_bytes is None:
            lacking.setdefault("max_value_bytes", "records may be of any size")
        if cls.max_key_bytes is None:
            lacking.setdefault("max_key_bytes", "keys may be of any length")
        for name, implied in _IMPLIED.items():
            if name in lacking:
                lacking |= {capability: f"it has no {name}" for capability in implied if capability not in lacking}
        return lacking

    @pytest.fixture(autouse=True)
    def _declared(self, request: pytest.FixtureRequest) -> None:
        """Have the declarations of this class printed at the end of the run."""
        manager = request.config.pluginmanager
        printed = manager.get_plugin(_Printed.name)
        if printed is None:
            printed = _Printed()
            manager.register(printed, _Printed.name)
        printed.declared[request.node.nodeid.rpartition("::")[0]] = type(self)


def _tests(cls: type) -> Iterator[tuple[str, Any]]:
    tests: dict[str, Any] = {}
    for base in cls.__mro__:
        if base.__module__.startswith("mapstate.testing.contracts"):
            tests = {name: test for name, test in vars(base).items() if name.startswith("test_")} | tests
    return iter(tests.items())


class _Printed:
    """The section of pytest's report with the tested stores and their declarations."""

    name = "mapstate-contracts"

    def __init__(self) -> None:
        self.declared: dict[str, type[Contract]] = {}

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Called by pytest, once."""
        terminalreporter.section("contracts of mapstate")
        for place, cls in sorted(self.declared.items()):
            lacking = cls.lacking()
            asked = {name for _, test in _tests(cls) for name in getattr(test, "_mapstate_needs", ())}
            has = [name for name in CAPABILITIES if name in asked - lacking.keys()]
            limits = {"max_value_bytes": cls.max_value_bytes, "max_key_bytes": cls.max_key_bytes}
            has = [f"{name} ({limits[name]})" if name in limits else name for name in has]
            terminalreporter.write_line(place)
            if has:
                terminalreporter.write_line(f"    has      {', '.join(has)}")
            for name, reason in lacking.items():
                if name in asked:
                    terminalreporter.write_line(f"    without  {name}: {reason}")
