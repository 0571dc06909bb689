"""What becomes of the Rows that a processor yields."""

import datetime as dt
import zoneinfo
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql import Row
from pyspark.sql.types import (
    ArrayType,
    DecimalType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from anabranch.core.errors import EpochError
from support.process_model import fields, run_epochs
from support.process_script import Calling

COUNTS = fields(id="string", count="long")


def run(handle_rows: Any, rows: Any, *, output: StructType = COUNTS) -> list[dict[str, Any]]:
    key = pa.schema([("id", pa.string())])
    return run_epochs(Calling(handle_rows), [rows], key=key, output=output)[1][0]


OUTPUT = fields(
    id="string",
    n="integer",
    at=TimestampType(),
    price=DecimalType(10, 2),
    tags=ArrayType(StringType()),
    point=fields(x="long", y="string"),
    attributes=MapType(StringType(), StringType()),
    points=ArrayType(fields(x="long", y="string")),
)


def test_output_of_every_type_arrives_as_it_was_yielded() -> None:
    moment = dt.datetime(2024, 1, 1, 12, tzinfo=zoneinfo.ZoneInfo("Asia/Tokyo"))
    point = Row(y="two", x=1)
    row = Row(
        id="a",
        n=np.int64(5),
        at=moment,
        price=Decimal("1.5"),
        tags=["x", None],
        point=point,
        attributes={"k": "v"},
        points=[point, {"x": 2}, None],
    )
    nothing = Row(**dict.fromkeys(OUTPUT.names))
    output = run(lambda *_: [row, nothing], [{"id": "a"}], output=OUTPUT)
    assert output == [
        {
            "id": "a",
            "n": 5,
            "at": moment,
            "price": Decimal("1.50"),
            "tags": ["x", None],
            "point": {"x": 1, "y": "two"},
            "attributes": [("k", "v")],
            "points": [{"x": 1, "y": "two"}, {"x": 2, "y": None}, None],
        },
        dict.fromkeys(OUTPUT.names),
    ]


def test_a_fraction_for_a_whole_number_is_cut_off_as_in_spark() -> None:
    assert run(lambda *_: [Row(id="a", count=1.5)], [{"id": "a"}]) == [{"id": "a", "count": 1}]


def test_naive_timestamps_in_the_output_are_utc_as_in_spark() -> None:
    output = run(lambda *_: [Row(at=dt.datetime(2024, 1, 1))], [{"id": "a"}], output=fields(at=TimestampType()))
    assert output == [{"at": dt.datetime(2024, 1, 1, tzinfo=dt.UTC)}]


def test_output_fields_are_found_by_name() -> None:
    pair = Row("count", "id")
    rows = [Row(count=1, id="a"), Row(id="b", count=2), Row(id="c"), Row(other=1, count=4, id="d"), pair(5, "e")]
    assert run(lambda *_: rows, [{"id": "a"}]) == [
        {"id": "a", "count": 1},
        {"id": "b", "count": 2},
        {"id": "c", "count": None},
        {"id": "d", "count": 4},
        {"id": "e", "count": 5},
    ]


def test_output_without_names_is_taken_by_position() -> None:
    assert run(lambda *_: [("a", 1), Row("b", 2)], [{"id": "a"}]) == [{"id": "a", "count": 1}, {"id": "b", "count": 2}]


def test_input_rows_may_be_passed_on() -> None:
    output = run(lambda key, rows, timers: rows, [{"count": n, "id": "a", "more": 1.5} for n in range(3)])  # noqa: ARG005
    assert output == [{"id": "a", "count": n} for n in range(3)]


@pytest.mark.parametrize(
    ("yielded", "says"),
    [
        (("a",), r"\('a',\): 1 items for the 2 output fields \(id, count\)"),
        (("a", 1, 2), "3 items for the 2 output fields"),
        (Row(identity="a", counted=1), r"fields \(identity, counted\) and none of the output fields \(id, count\)"),
        (5, "5, a int"),
        ({"id": "a", "count": 1}, "a dict"),
        (Row(id="a", count="many"), "'many' for the output field count, a int64"),
        (Row(id="a", count=2**70), "for the output field count"),
        (Row(id=5, count=1), "5 for the output field id, a string"),
    ],
)
def test_output_that_does_not_fit_is_refused_by_stage_and_field(yielded: Any, says: str) -> None:
    def handle_rows(key: Any, *_: Any) -> list[Any]:
        fine = Row(id="fine", count=0)
        # Enough for the culprit to be in the second batch, after which more is to come.
        return [fine] * 6_000 + [yielded] if key == ("culprit",) else [fine] * 6_000

    with pytest.raises(EpochError, match=says) as caught:
        run(handle_rows, [{"id": id} for id in ("a", "b", "culprit", "c")])
    assert "Stage stage1: for key ('culprit',), the processor yielded " in str(caught.value)


def test_output_that_must_not_be_null_is_checked() -> None:
    output = StructType([StructField("id", StringType(), nullable=False)])
    with pytest.raises(EpochError, match="None for the output field id"):
        run(lambda *_: [Row(id=None)], [{"id": "a"}], output=output)
