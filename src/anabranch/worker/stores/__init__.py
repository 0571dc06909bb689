"""Stores: where the folded state of a variable lives. Here are their interface, and the registry of their kinds.

A new kind is a module in this package, and a ``StoreKind`` in the registry. Nothing is imported here that a worker of
another kind, a driver or a command does not need.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from anabranch.core.errors import SettingsError
from anabranch.core.settings import Settings

if TYPE_CHECKING:
    from anabranch.core.schemas import StageSpec
    from anabranch.worker.state.rows import Changes, Entries, Keys, Rows, Shape


class Store(Protocol):
    """The state of one variable, without history.

    Several threads may read while one applies changes; a read is right for every key that these do not touch.
    """

    def read(self, keys: Keys) -> Entries:
        """Gives the entries of these keys, ordered by the keys' positions."""

    def apply(self, changes: Changes) -> None:
        """Changes the state. Applying changes twice is the same as once."""

    def make_room(self, entries: int) -> None:
        """Prepares for about this number of further entries, if that pays."""

    def snapshot(self, groups: Collection[int] | None) -> Iterator[Rows]:
        """Gives the rows of these key groups (None: of all) as they are now, whatever changes while they are read."""

    def drop_groups(self, groups: Collection[int]) -> None:
        """Removes all rows of these key groups."""

    def rows(self, groups: Collection[int] | None = None) -> int:
        """Counts the entries of these key groups (None: of all)."""

    def size_bytes(self) -> int:
        """Measures the memory or disk space held."""

    def destroy(self) -> None:
        """Closes the store, and removes what is on disk: it is only a cache of the checkpoint. Twice is no error."""


@runtime_checkable
class SharedStore(Store, Protocol):
    """The state of one variable in a place that the workers of a job share, so that a rescale moves nothing.

    Each key group is written by one worker at a time, the one that uses it, and lives there under an incarnation: a
    short text. A worker that takes a key group over goes on with its incarnation; one that may be torn, because a
    worker was killed while it changed it, is filled again under a new one.
    """

    def use(self, groups: Collection[int], incarnation: str) -> frozenset[int]:
        """Uses these key groups from now on, under this incarnation.

        Returns those of which the shared place has nothing under it: they are empty, and to be filled from the
        checkpoint. What this store used under another incarnation is removed.
        """

    @property
    def is_lost(self) -> bool:
        """Whether some key group in use is of no use any more: it has to be filled again under another incarnation."""

    def look(self) -> None:
        """Finds out whether all key groups in use are still there: see ``is_lost``. An error if nothing answers."""

    def versions(self, groups: Collection[int]) -> dict[int, int]:
        """Tells the versions of those of these key groups that are in use. Every change of a key group raises its."""

    def hand_over(self, groups: Collection[int]) -> None:
        """Forgets these key groups, and leaves them where they are: another worker goes on with them."""


class Backend(Protocol):
    """The stores of one kind on one worker."""

    def open(self, shape: Shape, job: str, stage: StageSpec, variable: str) -> Store:
        """Opens an empty store for a state variable of a job."""

    def close_job(self, job: str) -> None:
        """Frees what this worker has for a job whose stores are all destroyed."""

    def wipe(self, job: str) -> None:
        """Removes everything of a job that workers share. None may be using it."""


@dataclass(frozen=True)
class StorePlace:
    """Where the stores of a worker are."""

    #: Where a store on disk puts its files; None if there is none.
    directory: Path | None = None
    #: Where the store is that workers share.
    url: str = ""


@dataclass(frozen=True)
class StoreKind:
    """What a kind of store needs and can do."""

    name: str
    #: Makes the stores of a worker. What the kind needs is imported only now.
    backend: Callable[[StorePlace], Backend]
    #: Whether stores have files, which need a directory of the worker's own.
    needs_directory: bool = False
    #: Whether stores are SharedStores.
    is_shared: bool = False
    #: Where the shared store is, as users have set it.
    url_of: Callable[[Settings], str] = lambda _: ""
    #: The package that is needed, if it does not come with Anabranch, and the extra that brings it.
    package: str = ""
    extra: str = ""

    def check_installed(self) -> None:
        """Refuses a kind whose package is not here."""
        if self.package and find_spec(self.package) is None:
            raise SettingsError(
                f"The store {self.name} needs the package {self.package}, which is not installed: "
                f"pip install 'anabranch[{self.extra}]'."
            )


def _memory(place: StorePlace) -> Backend:
    from anabranch.worker.stores.memory import MemoryBackend

    return MemoryBackend(place)


def _rocksdb(place: StorePlace) -> Backend:
    from anabranch.worker.stores.rocksdb import RocksBackend

    return RocksBackend(place)


def _redis(place: StorePlace) -> Backend:
    from anabranch.worker.stores.redis import RedisBackend

    return RedisBackend(place)


_KINDS: dict[str, StoreKind] = {}
#: All kinds by their names, as users write them in ``anabranch.store``.
STORES: Mapping[str, StoreKind] = MappingProxyType(_KINDS)


def register(kind: StoreKind) -> None:
    """Makes a kind of store known. Workers and the driver of a job have to know the same kinds."""
    _KINDS[kind.name] = kind


def unregister(name: str) -> None:
    """Forgets a kind of store that was made known, for example by a test."""
    del _KINDS[name]


register(StoreKind("memory", _memory))
register(StoreKind("rocksdb", _rocksdb, needs_directory=True))
register(
    StoreKind(
        "redis",
        _redis,
        is_shared=True,
        url_of=lambda settings: settings.redis_location,
        package="redis",
        extra="redis",
    )
)


def store_kind(name: str) -> StoreKind:
    """The kind of this name."""
    if name not in STORES:
        raise SettingsError(f"There is no store of the kind {name!r}; choose one of {', '.join(STORES)}.")
    return STORES[name]
