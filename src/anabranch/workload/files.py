"""Event files of any size, written a chunk at a time: JSON lines, CSV or Parquet."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TypeAlias, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from anabranch.core.errors import SettingsError
from anabranch.workload.events import WorkloadSpec, chunk_rows, event_schema, generate, generate_batches

FILE_FORMATS = ("json", "csv", "parquet")

#: Told after every chunk: the rows and the bytes written so far.
Progress: TypeAlias = Callable[[int, int], None]

_FILES_MAX = 100_000
_SAMPLE_ROWS = 4096
_TIME_WIDTH = len("2024-01-01 00:00:00.000000")
_DATE_WIDTH = len("2024-01-01")


@dataclass(frozen=True)
class FilesWritten:
    """The files that were written, in the order of their events."""

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
    """Write events 0, 1, 2, ... to files of about the same size, up to a number of rows or of bytes.

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
            file = _EventFile(
                stream,
                spec,
                schema,
                first=row,
                rows=None if rows is None else rows * (index + 1) // files - row,
                size_bytes=None if size_bytes is None else size_bytes * (index + 1) // files - written_bytes,
            )
            file_rows = 0
            for file_rows, file_bytes in file.write_parquet() if format == "parquet" else file.write_text(format):
                if progress is not None:
                    progress(row + file_rows, written_bytes + file_bytes)
        row += file_rows
        written_bytes += path.stat().st_size
        paths.append(path)
    return FilesWritten(tuple(paths), row, written_bytes)


def check_amount(*, rows: int | None, size_bytes: int | None, files: int, label: Callable[[str], str] = str) -> None:
    """Refuse anything but exactly one amount, and one that is too small for the files."""
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


@dataclass(frozen=True)
class _EventFile:
    """A file to write: events from `first` on, to a number of rows or of bytes. Each chunk yields what is written."""

    stream: BinaryIO
    spec: WorkloadSpec
    schema: pa.Schema
    first: int
    rows: int | None
    size_bytes: int | None

    def write_text(self, format: str) -> Iterator[tuple[int, int]]:
        """Write lines of JSON or CSV, at least one, and no more than fit into the size."""
        as_lines = _json_lines if format == "json" else _csv_lines
        done = 0
        done_bytes = self.stream.write((",".join(self.schema.names) + "\n").encode()) if format == "csv" else 0
        is_full = False
        while not is_full:
            lines = as_lines(self._chunk(done, None if self.rows is None else self.rows - done))
            if self.size_bytes is not None:
                room_bytes = self.size_bytes - done_bytes
                fitting = int(np.searchsorted(_line_offsets(lines), room_bytes, side="right")) - 1
                is_full = fitting < len(lines)
                lines = lines[: max(fitting, 0 if done else 1)]
            done_bytes += self.stream.write(_line_bytes(lines))
            done += len(lines)
            is_full = is_full or done == self.rows
            yield done, done_bytes

    def write_parquet(self) -> Iterator[tuple[int, int]]:
        """Write row groups. The size is met about: how well events compress is known only after the fact."""
        writer = pq.ParquetWriter(self.stream, self.schema)
        row_bytes = 0.0 if self.size_bytes is None else self._sample_row_bytes()
        done = 0
        is_full = False
        while not is_full:
            if self.size_bytes is None:
                wanted = cast(int, self.rows) - done
            else:
                wanted = max(1, round((self.size_bytes - self.stream.tell()) / row_bytes))
            batch = self._chunk(done, wanted)
            writer.write_batch(batch)
            done += batch.num_rows
            row_bytes = self.stream.tell() / done
            is_beyond = self.size_bytes is not None and self.stream.tell() >= self.size_bytes
            is_full = batch.num_rows == wanted or is_beyond
            yield done, self.stream.tell()
        writer.close()

    def _chunk(self, done: int, rows: int | None) -> pa.RecordBatch:
        whole = chunk_rows(self.spec)
        count = whole if rows is None else min(whole, rows)
        return next(generate_batches(self.spec, self.first + done, count, self.schema.names))

    def _sample_row_bytes(self) -> float:
        sample = pa.BufferOutputStream()
        pq.write_table(generate(self.spec, self.first, _SAMPLE_ROWS, self.schema.names), sample)
        return float(sample.tell() / _SAMPLE_ROWS)


@contextmanager
def _appearing_whole(path: Path) -> Iterator[BinaryIO]:
    """Open a hidden file, which file sources ignore, and give it its name when all went well."""
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


def _json_lines(batch: pa.RecordBatch) -> pa.StringArray:
    """Turn each row into a JSON object with a line break.

    The strings of generated events hold no quote, comma, backslash or line break, so nothing needs escaping.
    """
    pieces: list[pa.Scalar | pa.Array | str] = []
    text = "{"
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        is_bare = pa.types.is_integer(column.type) or pa.types.is_boolean(column.type)
        quote = "" if is_bare else '"'
        pieces += [f'{text}"{name}":{quote}', _as_text(column)]
        text = f"{quote},"
    return pc.binary_join_element_wise(*pieces, text.removesuffix(",") + "}\n", "")


def _csv_lines(batch: pa.RecordBatch) -> pa.StringArray:
    """Turn each row into a line without quotes, with its line break."""
    pieces: list[pa.Scalar | pa.Array | str] = []
    for column in batch.columns:
        pieces += [_as_text(column), ","]
    return pc.binary_join_element_wise(*pieces[:-1], "\n", "")


def _line_offsets(lines: pa.StringArray) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    """Return where each line begins in _line_bytes, and at last where they end."""
    return np.frombuffer(lines.buffers()[1], dtype=np.int32)[lines.offset : lines.offset + len(lines) + 1]


def _line_bytes(lines: pa.StringArray) -> memoryview:
    """Return the text of all lines: in memory they already follow each other, so nothing is copied."""
    offsets = _line_offsets(lines)
    return memoryview(lines.buffers()[2])[int(offsets[0]) : int(offsets[-1])]


def _as_text(column: pa.Array) -> pa.StringArray:
    if pa.types.is_timestamp(column.type):
        return _iso_times(column)
    return column if pa.types.is_string(column.type) else column.cast(pa.string())


def _iso_times(column: pa.TimestampArray) -> pa.StringArray:
    """Write times like 2024-01-01T00:00:00.000000Z. Casting times that have a zone does it 40 times slower."""
    spaced = column.cast(pa.timestamp("us")).cast(pa.string())
    letters = np.empty((len(column), _TIME_WIDTH + 1), dtype=np.uint8)
    letters[:, :_TIME_WIDTH] = np.frombuffer(_line_bytes(spaced), dtype=np.uint8).reshape(-1, _TIME_WIDTH)
    letters[:, _DATE_WIDTH] = ord("T")
    letters[:, _TIME_WIDTH] = ord("Z")
    offsets = np.arange(len(column) + 1, dtype=np.int32) * np.int32(_TIME_WIDTH + 1)
    return pa.StringArray.from_buffers(len(column), pa.py_buffer(offsets), pa.py_buffer(letters))
