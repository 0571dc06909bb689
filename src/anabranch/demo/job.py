"""The job in PySpark's own words: 0 source, 1 filter, 2 work, 3 count, 4 sink."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import anabranch
from anabranch.api.query import StreamQuery
from anabranch.api.stream import Stream
from anabranch.demo.options import DemoOptions
from anabranch.demo.recorded import RecordedEvents
from anabranch.demo.sink import LatencySink
from anabranch.demo.stages import COUNTED, CountPerServer, Work, prepare_task
from anabranch.workload.source import NAME as WORKLOAD
from anabranch.workload.source import register

#: The stages by number.
STAGES = ("source", "filter", "work", "count", "sink")
#: The one with state, which a rescale is about.
COUNT_STAGE = STAGES.index("count")


def read_edits(spark: SparkSession, options: DemoOptions, recorded: RecordedEvents | None) -> DataFrame:
    """Stage 0: edits as they are made up, or one file of recorded ones in each epoch."""
    if recorded is not None:
        reader = spark.readStream.format(recorded.format).schema(recorded.schema).option("maxFilesPerTrigger", 1)
        if recorded.format == "csv":
            reader = reader.option("header", True)
        # Spark's current time is that of the epoch's beginning: this is when rows of a file arrive.
        edits = reader.load(str(recorded.directory.absolute()))
        return edits.select("id", "server_name", F.current_timestamp().alias("ingestion_time"))
    register(spark)
    return (
        spark.readStream.format(WORKLOAD)
        .option("columns", "id,server_name,ingestion_time")
        .option("rowsPerSecond", options.rate)
        .option("rows", options.rows)
        .option("maxRowsPerEpoch", options.max_rows_per_epoch)
        .option("partitions", options.parallelism)
        .option("keys", options.keys)
        .option("skew", options.skew)
        .load()
    )


def build_job(spark: SparkSession, options: DemoOptions, recorded: RecordedEvents | None = None) -> Stream:
    """Stages 0 to 3; the sink is given when the job is started."""
    edits = read_edits(spark, options, recorded)
    work = Work(options.work_ms / 1000)
    count = CountPerServer(cpu_s_per_row=options.count_ms / 1000, junk_bytes=options.junk_bytes)
    counted: Stream = (
        anabranch.stream(edits)
        .stage("filter")
        .filter(F.col("id") % 4 != 0)
        # Generated edits come in as many partitions as are wanted; a recorded file may be a single one.
        .stage("work", parallelism=None if recorded is None else options.parallelism)
        .mapInArrow(work, edits.schema)
        .stage("count")
        .groupBy("server_name")
        .transformWithState(count, COUNTED, "update", "none")
    )
    return counted


def warm_up(spark: SparkSession, options: DemoOptions) -> None:
    """Start the Python side of tasks, so that the first rows do not wait for it."""
    spark.range(options.parallelism, numPartitions=options.parallelism).mapInArrow(prepare_task, "id LONG").collect()


def start_job(job: Stream, options: DemoOptions, sink: LatencySink, checkpoint: Path) -> StreamQuery:
    """Start the job, with stage 4: a sink that notes how long each row took."""
    settings: dict[str, Any] = {
        "anabranch.workers": options.workers,
        "anabranch.parallelism": options.parallelism,
        "anabranch.store": options.store,
        "anabranch.migration": options.migration,
        "anabranch.routingCache": options.routing_cache,
        "anabranch.drain": options.drain,
    }
    if options.redis_url is not None:
        settings["anabranch.redisUrl"] = options.redis_url
    return (
        job.writeStream.outputMode("update")
        .queryName("demo")
        .foreachBatch(sink.record_latency)
        .trigger(processingTime=options.trigger)
        .option("checkpointLocation", str(checkpoint))
        .options(**settings)
        .start()
    )
