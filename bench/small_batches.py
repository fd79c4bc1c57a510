"""Batches of a thousand rows and 500 keys: opaque on Redis beside the same query into Spark's noop sink.

Both are foreachBatch queries over the same files. The turn of a query is a whole batch, from the start of its function
to the start of the next one. So Spark's own bookkeeping counts, as it does for a user who waits for a batch. The
seconds of the function by itself are reported too.
"""

from __future__ import annotations

from turns import Contestant, Turns, make_file, no_store, noop, run_streams, session  # isort: skip

import statistics
import tempfile
from pathlib import Path

from measuring import Answer, Goal, Row, ratios, spread, table
from servers import RedisServer

from mapstate import Count, newStream, opaque, open_reader

WARM_UP = 10
DRIVER = "opaque, applied on the driver"


def measured(url: str, batches: int, rows: int, keys: int, *, whole: bool) -> dict[str, list[float]]:
    """Measure the seconds of each turn."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as place:
        folder = Path(place)
        (folder / "input").mkdir()
        for number in range(batches):
            make_file(folder / "input", number, rows, keys)
        spark = session()
        stream = newStream("users", spark.createDataFrame([], "user_id string"))
        by_user, suffix = stream.groupBy("user_id"), "whole" if whole else "function"
        states = {"opaque": opaque(url, f"visits-{suffix}"), DRIVER: opaque(url, f"driver-{suffix}", apply_on="driver")}
        contestants: dict[str, Contestant] = {
            "noop": noop,
            "no store": no_store,
            **{name: by_user.persistentAggregate(spec, n=Count()) for name, spec in states.items()},
        }
        turns = Turns(list(contestants), whole=whole)
        run_streams(spark, folder, contestants, turns)
        for spec in states.values():
            with open_reader(url, spec.name) as reader:
                users = [f"user-{key}" for key in range(keys)]
                assert reader.multi_get(users) == [{"n": batches * rows // keys}] * keys
    return {name: own[WARM_UP : batches - 1] for name, own in turns.seconds.items()}


def ask(batches: int = 50, rows: int = 1000, keys: int = 500) -> Answer:
    with RedisServer().start() as server:
        whole = measured(server.url, batches, rows, keys, whole=True)
        function = measured(server.url, batches, rows, keys, whole=False)
    return Answer(
        [
            Row(
                f"small batches ({rows:,} rows, {keys} keys)",
                "the same query into `noop`",
                ratios(whole["opaque"], whole["noop"]),
                Goal("most", 1.25),
            ),
            Row(
                "the same, tasks in Python that write to no store",
                "the same query into `noop`",
                ratios(whole["no store"], whole["noop"]),
                note="what the goal above would be for a store that takes no time",
            ),
            Row(
                'the same, with apply_on="driver"',
                "the same query into `noop`",
                ratios(whole[DRIVER], whole["noop"]),
                Goal("most", 1.25),
            ),
            Row(
                "the same, the batch function by itself",
                "that of `noop`",
                ratios(function["opaque"], function["noop"]),
            ),
        ],
        f"{batches} batches, the first {WARM_UP} of which warm up",
        table(
            "query | milliseconds a whole batch | of its function",
            [(name, spread(whole[name], 1000), spread(function[name], 1000)) for name in whole],
        ),
        {f"small_batches.{name}": statistics.median(own) for name, own in whole.items()},
    )
