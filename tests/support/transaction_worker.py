"""A worker's machine under test, with short ways to say what a driver says to it."""

from __future__ import annotations

from anabranch.core.ids import NO_EPOCH, Attempt, Epoch, Generation, Partition, StageNumber
from anabranch.core.requests import (
    Begin,
    Commit,
    EpochRequest,
    Instruction,
    Open,
    Prepare,
    Refusal,
    Refuse,
    Request,
    Run,
    RunId,
    Stage,
    StageAttempt,
)
from anabranch.core.transactions import TransactionMachine

G1, G2 = Generation(1), Generation(2)


def attempt(number: int, *, partition: int = 0, stage: int = 2) -> StageAttempt:
    return StageAttempt(StageNumber(stage), Partition(partition), Attempt(number))


def run_id(run: int, generation: Generation = G1) -> RunId:
    return RunId(generation, Run(run))


ONE, TWO, OTHER = attempt(1), attempt(2), attempt(3, partition=1)


class Worker:
    """A machine under test, checked after every request, with short ways to say what a driver says."""

    def __init__(self) -> None:
        self.machine = TransactionMachine()
        self.generation = G1

    def ask(self, request: Request) -> list[Instruction]:
        instructions = self.machine.handle(request)
        self.machine.check()
        return instructions

    def of(self, request: type[EpochRequest], epoch: int, run: int, **fields: object) -> list[Instruction]:
        filled = request(generation=self.generation, epoch=Epoch(epoch), run=Run(run), **fields)
        return self.ask(filled)

    def open(self, epoch: int, by: RunId | None) -> list[Instruction]:
        return self.ask(Open(generation=self.generation, committed_epoch=Epoch(epoch), committed_by=by))

    def begin(self, epoch: int, run: int) -> list[Instruction]:
        return self.of(Begin, epoch, run)

    def stage(self, staged: StageAttempt, epoch: int = 0, run: int = 0, *, sealed: bool = True) -> list[Instruction]:
        return self.of(Stage, epoch, run, attempt=staged, sealed=sealed)

    def prepare(self, *chosen: StageAttempt, epoch: int = 0, run: int = 0) -> list[Instruction]:
        return self.of(Prepare, epoch, run, chosen=frozenset(chosen))

    def commit(self, epoch: int, run: int) -> list[Instruction]:
        """A whole epoch, from begin to commit."""
        self.begin(epoch, run)
        self.stage(ONE, epoch, run)
        self.prepare(ONE, epoch=epoch, run=run)
        return self.of(Commit, epoch, run)

    def refuses(self, instructions: list[Instruction]) -> Refusal:
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
