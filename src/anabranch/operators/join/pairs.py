"""Which rows of two sides have the same key: pairs of row numbers, in bounded portions."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.int64]

#: Pairs at a time. One key with many rows on both sides makes very many pairs, of which a condition may keep few.
MAX_PAIRS = 1 << 20


def pairs_of(left: Numbers, right: Numbers, keys: int, *, limit: int = MAX_PAIRS) -> Iterator[tuple[Numbers, Numbers]]:
    """All pairs of positions in `left` and `right` that hold the same key; keys are numbers below `keys`.

    A portion has at most `limit` pairs.
    """
    if not len(left) or not len(right):
        return
    order = np.argsort(right, kind="stable")
    per_key = np.bincount(right, minlength=keys)
    first_of_key = np.cumsum(per_key) - per_key
    counts = per_key[left]
    rows = np.flatnonzero(counts)
    counts = counts[rows]
    #: Pairs before those of each row.
    before = np.concatenate(([0], np.cumsum(counts)))
    for start in range(0, int(before[-1]), limit):
        end = min(start + limit, int(before[-1]))
        first, last = np.searchsorted(before, [start, end - 1], side="right") - 1
        numbers = np.arange(first, last + 1)
        sizes = np.minimum(before[numbers + 1], end) - np.maximum(before[numbers], start)
        which = np.repeat(numbers, sizes)
        within = np.arange(start, end) - before[which]
        yield rows[which], order[first_of_key[left[rows[which]]] + within]
