"""The commands of a job: one declaration, of which the command line seeds, runs or corrects the state."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, ArgumentTypeError, BooleanOptionalAction, Namespace
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mapstate.errors import MapStateError, UsageError, shown

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from mapstate.spark.streams.persistent_aggregate import PersistentAggregate
    from mapstate.spark.streams.topology import Topology


def job_main(
    declared: PersistentAggregate | Topology, checkpointLocation: str, arguments: Sequence[str] | None = None
) -> None:
    """Does what the command line of a job says: the last line of its program. Driver.

    ``seed`` and ``correct`` call the methods of these names, ``run`` starts the query and waits for its end. They need
    no other package. ``--help`` says the options; see docs/life.md#the-commands-of-a-job.

    ``declared``            a state, or a topology of one stream, which can be seeded and run
    ``checkpointLocation``  of its query
    ``arguments``           those of the program, sys.argv, by default

    Ends the process with 2 and the message of an error of mapstate, before or after anything was written, as it says;
    with argparse's 2 for arguments that cannot be. What Spark raises is passed on.
    """
    given = _parser().parse_args(arguments)
    try:
        given.does(declared, checkpointLocation, given)
    except MapStateError as error:
        sys.exit(_failed(error))


def _failed(error: MapStateError) -> int:
    print(f"{type(error).__name__}: {error}", file=sys.stderr)  # noqa: T201  a command prints
    return 2


def _parser() -> ArgumentParser:
    parser = ArgumentParser(description="Seeds or runs this job, or corrects its state.")
    commands = parser.add_subparsers(required=True, metavar="seed | run | correct")
    seed = commands.add_parser("seed", help="count all that the source has now as batch 0; again after a crash")
    seed.add_argument("--dry-run", action="store_true", help="say how much it is, and write nothing")
    seed.add_argument("--buckets", type=int, metavar="N", help="how many parts")
    seed.set_defaults(does=_seed)
    run = commands.add_parser("run", help="start the query, and wait for its end; Ctrl-C stops it")
    triggers = run.add_mutually_exclusive_group()
    triggers.add_argument("--trigger", metavar="INTERVAL", help="between two batches, such as '10 seconds'")
    triggers.add_argument("--available-now", action="store_true", help="count what is there, and end")
    run.set_defaults(does=_run)
    correct = commands.add_parser("correct", help="add rows that never came, and take back what was counted wrongly")
    correct.add_argument("--id", required=True, help="the name of the correction: with it a second call does nothing")
    correct.add_argument("--add", metavar="TABLE", help="a table of Spark's catalog; with --format a path")
    correct.add_argument("--retract", metavar="TABLE", help="likewise")
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


def _seed(declared: Any, checkpoint: str, given: Namespace) -> None:
    print(declared.seed(checkpoint, dry_run=given.dry_run, buckets=given.buckets))  # noqa: T201


def _run(declared: Any, checkpoint: str, given: Namespace) -> None:
    trigger = {"availableNow": True} if given.available_now else given.trigger
    query = declared.start(checkpoint, trigger=trigger)
    try:
        query.awaitTermination()
    except KeyboardInterrupt:
        query.stop()
    except Exception as error:
        if (ours := declared.last_error) is not None:
            raise ours from error
        raise


def _correct(declared: Any, _: str, given: Namespace) -> None:
    if not hasattr(declared, "correct"):
        raise UsageError("a topology has no correct: give job_main the state. Nothing was written.")
    if given.add is None and given.retract is None:
        raise UsageError("a correction has rows to --add or to --retract. Nothing was written.")
    if given.option and given.format is None:
        raise UsageError("an --option is of a --format, and a table has none. Nothing was written.")
    names = {"add": given.add, "retract": given.retract}
    parts = {part: _rows(declared.query.df, name, given) for part, name in names.items() if name is not None}
    print(declared.correct(id=given.id, emit=given.emit, take_over=given.take_over, **parts))  # noqa: T201


def _rows(stream: DataFrame, name: str, given: Namespace) -> DataFrame:
    """The rows of a correction, whose columns `correct` checks. Text has no types, so those of the stream are taken."""
    if given.format is None:
        return stream.sparkSession.read.table(name)
    read, kind = stream.sparkSession.read.format(given.format).options(**dict(given.option)), given.format.lower()
    if kind not in ("csv", "json"):
        return read.load(name)
    read = read.option("mode", "FAILFAST").option("enforceSchema", "false")  # else what does not fit is null
    if kind == "json":  # where a field that is not there is null
        lacking = sorted({*stream.columns}.difference(read.load(name).columns))
        if lacking:
            raise UsageError(
                f"no row of the JSON has {', '.join(map(shown, lacking))}, and the stream has. Nothing was written. "
                "Name each column of the stream, if only with null."
            )
    return read.schema(stream.schema).load(name)
