"""From Spark's state store to Anabranch with one line: an ordinary PySpark program, run as it is and after ``enable``.

Nothing in ``job`` knows of Anabranch. After ``anabranch.enable(spark)``, streaming DataFrames of the session also
remember how Anabranch would do the same; where a query cannot be taken over, a warning says why, and Spark runs it as
before. The results of both runs are compared row by row.

Run it with ``.venv/bin/python examples/migrate_a_spark_job.py`` (less than a minute).
"""

import json
import os
import random
import tempfile
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from pyspark.sql import Row, SparkSession
from pyspark.sql import functions as F

import anabranch

START = datetime(2026, 1, 1, 12)


def job(spark: SparkSession, folder: str, name: str) -> tuple[Any, list[Row]]:
    """Sum up the sales of each region and quarter of an hour, from orders and a table of shops."""
    shops = spark.createDataFrame([(1, "north"), (2, "north"), (3, "south")], "shop bigint, region string")
    schema = "shop bigint, at timestamp, amount bigint"
    orders = spark.readStream.schema(schema).option("maxFilesPerTrigger", 1).json(f"{folder}/orders")
    sales = (
        orders.filter(orders.amount > 0)
        .join(shops, "shop")
        .withWatermark("at", "10 minutes")
        .groupBy(F.window("at", "15 minutes"), "region")
        .agg(F.count("*").alias("orders"), F.sum("amount").alias("total"), F.max_by("shop", "amount").alias("best"))
        .select("window.start", "region", "orders", "total", "best")
    )
    query = (
        sales.writeStream.outputMode("append")
        .format("memory")
        .queryName(name)
        .option("checkpointLocation", f"{folder}/{name}")
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    return query, spark.table(name).orderBy("start", "region").collect()


def write_orders(folder: Path) -> None:
    """Write two hours of orders, with some that are out of order, to four files."""
    draw = random.Random(7)
    folder.mkdir()
    for part in range(4):
        rows = []
        for number in range(200):
            at = START + timedelta(minutes=30 * part, seconds=9 * number - draw.randrange(300))
            rows.append({"shop": draw.randrange(1, 4), "at": str(at), "amount": draw.randrange(-5, 100_000)})
        file = folder / f"{part}.json"
        file.write_text("\n".join(map(json.dumps, rows)))
        os.utime(file, (part, part))  # Spark takes files in the order of their times


def main(spark: SparkSession) -> dict[str, Any]:
    """Return who ran the program each time, and what came out."""
    with tempfile.TemporaryDirectory() as folder:
        write_orders(Path(folder) / "orders")
        before, native = job(spark, folder, "sales_on_spark")
        anabranch.enable(spark)
        try:
            after, ours = job(spark, folder, "sales_on_anabranch")
        finally:
            anabranch.disable(spark)
    kinds = [f"{type(query).__module__.split('.')[0]}.{type(query).__name__}" for query in (before, after)]
    for row in ours:
        print(f"{row['start']:%H:%M} {row['region']}: {row['orders']} orders, {row['total']} in all")
    print(f"First run by {kinds[0]}, then by {kinds[1]}: ", end="")
    print(f"{len(ours)} rows, all equal." if native == ours else "the results differ.")
    return {"kinds": kinds, "native": native, "ours": ours}


if __name__ == "__main__":
    builder = SparkSession.builder.master("local[2]").config("spark.sql.shuffle.partitions", 2)
    session = builder.config("spark.ui.showConsoleProgress", False).getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    main(session)
