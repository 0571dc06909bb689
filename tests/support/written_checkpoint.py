"""A checkpoint with epochs of changes, written as workers and driver write them, and what its state should be."""

from collections.abc import Iterable
from copy import deepcopy
from typing import Any

import numpy as np
import pyarrow as pa

from anabranch.checkpoint.datafiles import write_changes
from anabranch.checkpoint.documents import FORMAT_VERSION
from anabranch.checkpoint.job import JobDescription, create_or_check
from anabranch.checkpoint.manifests import Manifest, write_manifest
from anabranch.checkpoint.paths import change_file
from anabranch.checkpoint.storage import Storage
from anabranch.core.ids import Epoch, Generation, JobId, RouteVersion, Run, WorkerId
from anabranch.core.keygroups import key_groups_of
from anabranch.core.schemas import HASH, Layout, Op, StageSpec
from anabranch.core.state_files import ChangeFile

WORKERS = ("w1", "w2")
#: (op, key, sub-key, value): the sub-key is None, a position or a map key.
Change = tuple[int, int, Any, Any]
#: Values by key and sub-key.
Entries = dict[tuple[int, Any], Any]


class WrittenCheckpoint:
    """Writes epochs of the fixture ``stage``, whose key is one number, and follows the state in plain dicts."""

    def __init__(self, storage: Storage, stage: StageSpec, *, key_groups: int = 16) -> None:
        self.storage = storage
        self.stage = stage
        self.key_groups = key_groups
        #: By epoch and variable.
        self.states: dict[int, dict[str, Entries]] = {-1: {name: {} for name in stage.layouts}}
        create_or_check(storage, JobDescription(FORMAT_VERSION, JobId("job"), key_groups, (stage,)))

    def write(
        self, epoch: int, changes: dict[str, list[Change]], *, generation: int = 1, run: int | None = None
    ) -> Manifest:
        """One file for each worker and variable, and the manifest."""
        run = epoch if run is None else run
        files = []
        for variable, of_variable in changes.items():
            layout = self.stage.layouts[variable]
            table = changes_table(layout, of_variable)
            upper = key_groups_of(table.column(HASH).to_numpy(), self.key_groups) >= self.key_groups // 2
            for worker, rows in zip(WORKERS, (~upper, upper), strict=True):
                path = change_file(
                    self.stage.name,
                    variable,
                    epoch=Epoch(epoch),
                    generation=Generation(generation),
                    run=Run(run),
                    worker=WorkerId(worker),
                )
                written = write_changes(self.storage, path, layout, self.key_groups, table.filter(pa.array(rows)))
                files.append(ChangeFile(self.stage.number, variable, WorkerId(worker), path, *written))
        manifest = Manifest(Epoch(epoch), Generation(generation), Run(run), RouteVersion(0), tuple(files))
        write_manifest(self.storage, manifest)
        self.states[epoch] = deepcopy(self.states[epoch - 1])
        for variable, of_variable in changes.items():
            apply(self.states[epoch][variable], of_variable)
        return manifest

    def write_random(self, epochs: Iterable[int], *, seed: int = 0, keys: int = 40, **other: int) -> None:
        for epoch in epochs:
            changes = random_changes(np.random.default_rng([seed, epoch]), keys)
            self.write(epoch, {name: of for name, of in changes.items() if name in self.stage.layouts}, **other)

    def commit_in_spark(self, epoch: int) -> None:
        self.storage.write(f"commits/{epoch}", b"v1\n{}")


def hash_of(key: int) -> int:
    """Any hash will do, as long as it is always the same; some are negative."""
    return key * 0x9E3779B97F4A7C15 % 2**64 - 2**63


def random_changes(rng: np.random.Generator, keys: int) -> dict[str, list[Change]]:
    """Changes of each variable, at most one of an entry, and clears that are not always first."""
    some = [int(key) for key in rng.permutation(keys)[: keys // 2]]
    values: list[Change] = [
        (Op.DELETE, key, None, None) if rng.random() < 0.3 else (Op.PUT, key, None, (int(rng.integers(100)), None))
        for key in some
    ]
    lists: list[Change] = []
    maps: list[Change] = []
    for key in some:
        for position in rng.permutation(4)[:2]:
            put = rng.random() < 0.7
            lists.append((Op.PUT if put else Op.DELETE, key, int(position), f"page {rng.integers(9)}" if put else None))
            maps.append((Op.PUT if put else Op.DELETE, key, f"page {position}", int(rng.integers(99)) if put else None))
        if rng.random() < 0.2:
            lists.append((Op.CLEAR, key, None, None))
            maps.insert(0, (Op.CLEAR, key, None, None))
    return {"value": values, "seen": lists, "visits": maps}


def changes_table(layout: Layout, changes: list[Change]) -> pa.Table:
    subkeys = [[change[2] for change in changes]] * len(layout.subkey)
    values = [change[3] if isinstance(change[3], tuple) else (change[3],) * len(layout.value) for change in changes]
    columns = [
        [hash_of(change[1]) for change in changes],
        [change[0] for change in changes],
        [change[1] for change in changes],
        *subkeys,
        *([value[i] for value in values] for i in range(len(layout.value))),
    ]
    arrays = [pa.array(column, field.type) for column, field in zip(columns, layout.changes, strict=True)]
    return pa.table(arrays, schema=layout.changes)


def apply(entries: Entries, changes: list[Change]) -> None:
    cleared = {key for op, key, _, _ in changes if op == Op.CLEAR}
    for entry in [entry for entry in entries if entry[0] in cleared]:
        del entries[entry]
    for op, key, subkey, value in changes:
        if op == Op.PUT:
            entries[key, subkey] = value
        elif op == Op.DELETE:
            entries.pop((key, subkey), None)


def entries_of(layout: Layout, rows: pa.Table) -> Entries:
    """Rows, ``layout.rows`` with or without the hash, in the form of the model."""
    entries: Entries = {}
    columns = [rows.column(name) for name in (*layout.key.names, *layout.subkey.names, *layout.value.names)]
    for values in zip(*(_plain(column) for column in columns), strict=True):
        subkey = values[1] if len(layout.subkey) else None
        value = values[1 + len(layout.subkey) :]
        assert (values[0], subkey) not in entries
        entries[values[0], subkey] = value if len(value) > 1 else value[0]
    return entries


def _plain(column: pa.ChunkedArray) -> list[Any]:
    return (column.cast(pa.int64()) if pa.types.is_timestamp(column.type) else column).to_pylist()
