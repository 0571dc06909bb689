"""Rules that change while the query runs: a table that every task reads, in one version for each micro-batch.

Orders come in several currencies. Rates and limits are streams of their own, of which ``anabranch.broadcast`` makes
tables: the latest row of each key. Rates are joined to the orders in columns; the limits are looked up by a
``StatefulProcessor``, which adds up what each customer has spent. Both tables are state like any other: they are in the
checkpoint, and ``query.state`` shows them.

Run it with ``.venv/bin/python examples/changing_rules.py`` (less than a minute).
"""

import os
import sys
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


def add(folder: Path, number: int, rows: list[dict[str, Any]]) -> None:
    """Rows for the next micro-batch."""
    new = folder.parent / "new.parquet"
    pd.DataFrame(rows).to_parquet(new)
    new.rename(folder / f"{number}.parquet")


def main(spark: SparkSession) -> dict[str, Any]:
    """Who was over the limit in each micro-batch, and the tables at the end."""
    with tempfile.TemporaryDirectory() as name:
        folders = {each: Path(name) / each for each in ("orders", "rates", "limits")}
        for folder in folders.values():
            folder.mkdir()
        orders = spark.readStream.schema("customer string, amount double, currency string").parquet(
            str(folders["orders"])
        )
        rates = spark.readStream.schema("currency string, rate double").parquet(str(folders["rates"]))
        limits = spark.readStream.schema("customer string, limit double").parquet(str(folders["limits"]))

        rate_table = anabranch.broadcast(rates, key="currency")
        limit_table = anabranch.broadcast(limits, key="customer", deleted="limit is null")
        over = (
            anabranch.stream(orders)
            .stage("tables")
            .withBroadcast(rates=rate_table, limits=limit_table)
            .join(rate_table, "currency")
            .withColumn("euros", F.col("amount") * F.col("rate"))
            .groupBy("customer")
            .transformWithState(Limits(), "customer string, spent double, limit double", "update", "none")
        )
        found: list[list[Row]] = []
        writer = over.writeStream.outputMode("update").foreachBatch(lambda rows, _: found[-1].extend(rows.collect()))

        add(folders["rates"], 0, [{"currency": "EUR", "rate": 1.0}, {"currency": "USD", "rate": 0.8}])
        add(folders["limits"], 0, [{"customer": "everybody", "limit": 100.0}])
        add(folders["orders"], 0, [order("ann", 90, "EUR"), order("bob", 110, "USD"), order("cyd", 101, "EUR")])
        found.append([])
        query = writer.option("checkpointLocation", f"{name}/checkpoint").start()
        query.processAllAvailable()

        # The dollar rises, ann gets a limit of her own, and so do all others.
        add(folders["rates"], 1, [{"currency": "USD", "rate": 1.1}])
        add(folders["limits"], 1, [{"customer": "everybody", "limit": 150.0}, {"customer": "ann", "limit": 1000.0}])
        query.processAllAvailable()
        add(folders["orders"], 1, [order("ann", 200, "USD"), order("bob", 60, "USD"), order("cyd", 10, "EUR")])
        found.append([])
        query.processAllAvailable()

        # Her limit is removed.
        add(folders["limits"], 2, [{"customer": "ann", "limit": None}])
        add(folders["orders"], 2, [order("ann", 1, "EUR")])
        found.append([])
        query.processAllAvailable()
        tables = {each: sorted(map(tuple, query.state("tables", each).collect())) for each in ("rates", "limits")}
        query.stop()
    for number, rows in enumerate(found):
        print(f"{number}:", ", ".join(f"{r.customer} has spent {r.spent:.0f} of {r.limit:.0f}" for r in rows) or "-")
    return {"over": [sorted(row.customer for row in rows) for rows in found], **tables}


def order(customer: str, amount: float, currency: str) -> dict[str, Any]:
    return {"customer": customer, "amount": float(amount), "currency": currency}


if __name__ == "__main__":
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder = SparkSession.builder.master("local[2]").config("spark.sql.shuffle.partitions", 2)
    session = builder.config("spark.ui.showConsoleProgress", False).getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    main(session)
