"""What a job is: written when its checkpoint is first used, and compared with the query on every later start.

job.json never changes. Where a later query has other state, within what evolution allows, its stages are saved beside
it as a shape, under the generation that first had them. The newest shape binds the next query, with one exception: a
shape under which no epoch was committed left no state behind, and binds no query. So a new version of a query that
fails before its first epoch can be taken back.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from anabranch.checkpoint import documents, paths
from anabranch.checkpoint.generations import check_generation
from anabranch.checkpoint.shapes import StateShape, differences
from anabranch.checkpoint.sparklog import has_offsets, last_committed_epoch
from anabranch.checkpoint.storage import Storage
from anabranch.core.errors import CheckpointError, UnsupportedError
from anabranch.core.ids import Generation, JobId
from anabranch.core.schemas import StageSpec

_T = TypeVar("_T")


class SparkCheckpointError(CheckpointError):
    """The checkpoint is that of a query which Spark runs by itself."""


@dataclass(frozen=True)
class JobDescription:
    """A job and the state that it has. All but the stages stays the same for as long as a checkpoint is used."""

    format_version: int
    job_id: JobId
    key_groups: int
    stages: tuple[StageSpec, ...]


def create_or_check(storage: Storage, wanted: JobDescription, spark: Storage | None = None) -> JobDescription:
    """Describes the job in a new checkpoint, or checks that the checkpoint is this job's, and returns the job.

    ``spark`` is where Spark keeps its own logs, if that is not the same place.

    The answer has the job id of the checkpoint and the stages as the query has them; save_shape makes them durable
    where they differ. To be called before Spark starts the query: afterwards, the checkpoint of a new job is not to be
    told from that of a plain Spark query.
    """
    _check_names(wanted.stages)
    # Looked at before job.json, which is written first of all: so what is seen here is never by a driver that
    # starts at the same moment and has not written job.json yet.
    planned = has_offsets(storage if spark is None else spark)
    used = bool(storage.list_names(paths.GENERATIONS) or storage.list_names(paths.MANIFESTS))
    raw = storage.read_if_present(paths.JOB)
    if raw is None:
        if used:
            raise CheckpointError(
                f"The checkpoint {storage.location} was used by Anabranch, but {storage.full_path(paths.JOB)} is "
                f"missing. Restore it from a copy of the checkpoint, or use a new checkpoint."
            )
        if planned:
            raise SparkCheckpointError(
                f"{storage.location} is the checkpoint of a plain Spark query: it has offsets of Spark, but no state "
                f"of Anabranch. Use a new checkpoint for this query."
            )
        if storage.create(paths.JOB, _encode(wanted)):
            return wanted
        raw = storage.read(paths.JOB)
    stored = _decode(storage, raw)
    binding = _binding_shape(storage, stored, spark)
    _check(storage, stored, binding, wanted)
    stages = binding.remembered_by(wanted.stages)
    return replace(wanted, format_version=stored.format_version, job_id=stored.job_id, stages=stages)


def save_shape(storage: Storage, job: JobDescription, generation: Generation, spark: Storage | None = None) -> bool:
    """Saves the stages of the job under the generation of this driver; False: the newest shape is the same already.

    To be called once the generation is claimed and before its first epoch, with what create_or_check returned. It is
    checked again: an older driver may have committed epochs until the generation was claimed. FencedError if a newer
    driver has taken over.
    """
    check_generation(storage, generation)
    stored = _decode(storage, storage.read(paths.JOB))
    binding = _binding_shape(storage, stored, spark)
    _check(storage, stored, binding, job)
    shape = binding.followed_by(job.stages, generation)
    if shape.to_json() == _newest_shape(storage, stored).to_json():
        return False
    storage.write(paths.shape_file(generation), documents.encode({"generation": generation, **shape.to_json()}))
    return True


def fork_job(source: Storage, target: Storage) -> JobDescription:
    """Describes the job of another checkpoint in a new one, under an id of its own."""
    job = replace(_decode(source, source.read(paths.JOB)), job_id=JobId(uuid.uuid4().hex))
    target.write(paths.JOB, _encode(job))
    return job


def read_job(storage: Storage) -> JobDescription:
    """Reads the job of a checkpoint with its newest stages, for tools that have no query at hand."""
    stored = _decode(storage, storage.read(paths.JOB))
    return replace(stored, stages=_newest_shape(storage, stored).stages)


def stages_of(storage: Storage) -> tuple[StageSpec, ...]:
    """Reads the stateful stages of a checkpoint's job, as they were last; none if no job uses it yet."""
    return () if storage.read_if_present(paths.JOB) is None else read_job(storage).stages


def deleted_variables(storage: Storage) -> Mapping[tuple[int, str], Generation]:
    """Returns the generation that deleted each state variable last, by the number of its stage and by its name."""
    generations = _shape_generations(storage)
    return _read_shape(storage, generations[-1]).deleted if generations else {}


def _newest_shape(storage: Storage, stored: JobDescription, *, up_to: Generation | None = None) -> StateShape:
    """Returns the newest shape, or the newest that a generation up to this one has saved."""
    generations = [each for each in _shape_generations(storage) if up_to is None or each <= up_to]
    return _read_shape(storage, generations[-1]) if generations else StateShape(stored.stages)


def _binding_shape(storage: Storage, stored: JobDescription, spark: Storage | None) -> StateShape:
    """Returns the newest shape that an epoch was committed under; the newest of all if there are no epochs to go by."""
    committed = last_committed_epoch(storage if spark is None else spark)
    manifests = (paths.manifest_of(name) for name in storage.list_names(paths.MANIFESTS))
    writers = [manifest[1] for manifest in manifests if manifest is not None and manifest[0] <= committed]
    return _newest_shape(storage, stored, up_to=max(writers, default=None))


def _shape_generations(storage: Storage) -> list[Generation]:
    found = (paths.generation_of(name) for name in storage.list_names(paths.SHAPES))
    return sorted(generation for generation in found if generation is not None)


def _read_shape(storage: Storage, generation: Generation) -> StateShape:
    path = paths.shape_file(generation)
    content = documents.decode(storage, path, storage.read(path))
    if content.get("generation") != generation:
        raise documents.unexpected(storage, path, f"it is of generation {content.get('generation')}")
    return _expected(storage, path, lambda: StateShape.from_json(content))


def _encode(job: JobDescription) -> bytes:
    content: dict[str, Any] = {
        "job_id": job.job_id,
        "key_groups": job.key_groups,
        "stages": [stage.to_json() for stage in job.stages],
    }
    return documents.encode(content, format_version=job.format_version)


def _decode(storage: Storage, raw: bytes) -> JobDescription:
    content = documents.decode(storage, paths.JOB, raw)
    return _expected(
        storage,
        paths.JOB,
        lambda: JobDescription(
            format_version=content["format_version"],
            job_id=JobId(content["job_id"]),
            key_groups=int(content["key_groups"]),
            stages=tuple(StageSpec.from_json(stage) for stage in content["stages"]),
        ),
    )


def _expected(storage: Storage, path: str, make: Callable[[], _T]) -> _T:
    try:
        return make()
    except (KeyError, TypeError, ValueError, OSError) as error:
        raise documents.unexpected(storage, path, repr(error)) from error


def _check(storage: Storage, stored: JobDescription, binding: StateShape, wanted: JobDescription) -> None:
    found = list(differences(binding, wanted.stages))
    if stored.key_groups != wanted.key_groups:
        found.insert(
            0,
            f"anabranch.keyGroups is {stored.key_groups} in the checkpoint and {wanted.key_groups} in this query. "
            f"anabranch.keyGroups is fixed when a job first starts: set it back to {stored.key_groups} or use a new "
            f"checkpoint",
        )
    if found:
        listed = f" {found[0]}." if len(found) == 1 else "".join(f"\n  - {difference}" for difference in found)
        raise CheckpointError(f"The checkpoint {storage.location} does not fit this query:{listed}")


def _check_names(stages: tuple[StageSpec, ...]) -> None:
    """Checks names that become folders: some file systems do not tell upper from lower case."""
    named = [("stages", [stage.name for stage in stages])]
    named += [(f"state variables of {stage.name}", [v.name for v in stage.variables]) for stage in stages]
    for what, names in named:
        seen: dict[str, str] = {}
        for name in names:
            folder = paths.safe_name(name).casefold()
            if folder in seen:
                raise UnsupportedError(
                    f"The {what} {seen[folder]!r} and {name!r} have the same name, or names that differ in case only, "
                    f"and would share a folder of the checkpoint. Rename one of them."
                )
            seen[folder] = name
