"""The directory that a demonstration writes to: claimed for one run, emptied of the last, and filled at the end."""

from __future__ import annotations

import fcntl
import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anabranch.control.strategies import MIGRATIONS
from anabranch.core.errors import SettingsError

if TYPE_CHECKING:
    from anabranch.workload.plot import DrawnRun

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
        """Make the directory of one of several runs."""
        part = OutputDirectory(self.path / migration)
        part.epochs.mkdir(parents=True)
        return part

    def write_results(self, summary: Mapping[str, Any], *, title: str) -> list[Path]:
        """Write lines, pictures and summary; return the files that there are now."""
        # Imports Arrow and NumPy, which the command line does without.
        from anabranch.workload.latency import append_latencies, read_latencies

        if any(self.epochs.glob("*.csv")):
            append_latencies(self.latencies, read_latencies(self.epochs))
        self._draw({"": (self, summary)}, self.pictures, title)
        return self._finish(summary, (self.latencies, *self.pictures, self.summary))

    def write_comparison(self, summaries: Mapping[str, Mapping[str, Any]], *, title: str) -> list[Path]:
        """Write one picture and one summary of several runs, whose own results are in their parts."""
        parts = {name: (OutputDirectory(self.path / name), summary) for name, summary in summaries.items()}
        self._draw(parts, self.comparison, title)
        return self._finish(summaries, (*self.comparison, self.summary))

    def _draw(
        self,
        runs: Mapping[str, tuple[OutputDirectory, Mapping[str, Any]]],
        pictures: tuple[Path, ...],
        title: str,
    ) -> None:
        """Draw the runs that have rows. Without the library that draws, the other results are written all the same."""
        from anabranch.workload.plot import missing_library, plot_runs

        drawn = [part._drawn(name, summary) for name, (part, summary) in runs.items() if summary["rows"]["sink"]]
        if drawn and not missing_library():
            plot_runs(drawn, pictures, title=title)

    def _drawn(self, name: str, summary: Mapping[str, Any]) -> DrawnRun:
        """Describe a run to be drawn: rows, and rescales from when they were asked for to the output after them."""
        from anabranch.workload.latency import read_latencies
        from anabranch.workload.plot import DrawnRun

        events, spans = [], []
        for rescale in summary["rescales"]:
            events.append((rescale["asked_ms"], f"rescale: {rescale['what'].split(',')[0]}"))
            if rescale["ended_ms"] is not None:
                events.append((rescale["ended_ms"], f"{rescale['state']}, {rescale['seconds']:.1f} s"))
                spans.append((rescale["asked_ms"], rescale["first_output_ms"] or rescale["ended_ms"]))
        return DrawnRun(name, read_latencies(self.latencies), events, spans)

    def _finish(self, summary: Mapping[str, Any], files: tuple[Path, ...]) -> list[Path]:
        self.summary.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
        shutil.rmtree(self.epochs, ignore_errors=True)
        return [path for path in files if path.exists()]


@contextmanager
def claim_output(path: Path) -> Iterator[OutputDirectory]:
    """Empty and lock the directory. One that holds anything that no demonstration has written is refused."""
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
            # The lock belongs to the open file, so it is gone with the process, however that ends.
            try:
                fcntl.flock(lock.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise SettingsError(
                    f"--output is {path}, where another demonstration is writing. Choose another directory, or stop it."
                ) from None
            output = OutputDirectory(path)
            output.clear()
            output.epochs.mkdir()
            yield output
    except PermissionError as error:
        raise SettingsError(f"--output is {path}, which cannot be written. Choose another directory.") from error
