"""The one place that touches files: reads, atomic writes and exclusive creation below a checkpoint directory.

Everything else in this package names files by their path relative to that directory. A store with conditional writes
(an object store) needs these same few operations and nothing more.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path, PurePosixPath
from uuid import uuid4

import pyarrow as pa

from anabranch.core.errors import CheckpointError

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):")
_FILE_URL = re.compile(r"file:(?://(?P<host>[^/]*))?(?P<path>/.*)", re.DOTALL)

#: What file systems without hard links (some network and FUSE mounts) answer to a request for one.
_NO_HARD_LINKS = frozenset({errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK})
#: What file systems whose directories cannot be synced answer.
_NO_DIRECTORY_SYNC = frozenset({errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EBADF, errno.EACCES})


class Storage:
    """The files of one checkpoint, by their path relative to it.

    An instance is cheap and holds nothing open: the driver and each worker process make their own from ``location``.
    """

    def __init__(self, location: str, *, durable: bool = True) -> None:
        """``durable=False`` leaves out every fsync: for tests and measurements, never for state that matters."""
        self._root = _local_root(location)
        self._durable = durable

    @property
    def location(self) -> str:
        """The absolute path of the checkpoint: it means the same in every process that sees the file system."""
        return str(self._root)

    def full_path(self, path: str) -> str:
        """Where a file is, for messages and for tools that read change files."""
        return str(self._resolve(path))

    def read(self, path: str) -> bytes:
        content = self.read_if_present(path)
        if content is None:
            raise self._missing(path)
        return content

    def read_if_present(self, path: str) -> bytes | None:
        with self._explained("read", path):
            try:
                return self._resolve(path).read_bytes()
            except FileNotFoundError:
                return None

    def open(self, path: str) -> pa.NativeFile:
        """The file as Arrow and Parquet want it: seekable, not read yet. The caller closes it."""
        with self._explained("read", path):
            try:
                return pa.OSFile(self.full_path(path), "rb")
            except FileNotFoundError:
                raise self._missing(path) from None

    def write(self, path: str, content: bytes | pa.Buffer) -> None:
        """Creates or replaces a file: readers see the old content or the new one, whatever crashes and whenever."""
        target = self._resolve(path)
        with self._explained("write", path), self._temporary(target, content) as temporary:
            temporary.replace(target)

    def create(self, path: str, content: bytes | pa.Buffer) -> bool:
        """Creates a file with this content unless it exists; of several callers at once, exactly one gets True."""
        target = self._resolve(path)
        with self._explained("create", path), self._temporary(target, content) as temporary:
            return self._link(temporary, target, content)

    def list_names(self, folder: str) -> list[str]:
        """The sorted names of the files in a folder, none if there is no such folder.

        Hidden files are left out: interrupted writes, whether ours or Spark's, and Hadoop's checksums.
        """
        with self._explained("list", folder):
            try:
                with os.scandir(self._resolve(folder)) as entries:
                    return sorted(e.name for e in entries if not e.name.startswith(".") and e.is_file())
            except FileNotFoundError:
                return []

    def delete(self, path: str) -> None:
        """Deletes a file; one that is gone already is as good."""
        target = self._resolve(path)
        with self._explained("delete", path):
            target.unlink(missing_ok=True)
            if target.parent.is_dir():
                self._sync_folder(target.parent)

    def _resolve(self, path: str) -> Path:
        parts = PurePosixPath(path)
        # Manifests name files, and what names files may be damaged or forged.
        if parts.is_absolute() or ".." in parts.parts or "\0" in path:
            raise CheckpointError(
                f"{path!r} is not a path inside the checkpoint {self.location}. The checkpoint is damaged: restore it "
                f"from a copy, or use a new checkpoint."
            )
        return self._root / parts

    @contextmanager
    def _temporary(self, target: Path, content: bytes | pa.Buffer) -> Iterator[Path]:
        """A complete, synced, hidden file beside the target; on leaving it is gone, and its new name is durable."""
        temporary = target.with_name(f".{target.name}.{uuid4().hex}.tmp")
        folders = [target.parent]
        try:
            try:
                self._write_new(temporary, content)
            except FileNotFoundError:
                # A file is only as safe as the way to it. Synced at the end, when a journalling file system has
                # written all of it with the first sync, and has nothing left to do for the others.
                folders += _make_folder(target.parent)
                self._write_new(temporary, content)
            yield temporary
        finally:
            temporary.unlink(missing_ok=True)
        for folder in folders:
            self._sync_folder(folder)

    def _write_new(self, target: Path, content: bytes | pa.Buffer) -> None:
        with target.open("xb", buffering=0) as file:
            rest = memoryview(content)
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
                self._write_new(target, content)
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

    def _missing(self, path: str) -> CheckpointError:
        return CheckpointError(
            f"The checkpoint file {self.full_path(path)} is missing. Restore it from a copy of the checkpoint, or use "
            f"a new checkpoint."
        )

    @contextmanager
    def _explained(self, action: str, path: str) -> Iterator[None]:
        """What the operating system refuses, as an error of the checkpoint that says what to do."""
        try:
            yield
        except OSError as error:
            raise CheckpointError(
                f"Cannot {action} {self.full_path(path)}: {error.strerror or error}. {_advice(error, self.location)}"
            ) from error


def _make_folder(folder: Path) -> list[Path]:
    """Creates a folder and those above it, and returns the folders that have got a new one, the innermost first."""
    made = list(takewhile(lambda each: not each.exists(), [folder, *folder.parents]))
    for each in reversed(made):
        each.mkdir(exist_ok=True)
    return [each.parent for each in made]


def _advice(error: OSError, location: str) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "Free space on the file system of the checkpoint, then start the query again."
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return f"Give the user of this process read and write access to {location}, or use another checkpoint."
    if error.errno in (errno.ENOTDIR, errno.EEXIST, errno.EISDIR):
        return f"Make sure that {location} and all folders above it are directories, or use another checkpoint."
    return f"Check the file system of the checkpoint {location}, then start the query again."


def _local_root(location: str) -> Path:
    """The directory that a location means, as Hadoop reads it: in file: URLs too, ``%20`` is not a space."""
    scheme = _SCHEME.match(location)
    if scheme is None:
        if not location.strip():
            raise CheckpointError("The checkpoint location is empty. Set it to a directory.")
        return Path(location).absolute()
    if scheme[1].lower() != "file":
        raise CheckpointError(
            f"Checkpoints on {scheme[1]}: are not supported, and {location} is one. Use a local or mounted path that "
            f"the driver and all workers see."
        )
    url = _FILE_URL.fullmatch(location)
    if url is None or url["host"] not in (None, "", "localhost"):
        raise CheckpointError(
            f"{location} is not the URL of a local directory. Write it as file:///path/to/checkpoint."
        )
    return Path(url["path"])
