"""What a running query offers to its HTTP API."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from anabranch.control.membership.members import Member, discover
from anabranch.core.errors import EpochError, SettingsError
from anabranch.wire.credentials import Credentials

if TYPE_CHECKING:
    from anabranch.api.query import StreamQuery


class QueryControl:
    """See JobControl in the package control."""

    def __init__(self, query: StreamQuery) -> None:
        self._query = query

    def job(self) -> dict[str, Any]:
        query, coordinator = self._query, self._query.coordinator
        rescale = query.last_rescale
        return {
            "id": query.id,
            "runId": query.runId,
            "name": query.name,
            "checkpoint": coordinator.checkpoint,
            "epoch": coordinator.committed_epoch,
            "durableEpoch": coordinator.durable_epoch,
            "routeVersion": coordinator.route.version,
            "keyGroups": coordinator.route.key_groups,
            "workers": len(coordinator.members),
            "migrating": coordinator.cluster.migrations.is_under_way,
            "rescale": None if rescale is None else rescale.progress(),
        }

    def stages(self) -> list[dict[str, Any]]:
        coordinator = self._query.coordinator
        return [
            {
                "number": int(stage.number),
                "name": stage.name,
                "stateful": stage.stateful,
                "operations": list(stage.operations),
                "parallelism": coordinator.parallelism.get(stage.number, stage.parallelism or 0),
            }
            for stage in self._query.pipeline.stages
        ]

    def workers(self) -> list[dict[str, Any]]:
        cluster = self._query.coordinator.cluster
        serving = [
            {**worker, "state": "draining" if cluster.is_leaving(worker["id"]) else "serving"}
            for worker in self._query.workers()
        ]
        departing = [_brief(member, "draining") for member in cluster.departing]
        return [*serving, *departing, *(_brief(member, "joining") for member in cluster.pending_workers)]

    def route(self) -> dict[str, Any]:
        route = self._query.coordinator.route
        return {
            "version": route.version,
            "firstEpoch": route.first_epoch,
            "workers": list(route.workers),
            "owners": route.to_json()["owners"],
            "keyGroups": {worker: len(route.groups_of(worker)) for worker in route.workers},
        }

    def epochs(self, limit: int) -> list[dict[str, Any]]:
        return [dict(report) for _, report in list(self._query.epoch_reports())[-limit:]][::-1]

    def migrations(self) -> list[dict[str, Any]]:
        return self._query.coordinator.cluster.migrations.to_json()[::-1]

    def rescale(self, workers: int | None, parallelism: int | None, stage: int | str | None) -> dict[str, Any]:
        return self._query.rescale(workers, parallelism, stage).progress()

    def scale_out(self, stage: int | str | None) -> dict[str, Any]:
        return self._query.scale_out(stage).progress()

    def drain(self, worker: str) -> dict[str, Any]:
        return self._query.drain(worker).progress()

    def join(self, address: str) -> dict[str, Any]:
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
                return {"id": member.worker, "address": address}
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
        return {"id": found.worker, "address": address}

    def savepoint(self, path: str) -> dict[str, Any]:
        return {"epoch": self._query.savepoint(path), "path": path}

    def stop(self) -> None:
        threading.Thread(target=self._query.stop, name="anabranch-stop", daemon=True).start()


def _brief(member: Member, state: str) -> dict[str, Any]:
    return {"id": member.worker, "address": member.address, "pid": member.pid, "keyGroups": 0, "state": state}
