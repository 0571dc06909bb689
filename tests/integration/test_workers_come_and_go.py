"""Workers that join and leave a running query, by its handle, over HTTP, from a terminal and by signals."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest
from pyspark.sql import SparkSession

from anabranch import cli
from anabranch.control.http.endpoints import description
from anabranch.control.membership import change as changing
from anabranch.control.membership import launcher
from anabranch.control.membership.fork_server import FORK_SERVER
from anabranch.core.errors import SettingsError, UnsupportedError
from anabranch.core.ids import WorkerId
from anabranch.core.reports import (
    ChangeReport,
    EpochReport,
    JobReport,
    JsonReport,
    MigrationReport,
    RescaleReport,
    RouteReport,
    StageReport,
    StatusReport,
    WorkerReport,
    properties,
)
from anabranch.core.requests import OpenJob, Request
from anabranch.core.settings import DEFAULT_CONTROL_PORT
from anabranch.wire import keyring
from anabranch.wire.client import WorkerClient
from support.described import assert_described
from support.live_query import WAIT_S, LiveQuery, is_gone, wait_until, worker_process
from support.redis_server import running_redis

Run = Callable[..., tuple[int, str, str]]

DEFAULT_URL = f"http://127.0.0.1:{DEFAULT_CONTROL_PORT}"


@pytest.fixture
def live(spark: SparkSession, tmp_path: Path) -> LiveQuery:
    return LiveQuery(spark, tmp_path)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs ``anabranch``, and gives its exit code, standard output and standard error."""
    monkeypatch.delenv("ANABRANCH_TOKEN", raising=False)

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["anabranch", *arguments])
        code: Any = 0
        try:
            cli.main()
        except SystemExit as end:
            code = end.code or 0
        said = capsys.readouterr()
        return code, said.out, said.err

    return call


def ask(url: str, path: str, body: dict[str, Any] | None = None, method: str | None = None) -> tuple[int, Any]:
    """Status and document of an answer, as curl gets them."""
    data = None if body is None else json.dumps(body).encode()
    found = keyring.find(url)
    secret = {} if found is None else {"authorization": f"Bearer {found.credentials.token}"}
    request = urllib.request.Request(url + path, data, {"content-type": "application/json", **secret}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=WAIT_S) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read())


def has_left(live: LiveQuery, worker: str) -> bool:
    """Whether tasks do not ask it any more."""
    return worker not in live.query.coordinator.cluster.routing.workers


# --------------------------------------------------------------------------------------------------- the handle


def test_an_added_worker_takes_load_and_a_removed_one_exits(live: LiveQuery) -> None:
    with live.running(workers=2) as query:
        with live.flowing():
            live.pass_epochs()
            live.rescale(workers=3)
            live.pass_epochs(3)
            added = query.workers()[-1]
            assert added["keyGroups"] > 0
            assert added["load"] > 0
            assert added["rows"] > 0
            live.rescale(workers=2)
            assert has_left(live, added["id"])
            wait_until(lambda: is_gone(added["pid"]), "its process is gone")
            drained = query.workers()[0]
            handle = query.drain(drained["id"])
            assert handle.wait(WAIT_S), handle.progress()
            wait_until(lambda: is_gone(drained["pid"]), "the drained worker's process is gone")
            live.pass_epochs()
        assert [worker["id"] for worker in query.workers()] == ["worker-2"]
        assert query.workers()[0]["frozenGroups"] == 0
        live.assert_exact()


@pytest.mark.parametrize("heartbeat", [0.2, 600], ids=["noticed at once", "noticed late"])
def test_a_rescale_whose_workers_cannot_be_started_has_failed(
    live: LiveQuery, monkeypatch: pytest.MonkeyPatch, heartbeat: float
) -> None:
    with live.running(workers=1, heartbeat=heartbeat) as query:
        live.run(2)
        with monkeypatch.context() as patch:
            FORK_SERVER.close()
            patch.setattr(FORK_SERVER, "_command", ["/bin/false"])
            rescale = query.rescale(workers=2)
            assert not rescale.wait(10)
            assert "A state worker failed to start" in rescale.progress()["message"]
            live.run()
        assert len(query.workers()) == 1
        with live.flowing():
            live.rescale(workers=2)
        assert len(query.workers()) == 2
        live.assert_exact()


# -------------------------------------------------------------------------------------- workers that join by themselves


@pytest.mark.parametrize("flows", [True, False], ids=["rows flow", "an idle stream"])
def test_a_worker_joins_takes_load_and_hands_over_when_it_is_told_to_stop(live: LiveQuery, flows: bool) -> None:
    with live.running(workers=2) as query:
        live.run(3)
        with worker_process("--join", query.url.removeprefix("http://"), "--id", "guest") as (process, ready):

            def visit() -> None:
                wait_until(lambda: not has_left(live, "guest"), "the worker takes part")
                if flows:
                    live.pass_epochs(3)
                    guest = query.workers()[-1]
                    assert guest["load"] > 0
                    assert guest["keyGroups"] > 0
                    assert guest["address"] == ready["address"]
                process.send_signal(signal.SIGTERM)
                assert process.wait(WAIT_S) == 0
                assert has_left(live, "guest")

            if flows:
                with live.flowing():
                    visit()
                    live.pass_epochs()
            else:
                visit()
        assert sum(worker["keyGroups"] for worker in query.workers()) == 1024
        assert len(query.workers()) == 2
        assert [repair for report in query.epoch_reports() for repair in report.repairs] == []
        live.run()
        live.assert_exact()


def test_a_query_moves_from_workers_that_were_started_elsewhere_to_others(live: LiveQuery) -> None:
    """The way to new machines: new workers join, old ones are told to stop, and the query notices nothing."""
    with ExitStack() as workers:
        one, first = workers.enter_context(worker_process("--id", "old-1"))
        two, second = workers.enter_context(worker_process("--id", "old-2"))
        with live.running(workerAddresses=f"{first['address']},{second['address']}") as query:
            live.run(2)
            with pytest.raises(SettingsError, match=r"starts no workers itself, so it cannot have 3.*worker --join"):
                query.rescale(workers=3)
            workers.enter_context(worker_process("--join", query.url, "--id", "new"))
            with live.flowing():
                wait_until(lambda: not has_left(live, "new"), "the new worker takes part")
                for process in (one, two):
                    process.send_signal(signal.SIGTERM)
                assert [process.wait(WAIT_S) for process in (one, two)] == [0, 0]
                live.pass_epochs()
            (left,) = query.workers()
            assert (left["id"], left["keyGroups"]) == ("new", 1024)
            live.assert_exact()


def test_a_worker_that_was_drained_ends_if_it_had_joined_and_else_says_that_it_is_free(live: LiveQuery) -> None:
    with ExitStack() as workers:
        _, first = workers.enter_context(worker_process("--id", "named-1"))
        named, second = workers.enter_context(worker_process("--id", "named-2"))
        with live.running(workerAddresses=f"{first['address']},{second['address']}") as query:
            live.run(2)
            joined, _ = workers.enter_context(worker_process("--join", query.url, "--id", "guest"))
            wait_until(lambda: not has_left(live, "guest"), "the worker takes part")
            for worker in ("guest", "named-2"):
                assert query.drain(worker).wait(WAIT_S)
            assert joined.wait(WAIT_S) == 0
            assert named.stderr is not None
            said = named.stderr.readline()
            assert b"the worker named-2 has handed over all that it had of the job" in said
            assert f"It stays free for others at {second['address']}".encode() in said
            assert named.poll() is None
            live.run()
            live.assert_exact()


def test_a_worker_that_cannot_join_says_why_and_the_query_goes_on(live: LiveQuery) -> None:
    with live.running(workers=1) as query:
        live.run(2)
        with worker_process("--id", "worker-1", "--join", query.url) as (process, _):
            assert process.wait(WAIT_S) == 1
            said = process.stderr.read().decode()
            assert re.search(r"id 'worker-1' takes part already\..*another --id", said), said
        with worker_process("--id", "guest", "--join", query.url + "/job") as (process, _):
            assert process.wait(WAIT_S) == 1
            assert "is not the address of a job. Write --join HOST:PORT" in process.stderr.read().decode()
        live.run()
        live.assert_exact()


def test_a_worker_with_another_store_cannot_join(live: LiveQuery) -> None:
    with running_redis() as server, live.running(workers=1, store="redis", redisUrl=server.url) as query:
        live.run(2)
        with worker_process("--id", "guest", "--join", query.url) as (process, _):
            wait_until(lambda: process.poll() is not None or query.coordinator.cluster.wanted > 1, "asked")
            live.run()
            live.assert_exact()
            assert process.wait(WAIT_S) == 1
            assert "--store" in process.stderr.read().decode()


def test_the_last_worker_stays_until_it_is_told_twice(live: LiveQuery) -> None:
    with worker_process("--id", "only") as (process, ready), live.running(workerAddresses=ready["address"]) as query:
        live.run(2)
        process.send_signal(signal.SIGTERM)
        live.run(2)
        live.assert_exact()
        with pytest.raises(SettingsError, match=r"only is the last worker. Add another one first"):
            query.drain("only")
        process.send_signal(signal.SIGTERM)
        assert process.wait(WAIT_S) == 0


def test_a_worker_that_is_told_to_stop_takes_nobody_with_it(live: LiveQuery, monkeypatch: pytest.MonkeyPatch) -> None:
    """The heartbeat looks at the workers at any time, so also while key groups are handed out."""
    announced_ms, call = [], WorkerClient.call

    def note_heartbeat(client: WorkerClient, request: Request, *other: Any, **named: Any) -> Any:
        announced_ms.extend([request.heartbeat_ms] if isinstance(request, OpenJob) else [])
        return call(client, request, *other, **named)

    monkeypatch.setattr(WorkerClient, "call", note_heartbeat)
    with live.running(workers=3, heartbeat=600) as query:
        assert announced_ms == [600_000] * 3, "so long a worker that is to go waits for the next look at it"
        live.run(2)
        told = query.workers()[1]
        os.kill(told["pid"], signal.SIGTERM)
        cluster_of_query, carry_out = query.coordinator.cluster, changing.carry_out

        def look_meanwhile(*arguments: Any) -> None:
            cluster_of_query.report_leaving(WorkerId(told["id"]))
            carry_out(*arguments)

        monkeypatch.setattr(changing, "carry_out", look_meanwhile)
        cluster_of_query.report_leaving(WorkerId(told["id"]))
        with live.flowing():
            wait_until(lambda: is_gone(told["pid"]), "the worker has left")
            live.pass_epochs(3)
        assert [worker["id"] for worker in query.workers()] == ["worker-1", "worker-3"]
        live.assert_exact()


# ------------------------------------------------------------------------------------------------------- over HTTP


def test_capacity_is_added_with_one_get_and_again_while_that_still_waits(
    live: LiveQuery, monkeypatch: pytest.MonkeyPatch
) -> None:
    with live.running(workers=1, parallelism=2) as query:
        may_start, start = threading.Event(), launcher.EmbeddedWorkers.start

        def start_later(*arguments: Any) -> Any:
            assert may_start.wait(WAIT_S)
            return start(*arguments)

        monkeypatch.setattr(launcher.EmbeddedWorkers, "start", start_later)
        with live.flowing():
            status, begun = ask(query.url, "/scale?stage=3")
            assert (status, begun["workers"], begun["parallelism"]) == (200, 2, {"3": 3})
            status, again = ask(query.url, "/scale?stage=3")
            assert (status, again["workers"], again["parallelism"]) == (200, 3, {"3": 4})
            status, other = ask(query.url, "/scale?stage=1")
            assert (status, other["workers"], other["parallelism"]) == (200, 4, {"1": 3, "3": 4})
            assert other["state"] == "waiting"
            may_start.set()
            wait_until(lambda: ask(query.url, "/job")[1]["rescale"]["state"] == "done", "all state has moved")
            live.pass_epochs()
        stages = {stage["number"]: stage["parallelism"] for stage in ask(query.url, "/stages")[1] if stage["stateful"]}
        assert stages == {1: 3, 3: 4}
        assert [worker["state"] for worker in ask(query.url, "/workers")[1]] == ["serving"] * 4
        assert sum(ask(query.url, "/route")[1]["keyGroups"].values()) == 1024
        (migration,) = ask(query.url, "/migrations")[1]
        assert migration["done"]
        assert sorted(migration["joined"]) == ["worker-2", "worker-3", "worker-4"]
        assert 0 < migration["groupsMoving"] < 1024
        assert [epoch["epoch"] for epoch in ask(query.url, "/epochs?limit=3")[1]] == sorted(live.epochs)[:-4:-1]
        for begun_now in (begun, again, other):
            assert_described("GET", "/scale", status, begun_now)
        assert_answers_are_described(query)
        live.assert_exact()


def assert_answers_are_described(query: Any) -> None:
    """All that is read of a job, and what changes it without waiting for an epoch."""
    for path in [path for path, item in description()["paths"].items() if "get" in item and path != "/scale"]:
        assert_described("GET", path, *ask(query.url, path))
    assert_every_field_is_told(query)
    checkpoint = ask(query.url, "/job")[1]["checkpoint"]
    assert (Path(checkpoint) / "commits").is_dir()
    assert [stage["stateful"] for stage in ask(query.url, "/stages")[1]] == [False, True, False, True]
    drained, workers = query.workers()[-1]["id"], len(query.workers())
    for path, template, body in (
        ("/rescale", "/rescale", {"workers": workers, "parallelism": 2}),
        ("/scale", "/scale", {}),
        (f"/workers/{drained}/drain", "/workers/{worker}/drain", {}),
        ("/workers", "/workers", {"address": query.workers()[0]["address"]}),
    ):
        assert_described("POST", template, *ask(query.url, path, body))
    assert_described("GET", "/workers", *ask(query.url, "/workers"))
    last = query.last_rescale
    assert last.wait(WAIT_S), last.progress()
    assert_described("GET", "/migrations", *ask(query.url, "/migrations"))
    assert len(query.workers()) == workers


def assert_every_field_is_told(query: Any) -> None:
    """Reports declare no field that a query does not tell: those of late rows need late rows."""
    index = ask(query.url, "/")[1]["job"]
    told: dict[type[JsonReport], list[Any]] = {
        JobReport: [index, ask(query.url, "/job")[1]],
        RescaleReport: [index["rescale"], query.last_rescale.progress()],
        StageReport: ask(query.url, "/stages")[1],
        WorkerReport: ask(query.url, "/workers")[1],
        RouteReport: [ask(query.url, "/route")[1]],
        MigrationReport: ask(query.url, "/migrations")[1],
        EpochReport: [*ask(query.url, "/epochs?limit=1000")[1], query.lastProgress["anabranch"]],
        StatusReport: [query.status["anabranch"]],
    }
    for kind, reports in told.items():
        declared = set(properties(kind)) - {"lateRows"}
        assert [set(report) for report in reports] == [declared] * len(reports), kind
        assert reports
    changes = [change for epoch in told[EpochReport] for change in epoch["changes"]]
    assert changes
    assert all(set(change) == set(properties(ChangeReport)) for change in changes)
    assert [set(worker) | {"state"} for worker in query.workers()] == [set(properties(WorkerReport))] * 4


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("/rescale", {"workers": 0}, 400, "workers is 0; it must be a whole number from 1 to 1024"),
        ("/rescale", {"workers": "four"}, 400, "workers is 'four'"),
        ("/rescale", {}, 400, "workers.*parallelism"),
        ("/rescale", {"stage": 3}, 400, "workers.*parallelism"),
        ("/rescale", {"parallelism": 2, "stage": 2}, 400, r"no stateful stage 2. Stateful stages: 1 .*, 3 "),
        ("/rescale", {"parallelism": 2, "stage": "clicks"}, 400, "no stateful stage 'clicks'"),
        ("/rescale", {"workers": 4, "stage": 3}, 400, "stage is named, but no parallelism"),
        (
            "/rescale",
            {"workers": 8},
            400,
            "8 workers are not possible: .* at most 4, as many as",
        ),
        ("/scale?stage=77", None, 400, "no stateful stage 77"),
        ("/scale", None, 400, "stage is missing"),
        ("/workers/worker-9/drain", {}, 400, "no worker 'worker-9' that could leave. Workers: worker-1"),
        ("/workers/worker-1/drain", {}, 400, "worker-1 is the last worker. Add another one first"),
        ("/workers", {"address": "here"}, 400, "address is 'here'; it must be host:port"),
        ("/workers", {"address": "127.0.0.1:9"}, 503, "127.0.0.1:9"),
        ("/nowhere", None, 404, "nowhere"),
        ("/rescale", None, 405, "/rescale does not know GET. Use POST"),
    ],
)
def test_wrong_requests_are_refused_with_a_sentence(
    shared_query: LiveQuery, path: str, body: Any, status: int, message: str
) -> None:
    code, answer = ask(shared_query.query.url, path, body)
    assert code == status, answer
    assert_matches(message, answer["error"])
    assert_described("POST", "/rescale", code, answer)  # errors are the same everywhere


def assert_matches(pattern: str, text: str) -> None:
    with pytest.raises(ValueError, match=pattern):
        raise ValueError(text)


@pytest.fixture(scope="module")
def shared_query(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A running query of one worker and four key groups, which nobody gets to change."""
    live = LiveQuery(spark, tmp_path_factory.mktemp("shared"))
    with live.running(workers=1, keyGroups=4, parallelism=2, workerTimeout=2) as query:
        live.run(2)
        yield live
        assert [worker["id"] for worker in query.workers()] == ["worker-1"]
        assert query.coordinator.parallelism == {1: 2, 3: 2}
        live.run()
        live.assert_exact()


# -------------------------------------------------------------------------------------------------- wrong arguments


@pytest.mark.parametrize(
    ("wanted", "error", "message"),
    [
        ({"workers": 0}, UnsupportedError, "workers is 0; it must be a whole number from 1"),
        ({"workers": -1}, UnsupportedError, "workers is -1"),
        ({"workers": 2.0}, UnsupportedError, r"workers is 2\.0"),
        ({"workers": True}, UnsupportedError, "workers is True"),
        ({"workers": "four"}, UnsupportedError, "workers is 'four'; it must be a whole number"),
        ({"workers": 5}, SettingsError, "5 workers are not possible: .* at most 4, as many as the job has key groups"),
        ({"parallelism": 0}, UnsupportedError, "parallelism is 0"),
        ({"parallelism": "two", "stage": 1}, UnsupportedError, "parallelism is 'two'"),
        ({"parallelism": 2, "stage": 9}, UnsupportedError, "no stateful stage 9. Stateful stages: 1 .*, 3 "),
        ({"parallelism": 2, "stage": "stage2"}, UnsupportedError, "no stateful stage 'stage2'"),
        ({"parallelism": 2, "stage": 0}, UnsupportedError, "no stateful stage 0"),
        ({"stage": 1}, UnsupportedError, "A stage is named, but no parallelism for it"),
        ({"workers": 2, "stage": "stage1"}, UnsupportedError, "A stage is named, but no parallelism for it"),
    ],
)
def test_a_rescale_that_makes_no_sense(
    shared_query: LiveQuery, wanted: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        shared_query.query.rescale(**wanted)


def test_a_drain_that_makes_no_sense(shared_query: LiveQuery) -> None:
    with pytest.raises(SettingsError, match=r"no worker 'nobody' that could leave. Workers: worker-1"):
        shared_query.query.drain("nobody")
    with pytest.raises(SettingsError, match="worker-1 is the last worker"):
        shared_query.query.drain("worker-1")


def test_a_query_that_has_ended_cannot_be_rescaled(live: LiveQuery) -> None:
    with live.running(workers=1) as query:
        live.run()
        url = query.url
    for call in (lambda: query.rescale(workers=2), lambda: query.drain("worker-1"), query.workers):
        with pytest.raises(UnsupportedError, match="The query has ended, and its workers with it"):
            call()
    assert query.url is None
    with pytest.raises(urllib.error.URLError):
        ask(url, "/job")


def test_rescales_that_wait_when_the_query_ends_have_failed(live: LiveQuery) -> None:
    with live.running(workers=1) as query:
        live.run()
        rescale = query.rescale(workers=4)
    assert not rescale.wait(WAIT_S)
    assert rescale.progress()["state"] in ("failed", "migrating")
    assert rescale.state == "failed"


# -------------------------------------------------------------------------------------------------- the control port


def test_a_control_port_that_is_taken(live: LiveQuery) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        before = worker_pids(), {query.id for query in live.spark.streams.active}
        live.add(2)
        with (
            pytest.raises(SettingsError, match=rf"Port {port} on 127.0.0.1 is in use.*anabranch.controlPort"),
            live.running(controlPort=port),
        ):
            pass
        assert (worker_pids(), {query.id for query in live.spark.streams.active}) == before
    with live.running(controlPort=port) as query:
        assert query.url == f"http://127.0.0.1:{port}"
        query.processAllAvailable()
        live.assert_exact()


def test_without_a_port_of_their_own_queries_find_one_each(spark: SparkSession, tmp_path: Path) -> None:
    one, two = LiveQuery(spark, tmp_path / "one", "aggregate"), LiveQuery(spark, tmp_path / "two", "aggregate")
    default = {"workers": 1, "controlPort": None}
    with one.running(**default) as first, two.running(**default) as second:
        assert first.url == DEFAULT_URL or is_taken(DEFAULT_CONTROL_PORT), "by a job of somebody else"
        assert second.url not in (first.url, DEFAULT_URL)
        for live in (one, two):
            live.run()
            assert ask(live.query.url, "/job")[1]["id"] == live.query.id
    with one.running(workers=1, controlPort=-1) as query:
        assert query.url is None
        one.rescale(workers=2)


def is_taken(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return True
        return False


def worker_pids() -> set[int]:
    found = set()
    for child in psutil.Process().children(recursive=True):
        try:
            if "anabranch" in child.cmdline() and child.status() != psutil.STATUS_ZOMBIE:
                found.add(child.pid)
        except psutil.NoSuchProcess:
            continue
    return found


# ----------------------------------------------------------------------------------------------------- in a terminal


def test_a_running_query_is_controlled_from_a_terminal(live: LiveQuery, run: Run) -> None:
    with live.running(workers=1, parallelism=2) as query:
        where = ("--url", query.url)
        with live.flowing():
            live.pass_epochs()
            code, out, err = run("status", *where)
            assert (code, err) == (0, "")
            job = f"Job {query.id} with the checkpoint {live.places.checkpoint}"
            assert f"{job}: epoch" in out
            assert "1 worker, route version 0" in out
            code, out, _ = run("scale", "--wait", "--json", *where)
            assert (code, json.loads(out)["state"], len(query.workers())) == (0, "done", 2)
            code, out, _ = run(
                "scale", "--workers", "3", "--parallelism", "4", "--stage", "3", "--wait", "--json", *where
            )
            assert (code, json.loads(out)["parallelism"], len(query.workers())) == (0, {"3": 4}, 3)
            code, out, _ = run("drain", "worker-1", "--wait", *where)
            assert code == 0
            assert "worker worker-1 leaves" in " ".join(out.split())
            code, out, _ = run("workers", "--json", *where)
            assert [worker["id"] for worker in json.loads(out)] == ["worker-2", "worker-3"]
            code, _, err = run("drain", "worker-1", *where)
            assert (code, err) == (
                1, "Error: There is no worker 'worker-1' that could leave. Workers: worker-2, worker-3.\n",
            )  # fmt: skip
            code, _, err = run("scale", "--stage", "clicks", *where)
            assert code == 1
            assert "There is no stateful stage 'clicks'" in err
        live.assert_exact()
        code, out, _ = run("stop", *where)
        assert (code, out) == (0, f"{job}: stops after the epoch that is running.\n")
        assert query.awaitTermination(60)
        code, _, err = run("status", *where)
        assert code == 1
        assert "No job answers at" in err


def test_a_worker_that_the_query_started_may_be_told_to_stop_too(live: LiveQuery) -> None:
    with live.running(workers=2) as query:
        with live.flowing():
            live.pass_epochs()
            victim = query.workers()[0]
            os.kill(victim["pid"], signal.SIGTERM)
            wait_until(lambda: has_left(live, victim["id"]) and is_gone(victim["pid"]), "the worker has left")
            live.pass_epochs()
        assert [worker["keyGroups"] for worker in query.workers()] == [1024]
        assert [repair for report in query.epoch_reports() for repair in report.repairs] == []
        live.assert_exact()
