"""Servers in Docker, as far as it can be seen without one: the compose file, its scripts, and the public helpers."""

from __future__ import annotations

import io
import json
import os
import re
import runpy
import socket
import subprocess
import sys
import tarfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import servers
import yaml
from servers import RedisServer, find_redis_binary, free_port, wait_until
from testcontainers.core.config import ConnectionMode, testcontainers_config

from mapstate.backends import resolve
from mapstate.errors import ConfigurationError, MissingDriverError, StoreUnavailableError
from mapstate.testing import containers
from mapstate.testing.containers import aerospike_container, redis_container, valkey_container

ROOT = Path(__file__).resolve().parents[2]
COMPOSE = (ROOT / "docker-compose.yml").read_text()
SERVICES = yaml.safe_load(COMPOSE)["services"]


# The compose file


def test_there_is_a_server_of_each_kind():
    assert set(SERVICES) == {"redis", "valkey", "redis-cluster", "aerospike", "postgresql"}


@pytest.mark.parametrize("service", list(SERVICES))
def test_an_image_is_pinned_by_a_variable_with_a_default(service):
    match = re.fullmatch(r"\$\{(MAPSTATE_\w+_IMAGE):-([\w./-]+:[\w.-]+)\}", SERVICES[service]["image"])
    assert match, SERVICES[service]["image"]
    assert not match[2].endswith(":latest")


@pytest.mark.parametrize("service", list(SERVICES))
def test_a_server_says_when_it_is_ready_and_is_reached_from_this_machine_only(service):
    """`docker compose up --wait` waits for what has a health check, and for nothing else."""
    check = SERVICES[service]["healthcheck"]
    assert check["test"][0] in ("CMD", "CMD-SHELL")
    assert {"interval", "timeout", "retries"} <= check.keys()
    assert SERVICES[service]["ports"]
    assert all(port.startswith("127.0.0.1:") for port in SERVICES[service]["ports"])


def test_each_variable_has_the_same_default_in_the_example_of_an_env_file():
    used = dict(re.findall(r"\$\{(\w+):-([^}]+)\}", COMPOSE))
    example = dict(re.findall(r"^(\w+)=(.*)$", (ROOT / ".env.example").read_text(), re.MULTILINE))
    assert used == example
    assert "$" not in re.sub(r"\$\{\w+:-[^}]+\}|\$\$", "", COMPOSE), "a variable without a default"


def test_what_is_mounted_is_there():
    for service in SERVICES.values():
        for mount in service.get("volumes", ()):
            assert (ROOT / mount.partition(":")[0]).is_file(), mount


def test_the_library_and_the_tests_start_the_images_of_the_compose_file():
    started = set()
    for path in (Path(containers.__file__), *(ROOT / "tests").rglob("*.py")):
        for variable, image in re.findall(r'environ\.get\("(\w+_IMAGE)", "([^"]+)"', path.read_text()):
            assert f"${{{variable}:-{image}}}" in COMPOSE, f"{path.name}: {variable}"
            started.add(variable)
    assert started == {"MAPSTATE_REDIS_IMAGE", "MAPSTATE_VALKEY_IMAGE", "MAPSTATE_AEROSPIKE_IMAGE"}


def test_aerospike_is_configured_so_that_records_may_have_a_ttl():
    for conf in ((ROOT / "compose" / "aerospike.conf").read_text(), containers._AEROSPIKE_CONF):
        [seconds] = re.findall(r"^\s*nsup-period (\d+)$", conf, re.MULTILINE)
        assert int(seconds) > 0
        assert conf.count("{") == conf.count("}")
        assert not re.findall(r"\{[^\n]+|[^\n\s][^\n]*\}", conf), "one brace a line: the server reads it so"


def test_docker_compose_itself_takes_the_file():
    if subprocess.run(["docker", "compose", "version"], capture_output=True, check=False).returncode:
        pytest.skip("there is no docker compose here")
    subprocess.run(["docker", "compose", "config", "--quiet"], cwd=ROOT, check=True)


@pytest.mark.parametrize("script", sorted((ROOT / "compose").glob("*.sh")), ids=lambda path: path.name)
def test_a_script_is_one(script):
    shell = "bash" if "bash" in script.read_text().partition("\n")[0] else "sh"
    subprocess.run([shell, "-n", script], check=True)


@pytest.mark.parametrize(("answer", "healthy"), [(b"status\tok\n", True), (b"status\tERROR::\n", False), (b"", False)])
def test_aerospikes_health_is_what_it_says_of_itself(answer, healthy):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        asked = []

        def serve():
            conn, _ = listener.accept()
            with conn:
                asked.append(conn.recv(100))
                conn.sendall(b"\2\1" + len(answer).to_bytes(6, "big") + answer)

        server = threading.Thread(target=serve)
        server.start()
        environment = os.environ | {"AEROSPIKE_PORT": str(listener.getsockname()[1])}
        ran = subprocess.run(["bash", ROOT / "compose" / "aerospike-status.sh"], env=environment, check=False)
        server.join()
    assert asked == [b"\2\1\0\0\0\0\0\7status\n"]
    assert (ran.returncode == 0) == healthy


def redis_tools():
    """The directory of redis-server and redis-cli; None where one of them is missing."""
    server = find_redis_binary()
    place = None if server is None else Path(server).parent
    return place if place is not None and (place / "redis-cli").exists() else None


@pytest.mark.redis
@pytest.mark.skipif(redis_tools() is None, reason="there is no redis-cli beside a redis-server here")
def test_the_clusters_script_makes_a_cluster_and_ends_with_its_nodes(tmp_path):
    first = free_cluster_ports()
    environment = os.environ | {"PATH": f"{redis_tools()}:{os.environ['PATH']}", "DATA": str(tmp_path)}
    command = ["sh", str(ROOT / "compose" / "redis-cluster.sh")]
    options: Any = {"env": environment | {"FIRST_PORT": str(first)}, "stdout": subprocess.DEVNULL}

    def ask(port, *words):
        command = [redis_tools() / "redis-cli", "-p", str(port), *words]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout

    with subprocess.Popen(command, **options) as script:
        try:
            for at in range(3):
                wait_until(lambda at=at: "cluster_state:ok" in ask(first + at, "cluster", "info"), "the cluster is up")
            assert "cluster_known_nodes:3" in ask(first, "cluster", "info")
        finally:
            for at in range(3):
                ask(first + at, "shutdown", "nosave")
            script.terminate()
    wait_until(lambda: "PONG" not in ask(first, "ping"), "the nodes are gone")


def free_cluster_ports():
    """The first of three ports; a node also takes the one that is 10,000 above."""
    while True:
        first = free_port() % 20_000 + 20_000
        try:
            for port in (first, first + 1, first + 2):
                for one in (port, port + 10_000):
                    socket.create_server(("127.0.0.1", one)).close()
        except OSError:
            continue
        return first


def test_make_test_containers_gives_each_store_its_server(monkeypatch):
    script = runpy.run_path(str(ROOT / "scripts" / "test_containers.py"))
    runs = {name: environment for name, environment, _ in script["runs"](script["defaults"]())}
    assert set(runs) == set(SERVICES)
    assert runs["redis"] == {"MAPSTATE_TEST_REDIS_URL": "redis://127.0.0.1:16379/0"}
    monkeypatch.setenv("MAPSTATE_POSTGRESQL_PORT", "5433")
    assert "127.0.0.1:5433" in str(script["runs"](script["defaults"]()))


@pytest.mark.parametrize(
    ("service", "fixture"),
    [
        ("redis", "redis_url"),
        ("redis", "CLUSTER"),
        ("valkey", "redis_url"),
        ("redis-cluster", "cluster_url"),
        ("redis-cluster", "CLUSTER"),
        ("aerospike", "aerospike_fixtures"),
        ("aerospike", "aerospike_url"),
        ("aerospike", "AEROSPIKE"),
        ("aerospike", "each_url"),
        ("postgresql", "postgresql_url"),
    ],
)
def test_make_test_containers_runs_every_test_that_has_use_for_a_server(service, fixture):
    script = runpy.run_path(str(ROOT / "scripts" / "test_containers.py"))
    [modules] = [modules for name, _, modules in script["runs"](script["defaults"]()) if name == service]
    asks = re.compile(rf"^ *(def .*\(.*\b{fixture}\b|from {fixture} |from .* import .*\b{fixture}\b)", re.MULTILINE)
    files = [path for path in (ROOT / "tests").rglob("test_*.py") if path.parent.name != "chaos"]
    asking = {path.stem for path in files if asks.search(path.read_text())}
    assert asking <= {f"test_{module}" for module in modules}
    assert set(map("test_{}".format, modules)) <= {path.stem for path in files}


# The public helpers


class DockerStandIn(ThreadingHTTPServer):
    """Answers testcontainers as Docker's daemon does. Its one container is a socket that sends ``answer``.

    ``asked`` is the request that created the container, ``copied`` the files that were put into it, ``removed`` how
    often a container was removed.
    """

    daemon_threads = True

    def __init__(self, answer=b"+PONG\r\n"):
        super().__init__(("127.0.0.1", 0), DockerApi)
        self.answer = answer
        self.asked = {}
        self.copied = {}
        self.removed = 0
        self.listener = None
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    def close(self):
        self.end_container()
        self.shutdown()
        self.server_close()

    def binding(self):
        """The one port of the container, and where Docker is asked to listen for it."""
        [(port, [binding])] = self.asked["HostConfig"]["PortBindings"].items()
        return port, binding["HostIp"], binding["HostPort"]

    def start_container(self):
        _, address, port = self.binding()
        self.listener = socket.create_server((address or "127.0.0.1", int(port or 0)))
        threading.Thread(target=self.answer_all, args=(self.listener,), daemon=True).start()

    def answer_all(self, listener):
        while True:
            try:
                conn, _ = listener.accept()
            except OSError:
                return
            with conn:
                conn.recv(100)
                conn.sendall(self.answer)

    def end_container(self):
        listener, self.listener = self.listener, None
        if listener is not None:
            listener.shutdown(socket.SHUT_RDWR)
            listener.close()

    def container(self):
        """What `docker inspect` says."""
        running = self.listener is not None
        port, _, _ = self.binding()
        bound = [{"HostIp": "127.0.0.1", "HostPort": str(self.listener.getsockname()[1])}] if running else []
        state = {"Status": "running" if running else "exited", "Running": running}
        return {"Id": "c1", "State": state, "NetworkSettings": {"Ports": {port: bound}}, "Config": {"Tty": True}}


class DockerApi(BaseHTTPRequestHandler):
    """The requests that a container of testcontainers comes to."""

    server: DockerStandIn

    def do_GET(self):
        path = self.path.partition("?")[0].rpartition("/")[2]
        if path == "version":
            self.reply({"ApiVersion": "1.45"})
        elif path == "logs":
            self.reply(b"out of luck")
        elif "/containers/" in self.path:
            self.reply(self.server.container())
        else:  # a ping, an image
            self.reply({"Id": "i1"})

    def do_POST(self):
        body = self.body()
        action = self.path.partition("?")[0].rpartition("/")[2]
        if action == "create":
            self.server.asked = json.loads(body)
            self.reply({"Id": "c1"}, 201)
        elif action == "wait":
            self.reply({"StatusCode": 0})
        else:
            if action == "start":
                self.server.start_container()
            elif action == "kill":
                self.server.end_container()
            self.reply(b"", 204)

    def do_PUT(self):
        with tarfile.open(fileobj=io.BytesIO(self.body())) as archive:
            for member in archive.getmembers():
                if member.isfile():
                    self.server.copied[member.name] = archive.extractfile(member).read().decode()
        self.reply(b"")

    def do_DELETE(self):
        self.server.end_container()
        self.server.removed += 1
        self.reply(b"", 204)

    def body(self):
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        return body

    def reply(self, content, status=200):
        kind = "application/json" if isinstance(content, dict) else "text/plain"
        data = json.dumps(content).encode() if isinstance(content, dict) else content
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


@pytest.fixture
def docker(monkeypatch):
    daemon = DockerStandIn()
    monkeypatch.setenv("DOCKER_HOST", f"tcp://127.0.0.1:{daemon.server_port}")
    monkeypatch.setattr(testcontainers_config, "ryuk_disabled", True)
    monkeypatch.setattr(testcontainers_config, "connection_mode_override", ConnectionMode.docker_host)
    yield daemon
    daemon.close()


@pytest.mark.parametrize(("start", "server"), [(redis_container, "redis-server"), (valkey_container, "valkey-server")])
def test_a_container_gives_a_url_and_ends_with_its_test(docker, start, server):
    with start() as url:
        assert resolve(url).port == docker.listener.getsockname()[1]
        assert docker.asked["Cmd"][0] == server
        assert "noeviction" in docker.asked["Cmd"]
        assert not docker.removed
    assert docker.removed == 1


def test_an_aerospike_listens_on_this_machine_only_and_on_the_port_that_it_names(docker):
    """Docker can be asked to start it: what testcontainers refuses in its arguments fails here, without a Docker."""
    said = r"does not answer within 0 s; its log ends: out of luck"
    with pytest.raises(StoreUnavailableError, match=said), aerospike_container(seconds=0):
        pytest.fail("a socket is no Aerospike")
    inside, address, outside = docker.binding()
    assert (inside, address) == (f"{outside}/tcp", "127.0.0.1")
    [(path, conf)] = docker.copied.items()
    assert docker.asked["Cmd"] == ["--config-file", f"/{path.lstrip('/')}"]
    assert re.search(rf"^ *port {outside}$", conf, re.MULTILINE)
    assert docker.removed == 1


def test_a_redis_of_the_tests_own_in_docker_keeps_its_port_when_it_is_started_again(docker, monkeypatch):
    monkeypatch.setattr(servers, "find_redis", lambda: "docker")
    with RedisServer().start(maxmemory="4mb") as server:
        assert docker.binding() == ("6379/tcp", "127.0.0.1", str(server.port))
        assert docker.asked["Cmd"][-2:] == ["--maxmemory", "4mb"]
        server.kill()
        assert docker.listener is None
        server.restart()
        assert docker.listener.getsockname()[1] == server.port
    assert docker.removed == 1


def test_a_container_ends_with_a_test_that_fails(docker):
    def fails():
        with redis_container():
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert docker.removed == 1


def test_a_server_that_does_not_answer_is_an_error_with_its_log_and_is_ended(docker):
    docker.answer = b"-LOADING\r\n"
    said = r"fake:1 does not answer within 0\.3 s; its log ends: out of luck"
    with pytest.raises(StoreUnavailableError, match=said), redis_container("fake:1", seconds=0.3):
        pytest.fail("it is not ready")
    assert docker.removed == 1


@pytest.mark.parametrize("start", [redis_container, valkey_container, aerospike_container])
def test_where_there_is_no_docker_the_error_says_what_to_do(start, monkeypatch, tmp_path):
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/docker.sock")
    said = r"no Docker answers here.*docker info.*DOCKER_HOST.*the URL of a server"
    with pytest.raises(ConfigurationError, match=said), start():
        pytest.fail("there is a Docker after all")


def test_where_testcontainers_is_missing_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "testcontainers.core.container", None)
    with pytest.raises(MissingDriverError, match=r"mapstate\[testing\]"), redis_container():
        pytest.fail("it cannot be there")


def test_where_aerospikes_client_is_missing_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "aerospike", None)
    with pytest.raises(MissingDriverError, match=r"mapstate\[aerospike\]"), aerospike_container():
        pytest.fail("it cannot be there")
