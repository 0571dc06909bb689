"""A worker's machine under test, with short ways to say what a driver says to it."""

from __future__ import annotations

from typing import Any

from anabranch.core.answers import Refusal
from anabranch.core.ids import (
    NO_EPOCH,
    Attempt,
    Epoch,
    Generation,
    JobId,
    Partition,
    Run,
    RunId,
    StageAttempt,
    StageNumber,
)
from anabranch.core.requests import Begin, Commit, EpochRequest, JobRequest, OpenJob, Prepare, Write
from anabranch.core.transactions import Refuse, TransactionMachine, WorkerInstruction

JOB = JobId("0" * 32)
#: What a Read needs besides, whatever it is.
READ: dict[str, Any] = {"stage": StageNumber(2), "groups": ()}
G1, G2 = Generation(1), Generation(2)


def attempt(number: int, *, partition: int = 0, stage: int = 2) -> StageAttempt:
    return StageAttempt(StageNumber(stage), Partition(partition), Attempt(number))


def run_id(run: int, generation: Generation = G1) -> RunId:
    return RunId(generation, Run(run))


ONE, TWO, OTHER = attempt(1), attempt(2), attempt(3, partition=1)


def opening(generation: Generation, epoch: Epoch, by: RunId | None) -> OpenJob:
    return OpenJob(
        job=JOB,
        generation=generation,
        key_groups=8,
        committed_epoch=epoch,
        committed_by=by,
        stages=(),
        checkpoint="memory",
    )


class Worker:
    """A machine under test, checked after every request, with short ways to say what a driver says."""

    def __init__(self) -> None:
        self.machine = TransactionMachine()
        self.generation = G1

    def ask(self, request: JobRequest[Any]) -> list[WorkerInstruction]:
        instructions = self.machine.handle(request)
        self.machine.check()
        return instructions

    def of(self, request: type[EpochRequest[Any]], epoch: int, run: int, **fields: object) -> list[WorkerInstruction]:
        filled = request(job=JOB, generation=self.generation, epoch=Epoch(epoch), run=Run(run), **fields)
        return self.ask(filled)

    def open(self, epoch: int, by: RunId | None) -> list[WorkerInstruction]:
        return self.ask(opening(self.generation, Epoch(epoch), by))

    def begin(self, epoch: int, run: int) -> list[WorkerInstruction]:
        return self.of(Begin, epoch, run)

    def stage(
        self, staged: StageAttempt, epoch: int = 0, run: int = 0, *, sealed: bool = True
    ) -> list[WorkerInstruction]:
        """The first part of an attempt's changes, and the last one if that seals it."""
        return self.of(Write, epoch, run, **staged._asdict(), chunk=0, last=sealed)

    def seal(self, staged: StageAttempt, epoch: int = 0, run: int = 0) -> list[WorkerInstruction]:
        """The second and last part of an attempt's changes."""
        return self.of(Write, epoch, run, **staged._asdict(), chunk=1, last=True)

    def prepare(self, *chosen: StageAttempt, epoch: int = 0, run: int = 0) -> list[WorkerInstruction]:
        return self.of(Prepare, epoch, run, chosen=frozenset(chosen))

    def commit(self, epoch: int, run: int) -> list[WorkerInstruction]:
        """A whole epoch, from begin to commit."""
        self.begin(epoch, run)
        self.stage(ONE, epoch, run)
        self.prepare(ONE, epoch=epoch, run=run)
        return self.of(Commit, epoch, run)

    def refuses(self, instructions: list[WorkerInstruction]) -> Refusal:
        (refuse,) = instructions
        assert isinstance(refuse, Refuse)
        assert refuse.message
        return refuse.reason


def committed(epochs: int) -> Worker:
    """A worker that has committed this many epochs, epoch n by run n; the last one is a layer."""
    worker = Worker()
    worker.open(NO_EPOCH, None)
    for epoch in range(epochs):
        worker.commit(epoch, epoch)
    return worker
