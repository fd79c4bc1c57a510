"""Opaque on SQLite beside a raw SELECT by key and upsert, in one transaction for each chunk.

The floor has the same table (without the state's name), WAL, `synchronous=full`, cache and payloads. It uses
one connection, and writes in the order of the keys, as mapstate does.
"""

from __future__ import annotations

from measuring import Answer, Goal, Row, by_turns, ratios, spread, table  # isort: skip  # finds the servers

import sqlite3
import tempfile
from pathlib import Path

from counted_state import CountedState, arrow_batches, chunks

CHUNK = 2000
_TABLE = "CREATE TABLE records (key TEXT PRIMARY KEY, record BLOB NOT NULL) WITHOUT ROWID"
_UPSERT = "INSERT INTO records VALUES (?, ?) ON CONFLICT DO UPDATE SET record = excluded.record"


def ask(keys: int = 100_000, turns: int = 9) -> Answer:
    users = [f"user-{at}" for at in range(keys)]
    batches = arrow_batches(users)
    payload = b"[280000009,3,2]"
    with tempfile.TemporaryDirectory() as folder:
        state = CountedState(f"sqlite:///{folder}/visits.db", chunk_size=CHUNK)
        db = sqlite3.connect(Path(folder) / "floor.db", isolation_level=None)
        for setting in ("journal_mode=WAL", "synchronous=full", "cache_size=-16000", "wal_autocheckpoint=8000"):
            db.execute(f"PRAGMA {setting}")
        db.execute(_TABLE)

        def floor() -> None:
            for some in chunks(users, CHUNK):
                db.execute("BEGIN IMMEDIATE")
                marks = ",".join("?" * len(some))
                found = dict(db.execute(f"SELECT key, record FROM records WHERE key IN ({marks})", some).fetchall())
                assert len(found) in (0, len(some))
                db.executemany(_UPSERT, [(user, payload) for user in sorted(some)])
                db.execute("COMMIT")

        seconds = by_turns({"mapstate": lambda: state.apply(batches), "floor": floor}, turns, warm_up=2)
        state.check(users, state.batches)
        assert db.execute("SELECT count(*) FROM records WHERE record = ?", (payload,)).fetchone() == (keys,)
        db.close()
        state.store.close()
    return Answer(
        [
            Row(
                "opaque on SQLite without Spark, one process",
                "floor: raw SELECT by key + upsert in one transaction",
                ratios(seconds["mapstate"], seconds["floor"]),
                Goal("most", 1.5),
            )
        ],
        f"{keys:,} keys a batch, chunks of {CHUNK:,}, {turns} turns after 2 to warm up",
        table("way | microseconds a key", [(way, spread(own, 1e6 / keys)) for way, own in seconds.items()]),
    )
