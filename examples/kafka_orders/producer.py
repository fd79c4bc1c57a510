"""Orders into Kafka, and how many there were of each product, country and minute.

    python examples/kafka_orders/producer.py --kafka localhost:9092 --orders 10000 --counts counts.json

The key of a record is the product; the country is a header. A broker that goes away is waited for: nothing is lost and
nothing sent twice, because the producer is idempotent and each order is counted when the broker has it.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import Counter
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic

PRODUCTS = [f"product-{number}" for number in range(40)]
COUNTRIES = ["de", "fr", "gr", "it", "nl"]
PARTITIONS = 3
BEGIN = datetime(2026, 1, 1, tzinfo=UTC)


def main() -> None:
    parser = argparse.ArgumentParser(description="Sends orders to Kafka.")
    parser.add_argument("--kafka", required=True, metavar="HOST:PORT")
    parser.add_argument("--orders", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0, help="number of the first order; its time follows from it")
    parser.add_argument("--rate", type=int, default=2_000, help="orders a second, about")
    parser.add_argument("--counts", type=Path, required=True, metavar="FILE")
    given = parser.parse_args()
    make_topics(given.kafka)
    counts = send(given.kafka, given.first, given.orders, given.rate)
    given.counts.write_text(json.dumps({name: dict(found) for name, found in counts.items()}))


def make_topics(kafka: str) -> None:
    """The topics, where they are not there yet."""
    admin = AdminClient({"bootstrap.servers": kafka})
    there = admin.list_topics(timeout=60).topics
    new = [NewTopic(name, num_partitions=PARTITIONS) for name in ("orders", "totals") if name not in there]
    for made in admin.create_topics(new).values() if new else ():
        made.result()


def send(kafka: str, first: int, number: int, rate: int) -> dict[str, Counter[str]]:
    """Sends orders, and returns the counts and revenues of those that the broker has."""
    draw = random.Random(first)
    counts: dict[str, Counter[str]] = {name: Counter() for name in ("orders", "revenue", "by_minute")}
    producer = Producer({"bootstrap.servers": kafka, "enable.idempotence": True, "delivery.timeout.ms": 300_000})
    for order in range(first, first + number):
        product, country, amount = draw.choice(PRODUCTS), draw.choice(COUNTRIES), draw.randrange(1, 10_000)
        at = BEGIN + timedelta(milliseconds=20 * order - draw.randrange(5_000))  # out of order by up to five seconds
        minute = at.replace(second=0, microsecond=0)

        def delivered(
            error: Any,
            _: Any,
            names: tuple[str, str, int] = (f"{product}|{country}", f"{product}|{minute.isoformat()}", amount),
        ) -> None:
            if error is not None:
                raise RuntimeError(str(error))
            total, by_minute, revenue = names
            counts["orders"][total] += 1
            counts["revenue"][total] += revenue
            counts["by_minute"][by_minute] += 1

        producer.produce(
            "orders",
            key=product,
            value=json.dumps({"product": product, "amount": amount, "at": at.isoformat()}),
            headers={"country": country},
            on_delivery=delivered,
        )
        producer.poll(0)
        if order % 100 == 99:
            time.sleep(100 / rate)
    left = producer.flush(300)
    if left:
        raise RuntimeError(f"{left} orders were not taken by the broker")
    return counts


if __name__ == "__main__":
    main()
