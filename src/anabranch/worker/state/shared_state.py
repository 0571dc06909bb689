"""State in a store that workers share: key groups change hands, and their rows stay where they are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping

from anabranch.core.answers import SharedOffer
from anabranch.worker.state.variable_state import VariableState
from anabranch.worker.stores import SharedStore


class SharedState:
    """The key groups of a job that this worker uses in the shared store."""

    def __init__(self, states: Iterable[VariableState], stores: Iterable[SharedStore]) -> None:
        self._states = list(states)
        self._stores = list(stores)
        self._incarnations: dict[int, str] = {}

    @property
    def is_lost(self) -> bool:
        """Whether some key group is of no use any more."""
        return any(store.is_lost for store in self._stores)

    def look(self) -> None:
        """Find out whether the shared store still has everything."""
        for store in self._stores:
            store.look()

    def hand_over(self, groups: Collection[int], epoch: int) -> tuple[SharedOffer, ...]:
        """Leave these key groups to others, as of an epoch; answers where they are."""
        for state in self._states:
            state.fold(epoch)
            state.forget_due(groups)
        versions = self._versions(groups)
        for store in self._stores:
            store.hand_over(groups)
        by_incarnation: dict[str, list[int]] = {}
        for group in sorted(groups):
            incarnation = self._incarnations.pop(group, None)
            if incarnation is not None:
                by_incarnation.setdefault(incarnation, []).append(group)
        return tuple(
            SharedOffer(incarnation=name, groups=tuple(of_it), versions=tuple(versions[group] for group in of_it))
            for name, of_it in by_incarnation.items()
        )

    def take_over(self, wanted: Collection[int], offers: Iterable[SharedOffer], new_incarnation: str) -> frozenset[int]:
        """Use these key groups. Answers with those that are there; the others are empty, and have to be filled."""
        fresh = set(wanted)
        there: set[int] = set()
        for offer in offers:
            offered = fresh.intersection(offer.groups)
            if offered:
                least = dict(zip(offer.groups, offer.versions, strict=True))
                there |= self._go_on(offered, offer.incarnation, least)
                fresh -= offered
        if fresh:
            self._begin(fresh, new_incarnation)
        return frozenset(there)

    def forget(self, groups: Collection[int]) -> None:
        for group in groups:
            self._incarnations.pop(group, None)

    def _go_on(self, groups: Collection[int], incarnation: str, least: Mapping[int, int]) -> frozenset[int]:
        """Use key groups that others have left; answers with those that are whole, and at least of these versions."""
        made = [store.use(groups, incarnation) for store in self._stores]
        versions = self._versions(groups)
        older = {group for group in groups if versions[group] < least[group]}
        # A part of a key group is not enough: what one variable lacks, all lack.
        missing = older.union(*made)
        self._empty(missing, incarnation)
        self._incarnations.update(dict.fromkeys(groups, incarnation))
        return frozenset(groups) - missing

    def _begin(self, groups: Collection[int], incarnation: str) -> None:
        """Use key groups that are empty."""
        made = [store.use(groups, incarnation) for store in self._stores]
        # Whatever an earlier attempt at the same assignment has left there is no state.
        self._empty(frozenset(groups).difference(frozenset.intersection(*made)), incarnation)
        self._incarnations.update(dict.fromkeys(groups, incarnation))

    def _empty(self, groups: Collection[int], incarnation: str) -> None:
        for store in self._stores if groups else ():
            store.drop_groups(groups)
            store.use(groups, incarnation)

    def _versions(self, groups: Collection[int]) -> dict[int, int]:
        """The versions of key groups: the sum of those of all variables, none of which ever falls."""
        total: Counter[int] = Counter()
        for store in self._stores:
            total.update(store.versions(groups))
        return total
