"""The options that benchmarks share."""

from __future__ import annotations

from typing import Annotated

import typer

from anabranch.core.settings import MAX_WORKERS
from anabranch.worker.stores import STORES

Repeats = Annotated[int, typer.Option(min=1, max=100, help="How often each side is measured.")]
Epochs = Annotated[int, typer.Option(min=1, max=5000, help="Measured epochs of a side in each repetition.")]
Warmup = Annotated[int, typer.Option(min=1, max=5000, help="Epochs before the measured ones.")]
RowCount = Annotated[int, typer.Option("--rows", min=1, help="Rows in an epoch.")]
KeyCount = Annotated[int, typer.Option("--keys", min=1, help="Different keys.")]
Store = Annotated[str, typer.Option(help=f"Where Anabranch's workers keep state: {' or '.join(STORES)}.")]
Workers = Annotated[int, typer.Option(min=1, max=MAX_WORKERS, help="State workers.")]
Parallelism = Annotated[int, typer.Option(min=1, max=1024, help="Partitions of the stateful stage, on both sides.")]
NativeEpochs = Annotated[
    int, typer.Option(min=1, max=5000, help="Measured epochs of Spark's side where it needs many seconds for each.")
]
NativeWarmup = Annotated[int, typer.Option(min=1, max=5000, help="Epochs of that side before the measured ones.")]
