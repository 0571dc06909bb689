"""Jobs whose workers share a Redis: key groups change hands half restored, and Redis goes away and comes back."""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from anabranch.core import requests
from anabranch.core.answers import SharedOffer
from anabranch.core.errors import WorkerError
from anabranch.wire.client import WorkerClient
from anabranch.worker.stores.options import StoreOptions
from anabranch.worker.stores.redis_connection import RedisConnection
from anabranch.worker.transfer.group_ownership import GroupOwnership
from support.keyed_state import KEY_GROUPS, KEYS, KEYS_OF_GROUP, entries
from support.redis_server import RedisServer, running_redis
from support.state_workers import CREDENTIALS, JOB, Driver, Service, Worker, changed, owned_by, wait_until

FIRST_HALF, SECOND_HALF = range(KEY_GROUPS // 2), range(KEY_GROUPS // 2, KEY_GROUPS)


@pytest.fixture
def server(request: pytest.FixtureRequest) -> Iterator[RedisServer]:
    with running_redis(*getattr(request, "param", ())) as server:
        yield server


@dataclass
class SharedDriver(Driver):
    """Changes owners as the coordinator does where workers share a store."""

    #: Where key groups are that workers have given up, until a change succeeds.
    offers: list[SharedOffer] = field(default_factory=list)
    #: Also those that were lost.
    every_worker: list[Worker] = field(default_factory=list)

    def add(self, worker: Worker) -> Worker:
        self.every_worker.append(worker)
        return super().add(worker)

    def give(self, owners: Mapping[int, str] | str, *, freeze: bool = True, to: Collection[str] | None = None) -> None:
        del freeze, to
        wanted = dict.fromkeys(range(KEY_GROUPS), owners) if isinstance(owners, str) else owners
        self.owners = tuple(wanted.get(g, self.owners[g] if self.owners else "") for g in range(KEY_GROUPS))
        self.number += 1
        for worker in self.workers.values():
            self.open(worker)
        for worker in self.workers.values():
            self.offers += self.hand_over(worker)
        for worker in self.workers.values():
            self.assign(worker, None, shared=tuple(self.offers))
        self.offers = []

    def hand_over(self, worker: Worker) -> tuple[SharedOffer, ...]:
        request = requests.HandOver(**self.job, epoch=self.epoch, number=self.number, keep=self.groups_of(worker.name))
        return worker.ask(request).offers

    def lose(self, name: str) -> None:
        """A worker ends without a word; its key groups are nobody's."""
        worker = self.workers.pop(name)
        worker.client.close()
        # Not as one that is told to end: it would clear its key groups away.
        worker.local.ownership.close()
        worker.local.shutdown()

    def broken(self) -> list[str]:
        """The workers that do not count the job among theirs: the coordinator opens it again there."""
        return [name for name, worker in self.workers.items() if JOB not in worker.ask(requests.Health()).jobs]


MakeShared = Callable[..., SharedDriver]


def started(name: str, url: str) -> Worker:
    service = Service(name, StoreOptions("redis", redis_url=url))
    address = f"127.0.0.1:{service.port}"
    return Worker(name, address, WorkerClient(address, timeout_s=60, credentials=CREDENTIALS), service)


@pytest.fixture
def make_shared(server: RedisServer, tmp_path: Path) -> Iterator[MakeShared]:
    made: list[SharedDriver] = []

    def make(*names: str) -> SharedDriver:
        driver = SharedDriver(str(tmp_path / "checkpoint"))
        made.append(driver)
        for name in names:
            driver.add(started(name, server.url))
        driver.give({group: names[group % len(names)] for group in range(KEY_GROUPS)})
        driver.run_epoch({key: entries(n) for n, key in enumerate(KEYS)})
        driver.run_epoch({key: entries(n + 1) if n % 2 else None for n, key in enumerate(KEYS[::3])})
        return driver

    yield make
    for driver in made:
        driver.close()
        for worker in driver.every_worker:
            connection = worker.local.stores.backend.connection
            assert connection is not None
            connection.close()


def run_epochs(driver: SharedDriver, count: int = 2) -> None:
    """Every key is what it should be, in so many epochs and afterwards."""
    for _ in range(count):
        driver.run_epoch(changed(driver, KEYS))
    assert driver.scan_all() == driver.model


# ------------------------------------------------------------------------------------- state that is on its way


def test_key_groups_change_hands_while_state_is_on_its_way(
    make_shared: MakeShared, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = make_shared("a", "b", "c")
    with monkeypatch.context() as patch:
        patch.setattr(GroupOwnership, "start_drain", lambda _: None)
        driver.lose("a")
        driver.give(owned_by("b", FIRST_HALF) | owned_by("c", SECOND_HALF))
        assert driver.progress("b").pending_groups > 0
        driver.run_epoch(changed(driver, [KEYS_OF_GROUP[group][0] for group in range(KEY_GROUPS)]))
        driver.give(owned_by("c", range(4)) | owned_by("b", range(12, 16)))
        assert driver.progress("b").pending_groups > 0
        driver.run_epoch(changed(driver, [KEYS_OF_GROUP[group][-1] for group in range(KEY_GROUPS)]))
    run_epochs(driver)
    driver.wait_until_all_has_arrived()
    assert driver.scan_all() == driver.model


# ------------------------------------------------------------------------------- a Redis that goes and comes back


def test_a_redis_that_comes_back_empty_is_filled_from_the_checkpoint(
    make_shared: MakeShared, server: RedisServer
) -> None:
    driver = make_shared("a", "b")
    server.kill()
    server.start()
    driver.begin()
    # The worker finds out when it reads, or when it folds the last epoch, which it does meanwhile.
    with pytest.raises(WorkerError, match=r"no longer has the state|could not apply the changes"):
        driver.read(KEYS)
    assert "a" in driver.broken()
    driver.give({})
    assert driver.broken() == []
    run_epochs(driver)


def test_a_redis_that_loses_its_state_in_the_middle_of_an_epoch_does_not_end_the_epoch(
    make_shared: MakeShared, server: RedisServer
) -> None:
    driver = make_shared("a", "b")
    driver.begin()
    new = changed(driver, KEYS)
    assert driver.read(KEYS) == driver.expected(KEYS)
    driver.write(new)
    server.kill()
    server.start()
    driver.commit()
    driver.give({})
    run_epochs(driver)


def test_a_redis_that_comes_back_empty_during_a_change_of_owners_is_filled(
    make_shared: MakeShared, server: RedisServer
) -> None:
    driver = make_shared("a", "b")
    server.kill()
    server.start()
    driver.give("a")
    run_epochs(driver)


def test_a_redis_that_comes_back_older_does_not_pass_for_what_was_handed_over(
    make_shared: MakeShared, server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = make_shared("a", "b")
    driver.run_epoch({})
    driver.give({})
    with server.client() as client:
        saved = {name: client.dump(name) for name in client.keys("*")}
        driver.run_epoch(changed(driver, KEYS))
        hand_over = SharedDriver.hand_over

        def go_back(each: SharedDriver, worker: Worker) -> tuple[SharedOffer, ...]:
            offers = hand_over(each, worker)
            if worker.name == "b":
                client.flushall()
                for name, content in saved.items():
                    client.restore(name, 0, content)
            return offers

        monkeypatch.setattr(SharedDriver, "hand_over", go_back)
        driver.give({group: "b" if owner == "a" else "a" for group, owner in enumerate(driver.owners)})
        monkeypatch.undo()
    run_epochs(driver)


@pytest.mark.parametrize("server", [("--appendonly", "yes", "--appendfsync", "always")], indirect=True)
def test_a_redis_that_comes_back_with_all_its_state_is_used_as_if_nothing_had_been(
    make_shared: MakeShared, server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    driver = make_shared("a", "b")
    driver.begin()
    server.kill()
    with ThreadPoolExecutor() as threads:
        answer = threads.submit(driver.read, KEYS)
        wait_until(lambda: "is tried again" in caplog.text)
        server.start()
        assert answer.result() == driver.expected(KEYS)
    driver.finish()
    assert driver.broken() == []
    run_epochs(driver)
    assert driver.progress("a").fetched_rows == 0


# ------------------------------------------------------------------------------------ calls that fail in the middle


def test_changes_that_redis_has_no_room_for_are_not_half_of_the_state(
    make_shared: MakeShared, server: RedisServer
) -> None:
    driver = make_shared("a", "b")
    with server.client() as client:
        client.config_set("maxmemory", "1mb")
        with pytest.raises(WorkerError, match=r"out of memory|could not apply|no longer has the state"):
            run_epochs(driver, 10)
        client.config_set("maxmemory", "0")
    assert driver.broken()
    driver.give({})
    run_epochs(driver)


def test_the_next_driver_clears_away_what_a_broken_worker_has_left(
    make_shared: MakeShared, server: RedisServer
) -> None:
    driver = make_shared("a", "b")
    wipe = requests.Wipe(**driver.job)
    with pytest.raises(WorkerError, match="takes part in the job"):
        driver.workers["a"].ask(wipe)
    with server.client() as client:
        client.flushall()
        with pytest.raises(WorkerError):
            run_epochs(driver)
        assert driver.broken() == ["a", "b"]
        client.set(f"anabranch:{JOB}:left", b"behind")
        driver.workers["a"].ask(wipe)
        assert client.keys() == []
    driver.give({})
    run_epochs(driver)


def test_what_a_worker_could_not_take_over_stays_whole_for_others(
    make_shared: MakeShared, server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = make_shared("a", "b")
    unlucky = driver.add(started("c", server.url))
    run, asked = RedisConnection.run, Counter[str]()

    def fail(connection: RedisConnection, commands: Any) -> list[Any]:
        if connection is unlucky.local.stores.backend.connection and commands and commands[0][0] == "EVALSHA":
            asked["EVALSHA"] += 1
            if asked["EVALSHA"] == 2:
                raise WorkerError("Redis is away.")
        return run(connection, commands)

    with monkeypatch.context() as patch:
        patch.setattr(RedisConnection, "run", fail)
        with pytest.raises(WorkerError, match="Redis is away"):
            driver.give("c")
    assert driver.broken() == ["c"]
    driver.give("a")
    unlucky.ask(requests.CloseJob(**driver.job))
    run_epochs(driver)


def test_key_groups_that_a_worker_failed_to_drop_are_restored_when_it_gets_them_back(
    make_shared: MakeShared, server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = make_shared("a", "b")
    run = RedisConnection.run

    def fail(connection: RedisConnection, commands: Any) -> list[Any]:
        if any(each[0] == "UNLINK" for each in commands):
            raise WorkerError("Redis is away.")
        return run(connection, commands)

    with monkeypatch.context() as patch:
        patch.setattr(GroupOwnership, "start_drain", lambda _: None)
        driver.lose("b")
        driver.give("a")
        driver.add(started("c", server.url))
        patch.setattr(RedisConnection, "run", fail)
        with pytest.raises(WorkerError, match="Redis is away"):
            driver.give("c")
    driver.give("a")
    run_epochs(driver)
