"""The queries that are disturbed: what each is made of, and what comes out of it if nothing happens."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyspark import cloudpickle
from pyspark.sql import Row
from pyspark.sql import functions as F
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

from soak import operators, timed

# Tasks run in processes that do not have this package on their path.
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # type: ignore[no-untyped-call]

SCHEMA = "k string, v long, tag string, e long"
#: A row of input: key, value, tag, and the number of its file, which lets each row of output tell its epoch.
InputRow = tuple[str, int, str, int]
#: A row of output or state.
Values = tuple[Any, ...]
State = dict[str, list[Values]]

_TAGS = ("red", "green", "blue")
#: A list that has grown longer than this is cut to its last values.
_LONGEST = 5
_KEPT = 3
#: Event time: of file number 0, how far each file is after the one before, and how far rows are apart at most.
_FIRST_S = 1_767_268_800
_STEP_S = 5
_SPREAD_S = 13
#: Rows with a lower value come so much later than they should.
_LATE_BELOW = -500
_LATE_S = 12
#: How many files the last ones seem to be after the others: all that waits for event time goes out before them.
_FAR = 1000


def make_files(seed: int, *, files: int, rows: int, keys: int) -> list[list[InputRow]]:
    """The rows of each input file."""
    draw = random.Random(f"input {seed}")
    return [
        [(f"k{draw.randrange(keys):04d}", draw.randrange(-1000, 1000), draw.choice(_TAGS), number) for _ in range(rows)]
        for number in range(files)
    ]


def make_last_files(seed: int, *, after: int, files: int, rows: int, keys: int) -> list[list[InputRow]]:
    """Files for the end of event time, after so many others.

    Their times are far from those of the others, and so near to each other that it makes no difference to them how
    often the watermark moves: an epoch without rows may follow or not. They have keys of their own, so that timers of
    other keys are not put off.
    """
    draw = random.Random(f"last input {seed}")

    def row() -> InputRow:
        value = _SPREAD_S * draw.randrange(50) + draw.randrange(8)
        return f"z{draw.randrange(keys):04d}", value, draw.choice(_TAGS), after + _FAR

    first = [("z0000", 0, tag, after + _FAR) for tag in _TAGS]
    return [[*first, *(row() for _ in range(rows))] for _ in range(files)]


def epochs_of(files: Sequence[Sequence[InputRow]], files_per_epoch: int) -> list[list[InputRow]]:
    """What Spark's file source makes of files that are all there from the start."""
    starts = range(0, len(files), files_per_epoch)
    return [[row for file in files[start : start + files_per_epoch] for row in file] for start in starts]


def epochs_taken(
    files: Sequence[Sequence[InputRow]], checkpoint: Path, files_per_epoch: int = 1
) -> list[list[InputRow]]:
    """What Spark's file source made of them.

    A driver that dies after the source has noted files, and before Spark has noted the epoch, leaves those files to the
    next epoch, which then has twice as many.
    """
    epochs, start = [], 0
    for offsets in sorted((checkpoint / "offsets").glob("[0-9]*"), key=lambda path: int(path.name)):
        # The offset of the files is the first; that of epochs without rows may follow.
        offset = offsets.read_text().splitlines()[2]
        end = files_per_epoch * (int(json.loads(offset)["logOffset"]) + 1)
        epochs.append([row for file in files[start:end] for row in file])
        start = end
    return epochs


@dataclass(frozen=True)
class Expected:
    """What comes out of an undisturbed run: the rows of all epochs, and the state after the last."""

    rows: list[Values]
    state: State


def plain(row: Sequence[Any]) -> Values:
    """A row to compare, which JSON can hold. The order of a collected set, and the last digits of sums, are chance."""
    return tuple(_plain(value) for value in row)


def _plain(value: Any) -> Any:
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            return float(f"{value:.9g}")
        case list():
            return str(sorted(map(_plain, value), key=repr))
        case tuple():
            return str(plain(value))
        case _:
            return str(value)


Model = Callable[[Sequence[Sequence[InputRow]]], Expected]


@dataclass(frozen=True)
class Job:
    """A query, and a plain model of it; if there is none, Spark and an undisturbed run say what comes out."""

    name: str
    build: Callable[[Any], Any]
    model: Model | None = None
    #: Stage and variable of each part of its state, by the name that the model gives it; None: all there are.
    variables: dict[str, tuple[str, str | None]] | None = None
    mode: str = "update"
    #: What gives the same in Spark, if it is not the same query.
    native: Callable[[Any], Any] | None = None
    #: A model of a query that goes by processing time: it needs to know when each epoch was.
    timed: Callable[[Sequence[timed.TimedEpoch]], timed.Result] | None = None
    #: Parts of its state of which nothing is left some time after the last rows: the query is not done before.
    vanishing: tuple[str, ...] = ()

    @property
    def goes_by_event_time(self) -> bool:
        return self.mode == "append"


# ------------------------------------------------------------------------------------------------ aggregation


def aggregate(rows: Any) -> Any:
    """Works on a DataFrame of Spark's as well."""
    return rows.groupBy("k").agg(
        F.count("*").alias("n"),
        F.sum("v").alias("total"),
        F.min("v").alias("lowest"),
        F.max("v").alias("highest"),
        F.max("e").alias("last"),
    )


def _model_aggregate(epochs: Sequence[Sequence[InputRow]]) -> Expected:
    values: dict[str, list[int]] = {}
    rows: list[Values] = []
    latest: dict[str, Values] = {}
    for epoch in epochs:
        changed: dict[str, int] = {}
        for key, value, _, number in epoch:
            values.setdefault(key, []).append(value)
            changed[key] = max(number, changed.get(key, 0))
        for key, last in changed.items():
            of = values[key]
            latest[key] = (key, len(of), sum(of), min(of), max(of), last)
            rows.append(latest[key])
    return Expected(rows, {"result": sorted(latest.values())})


# -------------------------------------------------------------------------------------------------- processor


class Ledger(StatefulProcessor):
    """A value, a list and a map: a running sum, the last values, and how often each tag was seen."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.sums = handle.getValueState("sums", "n long, total long")
        self.recent = handle.getListState("recent", "v long")
        self.tags = handle.getMapState("tags", "tag string", "n long")

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:  # noqa: ARG002
        taken = sorted((row.e, row.v, row.tag) for row in rows)
        count, total = self.sums.get() or (0, 0)
        for _, value, tag in taken:
            count, total = count + 1, total + value
            self.recent.appendValue((value,))
            seen = self.tags.getValue((tag,))
            self.tags.updateValue((tag,), ((seen[0] if seen else 0) + 1,))
        self.sums.update((count, total))
        recent = [value for (value,) in self.recent.get()]
        if len(recent) > _LONGEST:
            recent = recent[-_KEPT:]
            self.recent.put([(value,) for value in recent])
        if total % 7 == 0:
            for (tag,) in list(self.tags.keys()):
                self.tags.removeKey((tag,))
        tags = sorted((tag, n) for (tag,), (n,) in self.tags.iterator())
        yield Row(k=key[0], n=count, total=total, recent=str(recent), tags=str(tags), last=taken[-1][0])

    def close(self) -> None:
        pass


LEDGER_OUTPUT = "k string, n long, total long, recent string, tags string, last long"


def process(rows: Any) -> Any:
    """Works on a DataFrame of Spark's as well."""
    return rows.groupBy("k").transformWithState(Ledger(), LEDGER_OUTPUT, "update", "none")


def _model_process(epochs: Sequence[Sequence[InputRow]]) -> Expected:
    sums: dict[str, tuple[int, int]] = {}
    recent: dict[str, list[int]] = {}
    tags: dict[str, dict[str, int]] = {}
    rows: list[Values] = []
    for epoch in epochs:
        by_key: dict[str, list[tuple[int, int, str]]] = {}
        for key, value, tag, number in epoch:
            by_key.setdefault(key, []).append((number, value, tag))
        for key, taken in by_key.items():
            taken.sort()
            count, total = sums.get(key, (0, 0))
            sums[key] = count + len(taken), total + sum(value for _, value, _ in taken)
            recent[key] = [*recent.get(key, []), *(value for _, value, _ in taken)]
            if len(recent[key]) > _LONGEST:
                recent[key] = recent[key][-_KEPT:]
            seen = tags.setdefault(key, {})
            for _, _, tag in taken:
                seen[tag] = seen.get(tag, 0) + 1
            if sums[key][1] % 7 == 0:
                seen.clear()
            rows.append((key, *sums[key], str(recent[key]), str(sorted(seen.items())), taken[-1][0]))
    state: State = {
        "sums": sorted((key, *both) for key, both in sums.items()),
        "recent": sorted((key, *values) for key, values in recent.items()),
        "tags": sorted((key, tag, n) for key, seen in tags.items() for tag, n in seen.items()),
    }
    return Expected(rows, state)


# ------------------------------------------------------------------------------------------------- two stages


def two_stages(rows: Any) -> Any:
    """Each key's ledger, and how often and up to which count the keys of a bucket were emitted by it."""
    emitted = process(rows).select(F.substring("k", 5, 1).alias("bucket"), "n", "total", "last")
    return emitted.groupBy("bucket").agg(
        F.count("*").alias("times"),
        F.sum("n").alias("counts"),
        F.min("total").alias("lowest"),
        F.max("last").alias("last"),
    )


def _model_two_stages(epochs: Sequence[Sequence[InputRow]]) -> Expected:
    first = _model_process(epochs)
    # The rows of an epoch, by the files that are in it; the first stage tells only the last of them.
    epoch_of = {row[3]: number for number, epoch in enumerate(epochs) for row in epoch}
    buckets: dict[str, list[tuple[int, int, int]]] = {}
    latest: dict[str, Values] = {}
    rows: list[Values] = []
    for number in range(len(epochs)):
        changed: set[str] = set()
        for key, n, total, _, _, last in first.rows:
            if epoch_of[last] == number:
                buckets.setdefault(key[4], []).append((n, total, last))
                changed.add(key[4])
        for bucket in changed:
            counts, totals, lasts = zip(*buckets[bucket], strict=True)
            latest[bucket] = (bucket, len(counts), sum(counts), min(totals), max(lasts))
            rows.append(latest[bucket])
    return Expected(rows, {**first.state, "result": sorted(latest.values())})


# ------------------------------------------------------------------------------------------------- event time


def events(rows: Any) -> Any:
    """The rows of the input as events of users, some of them late."""
    late_s = F.when(F.col("v") < _LATE_BELOW, _LATE_S).otherwise(0)
    at_s = F.lit(_FIRST_S) + _STEP_S * F.col("e") + F.pmod("v", F.lit(_SPREAD_S)) - late_s
    kind = F.when(F.col("tag") == "red", "view").when(F.col("tag") == "green", "click").otherwise("other")
    return rows.select(
        kind.alias("kind"), F.col("k").alias("user"), F.timestamp_seconds(at_s).alias("at"), F.col("v").alias("amount")
    )


def _of_events(
    name: str, pipeline: operators.Pipeline, native: operators.Pipeline | None = None, mode: str = "append"
) -> Job:
    return Job(name, _on_events(pipeline), mode=mode, native=native and _on_events(native))


def _on_events(pipeline: operators.Pipeline) -> operators.Pipeline:
    return lambda rows: pipeline(events(rows))


_LEDGER_VARIABLES: dict[str, tuple[str, str | None]] = {name: ("stage1", name) for name in ("sums", "recent", "tags")}

JOBS = {
    job.name: job
    for job in (
        Job("aggregate", aggregate, _model_aggregate, {"result": ("stage1", None)}),
        Job("process", process, _model_process, _LEDGER_VARIABLES),
        Job("two-stages", two_stages, _model_two_stages, {**_LEDGER_VARIABLES, "result": ("stage3", None)}),
        _of_events("windows", operators.windows),
        _of_events("windows-of-windows", operators.windows_of_windows),
        _of_events("sessions", operators.sessions),
        _of_events("duplicates", operators.duplicates),
        _of_events("matches", operators.matches),
        _of_events("firsts", operators.firsts),
        _of_events("pairs", operators.pairs),
        _of_events("answered", operators.answered, native=operators.answered_by_spark),
        _of_events("visits", operators.visits),
        _of_events("absences", operators.absences),
        _of_events("totals", operators.totals, native=operators.totals_by_spark, mode="update"),
        Job(
            "pauses",
            timed.pauses,
            variables={name: ("stage1", name) for name in ("rows", *timed.PAUSES_LEAVE_NOTHING_IN)},
            timed=timed.model_pauses,
            vanishing=timed.PAUSES_LEAVE_NOTHING_IN,
        ),
        Job(
            "timeouts",
            timed.timeouts,
            variables={"state": ("stage1", "state")},
            timed=timed.model_timeouts,
            vanishing=("state",),
        ),
    )
}
#: Those that have a model.
MODELS = {job.name: job.model for job in JOBS.values() if job.model is not None}
