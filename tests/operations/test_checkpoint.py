"""A checkpoint that is ahead of its state, put back: on made-up directories, and on real Spark."""

from __future__ import annotations

import errno
import gc
import json
import os
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from spark_fixtures import Visits
from states import Job

from mapstate import Count, Sum, newStream, opaque, open_reader
from mapstate.backends import resolve
from mapstate.backends.sqlite import SqliteStore
from mapstate.errors import (
    CheckpointError,
    MissingBatchesError,
    StaleBatchError,
    StateNotFoundError,
    StateOwnershipError,
    UsageError,
)
from mapstate.operations.checkpoint import rewind
from mapstate.protocol.ledger import Ledger

AVAILABLE = {"availableNow": True}


def checkpoint(folder: Path, offsets: range, commits: range, query: str = "q") -> Path:
    for name, numbers in (("offsets", offsets), ("commits", commits)):
        (folder / name).mkdir(parents=True)
        for number in numbers:
            (folder / name / str(number)).write_text(f"{name} {number}")
            (folder / name / f".{number}.crc").write_text("crc")
    (folder / "metadata").write_text(json.dumps({"id": query}))
    return folder


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def url(tmp_path):
    """A state that has three batches, of query q."""
    url = f"sqlite:///{tmp_path}/state.db"
    job = Job(url)
    for n in range(3):
        job.batch(a=n)
    return url


def test_what_is_ahead_is_moved_and_the_batch_that_is_due_can_be_repeated(url, tmp_path):
    place = checkpoint(tmp_path / "check point", range(7), range(6))
    before = files(place)
    planned = rewind(url, "s", place, dry_run=True)
    assert planned.to is None
    assert files(place) == before
    done = rewind(url, "s", f"file://{place}")  # Spark takes %20 as it is
    assert (done.batch_id, done.moved) == (3, planned.moved)
    assert done.moved == tuple(f"{kind}/{n}" for kind, n in [*(("commits", n) for n in (5, 4, 3)), *_offsets(6, 5, 4)])
    assert {name for name in files(place) if "crc" not in name} == {
        "metadata",
        *(f"commits/{n}" for n in range(3)),
        *(f"offsets/{n}" for n in range(4)),
    }
    assert files(place) | files(Path(done.to)) == before
    assert not files(place) & files(Path(done.to))
    assert (Path(done.to) / "offsets" / "5").read_text() == "offsets 5"
    assert rewind(url, "s", place) == (3, (), None)


def _offsets(*numbers: int) -> Any:
    return (("offsets", n) for n in numbers)


def test_one_that_was_interrupted_is_finished_by_the_next(url, tmp_path, monkeypatch):
    place = checkpoint(tmp_path / "c", range(7), range(6))
    before, rename, left = files(place), Path.rename, [5]

    def dying(self: Path, target: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise OSError("died")
        return rename(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", dying)
        with pytest.raises(CheckpointError, match=r"died.*run it again"):
            rewind(url, "s", place)
    rewind(url, "s", place)
    assert {name for name in files(place) if "crc" not in name and "offsets" in name} == {
        f"offsets/{n}" for n in range(4)
    }
    aside = {name for folder in tmp_path.glob("c.rewound-*") for name in files(folder)}
    assert files(place) | aside == before


def test_behind_a_link_what_goes_stays_beside_the_checkpoint_itself(url, tmp_path):
    place = checkpoint(tmp_path / "disk" / "c", range(5), range(4))
    before, link = files(place), tmp_path / "link"
    link.symlink_to(place)
    done = rewind(url, "s", link)
    assert Path(done.to).parent == place.parent
    assert files(place) | files(Path(done.to)) == before


def mounted(place: Path) -> Any:
    """`Path.rename` as it is where ``place`` is a file system of its own."""
    rename = Path.rename

    def checked(self: Path, target: Any) -> Any:
        if self.is_relative_to(place) != Path(target).is_relative_to(place):
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), str(self))
        return rename(self, target)

    return checked


def test_in_a_mount_point_what_goes_stays_in_it(url, tmp_path, monkeypatch):
    place = checkpoint(tmp_path / "c", range(5), range(4))
    before = files(place)
    monkeypatch.setattr(Path, "rename", mounted(place))
    done = rewind(url, "s", place)
    assert Path(done.to).parent == place
    assert files(place) == before - set(done.moved) - {f"{name.replace('/', '/.')}.crc" for name in done.moved} | {
        str((Path(done.to) / name).relative_to(place)) for name in files(Path(done.to))
    }
    assert list(tmp_path.glob("c?*")) == []
    assert rewind(url, "s", place) == (3, (), None)


def test_where_nothing_can_be_moved_nothing_is_left_behind(url, tmp_path, monkeypatch):
    place = checkpoint(tmp_path / "c", range(5), range(4))

    def there():
        """Without those that SQLite has beside its own while a connection is open."""
        return sorted(path for path in tmp_path.rglob("*") if not path.name.startswith("state.db-"))

    before = there()
    monkeypatch.setattr(Path, "rename", mounted(place / "commits"))
    with pytest.raises(CheckpointError, match=r"link.*run it again"):
        rewind(url, "s", place)
    assert there() == before


def test_a_checkpoint_that_cannot_be_read_is_an_error_of_ours(url, tmp_path, monkeypatch):
    place = checkpoint(tmp_path / "c", range(5), range(4))
    denied = OSError(errno.EACCES, os.strerror(errno.EACCES), str(place / "metadata"))
    monkeypatch.setattr(Path, "read_text", Mock(side_effect=denied))
    with pytest.raises(CheckpointError, match="Permission denied"):
        rewind(url, "s", place, dry_run=True)


@pytest.mark.parametrize(("offsets", "commits"), [(range(3), range(3)), (range(4), range(3)), (range(3), range(2))])
def test_a_checkpoint_that_fits_is_left_alone(offsets, commits, url, tmp_path):
    assert rewind(url, "s", checkpoint(tmp_path / "c", offsets, commits)) == (3, (), None)


def test_a_transactional_attempt_in_flight_is_the_one_to_repeat(tmp_path):
    url = f"sqlite:///{tmp_path}/t.db"
    job = Job(url, type="transactional")
    job.ledger.begin(0)
    assert rewind(url, "s", checkpoint(tmp_path / "c", range(3), range(2))).moved == (
        *("commits/1", "commits/0"),
        *("offsets/2", "offsets/1"),
    )


def test_refusals_change_nothing(url, tmp_path):
    def refused(place: Any, error: Any, match: str, state: str = "s") -> None:
        before = files(tmp_path)
        with pytest.raises(error, match=match):
            rewind(url, state, place)
        assert {name for name in files(tmp_path) ^ before if "state.db" not in name} == set()

    refused(tmp_path / "nothing", UsageError, "no file 'metadata'")
    behind = checkpoint(tmp_path / "behind", range(2), range(1))
    refused(behind, StaleBatchError, "ends with batch 1.*batches 2 to 2 are missing")
    refused(checkpoint(tmp_path / "empty", range(0), range(0)), StaleBatchError, "batches 0 to 2 are missing")
    purged = checkpoint(tmp_path / "purged", range(4, 9), range(4, 8))
    refused(purged, MissingBatchesError, "goes back to batch 4")
    half = checkpoint(tmp_path / "half", range(3, 9), range(3, 8))
    refused(half, MissingBatchesError, "purged the offsets of batch 2")
    refused(checkpoint(tmp_path / "other", range(9), range(8), "z"), StateOwnershipError, "has no part in")
    refused(purged, StateNotFoundError, "no state", state="t")
    Job(url, owner="new", on_new_owner="adopt_unchecked")
    refused(checkpoint(tmp_path / "old", range(9), range(8)), StateOwnershipError, "before new did")
    (tmp_path / "old" / "metadata").write_text("[]")
    refused(tmp_path / "old", UsageError, "no query id")


def counts(visits: Visits, spark: Any, url: str, **options: Any) -> Any:
    grouped = newStream("visits", visits.stream(spark)).groupBy("user_id")
    return grouped.persistentAggregate(opaque(url, **options), visits=Count(), bytes=Sum("bytes"))


def run(job: Any, visits: Visits) -> None:
    job.start(visits.checkpoint, trigger=AVAILABLE).awaitTermination(120)


def contents(url: str) -> dict[Any, Any]:
    with open_reader(url, "visits") as reader:
        return dict(reader.scan())


def close_connections() -> None:
    """As the end of a job would: a SQLite file must not be copied or replaced while a process has it open."""
    for store in [found for found in gc.get_objects() if isinstance(found, SqliteStore)]:
        store.close()


@pytest.mark.spark
def test_a_store_that_came_back_from_a_snapshot_is_right_after_a_rewind(spark, visits, tmp_path):
    (tmp_path / "store").mkdir()
    url = f"sqlite:///{tmp_path}/store/state.db"
    for n in range(2):
        visits.put(f"{n}", [("a", n), (f"u{n}", 1)])
    run(counts(visits, spark, url), visits)
    close_connections()
    shutil.copytree(tmp_path / "store", tmp_path / "snapshot")
    for n in range(2, 5):
        visits.put(f"{n}", [("a", n), (f"u{n}", 1)])
    run(counts(visits, spark, url), visits)
    assert contents(url) == visits.truth()
    close_connections()
    shutil.rmtree(tmp_path / "store")
    shutil.copytree(tmp_path / "snapshot", tmp_path / "store")
    visits.put("5", [("a", 5)])
    with pytest.raises(Exception, match="MissingBatchesError.*batch 5"):
        run(counts(visits, spark, url), visits)
    done = rewind(url, "visits", visits.checkpoint)
    assert done.batch_id == 2
    run(counts(visits, spark, url), visits)
    assert contents(url) == visits.truth()
    visits.put("6", [("a", 6), ("late", 1)])
    run(counts(visits, spark, url), visits)
    assert contents(url) == visits.truth()
    with open_reader(url, "visits") as reader:
        assert not reader.ledger().dead


@pytest.mark.spark
def test_a_batch_that_was_rolled_back_is_repeated_after_a_rewind_and_a_reader_sees_whole_ones(spark, visits, tmp_path):
    url = f"sqlite:///{tmp_path}/state.db"
    for n in range(2):
        visits.put(f"{n}", [("a", n), (f"u{n}", 1)])
    run(counts(visits, spark, url), visits)
    before = visits.truth()
    visits.put("2", [("a", 2), ("b", 1)])
    run(counts(visits, spark, url), visits)
    after = visits.truth()
    seen = []
    with open_reader(url, "visits") as reader:

        def examined() -> Any:
            found = dict(zip(after, reader.multi_get(list(after)), strict=True))
            seen.append({key: value for key, value in found.items() if value is not None})
            return seen[-1]

        assert examined() == after
        store = resolve(url).open("visits")
        Ledger(store, "visits").rollback()
        store.close()
        assert examined() == before
        assert rewind(url, "visits", visits.checkpoint).batch_id == 2
        assert examined() == before
        job = counts(visits, spark, url, chunk_size=1).on_batch(lambda _: examined())
        query = job.start(visits.checkpoint, trigger=AVAILABLE)
        while query.isActive:
            examined()
        query.awaitTermination(120)
        assert job.last_error is None
        assert examined() == after
    assert all(one in (before, after) for one in seen)
    assert contents(url) == visits.truth()
