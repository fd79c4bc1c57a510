"""The commands that `job_main` makes of a job."""

from __future__ import annotations

import pytest
from spark_fixtures import contents

from mapstate import Count, Sum, Topology, newStream, opaque
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
    job_main(counts, visits.checkpoint, ["correct", "--id", "two", "--retract", "late_visits"])
    assert contents(redis_url, "visits") == visits.truth()


def test_what_a_job_cannot_do_ends_with_2_and_the_message(spark, visits, tmp_path, capsys):
    visits.put("history", [("u1", 1)])
    counts = declared(spark, visits, f"sqlite:///{tmp_path}/state.db")
    for words, said in (
        (["correct", "--id", "one"], "UsageError: a correction has rows"),
        (["correct", "--add", "t"], "--id"),
        (["seed", "--buckets", "0"], "buckets"),
        ([], "seed | run | correct"),
    ):
        with pytest.raises(SystemExit) as ended:
            job_main(counts, visits.checkpoint, words)
        assert ended.value.code == 2
        assert said in capsys.readouterr().err
    with pytest.raises(SystemExit):
        job_main(Topology("site"), visits.checkpoint, ["seed"])
    assert "a topology has no seed" in capsys.readouterr().err
