"""The session stage: each epoch's sessions are merged with those of their key in the state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import StructType

from anabranch.core.errors import UnsupportedError
from anabranch.core.ids import StageNumber
from anabranch.core.requests import Expiry
from anabranch.core.schemas import HASH, INDEX, OPERATOR, Layout, StageSpec, VariableKind, VariableSpec
from anabranch.engine.late import LateKind, carried_columns, time_type
from anabranch.engine.stages import EpochContext, StageClock
from anabranch.engine.tasks import PARTITION, TaskEpoch, place, run_in_tasks
from anabranch.operators.aggregate.stage import AggregateStage, Merges, merge_buffers, merges_of
from anabranch.operators.grouping import Groups, group_rows, rows_of_other_keys
from anabranch.operators.keys import arrow_schema, key_name, key_names
from anabranch.operators.stage import KeyedStage
from anabranch.operators.state import MAX_ROWS_PER_BATCH, state_rows_of, timely_rows, write_changes
from anabranch.wire.routed import RoutedState, StageAccess

Numbers = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
#: The state variable of a session stage: of each key its sessions, by their start.
VARIABLE = "sessions"
#: Spark's mark of a column with sessions.
_SESSION = "spark.sessionWindow"
_START, _END = "_start", "_end"


@dataclass(frozen=True)
class SessionStage(KeyedStage):
    """groupBy(session_window(...), keys).agg(functions)."""

    #: The aggregation by all keys, the session among them: what it computes and what it shows.
    whole: AggregateStage
    spec: StageSpec
    #: Which of its keys is the session.
    position: int

    @property
    def parallelism(self) -> int | None:
        return self.whole.parallelism

    @property
    def event_time(self) -> tuple[int, str] | None:
        return self.whole.event_time

    @property
    def clock(self) -> StageClock:
        return self.whole.clock

    def numbered(self, number: StageNumber, name: str) -> Self:
        whole = self.whole.numbered(number, name)
        return replace(self, whole=whole, spec=self.spec.numbered(number, name))

    def project(self, rows: DataFrame, side: int = 0, *, carry: bool = False) -> DataFrame:
        """Makes a session of each row, in the stateless half. Spark leaves out those without a time or a length."""
        del side
        projected = self.whole.project(rows, carry=carry)
        session = key_name(self.position)
        # As columns of their own they are without Spark's mark, by which it would unite sessions itself, late ones too.
        bounds = [F.col(session).start.alias(_START), F.col(session).end.alias(_END)]
        return projected.select(*[name for name in projected.columns if name != session], *bounds)

    def late_kinds(self, arriving: StructType, *, complete: bool) -> tuple[LateKind, ...]:
        del complete  # sessions that are over are not kept in any mode
        if self.event_time is None:
            return ()
        kind = time_type(self.whole.key_fields[self.position].dataType, "end")
        return (LateKind(_END, "", kind, carried_columns(arriving)),)

    def apply(self, rows: DataFrame, access: StageAccess, context: EpochContext) -> DataFrame:
        whole = self.whole
        keys = [PARTITION, HASH, *self._key_names, _START, _END]
        partials = place(rows, self._key_names, access).groupBy(*keys).agg(*whole.partials)
        task = _SessionTask(
            spec=self.spec,
            position=self.position,
            merges=merges_of(whole.functions),
            ansi=whole.ansi,
            complete=context.complete,
            has_watermark=self.event_time is not None,
            names=whole.task_schema.names,
        )
        return whole.finished(run_in_tasks(partials, access, task, whole.task_schema))

    def present(self, variable: str, state: DataFrame) -> DataFrame:
        """Returns the state as the query's result would show it."""
        del variable
        named = state.toDF(HASH, *self._key_names, "start", "end", *self.whole.buffer_names)
        return named.withColumn(key_name(self.position), F.struct("start", "end")).select(*self.whole.results)

    @cached_property
    def _key_names(self) -> list[str]:
        return [name for i, name in enumerate(key_names(len(self.whole.key_fields))) if i != self.position]


@dataclass(frozen=True)
class _SessionTask:
    """What a task does with its partition: read the sessions of its keys, unite them with the new ones, write, emit."""

    spec: StageSpec
    position: int
    merges: Merges
    ansi: bool
    complete: bool
    has_watermark: bool
    #: Of the columns that go out.
    names: list[str]

    def __call__(
        self, batches: Sequence[pa.RecordBatch], state: RoutedState, epoch: TaskEpoch
    ) -> Iterator[pa.RecordBatch]:
        layout = self.spec.layouts[VARIABLE]
        # Before anything is united: a late row does not get in because it touches a session that is not over.
        end = (len(self.spec.key) + 1, "") if self.has_watermark else None
        timely = timely_rows(state, batches, end, epoch.late_watermark_ms)
        groups = group_rows(state_rows_of(timely, layout).to_batches(), self.spec.key)
        up_to = None if epoch.watermark_ms is None else epoch.watermark_ms * 1000
        expiries = []
        if self.has_watermark and up_to is not None and not self.complete:
            expiries.append(Expiry(VARIABLE, layout.value.names[0], "", up_to))
        answers = state.ask(groups.keys, rest=self.complete, expiries=expiries)
        known = _Known(layout, groups, answers.found.get(VARIABLE))
        sessions = united(known.owners, known.starts, known.ends, known.stored.astype(np.int64) * -1)
        rows = self._rows(layout, known, sessions)
        is_over = sessions.ends <= up_to if expiries and up_to is not None else np.zeros(len(rows), np.bool_)
        others = rows_of_other_keys(answers.expired.get(VARIABLE, layout.rows.empty_table()), groups.keys)
        puts, removed = known.changes(rows, sessions, is_over)
        write_changes(state, layout, puts=[puts], deletes=[others, removed])
        if self.complete:
            outputs = [rows, answers.rest.get(VARIABLE, layout.rows.empty_table())]
        else:
            outputs = [rows.filter(pa.array(is_over)), others]
        for table in outputs:
            yield from self._shown(table).to_batches(MAX_ROWS_PER_BATCH)

    def _rows(self, layout: Layout, known: _Known, sessions: Sessions) -> pa.Table:
        """Returns the sessions as rows of state."""

        def merge(earlier: Sequence[pa.Array], later: Sequence[pa.Array]) -> Sequence[pa.Array]:
            return merge_buffers(self.merges, earlier, later, ansi=self.ansi)

        buffers = [known.values.column(number).take(pa.array(sessions.order)) for number in range(len(self.merges))]
        whole = [column.combine_chunks() for column in buffers]
        merged = reduced(whole, sessions.offsets, merge)
        keys = known.keys.take(pa.array(sessions.owners))
        start, end = layout.subkey.field(0), layout.value.field(0)
        times = [pa.array(sessions.starts).cast(start.type), pa.array(sessions.ends).cast(end.type)]
        return pa.table([*keys.columns, *times, *merged], schema=layout.rows)

    def _shown(self, rows: pa.Table) -> pa.Table:
        """Returns keys, the session among them where the user has put it, and partial aggregates."""
        count = len(self.spec.key)
        _, *columns = (column.combine_chunks() for column in rows.columns)
        keys, (start, end), buffers = columns[:count], columns[count : count + 2], columns[count + 2 :]
        session = pa.StructArray.from_arrays([start, end], names=["start", "end"])
        return pa.table([*keys[: self.position], session, *keys[self.position :], *buffers], names=self.names)


class _Known:
    """The sessions of the keys that have rows: those of the state, and the new ones, not united yet."""

    def __init__(self, layout: Layout, groups: Groups, found: pa.Table | None) -> None:
        self._layout = layout
        self.keys = groups.keys
        entries = pa.schema([*layout.subkey, *layout.value])
        new = groups.rows if len(groups.keys) else entries.empty_table()
        stored = layout.answers.empty_table() if found is None else found
        whole = pa.concat_tables([stored.drop_columns([INDEX]).cast(entries), new.cast(entries)])
        new_owners = np.repeat(np.arange(len(groups.keys)), np.diff(groups.offsets)[: len(groups.keys)])
        self.owners: Numbers = np.concatenate((stored.column(INDEX).to_numpy().astype(np.int64), new_owners))
        self.stored: Flags = np.arange(len(whole)) < len(stored)
        self.starts, self.ends = (_micros(whole.column(number)) for number in (0, 1))
        self._entries = whole
        #: The partial aggregates.
        self.values = whole.select(list(range(2, whole.num_columns)))

    def changes(self, rows: pa.Table, sessions: Sessions, is_over: Flags) -> tuple[pa.Table, pa.Table]:
        """Returns what to put and what to delete, from the stored sessions to the united ones that are not over."""
        layout = self._layout
        changed = sessions.any_of(~self.stored)
        puts = rows.filter(pa.array(changed & ~is_over))
        of = sessions.of_intervals()
        # What has become part of another session is gone; what begins one that has changed is replaced by it.
        swallowed = changed[of] & (self.starts != sessions.starts[of])
        gone = np.flatnonzero(self.stored & (swallowed | is_over[of]))
        keys = self.keys.take(pa.array(self.owners[gone]))
        removed = pa.table([*keys.columns, *self._entries.take(pa.array(gone)).columns], schema=layout.rows)
        return puts, removed


def _micros(column: pa.ChunkedArray) -> Numbers:
    micros: Numbers = column.cast(pa.int64()).to_numpy()
    return micros


#: Merges two rows of partial aggregates, for many rows at a time: columns of the earlier ones, and of the later ones.
MergePairs = Callable[[Sequence[pa.Array], Sequence[pa.Array]], Sequence[pa.Array]]


@dataclass(frozen=True)
class Sessions:
    """Intervals of several owners, put into an order in which those that make up a session are neighbours."""

    #: From the order of the sessions to that of the intervals as they were given.
    order: Numbers
    #: Session i is made of the intervals from offsets[i] to offsets[i + 1] in that order.
    offsets: Numbers
    owners: Numbers
    starts: Numbers
    ends: Numbers

    def any_of(self, flags: Flags) -> Flags:
        """Tells for each session whether any of its intervals has the flag."""
        if not len(self.owners):
            return np.zeros(0, np.bool_)
        any_flag: Flags = np.logical_or.reduceat(flags[self.order], self.offsets[:-1])
        return any_flag

    def of_intervals(self) -> Numbers:
        """Returns for each interval, as they were given, the number of its session."""
        numbers = np.empty(len(self.order), np.int64)
        numbers[self.order] = np.repeat(np.arange(len(self.owners)), np.diff(self.offsets))
        return numbers


def united(owners: Numbers, starts: Numbers, ends: Numbers, ranks: Numbers) -> Sessions:
    """Makes a session of all intervals of an owner that overlap or touch. Of equal starts, the lower rank is first."""
    order = np.lexsort((ranks, starts, owners))
    owner, start, end = owners[order], starts[order], ends[order]
    count = len(order)
    if not count:
        return Sessions(order, np.zeros(1, np.int64), owner, start, end)
    # The latest end so far, of each owner: ends by their rank, so that owners can be told apart in one number.
    sorted_ends, rank = np.unique(end, return_inverse=True)
    numbers = np.concatenate(([0], np.cumsum(owner[1:] != owner[:-1])))
    latest_rank = np.maximum.accumulate(numbers * count + rank) - numbers * count
    latest = sorted_ends[latest_rank]
    begins = np.ones(count, np.bool_)
    begins[1:] = (owner[1:] != owner[:-1]) | (start[1:] > latest[:-1])
    firsts = np.flatnonzero(begins)
    offsets = np.concatenate((firsts, [count])).astype(np.int64)
    return Sessions(order, offsets, owner[firsts], start[firsts], latest[offsets[1:] - 1])


def reduced(columns: Sequence[pa.Array], offsets: Numbers, merge: MergePairs) -> list[pa.Array]:
    """Makes one row of each run of rows: neighbours are merged in pairs, in as many rounds as the longest run needs."""
    lengths = np.diff(offsets)
    runs = np.arange(len(lengths))
    finished: list[Sequence[pa.Array]] = []
    finished_runs: list[Numbers] = []
    while True:
        is_single = lengths == 1
        starts = np.concatenate(([0], np.cumsum(lengths)))[:-1]
        finished.append([column.take(pa.array(starts[is_single])) for column in columns])
        finished_runs.append(runs[is_single])
        if is_single.all():
            break
        runs, starts, lengths = runs[~is_single], starts[~is_single], lengths[~is_single]
        halves = (lengths + 1) // 2
        position = np.arange(halves.sum()) - np.repeat(np.cumsum(halves) - halves, halves)
        left = np.repeat(starts, halves) + 2 * position
        paired = 2 * position + 1 < np.repeat(lengths, halves)
        merged = merge(
            [column.take(pa.array(left[paired])) for column in columns],
            [column.take(pa.array(left[paired] + 1)) for column in columns],
        )
        alone = [column.take(pa.array(left[~paired])) for column in columns]
        back = np.argsort(np.concatenate((np.flatnonzero(paired), np.flatnonzero(~paired))), kind="stable")
        columns = [
            pa.concat_arrays([one, other]).take(pa.array(back)) for one, other in zip(merged, alone, strict=True)
        ]
        lengths = halves
    back = np.argsort(np.concatenate(finished_runs), kind="stable")
    return [pa.concat_arrays(list(parts)).take(pa.array(back)) for parts in zip(*finished, strict=True)]


def session_key(rows: DataFrame, keys: Sequence[Column]) -> int | None:
    """Returns which of the keys is a session window."""
    if not keys:
        return None
    fields = rows.groupBy(*keys).agg(F.count(F.lit(1))).schema.fields[: len(keys)]
    return next((i for i, field in enumerate(fields) if _SESSION in (field.metadata or {})), None)


def build_session(whole: AggregateStage, position: int) -> SessionStage:
    """Makes the stage, from the aggregation by all keys, of which one is the session."""
    if len(whole.key_fields) == 1:
        raise UnsupportedError(
            "A session window needs another key beside it, as in Spark: sessions are those of a user, a device, … "
            "Group by a constant, F.lit(0).alias('all'), for the sessions of everything."
        )
    if whole.event_time is not None and whole.event_time[0] != position:
        field = whole.key_fields[whole.event_time[0]]
        raise UnsupportedError(
            f"The key column {field.name!r} has a watermark, and the session window beside it has none. "
            "Make the session window of the column with the watermark."
        )
    session = whole.key_fields[position].dataType
    assert isinstance(session, StructType)
    start, end = arrow_schema(session.fields)
    (buffers,) = whole.spec.variables
    key = pa.schema([field for i, field in enumerate(whole.spec.key) if i != position])
    spec = StageSpec(
        number=whole.spec.number,
        name=whole.spec.name,
        key=key,
        variables=(
            VariableSpec(VARIABLE, VariableKind.MAP, pa.schema([end, *buffers.value]), map_key=pa.schema([start])),
        ),
        traits={OPERATOR: "aggregation by session windows"},
    )
    return SessionStage(whole, spec, position)
