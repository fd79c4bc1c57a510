"""Around the states of a Spark Connect session: requests, streams that follow, a cluster that loses a worker."""

from __future__ import annotations

import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from connect_server import connect_server
from spark_fixtures import run_job

# Some run here once more, with a session of Spark Connect; others in test_connect_once_more.py.
from test_connect import (  # noqa: F401
    at_commit,
    at_put,
    client,
    contents,
    each_url,
    options_of,
    rows_of,
    server,
    spark,
)
from test_drpc import (  # noqa: F401
    counts,
    test_a_request_fails_for_its_own_arguments_only,
)
from test_following import (  # noqa: F401
    orders,
    test_a_stream_may_begin_with_what_comes,
)
from test_spark_offsets import (  # noqa: F401
    test_sources_that_are_read_twice_have_the_files_that_they_have_read,
)

from mapstate import errors, open_reader
from mapstate.spark.driver.connect import Served, ServedQuery, error_of, sources_of
from mapstate.spark.driver.query_run import SourceLog
from mapstate.testing import wait_for

pytestmark = [pytest.mark.spark, pytest.mark.since("4.0", "Spark Connect")]


@pytest.fixture(params=[pytest.param("redis", marks=pytest.mark.redis), pytest.param("sqlite", marks=pytest.mark.full)])
def url(request: Any, tmp_path: Path) -> str:
    """What differs between the stores is tried on classic PySpark."""
    return f"sqlite:///{tmp_path}/state.db" if request.param == "sqlite" else request.getfixturevalue("redis_url")


OPTIONS = (
    "DataSource(org.apache.spark.sql.classic.SparkSession@1f,csv,List(),None,List(),None,Map(lineSep -> \n),None), "
)


@pytest.mark.parametrize(
    ("options", "name"), [(OPTIONS, ""), ("", ", name=<Unassigned>")], ids=["4.0, 4.1", "4.2, 4.3"]
)
def test_the_sources_of_a_stream_are_found_in_the_text_of_each_sparks_plan(options, name):
    def files(path: str, number: int) -> str:
        return f"~StreamingRelation {options}FileSource[{path}], [u#{number}, n#6L]{name}"

    rate = f"~StreamingRelationV2 a.RateProvider@2, rate, a.RateTable@5, [rowsPerBatch=1], [at#1, n#2L]{name}"
    lines = ["~Union false, false", f":- ~Project [r AS u#3]\n:  +- {rate}", f":- {files('/in', 5)}", f":- {rate}"]
    lines += [f":- {files('s3a://b/a [b], c/', 9)}", f":- {files('//x/../in/', 7)}", f"+- {files('/in', 5)}"]
    analyzed = "\n".join(lines)
    first, last = (SourceLog("FileStreamSource[/in]", f"c/sources/{number}") for number in (1, 3))
    other = SourceLog("FileStreamSource[s3a://b/a [b], c]", "c/sources/2")
    assert sources_of(f" Logical Plan ==\nu: string\n{analyzed}\n\n", "c") == (None, first, None, other, last, first)


def test_the_error_of_a_query_is_read_from_its_text_whatever_else_is_in_it(tmp_path):
    def raises(*_: object) -> None:
        error = errors.AggregatorError("two\nlines\nIn JSON: {no", key=object())  # a fact that has no JSON
        error.add_note("The request was retried\ud800.")
        raise error

    def text_of(function: Any) -> str:
        try:
            ServedQuery(function, Served(str(tmp_path), "session"))(None, 0)
        except Exception:  # noqa: BLE001  as Spark's worker does
            return f"[STREAM_FAILED] {traceback.format_exc()}\n=== Streaming Query ===\nIn JSON: [no"
        return ""

    found = error_of(SimpleNamespace(exception=lambda: text_of(raises)))
    assert isinstance(found, errors.AggregatorError)
    assert (found.message, found.__notes__) == ("two\nlines\nIn JSON: {no", ["The request was retried\\ud800."])
    assert error_of(SimpleNamespace(exception=lambda: text_of(lambda *_: 1 / 0))) is None
    assert error_of(SimpleNamespace(exception=lambda: None)) is None


@pytest.mark.slow
@pytest.mark.local_cluster
@pytest.mark.full
def test_on_a_cluster_a_worker_is_killed_in_mid_write_and_then_the_server_before_the_commit(url, visits, tmp_path):
    """Spark tries the task again by itself. The second try may have other contents, so it must not write."""
    visits.put("0", rows_of(0))
    with connect_server(tmp_path, "local-cluster[2,1,1024]") as cluster:
        options = options_of(visits, url, cluster.url, folder=str(tmp_path))
        finished = run_job(options | {"faults": [at_put(0, after=True)]})
        assert finished.returncode == 0, finished.stderr
        assert (tmp_path / "kill").exists()
        assert contents(url) == visits.truth()
        with open_reader(url, "visits") as reader:
            assert len(reader.ledger().dead) == 1
        (tmp_path / "kill").unlink()
        visits.put("1", rows_of(1))
        with client(options | {"faults": [at_commit(1, who=cluster.pgid)]}):
            wait_for(lambda: not cluster.is_alive, "the server that is killed", 120)
        visits.put("1", [*rows_of(1)[5:], ("new", 7)])
        cluster.start()
        finished = run_job(options_of(visits, url, cluster.url))
        assert finished.returncode == 0, finished.stderr
        assert contents(url) == visits.truth()
