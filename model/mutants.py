"""The protocol with one thing wrong, over and over: what shows that the model can find something.

Each mutant switches off one protection or builds it in the way that looks simpler. Each has the world in which it is
found out. `MUTANTS` is in the order of docs/model.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import msgspec

from mapstate.capabilities import FenceToken
from mapstate.errors import MapStateError
from mapstate.protocol import transitions, ways_back
from mapstate.protocol.alias import AliasRecord
from mapstate.protocol.ledger_record import (
    AlreadyCommitted,
    Attempt,
    BatchPlan,
    Commit,
    InFlight,
    LedgerRecord,
    OpenRequest,
)
from mapstate.reader.changes import Position
from model.correcting import Correcting, CorrectingProtocol
from model.explore import AnyWorld
from model.following import Following, FollowingProtocol
from model.forgetting import Forgetting, ForgettingProtocol
from model.parts import WHOLE, Function, Parts, PartsProtocol
from model.protocol import REMOVE, ModelAttempt, Protocol, Record, Refused
from model.replans import Replans
from model.swapping import Swapping, SwappingProtocol
from model.together import Together, TogetherProtocol
from model.world import World

__all__ = ["MUTANTS", "Mutant"]


class Mutant(NamedTuple):
    """A protocol with one thing wrong, a world in which that shows, and what the counterexample has to say."""

    name: str
    protocol: type[Protocol]
    world: AnyWorld
    shows: str = "reads as"


class _TxidPerBatch(Protocol):
    """A batch that is begun again has the txid that it had."""

    def begun(
        self, ledger: LedgerRecord, session: str, batch: int, nonce: str, plan: BatchPlan | None = None
    ) -> tuple[LedgerRecord, Attempt | AlreadyCommitted]:
        after, result = super().begun(ledger, session, batch, nonce, plan)
        again = ledger.in_flight
        if not isinstance(result, Attempt) or again is None or again.batch_id != batch:
            return after, result
        flight = InFlight(txid=again.txid, epoch=after.epoch, batch_id=batch, nonce=nonce)
        after = msgspec.structs.replace(after, next_txid=ledger.next_txid, in_flight=flight)
        return after, Attempt(batch, again.txid, result.view, after.fence())


class _TridentsRule(_TxidPerBatch):
    """And ``curr`` counts unless the record is of this very batch."""

    def applied(self, view: int, txid: int, record: Record | None, operation: int) -> Record | Refused | None:
        base = None
        if record is not None:
            base = record[2] if record[0] == txid else record[1]  # type: ignore[misc]
        return (txid, None if operation == REMOVE else (base or 0) + operation, base)


class _NothingIsDead(Protocol):
    def committed(self, ledger: LedgerRecord, session: str, done: Commit) -> LedgerRecord:
        return msgspec.structs.replace(super().committed(ledger, session, done), dead=())


class _NoFence(Protocol):
    def may_write(self, fence: FenceToken | None, token: FenceToken) -> bool:
        return True


class _FenceOfAnEpoch(Protocol):
    def may_write(self, fence: FenceToken | None, token: FenceToken) -> bool:
        return fence is not None and fence.epoch == token.epoch


class _FenceWithoutNonce(Protocol):
    def may_write(self, fence: FenceToken | None, token: FenceToken) -> bool:
        return super().may_write(
            None if fence is None else fence._replace(nonce=""),
            token._replace(nonce=""),
        )


class _MakesLedgersOverRecords(Protocol):
    def may_make_ledger(self, records: object) -> bool:
        return True


class _CommitsToACopy(Protocol):
    def may_commit(self, *, begun_in: int, now: int) -> bool:
        return True


class _OpeningKeepsTheEpoch(Protocol):
    def opened(self, ledger: LedgerRecord | None, opening: OpenRequest) -> LedgerRecord:
        after = super().opened(ledger, opening)
        return after if ledger is None else msgspec.structs.replace(after, epoch=ledger.epoch)


class _GapsAreAccepted(Protocol):
    def begun(
        self, ledger: LedgerRecord, session: str, batch: int, nonce: str, plan: BatchPlan | None = None
    ) -> tuple[LedgerRecord, Attempt | AlreadyCommitted]:
        return transitions.begin(ledger, session, batch, "accept", nonce)


class _NoClaims(Protocol):
    def has_to_claim(self, *, empty: bool) -> bool:
        return False


class _EmptyTasksDoNotClaim(Protocol):
    def has_to_claim(self, *, empty: bool) -> bool:
        return not empty


class _AdoptComparesBatchIds(Protocol):
    """A new owner's next batch is the one behind the last that was committed, whoever committed it."""

    def opened(self, ledger: LedgerRecord | None, opening: OpenRequest) -> LedgerRecord:
        after = super().opened(ledger, opening)
        if ledger is not None and ledger.owner != opening.owner and after.last_commit is not None:
            due = after.last_commit.batch_id + 1
            return msgspec.structs.replace(after, owners=after.owners | {opening.owner: due})
        return after


class _GivesWayAsItIs(Protocol):
    """An owner without a commit yields, and what its attempt wrote is not below the floor."""

    def opened(self, ledger: LedgerRecord | None, opening: OpenRequest) -> LedgerRecord:
        after = super().opened(ledger, opening)
        if ledger is None or ledger.owner == opening.owner:
            return after
        return msgspec.structs.replace(after, floor=ledger.floor)


class _OneNextBatchForAllOwners(Protocol):
    def opened(self, ledger: LedgerRecord | None, opening: OpenRequest) -> LedgerRecord:
        after = super().opened(ledger, opening)
        return msgspec.structs.replace(after, owners=dict.fromkeys(after.owners, max(after.owners.values())))


class _RollbackAfterALaterAttempt(Protocol):
    """What is in flight is left behind, and what it wrote reads as the batch that was taken back."""

    def rollback(self, ledger: int) -> int | Refused:
        record = self.ledger(ledger)
        if record.last_commit is None:
            return Refused("RollbackError")
        nothing_later = msgspec.structs.replace(record, in_flight=None, next_txid=record.last_commit.txid + 1)
        after = super().rollback(self.number(nothing_later))
        if isinstance(after, Refused):
            return after
        return self.number(msgspec.structs.replace(self.ledger(after), next_txid=record.next_txid))


class _RollbackTwiceInARow(_RollbackAfterALaterAttempt):
    """The second time there is one batch less in the ledger, and none in the records."""

    def rollback(self, ledger: int) -> int | Refused:
        record = self.ledger(ledger)
        if record.last_commit is not None and record.previous is None and record.in_flight is None:
            return super().rollback(ledger)
        return Protocol.rollback(self, ledger)


class _VacuumBesideTasks(Protocol):
    """No attempt of its own, no fence: it rewrites what is dead, and then says that nothing is."""

    def begin_vacuum(self, ledger: int, session: int, *, take_over: bool) -> ModelAttempt | int | Refused:
        last = self.ledger(ledger).last_txid
        if take_over or last is None:
            return Refused("UsageError")
        return ModelAttempt(ledger, last, self.view(ledger), None)  # type: ignore[arg-type]

    def commit_vacuum(self, ledger: int, txid: int, *, fenced: bool) -> int | Refused:
        return self.number(msgspec.structs.replace(self.ledger(ledger), dead=()))


class _VacuumCountsAtItsEnd(Protocol):
    def begin_vacuum(self, ledger: int, session: int, *, take_over: bool) -> ModelAttempt | int | Refused:
        answer = super().begin_vacuum(ledger, session, take_over=take_over)
        if not isinstance(answer, ModelAttempt):
            return answer
        before = self.ledger(ledger).rewrites
        return answer._replace(ledger=self.number(msgspec.structs.replace(self.ledger(answer.ledger), rewrites=before)))

    def commit_vacuum(self, ledger: int, txid: int, *, fenced: bool) -> int | Refused:
        answer = super().commit_vacuum(ledger, txid, fenced=fenced)
        if isinstance(answer, Refused):
            return answer
        after = self.ledger(answer)
        return self.number(msgspec.structs.replace(after, rewrites=after.rewrites + 1))


class _VacuumForgetsWhateverCameMeanwhile(Protocol):
    """One that finds nothing to rewrite says that nothing is dead, also where the ledger has changed since."""

    def forget_dead(self, ledger: int, seen: int) -> int | Refused:
        return self.number(msgspec.structs.replace(self.ledger(ledger), dead=()))


class _ResetDeletes(Protocol):
    reset_deletes = True

    def opened(self, ledger: LedgerRecord | None, opening: OpenRequest) -> LedgerRecord:
        return msgspec.structs.replace(super().opened(ledger, opening), floor=0)


class _ResetKeepsTheNumbersOfOwners(Protocol):
    """A query that comes back has its number from before the reset: its batch counts already, they say."""

    def opened(self, ledger: LedgerRecord | None, opening: OpenRequest) -> LedgerRecord:
        after = super().opened(ledger, opening)
        return after if ledger is None else msgspec.structs.replace(after, owners=after.owners | ledger.owners)


class _ResetForgetsWhoKeptTheState(TogetherProtocol):
    """A state that yields, too: what its query left apart in another store is taken for one that it never had here."""

    def opened(self, ledger: LedgerRecord | None, opening: OpenRequest) -> LedgerRecord:
        after = super().opened(ledger, opening)
        was_reset = ledger is not None and after.floor != ledger.floor
        return msgspec.structs.replace(after, owners={after.owner: 0}) if was_reset else after


class _RemovedKeysAreDeleted(Protocol):
    def stored(self, record: Record) -> Record | None:
        return None if record[1] is None else record


class _RedoOfACommittedBatch(Protocol):
    def begun(
        self, ledger: LedgerRecord, session: str, batch: int, nonce: str, plan: BatchPlan | None = None
    ) -> tuple[LedgerRecord, Attempt | AlreadyCommitted]:
        after, result = super().begun(ledger, session, batch, nonce, plan)
        if isinstance(result, Attempt):
            return after, result
        again = msgspec.structs.replace(ledger, owners=ledger.owners | {ledger.owner: batch})
        return super().begun(again, session, batch, nonce)


class _ClusterFenceSetUnconditionally(Protocol):
    def raised(self, fence: FenceToken | None, before: FenceToken | None, token: FenceToken) -> FenceToken | None:
        return token


class _ClusterFenceMovesFromAnywhere(Protocol):
    """Only up, but whatever fence it finds: also that of a replica which lacks what was committed."""

    def raised(self, fence: FenceToken | None, before: FenceToken | None, token: FenceToken) -> FenceToken | None:
        return token if fence is None or token.rank > fence.rank else fence


class _ClusterCommitsWithFencesOpen(Protocol):
    """A fence that was raised is taken for a sign that the records behind it are there."""

    closes_fences = False

    def is_intact(self, fence: FenceToken | None, last: int | None) -> bool:
        return last is None or (fence is not None and fence.txid >= last)


class _ClusterLooksAtNoFence(Protocol):
    def is_intact(self, fence: FenceToken | None, last: int | None) -> bool:
        return True


class _ReaderMindsNoStaleRecord(Protocol):
    minds_stale_records = False


class _ReaderDoesNotLookAgain(Protocol):
    def looks_again(self, before: int, after: int, *, absent: bool) -> bool:
        return False


class _ReaderMindsNoNewLedger(Protocol):
    def purged(self, ledger: int) -> tuple[int, ...]:
        return (self.ledger(ledger).rewrites,)


class _KeysWrittenTwice(Protocol):
    writes_keys_twice = True


class _SkipsWhatIsDone(TogetherProtocol):
    """Commits one after the other; a state that has the batch keeps it, and the others get the replay's."""

    def even(self, ledgers: list[LedgerRecord], sessions: list[str], batch: int) -> list[LedgerRecord]:
        """Nothing is rolled back."""
        return ledgers


class _CommitsOneByOne(TogetherProtocol):
    """In one store, with a write for each ledger: readers find the states apart."""

    commits_one_store_at_once = False


class _RollsBackBeforeAllAreOpened(TogetherProtocol):
    """Each store is opened, rolled back and begun in one write, while the driver before may still commit the others."""

    opens_all_first = False


class _CorrectsWhateverOthersLack(TogetherProtocol):
    """A state is corrected although another one lacks its last batch, which is then to be rolled back."""

    def may_be_corrected(self, ledgers: Sequence[int], state: int) -> bool:
        return True


class _CorrectsWhatItDidNotSee(TogetherProtocol):
    """A correction begins whatever was written since its list was read."""

    def begin_correction(self, ledger: int, session: int, seen: int) -> ModelAttempt | int | Refused:
        return super().begin_correction(ledger, session, ledger)


class _CorrectsAllStatesAgain(TogetherProtocol):
    """A second call adds the rows to all states where one of them lacks them."""

    def lacks_correction(self, shown: Any) -> bool:
        return True


class _EvensOutItsOwnBatchesAlone(TogetherProtocol):
    """What another query left behind in some of the states only is adopted as it is."""

    def even(self, ledgers: list[LedgerRecord], sessions: list[str], batch: int) -> list[LedgerRecord]:
        """Only where the last batch is of this query."""
        forgotten = [
            msgspec.structs.replace(one, last_commit=None)
            if one.last_commit is not None and one.last_commit.owner != one.owner
            else one
            for one in ledgers
        ]
        even = super().even(forgotten, sessions, batch)
        return [
            before if after is other else after for before, other, after in zip(ledgers, forgotten, even, strict=True)
        ]


class _ForgetsWithoutAFence(Protocol):
    def may_look(self, ledger: int, *, fenced: bool) -> bool:
        return not self.has_attempt_at_work(ledger)


class _ReplaysWhateverThePlan(TogetherProtocol):
    """A committed batch is a replay, whatever Spark has planned."""

    def begun(
        self, ledger: LedgerRecord, session: str, batch: int, nonce: str, plan: BatchPlan | None = None
    ) -> tuple[LedgerRecord, Attempt | AlreadyCommitted]:
        return super().begun(ledger, session, batch, nonce)


class _TellsPlansByTheirOffsets(TogetherProtocol):
    """Which are a file source's places in a log of its own."""

    def begun(
        self, ledger: LedgerRecord, session: str, batch: int, nonce: str, plan: BatchPlan | None = None
    ) -> tuple[LedgerRecord, Attempt | AlreadyCommitted]:
        assert plan is not None
        return super().begun(ledger, session, batch, nonce, plan._replace(planned_at=None, previous_planned_at=None))


class _CountsAnewBehindAnother(TogetherProtocol):
    """A batch that was planned anew is rolled back although another one has begun behind it."""

    def begun(
        self, ledger: LedgerRecord, session: str, batch: int, nonce: str, plan: BatchPlan | None = None
    ) -> tuple[LedgerRecord, Attempt | AlreadyCommitted]:
        last = ledger.last_commit
        if last is not None and ways_back.is_replanned(ledger, batch, plan):
            forgotten = msgspec.structs.replace(ledger, in_flight=None, next_txid=last.txid + 1)
            back = ways_back.rollback(forgotten)
            ledger = msgspec.structs.replace(back, next_txid=ledger.next_txid)
        return super().begun(ledger, session, batch, nonce, plan)


class _GoesOnBehindAnyBatch(TogetherProtocol):
    """Where a batch starts is not compared with where the last one ended."""

    def begun(
        self, ledger: LedgerRecord, session: str, batch: int, nonce: str, plan: BatchPlan | None = None
    ) -> tuple[LedgerRecord, Attempt | AlreadyCommitted]:
        due = ledger.owners[ledger.owner]
        return transitions.begin(ledger, session, batch, "accept" if batch == due else "refuse", nonce, plan=plan)


class _RepeatsWhateverThePlan(TogetherProtocol):
    """A transactional attempt is begun again under its txid with what Spark brings."""

    def begun(
        self, ledger: LedgerRecord, session: str, batch: int, nonce: str, plan: BatchPlan | None = None
    ) -> tuple[LedgerRecord, Attempt | AlreadyCommitted]:
        at = ledger.in_flight
        if at is not None and plan is not None:
            ledger = msgspec.structs.replace(ledger, in_flight=msgspec.structs.replace(at, plan=plan.digest()))
        return super().begun(ledger, session, batch, nonce, plan)


class _FollowsAnyDriver(TogetherProtocol):
    """A state that follows another counts a batch anew for whoever brings it, also for a driver that was replaced."""

    def begun(
        self, ledger: LedgerRecord, session: str, batch: int, nonce: str, plan: BatchPlan | None = None
    ) -> tuple[LedgerRecord, Attempt | AlreadyCommitted]:
        assert plan is not None
        return super().begun(ledger, session, batch, nonce, plan._replace(upstream_txid=None))


class _AdoptComparesNothing(TogetherProtocol):
    def check_start(self, ledger: LedgerRecord, batch: int, plan: BatchPlan | None) -> None:
        pass


class _AdoptComparesTheFirstBatch(TogetherProtocol):
    """And not that of an owner that comes back."""

    def check_start(self, ledger: LedgerRecord, batch: int, plan: BatchPlan | None) -> None:
        if batch == 0:
            super().check_start(ledger, batch, plan)


class _AdoptComparesBeforeItOpens(TogetherProtocol):
    """And not at the begin: the owner before may commit until all stores are opened."""

    compares = True

    def begin_all(
        self,
        ledgers: Sequence[int],
        group: Sequence[int],
        session: int,
        batch: int,
        nonce: str,
        plan: BatchPlan | None = None,
    ) -> list[tuple[ModelAttempt | int, bool]] | Refused:
        self.compares = nonce == "probe"
        return super().begin_all(ledgers, group, session, batch, nonce, plan)

    def check_start(self, ledger: LedgerRecord, batch: int, plan: BatchPlan | None) -> None:
        if self.compares:
            super().check_start(ledger, batch, plan)


class _AdoptTakesUnknownForEqual(TogetherProtocol):
    def check_start(self, ledger: LedgerRecord, batch: int, plan: BatchPlan | None) -> None:
        if plan is not None and plan.start != "[null]":
            super().check_start(ledger, batch, plan)


class _AdoptComparesBeforeStatesAreEven(TogetherProtocol):
    """Each state with its own last batch, also if that is rolled back."""

    def even(self, ledgers: list[LedgerRecord], sessions: list[str], batch: int) -> list[LedgerRecord]:
        self.before = ledgers
        return super().even(ledgers, sessions, batch)

    def check_start(self, ledger: LedgerRecord, batch: int, plan: BatchPlan | None) -> None:
        for before in self.before:
            super().check_start(before, batch, plan)


class _NoPartIsNoticed(PartsProtocol):
    def is_part(self, last: int, failed: tuple[int, int] | None, call: tuple[int, int]) -> bool:
        return False


class _MindsWhatItCommitted(PartsProtocol):
    """A part of a batch that an earlier run has committed is taken for a replay, and the next one, too."""

    minds_what_counts_already = False


class _MindsTheFirstFailure(PartsProtocol):
    """A run remembers the first call that failed since one has ended, and not the last."""

    def is_part(self, last: int, failed: tuple[int, int] | None, call: tuple[int, int]) -> bool:
        if failed is None:
            return last == call[0]
        return failed[0] == call[0] and failed != call

    def last_failed(self, before: tuple[int, int] | None, call: tuple[int, int]) -> tuple[int, int]:
        return before or call


class _CountsNoRowsOfAReplay(PartsProtocol):
    """What comes again with the same plan is taken for what counts."""

    def has_more(self, ledger: int, rows: int) -> bool:
        return False


class _TakesNoPartBack(PartsProtocol):
    """That this run has noticed itself. What comes again with more rows would begin for ever."""

    takes_back = False


class _TakesBackInOneStore(PartsProtocol):
    takes_back_in_all_stores = False


class _TakesNoFailedPartBack(PartsProtocol):
    """A call that raised is taken for one that did not count: it may have raised after its commit."""

    takes_back_after_a_failure = False


class _RefusesTheRunAtTheEnd(PartsProtocol):
    """When the part is taken back, and not where the store gives no answer to that."""

    refuses_at_once = False


class _TakesBackOverALaterAttempt(PartsProtocol):
    """What has begun after the batch is left where it is."""

    def can_roll_back(self, ledgers: Sequence[int], batch: int) -> bool:
        return True

    def one_taken_back(self, ledger: LedgerRecord, session: str, batch: int, *, can: bool) -> LedgerRecord:
        last = ledger.last_commit
        if last is None or not ways_back.counts(ledger, batch):
            return super().one_taken_back(ledger, session, batch, can=can)
        forgotten = msgspec.structs.replace(ledger, in_flight=None, next_txid=last.txid + 1)
        back = super().one_taken_back(forgotten, session, batch, can=True)
        return msgspec.structs.replace(back, next_txid=ledger.next_txid)


class _DecidesBeforeTheWrite(PartsProtocol):
    """Whether a part can be rolled back is asked of the ledger as it was read: a vacuum may have begun since."""

    def taken_back(self, ledgers: Sequence[int], session: int, batch: int, *, can: bool) -> list[int] | Refused:
        try:
            after = [self.one_taken_back(self.ledger(one), f"s{session}", batch, can=can) for one in ledgers]
        except MapStateError as error:
            return Refused(type(error).__name__)
        return [self.number(one) for one in after]


class _MarksNoAttempt(PartsProtocol):
    """A transactional attempt of a part is begun again, and skips the keys that the part has written."""

    def one_taken_back(self, ledger: LedgerRecord, session: str, batch: int, *, can: bool) -> LedgerRecord:
        if ways_back.counts(ledger, batch):
            return super().one_taken_back(ledger, session, batch, can=can)
        return ledger


class _LooksAtNoMark(PartsProtocol):
    def begun(
        self, ledger: LedgerRecord, session: str, batch: int, nonce: str, plan: BatchPlan | None = None
    ) -> tuple[LedgerRecord, Attempt | AlreadyCommitted]:
        return super().begun(_without_a_mark(ledger), session, batch, nonce, plan)


class _LooksAtTheMarkForThatBatch(PartsProtocol):
    """And not for those after it."""

    def begun(
        self, ledger: LedgerRecord, session: str, batch: int, nonce: str, plan: BatchPlan | None = None
    ) -> tuple[LedgerRecord, Attempt | AlreadyCommitted]:
        same = ledger.last_commit is not None and ledger.last_commit.batch_id == batch
        return super().begun(ledger if same else _without_a_mark(ledger), session, batch, nonce, plan)


def _without_a_mark(ledger: LedgerRecord) -> LedgerRecord:
    last = ledger.last_commit
    if last is None:
        return ledger
    return msgspec.structs.replace(ledger, last_commit=msgspec.structs.replace(last, is_part=False))


class _AsksOnlyForWhatCounts(FollowingProtocol):
    def asked(self, ledger: int, start: Position, end: Position) -> tuple[int, ...]:
        view = self.ledger(ledger).view()
        return tuple(txid for txid in super().asked(ledger, start, end) if txid in view)


class _AsksFromTheNextOn(FollowingProtocol):
    def asked(self, ledger: int, start: Position, end: Position) -> tuple[int, ...]:
        return tuple(txid for txid in super().asked(ledger, start, end) if txid > start.txid)


class _TakesWhatIsNotDeadForCounted(FollowingProtocol):
    """By what is dead and not by what was rolled back: a vacuum forgets it."""

    def asked(self, ledger: int, start: Position, end: Position) -> tuple[int, ...]:
        is_dead = any(low <= start.txid <= high for low, high in self.ledger(ledger).dead)
        return tuple(txid for txid in super().asked(ledger, start, end) if txid > start.txid or is_dead)


class _LooksOnceAtWhatIsKept(FollowingProtocol):
    def check_again(self, ledger: int, start: Position, first: int) -> None:
        pass


class _LogsAfterTheCommit(FollowingProtocol):
    logs_after_the_commit = True


class _ForgetsWhereSomebodyMayBe(FollowingProtocol):
    """What was rolled back is forgotten with the log of it, one transaction too early."""

    def begun(
        self, ledger: LedgerRecord, session: str, batch: int, nonce: str, plan: BatchPlan | None = None
    ) -> tuple[LedgerRecord, Attempt | AlreadyCommitted]:
        after, result = super().begun(ledger, session, batch, nonce, plan)
        changes = after.changes
        assert changes is not None
        undone = tuple(txid for txid in changes.undone if txid >= changes.since)
        return msgspec.structs.replace(after, changes=msgspec.structs.replace(changes, undone=undone)), result


class _RemovesFirst(ForgettingProtocol):
    """The record is removed before the ledger knows."""

    def first(self, txid: int, value: Any, record: Record | None) -> Record | None:
        return None


class _TombstoneAlone(ForgettingProtocol):
    has_second = False


class _PurgesBlindly(ForgettingProtocol):
    """The second attempt removes the record, whatever has come since."""

    def second(self, txid: int, value: Any) -> Record | None:
        return None


class _ListedAsOfWhenAsked(ForgettingProtocol):
    def position(self, *, asked: int, last: int) -> int:
        return asked


class _ForgetsAgain(ForgettingProtocol):
    asks_for_the_id = False


class _RollsBackOverAnOperator(ForgettingProtocol):
    def rollback(self, ledger: int) -> int | Refused:
        record = self.ledger(ledger)
        if record.in_flight is not None or record.last_commit is None:
            return super().rollback(ledger)
        as_if = msgspec.structs.replace(record, next_txid=record.last_commit.txid + 1)
        return self._changed(lambda: msgspec.structs.replace(ways_back.rollback(as_if), next_txid=record.next_txid))


class _CorrectsAgain(CorrectingProtocol):
    """A correction has no id: after a lost reply it is made again."""

    def is_applied(self, listed: tuple[int, ...], name: int) -> bool:
        return False


class _CorrectsAsBatchZero(CorrectingProtocol):
    """A correction is batch 0 of an owner of its own, so the second one is taken for the first."""

    def is_applied(self, listed: tuple[int, ...], name: int) -> bool:
        return bool(listed)


class _RollsBackOverACorrection(CorrectingProtocol):
    """It takes back the last batch, and not what was done after it."""

    def rollback(self, ledger: int) -> int | Refused:
        record = self.ledger(ledger)
        if record.in_flight is not None or record.last_commit is None:
            return super().rollback(ledger)
        as_if = msgspec.structs.replace(record, next_txid=record.last_commit.txid + 1)
        return self._changed(lambda: msgspec.structs.replace(ways_back.rollback(as_if), next_txid=record.next_txid))


class _TakesACorrectionBackLate(CorrectingProtocol):
    """Also over attempts that began since."""

    def rollback(self, ledger: int) -> int | Refused:
        record = self.ledger(ledger)
        if record.correction is None or record.correction.txid != record.last_txid:
            return super().rollback(ledger)
        as_if = msgspec.structs.replace(record, next_txid=record.correction.txid + 1, in_flight=None)

        def taken() -> LedgerRecord:
            after = ways_back.rollback_last(as_if)
            return msgspec.structs.replace(after, next_txid=record.next_txid, in_flight=record.in_flight)

        return self._changed(taken)


class _KeepsTheIdOfWhatIsTakenBack(CorrectingProtocol):
    def rollback(self, ledger: int) -> int | Refused:
        record = self.ledger(ledger)
        return self._changed(
            lambda: msgspec.structs.replace(ways_back.rollback_last(record), operations=record.operations)
        )


class _BeginsUnderAnother(CorrectingProtocol):
    """The begin does not look whether the list was read under the present ledger."""

    def begin_correction(self, ledger: int, session: int, seen: int) -> ModelAttempt | int | Refused:
        return super().begin_correction(ledger, session, ledger)


class _RecountsElsewhere(CorrectingProtocol):
    """A recount does not look whether the history was cut at the last batch."""

    def check_still_at(self, ledger: int, position: int) -> int | Refused:
        return ledger


class _RecountsWithoutCorrections(CorrectingProtocol):
    """A recount is of a history that lacks the rows of corrections."""

    def rows_of_corrections(self, listed: tuple[int, ...]) -> tuple[int, ...]:
        return ()


class _ResolvedPerKey(SwappingProtocol):
    resolves = "key"


class _LooksBeforeItReads(SwappingProtocol):
    resolves = "before"


class _ResolvedOnce(SwappingProtocol):
    resolves = "once"


class _GoesBackToAnOldCopy(SwappingProtocol):
    def looked(self, known: AliasRecord | None, found: AliasRecord | None) -> AliasRecord | None:
        return found


class _SetsTheAlias(SwappingProtocol):
    compares_alias = False


class _ComparesBeforeTheWrite(SwappingProtocol):
    compares_ledgers = False


class _AsksForNoCorrection(SwappingProtocol):
    def uncorrected(self, old: tuple[str, ...], new: tuple[str, ...]) -> list[str]:
        return []


class _DropsWithoutAsking(SwappingProtocol):
    drop_asks = ()


class _DropsAfterAskingOnce(SwappingProtocol):
    drop_asks = ("first",)


class _SwapsBeforeItKeeps(SwappingProtocol):
    keeps_first = False


_RESTARTED = World(name="a driver that is started again", partitions=(0, 1), plans=((1, 1), (0, 1)))
_COPIED = World(name="a task that is tried again", drivers=((0, "refuse"),), batches=1, copies=1)
_FAILING = World(name="a job that fails", drivers=((0, "refuse"),), failures=1)
_ADOPTED = World(name="a second query adopts", drivers=((0, "refuse"), (1, "adopt")), plans=((1,),))
_ROLLED_BACK = World(name="a rollback", drivers=((0, "refuse"),), rollbacks=2, batches=3, attempts=4)
_READ = World(name="a reader", drivers=((0, "refuse"),), partitions=(0, 1), plans=((1, 1), (0, 1)), batches=3, reads=1)
_PURGED = World(name="a reader and a vacuum", drivers=((0, "refuse"),), plans=((1,), (2,)), reads=1, vacuums=1)
_PUT_BACK = World(
    name="a store that is put back", drivers=((0, "refuse"),), losses=1, loss="back", batches=1, failures=2
)
_FAILED_OVER = World(
    name="a node that fails over", store="cluster", drivers=((0, "refuse"),), plans=((1,),), losses=1, loss="node"
)
_TWO_STORES = Together(name="two stores")
_CORRECTED_TOGETHER = Together(
    name="a correction of two stores", drivers=((0, "refuse"),), attempts=2, plans=(1,), corrections=2
)

_COPIED_CHECKPOINT = Replans(name="a copied checkpoint", rows=2, attempts=3)
_LEFT_BEHIND = Replans(name="a copied checkpoint, a batch left behind", drivers=2)
_COPIED_FOLLOWED = Replans(
    name="a copied checkpoint, a state that follows", stores=(0, 1), follows=True, drivers=2, rows=2
)
_WRONG_ROWS = "counts rows twice or not at all"

_ADOPTED_ANYWHERE = Replans(name="a query that adopts, from any row", adopters=1, copies=0, drivers=2, rows=2)
_ADOPTED_IN_TWO_STORES = Replans(
    name="a query that adopts, from any row, two stores",
    stores=(0, 1),
    adopters=1,
    copies=0,
    drivers=2,
    rows=2,
    attempts=3,
)

_SWALLOWS = Function(swallows=True)
_IN_PARTS = Parts(name="a batch in parts", drivers=(_SWALLOWS, WHOLE))
_IN_PARTS_FAILING = replace(_IN_PARTS, name="a batch in parts, a call that raises", failures=1)
_IN_PARTS_VACUUM = replace(_IN_PARTS, name="a batch in parts, a vacuum", vacuums=1)
_IN_PARTS_TRANSACTIONAL = replace(_IN_PARTS, name="a batch in parts, transactional", type="transactional", failures=1)
_AS_IF_WHOLE = "as if it were whole"

_FOLLOWED = Following(name="a state that is followed", drivers=2, followed=2)
_FORGOTTEN = Forgetting(name="a key that is forgotten", attempts=2, rollbacks=0)
_FORGOTTEN_ONCE = Forgetting(name="a key that is forgotten, a rollback", attempts=2, operators=1)
_CORRECTED = Correcting(name="a correction that is repeated")
_CORRECTED_TWICE = Correcting(name="two corrections", ids=(0, 1), rollbacks=2)
_RECOUNTED = Correcting(name="a correction and a recount", ids=(0, 1), recounts=(1,))
_TO_NEW, _THERE_AND_BACK = ("swap", 1), (("swap", 1), ("swap", None), ("swap", 1))
_SWAPPED = Swapping(name="swaps beside batches", operators=(_TO_NEW, ("swap", None)), batches=(1, 1))
_SWAPPED_AND_READ = Swapping(name="swaps and a reader", operators=_THERE_AND_BACK, calls=3)
_READ_BESIDE_BATCHES = Swapping(name="a swap, batches and a reader", operators=(_TO_NEW,), batches=(1, 0), calls=2)
_SWAPPED_CORRECTED = Swapping(name="swaps and a correction", operators=(_TO_NEW, ("swap", None), ("correct", 0)))
_DROPPED = Swapping(name="a swap and a drop", operators=(_TO_NEW, ("drop", 1)))

MUTANTS: tuple[Mutant, ...] = (
    Mutant("Trident's rule", _TridentsRule, _RESTARTED),
    Mutant("a txid per batch", _TxidPerBatch, _RESTARTED),
    Mutant("nothing is dead", _NothingIsDead, _RESTARTED),
    Mutant("no fence", _NoFence, _RESTARTED),
    Mutant("a fence of the epoch alone", _FenceOfAnEpoch, _FAILING),
    Mutant("a fence without the attempt's nonce", _FenceWithoutNonce, _PUT_BACK),
    Mutant("a commit to a store that was put back", _CommitsToACopy, _PUT_BACK),
    Mutant(
        "a ledger made over records, by a clock that was set back",
        _MakesLedgersOverRecords,
        World(
            name="a ledger that is lost, a clock that stands",
            drivers=((0, "refuse"), (1, "refuse")),
            losses=1,
            loss="ledger",
            clock_stands=True,
        ),
    ),
    Mutant(
        "batches that are missing are no error",
        _GapsAreAccepted,
        World(name="a store that is emptied", plans=((1,),), losses=1),
        "is committed where",
    ),
    Mutant(
        "an opening that keeps the epoch",
        _OpeningKeepsTheEpoch,
        World(name="a transactional cluster", store="cluster", type="transactional", plans=((1,),)),
        "is refused for ever",
    ),
    Mutant("no claims", _NoClaims, _COPIED),
    Mutant("no claims by empty tasks", _EmptyTasksDoNotClaim, _COPIED),
    Mutant("adopt compares batch ids of two owners", _AdoptComparesBatchIds, _ADOPTED, "goes on behind"),
    Mutant(
        "an owner that yields without a floor",
        _GivesWayAsItIs,
        World(
            name="transactional, an owner that yields",
            type="transactional",
            drivers=((0, "refuse"), (1, "refuse")),
            plans=((1,),),
            surrenders=1,
        ),
    ),
    Mutant("one next batch for all owners", _OneNextBatchForAllOwners, _ADOPTED, "goes on behind"),
    Mutant("rollback after a later attempt began", _RollbackAfterALaterAttempt, _ROLLED_BACK),
    Mutant("rollback twice in a row", _RollbackTwiceInARow, _ROLLED_BACK),
    Mutant("vacuum beside running tasks", _VacuumBesideTasks, World(name="a vacuum", vacuums=1)),
    Mutant(
        "a vacuum that forgets what is dead though a batch came meanwhile",
        _VacuumForgetsWhateverCameMeanwhile,
        World(name="a vacuum", vacuums=1),
    ),
    Mutant("readers learn of a vacuum at its end", _VacuumCountsAtItsEnd, _PURGED, "a reader found"),
    Mutant(
        "reset by deleting",
        _ResetDeletes,
        World(name="a second query resets", drivers=((0, "refuse"), (1, "reset")), reads=1),
        "a reader found",
    ),
    Mutant(
        "a reset that keeps the numbers of owners",
        _ResetKeepsTheNumbersOfOwners,
        World(name="reset and back again", drivers=((0, "refuse"), (1, "reset"), (0, "reset"))),
        "does not count",
    ),
    Mutant("a removed key deleted", _RemovedKeysAreDeleted, World(name="removals", plans=((1,), (2,)))),
    Mutant("redo of a committed batch", _RedoOfACommittedBatch, _RESTARTED, "is committed where"),
    Mutant(
        "a cluster fence set unconditionally",
        _ClusterFenceSetUnconditionally,
        World(name="a cluster", store="cluster", plans=((1,),), lost_replies=1),
        "is refused for ever",
    ),
    Mutant(
        "a cluster's fence that moves up from whatever it is at",
        _ClusterFenceMovesFromAnywhere,
        replace(_FAILED_OVER, lost_replies=1),
        "an attempt counts on",
    ),
    Mutant(
        "a cluster that commits with its fences open",
        _ClusterCommitsWithFencesOpen,
        _FAILED_OVER,
        "an attempt counts on",
    ),
    Mutant(
        "a cluster that looks at no fence before it begins",
        _ClusterLooksAtNoFence,
        _FAILED_OVER,
        "an attempt counts on",
    ),
    Mutant("a cluster that minds no failover within an attempt", _CommitsToACopy, _FAILED_OVER, "an attempt counts on"),
    Mutant("a reader that takes newer records for dead ones", _ReaderMindsNoStaleRecord, _READ, "a reader found"),
    Mutant("a reader that does not look again", _ReaderDoesNotLookAgain, _PURGED, "a reader found"),
    Mutant(
        "a reader that takes an emptied and begun state for the old one",
        _ReaderMindsNoNewLedger,
        World(
            name="a store that is emptied, with a reader",
            batches=1,
            attempts=2,
            plans=((1,),),
            losses=1,
            reads=1,
        ),
        "a reader found",
    ),
    Mutant("a key written twice in one attempt", _KeysWrittenTwice, World(name="one driver", drivers=((0, "refuse"),))),
    Mutant("two stores, what is done is skipped", _SkipsWhatIsDone, _TWO_STORES, "differ for ever"),
    Mutant(
        "one store, a commit for each state", _CommitsOneByOne, Together(name="one store", stores=(0, 0)), "are apart"
    ),
    Mutant("a store rolled back before all are opened", _RollsBackBeforeAllAreOpened, _TWO_STORES, "goes on behind"),
    Mutant(
        "a state is corrected whose last batch another one lacks",
        _CorrectsWhateverOthersLack,
        _CORRECTED_TOGETHER,
        "refused for ever",
    ),
    Mutant("a correction of several states is begun unseen", _CorrectsWhatItDidNotSee, _CORRECTED_TOGETHER, "for ever"),
    Mutant("a correction is called again for all states", _CorrectsAllStatesAgain, _CORRECTED_TOGETHER, "twice"),
    Mutant(
        "only one's own batches are reconciled",
        _EvensOutItsOwnBatchesAlone,
        Together(name="two stores, a second query adopts", drivers=((0, "refuse"), (1, "adopt")), batches=1),
        "not even",
    ),
    Mutant(
        "a reset that forgets who kept the state",
        _ResetForgetsWhoKeptTheState,
        Together(
            name="two stores, a query adopts",
            drivers=((0, "refuse"), (0, "refuse"), (1, "adopt")),
            batches=1,
            attempts=2,
        ),
        "not even",
    ),
    Mutant(
        "a vacuum that forgets by reading alone, where late writers are not refused",
        _ForgetsWithoutAFence,
        World(name="a filtered store, a vacuum", store="filtered", plans=((1,), (0,)), vacuums=1),
    ),
    Mutant(
        "a committed batch is a replay, whatever its plan", _ReplaysWhateverThePlan, _COPIED_CHECKPOINT, _WRONG_ROWS
    ),
    Mutant("plans are told by their offsets", _TellsPlansByTheirOffsets, _COPIED_CHECKPOINT, _WRONG_ROWS),
    Mutant("a batch is counted anew behind which another has begun", _CountsAnewBehindAnother, _LEFT_BEHIND),
    Mutant("a batch goes on behind any batch", _GoesOnBehindAnyBatch, _COPIED_CHECKPOINT, _WRONG_ROWS),
    Mutant(
        "a transactional attempt is repeated, whatever its plan",
        _RepeatsWhateverThePlan,
        Replans(name="a copied checkpoint, transactional", type="transactional", drivers=2, attempts=3),
    ),
    Mutant("a state that follows counts anew for any driver", _FollowsAnyDriver, _COPIED_FOLLOWED, "accepted"),
    Mutant("adopt compares nothing", _AdoptComparesNothing, _ADOPTED_ANYWHERE, _WRONG_ROWS),
    Mutant(
        "adopt compares a first batch alone",
        _AdoptComparesTheFirstBatch,
        replace(_ADOPTED_ANYWHERE, name="an owner that comes back", drivers=3, order=(0, 1, 0), attempts=3),
        _WRONG_ROWS,
    ),
    Mutant(
        "adopt compares only before it opens the stores",
        _AdoptComparesBeforeItOpens,
        _ADOPTED_IN_TWO_STORES,
        "accepted",
    ),
    Mutant(
        "adopt compares before the states are even",
        _AdoptComparesBeforeStatesAreEven,
        _ADOPTED_IN_TWO_STORES,
        "accepted",
    ),
    Mutant(
        "adopt takes unknown for equal",
        _AdoptTakesUnknownForEqual,
        replace(_ADOPTED_ANYWHERE, name="a query that adopts, and does not say where it starts", are_silent=True),
        _WRONG_ROWS,
    ),
    Mutant("a batch in parts is not noticed", _NoPartIsNoticed, _IN_PARTS, "nobody noticed"),
    Mutant(
        "only parts that this run has committed are noticed",
        _MindsWhatItCommitted,
        replace(_IN_PARTS, name="a batch in parts, two drivers", drivers=(_SWALLOWS, _SWALLOWS)),
        "nobody noticed",
    ),
    Mutant(
        "the first call that failed stands for those after it",
        _MindsTheFirstFailure,
        Parts(name="the second batch in parts", drivers=(_SWALLOWS._replace(since=1),), failures=2),
        "the second part of batch 1 alone",
    ),
    Mutant("the rows of a replay are not counted", _CountsNoRowsOfAReplay, _IN_PARTS, "nobody noticed"),
    Mutant("no part is taken back", _TakesNoPartBack, _IN_PARTS, _AS_IF_WHOLE),
    Mutant(
        "a part is taken back in one store",
        _TakesBackInOneStore,
        replace(_IN_PARTS, name="a batch in parts, two stores", stores=(0, 1)),
        _AS_IF_WHOLE,
    ),
    Mutant("a part whose call raised is not taken back", _TakesNoFailedPartBack, _IN_PARTS_FAILING, _AS_IF_WHOLE),
    Mutant("a run is refused when its part is taken back", _RefusesTheRunAtTheEnd, _IN_PARTS_FAILING, "a run goes on"),
    Mutant("a part is taken back over a later attempt", _TakesBackOverALaterAttempt, _IN_PARTS_VACUUM),
    Mutant(
        "what can be taken back is decided before the write", _DecidesBeforeTheWrite, _IN_PARTS_VACUUM, _AS_IF_WHOLE
    ),
    Mutant("an attempt of a part is not marked", _MarksNoAttempt, _IN_PARTS_TRANSACTIONAL, _AS_IF_WHOLE),
    Mutant("a mark is not looked at", _LooksAtNoMark, _IN_PARTS_TRANSACTIONAL, _AS_IF_WHOLE),
    Mutant(
        "a mark is looked at for its own batch",
        _LooksAtTheMarkForThatBatch,
        _IN_PARTS_TRANSACTIONAL,
        "counts on a part",
    ),
    Mutant("who follows asks only for what counts", _AsksOnlyForWhatCounts, _FOLLOWED, "the follower has"),
    Mutant("who follows asks for nothing of where it is", _AsksFromTheNextOn, _FOLLOWED, "the follower has"),
    Mutant(
        "who follows takes what is not dead for counted",
        _TakesWhatIsNotDeadForCounted,
        Following(name="a state that is followed, a vacuum", drivers=1, vacuums=1),
        "the follower has",
    ),
    Mutant(
        "who follows looks once at what is kept",
        _LooksOnceAtWhatIsKept,
        Following(name="a state that is followed by somebody slow", drivers=1, attempts=4, rollbacks=0, followed=2),
        "the follower has",
    ),
    Mutant("the log is written after the commit", _LogsAfterTheCommit, _FOLLOWED, "the follower has"),
    Mutant("what was rolled back is forgotten too early", _ForgetsWhereSomebodyMayBe, _FOLLOWED, "the follower has"),
    Mutant("a forgotten record is removed before the ledger knows", _RemovesFirst, _FORGOTTEN, "the value is"),
    Mutant("a forgotten key has a tombstone alone", _TombstoneAlone, _FORGOTTEN, "bytes of what is forgotten"),
    Mutant("a forgotten record is removed with what came since", _PurgesBlindly, _FORGOTTEN, "the value is"),
    Mutant("a key is forgotten as of when that was asked for", _ListedAsOfWhenAsked, _FORGOTTEN, "the value is"),
    Mutant("a key is forgotten again under the same id", _ForgetsAgain, _FORGOTTEN, "rows that came later"),
    Mutant(
        "a batch is rolled back over an operator's attempt", _RollsBackOverAnOperator, _FORGOTTEN_ONCE, "the value is"
    ),
    Mutant("a correction has no id", _CorrectsAgain, _CORRECTED, "a correction twice"),
    Mutant("a correction is batch 0 of an owner of its own", _CorrectsAsBatchZero, _CORRECTED_TWICE, "was said to be"),
    Mutant("a batch is rolled back over a correction", _RollsBackOverACorrection, _CORRECTED, "the value is"),
    Mutant("a correction is taken back over a later attempt", _TakesACorrectionBackLate, _CORRECTED, "the value is"),
    Mutant("the id of a correction stays", _KeepsTheIdOfWhatIsTakenBack, _CORRECTED, "an entry that is none"),
    Mutant("a correction begins under another ledger", _BeginsUnderAnother, _CORRECTED, "the value is"),
    Mutant("a recount over a batch that came since", _RecountsElsewhere, _RECOUNTED, "the value is"),
    Mutant("a recount undoes corrections", _RecountsWithoutCorrections, _RECOUNTED, "the value is"),
    Mutant("the alias is looked at for each key", _ResolvedPerKey, _SWAPPED_AND_READ, "one call reads"),
    Mutant("the alias is looked at once", _ResolvedOnce, _SWAPPED_AND_READ, "a call that began after swap"),
    Mutant(
        "a reader takes an old copy of the alias",
        _GoesBackToAnOldCopy,
        replace(_SWAPPED_AND_READ, name="swaps and a reader, old copies of the alias", old_copies=True),
        "a reader goes back",
    ),
    Mutant(
        "the alias is set without a comparison",
        _SetsTheAlias,
        Swapping(name="swaps there and back, and one version kept", operators=(*_THERE_AND_BACK[:2], ("keep",))),
        "is undone",
    ),
    Mutant("positions are compared before the alias is written", _ComparesBeforeTheWrite, _SWAPPED, "behind v"),
    Mutant("a reader looks at the alias before it reads", _LooksBeforeItReads, _READ_BESIDE_BATCHES, "back from batch"),
    Mutant("a swap asks for no correction", _AsksForNoCorrection, _SWAPPED_CORRECTED, "without the correction"),
    Mutant(
        "corrections are compared before the alias is written",
        _ComparesBeforeTheWrite,
        _SWAPPED_CORRECTED,
        "without the correction",
    ),
    Mutant("a drop does not ask the alias", _DropsWithoutAsking, _DROPPED, "which is gone"),
    Mutant("a drop asks the alias before its first write alone", _DropsAfterAskingOnce, _DROPPED, "which is gone"),
    Mutant(
        "without joint ledgers the alias keeps a version as it leads to it",
        _SwapsBeforeItKeeps,
        replace(_DROPPED, name="a swap and a drop, no joint ledgers", joint=False),
        "which is gone",
    ),
)
