"""A Spark driver of its own process, to be killed: counts by key and writes the rows of each epoch into a file."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import anabranch

SCHEMA = "k string, v long"


def counted(rows: DataFrame) -> Any:
    """The query, which tests continue on the checkpoint of a killed driver."""
    stream = anabranch.stream(rows).groupBy("k").agg(F.count("*").alias("n"), F.sum("v").alias("total"))
    return stream.writeStream.outputMode("update")


def epochs_from(spark: SparkSession, folder: Path) -> DataFrame:
    """One file in each epoch."""
    return spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 1).parquet(str(folder))


class EpochFiles:
    """A function for foreachBatch that keeps each epoch's rows in a file, and ends the driver in one of them."""

    def __init__(self, folder: Path, die_in_epoch: int) -> None:
        self._folder = folder
        self._die_in_epoch = die_in_epoch

    def __call__(self, rows: DataFrame, epoch: int) -> None:
        unfinished = self._folder / f".{epoch}"
        unfinished.write_text(json.dumps(sorted(map(list, rows.collect()))))
        unfinished.rename(self._folder / f"{epoch}.json")
        if epoch == self._die_in_epoch:
            os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--die-in-epoch", type=int, default=-1)
    options = parser.parse_args()
    builder = SparkSession.builder.master("local[2,4]").config("spark.ui.enabled", False)
    builder = builder.config("spark.ui.showConsoleProgress", False).config("spark.sql.shuffle.partitions", 2)
    builder = builder.config("spark.driver.extraJavaOptions", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")
    spark = builder.config("spark.local.dir", str(options.folder / "local")).getOrCreate()
    spark.sparkContext.setLogLevel("OFF")
    writer = counted(epochs_from(spark, options.folder / "input"))
    writer = writer.foreachBatch(EpochFiles(options.folder / "output", options.die_in_epoch))
    query = writer.option("checkpointLocation", str(options.folder / "checkpoint")).start()
    sys.stdout.write(json.dumps([worker["pid"] for worker in query.workers()]) + "\n")
    sys.stdout.flush()
    query.awaitTermination()


if __name__ == "__main__":
    main()
