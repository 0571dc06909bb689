"""A job that lives in memory, for tests of its HTTP API: real routes over workers that are only names."""

import threading
from collections.abc import Callable
from typing import Any

from msgspec.structs import asdict, replace

from anabranch.core.errors import EpochError, SettingsError, UnsupportedError
from anabranch.core.ids import Epoch, WorkerId
from anabranch.core.membership_events import RescaleState
from anabranch.core.reports import (
    EpochReport,
    JobReport,
    MigrationReport,
    Moves,
    RescaleReport,
    RouteReport,
    SavepointReport,
    StageReport,
    WorkerReport,
)
from anabranch.core.routes import initial_route, moves, next_route
from support.epoch_reports import epoch_report

KEY_GROUPS = 64
STAGES = {1: "clicks", 3: "sessions"}


class MemoryJob:
    """Keeps the contract of JobControl. A look at the job brings half of the key groups that are on their way."""

    def __init__(self, workers: int = 2) -> None:
        self._lock = threading.RLock()
        self._addresses = {WorkerId(f"worker-{n}"): f"127.0.0.1:{7000 + n}" for n in range(1, workers + 1)}
        self._draining: set[WorkerId] = set()
        self._route = initial_route(list(self._addresses), KEY_GROUPS, Epoch(0))
        self._parallelism = dict.fromkeys(STAGES, 2)
        self._rescales: list[RescaleReport] = []
        #: Raised by whatever is asked next.
        self.fault: BaseException | None = None
        #: Called by `savepoint`, so that it can take as long as a test likes.
        self.on_savepoint: Callable[[], None] = lambda: None
        self.on_stop: Callable[[], None] = lambda: None
        self.stopped = threading.Event()
        self.savepoints: list[str] = []
        self.asked: list[tuple[Any, ...]] = []

    def job(self) -> JobReport:
        with self._lock:
            self._fail()
            rescale = self._rescales[-1] if self._rescales else None
            self._bring()
            return JobReport(
                id="job-1",
                run_id="run-1",
                name=None,
                checkpoint="/checkpoints/one",
                epoch=41,
                durable_epoch=41,
                key_groups=KEY_GROUPS,
                migrating=any(each.state == "migrating" for each in self._rescales),
                workers=len(self._addresses),
                route_version=self._route.version,
                rescale=rescale,
            )

    def stages(self) -> list[StageReport]:
        return [
            StageReport(number=n, name=name, stateful=True, operations=[], parallelism=self._parallelism[n])
            for n, name in STAGES.items()
        ]

    def workers(self) -> list[WorkerReport]:
        with self._lock:
            self._fail()
            return [self._worker(worker) for worker in self._addresses]

    def route(self) -> RouteReport:
        workers = list(self._route.workers)
        return RouteReport(
            version=self._route.version,
            first_epoch=self._route.first_epoch,
            workers=workers,
            owners=[workers.index(owner) for owner in self._route.owners],
            key_groups={worker: len(self._route.groups_of(worker)) for worker in workers},
        )

    def epochs(self, limit: int) -> list[EpochReport]:
        return [epoch_report(epoch) for epoch in range(41, max(41 - limit, -1), -1)]

    def migrations(self) -> list[MigrationReport]:
        with self._lock:
            return [
                MigrationReport(
                    **{name: value for name, value in asdict(each).items() if name in Moves.__struct_fields__},
                    number=each.number,
                    strategy="lazy",
                    route_version=1,
                    first_epoch=42,
                    started_at=1.5e9,
                    joined=[],
                    left=[],
                    done=each.state == "done",
                )
                for each in reversed(self._rescales)
            ]

    def rescale(self, workers: int | None, parallelism: int | None, stage: int | str | None) -> RescaleReport:
        with self._lock:
            self._fail()
            self.asked.append(("rescale", workers, parallelism, stage))
            for number in STAGES if stage is None else [self._stage(stage)]:
                self._parallelism[number] = parallelism or self._parallelism[number]
            for _ in range(workers - len(self._addresses) if workers else 0):
                self._add(f"127.0.0.1:{7001 + len(self._addresses)}")
            for worker in list(self._addresses)[workers:] if workers else []:
                del self._addresses[worker]
            return self._reroute(f"rescale to {len(self._addresses)} workers")

    def scale_out(self, stage: int | str | None) -> RescaleReport:
        with self._lock:
            self._fail()
            self.asked.append(("scale_out", stage))
            if stage is not None:
                self._parallelism[self._stage(stage)] += 1
            return self.rescale(len(self._addresses) + 1, None, None)

    def drain(self, worker: str) -> RescaleReport:
        with self._lock:
            if worker not in self._addresses:
                raise SettingsError(f"There is no worker {worker!r}. Workers: {', '.join(self._addresses)}.")
            if len(self._addresses) - len(self._draining) == 1:
                raise EpochError("The last worker cannot leave. Add one first.")
            self._draining.add(WorkerId(worker))
            return self._reroute(f"drain {worker}")

    def join(self, address: str) -> WorkerReport:
        with self._lock:
            self._fail()
            self.asked.append(("join", address))
            known = [worker for worker, of in self._addresses.items() if of == address]
            return self._worker(known[0] if known else self._add(address))

    def savepoint(self, path: str) -> SavepointReport:
        self.on_savepoint()
        self.savepoints.append(path)
        return SavepointReport(epoch=41, path=path)

    def stop(self) -> None:
        self.stopped.set()
        self.on_stop()

    def _add(self, address: str) -> WorkerId:
        worker = WorkerId(f"worker-{len(self._addresses) + 1}")
        self._addresses[worker] = address
        return worker

    def _reroute(self, what: str) -> RescaleReport:
        staying = [worker for worker in self._addresses if worker not in self._draining]
        before, self._route = self._route, next_route(self._route, staying, Epoch(42))
        moving = len(moves(before, self._route))
        self._rescales.append(
            RescaleReport(
                number=len(self._rescales),
                what=what,
                state=RescaleState.MIGRATING,
                message="",
                workers=len(staying),
                parallelism={},
                started_epoch=42,
                groups_moving=moving,
                groups_pending=moving,
                rows_fetched=0,
                rows_drained=0,
                bytes_fetched=0,
                bytes_drained=0,
                change_ms=0,
                seconds=0.5,
            )
        )
        return self._rescales[-1]

    def _bring(self) -> None:
        for number, each in enumerate(self._rescales):
            pending = each.groups_pending // 2
            state = each.state if pending else RescaleState.DONE
            self._rescales[number] = replace(each, groups_pending=pending, state=state)

    def _worker(self, worker: WorkerId) -> WorkerReport:
        return WorkerReport(
            id=worker,
            address=self._addresses[worker],
            state="draining" if worker in self._draining else "serving",
            key_groups=len(self._route.groups_of(worker)),
            rows=1234567,
            bytes=89_000_000,
            pid=4242,
        )

    def _stage(self, wanted: int | str) -> int:
        for number, name in STAGES.items():
            if wanted in (number, name):
                return number
        raise UnsupportedError(f"There is no stateful stage {wanted!r}. Stateful stages: {STAGES}.")

    def _fail(self) -> None:
        fault, self.fault = self.fault, None
        if fault is not None:
            raise fault
