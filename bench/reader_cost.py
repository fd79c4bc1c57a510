"""What a committed read costs beside a raw one.

Each way reads a thousand keys of an opaque state on its own Redis again and again, by turns. A turn of the table is
the median of fifty reads.

    committed   `open_reader(...).multi_get(keys)`: keys encoded, one round trip with the ledger before and after
                the records, decoded, chosen by the one rule, returned as dicts
    exact       the same with follow=None, which looks for no alias
    alias       the same by a name whose alias leads to the state; it looks once a second
    latest      the same with consistency="latest"
    map         mapstate's own backing map: keys encoded, `multi_get`, records decoded
    bytes       the backing map's `multi_get` alone: texts in, bytes out
    MGET        redis-py's `mget` with hiredis: names in, bytes out
    by hand     the same, and each record decoded with msgspec, as a service without mapstate does

Then the whole state, page by page of a thousand keys:

    scan        `scan()`: names listed, records read as of a batch, decoded, keys taken apart; a dict for each
    SCAN, MGET  redis-py's `scan` with the state's names as a pattern, and `mget` of each page
    in form     the same, and each record decoded with msgspec, each name and value in the form of `scan()`
"""

from __future__ import annotations

from measuring import Answer, Goal, Row, by_turns, ratios, spread, table  # isort: skip  # finds the servers

import statistics
from collections.abc import Callable

import msgspec
from counted_state import STATE, CountedState, arrow_batches
from servers import RedisServer

from mapstate import open_reader
from mapstate.backends import resolve
from mapstate.keys import KeyCodec
from mapstate.operations.swap import swap
from mapstate.serializers import RecordCodec, serializer

BATCHES = 3
READS = 50
PAGE = 1000
NAME = "named"  # an alias


def scanned(keys: int, turns: int) -> dict[str, list[float]]:
    """Seconds of each way to read a whole state."""
    users = [f"user-{at}" for at in range(keys)]
    with RedisServer().start() as server:
        CountedState(server.url).apply(arrow_batches(users))

        def scan() -> None:
            with open_reader(server.url, STATE) as reader:
                assert sum(value["n"] for _, value in reader.scan(PAGE)) == keys

        def raw(use: Callable[[list[bytes], list[bytes]], int]) -> None:
            with server.client() as client:
                found, at = 0, None
                while at != 0:
                    at, names = client.scan(at or 0, f"{STATE}:*", PAGE)
                    found += use(names, client.mget(names)) if names else 0
                assert found >= keys  # a name may come twice

        start, decode = len(f"{STATE}:"), msgspec.json.Decoder(tuple[int, int, int | None]).decode

        def in_form(names: list[bytes], records: list[bytes]) -> int:
            pairs = zip(names, records, strict=True)
            rows = [((name[start:].decode(),), {"n": decode(one)[1]}) for name, one in pairs]
            return sum(value["n"] for _, value in rows)

        ways = {
            "scan": scan,
            "SCAN, MGET": lambda: raw(lambda _, records: len(records)),
            "in form": lambda: raw(in_form),
        }
        return by_turns(ways, turns)


def ask(keys: int = 1000, turns: int = 30, scanned_keys: int = 1_000_000, scans: int = 5) -> Answer:
    users = [f"user-{at}" for at in range(keys)]
    with RedisServer().start() as server:
        state = CountedState(server.url)
        for _ in range(BATCHES):
            state.apply(arrow_batches(users))
        swap(server.url, {NAME: STATE})
        ledger = state.record
        store, codec = resolve(server.url).open(STATE), KeyCodec(ledger.keys)
        records = RecordCodec(serializer("json"), STATE, "opaque", ledger.fields, ledger.field_counts)
        texts = [codec.encode(user) for user in users]
        names = [f"{STATE}:{text}" for text in texts]

        decode = msgspec.json.Decoder(tuple[int, int, int]).decode

        def through_the_map() -> object:
            asked = codec.encode_all(users)
            return records.loads(asked, store.multi_get(asked))

        with (
            open_reader(server.url, STATE) as committed,
            open_reader(server.url, STATE, follow=None) as exact,
            open_reader(server.url, NAME) as alias,
            open_reader(server.url, STATE, consistency="latest") as latest,
            server.client() as client,
        ):
            ways = {
                "committed": lambda: committed.multi_get(users),
                "exact": lambda: exact.multi_get(users),
                "alias": lambda: alias.multi_get(users),
                "latest": lambda: latest.multi_get(users),
                "map": through_the_map,
                "bytes": lambda: store.multi_get(texts),
                "MGET": lambda: client.mget(names),
                "by hand": lambda: [decode(one) for one in client.mget(names)],
            }
            singles = by_turns(ways, turns * READS, warm_up=100)
            of_one = {"exact, one key": lambda: exact.get(users[0]), "alias, one key": lambda: alias.get(users[0])}
            singles |= by_turns(of_one, turns * READS, warm_up=100)
            assert committed.multi_get(users) == latest.multi_get(users) == [{"n": BATCHES}] * keys
            assert client.mget(names) == store.multi_get(texts)
    seconds = {
        name: [statistics.median(own[at : at + READS]) for at in range(0, len(own), READS)]
        for name, own in singles.items()
    }
    scans_of = scanned(scanned_keys, scans)
    return Answer(
        [
            Row(
                f"committed `multi_get` of {keys:,} keys by the reader",
                "raw MGET",
                ratios(seconds["committed"], seconds["MGET"]),
                Goal("most", 1.2),
            ),
            Row(
                "the same",
                "MGET, each record decoded with msgspec",
                ratios(seconds["committed"], seconds["by hand"]),
            ),
            Row(
                f"the same by an [alias](../docs/life.md#rebuild-and-swap), {keys:,} keys",
                "without",
                ratios(seconds["alias"], seconds["exact"]),
                Goal("most", 1.05),
            ),
            Row(
                "`get` of one key by an alias",
                "without",
                ratios(seconds["alias, one key"], seconds["exact, one key"]),
                Goal("most", 1.05),
            ),
            Row(
                f"`scan()` of {scanned_keys:,} keys by the reader",
                "raw SCAN and MGET",
                ratios(scans_of["scan"], scans_of["SCAN, MGET"]),
                Goal("most", 1.3),
            ),
            Row(
                "the same",
                "SCAN and MGET, each record decoded with msgspec, each name and value in the form of `scan()`",
                ratios(scans_of["scan"], scans_of["in form"]),
            ),
            Row(
                "SCAN and MGET in that form",
                "raw SCAN and MGET",
                ratios(scans_of["in form"], scans_of["SCAN, MGET"]),
            ),
        ],
        f"{turns} turns of {READS} reads after 100 reads to warm up",
        table(
            "way | milliseconds | committed beside it",
            [(name, spread(own, 1000), spread(ratios(seconds["committed"], own))) for name, own in seconds.items()],
        ),
        {f"reader_cost.{name}": statistics.median(own) for name, own in seconds.items()},
    )
