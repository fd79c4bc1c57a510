"""Plays random jobs, and prints each that fails, reduced: ``python -m fuzz``.

A module of its own: the process that a job kills does not import a package's ``__main__``.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import multiprocessing
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from fuzz.generate import INGREDIENTS, random_job
from fuzz.mutants import MUTANTS, Mutant
from fuzz.reduce import shortest
from fuzz.steps import Job
from fuzz.world import FailureError, RefusedError, World

__all__ = ["Played", "main", "play", "session"]

_ROOT = Path(__file__).resolve().parents[1]
_SETTINGS = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.log.level": "OFF",
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=256m -XX:+UseSerialGC",
    "spark.default.parallelism": "1",
    "spark.sql.shuffle.partitions": "1",
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.codegen.wholeStage": "false",  # a plan of a few rows is compiled for longer than it runs
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.streaming.forceDeleteTempCheckpointLocation": "true",
}
_JOBS_OF_A_JVM = 200  # Spark keeps something of each query: after a thousand or so its heap is full, and the JVM gone
# Without Hadoop's native library, Spark's own default starts a process for each file of a checkpoint.
_FILES = "spark.sql.streaming.checkpointFileManagerClass"
_FILE_MANAGERS = (
    "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager",
    "org.apache.spark.sql.execution.streaming.FileSystemBasedCheckpointFileManager",
)


class Played(NamedTuple):
    """What a job came to: "right", "refused", or the kind of its failure."""

    verdict: str
    message: str = ""
    log: tuple[str, ...] = ()

    @property
    def failed(self) -> bool:
        """Whether it is none of what may be."""
        return self.verdict not in ("right", "refused")


def session() -> Any:
    """The Spark session in which all jobs run."""
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master("local[2]").appName("mapstate fuzz")
    for name, value in _SETTINGS.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    for name in _FILE_MANAGERS:
        try:
            spark.sparkContext._jvm.java.lang.Class.forName(name)  # type: ignore[union-attr]
        except Exception:  # another version of Spark
            continue
        spark.conf.set(_FILES, name)
    return spark


def play(spark: Any, job: Job, redis_url: str | None = None) -> Played:
    """Run a job in a directory of its own."""
    memory = Path("/dev/shm")  # nothing here has to survive the machine
    with tempfile.TemporaryDirectory(prefix="fuzz-", dir=memory if memory.is_dir() else None) as folder:
        world = World(spark, job, Path(folder), redis_url)
        try:
            for number, step in enumerate(job.steps, 1):
                world.note(f"step {number}")
                step.do(world)
        except FailureError as failure:
            return Played(failure.kind, str(failure), tuple(world.log))
        except RefusedError as refusal:
            return Played("refused", str(refusal), tuple(world.log))
        except Exception as error:  # of a step that is no start: an operator sees it as it is
            return Played("an error of another kind", f"{type(error).__name__}: {error}", tuple(world.log))
        finally:
            for query in spark.streams.active:
                query.stop()
            spark.catalog.clearCache()
    return Played("right", "", tuple(world.log))


class _Fuzzer:
    """The session, the server and the options of one process. ``began`` is when the first one did."""

    def __init__(self, options: argparse.Namespace, redis_url: str | None, began: float) -> None:
        self.options, self.redis_url, self.began = options, redis_url, began
        self.spark = session()

    def play(self, job: Job) -> Played:
        return play(self.spark, job, self.redis_url)

    def jobs(self, jobs: Iterable[Job], least: int) -> tuple[Counter[str], Counter[str]]:
        """Play the jobs, ``least`` of them at least; how often each verdict was, and each refusal."""
        verdicts, refusals = Counter[str](), Counter[str]()
        for job in jobs:
            played = self.play(job)
            verdicts[played.verdict] += 1
            if played.verdict == "refused":
                refusals[played.message.partition(". ")[0][:160]] += 1
            if played.failed:
                self._print(job, played)
            elif self.options.verbose:
                print(f"seed {job.seed}: {played.verdict} {'; '.join(played.log)}", flush=True)
            if time.monotonic() - self.began > self.options.seconds and verdicts.total() >= least:
                break
        return verdicts, refusals

    def _print(self, job: Job, played: Played) -> None:
        print(f"\nWRONG seed {job.seed}: {played.message}", flush=True)
        if not self.options.as_made:
            job = shortest(job, lambda smaller: self.play(smaller).verdict == played.verdict)
            played = self.play(job)
        print("\n".join(job.script()))
        for line in (*played.log, played.message):
            print(f"     > {line}")
        print(f"     again: scripts/run python -m fuzz --only {job.seed}\n", flush=True)

    def mutants(self) -> int:
        """Play jobs under each mutant until one fails that does not without it; the number of mutants not found."""
        not_found = 0
        for mutant in MUTANTS:
            if self.options.mutant in mutant.name:
                line = self._found(mutant)
                not_found += line is None
                print(f"MUTANT {mutant.name}: {line or f'NOT FOUND in {self.options.jobs} jobs'}", flush=True)
        return not_found

    def _found(self, mutant: Mutant) -> str | None:
        for count, job in enumerate(_made(self.options, has_redis=self.redis_url is not None), 1):
            with mutant.applied():
                played = self.play(job)
            if played.failed and not self.play(job).failed:
                return f"seed {job.seed}, after {count} jobs: {played.message[:200]}"
        return None


def _made(options: argparse.Namespace, *, has_redis: bool) -> Iterator[Job]:
    """So many jobs with one of the ingredients that were asked for."""
    asked = set(options.having)
    seeds = itertools.count(options.seed) if options.only is None else options.only
    jobs = (random_job(seed, redis=has_redis, kills=options.kills, without=options.without) for seed in seeds)
    wanted = (job for job, has in jobs if options.only is not None or not asked or asked & has)
    return itertools.islice(wanted, None if options.only is not None else options.jobs)


def _block(options: argparse.Namespace, redis_url: str | None, began: float, jobs: list[Job], least: int) -> Any:
    _be_quiet()
    return _Fuzzer(options, redis_url, began).jobs(jobs, least)


def _jobs(options: argparse.Namespace, redis_url: str | None) -> int:
    """Play all jobs, `_JOBS_OF_A_JVM` in a process of their own each; the number of jobs that failed."""
    verdicts, refusals, began, wrong = Counter[str](), Counter[str](), time.monotonic(), 0
    made = _made(options, has_redis=redis_url is not None)
    while block := list(itertools.islice(made, _JOBS_OF_A_JVM)):
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
            of_block = process.submit(_block, options, redis_url, began, block, options.least - verdicts.total())
            for counts, more in zip((verdicts, refusals), of_block.result(), strict=True):
                counts.update(more)
        seconds, wrong = time.monotonic() - began, verdicts.total() - verdicts["right"] - verdicts["refused"]
        print(f"{verdicts.total()} jobs in {seconds:.0f} s: {dict(verdicts)}; {wrong} wrong", flush=True)
        if seconds > options.seconds and verdicts.total() >= options.least:
            break
    for text, times in refusals.most_common(options.verbose * 20):
        print(f"refused {times} times: {text}")
    return wrong


def _be_quiet() -> None:
    logging.getLogger("mapstate").addHandler(logging.NullHandler())  # refusals are what many jobs are about
    logging.getLogger("py4j").setLevel(logging.CRITICAL)


def main(arguments: list[str] | None = None) -> int:
    """Return 0 only if every job ended right or was refused; with ``--mutants``, if every mutant was found."""
    parser = argparse.ArgumentParser(prog="python -m fuzz", description=__doc__)
    parser.add_argument("--jobs", type=int, default=2000, help="how many (%(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="that of the first job; the others follow (%(default)s)")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="no job begins after so many (%(default)s)")
    parser.add_argument("--least", type=int, default=0, help="that many begin, whatever --seconds is (%(default)s)")
    parser.add_argument("--only", type=int, nargs="*", metavar="SEED", help="the jobs of these seeds")
    parser.add_argument("--without", nargs="*", default=[], choices=[*INGREDIENTS], help="what no job has")
    parser.add_argument("--having", nargs="*", default=[], choices=[*INGREDIENTS], help="only jobs with one of these")
    parser.add_argument("--no-kills", dest="kills", action="store_false", help="no job is killed by SIGKILL")
    parser.add_argument("--as-made", action="store_true", help="print a failing job as it was made, not reduced")
    parser.add_argument("--mutants", action="store_true", help="look whether each mutant is found in --jobs jobs")
    parser.add_argument("--mutant", default="", metavar="TEXT", help="only mutants whose name holds TEXT")
    parser.add_argument("--verbose", action="store_true", help="print a line for each job, and what was refused")
    options = parser.parse_args(arguments)
    with _redis() as redis_url:
        if not options.mutants and not options.mutant:
            return min(_jobs(options, redis_url), 1)
        _be_quiet()
        return min(_Fuzzer(options, redis_url, time.monotonic()).mutants(), 1)


@contextmanager
def _redis() -> Iterator[str | None]:
    """A Redis of the fuzzer's own, if the tests would find one; else None, and no job has a ttl."""
    sys.path.insert(0, str(_ROOT / "tests" / "fixtures"))
    from servers import RedisServer, find_redis_binary

    if find_redis_binary() is None:
        print("no redis-server here: no job has a ttl", flush=True)
        yield None
    else:
        with RedisServer(as_process=True).start() as server:
            yield server.url
