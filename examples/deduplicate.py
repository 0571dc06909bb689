"""Payments that are sent again, and must count once: three ways, and what each of them has to remember.

 - ``dropDuplicates(["id"])`` remembers every id for ever;
 - ``dropDuplicates(["id", "at"])`` under a watermark lets an id go when no row of its time can come any more, but takes
   a second message for a new one if its time differs by a second;
 - ``dropDuplicatesWithinWatermark(["id"])`` goes by the id alone and remembers it for the watermark's delay.

Run it with ``.venv/bin/python examples/deduplicate.py`` (less than a minute).
"""

import json
import os
import tempfile
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

import anabranch

START = datetime(2026, 1, 1, 12)
PAYMENTS_PER_MINUTE = 20
MINUTES = 30
WAYS: dict[str, Callable[[Any], Any]] = {
    "dropDuplicates id": lambda payments: payments.dropDuplicates(["id"]),
    "dropDuplicates id, at": lambda payments: payments.dropDuplicates(["id", "at"]),
    "dropDuplicatesWithinWatermark id": lambda payments: payments.dropDuplicatesWithinWatermark(["id"]),
}


def write_payments(folder: Path) -> None:
    """Write every payment, every second one of them again at once, and every fourth again with a later time."""
    folder.mkdir()
    rows = []
    for number in range(MINUTES * PAYMENTS_PER_MINUTE):
        at = START + timedelta(minutes=number // PAYMENTS_PER_MINUTE)
        times = [at, *[at] * (number % 2 == 0), *[at + timedelta(seconds=30)] * (number % 4 == 0)]
        rows += [{"id": number, "at": str(time), "amount": 1} for time in times]
    for part in range(3):
        some = rows[part * len(rows) // 3 : (part + 1) * len(rows) // 3]
        file = folder / f"{part}.json"
        file.write_text("\n".join(map(json.dumps, some)))
        os.utime(file, (part, part))  # Spark takes files in the order of their times


def main(spark: SparkSession) -> dict[str, tuple[int, int]]:
    """Return for each way how many payments went through, and how many keys the state has at the end."""
    result = {}
    with tempfile.TemporaryDirectory() as folder:
        write_payments(Path(folder) / "payments")
        for number, (name, deduplicate) in enumerate(WAYS.items()):
            reader = spark.readStream.schema("id bigint, at timestamp, amount bigint").option("maxFilesPerTrigger", 1)
            payments = anabranch.stream(reader.json(f"{folder}/payments")).withWatermark("at", "5 minutes")
            query = (
                deduplicate(payments.stage("payments"))
                .writeStream.outputMode("append")
                .format("memory")
                .queryName(f"payments_{number}")
                .option("checkpointLocation", f"{folder}/checkpoint_{number}")
                .start()
            )
            query.processAllAvailable()
            result[name] = spark.table(f"payments_{number}").count(), query.state("payments").count()
            query.stop()
            through, remembered = result[name]
            print(f"{name:<34} {through:>4} payments went through, {remembered:>4} keys are remembered")
    print(f"There were {MINUTES * PAYMENTS_PER_MINUTE} payments.")
    return result


if __name__ == "__main__":
    builder = SparkSession.builder.master("local[2]").config("spark.sql.shuffle.partitions", 2)
    session = builder.config("spark.ui.showConsoleProgress", False).getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    main(session)
