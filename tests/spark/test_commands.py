"""The commands that `job_main` makes of a job."""

from __future__ import annotations

import json
from typing import Any

import pytest
from partitioned_log import SCHEMA, PartitionedLog
from pyspark.errors import AnalysisException
from spark_fixtures import DATA_SOURCE, contents

from mapstate import Count, Sum, Topology, TumblingDurationWindow, newStream, opaque, open_reader
from mapstate.operations.forget import forget
from mapstate.spark import job_main

pytestmark = pytest.mark.spark


def declared(spark, visits, url):
    users = newStream("visits", visits.stream(spark)).groupBy("user_id")
    return users.persistentAggregate(opaque(url), visits=Count(), bytes=Sum("bytes"))


@pytest.mark.redis
def test_a_job_is_seeded_run_and_corrected_by_its_commands(spark, visits, redis_url, tmp_path, capsys):
    visits.put("history", [("u1", 1), ("u2", 2), ("u1", 3)])
    counts = declared(spark, visits, redis_url)
    job_main(counts, visits.checkpoint, ["seed", "--dry-run"])
    assert capsys.readouterr().out.strip().endswith("Nothing was written.")
    job_main(counts, visits.checkpoint, ["seed", "--buckets", "2"])
    assert capsys.readouterr().out == "visits: 3 rows, 2 keys\n"
    visits.put("more", [("u2", 5)])
    job_main(declared(spark, visits, redis_url), visits.checkpoint, ["run", "--available-now"])
    assert contents(redis_url, "visits") == visits.truth()
    late = str(tmp_path / "late")
    spark.createDataFrame([("u1", 10)], "user_id string, bytes bigint").write.parquet(late)
    for said in ("applied as", "applied before as"):
        job_main(counts, visits.checkpoint, ["correct", "--id", "one", "--add", late, "--format", "parquet"])
        assert f"visits: {said} txid" in capsys.readouterr().out
    spark.read.schema("user_id string, bytes bigint").parquet(late).createOrReplaceTempView("late_visits")
    words, found = ["correct", "--id", "two", "--retract", "late_visits"], list[Any]()
    job_main(counts, visits.checkpoint, words)
    assert contents(redis_url, "visits") == visits.truth()
    counts = declared(spark, visits, redis_url)
    counts.newValuesStream().foreachBatch(lambda rows, number: found.append((number, rows.count())))
    for word in ("--emit", "--no-emit"):
        job_main(counts, visits.checkpoint, [*words, word])
        assert found == [(-2, 1)]


def test_what_a_job_cannot_do_ends_with_2_and_the_message(spark, visits, tmp_path, capsys):
    visits.put("history", [("u1", 1)])
    counts = declared(spark, visits, f"sqlite:///{tmp_path}/state.db")
    for words, said in (
        (["correct", "--id", "one"], "UsageError: a correction has rows"),
        (["correct", "--add", "t"], "--id"),
        (["seed", "--buckets", "0"], "buckets"),
        ([], "seed | run | correct"),
        (["run", "--trigger", "10 seconds", "--available-now"], "not allowed with argument"),
        (["correct", "--id", "one", "--add", "t", "--option", "header=true"], "of a --format"),
        (["correct", "--id", "one", "--add", "t", "--holes", "before"], "said of a --recount"),
        (["correct", "--id", "one", "--recount", "t", "--coordinates", "a,b,c", "--starts-at", "{}"], "not allowed"),
        (["seed", "--version-of", "old", "--version-of", "visits=older"], "STATE=NAME"),
        (["seed", "--version-of", "visits=old", "--version-of", "visits=older"], "STATE=NAME"),
        (["correct", "--id", "one", "--add", "t", "--format", "csv", "--option", "header"], "it is K=V"),
        (["correct", "--id", "one", "--add", "no_table"], "UsageError: --add 'no_table' cannot be read, and nothing"),
        (["correct", "--id", "one", "--add", "/no/path", "--format", "parquet"], "UsageError: --add '/no/path' cannot"),
        (["correct", "--id", "one", "--add", "t", "--format", "nope"], "UsageError: --add 't' cannot be read"),
        (["run", "--trigger", "often"], "UsageError: the query does not start, and nothing was written"),
        (["run", "--trigger", "-5 seconds"], "UsageError: the query does not start, and nothing was written"),
    ):
        with pytest.raises(SystemExit) as ended:
            job_main(counts, visits.checkpoint, words)
        assert ended.value.code == 2
        assert said in capsys.readouterr().err
    for words, said in ((["seed"], "'site' has 0 streams"), (["correct", "--id", "one"], "a correction has rows")):
        with pytest.raises(SystemExit) as ended:
            job_main(Topology("site"), visits.checkpoint, words)
        assert ended.value.code == 2
        assert f"UsageError: {said}" in capsys.readouterr().err.replace("topology 'site'", "'site'")


@pytest.mark.parametrize("what", ["topology", "stream"])
def test_all_states_of_a_topology_are_seeded_and_run_by_its_commands(spark, visits, tmp_path, capsys, what):
    url = f"sqlite:///{tmp_path}/state.db"

    def site():
        topology = Topology("site")
        stream = topology.newStream("visits", visits.stream(spark))
        users = stream.groupBy("user_id")
        users.persistentAggregate(opaque(url, "users"), visits=Count(), bytes=Sum("bytes"))
        stream.persistentAggregate(opaque(url, "total"), visits=Count())
        return topology if what == "topology" else stream

    visits.put("history", [("u1", 1), ("u2", 2), ("u1", 3)])
    job_main(site(), visits.checkpoint, ["seed", "--dry-run"])
    assert capsys.readouterr().out.count("Nothing was written.") == 2
    job_main(site(), visits.checkpoint, ["seed"])
    assert capsys.readouterr().out == "users: 3 rows, 2 keys\ntotal: 3 rows, 1 keys\n"
    visits.put("more", [("u2", 5)])
    job_main(site(), visits.checkpoint, ["run", "--available-now"])
    assert contents(url, "users") == visits.truth()
    assert contents(url, "total") == {(): {"visits": 4}}


def test_a_correction_of_a_file_that_does_not_fit_the_stream_counts_nothing(spark, visits, tmp_path, capsys):
    url = f"sqlite:///{tmp_path}/state.db"
    visits.put("history", [("u1", 1), ("u3", 7)])
    counts = declared(spark, visits, url)
    job_main(counts, visits.checkpoint, ["run", "--available-now"])
    before, late = contents(url, "visits"), tmp_path / "late"
    spark.createDataFrame([("u3",)], "user_id string").write.parquet(f"{late}.parquet")
    refused, of_spark = (SystemExit, "bytes"), (Exception, "MALFORMED")
    for part, form, rows, (error, said) in (
        ("--add", "parquet", None, refused),
        ("--retract", "parquet", None, refused),
        ("--retract", "json", '{"user_id": "u3", "byte": 7}', refused),
        ("--add", "json", '{"user_id": "u3", "bytes": "x7"}', of_spark),
        ("--retract", "csv", "u3,x7", of_spark),
        ("--add", "csv", "user_id,bytes\nu3,7", of_spark),
        ("--add", "csv", "u3", of_spark),
    ):
        path = late.with_suffix(f".{form}")
        if rows is not None:
            path.write_text(rows)
        with pytest.raises(error) as ended:
            job_main(counts, visits.checkpoint, ["correct", "--id", "one", part, str(path), "--format", form])
        assert said in f"{ended.value}{capsys.readouterr().err}"
        assert contents(url, "visits") == before
    csv, words = (
        late.with_suffix(".csv"),
        ["correct", "--format", "csv", "--option", "header=true", "--option", "sep=;"],
    )
    csv.write_text("bytes;user_id\n7;u3\n")
    with pytest.raises(Exception, match="header"):
        job_main(counts, visits.checkpoint, [*words, "--id", "one", "--retract", str(csv)])
    csv.write_text("user_id;bytes\nu3;7\n")
    job_main(counts, visits.checkpoint, [*words, "--id", "one", "--retract", str(csv)])
    path = late.with_suffix(".json")
    path.write_text('{"user_id": "u1"}\n{"user_id": "u1", "bytes": 4}')
    job_main(counts, visits.checkpoint, ["correct", "--id", "two", "--add", str(path), "--format", "json"])
    assert contents(url, "visits") == {("u1",): {"visits": 3, "bytes": 5}}


def test_an_error_of_a_batch_ends_the_command_with_its_message(spark, visits, tmp_path, capsys):
    visits.put("history", [("u1", 2**63 - 1)])
    visits.put("more", [("u1", 1)])
    with pytest.raises(SystemExit) as ended:
        job_main(
            declared(spark, visits, f"sqlite:///{tmp_path}/state.db"), visits.checkpoint, ["run", "--available-now"]
        )
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("ValueOverflowError: state 'visits', key 'u1': Sum(bytes)")


PLACES = "topic, partition,offset"


def history_file(log, folder):
    """All rows of a log with their places, as JSON."""
    lines = [
        json.dumps({"topic": "visits", "partition": at, "offset": i, "user_id": user, "bytes": size})
        for at, part in enumerate(log.parts)
        for i, (user, size) in enumerate(part)
    ]
    (file := folder / "history.json").write_text("\n".join(lines))
    return file


@DATA_SOURCE
def test_keys_and_windows_are_computed_anew_by_a_command(spark, tmp_path, capsys):
    url, log = f"sqlite:///{tmp_path}/state.db", PartitionedLog(tmp_path)
    log.send(*((f"u{at % 5}", at) for at in range(60)))
    users = newStream("visits", log.stream(spark)).groupBy("user_id")
    counts = users.persistentAggregate(opaque(url), visits=Count(), bytes=Sum("bytes"))
    rows = newStream("visits", log.stream(spark)).transform(lambda frame: frame.withColumn("at", frame["bytes"]))
    windows = rows.window(TumblingDurationWindow.of(10), timestampField="at", retention=1000).groupBy("user_id")
    hourly = windows.persistentAggregate(opaque(url, "hourly"), visits=Count())
    wrong = str(tmp_path / "wrong")
    spark.createDataFrame([("visits", 0, 0, f"u{at}", 25) for at in range(3)], SCHEMA).write.parquet(wrong)
    for state in (counts, hourly):
        place = str(tmp_path / state.name)
        job_main(state, place, ["run", "--available-now"])
        job_main(state, place, ["correct", "--id", "wrong", "--add", wrong, "--format", "parquet"])
    log.table(spark, ends=log.ends()).createOrReplaceTempView("history")
    (keys := tmp_path / "keys.csv").write_text("user_id\nu0\nu1\n")
    history = history_file(log, tmp_path)
    files = ["--format", "csv", "--option", "header=true", "--keys", str(keys)]
    spark.createDataFrame([("u0",), ("u1",)], "user_id string").createOrReplaceTempView("some_keys")
    end = json.dumps({"visits": {"0": 30, "1": 30}})
    again = ["correct", "--id", "again", "--recount", "history"]
    for state, words, said in (
        (counts, [*again, "--keys", "some_keys"], "says where its history ends"),
        (counts, [*again, "--keys", "some_keys", "--starts-at", end, "--holes", "before"], "says where its history"),
        (counts, [*again, "--keys", "some_keys", "--coordinates", "offset"], "says where its history ends"),
        (counts, [*again, "--keys", "some_keys", "--coordinates", PLACES], "--counted wrong"),
        (counts, [*again, *files, "--coordinates", PLACES], "history"),
        (hourly, [*again, "--since", "noon", "--until", "30", "--coordinates", PLACES], "'time' is a bigint"),
    ):
        with pytest.raises((SystemExit, AnalysisException)) as ended:
            job_main(state, str(tmp_path / state.name), words)
        assert said in f"{ended.value}{capsys.readouterr().err}".replace("counted=[ID]", "--counted wrong")
    assert contents(url, "visits") != log.truth()
    job_main(
        counts, "", [*again, "--keys", "some_keys", "--coordinates", PLACES, "--holes", "before", "--counted", "wrong"]
    )
    assert capsys.readouterr().out.endswith(": 24 rows, 2 keys\n")
    wanted = log.truth()
    wanted["u2",] = {name: wanted["u2",][name] + more for name, more in (("visits", 1), ("bytes", 25))}
    assert contents(url, "visits") == wanted
    (keys := tmp_path / "keys.json").write_text('{"user_id": "u2"}\n')
    of_json = ["--format", "json", "--recount", str(history), "--keys", str(keys)]
    given = ["correct", "--id", "rest", *of_json, "--starts-at", end, "--counted", "wrong", "--counted", "again"]
    job_main(counts, "", given)
    assert contents(url, "visits") == log.truth()
    job_main(
        hourly,
        "",
        [*again, "--since", "20", "--until", "30", "--coordinates", PLACES, "--counted", "wrong"],
    )
    with open_reader(url, "hourly") as reader:
        assert dict(reader.window(30)) == {("u0",): {"visits": 2}} | {(f"u{at}",): {"visits": 2} for at in range(5)}


@DATA_SOURCE
def test_a_history_in_files_has_places_that_the_stream_lacks(spark, tmp_path, capsys):
    url, log = f"sqlite:///{tmp_path}/state.db", PartitionedLog(tmp_path)
    log.send(*((f"u{at % 5}", at) for at in range(20)))
    users = newStream("visits", log.stream(spark).select("user_id", "bytes")).groupBy("user_id")
    counts = users.persistentAggregate(opaque(url), visits=Count(), bytes=Sum("bytes"))
    job_main(counts, str(tmp_path / "checkpoint"), ["run", "--available-now"])
    counts.correct(add=spark.createDataFrame([("u1", 25)], "user_id string, bytes bigint"), id="wrong")
    (keys := tmp_path / "keys.json").write_text('{"user_id": "u1"}\n')
    history = history_file(log, tmp_path)
    words = ["correct", "--id", "again", "--format", "json", "--recount", str(history), "--keys", str(keys)]
    job_main(counts, "", [*words, "--coordinates", PLACES, "--counted", "wrong"])
    assert "visits: applied as txid" in capsys.readouterr().out
    assert contents(url, "visits") == log.truth()


@DATA_SOURCE
def test_a_version_is_seeded_without_what_was_forgotten_by_a_command(spark, tmp_path, capsys):
    url, log = f"sqlite:///{tmp_path}/state.db", PartitionedLog(tmp_path)
    log.send(*((f"u{at % 5}", at) for at in range(60)))

    def visits(name):
        users = newStream("visits", log.stream(spark)).groupBy("user_id")
        return users.persistentAggregate(opaque(url, name), visits=Count(), bytes=Sum("bytes"))

    job_main(visits("visits"), str(tmp_path / "one"), ["run", "--available-now"])
    forget(url, "visits", {"user_id": "u1"}, id="ticket-7")
    log.send(("u1", 7))
    words = ["seed", "--positions", PLACES, "--version-of"]
    job_main(visits("visits.v2"), str(tmp_path / "two"), [*words, "visits"])
    job_main(visits("visits.v3"), str(tmp_path / "three"), [*words, "visits.v3=visits"])
    for name in ("visits.v2", "visits.v3"):
        assert contents(url, name) == log.truth(without="u1", below=(30, 30))
    job_main(visits("visits.v4"), str(tmp_path / "four"), ["seed", "--version-of", "visits.v4="])
    assert contents(url, "visits.v4") == log.truth()
