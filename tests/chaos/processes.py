"""Jobs in process groups of their own, that are gone when the test is."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pyspark
from servers import free_port

from mapstate.testing import wait_for

TESTS = Path(__file__).parents[1]
FAST = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"


@contextmanager
def cluster(folder: Path) -> Iterator[str]:
    """A standalone Spark cluster of two workers with one core each, which Spark takes for two hosts; its address.

    local-cluster is one host to Spark, and on the host of a task it starts no speculative copy of it.
    """
    spark = Path(pyspark.__file__).parent
    port, hosts = free_port(), ("127.0.0.2", "127.0.0.3")
    address, name = f"spark://127.0.0.1:{port}", "org.apache.spark.deploy"
    master = [f"{name}.master.Master", "--host", "127.0.0.1", "--port", f"{port}", "--webui-port", "0"]
    size = ["--cores", "1", "--memory", "1g", "--webui-port", "0"]
    workers = [
        [f"{name}.worker.Worker", "--host", host, *size, "--work-dir", str(folder / f"worker-{host}"), address]
        for host in hosts
    ]
    environment = os.environ | {"SPARK_HOME": str(spark), "SPARK_LOCAL_DIRS": str(folder)}
    environment |= {"SPARK_DAEMON_MEMORY": "256m", "SPARK_MASTER_OPTS": FAST, "SPARK_WORKER_OPTS": FAST}
    with ExitStack() as stack:
        for at, arguments in enumerate((master, *workers)):
            log = folder / f"cluster-{at}.log"
            out = stack.enter_context(log.open("wb"))
            process = subprocess.Popen(
                [str(spark / "bin" / "spark-class"), *arguments],
                stdout=out,
                stderr=out,
                start_new_session=True,
                env=environment,
            )
            stack.callback(_end, process)
            ready = "New state: ALIVE" if at == 0 else "Successfully registered with master"
            wait_for(lambda: ready in log.read_text() or process.poll() is not None, ready, 120)  # noqa: B023
            assert process.poll() is None, log.read_text()[-3000:]
        yield address


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kills what the process is the leader of, and its executors, which the group of a worker has too."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@contextmanager
def job(script: Path, options: dict[str, Any], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The script with its options, said to ``log``; killed at the end with all that is in its group."""
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, str(script), json.dumps(options)],
            stdout=out,
            stderr=out,
            start_new_session=True,
            env=os.environ | {"PYTHONPATH": str(TESTS)},
        )
    try:
        yield process
    finally:
        _end(process)
