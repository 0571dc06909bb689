"""Routes: who owns which key group, how the next route follows from the last, and how tasks share the groups."""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, insort
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from anabranch.core.errors import CheckpointError, SettingsError
from anabranch.core.ids import Epoch, KeyGroup, Partition, RouteVersion, WorkerId
from anabranch.core.keygroups import MAX_KEY_GROUPS

FIRST_VERSION = RouteVersion(0)

#: Loads that differ by less than this share of the mean are left alone: a move costs more than it brings.
LOAD_TOLERANCE = 0.05
#: What a key group weighs apart from its load, as a share of the mean load: a silent group still takes room.
WEIGHT_AT_REST = 0.1
#: The mean load as a whole number: sums of weights are exact, so that balanced loads are left alone.
WEIGHT_UNITS = 1_000_000


@dataclass(frozen=True)
class Route:
    """An immutable, versioned map from key group to worker, in force from ``first_epoch`` on.

    Of several routes, the one with the highest version whose first epoch has come is in force.
    """

    version: RouteVersion
    first_epoch: Epoch
    #: The owner of each key group; the index is the key group.
    owners: tuple[WorkerId, ...]

    def __post_init__(self) -> None:
        _check_key_groups(len(self.owners))
        if self.first_epoch < 0:
            raise SettingsError(f"A route cannot start at epoch {self.first_epoch}; epochs start at 0.")

    @property
    def key_groups(self) -> int:
        return len(self.owners)

    @cached_property
    def workers(self) -> tuple[WorkerId, ...]:
        """The workers that own at least one key group, sorted."""
        return tuple(sorted(self._groups))

    def groups_of(self, worker: WorkerId) -> tuple[KeyGroup, ...]:
        """The key groups that the worker owns, in order; none if the route does not know it."""
        return self._groups.get(worker, ())

    @cached_property
    def _groups(self) -> Mapping[WorkerId, tuple[KeyGroup, ...]]:
        groups: dict[WorkerId, list[KeyGroup]] = {}
        for group, owner in enumerate(self.owners):
            groups.setdefault(owner, []).append(KeyGroup(group))
        return {owner: tuple(owned) for owner, owned in groups.items()}

    def to_json(self) -> dict[str, Any]:
        position = {worker: index for index, worker in enumerate(self.workers)}
        return {
            "version": self.version,
            "first_epoch": self.first_epoch,
            "workers": list(self.workers),
            "owners": [position[owner] for owner in self.owners],
        }

    @staticmethod
    def from_json(document: Mapping[str, Any]) -> Route:
        try:
            workers = [WorkerId(str(worker)) for worker in document["workers"]]
            indexes = [int(index) for index in document["owners"]]
            if indexes and not 0 <= min(indexes) <= max(indexes) < len(workers):
                raise IndexError(f"an owner outside the list of {len(workers)} workers")
            return Route(
                version=RouteVersion(int(document["version"])),
                first_epoch=Epoch(int(document["first_epoch"])),
                owners=tuple(workers[index] for index in indexes),
            )
        except (KeyError, TypeError, ValueError, IndexError, SettingsError) as error:
            raise CheckpointError(
                f"A stored route cannot be read ({error!r}); restore the checkpoint's routes from a copy."
            ) from error


def initial_route(workers: Collection[WorkerId], key_groups: int, first_epoch: Epoch) -> Route:
    """Returns the first route of a job: one contiguous range of key groups for each worker."""
    _check_key_groups(key_groups)
    ordered = _checked_workers(workers, key_groups)
    owners = tuple(ordered[group * len(ordered) // key_groups] for group in range(key_groups))
    return Route(FIRST_VERSION, first_epoch, owners)


def next_route(
    route: Route,
    workers: Collection[WorkerId],
    first_epoch: Epoch,
    load: Sequence[float] | None = None,
) -> Route:
    """Returns the route over ``workers`` that follows ``route``, having moved few key groups.

    Without loads the numbers of groups differ by at most one, and no route that does so moves fewer groups. With the
    load of each key group, the loads of two workers differ by little more than the weight of one key group, or than
    LOAD_TOLERANCE of their mean. The result depends on the arguments' values only, not on the order of the workers.
    """
    ordered = _checked_workers(workers, route.key_groups)
    weights = None if load is None else _weights(load, route.key_groups)
    owners = _by_count(route, ordered) if weights is None else _by_load(route, ordered, weights)
    return Route(RouteVersion(route.version + 1), first_epoch, tuple(owners))


def moves(old: Route, new: Route) -> Mapping[KeyGroup, tuple[WorkerId, WorkerId]]:
    """Returns the key groups whose owner changes, each with the owner it leaves and the one it goes to."""
    if old.key_groups != new.key_groups:
        raise SettingsError(
            f"Routes over {old.key_groups} and {new.key_groups} key groups cannot be compared; "
            "keep the number of key groups that the job first started with."
        )
    pairs = enumerate(zip(old.owners, new.owners, strict=True))
    return {KeyGroup(group): pair for group, pair in pairs if pair[0] != pair[1]}


def assign_partitions(route: Route, parallelism: int, load: Sequence[float] | None = None) -> tuple[Partition, ...]:
    """Returns the partition of each key group (the index is the key group), for a stage run by ``parallelism`` tasks.

    With at least as many tasks as workers, a partition's groups belong to one worker; with fewer, a partition holds
    all groups of some workers. Partitions in use are numbered from 0 without gaps; there are more tasks than
    partitions in use only if there are more tasks than key groups. With the load of each key group, the partitions of
    a worker have about the same load instead of the same number of groups: hot key groups are spread.
    """
    if parallelism < 1:
        raise SettingsError(f"A parallelism of {parallelism} runs nothing; set it to 1 or more.")
    partitions = [Partition(0)] * route.key_groups
    if parallelism < len(route.workers):
        for worker, partition in _pack_workers(route, parallelism).items():
            for group in route.groups_of(worker):
                partitions[group] = partition
        return tuple(partitions)
    weights = None if load is None else _weights(load, route.key_groups)
    for worker, numbers in _share_partitions(route, parallelism).items():
        groups = route.groups_of(worker)
        if weights is not None:
            for group, number in _spread(groups, numbers, weights).items():
                partitions[group] = number
            continue
        for index, group in enumerate(groups):
            partitions[group] = numbers[index * len(numbers) // len(groups)]
    return tuple(partitions)


def _spread(
    groups: Sequence[KeyGroup], numbers: Sequence[Partition], weights: Sequence[int]
) -> dict[KeyGroup, Partition]:
    """Gives each group, the heaviest first, to the lightest partition; so every partition gets one."""
    heap = [(0, number) for number in numbers]
    spread: dict[KeyGroup, Partition] = {}
    for group in sorted(groups, key=lambda group: (-weights[group], group)):
        weight, number = heapq.heappop(heap)
        spread[group] = number
        heapq.heappush(heap, (weight + weights[group], number))
    return spread


def owners_of_partitions(route: Route, assignment: Sequence[Partition]) -> tuple[frozenset[WorkerId], ...]:
    """Returns the workers that own the key groups of each partition in use (the index is the partition)."""
    owners: list[set[WorkerId]] = [set() for _ in range(max(assignment) + 1)]
    for owner, partition in zip(route.owners, assignment, strict=True):
        owners[partition].add(owner)
    return tuple(frozenset(workers) for workers in owners)


def _by_count(route: Route, workers: Sequence[WorkerId]) -> list[WorkerId]:
    held = {worker: route.groups_of(worker) for worker in workers}
    least, remainder = divmod(route.key_groups, len(workers))
    # The larger shares go to those that hold most already: every other choice moves as many groups or more.
    by_size = sorted(workers, key=lambda worker: (-len(held[worker]), worker))
    share = {worker: least + (rank < remainder) for rank, worker in enumerate(by_size)}

    owners = list(route.owners)
    kept = {group for worker in workers for group in held[worker][: share[worker]]}
    # Moved groups are handed out in order, so that a new owner reads from few sources.
    moved = iter(group for group in range(route.key_groups) if KeyGroup(group) not in kept)
    for worker in workers:
        for _ in range(share[worker] - len(held[worker])):
            owners[next(moved)] = worker
    return owners


def _by_load(route: Route, workers: Sequence[WorkerId], weights: Sequence[int]) -> list[WorkerId]:
    balance = _Balance(route, workers, weights)
    staying = set(workers)
    orphans = [group for group, owner in enumerate(route.owners) if owner not in staying]
    for group in sorted(orphans, key=lambda group: (-weights[group], group)):
        balance.place(group, balance.lightest())
    # Each move brings two loads closer together, so this ends by itself; the limit bounds how long it may take.
    for _ in range(4 * route.key_groups):
        if not balance.improve():
            break
    return balance.owners


class _Balance:
    """The loads of the workers while key groups move between them."""

    def __init__(self, route: Route, workers: Sequence[WorkerId], weights: Sequence[int]) -> None:
        self.owners = list(route.owners)
        self._weights = weights
        self._mean = sum(weights) / len(workers)
        #: The groups of each worker as (weight, group), lightest first.
        self._held = {worker: sorted((weights[g], int(g)) for g in route.groups_of(worker)) for worker in workers}
        self._load = {worker: sum(w for w, _ in held) for worker, held in self._held.items()}

    def lightest(self) -> WorkerId:
        return min(self._load, key=lambda worker: (self._load[worker], worker))

    def place(self, group: int, worker: WorkerId) -> None:
        self.owners[group] = worker
        self._load[worker] += self._weights[group]
        insort(self._held[worker], (self._weights[group], group))

    def improve(self) -> bool:
        """Moves one group to the least loaded worker, from the most loaded one that has a fitting group."""
        receiver = self.lightest()
        for donor in sorted(self._load, key=lambda worker: (-self._load[worker], worker)):
            gap = self._load[donor] - self._load[receiver]
            # A worker without any group would not be part of the route: it gets one whatever the loads.
            if donor == receiver or (gap <= LOAD_TOLERANCE * self._mean and self._held[receiver]):
                return False
            index = self._fitting(donor, receiver, gap)
            if index is not None:
                weight, group = self._held[donor].pop(index)
                self._load[donor] -= weight
                self.place(group, receiver)
                return True
        return False

    def _fitting(self, donor: WorkerId, receiver: WorkerId, gap: int) -> int | None:
        """Returns the donor's group that best evens out the two, or None if every one of them is too heavy to help."""
        held = self._held[donor]
        if len(held) < 2:
            return None
        wanted = min(self._load[donor] - self._mean, self._mean - self._load[receiver])
        position = bisect_left(held, (wanted, -1))
        candidates = [index for index in (position - 1, position) if 0 <= index < len(held)]
        # Much less than the gap: otherwise the two would all but swap their loads.
        helpful = [index for index in candidates if held[index][0] < (1 - LOAD_TOLERANCE) * gap]
        return min(helpful, key=lambda index: abs(held[index][0] - wanted), default=None)


def _share_partitions(route: Route, parallelism: int) -> dict[WorkerId, list[Partition]]:
    """Returns the partitions of each worker: one at first, every further one where partitions are largest."""
    counts = dict.fromkeys(route.workers, 1)
    sizes = {worker: len(route.groups_of(worker)) for worker in route.workers}
    heap = [(-float(sizes[worker]), worker) for worker in route.workers if sizes[worker] > 1]
    heapq.heapify(heap)
    for _ in range(parallelism - len(counts)):
        if not heap:
            break
        _, worker = heapq.heappop(heap)
        counts[worker] += 1
        if counts[worker] < sizes[worker]:
            heapq.heappush(heap, (-sizes[worker] / counts[worker], worker))

    # Numbered in turns, because tasks start in the order of their partitions: all workers are busy from the start.
    numbers: dict[WorkerId, list[Partition]] = {worker: [] for worker in route.workers}
    turns = sorted((turn, worker) for worker, count in counts.items() for turn in range(count))
    for number, (_, worker) in enumerate(turns):
        numbers[worker].append(Partition(number))
    return numbers


def _pack_workers(route: Route, parallelism: int) -> dict[WorkerId, Partition]:
    """Packs whole workers into fewer partitions: the largest first, each into the smallest partition."""
    heap = [(0, number) for number in range(parallelism)]
    packed: dict[WorkerId, Partition] = {}
    for worker in sorted(route.workers, key=lambda worker: (-len(route.groups_of(worker)), worker)):
        size, number = heapq.heappop(heap)
        packed[worker] = Partition(number)
        heapq.heappush(heap, (size + len(route.groups_of(worker)), number))
    return packed


def _weights(load: Sequence[float], key_groups: int) -> list[int] | None:
    """Returns what each key group weighs, or None if nothing is known because all loads are zero."""
    if len(load) != key_groups:
        raise SettingsError(f"There are {len(load)} loads for {key_groups} key groups; give one for each.")
    if not all(math.isfinite(value) and value >= 0 for value in load):
        raise SettingsError("A load is negative or not a number; give loads of 0 or more.")
    largest = max(load)
    if largest == 0:
        return None
    shares = [float(value) / largest for value in load]
    mean = math.fsum(shares) / key_groups
    return [round(WEIGHT_UNITS * (share / mean + WEIGHT_AT_REST)) for share in shares]


def _check_key_groups(key_groups: int) -> None:
    if not 1 <= key_groups <= MAX_KEY_GROUPS:
        raise SettingsError(f"{key_groups} key groups are not possible; choose a number from 1 to {MAX_KEY_GROUPS}.")


def _checked_workers(workers: Collection[WorkerId], key_groups: int) -> list[WorkerId]:
    ordered = sorted(set(workers))
    if not ordered:
        raise SettingsError("A route needs at least one worker; start a worker.")
    if len(ordered) < len(workers):
        raise SettingsError("A worker is named twice; give each worker an id of its own.")
    if len(ordered) > key_groups:
        raise SettingsError(
            f"{len(ordered)} workers cannot share {key_groups} key groups; use at most {key_groups} workers."
        )
    return ordered
