"""partitionPersist with a state of one's own, on real Spark: bulk calls, empty partitions, replays."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from spark_fixtures import AVAILABLE, contents, finish

from mapstate import Count, Topology, errors, newStream, opaque, open_reader
from mapstate.spark import Collector, QueryFunction, StateUpdater, newStaticState, stateQuery

pytestmark = pytest.mark.spark


class FileState:
    """A dict in a file per partition, with the batch that wrote it and what was there before: opaque by hand."""

    def __init__(self, path: Path) -> None:
        self._path = path
        new: dict[str, Any] = {"txid": -1, "before": {}, "now": {}}
        self._kept = json.loads(path.read_text()) if path.exists() else new
        self.now: dict[str, Any] = self._kept["now"]
        self._log = path.with_suffix(".log")

    def begin_commit(self, txid: int) -> None:
        before = self._kept["before"] if self._kept["txid"] == txid else self._kept["now"]
        self._kept = {"txid": txid, "before": before, "now": dict(before)}
        self.now = self._kept["now"]
        self._say(f"begin {txid}")

    def commit(self, txid: int) -> None:
        self._path.write_text(json.dumps(self._kept))
        self._say(f"commit {txid}")

    def _say(self, call: str) -> None:
        with self._log.open("a") as log:
            log.write(f"{call}\n")


class Files:
    """Makes the state of each partition."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def make_state(self, partition: int, partitions: int) -> FileState:
        return FileState(self.folder / f"{partition}-of-{partitions}")

    def contents(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for path in self.folder.glob("?-of-?"):
            found |= json.loads(path.read_text())["now"]
        return found

    def calls(self) -> dict[str, list[str]]:
        return {path.stem: path.read_text().split("\n")[:-1] for path in self.folder.glob("*.log")}


class Totals(StateUpdater):
    output = "k string, total bigint"

    def update_state(self, state: Any, rows: Any, collector: Collector) -> None:
        for row in rows:
            if row["n"] is None:
                raise RuntimeError("no number")
            state.now[row["k"]] = state.now.get(row["k"], 0) + row["n"]
        for key in sorted({row["k"] for row in rows}):
            collector.emit(key, state.now[key])


class Reports(Totals):
    output = "k string, __Mapstate_report string"


class Total(QueryFunction):
    def batch_retrieve(self, state: Any, keys: Any) -> Any:
        return [state.now.get(key) for (key,) in keys]

    def execute(self, key: Any, result: Any, collector: Collector) -> None:
        collector.emit(result)


def frame(spark: SparkSession, *rows: tuple[str, Any]) -> DataFrame:
    return spark.createDataFrame(list(rows), "k string, n bigint")


def test_each_partition_begins_updates_and_commits_also_an_empty_one_and_its_emissions_are_new_values(spark, tmp_path):
    files = Files(tmp_path)
    persisted = newStream("s", frame(spark)).partitionPersist(files, Totals(), ["k"], partitions=3)
    got: list[Any] = []
    job = persisted.newValuesStream().foreachBatch(
        lambda rows, n: got.append((n, sorted(tuple(row) for row in rows.collect())))
    )
    job(frame(spark, ("a", 1), ("b", 2), ("a", 3)), 0)
    job(frame(spark), 1)
    job(frame(spark, ("a", 1), ("c", 1)), 2)
    job(frame(spark, ("a", 5)), 2)  # again, with other rows
    assert got == [(0, [("a", 4), ("b", 2)]), (1, []), (2, [("a", 5), ("c", 1)]), (2, [("a", 9)])]
    assert files.contents() == {"a": 9, "b": 2}
    assert files.calls() == {
        f"{at}-of-3": [f"{call} {txid}" for txid in (0, 1, 2, 2) for call in ("begin", "commit")] for at in range(3)
    }
    asking = spark.createDataFrame([("b",), ("a",), ("z",)], "k string")
    for state in (persisted.static, newStaticState(files, partitions=3)):
        found = stateQuery(asking, state, "k", "total bigint", query=Total())
        assert sorted(tuple(row) for row in found.collect()) == [("a", 9), ("b", 2), ("z", None)]


def test_an_updater_that_raises_stops_the_batch_and_no_state_follows(spark, tmp_path):
    files = Files(tmp_path)
    persisted = newStream("s", frame(spark)).partitionPersist(files, Totals(), ["k"], partitions=2, chunk_size=1)
    url = f"memory://{tmp_path.name}"
    emitted = persisted.newValuesStream()
    job = emitted.groupBy("k").persistentAggregate(opaque(url, "emitted"), n=Count())
    job(frame(spark, ("a", 1), ("a", 1)), 0)
    with pytest.raises(errors.UpdaterError, match="Totals or its state raised RuntimeError.*batch 1: no number"):
        job(frame(spark, ("a", 1), ("a", None)), 1)
    assert isinstance(job.last_error, errors.UpdaterError)
    with open_reader(url, "emitted") as reader:
        assert dict(reader.scan()) == {("a",): {"n": 2}}  # one per chunk
    assert files.contents() == {"a": 2}
    job(frame(spark, ("a", 1), ("a", 3)), 1)  # the batch again, without what it could not take
    with open_reader(url, "emitted") as reader:
        assert dict(reader.scan()) == {("a",): {"n": 4}}
    assert files.contents() == {"a": 6}


def test_a_batch_in_quarantine_is_an_empty_one_for_the_state_that_follows(spark, visits, tmp_path):
    folder, url = tmp_path / "own", f"sqlite:///{tmp_path}/s.db"
    folder.mkdir()
    topology = Topology("site", on_poison="quarantine", quarantine=str(tmp_path / "kept"))
    stream = topology.newStream("visits", visits.stream(spark))
    checked = stream.transform(lambda rows: rows.where(F.expr("if(user_id = 'bad', raise_error('no'), true)")))
    checked.groupBy("user_id").persistentAggregate(opaque(url, "first", max_attempts=1), n=Count())
    named = stream.transform(lambda rows: rows.select(F.col("user_id").alias("k"), F.col("bytes").alias("n")))
    emitted = named.partitionPersist(Files(folder), Totals(), ["k"], partitions=2).newValuesStream()
    emitted.groupBy("k").persistentAggregate(opaque(url, "emitted"), n=Count())
    for name, rows in (("a", [("u1", 1)]), ("b", [("bad", 1), ("u1", 1)]), ("c", [("u1", 2), ("u2", 1)])):
        visits.put(name, rows)
    finish(topology.start(visits.checkpoint, trigger=AVAILABLE))
    assert contents(url, "first") == {("u1",): {"n": 2}, ("u2",): {"n": 1}}
    assert contents(url, "emitted") == {("u1",): {"n": 2}, ("u2",): {"n": 1}}
    assert Files(folder).contents() == {"u1": 3, "u2": 1}


BAD = [
    (lambda s: s.partitionPersist(opaque("memory://"), Totals(), partitions=1), "persistentAggregate"),
    (lambda s: s.partitionPersist(Files, Totals(), partitions=1), "make_state"),
    (lambda s: s.partitionPersist(Files(Path()), Totals, partitions=1), "StateUpdater"),
    (lambda s: s.partitionPersist(Files(Path()), Totals(), partitions=0), "partitions"),
    (lambda s: s.partitionPersist(Files(Path()), Totals(), ["nix"], partitions=1), "'nix'"),
    (lambda s: s.partitionPersist(Files(Path()), Reports(), partitions=1), "'__Mapstate_report' is taken"),
    (lambda s: s.stateQuery(newStaticState(Files(Path())), "k"), "QueryFunction of your own"),
]


@pytest.mark.parametrize("case", range(len(BAD)))
def test_a_state_of_ones_own_that_cannot_be_is_refused_before_anything_runs(case, spark):
    ask, message = BAD[case]
    with pytest.raises(errors.ConfigurationError, match=message):
        ask(newStream("s", frame(spark)))
