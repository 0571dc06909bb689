"""What a join knows of its sides: their columns in the state and on the way to tasks, and when rows are over."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from anabranch.operators.join.predicate import LEFT, RIGHT, ColumnPlace

#: The state variables, by side.
VARIABLES = ("left", "right")


class JoinType(Enum):
    """Spark's join types for two streams, under Spark's names."""

    INNER = "Inner"
    LEFT_OUTER = "LeftOuter"
    RIGHT_OUTER = "RightOuter"
    FULL_OUTER = "FullOuter"
    LEFT_SEMI = "LeftSemi"

    def keeps_unmatched(self, side: int) -> bool:
        """Tells whether rows of the side that have no match go out too, with nulls, once they can have none."""
        outer = {LEFT: (JoinType.LEFT_OUTER, JoinType.FULL_OUTER), RIGHT: (JoinType.RIGHT_OUTER, JoinType.FULL_OUTER)}
        return self in outer[side]


@dataclass(frozen=True)
class RowTime:
    """The time of a row: a column, or a field of it, such as a window's end."""

    place: ColumnPlace
    field: str


@dataclass(frozen=True)
class Eviction:
    """When a row of the side is over: when its time is not after the watermark, moved by an offset."""

    time: RowTime
    offset_ms: int
    #: Whether a row that is over could still find a match, as long as it is there.
    harmful: bool

    def up_to_us(self, watermark_ms: int) -> int:
        return (watermark_ms + self.offset_ms) * 1000


@dataclass(frozen=True)
class Side:
    """One side of a join."""

    #: Where the columns are that go out, in the order of the user's columns.
    columns: tuple[ColumnPlace, ...]
    #: For each column that is kept in the state besides the key, the user's or a computed one, its column in the task's
    #: input. At least one.
    slots: tuple[int, ...]
    #: The input column that tells whether a row can have a match at all; None if every row can.
    can_match: int | None
    #: Rows without a match go out too: a last column in the state notes which have had one.
    unmatched_go_out: bool
    #: The column under a watermark: rows that it has passed are late.
    event_time: RowTime | None
    eviction: Eviction | None
