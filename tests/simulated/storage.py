"""The checkpoint of a simulated job: the package's own code on files in memory, which fail when they are told to.

Most calls of a process take a moment, in which others slip in, and the process may die before the next one. Tables and
documents are kept as they are: Parquet, text and checksums would take most of the time.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import pyarrow as pa

from anabranch.checkpoint import datafiles, documents
from anabranch.checkpoint.storage import Storage
from anabranch.core.errors import CheckpointError
from simulated.world import BEGINNING_S, Process, World

#: How long a call takes about, and how many take any time at all: in which others slip in.
CALL_S = 0.0008
SLOW_CALLS = 0.4


class TableFile:
    """Stands for the content of a Parquet file."""

    def __init__(self, table: pa.Table) -> None:
        self.table = table
        self.size = len(table)

    def __len__(self) -> int:
        return self.size


class _Opened:
    def __init__(self, content: Any) -> None:
        self._content = content

    def __enter__(self) -> _Opened:
        return self

    def __exit__(self, *_: object) -> None: ...

    def read_buffer(self) -> Any:
        return self._content


class Disk:
    """A file system: folders of files, each with its content and the time of its writing."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.folders: dict[str, dict[str, tuple[Any, float]]] = {}
        #: Asked before every call of a process: what goes wrong with it, "" if nothing does.
        self.trouble: Callable[[str, str], str] = lambda _action, _path: ""

    def read(self, path: str) -> Any:
        folder, _, name = path.rpartition("/")
        try:
            return self.folders[folder][name][0]
        except KeyError:
            raise FileNotFoundError(path) from None

    def write(self, path: str, content: Any) -> None:
        folder, _, name = path.rpartition("/")
        self.folders.setdefault(folder, {})[name] = content, BEGINNING_S + self.world.now

    def create(self, path: str, content: Any) -> bool:
        folder, _, name = path.rpartition("/")
        if name in self.folders.get(folder, ()):
            return False
        self.write(path, content)
        return True

    def list_names(self, folder: str) -> list[str]:
        return sorted(self.folders.get(folder, ()))

    def delete(self, path: str) -> None:
        folder, _, name = path.rpartition("/")
        self.folders.get(folder, {}).pop(name, None)

    def walk(self, folder: str) -> list[tuple[str, int, float]]:
        return [
            (f"{below}/{name}", len(content), written_s)
            for below, files in self.folders.items()
            if below == folder or below.startswith(folder + "/")
            for name, (content, written_s) in files.items()
        ]


class SimFiles:
    """The disk as one process sees it, below a location; None: as nobody in the simulation does, without trouble."""

    errors: tuple[type[Exception], ...] = (OSError,)

    def __init__(self, disk: Disk, location: str, process: Process | None) -> None:
        self._disk = disk
        self.location = location
        self._process = process

    def full_path(self, path: str) -> str:
        return f"{self.location}/{path}"

    def _call(self, action: str, path: str, effect: Callable[[str], Any]) -> Any:
        full = self.full_path(path)
        process = self._process
        if process is None:
            return effect(full)
        chance = process.world.rng.random()
        if chance < SLOW_CALLS:
            process.park(CALL_S * (0.5 + chance))
        else:
            process.check()
        trouble = self._disk.trouble(action, path)
        if trouble == "refused":
            process.world.seen[f"storage refuses to {action}"] += 1
            raise OSError(errno.ENOSPC if action in ("write", "create") else errno.EIO, "out of order")
        result = effect(full)
        if trouble == "silent":
            process.world.seen[f"storage does not answer after it could {action}"] += 1
            raise TimeoutError(errno.ETIMEDOUT, "no answer")
        return result

    def read(self, path: str) -> Any:
        return self._call("read", path, self._disk.read)

    def open(self, path: str) -> Any:
        return _Opened(self._call("read", path, self._disk.read))

    def write(self, path: str, content: Any) -> None:
        self._call("write", path, lambda full: self._disk.write(full, content))

    def create(self, path: str, content: Any) -> bool:
        created: bool = self._call("create", path, lambda full: self._disk.create(full, content))
        return created

    def list_names(self, folder: str) -> list[str]:
        names: list[str] = self._call("list", folder, self._disk.list_names)
        return names

    def walk(self, folder: str) -> Iterator[tuple[str, int, float]]:
        cut = len(self.location) + 1
        for path, size, written_s in self._call("list", folder, self._disk.walk):
            yield path[cut:], size, written_s

    def delete(self, path: str) -> None:
        self._call("delete", path, self._disk.delete)

    def copy_within(self, path: str, other: SimFiles, other_path: str) -> bool:
        content = self.read(path)
        other.write(other_path, content)
        return True

    def refused(self, action: str, path: str, error: Exception) -> CheckpointError:
        return CheckpointError(f"Cannot {action} {path}: {error}.")


class SimStorage(Storage):
    def __init__(self, disk: Disk, location: str, process: Process | None = None) -> None:
        self._files: Any = SimFiles(disk, location, process)

    def _checked(self, path: str) -> str:
        return path  # no path comes from outside


def _write(storage: Storage, path: str, schema: pa.Schema, parts: Iterator[pa.Table], _size: int) -> datafiles.Written:
    (table,) = parts
    content: Any = TableFile(pa.table(table.columns, schema=schema))
    storage.write(path, content)
    return datafiles.Written(rows=len(table), bytes=content.size, checksum="")


def _rows_of(content: TableFile, groups: Collection[int] | None) -> pa.Table:
    table = content.table
    rest = table.remove_column(0)
    if groups is None:
        return rest
    keep = np.isin(table.column(0).to_numpy(), list(groups))
    return rest if keep.all() else rest.filter(pa.array(keep))


def _encode(content: Mapping[str, Any], *, format_version: int = documents.FORMAT_VERSION) -> Any:
    return {**content, "format_version": format_version}


def _decode(_storage: Storage, _path: str, raw: Any) -> dict[str, Any]:
    return dict(raw)


_PLAIN = (
    (datafiles, "_write", _write),
    (datafiles, "_decode", _rows_of),
    (datafiles, "checksum_of", lambda _: ""),
    (documents, "encode", _encode),
    (documents, "decode", _decode),
    (documents, "checksum_of", lambda _: ""),
)


@contextmanager
def plain_files() -> Iterator[None]:
    """Keeps tables and documents as they are, while this lasts."""
    known = [getattr(module, name) for module, name, _ in _PLAIN]
    try:
        for module, name, plain in _PLAIN:
            setattr(module, name, plain)
        yield
    finally:
        for (module, name, _), original in zip(_PLAIN, known, strict=True):
            setattr(module, name, original)
