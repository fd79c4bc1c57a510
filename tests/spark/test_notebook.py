"""What a notebook shows of states, readers and reports: without a call of the store, a secret, or an error."""

from __future__ import annotations

import asyncio
from typing import Any
from xml.etree import ElementTree as ET

import pytest
from one_ledger import OneLedger

from mapstate import BatchReport, Count, Sum, newStream, opaque, open_async_reader, open_reader
from mapstate.backends.memory import MemoryBackend
from mapstate.errors import StoreUnavailableError
from mapstate.protocol.ledger_record import Commit, OpenRequest
from mapstate.schema import Field, KeyField
from mapstate.spark.driver.state import encode_report

ODD = "<script>alert('&')</script>"
AT = "2026-11-21T10:00:00+00:00"


class Store:
    """One that fails at each call, once it is broken."""

    def __init__(self, store: Any) -> None:
        self.store, self.is_broken = store, False

    def __getattr__(self, name: str) -> Any:
        if self.is_broken:
            raise StoreUnavailableError("a store was called")
        return getattr(self.store, name)


class Backend:
    shared_between_processes = False

    def __init__(self, name: str) -> None:
        self.store: Any = Store(MemoryBackend(name).open("visits"))

    def open(self, state: str, *, ttl: float | None = None) -> Any:
        return self.store


class NoRepr(MemoryBackend):
    def __repr__(self) -> str:
        raise RuntimeError("no repr")


def cells(html: str) -> tuple[str, list[list[str]]]:
    """The title and the rows of a table, which is well-formed and has no elements of its own."""
    table = ET.fromstring(html)
    assert {part.tag for part in table.iter()} <= {"table", "caption", "tr", "td"}
    return table[0].text, [[cell.text or "" for cell in row] for row in table[1:]]


@pytest.fixture
def backend(tmp_path):
    backend = Backend(str(tmp_path))
    request = OpenRequest(
        state="visits",
        type="opaque",
        serializer="json",
        keys=(KeyField(ODD, "string"),),
        fields=(Field("visits", f"Own({ODD})", "bigint"),),
        owner="query",
        clock_txid=1,
    )
    ledger = OneLedger.open(backend.store.store, request)
    attempt = ledger.begin(0)
    ledger.commit(Commit(batch_id=0, txid=attempt.txid, owner="query", at=AT))
    return backend


SEEN = [
    ["type", "opaque"],
    ["last batch that was read", "0"],
    ["at", AT],
    ["keys", ""],
    [ODD, "string"],
    ["visits", f"Own({ODD})"],
]


def test_a_reader_shows_what_it_read_last_and_asks_no_store(backend):
    with open_reader(backend, "visits") as reader:
        backend.store.is_broken = True
        assert cells(reader._repr_html_()) == ("reader of state visits", SEEN)
        backend.store.is_broken = False
    assert cells(reader._repr_html_()) == ("reader of state visits", SEEN)


def test_an_async_reader_shows_the_same_while_it_is_open(backend):
    async def shown() -> list[Any]:
        reader = open_async_reader(backend, "visits")
        found = [cells(reader._repr_html_())]
        async with reader:
            backend.store.is_broken = True
            found.append(cells(reader._repr_html_()))
            backend.store.is_broken = False
        return [*found, cells(reader._repr_html_())]

    title = "reader of state visits"
    assert asyncio.run(shown()) == [(title, []), (title, SEEN), (title, [])]


@pytest.mark.spark
def test_a_state_shows_what_it_keeps_and_where_without_a_password(spark):
    rows = spark.createDataFrame([("a", 1)], "user string, `<b>` long")
    grouped = newStream("visits", rows).groupBy("user")
    state = grouped.persistentAggregate(
        opaque("redis://:hunter2@localhost/0", name="totals"), visits=Count(), total=Sum("<b>")
    )
    title, shown = cells(state._repr_html_())
    assert title == "state totals"
    assert shown[:2] == [["stream", "visits"], ["type", "opaque"]]
    assert shown[3:] == [["user", "string"], ["visits", "Count"], ["total", "Sum(<b>)"]]
    assert shown[2][0] == "store"
    assert "localhost" in shown[2][1]
    assert "hunter2" not in state._repr_html_()
    state = grouped.persistentAggregate(opaque(NoRepr()), visits=Count())
    assert ["store", "a value of type NoRepr"] in cells(state._repr_html_())[1]


def test_reports_are_a_table_with_the_columns_that_are_known(backend):
    with open_reader(backend, "visits") as reader:
        assert cells(reader.reports()._repr_html_()) == ("batch reports", [[]])
        counted = {"keys_read": 2, "keys_cached": 0, "keys_written": 2, "keys_skipped": 0}
        for batch_id in range(2):
            report = BatchReport(
                batch_id=batch_id, txid=batch_id + 1, attempt=1, rows=4, milliseconds=7, at=AT, **counted
            )
            backend.store.keep_report(encode_report(report), 10)
        title, (names, *rows) = cells(reader.reports()._repr_html_())
    assert title == "batch reports"
    assert names[:4] == ["batch_id", "txid", "attempt", "rows"]
    assert "watermark" not in names
    assert [row[:4] for row in rows] == [["1", "2", "1", "4"], ["0", "1", "1", "4"]]
