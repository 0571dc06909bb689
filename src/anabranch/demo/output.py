"""The directory that a demonstration writes to: claimed for one run, emptied of the last, and filled at the end."""

from __future__ import annotations

import fcntl
import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anabranch.core.errors import SettingsError
from anabranch.core.settings import MIGRATIONS

if TYPE_CHECKING:
    from anabranch.workload.plot import Run

#: Marks a directory as one of a demonstration; its contents may be replaced by those of the next.
MARKER = ".anabranch-demo"


class OutputDirectory:
    """Knows every path of a demonstration's results."""

    def __init__(self, path: Path) -> None:
        self.path = path
        #: Spark's offsets and the job's state, which is Parquet.
        self.checkpoint = path / "checkpoint"
        #: The lines of each epoch, while the job runs.
        self.epochs = path / "epochs"
        self.latencies = path / "latency.csv"
        self.pictures = (path / "latency.svg", path / "latency.png")
        self.comparison = (path / "comparison.svg", path / "comparison.png")
        self.summary = path / "summary.json"
        self.log = path / "spark.log"

    def clear(self) -> None:
        """Remove what an earlier demonstration left, and nothing else."""
        for entry in (self.latencies, *self.pictures, *self.comparison, self.summary, self.log):
            entry.unlink(missing_ok=True)
        for folder in (self.checkpoint, self.epochs, *(self.path / name for name in MIGRATIONS)):
            if folder.exists():
                shutil.rmtree(folder)

    def part(self, migration: str) -> OutputDirectory:
        """The directory of one of several runs."""
        part = OutputDirectory(self.path / migration)
        part.epochs.mkdir(parents=True)
        return part

    def write_results(self, summary: Mapping[str, Any], *, title: str) -> list[Path]:
        """Write lines, pictures and summary; the files that there are now."""
        # Imports Arrow and NumPy, which the command line does without.
        from anabranch.workload.latency import append_latencies, read_latencies
        from anabranch.workload.plot import plot_runs

        if any(self.epochs.glob("*.csv")):
            append_latencies(self.latencies, read_latencies(self.epochs))
        shutil.rmtree(self.epochs, ignore_errors=True)
        if summary["rows"]["sink"]:
            plot_runs([self._run("", summary)], self.pictures, title=title)
        _write_json(self.summary, summary)
        return [path for path in (self.latencies, *self.pictures, self.summary) if path.exists()]

    def write_comparison(self, summaries: Mapping[str, Mapping[str, Any]], *, title: str) -> list[Path]:
        """Write one picture and one summary of several runs, whose own results are in their parts."""
        from anabranch.workload.plot import plot_runs

        parts = {name: OutputDirectory(self.path / name) for name in summaries}
        runs = [parts[name]._run(name, summary) for name, summary in summaries.items() if summary["rows"]["sink"]]
        if runs:
            plot_runs(runs, self.comparison, title=title)
        _write_json(self.summary, summaries)
        shutil.rmtree(self.epochs, ignore_errors=True)
        return [path for path in (*self.comparison, self.summary) if path.exists()]

    def _run(self, name: str, summary: Mapping[str, Any]) -> Run:
        """A run as it is drawn: its rows, and its rescales from when they were asked for to the output after them."""
        from anabranch.workload.latency import read_latencies
        from anabranch.workload.plot import Run

        events, spans = [], []
        for rescale in summary["rescales"]:
            events.append((rescale["asked_ms"], f"rescale: {rescale['what'].split(',')[0]}"))
            if rescale["ended_ms"] is not None:
                events.append((rescale["ended_ms"], f"{rescale['state']}, {rescale['seconds']:.1f} s"))
                spans.append((rescale["asked_ms"], rescale["first_output_ms"] or rescale["ended_ms"]))
        return Run(name, read_latencies(self.latencies), events, spans)


def _write_json(path: Path, document: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


@contextmanager
def claim_output(path: Path) -> Iterator[OutputDirectory]:
    """The directory, empty and locked. One that holds anything of somebody else is refused."""
    marker = path / MARKER
    try:
        if path.exists() and not path.is_dir():
            raise SettingsError(f"--output is {path}, which is a file. Choose a directory.")
        if path.exists() and any(path.iterdir()) and not marker.exists():
            raise SettingsError(
                f"--output is {path}, which is not empty and not from an earlier demonstration. "
                "Choose another directory."
            )
        path.mkdir(parents=True, exist_ok=True)
        with marker.open("a") as lock:
            _take(lock.fileno(), path)
            output = OutputDirectory(path)
            output.clear()
            output.epochs.mkdir()
            yield output
    except PermissionError as error:
        raise SettingsError(f"--output is {path}, which cannot be written. Choose another directory.") from error


def _take(descriptor: int, path: Path) -> None:
    """The lock belongs to the open file, so it is gone with the process, however that ends."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise SettingsError(
            f"--output is {path}, where another demonstration is writing. Choose another directory, or stop it."
        ) from None
