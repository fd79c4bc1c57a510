"""Everything but Spark: read, decode, combine, encode, write, beside raw MGET and MSET of the same bytes.

This process calls a task with Arrow batches of 10,000 rows. For comparison, with names and payloads of the same
length, one chunk after the other on one connection:

    redis-py   `mget` and `mset` with hiredis, and ready-made names
    wire       the same with every command packed beforehand: what the server and the socket take by themselves
"""

from __future__ import annotations

from measuring import Answer, Goal, Row, by_turns, ratios, spread, table  # isort: skip  # finds the servers

import redis
from counted_state import CountedState, arrow_batches, chunks, processor_lines, processor_time
from servers import RedisServer

from mapstate.backends.redis.layout import StringLayout

CHUNK = 2000


def ask(keys: int = 200_000, turns: int = 9) -> Answer:
    users = [f"user-{at}" for at in range(keys)]
    batches = arrow_batches(users)
    with RedisServer().start() as server, redis.Redis.from_url(server.url) as client:
        state = CountedState(server.url, chunk_size=CHUNK)
        payload = b"[280000009,3,2]"
        names = [[f"rawraw:{user}" for user in some] for some in chunks(users, CHUNK)]
        layout = StringLayout("raw", 2**29, b"wirewi:", None)
        packed = [
            (layout.get(keys), layout.put(keys, [payload] * len(keys))[0])
            for keys in (layout.pack(list(some)) for some in chunks(users, CHUNK))
        ]
        conn = client.connection_pool.get_connection()

        def redis_py() -> None:
            for some in names:
                client.mget(some)
                client.mset(dict.fromkeys(some, payload))

        def wire() -> None:
            for get, put in packed:
                for command in (get, put):
                    conn.send_packed_command([command], check_health=False)
                    conn.read_response()

        seconds = by_turns(
            {"mapstate": lambda: state.apply(batches), "redis-py": redis_py, "wire": wire}, turns, warm_up=2
        )
        processor = processor_time(state, batches, keys, [client])
        client.connection_pool.release(conn)
        state.check(users, state.batches)
        for prefix in ("rawraw:", "wirewi:"):
            assert client.mget([prefix + user for user in users]) == [payload] * keys
    ours = seconds["mapstate"]
    subject = "opaque on Redis without Spark, one process"
    return Answer(
        [
            Row(subject, "raw MGET + MSET of the same bytes", ratios(ours, seconds["redis-py"]), Goal("most", 1.15)),
            Row(subject, "the same, packed beforehand", ratios(ours, seconds["wire"])),
        ],
        f"{keys:,} keys, chunks of {CHUNK:,}, {turns} turns after 2 to warm up",
        table(
            "way | microseconds a key",
            [
                *((name, spread(own, 1e6 / keys)) for name, own in seconds.items()),
                *processor_lines("mapstate", processor),
            ],
        ),
        {f"one_process.{name}": own for name, own in processor.items()},
    )
