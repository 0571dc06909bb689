"""When the rows of a state variable are due, in order of time: so that those which are can be found without the others.

What is indexed are times with keys, not rows: an entry says that the key may have a row which is due then. Nothing is
taken out when a row changes or goes; an entry whose row is gone is noticed when it comes up, because rows are read
before they are given out. The entries of the store are in sorted runs, few of them and each about half as long as the
one before; those of a layer stay with the layer as they came, and become a run when it is folded.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from anabranch.core.eventtime import FIRST_TIME, EventTime
from anabranch.core.schemas import OP, Op
from anabranch.worker.state.codec import Encoded, take
from anabranch.worker.state.layer import Layer, keys_in
from anabranch.worker.state.rows import Changes, Hashes, Keys, Rows, Shape, VariableCodec
from anabranch.worker.state.table import RowTable
from anabranch.worker.stores import Store

Times = npt.NDArray[np.int64]

#: Entries that are looked up at a time, when they are checked against the store.
_CHECKED_ROWS = 1 << 15
#: With fewer entries than this beyond the rows, it is not worth looking for entries that have lost their rows.
_STALE_MIN = 1 << 16


@dataclass(frozen=True)
class LayerTimes:
    """Those changes of a layer that give a row a time, in the order of the changes."""

    times: Times
    positions: npt.NDArray[np.intp]

    def between(self, since: int, up_to: int) -> npt.NDArray[np.intp]:
        """The changes with a time from one to another."""
        return self.positions[(self.times >= since) & (self.times <= up_to)]


@dataclass(frozen=True)
class SortedRun:
    """Entries in the order of their times."""

    times: Times
    hashes: Hashes
    #: As bytes of one width, or in an Arrow array: ``bytes`` objects would take twice the memory.
    keys: Encoded | pa.LargeBinaryArray
    #: How many entries the columns have room for: of a run that came up in part, more than it has.
    allocated: int

    def __len__(self) -> int:
        return len(self.times)

    @property
    def nbytes(self) -> int:
        return int(self.times.nbytes + self.hashes.nbytes + self.keys.nbytes)

    def chosen(self, which: npt.NDArray[Any]) -> SortedRun:
        """Some of the entries, by position in rising order or by truth value."""
        keys = self.keys
        kept = keys.take(pa.array(_positions(which))) if isinstance(keys, pa.Array) else take(keys, which)
        times = self.times[which]
        return SortedRun(times, self.hashes[which], kept, len(times))

    def part(self, start: int, end: int) -> SortedRun:
        """The entries from one position to another. They share the memory of the run, unless most of it is unused."""
        allocated = self.allocated if 2 * (end - start) >= self.allocated else 0
        if not allocated:
            return self.chosen(np.arange(start, end))
        return SortedRun(self.times[start:end], self.hashes[start:end], self.keys[start:end], allocated)

    def keys_of(self, which: npt.NDArray[Any]) -> Keys:
        chosen = self.chosen(which)
        keys = chosen.keys
        return Keys(chosen.hashes, _as_objects(keys) if isinstance(keys, pa.Array) else keys)

    @staticmethod
    def sorted(times: Times, keys: Keys) -> SortedRun:
        order = np.argsort(times, kind="stable")
        sorted_ = keys.take(order)
        packed = sorted_.keys if sorted_.keys.dtype != object else pa.array(sorted_.keys, pa.large_binary())
        return SortedRun(times[order], sorted_.hashes, packed, len(times))

    @staticmethod
    def merged(runs: Sequence[SortedRun]) -> SortedRun:
        if len(runs) == 1:
            return runs[0]
        times = np.concatenate([run.times for run in runs])
        hashes = np.concatenate([run.hashes for run in runs])
        parts = [run.keys for run in runs]
        keys = pa.concat_arrays(parts) if isinstance(parts[0], pa.Array) else np.concatenate(parts)
        # A stable sort finds the runs that are sorted already, and merges them.
        return SortedRun(times, hashes, keys, len(times)).chosen(np.argsort(times, kind="stable"))


class DueIndex:
    """Which keys of a state variable have rows that may be due, and when. Any thread may call any method.

    Only one at a time may call ``tidy`` and ``drop``, and none may change the store meanwhile except by adding rows.
    """

    def __init__(self, event_time: EventTime, codec: VariableCodec, shape: Shape) -> None:
        self.event_time = event_time
        self._codec = codec
        self._shape = shape
        #: Held while runs are made and replaced. Who only looks at them needs no lock: they never change.
        self._lock = threading.Lock()
        #: The longest first.
        self._runs: tuple[SortedRun, ...] = ()
        #: By key group: whether every row in the store has an entry.
        self._covered = np.zeros(shape.key_groups, dtype=np.bool_)
        self._entries_at_least = _STALE_MIN
        self._asking = threading.Lock()
        #: By key group: up to when it was asked for since the last tidying.
        self._asked = np.full(shape.key_groups, FIRST_TIME, dtype=np.int64)

    def __len__(self) -> int:
        return sum(map(len, self._runs))

    @property
    def nbytes(self) -> int:
        return sum(run.nbytes * run.allocated // max(1, len(run)) for run in self._runs)

    # ------------------------------------------------------------------------------------------------ taking in

    def of_table(self, changes: pa.Table) -> LayerTimes:
        """The times that changes, ``layout.changes``, give to rows."""
        puts = changes.column(OP).to_numpy() == Op.PUT
        return _times(self.event_time.of(changes), puts)

    def of_encoded(self, changes: Changes) -> LayerTimes:
        """The same, of changes of which no table is left."""
        return _times(self._decoded(changes.keys, changes.subkeys, changes.values), changes.ops == Op.PUT)

    def add(self, found: LayerTimes, changes: Changes) -> None:
        """Changes that have become part of the store."""
        if len(found.times):
            self._append(SortedRun.sorted(found.times, changes.keys_of(found.positions)))

    def uncovered(self) -> list[int]:
        """The key groups whose rows have to be added, because they got into the store unnoticed."""
        return [int(group) for group in np.flatnonzero(~self._covered)]

    def cover(self, groups: Collection[int], rows: Iterable[Rows]) -> None:
        """Add rows, all that the store has of these key groups."""
        added = self._runs_of(rows)
        with self._lock:
            self._runs = _in_order([*self._runs, *added])
            self._covered[list(groups)] = True

    def uncover(self, groups: Collection[int]) -> None:
        """Rows of these key groups are in the store, of which nothing is known."""
        with self._lock:
            self._covered[list(groups)] = False

    # ---------------------------------------------------------------------------------------------- finding

    def candidates(self, layers: Collection[Layer], groups: Collection[int], since: int, up_to: int) -> Keys:
        """The keys of some groups that may have rows with a time from one to another. None of them twice."""
        wanted = self._shape.chosen(groups)
        parts = []
        for run in self._runs:
            start = int(np.searchsorted(run.times, since, side="left"))
            end = int(np.searchsorted(run.times, up_to, side="right"))
            mine = np.flatnonzero(wanted[self._shape.groups_of(run.hashes[start:end])])
            if len(mine):
                parts.append(run.keys_of(mine + start))
        for layer in layers:
            if layer.times is not None:
                at = layer.times.between(since, up_to)
                parts.append(layer.changes.keys_of(at[wanted[self._shape.groups_of(layer.changes.hashes[at])]]))
        with self._asking:
            self._asked[wanted] = np.maximum(self._asked[wanted], up_to)
        return self._distinct(parts)

    def _distinct(self, parts: Sequence[Keys]) -> Keys:
        keys = Keys.concat(parts) if parts else self._codec.no_keys()
        order = np.argsort(keys.hashes)
        hashes = keys.hashes[order]
        is_twin = np.zeros(len(hashes), dtype=np.bool_)
        is_twin[1:] = hashes[1:] == hashes[:-1]
        if not is_twin.any():
            return keys
        # Of most hashes there is one key. Where there are several entries, they may be of different keys.
        is_twin[:-1] |= is_twin[1:]
        twins = keys.take(order[is_twin])
        table = RowTable(self._shape.key_width, 0)
        table.add(twins.hashes, twins.keys)
        return Keys.concat([keys.take(order[~is_twin]), keys_in(table)])

    # ---------------------------------------------------------------------------------------------- letting go

    def tidy(self, store: Store) -> None:
        """Let go of entries that came up and whose rows are gone; of all such entries, if there are too many."""
        with self._asking:
            asked, self._asked = self._asked, np.full(self._shape.key_groups, FIRST_TIME, dtype=np.int64)
        before = self._runs
        entries = sum(map(len, before))
        # A row has one entry that counts.
        if entries > self._entries_at_least and entries > 2 * store.rows() + _STALE_MIN:
            # To look at all rows is less work than to look for the row of each entry.
            after = self._runs_of(store.snapshot(None))
            self._entries_at_least = 2 * sum(map(len, after)) + _STALE_MIN
        elif (top := int(asked.max())) > FIRST_TIME:
            after = [part for run in before for part in self._without_gone(run, asked, top, store)]
        else:
            return
        with self._lock:
            added = [run for run in self._runs if not any(run is old for old in before)]
            self._runs = _in_order([*after, *added])

    def drop(self, groups: Collection[int]) -> None:
        """Forget key groups, which the store has nothing of any more."""
        kept = ~self._shape.chosen(groups)
        with self._lock:
            self._runs = _in_order([run.chosen(kept[self._shape.groups_of(run.hashes)]) for run in self._runs])
            self._covered[list(groups)] = True

    def _without_gone(self, run: SortedRun, asked: Times, top: int, store: Store) -> list[SortedRun]:
        end = int(np.searchsorted(run.times, top, side="right"))
        came_up = run.times[:end] <= asked[self._shape.groups_of(run.hashes[:end])]
        if not came_up.any():
            return [run]
        head = run.part(0, end)
        live = self._live(head.chosen(came_up), store)
        if len(live) == np.count_nonzero(came_up):
            return [run]
        return [SortedRun.merged([live, head.chosen(~came_up)]), run.part(end, len(run))]

    def _live(self, run: SortedRun, store: Store) -> SortedRun:
        """Those entries which the store has a row for."""
        live = np.zeros(len(run), dtype=np.bool_)
        for start in range(0, len(run), _CHECKED_ROWS):
            keys = run.keys_of(np.arange(start, min(start + _CHECKED_ROWS, len(run))))
            found = store.read(keys)
            times = self._decoded(take(keys.keys, found.index), found.subkeys, found.values)
            at = found.index + start
            same = times.fill_null(0).to_numpy(zero_copy_only=False) == run.times[at]
            live[at[same & times.is_valid().to_numpy(zero_copy_only=False)]] = True
        return run.chosen(live)

    def _runs_of(self, rows: Iterable[Rows]) -> list[SortedRun]:
        """A run for each part."""
        runs = []
        for part in rows:
            found = _times(self._decoded(part.keys, part.subkeys, part.values), np.ones(len(part), dtype=np.bool_))
            runs.append(SortedRun.sorted(found.times, Keys(part.hashes, part.keys).take(found.positions)))
        return runs

    def _append(self, run: SortedRun) -> None:
        with self._lock:
            self._runs = _in_order([*self._runs, run])

    def _decoded(self, keys: Encoded, subkeys: Encoded, values: Encoded) -> pa.Array:
        """The times of rows: of the columns, only those beside which the time is are decoded."""
        codec, column = self._codec, self.event_time.column
        for part, encoded in ((codec.key, keys), (codec.subkey, subkeys), (codec.value, values)):
            if column in part.schema.names:
                return self.event_time.of(pa.RecordBatch.from_arrays(part.decode(encoded), schema=part.schema))
        raise KeyError(column)


def _times(times: pa.Array, puts: npt.NDArray[np.bool_]) -> LayerTimes:
    positions = np.flatnonzero(puts & times.is_valid().to_numpy(zero_copy_only=False))
    return LayerTimes(times.fill_null(0).to_numpy(zero_copy_only=False)[positions], positions)


def _in_order(runs: Sequence[SortedRun]) -> tuple[SortedRun, ...]:
    """The longest first; those that are not twice as long as all shorter ones together are merged with these."""
    ordered: list[SortedRun] = []
    together: list[SortedRun] = []
    for run in sorted(filter(len, runs), key=len):
        if together and len(run) >= 2 * sum(map(len, together)):
            ordered.append(SortedRun.merged(together))
            together = []
        together.append(run)
    if together:
        ordered.append(SortedRun.merged(together))
    return tuple(reversed(ordered))


def _positions(which: npt.NDArray[Any]) -> npt.NDArray[np.intp]:
    return np.flatnonzero(which) if which.dtype == np.bool_ else which


def _as_objects(keys: pa.LargeBinaryArray) -> npt.NDArray[np.object_]:
    objects: npt.NDArray[np.object_] = keys.to_numpy(zero_copy_only=False)
    return objects
