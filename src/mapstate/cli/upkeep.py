"""The commands that maintain a state, swap or remove it, or put it back: from vacuum to rewind."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any

import typer
from msgspec.structs import asdict

from mapstate.backends import opened
from mapstate.cli.arguments import (
    Beside,
    Exact,
    Gone,
    Names,
    State,
    TakeOver,
    Url,
    by_name,
    split_urls,
    states_beside,
    store_url,
    time_of,
)
from mapstate.cli.show import AskingOutput, Output, keys_held, progress, say
from mapstate.errors import UsageError, shown
from mapstate.maps.operator_list import read_list
from mapstate.operations.adopt import FORMER_OWNER, Adopted
from mapstate.operations.adopt import adopt as adopt_state
from mapstate.operations.advance import advance as advance_watermark
from mapstate.operations.checkpoint import query_of
from mapstate.operations.checkpoint import rewind as rewind_checkpoint
from mapstate.operations.doctor import recount as recount_keys
from mapstate.operations.drop import drop as drop_state
from mapstate.operations.swap import keep_only
from mapstate.operations.swap import swap as swap_aliases
from mapstate.operations.vacuum import Vacuumed
from mapstate.operations.vacuum import vacuum as vacuum_state
from mapstate.protocol import ways_back
from mapstate.protocol.ledger import Ledger
from mapstate.protocol.stored_ledger import read_ledger
from mapstate.protocol.upkeep import check_advance
from mapstate.reader import open_reader
from mapstate.reader.aliased import version_of
from mapstate.schema import Field, KeyField, StateType
from mapstate.urls import LIKE_A_URL, quoted
from mapstate.values import plain


def vacuum(
    out: Output,
    *,
    url: Url = None,
    state: State,
    take_over: TakeOver = False,
    beside: Beside = None,
    gone: Gone = None,
) -> None:
    """Rewrites orphaned records and drops empty ones; exit code 1 if a key holds no record. No value changes.

    Run it between two batches.
    """
    place = store_url(url)
    with progress("looking for the ledger", keys_held(place, state)) as update:
        done = vacuum_state(
            *(place, state),
            take_over=take_over,
            beside=states_beside(beside, gone),
            on_page=lambda so_far: update(so_far.scanned, _vacuumed(so_far)),
        )
    end = "there was nothing to do" if done.txid is None else f"committed as txid {done.txid}"
    out.answer(done._asdict(), f"{_vacuumed(done)}; {end}")
    _say_foreign(out, done.unreadable, done.unreadable_keys, " mapstate doctor says what is wrong with the first.")


def _vacuumed(done: Vacuumed) -> str:
    idle = f", {done.idle} idle keys removed" if done.idle else ""
    return f"{done.scanned} records scanned, {done.rewritten} rewritten, {done.dropped} dropped{idle}"


def recount(out: AskingOutput, *, url: Url = None, state: State) -> None:
    """Counts all keys, and writes the number into the ledger. Accepts missing keys as lost."""
    place = store_url(url)
    with progress("counting keys", keys_held(place, state)) as update:
        counted = recount_keys(place, state, dry_run=True, on_page=lambda keys: update(keys, f"{keys} keys read"))
    says = "does not know how many" if counted.held is None else f"says {counted.held}"
    out.note(f"{counted.found} keys are there, and the ledger {says}.")
    written = counted.found != counted.held
    if written:
        accepts = "" if counted.held is None else ", and accept the difference as lost"
        out.confirm(f"Write {counted.found} into the ledger{accepts}?")
        with progress("counting keys once more", lambda: counted.found) as update:
            done = recount_keys(place, state, on_page=lambda keys: update(keys, f"{keys} keys read"))
        out.note(f"Done: the state holds {done.found} keys.")
        counted = counted._replace(found=done.found)
    out.answer({"found": counted.found, "held_before": counted.held, "written": written}, None)


def advance(
    out: AskingOutput,
    *,
    url: Url = None,
    state: State,
    to: Annotated[
        str | None, typer.Option("--to", metavar="TIME", help="the watermark that the next batch has at least")
    ] = None,
    back_to: Annotated[
        str | None,
        typer.Option("--back-to", metavar="TIME", help="put the watermark back: what ends later fires again"),
    ] = None,
    take_over: TakeOver = False,
) -> None:
    """Lets the next batch move the watermark, for a source that has ended: its windows fire, later rows are late.

    Or puts it back, where a wrong time or clock has moved it. Stop the query first.
    """
    if (to is None) == (back_to is None):
        raise UsageError("give --to TIME or --back-to TIME. Nothing was written.")
    place = store_url(url)
    with open_reader(place, state, follow=None) as reader:
        record = reader.ledger()
    back = to is None
    check_advance(record, back=back)
    time = time_of(record, to or back_to)
    planned = advance_watermark(place, state, time, back=back, take_over=take_over, dry_run=True)
    before = "nowhere yet" if planned.watermark is None else plain(planned.watermark)
    effect = (
        "windows that end later and are not gone open and fire again"
        if back
        else "rows for windows before are late"
        if record.rolling is None
        else "rolling windows can be read from then on"
    )
    question = "Put it back" if back else "Let the next batch move it"
    done = "what has fired later is open again" if back else "the next batch takes it, also one without rows"
    out.note(f"The watermark of {state} is {before}. At {plain(time)}, {effect}.")
    out.confirm(f"{question} to {plain(time)}?")
    advance_watermark(place, state, time, back=back, take_over=take_over)
    out.note(f"Done: {done}.")
    out.answer({"watermark": plain(planned.watermark), "to": plain(time)}, None)


def drop(
    out: AskingOutput,
    *,
    url: Url = None,
    state: State,
    force: Annotated[
        bool, typer.Option("--force", help="also with an attempt in flight, or a ledger that cannot be read")
    ] = False,
    exact: Exact = False,
) -> None:
    """Removes a whole state: records, ledger, and all that is stored beside them. Stop the query first."""
    place = store_url(url)
    if not exact and (to := version_of(place, state)) != state:
        raise UsageError(f"readers of {state!r} read {to!r}. Nothing was removed. --exact removes {state!r} itself.")
    record = drop_state(place, state, force=force, dry_run=True).ledger
    if record is None:
        removed = f"State {state!r} has no ledger that can be read. All records under its name will be removed."
    elif record.last_commit is None:
        removed = f"State {state!r} of query {record.owner} will be removed. It counts no batch."
    else:
        batch = f"batch {record.last_commit.batch_id} was committed {record.last_commit.at}."
        removed = f"State {state!r} of query {record.owner} will be removed: {batch}"
    out.note(removed)
    out.note("It cannot be undone. A query that waits for its next batch is not seen here: stop it first.")
    out.confirm("Remove the state?")
    with progress("removing records", lambda: None if record is None else record.keys_held()) as update:
        done = drop_state(
            *(place, state),
            force=force,
            on_page=lambda so_far: update(so_far.records, f"{so_far.records} records removed"),
        )
    counts = {"records": done.records, "foreign": done.foreign, "foreign_keys": done.foreign_keys}
    out.answer(counts, f"Done: {done.records} records removed, and the ledger.")
    _say_foreign(out, done.foreign, done.foreign_keys, "")


def swap(
    out: Output,
    *,
    place: Names,
    to: Annotated[str | None, typer.Option(metavar="VERSION", help="the version to read", show_default=False)] = None,
    back: Annotated[bool, typer.Option("--back", help="the version before the last swap")] = False,
    keep: Annotated[bool, typer.Option("--keep-only", help="let all versions but the present one be dropped")] = False,
    drops: Annotated[list[str], typer.Option(metavar="FIELD", help="a field that readers lose; once for each")] = [],  # noqa: B006
    counted: Annotated[
        list[str],
        typer.Option(metavar="ID", help="a correction whose rows the version's history has; once for each"),
    ] = [],  # noqa: B006
    max_lag: Annotated[
        float | None,
        typer.Option(
            min=0, help="seconds between the last commits, where offsets cannot be compared", show_default=False
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="also to a version that is behind, or lacks corrections")
    ] = False,
    one_by_one: Annotated[
        bool, typer.Option(help="several names, on a store that cannot swap them in one write")
    ] = False,
) -> None:
    """Has the readers of a name read another version of a state. Several: NAME=VERSION NAME=VERSION."""
    urls, words = split_urls(place)
    pairs = by_name("mapstate swap", [(word.partition("=")[0], word.partition("=")[2]) for word in words])
    named = [name for name in pairs.values() if name]
    ways = [to is not None, back, keep, bool(named)]
    if sum(ways) != 1 or not pairs or (named and len(named) < len(pairs)) or (to is not None and len(pairs) > 1):
        raise UsageError("say one of --to VERSION, --back, --keep-only, or NAME=VERSION for each. Nothing was written.")
    url = store_url(urls)
    if keep:
        for record in [keep_only(url, name) for name in pairs]:
            out.answer(record, f"{record.alias} -> {record.to}; no other version is kept.")
        return
    done = swap_aliases(
        *(url, {name: None if back else to or version for name, version in pairs.items()}),
        drops=drops,
        counted=counted,
        max_lag=max_lag,
        force=force,
        one_by_one=one_by_one,
    )
    for record, distance, not_asked in done:
        back_by = f" Back: mapstate swap {record.alias} --back" if record.before else ""
        said = f"{record.alias} -> {record.to} (number {record.number}). {distance[:1].upper()}{distance[1:]}.{back_by}"
        lines = [said, *(f"Not asked: {name}." for name in not_asked)]
        document = {**asdict(record), "distance": distance, "not_asked": not_asked}
        out.answer(document, partial(_say_all, lines))


def _say_all(lines: Sequence[str]) -> None:
    for line in lines:
        say(line)


def adopt(
    out: AskingOutput,
    *,
    url: Url = None,
    state: State,
    type: Annotated[  # noqa: A002  the option's name
        StateType, typer.Option(help="what the topology kept: \\[txid,curr,prev], \\[txid,val], or the bare value")
    ],
    key: Annotated[list[str], typer.Option(help="a key column, 'user_id string'; once for each")],
    field: Annotated[list[str], typer.Option(help="an aggregate, 'visits=Count bigint'; once for each")],
    checkpoint: Annotated[
        str | None,
        typer.Option(help="of the query whose state lost its ledger: a directory, also s3a://", show_default=False),
    ] = None,
    serializer: Annotated[str, typer.Option(help="how the records are written")] = "json",
) -> None:
    """Gives a ledger to records of storm-redis, or of a state that lost its ledger. Stop their writer first."""
    owner = None if checkpoint is None else query_of(checkpoint)
    schema: dict[str, Any] = {"type": type, "keys": list(map(_key, key)), "fields": list(map(_field, field))}
    schema |= {"owner": owner, "serializer": serializer}
    place = store_url(url)
    with progress("reading records") as update:
        records = adopt_state(
            *(place, state),
            **schema,
            dry_run=True,
            on_page=lambda so_far: update(so_far.records, _adopted(so_far)),
        )
    if owner is None:
        out.note(f"{_adopted(records)}. All of it will count.")
        stopped = "The topology that wrote them has to be stopped, its last batch complete"
        out.note(f"{stopped}: what it writes later is lost.")
    else:
        out.note(f"{_adopted(records)}. What the batch reports do not name as committed will not count.")
    out.confirm("Is it stopped, and shall the state get a ledger?")
    with progress("reading records once more", lambda: records.records) as update:
        done = adopt_state(*(place, state), **schema, on_page=lambda so_far: update(so_far.records, _adopted(so_far)))
    after = "Start the query again from its checkpoint; mapstate rewind, if it asks."
    if owner is None:
        owner, after = FORMER_OWNER, f"It belongs to {FORMER_OWNER!r}: start the job once with on_new_owner='adopt'."
    out.answer({**done._asdict(), "owner": owner}, f"Done: {_adopted(done)}. {after}")


def rollback(out: AskingOutput, *, url: Url = None, state: State) -> None:
    """Takes the last batch back. The checkpoint has to be rewound with it. Or a correction, if nothing followed it."""
    with opened(store_url(url), state) as store:
        record = read_ledger(store, state)
        ways_back.rollback_last(record)  # refuses before anybody is asked
        done = ways_back.last_correction(record)
        if done is not None:
            entry = read_list(store, record)[-1]
            out.note(
                f"The correction {entry.id!r} (txid {done.txid}, {entry.rows} rows, of {entry.at}) will not count."
            )
            out.confirm("Take it back?")
            Ledger(store, state).rollback(done.txid)
            answer = {"correction": entry.id, "txid": done.txid}
            out.answer(answer, "Done: its id is free again. The checkpoint stays as it is.")
            return
        last = record.last_commit
        assert last is not None  # noqa: S101  rollback refuses a ledger without one
        batch = f"Batch {last.batch_id} (txid {last.txid}, {last.rows} rows, committed {last.at}) will not count."
        out.note(batch)
        stop = "Stop the query first, and rewind its checkpoint afterwards: mapstate rewind URL STATE CHECKPOINT"
        out.note(stop)
        out.confirm("Take it back?")
        after = Ledger(store, state).rollback(last.txid)
    due = after.owners[after.owner]
    taken = {"batch_id": last.batch_id, "txid": last.txid, "next_batch_id": due}
    out.answer(taken, f"Done: the state waits for batch {due}.")


def rewind(
    out: AskingOutput,
    *,
    url: Url = None,
    state: State,
    checkpoint: Annotated[
        str, typer.Argument(metavar="CHECKPOINT", help="a directory: PATH, s3a://BUCKET/PATH", show_default=False)
    ],
) -> None:
    """Rewinds a streaming checkpoint to the ledger, after a rollback or a restored store. Stop the query first."""
    place = store_url(url)
    done = rewind_checkpoint(place, state, checkpoint, dry_run=True)
    if done.moved:
        out.note(f"The next batch will be {done.batch_id}. These go aside: {', '.join(done.moved)}")
        out.confirm("Is the query stopped, and shall they?")
        done = rewind_checkpoint(place, state, checkpoint)
    text = f"Nothing to do: the checkpoint's next batch is {done.batch_id}, as the state expects."
    if done.moved:
        text = f"Done: the next batch is {done.batch_id}. What was removed is in {done.to}"
    rewound = {"next_batch_id": done.batch_id, "moved": done.moved, "to": None if done.to is None else str(done.to)}
    out.answer(rewound, text)


def _adopted(done: Adopted) -> str:
    txid = "" if done.last_txid is None else f", the highest txid is {done.last_txid}"
    return f"{done.records} records found{txid}"


def _key(text: str) -> KeyField:
    name, _, kind = text.partition(" ")
    if not name or not kind or LIKE_A_URL.search(text):
        raise UsageError(f"a key column is a name and a Spark type, such as 'user_id string', not {quoted(text)}")
    return KeyField(name, kind.strip())


def _field(text: str) -> Field:
    parts = re.fullmatch(r"([^=\s]+)=(.+) (\S+)", text)
    if parts is None or LIKE_A_URL.search(text):
        raise UsageError(
            "an aggregate is name=Aggregator and the type it accumulates, such as 'visits=Count bigint', not "
            f"{quoted(text)}"
        )
    return Field(*parts.groups())


def _say_foreign(out: Output, count: int, keys: Sequence[str], more: str) -> None:
    if count:
        named = ", ".join(map(shown, keys))
        others = f" and {count - len(keys)} more" if count > len(keys) else ""
        out.fail(f"{count} keys are no records of this state, and were left as they are: {named}{others}.{more}")
