"""The worker's machine within one generation: requests in, the whole list of instructions out."""

from __future__ import annotations

from typing import Any

import pytest

from anabranch.core.answers import Refusal
from anabranch.core.ids import NO_EPOCH, Epoch, Partition, StageNumber, StagePartition
from anabranch.core.requests import Abort, Commit, EpochRequest, Prepare, Read, ReportSeals, Write
from anabranch.core.transactions import (
    AcceptChanges,
    AddLayer,
    AnswerSeals,
    DiscardAttempt,
    DropLayersAfter,
    FoldUpTo,
    Refuse,
    ServeState,
    WriteChangeFiles,
)
from support.transaction_worker import ONE, OTHER, READ, TWO, Worker, committed, run_id


@pytest.fixture
def worker() -> Worker:
    """A worker that a driver of generation 1 has opened for a new job."""
    worker = Worker()
    assert worker.open(NO_EPOCH, None) == []
    return worker


# ------------------------------------------------------------------------------------------- the undisturbed epoch


def test_an_epoch_from_begin_to_commit(worker: Worker) -> None:
    assert worker.begin(0, 0) == []
    assert worker.of(Read, 0, 0, **READ) == [ServeState(NO_EPOCH)]
    assert worker.stage(ONE, sealed=False) == [AcceptChanges(ONE)]
    assert worker.of(ReportSeals, 0, 0) == [AnswerSeals(frozenset())]
    assert worker.seal(ONE, 0, 0) == [AcceptChanges(ONE)]
    assert worker.stage(OTHER) == [AcceptChanges(OTHER)]
    assert worker.of(ReportSeals, 0, 0) == [AnswerSeals(frozenset({ONE, OTHER}))]
    assert worker.prepare(OTHER, ONE) == [WriteChangeFiles(Epoch(0), run_id(0), (ONE, OTHER))]
    assert worker.of(Commit, 0, 0) == [AddLayer(Epoch(0))]
    assert (worker.machine.committed, worker.machine.committed_by, worker.machine.folded) == (0, run_id(0), NO_EPOCH)


def test_beginning_the_next_epoch_folds_the_last_one() -> None:
    worker = committed(1)
    assert worker.begin(1, 1) == [FoldUpTo(Epoch(0))]
    assert worker.of(Read, 1, 1, **READ) == [ServeState(Epoch(0))]


def test_preparing_discards_the_attempts_that_were_not_chosen(worker: Worker) -> None:
    worker.begin(0, 0)
    for staged in (TWO, ONE, OTHER):
        worker.stage(staged)
    assert worker.prepare(ONE, OTHER) == [
        WriteChangeFiles(Epoch(0), run_id(0), (ONE, OTHER)),
        DiscardAttempt(TWO),
    ]


def test_a_worker_without_changes_prepares_and_commits_too(worker: Worker) -> None:
    worker.begin(0, 0)
    assert worker.prepare() == [WriteChangeFiles(Epoch(0), run_id(0), ())]
    assert worker.of(Commit, 0, 0) == [AddLayer(Epoch(0))]


def test_an_attempt_knows_its_task() -> None:
    assert OTHER.task == StagePartition(StageNumber(2), Partition(1))


# ------------------------------------------------------------------------------------------- attempts


def test_an_attempt_that_is_staged_twice_replaces_itself_and_is_open_again(worker: Worker) -> None:
    worker.begin(0, 0)
    worker.stage(ONE)
    assert worker.stage(ONE, sealed=False) == [DiscardAttempt(ONE), AcceptChanges(ONE)]
    assert worker.of(ReportSeals, 0, 0) == [AnswerSeals(frozenset())]


def test_two_attempts_of_one_task_are_kept_side_by_side(worker: Worker) -> None:
    worker.begin(0, 0)
    worker.stage(ONE)
    assert worker.stage(TWO) == [AcceptChanges(TWO)]
    assert worker.of(ReportSeals, 0, 0) == [AnswerSeals(frozenset({ONE, TWO}))]


def test_a_last_part_without_those_before_it_is_refused(worker: Worker) -> None:
    worker.begin(0, 0)
    assert worker.refuses(worker.seal(ONE, 0, 0)) is Refusal.INCOMPLETE


def test_preparing_what_is_not_sealed_is_refused_and_changes_nothing(worker: Worker) -> None:
    worker.begin(0, 0)
    worker.stage(ONE)
    worker.stage(OTHER, sealed=False)
    assert worker.refuses(worker.prepare(ONE, OTHER)) is Refusal.NOT_SEALED
    assert worker.refuses(worker.prepare(TWO)) is Refusal.NOT_SEALED
    assert worker.seal(OTHER, 0, 0) == [AcceptChanges(OTHER)]
    assert worker.prepare(ONE, OTHER) == [WriteChangeFiles(Epoch(0), run_id(0), (ONE, OTHER))]


def test_a_prepared_epoch_takes_no_more_changes(worker: Worker) -> None:
    worker.begin(0, 0)
    worker.stage(ONE)
    worker.prepare(ONE)
    assert worker.refuses(worker.stage(TWO)) is Refusal.WRONG_STEP
    assert worker.refuses(worker.stage(ONE)) is Refusal.WRONG_STEP
    assert worker.refuses(worker.seal(TWO, 0, 0)) is Refusal.WRONG_STEP
    assert worker.refuses(worker.of(Write, 0, 0, **TWO._asdict(), chunk=-1, last=False)) is Refusal.WRONG_STEP
    assert worker.of(Commit, 0, 0) == [AddLayer(Epoch(0))]


# ------------------------------------------------------------------------------------------- repeated requests


def test_repeated_requests_change_nothing(worker: Worker) -> None:
    worker.begin(0, 0)
    worker.stage(ONE, sealed=False)
    worker.seal(ONE)
    assert worker.begin(0, 0) == []
    assert worker.seal(ONE, 0, 0) == []
    first = worker.prepare(ONE)
    assert worker.prepare(ONE) == first
    assert worker.seal(ONE, 0, 0) == []
    assert worker.begin(0, 0) == []
    worker.of(Commit, 0, 0)
    assert worker.of(Commit, 0, 0) == []
    assert worker.begin(0, 0) == []
    assert worker.prepare(ONE) == []
    assert worker.machine.committed == 0


def test_preparing_another_choice_is_refused(worker: Worker) -> None:
    worker.begin(0, 0)
    worker.stage(ONE)
    worker.prepare(ONE)
    assert worker.refuses(worker.prepare()) is Refusal.WRONG_STEP


def test_committing_what_is_not_prepared_is_refused(worker: Worker) -> None:
    worker.begin(0, 0)
    assert worker.refuses(worker.of(Commit, 0, 0)) is Refusal.WRONG_STEP


@pytest.mark.parametrize(
    ("request_type", "fields"),
    [
        (Read, READ),
        (Write, {**ONE._asdict(), "chunk": 0, "last": False}),
        (Write, {**ONE._asdict(), "chunk": 1, "last": True}),
        (ReportSeals, {}),
        (Prepare, {"chosen": frozenset()}),
        (Commit, {}),
    ],
)
@pytest.mark.parametrize(("epoch", "run"), [(0, 0), (2, 1), (1, 0), (1, 2)])
def test_another_epoch_or_run_than_the_current_one_is_refused(
    request_type: type[EpochRequest[Any]], fields: dict[str, object], epoch: int, run: int
) -> None:
    worker = committed(1)
    worker.begin(1, 1)
    worker.stage(ONE, 1, 1)
    answer = worker.of(request_type, epoch, run, **fields)
    if request_type in (Prepare, Commit) and (epoch, run) == (0, 0):
        assert answer == []  # repeated: this very run is committed
    else:
        assert worker.refuses(answer) is Refusal.WRONG_EPOCH
    assert worker.machine.staged == {ONE: True}


def test_a_refusal_says_what_the_worker_expected() -> None:
    worker = committed(2)
    (refuse,) = worker.begin(5, 9)
    assert isinstance(refuse, Refuse)
    assert "epoch 1 is committed, 0 is folded, none runs" in refuse.message


# ------------------------------------------------------------------------------------------- running an epoch again


def test_running_the_epoch_again_discards_everything_staged(worker: Worker) -> None:
    worker.begin(0, 0)
    worker.stage(TWO, sealed=False)
    worker.stage(ONE)
    assert worker.begin(0, 1) == [DiscardAttempt(ONE), DiscardAttempt(TWO)]
    assert worker.refuses(worker.stage(ONE, run=0)) is Refusal.WRONG_EPOCH
    assert worker.refuses(worker.begin(0, 0)) is Refusal.WRONG_EPOCH


def test_running_a_prepared_epoch_again_discards_it(worker: Worker) -> None:
    worker.begin(0, 0)
    worker.stage(ONE)
    worker.prepare(ONE)
    assert worker.begin(0, 1) == [DiscardAttempt(ONE)]
    assert worker.refuses(worker.of(Commit, 0, 0)) is Refusal.WRONG_EPOCH


def test_running_a_committed_epoch_again_drops_its_layer() -> None:
    worker = committed(2)
    assert worker.begin(1, 2) == [DropLayersAfter(Epoch(0))]
    assert worker.of(Read, 1, 2, **READ) == [ServeState(Epoch(0))]


def test_a_folded_epoch_cannot_be_run_again() -> None:
    worker = committed(2)
    worker.begin(2, 2)
    assert worker.refuses(worker.begin(1, 3)) is Refusal.WRONG_EPOCH
    assert worker.machine.running == 2


def test_an_epoch_cannot_be_skipped(worker: Worker) -> None:
    assert worker.refuses(worker.begin(1, 0)) is Refusal.WRONG_EPOCH
    worker.begin(0, 0)
    assert worker.refuses(worker.begin(1, 1)) is Refusal.WRONG_EPOCH
    assert worker.machine.running == 0


def test_abort_discards_everything_and_ends_the_run(worker: Worker) -> None:
    worker.begin(0, 0)
    worker.stage(ONE)
    assert worker.of(Abort, 0, 0) == [DiscardAttempt(ONE)]
    assert worker.of(Abort, 0, 0) == []
    assert worker.refuses(worker.stage(ONE)) is Refusal.WRONG_EPOCH
    assert worker.refuses(worker.begin(0, 0)) is Refusal.WRONG_EPOCH
    assert worker.begin(0, 1) == []


def test_abort_that_overtakes_its_begin_keeps_the_run_from_beginning(worker: Worker) -> None:
    assert worker.of(Abort, 0, 0) == []
    assert worker.refuses(worker.begin(0, 0)) is Refusal.WRONG_EPOCH


def test_late_abort_of_an_earlier_run_changes_nothing(worker: Worker) -> None:
    worker.begin(0, 0)
    worker.begin(0, 1)
    worker.stage(ONE, run=1)
    assert worker.of(Abort, 0, 0) == []
    assert worker.machine.staged == {ONE: True}


def test_a_committed_run_cannot_be_aborted() -> None:
    worker = committed(1)
    assert worker.refuses(worker.of(Abort, 0, 0)) is Refusal.WRONG_STEP
