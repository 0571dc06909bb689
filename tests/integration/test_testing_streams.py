"""The test kit, on a stream: whatever happens between two inputs, the same comes out."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import pytest
from pyspark import cloudpickle
from pyspark.sql import Row, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

from anabranch import UnsupportedError
from anabranch.testing import Clock, KillWorker, Rescale, Restart, Rows, StreamTest, Watermark

# Tasks do not have this module on their path.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

SCHEMA = "user string, amount bigint"


def totals(stream: Any) -> Any:
    return stream.groupBy("user").agg(F.sum("amount").alias("total"))


def test_a_story_with_faults_gives_what_the_same_without_them_gives(spark: SparkSession) -> None:
    inputs = [Rows([("ann", 1), ("bob", 2)]), Rows([("ann", 3)]), Rows([("cyd", 4), ("bob", 5)]), Rows([("ann", 6)])]
    with StreamTest(spark, SCHEMA, totals) as test:
        quiet = test.play(inputs)
    assert quiet[1] == [Row(user="ann", total=4)]
    with StreamTest(spark, SCHEMA, totals, store="rocksdb") as test:
        first, _, second, _, third, _, fourth = test.play(
            [inputs[0], KillWorker(1), inputs[1], Rescale(workers=3), inputs[2], Restart(crash=True), inputs[3]]
        )
        assert len(test.query.workers()) == 2
        assert sorted(test.state("stage1")) == [("ann", 10), ("bob", 7), ("cyd", 4)]
    assert [sorted(rows) for rows in (first, second, third, fourth)] == [sorted(rows) for rows in quiet]


def at(minute: int) -> datetime:
    return datetime(2026, 1, 1, 12, minute)


def clicked(views: Any, clicks: Any) -> Any:
    """The views, with the click that came within a minute."""
    seen = views.withWatermark("seen", "1 minute")
    then = clicks.withWatermark("clicked", "1 minute").withColumnRenamed("user", "by")
    near = F.expr("user = by and clicked >= seen and clicked <= seen + interval 1 minute")
    return seen.join(then, near, "left_outer").select("user", "seen", "clicked")


def test_two_inputs_come_in_one_epoch_and_the_watermark_goes_where_the_test_says(spark: SparkSession) -> None:
    schemas = {"views": "user string, seen timestamp", "clicks": "user string, clicked timestamp"}
    with StreamTest(spark, schemas, clicked, outputMode="append") as test:
        outputs = test.play(
            [
                Rows({"views": [("ann", at(0)), ("bob", at(1))], "clicks": [("ann", at(1))]}),
                Rows({"clicks": [{"user": "cyd", "clicked": at(2)}]}),
                Rows({"views": [("cyd", at(1))]}),
                Watermark(at(9)),
                Restart(),
                # The watermark is where it was, and has passed the first of them.
                Rows({"views": [("bob", at(9)), ("dan", at(10))], "clicks": [("bob", at(10)), ("dan", at(10))]}),
                Watermark(at(3)),
            ]
        )
        assert outputs == [
            [("ann", at(0), at(1))],
            [],
            [("cyd", at(1), at(2))],
            [("bob", at(1), None)],
            [],
            [("dan", at(10), at(10))],
            [],
        ]
        assert {row.user for row in test.state("stage2", "left")} == {"dan"}
        for wrong in ([("ann", at(0))], {"visits": []}):
            with pytest.raises(UnsupportedError, match=r"inputs are \['views', 'clicks'\].*Send \{'views': \[row"):
                test.send(wrong)


class Reminders(StatefulProcessor):
    """Counts the rows of a user, and reminds of a user a minute after each epoch with some."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._handle = handle
        # So short that it is over before the next epoch, if the time of day counts.
        self._count = handle.getValueState("count", "n bigint", ttlDurationMs=1)

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:
        count = (self._count.get() or (0,))[0] + len(list(rows))
        self._count.update((count,))
        self._handle.registerTimer(timerValues.getCurrentProcessingTimeInMs() + 60_000)
        yield Row(user=key[0], n=count)

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        late_ms = timerValues.getCurrentProcessingTimeInMs() - expiredTimerInfo.getExpiryTimeInMs()
        yield Row(user=key[0], n=-late_ms)

    def close(self) -> None:
        pass


def test_the_clock_stands_still_until_the_test_says_that_time_passes(spark: SparkSession) -> None:
    def reminders(stream: Any) -> Any:
        return stream.groupBy("user").transformWithState(
            Reminders(), "user string, n bigint", "update", "processingTime"
        )

    send = Rows([("ann", 1)])
    with StreamTest(spark, SCHEMA, reminders) as test:
        outputs = test.play([send, send, Restart(crash=True), send, Clock(59.5), send, Clock(1.5), Clock(59)])
        assert outputs == [
            [("ann", 1)],
            [("ann", 2)],
            [],
            [("ann", 3)],
            [],
            [("ann", 1)],
            [("ann", -1000)],
            [("ann", -500)],
        ]
        assert test.state("stage1", "count") == []
        with pytest.raises(UnsupportedError, match="no watermark to advance"):
            test.advance_watermark(0)
        with pytest.raises(UnsupportedError, match="one input without a name"):
            test.send({"stream": []})
