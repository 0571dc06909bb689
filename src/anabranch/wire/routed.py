"""A task's view of its stage's state: one read and one write exchange with each worker that owns some of its keys."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from anabranch.core.answers import RouteTable
from anabranch.core.errors import LostWorkerError
from anabranch.core.gather import gathered
from anabranch.core.ids import Attempt, Epoch, Generation, JobId, Partition, Run, WorkerId
from anabranch.core.keygroups import key_groups_of
from anabranch.core.requests import Expiry, LookUpRoute, Read, Write
from anabranch.core.schemas import GROUP, HASH, INDEX, StageSpec
from anabranch.wire import frames
from anabranch.wire.client import WorkerClient, connections
from anabranch.wire.credentials import Credentials
from anabranch.wire.frames import Tables
from anabranch.wire.messages import DUE, EXPIRED, FURTHER_ROWS, KEYS, REST


@dataclass(frozen=True)
class Answers:
    """What a read gives, by state variable."""

    #: The entries of the keys that were asked for; INDEX is the row number in the keys.
    found: Tables
    #: All other rows of the partition's key groups, if they were asked for.
    rest: Tables
    #: Rows of the partition's key groups that are due, if they were asked for.
    expired: Tables
    #: Other keys of the partition that have a row which is due, if they were asked for.
    due_keys: pa.Table | None = None
    #: Their entries; INDEX is the row number in the due keys.
    due: Tables = field(default_factory=dict)


@dataclass(frozen=True)
class Routing:
    """Which worker owns which key group, as far as a task has to know."""

    workers: tuple[WorkerId, ...]
    addresses: tuple[str, ...]
    #: For each key group the index of its owner in `workers`.
    owners: npt.NDArray[np.int16]

    def to_table(self) -> RouteTable:
        return RouteTable(workers=self.workers, addresses=self.addresses, owners=tuple(self.owners.tolist()))

    @staticmethod
    def of(table: RouteTable) -> Routing:
        return Routing(table.workers, table.addresses, np.array(table.owners, dtype=np.int16))


@dataclass(frozen=True)
class StageAccess:
    """All that a task needs to reach its stage's state under one route. Shipped with the task."""

    job: JobId
    generation: Generation
    key_groups: int
    stage: StageSpec
    routing: Routing
    parallelism: int
    #: For each key group the partition that processes it.
    partitions: npt.NDArray[np.int32]
    cache_route: bool
    timeout_s: float
    credentials: Credentials

    def open(self, *, epoch: int, run: int, partition: int, attempt: int) -> RoutedState:
        return RoutedState(self, epoch=epoch, run=run, partition=partition, attempt=attempt)


class RoutedState:
    """Reads and writes the state of one stage for one task attempt."""

    def __init__(self, access: StageAccess, *, epoch: int, run: int, partition: int, attempt: int) -> None:
        self._access = access
        self._epoch = Epoch(epoch)
        self._run = Run(run)
        self._partition = Partition(partition)
        self._attempt = Attempt(attempt)
        self._late_rows = 0
        #: The hashes of the keys of all rows that have come, until they are told.
        self._came: list[npt.NDArray[np.int64]] = []
        self.groups = np.flatnonzero(access.partitions == partition)

    def read(self, keys: pa.Table) -> Tables:
        """The entries of `keys` in every state variable; INDEX is the row number in `keys`."""
        return self.ask(keys).found

    def ask(
        self,
        keys: pa.Table,
        *,
        rest: bool = False,
        expiries: Sequence[Expiry] = (),
        due: Expiry | None = None,
    ) -> Answers:
        """As `read`, and in the same exchange the other rows of the partition, those that are due, or the entries of
        other keys of which one is due."""
        routing = self._routing()
        involved = self._involved(routing)
        split = dict(self._split(routing, involved, keys))
        asked = _Asked(keys, rest, expiries, due, self._further_rows(keys))
        parts = self._on_each(involved, lambda worker: self._ask(routing, worker, asked, split.get(worker, _NOTHING)))
        return _joined(parts, ordered=True)

    def note_rows(self, hashes: Sequence[npt.NDArray[np.int64]]) -> None:
        """Rows of keys with these hashes have come, which makes load. Workers are told with the first read."""
        self._came = list(hashes)

    def note_late(self, rows: int) -> None:
        """So many rows came too late and were dropped: for the report about the epoch. Before the write."""
        self._late_rows += rows

    def write(self, changes: Mapping[str, pa.Table]) -> None:
        """Stage all changes of this attempt and seal it, on every worker that owns a group of this partition."""
        routing = self._routing()
        involved = self._involved(routing)
        shares: dict[int, Tables] = {worker: {} for worker in involved}
        for name, table in changes.items():
            for worker, rows in self._split(routing, involved, table):
                shares[worker][name] = table if rows is None else gathered(table, rows)
        self._on_each(
            involved,
            lambda worker: self._write_to(
                routing, worker, shares[worker], late=self._late_rows if worker == involved[0] else 0
            ),
        )

    def _ask(self, routing: Routing, worker: int, asked: _Asked, rows: npt.NDArray[np.int64] | None) -> Answers:
        access = self._access
        mine = asked.keys if rows is None else gathered(asked.keys, rows)
        groups = tuple(self.groups[routing.owners[self.groups] == worker].tolist())
        load: Tables = {}
        if (further := asked.further) is not None:
            load[FURTHER_ROWS] = further.filter(routing.owners[further.column(GROUP).to_numpy()] == worker)
        parts: list[Answers] = []
        questions = list(_ranges(mine) if asked.others else _chunks(mine))
        for number, (at, chunk, hashes) in enumerate(questions):
            request = Read(
                job=access.job,
                generation=access.generation,
                epoch=self._epoch,
                run=self._run,
                stage=access.stage.number,
                groups=groups if asked.others or asked.expiries else (),
                hashes=hashes,
                rest=asked.rest,
                expired=tuple(asked.expiries) if number == 0 else (),
                due=asked.due,
            )
            sent = {KEYS: chunk, **(load if number == 0 else {})}
            tables = self._client(routing, worker).exchange(request, sent)
            found, due = _named(tables, ""), _named(tables, DUE)
            if rows is not None:
                at = rows if at is None else rows[at]
            parts.append(
                Answers(
                    found=found if at is None else {name: _renumbered(table, at) for name, table in found.items()},
                    rest=_named(tables, REST),
                    expired=_named(tables, EXPIRED),
                    due_keys=due.pop("", None),
                    due=due,
                )
            )
        return _joined(parts, ordered=asked.others)

    def _write_to(self, routing: Routing, worker: int, changes: Tables, *, late: int) -> None:
        access = self._access
        messages = list(frames.messages((name, table) for name, table in changes.items() if len(table)))
        for number, tables in enumerate(messages):
            request = Write(
                job=access.job,
                generation=access.generation,
                epoch=self._epoch,
                run=self._run,
                stage=access.stage.number,
                partition=self._partition,
                attempt=self._attempt,
                chunk=number,
                last=number == len(messages) - 1,
                late=late if number == 0 else 0,
            )
            self._client(routing, worker).exchange(request, tables)

    def _routing(self) -> Routing:
        access = self._access
        if access.cache_route:
            return access.routing
        request = LookUpRoute(job=access.job, generation=access.generation)
        silent: list[LostWorkerError] = []
        for worker in self._whom_to_ask():
            try:
                return Routing.of(self._client(access.routing, worker).call(request))
            except LostWorkerError as error:
                silent.append(error)
        raise silent[0]

    def _whom_to_ask(self) -> list[int]:
        """Owners of this partition's key groups, as far as this task knows, then all others: none is asked by all."""
        known = self._access.routing
        owners = self._involved(known)
        count = len(known.workers)
        others = [(self._partition + step) % count for step in range(count)]
        return [*owners, *(worker for worker in others if worker not in owners)]

    def _further_rows(self, keys: pa.Table) -> pa.Table | None:
        """By key group: how many more rows have come than keys. None if there are no more than that, as is usual."""
        came, self._came = self._came, []
        if sum(map(len, came)) <= len(keys):
            return None
        count = self._access.key_groups
        further = -np.bincount(key_groups_of(keys.column(HASH).to_numpy(), count), minlength=count)
        for hashes in came:
            further += np.bincount(key_groups_of(hashes, count), minlength=count)
        groups = np.flatnonzero(further > 0)
        return pa.table({GROUP: groups, "rows": further[groups]})

    def _client(self, routing: Routing, worker: int) -> WorkerClient:
        access = self._access
        return connections.get(routing.addresses[worker], timeout_s=access.timeout_s, credentials=access.credentials)

    def _involved(self, routing: Routing) -> list[int]:
        """The owners of this partition's key groups. All of them hear of the attempt, even if it changes nothing."""
        return [int(worker) for worker in np.unique(routing.owners[self.groups])]

    def _split(
        self, routing: Routing, involved: Sequence[int], table: pa.Table
    ) -> Iterator[tuple[int, npt.NDArray[np.int64] | None]]:
        """For each worker the rows that belong to it; None for all rows."""
        if len(involved) == 1:
            yield involved[0], None
            return
        groups = key_groups_of(table.column(HASH).to_numpy(), self._access.key_groups)
        owners = routing.owners[groups]
        for worker in involved:
            yield worker, np.flatnonzero(owners == worker)

    @staticmethod
    def _on_each(workers: Sequence[int], call: Callable[[int], Any]) -> list[Any]:
        if len(workers) == 1:
            return [call(workers[0])]
        with ThreadPoolExecutor(max_workers=min(16, max(1, len(workers)))) as pool:
            return list(pool.map(call, workers))


_NOTHING = np.empty(0, dtype=np.int64)
_HASHES = np.iinfo(np.int64)


@dataclass(frozen=True)
class _Asked:
    """What a task asks for, of all workers."""

    keys: pa.Table
    rest: bool
    expiries: Sequence[Expiry]
    due: Expiry | None
    further: pa.Table | None

    @property
    def others(self) -> bool:
        """Whether other keys than these are asked for."""
        return self.rest or self.due is not None


def _named(tables: Tables, prefix: str) -> Tables:
    """The tables with this prefix, without it; for no prefix, those of plain variables."""
    if prefix:
        return {name.removeprefix(prefix): table for name, table in tables.items() if name.startswith(prefix)}
    return {name: table for name, table in tables.items() if not name.startswith((REST, EXPIRED, DUE))}


#: Keys of one message: where they are among all (None: they are all), the keys, and the range of hashes, if any.
_Question = tuple[npt.NDArray[np.int64] | None, pa.Table, tuple[int, int] | None]


def _chunks(keys: pa.Table) -> Iterator[_Question]:
    """The keys in messages of bounded size, one after the other."""
    for start, chunk in frames.slices(keys):
        yield None if len(chunk) == len(keys) else np.arange(start, start + len(chunk)), chunk, None


def _ranges(keys: pa.Table) -> Iterator[_Question]:
    """The keys in messages of bounded size by ranges of their hashes.

    Whoever asks for other keys than these asks in every message for those of its range: each is asked for once.
    """
    if keys.nbytes <= frames.MESSAGE_BYTES:
        yield None, keys, None
        return
    hashes = keys.column(HASH).to_numpy()
    order = np.argsort(hashes)
    hashes, in_order = hashes[order], gathered(keys, order)
    # Keys of equal hash stay together.
    starts = sorted({int(np.searchsorted(hashes, hashes[start])) for start, _ in frames.slices(in_order)})
    firsts = [_HASHES.min, *(int(hashes[start]) for start in starts[1:])]
    lasts = [*(first - 1 for first in firsts[1:]), _HASHES.max]
    for start, end, first, last in zip(starts, [*starts[1:], len(keys)], firsts, lasts, strict=True):
        yield order[start:end], in_order.slice(start, end - start), (int(first), int(last))


def _renumbered(answers: pa.Table, at: npt.NDArray[np.int64]) -> pa.Table:
    """Answers whose INDEX counts the keys of one message, with INDEX counting within all keys of the task."""
    column = pa.array(at[answers.column(INDEX).to_numpy()].astype(np.int32), type=pa.int32())
    return answers.set_column(0, answers.schema.field(INDEX), column)


def _joined(parts: Sequence[Answers], *, ordered: bool) -> Answers:
    """One answer out of several, whose keys are others."""
    of_due = [part.due_keys for part in parts if part.due_keys is not None]
    starts = np.cumsum([0, *map(len, of_due)]).tolist()
    due = [part.due for part in parts if part.due_keys is not None]
    numbered = [
        {name: _renumbered(table, np.arange(start, end)) if start else table for name, table in part.items()}
        for start, end, part in zip(starts, starts[1:], due, strict=False)
    ]
    return Answers(
        found=_merge([part.found for part in parts], ordered=ordered),
        rest=_merge([part.rest for part in parts], ordered=False),
        expired=_merge([part.expired for part in parts], ordered=False),
        due_keys=pa.concat_tables(of_due) if of_due else None,
        due=_merge(numbered, ordered=False),
    )


def _merge(parts: Sequence[Tables], *, ordered: bool) -> Tables:
    if len(parts) == 1:
        return parts[0]
    names = dict.fromkeys(name for part in parts for name in part)
    merged = {name: pa.concat_tables([part[name] for part in parts if name in part]) for name in names}
    if not ordered:
        return merged
    return {name: _by_index(table) for name, table in merged.items()}


def _by_index(table: pa.Table) -> pa.Table:
    """Sorted by INDEX; a stable sort, because the elements of a list come in order."""
    return gathered(table, np.argsort(table.column(INDEX).to_numpy(), kind="stable"))
