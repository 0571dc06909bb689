"""The de-duplicating stage: of all rows with the same key only the first goes out; the state has the keys seen."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import DataType, DoubleType, FloatType, StructField, StructType, TimestampNTZType, TimestampType

from anabranch.core.errors import UnsupportedError
from anabranch.core.eventtime import EventTime
from anabranch.core.ids import StageNumber
from anabranch.core.requests import Expiry
from anabranch.core.schemas import INDEX, OPERATOR, Layout, StageSpec, VariableKind, VariableSpec
from anabranch.engine.late import LateKind, time_type
from anabranch.engine.spark.expressions import WATERMARK, compared_columns
from anabranch.engine.stages import EpochContext, StageClock
from anabranch.engine.tasks import TaskEpoch, place, run_in_tasks
from anabranch.operators.grouping import Groups, group_rows, rows_of_other_keys
from anabranch.operators.keys import arrow_schema, check_key_fields, key_name, key_names, normalised, nullable_field
from anabranch.operators.stage import KeyedStage, StageName, watermarked
from anabranch.operators.state import MAX_ROWS_PER_BATCH, timely_rows, write_changes
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
        timely = timely_rows(state, batches, self.event_time, epoch.late_watermark_ms)
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
        write_changes(state, layout, puts=[entries], deletes=[gone])
        if len(first):
            shown = pa.table([fresh[position] for position in self.columns], names=list(self.names))
            yield from shown.to_batches(MAX_ROWS_PER_BATCH)

    def _expiry(self, layout: Layout, epoch: TaskEpoch) -> Expiry | None:
        """Returns which keys the watermark has passed. Those still on their way go later, and count as gone."""
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
        """Tells for each key whether the state has it, and it had not expired when this epoch began."""
        seen = np.zeros(count, np.bool_)
        if found is None or not len(found):
            return seen
        if self.delay_ms is not None and epoch.late_watermark_ms is not None:
            stale = EventTime(found.schema.names[1], "").is_over(found, epoch.late_watermark_ms * 1000)
            found = found.filter(pc.invert(stale))
        seen[found.column(INDEX).to_numpy()] = True
        return seen

    def _entries(self, layout: Layout, groups: Groups, is_new: pa.Array, fresh: Sequence[pa.ChunkedArray]) -> pa.Table:
        """Returns the new keys as rows of state."""
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
class DedupStage(KeyedStage):
    """dropDuplicates(subset), dropDuplicatesWithinWatermark(subset), distinct()."""

    task: DedupTask
    parallelism: int | None
    #: Of the rows.
    fields: tuple[StructField, ...]
    #: The positions of the columns that make up the key, and of those that have to travel beside them.
    subset: tuple[int, ...]
    extras: tuple[int, ...]

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
            _normalised(F.col(f"_column{position}"), self.fields[position].dataType).alias(key_name(i))
            for i, position in enumerate(self.subset)
        ]
        return named.select(*keys, *[f"_column{position}" for position in self.extras])

    def late_kinds(self, arriving: StructType, *, complete: bool) -> tuple[LateKind, ...]:
        del complete
        if self.task.event_time is None:
            return ()
        names = [*key_names(len(self.subset)), *(f"_column{i}" for i in self.extras)]
        place, field = self.task.event_time
        columns = [names[position] for position in self.task.columns]
        kind = time_type(self.fields[columns.index(names[place])].dataType, field)
        return (LateKind(names[place], field, kind, tuple((f, c, "") for f, c in zip(arriving, columns, strict=True))),)

    def apply(self, rows: DataFrame, access: StageAccess, context: EpochContext) -> DataFrame:
        del context
        fields = [StructField(f.name, nullable_field(f).dataType, True, f.metadata) for f in self.fields]
        return run_in_tasks(place(rows, key_names(len(self.subset)), access), access, self.task, StructType(fields))


def _normalised(column: Column, kind: DataType) -> Column:
    """Returns the column with one form of each number, also in structs."""
    if isinstance(kind, StructType):
        fields = [_normalised(column.getField(field.name), field.dataType).alias(field.name) for field in kind.fields]
        return F.when(column.isNotNull(), F.struct(*fields))
    return normalised(column, kind)


def _filtered(table: pa.Table, flags: pa.Array) -> list[pa.ChunkedArray]:
    return [column.filter(flags) for column in table.columns]


def build_dedup(
    name: StageName, rows: DataFrame, method: str, arguments: tuple[Any, ...], keywords: dict[str, Any]
) -> tuple[DedupStage, DataFrame]:
    """Makes the stage, and an empty DataFrame with the schema of its result, which is that of the rows.

    The method is dropDuplicates or dropDuplicatesWithinWatermark.
    """
    fields = rows.schema.fields
    within = method == "dropDuplicatesWithinWatermark"
    # Spark itself says which columns are meant.
    deduplicated = rows.dropDuplicatesWithinWatermark if within else rows.dropDuplicates
    subset = compared_columns(deduplicated(*arguments, **keywords))
    keys = [fields[position] for position in subset]
    check_key_fields(keys)
    event_time = _event_time(fields)
    delay_ms = _delay_ms(method, fields, event_time) if within else None
    # Where a key is the column as it came, it need not travel twice.
    carried = {position: i for i, position in enumerate(subset) if not _has_floats(fields[position].dataType)}
    extras = [position for position in range(len(fields)) if position not in carried]
    columns = tuple(
        carried[position] if position in carried else len(subset) + extras.index(position)
        for position in range(len(fields))
    )
    value = pa.schema([pa.field(EXPIRES_AT, pa.timestamp("us", tz="UTC"))] if within else [])
    spec = StageSpec(
        number=name.number,
        name=name.name,
        key=arrow_schema(keys),
        variables=(VariableSpec(VARIABLE, VariableKind.VALUE, value),),
        traits={OPERATOR: method},
    )
    task = DedupTask(
        spec=spec,
        columns=columns,
        names=tuple(field.name for field in fields),
        event_time=None if event_time is None else (columns[event_time[0]], event_time[1]),
        key_time=subset.index(event_time[0]) if event_time and event_time[0] in subset and not within else None,
        delay_ms=delay_ms,
    )
    stage = DedupStage(
        task=task,
        parallelism=name.parallelism,
        fields=tuple(fields),
        subset=tuple(subset),
        extras=tuple(extras),
    )
    return stage, rows.sparkSession.createDataFrame([], rows.schema)


def _has_floats(kind: DataType) -> bool:
    if isinstance(kind, StructType):
        return any(_has_floats(field.dataType) for field in kind.fields)
    return isinstance(kind, FloatType | DoubleType)


def _event_time(fields: list[StructField]) -> tuple[int, str] | None:
    found = watermarked(fields)
    if len(found) > 1:
        names = ", ".join(repr(fields[position].name) for position, _ in found)
        raise UnsupportedError(
            f"The columns {names} all have a watermark, so it is not clear which rows are late. Keep one of them, or "
            "cast the others to timestamp again, for example F.col('x').cast('string').cast('timestamp')."
        )
    return found[0] if found else None


def _delay_ms(method: str, fields: list[StructField], event_time: tuple[int, str] | None) -> int:
    if event_time is None:
        raise UnsupportedError(f"{method} needs a watermark. Set one before it, with withWatermark(column, delay).")
    field = fields[event_time[0]]
    if not isinstance(field.dataType, TimestampType | TimestampNTZType):
        raise UnsupportedError(
            f"{method} needs a watermark on a timestamp, and {field.name!r} is a {field.dataType.simpleString()}. "
            f"Take F.window_time({field.name!r}) instead of it."
        )
    return int(field.metadata[WATERMARK])
