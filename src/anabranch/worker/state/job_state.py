"""The state of one job on one worker: its variables, the key groups that are here, and how they are read."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from anabranch.core import requests
from anabranch.core.answers import HeldState, HeldVariable, SharedOffer, TransferProgress
from anabranch.core.errors import WorkerError
from anabranch.core.eventtime import EventTime
from anabranch.core.ids import JobId, StageNumber
from anabranch.core.keygroups import key_groups_of
from anabranch.core.requests import Expiry
from anabranch.core.schemas import HASH, INDEX, StageSpec
from anabranch.wire.credentials import Credentials
from anabranch.wire.frames import Parts, Tables
from anabranch.wire.messages import DUE, ENTRIES, EXPIRED, REST
from anabranch.worker.parts import PRODUCTION, WorkerParts
from anabranch.worker.state.key_recurrence import KeyRecurrence
from anabranch.worker.state.shared_state import SharedState
from anabranch.worker.state.variable_state import VariableState
from anabranch.worker.stores import SharedStore, Store
from anabranch.worker.stores.options import StoreOptions
from anabranch.worker.transfer.group_ownership import GroupOwnership, GroupSources, Variable
from anabranch.worker.transfer.sources import CheckpointSource, Peer, PeerSource

#: Newer than any epoch: what is frozen does not change any more.
_NOW = 1 << 62
#: It pays to bring the keys of the last epoch first if this share of them comes again in the next one.
_RECURRENCE_MIN = 0.3


@dataclass(frozen=True)
class JobShape:
    """What has to be known of a job to hold its state."""

    key_groups: int
    checkpoint: str
    stages: Mapping[int, StageSpec]


class JobState:
    """All variables of a job. Any thread may call any method; what changes state is called by one at a time."""

    def __init__(self, shape: JobShape, stores: StoreOptions, job: JobId, parts: WorkerParts = PRODUCTION) -> None:
        self.shape = shape
        self._parts = parts
        self.storage = parts.open_storage(shape.checkpoint)
        self._states: dict[Variable, VariableState] = {}
        opened: dict[Variable, Store] = {}
        for spec in shape.stages.values():
            for variable, layout in spec.layouts.items():
                opened[spec.number, variable] = stores.open(job, spec, variable, shape.key_groups)
                state = VariableState(layout, shape.key_groups, opened[spec.number, variable])
                self._states[spec.number, variable] = state
        #: Whether epochs tend to change the same keys again.
        self._recurrences = {variable: KeyRecurrence() for variable in self._states}
        self.ownership = GroupOwnership(self._states, shape.key_groups, parts.scheduler)
        shared = [store for store in opened.values() if isinstance(store, SharedStore)]
        #: Whether key groups were changing hands when a shared store failed.
        self._is_torn = False
        #: Only if the job's state is in a store that workers share.
        self._shared = SharedState(self._states.values(), shared) if shared else None

    def hand_over(self, request: requests.HandOver) -> tuple[SharedOffer, ...]:
        """Keep only some key groups; the others are left in the shared store, as far as they are whole."""
        if self._shared is None:
            raise _not_shared()
        groups = self.ownership.groups - set(request.keep)
        pending = frozenset(group for variable in self._states for group in self.ownership.pending(variable))
        with self._lost_on_errors():
            shared = self._shared.hand_over(groups - pending, request.epoch)
            self._shared.forget(groups)
            self.ownership.give_up(groups)
        return shared

    @property
    def is_lost(self) -> bool:
        """Whether some state that should be here is not: the job has to be opened again."""
        return self._is_torn or (self._shared is not None and self._shared.is_lost)

    def look(self) -> None:
        """Find out whether a shared store still has what this worker uses there: see ``is_lost``."""
        if self._shared is not None and not self.is_lost:
            self._shared.look()

    @contextmanager
    def _lost_on_errors(self) -> Iterator[None]:
        """Key groups of a shared store change hands: if that fails halfway, it is not known which have."""
        try:
            yield
        except Exception:
            self._is_torn = self._shared is not None
            raise

    def assign(self, request: requests.Assign, credentials: Credentials) -> tuple[int, int]:
        """Hold exactly these key groups; answers with how many came and went."""
        with self._lost_on_errors():
            return self._assign(request, credentials)

    def _assign(self, request: requests.Assign, credentials: Credentials) -> tuple[int, int]:
        def from_checkpoint(variable: Variable, groups: Collection[int]) -> CheckpointSource:
            return CheckpointSource(
                self.storage,
                self._states[variable].layout,
                self.shape.key_groups,
                groups,
                [file for file in request.snapshot if (file.stage, file.variable) == variable],
                [file for file in request.changes if (file.stage, file.variable) == variable],
                self._parts.scheduler,
            )

        def from_peer(peer: Peer, variable: Variable) -> PeerSource:
            return PeerSource(peer, StageNumber(variable[0]), self._states[variable].layout, self._parts.connect)

        peers = {}
        for offer in request.peers:
            timeout_s = request.peer_timeout_ms / 1000
            peer = Peer(offer.address, request.epoch, timeout_s, credentials, request.job, request.generation)
            peers[peer.address] = partial(from_peer, peer), frozenset(offer.groups)
        freeze_as_of = request.epoch if request.freeze else None
        shared: frozenset[int] = frozenset()
        if self._shared is None:
            if request.shared:
                raise _not_shared()
        else:
            freeze_as_of = None
            new = set(request.groups) - self.ownership.groups
            shared = self._shared.take_over(new, request.shared, f"{request.generation}.{request.number}")
            self._shared.forget(self.ownership.groups - set(request.groups))
        sources = GroupSources(from_checkpoint, peers if self._shared is None else {}, shared)
        self.ownership.drains_migrations = request.drain
        gained, left = self.ownership.assign(request.groups, sources, freeze_as_of=freeze_as_of)
        for state in self._states.values() if shared else ():
            state.expect_unnoticed(shared)
        if not peers:
            self.ownership.start_drain()
        return len(gained), len(left)

    # ------------------------------------------------------------------------------------------------ layers

    def add_layer(self, epoch: int, changes_of: dict[Variable, pa.Table]) -> None:
        """Make the changes of an epoch part of the state. They are taken out of the dict, and let go of bit by bit."""
        for variable, state in self._states.items():
            changes_of.setdefault(variable, state.layout.changes.empty_table())
            self._recurrences[variable].note(changes_of[variable].column(HASH).to_numpy())
            state.add_layer(epoch, changes_of.pop(variable))

    def drop_layers_after(self, epoch: int) -> None:
        for state in self._states.values():
            state.drop_layers_after(epoch)

    def fold(self, up_to: int) -> None:
        for state in self._states.values():
            state.fold(up_to)

    def close(self) -> None:
        self.ownership.close()
        for state in self._states.values():
            state.close()

    # --------------------------------------------------------------------------------------------- for tasks

    def read(self, request: requests.Read, keys: pa.Table, epoch: int) -> Parts:
        """All that a task asks for is looked up now, and decoded while the answer is on its way."""
        answers: list[Parts] = []
        wanted = keys
        if request.due is not None:
            due_keys = self._due_keys(request.due, request, keys, epoch)
            answers.append([(DUE, due_keys)])
            wanted = pa.concat_tables([keys, due_keys])
        hashes = wanted.column(HASH).to_numpy()
        for name in self.variables_of(request.stage):
            state = self._states[request.stage, name]
            self.ownership.fetch((request.stage, name), hashes, wanted)
            found = _tables(name, state.read_in_batches(wanted, epoch))
            answers.append(found if request.due is None else _split(found, len(keys)))
            if request.rest:
                self.ownership.complete((request.stage, name), request.groups)
                rest = _between(state.scan(epoch, request.groups, without=keys), request.hashes)
                answers.append([(REST + name, state.layout.rows.empty_table())])
                answers.append(_tables(REST + name, rest))
        answers += [_tables(EXPIRED + each.variable, self._expired(each, request, epoch)) for each in request.expired]
        return chain.from_iterable(answers)

    def note_further_rows(self, rows: pa.Table | None) -> None:
        """The load of a task that has more rows than keys."""
        if rows is not None:
            self.ownership.add_load(rows.column(0).to_numpy(), rows.column(1).to_numpy())

    def _expired(self, expiry: Expiry, request: requests.Read, epoch: int) -> Iterator[pa.RecordBatch]:
        """Rows that are due."""
        variable = request.stage, expiry.variable
        state = self.variable(*variable)
        groups, event_time = frozenset(request.groups), EventTime(expiry.column, expiry.field)
        if expiry.whole:
            self.ownership.fetch_due(variable, groups, event_time, expiry.up_to)
        else:
            groups -= self.ownership.pending(variable)
        return state.due(epoch, groups, event_time, expiry.up_to)

    def _due_keys(self, expiry: Expiry, request: requests.Read, asked: pa.Table, epoch: int) -> pa.Table:
        """Keys with rows that are due, each once, but for those that were asked for."""
        state = self.variable(request.stage, expiry.variable)
        known, names = state.known_keys(), state.layout.keys.names
        known.add(asked)
        rows = _between(self._expired(expiry, request, epoch), request.hashes)
        parts = [known.added(pa.Table.from_batches([batch]).select(names)) for batch in rows]
        return pa.concat_tables([state.layout.keys.empty_table(), *parts])

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
            self.ownership.fetch((stage, variable), table.column(HASH).to_numpy(), table)
        return tables

    # ------------------------------------------------------------------------------------------- for others

    def fetch_keys(self, request: requests.FetchKeys, keys: pa.Table) -> Parts:
        """The entries of frozen keys."""
        state = self.variable(request.stage, request.variable)
        hashes = keys.column(HASH).to_numpy()
        self.ownership.fetch_frozen((request.stage, request.variable), hashes, keys, request.as_of)
        entries = state.read_in_batches(keys, _NOW)
        # Once more: if they were dropped meanwhile, they are missing here, but exist.
        groups = np.unique(key_groups_of(hashes, self.shape.key_groups)).tolist()
        self.ownership.check_frozen(groups, request.as_of)
        return _tables(ENTRIES, entries)

    def fetch_groups(self, request: requests.FetchGroups) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
        """All rows of frozen key groups."""
        state, variable = self.variable(request.stage, request.variable), (request.stage, request.variable)
        if request.recent:
            rows = self._recent(variable, request.groups)
        else:
            self.ownership.complete_frozen(variable, request.groups, request.as_of)
            rows = state.scan(_NOW, request.groups)
        # Once more: if they were dropped meanwhile, they are missing here, but exist.
        self.ownership.check_frozen(request.groups, request.as_of)
        return state.layout.rows, rows

    def fetch_due(self, request: requests.FetchDue) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
        """All entries of keys of frozen key groups that have a row which is due."""
        state, variable = self.variable(request.stage, request.variable), (request.stage, request.variable)
        event_time = EventTime(request.column, request.field)
        self.ownership.fetch_due_frozen(variable, request.groups, event_time, request.up_to, request.as_of)
        rows = state.due(_NOW, request.groups, event_time, request.up_to, since=request.since, whole_keys=True)
        # Once more: if they were dropped meanwhile, they are missing here, but exist.
        self.ownership.check_frozen(request.groups, request.as_of)
        return state.layout.rows, rows

    def _recent(self, variable: Variable, groups: Collection[int]) -> Iterator[pa.RecordBatch]:
        """The rows of keys that the last epoch changed, if it pays to bring these first."""
        if self._recurrences[variable].share < _RECURRENCE_MIN:
            return iter(())
        return self._states[variable].latest(_NOW, set(groups) - self.ownership.pending(variable))

    def scan(self, request: requests.Scan) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
        """All rows of a variable that are this worker's."""
        state = self.variable(request.stage, request.variable)
        self.ownership.complete((request.stage, request.variable))
        return state.layout.rows, state.scan(request.epoch, self.ownership.groups)

    def describe(self, progress: TransferProgress) -> HeldState:
        """What is here. Rows are those of the key groups that this worker owns; bytes are all that it holds."""
        frozen = self.ownership.frozen
        held = [
            HeldVariable(
                stage=StageNumber(stage), variable=variable, rows=state.rows(without=frozen), bytes=state.bytes()
            )
            for (stage, variable), state in sorted(self._states.items())
        ]
        return HeldState(progress=progress, load=tuple(self.ownership.load().items()), variables=tuple(held))

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


def _not_shared() -> WorkerError:
    return WorkerError(
        "This worker keeps state for itself, and was given key groups of a shared store. Start all workers of a "
        "job with the same --store."
    )


def _tables(name: str, batches: Iterable[pa.RecordBatch]) -> Parts:
    """The parts of an answer, under one name."""
    return ((name, pa.Table.from_batches([batch])) for batch in batches)


def _split(parts: Parts, keys: int) -> Parts:
    """The answers for the first keys, and those for the due keys after them, with their own numbers."""
    for name, answers in parts:
        index = answers.column(INDEX).to_numpy()
        cut = int(np.searchsorted(index, keys))
        after = answers.slice(cut)
        numbers = pa.array(index[cut:] - np.int32(keys), pa.int32())
        yield name, answers.slice(0, cut)
        yield DUE + name, after.set_column(0, after.schema.field(0), numbers)


def _between(batches: Iterator[pa.RecordBatch], hashes: tuple[int, int] | None) -> Iterator[pa.RecordBatch]:
    """The rows whose hash is from the first to the last of two, or all of them."""
    if hashes is None:
        return batches
    first, last = hashes

    def is_meant(of_rows: pa.Array) -> pa.Array:
        return pc.and_(pc.greater_equal(of_rows, first), pc.less_equal(of_rows, last))

    return (batch.filter(is_meant(batch.column(HASH))) for batch in batches)
