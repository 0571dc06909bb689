"""Top pages, visitors and loading times of web sites, with sketches: small state, however many values there are.

For each site: its most visited pages (approx_top_k), its visitors (approx_count_distinct, and an HLL sketch that can be
merged with others later) and the median and the 95th percentile of its loading times (a KLL sketch). The state of a
site has a limit, and most of it are the 1,000 pages that may be among the top; exact answers would have to keep every
user and every time.

Run it with ``.venv/bin/python examples/top_pages.py`` (less than a minute).
"""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

import anabranch

SCHEMA = "site string, page string, user bigint, load_ms bigint"
VIEWS_PER_FILE = 20_000
FILES = 3


def write_views(folder: Path) -> pd.DataFrame:
    """Write page views, most of them of few pages; each file is an epoch."""
    draw = np.random.default_rng(7)
    folder.mkdir()
    files = []
    for number in range(FILES):
        page = np.minimum(draw.zipf(1.5, VIEWS_PER_FILE), 5000)
        views = pd.DataFrame(
            {
                "site": draw.choice(["news", "shop"], VIEWS_PER_FILE),
                "page": [f"/page/{number}" for number in page],
                "user": draw.integers(0, 30_000, VIEWS_PER_FILE),
                "load_ms": draw.gamma(2.0, 100.0, VIEWS_PER_FILE).astype(np.int64),
            }
        )
        views.to_parquet(folder / f"{number}.parquet")
        files.append(views)
    return pd.concat(files)


def summary(views: Any) -> Any:
    return (
        views.stage("summary")
        .groupBy("site")
        .agg(
            F.expr("approx_top_k(page, 3, 1000)").alias("top"),
            F.approx_count_distinct("user").alias("visitors"),
            F.hll_sketch_agg("user").alias("users"),
            F.kll_sketch_agg_bigint("load_ms").alias("times"),
        )
        .withColumn("quantiles", F.kll_sketch_get_quantile_bigint("times", F.array(F.lit(0.5), F.lit(0.95))))
        .drop("times")
    )


def main(spark: SparkSession) -> dict[str, Any]:
    """Return for each site and for all together what the sketches say, and what is true."""
    with tempfile.TemporaryDirectory() as folder:
        views = write_views(Path(folder) / "views")
        source = spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 1).parquet(f"{folder}/views")
        query = (
            summary(anabranch.stream(source))
            .writeStream.outputMode("complete")
            .format("memory")
            .queryName("summary")
            .option("checkpointLocation", f"{folder}/checkpoint")
            .start()
        )
        query.processAllAvailable()
        held = sum(worker["bytes"] for worker in query.workers())
        query.stop()
        rows = {row["site"]: row for row in spark.table("summary").collect()}
        # Sketches of parts can be merged: users who visit both sites are counted once.
        together = spark.table("summary").agg(F.hll_sketch_estimate(F.hll_union_agg("users")).alias("users")).collect()
    result: dict[str, Any] = {"everybody": (together[0]["users"], views["user"].nunique())}
    for site, of_site in views.groupby("site"):
        row, top = rows[str(site)], of_site["page"].value_counts()
        times = of_site["load_ms"].quantile([0.5, 0.95]).tolist()
        result[str(site)] = {
            "visitors": (row["visitors"], of_site["user"].nunique()),
            "top": ([item["item"] for item in row["top"]], list(top.index[:3])),
            "quantiles": (list(row["quantiles"]), times),
        }
        print(f"{site}:", ", ".join(f"{item['item']} ({item['count']} views)" for item in row["top"]))
        print(f"  visitors: {row['visitors']} (in truth {of_site['user'].nunique()})")
        print(f"  half of the pages load in {row['quantiles'][0]} ms (in truth {times[0]:.0f}), ", end="")
        print(f"95 percent in {row['quantiles'][1]} ms ({times[1]:.0f})")
    print(f"Visitors of both sites together: {result['everybody'][0]} (in truth {result['everybody'][1]})")
    print(f"State: {held:,} bytes for {len(views):,} views")
    return result


if __name__ == "__main__":
    builder = SparkSession.builder.master("local[2]").config("spark.sql.shuffle.partitions", 2)
    session = builder.config("spark.ui.showConsoleProgress", False).getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    main(session)
