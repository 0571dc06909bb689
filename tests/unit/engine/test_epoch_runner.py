"""The epoch runner with a coordinator that loses workers: how often epochs are run again, and when that has to end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from anabranch.core.errors import EpochError, FencedError, LostWorkerError
from anabranch.core.reports import EpochReport
from anabranch.engine.runner import EpochInput, EpochRunner, Stopwatch, complete_missing
from anabranch.engine.tasks import TaskEpoch
from support.epoch_reports import epoch_report


@dataclass
class Job:
    """Stands for coordinator and tasks: some runs of epochs lose a worker, and the state returns to the durable one."""

    #: How often a worker is lost in an epoch, and which epochs are durable as soon as they are run for the n-th time.
    losses: Counter[int]
    durable_with_run: Mapping[int, int] = field(default_factory=dict)
    runs: Counter[int] = field(default_factory=Counter)
    #: The epoch of which Spark never runs a task, and whether a newer driver takes over when a worker is lost.
    incomplete_epoch: int | None = None
    is_replaced: bool = False
    aborted: list[int] = field(default_factory=list)
    committed_epoch: int = -1
    durable_epoch: int = -1
    worker_count: int = 1

    def begin(self, epoch: int) -> int:
        assert epoch == self.committed_epoch + 1
        self.runs[epoch] += 1
        return self.runs.total()

    def run(self, rows: str, epoch: TaskEpoch, clock: Stopwatch, *, repeated: bool) -> int | None:
        del clock, repeated
        assert rows == f"rows of {epoch.epoch}"
        if self.losses[epoch.epoch]:
            self.losses[epoch.epoch] -= 1
            raise LostWorkerError(f"worker-{self.runs.total()} cannot be reached.")
        complete_missing(self, epoch.epoch, lambda _missing: None)
        return None

    def commit(self, epoch: int) -> EpochReport:
        self.committed_epoch = epoch
        if self.runs[epoch] >= self.durable_with_run.get(epoch, 1000):
            self.durable_epoch = epoch
        return epoch_report(epoch)

    def committed(self, epoch: int) -> None:
        assert epoch == self.committed_epoch

    def recover(self, epoch: int) -> bool:
        if epoch == self.incomplete_epoch:
            return False
        self.committed_epoch = self.durable_epoch
        return True

    def lost_lately(self, changes: int) -> list[str]:
        return [f"worker-{number}" for number in range(changes)]

    def abort(self, epoch: int) -> None:
        self.aborted.append(epoch)

    def fenced(self) -> FencedError | None:
        return FencedError("A newer driver has taken over.") if self.is_replaced else None

    def accesses(self) -> Mapping[int, Any]:
        return {}

    def missing(self, epoch: int) -> Mapping[int, frozenset[int]]:
        return {1: frozenset({2})} if epoch == self.incomplete_epoch else {}


def run(job: Job, epochs: int = 4) -> None:
    runner: EpochRunner[str] = EpochRunner(job, job, delays_ms={})
    for epoch in range(epochs):
        runner.run(epoch, EpochInput(f"rows of {epoch}", 7))


def test_epochs_that_are_not_durable_run_again_with_the_one_that_lost_a_worker() -> None:
    job = Job(Counter({3: 2}))
    run(job)
    assert job.runs == {0: 3, 1: 3, 2: 3, 3: 3}


def test_an_epoch_that_loses_workers_without_end_ends_the_query_though_those_before_it_run_again() -> None:
    job = Job(Counter({3: 100}))
    with pytest.raises(EpochError, match=r"Epoch 3 was run 5 times, .*workers were lost \(worker-0, .*see their logs"):
        run(job)
    assert job.runs == {0: 5, 1: 5, 2: 5, 3: 5}


def test_a_job_with_more_workers_may_lose_more_of_them() -> None:
    with pytest.raises(EpochError, match="Epoch 3 was run 9 times"):
        run(Job(Counter({3: 100}), worker_count=3))


def test_runs_count_anew_when_an_epoch_has_become_durable_meanwhile() -> None:
    """With four losses at each of four places, none of which would be one too many."""
    job = Job(Counter({3: 16}), durable_with_run={0: 4, 1: 8, 2: 12})
    run(job)
    assert (job.committed_epoch, job.losses.total()) == (3, 0)
    with pytest.raises(EpochError, match="Epoch 3 was run 5 times"):
        run(Job(Counter({3: 17}), durable_with_run={0: 4, 1: 8, 2: 12}))


def test_an_epoch_of_which_spark_never_runs_all_tasks_is_aborted_and_ends_the_query() -> None:
    job = Job(Counter(), incomplete_epoch=2)
    with pytest.raises(
        EpochError, match=r"Epoch 2 cannot be completed.*\{1: frozenset\(\{2\}\)\}.*Start the query again"
    ):
        run(job)
    assert (job.committed_epoch, job.aborted) == (1, [2])
    assert job.runs == {0: 1, 1: 1, 2: 1}


def test_whatever_fails_after_a_newer_driver_took_over_is_put_down_to_that_and_runs_no_more() -> None:
    job = Job(Counter({1: 1}), is_replaced=True)
    with pytest.raises(FencedError, match="newer driver") as caught:
        run(job)
    assert isinstance(caught.value.__cause__, LostWorkerError)
    assert (job.committed_epoch, job.aborted) == (0, [1])
    assert job.runs == {0: 1, 1: 1}
