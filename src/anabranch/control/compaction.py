"""Snapshots by a process of their own, at low priority, forked from the driver's nursery."""

from __future__ import annotations

from collections.abc import Callable

from anabranch.control.claims import Claimed
from anabranch.control.nursery import NURSERY, Child
from anabranch.core.errors import CheckpointError
from anabranch.core.ids import Epoch

#: How long the start of a process may take, that of the one included which it is forked from.
_START_TIMEOUT_S = 60.0


def compact_in_process(
    claimed: Claimed,
    epoch: Epoch,
    *,
    target: str = "",
    on_start: Callable[[Child], None] = lambda _: None,
) -> int:
    """Lets a process of low priority write the snapshot of an epoch, here or elsewhere; the rows that it has."""
    arguments = [claimed.storage.location, str(epoch), "--generation", str(claimed.generation)]
    if target:
        arguments += ["--to", target]
    process = NURSERY.start({"compaction": arguments}, _START_TIMEOUT_S)
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
