"""Draw the pictures of the documentation: `docs/pictures/*.txt` become SVG files beside them.

    scripts/run python scripts/pictures.py

A source has its title in the first line, which screen readers say. Below an empty line it draws with box characters:

- `┌─┐│└┘├┤┬┴┼` are lines; `╌` and `╎` are dashed lines; `▶ ◀ ▲ ▼` are the heads of arrows;
- a closed rectangle is a box. A letter behind its `┌` gives its colour: `s` Spark, `r` records and ledger, `t` readers,
  `g` counts, `b` does not count;
- `*text*` is bold. Two spaces separate one text from the next.

A picture brings its own background, light or dark as the reader's system is. So it shows well on any page.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from html import escape
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "pictures"
WIDTH, HEIGHT, MARGIN = 9, 20, 16  # of a character, and around the drawing, in pixels

LEFT, RIGHT, UP, DOWN = (-1, 0), (1, 0), (0, -1), (0, 1)
ARMS = {
    "─": (LEFT, RIGHT),
    "╌": (LEFT, RIGHT),
    "│": (UP, DOWN),
    "╎": (UP, DOWN),
    "┌": (RIGHT, DOWN),
    "┐": (LEFT, DOWN),
    "└": (RIGHT, UP),
    "┘": (LEFT, UP),
    "├": (UP, DOWN, RIGHT),
    "┤": (UP, DOWN, LEFT),
    "┬": (LEFT, RIGHT, DOWN),
    "┴": (LEFT, RIGHT, UP),
    "┼": (LEFT, RIGHT, UP, DOWN),
}
HEADS = {"▶": RIGHT, "◀": LEFT, "▲": UP, "▼": DOWN}
KINDS = "srtgb"
TEXT = re.compile(rf"[^\s{''.join(ARMS)}{''.join(HEADS)}]+(?: [^\s{''.join(ARMS)}{''.join(HEADS)}]+)*")

STYLE = """
.card{fill:#fbfcfd;stroke:#d0d7de}.box{fill:#fff;stroke:#57606a}line,path{stroke:#57606a;fill:none}
line,.box{stroke-width:1.5}.dash{stroke-dasharray:4 4}.head{fill:#57606a;stroke:none}text{fill:#1f2328}
.s{fill:#fff1e0;stroke:#bc4c00}.r{fill:#e6f0fd;stroke:#0969da}.t{fill:#f1eafd;stroke:#8250df}
.g{fill:#e3f6e8;stroke:#1a7f37}.b{fill:#fdeaea;stroke:#cf222e}.bold{font-weight:700}
text{font:15px ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace;white-space:pre}
@media (prefers-color-scheme:dark){
.card{fill:#161b22;stroke:#3d444d}.box{fill:#0d1117;stroke:#9198a1}line,path{stroke:#9198a1}.head{fill:#9198a1}
text{fill:#f0f6fc}.s{fill:#3d2410;stroke:#db8b48}.r{fill:#12294a;stroke:#4493f8}.t{fill:#2b1d4a;stroke:#ab7df8}
.g{fill:#12351e;stroke:#3fb950}.b{fill:#43191b;stroke:#f85149}}
"""

Cell = tuple[int, int]


class Drawing:
    """The characters of a source, by column and row."""

    def __init__(self, source: str) -> None:
        self.title, _, drawn = source.partition("\n\n")
        lines = drawn.rstrip("\n").split("\n")
        self.lines = lines
        self.cells = {(x, y): char for y, line in enumerate(lines) for x, char in enumerate(line) if char != " "}
        self.size = max(map(len, lines)), len(lines)
        self.boxes = sorted(self._boxes(), key=lambda box: (box[1] - box[3], box))  # the outer one first

    def svg(self) -> str:
        """The picture."""
        width, height = self.size[0] * WIDTH + 2 * MARGIN, self.size[1] * HEIGHT + 2 * MARGIN
        size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">',
            f"<title>{escape(self.title)}</title>\n<style>{STYLE}</style>",
            f'<rect class="card" x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="10"/>',
            *map(self._box, self.boxes),
            *self._lines(),
            *(self._head(cell, HEADS[char]) for cell, char in self.cells.items() if char in HEADS),
            *self._texts(),
            "</svg>",
        ]
        return "\n".join(parts) + "\n"

    def _boxes(self) -> Iterator[tuple[int, int, int, int]]:
        """Each closed rectangle: its left, top, right and bottom."""
        for (left, top), char in self.cells.items():
            if char != "┌":
                continue
            right = self._end(left + (2 if self._kind(left, top) else 1), top, RIGHT, "─╌┬┴┼", "┐")
            bottom = self._end(left, top + 1, DOWN, "│╎├┤┼", "└")
            if right and bottom:
                below = self._end(left + 1, bottom[1], RIGHT, "─╌┬┴┼", "┘")
                beside = self._end(right[0], top + 1, DOWN, "│╎├┤┼", "┘")
                if below == beside == (right[0], bottom[1]):
                    yield left, top, right[0], bottom[1]

    def _end(self, x: int, y: int, step: Cell, through: str, end: str) -> Cell | None:
        while (char := self.cells.get((x, y), " ")) in through:
            x, y = x + step[0], y + step[1]
        return (x, y) if char == end else None

    def _kind(self, left: int, top: int) -> str:
        kind = self.cells.get((left + 1, top), " ")
        return kind if kind in KINDS else ""

    def _box(self, box: tuple[int, int, int, int]) -> str:
        left, top, right, bottom = box
        (x, y), (width, height) = _centre(left, top), ((right - left) * WIDTH, (bottom - top) * HEIGHT)
        dash = " dash" if "╌" in self.lines[top][left:right] else ""
        kind = f"box {self._kind(left, top)}".rstrip()
        return f'<rect class="{kind}{dash}" x="{x}" y="{y}" width="{width}" height="{height}" rx="6"/>'

    def _borders(self) -> set[tuple[Cell, Cell]]:
        """Each arm that a box's own rectangle draws, as a cell and a direction."""
        arms: set[tuple[Cell, Cell]] = set()
        for left, top, right, bottom in self.boxes:
            for y in (top, bottom):
                arms |= {((x, y), RIGHT) for x in range(left, right)} | {
                    ((x, y), LEFT) for x in range(left + 1, right + 1)
                }
            for x in (left, right):
                arms |= {((x, y), DOWN) for y in range(top, bottom)} | {
                    ((x, y), UP) for y in range(top + 1, bottom + 1)
                }
        return arms

    def _lines(self) -> Iterator[str]:
        """The lines that are no box's, each as one piece."""
        borders = self._borders()
        ways: dict[tuple[str, bool, float], list[tuple[float, float]]] = defaultdict(list)
        for (x, y), char in self.cells.items():
            for step in ARMS.get(char, ()):
                if ((x, y), step) in borders:
                    continue
                (cx, cy), along_x = _centre(x, y), step[1] == 0
                start, reach = (cx, step[0] * WIDTH / 2) if along_x else (cy, step[1] * HEIGHT / 2)
                ways["dash" if char in "╌╎" else "", along_x, cy if along_x else cx].append(
                    (min(start, start + reach), max(start, start + reach))
                )
        for (kind, along_x, level), spans in sorted(ways.items()):
            for first, last in _joined(spans):
                x1, y1, x2, y2 = (first, level, last, level) if along_x else (level, first, level, last)
                name = f' class="{kind}"' if kind else ""
                yield f'<line{name} x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}"/>'

    @staticmethod
    def _head(cell: Cell, step: Cell) -> str:
        """An arrow's head, whose tip touches a box in the next cell, and the line up to it."""
        (x, y), (dx, dy) = _centre(*cell), step
        tip = (x + dx * WIDTH, y + dy * HEIGHT) if dx else (x, y + dy * HEIGHT / 2)
        back = (tip[0] - dx * 11, tip[1] - dy * 11)
        corners = [tip, (back[0] + dy * 5, back[1] + dx * 5), (back[0] - dy * 5, back[1] - dx * 5)]
        tail_x, tail_y = x - dx * WIDTH / 2, y - dy * HEIGHT / 2
        points = " ".join(f"{px:g},{py:g}" for px, py in corners)
        return (
            f'<line x1="{tail_x:g}" y1="{tail_y:g}" x2="{back[0]:g}" y2="{back[1]:g}"/>'
            f'<polygon class="head" points="{points}"/>'
        )

    def _texts(self) -> Iterator[str]:
        marks = {(left + 1, top) for left, top, _, _ in self.boxes if self._kind(left, top)}
        for y, line in enumerate(self.lines):
            for found in TEXT.finditer(line):
                if (found.start(), y) in marks:
                    continue
                text, x = found.group(), MARGIN + found.start() * WIDTH
                bold = text.startswith("*") and text.endswith("*") and len(text) > 2
                text, name = (text[1:-1], ' class="bold"') if bold else (text, "")
                yield (
                    f'<text{name} x="{x}" y="{MARGIN + y * HEIGHT + 15}" textLength="{len(text) * WIDTH}" '
                    f'lengthAdjust="spacingAndGlyphs">{escape(text)}</text>'
                )


def _centre(x: int, y: int) -> tuple[float, float]:
    return MARGIN + x * WIDTH + WIDTH / 2, MARGIN + y * HEIGHT + HEIGHT / 2


def _joined(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    joined: list[tuple[float, float]] = []
    for first, last in sorted(spans):
        if joined and first <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], last)
        else:
            joined.append((first, last))
    return joined


def pictures() -> dict[Path, str]:
    """Each SVG file, and what its source gives."""
    return {source.with_suffix(".svg"): Drawing(source.read_text()).svg() for source in sorted(FOLDER.glob("*.txt"))}


if __name__ == "__main__":
    for path, svg in pictures().items():
        path.write_text(svg)
        print(path.relative_to(FOLDER.parents[1]))
