"""Orders from Kafka: their number and revenue per product and country, and per product and minute, exactly once.

    python examples/kafka_orders/job.py --kafka localhost:9092 --store redis://localhost:6379/0 --checkpoint FOLDER

The new totals of each batch go to the topic "totals", at least once: the key is product and country, and the last value
of a key is its total, as in a compacted topic. The job goes on until it is stopped; start
it again with the same command. --once ends it when it has read what is there.

Where the checkpoint is lost, --where-the-state-ends starts a new one behind the last batch that counts.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from pyspark.sql import DataFrame, SparkSession

from mapstate import Count, Sum, Topology, opaque, open_reader

ORDER = "product string, amount bigint, at timestamp"


def main() -> None:
    parser = argparse.ArgumentParser(description="Counts orders from Kafka.")
    parser.add_argument("--kafka", required=True, metavar="HOST:PORT")
    parser.add_argument("--store", required=True, metavar="URL")
    parser.add_argument("--checkpoint", required=True, metavar="FOLDER")
    parser.add_argument("--once", action="store_true")
    parser.add_argument("--where-the-state-ends", action="store_true")
    parser.add_argument("--most", default="10000", help="orders in a batch")
    given = parser.parse_args()

    spark = SparkSession.builder.appName("orders").getOrCreate()
    start, on_new_owner = "earliest", "refuse"
    if given.where_the_state_ends:
        start, on_new_owner = end_of_the_state(given.store), "adopt"
    records = (
        spark.readStream.format("kafka")
        .option("kafka.bootstrap.servers", given.kafka)
        .option("subscribe", "orders")
        .option("startingOffsets", start)  # of a new checkpoint; an old one goes on where it is
        .option("includeHeaders", "true")
        .option("maxOffsetsPerTrigger", given.most)
        .load()
    )
    topology = counted(orders_in(records), given.store, given.kafka, on_new_owner)
    trigger = {"availableNow": True} if given.once else {"processingTime": "1 second"}
    topology.start(given.checkpoint, trigger=trigger).awaitTermination()
    spark.stop()


def orders_in(records: DataFrame) -> DataFrame:
    """An order per record: JSON in its value, the country in a header."""
    return records.selectExpr(
        f"from_json(cast(value AS string), '{ORDER}') AS sent",
        "cast(filter(headers, one -> one.key = 'country')[0].value AS string) AS country",
    ).selectExpr("sent.*", "country")


def counted(orders: DataFrame, store: str, kafka: str, on_new_owner: Any) -> Topology:
    """Two states, which count each batch together, and the new totals back to Kafka."""
    topology = Topology("orders")
    stream = topology.newStream("orders", orders)
    totals = stream.groupBy("product", "country").persistentAggregate(
        opaque(store, "orders", on_new_owner=on_new_owner), orders=Count(), revenue=Sum("amount")
    )
    by_minute = stream.tumblingWindow("1 minute", timestampField="at", lag="2 minutes", retention="1 day")
    by_minute.groupBy("product").persistentAggregate(
        opaque(store, "orders_by_minute", on_new_owner=on_new_owner), orders=Count(), revenue=Sum("amount")
    )

    def send(rows: DataFrame, _: int) -> None:
        records = rows.selectExpr(
            "concat_ws('|', product, country) AS key", "to_json(struct(orders, revenue)) AS value"
        )
        records.write.format("kafka").option("kafka.bootstrap.servers", kafka).option("topic", "totals").save()

    totals.newValuesStream().foreachBatch(send)
    return topology


def end_of_the_state(store: str) -> str:
    """Where the last batch that counts ends, as Kafka's source takes it."""
    with open_reader(store, "orders") as orders:
        last = orders.ledger().last_commit
    if last is None or last.offsets is None:
        raise SystemExit("no batch counts yet: leave --where-the-state-ends out")
    return json.dumps(json.loads(last.offsets)[0])


if __name__ == "__main__":
    main()
