"""Runs the tests of every store against the servers of docker-compose.yml, which have to be up.

make test-containers
make test-containers ARGS="-k fence -x"
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def defaults() -> dict[str, str]:
    """The variables of docker-compose.yml: those of .env.example, of .env, and of the environment above both."""
    found = {}
    for name in (".env.example", ".env"):
        if (ROOT / name).exists():
            lines = [line.strip() for line in (ROOT / name).read_text().splitlines()]
            found |= dict(line.split("=", 1) for line in lines if "=" in line and not line.startswith("#"))
    return found | {name: value for name, value in os.environ.items() if name in found}


def runs(variables: dict[str, str]) -> list[tuple[str, dict[str, str], tuple[str, ...]]]:
    """Which tests run with which server: a name, the environment that they take it from, and their modules."""
    rolling = (
        "rolling_operations",
        "rolling_reads",
        "rolling_states",
        "serve_rolling",
        "seed_windows",
        "seed_together",
    )
    redis = (
        "contract_redis",
        "redis",
        "redis_shapes",
        "redis_foreign",
        "redis_logins",
        "adopt",
        "vacuum",
        "drop",
        "batch_report",
    )
    redis += ("commands",)
    redis += (
        "forget",
        "correct",
        "correct_together",
        "correct_windows",
        "recount",
        "recount_windows",
    )
    redis += ("daily_commands", "export", "messages", "new_values", "state_query", "spark_key_counts", "states_before")
    redis += (
        "advice",
        "final_windows",
        "options",
        "scan_parts",
        "dataframes",
        "key_order",
        "changes",
        "following",
        "kafka",
        "lakes",
        "cluster",
        "other_languages",
        "tutorial",
        "serve_calls",
        "serve_changes",
        "serve_process",
        *rolling,
        "rolling_frames",
        "training",
        "live_page",
        "swap",
        "swapped",
    )
    spark = (
        "seed_forgotten",
        "correct",
        "correct_together",
        "correct_windows",
        "recount",
        "recount_windows",
        "count_windows",
        "dataframes",
        "drpc",
        "reading_path",
        "replanned",
        "rolling_frames",
        "rolling_windows",
        "running",
        "seed",
        "session_windows",
        "blocks_on_spark",
        "windows_in_blocks",
    )
    spark += ("small_batches", "spark_key_counts", "spark_stream", "topology", "training", "window_joins", "windows")
    return [
        ("redis", {"MAPSTATE_TEST_REDIS_URL": f"redis://127.0.0.1:{variables['MAPSTATE_REDIS_PORT']}/0"}, redis),
        ("valkey", {"MAPSTATE_TEST_REDIS_URL": f"redis://127.0.0.1:{variables['MAPSTATE_VALKEY_PORT']}/0"}, redis),
        (
            "redis-cluster",
            {
                "MAPSTATE_TEST_REDIS_CLUSTER_URL": f"redis+cluster://127.0.0.1:{variables['MAPSTATE_REDIS_CLUSTER_PORT']}"
            },
            (
                *("contract_redis_cluster", "redis_cluster", "states_before", "serve_calls", "forget", "swap"),
                *rolling,
                "training",
            ),
        ),
        (
            "aerospike",
            {"MAPSTATE_TEST_AEROSPIKE_HOSTS": "127.0.0.1:3000"},
            ("contract_aerospike", "aerospike", "aerospike_stand_in", "forget", "swap", *rolling, *spark),
        ),
        (
            "postgresql",
            {
                "MAPSTATE_TEST_POSTGRESQL_URL": "postgresql://postgres:postgres@127.0.0.1:"
                f"{variables['MAPSTATE_POSTGRESQL_PORT']}/postgres"
            },
            ("postgresql_example", "write_a_store", "states_before"),
        ),
    ]


def main(arguments: list[str]) -> int:
    """Runs them one after the other, all of them, and says which failed."""
    failed = []
    for name, environment, modules in runs(defaults()):
        files = [str(found) for module in modules for found in (ROOT / "tests").rglob(f"test_{module}.py")]
        print(f"== {name}: {', '.join(files)}", flush=True)
        marked = ["-m", "aerospike"] if name == "aerospike" else []  # the rest of those files needs no such server
        command = [sys.executable, "-m", "pytest", *files, *marked, *arguments]
        environment |= {"CI": "true"}  # nothing is skipped for want of a server
        if subprocess.run(command, cwd=ROOT, env=os.environ | environment, check=False).returncode:
            failed.append(name)
    print(f"failed: {', '.join(failed)}" if failed else "every store's tests passed")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
