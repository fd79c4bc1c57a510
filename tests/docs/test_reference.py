"""The reference: each public name is in it, with an example that ran, and its tables are those of the code."""

from __future__ import annotations

import ast
import importlib
import inspect
import re

import pytest
from reference_tables import TABLES
from test_docs import ROOT, blocks

PAGES = sorted((ROOT / "docs" / "reference").glob("*.md"))
# What a user, a service or a store author imports from.
MODULES = (
    "mapstate",
    "mapstate.aggregators",
    "mapstate.backends",
    "mapstate.backing_map",
    "mapstate.capabilities",
    "mapstate.errors",
    "mapstate.maps",
    "mapstate.serializers",
    "mapstate.spark",
    "mapstate.testing",
    "mapstate.testing.contracts",
    "mapstate.trident",
)
NAMES = sorted({(name, module) for module in MODULES for name in importlib.import_module(module).__all__})


def used(code):
    """The names that a block uses, beside those that it only imports."""
    return {node.id for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Name)}


# Pages whose subject is a part of the reference.
GUIDES = [ROOT / "docs" / name for name in ("readers.md", "sketches.md", "testing-with-faults.md", "life.md")]
EXAMPLES = {name for page in [*PAGES, *GUIDES] for code in blocks(page) for name in used(code)}


@pytest.mark.parametrize(("name", "module"), NAMES, ids=lambda part: part)
def test_a_public_name_has_a_docstring_and_an_example_that_ran(name, module):
    """An example is a block of one of these pages: test_docs.py runs each of them."""
    thing = getattr(importlib.import_module(module), name)
    if inspect.isclass(thing) or inspect.isfunction(thing):
        doc = vars(thing).get("__doc__") if inspect.isclass(thing) else thing.__doc__
        assert doc, f"{module}.{name} has no docstring"
    assert name in EXAMPLES, f"no block of docs/reference or {[page.name for page in GUIDES]} uses {name}"


def test_a_public_name_is_on_a_page():
    shown = {name for page in PAGES for name in re.findall(r"^::: [\w.]+\.(\w+)$", page.read_text(), re.MULTILINE)}
    errors = importlib.import_module("mapstate.errors").__all__  # in a table
    aliases = {"Row", "CAPABILITIES"}
    assert sorted({name for name, _ in NAMES} - shown - set(errors) - aliases) == []


@pytest.mark.parametrize(("page", "heading"), TABLES, ids=lambda part: part)
def test_a_table_is_that_of_the_code(page, heading):
    """If the code has changed, the rows of the failure are those to put into the page."""
    text = (ROOT / "docs" / "reference" / f"{page}.md").read_text()
    below = re.search(rf"^#+ {heading}\n(.*?)(?=^#|\Z)", text, re.MULTILINE | re.DOTALL)
    assert below, f"{page}.md has no heading {heading!r}"
    rows = [line for line in below[1].splitlines() if line.startswith("|")]
    assert rows[2:] == TABLES[page, heading]()
