"""The progress of a long command, on a terminal: keys done, of how many, at which rate, and for how much longer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

from mapstate.errors import MapStateError
from mapstate.reader import open_reader

Update = Callable[[int, str], None]
"""Takes the number of keys that are done, and what to say of them."""


class _Rate(ProgressColumn):
    """Keys per second, and the time so far."""

    def render(self, task: Task) -> Text:
        elapsed = task.elapsed or 0.0
        rate = task.completed / elapsed if elapsed > 0 else 0.0
        return Text(f"{rate:,.0f}/s, {elapsed:.0f} s")


@contextmanager
def progress(doing: str, total: Callable[[], int | None] = lambda: None) -> Iterator[Update]:
    """Show progress on standard error while the block runs, if that is a terminal.

    ``total`` is called then only. The number of keys that it returns may be None, for unknown: then no end is foretold.
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda done, text: None  # noqa: ARG005
        return
    known = total()
    columns: list[ProgressColumn] = [SpinnerColumn(), TextColumn("{task.description}", markup=False)]
    columns += (
        [_Rate()] if known is None else [BarColumn(bar_width=20), _Rate(), TextColumn("ETA"), TimeRemainingColumn()]
    )
    with Progress(*columns, console=console, transient=True) as shown:
        task = shown.add_task(doing, total=known)
        last = 0

        def update(done: int, text: str) -> None:
            nonlocal last
            if done < last:  # another pass begins
                shown.reset(task, total=known)
            last = done
            shown.update(task, completed=done, description=text)

        yield update


def keys_held(url: str, state: str) -> Callable[[], int | None]:
    """A function that returns how many keys the ledger says the state holds; None if unknown, or on an error.

    The command itself raises that error.
    """

    def held() -> int | None:
        try:
            with open_reader(url, state) as reader:
                return reader.key_count()
        except MapStateError:
            return None

    return held
