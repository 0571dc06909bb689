"""The test kit, on a stream: whatever happens between two inputs, the same comes out."""

from __future__ import annotations

from typing import Any

from pyspark.sql import Row, SparkSession
from pyspark.sql import functions as F

from anabranch.testing import KillWorker, Rescale, Restart, Rows, StreamTest

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
