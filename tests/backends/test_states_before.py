"""States that earlier code wrote are read, and their jobs go on with them. See `states_before`."""

from __future__ import annotations

import json
import secrets

import pytest
from states_before import (
    NEWEST,
    PLACES,
    SCENARIOS,
    STATES,
    AerospikePlace,
    AlreadyCommitted,
    BatchPlan,
    Field,
    Job,
    PostgresqlPlace,
    RedisClusterPlace,
    RedisPlace,
    ReplannedBatchError,
    RollbackError,
    SqlitePlace,
    State,
    dump,
    examine,
    last_commit_of,
    listed,
    open_reader,
    python_of,
    read_set,
    roll_back,
    vacuum,
    write_all,
)

OF_THE_STATE = {"store", "batch reports", "in flight", "dead", "records", "keys", "ledger"}
"""What of a doctor's findings is about the state, and not about the settings of the test's server."""

SETS = {folder.name: read_set(folder.name) for folder in sorted(STATES.iterdir())}
MARKS = {store: [pytest.mark.redis] if store.startswith("redis") else [] for store in PLACES}
MARKS["postgresql"] = [pytest.mark.server]
CASES = [
    pytest.param(store, name, scenario, id=f"{name}-{store}-{scenario}", marks=MARKS[store])
    for name, (expected, _) in SETS.items()
    for scenario, facts in expected.items()
    for store in facts["stores"]
]


class Case:
    """A scenario's states, put back into a fresh store, and what is expected of them."""

    def __init__(self, place, name, store, scenario):
        expected, stores = SETS[name]
        place.restore(stores[store])
        self.place = place
        self.facts = expected[scenario]
        self.states = {state: exact_facts(facts) for state, facts in self.facts["states"].items()}
        self.values = [
            {tuple(python_of(key)): python_of(value) for key, value in facts["values"]}
            for facts in self.states.values()
        ]

    def job(self, **changes):
        """The same job again, as it starts with today's code."""
        states = [State(**facts["state"]) for facts in self.states.values()]
        facts = {name: self.facts[name] for name in ("owner", "on_new_owner", "first_txid")}
        return Job(self.place, *states, **facts | changes)

    def plan(self, which):
        plan = self.facts[which]
        return None if plan is None else BatchPlan(*plan)

    def opaque(self):
        return [name for name, facts in self.states.items() if facts["state"]["type"] == "opaque"]

    def contents(self, name, **how):
        with open_reader(self.place.backend, name, **how) as reader:
            return scanned(reader)

    def key_count(self, name):
        with open_reader(self.place.backend, name) as reader:
            return reader.key_count()

    def committed(self, name):
        """What counts, and what the next batch goes on from: less than is seen where one state is ahead of another."""
        facts = self.states[name]
        return facts["contents"] if facts["base"] is None else facts["base"]

    def warnings(self, name):
        """The subjects about which a doctor says that something is wrong with the state."""
        findings = [(of_the_state(finding.subject), finding.severity) for finding in examine(self.place.backend, name)]
        assert {"in flight", "dead", "records", "keys"} <= {subject for subject, _ in findings}
        return sorted({subject for subject, severity in findings if subject and severity != "ok"})


def of_the_state(subject):
    """The subject without the node of a cluster; None where it is a setting of the test's server."""
    return next((own for own in OF_THE_STATE if subject == own or subject.endswith(f" {own}")), None)


def exact_facts(facts):
    """With a line of JSON for each key: what is equal in Python, as 1 and True are, differs there."""
    contents = ("contents", "latest", "base", "before", "after")
    lines = {name: list(map(dump, facts[name])) for name in contents if facts[name] is not None}
    return facts | lines


def lines_of(pairs):
    return sorted(dump(line) for pair in pairs for line in listed(dict([pair])))


def scanned(reader):
    pairs = list(reader.scan())
    assert len(pairs) == len({dump(listed({key: None})) for key, _ in pairs})
    return lines_of(pairs)


@pytest.fixture
def place(request, store, tmp_path):
    """A fresh store of the kind that is asked for."""
    parameters, _ = PLACES[store]
    if store == "sqlite":
        yield SqlitePlace(tmp_path / "states.db")
    elif store == "aerospike":
        yield AerospikePlace(request.getfixturevalue("stand_in").cluster)
    elif store == "postgresql":
        place = PostgresqlPlace(request.getfixturevalue("postgresql_url"), f"test_{secrets.token_hex(6)}")
        yield place
        place.close()
    elif store == "redis-cluster":
        url, _, prefix = request.getfixturevalue("cluster_url").partition("prefix=")
        with request.getfixturevalue("redis_cluster").client() as client:
            yield RedisClusterPlace(client, url.rstrip("?&"), prefix, parameters)
    elif "records=" in parameters:  # which has no prefix, so it takes a server of its own
        with request.getfixturevalue("start_redis")() as server, server.client() as client:
            yield RedisPlace(client, server.url, parameters=parameters)
    else:
        url, _, prefix = request.getfixturevalue("redis_url").partition("prefix=")
        with request.getfixturevalue("redis_server").client() as client:
            yield RedisPlace(client, url.rstrip("?&"), prefix, parameters)


@pytest.fixture
def case(place, store, name, scenario):
    return Case(place, name, store, scenario)


each_case = pytest.mark.parametrize(("store", "name", "scenario"), CASES)
SOME = ("sqlite", "redis-string")  # the bytes of one form are the same in each store: what an operator does, on two
some_cases = pytest.mark.parametrize(
    ("store", "name", "scenario"),
    [
        case
        if case.values[0] in SOME
        else pytest.param(*case.values, id=case.id, marks=[*case.marks, pytest.mark.full])
        for case in CASES
    ],
)
each_store = pytest.mark.parametrize("store", [pytest.param(store, marks=MARKS[store]) for store in PLACES])


@each_case
def test_a_reader_sees_exactly_what_was_committed(case):
    for name, facts in case.states.items():
        with open_reader(case.place.backend, name) as reader:
            assert scanned(reader) == facts["contents"]
            assert reader.count_keys().found == len(facts["contents"])
            assert reader.key_count() == facts["key_count"]
            there = [json.loads(line) for line in [*facts["contents"], *(facts["latest"] or [])]]
            by_text = {dump(key): tuple(python_of(key)) for key, _ in [*there, *facts["values"]]}
            keys = list(by_text.values())
            pairs = zip(keys, reader.multi_get(keys), strict=True)
            assert lines_of(pair for pair in pairs if pair[1] is not None) == facts["contents"]
            commit = last_commit_of(reader.ledger())
            assert (commit and {name: commit[name] for name in facts["commit"]}) == facts["commit"]
            assert [report.batch_id for report in reader.reports()] == case.facts["reports"] * case.place.keeps_reports
        assert case.contents(name, consistency="latest") == (
            facts["contents"] if facts["latest"] is None else facts["latest"]
        )


@some_cases
def test_a_doctor_finds_nothing_wrong_but_what_was_left_in_flight(case):
    for name, facts in case.states.items():
        assert case.warnings(name) == sorted(facts["doctor"])


@some_cases
def test_the_same_owner_goes_on(case):
    job, due = case.job(), case.facts["next_batch"]
    settled = all(facts["base"] is None for facts in case.states.values())  # all of them count the same batches
    if due and settled:
        again = job.begin(due - 1, case.plan("last_plan"))
        assert [type(attempt) for attempt in again] == [AlreadyCommitted] * len(again)
    if case.plan("last_plan") is not None and settled:
        other = case.plan("plan")._replace(start='[{"visits":{"0":5}}]', planned_at=2, previous_planned_at=1)
        with pytest.raises(ReplannedBatchError):
            job.begin(due, other)
    attempts = job.begin(due, case.plan("plan"))
    assert [attempt.txid for attempt in attempts] == [facts["txid"] for facts in case.states.values()]
    deltas = job.write(attempts, case.values)
    for name in case.opaque():
        assert case.contents(name) == case.committed(name)
    job.commit(attempts, case.values, deltas)
    job.close()
    for name, facts in case.states.items():
        assert case.contents(name) == facts["after"]
        assert case.key_count(name) == facts["key_count_after"]
        unknown = facts["key_count_after"] is None and "ttl" not in facts["state"]
        assert case.warnings(name) == ["keys"] * unknown


@some_cases
def test_the_last_opaque_batch_can_be_rolled_back(case):
    for name, facts in case.states.items():
        if facts["before"] is None:
            with pytest.raises(RollbackError):
                roll_back(case.place, name)
            assert case.contents(name) == facts["contents"]
        else:
            roll_back(case.place, name)
            assert case.contents(name) == facts["before"]
            assert case.warnings(name) == []


@some_cases
def test_a_batch_of_today_is_rolled_back_to_what_was_there_and_a_vacuum_changes_nothing(case):
    names = case.opaque()
    if not names:
        return
    job = case.job()
    attempts = job.begin(case.facts["next_batch"], case.plan("plan"))
    job.commit(attempts, case.values, job.write(attempts, case.values))
    job.close()
    for name in names:
        roll_back(case.place, name)
    before = {name: case.committed(name) for name in names}
    assert {name: case.contents(name) for name in names} == before
    for name in names:
        vacuum(case.place.backend, name, beside=[(case.place.backend, other) for other in names if other != name])
    assert {name: case.contents(name) for name in names} == before


def by_key(lines):
    pairs = map(json.loads, lines)
    return {dump(key): fields["dict"] for key, fields in pairs}


@pytest.mark.parametrize(
    ("store", "name", "scenario"),
    [case for case in CASES if case.values[2] in ("opaque_counts", "transactional_counts")],
)
@pytest.mark.parametrize("change", ["field", "adopt_unchecked", "reset"])
def test_a_job_that_has_changed_goes_on_with_a_state_of_before(case, change):
    [(name, facts)] = case.states.items()
    with_owner = {} if change == "field" else {"owner": "query-9", "on_new_owner": change}
    job = case.job(**with_owner)
    (state,) = job.states
    if change == "field":
        state.add([Field("bytes", "Sum(bytes)", "bigint")])
    batch, new = (0, (1,)) if with_owner else (case.facts["next_batch"], (1, 10))
    values = [{("a",): new, ("fresh",): new}]
    attempts = job.begin(batch, None)
    job.commit(attempts, values, job.write(attempts, values))
    job.close()
    after = by_key(case.contents(name))
    before = {} if change == "reset" else by_key(facts["contents"])
    visits = {key: value["visits"] for key, value in before.items()}
    visits |= {'["a"]': visits.get('["a"]', 0) + 1, '["fresh"]': 1}
    assert {key: value["visits"] for key, value in after.items()} == visits
    if change == "field":
        assert {key for key, value in after.items() if value["bytes"] is not None} == {'["a"]', '["fresh"]'}
    assert case.warnings(name) == []


@each_store
def test_what_todays_code_stores_has_the_form_of_the_newest_states(store, place):
    expected, stores = SETS[NEWEST]
    written = write_all(store, place)
    assert list(map(dump, place.rows())) == list(map(dump, stores[store]))
    assert written.keys() == {scenario for scenario, facts in expected.items() if store in facts["stores"]}
    for scenario, facts in written.items():
        assert expected[scenario] | json.loads(dump(facts)) == expected[scenario]


def test_every_scenario_and_every_store_is_in_the_newest_states():
    expected, stores = SETS[NEWEST]
    assert expected.keys() == SCENARIOS.keys()
    assert stores.keys() == PLACES.keys()
