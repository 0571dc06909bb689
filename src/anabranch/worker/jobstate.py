"""The state of one job on one worker: its variables, the key groups that are here, and how they are read."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa

from anabranch.checkpoint.manifests import ChangeFile
from anabranch.checkpoint.snapshots import SnapshotFile
from anabranch.checkpoint.storage import Storage
from anabranch.core.errors import WorkerError
from anabranch.core.eventtime import EventTime
from anabranch.core.keygroups import key_groups_of
from anabranch.core.schemas import HASH, INDEX, StageSpec
from anabranch.wire import messages
from anabranch.wire.routed import DUE, EXPIRED, MAX_ROWS_PER_MESSAGE, REST, Expiry
from anabranch.worker.holdings import Holdings, Sources, Variable
from anabranch.worker.layers import VariableState
from anabranch.worker.origins import CheckpointOrigin
from anabranch.worker.peers import ENTRIES, Peer, PeerOrigin, entries_of
from anabranch.worker.repetition import Repetition
from anabranch.worker.shared import SharedState, refuse_shared
from anabranch.worker.staging import Tables
from anabranch.worker.storeoptions import StoreOptions
from anabranch.worker.stores import Store
from anabranch.worker.stores.redis import RedisStore

#: Newer than any epoch: what is frozen does not change any more.
_NOW = 1 << 62
#: It pays to bring the keys of the last epoch first, if so many of them come again in the next one.
_REPETITION_MIN = 0.3
#: Of an answer that comes in pieces.
_BATCH_ROWS = 1 << 16


@dataclass(frozen=True)
class JobShape:
    """What has to be known of a job to hold its state."""

    key_groups: int
    checkpoint: str
    stages: Mapping[int, StageSpec]


class JobState:
    """All variables of a job. Any thread may call any method; what changes state is called by one at a time."""

    def __init__(self, shape: JobShape, stores: StoreOptions, job: str) -> None:
        self.shape = shape
        self.storage = Storage(shape.checkpoint)
        self._states: dict[Variable, VariableState] = {}
        opened: dict[Variable, Store] = {}
        for spec in shape.stages.values():
            for variable, layout in spec.layouts.items():
                opened[spec.number, variable] = stores.open(job, spec, variable, shape.key_groups)
                state = VariableState(layout, shape.key_groups, opened[spec.number, variable])
                self._states[spec.number, variable] = state
        #: What the last epoch changed, and whether epochs tend to change the same keys again.
        self._latest: dict[Variable, pa.Table] = {}
        self._repetitions = {variable: Repetition() for variable in self._states}
        self.holdings = Holdings(self._states, shape.key_groups)
        remote = [store for store in opened.values() if isinstance(store, RedisStore)]
        #: Only if the job's state is in a store that workers share.
        self._shared = SharedState(self._states.values(), remote) if remote else None

    def hand_over(self, request: messages.HandOver) -> dict[str, Any]:
        """Keep only some key groups; the others are left in the shared store, as far as they are whole."""
        if self._shared is None:
            refuse_shared([request.keep])
            return {"shared": []}
        groups = self.holdings.groups - set(request.keep)
        pending = frozenset(group for variable in self._states for group in self.holdings.pending(variable))
        shared = self._shared.hand_over(groups - pending, request.epoch)
        self._shared.forget(groups)
        self.holdings.assign(self.holdings.groups - groups, Sources(_no_files))
        return {"shared": shared}

    def assign(self, request: messages.Assign, token: str) -> dict[str, Any]:
        """Hold exactly these key groups; answers with how many came and went."""
        snapshot = [SnapshotFile(**file) for file in request.snapshot]
        changes = [ChangeFile(**file) for file in request.changes]

        def from_checkpoint(variable: Variable, groups: Collection[int]) -> CheckpointOrigin:
            return CheckpointOrigin(
                self.storage,
                self._states[variable].layout,
                groups,
                [file for file in snapshot if (file.stage, file.variable) == variable],
                [file for file in changes if (file.stage, file.variable) == variable],
            )

        def from_peer(peer: Peer, variable: Variable) -> PeerOrigin:
            return PeerOrigin(peer, variable[0], self._states[variable].layout)

        peers = {}
        for offer in request.peers:
            peer = Peer(
                offer["address"], request.epoch, request.peer_timeout_ms / 1000, token, request.job, request.generation
            )
            peers[peer.address] = partial(from_peer, peer), frozenset(offer["groups"])
        freeze_as_of = request.epoch if request.freeze else None
        shared: frozenset[int] = frozenset()
        if self._shared is None:
            refuse_shared(request.shared)
        else:
            freeze_as_of = None
            new = set(request.groups) - self.holdings.groups
            shared = self._shared.take_over(new, request.shared, f"{request.generation}.{request.number}")
            self._shared.forget(self.holdings.groups - set(request.groups))
        sources = Sources(from_checkpoint, peers if self._shared is None else {}, shared)
        self.holdings.drains_migrations = request.drain
        adopted, left = self.holdings.assign(request.groups, sources, freeze_as_of=freeze_as_of)
        for state in self._states.values() if shared else ():
            state.expect_unnoticed(shared)
        if not peers:
            self.holdings.start_drain()
        return {"adopted": len(adopted), "dropped": len(left)}

    # ------------------------------------------------------------------------------------------------ layers

    def add_layer(self, epoch: int, changes_of: Mapping[Variable, pa.Table]) -> None:
        for variable, state in self._states.items():
            changes = changes_of.get(variable)
            if changes is None:
                changes = state.layout.changes.empty_table()
            self._repetitions[variable].note(changes.column(HASH).to_numpy())
            self._latest[variable] = changes
            state.add_layer(epoch, changes)

    def drop_layers_after(self, epoch: int) -> None:
        for state in self._states.values():
            state.drop_layers_after(epoch)

    def fold(self, up_to: int) -> None:
        for state in self._states.values():
            state.fold(up_to)

    def close(self) -> None:
        self.holdings.close()
        for state in self._states.values():
            state.close()

    # --------------------------------------------------------------------------------------------- for tasks

    def read(self, request: messages.Read, keys: pa.Table, epoch: int) -> Tables:
        answers: Tables = {}
        wanted = keys
        if request.due is not None:
            answers[DUE] = self._due_keys(Expiry(**request.due), request, keys, epoch)
            wanted = pa.concat_tables([keys, answers[DUE].slice(0, MAX_ROWS_PER_MESSAGE)])
        hashes = wanted.column(HASH).to_numpy()
        for name in self.variables_of(request.stage):
            state = self._states[request.stage, name]
            self.holdings.fetch((request.stage, name), hashes, wanted)
            found = pa.Table.from_batches([state.read(wanted, epoch)])
            if request.due is None:
                answers[name] = found
            else:
                answers[name], answers[DUE + name] = _split(found, len(keys))
            if request.rest:
                self.holdings.complete((request.stage, name), request.groups)
                rest = list(state.scan(epoch, request.groups, without=keys))
                answers[REST + name] = pa.Table.from_batches(rest, schema=state.layout.rows)
        for document in request.expired:
            expiry = Expiry(**document)
            answers[EXPIRED + expiry.variable] = self._expired(expiry, request, epoch)
        return answers

    def note_further_rows(self, rows: pa.Table | None) -> None:
        """The load of a task that has more rows than keys."""
        if rows is not None:
            self.holdings.add_load(rows.column(0).to_numpy(), rows.column(1).to_numpy())

    def _expired(self, expiry: Expiry, request: messages.Read, epoch: int) -> pa.Table:
        """Rows that are due."""
        variable = request.stage, expiry.variable
        state = self.variable(*variable)
        groups, event_time = frozenset(request.groups), EventTime(expiry.column, expiry.field)
        if expiry.whole:
            self.holdings.fetch_due(variable, groups, event_time, expiry.up_to)
        else:
            groups -= self.holdings.pending(variable)
        return state.due(epoch, groups, event_time, expiry.up_to)

    def _due_keys(self, expiry: Expiry, request: messages.Read, asked: pa.Table, epoch: int) -> pa.Table:
        """Keys with rows that are due, each once, but for those that were asked for."""
        rows = self._expired(expiry, request, epoch)
        state = self.variable(request.stage, expiry.variable)
        known = state.known_keys()
        known.add(asked)
        return known.added(rows.select(state.layout.keys.names))

    def checked_changes(self, stage: int, tables: Tables) -> Tables:
        """Changes that may be staged: of the declared columns, and of keys that are here."""
        for variable, table in tables.items():
            layout = self.variable(stage, variable).layout
            if not table.schema.equals(layout.changes):
                raise WorkerError(
                    f"Changes of {variable!r} in stage {stage} have the columns {table.schema.names}, not "
                    f"{layout.changes.names} of the declared types. Run the same version of anabranch everywhere."
                )
            # Those that were read are here; no key may change before it is.
            self.holdings.fetch((stage, variable), table.column(HASH).to_numpy(), table)
        return tables

    # ------------------------------------------------------------------------------------------- for others

    def fetch_keys(self, request: messages.FetchKeys, keys: pa.Table) -> Tables:
        """The entries of frozen keys."""
        state = self.variable(request.stage, request.variable)
        hashes = keys.column(HASH).to_numpy()
        self.holdings.fetch_frozen((request.stage, request.variable), hashes, keys, request.as_of)
        entries = pa.Table.from_batches([state.read(keys, _NOW)])
        # Once more: if they were dropped meanwhile, they are missing here, but exist.
        groups = np.unique(key_groups_of(hashes, self.shape.key_groups)).tolist()
        self.holdings.check_frozen(groups, request.as_of)
        return {ENTRIES: entries}

    def fetch_groups(self, request: messages.FetchGroups) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
        """All rows of frozen key groups."""
        state, variable = self.variable(request.stage, request.variable), (request.stage, request.variable)
        if request.recent:
            rows = iter(self._recent(variable, request.groups))
        else:
            self.holdings.complete_frozen(variable, request.groups, request.as_of)
            rows = state.scan(_NOW, request.groups)
        # Once more: if they were dropped meanwhile, they are missing here, but exist.
        self.holdings.check_frozen(request.groups, request.as_of)
        return state.layout.rows, rows

    def fetch_due(self, request: messages.FetchDue) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
        """All entries of keys of frozen key groups that have a row which is due."""
        state, variable = self.variable(request.stage, request.variable), (request.stage, request.variable)
        event_time = EventTime(request.column, request.field)
        self.holdings.fetch_due_frozen(variable, request.groups, event_time, request.up_to, request.as_of)
        rows = state.due(_NOW, request.groups, event_time, request.up_to, since=request.since, whole_keys=True)
        # Once more: if they were dropped meanwhile, they are missing here, but exist.
        self.holdings.check_frozen(request.groups, request.as_of)
        return state.layout.rows, iter(rows.to_batches(max_chunksize=_BATCH_ROWS))

    def _recent(self, variable: Variable, groups: Collection[int]) -> list[pa.RecordBatch]:
        """The rows of keys that the last epoch changed, if it pays to bring these first."""
        state, latest = self._states[variable], self._latest.get(variable)
        if latest is None or self._repetitions[variable].share < _REPETITION_MIN:
            return []
        here = np.zeros(self.shape.key_groups, dtype=np.bool_)
        here[list(set(groups) - self.holdings.pending(variable))] = True
        keys = latest.select(state.layout.keys.names)
        keys = keys.filter(here[key_groups_of(keys.column(HASH).to_numpy(), self.shape.key_groups)])
        keys = keys.group_by(keys.schema.names).aggregate([])
        rows = entries_of(keys, pa.Table.from_batches([state.read(keys, _NOW)]))
        return list(rows.to_batches())

    def scan(self, request: messages.Scan) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
        """All rows of a variable that are this worker's."""
        state = self.variable(request.stage, request.variable)
        self.holdings.complete((request.stage, request.variable))
        return state.layout.rows, state.scan(request.epoch, self.holdings.groups)

    def describe(self) -> dict[str, Any]:
        """What is here. Rows are those of the key groups that this worker owns; bytes are all that it holds."""
        frozen = self.holdings.frozen
        return {
            **self.holdings.progress(),
            "load": [[group, load] for group, load in self.holdings.load().items()],
            "variables": [
                {"stage": stage, "variable": variable, "rows": state.rows(without=frozen), "bytes": state.bytes()}
                for (stage, variable), state in sorted(self._states.items())
            ],
        }

    # ----------------------------------------------------------------------------------------------- lookups

    def variables_of(self, stage: int) -> list[str]:
        if stage not in self.shape.stages:
            raise WorkerError(f"There is no stage {stage} here. There are: {sorted(self.shape.stages)}.")
        return list(self.shape.stages[stage].layouts)

    def variable(self, stage: int, variable: str) -> VariableState:
        state = self._states.get((stage, variable))
        if state is None:
            known = [f"{s}/{v}" for s, v in sorted(self._states)]
            raise WorkerError(f"Stage {stage} has no state variable {variable!r} here. There are: {known}.")
        return state


def _split(answers: pa.Table, keys: int) -> tuple[pa.Table, pa.Table]:
    """The answers for so many first keys, and those for the keys after them, with their own numbers."""
    index = answers.column(INDEX).to_numpy()
    cut = int(np.searchsorted(index, keys))
    after = answers.slice(cut)
    numbers = pa.array(index[cut:] - np.int32(keys), pa.int32())
    return answers.slice(0, cut), after.set_column(0, after.schema.field(0), numbers)


def _no_files(variable: Variable, groups: Collection[int]) -> CheckpointOrigin:
    raise WorkerError(f"Key groups {sorted(groups)} of {variable} are on their way, and cannot be handed over.")
