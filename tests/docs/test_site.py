"""The site of `make docs`: built strictly, with every page in its navigation, and nothing from elsewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html.parser import HTMLParser

import pytest
from test_docs import ROOT

FETCHED = {
    ("script", "src"),
    ("link", "href"),
    ("img", "src"),
    ("source", "src"),
    ("iframe", "src"),
    ("object", "data"),
}


class Seen(HTMLParser):
    """The values of attributes by tag and name, and the links of the navigation."""

    def __init__(self):
        super().__init__()
        self.values, self.navigation, self._open = [], [], False

    def handle_starttag(self, tag, attrs):
        own = dict(attrs)
        self.values += [(tag, name, value or "") for name, value in attrs]
        self._open = self._open or (tag == "nav" and "md-nav--primary" in own.get("class", ""))
        if self._open and tag == "a" and "href" in own:
            self.navigation.append(own["href"].partition("#")[0])

    def handle_endtag(self, tag):
        self._open = self._open and tag != "main"


def seen(page):
    parser = Seen()
    parser.feed(page.read_text())
    return parser


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    quiet = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=quiet, capture_output=True, text=True, timeout=280, check=False)
    assert built.returncode == 0, built.stderr
    return folder


def test_every_page_of_docs_is_in_the_navigation(site):
    pages = {str(path.relative_to(ROOT / "docs").with_suffix(".html")) for path in (ROOT / "docs").rglob("*.md")}
    assert len(pages) >= 12
    assert pages - set(seen(site / "index.html").navigation) == set()


def test_a_page_fetches_nothing_from_elsewhere(site):
    pages = sorted(site.rglob("*.html"))
    assert len(pages) >= 12
    for page in pages:
        found = seen(page).values
        fetched = [value for tag, name, value in found if (tag, name) in FETCHED]
        assert fetched, page
        assert [value for value in fetched if re.match(r"(\w+:)?//", value)] == [], page
        assert not [value for _, name, value in found if name == "class" and "mermaid" in value], page  # a CDN's
    for sheet in site.rglob("*.css"):
        assert re.findall(r"(?:@import|url\()\s*[\"']?(?:https?:)?//", sheet.read_text()) == [], sheet


def test_files_outside_docs_are_pages_too(site):
    """A link from docs/ to the rest of the repository works on the site as it does in the repository."""
    assert (site / "index.html").read_text().count("repository/bench/RESULTS.html") > 0
    program = (site / "repository" / "examples" / "word_count.py.html").read_text()
    assert "persistentAggregate" in program
    for page in sorted(site.rglob("*.html")):
        if page.name == "404.html":
            continue
        links = [value for tag, name, value in seen(page).values if (tag, name) == ("a", "href")]
        own = {link.partition("#")[0] for link in links if link and not re.match(r"(\w+:)?//|mailto:", link)} - {""}
        assert [link for link in sorted(own) if not (page.parent / link).exists()] == [], page


def test_a_signature_of_the_reference_has_types(site):
    shown = re.sub(r"<[^>]+>", "", (site / "reference" / "streams.html").read_text())
    assert re.search(r"checkpointLocation:\s*str\s*\|\s*None", shown)
