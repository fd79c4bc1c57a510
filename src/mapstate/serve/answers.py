"""The requests and the answers: parameters, bodies, cursors; JSON, its batch and tag, and problems (RFC 9457)."""

from __future__ import annotations

from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from hashlib import blake2b
from http import HTTPStatus
from typing import Any
from urllib.parse import parse_qsl

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from mapstate import errors
from mapstate.aggregators.aggregator import Aggregator
from mapstate.batch_report import BatchReport
from mapstate.errors import MapStateError
from mapstate.keys import Key
from mapstate.protocol.ledger_record import Commit, LedgerRecord
from mapstate.protocol.rolling import RollingRecord
from mapstate.reader.committed import mark_of
from mapstate.reader.forms import JsonKeys, JsonRows, time_asked, time_given, typed_keys
from mapstate.reader.rolling import earliest_end, readable_fields
from mapstate.reader.times import Time, shown_time
from mapstate.schema import KeyField
from mapstate.values import plain

_encoder = msgspec.json.Encoder()
# The first class that fits says the status, and whether the request may be sent again as it is.
_STATUS: tuple[tuple[type[MapStateError], int], ...] = (
    (errors.StateNotFoundError, 404),
    (errors.WindowGoneError, 410),
    (errors.KeyEncodingError, 400),
    (errors.UsageError, 400),
    (errors.UnknownColumnError, 400),
    (errors.ConfigurationError, 409),
    (errors.StaleBatchError, 503),
    (errors.SeedingError, 503),
    (errors.StoreUnavailableError, 503),
    (errors.StoreError, 502),
    (errors.LedgerError, 409),
    (errors.CorruptRecordError, 409),
    (errors.DataError, 500),
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
    if ledger.type != "opaque" or ledger.has_had_ttl or _joins_at_random(ledger):
        return None
    contents = (*ledger.contents(), ledger.final_mark(), ledger.field_counts, as_of(ledger))
    return f'"{blake2b(repr(contents).encode(), digest_size=9).hexdigest()}"'


def _joins_at_random(ledger: LedgerRecord) -> bool:
    """Whether two reads of the same records may differ: joining KLL sketches draws at random."""
    joins = ledger.rolling is not None or (ledger.windows is not None and ledger.windows.definition.has_parts)
    names = [field.aggregator for field in ledger.fields]
    return any("ApproxPercentiles(" in name and (joins or name.startswith("CountWindows")) for name in names)


def _is_known(request: Request, tag: str | None) -> bool:
    given = request.headers.get("if-none-match")
    if given is None or tag is None or request.method == "POST":  # whose answers nobody keeps
        return False
    return given.strip() == "*" or tag in [tag.strip().removeprefix("W/") for tag in given.split(",")]


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
        super().__init__(ledger.keys, readable_fields(ledger, aggregators), aggregators)
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
            {"name": window.name, "length": span(window.length) or None, "resolution": span(window.resolution) or None}
            for window in definition.windows
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


MOST_BYTES = 4 << 20
"""Of the body of a request."""


def key_of(request: Request, fields: tuple[KeyField, ...], others: set[str]) -> Key:
    """The key in the query: a parameter for each key column, with ``key.`` in front where ``others`` has its name."""
    given: dict[str, str] = {}
    try:
        pairs = parse_qsl(request.url.query, keep_blank_values=True, errors="strict")
    except UnicodeDecodeError:
        raise BadRequest("The parameters are text in UTF-8.") from None
    for name, text in pairs:
        if name in given:
            raise BadRequest(f"{name!r} is given twice. POST takes several keys.")
        given[name] = text
    names = [f"key.{field.name}" if field.name in others else field.name for field in fields]
    if len({*names}) < len(names):
        raise BadRequest("Two key columns have one name as a parameter. POST takes keys by their columns.")
    missing = [name for name in names if name not in given]
    unknown = [name for name in given if name not in names and name not in others]
    if missing or unknown:
        schema = ", ".join(f"{name} {field.type}" for name, field in zip(names, fields, strict=True))
        problem = f"missing: {', '.join(missing)}" if missing else f"unknown: {', '.join(map(repr, unknown))}"
        raise BadRequest(f"The key is a parameter for each key column ({schema}); {problem[:200]}.")
    return typed_keys([given[name] for name in names], fields)[0]


def check_names(request: Request, known: set[str]) -> None:
    """Raise Problem for a parameter that is not known, or is given twice."""
    names = [name for name, _ in request.query_params.multi_items()]
    for name in names:
        if name not in known:
            raise BadRequest(f"There is no parameter {name[:100]!r} here.")
    if len(names) > len({*names}):
        raise BadRequest("A parameter is given twice.")


def time_of(ledger: LedgerRecord, text: str | None) -> Any:
    """A time of a state with windows. Raises UsageError."""
    return None if text is None else time_given(text, ledger.keys[0].type)


def at_of(ledger: LedgerRecord, given: Any) -> Any:
    """The time at which rolling windows shall end, or the time for each key; None for none. Raises UsageError."""
    if isinstance(given, list):
        times = [time_asked(ledger, text) for text in given]
        if "watermark" in times:
            raise BadRequest("In a list, at has times only. Nothing was read.")
        return times
    return None if given is None else time_asked(ledger, given)


def others_of(ledger: LedgerRecord, others: set[str]) -> set[str]:
    """The parameters beside a key: with ``at``, unless that is a key column of a state without rolling windows."""
    is_key = ledger.rolling is None and any(field.name == "at" for field in ledger.keys)
    return others if is_key else {*others, "at"}


async def body_of(request: Request) -> bytes:
    """The body, as far as it may be long."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MOST_BYTES:
            raise Problem(413, f"A body has at most {MOST_BYTES} bytes.")
    return bytes(body)


def cursor_text(cursor: str) -> str:
    """The cursor of a store as a word of a URL."""
    return urlsafe_b64encode(cursor.encode()).decode()


def cursor_of(cursor: str) -> str:
    """The reverse of `cursor_text`. Raises Problem."""
    try:
        return urlsafe_b64decode(cursor.encode("ascii")).decode()
    except ValueError:
        raise BadRequest("This is no cursor of a scan.") from None
