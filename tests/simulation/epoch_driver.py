"""A simulated driver: the machine, the requests that its instructions stand for, and the checkpoint it writes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from epoch_history import STAGES
from epoch_tasks import Job
from epoch_world import Answer, Lost, Manifest

from anabranch.core.epoch_events import (
    AbortOn,
    BeginOn,
    CollectSeals,
    CommitOn,
    EpochBegun,
    Event,
    FailEpoch,
    Failure,
    FinishEpoch,
    Instruction,
    ManifestFailed,
    ManifestWritten,
    PrepareOn,
    RunMissing,
    RunTasks,
    SealsReported,
    WorkerBegan,
    WorkerCommitted,
    WorkerLost,
    WorkerPrepared,
    WorkerRefused,
    WriteManifest,
)
from anabranch.core.ids import Epoch, Generation, Partition, StageNumber, WorkerId
from anabranch.core.requests import (
    Abort,
    Begin,
    Commit,
    EpochRequest,
    Open,
    Prepare,
    Refuse,
    ReportSeals,
    RunId,
    StagePartition,
)
from anabranch.core.routes import Route, assign_partitions, initial_route, next_route, owners_of_partitions

if TYPE_CHECKING:
    from epoch_application import Application

SUSPICION_TICKS_MAX = 150


class Driver:
    """One incarnation: claims a generation, opens the job on the workers, and runs epochs until it dies."""

    def __init__(self, application: Application) -> None:
        self.application = application
        self.world = application.world
        self.checkpoint = self.world.checkpoint
        self.checkpoint.claimed += 1
        self.generation = Generation(self.checkpoint.claimed)
        self.started = False
        self.dead = False
        self.paused_until = 0
        self.attempts = 0
        self.reruns_left = self.world.rng.randint(0, 2)
        self.suspected: dict[WorkerId, int] = {}
        self.world.at(self.world.latency(), self.awake, self.start)

    def start(self) -> None:
        self.committed = self.checkpoint.newest()
        self.machine = self.application.driver_machine(self.committed[0])
        self.started = True
        self.join()

    def die(self) -> None:
        self.dead = True
        self.application.driver_died()

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

    # -- joining workers

    def members(self) -> list[WorkerId]:
        """The workers to use: those of the current route first."""
        now, known = self.world.now, set(self.checkpoint.routes[-1].workers if self.checkpoint.routes else ())
        names = [w.name for w in self.world.live_workers() if self.suspected.get(w.name, -1) < now]
        names.sort(key=lambda name: (name not in known, name))
        return sorted(names[: min(self.application.workers_wanted, self.world.history.key_groups)])

    def join(self) -> None:
        members, epoch = self.members(), Epoch(self.committed[0] + 1)
        if not members:
            self.die()
            return
        self.route = self.follow_route(members, epoch)
        open_job = Open(generation=self.generation, committed_epoch=self.committed[0], committed_by=self.committed[1])
        waiting = set(members)
        for worker in members:
            reply = partial(self.awake, self.opened, waiting, worker)
            self.world.call(worker, open_job, self.route, reply)

    def follow_route(self, members: list[WorkerId], epoch: Epoch) -> Route:
        routes = self.checkpoint.routes
        if routes and list(routes[-1].workers) == members:
            return routes[-1]
        if routes:
            loads = [float(group % 3) for group in range(self.world.history.key_groups)]
            route = next_route(routes[-1], members, epoch, load=self.world.rng.choice((None, loads)))
        else:
            route = initial_route(members, self.world.history.key_groups, epoch)
        if self.generation == self.checkpoint.claimed:
            routes.append(route)
        return route

    def opened(self, waiting: set[WorkerId], worker: WorkerId, answer: Answer) -> None:
        if worker not in waiting:
            return
        if isinstance(answer, Lost):
            waiting.clear()
            self.suspect(worker)
            self.join()
        elif isinstance(answer, Refuse):
            waiting.clear()
            self.die()
        else:
            waiting.discard(worker)
            if not waiting:
                self.begin_epoch()

    def suspect(self, worker: WorkerId) -> None:
        self.suspected[worker] = self.world.now + self.world.rng.randint(20, SUSPICION_TICKS_MAX)

    # -- running epochs

    def begin_epoch(self) -> None:
        epoch = Epoch(self.committed[0] + 1)
        if epoch == self.world.history.epochs:
            self.application.ended(self)
            return
        self.assignment = assign_partitions(self.route, self.application.next_parallelism())
        owners = owners_of_partitions(self.route, self.assignment)
        tasks = {
            StagePartition(StageNumber(stage), Partition(partition)): workers
            for stage in range(STAGES)
            for partition, workers in enumerate(owners)
        }
        self.feed(EpochBegun(epoch, frozenset(self.route.workers), tasks))

    def feed(self, event: Event) -> None:
        instructions = self.machine.handle(event)
        self.machine.check()
        for instruction in instructions:
            self.world.count(instruction)
            self.execute(instruction)

    def execute(self, do: Instruction) -> None:
        match do:
            case BeginOn():
                self.ask(do.worker, Begin, lambda _: WorkerBegan(do.run, do.worker), do)
            case RunTasks():
                self.job = Job(self, do)
                self.job.run_stage(0)
            case RunMissing():
                self.job.run_again(do.tasks)
            case CollectSeals():
                self.ask(do.worker, ReportSeals, lambda seals: SealsReported(do.run, do.worker, seals), do)
            case PrepareOn():
                prepared: Callable[[Any], Event] = lambda files: WorkerPrepared(do.run, do.worker, files)  # noqa: E731
                self.ask(do.worker, Prepare, prepared, do, chosen=do.chosen)
            case WriteManifest():
                self.later(self.check_claim, do)
            case CommitOn():
                self.ask(do.worker, Commit, lambda _: WorkerCommitted(do.run, do.worker), do)
            case AbortOn():
                request = Abort(generation=self.generation, epoch=do.epoch, run=do.run)
                self.world.call(do.worker, request, None, lambda _: None)
            case FinishEpoch():
                self.later(self.let_spark_commit, do)
            case FailEpoch():
                self.failed(do)

    def ask(
        self,
        worker: WorkerId,
        request: type[EpochRequest],
        event_of: Callable[[Any], Event],
        do: Instruction,
        **fields: Any,
    ) -> None:
        def reply(answer: Answer) -> None:
            if isinstance(answer, Lost):
                self.suspect(worker)
                self.feed(WorkerLost(worker))
            elif isinstance(answer, Refuse):
                self.feed(WorkerRefused(do.run, worker, answer.reason, answer.message))
            else:
                self.feed(event_of(answer))

        filled = request(generation=self.generation, epoch=do.epoch, run=do.run, **fields)
        self.world.call(worker, filled, None, partial(self.awake, reply))

    def check_claim(self, do: WriteManifest) -> None:
        # Looking and writing are two steps, as on any object store: an older driver may slip in between.
        if self.checkpoint.claimed > self.generation:
            self.feed(ManifestFailed(do.run, "a newer generation is claimed", fenced=True))
        else:
            self.later(self.write_manifest, do)

    def write_manifest(self, do: WriteManifest) -> None:
        self.check_choice(do)
        run = RunId(self.generation, do.run)
        failed = self.application.manifests_to_lose > 0
        self.application.manifests_to_lose -= failed
        if not failed or self.world.rng.random() < 0.5:
            self.checkpoint.manifests[do.epoch, run] = Manifest(self.committed, do.files)
        self.later(self.feed, ManifestFailed(do.run, "no answer") if failed else ManifestWritten(do.run))

    def check_choice(self, do: WriteManifest) -> None:
        """Every owner has made the same attempt durable for each task, and nothing else."""
        files = [self.checkpoint.files[name] for name in do.files]
        written = sorted((attempt.task, file.name[2]) for file in files for attempt in file.attempts)
        wanted = sorted((task, owner) for task, owners in self.machine.owners.items() for owner in owners)
        assert written == wanted, "a manifest without exactly one attempt for each task and owner"
        chosen = {attempt for file in files for attempt in file.attempts}
        assert len(chosen) == len(self.machine.owners), "a manifest with several attempts for one task"

    def let_spark_commit(self, do: FinishEpoch) -> None:
        if do.epoch in self.checkpoint.spark_commits:
            self.world.seen["concurrent Spark commit"] += 1
            self.die()
            return
        if self.application.epochs_to_repeat:
            self.application.epochs_to_repeat -= 1
            self.begin_epoch()
            return
        self.checkpoint.spark_commits.append(do.epoch)
        self.committed = (do.epoch, RunId(self.generation, do.run))
        if do.lost:
            self.world.seen["FinishEpoch with a lost worker"] += 1
        for worker in do.lost:
            self.suspect(worker)
        self.later(self.join if self.members() != list(self.route.workers) else self.begin_epoch)

    def failed(self, do: FailEpoch) -> None:
        """Run the epoch again in place, where that is possible; otherwise the query fails, and is started again."""
        if do.reason in (Failure.FENCED, Failure.REFUSED) or self.reruns_left == 0:
            self.die()
            return
        self.reruns_left -= 1
        for worker in do.workers:
            self.suspect(worker)
        self.later(self.join)
