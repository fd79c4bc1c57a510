"""Each option with a number or a duration has two ends. Past either one it is refused where it is declared."""

from __future__ import annotations

import datetime as dt
import math
from collections.abc import Callable
from typing import Any

import pytest
from pyspark.sql.types import LongType, StringType, StructField, StructType, TimestampType

from mapstate import SessionWindow, SlidingCountWindow, SlidingDurationWindow, TumblingDurationWindow, opaque
from mapstate.backends import resolve
from mapstate.drpc import DRPCClient
from mapstate.errors import ConfigurationError, UsageError
from mapstate.protocol.control import rebalance
from mapstate.protocol.stored_ledger import check_page_size
from mapstate.serve import make_app
from mapstate.serve.drpc import Calls
from mapstate.spark import DRPCServer
from mapstate.spark.steps.batch_aggregate import broadcast, spread
from mapstate.spark.streams.windows import windows_of
from mapstate.trident import FirstN

HUGE = 10**5000  # Python writes no int of more than 4,300 digits
Declare = Callable[[Any], Any]


def _spec(**options: Any) -> Any:
    return opaque("redis://h", "s", **options)


# The declaration of a value, the ends of its range, and values past either end.
NUMBERS: dict[str, tuple[Declare, Any, Any, list[Any]]] = {
    "ttl": (lambda v: _spec(ttl=v), 0.001, 10**10, [0.0001, -1, 1e300, math.inf, HUGE, dt.timedelta.max]),
    "patience": (lambda v: _spec(patience=v), 0, 10**10, [-0.0001, 1e300, math.inf, HUGE, dt.timedelta.max]),
    "chunk_size": (lambda v: _spec(chunk_size=v), 1, 2**31 - 1, [0, 10**30, HUGE]),
    "chunk_bytes": (lambda v: _spec(chunk_bytes=v), 1, 2**31 - 1, [0, 10**30, HUGE]),
    "max_attempts": (lambda v: _spec(max_attempts=v), 1, 2**31 - 1, [0, 10**30, HUGE]),
    "changes": (lambda v: _spec(changes=v), 0, 2**31 - 1, [-1, 10**30, HUGE]),
    "partitions of shuffle": (lambda v: spread(StructType([]), v), 1, 2**31 - 1, [0, 10**30, HUGE]),
    "partitions of broadcast": (broadcast, 1, 2**31 - 1, [0, 10**30, HUGE]),
    "rows of FirstN": (FirstN, 1, 2**31 - 1, [0, 10**30, HUGE]),
    "rows of a window": (lambda v: SlidingCountWindow.of(v, v), 1, 2**61, [0, 2**61 + 1, HUGE]),
    "timeout of a DRPC client": (lambda v: DRPCClient("h", timeout=v), 0.001, 86_400, [0, 86_401, 1e300, HUGE]),
    "timeout of a DRPC server": (lambda v: DRPCServer(None, timeout=v), 0.001, 86_400, [0, 86_401, 1e300, HUGE]),
    "timeout of a service": (lambda v: make_app("memory://", timeout=v), 0.001, 86_400, [0, 86_401, 1e300, HUGE]),
    "most_waiting": (lambda v: Calls({}, most_waiting=v), 1, 2**31 - 1, [0, HUGE]),
}


def test_a_size_of_the_cache_that_is_gone_is_a_warning():
    with pytest.warns(DeprecationWarning, match="leave it out") as warned:
        assert opaque("memory://", cache_size=9).type == "opaque"
    assert warned[0].filename == __file__


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_past_either_end_is_refused_with_both_ends(name):
    declare, least, most, others = NUMBERS[name]
    declare(least)
    declare(most)
    for wrong in [*others, math.nan, True, "5"]:
        with pytest.raises(ConfigurationError, match=rf"from {least:g} to {most:,}, not|from 0 to {most:,}, not"):
            declare(wrong)


def _url(query: str) -> Declare:
    return lambda value: resolve(query.format(value))


PARAMETERS = {
    "socket_timeout": ("redis://h/0?socket_timeout={}", 0.001, 86_400, ["0", "1e-9", "86401", "1e300", "nan"]),
    "socket_connect_timeout": ("redis://h/0?socket_connect_timeout={}", 0.001, 86_400, ["0", "86401", "inf"]),
    "retries": ("redis://h/0?retries={}", 0, 2**31 - 1, ["-1", "9" * 30]),
    "max_value_bytes": ("redis://h/0?max_value_bytes={}", 1, 2**31 - 1, ["0", "9" * 30]),
    "db": ("redis://h/{}", 0, 10**9, ["1000000001"]),
    "hash shards": ("redis://h/0?layout=packed&buckets={}", 1, 10**9, ["0", "1000000001"]),
    "slot groups": ("redis+cluster://h?buckets={}", 1, 1024, ["0", "1025"]),
    "timeout of SQLite": ("sqlite:///x.db?timeout={}", 0, 86_400, ["-1", "86401", "nan"]),
    "max_value_bytes of SQLite": ("sqlite:///x.db?max_value_bytes={}", 1, 999_000_000, ["0", "999000001"]),
    "timeout of Aerospike": ("aerospike://h/n?timeout={}", 0.001, 86_400, ["0", "86401", "nan"]),
    "connect_timeout of Aerospike": ("aerospike://h/n?connect_timeout={}", 0.001, 86_400, ["0", "86401", "nan"]),
    "retries of Aerospike": ("aerospike://h/n?retries={}", 0, 2**31 - 1, ["-1", "9" * 30]),
    "batch_size": ("aerospike://h/n?batch_size={}", 1, 5000, ["0", "5001"]),
    "claim_ttl": ("aerospike://h/n?claim_ttl={}", 0, 315_360_000, ["-1", "315360001"]),
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_parameter_of_a_url_past_either_end_is_refused_with_both_ends(name):
    query, least, most, others = PARAMETERS[name]
    resolve(query.format(least))
    resolve(query.format(most))
    for wrong in others:
        with pytest.raises(ConfigurationError, match=rf"from {least:g} to {most:.0f}"):
            resolve(query.format(wrong))


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("memory://", "memory:// keeps no time"),
        ("sqlite:///x.db", "no expiry"),
        ("redis://h/0?layout=hash", "layout=hash has no ttl"),
        ("aerospike://h/n", "from 0 to 315360000"),
    ],
)
def test_a_ttl_that_the_store_cannot_have_is_refused_at_the_declaration(url, message):
    with pytest.raises(ConfigurationError, match=message):
        opaque(url, "s", ttl=10**9)


def _window(time: str, config: Any, **options: Any) -> Any:
    kind = TimestampType() if time == "timestamp" else LongType()
    schema = StructType([StructField("at", kind), StructField("user", StringType())])
    given = {"lag": 0, "startTime": 0, "retention": None, "idle": None, "inputs": None, "ahead": None} | options
    return windows_of(schema, config, timestampField="at", **given)


HOUR, SIXTY = TumblingDurationWindow.of("1 hour"), TumblingDurationWindow.of(60)
DURATIONS: dict[str, tuple[int, Declare]] = {  # with the least value that is refused
    "a window's length": (0, lambda v: _window("timestamp", TumblingDurationWindow.of(v))),
    "a window's slide": (0, lambda v: _window("timestamp", SlidingDurationWindow.of("1 hour", v))),
    "the gap of sessions": (0, lambda v: _window("timestamp", SessionWindow.of(v))),
    "lag": (-1, lambda v: _window("timestamp", HOUR, lag=v)),
    "startTime": (-1, lambda v: _window("timestamp", HOUR, startTime=v)),
    "retention": (-1, lambda v: _window("timestamp", HOUR, retention=v)),
    "idle": (-1, lambda v: _window("timestamp", HOUR, idle=v)),
    "ahead": (-1, lambda v: _window("timestamp", HOUR, ahead=v)),
}


@pytest.mark.parametrize("name", DURATIONS)
def test_a_duration_past_either_end_is_refused_with_the_end_that_it_passed(name):
    least, declare = DURATIONS[name]
    declare("3652500 days" if name != "a window's slide" else "1 hour")
    for long in ("3652500 days 1 microsecond", "999999999 weeks", "9" * 400 + " weeks", dt.timedelta.max):
        with pytest.raises(ConfigurationError, match=rf"^{name} is at most 3,652,500 days, not "):
            declare(long)
    end = "above 0" if least == 0 else "at least 0"
    for short in (f"{least} seconds", "-1 minute", dt.timedelta(microseconds=least), dt.timedelta.min):
        with pytest.raises(ConfigurationError, match=rf"^{name} is {end}, not "):
            declare(short)
    for none in ("9" * 5000 + " weeks", "1 month", "1.5 hours", "", 5, HUGE, math.nan, True, None):
        if none is None and name in ("retention", "idle", "ahead"):
            continue
        with pytest.raises(ConfigurationError, match=rf"^{name} is a duration such as"):
            declare(none)


UNITS: dict[str, tuple[int, Declare]] = {
    "a window's length": (0, lambda v: _window("bigint", TumblingDurationWindow.of(v))),
    "the gap of sessions": (0, lambda v: _window("bigint", SessionWindow.of(v))),
    "lag": (-1, lambda v: _window("bigint", SIXTY, lag=v)),
    "startTime": (-1, lambda v: _window("bigint", SIXTY, startTime=v)),
    "retention": (-1, lambda v: _window("bigint", SIXTY, retention=v)),
}


@pytest.mark.parametrize("name", UNITS)
def test_a_number_of_units_past_either_end_is_refused_with_the_end_that_it_passed(name):
    least, declare = UNITS[name]
    declare(2**61)
    for long in (2**61 + 1, 10**30, HUGE):
        with pytest.raises(ConfigurationError, match=rf"^{name} is at most 2,305,843,009,213,693,952, not "):
            declare(long)
    for short in (least, -HUGE):
        with pytest.raises(ConfigurationError, match=rf"^{name} is {'above' if least == 0 else 'at least'} 0, not "):
            declare(short)
    for none in ("1 minute", dt.timedelta(1), math.nan, True):
        with pytest.raises(ConfigurationError, match=rf"^{name} is a number of the time column's own units"):
            declare(none)


def test_what_an_operator_or_reader_asks_for_is_refused_past_either_end():
    for wrong in (0, -1, 2**31, HUGE):
        with pytest.raises(UsageError, match="from 1 to 2147483647"):
            check_page_size(wrong)
    for wrong in (0, -1, 100_001, 2**31, 3_000_000_000, HUGE):  # what is taken is obeyed at each start
        with pytest.raises(UsageError, match="from 1 to 100,000,"):
            rebalance(None, "site", wrong)
