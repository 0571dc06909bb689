"""Starting a query: claim the checkpoint, start or find the workers, restore the state, and hand over to Spark."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from anabranch.api.failures import explained
from anabranch.api.locations import TemporaryFolder, fast_log_files, qualified
from anabranch.api.progress import StateOperators
from anabranch.api.query import StreamQuery
from anabranch.api.running import Running
from anabranch.checkpoint import rewind
from anabranch.checkpoint.storage import Storage
from anabranch.control.claims import claim
from anabranch.control.coordinator import Coordinator
from anabranch.control.launcher import EmbeddedWorkers, prepare
from anabranch.control.members import Member, Membership, connect, discover
from anabranch.control.resume import resume
from anabranch.control.savepoints import seed
from anabranch.core.errors import CheckpointError, EpochError, SettingsError
from anabranch.core.ids import NO_EPOCH, StageNumber, WorkerId
from anabranch.core.settings import Settings
from anabranch.engine.late import LateRows
from anabranch.engine.loop import EpochLoop, wall_clock_ms
from anabranch.engine.pythondaemon import use_own_daemon
from anabranch.engine.sinks import FileSink, Sink
from anabranch.engine.stages import Clock, table_stage
from anabranch.engine.streamfacts import SparkStream
from anabranch.engine.tables import TableKeeper
from anabranch.engine.ticks import Ticks
from anabranch.plan.pipeline import Pipeline

logger = logging.getLogger(__name__)

_EPOCHS_WITHOUT_ROWS = "spark.sql.streaming.noDataMicroBatches.enabled"


def start_query(
    pipeline: Pipeline,
    sample: DataFrame,
    sink: Sink,
    description: str,
    *,
    late: LateRows | None = None,
    settings: Settings,
    checkpoint: str | TemporaryFolder,
    mode: str,
    trigger: Mapping[str, Any],
    name: str | None,
    now_ms: Callable[[], int] = wall_clock_ms,
) -> StreamQuery:
    """Start everything, or leave nothing behind."""
    if not settings.worker_addresses:
        prepare()
    spark = sample.sparkSession
    use_own_daemon(spark)
    temporary = checkpoint if isinstance(checkpoint, TemporaryFolder) else None
    place = checkpoint.path if isinstance(checkpoint, TemporaryFolder) else checkpoint
    location = qualified(spark, place, what="The checkpoint", error=CheckpointError)
    default = settings.parallelism or max(spark.sparkContext.defaultParallelism, 1)

    def launch(settings: Settings, parallelism: Mapping[StageNumber, int]) -> Running:
        _check_one_query_per_checkpoint(spark, location)
        with contextlib.ExitStack() as undo:
            coordinator = _start_coordinator(pipeline, settings, location, parallelism, undo)
            stream = SparkStream(has_watermark=pipeline.has_watermark)
            coordinator.cluster.on_loss = lambda _: stream.cancel_jobs()
            ticks = _make_ticks(spark, pipeline, mode, trigger, undo)
            loop = EpochLoop(
                pipeline.segments,
                coordinator,
                sink,
                complete=mode == "complete",
                append=mode == "append",
                shuffle_partitions=default,
                stream=stream,
                ticks=ticks,
                late=late,
                tables=_make_tables(pipeline, settings),
            )
            loop.now_ms = now_ms
            rows = loop.feeds.read() if pipeline.segments else pipeline.source
            if ticks is not None:
                rows = ticks.added_to(rows)
            if isinstance(sink, FileSink):
                sink.announce(spark)
            _replay(rows, loop, location, stream)
            if ticks is not None and coordinator.committed_epoch != NO_EPOCH:
                ticks.note_restart()
            query = _start_spark(rows, loop, location, trigger, name)
            stream.attach(query)
            return Running(query, loop, coordinator, StateOperators(pipeline.stateful_stages), undo.pop_all().close)

    running = launch(settings, {stage.spec.number: stage.parallelism or default for stage in pipeline.stateful_stages})
    query = StreamQuery(running, pipeline, settings=settings, sink=description, relaunch=launch, temporary=temporary)
    try:
        query.open_control(strict_port="control_port" in settings.given)
    except SettingsError:
        query.stop()
        raise
    return query


def _make_tables(pipeline: Pipeline, settings: Settings) -> TableKeeper | None:
    stage = table_stage(pipeline.stateful_stages)
    return None if stage is None else TableKeeper(stage, bytes_max=settings.broadcast_bytes)


def _start_coordinator(
    pipeline: Pipeline,
    settings: Settings,
    location: str,
    parallelism: Mapping[StageNumber, int],
    undo: contextlib.ExitStack,
) -> Coordinator:
    """Claim the checkpoint, start or find the workers, and open the job on them; `undo` takes all of it down."""
    if settings.savepoint:
        seed(location, settings.state_location, settings.savepoint)
    specs = [stage.spec for stage in pipeline.stateful_stages]
    claimed = claim(
        location,
        specs,
        settings.key_groups,
        state_location=settings.state_location,
        interval_s=settings.checkpoint_interval_s,
    )
    workers = EmbeddedWorkers(
        store=settings.store,
        redis_url=settings.redis_url if settings.store == "redis" else "",
        state_path=settings.state_path,
        token=settings.token,
        start_timeout_s=settings.start_timeout_s,
    )
    undo.callback(workers.stop)
    members = _find_workers(settings, workers)
    undo.callback(members.close)
    coordinator = Coordinator(
        resume(claimed, members, shared_store=settings.store == "redis", heartbeat_s=settings.heartbeat_s),
        members,
        settings,
        parallelism,
        _Supply(settings, workers),
    )
    undo.callback(coordinator.close)
    return coordinator


@dataclass(frozen=True)
class _Supply:
    """New workers for a running query: on this machine, unless the user has named the workers to use."""

    settings: Settings
    workers: EmbeddedWorkers

    @property
    def can_start(self) -> bool:
        return not self.settings.worker_addresses

    def start(self) -> Member | None:
        if self.settings.worker_addresses:
            return None
        started = self.workers.start(1)
        return connect(started, timeout_s=self.settings.request_timeout_s, token=self.settings.token).all[0]

    def kill(self, worker: WorkerId) -> None:
        self.workers.kill(worker)

    def retire(self, worker: WorkerId) -> None:
        self.workers.retire(worker)

    def exited(self) -> frozenset[WorkerId]:
        return self.workers.exited()


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


def _replay(rows: DataFrame, loop: EpochLoop, location: str, stream: SparkStream) -> None:
    """Let Spark repeat the epochs that were put aside, one after the other, before it goes on with new ones."""
    spark = Storage(location)
    for epoch in rewind.pending(spark):
        logger.warning("epoch %d is repeated from the offsets that it had", epoch)
        rewind.put_back(spark, epoch)
        query = _start_spark(rows, loop, location, {"once": True}, None)
        stream.attach(query)
        try:
            query.awaitTermination()
        except StreamingQueryException as error:
            raise explained(loop, error) from error
        rewind.done(spark, epoch)


def _make_ticks(
    spark: SparkSession, pipeline: Pipeline, mode: str, trigger: Mapping[str, Any], undo: contextlib.ExitStack
) -> Ticks | None:
    """Epochs without rows, if any stage has something to do in them and Spark's setting for them does not forbid it."""
    clocks = {stage.clock for stage in pipeline.stateful_stages} - {Clock.NONE}
    if mode == "complete":
        clocks -= {Clock.EVENT_TIME}  # the result keeps everything
    if not clocks:
        return None
    # The source of ticks is there in either case: Spark does not let a query's sources change when it is restarted.
    are_wanted = (spark.conf.get(_EPOCHS_WITHOUT_ROWS, "true") or "true").lower() == "true"
    ticks = Ticks(after_rows=are_wanted)
    undo.callback(ticks.close)
    if are_wanted and Clock.PROCESSING_TIME in clocks and not {"once", "availableNow"} & trigger.keys():
        ticks.keep_wishing()
    return ticks


def _start_spark(
    rows: DataFrame, loop: EpochLoop, location: str, trigger: Mapping[str, Any], name: str | None
) -> StreamingQuery:
    writer = rows.writeStream.foreachBatch(loop).option("checkpointLocation", location)
    if trigger:
        writer = writer.trigger(**trigger)
    if name is not None:
        writer = writer.queryName(name)
    with fast_log_files(rows.sparkSession, location):
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
