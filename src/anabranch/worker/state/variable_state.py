"""The versioned state of one variable: a store, and above it one layer for each of the latest epochs.

Readers look into the layers first, newest first, then into the store. A fold merges the oldest layers into the store
and takes each away only when all of it is there; as a layer says the same as what it became in the store, a reader
sees every key correctly at every moment.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager

import numpy as np
import pyarrow as pa

from anabranch.core.errors import EpochError, WorkerError
from anabranch.core.eventtime import FIRST_TIME, EventTime
from anabranch.core.schemas import Layout, VariableKind
from anabranch.worker.state.allocation import give_back_after
from anabranch.worker.state.codec import batches_of
from anabranch.worker.state.due_index import DueIndex
from anabranch.worker.state.key_set import KeySet
from anabranch.worker.state.layer import Layer, ValueLayer, keys_in, make_layer, read_through
from anabranch.worker.state.rows import Entries, Keys, Rows, VariableCodec
from anabranch.worker.state.table import RowTable
from anabranch.worker.stores import Store

logger = logging.getLogger(__name__)

#: Keys of a new layer that are looked up, to estimate how many of them are new.
_GROWTH_SAMPLES = 512


class VariableState:
    """The state of one variable as of each epoch that is still told apart. Any thread may call any method."""

    def __init__(self, layout: Layout, key_groups: int, store: Store) -> None:
        self.layout = layout
        self._codec = VariableCodec(layout)
        self._shape = self._codec.shape(key_groups)
        self._store = store
        #: Guards the attributes below; never held while state is read or written.
        self._changed = threading.Condition()
        #: Oldest first.
        self._layers: tuple[Layer, ...] = ()
        self._oldest: int | None = None
        #: The epochs that are being read now, each by how many.
        self._readers: Counter[int] = Counter()
        #: The keys of the newest layer, some of them several times; they share the memory of its changes.
        self._latest = self._codec.no_keys()
        #: When rows are due, since somebody first asked.
        self._due: DueIndex | None = None
        #: Held while layers are merged into the store, or the store loses key groups.
        self._folding = threading.Lock()

    @property
    def newest(self) -> int | None:
        """The newest epoch that changed the state, or None if none did."""
        with self._changed:
            return self._newest()

    @property
    def oldest(self) -> int | None:
        """The oldest epoch that can be read; None if nothing has been folded, so that every epoch can."""
        with self._changed:
            return self._oldest

    def read(self, keys: pa.Table | pa.RecordBatch, epoch: int) -> pa.RecordBatch:
        """The entries of these keys as of the end of an epoch: ``layout.answers``, ordered by index, lists by position.

        An epoch newer than the newest layer has the same state as that.
        """
        return self._codec.decode_answers(self._entries(keys, epoch))

    def read_in_batches(self, keys: pa.Table | pa.RecordBatch, epoch: int) -> Iterator[pa.RecordBatch]:
        """The same, found now, and decoded in batches of bounded size while they are consumed: at least one."""
        return self._codec.answers_of(self._entries(keys, epoch))

    def _entries(self, keys: pa.Table | pa.RecordBatch, epoch: int) -> Entries:
        wanted = self._codec.encode_keys(keys)
        with self._reading(epoch) as layers:
            entries = read_through(wanted, layers, self._store, self._shape)
        return self._by_position(entries)

    def add_layer(self, epoch: int, changes: pa.Table) -> None:
        """Make the changes of an epoch, ``layout.changes``, part of the state.

        If the caller holds them no longer, their memory is freed bit by bit: they are never here twice.
        """
        self._check_new(epoch)
        due = self._due
        times = None if due is None else due.of_table(changes)
        batches = batches_of(changes)
        del changes
        layer = make_layer(epoch, self._codec.encode_batches(batches), self._shape)
        layer.times = times
        if isinstance(layer, ValueLayer):
            layer.growth = self._growth_of(layer)
        with self._changed:
            self._check_new(epoch)
            if self._due is not None and self._due is not due:
                layer.times = self._due.of_encoded(layer.changes)
            self._layers = (*self._layers, layer)
            self._latest = Keys(layer.changes.hashes, layer.changes.keys)

    def drop_layers_after(self, epoch: int) -> None:
        """Roll back: forget the epochs after this one."""
        with self._changed:
            self._check_held(epoch)
            self._layers = tuple(layer for layer in self._layers if layer.epoch <= epoch)

    def fold(self, up_to: int) -> None:
        """Merge the layers up to an epoch into the store, oldest first; older epochs can no longer be read.

        Meant to run in a thread of its own. It waits for readers of older epochs; they do not wait for it, except that
        rows in memory change some milliseconds at a time. If it fails, nothing is lost: call it again.
        """
        with self._folding:
            with self._changed:
                folding = [layer for layer in self._layers if layer.epoch <= up_to]
                if not folding:
                    return
                oldest = self._oldest = folding[-1].epoch
                self._changed.wait_for(lambda: not any(epoch < oldest for epoch in self._readers))
            folded_rows, folded_bytes = sum(len(layer.changes) for layer in folding), 0
            for layer in folding:
                folded_bytes += layer.size_bytes
                self._store.apply(layer.changes)
                # Before the layer goes: an entry too many is harmless. (An index that is made meanwhile finds the rows
                # in the store.)
                with self._changed:
                    due, times = self._due, layer.times
                if due is not None and times is not None:
                    due.add(times, layer.changes)
                with self._changed:
                    self._layers = tuple(kept for kept in self._layers if kept is not layer)
            if (due := self._due) is not None:
                due.tidy(self._store)
        # Only now is free what is replaced, and what the changes were in.
        folding.clear()
        del layer
        give_back_after(folded_rows, folded_bytes)

    def scan(
        self, epoch: int, groups: Collection[int] | None = None, without: pa.Table | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Whole rows, ``layout.rows``, as of the end of an epoch, in bounded batches and no order.

        Of these key groups (None: of all), leaving out the keys in ``without`` (``layout.keys``). The rows are those
        of the moment of the call, whatever changes while they are consumed; a store in memory copies them for that.
        """
        seen = RowTable(self._shape.key_width, 0)
        if without is not None:
            left_out = self._codec.encode_keys(without)
            seen.add(left_out.hashes, left_out.keys)
        with self._reading(epoch) as layers:
            changed = self._changed_keys(layers, groups, seen)
            entries = read_through(changed, layers, self._store, self._shape)
            below = self._store.snapshot(groups)
        return self._batches(changed, entries, below, seen)

    def due(
        self,
        epoch: int,
        groups: Collection[int],
        event_time: EventTime,
        up_to: int,
        *,
        since: int = FIRST_TIME,
        whole_keys: bool = False,
    ) -> Iterator[pa.RecordBatch]:
        """The rows, ``layout.rows``, of these key groups as of an epoch whose time is not after another, in no order.

        With ``whole_keys``, all rows of all keys that have such a row, unless its time is before ``since``. They are
        those of the moment of the call, in batches of bounded size.
        """
        index = self._index_of(event_time)
        with self._reading(epoch) as layers:
            keys = index.candidates(layers, groups, since, up_to)
            entries = read_through(keys, layers, self._store, self._shape)
        batches = self._codec.rows_of(keys.rows_of(entries))
        return batches if whole_keys else (batch.filter(event_time.is_over(batch, up_to)) for batch in batches)

    def latest(self, epoch: int, groups: Collection[int]) -> Iterator[pa.RecordBatch]:
        """All rows, ``layout.rows``, as of an epoch, of those keys of these key groups that the newest layer changed.

        It may be in the store by now. In batches of bounded size.
        """
        mine = self._latest.take(self._shape.chosen(groups)[self._shape.groups_of(self._latest.hashes)])
        distinct = RowTable(self._shape.key_width, 0)
        distinct.add(mine.hashes, mine.keys)
        keys = keys_in(distinct)
        with self._reading(epoch) as layers:
            entries = read_through(keys, layers, self._store, self._shape)
        return self._codec.rows_of(keys.rows_of(entries))

    def expect_unnoticed(self, groups: Collection[int]) -> None:
        """These key groups are in the store from now on, without having been loaded."""
        if (due := self._due) is not None:
            due.uncover(groups)

    def forget_due(self, groups: Collection[int]) -> None:
        """These key groups are about to go from the store."""
        with self._folding:
            if (due := self._due) is not None:
                due.drop(groups)

    def known_keys(self) -> KeySet:
        """An empty set of keys of this variable."""
        return KeySet(self._codec, self._shape)

    def make_room(self, rows: int) -> None:
        """Prepare the store for about this number of further rows."""
        self._store.make_room(rows)

    def load(self, changes: pa.Table) -> None:
        """Restore: apply changes straight to the store, below all layers."""
        encoded = self._codec.encode_changes(changes)
        self._store.apply(encoded)
        # Now that the rows are there: who tidies up would take entries without rows for old ones.
        if (due := self._due) is not None:
            due.add(due.of_table(changes), encoded)

    def drop_groups(self, groups: Collection[int]) -> None:
        """Forget these key groups, in every epoch."""
        dropped = self._shape.chosen(groups)
        with self._folding:
            kept = {layer: layer.without(dropped, self._shape) for layer in self._layers}
            with self._changed:
                if (due := self._due) is not None:
                    for layer in kept.values():
                        layer.times = due.of_encoded(layer.changes)
                self._layers = tuple(kept.get(layer, layer) for layer in self._layers)
            if due is not None:
                due.drop(groups)
            self._store.drop_groups(groups)

    def rows(self, without: Collection[int] = ()) -> int:
        """How many entries there are as of the newest layer, but for some key groups: exact when all is folded.

        What a layer adds is estimated: of a value variable, from a sample of its keys; of a list or map, as puts less
        deletes.
        """
        with self._changed:
            growth = sum(layer.growth for layer in self._layers)
        left_out = self._store.rows(without) if without else 0
        return max(self._store.rows() + growth - left_out, 0)

    def bytes(self) -> int:
        """The memory or disk space held."""
        with self._changed:
            layers = self._layers
        index_bytes = self._due.nbytes if self._due is not None else 0
        return self._store.size_bytes() + index_bytes + sum(layer.size_bytes for layer in layers)

    def close(self) -> None:
        """Let go of everything, files included: they are only a cache of the checkpoint."""
        with self._folding:
            with self._changed:
                self._layers = ()
            self._store.destroy()

    @property
    def _name(self) -> str:
        return self.layout.variable.name

    def _newest(self) -> int | None:
        return self._layers[-1].epoch if self._layers else self._oldest

    def _check_new(self, epoch: int) -> None:
        with self._changed:
            newest = self._newest()
            if newest is not None and epoch <= newest:
                raise EpochError(
                    f"State variable '{self._name}' has the changes of epoch {newest} already, and was given those of "
                    f"epoch {epoch}. Roll back the newer epochs first."
                )

    def _check_held(self, epoch: int) -> None:
        if self._oldest is not None and epoch < self._oldest:
            raise EpochError(
                f"State variable '{self._name}' is no longer held as of epoch {epoch}: it has been merged up to epoch "
                f"{self._oldest}. Use that epoch or a newer one, or restore the older one from the checkpoint."
            )

    @contextmanager
    def _reading(self, epoch: int) -> Iterator[tuple[Layer, ...]]:
        """The layers that make up an epoch; nothing newer gets into the store meanwhile."""
        with self._changed:
            self._check_held(epoch)
            self._readers[epoch] += 1
            layers = tuple(layer for layer in self._layers if layer.epoch <= epoch)
        try:
            yield layers
        finally:
            with self._changed:
                self._readers[epoch] -= 1
                if not self._readers[epoch]:
                    del self._readers[epoch]
                self._changed.notify_all()

    def _index_of(self, event_time: EventTime) -> DueIndex:
        """The index of this time, which knows of all rows from now on."""
        with self._changed:
            if self._due is None or self._due.event_time != event_time:
                self._due = DueIndex(event_time, self._codec, self._shape)
                for layer in self._layers:
                    layer.times = self._due.of_encoded(layer.changes)
            index = self._due
        if index.uncovered():
            with self._folding:
                # Another thread may have covered them meanwhile.
                missing = index.uncovered()
                if missing:
                    everything = len(missing) == self._shape.key_groups
                    index.cover(missing, self._store.snapshot(None if everything else missing))
        return index

    def _by_position(self, entries: Entries) -> Entries:
        """Lists in the order of their positions, which no store promises."""
        if self._shape.kind is not VariableKind.LIST:
            return entries
        positions = self._codec.subkey.decode(entries.subkeys)[0].to_numpy()
        rising = (entries.index[1:] > entries.index[:-1]) | (positions[1:] > positions[:-1])
        return entries if rising.all() else entries.take(np.lexsort((positions, entries.index)))

    def _growth_of(self, layer: Layer) -> int:
        keys = layer.keys()
        sample = keys.take(np.arange(0, len(keys), len(keys) // _GROWTH_SAMPLES + 1))
        if not len(sample):
            return 0
        try:
            with self._reading(layer.epoch) as layers:
                before = len(read_through(sample, layers, self._store, self._shape))
                after = len(read_through(sample, (*layers, layer), self._store, self._shape))
        except WorkerError as error:
            # An estimate is not worth an epoch. The task that needs the state of these keys will get the error.
            logger.warning("how much state variable '%s' grows is not known: %s", self._name, error)
            return 0
        return round((after - before) * len(keys) / len(sample))

    def _changed_keys(self, layers: Collection[Layer], groups: Collection[int] | None, seen: RowTable) -> Keys:
        """The keys, of these key groups and not yet seen, that any layer knows; now they have been seen."""
        before = seen.rows()
        for layer in layers:
            keys = layer.keys()
            if groups is not None:
                keys = keys.take(self._shape.chosen(groups)[self._shape.groups_of(keys.hashes)])
            seen.add(keys.hashes, keys.keys)
        added = np.setdiff1d(seen.rows(), before, assume_unique=True)
        return Keys(seen.hashes(added), seen.keys(added))

    def _batches(
        self, changed: Keys, entries: Entries, below: Iterator[Rows], seen: RowTable
    ) -> Iterator[pa.RecordBatch]:
        for part in entries.batches():
            yield from self._codec.rows_of(changed.rows_of(part))
        for rows in below:
            rest = rows.take(seen.find(rows.hashes, rows.keys) < 0) if len(seen) else rows
            if len(rest):
                yield from self._codec.rows_of(rest)
