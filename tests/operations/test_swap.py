"""Aliases: which version the readers of a name read, and the swaps of an operator."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from driven_reader import WAYS
from every_store import AEROSPIKE, CLUSTER, REDIS, url_of
from rolled import Rolled, Row
from service import client_of
from typer.testing import CliRunner
from versions import Version

import mapstate.operations.drop as dropping
import mapstate.operations.swap as operation
from mapstate import LIFETIME, open_reader
from mapstate.backends import resolve
from mapstate.capabilities import FenceToken, JointLedgers
from mapstate.cli.commands import app
from mapstate.errors import ConfigurationError, CorruptRecordError, StateNotFoundError, UsageError
from mapstate.maps.operator_list import ListEntry, read_list, write_entries
from mapstate.maps.serialized import writer_of
from mapstate.operations.drop import drop
from mapstate.operations.forget import forget, forget_listed, listed
from mapstate.operations.states import list_states
from mapstate.operations.swap import keep_only, swap
from mapstate.protocol.alias import AliasRecord
from mapstate.protocol.ledger import Ledger
from mapstate.schema import Field
from mapstate.testing import wait_for

ONE_BY_ONE = [CLUSTER, AEROSPIKE]


@pytest.fixture(params=["memory", "sqlite", REDIS, *ONE_BY_ONE])
def url(request: Any, tmp_path: Any) -> str:
    """A store of each kind, empty."""
    return url_of(request, tmp_path)


@pytest.fixture(params=WAYS)
def opened(request: Any) -> Any:
    """Opens a reader, blocking or on an event loop."""
    return WAYS[request.param]["open_reader"]


def one_by_one(url: str) -> bool:
    """Whether the store cannot compare and change several ledgers in one write."""
    return not isinstance(resolve(url).open("v"), JointLedgers)


def versions(url: str, *ends: int, **changes: Any) -> list[Version]:
    """``v`` and ``v.2``, of which ``a`` is 1 and 2."""
    names = ("v", "v.2", "v.3")[: len(ends)]
    made = [Version(url, state=name, **changes) for name in names]
    for number, (job, end) in enumerate(zip(made, ends, strict=True), 1):
        job.batch_to(end, a=number, b=number)
    return made


def on_call(monkeypatch: Any, module: Any, name: str, number: int, do: Callable[[], object]) -> None:
    """Something comes right after a call of a function of an operation."""
    function, calls = getattr(module, name), [0]

    def called(*args: Any, **how: Any) -> Any:
        answer = function(*args, **how)
        calls[0] += 1
        if calls[0] == number:
            do()
        return answer

    monkeypatch.setattr(module, name, called)


def test_a_reader_follows_the_alias_and_a_name_without_one_is_itself(url, opened):
    versions(url, 5, 5)
    with opened(url, "v", follow=0) as reader, opened(url, "v", follow=None) as exact:
        assert reader.get("a") == {"n": 1}
        assert swap(url, {"v": "v.2"})[0].record == AliasRecord(
            alias="v", to="v.2", before="v", keeps=("v", "v.2"), number=1
        )
        assert reader.multi_get(["a", "b"]) == [{"n": 2}, {"n": 2}]
        assert reader.ledger().state == "v.2"
        assert exact.get("a") == {"n": 1}
        assert exact.ledger().state == "v"
        with opened(url, "v") as later, opened(url, "v", follow=3600) as seldom:
            assert later.get("a") == seldom.get("a") == {"n": 2}
            assert swap(url, {"v": None})[0].record.number == 2
            assert seldom.get("a") == {"n": 2}
            assert reader.get("a") == {"n": 1}


def test_a_scan_goes_on_in_the_version_in_which_it_has_begun(url, opened):
    versions(url, 5, 5)
    with opened(url, "v", follow=0) as reader:
        pages = reader.pages(1)
        first = next(pages)
        swap(url, {"v": "v.2"})
        assert {tuple(fields.values()) for page in [first, *pages] for _, fields in page} == {(1,)}
        assert {tuple(fields.values()) for _, fields in reader.scan()} == {(2,)}


def test_no_reader_goes_back_to_a_lower_number(url, opened):
    versions(url, 5, 5)
    swap(url, {"v": "v.2"})
    store: Any = resolve(url).open("v.alias")
    old = store.load()
    swap(url, {"v": "v"})
    with opened(url, "v", follow=0) as reader:
        assert reader.get("a") == {"n": 1}
        assert store.swap(old[0], store.load()[1], FenceToken(0, 1, closed=True)) is not None  # an older copy
        assert reader.get("a") == {"n": 1}
    with opened(url, "v") as anew:
        assert anew.get("a") == {"n": 2}


def test_an_alias_that_cannot_be_read_is_an_error(url):
    versions(url, 5)
    store: Any = resolve(url).open("v.alias")
    for record in (b'{"alias":"w","to":"v","before":null,"keeps":["v"],"number":1}', b'{"alias":"v","more":1}'):
        at = store.load()
        assert store.swap(record, at and at[1], FenceToken(0, 1, closed=True)) is not None
        with pytest.raises(CorruptRecordError, match="follow=None"):
            open_reader(url, "v")
        assert open_reader(url, "v", follow=None).get("a") == {"n": 1}


def test_a_state_whose_name_ends_like_an_alias_is_a_state(url):
    versions(url, 5)
    Version(url, state="v.alias").batch_to(1, a=7)
    assert open_reader(url, "v").get("a") == {"n": 1}
    assert open_reader(url, "v.alias").get("a") == {"n": 7}
    with pytest.raises(CorruptRecordError):
        swap(url, {"v": "v"})


def test_what_cannot_be_followed_is_no_argument(url):
    versions(url, 5)
    with pytest.raises(ConfigurationError, match="follow"):
        open_reader(url, "v", follow=-1)


def refused(url: str, to: str | None, match: str, **how: Any) -> None:
    with pytest.raises(UsageError, match=match) as caught:
        swap(url, {"v": to}, **how)
    assert "Nothing was written" in caught.value.message
    assert resolve(url).open("v.alias").load() is None


def test_a_version_that_is_behind_is_refused_with_how_far(url):
    versions(url, 4711, 4700)
    refused(url, "v.2", "partition 0 of t by 11")
    assert "--force" in swap(url, {"v": "v.2"}, force=True)[0].distance


def test_offsets_that_cannot_be_compared_are_by_the_time_of_the_commits(url):
    old, new = versions(url, 5, 5)
    for job, at in ((old, "2026-11-28T20:01:00Z"), (new, "2026-11-28T20:00:30Z")):
        job.at = at
        job.batch(a=9)
    refused(url, "v.2", "cannot be compared")
    refused(url, "v.2", "30.0 s before", max_lag=29)
    assert swap(url, {"v": "v.2"}, max_lag=31)[0].distance == "not behind"


def test_a_version_that_readers_cannot_use_is_refused(url):
    versions(url, 5)
    with pytest.raises(StateNotFoundError):
        swap(url, {"v": "v.2"})
    Version(url, state="v.2")
    refused(url, "v.2", "counts no batch")
    Version(url, state="v.3", fields=(Field("m", "Sum(n)", "bigint"),)).batch_to(5, a=1)
    refused(url, "v.3", "--drops n")
    refused(url, None, "no version before")
    refused(url, "v", "already")
    assert swap(url, {"v": "v.3"}, drops=["n"])[0].record.to == "v.3"
    with open_reader(url, "v") as reader:
        assert reader.get("a") == {"m": 1}


@pytest.mark.parametrize(
    ("other", "is_taken"),
    [
        ({"startTime": 7}, False),
        ({"retention": 50}, False),
        ({"lag": 5, "retention": 94}, False),
        ({"lag": 5, "retention": 95}, True),
        ({"retention": 200}, True),
    ],
)
def test_rolling_windows_that_begin_elsewhere_or_keep_less_are_refused(tmp_path, other, is_taken):
    url = f"sqlite:///{tmp_path}/states.db"
    for state, changes in (("v", {"retention": 100}), ("v.2", {"retention": 100} | other)):
        Rolled(url, [(10, 1), LIFETIME], state=state, **changes).batch(Row(3, "a"))
    if is_taken:
        assert swap(url, {"v": "v.2"}, force=True)[0].record.to == "v.2"
    else:
        refused(url, "v.2", "less lag and retention", force=True)


def test_a_version_that_has_not_forgotten_a_key_is_refused(url):
    versions(url, 5, 5)
    forget(url, "v", {"k": "a"}, id="ticket-7")
    with pytest.raises(UsageError, match=r"'v\.2' has not forgotten what 'v' has, under the id 'ticket-7'"):
        swap(url, {"v": "v.2"}, force=True)
    forget_listed(url, "v.2", listed(url, "v"))
    swap(url, {"v": "v.2"})
    with open_reader(url, "v") as reader:
        assert reader.multi_get(["a", "b"]) == [None, {"n": 2}]


def test_a_list_that_is_given_again_leaves_what_came_since_and_one_given_too_early_is_no_use(url):
    old, new = versions(url, 5, 3)
    forget(url, "v", {"k": "a"}, id="one")
    forget_listed(url, "v.2", listed(url, "v"))
    new.batch_to(5, a=4)  # history that the old version had before it forgot
    with pytest.raises(UsageError, match="had not come as far then"):
        swap(url, {"v": "v.2"})
    forget_listed(url, "v.2", listed(url, "v"))
    for job in (old, new):
        job.batch_to(6, a=9)
    forget(url, "v", {"k": "b"}, id="two")
    forget_listed(url, "v.2", listed(url, "v"))
    swap(url, {"v": "v.2"})
    with open_reader(url, "v") as reader:
        assert reader.multi_get(["a", "b"]) == [{"n": 9}, None]


def test_a_list_for_other_keys_under_the_same_id_is_refused(url):
    versions(url, 5, 5)
    forget(url, "v", {"k": "a"}, id="one")
    forget(url, "v.2", {"k": "b"}, id="one")
    with pytest.raises(UsageError, match="has forgotten other keys under the id 'one'"):
        forget_listed(url, "v.2", listed(url, "v"))
    assert open_reader(url, "v.2").multi_get(["a", "b"]) == [{"n": 2}, None]


def correct(job: Version, name: str, rows: str = "rows") -> None:
    """A correction that writes nothing but its entry of the list."""
    ledger = Ledger(job.store, job.ledger.record.state)
    seen = ledger.remember()
    attempt, known = ledger.begin_operator("correction", seen=seen), read_list(job.store, seen)
    entry = ListEntry(kind="correction", id=name, at="2026-11-28T20:00:00Z", txid=attempt.txid, digest=rows)
    with writer_of(job.store, attempt.token) as writer:
        write_entries(writer, seen, attempt, {len(known): entry})
    ledger.commit_correction(attempt.txid, keys_delta=0)


def test_a_version_that_lacks_a_correction_is_refused(url):
    old, new = versions(url, 5, 5)
    correct(old, "one")
    correct(old, "two")
    correct(new, "one", "other rows")
    refused(url, "v.2", "lacks corrections of 'v', or has other rows under their ids: 'one', 'two'")
    refused(url, "v.2", "ids: 'one'[.]", counted=["two"])
    correct(new, "two")
    assert swap(url, {"v": "v.2"}, counted=["one"])[0].distance == "not behind"
    with pytest.raises(UsageError, match=r"'v' lacks corrections of 'v\.2'.*'one'"):
        swap(url, {"v": None})
    assert swap(url, {"v": None}, force=True)[0].record.to == "v"


def test_a_correction_between_the_comparison_and_the_write_is_compared_anew(url, monkeypatch):
    old, _ = versions(url, 5, 5)
    on_call(monkeypatch, operation, "distance", 2 if one_by_one(url) else 1, lambda: correct(old, "one"))
    if one_by_one(url):
        assert swap(url, {"v": "v.2"})[0].record.to == "v.2"
    else:
        refused(url, "v.2", "lacks corrections")


def test_a_swap_says_what_it_did_not_ask(url):
    versions(url, 5)
    Version(url, state="v.2", fields=(Field("n", "Max(x)", "bigint"),)).batch_to(5, a=1)
    (done,) = swap(url, {"v": "v.2"})
    said = " ".join(done.not_asked)
    assert "mapstate compare v v.2" in said
    assert "the job of v.2 goes on: it last committed 2026-11-28T20:00:00Z" in said
    assert "(Sum(n) bigint, now Max(x) bigint)" in said
    assert ("between the comparison and the write" in said) == one_by_one(url)


def test_a_name_may_be_an_alias_alone(url):
    Version(url, state="w.1").batch_to(5, a=1)
    Version(url, state="w.2").batch_to(5, a=2)
    assert swap(url, {"w": "w.1"})[0].record.before is None
    assert open_reader(url, "w").get("a") == {"n": 1}
    swap(url, {"w": "w.2"})
    with pytest.raises(UsageError, match="--keep-only"):
        drop(url, "w.1")
    assert keep_only(url, "w") == AliasRecord(alias="w", to="w.2", before=None, keeps=("w.2",), number=2)
    assert drop(url, "w.1").records == 1
    with pytest.raises(UsageError, match="no version before"):
        swap(url, {"w": None})
    with pytest.raises(UsageError, match="has no alias"):
        keep_only(url, "x")
    listed = {one.name: one for one in list_states(url)}
    assert set(listed) == {"w", "w.2"}
    assert listed["w"].ledger is None
    assert listed["w"].alias == AliasRecord(alias="w", to="w.2", before=None, keeps=("w.2",), number=2)


def test_several_names_are_swapped_in_one_write_or_none(url):
    versions(url, 5, 5, 4)
    for name in ("u", "u.2"):
        Version(url, state=name).batch_to(5, a=1)
    if one_by_one(url):
        with pytest.raises(UsageError, match="--one-by-one"):
            swap(url, {"u": "u.2", "v": "v.2"})
    for behind_is in (0, 1):
        to = dict([("u", "u.2"), ("v", "v.3")][:: 1 if behind_is else -1])
        with pytest.raises(UsageError, match="behind"):
            swap(url, to, one_by_one=one_by_one(url))
        assert [resolve(url).open(f"{name}.alias").load() for name in to] == [None, None]
    assert [one.record.to for one in swap(url, {"u": "u.2", "v": "v.2"}, one_by_one=one_by_one(url))] == ["u.2", "v.2"]


def test_a_swap_leaves_the_attempts_of_both_versions_alone(url):
    old, new = versions(url, 5, 5)
    attempts = [job.attempt(a=10) for job in (old, new)]
    claims = [job.store.claim(attempt.txid, 0, "mine") for job, attempt in zip((old, new), attempts, strict=True)]
    swap(url, {"v": "v.2"})
    for job, attempt, claim in zip((old, new), attempts, claims, strict=True):
        assert job.store.claim(attempt.txid, 0, "another") == claim == "mine"
        with writer_of(job.store, attempt.token) as writer:
            writer.multi_get(["b"])
            writer.multi_put(["b"], job.codec.dumps([(attempt.txid, 7, 1)]))
        job.commit(attempt, 6, a=10)
    assert open_reader(url, "v").get("b") == {"n": 7}


def test_a_batch_between_the_comparison_and_the_write_is_compared_anew(url, monkeypatch):
    old, _ = versions(url, 5, 5)
    on_call(monkeypatch, operation, "distance", 2 if one_by_one(url) else 1, lambda: old.batch_to(6, a=9))
    if one_by_one(url):
        assert swap(url, {"v": "v.2"})[0].record.to == "v.2"
    else:
        refused(url, "v.2", "partition 0 of t by 1")


@pytest.mark.parametrize("url", ONE_BY_ONE, indirect=True)
def test_a_swap_that_keeps_a_version_first_and_is_refused_then_leaves_it_kept(url, monkeypatch):
    old, new = versions(url, 5, 5)
    on_call(monkeypatch, operation, "distance", 1, lambda: old.batch_to(6, a=9))
    with pytest.raises(UsageError, match="by 1"):
        swap(url, {"v": "v.2"})
    with open_reader(url, "v") as reader:
        assert reader.get("a") == {"n": 9}
    new.batch_to(6, a=8)
    assert swap(url, {"v": "v.2"})[0].record == AliasRecord(
        alias="v", to="v.2", before="v", keeps=("v", "v.2"), number=1
    )


def test_a_swap_after_a_drop_has_asked_is_seen_before_anything_is_removed(url, monkeypatch):
    versions(url, 5, 5)
    on_call(monkeypatch, dropping, "aliases_of", 1, lambda: swap(url, {"v": "v.2"}))
    with pytest.raises(UsageError, match="Nothing was removed"):
        drop(url, "v.2")
    assert open_reader(url, "v").get("a") == {"n": 2}
    Version(url, state="v.2").batch_to(6, a=3)  # its job goes on after a restart
    assert open_reader(url, "v").get("a") == {"n": 3}
    assert swap(url, {"v": "v"}, force=True)[0].record.number == 2
    assert swap(url, {"v": None})[0].record.to == "v.2"


def test_no_swap_leads_to_a_version_that_a_drop_has_taken(url, monkeypatch):
    versions(url, 5, 5)
    on_call(monkeypatch, dropping, "aliases_of", 2, lambda: refused(url, "v.2", "is being removed"))
    assert drop(url, "v.2").records == 2
    with pytest.raises(StateNotFoundError):
        swap(url, {"v": "v.2"})
    assert open_reader(url, "v").get("a") == {"n": 1}


def test_a_drop_between_the_comparison_and_the_write_of_a_swap_wins(url, monkeypatch):
    versions(url, 5, 5)
    on_call(monkeypatch, operation, "distance", 1, lambda: drop(url, "v.2"))
    with pytest.raises(StateNotFoundError):
        swap(url, {"v": "v.2"})
    assert open_reader(url, "v").get("a") == {"n": 1}


@pytest.mark.parametrize("url", ONE_BY_ONE, indirect=True)
def test_without_joint_ledgers_a_version_is_kept_before_its_ledger_is_read_again(url, monkeypatch):
    versions(url, 5, 5)

    def remove() -> None:
        with pytest.raises(UsageError, match="Nothing was removed"):
            drop(url, "v.2")

    on_call(monkeypatch, operation, "distance", 2, remove)
    assert swap(url, {"v": "v.2"})[0].record.to == "v.2"
    assert open_reader(url, "v").get("a") == {"n": 2}


@pytest.mark.parametrize("times", [40, pytest.param(1000, marks=pytest.mark.full)])
def test_swaps_there_and_back_under_load_show_each_call_one_version(url, times, opened):
    """The value of every key is version and batch, so a mixed or an older answer shows."""
    old, new = versions(url, 0, 0)
    ended, wrong, reads = threading.Event(), list[str](), [0]

    def count() -> None:
        draw, at = random.Random(3), [0, 0]
        while not ended.is_set():
            which = 0 if at[0] <= at[1] else 1
            which = which if draw.random() < 0.9 else at.index(min(at))
            at[which] += 1
            values = dict.fromkeys(("a", "b", "c"), 1000 * at[which] + which + 1)
            (old, new)[which].batch_to(at[which], **values)

    def read() -> None:
        try:
            with opened(url, "v", follow=0) as reader:
                while not ended.is_set():
                    values, ledger = reader.multi_get_as_of(["a", "b"])
                    found = {value["n"] for value in values}
                    if len(found) != 1:
                        wrong.append(f"{found} in one call")
                    version = found.pop() % 1000
                    if version != (1 if ledger.state == "v" else 2):
                        wrong.append(f"{version} of {ledger.state}")
                    reads[0] += 1
        except BaseException as error:
            wrong.append(repr(error))
            raise

    threads = [threading.Thread(target=job) for job in (count, read, read)]
    for thread in threads:
        thread.start()
    done = 0
    try:
        while done < times and not wrong and all(thread.is_alive() for thread in threads):
            with suppress(UsageError):  # it is behind just then
                swap(url, {"v": "v.2" if done % 2 == 0 else None})
                done += 1
            while reads[0] <= done and not wrong and all(thread.is_alive() for thread in threads):
                time.sleep(0.0005)
    finally:
        ended.set()
        for thread in threads:
            thread.join()
    assert wrong == []
    assert done == times
    assert reads[0] >= times
    assert open_reader(url, "v").ledger().state == "v"


def ran(*words: str) -> Any:
    return CliRunner().invoke(app, [*words], catch_exceptions=False)


def test_the_commands(tmp_path):
    url = f"sqlite:///{tmp_path}/state.db"
    versions(url, 5, 5)
    assert ran("swap", url, "v").exit_code == 2
    assert ran("swap", url, "v", "--to", "v.2", "--back").exit_code == 2
    said = ran("swap", url, "v", "--to", "v.2").stdout.splitlines()
    assert said[0] == "v -> v.2 (number 1). Not behind. Back: mapstate swap v --back"
    assert said[1] == "Not asked: whether values are equal (mapstate compare v v.2)."
    assert ran("get", url, "v", "a").stdout == "k\tn\na\t2\n"
    assert ran("get", url, "v", "a", "--exact").stdout == "k\tn\na\t1\n"
    assert ran("ledger", url, "v").stdout.startswith("v -> v.2, swap 1; kept are v, v.2\n")
    assert json.loads(ran("ledger", url, "v", "--json").stdout)["alias"]["to"] == "v.2"
    assert "v -> v.2\topaque" in ran("ls", url).stdout
    listed = json.loads(ran("ls", url, "--json").stdout)
    assert [one["state"] for one in listed] == ["v", "v.2"]
    assert listed[0]["alias"] == {"alias": "v", "to": "v.2", "before": "v", "keeps": ["v", "v.2"], "number": 1}
    assert json.loads(ran("watch", url, "v", "a", "--count", "1", "--json").stdout)["version"] == "v.2"
    to = tmp_path / "v.csv"
    assert ran("export", url, "v", "--to", str(to)).exit_code == 0
    assert "2" in to.read_text()
    for words in (("v", "--yes"), ("v", "--exact", "--yes"), ("v.2", "--yes")):
        done = ran("drop", url, *words)
        assert (done.exit_code, "Nothing was removed" in done.stderr) == (2, True)
    assert json.loads(ran("swap", url, "v", "--keep-only", "--json").stdout)["keeps"] == ["v.2"]
    assert ran("drop", url, "v", "--exact", "--yes").exit_code == 0
    assert ran("get", url, "v", "a").stdout == "k\tn\na\t2\n"
    assert ran("swap", url, "v", "--back").exit_code == 2
    Version(url, state="w").batch_to(5, a=1)
    assert ran("swap", url, "v=v.2", "w").exit_code == 2
    Version(url, state="v.3").batch_to(5, a=1)
    Version(url, state="w.2").batch_to(5, a=1)
    lines = ran("swap", url, "v=v.3", "w=w.2", "--json").stdout.splitlines()
    assert [json.loads(line)["distance"] for line in lines] == ["not behind", "not behind"]
    assert all(json.loads(line)["not_asked"] for line in lines)


def test_a_service_follows_the_alias_and_says_which_version_answers(tmp_path):
    url = f"sqlite:///{tmp_path}/state.db"
    versions(url, 5, 5)
    with client_of(url) as client:
        before = client.get("/states/v/values?k=a")
        assert (before.json()["state"], before.json()["value"]) == ("v", {"n": 1})
        assert "version" not in before.json()
        swap(url, {"v": "v.2"})
        wait_for(lambda: client.get("/states/v/values?k=a").json()["value"] == {"n": 2}, "the swap is seen")
        after = client.get("/states/v/values?k=a", headers={"If-None-Match": before.headers["ETag"]})
        assert (after.status_code, after.json()["state"], after.json()["version"]) == (200, "v", "v.2")
        assert client.get("/states/v").json()["version"] == "v.2"
        assert "version" not in client.get("/states/v.2").json()
        listed = client.get("/states").json()["states"]
        assert [(one["name"], one.get("version")) for one in listed] == [("v", "v.2"), ("v.2", None)]
        keep_only(url, "v")
        drop(url, "v")
    with client_of(url) as client:
        assert client.get("/states/v/values?k=a").json()["value"] == {"n": 2}
