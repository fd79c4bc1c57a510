"""One job's directories, store and Spark queries, and the check against plain Python."""

from __future__ import annotations

import json
import logging
import pickle
import random
import shutil
import sqlite3
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from fuzz.habits import Built, DiedError, State, build, run_habit
from fuzz.killed import kill
from fuzz.rolling import differences
from fuzz.rows import COLUMNS, SCHEMA, Row, equal_key, plain, write_file
from fuzz.steps import Break, Dies, Job, Start, Trips
from fuzz.upkeep import Corrected, Forgotten, is_forgotten
from mapstate import open_reader
from mapstate.backends import resolve
from mapstate.errors import LedgerError, MapStateError, SeedingError, StateNotFoundError
from mapstate.operations.checkpoint import rewind
from mapstate.protocol.ledger import Ledger
from mapstate.protocol.ways_back import rollback as rolled_back
from mapstate.testing import Begins, Commits, Fail, FaultyBackend

__all__ = ["EVENTS", "FailureError", "Query", "RefusedError", "Run", "World"]

_AGAIN = ".again"
SECONDS = 120
"""In which a run of a few batches has to end."""


class FailureError(Exception):
    """What must not be. ``kind`` is "wrong counts", "an error of another kind" or "advice that does not help"."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind


class RefusedError(Exception):
    """A job of which nothing more can be asked: it was refused, and its error names no way on that the fuzzer knows."""


class StoreCopy(NamedTuple):
    """A copy of the store, and what of its states no file tells."""

    path: Path
    by_hand: list[Row]
    corrections: list[Corrected]
    forgotten: list[Forgotten]
    led: dict[str, str]


@dataclass
class Run:
    """What one start of one query came to. ``errors`` are those that calls of states raised at last."""

    errors: list[Exception] = field(default_factory=list)
    died: bool = False
    ended: Exception | None = None
    batches: int = 0

    @property
    def error(self) -> Exception | None:
        """What an operator finds: the first error of a call, also one that was swallowed, or what ended the query."""
        if self.died:
            return DiedError("the driver died")
        return self.errors[0] if self.errors else self.ended


class Query:
    """A streaming query of the job, with its checkpoint and what advice has changed in its code."""

    def __init__(self, folder: Path, number: int, job: Job) -> None:
        self.folder = folder / f"query-{number}"
        self.folder.mkdir()
        self.states = tuple(replace(state, name=f"q{number}.{state.name}") for state in job.states)
        self.number = number
        self.declared: dict[str, list[State]] = {}  # with rolling windows: as they were and are, the present one last
        self.declare(self.states)
        self.checkpoint: Path = self.folder / "checkpoint"
        self.copy: Path | None = None
        self.newer: Path | None = None  # of a checkpoint that was set aside: an operator can put it back
        self.names = 0
        self.changes: dict[str, Any] = {}  # of the habit, for good
        self.options: dict[str, Any] = {}  # for the next start that ends well
        self.starts_at: str | None = None  # the offsets behind which its source starts
        self.inexact = False  # a non-transactional state may count a row twice after a failed attempt
        self.kept_frames: dict[int, Any] = {}
        self.was_called = False  # a state of it, for the last batch of the last run
        self.leaves_out: bool = False  # its function makes no call for some batches
        self.by_fields = False  # it groups by the fields of a struct: one that is null is one of nulls then

    @property
    def has_committed(self) -> bool:
        """Whether Spark has committed a batch."""
        return any(path.name.isdecimal() for path in (self.checkpoint / "commits").glob("*"))

    @property
    def state_names(self) -> list[str]:
        """Its states, with those that follow them."""
        return [name for one in self.states for name in (one.name, *[f"{one.name}.by_rows"] * one.followed)]

    @property
    def grouped(self) -> list[State]:
        """Its states as the job declares them now."""
        fields = ("u.id", "u.name") if self.by_fields else ("u",)
        keys = ([name for key in one.keys for name in (fields if key == "u" else (key,))] for one in self.states)
        return [replace(one, keys=tuple(names)) for one, names in zip(self.states, keys, strict=True)]

    def declare(self, changed: Sequence[State]) -> None:
        """The code declares these states so from here on."""
        now = {state.name: state for state in changed}
        self.states = tuple(now.get(state.name, state) for state in self.states)
        for state in self.states:
            before = self.declared.setdefault(state.name, [])
            if state.rolling and before[-1:] != [state]:
                before.append(state)

    def declare_again(self, changed: Sequence[State]) -> None:
        """As `declare`, of states by the names that the job gives them."""
        by_name = {state.name.removesuffix(_AGAIN): state.name for state in self.states}
        own = ((f"q{self.number}.{state.name}", state) for state in changed)
        self.declare([replace(state, name=by_name[name]) for name, state in own if name in by_name])

    def name_others(self) -> None:
        """Name other states in place of these."""
        self.states = tuple(replace(state, name=state.name + _AGAIN) for state in self.states)
        self.declare(())

    def copy_checkpoint(self) -> None:
        if self.checkpoint.exists():
            self.copy = self._next("copy")
            shutil.copytree(self.checkpoint, self.copy)

    def put_back_copy(self) -> None:
        if self.copy is not None:
            self.set_aside()
            shutil.copytree(self.copy, self.checkpoint)

    def set_aside(self) -> None:
        """Move the checkpoint to where an operator finds it."""
        newer = self.newer
        aside = self.lose()
        self.newer = newer or aside

    def lose(self) -> Path | None:
        """Lose the checkpoint for good, and what was set aside."""
        self.newer = self.starts_at = None
        return self.checkpoint.rename(self._next("aside")) if self.checkpoint.exists() else None

    def swap(self) -> None:
        """Put back what was set aside, and set aside what was there."""
        newer, self.newer = self.newer, None
        if newer is not None:
            self.set_aside()
            newer.rename(self.checkpoint)

    def put_back_newer(self) -> None:
        """Put back the newest checkpoint that was set aside."""
        newer = self.newer
        self.lose()
        if newer is not None:
            newer.rename(self.checkpoint)

    def _next(self, name: str) -> Path:
        self.names += 1
        return self.folder / f"{name}-{self.names}"


class World:
    """Everything of one job. Its methods are what steps and advice do."""

    def __init__(self, spark: Any, job: Job, folder: Path, redis_url: str | None = None) -> None:
        self.spark, self.job, self.folder = spark, job, folder
        self.url = {
            "sqlite": f"sqlite:///{folder}/state.db?synchronous=normal",
            "memory": f"memory://{folder.name}",
        }.get(job.store, f"{redis_url}?prefix={folder.name}/")
        self.file = folder / "state.db"
        self.sources = [folder / f"source-{at}" for at in range(job.sources)]
        for source in self.sources:
            source.mkdir()
        self.queries = [Query(folder, number, job) for number in range(job.queries)]
        self.files: list[tuple[Row, ...]] = []
        self.counted: int = 0  # files that the states have to hold
        self.expired = 0  # of these, those whose records had a ttl and expired
        self.by_hand: list[Row] = []  # rows that no file has
        self.lags = {state.lag for state in job.states if not state.rolling} or {0}
        self.ttl: float | None = None
        self.says_ttl = False  # a start has warned that a ttl does not hold for all records
        self.corrections: list[Corrected] = []  # of the first query
        self.forgotten: list[Forgotten] = []
        self.led: dict[str, str] = {}  # which state readers of a name read
        self.store_copy: StoreCopy | None = None
        self.log: list[str] = []
        self.runs = 0

    def __getstate__(self) -> dict[str, Any]:
        """For the process that is killed."""
        return self.__dict__ | {"spark": None}

    def add_file(self, rows: tuple[Row, ...]) -> None:
        """One more file, in the sources by turns."""
        number = len(self.files)
        write_file(self.sources[number % len(self.sources)], number, rows)
        self.files.append(rows)

    def add_file_for_all(self, count: int) -> None:
        """As many files with a row that every function gives to its states, and no window calls late."""
        value = {name: next(one for one in values if one is not None) for name, (_, _, values) in COLUMNS.items()}
        columns = sorted({column for state in self.job.states for column in state.keys})
        latest = max((row.t for file in self.files for row in file if row.t is not None), default=0)
        for _ in range(count * len(self.sources)):
            self.add_file((Row(tuple((name, value[name]) for name in columns), latest, 9),))

    # What runs

    def start(self, step: Start) -> tuple[Query, Exception] | None:
        """Start all queries until they have read all files; the first that failed, with its error."""
        self.runs += 1
        options = dict(step.options)
        self.ttl = (options | self.queries[0].options).get("ttl")
        self.lags |= {options["lag"]} if "lag" in options else set()
        for query in self.queries:
            query.declare_again(step.changed)
        if step.killed:
            return self._start_and_kill(step)
        with self._warnings():
            started = [(query, *self._start(query, step)) for query in self.queries]
            for _, run, streaming in started:
                self._finish(run, streaming)
        failed = [(query, run.error) for query, run, _ in started if run.error is not None]
        for query, run, _ in started:
            query.inexact |= run.error is not None or step.fault is not None
        return failed[0] if failed else None

    def _start(self, query: Query, step: Start) -> tuple[Run, Any]:
        run = Run()
        habit = replace(step.habit, **query.changes)
        query.was_called = False
        fault = step.fault if query is self.queries[0] else None
        gives_some = self.job.gives == "rows where v > 3, if there is one"
        query.leaves_out = habit.early or habit.gathers or gives_some or isinstance(fault, Trips)
        backend = self._backend(fault, killed=step.killed)
        options = {"apply_on": "driver", "patience": 0.5} | dict(step.options) | query.options

        def die(moment: str) -> None:
            if isinstance(fault, Dies) and (moment, run.batches - 1) == (fault.moment, fault.batch) and not run.died:
                run.died = True
                raise DiedError(moment)

        def between() -> None:
            query.was_called = True
            die("between the calls")

        def built() -> Built:
            stop = partial(die, "downstream") if isinstance(fault, Dies) and fault.moment == "downstream" else None
            try:
                return build(query.grouped, self.job.together, rows, backend, options, stop=stop)
            except Exception as error:
                run.errors.append(error)
                raise

        def each_batch(frame: Any, batch_id: int) -> None:
            run.batches += 1
            query.was_called = habit.wrapped  # then the wrapper calls a state, if the function does not
            die("before the calls")
            if isinstance(fault, Trips) and run.batches - 1 == fault.batch and not habit.wrapped:
                return
            run_habit(
                habit,
                self.job.gives,
                built() if habit.anew else calls,
                frame,
                batch_id,
                spark=self.spark,
                kept_frames=query.kept_frames,
                between=between,
                report=run.errors.append,
            )
            die("after the calls")

        try:
            rows = self._rows(query, at_once=step.at_once)
            calls = built()
            writer = rows.writeStream.foreachBatch(each_batch).trigger(availableNow=True)
            return run, writer.option("checkpointLocation", str(query.checkpoint)).start()
        except Exception as error:
            run.ended = error
            return run, None

    def _finish(self, run: Run, streaming: Any) -> None:
        if streaming is None:
            return
        try:
            if not streaming.awaitTermination(SECONDS):
                streaming.stop()
                run.ended = TimeoutError(f"a run did not end within {SECONDS} s")
        except Exception as error:
            run.ended = error

    def _start_and_kill(self, step: Start) -> tuple[Query, Exception]:
        """The same in a process that dies by SIGKILL."""
        pickled = self.folder / "world.pickle"
        pickled.write_bytes(pickle.dumps((self, step)))
        command = [sys.executable, "-m", "fuzz.killed", str(pickled)]
        done = subprocess.run(command, capture_output=True, start_new_session=True, timeout=SECONDS, check=False)
        self.says_ttl |= b"ttl" in done.stderr
        for query in self.queries:
            query.inexact = True
        if done.returncode not in (0, -9):
            raise FailureError(
                "an error of another kind", f"the process that was to be killed failed: {done.stderr.decode()[-500:]}"
            )
        return self.queries[0], DiedError("the process was killed")

    def _rows(self, query: Query, *, at_once: bool) -> Any:
        """The stream: the files of all sources, one of each in a batch, or all of them."""
        from mapstate.spark import files_not_counted

        read = self.spark.readStream.schema(SCHEMA).option(
            "maxFilesPerTrigger", 1000 if self.job.daily or at_once else 1
        )
        frames = [read.parquet(str(source)) for source in self.sources]
        if query.starts_at is not None:
            frames = [frame.where(files_not_counted(query.starts_at, at)) for at, frame in enumerate(frames)]
        first, *others = frames
        for other in others:
            first = first.union(other)
        return first

    def _backend(self, fault: Break | Dies | Trips | None, *, killed: bool) -> Any:
        backend = resolve(self.url)
        if not isinstance(fault, Break):
            return backend
        marks = self.folder / f"faults-{self.runs}"
        marks.mkdir(exist_ok=True)
        made: Callable[..., Any] = kill if killed else Fail
        if fault.moment == "write":
            return FaultyBackend(
                backend, str(marks), (made(method="multi_put", call=fault.batch + 1, after=fault.after),)
            )
        offsets = self.queries[0].checkpoint / "commits"
        done = [int(path.name) for path in offsets.iterdir() if path.name.isdecimal()] if offsets.is_dir() else []
        where = (Begins if fault.moment == "begin" else Commits)(max(done, default=-1) + 1 + fault.batch)
        given = {"where": where, "after": fault.after, "name": "once", "times": None if fault.lasts else 1}
        each = [made(method=method, **given) for method in ("swap", "swap_all")]
        return FaultyBackend(backend, str(marks), tuple(each))

    @contextmanager
    def _warnings(self) -> Iterator[None]:
        """Look for a warning about a ttl that does not hold for all records."""
        handler = logging.Handler(logging.WARNING)
        handler.emit = self._warned  # type: ignore[method-assign]
        logger = logging.getLogger("mapstate")
        logger.addHandler(handler)
        try:
            yield
        finally:
            logger.removeHandler(handler)

    def _warned(self, record: logging.LogRecord) -> None:
        self.says_ttl |= "ttl" in record.getMessage()

    def call_by_hand(self, rows: Sequence[Row], batch_id: int, *, files: bool) -> None:
        """Call the states of the first query, of all where the files count. A refusal of ours counts nothing: right."""
        given = [row for file in self.files for row in file if self._is_given(row)] if files else rows
        frame = self.spark.createDataFrame([tuple(row.as_dict().values()) for row in given], SCHEMA)
        queries = self.queries if files else self.queries[:1]
        try:
            for query in queries:
                options = {"apply_on": "driver"}
                for call in build(query.grouped, self.job.together, frame, resolve(self.url), options).calls:
                    call(frame, batch_id)
        except MapStateError as error:
            self.note(f"refused: {type(error).__name__}")
            if sum(len(query.state_names) for query in queries) > 1:
                raise RefusedError("a call by hand was refused, maybe in some states only") from error
            return
        if files:
            self.counted = len(self.files)
        else:
            self.by_hand += rows
        self.check()

    # What an operator does

    def copy_store(self) -> None:
        """Copy a store that is a file."""
        if self.job.store == "sqlite" and self.file.exists():
            copy = self.folder / f"store-{self.runs}"
            with closing(sqlite3.connect(self.file)) as source, closing(sqlite3.connect(copy)) as target:
                source.backup(target)
            self.store_copy = StoreCopy(copy, [*self.by_hand], [*self.corrections], [*self.forgotten], dict(self.led))

    def put_back_store(self) -> None:
        """Put the copy back; empty the store where there is none. Rows that came by hand since are gone."""
        if self.job.store == "sqlite":
            for path in self.folder.glob("state.db*"):
                path.unlink()
            self.by_hand, self.corrections, self.forgotten, self.led = [], [], [], {}
            if (copy := self.store_copy) is not None:
                shutil.copy(copy.path, self.file)
                self.by_hand, self.corrections = [*copy.by_hand], [*copy.corrections]
                self.forgotten, self.led = [*copy.forgotten], dict(copy.led)

    def roll_back(self) -> None:
        """`mapstate rollback` of the last batch of all states, and `mapstate rewind`; nothing where one refuses."""
        for query in self.queries:
            ledgers = [Ledger(resolve(self.url).open(name), name) for name in query.state_names]
            if any(ledger.load() is None for ledger in ledgers):
                continue
            try:
                batches = {rolled_back(ledger.record).owners[ledger.record.owner] for ledger in ledgers}
            except LedgerError as error:
                self.note(f"no rollback: {type(error).__name__}")
                continue
            if len(batches) == 1 and query.checkpoint.exists():
                if query is self.queries[0] and any(ledger.record.correction is not None for ledger in ledgers):
                    self.corrections.pop()
                for ledger in ledgers:
                    ledger.rollback()
                self.rewind(query, query.state_names[0])

    def rewind(self, query: Query, state: str) -> None:
        """`mapstate rewind`. Raises MapStateError."""
        rewind(self.url, state, query.checkpoint)
        if any(one.window for one in query.states):
            self.lags.add(10**6)  # Spark plans the files behind as one batch, in which none makes another's rows late

    def offsets(self, query: Query) -> str | None:
        """How far the states have read, if all have read as far and the ledger knows the files."""
        ledgers = [Ledger(resolve(self.url).open(state.name), state.name).load() for state in query.states]
        commits = [None if ledger is None else ledger.last_commit for ledger in ledgers]
        found = {None if commit is None else commit.offsets for commit in commits}
        offsets = found.pop()
        entries = json.loads(offsets or "[]")
        known = not found and len(entries) == len(self.sources) and all("newest" in (entry or {}) for entry in entries)
        return offsets if known else None

    def let_expire(self) -> None:
        """Delete the records that have a ttl, as Redis would."""
        import redis

        with redis.Redis.from_url(self.url.partition("?")[0]) as client:
            for key in client.scan_iter(f"{self.folder.name}/*"):
                if client.pttl(key) > 0:
                    client.delete(key)
        if self.ttl is not None:
            self.expired, self.by_hand = self.counted, []
        self.check()

    def of_each(self, change: Callable[[Query], object]) -> None:
        """Change the checkpoints of all queries."""
        for query in self.queries:
            change(query)

    def note(self, line: str) -> None:
        """What happened, for the script."""
        self.log.append(line)

    # What is right

    def check(self) -> None:
        """Raise FailureError unless each state holds each row that was given to it once."""
        if self.says_ttl:
            return
        for name, to in self.led.items():
            with open_reader(self.url, name) as reader:
                if (read := reader.ledger().state) != to:
                    raise FailureError("wrong counts", f"readers of {name} read {read}, and were led to {to}")
        for query in self.queries:
            by_hand = self.by_hand if query is self.queries[0] else []
            for state in query.states:
                if state.rolling:
                    self._check_rolling(query, state, by_hand)
                    continue
                found = self._contents(state.name, state.keys)
                self._compare(query, state, found, by_hand)
                if state.followed:
                    right = Counter(value["rows"] for value in found.values())
                    followed = self._contents(f"{state.name}.by_rows", ("rows",))
                    if followed != {(rows,): {"keys": keys} for rows, keys in right.items()}:
                        raise FailureError(
                            "wrong counts", f"{state.name}.by_rows holds {followed}, right is {dict(right)}"
                        )

    def _check_rolling(self, query: Query, state: State, by_hand: list[Row]) -> None:
        declared = [(one.rolling, one.lag) for one in query.declared[state.name] if one.rolling is not None]
        rows = [row for file in self.files[: self.counted] for row in file if self._is_given(row)] + by_hand
        chance = random.Random(f"{self.job.seed} {len(self.log)}")
        found = differences(self.url, state.name, state.keys, declared, rows, chance, by_fields=query.by_fields)
        for wrong in found:
            raise FailureError("wrong counts", f"state {state.name} ({state}): {wrong}")

    def _contents(self, name: str, keys: Sequence[str]) -> dict[Any, Any]:
        try:
            with open_reader(self.url, name, follow=None) as reader:
                rows = list(reader.scan())
        except StateNotFoundError:
            return {}
        except SeedingError as error:  # also where no state was called since the seed died
            raise FailureError("wrong counts", str(error)) from error
        if "u" in keys:  # how a struct is shown is not asked here
            return self._ranked([value for _, value in rows])
        return {tuple(map(plain, key)): value for key, value in rows}

    def _compare(self, query: Query, state: State, found: dict[Any, Any], by_hand: list[Row]) -> None:
        # With a greater lag fewer rows are late; a restart may have changed the lag in between.
        of_lag = partial(self._right, state, by_hand=by_hand, by_fields=query.by_fields)
        most, least = (of_lag(lag) for lag in (max(self.lags), min(self.lags)))
        if "u" in state.keys:
            most, least = (self._ranked(list(right.values())) for right in (most, least))
        if state.type == "non_transactional" and query.inexact:
            most = {}
            wrong = [key for key in least if key not in found or found[key]["rows"] < least[key]["rows"]]
        else:
            none = {"rows": 0, "total": 0}
            wrong = [
                key
                for key in {**most, **found}
                if not _between(least.get(key, none), found.get(key, none), most.get(key, none))
            ]
        if wrong:
            key = wrong[0]
            raise FailureError(
                "wrong counts",
                f"state {state.name} ({state.type}) has {found.get(key)} for the key {key}, right is {most.get(key)}; "
                f"{len(wrong)} of {len(most)} keys are wrong",
            )

    def _ranked(self, values: list[dict[str, int]]) -> dict[Any, Any]:
        """The values by their place from the largest; with several lags each number by its own place.

        Only so no place has less where fewer rows are late.
        """
        names = ("rows", "total")
        ranked = sorted(([value[name] for name in names] for value in values), reverse=True)
        if len(self.lags) > 1:
            ranked = [
                [*row]
                for row in zip(*(sorted(column, reverse=True) for column in zip(*ranked, strict=True)), strict=True)
            ]
        return {("a struct", at): dict(zip(names, numbers, strict=True)) for at, numbers in enumerate(ranked)}

    def _is_given(self, row: Row) -> bool:
        """Whether the function gives a row of a file to its states."""
        return self.job.gives == "every row" or row.v > 3

    def _right(self, state: State, lag: int, *, by_hand: list[Row], by_fields: bool) -> dict[Any, Any]:
        """What plain Python makes of the rows."""
        right: dict[Any, dict[str, int]] = {}
        watermark: int | None = None
        for number, file in enumerate([*self.files[: self.counted], by_hand]):
            is_given = number >= self.expired or file is by_hand
            rows = [row for row in file if is_given and (file is by_hand or self._is_given(row))]
            if self.forgotten:
                places = [-1 - at if file is by_hand else number for at in range(len(file))]
                gone = partial(is_forgotten, self, state.name, keys=state.keys, by_fields=by_fields)
                rows = [
                    row for row, place in zip(file, places, strict=True) if row in rows and not gone(row, file=place)
                ]
            before = None if watermark is None or not state.window else watermark - watermark % state.window
            for row in rows:
                if before is not None and row.t is not None and row.t < before:
                    continue  # late
                start = (row.t - row.t % state.window,) if state.window and row.t is not None else ()
                value = right.setdefault(
                    start + equal_key(row, state.keys, by_fields=by_fields), {"rows": 0, "total": 0}
                )
                value["rows"] += 1
                value["total"] += row.v
            watermark = max(
                [row.t - lag for row in rows if row.t is not None]
                + [mark for mark in (watermark,) if mark is not None],
                default=None,
            )
        if state.name == self.queries[0].states[0].name:
            for sign, row in ((sign, row) for done in self.corrections for sign, row in _signed(done)):
                value = right.setdefault(equal_key(row, state.keys, by_fields=by_fields), {"rows": 0, "total": 0})
                value["rows"] += sign
                value["total"] += sign * row.v
        return right


EVENTS: dict[str, Callable[[World], None]] = {
    "each checkpoint is copied": lambda world: world.of_each(Query.copy_checkpoint),
    "the copies of the checkpoints are put back": lambda world: world.of_each(Query.put_back_copy),
    "the checkpoints that were replaced are put back": lambda world: world.of_each(Query.swap),
    "the checkpoints are lost": lambda world: world.of_each(Query.lose),
    "the checkpoints are moved away by mistake": lambda world: world.of_each(Query.set_aside),
    "the store is copied": World.copy_store,
    "the copy of the store is put back": World.put_back_store,
    "the last batch is taken back: mapstate rollback, mapstate rewind": World.roll_back,
    "all records with a ttl expire": World.let_expire,
}
"""What happens between two runs, by what a script says."""


def _signed(done: Corrected) -> Iterator[tuple[int, Row]]:
    yield from ((1, row) for row in done.added)
    yield from ((-1, row) for row in done.taken)


def _between(least: dict[str, int], found: dict[str, int], most: dict[str, int]) -> bool:
    return all(least[name] <= found[name] <= most[name] for name in ("rows", "total"))
