"""State logic in columns: one call for all sensors of a partition, instead of one for each of them.

``groupBy(...).processInArrow(function, ...)`` gives a function the keys, the rows and the state as Arrow tables. This
one keeps the count, mean and spread of each sensor's readings, and lets those through that are far from all before.
There is no Python loop over rows or keys, so 20,000 sensors an epoch cost hardly more than the exchange of their state.

Run it with ``.venv/bin/python examples/vectorised.py`` (less than a minute).
"""

import tempfile
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
from pyspark.sql import Row, SparkSession

import anabranch

SENSORS = 20_000
READINGS = 10
EPOCHS = 4
STATE = "n bigint, mean double, squares double"
#: Sensors that go wrong in the last epoch.
FAULTY = [17, 4_711, 16_180]


def outliers(keys: pa.Table, rows: pa.Table, state: pa.Table) -> tuple[pa.Table, pa.Table]:
    """Return the readings ten standard deviations away from the mean of those before, if these are many; the state."""
    n, mean, squares = (state.column(name).fill_null(0).to_numpy() for name in ("n", "mean", "squares"))
    key = rows.column("_key").to_numpy()  # the position of each row's sensor in keys and state
    value = rows.column("value").to_numpy()

    deviation = np.sqrt(squares / np.maximum(n - 1, 1))
    is_far = (n[key] >= 20) & (np.abs(value - mean[key]) > 10 * deviation[key])
    found = rows.select(["sensor", "value"]).append_column("mean", pa.array(mean[key])).filter(pa.array(is_far))

    # Mean and squared differences of the new readings, and then of old and new ones together.
    new_n = np.bincount(key, minlength=len(keys))
    new_mean = np.bincount(key, value, minlength=len(keys)) / new_n
    new_squares = np.bincount(key, (value - new_mean[key]) ** 2, minlength=len(keys))
    total, change = n + new_n, new_mean - mean
    after = {
        "n": total,
        "mean": mean + change * new_n / total,
        "squares": squares + new_squares + change**2 * n * new_n / total,
    }
    return found, pa.table(after)


def write_epoch(folder: Path, number: int) -> None:
    """Write ten readings of every sensor; in the last epoch, one of each faulty sensor is far off."""
    draw = np.random.default_rng(number)
    sensor = np.repeat(np.arange(SENSORS, dtype=np.int64), READINGS)
    value = 20 + sensor % 10 + draw.normal(0, 0.5, len(sensor))
    if number == EPOCHS - 1:
        value[np.array(FAULTY) * READINGS] += 15
    new = folder.parent / "new.parquet"
    pd.DataFrame({"sensor": sensor, "value": value}).to_parquet(new)
    new.rename(folder / f"{number}.parquet")


def main(spark: SparkSession) -> list[Row]:
    """Return the readings that are far off."""
    with tempfile.TemporaryDirectory() as folder:
        readings = Path(folder) / "readings"
        readings.mkdir()
        rows = spark.readStream.schema("sensor bigint, value double").parquet(str(readings))
        found = (
            anabranch.stream(rows)
            .stage("statistics")
            .groupBy("sensor")
            .processInArrow(outliers, "sensor bigint, value double, mean double", STATE)
        )
        writer = found.writeStream.outputMode("update").format("memory").queryName("outliers")
        query = writer.option("checkpointLocation", f"{folder}/checkpoint").start()
        for number in range(EPOCHS):
            write_epoch(readings, number)
            started_s = time.monotonic()
            query.processAllAvailable()
            took_s = time.monotonic() - started_s
            print(f"epoch {number}: {SENSORS:,} sensors, {READINGS * SENSORS:,} readings in {took_s:.1f} s")
        query.state("statistics").orderBy("sensor").show(3)
        query.stop()
        result = spark.table("outliers").orderBy("sensor").collect()
    for row in result:
        print(f"sensor {row['sensor']}: {row['value']:.1f}, where {row['mean']:.1f} is usual")
    return result


if __name__ == "__main__":
    builder = SparkSession.builder.master("local[2]").config("spark.sql.shuffle.partitions", 2)
    session = builder.config("spark.ui.showConsoleProgress", False).getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    main(session)
