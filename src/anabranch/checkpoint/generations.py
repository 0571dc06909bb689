"""Claims of generations: each incarnation of the driver takes the next number, and no two ever take the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from anabranch.checkpoint import documents, paths
from anabranch.checkpoint.storage import Storage
from anabranch.core.errors import CheckpointError, FencedError
from anabranch.core.ids import Generation

#: Before the first driver.
NO_GENERATION = Generation(0)

#: How often other drivers may be faster to claim a generation before this one gives up.
_RACES_MAX = 1000


def latest_generation(storage: Storage) -> Generation:
    """Returns the newest generation that was claimed; NO_GENERATION if none was. Goes by the names alone."""
    owned = (paths.generation_of(name) for name in storage.list_names(paths.GENERATIONS))
    return max((generation for generation in owned if generation is not None), default=NO_GENERATION)


def claim_generation(storage: Storage, info: Mapping[str, Any]) -> Generation:
    """Claims the next generation. ``info`` is for people: who claimed it, where and when."""
    candidate = Generation(latest_generation(storage) + 1)
    for _ in range(_RACES_MAX):
        if claim_exactly(storage, candidate, info):
            return candidate
        candidate = Generation(max(candidate, latest_generation(storage)) + 1)
    raise CheckpointError(
        f"Could not claim a generation in {storage.full_path(paths.GENERATIONS)}: others were faster {_RACES_MAX} "
        f"times. Make sure that only one query uses this checkpoint, then start it again."
    )


def claim_next(storage: Storage, mine: Generation, info: Mapping[str, Any]) -> Generation:
    """Claims the generation after one's own. Raises FencedError if a newer driver has claimed it."""
    following = Generation(mine + 1)
    if not claim_exactly(storage, following, info):
        raise _fenced(storage, mine, max(following, latest_generation(storage)))
    return following


def claim_exactly(storage: Storage, generation: Generation, info: Mapping[str, Any]) -> bool:
    """Counts a generation as claimed, so that the next driver claims a later one; False if it was claimed before."""
    content = documents.encode({"generation": generation, "info": dict(info)})
    return storage.create(paths.generation_file(generation), content)


def generation_info(storage: Storage, generation: Generation) -> dict[str, Any]:
    """Returns what the driver that claimed a generation said about itself."""
    path = paths.generation_file(generation)
    content = documents.decode(storage, path, storage.read(path))
    return dict(content["info"])


def check_generation(storage: Storage, mine: Generation) -> None:
    """Raises FencedError if a newer driver has claimed the checkpoint."""
    newest = latest_generation(storage)
    if newest > mine:
        raise _fenced(storage, mine, newest)


def _fenced(storage: Storage, mine: Generation, newest: Generation) -> FencedError:
    return FencedError(
        f"A newer driver has taken over the job: it claimed generation {newest} of the checkpoint "
        f"{storage.location}, and this driver is generation {mine}. This query stops; run one query per checkpoint "
        f"(see {storage.full_path(paths.generation_file(newest))} for who runs the other)."
    )
