"""A job that lives in memory, for tests of its HTTP API: real routes over workers that are only names."""

import threading
from collections.abc import Callable
from typing import Any

from anabranch.core.errors import EpochError, SettingsError, UnsupportedError
from anabranch.core.ids import Epoch, WorkerId
from anabranch.core.routes import initial_route, moves, next_route

KEY_GROUPS = 64
STAGES = {1: "clicks", 3: "sessions"}
_MOVES = {
    **dict.fromkeys(("rowsFetched", "rowsDrained", "bytesFetched", "bytesDrained", "changeMs"), 0),
    "seconds": 0.5,
}
_CHANGE = {"strategy": "lazy", "routeVersion": 1, "firstEpoch": 42, "startedAt": 1.5e9, "joined": [], "left": []}
_REPORT = {
    **dict.fromkeys(("routeVersion", "durableEpoch", "changedRows", "changedBytes"), 0),
    **{name: [] for name in ("repairs", "changes", "changedVariables", "droppedRows")},
    "workers": 2,
    "migrating": False,
    "durationMs": {"sink": 7},
    "watermarkMs": None,
}


class MemoryJob:
    """Keeps the contract of JobControl. A look at the job brings half of the key groups that are on their way."""

    def __init__(self, workers: int = 2) -> None:
        self._lock = threading.RLock()
        self._addresses = {WorkerId(f"worker-{n}"): f"127.0.0.1:{7000 + n}" for n in range(1, workers + 1)}
        self._draining: set[WorkerId] = set()
        self._route = initial_route(list(self._addresses), KEY_GROUPS, Epoch(0))
        self._parallelism = dict.fromkeys(STAGES, 2)
        self._rescales: list[dict[str, Any]] = []
        #: Raised by whatever is asked next.
        self.fault: BaseException | None = None
        #: Called by `savepoint`, so that it can take as long as a test likes.
        self.on_savepoint: Callable[[], None] = lambda: None
        self.on_stop: Callable[[], None] = lambda: None
        self.stopped = threading.Event()
        self.savepoints: list[str] = []
        self.asked: list[tuple[Any, ...]] = []

    def job(self) -> dict[str, Any]:
        with self._lock:
            self._fail()
            rescale = dict(self._rescales[-1]) if self._rescales else None
            self._bring()
            return {
                "id": "job-1",
                "runId": "run-1",
                "name": None,
                "checkpoint": "/checkpoints/one",
                "epoch": 41,
                "durableEpoch": 41,
                "keyGroups": KEY_GROUPS,
                "migrating": any(each["state"] == "migrating" for each in self._rescales),
                "workers": len(self._addresses),
                "routeVersion": self._route.version,
                "rescale": rescale,
            }

    def stages(self) -> list[dict[str, Any]]:
        return [
            {"number": n, "name": name, "stateful": True, "operations": [], "parallelism": self._parallelism[n]}
            for n, name in STAGES.items()
        ]

    def workers(self) -> list[dict[str, Any]]:
        with self._lock:
            self._fail()
            return [self._worker(worker) for worker in self._addresses]

    def route(self) -> dict[str, Any]:
        owned = {worker: len(self._route.groups_of(worker)) for worker in self._route.workers}
        document = self._route.to_json()
        return {"firstEpoch": document.pop("first_epoch"), "keyGroups": owned, **document}

    def epochs(self, limit: int) -> list[dict[str, Any]]:
        return [{**_REPORT, "epoch": epoch, "run": epoch} for epoch in range(41, max(41 - limit, -1), -1)]

    def migrations(self) -> list[dict[str, Any]]:
        with self._lock:
            return [
                {**_MOVES, **_CHANGE, "done": each["state"] == "done"}
                | {name: each[name] for name in ("number", "groupsMoving", "groupsPending")}
                for each in reversed(self._rescales)
            ]

    def rescale(self, workers: int | None, parallelism: int | None, stage: int | str | None) -> dict[str, Any]:
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

    def scale_out(self, stage: int | str | None) -> dict[str, Any]:
        with self._lock:
            self._fail()
            self.asked.append(("scale_out", stage))
            if stage is not None:
                self._parallelism[self._stage(stage)] += 1
            return self.rescale(len(self._addresses) + 1, None, None)

    def drain(self, worker: str) -> dict[str, Any]:
        with self._lock:
            if worker not in self._addresses:
                raise SettingsError(f"There is no worker {worker!r}. Workers: {', '.join(self._addresses)}.")
            if len(self._addresses) - len(self._draining) == 1:
                raise EpochError("The last worker cannot leave. Add one first.")
            self._draining.add(WorkerId(worker))
            return self._reroute(f"drain {worker}")

    def join(self, address: str) -> dict[str, Any]:
        with self._lock:
            self._fail()
            self.asked.append(("join", address))
            known = [worker for worker, of in self._addresses.items() if of == address]
            return self._worker(known[0] if known else self._add(address))

    def savepoint(self, path: str) -> dict[str, Any]:
        self.on_savepoint()
        self.savepoints.append(path)
        return {"epoch": 41, "path": path}

    def stop(self) -> None:
        self.stopped.set()
        self.on_stop()

    def _add(self, address: str) -> WorkerId:
        worker = WorkerId(f"worker-{len(self._addresses) + 1}")
        self._addresses[worker] = address
        return worker

    def _reroute(self, what: str) -> dict[str, Any]:
        staying = [worker for worker in self._addresses if worker not in self._draining]
        before, self._route = self._route, next_route(self._route, staying, Epoch(42))
        moving = len(moves(before, self._route))
        number = len(self._rescales)
        self._rescales.append(
            {
                "number": number,
                "what": what,
                "state": "migrating",
                "message": "",
                "workers": len(staying),
                "parallelism": {},
                "startedEpoch": 42,
                **_MOVES,
                "groupsMoving": moving,
                "groupsPending": moving,
            }
        )
        return dict(self._rescales[-1])

    def _bring(self) -> None:
        for each in self._rescales:
            each["groupsPending"] //= 2
            if each["state"] == "migrating" and not each["groupsPending"]:
                each["state"] = "done"

    def _worker(self, worker: WorkerId) -> dict[str, Any]:
        return {
            "id": worker,
            "address": self._addresses[worker],
            "state": "draining" if worker in self._draining else "serving",
            "pid": 4242,
            "keyGroups": len(self._route.groups_of(worker)),
            "rows": 1234567,
            "bytes": 89_000_000,
        }

    def _stage(self, wanted: int | str) -> int:
        for number, name in STAGES.items():
            if wanted in (number, name):
                return number
        raise UnsupportedError(f"There is no stateful stage {wanted!r}. Stateful stages: {STAGES}.")

    def _fail(self) -> None:
        fault, self.fault = self.fault, None
        if fault is not None:
            raise fault
