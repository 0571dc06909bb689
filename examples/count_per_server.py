"""Edits per server and minute, with the state outside Spark: the example of the README.

Run it with ``./run python examples/count_per_server.py`` or, in an environment with anabranch installed, with
``python examples/count_per_server.py``.
"""

import sys
import tempfile
from pathlib import Path

from pyspark.sql import SparkSession
from pyspark.sql import functions as F

import anabranch


def main(folder: Path, seconds: int) -> int:
    spark = SparkSession.builder.master("local[2]").getOrCreate()
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

    query = (
        counts.writeStream.outputMode("update")
        .format("parquet")
        .option("path", str(folder / "out"))
        .option("checkpointLocation", str(folder / "checkpoint"))
        .start()
    )
    query.awaitTermination(seconds)
    query.processAllAvailable()
    print(query.workers())
    query.state("stage2").orderBy(F.desc("edits")).show(5, truncate=False)
    counted = query.state("stage2").agg(F.sum("edits")).first()
    query.stop()
    return int(counted[0]) if counted else 0


if __name__ == "__main__":
    print(main(Path(tempfile.mkdtemp()), int(sys.argv[1]) if len(sys.argv) > 1 else 20), "edits counted")
