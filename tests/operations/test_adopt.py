"""Taking over what storm-redis wrote: the same Redis keys before and after, and right values on top."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from typing import Any

import pytest
import redis
from one_ledger import OneLedger
from servers import GivenRedis
from states import Job, contents
from typer.testing import CliRunner

from mapstate import open_reader
from mapstate.backends import resolve
from mapstate.cli.commands import app
from mapstate.errors import (
    ConfigurationError,
    CorruptRecordError,
    DuplicateNameError,
    KeyEncodingError,
    StateOwnershipError,
    UsageError,
)
from mapstate.maps import NonTransactionalMap, OpaqueMap, TransactionalMap
from mapstate.maps.serialized import SerializedMap
from mapstate.operations.adopt import Adopted, adopt
from mapstate.protocol.ledger_record import Attempt, Commit, OpenRequest
from mapstate.protocol.opening import clock_txid
from mapstate.schema import Field, KeyField
from mapstate.serializers import RecordCodec, serializer
from mapstate.spark.driver.repeats import report_of
from mapstate.spark.driver.state import encode_report

pytestmark = pytest.mark.redis

KEYS = (KeyField("user_id", "string"),)
FIELDS = (Field("visits", "Count", "bigint"),)
USERS = [f"user-{at}" for at in range(50)]


def stored(kind: str, at: int) -> bytes:
    """What storm-redis has for the user of this number, who has ``at`` visits, as of batch 8 or before."""
    txid = at % 8 + 1
    record = {"opaque": [txid, at, None if at % 2 else at - 1], "transactional": [txid, at], "non-transactional": at}
    return json.dumps(record[kind], separators=(",", ":")).encode()


class Storm:
    """A state of storm-redis in one of its two data types, and the URL that names it."""

    def __init__(self, server: GivenRedis, layout: str) -> None:
        self.name = f"storm-{secrets.token_hex(4)}" + (":" if layout == "string" else "")
        self.client: redis.Redis = server.client()
        self.layout = layout
        self.url = f"{server.url}?layout={layout}&records={self.name}"

    def put(self, records: dict[str, bytes]) -> None:
        if self.layout == "hash":
            self.client.hset(self.name, mapping=records)
        else:
            self.client.mset({self.name + key: record for key, record in records.items()})

    def records(self) -> dict[str, bytes]:
        if self.layout == "hash":
            return {key.decode(): record for key, record in self.client.hgetall(self.name).items()}
        names = [key for key in self.client.scan_iter(f"{self.name}*") if b"!" not in key]
        return {key.decode().removeprefix(self.name): self.client.get(key) for key in names}


@pytest.fixture(params=["string", "hash"])
def storm(request: Any, redis_server: GivenRedis) -> Iterator[Storm]:
    one = Storm(redis_server, request.param)
    yield one
    one.client.delete(one.name, *one.client.scan_iter(f"{one.name}*"))
    one.client.close()


def job(url: str, kind: Any, on_new_owner: Any = "adopt") -> Iterator[Attempt]:
    """Two batches of one visit to every second user and to a new one."""
    store: Any = resolve(url).open("visits")
    opening = OpenRequest(
        state="visits",
        type=kind,
        serializer="json",
        keys=KEYS,
        fields=FIELDS,
        owner="q",
        clock_txid=clock_txid(),
        on_new_owner=on_new_owner,
    )
    maps = {"opaque": OpaqueMap, "transactional": TransactionalMap}
    ledger, attempt = OneLedger.open_and_begin(store, opening, 0)
    for batch_id in (0, 1):
        codec = RecordCodec(serializer("json"), "visits", kind, FIELDS, ledger.record.field_counts)
        records = SerializedMap(store.writer(attempt.token), codec)
        state: Any = maps[kind](records, attempt.view) if kind in maps else NonTransactionalMap(records)
        state.begin_commit(attempt.txid)
        touched = [*USERS[::2], "new"]
        state.multi_combine(
            touched,
            [1] * len(touched),
            lambda bases, news: [(base or 0) + new for base, new in zip(bases, news, strict=True)],
        )
        yield attempt
        ledger.commit(Commit(batch_id=batch_id, txid=attempt.txid, owner="q"))
        if batch_id == 0:
            attempt = ledger.begin(1)


@pytest.mark.parametrize("kind", ["opaque", "transactional", "non-transactional"])
def test_batches_go_on_above_what_storm_redis_wrote(storm, kind):
    storm.put({user: stored(kind, at) for at, user in enumerate(USERS)})
    before = storm.records()
    done = adopt(storm.url, "visits", type=kind, keys=KEYS, fields=FIELDS, page_size=7)
    assert done == Adopted(50, None if kind == "non-transactional" else 8)
    assert storm.records() == before
    with open_reader(storm.url, "visits") as reader:
        ledger = reader.ledger()
        assert (ledger.first_txid, ledger.last_txid, ledger.in_flight) == (0, done.last_txid, None)
        assert ledger.next_txid > 8
        assert dict(reader.scan()) == {(user,): {"visits": at} for at, user in enumerate(USERS)}
        batches = job(storm.url, kind)
        attempt = next(batches)
        if kind == "opaque":
            assert reader.multi_get(USERS) == [{"visits": at} for at in range(50)]  # it is not committed
        next(batches)
        assert list(batches) == []
        assert dict(reader.scan()) == {
            ("new",): {"visits": 2},
            **{(user,): {"visits": at + 2 * (at % 2 == 0)} for at, user in enumerate(USERS)},
        }
    after = storm.records()
    assert after.keys() == {*USERS, "new"}  # where they were
    if kind == "opaque":
        assert json.loads(after["user-2"])[1:] == [4, 3]
        assert json.loads(after["user-2"])[0] > attempt.txid
        assert after["user-3"] == before["user-3"]


def test_a_job_has_to_say_that_it_takes_the_state_over(storm):
    storm.put({"a": b"[1,1,null]"})
    adopt(storm.url, "visits", type="opaque", keys=KEYS, fields=FIELDS)
    with pytest.raises(StateOwnershipError, match="storm-redis"):
        next(job(storm.url, "opaque", on_new_owner="refuse"))


def test_a_state_with_a_ledger_is_not_adopted(storm):
    storm.put({"a": b"[1,1,null]"})
    adopt(storm.url, "visits", type="opaque", keys=KEYS, fields=FIELDS)
    ledger = storm.client.get(f"{storm.name}!ledger")
    with pytest.raises(UsageError, match="has a ledger already"):
        adopt(storm.url, "visits", type="opaque", keys=KEYS, fields=FIELDS)
    assert storm.client.get(f"{storm.name}!ledger") == ledger


@pytest.mark.parametrize(
    ("record", "kind"),
    [
        (b"[1,2]", "opaque"),
        (b"3", "opaque"),
        (b"[1,2,3]", "transactional"),
        (b"[1,2,3]", "non-transactional"),
        (b"[1,2.5,null]", "opaque"),
        (b'["x",2,null]', "opaque"),
        (b"", "opaque"),
        (b"\x80", "opaque"),
    ],
)
def test_what_is_no_record_of_this_type_stops_the_adoption(storm, record, kind):
    storm.put({"good": stored(kind, 4), "bad": record})
    with pytest.raises(CorruptRecordError, match="'bad'"):
        adopt(storm.url, "visits", type=kind, keys=KEYS, fields=FIELDS)
    assert storm.client.get(f"{storm.name}!ledger") is None


@pytest.mark.parametrize(("text", "kind"), [("a|b", "string"), ("a\\b", "string"), ("007", "bigint"), ("x", "bigint")])
def test_a_key_that_the_job_would_write_otherwise_stops_the_adoption(storm, text, kind):
    storm.put({"1": b"[1,1,null]", text: b"[1,1,null]"})
    with pytest.raises(KeyEncodingError):
        adopt(storm.url, "visits", type="opaque", keys=(KeyField("k", kind),), fields=FIELDS)
    assert storm.client.get(f"{storm.name}!ledger") is None


def test_nothing_there_is_nothing_to_adopt(storm):
    with pytest.raises(UsageError, match="`layout` and `records`"):
        adopt(storm.url, "visits", type="opaque", keys=KEYS, fields=FIELDS)
    assert storm.client.get(f"{storm.name}!ledger") is None


def test_bare_keys_are_adopted_from_a_database_of_their_own(start_redis):
    server = start_redis()
    with server.client() as client:
        client.mset({user: stored("opaque", at) for at, user in enumerate(USERS)})
        url = f"{server.url}?records="
        assert adopt(url, "visits", type="opaque", keys=KEYS, fields=FIELDS).records == 50
        assert len(list(job(url, "opaque"))) == 2
        with open_reader(url, "visits") as reader:
            assert len(dict(reader.scan())) == 51
            assert reader.get("user-2") == {"visits": 4}
        assert json.loads(client.get("user-2"))[1:] == [4, 3]
        store: Any = resolve(url).open("visits")
        with pytest.raises(KeyEncodingError, match="!ledger"):
            store.multi_get(["!ledger"])
        client.hset("something-else", "a", "b")
        with pytest.raises(UsageError, match="has a ledger"):
            adopt(url, "visits", type="opaque", keys=KEYS, fields=FIELDS)


def test_two_states_cannot_share_records(storm):
    storm.put({"a": b"[1,1,null]"})
    adopt(storm.url, "visits", type="opaque", keys=KEYS, fields=FIELDS)
    with pytest.raises(CorruptRecordError, match="'visits'.*'hits'"):
        open_reader(storm.url, "hits")


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("layout=set", "layout is string, hash or packed"),
        ("layout=hash&records=", "records is the name of a hash"),
        ("records=a&prefix=b", "records is a whole name"),
    ],
)
def test_a_layout_that_cannot_be_is_refused_with_the_reason(query, message):
    with pytest.raises(ConfigurationError, match=message):
        resolve(f"redis://h/0?{query}")


def run(*args: str, answer: str | None = None) -> Any:
    return CliRunner().invoke(app, list(args), input=answer)


def test_the_command_says_what_it_found_and_asks(storm):
    storm.put({user: stored("opaque", at) for at, user in enumerate(USERS)})
    schema = ["--type", "opaque", "--key", "user_id string", "--field", "visits=Count bigint"]
    no = run("adopt", storm.url, "visits", *schema, answer="n\n")
    assert no.exit_code == 1
    assert "50 records found, the highest txid is 8" in no.output
    assert "has to be stopped" in no.output
    assert storm.client.get(f"{storm.name}!ledger") is None
    yes = run("adopt", storm.url, "visits", *schema, "--yes")
    assert yes.exit_code == 0
    assert "on_new_owner='adopt'" in yes.output
    again = run("adopt", storm.url, "visits", *schema, "--yes")
    assert again.exit_code == 2
    assert "ledger already" in again.output
    assert len(list(job(storm.url, "opaque"))) == 2


@pytest.mark.parametrize("bad", [("--key", "user_id"), ("--field", "visits"), ("--field", "visits=Count")])
def test_a_schema_that_cannot_be_read_is_refused(storm, bad):
    args = ["--type", "opaque", "--key", "user_id string", "--field", "visits=Count bigint", *bad]
    done = run("adopt", storm.url, "visits", *args, "--yes")
    assert done.exit_code == 2
    assert repr(bad[1]) in done.output


def test_two_columns_of_one_name_are_not_adopted(storm):
    """No job could open such a state, and a reader would show one of the two."""
    storm.put({"a": b"[7,1,null]"})
    n = Field("N", "Count", "bigint")
    with pytest.raises(DuplicateNameError, match="'n' is taken"):
        adopt(storm.url, "visits", type="opaque", keys=(KeyField("n", "string"),), fields=(n,))
    assert storm.client.get(f"{storm.name}!ledger") is None


N = Field("n", "Sum(n)", "bigint")
K = (KeyField("k", "string"),)


class Reported(Job):
    """A driver that keeps batch reports, as Spark's does."""

    def batch(self, *, report: bool = True, **values: Any) -> None:
        super().batch(**values)
        done = self.ledger.record.last_commit
        if report:
            self.store.keep_report(encode_report(report_of(done)), 100)

    def taken_back(self) -> None:
        self.ledger.rolled_back()
        self.next -= 1


def lose_ledger(url: str, server: GivenRedis) -> None:
    with server.client() as client:
        assert client.delete(f"{resolve(url).prefix}s!ledger") == 1


def adopt_lost(url: str, **changes: Any) -> Adopted:
    return adopt(url, "s", **({"type": "opaque", "keys": K, "fields": (N,), "owner": "q"} | changes))


def test_a_lost_ledger_is_made_anew_as_the_batch_reports_say(redis_url, redis_server):
    job = Reported(redis_url)
    job.batch(a=1, b=1, c=1)
    job.attempt(a=50, phantom=50)
    job.batch(b=2)
    job.batch(c=100)
    job.taken_back()
    job.batch(c=2)
    job.attempt(b=70, c=70, later=70)
    truth, before = contents(redis_url), job.ledger.record
    lose_ledger(redis_url, redis_server)
    adopt_lost(redis_url)
    assert contents(redis_url) == truth == {"a": 1, "b": 2, "c": 2}
    with open_reader(redis_url, "s") as reader:
        after = reader.ledger()
    assert (after.owner, after.owners, after.last_txid) == ("q", {"q": 3}, before.last_txid)
    assert (after.last_commit.batch_id, after.last_commit.keys) == (2, 1)
    assert after.next_txid > before.next_txid
    again = Reported(redis_url)
    again.batch(b=3, phantom=1)
    assert contents(redis_url) == {"a": 1, "b": 3, "c": 2, "phantom": 1}


def test_a_batch_without_a_report_at_the_end_is_brought_again(redis_url, redis_server):
    job = Reported(redis_url)
    job.batch(a=1)
    job.batch(report=False, a=2, b=2)
    lose_ledger(redis_url, redis_server)
    adopt_lost(redis_url)
    assert contents(redis_url) == {"a": 1}
    assert Reported(redis_url).next == 1


def test_what_the_reports_do_not_decide_is_refused_and_nothing_is_made(redis_url, redis_server):
    job = Reported(redis_url)
    job.batch(a=1)
    job.batch(report=False, b=1)
    job.attempt(c=1)
    job.batch(d=1)
    lose_ledger(redis_url, redis_server)
    with pytest.raises(UsageError, match="one is missing.*mapstate drop"):
        adopt_lost(redis_url)
    with pytest.raises(UsageError, match="lost its ledger.*--checkpoint"):
        adopt_lost(redis_url, owner=None)
    assert resolve(redis_url).open("s").load() is None


def test_a_first_batch_that_was_rolled_back_is_not_taken_for_one_that_counts(redis_url, redis_server):
    job = Reported(redis_url)
    job.batch(a=1, b=1)
    job.taken_back()
    job.batch(a=2)
    lose_ledger(redis_url, redis_server)
    with pytest.raises(UsageError, match="cannot be told"):
        adopt_lost(redis_url)


def test_without_reports_nothing_says_what_counts(redis_url, redis_server):
    Job(redis_url).batch(a=1)
    lose_ledger(redis_url, redis_server)
    with pytest.raises(UsageError, match="no batch reports.*mapstate drop"):
        adopt_lost(redis_url)


def test_a_transactional_attempt_that_was_cut_short_cannot_be_taken_back(redis_url, redis_server):
    job = Reported(redis_url, type="transactional")
    store = job.store
    attempt = job.ledger.begin(0)
    store.writer(attempt.token).multi_put(["a"], [b"[%d,1]" % attempt.txid])
    job.ledger.commit(Commit(batch_id=0, txid=attempt.txid, owner="q"))
    store.keep_report(encode_report(report_of(job.ledger.record.last_commit)), 100)
    whole = job.ledger.record
    attempt = job.ledger.begin(1)
    store.writer(attempt.token).multi_put(["a"], [b"[%d,2]" % attempt.txid])
    lose_ledger(redis_url, redis_server)
    with pytest.raises(UsageError, match="of an orphaned attempt"):
        adopt_lost(redis_url, type="transactional")
    store.multi_put(["a"], [b"[%d,1]" % whole.last_txid])
    adopt_lost(redis_url, type="transactional")
    assert contents(redis_url) == {"a": 1}


def test_a_non_transactional_state_with_a_failed_attempt_gets_a_ledger_that_can_be_read(redis_url, redis_server):
    """Nothing is dead there: what an attempt has written counts."""
    job = Reported(redis_url, type="non-transactional")
    store = job.store
    for batch_id in range(3):
        if batch_id == 1:
            job.ledger.begin(batch_id)
        attempt = job.ledger.begin(batch_id)
        store.writer(attempt.token).multi_put(["a"], [b"%d" % batch_id])
        done = Commit(batch_id=batch_id, txid=attempt.txid, owner="q", at="2026-11-22T10:00:00+00:00")
        job.ledger.commit(done)
        store.keep_report(encode_report(report_of(done)), 100)
    lose_ledger(redis_url, redis_server)
    adopt_lost(redis_url, type="non-transactional")
    assert contents(redis_url) == {"a": 2}


def test_a_state_in_msgpack_is_adopted_by_the_name_of_its_wire_format(redis_url, redis_server):
    job = Reported(redis_url)
    job.batch(a=1)
    attempt = job.ledger.begin(1)
    form = RecordCodec(serializer("msgpack"), "s", "opaque", (N,), [(0, 1)])
    for_all = form.dumps([(attempt.txid - 1, 5, None)])
    job.store.multi_put(["a"], for_all)
    lose_ledger(redis_url, redis_server)
    with pytest.raises(CorruptRecordError):
        adopt_lost(redis_url)
    adopt_lost(redis_url, serializer="msgpack")
    assert contents(redis_url) == {"a": 5}
