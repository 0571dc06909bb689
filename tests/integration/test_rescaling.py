"""Rescales while rows flow: what comes out, and the state in the end, are those of a run that was left alone."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

import anabranch
from anabranch.control.membership import assignment as assigning
from support.counting import Attempts
from support.live_query import WAIT_S, LiveQuery, wait_until
from support.redis_server import RedisServer, running_redis, running_redis_cluster

#: So long that nothing moves on an idle stream: only epochs start the drain then.
NEVER_S = 600


@pytest.fixture(scope="module")
def redis_server() -> Iterator[RedisServer]:
    with running_redis() as server:
        yield server


@pytest.fixture
def live(spark: SparkSession, tmp_path: Path) -> LiveQuery:
    return LiveQuery(spark, tmp_path)


def rescale_up_and_down(live: LiveQuery) -> None:
    """From 2 to 4 to 1 workers, and the parallelism of single stages, while rows flow."""
    live.pass_epochs(2)
    live.rescale(workers=4)
    live.pass_epochs(1)
    live.rescale(parallelism=5, stage="stage1")
    live.pass_epochs(1)
    live.rescale(workers=1, parallelism=3, stage=3)
    live.pass_epochs(1)
    live.rescale(workers=2)
    live.pass_epochs(2)


STRATEGIES: dict[str, dict[str, Any]] = {
    "lazy": {"migration": "lazy"},
    "lazy, from disk, routes asked for": {"migration": "lazy", "store": "rocksdb", "routingCache": False},
    "eager": {"migration": "eager"},
    "redis": {"store": "redis"},
}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_query_is_rescaled_while_rows_flow(
    live: LiveQuery, redis_server: RedisServer, attempts: Attempts, strategy: str
) -> None:
    options = {**STRATEGIES[strategy], "redisUrl": redis_server.url, "workers": 2, "parallelism": 2}
    with live.running(**options) as query:
        with live.flowing():
            rescale_up_and_down(live)
        assert len(owners(query)) == 2
        assert tasks_of(attempts, max(live.epochs)) == {1: 5, 3: 3}
        live.assert_exact()


def owners(query: Any) -> set[str]:
    """The workers that have key groups, which together have all of them."""
    held = {worker["id"]: worker["keyGroups"] for worker in query.workers()}
    assert sum(held.values()) == 1024
    return {worker for worker, count in held.items() if count}


def tasks_of(attempts: Attempts, epoch: int) -> dict[int, int]:
    """How many tasks each stage had in an epoch."""
    stages = [stage for stage, _ in attempts[epoch]]
    return {stage: stages.count(stage) for stage in stages}


def test_a_query_is_rescaled_by_restarts_while_rows_flow(live: LiveQuery, attempts: Attempts) -> None:
    with live.running(migration="restart", workers=2, parallelism=2) as query:
        with live.flowing():
            live.pass_epochs()
            live.rescale(workers=3)
            live.pass_epochs()
            live.rescale(parallelism=4, stage="stage1")
            live.pass_epochs()
            live.rescale(workers=1)
            live.pass_epochs()
            more = [query.scale_out(3), query.scale_out("stage3")]
            assert [each.wait(WAIT_S) for each in more] == [True, True]
            live.pass_epochs()
        assert query.runId != live.run_id
        assert len(query.workers()) == 3
        assert tasks_of(attempts, max(live.epochs)) == {1: 4, 3: 4}
        live.assert_exact(same_run=False)
        reported = [progress["batchId"] for progress in query.recentProgress if progress["numInputRows"]]
        assert reported == sorted(live.epochs), "reports of earlier runs are kept"


def test_state_in_a_cluster_of_redis_servers_stays_where_it_is(live: LiveQuery) -> None:
    with running_redis_cluster() as url, live.running(store="redis", redisUrl=url, workers=1) as query:
        live.run(2)
        progress = live.rescale(workers=2)
        live.run(2)
        assert (progress["rowsFetched"], progress["rowsDrained"]) == (0, 0)
        assert len(owners(query)) == 2
        live.assert_exact()


def test_a_query_is_rescaled_again_while_state_is_on_its_way(live: LiveQuery) -> None:
    """Key groups go on before they have arrived, turn round, and come back to where they began."""
    with live.running(workers=2, heartbeat=NEVER_S) as query:
        live.run(4)
        first = query.coordinator.route.owners
        rescales = [live.begin_rescale(workers=workers) for workers in (4, 1, 3, 2)]
        assert [rescale.state for rescale in rescales] == ["migrating"] * 4
        live.run(3)
        with live.flowing():
            for rescale in rescales:
                assert rescale.wait(WAIT_S), rescale.progress()
        returned = sum(now == before for now, before in zip(query.coordinator.route.owners, first, strict=True))
        assert returned > 0, "some key groups are with their first owner again"
        live.assert_exact()
        assert len(query.workers()) == 2


# Any sequence of rescales, also with state in Redis, is among the tests of faults.
@pytest.mark.parametrize("store", ["memory", pytest.param("redis", marks=pytest.mark.slow)])
def test_opposite_rescales_at_the_same_time_leave_one_result(
    live: LiveQuery, redis_server: RedisServer, store: str
) -> None:
    with live.running(workers=2, store=store, redisUrl=redis_server.url) as query:
        with live.flowing():
            live.pass_epochs()
            rescales = [query.rescale(workers=workers) for workers in (4, 1, 3)]
            assert rescales[-1].wait(WAIT_S), rescales[-1].progress()
            live.pass_epochs()
        wait_until(lambda: all(r.state in ("done", "replaced") for r in rescales), "all rescales have ended")
        assert "A newer rescale came before" in rescales[1].progress()["message"] or rescales[1].state == "done"
        assert len(query.workers()) == 3
        live.assert_exact()


@pytest.mark.parametrize("migration", ["lazy", "eager"])
def test_a_rescale_of_an_idle_stream_completes_without_new_rows(live: LiveQuery, migration: str) -> None:
    with live.running(workers=1, migration=migration) as query:
        live.run(3)
        grown = live.rescale(workers=3)
        assert len(live.epochs) == 3
        assert grown["rowsDrained"] > 0
        assert grown["groupsPending"] == 0
        held = [(worker["keyGroups"], worker["pendingGroups"], worker["rows"]) for worker in query.workers()]
        assert all(groups and not pending for groups, pending, _ in held), held
        assert all(rows for _, _, rows in held[1:]), held
        live.rescale(workers=1)
        assert [worker["keyGroups"] for worker in query.workers()] == [1024]
        live.run()
        live.assert_exact()


def test_the_load_of_skewed_keys_is_shared_out(spark: SparkSession, live: LiveQuery) -> None:
    """Almost all keys that are in use belong to the first worker's half of the key groups."""
    keys = spark.range(3000).select(F.format_string("k%04d", "id").alias("k"))
    groups = {row.k: row.g for row in keys.select("k", F.pmod(F.xxhash64("k"), F.lit(1024)).alias("g")).collect()}
    hot = [key for key, group in groups.items() if group < 512][:200]
    cold = [key for key, group in groups.items() if group >= 512][:10]
    with live.running(workers=2) as query:

        def run(epochs: int) -> None:
            for _ in range(epochs):
                live.add_rows([(key, 1, "red", live.fed) for key in hot + cold])
            query.processAllAvailable()

        run(4)
        before = [worker["load"] for worker in query.workers()]
        progress = live.rescale()
        run(12)
        after = [worker["load"] for worker in query.workers()]
        assert progress["what"] == "share the load anew"
        assert max(before) > 5 * min(before)
        assert max(after) < 1.5 * min(after)
        # One key with as many rows as all others have keys and more: its worker is relieved of all others.
        live.add_rows([(hot[0], 1, "red", live.fed)] * 20_000)
        run(1)
        live.rescale()
        owner = query.coordinator.route.owners[groups[hot[0]]]
        assert next(worker["keyGroups"] for worker in query.workers() if worker["id"] == owner) < 100
        assert len(query.workers()) == 2
        live.assert_exact()


def test_without_a_drain_state_moves_only_when_it_is_asked_for(live: LiveQuery) -> None:
    with live.running(workers=1, drain=False, routingCache=False) as query:
        live.run(3)
        rescale = live.begin_rescale(workers=2)
        live.run(2)
        progress = rescale.progress()
        assert (progress["state"], progress["rowsDrained"]) == ("migrating", 0)
        assert progress["rowsFetched"] > 0
        assert progress["groupsPending"] == progress["groupsMoving"] == 512
        assert "anabranch.drain is false" in progress["message"]
        old, new = query.workers()
        assert (old["frozenGroups"], new["pendingGroups"]) == (512, 512)
        assert new["rows"] >= progress["rowsFetched"], "keys that were asked for have moved"
        for leave in (lambda: query.rescale(workers=1), lambda: query.drain(old["id"])):
            with pytest.raises(anabranch.SettingsError, match="No worker can leave while anabranch"):
                leave()
        again = live.begin_rescale(workers=3)
        live.run(2)
        assert again.progress()["rowsDrained"] == 0
        live.assert_exact()


def test_state_that_is_on_its_way_can_be_looked_at(live: LiveQuery) -> None:
    with live.running(workers=2, heartbeat=NEVER_S):
        live.run(3)
        rescale = live.begin_rescale(workers=3)
        live.assert_exact()
        live.run()
        assert rescale.wait(WAIT_S), rescale.progress()
        live.assert_exact()


@pytest.mark.parametrize("workers", [1, 3])
def test_whoever_looks_at_state_in_the_middle_of_a_change_sees_all_of_it(
    live: LiveQuery, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    """The workers are told one after the other what they have, and each time somebody looks."""
    with live.running(workers=2) as query:
        live.run(3)
        spec = query.pipeline.stateful_stages[0].spec
        expected = query.coordinator.scan(spec, "sums")[1].num_rows
        seen: list[int] = []
        looks: list[threading.Thread] = []
        assign, one_at_a_time = assigning._assign, threading.Lock()

        def look() -> None:
            seen.append(query.coordinator.scan(spec, "sums")[1].num_rows)

        def look_after(*arguments: Any) -> Any:
            with one_at_a_time:
                answer = assign(*arguments)
                looks.append(threading.Thread(target=look, daemon=True))
                looks[-1].start()
                looks[-1].join(0.2)  # a look that does not wait is over by then
                return answer

        monkeypatch.setattr(assigning, "_assign", look_after)
        live.rescale(workers=workers)
        for each in looks:
            each.join()
        assert seen == [expected] * max(2, workers)
        live.assert_exact()


def test_whoever_looks_at_state_sees_all_of_it_while_workers_come_and_go(live: LiveQuery) -> None:
    """No rows come in, so that every look has to show the same."""
    with live.running(workers=1) as query:
        live.run(3)
        spec = query.pipeline.stateful_stages[0].spec
        expected = query.coordinator.scan(spec, "sums")[1].num_rows
        seen: list[int | str] = []
        stop = threading.Event()

        def look() -> None:
            while not stop.is_set():
                try:
                    seen.append(query.coordinator.scan(spec, "sums")[1].num_rows)
                    query.workers()
                except anabranch.AnabranchError as error:
                    seen.append(str(error))

        looking = threading.Thread(target=look, daemon=True)
        looking.start()
        for workers in (3, 1, 2):
            live.rescale(workers=workers)
        stop.set()
        looking.join()
        assert set(seen) == {expected}
        live.assert_exact()


def test_a_rescaled_query_explains_its_new_plan_and_resumes_with_its_route(
    live: LiveQuery, attempts: Attempts, capsys: pytest.CaptureFixture[str]
) -> None:
    with live.running(workers=2, keyGroups=8) as query:
        live.run(2)
        live.rescale(workers=3, parallelism=20)
        live.run()
        assert tasks_of(attempts, 2) == {1: 8, 3: 8}, "no more than there are key groups"
        live.rescale(parallelism=5, stage=3)
        query.explain()
        explained = capsys.readouterr().out
        assert re.findall(r"Stage (\d) .*: repartitionById\((\d+)\)", explained) == [("1", "8"), ("3", "5")]
        assert "State: 3 workers, store memory, 8 key groups\n" in explained
        assert re.findall(r"  (worker-\d) at .*: \d key groups", explained) == ["worker-1", "worker-2", "worker-3"]
        version = query.coordinator.route.version
        owners = query.coordinator.route.owners
    with live.running(workers=3, keyGroups=8) as query:
        assert (query.coordinator.route.version, query.coordinator.route.owners) == (version, owners)
        live.run()
        live.assert_exact()


def test_epochs_that_are_not_durable_yet_survive_a_rescale(live: LiveQuery) -> None:
    with live.running(workers=2, checkpointInterval=NEVER_S) as query:
        live.run(3)
        assert query.coordinator.durable_epoch < 2
        with live.flowing():
            live.rescale(workers=4)
            live.pass_epochs()
            live.rescale(workers=1)
            live.pass_epochs()
        live.assert_exact()
