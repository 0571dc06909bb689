"""What is looked at before a request reaches the state of a job: that its values and tables fit the job."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from anabranch.checkpoint.manifests import ChangeFile, SnapshotFile
from anabranch.core.errors import WorkerError
from anabranch.core.schemas import HASH, StageSpec
from anabranch.wire import messages
from anabranch.worker.server.staging import Tables
from anabranch.worker.state.job_state import JobShape


def check_opening(request: messages.OpenJob) -> None:
    """Raises an error if the stages are none."""
    try:
        for document in request.stages:
            StageSpec.from_json(document)
    except (KeyError, TypeError, ValueError, AttributeError, OSError, pa.ArrowException) as error:
        raise _unfit(request, f"has a stage that cannot be read ({error!r})") from None


def check(request: messages.JobRequest, tables: Tables, shape: JobShape) -> None:
    """Raises an error if a request does not fit the job. Changes are checked where they are staged."""
    match request:
        case messages.Assign():
            _check_files(request, SnapshotFile, request.snapshot)
            _check_files(request, ChangeFile, request.changes)
            offered = [group for offer in [*request.peers, *request.shared] for group in offer["groups"]]
            _check_groups(request, [*request.groups, *offered], shape)
        case messages.HandOver():
            _check_groups(request, request.keep, shape)
        case messages.Read():
            _check_groups(request, request.groups, shape)
            _check_keys(request, tables, shape)
            _check_load(request, tables.get(messages.FURTHER_ROWS), shape)
        case messages.FetchGroups() | messages.FetchDue():
            _check_groups(request, request.groups, shape)
        case messages.FetchKeys():
            _check_keys(request, tables, shape)


def _check_groups(request: messages.JobRequest, groups: Collection[int], shape: JobShape) -> None:
    if groups and not (min(groups) >= 0 and max(groups) < shape.key_groups):
        raise _unfit(request, f"names key groups that do not exist: they go from 0 to {shape.key_groups - 1}")


def _check_files(request: messages.JobRequest, kind: type, files: Sequence[Mapping[str, Any]]) -> None:
    try:
        for file in files:
            kind(**file)
    except TypeError as error:
        raise _unfit(request, f"names a file that is none ({error})") from None


def _check_keys(request: messages.Read | messages.FetchKeys, tables: Tables, shape: JobShape) -> None:
    keys, spec = tables.get(messages.KEYS), shape.stages.get(request.stage)
    if keys is None or spec is None:
        return  # the job says so itself
    expected = next((layout.keys for layout in spec.layouts.values()), keys.schema)
    if (keys.schema.names, keys.schema.types) != (expected.names, expected.types):
        raise _unfit(request, f"has keys with the columns {keys.schema.names}, not {expected.names} of their types")
    if keys.column(HASH).null_count:
        raise _unfit(request, "has keys without a hash")


def _check_load(request: messages.Read, rows: pa.Table | None, shape: JobShape) -> None:
    if rows is None:
        return
    are_numbers = len(rows.schema) == 2 and all(pa.types.is_integer(kind) for kind in rows.schema.types)
    if not are_numbers or any(column.null_count for column in rows.columns):
        raise _unfit(request, "tells of further rows otherwise than by key group and number")
    if len(rows):
        _check_groups(request, list(pc.min_max(rows.column(0)).as_py().values()), shape)


def _unfit(request: messages.JobRequest, what: str) -> WorkerError:
    return WorkerError(f"The request {request.kind()!r} {what}. Run the same version of anabranch everywhere.")
