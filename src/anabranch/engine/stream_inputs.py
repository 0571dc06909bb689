"""What Spark reads for a query: one streaming DataFrame, of which every stage that needs some gets its part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property, reduce

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from anabranch.engine.late import LateRows
from anabranch.engine.segments import Segment

#: Which part a row belongs to, if there are several; each is in a column of its own.
_PART = "_part"
_ROW = "_row"

#: A segment, and which of its inputs; for a stage, which unites its inputs itself, always the first.
Place = tuple[int, int]
_FIRST: Place = (0, 0)


class StreamInputs:
    """The inputs of segments that no other segment gives them."""

    def __init__(self, segments: Sequence[Segment], late: LateRows | None = None) -> None:
        self._segments = segments
        #: What is projected for a stage of which late rows are wanted is what these are shown with, too.
        self._late = late

    @property
    def one(self) -> bool:
        """Whether all that Spark reads goes to one place."""
        return len(self._parts) <= 1

    @property
    def stages(self) -> list[int]:
        """The numbers of the stages that get some of what Spark reads."""
        fed = [self._segments[position].stage for position, _ in self._parts or [_FIRST]]
        return [stage.spec.number for stage in fed if stage is not None]

    def read(self) -> DataFrame:
        """The streaming DataFrame to run the query on: projected by the stages that it goes to."""
        parts = list(self._parts.values())
        if self.one:
            return parts[0]
        # Struct fields must not have the same names, and columns may.
        packed = [part.toDF(*_numbered(part)).select(F.struct(*_numbered(part)).alias(_ROW)) for part in parts]
        kinds = [rows.schema[0].dataType for rows in packed]
        tagged = []
        for number, rows in enumerate(packed):
            columns = [F.col(_ROW) if i == number else F.lit(None).cast(kind) for i, kind in enumerate(kinds)]
            named = [column.alias(f"{_PART}{i}") for i, column in enumerate(columns)]
            tagged.append(rows.select(F.lit(number).alias(_PART), *named))
        return reduce(DataFrame.union, tagged)

    def split(self, rows: DataFrame) -> Mapping[Place, DataFrame]:
        """The rows of an epoch by the place that they go to."""
        if self.one:
            return {next(iter(self._parts), _FIRST): rows}
        return {
            place: rows.where(F.col(_PART) == number).select(f"{_PART}{number}.*").toDF(*part.columns)
            for number, (place, part) in enumerate(self._parts.items())
        }

    @cached_property
    def _parts(self) -> dict[Place, DataFrame]:
        parts: dict[Place, DataFrame] = {}
        for position, segment in enumerate(self._segments):
            for side, rows in enumerate(segment.inputs):
                if isinstance(rows, int):
                    continue
                if segment.stage is None:
                    parts[position, side] = rows
                else:
                    carry = self._late is not None and segment.stage.spec.number in self._late.kinds
                    projected = segment.stage.project(rows, side, carry=carry)
                    earlier = parts.get((position, 0))
                    parts[position, 0] = projected if earlier is None else earlier.union(projected)
        return parts


def _numbered(rows: DataFrame) -> list[str]:
    return [f"_c{number}" for number in range(len(rows.columns))]
