"""Rolling windows with one thing simplified, over and over. Each shows in the small world beside it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from model.mutants import Mutant
from model.rolling import Ledger, RollingProtocol, Stored
from model.rolling_tiles import NEVER, Definition, Tiles, Undo, Window, slice_of, undo
from model.rolling_worlds import ROLLING

__all__ = ["ROLLING_MUTANTS"]


class _FoldsByItsOwnWatermark(RollingProtocol):
    def fold_at(self, ledger: Ledger, definition: Definition, watermark: int, clock: int) -> int:
        return max(ledger.horizon, self.due(watermark, definition))


class _WatermarkBesideTheCommit(RollingProtocol):
    """Every attempt tells its watermark at once."""

    def horizon(self, ledger: Ledger, definition: Definition, highest: int) -> int:
        return max(ledger.horizon, self.due(highest, definition))


class _FoldsByTheClock(RollingProtocol):
    def fold_at(self, ledger: Ledger, definition: Definition, watermark: int, clock: int) -> int:
        return max(ledger.horizon, self.due(clock - definition.lag, definition))


class _FoldsByTheKeysLatestRow(RollingProtocol):
    def fold_key_at(self, horizon: int, value: Tiles) -> int:
        return max(horizon, *(start for start, _ in value)) if value else horizon


class _UndoesTheTilesOfRows(RollingProtocol):
    """Tiles that the batch only folded are not brought back."""

    def undo(self, before: Tiles | None, after: Tiles, own: Sequence[int | None]) -> Undo:
        whole = undo(before, after)
        if whole is None:
            return None
        made, were = whole
        return tuple(start for start in made if start in own), tuple(tile for tile in were if tile[0] in own)


class _TheStoredValueCounts(RollingProtocol):
    def committed_value(self, view: int, newest: int, record: Stored | None) -> Any:
        return None if record is None else record.value


class _NoSecondReadOfTheLedger(RollingProtocol):
    minds_overtaken = False

    def compared(self, ledger: Ledger) -> tuple[Any, ...]:
        return ()


class _ReadsAgainForNewerRecords(RollingProtocol):
    """A record that is newer than the ledger tells a reader that it was overtaken; a removed one tells nothing."""

    def compared(self, ledger: Ledger) -> tuple[Any, ...]:
        return ()


class _LateRowsAreLeftOut(RollingProtocol):
    def is_taken(self, time: int, watermark: int) -> bool:
        return time >= watermark


class _NoEndAtTheHead(RollingProtocol):
    def answer(self, value: Tiles, window: Window, end: int, until: int) -> Any:
        return slice_of(value, window.begin(end), None)


class _RoundsUp(RollingProtocol):
    def end(self, definition: Definition, time: int) -> int:
        return -definition.floor(-time)


class _TheTailIsNotRounded(RollingProtocol):
    def answer(self, value: Tiles, window: Window, end: int, until: int) -> Any:
        return slice_of(value, NEVER if window.length is None else end - window.length, until)


class _ReadersKnowTheRetention(RollingProtocol):
    """They work out the first readable time from watermark and retention, and the ledger needs no horizon for them."""

    def readable_from(self, ledger: Ledger, definition: Definition) -> int:
        return self.due(ledger.watermark, definition)


class _AnyNewWindow(RollingProtocol):
    def may_open(self, ledger: Ledger, own: Definition, other: Definition) -> bool:
        return own.unit == other.unit


class _ExpiresByTheClock(RollingProtocol):
    """A key that is older than all of its windows is dropped by the store."""

    def expires(self, record: Stored, clock: int, definition: Definition) -> bool:
        longest = max(window.length or 0 for window in definition.windows)
        return not definition.has_lifetime and clock - record.at > longest + definition.retention + definition.lag


class _ARollbackTakesTheHorizonBack(RollingProtocol):
    """A commit holds it beside its watermark, so the commit before has an earlier one."""

    def at_rollback(self, before: Ledger, after: Ledger, definition: Definition) -> int:
        return after.marks[-1][2] if after.marks else NEVER


class _MovesTheHorizonAtTheCommit(RollingProtocol):
    """By the batch's own watermark: it is committed, after all."""

    def at_commit(self, ledger: Ledger, definition: Definition) -> int:
        return max(ledger.horizon, self.due(ledger.watermark, definition))


class _AVacuumRemovesByTheWatermark(RollingProtocol):
    def vacuum_at(self, ledger: Ledger, definition: Definition) -> int:
        return max(ledger.horizon, self.due(ledger.watermark, definition))


class _AVacuumRemovesAtOnce(RollingProtocol):
    """Without a value for the key before. If it dies, the next one does not know that it has removed the key."""

    removes_at_once = True


class _AVacuumTellsNoNumber(RollingProtocol):
    """The number of keys stays as it was."""

    def held(self, ledger: Ledger, added: int) -> int:
        return ledger.held


class _TheHorizonOfTheRetention(RollingProtocol):
    """A longer retention after a restart takes the horizon back."""

    def horizon(self, ledger: Ledger, definition: Definition, highest: int) -> int:
        return self.due(ledger.watermark, definition)


class _TheFirstCutDecides(RollingProtocol):
    """A window that is not longer than one that is kept can be answered, whatever its resolution."""

    def may_open(self, ledger: Ledger, own: Definition, other: Definition) -> bool:
        return own.unit == other.unit and all(
            self._reaches(own, window) for window in other.windows if window not in own.windows
        )

    def _reaches(self, own: Definition, window: Window) -> bool:
        if window.length is None:
            return own.has_lifetime
        return any(other.length is None or window.length <= other.length for other in own.windows)


def _world(name: str) -> Any:
    return next(world for world in ROLLING if world.name == f"rolling windows: {name}")


_DIE, _READ, _BACK, _SWEEP, _KEEP, _MORE, _BEHIND, _TWO = (
    _world("attempts that die"),
    _world("readers"),
    _world("rollbacks and a vacuum"),
    _world("a vacuum beside a reader"),
    _world("other retentions"),
    _world("windows more and less"),
    _world("a source that is behind"),
    _world("a unit of two"),
)

ROLLING_MUTANTS = tuple(
    Mutant(f"rolling windows: {name}", protocol, world, shows)
    for name, protocol, world, shows in (
        ("folded by the attempt's own watermark", _FoldsByItsOwnWatermark, _DIE, "reads as"),
        ("a watermark beside the commit", _WatermarkBesideTheCommit, _DIE, "no read as of the watermark"),
        ("folded by the clock", _FoldsByTheClock, _BEHIND, "reads as"),
        ("folded by the key's own latest row", _FoldsByTheKeysLatestRow, _DIE, "reads as"),
        ("only tiles with rows are undone", _UndoesTheTilesOfRows, _DIE, "reads as"),
        ("the stored value counts", _TheStoredValueCounts, _DIE, "reads as"),
        ("no second read of the ledger", _NoSecondReadOfTheLedger, _READ, "is read as"),
        ("a second read only for newer records", _ReadsAgainForNewerRecords, _SWEEP, "is read as"),
        ("late rows are left out", _LateRowsAreLeftOut, _DIE, "reads as"),
        ("no end at the head", _NoEndAtTheHead, _DIE, "reads as"),
        ("a time is rounded up", _RoundsUp, _TWO, "reads as"),
        ("the tail is not rounded", _TheTailIsNotRounded, _DIE, "reads as"),
        ("readers work the horizon out", _ReadersKnowTheRetention, _KEEP, "reads as"),
        ("a longer retention takes the horizon back", _TheHorizonOfTheRetention, _KEEP, "reads as"),
        ("any new window", _AnyNewWindow, _MORE, "reads as"),
        ("a new window that is not longer", _TheFirstCutDecides, _MORE, "reads as"),
        ("keys expire by the clock", _ExpiresByTheClock, _BEHIND, "reads as"),
        ("a rollback takes the horizon back", _ARollbackTakesTheHorizonBack, _BACK, "reads as"),
        ("the horizon moves at the commit", _MovesTheHorizonAtTheCommit, _BACK, "no read as of the watermark"),
        ("a vacuum removes by the watermark", _AVacuumRemovesByTheWatermark, _BACK, "reads as"),
        ("a vacuum removes idle keys at once", _AVacuumRemovesAtOnce, _BACK, "the ledger says"),
        ("a vacuum tells no number of keys", _AVacuumTellsNoNumber, _BACK, "the ledger says"),
    )
)
