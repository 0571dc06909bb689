"""What a running query offers to its HTTP API."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from msgspec.structs import replace

from anabranch.control.membership.members import Member, discover
from anabranch.core.errors import EpochError, SettingsError
from anabranch.core.ids import WorkerId
from anabranch.core.reports import (
    EpochReport,
    JobReport,
    MigrationReport,
    RescaleReport,
    RouteReport,
    SavepointReport,
    StageReport,
    WorkerReport,
    WorkerState,
)
from anabranch.wire.credentials import Credentials

if TYPE_CHECKING:
    from anabranch.api.query import StreamQuery


class QueryControl:
    """See JobControl in the package control."""

    def __init__(self, query: StreamQuery) -> None:
        self._query = query

    def job(self) -> JobReport:
        query, coordinator = self._query, self._query.coordinator
        rescale = query.last_rescale
        return JobReport(
            id=query.id,
            run_id=query.runId,
            name=query.name,
            checkpoint=coordinator.checkpoint,
            epoch=coordinator.committed_epoch,
            durable_epoch=coordinator.durable_epoch,
            route_version=coordinator.route.version,
            key_groups=coordinator.route.key_groups,
            workers=len(coordinator.members),
            migrating=coordinator.cluster.migrations.is_under_way,
            rescale=None if rescale is None else rescale.report(),
        )

    def stages(self) -> list[StageReport]:
        parallelism = self._query.coordinator.parallelism
        return [
            StageReport(
                number=stage.number,
                name=stage.name,
                stateful=stage.stateful,
                operations=list(stage.operations),
                parallelism=parallelism.get(stage.number, stage.parallelism or 0),
            )
            for stage in self._query.pipeline.stages
        ]

    def workers(self) -> list[WorkerReport]:
        cluster = self._query.coordinator.cluster
        serving = [
            replace(worker, state="draining" if cluster.is_leaving(WorkerId(worker.id)) else "serving")
            for worker in self._query.worker_reports()
        ]
        departing = [_brief(member, "draining") for member in cluster.departing]
        return [*serving, *departing, *(_brief(member, "joining") for member in cluster.pending_workers)]

    def route(self) -> RouteReport:
        route = self._query.coordinator.route
        position = {worker: index for index, worker in enumerate(route.workers)}
        return RouteReport(
            version=route.version,
            first_epoch=route.first_epoch,
            workers=list(route.workers),
            owners=[position[owner] for owner in route.owners],
            key_groups={worker: len(route.groups_of(worker)) for worker in route.workers},
        )

    def epochs(self, limit: int) -> list[EpochReport]:
        return self._query.epoch_reports()[-limit:][::-1]

    def migrations(self) -> list[MigrationReport]:
        return self._query.coordinator.cluster.migrations.reports()[::-1]

    def rescale(self, workers: int | None, parallelism: int | None, stage: int | str | None) -> RescaleReport:
        return self._query.rescale(workers, parallelism, stage).report()

    def scale_out(self, stage: int | str | None) -> RescaleReport:
        return self._query.scale_out(stage).report()

    def drain(self, worker: str) -> RescaleReport:
        return self._query.drain(worker).report()

    def join(self, address: str) -> WorkerReport:
        settings, cluster = self._query.settings, self._query.coordinator.cluster
        found = discover(
            [address],
            timeout_s=settings.request_timeout_s,
            start_timeout_s=settings.worker_timeout_s,
            credentials=Credentials.of(settings),
        ).all[0]
        for member in [*cluster.members.all, *cluster.pending_workers]:
            if (member.worker, member.address) == (found.worker, address):
                found.client.close()
                return WorkerReport(id=member.worker, address=address)
        if found.worker in {member.worker for member in cluster.departing}:
            raise EpochError(f"The worker {found.worker} is still leaving. Let it join when it has left.")
        expected = cluster.members.all[0].store or settings.store
        if found.store != expected:
            raise SettingsError(
                f"The worker {found.worker} keeps state in {found.store}, the others in {expected}. Start it with "
                f"--store {expected}."
            )
        self._query.strategy.check_join()
        cluster.join(found)
        return WorkerReport(id=found.worker, address=address)

    def savepoint(self, path: str) -> SavepointReport:
        return SavepointReport(epoch=self._query.savepoint(path), path=path)

    def stop(self) -> None:
        threading.Thread(target=self._query.stop, name="anabranch-stop", daemon=True).start()


def _brief(member: Member, state: WorkerState) -> WorkerReport:
    return WorkerReport(id=member.worker, address=member.address, state=state, key_groups=0, pid=member.pid)
