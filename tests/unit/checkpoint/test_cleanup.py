"""Clean-up: whatever it is told to keep can still be restored, also if it is interrupted at any moment."""

import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.checkpoint import paths
from anabranch.checkpoint.cleanup import CleanedUp, Policy, clean_up, retained_epochs
from anabranch.checkpoint.manifests import Manifest, Snapshot, snapshot_epochs, write_manifest, write_snapshot
from anabranch.checkpoint.statefiles import Documents, StateFiles, state_files
from anabranch.checkpoint.storage import Storage
from anabranch.core.errors import CheckpointError
from anabranch.core.ids import NO_EPOCH, Epoch, Generation, RouteVersion, Run, StageNumber, WorkerId
from anabranch.core.state_files import ChangeFile, SnapshotFile

NOW = 1_700_000_000.0
HOUR = 3600.0


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return Storage(str(tmp_path), durable=False)


class Checkpoint:
    """A checkpoint whose data files hold words: the state of an epoch is the list of them."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage

    def epoch(self, epoch: int, *, generation: int = 1, run: int = 0, files: int = 1, age_s: float = HOUR) -> None:
        written = []
        for number in range(files):
            path = paths.change_file(
                "stage",
                "value",
                epoch=Epoch(epoch),
                generation=Generation(generation),
                run=Run(run),
                worker=WorkerId(f"w{number}"),
            )
            self.put(path, f"{epoch}/{generation}/{run}/{number}", age_s)
            written.append(ChangeFile(StageNumber(0), "value", WorkerId(f"w{number}"), path, 1, 1, ""))
        by = Generation(generation), Run(run), RouteVersion(0)
        write_manifest(self.storage, Manifest(Epoch(epoch), *by, tuple(written)))
        self.set_age(paths.manifest_file(Epoch(epoch), Generation(generation)), age_s)

    def snapshot(self, epoch: int, *, by: tuple[int, int] | None = None, age_s: float = HOUR) -> None:
        """Of the state that the epoch has now, which is one word more than it was."""
        of = state_files(self.storage, Epoch(epoch))
        committed_by = of.committed_by if by is None else (Generation(by[0]), Run(by[1]))
        assert committed_by is not None
        unique = f"{epoch}-{sum(1 for _ in self.storage.walk(paths.SNAPSHOTS))}"
        path = paths.snapshot_file("stage", "value", epoch=Epoch(epoch), unique=unique)
        self.put(path, " ".join(self.state(of)), age_s)
        file = SnapshotFile(StageNumber(0), "value", 0, 0, path, 1, 1, "")
        write_snapshot(self.storage, Snapshot(Epoch(epoch), *committed_by, NOW - age_s, (file,)))
        self.set_age(paths.snapshot_document(Epoch(epoch)), age_s)

    def state(self, files: StateFiles) -> list[str]:
        return [word for file in files.data_files for word in self.storage.read(file.path).decode().split()]

    def states(self) -> dict[Epoch, list[str]]:
        """Of every epoch that can be restored by its documents; fails if data is missing."""
        found = Documents(self.storage)
        states = {}
        for epoch in found.epochs:
            try:
                files = found.state_files(epoch)
            except CheckpointError:
                continue
            states[epoch] = self.state(files)
        return states

    def put(self, path: str, content: str, age_s: float) -> None:
        self.storage.write(path, content.encode())
        self.set_age(path, age_s)

    def set_age(self, path: str, age_s: float) -> None:
        os.utime(self.storage.full_path(path), (NOW - age_s, NOW - age_s))

    def files(self) -> set[str]:
        return {path for path, _, _ in self.storage.walk(paths.ROOT)}

    def clean_up(self, committed: int, keep_epochs: int = 1, **other: object) -> CleanedUp:
        settings: dict[str, object] = {"keep_seconds": 0.0, "min_age_s": HOUR / 2, "now": NOW, **other}
        return clean_up(self.storage, committed=Epoch(committed), keep_epochs=keep_epochs, **settings)  # type: ignore[arg-type]


@pytest.fixture
def checkpoint(storage: Storage) -> Checkpoint:
    return Checkpoint(storage)


def test_what_lies_before_the_snapshot_of_a_retained_epoch_goes(checkpoint: Checkpoint) -> None:
    for epoch in range(8):
        checkpoint.epoch(epoch)
    checkpoint.snapshot(2)
    checkpoint.snapshot(5)
    before = checkpoint.states()
    done = checkpoint.clean_up(committed=7, keep_epochs=2)
    assert done.retained == (6, 7)
    assert checkpoint.states() == {epoch: before[Epoch(epoch)] for epoch in (5, 6, 7)}
    assert sorted(Documents(checkpoint.storage).writers) == [6, 7]
    assert snapshot_epochs(checkpoint.storage) == [5]
    assert len(done.deleted.data) == 7
    assert done.bytes > 0
    assert list(checkpoint.clean_up(committed=7, keep_epochs=2).deleted) == []


def test_without_a_snapshot_everything_is_needed(checkpoint: Checkpoint) -> None:
    for epoch in range(4):
        checkpoint.epoch(epoch)
    before = checkpoint.files()
    assert list(checkpoint.clean_up(committed=3).deleted) == []
    assert checkpoint.files() == before


def test_young_epochs_are_kept_however_many_there_are(checkpoint: Checkpoint) -> None:
    for epoch in range(8):
        checkpoint.epoch(epoch, age_s=100.0 - 10 * epoch)
    for epoch in (2, 4, 6):
        checkpoint.snapshot(epoch)
    assert checkpoint.clean_up(committed=7, keep_seconds=55.0).retained == (5, 6, 7)
    assert set(checkpoint.states()) == {4, 5, 6, 7}


def test_an_epoch_that_spark_has_not_committed_yet_is_kept(checkpoint: Checkpoint) -> None:
    for epoch in range(5):
        checkpoint.epoch(epoch)
    checkpoint.snapshot(2)
    checkpoint.snapshot(4)
    assert checkpoint.clean_up(committed=3).retained == (3, 4)
    assert set(checkpoint.states()) == {2, 3, 4}


def test_before_spark_commits_anything_all_epochs_are_kept(checkpoint: Checkpoint) -> None:
    checkpoint.epoch(0)
    checkpoint.epoch(1)
    assert checkpoint.clean_up(committed=NO_EPOCH).retained == (0, 1)
    assert set(checkpoint.states()) == {0, 1}


def test_orphans_go_when_they_are_old_and_nothing_else_does(checkpoint: Checkpoint) -> None:
    checkpoint.epoch(0, run=3)
    folder = f"{paths.CHANGES}/stage/value/epoch=000000000000"
    orphans = [
        f"{folder}/g00000001-r2-w0.parquet",
        f"{folder}/.g00000001-r2-w0.parquet.{'a' * 32}.tmp",
        f"{paths.SNAPSHOTS}/stage/value/epoch=000000000000/0.parquet",
        f"{paths.GENERATIONS}/.00000001.json.{'b' * 32}.tmp",
    ]
    others = [f"{paths.CHANGES}/README", f"{paths.CHANGES}/stage/value/mine.parquet", paths.JOB, "commits/0"]
    for path in (*orphans, *others):
        checkpoint.put(path, "x", age_s=10.0)
    assert list(checkpoint.clean_up(committed=0, min_age_s=11.0).deleted) == []
    assert sorted(checkpoint.clean_up(committed=0, min_age_s=9.0).deleted) == sorted(orphans)
    assert checkpoint.states() == {0: ["0/1/3/0"]}
    for path in others:
        assert checkpoint.storage.read(path) == b"x"


def test_files_of_a_snapshot_under_way_are_left_alone(checkpoint: Checkpoint) -> None:
    checkpoint.epoch(0)
    path = paths.snapshot_file("stage", "value", epoch=Epoch(0), unique="under-way")
    checkpoint.put(path, "x", age_s=60.0)
    checkpoint.clean_up(committed=0)
    assert path in checkpoint.files()


def test_superseded_manifests_and_their_data_go(checkpoint: Checkpoint) -> None:
    checkpoint.epoch(0, generation=1)
    checkpoint.epoch(0, generation=2)
    done = checkpoint.clean_up(committed=0)
    assert done.deleted.manifests == (paths.manifest_file(Epoch(0), Generation(1)),)
    assert checkpoint.states() == {0: ["0/2/0/0"]}
    assert len(done.deleted.data) == 1  # by its age: nobody reads a manifest that does not count


def test_a_snapshot_that_was_rolled_back_goes_before_the_manifest_that_tells(checkpoint: Checkpoint) -> None:
    for epoch in range(4):
        checkpoint.epoch(epoch)
    checkpoint.snapshot(1)
    checkpoint.snapshot(2, by=(1, 99))
    checkpoint.snapshot(3)
    done = checkpoint.clean_up(committed=3)
    assert done.deleted.snapshots == tuple(paths.snapshot_document(Epoch(epoch)) for epoch in (2, 1))
    assert next(iter(done.deleted)) == paths.snapshot_document(Epoch(2))


def test_what_is_being_read_stays(checkpoint: Checkpoint) -> None:
    for epoch in range(6):
        checkpoint.epoch(epoch)
    checkpoint.snapshot(1)
    reading = state_files(checkpoint.storage, Epoch(5))
    before = checkpoint.state(reading)
    checkpoint.snapshot(5)
    checkpoint.clean_up(committed=5, in_use=[reading])
    assert checkpoint.state(reading) == before
    checkpoint.clean_up(committed=5)
    with pytest.raises(CheckpointError, match="missing"):
        checkpoint.state(reading)
    assert checkpoint.states() == {5: before}


def test_a_snapshot_that_appears_while_files_are_listed_stays_whole(checkpoint: Checkpoint) -> None:
    for epoch in range(4):
        checkpoint.epoch(epoch)
    checkpoint.snapshot(1, age_s=1.0)
    checkpoint.snapshot(2)
    document = paths.snapshot_document(Epoch(1))

    class Late(Storage):
        def walk(self, folder: str) -> Iterator[tuple[str, int, float]]:
            return (entry for entry in super().walk(folder) if entry[0] != document)

    before = checkpoint.states()
    checkpoint.storage = Late(checkpoint.storage.location, durable=False)
    checkpoint.clean_up(committed=3)
    assert document in {path for path, _, _ in Storage(checkpoint.storage.location).walk(paths.SNAPSHOTS)}
    assert checkpoint.states() == {epoch: before[epoch] for epoch in (1, 2, 3)}


def test_nothing_is_deleted_if_a_retained_epoch_is_damaged(checkpoint: Checkpoint) -> None:
    for epoch in range(6):
        checkpoint.epoch(epoch)
    checkpoint.snapshot(3)
    before = checkpoint.files()
    with pytest.raises(CheckpointError, match="because epoch 7 is to be kept: The manifest of epoch 6 is missing"):
        checkpoint.clean_up(committed=7)
    checkpoint.put(paths.manifest_file(Epoch(4), Generation(1)), "{}", HOUR)
    with pytest.raises(CheckpointError, match=r"Nothing was cleaned up, because epoch 5 is to be kept: .*000004\.g"):
        checkpoint.clean_up(committed=5)
    assert checkpoint.files() == before


def test_a_damaged_document_that_nobody_needs_goes(checkpoint: Checkpoint) -> None:
    for epoch in range(6):
        checkpoint.epoch(epoch)
    checkpoint.snapshot(3)
    checkpoint.put(paths.manifest_file(Epoch(1), Generation(1)), "{}", HOUR)
    checkpoint.clean_up(committed=5)
    assert set(checkpoint.states()) == {3, 4, 5}


@dataclass
class Scene:
    """A checkpoint and what is to be kept of it."""

    epochs: list[int]  #: the number of files of each
    runs: list[int]  #: how many runs each had, the earlier ones by an older generation or of the same
    snapshots: dict[int, bool] = field(default_factory=dict)  #: by epoch, and whether it counts
    committed: int = 0
    keep_epochs: int = 1
    keep_seconds: float = 0.0
    age_s: float = 0.0


@st.composite
def scenes(draw: st.DrawFn) -> Scene:
    size = draw(st.integers(1, 9))
    numbers = st.integers(0, size - 1)
    return Scene(
        epochs=draw(st.lists(st.integers(0, 2), min_size=size, max_size=size)),
        runs=draw(st.lists(st.integers(1, 2), min_size=size, max_size=size)),
        snapshots=draw(st.dictionaries(numbers, st.booleans(), max_size=4)),
        committed=draw(st.integers(max(size - 3, 0), size - 1)),
        keep_epochs=draw(st.integers(0, 4)),
        keep_seconds=draw(st.sampled_from([0.0, 35.0, 1000.0])),
        age_s=draw(st.sampled_from([0.0, 100.0])),
    )


def build(scene: Scene, storage: Storage) -> Checkpoint:
    checkpoint = Checkpoint(storage)
    for epoch, files in enumerate(scene.epochs):
        for run in range(scene.runs[epoch]):
            # An earlier run is by an older driver in every other epoch, and by the same one in the others.
            checkpoint.epoch(
                epoch,
                generation=2 - (epoch + 1) % 2 * (run + 1 < scene.runs[epoch]),
                run=run,
                files=files,
                age_s=10.0 * (len(scene.epochs) - epoch),
            )
    for epoch, counts in sorted(scene.snapshots.items()):
        checkpoint.snapshot(epoch, by=None if counts else (1, 99), age_s=scene.age_s)
    return checkpoint


@pytest.fixture(scope="module")
def folder() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        yield folder


class EndOfProcessError(Exception):
    """The process ends here."""


class Interrupting(Storage):
    """Ends after some deletions."""

    left = 0

    def delete(self, path: str) -> None:
        if self.left == 0:
            raise EndOfProcessError
        self.left -= 1
        super().delete(path)


@settings(max_examples=60, deadline=None)
@given(scene=scenes(), interrupted_after=st.integers(0, 30))
def test_retained_epochs_stay_as_they_are_whenever_a_clean_up_ends(
    folder: str, scene: Scene, interrupted_after: int
) -> None:
    storage = Interrupting(tempfile.mkdtemp(dir=folder), durable=False)
    checkpoint = build(scene, storage)
    before = checkpoint.states()
    assert set(before) == set(range(len(scene.epochs)))
    policy = {"keep_seconds": scene.keep_seconds, "min_age_s": 20.0}
    storage.left = interrupted_after
    try:
        checkpoint.clean_up(scene.committed, scene.keep_epochs, **policy)
    except EndOfProcessError:
        # What still looks whole is, and is the same.
        after = checkpoint.states()
        assert after == {epoch: before[epoch] for epoch in after}
    storage.left = -1
    done = checkpoint.clean_up(scene.committed, scene.keep_epochs, **policy)
    after = checkpoint.states()
    assert after == {epoch: before[epoch] for epoch in after}
    young = {e for e in before if 10.0 * (len(scene.epochs) - e) < scene.keep_seconds}
    wanted = {e for e in before if e > scene.committed - max(scene.keep_epochs, 1)} | young
    assert set(done.retained) == wanted
    assert wanted <= set(after)
    # Nothing is left that is neither needed nor young.
    needed = {file.path for epoch in wanted for file in state_files(storage, epoch).data_files}
    needed |= {file.path for e in wanted for file in Documents(storage).manifest(e).files}
    rest = {path for path, _, at in storage.walk(paths.ROOT) if path.endswith(".parquet") and NOW - at > 20.0}
    assert rest <= needed
    assert list(checkpoint.clean_up(scene.committed, scene.keep_epochs, **policy).deleted) == []


@given(
    epochs=st.sets(st.integers(0, 30)),
    ages=st.dictionaries(st.integers(0, 30), st.floats(0, 100)),
    committed=st.integers(-1, 30),
    keep_epochs=st.integers(0, 40),
    keep_seconds=st.floats(0, 100),
)
def test_keeping_more_never_loses_an_epoch(
    epochs: set[int], ages: dict[int, float], committed: int, keep_epochs: int, keep_seconds: float
) -> None:
    known = [Epoch(epoch) for epoch in sorted(epochs)]
    of_epochs = {Epoch(epoch): age for epoch, age in ages.items()}

    def kept(more_epochs: int, more_seconds: float) -> set[Epoch]:
        policy = Policy(keep_epochs + more_epochs, keep_seconds + more_seconds, 0.0)
        return set(retained_epochs(known, of_epochs, Epoch(committed), policy))

    assert kept(0, 0.0) <= kept(1, 0.0) <= kept(1, 5.0)
    assert {epoch for epoch in known if epoch >= committed} <= kept(0, 0.0) <= set(known)
