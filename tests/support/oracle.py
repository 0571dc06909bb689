"""Spark itself as the judge: a query run by Spark and by Anabranch over the same epochs must give the same rows."""

from __future__ import annotations

import subprocess
import sys
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from json import loads
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql.types import StructType

import anabranch
from support.streams import Collector, EpochFeed, quick_checkpoints

WAIT_S = 240

Query = Callable[[Any], Any]


@dataclass
class Result(Collector):
    """Each epoch's rows and their schema."""

    epochs: dict[int, list[Any]] = field(default_factory=dict)
    schemas: list[list[tuple[str, str]]] = field(default_factory=list)

    def __call__(self, rows: DataFrame, epoch: int) -> None:
        self.epochs[epoch] = rows.collect()
        shape = names_and_types(rows.schema)
        if shape not in self.schemas:
            self.schemas.append(shape)

    def by_epoch(self) -> dict[int, Counter[str]]:
        """The rows of every epoch, also of those without any."""
        texts = Result(epochs={number: rows for number, rows in self.epochs.items() if rows}).multisets()
        filled = [number for number in sorted(self.epochs) if self.epochs[number]]
        found = dict(zip(filled, texts, strict=True))
        return {number: found.get(number, Counter()) for number in self.epochs}


def differences(native: Result, ours: Result) -> list[str]:
    """In which epochs and columns the two differ, in few words; empty if nowhere."""
    expected, found = native.by_epoch(), ours.by_epoch()
    if list(expected) != list(found):
        return [f"epochs {list(found)} instead of {list(expected)}"]
    return [text for epoch in expected if expected[epoch] != found[epoch] for text in _columns(native, ours, epoch)]


def _columns(native: Result, ours: Result, epoch: int) -> Iterator[str]:
    for position, (name, kind) in enumerate(native.schemas[0]):
        expected, found = (
            Result(epochs={epoch: [(row[position],) for row in result.epochs[epoch]]}).by_epoch()[epoch]
            for result in (native, ours)
        )
        if expected != found:
            yield f"epoch {epoch}: {name} {kind}: {list(found - expected)} instead of {list(expected - found)}"


def names_and_types(schema: StructType) -> list[tuple[str, str]]:
    return [(field.name, field.dataType.simpleString()) for field in schema.fields]


class Oracle:
    """Runs queries twice, on state workers that are there already, and compares what comes out."""

    def __init__(self, folder: Path, addresses: Sequence[str] = ()) -> None:
        self.folder = folder
        self.options: dict[str, Any] = {"anabranch.workerAddresses": ",".join(addresses)} if addresses else {}

    def new_folder(self, name: str) -> Path:
        return self.folder / f"{name}-{uuid.uuid4().hex}"

    def native(self, query: Query, rows: DataFrame, mode: str = "update") -> Result:
        """What Spark makes of the query."""
        with quick_checkpoints(rows.sparkSession):
            return run(query(rows).writeStream, self.new_folder("native"), mode)

    def ours(self, query: Query, rows: DataFrame, mode: str = "update", **options: Any) -> Result:
        """What Anabranch makes of it."""
        stream = query(anabranch.stream(rows))
        result = run(stream.writeStream.options(**{**self.options, **options}), self.new_folder("ours"), mode)
        assert result.schemas in ([], [names_and_types(stream.schema)]), "the stream's schema is not that of its rows"
        return result

    def check(self, query: Query, feed: EpochFeed, mode: str = "update", **options: Any) -> Result:
        """Both give the same rows in each epoch, under the same names and types. Returns Spark's."""
        native = self.native(query, feed.stream(), mode)
        ours = self.ours(query, feed.stream(), mode, **options)
        if ours.schemas != native.schemas:
            raise AssertionError(f"columns {ours.schemas} instead of {native.schemas}")
        if found := differences(native, ours):
            raise AssertionError("\n".join(found))
        return native


def run(writer: Any, checkpoint: Path, mode: str = "update") -> Result:
    """The result of a query, native or ours, over all epochs that are there."""
    result = Result()
    configured = writer.outputMode(mode).foreachBatch(result).option("checkpointLocation", str(checkpoint))
    drain(configured)
    return result


def drain(writer: Any) -> Any:
    """Start a query, let it take all input that is there, and wait for its end; the query."""
    query = writer.trigger(availableNow=True).start()
    try:
        assert query.awaitTermination(WAIT_S)
    finally:
        query.stop()
    return query


@contextmanager
def external_worker(*arguments: str, environment: Mapping[str, str] | None = None) -> Iterator[dict[str, Any]]:
    """A state worker of its own process: its id, address and pid."""
    command = [sys.executable, "-m", "anabranch", "worker", "--port", "0", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment and dict(environment))
    try:
        assert process.stdout is not None
        yield loads(process.stdout.readline())
    finally:
        process.terminate()
        process.wait(timeout=30)
        if process.stdout is not None:
            process.stdout.close()
