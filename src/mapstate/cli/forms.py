"""What a command prints: JSON documents, and the cells of a table."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import typer

from mapstate.reader.forms import plain


def emit(document: Any) -> None:
    """Print one JSON document on one line, in ASCII: no character of it controls a terminal."""
    typer.echo(json.dumps(msgspec.to_builtins(document)))


def cell(value: Any) -> str:
    """A value as a cell of a table: text as it is, everything else as JSON."""
    form = plain(value)
    return form if isinstance(form, str) else json.dumps(form, ensure_ascii=False)
