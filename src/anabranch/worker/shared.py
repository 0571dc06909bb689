"""State in a store that workers share: key groups change hands, and their rows stay where they are."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from anabranch.core.errors import WorkerError
from anabranch.worker.layers import VariableState
from anabranch.worker.stores.redis import RedisConnection, RedisStore, delete_prefix


def prefix_of(job: str) -> str:
    """What the names of everything that belongs to a job begin with."""
    return f"anabranch:{job}"


def wipe(connection: RedisConnection, job: str) -> None:
    """Remove all that is left of a job. No worker may be using it."""
    delete_prefix(connection, prefix_of(job))


class SharedState:
    """The key groups of a job that this worker uses in the shared store."""

    def __init__(self, states: Iterable[VariableState], stores: Iterable[RedisStore]) -> None:
        self._states = list(states)
        self._stores = list(stores)
        self._incarnations: dict[int, str] = {}

    def hand_over(self, groups: Collection[int], epoch: int) -> list[dict[str, Any]]:
        """Leave these key groups to others, as of an epoch; answers where they are: {"incarnation", "groups"}."""
        for state in self._states:
            state.fold(epoch)
            state.forget_due(groups)
        for store in self._stores:
            store.hand_over(groups)
        by_incarnation: dict[str, list[int]] = {}
        for group in sorted(groups):
            incarnation = self._incarnations.pop(group, None)
            if incarnation is not None:
                by_incarnation.setdefault(incarnation, []).append(group)
        return [{"incarnation": name, "groups": of_it} for name, of_it in by_incarnation.items()]

    def take_over(
        self, wanted: Collection[int], offers: Iterable[Mapping[str, Any]], new_incarnation: str
    ) -> frozenset[int]:
        """Use these key groups. Answers with those that are there; the others are empty, and have to be filled."""
        fresh = set(wanted)
        there: set[int] = set()
        for offer in offers:
            offered = fresh.intersection(offer["groups"])
            if offered:
                missing = self._use(offered, offer["incarnation"])
                there |= offered - missing
                fresh -= offered
        if fresh:
            self._use(fresh, new_incarnation)
        return frozenset(there)

    def forget(self, groups: Collection[int]) -> None:
        for group in groups:
            self._incarnations.pop(group, None)

    def _use(self, groups: Collection[int], incarnation: str) -> frozenset[int]:
        missing: frozenset[int] = frozenset()
        for store in self._stores:
            missing |= store.use(groups, incarnation)
        if missing:
            # A part of a key group is not enough: what one variable lacks, all lack.
            for store in self._stores:
                store.drop_groups(missing)
                store.use(missing, incarnation)
        self._incarnations.update(dict.fromkeys(groups, incarnation))
        return missing


def refuse_shared(offers: Collection[Any]) -> None:
    if offers:
        raise WorkerError(
            "This worker keeps state for itself, and was given key groups of a shared store. Start all workers of a "
            "job with the same --store."
        )
