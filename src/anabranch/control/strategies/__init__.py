"""Migration strategies: how a running query is rescaled, and how state follows key groups to their new owners.

A new strategy is a module in this package, and a line in the registry.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from anabranch.control.strategies.eager import EagerMigration
from anabranch.control.strategies.lazy import LazyMigration
from anabranch.control.strategies.remote import RemoteMigration
from anabranch.control.strategies.restart import RestartMigration
from anabranch.control.strategies.strategy import MigrationStrategy
from anabranch.core.settings import check_choice

_KINDS: dict[str, Callable[[], MigrationStrategy]] = {}
#: What makes a strategy for a query, by the name that users write in ``anabranch.migration``.
MIGRATIONS: Mapping[str, Callable[[], MigrationStrategy]] = MappingProxyType(_KINDS)


def register(name: str, make: Callable[[], MigrationStrategy]) -> None:
    """Makes a strategy known."""
    _KINDS[name] = make


def unregister(name: str) -> None:
    """Forgets a strategy that was made known, for example by a test."""
    del _KINDS[name]


register(LazyMigration.name, LazyMigration)
register(EagerMigration.name, EagerMigration)
register(RestartMigration.name, RestartMigration)


def strategy_of(name: str, *, store_is_shared: bool = False) -> MigrationStrategy:
    """The strategy of one query."""
    check_choice("migration", name, MIGRATIONS)
    chosen = MIGRATIONS[name]()
    return RemoteMigration(chosen) if store_is_shared else chosen
