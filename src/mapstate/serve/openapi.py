"""The description of all calls, as OpenAPI 3.1. It is the same for every store, but for functions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from mapstate.version import VERSION

_JSON = "application/json"
_TEXT: dict[str, Any] = {"type": "string"}
_WORD: dict[str, Any] = {"type": ["string", "null"]}
_NUMBER: dict[str, Any] = {"type": ["integer", "null"]}
_STATE = {"name": "state", "in": "path", "required": True, "schema": _TEXT, "description": "the name of a state"}
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
_KNOWN = {"name": "If-None-Match", "in": "header", "schema": _TEXT, "description": "an ETag: 304 if it still holds"}
_NDJSON = {"application/x-ndjson": {"schema": _TEXT}}


def _ref(name: str) -> dict[str, Any]:
    return {"$ref": f"#/components/schemas/{name}"}


def _answer(description: str, schema: Any = None, *, is_tagged: bool = False) -> dict[str, Any]:
    answer: dict[str, Any] = {"description": description}
    if schema is not None:
        answer["content"] = {_JSON: {"schema": schema}}
    if is_tagged:
        answer["headers"] = {"ETag": {"schema": _TEXT, "description": "changes with each commit; of opaque states"}}
    return answer


def _call(
    name: str, summary: str, answers: dict[str, Any], parameters: tuple[Any, ...] = (), body: Any = None
) -> dict[str, Any]:
    call: dict[str, Any] = {
        "operationId": name,
        "summary": summary,
        "responses": {**answers, "default": {"$ref": "#/components/responses/Problem"}},
    }
    if parameters:
        call["parameters"] = list(parameters)
    if body is not None:
        call["requestBody"] = {"required": True, "content": {_JSON: {"schema": body}}}
    return call


def _object(required: str, **properties: Any) -> dict[str, Any]:
    return {"type": "object", "required": required.split(), "properties": properties}


def openapi(functions: Iterable[str] = (), root: str = "") -> dict[str, Any]:
    """The document; ``functions`` are those of ``--functions``, and ``root`` is the path of the service in another."""
    computed = {f"/drpc/{name}": {"post": _function(name)} for name in functions}
    same = _answer("the client has it")
    values = "/states/{state}/values"
    get = _call(
        "get",
        "The value of one key",
        {"200": _answer("the value, null for an absent key", _ref("Value"), is_tagged=True), "304": same},
        (_STATE, _KEY, *_AS_OF_WAIT, _KNOWN),
    )
    multi_get = _call(
        "multiGet",
        "The values of up to 10,000 keys, all as of one batch",
        {"200": _answer("the values, in the order of the keys", _ref("Values"), is_tagged=True), "304": same},
        (_STATE, *_AS_OF_WAIT, _KNOWN),
        _ref("Keys"),
    )
    limits = (
        {"name": "cursor", "in": "query", "schema": _TEXT, "description": "of an earlier scan, to go on behind it"},
        {"name": "limit", "in": "query", "schema": {"type": "integer", "minimum": 1, "maximum": 10**18 - 1}},
        {
            "name": "columns",
            "in": "query",
            "schema": {**_TEXT, "minLength": 1},
            "description": "fields to give, with commas between them",
        },
    )
    span = tuple({"name": name, "in": "query", "schema": _TEXT} for name in ("since", "until"))
    end = {"name": "end", "in": "path", "required": True, "schema": _TEXT, "description": "the end of the window"}
    lines = {"description": "lines of JSON: see docs/serve.md", "content": _NDJSON}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "mapstate serve",
            "version": VERSION,
            "description": "Committed reads of the states of one store.",
        },
        "servers": [{"url": root or "/"}],
        "security": [{}, {"token": []}],
        "paths": {
            "/states": {"get": _call("states", "All states", {"200": _answer("the states", _ref("States"))})},
            "/states/{state}": {
                "get": _call(
                    "state",
                    "One state",
                    {"200": _answer("the state, its last batches", _ref("State"))},
                    (_STATE, *_AS_OF_WAIT),
                )
            },
            values: {"get": get, "post": multi_get},
            "/states/{state}/scan": {
                "get": _call("scan", "All keys and values", {"200": lines}, (_STATE, *limits, *_AS_OF_WAIT))
            },
            "/states/{state}/windows": {
                "get": _call(
                    "windows",
                    "The windows of one key",
                    {"200": _answer("the windows, in order", _ref("Windows"), is_tagged=True), "304": same},
                    (_STATE, _KEY, *span, *_AS_OF_WAIT, _KNOWN),
                )
            },
            "/states/{state}/windows/{end}": {
                "get": _call("window", "All keys of one window", {"200": lines}, (_STATE, end, *_AS_OF_WAIT))
            },
            "/events": {
                "get": _call(
                    "events",
                    "An event per commit",
                    {"200": {"description": "server-sent events", "content": {"text/event-stream": {"schema": _TEXT}}}},
                    ({"name": "Last-Event-ID", "in": "header", "schema": _TEXT, "description": "what a client has"},),
                )
            },
            "/metrics": {
                "get": _call(
                    "metrics",
                    "Metrics for Prometheus",
                    {"200": {"description": "metrics", "content": {"text/plain": {"schema": _TEXT}}}},
                )
            },
            "/health": {
                "get": _call("health", "Whether the service answers", {"200": _answer("it does", _ref("Health"))})
            },
            "/ready": {"get": _call("ready", "Whether the store answers", {"200": _answer("it does", _ref("Health"))})},
            **computed,
        },
        "components": {
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
            "responses": {
                "Problem": {
                    "description": "a problem, as RFC 9457 has it",
                    "content": {"application/problem+json": {"schema": _ref("Problem")}},
                }
            },
            "schemas": _schemas(),
        },
    }


def _function(name: str) -> dict[str, Any]:
    call = _call(f"drpc_{name}", f"The function {name}", {"200": _answer("its result", _object("result", result={}))})
    return {**call, "requestBody": {"content": {"text/plain": {"schema": _TEXT}}}}


def _schemas() -> dict[str, Any]:
    value = {"type": ["object", "null"], "description": "the fields by name; null for an absent key"}
    key = {"type": "object", "description": "the key columns by name"}
    bare = {"type": ["string", "number", "boolean", "null"], "description": "the value of the only key column"}
    read = {"state": _TEXT, "as_of": _ref("AsOf")}
    window = _object("start end is_final value", start={}, end={}, is_final={"type": "boolean"}, value=value)
    return {
        "AsOf": _object(
            "batch_id txid committed_at commit", batch_id=_NUMBER, txid=_NUMBER, committed_at=_WORD, commit=_WORD
        ),
        "Value": _object("state as_of key value", **read, key=key, value=value),
        "Keys": {
            **_object("keys", keys={"type": "array", "maxItems": 10_000, "items": {"anyOf": [key, bare]}}),
            "additionalProperties": False,
        },
        "Values": _object("state as_of values", **read, values={"type": "array", "items": value}),
        "Windows": _object("state as_of windows", **read, windows={"type": "array", "items": window}),
        "State": _object("name", name=_TEXT),
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
