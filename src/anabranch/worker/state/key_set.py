"""Keys whose state has been asked for: what a drain brings of them later is older than what is here, and not wanted."""

from __future__ import annotations

import threading

import numpy as np
import pyarrow as pa

from anabranch.core.gather import gathered
from anabranch.worker.state.rows import Shape, VariableCodec
from anabranch.worker.state.table import RowTable


class KeySet:
    """A growing set of whole keys: keys with equal hashes are told apart. Any thread may call any method."""

    def __init__(self, codec: VariableCodec, shape: Shape) -> None:
        self._codec = codec
        self._table = RowTable(shape.key_width, 0)
        self._lock = threading.Lock()

    def missing(self, keys: pa.Table) -> pa.Table:
        """Those of the keys that are not in the set."""
        return gathered(keys, np.flatnonzero(self._find(keys) < 0))

    def add(self, keys: pa.Table) -> None:
        encoded = self._codec.encode_keys(keys)
        with self._lock:
            self._table.add(encoded.hashes, encoded.keys)

    def added(self, keys: pa.Table) -> pa.Table:
        """Add keys, of which some may be the same. Those that were not there before, each once."""
        encoded = self._codec.encode_keys(keys)
        with self._lock:
            new = np.flatnonzero(self._table.find(encoded.hashes, encoded.keys) < 0)
            candidates = encoded.take(new)
            _, first = np.unique(self._table.add(candidates.hashes, candidates.keys), return_index=True)
        return gathered(keys, new[np.sort(first)])

    def without(self, changes: pa.Table) -> pa.Table:
        """The changes of keys that are not in the set."""
        if not len(self._table):
            return changes
        found = self._find(changes)
        return changes if (found < 0).all() else gathered(changes, np.flatnonzero(found < 0))

    def _find(self, rows: pa.Table) -> np.typing.NDArray[np.int32]:
        encoded = self._codec.encode_keys(rows)
        with self._lock:
            return self._table.find(encoded.hashes, encoded.keys)
