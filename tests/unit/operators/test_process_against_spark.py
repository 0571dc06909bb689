"""The same processor on the same rows, run by Spark and by Anabranch, yields the same."""

# ruff: noqa: ARG002  (Spark gives the names of arguments)

import datetime as dt
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle
from pyspark.sql.streaming.tws_tester import TwsTester
from pyspark.sql.types import StructType

from anabranch.operators.process.program import FrameSettings
from support.process_model import fields, run_epochs

OUTPUT = "line STRING, n INT, price DECIMAL(10,2), at TIMESTAMP, tags ARRAY<STRING>, point STRUCT<x: INT, y: STRING>"
STATE = (
    "b BOOLEAN, i TINYINT, s SMALLINT, n INT, l BIGINT, f FLOAT, d DOUBLE, price DECIMAL(10,2), t STRING, "
    "blob BINARY, day DATE, at TIMESTAMP, local TIMESTAMP_NTZ, tags ARRAY<STRING>, attributes MAP<STRING, INT>, "
    "point STRUCT<x: INT, y: STRING>, points ARRAY<STRUCT<x: INT>>"
)
INPUT = """select * from values
  ('a', timestamp'2024-01-02 03:04:05.000006', 1, cast(1 as tinyint), 1.5f, 2.2d, 1.23bd, true, X'ff', date'2024-01-02',
   timestamp_ntz'2024-01-02 03:04:05', array('x', null), map('k', 1), named_struct('x', 1, 'y', 'q')),
  ('a', timestamp'2024-01-02 03:04:05.000006', 2, null, null, null, null, null, null, null, null, null, null, null),
  ('b', null, 3, 3, 0f, 0d, 0bd, false, X'', date'1970-01-01', null, array(), map(), named_struct('x', null, 'y', ''))
  t(k, kt, n, i, f, d, price, b, blob, day, local, tags, attributes, point)"""


def probe(*, pandas: bool) -> StatefulProcessor:
    """A processor that tells all it sees of its key, its rows and its state. Made here, so that it can be sent."""

    def value(n: int) -> tuple[Any, ...]:
        return (
            True, 1, 2, n, 2**40 + n, 1.1, 2.2, Decimal("1.235"), f"t{n}", bytearray(b"z"), dt.datetime(2024, 1, 2, 3),
            pd.Timestamp("2024-01-02 03:04:05.000006"), dt.datetime(2024, 1, 2), ("x", None), {"k": n},
            {"x": n, "y": None}, [(n,), None],
        )  # fmt: skip

    class Probe(StatefulProcessor):
        def init(self, handle: StatefulProcessorHandle) -> None:
            self.value = handle.getValueState("v", STATE)
            self.list = handle.getListState("l", "n BIGINT, at TIMESTAMP")
            self.map = handle.getMapState("m", "k STRING, d DATE", "n BIGINT, points ARRAY<STRUCT<x: INT>>")

        def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
            seen = [repr(key), repr(timerValues.getCurrentProcessingTimeInMs())]
            total = 0
            for row in rows:
                seen.append(repr((row.to_dict("list"), row.dtypes.to_dict())) if pandas else repr(row))
                total += int(row["n"].sum()) if pandas else row.n
            seen += list(map(repr, self.use(key, total)))
            output = Row(
                tags=[key[0], None], point={"x": total, "y": None}, n=total, line="; ".join(seen),
                price=Decimal("1.5"), at=dt.datetime(2024, 1, 2, tzinfo=None if pandas else dt.UTC),
            )  # fmt: skip
            yield pd.DataFrame([output.asDict()]) if pandas else output

        def use(self, key: Any, total: int) -> Iterator[Any]:
            known = self.value.exists()
            yield known, self.value.get()
            self.value.update(value(total))
            yield self.value.get()
            yield self.list.exists(), list(self.list.get())
            self.list.appendValue((total, dt.datetime(2024, 1, 2)))
            self.list.appendList([(None, None), [total, pd.Timestamp("2024-01-02")]])
            yield list(self.list.get())
            entry = (key[0], dt.date(2024, 1, 2))
            yield self.map.exists(), self.map.getValue(entry), self.map.containsKey(entry)
            self.map.updateValue(entry, (total, [(1,)]))
            self.map.updateValue((f"x{total}", None), [None, None])
            if known:
                self.map.removeKey((f"x{total}", None))
            yield self.map.getValue(entry), sorted(self.map.iterator(), key=repr)
            yield sorted(self.map.keys(), key=repr), sorted(self.map.values(), key=repr)
            if known:
                self.list.put([(1, None)])
                self.map.clear()
                self.value.clear()
            yield self.value.get(), list(self.list.get()), list(self.map.keys()), self.map.exists()

    return Probe()


def run_by_spark(
    stream: DataFrame, processor: StatefulProcessor, *, pandas: bool, checkpoint: Path
) -> list[list[dict[str, Any]]]:
    outputs: dict[int, list[dict[str, Any]]] = {}
    grouped = stream.groupBy("k", "kt")
    run = grouped.transformWithStateInPandas if pandas else grouped.transformWithState
    query = (
        run(processor, OUTPUT, "Update", "None")
        .writeStream.foreachBatch(lambda rows, epoch: outputs.__setitem__(epoch, rows.toArrow().to_pylist()))
        .option("checkpointLocation", str(checkpoint))
        .outputMode("update")
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    return [outputs[epoch] for epoch in sorted(outputs)]


@pytest.mark.parametrize("pandas", [False, True], ids=["rows", "pandas"])
def test_spark_and_anabranch_agree(spark: SparkSession, tmp_path: Path, pandas: bool) -> None:
    provider = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
    # As a file has it: everything may be null, and Spark's toArrow can take it.
    spark.sql(INPUT).coalesce(1).write.parquet(str(tmp_path / "once"))
    rows = spark.read.parquet(str(tmp_path / "once"))
    if pandas:  # in which Spark cannot have a key that is null
        rows = rows.withColumn("kt", F.coalesce("kt", F.lit("1970-01-01").cast("timestamp")))
    for _ in range(3):
        rows.coalesce(1).write.mode("append").parquet(str(tmp_path / "input"))
    stream = spark.readStream.schema(rows.schema).option("maxFilesPerTrigger", 1).parquet(str(tmp_path / "input"))
    spark.conf.set("spark.sql.streaming.stateStore.providerClass", provider)
    # One partition, as the types of a frame depend on the nulls in all of its batch.
    partitions = spark.conf.get("spark.sql.shuffle.partitions")
    spark.conf.set("spark.sql.shuffle.partitions", 1)
    try:
        theirs = run_by_spark(stream, probe(pandas=pandas), pandas=pandas, checkpoint=tmp_path / "checkpoint")
    finally:
        spark.conf.set("spark.sql.shuffle.partitions", partitions)
        spark.conf.unset("spark.sql.streaming.stateStore.providerClass")
    assert [len(output) for output in theirs] == [2, 2, 2]
    _, ours = run_epochs(
        probe(pandas=pandas),
        [rows.toArrow()] * 3,
        key=to_arrow_schema(StructType(rows.schema.fields[:2]), timezone="UTC"),
        output=spark.createDataFrame([], OUTPUT).schema,
        frames=FrameSettings() if pandas else None,
    )
    for epoch in range(3):
        for mine, spark_s in zip(*(sorted(side[epoch], key=str) for side in (ours, theirs)), strict=True):
            assert mine["line"].split("; ") == spark_s["line"].split("; ")
            assert mine == spark_s


Step = tuple[str, ...]


class Stepping(StatefulProcessor):
    """Takes the steps that its rows describe."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.value = handle.getValueState("v", fields(n="long"))
        self.list = handle.getListState("l", fields(n="long"))
        self.map = handle.getMapState("m", fields(k="string"), fields(n="long"))

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Row]:
        for row in rows:
            getattr(self, row.step)(row.k, row.n)
            yield Row(
                key=key[0],
                seen=repr(
                    [
                        self.value.exists(),
                        self.value.get(),
                        self.list.exists(),
                        list(self.list.get()),
                        self.map.containsKey((row.k,)),
                        tuple(self.map.getValue((row.k,)) or ()),
                        sorted(self.map.iterator()),
                        sorted(self.map.keys()),
                        sorted(self.map.values()),
                    ]
                ),
            )

    def set(self, _: str, n: int) -> None:
        self.value.update((n,))

    def unset(self, _: str, __: int) -> None:
        self.value.clear()

    def put(self, _: str, n: int) -> None:
        self.list.put([(i,) for i in range(n + 1)])

    def append(self, _: str, n: int) -> None:
        self.list.appendValue((n,))

    def extend(self, _: str, n: int) -> None:
        self.list.appendList([(n,), (n + 1,)])

    def empty(self, _: str, __: int) -> None:
        self.list.clear()

    def enter(self, k: str, n: int) -> None:
        self.map.updateValue((k,), (n,))

    def remove(self, k: str, _: int) -> None:
        self.map.removeKey((k,))

    def wipe(self, _: str, __: int) -> None:
        self.map.clear()


STEPS = ["set", "unset", "put", "append", "extend", "empty", "enter", "remove", "wipe"]
step = st.fixed_dictionaries(
    {
        "id": st.sampled_from(["a", "b", "c"]),
        "step": st.sampled_from(STEPS),
        "k": st.sampled_from(["x", "y", "z"]),
        "n": st.integers(0, 3),
    }
)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(step, max_size=12), min_size=1, max_size=4))
def test_any_steps_over_any_epochs_read_the_same_as_in_sparks_tester(epochs: list[list[dict[str, Any]]]) -> None:
    output = fields(key="string", seen="string")
    state, outputs = run_epochs(Stepping(), epochs, key=pa.schema([("id", pa.string())]), output=output)
    tester = TwsTester(Stepping())
    for rows, ours in zip(epochs, outputs, strict=True):
        for key in ("a", "b", "c"):
            of_key = [Row(**row) for row in rows if row["id"] == key]
            theirs = tester.test(key, of_key) if of_key else []
            assert [row["seen"] for row in ours if row["key"] == key] == [row.seen for row in theirs]
    for key in ("a", "b", "c"):
        assert state.value("v", key) == tester.peekValueState("v", key)
        assert state.elements("l", key) == tester.peekListState("l", key)
        assert dict(state.map("m", key)) == tester.peekMapState("m", key)
