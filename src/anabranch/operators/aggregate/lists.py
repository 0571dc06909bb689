"""Merging lists of values, row by row in columns: concatenation, union, values with their counts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from anabranch.operators.aggregate.ranks import ranks

Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Concatenated:
    """The elements of the state, then those of the epoch."""

    def merge(self, old: pa.Array, new: pa.Array) -> pa.Array:
        elements, rows = _flat(old, new)
        return _lists(elements.take(pa.array(np.argsort(rows, kind="stable"))), rows, old)


@dataclass(frozen=True)
class United:
    """The elements of both, each once."""

    def merge(self, old: pa.Array, new: pa.Array) -> pa.Array:
        elements, rows = _flat(old, new)
        order, first = _grouped(rows, ranks(elements))
        kept = order[first]
        return _lists(elements.take(pa.array(kept)), rows[kept], old)


@dataclass(frozen=True)
class Counted:
    """Structs of value and count, sorted by value, with the counts of equal values added up."""

    def merge(self, old: pa.Array, new: pa.Array) -> pa.Array:
        elements, rows = _flat(old, new)
        values, totals, owners = _added_up(elements, rows)
        return _lists(_pairs(values, totals, elements.type), owners, old)


@dataclass(frozen=True)
class TopCounted:
    """The most frequent values: a struct of values with counts, and by how much these may be too small.

    Where more than ``capacity`` values come together, the count of the first that does not fit is taken from all, which
    lets go of at least one (Misra and Gries). What was taken in all is at most one part in ``capacity`` of all rows.
    """

    capacity: int

    def merge(self, old: pa.Array, new: pa.Array) -> pa.Array:
        elements, rows = _flat(old.field("items"), new.field("items"))
        values, totals, owners = _added_up(elements, rows)
        size = len(old)
        position = np.empty(len(owners), dtype=np.int64)
        by_count = np.lexsort((-totals, owners))
        starts = np.searchsorted(owners, np.arange(size))
        position[by_count] = np.arange(len(owners)) - starts[owners]
        taken = np.zeros(size, dtype=np.int64)
        too_many = position == self.capacity
        taken[owners[too_many]] = totals[too_many]
        totals = totals - taken[owners]
        kept = np.flatnonzero((totals > 0) & (position < self.capacity))
        items = _lists(
            _pairs(values.take(pa.array(kept)), totals[kept], elements.type), owners[kept], old.field("items")
        )
        error = pc.add(pc.add(old.field("error"), new.field("error")), pa.array(taken))
        return pa.StructArray.from_arrays([items, error], fields=list(old.type))


@dataclass(frozen=True)
class Registers:
    """Registers of a HyperLogLog, as numbers ``64 * index + rank``: of one index the highest rank counts."""

    def merge(self, old: pa.Array, new: pa.Array) -> pa.Array:
        elements, rows = _flat(old, new)
        packed = elements.to_numpy().astype(np.int64)
        order = np.lexsort((packed, rows))
        rows, packed = rows[order], packed[order]
        last = np.ones(len(rows), dtype=np.bool_)
        last[:-1] = (rows[1:] != rows[:-1]) | (packed[1:] >> 6 != packed[:-1] >> 6)
        return _lists(pa.array(packed[last], elements.type), rows[last], old)


def _flat(old: pa.Array, new: pa.Array) -> tuple[pa.Array, Numbers]:
    """The elements of both columns of lists, and of each the row that it belongs to. A null has no elements."""
    elements = pa.concat_arrays([old.flatten(), new.flatten()])
    return elements, np.concatenate([np.repeat(np.arange(len(lists)), _lengths(lists)) for lists in (old, new)])


def _lengths(lists: pa.Array) -> Numbers:
    lengths: Numbers = pc.list_value_length(lists).fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
    return lengths


def _grouped(rows: Numbers, values: Numbers) -> tuple[Numbers, npt.NDArray[np.bool_]]:
    """An order in which equal values of a row are neighbours, and where in that order a new one begins."""
    order = np.lexsort((values, rows))
    first = np.ones(len(order), dtype=np.bool_)
    first[1:] = (np.diff(rows[order]) != 0) | (np.diff(values[order]) != 0)
    return order, first


def _added_up(elements: pa.Array, rows: Numbers) -> tuple[pa.Array, Numbers, Numbers]:
    """Of each row the values without repetition, sorted, their counts, and the row."""
    values, counts = elements.flatten()
    order, first = _grouped(rows, ranks(values))
    starts = np.flatnonzero(first)
    totals = counts.to_numpy(zero_copy_only=False)[order]
    totals = np.add.reduceat(totals, starts) if len(starts) else totals
    kept = order[first]
    return values.take(pa.array(kept)), totals.astype(np.int64), rows[kept]


def _pairs(values: pa.Array, counts: Numbers, kind: pa.DataType) -> pa.Array:
    return pa.StructArray.from_arrays([values, pa.array(counts, kind.field(1).type)], fields=list(kind))


def _lists(elements: pa.Array, rows: Numbers, like: pa.Array) -> pa.Array:
    """Elements, which are in the order of their rows, as lists of a type."""
    counts = np.bincount(rows, minlength=len(like)) if len(rows) else np.zeros(len(like), dtype=np.int64)
    offsets = np.concatenate(([0], np.cumsum(counts)))
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), elements, type=like.type)
