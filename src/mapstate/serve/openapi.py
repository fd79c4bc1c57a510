"""The description of all calls, as OpenAPI 3.1. It is the same for every store, but for functions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from mapstate.version import VERSION

_TEXT: dict[str, Any] = {"type": "string"}
_WORD: dict[str, Any] = {"type": ["string", "null"]}
_NUMBER: dict[str, Any] = {"type": ["integer", "null"]}
_STATE = {"name": "state", "in": "path", "required": True, "schema": _TEXT, "description": "the name of a state"}
_END = {"name": "end", "in": "path", "required": True, "schema": _TEXT, "description": "the end of the window"}
_KEY = {
    "name": "key",
    "in": "query",
    "style": "form",
    "explode": True,
    "description": "a parameter for each key column, by its name, or key.min_batch and the like; \\N is null",
    "schema": {"type": "object", "additionalProperties": _TEXT},
}
_AS_OF_WAIT = [
    {
        "name": "min_batch",
        "in": "query",
        "schema": {"type": "string", "pattern": "^([0-9a-f]{12}-)?[0-9]{1,18}$"},
        "description": "wait until the owner's batch of this number, or this as_of.commit, or a later one is there",
    },
    {
        "name": "wait",
        "in": "query",
        "schema": {"type": "number", "minimum": 0, "maximum": 60, "multipleOf": 0.001, "default": 10},
        "description": "seconds after which the wait ends with 503",
    },
]
_PAGES = [
    {"name": "cursor", "in": "query", "schema": _TEXT, "description": "of an earlier scan, to go on behind it"},
    {"name": "limit", "in": "query", "schema": {"type": "integer", "minimum": 1, "maximum": 10**18 - 1}},
    {
        "name": "columns",
        "in": "query",
        "schema": {**_TEXT, "minLength": 1},
        "description": "fields to give, with commas between them",
    },
]
_AT = {
    "name": "at",
    "in": "query",
    "schema": _TEXT,
    "description": "of rolling windows: the instant or number at which they end, or watermark; now without it",
}
_SPAN = [{"name": name, "in": "query", "schema": _TEXT} for name in ("since", "until")]
_KNOWN = {"name": "If-None-Match", "in": "header", "schema": _TEXT, "description": "an ETag: 304 if it still holds"}
_LAST_ID = {"name": "Last-Event-ID", "in": "header", "schema": _TEXT, "description": "what a client has"}
_ETAG = {"ETag": {"schema": _TEXT, "description": "changes with each commit; of opaque states"}}


def _ref(name: str) -> dict[str, Any]:
    return {"$ref": f"#/components/schemas/{name}"}


def _content(schema: dict[str, Any], media_type: str = "application/json") -> dict[str, Any]:
    return {"content": {media_type: {"schema": schema}}}


def _json(description: str, schema: str) -> dict[str, Any]:
    return {"description": description, **_content(_ref(schema))}


def _text(description: str, media_type: str) -> dict[str, Any]:
    return {"description": description, **_content(_TEXT, media_type)}


def _call(name: str, summary: str, answer: dict[str, Any], *parameters: dict[str, Any]) -> dict[str, Any]:
    """A call; with the parameter `_KNOWN` its answer has a tag, and may be 304."""
    answers = {"200": answer}
    if _KNOWN in parameters:
        answers = {"200": {**answer, "headers": _ETAG}, "304": {"description": "the client has it"}}
    call: dict[str, Any] = {
        "operationId": name,
        "summary": summary,
        "responses": {**answers, "default": {"$ref": "#/components/responses/Problem"}},
    }
    return {**call, "parameters": list(parameters)} if parameters else call


def _object(required: str, **properties: Any) -> dict[str, Any]:
    return {"type": "object", "required": required.split(), "properties": properties}


def openapi(functions: Iterable[str] = (), root: str = "") -> dict[str, Any]:
    """The document; ``functions`` are those of ``--functions``, and ``root`` is the path of the service in another."""
    value = _json("the value, null for an absent key", "Value")
    values = _json("the values, in the order of the keys", "Values")
    windows = _json("the windows, in order", "Windows")
    lines = _text("lines of JSON: see docs/serve.md", "application/x-ndjson")
    is_up = _json("it does", "Health")
    many = "The values of up to 10,000 keys, all as of one batch"
    gets = {
        "/states": _call("states", "All states", _json("the states", "States")),
        "/states/{state}": _call(
            "state", "One state", _json("the state, its last batches", "State"), _STATE, *_AS_OF_WAIT
        ),
        "/states/{state}/values": _call("get", "The value of one key", value, _STATE, _KEY, _AT, *_AS_OF_WAIT, _KNOWN),
        "/states/{state}/scan": _call("scan", "All keys and values", lines, _STATE, *_PAGES, _AT, *_AS_OF_WAIT),
        "/states/{state}/windows": _call(
            "windows", "The windows of one key", windows, _STATE, _KEY, *_SPAN, *_AS_OF_WAIT, _KNOWN
        ),
        "/states/{state}/windows/{end}": _call("window", "All keys of one window", lines, _STATE, _END, *_AS_OF_WAIT),
        "/events": _call("events", "An event per commit", _text("server-sent events", "text/event-stream"), _LAST_ID),
        "/metrics": _call("metrics", "Metrics for Prometheus", _text("metrics", "text/plain")),
        "/health": _call("health", "Whether the service answers", is_up),
        "/ready": _call("ready", "Whether the store answers", is_up),
    }
    paths = {path: {"get": call} for path, call in gets.items()}
    paths["/states/{state}/values"]["post"] = {
        **_call("multiGet", many, values, _STATE, *_AS_OF_WAIT, _KNOWN),
        "requestBody": {"required": True, **_content(_ref("Keys"))},
    }
    result = {"description": "its result", **_content(_object("result", result={}))}
    for name in functions:
        call = _call(f"drpc_{name}", f"The function {name}", result)
        paths[f"/drpc/{name}"] = {"post": {**call, "requestBody": _content(_TEXT, "text/plain")}}
    problem = {"description": "a problem, as RFC 9457 has it", **_content(_ref("Problem"), "application/problem+json")}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "mapstate serve",
            "version": VERSION,
            "description": "Committed reads of the states of one store.",
        },
        "servers": [{"url": root or "/"}],
        "security": [{}, {"token": []}],
        "paths": paths,
        "components": {
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
            "responses": {"Problem": problem},
            "schemas": _schemas(),
        },
    }


def _schemas() -> dict[str, Any]:
    value = {"type": ["object", "null"], "description": "the fields by name; null for an absent key"}
    key = {"type": "object", "description": "the key columns by name"}
    bare = {"type": ["string", "number", "boolean", "null"], "description": "the value of the only key column"}
    read = {"state": _TEXT, "as_of": _ref("AsOf"), "version": {**_TEXT, "description": "what an alias leads to"}}
    window = _object("start end is_final value", start={}, end={}, is_final={"type": "boolean"}, value=value)
    time = {"type": ["string", "integer", "null"]}
    times: dict[str, Any] = {"type": "array", "items": {"type": ["string", "integer"]}}
    at = {"anyOf": [time, times], "description": "of rolling windows: where they end; a list has one for each key"}
    columns = {"type": ["array", "null"], "items": _TEXT, "description": "fields to give; null gives all"}
    span = {"type": ["number", "null"], "description": "seconds, or units of times that are a bigint"}
    rolling = _object(
        "windows times unit lag retention horizon",
        windows={"type": "array", "items": _object("name length resolution", name=_TEXT, length=span, resolution=span)},
        times=_TEXT,
        unit=span,
        lag=span,
        retention=span,
        horizon=time,
    )
    return {
        "AsOf": _object(
            "batch_id txid committed_at commit",
            batch_id=_NUMBER,
            txid=_NUMBER,
            committed_at=_WORD,
            commit=_WORD,
            end={
                "anyOf": [time, {"type": "array", "items": time}],
                "description": "where rolling windows end, null before any row; a list has one for each key",
            },
            watermark=time,
        ),
        "Value": _object("state as_of key value", **read, key=key, value=value),
        "Keys": {
            **_object(
                "keys",
                keys={"type": "array", "maxItems": 10_000, "items": {"anyOf": [key, bare]}},
                at=at,
                columns=columns,
            ),
            "additionalProperties": False,
        },
        "Values": _object("state as_of values", **read, values={"type": "array", "items": value}),
        "Windows": _object("state as_of windows", **read, windows={"type": "array", "items": window}),
        "State": _object("name", name=_TEXT, rolling_windows=rolling),
        "States": _object("states", states={"type": "array", "items": _ref("State")}),
        "Health": _object("status", status=_TEXT),
        "Problem": _object(
            "type title status detail",
            type=_TEXT,
            title=_TEXT,
            status={"type": "integer"},
            detail=_TEXT,
            error={**_TEXT, "description": "the class of the error in mapstate"},
        ),
    }
