"""Migration strategies: each is one object, one more can be registered, and a shared store goes with any of them."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from anabranch.control.membership.rescale import Rescale, asked_for
from anabranch.control.strategies import MIGRATIONS, strategy_of
from anabranch.control.strategies.restart import RestartMigration
from anabranch.core.errors import SettingsError, UnsupportedError
from anabranch.core.ids import StageNumber
from anabranch.core.membership_events import RescaleState
from anabranch.core.settings import Settings
from support.own_strategy import NAME, registered
from support.rescaling import Make, making, rescale, run, wait_until_started
from support.worker_stand_in import StandIn, Supply

STAGE = StageNumber(1)


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    with making(tmp_path) as make:
        yield make


def test_a_strategy_of_ones_own_is_registered_and_follows_the_changes_of_a_job(make: Make) -> None:
    with registered() as seen:
        coordinator = make(StandIn("one"), worker_pool=Supply(StandIn("two")), migration=NAME)
        handle = rescale(coordinator, 2)
        wait_until_started(coordinator)
        run(coordinator, 0)
        assert handle.wait(10)
        assert seen["changed"] == 1
        assert coordinator.cluster.migrations.reports()[-1].strategy == NAME
    assert NAME not in MIGRATIONS


def test_the_strategies_are_those_that_users_can_name() -> None:
    assert list(MIGRATIONS) == ["lazy", "eager", "restart"]
    assert [name for name in MIGRATIONS if strategy_of(name).has_drain] == ["lazy"]


@pytest.mark.parametrize("name", MIGRATIONS)
def test_workers_hand_key_groups_over_in_a_shared_store_whatever_the_strategy(name: str) -> None:
    remote = strategy_of(name, store_is_shared=True)
    assert remote.hands_over
    assert not strategy_of(name).hands_over
    assert remote.name == name
    assert not remote.has_drain


class Query:
    """What a strategy may use of a query."""

    def __init__(self, **settings: Any) -> None:
        self.settings = Settings(**settings)
        self.coordinator: Any = SimpleNamespace(parallelism={STAGE: 2})
        self.is_released = False
        self.launched: list[tuple[int, int]] = []
        self.fails = False
        self._lock = threading.Lock()

    def restarting(self) -> threading.Lock:
        return self._lock

    def relaunch(self, settings: Settings, parallelism: Mapping[StageNumber, int]) -> None:
        if self.fails:
            raise SettingsError("No.")
        self.settings = settings
        self.coordinator = SimpleNamespace(parallelism=dict(parallelism))
        self.launched.append((settings.workers, parallelism[STAGE]))


def test_restarts_are_made_one_after_the_other_in_the_order_in_which_they_were_asked_for() -> None:
    query, restart = Query(workers=2), RestartMigration()
    with query.restarting():
        handles = [asked_for(3, {}), asked_for(None, {1: 7}), asked_for(4, {})]
        for handle in handles:
            restart.rescale(query, handle)
        handles.append(restart.scale_out(query, [STAGE]))
        assert {handle.state for handle in handles} == {RescaleState.WAITING}
    assert all(handle.wait(10) for handle in handles)
    assert query.launched == [(3, 2), (3, 7), (4, 7), (5, 8)]


def test_a_restart_that_fails_or_comes_too_late_says_so() -> None:
    query, restart = Query(workers=2), RestartMigration()

    def outcome(handle: Rescale) -> tuple[RescaleState, str]:
        restart.rescale(query, handle)
        assert not handle.wait(10)
        return handle.state, handle.progress()["message"]

    query.fails = True
    assert outcome(asked_for(3, {})) == (RescaleState.FAILED, "No.")
    query.is_released = True
    assert outcome(asked_for(3, {})) == (RescaleState.FAILED, "The query has ended.")


def test_restarts_need_workers_that_the_query_starts_itself() -> None:
    restart = RestartMigration()
    with pytest.raises(UnsupportedError, match=r"starts no workers itself.*lazy or eager"):
        restart.rescale(Query(worker_addresses=("a:1",)), asked_for(3, {}))
    with pytest.raises(SettingsError, match="workers is 5000"):
        restart.rescale(Query(), asked_for(5000, {}))
    with pytest.raises(UnsupportedError, match="takes no workers that join"):
        restart.check_join()
