"""The coordinator with stand-ins for workers and a real checkpoint: what is asked of whom, and when an epoch counts."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from anabranch.checkpoint.generations import claim_generation
from anabranch.checkpoint.manifests import newest_writers, read_manifest
from anabranch.checkpoint.storage import Storage
from anabranch.control.coordinator import Coordinator
from anabranch.control.owned_checkpoint import claim
from anabranch.control.resume import resume
from anabranch.core.errors import CheckpointError, EpochError, FencedError, LostWorkerError, WorkerError
from anabranch.core.ids import Epoch, StageNumber
from anabranch.core.reports import as_json
from anabranch.core.schemas import StageSpec, VariableKind, VariableSpec
from anabranch.core.settings import Settings
from support.worker_stand_in import NoSupply, StandIn, membership

VARIABLE = VariableSpec("v", VariableKind.VALUE, pa.schema([("n", pa.int64())]))
SPEC = StageSpec(StageNumber(1), "stage1", pa.schema([("k", pa.int64())]), (VARIABLE,))
#: [stage, partition, attempt] of two partitions.
SEALED = [[1, 0, 10], [1, 1, 11]]


@pytest.fixture
def workers() -> list[StandIn]:
    return [StandIn("one", SEALED[:1]), StandIn("two", SEALED[1:])]


@pytest.fixture
def coordinator(tmp_path: Path, workers: list[StandIn]) -> Coordinator:
    members = membership(*workers)
    resumed = resume(claim(str(tmp_path), [SPEC], 8), members)
    for worker in workers:
        worker.requests.clear()
    return Coordinator(
        resumed, members, Settings(workers=2, key_groups=8, heartbeat_s=60.0), {StageNumber(1): 2}, NoSupply()
    )


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return Storage(str(tmp_path))


def run(coordinator: Coordinator, epoch: int) -> Any:
    coordinator.begin(epoch)
    assert coordinator.missing(epoch) == {}
    return coordinator.commit(epoch)


def test_an_epoch_is_begun_collected_prepared_and_committed_on_every_worker(
    coordinator: Coordinator, workers: list[StandIn], storage: Storage
) -> None:
    figures = run(coordinator, 0)
    assert figures.changed_rows == 6
    assert as_json(figures.changed_variables) == [{"stage": 1, "variable": "v", "put": 4, "removed": 2}]
    assert figures.workers == 2
    for worker in workers:
        assert worker.kinds() == ["begin", "report_seals", "prepare", "commit"]
        assert {(request.epoch, request.run) for request in worker.requests} == {(0, 0)}  # type: ignore[attr-defined]
    chosen = [worker.requests[2].chosen for worker in workers]  # type: ignore[attr-defined]
    assert chosen == [frozenset(map(tuple, SEALED[:1])), frozenset(map(tuple, SEALED[1:]))]
    assert coordinator.committed_epoch == 0
    manifest = read_manifest(storage, Epoch(0))
    assert [file.worker for file in manifest.files] == ["one", "two"]
    assert (manifest.run, manifest.route_version) == (0, coordinator.route.version)
    run(coordinator, 1)
    assert list(newest_writers(storage)) == [0, 1]


def test_tasks_learn_where_their_key_groups_are(coordinator: Coordinator) -> None:
    assert coordinator.begin(0) == 0
    access = coordinator.accesses()[1]
    assert (access.generation, access.parallelism, access.key_groups) == (1, 2, 8)
    assert access.routing.addresses == ("one:1", "two:1")
    owners = [{int(access.routing.owners[g]) for g in range(8) if access.partitions[g] == p} for p in range(2)]
    assert owners == [{0}, {1}]


def test_partitions_that_were_not_sealed_are_missing(coordinator: Coordinator, workers: list[StandIn]) -> None:
    workers[1].sealed = []
    coordinator.begin(0)
    assert coordinator.missing(0) == {1: frozenset({1})}
    workers[1].sealed = SEALED[1:]
    assert coordinator.missing(0) == {}
    coordinator.commit(0)
    assert coordinator.committed_epoch == 0


@pytest.mark.parametrize("step", ["begin", "report_seals", "prepare"])
@pytest.mark.parametrize("error", [LostWorkerError("two:1 cannot be reached. Do this."), WorkerError("two:1 refuses.")])
def test_an_epoch_fails_where_a_worker_does_and_nothing_of_it_counts(
    coordinator: Coordinator, workers: list[StandIn], storage: Storage, step: str, error: Exception
) -> None:
    workers[1].failures[step] = error
    with pytest.raises(EpochError, match="two:1"):
        run(coordinator, 0)
    assert workers[0].kinds()[-1] == "abort"
    assert list(newest_writers(storage)) == []
    assert coordinator.committed_epoch == -1
    # The same epoch can be run again, as another run; without a worker that was lost.
    if isinstance(error, LostWorkerError):
        workers[0].sealed = SEALED
    run(coordinator, 0)
    assert {request.run for request in workers[0].requests if hasattr(request, "run")} == {0, 1}
    assert list(newest_writers(storage)) == [0]


def test_a_worker_lost_after_the_commit_point_does_not_undo_the_epoch(
    coordinator: Coordinator, workers: list[StandIn], storage: Storage
) -> None:
    workers[0].failures["commit"] = LostWorkerError("one:1 cannot be reached.")
    run(coordinator, 0)
    assert coordinator.committed_epoch == 0
    assert list(newest_writers(storage)) == [0]


def test_a_sink_that_fails_aborts_on_all_workers(coordinator: Coordinator, workers: list[StandIn]) -> None:
    workers[0].failures["abort"] = LostWorkerError("one:1 cannot be reached.")
    coordinator.begin(0)
    coordinator.abort(0)
    assert [worker.kinds()[-1] for worker in workers] == ["abort", "abort"]
    run(coordinator, 0)


def test_a_newer_driver_ends_this_one_at_the_commit_point(coordinator: Coordinator, storage: Storage) -> None:
    coordinator.begin(0)
    claim_generation(storage, {})
    with pytest.raises(FencedError, match=r"generation 2"):
        coordinator.commit(0)
    assert list(newest_writers(storage)) == []
    with pytest.raises(FencedError):
        coordinator.begin(0)


def test_a_worker_that_knows_a_newer_driver_ends_this_one(coordinator: Coordinator, workers: list[StandIn]) -> None:
    workers[1].failures["begin"] = FencedError("A newer driver (generation 9) has taken over.")
    with pytest.raises(FencedError, match="generation 9"):
        coordinator.begin(0)
    assert "abort" not in workers[0].kinds()


def test_a_manifest_that_cannot_be_written_fails_the_epoch(
    coordinator: Coordinator, workers: list[StandIn], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise CheckpointError("The disk is full. Make room.")

    with monkeypatch.context() as patch:
        patch.setattr("anabranch.control.epochs.durability.write_manifest", fail)
        with pytest.raises(EpochError, match=r"The disk is full\. Make room\."):
            run(coordinator, 0)
    assert coordinator.committed_epoch == -1
    run(coordinator, 0)
    assert coordinator.committed_epoch == 0
    assert workers[0].kinds().count("commit") == 1


def test_an_epoch_out_of_turn_is_refused(coordinator: Coordinator) -> None:
    run(coordinator, 0)
    with pytest.raises(EpochError, match="Epoch 2 cannot follow epoch 0"):
        coordinator.begin(2)
    run(coordinator, 0)
    run(coordinator, 1)


def test_a_look_at_the_state_starts_over_when_epochs_overtake_it(
    coordinator: Coordinator, workers: list[StandIn]
) -> None:
    run(coordinator, 0)
    rows = SPEC.layouts["v"].rows
    workers[0].rows = [pa.record_batch([pa.array([1]), pa.array([5]), pa.array([50])], schema=rows)]
    workers[1].failures["scan"] = EpochError("Epoch 0 is merged already.")
    epoch, table = coordinator.scan(SPEC, "v")
    assert epoch == 0
    assert table.to_pylist() == [{"_hash": 1, "k": 5, "n": 50}]
    workers[0].failures["scan"] = WorkerError("There is no such variable.")
    with pytest.raises(WorkerError, match="no such variable"):
        coordinator.scan(SPEC, "v")


def test_a_look_at_empty_state_gives_columns_of_one_chunk(coordinator: Coordinator, workers: list[StandIn]) -> None:
    """Spark makes no DataFrame of a table whose nested columns have none."""
    run(coordinator, 0)
    rows = SPEC.layouts["v"].rows
    for batches in ([], [pa.RecordBatch.from_pylist([], rows)] * 2):
        workers[0].rows = batches
        _, table = coordinator.scan(SPEC, "v")
        assert table.schema == rows
        assert table.num_rows == 0
        assert [column.num_chunks for column in table.columns] == [1, 1, 1]


def test_workers_are_described_and_told_good_bye(coordinator: Coordinator, workers: list[StandIn]) -> None:
    described = coordinator.describe()
    assert [(worker.id, worker.key_groups, worker.rows, worker.bytes) for worker in described] == [
        ("one", 4, 2, 30),
        ("two", 4, 2, 30),
    ]
    workers[0].failures["close_job"] = LostWorkerError("one:1 cannot be reached.")
    coordinator.close()
    assert [worker.kinds()[-1] for worker in workers] == ["close_job", "close_job"]


def test_a_worker_that_stands_still_is_not_waited_for_by_who_is_in_a_hurry(
    coordinator: Coordinator, workers: list[StandIn]
) -> None:
    assert len(coordinator.describe()) == 2
    assert [worker.timeouts_s["describe"] for worker in workers] == [None, None]
    assert coordinator.describe(wait=False) == coordinator.describe()
    coordinator.describe(wait=False)
    assert [worker.timeouts_s["describe"] for worker in workers] == [1.0, 1.0]


def test_a_stage_has_at_most_as_many_partitions_as_there_are_key_groups(tmp_path: Path, workers: list[StandIn]) -> None:
    members = membership(*workers)
    resumed = resume(claim(str(tmp_path), [SPEC], 3), members)
    coordinator = Coordinator(resumed, members, Settings(workers=2, key_groups=3), {StageNumber(1): 50}, NoSupply())
    access = coordinator.accesses()[1]
    assert access.parallelism == 3
    assert sorted(access.partitions.tolist()) == [0, 1, 2]
