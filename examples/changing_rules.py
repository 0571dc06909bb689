"""Rules that change while the query runs: a table that every task reads, in one version for each micro-batch.

Orders come in several currencies. Rates and limits are streams of their own, of which ``anabranch.broadcast`` makes
tables: the latest row of each key. Rates are joined to the orders in columns; the limits are looked up by a
``StatefulProcessor``, which adds up what each customer has spent. Both tables are state like any other: they are in the
checkpoint, and ``query.state`` shows them.

Run it with ``.venv/bin/python examples/changing_rules.py`` (less than a minute).
"""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
from pyspark.sql import Row, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.stateful_processor import StatefulProcessor

import anabranch


class Limits(StatefulProcessor):
    """Gives out orders that take a customer beyond the limit of the day."""

    def init(self, handle: Any) -> None:
        self.spent = handle.getValueState("spent", "euros double")
        self.limits = handle.getBroadcast("limits")  # rows by customer, as of this micro-batch

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:
        del timerValues
        stored = self.spent.get()
        spent = stored[0] if stored else 0.0
        own = self.limits.get(key[0]) or self.limits.get("everybody")
        for row in rows:
            spent += row.euros
            if own is not None and spent > own.limit:
                yield Row(customer=key[0], spent=spent, limit=own.limit)
        self.spent.update((spent,))


COLUMNS = {
    "orders": "customer string, amount double, currency string",
    "rates": "currency string, rate double",
    "limits": "customer string, limit double",
}


def add(folder: Path, number: int, **rows: list[tuple[Any, ...]]) -> None:
    """Write rows of orders, rates and limits for the next micro-batch."""
    for name, values in rows.items():
        columns = [column.split()[0] for column in COLUMNS[name].split(", ")]
        pd.DataFrame(values, columns=columns).to_parquet(folder / "new.parquet")
        (folder / "new.parquet").rename(folder / name / f"{number}.parquet")


def main(spark: SparkSession) -> dict[str, Any]:
    """Return who was over the limit in each micro-batch, and the tables at the end."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        inputs = {}
        for each, columns in COLUMNS.items():
            (folder / each).mkdir()
            inputs[each] = spark.readStream.schema(columns).parquet(f"{name}/{each}")

        rate_table = anabranch.broadcast(inputs["rates"], key="currency")
        limit_table = anabranch.broadcast(inputs["limits"], key="customer", deleted="limit is null")
        over = (
            anabranch.stream(inputs["orders"])
            .stage("tables")
            .withBroadcast(rates=rate_table, limits=limit_table)
            .join(rate_table, "currency")
            .withColumn("euros", F.col("amount") * F.col("rate"))
            .groupBy("customer")
            .transformWithState(Limits(), "customer string, spent double, limit double", "update", "none")
        )
        found: list[list[Row]] = []
        writer = over.writeStream.outputMode("update").foreachBatch(lambda rows, _: found[-1].extend(rows.collect()))

        add(folder, 0, rates=[("EUR", 1.0), ("USD", 0.8)], limits=[("everybody", 100.0)])
        add(folder, 0, orders=[("ann", 90.0, "EUR"), ("bob", 110.0, "USD"), ("cyd", 101.0, "EUR")])
        found.append([])
        query = writer.option("checkpointLocation", f"{name}/checkpoint").start()
        query.processAllAvailable()

        # The dollar rises, ann gets a limit of her own, and so do all others.
        add(folder, 1, rates=[("USD", 1.1)], limits=[("everybody", 150.0), ("ann", 1000.0)])
        query.processAllAvailable()
        add(folder, 1, orders=[("ann", 200.0, "USD"), ("bob", 60.0, "USD"), ("cyd", 10.0, "EUR")])
        found.append([])
        query.processAllAvailable()

        # Her limit is removed.
        add(folder, 2, limits=[("ann", None)], orders=[("ann", 1.0, "EUR")])
        found.append([])
        query.processAllAvailable()
        tables = {each: sorted(map(tuple, query.state("tables", each).collect())) for each in ("rates", "limits")}
        query.stop()
    for number, rows in enumerate(found):
        print(f"{number}:", ", ".join(f"{r.customer} has spent {r.spent:.0f} of {r.limit:.0f}" for r in rows) or "-")
    return {"over": [sorted(row.customer for row in rows) for rows in found], **tables}


if __name__ == "__main__":
    builder = SparkSession.builder.master("local[2]").config("spark.sql.shuffle.partitions", 2)
    session = builder.config("spark.ui.showConsoleProgress", False).getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    main(session)
