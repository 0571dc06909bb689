"""Another worker as the origin of key groups: their former owner, whose copy of them is frozen."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from anabranch.core.eventtime import EventTime
from anabranch.core.ids import Epoch, Generation, JobId, StageNumber
from anabranch.core.requests import FetchDue, FetchGroups, FetchKeys
from anabranch.core.schemas import INDEX, Layout, Op
from anabranch.wire import frames
from anabranch.wire.client import WorkerClient
from anabranch.wire.credentials import Credentials
from anabranch.wire.messages import ENTRIES, KEYS
from anabranch.worker.parts import PRODUCTION, Connect


@dataclass(frozen=True)
class Peer:
    """Where frozen key groups are: a worker, and the epoch as of which it froze them."""

    address: str
    as_of: Epoch
    #: After so long without an answer, the checkpoint takes the peer's place.
    timeout_s: float
    credentials: Credentials
    job: JobId
    generation: Generation


class PeerOrigin:
    """The frozen state of one variable on a peer."""

    def __init__(self, peer: Peer, stage: StageNumber, layout: Layout, connect: Connect = PRODUCTION.connect) -> None:
        self._connect = connect
        self._peer = peer
        self._layout = layout
        self._numbers: dict[str, Any] = {
            "job": peer.job,
            "generation": peer.generation,
            "as_of": peer.as_of,
            "stage": stage,
            "variable": layout.variable.name,
        }

    def fetch(self, keys: pa.Table) -> Iterator[pa.Table]:
        """All entries of these keys, as changes. A key without any does not exist."""
        wanted = keys.select(self._layout.keys.names)
        for _, chunk in frames.slices(wanted) if len(wanted) else ():
            tables = self._client().exchange(FetchKeys(**self._numbers), {KEYS: chunk})
            for rows in entries_of(chunk, tables[ENTRIES]):
                yield as_puts(rows, self._layout)

    def scan(self, groups: Collection[int], *, can_wait: bool = False) -> Iterator[pa.Table]:
        """All rows of these key groups, as changes, in bounded pieces."""
        yield from self._rows(FetchGroups(**self._numbers, groups=tuple(sorted(groups)), can_wait=can_wait))

    def due(self, groups: Collection[int], event_time: EventTime, since: int, up_to: int) -> Iterator[pa.Table]:
        """All entries of all keys of these key groups that have a row with a time from one to another, as changes."""
        yield from self._rows(
            FetchDue(
                **self._numbers,
                groups=tuple(sorted(groups)),
                column=event_time.column,
                field=event_time.field,
                since=since,
                up_to=up_to,
            )
        )

    def recent(self, groups: Collection[int]) -> Iterator[pa.Table]:
        """The rows of keys that are likely to be needed next, as changes."""
        yield from self._rows(FetchGroups(**self._numbers, groups=tuple(sorted(groups)), recent=True))

    def _rows(self, request: FetchGroups | FetchDue) -> Iterator[pa.Table]:
        for batch in self._client().stream(request):
            yield as_puts(pa.Table.from_batches([batch]), self._layout)

    def _client(self) -> WorkerClient:
        peer = self._peer
        return self._connect(peer.address, timeout_s=peer.timeout_s, credentials=peer.credentials)


def entries_of(keys: pa.Table, answers: pa.Table) -> Iterator[pa.Table]:
    """Whole rows (``layout.rows``) from keys and the answers to a read of them, in pieces of bounded size.

    A key is repeated for each of its entries: of a long list, that is many times what came in a message.
    """
    waiting = [answers]
    while waiting:
        part = waiting.pop()
        index = part.column(INDEX).to_numpy()
        first, last = (int(index[0]), int(index[-1])) if len(part) else (0, -1)
        own = keys.slice(first, last + 1 - first)
        if len(part) > 1 and own.nbytes * np.bincount(index - first).max() > frames.MESSAGE_BYTES:
            half = len(part) // 2
            waiting += [part.slice(half), part.slice(0, half)]
            continue
        of_keys, rows = own.take(pa.array(index - first)), part.drop_columns([INDEX])
        yield pa.table([*of_keys.columns, *rows.columns], names=[*of_keys.schema.names, *rows.schema.names])


def as_puts(rows: pa.Table, layout: Layout) -> pa.Table:
    """Whole rows as the changes that make them."""
    ops = pa.array(np.full(len(rows), Op.PUT, dtype=np.int8))
    return pa.table([rows.column(0), ops, *rows.columns[1:]], schema=layout.changes)
