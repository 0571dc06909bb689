"""A processor of rows in a task: what it is given, what becomes of what it yields, and its life."""

# ruff: noqa: ARG002  (Spark gives the names of arguments)

import datetime as dt
import pickle
import zoneinfo
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from pyspark import cloudpickle
from pyspark.sql import Row
from pyspark.sql.streaming.stateful_processor import (
    StatefulProcessorHandle,
    TimerValues,
)
from pyspark.sql.types import (
    StructType,
)

from anabranch.core.errors import EpochError
from anabranch.core.ids import StageNumber
from anabranch.operators.process.declare import declare_state
from anabranch.operators.process.program import Program
from anabranch.operators.process.rows import RowRunner
from support.process_model import ModelState, batches_of, fields, run_epochs
from support.process_script import Calling

KEY = pa.schema([("id", pa.string())])
COUNTS = fields(id="string", count="long")


def run(handle_rows: Any, rows: Any, *, key: pa.Schema = KEY, output: StructType = COUNTS) -> list[dict[str, Any]]:
    return run_epochs(Calling(handle_rows), [rows], key=key, output=output)[1][0]


def count(key: Any, rows: Any, timers: Any) -> Any:
    del timers
    yield Row(id=key[0], count=sum(1 for _ in rows))


def test_rows_of_a_key_come_together_in_the_order_of_their_arrival() -> None:
    seen = {}

    def note(key: Any, rows: Any, timers: Any) -> Any:
        del timers
        seen[key] = [row.n for row in rows]
        return []

    run(note, [{"id": "abc"[n % 3] if n % 7 else None, "n": n} for n in range(5000)])
    assert seen == {
        (key,): [n for n in range(5000) if ("abc"[n % 3] if n % 7 else None) == key] for key in ("a", "b", "c", None)
    }


def test_rows_are_spark_rows_with_the_values_that_spark_gives() -> None:
    berlin = zoneinfo.ZoneInfo("Europe/Berlin")
    moment = dt.datetime(2024, 7, 1, 12, tzinfo=berlin)
    table = pa.table(
        {
            "id": ["a"],
            "at": pa.array([moment], pa.timestamp("us", "Europe/Berlin")),
            "local": pa.array([dt.datetime(2024, 1, 1)], pa.timestamp("us")),
            "day": pa.array([dt.date(2024, 1, 1)]),
            "price": pa.array([Decimal("1.50")]),
            "tags": pa.array([["x", None]]),
            "attributes": pa.array([[("k", 1)]], pa.map_(pa.string(), pa.int32())),
            "point": pa.array([{"x": 1, "y": None}], pa.struct([("x", pa.int32()), ("y", pa.string())])),
            "blob": pa.array([b"b"]),
            "ratio": pa.array([1.1], pa.float32()),
            "nothing": pa.array([None], pa.int64()),
            "my col": pa.array([1]),
            "count": pa.array([9]),
        }
    )
    seen: list[Any] = []
    run(lambda key, rows, timers: seen.extend(rows) or [], table)  # noqa: ARG005
    (row,) = seen
    assert isinstance(row, Row)
    assert row.asDict() == {
        name: column[0].as_py() for name, column in zip(table.column_names, table.columns, strict=True)
    }
    assert repr(row) == repr(Row(*table.column_names)(*[column[0].as_py() for column in table.columns]))
    assert (row.at, str(row.at.tzinfo)) == (moment, "Europe/Berlin")
    assert (row["my col"], row[0], row.price, row.attributes) == (1, "a", Decimal("1.50"), [("k", 1)])
    assert callable(row.count), "a method of tuple stays one, as in Spark"
    assert row["count"] == 9
    assert "day" in row
    with pytest.raises(AttributeError):
        row.unknown  # noqa: B018
    again = pickle.loads(pickle.dumps(row))
    assert again == row
    assert type(again) is Row
    assert again.__fields__ == table.column_names


@pytest.mark.parametrize("zone", ["Europe/Berlin", "UTC", "+05:30", None])
def test_timestamps_arrive_the_same_as_arrow_gives_them_around_a_change_of_clocks(zone: str | None) -> None:
    hours = [dt.datetime(2024, 10, 26, 22, tzinfo=dt.UTC) + dt.timedelta(minutes=30 * n) for n in range(10)]
    column = pa.array([*hours, None], pa.timestamp("us", zone))
    seen: list[Any] = []
    run(lambda key, rows, timers: seen.extend(rows) or [], pa.table({"id": ["a"] * 11, "at": column}))  # noqa: ARG005
    expected = column.to_pylist()
    assert [row.at for row in seen] == expected
    assert [repr(row.at) for row in seen] == [repr(value) for value in expected]


def test_keys_are_tuples_of_the_values_that_spark_gives() -> None:
    zone = "America/New_York"
    window = pa.struct([("start", pa.timestamp("us", zone)), ("end", pa.timestamp("us", zone))])
    moment = dt.datetime(2024, 1, 1, 12, tzinfo=dt.UTC)
    table = pa.table(
        {
            "w": pa.array([{"start": moment, "end": moment}, None], window),
            "t": pa.array([moment, None], pa.timestamp("us", zone)),
            "i": pa.array([5, None], pa.int32()),
        }
    )
    utc = pa.timestamp("us", "UTC")
    key = pa.schema([("w", pa.struct([("start", utc), ("end", utc)])), ("t", utc), ("i", pa.int32())])
    keys = []
    run(lambda key, rows, timers: keys.append(key) or [], table, key=key)  # noqa: ARG005
    full = next(key for key in keys if key[2] == 5)
    assert (None, None, None) in keys
    assert full[0] == {"start": moment, "end": moment}
    assert [str(value.tzinfo) for value in (full[0]["start"], full[1])] == [zone, zone]
    assert type(full) is tuple


def test_a_key_with_many_rows_is_given_all_of_them() -> None:
    rows = [{"id": "big" if n % 100 else str(n), "n": n} for n in range(45_000)]
    output = run(count, rows)
    assert {row["id"]: row["count"] for row in output} == {"big": 44_550, **{str(n): 1 for n in range(0, 45_000, 100)}}


def test_rows_need_not_be_read() -> None:
    def first_only(key: Any, rows: Any, timers: Any) -> Any:
        del timers
        yield Row(id=key[0], count=next(rows).n)

    rows = [{"id": str(n % 50), "n": n} for n in range(30_000)] + [{"id": "0", "n": 7} for _ in range(25_000)]
    assert {row["id"]: row["count"] for row in run(first_only, rows)} == {str(n): n for n in range(50)}


def test_time_is_unknown_without_a_time_mode() -> None:
    seen = []

    def note(key: Any, rows: Any, timers: TimerValues) -> Any:
        del key, rows
        seen.append((timers.getCurrentProcessingTimeInMs(), timers.getCurrentWatermarkInMs()))
        return iter(())

    run(note, [{"id": "a"}])
    assert seen == [(-1, -1)]


def test_times_are_passed_on() -> None:
    seen = []
    spec = declare_state(Calling(count), KEY, StageNumber(1), "s").spec

    def note(key: Any, rows: Any, timers: TimerValues) -> Any:
        del key, rows
        seen.append((timers.getCurrentProcessingTimeInMs(), timers.getCurrentWatermarkInMs()))
        return []

    program = Program(spec, Calling(note), COUNTS)
    assert list(RowRunner.run_task(batches_of([{"id": "a"}], spec), program, ModelState(spec), TimerValues(5, 6))) == []
    assert seen == [(5, 6)]


def test_output_comes_in_bounded_batches_after_which_state_has_been_written() -> None:
    spec = declare_state(Calling(count), KEY, StageNumber(1), "s").spec
    state = ModelState(spec)

    def many(key: Any, rows: Any, timers: Any) -> Any:
        del rows, timers
        for number in range(25_000):
            yield Row(id=key[0], count=number)

    processor = Calling(many)
    sizes = []
    for batch in RowRunner.run_task(
        batches_of([{"id": "a"}, {"id": "b"}], spec), Program(spec, processor, COUNTS), state
    ):
        sizes.append(batch.num_rows)
        done = sum(sizes) == 50_000
        assert (len(state.writes) == 1) == done
        assert ("close" in processor.life) == done
    assert sizes == [10_000] * 5


def test_state_is_written_once_without_input_and_without_output() -> None:
    state, outputs = run_epochs(Calling(count), [[], [{"id": "a"}], []], key=KEY, output=COUNTS)
    assert outputs == [[], [{"id": "a", "count": 1}], []]
    assert state.writes == [{}, {}, {}]
    assert len(state.reads) == 1
    state, outputs = run_epochs(Calling(lambda *_: []), [[{"id": "a"}]], key=KEY, output=COUNTS)
    assert (outputs, state.writes) == ([[]], [{}])


def test_a_program_travels_to_its_tasks() -> None:
    class Local(Calling):
        pass

    spec = declare_state(Local(count), KEY, StageNumber(1), "s").spec
    sent: Program = cloudpickle.loads(cloudpickle.dumps(Program(spec, Local(count), COUNTS)))
    (batch,) = RowRunner.run_task(batches_of([{"id": "a"}], spec), sent, ModelState(spec))
    assert batch.to_pylist() == [{"id": "a", "count": 1}]


def test_user_code_is_called_for_ascending_keys() -> None:
    seen = []

    def note(key: Any, rows: Any, timers: Any) -> Any:
        del timers
        seen.append((key[0], [row.n for row in rows]))
        return []

    run(note, [{"id": id, "n": n} for n, id in enumerate(["c", "a", "b", None, "c", "a"])])
    assert seen == [(None, [3]), ("a", [1, 5]), ("b", [2]), ("c", [0, 4])]


def test_a_processor_lives_once_per_task() -> None:
    processor = Calling(count)
    run_epochs(processor, [[{"id": str(n)} for n in range(3)]], key=KEY, output=COUNTS)
    assert processor.life == ["init", "rows", "rows", "rows", "close"]


def test_an_iterator_that_ends_too_early_is_shown_where_it_ends() -> None:
    def first_two(key: Any, rows: Any, timers: Any) -> Any:
        del key, timers
        return iter([next(rows), next(rows)])

    with pytest.raises(EpochError, match=r"handleInputRows for key \('a',\): StopIteration") as caught:
        run(first_two, [{"id": "a"}])
    assert "return iter([next(rows), next(rows)])" in str(caught.value)


def test_a_processor_is_closed_when_it_fails_and_nothing_is_written() -> None:
    def fail(key: Any, rows: Any, timers: Any) -> Any:
        del rows, timers
        if key == ("b",):
            raise KeyError("missing")
        yield Row(id=key[0], count=1)

    spec = declare_state(Calling(fail), KEY, StageNumber(1), "orders").spec
    state, processor = ModelState(spec), Calling(fail)
    with pytest.raises(EpochError) as caught:
        list(RowRunner.run_task(batches_of([{"id": "a"}, {"id": "b"}], spec), Program(spec, processor, COUNTS), state))
    message = str(caught.value)
    assert "Stage orders: Calling failed in handleInputRows for key ('b',): KeyError: 'missing'" in message
    assert 'raise KeyError("missing")' in message
    assert "anabranch/operators" not in message, "the traceback is the user's"
    assert message.endswith("it resumes from its checkpoint.")
    assert isinstance(caught.value.__cause__, KeyError)
    assert processor.life[-1] == "close"
    assert state.writes == []


def test_a_processor_is_closed_when_the_output_is_not_wanted_any_more() -> None:
    spec = declare_state(Calling(count), KEY, StageNumber(1), "s").spec
    processor, state = Calling(count), ModelState(spec)
    output = RowRunner.run_task(
        batches_of([{"id": str(n)} for n in range(30_000)], spec), Program(spec, processor, COUNTS), state
    )
    next(output)
    output.close()  # type: ignore[attr-defined]
    assert processor.life[-1] == "close"
    assert state.writes == []


@pytest.mark.parametrize("where", ["init", "close"])
def test_failures_at_both_ends_of_its_life_name_the_place(where: str) -> None:
    class Failing(Calling):
        def init(self, handle: StatefulProcessorHandle) -> None:
            super().init(handle)
            if where == "init" and len(self.life) > 1:
                raise ValueError("no")

        def close(self) -> None:
            super().close()
            if where == "close" and "rows" in self.life:
                raise ValueError("no")

    processor = Failing(count)
    processor.life.append("declared")
    spec = declare_state(Calling(count), KEY, StageNumber(1), "s").spec
    state = ModelState(spec)
    with pytest.raises(EpochError, match=rf"Failing failed in {where}: ValueError: no"):
        list(RowRunner.run_task(batches_of([{"id": "a"}], spec), Program(spec, processor, COUNTS), state))
    assert state.writes == []


def test_what_is_returned_must_be_iterable() -> None:
    with pytest.raises(EpochError, match="'NoneType' object is not iterable"):
        run(lambda *_: None, [{"id": "a"}])


def test_keys_with_the_same_hash_have_state_of_their_own() -> None:
    class Counter(Calling):
        def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Any:
            total = (self.state.get() or (0,))[0] + sum(1 for _ in rows)
            self.state.update((total,))
            yield Row(id=key[0], count=total)

    rows = [{"id": "abc"[n % 3]} for n in range(10)]
    state, outputs = run_epochs(Counter(None), [rows, rows], key=KEY, output=COUNTS, hash_of=lambda key: 7)  # noqa: ARG005
    assert {row["id"]: row["count"] for row in outputs[1]} == {"a": 8, "b": 6, "c": 6}
    assert state.value("count", "a") == (8,)


def test_a_processor_without_state_reads_nothing() -> None:
    class Stateless(Calling):
        def init(self, handle: StatefulProcessorHandle) -> None:
            del handle

    state, outputs = run_epochs(Stateless(count), [[{"id": "a"}]], key=KEY, output=COUNTS)
    assert (state.reads, state.writes, outputs) == ([], [{}], [[{"id": "a", "count": 1}]])
