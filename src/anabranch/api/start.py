"""Starting a query: claim the checkpoint, start or find the workers, restore the state, and hand over to Spark."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from anabranch.api.locations import qualified
from anabranch.api.query import StreamQuery
from anabranch.control.coordinator import Coordinator
from anabranch.control.launcher import EmbeddedWorkers
from anabranch.control.members import Membership, connect, discover
from anabranch.control.resume import claim, resume
from anabranch.core.errors import CheckpointError, EpochError
from anabranch.core.settings import Settings
from anabranch.engine.loop import EpochLoop
from anabranch.engine.sinks import Sink
from anabranch.engine.streamfacts import SparkStream
from anabranch.plan.pipeline import Pipeline


def start_query(
    pipeline: Pipeline,
    sample: DataFrame,
    sink: Sink,
    description: str,
    *,
    settings: Settings,
    checkpoint: str,
    mode: str,
    trigger: Mapping[str, Any],
    name: str | None,
) -> StreamQuery:
    """Start everything, or leave nothing behind."""
    spark = sample.sparkSession
    location = qualified(spark, checkpoint, what="The checkpoint", error=CheckpointError)
    _check_one_query_per_checkpoint(spark, location)
    default_parallelism = settings.parallelism or max(spark.sparkContext.defaultParallelism, 1)
    specs = [stage.spec for stage in pipeline.stateful_stages]
    claimed = claim(location, specs, settings.key_groups)
    workers = EmbeddedWorkers(
        store=settings.store,
        state_path=settings.state_path,
        token=settings.token,
        start_timeout_s=settings.start_timeout_s,
    )
    members: Membership | None = None
    try:
        members = _find_workers(settings, workers)
        coordinator = Coordinator(
            resume(claimed, members),
            members,
            settings,
            {s.spec.number: s.parallelism or default_parallelism for s in pipeline.stateful_stages},
        )
        stream = SparkStream(has_watermark=pipeline.has_watermark)
        loop = EpochLoop(
            pipeline.segments,
            coordinator,
            sink,
            complete=mode == "complete",
            shuffle_partitions=default_parallelism,
            stream=stream,
        )
        query = _start_spark(pipeline, loop, location, trigger, name)
        stream.attach(query)
    except BaseException:
        if members is not None:
            members.close()
        workers.stop()
        raise

    def release() -> None:
        coordinator.close()
        members.close()
        workers.stop()

    return StreamQuery(
        query,
        pipeline,
        loop,
        coordinator,
        settings=settings,
        sink=description,
        default_parallelism=default_parallelism,
        release=release,
    )


def _find_workers(settings: Settings, workers: EmbeddedWorkers) -> Membership:
    if settings.worker_addresses:
        return discover(
            settings.worker_addresses,
            timeout_s=settings.request_timeout_s,
            start_timeout_s=settings.start_timeout_s,
            token=settings.token,
        )
    started = workers.start(settings.workers)
    return connect(started, timeout_s=settings.request_timeout_s, token=settings.token)


def _start_spark(
    pipeline: Pipeline, loop: EpochLoop, location: str, trigger: Mapping[str, Any], name: str | None
) -> StreamingQuery:
    rows = pipeline.source
    if pipeline.segments:
        rows = pipeline.segments[0].stage.project(rows)
    writer = rows.writeStream.foreachBatch(loop).option("checkpointLocation", location)
    if trigger:
        writer = writer.trigger(**trigger)
    if name is not None:
        writer = writer.queryName(name)
    return writer.start()


def _check_one_query_per_checkpoint(spark: SparkSession, location: str) -> None:
    for query in spark.streams.active:
        jvm_query: Any = query._jsq
        used = jvm_query.streamingQuery().resolvedCheckpointRoot()
        if os.path.normpath(str(used).removeprefix("file:")) == os.path.normpath(location.removeprefix("file:")):
            raise EpochError(
                f"The query {query.name or query.id} is running on the checkpoint {location}. Stop it first: one "
                "checkpoint belongs to one running query."
            )
