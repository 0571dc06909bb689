"""The de-duplicating stage: a row goes out if its key is not in the state, and its key comes into the state."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import DataType, DoubleType, FloatType, StructField, StructType

from anabranch.core.eventtime import EventTime
from anabranch.core.ids import StageNumber
from anabranch.core.requests import Expiry
from anabranch.core.schemas import HASH, INDEX, Layout, Op, StageSpec
from anabranch.engine.late import LateKind, time_type
from anabranch.engine.stages import EpochContext, StageClock
from anabranch.engine.tasks import TaskEpoch, place, run_in_tasks
from anabranch.operators.aggregate.stage import MAX_ROWS_PER_BATCH, as_changes
from anabranch.operators.keys import key_name, nullable_field
from anabranch.operators.matching import rows_of_other_keys
from anabranch.operators.process.grouping import Groups, group_rows
from anabranch.operators.state import note_dropped
from anabranch.wire.routed import Answers, RoutedState, StageAccess

#: The state variable of the stage: the keys that have been seen.
VARIABLE = "seen"
#: Of dropDuplicatesWithinWatermark: from when on the key counts as new again.
EXPIRES_AT = "expires_at"

Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class DedupTask:
    """What a task does with its partition: look for its keys in the state, give out and remember those that are new."""

    spec: StageSpec
    #: For each column of the result where it is among key columns and others, in this order.
    columns: tuple[int, ...]
    names: tuple[str, ...]
    #: The column with the event time, counted in the same way, and its field, for a window.
    event_time: tuple[int, str] | None
    #: Which key column has the event time: state goes when the watermark passes it.
    key_time: int | None
    #: How long after its event time a key is remembered, for dropDuplicatesWithinWatermark.
    delay_ms: int | None

    def __call__(
        self, batches: Sequence[pa.RecordBatch], state: RoutedState, epoch: TaskEpoch
    ) -> Iterator[pa.RecordBatch]:
        layout = self.spec.layouts[VARIABLE]
        timely = self._in_time(batches, epoch)
        note_dropped(state, batches, timely)
        groups = group_rows(timely, self.spec.key)
        expiry = self._expiry(layout, epoch)
        answers = Answers({}, {}, {})
        if len(groups.keys) or expiry is not None:
            answers = state.ask(groups.keys, expiries=[] if expiry is None else [expiry])
        is_new = pa.array(~self._seen(len(groups.keys), answers.found.get(VARIABLE), epoch))
        first = groups.offsets[:-1][is_new.to_numpy(zero_copy_only=False)]
        fresh = [*_filtered(groups.given_keys, is_new), *groups.rows.take(pa.array(first)).columns]
        entries = self._entries(layout, groups, is_new, fresh)
        if expiry is not None:
            # What is over with this epoch need not be remembered.
            entries = entries.filter(pc.invert(EventTime(expiry.column, expiry.field).is_over(entries, expiry.up_to)))
        gone = rows_of_other_keys(
            answers.expired.get(VARIABLE, layout.rows.empty_table()), entries.select(layout.keys.names)
        )
        changed = pa.concat_tables(
            [as_changes(entries, Op.PUT, layout.changes), as_changes(gone, Op.DELETE, layout.changes)]
        )
        state.write({VARIABLE: changed} if len(changed) else {})
        if len(first):
            shown = pa.table([fresh[position] for position in self.columns], names=list(self.names))
            yield from shown.to_batches(MAX_ROWS_PER_BATCH)

    def _in_time(self, batches: Sequence[pa.RecordBatch], epoch: TaskEpoch) -> list[pa.RecordBatch]:
        """The rows that are not late."""
        if self.event_time is None or epoch.late_watermark_ms is None:
            return list(batches)
        position, field = self.event_time
        up_to = epoch.late_watermark_ms * 1000
        return [
            batch.filter(pc.invert(EventTime(batch.schema.names[1 + position], field).is_over(batch, up_to)))
            for batch in batches
        ]

    def _expiry(self, layout: Layout, epoch: TaskEpoch) -> Expiry | None:
        """Which keys the watermark has passed. Those that are still on their way go later, and count as gone."""
        if epoch.watermark_ms is None or self.event_time is None:
            return None
        if self.delay_ms is not None:
            column, field = layout.value.names[0], ""
        elif self.key_time is not None:
            column, field = self.spec.key.names[self.key_time], self.event_time[1]
        else:
            return None
        return Expiry(VARIABLE, column, field, epoch.watermark_ms * 1000, whole=False)

    def _seen(self, count: int, found: pa.Table | None, epoch: TaskEpoch) -> Flags:
        """For each key whether the state has it, and it had not expired when this epoch began."""
        seen = np.zeros(count, np.bool_)
        if found is None or not len(found):
            return seen
        if self.delay_ms is not None and epoch.late_watermark_ms is not None:
            stale = EventTime(found.schema.names[1], "").is_over(found, epoch.late_watermark_ms * 1000)
            found = found.filter(pc.invert(stale))
        seen[found.column(INDEX).to_numpy()] = True
        return seen

    def _entries(self, layout: Layout, groups: Groups, is_new: pa.Array, fresh: Sequence[pa.ChunkedArray]) -> pa.Table:
        """The new keys as rows of state."""
        columns = _filtered(groups.keys, is_new)
        if self.delay_ms is not None and self.event_time is not None:
            kind = layout.value.field(0).type
            if not len(groups.keys):
                return layout.rows.empty_table()
            # Spark takes a time that is null for the beginning of all times.
            times = pc.fill_null(fresh[self.event_time[0]].cast(pa.int64()), 0)
            columns.append(pc.add(times, self.delay_ms * 1000).cast(kind))
        return pa.table(columns, schema=layout.rows)


@dataclass(frozen=True)
class DedupStage:
    """dropDuplicates(subset), dropDuplicatesWithinWatermark(subset), distinct()."""

    task: DedupTask
    parallelism: int | None
    #: Of the rows.
    fields: tuple[StructField, ...]
    #: The positions of the columns that make up the key, and of those that have to travel beside them.
    subset: tuple[int, ...]
    extras: tuple[int, ...]

    output_delay_ms: ClassVar[int] = 0

    @property
    def spec(self) -> StageSpec:
        return self.task.spec

    @property
    def clock(self) -> StageClock:
        forgets = self.task.key_time is not None or self.task.delay_ms is not None
        return StageClock.EVENT_TIME if forgets else StageClock.NONE

    def numbered(self, number: StageNumber, name: str) -> Self:
        return replace(self, task=replace(self.task, spec=self.spec.numbered(number, name)))

    def project(self, rows: DataFrame, side: int = 0, *, carry: bool = False) -> DataFrame:
        del side, carry  # all columns are there
        named = rows.toDF(*[f"_column{position}" for position in range(len(self.fields))])
        keys = [
            normalised(F.col(f"_column{position}"), self.fields[position].dataType).alias(key_name(i))
            for i, position in enumerate(self.subset)
        ]
        return named.select(*keys, *[f"_column{position}" for position in self.extras])

    def late_kinds(self, arriving: StructType, *, complete: bool) -> tuple[LateKind, ...]:
        del complete
        if self.task.event_time is None:
            return ()
        names = [*(key_name(i) for i in range(len(self.subset))), *(f"_column{i}" for i in self.extras)]
        place, field = self.task.event_time
        columns = [names[position] for position in self.task.columns]
        kind = time_type(self.fields[columns.index(names[place])].dataType, field)
        return (LateKind(names[place], field, kind, tuple((f, c, "") for f, c in zip(arriving, columns, strict=True))),)

    def variant(self, context: EpochContext) -> str:
        del context
        return "deduplicated"

    def apply(self, rows: DataFrame, access: StageAccess, context: EpochContext) -> DataFrame:
        del context
        keys = [key_name(i) for i in range(len(self.subset))]
        fields = [StructField(f.name, nullable_field(f).dataType, True, f.metadata) for f in self.fields]
        return run_in_tasks(place(rows, keys, access), access, self.task, StructType(fields))

    def present(self, variable: str, state: DataFrame) -> DataFrame:
        """The keys that have been seen."""
        del variable
        return state.drop(HASH)


def normalised(column: Column, kind: DataType) -> Column:
    """Takes 0.0 and -0.0 for one value, and all NaN for one, also in structs."""
    if isinstance(kind, FloatType | DoubleType):
        zero, nan = F.lit(0.0).cast(kind), F.lit(float("nan")).cast(kind)
        return F.when(column == 0, zero).when(F.isnan(column), nan).otherwise(column)
    if isinstance(kind, StructType):
        fields = [normalised(column.getField(field.name), field.dataType).alias(field.name) for field in kind.fields]
        return F.when(column.isNotNull(), F.struct(*fields))
    return column


def _filtered(table: pa.Table, flags: pa.Array) -> list[pa.ChunkedArray]:
    return [column.filter(flags) for column in table.columns]
