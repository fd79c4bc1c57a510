"""The pane index: after any attempts, those that count and those that do not, it names the keys that count."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mapstate.maps import pane_index
from mapstate.maps.pane_index import PaneIndex, index_codec, index_keys, key_pages, pane_of, slices, store_key
from mapstate.protocol.records import CommitView

CODEC = index_codec("json", "s")
attempts = st.lists(
    st.tuples(st.booleans(), st.lists(st.tuples(st.sampled_from("pq"), st.sampled_from("abcdefgh")), max_size=12)),
    max_size=6,
)


class Records(dict[str, Any]):
    """A store of records, by key."""

    def multi_get(self, keys):
        return [self.get(key) for key in keys]

    def multi_put(self, keys, values):
        self.update(zip(keys, values, strict=True))


def keys_by_pane(store, view, newest, width):
    """Every key that the index names, as often as it names it."""

    def read(keys):
        return view.values(CODEC.loads(keys, store.multi_get(keys)), newest)

    return sorted(
        (part.pane, rest) for part in slices(read, ["p", "q"], width) for page in key_pages(read, part) for rest in page
    )


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch):
    monkeypatch.setattr(pane_index, "CHUNK_KEYS", 3)


@given(attempts, st.randoms(use_true_random=False))
def test_the_index_names_each_key_that_counts_once(played, chance: random.Random):
    store, counted, dead, last, width = Records(), set(), [], None, 3
    for txid, (counts, rows) in enumerate(played):
        view = CommitView(last, dead)
        groups = [[], [], []]
        for place in dict.fromkeys(rows):
            groups[chance.randrange(width)].append(place)
        for partition, places in enumerate(groups):
            index = PaneIndex(store, CODEC, view, txid, partition)
            # Two chunks, as a task has them.
            for some in (places[:2], places[2:]):
                keys = [store_key(*place, is_native_integer=False) for place in some]
                index.note(keys, [1 if place in counted else None for place in some])
            index.write()
        if counts:
            low = 0 if last is None else last + 1
            dead += [(low, txid - 1)] if low < txid else []
            last = txid
            counted |= set(rows)
        assert keys_by_pane(store, CommitView(last, dead), txid, width) == sorted(counted)


def test_a_purge_removes_a_head_behind_its_chunks():
    store = Records()
    index = PaneIndex(store, CODEC, CommitView(None), 0, 4)
    index.note([f"p|{rest}" for rest in "abcdefgh"], [None] * 8)
    index.write()
    view = CommitView(0)
    (part,) = slices(lambda keys: view.values(CODEC.loads(keys, store.multi_get(keys)), 0), ["p"], 5)
    assert (part.full, list(part.rests)) == (2, ["g", "h"])
    assert part.most_keys == 8
    assert index_keys(part) == ["\\P|p|4|1", "\\P|p|4|0", "\\P|p|4"]
    assert sorted(index_keys(part)) == sorted(store)


@pytest.mark.parametrize(
    ("key", "pane", "rest"), [("7|a|b", "7", "a|b"), ("2026-01-01T00:00:00.000000Z", "2026-01-01T00:00:00.000000Z", "")]
)
def test_a_key_is_its_pane_and_its_rest(key, pane, rest):
    assert pane_of(key) == (pane, rest)
    assert store_key(pane, rest, is_native_integer=False) == key


def test_a_pane_alone_may_be_an_integer_key():
    assert pane_of(-20) == ("-20", "")
    assert store_key("-20", "", is_native_integer=True) == -20
