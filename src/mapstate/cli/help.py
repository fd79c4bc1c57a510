"""The command that prints what the pages say, which come with the package: help."""

from __future__ import annotations

import re
from difflib import get_close_matches
from itertools import takewhile
from pathlib import Path
from typing import Annotated

import typer

from mapstate import errors

_PACKAGE = Path(errors.__file__).parent
_PAGES = next(folder for folder in (_PACKAGE / "pages", _PACKAGE.parents[1] / "docs") if folder.is_dir())


def explain(topic: Annotated[str, typer.Argument(metavar="ERROR|PAGE", show_default=False)] = "cli") -> None:
    """Prints what to do after an error, by its class; or a page, or PAGE#SECTION, as the message of an error has it."""
    typer.echo(text_of(topic))


def text_of(topic: str) -> str:
    """What the tables of errors say of one; or a page, or a section of it. Raises UsageError."""
    if topic in errors.__all__:
        kind: type[BaseException] = getattr(errors, topic)
        refusals = text_of("operating#each-refusal-and-what-to-do").replace("](#", "](operating.md#")
        tables = text_of("concepts/errors") + refusals
        rows = re.findall(rf"^(?:\| \d )?\|( [^|]*`{topic}`[^|]*)\|([^|]*)\|(.*)\|$", tables, re.MULTILINE)
        above = {kind.__bases__[0].__name__} & {*errors.__all__} if not rows else ()
        return "\n\n".join([f"{topic}: {kind.__doc__}", *map("\n ".join, rows), *map(text_of, above)])
    pages = {path.relative_to(_PAGES).with_suffix("").as_posix(): path for path in sorted(_PAGES.rglob("*.md"))}
    name, _, section = topic.lstrip("./").replace(".md", "").partition("#")
    if name not in pages:
        known = get_close_matches(name, [*errors.__all__, *pages]) or pages
        raise errors.UsageError(f"there is no error and no page of this name; there is {', '.join(known)}")
    text = pages[name].read_text(encoding="utf-8")
    text = re.sub(r"(?m)^::: (\S+)(\n +options:.*)?$", r"    python -m pydoc \1", text)  # the site has it in place
    parts = re.split(r"(?m)^(?=##+ )", text)
    for at, part in enumerate(parts):
        if re.sub(r"[^\w -]", "", part.partition("\n")[0].lower()).strip().replace(" ", "-") == section:
            return part + "".join(takewhile(lambda below: below.index(" ") > part.index(" "), parts[at + 1 :]))  # noqa: B023
    return "".join(parts)
