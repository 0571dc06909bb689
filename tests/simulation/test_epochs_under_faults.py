"""Whatever fails, and whenever: state and sink end up as in an undisturbed run.

ANABRANCH_SIMULATION_SEED=<seed> runs that one history; ANABRANCH_SIMULATION_HISTORIES=<count> runs more of them.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import pytest
from epoch_application import Application
from epoch_history import History, draw_history, draw_rerun, draw_return, undisturbed
from epoch_world import World

from anabranch.core.epoch_events import Instruction as DriverInstruction
from anabranch.core.epochs import EpochMachine, Step, choose_attempts
from anabranch.core.ids import WorkerId
from anabranch.core.requests import (
    Begin,
    DropLayersAfter,
    EpochRequest,
    Instruction,
    Open,
    Prepare,
    Request,
    ResetState,
    Stage,
    WriteChangeFiles,
)
from anabranch.core.transactions import TransactionMachine

HISTORIES = int(os.environ.get("ANABRANCH_SIMULATION_HISTORIES", "2000"))
#: Within this many histories every mistake must be found.
MUTANT_HISTORIES = 1000
TARGETED_HISTORIES = 150


def seeds() -> Iterator[int]:
    only = os.environ.get("ANABRANCH_SIMULATION_SEED")
    return iter([int(only)] if only else range(HISTORIES))


def run_history(
    history: History,
    worker_machine: type[TransactionMachine] = TransactionMachine,
    driver_machine: type[EpochMachine] = EpochMachine,
) -> World:
    application = Application(history, worker_machine, driver_machine)
    world = application.run()
    state, sink = history.expected
    epochs = list(range(history.epochs))
    assert sorted(world.checkpoint.spark_commits) == epochs, "not every epoch was committed exactly once"
    assert world.checkpoint.sink == sink, "the sink is wrong"
    stored = world.checkpoint.state_at(*world.checkpoint.newest())
    assert {row: count for row, (count, _) in stored.items()} == state, "the checkpoint is wrong"
    workers = [world.workers[name] for name in application.drivers[-1].route.workers]
    assert all(worker.machine.committed == epochs[-1] for worker in workers), "a worker is behind"
    held = [pair for worker in workers for pair in worker.state.items()]
    assert sorted(held) == sorted(stored.items()), "the workers' state is not that of the checkpoint"
    return world


@pytest.fixture(scope="module")
def seen() -> Counter[str]:
    """Runs all histories, once; what happened in them, how often."""
    happened: Counter[str] = Counter()
    for seed in seeds():
        history = draw_history(seed)
        try:
            happened += run_history(history).seen
        except Exception as error:
            error.add_note(f"{history}\nRun it alone with ANABRANCH_SIMULATION_SEED={seed}.")
            raise
    return happened


def test_state_and_sink_equal_those_of_an_undisturbed_run(seen: Counter[str]) -> None:
    assert seen["FinishEpoch"] > 0


@pytest.mark.skipif("ANABRANCH_SIMULATION_SEED" in os.environ, reason="one history does not reach everything")
def test_histories_reach_every_corner_of_the_protocol(seen: Counter[str]) -> None:
    corners = [
        *("AbortOn", "DiscardAttempt", "DropLayersAfter", "FoldUpTo", "ResetState", "RunMissing"),
        *("FailEpoch fenced", "FailEpoch incomplete", "FailEpoch manifest", "FailEpoch refused"),
        *("FailEpoch sink", "FailEpoch worker_lost", "FinishEpoch with a lost worker"),
        *("Refuse fenced", "Refuse not_sealed", "Refuse wrong_epoch", "Refuse wrong_step", "fenced task"),
        *("caught up with a lost commit", "rolled back to run an epoch again", "concurrent Spark commit"),
    ]
    assert [corner for corner in corners if seen[corner] == 0] == []


def test_the_same_seed_gives_the_same_history() -> None:
    for seed in range(30):
        first, second = (run_history(draw_history(seed)) for _ in range(2))
        assert (first.steps, first.now, first.seen) == (second.steps, second.now, second.seen)


def test_an_undisturbed_job_neither_fails_nor_refuses_nor_repeats_anything() -> None:
    for seed in range(50):
        world = run_history(undisturbed(draw_history(seed)))
        trouble = ("Abort", "Drop", "Fail", "Refuse", "Reset", "RunMissing", "rolled")
        assert [name for name in world.seen if name.startswith(trouble)] == []


def test_a_worker_that_missed_the_repetition_of_an_epoch_does_not_bring_its_own_version_back() -> None:
    for seed in range(TARGETED_HISTORIES):
        run_history(draw_return(seed))


def test_tasks_of_an_earlier_run_with_another_parallelism_do_no_harm() -> None:
    for seed in range(TARGETED_HISTORIES):
        run_history(draw_rerun(seed))


# Mistakes that the histories must find. Their own checks are silenced: what is asked is whether the result shows it.


class KeepsStagedChanges(TransactionMachine):
    """An epoch that is run again finds what its earlier run has staged."""

    def _end_run(self) -> list[Instruction]:
        self.running, self.prepared = None, None
        return []

    def check(self) -> None: ...


class IgnoresGenerations(TransactionMachine):
    def handle(self, request: Request) -> list[Instruction]:
        known = self.generation
        if known is not None and request.generation < known and isinstance(request, EpochRequest):
            request = replace(request, generation=known, run=self.run)
        return super().handle(request)

    def check(self) -> None: ...


class IgnoresRuns(TransactionMachine):
    def handle(self, request: Request) -> list[Instruction]:
        if isinstance(request, EpochRequest) and not isinstance(request, Begin):
            request = replace(request, run=self.run)
        return super().handle(request)

    def check(self) -> None: ...


class SealsAtOnce(TransactionMachine):
    def _stage(self, request: Stage) -> list[Instruction]:
        return super()._stage(replace(request, sealed=True))


class PreparesWhatIsNotSealed(TransactionMachine):
    def _prepare(self, request: Prepare) -> list[Instruction]:
        known = tuple(sorted(request.chosen & self.staged.keys()))
        self.prepared = frozenset(known)
        others = self._discard(self.staged.keys() - request.chosen)
        return [WriteChangeFiles(request.epoch, self._run_id, known), *others]

    def check(self) -> None: ...


class NeverRollsBack(TransactionMachine):
    def handle(self, request: Request) -> list[Instruction]:
        return [done for done in super().handle(request) if not isinstance(done, DropLayersAfter)]


class KeepsStateThatIsBehind(TransactionMachine):
    def handle(self, request: Request) -> list[Instruction]:
        return [done for done in super().handle(request) if not isinstance(done, ResetState)]


class TrustsEpochNumbers(TransactionMachine):
    """Takes an epoch for the same epoch whoever ran it."""

    def _open(self, request: Open) -> list[Instruction]:
        for epoch, run in ((self.folded, self.folded_by), (self.committed, self.committed_by)):
            if request.committed_epoch == epoch:
                request = replace(request, committed_by=run)
        return super()._open(request)


class PreparesWhatIsThere(EpochMachine):
    """Does not wait until every task has a complete attempt."""

    def _choose(self) -> list[DriverInstruction]:
        chosen = choose_attempts(self.owners, self.seals)
        self.owners = {task: self.owners[task] for task in chosen}
        self.choice = frozenset(chosen.values())
        return self._prepare()


class WritesTheManifestEarly(EpochMachine):
    """Does not wait until every worker has prepared."""

    def _answered(self, worker: WorkerId, then: Callable[[], list[DriverInstruction]]) -> list[DriverInstruction]:
        if self.step is Step.PREPARING:
            self.waiting.clear()
        return super()._answered(worker, then)

    def check(self) -> None: ...


WORKER_MUTANTS = [
    KeepsStagedChanges,
    IgnoresGenerations,
    SealsAtOnce,
    PreparesWhatIsNotSealed,
    NeverRollsBack,
    KeepsStateThatIsBehind,
]
DRIVER_MUTANTS = [PreparesWhatIsThere, WritesTheManifestEarly]


def is_found(
    histories: Iterable[History],
    worker_machine: type[TransactionMachine] = TransactionMachine,
    driver_machine: type[EpochMachine] = EpochMachine,
) -> bool:
    for history in histories:
        try:
            run_history(history, worker_machine, driver_machine)
        except (AssertionError, KeyError, TypeError):
            return True
    return False


@pytest.mark.parametrize("mutant", WORKER_MUTANTS)
def test_a_worker_with_a_mistake_is_found(mutant: type[TransactionMachine]) -> None:
    assert is_found(map(draw_history, range(MUTANT_HISTORIES)), worker_machine=mutant)


@pytest.mark.parametrize("mutant", DRIVER_MUTANTS)
def test_a_driver_with_a_mistake_is_found(mutant: type[EpochMachine]) -> None:
    assert is_found(map(draw_history, range(MUTANT_HISTORIES)), driver_machine=mutant)


def test_a_worker_that_tells_epochs_apart_by_their_numbers_only_is_found() -> None:
    assert is_found(map(draw_return, range(TARGETED_HISTORIES)), worker_machine=TrustsEpochNumbers)


def test_a_worker_that_does_not_tell_runs_apart_is_found() -> None:
    assert is_found(map(draw_rerun, range(TARGETED_HISTORIES)), worker_machine=IgnoresRuns)
