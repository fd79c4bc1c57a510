"""The commands of a job: one declaration, of which the command line seeds, runs or corrects the state."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, ArgumentTypeError, BooleanOptionalAction, Namespace
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, get_args

from mapstate.errors import MapStateError, UsageError, cut, shown
from mapstate.protocol.cuts import Holes
from mapstate.reader.forms import time_given
from mapstate.spark.driver.initial_rows import PLACES, Coordinates, InitialRows, StartsAt
from mapstate.values import struct_type

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from mapstate.spark.driver.job import Job
    from mapstate.spark.streams.persistent_aggregate import PersistentAggregate
    from mapstate.spark.streams.topology import Topology


def job_main(
    declared: PersistentAggregate | Topology, checkpointLocation: str, arguments: Sequence[str] | None = None
) -> None:
    """Does what the command line of a job says: the last line of its program. Driver.

    ``seed`` and ``correct`` call the methods of these names, ``run`` starts the query and waits for its end. They need
    no other package. ``--help`` says the options; see docs/life.md#the-commands-of-a-job.

    ``declared``            a state, or a topology of one stream
    ``checkpointLocation``  of its query
    ``arguments``           those of the program, sys.argv, by default

    Ends the process with 2 and the message of an error of mapstate, before or after anything was written, as it says;
    with argparse's 2 for arguments that cannot be. What Spark raises in a batch or while it reads rows is passed on.
    """
    given = _parser().parse_args(arguments)
    try:
        given.does(declared, checkpointLocation, given)
    except MapStateError as error:
        sys.exit(_failed(error))


def _failed(error: MapStateError) -> int:
    notes = getattr(error, "__notes__", ())
    print(f"{type(error).__name__}: {error}", *notes, sep="\n", file=sys.stderr)  # noqa: T201  a command prints
    return 2


def _parser() -> ArgumentParser:
    parser = ArgumentParser(description="Seeds or runs this job, or corrects its state.")
    commands = parser.add_subparsers(required=True, metavar="seed | run | correct")
    seed = commands.add_parser("seed", help="count all that the source has now as batch 0; again after a crash")
    seed.add_argument("--dry-run", action="store_true", help="say how much it is, and write nothing")
    seed.add_argument("--buckets", type=int, metavar="N", help="how many parts")
    said = "leave out what this version has forgotten; of several states STATE=NAME, once for each, or STATE= for none"
    seed.add_argument("--version-of", metavar="NAME", action="append", help=said)
    seed.add_argument("--positions", type=_columns, metavar="C,C,C", help="the columns of a row's place, for it")
    seed.set_defaults(does=_seed)
    run = commands.add_parser("run", help="start the query, and wait for its end; Ctrl-C stops it")
    triggers = run.add_mutually_exclusive_group()
    triggers.add_argument("--trigger", metavar="INTERVAL", help="between two batches, such as '10 seconds'")
    triggers.add_argument("--available-now", action="store_true", help="count what is there, and end")
    run.set_defaults(does=_run)
    correct = commands.add_parser("correct", help="add rows, take rows back, or compute keys or windows anew")
    correct.add_argument("--id", required=True, help="the name of the correction: with it a second call does nothing")
    correct.add_argument("--add", metavar="TABLE", help="a table of Spark's catalog; with --format a path")
    correct.add_argument("--retract", metavar="TABLE", help="likewise")
    correct.add_argument("--recount", metavar="TABLE", help="a history of which keys or windows are computed anew")
    ends = correct.add_mutually_exclusive_group()
    ends.add_argument("--coordinates", type=_columns, metavar="C,C,C", help="its topic, partition and offset columns")
    ends.add_argument("--starts-at", metavar="JSON", help="the offsets at which it ends")
    correct.add_argument("--holes", choices=get_args(Holes), help="offsets that may lack, with --coordinates")
    correct.add_argument("--keys", metavar="TABLE", help="of a state without windows: the keys")
    correct.add_argument(
        "--since", metavar="TIME", help="of a state with windows: ISO 8601 with an offset, or a number"
    )
    correct.add_argument("--until", metavar="TIME", help="the first time that is not computed anew")
    said = "a correction whose rows the history has; once for each"
    correct.add_argument("--counted", metavar="ID", action="append", default=[], help=said)
    correct.add_argument("--format", metavar="FORMAT", help="of the path: parquet, csv, json, delta, ...")
    said = "of the format, such as header=true; once for each"
    correct.add_argument("--option", metavar="K=V", action="append", default=[], type=_option, help=said)
    said = "call the functions that get the state's new values; or --no-emit"
    correct.add_argument("--emit", action=BooleanOptionalAction, help=said)
    correct.add_argument("--take-over", action="store_true", help="leave an attempt behind whose driver is gone")
    correct.set_defaults(does=_correct)
    return parser


def _option(text: str) -> tuple[str, str]:
    name, is_given, value = text.partition("=")
    if not name or not is_given:
        raise ArgumentTypeError("it is K=V, such as header=true")
    return name, value


def _columns(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(","))


def _seed(declared: Any, checkpoint: str, given: Namespace) -> None:
    version = _version_of(given.version_of or [])
    done = declared.seed(
        checkpoint, dry_run=given.dry_run, buckets=given.buckets, version_of=version, positions=given.positions
    )
    print(done)  # noqa: T201


def _version_of(said: list[str]) -> str | dict[str, str | None] | None:
    pairs = [text.partition("=") for text in said]
    if said and not pairs[0][1] and not said[1:]:
        return said[0]
    versions = {state: name or None for state, sign, name in pairs if sign}
    if len(versions) < len(said):
        raise UsageError("of several states, --version-of is STATE=NAME, once for each. Nothing was written.")
    return versions or None


def _run(declared: Any, checkpoint: str, given: Namespace) -> None:
    from pyspark.errors import PySparkException

    trigger = {"availableNow": True} if given.available_now else given.trigger
    try:
        query = declared.start(checkpoint, trigger=trigger)
    except Exception as error:
        if not (isinstance(error, PySparkException) or hasattr(error, "java_exception")):
            raise
        raise UsageError(f"the query does not start, and nothing was written: {_of_spark(error)}") from error
    try:
        query.awaitTermination()
    except KeyboardInterrupt:
        query.stop()
    except Exception as error:
        if (ours := declared.last_error) is not None:
            raise ours from error
        raise


def _of_spark(error: Exception) -> str:
    """What an error says, of one of Java's its own message."""
    java: Any = getattr(error, "java_exception", None)
    return cut(error if java is None else (java.getMessage() or java.toString()))


def _correct(declared: Any, _: str, given: Namespace) -> None:
    if given.add is None and given.retract is None and given.recount is None:
        raise UsageError("a correction has rows to --add or to --retract, or a --recount. Nothing was written.")
    if given.option and given.format is None:
        raise UsageError("an --option is of a --format, and a table has none. Nothing was written.")
    ends = None if given.recount is None else _ends(given)
    if ends is None and (given.coordinates or given.starts_at or given.holes):
        raise UsageError("where a history ends is said of a --recount. Nothing was written.")
    stream, branches, asked = declared.query.df, declared.query.plan.branches, dict[str, Any]()
    if not branches:
        raise UsageError("the job keeps no state, so there is nothing to correct. Nothing was written.")
    job = getattr(declared, "job", branches[0].job)  # of a recount, which a topology has of one state alone
    likes = {"recount": partial(_with_places, stream, given), "keys": partial(_no_keys, stream, job)}
    for part in ("add", "retract", "recount", "keys"):
        if (name := getattr(given, part)) is not None:
            try:
                asked[part] = _rows(likes[part]() if part in likes else stream, name, given)
            except MapStateError:
                raise
            except Exception as error:  # Spark's, of many kinds
                raise UsageError(
                    f"--{part} {shown(name)} cannot be read, and nothing was written: {_of_spark(error)}"
                ) from error
    if ends is not None:
        asked["recount"] = InitialRows(asked["recount"], ends)
    kind = "timestamp" if job.windows is None else job.windows.type
    times = {name: time_given(text, kind) for name in ("since", "until") if (text := getattr(given, name)) is not None}
    done = declared.correct(
        id=given.id, counted=given.counted, emit=given.emit, take_over=given.take_over, **asked, **times
    )
    print(done)  # noqa: T201


def _ends(given: Namespace) -> Coordinates | StartsAt:
    """Where the history of a recount ends. Raises UsageError where that is not said."""
    if given.coordinates is not None and len(given.coordinates) == len(PLACES):
        topic, partition, offset = given.coordinates
        return Coordinates(topic, partition, offset, given.holes or "refused")
    if given.starts_at is not None and given.holes is None:
        return StartsAt(given.starts_at)
    raise UsageError(
        "a --recount says where its history ends: --coordinates topic,partition,offset, with --holes or without, or "
        '--starts-at \'{"visits": {"0": 4711}}\'. Nothing was written.'
    )


def _with_places(stream: DataFrame, given: Namespace) -> DataFrame:
    """The columns of the stream, and those of a row's place, which a history may have alone."""
    from pyspark.sql import functions as F

    lacking = [place for place in zip(given.coordinates or (), PLACES, strict=False) if place[0] not in stream.columns]
    return stream.select("*", *(F.lit(None).cast(kinds[-1]).alias(name) for name, (_, kinds) in lacking))


def _no_keys(stream: DataFrame, job: Job) -> DataFrame:
    """No row with the key columns of the state."""
    kinds = struct_type((key.name, key.type) for key in job.keys)
    return stream.sparkSession.createDataFrame([], kinds)


def _rows(like: DataFrame, name: str, given: Namespace) -> DataFrame:
    """Rows whose columns `correct` checks. Text has no types, so those of ``like`` are taken."""
    if given.format is None:
        return like.sparkSession.read.table(name)
    read, kind = like.sparkSession.read.format(given.format).options(**dict(given.option)), given.format.lower()
    if kind not in ("csv", "json"):
        return read.load(name)
    read = read.option("mode", "FAILFAST").option("enforceSchema", "false")  # else what does not fit is null
    if kind == "json":  # where a field that is not there is null
        lacking = sorted({*like.columns}.difference(read.load(name).columns))
        if lacking:
            raise UsageError(
                f"no row of the JSON has {', '.join(map(shown, lacking))}, which are needed. Nothing was written. Name "
                "each column, if only with null."
            )
    return read.schema(like.schema).load(name)
