"""The simulated job: what its stages remember and do with a key, as plain functions that tasks and model share.

Stage 0 counts rows by key. Its counts expire some time after the last row (a TTL), and each key sets a timer that, once
it is due, tells the count and forgets the key. Stage 1 sums what stage 0 says, under other keys. Stage 2 holds a table
that all tasks of an epoch read: the weight of a row.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache

import pyarrow as pa

from anabranch.core.ids import StageNumber
from anabranch.core.schemas import StageSpec, VariableKind, VariableSpec

COUNT, TIMERS, SUM, WEIGHT = "count", "timers", "sum", "weight"
FIRST_KEYS, SECOND_KEYS = 10, 5
#: How many different hashes the keys of each stage have: some keys share theirs.
_HASHES = 7, 4, 1
#: A count that is a multiple of this deletes its key.
DELETED_AT = 4
#: After so long without rows, a count is forgotten; after so long, its timer is due.
TTL_MS, TIMER_MS = 150, 90

_KEY = pa.schema([("k", pa.int64())])
_NUMBER = pa.schema([("n", pa.int64())])
COUNTS = StageSpec(
    StageNumber(0),
    "counts",
    _KEY,
    (
        VariableSpec(COUNT, VariableKind.VALUE, pa.schema([("n", pa.int64()), ("expires_ms", pa.int64())])),
        VariableSpec(TIMERS, VariableKind.MAP, pa.schema([]), pa.schema([("due_ms", pa.int64())])),
    ),
)
PLAIN_COUNTS = StageSpec(StageNumber(0), "counts", _KEY, COUNTS.variables[:1])
SUMS = StageSpec(StageNumber(1), "sums", _KEY, (VariableSpec(SUM, VariableKind.VALUE, _NUMBER),))
TABLES = StageSpec(StageNumber(2), "tables", _KEY, (VariableSpec(WEIGHT, VariableKind.VALUE, _NUMBER),))


@cache
def hash_of(stage: int, key: int) -> int:
    """Few slots for many keys, so that keys of several key groups share one; and some keys share their hash."""
    code = key % _HASHES[stage]
    return (code % 3 << 40) + code * 7 + stage * 3


@dataclass(frozen=True)
class Kind:
    """Which parts of the job there are."""

    #: Whether counts expire and timers fire.
    timed: bool
    #: Whether there is a table.
    tables: bool
    #: Whether stage 1 gives all of its sums in every epoch, and not only those that changed.
    complete: bool
    #: Whether there is a stage 1; else what stage 0 says goes to the sink.
    sums: bool = True

    @property
    def stages(self) -> tuple[StageSpec, ...]:
        counts = COUNTS if self.timed else PLAIN_COUNTS
        return (counts, *((SUMS,) if self.sums else ()), *((TABLES,) if self.tables else ()))


@dataclass(frozen=True)
class Batch:
    """What Spark plans as one epoch."""

    start: int
    end: int
    time_ms: int


@dataclass(frozen=True)
class Entry:
    """What stage 0 remembers of a key."""

    count: int
    expires_ms: int
    timers: tuple[int, ...] = ()


NOTHING = Entry(0, 0)


def key_of(row: int, seed: int) -> int:
    return (row * 7919 + seed * 104_729 + row * row % 13) % FIRST_KEYS


def weight_in(row: int, seed: int) -> int | None:
    """The new weight that a row brings for the table, if it does."""
    return (row + seed) % 3 + 1 if (row + seed) % 5 == 0 else None


def is_blind(key: int, batch: Batch) -> bool:
    """Whether the key is counted from 0 in an epoch, so that nobody reads its state before it is written."""
    return (key * 31 + batch.start * 17) % 6 == 0


def counted(entry: Entry, rows: int, weight: int, now_ms: int, kind: Kind) -> tuple[Entry, list[int]]:
    """What a key of stage 0 becomes in an epoch with so many rows of it, and what stage 1 is told."""
    told: list[int] = []
    if not kind.timed:
        count = entry.count + rows * weight
        return Entry(count if count % DELETED_AT else 0, 0), [count] if rows else []
    if entry.expires_ms <= now_ms:
        entry = Entry(0, 0, entry.timers)
    if rows:
        count = entry.count + rows * weight
        entry = Entry(count, now_ms + TTL_MS, (*entry.timers, now_ms + TIMER_MS) if not entry.timers else entry.timers)
        told.append(count)
    due = [timer for timer in entry.timers if timer <= now_ms]
    if due:
        told.append(1000 + entry.count)
        entry = Entry(0, 0, tuple(timer for timer in entry.timers if timer > now_ms))
    if entry.count % DELETED_AT == 0:
        entry = Entry(0, 0, entry.timers)
    return entry, told


def second_key(key: int) -> int:
    return key % SECOND_KEYS


def summed(before: int, told: Iterable[int]) -> int:
    return before + sum(told)


class Model:
    """What state and sink must be after every epoch of a log, by the plainest means."""

    def __init__(self, seed: int, kind: Kind) -> None:
        self._seed = seed
        self._kind = kind
        self.counts: dict[int, Entry] = {}
        self.sums: dict[int, int] = {}
        self.weight: int | None = None

    def run(self, batch: Batch) -> tuple[tuple[int, int], ...]:
        """The sink's rows of the next epoch; the state becomes what it is after it."""
        rows: dict[int, int] = {}
        for row in range(batch.start, batch.end):
            rows[key_of(row, self._seed)] = rows.get(key_of(row, self._seed), 0) + 1
            if self._kind.tables:
                self.weight = weight_in(row, self._seed) or self.weight
        told: dict[int, list[int]] = {}
        for key in sorted({*rows, *self.counts}):
            before = self.counts.get(key, NOTHING)
            is_due = any(timer <= batch.time_ms for timer in before.timers)
            if key not in rows and not is_due:
                continue
            if key in rows and not self._kind.timed and is_blind(key, batch):
                before = NOTHING
            entry, says = counted(before, rows.get(key, 0), self.weight or 1, batch.time_ms, self._kind)
            self.counts.pop(key, None)
            if entry != NOTHING:
                self.counts[key] = entry
            if says:
                told.setdefault(second_key(key), []).extend(says)
        if not self._kind.sums:
            return sink_rows({key: sum(says) for key, says in told.items()})
        changed = {key: summed(self.sums.get(key, 0), says) for key, says in told.items()}
        self.sums |= changed
        return sink_rows(self.sums if self._kind.complete else changed)

    @property
    def state(self) -> dict[tuple[str, int], tuple[int, ...]]:
        """All rows: by variable and key, its values."""
        found: dict[tuple[str, int], tuple[int, ...]] = {}
        for key, entry in self.counts.items():
            if entry.count:
                found[COUNT, key] = (entry.count, entry.expires_ms)
            if entry.timers:
                found[TIMERS, key] = entry.timers
        found.update({(SUM, key): (total,) for key, total in self.sums.items()})
        if self.weight is not None:
            found[WEIGHT, 0] = (self.weight,)
        return found


def sink_rows(sums: Mapping[int, int]) -> tuple[tuple[int, int], ...]:
    return tuple(sorted(sums.items()))
