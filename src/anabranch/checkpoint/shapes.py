"""Shapes: the state that a job has from one generation of its driver on, and what it had before."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa

from anabranch.checkpoint.evolution import droppable
from anabranch.core.ids import Generation
from anabranch.core.schemas import StageSpec, VariableSpec


@dataclass(frozen=True)
class Shape:
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
    def from_json(content: Mapping[str, Any]) -> Shape:
        stages, removed = ([StageSpec.from_json(stage) for stage in content[part]] for part in ("stages", "removed"))
        # Not in what older versions wrote.
        deleted = {
            (int(each["stage"]), str(each["variable"])): Generation(each["generation"])
            for each in content.get("deleted", ())
        }
        return Shape(tuple(stages), tuple(removed), deleted)

    @property
    def known(self) -> dict[int, dict[str, VariableSpec]]:
        """By the number of the stage and by name, each state variable that files may be of, as it was last."""
        known: dict[int, dict[str, VariableSpec]] = {}
        for stage in (*self.stages, *self.removed):
            known.setdefault(stage.number, {}).update({variable.name: variable for variable in stage.variables})
        return known

    def remembered_by(self, stages: Sequence[StageSpec]) -> tuple[StageSpec, ...]:
        """Stages that come after these, with the fields that these had and they have not, if there are any."""
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

    def followed_by(self, stages: Sequence[StageSpec], generation: Generation) -> Shape:
        """The shape of a job with other stages from a generation on, after this one."""
        return Shape(self.remembered_by(stages), tuple(self._removed(stages)), self._deleted(stages, generation))

    def _removed(self, stages: Sequence[StageSpec]) -> Iterator[StageSpec]:
        """What the checkpoint knows and the query has no longer."""
        known = self.known
        for stage in stages:
            kept = {variable.name for variable in stage.variables}
            gone = tuple(variable for name, variable in known.get(stage.number, {}).items() if name not in kept)
            if gone:
                yield replace(stage, variables=gone)

    def _deleted(self, stages: Sequence[StageSpec], generation: Generation) -> Mapping[tuple[int, str], Generation]:
        """What was deleted before, and what this generation is the first to delete, if there can be anything of it."""
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
