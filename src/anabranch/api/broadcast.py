"""``anabranch.broadcast(rows, key)``: a small table that changes while a query runs, and that all of its tasks read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import StructType

from anabranch.core.errors import UnsupportedError
from anabranch.engine.segments import TableArgument
from anabranch.engine.stages import table_stage
from anabranch.operators.keys import nullable_field
from anabranch.operators.tables import TableSource, build_tables, check_source

if TYPE_CHECKING:
    from anabranch.api.stream import Stream


class BroadcastTable:
    """A table made of a stream: the latest row of each key. ``stream.withBroadcast(name=table)`` lets tasks read it."""

    def __init__(self, source: TableSource) -> None:
        self.source = source

    @property
    def columns(self) -> list[str]:
        return [field.name for field in self.source.fields]


def broadcast(rows: Any, key: str | Sequence[str], deleted: Column | str | None = None) -> BroadcastTable:
    """A table from a streaming DataFrame, whose rows replace that of their key, or add one.

    `deleted`, a condition on the rows, says which of them remove their key's instead; without it, a column ``_delete``
    does, if there is one.

    >>> rates = anabranch.broadcast(spark.readStream.table("rates"), key="currency")  # doctest: +SKIP
    >>> prices = anabranch.stream(orders).withBroadcast(rates=rates).join(rates, "currency")  # doctest: +SKIP
    """
    from anabranch.api.stream import Stream

    if isinstance(rows, Stream):
        if rows.has_state:
            raise UnsupportedError("broadcast needs a stream without stateful operations. Write its result out first.")
        rows = rows._pipeline.source
    if not isinstance(rows, DataFrame):
        raise UnsupportedError(f"broadcast needs a streaming DataFrame, not a {type(rows).__name__}.")
    if not rows.isStreaming:
        raise UnsupportedError(
            "broadcast needs a streaming DataFrame, and this one never changes: join the stream with it as it is, or "
            "read it with spark.readStream."
        )
    keys = (key,) if isinstance(key, str) else tuple(key)
    condition = F.expr(deleted) if isinstance(deleted, str) else deleted
    source = TableSource(rows, keys, condition)
    check_source(source)
    return BroadcastTable(source)


def with_broadcast(stream: Stream, tables: dict[str, BroadcastTable]) -> Stream:
    """Returns the stream, with tables that later operations read by these names."""
    from anabranch.api.stream import Stream

    if not tables:
        raise UnsupportedError("withBroadcast needs tables by their names: withBroadcast(rules=rules).")
    for name, table in tables.items():
        if not isinstance(table, BroadcastTable):
            raise UnsupportedError(
                f"withBroadcast: {name} is a {type(table).__name__}. Make a table with anabranch.broadcast(rows, key)."
            )
    if stream.has_state:
        raise UnsupportedError(
            "withBroadcast comes before the first stateful operation, with all tables in one call. Move it up."
        )
    keys = ", ".join(f"{name} by {list(table.source.keys)}" for name, table in tables.items())
    pipeline = stream._pipeline.with_stage(f"withBroadcast({keys})")
    sources = {name: table.source for name, table in tables.items()}
    stage, source, sample = build_tables(pipeline.stages[-1], pipeline.source, sources)
    return Stream(replace(pipeline, source=source).with_stateful(stage, sample), sample)


def table_argument(stream: Stream, table: BroadcastTable) -> TableArgument:
    """Returns a table as an operation has it, which is found anew in each epoch."""
    stage = table_stage(stream._pipeline.stateful_stages)
    found = [name for name, source in getattr(stage, "origins", {}).items() if source is table.source]
    if not found:
        raise UnsupportedError(
            "join: the stream does not have this broadcast table. Add it before, with withBroadcast(name=table)."
        )
    sample = stream.sparkSession.createDataFrame([], StructType([nullable_field(f) for f in table.source.fields]))
    return TableArgument(found[0], sample)
