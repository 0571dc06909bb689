"""``writeStream.lateRows(target)``: where rows go that come too late, with an error for what makes no sense."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import ArrayType, MapType, StructField, StructType, VariantType

from anabranch.api.locations import qualified
from anabranch.core.errors import UnsupportedError
from anabranch.engine.late import ROW, ROW_ID, SIDE, STAGE, WATERMARK, LateFiles, LateFunction, LateKind, LateRows
from anabranch.engine.sinks import FileSink, Sink
from anabranch.plan.pipeline import Pipeline

FORMATS = ("parquet", "json", "csv")

Function = Callable[[DataFrame, int], Any]


@dataclass(frozen=True)
class LateTarget:
    """What the user wrote."""

    target: str | os.PathLike[str] | Function
    format: str

    def __post_init__(self) -> None:
        if not callable(self.target) and not (isinstance(self.target, str | os.PathLike) and os.fspath(self.target)):
            raise UnsupportedError(
                "lateRows needs a directory, or a function of (DataFrame, epoch), not "
                f"{'an empty path' if self.target == '' else f'a {type(self.target).__name__}'}."
            )
        if self.format not in FORMATS:
            raise UnsupportedError(f"lateRows writes {', '.join(FORMATS)}, not {self.format!r}.")

    def __str__(self) -> str:
        if callable(self.target):
            return f"late rows: {getattr(self.target, '__name__', 'function')}"
        return f"late rows: {self.format} files in {os.fspath(self.target)}"


def choose_late_rows(
    pipeline: Pipeline, wanted: LateTarget, *, mode: str, sink: Sink, checkpoint: str, savepoint: str
) -> LateRows:
    """What the query does with late rows, checked before anything is started."""
    kinds = _kinds(pipeline, mode)
    every = [kind for kinds_of_stage in kinds.values() for kind in kinds_of_stage]
    _check_columns(every)
    names: dict[int, str] = {stage.spec.number: stage.spec.name for stage in pipeline.stateful_stages}
    if callable(wanted.target):
        return LateRows(LateFunction(wanted.target), kinds, names)
    spark = pipeline.source.sparkSession
    path = qualified(spark, os.fspath(wanted.target), what="The directory of lateRows", error=UnsupportedError)
    others = [("checkpoint", qualified(spark, checkpoint, what="The checkpoint", error=UnsupportedError))]
    if isinstance(sink, FileSink):
        others.append(("sink", sink.path))
    _check_apart(path, others)
    if wanted.format == "csv":
        _check_flat(every)
    if not savepoint:
        _check_unused(spark, path, others[0][1])
    return LateRows(LateFiles(path, wanted.format), kinds, names)


def _kinds(pipeline: Pipeline, mode: str) -> dict[int, tuple[LateKind, ...]]:
    if not pipeline.has_watermark:
        raise UnsupportedError(
            "lateRows needs a watermark: without one no row is late. Set it with withWatermark(column, delay) before "
            "the stateful operation, or leave out lateRows."
        )
    kinds: dict[int, tuple[LateKind, ...]] = {}
    for segment in pipeline.segments:
        if (stage := segment.stage) is None:
            continue
        if found := stage.late_kinds(segment.arriving, complete=mode == "complete"):
            kinds[stage.spec.number] = found
    if not kinds:
        raise UnsupportedError(
            f"lateRows: no stage of this query drops late rows in output mode {mode}. Windows and other keys with the "
            "watermark's column do in append and update mode, and so do sessions, dropDuplicates, joins of streams, "
            "and processors with timeMode 'eventTime'. Leave out lateRows."
        )
    return kinds


def _check_columns(kinds: Iterable[LateKind]) -> None:
    """Late rows of all stages are one table."""
    known: dict[str, StructField] = {}
    for kind in kinds:
        names = [field.name.lower() for field in kind.schema]
        for field in kind.schema:
            name = field.name.lower()
            if name in (ROW, ROW_ID, STAGE, SIDE, WATERMARK):
                raise UnsupportedError(f"lateRows uses the name {field.name!r} itself. Rename that column before.")
            if names.count(name) > 1:
                raise UnsupportedError(
                    f"lateRows: two columns that arrive at a stage are called {field.name!r}. Rename one of them "
                    "before the stage."
                )
            other = known.setdefault(name, field)
            if other.dataType != field.dataType:
                raise UnsupportedError(
                    f"lateRows: {field.name!r} is a {other.dataType.simpleString()} at one stage or side and a "
                    f"{field.dataType.simpleString()} at another, and late rows are one table. Rename one of them."
                )


def _check_apart(path: str, others: Sequence[tuple[str, str]]) -> None:
    mine = path.rstrip("/") + "/"
    for what, other in others:
        its = other.rstrip("/") + "/"
        if mine.startswith(its) or its.startswith(mine):
            raise UnsupportedError(
                f"lateRows: the directory {path} is that of the {what}, {other}, or one of them is in the other. Give "
                "late rows a directory of their own."
            )


def _check_flat(kinds: Iterable[LateKind]) -> None:
    for kind in kinds:
        for field in kind.schema:
            if isinstance(field.dataType, StructType | ArrayType | MapType | VariantType):
                raise UnsupportedError(
                    f"lateRows: csv cannot hold {field.name!r}, a {field.dataType.simpleString()}. Use parquet or json."
                )


def _check_unused(spark: SparkSession, path: str, checkpoint: str) -> None:
    """A query that begins anew would take the epochs of another one for its own."""
    jvm: Any = spark._jvm
    make_path = jvm.org.apache.hadoop.fs.Path
    configuration = spark._jsc.hadoopConfiguration()
    offsets, epochs = make_path(f"{checkpoint}/offsets"), make_path(f"{path}/epoch=*")
    if offsets.getFileSystem(configuration).exists(offsets):
        return
    found = epochs.getFileSystem(configuration).globStatus(epochs)
    if found is not None and len(found):
        raise UnsupportedError(
            f"lateRows: {path} has late rows of another query, of which this one would replace epoch after epoch: it "
            "has a new checkpoint. Use another directory, or remove that one."
        )
