"""examples/word_count.py, page_visits.py and reach.py, each against a count that owes it nothing."""

import re
from collections import Counter
from importlib import util
from pathlib import Path

import pytest

from mapstate import open_reader

ROOT = Path(__file__).resolve().parents[2]
AVAILABLE = {"availableNow": True}

pytestmark = pytest.mark.spark


def _load(name):
    spec = util.spec_from_file_location(name, ROOT / f"examples/{name}.py")
    module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_word_count(spark, tmp_path):
    word_count = _load("word_count")
    texts = tmp_path / "texts"
    texts.mkdir()
    (texts / "a.txt").write_text("Hello the man said\nthe\n\n")
    url = f"memory://{tmp_path.name}"
    job = word_count.word_counts(spark.readStream.text(str(texts)), url)
    job.start(tmp_path / "checkpoint", trigger=AVAILABLE).awaitTermination()
    (texts / "b.txt").write_text("the man on the moon\nwhere are you?\n")
    job.start(tmp_path / "checkpoint", trigger=AVAILABLE).awaitTermination()
    said = Counter(re.findall(r"\w+", "".join(path.read_text() for path in texts.glob("*.txt")).lower()))
    with open_reader(url, "word_counts") as state:
        assert {word: value["count"] for (word,), value in state.scan()} == said
    assert word_count.ask(spark, url, "man where you the nobody") == (
        {"man": 2, "where": 1, "you": 1, "the": 4, "nobody": None},
        8,
    )


def test_page_visits(spark, tmp_path):
    page_visits = _load("page_visits")
    visits = tmp_path / "visits"
    visits.mkdir()
    url, alerts = f"memory://{tmp_path.name}", []
    stream = spark.readStream.schema("user string, page string").csv(str(visits))
    job = page_visits.page_visits(stream, url, 3, lambda user, n: alerts.append((user, n)))
    users = ["a", "b", "a"], ["a", "a", "c"], ["b", "a", "c"]
    for at, batch in enumerate(users):
        (visits / f"{at}.csv").write_text("".join(f"{user},/{at}\n" for user in batch))
        job.start(tmp_path / "checkpoint", trigger=AVAILABLE).awaitTermination()
    assert alerts == [("a", 4)]
    by_user = Counter(user for batch in users for user in batch)
    with open_reader(url, "users_by_visits") as state:
        assert {n: value["users"] for (n,), value in state.scan()} == Counter(by_user.values())


def test_reach(spark, capsys, monkeypatch):
    reach = _load("reach")
    monkeypatch.setattr(reach.SparkSession.builder.__class__, "getOrCreate", lambda _: spark)
    reach.main()
    expected = {}
    for url in ("foo.com/blog/1", "engineering.twitter.com/blog/5"):
        names = {name for tweeted, name in reach.TWEETS if tweeted == url}
        expected[url] = len({follower for person, follower in reach.FOLLOWS if person in names})
    assert expected["foo.com/blog/1"] == 16  # as Trident's own example says
    assert eval(capsys.readouterr().out) == expected
