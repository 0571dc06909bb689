"""The worker's machine when drivers come and go: who is fenced, and which state is kept."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from anabranch.core.answers import Refusal
from anabranch.core.errors import WorkerError
from anabranch.core.ids import NO_EPOCH, Epoch, Run, RunId
from anabranch.core.requests import Abort, Begin, Commit, JobRequest, Read, ReportSeals
from anabranch.core.transactions import AddLayer, AnswerSeals, DiscardAttempt, DropLayersAfter, FoldUpTo, ResetState
from support.transaction_worker import G1, G2, JOB, ONE, READ, Worker, committed, opening, run_id


@pytest.fixture
def worker() -> Worker:
    """A worker that a driver of generation 1 has opened for a new job."""
    worker = Worker()
    assert worker.open(NO_EPOCH, None) == []
    return worker


def test_nothing_works_before_the_job_is_open() -> None:
    worker = Worker()
    assert worker.refuses(worker.begin(0, 0)) is Refusal.NOT_OPEN


def test_a_newer_generation_has_to_open_the_job_first(worker: Worker) -> None:
    worker.begin(0, 0)
    worker.generation = G2
    assert worker.refuses(worker.stage(ONE)) is Refusal.NOT_OPEN
    assert worker.machine.generation == G1


def test_an_older_generation_is_fenced_whatever_it_asks(worker: Worker) -> None:
    worker.generation = G2
    worker.open(NO_EPOCH, None)
    worker.begin(0, 0)
    worker.stage(ONE)
    worker.generation = G1
    assert worker.refuses(worker.open(NO_EPOCH, None)) is Refusal.FENCED
    for answer in (worker.begin(0, 0), worker.stage(ONE), worker.prepare(ONE), worker.of(Commit, 0, 0)):
        assert worker.refuses(answer) is Refusal.FENCED
    for answer in (worker.of(Abort, 0, 0), worker.of(Read, 0, 0, **READ), worker.of(ReportSeals, 0, 0)):
        assert worker.refuses(answer) is Refusal.FENCED
    assert worker.machine.staged == {ONE: True}


def test_a_newer_generation_discards_what_the_older_one_staged(worker: Worker) -> None:
    worker.begin(0, 0)
    worker.stage(ONE)
    worker.prepare(ONE)
    worker.generation = G2
    assert worker.open(NO_EPOCH, None) == [DiscardAttempt(ONE)]
    assert worker.begin(0, 0) == []
    assert worker.of(ReportSeals, 0, 0) == [AnswerSeals(frozenset())]


def test_opening_again_while_an_epoch_runs_changes_nothing() -> None:
    worker = committed(1)
    worker.begin(1, 1)
    worker.stage(ONE, 1, 1)
    assert worker.open(0, run_id(0)) == []
    assert worker.machine.staged == {ONE: True}


def test_opening_at_the_committed_epoch_keeps_the_state_and_folds_it() -> None:
    worker = committed(2)
    worker.generation = G2
    assert worker.open(1, run_id(1)) == [FoldUpTo(Epoch(1))]
    assert worker.begin(2, 0) == []


def test_opening_before_the_committed_epoch_drops_its_layer() -> None:
    worker = committed(2)
    worker.generation = G2
    assert worker.open(0, run_id(0)) == [DropLayersAfter(Epoch(0))]
    assert worker.begin(1, 0) == []


def test_an_epoch_that_was_opened_at_is_not_rolled_back_but_restored() -> None:
    worker = committed(2)
    assert worker.open(1, run_id(1)) == [FoldUpTo(Epoch(1))]
    worker.generation = G2
    assert worker.open(0, run_id(0)) == [ResetState(Epoch(0))]


def test_opening_at_an_epoch_that_is_not_here_resets_the_state() -> None:
    worker = committed(2)
    worker.begin(2, 2)
    worker.stage(ONE, 2, 2)
    worker.generation = G2
    assert worker.open(7, run_id(9)) == [DiscardAttempt(ONE), ResetState(Epoch(7))]
    assert worker.begin(8, 0) == []


def test_a_new_worker_starts_at_the_epoch_it_is_opened_at() -> None:
    worker = Worker()
    assert worker.open(4, run_id(4)) == [ResetState(Epoch(4))]
    assert worker.begin(5, 6) == []


def test_the_same_epoch_from_another_run_is_another_state() -> None:
    worker = committed(2)
    worker.generation = G2
    assert worker.open(1, run_id(5)) == [ResetState(Epoch(1))]


def test_a_worker_that_missed_the_commit_of_what_it_prepared_catches_up() -> None:
    worker = committed(1)
    worker.begin(1, 1)
    worker.stage(ONE, 1, 1)
    worker.prepare(ONE, epoch=1, run=1)
    worker.generation = G2
    assert worker.open(1, run_id(1)) == [AddLayer(Epoch(1)), FoldUpTo(Epoch(1))]


def test_a_worker_that_prepared_another_run_than_the_committed_one_starts_over() -> None:
    worker = committed(1)
    worker.begin(1, 1)
    worker.stage(ONE, 1, 1)
    worker.prepare(ONE, epoch=1, run=1)
    worker.generation = G2
    assert worker.open(1, run_id(2)) == [DiscardAttempt(ONE), ResetState(Epoch(1))]


def test_a_worker_that_fell_behind_within_a_generation_is_reset() -> None:
    worker = committed(1)
    assert worker.open(3, run_id(3)) == [ResetState(Epoch(3))]
    assert worker.machine.run == 0


def test_a_late_open_of_the_same_generation_does_not_turn_back() -> None:
    worker = committed(2)
    assert worker.refuses(worker.open(0, run_id(0))) is Refusal.WRONG_EPOCH
    worker.commit(1, 2)
    assert worker.refuses(worker.open(1, run_id(1))) is Refusal.WRONG_EPOCH
    assert worker.machine.committed_by == run_id(2)


@pytest.mark.parametrize(("epoch", "by"), [(Epoch(3), None), (NO_EPOCH, run_id(0))])
def test_an_epoch_and_its_run_go_together(epoch: Epoch, by: RunId | None) -> None:
    with pytest.raises(WorkerError, match="manifest"):
        opening(G1, epoch, by)


def test_an_unknown_request_is_an_error(worker: Worker) -> None:
    with pytest.raises(WorkerError, match="of one version"):
        worker.ask(JobRequest(job=JOB, generation=G1))


def test_check_finds_a_broken_invariant(worker: Worker) -> None:
    worker.begin(0, 0)
    worker.stage(ONE)
    worker.machine.running = None
    with pytest.raises(AssertionError):
        worker.machine.check()


def test_requests_are_values() -> None:
    request = Begin(job=JOB, generation=G1, epoch=Epoch(0), run=Run(0))
    assert replace(request, run=Run(1)) != request
    assert hash(replace(request, run=Run(0))) == hash(request)
