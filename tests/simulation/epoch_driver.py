"""A simulated driver: the machine, what its instructions stand for, and the loop around it. See control and engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from epoch_change import ChangingCluster
from epoch_checkpoint import Step, spark_commit_file, stored_state
from epoch_cluster import failure_of
from epoch_history import STAGES
from epoch_rows import counts_of
from epoch_tasks import Job
from epoch_upkeep import Upkeep
from epoch_worker import Answer

from anabranch.checkpoint.generations import claim_generation
from anabranch.checkpoint.manifests import Manifest, write_manifest
from anabranch.checkpoint.sparklog import last_committed_epoch
from anabranch.checkpoint.statefiles import StateFiles, state_files
from anabranch.checkpoint.storage import Storage
from anabranch.control.claims import Committed
from anabranch.core.epoch_events import (
    AbortOn,
    BeginOn,
    CollectSeals,
    CommitOn,
    EpochBegun,
    Event,
    FailEpoch,
    FinishEpoch,
    Instruction,
    ManifestFailed,
    ManifestWritten,
    PrepareOn,
    RunMissing,
    RunTasks,
    SealsReported,
    SinkFailed,
    SinkWritten,
    TasksRan,
    WorkerBegan,
    WorkerCommitted,
    WorkerPrepared,
    WorkerRefused,
    WriteManifest,
)
from anabranch.core.epochs import Step as MachineStep
from anabranch.core.errors import CheckpointError, EpochError, FencedError, LostWorkerError
from anabranch.core.ids import Epoch, Partition, StageNumber, WorkerId
from anabranch.core.requests import Abort, Begin, Commit, Prepare, Refusal, Refuse, ReportSeals, RunId, StagePartition
from anabranch.core.routes import assign_partitions, owners_of_partitions

if TYPE_CHECKING:
    from epoch_application import Application

RUNS_MAX = 5


class Driver:
    """One incarnation: claims a generation, opens the job on the workers, and runs epochs until it dies."""

    def __init__(self, application: Application) -> None:
        self.application = application
        self.world = application.world
        self.storage = self.world.storage
        self.generation = claim_generation(self.storage, {})
        self.dead = False
        self.paused_until = 0
        self.attempts = 0
        self.runs_left = 0
        self.cluster: ChangingCluster | None = None
        self.job: Job | None = None
        #: The instructions that are being carried out, each with what came of it.
        self.under_way: dict[Instruction, Event | None] = {}
        self.upkeep = Upkeep(self)
        self.later(self.read_checkpoint)

    # -- living and dying

    def die(self) -> None:
        self.dead = True
        self.application.driver_died(self)

    def fail(self) -> None:
        """The query ends with an error; maybe it takes leave of its workers."""
        if self.world.rng.random() < 0.5 and not self.world.calm:
            self.cluster.take_leave()
        self.die()

    def awake(self, action: Callable[..., None], *arguments: Any) -> None:
        """Everything a driver does goes through here, so that it can be dead or paused."""
        if self.dead:
            return
        if self.world.now < self.paused_until:
            self.world.at(self.paused_until - self.world.now, self.awake, action, *arguments)
        else:
            action(*arguments)

    def later(self, action: Callable[..., None], *arguments: Any) -> None:
        self.world.at(self.world.latency(), self.awake, action, *arguments)

    def call(self, worker: WorkerId, request: Any, data: Any, reply: Callable[[Answer], None]) -> None:
        self.world.call(worker, request, data, partial(self.awake, reply))

    def write(self, action: Callable[[Storage], object], then: Callable[[], None], fenced: Callable[[], None]) -> None:
        """Looking at the checkpoint and writing to it are steps of their own: others may slip in between."""
        try:
            steps = self.storage.in_steps(action)
        except FencedError:
            fenced()
            return
        self.do_steps(steps, then)

    def do_steps(self, steps: Sequence[Step], then: Callable[[], None]) -> None:
        if not steps:
            then()
            return
        steps[0]()
        self.later(self.do_steps, steps[1:], then)

    # -- starting

    def read_checkpoint(self) -> None:
        epoch = last_committed_epoch(self.storage)
        try:
            files = state_files(self.storage, epoch)
        except CheckpointError as error:
            raise AssertionError(f"epoch {epoch} cannot be restored: {error}") from error
        self.machine = self.application.driver_machine(epoch)
        self.committed_by = files.committed_by

        self.later(self.resume, files)

    def resume(self, files: StateFiles) -> None:
        self.cluster = ChangingCluster(self, self.application.find_workers())
        self.cluster.resume(self.committed, files)

    @property
    def committed(self) -> Committed:
        return Committed(self.machine.committed, self.committed_by)

    def start_spark(self) -> None:
        """Spark reads its own log when the query starts."""
        self.next_epoch(Epoch(last_committed_epoch(self.storage) + 1))

    # -- the loop

    def next_epoch(self, epoch: Epoch) -> None:
        if epoch == self.world.history.epochs and epoch == self.machine.committed + 1:
            self.application.ended(self)
            return
        self.epoch, self.runs_left = epoch, RUNS_MAX
        self.run_epoch()

    def run_epoch(self) -> None:
        self.runs_left -= 1
        if self.cluster.needs_change:
            self.cluster.change(self.epoch, self.begin, self.fail)
        else:
            self.begin()

    def begin(self) -> None:
        route = self.cluster.route
        self.assignment = assign_partitions(route, self.application.next_parallelism())
        tasks = {
            StagePartition(StageNumber(stage), Partition(partition)): workers
            for stage in range(STAGES)
            for partition, workers in enumerate(owners_of_partitions(route, self.assignment))
        }
        self.cluster_workers = frozenset(self.cluster.workers)
        try:
            self.feed(EpochBegun(self.epoch, self.cluster_workers, tasks))
        except EpochError:
            self.world.seen["Spark is at another epoch"] += 1
            self.fail()

    def job_failed(self) -> None:
        self.job = None
        self.feed(SinkFailed(self.machine.run, "the job failed"))

    def run_failed(self, *, fatal: bool) -> None:
        """Run the epoch again if a worker is to blame; otherwise the query fails, and is started again."""
        self.job = None
        if fatal or not self.runs_left:
            self.fail()
            return

        def looked(blame: bool) -> None:
            if blame:
                self.world.seen["an epoch is run again in place"] += 1
                self.cluster.change(self.epoch, self.run_epoch, self.fail)
            else:
                self.fail()

        self.cluster.look_for_losses(looked)

    def on_loss(self, worker: WorkerId) -> None:
        """Nobody waits for a worker that was found lost, and Spark's job is cancelled."""
        for do in list(self.under_way):
            if getattr(do, "worker", None) == worker and self.under_way[do] is None:
                self.carried_out(do, WorkerRefused(do.run, worker, Refusal.NOT_OPEN, "it fell silent"))
        if self.job is not None and self.machine.step is MachineStep.RUNNING and not self.job.done:
            self.job_failed()

    # -- the machine

    def feed(self, *queue: Event) -> None:
        """Hand in events and carry out what the machine says: all of it, before the next event."""
        instructions = self.machine.handle(queue[0])
        self.machine.check()
        for instruction in instructions:
            self.world.count(instruction)
        failed = next((do for do in instructions if isinstance(do, FailEpoch)), None)
        if failed is not None:
            self.abort([do for do in instructions if isinstance(do, AbortOn)])
            return
        self.rest = queue[1:]
        self.under_way = {do: None for do in instructions if not isinstance(do, RunTasks | RunMissing | FinishEpoch)}
        for do in instructions:
            self.carry_out(do)
        if not self.under_way:
            self.go_on(())

    def carried_out(self, do: Instruction, event: Event) -> None:
        if self.under_way.get(do, event) is not None:
            return
        self.under_way[do] = event
        if None not in self.under_way.values():
            self.go_on(tuple(self.under_way.values()))

    def go_on(self, followed: tuple[Event, ...]) -> None:
        self.under_way = {}
        events = (*self.rest, *followed)
        if events:
            self.feed(*events)
        elif self.job is not None and self.job.done and self.machine.choice is not None:
            # The machine has chosen what to prepare: that was all that the sink's write waited for.
            self.job = None
            self.feed(SinkWritten(self.machine.run))

    def carry_out(self, do: Instruction) -> None:
        match do:
            case BeginOn():
                self.ask(do, Begin, lambda _: WorkerBegan(do.run, do.worker))
            case RunTasks():
                self.job = Job(self, do)
                self.job.run_stage(0)
            case RunMissing():
                self.job.run_again(do.tasks)
            case CollectSeals():
                self.ask(do, ReportSeals, lambda seals: SealsReported(do.run, do.worker, seals))
            case PrepareOn():
                self.ask(do, Prepare, lambda files: WorkerPrepared(do.run, do.worker, files), chosen=do.chosen)
            case WriteManifest():
                self.later(self.write_manifest, do)
            case CommitOn():
                self.ask(do, Commit, partial(self.worker_committed, do))
            case FinishEpoch():
                self.later(self.let_spark_commit, do)

    def worker_committed(self, do: CommitOn, progress: Any) -> Event:
        self.cluster.note_progress(do.worker, progress)
        return WorkerCommitted(do.run, do.worker)

    def ask(self, do: Any, request: Any, event_of: Callable[[Any], Event], **fields: Any) -> None:
        def reply(answer: Answer) -> None:
            if isinstance(answer, LostWorkerError):
                self.cluster.note_lost(do.worker)
                self.carried_out(do, WorkerRefused(do.run, do.worker, Refusal.NOT_OPEN, str(answer)))
            elif isinstance(answer, Refuse) and answer.reason is Refusal.FENCED:
                self.carried_out(do, WorkerRefused(do.run, do.worker, Refusal.FENCED, answer.message))
            elif failure_of(answer) is not None:
                self.carried_out(do, WorkerRefused(do.run, do.worker, Refusal.WRONG_STEP, str(answer)))
            else:
                self.carried_out(do, event_of(answer))

        self.call(do.worker, request(generation=self.generation, epoch=do.epoch, run=do.run, **fields), None, reply)

    def abort(self, aborts: Sequence[AbortOn]) -> None:
        self.under_way = {}
        reached = [do for do in aborts if not self.cluster.wishes.is_lost(do.worker)]
        waiting = set(reached)
        then = partial(self.run_failed, fatal=self.machine.fenced)

        def reply(do: AbortOn, _: Answer) -> None:
            waiting.discard(do)
            if not waiting:
                then()

        for do in reached:
            request = Abort(generation=self.generation, epoch=do.epoch, run=do.run)
            self.call(do.worker, request, None, partial(reply, do))
        if not reached:
            self.later(then)

    # -- the commit

    def write_manifest(self, do: WriteManifest) -> None:
        self.check_choice(do)
        route_version = self.cluster.route.version
        manifest = Manifest(do.epoch, self.generation, do.run, route_version, do.files)
        try:
            steps = self.storage.in_steps(lambda storage: write_manifest(storage, manifest))
        except FencedError as error:
            self.carried_out(do, ManifestFailed(do.run, str(error), fenced=True))
            return
        lost = self.application.take("manifests_to_lose")
        if lost and self.world.rng.random() < 0.5:
            steps = []

        def written() -> None:
            if lost:
                self.carried_out(do, ManifestFailed(do.run, "no answer"))
                return
            self.committed_by = RunId(self.generation, do.run)
            self.carried_out(do, ManifestWritten(do.run))

        self.later(self.do_steps, steps, written)

    def check_choice(self, do: WriteManifest) -> None:
        """Every owner has made the same attempt durable for each task, and nothing else."""
        run = RunId(self.generation, do.run)
        prepared = {worker: self.world.prepared[do.epoch, run, worker] for worker in self.machine.workers}
        written = sorted((attempt.task, worker) for worker, attempts in prepared.items() for attempt in attempts)
        wanted = sorted((task, owner) for task, owners in self.machine.owners.items() for owner in owners)
        assert written == wanted, "a manifest without exactly one attempt for each task and owner"
        chosen = {attempt for attempts in prepared.values() for attempt in attempts}
        assert len(chosen) == len(self.machine.owners), "a manifest with several attempts for one task"

    def let_spark_commit(self, do: FinishEpoch) -> None:
        if do.lost:
            self.world.seen["FinishEpoch with a lost worker"] += 1
        self.upkeep.after_epoch(Epoch(do.epoch - 1))
        if self.application.lose_spark_commit():
            self.fail()
        elif self.application.take("epochs_to_repeat"):
            self.run_epoch()
        elif not self.storage.create(spark_commit_file(do.epoch), b"v1"):
            self.world.seen["concurrent Spark commit"] += 1
            self.fail()
        else:
            self.check_committed(do)
            self.later(self.next_epoch, Epoch(do.epoch + 1))

    def check_committed(self, do: FinishEpoch) -> None:
        """State of checkpoint and workers, key by key, at the moment when Spark has committed the epoch."""
        expected = self.world.history.state_at(do.epoch)
        stored = counts_of(stored_state(self.storage, state_files(self.storage, do.epoch)))
        assert stored == expected, f"as of epoch {do.epoch} the checkpoint has {stored}, not {expected}"
        run = RunId(self.generation, do.run)
        for member in self.cluster.workers:
            worker = self.world.workers[member]
            if (worker.machine.committed, worker.machine.committed_by) == (do.epoch, run):
                worker.state.check(expected)

    def tasks_ran(self) -> None:
        self.feed(TasksRan(self.machine.run))
