"""Comparisons of two versions of a state, while the jobs of both run."""

from __future__ import annotations

import json
import random
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from states import Job, Tens
from typer.testing import CliRunner
from versions import BlockVersion, Version

import mapstate.operations.compare as operation
from mapstate.cli.commands import app
from mapstate.cli.export import FORMATS
from mapstate.errors import StaleBatchError, StateNotFoundError, UnknownColumnError, UsageError
from mapstate.operations.advance import advance
from mapstate.operations.compare import compare
from mapstate.operations.forget import forget
from mapstate.operations.vacuum import vacuum
from mapstate.protocol.ledger import Ledger
from mapstate.protocol.ways_back import further
from mapstate.schema import Field
from mapstate.serializers import record_codec
from mapstate.testing import wait_for
from mapstate.values import difference

REDIS = [
    pytest.param("redis", marks=pytest.mark.redis),
    pytest.param("cluster", marks=[pytest.mark.redis, pytest.mark.full]),
]


@pytest.fixture(params=["memory", "sqlite", *REDIS])
def url(request: Any, tmp_path: Any) -> str:
    """A store of each kind, empty."""
    if request.param in ("redis", "cluster"):
        found: str = request.getfixturevalue(f"{request.param}_url")
        return found
    return f"memory://{tmp_path.name}" if request.param == "memory" else f"sqlite:///{tmp_path}/state.db"


def numbers(done: Any) -> tuple[int, ...]:
    return tuple(done[:5])


def test_each_key_is_equal_different_or_only_in_one(url):
    Version(url, state="v").batch_to(5, a=1, b=2, c=3, gone=9)
    Version(url, state="v.2").batch_to(5, a=1, b=20, d=4)
    done = compare(url, "v", "v.2")
    assert numbers(done) == (1, 1, 2, 1, 0)
    assert (done.passes, done.fields, done.how) == (1, ["n"], "offsets")
    assert done.positions == ['[{"t":{"0":5}}]']
    assert done.largest == [(("b",), {"n": 2}, {"n": 20})]
    assert not done.is_equal


def test_a_version_that_lags_is_waited_for_and_what_stood_still_meanwhile_is_exact(url, monkeypatch):
    old, new = Version(url, state="v"), Version(url, state="v.2")
    old.batch_to(5, a=1, b=2, c=3)
    new.batch_to(3, a=1, b=2, c=1)
    pauses: list[Callable[[], None]] = [lambda: new.batch_to(4, c=2), lambda: new.batch_to(6, b=5, c=3, d=1)]
    monkeypatch.setattr(operation, "pause", lambda _: pauses.pop(0)())
    done = compare(url, "v", "v.2", passes=1)
    # Of c the last ledger that is not beyond 5 does not have the 3 that is true there.
    assert numbers(done) == (1, 0, 0, 0, 3)
    assert done.positions == ['[{"t":{"0":5}}]']
    monkeypatch.undo()
    old.batch_to(6, b=5, d=1)
    assert numbers(compare(url, "v", "v.2")) == (4, 0, 0, 0, 0)


def test_a_version_that_stays_behind_is_refused_with_how_far(url):
    Version(url, state="v").batch_to(4711, a=1)
    Version(url, state="v.2").batch_to(4700, a=1)
    with pytest.raises(UsageError, match=r"'v\.2' by partition 0 of t by 11"):
        compare(url, "v", "v.2", wait=0)
    with pytest.raises(UsageError, match=r"'v\.2' by partition 0 of t by 11"):
        compare(url, "v.2", "v", wait=0)


def on_read(monkeypatch: Any, number: int, do: Callable[[], object]) -> None:
    """Something comes before the reads of a version: of the first one as number 1, and so on, in all passes."""
    read, calls = operation._Comparison._read, [0]

    def called(*args: Any) -> None:
        calls[0] += 1
        if calls[0] == number:
            do()
        read(*args)

    monkeypatch.setattr(operation._Comparison, "_read", called)


def test_a_batch_between_the_wait_and_the_reads_is_in_motion_and_read_again(url, monkeypatch):
    old, new = Version(url, state="v"), Version(url, state="v.2")
    for job in (old, new):
        job.batch_to(5, a=1, b=2)

    def both() -> None:
        old.batch_to(6, b=3, c=1)

    on_read(monkeypatch, 1, both)
    assert numbers(compare(url, "v", "v.2", passes=1)) == (1, 0, 0, 0, 2)
    monkeypatch.undo()
    new.batch_to(6, b=3, c=1)
    on_read(monkeypatch, 2, lambda: old.batch_to(7, a=2))  # the first version is read before
    done = compare(url, "v", "v.2", passes=1)
    assert numbers(done) == (3, 0, 0, 0, 0)
    assert done.positions == ['[{"t":{"0":6}}]']


def test_keys_in_motion_are_compared_as_of_a_position_of_their_own(url, monkeypatch):
    old, new = Version(url, state="v"), Version(url, state="v.2")
    for job in (old, new):
        job.batch_to(5, a=1, b=2)

    def both() -> None:
        old.batch_to(6, b=3, c=1)
        new.batch_to(6, b=3, c=2)

    on_read(monkeypatch, 1, both)
    done = compare(url, "v", "v.2")
    assert numbers(done) == (2, 1, 0, 0, 0)
    assert done.passes == 2
    assert done.positions == ['[{"t":{"0":5}}]', '[{"t":{"0":6}}]']


def test_an_attempt_that_is_not_committed_is_in_motion_and_its_values_are_not_read(url):
    old, new = Version(url, state="v"), Version(url, state="v.2")
    for job in (old, new):
        job.batch_to(5, a=1, b=2)
    old.attempt(a=9)
    done = compare(url, "v", "v.2")
    assert (numbers(done), done.is_equal) == ((1, 0, 0, 0, 1), True)
    old.attempt(b=9)  # and the one before is dead from now on
    old.batch_to(6, c=1)
    new.batch_to(6, c=1)
    done = compare(url, "v", "v.2")
    assert numbers(done) == (3, 0, 0, 0, 0)


def test_a_vacuum_or_a_forget_meanwhile_leaves_absent_keys_unknown(url, monkeypatch):
    old, new = Version(url, state="v"), Version(url, state="v.2")
    for job in (old, new):
        job.batch_to(5, a=1, b=2, c=3)
    on_read(monkeypatch, 1, lambda: forget(url, "v", {"k": "a"}, id="one"))
    assert numbers(compare(url, "v", "v.2", passes=1)) == (2, 0, 0, 0, 1)
    monkeypatch.undo()
    assert numbers(compare(url, "v", "v.2")) == (2, 0, 0, 1, 0)
    old.batch_to(6, b=None)
    new.batch_to(6, b=None)
    on_read(monkeypatch, 1, lambda: vacuum(url, "v"))
    assert numbers(compare(url, "v", "v.2", passes=1))[3:] == (0, 2)  # a and b have no record in v
    monkeypatch.undo()
    on_read(monkeypatch, 1, lambda: vacuum(url, "v"))
    assert numbers(compare(url, "v", "v.2", passes=2)) == (1, 0, 0, 1, 0)


@pytest.mark.parametrize("made", [Version, BlockVersion])
def test_a_key_that_leaves_or_enters_a_block_meanwhile_is_in_motion_and_read_again(url, made, monkeypatch):
    old, new = BlockVersion(url, state="v", blocks=100), made(url, state="v.2")
    assert len({*record_codec(old.ledger.record).places_of(["a", "b", "c", "d"])}) == 4
    for job in (old, new):
        job.batch_to(5, a=1, b=2, c=3)
    on_read(monkeypatch, 1, lambda: old.batch_to(6, b=None, d=1))
    assert numbers(compare(url, "v", "v.2", passes=1)) == (2, 0, 0, 0, 2)
    monkeypatch.undo()
    new.batch_to(6, d=1)
    done = compare(url, "v", "v.2")
    assert numbers(done) == (3, 0, 0, 1, 0)
    assert done.passes == 2  # the first one lists blocks, which do not tell what is gone of them
    on_read(monkeypatch, 3, lambda: forget(url, "v", {"k": "a"}, id="one"))  # at the second pass
    assert numbers(compare(url, "v", "v.2", passes=2))[4] == 1
    monkeypatch.undo()
    assert numbers(compare(url, "v", "v.2")) == (2, 0, 0, 2, 0)
    assert numbers(compare(url, "v.2", "v")) == (2, 0, 2, 0, 0)


def test_a_state_that_is_reset_or_rolled_back_meanwhile_is_an_error(url, monkeypatch):
    old, new = Version(url, state="v"), Version(url, state="v.2")
    for job in (old, new):
        job.batch_to(5, a=1)
        job.batch_to(6, a=2)
    on_read(monkeypatch, 1, lambda: Ledger(old.store, "v").rollback())
    with pytest.raises(StaleBatchError, match="'v' was reset, rolled back"):
        compare(url, "v", "v.2")
    monkeypatch.undo()
    Version(url, state="v.3").batch_to(6, a=2)
    on_read(monkeypatch, 2, lambda: Version(url, state="v.3", owner="another", on_new_owner="reset"))
    with pytest.raises(StaleBatchError, match=r"'v\.3' was reset"):
        compare(url, "v.2", "v.3")
    monkeypatch.undo()

    def repeated() -> None:
        Ledger(new.store, "v.2").rollback()
        Version(url, state="v.2").batch_to(6, a=1)
        Version(url, state="v.2").batch_to(7, a=1)

    Version(url, state="v.4").batch_to(6, a=2)
    on_read(monkeypatch, 1, repeated)
    with pytest.raises(StaleBatchError, match=r"'v\.2' was reset, rolled back"):
        compare(url, "v.2", "v.4")


@pytest.mark.parametrize("how", ["reset", "a field"])
def test_a_version_that_is_another_one_at_the_second_pass_is_an_error(url, monkeypatch, how):
    old, new = Version(url, state="v"), Version(url, state="v.2")
    for job in (old, new):
        job.batch_to(5, a=1, b=2)
    on_read(monkeypatch, 1, lambda: (old.batch_to(6, b=3), new.batch_to(6, b=3)))
    compared = operation._Comparison._compare

    def changed(*args: Any) -> None:
        compared(*args)
        if how == "reset":
            Version(url, state="v.2", owner="another", on_new_owner="reset").batch_to(7, a=9)
        else:
            both = (Field("n", "Sum(n)", "bigint"), Field("m", "Max(n)", "bigint"))
            Version(url, state="v.2", fields=both).batch_to(7, b=(3, 1))
        old.batch_to(7, c=1)

    monkeypatch.setattr(operation._Comparison, "_compare", changed)
    with pytest.raises(StaleBatchError, match=r"'v\.2' was reset, rolled back, made anew or given a field"):
        compare(url, "v", "v.2")


def test_a_field_that_is_added_and_written_while_it_is_read_is_an_error(url, monkeypatch):
    for state in ("v", "v.2"):
        Version(url, state=state).batch_to(5, a=1, b=2)
    both = (Field("n", "Sum(n)", "bigint"), Field("m", "Max(n)", "bigint"))
    on_read(monkeypatch, 2, lambda: Version(url, state="v.2", fields=both).batch_to(6, b=(3, 1)))
    with pytest.raises(StaleBatchError, match="given a field"):
        compare(url, "v", "v.2")


def test_offsets_that_cannot_be_compared_are_only_so_while_nothing_is_committed(url, monkeypatch):
    jobs = [Job(url, state=name, owner=f"query of {name}") for name in ("v", "v.2")]
    for job in jobs:
        job.batch(a=1, b=2)
    jobs[1].batch(b=3)
    done = compare(url, "v", "v.2")
    assert numbers(done) == (1, 1, 0, 0, 0)
    assert (done.how, done.positions) == ("as they are", [])
    for number in (1, 2):
        monkeypatch.undo()
        on_read(monkeypatch, number, lambda: jobs[0].batch(c=1))
        with pytest.raises(UsageError, match="cannot be compared while jobs run"):
            compare(url, "v", "v.2")


def test_keys_that_are_numbers_in_one_version_alone_cannot_be_compared(url, monkeypatch):
    """As of a state with blocks on Aerospike, beside one without."""
    for name in ("v", "v.2"):
        Job(url, state=name).batch(a=1)
    monkeypatch.setattr("mapstate.operations.compare.is_native_integer", lambda ledger: ledger.state == "v")
    with pytest.raises(UsageError, match="'v' and 'v.2' are text in one, as with blocks, and numbers in the other"):
        compare(url, "v", "v.2")


def test_topics_that_are_others_cannot_be_compared():
    assert further('[{"t":{"0":5}}]', '[{"u":{"0":5}}]') is None
    assert further('[{"t":{"0":5}}]', '[{"t":{"0":5}},{"t":{"0":5}}]') is None
    assert further('[{"logOffset":1}]', '[{"logOffset":1}]') is None
    assert further(None, '[{"t":{"0":5}}]') is None
    assert further('[{"t":{"0":5,"1":2}}]', '[{"t":{"0":4,"2":7}}]') == '[{"t":{"0":5,"1":2,"2":7}}]'


@pytest.mark.parametrize("kind", ["transactional", "non-transactional"])
def test_a_state_without_values_before_is_compared_or_refused(url, kind, monkeypatch):
    old, new = (Version(url, state=name, type=kind) for name in ("v", "v.2"))
    for job in (old, new):
        job.batch_to(5, a=1, b=2)
    assert numbers(compare(url, "v", "v.2")) == (2, 0, 0, 0, 0)
    on_read(monkeypatch, 1, lambda: old.attempt(a=7))
    if kind == "transactional":
        assert numbers(compare(url, "v", "v.2")) == (1, 0, 0, 0, 1)
    else:
        with pytest.raises(UsageError, match="while jobs run"):
            compare(url, "v", "v.2")


def test_what_cannot_be_compared_is_refused_before_anything_is_read(url):
    Version(url, state="v").batch_to(5, a=1)
    Version(url, state="same").batch_to(5, a=1)
    with pytest.raises(StateNotFoundError):
        compare(url, "v", "w")
    with pytest.raises(UsageError, match="two states"):
        compare(url, "v", "v")
    Version(url, state="ttl", has_ttl=True).batch_to(5, a=1)
    with pytest.raises(UsageError, match="ttl"):
        compare(url, "v", "ttl")
    Version(url, state="m", fields=(Field("m", "Sum(n)", "bigint"),)).batch_to(5, a=1)
    with pytest.raises(UsageError, match="no field in common"):
        compare(url, "v", "m")
    with pytest.raises(UnknownColumnError):
        compare(url, "v", "m", fields=["n"])
    with pytest.raises(UnknownColumnError):
        compare(url, "v", "same", tolerances={"x": 1})
    for number in ("nan", "inf", "-0.1"):
        with pytest.raises(UsageError, match="a finite number of at least 0"):
            compare(url, "v", "same", tolerances={"n": float(number)})
    Version(url, state="empty")
    with pytest.raises(UsageError, match="counts no batch"):
        compare(url, "v", "empty")
    Tens(url, "tens").batch({15: {"a": 1}}, watermark=20)
    with pytest.raises(UsageError, match="key columns"):
        compare(url, "v", "tens")


def test_windows_are_compared_where_they_are_final_in_both_and_gone_in_none(url):
    old, new = Tens(url, "w"), Tens(url, "w.2")
    old.batch({5: {"a": 1, "b": 1}, 15: {"a": 2}, 25: {"a": 3}}, watermark=30)
    new.batch({5: {"a": 1}, 15: {"a": 7}, 25: {"a": 4}}, watermark=20)
    done = compare(url, "w", "w.2")
    assert (numbers(done), done.how) == ((1, 1, 1, 0, 0), "final windows")


def test_a_final_window_that_was_open_again_meanwhile_is_an_error(url, monkeypatch):
    jobs = Tens(url, "w"), Tens(url, "w.2")
    for job in jobs:
        job.batch({5: {"a": 1}}, watermark=20)

    def again() -> None:
        advance(url, "w", 5, back=True)
        jobs[0].batch({6: {"a": 1}}, watermark=20)

    on_read(monkeypatch, 2, again)  # the first version is read before
    with pytest.raises(StaleBatchError, match="or its watermark put back"):
        compare(url, "w", "w.2")


@pytest.mark.parametrize(
    ("one", "other", "apart"),
    [
        (0, 0.0, 0),
        (float("nan"), float("nan"), 0),
        (float("nan"), 1.0, float("inf")),
        (1, None, float("inf")),
        (2**53, 2**53 + 1, 1),
        (1.5, 1, 0.5),
        ("1", 1, float("inf")),
        (True, 1, float("inf")),
        ([1, float("nan")], [1, float("nan")], 0),
        (float("inf"), float("inf"), 0),
        (1.7e308, -1.7e308, sys.float_info.max),
        (10**400, 1, sys.float_info.max),
    ],
)
def test_how_far_two_values_are_apart(one, other, apart):
    assert difference(one, other) == difference(other, one) == apart


def test_a_tolerance_a_sample_and_the_fields_of_a_comparison(url):
    both = (Field("n", "Sum(n)", "bigint"), Field("m", "Max(n)", "bigint"))
    for state, more in (("v", 0), ("v.2", 1)):
        values = {f"k{at}": (at + more, at) for at in range(200)}
        Version(url, state=state, fields=both).batch_to(5, **values)
    assert numbers(compare(url, "v", "v.2")) == (0, 200, 0, 0, 0)
    assert len(compare(url, "v", "v.2").largest) == 10
    assert numbers(compare(url, "v", "v.2", fields=["m"])) == (200, 0, 0, 0, 0)
    assert numbers(compare(url, "v", "v.2", tolerances={"n": 1})) == (200, 0, 0, 0, 0)
    assert numbers(compare(url, "v", "v.2", tolerances={"n": 0.99})) == (0, 200, 0, 0, 0)
    some = compare(url, "v", "v.2", sample=0.25)
    assert 20 < some.different < 80
    assert some == compare(url, "v.2", "v", sample=0.25)._replace(largest=some.largest)


@pytest.mark.parametrize("keys", [2_000, pytest.param(1_000_000, marks=[pytest.mark.full, pytest.mark.timeout(1200)])])
@pytest.mark.parametrize("made", [(Version, Version), (BlockVersion, Version), (BlockVersion, BlockVersion)], ids=str)
def test_planted_differences_are_found_under_load_and_nothing_else(url, keys, made, tmp_path):
    """Both versions take in one log, in batches of their own. Some keys of the second one were counted wrongly."""
    draw = random.Random(5)
    log = [f"k{draw.randrange(keys)}" for _ in range(4_000 + keys // 5)]  # longer than the comparison takes
    planted = {f"k{at}" for at in draw.sample(range(keys), 100)}
    blocks = [{} if of is Version else {"blocks": keys // 3 - at} for at, of in enumerate(made)]
    jobs = [of(url, state=name, **own) for of, name, own in zip(made, ("v", "v.2"), blocks, strict=True)]
    true = [{f"k{at}": at for at in range(keys)} for _ in jobs]
    true[1] |= {key: true[1][key] + 1_000_000 for key in planted}
    reached = [0, 0]
    for job, values in zip(jobs, true, strict=True):
        job.batch_to(0, **values)
    ended, failed = threading.Event(), list[BaseException]()

    def goes_on(which: int, end: int) -> None:
        changed = {}
        for key in log[reached[which] : end]:
            true[which][key] += 1
            changed[key] = true[which][key]
        jobs[which].batch_to(end, **changed)
        reached[which] = end

    def run(which: int) -> None:
        own = random.Random(which)
        try:
            while not ended.is_set():
                goes_on(which, min(reached[which] + own.randrange(4), len(log)))
                time.sleep(own.random() * 0.01)
        except BaseException as error:
            failed.append(error)
            raise

    threads = [threading.Thread(target=run, args=(which,)) for which in (0, 1)]
    for thread in threads:
        thread.start()
    to, seen = tmp_path / "diff.jsonl", [0]

    def on_page(_: int) -> None:
        """A batch comes between two pages."""
        wait_for(lambda: sum(reached) > seen[0] or sum(reached) == 2 * len(log) or failed, "the jobs go on")
        seen[0] = sum(reached)

    try:
        done = compare(
            *(url, "v", "v.2"), passes=5, to=to, write=FORMATS["jsonl"], page_size=keys // 5, on_page=on_page
        )
        assert 0 < min(reached) < len(log), "it was compared under load"
    finally:
        ended.set()
        for thread in threads:
            thread.join()
    assert failed == []
    found = [json.loads(line) for line in to.read_text().splitlines()]
    assert {row["k"] for row in found} <= planted
    assert {row["second_n"] - row["first_n"] for row in found} == {1_000_000}
    assert {row["difference"] for row in found} == {"different"}
    assert done.equal + done.different + done.in_motion == keys
    assert (done.only_in_first, done.only_in_second) == (0, 0)
    assert len(found) == done.different
    for which in (0, 1):
        goes_on(which, max(reached))
    last = compare(url, "v", "v.2")  # both are at one end now
    assert numbers(last) == (keys - 100, 100, 0, 0, 0)
    assert done.in_motion >= 100 - done.different


def ran(*words: str) -> Any:
    return CliRunner().invoke(app, [*words], catch_exceptions=False)


def test_the_command(tmp_path):
    url = f"sqlite:///{tmp_path}/state.db"
    Version(url, state="v").batch_to(5, a=1, b=2, c=3)
    Version(url, state="v.2").batch_to(5, a=1, b=20, d=4)
    to = tmp_path / "diff.csv"
    done = ran("compare", url, "v", "v.2", "--to", str(to))
    assert done.exit_code == 1
    assert done.stdout.splitlines() == [
        "equal 1   different 1   only in v 1   only in v.2 1   in motion 0 (1 pass)",
        'Exact as of [{"t":{"0":5}}]',
        '["b"]   {"n":2}   {"n":20}',
    ]
    assert to.read_text() == "k,difference,first_n,second_n\nb,different,2,20\nc,only in v,3,\nd,only in v.2,,4\n"
    asked = ("compare", url, "v", "v.2", "--json", "--tolerance", "n=18", "--sample", "100%", "--fields", "n")
    document = json.loads(ran(*asked).stdout)
    assert (document["equal"], document["different"], document["largest"]) == (2, 0, [])
    assert ran("compare", url, "v", "v.2", "--tolerance", "n").exit_code == 2
    assert ran("compare", url, "v", "v.2", "--sample", "some").exit_code == 2
    assert ran("compare", url, "v", "v.2", "--sample", "0%").exit_code == 2
    assert ran("compare", url, "v", "v.2", "--to", "x.txt").exit_code == 2
    parquet = tmp_path / "diff.parquet"
    assert ran("compare", url, "v", "v.2", "--to", str(parquet)).exit_code == 1
    import pyarrow.parquet

    assert pyarrow.parquet.read_table(parquet).column("second_n").to_pylist() == [20, None, 4]
    Version(url, state="same").batch_to(5, a=1, b=2, c=3)
    assert ran("compare", url, "v", "same").exit_code == 0


def test_the_command_does_not_succeed_where_all_keys_were_in_motion(tmp_path):
    url = f"sqlite:///{tmp_path}/state.db"
    for state in ("v", "v.2"):
        Version(url, state=state).batch_to(5, a=1, b=2)
    Version(url, state="v.2").attempt(a=2, b=2)
    done = compare(url, "v", "v.2")
    assert (numbers(done), done.is_equal) == ((0, 0, 0, 0, 2), False)
    ended = ran("compare", url, "v", "v.2")
    assert ended.exit_code == 1
    assert "nothing was compared" in ended.stderr


def test_a_sample_without_a_key_is_no_success(tmp_path):
    url = f"sqlite:///{tmp_path}/state.db"
    for state in ("v", "v.2"):
        Version(url, state=state).batch_to(5, a=1, b=2)
    assert not compare(url, "v", "v.2", sample=1e-12).is_equal
    ended = ran("compare", url, "v", "v.2", "--sample", "1e-10%")
    assert ended.exit_code == 1
    assert "nothing was compared: no key was there" in ended.stderr
