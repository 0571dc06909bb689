"""One epoch's DataFrames: the stateful stages strung together, and what has been materialised of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import reduce

from pyspark.sql import DataFrame, SparkSession

from anabranch.engine.late import LateRows, without_rows
from anabranch.engine.segments import Segment, StreamInputs, is_chain
from anabranch.engine.spark.frames import as_read, plan_ahead, run_all_partitions
from anabranch.engine.spark.templates import Templates
from anabranch.engine.stages import EpochContext, StatefulStage
from anabranch.engine.tasks import TaskEpoch
from anabranch.wire.routed import StageAccess


class EpochPlan:
    """Turns an epoch's rows into its result."""

    def __init__(
        self,
        segments: Sequence[Segment],
        stream_inputs: StreamInputs,
        rows: DataFrame,
        accesses: Mapping[int, StageAccess],
        context: EpochContext,
        templates: Templates,
        late: LateRows | None = None,
    ) -> None:
        self._segments = segments
        self._stream_inputs = stream_inputs
        self._rows = rows
        self._accesses = accesses
        self._context = dataclasses.replace(context, may_emit_late=_kept_late(segments, late)) if late else context
        self._templates = templates
        self._late = late
        #: Whether the input of the stages that may drop rows is kept, to look for late rows in it afterwards.
        self._keeps_input = False
        #: The input of stages that may drop rows, by stage number, with the columns that late rows are shown with.
        self._kept: dict[int, DataFrame] = {}
        self._held: list[DataFrame] = []
        #: By position, the projected input of each stateful stage; empty until they are needed.
        self._inputs: dict[int, DataFrame] = {}

    def keep_input(self) -> None:
        """Keeps what is needed to tell late rows afterwards."""
        self._keeps_input = self._late is not None
        fed = self._stream_inputs.stages
        if any(map(self._is_watched, fed)):
            # Read once for both: the sink's rows and the late ones are those of one input, whatever made it.
            self._hold(self._rows)
            if self._stream_inputs.one:
                self._kept[fed[0]] = self._rows

    def late_rows(self, epoch: TaskEpoch) -> DataFrame | None:
        """Returns the late rows of the epoch, after its result has been read; None if there can be none."""
        return self._late.of(self._kept, epoch) if self._late is not None else None

    def build(self, *, reads_once: bool) -> DataFrame:
        """Returns the epoch's result. It is lazy, except for what has to be materialised on the way."""
        if not self._can_be_kept:
            result = self._string_together()
            last = self._segments[-1]
            last_is_held = last.stage is None or not last.one_to_one
            return result if reads_once or last_is_held else self._materialise(result)
        variants = self._variants()
        kept = self._templates.apply(self._accesses, self._context.tables, variants, self._rows)
        if kept is None:
            kept = self._string_together()
            self._templates.remember(variants, self._rows, kept)
        return kept if reads_once else self._materialise(kept)

    def prepare(self) -> None:
        """Plans for epochs to come, whose rows have the same columns."""
        if not self._can_be_kept:
            return
        variants = self._variants()
        if self._templates.apply(self._accesses, self._context.tables, variants, self._rows) is None:
            kept = self._string_together()
            plan_ahead(kept)
            self._templates.remember(variants, self._rows, kept)

    def complete(self, missing: Mapping[int, frozenset[int]], epoch: TaskEpoch) -> None:
        """Runs the missing partitions of the last stage that has any; earlier stages run along with it."""
        if not self._inputs:
            self._string_together()
        stages = {i: segment.stage for i, segment in enumerate(self._segments) if segment.stage is not None}
        position = max(i for i, stage in stages.items() if stage.spec.number in missing)
        stage = stages[position]
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

    @property
    def _can_be_kept(self) -> bool:
        """Tells whether the plan is the same in every epoch, and nothing of it is materialised on the way."""
        watched_later = any(self._is_watched(s.stage.spec.number) for s in self._segments[1:] if s.stage is not None)
        return is_chain(self._segments) and all(s.one_to_one for s in self._segments) and not watched_later

    def _variants(self) -> tuple[str, ...]:
        return tuple(s.stage.variant(self._context) for s in self._segments if s.stage is not None)

    def _string_together(self) -> DataFrame:
        if not self._segments:
            return self._rows
        fed = self._stream_inputs.split(self._rows if self._stream_inputs.one else self._hold(self._rows))
        outputs: list[DataFrame] = []
        for position, segment in enumerate(self._segments):
            if segment.stage is None:
                sides = [outputs[s] if isinstance(s, int) else fed[position, i] for i, s in enumerate(segment.inputs)]
                rows = segment.united(*sides)
            else:
                rows = self._staged(position, segment, segment.stage, fed.get((position, 0)), outputs)
            for operation in segment.after:
                rows = operation.apply(rows, self._context.tables)
            outputs.append(rows)
        return outputs[-1]

    def _staged(
        self, position: int, segment: Segment, stage: StatefulStage, fed: DataFrame | None, outputs: list[DataFrame]
    ) -> DataFrame:
        """Returns the output of a stateful stage. What Spark has read for it has been projected already."""
        number: int = stage.spec.number
        sides = segment.inputs or segment.feeders(position)
        meets = len(sides) > 1
        carry = self._late is not None and number in self._late.kinds
        parts = [
            stage.project(as_read(outputs[each]) if meets else outputs[each], side, carry=carry)
            for side, each in enumerate(sides)
            if isinstance(each, int)
        ]
        projected = reduce(DataFrame.union, parts if fed is None else [fed, *parts])
        if meets and parts:
            projected = as_read(projected)
        if self._is_watched(number):
            # What Spark has read is held already; what comes from other stages must not be computed twice.
            projected = self._kept[number] = self._materialise(projected) if parts else projected
        if carry:
            projected = without_rows(projected)
        self._inputs[position] = projected
        rows = stage.apply(projected, self._accesses[number], self._context)
        # Where several come together, Spark's tasks are no longer the partitions of one stage.
        is_met = any(len(s.inputs) > 1 and position in s.feeders(i) for i, s in enumerate(self._segments))
        return self._materialise(rows) if is_met or not segment.one_to_one else rows

    def _is_watched(self, stage: int) -> bool:
        """Tells whether late rows of the stage are looked for in this epoch."""
        return self._keeps_input and self._late is not None and stage in self._late.kinds

    def _materialise(self, rows: DataFrame) -> DataFrame:
        """Computes all partitions once, in tasks of their own, so that readers of the result do not run state logic."""
        held = self._hold(rows)
        run_all_partitions(held)
        return held

    def _hold(self, rows: DataFrame) -> DataFrame:
        """Keeps what is computed of the rows until the epoch is over."""
        held = rows.persist()
        self._held.append(held)
        return held


def _kept_late(segments: Sequence[Segment], late: LateRows) -> frozenset[int]:
    """Returns the stages whose output goes to others that keep late rows, and nowhere else."""
    kept = set()
    for position, segment in enumerate(segments):
        takers = [taker.stage for i, taker in enumerate(segments) if position in taker.feeders(i)]
        numbers = [None if stage is None else stage.spec.number for stage in takers]
        if segment.stage is not None and numbers and all(number in late.kinds for number in numbers):
            kept.add(segment.stage.spec.number)
    return frozenset(kept)
