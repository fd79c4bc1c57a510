"""What was seen of Aerospike's client 19.3 and server 8.1, on the stand-in, and on a real server where there is one.

Each is a fact that mapstate's store rests on, or has to be careful about.
"""

from __future__ import annotations

import pickle
import re
import subprocess
import sys

import aerospike
import pytest
from aerospike import exception as driver
from aerospike_helpers import expressions
from aerospike_helpers.batch.records import BatchRecords, Write
from aerospike_helpers.operations import operations
from aerospike_stand_in import POLICIES, Fault

SEND = {"key": aerospike.POLICY_KEY_SEND}


def at_most(txid):
    last = expressions.ListGetByIndex(
        None, aerospike.LIST_RETURN_VALUE, expressions.ResultType.INTEGER, -1, expressions.ListBin("b")
    )
    return {"expressions": expressions.LE(last, txid).compile()}


def write(place, values, policy=None, batch_policy=None):
    """Writes the bin b of each key in one batch."""
    records = [Write(place.place(key), [operations.write("b", value)], policy=policy) for key, value in values.items()]
    return place.client.batch_write(BatchRecords(records), batch_policy or {})


def read(place, keys):
    return place.client.batch_read([place.place(key) for key in keys], ["b"], {})


def results(batch):
    return [one.result for one in batch.batch_records]


def test_a_batch_read_answers_in_order_and_missing_is_result_2(place):
    assert write(place, {"a": [1], "b": [2]}).result == 0
    batch = read(place, ["b", "x", "a", "b"])
    assert (batch.result, results(batch)) == (0, [0, 2, 0, 0])
    assert [one.record and one.record[2] for one in batch.batch_records] == [{"b": [2]}, None, {"b": [1]}, {"b": [2]}]


def test_a_filtered_write_is_result_27_and_the_batch_as_such_is_fine(place):
    write(place, {"old": [0, 6], "new": [0, 8]})
    batch = write(place, {"old": [1, 7], "new": [1, 7]}, at_most(7))
    assert (batch.result, results(batch)) == (0, [0, 27])
    assert (place.bins("old"), place.bins("new")) == ({"b": [1, 7]}, {"b": [0, 8]})


@pytest.mark.parametrize("others", [{}, {"old": [1, 7], "absent": [1, 7]}])
def test_a_filter_of_a_batch_holds_for_each_of_its_writes_and_for_a_single_one(place, others):
    write(place, {"old": [0, 6], "new": [0, 8]})
    batch = write(place, {"new": [1, 7]} | others, SEND, at_most(7))
    assert results(batch) == [27] + [0] * len(others)
    assert place.bins("new") == {"b": [0, 8]}


def test_a_filter_does_not_apply_to_a_record_that_does_not_exist(place):
    assert results(write(place, {"absent": [1, 7]}, at_most(0))) == [0]
    assert place.bins("absent") == {"b": [1, 7]}


@pytest.mark.parametrize("value", [[], ["text"], 5, "text"])
def test_a_filter_that_cannot_be_judged_refuses(place, value):
    write(place, {"a": value})
    assert results(write(place, {"a": [1, 7]}, at_most(7))) == [27]


def test_a_record_that_fails_makes_the_batch_16_and_raises_nothing(place):
    batch = write(place, {"a": [1], "large": ["x" * 2**20]})
    assert (batch.result, results(batch)) == (-16, [0, 13])


def test_a_call_that_fails_as_a_whole_raises_nothing_and_its_records_may_say_0(stand_in):
    stand_in.cluster.faults += [Fault("batch_write", 9), Fault("batch_read", 9, missing=True)]
    batch = write(stand_in, {"a": [1]})
    assert (batch.result, results(batch)) == (9, [0])
    batch = read(stand_in, ["a"])
    assert (batch.result, results(batch)) == (9, [])
    assert results(read(stand_in, ["a"])) == [2]


def test_text_is_cut_at_its_first_nul(place):
    write(place, {"a": ["x\0y", b"x\0y", bytearray(b"x\0y"), {"k\0l": 1}]})
    text, *binary, mapped = place.bins("a")["b"]
    assert text == "x"
    assert [bytes(one) for one in binary] == [b"x\0y", b"x\0y"]
    assert mapped == {"k": 1}


def test_text_keys_are_cut_at_their_first_nul_and_a_bytearray_is_not(place):
    write(place, {"k": [1]}, SEND)
    assert place.bins("k\0a") == place.bins("k\0b") == {"b": [1]}
    assert place.bins(b"k\0a") == {"b": [1]}
    with pytest.raises(driver.RecordNotFound):
        place.bins(bytearray(b"k\0a"))
    assert aerospike.calc_digest("n", "s", "k\0a") == aerospike.calc_digest("n", "s", "k")


def test_a_key_that_is_no_unicode_kills_the_process():
    code = r"import aerospike; aerospike.calc_digest('n', 's', '\ud800')"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode < 0


def test_a_number_and_its_text_are_two_keys(place):
    write(place, {5: [1], "5": [2]})
    assert (place.bins(5), place.bins("5")) == ({"b": [1]}, {"b": [2]})


@pytest.mark.parametrize("value", [2**63, -(2**63) - 1])
def test_integers_have_64_bits(place, value):
    write(place, {"a": [2**63 - 1, -(2**63)]})
    assert place.bins("a")["b"] == [2**63 - 1, -(2**63)]
    with pytest.raises(driver.AerospikeError):
        write(place, {"a": [value]})
    with pytest.raises(driver.AerospikeError):
        place.bins(value)


def test_other_values_come_back_as_they_were(place):
    value = [None, True, False, 0, -0.0, float("inf"), 1.5, "é", [[1], {"k": None}], b""]
    write(place, {"a": value})
    assert repr(place.bins("a")["b"]) == repr(value)


@pytest.mark.parametrize("value", [(1, 2), object(), {1, 2}, {(1, 2): 1}, "\ud800"])
def test_what_the_client_has_no_type_for_is_refused(place, value):
    with pytest.raises(driver.ClientError) as caught:
        write(place, {"a": [value]})
    assert caught.value.code == -1


@pytest.mark.parametrize(("key", "shown"), [(None, "NIL"), (True, "true"), (1.5, "1.5")])
def test_map_keys_of_other_types_are_left_out(place, key, shown):
    said = f"Attempted to store a map with key {shown}, which is an invalid type"
    with pytest.warns(DeprecationWarning, match=re.escape(said)):
        write(place, {"a": [{"k": 1, key: 2}]})
    assert place.bins("a")["b"] == [{"k": 1}]


@pytest.mark.filterwarnings("error::DeprecationWarning")
def test_map_keys_of_other_types_are_refused_where_warnings_are_errors(place):
    with pytest.raises(driver.ParamError, match="a map with key NIL"):
        write(place, {"a": [{"k": 1, None: 2}]})


def test_unknown_policy_names_are_refused_only_with_validate_keys(stand_in):
    with pytest.raises(driver.ParamError, match="nonsense"):
        stand_in.client.get(stand_in.place("a"), {"nonsense": 1})


@pytest.mark.parametrize("kind", POLICIES)
def test_the_stand_in_knows_the_policies_that_the_real_client_knows(kind):
    """The real client looks at the names in its configuration before it connects."""

    def unknown(name):
        config = {"hosts": [("127.0.0.1", 1)], "validate_keys": True, "policies": {kind: {name: 1}}}
        with pytest.raises(driver.AerospikeError) as caught:
            aerospike.client(config)
        return "invalid policy dictionary key" in caught.value.msg

    assert [name for name in POLICIES[kind] if unknown(name)] == []
    assert unknown("nonsense")
    assert unknown("ttl") == ("ttl" not in POLICIES[kind])


def test_a_ttl_in_the_policy_of_each_write_holds_and_one_in_that_of_a_batch_does_not(place):
    write(place, {"a": [1]}, {"ttl": 100})
    assert 0 < place.ttl("a") <= 100
    if place.cluster is not None:  # validate_keys refuses it, which is how we know
        with pytest.raises(driver.ParamError):
            write(place, {"a": [1]}, None, {"ttl": 100})


def test_a_write_may_leave_the_ttl_as_it_was_or_take_it_away(place):
    write(place, {"a": [1]}, {"ttl": 1000})
    write(place, {"a": [2]}, {"ttl": aerospike.TTL_DONT_UPDATE})
    assert 0 < place.ttl("a") <= 1000
    write(place, {"a": [3]}, {"ttl": aerospike.TTL_NEVER_EXPIRE})
    assert place.ttl("a") == aerospike.TTL_NEVER_EXPIRE


def test_a_create_finds_the_first_and_an_update_nothing(place):
    create, update = ({"exists": one} for one in (aerospike.POLICY_EXISTS_CREATE, aerospike.POLICY_EXISTS_UPDATE))
    assert results(write(place, {"a": [1]}, update)) == [2]
    assert results(write(place, {"a": [1]}, create)) == [0]
    assert results(write(place, {"a": [2]}, create)) == [5]
    with pytest.raises(driver.RecordExistsError):
        place.client.put(place.place("a"), {"b": 1}, {}, create)


def test_a_write_may_ask_for_the_generation_that_was_read(place):
    place.client.put(place.place("a"), {"b": 1})
    gen = place.client.get(place.place("a"))[1]["gen"]
    policy = {"gen": aerospike.POLICY_GEN_EQ, "exists": aerospike.POLICY_EXISTS_UPDATE}
    place.client.put(place.place("a"), {"b": 2}, {"gen": gen}, policy)
    with pytest.raises(driver.RecordGenerationError):
        place.client.put(place.place("a"), {"b": 3}, {"gen": gen}, policy)
    with pytest.raises(driver.RecordNotFound):
        place.client.put(place.place("x"), {"b": 3}, {"gen": gen}, policy)


def test_a_query_gives_the_user_key_only_where_it_was_sent(place):
    write(place, {"sent": [1], 7: [1]}, SEND)
    write(place, {"not": [1]})
    query = place.client.query(place.namespace, place.set)
    found = query.results({}, {"nobins": True})
    assert sorted(map(str, (one[0][2] for one in found))) == ["7", "None", "sent"]
    assert all(len(one[0][3]) == 20 for one in found)


def test_a_paginated_query_carries_on_where_it_ended(place):
    write(place, {at: [at] for at in range(25)}, SEND)
    query = place.client.query(place.namespace, place.set)
    query.max_records = 10
    query.paginate()
    pages = []
    while not query.is_done():
        pages.append(query.results({}, {"nobins": True}))
    assert sorted(one[0][2] for page in pages for one in page) == list(range(25))
    assert all(len(page) <= 10 for page in pages)


def test_a_query_of_some_partitions_has_their_records_and_no_others(place):
    write(place, {at: [at] for at in range(200)}, SEND)
    found = []
    for begin, count in [(0, 1000), (1000, 3095), (4095, 1)]:
        query = place.client.query(place.namespace, place.set)
        query.max_records = 10
        query.paginate()
        while not query.is_done():
            page = query.results({"partition_filter": {"begin": begin, "count": count}}, {"nobins": True})
            numbers = [int.from_bytes(one[0][3][:2], "little") % 4096 for one in page]
            assert all(begin <= number < begin + count for number in numbers)
            found += [one[0][2] for one in page]
    assert sorted(found) == list(range(200))


def test_the_client_does_not_pickle(place):
    with pytest.raises(TypeError):
        pickle.dumps(place.client)


def test_a_namespace_that_is_not_there_is_result_20(place):
    with pytest.raises(driver.AerospikeError) as caught:
        place.client.get(("no-such-namespace", "s", 1))
    assert caught.value.code in (20, -8)  # the client may find no node for it


def test_a_node_names_its_cluster(place):
    reply = place.client.info_random_node("cluster-stable:ignore-migrations=true")
    assert reply.partition("\t")[2].strip()
    assert "nsup-period=" in place.client.info_random_node(f"namespace/{place.namespace}")


def test_the_stand_in_refuses_a_filter_that_it_does_not_know(stand_in):
    stand_in.client.put(stand_in.place("a"), {"b": 1})
    with pytest.raises(NotImplementedError):
        write(stand_in, {"a": [1]}, {"expressions": expressions.LE(expressions.IntBin("b"), 5).compile()})
