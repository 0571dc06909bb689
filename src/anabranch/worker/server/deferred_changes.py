"""Changes of epochs that are part of the state and not durable yet: kept until the driver says that they are."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import pyarrow as pa

from anabranch.core.errors import WorkerError
from anabranch.core.ids import Epoch
from anabranch.core.requests import RunId
from anabranch.worker.transfer.group_ownership import Variable

#: An epoch, the run that it came from, and its changes to each variable.
Deferred = tuple[Epoch, RunId, dict[Variable, pa.Table]]


class DeferredChanges:
    """The epochs that were left for later, oldest first."""

    def __init__(self) -> None:
        self._epochs: list[Deferred] = []

    def add(self, epoch: Epoch, run: RunId, changes: dict[Variable, pa.Table]) -> None:
        self._epochs.append((epoch, run, changes))

    def clear(self) -> None:
        self._epochs = []

    def forget_up_to(self, durable: int) -> None:
        """Lets go of epochs whose changes are in files which manifests name."""
        self._epochs = [deferred for deferred in self._epochs if deferred[0] > durable]

    def forget_after(self, epoch: int) -> None:
        """Lets go of epochs that were rolled back."""
        self._epochs = [deferred for deferred in self._epochs if deferred[0] <= epoch]

    def take_out(self, wanted: Collection[Sequence[int]], worker: str) -> list[Deferred]:
        """Gives these epochs, each named with its run; an error if one never became part of the state here.

        They stay: the driver may fail to write the manifests, and ask again.
        """
        here = {(int(epoch), int(run.run)): (epoch, run, changes) for epoch, run, changes in self._epochs}
        for epoch, run in wanted:
            if (epoch, run) not in here:
                raise WorkerError(
                    f"Worker {worker} has no changes of run {run} of epoch {epoch}, which it is to make durable. "
                    "Return to the newest durable epoch."
                )
        return [here[epoch, run] for epoch, run in wanted]
