"""Simplifications of windows that look right, each with one decision made otherwise. A search has to find each out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any, NamedTuple

import msgspec

from mapstate.keys import INDEX
from mapstate.maps import pane_index
from mapstate.maps.pane_index import PanePages, Slice, index_keys, key_pages, store_key
from mapstate.maps.serialized import writer_of
from mapstate.protocol import transitions, upkeep, ways_back
from mapstate.protocol.ledger_record import Attempt, LedgerRecord
from mapstate.protocol.records import CommitView
from mapstate.protocol.windows import (
    NEVER,
    PaneChange,
    Panes,
    WindowCommit,
    WindowDefinition,
    WindowsRecord,
    fired_panes,
    runs_without,
)
from mapstate.reader import committed
from mapstate.spark.executor.window_task import FiredTask, PurgeTask
from model import window_actors
from model.window_actors import WindowRules
from model.window_oracle import SETTINGS, Row
from model.window_stores import Stored
from model.windows import WindowWorld, play
from model.world import ViolationError

__all__ = ["WINDOW_MUTANTS", "WindowMutant"]


class WindowMutant(NamedTuple):
    """Rules with one thing wrong, and what the counterexample has to say; "" for any.

    A ``rare`` one is seldom found within some hundred worlds.
    """

    name: str
    rules: Callable[[], WindowRules]
    shows: str = ""
    rare: bool = False

    def found(self, worlds: int) -> tuple[int, str] | None:
        """The first of so many worlds in which it shows, and what is wrong there."""
        for seed in range(worlds):
            try:
                play(seed, SETTINGS[seed % len(SETTINGS)], self.rules())
            except ViolationError as error:
                if self.shows in str(error):
                    return seed, str(error)
        return None


class _NewWhereNoRecordLies(WindowRules):
    def bases_for_index(self, bases: list[Any], stored: list[Any]) -> list[Any]:  # noqa: ARG002
        return stored


class _IndexOfWhatIsStored(WindowRules):
    def index_view(self, attempt: Attempt) -> Any:
        return CommitView.before(attempt.txid)


class _CorrectsByTheWatermark(WindowRules):
    def corrects_from(self, record: LedgerRecord) -> int | None:
        last = record.last_windows()
        return None if last is None else self.definition(record).panes.floor(last.watermark)

    def definition(self, record: LedgerRecord) -> WindowDefinition:
        assert record.windows is not None
        return record.windows.definition


class _CorrectsUnnamedPanes(WindowRules):
    """The ledger does not learn of the panes that a correction has written."""

    def patches(self) -> list[tuple[Any, str, Any]]:
        right = upkeep.commit_correction

        def unnamed(ledger: LedgerRecord, txid: int, **_: Any) -> LedgerRecord:
            return right(ledger, txid)

        return [(upkeep, "commit_correction", unnamed)]


class _PurgesByItsOwnMark(WindowRules):
    def purges_under(self, record: LedgerRecord, after: int) -> LedgerRecord:
        own = record.windows
        assert own is not None
        return msgspec.structs.replace(record, windows=own.begun(WindowCommit(watermark=after)))


class _PurgesWithoutAWord(WindowRules):
    """Readers learn of a purge at the commit."""

    def patches(self) -> list[tuple[Any, str, Any]]:
        right, done = WindowsRecord.begun, WindowsRecord.committed
        self._right = right
        late: dict[WindowsRecord, WindowsRecord] = {}

        def says_nothing(own: WindowsRecord, last: WindowCommit | None) -> WindowsRecord:
            late[own] = right(own, last)
            return own

        def says_it_now(own: WindowsRecord, change: Any) -> WindowsRecord:
            return done(late.get(own, own), change)

        return [(WindowsRecord, "begun", says_nothing), (WindowsRecord, "committed", says_it_now)]

    def purges_under(self, record: LedgerRecord, after: int) -> LedgerRecord:  # noqa: ARG002
        assert record.windows is not None
        return msgspec.structs.replace(record, windows=self._right(record.windows, record.last_windows()))


class _MarkBesideTheCommit(WindowRules):
    mark_in_commit = False


class _LateByTheLastWindow(WindowRules):
    def is_late(self, row: Row, panes: Panes, before: int, after: int) -> bool:  # noqa: ARG002
        pane = panes.pane(row.at)
        return row.at < panes.floor(before) and (pane is None or panes.last_end(pane) <= panes.floor(before))


class _LateByTheMark(WindowRules):
    """Storm's rule: before the watermark, and not before the last end."""

    def is_late(self, row: Row, panes: Panes, before: int, after: int) -> bool:  # noqa: ARG002
        return row.at < before


class _LateByItsOwnBatch(WindowRules):
    def is_late(self, row: Row, panes: Panes, before: int, after: int) -> bool:  # noqa: ARG002
        return row.at < panes.floor(after)


class _EmitsBeforeTheCommit(WindowRules):
    emits_before_commit = True


class _EmitsFromMemory(WindowRules):
    """A driver that comes again behind a crash has nothing to pass on."""

    emits_from_memory = True


class _EmitsWhatIsPurged(WindowRules):
    def patches(self) -> list[tuple[Any, str, Any]]:
        def all_of_them(record: WindowsRecord, done: WindowCommit, named: Any) -> Any:
            return fired_panes(msgspec.structs.replace(record, purged=NEVER), done, named)

        return [(window_actors, "fired_panes", all_of_them), (FiredTask, "check_ledger", _check_nothing)]


class _NeverLooksAtTheLedger(WindowRules):
    """What is fired is read without a look at who has the state by now."""

    def patches(self) -> list[tuple[Any, str, Any]]:
        return [(FiredTask, "check_ledger", _check_nothing)]


def _check_nothing(*_: Any) -> None:
    return


class _LooksWhileItReadsKeys(WindowRules):
    """A task that finds no keys does not look: its index may be what is gone."""

    def patches(self) -> list[tuple[Any, str, Any]]:
        check, pages = FiredTask.check_ledger, FiredTask._pages
        found: list[FiredTask] = []

        def read(task: FiredTask, *where: Any) -> Any:
            for page in pages(task, *where):
                found.append(task)
                yield page

        def verify(task: FiredTask, store: Any) -> None:
            if task in found:
                check(task, store)

        return [(FiredTask, "_pages", read), (FiredTask, "check_ledger", verify)]


class _PanesLeaveAtTheBegin(WindowRules):
    def patches(self) -> list[tuple[Any, str, Any]]:
        right = WindowsRecord.begun

        def drops(own: WindowsRecord, last: WindowCommit | None) -> WindowsRecord:
            after = right(own, last)
            return after.committed(PaneChange((), list(after.due()), 0))

        return [(WindowsRecord, "begun", drops)]

    def purges_under(self, record: LedgerRecord, after: int) -> LedgerRecord:  # noqa: ARG002
        return record


class _IndexBeforeRecords(WindowRules):
    def patches(self) -> list[tuple[Any, str, Any]]:
        return [(PurgeTask, "work", _purge_index_first)]


def _purge_index_first(task: Any, parts: Sequence[Slice]) -> int:
    removed = 0
    with closing(task.reads()) as reads, writer_of(reads.store, task.token) as writer:
        for part in parts:
            pages = list(key_pages(reads.index, part))
            task._remove(reads.store, writer, list(index_keys(part)))
            for rests in pages:
                keys = [store_key(part.pane, rest, is_native_integer=False) for rest in rests]
                task._remove(reads.store, writer, keys)
                removed += len(keys)
    return removed


class _PagesOfTheLastRun(WindowRules):
    """A page has the newest run of its panes, and forgets the others."""

    def patches(self) -> list[tuple[Any, str, Any]]:
        right = pane_index._changed

        def forgets(level: int, before: Any, after: Any) -> Any:
            return right(level, before, {start: own[-1:] for start, own in after.items()})

        return [(pane_index, "_changed", forgets)]


class _PagesWithoutTheirPast(WindowRules):
    """A page that the ledger did not name yet has nothing before its batch, as if no pane had been there."""

    def patches(self) -> list[tuple[Any, str, Any]]:
        right = pane_index._changed
        return [(pane_index, "_changed", lambda level, _, after: right(level, {}, after))]


class _PurgesAPageAsAWhole(WindowRules):
    """A page of which one pane was purged is taken for purged."""

    def patches(self) -> list[tuple[Any, str, Any]]:
        right = PanePages.changed

        def forgets(own: PanePages, change: PaneChange) -> Any:
            after, pages = right(own, change)
            assert after.named is not None
            height, runs = after.named
            grid = own._grid.pages(height)
            gone = {grid.start(pane) for pane in change.purged} if height else ()
            return after._replace(named=(height, runs_without(grid, runs, gone))), pages

        return [(PanePages, "changed", forgets)]


class _NeverReadsAgain(WindowRules):
    def patches(self) -> list[tuple[Any, str, Any]]:
        return [(committed, "purged", lambda _: None)]


class _TheHighestMarkEver(WindowRules):
    """A rollback leaves the watermark where it was."""

    def patches(self) -> list[tuple[Any, str, Any]]:
        right = ways_back.rollback

        def keeps(ledger: LedgerRecord, txid: int | None = None) -> LedgerRecord:
            after, last = right(ledger, txid), ledger.last_windows()
            if after.last_commit is None or after.last_commit.windows is None or last is None:
                return after
            own = msgspec.structs.replace(after.last_commit.windows, watermark=last.watermark)
            return msgspec.structs.replace(after, last_commit=msgspec.structs.replace(after.last_commit, windows=own))

        from mapstate.protocol import joint

        return [(module, "rollback", keeps) for module in (ways_back, transitions, joint)]


class _AdvancesOnce(WindowRules):
    """The commit that takes an operator's word for the watermark forgets it."""

    def patches(self) -> list[tuple[Any, str, Any]]:
        done = WindowsRecord.committed

        def forgets(own: WindowsRecord, change: Any) -> WindowsRecord:
            return msgspec.structs.replace(done(own, change), least=NEVER)

        return [(WindowsRecord, "committed", forgets)]


class _PutsBackNoInputs(WindowRules):
    """A watermark that is put back leaves the latest times of the inputs: the next batch moves it forward again."""

    def patches(self) -> list[tuple[Any, str, Any]]:
        done = WindowsRecord.commit_put_back

        def leaves(own: WindowsRecord, commit: WindowCommit, to: int, now: int) -> WindowCommit:
            return msgspec.structs.replace(done(own, commit, to, now), inputs=commit.inputs)

        return [(WindowsRecord, "commit_put_back", leaves)]


class _PutsBackWhatIsGone(WindowRules):
    """A watermark that is put back opens all windows behind it, also those of which panes were purged."""

    def patches(self) -> list[tuple[Any, str, Any]]:
        done = WindowsRecord.put_back

        def opens(own: WindowsRecord, to: int) -> WindowsRecord:
            return msgspec.structs.replace(done(own, to), purged=NEVER)

        return [(WindowsRecord, "put_back", opens)]


class _TakesAPageForItsFirstPane(WindowRules):
    """What a purge has removed is told from the first pane of each page that the ledger names."""

    def patches(self) -> list[tuple[Any, str, Any]]:
        right = WindowsRecord.begun

        def begun(own: WindowsRecord, committed: WindowCommit | None) -> WindowsRecord:
            after = right(msgspec.structs.replace(own, height=0), committed)
            return msgspec.structs.replace(after, height=own.height)

        return [(WindowsRecord, "begun", begun)]


class _IsFinalByTheWatermarkBefore(WindowRules):
    """Of a batch that may be taken back, the watermark before it is final, also where an operator put it back."""

    def patches(self) -> list[tuple[Any, str, Any]]:
        return [(WindowCommit, "safe", property(lambda own: own.before))]


class _PutsBackTheLastCommitOnly(WindowRules):
    """The commit before it, which a rollback brings back, keeps the wrong watermark."""

    def patches(self) -> list[tuple[Any, str, Any]]:
        right = upkeep.advance

        def leaves(ledger: LedgerRecord, *args: Any, **how: Any) -> LedgerRecord:
            return msgspec.structs.replace(right(ledger, *args, **how), previous=ledger.previous)

        return [(upkeep, "advance", leaves)]


class _ARowAtTheWatermarkOfSessionsIsNotLate(WindowRules):
    """It joins a session that has fired, which is exactly a gap before it."""

    def is_late(self, row: Row, panes: Panes, before: int, after: int) -> bool:  # noqa: ARG002
        return row.at < (before if self.sessions else panes.floor(before))


class _PurgesWhatIsNotJoined(WindowRules):
    """Of sessions: the first panes of one that goes on are purged as they are."""

    settles = False


class _FinalByTheLastBatch(WindowRules):
    """A window is final with the batch that fired it, whatever the other store has."""

    def patches(self) -> list[tuple[Any, str, Any]]:
        right = WindowWorld.final_mark

        def last(own: LedgerRecord) -> int:
            return (own.last_windows() or WindowCommit()).watermark

        def right_too(own: WindowWorld, record: LedgerRecord, batches: Any) -> int:
            return max(right(own, record, batches), own.oracle(batches).mark)

        return [(LedgerRecord, "final_mark", last), (WindowWorld, "final_mark", right_too)]


class _NoFence(WindowRules):
    def set_up(self, stores: Sequence[Stored]) -> None:
        for stored in stores:
            stored.checks_fence = False


class _NoClaims(WindowRules):
    def set_up(self, stores: Sequence[Stored]) -> None:
        for stored in stores:
            stored.keeps_claims = False


class _OneHeadPerPane(WindowRules):
    """All tasks write one head, so that the ledger need not know how many there are."""

    def patches(self) -> list[tuple[Any, str, Any]]:
        return [(pane_index, "_head", lambda pane, _: f"{INDEX}{pane}|0")]

    def width(self, partitions: int) -> int:
        return min(partitions, 1)


class _WidthOfTheLastBatch(WindowRules):
    def patches(self) -> list[tuple[Any, str, Any]]:
        done = WindowsRecord.committed

        def forgets(own: WindowsRecord, change: Any) -> WindowsRecord:
            return msgspec.structs.replace(done(own, change), width=change.width)

        return [(WindowsRecord, "committed", forgets)]


class _PlansDoNotTell(WindowRules):
    """A batch that Spark has planned anew is taken for one that it brings again."""

    plans_tell = False


WINDOW_MUTANTS = (
    WindowMutant("a key is new where no record lies", _NewWhereNoRecordLies),
    WindowMutant("an index is continued from what is stored", _IndexOfWhatIsStored),
    WindowMutant("a correction calls rows late", _CorrectsByTheWatermark),
    WindowMutant("a correction leaves its panes out of the ledger", _CorrectsUnnamedPanes),
    WindowMutant("a purge by the batch's own watermark", _PurgesByItsOwnMark),
    WindowMutant("readers learn of a purge at the commit", _PurgesWithoutAWord, "a reader saw"),
    WindowMutant("readers do not look again", _NeverReadsAgain, "a reader saw", rare=True),
    WindowMutant("the watermark in a write of its own", _MarkBesideTheCommit),
    WindowMutant("the highest watermark ever", _TheHighestMarkEver),
    WindowMutant("late by the last window", _LateByTheLastWindow, "late"),
    WindowMutant("late by the watermark", _LateByTheMark, "late"),
    WindowMutant("late by the batch's own watermark", _LateByItsOwnBatch, "late"),
    WindowMutant("passed on before the commit", _EmitsBeforeTheCommit, "was passed on and does not count"),
    WindowMutant("passed on from the driver's memory", _EmitsFromMemory, "fired"),
    WindowMutant("passed on although purged", _EmitsWhatIsPurged),
    WindowMutant("passed on without a look at the ledger", _NeverLooksAtTheLedger, rare=True),
    WindowMutant("a look at the ledger where keys were found alone", _LooksWhileItReadsKeys, "fired", rare=True),
    WindowMutant("a pane leaves the ledger at the begin", _PanesLeaveAtTheBegin),
    WindowMutant("an index that is purged before its records", _IndexBeforeRecords, "left behind"),
    WindowMutant("an advance that is forgotten with the batch that takes it", _AdvancesOnce, "was advanced to"),
    WindowMutant("a watermark put back without its inputs", _PutsBackNoInputs, "the watermark is"),
    WindowMutant("windows that are gone and open again", _PutsBackWhatIsGone),
    WindowMutant("a watermark put back behind windows of a page that are gone", _TakesAPageForItsFirstPane),
    WindowMutant("final by the watermark before the batch, though put back", _IsFinalByTheWatermarkBefore),
    WindowMutant("a watermark put back in the last commit only", _PutsBackTheLastCommitOnly, "the watermark is"),
    WindowMutant("a row at the watermark of sessions is not late", _ARowAtTheWatermarkOfSessionsIsNotLate, "late"),
    WindowMutant("sessions whose first panes are purged before they are joined", _PurgesWhatIsNotJoined),
    WindowMutant("pages of the newest panes alone", _PagesOfTheLastRun),
    WindowMutant("pages that a rollback leaves empty", _PagesWithoutTheirPast),
    WindowMutant("a page that is purged with its first pane", _PurgesAPageAsAWhole),
    WindowMutant("final by the last batch, also where another store lacks it", _FinalByTheLastBatch, "was final with"),
    WindowMutant("no fence", _NoFence),
    WindowMutant("no claims", _NoClaims),
    WindowMutant("one head of a pane for all tasks", _OneHeadPerPane),
    WindowMutant("as many partitions as in the last batch", _WidthOfTheLastBatch),
    WindowMutant("plans do not tell batches apart", _PlansDoNotTell),
)
