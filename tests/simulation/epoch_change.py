"""Changes among the workers of a simulated driver, and the migrations that follow. See control's cluster."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from epoch_cluster import Cluster
from epoch_requests import CloseJob, Complete, Progress, Release
from epoch_worker import Answer

from anabranch.control.members import Member
from anabranch.control.rescale import Migration
from anabranch.control.wishes import Taken
from anabranch.core.errors import LostWorkerError
from anabranch.core.ids import Epoch, WorkerId
from anabranch.core.routes import moves, next_route

TRIES_MAX = 5


@dataclass
class Change:
    """A change that is under way."""

    next_epoch: Epoch
    then: Callable[[], None]
    #: The query fails.
    give_up: Callable[[], None]
    tries_left: int = TRIES_MAX
    taken: Taken = field(default_factory=Taken)
    lost: list[WorkerId] = field(default_factory=list)
    leaving: set[WorkerId] = field(default_factory=set)


class ChangingCluster(Cluster):
    """What happens between two epochs."""

    def change(self, next_epoch: Epoch, then: Callable[[], None], give_up: Callable[[], None]) -> None:
        """Let go of lost and leaving workers, let in new ones, and share the key groups out among those that stay."""
        self.world.seen["change"] += 1
        self.world.seen["a change during a migration"] += self.migrations.is_under_way
        self.try_change(Change(next_epoch, then, give_up))

    def try_change(self, change: Change) -> None:
        if change.tries_left == 0:
            change.give_up()
            return
        change.tries_left -= 1
        change.taken = self.wishes.take()
        for worker in change.taken.lost:
            self.members.remove(worker)
        change.lost += change.taken.lost
        newcomers = change.taken.newcomers
        if not self.members.all and not newcomers:
            newcomers = [self.wishes.recruits.start_now()]
        for member in newcomers:
            self.members.add(member)
        change.leaving = self.choose_leaving(change.taken.leaving)
        assign = partial(self.assign, partial(self.assigned, change))
        if self.set_route(change):
            self.save_route(assign)
        else:
            assign()

    def choose_leaving(self, named: Collection[WorkerId]) -> set[WorkerId]:
        """Those that were named, and as many more as there are too many: the newest first."""
        leaving = set(named) & set(self.workers)
        if len(leaving) == len(self.members):
            leaving = set()
        for worker in reversed(self.workers):
            if len(self.members) - len(leaving) <= self.wishes.recruits.wanted:
                break
            leaving.add(worker)
        return leaving

    def set_route(self, change: Change) -> bool:
        """Whether there is a new one. The load, which decides about who gets what, is anything here."""
        staying = [worker for worker in self.workers if worker not in change.leaving]
        is_balancing = bool(change.taken.rescales) and not change.lost
        if set(staying) == set(self.route.workers) and not is_balancing:
            return False
        load = [self.world.rng.random() for _ in self.route.owners] if is_balancing else None
        route = next_route(self.route, staying, change.next_epoch, load)
        if route.owners == self.route.owners:
            return False
        self.route = route
        return True

    def assigned(self, change: Change, answers: Mapping[WorkerId, Answer], error: Exception | None) -> None:
        if isinstance(error, LostWorkerError):
            self.world.seen["a change starts over"] += 1
            self.wishes.give_back(change.taken)
            self.look_for_losses(lambda _: self.try_change(change))
            return
        if error is not None:
            change.give_up()
            return
        groups_moving = len(moves(self.applied, self.route))
        self.before, self.applied = self.applied, self.route
        for worker in sorted(change.leaving):
            self.departing[worker] = self.members.get(worker)
            self.members.all = tuple(each for each in self.members.all if each.worker != worker)
        self.begin_migration(change, dict(answers), groups_moving)

    # -- migrations

    def begin_migration(self, change: Change, answers: dict[WorkerId, Any], groups_moving: int) -> None:
        strategy = "eager" if self.world.history.eager else "lazy"
        left = tuple(sorted(change.leaving))
        migration = Migration(
            self.assignments, strategy, self.route.version, change.next_epoch, groups_moving, (), left, answers
        )
        self.migrations.begin(migration, change.taken.rescales, self.workers)
        self.beat(self.assignments)
        if strategy == "lazy" or not groups_moving:
            self.migration_begun(change, answers)
            return
        workers = self.workers

        def completed(worker: WorkerId, answer: Answer) -> None:
            # If it failed, the rest follows as it would have anyway.
            if isinstance(answer, dict):
                answers[worker] = answer
                self.world.seen["complete before the next epoch"] += 1
            else:
                self.world.seen["not complete before the next epoch"] += 1
            waiting.discard(worker)
            if not waiting:
                self.migration_begun(change, answers)

        waiting = set(workers)
        for worker in workers:
            self.driver.call(worker, Complete(self.driver.generation), None, partial(completed, worker))

    def migration_begun(self, change: Change, answers: Mapping[WorkerId, Any]) -> None:
        for worker in self.workers:
            self.note_progress(worker, answers[worker])
        recruits = self.wishes.recruits
        recruits.want(recruits.wanted, len(self.members))
        change.then()

    def note_progress(self, worker: WorkerId, progress: Mapping[str, Any]) -> None:
        """What a worker says about the key groups that are on their way to it."""
        if self.migrations.note(worker, progress):
            self.driver.later(self.finish_migration, progress["assignment"])

    def finish_migration(self, number: int) -> None:
        """All state has arrived: those that kept it may let go of it, and leave if they are to."""
        if number != self.assignments:
            return
        departing, self.departing = list(self.departing.values()), {}
        generation = self.driver.generation
        requests = [(member, Release(generation, number)) for member in self.members.all]
        self.send_in_turn(number, [*requests, *((member, CloseJob(generation)) for member in departing)])

    def send_in_turn(self, number: int, requests: Sequence[tuple[Member, Release | CloseJob]]) -> None:
        if not requests:
            self.migrations.finish(number)
            return
        member, request = requests[0]
        self.driver.call(member.worker, request, None, lambda _: self.send_in_turn(number, requests[1:]))

    def beat(self, number: int) -> None:
        """While state is on its way, workers are asked how far they are."""
        if number == self.assignments:
            self.world.at(self.world.rng.randint(40, 80), self.driver.awake, self.ask_for_progress, number)

    def ask_for_progress(self, number: int) -> None:
        if number != self.assignments or not self.migrations.is_under_way:
            return

        def reply(worker: WorkerId, answer: Answer) -> None:
            if isinstance(answer, dict):
                self.note_progress(worker, answer)

        for worker in self.workers:
            self.driver.call(worker, Progress(self.driver.generation), None, partial(reply, worker))
        self.beat(number)
