"""Stores that refuse or go back: full disks, values too large, clocks set back, files copied back. Real Spark.

Batches are given to drivers as Spark gives them. After each fault everything stored is compared with what was
stored before, or all values with an independent count.
"""

from __future__ import annotations

import shutil
import sqlite3
import subprocess
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
from pyspark.sql import functions as F
from servers import GivenRedis

from mapstate import Count, Max, Sum, errors, newStream, opaque, open_reader
from mapstate.backends import resolve

pytestmark = pytest.mark.spark

ROWS = "user_id string, bytes bigint, page string"


class Driver:
    """What one start of a job is: a state's driver, called as Spark would call it."""

    def __init__(self, spark: Any, url: str, *, pages: bool = False, stream: str = "visits", **options: Any) -> None:
        self._spark = spark
        fields: dict[str, Any] = {"visits": Count(), "bytes": Sum("bytes")}
        rows = newStream(stream, spark.createDataFrame([], ROWS)).groupBy("user_id")
        self._job = rows.persistentAggregate(
            opaque(url, "visits", **options), **fields | ({"page": Max("page")} if pages else {})
        )

    def batch(self, number: int, users: Any, size: int = 1, page: str = "p", pages: Any = ()) -> None:
        """One row per user; ``pages`` are those of single users."""
        rows = [(user, size, dict(pages).get(user, page)) for user in users]
        self._job(self._spark.createDataFrame(rows, ROWS), number)


def contents(url: str, consistency: Any = "committed") -> dict[str, int]:
    """Visits by user."""
    with open_reader(url, "visits", consistency=consistency) as reader:
        return {key[0]: values["visits"] for key, values in reader.scan()}


def stored(path: Path) -> list[Any]:
    """Every row of every table: the side door."""
    with closing(sqlite3.connect(path)) as db:
        return [
            db.execute(f"SELECT * FROM mapstate_{table} ORDER BY 1, 2").fetchall()
            for table in ("records", "ledgers", "claims")
        ]


# A full disk


class Disk:
    """A small one. ``options`` of a spec that it needs."""

    def __init__(self, folder: Path, fill: Callable[[], object], free: Callable[[], object], **options: Any) -> None:
        self.url = f"sqlite:///{folder}/state.db"
        self.fill = fill
        self.free = free
        self.options = options


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    """A mounted one; where this user cannot mount, one that SQLite takes for full, in this process."""
    folder, mount = tmp_path / "disk", shutil.which("mount")
    folder.mkdir()
    command = [str(mount), "-t", "tmpfs", "-o", "size=24m", "mapstate-test", str(folder)]
    if mount and subprocess.run(command, capture_output=True, check=False).returncode == 0:
        ballast = folder / "ballast"

        def fill() -> None:
            with ballast.open("wb") as file, suppress(OSError):
                file.write(b"x" * (shutil.disk_usage(folder).free - 3 * 10**5))

        try:
            yield Disk(folder, fill, ballast.unlink)
        finally:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)
        return
    connect, pages = sqlite3.connect, [2**30]

    def limited(*args: Any, **options: Any) -> sqlite3.Connection:
        db = connect(*args, **options)
        used = db.execute("PRAGMA page_count").fetchone()[0]
        db.execute(f"PRAGMA max_page_count = {min(pages[0], 2**30) if pages[0] > used else used + 100}")
        return db

    monkeypatch.setattr("mapstate.backends.sqlite.connection.sqlite3.connect", limited)
    yield Disk(folder, lambda: pages.__setitem__(0, 0), lambda: pages.__setitem__(0, 2**30), apply_on="driver")


def test_a_disk_that_gets_full_in_mid_batch_counts_nothing_of_it_and_goes_on_with_more_room(disk, spark, rounds, tally):
    def driver() -> Driver:
        return Driver(spark, disk.url, chunk_size=50, **disk.options)

    one = driver()
    one.batch(0, ["a", "b"])
    truth = {"a": 1, "b": 1}
    for number in range(1, 1 + rounds(1, 3)):
        users = ["a", *(f"{number}-{at:04d}-" + "k" * 1000 for at in range(500))]
        disk.fill()
        for late in range(2):  # the driver that met it, and one that starts anew
            with pytest.raises(errors.StoreFullError, match="full"):
                one.batch(number, users)
            one = driver() if late == 0 else one
        assert contents(disk.url) == truth
        disk.free()
        assert len(contents(disk.url, "latest")) > len(truth), "it was not in mid-batch"
        assert contents(disk.url) == truth
        one.batch(number, users)
        truth |= {user: truth.get(user, 0) + 1 for user in users}
        assert contents(disk.url) == truth
        tally("disk full in mid-batch, SQLite", times=2, values_compared=len(truth))


# A value that is too large


@pytest.fixture(params=["sqlite", pytest.param("redis", marks=[pytest.mark.redis, pytest.mark.full])])
def url(request: Any, store_at: Callable[[str], str]) -> str:
    return store_at(request.param)


def test_a_value_above_the_limit_in_mid_chunk_counts_nothing_and_writes_nothing_of_the_chunk(url, spark, rounds, tally):
    limited = f"{url}{'&' if '?' in url else '?'}max_value_bytes=200"
    driver = Driver(spark, limited, pages=True, chunk_size=10)
    users = [f"u{at:02d}" for at in range(35)]
    tasks = tasks_of(spark, users)
    driver.batch(0, users[:20])
    with open_reader(url, "visits") as reader:
        before = dict(reader.scan())
    went_on = 0
    for number in range(1, 1 + rounds(1, 30)):
        large = users[(7 * number) % len(users)]
        with pytest.raises(errors.TooLargeError, match=r"\d+ bytes") as caught:
            driver.batch(number, users, size=number, page="z", pages={large: "z" * 300})
        assert large in str(caught.value)
        with open_reader(url, "visits") as reader:
            assert dict(reader.scan()) == before
            attempt = reader.ledger().in_flight.txid
        written = {key for key, txid in txids(url).items() if txid == attempt}
        own = {user for user in users if tasks[user] == tasks[large]}
        for task in set(tasks.values()):  # whole chunks, each
            of_task = {user for user in users if tasks[user] == task}
            assert written >= of_task or len(written & of_task) % 10 == 0
        assert len(written & own) < len(own)
        went_on += written >= set(users) - own  # a busy machine lets Spark end the other tasks first
        cleaned = [user for user in users if user != large]
        driver.batch(number, cleaned, size=number, page="z")
        for user in cleaned:
            old = before.get((user,), {"visits": 0, "bytes": 0})
            before[(user,)] = {"visits": old["visits"] + 1, "bytes": old["bytes"] + number, "page": "z"}
        with open_reader(url, "visits") as reader:
            assert dict(reader.scan()) == before
        tally(f"a value above the limit in mid-chunk, {url.partition(':')[0]}", times=1, values_compared=len(before))
    assert went_on, "in no round did the other tasks go on"


def tasks_of(spark: Any, users: list[str]) -> dict[str, int]:
    """Which task gets each user: Spark's own shuffle says."""
    partitions = int(spark.conf.get("spark.sql.shuffle.partitions"))
    rows = spark.createDataFrame([(user,) for user in users], "user_id string").repartition(partitions, "user_id")
    return dict(rows.select("user_id", F.spark_partition_id()).collect())


def txids(url: str) -> dict[str, int]:
    """Who wrote each record last."""
    store = resolve(url).open("visits")
    keys = [key for page in store.scan(1000) for key in page]
    found = dict(zip(keys, (msgspec.json.decode(record)[0] for record in store.multi_get(keys)), strict=True))
    store.close()
    return found


def test_a_chunk_with_a_value_above_the_limit_is_not_written_at_all(url, spark):
    """One task and one chunk: then nothing of the batch may be there."""
    spark.conf.set("spark.sql.shuffle.partitions", "1")
    try:
        driver = Driver(spark, f"{url}{'&' if '?' in url else '?'}max_value_bytes=200", pages=True, chunk_size=100)
        driver.batch(0, ["a", "b"])
        before = txids(url)
        with pytest.raises(errors.TooLargeError):
            driver.batch(1, ["a", "b", "c", "d", "e"], pages={"c": "z" * 300})
        assert txids(url) == before
    finally:
        spark.conf.set("spark.sql.shuffle.partitions", "2")


# A clock that was set back, and a ledger that was deleted


def delete_ledger(url: str, redis_server: GivenRedis | None, path: Path) -> None:
    if redis_server is None:
        with closing(sqlite3.connect(path)) as db, db:
            db.execute("DELETE FROM mapstate_ledgers")
        return
    prefix = url.rpartition("prefix=")[2]
    with redis_server.client() as client:
        client.delete(*client.keys(f"{prefix}visits!*"))


@pytest.mark.parametrize("back", [0, 5, 36_000], ids=lambda back: f"{back} deciseconds")
def test_records_of_an_earlier_incarnation_are_never_counted_on_whatever_the_clock_says(
    back, url, request, spark, tmp_path, monkeypatch, tally
):
    """The ledger deleted, another query, a clock set back: by less than the first incarnation lasted, or by more."""
    first = 10**9 + 100
    monkeypatch.setattr("mapstate.spark.driver.state.clock_txid", lambda: first)
    one = Driver(spark, url)
    for number in range(4):
        one.batch(number, ["a", f"u{number}"])
    before = txids(url)
    delete_ledger(url, request.getfixturevalue("redis_server") if "redis" in url else None, tmp_path / "state.db")
    monkeypatch.setattr("mapstate.spark.driver.state.clock_txid", lambda: first + 4 - back)
    two = Driver(spark, url, stream="another")
    for users in (["a", "new"], ["new", "u3"], ["u3"], ["new"]):
        with pytest.raises(errors.LedgerLostError, match="records but no ledger"):
            two.batch(0, users)
        assert txids(url) == before
    with pytest.raises(errors.LedgerLostError), open_reader(url, "visits") as reader:
        reader.get("a")
    tally("clock set back and ledger deleted", times=1)


# A file that was copied back


@pytest.mark.parametrize("running", [True, False], ids=["running", "started again"])
def test_a_file_copied_back_from_an_older_one_is_noticed_and_nothing_is_written(
    spark, tmp_path, rounds, tally, running
):
    for lost in range(1, 1 + rounds(1, 4)):
        path = tmp_path / f"state-{lost}.db"
        url = f"sqlite:///{path}"
        driver = Driver(spark, url)
        for number in range(2):
            driver.batch(number, ["a", f"u{number}"])
        copy = tmp_path / "copy.db"
        copy.unlink(missing_ok=True)
        with closing(sqlite3.connect(path)) as db, closing(sqlite3.connect(copy)) as to:
            db.backup(to)
        for number in range(2, 2 + lost):
            driver.batch(number, ["a"])
        for beside in ("-wal", "-shm"):
            path.with_name(path.name + beside).unlink(missing_ok=True)
        shutil.copyfile(copy, tmp_path / "again.db")
        (tmp_path / "again.db").rename(path)
        before = stored(path)
        if not running:
            driver = Driver(spark, url)
        for _ in range(2):
            with pytest.raises(errors.MissingBatchesError) as caught:
                driver.batch(2 + lost, ["a"])
            assert (caught.value.found, caught.value.expected) == (2 + lost, 2)
            assert stored(path) == before
        assert contents(url) == {"a": 2, "u0": 1, "u1": 1}
        for number in range(2, 3 + lost):  # the checkpoint rewound to the state
            driver.batch(number, ["a"])
        assert contents(url) == {"a": 3 + lost, "u0": 1, "u1": 1}
        tally("SQLite file copied back from an older one", times=1)
