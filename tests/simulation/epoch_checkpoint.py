"""The checkpoint of a simulated job: the package's own code on files in memory, written in steps that may not end."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from epoch_history import Row
from epoch_rows import Rows, Value, applied

from anabranch.checkpoint import documents, manifests, paths, snapshots
from anabranch.checkpoint.manifests import ChangeFile
from anabranch.checkpoint.snapshots import SnapshotFile
from anabranch.checkpoint.statefiles import StateFiles
from anabranch.checkpoint.storage import Storage
from anabranch.core.errors import CheckpointError
from anabranch.core.ids import Epoch, StageNumber
from anabranch.worker.origins import Selection

VARIABLE = "v"
Step = Callable[[], None]


class DataFile:
    """Stands for the content of a Parquet file."""

    def __init__(self, changes: Mapping[Row, Value | None], hash_of: Mapping[Row, int]) -> None:
        self.rows = Rows.of(changes.items(), hash_of)

    def __len__(self) -> int:
        return len(self.rows)


class MemoryFiles:
    """A file system: folders of files, each with its content and the time of its writing."""

    errors: tuple[type[Exception], ...] = ()
    location = "memory"

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._folders: dict[str, dict[str, tuple[Any, float]]] = {}

    def full_path(self, path: str) -> str:
        return path

    def read(self, path: str) -> Any:
        folder, _, name = path.rpartition("/")
        try:
            return self._folders[folder][name][0]
        except KeyError:
            raise FileNotFoundError(path) from None

    def write(self, path: str, content: Any) -> None:
        folder, _, name = path.rpartition("/")
        self._folders.setdefault(folder, {})[name] = content, self._clock()

    def create(self, path: str, content: Any) -> bool:
        folder, _, name = path.rpartition("/")
        if name in self._folders.get(folder, ()):
            return False
        self.write(path, content)
        return True

    def list_names(self, folder: str) -> list[str]:
        return sorted(self._folders.get(folder, ()))

    def walk(self, folder: str) -> Iterator[tuple[str, int, float]]:
        for below, files in list(self._folders.items()):
            if below == folder or below.startswith(folder + "/"):
                for name, (content, written_s) in list(files.items()):
                    yield f"{below}/{name}", len(content), written_s

    def delete(self, path: str) -> None:
        folder, _, name = path.rpartition("/")
        self._folders.get(folder, {}).pop(name, None)


class MemoryStorage(Storage):
    def __init__(self, files: MemoryFiles) -> None:
        self._files: Any = files

    # Nothing here has to be explained to anybody, and no path comes from outside.

    def read_if_present(self, path: str) -> Any:
        try:
            return self._files.read(path)
        except FileNotFoundError:
            return None

    def write(self, path: str, content: Any) -> None:
        self._files.write(path, content)

    def list_names(self, folder: str) -> list[str]:
        names: list[str] = self._files.list_names(folder)
        return names

    def delete(self, path: str) -> None:
        self._files.delete(path)

    def in_steps(self, action: Callable[[Storage], object]) -> list[Step]:
        """What the action writes and deletes, in its order and not done yet: whoever does it may die in between."""
        recorded = _RecordedFiles(self._files)
        action(MemoryStorage(recorded))
        return recorded.steps

    def read_data(self, path: str) -> DataFile:
        data: Any = self.read(path)
        assert isinstance(data, DataFile)
        return data


class _RecordedFiles(MemoryFiles):
    def __init__(self, files: MemoryFiles) -> None:
        self._below = files
        self._folders = files._folders
        self.steps: list[Step] = []

    def write(self, path: str, content: Any) -> None:
        self.steps.append(partial(self._below.write, path, content))

    def delete(self, path: str) -> None:
        self.steps.append(partial(self._below.delete, path))


@contextmanager
def plain_documents() -> Iterator[None]:
    """Documents are kept as they are while this lasts: text and checksums would take a third of the time."""

    def encode(content: Mapping[str, Any], *, format_version: int = documents.FORMAT_VERSION) -> Any:
        return {**content, "format_version": format_version}

    def decode(_storage: Storage, _path: str, raw: Any) -> dict[str, Any]:
        return dict(raw)

    def fields_of(file: Any) -> dict[str, Any]:
        return dict(vars(file))

    places = (
        (documents, "encode", encode),
        (documents, "decode", decode),
        (manifests, "asdict", fields_of),
        (snapshots, "asdict", fields_of),
    )
    known = [getattr(module, name) for module, name, _ in places]
    try:
        for module, name, plain in places:
            setattr(module, name, plain)
        yield
    finally:
        for (module, name, _), original in zip(places, known, strict=True):
            setattr(module, name, original)


class FilesOrigin:
    """A snapshot and the change files after it. Nothing is kept in memory: every look needs every file."""

    def __init__(
        self, storage: MemoryStorage, files: Sequence[SnapshotFile | ChangeFile], breaks: Callable[[], bool]
    ) -> None:
        self._storage = storage
        self._files = files
        self._breaks = breaks

    @property
    def rows(self) -> int:
        return sum(file.rows for file in self._files)

    def select(self, selection: Selection) -> Iterator[Rows]:
        broken = self._files[-1] if self._files and self._breaks() else None
        for file in self._files:
            if file is broken:
                raise CheckpointError(f"{file.path} cannot be read at the moment")
            rows = self._storage.read_data(file.path).rows
            chosen = selection.rows(rows.hashes)
            if len(chosen):
                yield rows.take(chosen.tolist())


def origin_files(files: StateFiles, stage: int) -> list[SnapshotFile | ChangeFile]:
    return [file for file in files.data_files if file.stage == stage]


def stored_state(storage: MemoryStorage, files: StateFiles) -> dict[Row, Value]:
    """The state that the files hold."""
    return applied(change for file in files.data_files for change in storage.read_data(file.path).rows)


def spark_commit_file(epoch: Epoch) -> str:
    return f"{paths.SPARK_COMMITS}/{epoch}"


def change_file_of(stage: int, worker: Any, path: str, rows: int) -> ChangeFile:
    return ChangeFile(StageNumber(stage), VARIABLE, worker, path, rows, rows, "")


def snapshot_file_of(stage: int, path: str, groups: Sequence[int], rows: int) -> SnapshotFile:
    return SnapshotFile(StageNumber(stage), VARIABLE, min(groups), max(groups), path, rows, rows, "")
