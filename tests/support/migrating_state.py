"""State that migrates, for tests: variables of each kind, keys whose hashes meet, frozen sources, and a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from anabranch.checkpoint.datafiles import write_changes
from anabranch.checkpoint.storage import Storage
from anabranch.core.errors import LostWorkerError
from anabranch.core.eventtime import EventTime
from anabranch.core.ids import StageNumber, WorkerId
from anabranch.core.keygroups import key_groups_of
from anabranch.core.schemas import HASH, Layout, Op, VariableKind, VariableSpec
from anabranch.core.state_files import ChangeFile
from anabranch.worker.state.variable_state import VariableState
from anabranch.worker.transfer.group_transfer import GroupTransfer
from anabranch.worker.transfer.sources import CheckpointSource, MakeSource, as_puts, entries_of

#: Newer than any epoch.
NOW = 1 << 62
#: As if the values were times.
BY_VALUE = EventTime("n", "")
#: Of each key the entries: value by sub-key, None being the sub-key of a value variable.
Model = dict[str, dict[int | None, int]]
#: A change: what is done, to which key, which sub-key, and the value.
Change = tuple[int, str, int | None, int | None]


def layout_of(kind: VariableKind) -> Layout:
    map_key = pa.schema([("m", pa.int64())]) if kind is VariableKind.MAP else pa.schema([])
    return Layout(pa.schema([("k", pa.string())]), VariableSpec("v", kind, pa.schema([("n", pa.int64())]), map_key))


def hash_of(key: str) -> int:
    """Keys that begin with the same letter share a hash; some letters share a key group, and some do not."""
    number = ord(key[0]) - ord("a")
    return (number * 0x9E3779B97F4A7C15 % 2**63) - 2**62 if number % 3 else number


def group_of(key: str, key_groups: int) -> int:
    return int(key_groups_of(np.array([hash_of(key)]), key_groups)[0])


def keys_table(layout: Layout, keys: Collection[str]) -> pa.Table:
    hashes = pa.array([hash_of(key) for key in keys], pa.int64())
    return pa.table([hashes, pa.array(list(keys), pa.string())], schema=layout.keys)


def changes_table(layout: Layout, changes: Collection[Change]) -> pa.Table:
    has_subkey = len(layout.subkey) > 0
    rows = [[hash_of(key), op, key, *([subkey] if has_subkey else []), value] for op, key, subkey, value in changes]
    columns = list(zip(*rows, strict=True)) or [()] * len(layout.changes)
    return pa.table([pa.array(c, f.type) for c, f in zip(columns, layout.changes, strict=True)], schema=layout.changes)


def applied(model: Model, changes: Collection[Change]) -> Model:
    model = {key: dict(entries) for key, entries in model.items()}
    for op, key, subkey, value in changes:
        entries = model.setdefault(key, {})
        if op == Op.CLEAR:
            entries.clear()
        elif op == Op.DELETE:
            entries.pop(subkey, None)
        else:
            assert value is not None
            entries[subkey] = value
    return {key: entries for key, entries in model.items() if entries}


def held(state: VariableState, epoch: int = NOW) -> Model:
    """All that a state holds. A row that is there twice is an error."""
    found: Model = {}
    for batch in state.scan(epoch):
        for row in batch.to_pylist():
            entries = found.setdefault(row["k"], {})
            subkey = _subkey_of(row)
            assert row[HASH] == hash_of(row["k"])
            assert subkey not in entries
            entries[subkey] = row["n"]
    return found


def looked_up(state: VariableState, keys: list[str], epoch: int = NOW) -> Model:
    found: Model = {}
    for row in state.read(keys_table(state.layout, keys), epoch).to_pylist():
        found.setdefault(keys[row["_index"]], {})[_subkey_of(row)] = row["n"]
    return found


def due(state: VariableState, groups: Collection[int], up_to: int, epoch: int = NOW) -> Model:
    """The entries of these key groups whose value is not above a number."""
    found: Model = {}
    for row in pa.Table.from_batches(state.due(epoch, groups, BY_VALUE, up_to)).to_pylist():
        entries = found.setdefault(row["k"], {})
        assert _subkey_of(row) not in entries
        entries[_subkey_of(row)] = row["n"]
    return found


def _subkey_of(row: dict[str, Any]) -> int | None:
    subkey: int | None = row.get("_position", row.get("m"))
    return subkey


class Frozen:
    """The frozen copy of a former owner, which may itself still wait for some of it. Fails when told to."""

    is_history = False

    def __init__(self, state: VariableState, before: GroupTransfer | None = None, rows_per_piece: int = 2) -> None:
        self._state = state
        self._before = before
        self._rows_per_piece = rows_per_piece
        self.fails = False
        #: Pieces of a scan that are sent before it fails; None: none fails.
        self.pieces_left: int | None = None
        self.fetched_keys: list[str] = []
        self.scanned_groups: list[int] = []
        #: Key groups, and from when to when.
        self.asked_for_due: list[tuple[list[int], int, int]] = []
        #: Called before each piece of a scan is sent.
        self.on_piece: Callable[[], None] = lambda: None

    def fetch(self, keys: pa.Table) -> Iterator[pa.Table]:
        self._check()
        self.fetched_keys += keys.column("k").to_pylist()
        if self._before is not None:
            self._before.fetch(keys.column(HASH).to_numpy(), keys)
        wanted = keys.select(self._state.layout.keys.names)
        answers = pa.Table.from_batches([self._state.read(wanted, NOW)])
        for rows in entries_of(wanted, answers):
            yield as_puts(rows, self._state.layout)

    def due(self, groups: Collection[int], event_time: EventTime, since: int, up_to: int) -> Iterator[pa.Table]:
        self._check()
        self.asked_for_due.append((sorted(groups), since, up_to))
        if self._before is not None:
            self._before.fetch_due(groups, event_time, up_to)
        rows = self._state.due(NOW, groups, event_time, up_to, since=since, whole_keys=True)
        yield from self._pieces(rows)

    def scan(self, groups: Collection[int], *, can_wait: bool = False) -> Iterator[pa.Table]:
        self._check()
        self.scanned_groups += groups
        if self._before is not None:
            self._before.drain(groups, can_wait=can_wait)
        yield from self._pieces(self._state.scan(NOW, groups))

    def recent(self, groups: Collection[int]) -> Iterator[pa.Table]:
        del groups
        return iter(())

    def _pieces(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.Table]:
        for batch in batches:
            for start in range(0, len(batch), self._rows_per_piece):
                self.on_piece()
                self._check()
                if self.pieces_left is not None:
                    if not self.pieces_left:
                        self.fails = True
                        self._check()
                    self.pieces_left -= 1
                piece = pa.Table.from_batches([batch.slice(start, self._rows_per_piece)])
                yield as_puts(piece, self._state.layout)

    def _check(self) -> None:
        if self.fails:
            raise LostWorkerError("The former owner cannot be reached.")


class Checkpoint:
    """Change files of one variable, epoch by epoch."""

    def __init__(self, folder: Path, layout: Layout, key_groups: int) -> None:
        self._storage = Storage(str(folder), durable=False)
        self._layout = layout
        self._key_groups = key_groups
        self.files: list[tuple[int, ChangeFile]] = []
        self._written = 0

    def add(self, epoch: int, changes: pa.Table) -> None:
        self._written += 1
        path = f"anabranch/changes/{self._written}.parquet"
        written = write_changes(self._storage, path, self._layout, self._key_groups, changes)
        self.files.append((epoch, ChangeFile(StageNumber(1), "v", WorkerId("w"), path, *written)))

    def roll_back(self, epoch: int) -> None:
        self.files = [(each, file) for each, file in self.files if each <= epoch]

    def now(self) -> MakeSource:
        """What a worker is told of the checkpoint now: files that come later are not among it."""
        files = [file for _, file in self.files]
        return lambda groups: CheckpointSource(self._storage, self._layout, self._key_groups, groups, [], files)
