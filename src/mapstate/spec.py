"""Specs: the name, type and store of a state. Spark sends them to executors: they are picklable, without a client."""

from __future__ import annotations

import warnings
from dataclasses import KW_ONLY, dataclass, replace
from datetime import timedelta
from typing import Annotated, Any, Literal, TypedDict, Unpack, get_origin, get_type_hints

from mapstate.backends import check_state_name, resolve
from mapstate.backing_map import Backend
from mapstate.errors import ConfigurationError, check_choice, check_names, check_range
from mapstate.maps.serialized import CHUNK_BYTES
from mapstate.schema import KeyOrder, OnGap, OnNewOwner, StateType
from mapstate.serializers import blocks_of
from mapstate.serializers import serializer as serializer_named

ApplyOn = Literal["auto", "executors", "driver"]
Repeat = Literal["refuse", "allowed"]
PartialAggregation = Literal["auto", "always", "never"]

CHUNK_SIZE = 2000
"""Keys per read and write of a store that has no size of its own; see ``bench/chunk_sizes.py``."""

_LONGEST = 10**10  # seconds; a server adds them to its clock, in milliseconds of 64 bits
_SECONDS = (_LONGEST, " of seconds")


class StateOptions(TypedDict, total=False):
    """The options of a state, by keyword; of most numbers with their range, as `check_range` takes it."""

    serializer: str
    """How records are written: "json" or "msgpack" in a store of bytes, "native" in a store with types of its own.
    "auto", the default, is "json" or "native".
    """
    blocks: Annotated[int | None, (1, 10**7)]
    """The number of records that the keys share, of an opaque state of numbers, times and text: a thirtieth of the keys
    that are expected, with windows of those in each pane. It is fixed when the state is made. See docs/blocks.md.
    """
    cache_size: int
    """Deprecated, without effect: a cache on the workers made no batch faster. Leave it out."""
    ttl: float | timedelta | None
    """Seconds from a record's last write until the store may drop it; None means never. 0 ends the ttl of a state that
    had one. The ledger stays.
    """
    on_new_owner: OnNewOwner
    """If another streaming query opens the state: "refuse", "adopt" (go on with the stored values, and start where they
    end), "adopt_unchecked" (start anywhere) or "reset" (start empty, with a new checkpoint).
    """
    on_gap: OnGap
    """If the store lacks batches that Spark has finished: "refuse" or "accept" (go on without them)."""
    repeat: Repeat
    """If a call by hand brings a batch id that counts already: "refuse", or "allowed" (skip it)."""
    apply_on: ApplyOn
    """Where records are read and written: "executors", "driver" or "auto". "auto" takes the executors if several
    processes can reach the store, and the driver for a batch of at most 5,000 keys after three of them: no Python runs
    on the executors then. With "driver" it holds all keys of any batch in memory, up to
    ``spark.driver.maxResultSize``.
    """
    partial_aggregation: PartialAggregation
    """Whether Spark aggregates in front of the shuffle, too: "always", "never" or "auto". See docs/performance.md."""
    changes: Annotated[int | None, (0,)]
    """Transactions whose keys are kept for those who follow the state: of an opaque state without windows. 0 ends
    that.
    """
    chunk_size: Annotated[int, (1,)]
    """Keys per read and write, by default the store's own number, mostly 2,000. A chunk ends with its Arrow batch
    (``spark.sql.execution.arrow.maxRecordsPerBatch``).
    """
    chunk_bytes: Annotated[int, (1,)]
    """Bytes of a chunk at most, of its rows as well as of its records: 8 MiB. A chunk of large values has fewer keys,
    at least one. A task holds several times that.
    """
    max_attempts: Annotated[int, (1,)]
    """Attempts at a batch in one foreachBatch call, at most."""
    patience: Annotated[float | timedelta, (0.0, *_SECONDS)]
    """Seconds for which a batch retries a store that does not answer, with growing pauses, before the query fails; 0
    means no retry. These retries do not count against ``max_attempts``. Not retried: the opening of the states, so that
    a wrong address fails at once, and the tasks of a non-transactional state.
    """


_KINDS = {
    name: kind for name, kind in get_type_hints(StateOptions, include_extras=True).items() if name != "cache_size"
}


@dataclass(frozen=True)
class StateSpec:
    """The declaration of one state: its store, type, name and options.

    docs/reference/specs.md says what each option means. ``name`` is that of the state in its store, by default
    the stream's: letters, digits, ``_ . -``.
    """

    backend: Backend
    type: StateType
    name: str | None = None
    _: KW_ONLY
    serializer: str = "auto"
    ttl: float | None = None
    on_new_owner: OnNewOwner = "refuse"
    on_gap: OnGap = "refuse"
    repeat: Repeat = "refuse"
    apply_on: ApplyOn = "auto"
    partial_aggregation: PartialAggregation = "auto"
    chunk_size: int = None  # type: ignore[assignment]  # the store's own, see __post_init__
    max_attempts: int = 4
    patience: float = 60
    chunk_bytes: int = CHUNK_BYTES
    changes: int | None = None
    blocks: int | None = None

    def __post_init__(self) -> None:
        if self.name is not None:
            check_state_name(self.name)
        native = getattr(self.backend, "native_records", False)
        if self.blocks is not None or blocks_of(self.serializer) is not None:
            from mapstate.serializers.blocks import form_of

            self._check("blocks", _KINDS["blocks"])
            object.__setattr__(self, "serializer", form_of(self, native=native))
        if self.serializer == "auto":
            object.__setattr__(self, "serializer", "native" if native else "json")
        if serializer_named(self.serializer).native != native:
            raise ConfigurationError(
                f"{self.backend!r} {'has types of its own' if native else 'stores bytes'}, so the serializer "
                f"{self.serializer!r} is not for it: leave it at 'auto'"
            )
        if self.chunk_size is None:
            size = getattr(self.backend, "chunk_size", CHUNK_SIZE)  # type: ignore[unreachable]
            object.__setattr__(self, "chunk_size", size)
        check_choice("type", self.type, StateType)
        for option, kind in _KINDS.items():
            self._check(option, kind)
        _ = self.key_order  # raises if there is no such order
        if self.ttl is not None:
            check_range("ttl", self.ttl, 0.001 if self.ttl else 0.0, *_SECONDS)
        if self.ttl:
            self.backend.open(self.name or "unnamed", ttl=self.ttl)  # raises if the store has no such ttl
        if self.changes is not None and (self.type != "opaque" or self.ttl is not None):
            raise ConfigurationError("changes is for opaque states without a ttl: other values go without a batch")
        if self.apply_on == "executors" and not self.backend.shared_between_processes:
            raise ConfigurationError(
                f"{self.backend!r} lives in one process, so executors cannot write to it: leave apply_on at 'auto'"
            )

    def _check(self, option: str, kind: Any) -> None:
        value = getattr(self, option)
        if get_origin(kind) is Literal:
            check_choice(option, value, kind)
        elif value is not getattr(StateSpec, option):
            for bounds in getattr(kind, "__metadata__", ()):
                check_range(option, value, *bounds)

    def named(self, default: str) -> StateSpec:
        """The same spec with a name: its own, or ``default``."""
        return self if self.name is not None else replace(self, name=default)

    @property
    def state(self) -> str:
        """The state's name. Raises ConfigurationError if it has none."""
        if self.name is None:
            raise ConfigurationError("this spec names no state: opaque(url, name='...')")
        return self.name

    @property
    def key_order(self) -> KeyOrder | None:
        """In which order the store takes keys best, see `Backend`."""
        order: Any = getattr(self.backend, "key_order", None)
        if order not in (None, "hash", "key") and order not in range(1, 2**15):
            raise ConfigurationError(f"{self.backend!r} has an unknown key_order, {order!r}: see Backend")
        return order  # type: ignore[no-any-return]

    @property
    def is_applied_on_driver(self) -> bool:
        """Whether the driver reads and writes the records, as ``apply_on`` says and the store allows."""
        return self.apply_on == "driver" or not self.backend.shared_between_processes

    @property
    def may_be_applied_on_driver(self) -> bool:
        """Whether the driver may take a small batch, and need not."""
        return self.apply_on == "auto"

    def open(self) -> Any:
        """Open the store of this state in the calling process. See `Backend.open`."""
        return self.backend.open(self.state, ttl=self.ttl or None)


def opaque(backend_or_url: Backend | str, name: str | None = None, **options: Unpack[StateOptions]) -> StateSpec:
    """Exactly once whatever a replay contains: keeps each value and the one before it.

    docs/reference/specs.md says what the options mean. Raises ConfigurationError; makes no connection.
    """
    return _spec("opaque", backend_or_url, name, options)


def transactional(backend_or_url: Backend | str, name: str | None = None, **options: Unpack[StateOptions]) -> StateSpec:
    """Exactly once if a replay brings the same rows: keeps each value and its batch. Reads are the latest."""
    return _spec("transactional", backend_or_url, name, options)


def non_transactional(
    backend_or_url: Backend | str, name: str | None = None, **options: Unpack[StateOptions]
) -> StateSpec:
    """At least once: keeps the bare value. A batch that is tried again counts again."""
    return _spec("non-transactional", backend_or_url, name, options)


def _spec(kind: StateType, backend_or_url: Backend | str, name: str | None, given: StateOptions) -> StateSpec:
    options: dict[str, Any] = dict(given)
    if "cache_size" in options:
        del options["cache_size"]
        warnings.warn("cache_size has no effect any more, and will go: leave it out", DeprecationWarning, stacklevel=3)
    check_names("a spec has no option", options, ["name", *_KINDS])
    for option in ("ttl", "patience"):
        if isinstance(options.get(option), timedelta):
            options[option] = options[option].total_seconds()
    return StateSpec(resolve(backend_or_url), kind, name, **options)
