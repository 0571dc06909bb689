"""Who takes part in a job as a state machine: what happened in, instructions out, no I/O.

Workers come, leave and are lost at any time; the machine notes it. Between two epochs a change fulfils all that waits:
remove who is lost -> let in who is ready -> measure the load, if it is to be shared out -> save the next route
-> assign key groups -> begin the migration. A worker that is lost meanwhile lets the change start over.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from anabranch.core import membership_events as events
from anabranch.core.errors import EpochError, SettingsError
from anabranch.core.ids import WorkerId
from anabranch.core.membership_change import ChangeInTheMaking
from anabranch.core.membership_events import MembershipInstruction, RescaleRequest, RescaleState
from anabranch.core.routes import Route, moves, next_route

#: How often a change starts over after a try in which no worker was found lost, or every one was.
FRUITLESS_TRIES_MAX = 5
_REPLACED = "A newer rescale came before this one took effect."


class MembershipMachine:
    """One job's workers, within one incarnation of the driver. The caller hands in one event at a time."""

    def __init__(
        self,
        members: Sequence[WorkerId],
        route: Route,
        key_groups: int,
        *,
        can_start: bool,
        can_leave: bool = True,
    ) -> None:
        #: The workers that own key groups, or will with the change that is being made, in the order in which they came.
        self.members = tuple(members)
        #: Those that own none any more, and keep some for their new owners.
        self.departing: tuple[WorkerId, ...] = ()
        #: Those that can be let in.
        self.ready: tuple[WorkerId, ...] = ()
        #: How many are being started, and how many workers the job should have.
        self.starting = 0
        self.wanted = len(self.members)
        #: Members that are known to be lost, and those that were named to leave.
        self.lost: frozenset[WorkerId] = frozenset()
        self.leaving: frozenset[WorkerId] = frozenset()
        #: The newest route that is durable; and the newest that all workers have been told.
        self.route = route
        self.applied = route
        #: Rescales that were asked for and have not taken effect.
        self.pending_rescales: tuple[RescaleRequest, ...] = ()
        self.change: ChangeInTheMaking | None = None
        #: Counts the assignments.
        self.assignments = 0
        #: Members that have not said since the last assignment that all of their key groups have arrived.
        self.pending: frozenset[WorkerId] = frozenset()
        self.ended = ""
        self._key_groups = key_groups
        #: Whether this job starts workers itself.
        self.can_start = can_start
        #: Whether all that a worker has moves to others, so that it can leave.
        self._can_leave = can_leave
        #: The parallelism of stages that changes have set.
        self._set_before: dict[int, int] = {}

    # ------------------------------------------------------------------------------------------ what is known

    @property
    def is_urgent(self) -> bool:
        """Whether no epoch can begin before a change: a worker is lost, or the last change failed half-way."""
        return bool(self.lost) or self.route is not self.applied or set(self.members) != set(self.applied.workers)

    @property
    def is_ready(self) -> bool:
        """Whether a change is urgent, or all is ready for what was asked for."""
        return self.is_urgent or (not self.starting and bool(self.pending_rescales or self.leaving or self.ready))

    def is_leaving(self, worker: WorkerId) -> bool:
        return worker in self.leaving or (self.change is not None and worker in self.change.named)

    def one_more(self, in_force: Mapping[int, int]) -> tuple[int, dict[int, int]]:
        """One worker more than was asked for last, and one task more for each of these stages, given what it has."""
        being_made = self.change.requests if self.change is not None else []
        newest = {**self._set_before, **_parallelism_of([*being_made, *self.pending_rescales])}
        return self.wanted + 1, {stage: newest.get(stage, tasks) + 1 for stage, tasks in in_force.items()}

    def check(self) -> None:
        """Check the invariants that the attributes' comments state."""
        assert len(set(self.members)) == len(self.members), vars(self)
        assert not set(self.members) & set(self.departing), vars(self)
        assert self.lost <= set(self.members), vars(self)
        assert self.starting >= 0 < self.wanted, vars(self)
        assert self.pending <= set(self.members) | self.lost or self.change is not None, vars(self)
        if self.change is None:
            assert set(self.route.workers) == set(self.applied.workers) or not self.members, vars(self)

    # ------------------------------------------------------------------------------------------------- events

    def handle(self, event: events.MembershipEvent) -> list[MembershipInstruction]:
        match event:
            case events.RescaleWanted():
                return self._want(event.request)
            case events.WorkerCame():
                return self._come(event)
            case events.DrainWanted():
                return self._drain(event)
            case events.WorkerMissed():
                return self._miss(event.worker)
            case events.WorkerStarted():
                return self._started(event.worker)
            case events.StartFailed():
                return self._start_failed(event.message)
            case events.ProgressTold():
                return self._note_progress(event)
            case events.JobEnded():
                return self._end(event.message)
            case events.ChangeBegun():
                assert self.change is None, "a change is under way"
                self.change = ChangeInTheMaking(event.next_epoch)
                return self._begin_try(self.change)
        if self.change is not None:
            return self._go_on(self.change, event)
        raise EpochError(f"{type(event).__name__} came while no change is made. Report this.")

    def _go_on(self, change: ChangeInTheMaking, event: events.MembershipEvent) -> list[MembershipInstruction]:
        match event:
            case events.StartedAtOnce():
                return self._let_in(change, [event.worker])
            case events.LoadMeasured():
                return self._choose_route(change, event.load)
            case events.RouteSaved():
                assert change.route is not None, "no route is being saved"
                self.route = change.route
                return self._assign()
            case events.GroupsAssigned():
                return self._finish(change)
            case events.AssigningLost():
                self._give_back(change)
                return [events.LookForLosses()]
            case events.LossesLookedFor():
                return self._try_again(change)
            case events.ChangeFailed():
                self._give_back(change)
                self.change = None
                return []
        raise EpochError(f"There is no event {type(event).__name__}. Report this.")

    # ----------------------------------------------------------------------------------- what is asked for

    def _want(self, request: RescaleRequest) -> list[MembershipInstruction]:
        self._check_running()
        instructions: list[MembershipInstruction] = []
        if (workers := request.workers) is not None:
            self._check_wanted(workers)
            # Only the number of workers is replaced: the parallelism of a stage stays wanted.
            replaced = [each for each in self.pending_rescales if each.workers is not None]
            newest = _parallelism_of(self.pending_rescales)
            inherited = {s: newest[s] for s in _parallelism_of(replaced) if s not in request.parallelism}
            if inherited:
                request = replace(request, parallelism={**request.parallelism, **inherited})
                instructions.append(events.TakeOver(request.rescale, inherited))
            instructions += [events.EndRescale(each.rescale, RescaleState.REPLACED, _REPLACED) for each in replaced]
            self.pending_rescales = tuple(each for each in self.pending_rescales if each not in replaced)
            self.wanted = workers
            instructions += self._start_missing()
        self.pending_rescales = (*self.pending_rescales, request)
        return instructions

    def _come(self, event: events.WorkerCame) -> list[MembershipInstruction]:
        self._check_running()
        self._check_count(self.wanted + 1)
        if event.worker in {*self.members, *self.ready}:
            raise SettingsError(
                f"A worker with the id {event.worker!r} takes part already. Start this one with another --id."
            )
        self.wanted += 1
        self.ready = (*self.ready, event.worker)
        self.pending_rescales = (*self.pending_rescales, RescaleRequest(event.rescale))
        return []

    def _drain(self, event: events.DrainWanted) -> list[MembershipInstruction]:
        self._check_running()
        worker = event.worker
        if worker not in self.members:
            raise SettingsError(f"There is no worker {worker!r} that could leave. Workers: {', '.join(self.members)}.")
        self._check_leaving()
        if not self.is_leaving(worker):
            if len(self.members) + len(self.ready) + self.starting - len(self.leaving) <= 1:
                raise SettingsError(f"{worker} is the last worker. Add another one first, or stop the query.")
            self.leaving |= {worker}
            self.wanted = max(1, self.wanted - 1)
        self.pending_rescales = (*self.pending_rescales, RescaleRequest(event.rescale, leaving=worker))
        return []

    def _start_missing(self) -> list[MembershipInstruction]:
        """Start those that are missing, in the background."""
        staying = [worker for worker in (*self.members, *self.ready) if not self.is_leaving(worker)]
        missing = self.wanted - len(staying) - self.starting
        if missing <= 0 or not self.can_start:
            return []
        self.starting += missing
        return [events.StartWorkers(missing)]

    def _started(self, worker: WorkerId) -> list[MembershipInstruction]:
        self.starting = max(0, self.starting - 1)
        if self.ended:
            return [events.TakeLeave(worker)]
        self.ready = (*self.ready, worker)
        return []

    def _start_failed(self, message: str) -> list[MembershipInstruction]:
        """The number of workers that was asked for is not reached; whoever comes or goes still does."""
        self.starting = max(0, self.starting - 1)
        failed = [request for request in self.pending_rescales if request.workers is not None]
        if failed:  # if it was to replace a lost one, that is tried again with the next change
            self.wanted = max(1, len(self.members) + len(self.ready) - len(self.leaving))
        if not self.starting and not self.ready and self.leaving >= set(self.members):  # nobody takes over from them
            failed += [request for request in self.pending_rescales if request.leaving in self.leaving]
            self.wanted += len(self.leaving)
            self.leaving = frozenset()
        self.pending_rescales = tuple(request for request in self.pending_rescales if request not in failed)
        return [events.EndRescale(request.rescale, RescaleState.FAILED, message) for request in failed]

    def _miss(self, worker: WorkerId) -> list[MembershipInstruction]:
        if worker in self.departing:
            self.departing = tuple(each for each in self.departing if each != worker)
            return [events.LoseDeparting(worker)]
        if worker in self.lost or worker not in self.members:
            return []
        self.lost |= {worker}
        return [events.NoteLoss(worker)]

    def _end(self, message: str) -> list[MembershipInstruction]:
        self.ended = message
        asked_for = [request.rescale for request in self.pending_rescales]
        ended: list[MembershipInstruction] = [
            events.EndRescale(each, RescaleState.FAILED, message) for each in asked_for
        ]
        ended += [events.TakeLeave(worker) for worker in (*self.departing, *self.ready)]
        self.pending_rescales, self.departing, self.ready = (), (), ()
        return ended

    # ------------------------------------------------------------------------------------------- the change

    def _begin_try(self, change: ChangeInTheMaking) -> list[MembershipInstruction]:
        """Take all that waits, to be fulfilled together; rescales only if no worker is still being started for them."""
        lost = [worker for worker in self.members if worker in self.lost]
        change.lost += lost
        change.named = self.leaving - self.lost
        self.lost, self.leaving = frozenset(), frozenset()
        if not self.starting:
            change.requests, self.pending_rescales = list(self.pending_rescales), ()
        self.members = tuple(worker for worker in self.members if worker not in lost)
        removed: list[MembershipInstruction] = [events.RemoveWorker(worker) for worker in lost]
        newcomers, self.ready = self.ready, ()
        if self.members or newcomers:
            return removed + self._let_in(change, newcomers)
        if not self.can_start:
            return [
                *removed,
                events.FailChange(
                    "All workers of anabranch.workerAddresses are lost. Start them again, then the query: it resumes "
                    "from its checkpoint."
                ),
            ]
        return [*removed, events.StartWorkerNow()]

    def _let_in(self, change: ChangeInTheMaking, newcomers: Sequence[WorkerId]) -> list[MembershipInstruction]:
        change.joined += newcomers
        self.members = (*self.members, *newcomers)
        let_in: list[MembershipInstruction] = [events.LetIn(worker) for worker in newcomers]
        change.choose_leaving(self.members, self.wanted)
        if change.requests and not change.lost:
            return [*let_in, events.MeasureLoad()]
        return let_in + self._choose_route(change, None)

    def _choose_route(self, change: ChangeInTheMaking, load: Sequence[float] | None) -> list[MembershipInstruction]:
        staying = [worker for worker in self.members if worker not in change.leaving]
        is_balancing = bool(change.requests) and not change.lost
        if set(staying) == set(self.route.workers) and not is_balancing:
            return self._assign()
        route = next_route(self.route, staying, change.next_epoch, load if is_balancing else None)
        if route.owners == self.route.owners:
            return self._assign()
        change.route = route
        return [events.SaveRoute(route)]

    def _assign(self) -> list[MembershipInstruction]:
        self.assignments += 1
        return [events.AssignGroups(self.assignments, self.route, self.applied)]

    def _finish(self, change: ChangeInTheMaking) -> list[MembershipInstruction]:
        left = tuple(sorted(change.leaving))
        moved = len(moves(self.applied, self.route))
        self.applied = self.route
        self.members = tuple(worker for worker in self.members if worker not in change.leaving)
        self.departing = (*self.departing, *left)
        self.lost &= set(self.members)
        self.pending = frozenset(self.members)
        self._set_before |= _parallelism_of(change.requests)
        self.change = None
        staying = self._keep_last(change)
        made = events.ChangeMade(
            number=self.assignments,
            next_epoch=change.next_epoch,
            lost=tuple(change.lost),
            joined=tuple(change.joined),
            left=left,
            moved=moved,
            rescales=tuple(request.rescale for request in change.requests),
        )
        return [*(events.Depart(worker) for worker in left), made, *staying, *self._start_missing()]

    def _keep_last(self, change: ChangeInTheMaking) -> list[MembershipInstruction]:
        """Those that were named and are the only ones left stay until another one has come, if any can be started."""
        last = change.named & set(self.members)
        requests = change.take_back(last)
        if self.can_start:
            self.leaving |= last
            self.pending_rescales = (*requests, *self.pending_rescales)
            return []
        self.wanted += len(last)
        message = "All other workers were lost, so {} stays. Let another one join, then drain it again."
        failed = RescaleState.FAILED
        return [events.EndRescale(request.rescale, failed, message.format(request.leaving)) for request in requests]

    def _give_back(self, change: ChangeInTheMaking) -> None:
        """What the change was for waits for the next one. Lost workers and newcomers have been dealt with."""
        self.leaving |= change.named & set(self.members)
        self.pending_rescales = (*change.requests, *self.pending_rescales)
        change.requests, change.named = [], frozenset()

    def _try_again(self, change: ChangeInTheMaking) -> list[MembershipInstruction]:
        if not self.lost or self.lost == set(self.members):
            change.fruitless_tries += 1
        if change.fruitless_tries == FRUITLESS_TRIES_MAX:
            self.change = None
            lost = ", ".join([*change.lost, *sorted(self.lost)]) or "none was found lost"
            return [
                events.FailChange(
                    f"Workers are lost faster than they can be replaced: {lost}. See their logs, then start the query "
                    "again: it resumes from its checkpoint."
                )
            ]
        return self._begin_try(change)

    # --------------------------------------------------------------------------------------------- migration

    def _note_progress(self, event: events.ProgressTold) -> list[MembershipInstruction]:
        """What a worker said before the last assignment is no news."""
        is_news = event.assignment == self.assignments and event.worker in self.pending and not event.pending_groups
        if not is_news or self.change is not None:  # a change is about to assign anew
            return []
        self.pending -= {event.worker}
        if self.pending:
            return []
        departing, self.departing = self.departing, ()
        return [events.FinishMigration(self.assignments, departing)]

    # ----------------------------------------------------------------------------------------------- refusals

    def _check_running(self) -> None:
        if self.ended:
            raise SettingsError(f"{self.ended} Start it again, with the workers that it is to have.")

    def _check_wanted(self, workers: int) -> None:
        self._check_count(workers)
        if workers < self.wanted:
            self._check_leaving()
        if workers > len(self.members) + len(self.ready) and not self.can_start:
            raise SettingsError(
                f"This query starts no workers itself, so it cannot have {workers}. Start one with "
                "`anabranch worker --join HOST:PORT`, with the address of the query's url."
            )

    def _check_leaving(self) -> None:
        if not self._can_leave:
            raise SettingsError(
                "No worker can leave while anabranch.drain is false: it would have to keep the state that nobody has "
                "asked for. Start the query again with anabranch.drain=true, or with the workers that it is to have."
            )

    def _check_count(self, workers: int) -> None:
        if not 1 <= workers <= self._key_groups:
            raise SettingsError(
                f"{workers} workers are not possible: there must be at least 1, and at most {self._key_groups}, as "
                "many as the job has key groups."
            )


def _parallelism_of(requests: Sequence[RescaleRequest]) -> dict[int, int]:
    """Of the stages that these rescales name, one after the other."""
    return {stage: number for request in requests for stage, number in request.parallelism.items()}
