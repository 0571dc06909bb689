"""What a job is: written when its checkpoint is first used, and compared with the query on every later start."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from anabranch.checkpoint import documents, paths
from anabranch.checkpoint.ddl import schema_in_words
from anabranch.checkpoint.sparklog import has_offsets
from anabranch.checkpoint.storage import Storage
from anabranch.core.errors import CheckpointError, UnsupportedError
from anabranch.core.ids import JobId
from anabranch.core.schemas import StageSpec, VariableKind, VariableSpec


@dataclass(frozen=True)
class JobDescription:
    """What stays the same for as long as a checkpoint is used."""

    format_version: int
    job_id: JobId
    key_groups: int
    stages: tuple[StageSpec, ...]


def create_or_check(storage: Storage, wanted: JobDescription) -> JobDescription:
    """Describes the job in a new checkpoint, or checks that the checkpoint is this job's, and returns the job.

    The answer has the job id of the checkpoint and the stages as the query has them. To be called before Spark starts
    the query: afterwards, the checkpoint of a new job is not to be told from that of a plain Spark query.
    """
    _check_names(wanted.stages)
    # Looked at before job.json, which is written first of all: so what is seen here is never by a driver that
    # starts at the same moment and has not written job.json yet.
    planned = has_offsets(storage)
    used = bool(storage.list_names(paths.GENERATIONS) or storage.list_names(paths.MANIFESTS))
    raw = storage.read_if_present(paths.JOB)
    if raw is None:
        if used:
            raise CheckpointError(
                f"The checkpoint {storage.location} was used by Anabranch, but {storage.full_path(paths.JOB)} is "
                f"missing. Restore it from a copy of the checkpoint, or use a new checkpoint."
            )
        if planned:
            raise CheckpointError(
                f"{storage.location} is the checkpoint of a plain Spark query: it has offsets of Spark, but no state "
                f"of Anabranch. Use a new checkpoint for this query."
            )
        if storage.create(paths.JOB, _encode(wanted)):
            return wanted
        raw = storage.read(paths.JOB)
    stored = _decode(storage, raw)
    differences = list(_differences(stored, wanted))
    if differences:
        raise CheckpointError(_refusal(storage, differences))
    return replace(wanted, format_version=stored.format_version, job_id=stored.job_id)


def read_job(storage: Storage) -> JobDescription:
    """The job of a checkpoint, for tools that have no query at hand."""
    return _decode(storage, storage.read(paths.JOB))


def _encode(job: JobDescription) -> bytes:
    content: dict[str, Any] = {
        "job_id": job.job_id,
        "key_groups": job.key_groups,
        "stages": [stage.to_json() for stage in job.stages],
    }
    return documents.encode(content, format_version=job.format_version)


def _decode(storage: Storage, raw: bytes) -> JobDescription:
    content = documents.decode(storage, paths.JOB, raw)
    try:
        return JobDescription(
            format_version=content["format_version"],
            job_id=JobId(content["job_id"]),
            key_groups=int(content["key_groups"]),
            stages=tuple(StageSpec.from_json(stage) for stage in content["stages"]),
        )
    except (KeyError, TypeError, ValueError, OSError) as error:
        raise documents.unexpected(storage, paths.JOB, repr(error)) from error


def _refusal(storage: Storage, differences: list[str]) -> str:
    if len(differences) == 1:
        return f"The checkpoint {storage.location} does not fit this query: {differences[0]}."
    lines = "".join(f"\n  - {difference}" for difference in differences)
    return f"The checkpoint {storage.location} does not fit this query:{lines}"


def _differences(stored: JobDescription, wanted: JobDescription) -> Iterator[str]:
    if stored.key_groups != wanted.key_groups:
        yield (
            f"anabranch.keyGroups is {stored.key_groups} in the checkpoint and {wanted.key_groups} in this query. "
            f"anabranch.keyGroups is fixed when a job first starts: set it back to {stored.key_groups} or use a new "
            f"checkpoint"
        )
    stored_stages = {stage.number: stage for stage in stored.stages}
    wanted_stages = {stage.number: stage for stage in wanted.stages}
    for number in sorted(stored_stages.keys() | wanted_stages.keys()):
        if number not in wanted_stages:
            yield (
                f"the checkpoint has the stateful stage {_stage_in_words(stored_stages[number])}, and this query does "
                f"not. It is a checkpoint of another job: set the checkpoint of this one, or a new one"
            )
        elif number not in stored_stages:
            yield (
                f"this query has the stateful stage {_stage_in_words(wanted_stages[number])}, and the checkpoint does "
                f"not. It is a checkpoint of another job: set the checkpoint of this one, or a new one"
            )
        else:
            yield from _stage_differences(stored_stages[number], wanted_stages[number])


def _stage_differences(stored: StageSpec, wanted: StageSpec) -> Iterator[str]:
    if stored.name != wanted.name:
        yield (
            f"stage {stored.number} is called {stored.name} in the checkpoint and {wanted.name} in this query. Change "
            f"the name back or use a new checkpoint"
        )
    if schema_in_words(stored.key) != schema_in_words(wanted.key):
        yield (
            f"the key of {stored.name} is {schema_in_words(stored.key)} in the checkpoint and "
            f"{schema_in_words(wanted.key)} in this query. Change the key back or use a new checkpoint"
        )
    stored_variables = {variable.name: variable for variable in stored.variables}
    wanted_variables = {variable.name: variable for variable in wanted.variables}
    for name in sorted(stored_variables.keys() | wanted_variables.keys()):
        before, now = stored_variables.get(name), wanted_variables.get(name)
        if _variable_in_words(before) != _variable_in_words(now):
            yield (
                f"the state variable {name} of {stored.name} is {_variable_in_words(before)} in the checkpoint and "
                f"{_variable_in_words(now)} in this query. Change it back or use a new checkpoint"
            )


def _stage_in_words(stage: StageSpec) -> str:
    return f"{stage.name} with the key {schema_in_words(stage.key)}"


def _variable_in_words(variable: VariableSpec | None) -> str:
    if variable is None:
        return "absent"
    if variable.kind is VariableKind.MAP:
        return f"a map from {schema_in_words(variable.map_key)} to {schema_in_words(variable.value)}"
    return f"a {variable.kind} of {schema_in_words(variable.value)}"


def _check_names(stages: tuple[StageSpec, ...]) -> None:
    """Names become folders, and some file systems do not tell upper from lower case."""
    for what, names in [
        ("stages", [stage.name for stage in stages]),
        *((f"state variables of {stage.name}", [v.name for v in stage.variables]) for stage in stages),
    ]:
        for one, other in _clashes(names):
            raise UnsupportedError(
                f"The {what} {one!r} and {other!r} have the same name, or names that differ in case only, and would "
                f"share a folder of the checkpoint. Rename one of them."
            )


def _clashes(names: Iterable[str]) -> Iterator[tuple[str, str]]:
    seen: dict[str, str] = {}
    for name in names:
        folder = paths.safe_name(name).casefold()
        if folder in seen:
            yield seen[folder], name
        seen[folder] = name
