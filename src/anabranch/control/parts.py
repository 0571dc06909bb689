"""What the control plane is given from outside: its scheduler, its storage, and who makes snapshots."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from anabranch.checkpoint.storage import Storage
from anabranch.control.epochs.snapshot_process import compact_in_process
from anabranch.control.owned_checkpoint import OwnedCheckpoint
from anabranch.core.ids import Epoch
from anabranch.runtime.scheduler import Scheduler
from anabranch.runtime.threads import THREADS


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


@dataclass(frozen=True)
class DriverParts:
    """The parts of production, unless others are named."""

    scheduler: Scheduler = THREADS
    #: Opens the checkpoint, or the savepoint, at a location.
    open_storage: Callable[[str], Storage] = Storage
    compact: Compact = compact_in_process


PRODUCTION = DriverParts()
