"""Prints how much there is to read: what `make lint` shows, and what tests/docs/test_weight.py bounds.

    scripts/run python scripts/weight.py

``lines`` are all lines of the package's Python files, ``head`` those before the first definition of each file:
docstring, imports and ``__all__``. A module has ``one importer`` where only one other file imports it. ``vague_names``
are locals and parameters called one, own or found. A ``ring`` is folders that import each other, directly or by way of
others. The folders of ``spark`` count each by itself, and so does a file beside folders.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "mapstate"


class Weight(NamedTuple):
    """What was measured. ``rings`` are names of folders and files, as "keys, maps, protocol"."""

    files: int
    lines: int
    head: int
    one_importer: int
    vague_names: int
    words_of_docs: int
    rings: tuple[str, ...]


def weigh() -> Weight:
    """Read every file of the package and every page."""
    files = sorted(PACKAGE.rglob("*.py"))
    texts = {_module(path): path.read_text() for path in files}
    trees = {module: ast.parse(text) for module, text in texts.items()}
    imported = {module: set(_imports(tree, texts)) - {module} for module, tree in trees.items()}
    importers = [sum(module in others for others in imported.values()) for module in texts]
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    return Weight(
        files=len(files),
        lines=sum(len(text.splitlines()) for text in texts.values()),
        head=sum(map(_head, texts.values())),
        one_importer=importers.count(1),
        vague_names=sum(_is_vague(node) for tree in trees.values() for node in ast.walk(tree)),
        words_of_docs=sum(len(page.read_text().split()) for page in pages),
        rings=tuple(", ".join(ring) for ring in _rings(imported)),
    )


def _module(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")


def _head(text: str) -> int:
    first = next((one for one in ast.parse(text).body if isinstance(one, (ast.ClassDef, ast.FunctionDef))), None)
    return len(text.splitlines()) if first is None else first.lineno - 1


def _is_vague(node: ast.AST) -> bool:
    name = node.id if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) else getattr(node, "arg", None)
    return name in ("one", "own", "found") and not isinstance(node, ast.keyword)


def _imports(tree: ast.AST, modules: dict[str, str]) -> Iterator[str]:
    """The modules that a file imports: at its top, in its functions, and for type checkers."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names if name.name in modules)
        elif isinstance(node, ast.ImportFrom) and node.module in modules:
            for name in node.names:
                below = f"{node.module}.{name.name}"
                yield below if below in modules else node.module


def _folder(module: str) -> str:
    parts = module.split(".")[1:]
    below = parts[:2] if parts[:1] == ["spark"] else parts[:1]
    return "/".join(below) or "mapstate"


def _rings(imported: dict[str, set[str]]) -> list[list[str]]:
    """The sets of two folders and more from each of which every other one is reached."""
    edges: dict[str, set[str]] = {}
    for module, others in imported.items():
        edges.setdefault(_folder(module), set()).update(_folder(other) for other in others)
    reached = {folder: _reached(folder, edges) for folder in edges}
    rings = {tuple(sorted(o for o in reached[f] if f in reached[o])) for f in edges}
    return [list(ring) for ring in sorted(rings) if len(ring) > 1]


def _reached(start: str, edges: dict[str, set[str]]) -> set[str]:
    found: set[str] = set()
    waiting = [start]
    while waiting:
        for folder in edges[waiting.pop()] - found:
            found.add(folder)
            waiting.append(folder)
    return found


if __name__ == "__main__":
    weight = weigh()
    print(f"src/mapstate: {weight.files} files, {weight.lines:,} lines, {weight.head:,} of them heads;")
    print(f"  {weight.one_importer} modules with one importer, {weight.vague_names} vague names;")
    print(f"  pages: {weight.words_of_docs:,} words")
    for ring in weight.rings:
        print(f"  a ring: {ring}")
