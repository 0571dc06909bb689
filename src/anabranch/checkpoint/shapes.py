"""Shapes: the state that a job has from one generation of its driver on, and whether a query fits one.

A query may come back with other state, within what evolution allows. Each such change is a shape of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa

from anabranch.checkpoint.evolution import droppable, obstacles, schema_in_words
from anabranch.core.ids import Generation, StageNumber
from anabranch.core.schemas import OPERATOR, PROCESSOR, Layout, StageSpec, VariableKind, VariableSpec


@dataclass(frozen=True)
class StateShape:
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

    @staticmethod
    def from_json(content: Mapping[str, Any]) -> StateShape:
        stages, removed = ([StageSpec.from_json(stage) for stage in content[part]] for part in ("stages", "removed"))
        # Not in what older versions wrote.
        deleted = {
            (int(each["stage"]), str(each["variable"])): Generation(each["generation"])
            for each in content.get("deleted", ())
        }
        return StateShape(tuple(stages), tuple(removed), deleted)

    @property
    def known(self) -> dict[int, dict[str, VariableSpec]]:
        """Each state variable that files may be of, as it was last, by the number of its stage and by its name."""
        known: dict[int, dict[str, VariableSpec]] = {}
        for stage in (*self.stages, *self.removed):
            known.setdefault(stage.number, {}).update({variable.name: variable for variable in stage.variables})
        return known

    def remembered_by(self, stages: Sequence[StageSpec]) -> tuple[StageSpec, ...]:
        """Adds to later stages the fields that these had and they have not, as dropped ones."""
        known = self.known
        return tuple(
            replace(
                stage,
                variables=tuple(
                    _with_dropped(variable, known.get(stage.number, {}).get(variable.name))
                    for variable in stage.variables
                ),
            )
            for stage in stages
        )

    def followed_by(self, stages: Sequence[StageSpec], generation: Generation) -> StateShape:
        """Returns the shape that follows this one: of a job with other stages from a generation on."""
        return StateShape(self.remembered_by(stages), tuple(self._removed(stages)), self._deleted(stages, generation))

    def _removed(self, stages: Sequence[StageSpec]) -> Iterator[StageSpec]:
        """Yields the state variables that the checkpoint knows and the query has no longer."""
        known = self.known
        for stage in stages:
            kept = {variable.name for variable in stage.variables}
            gone = tuple(variable for name, variable in known.get(stage.number, {}).items() if name not in kept)
            if gone:
                yield replace(stage, variables=gone)

    def _deleted(self, stages: Sequence[StageSpec], generation: Generation) -> Mapping[tuple[int, str], Generation]:
        """Adds the variables that this generation is the first to delete, if files may have any of them."""
        known, before = self.known, {stage.number: stage.deleted for stage in self.stages}
        deleted = dict(self.deleted)
        for stage in stages:
            for name in stage.deleted:
                if name in known.get(stage.number, {}) and name not in before.get(stage.number, ()):
                    deleted[stage.number, name] = generation
        return deleted


def _with_dropped(now: VariableSpec, before: VariableSpec | None) -> VariableSpec:
    gone = [] if before is None else droppable(before.whole.value, now.value)
    return replace(now, dropped=pa.schema(gone))


def differences(stored: StateShape, wanted: Sequence[StageSpec]) -> Iterator[str]:
    """Yields what evolution does not allow between a checkpoint and a query, naming both sides of it."""
    known = stored.known
    stored_stages = {stage.number: stage for stage in stored.stages}
    wanted_stages = {stage.number: stage for stage in wanted}
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


def former_places(
    stored: Sequence[StageSpec], wanted: Sequence[StageSpec]
) -> tuple[tuple[StageNumber, str], ...] | None:
    """Returns the number and name that each stateful stage has in a checkpoint; None if those are other stages.

    The number of a stage follows from how many calls come before it. What tells stages apart is their order, operator
    and key, and the names that the user gave them.
    """
    if len(stored) != len(wanted) or not all(map(_is_former, stored, wanted)):
        return None
    return tuple((stage.number, stage.name) for stage in stored)


def _is_former(before: StageSpec, now: StageSpec) -> bool:
    operators = {stage.traits[OPERATOR] for stage in (before, now) if OPERATOR in stage.traits}
    same_name = before.name == now.name or (_is_unnamed(before) and _is_unnamed(now))
    return same_name and len(operators) < 2 and schema_in_words(before.key) == schema_in_words(now.key)


def _is_unnamed(stage: StageSpec) -> bool:
    return stage.name == f"stage{stage.number}"


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
        if before is None:
            continue
        reasons = list(_variable_obstacles(stored.key, before, variable, may_drop=wanted.may_drop_fields))
        if reasons:
            yield (
                f"the state variable {variable.name} of {stored.name} is {_variable_in_words(before)} in the "
                f"checkpoint and {_variable_in_words(variable)} in this query: {', '.join(reasons)}. Change it back, "
                f"give the state variable a new name, under which it starts empty, or use a new checkpoint"
                f"{_how_to_drop(before, variable, wanted)}"
            )


def _how_to_drop(before: VariableSpec, now: VariableSpec, wanted: StageSpec) -> str:
    """Returns the advice how a processor can drop fields of its state."""
    fields = ", ".join(field.name for field in droppable(before.value, now.value))
    if not fields or wanted.may_drop_fields or wanted.traits.get(OPERATOR) != PROCESSOR:
        return ""
    return f". To drop {fields} with all values, set spark.sql.streaming.stateStore.encodingFormat to avro, as in Spark"


def _variable_obstacles(key: pa.Schema, before: VariableSpec, now: VariableSpec, *, may_drop: bool) -> Iterator[str]:
    if before.kind is not now.kind:
        yield f"a {before.kind} cannot become a {now.kind}"
        return
    if schema_in_words(before.map_key) != schema_in_words(now.map_key):
        yield "the key of a map cannot change"
        return
    # A field that was dropped before and comes back has to fit what files have of it.
    whole = before.whole
    gone = droppable(whole.value if may_drop else before.dropped, now.value)
    kept = [field for field in whole.value if field.name not in {each.name for each in gone}]
    yield from (f"field {obstacle}" for obstacle in obstacles(kept, now.value))
    columns = _columns(key, now)
    for name, column in _columns(key, whole).items():
        if name in columns and columns[name] != column:
            yield f"field {name} is the column {column} of files, which would now be called {columns[name]}"


def _columns(key: pa.Schema, variable: VariableSpec) -> dict[str, str]:
    """Returns the name that each value field has in files: another than its own, if the key has a field of its name."""
    return dict(zip(variable.value.names, Layout(key, variable).value.names, strict=True))


def _stage_in_words(stage: StageSpec) -> str:
    return f"{stage.name} with the key {schema_in_words(stage.key)}"


def _variable_in_words(variable: VariableSpec) -> str:
    if variable.kind is VariableKind.MAP:
        return f"a map from {schema_in_words(variable.map_key)} to {schema_in_words(variable.value)}"
    return f"a {variable.kind} of {schema_in_words(variable.value)}"
