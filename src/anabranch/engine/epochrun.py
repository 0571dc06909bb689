"""One epoch's DataFrames: the stateful stages strung together, and what has been materialised of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from pyspark.sql import DataFrame

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
    ) -> None:
        self._segments = segments
        self._rows = rows
        self._accesses = accesses
        self._context = context
        self._templates = templates
        self._held: list[DataFrame] = []
        #: The input of each stateful stage, projected, in the order of the stages; empty until they are needed.
        self._inputs: list[DataFrame] = []

    def build(self, *, reads_once: bool) -> DataFrame:
        """The epoch's result. Lazy, except for what has to be materialised on the way."""
        if not all(segment.one_to_one for segment in self._segments):
            result = self._string_together()
            last_is_held = not self._segments[-1].one_to_one
            return result if reads_once or last_is_held else self._materialise(result)
        variants = tuple(segment.stage.variant(self._context) for segment in self._segments)
        kept = self._templates.apply(self._accesses, variants, self._rows)
        if kept is None:
            kept = self._string_together()
            self._templates.remember(variants, self._rows, kept)
        return kept if reads_once else self._materialise(kept)

    def prepare(self) -> None:
        """Plan for epochs to come, whose rows have the same columns."""
        if not all(segment.one_to_one for segment in self._segments):
            return
        variants = tuple(segment.stage.variant(self._context) for segment in self._segments)
        if self._templates.apply(self._accesses, variants, self._rows) is None:
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

    def release(self) -> None:
        for rows in self._held:
            rows.unpersist()

    def _string_together(self) -> DataFrame:
        rows = self._rows
        for position, segment in enumerate(self._segments):
            # The first stage's projection is part of the streaming query itself.
            projected = rows if position == 0 else segment.stage.project(rows)
            self._inputs.append(projected)
            rows = segment.stage.apply(projected, self._accesses[segment.stage.spec.number], self._context)
            if not segment.one_to_one:
                rows = self._materialise(rows)
            for operation in segment.after:
                rows = operation.apply(rows)
        return rows

    def _materialise(self, rows: DataFrame) -> DataFrame:
        """Compute all partitions once, in tasks of their own; whoever reads them later does not run state logic."""
        held = rows.persist()
        self._held.append(held)
        run_all_partitions(held)
        return held


def run_all_partitions(rows: DataFrame) -> None:
    """Compute all rows, and keep none."""
    rows._jdf.queryExecution().toRdd().count()
