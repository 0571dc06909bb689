"""Events are a pure function of the specification and their number, and look as they should."""

import time
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.core.errors import SettingsError
from anabranch.workload import WorkloadSpec, event_schema, generate, generate_batches
from anabranch.workload.events import FIRST_TIME_US, chunk_rows
from anabranch.workload.schedule import Schedule

RICH = WorkloadSpec(keys=1000, skew=1.2, payload_bytes=13, disorder_ms=500, seed=9)


@settings(max_examples=25, deadline=None)
@given(start=st.integers(0, 2**40), count=st.integers(0, 300), cuts=st.lists(st.integers(0, 300), max_size=3))
def test_any_split_of_a_range_gives_the_same_events(start: int, count: int, cuts: list[int]) -> None:
    bounds = sorted([0, count, *(min(cut, count) for cut in cuts)])
    parts = [generate(RICH, start + low, high - low) for low, high in pairwise(bounds)]
    assert pa.concat_tables(parts).combine_chunks() == generate(RICH, start, count).combine_chunks()


def test_a_range_that_crosses_chunks_is_the_same_as_its_parts() -> None:
    step = chunk_rows(RICH)
    whole = generate(RICH, step - 100, step + 200)
    assert len(list(generate_batches(RICH, step - 100, step + 200))) == 2
    assert whole.slice(100, 50).combine_chunks() == generate(RICH, step, 50).combine_chunks()


def test_a_column_is_the_same_whichever_others_are_asked_for() -> None:
    whole = generate(RICH, 1000, 2000)
    for name in whole.column_names:
        assert generate(RICH, 1000, 2000, [name]).column(0) == whole.column(name)
    assert generate(RICH, 0, 1, ["user", "id"]).column_names == ["user", "id"]


def test_events_have_the_columns_of_the_prototype() -> None:
    table = generate(WorkloadSpec(), 0, 200_000)
    assert table.schema == event_schema(WorkloadSpec())
    assert table.schema.field("id").type == pa.int64()
    assert "payload" not in table.column_names
    assert sorted(table.column("id").unique().to_pylist()) == list(range(1, 101))
    numbers = pc.replace_substring(table.column("server_name"), "server-", "").cast(pa.int64())
    assert pc.min(numbers).as_py() >= 1
    assert pc.max(numbers).as_py() <= 100_000
    assert len(table.column("server_name").unique()) > 80_000
    assert all(column.null_count == 0 for column in table.columns)


def test_every_id_and_every_server_occurs() -> None:
    table = generate(WorkloadSpec(keys=50, ids=7), 0, 5000, ["id", "server_name"])
    assert sorted(table.column("id").unique().to_pylist()) == [1, 2, 3, 4, 5, 6, 7]
    assert set(table.column("server_name").to_pylist()) == {f"server-{number}" for number in range(1, 51)}


def test_server_names_beyond_the_cached_ones_are_made_alike() -> None:
    names = generate(WorkloadSpec(keys=2_000_000), 0, 1000, ["server_name"]).column(0).to_pylist()
    assert all(name.startswith("server-") and 1 <= int(name[7:]) <= 2_000_000 for name in names)
    assert len(set(names)) > 990


def test_skew_makes_the_first_server_the_most_frequent() -> None:
    skewed = generate(WorkloadSpec(keys=1000, skew=1.1), 0, 100_000, ["server_name"]).column(0)
    counts = {entry["values"]: entry["counts"] for entry in skewed.value_counts().to_pylist()}
    weights = np.arange(1, 1001) ** -1.1
    assert counts["server-1"] == pytest.approx(100_000 / weights.sum(), rel=0.05)
    assert counts["server-1"] > counts["server-2"] > counts["server-4"] > counts["server-16"]


def test_fields_agree_with_each_other() -> None:
    table = generate(WorkloadSpec(), 0, 50_000)
    bots = np.array([name.endswith("Bot") for name in table.column("user").to_pylist()])
    np.testing.assert_array_equal(bots, table.column("bot").to_numpy())
    assert 0.25 < bots.mean() < 0.35
    is_new = pc.equal(table.column("type"), "new").to_numpy()
    before, after = table.column("length_old").to_numpy(), table.column("length_new").to_numpy()
    assert (before[is_new] == 0).all()
    assert (before[~is_new] > 0).all()
    assert after.min() >= 0
    assert 0.6 < (after > before).mean() < 0.9
    assert 500 < np.median(before) < 5000
    assert set(table.column("type").to_pylist()) == {"edit", "categorize", "log", "new"}
    assert set(table.column("namespace").to_pylist()) == {0, 1, 2, 3, 4, 6, 10, 14}


def test_event_times_follow_the_schedule() -> None:
    times = generate(WorkloadSpec(), 5000, 3, ["timestamp"]).column(0).cast(pa.int64()).to_pylist()
    assert times == [FIRST_TIME_US + 5_000_000 + step for step in (0, 1000, 2000)]
    spec = WorkloadSpec(schedule=Schedule(10, 7_000_000, 2.0))
    assert generate(spec, 12, 1, ["timestamp"]).column(0).cast(pa.int64()).to_pylist() == [8_000_000]


def test_disorder_makes_times_earlier_within_its_bound() -> None:
    ordered = generate(WorkloadSpec(), 0, 20_000, ["timestamp"]).column(0).cast(pa.int64()).to_numpy()
    mixed = generate(WorkloadSpec(disorder_ms=250), 0, 20_000, ["timestamp"]).column(0).cast(pa.int64()).to_numpy()
    delays_ms = (ordered - mixed) // 1000
    assert delays_ms.min() == 0
    assert delays_ms.max() == 250
    assert (np.diff(mixed) < 0).any()


@pytest.mark.parametrize("size", [1, 7, 8, 100])
def test_payloads_have_their_length_and_differ(size: int) -> None:
    payloads = generate(WorkloadSpec(payload_bytes=size), 3, 500, ["payload"]).column(0).to_pylist()
    assert {len(payload) for payload in payloads} == {size}
    assert size < 7 or len(set(payloads)) == 500


def test_large_payloads_come_in_small_chunks() -> None:
    spec = WorkloadSpec(payload_bytes=2**20)
    assert [batch.num_rows for batch in generate_batches(spec, 0, 50, ["payload"])] == [31, 19]


@pytest.mark.parametrize(
    "change",
    [{"keys": 0}, {"ids": 0}, {"skew": -0.1}, {"skew": float("nan")}, {"seed": -1}, {"payload_bytes": -1}],
)
def test_an_impossible_specification_names_the_field(change: dict[str, float]) -> None:
    with pytest.raises(SettingsError, match=f"^{next(iter(change))} is .* Choose a value"):
        replace(WorkloadSpec(), **change)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (["servername"], "'servername'.*Did you mean 'server_name'"),
        (["payload"], "Set the payload bytes"),
        (["id", "id"], "twice"),
        ([], "no column"),
    ],
)
def test_impossible_columns_are_explained(columns: list[str], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        generate(WorkloadSpec(), 0, 1, columns)


def test_lean_events_are_made_by_the_million_per_second() -> None:
    generate(WorkloadSpec(), 0, 1000, ["id", "server_name"])
    taken_s = []
    for _ in range(3):
        began_s = time.perf_counter()
        generate(WorkloadSpec(), 0, 500_000, ["id", "server_name"])
        taken_s.append(time.perf_counter() - began_s)
    assert min(taken_s) < 0.5
