"""SIGKILL of the driver at every step of a batch, and at random moments, again and again on one checkpoint."""

from __future__ import annotations

import random
import secrets
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from chain import GOES_ON, Chain
from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.redis, pytest.mark.slow]

# kills of each chain: in the subset, which has one on Redis, and in the full run, which makes 300
KILLS = {
    ("opaque", False): (1, 86),
    ("opaque", True): (1, 20),
    ("transactional", False): (1, 14),
    ("blocks", False): (2, 30),
}


@pytest.mark.parametrize(
    ("kind", "on_driver"),
    [
        ("opaque", False),
        ("blocks", False),
        pytest.param("opaque", True, marks=pytest.mark.full),
        pytest.param("transactional", False, marks=pytest.mark.full),
    ],
)
def test_what_is_committed_stays_and_nothing_else_counts_whenever_the_driver_dies(
    kind,
    on_driver,
    rounds: Callable[[Any, Any], Any],
    tally: Callable[..., None],
    tmp_path: Path,
    redis_url: str,
    spark,
):
    """One chain on Redis and one on SQLite at a time: a Spark start leaves a core idle now and then."""
    seed = secrets.randbits(32)
    urls = {"redis": redis_url, "sqlite": f"sqlite:///{tmp_path}/state.db"}
    stores = rounds(["redis"], [*urls])
    kills = rounds(*KILLS[kind, on_driver])
    files = 2 * kills + rounds(6, 20)
    chains = {
        store: Chain(tmp_path / store, urls[store], kind=kind, seed=seed + at, files=files, on_driver=on_driver)
        for at, store in enumerate(stores)
    }
    steps = _steps(chains[stores[0]].steps(), len(chains) * kills, random.Random(seed))
    if kind == "blocks":  # the follower has to make up for what lies between the two commits
        steps[: len(chains)] = ["after the ledger's commit"] * len(chains)
    with ThreadPoolExecutor(len(chains)) as pool:
        running = [
            pool.submit(_run, spark, chain, steps[at :: len(chains)], f"seed {seed}, {store}")
            for at, (store, chain) in enumerate(chains.items())
        ]
        for one in running:
            one.result()
    spared = sum(chain.kills[GOES_ON] for chain in chains.values())
    went_on = sum(chain.went_on for chain in chains.values())
    assert went_on or spared < 5, "no worker wrote anything after its driver's death"
    if spared:
        tally(f"driver killed {GOES_ON}", outlived_by_a_put=went_on)
    for store, chain in chains.items():
        for step, number in chain.kills.items():
            tally(f"driver killed {step}", kills=number)
        where = ", small batches" if on_driver else ""
        tally(f"drivers killed on {store}, {kind}{where}", kills=chain.kills.total(), batches=chain.due)
        tally(
            "of these, replays", with_other_contents=chain.other_contents, killed_again_in_the_same_batch=chain.repeated
        )
        if kind == "blocks":
            assert chain.behind
            tally("of these, with a follower", one_batch_behind=chain.behind)


def _run(spark: SparkSession, chain: Chain, steps: list[str], name: str) -> None:
    for at, step in enumerate(steps):
        try:
            chain.kill(step)
        except BaseException as error:
            error.add_note(f"{name}, after {steps[:at]}")
            raise
    chain.finish(spark)


def _steps(steps: list[str], number: int, order: random.Random) -> list[str]:
    """Every step about equally often, in random order."""
    found: list[str] = []
    while len(found) < number:
        found += order.sample(steps, len(steps))
    return found[:number]
