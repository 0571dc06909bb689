"""Routes: what holds for all of them."""

import json
import math
from collections import Counter
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.core.ids import Epoch, RouteVersion, WorkerId
from anabranch.core.routes import (
    LOAD_TOLERANCE,
    WEIGHT_AT_REST,
    Route,
    assign_partitions,
    initial_route,
    moves,
    next_route,
    owners_of_partitions,
)

#: No limit on the time of one example: the machine may be busy.
unhurried = settings(deadline=None)

NAMES = [WorkerId(f"w{number}") for number in range(9)]


@st.composite
def routes(draw: st.DrawFn) -> Route:
    """Any route, balanced or not, over any of the workers."""
    names = draw(st.lists(st.sampled_from(NAMES), min_size=1, unique=True))
    owners = draw(st.lists(st.sampled_from(names), min_size=1, max_size=60))
    return Route(RouteVersion(draw(st.integers(0, 5))), Epoch(draw(st.integers(0, 5))), tuple(owners))


@st.composite
def changes(draw: st.DrawFn) -> tuple[Route, list[WorkerId]]:
    """A route, and the workers of the next one."""
    route = draw(routes())
    most = min(len(NAMES), route.key_groups)
    workers = draw(st.lists(st.sampled_from(NAMES), min_size=1, max_size=most, unique=True))
    return route, workers


@st.composite
def loaded_changes(draw: st.DrawFn) -> tuple[Route, list[WorkerId], list[float]]:
    route, workers = draw(changes())
    some = st.one_of(st.just(0.0), st.floats(0, 1e6), st.floats(0, 1e300), st.integers(0, 3).map(float))
    size = route.key_groups
    return route, workers, draw(st.lists(some, min_size=size, max_size=size))


def counts_of(route: Route, workers: list[WorkerId]) -> list[int]:
    return [len(route.groups_of(worker)) for worker in workers]


def fewest_moves(route: Route, workers: list[WorkerId]) -> int:
    """By hand: the most groups that can stay put, over every way to give the larger shares to some workers."""
    least, larger = divmod(route.key_groups, len(workers))
    held = counts_of(route, workers)
    gains = sorted((min(count, least + 1) - min(count, least) for count in held), reverse=True)
    return route.key_groups - sum(min(count, least) for count in held) - sum(gains[:larger])


@unhurried
@given(st.integers(1, 9), st.integers(9, 300))
def test_first_route_is_balanced(count: int, key_groups: int) -> None:
    route = initial_route(NAMES[:count], key_groups, Epoch(0))
    counts = counts_of(route, NAMES[:count])
    assert sum(counts) == key_groups
    assert max(counts) - min(counts) <= 1


@unhurried
@given(changes())
def test_next_route_is_balanced_and_uses_exactly_the_workers(change: tuple[Route, list[WorkerId]]) -> None:
    route, workers = change
    new = next_route(route, workers, Epoch(9))
    counts = counts_of(new, workers)
    assert set(new.workers) == set(workers)
    assert max(counts) - min(counts) <= 1
    assert (new.version, new.first_epoch) == (route.version + 1, 9)


@unhurried
@given(changes())
def test_next_route_moves_the_fewest_possible_groups(change: tuple[Route, list[WorkerId]]) -> None:
    route, workers = change
    moved = moves(route, next_route(route, workers, Epoch(9)))
    assert len(moved) == fewest_moves(route, workers)
    assert all(old != new and new in workers for old, new in moved.values())


@unhurried
@given(loaded_changes(), st.randoms(use_true_random=False))
def test_next_route_does_not_depend_on_the_order_of_the_workers(
    change: tuple[Route, list[WorkerId], list[float]], random: Random
) -> None:
    route, workers, load = change
    shuffled = random.sample(workers, len(workers))
    assert next_route(route, workers, Epoch(9)) == next_route(route, shuffled, Epoch(9))
    assert next_route(route, workers, Epoch(9), load) == next_route(route, shuffled, Epoch(9), load)


@unhurried
@given(changes())
def test_a_second_step_to_the_same_workers_moves_nothing(change: tuple[Route, list[WorkerId]]) -> None:
    route, workers = change
    once = next_route(route, workers, Epoch(9))
    assert not moves(once, next_route(once, workers, Epoch(9)))


@unhurried
@given(loaded_changes())
def test_loads_are_balanced_up_to_one_group(change: tuple[Route, list[WorkerId], list[float]]) -> None:
    route, workers, load = change
    new = next_route(route, workers, Epoch(9), load)
    assert set(new.workers) == set(workers)
    weights = [1.0] * len(load)
    if max(load) > 0:
        shares = [value / max(load) for value in load]
        weights = [share * len(load) / math.fsum(shares) + WEIGHT_AT_REST for share in shares]
    loads = [math.fsum(weights[group] for group in new.groups_of(worker)) for worker in workers]
    mean = math.fsum(weights) / len(workers)
    assert max(loads) - min(loads) <= max(LOAD_TOLERANCE * mean, max(weights) / (1 - LOAD_TOLERANCE)) * (1 + 1e-4)


@unhurried
@given(loaded_changes())
def test_loads_once_balanced_move_nothing_more(change: tuple[Route, list[WorkerId], list[float]]) -> None:
    route, workers, load = change
    once = next_route(route, workers, Epoch(9), load)
    assert not moves(once, next_route(once, workers, Epoch(9), load))


@unhurried
@given(changes(), st.floats(0.001, 1e9))
def test_equal_loads_move_no_more_groups_than_equal_counts(change: tuple[Route, list[WorkerId]], load: float) -> None:
    route, workers = change
    by_load = next_route(route, workers, Epoch(9), [load] * route.key_groups)
    assert len(moves(route, by_load)) <= fewest_moves(route, workers)


@unhurried
@given(routes(), st.integers(1, 80))
def test_partitions_are_numbered_without_gaps_and_none_in_use_is_empty(route: Route, parallelism: int) -> None:
    assignment = assign_partitions(route, parallelism)
    assert len(assignment) == route.key_groups
    assert set(assignment) == set(range(min(parallelism, route.key_groups)))


@unhurried
@given(routes(), st.integers(1, 80))
def test_partitions_belong_to_one_worker_or_workers_to_one_partition(route: Route, parallelism: int) -> None:
    owners = owners_of_partitions(route, assign_partitions(route, parallelism))
    if parallelism >= len(route.workers):
        assert all(len(workers) == 1 for workers in owners)
    else:
        assert sum(len(workers) for workers in owners) == len(route.workers)
    assert frozenset().union(*owners) == set(route.workers)


@unhurried
@given(routes(), st.integers(1, 80))
def test_no_sharing_of_partitions_makes_the_largest_smaller(route: Route, parallelism: int) -> None:
    if parallelism < len(route.workers):
        return
    largest = max(Counter(assign_partitions(route, parallelism)).values())
    held = counts_of(route, list(route.workers))
    # With partitions of at most one group fewer, the workers would need more partitions than there are.
    assert largest == 1 or sum(-(-count // (largest - 1)) for count in held) > parallelism


@unhurried
@given(routes(), st.integers(1, 80))
def test_partitions_of_one_worker_are_of_one_size(route: Route, parallelism: int) -> None:
    assignment = assign_partitions(route, parallelism)
    if parallelism < len(route.workers):
        return
    for worker in route.workers:
        sizes = Counter(assignment[group] for group in route.groups_of(worker)).values()
        assert max(sizes) - min(sizes) <= 1


@unhurried
@given(routes(), st.integers(1, 8))
def test_packed_workers_are_balanced_up_to_one_worker(route: Route, parallelism: int) -> None:
    if parallelism >= len(route.workers):
        return
    sizes = Counter(assign_partitions(route, parallelism)).values()
    assert max(sizes) - min(sizes) <= max(counts_of(route, list(route.workers)))


@unhurried
@given(routes())
def test_every_route_survives_json(route: Route) -> None:
    assert Route.from_json(json.loads(json.dumps(route.to_json()))) == route
