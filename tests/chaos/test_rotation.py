"""A password that changes again and again beside a job, with all of its connections closed each time."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rotation import Rotation, again_and_again
from spark_fixtures import AVAILABLE, Visits, contents, finish

from mapstate import Count, Sum, newStream, opaque, open_reader

pytestmark = [pytest.mark.spark, pytest.mark.redis, pytest.mark.slow]


@pytest.mark.parametrize("apply_on", ["executors", pytest.param("driver", marks=pytest.mark.full)])
def test_no_batch_fails_and_each_row_counts_once(
    apply_on,
    rounds: Callable[[Any, Any], Any],
    tally: Callable[..., None],
    spark,
    visits: Visits,
    start_redis,
    tmp_path: Path,
):
    """A batch that failed would end the query: nothing starts it again."""
    batches = rounds(4, 300)
    order = random.Random(batches)
    for number in range(batches):
        visits.put(f"{number:03}", [(f"user-{order.randrange(50)}", order.randrange(1000)) for _ in range(40)])
    server = start_redis()
    url = f"{server.url.replace('://', '://job@')}?password_file={tmp_path}/password"
    with server.client() as admin:
        rotation = Rotation(admin, tmp_path / "password")
        by_user = newStream("visits", visits.stream(spark)).groupBy("user_id")
        spec = opaque(url, "visits", apply_on=apply_on, chunk_size=5)
        counts = by_user.persistentAggregate(spec, visits=Count(), bytes=Sum("bytes"))
        attempts: list[Any] = []
        counts.on_batch(lambda report: attempts.append(report.batch_id))
        with again_and_again(rotation.change, 0.1):
            finish(counts.start(str(visits.checkpoint), trigger=AVAILABLE))
    assert counts.last_error is None
    assert attempts == list(range(batches))
    assert contents(url, "visits") == visits.truth()
    changes = len(rotation.passwords)
    assert changes > batches
    tally(f"passwords changed beside a job, applied on {apply_on}", changes=changes, batches=batches)


@pytest.mark.full
@pytest.mark.timeout(4500)
def test_an_hour_in_which_the_password_changes_each_minute(
    tally: Callable[..., None], spark, visits: Visits, start_redis, tmp_path: Path
):
    """As managed services do: nothing of the job or of a reader beside it fails, and each row counts once."""
    server = start_redis()
    url = f"{server.url.replace('://', '://job@')}?password_file={tmp_path}/password"
    visits.put("0000", [("user-0", 1)])
    with server.client() as admin:
        rotation = Rotation(admin, tmp_path / "password")
        by_user = newStream("visits", visits.stream(spark)).groupBy("user_id")
        counts = by_user.persistentAggregate(opaque(url, "visits", chunk_size=5), visits=Count(), bytes=Sum("bytes"))
        end = time.monotonic() + 3600
        query = counts.start(str(visits.checkpoint), trigger={"processingTime": "1 second"})
        query.processAllAvailable()
        reads, number = 0, 0
        with again_and_again(rotation.change, 60), open_reader(url, "visits") as reader:
            while time.monotonic() < end and query.isActive:
                number += 1
                visits.put(f"{number:04}", [(f"user-{(number + i) % 50}", i) for i in range(40)])
                reads += reader.get("user-0")["visits"] > 0
                time.sleep(2)
        query.processAllAvailable()
        query.stop()
    assert counts.last_error is None
    assert reads == number
    assert contents(url, "visits") == visits.truth()
    assert len(rotation.passwords) >= 60
    tally("an hour of passwords", changes=len(rotation.passwords), files=number, reads=reads)
