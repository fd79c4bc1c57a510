"""The contract of a store, on PostgreSQL. MAPSTATE_TEST_POSTGRESQL_URL names a database that may be written to."""

import os
from dataclasses import replace

import psycopg
import pytest
from mapstate_postgresql import PostgresqlBackend
from side_door import PostgresqlSideDoor

from mapstate.testing.contracts import StoreContract


class TestPostgresql(StoreContract):
    without = {
        "ttl": "PostgreSQL has no expiry",
        "joint_ledgers": "left out of this example",
        "reports": "left out of this example",
        "rewrites": "left out of this example: a vacuum leaves a tombstone where it would remove a record",
        "states": "left out of this example",
        "snapshots": "left out of this example",
    }
    max_value_bytes = 2_000_000
    secret = "hunter2"

    @pytest.fixture
    def backend(self):
        url = os.environ["MAPSTATE_TEST_POSTGRESQL_URL"]
        with psycopg.connect(url, autocommit=True) as db:
            db.execute("DROP TABLE IF EXISTS mapstate_records, mapstate_ledgers, mapstate_claims")
        return replace(PostgresqlBackend.from_url(url), max_value_bytes=self.max_value_bytes)

    @pytest.fixture
    def side_door(self, backend):
        with psycopg.connect(backend.conninfo, autocommit=True) as db:
            yield PostgresqlSideDoor(db)

    @pytest.fixture
    def unreachable(self):
        return PostgresqlBackend.from_url(f"postgresql://user:{self.secret}@127.0.0.1:1/visits")
