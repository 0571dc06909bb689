"""The cost of durability: big epochs with their checkpoint on disk, against the same with a checkpoint in memory."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from bench.figures import Budget, Ratio
from bench.harness import BenchmarkError, Query, Side, measure
from bench.machine import describe_machine
from bench.options import Epochs, KeyCount, Parallelism, Repeats, RowCount, Store, Warmup, Workers
from bench.report import Line, Report, parts_note
from bench.session import Lab, open_lab
from bench.sides import Setup, anabranch_side, totals
from bench.sources import all_keys, numbers

#: The work of the benchmark `steady`.
_ROWS, _KEYS, _WORKERS = 2_000_000, 200_000, 2
_BUDGET = Budget(bound=0.85, aim=0.95)
_ON_DISK, _IN_MEMORY = "on disk", "in memory"
_MEMORY_FILESYSTEMS = ("tmpfs", "ramfs")

MemoryFolder = Annotated[
    Path, typer.Option(help="A directory on a file system in memory, where waiting for the disk costs nothing.")
]


def durability(
    rows: RowCount = _ROWS,
    keys: KeyCount = _KEYS,
    epochs: Epochs = 8,
    warmup: Warmup = 3,
    repeats: Repeats = 3,
    workers: Workers = _WORKERS,
    parallelism: Parallelism = 2,
    store: Store = "memory",
    memory_folder: MemoryFolder = Path("/dev/shm"),
) -> None:
    """Keyed count and sum: rows/s with the checkpoint on disk against a checkpoint in memory."""
    options = dict(locals())
    setup = Setup(workers=workers, parallelism=parallelism, store=store)
    keys = min(keys, rows)
    with open_lab(parallelism=parallelism) as lab:
        machine = describe_machine(lab.folder, lab.java)
        filesystem = _check_places(lab, memory_folder)
        source = all_keys(numbers(lab.spark, rows=rows, partitions=parallelism), keys)
        side = anabranch_side(source, totals, setup, warmup=warmup, measured=epochs, keys=keys, name=_ON_DISK)
        with tempfile.TemporaryDirectory(prefix="anabranch-bench-", dir=memory_folder) as folder:
            runs = measure(lab, [side, _in_memory(side, Path(folder))], repeats=repeats)
    in_memory = runs.rate(_IN_MEMORY, rows)
    as_budgeted = (rows, keys, workers) == (_ROWS, _KEYS, _WORKERS)
    Report(
        name="durability",
        title=f"{rows:,} rows and {keys:,} keys an epoch, {workers} workers, {store} store",
        ratio_title="rows/s against memory",
        lines=[
            Line(
                work="count and sum",
                side=f"checkpoint {name}",
                figures={"rows/s": runs.rate(name, rows), "epoch, ms": runs.epoch_ms(name)},
                ratio=Ratio.of(runs.rate(name, rows), in_memory) if name == _ON_DISK else None,
                budget=_BUDGET if name == _ON_DISK and as_budgeted else None,
            )
            for name in (_IN_MEMORY, _ON_DISK)
        ],
        options=options,
        machine={**machine, "memory_filesystem": filesystem},
        runs=[run.to_json() for run in runs.runs],
        notes=[
            f"the disk has {machine['checkpoint_filesystem']}, the memory {filesystem}; Spark's own part of the "
            "checkpoint is with ours on both sides",
            *[parts_note(name, runs.of(name)[-1].parts_ms) for name in (_IN_MEMORY, _ON_DISK)],
        ],
    ).publish()


def _in_memory(side: Side, folder: Path) -> Side:
    """Return the same side with its whole checkpoint in another folder."""

    def start(checkpoint: str) -> Query:
        return side.start(str(folder / Path(checkpoint).name))

    return dataclasses.replace(side, name=_IN_MEMORY, start=start)


def _check_places(lab: Lab, memory_folder: Path) -> str:
    """Make sure that one side is on disk and the other is not; return the file system of the one in memory."""
    if not memory_folder.is_dir():
        raise BenchmarkError(f"There is no directory {memory_folder}. Give one in memory with --memory-folder.")
    in_memory = str(describe_machine(memory_folder, lab.java)["checkpoint_filesystem"])
    on_disk = describe_machine(lab.folder, lab.java)["checkpoint_filesystem"]
    if in_memory not in _MEMORY_FILESYSTEMS:
        raise BenchmarkError(
            f"{memory_folder} is on {in_memory}, not in memory. Give --memory-folder a directory on one of: "
            f"{', '.join(_MEMORY_FILESYSTEMS)}."
        )
    if on_disk in _MEMORY_FILESYSTEMS:
        raise BenchmarkError(f"Temporary files are in memory here ({on_disk}). Set TMPDIR to a directory on a disk.")
    return in_memory
