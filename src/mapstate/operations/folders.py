"""A directory that Spark writes to, on this machine or in another file system, reached without Spark and Java."""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol, cast
from urllib.parse import quote

from mapstate.errors import CheckpointError, UsageError, missing_driver

_PLACE = re.compile("([A-Za-z][A-Za-z0-9+.-]*):(?://([^/]*))?(/.*)", re.DOTALL)
"""Scheme, authority and path."""

_NAMES = {"s3a": "s3", "s3n": "s3"}
"""What Hadoop calls a file system, and everybody else."""

_WITHOUT_DIRECTORIES = ("s3", "gcs", "abfs")
"""As pyarrow calls them: what looks like a directory there is a part of the names of files."""


class Folder(Protocol):
    """A directory; its ``str`` is for messages. OSError where its files cannot be reached."""

    def listed(self, name: str = "") -> dict[str, bool]:
        """The names in it, or in a directory below it, and whether each is a directory; none where nothing is."""

    def text(self, name: str) -> str:
        """A file below it. Raises FileNotFoundError."""

    def delete(self, name: str) -> Path | str:
        """Remove a file below it, if there is one, and return where it was."""

    def move_aside(self, names: Sequence[str]) -> Path | str:
        """Move files below it, one after the other, into a new directory named after it, and return that.

        One that is interrupted has moved the first of them; of the next there may be a copy, and it is still there.
        """


def folder_of(place: str | Path) -> Folder:
    """The directory of this name, as Spark is given it: nothing in it is escaped.

    What is not of this machine is reached by pyarrow, or by fsspec where pyarrow does not know its scheme, with the
    credentials that these find by themselves. Raises UsageError for what is no such name, MissingDriverError,
    CheckpointError where pyarrow cannot begin.
    """
    path = local_path(place)
    if path is None:
        return _OtherFolder(str(place))
    return _LocalFolder(path.resolve())


def local_path(place: str | Path) -> Path | None:
    """A place as Spark is given it, if it is one of this machine: ``file:`` or no scheme, and no character escaped."""
    parts = _PLACE.fullmatch(str(place))
    if parts is None:
        return Path(place)
    return Path(parts[3]) if parts[1] == "file" else None


def has_scheme(place: str) -> bool:
    """Whether a place says in which file system it is."""
    return _PLACE.fullmatch(place) is not None


class _LocalFolder:
    def __init__(self, path: Path) -> None:
        self._path = path

    def __str__(self) -> str:
        return str(self._path)

    def listed(self, name: str = "") -> dict[str, bool]:
        try:
            return {file.name: file.is_dir() for file in (self._path / name).iterdir()}
        except (FileNotFoundError, NotADirectoryError):
            return {}

    def text(self, name: str) -> str:
        return (self._path / name).read_text("utf-8")

    def delete(self, name: str) -> Path:
        path = self._path / name
        path.unlink(missing_ok=True)
        return path

    def move_aside(self, names: Sequence[str]) -> Path:
        aside = self._aside()
        targets = [aside / parent for parent in dict.fromkeys(str(Path(name).parent) for name in names)]
        try:
            for target in targets:
                target.mkdir()
            for name in names:
                (self._path / name).rename(aside / name)
        finally:
            for empty in (*targets, aside):
                with suppress(OSError):  # a directory with files stays
                    empty.rmdir()
        return aside

    def _aside(self) -> Path:
        """Make the directory: beside this one, or within it if a rename cannot leave it."""
        within = self._path / f"{self._path.name}.{_rewound_now()}"
        within.mkdir()
        try:
            return within.rename(self._path.with_name(within.name))
        except OSError:  # a mount point, or a parent that this user may not write to
            return within


class _OtherFolder:
    """One in another file system. None of those renames as a disk does, so a file is copied, and then removed."""

    def __init__(self, place: str) -> None:
        self._place = place.rstrip("/")
        self._files, self._path = _file_system(self._place)

    def __str__(self) -> str:
        return self._place

    def listed(self, name: str = "") -> dict[str, bool]:
        from pyarrow import fs

        files = self._files.get_file_info(fs.FileSelector(f"{self._path}/{name}", allow_not_found=True))
        return {file.base_name: file.type == fs.FileType.Directory for file in files}

    def text(self, name: str) -> str:
        return self._bytes(name).decode("utf-8")

    def delete(self, name: str) -> str:
        with suppress(FileNotFoundError):
            self._files.delete_file(f"{self._path}/{name}")
        return f"{self._place}/{name}"

    def move_aside(self, names: Sequence[str]) -> str:
        aside = _rewound_now()
        for name in names:
            data, target = self._bytes(name), f"{self._path}.{aside}/{name}"
            if self._files.type_name not in _WITHOUT_DIRECTORIES:
                self._files.create_dir(target.rpartition("/")[0])
            with self._files.open_output_stream(target) as copy:
                copy.write(data)
            self.delete(name)
        return f"{self._place}.{aside}"

    def _bytes(self, name: str) -> bytes:
        with self._files.open_input_stream(f"{self._path}/{name}") as file:
            return bytes(file.read())


def _rewound_now() -> str:
    return f"rewound-{dt.datetime.now(dt.UTC):%Y%m%dT%H%M%S.%fZ}"


def _file_system(place: str) -> tuple[Any, str]:
    """That of a place, as pyarrow has it, and the path in it. See `folder_of`."""
    scheme, authority, path = cast("re.Match[str]", _PLACE.fullmatch(place)).groups("")
    name = f"{_NAMES.get(scheme.lower(), scheme.lower())}://{authority}"
    if ":" in authority.rpartition("@")[0]:
        raise UsageError(
            f"the name of a directory in {scheme}:// has a password in it, and is not shown. Nothing was changed. Leave"
            " it out: the credentials are those of the environment"
        )
    try:
        from pyarrow import ArrowInvalid, fs
    except ModuleNotFoundError as error:
        raise missing_driver(f"a directory in {scheme}://", error, "tables") from error
    try:
        files, root = fs.FileSystem.from_uri(f"{name}{quote(path)}")
        return files, str(root).rstrip("/")
    except ArrowInvalid:  # whose message repeats the place
        pass
    except OSError as error:
        raise CheckpointError(f"pyarrow cannot reach {scheme}://: {error}. Nothing was changed.") from error
    try:
        from fsspec.core import url_to_fs

        known, root = url_to_fs(f"{name}{path}")
    except (ImportError, ValueError):
        raise UsageError(
            f"pyarrow knows no file system {scheme}://, nor does fsspec, if it is installed. Nothing was changed. "
            f"Install fsspec and its package for {scheme}, or copy the directory here, and back afterwards"
        ) from None
    return fs.PyFileSystem(fs.FSSpecHandler(known)), str(root).rstrip("/")
