"""What the stateful stages have in common: how they are named, and what most of them do alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol, Self

from pyspark.sql import DataFrame
from pyspark.sql.types import StructField, StructType

from anabranch.core.ids import StageNumber
from anabranch.core.schemas import HASH
from anabranch.engine.late import LateKind
from anabranch.engine.spark.expressions import WATERMARK
from anabranch.engine.stages import EpochContext, StageClock


class StageName(Protocol):
    """Number, name and parallelism that the user gave to the stage."""

    @property
    def number(self) -> StageNumber: ...
    @property
    def name(self) -> str: ...
    @property
    def parallelism(self) -> int | None: ...


class KeyedStage:
    """A stage, a frozen dataclass, with one side, one plan and no event time, as far as it does not say otherwise."""

    @property
    def output_delay_ms(self) -> int:
        return 0

    @property
    def clock(self) -> StageClock:
        return StageClock.NONE

    def numbered(self, number: StageNumber, name: str) -> Self:
        stage: Any = self
        numbered: Self = replace(stage, spec=stage.spec.numbered(number, name))
        return numbered

    def late_kinds(self, arriving: StructType, *, complete: bool) -> tuple[LateKind, ...]:
        del arriving, complete
        return ()

    def variant(self, context: EpochContext) -> str:
        del context
        return "the only one"

    def present(self, variable: str, state: DataFrame) -> DataFrame:
        """Returns the entries with their key; the hash is ours alone."""
        del variable
        return state.drop(HASH)


def watermarked(fields: Sequence[StructField]) -> list[tuple[int, str]]:
    """Returns the positions of the columns under a watermark, and of each the field with its time: a window's end."""
    return [
        (position, "end" if isinstance(field.dataType, StructType) else "")
        for position, field in enumerate(fields)
        if WATERMARK in (field.metadata or {})
    ]
