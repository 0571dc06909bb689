"""Files in a local or mounted directory: synced, replaced by renaming, created exclusively by linking."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import takewhile
from pathlib import Path
from typing import Any
from uuid import uuid4

import pyarrow as pa

from anabranch.core.errors import CheckpointError

_FILE_URL = re.compile(r"file:(?://(?P<host>[^/]*))?(?P<path>/.*)", re.DOTALL | re.IGNORECASE)

#: What file systems without hard links (some network and FUSE mounts) answer to a request for one.
_NO_HARD_LINKS = frozenset({errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK})
#: What file systems whose directories cannot be synced answer.
_NO_DIRECTORY_SYNC = frozenset({errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EBADF, errno.EACCES})


class LocalFiles:
    """The files of a checkpoint in a directory that the driver and all workers see."""

    errors: tuple[type[Exception], ...] = (OSError,)

    def __init__(self, location: str, *, durable: bool) -> None:
        self._root = _root(location)
        self._durable = durable

    @property
    def location(self) -> str:
        return str(self._root)

    def full_path(self, path: str) -> str:
        return str(self._root / path)

    def read(self, path: str) -> bytes:
        return (self._root / path).read_bytes()

    def open(self, path: str) -> pa.NativeFile:
        return pa.OSFile(self.full_path(path), "rb")

    def write(self, path: str, content: bytes | pa.Buffer) -> None:
        self.write_from(path, (content,))

    def write_from(self, path: str, chunks: Iterable[bytes | pa.Buffer]) -> None:
        target = self._root / path
        with self._temporary(target, chunks) as temporary:
            temporary.replace(target)

    def create(self, path: str, content: bytes | pa.Buffer) -> bool:
        target = self._root / path
        with self._temporary(target, (content,)) as temporary:
            return self._link(temporary, target, content)

    def list_names(self, folder: str) -> list[str]:
        try:
            with os.scandir(self._root / folder) as entries:
                return sorted(e.name for e in entries if not e.name.startswith(".") and e.is_file())
        except FileNotFoundError:
            return []

    def walk(self, folder: str) -> Iterator[tuple[str, int, float]]:
        try:
            with os.scandir(self._root / folder) as entries:
                found = sorted(entries, key=lambda entry: entry.name)
        except FileNotFoundError:
            return
        for entry in found:
            path = f"{folder}/{entry.name}" if folder else entry.name
            if entry.is_dir(follow_symlinks=False):
                yield from self.walk(path)
                continue
            # Others work in the checkpoint at the same time: what is gone by now is none of its files.
            with suppress(FileNotFoundError):
                if entry.is_file():
                    status = entry.stat()
                    yield path, status.st_size, status.st_mtime

    def delete(self, path: str) -> None:
        target = self._root / path
        target.unlink(missing_ok=True)
        if target.parent.is_dir():
            self._sync_folder(target.parent)

    def copy_within(self, path: str, other: Any, other_path: str) -> bool:
        del path, other, other_path  # an operating system copies no better than we do
        return False

    def refused(self, action: str, path: str, error: Exception) -> CheckpointError:
        reason = (isinstance(error, OSError) and error.strerror) or error
        return CheckpointError(f"Cannot {action} {self.full_path(path)}: {reason}. {_advice(error, self.location)}")

    @contextmanager
    def _temporary(self, target: Path, chunks: Iterable[bytes | pa.Buffer]) -> Iterator[Path]:
        """Makes a complete, synced, hidden file beside the target; on leaving it is gone, its new name durable."""
        temporary = target.with_name(f".{target.name}.{uuid4().hex}.tmp")
        folders = [target.parent]
        try:
            try:
                self._write_new(temporary, chunks)
            except FileNotFoundError:
                # A file is only as safe as the way to it. Synced at the end, when a journalling file system has
                # written all of it with the first sync, and has nothing left to do for the others.
                folders += _make_folder(target.parent)
                self._write_new(temporary, chunks)
            yield temporary
        finally:
            temporary.unlink(missing_ok=True)
        for folder in folders:
            self._sync_folder(folder)

    def _write_new(self, target: Path, chunks: Iterable[bytes | pa.Buffer]) -> None:
        with target.open("xb", buffering=0) as file:
            for chunk in chunks:
                rest = memoryview(chunk)
                while rest:  # one call writes at most 2 GiB
                    rest = rest[file.write(rest) :]
            if self._durable:
                os.fsync(file.fileno())

    def _link(self, temporary: Path, target: Path, content: bytes | pa.Buffer) -> bool:
        try:
            os.link(temporary, target)
        except FileExistsError:
            # A network file system repeats a request whose answer got lost; then the name that exists is our own.
            return target.samefile(temporary)
        except OSError as error:
            if error.errno not in _NO_HARD_LINKS:
                raise
            # Still exclusive, but a crash in between leaves a file without all of its content.
            try:
                self._write_new(target, (content,))
            except FileExistsError:
                return False
            except OSError:
                target.unlink(missing_ok=True)
                raise
        return True

    def _sync_folder(self, folder: Path) -> None:
        if not self._durable:
            return
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno not in _NO_DIRECTORY_SYNC:
                raise
        finally:
            os.close(descriptor)


def _make_folder(folder: Path) -> list[Path]:
    """Creates a folder and those above it, and returns the folders that have got a new one, the innermost first."""
    made = list(takewhile(lambda each: not each.exists(), [folder, *folder.parents]))
    for each in reversed(made):
        each.mkdir(exist_ok=True)
    return [each.parent for each in made]


def _advice(error: Exception, location: str) -> str:
    code = error.errno if isinstance(error, OSError) else None
    if code in (errno.ENOSPC, errno.EDQUOT):
        return "Free space on the file system of the checkpoint, then start the query again."
    if code in (errno.EACCES, errno.EPERM, errno.EROFS):
        return f"Give the user of this process read and write access to {location}, or use another checkpoint."
    if code in (errno.ENOTDIR, errno.EEXIST, errno.EISDIR):
        return f"Make sure that {location} and all folders above it are directories, or use another checkpoint."
    return f"Check the file system of the checkpoint {location}, then start the query again."


def _root(location: str) -> Path:
    """Returns the directory that a location means, as Hadoop reads it: in file: URLs too, ``%20`` is not a space."""
    if not location.lower().startswith("file:"):
        return Path(location).absolute()
    url = _FILE_URL.fullmatch(location)
    if url is None or url["host"] not in (None, "", "localhost"):
        raise CheckpointError(
            f"{location} is not the URL of a local directory. Write it as file:///path/to/checkpoint."
        )
    return Path(url["path"])
