"""Words that are out: `words.toml` lists them, each with its better one."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
WORDS: list[dict[str, Any]] = tomllib.loads((ROOT / "tests" / "docs" / "words.toml").read_text())["word"]
FOLDERS = ("bench", "docs", "examples", "fuzz", "model", "scripts", "src", "tests")


def files() -> Iterator[tuple[str, Path]]:
    """Every page and Python file of the project, by its path below the root."""
    paths = [*ROOT.glob("*.md")]
    for folder in FOLDERS:
        paths += [*(ROOT / folder).rglob("*.py"), *(ROOT / folder).rglob("*.md")]
    for path in sorted(paths):
        yield path.relative_to(ROOT).as_posix(), path


def below(path: str, parents: list[str]) -> bool:
    return any(f"{path}/".startswith(f"{parent}/") for parent in parents)


def names_as_words(line: str) -> list[str]:
    """The names of several words in a line of code, ``last_commit``, as text."""
    return [name.replace("_", " ").strip() for name in set(re.findall(r"\w*[a-zA-Z]_[a-zA-Z]\w*", line))]


def test_the_words_of_a_name_are_read():
    assert sorted(names_as_words("def test_a_key(one, of_all): return A_b + _c")) == ["A b", "of all", "test a key"]


@pytest.mark.parametrize("word", WORDS, ids=[word["out"] for word in WORDS])
def test_no_file_has_a_word_that_is_out(word):
    pattern = re.compile(word["pattern"])
    hits = [
        f"{path}:{number}: {line.strip()}"
        for path, file in files()
        if not below(path, list(word.get("except", {})))
        for number, line in enumerate(file.read_text().splitlines(), 1)
        if pattern.search(line) or any(map(pattern.search, names_as_words(line)))
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
