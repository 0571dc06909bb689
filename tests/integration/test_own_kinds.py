"""A query on a store and with a migration strategy that do not come with Anabranch: each stands in one place."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from anabranch.core.errors import SettingsError
from anabranch.core.ids import WorkerId
from anabranch.wire.credentials import Credentials
from anabranch.worker.server.service import StateService
from anabranch.worker.stores.options import StoreOptions
from support import own_store, own_strategy
from support.live_query import WAIT_S, LiveQuery

TOKEN = "secret"


def test_a_query_runs_on_a_store_and_a_strategy_of_ones_own(spark: SparkSession, tmp_path: Path) -> None:
    live = LiveQuery(spark, tmp_path)
    with own_store.registered() as applied, own_strategy.registered() as seen:
        services = [
            StateService(
                "127.0.0.1:0",
                worker=WorkerId(name),
                stores=StoreOptions(own_store.NAME),
                credentials=Credentials(TOKEN),
            )
            for name in ("a", "b")
        ]
        addresses = ",".join(f"127.0.0.1:{service.port}" for service in services)
        chosen = {"workerAddresses": addresses, "store": own_store.NAME, "migration": own_strategy.NAME}
        try:
            with live.running(token=TOKEN, **chosen) as query:
                live.run(3)
                assert [worker["id"] for worker in query.workers()] == ["a", "b"]
                handle = query.rescale()
                live.run(2)
                assert handle.wait(WAIT_S)
                live.assert_exact()
        finally:
            for service in services:
                service.close()
    assert len(applied) > 1
    assert seen["asked for"] == 1


def test_kinds_that_are_not_registered_are_refused(spark: SparkSession, tmp_path: Path) -> None:
    for name, value in (("store", own_store.NAME), ("migration", own_strategy.NAME)):
        live = LiveQuery(spark, tmp_path / name)
        refused = pytest.raises(SettingsError, match=f"anabranch.{name} is '{value}'; it can be")
        with refused, live.running(**{name: value}):
            pass
