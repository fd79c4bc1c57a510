"""Forget: removes keys from a state so that no replay brings them back. `Forgotten.not_reached` says what is left.

An operator runs it between two batches. The first attempt gives each key no value, and lists the key by its keyed hash
with the position of the state in its source. The second one removes the records, which still have the value before, and
what else names the keys. A store of `Scrubs` then removes what it keeps underneath. Each step can be repeated.

A state that is not opaque keeps no value before: there the first attempt removes the records.
"""

from __future__ import annotations

import datetime as dt
import itertools
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec

from mapstate.backends import opened
from mapstate.backing_map import Backend
from mapstate.capabilities import FencedWrites, Rewrites, Scrubs
from mapstate.errors import FencedError, UsageError, check_range, cut, shown
from mapstate.keys import KeyCodec, StoreKey, is_index_key
from mapstate.maps.change_log import ChangeLog, is_of_log, logged_txid
from mapstate.maps.operator_list import (
    ListedKeys,
    ListEntry,
    check_id,
    digest_of,
    is_of_list,
    left_of,
    of_kind,
    read_list,
    write_entries,
)
from mapstate.maps.pane_index import batched, index_codec
from mapstate.maps.record_pass import CodecWithIndex
from mapstate.maps.serialized import writer_of
from mapstate.operations.vacuum import check_able, check_beside
from mapstate.protocol.ledger import Ledger
from mapstate.protocol.ledger_record import Attempt, LedgerRecord, now
from mapstate.protocol.stored_ledger import check_page_size, read_ledger, record_pages
from mapstate.protocol.upkeep import begin_operator
from mapstate.protocol.ways_back import behind_by
from mapstate.protocol.windows import PaneChange
from mapstate.schema import KeyField
from mapstate.serializers import record_codec
from mapstate.waiting import pause

T = TypeVar("T")

FOLLOWERS_HAVE = 86_400.0
"""Seconds after which those who follow a state have read that a key was removed."""

_time = dt.datetime.fromisoformat
_WRITE = 1000  # records at a time
_PAUSE = 0.05  # seconds
_OTHERS = (
    "the source and its topics",
    "exports, backups and snapshots of the store",
    "quarantined rows, and the checkpoint of the query",
    "sinks, and states that follow this one",
)


class Forgotten(NamedTuple):
    """The end of a forget in one state.

    ``keys``         how many keys had a value
    ``txid``         of the attempt that has removed it
    ``offsets``      where the state was in its source: rows before that are forgotten. None if it is not known
    ``was_done``     it had been done before, under the same id
    ``log_until``    the change log names the keys until then, ISO 8601: run it again. None without a log, or if done
    ``not_reached``  where bytes of the keys may still be
    """

    state: str
    keys: int
    txid: int
    offsets: str | None
    was_done: bool
    log_until: str | None
    not_reached: tuple[str, ...]


def forget(
    backend_or_url: Backend | str,
    state: str,
    where: Mapping[str, Any],
    *,
    id: str,  # noqa: A002  as the command has it
    salt: str | None = None,
    followers_have: float = FOLLOWERS_HAVE,
    beside: Sequence[tuple[Backend | str | None, str]] = (),
    page_size: int = 1000,
) -> Forgotten:
    """Make a state forget all keys with these values. Run it between two batches; again with the same id, it goes on.

    Rows that are read later begin such a key from nothing.

    Args:
        backend_or_url: The store of the state.
        state: The state's name.
        where: Values by the names of key columns: all keys that have them. The time of a window is not among them.
        id: The operator's name for it, such as that of a ticket.
        salt: The key of the hash, 32 hexadecimal digits: the same for states whose lists are to be compared, as those
            of two versions are. Else that of the state's first entry, or a new one.
        followers_have: Seconds after which followers have read of the removal. Later, a call with the same id removes
            the change log up to there, and who is further behind gets a ChangesGoneError.
        beside: States that are committed apart, or follow in another store: each with its store, or None if it is gone.
        page_size: Keys listed at a time.

    Raises:
        UsageError: A batch is in flight; the state has no such columns; no id, or that of other keys; a state of
            ``beside`` lacks the last batch; or the store can neither refuse late writers nor list its keys.
        ConfigurationError: ``followers_have`` is no number of seconds.
        FencedError: A batch began meanwhile, or a state that follows has still to get the last one. Run it again.
        StateNotFoundError: There is no such state.
        StoreError: The store failed. Run it again.

    """

    def wanted(ledger: LedgerRecord, known: Sequence[ListEntry]) -> dict[int, ListEntry]:
        columns, parts = _columns(ledger, where)
        own_kind = of_kind(known, "forget")
        for number, entry in own_kind.items():
            if entry.id != id:
                continue
            if (entry.columns, entry.digest) != (columns, digest_of(entry.salt, columns, parts)):
                raise UsageError(
                    f"state {state!r} has forgotten other keys under the id {id!r}, as txid {entry.txid}. Nothing was "
                    "written. Take another id."
                )
            return {number: entry}
        used = salt or next((entry.salt for entry in own_kind.values()), None) or new_salt()
        return {
            len(known): ListEntry(id=id, at=now(), columns=columns, salt=used, digest=digest_of(used, columns, parts))
        }

    check_id("forget", id, salt)
    with opened(backend_or_url, state) as store:
        (done,) = _Forgetting(store, backend_or_url, state, followers_have, beside, page_size=page_size).run(wanted)
        return done


def forget_listed(
    backend_or_url: Backend | str,
    state: str,
    entries: Sequence[ListEntry],
    *,
    followers_have: float = FOLLOWERS_HAVE,
    beside: Sequence[tuple[Backend | str | None, str]] = (),
    page_size: int = 1000,
) -> list[Forgotten]:
    """Make a state forget what `listed` says: one that was restored from a copy, or another version of the state.

    While the state counts fewer batches than the listed one did, batches bring keys back: call it again once it has
    caught up. It is refused where it cannot tell how far another version had come when it did so before. Entries that
    the state has from then are left alone. Arguments and errors as of `forget`.
    """

    def wanted(ledger: LedgerRecord, known: Sequence[ListEntry]) -> dict[int, ListEntry]:
        last = ledger.last_commit
        here = {} if last is None else {"owner": last.owner, "batch_id": last.batch_id}
        places = {entry.id: number for number, entry in of_kind(known, "forget").items()}
        following = itertools.count(len(known))
        listed: dict[int, ListEntry] = {}
        for entry in entries:
            if entry.id not in places:
                places[entry.id] = next(following)
            number = places[entry.id]
            has = known[number] if number < len(known) else None
            if not set(entry.columns) <= {field.name for field in _forgettable(ledger)}:
                raise _no_columns(ledger, entry.columns)
            if has is None or _is_due(ledger.state, has, entry, here):
                listed[number] = msgspec.structs.replace(entry, txid=None, purged=None, at=now())
            elif has.purged is None:
                listed[number] = has
        return listed

    with opened(backend_or_url, state) as store:
        return _Forgetting(store, backend_or_url, state, followers_have, beside, page_size=page_size).run(wanted)


def when_caught_up(
    backend_or_url: Backend | str, state: str, ends: str, do: Callable[[], T], *, wait: float = 600.0
) -> T:
    """Call ``do``, which its id makes repeatable, once the query has come as far as ``ends`` and no batch is in flight.

    Rows before these offsets, a list of JSON as a ledger has it, are forgotten, too. A batch that begins meanwhile
    fences ``do``, which is then called again, for ``wait`` seconds.

    Raises:
        UsageError: The offsets cannot be compared, or the query is not there in time; and as ``do``.
        StoreError: The store failed.

    """
    until, problem = time.monotonic() + wait, None
    with opened(backend_or_url, state) as store:
        while True:
            seen = read_ledger(store, state)
            last, attempt = seen.last_commit, seen.in_flight
            behind = ["it counts no batch"] if last is None else behind_by(ends, last.offsets)
            if behind is None:
                raise UsageError(
                    f"state {state!r} has offsets that cannot be compared with {cut(ends)}: nothing tells when it has "
                    "caught up. Nothing was written. Stop the query behind its last batch, and forget then."
                )
            is_at_work = attempt is not None and attempt.batch_id is not None and attempt.epoch == seen.epoch
            if not behind and not is_at_work:
                try:
                    return do()
                except (FencedError, UsageError) as error:
                    if isinstance(error, UsageError) and read_ledger(store, state) == seen:
                        raise
                    problem = error  # a batch began meanwhile, and may have been committed since
            if time.monotonic() > until:
                why = ", ".join(behind) or ("a batch is in flight" if problem is None else problem.message.rstrip("."))
                raise UsageError(
                    f"after {wait:g} s state {state!r} has not caught up, or has always a batch in flight: {why}. See "
                    "that its query runs, and give --wait SECONDS. Again with the same id it goes on."
                ) from problem
            pause(_PAUSE)


def _is_due(state: str, has: ListEntry, entry: ListEntry, here: dict[str, Any]) -> bool:
    """Whether what the state has done under an id does not reach as far as ``entry``, which comes from a list."""
    if (has.columns, has.digest) != (entry.columns, entry.digest):
        raise UsageError(
            f"state {state!r} has forgotten other keys under the id {entry.id!r}, or the same by another hash. Nothing "
            "was written. Forget the keys in all states at one time, with --where and a new id, and list them anew."
        )
    if has.reaches(entry) or has.reaches(msgspec.structs.replace(entry, **here)):
        return False
    if has.owner == entry.owner:
        return True
    behind = behind_by(entry.offsets, has.offsets)
    if behind is None:
        raise UsageError(
            f"state {state!r} has done {entry.id!r} before, and its offsets cannot be compared with those of the list: "
            "rows that came since would be forgotten, too. Nothing was written. Take the entry out of the list if the "
            "state had caught up then; else forget the keys by hand, under a new id."
        )
    return bool(behind)


def new_salt() -> str:
    """A key for hashes."""
    return secrets.token_hex(16)


def listed(
    backend_or_url: Backend | str, state: str, kind: Literal["forget", "correction"] = "forget"
) -> list[ListEntry]:
    """What a state has forgotten: the operators' ids, and keys as keyed hashes. Or its corrections. It only reads.

    Keep it outside of the store: after a restore from an older copy, `forget_listed` applies it. Corrections have to be
    called again then, with their ids and rows.
    """
    with opened(backend_or_url, state) as store:
        return list(of_kind(read_list(store, read_ledger(store, state)), kind).values())


def _forgettable(ledger: LedgerRecord) -> tuple[KeyField, ...]:
    """The key columns without the time of a window."""
    return ledger.keys if ledger.windows is None else ledger.keys[1:]


def forgettable_columns(backend_or_url: Backend | str, state: str) -> tuple[KeyField, ...]:
    """The key columns by which a state can forget. It only reads."""
    with opened(backend_or_url, state) as store:
        return _forgettable(read_ledger(store, state))


def _columns(ledger: LedgerRecord, where: Mapping[str, Any]) -> tuple[tuple[str, ...], list[str]]:
    """The names of the given columns in the order of the state's own, and the texts of their values."""
    fields = [field for field in _forgettable(ledger) if field.name in where]
    if not where or len(fields) < len(where):
        raise _no_columns(ledger, tuple(where))
    return tuple(field.name for field in fields), [KeyCodec([key]).encode_first(where[key.name]) for key in fields]


def _no_columns(ledger: LedgerRecord, asked: Sequence[str]) -> UsageError:
    has = ", ".join(field.name for field in _forgettable(ledger)) or "none"
    return UsageError(
        f"state {ledger.state!r} cannot forget by {', '.join(map(shown, asked)) or 'no column'}: its key columns are "
        f"{has}. Nothing was written."
    )


class _Found(NamedTuple):
    """What the store has of some keys: their ``own`` records, those of a pane index and blocks, and the change log."""

    own: list[StoreKey]
    shared: list[StoreKey]
    log: list[StoreKey]


class _Forgetting:
    """The way of one call."""

    def __init__(
        self,
        store: Any,
        place: Backend | str,
        state: str,
        followers_have: float,
        beside: Sequence[tuple[Backend | str | None, str]],
        *,
        page_size: int,
    ) -> None:
        self._store, self._place = store, place
        check_range("followers_have", followers_have, 0.0, unit=" of seconds")
        self._followers_have = followers_have
        self._beside = beside
        self._page_size = page_size
        check_able(store, state, "forget")
        check_page_size(page_size)
        read_ledger(store, state)  # raises the better error if there is no ledger
        self._ledger = Ledger(store, state)
        self._removes = isinstance(store, FencedWrites)  # else a late writer could make a removed record anew

    def run(self, wanted: Callable[[LedgerRecord, Sequence[ListEntry]], dict[int, ListEntry]]) -> list[Forgotten]:
        seen = self._ledger.remember()
        entries = wanted(seen, read_list(self._store, seen))
        was_done = {number for number, entry in entries.items() if entry.purged is not None}
        new = {number: entry for number, entry in entries.items() if entry.txid is None}
        if new:
            self._check(seen)
            entries |= self._first(seen, new)
            seen = self._ledger.remember()
        entries |= self._second(seen, entries)
        left = ["what the store keeps underneath of records that were replaced or removed"] if entries else []
        if entries and isinstance(self._store, Scrubs):
            left = [*self._store.scrub()]
        if not self._removes:
            left.append("the names of the keys: this store keeps a record without a value for each")
        changes = self._ledger.record.changes
        done = []
        for number, entry in entries.items():
            assert entry.txid is not None  # noqa: S101  for the type checker: `_first` has set it
            logged = changes is not None and changes.removed <= entry.txid
            until = _time(entry.at) + dt.timedelta(seconds=self._followers_have) if logged else None
            many = [f"values of the field {name}" for name in _of_many(seen)]
            others = (*left, *many, *_OTHERS)
            until_text = None if until is None else until.isoformat(timespec="seconds")
            done.append(
                Forgotten(seen.state, entry.keys, entry.txid, entry.offsets, number in was_done, until_text, others)
            )
        return done

    def _check(self, seen: LedgerRecord) -> None:
        """Refuse before anything is listed or written."""
        begin_operator(seen, "", "forget")
        check_beside(seen, self._place, self._beside, "forget")
        if seen.type != "opaque" and not self._removes:
            raise UsageError(
                f"state {seen.state!r} is {seen.type}, and its store cannot remove records so that no late writer "
                "makes them anew. Nothing was written. Remove the state (mapstate drop), and replay the source."
            )

    def _first(self, seen: LedgerRecord, new: dict[int, ListEntry]) -> dict[int, ListEntry]:
        """List the entries, and give their keys no value."""
        survey = self._survey(seen, listed := ListedKeys(seen.keys, new.values()))
        attempt = self._ledger.begin_operator("forget", seen=seen)
        at_once = seen.type != "opaque"
        last, gone, count, blocks = seen.last_commit, list[StoreKey](), 0, record_codec(seen).blocks
        with writer_of(self._store, attempt.token, has_txids=seen.type != "non-transactional") as writer:
            if at_once:
                count = self._purge(writer, seen, attempt, survey, listed)
            # A pane that named a key without a value would have lost a record: both change at once.
            for keys, values in self._values(writer, seen, attempt, [] if at_once else [*survey.own, *survey.shared]):
                there = {key: value for key, value in zip(keys, values, strict=True) if value is not None}
                left = [left_of(blocks, listed, key, value) for key, value in there.items()]
                gone += [text for _, texts in left for text in texts]
                records = [(attempt.txid, part, there[key]) for key, (part, _) in zip(there, left, strict=True)]
                self._put(writer, seen, [*there], records)
            count += len(gone)
            has_log = bool(seen.changes is not None and seen.changes.kept and gone)
            if has_log:
                form = index_codec(seen.serializer, seen.state)
                log = ChangeLog(writer, form, attempt.view, attempt.txid, 0)
                log.note(gone)
                log.write()
            done = {
                number: msgspec.structs.replace(
                    entry,
                    txid=attempt.txid,
                    owner="" if last is None else last.owner,
                    batch_id=None if last is None else last.batch_id,
                    offsets=None if last is None else last.offsets,
                    keys=count,
                    purged=attempt.txid if at_once else None,
                )
                for number, entry in new.items()
            }
            write_entries(writer, seen, attempt, done)
        held = seen.keys_held()
        if seen.type == "non-transactional" and seen.in_flight is not None:
            held = None  # a failed attempt may have added some
        self._ledger.commit_forget(
            attempt.txid,
            operations=max([seen.operations or 0, *(number + 1 for number in new)]),
            held=None if held is None else held - count,
            log=PaneChange(width=int(has_log)),
        )
        return done

    def _second(self, seen: LedgerRecord, entries: dict[int, ListEntry]) -> dict[int, ListEntry]:
        """Remove what still names the keys of these entries, if there is anything."""
        due = {number: entry for number, entry in entries.items() if entry.purged is None}
        late = dt.datetime.now(dt.UTC) - dt.timedelta(seconds=self._followers_have)
        past = [entry.txid for entry in entries.values() if entry.txid is not None and _time(entry.at) <= late]
        log_from = max(past, default=-1) + 1
        if seen.changes is None or log_from <= seen.changes.removed:
            log_from = 0
        if not due and not log_from:
            return {}
        self._check(seen)
        keys = ListedKeys(seen.keys, due.values())
        survey = self._survey(seen, keys, log_from)
        attempt = self._ledger.begin_operator("forget", seen=seen, log_from=log_from)
        with writer_of(self._store, attempt.token, has_txids=seen.type != "non-transactional") as writer:
            self._purge(writer, seen, attempt, survey, keys)
            done = {number: msgspec.structs.replace(entry, purged=attempt.txid) for number, entry in due.items()}
            write_entries(writer, seen, attempt, done)
        removed = PaneChange(purged=[log_from - 1] if log_from else [])
        held = seen.keys_held()
        self._ledger.commit_forget(attempt.txid, operations=seen.operations or 0, held=held, log=removed)
        return done

    def _survey(self, seen: LedgerRecord, keys: ListedKeys, log_from: int = 0) -> _Found:
        """What the store has of some keys, under the ledger ``seen``, and the change log below ``log_from``."""
        survey, codec, blocks = _Found([], [], []), CodecWithIndex(seen), record_codec(seen).blocks
        for page in record_pages(self._store, self._page_size, index=True):
            survey.own.extend(key for key in page if blocks is None and not is_index_key(key) and key in keys)
            survey.log.extend(key for key in page if is_of_log(key) and logged_txid(key) < log_from)
            shared = [key for key in page if blocks is not None or is_index_key(key)]
            for some in batched([key for key in shared if not is_of_log(key) and not is_of_list(key)], _WRITE):
                records = codec.loads(some, self._store.multi_get(some))
                for key, record in zip(some, records, strict=True):
                    if record is not None and any(
                        part is not None and left_of(blocks, keys, key, part)[0] != part for part in record[1:]
                    ):
                        survey.shared.append(key)
        return _Found(*(list(dict.fromkeys(part)) for part in survey))  # a scan may list a key twice

    def _purge(self, writer: Any, seen: LedgerRecord, attempt: Attempt, survey: _Found, keys: ListedKeys) -> int:
        """Remove records without a value, and values before; return how many keys had a value.

        Of a state that is not opaque, all records of the keys are removed.
        """
        count, txid, blocks = 0, attempt.txid, record_codec(seen).blocks
        for some, values in self._values(writer, seen, attempt, [*survey.own, *survey.shared]):
            kept = values  # of an opaque state its first attempt took the keys: one that is there has come back
            if seen.type != "opaque":
                pairs = zip(some, values, strict=True)
                left = [(None, []) if value is None else left_of(blocks, keys, key, value) for key, value in pairs]
                count += sum(len(texts) for _, texts in left)
                kept = [part for part, _ in left]
            self._put(writer, seen, some, [(txid, value, value) for value in kept])
        for some in batched(survey.log, _WRITE):
            writer.multi_get(some)  # a put belongs to the get before it
            self._put(writer, seen, some, [(txid, None, None)] * len(some))
        return count

    def _values(
        self, writer: Any, seen: LedgerRecord, attempt: Attempt, keys: Sequence[StoreKey]
    ) -> Iterator[tuple[list[StoreKey], list[Any]]]:
        """The keys, some at a time, with their values by the one rule."""
        for some in batched(keys, _WRITE):
            records = CodecWithIndex(seen).loads(some, writer.multi_get(some))
            if seen.type == "opaque":
                yield some, attempt.view.values(records, attempt.txid)
            else:
                is_pair = seen.type == "transactional"
                pairs = zip(some, records, strict=True)
                yield (
                    some,
                    [record and (record[1] if is_pair or is_index_key(key) else record) for key, record in pairs],
                )

    def _put(self, writer: Any, seen: LedgerRecord, keys: Sequence[StoreKey], records: Sequence[Any]) -> None:
        """Replace records; one without any value goes, where the store can remove."""
        if not keys:
            return
        if self._removes and isinstance(writer, Rewrites):
            there = [i for i, record in enumerate(records) if any(value is not None for value in record[1:])]
            data = CodecWithIndex(seen).dumps([keys[i] for i in there], [records[i] for i in there])
            stored = dict(zip(there, data, strict=True))
            writer.multi_rewrite(keys, [stored.get(i) for i in range(len(keys))])
        else:
            writer.multi_put(keys, CodecWithIndex(seen).dumps(keys, records))


def _of_many(ledger: LedgerRecord) -> Iterator[str]:
    """The fields that hold values of many rows, which may name the keys of others."""
    return (field.name for field in ledger.fields if any(kind in field.type for kind in ("array", "map", "any")))
