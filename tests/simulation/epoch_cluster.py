"""The workers of a simulated driver: opening the job on them, who comes and goes, losses. See control's cluster."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from epoch_requests import Assign, CloseJob, Health, Progress
from epoch_worker import Answer

from anabranch.checkpoint.routes import newest_route, save_route
from anabranch.checkpoint.statefiles import StateFiles, state_files
from anabranch.control import assigning
from anabranch.control.assigning import Assignment
from anabranch.control.claims import Committed
from anabranch.control.members import Member, Membership
from anabranch.control.migrations import Migrations
from anabranch.control.rescale import Rescale
from anabranch.control.supply import Recruits
from anabranch.control.wishes import Wishes
from anabranch.core.errors import AnabranchError, LostWorkerError, SettingsError
from anabranch.core.ids import Epoch, WorkerId
from anabranch.core.requests import Open, Refuse
from anabranch.core.routes import Route, initial_route, next_route

if TYPE_CHECKING:
    from epoch_driver import Driver
    from epoch_world import World


class Cluster:
    """Changes between epochs only; everybody else only leaves notes."""

    def __init__(self, driver: Driver, workers: Sequence[WorkerId]) -> None:
        self.driver = driver
        self.world = driver.world
        self.members = Membership([member_of(worker) for worker in workers])
        #: Workers that own no key groups any more, and keep some for their new owners.
        self.departing: dict[WorkerId, Member] = {}
        supply = Supply(self.world)
        self.wishes = Wishes(self.members, supply, self.world.history.key_groups)
        self.wishes.recruits = StepwiseRecruits(driver, supply, len(workers))
        self.migrations = Migrations()
        self.assignments = 0
        #: What wants to assign key groups, or to know what workers read: one at a time, the first one is under way.
        self.assigning: deque[Callable[[], None]] = deque()
        self.adopted_from: list[StateFiles] = []
        self.route: Route
        #: The newest route that all workers have been told, and the one before it.
        self.applied: Route
        self.before: Route

    @property
    def workers(self) -> tuple[WorkerId, ...]:
        return self.members.workers

    @property
    def all_workers(self) -> tuple[WorkerId, ...]:
        """Those that own key groups, those that keep some, and those that wait to be let in."""
        ready = tuple(member.worker for member in self.wishes.recruits.ready)
        return (*self.workers, *self.departing, *ready)

    @property
    def needs_change(self) -> bool:
        return self.wishes.are_ready

    def note_lost(self, worker: WorkerId) -> None:
        self.wishes.note_lost(worker)

    # -- opening the job

    def resume(self, committed: Committed, files: StateFiles) -> None:
        self.adopted_from = [files]
        current, first_epoch = newest_route(self.world.storage), Epoch(committed.epoch + 1)
        open_them = partial(self.open_on_all, committed, files, False, self.resumed)
        if current is not None and set(current.workers) == set(self.workers):
            self.route = self.applied = self.before = current
            open_them()
            return
        if current is None:
            self.route = initial_route(self.workers, self.world.history.key_groups, first_epoch)
        else:
            self.route = next_route(current, self.workers, first_epoch)
        self.applied = self.before = self.route
        self.save_route(open_them)

    def resumed(self, answers: Mapping[WorkerId, Answer], error: Exception | None) -> None:
        del answers
        if error is None:
            self.driver.start_spark()
        else:
            self.driver.die()

    def save_route(self, then: Callable[[], None]) -> None:
        driver = self.driver
        driver.write(lambda storage: save_route(storage, self.route, generation=driver.generation), then, driver.die)

    def open_on_all(
        self,
        committed: Committed,
        files: StateFiles,
        freeze: bool,
        then: Callable[[Mapping[WorkerId, Answer], Exception | None], None],
    ) -> None:
        """Open, then assign, on each worker; the first error in the order of the members counts."""
        answers: dict[WorkerId, Answer] = {}
        members, generation = self.members.all, self.driver.generation
        assignment = Assignment(
            self.route, committed, files, number=self.assignments, before=self.applied if freeze else None
        )

        def ended(worker: WorkerId, answer: Answer) -> None:
            answers[worker] = answer
            if len(answers) == len(members):
                errors = [failure_of(answers[member.worker]) for member in members]
                then(answers, next((error for error in errors if error is not None), None))

        def opened(member: Member, answer: Answer) -> None:
            if failure_of(answer) is not None:
                ended(member.worker, answer)
                return
            groups = tuple(int(group) for group in assignment.route.groups_of(member.worker))
            offers = assigning._peers_of(member, members, assignment)
            peers = {WorkerId(offer["address"]): frozenset(offer["groups"]) for offer in offers}
            request = Assign(generation, committed.epoch, assignment.number, groups, files, freeze, peers)
            self.driver.call(member.worker, request, None, partial(ended, member.worker))

        request = Open(generation=generation, committed_epoch=committed.epoch, committed_by=committed.by)
        for member in members:
            self.driver.call(member.worker, request, None, partial(opened, member))

    def assign(self, then: Callable[[Mapping[WorkerId, Answer], Exception | None], None]) -> None:
        """Tell all workers what they hold from now on. What they give away they keep for the new owners."""

        def open_them() -> None:
            committed = self.driver.committed
            files = state_files(self.world.storage, committed.epoch)
            self.adopted_from = [files]
            self.assignments += 1
            self.open_on_all(committed, files, True, partial(self.over, then))

        self.alone(open_them)

    # -- losses

    def watch(self, worker: WorkerId) -> None:
        """The heartbeat: notices a worker that cannot be reached, also while nobody else talks to it."""
        if self.world.workers[worker].reachable:
            return
        if self.departing.pop(worker, None) is not None:
            self.world.seen["a departing worker is lost"] += 1
        elif self.wishes.note_lost(worker):
            self.world.seen["loss noticed by the watch"] += 1
            self.driver.on_loss(worker)

    def look_for_losses(self, then: Callable[[bool], None]) -> None:
        """Ask every worker whether it is alive and knows the job; True if one is not or does not."""
        well: dict[WorkerId, bool] = {}
        workers = self.workers

        def reply(worker: WorkerId, answer: Answer) -> None:
            if isinstance(answer, LostWorkerError):
                self.note_lost(worker)
            well[worker] = answer is True
            if len(well) == len(workers):
                then(not all(well.values()) or self.wishes.any_lost)

        for worker in workers:
            if self.wishes.is_lost(worker):
                self.driver.later(reply, worker, False)
            else:
                self.driver.call(worker, Health(), None, partial(reply, worker))
        if not workers:
            self.driver.later(then, True)

    # -- wishes

    def rescale(self, workers: int | None, idle: Sequence[WorkerId]) -> None:
        """Use more or fewer workers from the next epoch on; those that come may have been here before."""
        ready = len(self.wishes.recruits.ready) + self.wishes.recruits.starting
        missing = 0 if workers is None else workers - len(self.members) - ready
        for worker in idle[: max(0, missing)]:
            with suppress(SettingsError):  # more than there are key groups
                self.wishes.join(member_of(worker))
                self.world.seen["workers come back"] += 1
        self.wishes.rescale(Rescale("a wish", workers=workers))

    def leave(self, worker: WorkerId) -> None:
        try:
            self.wishes.drain(worker)
        except SettingsError:
            self.world.seen["a worker may not leave"] += 1

    def take_leave(self) -> None:
        """The query ends, and says so to its workers."""
        for worker in [*self.workers, *self.departing]:
            self.world.call(worker, CloseJob(self.driver.generation), None, lambda _: None)

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
        workers = self.workers

        def reply(answer: Answer) -> None:
            answers.append(answer)
            if len(answers) == len(workers):
                if all(isinstance(answer, dict) and not answer["pendingGroups"] for answer in answers):
                    self.adopted_from = []
                then(self.adopted_from)

        for worker in workers:
            self.driver.call(worker, Progress(self.driver.generation), None, reply)


class Supply:
    """New workers, at once. Those that are not needed any more stay, and may come back."""

    can_start = True

    def __init__(self, world: World) -> None:
        self._world = world

    def start(self) -> Member:
        return member_of(self._world.start_worker())

    def kill(self, worker: WorkerId) -> None: ...

    def retire(self, worker: WorkerId) -> None: ...

    def exited(self) -> frozenset[WorkerId]:
        return frozenset()


class StepwiseRecruits(Recruits):
    """Workers are started in the time of the simulation, not by threads."""

    def __init__(self, driver: Driver, supply: Supply, wanted: int) -> None:
        super().__init__(supply, wanted, on_failure=lambda _: None)
        self._driver = driver

    def want(self, wanted: int, present: int) -> None:
        self.wanted = wanted
        for _ in range(wanted - present - self._starting - len(self._ready)):
            self._starting += 1
            self._driver.world.at(self._driver.world.rng.randint(10, 80), self._driver.awake, self._start_one)


class NoClient:
    """The world delivers what is sent."""

    def close(self) -> None: ...


def member_of(worker: WorkerId) -> Member:
    client: Any = NoClient()
    return Member(worker, worker, 0, client)


def failure_of(answer: Answer) -> Exception | None:
    if isinstance(answer, AnabranchError):
        return answer
    return AnabranchError(answer.message) if isinstance(answer, Refuse) else None
