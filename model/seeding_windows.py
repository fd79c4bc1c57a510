"""A seed of a state with rolling windows, or with windows that fire, by drivers that die and go on: random worlds.

Drivers, stages and lost checkpoints are those of `model.seeding`. Here rows have times, and the stage is what says how
far they have come. The truth is brute force over the rows of the stage that counts, and of the batches after it.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from mapstate.errors import LedgerError, UsageError
from mapstate.protocol import seeding
from mapstate.protocol.ledger_record import Attempt, BatchPlan, Commit, LedgerRecord, OpenRequest
from mapstate.protocol.opening import open_ledger
from mapstate.protocol.rolling import RollingDefinition, RollingWindow
from mapstate.protocol.sessions import Piece, pane_to_settle, sessions_of
from mapstate.protocol.transitions import begin, commit
from mapstate.protocol.windows import NEVER, Input, PaneChange, WindowCommit, WindowDefinition, WindowsRecord
from mapstate.schema import Field, KeyField
from model.seeding import Wrong

KEYS, BUCKETS, PLAN = "abc", 2, BatchPlan("[0]", "[1]", 1)

MUTANTS = {
    "horizon_later": "the horizon by which rows are joined is set by the begin after the seed",
    "joins_to_newest": "rows are joined as if the watermark were at the latest row",
    "stages_joined": "a stage that is made anew is joined by the horizon of the lost one",
    "keeps_horizon": "a stage that is made anew leaves the horizon where the lost one had it",
    "expires_unrounded": "rows older than the longest window are left out, whatever its resolution",
    "no_watermark": "the end does not say how far the rows have come",
}


class Timed(NamedTuple):
    """A row."""

    key: str
    time: int


Tiles = dict[int, int]
"""The number of rows in each tile, by its first unit."""


class World:
    """One state with rolling windows, its query, and readers."""

    def __init__(self, number: int, mutant: str = "") -> None:
        self.rng, self.mutant = random.Random(number), mutant
        draw = self.rng
        lengths = [
            RollingWindow("short", 4, 1),
            RollingWindow("long", draw.choice([9, 12, 17]), draw.choice([3, 4, 5])),
        ]
        lifetime = [RollingWindow("ever", 0, 0)] * draw.choice([0, 1])
        self.definition = RollingDefinition(
            windows=(*lengths, *lifetime), type="bigint", unit=1, lag=draw.choice([0, 2]), retention=draw.choice([0, 3])
        )
        self.rows = [self.row(60) for _ in range(draw.randint(1, 12))]
        self.is_flaky = draw.random() < 0.5
        self.ledger: LedgerRecord | None = None
        self.stages: dict[str, list[list[Timed]]] = {}
        self.records: dict[str, tuple[int, Tiles | None, Tiles | None]] = {}
        self.counted: dict[int, list[Timed]] = {}  # by the txid after whose commit they count
        self.names = self.newest = 0

    @property
    def behind(self) -> int:
        """How far the watermark is behind the latest row."""
        return self.definition.lag

    def row(self, end: int) -> Timed:
        return Timed(self.rng.choice(KEYS), self.rng.randint(0, end))

    def name(self) -> str:
        self.names += 1
        return f"name-{self.names}"

    def request(self, session: str) -> OpenRequest:
        return OpenRequest(
            state="s",
            type="opaque",
            serializer="json",
            keys=(KeyField("k", "string"),),
            fields=(Field("n", "Count", "bigint"),),
            owner="q",
            session=session,
            clock_txid=10,
            rolling=self.definition,
        )

    def commit_of(self, rows: Sequence[Timed], before: WindowCommit) -> WindowCommit:
        newest = max((row.time for row in rows), default=NEVER)
        newest = max(newest, NEVER if before.newest is None else before.newest)
        mark = NEVER if newest == NEVER else newest - self.behind
        known = None if newest == NEVER else newest
        return WindowCommit(watermark=mark, before=before.watermark, inputs={"": Input(newest, 1)}, newest=known)

    # ---- the driver

    def driver(self) -> Iterator[None]:
        """A seed, and one batch after it. It may be left for good wherever it yields."""
        session = self.name()
        opened = open_ledger(self.ledger, self.request(session))
        if opened.seed is None and opened.owners["q"]:
            self.ledger = opened
            yield from self.batch(session)
            return
        self.ledger = seeding.open_seed(opened, "p")
        yield
        seed = self.ledger.seed
        if seed is None or seed.stage not in self.stages:
            name = self.name()
            staged = [row for row in self.rows if not self.is_flaky or self.rng.random() < 0.7]
            found = self.commit_of(staged, WindowCommit())
            before = self.ledger
            under = before if self.mutant == "stages_joined" else seeding.with_windows(before, None)
            units = self.units_of(staged, under)
            kept = self.kept_of(units, seeding.with_windows(before, found))
            self.stages[name] = [[row for row in kept if KEYS.index(row.key) % BUCKETS == at] for at in range(BUCKETS)]
            yield
            before = self.ledger
            after = seeding.staged(before, session, name, files=1, rows=len(kept), buckets=BUCKETS, windows=found)
            after = self.wrong_stage(before, after)
            self.counted[after.floor] = staged
            self.ledger = after
            yield
        yield from self.load(session)

    def units_of(self, staged: Sequence[Timed], under: LedgerRecord) -> list[Timed]:
        """The rows as they are staged."""
        assert under.rolling is not None
        tiling = under.rolling.tiling
        return [Timed(row.key, tile) for row in staged for tile in tiling.tiles([row.time]) if tile is not None]

    def kept_of(self, units: Sequence[Timed], after: LedgerRecord) -> list[Timed]:
        """Those that are loaded."""
        kept = after.rolling
        assert kept is not None
        first = kept.first_time()
        if self.mutant == "expires_unrounded" and not kept.definition.has_lifetime and kept.horizon != NEVER:
            first = kept.horizon - max(window.length for window in kept.definition.windows)
        return [row for row in units if row.time >= first]

    def wrong_stage(self, before: LedgerRecord, after: LedgerRecord) -> LedgerRecord:
        """What a mutant makes of the ledger of a stage."""
        if before.rolling is None or after.rolling is None:
            return after
        horizon = NEVER if self.mutant == "horizon_later" else after.rolling.horizon
        if self.mutant == "keeps_horizon":
            horizon = max(horizon, before.rolling.horizon)
        return msgspec.structs.replace(after, rolling=msgspec.structs.replace(after.rolling, horizon=horizon))

    def values_of(self, rows: Sequence[Timed], staged: WindowCommit | None) -> dict[str, Tiles]:
        """The records of staged rows."""
        tiling = self.tiling(staged)
        return {key: _joined(tiling, {}, [row for row in rows if row.key == key]) for key in {row.key for row in rows}}

    def load(self, session: str) -> Iterator[None]:
        assert self.ledger is not None
        while (seed := self.ledger.seed) is not None and seed.done < BUCKETS:
            self.ledger, attempt = seeding.begin_bucket(self.ledger, session, self.name())
            yield
            if seed.stage not in self.stages:
                return
            rows = self.stages[seed.stage][seed.done]
            values = self.values_of(rows, seed.windows)
            for key, value in sorted(values.items()):
                self.put(attempt, key, value)
                yield
            count = len(values)
            self.ledger = seeding.commit_bucket(
                self.ledger,
                session,
                attempt.txid,
                rows=len(rows),
                keys=count,
                keys_delta=count,
                panes=change_of(values),
            )
            yield
        ended = seeding.end_seed(self.ledger, session, PLAN, Commit(batch_id=0, txid=0, owner="q", offsets="[1]"))
        if self.mutant == "no_watermark" and ended.last_commit is not None:
            done = msgspec.structs.replace(ended.last_commit, windows=WindowCommit())
            ended = msgspec.structs.replace(ended, last_commit=done)
        if ended is not self.ledger and ended.last_commit is not None:
            self.counted[ended.last_commit.txid] = self.counted[ended.floor]
        self.ledger = ended
        yield

    def tiling(self, staged: WindowCommit | None) -> Any:
        assert self.ledger is not None
        assert self.ledger.rolling is not None
        kept = self.ledger.rolling
        if self.mutant == "horizon_later":
            kept = kept.seeded(staged)
        if self.mutant == "joins_to_newest" and staged is not None and staged.newest is not None:
            kept = msgspec.structs.replace(kept, horizon=staged.newest)
        return kept.tiling

    def batch(self, session: str) -> Iterator[None]:
        """The next batch of the stream, by the rules of any state with rolling windows."""
        assert self.ledger is not None
        self.ledger, attempt = begin(self.ledger, session, self.ledger.owners["q"])
        assert isinstance(attempt, Attempt)
        last, under = self.ledger.last_commit, self.ledger
        assert last is not None
        rows, values = self.added(under)
        yield
        for key, value in sorted(values.items()):
            self.put(attempt, key, value, self.value(key, under))
            yield
        windows, purged = self.commit_of(rows, last.windows or WindowCommit()), self.purged(under)
        windows = msgspec.structs.replace(windows, settled=self.settled(under))
        done = Commit(batch_id=last.batch_id + 1, txid=attempt.txid, owner="q", windows=windows)
        self.ledger = commit(self.ledger, session, done, change_of(values, purged))
        self.counted[attempt.txid] = self.counted[last.txid] + rows
        yield

    def settled(self, under: LedgerRecord) -> int:
        """Of sessions: what the commit of the next batch says."""
        return (under.last_windows() or WindowCommit()).settled

    def purged(self, under: LedgerRecord) -> list[int]:  # noqa: ARG002
        """The panes that the next batch removes. Of sessions; no others have to be."""
        return []

    def added(self, ledger: LedgerRecord) -> tuple[list[Timed], dict[str, Tiles]]:
        """Some more rows that count, and the values after them."""
        kept = ledger.rolling
        assert kept is not None
        rows = [row for row in (self.row(80) for _ in range(3)) if row.time >= kept.first_time()]
        keys = {row.key for row in rows}
        old = {key: self.value(key, ledger) or {} for key in keys}
        return rows, {key: _joined(kept.tiling, old[key], [row for row in rows if row.key == key]) for key in keys}

    def put(self, attempt: Attempt, key: str, value: Tiles, before: Tiles | None = None) -> None:
        assert self.ledger is not None
        if attempt.token != self.ledger.fence():
            raise LedgerError("fenced")
        self.records[key] = attempt.txid, value, before or None

    def value(self, key: str, ledger: LedgerRecord) -> Tiles | None:
        found: Tiles | None = ledger.view().values([self.records.get(key)], ledger.next_txid - 1)[0]
        return found

    # ---- a world

    def go(self) -> None:
        """Some steps of drivers that die; then one that lives; and at each moment a reader."""
        running: list[Iterator[None]] = []
        for _ in range(self.rng.randint(5, 60)):
            draw = self.rng.random()
            if draw < 0.06:
                self.stages.clear()
            elif draw < 0.2 or not running:
                running.append(self.driver())
            else:
                one = running[-1] if self.rng.random() < 0.8 else self.rng.choice(running)
                try:
                    next(one)
                except (StopIteration, LedgerError, UsageError):
                    running.remove(one)
            self.read()
        for _ in range(2):
            for _ in self.driver():
                self.read()
        if self.ledger is None or self.ledger.last_commit is None or self.ledger.last_commit.batch_id < 1:
            raise Wrong("the stream did not go on")

    def read(self) -> None:
        """Every key and window, of some of the times that can be asked for."""
        ledger = self.ledger
        if ledger is None or ledger.seed is not None or ledger.last_commit is None or ledger.rolling is None:
            return
        rows, horizon = self.counted[ledger.last_commit.txid], ledger.rolling.horizon
        newest = max((row.time for row in rows), default=NEVER)
        mark = (ledger.last_windows() or WindowCommit()).watermark
        if newest != NEVER and mark != newest - self.definition.lag:
            raise Wrong(f"the watermark is {mark}, and the latest row is of {newest}")
        if newest != NEVER and horizon > mark - self.definition.retention:
            raise Wrong(f"nobody can ask for {mark - self.definition.retention}, which is kept")
        for key in KEYS:
            value = self.value(key, ledger) or {}
            for at in self.rng.sample(range(max(horizon, -5), 85), 5):
                for window in self.definition.windows:
                    low = NEVER if not window.length else (at - window.length) // window.resolution * window.resolution
                    found = sum(count for start, count in value.items() if low <= start < at)
                    right = sum(row.key == key and low <= row.time < at for row in rows)
                    if found != right:
                        raise Wrong(f"{key} as of {at} has {found} of {right} rows in {window}: {value}")


def change_of(values: Iterable[str], purged: Sequence[int] = ()) -> PaneChange:
    """What a commit says of panes, by the names of records; those of rolling windows have none."""
    return PaneChange({int(name.split()[0]) for name in values if " " in name}, purged, 1)


def _joined(tiling: Any, value: Tiles, rows: Sequence[Timed]) -> Tiles:
    """A value with more rows, in the tiles of a horizon."""
    after: Tiles = defaultdict(int)
    for start, count in [*value.items(), *((row.time, 1) for row in rows)]:
        (tile,) = tiling.tiles([start])
        if tile is not None:
            after[tile] += count
    return dict(after)


FIRED_MUTANTS = {
    "purged_later": "what is gone is said by the begin after the seed",
    "removed_stays": "a watermark that is put back brings back windows that were never loaded",
    "expires_by_first": "a pane is left out when the first of its windows is gone",
    "late_in_stage": "rows behind the watermark of the stage are late",
}


class FiredWorld(World):
    """The same with windows that fire. A record is of a pane and a key."""

    def __init__(self, number: int, mutant: str = "") -> None:
        super().__init__(number, mutant)
        draw = self.rng
        length, slide = draw.choice([(5, 5), (12, 5), (10, 5), (3, 5)])
        self.fired = WindowDefinition(
            length=length, slide=slide, lag=self.definition.lag, retention=draw.choice([0, 7, 20])
        )
        self.final: dict[tuple[str, int], Any] = {}

    def request(self, session: str) -> OpenRequest:
        keys = (KeyField("w", "bigint"), KeyField("k", "string"))
        return msgspec.structs.replace(super().request(session), rolling=None, windows=self.fired, keys=keys)

    def units_of(self, staged: Sequence[Timed], under: LedgerRecord) -> list[Timed]:  # noqa: ARG002
        panes = [Timed(row.key, pane) for row in staged if (pane := self.fired.panes.pane(row.time)) is not None]
        if self.mutant != "late_in_stage":
            return panes
        mark = self.commit_of(staged, WindowCommit()).watermark
        return [row for row in panes if row.time >= self.fired.fired_before(mark)]

    def kept_of(self, units: Sequence[Timed], after: LedgerRecord) -> list[Timed]:
        assert after.windows is not None
        windows, first = after.windows, seeding.first_pane(after.windows)
        if first is None:
            return list(units)
        if self.mutant == "expires_by_first":
            return [row for row in units if self.fired.panes.next_end(row.time) > windows.purged]
        return [row for row in units if row.time >= first]

    def wrong_stage(self, before: LedgerRecord, after: LedgerRecord) -> LedgerRecord:  # noqa: ARG002
        assert after.windows is not None
        windows = after.windows
        if self.mutant == "purged_later":
            windows = msgspec.structs.replace(windows, purged=NEVER)
        if self.mutant == "removed_stays":
            windows = msgspec.structs.replace(windows, removed=NEVER)
        return msgspec.structs.replace(after, windows=windows)

    def values_of(self, rows: Sequence[Timed], staged: WindowCommit | None) -> dict[str, Tiles]:  # noqa: ARG002
        found: dict[str, Tiles] = defaultdict(dict)
        for row in rows:
            found[f"{row.time} {row.key}"] = {0: found[f"{row.time} {row.key}"].get(0, 0) + 1}
        return found

    def added(self, ledger: LedgerRecord) -> tuple[list[Timed], dict[str, Tiles]]:
        mark = (ledger.last_windows() or WindowCommit()).watermark
        rows = [self.row(80) for _ in range(3)]
        rows = [row for row in rows if mark == NEVER or row.time >= self.fired.fired_before(mark)]
        values = self.values_of(self.units_of(rows, ledger), None)
        old = {name: (self.value(name, ledger) or {}).get(0, 0) for name in values}
        return rows, {name: {0: value[0] + old[name]} for name, value in values.items()}

    def read(self) -> None:
        """Every window that is not gone, also after an operator has put the watermark back."""
        ledger = self.ledger
        if ledger is None or ledger.seed is not None or ledger.last_commit is None or ledger.windows is None:
            return
        rows, windows = self.counted[ledger.last_commit.txid], ledger.windows
        mark = (ledger.last_windows() or WindowCommit()).watermark
        if windows.purged > max(NEVER, mark - self.fired.retention):
            raise Wrong("windows are gone that are retained")
        if self.rng.random() < 0.2:
            windows = windows.put_back(0)
        for end in range(self.fired.panes.next_end(-1), 100, self.fired.slide):
            if end <= windows.purged:
                continue
            for key in KEYS:
                found = sum(
                    (self.value(f"{pane} {key}", ledger) or {}).get(0, 0) for pane in self.fired.panes.panes(end)
                )
                right = sum(row.key == key and end - self.fired.length <= row.time < end for row in rows)
                if found != right:
                    raise Wrong(f"{key} has {found} of {right} rows in the window that ends at {end}")
                if end <= mark and self.final.setdefault((key, end), found) != found:
                    raise Wrong(f"the final window of {key} that ends at {end} has changed")


SESSION_MUTANTS = {
    "purged_later": "what is gone is said by the begin after the seed",
    "removed_stays": "a watermark that is put back brings back sessions that were never loaded",
    "late_in_stage": "rows behind the watermark of the stage are late",
    "expires_pieces": "a piece is left out when it ends with its own last row",
    "expires_touching": "rows exactly a gap apart are two sessions where it is told which are over",
    "expires_by_bucket": "a session's pieces are in several buckets, and each tells by its own which are over",
    "all_final": "the history is over, and so are all of its sessions",
    "is_settled": "the end says that sessions have no pieces before those that are retained",
}


class SessionWorld(FiredWorld):
    """The same with sessions. A record is of a pane and a key: a `Piece` whose value is its number of rows."""

    def __init__(self, number: int, mutant: str = "") -> None:
        super().__init__(number, mutant)
        gap = self.rng.choice([2, 4, 7])
        self.rows += [self.row(60) for _ in range(self.rng.randint(0, 25))]
        self.fired = msgspec.structs.replace(self.fired, length=gap, slide=gap, sessions=True)

    @property
    def behind(self) -> int:
        return self.fired.behind

    def commit_of(self, rows: Sequence[Timed], before: WindowCommit) -> WindowCommit:
        done = super().commit_of(rows, before)
        if self.mutant == "all_final" and done.newest is not None and before.newest is None:
            return msgspec.structs.replace(done, watermark=done.newest + self.fired.length)
        return done

    def units_of(self, staged: Sequence[Timed], under: LedgerRecord) -> list[Timed]:  # noqa: ARG002
        mark = self.commit_of(staged, WindowCommit()).watermark
        first = self.fired.fired_before(mark) if self.mutant == "late_in_stage" else NEVER
        return [row for row in staged if row.time >= first]

    def kept_of(self, units: Sequence[Timed], after: LedgerRecord) -> list[Timed]:
        assert after.windows is not None
        windows, gap = after.windows, self.fired.length
        if self.mutant == "expires_touching":
            windows = msgspec.structs.replace(windows, apart=-NEVER)
        together = [units]
        if self.mutant == "expires_by_bucket":
            together = [[row for row in units if row.time // gap % BUCKETS == at] for at in range(BUCKETS)]
        kept: list[Timed] = []
        for rows in together:
            for key in KEYS:
                for session in sessions_of(
                    [Piece(row.time, row.time, 1) for row in sorted(rows) if row.key == key], windows
                ):
                    last = session[-1].last
                    kept += [
                        Timed(key, one.first)
                        for one in session
                        if (one.last if self.mutant == "expires_pieces" else last) + gap > windows.purged
                    ]
        return kept

    def wrong_stage(self, before: LedgerRecord, after: LedgerRecord) -> LedgerRecord:
        after = super().wrong_stage(before, after)
        seed, windows = after.seed, after.windows
        if self.mutant == "is_settled" and windows is not None and windows.purged != NEVER and seed is not None:
            done = msgspec.structs.replace(seed.windows or WindowCommit(), settled=windows.purged - self.fired.length)
            after = msgspec.structs.replace(after, seed=msgspec.structs.replace(seed, windows=done))
        return after

    def values_of(self, rows: Sequence[Timed], staged: WindowCommit | None) -> dict[str, Any]:  # noqa: ARG002
        found: dict[str, Piece] = {}
        for row in rows:
            name, own = f"{self.fired.panes.pane(row.time)} {row.key}", Piece(row.time, row.time, 1)
            found[name] = _one([found[name], own]) if name in found else own
        return found

    def added(self, ledger: LedgerRecord) -> tuple[list[Timed], dict[str, Any]]:
        """Rows that are not late; and of the pane that is settled, what is before it is joined into it."""
        windows, last = ledger.windows, ledger.last_windows() or WindowCommit()
        assert windows is not None
        rows = [row for row in (self.row(90) for _ in range(3)) if row.time > last.watermark]
        values, pane = self.values_of(rows, None), pane_to_settle(windows, last)
        for name, own in values.items():
            known: Any = self.value(name, ledger)
            values[name] = own if known is None else _one([known, own])
        if pane is None or not windows.may_have(pane):
            return rows, values
        for key in KEYS:
            if (name := f"{pane} {key}") in values:
                raise Wrong(f"a row goes into {pane}, which is settled")
            before = [piece for at, piece in self.pieces(key, ledger) if at <= pane]
            if before and self.value(name, ledger) is not None:
                values[name] = _one(sessions_of(before, windows)[-1])
        return rows, values

    def pieces(self, key: str, ledger: LedgerRecord, done: WindowCommit | None = None) -> list[tuple[int, Any]]:
        """The pieces of a key that count, each with its pane, in order."""
        windows, last = ledger.windows, done or ledger.last_windows()
        assert windows is not None
        panes = sorted(int(name.split()[0]) for name in self.records if name.endswith(key))
        found = [(pane, self.value(f"{pane} {key}", ledger)) for pane in panes if not windows.is_expired(pane, last)]
        return [(pane, piece) for pane, piece in found if piece is not None]

    def settled(self, under: LedgerRecord) -> int:
        assert under.windows is not None
        pane = pane_to_settle(under.windows, under.last_windows())
        return super().settled(under) if pane is None else pane

    def purged(self, under: LedgerRecord) -> list[int]:
        assert under.windows is not None
        due = list(under.windows.due(under.last_windows()))
        for name in [name for name in self.records if int(name.split()[0]) in due]:
            del self.records[name]
        return due

    def read(self) -> None:
        """Every session that is not gone, also after an operator has put the watermark back."""
        ledger = self.ledger
        if ledger is None or ledger.seed is not None or ledger.last_commit is None or ledger.windows is None:
            return
        rows, windows, done = self.counted[ledger.last_commit.txid], ledger.windows, ledger.last_windows()
        newest = max((row.time for row in rows), default=NEVER)
        if done is None or (newest != NEVER and done.watermark != newest - self.behind):
            raise Wrong(f"the watermark is {done}, and the latest row is of {newest}")
        if windows.purged > max(NEVER, done.watermark - self.fired.retention):
            raise Wrong("sessions are gone that are retained")
        mark = done.watermark
        if self.rng.random() < 0.2:
            windows = windows.put_back(0)
            done = windows.commit_put_back(done, 0, 0)
        for key in KEYS:
            found = self.sessions(sessions_of([piece for _, piece in self.pieces(key, ledger, done)], windows), windows)
            own = [Piece(row.time, row.time, 1) for row in sorted(rows) if row.key == key]
            right = self.sessions(sessions_of(own, windows), windows)
            if found != right:
                raise Wrong(f"{key} has the sessions {found}, not {right}")
            for end, session in found.items():
                if end <= mark and self.final.setdefault((key, end), session) != session:
                    raise Wrong(f"the final session of {key} that ends at {end} has changed")

    def sessions(self, found: Sequence[Sequence[Piece]], windows: WindowsRecord) -> dict[int, Piece]:
        """The sessions that are not gone, by their ends."""
        every = {session[-1].last + self.fired.length: _one(session) for session in found}
        return {end: session for end, session in every.items() if end > windows.purged}


def _one(pieces: Sequence[Piece]) -> Piece:
    return Piece(min(one.first for one in pieces), max(one.last for one in pieces), sum(one.value for one in pieces))
