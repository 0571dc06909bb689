"""Files on whatever fsspec reaches by URL: object stores above all.

On an object store a file appears with its whole content or not at all, so writing is one request; creating is one
under a condition. Nothing is kept between calls: drivers are asked for where they are used, and fsspec has one ready
for each process and set of options.
"""

from __future__ import annotations

import io
import posixpath
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

import fsspec.core
import pyarrow as pa
from fsspec.spec import AbstractFileSystem

from anabranch.checkpoint.storage.drivers import (
    codes_of,
    is_conflict,
    is_no_bucket,
    is_taken,
    is_unsupported,
    not_exclusive,
    place_of,
    refusal,
)
from anabranch.core.errors import CheckpointError

#: What is read of a file when it is opened. Most files of a checkpoint are smaller, and are one request then.
_FIRST_READ_BYTES = 2**20
#: What is read at a time of the others, at least.
_READ_BYTES = 4 * 2**20
#: What is sent at a time of a file that is copied: a file has at most 10,000 such parts on S3.
_PART_BYTES = 16 * 2**20
#: How long to wait before a conditional write that met another one is sent again.
_CONFLICT_PAUSES_SECONDS = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6)
#: What drivers raise when they fail to tidy up, which changes nothing: the error before is the one to report.
_DRIVER_ERRORS = (OSError, ValueError, TypeError, AttributeError, KeyError, RuntimeError)
#: Metadata by which a creator recognises its own file.
_CREATED_BY = "anabranch-created-by"
#: Where drivers say when a file was last modified.
_MODIFIED = ("LastModified", "last_modified", "mtime", "updated", "modified", "created")

#: The drivers in use, kept alive. A forked child that finalizes its parent's would wait for threads that it does not
#: have, and say goodbye on connections that its parent goes on using.
_kept: dict[int, AbstractFileSystem] = {}


class RemoteFiles:
    """The files of a checkpoint behind a URL."""

    #: Drivers raise the errors of their own libraries, and those are many.
    errors: tuple[type[Exception], ...] = (Exception,)

    def __init__(self, location: str) -> None:
        self._place = place_of(location)
        self._known_exclusive = False

    @property
    def location(self) -> str:
        return self._place.url

    def full_path(self, path: str) -> str:
        return f"{self._place.url}/{path}" if path else self._place.url

    def read(self, path: str) -> bytes:
        fs, target = self._find(path)
        with self._missing_files_only():
            return bytes(fs.cat_file(target, **(self._place.store.read_whole if self._place.store else {})))

    def open(self, path: str) -> pa.NativeFile:
        fs, target = self._find(path)
        with self._missing_files_only():
            try:
                start = fs.cat_file(target, start=0, end=_FIRST_READ_BYTES)
            except Exception as error:
                if not codes_of(error) & {"InvalidRange", "416"}:
                    raise
                start = b""  # no range of an empty file is valid
            if len(start) < _FIRST_READ_BYTES:
                return pa.BufferReader(start)
            file = fs.open(target, "rb", block_size=_READ_BYTES, cache_type="readahead")
        return pa.PythonFile(_Reader(self, path, file), mode="r")

    def write(self, path: str, content: bytes | pa.Buffer) -> None:
        fs, target = self._find(path)
        with self._new_name(fs, target) as name:
            fs.pipe_file(name, _as_bytes(content))

    def write_from(self, path: str, chunks: Iterable[bytes]) -> None:
        fs, target = self._find(path)
        with self._new_name(fs, target) as name:
            file = fs.open(name, "wb", block_size=_PART_BYTES)
            try:
                for chunk in chunks:
                    file.write(chunk)
                file.close()
            except BaseException:
                self._abandon(file)
                raise

    def create(self, path: str, content: bytes | pa.Buffer) -> bool:
        if self._place.store is None:
            raise not_exclusive(self._place)
        fs, target = self._find(path)
        self._check_exclusive(fs, target)
        return self._create(fs, target, _as_bytes(content))

    def list_names(self, folder: str) -> list[str]:
        fs, target = self._find(folder)
        prefix = target.rstrip("/") + "/"
        try:
            with self._missing_files_only():
                entries = fs.ls(target, detail=True)
        except FileNotFoundError:
            return []
        # A store without folders may list the folder itself, as an empty file, or a file of that name.
        names = (e["name"].removeprefix(prefix) for e in entries if e["type"] == "file" and _is_below(e, prefix))
        return sorted(name for name in names if not name.startswith("."))

    def walk(self, folder: str) -> Iterator[tuple[str, int, float]]:
        fs, target = self._find(folder)
        prefix = target.rstrip("/") + "/"
        try:
            with self._missing_files_only():
                entries = fs.find(target, detail=True)
        except FileNotFoundError:
            return
        for _, entry in sorted(entries.items()):
            if entry["type"] == "file" and _is_below(entry, prefix):
                path = posixpath.join(folder, entry["name"].removeprefix(prefix))
                yield path, int(entry["size"]), _modified_seconds(entry)

    def delete(self, path: str) -> None:
        fs, target = self._find(path)
        with suppress(FileNotFoundError), self._missing_files_only():
            fs.rm_file(target)

    def copy_within(self, path: str, other: Any, other_path: str) -> bool:
        if not (isinstance(other, RemoteFiles) and self._place.store and self._place.store.copies):
            return False
        (fs, source), (other_fs, target) = self._find(path), other._find(other_path)
        if fs is not other_fs or source == target:  # S3 refuses to copy a file to itself
            return False
        with self._missing_files_only():
            fs.cp_file(source, target)
        return True

    def refused(self, action: str, path: str, error: Exception) -> CheckpointError:
        return refusal(self._place, action, self.full_path(path), error)

    def _find(self, path: str) -> tuple[AbstractFileSystem, str]:
        """Returns a driver of this process, and where it has the file."""
        # Others write to the checkpoint too: what a driver remembers of a folder may be wrong by now.
        options = {"use_listings_cache": False} if self._place.store else {}
        fs, root = fsspec.core.url_to_fs(self._place.url, **options)
        if not self._place.store:
            fs.invalidate_cache()
        _kept.setdefault(id(fs), fs)
        return fs, posixpath.join(root, path) if path else root

    @contextmanager
    def _missing_files_only(self) -> Iterator[None]:
        """Lets FileNotFoundError be about a file, and never about the bucket."""
        try:
            yield
        except FileNotFoundError as error:
            if is_no_bucket(error):
                raise self.refused("use", "", error) from error
            raise

    @contextmanager
    def _new_name(self, fs: AbstractFileSystem, target: str) -> Iterator[str]:
        """Gives the name under which to write a file; on leaving, the file has its own."""
        if self._place.store:
            yield target
            return
        temporary = _hidden(target)
        try:
            fs.makedirs(posixpath.dirname(target), exist_ok=True)
            yield temporary
            fs.mv(temporary, target)
        except BaseException:
            with suppress(*_DRIVER_ERRORS):
                fs.rm_file(temporary)
            raise
        fs.invalidate_cache()
        if fs.exists(temporary):
            raise CheckpointError(
                f"{self._place.url} cannot hold a checkpoint: files of {self._place.scheme}: are not replaced by "
                f"others that are moved there. Use an object store, or a local or mounted path."
            )

    def _abandon(self, file: Any) -> None:
        """Ends the writing of a file that is not complete."""
        with suppress(*_DRIVER_ERRORS):
            if self._place.store:
                # Closing the file, or only forgetting it, would make it appear with what there is of it.
                file.closed = True
                file.discard()
            else:
                file.close()

    def _check_exclusive(self, fs: AbstractFileSystem, target: str) -> None:
        """Makes sure that the store heeds conditions: many that call themselves compatible with S3 ignore them."""
        if self._known_exclusive:
            return
        probe = _hidden(target)
        outcomes = [self._create(fs, probe, b"probe") for _ in range(2)]
        fs.rm_file(probe)
        if outcomes != [True, False]:
            raise not_exclusive(self._place)
        self._known_exclusive = True

    def _create(self, fs: AbstractFileSystem, target: str, content: bytes) -> bool:
        mark = uuid4().hex
        argument = self._place.store and self._place.store.metadata_argument
        metadata = {argument: {_CREATED_BY: mark}} if argument else {}
        for pause in (*_CONFLICT_PAUSES_SECONDS, None):
            try:
                fs.pipe_file(target, content, mode="create", **metadata)
            except Exception as error:
                if is_taken(error):
                    # Requests whose answer got lost are repeated; then the file that exists may be our own. Without
                    # metadata to tell, nobody has created it: safe, and all callers try again or look at the file.
                    return bool(metadata) and _creator_of(fs, target) == mark
                if is_unsupported(error):
                    raise not_exclusive(self._place) from error
                if pause is None or not is_conflict(error):
                    raise
                threading.Event().wait(pause)
            else:
                return True
        raise AssertionError("unreachable")


class _Reader(io.RawIOBase):
    """A file of a driver whose errors say what to do."""

    def __init__(self, files: RemoteFiles, path: str, file: Any) -> None:
        super().__init__()
        self._files = files
        self._path = path
        self._file = file

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        try:
            return bytes(self._file.read(size))
        except Exception as error:
            raise self._files.refused("read", self._path, error) from error

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return int(self._file.seek(offset, whence))

    def tell(self) -> int:
        return int(self._file.tell())

    def close(self) -> None:
        self._file.close()
        super().close()


def _as_bytes(content: bytes | pa.Buffer) -> bytes:
    return content if isinstance(content, bytes) else bytes(content.to_pybytes())


def _hidden(target: str) -> str:
    """Returns a name beside a file that no listing shows."""
    folder, name = posixpath.split(target)
    return posixpath.join(folder, f".{name}.{uuid4().hex}.tmp")


def _is_below(entry: Mapping[str, Any], prefix: str) -> bool:
    name = str(entry["name"])
    return name.startswith(prefix) and name != prefix and not name.endswith("/")


def _creator_of(fs: AbstractFileSystem, target: str) -> str | None:
    try:
        mark = fs.metadata(target, refresh=True).get(_CREATED_BY)
    except FileNotFoundError:
        return None
    return None if mark is None else str(mark)


def _modified_seconds(entry: Mapping[str, Any]) -> float:
    when = next((entry[name] for name in _MODIFIED if entry.get(name) is not None), None)
    if isinstance(when, str):
        when = datetime.fromisoformat(when)
    if isinstance(when, datetime):
        return (when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp()
    if when is None:
        raise OSError(f"the driver does not say when {entry['name']} was last modified")
    return float(when)
