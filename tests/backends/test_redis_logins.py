"""Logins that change while processes run: a password in a file, and what a provider of credentials gives."""

from __future__ import annotations

import asyncio
import os
import pickle
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from secrets import token_hex
from typing import Any

import pytest
import redis
from one_ledger import OneLedger
from openings import opening
from rotation import Rotation, again_and_again

from mapstate import opaque, open_async_reader, open_reader
from mapstate.backends import resolve
from mapstate.backends.redis import RedisBackend, problems
from mapstate.capabilities import FenceToken
from mapstate.errors import ConfigurationError, StoreAuthError, StoreUnavailableError
from mapstate.protocol.ledger_record import Commit

pytestmark = pytest.mark.redis

OPENING = opening()
KEYS = [f"user-{at}" for at in range(50)]

PROVIDER = """
import os, pathlib
from redis.credentials import CredentialProvider

made = []

def write(line):
    with open(pathlib.Path(__file__).with_name("calls"), "a") as file:
        file.write(line)

class FromFile(CredentialProvider):
    def __init__(self):
        made.append(self)
        write(f"made in {os.getpid()}\\n")

    def get_credentials(self):
        write("asked\\n")
        return "job", pathlib.Path(__file__).with_name("token").read_text().strip()

class OnALoop(FromFile):
    async def get_credentials_async(self):
        write("asked on a loop\\n")
        return super().get_credentials()

class Fails(CredentialProvider):
    def get_credentials(self):
        raise ValueError("the client secret is s3cr3t")

class Bytes(CredentialProvider):
    def get_credentials(self):
        return "job", b"s3cr3t"

class Text(CredentialProvider):
    def get_credentials(self):
        return "s3cr3t"

def no_provider():
    return object()

def broken():
    raise ValueError("the client secret is s3cr3t")
"""


@pytest.fixture
def server(start_redis: Callable[..., Any]) -> Any:
    return start_redis()


@pytest.fixture
def rotation(server: Any, tmp_path: Path) -> Iterator[Rotation]:
    with server.client() as admin:
        yield Rotation(admin, tmp_path / "password")


@pytest.fixture
def url(server: Any, rotation: Rotation) -> str:
    return f"{server.url.replace('://', '://job@')}?password_file={rotation.file}"


@pytest.fixture
def provider(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of a module of providers, which nothing has imported yet."""
    name = f"provider_{token_hex(4)}"
    (tmp_path / f"{name}.py").write_text(PROVIDER)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield name
    sys.modules.pop(name, None)


def counted(url: str) -> None:
    """A batch with a record for each of `KEYS`."""
    store = resolve(url).open("visits")
    ledger, attempt = OneLedger.open_and_begin(store, OPENING, 0)
    store.writer(attempt.token).multi_put(KEYS, [b"[%d,1,null]" % attempt.txid] * len(KEYS))
    ledger.commit(Commit(batch_id=0, txid=attempt.txid, owner="q"))


def test_each_new_connection_reads_the_file_so_no_call_fails_while_passwords_change(url, rotation):
    store = resolve(url).open("visits")
    token = FenceToken(1, 7)
    assert store.swap(b"a ledger", None, token) is not None
    writer = store.writer(token)
    rounds = 0

    def change() -> None:
        nonlocal rounds
        rotation.change()
        rounds += 1

    with again_and_again(change, 0.05):
        at = 0
        while rounds < 40:
            at += 1
            writer.multi_put(KEYS, [b"%d" % at] * len(KEYS))
            assert store.multi_get(KEYS) == [b"%d" % at] * len(KEYS)
    assert at > 5
    assert len(set(rotation.passwords)) > 40


def test_readers_of_both_kinds_go_on_with_the_new_password(url, rotation):
    counted(url)

    async def read() -> None:
        async with open_async_reader(url, "visits") as reader:
            for _ in range(20):
                rotation.change()
                assert await reader.get(KEYS[0]) == {"n": 1}

    with open_reader(url, "visits") as reader:
        for _ in range(20):
            rotation.change()
            assert reader.get(KEYS[0]) == {"n": 1}
    asyncio.run(read())


def test_a_file_that_has_the_password_later_than_the_server_is_waited_for(url, rotation):
    store = resolve(url).open("visits")
    assert store.load() is None
    rotation.allow()
    late = threading.Timer(0.4, rotation.tell)
    late.start()
    try:
        assert store.load() is None
    finally:
        late.join()


def test_no_message_shows_the_end_of_a_password_that_begins_with_the_one_before(monkeypatch):
    monkeypatch.setattr(problems, "SECRETS", deque(["hunter2", "hunter2-new"]))
    error = redis.exceptions.ResponseError("wrong hunter2-new")
    problem, _ = problems.problem_of(error, state="visits", store="h", login_changes=True)
    assert "new" not in str(problem)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (redis.exceptions.ResponseError("DENIED Redis is running in protected mode because it is."), StoreAuthError),
        (redis.exceptions.ConnectionError("Error 104 while writing to socket. Reset by peer."), StoreUnavailableError),
    ],
)
def test_protected_mode_is_named(error, kind):
    """It says why and closes the connection: whether a driver reads that before it writes is chance."""
    problem, _ = problems.problem_of(error, state="visits", store="h", login_changes=False)
    assert isinstance(problem, kind)
    assert "is in protected mode" in str(problem)


def test_a_password_that_stays_wrong_is_refused_and_not_shown(url, rotation):
    store = resolve(f"{url}&retries=2").open("visits")
    assert store.load() is None
    old = rotation.passwords[-1]
    new = rotation.allow()
    with pytest.raises(StoreAuthError, match="refused the password") as caught:
        store.load()
    assert not {old, new} & set(str(caught.value).split())
    assert old not in repr(vars(caught.value)) + repr(store) + repr(resolve(url))


@pytest.mark.parametrize(
    ("contents", "why"), [(None, "No such file or directory"), (b"\n", "it is empty"), (b"\xff\xfe", "it is no UTF-8")]
)
def test_a_file_without_a_password_is_refused_at_first_and_named_later(contents, why, url, rotation):
    def damage() -> None:
        if contents is None:
            rotation.file.unlink()
        else:
            rotation.file.write_bytes(contents)

    store = resolve(f"{url}&retries=0").open("visits")
    store.load()
    damage()
    rotation.allow()
    with pytest.raises(StoreAuthError, match=f"password_file names the file .*{why}"):
        store.load()
    rotation.tell()
    assert store.load() is None
    damage()
    with pytest.raises(ConfigurationError, match=f"{rotation.file.name}', which gives no password on .*{why}"):
        resolve(f"{url}&retries=1").open("visits").load()


def test_a_provider_is_made_once_in_each_process_and_asked_for_each_connection(server, rotation, provider, tmp_path):
    rotation.file = tmp_path / "token"
    rotation.change()
    url = f"{server.url}?credentials={provider}:FromFile"
    counted(url)
    for _ in range(3):
        rotation.change()
        with open_reader(url, "visits") as reader:
            assert reader.get(KEYS[0]) == {"n": 1}
    calls = (tmp_path / "calls").read_text().split("\n")[:-1]
    assert [call for call in calls if call != "asked"] == [f"made in {os.getpid()}"]
    assert calls.count("asked") >= 4
    pickled = pickle.dumps(opaque(url, "visits"))
    assert not [one for one in rotation.passwords if one.encode() in pickled]


@pytest.mark.parametrize(("kind", "line"), [("FromFile", "asked"), ("OnALoop", "asked on a loop")])
def test_a_provider_answers_on_an_event_loop(server, rotation, provider, kind, line, tmp_path):
    (tmp_path / "token").write_text(rotation.passwords[-1])
    url = f"{server.url}?credentials={provider}:{kind}"
    counted(url)

    async def read() -> None:
        async with open_async_reader(url, "visits") as reader:
            assert await reader.get(KEYS[0]) == {"n": 1}

    (tmp_path / "calls").unlink()
    asyncio.run(read())
    assert line in (tmp_path / "calls").read_text().split("\n")


@pytest.mark.parametrize(
    ("factory", "said"),
    [
        ("nothing", "AttributeError"),
        ("broken", "ValueError, whose text is not shown"),
        ("no_provider", "returned a object, which is no redis.CredentialProvider"),
    ],
)
def test_a_factory_that_gives_no_provider_is_refused_before_anything_is_asked(server, provider, factory, said):
    with pytest.raises(ConfigurationError, match=said) as caught:
        resolve(f"{server.url}?credentials={provider}:{factory}").open("visits").load()
    assert "s3cr3t" not in str(caught.value) + repr(caught.value.__cause__)


def test_a_module_that_a_machine_lacks_is_named(server):
    with pytest.raises(ConfigurationError, match=r"credentials=not_there:make .*ModuleNotFoundError"):
        resolve(f"{server.url}?credentials=not_there:make").open("visits").load()


@pytest.mark.parametrize(("kind", "said"), [("Fails", "ValueError"), ("Bytes", "TypeError"), ("Text", "TypeError")])
def test_a_provider_that_gives_no_login_is_an_error_without_its_text(kind, said, server, provider):
    store = resolve(f"{server.url}?credentials={provider}:{kind}&retries=1").open("visits")
    message = rf"{said}, whose .* python -c 'import {provider}; {provider}.{kind}\(\)"
    with pytest.raises(StoreAuthError, match=message) as caught:
        store.load()
    assert "s3cr3t" not in str(caught.value) + repr(caught.value.__cause__)


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("redis://job:pw@h?password_file=/f", "there is a password and a password_file"),
        ("redis://job@h?password_file=/f&password_env=A", "there is a password_env and a password_file"),
        ("redis://h?password_env=A&credentials=a:b", "there is a password_env and a credentials"),
        ("redis://job@h?credentials=a:b", "username is what credentials gives, too"),
        ("redis://h?credentials=a", "credentials is module:factory, not 'a'"),
        ("redis://h?credentials=os.system('x'):b", "credentials is module:factory"),
        ("redis://job@h?password_file=", "password_file is the name of a file"),
        ("redis+cluster://job:pw@h?password_file=/f", "there is a password and a password_file"),
    ],
)
def test_a_login_comes_from_one_place(url, said):
    with pytest.raises(ConfigurationError, match=said.replace("(", r"\(")):
        resolve(url)


def test_a_url_shows_where_its_login_comes_from():
    for url in ("redis://job@h:6379/0?password_file=/run/a", "redis://h:6379/0?credentials=a.b:c"):
        backend = RedisBackend.from_url(url)
        assert RedisBackend.from_url(repr(backend).split("'")[1]) == backend
        assert pickle.loads(pickle.dumps(backend)) == backend


def test_each_node_of_a_cluster_reads_the_file(redis_cluster, tmp_path):
    file = tmp_path / "password"
    url = f"{redis_cluster.url.replace('://', '://job@')}?password_file={file}&prefix={token_hex(4)}/"
    store = resolve(url).open("visits")
    for _ in range(3):
        password = token_hex(8)
        file.write_text(password)
        for node in redis_cluster.masters:
            with node.client() as admin:
                admin.execute_command("ACL", "SETUSER", "job", "on", "resetpass", f">{password}", "~*", "&*", "+@all")
                admin.execute_command("CLIENT", "KILL", "USER", "job")
        store.multi_put(KEYS, [b"1"] * len(KEYS))
        assert store.multi_get(KEYS) == [b"1"] * len(KEYS)
