"""State workers, a counting job and what Spark makes of it, for all tests that run both."""

from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

import anabranch
from anabranch.core.epoch_events import SealsReported
from anabranch.core.epochs import EpochMachine
from support.counting import EPOCHS, SCHEMA, Attempts, counted, multiset
from support.oracle import Oracle, external_worker
from support.streams import EpochFeed


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Oracle]:
    """Two state workers for all tests of a module: starting some for each query would take longer than the query."""
    with external_worker("--id", "one") as one, external_worker("--id", "two", "--store", "rocksdb") as two:
        yield Oracle(tmp_path_factory.mktemp("oracle"), [one["address"], two["address"]])


@pytest.fixture(scope="module")
def counting_feed(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> EpochFeed:
    feed = EpochFeed(spark, tmp_path_factory.mktemp("counting") / "input", SCHEMA)
    feed.add(*EPOCHS)
    return feed


@pytest.fixture(scope="module")
def expected(counting_feed: EpochFeed, tmp_path_factory: pytest.TempPathFactory) -> list[Counter[Any]]:
    """What Spark itself gives in each epoch."""
    native = Oracle(tmp_path_factory.mktemp("expected")).native(counted, counting_feed.stream())
    return [multiset(native.epochs[epoch]) for epoch in range(len(EPOCHS))]


@pytest.fixture
def attempts(monkeypatch: pytest.MonkeyPatch) -> Attempts:
    """Which attempts of which partitions the workers reported: more than one is state logic that ran again."""
    seen: Attempts = defaultdict(lambda: defaultdict(set))
    handle = EpochMachine.handle

    def record(machine: EpochMachine, event: Any) -> Any:
        if isinstance(event, SealsReported):
            for attempt in event.attempts:
                seen[machine.epoch][attempt.stage, attempt.partition].add(attempt.attempt)
        return handle(machine, event)

    monkeypatch.setattr(EpochMachine, "handle", record)
    return seen


@pytest.fixture
def enabled(spark: SparkSession) -> Iterator[SparkSession]:
    """A session whose stateful queries are ours."""
    spark.conf.set("spark.anabranch.workers", "1")
    anabranch.enable(spark)
    yield spark
    anabranch.disable(spark)
    spark.conf.unset("spark.anabranch.workers")


@pytest.fixture
def feed(spark: SparkSession, tmp_path: Path, request: pytest.FixtureRequest) -> EpochFeed:
    """The EPOCHS of the test's own module, of keys and numbers."""
    feed = EpochFeed(spark, tmp_path / "input", "k string, v bigint")
    feed.add(*request.module.EPOCHS)
    return feed
