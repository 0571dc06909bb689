"""Recorded events: which files of a directory hold them, and in which columns."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from anabranch.core.errors import SettingsError

FORMATS = ("json", "csv", "parquet")
#: What the job needs of an event, with Spark's types.
NEEDED = {"id": "LONG", "server_name": "STRING"}


@dataclass(frozen=True)
class RecordedEvents:
    """Event files of one format."""

    directory: Path
    format: str
    #: The columns to read, in Spark's words. Of CSV files these are all that there are, because they go by position.
    schema: str
    #: How many files there are, each of them an epoch.
    files: int = 1


def find_recorded(directory: Path) -> RecordedEvents:
    """Look at the files, and refuse what the job could not read."""
    if not directory.is_dir():
        raise SettingsError(f"--input is {directory}, which is not a directory. {_advice(directory)}")
    # Spark's file source does not read hidden files either.
    files = sorted(path for path in directory.iterdir() if path.is_file() and path.name[0] not in "._")
    formats = {path.suffix.removeprefix(".") for path in files}
    if not files:
        raise SettingsError(f"--input is {directory}, which holds no files. {_advice(directory)}")
    if len(formats) > 1 or not formats.issubset(FORMATS):
        raise SettingsError(
            f"--input is {directory}, which holds files of the kinds {', '.join(sorted(formats))}. "
            f"Choose a directory with files of one kind: {', '.join(FORMATS)}."
        )
    (format,) = formats
    try:
        columns = _columns(files[0], format)
    except (OSError, ValueError) as error:
        raise SettingsError(f"{files[0]} cannot be read as {format}: {error}. Choose another --input.") from None
    missing = [name for name in NEEDED if name not in columns]
    if missing:
        raise SettingsError(
            f"The events in {files[0]} have no {' and no '.join(missing)}. "
            "Choose events like those of anabranch workgen."
        )
    read = columns if format == "csv" else list(NEEDED)
    schema = ", ".join(f"`{name}` {NEEDED.get(name, 'STRING')}" for name in read)
    return RecordedEvents(directory, format, schema, len(files))


def _advice(directory: Path) -> str:
    return f"Make event files with: anabranch workgen {directory} --rows 10000 --files 20"


def _columns(path: Path, format: str) -> list[str]:
    """The names of the columns of a file."""
    if format == "parquet":
        # Takes half a second to import, and only this format needs it.
        import pyarrow.parquet as pq

        return list(pq.read_schema(path).names)
    with path.open(encoding="utf-8") as lines:
        first = lines.readline()
    if format == "csv":
        return [name.strip().strip('"') for name in first.split(",")]
    document = json.loads(first)
    return list(document) if isinstance(document, dict) else []
