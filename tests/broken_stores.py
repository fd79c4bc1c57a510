"""Stores that are wrong in one way each, and their contract. Run by test_contract_kit.py, which knows what has to fail.

Each is the memory store, or one of the right stores below, with one defect. The kit has to pass all that is right
and find each defect; so nothing here is collected in an ordinary run.
"""

from __future__ import annotations

import json
import secrets
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import pytest

from mapstate.backends.memory import MemoryStore
from mapstate.backing_map import Fence, FenceToken, check_lengths
from mapstate.errors import ConfigurationError, CorruptRecordError, FencedError, StoreUnavailableError, TooLargeError
from mapstate.testing.contracts import StoreContract

_stores: dict[tuple[str, str], Any] = {}


@dataclass(frozen=True)
class MadeBackend:
    """Opens stores of a class: one per name and state, all live instances alike."""

    store: type[MemoryStore]
    name: str = field(default_factory=lambda: secrets.token_hex(8))
    has_ttl: bool = False

    shared_between_processes = False

    def open(self, state: str, *, ttl: float | None = None) -> Any:
        if ttl is not None and not self.has_ttl:
            raise ConfigurationError("no ttl")
        store = _stores.setdefault((self.name, self.place(state)), self.store())
        store.ttl = ttl
        return store

    def place(self, state: str) -> str:
        return state


class SideDoor:
    def __init__(self, backend: MadeBackend) -> None:
        self._backend = backend

    def read(self, state: str, key: str) -> bytes | None:
        store = _stores.get((self._backend.name, state))
        return None if store is None else store.visible().get(key)

    def write(self, state: str, key: str, record: bytes) -> None:
        self._backend.open(state)._records[key] = record


class RightStore(MemoryStore):
    """With a limit, and in reach of an outage: what a defect is made from. Passes everything."""

    limit = 5000
    down = False

    def visible(self) -> dict[str, bytes]:
        return self._records

    def __getattribute__(self, name: str) -> Any:
        calls = ("multi_get", "multi_put", "load", "swap", "claim", "scan", "put_fenced")
        if name in calls and object.__getattribute__(self, "down"):
            return self.out_of_reach
        return object.__getattribute__(self, name)

    def out_of_reach(self, *_: Any) -> Any:
        raise StoreUnavailableError("out of reach")

    def multi_put(self, keys, values):
        self.check(keys, values)
        super().multi_put(keys, values)

    def put_fenced(self, token, keys, values):
        self.check(keys, values)
        super().put_fenced(token, keys, values)

    def check(self, keys, values):
        for key, value in zip(keys, values, strict=False):
            if len(value) > self.limit:
                raise TooLargeError(f"{key!r}: {len(value)} bytes")


class ExpiringStore(RightStore):
    """Drops records ``ttl`` seconds after their last write. Passes everything."""

    ttl: float | None = None

    def __init__(self):
        super().__init__()
        self.ends: dict[str, float] = {}

    def visible(self):
        for key, end in list(self.ends.items()):
            if end < time.monotonic():
                self._records.pop(key, None)
                del self.ends[key]
        return self._records

    def multi_get(self, keys):
        self.visible()
        return super().multi_get(keys)

    def multi_put(self, keys, values):
        super().multi_put(keys, values)
        self.prolong(keys)

    def put_fenced(self, token, keys, values):
        super().put_fenced(token, keys, values)
        self.prolong(keys)

    def prolong(self, keys):
        for key in keys:
            if self.ttl is not None:
                self.ends[key] = time.monotonic() + self.ttl


class SpreadStore(RightStore):
    """Three fences apart from the ledger, each for a part of the records. Passes everything."""

    def __init__(self):
        super().__init__()
        self.at: list[FenceToken | None] = [None] * 3

    def swap(self, record, expected, fence):
        claims = dict(self._claims)
        version = super().swap(record, expected, fence)
        if not fence.closed:
            self._claims = claims
        return version

    swap_all = None  # the fences of several states do not move in one write

    def fences(self):
        return [Fence(one) for one in self.at]

    def move_fences(self, before, after):
        self.at = [after if one == was else one for one, was in zip(self.at, before, strict=True)]
        return self.fences()

    def drop(self, expected, token):
        yield from super().drop(expected, token)
        self.at = [None] * 3

    def part_of(self, key):
        return len(key) and ord(key[-1]) % 3

    def put_fenced(self, token, keys, values):
        check_lengths(keys, values, "values")
        self.check(keys, values)
        with self._lock:
            self.check_parts(token, keys)
            self._records.update(zip(keys, values, strict=True))

    def rewrite_fenced(self, token, keys, values):
        with self._lock:
            self.check_parts(token, keys)
            self._fence = token
        super().rewrite_fenced(token, keys, values)

    def check_parts(self, token, keys):
        for key in keys:
            self._fence = self.at[self.part_of(key)]
            self._check_fence(token)


class Base(StoreContract):
    store_class: type[MemoryStore] = RightStore
    backend_class = MadeBackend
    max_value_bytes = 5000
    shortest_ttl = 0.2
    without = {
        "ledger_reads": "the memory store has none",
        "ttl": "the memory store has none",
        "shared_between_processes": "the memory store has none",
    }

    @pytest.fixture
    def backend(self):
        return self.backend_class(self.store_class, has_ttl="ttl" not in self.without)

    @pytest.fixture
    def unreachable(self):
        class Down(self.store_class):
            down = True

        return self.backend_class(Down)

    @pytest.fixture
    def side_door(self, backend):
        return SideDoor(backend)


class TestRight(Base):
    pass


class TestSpread(Base):
    store_class = SpreadStore
    without = Base.without | {"fence_with_ledger": "three fences", "joint_ledgers": "left out"}


class TestExpiring(Base):
    store_class = ExpiringStore
    without = {name: why for name, why in Base.without.items() if name != "ttl"}


# Get


class WrongOrder(RightStore):
    def multi_get(self, keys):
        return super().multi_get(sorted(keys))


class TestWrongOrder(Base):
    store_class = WrongOrder


class RepeatedKeysAnsweredOnce(RightStore):
    def multi_get(self, keys):
        return super().multi_get(list(dict.fromkeys(keys)))


class TestRepeatedKeysAnsweredOnce(Base):
    store_class = RepeatedKeysAnsweredOnce


class LeavesOutAbsentKeys(RightStore):
    def multi_get(self, keys):
        found = super().multi_get(keys)
        return [one for one in found if one is not None] or found


class TestLeavesOutAbsentKeys(Base):
    store_class = LeavesOutAbsentKeys


class EmptyIsAbsent(RightStore):
    def multi_get(self, keys):
        return [one or None for one in super().multi_get(keys)]


class TestEmptyIsAbsent(Base):
    store_class = EmptyIsAbsent


class FailsWithoutKeys(RightStore):
    def multi_get(self, keys):
        if not keys:
            raise ValueError("IN () is no SQL")
        return super().multi_get(keys)


class TestFailsWithoutKeys(Base):
    store_class = FailsWithoutKeys


@dataclass(frozen=True)
class CachingBackend(MadeBackend):
    def open(self, state, *, ttl=None):
        return OwnCache(super().open(state, ttl=ttl))


class OwnCache:
    """In front of one instance. Others do not know of it."""

    def __init__(self, store):
        self._store = store
        self._cache = {}
        for name in ("load", "swap", "writer", "claim", "scan", "keep_report", "reports", "drop"):
            setattr(self, name, getattr(store, name))

    def multi_get(self, keys):
        for key, found in zip(keys, self._store.multi_get(keys), strict=True):
            self._cache.setdefault(key, found)
        return [self._cache[key] for key in keys]

    def multi_put(self, keys, values):
        self._store.multi_put(keys, values)
        self._cache.update(zip(keys, values, strict=True))


class TestReadsItsOwnCache(Base):
    without = Base.without | {"joint_ledgers": "left out"}
    backend_class = CachingBackend

    @pytest.fixture
    def side_door(self, backend):
        return SideDoor(MadeBackend(self.store_class, backend.name))


# Put


class DropsOneKey(RightStore):
    """Where a chunk goes out in parts, the parts do not meet."""

    def multi_put(self, keys, values):
        check_lengths(keys, values, "values")
        parts = [slice(at, at + 1000) for at in range(0, len(keys), 1001)]
        for part in parts:
            super().multi_put(keys[part], values[part])


class TestDropsOneKey(Base):
    store_class = DropsOneKey


class FirstRecordOfARepeatedKeyStays(RightStore):
    def multi_put(self, keys, values):
        check_lengths(keys, values, "values")
        first = {}
        for key, value in zip(keys, values, strict=True):
            first.setdefault(key, value)
        super().multi_put(list(first), list(first.values()))


class TestFirstRecordOfARepeatedKeyStays(Base):
    store_class = FirstRecordOfARepeatedKeyStays


class TakesTheShorterLength(RightStore):
    def multi_put(self, keys, values):
        shorter = min(len(keys), len(values))
        super().multi_put(keys[:shorter], values[:shorter])


class TestTakesTheShorterLength(Base):
    store_class = TakesTheShorterLength


class PartialPutWithoutRaising(RightStore):
    def multi_put(self, keys, values):
        check_lengths(keys, values, "values")
        fit = [(key, value) for key, value in zip(keys, values, strict=True) if len(value) <= self.limit]
        super().multi_put([key for key, _ in fit], [value for _, value in fit])


class TestPartialPutWithoutRaising(Base):
    store_class = PartialPutWithoutRaising


class RaisesAfterAPartialPut(RightStore):
    def multi_put(self, keys, values):
        check_lengths(keys, values, "values")
        for key, value in zip(keys, values, strict=True):
            super().multi_put([key], [value])


class TestRaisesAfterAPartialPut(Base):
    store_class = RaisesAfterAPartialPut


class SwallowsAFailedPut(RightStore):
    def out_of_reach(self, *arguments):
        if len(arguments) == 2:  # keys and values
            return None
        return super().out_of_reach()


class TestSwallowsAFailedPut(Base):
    store_class = SwallowsAFailedPut


class AnswersNoneWhereItFails(RightStore):
    def out_of_reach(self, *arguments):
        if len(arguments) == 1 and isinstance(arguments[0], list):
            return [None] * len(arguments[0])
        return super().out_of_reach()


class TestAnswersNoneWhereItFails(Base):
    store_class = AnswersNoneWhereItFails


class Mangles(RightStore):
    """Changes each record on its way in."""

    def mangled(self, value: bytes) -> bytes:
        raise NotImplementedError

    def multi_put(self, keys, values):
        super().multi_put(keys, [self.mangled(value) for value in values])

    def put_fenced(self, token, keys, values):
        super().put_fenced(token, keys, [self.mangled(value) for value in values])


class TruncatesAtNul(Mangles):
    def mangled(self, value):
        return value.partition(b"\0")[0]


class TestTruncatesAtNul(Base):
    store_class = TruncatesAtNul


class IntToFloat(Mangles):
    """What is JSON is taken for JSON, with the numbers of JavaScript."""

    def mangled(self, value):
        try:
            numbers = json.loads(value, parse_int=lambda text: int(float(text)))
        except ValueError:
            return value
        exact = json.loads(value) == numbers
        return value if exact else json.dumps(numbers, separators=(",", ":")).encode()


class TestIntToFloat(Base):
    store_class = IntToFloat


class WrongInBothDirections(Mangles):
    """Reads what it wrote, and nobody else can."""

    def mangled(self, value):
        return value[::-1]

    def multi_get(self, keys):
        return [None if one is None else one[::-1] for one in super().multi_get(keys)]

    def rewrite_fenced(self, token, keys, values):
        super().rewrite_fenced(token, keys, [None if value is None else value[::-1] for value in values])


class TestWrongInBothDirections(Base):
    store_class = WrongInBothDirections


class KeysWithoutCase(RightStore):
    def multi_get(self, keys):
        return super().multi_get([key.lower() for key in keys])

    def multi_put(self, keys, values):
        super().multi_put([key.lower() for key in keys], values)


class TestKeysWithoutCase(Base):
    store_class = KeysWithoutCase


# Names and recipes


@dataclass(frozen=True)
class OneForAllNames(MadeBackend):
    def place(self, state):
        return state.lower()


class TestSharesStateBetweenNames(Base):
    backend_class = OneForAllNames


@dataclass(frozen=True)
class HoldsAClient(MadeBackend):
    client: Any = None

    def open(self, state, *, ttl=None):
        object.__setattr__(self, "client", threading.Lock())  # as a socket: it does not travel
        return super().open(state, ttl=ttl)


class TestHoldsAClientInTheRecipe(Base):
    backend_class = HoldsAClient


class ComparesByIdentity(MadeBackend):
    __eq__ = object.__eq__
    __hash__ = object.__hash__


class TestRecipeComparesByIdentity(Base):
    backend_class = ComparesByIdentity


@dataclass(frozen=True)
class ShowsItsPassword(MadeBackend):
    password: str = "hunter2"


class TestShowsItsPassword(Base):
    backend_class = ShowsItsPassword
    secret = "hunter2"


class TestDeclaresWhatItDoesNotHave(Base):
    without = {name: why for name, why in Base.without.items() if name != "ledger_reads"}


class TestHasWhatItDoesNotDeclare(Base):
    without = {**Base.without, "scan": "said to have none"}


# Expiry


class IgnoresTheTtl(ExpiringStore):
    def prolong(self, keys):
        pass


class TestIgnoresTheTtl(TestExpiring):
    store_class = IgnoresTheTtl


class LosesTheTtlOfFencedPuts(ExpiringStore):
    def put_fenced(self, token, keys, values):
        RightStore.put_fenced(self, token, keys, values)


class TestLosesTheTtlOfFencedPuts(TestExpiring):
    store_class = LosesTheTtlOfFencedPuts


class ExpiresFromTheFirstWrite(ExpiringStore):
    def prolong(self, keys):
        super().prolong([key for key in keys if key not in self.ends])


class TestExpiresFromTheFirstWrite(TestExpiring):
    store_class = ExpiresFromTheFirstWrite


# Ledger, fence, claims


class SwapsWithoutComparing(RightStore):
    def swap(self, record, expected, fence):
        found = self.load()
        return super().swap(record, None if found is None else found[1], fence)


class TestSwapsWithoutComparing(Base):
    store_class = SwapsWithoutComparing


class ASwapThatLosesMovesTheFence(RightStore):
    def swap(self, record, expected, fence):
        version = super().swap(record, expected, fence)
        self._fence = fence
        return version


class TestASwapThatLosesMovesTheFence(Base):
    store_class = ASwapThatLosesMovesTheFence


class IgnoresTheFence(RightStore):
    def _check_fence(self, token):
        pass


class TestIgnoresTheFence(Base):
    store_class = IgnoresTheFence


class LooksAtTheEpochOnly(RightStore):
    def _check_fence(self, token):
        if self._fence is None or self._fence.epoch != token.epoch or token.closed or self._fence.closed:
            super()._check_fence(token)


class TestLooksAtTheEpochOnly(Base):
    store_class = LooksAtTheEpochOnly


class ChecksTheFenceBeforeItWrites(RightStore):
    """Two steps where there has to be one. What comes between them comes here for certain, once several write."""

    def __init__(self):
        super().__init__()
        self.writers = set()
        self.checked, self.overtaken = threading.Event(), threading.Event()

    def swap(self, record, expected, fence):
        if len(self.writers) > 1:
            self.checked.wait(5)
        return super().swap(record, expected, fence)

    def put_fenced(self, token, keys, values):
        with self._lock:
            self._check_fence(token)
        self.writers.add(threading.get_ident())
        if len(self.writers) > 1:
            self.checked.set()
            end = time.monotonic() + 0.2
            while self._fence == token and time.monotonic() < end:
                time.sleep(0.001)
            if self._fence != token:
                self.overtaken.wait(5)
        self.multi_put(keys, values)
        if self._fence == token and token.txid == 8:
            self.overtaken.set()


class TestChecksTheFenceBeforeItWrites(Base):
    store_class = ChecksTheFenceBeforeItWrites


class IgnoresTheNonce(RightStore):
    def _check_fence(self, token):
        super()._check_fence(token if self._fence is None else token._replace(nonce=self._fence.nonce))


class TestIgnoresTheNonce(Base):
    store_class = IgnoresTheNonce


class OrdersTheTokens(RightStore):
    def _check_fence(self, token):
        if token.closed or self._fence is None or self._fence.txid >= token.txid:
            super()._check_fence(token)


class TestOrdersTheTokens(Base):
    store_class = OrdersTheTokens


class MovesFencesWithoutComparing(SpreadStore):
    def move_fences(self, before, after):
        return super().move_fences(self.at, after)


class TestMovesFencesWithoutComparing(TestSpread):
    store_class = MovesFencesWithoutComparing


class OneFenceGuardsAll(SpreadStore):
    def drop(self, expected, token):
        yield from super().drop(expected, token)
        self.at = [None] * 3

    def part_of(self, key):
        return 0


class TestOneFenceGuardsAll(TestSpread):
    store_class = OneFenceGuardsAll


class DropsClaimsTooEarly(SpreadStore):
    def swap(self, record, expected, fence):
        return RightStore.swap(self, record, expected, fence)


class TestDropsClaimsTooEarly(TestSpread):
    store_class = DropsClaimsTooEarly


class AWriterAhead:
    """Does a put when the next one comes, or when it is flushed, if a read is under way. A right one."""

    def __init__(self, writer):
        self.writer, self.asked, self.sent = writer, [], None

    def read_ahead(self, keys):
        self.asked.append(list(keys))

    def multi_get(self, keys):
        if self.asked and self.asked[0] == list(keys):
            self.asked.pop(0)
        else:
            self.flush()
        return self.writer.multi_get(keys)

    def multi_put(self, keys, values):
        check_lengths(keys, values, "values")
        self.flush()
        self.sent = (list(keys), list(values))
        if not self.asked:
            self.flush()

    def multi_rewrite(self, keys, values):
        self.flush()
        self.writer.multi_rewrite(keys, values)

    def flush(self):
        sent, self.sent = self.sent, None
        if sent is not None:
            self.writer.multi_put(*sent)


class StoreAhead(RightStore):
    writer_class = AWriterAhead

    def writer(self, token):
        return self.writer_class(super().writer(token))


class TestAhead(Base):
    store_class = StoreAhead


class LosesWhatIsUnderWay(StoreAhead):
    class writer_class(AWriterAhead):  # noqa: N801
        def multi_put(self, keys, values):
            self.sent = (list(keys), list(values))
            if not self.asked:
                self.flush()


class TestLosesWhatIsUnderWay(Base):
    store_class = LosesWhatIsUnderWay


class FlushSwallowsWhatItFinds(StoreAhead):
    class writer_class(AWriterAhead):  # noqa: N801
        def flush(self):
            with suppress(FencedError):
                super().flush()

        def multi_put(self, keys, values):
            self.flush()
            if self.asked:
                self.sent = (list(keys), list(values))
            else:
                self.writer.multi_put(keys, values)


class TestFlushSwallowsWhatItFinds(Base):
    store_class = FlushSwallowsWhatItFinds


class ClaimsAlwaysGranted(RightStore):
    def claim(self, txid, partition, holder):
        return holder


class TestClaimsAlwaysGranted(Base):
    store_class = ClaimsAlwaysGranted


class OneClaimForAllPartitions(RightStore):
    def claim(self, txid, partition, holder):
        return super().claim(txid, 0, holder)


class TestOneClaimForAllPartitions(Base):
    store_class = OneClaimForAllPartitions


class ScansItsLedgerToo(RightStore):
    def scan(self, page_size):
        yield from super().scan(page_size)
        if self._ledger is not None:
            yield ["ledger"]


class TestScansItsLedgerToo(Base):
    store_class = ScansItsLedgerToo


class ScanLosesTheLastPage(RightStore):
    def scan(self, page_size):
        pages = list(super().scan(page_size))
        yield from pages[:-1] if len(pages) > 1 else pages


class TestScanLosesTheLastPage(Base):
    store_class = ScanLosesTheLastPage


class ScanEndsAtWhatIsNoRecord(RightStore):
    def scan(self, page_size):
        for page in super().scan(page_size):
            for key in page:
                if not self._records[key].startswith(b"["):
                    raise CorruptRecordError(f"{key!r} is no record", key=key)
            yield page


class TestScanEndsAtWhatIsNoRecord(Base):
    store_class = ScanEndsAtWhatIsNoRecord


class AVacuumMakesRecords(RightStore):
    def rewrite_fenced(self, token, keys, values):
        super().put_fenced(token, keys, [b"" if value is None else value for value in values])
        for key, value in zip(keys, values, strict=True):
            if value is None:
                self._records.pop(key, None)


class TestAVacuumMakesRecords(Base):
    store_class = AVacuumMakesRecords


class DropsWithoutComparing(RightStore):
    def drop(self, expected, token):
        return super().drop(self._version(), token)


class TestDropsWithoutComparing(Base):
    store_class = DropsWithoutComparing


class DropLeavesReports(RightStore):
    def drop(self, expected, token):
        reports = self.reports()
        yield from super().drop(expected, token)
        self._reports = reports


class TestDropLeavesReports(Base):
    store_class = DropLeavesReports
