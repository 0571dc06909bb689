"""Mistakes in live migration that the histories must find."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

import pytest
from epoch_families import draw_chains, draw_moves, draw_slow_drains, draw_strays
from epoch_finding import HISTORIES_MAX, is_found
from epoch_history import History
from epoch_rows import DictKnown, Rows
from epoch_state import HeldState

from anabranch.core.errors import AnabranchError
from anabranch.worker.holdings import Holdings, Sources, Variable
from anabranch.worker.migration import Migration
from anabranch.worker.origins import Hashes

ADOPT = Holdings._adopt
ASSIGN = Holdings.assign
FALL_BACK = Migration._fall_back
FORGET = Holdings._forget


def fetches_nothing(_migration: Migration, _hashes: Hashes, _keys: Any) -> None:
    """Keys that have not arrived are taken for keys that do not exist."""


def writes_before_fetching(_state: HeldState, _stage: int, _rows: Iterable[Any]) -> None:
    """The old value of a key that was written without having been read arrives later, and stays."""


def forgets_what_was_fetched(migration: Migration, _keys: Any, parts: list[Any]) -> None:
    """The drain brings the old value of a key that has been fetched and changed."""
    for part in parts:
        migration._state.load(migration._still_pending(part))


def knows_keys_by_their_hashes(known: Any, keys: Rows) -> None:
    """One fetched key makes all keys of its hash known, so that its siblings do not exist."""
    known.hashes = getattr(known, "hashes", set()) | set(keys.hashes.tolist())


def without_known_hashes(known: Any, changes: Rows) -> Rows:
    hashes = getattr(known, "hashes", set())
    return changes.take([index for index, hash_ in enumerate(changes.hashes.tolist()) if hash_ not in hashes])


def without_nothing(_known: DictKnown, changes: Rows) -> Rows:
    """The drain brings keys that are known, and maybe changed since."""
    return changes


def drains_after_the_fall_back(migration: Migration, part: Any) -> None:
    """Keys that came from the checkpoint meanwhile are not known here, and are overwritten."""
    migration._state.load(migration._known.without(migration._still_pending(part)))


def takes_what_comes_late(_migration: Migration, changes: Any) -> Any:
    """Rows are loaded although their group has arrived, or belongs to somebody else."""
    return changes


def falls_back_without_known_keys(migration: Migration, error: AnabranchError) -> None:
    """The checkpoint brings keys that are known, and maybe changed since."""
    FALL_BACK(migration, error)
    assert migration._from_checkpoint is not None
    migration._from_checkpoint._known = None


def goes_on_with_lost_groups(_migration: Migration, _groups: Collection[int]) -> None:
    """Groups that went to another worker still arrive."""


def releases_at_once(
    holdings: Holdings, groups: Collection[int], sources: Sources, *, freeze_as_of: int | None = None
) -> tuple[frozenset[int], frozenset[int]]:
    """What is kept for others is dropped before they have it, and still offered."""
    adopted, left = ASSIGN(holdings, groups, sources, freeze_as_of=freeze_as_of)
    holdings._drop(left)
    return adopted, left


def answers_for_moved_groups(holdings: Holdings, variable: Variable, hashes: Hashes, keys: Any) -> None:
    """The old owner goes on as if nothing had moved."""
    for each in holdings._arriving.get(variable, ()):
        each.fetch(hashes, keys)


def takes_the_next_group_for_offered(holdings: Holdings, groups: frozenset[int], sources: Sources) -> None:
    """The end of what a former owner offers is taken for part of it: that group comes from nowhere."""
    offered = frozenset(group for _, offer in sources.peers.values() for group in offer)
    ADOPT(holdings, groups - ({group + 1 for group in offered} - offered), sources)


def keeps_returning_groups(holdings: Holdings, groups: Collection[int]) -> None:
    """A group that comes back finds what was kept of it, though it has been changed since."""
    if not groups or not holdings._frozen.keys() >= set(groups):
        FORGET(holdings, groups)


def keeps_nothing_apart(_holdings: Holdings, _groups: Collection[int], _as_of: int) -> None:
    """Whatever is there is offered, of any epoch, or of none."""


def answers_with_what_it_has(holdings: Holdings, _variable: Variable, *what: Any) -> None:
    """The middle of a chain does not ask for what it has not fetched itself."""
    if len(what) == 2:
        holdings.check_frozen(*what)


def looks_only_before(_state: HeldState, _groups: Collection[int], _as_of: int) -> None:
    """What was dropped while the answer was being made is taken for what does not exist."""


@pytest.mark.parametrize(
    ("owner", "method", "mistake", "draw"),
    [
        (Migration, "fetch", fetches_nothing, draw_moves),
        (HeldState, "fetch_changed", writes_before_fetching, draw_moves),
        (Migration, "_load_fetched", forgets_what_was_fetched, draw_moves),
        (Migration, "_load_drained", drains_after_the_fall_back, draw_slow_drains),
        (Migration, "_still_pending", takes_what_comes_late, draw_slow_drains),
        (Migration, "_fall_back", falls_back_without_known_keys, draw_moves),
        (Migration, "forget", goes_on_with_lost_groups, draw_moves),
        (Holdings, "assign", releases_at_once, draw_moves),
        (Holdings, "fetch", answers_for_moved_groups, draw_strays),
        (Holdings, "_adopt", takes_the_next_group_for_offered, draw_moves),
        (Holdings, "_forget", keeps_returning_groups, draw_moves),
        (Holdings, "check_frozen", keeps_nothing_apart, draw_moves),
        (Holdings, "fetch_frozen", answers_with_what_it_has, draw_chains),
        (Holdings, "complete_frozen", answers_with_what_it_has, draw_chains),
        (HeldState, "check_kept", looks_only_before, draw_chains),
    ],
)
def test_a_mistake_in_migrations_is_found(
    owner: type,
    method: str,
    mistake: Callable[..., Any],
    draw: Callable[[int], History],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(owner, method, mistake)
    assert is_found(map(draw, range(HISTORIES_MAX)))


def test_a_key_that_is_known_by_its_hash_only_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DictKnown, "add", knows_keys_by_their_hashes)
    monkeypatch.setattr(DictKnown, "without", without_known_hashes)
    assert is_found(map(draw_moves, range(HISTORIES_MAX)))


def test_a_drain_over_known_keys_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DictKnown, "missing", DictKnown.without)
    monkeypatch.setattr(DictKnown, "without", without_nothing)
    assert is_found(map(draw_moves, range(HISTORIES_MAX)))
