"""``stream.writeStream``: sink, output mode, trigger and options, as PySpark's DataStreamWriter has them."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Mapping
from typing import Any

from pyspark.sql import DataFrame, SparkSession

from anabranch.api.query import StreamQuery
from anabranch.api.settings import is_setting, resolve_settings
from anabranch.api.sinks import LateTarget, SinkRequest, choose_late_rows, choose_sink
from anabranch.api.start import QuerySpec, start_query
from anabranch.checkpoint.job import stages_of
from anabranch.checkpoint.shapes import former_places
from anabranch.checkpoint.storage import Storage
from anabranch.core.errors import CheckpointError, SettingsError, UnsupportedError
from anabranch.core.settings import Settings
from anabranch.engine.spark.files import TemporaryFolder, qualified
from anabranch.engine.spark.sinks import foreach_function
from anabranch.plan.pipeline import Pipeline
from anabranch.plan.validation import check_output_mode

_TRIGGERS = ("processingTime", "once", "availableNow")
#: Sinks that keep nothing themselves: without a place for it, their query's checkpoint lives as long as the query.
_PASSING_FORMATS = ("memory", "console", "noop")


class MissingCheckpointError(SettingsError):
    """There is no place for the query's checkpoint, and the sink outlives the query."""


class StreamWriter:
    """Collects where the result goes; ``start()`` checks everything and starts the query."""

    def __init__(self, pipeline: Pipeline, sample: DataFrame) -> None:
        self._pipeline = pipeline
        self._sample = sample
        self._format = ""
        self._mode = "append"
        self._options: dict[str, str] = {}
        self._partition_by: list[str] = []
        self._trigger: dict[str, Any] = {}
        self._name: str | None = None
        self._function: Callable[[DataFrame, int], Any] | None = None
        self._foreach: Any | None = None
        self._late: LateTarget | None = None
        self._now_ms: Callable[[], int] | None = None

    def format(self, source: str) -> StreamWriter:
        self._format = source.lower()
        return self

    def outputMode(self, outputMode: str) -> StreamWriter:
        """``append``: rows once they are final; ``update``: rows that changed in the epoch; ``complete``: all of it."""
        self._mode = outputMode.lower()
        return self

    def option(self, key: str, value: Any) -> StreamWriter:
        """An option of the sink, ``checkpointLocation``, or a setting whose name starts with ``anabranch.``.

        None changes nothing, as in PySpark.
        """
        if value is not None:
            self._options[key] = _text(value)
        return self

    def options(self, **options: Any) -> StreamWriter:
        for key, value in options.items():
            self.option(key, value)
        return self

    def partitionBy(self, *columns: Any) -> StreamWriter:
        self._partition_by = list(columns[0]) if len(columns) == 1 and isinstance(columns[0], list) else list(columns)
        return self

    def queryName(self, queryName: str) -> StreamWriter:
        if not isinstance(queryName, str) or not queryName.strip():
            raise UnsupportedError("A query's name must not be empty.")
        self._name = queryName
        return self

    def trigger(self, **trigger: Any) -> StreamWriter:
        """``processingTime="5 seconds"``, ``availableNow=True`` or ``once=True``."""
        given = {name: value for name, value in trigger.items() if value is not None}
        if len(given) != 1 or next(iter(given)) not in _TRIGGERS:
            raise UnsupportedError(
                f"A trigger is exactly one of {', '.join(_TRIGGERS)}, not {sorted(given)}. "
                "Continuous and real-time triggers are not supported."
            )
        self._trigger = given
        return self

    def foreachBatch(self, func: Callable[[DataFrame, int], Any]) -> StreamWriter:
        """Call a function with each epoch's result. It may read it as often as it likes, or not at all."""
        if not callable(func):
            raise UnsupportedError("foreachBatch needs a function of (DataFrame, epoch).")
        self._function, self._foreach = func, None
        return self

    def foreach(self, f: Any) -> StreamWriter:
        """Call a function with each row, in the tasks; or an object's ``process``, with ``open`` and ``close``."""
        foreach_function(f)
        self._function, self._foreach = None, f
        return self

    def lateRows(
        self, target: str | os.PathLike[str] | Callable[[DataFrame, int], Any], format: str = "parquet"
    ) -> StreamWriter:
        """Keep the rows that stateful stages drop because the watermark has passed them.

        They go to files (parquet, json or csv) in ``target/epoch=N``, or to a function of (rows, epoch), each once: an
        epoch that is repeated writes its own again. Their columns are those that they had when they arrived at the
        stage, and ``_stage``, the stage's name, ``_watermark``, and, if streams are joined, ``_side``.
        """
        self._late = LateTarget(target, format.lower())
        return self

    def clock(self, now_ms: Callable[[], int]) -> StreamWriter:
        """For tests: what the processing time of epochs is, in milliseconds, from the first of them on."""
        self._now_ms = now_ms
        return self

    def start(
        self,
        path: str | None = None,
        format: str | None = None,
        outputMode: str | None = None,
        partitionBy: str | list[str] | None = None,
        queryName: str | None = None,
        **options: Any,
    ) -> StreamQuery:
        """Start the query and return its handle."""
        if path is not None:
            options = {**options, "path": path}
        return self._start(None, format, outputMode, partitionBy, queryName, options)

    def toTable(
        self,
        tableName: str,
        format: str | None = None,
        outputMode: str | None = None,
        partitionBy: str | list[str] | None = None,
        queryName: str | None = None,
        **options: Any,
    ) -> StreamQuery:
        """Start the query with a table of the catalog as its sink; the table is made if there is none."""
        if self._function is not None:
            raise UnsupportedError("A query has one sink: foreachBatch or toTable, not both.")
        return self._start(tableName, format, outputMode, partitionBy, queryName, options)

    def _start(
        self,
        table: str | None,
        format: str | None,
        output_mode: str | None,
        partition_by: str | list[str] | None,
        name: str | None,
        options: Mapping[str, Any],
    ) -> StreamQuery:
        """Checks everything, and starts the query; what is given here counts more than what was set before."""
        self.options(**options)
        if format is not None:
            self.format(format)
        if output_mode is not None:
            self.outputMode(output_mode)
        if partition_by is not None:
            self.partitionBy(*([partition_by] if isinstance(partition_by, str) else partition_by))
        if name is not None:
            self.queryName(name)
        spark = self._sample.sparkSession
        check_output_mode(self._pipeline, self._mode)
        # Before anything is made under that name, such as a memory table in place of the other query's.
        if self._name is not None and any(query.name == self._name for query in spark.streams.active):
            raise UnsupportedError(
                f"A query {self._name!r} is running already. Stop it, or give this one another name."
            )
        settings = resolve_settings(spark, self._options)
        plain = {name: value for name, value in self._options.items() if not is_setting(name)}
        checkpoint = _take(plain, "checkpointLocation") or self._default_checkpoint(settings, table)
        place = checkpoint if isinstance(checkpoint, str) else checkpoint.path
        pipeline = _as_in_checkpoint(self._pipeline, spark, place, settings)
        wanted = SinkRequest(
            format=self._format,
            mode=self._mode,
            partition_by=self._partition_by,
            options=plain,
            name=self._name,
            function=self._function,
            foreach=self._foreach,
            table=table,
        )
        sink, description = choose_sink(self._sample, wanted)
        late = None
        if self._late is not None:
            late = choose_late_rows(
                pipeline,
                self._late,
                mode=self._mode,
                sink=sink,
                checkpoint=place,
                savepoint=settings.savepoint,
            )
            description = f"{description}; {self._late}"
        return start_query(
            QuerySpec(
                pipeline,
                self._sample,
                sink,
                description,
                settings=settings,
                checkpoint=checkpoint,
                mode=self._mode,
                trigger=self._trigger,
                name=self._name,
                late=late,
                now_ms=self._now_ms,
            )
        )

    def _default_checkpoint(self, settings: Settings, table: str | None) -> str | TemporaryFolder:
        """Returns, as Spark does, a folder of the session's, or a temporary one if the sink keeps nothing itself."""
        parent = self._sample.sparkSession.conf.get("spark.sql.streaming.checkpointLocation", None)
        if parent:
            return f"{parent.rstrip('/')}/{self._name or uuid.uuid4()}"
        is_function = self._function is not None or self._foreach is not None
        is_passing = is_function or (table is None and self._format in _PASSING_FORMATS)
        # Workers elsewhere could not read or write a folder of this machine.
        if is_passing and not settings.worker_addresses and not settings.state_location:
            return TemporaryFolder()
        raise MissingCheckpointError(
            "The query needs a checkpoint, where its state is kept safe. Set option('checkpointLocation', directory)."
        )


def _as_in_checkpoint(pipeline: Pipeline, spark: SparkSession, checkpoint: str, settings: Settings) -> Pipeline:
    """Gives stages the numbers that they have in the checkpoint: calls before a stateful stage may come and go."""
    location = qualified(spark, checkpoint, what="The checkpoint", error=CheckpointError)
    stored = stages_of(Storage(settings.state_location or location))
    if not stored and settings.savepoint:
        stored = stages_of(Storage(settings.savepoint))
    places = former_places(stored, [stage.spec for stage in pipeline.stateful_stages])
    return pipeline if places is None else pipeline.with_former_places(places)


def _take(options: dict[str, str], wanted: str) -> str | None:
    """Remove and return an option; Spark does not regard the case of option names."""
    for name in list(options):
        if name.lower() == wanted.lower():
            return options.pop(name)
    return None


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
