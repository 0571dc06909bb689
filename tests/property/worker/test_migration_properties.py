"""State that migrates is, for whoever asks and whenever, what a dict is: lazily, in bulk, twice over, with faults.

A key may be asked for before, while and after the drain passes it; its former owner may fail at any moment; the new
owner may become a former owner while half of the state is still on its way.
"""

import contextlib
import random
import sys
import tempfile
import threading
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from anabranch.core.schemas import HASH, Op, VariableKind
from anabranch.worker.state.variable_state import VariableState
from anabranch.worker.transfer.group_transfer import GroupTransfer
from support.migrating_state import (
    BY_VALUE,
    Change,
    Checkpoint,
    Frozen,
    Model,
    applied,
    changes_table,
    due,
    group_of,
    hash_of,
    held,
    keys_table,
    layout_of,
    looked_up,
)
from support.stores import open_store

GROUPS = 8
#: Four keys for each of eight hashes, in six of the key groups.
KEYS = [letter + tail for letter in "abcdefgh" for tail in ("", "a", "\x00", "b")]
SUBKEYS = (0, 1, 2)
KINDS = st.sampled_from([VariableKind.VALUE, VariableKind.LIST, VariableKind.MAP])
STORES = st.sampled_from(["memory", "memory", "rocksdb"])


def test_the_keys_share_hashes_and_key_groups() -> None:
    hashes = {hash_of(key) for key in KEYS}
    assert len(hashes) == 8
    assert 1 < len({group_of(key, GROUPS) for key in KEYS}) < 8
    assert any(value < 0 for value in hashes)


@st.composite
def changes_of(draw: st.DrawFn, kind: VariableKind, keys: list[str]) -> list[Change]:
    """The changes of one epoch: for each key perhaps a CLEAR first, then different sub-keys."""
    changes: list[Change] = []
    for key in draw(st.lists(st.sampled_from(keys), unique=True, min_size=1, max_size=8)) if keys else []:
        if draw(st.booleans()):
            changes.append((Op.CLEAR, key, None, None))
        for subkey in (None,) if kind is VariableKind.VALUE else SUBKEYS:
            op = draw(st.sampled_from([Op.PUT, Op.PUT, Op.DELETE, None]))
            if op is not None:
                changes.append((op, key, subkey, draw(st.integers(0, 99)) if op == Op.PUT else None))
    return changes


def due_in(model: Model, groups: Collection[int], up_to: int) -> Model:
    """The entries of these key groups whose value is not above a number."""
    found = {
        key: {subkey: value for subkey, value in entries.items() if value <= up_to}
        for key, entries in model.items()
        if group_of(key, GROUPS) in groups
    }
    return {key: entries for key, entries in found.items() if entries}


class MigratingState(RuleBasedStateMachine):
    """One variable, as its owner changes."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.opened = 0
        self.states: list[VariableState] = []

    @initialize(data=st.data(), kind=KINDS, store=STORES)
    def begin(self, data: st.DataObject, kind: VariableKind, store: str) -> None:
        self.kind, self.store, self.layout = kind, store, layout_of(kind)
        self.checkpoint = Checkpoint(Path(self.folder.name) / "checkpoint", self.layout, GROUPS)
        self.model: Model = {}
        self.epoch = 0
        self.groups = frozenset(range(GROUPS))
        self.state = self.new_state()
        self.migration: GroupTransfer | None = None
        subkeys = (None,) if kind is VariableKind.VALUE else SUBKEYS[:2]
        self.add_epoch([(Op.PUT, key, subkey, n) for n, key in enumerate(KEYS[::2]) for subkey in subkeys])
        self.state.fold(self.epoch)
        self.add_epoch(data.draw(changes_of(kind, KEYS)))
        self.move(data)

    def new_state(self) -> VariableState:
        self.opened += 1
        store = open_store(self.store, self.layout, GROUPS, Path(self.folder.name) / str(self.opened))
        self.states.append(VariableState(self.layout, GROUPS, store))
        return self.states[-1]

    def add_epoch(self, changes: list[Change]) -> None:
        self.epoch += 1
        table = changes_table(self.layout, changes)
        self.checkpoint.add(self.epoch, table)
        self.state.add_layer(self.epoch, table)
        self.model = applied(self.model, changes)

    def mine(self) -> list[str]:
        return [key for key in KEYS if group_of(key, GROUPS) in self.groups]

    def move(self, data: st.DataObject) -> None:
        """Some key groups go to a new owner; those that stay behind, or go elsewhere, are not looked at any more."""
        moved = data.draw(st.sets(st.sampled_from(sorted(self.groups)), min_size=min(3, len(self.groups))))
        self.source = Frozen(self.state, self.migration)
        self.frozen = held(self.state), self.migration
        self.groups = frozenset(moved)
        self.model = self.without_strangers(self.model)
        self.state = self.new_state()
        self.migration = GroupTransfer(self.state, self.groups, GROUPS, self.checkpoint.now(), peer=self.source)
        self.before = self.epoch, self.model

    # ------------------------------------------------------------------------------------------------ rules

    @rule(data=st.data())
    def read(self, data: st.DataObject) -> None:
        keys = data.draw(st.lists(st.sampled_from(self.mine()), max_size=6)) if self.mine() else []
        self.fetch(keys)
        expected = {key: self.model[key] for key in keys if key in self.model}
        assert looked_up(self.state, list(dict.fromkeys(keys)), self.epoch) == expected

    @rule(data=st.data(), up_to=st.integers(0, 99))
    def ask_what_is_due(self, data: st.DataObject, up_to: int) -> None:
        groups = data.draw(st.sets(st.sampled_from(sorted(self.groups)))) if self.groups else set()
        assert self.migration is not None
        self.migration.fetch_due(sorted(groups), BY_VALUE, up_to)
        assert due(self.state, groups, up_to, self.epoch) == due_in(self.model, groups, up_to)

    def fetch(self, keys: list[str]) -> None:
        assert self.migration is not None
        table = keys_table(self.layout, keys)
        self.migration.fetch(table.column(HASH).to_numpy(), table)

    @rule(data=st.data(), is_folded=st.booleans())
    def write(self, data: st.DataObject, is_folded: bool) -> None:
        """As a worker does: no key may change before it is here."""
        self.before = self.epoch, self.model
        changes = data.draw(changes_of(self.kind, self.mine()))
        table = changes_table(self.layout, changes)
        assert self.migration is not None
        self.migration.fetch(table.column(HASH).to_numpy(), table)
        self.add_epoch(changes)
        if is_folded:
            self.fold()

    @rule()
    def fold(self) -> None:
        self.state.fold(self.epoch)
        self.before = self.epoch, self.model

    @precondition(lambda self: self.before[0] < self.epoch)
    @rule()
    def roll_back(self) -> None:
        self.epoch, self.model = self.before
        self.state.drop_layers_after(self.epoch)
        self.checkpoint.roll_back(self.epoch)

    @rule(data=st.data())
    def drain(self, data: st.DataObject) -> None:
        groups = data.draw(st.sets(st.integers(0, GROUPS - 1)))
        assert self.migration is not None
        self.migration.drain(sorted(groups))
        assert not groups & set(self.migration.pending)

    @precondition(lambda self: not self.source.fails)
    @rule(pieces=st.none() | st.integers(0, 4))
    def lose_the_former_owner(self, pieces: int | None) -> None:
        """At once, or in the middle of the next scan."""
        self.source.fails = pieces is None
        self.source.pieces_left = pieces

    @precondition(lambda self: len(self.groups) > 2)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        """Some key groups go elsewhere; what is here of them is dropped, as their holder does."""
        groups = data.draw(st.sets(st.integers(0, GROUPS - 1), max_size=2))
        assert self.migration is not None
        self.migration.forget(sorted(groups))
        self.state.drop_groups(sorted(groups))
        self.groups -= groups
        self.model = self.without_strangers(self.model)
        self.before = self.before[0], self.without_strangers(self.before[1])

    def without_strangers(self, model: Model) -> Model:
        return {key: entries for key, entries in model.items() if group_of(key, GROUPS) in self.groups}

    @rule()
    def point_to_newer_files(self) -> None:
        """What the new owner did is in the files as well, and must not be done twice."""
        self.fold()
        assert self.migration is not None
        self.migration.redirect(self.checkpoint.now())

    @precondition(lambda self: self.opened < 4 and self.groups)
    @rule(data=st.data())
    def move_again(self, data: st.DataObject) -> None:
        """Another rescale while this one is under way."""
        self.move(data)

    # ----------------------------------------------------------------------------------------------- checks

    @precondition(lambda self: self.states)
    @invariant()
    def what_has_arrived_is_right(self) -> None:
        assert self.migration is not None
        arrived = held(self.state, self.epoch)
        for key, entries in arrived.items():
            assert entries.items() <= self.model.get(key, {}).items(), key
        pending = set(self.migration.pending)
        assert pending <= self.groups
        for key in self.mine():
            if group_of(key, GROUPS) not in pending:
                assert arrived.get(key) == self.model.get(key), key

    def teardown(self) -> None:
        try:
            if self.states:
                assert self.migration is not None
                self.migration.drain(sorted(self.groups))
                assert self.migration.pending == []
                assert held(self.state, self.epoch) == self.model
                frozen, migration = self.frozen
                if migration is None:
                    assert held(self.states[-2]) == frozen
        finally:
            for state in self.states:
                state.close()
            self.folder.cleanup()


TestMigratingState = MigratingState.TestCase
TestMigratingState.settings = settings(
    max_examples=60,
    stateful_step_count=10,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    # Every step opens stores and files: making an example small takes longer than a test may.
    phases=[phase for phase in Phase if phase is not Phase.shrink],
)


# ------------------------------------------------------------------------------------------------- side by side


@pytest.fixture
def _restless() -> Iterator[None]:
    """Threads take turns a hundred times as often as usual."""
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(5e-5)
    yield
    sys.setswitchinterval(interval_s)


class Epochs:
    """A job's epochs on state that migrates: tasks in several threads, while a drain runs and the last epoch folds."""

    def __init__(self, folder: Path, kind: VariableKind, seed: int, store: str) -> None:
        self.chance = random.Random(seed)
        self.keys = [f"{chr(97 + n % 20)}{n}" for n in range(400)]
        self.kind, self.layout = kind, layout_of(kind)
        self.checkpoint = Checkpoint(folder / "checkpoint", self.layout, GROUPS)
        self.former, self.state = (
            VariableState(self.layout, GROUPS, open_store(store, self.layout, GROUPS, folder / name)) for name in "ab"
        )
        first = [change for key in self.keys[:300] for change in self.changes_of(key)]
        table = changes_table(self.layout, first)
        self.checkpoint.add(0, table)
        self.former.load(table)
        self.model = applied({}, first)
        self.source = Frozen(self.former, rows_per_piece=7)
        self.migration = GroupTransfer(self.state, range(GROUPS), GROUPS, self.checkpoint.now(), peer=self.source)

    def changes_of(self, key: str) -> list[Change]:
        subkeys = (None,) if self.kind is VariableKind.VALUE else SUBKEYS
        ops = [(self.chance.choice([Op.PUT, Op.PUT, Op.DELETE]), subkey) for subkey in subkeys]
        return [(op, key, subkey, self.chance.randrange(1000) if op == Op.PUT else None) for op, subkey in ops]

    def task(self, epoch: int, keys: list[str], changes: list[Change]) -> None:
        table = keys_table(self.layout, keys)
        self.migration.fetch(table.column(HASH).to_numpy(), table)
        assert looked_up(self.state, keys, epoch - 1) == {key: self.model[key] for key in keys if key in self.model}
        groups, up_to = range(epoch % 3, GROUPS, 3), 200 * epoch
        self.migration.fetch_due(groups, BY_VALUE, up_to)
        assert due(self.state, groups, up_to, epoch - 1) == due_in(self.model, groups, up_to)
        written = changes_table(self.layout, changes)
        self.migration.fetch(written.column(HASH).to_numpy(), written)

    def run(self, epochs: int, pool: ThreadPoolExecutor) -> None:
        for epoch in range(1, epochs + 1):
            chosen = self.chance.sample(self.keys, 60)
            shares = [chosen[start::3] for start in range(3)]
            changes = [[change for key in share[::2] for change in self.changes_of(key)] for share in shares]
            # Every task also looks at keys of the others: two threads fetch the same.
            tasks = [
                pool.submit(self.task, epoch, share + chosen[:5], changed)
                for share, changed in zip(shares, changes, strict=True)
            ]
            for task in tasks:
                task.result()
            self.state.add_layer(epoch, changes_table(self.layout, [each for share in changes for each in share]))
            self.model = applied(self.model, [each for share in changes for each in share])
            pool.submit(self.state.fold, epoch - 1)

    def close(self) -> None:
        for state in (self.former, self.state):
            state.close()


@pytest.mark.usefixtures("_restless")
@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(kind=KINDS, store=STORES, seed=st.integers(0, 2**32), fails_after=st.none() | st.integers(0, 25))
def test_fetches_and_a_drain_at_the_same_time_lose_and_double_nothing(
    kind: VariableKind, store: str, seed: int, fails_after: int | None
) -> None:
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(max_workers=5) as pool:
        epochs = Epochs(Path(folder), kind, seed, store)
        epochs.source.pieces_left = fails_after
        drain = pool.submit(lambda: [epochs.migration.drain([group]) for group in range(GROUPS)])
        epochs.run(4, pool)
        drain.result()
        assert epochs.migration.pending == []
        assert held(epochs.state) == epochs.model
        epochs.close()


@pytest.mark.usefixtures("_restless")
@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
@given(kind=KINDS, seed=st.integers(0, 2**32))
def test_keys_that_several_threads_ask_for_are_fetched_once(kind: VariableKind, seed: int) -> None:
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(max_workers=5) as pool:
        epochs = Epochs(Path(folder), kind, seed, "memory")
        gate = threading.Barrier(3)

        def fetch() -> None:
            with contextlib.suppress(threading.BrokenBarrierError):
                gate.wait(10)
            table = keys_table(epochs.layout, epochs.keys)
            epochs.migration.fetch(table.column(HASH).to_numpy(), table)

        for each in [pool.submit(fetch) for _ in range(3)]:
            each.result()
        assert sorted(epochs.source.fetched_keys) == sorted(epochs.keys)
        assert held(epochs.state) == epochs.model
        epochs.close()
