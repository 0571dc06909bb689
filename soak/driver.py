"""A Spark driver in a process of its own, to be killed: ``python -m soak.driver FOLDER --job NAME``.

It takes all input that is there, writes down the state, and ends with 0; with 3 if the query failed by itself.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession

import anabranch
from anabranch.core.schemas import POSITION
from soak import crashpoints
from soak.jobs import JOBS, SCHEMA, Job, State, Values, plain
from soak.places import Places, write_json
from soak.processes import wait_until

FAILED = 3
#: State that has not gone by then is found by the verdict.
_VANISHED_MAX_S = 60.0


def start(
    spark: SparkSession, job: Job, places: Places, *, files_per_epoch: int, options: dict[str, Any] | None = None
) -> Any:
    """Start the query, from the beginning or from its checkpoint."""
    stream = job.build(anabranch.stream(source(spark, places, files_per_epoch)))
    writer = stream.writeStream.outputMode(job.mode).format("parquet").option("path", str(places.output))
    return writer.options(checkpointLocation=str(places.checkpoint), **(options or {})).start()


def source(spark: SparkSession, places: Places, files_per_epoch: int) -> DataFrame:
    reader = spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", files_per_epoch)
    return reader.parquet(str(places.input))


def state_of(query: Any, job: Job) -> State:
    """The state of a running query, in the form of the model's."""
    if job.variables is not None:
        return {name: _rows(query.state(*place).collect(), name) for name, place in job.variables.items()}
    found = {}
    for stage in query.pipeline.stateful_stages:
        for variable in stage.spec.variables:
            rows = query.state(stage.spec.name, variable.name)
            # Which element of a list has which position may depend on the order in which rows came.
            found[f"{stage.spec.name} {variable.name}"] = _sorted(rows.drop(POSITION).collect())
    return found


def is_done(query: Any, job: Job) -> bool:
    """Whether all state has gone that goes as time passes, once no rows come any more; raises if the query failed."""
    if (error := query.exception()) is not None:
        raise error
    places = {name: place for name, place in (job.variables or {}).items() if name in job.vanishing}
    return all(query.state(*place).isEmpty() for place in places.values())


def _rows(found: list[Any], name: str) -> list[Values]:
    if name != "recent":
        return _sorted(found)
    lists: dict[str, list[tuple[int, int]]] = {}
    for key, position, value in found:
        lists.setdefault(key, []).append((position, value))
    return sorted((key, *(value for _, value in sorted(entries))) for key, entries in lists.items())


def _sorted(found: list[Any]) -> list[Values]:
    return sorted(map(plain, found), key=repr)


def make_session(folder: Path) -> SparkSession:
    builder = SparkSession.builder.master("local[2,4]").config("spark.ui.enabled", False)
    settings = {
        "spark.ui.showConsoleProgress": False,
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.memory": "1g",
        "spark.local.dir": str(folder / "local"),
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
        "spark.sql.shuffle.partitions": 2,
        "spark.sql.session.timeZone": "UTC",
        # A driver is started often and lives for seconds: it starts faster without the second compiler.
        "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    }
    for name, value in settings.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("OFF")
    return spark


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--job", choices=JOBS, required=True)
    parser.add_argument("--files-per-epoch", type=int, default=1)
    parser.add_argument("--option", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--stay", action="store_true", help="wait for more input in the end, for ever")
    arguments = parser.parse_args()
    places, job = Places(arguments.folder), JOBS[arguments.job]
    spark = make_session(arguments.folder)
    if point := os.environ.get(crashpoints.VARIABLE):
        crashpoints.install(point, crashpoints.crash, places.checkpoint)
    if point := os.environ.get(crashpoints.HOLD_VARIABLE):
        crashpoints.install(point, partial(crashpoints.hold, places), places.checkpoint)
    options = {"anabranch.controlPort": "0", **dict(option.split("=", 1) for option in arguments.option)}
    try:
        query = start(spark, job, places, files_per_epoch=arguments.files_per_epoch, options=options)
        write_json(places.url(os.getpid()), query.url)
        write_json(places.ready(os.getpid()), [worker["pid"] for worker in query.workers()])
        query.processAllAvailable()
        wait_until(lambda: is_done(query, job), _VANISHED_MAX_S)
        write_json(places.state, state_of(query, job))
        if arguments.stay:
            query.awaitTermination()
        query.stop()
    except Exception as error:
        write_json(places.error(os.getpid()), {"kind": type(error).__name__, "message": str(error)})
        sys.stderr.write(json.dumps({"kind": type(error).__name__, "message": str(error)[:2000]}) + "\n")
        # Whatever else is still running must not keep this process: the next driver is waiting.
        sys.stderr.flush()
        os._exit(FAILED)
    return 0


if __name__ == "__main__":
    sys.exit(main())
