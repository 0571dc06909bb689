"""A task's view of its stage's state: one read and one write exchange with each worker that owns some of its keys."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from anabranch.core.keygroups import key_groups_of
from anabranch.core.schemas import HASH, INDEX, StageSpec
from anabranch.wire.client import WorkerClient, connections
from anabranch.wire.messages import KEYS, LookUpRoute, Read, Write

#: Rows of one message. A larger exchange goes in several messages, so that none nears gRPC's limit of 2 GiB.
MAX_ROWS_PER_MESSAGE = 1_000_000
REST = "rest."

Tables = dict[str, pa.Table]


@dataclass(frozen=True)
class Routing:
    """Which worker owns which key group, as far as a task has to know."""

    workers: tuple[str, ...]
    addresses: tuple[str, ...]
    #: For each key group the index of its owner in `workers`.
    owners: npt.NDArray[np.int16]


@dataclass(frozen=True)
class StageAccess:
    """All that a task needs to reach its stage's state in one epoch. Shipped with the task."""

    job: str
    generation: int
    epoch: int
    run: int
    key_groups: int
    stage: StageSpec
    routing: Routing
    parallelism: int
    #: For each key group the partition that processes it.
    partitions: npt.NDArray[np.int32]
    cache_route: bool
    timeout_s: float
    token: str
    #: Partitions that an earlier run of this epoch has sealed, and whose output nobody needs again.
    done: frozenset[int] = frozenset()

    def open(self, *, partition: int, attempt: int) -> RoutedState:
        return RoutedState(self, partition=partition, attempt=attempt)


class RoutedState:
    """Reads and writes the state of one stage for one task attempt."""

    def __init__(self, access: StageAccess, *, partition: int, attempt: int) -> None:
        self._access = access
        self._partition = partition
        self._attempt = attempt
        self.groups = np.flatnonzero(access.partitions == partition)

    def read(self, keys: pa.Table) -> Tables:
        """The entries of `keys` in every state variable; INDEX is the row number in `keys`."""
        answers, _ = self._read(keys, whole_groups=False)
        return answers

    def read_all(self, keys: pa.Table) -> tuple[Tables, Tables]:
        """As `read`, and in addition all other rows of this partition's key groups."""
        return self._read(keys, whole_groups=True)

    def write(self, changes: Mapping[str, pa.Table]) -> None:
        """Stage all changes of this attempt and seal it, on every worker that owns a group of this partition."""
        routing = self._routing()
        involved = self._involved(routing)
        shares: dict[int, Tables] = {worker: {} for worker in involved}
        for name, table in changes.items():
            for worker, rows in self._split(routing, involved, table):
                shares[worker][name] = table if rows is None else table.take(rows)
        self._on_each(involved, lambda worker: self._write_to(routing, worker, shares[worker]))

    def _read(self, keys: pa.Table, *, whole_groups: bool) -> tuple[Tables, Tables]:
        routing = self._routing()
        involved = self._involved(routing)
        split = dict(self._split(routing, involved, keys))

        def ask(worker: int) -> tuple[Tables, Tables]:
            rows = split.get(worker, _NOTHING)
            mine = keys if rows is None else keys.take(rows)
            groups = self.groups[routing.owners[self.groups] == worker].tolist() if whole_groups else []
            return self._read_from(routing, worker, mine, rows, groups)

        parts = self._on_each(involved, ask)
        return _merge([part[0] for part in parts], ordered=True), _merge([part[1] for part in parts], ordered=False)

    def _read_from(
        self,
        routing: Routing,
        worker: int,
        keys: pa.Table,
        rows: npt.NDArray[np.int64] | None,
        groups: list[int],
    ) -> tuple[Tables, Tables]:
        access = self._access
        answers: list[Tables] = []
        rests: list[Tables] = []
        # The rest is what no chunk asked for, so a read of whole groups cannot be cut into chunks.
        for start, chunk in _chunks(keys, limit=len(keys) if groups else MAX_ROWS_PER_MESSAGE):
            request = Read(
                job=access.job,
                generation=access.generation,
                epoch=access.epoch,
                run=access.run,
                stage=access.stage.number,
                rest_of_groups=groups,
            )
            _, tables = self._client(routing, worker).call(request, {KEYS: chunk})
            rests.append({n.removeprefix(REST): t for n, t in tables.items() if n.startswith(REST)})
            found = {name: table for name, table in tables.items() if not name.startswith(REST)}
            answers.append({name: _shifted(table, start, rows) for name, table in found.items()})
        return _merge(answers, ordered=False), _merge(rests, ordered=False)

    def _write_to(self, routing: Routing, worker: int, changes: Tables) -> None:
        access = self._access
        messages = list(_messages(changes))
        for number, tables in enumerate(messages):
            request = Write(
                job=access.job,
                generation=access.generation,
                epoch=access.epoch,
                run=access.run,
                stage=access.stage.number,
                partition=self._partition,
                attempt=self._attempt,
                chunk=number,
                last=number == len(messages) - 1,
            )
            self._client(routing, worker).call(request, tables)

    def _routing(self) -> Routing:
        access = self._access
        if access.cache_route:
            return access.routing
        request = LookUpRoute(job=access.job, generation=access.generation)
        header, _ = self._client(access.routing, 0).call(request)
        return decode_routing(header)

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
