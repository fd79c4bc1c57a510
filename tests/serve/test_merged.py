"""Reads of many requests as few bulk reads."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pandas as pd
import pytest

from mapstate.errors import KeyEncodingError, StoreUnavailableError, UsageError, WindowGoneError
from mapstate.reader.scans import Answer
from mapstate.serve import states as merged_module
from mapstate.serve.states import MergedReads

GONE = 404  # a time that is gone


class CountingReader:
    """A reader that is slow, and says how often it was asked for how many keys."""

    def __init__(self):
        self.asked: list[int] = []

    async def answer(self, keys, *, columns=None, at=None):
        self.asked.append(len(keys))
        await asyncio.sleep(0.01)
        if "bad" in keys:
            raise KeyEncodingError("bad")
        if "away" in keys:
            raise StoreUnavailableError("away")
        if isinstance(at, list):
            if GONE in at:
                raise WindowGoneError("gone")
            return Answer([(key, time, columns) for key, time in zip(keys, at, strict=True)], None, at)
        if at == GONE:
            raise WindowGoneError("gone")
        ends: list[Any] = [at or "now"] * len(keys)
        values: list[Any] = list(keys) if at is None and columns is None else [(key, at, columns) for key in keys]
        return Answer(values, None, ends)


def test_requests_that_wait_are_read_together():
    async def main():
        reader: Any = CountingReader()
        merged: Any = MergedReads(reader)
        found: Any = await asyncio.gather(*(merged.multi_get([at, -at]) for at in range(500)))
        assert [values for values, _ in found] == [[at, -at] for at in range(500)]
        assert len(reader.asked) <= 3

    asyncio.run(main())


def test_a_wrong_key_fails_alone_and_an_outage_fails_all():
    async def main():
        reader: Any = CountingReader()
        merged: Any = MergedReads(reader)
        found: Any = await asyncio.gather(
            *(merged.multi_get([key]) for key in ("a", "bad", "b")), return_exceptions=True
        )
        assert [found[0][0], found[2][0]] == [["a"], ["b"]]
        assert isinstance(found[1], KeyEncodingError)
        found = await asyncio.gather(*(merged.multi_get([key]) for key in ("a", "away")), return_exceptions=True)
        assert [type(one) for one in found] == [StoreUnavailableError] * 2
        assert (await merged.multi_get(["c"]))[0] == ["c"]

    asyncio.run(main())


def test_a_request_whose_client_has_gone_is_not_read_and_holds_up_nobody():
    async def main():
        reader: Any = CountingReader()
        merged: Any = MergedReads(reader)
        tasks = [asyncio.create_task(merged.multi_get([at])) for at in range(10)]
        await asyncio.sleep(0)
        tasks[3].cancel()
        found: Any = await asyncio.gather(*tasks, return_exceptions=True)
        assert [one[0] for at, one in enumerate(found) if at != 3] == [[at] for at in range(10) if at != 3]
        assert isinstance(found[3], asyncio.CancelledError)

    asyncio.run(main())


@pytest.mark.parametrize("when", ["before its own read", "in its own read"])
def test_a_client_that_goes_beside_a_wrong_key_leaves_its_place_to_others(when):
    """Two such reads would hold both places for as long as the store hangs."""

    async def main():
        asked: list[Any] = []
        go_on = asyncio.Event()

        async def answer(keys, **_):
            asked.append(keys)
            if keys == ["bad"]:
                await go_on.wait()
            if "bad" in keys:
                raise KeyEncodingError("bad")
            if keys == ["hangs"]:
                await asyncio.Event().wait()
            return Answer(list(keys), None, None)

        async def is_asked(*reads):
            async with asyncio.timeout(5):
                while asked != [*reads]:  # noqa: ASYNC110  a count of what it did
                    await asyncio.sleep(0)

        merged: Any = MergedReads(SimpleNamespace(answer=answer))
        for _ in range(2):
            asked.clear()
            go_on.clear()
            wrong, left = (asyncio.create_task(merged.multi_get([key])) for key in ("bad", "hangs"))
            await is_asked(["bad", "hangs"], ["bad"])
            if when.startswith("before"):
                left.cancel()
                await asyncio.wait([left])
            go_on.set()
            with pytest.raises(KeyEncodingError):
                await wrong
            if when.startswith("in"):
                await is_asked(["bad", "hangs"], ["bad"], ["hangs"])
                left.cancel()
        asked.clear()
        found, _ = await asyncio.wait_for(merged.multi_get(["a"]), 5)
        assert (found, asked) == (["a"], [["a"]])

    asyncio.run(main())


def test_requests_of_other_times_or_columns_get_their_own_answers():
    async def main():
        reader: Any = CountingReader()
        merged: Any = MergedReads(reader)
        asked = []
        for at in range(60):
            time: Any = [None, "watermark", at, [at, -at]][at % 4]
            asked.append(([f"a{at}", f"b{at}"], time, [None, ["n"], ["n", "m"]][at % 3]))
        found: Any = await asyncio.gather(
            *(merged.answer(keys, at=time, columns=columns) for keys, time, columns in asked)
        )
        for (keys, time, columns), answer in zip(asked, found, strict=True):
            times = time if isinstance(time, list) else [time] * 2
            chosen = None if columns is None else tuple(columns)
            if time is None and chosen is None:
                assert (answer.values, answer.ends) == (keys, ["now"] * 2)
            else:
                assert answer.values == [(key, one, chosen) for key, one in zip(keys, times, strict=True)]
                assert answer.ends == [one or "now" for one in times]
        assert len(reader.asked) <= 18  # of nine kinds

    asyncio.run(main())


def test_a_time_that_is_gone_and_a_list_that_does_not_fit_fail_alone():
    async def main():
        reader: Any = CountingReader()
        merged: Any = MergedReads(reader)
        requests = [(["a"], 1), (["b"], GONE), (["c", "d"], [3, 4]), (["e"], [5, 6]), ([], [])]
        found: Any = await asyncio.gather(
            *(merged.answer(keys, at=at) for keys, at in requests), return_exceptions=True
        )
        assert found[0].values == [("a", 1, None)]
        assert [type(found[1]), type(found[3])] == [WindowGoneError, UsageError]
        assert found[2].values == [("c", 3, None), ("d", 4, None)]
        assert found[4].values == []

    asyncio.run(main())


def test_more_than_fits_is_refused(monkeypatch):
    monkeypatch.setattr(merged_module, "_MOST_WAITING", 10)

    async def main():
        reader: Any = CountingReader()
        merged: Any = MergedReads(reader)
        found: Any = await asyncio.gather(*(merged.multi_get([at] * 4) for at in range(20)), return_exceptions=True)
        refused: Any = [one for one in found if isinstance(one, Exception)]
        assert {one.status for one in refused} == {503}
        assert len(refused) < 20
        assert (await merged.multi_get([1]))[0] == [1]

    asyncio.run(main())


@pytest.mark.parametrize("at", [[55, 59], (55, 59), np.array([55, 59]), pd.Series([55, 59], index=[8, 9])])
def test_times_of_any_kind_of_list_are_read_beside_others(at):
    async def main():
        reader: Any = CountingReader()
        merged: Any = MergedReads(reader)
        async with asyncio.timeout(5):
            found: Any = await asyncio.gather(merged.answer(["a"]), merged.answer(["b", "c"], at=at))
        assert found[0].values == ["a"]
        assert [time for _, time, _ in found[1].values] == [55, 59]

    asyncio.run(main())


@pytest.mark.parametrize(
    ("keys", "asked"),
    [
        ("ab", {}),
        (b"ab", {}),
        (["a"], {"columns": "n"}),
        (["a"], {"columns": [np.array(["n", "m"])]}),
        (["a", "b"], {"at": {1, 2}}),
        (["a", "b"], {"at": np.array([[1], [2]])}),
        (["a", "b"], {"at": np.array([1, 2, 3])}),
    ],
)
def test_what_is_refused_does_not_wait(keys, asked):
    async def main():
        reader: Any = CountingReader()
        merged: Any = MergedReads(reader)
        with pytest.raises(UsageError):
            await merged.answer(keys, **asked)
        assert reader.asked == []
        async with asyncio.timeout(5):
            assert (await merged.multi_get(["a"]))[0] == ["a"]

    asyncio.run(main())


def test_an_error_that_nobody_foresaw_ends_the_requests_of_its_read():
    async def main():
        answers: list[Any] = [None, Answer(cast("Any", ["a"]), cast("Any", None), None)]

        async def answer(*_: Any, **__: Any) -> Any:
            return answers.pop(0)

        merged: Any = MergedReads(cast("Any", SimpleNamespace(answer=answer)))
        async with asyncio.timeout(5):
            with pytest.raises(AttributeError):
                await merged.multi_get(["a"])
            assert (await merged.multi_get(["a"]))[0] == ["a"]

    asyncio.run(main())
