"""A checkpoint in a temporary directory, and stages to describe in it."""

from pathlib import Path

import pyarrow as pa
import pytest

from anabranch.checkpoint.storage import Storage
from anabranch.core.ids import StageNumber
from anabranch.core.schemas import StageSpec, VariableKind, VariableSpec


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return Storage(str(tmp_path / "checkpoint"))


@pytest.fixture
def stage() -> StageSpec:
    """A stage with one state variable of each kind."""
    return StageSpec(
        number=StageNumber(2),
        name="stage2",
        key=pa.schema([pa.field("user", pa.int64(), nullable=False)]),
        variables=(
            VariableSpec(
                "value",
                VariableKind.VALUE,
                pa.schema([pa.field("count", pa.int64(), nullable=False), ("total", pa.int64())]),
            ),
            VariableSpec("seen", VariableKind.LIST, pa.schema([("page", pa.string())])),
            VariableSpec(
                "visits",
                VariableKind.MAP,
                pa.schema([("at", pa.timestamp("us", tz="UTC"))]),
                map_key=pa.schema([("page", pa.string())]),
            ),
        ),
    )
