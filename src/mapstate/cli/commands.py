"""The commands, one function each. They parse and print; `mapstate.operations` does the work."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from mapstate.backends import resolve
from mapstate.batch_report import BatchReport
from mapstate.capabilities import close_if_possible
from mapstate.cli.group import Command, CommandGroup
from mapstate.cli.show import say, show_findings, show_ledger, show_reports
from mapstate.errors import CorruptRecordError, StoreError, UsageError, shown
from mapstate.operations.adopt import FORMER_OWNER, Adopted
from mapstate.operations.adopt import adopt as adopt_state
from mapstate.operations.checkpoint import query_of
from mapstate.operations.checkpoint import rewind as rewind_checkpoint
from mapstate.operations.doctor import examine
from mapstate.operations.doctor import recount as recount_keys
from mapstate.operations.drop import drop as drop_state
from mapstate.operations.vacuum import Vacuumed
from mapstate.operations.vacuum import vacuum as vacuum_state
from mapstate.protocol import transitions
from mapstate.protocol.ledger import Ledger
from mapstate.protocol.stored_ledger import read_ledger
from mapstate.reader import StateReader, open_reader
from mapstate.schema import Field, KeyField, StateType
from mapstate.spec import check_state_name
from mapstate.urls import LIKE_A_URL

__all__ = ["app"]

app = typer.Typer(
    cls=CommandGroup,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,  # which would show local variables, and a URL among them
    help="Shows a mapstate state, cleans it up, and rolls it and its checkpoint back.",
)

Url = Annotated[  # a list, because the arguments behind it are filled first; see `Command`
    list[str] | None,
    typer.Argument(
        metavar="URL",
        help="the store: redis://..., sqlite:///..., or @FILE, a file with the URL. By default the variable "
        "MAPSTATE_URL, which other users of the machine do not see, unlike an argument",
        show_default=False,
    ),
]
State = Annotated[str, typer.Argument(metavar="STATE", help="the state's name", show_default=False)]
AsJson = Annotated[bool, typer.Option("--json", help="for a program")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="do not ask")]

_URL_VARIABLE = "MAPSTATE_URL"
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


@app.command(cls=Command)
def ledger(*, url: Url = None, state: State, as_json: AsJson = False) -> None:
    """Shows the ledger, and the last hundred batches."""
    with open_reader(_store_url(url), state) as reader:
        record, reports = reader.ledger(), _reports(reader)
    if as_json:
        shown = {"ledger": record, "keys_held": record.keys_held(), "reports": reports}
        typer.echo(json.dumps(msgspec.to_builtins(shown)))  # in ASCII
        return
    console = _console()
    show_ledger(console, record)
    if reports is not None:
        console.print()
        show_reports(console, reports)


@app.command(cls=Command)
def doctor(
    *,
    url: Url = None,
    state: State,
    replay_horizon: Annotated[
        str, typer.Option(help="how long after a batch it may have to be repeated: 90s, 30m, 12h, 1d")
    ] = "1d",
    count_keys: Annotated[
        bool, typer.Option(help="read all records, and compare their number with the ledger's")
    ] = True,
    as_json: AsJson = False,
) -> None:
    """Examines the state and its store for trouble; exit code 1 for an error."""
    findings = examine(_store_url(url), state, replay_horizon=_seconds(replay_horizon), count_keys=count_keys)
    if as_json:
        typer.echo(json.dumps([finding._asdict() for finding in findings]))
    else:
        show_findings(_console(), findings)
    if any(finding.severity == "error" for finding in findings):
        raise typer.Exit(1)


@app.command(cls=Command)
def vacuum(
    *,
    url: Url = None,
    state: State,
    take_over: Annotated[
        bool, typer.Option("--take-over", help="leave an attempt in flight behind; fences its driver")
    ] = False,
    beside: Annotated[
        list[str] | None,
        typer.Option(
            metavar="URL#STATE", help="a state of the same topology in another store; once for each", show_default=False
        ),
    ] = None,
) -> None:
    """Rewrites orphaned records and drops empty ones; exit code 1 if a key holds no record. No value changes.

    Run it between two batches.
    """
    console, store_url = _console(), _store_url(url)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("looking for the ledger", total=None)
        done = vacuum_state(
            *(store_url, state),
            take_over=take_over,
            beside=[_beside(text) for text in beside or ()],
            on_page=lambda so_far: progress.update(task, description=_vacuumed(so_far)),
        )
    end = "there was nothing to do" if done.txid is None else f"committed as txid {done.txid}"
    say(f"{_vacuumed(done)}; {end}")
    _say_foreign(done.unreadable, done.unreadable_keys, " mapstate doctor says what is wrong with the first.")


@app.command(cls=Command)
def recount(*, url: Url = None, state: State, yes: Yes = False) -> None:
    """Counts all keys, and writes the number into the ledger. Accepts missing keys as lost."""
    store_url = _store_url(url)
    counted = recount_keys(store_url, state, dry_run=True)
    says = "does not know how many" if counted.held is None else f"says {counted.held}"
    say(f"{counted.found} keys are there, and the ledger {says}.")
    if counted.found == counted.held:
        return
    if not yes:
        accepts = "" if counted.held is None else ", and accept the difference as lost"
        typer.confirm(f"Write {counted.found} into the ledger{accepts}?", abort=True)
    done = recount_keys(store_url, state)
    say(f"Done: the state holds {done.found} keys.")


@app.command(cls=Command)
def drop(
    *,
    url: Url = None,
    state: State,
    force: Annotated[
        bool, typer.Option("--force", help="also with an attempt in flight, or a ledger that cannot be read")
    ] = False,
    yes: Yes = False,
) -> None:
    """Removes a whole state: records, ledger, and all that is stored beside them. Stop the query first."""
    store_url = _store_url(url)
    record = drop_state(store_url, state, force=force, dry_run=True).ledger
    if record is None:
        say(f"State {state!r} has no ledger that can be read. All records under its name will be removed.")
    elif record.last_commit is None:
        say(f"State {state!r} of query {record.owner} will be removed. It counts no batch.")
    else:
        last = record.last_commit
        say(f"State {state!r} of query {record.owner} will be removed: batch {last.batch_id} was committed {last.at}.")
    say("It cannot be undone. A query that waits for its next batch is not seen here: stop it first.")
    if not yes:
        typer.confirm("Remove the state?", abort=True)
    console = _console()
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("removing records", total=None)
        done = drop_state(
            *(store_url, state),
            force=force,
            on_page=lambda so_far: progress.update(task, description=f"{so_far.records} records removed"),
        )
    say(f"Done: {done.records} records removed, and the ledger.")
    _say_foreign(done.foreign, done.foreign_keys, "")


@app.command(cls=Command)
def rollback(*, url: Url = None, state: State, yes: Yes = False) -> None:
    """Takes the last batch back. The checkpoint has to be rewound with it."""
    store: Any = resolve(_store_url(url)).open(check_state_name(state))
    try:
        record = read_ledger(store, state)
        transitions.rollback(record)  # refuses before anybody is asked
        last = record.last_commit
        assert last is not None  # noqa: S101  rollback refuses a ledger without one
        say(f"Batch {last.batch_id} (txid {last.txid}, {last.rows} rows, committed {last.at}) will not count.")
        say("Stop the query first, and rewind its checkpoint afterwards: mapstate rewind URL STATE CHECKPOINT")
        if not yes:
            typer.confirm("Take it back?", abort=True)
        after = Ledger(store, state).rollback(last.txid)
    finally:
        close_if_possible(store)
    say(f"Done: the state waits for batch {after.owners[after.owner]}.")


@app.command(cls=Command)
def rewind(
    *,
    url: Url = None,
    state: State,
    checkpoint: Annotated[str, typer.Argument(metavar="CHECKPOINT", help="a local directory", show_default=False)],
    yes: Yes = False,
) -> None:
    """Rewinds a streaming checkpoint to the ledger, after a rollback or a restored store. Stop the query first."""
    store_url = _store_url(url)
    if LIKE_A_URL.search(checkpoint) and not checkpoint.startswith("file:") and not Path(checkpoint).exists():
        raise UsageError("CHECKPOINT is a local directory; what was given looks like a URL, and is not shown")
    planned = rewind_checkpoint(store_url, state, checkpoint, dry_run=True)
    if not planned.moved:
        say(f"Nothing to do: the checkpoint's next batch is {planned.batch_id}, as the state expects.")
        return
    say(f"The next batch will be {planned.batch_id}. These go aside: {', '.join(planned.moved)}")
    if not yes:
        typer.confirm("Is the query stopped, and shall they?", abort=True)
    done = rewind_checkpoint(store_url, state, checkpoint)
    say(f"Done: the next batch is {done.batch_id}. What was removed is in {done.to}")


def _reports(reader: StateReader) -> list[BatchReport] | None:
    """The reports; None if they cannot be read, which does not keep the ledger from being shown."""
    try:
        return reader.reports()
    except (CorruptRecordError, StoreError) as error:
        say(f"mapstate: the batch reports are not shown: {error.message}", err=True)
        return None


@app.command(cls=Command)
def adopt(
    *,
    url: Url = None,
    state: State,
    type: Annotated[  # noqa: A002  the option's name
        StateType, typer.Option(help="what the topology kept: [txid,curr,prev], [txid,val], or the bare value")
    ],
    key: Annotated[list[str], typer.Option(help="a key column, 'user_id string'; once for each")],
    field: Annotated[list[str], typer.Option(help="an aggregate, 'visits=Count bigint'; once for each")],
    checkpoint: Annotated[
        str | None, typer.Option(help="of the query whose state lost its ledger: a local directory", show_default=False)
    ] = None,
    serializer: Annotated[str, typer.Option(help="how the records are written")] = "json",
    yes: Yes = False,
) -> None:
    """Gives a ledger to records of storm-redis, or of a state that lost its ledger. Stop their writer first."""
    owner = None if checkpoint is None else query_of(checkpoint)
    schema: dict[str, Any] = {"type": type, "keys": list(map(_key, key)), "fields": list(map(_field, field))}
    schema |= {"owner": owner, "serializer": serializer}
    console, store_url = _console(), _store_url(url)
    with Progress(SpinnerColumn(), TextColumn("{task.description}"), console=console, transient=True) as progress:
        task = progress.add_task("reading records", total=None)
        records = adopt_state(
            *(store_url, state),
            **schema,
            dry_run=True,
            on_page=lambda so_far: progress.update(task, description=_adopted(so_far)),
        )
    if owner is None:
        say(f"{_adopted(records)}. All of it will count.")
        say("The topology that wrote them has to be stopped, its last batch complete: what it writes later is lost.")
    else:
        say(f"{_adopted(records)}. What the batch reports do not name as committed will not count.")
    if not yes:
        typer.confirm("Is it stopped, and shall the state get a ledger?", abort=True)
    done = adopt_state(store_url, state, **schema)
    if owner is not None:
        say(f"Done: {_adopted(done)}. Start the query again from its checkpoint; mapstate rewind, if it asks.")
        return
    say(f"Done: {_adopted(done)}. It belongs to {FORMER_OWNER!r}: start the job once with on_new_owner='adopt'.")


def _store_url(url: list[str] | None) -> str:
    """The store's URL, from the argument, the variable, or a file that it names. Raises UsageError."""
    store_url = url[0] if url else os.environ.get(_URL_VARIABLE, "")
    if not store_url:
        raise UsageError(
            f"there is no URL. Put it into the environment variable {_URL_VARIABLE}, or in front of the state's name: "
            "mapstate COMMAND URL STATE"
        )
    if not store_url.startswith("@"):
        return store_url
    try:
        return Path(store_url[1:]).read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        file = "a file" if LIKE_A_URL.search(store_url) else f"the file {store_url[1:]!r}"
        problem = f"the URL cannot be read out of {file}: {getattr(error, 'strerror', None) or 'it is no text'}"
    raise UsageError(problem)  # outside the except block, because the context would hold the file's text


def _say_foreign(count: int, keys: Sequence[str], more: str) -> None:
    """Exit with 1 if keys hold no record of the state."""
    if not count:
        return
    named = ", ".join(map(shown, keys))
    others = f" and {count - len(keys)} more" if count > len(keys) else ""
    say(
        f"mapstate: {count} keys are no records of this state, and were left as they are: {named}{others}.{more}",
        err=True,
    )
    raise typer.Exit(1)


def _beside(text: str) -> tuple[str, str]:
    url, _, name = text.rpartition("#")
    if not url or not name:
        raise UsageError("a state beside this one is its store and its name, URL#STATE, such as sqlite:///b.db#by_page")
    return _store_url([url]), name


def _key(text: str) -> KeyField:
    name, _, kind = text.partition(" ")
    if not name or not kind or LIKE_A_URL.search(text):
        raise UsageError(f"a key column is a name and a Spark type, such as 'user_id string', not {_quoted(text)}")
    return KeyField(name, kind.strip())


def _field(text: str) -> Field:
    parts = re.fullmatch(r"([^=\s]+)=(.+) (\S+)", text)
    if parts is None or LIKE_A_URL.search(text):
        raise UsageError(
            "an aggregate is name=Aggregator and the type it accumulates, such as 'visits=Count bigint', not "
            f"{_quoted(text)}"
        )
    return Field(*parts.groups())


def _quoted(text: str) -> str:
    return "a URL, which is not shown" if LIKE_A_URL.search(text) else repr(text)


def _adopted(done: Adopted) -> str:
    txid = "" if done.last_txid is None else f", the highest txid is {done.last_txid}"
    return f"{done.records} records found{txid}"


def _console() -> Console:
    console = Console()
    return console if console.is_terminal else Console(width=200)


def _vacuumed(done: Vacuumed) -> str:
    return f"{done.scanned} records scanned, {done.rewritten} rewritten, {done.dropped} dropped"


def _seconds(text: str) -> float:
    parts = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text)
    if parts is None:
        raise UsageError(f"a replay horizon is a number and a unit, such as 90s, 30m, 12h or 1d, not {_quoted(text)}")
    return float(parts[1]) * _UNITS[parts[2]]
