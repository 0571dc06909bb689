"""Spark's side of a simulated epoch: the job of one run, and its tasks with their attempts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from epoch_history import STAGES, Row, State, apply_rows, first_stage_rows, second_stage_rows
from epoch_world import Answer, Lost, Stored

from anabranch.core.epoch_events import RunTasks, SinkFailed, SinkWritten, TasksRan
from anabranch.core.ids import Attempt, WorkerId
from anabranch.core.requests import EpochRequest, Read, Refusal, Refuse, Seal, Stage, StageAttempt, StagePartition

if TYPE_CHECKING:
    from epoch_driver import Driver

TASK_FAILURES_MAX = 4


class Job:
    """Spark's job of one run: stage after stage, a task for each partition, and the sink."""

    def __init__(self, driver: Driver, do: RunTasks) -> None:
        self.driver = driver
        self.epoch, self.run = do.epoch, do.run
        self.assignment, self.owner_of_group = driver.assignment, driver.route.owners
        self.owners = driver.machine.owners
        self.output: dict[StagePartition, State] = {}
        self.failures: dict[StagePartition, int] = {}
        self.left: set[StagePartition] = set()
        self.next_step: Callable[[], None] = lambda: None

    def run_stage(self, stage: int) -> None:
        last = stage == STAGES - 1
        self.next_step = self.write_sink if last else partial(self.run_stage, stage + 1)
        self.left = {task for task in self.owners if task.stage == stage}
        for task in sorted(self.left):
            self.run_task(task)

    def run_again(self, tasks: frozenset[StagePartition]) -> None:
        self.next_step = lambda: self.driver.feed(TasksRan(self.run))
        self.left = set(tasks)
        for task in sorted(tasks):
            self.run_task(task)

    def run_task(self, task: StagePartition) -> None:
        application = self.driver.application
        slow = application.slow_tasks > 0
        broken = not slow and application.broken_tasks > 0
        application.slow_tasks -= slow
        application.broken_tasks -= broken
        Task(self, task, slow=slow, broken=broken)
        if slow:
            Task(self, task)

    def write_sink(self) -> None:
        rows: State = {}
        for task in sorted(self.output):
            if task.stage == STAGES - 1:
                rows |= self.output[task]
        self.driver.checkpoint.sink[self.epoch] = rows
        self.driver.later(self.driver.feed, SinkWritten(self.run))

    def input_of(self, task: StagePartition) -> list[tuple[Row, int]]:
        history = self.driver.world.history
        if task.stage == 0:
            rows = first_stage_rows(history.input[self.epoch])
        else:
            counts = [output for done, output in self.output.items() if done.stage == 0]
            rows = second_stage_rows({row: count for output in counts for row, count in output.items()})
        return [row for row in rows if self.assignment[history.group_of(row[0])] == task.partition]

    def succeeded(self, task: StagePartition, output: State) -> None:
        if task in self.left:
            self.left.discard(task)
            self.output[task] = output
            if not self.left:
                self.driver.later(self.next_step)

    def failed(self, task: StagePartition) -> None:
        if task not in self.left:
            return
        self.failures[task] = self.failures.get(task, 0) + 1
        if self.failures[task] == TASK_FAILURES_MAX:
            self.left.clear()
            self.driver.feed(SinkFailed(self.run, "a task failed too often"))
        else:
            self.run_task(task)


class Task:
    """One attempt: read from all owners, compute, stage on all owners, seal on all owners.

    It talks to workers even if its driver is dead or paused; only its result goes through the driver.
    """

    def __init__(self, job: Job, task: StagePartition, *, slow: bool = False, broken: bool = False) -> None:
        self.job, self.task = job, task
        self.slow, self.broken = slow, broken
        self.idles_after = job.driver.world.rng.choice((Read, Read, Stage))
        self.attempt = StageAttempt(*task, Attempt(job.driver.attempts))
        job.driver.attempts += 1
        self.owners = sorted(job.owners[task])
        self.rows = job.input_of(task)
        self.state: State = {}
        self.ask_all(Read, lambda _: {row for row, _ in self.rows}, self.compute)

    def ask_all(
        self, request: type[EpochRequest], data_for: Callable[[WorkerId], Any], then: Callable[[], None], **fields: Any
    ) -> None:
        """Ask every owner, then go on; fail as soon as one of them does not answer, or refuses."""
        job, world = self.job, self.job.driver.world
        filled = request(generation=job.driver.generation, epoch=job.epoch, run=job.run, **fields)
        waiting = set(self.owners)

        def reply(worker: WorkerId, answer: Answer) -> None:
            if worker not in waiting:
                return
            if isinstance(answer, Lost | Refuse):
                waiting.clear()
                if isinstance(answer, Refuse) and answer.reason is Refusal.FENCED:
                    world.seen["fenced task"] += 1
                job.driver.awake(job.failed, self.task)
                return
            if request is Read:
                self.state |= {row: count for row, (count, _) in answer.items()}
            waiting.discard(worker)
            if not waiting:
                world.at(self.pause_ticks(request), then)

        for worker in self.owners:
            world.call(worker, filled, data_for(worker), partial(reply, worker))

    def pause_ticks(self, answered: type[EpochRequest]) -> int:
        """How long the task idles once. One that nobody waits for any more may still be there when others run."""
        driver = self.job.driver
        orphaned = driver.dead or driver.machine.run != self.job.run
        if answered is not self.idles_after or not (self.slow or orphaned):
            return 0
        return driver.world.rng.randint(20, 200)

    def compute(self) -> None:
        self.output = apply_rows(self.state, self.rows)
        first_half = dict(sorted(self.output.items())[::2])
        self.ask_all(Stage, lambda worker: self.part(first_half, worker), self.seal, attempt=self.attempt)

    def seal(self) -> None:
        # Sealing brings the rest of the changes, so that an attempt that is not sealed is really not complete.
        rest = dict(sorted(self.output.items())[1::2])
        if self.broken:
            self.owners = self.owners[:-1]
        done = self.fail if self.broken else self.succeed
        if self.owners:
            self.ask_all(Seal, lambda worker: self.part(rest, worker), done, attempt=self.attempt)
        else:
            done()

    def part(self, rows: State, worker: WorkerId) -> Stored:
        """The worker's part of the changes, each marked with the attempt that it comes from."""
        driver, owners = self.job.driver, self.job.owner_of_group
        mark = (driver.generation, self.job.run, self.attempt.attempt)
        group_of = driver.world.history.group_of
        return {row: (count, mark) for row, count in rows.items() if owners[group_of(row)] == worker}

    def succeed(self) -> None:
        self.job.driver.later(self.job.succeeded, self.task, self.output)

    def fail(self) -> None:
        self.job.driver.later(self.job.failed, self.task)
