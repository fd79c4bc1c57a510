"""What a request asks for: its parameters, its body, the cursor of a scan."""

from __future__ import annotations

from base64 import urlsafe_b64decode, urlsafe_b64encode
from typing import Any
from urllib.parse import parse_qsl

from starlette.requests import Request

from mapstate.keys import Key
from mapstate.protocol.ledger_record import LedgerRecord
from mapstate.reader.forms import time_asked, typed_keys
from mapstate.schema import KeyField
from mapstate.serve.answers import BadRequest, Problem

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
        found = f"missing: {', '.join(missing)}" if missing else f"unknown: {', '.join(map(repr, unknown))}"
        raise BadRequest(f"The key is a parameter for each key column ({schema}); {found[:200]}.")
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
    return None if text is None else typed_keys([text], ledger.keys[:1])[0][0]


def at_of(ledger: LedgerRecord, given: Any) -> Any:
    """The time at which rolling windows shall end, or the time for each key; None for none. Raises UsageError."""
    if isinstance(given, list):
        times = [time_asked(ledger, one) for one in given]
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
