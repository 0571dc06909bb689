"""The parts of the operators' benchmark that need no Spark: what is chosen, and what the sides compute."""

from collections import defaultdict
from itertools import chain

import pyarrow as pa
import pytest
from bench.__main__ import BENCHMARKS, main
from bench.operators import sized
from bench.sources import Size
from bench.user_code import arrow_totals
from bench.workloads import FAMILIES, WORKLOADS, chosen
from hypothesis import given
from hypothesis import strategies as st


def test_families_are_chosen_by_name_in_the_order_of_the_table() -> None:
    assert [workload.family for workload in chosen(" joins,windows")] == ["windows", "joins"]
    assert [workload.text for workload in chosen("timers")] == [
        "timer, rows",
        "timer, pandas",
        "TTL, rows",
        "TTL, pandas",
    ]
    assert chosen(",".join(FAMILIES)) == list(WORKLOADS)


@pytest.mark.parametrize("wrong", ["", ",", "window", "windows,join"])
def test_a_choice_that_does_not_exist_names_those_that_do(wrong: str) -> None:
    with pytest.raises(ValueError, match="is not a choice of windows, sessions, joins"):
        chosen(wrong)


def test_a_family_goes_by_its_own_name_beside_the_benchmarks(capsys: pytest.CaptureFixture[str]) -> None:
    assert not set(FAMILIES) & set(BENCHMARKS)
    with pytest.raises(SystemExit) as ended:
        main(["windows", "--keys", "3"])
    assert ended.value.code == 2
    assert "3 is odd" in capsys.readouterr().err
    assert main(["window"]) == 2
    assert "steady" in (said := capsys.readouterr().err)
    assert "windows" in said


def test_state_is_counted_in_whole_halves_of_the_keys() -> None:
    size = Size(keys=10, rows_per_key=3)
    found = {workload.family: workload.state_rows(size) for workload in WORKLOADS if workload.family != "timers"}
    assert found == {"windows": 15, "sessions": 20, "joins": 150, "duplicates": 15, "vectorised": 10}
    assert (size.rows, size.half) == (30, 5)


def test_a_given_size_holds_for_all_work_and_makes_no_work_twice() -> None:
    lines = chosen("vectorised,joins")
    usual = [Size(200_000, 1), Size(200_000, 1), Size(200_000, 10)]
    assert [size for _, size in sized(lines, None, None, quick=False)] == usual
    assert [size for _, size in sized(lines, 4, 3, quick=False)] == [Size(4, 3)] * 2
    assert all(size.rows < 100_000 for _, size in sized(WORKLOADS, None, None, quick=True))


Epoch = dict[int, list[int]]


@given(st.lists(st.dictionaries(st.integers(0, 9), st.lists(st.integers(0, 999), min_size=1), min_size=1), max_size=4))
def test_totals_in_columns_are_those_of_all_rows_so_far(epochs: list[Epoch]) -> None:
    stored: dict[int, tuple[int, int]] = {}
    seen: defaultdict[int, list[int]] = defaultdict(list)
    for epoch in epochs:
        before = [stored.get(key, (None, None)) for key in epoch]
        state = pa.table(list(zip(*before, strict=True)), schema=pa.schema([("count", "int64"), ("total", "int64")]))
        places = [place for place, amounts in enumerate(epoch.values()) for _ in amounts]
        rows = pa.table({"_key": pa.array(places, pa.int32()), "amount": [*chain(*epoch.values())]})
        shown, after = arrow_totals(pa.table({"key": list(epoch)}), rows, state)
        for key, amounts in epoch.items():
            seen[key] += amounts
        expected = {key: (len(seen[key]), sum(seen[key])) for key in epoch}
        assert {row["key"]: (row["count"], row["total"]) for row in shown.to_pylist()} == expected
        assert after.to_pylist() == shown.drop_columns(["key"]).to_pylist()
        stored |= expected
