"""What the service answers: JSON, the batch as of which it is, its tag, and problems (RFC 9457)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from hashlib import blake2b
from http import HTTPStatus
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from mapstate.aggregators.aggregator import Aggregator
from mapstate.batch_report import BatchReport
from mapstate.errors import (
    ConfigurationError,
    CorruptRecordError,
    DataError,
    KeyEncodingError,
    LedgerError,
    MapStateError,
    SeedingError,
    StaleBatchError,
    StateNotFoundError,
    StoreError,
    StoreUnavailableError,
    UnknownColumnError,
    UsageError,
    WindowGoneError,
)
from mapstate.protocol.ledger_record import Commit, LedgerRecord
from mapstate.protocol.rolling import RollingRecord
from mapstate.reader.committed import mark_of
from mapstate.reader.forms import JsonKeys, JsonRows
from mapstate.reader.rolling import earliest_end, shown_fields
from mapstate.reader.times import Time, shown_time
from mapstate.values import plain

_encoder = msgspec.json.Encoder()
# The first class that fits says the status, and whether the request may be sent again as it is.
_STATUS: tuple[tuple[type[MapStateError], int], ...] = (
    (StateNotFoundError, 404),
    (WindowGoneError, 410),
    (KeyEncodingError, 400),
    (UsageError, 400),
    (UnknownColumnError, 400),
    (ConfigurationError, 409),
    (StaleBatchError, 503),
    (SeedingError, 503),
    (StoreUnavailableError, 503),
    (StoreError, 502),
    (LedgerError, 409),
    (CorruptRecordError, 409),
    (DataError, 500),
)


class Problem(Exception):  # noqa: N818  the word of RFC 9457
    """An answer that is an error. ``retry_after`` in seconds, where the same request may succeed later."""

    def __init__(self, status: int, detail: str, *, retry_after: int | None = None, **more: Any) -> None:
        super().__init__(detail)
        self.status = status
        self.retry_after = retry_after
        self.document = {"type": "about:blank", "title": HTTPStatus(status).phrase, "status": status, "detail": detail}
        self.document |= more

    def response(self) -> Response:
        """The problem as ``application/problem+json``."""
        headers = {"Cache-Control": "no-store"}
        if self.retry_after is not None:
            headers["Retry-After"] = str(self.retry_after)
        if self.status == HTTPStatus.UNAUTHORIZED:
            headers["WWW-Authenticate"] = "Bearer"
        return Response(_encoder.encode(self.document), self.status, headers, "application/problem+json")


class BadRequest(Problem):
    """A request that is wrong, perhaps only for what the state is now."""

    def __init__(self, detail: str) -> None:
        super().__init__(400, detail)


class Busy(Problem):
    """More than the service takes at one time."""

    def __init__(self, detail: str) -> None:
        super().__init__(503, f"{detail} Retry in a second.", retry_after=1)


def problem_of(error: MapStateError) -> Problem:
    """The problem for an error of mapstate, whose message holds no secret."""
    status = next((status for kind, status in _STATUS if isinstance(error, kind)), 500)
    retry_after = 1 if status == HTTPStatus.SERVICE_UNAVAILABLE else None
    return Problem(status, error.message, retry_after=retry_after, error=type(error).__name__)


def as_of(ledger: LedgerRecord, of: Commit | BatchReport | None = None) -> dict[str, Any]:
    """The batch as of which an answer is, the last one if not ``of`` another; all null before the first."""
    last = of or ledger.last_commit
    if last is None:
        return {"batch_id": None, "txid": None, "committed_at": None, "commit": None}
    commit = f"{mark_of(ledger)}-{last.txid}"
    return {"batch_id": last.batch_id, "txid": last.txid, "committed_at": last.at or None, "commit": commit}


def as_of_end(ledger: LedgerRecord, end: Time | Sequence[Time | None] | None) -> dict[str, Any]:
    """`as_of`, of a state with rolling windows also with the watermark and where the windows end."""
    if ledger.rolling is None:
        return as_of(ledger)
    kind = ledger.rolling.definition.type
    return {**as_of(ledger), "end": plain(end), "watermark": plain(shown_time(ledger.final_mark(), kind))}


def _tag_of(ledger: LedgerRecord) -> str | None:
    """The ETag of all that is read under this ledger, None where values may change without a commit."""
    if ledger.type != "opaque" or ledger.has_had_ttl:
        return None
    contents = (*ledger.contents(), ledger.field_counts, as_of(ledger))
    return f'"{blake2b(repr(contents).encode(), digest_size=9).hexdigest()}"'


def _is_known(request: Request, tag: str | None) -> bool:
    """Whether the client has the answer with this tag."""
    given = request.headers.get("if-none-match")
    if given is None or tag is None or request.method == "POST":  # whose answers nobody keeps
        return False
    return given.strip() == "*" or tag in [one.strip().removeprefix("W/") for one in given.split(",")]


def named(name: str, ledger: LedgerRecord) -> dict[str, Any]:
    """The state that was asked for, and its version where an alias leads to another one."""
    return {"state": name} if name == ledger.state else {"state": name, "version": ledger.state}


class View:
    """What all answers under one ledger share."""

    def __init__(self, ledger: LedgerRecord, forms: Forms, name: str) -> None:
        self.ledger = ledger
        self.forms = forms
        self.tag = _tag_of(ledger)
        self.head: dict[str, Any] = {**named(name, ledger), "as_of": as_of(ledger)}

    def ending(self, ends: Time | Sequence[Time | None] | None) -> View:
        """The same of answers whose rolling windows end there; a list has an end for each key."""
        if self.ledger.rolling is None:
            return self
        ending = copy(self)
        ending.head = {**self.head, "as_of": as_of_end(self.ledger, ends)}
        if self.tag is not None:
            named = repr((self.tag, ending.head, self.ledger.rolling.definition))
            ending.tag = f'"{blake2b(named.encode(), digest_size=9).hexdigest()}"'
        return ending


def json_answer(request: Request, view: View, document: Callable[[], Mapping[str, Any]]) -> Response:
    """The document, with ``as_of`` in front; or 304 where the client has it."""
    tag = view.tag
    headers = {"Cache-Control": "no-cache" if tag else "no-store"}
    if tag:
        headers["ETag"] = tag
    if _is_known(request, tag):
        return Response(status_code=304, headers=headers)
    body = _encoder.encode({**view.head, **document()})
    return Response(body, headers=headers, media_type="application/json")


class Forms(JsonRows):
    """Keys and values of one schema as JSON; keys of a window apart, which lack its time."""

    def __init__(self, ledger: LedgerRecord, aggregators: Mapping[str, Aggregator]) -> None:
        super().__init__(ledger.keys, shown_fields(ledger, aggregators), aggregators)
        self.of_window = JsonRows(ledger.keys[1:], ledger.fields, aggregators)
        self.asked_in = JsonKeys(ledger.keys).asked


def state_document(name: str, ledger: LedgerRecord, reports: Sequence[BatchReport] | None = None) -> dict[str, Any]:
    """What a ledger says of its state, and the reports of its last batches, newest first."""
    last = ledger.last_commit
    document: dict[str, Any] = {
        "name": name,
        "type": ledger.type,
        "reads": "committed" if ledger.type == "opaque" else "latest",
        "keys": [{"name": field.name, "type": field.type} for field in ledger.keys],
        "fields": [{"name": field.name, "aggregator": field.aggregator} for field in ledger.fields],
        "owner": ledger.owner,
        "rows": None if last is None else last.rows,
        "keys_held": ledger.keys_held(),
        "attempt": None if ledger.in_flight is None else ledger.in_flight.batch_id,
        "has_windows": ledger.windows is not None,
    }
    if name != ledger.state:
        document["version"] = ledger.state
    if ledger.rolling is not None:
        document["rolling_windows"] = _rolling_document(ledger.rolling)
    if reports is not None:
        document["reports"] = [msgspec.to_builtins(report) for report in reports]
    return document


def _rolling_document(record: RollingRecord) -> dict[str, Any]:
    """Spans are seconds, or units of times that are a ``bigint``; null is a lifetime, and no horizon."""
    definition = record.definition

    def span(number: int) -> float:
        whole = definition.type == "bigint"
        return number if whole else number / 1_000_000 if number % 1_000_000 else number // 1_000_000

    return {
        "windows": [
            {"name": one.name, "length": span(one.length) or None, "resolution": span(one.resolution) or None}
            for one in definition.windows
        ],
        "times": definition.type,
        "unit": span(definition.unit),
        "lag": span(definition.lag),
        "retention": span(definition.retention),
        "horizon": plain(earliest_end(record)),
    }


def line(document: Any) -> bytes:
    """One line of NDJSON or of an event."""
    return _encoder.encode(document)


def lines(documents: Iterable[Any]) -> bytes:
    """Lines of NDJSON."""
    return _encoder.encode_lines(documents)
