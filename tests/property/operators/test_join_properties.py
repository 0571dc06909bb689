"""A join in columns gives what a join row by row gives, epoch by epoch, and holds the same rows."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from anabranch.operators.join.core import pairs_of
from anabranch.operators.join.predicate import LEFT, RIGHT
from anabranch.operators.join.sides import JoinType
from support.join_model import Case, Model, TaskHarness

offsets = st.none() | st.integers(-30, 30)
cases = st.builds(Case, how=st.sampled_from(JoinType), offsets_ms=st.tuples(offsets, offsets))
rows = st.lists(
    st.tuples(
        st.sampled_from([None, "a", "b", "cc", "dd", "eee"]), st.integers(1, 100), st.integers(0, 3), st.booleans()
    ),
    max_size=8,
)
watermarks = st.integers(0, 40)
epochs = st.lists(st.tuples(st.tuples(rows, rows), watermarks), min_size=1, max_size=6)


@given(case=cases, epochs=epochs)
def test_a_join_in_columns_equals_a_join_row_by_row(case: Case, epochs: list) -> None:
    model, harness = Model(case), TaskHarness(case)
    watermark_ms: int | None = None
    late_ms: int | None = None
    for number, (both, advance) in enumerate(epochs):
        expected = model.epoch(both, watermark_ms, late_ms)
        found = harness.epoch(both, watermark_ms, late_ms)
        assert Counter(found) == Counter(expected), f"epoch {number}"
        for side in (LEFT, RIGHT):
            assert Counter(harness.held(side)) == Counter(model.held(side)), f"epoch {number}, side {side}"
        watermark_ms, late_ms = (watermark_ms or 0) + advance, watermark_ms


@given(
    left=st.lists(st.integers(0, 5), max_size=20),
    right=st.lists(st.integers(0, 5), max_size=20),
    limit=st.integers(1, 40),
)
def test_pairs_are_those_with_equal_keys_in_bounded_portions(left: list[int], right: list[int], limit: int) -> None:
    portions = list(pairs_of(np.array(left, np.int64), np.array(right, np.int64), 6, limit=limit))
    assert all(0 < len(lefts) == len(rights) <= limit for lefts, rights in portions)
    found = Counter(pair for lefts, rights in portions for pair in zip(lefts.tolist(), rights.tolist(), strict=True))
    assert found == Counter((i, j) for i, a in enumerate(left) for j, b in enumerate(right) if a == b)
