"""A processor of pandas frames in a task: what it is given, and what becomes of what it yields."""

# ruff: noqa: ARG002  (Spark gives the names of arguments)

import datetime as dt
import warnings
from decimal import Decimal
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle
from pyspark.sql.types import (
    ArrayType,
    DecimalType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from anabranch.core.errors import EpochError
from anabranch.operators.process import frames as frames_module
from anabranch.operators.process.frames import slicer_of
from anabranch.operators.process.program import FrameSettings
from support.process_model import fields, run_epochs

KEY = pa.schema([("id", pa.string())])
COUNTS = fields(id="string", count="long")
NEW_YORK = FrameSettings(timezone="America/New_York")


class Calling(StatefulProcessor):
    """Calls a function for each key."""

    def __init__(self, handle_frames: Any) -> None:
        self.handle_frames = handle_frames

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.state = handle.getValueState("count", fields(n="long"))

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Any:
        return self.handle_frames(key, rows)


class Counter(Calling):
    """Spark's own example of a processor."""

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Any:
        total = (self.state.get() or (0,))[0]
        for frame in rows:
            total += frame["n"].count()
        self.state.update((total,))
        yield pd.DataFrame({"id": key, "count": total})


def run(
    handle_frames: Any,
    rows: Any,
    *,
    key: pa.Schema = KEY,
    output: StructType = COUNTS,
    frames: FrameSettings | None = None,
) -> list[dict[str, Any]]:
    return run_epochs(Calling(handle_frames), [rows], key=key, output=output, frames=frames or FrameSettings())[1][0]


def given(table: pa.Table, frames: FrameSettings | None = None) -> pd.DataFrame:
    """The one frame that a processor gets for a table with one key."""
    seen: list[pd.DataFrame] = []
    run(lambda _, rows: seen.extend(rows) or [], table, frames=frames)
    (frame,) = seen
    return frame


def test_counts_live_from_epoch_to_epoch() -> None:
    rows = [{"id": "abc"[n % 3], "n": n} for n in range(10)]
    state, outputs = run_epochs(Counter(None), [rows, rows, []], key=KEY, output=COUNTS, frames=FrameSettings())
    assert [{row["id"]: row["count"] for row in output} for output in outputs] == [
        {"a": 4, "b": 3, "c": 3},
        {"a": 8, "b": 6, "c": 6},
        {},
    ]
    assert state.value("count", "a") == (8,)
    assert len(state.writes[1]["count"]) == 3


def test_a_frame_has_the_types_that_spark_gives_it() -> None:
    new_york = pa.timestamp("us", "America/New_York")
    noon = dt.datetime(2024, 1, 2, 17, tzinfo=dt.UTC)
    point = pa.struct([("x", pa.int32()), ("at", new_york)])
    frame = given(
        pa.table(
            {
                "id": ["a", "a"],
                "tiny": pa.array([1, 2], pa.int8()),
                "int": pa.array([1, 2], pa.int32()),
                "gaps": pa.array([1, None], pa.int64()),
                "float": pa.array([1.1, None], pa.float32()),
                "flag": pa.array([True, None]),
                "both": pa.array([True, False]),
                "price": pa.array([Decimal("1.20"), None]),
                "blob": pa.array([b"z", None]),
                "day": pa.array([dt.date(2024, 1, 2), None]),
                "at": pa.array([noon, None], new_york),
                "local": pa.array([dt.datetime(2024, 1, 2), None], pa.timestamp("us")),
                "tags": pa.array([[1, 2], None], pa.list_(pa.int32())),
                "attributes": pa.array([[("k", 1)], None], pa.map_(pa.string(), pa.int32())),
                "point": pa.array([{"x": 1, "at": noon}, None], point),
                "took": pa.array([dt.timedelta(days=1), None], pa.duration("us")),
                "my col": pa.array([1, 2]),
            }
        ),
        NEW_YORK,
    )
    assert {name: str(kind) for name, kind in frame.dtypes.items()} == {
        "id": "object",
        "tiny": "int64",
        "int": "int64",
        "gaps": "float64",
        "float": "float64",
        "flag": "object",
        "both": "bool",
        "price": "object",
        "blob": "object",
        "day": "object",
        "at": "datetime64[ns]",
        "local": "datetime64[ns]",
        "tags": "object",
        "attributes": "object",
        "point": "object",
        "took": "timedelta64[ns]",
        "my col": "int64",
    }
    first = frame.iloc[0].to_dict()
    assert first["at"] == pd.Timestamp("2024-01-02 12:00")
    assert first["attributes"] == {"k": 1}
    assert first["point"] == {"x": 1, "at": pd.Timestamp("2024-01-02 12:00")}
    assert first["tags"].dtype == np.int32
    assert (first["day"], first["price"], first["blob"]) == (dt.date(2024, 1, 2), Decimal("1.20"), b"z")
    assert frame.iloc[1][["flag", "price", "day", "tags"]].tolist() == [None] * 4


def test_booleans_are_objects_only_where_some_are_null() -> None:
    kinds = {}

    def note(key: Any, rows: Any) -> Any:
        kinds[key[0]] = str(next(rows)["flag"].dtype)
        return []

    run(note, [{"id": "a", "flag": True}, {"id": "b", "flag": None}, {"id": "b", "flag": False}])
    assert kinds == {"a": "bool", "b": "object"}


def test_every_frame_is_numbered_from_0_and_may_be_written_into() -> None:
    seen = {}

    def spoil(key: Any, rows: Any) -> Any:
        for frame in rows:
            assert isinstance(frame.index, pd.RangeIndex)
            seen[key[0]] = frame["n"].tolist()
            frame["n"] += 100
            frame.loc[0, "n"] = -1
            frame["more"] = "x"
            frame.index.name = "number"
            frame.columns.name = "columns"
            assert frame.loc[0, "n"] == -1
            assert (frame.index.name, list(frame.columns)) == ("number", ["id", "n", "more"])
        return []

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # pandas' SettingWithCopyWarning among them
        run(
            lambda key, rows: [] if key == ("z",) else spoil(key, rows),
            [{"id": "abz"[n % 3], "n": n} for n in range(9)],
        )
    assert seen == {"a": [0, 3, 6], "b": [1, 4, 7]}


def test_slices_do_not_depend_on_the_inner_interface_of_pandas(monkeypatch: pytest.MonkeyPatch) -> None:
    table = pa.table({"n": range(10), "s": list("abcdefghij"), "at": pa.array(range(10), pa.timestamp("us"))})
    fast = slicer_of(table, FrameSettings())
    assert frames_module._CAN_SLICE_BLOCKS
    monkeypatch.setattr(frames_module, "_CAN_SLICE_BLOCKS", False)
    slow = slicer_of(table, FrameSettings())
    for bounds in ((0, 10), (3, 7), (9, 10)):
        pd.testing.assert_frame_equal(fast(*bounds), slow(*bounds), check_index_type="exact")


def test_large_keys_come_in_frames_of_bounded_size() -> None:
    sizes: dict[str, list[int]] = {}
    numbers: list[int] = []

    def note(key: Any, rows: Any) -> Any:
        for frame in rows:
            sizes.setdefault(key[0], []).append(len(frame))
            assert frame.index[0] == 0
            numbers.extend(frame["n"])
        return []

    rows = [{"id": "big", "n": n} for n in range(25_000)] + [{"id": "mid", "n": n} for n in range(25_000, 25_250)]
    run(note, rows, frames=FrameSettings(rows_max=100))
    assert (sizes["big"], sizes["mid"]) == ([100] * 250, [100, 100, 50])
    assert sorted(numbers) == list(range(25_250))
    sizes.clear()
    run(note, rows)
    assert (sizes["big"], sizes["mid"]) == ([10_000, 10_000, 5_000], [250])
    sizes.clear()
    run(note, rows, frames=FrameSettings(rows_max=0))
    assert (sizes["big"], sizes["mid"]) == ([25_000], [250])


def test_keys_are_those_of_pandas() -> None:
    utc = pa.timestamp("us", "UTC")
    moment = dt.datetime(2024, 1, 1, 17, tzinfo=dt.UTC)
    window = pa.struct([("start", pa.timestamp("us", "America/New_York"))])
    table = pa.table(
        {
            "i": pa.array([5, None], pa.int32()),
            "s": pa.array(["x", None]),
            "t": pa.array([moment, None], pa.timestamp("us", "America/New_York")),
            "w": pa.array([{"start": moment}, None], window),
            "d": pa.array([dt.date(2024, 1, 1), None]),
        }
    )
    key = pa.schema(
        [("i", pa.int32()), ("s", pa.string()), ("t", utc), ("w", pa.struct([("start", utc)])), ("d", pa.date32())]
    )
    keys: list[Any] = []
    run(lambda key, _: keys.append(key) or [], table, key=key, frames=NEW_YORK)
    noon = pd.Timestamp("2024-01-01 12:00")
    assert sorted(keys, key=repr) == [(5, "x", noon, {"start": noon}, dt.date(2024, 1, 1)), (None,) * 5]
    assert {type(key) for key in keys} == {tuple}


OUTPUT = fields(
    id="string",
    n=IntegerType(),
    at=TimestampType(),
    local=TimestampNTZType(),
    price=DecimalType(10, 2),
    tags=ArrayType(StringType()),
    point=fields(x="long", y="string"),
    attributes=MapType(StringType(), StringType()),
)


def test_output_of_every_type_arrives_as_it_was_yielded() -> None:
    frame = pd.DataFrame(
        {
            "attributes": [{"k": "v"}, None],
            "point": [{"x": 1, "y": "two"}, None],
            "tags": [["x", None], None],
            "price": [Decimal("1.5"), None],
            "local": pd.to_datetime(["2024-01-01 12:00", None]),
            "at": pd.to_datetime(["2024-01-01 12:00", None]),
            "n": [5, np.nan],
            "id": ["a", None],
            "unknown": 1,
        }
    )
    assert run(lambda *_: [frame], [{"id": "a"}], output=OUTPUT, frames=NEW_YORK) == [
        {
            "id": "a",
            "n": 5,
            "at": dt.datetime(2024, 1, 1, 17, tzinfo=dt.UTC),
            "local": dt.datetime(2024, 1, 1, 12),
            "price": Decimal("1.50"),
            "tags": ["x", None],
            "point": {"x": 1, "y": "two"},
            "attributes": [("k", "v")],
        },
        dict.fromkeys(OUTPUT.names),
    ]


def test_columns_without_names_are_taken_by_position() -> None:
    frames = [pd.DataFrame([("a", 1)]), pd.DataFrame({"count": [2], "id": ["b"]}), pd.DataFrame([("c", 3, None)])]
    assert run(lambda *_: frames, [{"id": "a"}]) == [
        {"id": "a", "count": 1},
        {"id": "b", "count": 2},
        {"id": "c", "count": 3},
    ]
    by_position = FrameSettings(by_name=False)
    named_otherwise = pd.DataFrame({"first": ["a"], "second": [1]})
    assert run(lambda *_: [named_otherwise], [{"id": "a"}], frames=by_position) == [{"id": "a", "count": 1}]


@pytest.mark.parametrize(
    "made",
    [
        pd.DataFrame({"z": [3, 6], "y": [2, 5], "x": [1, 4]}),
        pd.DataFrame({"z": [3, 6], "y": [2, 5], "x": [1, 4]})[["y", "x", "z"]],
        pd.DataFrame({"z": [3, 6], "y": [2, 5], "x": [1, 4]}).iloc[:, ::-1],
        pd.DataFrame({"z": [3, 6], "w": [0, 0], "y": [2, 5], "x": [1, 4]}).drop(columns="w"),
        pd.DataFrame([[1, 4], [2, 5], [3, 6]], index=["x", "y", "z"]).T,
        pd.DataFrame(np.array([[1, 2, 3], [4, 5, 6]], order="F"), columns=["x", "y", "z"]),
        pd.DataFrame({"x": [1, 4], "y": [2, 5]}).assign(z=[3, 6]),
        pd.DataFrame({"x": [1, 9, 4], "y": [2, 9, 5], "z": [3, 9, 6]}).iloc[::2],
    ],
    ids=["plain", "chosen", "reversed", "dropped", "transposed", "by column", "assigned", "every other row"],
)
def test_columns_are_found_however_a_frame_was_made(made: pd.DataFrame) -> None:
    output = fields(x="long", y="long", z="long")
    found = run(lambda *_: [made], [{"id": "a", "n": 1}], output=output)
    assert found == [{"x": 1, "y": 2, "z": 3}, {"x": 4, "y": 5, "z": 6}]


def test_frames_of_different_types_do_not_spoil_each_others_values() -> None:
    large = 2**53 + 1
    frames = [
        pd.DataFrame({"id": ["a"], "count": [large]}),
        pd.DataFrame({"id": ["b", "c"], "count": [np.nan, 1.0]}),
        pd.DataFrame({"id": ["d"], "count": pd.array([None], dtype="Int64")}),
        pd.DataFrame({"id": pd.Categorical(["e"]), "count": np.array([5], np.int8)}),
        pd.DataFrame({"id": ["f"], "count": [large]}),
        pd.DataFrame({"id": ["g"], "count": pd.Series([7], dtype=object)}),
        pd.DataFrame({"id": ["h"], "count": pd.array([large], dtype="Int64")}),
    ]
    output = run(lambda *_: frames, [{"id": "a"}])
    assert [(row["id"], row["count"]) for row in output] == [
        ("a", large), ("b", None), ("c", 1), ("d", None), ("e", 5), ("f", large), ("g", 7), ("h", large),
    ]  # fmt: skip


def test_timestamps_with_a_time_zone_of_their_own_are_kept() -> None:
    stamp = pd.Timestamp("2024-01-01 12:00", tz="Asia/Tokyo")
    frames = [
        pd.DataFrame({"at": [stamp]}),
        pd.DataFrame({"at": [stamp, stamp]}),
        pd.DataFrame({"at": [stamp.tz_localize(None)]}),
    ]
    output = run(lambda *_: frames, [{"id": "a"}], output=fields(at=TimestampType()), frames=NEW_YORK)
    tokyo = dt.datetime(2024, 1, 1, 3, tzinfo=dt.UTC)
    assert [row["at"] for row in output] == [tokyo, tokyo, tokyo, dt.datetime(2024, 1, 1, 17, tzinfo=dt.UTC)]


def test_frames_without_rows_are_nothing() -> None:
    empty = [pd.DataFrame(), pd.DataFrame({"id": [], "count": []}), pd.DataFrame(columns=["id", "count"])]
    full = pd.DataFrame({"id": ["a"], "count": [1]})
    assert run(lambda *_: [*empty, full, *empty], [{"id": "a"}]) == [{"id": "a", "count": 1}]
    assert run(lambda *_: empty, [{"id": "a"}]) == []


def test_output_comes_in_batches_of_bounded_size() -> None:
    large = pd.DataFrame({"id": "x", "count": np.arange(25_000)})
    small = pd.DataFrame({"id": ["y"], "count": [1]})
    output = run(lambda *_: [small, large, small, small], [{"id": "a"}])
    assert [row["count"] for row in output] == [1, *range(25_000), 1, 1]
    many = run(lambda key, _: [pd.DataFrame({"id": [key[0]], "count": [1]})], [{"id": str(n)} for n in range(12_000)])
    assert {row["id"] for row in many} == {str(n) for n in range(12_000)}


@pytest.mark.parametrize(
    ("yielded", "says"),
    [
        (pd.DataFrame({"id": ["a"]}), r"without the output field count, for key \('k',\); its columns are \['id'\]"),
        (pd.DataFrame([("a",)]), r"of 1 columns for the 2 output fields \(id, count\)"),
        ([("a", 1)], "yielded a list for key"),
        (pd.Series([1]), "yielded a Series"),
        (pd.DataFrame({"id": ["a"], "count": ["many"]}), r"output field count, a bigint, .* for key \('k',\)"),
        (pd.DataFrame({"id": [None], "count": [1]}), r"for key \('k',\), the processor yielded nulls .* field id"),
    ],
)
def test_output_that_does_not_fit_is_refused_by_stage_and_field(yielded: Any, says: str) -> None:
    good = pd.DataFrame({"id": ["a"], "count": [1]})
    output = StructType([StructField("id", StringType(), nullable=False), StructField("count", LongType())])
    with pytest.raises(EpochError, match=says) as caught:
        run(
            lambda key, _: [good, yielded if key == ("k",) else good],
            [{"id": "j"}, {"id": "k"}, {"id": "l"}],
            output=output,
        )
    assert "Stage stage1" in str(caught.value)


def test_numbers_that_do_not_fit_are_refused_if_asked_for() -> None:
    output = fields(n=IntegerType())
    frame = pd.DataFrame({"n": [1.5]})
    assert run(lambda *_: [frame], [{"id": "a"}], output=output) == [{"n": 1}]
    with pytest.raises(EpochError, match="output field n"):
        run(lambda *_: [frame], [{"id": "a"}], output=output, frames=FrameSettings(safely=True))


def test_output_that_must_not_be_null_is_checked() -> None:
    output = StructType([StructField("id", StringType(), nullable=False)])
    with pytest.raises(EpochError, match="nulls for the output field id"):
        run(lambda *_: [pd.DataFrame({"id": ["a", None]})], [{"id": "a"}], output=output)


def test_failures_name_the_key_and_show_user_code() -> None:
    def fail(_: Any, rows: Any) -> Any:
        for frame in rows:
            yield frame[["id", "missing"]]

    with pytest.raises(EpochError, match=r"failed in handleInputRows for key \('a',\): KeyError") as caught:
        run(fail, [{"id": "a"}])
    assert 'yield frame[["id", "missing"]]' in str(caught.value)


def test_numbers_of_numpy_may_be_kept_in_state() -> None:
    class Summing(Calling):
        def init(self, handle: StatefulProcessorHandle) -> None:
            self.state = handle.getValueState("s", fields(n="long", f="double", s="string", at=TimestampType()))

        def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Any:
            frame = next(rows)
            self.state.update((frame["n"].sum(), frame["n"].mean(), frame["id"].iloc[0], frame["at"].max()))
            yield pd.DataFrame({"id": [repr(self.state.get())], "count": [1]})

    at = dt.datetime(2024, 1, 1)
    rows = [{"id": "a", "n": 1, "at": at}, {"id": "a", "n": 2, "at": at}]
    state, outputs = run_epochs(Summing(None), [rows], key=KEY, output=COUNTS, frames=FrameSettings())
    assert outputs[0][0]["id"] == repr((3, 1.5, "a", at))
    assert state.value("s", "a") == (3, 1.5, "a", at.astimezone(dt.UTC))


@pytest.mark.parametrize(
    ("rows_max", "bytes_max", "expected"),
    [(0, 2**31 - 1, 1000), (10, 2**31 - 1, 10), (0, 2, 1), (0, 80, 10), (5, 80, 5), (20, 81, 11), (0, 10**6, 1000)],
)
def test_frames_are_as_large_as_rows_and_bytes_allow(rows_max: int, bytes_max: int, expected: int) -> None:
    rows = pa.table({"n": pa.array(range(1000), pa.int64())})
    assert FrameSettings(rows_max=rows_max, bytes_max=bytes_max).rows_in_frame(rows) == expected
    assert FrameSettings(rows_max=rows_max, bytes_max=bytes_max).rows_in_frame(rows.slice(0, 0)) >= 1
