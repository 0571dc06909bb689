"""Edits per server and minute, with the state outside Spark: the example of the README.

Run it with ``.venv/bin/python examples/count_per_server.py`` (less than a minute).
"""

import tempfile

from pyspark.sql import SparkSession
from pyspark.sql import functions as F

import anabranch


def main(spark: SparkSession, seconds: int = 10) -> int:
    """Return how many edits were counted."""
    edits = (
        spark.readStream.format("rate")
        .option("rowsPerSecond", 1000)
        .load()
        .withColumn("server", F.concat(F.lit("server-"), F.col("value") % 100))
    )

    counts = (
        anabranch.stream(edits)
        .withWatermark("timestamp", "10 seconds")
        .groupBy(F.window("timestamp", "1 minute"), "server")
        .agg(F.count("*").alias("edits"))
    )

    with tempfile.TemporaryDirectory() as folder:
        query = (
            counts.writeStream.outputMode("update")
            .format("parquet")
            .option("path", f"{folder}/out")
            .option("checkpointLocation", f"{folder}/checkpoint")
            .start()
        )
        query.awaitTermination(seconds)
        query.processAllAvailable()
        for worker in query.workers():
            print(f"worker {worker['id']} at {worker['address']} holds {worker['rows']} rows of state")
        query.state("stage2").orderBy(F.desc("edits")).show(5, truncate=False)
        counted = query.state("stage2").agg(F.sum("edits")).first()
        query.stop()
    return int(counted[0]) if counted else 0


if __name__ == "__main__":
    builder = SparkSession.builder.master("local[2]").config("spark.sql.shuffle.partitions", 2)
    session = builder.config("spark.ui.showConsoleProgress", False).getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    print(main(session), "edits counted")
