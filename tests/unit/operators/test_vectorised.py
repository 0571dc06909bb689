"""The vectorised processor: what its function gets and gives, and what becomes of the state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.core.errors import EpochError
from anabranch.core.ids import StageNumber
from anabranch.core.schemas import HASH, OP, Op, StageSpec, VariableKind, VariableSpec
from anabranch.operators.vectorised import KEY, VARIABLE, VectorisedTask

SPEC = StageSpec(
    StageNumber(1),
    "totals",
    pa.schema([("k", pa.string())]),
    (VariableSpec(VARIABLE, VariableKind.VALUE, pa.schema([("n", pa.int64()), ("total", pa.float64())])),),
)
OUTPUT = pa.schema([("k", pa.string()), ("n", pa.int64())])


class State:
    """What a stage's state does, in a dict."""

    def __init__(self) -> None:
        self.rows: dict[str, tuple[Any, ...]] = {}
        self.written: list[int] = []

    def read(self, keys: pa.Table) -> Mapping[str, pa.Table]:
        names = keys.column("k").to_pylist()
        found = [(i, *self.rows[name]) for i, name in enumerate(names) if name in self.rows]
        columns = list(zip(*found, strict=True)) or [(), (), ()]
        return {VARIABLE: pa.table([pa.array(c) for c in columns], schema=SPEC.layouts[VARIABLE].answers)}

    def write(self, changes: Mapping[str, pa.Table]) -> None:
        rows = changes[VARIABLE].to_pylist() if changes else []
        self.written.append(len(rows))
        for row in rows:
            if row[OP] == Op.DELETE:
                del self.rows[row["k"]]
            else:
                self.rows[row["k"]] = row["n"], row["total"]


def run(process: Any, state: State, rows: Sequence[tuple[str, float]], *, pandas: bool = False) -> pa.Table:
    # Two keys may well share a hash.
    hashes = [len(key) for key, _ in rows]
    names = [key for key, _ in rows]
    table = pa.table({HASH: pa.array(hashes, pa.int64()), "_key0": names, "k": names, "v": [v for _, v in rows]})
    task = VectorisedTask(SPEC, process, OUTPUT, pandas)
    batches = list(task(table.to_batches(max_chunksize=3), state, None))  # type: ignore[arg-type]
    return pa.Table.from_batches(batches, schema=OUTPUT)


def count(keys: pa.Table, rows: pa.Table, state: pa.Table) -> tuple[pa.Table, pa.Table]:
    """Counts and adds up; a key whose total is below zero is forgotten."""
    numbers, values = rows.column(KEY).to_numpy(), rows.column("v").to_numpy()
    n = np.bincount(numbers, minlength=len(keys)) + state.column("n").fill_null(0).to_numpy()
    total = np.bincount(numbers, values, minlength=len(keys)) + state.column("total").fill_null(0).to_numpy()
    kept = pa.array(total >= 0)
    after = pa.table({name: pc.if_else(kept, pa.array(column), None) for name, column in (("n", n), ("total", total))})
    return pa.table({"k": keys.column("k"), "n": n}), after


def count_frames(keys: pd.DataFrame, rows: pd.DataFrame, state: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    assert str(state["n"].dtype) == "Int64"
    sums = rows.groupby(KEY)["v"].agg(["size", "sum"])
    n, total = sums["size"] + state["n"].fillna(0), sums["sum"] + state["total"].fillna(0)
    kept = total >= 0
    return keys.assign(n=n), pd.DataFrame({"n": n.where(kept), "total": total.where(kept)})


EPOCHS = st.lists(
    st.lists(st.tuples(st.sampled_from(["a", "bb", "cc", "ddd"]), st.integers(-9, 9)), max_size=8), max_size=5
)


@settings(deadline=None, max_examples=60)
@given(EPOCHS, st.booleans())
def test_state_and_output_are_those_of_a_simple_model(epochs: list[list[tuple[str, int]]], pandas: bool) -> None:
    state, model = State(), dict[str, tuple[int, float]]()
    for rows in epochs:
        expected = {}
        for key, value in rows:
            n, total = expected.get(key) or model.get(key) or (0, 0.0)
            expected[key] = n + 1, total + value
        model = {key: value for key, value in {**model, **expected}.items() if value[1] >= 0}
        out = run(count_frames if pandas else count, state, [(k, float(v)) for k, v in rows], pandas=pandas)
        assert {row["k"]: row["n"] for row in out.to_pylist()} == {key: n for key, (n, _) in expected.items()}
        assert state.rows == model


def test_rows_of_a_key_are_together_and_in_order() -> None:
    seen: list[dict[str, Any]] = []

    def process(keys: pa.Table, rows: pa.Table, state: pa.Table) -> tuple[pa.Table, pa.Table]:
        seen.append({"keys": keys.column("k").to_pylist(), "rows": rows.to_pylist()})
        return OUTPUT.empty_table(), state

    state = State()
    run(process, state, [("b", 1.0), ("a", 2.0), ("b", 3.0), ("cc", 4.0)])
    keys, rows = seen[0]["keys"], seen[0]["rows"]
    assert sorted(keys) == ["a", "b", "cc"]
    assert [row[KEY] for row in rows] == sorted(row[KEY] for row in rows)
    assert all(keys[row[KEY]] == row["k"] for row in rows)
    assert [row["v"] for row in rows if row["k"] == "b"] == [1.0, 3.0]
    assert state.written == [0]


def test_what_did_not_change_is_not_written() -> None:
    state = State()
    state.rows = {"a": (1, 5.0), "b": (1, 5.0), "c": (1, None)}

    def process(keys: pa.Table, rows: pa.Table, state: pa.Table) -> tuple[pa.Table, pa.Table]:
        del rows
        n = pc.if_else(pc.equal(keys.column("k"), "b"), 2, state.column("n"))
        return OUTPUT.empty_table(), pa.table({"total": state.column("total"), "n": n})

    run(process, state, [("a", 1.0), ("b", 1.0), ("c", 1.0)])
    assert state.written == [1]
    assert state.rows == {"a": (1, 5.0), "b": (2, 5.0), "c": (1, None)}


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (None, "returned a NoneType. Return a tuple"),
        ((OUTPUT.empty_table(), pa.table({"n": [1], "total": [1.0]})), "returned 1 rows of state for 2 keys"),
        ((OUTPUT.empty_table(), pa.table({"n": [1, 2]})), "returned state that cannot be used"),
        ((pa.table({"k": ["a"]}), pa.table({"n": [1, 2], "total": [1.0, 2.0]})), "returned rows that cannot be used"),
        (([], []), "returned state that cannot be used: it is a list"),
    ],
)
def test_what_a_function_returns_is_checked(result: Any, message: str) -> None:
    state = State()
    with pytest.raises(EpochError, match=message):
        run(lambda *_: result, state, [("a", 1.0), ("b", 1.0)])
    assert state.written == []


def test_an_error_of_the_function_names_stage_function_and_line() -> None:
    def divide(*_: Any) -> Any:
        return 1 / 0

    with pytest.raises(EpochError, match=r"Stage totals: divide failed: ZeroDivisionError[\s\S]*return 1 / 0"):
        run(divide, State(), [("a", 1.0)])


def test_no_rows_are_no_call_but_the_attempt_is_sealed() -> None:
    state = State()
    assert run(lambda *_: pytest.fail("called"), state, []).num_rows == 0
    assert state.written == [0]
