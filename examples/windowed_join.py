"""How many impressions of an advertisement were clicked: a left outer join of two streams, counted in windows.

A click belongs to an impression if it comes within five minutes of it. An impression waits in the state for its click;
when the watermark says that none can come any more, it goes out without one. Then each ten minutes are counted, and a
window goes out once, when it is final: append mode, two stateful stages in one query.

Run it with ``.venv/bin/python examples/windowed_join.py`` (less than a minute).
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

SHOWN = "impression bigint, ad string, shown_at timestamp"
CLICKED = "clicked bigint, clicked_at timestamp"
START = datetime(2026, 1, 1, 12)


def write_input(folder: Path) -> None:
    """Write half an hour of impressions and clicks, ten minutes a file, and one of each later, to move the time."""
    draw = random.Random(7)
    number = 0
    for part in range(4):
        shown, clicked = [], []
        for _ in range(100 if part < 3 else 1):
            number += 1
            at = START + timedelta(minutes=10 * part if part < 3 else 180, seconds=draw.randrange(600))
            shown.append({"impression": number, "ad": draw.choice(["boots", "tents"]), "shown_at": str(at)})
            if draw.random() < 0.3:
                # Some are too late, and count for nothing.
                clicked.append({"clicked": number, "clicked_at": str(at + timedelta(seconds=draw.randrange(400)))})
        if part == 3:
            clicked.append({"clicked": 0, "clicked_at": str(START + timedelta(minutes=180))})
        for name, rows in (("shown", shown), ("clicked", clicked)):
            (folder / name).mkdir(exist_ok=True)
            file = folder / name / f"{part}.json"
            file.write_text("\n".join(map(json.dumps, rows)))
            os.utime(file, (part, part))  # Spark takes files in the order of their times


def click_rates(shown: Any, clicked: Any) -> Any:
    """Count, on streams or on DataFrames: the words are the same."""
    shown = shown.withWatermark("shown_at", "10 minutes")
    clicked = clicked.withWatermark("clicked_at", "10 minutes")
    in_time = F.expr("clicked_at BETWEEN shown_at AND shown_at + INTERVAL 5 MINUTES")
    return (
        shown.join(clicked, (F.col("impression") == F.col("clicked")) & in_time, "left_outer")
        .groupBy(F.window("shown_at", "10 minutes"), "ad")
        .agg(F.count("*").alias("shown"), F.count("clicked").alias("clicked"))
        .select("window.start", "ad", "shown", "clicked")
    )


def main(spark: SparkSession) -> dict[str, list[Row]]:
    """Return the counts of the stream, and of the same files in one batch."""
    with tempfile.TemporaryDirectory() as folder:
        write_input(Path(folder))
        reader = spark.readStream.option("maxFilesPerTrigger", 1)
        shown = anabranch.stream(reader.schema(SHOWN).json(f"{folder}/shown"))
        clicked = anabranch.stream(reader.schema(CLICKED).json(f"{folder}/clicked"))
        query = (
            click_rates(shown, clicked)
            .writeStream.outputMode("append")
            .format("memory")
            .queryName("click_rates")
            .option("checkpointLocation", f"{folder}/checkpoint")
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()
        rates = spark.table("click_rates").orderBy("start", "ad")
        rates.withColumn("rate", F.format_string("%.0f %%", F.col("clicked") / F.col("shown") * 100)).show()
        streamed = rates.collect()
        whole = click_rates(
            spark.read.schema(SHOWN).json(f"{folder}/shown"), spark.read.schema(CLICKED).json(f"{folder}/clicked")
        )
        final = whole.filter(F.col("start") < F.lit(START + timedelta(hours=2))).orderBy("start", "ad").collect()
    print("A batch over the same files says the same." if final == streamed else "A batch says something else.")
    return {"streamed": streamed, "batch": final}


if __name__ == "__main__":
    builder = SparkSession.builder.master("local[2]").config("spark.sql.shuffle.partitions", 2)
    session = builder.config("spark.ui.showConsoleProgress", False).getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    main(session)
