"""The pictures of the documentation: what their text sources give, and what stands in them."""

from __future__ import annotations

import re
from xml.etree import ElementTree as ET

import notebook_pictures
import pictures
import pytest
from test_docs import PAGES, ROOT

from mapstate import errors

SVG = "{http://www.w3.org/2000/svg}"
DRAWN = pictures.pictures()


def texts(svg: str) -> list[str]:
    return [text.text or "" for text in ET.fromstring(svg).iter(f"{SVG}text")]


def test_the_svg_files_are_those_of_the_sources():
    assert {path.name for path in DRAWN} == {path.name for path in pictures.FOLDER.glob("*.svg")}
    changed = [path.name for path, svg in DRAWN.items() if path.read_text() != svg]
    assert not changed, "run scripts/run python scripts/pictures.py"


@pytest.mark.parametrize("path", DRAWN, ids=lambda path: path.name)
def test_a_picture_shows_every_word_and_closes_every_box_of_its_source(path):
    title, _, drawn = path.with_suffix(".txt").read_text().partition("\n\n")
    root = ET.fromstring(DRAWN[path])
    assert root.findtext(f"{SVG}title") == title
    words = re.sub(r"┌[srtgb]", "┌", drawn).replace("*", "")
    assert " ".join(texts(DRAWN[path])).split() == re.findall(r"[^\s─╌│╎┌┐└┘├┤┬┴┼▶◀▲▼]+", words)
    assert len([rect for rect in root.iter(f"{SVG}rect") if "box" in rect.get("class", "")]) == drawn.count("┌")
    assert len(list(root.iter(f"{SVG}polygon"))) == len(re.findall("[▶◀▲▼]", drawn))


def test_lines_of_a_source_become_one_line_and_a_box_one_rectangle():
    svg = pictures.Drawing("a title\n\n┌r─┐\n│a ├──▶ b c\n└──┘\n").svg().splitlines()
    assert [line for line in svg if line.startswith(('<rect class="box', "<text"))] == [
        '<rect class="box r" x="20.5" y="26.0" width="27" height="40" rx="6"/>',
        '<text x="25" y="51" textLength="9" lengthAdjust="spacingAndGlyphs">a</text>',
        '<text x="88" y="51" textLength="27" lengthAdjust="spacingAndGlyphs">b c</text>',
    ]


def test_every_picture_stands_on_a_page_with_words_for_who_does_not_see_it():
    shown = {
        (page.parent / target).resolve(): words
        for page in PAGES
        for words, target in re.findall(r"!\[([^\]]*)\]\(([^)]+\.svg)\)", page.read_text())
    }
    assert set(shown) == set(DRAWN)
    assert all(len(words) > 20 for words in shown.values())


@pytest.mark.spark
def test_the_plots_of_the_guide_to_notebooks_are_those_of_its_code(spark, tmp_path):
    from matplotlib.image import imread

    notebook_pictures.main(tmp_path, spark, "memory://notebook-pictures")
    page = notebook_pictures.PAGE.read_text()
    for name in notebook_pictures.PICTURES.values():
        found, kept = imread(tmp_path / name), imread(pictures.FOLDER / name)
        assert found.shape == kept.shape
        assert abs(found - kept).mean() < 0.01, "run scripts/run python scripts/notebook_pictures.py"
        assert f"](../pictures/{name})" in page


def test_the_decision_names_every_error_of_the_protocol_and_of_stores():
    page = (ROOT / "docs" / "concepts" / "errors.md").read_text()
    branches = (errors.LedgerError, errors.StoreError)
    named = [name for name in errors.__all__ if issubclass(getattr(errors, name), branches)]
    assert [name for name in named if f"`{name}`" not in page and name not in ("LedgerError", "StoreError")] == []
    drawn = " ".join(texts(DRAWN[pictures.FOLDER / "which-error.svg"]))
    unknown = [name for name in re.findall(r"\w+Error", drawn) if not hasattr(errors, name)]
    assert unknown == []
