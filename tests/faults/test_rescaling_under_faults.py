"""Workers, drivers and Redis that die in the middle of a rescale: what comes out is what an undisturbed run gives."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from soak import crashpoints
from soak.driver import start, state_of
from soak.jobs import JOBS, epochs_taken, make_files
from soak.places import Places, write_json
from soak.processes import Driver, Processes
from soak.verdict import judge

import anabranch
from anabranch.control.membership.cluster import Cluster
from anabranch.control.strategies.eager import EagerMigration
from anabranch.core.errors import SettingsError
from anabranch.core.ids import WorkerId
from anabranch.wire import keyring
from support.live_query import WAIT_S, LiveQuery, is_gone, wait_until, worker_process
from support.redis_server import RedisServer, running_redis

#: So long that nothing moves on an idle stream: only epochs start the drain then.
NEVER_S = 600


@pytest.fixture
def live(spark: SparkSession, tmp_path: Path) -> LiveQuery:
    return LiveQuery(spark, tmp_path)


@pytest.fixture(scope="module")
def redis_server() -> Iterator[RedisServer]:
    with running_redis() as server:
        yield server


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


# ------------------------------------------------------------------------------------------------- killed workers


@pytest.mark.parametrize(
    ("workers", "victims"),
    [
        pytest.param(3, ["worker-1"], id="a source that stays"),
        pytest.param(3, ["worker-3"], id="the target"),
        pytest.param(3, ["worker-2", "worker-3"], id="source and target"),
        pytest.param(1, ["worker-2"], id="a source that leaves"),
        pytest.param(1, ["worker-1"], id="the target of one that leaves"),
        pytest.param(1, ["worker-1", "worker-2"], id="all there are"),
    ],
)
def test_workers_killed_in_the_middle_of_a_migration_cost_nothing(
    live: LiveQuery, workers: int, victims: list[str]
) -> None:
    with live.running(workers=2, heartbeat=NEVER_S) as query:
        live.run(3)
        pids = {worker["id"]: worker["pid"] for worker in query.workers()}
        rescale = live.begin_rescale(workers=workers)
        pids |= {member.worker: member.pid for member in query.coordinator.members}
        for victim in victims:
            kill(pids[victim])
        live.run(3)
        live.finish(rescale)
        live.assert_exact()


@pytest.mark.parametrize(
    ("victim", "parallelism"),
    [
        pytest.param("worker-1", 2, id="a source"),
        pytest.param("worker-3", 2, id="the target", marks=pytest.mark.slow),  # as the next one, with less
        pytest.param("worker-3", 4, id="the target, with another parallelism"),
    ],
)
def test_a_worker_is_killed_while_an_epoch_waits_for_its_state(
    live: LiveQuery, monkeypatch: pytest.MonkeyPatch, victim: str, parallelism: int
) -> None:
    """Eager: the epoch after the change does not begin before all state is there."""
    follow = EagerMigration.follow
    victims = [victim]

    def killing(self: EagerMigration, cluster: Cluster) -> Any:
        while victims:
            kill(cluster.members.get(WorkerId(victims.pop())).pid)
        return follow(self, cluster)

    monkeypatch.setattr(EagerMigration, "follow", killing)
    with live.running(workers=2, parallelism=2, migration="eager", heartbeat=NEVER_S) as query:
        live.run(3)
        rescale = query.rescale(workers=3, parallelism=parallelism, stage=1)
        with live.flowing():
            assert rescale.wait(WAIT_S), rescale.progress()
            live.pass_epochs()
        live.assert_exact()
        assert victims == []
        assert query.coordinator.parallelism == {1: parallelism, 3: 2}


@pytest.mark.parametrize("flows", [True, False], ids=["rows flow", "an idle stream"])
def test_the_worker_that_another_one_was_to_hand_over_to_is_killed(live: LiveQuery, flows: bool) -> None:
    with live.running(workers=2, heartbeat=NEVER_S) as query:
        live.run(3)
        # No change is made before both have happened.
        with query._running.loop.running:
            rescale = query.drain("worker-1")
            kill(live.pid_of("worker-2"))
        if flows:
            live.run(2)
        else:
            wait_until(lambda: rescale.state != "waiting", "another worker has come, and is to have all")
        live.finish(rescale)
        assert [worker["id"] for worker in query.workers()] == ["worker-3"]
        live.assert_exact()


def test_a_rescale_that_is_under_way_when_the_query_ends_has_failed(live: LiveQuery) -> None:
    with live.running(workers=2, heartbeat=NEVER_S):
        live.run(3)
        rescale = live.begin_rescale(workers=3)
    assert not rescale.wait(5)
    assert rescale.state == "failed", "whoever waits for it without a limit would wait forever"


# What was new and what was there before are told apart by the epoch alone, whichever of the workers it is.
@pytest.mark.parametrize("victim", [pytest.param("worker-1", marks=pytest.mark.slow), "worker-3"])
def test_a_worker_with_state_in_redis_is_killed_after_a_rescale(
    live: LiveQuery, redis_server: RedisServer, victim: str
) -> None:
    """What it has written to Redis since the last epoch that counts must not be taken for state."""
    with live.running(workers=2, store="redis", redisUrl=redis_server.url) as query:
        live.run(3)
        live.rescale(workers=3)
        live.add(4)
        kill(live.pid_of(victim))
        query.processAllAvailable()
        live.assert_exact()


# ----------------------------------------------------------------------------------------- workers that stand still


@pytest.mark.parametrize(
    "leaves",
    [
        pytest.param(True, id="a source that leaves"),
        # Its state is fetched from where the other's is fetched; sources that stay are killed above.
        pytest.param(False, id="a source that stays", marks=pytest.mark.slow),
    ],
)
def test_a_source_stands_still_for_longer_than_it_may(live: LiveQuery, leaves: bool) -> None:
    """No query has started it, so it goes on afterwards, with what it knew."""
    with ExitStack() as workers:
        started = [workers.enter_context(worker_process("--id", f"else-{number}")) for number in range(3)]
        addresses = [ready["address"] for _, ready in started]
        source = started[1][0]
        given = addresses if leaves else addresses[:2]
        options = {"workerAddresses": ",".join(given), "heartbeat": 1, "workerTimeout": 2, "requestTimeout": 40}
        with live.running(**options) as query:
            live.run(3)
            if leaves:
                rescale = query.drain("else-1")
            else:
                post(query.url, "/workers", {"address": addresses[2]})
                rescale = None
            wait_until(lambda: query.coordinator.cluster.migrations.reports(), "the migration has begun")
            os.kill(source.pid, signal.SIGSTOP)
            live.run(2)
            wait_until(lambda: not query.coordinator.cluster.migrations.is_under_way, "all state has moved")
            os.kill(source.pid, signal.SIGCONT)
            live.run(2)
            if rescale is not None:
                assert rescale.state == "done"
            assert {member.worker for member in query.coordinator.members} == {"else-0", "else-2"}
            live.assert_exact()


def test_a_source_that_answers_again_in_time_is_used(live: LiveQuery) -> None:
    with live.running(workers=2, heartbeat=NEVER_S) as query:
        live.run(3)
        source = query.workers()[1]
        rescale = live.begin_rescale(workers=1)
        os.kill(source["pid"], signal.SIGSTOP)
        threading.Timer(2, os.kill, (source["pid"], signal.SIGCONT)).start()
        live.run(3)
        live.finish(rescale)
        wait_until(lambda: is_gone(source["pid"]), "the source has left")
        assert [change for change in query.coordinator.changes if change.lost] == []
        live.assert_exact()


# ----------------------------------------------------------------------------------------------------------- Redis


def test_a_query_whose_redis_is_gone_says_so_and_resumes_with_an_empty_one(live: LiveQuery) -> None:
    with running_redis() as server:
        options = {"workers": 2, "store": "redis", "redisUrl": server.url, "requestTimeout": 20}
        with live.running(**options) as query:
            live.run(3)
            server.kill()
            live.add()
            with pytest.raises(anabranch.AnabranchError, match=r"(?i)redis") as failure:
                query.processAllAvailable()
        assert f"127.0.0.1:{server.port}" in str(failure.value), failure.value
        server.start()
        with live.running(**options):
            live.run()
            live.rescale(workers=1)
            live.run()
            live.assert_exact()


def test_a_query_goes_on_when_redis_is_restarted_empty(live: LiveQuery) -> None:
    with running_redis() as server, live.running(workers=2, store="redis", redisUrl=server.url) as query:
        live.run(3)
        server.kill()
        server.start()
        live.run()
        # Once more, in the middle of whatever runs, and longer than one try takes.
        with live.flowing():
            live.pass_epochs()
            server.kill()
            live.add()
            server.start()
            live.pass_epochs()
        live.rescale(workers=3)
        live.run()
        live.assert_exact()
        assert len(query.workers()) == 3


# --------------------------------------------------------------------------------------------------------- drivers


def post(url: str, path: str, body: dict[str, Any]) -> Any:
    job = keyring.find(url)
    assert job is not None
    headers = {"content-type": "application/json", "authorization": f"Bearer {job.credentials.token}"}
    request = urllib.request.Request(url + path, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=WAIT_S) as response:
        return json.load(response)


@pytest.mark.slow
def test_drivers_that_crash_between_two_steps_of_a_rescale_lose_and_double_nothing(
    spark: SparkSession, tmp_path: Path
) -> None:
    """One driver after the other is asked for fewer workers, and crashes at the next point of that."""
    places, job = Places(tmp_path), JOBS["two-stages"]
    files = make_files(6, files=40, rows=40, keys=200)
    places.write_input(files)
    processes = Processes(places)
    try:
        for point in crashpoints.CHANGE_POINTS:
            driver = processes.start_driver(
                ["--job", job.name, "--option", "anabranch.workers=3", "--option", "anabranch.heartbeat=600"], point
            )
            ask_for_one_worker(driver, places)
            assert driver.process.wait(WAIT_S) == crashpoints.EXIT_CODE, driver.error()
    finally:
        processes.end()
    assert len(crashpoints.CHANGE_POINTS) <= places.committed_epochs() < len(files)
    query = start(spark, job, places, files_per_epoch=1)
    try:
        query.processAllAvailable()
        write_json(places.state, state_of(query, job))
    finally:
        query.stop()
    assert judge(spark, places, job.model(epochs_taken(files, places.checkpoint))).findings == ()


def ask_for_one_worker(driver: Driver, places: Places) -> None:
    """After an epoch, so that there is state to move."""
    committed = places.committed_epochs()
    wait_until(
        lambda: (driver.is_ready and places.committed_epochs() > committed) or driver.ended() is not None,
        "an epoch is committed",
    )
    assert driver.ended() is None, driver.error()
    post(places.url_of(driver.pid), "/rescale", {"workers": 1})


# ---------------------------------------------------------------------------------------------------- any sequence


def disturb(live: LiveQuery, draw: random.Random) -> Any:
    """A rescale or the end of a worker; the rescale, if it is one."""
    members = live.query.coordinator.members
    victim = draw.choice([(member.worker, member.pid) for member in members])
    try:
        match draw.choice(["workers", "workers", "workers", "parallelism", "balance", "drain", "kill", "kill", "term"]):
            case "workers":
                return live.query.rescale(workers=draw.randint(1, 4))
            case "parallelism":
                return live.query.rescale(parallelism=draw.randint(1, 5), stage=draw.choice([1, 3]))
            case "balance":
                return live.query.rescale()
            case "drain":
                return live.query.drain(victim[0])
            case "kill":
                kill(victim[1])
            case "term":
                os.kill(victim[1], signal.SIGTERM)
    except (SettingsError, ProcessLookupError):
        pass  # the last worker cannot leave; one that has ended cannot be killed
    return None


@pytest.mark.parametrize(
    ("seed", "options"),
    [
        # Eager rescales are disturbed above; epochs that are not durable yet are rescaled in test_rescaling.
        (1, {"snapshotEpochs": 2, "keepEpochs": 1}),
        pytest.param(2, {"migration": "eager", "store": "rocksdb"}, marks=pytest.mark.slow),
        (3, {"store": "redis", "snapshotEpochs": 3, "keepEpochs": 1}),
        pytest.param(4, {"checkpointInterval": 2, "routingCache": False}, marks=pytest.mark.slow),
    ],
)
def test_any_sequence_of_rescales_and_killed_workers_gives_what_an_undisturbed_run_gives(
    live: LiveQuery, redis_server: RedisServer, seed: int, options: dict[str, Any]
) -> None:
    draw = random.Random(seed)
    rescales = []
    settings = {"workers": 2, "heartbeat": 0.5, "workerTimeout": 5, "redisUrl": redis_server.url, **options}
    with live.running(**settings) as query:
        with live.flowing():
            for _ in range(8):
                live.pass_epochs(draw.randint(0, 2))
                rescales.append(disturb(live, draw))
        asked = [rescale for rescale in rescales if rescale is not None]
        wait_until(lambda: all(r.state in ("done", "replaced") for r in asked), "all rescales have ended")
        wait_until(lambda: not query.coordinator.cluster.migrations.is_under_way, "all state has moved")
        live.run(2)
        live.assert_exact()
