"""Starting from a checkpoint: the newest committed epoch is restored, by key group, on the workers that are there."""

from pathlib import Path

import pyarrow as pa
import pytest

from anabranch.checkpoint.manifests import Manifest, newest_route, newest_writers, write_manifest
from anabranch.checkpoint.storage import Storage
from anabranch.control.membership.members import Membership, discover
from anabranch.control.owned_checkpoint import OwnedCheckpoint, claim
from anabranch.control.resume import resume
from anabranch.core.errors import CheckpointError, LostWorkerError, SettingsError, WorkerError
from anabranch.core.ids import Epoch, Generation, RouteVersion, Run, RunId, StageNumber, WorkerId
from anabranch.core.requests import Assign, OpenJob
from anabranch.core.schemas import StageSpec, VariableKind, VariableSpec
from anabranch.core.state_files import ChangeFile
from anabranch.wire.credentials import Credentials
from support.worker_stand_in import StandIn, membership

VARIABLE = VariableSpec("v", VariableKind.VALUE, pa.schema([("n", pa.int64())]))
SPEC = StageSpec(StageNumber(1), "stage1", pa.schema([("k", pa.int64())]), (VARIABLE,))


def owned(folder: Path, key_groups: int = 8) -> OwnedCheckpoint:
    return claim(str(folder), [SPEC], key_groups)


def commit(job: OwnedCheckpoint, epoch: int, *, by_spark: bool = True) -> None:
    """An epoch with one change file, committed by us and perhaps by Spark."""
    file = ChangeFile(StageNumber(1), "v", WorkerId("one"), f"anabranch/changes/{epoch}.parquet", 3, 100, "x")
    write_manifest(job.storage, Manifest(Epoch(epoch), job.generation, Run(epoch + 1), RouteVersion(0), (file,)))
    if by_spark:
        job.storage.write(f"commits/{epoch}", b"v1\n{}")


def restored(worker: StandIn) -> list[tuple[list[int], list[str]]]:
    found = [request for request in worker.requests if isinstance(request, Assign)]
    return [(list(request.groups), [Path(file.path).stem for file in request.changes]) for request in found]


def test_a_new_job_starts_empty_with_a_balanced_route(tmp_path: Path) -> None:
    one, two = StandIn("one"), StandIn("two")
    resumed = resume(owned(tmp_path), membership(one, two))
    assert resumed.committed.epoch == -1
    assert [len(resumed.route.groups_of(WorkerId(name))) for name in ("one", "two")] == [4, 4]
    assert newest_route(resumed.owned.storage) == resumed.route
    for worker in (one, two):
        opening, _ = worker.requests
        assert isinstance(opening, OpenJob)
        assert (opening.committed_epoch, opening.committed_by, opening.key_groups) == (-1, None, 8)
        assert opening.stages == (SPEC,)


def test_the_epochs_that_spark_committed_are_restored_by_key_group(tmp_path: Path) -> None:
    first = owned(tmp_path)
    route = resume(first, membership(StandIn("one"), StandIn("two"))).route
    for epoch in range(3):
        commit(first, epoch, by_spark=epoch < 2)
    one, two = StandIn("one"), StandIn("two")
    second = owned(tmp_path)
    resumed = resume(second, membership(one, two))
    assert (second.generation, second.job.job_id) == (Generation(2), first.job.job_id)
    assert resumed.committed.epoch == 1
    assert resumed.route == route
    assert list(newest_writers(resumed.owned.storage)) == [0, 1, 2], "Spark may yet commit an epoch for an older driver"
    assert restored(one) == [(list(route.groups_of(WorkerId("one"))), ["0", "1"])]
    assert restored(two) == [(list(route.groups_of(WorkerId("two"))), ["0", "1"])]
    opening = one.requests[0]
    assert isinstance(opening, OpenJob)
    assert (opening.generation, opening.committed_epoch, opening.committed_by) == (2, 1, RunId(Generation(1), Run(2)))


def test_other_workers_get_another_route(tmp_path: Path) -> None:
    first = owned(tmp_path)
    before = resume(first, membership(StandIn("one"), StandIn("two"))).route
    commit(first, 0)
    workers = [StandIn(name) for name in ("one", "three", "four")]
    route = resume(owned(tmp_path), membership(*workers)).route
    assert route.version == before.version + 1
    assert route.first_epoch == 1
    assert set(route.workers) == {"one", "three", "four"}
    assert sorted(group for worker in workers for groups, _ in restored(worker) for group in groups) == list(range(8))


def test_a_manifest_that_is_missing_is_named(tmp_path: Path) -> None:
    first = owned(tmp_path)
    commit(first, 0)
    first.storage.write("commits/1", b"v1\n{}")
    with pytest.raises(CheckpointError, match="manifest of epoch 1 is missing"):
        resume(owned(tmp_path), membership(StandIn("one")))


def test_a_worker_that_fails_while_it_restores_ends_the_start(tmp_path: Path) -> None:
    first = owned(tmp_path)
    commit(first, 0)
    one, two = StandIn("one"), StandIn("two")
    two.failures["assign"] = WorkerError("two:1: the change file is damaged. Restore it from a copy.")
    with pytest.raises(WorkerError, match="is damaged"):
        resume(owned(tmp_path), membership(one, two))


def test_the_job_keeps_its_id_and_every_start_gets_a_generation(tmp_path: Path) -> None:
    jobs = [owned(tmp_path) for _ in range(3)]
    assert len({job.job.job_id for job in jobs}) == 1
    assert [job.generation for job in jobs] == [1, 2, 3]
    assert isinstance(jobs[0].storage, Storage)
    with pytest.raises(CheckpointError, match="keyGroups is 8 in the checkpoint and 9"):
        owned(tmp_path, key_groups=9)


def discovered(monkeypatch: pytest.MonkeyPatch, *workers: StandIn) -> Membership:
    by_address = {worker.address: worker for worker in workers}
    monkeypatch.setattr("anabranch.control.membership.members.WorkerClient", lambda address, **_: by_address[address])
    return discover([worker.address for worker in workers], timeout_s=1, start_timeout_s=1, credentials=Credentials())


def test_workers_are_asked_who_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    members = discovered(monkeypatch, StandIn("one"), StandIn("two"))
    assert [(member.worker, member.address, member.pid) for member in members.all] == [
        ("one", "one:1", 7),
        ("two", "two:1", 7),
    ]
    assert len(members) == 2
    assert members.get(WorkerId("two")).address == "two:1"
    members.close()
    assert all(member.client.closed for member in members.all)  # type: ignore[attr-defined]


def test_two_addresses_of_one_worker_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    twin = StandIn("one")
    twin.address = "other:1"
    with pytest.raises(SettingsError, match=r"lead to the worker 'one'.*different --id"):
        discovered(monkeypatch, StandIn("one"), twin)


def test_a_worker_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = StandIn("gone")
    gone.failures["health"] = LostWorkerError("The state worker at gone:1 cannot be reached.")
    with pytest.raises(LostWorkerError, match="gone:1"):
        discovered(monkeypatch, StandIn("one"), gone)
    with pytest.raises(WorkerError, match=r"no workers. Set anabranch\.workers"):
        discovered(monkeypatch)
