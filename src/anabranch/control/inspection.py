"""A look at the state of a running job: its rows, and what each worker holds of it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import pyarrow as pa

from anabranch.control.membership.cluster import Cluster
from anabranch.control.membership.members import Member
from anabranch.core.errors import AnabranchError, EpochError, LostWorkerError, WorkerError
from anabranch.core.ids import Epoch
from anabranch.core.reports import WorkerReport
from anabranch.core.requests import Describe, Scan
from anabranch.core.schemas import StageSpec
from anabranch.runtime.scheduler import Scheduler

logger = logging.getLogger(__name__)

#: How often a look at the state starts over because epochs went by faster than it could read.
_ATTEMPTS = 10
#: How long a look waits for a change that is under way.
_CHANGE_MAX_S = 60.0
#: How long a worker may take to answer who does not want to wait.
_HASTY_TIMEOUT_S = 1.0

_Seen = TypeVar("_Seen")


class Inspection:
    """Asks all workers at once."""

    def __init__(
        self, cluster: Cluster, scheduler: Scheduler, job: Callable[[], dict[str, Any]], repair_s: float = 0.0
    ) -> None:
        #: How long it may take until a lost worker is noticed and its key groups are with others.
        self._repair_s = repair_s
        self._cluster = cluster
        self._scheduler = scheduler
        self.is_closed = False
        #: The numbers that every request carries.
        self._job = job

    def scan(self, spec: StageSpec, variable: str, committed: Callable[[], Epoch]) -> tuple[int, pa.Table]:
        """All rows of a state variable as of the last committed epoch, and that epoch."""

        def look() -> tuple[int, pa.Table]:
            epoch = committed()
            request = Scan(**self._job(), epoch=epoch, stage=spec.number, variable=variable)
            parts = self._on_all(self._cluster.members.all, lambda member: list(member.client.stream(request)))
            batches = [batch for part in parts for batch in part if batch.num_rows]
            schema = spec.layouts[variable].rows
            # Spark takes no table whose nested columns have no chunk at all.
            return epoch, pa.Table.from_batches(batches, schema) if batches else schema.empty_table()

        return self._look(look)

    def describe(self, *, wait: bool = True) -> list[WorkerReport]:
        """What each worker holds; without waiting, as far as it can be told while workers change or stand still."""
        return self._look(self._describe) if wait else self._describe(_HASTY_TIMEOUT_S)

    def _look(self, look: Callable[[], _Seen]) -> _Seen:
        """Look, and again if key groups changed hands meanwhile, or an epoch that was looked at is gone."""
        failure: AnabranchError | None = None
        for _ in range(_ATTEMPTS):
            count = self._cluster.change_counter.wait(_CHANGE_MAX_S)
            try:
                seen = look()
            except AnabranchError as error:
                failure = error
                if isinstance(error, LostWorkerError):
                    # Its part goes to others as soon as the loss is noticed.
                    if not self._cluster.change_counter.wait_for_change(count, self._repair_s):
                        raise
                elif not isinstance(error, EpochError) and self._cluster.change_counter.held_since(count):
                    raise
                logger.debug("a look at the workers starts over: %s", error)
                continue
            if self._cluster.change_counter.held_since(count):
                return seen
        reason = f" ({failure})" if failure else ""
        raise EpochError(
            f"The workers cannot be looked at: epochs or changes pass faster than that{reason}. Try again."
        )

    def _describe(self, timeout_s: float | None = None) -> list[WorkerReport]:
        members, request = self._cluster.members.all, Describe(**self._job())
        answers = self._on_all(members, lambda member: member.client.call(request, timeout_s=timeout_s))
        return [
            WorkerReport(
                id=member.worker,
                address=member.address,
                key_groups=len(self._cluster.route.groups_of(member.worker)),
                pending_groups=answer.progress.pending_groups,
                frozen_groups=answer.progress.frozen_groups,
                load=round(sum(keys for _, keys in answer.load)),
                rows=sum(variable.rows for variable in answer.variables),
                bytes=sum(variable.bytes for variable in answer.variables),
                pid=member.pid,
                variables=list(answer.variables),
            )
            for member, answer in zip(members, answers, strict=True)
        ]

    def _on_all(self, members: Sequence[Member], call: Callable[[Member], Any]) -> list[Any]:
        if self.is_closed:
            raise WorkerError("The query ends or is being restarted, so its workers cannot be asked.")
        return self._scheduler.gather(partial(call, member) for member in members)
