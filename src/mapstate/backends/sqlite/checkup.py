"""Findings about a SQLite file and its disk with which acknowledged writes can be lost."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from mapstate.findings import Finding

_MOUNTS = Path("/proc/mounts")
_REMOTE = ("nfs", "cifs", "smb", "9p", "afs", "ceph", "gluster", "lustre", "fuse.sshfs", "fuse.s3fs", "fuse.gcsfuse")


def verified(db: sqlite3.Connection) -> tuple[str, list[str]]:
    """What SQLite says of a file: its journal mode, and the result of an integrity check."""
    journal = str(db.execute("PRAGMA journal_mode").fetchone()[0])
    return journal, [str(line) for (line,) in db.execute("PRAGMA integrity_check(5)")]


def judge(path: str, synchronous: str, journal: str, integrity: list[str]) -> Iterator[Finding]:
    """The findings. ``integrity`` is the result of PRAGMA integrity_check, ``journal`` that of PRAGMA journal_mode."""
    bad = integrity != ["ok"]
    advice = "Stop the job, and restore the file from a copy." if bad else ""
    yield Finding("error" if bad else "ok", "integrity_check", "; ".join(integrity)[:500], "ok", advice)
    bad = journal != "wal"
    advice = "Somebody changed it: PRAGMA journal_mode = WAL. Until then readers and the writer wait for each other."
    yield Finding("warning" if bad else "ok", "journal mode", journal, "wal", advice if bad else "")
    bad = synchronous != "full"
    advice = "Take synchronous=normal out of the URL, unless a rewind after a power failure is acceptable."
    found = f"{synchronous}, as this URL asks for"
    yield Finding("warning" if bad else "ok", "synchronous", found, "full", advice if bad else "")
    yield _disk(path)
    yield _file_system(path)


def _disk(path: str) -> Finding:
    free, size = shutil.disk_usage(Path(path).parent).free, Path(path).stat().st_size
    found = f"{free // 2**20} MiB free, the file has {size // 2**20} MiB"
    expected = "room for as much again, and for 64 MiB of WAL"
    if free >= max(size, 2**26):
        return Finding("ok", "disk", found, expected)
    advice = "Make room: where there is none, batches fail until there is."
    return Finding("error" if free < 2**26 else "warning", "disk", found, expected, advice)


def _file_system(path: str) -> Finding:
    expected = "a local disk: WAL does not work over a network"
    try:
        mounts = [line.split()[1:3] for line in _MOUNTS.read_text().splitlines()]
    except OSError:
        return Finding("ok", "file system", "cannot be told on this system", expected)
    folders = {str(one) for one in Path(path).resolve().parents}
    kinds = {place.replace("\\040", " "): kind for place, kind in mounts}
    kind = kinds[max((place for place in kinds if place in folders), key=len, default="/")] if kinds else "unknown"
    remote = kind.startswith(_REMOTE)
    advice = "Move the file to a local disk, or take redis://." if remote else ""
    return Finding("error" if remote else "ok", "file system", kind, expected, advice)
