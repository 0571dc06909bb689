"""Mistakes in the transfer of key groups that the histories must find."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import pyarrow as pa
import pytest

from anabranch.core.errors import AnabranchError
from anabranch.core.transactions import TransactionMachine
from anabranch.worker.state.rows import Changes, Hashes
from anabranch.worker.state.shared_state import SharedState
from anabranch.worker.stores.redis_rows import GroupRows, Places
from anabranch.worker.transfer.group_ownership import GroupOwnership, GroupSources, Variable
from anabranch.worker.transfer.group_transfer import GroupTransfer
from simulated.families import (
    draw_chains,
    draw_losses,
    draw_moves,
    draw_slow,
    draw_strays,
)
from simulated.finding import is_found
from simulated.redis import draw_set_back, draw_shared
from simulated.runs import Draw
from simulated.state import DictKnown

ASSIGN = GroupOwnership.assign
DRAIN = GroupTransfer.drain
FALL_BACK = GroupTransfer._fall_back
CHANGE = GroupRows.change
GO_ON = SharedState._go_on

# Most mistakes are found at once; on a busy machine some take minutes.
pytestmark = pytest.mark.timeout(1200)


def fetches_nothing(_source: Any, _hashes: Hashes, _keys: Any = None) -> None:
    """Keys that have not arrived are taken for keys that do not exist."""


def drains_over_newer_state(transfer: GroupTransfer, groups: Collection[int], **about: Any) -> None:
    """The drain brings keys that have been fetched, and maybe changed since."""
    known = transfer._known
    transfer._known = transfer._state.known_keys()
    try:
        DRAIN(transfer, groups, **about)
    finally:
        transfer._known = known


def keeps_dropped_state(ownership: GroupOwnership, groups: frozenset[int]) -> None:
    """Groups that come back find what they left behind."""
    for transfer in ownership._all():
        transfer.forget(groups)


@pytest.mark.parametrize(
    ("owner", "method", "mistake", "draw"),
    [
        (GroupTransfer, "fetch", fetches_nothing, draw_losses),
        (GroupTransfer, "drain", drains_over_newer_state, draw_losses),
        (GroupOwnership, "_drop", keeps_dropped_state, draw_losses),
    ],
)
def test_a_mistake_in_transfers_from_the_checkpoint_is_found(
    owner: type, method: str, mistake: Callable[..., Any], draw: Draw, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, method, mistake)
    assert is_found(draw)


def forgets_what_was_fetched(transfer: GroupTransfer, _keys: Any, fetched: tuple[bool, list[Any]]) -> None:
    """The drain brings the old value of a key that has been fetched and changed."""
    for part in fetched[1]:
        transfer._state.load(transfer._still_pending(part))


def falls_back_without_known_keys(transfer: GroupTransfer, error: AnabranchError) -> None:
    """The checkpoint brings keys that are known, and maybe changed since."""
    FALL_BACK(transfer, error)
    transfer._known = transfer._state.known_keys()


def releases_at_once(
    ownership: GroupOwnership, groups: Collection[int], sources: GroupSources, *, freeze_as_of: int | None = None
) -> tuple[frozenset[int], frozenset[int]]:
    """What is kept for others is dropped before they have it, and still offered."""
    gained, left = ASSIGN(ownership, groups, sources, freeze_as_of=freeze_as_of)
    ownership._drop(left)
    return gained, left


def answers_for_moved_groups(ownership: GroupOwnership, variable: Variable, hashes: Hashes, keys: Any) -> None:
    """The old owner goes on as if nothing had moved."""
    for each in ownership._arriving.get(variable, ()):
        each.fetch(hashes, keys)


def answers_with_what_it_has(ownership: GroupOwnership, _variable: Variable, *what: Any) -> None:
    """The middle of a chain does not ask for what it has not fetched itself."""
    if len(what) == 2:
        ownership.check_frozen(*what)


@pytest.mark.parametrize(
    ("owner", "method", "mistake", "draw"),
    [
        (GroupTransfer, "fetch", fetches_nothing, draw_moves),
        (GroupTransfer, "_load_fetched", forgets_what_was_fetched, draw_moves),
        (GroupTransfer, "_fall_back", falls_back_without_known_keys, draw_slow),
        (GroupOwnership, "assign", releases_at_once, draw_moves),
        (GroupOwnership, "fetch", answers_for_moved_groups, draw_strays),
        (GroupOwnership, "complete_frozen", answers_with_what_it_has, draw_chains),
    ],
)
def test_a_mistake_in_transfers_from_old_owners_is_found(
    owner: type, method: str, mistake: Callable[..., Any], draw: Draw, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, method, mistake)
    assert is_found(draw)


def takes_half_changes_for_whole_ones(rows: GroupRows, changes: Changes, places: Places) -> None:
    """A change that Redis has made in part is forgotten, and the next ones go on from there."""
    try:
        CHANGE(rows, changes, places)
    finally:
        for place in places.values():
            place.is_lost = False


def goes_on_with_older_versions(
    shared: SharedState, groups: Collection[int], incarnation: str, _least: Mapping[int, int]
) -> frozenset[int]:
    """A Redis that was set back is not noticed."""
    return GO_ON(shared, groups, incarnation, dict.fromkeys(groups, 0))


def test_a_shared_store_that_was_set_back_unnoticed_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SharedState, "_go_on", goes_on_with_older_versions)
    assert is_found(draw_set_back)


def test_half_a_change_in_a_shared_store_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    # Either mistake alone does no harm: the worker breaks down, or its store says that it is lost.
    monkeypatch.setattr(GroupRows, "change", takes_half_changes_for_whole_ones)
    monkeypatch.setattr(TransactionMachine, "break_down", lambda _machine: None)
    assert is_found(draw_shared)


def knows_keys_by_their_hashes(known: Any, keys: pa.Table) -> None:
    """One fetched key makes all keys of its hash known, so that its siblings do not exist."""
    known.hashes = getattr(known, "hashes", set()) | set(keys.column(0).to_pylist())


def without_known_hashes(known: Any, changes: pa.Table) -> pa.Table:
    hashes = getattr(known, "hashes", set())
    new = [index for index, hash_ in enumerate(changes.column(0).to_pylist()) if hash_ not in hashes]
    return changes.take(pa.array(new, pa.int64()))


def without_nothing(_known: DictKnown, changes: pa.Table) -> pa.Table:
    """The drain brings keys that are known, and maybe changed since."""
    return changes


def test_a_key_that_is_known_by_its_hash_only_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DictKnown, "add", knows_keys_by_their_hashes)
    monkeypatch.setattr(DictKnown, "without", without_known_hashes)
    monkeypatch.setattr(DictKnown, "missing", without_known_hashes)
    assert is_found(draw_moves)


def test_a_drain_over_known_keys_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DictKnown, "without", without_nothing)
    assert is_found(draw_moves)
