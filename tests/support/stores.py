"""Stores for tests of what is kept in them: of each worker's own, for any variable."""

from pathlib import Path

from anabranch.core.schemas import Layout
from anabranch.worker.state.rows import VariableCodec
from anabranch.worker.stores import Store
from anabranch.worker.stores.memory import MemoryStore
from anabranch.worker.stores.rocksdb import RocksStore


def open_store(kind: str, layout: Layout, key_groups: int, directory: Path | None = None) -> Store:
    """An empty store in memory, or in a directory."""
    shape = VariableCodec(layout).shape(key_groups)
    if kind == "memory":
        return MemoryStore(shape)
    assert directory is not None
    return RocksStore(shape, directory)
