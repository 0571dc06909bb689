"""Starts a query: claims the checkpoint, starts or finds the workers, restores the state, and hands over to Spark."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from anabranch.api.failures import explained
from anabranch.api.progress import StateOperators
from anabranch.api.query import StreamQuery
from anabranch.api.running import Running
from anabranch.checkpoint import rewind
from anabranch.checkpoint.storage import Storage
from anabranch.control.coordinator import Coordinator
from anabranch.control.epochs.savepoints import seed
from anabranch.control.membership.launcher import EmbeddedWorkers, prepare
from anabranch.control.membership.members import Member, Membership, connect, discover
from anabranch.control.owned_checkpoint import OwnedCheckpoint, claim
from anabranch.control.resume import resume
from anabranch.control.strategies import strategy_of
from anabranch.control.strategies.strategy import MigrationStrategy
from anabranch.core.errors import CheckpointError, EpochError, SettingsError
from anabranch.core.ids import NO_EPOCH, Epoch, StageNumber, WorkerId
from anabranch.core.settings import Settings
from anabranch.engine.late import LateRows
from anabranch.engine.loop import EpochLoop
from anabranch.engine.spark.files import TemporaryFolder, fast_log_files, qualified
from anabranch.engine.spark.loss_log import leave_out_lost_workers
from anabranch.engine.spark.python_daemon import use_own_daemon
from anabranch.engine.spark.query import SparkStream, checkpoint_of
from anabranch.engine.spark.sinks import FileSink, Sink
from anabranch.engine.spark.ticks import Ticks
from anabranch.engine.stages import StageClock, table_stage
from anabranch.engine.tables import TableKeeper
from anabranch.plan.pipeline import Pipeline
from anabranch.wire.credentials import Credentials, is_loopback_host
from anabranch.wire.keyring import new_token, user_token
from anabranch.worker.stores import store_kind

logger = logging.getLogger(__name__)

_EPOCHS_WITHOUT_ROWS = "spark.sql.streaming.noDataMicroBatches.enabled"


@dataclass(frozen=True)
class QuerySpec:
    """A query as the writer describes it, with all that was checked before it starts."""

    pipeline: Pipeline
    #: A DataFrame with the columns of the result.
    sample: DataFrame
    sink: Sink
    #: The sink in a few words.
    description: str
    settings: Settings
    checkpoint: str | TemporaryFolder
    mode: str
    trigger: Mapping[str, Any]
    name: str | None
    #: Only if the user asks for rows that come too late.
    late: LateRows | None = None
    #: The processing time of epochs, if it is not Spark's.
    now_ms: Callable[[], int] | None = None


def start_query(query: QuerySpec) -> StreamQuery:
    """Starts everything, or leaves nothing behind."""
    settings = _with_token(query.settings)
    _check_exposure(settings)
    if not settings.worker_addresses:
        prepare()
    spark = query.sample.sparkSession
    use_own_daemon(spark)
    leave_out_lost_workers(spark)
    temporary = query.checkpoint if isinstance(query.checkpoint, TemporaryFolder) else None
    place = query.checkpoint if isinstance(query.checkpoint, str) else query.checkpoint.path
    location = qualified(spark, place, what="The checkpoint", error=CheckpointError)
    partitions = settings.parallelism or max(spark.sparkContext.defaultParallelism, 1)
    parallelism = {stage.spec.number: stage.parallelism or partitions for stage in query.pipeline.stateful_stages}
    kind = store_kind(settings.store)
    if not settings.worker_addresses:
        kind.check_installed()  # before the checkpoint is claimed: that stops a driver which may be running on it
    strategy = strategy_of(settings.migration, store_is_shared=kind.is_shared)
    # A query that is rescaled by a restart is launched again, with other settings.
    launch = partial(_launch, query, strategy, location, partitions)
    handle = StreamQuery(
        launch(settings, parallelism),
        query.pipeline,
        strategy,
        launch,
        settings=settings,
        sink=query.description,
        temporary=temporary,
    )
    try:
        handle.open_control(strict_port="control_port" in settings.given)
    except SettingsError:
        handle.stop()
        raise
    return handle


def _launch(
    query: QuerySpec,
    strategy: MigrationStrategy,
    location: str,
    partitions: int,
    settings: Settings,
    parallelism: Mapping[StageNumber, int],
) -> Running:
    """Opens the job on its workers, repeats the epochs that have to be, and starts Spark's query."""
    pipeline, sink, spark = query.pipeline, query.sink, query.sample.sparkSession
    _check_one_query_per_checkpoint(spark, location)
    with contextlib.ExitStack() as undo:
        owned, coordinator = _start_coordinator(pipeline, settings, strategy, location, parallelism, undo)
        stream = SparkStream(has_watermark=pipeline.has_watermark)
        coordinator.cluster.on_loss = lambda _: stream.cancel_jobs()
        ticks = _make_ticks(query, undo)
        loop = EpochLoop(
            pipeline.segments,
            coordinator,
            sink,
            complete=query.mode == "complete",
            append=query.mode == "append",
            shuffle_partitions=partitions,
            stream=stream,
            ticks=ticks,
            late=query.late,
            tables=_make_tables(pipeline, settings, undo),
            now_ms=query.now_ms,
        )
        rows = loop.stream_inputs.read() if pipeline.segments else pipeline.source
        if ticks is not None:
            rows = ticks.added_to(rows)
        if isinstance(sink, FileSink):
            sink.begin(spark, owned.storage, owned.spark, Epoch(coordinator.committed_epoch))
        _repeat_epochs(rows, loop, location, stream)
        if ticks is not None and coordinator.committed_epoch != NO_EPOCH:
            ticks.note_restart()
        restart = partial(_start_spark, rows, loop, stream, location, query.trigger, query.name)
        operators = StateOperators(pipeline.stateful_stages)
        return Running(restart(), loop, coordinator, operators, undo.pop_all().close, restart)


def _with_token(settings: Settings) -> Settings:
    """Gives the query a token: workers that it starts get a new one, others of this user have the user's own."""
    if settings.token:
        return settings
    if far := _far_workers(settings):
        raise SettingsError(
            f"The workers at {', '.join(far)} can be reached from other machines, so they have a token. Set "
            "anabranch.token to the same."
        )
    return replace(settings, token=user_token() if settings.worker_addresses else new_token())


def _check_exposure(settings: Settings) -> None:
    """Checks that strangers on the network cannot reach the workers, and warns if they could listen in."""
    credentials = Credentials.of(settings)
    credentials.check()
    if credentials.uses_tls and not settings.worker_addresses and not credentials.serves_tls:
        raise SettingsError(
            "anabranch.tlsAuthority is set, but workers that the query starts have no certificate. Set "
            "anabranch.tlsCertificate and anabranch.tlsKey as well."
        )
    if (far := _far_workers(settings)) and not credentials.uses_tls:
        logger.warning(
            "the workers at %s are reached without TLS: whoever listens in on the way reads the token and all state; "
            "set anabranch.tlsAuthority, and start workers with --tls-certificate and --tls-key",
            ", ".join(far),
        )


def _far_workers(settings: Settings) -> list[str]:
    return [address for address in settings.worker_addresses if not is_loopback_host(address.rpartition(":")[0])]


def _make_tables(pipeline: Pipeline, settings: Settings, undo: contextlib.ExitStack) -> TableKeeper | None:
    stage = table_stage(pipeline.stateful_stages)
    if stage is None:
        return None
    keeper = TableKeeper(stage, bytes_max=settings.broadcast_bytes)
    undo.callback(keeper.close)
    return keeper


def _start_coordinator(
    pipeline: Pipeline,
    settings: Settings,
    strategy: MigrationStrategy,
    location: str,
    parallelism: Mapping[StageNumber, int],
    undo: contextlib.ExitStack,
) -> tuple[OwnedCheckpoint, Coordinator]:
    """Claims the checkpoint, starts or finds the workers, and opens the job on them; `undo` takes all of it down."""
    if settings.savepoint:
        seed(location, settings.state_location, settings.savepoint)
    specs = [stage.spec for stage in pipeline.stateful_stages]
    owned = claim(
        location,
        specs,
        settings.key_groups,
        state_location=settings.state_location,
        interval_s=settings.checkpoint_interval_s,
    )
    workers = EmbeddedWorkers(
        store=settings.store,
        redis_url=store_kind(settings.store).url_of(settings),
        state_path=settings.state_path,
        log_path=settings.log_path,
        credentials=Credentials.of(settings),
        start_timeout_s=settings.start_timeout_s,
    )
    undo.callback(workers.stop)
    members = _find_workers(settings, workers)
    undo.callback(members.close)
    coordinator = Coordinator(
        resume(owned, members, shared_store=strategy.hands_over, heartbeat_s=settings.heartbeat_s),
        members,
        settings,
        parallelism,
        _Supply(settings, workers),
        strategy=strategy,
    )
    undo.callback(coordinator.close)
    return owned, coordinator


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
        credentials = Credentials.of(self.settings)
        return connect(started, timeout_s=self.settings.request_timeout_s, credentials=credentials).all[0]

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
            credentials=Credentials.of(settings),
        )
    started = workers.start(settings.workers)
    return connect(started, timeout_s=settings.request_timeout_s, credentials=Credentials.of(settings))


def _repeat_epochs(rows: DataFrame, loop: EpochLoop, location: str, stream: SparkStream) -> None:
    """Lets Spark repeat the epochs that were put aside, one after the other, before it goes on with new ones."""
    spark = Storage(location)
    for epoch in rewind.repeated(spark):
        logger.warning("epoch %d is repeated from the offsets that it had", epoch)
        try:
            _start_spark(rows, loop, stream, location, {"once": True}, None).awaitTermination()
        except StreamingQueryException as error:
            raise explained(loop, error) from error


def _make_ticks(query: QuerySpec, undo: contextlib.ExitStack) -> Ticks | None:
    """Makes the source of epochs without rows, if any stage has something to do in them."""
    clocks = {stage.clock for stage in query.pipeline.stateful_stages} - {StageClock.NONE}
    if query.mode == "complete":
        clocks -= {StageClock.EVENT_TIME}  # the result keeps everything
    if not clocks:
        return None
    # The source of ticks is there in either case: Spark does not let a query's sources change when it is restarted.
    spark = query.sample.sparkSession
    are_wanted = (spark.conf.get(_EPOCHS_WITHOUT_ROWS, "true") or "true").lower() == "true"
    ticks = Ticks(after_rows=are_wanted)
    undo.callback(ticks.close)
    if are_wanted and StageClock.PROCESSING_TIME in clocks and not {"once", "availableNow"} & query.trigger.keys():
        ticks.keep_wishing()
    return ticks


def _start_spark(
    rows: DataFrame,
    loop: EpochLoop,
    stream: SparkStream,
    location: str,
    trigger: Mapping[str, Any],
    name: str | None,
) -> StreamingQuery:
    writer = rows.writeStream.foreachBatch(loop).option("checkpointLocation", location)
    if trigger:
        writer = writer.trigger(**trigger)
    if name is not None:
        writer = writer.queryName(name)
    stream.detach()
    with fast_log_files(rows.sparkSession, location):
        query = writer.start()
    stream.attach(query)
    return query


def _check_one_query_per_checkpoint(spark: SparkSession, location: str) -> None:
    for query in spark.streams.active:
        used = checkpoint_of(query)
        if os.path.normpath(used.removeprefix("file:")) == os.path.normpath(location.removeprefix("file:")):
            raise EpochError(
                f"The query {query.name or query.id} is running on the checkpoint {location}. Stop it first: one "
                "checkpoint belongs to one running query."
            )
