"""The durable form of a job's state, beside Spark's own offsets and commits: the truth that workers are caches of."""

from anabranch.checkpoint.changes import Written, read_changes, write_changes
from anabranch.checkpoint.cleanup import CleanedUp, clean_up
from anabranch.checkpoint.documents import FORMAT_VERSION
from anabranch.checkpoint.generations import (
    NO_GENERATION,
    check_generation,
    claim_generation,
    generation_info,
    latest_generation,
)
from anabranch.checkpoint.job import JobDescription, create_or_check, read_job
from anabranch.checkpoint.manifests import (
    Manifest,
    chain,
    manifest_epochs,
    read_manifest,
    remove_after,
    write_manifest,
)
from anabranch.checkpoint.paths import change_file, variable_folder
from anabranch.checkpoint.routes import load_route, newest_route, save_route
from anabranch.checkpoint.snapshots import (
    Snapshot,
    read_snapshot,
    read_snapshot_rows,
    snapshot_epochs,
    write_snapshot,
    write_snapshot_rows,
)
from anabranch.checkpoint.sparklog import has_offsets, last_committed_epoch
from anabranch.checkpoint.statefiles import StateFiles, newest_whole_epoch, state_files
from anabranch.checkpoint.storage import Storage
from anabranch.checkpoint.verify import Description, Problem, Report, describe, verify
from anabranch.core.state_files import ChangeFile, SnapshotFile

__all__ = [
    "FORMAT_VERSION",
    "NO_GENERATION",
    "ChangeFile",
    "CleanedUp",
    "Description",
    "JobDescription",
    "Manifest",
    "Problem",
    "Report",
    "Snapshot",
    "SnapshotFile",
    "StateFiles",
    "Storage",
    "Written",
    "chain",
    "change_file",
    "check_generation",
    "claim_generation",
    "clean_up",
    "create_or_check",
    "describe",
    "generation_info",
    "has_offsets",
    "last_committed_epoch",
    "latest_generation",
    "load_route",
    "manifest_epochs",
    "newest_route",
    "newest_whole_epoch",
    "read_changes",
    "read_job",
    "read_manifest",
    "read_snapshot",
    "read_snapshot_rows",
    "remove_after",
    "save_route",
    "snapshot_epochs",
    "state_files",
    "variable_folder",
    "verify",
    "write_changes",
    "write_manifest",
    "write_snapshot",
    "write_snapshot_rows",
]
