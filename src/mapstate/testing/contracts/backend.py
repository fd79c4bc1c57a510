"""The contract of a backend: pickling, live instances, processes, expiry and scans."""

from __future__ import annotations

import pickle
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any, ClassVar

import pytest

from mapstate import capabilities
from mapstate.backing_map import Backend, IBackingMap, close_if_possible
from mapstate.capabilities import FenceToken
from mapstate.errors import ConfigurationError, MapStateError, StoreError, UsageError
from mapstate.operations.states import list_states
from mapstate.protocol.stored_ledger import record_pages
from mapstate.reader import open_reader
from mapstate.spec import opaque
from mapstate.testing.contracts.backing_map import BackingMapContract, SideDoor
from mapstate.testing.contracts.capabilities import instead_of, needs
from mapstate.testing.contracts.driver import CountingQuery, elsewhere, forked_after_use, put_and_get
from mapstate.testing.faults import wait_for

_PATIENCE = 10.0  # seconds that a store may take to drop what has expired


def closing(stack: ExitStack, store: Any) -> Any:
    """Return the store, and have it closed at the end if it can be."""
    if hasattr(store, "close"):
        stack.callback(store.close)
    return store


def at_once(work: Callable[[Any], Any], given: Sequence[Any]) -> list[Any]:
    """Call ``work`` with each in a thread of its own. Returns the results, or raises the first error."""
    with ThreadPoolExecutor(len(given)) as pool:
        return [*pool.map(work, given)]


def scanned(store: Any, page_size: int = 100) -> list[str]:
    """Return the keys that a scan lists, each once, in order."""
    return sorted({key for page in record_pages(store, page_size) for key in page})


class BackendContract(BackingMapContract):
    """What a `Backend` opens. Fixtures: ``backend``, which names an empty store, and ``side_door``.

    ``unreachable``     a fixture too: a backend whose server does not answer. For a store without ``outages``, none
    ``secret``          a password that ``unreachable`` holds, if the store has any: it must not be shown
    ``shortest_ttl``    seconds, for the tests of expiry
    ``writes_through``  the method of a store that gives an attempt its guarded writer
    """

    secret: ClassVar[str | None] = None
    shortest_ttl: ClassVar[float] = 1.0
    writes_through: ClassVar[str] = "writer"

    def writer_of(self, store: Any, token: FenceToken) -> Any:
        """The map that an attempt writes to: the store's guarded writer, or the store itself."""
        return getattr(store, self.writes_through)(token) if hasattr(store, self.writes_through) else store

    def move(self, store: Any, fence: FenceToken) -> Any:
        """Change the ledger and its fence, as a driver does. Returns the new version. No two ledgers are equal.

        Where fences are apart from the ledger, they move after it.
        """
        ledger = store.load()
        version = store.swap(f"ledger {secrets.token_hex(8)}".encode(), None if ledger is None else ledger[1], fence)
        assert version is not None, "nobody else changes it here"
        if isinstance(store, capabilities.SpreadFences):
            moved = store.move_fences([fence.token for fence in store.fences()], fence)
            assert [fence.token for fence in moved] == [fence] * len(moved), "nobody else moves them here"
        return version

    @pytest.fixture
    def backend(self) -> Backend:
        """Names a store without any state. To override."""
        raise NotImplementedError("the contract of a store needs a fixture `backend`")

    @pytest.fixture
    def unreachable(self) -> Backend:
        """Names a store that cannot be reached; gives up within seconds. To override, or be without outages."""
        raise NotImplementedError("a store that can be out of reach needs a fixture `unreachable`")

    @pytest.fixture
    def opened(self) -> Iterator[ExitStack]:
        """Closes what a test opens."""
        with ExitStack() as stack:
            yield stack

    @pytest.fixture
    def store(self, backend: Backend, opened: ExitStack) -> IBackingMap[str, Any]:
        """The state named ``state``."""
        return closing(opened, backend.open(self.state))  # type: ignore[no-any-return]

    @pytest.fixture
    def other(self, backend: Backend, opened: ExitStack) -> Any:
        """A second live instance of the same state."""
        return closing(opened, backend.open(self.state))

    # What is declared

    def test_it_offers_what_it_declares_and_nothing_else(self, backend: Backend, store: Any) -> None:
        lacking = self.lacking()
        assert isinstance(backend, Backend)
        assert isinstance(store, IBackingMap)
        for name, protocol in (
            ("conditional_writes", capabilities.LedgerStore),
            ("claims", capabilities.Claims),
            ("fenced_writes", capabilities.FencedWrites),
            ("joint_ledgers", capabilities.JointLedgers),
            ("drops", capabilities.Drops),
            ("ledger_reads", capabilities.LedgerReads),
            ("reports", capabilities.Reports),
            ("scan", capabilities.Scan),
        ):
            assert isinstance(store, protocol) == (name not in lacking), f"{name}: {protocol.__name__}"
        has_fences_apart = "fence_with_ledger" in lacking and "fenced_writes" not in lacking
        assert isinstance(store, capabilities.SpreadFences) == has_fences_apart
        assert isinstance(backend, capabilities.ListsStates) == ("states" not in lacking)
        assert isinstance(backend, capabilities.Snapshots) == ("snapshots" not in lacking)
        assert backend.shared_between_processes == ("shared_between_processes" not in lacking)
        assert hasattr(store, self.writes_through) == ("guarded_writes" not in lacking)
        if isinstance(store, capabilities.FencedWrites):
            writer = store.writer(FenceToken(1, 1))
            assert isinstance(writer, IBackingMap)
            assert isinstance(writer, capabilities.Rewrites) == ("rewrites" not in lacking)

    # Live instances

    def test_two_live_instances_agree(self, store: Any, other: Any) -> None:
        store.multi_put(["a", "b"], [self.a_record(1), self.a_record(2)])
        assert other.multi_get(["b", "a"]) == [self.a_record(2), self.a_record(1)]
        other.multi_put(["a"], [self.a_record(3)])
        assert store.multi_get(["a", "b"]) == [self.a_record(3), self.a_record(2)]

    def test_what_others_write_is_seen_at_once(self, store: Any, side_door: SideDoor) -> None:
        assert store.multi_get(["a"]) == [None]
        store.multi_put(["b"], [self.a_record(1)])
        for number in (2, 3):
            for key in ("a", "b"):
                side_door.write(self.state, key, self.a_record(number))
            assert store.multi_get(["a", "b"]) == [self.a_record(number)] * 2

    def test_states_do_not_mix(self, backend: Backend, opened: ExitStack, side_door: SideDoor) -> None:
        names = [self.state, self.state + "2", self.state[:-1], f"{self.state}.a", f"{self.state}-a", "a", "A", "aa"]
        stores = [closing(opened, backend.open(name)) for name in names]
        for i, store in enumerate(stores):
            assert store.multi_get(["k", f"k{i}"]) == [None, None], names[i]
            store.multi_put(["k", f"k{i}"], [self.a_record(i)] * 2)
        for i, store in enumerate(stores):
            assert store.multi_get(["k"]) == [self.a_record(i)], names[i]
            assert side_door.read(names[i], "k") == self.a_record(i)
            assert store.multi_get([f"k{other}" for other in range(len(names)) if other != i]) == [None] * 7

    def test_threads_with_a_store_each_do_not_disturb_each_other(self, backend: Backend, store: Any) -> None:
        def work(name: str) -> None:
            with ExitStack() as stack:
                mine = closing(stack, backend.open(self.state))
                for i in range(20):
                    keys = [f"{name}-{i}-{part}" for part in range(5)]
                    mine.multi_put(keys, [self.a_record(i)] * 5)
                    assert mine.multi_get(keys) == [self.a_record(i)] * 5

        at_once(work, "abcd")
        keys = [f"{name}-{i}-{part}" for name in "abcd" for i in range(20) for part in range(5)]
        assert None not in store.multi_get(keys)

    def test_a_put_after_close_is_stored_or_refused_and_never_lost(
        self, backend: Backend, other: Any, side_door: SideDoor
    ) -> None:
        store: Any = backend.open(self.state)
        store.multi_put(["a"], [self.a_record(1)])
        close_if_possible(store)
        close_if_possible(store)  # closing twice is no error
        assert other.multi_get(["a"]) == [self.a_record(1)]  # nor does it close others
        try:
            store.multi_put(["a"], [self.a_record(2)])
        except MapStateError:
            assert side_door.read(self.state, "a") == self.a_record(1)
        else:
            assert side_door.read(self.state, "a") == self.a_record(2)
            assert store.multi_get(["a"]) == [self.a_record(2)]
        close_if_possible(store)

    # The backend as a value

    def test_a_spec_is_equal_after_it_was_sent(self, backend: Backend) -> None:
        again = pickle.loads(pickle.dumps(backend))
        assert again == backend
        assert hash(again) == hash(backend)
        assert repr(again) == repr(backend)
        spec = opaque(backend, name=self.state)
        assert pickle.loads(pickle.dumps(spec)) == spec

    def test_a_spec_is_the_same_after_it_was_used_and_holds_no_client(self, backend: Backend) -> None:
        before = pickle.dumps(backend)
        store: Any = backend.open(self.state)
        store.multi_put(["a"], [self.a_record(1)])
        store.multi_get(["a"])
        assert pickle.dumps(backend) == before
        close_if_possible(store)
        assert pickle.dumps(backend) == before

    # Processes

    @needs("shared_between_processes")
    def test_a_spec_that_is_opened_in_a_spawned_process_sees_the_same_state(
        self, backend: Backend, store: Any, side_door: SideDoor
    ) -> None:
        store.multi_put(["a"], [self.a_record(1)])
        records = elsewhere(put_and_get, backend, self.state, ["b"], [self.a_record(2)], ["b", "x", "a"])
        assert records == [self.a_record(2), None, self.a_record(1)]
        assert store.multi_get(["a", "b"]) == [self.a_record(1), self.a_record(2)]
        assert side_door.read(self.state, "b") == self.a_record(2)

    @needs("shared_between_processes")
    def test_a_fork_after_use_shares_nothing_that_mixes_answers(self, backend: Backend, store: Any) -> None:
        names = ("parent", "one", "two")
        records = {name: [self.a_record(1000 * number + i) for i in range(50)] for number, name in enumerate(names)}
        wrong = elsewhere(forked_after_use, backend, self.state, records)
        assert wrong == {"parent": [], "one": [], "two": [], "afterwards": []}
        assert store.multi_get(["one-49", "two-49"]) == [records["one"][49], records["two"][49]]

    @instead_of("shared_between_processes")
    def test_a_store_of_one_process_is_refused_to_executors(self, backend: Backend) -> None:
        with pytest.raises(ConfigurationError, match="one process"):
            opaque(backend, name=self.state, apply_on="executors")

    # Outages

    @needs("outages")
    def test_a_store_that_cannot_be_reached_says_so_at_each_call(self, unreachable: Backend, opened: ExitStack) -> None:
        store = closing(opened, unreachable.open(self.state))
        calls = [
            ("multi_get", (["a"],)),
            ("multi_put", (["a"], [self.a_record(1)])),
            ("load", ()),
            ("swap", (b"{}", None, FenceToken(1, 1))),
            ("claim", (1, 0, "me")),
            ("multi_get_with_ledger", (["a"],)),
        ]
        for name, arguments in calls:
            if hasattr(store, name):
                with pytest.raises(StoreError) as caught:
                    getattr(store, name)(*arguments)
                self._shows_no_secret(str(caught.value), name)
        if hasattr(store, "scan"):
            with pytest.raises(StoreError):
                list(store.scan(10))
        with pytest.raises(StoreError):
            self.writer_of(store, FenceToken(1, 1)).multi_put(["a"], [self.a_record(1, 1)])

    @needs("outages")
    def test_a_spec_shows_no_password(self, unreachable: Backend) -> None:
        self._shows_no_secret(repr(unreachable), "its repr")
        self._shows_no_secret(str(unreachable), "its text")
        self._shows_no_secret(repr(opaque(unreachable, name=self.state)), "a spec's repr")
        self._shows_no_secret(repr(unreachable.open(self.state)), "its store's repr")

    def _shows_no_secret(self, text: str, where: str) -> None:
        assert self.secret is None or self.secret not in text, f"{where} shows the password"

    # Expiry

    def _wait_until(self, are_gone: Callable[[], bool]) -> None:
        wait_for(are_gone, "records that have expired to be gone", _PATIENCE + self.shortest_ttl)

    @needs("ttl")
    def test_records_expire(self, backend: Backend, opened: ExitStack, side_door: SideDoor) -> None:
        store = closing(opened, backend.open(self.state, ttl=self.shortest_ttl))
        store.multi_put(["a", "b"], [self.a_record(1), self.a_record(2)])
        wait_for(
            lambda: store.multi_get(["a", "b"]) == [None, None],
            "records that have expired",
            _PATIENCE + self.shortest_ttl,
        )
        assert side_door.read(self.state, "a") is None

    @needs("ttl", "guarded_writes", "conditional_writes")
    def test_records_of_an_attempt_expire_and_its_ledger_does_not(self, backend: Backend, opened: ExitStack) -> None:
        store = closing(opened, backend.open(self.state, ttl=self.shortest_ttl))
        token = FenceToken(1, 7)
        self.move(store, token)
        writer = self.writer_of(store, token)
        writer.multi_get(["a"])
        writer.multi_put(["a"], [self.a_record(1, 7)])
        self._wait_until(lambda: store.multi_get(["a"]) == [None])
        assert store.load() is not None
        self.writer_of(store, token).multi_put(["b"], [self.a_record(2, 7)])  # the fence is there too

    @needs("ttl")
    def test_each_put_of_a_record_renews_its_ttl(self, backend: Backend, opened: ExitStack) -> None:
        store = closing(opened, backend.open(self.state, ttl=self.shortest_ttl))
        store.multi_put(["once", "again"], [self.a_record(1), self.a_record(1)])
        end = time.monotonic() + _PATIENCE + self.shortest_ttl
        while time.monotonic() < end:
            written = time.monotonic()
            store.multi_put(["again"], [self.a_record(2)])
            once, again = store.multi_get(["once", "again"])
            if time.monotonic() - written < self.shortest_ttl / 2:  # else this machine was too slow to tell
                assert again == self.a_record(2)
                if once is None:
                    return
            time.sleep(self.shortest_ttl / 20)
        pytest.fail("what was written once did not expire")

    @needs("ttl")
    def test_without_a_ttl_records_stay(self, backend: Backend, store: Any, opened: ExitStack) -> None:
        store.multi_put(["stays"], [self.a_record(1)])
        brief = closing(opened, backend.open("brief", ttl=self.shortest_ttl))
        brief.multi_put(["goes"], [self.a_record(1)])
        wait_for(
            lambda: brief.multi_get(["goes"]) == [None], "records that have expired", _PATIENCE + self.shortest_ttl
        )
        assert store.multi_get(["stays"]) == [self.a_record(1)]

    @instead_of("ttl")
    def test_a_ttl_is_refused_when_the_state_is_opened(self, backend: Backend) -> None:
        with pytest.raises(ConfigurationError):
            backend.open(self.state, ttl=60)

    # Scan

    @needs("scan")
    @pytest.mark.parametrize("page_size", [1, 7, 1000])
    def test_a_scan_lists_every_key_of_its_state_and_no_other(
        self, backend: Backend, store: Any, opened: ExitStack, page_size: int
    ) -> None:
        keys = [f"k{i:03}" for i in range(100)] + ["é", "a\\|b", "*", "%", "'"]
        store.multi_put(keys, [self.a_record(1)] * len(keys))
        for name in (f"{self.state}2", self.state[:-1]):
            closing(opened, backend.open(name)).multi_put(["no"], [self.a_record(1)])
        if isinstance(store, capabilities.LedgerStore):
            assert store.swap(b"{}", None, FenceToken(1, 1)) is not None
        if isinstance(store, capabilities.Claims):
            store.claim(1, 0, "me")
        assert scanned(store, page_size) == sorted(keys)
        assert all(store.scan(page_size)), "no page is empty"

    @needs("scan")
    def test_a_scan_of_an_empty_state_has_no_page(self, store: Any) -> None:
        assert list(store.scan(10)) == []

    @needs("scan")
    def test_a_scan_lists_what_is_there_throughout_though_others_write_meanwhile(self, store: Any, other: Any) -> None:
        keys = [f"k{i:03}" for i in range(100)]
        store.multi_put(keys, [self.a_record(1)] * 100)
        seen: set[str] = set()
        for number, page in enumerate(store.scan(7)):
            seen.update(page)
            other.multi_put([f"a{number}", f"z{number}", *keys], [self.a_record(2)] * 102)
        assert set(keys) <= seen

    @instead_of("scan")
    def test_a_reader_is_told_that_the_store_cannot_be_scanned(self, backend: Backend, store: Any) -> None:
        CountingQuery(store, self).run(0, {})
        with open_reader(backend, self.state) as reader, pytest.raises(UsageError, match="scanned"):
            reader.scan()

    # States

    @needs("states", "conditional_writes")
    def test_the_states_of_a_store_are_listed_each_once_with_its_ledger(
        self, backend: Any, store: Any, opened: ExitStack
    ) -> None:
        assert [state for page in backend.states() for state in page] == []
        ledgers = {name: f'{{"state": "{name}"}}'.encode() for name in (self.state, f"{self.state}2", "a-b.c", "z")}
        for name, ledger in ledgers.items():
            one = closing(opened, backend.open(name))
            assert one.swap(ledger, None, FenceToken(1, 1)) is not None
            one.multi_put(["a", "b"], [self.a_record(1, 1), self.a_record(2, 1)])
            if isinstance(one, capabilities.Claims):
                one.claim(1, 0, "me")
            if isinstance(one, capabilities.Reports):
                one.keep_report(b"{}", 10)
        closing(opened, backend.open("no-ledger")).multi_put(["a"], [self.a_record(1)])
        assert sorted(state for page in backend.states() for state in page) == sorted(ledgers.items())
        changed = b'{"state": "' + self.state.encode() + b'", "more": 1}'
        assert store.swap(changed, store.load()[1], FenceToken(1, 2)) is not None
        assert dict(state for page in backend.states() for state in page) == ledgers | {self.state: changed}

    @needs("snapshots", "conditional_writes", "scan")
    def test_a_snapshot_shows_one_moment_whatever_is_written_meanwhile(
        self, backend: Any, store: Any, opened: ExitStack
    ) -> None:
        store.multi_put(["a", "b"], [self.a_record(1), self.a_record(1)])
        version = store.swap(b"first", None, FenceToken(1, 1))
        frozen = closing(opened, backend.open_snapshot(self.state))
        assert frozen.load()[0] == b"first"
        assert store.swap(b"second", version, FenceToken(1, 2)) is not None
        store.multi_put(["b", "c"], [self.a_record(2), self.a_record(2)])
        assert frozen.load()[0] == b"first"
        assert frozen.multi_get(["a", "b", "c"]) == [self.a_record(1), self.a_record(1), None]
        assert scanned(frozen, 1) == ["a", "b"]
        with pytest.raises(UsageError):
            frozen.multi_put(["a"], [self.a_record(3)])
        frozen.close()
        with pytest.raises(UsageError):
            frozen.load()
        assert store.multi_get(["a", "b", "c"]) == [self.a_record(1), self.a_record(2), self.a_record(2)]
        again = closing(opened, backend.open_snapshot(self.state))
        assert again.load()[0] == b"second"
        assert scanned(again, 1) == ["a", "b", "c"]

    @instead_of("states")
    def test_who_lists_the_states_is_told_that_the_store_cannot(self, backend: Backend) -> None:
        with pytest.raises(UsageError, match="list its states"):
            list_states(backend)
