"""The one place that touches files: reads, atomic writes and exclusive creation below a checkpoint's location.

Everything else in this package names files by their path relative to that location, and does not know what is behind
it: a local or mounted directory (``local``), or whatever fsspec reaches by URL (``remote``).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import PurePosixPath
from typing import Protocol

import pyarrow as pa

from anabranch.checkpoint.storage.local import LocalFiles
from anabranch.core.errors import CheckpointError

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):")

#: What a copy holds in memory at a time.
_COPY_BYTES = 8 * 2**20


class Files(Protocol):
    """What a storage needs from a file system. Paths are relative to the checkpoint and lead nowhere else."""

    #: What an operation may raise; FileNotFoundError has its usual meaning where a file is read.
    errors: tuple[type[Exception], ...]

    @property
    def location(self) -> str: ...

    def full_path(self, path: str) -> str: ...

    def read(self, path: str) -> bytes: ...

    def open(self, path: str) -> pa.NativeFile: ...

    def write(self, path: str, content: bytes | pa.Buffer) -> None: ...

    def write_from(self, path: str, chunks: Iterable[bytes]) -> None:
        """Like ``write``, for a content that need not fit in memory; if ``chunks`` raises, nothing is written."""

    def create(self, path: str, content: bytes | pa.Buffer) -> bool: ...

    def list_names(self, folder: str) -> list[str]: ...

    def walk(self, folder: str) -> Iterator[tuple[str, int, float]]: ...

    def delete(self, path: str) -> None: ...

    def copy_within(self, path: str, other: Files, other_path: str) -> bool:
        """Lets the store itself copy a file, without moving its content here; False: it cannot."""

    def refused(self, action: str, path: str, error: Exception) -> CheckpointError:
        """Returns what went wrong as an error that says what to do."""


class Storage:
    """The files of one checkpoint, by their path relative to it.

    An instance is cheap and holds nothing open: the driver and each worker process make their own from ``location``.
    """

    def __init__(self, location: str, *, durable: bool = True) -> None:
        """A directory or a URL. Credentials and endpoints come from the environment, never from the location.

        ``durable=False`` leaves out every fsync: for tests and measurements, never for state that matters.
        """
        if not location.strip():
            raise CheckpointError("The checkpoint location is empty. Set it to a directory.")
        self._files = _files_at(location, durable=durable)

    @property
    def location(self) -> str:
        """The absolute path or the URL of the checkpoint: it means the same in every process that can reach it."""
        return self._files.location

    def full_path(self, path: str) -> str:
        """Where a file is, for messages and for tools that read change files."""
        return self._files.full_path(self._checked(path))

    def read(self, path: str) -> bytes:
        content = self.read_if_present(path)
        if content is None:
            raise self._missing(path)
        return content

    def read_if_present(self, path: str) -> bytes | None:
        with self._explained("read", path) as checked:
            try:
                return self._files.read(checked)
            except FileNotFoundError:
                return None

    def open(self, path: str) -> pa.NativeFile:
        """Opens a file as Arrow and Parquet want it: seekable, and a large one not read yet. The caller closes it."""
        with self._explained("read", path) as checked:
            try:
                return self._files.open(checked)
            except FileNotFoundError:
                raise self._missing(path) from None

    def write(self, path: str, content: bytes | pa.Buffer) -> None:
        """Creates or replaces a file: readers see the old content or the new one, whatever crashes and whenever."""
        with self._explained("write", path) as checked:
            self._files.write(checked, content)

    def write_from(self, path: str, chunks: Iterable[bytes]) -> None:
        """Writes a file like ``write``, of content that comes in chunks and is never in memory as a whole."""
        with self._explained("write", path) as checked:
            self._files.write_from(checked, chunks)

    def create(self, path: str, content: bytes | pa.Buffer) -> bool:
        """Creates a file with this content unless it exists; of several callers at once, exactly one gets True."""
        with self._explained("create", path) as checked:
            return self._files.create(checked, content)

    def list_names(self, folder: str) -> list[str]:
        """Returns the sorted names of the files in a folder, none if there is no such folder.

        Hidden files are left out: interrupted writes, whether ours or Spark's, and Hadoop's checksums.
        """
        with self._explained("list", folder) as checked:
            return self._files.list_names(checked)

    def walk(self, folder: str) -> Iterator[tuple[str, int, float]]:
        """Yields every file below a folder: its path relative to the checkpoint, its bytes, and its last change.

        Times are in seconds since 1970, by the clock of the file system. Hidden files are there too, so that a
        clean-up finds interrupted writes.
        """
        return self._walk(self._checked(folder))

    def delete(self, path: str) -> None:
        """Deletes a file; one that is gone already is as good."""
        with self._explained("delete", path) as checked:
            self._files.delete(checked)

    def copy_to(self, path: str, other: Storage, other_path: str) -> None:
        """Copies a file to another storage, as atomically as ``write``, and without holding all of it in memory."""
        with self._explained("copy", path) as checked:
            try:
                if self._files.copy_within(checked, other._files, other._checked(other_path)):
                    return
            except FileNotFoundError:
                raise self._missing(path) from None
        with self.open(path) as source, other._explained("write", other_path) as checked:
            other._files.write_from(checked, self._chunks(source, path))

    def _walk(self, folder: str) -> Iterator[tuple[str, int, float]]:
        with self._explained("list", folder):
            yield from self._files.walk(folder)

    def _chunks(self, source: pa.NativeFile, path: str) -> Iterator[bytes]:
        with self._explained("read", path):
            while chunk := source.read(_COPY_BYTES):
                yield chunk

    def _checked(self, path: str) -> str:
        parts = PurePosixPath(path)
        # Manifests name files, and what names files may be damaged or forged.
        if parts.is_absolute() or ".." in parts.parts or "\0" in path:
            raise CheckpointError(
                f"{path!r} is not a path inside the checkpoint {self.location}. The checkpoint is damaged: restore it "
                f"from a copy, or use a new checkpoint."
            )
        return "/".join(parts.parts)

    def _missing(self, path: str) -> CheckpointError:
        return CheckpointError(
            f"The checkpoint file {self.full_path(path)} is missing. Restore it from a copy of the checkpoint, or use "
            f"a new checkpoint."
        )

    @contextmanager
    def _explained(self, action: str, path: str) -> Iterator[str]:
        """Gives the checked path; what the file system refuses to do with it becomes an error that says what to do."""
        checked = self._checked(path)
        try:
            yield checked
        except CheckpointError:
            raise
        except self._files.errors as error:
            raise self._files.refused(action, checked, error) from error


def _files_at(location: str, *, durable: bool) -> Files:
    scheme = _SCHEME.match(location)
    if scheme is None or scheme[1].lower() == "file":
        return LocalFiles(location, durable=durable)
    # Processes whose checkpoint is a directory are spared fsspec, which takes longer to load than most of this package.
    from anabranch.checkpoint.storage.remote import RemoteFiles

    return RemoteFiles(location)
