"""What the control plane is given from outside: its scheduler, its storage, and who makes snapshots."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from anabranch.checkpoint.storage import Storage
from anabranch.control.membership.fork_server import FORK_SERVER, Child
from anabranch.control.owned_checkpoint import OwnedCheckpoint
from anabranch.core.errors import CheckpointError
from anabranch.core.ids import Epoch
from anabranch.runtime.scheduler import Scheduler
from anabranch.runtime.threads import THREADS

#: How long the start of a process may take, that of the one included which it is forked from.
_START_TIMEOUT_S = 60.0


class Killable(Protocol):
    """A process that makes a snapshot."""

    def kill(self) -> None: ...


class Compact(Protocol):
    """Makes the snapshot of an epoch, here or elsewhere, and waits for it; gives the rows that it has."""

    def __call__(
        self,
        owned: OwnedCheckpoint,
        epoch: Epoch,
        *,
        target: str = "",
        on_start: Callable[[Killable], None] = lambda _: None,
    ) -> int: ...


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


@dataclass(frozen=True)
class DriverParts:
    """The parts of production, unless others are named."""

    scheduler: Scheduler = THREADS
    #: Opens the checkpoint, or the savepoint, at a location.
    open_storage: Callable[[str], Storage] = Storage
    compact: Compact = compact_in_process


PRODUCTION = DriverParts()
