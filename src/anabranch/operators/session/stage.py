"""The session stage: each epoch's sessions are merged with those of their key in the state."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import StructType

from anabranch.core.eventtime import EventTime
from anabranch.core.ids import StageNumber
from anabranch.core.requests import Expiry
from anabranch.core.schemas import HASH, INDEX, Layout, Op, StageSpec
from anabranch.engine.late import LateKind, carried_columns, time_type
from anabranch.engine.stages import EpochContext, StageClock
from anabranch.engine.tasks import PARTITION, TaskEpoch, place, run_in_tasks
from anabranch.operators.aggregate.stage import (
    MAX_ROWS_PER_BATCH,
    AggregateStage,
    Merges,
    as_changes,
    merge_buffers,
    merges_of,
)
from anabranch.operators.keys import key_name
from anabranch.operators.matching import rows_of_other_keys
from anabranch.operators.process.grouping import Groups, group_rows
from anabranch.operators.session.intervals import Flags, Numbers, Sessions, reduced, united
from anabranch.wire.routed import RoutedState, StageAccess

#: The state variable of a session stage: of each key its sessions, by their start.
VARIABLE = "sessions"
_START, _END = "_start", "_end"


@dataclass(frozen=True)
class SessionStage:
    """groupBy(session_window(...), keys).agg(functions)."""

    #: The aggregation by all keys, the session among them: what it computes and what it shows.
    whole: AggregateStage
    spec: StageSpec
    #: Which of its keys is the session.
    position: int

    output_delay_ms: ClassVar[int] = 0

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
        """The stateless half. Each row is a session of its own; Spark leaves out those without a time or a length."""
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

    def variant(self, context: EpochContext) -> str:
        del context
        return "sessions"

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
        """The state as the query's result would show it."""
        del variable
        named = state.toDF(HASH, *self._key_names, "start", "end", *self.whole.buffer_names)
        return named.withColumn(key_name(self.position), F.struct("start", "end")).select(*self.whole.results)

    @cached_property
    def _key_names(self) -> list[str]:
        return [key_name(i) for i in range(len(self.whole.key_fields)) if i != self.position]


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
        partials = pa.Table.from_batches(batches).combine_chunks() if batches else layout.rows.empty_table()
        partials = partials.rename_columns(layout.rows.names).cast(layout.rows)
        end = EventTime(layout.value.names[0], "")
        if self.has_watermark and epoch.late_watermark_ms is not None:
            # Before anything is united: a late row does not get in because it touches a session that is not over.
            timely = partials.filter(pc.invert(end.is_over(partials, epoch.late_watermark_ms * 1000)))
            state.note_late(len(partials) - len(timely))
            partials = timely
        groups = group_rows(partials.to_batches(), self.spec.key)
        up_to = None if epoch.watermark_ms is None else epoch.watermark_ms * 1000
        expiries = []
        if self.has_watermark and up_to is not None and not self.complete:
            expiries.append(Expiry(VARIABLE, end.column, end.field, up_to))
        answers = state.ask(groups.keys, rest=self.complete, expiries=expiries)
        known = _Known(layout, groups, answers.found.get(VARIABLE))
        sessions = united(known.owners, known.starts, known.ends, known.stored.astype(np.int64) * -1)
        rows = self._rows(layout, known, sessions)
        is_over = sessions.ends <= up_to if expiries and up_to is not None else np.zeros(len(rows), np.bool_)
        others = rows_of_other_keys(answers.expired.get(VARIABLE, layout.rows.empty_table()), groups.keys)
        changes = [as_changes(others, Op.DELETE, layout.changes), *known.changes(rows, sessions, is_over)]
        changed = pa.concat_tables(changes)
        state.write({VARIABLE: changed} if len(changed) else {})
        if self.complete:
            outputs = [rows, answers.rest.get(VARIABLE, layout.rows.empty_table())]
        else:
            outputs = [rows.filter(pa.array(is_over)), others]
        for table in outputs:
            yield from self._shown(table).to_batches(MAX_ROWS_PER_BATCH)

    def _rows(self, layout: Layout, known: _Known, sessions: Sessions) -> pa.Table:
        """The sessions as rows of state."""

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
        """Keys, the session among them where the user has put it, and partial aggregates."""
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

    def changes(self, rows: pa.Table, sessions: Sessions, is_over: Flags) -> list[pa.Table]:
        """From the stored sessions to the united ones that are not over."""
        layout = self._layout
        changed = sessions.any_of(~self.stored)
        puts = rows.filter(pa.array(changed & ~is_over))
        of = sessions.of_intervals()
        # What has become part of another session is gone; what begins one that has changed is replaced by it.
        swallowed = changed[of] & (self.starts != sessions.starts[of])
        gone = np.flatnonzero(self.stored & (swallowed | is_over[of]))
        keys = self.keys.take(pa.array(self.owners[gone]))
        removed = pa.table([*keys.columns, *self._entries.take(pa.array(gone)).columns], schema=layout.rows)
        return [as_changes(puts, Op.PUT, layout.changes), as_changes(removed, Op.DELETE, layout.changes)]


def _micros(column: pa.ChunkedArray) -> Numbers:
    micros: Numbers = column.cast(pa.int64()).to_numpy()
    return micros
