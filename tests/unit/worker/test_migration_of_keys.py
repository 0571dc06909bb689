"""One variable on its way from its former owner: what is fetched, what is drained, and what is never overwritten."""

import threading
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import pyarrow as pa
import pytest

from anabranch.core.errors import AnabranchError, CheckpointError, LostWorkerError
from anabranch.core.eventtime import EventTime
from anabranch.core.schemas import HASH, Op, VariableKind
from anabranch.worker.state.variable_state import VariableState
from anabranch.worker.transfer.group_transfer import GroupTransfer, _between_keys
from anabranch.worker.transfer.sources import StateSource
from support.migrating_state import (
    NOW,
    Change,
    Checkpoint,
    Frozen,
    applied,
    changes_table,
    group_of,
    hash_of,
    held,
    keys_table,
    layout_of,
    looked_up,
)
from support.stores import open_store

GROUPS = 8
#: The first three share a hash; the next two share a key group with nobody.
SIBLINGS = ["b", "ba", "b\x00"]
KEYS = [*SIBLINGS, "c", "f"]


class Moving:
    """State that has been moved to a new owner, and not been brought yet."""

    def __init__(self, folder: Path, kind: VariableKind, rows_per_piece: int = 1) -> None:
        self.layout = layout_of(kind)
        self.checkpoint = Checkpoint(folder / "checkpoint", self.layout, GROUPS)
        self.former, self.state = (
            VariableState(self.layout, GROUPS, open_store("memory", self.layout, GROUPS, None)) for _ in range(2)
        )
        subkeys = (None,) if kind is VariableKind.VALUE else (0, 1, 2)
        changes: list[Change] = [
            (Op.PUT, key, subkey, 100 * n + (subkey or 0)) for n, key in enumerate(KEYS) for subkey in subkeys
        ]
        self.checkpoint.add(0, changes_table(self.layout, changes))
        self.former.load(changes_table(self.layout, changes))
        self.model = applied({}, changes)
        self.source = Frozen(self.former, rows_per_piece=rows_per_piece)
        self.migration = GroupTransfer(self.state, range(GROUPS), GROUPS, self.checkpoint.now(), peer=self.source)

    def fetch(self, *keys: str) -> None:
        table = keys_table(self.layout, keys)
        self.migration.fetch(table.column(HASH).to_numpy(), table)

    def write(self, epoch: int, *changes: Change) -> None:
        """As a worker does: what is written is fetched first; then it is part of the state, and merged."""
        table = changes_table(self.layout, changes)
        self.migration.fetch(table.column(HASH).to_numpy(), table)
        self.state.add_layer(epoch, table)
        self.state.fold(epoch)
        self.model = applied(self.model, changes)


@pytest.fixture(params=[VariableKind.VALUE, VariableKind.LIST, VariableKind.MAP])
def moving(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Moving]:
    moving = Moving(tmp_path, request.param)
    yield moving
    for state in (moving.former, moving.state):
        state.close()


@pytest.fixture
def values(tmp_path: Path) -> Moving:
    return Moving(tmp_path, VariableKind.VALUE)


def test_the_siblings_have_one_hash_and_the_others_groups_of_their_own() -> None:
    assert len({hash_of(key) for key in SIBLINGS}) == 1
    assert len({group_of(key, GROUPS) for key in KEYS}) == 3


def test_a_write_to_a_key_that_has_not_arrived_is_not_undone_by_what_arrives_later(moving: Moving) -> None:
    subkey = None if moving.layout.variable.kind is VariableKind.VALUE else 1
    moving.write(1, (Op.PUT, "b", subkey, 7))
    assert looked_up(moving.state, ["b"]) == {"b": moving.model["b"]}
    moving.migration.drain(range(GROUPS))
    assert held(moving.state) == moving.model


def test_a_key_that_was_deleted_here_does_not_come_back_with_the_drain(moving: Moving) -> None:
    moving.write(1, (Op.CLEAR, "b", None, None))
    moving.write(2, (Op.CLEAR, "c", None, None))
    moving.migration.drain(range(GROUPS))
    assert held(moving.state) == moving.model
    assert set(moving.model) == {"ba", "b\x00", "f"}


def test_a_fetched_key_does_not_make_its_hash_siblings_look_migrated(moving: Moving) -> None:
    moving.fetch("b")
    assert held(moving.state).keys() == {"b"}
    moving.fetch("ba")
    assert looked_up(moving.state, ["b", "ba"]) == {key: moving.model[key] for key in ("b", "ba")}
    moving.migration.drain(range(GROUPS))
    assert held(moving.state) == moving.model


def test_what_a_drain_brings_are_values_not_keys(moving: Moving) -> None:
    moving.migration.drain(range(GROUPS))
    assert moving.source.fetched_keys == []
    assert held(moving.state) == moving.model
    assert moving.migration.brought.drained_rows == sum(map(len, moving.model.values()))


def test_a_key_that_does_not_exist_is_asked_for_once(moving: Moving) -> None:
    for _ in range(3):
        moving.fetch("bz", "b")
    assert sorted(moving.source.fetched_keys) == ["b", "bz"]
    assert looked_up(moving.state, ["bz"]) == {}


def test_only_keys_of_groups_that_are_on_their_way_are_asked_for(moving: Moving) -> None:
    moving.migration.drain([group_of("b", GROUPS)])
    moving.fetch(*KEYS)
    assert sorted(moving.source.fetched_keys) == ["c", "f"]


def test_a_key_that_a_task_names_twice_is_there_once(moving: Moving) -> None:
    moving.fetch("b", "b", "c", "b")
    assert held(moving.state) == {key: moving.model[key] for key in ("b", "c")}


def test_when_the_former_owner_fails_the_checkpoint_takes_its_place(moving: Moving) -> None:
    subkey = None if moving.layout.variable.kind is VariableKind.VALUE else 2
    moving.write(1, (Op.PUT, "ba", subkey, 7))
    moving.source.fails = True
    moving.fetch("b", "ba")
    assert looked_up(moving.state, ["b", "ba"]) == {key: moving.model[key] for key in ("b", "ba")}
    moving.migration.drain(range(GROUPS))
    assert moving.migration.pending == []
    assert held(moving.state) == moving.model


def test_when_neither_has_the_state_whoever_needs_it_gets_the_error(moving: Moving, tmp_path: Path) -> None:
    for file in (tmp_path / "checkpoint").rglob("*.parquet"):
        file.unlink()
    moving.source.fails = True
    for call in (lambda: moving.fetch("b"), lambda: moving.migration.drain([group_of("b", GROUPS)])):
        with pytest.raises(AnabranchError):
            call()
    assert group_of("b", GROUPS) in moving.migration.pending


def test_groups_that_went_elsewhere_are_not_brought_any_more(moving: Moving) -> None:
    moving.migration.forget([group_of("b", GROUPS)])
    moving.migration.drain(range(GROUPS))
    moving.fetch(*SIBLINGS)
    assert held(moving.state).keys() == {"c", "f"}


def test_what_a_drain_has_in_its_hands_is_dropped_if_its_group_goes_elsewhere(values: Moving) -> None:
    sent: list[int] = []

    def give_away() -> None:
        sent.append(1)
        if len(sent) == 2:
            values.migration.forget([group_of("b", GROUPS)])
            values.state.drop_groups([group_of("b", GROUPS)])

    values.source.on_piece = give_away
    values.migration.drain([group_of("b", GROUPS)])
    assert len(sent) == 3
    assert held(values.state) == {}


def test_a_write_during_a_drain_is_not_overwritten_by_it(values: Moving) -> None:
    epochs = iter(range(1, 100))

    def write() -> None:
        for key in SIBLINGS:
            values.write(next(epochs), (Op.PUT, key, None, 7))

    values.source.on_piece = write
    values.migration.drain(range(GROUPS))
    assert held(values.state) == values.model
    assert {values.model[key][None] for key in SIBLINGS} == {7}


def test_a_second_drain_of_a_group_brings_nothing_after_the_first_is_through(values: Moving) -> None:
    """A look at the state drains as well: two scans of one group may be under way."""
    group = group_of("b", GROUPS)

    def overtake() -> None:
        values.source.on_piece = lambda: None
        values.migration.drain([group])
        values.write(1, (Op.PUT, "b", None, 7), (Op.DELETE, "ba", None, None))

    values.source.on_piece = overtake
    values.migration.drain([group])
    assert looked_up(values.state, SIBLINGS) == {key: values.model[key] for key in ("b", "b\x00")}


def test_a_scan_that_goes_on_after_a_fetch_has_given_up_brings_nothing_old(values: Moving) -> None:
    """The former owner is slow: it answers one request too late, while another still runs."""
    failing = threading.Event()
    fetched = values.source.fetch

    def fetch_or_time_out(keys):  # type: ignore[no-untyped-def]
        if failing.is_set():
            raise LostWorkerError("The former owner did not answer in time.")
        return fetched(keys)

    values.source.fetch = fetch_or_time_out  # type: ignore[method-assign]

    def time_out_once() -> None:
        if not failing.is_set():
            failing.set()
            for key in SIBLINGS:
                values.write(SIBLINGS.index(key) + 1, (Op.PUT, key, None, 7))

    values.source.on_piece = time_out_once
    values.migration.drain([group_of("b", GROUPS)])
    assert looked_up(values.state, SIBLINGS) == {key: {None: 7} for key in SIBLINGS}


def test_what_a_scan_brought_after_a_fetch_gave_up_may_be_written_at_once(values: Moving) -> None:
    """Then the checkpoint must not bring it again."""
    group = group_of("b", GROUPS)
    fetched = values.source.fetch

    def time_out(_keys):  # type: ignore[no-untyped-def]
        raise LostWorkerError("The former owner did not answer in time.")

    def give_up() -> None:
        values.source.on_piece = lambda: None
        values.source.fetch = time_out  # type: ignore[method-assign]
        values.fetch("c")
        values.source.fetch = fetched  # type: ignore[method-assign]

    values.source.on_piece = give_up
    values.migration.drain([group])
    assert group not in values.migration.pending
    values.write(1, (Op.PUT, "b", None, 7))
    values.write(2, (Op.PUT, "ba", None, 8))
    values.migration.drain(range(GROUPS))
    assert held(values.state) == values.model


def test_a_write_waits_for_a_drain_from_the_checkpoint_or_is_left_alone_by_it(values: Moving) -> None:
    """The old owner has failed in the middle: a drain reads files while a task asks for one of its keys."""
    group = group_of("b", GROUPS)
    reads, written = threading.Event(), threading.Event()
    make_source = values.checkpoint.now()

    def make_slow(groups: Collection[int]) -> StateSource:
        source = make_source(groups)
        scan = source.scan

        def slow(groups, **about):  # type: ignore[no-untyped-def]
            if list(groups) == [group]:
                parts = scan(groups, **about)
                reads.set()
                written.wait(10)
                return parts
            return scan(groups, **about)

        source.scan = slow  # type: ignore[method-assign]
        return source

    values.migration.redirect(make_slow)
    values.source.fails = True
    with ThreadPoolExecutor(max_workers=2) as pool:
        drain = pool.submit(values.migration.drain, [group])
        assert reads.wait(10)
        write = pool.submit(values.write, 1, (Op.PUT, "b", None, 7))
        wait([write], timeout=0.3)  # it may have to wait for the drain
        written.set()
        drain.result()
        write.result()
    values.write(2, (Op.PUT, "ba", None, 8))
    values.migration.drain(range(GROUPS))
    assert held(values.state) == values.model


def test_files_that_are_gone_are_read_where_they_are_now(values: Moving) -> None:
    """An assignment names other files just while a drain reads those that may be cleaned up from then on."""
    make_source = values.checkpoint.now()

    def make_gone(groups: Collection[int]) -> StateSource:
        source = make_source(groups)

        def gone(*_, **__):  # type: ignore[no-untyped-def]
            values.migration.redirect(make_source)
            raise CheckpointError("The file is gone.")

        source.scan = gone  # type: ignore[method-assign]
        return source

    values.source.fails = True
    values.migration.redirect(make_gone)
    values.migration.drain(range(GROUPS))
    assert values.migration.pending == []
    assert held(values.state) == values.model


def test_what_is_due_in_an_older_file_only_is_not_seen_while_the_checkpoint_takes_the_owners_place(
    values: Moving, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The former owner did not name the key, because it is deleted there; the checkpoint has it and its deletion."""
    event_time, up_to, groups = EventTime("n", ""), 50, frozenset(range(GROUPS))
    deleted: list[Change] = [(Op.DELETE, KEYS[0], None, None)]
    values.checkpoint.add(1, changes_table(values.layout, deleted))
    values.migration.redirect(values.checkpoint.now())
    values.former.load(changes_table(values.layout, deleted))
    values.model = applied(values.model, deleted)
    values.migration.fetch_due(groups, event_time, up_to)
    values.source.fails = True
    values.fetch(KEYS[3])
    values.migration.fetch_due(groups, event_time, up_to)
    seen: list[int] = []
    load = values.state.load

    def watched(part: pa.Table) -> None:
        load(part)
        seen.append(sum(map(len, values.state.due(NOW, groups, event_time, up_to))))

    monkeypatch.setattr(values.state, "load", watched)
    values.migration.drain(groups)
    assert seen
    assert not any(seen)
    assert held(values.state) == values.model


@pytest.mark.parametrize("cut_at", range(9))
def test_rows_that_come_first_are_loaded_in_pieces_that_cut_no_key(
    moving: Moving, monkeypatch: pytest.MonkeyPatch, cut_at: int
) -> None:
    monkeypatch.setattr("anabranch.worker.transfer.group_transfer._ROWS_PER_LOAD", 2)
    rows = changes_table(
        moving.layout,
        [(Op.PUT, key, subkey, 1) for key, subkeys in (("b", 3), ("c", 1), ("f", 4)) for subkey in range(subkeys)],
    )
    pieces = list(_between_keys([rows.slice(0, cut_at), rows.slice(cut_at)]))
    assert [hash_ for piece in pieces for part in piece for hash_ in part.column(HASH).to_pylist()] == rows.column(
        HASH
    ).to_pylist()
    keys = [{hash_ for part in piece for hash_ in part.column(HASH).to_pylist()} for piece in pieces]
    assert sum(map(len, keys)) == 3, "every key is in one piece"
    assert len(pieces) > 1
