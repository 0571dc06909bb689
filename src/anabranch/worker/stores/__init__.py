"""Stores: where the folded state of a variable lives, in memory or on disk, behind one interface."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from anabranch.core.errors import SettingsError
from anabranch.core.schemas import Layout
from anabranch.worker.state.rows import Changes, Entries, Keys, Rows, VariableCodec

if TYPE_CHECKING:
    from anabranch.worker.stores.redis import RedisConnection

KINDS = ("memory", "rocksdb", "redis")


class Store(Protocol):
    """The state of one variable, without history.

    Several threads may read while one applies changes; a read is right for every key that these do not touch.
    """

    def read(self, keys: Keys) -> Entries:
        """The entries of these keys, ordered by the keys' positions."""

    def apply(self, changes: Changes) -> None:
        """Change the state. Applying changes twice is the same as once."""

    def make_room(self, entries: int) -> None:
        """So many entries are about to come, as far as can be told."""

    def snapshot(self, groups: Collection[int] | None) -> Iterator[Rows]:
        """The rows of these key groups (None: of all) as they are now, whatever changes while they are read."""

    def drop_groups(self, groups: Collection[int]) -> None:
        """Remove all rows of these key groups."""

    def rows(self, groups: Collection[int] | None = None) -> int:
        """How many entries there are, of these key groups (None: of all)."""

    def size_bytes(self) -> int:
        """The memory or disk space held."""

    def close(self) -> None:
        """Let go of what is open."""

    def destroy(self) -> None:
        """Close, and remove what is on disk: it is only a cache of the checkpoint."""


def open_store(
    kind: str,
    layout: Layout,
    key_groups: int,
    directory: Path | None,
    remote: tuple[RedisConnection, str] | None = None,
) -> Store:
    """An empty store for a state variable.

    ``directory`` is where a store on disk puts its files; ``remote`` the shared store, and what names in it begin with.
    """
    # Imported here, because the stores are written against the interface above, and only one of them is needed.
    shape = VariableCodec(layout).shape(key_groups)
    if kind == "memory":
        from anabranch.worker.stores.memory import MemoryStore

        return MemoryStore(shape)
    if kind == "rocksdb":
        from anabranch.worker.stores.rocksdb import RocksStore

        if directory is None:
            raise SettingsError("The RocksDB store needs a directory for its files; name one.")
        return RocksStore(shape, directory)
    if kind == "redis":
        from anabranch.worker.stores.redis import RedisStore

        if remote is None:
            raise SettingsError("The Redis store needs the address of a Redis; set anabranch.redisUrl.")
        return RedisStore(shape, *remote)
    raise SettingsError(f"There is no store of the kind {kind!r}; choose one of {', '.join(KINDS)}.")
