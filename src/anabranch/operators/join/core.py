"""One epoch of a join, as columns: which rows match, which go out alone, and what stays in the state.

Nothing here knows of Spark or of workers: rows that were stored before and rows that are new go in, row numbers come
out. On each side the stored rows come first, then the new ones; a row is known by its number in this order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from anabranch.operators.join.predicate import LEFT
from anabranch.operators.join.sides import JoinType

Numbers = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
#: Pairs at a time. One key with many rows on both sides makes very many pairs, of which a condition may keep few.
MAX_PAIRS = 1 << 20
#: Of pairs of row numbers, which satisfy the condition; None if all do.
Condition = Callable[[Numbers, Numbers], Flags] | None


@dataclass
class JoinRows:
    """The rows of one side that take part in an epoch: those stored under the epoch's keys, then the new ones."""

    #: For each row the number of its key.
    keys: Numbers
    #: How many of the rows were stored before.
    stored: int
    #: Rows that the watermark has passed, as of the end of the epoch.
    over: Flags
    #: Rows that have found a match, in this epoch or before. Kept up to date by the join.
    matched: Flags

    @property
    def is_new(self) -> Flags:
        return np.arange(len(self.keys)) >= self.stored


@dataclass(frozen=True)
class SideOutcome:
    """What becomes of the rows of a side, as row numbers."""

    #: Go out with nulls instead of the other side's columns.
    alone: Numbers
    #: New rows that the state keeps.
    kept: Numbers
    #: Stored rows that the state lets go of.
    removed: Numbers
    #: Stored rows that stay, and have been matched for the first time.
    newly_matched: Numbers


class JoinEpoch:
    """Joins the new rows of an epoch with each other and with what was stored before."""

    def __init__(
        self, how: JoinType, left: JoinRows, right: JoinRows, keys: int, condition: Condition, *, limit: int = MAX_PAIRS
    ) -> None:
        self._how = how
        self._sides = left, right
        self._keys = keys
        self._condition = condition
        self._limit = limit
        self._matched_before = left.matched.copy(), right.matched.copy()

    def matches(self) -> Iterator[tuple[Numbers, Numbers]]:
        """Gives pairs of row numbers that go out. Has to be exhausted before anything else is asked."""
        left, right = self._sides
        for lefts, rights in self._candidates():
            if self._condition is not None and len(lefts):
                chosen = self._condition(lefts, rights)
                lefts, rights = lefts[chosen], rights[chosen]
            left.matched[lefts] = True
            right.matched[rights] = True
            if len(lefts) and self._how is not JoinType.LEFT_SEMI:
                yield lefts, rights

    def first_matched(self) -> Numbers:
        """Returns the left rows that found their first match in this epoch."""
        return np.flatnonzero(self._sides[LEFT].matched & ~self._matched_before[LEFT])

    def outcome(self, side: int) -> SideOutcome:
        rows = self._sides[side]
        new, over, matched = rows.is_new, rows.over, rows.matched
        # A left row of a semi join has done its part with its first match.
        gone = over | matched if self._how is JoinType.LEFT_SEMI and side == LEFT else over
        outer = self._how.keeps_unmatched(side)
        alone = over & ~matched if outer else np.zeros(len(over), np.bool_)
        newly = matched & ~self._matched_before[side] & ~new & ~gone if outer else np.zeros(len(over), np.bool_)
        return SideOutcome(
            alone=np.flatnonzero(alone),
            kept=np.flatnonzero(new & ~gone),
            removed=np.flatnonzero(~new & gone),
            newly_matched=np.flatnonzero(newly),
        )

    def _candidates(self) -> Iterator[tuple[Numbers, Numbers]]:
        """Gives pairs with equal keys, of which at least one row is new."""
        left, right = self._sides
        for lefts, rights in pairs_of(left.keys[left.stored :], right.keys, self._keys, limit=self._limit):
            yield lefts + left.stored, rights
        old, new = left.keys[: left.stored], right.keys[right.stored :]
        for lefts, rights in pairs_of(old, new, self._keys, limit=self._limit):
            yield lefts, rights + right.stored


def pairs_of(left: Numbers, right: Numbers, keys: int, *, limit: int = MAX_PAIRS) -> Iterator[tuple[Numbers, Numbers]]:
    """Gives all pairs of positions in `left` and `right` that hold the same key; keys are numbers below `keys`.

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
