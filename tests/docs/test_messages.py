"""No message holds more than a hundred characters of a key, a value or a record."""

from __future__ import annotations

import ast
import pickle
import re
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from mapstate import CombinerAggregator, errors
from mapstate.aggregators.fields import Fields
from mapstate.aggregators.folding import check_type
from mapstate.backends.sqlite import SqliteBackend
from mapstate.errors import KeyEncodingError, MapStateError, cut, shown
from mapstate.keys import KeyCodec
from mapstate.operations.adopt import adopt
from mapstate.schema import Field, KeyField
from mapstate.serializers import RecordCodec, serializer
from mapstate.serializers.value_types import check_plain
from mapstate.spark.executor.task import arrow_to_python

LONG = "secret" * 50_000
NOT_TEXT = LONG + "\ud800"


class Raises(CombinerAggregator):
    def init(self, row: Any) -> Any:
        raise ValueError(f"what is {row['x']!r}?")

    def combine(self, a: Any, b: Any) -> Any:
        return a

    def zero(self) -> Any:
        return None


def codec(form: str, kind: str = "string") -> RecordCodec:
    return RecordCodec(serializer(form), "s", "opaque", [Field("x", "x", kind)], [(0, 1)])


def keys(*kinds: str) -> KeyCodec:
    return KeyCodec([KeyField(f"k{at}", kind) for at, kind in enumerate(kinds)])


def raised_by_an_aggregator() -> None:
    one = Fields([Field("x", "Raises", "string")], {"x": Raises()})
    one.start()[0].add({"x": LONG})


def with_sqlite(use: Callable[[SqliteBackend], Any]) -> Callable[[Path], Any]:
    return lambda folder: use(SqliteBackend(str(folder / "s.db"), max_value_bytes=100))


def put(backend: SqliteBackend, key: str, value: bytes) -> None:
    with closing(backend.open("s")) as store:
        store.multi_put([key], [value])


def adopted(backend: SqliteBackend) -> None:
    put(backend, "1|" + "0" * 1000 + "1", b"[1,1,1]")
    adopt(
        backend,
        "s",
        type="opaque",
        keys=[KeyField("a", "bigint"), KeyField("b", "bigint")],
        fields=[Field("n", "Count", "bigint")],
    )


def no_text(backend: SqliteBackend) -> None:
    put(backend, "a", b"1")
    with closing(sqlite3.connect(backend.path)) as db, db:
        db.execute("UPDATE mapstate_records SET key = CAST(? AS TEXT)", (LONG.encode() + b"\xff",))
    with closing(backend.open("s")) as store:
        list(store.scan(10))


@pytest.mark.parametrize(
    "use",
    [
        lambda _: keys("bigint").encode(LONG),
        lambda _: keys("boolean").encode(LONG),
        lambda _: keys("date").encode(LONG),
        lambda _: keys("string").encode((LONG, LONG)),
        lambda _: keys("string").encode(NOT_TEXT),
        lambda _: keys("decimal(38,2)").encode(LONG),
        lambda _: keys("bigint").decode(LONG),
        lambda _: keys("timestamp").decode(LONG),
        lambda _: keys("bigint", "bigint").decode(LONG),
        lambda _: KeyCodec([KeyField("k", "bigint")], native=True).encode(10**5000),
        lambda _: codec("json").loads([LONG], [b'[1,"' + LONG.encode() + b'"]']),
        lambda _: codec("json", "date").loads(["a"], [b'[1,"' + LONG.encode() + b'",null]']),
        lambda _: codec("msgpack").loads([LONG], [LONG.encode()]),
        lambda _: codec("native").loads([LONG], [[LONG, LONG]]),
        lambda _: codec("json", "any").dumps([(1, {LONG}, None)]),
        lambda _: codec("json").dumps([(1, NOT_TEXT, None)]),
        lambda _: codec("native", "bigint").dumps([(1, 10**3000, None)]),
        lambda _: check_plain({LONG}, float_words=True),
        lambda _: check_type(LONG, "bigint", "an aggregator"),
        lambda _: arrow_to_python(pa.array([LONG.encode() + b"\xff"]).view(pa.string()), "x"),
        lambda _: raised_by_an_aggregator(),
        with_sqlite(lambda backend: put(backend, LONG, b"x" * 101)),
        with_sqlite(lambda backend: put(backend, NOT_TEXT, b"x")),
        with_sqlite(adopted),
        with_sqlite(no_text),
    ],
    ids=map(str, range(25)),
)
def test_a_message_holds_no_more_than_a_hundred_characters_of_a_value(use, tmp_path):
    with pytest.raises(MapStateError) as caught:
        use(tmp_path)
    message = str(caught.value)
    assert "secret" * 18 not in message
    assert "0" * 101 not in message
    assert len(message) < 700


@pytest.mark.redis
def test_a_redis_key_in_a_message_is_cut(redis_url):
    from mapstate.backends import resolve

    store = resolve(f"{redis_url}&max_value_bytes=50").open("s")
    for call in (
        lambda: store.multi_put([LONG], [b"x"]),
        lambda: store.multi_put(["a"], [LONG.encode()]),
        lambda: store.multi_get([NOT_TEXT]),
    ):
        with pytest.raises(MapStateError) as caught:
            call()
        assert len(str(caught.value)) < 500


def test_what_is_short_is_shown_whole_and_what_is_long_begins_as_it_does():
    assert shown("a'b\n") == repr("a'b\n")
    assert shown(("user-42", None)) == "('user-42', None)"
    assert shown(b"x" * 1000) == "b'" + "x" * 98 + "..."
    assert cut(ValueError("why")) == "why"
    assert cut("y" * 101) == "y" * 100 + "..."
    assert shown(10**5000) == "a value of type int"


def test_the_key_that_a_message_cuts_is_whole_in_the_facts():
    with pytest.raises(KeyEncodingError) as caught:
        keys("bigint").decode(LONG)
    assert caught.value.key == LONG


def test_a_page_of_ours_is_named_as_help_opens_it_and_a_path_of_the_users_as_it_is():
    path = "cannot read /data/docs/redis.md, docs/mine.md nor 'docs/redis.md'. "
    said = MapStateError(f"{path}See docs/operating.md#passwords")
    assert str(said) == f"{path}See mapstate help operating#passwords"
    assert str(pickle.loads(pickle.dumps(said))) == str(said)


def test_every_page_that_a_message_names_follows_the_word_that_makes_it_a_command():
    for path in sorted((Path(errors.__file__).parent).rglob("*.py")):
        tree = ast.parse(path.read_text())
        docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
                named = re.findall(r"(\S+ )?docs/[\w/-]+\.md", node.value)
                assert {*named} <= {"See "} or path.name == "openapi.py", (path, node.value)
