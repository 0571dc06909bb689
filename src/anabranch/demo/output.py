"""The directory that a demonstration writes to: claimed for one run, emptied of the last, and filled at the end."""

from __future__ import annotations

import fcntl
import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from anabranch.core.errors import SettingsError

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
        self.plot = path / "latency.png"
        self.summary = path / "summary.json"
        self.log = path / "spark.log"

    def clear(self) -> None:
        """Remove what an earlier demonstration left, and nothing else."""
        for entry in (self.latencies, self.plot, self.summary, self.log):
            entry.unlink(missing_ok=True)
        for folder in (self.checkpoint, self.epochs):
            if folder.exists():
                shutil.rmtree(folder)

    def write_results(self, summary: Mapping[str, Any], *, title: str) -> list[Path]:
        """Write lines, plot and summary; the files that there are now."""
        # Imports Arrow and NumPy, which the command line does without.
        from anabranch.workload.latency import append_latencies, plot_latency, read_latencies

        if any(self.epochs.glob("*.csv")):
            append_latencies(self.latencies, read_latencies(self.epochs))
        shutil.rmtree(self.epochs, ignore_errors=True)
        if summary["rows"]["sink"]:
            plot_latency(self.latencies, self.plot, title=title)
        self.summary.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
        return [path for path in (self.latencies, self.plot, self.summary) if path.exists()]


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
