"""Windows whose keys share records: read by every reader, forgotten, taken back; what cannot be is refused.

That they count right is held against brute force in test_windows.py, test_seed_windows.py and test_correct_windows.py.
"""

from __future__ import annotations

import datetime as dt
import random
from collections import Counter
from typing import Any

import pytest
from cases import full
from every_store import AEROSPIKE, FULL, REDIS, url_of
from spark_fixtures import contents

from mapstate import Count, SessionWindow, Sum, TumblingCountWindow, TumblingDurationWindow, errors, newStream, opaque
from mapstate.backends import opened, resolve
from mapstate.cli.export import FORMATS
from mapstate.keys import is_index_key
from mapstate.operations.doctor import examine
from mapstate.operations.export import export
from mapstate.operations.forget import forget
from mapstate.operations.vacuum import vacuum
from mapstate.protocol.stored_ledger import record_pages
from mapstate.reader import open_reader
from mapstate.serializers import record_codec
from mapstate.testing import Fail, FaultyBackend

pytestmark = pytest.mark.spark

UTC = dt.UTC
START = dt.datetime(2026, 11, 1, 4, tzinfo=UTC)  # a clock goes back an hour later in New York
USERS: list[Any] = [None, "", "a|b", "a\\b", "\\N", "line\nfeed", "é", "0", "00", *(f"user-{i}" for i in range(30))]


@pytest.fixture(params=[full("memory"), full("sqlite"), REDIS, FULL[-1], AEROSPIKE])
def url(request: Any, tmp_path: Any) -> str:
    return url_of(request, tmp_path)


def hours(
    spark: Any, url: Any, *, blocks: int | None = 4, name: str = "hours", by: Any = ("user", "n"), **more: Any
) -> Any:
    rows = newStream("rows", spark.createDataFrame([], "at timestamp, user string, n int"))
    windows = rows.window(TumblingDurationWindow.of("1 hour"), timestampField="at", lag="1 hour", retention="1 day")
    spec = opaque(url, name, blocks=blocks, repeat="allowed", chunk_size=2, max_attempts=1, **more)
    return windows.groupBy(*by).persistentAggregate(spec, rows=Count(), total=Sum("n"))


def drawn(spark: Any, seed: int, count: int = 200) -> Any:
    draw = random.Random(seed)
    rows = [
        (START + dt.timedelta(minutes=draw.randrange(300)), draw.choice(USERS), draw.randrange(3)) for _ in range(count)
    ]
    return spark.createDataFrame(rows, "at timestamp, user string, n int")


def data_records(url: str, name: str = "hours") -> dict[Any, bytes]:
    with opened(resolve(url), name) as store:
        keys = [key for page in record_pages(store, 1000) for key in page if not is_index_key(key)]
        return {key: record for key, record in zip(keys, store.multi_get(keys), strict=True) if record is not None}


@pytest.mark.parametrize("plan", [full("always"), "never"])
def test_every_reader_has_what_it_has_of_a_record_per_key(spark, url, tmp_path, plan):
    state = hours(spark, url, partial_aggregation=plan)
    plain = hours(spark, url, blocks=None, name="plain")
    for batch_id in range(3):
        rows = drawn(spark, batch_id).repartition(3)
        state(rows, batch_id)
        plain(rows, batch_id)
        assert contents(url, "hours") == contents(url, "plain")
    assert len(data_records(url)) < len(data_records(url, "plain")) / 2
    with open_reader(url, "hours") as reader, open_reader(url, "plain") as other:
        keys = [*contents(url, "plain")]
        assert reader.multi_get([*keys, (START, "nobody", 0)]) == [*other.multi_get(keys), None]
        assert reader.get(keys[0]) == other.get(keys[0])
        assert {user for _, user, _ in keys} == {*USERS}
        for user in USERS:
            assert reader.windows((user, 1)) == other.windows((user, 1))
        for hour in range(1, 6):
            end = START + dt.timedelta(hours=hour)
            assert dict(reader.window(end)) == dict(other.window(end))
        parts = list(reader.parts(4))
        assert {key for part in parts for _, found, _ in reader.part(part, 50) for key in found} == {*keys}
        assert (reader.key_count(), reader.watermark().time) == (None, other.watermark().time)
        assert max(len(page) for page in reader.pages(10)) < len(keys)
    if not url.startswith("memory"):
        frames = [spark.read.format("mapstate").options(url=url, state=name).load() for name in ("hours", "plain")]
        assert Counter(map(tuple, frames[0].collect())) == Counter(map(tuple, frames[1].collect()))
        assert (
            frames[0].where("user = 'a|b' and n = 1").count() == frames[1].where("user = 'a|b' and n = 1").count() > 0
        )
    exported = [export(url, name, f"{tmp_path}/{name}.csv", FORMATS["csv"]).rows for name in ("hours", "plain")]
    assert exported == [len(keys)] * 2
    assert [found.severity for found in examine(url, "hours") if found.subject in ("records", "keys")] == ["ok", "ok"]


def test_a_forgotten_key_leaves_its_blocks_and_one_without_keys_is_lost_in_no_window(spark, url, tmp_path):
    """A key alone in its block: the pane names the block, and what a failed attempt left in it counts nowhere."""
    state = hours(spark, url, blocks=1_000, by=("user",))
    schema = "at timestamp, user string, n int"
    rows = [(START + dt.timedelta(hours=hour), user, 1) for hour in range(2) for user in ("alone", "0042", "other")]
    state(spark.createDataFrame(rows, schema), 0)
    assert forget(url, "hours", {"user": "alone"}, id="ticket").keys == 2
    assert forget(url, "hours", {"user": "0042"}, id="number").keys == 2
    expected = {(at, user): {"rows": 1, "total": 1} for at, user, _ in rows if user == "other"}
    assert contents(url, "hours") == expected
    assert not any(b"alone" in record for record in data_records(url).values())
    assert [found.severity for found in examine(url, "hours") if found.subject == "records"] == ["ok"]
    faulty = FaultyBackend(resolve(url), str(tmp_path), (Fail(method="swap", call=2, error=errors.CorruptStoreError),))
    again = hours(spark, faulty, blocks=1_000, by=("user",))
    with pytest.raises(errors.CorruptStoreError):
        again(spark.createDataFrame([(START, "alone", 5)], schema), 1)
    assert contents(url, "hours") == expected
    fired: list[Any] = []
    state = hours(spark, url, blocks=1_000, by=("user",))
    state.firedWindowsStream().foreachBatch(
        lambda df, _: fired.extend((row.window_start.replace(tzinfo=UTC), row.user) for row in df.collect())
    )
    state(spark.createDataFrame([(START + dt.timedelta(hours=9), "late", 1)], schema), 1)
    state(spark.createDataFrame([(START + dt.timedelta(hours=9), "late", 1)], schema), 2)
    assert sorted(fired) == sorted(expected)
    with open_reader(url, "hours") as reader:
        assert reader.windows("alone") == []
        assert [key for key, _ in reader.window(START + dt.timedelta(hours=1))] == [("other",)]
    state(spark.createDataFrame([(START + dt.timedelta(days=3), "late", 1)], schema), 3)
    state(spark.createDataFrame([(START + dt.timedelta(days=3), "late", 1)], schema), 4)
    state(spark.createDataFrame([], schema), 5)
    assert {key for _, key in contents(url, "hours")} == {"late"}
    held = data_records(url)
    with open_reader(url, "hours") as reader:
        records = record_codec(reader.ledger()).loads([*held], [*held.values()])
    assert [value.count for _, value, _ in records if value is not None and value.count] == [1]
    if not url.startswith("aerospike:"):  # which keeps a record without a value
        assert len(held) == 1  # those of gone windows were removed, also without a key


def test_new_values_are_those_of_a_record_per_key_also_of_a_batch_that_comes_again(spark, url):
    found: dict[str, list[Any]] = {"hours": [], "plain": []}

    def made(name: str) -> Any:
        state = hours(spark, url, name=name, blocks=3 if name == "hours" else None)
        state.newValuesStream().foreachBatch(lambda df, _: found[name].append(Counter(map(tuple, df.collect()))))
        return state

    for name in found:
        for batch_id, seed in enumerate((1, 2, 3)):
            made(name)(drawn(spark, seed, 60).repartition(2), batch_id)
        made(name)(drawn(spark, 3, 60), 2)
    assert found["hours"] == found["plain"]
    assert found["hours"][-2] == found["hours"][-1]


def test_a_vacuum_takes_back_what_a_failed_attempt_left(spark, url, tmp_path):
    state = hours(spark, url)
    state(drawn(spark, 1), 0)
    before = contents(url, "hours")
    faulty = FaultyBackend(resolve(url), str(tmp_path), (Fail(method="swap", call=2, error=errors.CorruptStoreError),))
    with pytest.raises(errors.CorruptStoreError):
        hours(spark, faulty)(drawn(spark, 2), 1)
    vacuum(url, "hours", take_over=True)
    assert contents(url, "hours") == before
    hours(spark, url)(drawn(spark, 3), 1)
    plain = hours(spark, url, blocks=None, name="plain")
    for batch_id, seed in enumerate((1, 3)):
        plain(drawn(spark, seed), batch_id)
    assert contents(url, "hours") == contents(url, "plain")


@pytest.mark.parametrize(
    ("config", "by", "why"),
    [
        (SessionWindow.of("1 hour"), ("user",), "sessions has no blocks"),
        (TumblingCountWindow.of(5), ("user",), "is computed in Python|has no blocks"),
        (TumblingDurationWindow.of("1 hour"), (), "it has one key"),
    ],
)
def test_windows_that_have_no_blocks_are_refused_where_they_are_declared(spark, tmp_path, config, by, why):
    rows = newStream("rows", spark.createDataFrame([], "at timestamp, user string, n int"))
    windows = rows.window(config, **({} if isinstance(config, TumblingCountWindow) else {"timestampField": "at"}))
    spec = opaque(f"sqlite:///{tmp_path}/state.db", "s", blocks=3)
    with pytest.raises(errors.ConfigurationError, match=why):
        (windows.groupBy(*by) if by else windows).persistentAggregate(spec, n=Count())
