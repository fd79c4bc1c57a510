"""The commands that put a state or its checkpoint back: rollback, rewind."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from mapstate.backends import opened
from mapstate.cli.arguments import AsJson, State, Url, Yes, store_url
from mapstate.cli.show import confirm, emit, say
from mapstate.errors import UsageError
from mapstate.operations.checkpoint import Rewound
from mapstate.operations.checkpoint import rewind as rewind_checkpoint
from mapstate.protocol import ways_back
from mapstate.protocol.ledger import Ledger
from mapstate.protocol.stored_ledger import read_ledger
from mapstate.urls import LIKE_A_URL


def rollback(*, url: Url = None, state: State, yes: Yes = False, as_json: AsJson = False) -> None:
    """Takes the last batch back. The checkpoint has to be rewound with it."""
    with opened(store_url(url), state) as store:
        record = read_ledger(store, state)
        ways_back.rollback(record)  # refuses before anybody is asked
        last = record.last_commit
        assert last is not None  # noqa: S101  rollback refuses a ledger without one
        batch = f"Batch {last.batch_id} (txid {last.txid}, {last.rows} rows, committed {last.at}) will not count."
        say(batch, err=as_json)
        stop = "Stop the query first, and rewind its checkpoint afterwards: mapstate rewind URL STATE CHECKPOINT"
        say(stop, err=as_json)
        confirm("Take it back?", yes=yes, as_json=as_json)
        after = Ledger(store, state).rollback(last.txid)
    due = after.owners[after.owner]
    if as_json:
        emit({"batch_id": last.batch_id, "txid": last.txid, "next_batch_id": due})
    else:
        say(f"Done: the state waits for batch {due}.")


def rewind(
    *,
    url: Url = None,
    state: State,
    checkpoint: Annotated[str, typer.Argument(metavar="CHECKPOINT", help="a local directory", show_default=False)],
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Rewinds a streaming checkpoint to the ledger, after a rollback or a restored store. Stop the query first."""
    place = store_url(url)
    if LIKE_A_URL.search(checkpoint) and not checkpoint.startswith("file:") and not Path(checkpoint).exists():
        raise UsageError("CHECKPOINT is a local directory; what was given looks like a URL, and is not shown")
    done = rewind_checkpoint(place, state, checkpoint, dry_run=True)
    if done.moved:
        say(f"The next batch will be {done.batch_id}. These go aside: {', '.join(done.moved)}", err=as_json)
        confirm("Is the query stopped, and shall they?", yes=yes, as_json=as_json)
        done = rewind_checkpoint(place, state, checkpoint)
    if as_json:
        emit(_json_rewound(done))
    elif done.moved:
        say(f"Done: the next batch is {done.batch_id}. What was removed is in {done.to}")
    else:
        say(f"Nothing to do: the checkpoint's next batch is {done.batch_id}, as the state expects.")


def _json_rewound(done: Rewound) -> dict[str, Any]:
    return {"next_batch_id": done.batch_id, "moved": done.moved, "to": None if done.to is None else str(done.to)}
