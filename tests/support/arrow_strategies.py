"""Hypothesis strategies for what Arrow columns of state may hold: types, and values of them."""

import datetime as dt
import decimal
import math
from collections.abc import Hashable
from typing import Any

import pyarrow as pa
from hypothesis import strategies as st

_EPOCH = dt.datetime(1970, 1, 1)
_SPAN = {"min_value": dt.datetime(1900, 1, 1), "max_value": dt.datetime(2200, 1, 1)}

_LEAVES: dict[pa.DataType, st.SearchStrategy[Any]] = {
    pa.bool_(): st.booleans(),
    pa.int8(): st.integers(-128, 127),
    pa.int16(): st.integers(-(2**15), 2**15 - 1),
    pa.int32(): st.integers(-(2**31), 2**31 - 1),
    pa.int64(): st.integers(-(2**63), 2**63 - 1),
    pa.uint64(): st.integers(0, 2**64 - 1),
    pa.float32(): st.floats(width=32),
    pa.float64(): st.floats(),
    pa.date32(): st.dates(dt.date(1900, 1, 1), dt.date(2200, 1, 1)),
    pa.timestamp("us"): st.datetimes(**_SPAN),
    pa.timestamp("us", tz="UTC"): st.datetimes(**_SPAN, timezones=st.just(dt.UTC)),
    pa.duration("us"): st.timedeltas(dt.timedelta(-9999), dt.timedelta(9999)),
    pa.decimal128(20, 3): st.decimals(-(10**15), 10**15, places=3),
    pa.decimal128(38, 0): st.integers(-(10**38) + 1, 10**38 - 1).map(decimal.Decimal),
    pa.month_day_nano_interval(): st.tuples(st.integers(-99, 99), st.integers(-99, 99), st.integers(-99, 99)),
    pa.binary(3): st.binary(min_size=3, max_size=3),
    pa.string(): st.text(max_size=6),
    pa.large_string(): st.text(max_size=6),
    pa.binary(): st.binary(max_size=6),
    pa.large_binary(): st.binary(max_size=6),
    pa.null(): st.none(),
}
_NAMES = ("a", "b", "c")


def types(max_leaves: int = 4) -> st.SearchStrategy[pa.DataType]:
    """Types of state, nested ones included."""

    def nested(inner: st.SearchStrategy[pa.DataType]) -> st.SearchStrategy[pa.DataType]:
        structs = st.lists(inner, max_size=3).map(lambda ts: pa.struct(list(zip(_NAMES, ts, strict=False))))
        keys = st.sampled_from([pa.string(), pa.int32()])
        return st.one_of(inner.map(pa.list_), inner.map(pa.large_list), structs, st.builds(pa.map_, keys, inner))

    leaves = st.sampled_from(list(_LEAVES))
    # Hypothesis likes its recursive strategies deep; most state is flat.
    return st.sampled_from([leaves, leaves, st.recursive(leaves, nested, max_leaves=max_leaves)]).flatmap(lambda s: s)


def schemas(prefix: str, *, min_size: int = 0, max_size: int = 3) -> st.SearchStrategy[pa.Schema]:
    """Schemas whose fields have names of their own."""
    # One more than the least first: that is what is tried most.
    sizes = st.sampled_from(sorted(range(min_size, max_size + 1), key=lambda size: abs(size - min_size - 1)))
    return sizes.flatmap(lambda size: st.lists(types(), min_size=size, max_size=size)).map(
        lambda ts: pa.schema([pa.field(f"{prefix}{i}", t) for i, t in enumerate(ts)])
    )


def values(t: pa.DataType, *, nullable: bool = True) -> st.SearchStrategy[Any]:
    """Values of a type, as ``pa.array`` takes them."""
    if pa.types.is_struct(t):
        fields = {t.field(i).name: values(t.field(i).type) for i in range(t.num_fields)}
        some: st.SearchStrategy[Any] = st.fixed_dictionaries(fields)
    elif pa.types.is_map(t):
        entry = st.tuples(values(t.key_type, nullable=False), values(t.item_type))
        some = st.lists(entry, max_size=3, unique_by=lambda e: e[0])
    elif pa.types.is_list(t) or pa.types.is_large_list(t):
        some = st.lists(values(t.value_type), max_size=3)
    else:
        some = _LEAVES[t]
    return st.none() | some if nullable else some


def rows(schema: pa.Schema) -> st.SearchStrategy[dict[str, Any]]:
    """Rows of a schema, by name."""
    return st.fixed_dictionaries({f.name: values(f.type) for f in schema})


def table(schema: pa.Schema, rows: list[dict[str, Any]]) -> pa.Table:
    """A table of such rows, also where there are no columns to tell their number."""
    arrays = [pa.array([row[f.name] for row in rows], type=f.type) for f in schema]
    return pa.Table.from_arrays(arrays, schema=schema)


def frozen(value: Any, *, exact: bool) -> Hashable:
    """Something equal for equal values only: zeros and NaNs are told apart by their bits if exact, else not."""
    if isinstance(value, dict):
        return tuple((name, frozen(item, exact=exact)) for name, item in value.items())
    if isinstance(value, list | tuple):
        return tuple(frozen(item, exact=exact) for item in value)
    if isinstance(value, float):
        if math.isnan(value):
            return "nan"
        return value.hex() if exact else (value + 0.0).hex()
    return (type(value).__name__, value)
