"""A password that changes again and again beside a job, with all of its connections closed each time."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rotation import Rotation, again_and_again
from spark_fixtures import AVAILABLE, Visits, contents, finish

from mapstate import Count, Sum, newStream, opaque

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
