"""Batches of a thousand rows and 500 keys: opaque on Redis beside the same query into Spark's noop sink.

Both are foreachBatch queries over the same files. The turn of a query is a whole batch, from the start of its function
to the start of the next one. So Spark's own bookkeeping counts, as it does for a user who waits for a batch. The
seconds of the function by itself are reported too.

Then batches of several sizes, by turns, as the default applies them and on executors: from a size on they are the same.
"""

from __future__ import annotations

from turns import Contestant, Turns, make_file, no_store, noop, run_streams, session  # isort: skip

import statistics
import tempfile
from functools import partial
from itertools import count
from pathlib import Path

from measuring import Answer, Goal, Row, by_turns, ratios, spread, table
from servers import RedisServer

from mapstate import Count, newStream, opaque, open_reader

WARM_UP = 10
EXECUTORS = "opaque, applied on executors"
SIZES = (10, 500, 5_000, 20_000, 1_000_000)


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
        states = {
            "opaque": opaque(url, f"visits-{suffix}"),
            EXECUTORS: opaque(url, f"executors-{suffix}", apply_on="executors"),
        }
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


def by_size(url: str, keys: int, turns: int) -> list[float]:
    """Ratios of a batch as the default applies it to one on executors."""
    spark = session()
    frame = spark.range(2 * keys).selectExpr(f"concat('user-', id % {keys}) AS user_id").cache()
    assert frame.count() == 2 * keys
    by_user = newStream("users", spark.createDataFrame([], "user_id string")).groupBy("user_id")
    ways = {}
    for how in ("auto", "executors"):
        state = by_user.persistentAggregate(opaque(url, f"{how}-{keys}", apply_on=how), n=Count())
        ways[how] = partial(lambda state, ids: state(frame, next(ids)), state, count())
    seconds = by_turns(ways, turns, warm_up=5)
    frame.unpersist()
    return ratios(seconds["auto"], seconds["executors"])


def ask(batches: int = 50, rows: int = 1000, keys: int = 500, turns: int = 15) -> Answer:
    with RedisServer().start() as server:
        whole = measured(server.url, batches, rows, keys, whole=True)
        function = measured(server.url, batches, rows, keys, whole=False)
        sizes = {size: by_size(server.url, size, turns if size < 100_000 else min(turns, 7)) for size in SIZES}
    return Answer(
        [
            Row(
                f"small batches ({rows:,} rows, {keys} keys)",
                "the same query into `noop`",
                ratios(whole["opaque"], whole["noop"]),
                Goal("most", 1.15),
            ),
            Row(
                "the same, tasks in Python that write to no store",
                "the same query into `noop`",
                ratios(whole["no store"], whole["noop"]),
                note="what the goal above would be for a store that takes no time",
            ),
            Row(
                'the same, with apply_on="executors"',
                "the same query into `noop`",
                ratios(whole[EXECUTORS], whole["noop"]),
            ),
            Row(
                "the same, the batch function by itself",
                "that of `noop`",
                ratios(function["opaque"], function["noop"]),
            ),
            *(
                Row(f"a batch of {size:,} keys", "one on executors", own, Goal("most", 1.0) if size <= 5_000 else None)
                for size, own in sizes.items()
            ),
        ],
        f"{batches} batches, the first {WARM_UP} of which warm up",
        table(
            "query | milliseconds a whole batch | of its function",
            [(name, spread(whole[name], 1000), spread(function[name], 1000)) for name in whole],
        ),
        {f"small_batches.{name}": statistics.median(own) for name, own in whole.items()},
    )
