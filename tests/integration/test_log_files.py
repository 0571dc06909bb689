"""Spark's own log files, and who decides how they are written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

import anabranch
from anabranch.engine.spark.files import FILE_MANAGER, FILE_SYSTEM_BASED
from support.streams import EpochFeed


def test_log_files_are_written_the_fast_way_unless_the_user_has_chosen(spark: SparkSession, tmp_path: Path) -> None:
    feed = EpochFeed(spark, tmp_path / "input", "k string")
    feed.add([("a",)])

    def used(name: str) -> str | None:
        """What the query's own session, which Spark clones when it starts, says."""
        found: list[Any] = []

        def note(rows: Any, epoch: int) -> None:
            found.append((epoch, rows.count(), rows.sparkSession.conf.get(FILE_MANAGER, None)))

        writer = anabranch.stream(feed.stream()).groupBy("k").count().writeStream.outputMode("update")
        query = (
            writer.foreachBatch(note).option("checkpointLocation", str(tmp_path / name)).option("anabranch.workers", 1)
        )
        assert query.trigger(availableNow=True).start().awaitTermination(120)
        ((epoch, rows, manager),) = found
        assert (epoch, rows) == (0, 1)
        assert (tmp_path / name / "commits" / "0").exists()
        return manager

    assert used("fast") == FILE_SYSTEM_BASED
    assert spark.conf.get(FILE_MANAGER, None) is None
    chosen = FILE_SYSTEM_BASED.replace("FileSystemBased", "FileContextBased")
    spark.conf.set(FILE_MANAGER, chosen)
    try:
        assert used("chosen") == chosen
        assert spark.conf.get(FILE_MANAGER) == chosen
    finally:
        spark.conf.unset(FILE_MANAGER)
