"""Mistakes in machines, executors and the checkpoint that the histories must find: the simulation can fail.

Their own checks are silenced: what is asked is whether the result shows the mistake.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from anabranch.control.membership import change as changing
from anabranch.core import epoch_events, requests, transactions
from anabranch.core.epochs import EpochMachine, Step, choose_attempts
from anabranch.core.ids import WorkerId
from anabranch.core.transactions import TransactionMachine
from anabranch.engine.runner import EpochInput, EpochRunner
from anabranch.worker.server.job import WorkerJob
from anabranch.worker.server.staging import DeferredChanges
from simulated.families import (
    draw_broken,
    draw_losses,
    draw_rerun,
    draw_timed,
    draw_volatile,
)
from simulated.finding import is_found
from simulated.history import draw_history
from simulated.runs import Draw

HANDLE = TransactionMachine.handle
STAGE = TransactionMachine._stage
ANSWERED = EpochMachine._answered
RUN = EpochRunner._run_once

# Most mistakes are found at once; on a busy machine some take minutes.
pytestmark = pytest.mark.timeout(1200)

# -- the worker's machine


def keeps_staged_changes(machine: TransactionMachine) -> list[transactions.WorkerInstruction]:
    """An epoch that is run again finds what its earlier run has staged."""
    machine.running, machine.prepared = None, None
    return []


def seals_at_once(machine: TransactionMachine, request: requests.Write) -> list[transactions.WorkerInstruction]:
    """Changes that come in several pieces count when the first one is there."""
    return STAGE(machine, structs.replace(request, last=True))


def keeps_state_that_is_behind(
    machine: TransactionMachine, request: requests.JobRequest[Any]
) -> list[transactions.WorkerInstruction]:
    return [each for each in HANDLE(machine, request) if not isinstance(each, transactions.ResetState)]


def never_breaks_down(_machine: TransactionMachine) -> None:
    """A worker that could not apply an epoch goes on as if it had."""


@pytest.mark.parametrize(
    ("method", "mistake", "draw"),
    [
        ("_end_run", keeps_staged_changes, draw_rerun),
        ("_stage", seals_at_once, draw_history),
        ("handle", keeps_state_that_is_behind, draw_history),
        ("break_down", never_breaks_down, draw_broken),
    ],
)
def test_a_worker_with_a_mistake_is_found(
    method: str, mistake: Callable[..., Any], draw: Draw, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TransactionMachine, method, mistake)
    assert is_found(draw)


# -- the driver's machine, and what carries out its decisions


def prepares_what_is_there(machine: EpochMachine) -> list[epoch_events.EpochInstruction]:
    """Does not wait until every task has a complete attempt."""
    machine.step = Step.RUNNING
    chosen = choose_attempts(machine.owners, machine.seals)
    machine.owners = {task: machine.owners[task] for task in chosen}
    machine.choice = frozenset(chosen.values())
    return machine._prepare() if machine.sink_written else []


def writes_the_manifest_early(
    machine: EpochMachine, worker: WorkerId, then: Callable[[], list[epoch_events.EpochInstruction]]
) -> list[epoch_events.EpochInstruction]:
    """Does not wait until every worker has prepared."""
    if machine.step is Step.PREPARING:
        machine.waiting.clear()
    return ANSWERED(machine, worker, then)


def reads_the_clock_anew(runner: EpochRunner[Any], epoch: int, given: EpochInput[Any]) -> None:
    """The time of an epoch that is run again is that of its run, and not that of its plan."""
    runs = runner.__dict__.setdefault("runs", Counter())
    later_ms = 60 * runs[epoch]
    runs[epoch] += 1
    RUN(runner, epoch, replace(given, processing_time_ms=given.processing_time_ms + later_ms))


@pytest.mark.parametrize(
    ("owner", "method", "mistake", "draw"),
    [
        (EpochMachine, "_choose", prepares_what_is_there, draw_history),
        (EpochMachine, "_answered", writes_the_manifest_early, draw_history),
        (EpochRunner, "_run_once", reads_the_clock_anew, draw_timed),
    ],
)
def test_a_driver_with_a_mistake_is_found(
    owner: type, method: str, mistake: Callable[..., Any], draw: Draw, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, method, mistake)
    assert is_found(draw)


# -- epochs that are not durable at once


def forgets_at_once(deferred: DeferredChanges, _durable: int) -> None:
    """Whatever is asked, nothing is left for later."""
    deferred.clear()


def writes_what_is_there(job: WorkerJob, _wanted: Collection[Any]) -> list[Any]:
    """Does not miss an epoch that never became part of the state here."""
    return [file for deferred in job._deferred._epochs for file in job._write_files(*deferred)]


@pytest.mark.parametrize(
    ("owner", "method", "mistake"),
    [
        # Either mistake alone does no harm: a worker that forgets is refused, and one that does not look never lacks.
        (DeferredChanges, "forget_up_to", forgets_at_once),
    ],
)
def test_changes_that_are_missing_when_epochs_are_made_durable_are_found(
    owner: type, method: str, mistake: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, method, mistake)
    monkeypatch.setattr(WorkerJob, "_write_deferred", writes_what_is_there)
    assert is_found(draw_volatile)


# -- the checkpoint


def route_is_never_saved(*_: Any, **__: Any) -> None:
    """A route is in force that the checkpoint does not know."""


@pytest.mark.parametrize(
    ("owner", "name", "mistake", "draw"),
    [
        (changing, "save_route", route_is_never_saved, draw_losses),
    ],
)
def test_a_mistake_with_the_checkpoint_is_found(
    owner: Any, name: str, mistake: Callable[..., Any], draw: Draw, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, mistake)
    assert is_found(draw)
