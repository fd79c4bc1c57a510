"""Tasks and drivers that come too late, or twice: what they write is refused, and the counts stay right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psutil
import pytest
from processes import FIXTURES, cluster, job
from pyspark.errors import StreamingQueryException

from mapstate import Count, Sum, errors, newStream, opaque, open_reader
from mapstate.backends import resolve
from mapstate.testing import Begins, FaultyBackend, Kill, Mark, Wait, wait_for

pytestmark = [pytest.mark.spark, pytest.mark.redis]

STALLS = [("multi_put", 1, True), ("multi_put", 3, False), ("multi_get", 2, False), ("multi_get", 3, True)]
STALLS += [("claim", 1, False), ("claim", 1, True), ("writer", 1, True)]


@pytest.fixture(params=["redis", *(pytest.param(store, marks=pytest.mark.full) for store in ("packed", "sqlite"))])
def url(request: Any, store_at: Callable[[str], str]) -> str:
    return store_at(request.param)


def contents(url: str) -> dict[Any, Any]:
    with open_reader(url, "visits") as reader:
        return dict(reader.scan())


def count(visits: Any, spark: Any, backend: Any, **options: Any) -> Any:
    return (
        newStream("visits", visits.stream(spark))
        .groupBy("user_id")
        .persistentAggregate(
            opaque(backend, **({"chunk_size": 1, "apply_on": "executors"} | options)),
            visits=Count(),
            bytes=Sum("bytes"),
        )
    )


def test_a_task_that_writes_after_the_next_batch_was_committed_is_refused(url, spark, visits, tmp_path, rounds, tally):
    """It stalls at each place where a task can; its attempt fails, the batch is begun anew, and so is the next one."""
    stalls = rounds([STALLS[1]], STALLS * 2)
    for at, (method, call, after) in enumerate(stalls):
        place = tmp_path / f"{at}"
        place.mkdir()
        # the first task to come there stalls, the worker of the other dies
        here = {"method": method, "call": call, "after": after, "since": "begun"}
        faults = (
            Mark(method="swap", where=Begins(3 * at), after=True, name="begun"),
            Wait(until="go", name="stall", seconds=240, **here),
            Kill(name="kill", **here),
        )
        backend = FaultyBackend(resolve(url), str(place), faults, record=True)
        for batch in (3 * at, 3 * at + 1):
            visits.put(f"{batch}", [(f"u{n % 31}", n) for n in range(batch, batch + 40)])
            query = count(visits, spark, backend).start(visits.checkpoint, trigger={"availableNow": True})
            query.awaitTermination(120)
            assert not query.isActive
        assert backend.fired("stall")
        assert backend.fired("kill")
        assert contents(url) == visits.truth()
        before = len(backend.calls)
        (place / "go").touch()
        pid = int((place / "stall").read_text())
        wait_for(lambda: ended_badly(backend, before) or not psutil.pid_exists(pid), "the late task")  # noqa: B023
        late = ended_badly(backend, before)
        puts = [call.outcome for call in backend.calls[before:] if call.method == "multi_put"]
        done_before = (method, after) == ("multi_put", True)  # the one that it stalled behind ends only now
        left_under_way = not url.startswith(
            "sqlite"
        )  # a put that Redis refuses may have returned: the next call says so
        returned = puts.count("done") - done_before
        assert 0 <= returned <= left_under_way, f"at {method} {call}: {puts}"
        # SQLite's reads are not fenced: there it finds records of a later attempt, and stops before its put
        finds = url.startswith("sqlite") and (method, after) in (("multi_put", True), ("multi_get", False))
        # where it stalled before it read its rows, Spark may have taken these away
        fits = late == (set() if finds else {"FencedError"}) or (method in ("claim", "writer") and not late)
        assert fits, f"at {method} {call}: {late}"
        assert contents(url) == visits.truth()
        visits.put(f"{3 * at + 2}", [(f"u{n}", 1) for n in range(31)])  # builds on nothing that came late
        count(visits, spark, url).start(visits.checkpoint, trigger={"availableNow": True}).awaitTermination(120)
        assert contents(url) == visits.truth()
        tally("task that goes on after the next commit", **{"refused" if late else "ended_without_a_put": 1})


def ended_badly(backend: FaultyBackend, before: int) -> set[str]:
    """The errors of the calls since then."""
    return {call.outcome for call in backend.calls[before:] if call.outcome != "done"}


@pytest.mark.full
def test_two_drivers_on_one_checkpoint_double_nothing_and_the_loser_says_why(
    redis_url, visits, tmp_path, rounds, tally
):
    """One stalls in mid-batch while the other runs to the end; in the full run also both from the same moment on."""
    for at, mode in enumerate(rounds(["stalled"], ["stalled", "at once"] * 2)):
        place, url = tmp_path / f"{at}", f"{redis_url}{at}/"
        place.mkdir()
        visits.checkpoint = place / "checkpoint"
        for batch in range(3):
            visits.put(f"{batch}", [(f"u{n % 23}", n) for n in range(batch, batch + 40)])
        options = {"url": url, "input": str(visits.input), "checkpoint": str(visits.checkpoint), "folder": str(place)}
        mark = ["Mark", {"method": "swap", "where": ["Begins", 1], "after": True, "name": "begun"}]
        stall = ["Wait", {"since": "begun", "call": 2, "until": "go", "name": "stall", "seconds": 240}]
        faults = {"faults": [mark, stall]} if mode == "stalled" else {}
        logs = place / "first.log", place / "second.log"
        with job(FIXTURES / "visits_job.py", options | faults, logs[0]) as first:
            if mode == "stalled":
                wait_for(lambda: (place / "stall").exists() or first.poll() is not None, "the stall", 240)  # noqa: B023
            with job(FIXTURES / "visits_job.py", options, logs[1]) as second:
                ended = [second.wait(240)]
                (place / "go").touch()
                ended.append(first.wait(240))
        said = [log.read_text() for log in reversed(logs)]
        if mode == "stalled":
            assert ended[0] == 0, said[0][-3000:]
            assert ended[1] != 0, "the first driver did not notice"
        for code, text in zip(ended, said, strict=True):
            clear = ("FencedError", "StaleBatchError", "UsageError", "CONCURRENT_STREAM_LOG_UPDATE", "concurrently")
            assert code == 0 or any(word in text for word in clear), text[-3000:]
        if any(ended):  # what both left, a third finishes
            with job(FIXTURES / "visits_job.py", options, place / "third.log") as third:
                assert third.wait(240) == 0, (place / "third.log").read_text()[-3000:]
        assert contents(url) == visits.truth()
        tally(f"two drivers on one checkpoint, {mode}", pairs=1)


def test_two_drivers_on_two_checkpoints_at_once(url, spark, visits, tmp_path, tally):
    """The second is refused in the middle of the first one's batch; if it adopts the state, the first is fenced."""
    visits.put("0", [(f"u{n}", n) for n in range(30)])
    faults = (Wait(call=3, until="go", name="stall", seconds=240),)
    first = count(visits, spark, FaultyBackend(resolve(url), str(tmp_path), faults))
    running = first.start(visits.checkpoint)
    wait_for((tmp_path / "stall").exists, "the first driver's task")
    with pytest.raises(StreamingQueryException, match="StateOwnershipError"):
        count(visits, spark, url).start(tmp_path / "second", trigger={"availableNow": True}).awaitTermination(120)
    adopting = count(visits, spark, url, on_new_owner="adopt_unchecked")
    adopting.start(tmp_path / "second", trigger={"availableNow": True}).awaitTermination(120)
    assert contents(url) == visits.truth()
    (tmp_path / "go").touch()
    with pytest.raises(StreamingQueryException, match="FencedError"):
        running.awaitTermination(120)
    assert isinstance(first.last_error, errors.FencedError)
    assert contents(url) == visits.truth()
    tally("two drivers on two checkpoints", pairs=1)


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.local_cluster
def test_a_speculative_copy_of_a_task_writes_nothing(redis_url, visits, tmp_path, rounds, tally):
    """A slow task gets a copy on the other host, which loses the claim; the batch is begun anew, and counts once."""
    batches = rounds(2, 6)
    faults: list[Any] = []
    for batch in range(batches):
        visits.put(f"{batch}", [(f"u{n}", n) for n in range(batch, batch + 40)])
        # the task that writes first is slow from its second put on, until the batch is begun anew
        faults.append(["Mark", {"method": "swap", "where": ["Begins", batch], "after": True, "name": f"begun-{batch}"}])
        anew = {"method": "swap", "where": ["Begins", batch], "after": True, "name": f"anew-{batch}"}
        faults.append(["Mark", anew])
        slow = {"since": f"begun-{batch}", "call": 2, "until": f"anew-{batch}", "name": f"slow-{batch}"}
        faults.append(["Wait", slow | {"seconds": 100}])
    options = {
        "url": redis_url,
        "input": str(visits.input),
        "checkpoint": str(visits.checkpoint),
        "folder": str(tmp_path),
        "faults": faults,
        "conf": {
            "spark.speculation": "true",
            "spark.speculation.interval": "50ms",
            "spark.speculation.multiplier": "1.01",
            "spark.speculation.quantile": "0.3",
            "spark.speculation.minTaskRuntime": "50ms",
            "spark.driver.host": "127.0.0.1",
            "spark.sql.adaptive.coalescePartitions.enabled": "false",
            "spark.sql.shuffle.partitions": "4",
        },
    }
    log = tmp_path / "job.log"
    with cluster(tmp_path) as master, job(FIXTURES / "visits_job.py", options | {"master": master}, log) as process:
        assert process.wait(240 + 20 * batches) == 0, log.read_text()[-3000:]
    assert contents(redis_url) == visits.truth()
    for batch in range(batches):
        assert (tmp_path / f"slow-{batch}").exists()
        assert (tmp_path / f"anew-{batch}").exists(), "no copy was started"
    with open_reader(redis_url, "visits") as reader:
        assert sum(high - low + 1 for low, high in reader.ledger().dead) >= batches
    tally("speculative copies of a task that was writing", batches=batches)
