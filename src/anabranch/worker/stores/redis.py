"""The store in a Redis that the workers of a job share, so that a rescale moves nothing: see SharedStore.

The incarnation of a key group is part of its Redis keys. Redis is a cache of the checkpoint like every store: rows
carry versions, so that a Redis which lost or forgot something is noticed instead of read.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Collection, Iterator, Sequence
from functools import cached_property
from weakref import WeakSet

import numpy as np

from anabranch.checkpoint import paths
from anabranch.core.errors import SettingsError, WorkerError
from anabranch.core.ids import checked_job_id
from anabranch.core.schemas import StageSpec
from anabranch.worker.state.rows import Changes, Entries, Hashes, Keys, Rows, Shape
from anabranch.worker.stores import StorePlace
from anabranch.worker.stores.redis_connection import RedisConnection, connect, delete_prefix
from anabranch.worker.stores.redis_rows import GroupPlace, GroupRows, Places

logger = logging.getLogger(__name__)

_BATCH_ROWS = 1 << 16
#: Braces would be taken for a hash tag of Redis Cluster.
_PREFIX = re.compile(r"[^{}]+")
_INCARNATION = re.compile(r"[\w.-]+")


class RedisBackend:
    """See Backend."""

    def __init__(self, place: StorePlace) -> None:
        self._url = place.url

    @cached_property
    def connection(self) -> RedisConnection:
        """All stores share one connection, which is made for the first of them."""
        if not self._url:
            raise SettingsError("The Redis store needs the address of a Redis; set anabranch.redisUrl.")
        return connect(self._url)

    def open(self, shape: Shape, job: str, stage: StageSpec, variable: str) -> RedisStore:
        return RedisStore(shape, self.connection, f"{prefix_of(job)}:{stage.number}:{paths.safe_name(variable)}")

    def close_job(self, job: str) -> None: ...

    def wipe(self, job: str) -> None:
        delete_prefix(self.connection, prefix_of(job))


def prefix_of(job: str) -> str:
    """What the names of everything that belongs to a job begin with."""
    return f"anabranch:{checked_job_id(job)}"


class RedisStore:
    """See SharedStore. It holds the key groups that it was told to use, and no others."""

    def __init__(self, shape: Shape, connection: RedisConnection, prefix: str) -> None:
        if not _PREFIX.fullmatch(prefix):
            raise WorkerError(f"{prefix!r} cannot begin the names of Redis keys; use one without braces.")
        self._shape = shape
        self._address = connection.address
        self._connection = connection
        self._prefix = prefix
        self._rows = GroupRows(shape, connection)
        #: The key groups in use. Replaced as a whole, never changed, so that readers need no lock.
        self._places: Places = {}
        #: Held while the state changes, or must not change. Readers of keys never wait for it.
        self._changing = threading.Lock()
        #: Those which somebody still consumes.
        self._snapshots: WeakSet[_Snapshot] = WeakSet()

    def use(self, groups: Collection[int], incarnation: str) -> frozenset[int]:
        if not _INCARNATION.fullmatch(incarnation):
            raise WorkerError(f"{incarnation!r} is no incarnation; use letters, digits, dots, dashes and underscores.")
        strange = [group for group in groups if not 0 <= group < self._shape.key_groups]
        if strange:
            raise WorkerError(f"There is no key group {strange[0]}: they go from 0 to {self._shape.key_groups - 1}.")
        places = {}
        for group in sorted(set(groups)):
            places[group] = GroupPlace(group, f"{self._prefix}:{incarnation}:{{{group}}}".encode())
        with self._changing:
            others = [old for old in self._in_use(places) if old.name != places[old.group].name]
            self._keep_for_snapshots([old.group for old in others])
            made = self._rows.begin(places.values())
            self._places = {**self._places, **places}
            self._rows.remove(others)
        return frozenset(place.group for place in made)

    @property
    def is_lost(self) -> bool:
        return any(place.is_lost for place in self._places.values())

    def look(self) -> None:
        try:
            self.rows()
        except WorkerError:
            if not self.is_lost:
                raise

    def versions(self, groups: Collection[int]) -> dict[int, int]:
        return {place.group: place.version for place in self._in_use(groups)}

    def hand_over(self, groups: Collection[int]) -> None:
        with self._changing:
            self._keep_for_snapshots(groups)
            self._forget(groups)

    def read(self, keys: Keys) -> Entries:
        return self._rows.read(keys, self._places_of(keys.hashes))

    def apply(self, changes: Changes) -> None:
        with self._changing:
            places = self._places_of(changes.hashes)
            self._keep_for_snapshots(places)
            self._rows.change(changes, places)

    def make_room(self, entries: int) -> None:
        """The database makes room by itself."""

    def snapshot(self, groups: Collection[int] | None) -> Iterator[Rows]:
        with self._changing:
            chosen = sorted(self._places if groups is None else set(groups))
            places = [self._place(self._places, group) for group in chosen]
            snapshot = _Snapshot(self._rows, self._changing, places, self._rows.counts(places))
            self._snapshots.add(snapshot)
        return snapshot.batches()

    def drop_groups(self, groups: Collection[int]) -> None:
        """Remove these key groups from Redis, as far as they are in use; they no longer are."""
        with self._changing:
            self._keep_for_snapshots(groups)
            dropped = self._in_use(groups)
            self._forget(groups)
            self._rows.remove(dropped)

    def rows(self, groups: Collection[int] | None = None) -> int:
        return sum(self._rows.counts(list(self._places.values()) if groups is None else self._in_use(groups)))

    def size_bytes(self) -> int:
        """The memory that the key groups in use take in Redis, about."""
        return self._rows.size_bytes(list(self._places.values()))

    def destroy(self) -> None:
        """Remove all key groups in use from Redis; if it cannot be reached, ``delete_prefix`` does it later."""
        with self._changing:
            places, self._places = list(self._places.values()), {}
            try:
                with self._connection.impatient():
                    self._rows.remove(places)
            except WorkerError as error:
                logger.warning("state of %d key groups is left behind in Redis: %s", len(places), error)

    def _places_of(self, hashes: Hashes) -> Places:
        """The places of the keys with these hashes."""
        places = self._places
        groups: list[int] = np.unique(self._shape.groups_of(hashes)).tolist()
        return {group: self._place(places, group) for group in groups}

    def _place(self, places: Places, group: int) -> GroupPlace:
        if group not in places:
            raise WorkerError(
                f"Key group {group} is not in use on this worker, so its state in Redis at {self._address} is not "
                "touched. The task has an old route: run it again."
            )
        return places[group]

    def _in_use(self, groups: Collection[int]) -> list[GroupPlace]:
        return [self._places[group] for group in sorted(set(groups)) if group in self._places]

    def _forget(self, groups: Collection[int]) -> None:
        gone = set(groups)
        self._places = {group: place for group, place in self._places.items() if group not in gone}

    def _keep_for_snapshots(self, groups: Collection[int]) -> None:
        """Called before key groups change."""
        for snapshot in list(self._snapshots):
            snapshot.keep(groups)


class _Snapshot:
    """Key groups as of one moment. A key group is read when it is its turn, or before it changes."""

    def __init__(
        self, rows: GroupRows, changing: threading.Lock, places: Sequence[GroupPlace], counts: Sequence[int]
    ) -> None:
        self._rows = rows
        self._changing = changing
        #: With the number of rows of each.
        self._unread = {place.group: (place, count) for place, count in zip(places, counts, strict=True)}
        self._kept: list[Rows] = []
        self._failure: WorkerError | None = None

    def keep(self, groups: Collection[int]) -> None:
        """Read those of these key groups that are unread. The caller holds the lock.

        An error goes to the thread that consumes the snapshot, not to the one that changes the state.
        """
        wanted = [self._unread[group] for group in set(groups) if group in self._unread]
        try:
            for places in _steps(wanted):
                self._kept.append(self._read(places))
        except WorkerError as error:
            self._failure = error

    def batches(self) -> Iterator[Rows]:
        while True:
            with self._changing:
                if self._failure is not None:
                    raise self._failure
                if self._kept:
                    rows = self._kept.pop()
                elif self._unread:
                    rows = self._read(next(_steps(list(self._unread.values()))))
                else:
                    return
            yield from rows.batches(_BATCH_ROWS)

    def _read(self, places: Sequence[GroupPlace]) -> Rows:
        rows = self._rows.all_of(places)
        for place in places:
            del self._unread[place.group]
        return rows


def _steps(places: Sequence[tuple[GroupPlace, int]]) -> Iterator[list[GroupPlace]]:
    """As many key groups at a time as make up a batch."""
    step: list[GroupPlace] = []
    total = 0
    for place, count in places:
        if step and total + count > _BATCH_ROWS:
            yield step
            step, total = [], 0
        step.append(place)
        total += count
    if step:
        yield step
