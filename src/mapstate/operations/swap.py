"""Swap the version of a state that readers of a name read: for an operator, without Spark. See docs/life.md."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import cache
from typing import Any, NamedTuple

from mapstate.backends import check_state_name, opened
from mapstate.backing_map import Backend
from mapstate.capabilities import FenceToken, LedgerStore, ListsStates, Swap
from mapstate.errors import CorruptRecordError, StateNotFoundError, UsageError, shown
from mapstate.maps.operator_list import ListEntry, of_kind, read_list
from mapstate.protocol import alias
from mapstate.protocol.alias import ALIAS_SUFFIX, AliasRecord, decode_alias, encode_alias, is_alias
from mapstate.protocol.ledger_record import DROPPER, LedgerRecord
from mapstate.protocol.ledgers import commit_domains
from mapstate.protocol.stored_ledger import decode_ledger
from mapstate.protocol.ways_back import behind_by


class Swapped(NamedTuple):
    """A swap that was done: the alias, how far both versions were, and what it did not ask or compare, in words."""

    record: AliasRecord
    distance: str
    not_asked: tuple[str, ...]


def swap(
    backend_or_url: Backend | str,
    to: Mapping[str, str | None],
    *,
    drops: Sequence[str] = (),
    counted: Sequence[str] = (),
    max_lag: float | None = None,
    force: bool = False,
    one_by_one: bool = False,
) -> list[Swapped]:
    """Have the readers of each name in ``to`` read another version, from their next look at the alias on.

    A version of None is the one before the last swap. All names are swapped in one write, where the store can. The
    ledgers are compared in that write, too; on a store without `JointLedgers` a batch may come in between.

    Args:
        backend_or_url: The store of all versions.
        to: The version for each name.
        drops: Fields that the new versions need not have.
        counted: Ids of corrections that the new versions need not have, because their history has the rows.
        max_lag: Where offsets cannot be compared, seconds that the new version's last commit may be older than the old
            one's.
        force: Do not compare how far they are, nor which corrections they have.
        one_by_one: Swap in one write for each name where the store has no other.

    Raises:
        UsageError: A condition is not met. Nothing was written; without `JointLedgers` the alias may keep the version.
        StateNotFoundError: There is no such version.
        StoreError: The store failed. A swap may be written or not.

    """
    with ExitStack() as stack:
        stores: dict[str, Any] = {}

        def store_of(name: str) -> Any:
            if name not in stores:
                stores[name] = stack.enter_context(opened(backend_or_url, name))
            return stores[name]

        places = [store_of(check_state_name(f"{name}{ALIAS_SUFFIX}")) for name in to]
        if not all(isinstance(place, LedgerStore) for place in places):
            raise UsageError("the store has no compare-and-set, so it has no aliases. Nothing was written.")
        if len(commit_domains(places)) > 1 and not one_by_one:
            raise UsageError(
                "this store cannot change several aliases in one write. Nothing was written. --one-by-one swaps one "
                "after the other, so for a moment readers of two names may read versions that do not belong together."
            )
        asked = _Asked(drops, counted, max_lag, force)
        done: list[Swapped] = []
        parts = [list(to)] if len(commit_domains(places)) == 1 else [[name] for name in to]
        for name in to if len(parts) > 1 else ():  # what one refuses stops all
            _planned(store_of, lambda name: store_of(name).load(), name, to[name], asked)
        for part in parts:
            while True:  # another turn means that an alias was swapped, or a batch came, meanwhile
                load = cache(lambda name: store_of(name).load())  # a version may be of two names
                planned = [_planned(store_of, load, name, to[name], asked) for name in part]
                swaps = {swap.store: swap for each in planned for swap in each.swaps}
                wanted, keeping = list(swaps.values()), list[Swap]()
                stores_of = [swap.store for swap in wanted]
                if len(commit_domains(stores_of)) > 1:
                    # A drop asks for what is kept after its first write, and the ledgers are read again after this one.
                    keeping = [each.keeping for each in planned if each.keeping is not None]
                    wanted = keeping or [each.swaps[0] for each in planned]
                first = wanted[0].store
                written = first.swap(*wanted[0][1:]) if len(wanted) == 1 else first.swap_all(wanted)
                if written is not None and not keeping:
                    break
            apart = (
                ["a batch that came between the comparison and the write"] if len(commit_domains(stores_of)) > 1 else []
            )
            done += [Swapped(each.record, each.distance, (*each.not_asked, *apart)) for each in planned]
        return done


class _Asked(NamedTuple):
    """What an operator lets a swap pass over, see `swap`."""

    drops: Sequence[str]
    counted: Sequence[str]
    max_lag: float | None
    force: bool


class _Planned(NamedTuple):
    """``keeping`` is the write by which the alias keeps the version first; None if it does."""

    record: AliasRecord
    distance: str
    not_asked: list[str]
    swaps: list[Swap]
    keeping: Swap | None


def _planned(store_of: Any, load: Any, name: str, to: str | None, asked: _Asked) -> _Planned:
    place = store_of(f"{name}{ALIAS_SUFFIX}")
    stored = place.load()
    record = None if stored is None else decode_alias(stored[0], name)
    present = name if record is None else record.to
    if to is None:
        to = None if record is None else record.before
        if to is None:
            raise UsageError(
                f"no version before {present!r} is kept for {name!r}: name one, --to. Nothing was written."
            )
    old, new = load(present), load(check_state_name(to))
    if new is None:
        raise StateNotFoundError(f"there is no state {to!r} here. Nothing was written.", state=to)
    after = alias.swap(record, name, to, None if old is None else present)
    ledger = complete(decode_ledger(new[0], to))

    def written(record: AliasRecord) -> Swap:
        version = None if stored is None else stored[1]
        return Swap(place, encode_alias(record), version, FenceToken(0, record.number, closed=True))

    swaps = [written(after), Swap(store_of(to), new[0], new[1], ledger.fence())]
    said, not_asked = "there was no state of this name before", list[str]()
    if old is not None:
        before = decode_ledger(old[0], present)
        _check_schema(before, ledger, asked.drops)
        lists = read_list(store_of(present), before), read_list(store_of(to), ledger)
        _check_forgotten(before, lists[0], ledger, lists[1], force=asked.force)
        _check_corrected(before, lists[0], ledger, lists[1], asked)
        said = distance(before, ledger, asked.max_lag, force=asked.force)
        swaps.append(Swap(store_of(present), old[0], old[1], before.fence()))
        not_asked = _not_asked(before, ledger)
    is_kept = record is not None and to in record.keeps
    return _Planned(after, said, not_asked, swaps, None if is_kept else written(alias.keep(record, name, to)))


def _not_asked(old: LedgerRecord, new: LedgerRecord) -> list[str]:
    """What a swap does not know of two versions whose ledgers it has compared."""
    kinds = [{field.name: f"{field.aggregator} {field.type}" for field in version.fields} for version in (old, new)]
    others = [
        f"{name} ({kind}, now {kinds[1][name]})" for name, kind in kinds[0].items() if kinds[1].get(name, kind) != kind
    ]
    last = None if new.last_commit is None else new.last_commit.at
    return [
        f"whether values are equal (mapstate compare {old.state} {new.state})",
        *([f"whether readers know the other meaning of {', '.join(others)}"] if others else []),
        f"whether the job of {new.state} goes on: it last committed {last or 'at an unknown time'}",
    ]


def complete(ledger: LedgerRecord) -> LedgerRecord:
    """The ledger of a version that readers may get. Raises UsageError."""
    is_leaving = ledger.session.startswith(DROPPER)
    if is_leaving or ledger.seed is not None or ledger.last_commit is None:
        obstacle = "is being removed" if is_leaving else "is being seeded" if ledger.seed else "counts no batch"
        raise UsageError(f"state {ledger.state!r} {obstacle}, so readers would find nothing. Nothing was written.")
    return ledger


def _check_schema(old: LedgerRecord, new: LedgerRecord, drops: Sequence[str]) -> None:
    """Raise UsageError where readers of the old version would fail at the new one."""
    if old.keys != new.keys or old.time_type != new.time_type or not _has_same_windows(old, new):
        columns, other = (", ".join(f"{key.name} {key.type}" for key in version.keys) for version in (old, new))
        raise UsageError(
            f"{new.state!r} has the key columns ({other}) and {old.state!r} has ({columns}), or other windows, another "
            "startTime or less lag and retention: readers would fail. Nothing was written. Give readers another name "
            "instead."
        )
    lacking = sorted(_shown(old) - _shown(new) - {*drops})
    if lacking:
        raise UsageError(
            f"{new.state!r} lacks {', '.join(lacking)}, which readers of {old.state!r} may use. Nothing was written. "
            f"If nobody does: {' '.join(f'--drops {name}' for name in lacking)}"
        )


def _has_same_windows(old: LedgerRecord, new: LedgerRecord) -> bool:
    """Whether a window of a name, or of a time, is the same span of time in both, and each end can be asked for."""
    if old.rolling is not None and new.rolling is not None:
        kept, other = old.rolling.definition, new.rolling.definition
        if kept.offset != other.offset or kept.lag + kept.retention > other.lag + other.retention:
            return False
    if old.windows is None or new.windows is None:
        rolling = [() if version.rolling is None else version.rolling.definition.windows for version in (old, new)]
        known, other_windows = ({window.name: window for window in windows} for windows in rolling)
        return old.windows is new.windows and all(
            other_windows.get(name, window) == window for name, window in known.items()
        )
    return old.windows.definition.is_same(new.windows.definition)


def uncorrected(old: Iterable[ListEntry], new: Iterable[ListEntry]) -> list[str]:
    """The ids of corrections in the list of one version that the list of another one lacks, or has of other rows."""
    has = {(entry.id, entry.digest) for entry in of_kind(new, "correction").values()}
    return [entry.id for entry in of_kind(old, "correction").values() if (entry.id, entry.digest) not in has]


def _check_corrected(
    old: LedgerRecord, known: Sequence[ListEntry], new: LedgerRecord, has: Sequence[ListEntry], asked: _Asked
) -> None:
    """Raise UsageError where the new version may lack rows by which the old one was corrected."""
    lacking = [name for name in uncorrected(known, has) if name not in asked.counted]
    if lacking and not asked.force:
        raise UsageError(
            f"{new.state!r} lacks corrections of {old.state!r}, or has other rows under their ids: "
            f"{', '.join(map(shown, lacking))}. Nothing was written. Correct it with the same rows and ids; --counted "
            "ID where its history has the rows; --force swaps anyway."
        )


def _check_forgotten(
    old: LedgerRecord, known: Sequence[ListEntry], new: LedgerRecord, has_done: Sequence[ListEntry], *, force: bool
) -> None:
    """Raise UsageError where the new version may hold keys that the old one has forgotten."""
    done = {(entry.id, entry.digest): entry for entry in has_done if entry.purged is not None}
    lacking = []
    for entry in of_kind(known, "forget").values():
        has = done.get((entry.id, entry.digest))
        behind = [""] if has is None else behind_by(entry.offsets, has.offsets)
        if behind or (behind is None and not force):
            lacking.append(shown(entry.id))
    if lacking:
        raise UsageError(
            f"{new.state!r} has not forgotten what {old.state!r} has, under the id {', '.join(lacking)}, or had not "
            "come as far then: readers could see it again. Nothing was written. Give it the list, once it has caught "
            f"up: mapstate forget {old.state} --export FILE, then mapstate forget {new.state} --from FILE. Where "
            "offsets cannot be compared, --force takes it as it is."
        )


def _shown(ledger: LedgerRecord) -> set[str]:
    """The names of fields and rolling windows."""
    windows = () if ledger.rolling is None else ledger.rolling.definition.windows
    return {field.name for field in ledger.fields} | {window.name for window in windows}


def distance(old: LedgerRecord, new: LedgerRecord, max_lag: float | None, *, force: bool) -> str:
    """How far both versions are, in words. Raises UsageError where the new one is behind, unless by ``force``."""
    last, newest = old.last_commit, new.last_commit
    if last is None or newest is None:
        return f"{old.state!r} counts no batch"
    behind = behind_by(last.offsets, newest.offsets)
    if behind is None and max_lag is not None and last.at and newest.at:
        lag = (dt.datetime.fromisoformat(last.at) - dt.datetime.fromisoformat(newest.at)).total_seconds()
        said = f"last committed {lag:.1f} s {'before' if lag > 0 else 'or less before'} {old.state!r}"
        behind = [said] if lag > max_lag else []
    if behind:
        said = f"{new.state!r} is behind {old.state!r}: {', '.join(behind)}"
    elif behind is None:
        said = f"the offsets of {new.state!r} and {old.state!r} cannot be compared"
    else:
        return "not behind"
    if not force:
        way = "--max-lag SECONDS compares the times of the last commits" if behind is None else "wait until it is not"
        raise UsageError(f"{said}: readers may go back. Nothing was written. {way.capitalize()}; --force swaps anyway.")
    return f"{said}; swapped by --force"


def keep_only(backend_or_url: Backend | str, name: str) -> AliasRecord:
    """Keep the version that readers read, and let the others be dropped: they can go back to none. One write.

    Raises UsageError where the name has no alias, CorruptRecordError, StoreError.
    """
    with opened(backend_or_url, f"{name}{ALIAS_SUFFIX}") as store:
        while True:
            stored = store.load() if isinstance(store, LedgerStore) else None
            if stored is None:
                raise UsageError(f"{name!r} has no alias here. Nothing was written. mapstate ls lists them.")
            record = alias.keep_only(decode_alias(stored[0], name))
            if store.swap(encode_alias(record), stored[1], FenceToken(0, record.number, closed=True)) is not None:
                return record


def aliases_of(backend: Backend, version: str) -> list[str]:
    """The names whose alias keeps a version, or cannot be read. Lists the store; errors as of `list_states`."""
    if not isinstance(backend, ListsStates):
        return []
    names = []
    for page in backend.states():
        for place, data in page:
            name = place.removesuffix(ALIAS_SUFFIX)
            if is_alias(data) and name != place:
                try:
                    names += [name] if version in decode_alias(data, name).keeps else []
                except CorruptRecordError:
                    names.append(name)
    return names
