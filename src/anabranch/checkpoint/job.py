"""What a job is: written when its checkpoint is first used, and compared with the query on every later start.

job.json never changes. Where a later query has other state, within what evolution allows, its stages are saved beside
it as a shape, under the generation that first had them. The newest shape binds the next query, with one exception: a
shape under which no epoch was committed left no state behind, and binds nobody. So a new version of a query that
fails before its first epoch can be taken back.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import pyarrow as pa

from anabranch.checkpoint import documents, evolution, paths
from anabranch.checkpoint.ddl import schema_in_words
from anabranch.checkpoint.generations import check_generation
from anabranch.checkpoint.sparklog import has_offsets, last_committed_epoch
from anabranch.checkpoint.storage import Storage
from anabranch.core.errors import CheckpointError, UnsupportedError
from anabranch.core.ids import Generation, JobId
from anabranch.core.schemas import OPERATOR, Layout, StageSpec, VariableKind, VariableSpec

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


@dataclass(frozen=True)
class _Shape:
    """The state of a job from one generation on."""

    stages: tuple[StageSpec, ...]
    #: For each stage the state variables that it once had, as they were last: files of them may be there still.
    removed: tuple[StageSpec, ...] = ()
    #: By stage and name, the generation that deleted a state variable last: of older ones, it has no state any more.
    deleted: Mapping[tuple[int, str], Generation] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {
            "stages": [stage.to_json() for stage in self.stages],
            "removed": [stage.to_json() for stage in self.removed],
            "deleted": [
                {"stage": stage, "variable": variable, "generation": generation}
                for (stage, variable), generation in sorted(self.deleted.items())
            ],
        }


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
    _check(storage, stored, _binding_shape(storage, stored, spark), wanted)
    return replace(wanted, format_version=stored.format_version, job_id=stored.job_id)


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
    shape = _Shape(job.stages, tuple(_removed(binding, job.stages)), _deleted(binding, job.stages, generation))
    if shape.to_json() == _newest_shape(storage, stored).to_json():
        return False
    storage.write(evolution.shape_file(generation), documents.encode({"generation": generation, **shape.to_json()}))
    return True


def fork_job(source: Storage, target: Storage) -> JobDescription:
    """Describes the job of another checkpoint in a new one, under an id of its own."""
    job = replace(_decode(source, source.read(paths.JOB)), job_id=JobId(uuid.uuid4().hex))
    target.write(paths.JOB, _encode(job))
    return job


def read_job(storage: Storage) -> JobDescription:
    """The job of a checkpoint with its newest stages, for tools that have no query at hand."""
    stored = _decode(storage, storage.read(paths.JOB))
    return replace(stored, stages=_newest_shape(storage, stored).stages)


def deleted_variables(storage: Storage) -> Mapping[tuple[int, str], Generation]:
    """By the number of the stage and by name, the generation that deleted a state variable last."""
    generations = _shape_generations(storage)
    return _read_shape(storage, generations[-1]).deleted if generations else {}


def _newest_shape(storage: Storage, stored: JobDescription) -> _Shape:
    return _latest_shape(storage, stored, _shape_generations(storage))


def _binding_shape(storage: Storage, stored: JobDescription, spark: Storage | None) -> _Shape:
    """The newest shape that an epoch was committed under; the newest of all if there are no epochs to go by."""
    committed = last_committed_epoch(storage if spark is None else spark)
    manifests = (paths.manifest_of(name) for name in storage.list_names(paths.MANIFESTS))
    writers = [manifest[1] for manifest in manifests if manifest is not None and manifest[0] <= committed]
    generations = _shape_generations(storage)
    if writers:
        generations = [generation for generation in generations if generation <= max(writers)]
    return _latest_shape(storage, stored, generations)


def _shape_generations(storage: Storage) -> list[Generation]:
    found = (evolution.shape_of(name) for name in storage.list_names(evolution.SHAPES))
    return sorted(generation for generation in found if generation is not None)


def _latest_shape(storage: Storage, stored: JobDescription, generations: list[Generation]) -> _Shape:
    if not generations:
        return _Shape(stored.stages)
    return _read_shape(storage, generations[-1])


def _read_shape(storage: Storage, generation: Generation) -> _Shape:
    path = evolution.shape_file(generation)
    content = documents.decode(storage, path, storage.read(path))

    def shape() -> _Shape:
        stages, removed = ([StageSpec.from_json(stage) for stage in content[part]] for part in ("stages", "removed"))
        # Not in what older versions wrote.
        deleted = {
            (int(each["stage"]), str(each["variable"])): Generation(each["generation"])
            for each in content.get("deleted", ())
        }
        return _Shape(tuple(stages), tuple(removed), deleted)

    if content.get("generation") != generation:
        raise documents.unexpected(storage, path, f"it is of generation {content.get('generation')}")
    return _expected(storage, path, shape)


def _removed(binding: _Shape, stages: tuple[StageSpec, ...]) -> Iterator[StageSpec]:
    """What the checkpoint knows and the query has no longer."""
    known = _known_variables(binding)
    for stage in stages:
        kept = {variable.name for variable in stage.variables}
        gone = tuple(variable for name, variable in known.get(stage.number, {}).items() if name not in kept)
        if gone:
            yield replace(stage, variables=gone)


def _deleted(
    binding: _Shape, stages: tuple[StageSpec, ...], generation: Generation
) -> Mapping[tuple[int, str], Generation]:
    """What was deleted before, and what this generation is the first to delete, if there can be anything of it."""
    known, before = _known_variables(binding), {stage.number: stage.deleted for stage in binding.stages}
    deleted = dict(binding.deleted)
    for stage in stages:
        for name in stage.deleted:
            if name in known.get(stage.number, {}) and name not in before.get(stage.number, ()):
                deleted[stage.number, name] = generation
    return deleted


def _known_variables(shape: _Shape) -> dict[int, dict[str, VariableSpec]]:
    """By the number of the stage and by name, each state variable that files may be of, as it was last."""
    known: dict[int, dict[str, VariableSpec]] = {}
    for stage in (*shape.stages, *shape.removed):
        known.setdefault(stage.number, {}).update({variable.name: variable for variable in stage.variables})
    return known


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


def _check(storage: Storage, stored: JobDescription, binding: _Shape, wanted: JobDescription) -> None:
    differences = list(_differences(stored.key_groups, binding, wanted))
    if differences:
        raise CheckpointError(_refusal(storage, differences))


def _refusal(storage: Storage, differences: list[str]) -> str:
    if len(differences) == 1:
        return f"The checkpoint {storage.location} does not fit this query: {differences[0]}."
    lines = "".join(f"\n  - {difference}" for difference in differences)
    return f"The checkpoint {storage.location} does not fit this query:{lines}"


def _differences(key_groups: int, stored: _Shape, wanted: JobDescription) -> Iterator[str]:
    """What evolution does not allow, both sides of it."""
    if key_groups != wanted.key_groups:
        yield (
            f"anabranch.keyGroups is {key_groups} in the checkpoint and {wanted.key_groups} in this query. "
            f"anabranch.keyGroups is fixed when a job first starts: set it back to {key_groups} or use a new checkpoint"
        )
    shifted = list(_shifted(stored.stages, wanted.stages))
    if shifted:
        yield from shifted
        return
    known = _known_variables(stored)
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
            yield from _stage_differences(stored_stages[number], wanted_stages[number], known[number])


def _shifted(stored: tuple[StageSpec, ...], wanted: tuple[StageSpec, ...]) -> Iterator[str]:
    """Stages that are the same but for their numbers: those follow from how many calls come before."""
    pairs = list(zip(stored, wanted, strict=False))
    if len(stored) != len(wanted) or any(_in_essence(one) != _in_essence(other) for one, other in pairs):
        return
    for before, now in pairs:
        if before.number < now.number:
            yield (
                f"the stateful stage {now.name} is number {now.number} of this query, and in the checkpoint it is "
                f"{before.name}, number {before.number}: calls before it were added, each a stage of its own. Put them "
                f"into the stage that they lead to: call .stage({before.name!r}) before them"
            )
        elif before.number > now.number:
            yield (
                f"the stateful stage {now.name} is number {now.number} of this query, and in the checkpoint it is "
                f"{before.name}, number {before.number}: calls before it were removed, each a stage of its own. Leave "
                f"calls that change nothing in their place, such as .filter('true'), or use a new checkpoint"
            )


def _in_essence(stage: StageSpec) -> tuple[str, frozenset[str], str]:
    """What tells stages apart, whatever their numbers and names."""
    names = frozenset(variable.name for variable in stage.variables)
    return schema_in_words(stage.key), names, stage.traits.get(OPERATOR, "")


def _stage_differences(stored: StageSpec, wanted: StageSpec, known: Mapping[str, VariableSpec]) -> Iterator[str]:
    if stored.name != wanted.name:
        yield (
            f"stage {stored.number} is called {stored.name} in the checkpoint and {wanted.name} in this query. Change "
            f"the name back or use a new checkpoint"
        )
    if schema_in_words(stored.key) != schema_in_words(wanted.key):
        yield (
            f"the key of {stored.name} is {schema_in_words(stored.key)} in the checkpoint and "
            f"{schema_in_words(wanted.key)} in this query. A key cannot change, as the place of its state depends on "
            f"it. Change the key back or use a new checkpoint"
        )
    for trait, was in stored.traits.items():
        # What only one side knows was written by another version of Anabranch.
        if (now := wanted.traits.get(trait, was)) != was:
            yield (
                f"the {trait} of {stored.name} is {was} in the checkpoint and {now} in this query. It decides what the "
                f"state means. Change it back or use a new checkpoint"
            )
    for variable in wanted.variables:
        # New state variables start empty, and those that the query has no longer rest in the checkpoint.
        before = known.get(variable.name)
        reasons = [] if before is None else list(_variable_obstacles(stored.key, before, variable))
        if before is not None and reasons:
            yield (
                f"the state variable {variable.name} of {stored.name} is {_variable_in_words(before)} in the "
                f"checkpoint and {_variable_in_words(variable)} in this query: {', '.join(reasons)}. Change it back, "
                f"give the state variable a new name, under which it starts empty, or use a new checkpoint"
            )


def _variable_obstacles(key: pa.Schema, before: VariableSpec, now: VariableSpec) -> Iterator[str]:
    if before.kind is not now.kind:
        yield f"a {before.kind} cannot become a {now.kind}"
        return
    if schema_in_words(before.map_key) != schema_in_words(now.map_key):
        yield "the key of a map cannot change"
        return
    yield from (f"field {obstacle}" for obstacle in evolution.obstacles(before.value, now.value))
    columns = _columns(key, now)
    for name, column in _columns(key, before).items():
        if name in columns and columns[name] != column:
            yield f"field {name} is the column {column} of files, which would now be called {columns[name]}"


def _columns(key: pa.Schema, variable: VariableSpec) -> dict[str, str]:
    """Under which name each value field is in files: another than its own, if the key has a field of its name."""
    return dict(zip(variable.value.names, Layout(key, variable).value.names, strict=True))


def _stage_in_words(stage: StageSpec) -> str:
    return f"{stage.name} with the key {schema_in_words(stage.key)}"


def _variable_in_words(variable: VariableSpec) -> str:
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
