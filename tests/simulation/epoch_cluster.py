"""The workers of a simulated driver: opening the job on them, noticing losses, and repairs. See control's cluster."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from epoch_worker import Answer, Assign, Describe, Health

from anabranch.checkpoint.routes import newest_route, save_route
from anabranch.checkpoint.statefiles import StateFiles, state_files
from anabranch.core.errors import AnabranchError, LostWorkerError
from anabranch.core.ids import Epoch, WorkerId
from anabranch.core.requests import Open, Refuse, RunId
from anabranch.core.routes import Route, initial_route, next_route

if TYPE_CHECKING:
    from epoch_driver import Driver

REPAIRS_MAX = 5
Committed = tuple[Epoch, RunId | None]


class Cluster:
    """Changes between epochs only; the watch and newcomers only leave notes."""

    def __init__(self, driver: Driver, members: list[WorkerId]) -> None:
        self.driver = driver
        self.world = driver.world
        self.members = members
        self.wanted = len(members)
        self.lost: set[WorkerId] = set()
        self.newcomers: list[WorkerId] = []
        self.starting = 0
        #: What wants to assign key groups, or to know what workers read: one at a time, the first one is under way.
        self.assigning: deque[Callable[[], None]] = deque()
        self.adopted_from: list[StateFiles] = []
        self.route: Route

    @property
    def needs_change(self) -> bool:
        return bool(self.lost or self.newcomers)

    def note_lost(self, worker: WorkerId) -> None:
        if worker in self.members:
            self.lost.add(worker)

    # -- opening the job

    def resume(self, committed: Committed, files: StateFiles) -> None:
        self.adopted_from = [files]
        current, first_epoch = newest_route(self.world.storage), Epoch(committed[0] + 1)
        if current is not None and set(current.workers) == set(self.members):
            self.route = current
            self.open_on_all(committed, files, self.resumed)
            return
        if current is None:
            self.route = initial_route(self.members, self.world.history.key_groups, first_epoch)
        else:
            self.route = next_route(current, self.members, first_epoch)
        self.save_route(partial(self.open_on_all, committed, files, self.resumed))

    def resumed(self, error: Exception | None) -> None:
        if error is None:
            self.driver.start_spark()
        else:
            self.driver.die()

    def save_route(self, then: Callable[[], None]) -> None:
        driver = self.driver
        driver.write(lambda storage: save_route(storage, self.route, generation=driver.generation), then, driver.die)

    def open_on_all(self, committed: Committed, files: StateFiles, then: Callable[[Exception | None], None]) -> None:
        """Open, then assign, on each worker; the first error in the order of the members counts."""
        epoch, by = committed
        answers: dict[WorkerId, Answer] = {}
        members = list(self.members)

        def ended(worker: WorkerId, answer: Answer) -> None:
            answers[worker] = answer
            if len(answers) == len(members):
                errors = [failure_of(answers[member]) for member in members]
                then(next((error for error in errors if error is not None), None))

        def opened(worker: WorkerId, answer: Answer) -> None:
            if failure_of(answer) is not None:
                ended(worker, answer)
                return
            groups = tuple(int(group) for group in self.route.groups_of(worker))
            assign = Assign(self.driver.generation, epoch, self.route.version, groups, files)
            self.driver.call(worker, assign, None, partial(ended, worker))

        request = Open(generation=self.driver.generation, committed_epoch=epoch, committed_by=by)
        for member in members:
            self.driver.call(member, request, None, partial(opened, member))

    # -- losses

    def watch(self, worker: WorkerId) -> None:
        """The heartbeat: notices a worker that cannot be reached, also while nobody else talks to it."""
        if self.world.workers[worker].reachable or worker in self.lost or worker not in self.members:
            return
        self.lost.add(worker)
        self.world.seen["loss noticed by the watch"] += 1
        self.driver.on_loss(worker)

    def look_for_losses(self, then: Callable[[bool], None]) -> None:
        """Ask every worker whether it is alive and knows the job; True if one is not or does not."""
        well: dict[WorkerId, bool] = {}
        members = list(self.members)

        def reply(worker: WorkerId, answer: Answer) -> None:
            if isinstance(answer, LostWorkerError):
                self.note_lost(worker)
            well[worker] = answer is True
            if len(well) == len(members):
                then(not all(well.values()) or self.needs_change)

        for member in members:
            if member in self.lost:
                self.driver.later(reply, member, False)
            else:
                self.driver.call(member, Health(), None, partial(reply, member))

    # -- repairs

    def repair(self, next_epoch: Epoch, then: Callable[[], None], give_up: Callable[[], None]) -> None:
        self.world.seen["repair"] += 1
        self.try_repair(next_epoch, then, give_up, REPAIRS_MAX)

    def try_repair(self, next_epoch: Epoch, then: Callable[[], None], give_up: Callable[[], None], tries: int) -> None:
        if tries == 0:
            give_up()
            return
        self.members = [member for member in self.members if member not in self.lost]
        self.lost.clear()
        self.members += [worker for worker in self.newcomers if worker not in self.members]
        self.newcomers = []
        if not self.members:
            self.members = [self.world.start_worker()]

        def opened(error: Exception | None) -> None:
            if error is None:
                self.start_missing()
                then()
            elif isinstance(error, LostWorkerError):
                self.world.seen["a repair starts over"] += 1
                self.look_for_losses(lambda _: self.try_repair(next_epoch, then, give_up, tries - 1))
            else:
                give_up()

        def open_them() -> None:
            committed = self.driver.committed
            files = state_files(self.world.storage, committed[0])
            self.adopted_from = [files]
            self.open_on_all(committed, files, partial(self.over, opened))

        if set(self.members) == set(self.route.workers):
            self.alone(open_them)
            return
        self.route = next_route(self.route, self.members, next_epoch)
        self.save_route(partial(self.alone, open_them))

    def start_missing(self) -> None:
        count = self.wanted - len(self.members) - self.starting - len(self.newcomers)
        for _ in range(max(0, count)):
            self.starting += 1
            self.world.at(self.world.rng.randint(10, 80), self.driver.awake, self.started)

    def started(self) -> None:
        self.starting -= 1
        self.newcomers.append(self.world.start_worker())

    def rescale(self, workers: int, idle: list[WorkerId]) -> None:
        """Use more or fewer workers from the next epoch on; those that come may have been here before."""
        self.wanted = workers
        for worker in self.members[workers:]:
            self.note_lost(worker)
        newcomers = idle[: max(0, workers - len(self.members) - len(self.newcomers) - self.starting)]
        if newcomers:
            self.world.seen["workers come back"] += 1
        self.newcomers += newcomers
        self.start_missing()

    # -- what must stay

    def alone(self, action: Callable[..., None], *arguments: Any) -> None:
        """Do this when nothing else that goes through here is under way; it has to call ``over`` at its end."""
        self.assigning.append(partial(action, *arguments))
        if len(self.assigning) == 1:
            self.assigning[0]()
        else:
            self.world.seen["assignment and clean-up wait for each other"] += 1

    def over(self, then: Callable[..., None], *arguments: Any) -> None:
        self.assigning.popleft()
        if self.assigning:
            self.driver.later(self.assigning[0])
        then(*arguments)

    def files_in_use(self, then: Callable[[list[StateFiles]], None]) -> None:
        self.alone(self.ask_for_pending, partial(self.over, then))

    def ask_for_pending(self, then: Callable[[list[StateFiles]], None]) -> None:
        answers: list[Answer] = []
        members = list(self.members)

        def reply(answer: Answer) -> None:
            answers.append(answer)
            if len(answers) == len(members):
                if all(answer == 0 for answer in answers):
                    self.adopted_from = []
                then(self.adopted_from)

        for member in members:
            self.driver.call(member, Describe(self.driver.generation), None, reply)


def failure_of(answer: Answer) -> Exception | None:
    if isinstance(answer, AnabranchError):
        return answer
    return AnabranchError(answer.message) if isinstance(answer, Refuse) else None
