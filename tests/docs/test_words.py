"""Words that are out: `words.toml` lists them, each with its better one."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
WORDS: list[dict[str, Any]] = tomllib.loads((ROOT / "tests" / "docs" / "words.toml").read_text())["word"]
FOLDERS = ("bench", "docs", "examples", "fuzz", "model", "scripts", "src", "tests")


def files() -> Iterator[Path]:
    """Every page and Python file of the project."""
    paths = [*ROOT.glob("*.md")]
    for folder in FOLDERS:
        paths += [*(ROOT / folder).rglob("*.py"), *(ROOT / folder).rglob("*.md")]
    yield from sorted(paths)


def below(path: str, parents: list[str]) -> bool:
    return any(f"{path}/".startswith(f"{parent}/") for parent in parents)


def names_as_words(line: str) -> list[str]:
    """The names of several words in a line of code, ``last_commit``, as text."""
    return [name.replace("_", " ").strip() for name in set(re.findall(r"\w*[a-zA-Z]_[a-zA-Z]\w*", line))]


@cache
def lines() -> dict[str, list[tuple[str, str]]]:
    """Each line of the files, and each of their names of several words: in which files and in which lines it is."""
    found: dict[str, list[tuple[str, str]]] = {}
    for path in files():
        name = path.relative_to(ROOT).as_posix()
        for number, line in enumerate(path.read_text().splitlines(), 1):
            for text in (line, *names_as_words(line)):
                found.setdefault(text, []).append((name, f"{name}:{number}: {line.strip()}"))
    return found


def test_the_words_of_a_name_are_read():
    assert sorted(names_as_words("def test_a_key(one, of_all): return A_b + _c")) == ["A b", "of all", "test a key"]


@pytest.mark.parametrize("word", WORDS, ids=[word["out"] for word in WORDS])
def test_no_file_has_a_word_that_is_out(word):
    pattern = re.compile(word["pattern"])
    hits = [
        place
        for text, places in lines().items()
        if pattern.search(text)
        for path, place in places
        if not below(path, list(word.get("except", {})))
    ]
    assert not hits, f"instead of {word['out']!r} write {word['better']!r}:\n" + "\n".join(hits)


@pytest.mark.parametrize("word", WORDS, ids=[word["out"] for word in WORDS])
def test_a_pattern_finds_its_word_and_nothing_else(word):
    assert re.search(word["pattern"], word["hit"])
    assert not re.search(word["pattern"], word["miss"])


def test_every_exception_is_a_file_with_a_reason():
    for word in WORDS:
        for path, reason in word.get("except", {}).items():
            assert reason, path
            assert (ROOT / path).exists(), f"{word['out']}: there is no {path}"
