"""Mistakes in machines and holdings that the histories must find: the simulation can fail.

Their own checks are silenced: what is asked is whether the result shows the mistake.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from epoch_families import draw_broken_reads, draw_losses, draw_rerun, draw_return, draw_upkeep
from epoch_finding import HISTORIES_MAX, is_found
from epoch_history import History, draw_history

from anabranch.checkpoint import paths, statefiles
from anabranch.checkpoint.storage import Storage
from anabranch.core.epoch_events import Instruction as DriverInstruction
from anabranch.core.epochs import EpochMachine, Step, choose_attempts
from anabranch.core.ids import Epoch, Generation, WorkerId
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
from anabranch.worker.adoption import Adoption
from anabranch.worker.holdings import Holdings
from anabranch.worker.origins import Hashes, Origin, Selection


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
        self.step = Step.RUNNING
        chosen = choose_attempts(self.owners, self.seals)
        self.owners = {task: self.owners[task] for task in chosen}
        self.choice = frozenset(chosen.values())
        return self._prepare() if self.sink_written else []


class WritesTheManifestEarly(EpochMachine):
    """Does not wait until every worker has prepared."""

    def _answered(self, worker: WorkerId, then: Callable[[], list[DriverInstruction]]) -> list[DriverInstruction]:
        if self.step is Step.PREPARING:
            self.waiting.clear()
        return super()._answered(worker, then)

    def check(self) -> None: ...


WORKER_MISTAKES = [
    (KeepsStagedChanges, draw_history),
    (IgnoresGenerations, draw_history),
    (IgnoresRuns, draw_rerun),
    (SealsAtOnce, draw_history),
    (PreparesWhatIsNotSealed, draw_losses),
    (NeverRollsBack, draw_history),
    (KeepsStateThatIsBehind, draw_history),
    (TrustsEpochNumbers, draw_return),
]


@pytest.mark.parametrize(("mistake", "draw"), WORKER_MISTAKES)
def test_a_worker_with_a_mistake_is_found(mistake: type[TransactionMachine], draw: Callable[[int], History]) -> None:
    assert is_found(map(draw, range(HISTORIES_MAX)), worker_machine=mistake)


@pytest.mark.parametrize("mistake", [PreparesWhatIsThere, WritesTheManifestEarly])
def test_a_driver_with_a_mistake_is_found(mistake: type[EpochMachine]) -> None:
    assert is_found(map(draw_history, range(HISTORIES_MAX)), driver_machine=mistake)


# Mistakes in what brings key groups from the checkpoint.


def fetches_nothing(_adoption: Adoption, _hashes: Hashes, _keys: Any = None) -> None:
    """Keys are read and written before their state is here."""


def drains_over_newer_state(adoption: Adoption, groups: Collection[int]) -> None:
    """The drain brings slots that have been fetched, and maybe changed since."""
    fetched = adoption._fetched
    adoption._fetched = np.zeros_like(fetched)
    try:
        DRAIN(adoption, groups)
    finally:
        adoption._fetched = fetched


def goes_on_with_dropped_groups(_adoption: Adoption, _groups: Collection[int]) -> None:
    """Groups that went to another worker still arrive."""


def keeps_dropped_state(holdings: Holdings, groups: frozenset[int]) -> None:
    """Groups that come back find what they left behind."""
    for adoption in holdings._all():
        adoption.forget(groups)


DRAIN = Adoption.drain


@pytest.mark.parametrize(
    ("owner", "method", "mistake"),
    [
        (Adoption, "fetch", fetches_nothing),
        (Adoption, "drain", drains_over_newer_state),
        (Adoption, "forget", goes_on_with_dropped_groups),
        (Holdings, "_drop", keeps_dropped_state),
    ],
)
def test_a_mistake_in_adoptions_is_found(
    owner: type, method: str, mistake: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, method, mistake)
    assert is_found(map(draw_losses, range(HISTORIES_MAX)))


def stays_with_old_files(_adoption: Adoption, _origin: Origin) -> None:
    """Key groups that are on their way go on coming from files that may be deleted."""


def loads_as_it_reads(adoption: Adoption, selection: Selection) -> list[Any]:
    """A read that breaks leaves keys behind that a newer snapshot no longer mentions."""
    for changes in adoption._origin.select(selection):
        adoption._state.load(changes if adoption._known is None else adoption._known.without(changes))
    return []


@pytest.mark.parametrize(
    ("method", "mistake", "histories"),
    [
        ("redirect", stays_with_old_files, map(draw_upkeep, range(HISTORIES_MAX))),
        ("_bring", loads_as_it_reads, map(draw_broken_reads, (61, 252, 426))),
    ],
)
def test_a_mistake_in_reading_files_that_others_clean_up_is_found(
    method: str, mistake: Callable[..., Any], histories: Iterable[History], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Adoption, method, mistake)
    assert is_found(histories)


# Mistakes in reading the checkpoint.


def oldest_writers(storage: Storage) -> dict[Epoch, Generation]:
    """Takes an epoch from the first driver that wrote it, which may not be the one whose run went on."""
    entries = (paths.manifest_of(name) for name in storage.list_names(paths.MANIFESTS))
    return dict(sorted((entry for entry in entries if entry is not None), reverse=True))


def test_taking_an_epoch_from_an_older_driver_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statefiles, "newest_writers", oldest_writers)
    assert is_found(map(draw_history, range(HISTORIES_MAX)))
