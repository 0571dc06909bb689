"""A StatefulProcessor of Spark's own, unchanged, on Anabranch: balances of accounts and their last movements.

Run it with ``.venv/bin/python examples/running_totals.py`` (less than a minute).
"""

import tempfile
from collections.abc import Iterator
from typing import Any

from pyspark.sql import Row, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

import anabranch


class Balance(StatefulProcessor):
    """Keeps the balance of an account and its three latest movements."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.balance = handle.getValueState("balance", "amount long")
        self.latest = handle.getListState("latest", "amount long")

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:
        del timerValues
        stored = self.balance.get()
        balance = stored[0] if stored else 0
        latest = [row[0] for row in self.latest.get()]
        for row in rows:
            balance += row.amount
            latest.append(row.amount)
        self.balance.update((balance,))
        self.latest.put([(amount,) for amount in latest[-3:]])
        yield Row(account=key[0], balance=balance)


def main(spark: SparkSession, seconds: int = 10) -> int:
    """Return how many accounts have a balance."""
    movements = (
        spark.readStream.format("rate")
        .option("rowsPerSecond", 1000)
        .load()
        .select((F.col("value") % 50).alias("account"), (F.col("value") % 7 - 3).alias("amount"))
    )
    balances = (
        anabranch.stream(movements)
        .stage("balances", parallelism=2)
        .groupBy("account")
        .transformWithState(Balance(), "account long, balance long", "update", "none")
    )
    with tempfile.TemporaryDirectory() as folder:
        query = (
            balances.writeStream.outputMode("update")
            .format("memory")
            .queryName("balances")
            .option("checkpointLocation", f"{folder}/checkpoint")
            .start()
        )
        query.awaitTermination(seconds)
        query.processAllAvailable()
        query.explain()
        query.state("balances", "latest").orderBy("account", "_position").show(6)
        accounts = query.state("balances", "balance").count()
        query.stop()
    return accounts


if __name__ == "__main__":
    builder = SparkSession.builder.master("local[2]").config("spark.sql.shuffle.partitions", 2)
    session = builder.config("spark.ui.showConsoleProgress", False).getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    print(main(session), "accounts")
