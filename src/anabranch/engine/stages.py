"""What the epoch loop needs of a stateful stage, and what a stage gets to know about its epoch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Protocol, Self

from pyspark.sql import DataFrame
from pyspark.sql.types import StructType

from anabranch.core.ids import StageNumber
from anabranch.core.schemas import StageSpec
from anabranch.engine.late import LateKind
from anabranch.engine.tables import EpochTables, TableStage
from anabranch.wire.routed import StageAccess


class StageClock(Enum):
    """What can give a stage something to do although no rows have come."""

    NONE = "none"
    #: The watermark: windows that end, timers, rows that wait for a match.
    EVENT_TIME = "event time"
    #: The time of day: timers, state that expires.
    PROCESSING_TIME = "processing time"


@dataclass(frozen=True)
class EpochContext:
    """The facts of one epoch that a stage's plan may depend on. What only its tasks need is in TaskEpoch."""

    #: The number of the epoch: 0 for the first of all.
    epoch: int
    #: Rows that the last epoch with any read, and changes that it made to state; None before the first.
    previous_rows: int | None
    previous_changes: int
    #: Complete output mode: a stage emits all of its state, not only what changed.
    complete: bool
    #: Append output mode: a row goes out once, when the watermark has passed it and it cannot change any more.
    append: bool = False
    #: Broadcast tables as of the epoch, if the query has any.
    tables: EpochTables | None = None
    #: The numbers of the stages whose output may be older than the watermark: all stages that get it keep late rows.
    may_emit_late: frozenset[int] = frozenset()


class StatefulStage(Protocol):
    """A stage with a key and state variables."""

    @property
    def spec(self) -> StageSpec: ...

    @property
    def parallelism(self) -> int | None:
        """The number of partitions; None for the job's default."""

    @property
    def clock(self) -> StageClock:
        """What can give the stage something to do although no rows have come: it then runs without any."""

    @property
    def output_delay_ms(self) -> int:
        """How far behind the watermark of the stage the event times of its output can be."""

    def numbered(self, number: StageNumber, name: str) -> Self:
        """Returns the same stage under another number and name."""

    def project(self, rows: DataFrame, side: int = 0, *, carry: bool = False) -> DataFrame:
        """Runs the stateless half of the stage, before rows are placed. Works on streaming DataFrames too.

        What becomes of the rows of all sides has the same columns; most stages have one side only. With `carry`, what
        late rows are shown with is in the result as well; it is not there when the stage is applied.
        """

    def late_kinds(self, arriving: StructType, *, complete: bool) -> tuple[LateKind, ...]:
        """Returns the kinds of rows that the stage drops because the watermark has passed them."""

    def variant(self, context: EpochContext) -> str:
        """Names the plan that suits the epoch; `apply` makes the same plan for the same variant and access."""

    def apply(self, rows: DataFrame, access: StageAccess, context: EpochContext) -> DataFrame:
        """Places projected rows by key group and runs the stage's logic against the state."""

    def present(self, variable: str, state: DataFrame) -> DataFrame:
        """Returns rows of a state variable as the user should see them."""


def table_stage(stages: Iterable[StatefulStage]) -> TableStage | None:
    """Returns the stage with the broadcast tables of a query, if it has any."""
    return next((stage for stage in stages if isinstance(stage, TableStage)), None)
