"""The membership machine: events in, and the whole list of instructions compared."""

import pytest

from anabranch.core import membership_events as events
from anabranch.core.errors import EpochError, SettingsError
from anabranch.core.ids import Epoch, WorkerId
from anabranch.core.membership import FRUITLESS_TRIES_MAX, MembershipMachine
from anabranch.core.membership_events import RescaleRequest, RescaleState
from anabranch.core.routes import Route, initial_route

KEY_GROUPS = 6
A, B, C = WorkerId("a"), WorkerId("b"), WorkerId("c")


def machine(*workers: WorkerId, can_start: bool = True) -> MembershipMachine:
    members = workers or (A, B)
    made = MembershipMachine(members, initial_route(members, KEY_GROUPS, Epoch(0)), KEY_GROUPS, can_start=can_start)
    made.check()
    return made


def route_of(instructions: list[events.MembershipInstruction]) -> Route:
    (save,) = (each for each in instructions if isinstance(each, events.SaveRoute))
    return save.route


def change(membership: MembershipMachine, next_epoch: int = 5) -> list[events.MembershipInstruction]:
    """Makes a change in which nothing fails; all instructions."""
    queue: list[events.MembershipEvent] = [events.ChangeBegun(Epoch(next_epoch))]
    done: list[events.MembershipInstruction] = []
    while queue:
        instructions = membership.handle(queue.pop(0))
        done += instructions
        for instruction in instructions:
            match instruction:
                case events.MeasureLoad():
                    queue.append(events.LoadMeasured(None))
                case events.SaveRoute():
                    queue.append(events.RouteSaved())
                case events.AssignGroups():
                    queue.append(events.GroupsAssigned())
                case events.StartWorkerNow():
                    queue.append(events.StartedAtOnce(C))
    membership.check()
    return done


def test_more_workers_are_started_and_let_in_when_all_are_ready() -> None:
    membership = machine()
    assert membership.handle(events.RescaleWanted(RescaleRequest(1, workers=3))) == [events.StartWorkers(1)]
    assert not membership.is_ready
    assert membership.handle(events.WorkerStarted(C)) == []
    assert membership.is_ready
    before = membership.route
    instructions = change(membership)
    route = route_of(instructions)
    assert instructions == [
        events.LetIn(C),
        events.MeasureLoad(),
        events.SaveRoute(route),
        events.AssignGroups(1, route, before),
        events.ChangeMade(1, Epoch(5), lost=(), joined=(C,), left=(), moved=2, rescales=(1,)),
    ]
    assert not membership.is_ready


def test_a_route_is_in_force_only_when_it_is_saved() -> None:
    membership = machine()
    before = membership.route
    membership.handle(events.DrainWanted(B, 1))
    membership.handle(events.ChangeBegun(Epoch(5)))
    (save,) = membership.handle(events.LoadMeasured(None))
    assert isinstance(save, events.SaveRoute)
    assert membership.route is before
    assert membership.handle(events.ChangeFailed()) == []
    assert (membership.route, membership.is_ready) == (before, True)  # it is tried again
    assert change(membership)[-1] == events.ChangeMade(
        1, Epoch(5), lost=(), joined=(), left=(B,), moved=3, rescales=(1,)
    )


def test_a_change_that_failed_after_it_let_go_of_a_lost_worker_is_made_before_anything_else() -> None:
    membership = machine()
    membership.handle(events.WorkerMissed(B))
    begun = membership.handle(events.ChangeBegun(Epoch(5)))
    assert [type(each) for each in begun] == [events.RemoveWorker, events.SaveRoute]
    membership.handle(events.ChangeFailed())
    assert (membership.is_urgent, membership.is_ready) == (True, True)  # the route still names the lost worker
    made = change(membership)
    assert route_of(made).workers == (A,)
    assert (membership.is_urgent, membership.is_ready) == (False, False)


def test_a_change_that_failed_after_its_route_was_saved_is_made_before_anything_else() -> None:
    membership = machine()
    membership.handle(events.RescaleWanted(RescaleRequest(1, workers=1)))
    assert not membership.is_urgent
    membership.handle(events.ChangeBegun(Epoch(5)))
    membership.handle(events.LoadMeasured(None))
    membership.handle(events.RouteSaved())
    membership.handle(events.ChangeFailed())
    assert membership.is_urgent  # nobody has been told of the route in force
    change(membership)
    assert (membership.is_urgent, membership.members) == (False, (A,))


def test_a_worker_that_leaves_goes_when_all_state_has_arrived() -> None:
    membership = machine(A, B, C)
    membership.handle(events.DrainWanted(B, 1))
    assert events.Depart(B) in change(membership)
    assert membership.departing == (B,)
    assert membership.handle(events.ProgressTold(A, 1, 0)) == []
    assert membership.handle(events.ProgressTold(C, 1, 2)) == []
    assert membership.handle(events.ProgressTold(C, 0, 0)) == []  # said before the change
    assert membership.handle(events.ProgressTold(C, 1, 0)) == [events.FinishMigration(1, (B,))]
    assert membership.handle(events.ProgressTold(C, 1, 0)) == []


def test_a_lost_worker_is_removed_and_replaced() -> None:
    membership = machine()
    assert membership.handle(events.WorkerMissed(B)) == [events.NoteLoss(B)]
    assert membership.handle(events.WorkerMissed(B)) == []
    assert membership.handle(events.WorkerMissed(C)) == []
    instructions = change(membership)
    assert instructions[0] == events.RemoveWorker(B)
    assert instructions[-2:] == [
        events.ChangeMade(1, Epoch(5), lost=(B,), joined=(), left=(), moved=3, rescales=()),
        events.StartWorkers(1),
    ]


def test_a_worker_that_is_to_leave_waits_for_the_replacement_of_a_lost_one() -> None:
    membership = machine()
    membership.handle(events.DrainWanted(A, 1))
    membership.handle(events.WorkerMissed(B))
    made, start = change(membership)[-2:]
    assert made == events.ChangeMade(1, Epoch(5), lost=(B,), joined=(), left=(), moved=3, rescales=())
    assert start == events.StartWorkers(1)
    assert (membership.is_leaving(A), membership.is_ready) == (True, False)
    membership.handle(events.WorkerStarted(C))
    assert change(membership)[-2:] == [
        events.Depart(A),
        events.ChangeMade(2, Epoch(5), lost=(), joined=(C,), left=(A,), moved=6, rescales=(1,)),
    ]
    assert (membership.members, membership.wanted) == ((C,), 1)


def test_a_worker_can_be_named_to_leave_while_another_one_is_started() -> None:
    membership = machine()
    membership.handle(events.WorkerMissed(B))
    change(membership)
    assert membership.handle(events.DrainWanted(A, 1)) == []
    assert not membership.is_ready
    membership.handle(events.WorkerStarted(C))
    change(membership)
    assert (membership.members, membership.departing) == ((C,), (A,))


def test_the_last_worker_stays_if_no_other_one_can_be_started_and_whoever_waits_is_told() -> None:
    membership = machine()
    membership.handle(events.WorkerMissed(B))
    change(membership)
    membership.handle(events.DrainWanted(A, 1))
    assert membership.handle(events.StartFailed("no memory")) == [
        events.EndRescale(1, RescaleState.FAILED, "no memory")
    ]
    assert (membership.is_leaving(A), membership.is_ready, membership.wanted) == (False, False, 2)


def test_the_last_worker_of_a_job_that_starts_none_stays_and_whoever_waits_is_told() -> None:
    membership = machine(can_start=False)
    membership.handle(events.DrainWanted(A, 1))
    membership.handle(events.WorkerMissed(B))
    made, ended = change(membership)[-2:]
    assert made == events.ChangeMade(1, Epoch(5), lost=(B,), joined=(), left=(), moved=3, rescales=())
    assert isinstance(ended, events.EndRescale)
    assert (ended.rescale, ended.state) == (1, RescaleState.FAILED)
    assert "so a stays. Let another one join" in ended.message
    assert (membership.is_ready, membership.wanted) == (False, 2)


def test_with_no_worker_left_one_is_started_at_once() -> None:
    membership = machine(A)
    membership.handle(events.WorkerMissed(A))
    instructions = change(membership)
    assert instructions[:3] == [events.RemoveWorker(A), events.StartWorkerNow(), events.LetIn(C)]
    assert membership.members == (C,)


def test_with_no_worker_left_and_none_to_be_started_the_change_fails() -> None:
    membership = machine(A, can_start=False)
    membership.handle(events.WorkerMissed(A))
    removed, failed = membership.handle(events.ChangeBegun(Epoch(5)))
    assert removed == events.RemoveWorker(A)
    assert isinstance(failed, events.FailChange)
    assert "Start them again" in failed.message


def test_a_loss_during_a_change_lets_it_start_over_with_what_was_asked_for() -> None:
    membership = machine(A, B, C)
    membership.handle(events.RescaleWanted(RescaleRequest(1, parallelism={1: 4})))
    membership.handle(events.ChangeBegun(Epoch(5)))
    (assign,) = membership.handle(events.LoadMeasured(None))
    assert isinstance(assign, events.AssignGroups)
    assert membership.handle(events.AssigningLost("no answer")) == [events.LookForLosses()]
    membership.handle(events.WorkerMissed(C))
    instructions = membership.handle(events.LossesLookedFor())
    assert instructions[0] == events.RemoveWorker(C)
    membership.handle(events.RouteSaved())
    made = membership.handle(events.GroupsAssigned())[0]
    assert isinstance(made, events.ChangeMade)
    assert (made.lost, made.rescales) == ((C,), (1,))


def test_a_change_is_given_up_when_tries_lead_nowhere() -> None:
    membership = machine()
    membership.handle(events.WorkerMissed(B))
    membership.handle(events.ChangeBegun(Epoch(5)))
    for _ in range(FRUITLESS_TRIES_MAX):
        assert membership.handle(events.AssigningLost("no answer")) == [events.LookForLosses()]
        instructions = membership.handle(events.LossesLookedFor())
    (failed,) = instructions
    assert isinstance(failed, events.FailChange)
    assert "lost faster than they can be replaced: b" in failed.message


def test_a_start_that_fails_ends_what_waited_for_it() -> None:
    membership = machine()
    membership.handle(events.RescaleWanted(RescaleRequest(1, workers=4)))
    membership.handle(events.RescaleWanted(RescaleRequest(2, parallelism={1: 4})))
    ended = membership.handle(events.StartFailed("no memory"))
    assert ended == [events.EndRescale(1, RescaleState.FAILED, "no memory")]
    assert membership.handle(events.StartFailed("no memory")) == []
    assert (membership.wanted, membership.starting, membership.is_ready) == (2, 0, True)


def test_a_newer_number_replaces_an_older_one_and_inherits_its_parallelism() -> None:
    membership = machine()
    membership.handle(events.RescaleWanted(RescaleRequest(1, workers=3, parallelism={1: 8})))
    assert membership.handle(events.RescaleWanted(RescaleRequest(2, workers=4))) == [
        events.TakeOver(2, {1: 8}),
        events.EndRescale(1, RescaleState.REPLACED, "A newer rescale came before this one took effect."),
        events.StartWorkers(1),
    ]


@pytest.mark.parametrize("succeeds", [True, False])
def test_one_more_adds_to_the_change_that_is_being_made(succeeds: bool) -> None:
    membership, in_force = machine(A), {1: 2}
    workers, parallelism = membership.one_more(in_force)
    assert (workers, parallelism) == (2, {1: 3})
    membership.handle(events.RescaleWanted(RescaleRequest(1, workers=workers, parallelism=parallelism)))
    membership.handle(events.WorkerStarted(B))
    membership.handle(events.ChangeBegun(Epoch(5)))
    assert membership.one_more(in_force) == (3, {1: 4})
    membership.handle(events.LoadMeasured(None))
    membership.handle(events.RouteSaved())
    membership.handle(events.GroupsAssigned() if succeeds else events.ChangeFailed())
    assert membership.one_more(in_force) == (3, {1: 4})


def test_after_the_end_nothing_is_taken_on_and_whoever_waits_is_told() -> None:
    membership = machine()
    membership.handle(events.WorkerCame(C, 1))
    assert membership.handle(events.JobEnded("The query has ended.")) == [
        events.EndRescale(1, RescaleState.FAILED, "The query has ended."),
        events.TakeLeave(C),
    ]
    with pytest.raises(SettingsError, match="The query has ended"):
        membership.handle(events.RescaleWanted(RescaleRequest(2, workers=3)))
    membership.starting = 1
    assert membership.handle(events.WorkerStarted(WorkerId("d"))) == [events.TakeLeave(WorkerId("d"))]


def test_an_event_of_a_change_is_refused_while_none_is_made() -> None:
    with pytest.raises(EpochError, match="GroupsAssigned came while no change is made"):
        machine().handle(events.GroupsAssigned())
