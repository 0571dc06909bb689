"""A broadcast table after any rows is what a dict would be: the last row of each key, without those removed."""

import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.operators.tables import upserted

SCHEMA = pa.schema([pa.field("a", pa.string()), pa.field("b", pa.int64()), pa.field("value", pa.float64())])
KEYS = ("a", "b")
ROW = st.tuples(st.sampled_from(["x", "y", None]), st.integers(0, 2) | st.none(), st.floats(-1, 1))
EPOCH = st.lists(st.tuples(ROW, st.booleans()), max_size=12)


def table_of(rows: list[tuple[object, ...]]) -> pa.Table:
    columns = list(zip(*rows, strict=True)) or [(), (), ()]
    return pa.table([pa.array(list(c), f.type) for c, f in zip(columns, SCHEMA, strict=True)], schema=SCHEMA)


def rows_of(table: pa.Table) -> list[tuple[object, ...]]:
    return [tuple(row[name] for name in SCHEMA.names) for row in table.to_pylist()]


@settings(deadline=None)
@given(st.lists(EPOCH, max_size=4))
def test_a_table_is_the_last_row_of_each_key(epochs: list[list[tuple[tuple[object, ...], bool]]]) -> None:
    model: dict[object, tuple[object, ...]] = {}
    stored: dict[object, tuple[object, ...]] = {}
    table = table_of([])
    for epoch in epochs:
        for row, removes in epoch:
            model.pop(row[:2], None)
            if not removes:
                model[row[:2]] = row
        result = upserted(table, table_of([row for row, _ in epoch]), pa.array([r for _, r in epoch], pa.bool_()), KEYS)
        table = result.table
        assert sorted(map(repr, rows_of(table))) == sorted(map(repr, model.values()))
        # What is written to the state makes the same of it, whatever the order.
        put, removed = rows_of(result.put), rows_of(result.removed)
        touched = [row[:2] for row in [*put, *removed]]
        assert len(set(touched)) == len(touched)
        stored.update({row[:2]: row for row in put})
        for row in removed:
            stored.pop(row[:2], None)
        assert stored == model
