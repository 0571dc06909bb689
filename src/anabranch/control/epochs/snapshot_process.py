"""Snapshots by a process of their own, at low priority, forked from the driver's nursery."""

from __future__ import annotations

from collections.abc import Callable

from anabranch.control.membership.fork_server import FORK_SERVER, Child
from anabranch.control.owned_checkpoint import OwnedCheckpoint
from anabranch.core.errors import CheckpointError
from anabranch.core.ids import Epoch

#: How long the start of a process may take, that of the one included which it is forked from.
_START_TIMEOUT_S = 60.0


def compact_in_process(
    owned: OwnedCheckpoint,
    epoch: Epoch,
    *,
    target: str = "",
    on_start: Callable[[Child], None] = lambda _: None,
) -> int:
    """Lets a process of low priority write the snapshot of an epoch, here or elsewhere; the rows that it has."""
    arguments = [owned.storage.location, str(epoch), "--generation", str(owned.generation)]
    if target:
        arguments += ["--to", target]
    process = FORK_SERVER.start({"compaction": arguments}, _START_TIMEOUT_S)
    try:
        on_start(process)
        rows: int = process.first_line(None)["rows"]
    except ValueError:
        raise CheckpointError(
            f"The snapshot of epoch {epoch} could not be written: {process.end_of_log().splitlines()[-1]}"
        ) from None
    finally:
        process.bury()
    return rows
