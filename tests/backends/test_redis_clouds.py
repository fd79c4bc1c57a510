"""Logins of managed services: what they accept is played here, and the libraries of the services are the real ones."""

from __future__ import annotations

import hashlib
import hmac
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from secrets import token_hex
from typing import Any
from urllib.parse import parse_qsl, quote, urlsplit

import pytest

from mapstate.backends import resolve
from mapstate.backends.redis.pools import _provider_of
from mapstate.capabilities import FenceToken
from mapstate.errors import ConfigurationError, StoreAuthError

pytestmark = pytest.mark.redis

CLOUDS = "mapstate.backends.redis.clouds"


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """No identity of this machine's; and no provider of another test's, of which a process keeps one."""
    for name in ("HOME", "CLOUDSDK_CONFIG", "AZURE_CONFIG_DIR"):
        monkeypatch.setenv(name, str(tmp_path))
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "GOOGLE_APPLICATION_CREDENTIALS", "AZURE_CLIENT_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("MAPSTATE_REDIS_USER", "job")
    monkeypatch.setenv("MAPSTATE_REDIS_CACHE", "My-Cache")
    _provider_of.cache_clear()
    yield
    _provider_of.cache_clear()


def written_and_read(url: str) -> None:
    store = resolve(url).open("visits")
    assert store.swap(b"a ledger", None, FenceToken(1, 7)) is not None
    assert resolve(url).open("visits").load() == store.load() is not None


def elsewhere(url: str) -> str:
    """The same store, by connections of its own: a process shares those of a URL."""
    return f"{url}&socket_timeout=7&retries=0"


# AWS: the password is a signed request


def signature(secret: str, service: str, host: str, query: dict[str, str]) -> str:
    """AWS's version 4 of a signature for a GET of "/", by its description."""
    date, region = query["X-Amz-Date"], query["X-Amz-Credential"].split("/")[2]
    canonical = "&".join(f"{quote(name, '~')}={quote(query[name], '~')}" for name in sorted(query))
    request = f"GET\n/\n{canonical}\nhost:{host}\n\nhost\n{hashlib.sha256().hexdigest()}"
    scope = f"{date[:8]}/{region}/{service}/aws4_request"
    text = f"AWS4-HMAC-SHA256\n{date}\n{scope}\n{hashlib.sha256(request.encode()).hexdigest()}"
    key = f"AWS4{secret}".encode()
    for part in (*scope.split("/"), text):
        key = hmac.new(key, part.encode(), hashlib.sha256).digest()
    return key.hex()


class SignedDoor:
    """In front of a Redis: a connection goes on to it if its password is a token that was signed with the secret."""

    def __init__(self, port: int, service: str, secret: str, **more: str) -> None:
        self.port, self.service, self.secret, self.more = port, service, secret, more
        self.tokens: list[str] = []
        self.listener = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self.listener.accept()
            except OSError:  # closed
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client, socket.create_connection(("127.0.0.1", self.port)) as server:
            data = b""
            while data.count(b"\r\n") < 7:
                data += client.recv(65536)
            _, _, command, _, user, _, token, rest = data.split(b"\r\n", 7)
            assert (command, user) == (b"AUTH", b"job")
            if not self.is_signed(token.decode()):
                client.sendall(b"-WRONGPASS invalid username-password pair or user is disabled.\r\n")
                return
            client.sendall(b"+OK\r\n")
            server.sendall(rest)
            threading.Thread(target=pump, args=(server, client), daemon=True).start()
            pump(client, server)

    def is_signed(self, token: str) -> bool:
        self.tokens.append(token)
        host, _, text = token.partition("/?")
        query = dict(parse_qsl(text, strict_parsing=True))
        given = query.pop("X-Amz-Signature")
        asked = {name: value for name, value in query.items() if not name.startswith("X-Amz-")}
        age = datetime.now(UTC) - datetime.strptime(query["X-Amz-Date"], "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
        return (
            host == "my-cache"
            and asked == {"Action": "connect", "User": "job"} | self.more
            and query["X-Amz-Expires"] == "900"
            and timedelta(seconds=-5) < age < timedelta(seconds=900)
            and hmac.compare_digest(given, signature(self.secret, self.service, host, query))
        )


def pump(source: socket.socket, target: socket.socket) -> None:
    try:
        while data := source.recv(65536):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)
    except OSError:  # the other side has gone
        pass


@pytest.fixture
def door(start_redis: Callable[..., Any]) -> Iterator[Callable[..., SignedDoor]]:
    made: list[SignedDoor] = []

    def make(*words: str, **more: str) -> SignedDoor:
        made.append(SignedDoor(urlsplit(start_redis().url).port, *words, **more))
        return made[-1]

    yield make
    for one in made:
        one.listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        one.listener.close()


AWS = [
    ("elasticache", "elasticache", {}),
    ("elasticache_serverless", "elasticache", {"ResourceType": "ServerlessCache"}),
    ("memorydb", "memorydb", {}),
]


@pytest.mark.parametrize(("factory", "service", "more"), AWS)
def test_aws_takes_a_signed_token_for_each_connection(factory, service, more, door, monkeypatch):
    secret = token_hex(20)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIDEXAMPLE")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-central-1")
    behind = door(service, secret, **more)
    url = f"redis://127.0.0.1:{behind.listener.getsockname()[1]}/0?credentials={CLOUDS}:{factory}"
    written_and_read(url)
    assert len(behind.tokens) >= 1
    assert "eu-central-1" in behind.tokens[0]
    assert secret not in behind.tokens[0]

    behind.secret = token_hex(20)  # the identity may not connect any more
    with pytest.raises(StoreAuthError) as caught:
        resolve(elsewhere(url)).open("visits").load()
    assert behind.tokens[-1] not in str(caught.value)


def test_aws_without_an_identity_a_region_or_a_user_is_refused(door, monkeypatch):
    behind = door("elasticache", "secret")
    url = f"redis://127.0.0.1:{behind.listener.getsockname()[1]}/0?credentials={CLOUDS}:elasticache"
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION", "AWS_REGION"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigurationError, match="AWS_DEFAULT_REGION"):
        resolve(url).open("visits").load()
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-central-1")
    with pytest.raises(StoreAuthError, match="NoCredentialsError"):
        resolve(url).open("visits").load()
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIDEXAMPLE")  # it is there a moment later
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    assert resolve(url).open("visits").load() is None
    assert len(behind.tokens) == 1
    _provider_of.cache_clear()
    monkeypatch.delenv("MAPSTATE_REDIS_CACHE")
    with pytest.raises(ConfigurationError, match="MAPSTATE_REDIS_CACHE is not set"):
        resolve(elsewhere(url)).open("visits").load()
    assert len(behind.tokens) == 1


# Google and Azure: the password is a token that the machine's metadata gives


class Metadata(ThreadingHTTPServer):
    """Gives tokens as the metadata of a machine in both clouds does; a token that it gives is the user's password."""

    daemon_threads = True

    accept: Callable[[str], None]
    seconds: int

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), MetadataCalls)
        self.tokens: list[str] = []
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    def new_token(self) -> str:
        self.tokens.append(token_hex(16))
        self.accept(self.tokens[-1])
        return self.tokens[-1]


class MetadataCalls(BaseHTTPRequestHandler):
    server: Metadata

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        accounts = "/computeMetadata/v1/instance/service-accounts/"
        body: Any = {}
        if path == "/azure":
            assert self.headers["X-IDENTITY-HEADER"] == "header"
            assert dict(parse_qsl(urlsplit(self.path).query))["resource"] == "https://redis.azure.com"
            expires = int(time.time()) + self.server.seconds
            body = {"access_token": self.server.new_token(), "expires_on": str(expires), "token_type": "Bearer"}
        elif path.startswith(accounts) and path.endswith("/token"):
            body = {"access_token": self.server.new_token(), "expires_in": self.server.seconds, "token_type": "Bearer"}
        elif path.startswith(accounts):
            body = {"email": "job@project.example", "aliases": ["default"], "scopes": ["cloud-platform"]}
        data = json.dumps(body).encode()
        self.send_response(200)
        for name, value in (("Metadata-Flavor", "Google"), ("Content-Type", "application/json")):
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def metadata() -> Iterator[Metadata]:
    """One for all tests: Google's library reads its address when it is imported."""
    with Metadata() as server, pytest.MonkeyPatch.context() as patch:
        host = f"127.0.0.1:{server.server_port}"
        patch.setenv("GCE_METADATA_HOST", host)
        patch.setenv("GCE_METADATA_IP", host)
        patch.setenv("GOOGLE_CLOUD_PROJECT", "project")
        patch.setenv("IDENTITY_ENDPOINT", f"http://{host}/azure")
        patch.setenv("IDENTITY_HEADER", "header")
        yield server
        server.shutdown()


@pytest.fixture(params=["memorystore", "entra"])
def cloud(request: Any, metadata: Metadata, start_redis: Callable[..., Any]) -> Iterator[Any]:
    """Makes the tokens those of so many seconds, and gives the metadata with the URL."""
    server = start_redis()
    user = "default" if request.param == "memorystore" else "job"
    with server.client() as admin:

        def accept(token: str) -> None:
            admin.execute_command("ACL", "SETUSER", user, "on", "resetpass", f">{token}", "~*", "&*", "+@all")

        def start(seconds: int) -> tuple[Metadata, str]:
            metadata.accept, metadata.seconds = accept, seconds
            metadata.tokens.clear()
            return metadata, f"{server.url}?credentials={CLOUDS}:{request.param}"

        yield start


def test_a_token_serves_until_it_expires(cloud):
    metadata, url = cloud(3600)
    written_and_read(url)
    assert len(metadata.tokens) == 1
    metadata.accept(token_hex(16))  # the service took its access away
    with pytest.raises(StoreAuthError):
        resolve(elsewhere(url)).open("visits").load()
    assert len(metadata.tokens) == 1


def test_a_token_that_expires_is_renewed_for_the_next_connection(cloud):
    metadata, url = cloud(-60)  # expired when it comes
    written_and_read(url)
    first = len(metadata.tokens)
    resolve(elsewhere(url)).open("visits").load()
    assert len(metadata.tokens) > first
