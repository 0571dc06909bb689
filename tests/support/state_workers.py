"""Several real state workers, and a driver for them that asks, over Flight, what the coordinator and tasks ask."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pytest
from pyarrow import flight

from anabranch.core import requests
from anabranch.core.answers import Assigned, HeldState, TransferProgress
from anabranch.core.errors import AnabranchError
from anabranch.core.ids import (
    NO_EPOCH,
    Attempt,
    Epoch,
    Generation,
    Partition,
    Run,
    RunId,
    StageAttempt,
    StageNumber,
    WorkerId,
)
from anabranch.core.requests import PeerOffer
from anabranch.core.state_files import ChangeFile
from anabranch.wire import messages
from anabranch.wire.client import WorkerClient, connections
from anabranch.wire.credentials import Credentials
from anabranch.wire.frames import unpack
from anabranch.worker.server.service import StateService
from anabranch.worker.stores import store_kind
from anabranch.worker.stores.options import StoreOptions
from anabranch.worker.transfer.group_ownership import GroupOwnership
from support.keyed_state import (
    KEY_GROUPS,
    KEYS,
    SPEC,
    STAGE,
    Entries,
    changes_to,
    entries,
    from_answers,
    group_of,
    keys_table,
)
from support.waiting import wait_until

A = TypeVar("A")

JOB = "0123456789abcdef0123456789abcdef"
CREDENTIALS = Credentials("secret")


def attempt_of(partition: int) -> StageAttempt:
    return StageAttempt(StageNumber(STAGE), Partition(partition), Attempt(0))


class Service(StateService):
    """A real worker that counts what it is asked, and can be held up."""

    def __init__(self, worker: str, stores: StoreOptions) -> None:
        super().__init__("127.0.0.1:0", worker=WorkerId(worker), stores=stores, credentials=CREDENTIALS)
        self.stores = stores
        self.asked: Counter[str] = Counter()
        #: The keys of every FetchKeys, and the groups of every FetchGroups.
        self.fetched_keys: list[str] = []
        self.fetched_groups: list[int] = []
        #: By kind of request: called before it is carried out.
        self.before: dict[str, Callable[[], Any]] = {}
        self._counting = threading.Lock()

    def do_action(self, context: Any, action: flight.Action) -> Iterator[flight.Result]:
        with self._counting:
            self.asked[action.type] += 1
            if action.type == "fetch_keys":
                self.fetched_keys += unpack(action.body)[1][messages.KEYS].column("k").to_pylist()
        self.before.get(action.type, lambda: None)()
        return super().do_action(context, action)

    def do_get(self, context: Any, ticket: flight.Ticket) -> flight.GeneratorStream:
        try:
            request = dict(json.loads(ticket.ticket))
        except (ValueError, TypeError, RecursionError):
            request = {}
        if request.get("recent"):
            with self._counting:
                self.asked["recent"] += 1
            return super().do_get(context, ticket)
        with self._counting:
            self.asked[str(request.get("kind"))] += 1
            self.fetched_groups += request.get("groups", [])
        self.before.get(str(request.get("kind")), lambda: None)()
        return super().do_get(context, ticket)

    @property
    def ownership(self) -> GroupOwnership:
        return self._jobs._jobs[JOB]._state.ownership


@dataclass
class Worker:
    """A worker and the driver's connection to it."""

    name: str
    address: str
    client: WorkerClient
    #: None if it runs in a process of its own.
    service: Service | None = None

    @property
    def local(self) -> Service:
        assert self.service is not None
        return self.service

    def ask(self, request: requests.Request[A]) -> A:
        return self.client.call(request)


@dataclass
class Driver:
    """Does what the coordinator does, one step at a time, and keeps a model of what the state should be."""

    checkpoint: str
    generation: int = 1
    workers: dict[str, Worker] = field(default_factory=dict)
    #: The owner of each key group.
    owners: tuple[str, ...] = ()
    model: dict[str, Entries] = field(default_factory=dict)
    #: Change files of all epochs.
    files: list[ChangeFile] = field(default_factory=list)
    epoch: Epoch = NO_EPOCH
    #: The generation and run that committed it.
    committed_by: RunId | None = None
    run: int = -1
    number: int = 0
    peer_timeout_ms: int = 10_000
    #: Whether state moves in the background as well.
    drain: bool = True
    heartbeat_ms: int = 0
    #: What the tasks of the epoch have written.
    staged: dict[str, Entries | None] = field(default_factory=dict)

    @property
    def job(self) -> dict[str, Any]:
        return {"job": JOB, "generation": self.generation}

    def add(self, worker: Worker) -> Worker:
        self.workers[worker.name] = worker
        return worker

    # --------------------------------------------------------------------------------------------- routes

    def give(self, owners: Mapping[int, str] | str, *, freeze: bool = True, to: Collection[str] | None = None) -> None:
        """Change the owners of these key groups (a name: of all), as Cluster.change does."""
        changed = dict.fromkeys(range(KEY_GROUPS), owners) if isinstance(owners, str) else owners
        before = self.owners
        self.owners = tuple(changed.get(g, before[g] if before else "") for g in range(KEY_GROUPS))
        self.number += 1
        for name in to or self.workers:
            self.open(self.workers[name])
        for name in to or self.workers:
            self.assign(self.workers[name], before if freeze else None)

    def open(self, worker: Worker) -> None:
        worker.ask(
            requests.OpenJob(
                **self.job,
                key_groups=KEY_GROUPS,
                committed_epoch=self.epoch,
                committed_by=self.committed_by,
                stages=(SPEC,),
                checkpoint=self.checkpoint,
                heartbeat_ms=self.heartbeat_ms,
            )
        )

    def assign(self, worker: Worker, before: tuple[str, ...] | None, **other: Any) -> Assigned:
        offers: dict[str, list[int]] = {}
        for group in self.groups_of(worker.name):
            former = self.workers.get(before[group]) if before else None
            if former is not None and former is not worker:
                offers.setdefault(former.address, []).append(group)
        numbers = {**self.job, "epoch": self.epoch, "number": self.number, **other}
        return worker.ask(
            requests.Assign(
                **numbers,
                groups=tuple(self.groups_of(worker.name)),
                snapshot=(),
                changes=tuple(self.files),
                freeze=before is not None,
                peers=tuple(PeerOffer(address=each, groups=tuple(groups)) for each, groups in offers.items()),
                peer_timeout_ms=self.peer_timeout_ms,
                drain=self.drain,
            )
        )

    def groups_of(self, worker: str) -> list[int]:
        return [group for group, owner in enumerate(self.owners) if owner == worker]

    def release(self) -> None:
        for worker in self.workers.values():
            worker.ask(requests.Release(**self.job, number=self.number))

    # --------------------------------------------------------------------------------------------- epochs

    @property
    def numbers(self) -> dict[str, Any]:
        return {**self.job, "epoch": self.epoch + 1, "run": self.run}

    @property
    def owning(self) -> list[Worker]:
        return [worker for name, worker in self.workers.items() if name in self.owners]

    def begin(self, drain_rows: int = 0) -> None:
        """An epoch begins. Nothing is brought in the background, unless it is told."""
        self.run += 1
        for worker in self.owning:
            worker.ask(requests.Begin(**self.numbers, drain_rows=drain_rows))

    def read(self, keys: Collection[str], **other: Any) -> dict[str, Entries]:
        """The state of these keys, from their owners."""
        found: dict[str, Entries] = {}
        for worker in self.owning:
            mine = [key for key in keys if self.owners[group_of(key)] == worker.name]
            if mine:
                request = requests.Read(**self.numbers, stage=STAGE, groups=(), **other)
                tables = worker.client.exchange(request, {messages.KEYS: keys_table(mine)})
                found |= from_answers(mine, tables)
        return found

    def write(self, changes: Mapping[str, Entries | None]) -> None:
        """Stage changes as one task for each worker, and seal them."""
        for partition, worker in enumerate(self.owning):
            mine = {key: value for key, value in changes.items() if self.owners[group_of(key)] == worker.name}
            self.write_to(worker, mine, partition)
        self.staged = dict(changes)

    def write_to(self, worker: Worker, changes: Mapping[str, Entries | None], partition: int = 0) -> None:
        request = requests.Write(**self.numbers, stage=STAGE, partition=partition, attempt=0, chunk=0, last=True)
        worker.client.exchange(request, changes_to(changes))

    def commit(self) -> None:
        """What is staged becomes durable, and part of the state."""
        owning, files = self.owning, []
        for partition, worker in enumerate(owning):
            assert worker.ask(requests.ReportSeals(**self.numbers)).attempts == {attempt_of(partition)}
            answer = worker.ask(requests.Prepare(**self.numbers, chosen=frozenset({attempt_of(partition)})))
            files += [file for _, file in answer.files]
        for worker in owning:
            worker.ask(requests.Commit(**self.numbers))
        self.files += files
        self.epoch = Epoch(self.epoch + 1)
        self.committed_by = RunId(Generation(self.generation), Run(self.run))
        for key, value in self.staged.items():
            self.model.pop(key, None)
            if value is not None:
                self.model[key] = value

    def finish(self) -> None:
        """End the epoch that runs, without changes."""
        self.write({})
        self.commit()

    def run_epoch(self, changes: Mapping[str, Entries | None], *, drain_rows: int = 0) -> None:
        """A whole epoch, in which every key is read before it is written, and is what it should be."""
        self.begin(drain_rows)
        assert self.read(list(changes)) == self.expected(changes)
        self.write(changes)
        self.commit()

    def expected(self, keys: Collection[str]) -> dict[str, Entries]:
        return {key: self.model[key] for key in keys if key in self.model}

    # --------------------------------------------------------------------------------------------- drains

    @contextmanager
    def without_drain_from(self, source: str) -> Iterator[Service]:
        """Lets no drain of this worker's key groups get on."""
        service, may_go_on = self.workers[source].local, threading.Event()
        service.before["fetch_groups"] = lambda: may_go_on.wait(30)
        yield service
        del service.before["fetch_groups"]
        may_go_on.set()

    # ----------------------------------------------------------------------------------------- questions

    def progress(self, worker: str) -> TransferProgress:
        return self.workers[worker].ask(requests.ReportProgress(**self.job))

    def describe(self, worker: str) -> HeldState:
        return self.workers[worker].ask(requests.Describe(**self.job))

    def rows(self, worker: str) -> int:
        return sum(variable.rows for variable in self.describe(worker).variables)

    def wait_until_all_has_arrived(self, *workers: str) -> None:
        wait_until(lambda: not any(self.progress(name).pending_groups for name in workers or self.workers))

    def scan(self, worker: str) -> dict[str, Entries]:
        """All that a worker says is its own."""
        tables = {}
        for name in SPEC.layouts:
            request = requests.Scan(**self.job, epoch=self.epoch, stage=STAGE, variable=name)
            batches = list(self.workers[worker].client.stream(request))
            tables[name] = pa.Table.from_batches(batches, schema=SPEC.layouts[name].rows)
        return from_answers([], tables)

    def scan_all(self) -> dict[str, Entries]:
        """The whole state. A key that two workers have is an error."""
        found: dict[str, Entries] = {}
        for worker in self.owning:
            part = self.scan(worker.name)
            assert not found.keys() & part.keys()
            found |= part
        return found

    def fetch_keys(self, worker: str, keys: Collection[str], *, as_of: int, variable: str = "total") -> pa.Table:
        request = requests.FetchKeys(**self.job, as_of=as_of, stage=STAGE, variable=variable)
        tables = self.workers[worker].client.exchange(request, {messages.KEYS: keys_table(keys)})
        return tables["entries"]

    def fetch_groups(self, worker: str, groups: Collection[int], *, as_of: int) -> list[str]:
        request = requests.FetchGroups(
            **self.job, as_of=as_of, stage=STAGE, variable="total", groups=tuple(sorted(groups))
        )
        return [key for batch in self.workers[worker].client.stream(request) for key in batch.column("k").to_pylist()]

    def close(self) -> None:
        for worker in self.workers.values():
            connections.forget(worker.address)
            with suppress(AnabranchError):
                worker.client.close()
            if worker.service is not None:
                worker.service.close()


def start(name: str, store: str, folder: Path) -> Worker:
    """A worker in this process."""
    directory = folder / name if store_kind(store).needs_directory else None
    service = Service(name, StoreOptions(store, directory))
    address = f"127.0.0.1:{service.port}"
    return Worker(name, address, WorkerClient(address, timeout_s=60, credentials=CREDENTIALS), service)


MakeDriver = Callable[..., Driver]


@contextmanager
def making(folder: Path) -> Iterator[MakeDriver]:
    """Makes jobs whose state is all on the first worker: in its store, and in a layer that is not folded."""
    made: list[Driver] = []

    def make(*names: str, store: str = "memory") -> Driver:
        driver = Driver(str(folder / "checkpoint"))
        made.append(driver)
        for name in names:
            driver.add(start(name, store, folder))
        driver.give(names[0], freeze=False)
        driver.run_epoch({key: entries(n) for n, key in enumerate(KEYS)})
        driver.run_epoch({key: entries(n + 1) if n % 2 else None for n, key in enumerate(KEYS[::3])})
        return driver

    yield make
    for driver in made:
        driver.close()


def owned_by(worker: str, groups: Collection[int]) -> dict[int, str]:
    return dict.fromkeys(groups, worker)


def changed(driver: Driver, keys: Collection[str]) -> dict[str, Entries | None]:
    """Something new for each key, and nothing any more for some."""
    return {key: None if n % 5 == 4 else entries(1000 + n + driver.epoch) for n, key in enumerate(keys)}


def fell_back(caplog: pytest.LogCaptureFixture) -> bool:
    return "comes from the checkpoint instead of its former owner" in caplog.text
