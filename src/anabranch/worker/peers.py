"""Another worker as the origin of key groups: their former owner, whose copy of them is frozen."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from anabranch.core.eventtime import EventTime
from anabranch.core.schemas import INDEX, Layout, Op
from anabranch.wire.client import WorkerClient, connections
from anabranch.wire.messages import KEYS, FetchDue, FetchGroups, FetchKeys

#: The name of the one table of the answer to FetchKeys.
ENTRIES = "entries"
#: Keys of one request.
_KEYS_PER_FETCH = 500_000


@dataclass(frozen=True)
class Peer:
    """Where frozen key groups are: a worker, and the epoch as of which it froze them."""

    address: str
    as_of: int
    #: After so long without an answer, the checkpoint takes the peer's place.
    timeout_s: float
    token: str
    job: str
    generation: int


class PeerOrigin:
    """The frozen state of one variable on a peer."""

    def __init__(self, peer: Peer, stage: int, layout: Layout) -> None:
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
        for start in range(0, len(wanted), _KEYS_PER_FETCH):
            chunk = wanted.slice(start, _KEYS_PER_FETCH)
            _, tables = self._client().call(FetchKeys(**self._numbers), {KEYS: chunk})
            yield as_puts(entries_of(chunk, tables[ENTRIES]), self._layout)

    def scan(self, groups: Collection[int], *, can_wait: bool = False) -> Iterator[pa.Table]:
        """All rows of these key groups, as changes, in bounded pieces."""
        yield from self._rows(FetchGroups(**self._numbers, groups=sorted(groups), can_wait=can_wait))

    def due(self, groups: Collection[int], event_time: EventTime, since: int, up_to: int) -> Iterator[pa.Table]:
        """All entries of all keys of these key groups that have a row with a time from one to another, as changes."""
        yield from self._rows(
            FetchDue(
                **self._numbers,
                groups=sorted(groups),
                column=event_time.column,
                field=event_time.field,
                since=since,
                up_to=up_to,
            )
        )

    def recent(self, groups: Collection[int]) -> Iterator[pa.Table]:
        """The rows of keys that are likely to be needed next, as changes."""
        yield from self._rows(FetchGroups(**self._numbers, groups=sorted(groups), recent=True))

    def _rows(self, request: FetchGroups | FetchDue) -> Iterator[pa.Table]:
        for batch in self._client().stream(request):
            yield as_puts(pa.Table.from_batches([batch]), self._layout)

    def _client(self) -> WorkerClient:
        return connections.get(self._peer.address, timeout_s=self._peer.timeout_s, token=self._peer.token)


def entries_of(keys: pa.Table, answers: pa.Table) -> pa.Table:
    """Whole rows (``layout.rows``) from keys and the answers to a read of them."""
    of_keys = keys.take(answers.column(INDEX))
    rows = answers.drop_columns([INDEX])
    return pa.table([*of_keys.columns, *rows.columns], names=[*of_keys.schema.names, *rows.schema.names])


def as_puts(rows: pa.Table, layout: Layout) -> pa.Table:
    """Whole rows as the changes that make them."""
    ops = pa.array(np.full(len(rows), Op.PUT, dtype=np.int8))
    return pa.table([rows.column(0), ops, *rows.columns[1:]], schema=layout.changes)
