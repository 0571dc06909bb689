"""Rows that come too late: how they are found in a stage's input, in which columns they go out, and where to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import reduce
from typing import Any, Protocol

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import DataType, StructField, StructType, TimestampNTZType

from anabranch.core.errors import EpochError
from anabranch.engine.spark.files import delete_folder
from anabranch.engine.spark.frames import count_nodes
from anabranch.engine.tasks import TaskEpoch

#: Beside the projected columns of a stage that needs only some of a row: the row as it came, and an id of it where the
#: projection makes several of one, as overlapping windows do.
ROW = "_row"
ROW_ID = "_row_id"
#: Beside the columns of late rows: the stage that dropped them, the side of a join, and the watermark that had passed.
STAGE, SIDE, WATERMARK = "_stage", "_side", "_watermark"
#: Nodes of Spark's plans that make several rows of one.
_MULTIPLY = frozenset({"Expand", "Generate"})


@dataclass(frozen=True)
class LateKind:
    """Rows of a stage's projected input that the stage drops if the watermark has passed their time."""

    #: The projected column with the time; its field, for a window.
    time: str
    field: str
    time_type: DataType
    #: The columns as they came: for each its name, the projected column that it is in, and its field in that.
    columns: tuple[tuple[StructField, str, str], ...]
    #: Of a join: the side by its name, and the column and number by which its rows are known.
    side: tuple[str, str, int] | None = None

    @property
    def schema(self) -> list[StructField]:
        return [field for field, _, _ in self.columns]

    def is_late(self, watermark_ms: int) -> Column:
        """Returns the condition of being late; a row without a time never is."""
        time = _column(self.time)
        late = (time.getField(self.field) if self.field else time) <= _time(watermark_ms, self.time_type)
        return late if self.side is None else late & (F.col(self.side[1]) == self.side[2])

    def shown(self) -> list[Column]:
        columns = []
        for field, column, inner in self.columns:
            found = _column(column)
            columns.append((found.getField(inner) if inner else found).alias(field.name))
        return columns


def kept_columns(arriving: StructType) -> tuple[tuple[StructField, str, str], ...]:
    """Returns the columns of a stage whose projection keeps all of them under their names."""
    return tuple((field, field.name, "") for field in arriving.fields)


def carried_columns(arriving: StructType) -> tuple[tuple[StructField, str, str], ...]:
    """Returns the columns of a stage that carries the rows as they came."""
    return tuple((field, ROW, field.name) for field in arriving.fields)


def time_type(kind: DataType, field: str) -> DataType:
    """Returns the type of a time that is a column, or a field of one."""
    return kind[field].dataType if isinstance(kind, StructType) else kind


def project_and_carry(rows: DataFrame, columns: Sequence[Column]) -> DataFrame:
    """Projects the columns out of the rows, with the rows themselves beside them."""
    carrying = rows.select("*", F.struct("*").alias(ROW))
    projected = carrying.select(*columns, ROW)
    if count_nodes(projected, _MULTIPLY) == count_nodes(rows, _MULTIPLY):
        return projected
    # Spark counts no rows of streams.
    return carrying.withColumn(ROW_ID, F.uuid()).select(*columns, ROW, ROW_ID)


def without_rows(projected: DataFrame) -> DataFrame:
    """Drops the rows as they came, which the stage itself does not need."""
    return projected.drop(ROW, ROW_ID)


class LateSink(Protocol):
    """Where late rows go."""

    def write(self, rows: DataFrame, epoch: int) -> None:
        """Takes the late rows of an epoch, in place of those that it took for the same epoch before."""

    def write_none(self, spark: SparkSession, epoch: int) -> None:
        """Notes that the epoch has no late rows."""


@dataclass(frozen=True)
class LateFiles:
    """Files, in a directory for each epoch that has late rows."""

    path: str
    format: str

    def write(self, rows: DataFrame, epoch: int) -> None:
        writer = rows.write.mode("overwrite").format(self.format)
        (writer.option("header", True) if self.format == "csv" else writer).save(self._place(epoch))

    def write_none(self, spark: SparkSession, epoch: int) -> None:
        delete_folder(spark, self._place(epoch))

    def _place(self, epoch: int) -> str:
        return f"{self.path}/epoch={epoch}"


@dataclass(frozen=True)
class LateFunction:
    """The user's own function of (rows, epoch), for each epoch that has late rows."""

    function: Callable[[DataFrame, int], Any]

    def write(self, rows: DataFrame, epoch: int) -> None:
        try:
            self.function(rows, epoch)
        except Exception as error:
            raise EpochError(
                f"The lateRows function failed in epoch {epoch}: {type(error).__name__}: {error}. The epoch is not "
                "committed. Correct the function and start the query again: it resumes with this epoch."
            ) from error

    def write_none(self, spark: SparkSession, epoch: int) -> None:
        """Does nothing: the same epoch had no late rows before either."""


@dataclass(frozen=True)
class LateRows:
    """What a query does with rows that come too late."""

    sink: LateSink
    #: For each stage that may drop rows the kinds of rows that it does, by the stage's number.
    kinds: Mapping[int, tuple[LateKind, ...]]
    names: Mapping[int, str]

    @property
    def has_sides(self) -> bool:
        return any(kind.side is not None for kinds in self.kinds.values() for kind in kinds)

    def of(self, inputs: Mapping[int, DataFrame], epoch: TaskEpoch) -> DataFrame | None:
        """Returns the late rows among the projected input of the stages; None if there can be none."""
        parts = [
            self._late(rows, kind, stage, watermark_ms)
            for stage, rows in inputs.items()
            if (watermark_ms := epoch.of_stage(stage).late_watermark_ms) is not None
            for kind in self.kinds[stage]
        ]
        if not parts:
            return None
        return reduce(lambda one, other: one.unionByName(other, allowMissingColumns=True), parts)

    def _late(self, rows: DataFrame, kind: LateKind, stage: int, watermark_ms: int) -> DataFrame:
        late = rows.filter(kind.is_late(watermark_ms))
        if ROW_ID in rows.columns:
            late = late.dropDuplicates([ROW_ID])
        own = [F.lit(self.names[stage]).alias(STAGE)]
        if self.has_sides:
            side = F.lit(None if kind.side is None else kind.side[0])
            own.append(side.cast("string").alias(SIDE))
        return late.select(*kind.shown(), *own, F.timestamp_millis(F.lit(watermark_ms)).alias(WATERMARK))


def _column(name: str) -> Column:
    return F.col("`" + name.replace("`", "``") + "`")


def _time(time_ms: int, kind: DataType) -> Column:
    if isinstance(kind, TimestampNTZType):
        text = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=time_ms)
        return F.expr(f"timestamp_ntz '{text:%Y-%m-%d %H:%M:%S.%f}'")
    return F.timestamp_millis(F.lit(time_ms))
