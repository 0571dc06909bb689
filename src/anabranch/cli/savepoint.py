"""Commands that save a job, or take it back: `anabranch savepoint` and `anabranch checkpoint rewind`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from anabranch.checkpoint.rewind import rewind as rewind_to
from anabranch.checkpoint.savepoints import Savepoint
from anabranch.checkpoint.statefiles import state_files
from anabranch.checkpoint.storage import Storage
from anabranch.cli.checkpoint import (
    AsJson,
    Checkpoint,
    Force,
    StateLocation,
    check_not_running,
    checkpoint_app,
    epoch_ranges,
    find,
    tell,
    while_it_runs,
)
from anabranch.core.errors import CheckpointError
from anabranch.core.ids import Epoch

#: How often a savepoint is tried on a checkpoint that changes meanwhile.
_TRIES = 3


def savepoint(
    checkpoint: Checkpoint,
    target: Annotated[str, typer.Argument(help="Where it goes: a new path or URL.", show_default=False)],
    state_location: StateLocation = "",
    as_json: AsJson = False,
) -> None:
    """Save a job as of its last epoch, complete in itself, so that jobs can start from it. The job may be running."""
    from anabranch.control.epochs.savepoints import found, newest_epoch, take_savepoint

    place = find(checkpoint, state_location)
    if Storage(target).location in (place.storage.location, place.spark.location):
        raise CheckpointError(f"{target} is the checkpoint itself. Name another place for the savepoint.")

    def save() -> Savepoint:
        owned = found(checkpoint, state_location)
        return take_savepoint(owned, target, newest_epoch(owned))

    saved = while_it_runs(place, save, tries=_TRIES)
    where = Storage(target).location
    line = f"Epoch {saved.epoch} of {saved.origin} is saved in {where}."
    tell(as_json, {"target": where} | asdict(saved), line)


@checkpoint_app.command()
def rewind(
    checkpoint: Checkpoint,
    epoch: Annotated[int, typer.Argument(min=0, help="The epoch to return to.", show_default=False)],
    state_location: StateLocation = "",
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Return to an older epoch, for example because newer state is damaged. Only for jobs that are not running.

    The query repeats the later epochs when it starts, from the very offsets that they had; its sources must still have
    those rows. File and memory sinks do not take an epoch twice.
    """
    place = find(checkpoint, state_location)
    check_not_running(place, force=force)
    if epoch > place.committed:
        raise CheckpointError(
            f"Epoch {epoch} is not an older one: Spark committed epoch {place.committed} last. Name that one, or one "
            "before it."
        )
    state_files(place.storage, Epoch(epoch))
    repeated = rewind_to(place.spark, place.storage, Epoch(epoch))
    line = f"The job is back at epoch {epoch}. When its query starts, it repeats these: {epoch_ranges(repeated)}."
    tell(as_json, {"epoch": epoch, "repeated": repeated}, line)
