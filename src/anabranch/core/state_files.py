"""The files of a checkpoint that hold state, as manifests, snapshots and assignments name them."""

from __future__ import annotations

from dataclasses import dataclass

from anabranch.core.ids import StageNumber, WorkerId


@dataclass(frozen=True)
class ChangeFile:
    """One worker's changes to one state variable in one epoch."""

    stage: StageNumber
    variable: str
    worker: WorkerId
    #: Relative to the checkpoint.
    path: str
    rows: int
    bytes: int
    checksum: str


@dataclass(frozen=True)
class SnapshotFile:
    """Rows of one state variable: all of the key groups in a range, or, of a key group too large for a file, some."""

    stage: StageNumber
    variable: str
    first_group: int
    #: Included.
    last_group: int
    #: Relative to the checkpoint.
    path: str
    rows: int
    bytes: int
    checksum: str
