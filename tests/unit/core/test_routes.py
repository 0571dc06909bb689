"""Routes: examples with exact results."""

import json
import math
from collections import Counter

import pytest

from anabranch.core.errors import CheckpointError, SettingsError
from anabranch.core.ids import Epoch, KeyGroup, RouteVersion, WorkerId
from anabranch.core.keygroups import MAX_KEY_GROUPS
from anabranch.core.routes import (
    FIRST_VERSION,
    Route,
    assign_partitions,
    initial_route,
    moves,
    next_route,
    owners_of_partitions,
)

A, B, C, D = (WorkerId(name) for name in "abcd")
EPOCH = Epoch(7)


def route_of(owners: str) -> Route:
    return Route(RouteVersion(3), EPOCH, tuple(WorkerId(owner) for owner in owners))


def owners_of(route: Route) -> str:
    return "".join(route.owners)


def test_first_route_gives_each_worker_a_range() -> None:
    route = initial_route([B, A, C], 8, EPOCH)
    assert owners_of(route) == "aaabbbcc"
    assert (route.version, route.first_epoch, route.key_groups) == (FIRST_VERSION, EPOCH, 8)


def test_route_tells_workers_and_their_groups() -> None:
    route = route_of("abacb")
    assert route.workers == (A, B, C)
    assert route.groups_of(A) == (0, 2)
    assert route.groups_of(D) == ()


def test_new_worker_takes_its_share_and_nothing_else_moves() -> None:
    old = initial_route([A, B], 6, EPOCH)
    new = next_route(old, [A, B, C], Epoch(9))
    assert owners_of(new) == "aacbbc"
    assert (new.version, new.first_epoch) == (old.version + 1, 9)
    assert moves(old, new) == {KeyGroup(2): (A, C), KeyGroup(5): (B, C)}


def test_groups_of_a_worker_that_leaves_are_shared_out() -> None:
    assert owners_of(next_route(route_of("aabbcc"), [A, C], EPOCH)) == "aaaccc"


def test_worker_that_is_replaced_hands_over_everything() -> None:
    assert owners_of(next_route(route_of("aaabbb"), [A, C], EPOCH)) == "aaaccc"


def test_larger_share_stays_where_it_is() -> None:
    assert owners_of(next_route(route_of("abbab"), [A, B], EPOCH)) == "abbab"


def test_same_workers_give_the_same_owners_under_a_new_version() -> None:
    old = initial_route([A, B, C], 10, EPOCH)
    new = next_route(old, [C, B, A], EPOCH)
    assert (new.owners, new.version) == (old.owners, old.version + 1)
    assert moves(old, new) == {}


def test_hot_group_alone_goes_to_the_new_worker() -> None:
    load = [100.0] + [1.0] * 9
    new = next_route(initial_route([A], 10, EPOCH), [A, B], EPOCH, load)
    assert owners_of(new) == "baaaaaaaaa"


def test_equal_loads_move_as_few_groups_as_equal_counts() -> None:
    old = initial_route([A, B], 1024, EPOCH)
    new = next_route(old, [A, B, C, D], EPOCH, [5.0] * 1024)
    assert 0.9 * 512 <= len(moves(old, new)) <= 512
    assert max(Counter(new.owners).values()) <= 1.05 * 256


def test_loads_that_are_nearly_equal_move_nothing() -> None:
    old = initial_route([A, B], 100, EPOCH)
    load = [1.02] * 50 + [1.0] * 50
    assert next_route(old, [A, B], EPOCH, load).owners == old.owners


def test_new_worker_gets_a_group_even_if_one_group_has_all_the_load() -> None:
    load = [0.0, 0.0, 1e9]
    route = route_of("aab")
    assert set(next_route(route, [A, B, C], EPOCH, load).owners) == {A, B, C}


def test_loads_of_zero_balance_by_count() -> None:
    old = initial_route([A], 6, EPOCH)
    assert next_route(old, [A, B], EPOCH, [0.0] * 6) == next_route(old, [A, B], EPOCH)


def test_partitions_take_turns_over_the_workers() -> None:
    assert assign_partitions(route_of("aaaabbbb"), 4) == (0, 0, 2, 2, 1, 1, 3, 3)


def test_partitions_are_shared_out_in_proportion_to_the_groups() -> None:
    assignment = assign_partitions(route_of("aaaaaabb"), 4)
    assert assignment == (0, 0, 2, 2, 3, 3, 1, 1)
    assert owners_of_partitions(route_of("aaaaaabb"), assignment) == tuple(map(frozenset, "abaa"))


def test_fewer_partitions_than_workers_hold_whole_workers() -> None:
    route = route_of("aaabbcd")
    assignment = assign_partitions(route, 2)
    assert owners_of_partitions(route, assignment) == (frozenset("ad"), frozenset("bc"))


def test_one_partition_holds_everything() -> None:
    assert assign_partitions(route_of("abc"), 1) == (0, 0, 0)


def test_more_tasks_than_key_groups_leave_the_last_ones_without_work() -> None:
    assert sorted(assign_partitions(route_of("aab"), 10)) == [0, 1, 2]


def test_hot_key_groups_are_spread_over_the_partitions_of_their_worker() -> None:
    load = [100.0, 100.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]
    by_count = assign_partitions(route_of("aaaaaaaa"), 2)
    by_load = assign_partitions(route_of("aaaaaaaa"), 2, load)
    assert by_count[0] == by_count[1]
    assert by_load[0] != by_load[1]
    assert sorted(by_load).count(0) == 4


def test_every_partition_has_a_key_group_whatever_the_load() -> None:
    load = [1000.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    assert set(assign_partitions(route_of("aaabbb"), 6, load)) == set(range(6))
    assert assign_partitions(route_of("aaaabbbb"), 4, [0.0] * 8) == (0, 0, 2, 2, 1, 1, 3, 3)


def test_route_survives_json() -> None:
    route = route_of("bbacab")
    document = json.loads(json.dumps(route.to_json()))
    assert document["workers"] == ["a", "b", "c"]
    assert document["owners"] == [1, 1, 0, 2, 0, 1]
    assert Route.from_json(document) == route


@pytest.mark.parametrize(
    "damage",
    [
        {"owners": [0, 3]},
        {"owners": [0, -1]},
        {"owners": []},
        {"owners": ["x"]},
        {"version": None},
        {"first_epoch": -2},
        {"workers": 5},
    ],
)
def test_damaged_route_is_an_error_of_the_checkpoint(damage: dict[str, object]) -> None:
    with pytest.raises(CheckpointError, match="restore"):
        Route.from_json(route_of("abc").to_json() | damage)


def test_route_with_a_missing_field_is_an_error_of_the_checkpoint() -> None:
    document = route_of("abc").to_json()
    del document["workers"]
    with pytest.raises(CheckpointError, match="workers"):
        Route.from_json(document)


@pytest.mark.parametrize(
    ("workers", "key_groups", "message"),
    [
        ([], 4, "at least one worker"),
        ([A, A], 4, "named twice"),
        ([A, B, C], 2, "at most 2 workers"),
        ([A], 0, "from 1 to"),
        ([A], -1, "from 1 to"),
        ([A], MAX_KEY_GROUPS + 1, "from 1 to"),
    ],
)
def test_impossible_first_routes_are_refused(workers: list[WorkerId], key_groups: int, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        initial_route(workers, key_groups, EPOCH)


@pytest.mark.parametrize(
    ("workers", "load", "message"),
    [
        ([], None, "at least one worker"),
        ([A, B, C, D], None, "at most 3 workers"),
        ([A], [1.0, 2.0], "2 loads for 3 key groups"),
        ([A], [1.0, -1.0, 0.0], "negative"),
        ([A], [1.0, math.nan, 0.0], "not a number"),
        ([A], [1.0, math.inf, 0.0], "not a number"),
    ],
)
def test_impossible_next_routes_are_refused(workers: list[WorkerId], load: list[float] | None, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        next_route(route_of("abc"), workers, EPOCH, load)


def test_route_before_the_first_epoch_is_refused() -> None:
    with pytest.raises(SettingsError, match="start at 0"):
        initial_route([A], 4, Epoch(-1))


def test_no_parallelism_is_refused() -> None:
    with pytest.raises(SettingsError, match="1 or more"):
        assign_partitions(route_of("abc"), 0)


def test_routes_over_different_key_groups_cannot_be_compared() -> None:
    with pytest.raises(SettingsError, match="keep the number"):
        moves(route_of("ab"), route_of("abc"))
