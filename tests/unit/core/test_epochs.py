"""The driver's machine: events in, the whole list of instructions out."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from anabranch.core.answers import Refusal
from anabranch.core.epoch_events import (
    AbortOn,
    BeginOn,
    CollectSeals,
    CommitOn,
    EpochBegun,
    EpochEvent,
    EpochInstruction,
    FailEpoch,
    Failure,
    FinishEpoch,
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
from anabranch.core.epochs import EpochMachine, Step, choose_attempts
from anabranch.core.errors import EpochError, FencedError
from anabranch.core.ids import (
    NO_EPOCH,
    Attempt,
    Epoch,
    Partition,
    Run,
    StageAttempt,
    StageNumber,
    StagePartition,
    WorkerId,
)

A, B, C = WorkerId("a"), WorkerId("b"), WorkerId("c")
BOTH = frozenset({A, B})
E, R = Epoch(0), Run(0)


def task(partition: int) -> StagePartition:
    return StagePartition(StageNumber(1), Partition(partition))


def attempt(partition: int, number: int) -> StageAttempt:
    return StageAttempt(StageNumber(1), Partition(partition), Attempt(number))


#: Partition 0 belongs to A, partition 1 to B, partition 2 to both.
OWNERS = {task(0): frozenset({A}), task(1): frozenset({B}), task(2): BOTH}
SEALED_A = frozenset({attempt(0, 1), attempt(2, 3)})
SEALED_B = frozenset({attempt(1, 2), attempt(2, 3)})


class Driver:
    """A machine under test, checked after every event, and short ways to get it somewhere."""

    def __init__(self) -> None:
        self.machine = EpochMachine(NO_EPOCH)

    def feed(self, *events: EpochEvent) -> list[EpochInstruction]:
        """The instructions that the last event gives."""
        instructions: list[EpochInstruction] = []
        for event in events:
            instructions = self.machine.handle(event)
            self.machine.check()
        return instructions

    def begin(self, epoch: Epoch = E) -> list[EpochInstruction]:
        return self.feed(EpochBegun(epoch, BOTH, OWNERS))

    def run(self) -> None:
        self.begin()
        self.feed(WorkerBegan(R, A), WorkerBegan(R, B))

    def collect(self) -> None:
        self.run()
        self.feed(SinkWritten(R))

    def prepare(self) -> None:
        self.collect()
        self.feed(SealsReported(R, A, SEALED_A), SealsReported(R, B, SEALED_B))

    def write(self) -> None:
        self.prepare()
        self.feed(WorkerPrepared(R, A, ("a1",)), WorkerPrepared(R, B, ("b1", "b2")))

    def commit(self) -> None:
        self.write()
        self.feed(ManifestWritten(R))

    def idle(self) -> None:
        """Between epochs, before the first."""


@pytest.fixture
def driver() -> Driver:
    return Driver()


def failure(instructions: list[EpochInstruction]) -> FailEpoch:
    fail = instructions[-1]
    assert isinstance(fail, FailEpoch)
    assert fail.message
    return fail


# ------------------------------------------------------------------------------------------- the undisturbed epoch


def test_an_epoch_from_begin_to_finish(driver: Driver) -> None:
    assert driver.begin() == [BeginOn(E, R, A), BeginOn(E, R, B)]
    assert driver.feed(WorkerBegan(R, B)) == []
    assert driver.feed(WorkerBegan(R, A)) == [RunTasks(E, R)]
    assert driver.feed(SinkWritten(R)) == [CollectSeals(E, R, A), CollectSeals(E, R, B)]
    assert driver.feed(SealsReported(R, A, SEALED_A)) == []
    assert driver.feed(SealsReported(R, B, SEALED_B)) == [PrepareOn(E, R, A, SEALED_A), PrepareOn(E, R, B, SEALED_B)]
    assert driver.feed(WorkerPrepared(R, B, ("b1", "b2"))) == []
    assert driver.feed(WorkerPrepared(R, A, ("a1",))) == [WriteManifest(E, R, ("a1", "b1", "b2"))]
    assert driver.feed(ManifestWritten(R)) == [CommitOn(E, R, A), CommitOn(E, R, B)]
    assert driver.feed(WorkerCommitted(R, A)) == []
    assert driver.feed(WorkerCommitted(R, B)) == [FinishEpoch(E, R, frozenset())]
    assert (driver.machine.committed, driver.machine.step) == (0, Step.IDLE)


def test_the_next_epoch_is_the_next_run(driver: Driver) -> None:
    driver.commit()
    driver.feed(WorkerCommitted(R, A), WorkerCommitted(R, B))
    assert driver.begin(Epoch(1)) == [BeginOn(Epoch(1), Run(1), A), BeginOn(Epoch(1), Run(1), B)]


def test_tasks_may_be_complete_before_the_sink_has_written(driver: Driver) -> None:
    driver.run()
    assert driver.feed(TasksRan(R)) == [CollectSeals(E, R, A), CollectSeals(E, R, B)]
    assert driver.feed(SealsReported(R, A, SEALED_A), SealsReported(R, B, SEALED_B)) == []
    assert driver.feed(SinkWritten(R)) == [PrepareOn(E, R, A, SEALED_A), PrepareOn(E, R, B, SEALED_B)]


def test_the_sink_may_write_while_seals_are_collected(driver: Driver) -> None:
    driver.run()
    driver.feed(TasksRan(R), SealsReported(R, A, SEALED_A))
    assert driver.feed(SinkWritten(R)) == []
    assert len(driver.feed(SealsReported(R, B, SEALED_B))) == 2


# ------------------------------------------------------------------------------------------- the choice


def test_the_lowest_attempt_that_is_sealed_on_all_owners_is_chosen() -> None:
    seals = {
        A: frozenset({attempt(2, 1), attempt(2, 3), attempt(2, 4)}),
        B: frozenset({attempt(2, 2), attempt(2, 3), attempt(2, 4)}),
    }
    assert choose_attempts({task(2): BOTH}, seals) == {task(2): attempt(2, 3)}


def test_attempts_for_other_tasks_or_other_workers_are_not_chosen() -> None:
    seals = {A: frozenset({attempt(1, 1), attempt(7, 1)}), C: frozenset({attempt(1, 1)})}
    assert choose_attempts(OWNERS, seals) == {}


def test_an_attempt_that_is_sealed_on_some_owners_only_is_missing(driver: Driver) -> None:
    driver.collect()
    driver.feed(SealsReported(R, A, SEALED_A))
    half = frozenset({attempt(1, 2), attempt(2, 9)})
    assert driver.feed(SealsReported(R, B, half)) == [RunMissing(E, R, frozenset({task(2)}))]


def test_missing_tasks_run_again_and_are_collected_again(driver: Driver) -> None:
    driver.collect()
    driver.feed(SealsReported(R, A, SEALED_A))
    assert driver.feed(SealsReported(R, B, frozenset())) == [RunMissing(E, R, frozenset({task(1), task(2)}))]
    assert driver.feed(TasksRan(R)) == [CollectSeals(E, R, A), CollectSeals(E, R, B)]
    driver.feed(SealsReported(R, A, SEALED_A))
    assert driver.feed(SealsReported(R, B, SEALED_B)) == [PrepareOn(E, R, A, SEALED_A), PrepareOn(E, R, B, SEALED_B)]


def test_tasks_that_stay_missing_fail_the_epoch(driver: Driver) -> None:
    driver.collect()
    nothing = (SealsReported(R, A, frozenset()), SealsReported(R, B, frozenset()))
    assert isinstance(driver.feed(*nothing)[0], RunMissing)
    assert isinstance(driver.feed(TasksRan(R), *nothing)[0], RunMissing)
    instructions = driver.feed(TasksRan(R), *nothing)
    assert instructions[:-1] == [AbortOn(E, R, A), AbortOn(E, R, B)]
    assert failure(instructions).reason is Failure.INCOMPLETE


# ------------------------------------------------------------------------------------------- lost workers


def refused(worker: WorkerId, run: Run = R) -> WorkerRefused:
    """What the driver makes of a worker that is gone."""
    return WorkerRefused(run, worker, Refusal.NOT_OPEN, "gone")


def test_the_epoch_finishes_even_if_all_workers_are_lost_after_the_manifest(driver: Driver) -> None:
    driver.commit()
    assert driver.feed(refused(A), refused(B)) == [FinishEpoch(E, R, BOTH)]


# ------------------------------------------------------------------------------------------- refusals and failures


@pytest.mark.parametrize("reach", [Driver.begin, Driver.collect, Driver.prepare])
def test_a_refusal_before_the_manifest_fails_the_epoch(driver: Driver, reach: Callable[[Driver], object]) -> None:
    reach(driver)
    instructions = driver.feed(WorkerRefused(R, A, Refusal.WRONG_EPOCH, "not here"))
    assert instructions == [
        AbortOn(E, R, B),
        FailEpoch(E, R, Failure.REFUSED, "not here", frozenset({A})),
    ]


def test_a_worker_that_refuses_to_commit_counts_as_lost(driver: Driver) -> None:
    driver.commit()
    driver.feed(WorkerRefused(R, A, Refusal.NOT_OPEN, "restarted"))
    assert driver.feed(WorkerCommitted(R, B)) == [FinishEpoch(E, R, frozenset({A}))]


@pytest.mark.parametrize("reach", [Driver.begin, Driver.collect, Driver.prepare, Driver.write, Driver.commit])
def test_a_fenced_driver_fails_at_once_and_does_nothing_more(driver: Driver, reach: Callable[[Driver], object]) -> None:
    reach(driver)
    instructions = driver.feed(WorkerRefused(R, A, Refusal.FENCED, "stop"))
    assert instructions == [FailEpoch(E, R, Failure.FENCED, "stop", frozenset({A}))]
    with pytest.raises(FencedError, match="stop this one"):
        driver.begin()


def test_a_claim_of_a_newer_generation_fences_the_manifest(driver: Driver) -> None:
    driver.write()
    instructions = driver.feed(ManifestFailed(R, "claimed", fenced=True))
    assert instructions == [FailEpoch(E, R, Failure.FENCED, "claimed")]
    assert driver.machine.fenced


def test_a_manifest_that_may_not_be_written_fails_the_epoch(driver: Driver) -> None:
    driver.write()
    assert driver.feed(ManifestFailed(R, "no answer")) == [
        AbortOn(E, R, A),
        AbortOn(E, R, B),
        FailEpoch(E, R, Failure.MANIFEST, "no answer"),
    ]


@pytest.mark.parametrize("reach", [Driver.run, Driver.collect])
def test_a_failing_sink_fails_the_epoch(driver: Driver, reach: Callable[[Driver], object]) -> None:
    reach(driver)
    instructions = driver.feed(SinkFailed(R, "disk full"))
    assert instructions[:-1] == [AbortOn(E, R, A), AbortOn(E, R, B)]
    assert failure(instructions).reason is Failure.SINK


# ------------------------------------------------------------------------------------------- again, late, out of order


def test_a_failed_epoch_runs_again_from_the_start(driver: Driver) -> None:
    driver.prepare()
    driver.feed(refused(B))
    only_a = EpochBegun(E, frozenset({A}), {task(0): frozenset({A})})
    assert driver.feed(only_a) == [BeginOn(E, Run(1), A)]
    assert driver.feed(WorkerBegan(Run(1), A)) == [RunTasks(E, Run(1))]
    driver.feed(SinkWritten(Run(1)))
    chosen = frozenset({attempt(0, 8)})
    assert driver.feed(SealsReported(Run(1), A, chosen)) == [PrepareOn(E, Run(1), A, chosen)]


def test_a_committed_epoch_may_be_handed_over_again(driver: Driver) -> None:
    driver.commit()
    driver.feed(WorkerCommitted(R, A), WorkerCommitted(R, B))
    assert driver.begin(E) == [BeginOn(E, Run(1), A), BeginOn(E, Run(1), B)]


def test_events_of_an_earlier_run_are_ignored(driver: Driver) -> None:
    driver.begin()
    driver.feed(refused(B))
    driver.begin()
    late: list[EpochEvent] = [
        WorkerBegan(R, A),
        SinkWritten(R),
        SealsReported(R, A, SEALED_A),
        WorkerPrepared(R, A, ()),
        ManifestWritten(R),
        WorkerCommitted(R, A),
        WorkerRefused(R, A, Refusal.FENCED, "late"),
        SinkFailed(R, "late"),
    ]
    assert [driver.feed(event) for event in late] == [[]] * len(late)
    assert driver.machine.waiting == BOTH


@pytest.mark.parametrize(
    "reach",
    [Driver.idle, Driver.begin, Driver.run, Driver.collect, Driver.prepare, Driver.write, Driver.commit],
)
def test_events_that_belong_to_another_step_are_ignored(driver: Driver, reach: Callable[[Driver], object]) -> None:
    reach(driver)
    step = driver.machine.step
    events: dict[Step, list[EpochEvent]] = {
        Step.BEGINNING: [WorkerBegan(R, A)],
        Step.RUNNING: [TasksRan(R), SinkWritten(R), SinkFailed(R, "late")],
        Step.COLLECTING: [SealsReported(R, A, SEALED_A), SinkWritten(R), SinkFailed(R, "late")],
        Step.PREPARING: [WorkerPrepared(R, A, ())],
        Step.WRITING: [ManifestWritten(R), ManifestFailed(R, "late", fenced=True)],
        Step.COMMITTING: [WorkerCommitted(R, A)],
    }
    for event in [event for other in events for event in events[other] if event not in events.get(step, [])]:
        assert driver.feed(event) == []
    assert driver.machine.step is step


def test_repeated_answers_of_one_worker_do_not_stand_for_the_other(driver: Driver) -> None:
    driver.begin()
    assert driver.feed(WorkerBegan(R, A), WorkerBegan(R, A), WorkerBegan(R, C)) == []
    assert driver.machine.step is Step.BEGINNING


@pytest.mark.parametrize("epoch", [1, 5, -2])
def test_an_epoch_out_of_order_is_an_error(driver: Driver, epoch: int) -> None:
    with pytest.raises(EpochError, match="restart the query"):
        driver.begin(Epoch(epoch))


def test_an_epoch_does_not_begin_while_another_runs(driver: Driver) -> None:
    driver.begin()
    with pytest.raises(EpochError, match="has not ended"):
        driver.begin()


@pytest.mark.parametrize(
    ("workers", "owners"),
    [
        (frozenset({A}), OWNERS),
        (frozenset(), {}),
        (BOTH, {task(0): frozenset()}),
    ],
)
def test_tasks_and_workers_have_to_fit(
    driver: Driver, workers: frozenset[WorkerId], owners: dict[StagePartition, frozenset[WorkerId]]
) -> None:
    with pytest.raises(EpochError, match="from one route"):
        driver.feed(EpochBegun(E, workers, owners))


def test_check_finds_a_broken_invariant(driver: Driver) -> None:
    driver.prepare()
    driver.machine.sink_written = False
    with pytest.raises(AssertionError):
        driver.machine.check()
