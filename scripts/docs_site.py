"""What the site adds to the pages of docs/: the files that they link to elsewhere, and docstrings as Markdown.

MkDocs calls the functions, mkdocstrings the class. Both are named in mkdocs.yml.
"""

from __future__ import annotations

import os.path
import re
from pathlib import Path, PurePosixPath
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"""((?:\]\(|\b(?:src|srcset|href)="))(?!\w+:|[#/])([^)#"\s]+)""")
ALIGNED = re.compile(r"^( *)(``[^`]+``(?:, ``[^`]+``)*) {2,}(\S.*)$")
LANGUAGES = {".py": "python", ".toml": "toml", ".yml": "yaml", ".sh": "bash", ".json": "json"}


def site_uri(path: PurePosixPath) -> str:
    """The page of the site that shows a file of the repository."""
    if path == PurePosixPath("README.md"):
        return "index.md"
    if path.parts[0] == "docs":
        return str(path.relative_to("docs"))
    return f"repository/{path}" if path.suffix == ".md" else f"repository/{path}.md"


def linked(source: PurePosixPath, target: str) -> PurePosixPath | None:
    """The file of the repository to which a page at ``source`` links; None if it is no file."""
    path = PurePosixPath(os.path.normpath(source.parent / target))
    return path if (ROOT / path).is_file() else None


def shown(path: PurePosixPath) -> str:
    """A file as a page. A program stands in a block of code."""
    text = (ROOT / path).read_text()
    if path.suffix == ".md":
        return text
    return f"# {path}\n\n````{LANGUAGES.get(path.suffix, 'text')}\n{text}````\n"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the README as the first page, and each file outside docs/ to which a page leads. Called once per build."""
    pages = [PurePosixPath("README.md"), *(PurePosixPath("docs", file.src_uri) for file in files.documentation_pages())]
    seen = set(pages)
    for source in pages:  # which grows
        uri = site_uri(source)
        if source.parts[0] != "docs":
            inclusion = InclusionLevel.INCLUDED if uri == "index.md" else InclusionLevel.NOT_IN_NAV
            files.append(File.generated(config, uri, content=shown(source), inclusion=inclusion))
        if source.suffix != ".md":
            continue
        found = {linked(source, target) for _, target in LINK.findall((ROOT / source).read_text())}
        new = sorted(path for path in found - {None} - seen if path is not None and path.parts[0] != "docs")
        pages.extend(new)
        seen.update(new)
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001
    """Lead each link to the page that shows its file. Called once per page."""
    uri = page.file.src_uri
    source = PurePosixPath("README.md" if uri == "index.md" else f"docs/{uri}")
    if uri.startswith("repository/"):
        source = PurePosixPath(uri).relative_to("repository")
        if not (ROOT / source).is_file():
            return markdown  # a program

    def there(match: re.Match[str]) -> str:
        path = linked(source, match[2])
        return match[0] if path is None else match[1] + os.path.relpath(site_uri(path), PurePosixPath(uri).parent)

    return LINK.sub(there, markdown)


class Docstrings(griffe.Extension):
    """Makes Markdown lists of the aligned lists in docstrings."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called for each function, class and module."""
        if obj.docstring is not None:
            obj.docstring.value = with_lists(obj.docstring.value)


def with_lists(text: str) -> str:
    """Turn each aligned line, ``name``  meaning, and the deeper lines below it, into an item of a list."""
    lines: list[str] = []
    inside: int | None = None  # the indentation of the last item
    for line in text.split("\n"):
        item = ALIGNED.match(line)
        if item is not None:
            if lines and lines[-1].strip() and inside is None:
                lines.append("")
            inside = len(item[1])
            lines.append(f"{item[1]}- {item[2]}: {item[3]}")
        elif inside is not None and line.strip() and len(line) - len(line.lstrip()) > inside:
            lines[-1] += " " + line.strip()
        else:
            if inside is not None and line.strip():
                lines.append("")
            inside = None
            lines.append(line)
    return "\n".join(lines)
