"""The command that writes event files: ``anabranch workgen``."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from anabranch.core.errors import SettingsError
from anabranch.workload.events import WorkloadSpec, check_limits
from anabranch.workload.files import FILE_FORMATS, check_amount, write_files

_UNITS = {"": 1, "B": 1} | {
    prefix + unit: base**power
    for power, prefix in enumerate("KMGT", start=1)
    for unit, base in (("", 1000), ("B", 1000), ("IB", 1024))
}


def parse_size(text: str) -> int:
    """Read a number of bytes like 1GB (10**9), 64MiB (2**26) or 4096."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2].upper() not in _UNITS:
        raise SettingsError(f"--size is '{text}', which is not a size. Give something like 500MB, 1GB or 64MiB.")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def workgen(
    out: Annotated[Path, typer.Argument(help="The directory to write to; it is made if there is none.")],
    rows: Annotated[int | None, typer.Option(help="How many events to write.")] = None,
    size: Annotated[str | None, typer.Option(help="How much to write instead, like 500MB or 1GB.")] = None,
    files: Annotated[int, typer.Option(help="Over how many files.")] = 1,
    format: Annotated[str, typer.Option(help=f"One of {', '.join(FILE_FORMATS)}.")] = "json",
    keys: Annotated[int, typer.Option(help="How many different server names.")] = WorkloadSpec.keys,
    skew: Annotated[float, typer.Option(help="Zipf exponent over the server names; 0 is uniform.")] = WorkloadSpec.skew,
    ids: Annotated[int, typer.Option(help="How many different ids.")] = WorkloadSpec.ids,
    payload_bytes: Annotated[
        int, typer.Option(help="The length of an extra payload column.")
    ] = WorkloadSpec.payload_bytes,
    disorder_ms: Annotated[
        int, typer.Option(help="How far event times are out of order, at most.")
    ] = WorkloadSpec.disorder_ms,
    seed: Annotated[int, typer.Option(help="Equal seeds give equal events.")] = WorkloadSpec.seed,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace event files that are there.")] = False,
) -> None:
    """Write files of events like Wikipedia's edits."""
    began = time.monotonic()
    try:
        size_bytes = None if size is None else parse_size(size)
        check_amount(rows=rows, size_bytes=size_bytes, files=files, label=_flag)
        numbers: dict[str, Any] = {"keys": keys, "ids": ids, "skew": skew, "seed": seed}
        numbers |= {"payload_bytes": payload_bytes, "disorder_ms": disorder_ms}
        check_limits(numbers, label=_flag)
        with _bar(total=rows if rows is not None else size_bytes) as show:
            written = write_files(
                WorkloadSpec(**numbers),
                out,
                rows=rows,
                size_bytes=size_bytes,
                files=files,
                format=format,
                overwrite=overwrite,
                progress=lambda done_rows, done_bytes: show(done_rows if rows is not None else done_bytes),
            )
    except SettingsError as error:
        typer.echo(f"anabranch workgen: {error}", err=True)
        raise typer.Exit(2) from error
    except OSError as error:
        typer.echo(f"anabranch workgen: {error}. Check the disk and the permissions of {out}.", err=True)
        raise typer.Exit(1) from error
    taken_s = time.monotonic() - began
    typer.echo(
        f"{written.rows:,} events in {out} after {taken_s:.1f} s "
        f"(format: {format}, files: {len(written.paths)}, size: {written.size_bytes / 1e6:,.1f} MB)"
    )


@contextmanager
def _bar(total: int | None) -> Iterator[Callable[[int], None]]:
    """Show how much is done, with a bar on a terminal and in silence elsewhere."""
    columns = TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn()
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("writing", total=total)
        yield lambda done: bar.update(task, completed=done)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
