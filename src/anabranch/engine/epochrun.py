"""One epoch's DataFrames: the stateful stages strung together, and what has been materialised of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from pyspark.sql import DataFrame, SparkSession

from anabranch.engine.late import LateRows, without_rows
from anabranch.engine.segments import Segment
from anabranch.engine.stages import EpochContext
from anabranch.engine.taskepoch import TaskEpoch
from anabranch.engine.templates import Templates
from anabranch.wire.routed import StageAccess


class EpochRun:
    """Turns an epoch's rows into its result."""

    def __init__(
        self,
        segments: Sequence[Segment],
        rows: DataFrame,
        accesses: Mapping[int, StageAccess],
        context: EpochContext,
        templates: Templates,
        late: LateRows | None = None,
    ) -> None:
        self._segments = segments
        self._rows = rows
        self._accesses = accesses
        self._context = context
        self._templates = templates
        self._late = late
        #: Whether the input of the stages that may drop rows is kept, to look for late rows in it afterwards.
        self._keeps_input = False
        #: By stage, with all that late rows are shown with.
        self._kept: dict[int, DataFrame] = {}
        self._held: list[DataFrame] = []
        #: The input of each stateful stage, projected, in the order of the stages; empty until they are needed.
        self._inputs: list[DataFrame] = []

    def keep_input(self) -> None:
        """Keep what is needed to tell late rows afterwards."""
        self._keeps_input = self._late is not None
        first = self._segments[0].stage.spec.number
        if self._is_watched(first):
            # Read once for both: the sink's rows and the late ones are those of one input, whatever made it.
            self._held.append(self._rows.persist())
            self._kept[first] = self._rows

    def late_rows(self, epoch: TaskEpoch) -> DataFrame | None:
        """The late rows of the epoch, after its result has been read; None if there can be none."""
        return self._late.of(self._kept, epoch) if self._late is not None else None

    def build(self, *, reads_once: bool) -> DataFrame:
        """The epoch's result. Lazy, except for what has to be materialised on the way."""
        if not self._is_one_plan:
            result = self._string_together()
            last_is_held = not self._segments[-1].one_to_one
            return result if reads_once or last_is_held else self._materialise(result)
        variants = tuple(segment.stage.variant(self._context) for segment in self._segments)
        kept = self._templates.apply(self._accesses, self._context.tables, variants, self._rows)
        if kept is None:
            kept = self._string_together()
            self._templates.remember(variants, self._rows, kept)
        return kept if reads_once else self._materialise(kept)

    def prepare(self) -> None:
        """Plan for epochs to come, whose rows have the same columns."""
        if not self._is_one_plan:
            return
        variants = tuple(segment.stage.variant(self._context) for segment in self._segments)
        if self._templates.apply(self._accesses, self._context.tables, variants, self._rows) is None:
            kept = self._string_together()
            kept._jdf.queryExecution().executedPlan()
            self._templates.remember(variants, self._rows, kept)

    def complete(self, missing: Mapping[int, frozenset[int]], epoch: TaskEpoch) -> None:
        """Run the missing partitions of the last stage that has any; earlier stages run along with it."""
        if not self._inputs:
            self._string_together()
        position = max(i for i, segment in enumerate(self._segments) if segment.stage.spec.number in missing)
        stage = self._segments[position].stage
        number: int = stage.spec.number
        access = self._accesses[number]
        done = {number: frozenset(range(access.parallelism)) - missing[number]}
        dataclasses.replace(epoch, done=done).announce(self._rows.sparkSession)
        run_all_partitions(stage.apply(self._inputs[position], access, self._context))

    @property
    def spark(self) -> SparkSession:
        return self._rows.sparkSession

    def release(self) -> None:
        for rows in self._held:
            rows.unpersist()

    def _string_together(self) -> DataFrame:
        rows = self._rows
        for position, segment in enumerate(self._segments):
            number: int = segment.stage.spec.number
            watched = self._is_watched(number)
            # The first stage's projection is part of the streaming query itself.
            projected = rows if position == 0 else segment.stage.project(rows, carry=watched)
            if position > 0 and watched:
                projected = self._kept[number] = self._materialise(projected)
            if watched or (position == 0 and self._late is not None):
                projected = without_rows(projected)
            self._inputs.append(projected)
            rows = segment.stage.apply(projected, self._accesses[number], self._context)
            if not segment.one_to_one:
                rows = self._materialise(rows)
            for operation in segment.after:
                rows = operation.apply(rows, self._context.tables)
        return rows

    def _is_watched(self, stage: int) -> bool:
        """Whether late rows of the stage are looked for in this epoch."""
        return self._keeps_input and self._late is not None and stage in self._late.kinds

    @property
    def _is_one_plan(self) -> bool:
        """Whether nothing has to be materialised between the rows and the result."""
        watched_later = any(self._is_watched(segment.stage.spec.number) for segment in self._segments[1:])
        return all(segment.one_to_one for segment in self._segments) and not watched_later

    def _materialise(self, rows: DataFrame) -> DataFrame:
        """Compute all partitions once, in tasks of their own; whoever reads them later does not run state logic."""
        held = rows.persist()
        self._held.append(held)
        run_all_partitions(held)
        return held


def run_all_partitions(rows: DataFrame) -> int:
    """Compute all rows, and keep none; how many they are."""
    return rows._jdf.queryExecution().toRdd().count()  # type: ignore[no-any-return]
