"""Event files of any size, written a chunk at a time."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal, Protocol, TypeAlias, cast, get_args

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from anabranch.core.errors import SettingsError
from anabranch.workload.events import WorkloadSpec, chunk_rows, event_schema, generate, generate_batches
from anabranch.workload.text import csv_header, csv_lines, json_lines, line_bytes, line_offsets

FileFormat = Literal["json", "csv", "parquet"]
FILE_FORMATS: tuple[str, ...] = get_args(FileFormat)

#: Told after every chunk: the rows and the bytes written so far.
Progress: TypeAlias = Callable[[int, int], None]

_FILES_MAX = 100_000
_SAMPLE_ROWS = 4096


@dataclass(frozen=True)
class FilesWritten:
    """What there is now: files in the order of their events."""

    paths: tuple[Path, ...]
    rows: int
    size_bytes: int


def write_files(
    spec: WorkloadSpec,
    directory: str | os.PathLike[str],
    *,
    rows: int | None = None,
    size_bytes: int | None = None,
    files: int = 1,
    format: str = "json",
    columns: Sequence[str] | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> FilesWritten:
    """Write events 0, 1, 2, ... to files of about the same size, until there are so many rows, or so many bytes.

    Each file appears whole or not at all. With overwrite, event files that are there already are replaced; a
    directory that holds anything else is left alone.
    """
    check_amount(rows=rows, size_bytes=size_bytes, files=files)
    if format not in FILE_FORMATS:
        raise SettingsError(f"The format '{format}' is unknown. Choose one of {', '.join(FILE_FORMATS)}.")
    schema = event_schema(spec, columns)
    target = Path(directory)
    _make_room(target, overwrite=overwrite)
    paths: list[Path] = []
    row = written_bytes = 0
    for index in range(files):
        path = target / f"events-{index:05d}.{format}"
        with _appearing_whole(path) as stream:
            file = _open(format, spec, schema, stream, _relative(progress, row, written_bytes))
            if rows is not None:
                file.write_rows(row, rows * (index + 1) // files - row)
            else:
                file.write_bytes(row, cast(int, size_bytes) * (index + 1) // files - written_bytes)
            file.close()
        row += file.rows
        written_bytes += path.stat().st_size
        paths.append(path)
    return FilesWritten(tuple(paths), row, written_bytes)


def check_amount(*, rows: int | None, size_bytes: int | None, files: int, label: Callable[[str], str] = str) -> None:
    """Raise an error unless exactly one amount is given and it is enough for the files."""
    if rows is None and size_bytes is None:
        raise SettingsError(f"Neither {label('rows')} nor {label('size')} is given. Give one of the two.")
    if rows is not None and size_bytes is not None:
        raise SettingsError(f"Both {label('rows')} and {label('size')} are given. Give one of the two.")
    if not 1 <= files <= _FILES_MAX:
        raise SettingsError(f"{label('files')} is {files}. Choose a number between 1 and {_FILES_MAX}.")
    name, amount = ("rows", rows) if rows is not None else ("size", size_bytes)
    if cast(int, amount) < files:
        raise SettingsError(
            f"{label(name)} is {amount}, but {label('files')} is {files}, and no file can be empty. "
            f"Give at least {files}."
        )


class _EventFile(Protocol):
    """One file being written."""

    rows: int

    def write_rows(self, first: int, count: int) -> None: ...

    def write_bytes(self, first: int, size_bytes: int) -> None:
        """As many events, at least one, as come closest to the size without much exceeding it."""

    def close(self) -> None: ...


class _TextFile:
    def __init__(
        self, format: str, spec: WorkloadSpec, schema: pa.Schema, stream: BinaryIO, progress: Progress
    ) -> None:
        self._lines = json_lines if format == "json" else csv_lines
        self._spec, self._columns, self._stream, self._progress = spec, schema.names, stream, progress
        self.rows = 0
        self._size_bytes = stream.write(csv_header(schema)) if format == "csv" else 0

    def write_rows(self, first: int, count: int) -> None:
        for batch in generate_batches(self._spec, first, count, self._columns):
            self._write(self._lines(batch))

    def write_bytes(self, first: int, size_bytes: int) -> None:
        while True:
            batch = next(generate_batches(self._spec, first + self.rows, chunk_rows(self._spec), self._columns))
            lines = self._lines(batch)
            room_bytes = size_bytes - self._size_bytes
            fitting = int(np.searchsorted(line_offsets(lines), room_bytes, side="right")) - 1
            if fitting < len(lines):
                self._write(lines[: max(fitting, 0 if self.rows else 1)])
                return
            self._write(lines)

    def close(self) -> None:
        self._stream.flush()

    def _write(self, lines: pa.StringArray) -> None:
        self._size_bytes += self._stream.write(line_bytes(lines))
        self.rows += len(lines)
        self._progress(self.rows, self._size_bytes)


class _ParquetFile:
    def __init__(self, spec: WorkloadSpec, schema: pa.Schema, stream: BinaryIO, progress: Progress) -> None:
        self._spec, self._schema, self._stream, self._progress = spec, schema, stream, progress
        self._writer = pq.ParquetWriter(stream, schema)
        self.rows = 0

    def write_rows(self, first: int, count: int) -> None:
        for batch in generate_batches(self._spec, first, count, self._schema.names):
            self._write(batch)

    def write_bytes(self, first: int, size_bytes: int) -> None:
        # How well events compress is known only after the fact: guess from a sample, then from what is written.
        sample = pa.BufferOutputStream()
        pq.write_table(generate(self._spec, first, _SAMPLE_ROWS, self._schema.names), sample)
        row_bytes = sample.tell() / _SAMPLE_ROWS
        whole = chunk_rows(self._spec)
        while True:
            count = min(whole, max(1, round((size_bytes - self._stream.tell()) / row_bytes)))
            self._write(next(generate_batches(self._spec, first + self.rows, count, self._schema.names)))
            row_bytes = self._stream.tell() / self.rows
            if count < whole or self._stream.tell() >= size_bytes:
                return

    def close(self) -> None:
        self._writer.close()

    def _write(self, batch: pa.RecordBatch) -> None:
        self._writer.write_batch(batch)
        self.rows += batch.num_rows
        self._progress(self.rows, self._stream.tell())


def _open(format: str, spec: WorkloadSpec, schema: pa.Schema, stream: BinaryIO, progress: Progress) -> _EventFile:
    if format == "parquet":
        return _ParquetFile(spec, schema, stream, progress)
    return _TextFile(format, spec, schema, stream, progress)


def _relative(progress: Progress | None, rows: int, size_bytes: int) -> Progress:
    """A callback that adds what the files before hold."""
    if progress is None:
        return lambda _rows, _bytes: None
    return lambda more_rows, more_bytes: progress(rows + more_rows, size_bytes + more_bytes)


@contextmanager
def _appearing_whole(path: Path) -> Iterator[BinaryIO]:
    """A stream to a hidden file, which file sources ignore, that gets its name when all went well."""
    hidden = path.with_name(f".{path.name}.tmp")
    try:
        with hidden.open("wb") as stream:
            yield stream
        hidden.replace(path)
    finally:
        hidden.unlink(missing_ok=True)


def _make_room(target: Path, *, overwrite: bool) -> None:
    if target.exists() and not target.is_dir():
        raise SettingsError(f"{target} is a file. Choose a directory.")
    present = sorted(target.iterdir()) if target.exists() else []
    if present and not overwrite:
        raise SettingsError(f"{target} is not empty. Choose an empty directory, or ask to overwrite.")
    for entry in present:
        if not _is_event_file(entry):
            raise SettingsError(
                f"{target} holds {entry.name}, which is not an event file, so nothing there is overwritten. "
                "Choose another directory, or remove it."
            )
    for entry in present:
        entry.unlink()
    target.mkdir(parents=True, exist_ok=True)


def _is_event_file(path: Path) -> bool:
    name = path.name.removeprefix(".").removesuffix(".tmp")
    stem, _, suffix = name.rpartition(".")
    return path.is_file() and stem.startswith("events-") and stem[7:].isdigit() and suffix in FILE_FORMATS
