"""Reads of many requests as few bulk reads."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from mapstate.errors import KeyEncodingError, StoreUnavailableError
from mapstate.serve import merged as merged_module
from mapstate.serve.merged import MergedReads


class CountingReader:
    """A reader that is slow, and says how often it was asked for how many keys."""

    def __init__(self):
        self.asked: list[int] = []

    async def multi_get_as_of(self, keys):
        self.asked.append(len(keys))
        await asyncio.sleep(0.01)
        if "bad" in keys:
            raise KeyEncodingError("bad")
        if "away" in keys:
            raise StoreUnavailableError("away")
        return list(keys), None


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

        async def multi_get_as_of(keys):
            asked.append(keys)
            if keys == ["bad"]:
                await go_on.wait()
            if "bad" in keys:
                raise KeyEncodingError("bad")
            if keys == ["hangs"]:
                await asyncio.Event().wait()
            return list(keys), None

        async def is_asked(*reads):
            async with asyncio.timeout(5):
                while asked != [*reads]:  # noqa: ASYNC110  a count of what it did
                    await asyncio.sleep(0)

        merged: Any = MergedReads(SimpleNamespace(multi_get_as_of=multi_get_as_of))
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
