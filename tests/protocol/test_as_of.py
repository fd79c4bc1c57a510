"""Reads as of one batch, however late: the values of then, or an error; whatever was written since."""

from __future__ import annotations

import random

import pytest
from cases import full
from states import Job, contents

from mapstate.backends import resolve
from mapstate.errors import StaleBatchError
from mapstate.operations.vacuum import vacuum
from mapstate.protocol.ledger_record import Commit
from mapstate.reader import StateReader, open_reader

KEYS = [f"k{at}" for at in range(6)]


@pytest.fixture
def url(tmp_path):
    return f"sqlite:///{tmp_path}/state.db"


def ledger_of(url):
    with open_reader(url, "s") as reader:
        return reader.ledger()


def can_roll_back(ledger):
    last = ledger.last_commit
    return last is not None and last.txid == ledger.last_txid == ledger.next_txid - 1 and ledger.previous is not None


def read_as_of(url, ledger):
    with StateReader(resolve(url), "s", "committed", {}, as_of=ledger) as reader:
        return {key[0]: value["n"] for key, value in reader.scan(2)}


def some_keys(chance):
    return {key: chance.randrange(1000) for key in chance.sample(KEYS, chance.randrange(1, 4))}


@pytest.mark.parametrize("seed", [*range(16), *map(full, range(16, 60))])
def test_what_is_read_as_of_a_batch_is_what_was_there_then_or_an_error(url, seed):
    chance = random.Random(seed)
    how, job = {"owner": "q"}, Job(url)
    kept, was_right, was_gone = [(ledger_of(url), {})], 0, 0
    for _ in range(14):
        step = chance.random()
        if step < 0.45:
            job.batch(**some_keys(chance))
        elif step < 0.7:
            job.attempt(**some_keys(chance))  # begun again by the next step
        elif step < 0.8:
            job = Job(url, **how)  # another start of the same query
        elif step < 0.9:
            vacuum(url, "s", take_over=True)
            job = Job(url, **how)
        elif step < 0.95 and can_roll_back(job.ledger.record):
            job.ledger.rolled_back()
            job = Job(url, **how)
        elif seed % 2:
            how = {"owner": f"q{len(kept)}", "on_new_owner": chance.choice(("adopt_unchecked", "reset"))}
            job = Job(url, **how)
        for ledger, values in kept:
            try:
                assert read_as_of(url, ledger) == values, (seed, ledger)
                was_right += 1
            except StaleBatchError:
                assert ledger.contents() != ledger_of(url).contents(), "what is unchanged can be read"
                was_gone += 1
        kept.append((ledger_of(url), contents(url)))
    assert was_right
    assert was_gone or seed


def test_it_holds_through_one_more_batch_and_all_attempts_before_the_next(url):
    job = Job(url)
    job.batch(a=1, b=1)
    ledger = ledger_of(url)
    job.attempt(a=50, new=50)
    assert read_as_of(url, ledger) == {"a": 1, "b": 1}
    job.batch(a=2, c=2)
    assert read_as_of(url, ledger) == {"a": 1, "b": 1}
    assert contents(url) == {"a": 2, "b": 1, "c": 2}
    job.batch(b=3)  # one key was written by one batch, the other by the other one
    with pytest.raises(StaleBatchError, match="as of batch 0 any more: key 'b' was written by two batches"):
        read_as_of(url, ledger)


def test_keys_that_no_batch_wrote_since_are_read_however_many_came(url):
    job = Job(url)
    job.batch(a=1, b=1)
    ledger = ledger_of(url)
    for number in range(5):
        job.batch(**{f"new{number}": 1})
    with StateReader(resolve(url), "s", "committed", {}, as_of=ledger) as reader:
        assert reader.multi_get(["a", "b"]) == [{"n": 1}, {"n": 1}]
        with pytest.raises(StaleBatchError, match="'new4'"):
            reader.multi_get(["a", "new4"])


def test_nothing_is_read_as_of_a_batch_that_was_rolled_back(url):
    job = Job(url)
    job.batch(a=1)
    job.batch(a=2)
    ledger = ledger_of(url)
    job.ledger.rolled_back()
    assert contents(url) == {"a": 1}
    with pytest.raises(StaleBatchError, match="rolled back"):
        read_as_of(url, ledger)
    job = Job(url)
    job.batch(a=3)
    with pytest.raises(StaleBatchError, match="rolled back"):
        read_as_of(url, ledger)


def test_a_state_that_is_not_opaque_is_read_as_of_a_batch_until_the_next_begins(url):
    job = Job(url, type="transactional")
    job.batch(a=1)
    ledger = ledger_of(url)
    assert read_as_of(url, ledger) == {"a": 1}
    job.attempt(b=1)
    with pytest.raises(StaleBatchError, match="not opaque"):
        read_as_of(url, ledger)
    assert isinstance(ledger.last_commit, Commit)
