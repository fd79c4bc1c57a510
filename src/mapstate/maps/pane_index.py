r"""The pane index: which keys a pane has, for the firing and the purge of windows.

It is made of ordinary records of the state, under the same one rule and the same fence::

    \P|pane|partition        head: [number of full chunks, keys of the open chunk ...]
    \P|pane|partition|n      a full chunk: [keys ...]
    \P|@level|start          a page: [[first, last] ...], the panes, or the pages below, that there are in its span

A key stands there without its pane. A task writes heads of its own partition only, so no two tasks write one head,
however keys are spread from batch to batch. No encoded key begins with ``\P``. There are pages once the ledger would
name too many runs of panes; the driver writes them before the commit, see `PanePages`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple, TypeVar

from mapstate.errors import KeyEncodingError, StoreLostError
from mapstate.keys import INDEX, KeyCodec, StoreKey, contains_none, is_index_key
from mapstate.maps.opaque import OpaqueMap, replace_all
from mapstate.maps.serialized import SerializedMap
from mapstate.protocol.ledger_record import LedgerRecord
from mapstate.protocol.records import CommitView
from mapstate.protocol.windows import (
    MOST_RUNS,
    NEVER,
    PaneChange,
    Panes,
    Runs,
    WindowCommit,
    WindowsRecord,
    every_pane,
    runs_with,
    runs_without,
)
from mapstate.schema import Field, number_of, time_of
from mapstate.serializers import NativeSerializer, RecordCodec, serializer

CHUNK_KEYS = 200
"""Keys in a full chunk, at most."""

CHUNK_TEXT = 64 * 1024
"""Characters in a full chunk, more or less."""

_FIELDS = (Field("keys", "PaneIndex", "any"),)
T = TypeVar("T")

_HEADS = 1000  # read at a time
_CHUNKS = 20

Read = Callable[[list[str]], list[Any]]
"""Reads index records: the committed value of each key, None where there is none."""


def index_codec(form: str, state: str) -> RecordCodec:
    """The codec of index records, of a state with the serializer ``form``."""
    return RecordCodec(serializer(form), state, "opaque", _FIELDS, ((0, 1),))


def pane_of(key: StoreKey) -> tuple[str, str]:
    """The text of a key's pane, and the rest of the key. No pane's text has a ``|``."""
    pane, _, rest = str(key).partition("|")
    return pane, rest


def store_key(pane: str, rest: str, *, is_native_integer: bool) -> StoreKey:
    """The key of a pane and a rest, as `pane_of` gives them; the rest is empty where there are no other key columns."""
    if rest:
        return f"{pane}|{rest}"
    return int(pane) if is_native_integer else pane


def is_native_integer(record: LedgerRecord) -> bool:
    """Whether the store keeps the keys of a state as numbers."""
    return record.serializer == NativeSerializer.name and len(record.keys) == 1 and record.keys[0].type == "bigint"


class PaneKeys:
    """The keys of a state's panes, as the store has them."""

    def __init__(self, record: LedgerRecord) -> None:
        self._codec = KeyCodec(record.keys[:1])
        self._type = record.keys[0].type
        self._is_int = is_native_integer(record)

    def text(self, pane: int) -> str:
        """The pane as its keys begin."""
        return self._codec.encode_first(time_of(pane, self._type))

    def of(self, pane: str, rests: Iterable[str]) -> list[StoreKey]:
        """The keys in a pane, given as `text` returns it."""
        return [store_key(pane, rest, is_native_integer=self._is_int) for rest in rests]


def windows_of_ledger(record: LedgerRecord) -> WindowsRecord:
    """What a ledger says of the state's windows."""
    if record.windows is None:
        raise AssertionError("the ledger of a state with windows says which")
    return record.windows


class _GonePanes:
    """The keys whose windows are all gone, under one ledger. A purge may have removed some of them already."""

    def __init__(self, ledger: LedgerRecord, committed: WindowCommit | None) -> None:
        self._windows = windows_of_ledger(ledger)
        self._committed = committed
        self._codec = KeyCodec(ledger.keys[:1])
        self._known: dict[str, bool] = {}

    def __contains__(self, key: StoreKey) -> bool:
        if is_index_key(key):
            return False
        pane, _ = pane_of(key)
        if pane not in self._known:
            self._known[pane] = self._is_gone(pane)
        return self._known[pane]

    def _is_gone(self, pane: str) -> bool:
        try:
            (time,) = self._codec.decode(pane)
        except KeyEncodingError:
            return False  # a key that another program wrote
        return time is not None and self._windows.is_expired(number_of(time), self._committed)


def without_gone(
    ledger: LedgerRecord, committed: WindowCommit | None, keys: Sequence[StoreKey], values: Sequence[Any]
) -> list[Any]:
    """The values as of ``committed``, None for keys of gone windows: no reader sees a window half purged."""
    if ledger.windows is None:
        return list(values)
    gone = _GonePanes(ledger, committed)
    return [None if key in gone else value for key, value in zip(keys, values, strict=True)]


class Slice(NamedTuple):
    """One partition's keys of a pane: the number of ``full`` chunks, and in ``rests`` the keys of the open chunk."""

    pane: str
    partition: int
    full: int
    rests: Sequence[str]

    @property
    def most_keys(self) -> int:
        return self.full * CHUNK_KEYS + len(self.rests)


def index_keys(part: Slice) -> list[str]:
    """The keys of a slice's own records, the head last: a purge that is killed can be walked again."""
    head = _head(part.pane, part.partition)
    return [*(f"{head}|{i}" for i in reversed(range(part.full))), head]


def slices(read: Read, panes: Iterable[str], width: int, *, first: int = 0) -> Iterator[Slice]:
    """The slices of some panes, pane by pane, of the partitions from ``first`` up to ``width``. Reads heads in bulk."""
    places = ((pane, partition) for pane in panes for partition in range(first, width))
    for some in batched(places, _HEADS):
        heads = read([_head(*place) for place in some])
        for place, head in zip(some, heads, strict=True):
            if head is not None:
                yield Slice(*place, head[0], head[1:])


def key_pages(read: Read, part: Slice, on_lost: Callable[[str], None] | None = None) -> Iterator[list[str]]:
    """The rests of all keys of a slice, a page at a time. ``on_lost`` is called with a chunk that has no record."""
    head = _head(part.pane, part.partition)
    for some in batched(range(part.full), _CHUNKS):
        names = [f"{head}|{at}" for at in some]
        chunks = read(names)
        if on_lost is not None and None in chunks:
            on_lost(names[chunks.index(None)])
        yield [rest for chunk in chunks for rest in chunk or ()]
    if part.rests:
        yield list(part.rests)


def index_lost(state: str, chunk: str) -> StoreLostError:
    """The error for a chunk that its head counts and that has no record, though no purge has removed it."""
    return StoreLostError(
        f"state {state!r}: {chunk!r}, a part of the index of a pane, has no record: it was evicted, expired or "
        "deleted. Restore the store, and rewind the checkpoint to it.",
        state=state,
    )


def record_lost(state: str, pane: str, rest: str) -> StoreLostError:
    """The error for a key, or a block, that the index of a pane names and that has no record, without a purge."""
    return StoreLostError(
        f"state {state!r}: the index of the pane {pane} names the key {rest!r}, which has no record: it was evicted, "
        "expired or deleted. Restore the store, and rewind the checkpoint to it.",
        state=state,
    )


class PaneIndex:
    """The new keys of one task, by pane: those for which the one rule finds no value. Collects and writes them."""

    def __init__(self, writer: Any, codec: RecordCodec, view: CommitView, txid: int, partition: int) -> None:
        self._state: OpaqueMap[Any] = OpaqueMap(SerializedMap(writer, codec), view, written_once=True)
        self._state.begin_commit(txid)
        self.txid = txid
        self._partition = partition
        self.new: dict[str, list[str]] = {}

    def note(self, keys: Sequence[StoreKey], bases: Sequence[Any], partials: Sequence[Any] = ()) -> None:  # noqa: ARG002
        """The keys of a chunk, with their values before the batch."""
        if not contains_none(bases):
            return
        for key, base in zip(keys, bases, strict=True):
            if base is None:
                pane, rest = pane_of(key)
                self.new.setdefault(pane, []).append(rest)

    def write(self) -> None:
        """Puts full chunks and heads, each once. At the end of the task."""
        for panes in batched(self.new, _HEADS):
            heads = [_head(pane, self._partition) for pane in panes]
            keys: list[str] = []
            values: list[Any] = []
            for pane, head, base in zip(panes, heads, self._state.multi_get(heads), strict=True):
                full, *rests = base or (0,)
                for chunk, is_full in _chunks([*rests, *self.new[pane]]):
                    keys.append(f"{head}|{full}" if is_full else head)
                    values.append(chunk if is_full else [full, *chunk])
                    full += is_full
            self._state.multi_combine(keys, values, replace_all)


class PanePages:
    """The panes of a state, named by its ledger, or by pages beside it once it has more than `MOST_RUNS` runs."""

    def __init__(self, state: str, windows: WindowsRecord, read: Read) -> None:
        self._state = state
        self._windows = windows
        self._grid = windows.definition.panes
        self._read = read

    def named(self, since: int = NEVER, until: int | None = None, level: int = 0) -> Iterator[int]:
        """See `Named`; or the pages of a level. Raises StoreLostError for a page that is named and has no record."""
        runs = self._windows.panes
        for above in range(self._windows.height, level, -1):
            spans = self._grid.pages(above)
            pages = self._pages(above, every_pane(spans, runs, since - spans.length + 1, until))
            runs = tuple(run for page in pages.values() for run in page)
        return every_pane(self._grid.pages(level), runs, since, until)

    def changed(self, change: PaneChange) -> tuple[PaneChange, dict[str, tuple[Any, Any]]]:
        """A change with what the ledger names after it, and by key the pages to write: their runs after and before."""
        added, removed, height = sorted(change.written), sorted(change.purged), self._windows.height
        written: dict[str, tuple[Any, Any]] = {}
        lower, old = self._grid, self._windows.panes
        for level in range(1, height + 1):
            upper = self._grid.pages(level)
            more = _cut(lower, upper, runs_with(lower, (), added))
            touched = sorted({*more, *map(upper.start, removed)})
            known = set(self.named(touched[0], touched[-1] + 1, level)) if touched else set()
            pages = self._pages(level, [start for start in touched if start in known])
            joined = {start: (*pages.get(start, ()), *more.get(start, ())) for start in touched}
            after = {start: runs_without(lower, runs_with(lower, runs, ()), removed) for start, runs in joined.items()}
            written |= _changed(
                level, pages, {start: runs for start, runs in after.items() if runs != pages.get(start)}
            )
            added, removed = ([start for start in touched if bool(after[start]) is kept] for kept in (True, False))
            lower = upper
        runs = runs_without(lower, runs_with(lower, old, added), removed)
        while len(runs) > MOST_RUNS:
            height, upper = height + 1, self._grid.pages(height + 1)
            pages, after = _cut(lower, upper, old), _cut(lower, upper, runs)
            written |= _changed(height, pages, dict.fromkeys(pages, ()) | after)
            lower, old, runs = upper, runs_with(upper, (), pages), runs_with(upper, (), after)
        return change._replace(named=(height, runs)), written

    def _pages(self, level: int, starts: Iterable[int]) -> dict[int, Runs]:
        pages: dict[int, Runs] = {}
        for some in batched(starts, _HEADS):
            keys = [_page_key(level, start) for start in some]
            for start, key, page in zip(some, keys, self._read(keys), strict=True):
                if page is None:
                    raise index_lost(self._state, key)
                pages[start] = tuple((first, last) for first, last in page)
        return pages


def _cut(panes: Panes, spans: Panes, runs: Runs) -> dict[int, Runs]:
    cut: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for first, last in runs:
        for start in range(spans.start(first), last + 1, spans.length):
            cut[start].append((max(first, start), min(last, panes.before(start + spans.length))))
    return {start: tuple(runs) for start, runs in cut.items()}


def _changed(level: int, before: Mapping[int, Runs], after: Mapping[int, Runs]) -> dict[str, tuple[Any, Any]]:
    """Pages as `PanePages.changed` gives them out. One that is new reads as empty if its batch is rolled back."""
    lists = {start: ([*map(list, runs)], [*map(list, before.get(start, ()))]) for start, runs in after.items()}
    return {_page_key(level, start): (runs or None, was) for start, (runs, was) in lists.items()}


def _page_key(level: int, start: int) -> str:
    return f"{INDEX}@{level}|{start}"


def _chunks(rests: list[str]) -> Iterator[tuple[list[str], bool]]:
    """Chunks, each with whether it is full; only the last one is not, and it may be empty."""
    chunk: list[str] = []
    size = 0
    for rest in rests:
        chunk.append(rest)
        size += len(rest)
        if len(chunk) == CHUNK_KEYS or size >= CHUNK_TEXT:
            yield chunk, True
            chunk, size = [], 0
    yield chunk, False


def _head(pane: str, partition: int) -> str:
    return f"{INDEX}{pane}|{partition}"


def batched(items: Iterable[T], most: int) -> Iterator[list[T]]:
    """The items, at most so many at a time."""
    rest = iter(items)
    while some := list(islice(rest, most)):
        yield some
