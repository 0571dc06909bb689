"""State that outlives its query: snapshots, savepoints, other places, other schemas, and workers that stay warm."""

import json
import os
import signal
import sys
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from pyspark import cloudpickle
from pyspark.sql import Row, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

import anabranch
from anabranch.checkpoint.manifests import newest_writers, snapshot_epochs
from anabranch.checkpoint.storage import Storage
from anabranch.checkpoint.verify import verify
from anabranch.control.coordinator import Coordinator
from anabranch.core.errors import CheckpointError
from support.counting import EPOCHS, RESULT, SCHEMA, counted, multiset, writer_of
from support.described import assert_described
from support.oracle import drain, external_worker
from support.s3_server import running_s3
from support.streams import Collector, EpochFeed
from support.waiting import wait_until

# Tasks cannot import a test: what it defines travels with them.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

ONE_WORKER = {"anabranch.workers": 1}


def in_two_runs(feed: EpochFeed, folder: Path, checkpoint: Path, **options: Any) -> list[Counter[Any]]:
    """The epochs of a counting job that is stopped after the fifth and started again on the same checkpoint."""
    collector = Collector()
    for count in (5, len(EPOCHS)):
        part = EpochFeed(feed.spark, folder / "input", SCHEMA)
        for number in range(count):
            name = f"epoch-{number:06d}.parquet"
            if not (part.folder / name).exists():
                os.link(feed.folder / name, part.folder / name)
        drain(writer_of(counted(anabranch.stream(part.stream())), checkpoint, **options).foreachBatch(collector))
    return [multiset(collector.epochs[epoch]) for epoch in range(len(EPOCHS))]


def test_a_query_resumes_from_a_snapshot_after_older_epochs_were_cleaned_up(
    counting_feed: EpochFeed, expected: list[Counter[Any]], tmp_path: Path
) -> None:
    checkpoint = tmp_path / "ck"
    options = {**ONE_WORKER, "anabranch.snapshotEpochs": 2, "anabranch.keepEpochs": 1}
    query = writer_of(counted(anabranch.stream(counting_feed.stream())), checkpoint, **options).foreachBatch(
        collector := Collector()
    )
    started = query.start()
    try:
        started.processAllAvailable()
        # The snapshot that the last epochs made due may not be ready yet.
        wait_until(lambda: snapshot_epochs(Storage(str(checkpoint))), "there is a snapshot")
    finally:
        started.stop()
    storage = Storage(str(checkpoint))
    assert [multiset(collector.epochs[epoch]) for epoch in range(9)] == expected
    assert snapshot_epochs(storage)
    assert verify(storage).problems == ()
    again = writer_of(counted(anabranch.stream(counting_feed.stream())), checkpoint, **options).foreachBatch(collector)
    restarted = again.start()
    try:
        assert multiset(restarted.state("stage1").collect()) == expected[8]
    finally:
        restarted.stop()


def test_a_job_starts_from_a_savepoint_with_everything_else_changed_while_the_original_runs(
    counting_feed: EpochFeed, expected: list[Counter[Any]], tmp_path: Path
) -> None:
    feed = EpochFeed(counting_feed.spark, tmp_path / "input", SCHEMA)
    feed.add(*EPOCHS[:4])
    original, fork = Collector(), Collector()
    query = writer_of(counted(anabranch.stream(feed.stream())), tmp_path / "one").foreachBatch(original).start()
    try:
        query.processAllAvailable()
        asked = json.dumps({"path": str(tmp_path / "savepoint")}).encode()
        secret = {"authorization": f"Bearer {query.token}"}
        request = urllib.request.Request(f"{query.url}/savepoint", asked, secret)
        with urllib.request.urlopen(request, timeout=60) as response:
            answer = json.load(response)
        assert answer == {"epoch": 3, "path": str(tmp_path / "savepoint")}
        assert_described("POST", "/savepoint", 200, answer)
        with pytest.raises(CheckpointError, match="savepoint or a checkpoint already"):
            query.savepoint(str(tmp_path / "savepoint"))
        feed.add(*EPOCHS[4:])
        options = {"workers": 3, "store": "rocksdb", "parallelism": 5, "savepoint": str(tmp_path / "savepoint")}
        named = {f"anabranch.{name}": value for name, value in options.items()}
        for _ in range(2):  # the second time, the new checkpoint is in use
            drain(writer_of(counted(anabranch.stream(feed.stream())), tmp_path / "two", **named).foreachBatch(fork))
        query.processAllAvailable()
    finally:
        query.stop()
    assert [multiset(original.epochs[epoch]) for epoch in range(9)] == expected
    assert {epoch: multiset(rows) for epoch, rows in fork.epochs.items()} == dict(enumerate(expected[4:], start=4))


def test_a_folder_that_is_no_savepoint_is_refused(counting_feed: EpochFeed, tmp_path: Path) -> None:
    writer = writer_of(
        counted(anabranch.stream(counting_feed.stream())), tmp_path / "ck", **{"anabranch.savepoint": str(tmp_path)}
    )
    with pytest.raises(CheckpointError, match="is not a savepoint"):
        writer.format("noop").start()


def test_the_state_lives_in_an_object_store(
    counting_feed: EpochFeed, expected: list[Counter[Any]], tmp_path: Path
) -> None:
    with running_s3() as server:
        place = f"{server.new_bucket()}/jobs/counting"
        options = {**ONE_WORKER, "anabranch.stateLocation": place}
        assert in_two_runs(counting_feed, tmp_path, tmp_path / "ck", **options) == expected
        assert not (tmp_path / "ck" / "anabranch").exists()
        assert any(method == "PUT" and "manifests" in path for method, path, _, _ in server.requests)


def test_a_warm_worker_keeps_its_state_over_a_restart_of_the_query(
    counting_feed: EpochFeed, expected: list[Counter[Any]], tmp_path: Path
) -> None:
    with external_worker("--id", "warm") as worker:
        options = {"anabranch.workerAddresses": worker["address"]}
        assert in_two_runs(counting_feed, tmp_path, tmp_path / "ck", **options) == expected


def test_workers_that_die_between_and_within_epochs_cost_nothing(
    counting_feed: EpochFeed, expected: list[Counter[Any]], tmp_path: Path
) -> None:
    collector = Collector()
    feed = EpochFeed(counting_feed.spark, tmp_path / "input", SCHEMA)
    query = writer_of(counted(anabranch.stream(feed.stream())), tmp_path / "ck").foreachBatch(collector).start()
    try:
        for number, rows in enumerate(EPOCHS):
            feed.add(rows)
            if number in (2, 5):
                os.kill(query.workers()[number % 2]["pid"], signal.SIGKILL)
            query.processAllAvailable()
        lost = [w for p in query.recentProgress for repair in p["anabranch"].get("repairs", []) for w in repair["lost"]]
        assert len(lost) == 2
        assert query.status["anabranch"]["repairs"] >= 2
        assert multiset(query.state("stage1").collect()) == expected[8]
    finally:
        query.stop()
    assert [multiset(collector.epochs[epoch]) for epoch in range(9)] == expected


class Growing(StatefulProcessor):
    """Counts; its second version keeps the last value as well, in a wider state and in one more variable.

    The third deletes that variable. The fourth has it again, and its total is the number of values in it.
    """

    def __init__(self, version: int) -> None:
        self.version = version

    def init(self, handle: StatefulProcessorHandle) -> None:
        schema = "n int" if self.version == 1 else "last long, n long"
        self.state = handle.getValueState("tally", schema)
        if self.version == 3:
            handle.deleteIfExists("seen")
        elif self.version > 1:
            self.seen = handle.getListState("seen", "v long")

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Any:  # noqa: ARG002
        values = [row.v for row in rows]
        if self.version == 1:
            (n,) = self.state.get() or (0,)
            self.state.update((n + len(values),))
            yield Row(k=key[0], n=n + len(values), total=None)
        else:
            last, n = self.state.get() or (None, 0)
            self.state.update((values[-1], n + len(values)))
            if self.version != 3:
                self.seen.appendList([(value,) for value in values])
            yield Row(k=key[0], n=n + len(values), total=last if self.version < 4 else len(list(self.seen.get())))

    def close(self) -> None:
        pass


def test_a_query_comes_back_with_wider_state(spark: SparkSession, tmp_path: Path) -> None:
    feed = EpochFeed(spark, tmp_path / "input", SCHEMA)

    def run(version: int, *rows: tuple[str, int]) -> Counter[Any]:
        feed.add(rows)
        stream = anabranch.stream(feed.stream()).groupBy("k")
        result = stream.transformWithState(Growing(version), RESULT, "update", "none")
        drain(writer_of(result, tmp_path / "ck", **ONE_WORKER).foreachBatch(collector := Collector()))
        return multiset([row for rows in collector.epochs.values() for row in rows])

    assert run(1, ("a", 5), ("b", 6)) == Counter({("a", 1, None): 1, ("b", 1, None): 1})
    assert run(2, ("a", 7), ("c", 8)) == Counter({("a", 2, None): 1, ("c", 1, None): 1})
    assert run(2, ("a", 9), ("b", 1)) == Counter({("a", 3, 7): 1, ("b", 2, None): 1})
    with pytest.raises(CheckpointError, match="tally"):
        run(1, ("a", 1))
    # What has been deleted stays so when it is asked for again, and not for the first epoch alone.
    assert run(3, ("b", 2), ("c", 4)) == Counter({("a", 4, 9): 1, ("b", 3, 1): 1, ("c", 2, 8): 1})
    assert run(4, ("a", 1), ("b", 3)) == Counter({("a", 5, 1): 1, ("b", 4, 1): 1})
    assert run(4, ("a", 2), ("c", 5)) == Counter({("a", 6, 2): 1, ("c", 3, 1): 1})


def test_another_function_under_the_same_name_is_refused(counting_feed: EpochFeed, tmp_path: Path) -> None:
    def query(function: Any) -> Any:
        stream = anabranch.stream(counting_feed.stream()).groupBy("k").agg(function("v").alias("x"))
        return writer_of(stream, tmp_path / "ck", **ONE_WORKER).format("noop")

    drain(query(F.sum))
    with pytest.raises(CheckpointError, match="x"):
        query(F.max).start()


VOLATILE = {**ONE_WORKER, "anabranch.checkpointInterval": 3600}


def test_epochs_that_are_not_durable_are_run_again_when_a_worker_is_lost(
    counting_feed: EpochFeed, expected: list[Counter[Any]], tmp_path: Path
) -> None:
    collector = Collector()
    feed = EpochFeed(counting_feed.spark, tmp_path / "input", SCHEMA)
    writer = writer_of(counted(anabranch.stream(feed.stream())), tmp_path / "ck", **VOLATILE)
    query = writer.foreachBatch(collector).start()
    try:
        for number, rows in enumerate(EPOCHS):
            feed.add(rows)
            if number == 6:
                assert not newest_writers(Storage(str(tmp_path / "ck")))
                os.kill(query.workers()[0]["pid"], signal.SIGKILL)
            query.processAllAvailable()
        assert multiset(query.state("stage1").collect()) == expected[8]
    finally:
        query.stop()
    assert [multiset(collector.epochs[epoch]) for epoch in range(9)] == expected
    assert list(newest_writers(Storage(str(tmp_path / "ck")))) == list(range(9)), "a stop makes all epochs durable"


def test_a_savepoint_of_epochs_that_are_not_durable_makes_them_durable(
    counting_feed: EpochFeed, tmp_path: Path
) -> None:
    job = counted(anabranch.stream(counting_feed.stream()))
    query = writer_of(job, tmp_path / "ck", **VOLATILE).foreachBatch(Collector()).start()
    try:
        query.processAllAvailable()
        last = query.lastProgress
        assert last is not None
        assert query.coordinator.durable_epoch < last.batchId
        assert query.savepoint(str(tmp_path / "saved")) == last.batchId
        assert query.coordinator.durable_epoch == last.batchId
        assert snapshot_epochs(Storage(str(tmp_path / "saved"))) == [last.batchId]
    finally:
        query.stop()


def test_epochs_that_are_not_durable_are_repeated_after_a_driver_was_lost(
    counting_feed: EpochFeed, expected: list[Counter[Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        # As if the driver had died: nothing is made durable at the end.
        patch.setattr(Coordinator, "flush", lambda _: None)
        first = Collector()
        feed = EpochFeed(counting_feed.spark, tmp_path / "input", SCHEMA)
        feed.add(*EPOCHS[:5])
        stream = counted(anabranch.stream(feed.stream()))
        drain(writer_of(stream, tmp_path / "ck", **VOLATILE).foreachBatch(first))
    assert not newest_writers(Storage(str(tmp_path / "ck")))
    feed.add(*EPOCHS[5:])
    second = Collector()
    drain(writer_of(counted(anabranch.stream(feed.stream())), tmp_path / "ck", **VOLATILE).foreachBatch(second))
    assert [multiset(first.epochs[epoch]) for epoch in range(5)] == expected[:5]
    assert [multiset(second.epochs[epoch]) for epoch in range(9)] == expected
