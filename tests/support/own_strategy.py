"""A migration strategy that does not come with Anabranch, as somebody would add one: lazy, and it counts changes."""

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from anabranch.control import strategies
from anabranch.control.membership.cluster import Cluster
from anabranch.control.membership.rescale import Rescale
from anabranch.control.strategies.lazy import LazyMigration
from anabranch.control.strategies.strategy import RescalableQuery
from anabranch.core.ids import WorkerId

NAME = "counted"


class Counted(LazyMigration):
    """See MigrationStrategy."""

    name = NAME

    def __init__(self, seen: Counter[str]) -> None:
        self._seen = seen

    def rescale(self, query: RescalableQuery, rescale: Rescale) -> None:
        self._seen["asked for"] += 1
        super().rescale(query, rescale)

    def follow(self, cluster: Cluster) -> Mapping[WorkerId, Mapping[str, Any]]:
        self._seen["changed"] += 1
        return super().follow(cluster)


@contextmanager
def registered() -> Iterator[Counter[str]]:
    """The strategy is known meanwhile. Gives how often it was asked for a rescale, and how often one took effect."""
    seen: Counter[str] = Counter()
    strategies.register(NAME, lambda: Counted(seen))
    try:
        yield seen
    finally:
        strategies.unregister(NAME)
