"""Counts what machines, holdings and migrations come to in a history, so that tests can tell that all of it is reached.

Every observer stands around a method of production and does nothing but count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from functools import wraps
from typing import Any

import numpy as np

from anabranch.control.epochs import maintenance
from anabranch.core import epoch_events, requests, transactions
from anabranch.core.epochs import EpochMachine
from anabranch.core.errors import AnabranchError, FencedError, WorkerError
from anabranch.core.keygroups import key_groups_of
from anabranch.core.transactions import TransactionMachine
from anabranch.worker.server.job import WorkerJob
from anabranch.worker.transfer.group_ownership import GroupOwnership
from anabranch.worker.transfer.group_transfer import GroupTransfer
from simulated.shortcuts import Place

Seen = Counter[str]


def observers(seen: Seen) -> list[Place]:
    """Stand around what is in these places when they are put there."""
    return [
        _around(EpochMachine, "handle", _driver_decides(seen)),
        _around(TransactionMachine, "handle", _worker_decides(seen)),
        _around(GroupOwnership, "assign", _assigned(seen)),
        _around(GroupOwnership, "release", _released(seen)),
        _around(GroupOwnership, "fetch", _fetched(seen)),
        _around(GroupOwnership, "fetch_frozen", _asked_for_keys(seen)),
        _around(GroupOwnership, "complete_frozen", _asked_for_groups(seen)),
        _around(GroupTransfer, "_load_fetched", _from_peers(seen, "fetched from a frozen copy")),
        _around(GroupTransfer, "_load_whole", _loaded_whole(seen)),
        _around(GroupTransfer, "_load_drained", _from_peers(seen, "drained from a frozen copy")),
        _around(GroupTransfer, "_fall_back", _counted(seen, "fell back to the checkpoint")),
        _around(GroupTransfer, "_stream_from", _breaking(seen, "a drain from a frozen copy breaks")),
        _around(WorkerJob, "_check_assignment", _breaking(seen, "an older assignment is refused")),
        _around(WorkerJob, "release", _asked_to_release(seen)),
        _around(WorkerJob, "flush", _counted(seen, "a worker flushes")),
        _around(WorkerJob, "complete", _counted(seen, "complete before the next epoch")),
        _around(maintenance, "clean_up", _cleaned_up(seen)),
        _around(maintenance.Maintenance, "_clean_up", _fenced_upkeep(seen)),
    ]


def _around(owner: Any, name: str, observe: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Place:
    known = vars(owner)[name]
    return owner, name, wraps(known)(observe(known))


def _counted(seen: Seen, what: str) -> Callable[..., Any]:
    def observe(known: Callable[..., Any]) -> Callable[..., Any]:
        def observed(*arguments: Any, **named: Any) -> Any:
            seen[what] += 1
            return known(*arguments, **named)

        return observed

    return observe


def _from_peers(seen: Seen, what: str) -> Callable[..., Any]:
    """Counts what an old owner gives."""

    def observe(known: Callable[..., Any]) -> Callable[..., Any]:
        def observed(transfer: GroupTransfer, *arguments: Any) -> Any:
            seen[what] += not transfer._reads_checkpoint
            return known(transfer, *arguments)

        return observed

    return observe


def _breaking(seen: Seen, what: str) -> Callable[..., Any]:
    """Counts those that raise an error."""

    def observe(known: Callable[..., Any]) -> Callable[..., Any]:
        def observed(*arguments: Any, **named: Any) -> Any:
            try:
                return known(*arguments, **named)
            except AnabranchError:
                seen[what] += 1
                raise

        return observed

    return observe


def _driver_decides(seen: Seen) -> Callable[..., Any]:
    def observe(known: Callable[..., Any]) -> Callable[..., Any]:
        def observed(machine: EpochMachine, event: epoch_events.EpochEvent) -> Any:
            instructions = known(machine, event)
            for instruction in instructions:
                seen[type(instruction).__name__] += 1
                if isinstance(instruction, epoch_events.FailEpoch):
                    seen[f"FailEpoch {instruction.reason}"] += 1
                elif isinstance(instruction, epoch_events.FinishEpoch) and instruction.lost:
                    seen["FinishEpoch with a lost worker"] += 1
            return instructions

        return observed

    return observe


def _worker_decides(seen: Seen) -> Callable[..., Any]:
    def observe(known: Callable[..., Any]) -> Callable[..., Any]:
        def observed(machine: TransactionMachine, request: requests.JobRequest[Any]) -> Any:
            instructions = known(machine, request)
            for instruction in instructions:
                seen[type(instruction).__name__] += 1
                if isinstance(instruction, transactions.Refuse):
                    seen[f"Refuse {instruction.reason}"] += 1
                elif isinstance(instruction, transactions.AddLayer) and isinstance(request, requests.OpenJob):
                    seen["caught up with a lost commit"] += 1
                elif isinstance(instruction, transactions.DropLayersAfter) and isinstance(request, requests.Begin):
                    seen["rolled back to run an epoch again"] += 1
            return instructions

        return observed

    return observe


def _assigned(seen: Seen) -> Callable[..., Any]:
    def observe(known: Callable[..., Any]) -> Callable[..., Any]:
        def observed(
            ownership: GroupOwnership, groups: Collection[int], sources: Any, *, freeze_as_of: int | None = None
        ) -> Any:
            frozen, arriving = ownership.frozen, ownership._all()
            if any(each.pending for each in arriving):
                seen["assigned while groups are pending"] += 1
            if any(each.pending for each in arriving if each.is_from_peer):
                seen["assigned while groups come from peers"] += 1
            adopted, left = known(ownership, groups, sources, freeze_as_of=freeze_as_of)
            seen["groups adopted"] += len(adopted)
            if freeze_as_of is None:
                seen["kept groups are dropped for a new driver"] += bool(frozen)
                seen["groups dropped"] += len(left)
            else:
                seen["groups frozen"] += len(left)
                returned = frozen.keys() - ownership.frozen.keys()
                seen["a group returns to where it is kept"] += len(returned)
                seen["a group returns unchanged to where it is kept"] += len(returned - adopted)
            return adopted, left

        return observed

    return observe


def _released(seen: Seen) -> Callable[..., Any]:
    def observe(known: Callable[..., Any]) -> Callable[..., Any]:
        def observed(ownership: GroupOwnership, kept: Any) -> None:
            known(ownership, kept)
            seen["kept groups are released"] += bool(kept)

        return observed

    return observe


def _fetched(seen: Seen) -> Callable[..., Any]:
    def observe(known: Callable[..., Any]) -> Callable[..., Any]:
        def observed(ownership: GroupOwnership, *arguments: Any) -> None:
            try:
                known(ownership, *arguments)
            except WorkerError as error:
                seen["a task reads by an old route"] += "old route" in str(error)
                raise

        return observed

    return observe


def _asked_for_keys(seen: Seen) -> Callable[..., Any]:
    def observe(known: Callable[..., Any]) -> Callable[..., Any]:
        def observed(ownership: GroupOwnership, variable: Any, hashes: Any, keys: Any, as_of: int) -> None:
            asked = set(np.unique(key_groups_of(hashes, ownership._key_groups)).tolist())
            seen["a chain of two sources"] += bool(asked & ownership.pending(variable))
            known(ownership, variable, hashes, keys, as_of)

        return observed

    return observe


def _asked_for_groups(seen: Seen) -> Callable[..., Any]:
    def observe(known: Callable[..., Any]) -> Callable[..., Any]:
        def observed(ownership: GroupOwnership, variable: Any, groups: Collection[int], as_of: int) -> None:
            seen["a chain of two sources"] += bool(set(groups) & ownership.pending(variable))
            known(ownership, variable, groups, as_of)

        return observed

    return observe


def _loaded_whole(seen: Seen) -> Callable[..., Any]:
    def observe(known: Callable[..., Any]) -> Callable[..., Any]:
        def observed(transfer: GroupTransfer, pieces: Any, note: Any) -> None:
            if not transfer._reads_checkpoint:
                on_demand = note.__name__ == "note_fetched"
                seen["due keys fetched from a frozen copy" if on_demand else "prefetched from a frozen copy"] += 1
            known(transfer, pieces, note)

        return observed

    return observe


def _asked_to_release(seen: Seen) -> Callable[..., Any]:
    def observe(known: Callable[..., Any]) -> Callable[..., Any]:
        def observed(job: WorkerJob, request: Any) -> Any:
            answer = known(job, request)
            seen["a release comes after a newer assignment"] += (request.generation, request.number) != job._assignment
            return answer

        return observed

    return observe


def _cleaned_up(seen: Seen) -> Callable[..., Any]:
    def observe(known: Callable[..., Any]) -> Callable[..., Any]:
        def observed(storage: Any, **about: Any) -> Any:
            cleaned = known(storage, **about)
            seen["deleted by a clean-up"] += len(list(cleaned.deleted))
            seen["clean-up while files are in use"] += bool(about["in_use"])
            return cleaned

        return observed

    return observe


def _fenced_upkeep(seen: Seen) -> Callable[..., Any]:
    def observe(known: Callable[..., Any]) -> Callable[..., Any]:
        def observed(keeper: Any, committed: Any) -> None:
            try:
                known(keeper, committed)
            except FencedError:
                seen["upkeep stopped by FencedError"] += 1
                raise

        return observed

    return observe
