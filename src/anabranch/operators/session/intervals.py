"""Sessions as intervals: which of them touch and so are one, and how what they have aggregated becomes one, too."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Numbers = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
#: Merges two rows of partial aggregates, for many rows at a time: columns of the earlier ones, and of the later ones.
MergePairs = Callable[[Sequence[pa.Array], Sequence[pa.Array]], Sequence[pa.Array]]


@dataclass(frozen=True)
class Sessions:
    """Intervals of several owners, put into an order in which those that make up a session are neighbours."""

    #: From the order of the sessions to that of the intervals as they were given.
    order: Numbers
    #: Session i is made of the intervals from offsets[i] to offsets[i + 1] in that order.
    offsets: Numbers
    owners: Numbers
    starts: Numbers
    ends: Numbers

    def any_of(self, flags: Flags) -> Flags:
        """For each session whether any of its intervals has the flag."""
        if not len(self.owners):
            return np.zeros(0, np.bool_)
        any_flag: Flags = np.logical_or.reduceat(flags[self.order], self.offsets[:-1])
        return any_flag

    def of_intervals(self) -> Numbers:
        """For each interval, as they were given, the number of its session."""
        numbers = np.empty(len(self.order), np.int64)
        numbers[self.order] = np.repeat(np.arange(len(self.owners)), np.diff(self.offsets))
        return numbers


def united(owners: Numbers, starts: Numbers, ends: Numbers, ranks: Numbers) -> Sessions:
    """One session for all intervals of an owner that overlap or touch. Of equal starts, the lower rank comes first."""
    order = np.lexsort((ranks, starts, owners))
    owner, start, end = owners[order], starts[order], ends[order]
    count = len(order)
    if not count:
        return Sessions(order, np.zeros(1, np.int64), owner, start, end)
    # The latest end so far, of each owner: ends by their rank, so that owners can be told apart in one number.
    sorted_ends, rank = np.unique(end, return_inverse=True)
    numbers = np.concatenate(([0], np.cumsum(owner[1:] != owner[:-1])))
    latest_rank = np.maximum.accumulate(numbers * count + rank) - numbers * count
    latest = sorted_ends[latest_rank]
    begins = np.ones(count, np.bool_)
    begins[1:] = (owner[1:] != owner[:-1]) | (start[1:] > latest[:-1])
    firsts = np.flatnonzero(begins)
    offsets = np.concatenate((firsts, [count])).astype(np.int64)
    return Sessions(order, offsets, owner[firsts], start[firsts], latest[offsets[1:] - 1])


def reduced(columns: Sequence[pa.Array], offsets: Numbers, merge: MergePairs) -> list[pa.Array]:
    """One row for each run of rows: neighbours are merged in pairs, in as many rounds as the longest run needs."""
    lengths = np.diff(offsets)
    runs = np.arange(len(lengths))
    finished: list[Sequence[pa.Array]] = []
    finished_runs: list[Numbers] = []
    while True:
        is_single = lengths == 1
        starts = np.concatenate(([0], np.cumsum(lengths)))[:-1]
        finished.append([column.take(pa.array(starts[is_single])) for column in columns])
        finished_runs.append(runs[is_single])
        if is_single.all():
            break
        runs, starts, lengths = runs[~is_single], starts[~is_single], lengths[~is_single]
        halves = (lengths + 1) // 2
        position = np.arange(halves.sum()) - np.repeat(np.cumsum(halves) - halves, halves)
        left = np.repeat(starts, halves) + 2 * position
        paired = 2 * position + 1 < np.repeat(lengths, halves)
        merged = merge(
            [column.take(pa.array(left[paired])) for column in columns],
            [column.take(pa.array(left[paired] + 1)) for column in columns],
        )
        alone = [column.take(pa.array(left[~paired])) for column in columns]
        back = np.argsort(np.concatenate((np.flatnonzero(paired), np.flatnonzero(~paired))), kind="stable")
        columns = [
            pa.concat_arrays([one, other]).take(pa.array(back)) for one, other in zip(merged, alone, strict=True)
        ]
        lengths = halves
    back = np.argsort(np.concatenate(finished_runs), kind="stable")
    return [pa.concat_arrays(list(parts)).take(pa.array(back)) for parts in zip(*finished, strict=True)]
