"""Orders from Kafka: their number and revenue per product and country, and per product and minute, exactly once.

    python examples/kafka_orders/job.py --kafka localhost:9092 --store redis://localhost:6379/0 --checkpoint FOLDER

The new totals of each batch go to the topic "totals", at least once: the key is product and country, and the last value
of a key is its total, as in a compacted topic. The job goes on until it is stopped; start
it again with the same command. --once ends it when it has read what is there.

Where the checkpoint is lost, --where-the-state-ends starts a new one behind the last batch that counts. Where Kafka
has removed records meanwhile, it says which, and goes on without them only with --accept-loss.
"""

from __future__ import annotations

import argparse
from typing import Any

from pyspark.sql import DataFrame, SparkSession

from mapstate import Count, Sum, Topology, opaque
from mapstate.spark import PersistentAggregate

ORDER = "product string, amount bigint, at timestamp"


def main() -> None:
    parser = argparse.ArgumentParser(description="Counts orders from Kafka.")
    parser.add_argument("--kafka", required=True, metavar="HOST:PORT")
    parser.add_argument("--store", required=True, metavar="URL")
    parser.add_argument("--checkpoint", required=True, metavar="FOLDER")
    parser.add_argument("--once", action="store_true")
    parser.add_argument("--where-the-state-ends", action="store_true")
    parser.add_argument("--accept-loss", action="store_true")
    parser.add_argument("--most", default="10000", help="orders in a batch")
    given = parser.parse_args()

    spark = SparkSession.builder.appName("orders").getOrCreate()
    start, options = "earliest", {}
    if given.where_the_state_ends:
        _, totals = counted(orders_in(records(spark, given, start)), given.store, given.kafka)
        (found,) = totals.starting_offsets()
        if found.lost and not given.accept_loss:
            raise SystemExit(f"Kafka has removed records that do not count: {found.lost}")
        start, options = found.json, {"on_new_owner": "adopt", "on_gap": "accept" if found.lost else "refuse"}
    topology, _ = counted(orders_in(records(spark, given, start)), given.store, given.kafka, **options)
    trigger = {"availableNow": True} if given.once else {"processingTime": "1 second"}
    topology.start(given.checkpoint, trigger=trigger).awaitTermination()
    spark.stop()


def records(spark: SparkSession, given: argparse.Namespace, start: str) -> DataFrame:
    """The topic, from ``start`` on; an old checkpoint goes on where it is."""
    return (
        spark.readStream.format("kafka")
        .option("kafka.bootstrap.servers", given.kafka)
        .option("kafka.isolation.level", "read_committed")  # without it records of aborted transactions count
        .option("subscribe", "orders")
        .option("startingOffsets", start)
        .option("includeHeaders", "true")
        .option("maxOffsetsPerTrigger", given.most)
        .load()
    )


def orders_in(records: DataFrame) -> DataFrame:
    """An order per record: JSON in its value, the country in a header."""
    return records.selectExpr(
        f"from_json(cast(value AS string), '{ORDER}') AS sent",
        "cast(filter(headers, one -> one.key = 'country')[0].value AS string) AS country",
    ).selectExpr("sent.*", "country")


def counted(orders: DataFrame, store: str, kafka: str, **options: Any) -> tuple[Topology, PersistentAggregate]:
    """Two states, which count each batch together, and the new totals back to Kafka."""
    topology = Topology("orders")
    stream = topology.newStream("orders", orders)
    totals = stream.groupBy("product", "country").persistentAggregate(
        opaque(store, "orders", **options), orders=Count(), revenue=Sum("amount")
    )
    by_minute = stream.tumblingWindow("1 minute", timestampField="at", lag="2 minutes", retention="1 day")
    by_minute.groupBy("product").persistentAggregate(
        opaque(store, "orders_by_minute", **options), orders=Count(), revenue=Sum("amount")
    )

    def send(rows: DataFrame, _: int) -> None:
        records = rows.selectExpr(
            "concat_ws('|', product, country) AS key", "to_json(struct(orders, revenue)) AS value"
        )
        records.write.format("kafka").option("kafka.bootstrap.servers", kafka).option("topic", "totals").save()

    totals.newValuesStream().foreachBatch(send)
    return topology, totals


if __name__ == "__main__":
    main()
