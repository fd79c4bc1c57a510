"""A window that a reader saw as final stays as it was, also where a driver dies between the commits of two stores."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from cases import full
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession
from spark_fixtures import AVAILABLE, Visits, contents, finish
from starlette.testclient import TestClient
from typer.testing import CliRunner

from mapstate import Count, Topology, errors, opaque, open_async_reader, open_reader
from mapstate.backends import resolve
from mapstate.cli.commands import app
from mapstate.serve import make_app
from mapstate.testing import Commits, Fail, FaultyBackend

pytestmark = [pytest.mark.spark, pytest.mark.redis]


def site(spark: SparkSession, visits: Visits, first: Any, second: Any, fired: list[Any]) -> Topology:
    """Windows of ten by ``bytes`` in the first store, late rows in the second one."""
    topology = Topology("site")
    windows = topology.newStream("visits", visits.stream(spark)).tumblingWindow(
        10, timestampField="bytes", retention=99
    )
    counts = windows.groupBy("user_id").persistentAggregate(opaque(first, "counts", patience=0), rows=Count())
    counts.lateStream().persistentAggregate(opaque(second, "late", patience=0), rows=Count())
    counts.firedWindowsStream().foreachBatch(lambda rows, _: fired.extend(map(tuple, rows.collect())))
    return topology


async def _async_windows(url: str) -> list[tuple[Any, ...]]:
    async with open_async_reader(url, "counts") as reader:
        return [(one.end, one.value["rows"], one.final) for one in await reader.windows("u1")]


def shown(url: str) -> list[tuple[Any, ...]]:
    """The windows of u1 with what each way of reading says of them, which is the same."""
    with open_reader(url, "counts") as reader:
        found = [(one.end, one.value["rows"], one.final) for one in reader.windows("u1")]
        mark: Any = reader.watermark().time
        assert all((mark is not None and end <= mark) is final for end, _, final in found)
    assert asyncio.run(_async_windows(url)) == found
    with TestClient(make_app(url)) as client:
        served = client.get("/states/counts/windows?user_id=u1").json()["windows"]
        assert [(one["end"], one["value"]["rows"], one["is_final"]) for one in served] == found
        assert client.get("/states/counts").json()["watermark"] == mark
    lines = CliRunner().invoke(app, ["windows", url, "counts", "u1", "--json"]).stdout.splitlines()
    printed = [json.loads(line) for line in lines]
    assert [(one["key"]["window_end"], one["value"]["rows"], one["key"]["final"]) for one in printed] == found
    return found


@pytest.mark.parametrize("is_redis_first", [True, full(False)])
def test_a_window_is_final_once_no_restart_can_take_it_back(spark, visits, tmp_path, redis_url, is_redis_first):
    sqlite = f"sqlite:///{tmp_path}/other.db"
    first, second = (redis_url, sqlite) if is_redis_first else (sqlite, redis_url)
    fired: list[Any] = []
    visits.put("a", [("u1", 1), ("u1", 2), ("u1", 3), ("u1", 4)])
    finish(site(spark, visits, first, second, fired).start(visits.checkpoint, trigger=AVAILABLE))
    assert shown(first) == [(10, 4, False)]

    visits.put("b", [("u1", 5), ("u1", 6), ("u1", 15)])
    dies = Fail(method="swap", where=Commits(1), error=errors.StoreUnavailableError, times=None)
    broken = FaultyBackend(resolve(second), str(tmp_path), (dies,))
    with pytest.raises(StreamingQueryException):
        finish(site(spark, visits, first, broken, fired).start(visits.checkpoint, trigger=AVAILABLE))
    assert shown(first) == [(10, 6, False), (20, 1, False)]  # the other store lacks the batch
    assert fired == []

    visits.put("b", [("u1", 15)])  # the replay has other rows
    finish(site(spark, visits, first, second, fired).start(visits.checkpoint, trigger=AVAILABLE))
    assert fired == [(0, 10, "u1", 4)]
    assert shown(first) == [(10, 4, False), (20, 1, False)]
    visits.put("c", [("u1", 16), ("u1", 7)])
    finish(site(spark, visits, first, second, fired).start(visits.checkpoint, trigger=AVAILABLE))
    assert shown(first) == [(10, 4, True), (20, 2, False)]
    assert contents(second, "late") == {(): {"rows": 1}}
