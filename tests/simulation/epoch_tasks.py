"""Spark's side of a simulated epoch: the job of one run, and its tasks with their attempts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from epoch_history import DELETED_AT, STAGES, Row, State, apply_rows, first_stage_rows, second_stage_rows, sink_rows
from epoch_rows import Changes, counts_of
from epoch_worker import Answer

from anabranch.core.epoch_events import RunTasks
from anabranch.core.errors import AnabranchError
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
        self.assignment, self.owner_of_group = driver.assignment, driver.cluster.route.owners
        self.owner_before = driver.cluster.before.owners
        self.owners = driver.machine.owners
        self.output: dict[StagePartition, State] = {}
        self.failures: dict[StagePartition, int] = {}
        self.left: set[StagePartition] = set()
        self.next_step: Callable[[], None] = lambda: None
        #: Whether nothing of it runs any more.
        self.done = False

    @property
    def current(self) -> bool:
        return self.driver.job is self

    def run_stage(self, stage: int) -> None:
        last = stage == STAGES - 1
        self.next_step = self.write_sink if last else partial(self.run_stage, stage + 1)
        self.run_tasks({task for task in self.owners if task.stage == stage})

    def run_again(self, tasks: Collection[StagePartition]) -> None:
        """Tasks whose changes are missing, apart from the sink."""
        self.next_step = self.finish
        self.run_tasks(tasks)

    def run_tasks(self, tasks: Collection[StagePartition]) -> None:
        self.done, self.left = False, set(tasks)
        for task in sorted(tasks):
            self.run_task(task)

    def run_task(self, task: StagePartition) -> None:
        application = self.driver.application
        slow = application.take("slow_tasks")
        broken = not slow and application.take("broken_tasks")
        Task(self, task, slow=slow, broken=broken, stray=application.take("stray_tasks"))
        if slow:
            Task(self, task)

    def write_sink(self) -> None:
        rows: State = {}
        for task in sorted(self.output):
            if task.stage == STAGES - 1:
                rows |= self.output[task]
        self.driver.world.sink[self.epoch] = sink_rows(rows)
        self.driver.later(self.finish)

    def finish(self) -> None:
        if self.current:
            self.done = True
            self.driver.tasks_ran()

    def input_of(self, task: StagePartition) -> list[tuple[Row, int]]:
        history = self.driver.world.history
        if task.stage == 0:
            rows = first_stage_rows(history.input[self.epoch])
        else:
            counts = [output for done, output in self.output.items() if done.stage == 0]
            rows = second_stage_rows({row: count for output in counts for row, count in output.items()})
        return [row for row in rows if self.assignment[history.group_of[row[0]]] == task.partition]

    def succeeded(self, task: StagePartition, output: State) -> None:
        if task in self.left and self.current:
            self.left.discard(task)
            self.output[task] = output
            if not self.left:
                self.driver.later(self.next_step_of, self.next_step)

    def next_step_of(self, step: Callable[[], None]) -> None:
        if self.current:
            step()

    def failed(self, task: StagePartition) -> None:
        if task not in self.left or not self.current:
            return
        self.failures[task] = self.failures.get(task, 0) + 1
        if self.failures[task] == TASK_FAILURES_MAX:
            self.left.clear()
            self.driver.job_failed()
        else:
            self.run_task(task)


class Task:
    """One attempt: read from all owners, compute, stage on all owners, and seal, at once or with a second piece.

    It talks to workers even if its driver is dead or paused; only its result goes through the driver.
    """

    def __init__(
        self, job: Job, task: StagePartition, *, slow: bool = False, broken: bool = False, stray: bool = False
    ) -> None:
        self.job, self.task = job, task
        self.slow, self.broken = slow, broken
        driver = job.driver
        rng = driver.world.rng
        self.idles_after = rng.choice((Read, Read, Stage))
        self.in_pieces = broken or rng.random() < 0.25
        self.attempt = StageAttempt(*task, Attempt(driver.attempts))
        driver.attempts += 1
        self.owners = sorted(job.owners[task])
        self.rows = job.input_of(task)
        self.state: State = {}
        self.complete = driver.world.history.complete and task.stage == STAGES - 1
        self.reads_from = job.owner_before if stray else job.owner_of_group
        asked = self.owners
        if stray:
            places = zip(self.reads_from, job.assignment, strict=True)
            asked = sorted({owner for owner, partition in places if partition == task.partition})
            driver.world.seen["a task reads by an old route"] += asked != self.owners
        self.ask_all(Read, self.wanted_of, self.compute, asked)

    def wanted_of(self, worker: WorkerId) -> tuple[int, Collection[Row], Collection[int] | None]:
        history, owners = self.job.driver.world.history, self.reads_from
        group_of, blind = history.group_of, history.blind[self.job.epoch]
        keys = {row for row, _ in self.rows if owners[group_of[row]] == worker and row not in blind}
        if not self.complete:
            return self.task.stage, keys, None
        groups = enumerate(zip(owners, self.job.assignment, strict=True))
        return self.task.stage, keys, [group for group, at in groups if at == (worker, self.task.partition)]

    def ask_all(
        self,
        request: type[EpochRequest],
        data_for: Callable[[WorkerId], Any],
        then: Callable[[], None],
        workers: Sequence[WorkerId] | None = None,
        **fields: Any,
    ) -> None:
        """Ask every owner, then go on; fail as soon as one of them does not answer, or refuses."""
        job, world = self.job, self.job.driver.world
        filled = request(generation=job.driver.generation, epoch=job.epoch, run=job.run, **fields)
        asked = self.owners if workers is None else workers
        waiting = set(asked)

        def reply(worker: WorkerId, answer: Answer) -> None:
            if worker not in waiting:
                return
            if isinstance(answer, AnabranchError | Refuse):
                waiting.clear()
                if isinstance(answer, Refuse) and answer.reason is Refusal.FENCED:
                    world.seen["fenced task"] += 1
                job.driver.later(job.failed, self.task)
                return
            if request is Read:
                self.state |= counts_of(answer)
            waiting.discard(worker)
            if not waiting:
                pause = self.pause_ticks(request)
                if pause:
                    world.at(pause, then)
                else:
                    then()

        for worker in asked:
            world.call(worker, filled, data_for(worker), partial(reply, worker))

    def pause_ticks(self, answered: type[EpochRequest]) -> int:
        """How long the task idles once. One that nobody waits for any more may still be there when others run."""
        driver = self.job.driver
        orphaned = driver.dead or not self.job.current
        if answered is not self.idles_after or not (self.slow or orphaned):
            return 0
        return driver.world.rng.randint(20, 200)

    def compute(self) -> None:
        counts = apply_rows(self.state, self.rows)
        self.output = self.state | counts if self.complete else counts
        self.changes = sorted(counts.items())
        if not self.in_pieces:
            data_for = lambda worker: (0, self.part(self.changes, worker))  # noqa: E731
            self.ask_all(Stage, data_for, self.succeed, attempt=self.attempt, sealed=True)
            return
        self.ask_all(Stage, lambda worker: (0, self.part(self.changes[::2], worker)), self.seal, attempt=self.attempt)

    def seal(self) -> None:
        # Sealing brings the rest of the changes, so that an attempt that is not sealed is really not complete.
        if self.broken:
            self.owners = self.owners[:-1]
        done = self.fail if self.broken else self.succeed
        if self.owners:
            data_for = lambda worker: (1, self.part(self.changes[1::2], worker))  # noqa: E731
            self.ask_all(Seal, data_for, done, attempt=self.attempt)
        else:
            done()

    def part(self, counts: list[tuple[Row, int]], worker: WorkerId) -> Changes:
        """The worker's part of the changes, each marked with the attempt that it comes from."""
        driver, owners = self.job.driver, self.job.owner_of_group
        mark = (driver.generation, self.job.run, self.attempt.attempt)
        group_of = driver.world.history.group_of
        mine = [(row, count) for row, count in counts if owners[group_of[row]] == worker]
        return {row: (count, mark) if count % DELETED_AT else None for row, count in mine}

    def succeed(self) -> None:
        self.job.driver.later(self.job.succeeded, self.task, self.output)

    def fail(self) -> None:
        self.job.driver.later(self.job.failed, self.task)
