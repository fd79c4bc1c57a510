"""How many keys a state holds: what the ledger says without a scan, and who notices records that are gone."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from typing import Any

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from openings import opening
from side_doors import RedisClusterSideDoor, RedisPackedSideDoor
from states import START, Job, messy

from mapstate import open_reader
from mapstate.backends import memory, resolve
from mapstate.errors import CorruptRecordError, MissingKeysError, RollbackError, StaleBatchError, UsageError
from mapstate.findings import DistinctKeys
from mapstate.maps import OpaqueMap
from mapstate.operations.adopt import adopt
from mapstate.operations.doctor import examine, recount
from mapstate.operations.drop import drop
from mapstate.operations.vacuum import vacuum
from mapstate.protocol.ledger import Ledger
from mapstate.protocol.ledger_record import Commit, LedgerRecord, encode_ledger
from mapstate.protocol.opening import open_ledger
from mapstate.protocol.stored_ledger import decode_ledger, record_pages
from mapstate.protocol.transitions import begin, commit
from mapstate.protocol.upkeep import begin_operator, commit_correction, commit_vacuum
from mapstate.protocol.upkeep import recount as recounted
from mapstate.protocol.ways_back import rollback, rollback_last
from mapstate.reader.committed import CommittedReads
from mapstate.schema import Field, KeyField

# The arithmetic, as of the ledger alone


def opened(ledger: LedgerRecord | None = None, **changes: Any) -> LedgerRecord:
    return open_ledger(ledger, opening(session="s", **changes))


def done(ledger: LedgerRecord, delta: int | None) -> LedgerRecord:
    after, attempt = begin(ledger, "s", ledger.owners[ledger.owner])
    return commit(
        after, "s", Commit(batch_id=attempt.batch_id, txid=attempt.txid, owner=ledger.owner, keys_delta=delta)
    )


def vacuumed(ledger: LedgerRecord, held: int, *, fenced: bool = True) -> LedgerRecord:
    after, attempt = begin_operator(ledger, "s", "vacuum")
    return commit_vacuum(after, attempt.txid, held=held, fenced=fenced)


def of_before(ledger: LedgerRecord) -> LedgerRecord:
    """As an older mapstate wrote it: it knew of no numbers."""
    plain = json.loads(encode_ledger(ledger))
    for name in ("initial_keys", "has_had_ttl"):
        del plain[name]
    for one in filter(None, (plain["committed"], plain["previous"])):
        del one["keys_delta"], one["keys_held"]
    return decode_ledger(json.dumps(plain).encode(), ledger.state)


@pytest.mark.parametrize("kind", ["opaque", "transactional", "non-transactional"])
def test_a_new_state_holds_nothing_and_each_batch_adds_and_removes(kind):
    ledger, held = opened(type=kind), []
    assert ledger.keys_held() == 0
    for delta in (5, 0, -2, 3, -6):
        ledger = done(ledger, delta)
        held.append(ledger.keys_held())
    assert held == [5, 5, 3, 6, 0]
    assert ledger.last_commit.keys_held == 0
    assert ledger.previous.keys_held == 6


def test_a_batch_that_cannot_tell_makes_the_number_unknown_until_a_vacuum_has_counted():
    ledger = done(done(opened(), 5), None)
    assert ledger.keys_held() is None
    ledger = done(ledger, 3)
    assert ledger.keys_held() is None
    ledger = vacuumed(ledger, 9)
    assert ledger.keys_held() == 9
    assert done(ledger, 2).keys_held() == 11


@pytest.mark.parametrize("fenced", [True, False])
def test_a_vacuum_does_not_change_a_number_that_is_known(fenced):
    assert vacuumed(done(opened(), 5), 3, fenced=fenced).keys_held() == 5


def test_a_commit_that_is_said_twice_counts_its_keys_once():
    after, attempt = begin(done(opened(), 5), "s", 1)
    last = Commit(batch_id=1, txid=attempt.txid, owner="q", keys_delta=2)
    assert commit(commit(after, "s", last), "s", last).keys_held() == 7


def test_a_rollback_goes_back_to_the_number_before():
    ledger = done(done(opened(), 5), 2)
    assert rollback(ledger).keys_held() == 5
    assert done(rollback(ledger), 1).keys_held() == 6
    assert rollback(done(opened(), 5)).keys_held() == 0
    assert rollback(done(vacuumed(done(opened(), None), 4), 1)).keys_held() == 4


def test_a_reset_starts_from_nothing_and_an_adoption_from_what_is_there():
    for before in (done(opened(), 5), done(opened(), None), done(opened(ttl=60.0), 5)):
        assert opened(before, owner="new", on_new_owner="reset").keys_held() == 0
    assert done(opened(done(opened(), 5), owner="new", on_new_owner="adopt"), 1).keys_held() == 6


def test_a_state_with_a_ttl_cannot_tell_and_does_not_learn_it():
    ledger = done(opened(ttl=60.0), 5)
    assert ledger.keys_held() is None
    assert vacuumed(ledger, 5).keys_held() is None
    without = done(opened(vacuumed(ledger, 5), ttl=0), 1)  # what was written before still expires
    assert without.keys_held() is None
    assert vacuumed(without, None).keys_held() is None
    assert vacuumed(without, 6).keys_held() == 6  # it wrote them without a ttl
    with pytest.raises(UsageError, match="has or had a ttl"):
        recounted(without, without, 5)
    assert done(opened(done(opened(), 5), ttl=60.0), 1).keys_held() is None


@pytest.mark.parametrize("new_owner", [False, True])
def test_after_a_failed_attempt_a_non_transactional_state_cannot_tell(new_owner):
    ledger, _ = begin(done(opened(type="non-transactional"), 5), "s", 1)
    assert ledger.keys_held() == 5
    if new_owner:
        ledger = opened(ledger, type="non-transactional", owner="new", on_new_owner="adopt")
        assert ledger.keys_held() is None
    assert done(ledger, 1).keys_held() is None
    first, _ = begin(opened(type="non-transactional"), "s", 0)
    assert done(first, 1).keys_held() is None


@pytest.mark.parametrize("kind", ["opaque", "transactional"])
def test_after_a_failed_attempt_the_other_states_can_tell(kind):
    ledger, _ = begin(done(opened(type=kind), 5), "s", 1)
    assert done(opened(ledger, type=kind), 1).keys_held() == 6


def test_what_an_older_mapstate_wrote_is_read_and_its_number_is_unknown():
    ledger = of_before(done(done(opened(), 5), 2))
    assert (ledger.keys_held(), ledger.has_had_ttl) == (None, False)
    assert done(ledger, 1).keys_held() is None
    assert vacuumed(ledger, 7).keys_held() == 7
    assert of_before(opened()).keys_held() is None
    assert vacuumed(of_before(opened()), 0).keys_held() == 0


def test_a_count_is_taken_only_for_the_contents_that_were_counted():
    ledger = done(opened(), None)
    assert recounted(ledger, ledger, 4).keys_held() == 4
    assert recounted(opened(ledger), ledger, 4).keys_held() == 4
    attempt, _ = begin(ledger, "s", 1)
    assert recounted(attempt, ledger, 4).keys_held() == 4, "what is in flight adds to what was counted"
    for later in (done(ledger, 1), vacuumed(ledger, 3)):
        with pytest.raises(UsageError, match="during the count"):
            recounted(later, ledger, 4)


def test_after_a_recount_the_rollback_of_a_correction_leaves_the_number_unknown():
    """The keys that were lost may be those that the correction had added."""
    ledger, attempt = begin_operator(done(opened(), 5), "s", "correction")
    corrected = commit_correction(ledger, attempt.txid, keys_delta=2)
    assert rollback_last(recounted(corrected, corrected, 7)).keys_held() == 5
    assert rollback_last(recounted(corrected, corrected, 6)).keys_held() is None


def test_the_first_fields_are_those_that_no_record_lacks():
    one, two, three = ((Field(name, "Count", "bigint")) for name in "nmo")
    ledger = opened(opened(fields=(one,)), fields=(one, two))
    assert ledger.first_fields() == {"n", "m"}, "nothing was counted before"
    ledger = opened(done(ledger, 1), fields=(one, two, three))
    assert ledger.first_fields() == {"n", "m"}
    unfenced = vacuumed(ledger, 1, fenced=False)
    assert unfenced.floor > ledger.floor
    assert unfenced.first_fields() == {"n", "m"}, "what a vacuum has rewritten"
    reset = opened(done(ledger, 1), fields=(one, two, three), owner="other", on_new_owner="reset")
    assert reset.first_fields() == {"n", "m", "o"}


def test_keys_are_counted_once_each():
    keys = DistinctKeys()
    assert len(keys) == 0
    keys.update([f"user-{n}" for n in range(5000)])
    keys.update([f"user-{n}" for n in range(3000, 6000)])
    assert len(keys) == 6000
    numbers = DistinctKeys()
    numbers.update(range(-1000, 1000))
    numbers.update([2**61 - 1, -(2**61), "text"])
    numbers.update(range(-5, 5))
    assert len(numbers) == 2003


class Counts(RuleBasedStateMachine):
    """Random attempts, commits, rollbacks, owners and vacuums over records, which are counted beside the ledger."""

    @initialize()
    def create(self) -> None:
        self.ledger = opened()
        self.records: dict[str, Any] = {}

    def multi_get(self, keys: Any) -> list[Any]:
        return [self.records.get(key) for key in keys]

    def multi_put(self, keys: Any, records: Any) -> None:
        self.records.update(zip(keys, records, strict=True))

    def there(self) -> list[str]:
        values = self.ledger.view().values(list(self.records.values()), self.ledger.next_txid)
        return [key for key, value in zip(self.records, values, strict=True) if value is not None]

    @rule(
        values=st.dictionaries(st.sampled_from("abcdef"), st.one_of(st.none(), st.integers(0, 3)), max_size=4),
        commits=st.booleans(),
        tells=st.sampled_from([True, True, True, False]),
    )
    def attempt(self, values: Any, commits: bool, tells: bool) -> None:
        self.ledger, attempt = begin(self.ledger, "s", self.ledger.owners[self.ledger.owner])
        state = OpaqueMap(self, attempt.view)
        state.begin_commit(attempt.txid)
        delta = state.multi_get(list(values)).count(None) - list(values.values()).count(None)
        state.multi_put(list(values), list(values.values()))
        if commits:
            one = Commit(batch_id=attempt.batch_id, txid=attempt.txid, owner=self.ledger.owner)
            one = msgspec.structs.replace(one, keys_delta=delta if tells else None)
            self.ledger = commit(self.ledger, "s", one)
            assert tells or self.ledger.keys_held() is None

    @rule(owner=st.sampled_from(["q", "r"]), how=st.sampled_from(["adopt", "reset"]))
    def open(self, owner: str, how: Any) -> None:
        empty = owner != self.ledger.owner and how == "reset"
        self.ledger = opened(self.ledger, owner=owner, on_new_owner=how)
        assert not empty or self.ledger.keys_held() == 0

    @rule()
    def roll_back(self) -> None:
        with suppress(RollbackError):
            self.ledger = rollback(self.ledger)

    @rule(ends=st.booleans())
    def vacuum(self, ends: bool) -> None:
        if self.ledger.in_flight is not None and self.ledger.in_flight.epoch == self.ledger.epoch:
            return
        there = set(self.there())
        self.ledger, attempt = begin_operator(self.ledger, "s", "vacuum")
        values = attempt.view.values(list(self.records.values()), attempt.txid)
        for (key, record), value in zip(list(self.records.items()), values, strict=True):
            if value is None:
                del self.records[key]
            elif record[0] not in attempt.view:
                self.records[key] = (attempt.txid, value, value)
        if ends:
            self.ledger = commit_vacuum(self.ledger, attempt.txid, held=len(there))
            assert self.ledger.keys_held() is not None

    @invariant()
    def the_number_is_right_or_unknown(self) -> None:
        assert self.ledger.keys_held() in (None, len(self.there()))


Counts.TestCase.settings = settings(max_examples=150, stateful_step_count=30)
TestCounts = Counts.TestCase


# On each store

STORES = ["memory", "sqlite", *(pytest.param(name, marks=pytest.mark.redis) for name in ("string", "hash", "packed"))]
STORES.append(pytest.param("cluster", marks=pytest.mark.redis))


class Stored:
    """A store, and a way to its records that is not mapstate's."""

    def __init__(self, url: str, delete: Callable[[str], object]) -> None:
        self.url = url
        self._delete = delete

    def delete(self, *keys: str) -> None:
        for key in keys:
            self._delete(key)


@pytest.fixture(params=STORES)
def stored(request: Any, tmp_path: Any) -> Any:
    """A store of each kind and layout, empty; the state is ``s``."""
    if request.param == "memory":
        backend: Any = resolve(f"memory://{tmp_path.name}")
        backend.open("s")
        yield Stored(f"memory://{tmp_path.name}", memory._stores[backend.name, "s"]._records.pop)
    elif request.param == "sqlite":

        def delete(key: str) -> None:
            with closing(sqlite3.connect(tmp_path / "s.db")) as db, db:
                assert db.execute("DELETE FROM mapstate_records WHERE state = 's' AND key = ?", (key,)).rowcount == 1

        yield Stored(f"sqlite:///{tmp_path}/s.db", delete)
    elif request.param == "cluster":
        url = request.getfixturevalue("cluster_url")
        with request.getfixturevalue("redis_cluster").client() as client:
            door = RedisClusterSideDoor(client, resolve(url))
            yield Stored(url, lambda key: client.delete(door._name("s", key)))
    else:
        url = f"{request.getfixturevalue('redis_url')}&layout={request.param}"
        url += "&buckets=50" if request.param == "packed" else ""
        backend = resolve(url)
        with request.getfixturevalue("redis_server").client() as client:
            packed = RedisPackedSideDoor(client, backend.prefix, 50)
            ways: dict[str, Callable[[str], object]] = {
                "string": lambda key: client.delete(f"{backend.prefix}s:{key}"),
                "hash": lambda key: client.hdel(f"{backend.prefix}s", key),
                "packed": lambda key: client.hdel(packed._name("s", key), key),
            }
            yield Stored(url, ways[request.param])


def keys_of(url: Any) -> Any:
    return {one.subject: one for one in examine(url, "s")}["keys"]


def names(count: int) -> dict[str, int]:
    return {f"user-{n}": n + 1 for n in range(count)}


def test_ten_records_that_are_deleted_are_noticed_by_doctor_and_by_a_whole_scan(stored):
    job = Job(stored.url)
    job.batch(**names(120))
    job.batch(**dict.fromkeys([f"user-{n}" for n in range(20)]))
    with open_reader(stored.url, "s") as reader:
        assert reader.key_count() == len(dict(reader.scan(page_size=7))) == 100
        assert keys_of(stored.url)[:3] == ("ok", "keys", "100 keys")
        stored.delete(*(f"user-{n}" for n in range(50, 60)))
        seen = []
        with pytest.raises(MissingKeysError, match="10 of 100 keys are missing.*all 90 that are there") as caught:
            seen.extend(reader.scan(page_size=7))
        assert (caught.value.found, caught.value.expected, len(dict(seen))) == (90, 100, 90)
        assert reader.key_count() == 100
        assert reader.count_keys()[:2] == (90, 100)
    found = keys_of(stored.url)
    assert (found.severity, found.found) == ("error", "90 keys, and the ledger says 100: 10 missing")
    assert "recount" in found.advice
    job.batch(**{"user-70": 1})  # a batch that does not meet them changes nothing
    assert keys_of(stored.url).severity == "error"


def test_a_loss_that_is_accepted_by_a_recount_is_said_no_more(stored, caplog):
    Job(stored.url).batch(**names(30))
    stored.delete("user-3", "user-4")
    vacuum(stored.url, "s")  # does not cover it up
    assert "the vacuum found 28 keys, and the ledger says 30" in caplog.text
    assert keys_of(stored.url).severity == "error"
    assert recount(stored.url, "s", dry_run=True)[:2] == (28, 30)
    assert keys_of(stored.url).severity == "error"
    assert recount(stored.url, "s").found == 28
    assert keys_of(stored.url).severity == "ok"
    with open_reader(stored.url, "s") as reader:
        assert len(dict(reader.scan())) == reader.key_count() == 28
    job = Job(stored.url)
    job.batch(**{"user-3": 1, "new": 1})
    assert keys_of(stored.url).found == "30 keys"


def test_a_vacuum_counts_a_state_whose_number_is_unknown(stored):
    truth = messy(stored.url)
    job = Job(stored.url)
    known = job.ledger.record.keys_held()
    attempt = job.attempt(**dict(truth, more=1))
    job.ledger.commit(Commit(batch_id=job.next, txid=attempt.txid, owner="q"))
    assert (known, job.ledger.record.keys_held()) == (len(truth), None)
    assert keys_of(stored.url)[:3] == ("warning", "keys", "4 keys; the ledger does not know how many")
    with open_reader(stored.url, "s") as reader:
        assert len(dict(reader.scan())) == 4  # and says nothing
    vacuum(stored.url, "s", page_size=2)
    assert keys_of(stored.url)[:3] == ("ok", "keys", "4 keys")


def test_what_is_no_key_any_more_does_not_count(stored):
    """Tombstones, phantoms of attempts that died, and records of before a reset."""
    truth = messy(stored.url)
    assert keys_of(stored.url)[:3] == ("ok", "keys", f"{len(truth)} keys")
    job = Job(stored.url)
    attempt = job.attempt(kept=None, touched=None, phantom=1)
    assert keys_of(stored.url).severity == "ok"  # in flight
    job.ledger.commit(Commit(batch_id=job.next, txid=attempt.txid, owner="q", keys_delta=job.delta))
    assert keys_of(stored.url)[:3] == ("ok", "keys", "2 keys")
    Ledger(job.store, "s").rollback()
    assert keys_of(stored.url)[:3] == ("ok", "keys", f"{len(truth)} keys")
    Job(stored.url, owner="new", on_new_owner="reset").batch(kept=1)
    assert keys_of(stored.url)[:3] == ("ok", "keys", "1 keys")
    vacuum(stored.url, "s")
    assert keys_of(stored.url)[:3] == ("ok", "keys", "1 keys")


@pytest.fixture
def url(tmp_path: Any) -> str:
    return f"sqlite:///{tmp_path}/s.db"


def test_a_scan_under_two_ledgers_compares_nothing_and_one_beside_an_attempt_does(url):
    job = Job(url)
    job.batch(**names(30))
    with open_reader(url, "s") as reader:
        pages = reader.scan(page_size=3)
        assert next(pages)
        job.attempt(**{"user-29": 100, "one more": 1})
        assert sum(1 for _ in pages) == 29
        with closing(sqlite3.connect(url.removeprefix("sqlite:///"))) as db, db:
            db.execute("DELETE FROM mapstate_records WHERE key = 'user-7'")
        with pytest.raises(MissingKeysError, match="1 of 30"):
            list(reader.scan())  # whatever is in flight, committed values are those of one moment
        pages = reader.scan(page_size=3)
        assert next(pages)
        job.batch(**{"user-1": 2})
        assert sum(1 for _ in pages) == 28  # one fewer than the ledgers say, but which of them


@pytest.mark.parametrize("how", ["reset", "made anew"])
@pytest.mark.parametrize("key", ["user-29", "a key in front of the cursor"])
def test_a_scan_over_a_state_that_is_another_one_by_now_ends_with_an_error(url, monkeypatch, how, key):
    Job(url).batch(**names(30))
    with open_reader(url, "s") as reader:
        pages = reader.scan(page_size=3)
        assert next(pages)
        if how == "made anew":
            drop(url, "s")
            monkeypatch.setattr("states.START", 2 * START)
        Job(url, owner="other", on_new_owner="reset").batch(**{key: 1})
        with pytest.raises(StaleBatchError, match="'s' was reset, dropped or made anew while it was scanned"):
            list(pages)
        assert dict(reader.scan()) == {(key,): {"n": 1}}


@pytest.mark.parametrize("read", ["scan", "to_arrow", "count_keys"])
def test_a_scan_whose_keys_were_listed_before_a_reset_ends_with_an_error(url, monkeypatch, read):
    Job(url).batch(**names(3))

    def listed_before(*args: Any, **options: Any) -> Iterator[Any]:
        pages = record_pages(*args, **options)
        first = next(pages)
        Job(url, owner="other", on_new_owner="reset").batch(**names(30))
        yield first
        yield from pages

    monkeypatch.setattr("mapstate.reader.committed.record_pages", listed_before)
    with open_reader(url, "s") as reader, pytest.raises(StaleBatchError, match="Scan it from the start"):
        list(getattr(reader, read)())


def test_a_scan_from_a_cursor_over_a_reset_gives_out_no_page(url):
    Job(url).batch(**names(30))
    with open_reader(url, "s") as reader:
        page = next(reader.pages_as_of(3))
        pages = reader.pages_as_of(3, cursor=page.cursor)  # the cursor is verified
        Job(url, owner="other", on_new_owner="reset").batch(**names(30))
        with pytest.raises((StaleBatchError, UsageError), match="Scan it from the start|scan from the start"):
            next(pages)


def test_a_scan_from_a_cursor_knows_where_it_began_whatever_else_its_reader_reads(url):
    Job(url).batch(**names(30))
    with open_reader(url, "s") as reader:
        page = next(reader.pages_as_of(3))
        pages = reader.pages_as_of(3, cursor=page.cursor)
        Job(url, owner="other", on_new_owner="reset").batch(**names(30))
        assert reader.get("user-1")
        with pytest.raises((StaleBatchError, UsageError), match="Scan it from the start|scan from the start"):
            next(pages)


def test_a_scan_without_a_fence_notices_a_reset_there_and_back_and_nothing_else(stand_in):
    backend = stand_in.backend()
    Job(backend).batch(**names(30))
    with open_reader(backend, "s") as reader:
        pages = reader.scan(page_size=3)
        assert next(pages)
        other = Job(backend, owner="other", on_new_owner="adopt_unchecked")
        other.attempt(orphan=1)
        assert vacuum(backend, "s", take_over=True).txid is not None
        assert sum(1 for _ in pages) == 29
        other.ledger.ledgers.open()
        other.batch(**names(30))
        pages = reader.scan(page_size=3)
        assert next(pages)
        Ledger(other.store, "s").rollback()
        assert vacuum(backend, "s").txid is not None
        assert sum(1 for _ in pages) == 29
        pages = reader.scan(page_size=3)
        assert next(pages)
        for owner in ("q", "other"):
            Job(backend, owner=owner, on_new_owner="reset").batch(**names(30))
        with pytest.raises(StaleBatchError, match="was reset"):
            list(pages)


def test_a_table_has_the_columns_of_the_ledger_with_which_it_was_begun(url, monkeypatch):
    Job(url).batch(a=1, b=2)
    opened = CommittedReads.opened

    def made_anew_behind(reads: CommittedReads, *, newest: bool = False) -> Any:
        ledger = opened(reads, newest=newest)
        if newest:
            monkeypatch.undo()
            drop(url, "s")
            monkeypatch.setattr("states.START", 2 * START)
            Job(url, fields=(Field("m", "Sum(m)", "bigint"),)).batch(a=10, b=20)
        return ledger

    with open_reader(url, "s") as reader:
        monkeypatch.setattr(CommittedReads, "opened", made_anew_behind)
        with pytest.raises(StaleBatchError, match="was reset, dropped or made anew"):
            reader.to_arrow()


def test_a_scan_goes_on_where_another_query_takes_the_state_over(url):
    Job(url).batch(**names(30))
    with open_reader(url, "s") as reader:
        pages = reader.scan(page_size=3)
        assert next(pages)
        Job(url, owner="other", on_new_owner="adopt_unchecked").batch(**{"user-29": 1})
        assert sum(1 for _ in pages) == 29


def test_a_scan_that_is_left_early_or_reads_the_latest_compares_nothing(url):
    Job(url).batch(**names(30))
    with closing(sqlite3.connect(url.removeprefix("sqlite:///"))) as db, db:
        db.execute("DELETE FROM mapstate_records WHERE key = 'user-7'")
    with open_reader(url, "s") as reader:
        assert next(reader.scan())
    with open_reader(url, "s", consistency="latest") as reader:
        assert len(dict(reader.scan())) == 29
        assert reader.count_keys()[:2] == (29, None)


def test_more_keys_than_the_ledger_says_are_a_warning(url):
    job = Job(url)
    job.batch(a=1, b=2)
    job.store.multi_put(["c"], [b"[1000,5,null]"])
    found = keys_of(url)
    assert (found.severity, found.found) == ("warning", "3 keys, and the ledger says 2: 1 too many")
    with open_reader(url, "s") as reader:
        assert len(dict(reader.scan())) == 3


def test_a_state_with_a_ttl_says_that_it_cannot_tell(tmp_path, cli):
    url = f"memory://{tmp_path.name}"
    job = Job(url, has_ttl=True)
    job.batch(a=1, b=2)
    found = keys_of(url)
    assert found[:3] == ("ok", "keys", "2 keys; a state with a ttl cannot tell how many it should hold")
    assert "not known: the state has or had a ttl" in cli("ledger", url, "s").stdout
    with open_reader(url, "s") as reader:
        assert reader.key_count() is None


def test_the_doctor_goes_on_where_a_record_cannot_be_read_and_can_leave_the_count_out(url):
    job = Job(url)
    job.batch(a=1)
    job.store.multi_put(["b"], [b"no record"])
    found = {one.subject: one for one in examine(url, "s")}
    assert (found["records"].severity, found["dead"].severity) == ("error", "ok")
    assert "'b'" in found["records"].found
    assert "keys" not in found, "the number of keys means nothing where one cannot be read"
    assert "keys" not in {one.subject for one in examine(url, "s", count_keys=False)}
    with pytest.raises(CorruptRecordError):
        recount(url, "s")


def test_batches_during_each_count_are_said(url):
    job = Job(url)
    job.batch(**names(10))

    class Busy:
        shared_between_processes = True
        reads = 0

        def open(self, state: str, *, ttl: float | None = None) -> Any:
            store: Any = resolve(url).open(state, ttl=ttl)
            plain = store.scan

            def scan(page_size: int) -> Any:
                Busy.reads += 1
                yield from plain(page_size)
                job.batch(**{"user-1": Busy.reads})
                yield ["user-1"]

            store.scan = scan
            return store

    found = {one.subject: one for one in examine(Busy(), "s")}["keys"]
    assert (found.severity, Busy.reads) == ("warning", 1 + 3)  # the first looks at the records themselves
    assert "not compared: batches were at work" in found.found


@pytest.fixture
def cli() -> Callable[..., Any]:
    from typer.testing import CliRunner

    from mapstate.cli.commands import app

    return lambda *command, **how: CliRunner().invoke(app, list(command), **how)


def test_the_operator_sees_the_number_recounts_it_and_gets_an_exit_code(url, cli):
    Job(url).batch(**names(30))
    assert "keys held  30" in cli("ledger", url, "s").stdout
    assert json.loads(cli("ledger", url, "s", "--json").stdout)["keys_held"] == 30
    assert cli("doctor", url, "s").exit_code == 0
    with closing(sqlite3.connect(url.removeprefix("sqlite:///"))) as db, db:
        db.execute("DELETE FROM mapstate_records WHERE key = 'user-7'")
    failed = cli("doctor", url, "s")
    assert (failed.exit_code, "29 keys, and the ledger says 30: 1 missing" in failed.stdout) == (1, True)
    assert cli("doctor", url, "s", "--no-count-keys").exit_code == 0
    asked = cli("recount", url, "s", input="n\n")
    assert (asked.exit_code, "29 keys are there, and the ledger says 30." in asked.stdout) == (1, True)
    assert cli("doctor", url, "s").exit_code == 1
    assert "Done: the state holds 29 keys." in cli("recount", url, "s", "--yes").stdout
    assert cli("doctor", url, "s").exit_code == 0
    assert cli("recount", url, "s").stdout == "29 keys are there, and the ledger says 29.\n"


def test_an_adopted_state_knows_its_keys_when_they_were_counted(url):
    """Not before: what storm-redis wrote may expire."""
    store = resolve(url).open("s")
    store.multi_put(["a", "b", "gone"], [b"[5,1,null]", b"[7,2,1]", b"[6,null,3]"])
    keys, fields = (KeyField("user_id", "string"),), (Field("visits", "Count", "bigint"),)
    adopt(url, "s", type="opaque", keys=keys, fields=fields)
    with open_reader(url, "s") as reader:
        assert reader.key_count() is None
        recount(url, "s")
        assert reader.key_count() == len(dict(reader.scan())) == 2


def test_numbers_survive_the_ledgers_json():
    ledger = done(opened(), 5)
    assert decode_ledger(encode_ledger(ledger), ledger.state) == ledger
    assert msgspec.json.decode(encode_ledger(ledger))["committed"]["keys_held"] == 5


def test_a_recount_holds_for_a_rollback_and_beside_an_attempt_that_was_left():
    ledger = done(done(opened(), 100), 5)
    counted = recounted(ledger, ledger, 95)
    assert counted.keys_held() == 95
    assert rollback(counted).keys_held() is None, "which batch had added the lost ones nobody knows"
    left = begin(ledger, ledger.session, 2)[0]
    assert recounted(left, left, 95).keys_held() == 95
    assert rollback(recounted(ledger, ledger, 105)).keys_held() == 100
    only = done(opened(), 100)
    assert rollback(recounted(only, only, 90)).keys_held() == 0
