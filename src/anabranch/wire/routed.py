"""A task's view of its stage's state: one read and one write exchange with each worker that owns some of its keys."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from anabranch.core.errors import LostWorkerError
from anabranch.core.keygroups import key_groups_of
from anabranch.core.schemas import GROUP, HASH, INDEX, StageSpec
from anabranch.wire.client import WorkerClient, connections
from anabranch.wire.messages import FURTHER_ROWS, KEYS, LookUpRoute, Read, Write

#: Rows of one message. A larger exchange goes in several messages, so that none nears gRPC's limit of 2 GiB.
MAX_ROWS_PER_MESSAGE = 1_000_000
#: Prefixes of the names of tables in the answer to a read: other rows of the groups, rows that are due, and the entries
#: of other keys with such rows. These keys are in the table that has nothing but the prefix for a name.
REST = "rest."
EXPIRED = "expired."
DUE = "due."

Tables = dict[str, pa.Table]


@dataclass(frozen=True)
class Expiry:
    """Which rows of a state variable are due: those in which a time is not after another one.

    The time is in a column of the variable's rows, of its key, sub-key or value, or in a field of one (else ""): a
    timestamp, which counts in microseconds, or a number that counts as the reader likes. A null is never due.
    """

    variable: str
    column: str
    field: str
    up_to: int
    #: Whether rows of key groups of which some state is still on its way are brought now. Else they are found later.
    whole: bool = True


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

    workers: tuple[str, ...]
    addresses: tuple[str, ...]
    #: For each key group the index of its owner in `workers`.
    owners: npt.NDArray[np.int16]


@dataclass(frozen=True)
class StageAccess:
    """All that a task needs to reach its stage's state under one route. Shipped with the task."""

    job: str
    generation: int
    key_groups: int
    stage: StageSpec
    routing: Routing
    parallelism: int
    #: For each key group the partition that processes it.
    partitions: npt.NDArray[np.int32]
    cache_route: bool
    timeout_s: float
    token: str

    def open(self, *, epoch: int, run: int, partition: int, attempt: int) -> RoutedState:
        return RoutedState(self, epoch=epoch, run=run, partition=partition, attempt=attempt)


class RoutedState:
    """Reads and writes the state of one stage for one task attempt."""

    def __init__(self, access: StageAccess, *, epoch: int, run: int, partition: int, attempt: int) -> None:
        self._access = access
        self._epoch = epoch
        self._run = run
        self._partition = partition
        self._attempt = attempt
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
                shares[worker][name] = table if rows is None else table.take(rows)
        self._on_each(
            involved,
            lambda worker: self._write_to(
                routing, worker, shares[worker], late=self._late_rows if worker == involved[0] else 0
            ),
        )

    def _ask(self, routing: Routing, worker: int, asked: _Asked, rows: npt.NDArray[np.int64] | None) -> Answers:
        access = self._access
        mine = asked.keys if rows is None else asked.keys.take(rows)
        groups = self.groups[routing.owners[self.groups] == worker].tolist()
        load: Tables = {}
        if (further := asked.further) is not None:
            load[FURTHER_ROWS] = further.filter(routing.owners[further.column(GROUP).to_numpy()] == worker)
        parts: list[Answers] = []
        # Others are those that no chunk asks for, so a read of others cannot be cut into chunks.
        for start, chunk in _chunks(mine, limit=len(mine) if asked.others else MAX_ROWS_PER_MESSAGE):
            request = Read(
                job=access.job,
                generation=access.generation,
                epoch=self._epoch,
                run=self._run,
                stage=access.stage.number,
                groups=groups if asked.others or asked.expiries else [],
                rest=asked.rest,
                expired=[asdict(expiry) for expiry in asked.expiries] if start == 0 else [],
                due=None if asked.due is None else asdict(asked.due),
            )
            _, tables = self._client(routing, worker).call(request, {KEYS: chunk, **(load if start == 0 else {})})
            found, due = _named(tables, ""), _named(tables, DUE)
            due_keys = due.pop("", None)
            if due_keys is not None and len(due_keys) > MAX_ROWS_PER_MESSAGE:
                due = self._with_others(self._client(routing, worker), request, due_keys, due)
            parts.append(
                Answers(
                    found={name: _shifted(table, start, rows) for name, table in found.items()},
                    rest=_named(tables, REST),
                    expired=_named(tables, EXPIRED),
                    due_keys=due_keys,
                    due=due,
                )
            )
        return _joined(parts, ordered=False)

    @staticmethod
    def _with_others(client: WorkerClient, request: Read, due_keys: pa.Table, due: Tables) -> Tables:
        """Of very many keys, the entries of the first have come along; those of the others are read as usual."""
        plain, parts = replace(request, groups=[], rest=False, expired=[], due=None), [due]
        for start, others in _chunks(due_keys.slice(MAX_ROWS_PER_MESSAGE), limit=MAX_ROWS_PER_MESSAGE):
            _, tables = client.call(plain, {KEYS: others})
            parts.append({name: _shifted(t, MAX_ROWS_PER_MESSAGE + start, None) for name, t in tables.items()})
        return _merge(parts, ordered=False)

    def _write_to(self, routing: Routing, worker: int, changes: Tables, *, late: int) -> None:
        access = self._access
        messages = list(_messages(changes))
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
            self._client(routing, worker).call(request, tables)

    def _routing(self) -> Routing:
        access = self._access
        if access.cache_route:
            return access.routing
        request = LookUpRoute(job=access.job, generation=access.generation)
        silent: list[LostWorkerError] = []
        for worker in self._whom_to_ask():
            try:
                header, _ = self._client(access.routing, worker).call(request)
            except LostWorkerError as error:
                silent.append(error)
            else:
                return decode_routing(header)
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
        return connections.get(routing.addresses[worker], timeout_s=access.timeout_s, token=access.token)

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


def encode_routing(routing: Routing) -> dict[str, Any]:
    """The routing as JSON."""
    return {
        "workers": list(routing.workers),
        "addresses": list(routing.addresses),
        "owners": routing.owners.tolist(),
    }


def decode_routing(document: Mapping[str, Any]) -> Routing:
    return Routing(
        workers=tuple(document["workers"]),
        addresses=tuple(document["addresses"]),
        owners=np.array(document["owners"], dtype=np.int16),
    )


def _named(tables: Tables, prefix: str) -> Tables:
    """The tables with this prefix, without it; for no prefix, those of plain variables."""
    if prefix:
        return {name.removeprefix(prefix): table for name, table in tables.items() if name.startswith(prefix)}
    return {name: table for name, table in tables.items() if not name.startswith((REST, EXPIRED, DUE))}


def _chunks(table: pa.Table, *, limit: int) -> Iterator[tuple[int, pa.Table]]:
    if len(table) <= limit:
        yield 0, table
        return
    for start in range(0, len(table), limit):
        yield start, table.slice(start, limit)


def _messages(changes: Tables) -> Iterator[Tables]:
    """Changes in bounded messages; at least one, so that an attempt without changes is sealed as well."""
    if sum(len(table) for table in changes.values()) <= MAX_ROWS_PER_MESSAGE:
        yield {name: table for name, table in changes.items() if len(table)}
        return
    for name, table in changes.items():
        for _, chunk in _chunks(table, limit=MAX_ROWS_PER_MESSAGE):
            yield {name: chunk}


def _shifted(answers: pa.Table, start: int, rows: npt.NDArray[np.int64] | None) -> pa.Table:
    """Answers whose INDEX counts within one message, with INDEX counting within all keys of the task."""
    if start == 0 and rows is None:
        return answers
    index = answers.column(INDEX).to_numpy() + start
    if rows is not None:
        index = rows[index]
    column = pa.array(index.astype(np.int32), type=pa.int32())
    return answers.set_column(0, answers.schema.field(INDEX), column)


def _joined(parts: Sequence[Answers], *, ordered: bool) -> Answers:
    """One answer out of several, whose keys are others."""
    of_due = [part.due_keys for part in parts if part.due_keys is not None]
    starts = np.cumsum([0, *map(len, of_due)]).tolist()
    due = [part.due for part in parts if part.due_keys is not None]
    shifted = [
        {name: _shifted(table, start, None) for name, table in part.items()}
        for start, part in zip(starts, due, strict=False)
    ]
    return Answers(
        found=_merge([part.found for part in parts], ordered=ordered),
        rest=_merge([part.rest for part in parts], ordered=False),
        expired=_merge([part.expired for part in parts], ordered=False),
        due_keys=pa.concat_tables(of_due) if of_due else None,
        due=_merge(shifted, ordered=False),
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
    return table.take(np.argsort(table.column(INDEX).to_numpy(), kind="stable"))
