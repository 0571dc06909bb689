"""Recovery: what a lost worker, a lost driver and a snapshot in the making cost a query with a lot of state."""

from __future__ import annotations

import json
import logging
import math
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from enum import StrEnum
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import Annotated, Any

import typer

from bench.figures import Budget, Figure, Ratio
from bench.harness import BenchmarkError, Query, Side, data_epochs, wait_for_epochs
from bench.machine import describe_machine
from bench.options import Epochs, KeyCount, Parallelism, Repeats, RowCount, Store, Warmup, Workers
from bench.report import Line, Report, parts_note, say
from bench.session import ROOT, Lab, check_interrupted, open_lab
from bench.sides import ANABRANCH, SPARK, Setup, anabranch_side, spark_side, totals
from bench.sources import loaded_keys, numbers


class Part(StrEnum):
    """An event that happens to the query."""

    WORKER = "worker"
    DRIVER = "driver"
    SNAPSHOT = "snapshot"


_KEYS, _ROWS, _WORKERS, _ROWS_PER_KEY = 1_000_000, 20_000, 2, 2
_SIDES = (SPARK, ANABRANCH)
_BUDGETS = {Part.WORKER: Budget(3.0, aim=2.0, is_cost=True), Part.SNAPSHOT: Budget(1.2, aim=1.1, is_cost=True)}
_MEDIAN, _WORST = "median epoch, ms", "worst epoch, ms"
_NOTICED, _OUTAGE = "noticed after, ms", "next epoch done after, ms"
_UNDETECTED, _AFTERWARDS = "worst epoch without detection, ms", "slowest epoch afterwards, ms"
_DURING, _SLOWEST = "median epoch during a snapshot, ms", "slowest of as many without one, ms"
_MORE = {Part.WORKER: (_AFTERWARDS,), Part.SNAPSHOT: (_DURING, _SLOWEST)}

_FIRST, _SECOND = "first", "second"
#: A thread of the driver with this name waits for the process that makes a snapshot, and deletes old files.
_UPKEEP_THREAD = "anabranch-upkeep"
_SNAPSHOT_SETTING = "spark.anabranch.snapshotEpochs"
#: Spark uploads a snapshot of its state once a minute. A query that has run for long has one, so this one gets one.
_MAINTENANCE = ("spark.sql.streaming.stateStore.maintenanceInterval", "5s")
_SAMPLE_INTERVAL_S, _POLL_INTERVAL_S = 0.005, 0.05
#: After a loss, all state has to be back within this time.
_WHOLE_LIMIT_S = 120.0
#: Snapshots that do not end, or leave no epoch without one, end the run after so many times the epochs it should take.
_PATIENCE = 5

Parts = Annotated[list[Part] | None, typer.Option("--part", help="May be given repeatedly. Default: all.")]
SnapshotEpochs = Annotated[int, typer.Option(min=1, max=5000, help="Epochs from snapshot to snapshot.")]
Snapshots = Annotated[int, typer.Option(min=1, max=100, help="Snapshots in each repetition.")]


@dataclass(frozen=True)
class _Load:
    """The query to which things happen: a count and a sum of each key, under a steady load."""

    keys: int
    rows: int
    warmup: int
    epochs: int
    setup: Setup

    @property
    def first(self) -> int:
        """The first epoch that counts: before it, every key is loaded once, and things warm up."""
        return -(-self.keys // self.rows) + self.warmup

    @property
    def end(self) -> int:
        return self.first + self.epochs

    def side(self, lab: Lab, name: str = ANABRANCH) -> Side:
        values = numbers(lab.spark, rows=self.rows, partitions=self.setup.parallelism)
        source = loaded_keys(values, self.keys, rows_per_key=_ROWS_PER_KEY)
        if name == SPARK:
            return spark_side(source, totals, warmup=self.first, measured=self.epochs, keys=self.keys)
        return anabranch_side(source, totals, self.setup, warmup=self.first, measured=self.epochs, keys=self.keys)


@dataclass(frozen=True)
class _Span:
    """The time that something took, by the clock on the wall."""

    start_s: float
    end_s: float

    @staticmethod
    def of(report: Mapping[str, Any]) -> _Span:
        start_s = datetime.fromisoformat(report["timestamp"]).timestamp()
        return _Span(start_s, start_s + report["durationMs"]["triggerExecution"] / 1000)

    @property
    def ms(self) -> float:
        return (self.end_s - self.start_s) * 1000

    def shared_ms(self, other: _Span) -> float:
        return max(0.0, min(self.end_s, other.end_s) - max(self.start_s, other.start_s)) * 1000


def recovery(
    keys: KeyCount = _KEYS,
    rows: RowCount = _ROWS,
    epochs: Epochs = 15,
    warmup: Warmup = 5,
    repeats: Repeats = 3,
    part: Parts = None,
    snapshot_epochs: SnapshotEpochs = 60,
    snapshots: Snapshots = 3,
    workers: Workers = _WORKERS,
    parallelism: Parallelism = 2,
    store: Store = "memory",
) -> None:
    """A worker is killed, a driver is killed, a snapshot is made: what each of them costs."""
    options = dict(locals())
    parts = [name for name in Part if not part or name in part]
    setup = Setup(workers=workers, parallelism=parallelism, store=store)
    load = _Load(keys=keys, rows=rows, warmup=warmup, epochs=epochs, setup=setup)
    runs: list[dict[str, Any]] = []
    with open_lab(parallelism=parallelism) as lab:
        machine = describe_machine(lab.folder, lab.java)
        for repetition in range(repeats):
            for name in parts:
                check_interrupted()
                if name == Part.WORKER:
                    done = [_lose_worker(lab, load)]
                elif name == Part.SNAPSHOT:
                    done = [_make_snapshots(lab, load, snapshots, snapshot_epochs)]
                else:
                    done = [_lose_driver(lab, load, side) for side in _SIDES[:: (-1) ** repetition]]
                runs += [{"part": name, "repetition": repetition, **run} for run in done]
                for run in done:
                    figures = [f"{title} {value:,.0f}" for title, value in run.items() if title.endswith("ms")]
                    say(f"repetition {repetition + 1} of {repeats}: {name}, {run['side']}: {'; '.join(figures)}")
    as_budgeted = (keys, rows, workers) == (_KEYS, _ROWS, _WORKERS)
    Report(
        name="recovery",
        title=f"{keys:,} keys of state, {rows:,} rows an epoch, {workers} workers, {store} store, durable",
        ratio_title="cost",
        lines=[line for name in parts for line in _lines(name, runs, with_budget=as_budgeted)],
        options=options,
        machine=machine,
        runs=runs,
        notes=[_note(name, [run for run in runs if run["part"] == name]) for name in parts],
    ).publish()


def _lose_worker(lab: Lab, load: _Load) -> dict[str, Any]:
    """Kill a worker at some moment of an epoch."""
    side = load.side(lab)
    query: Any = side.start(lab.new_folder("worker"))
    try:
        wait_for_epochs(query, load.end)
        victim = query.workers()[-1]
        # The tasks that the worker's end takes with it are expected to fail; the silence at the end undoes this.
        lab.spark.sparkContext.setLogLevel("OFF")
        with _warnings() as warnings:
            killed_s = time.time()
            os.kill(victim["pid"], signal.SIGKILL)
            wait_for_epochs(query, int(query.lastProgress["batchId"]) + 2 + load.epochs)
        reports = data_epochs(query)
        _wait_until_whole(side, query)
    finally:
        with lab.silence():
            query.stop()
    noticed_s = [record.created for record in warnings if victim["id"] in (record.args or ())]
    repairs = [report["anabranch"].get("repairs", []) for report in reports]
    lost = [place for place, done in enumerate(repairs) if any(victim["id"] in repair["lost"] for repair in done)]
    if not lost or not noticed_s:
        raise BenchmarkError(f"{victim['id']} was killed, and no epoch reports its loss: nothing was measured.")
    spans = [_Span.of(report) for report in reports]
    loss, detection = spans[lost[0]], _Span(killed_s, min(noticed_s))
    return {
        "side": ANABRANCH,
        _MEDIAN: statistics.median(span.ms for span in spans[load.first :] if span.end_s <= killed_s),
        _WORST: loss.ms,
        _NOTICED: detection.ms,
        _OUTAGE: (loss.end_s - killed_s) * 1000,
        _UNDETECTED: loss.ms - loss.shared_ms(detection),
        _AFTERWARDS: max(span.ms for span in spans[lost[0] + 1 :]),
        "killed after the epoch's start, ms": (killed_s - loss.start_s) * 1000,
        "repairs": [repair for done in repairs for repair in done],
        "report": reports[lost[0]],
    }


@contextmanager
def _warnings() -> Iterator[Sequence[logging.LogRecord]]:
    """Collect what the coordinator warns of."""
    logger, listener = logging.getLogger("anabranch.control"), BufferingHandler(capacity=sys.maxsize)
    listener.setLevel(logging.WARNING)
    logger.addHandler(listener)
    try:
        yield listener.buffer
    finally:
        logger.removeHandler(listener)


def _wait_until_whole(side: Side, query: Query) -> None:
    """Wait until no key is missing from the state; raises if some still are after a while."""
    for _ in range(int(_WHOLE_LIMIT_S / _POLL_INTERVAL_S)):
        check_interrupted()
        with suppress(BenchmarkError):
            side.inspect(query)
            return
        query.awaitTermination(_POLL_INTERVAL_S)
    side.inspect(query)


def _lose_driver(lab: Lab, load: _Load, side: str) -> dict[str, Any]:
    """Kill a driver, with all that belongs to it, and let another carry on."""
    folder = Path(lab.new_folder(f"driver {side}"))
    folder.mkdir()
    before = _run_driver(folder, side, load, _FIRST)
    after = _run_driver(folder, side, load, _SECOND)
    if after["epoch"] < load.end:
        raise BenchmarkError(f"The second driver of {side} began with epoch {after['epoch']}: it lost the checkpoint.")
    return {"side": side, _MEDIAN: before["median_ms"], _WORST: after["epoch_ms"], _OUTAGE: after["start_ms"]}


def _run_driver(folder: Path, side: str, load: _Load, turn: str) -> dict[str, Any]:
    """Start a driver, wait for what it has to say, and kill it and its children while its query runs."""
    answer, log = folder / f"{turn}.json", folder / f"{turn}.log"
    command = [sys.executable, "-m", "bench.recovery", side, str(folder), turn, json.dumps(asdict(load))]
    env = {**os.environ, "TMPDIR": str(folder)}
    with log.open("wb") as output:
        # A session of its own: one signal reaches Python, the JVM and the workers.
        process = subprocess.Popen(
            command, cwd=ROOT, env=env, stdin=subprocess.PIPE, stdout=output, stderr=output, start_new_session=True
        )
    pause = threading.Event()
    try:
        while not answer.exists():
            check_interrupted()
            if process.poll() is not None:
                end = log.read_text(errors="replace")[-2000:]
                raise BenchmarkError(f"The {turn} driver of {side} ended by itself. Its log ends: {end}")
            pause.wait(_POLL_INTERVAL_S)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    return dict(json.loads(answer.read_text()))


def _drive(side_name: str, folder: Path, turn: str, load: _Load) -> None:
    """Run the query in a process of its own, tell how it went, and wait to be killed."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with open_lab(parallelism=load.setup.parallelism) as lab:
        if turn == _FIRST:
            lab.spark.conf.set(*_MAINTENANCE)
        started_s = time.time()
        side = load.side(lab, side_name)
        query = side.start(str(folder / "checkpoint"))
        wait_for_epochs(query, load.end if turn == _FIRST else 1)
        reports = data_epochs(query)
        _wait_until_whole(side, query)
        spans = [_Span.of(report) for report in reports]
        told = {
            "epoch": reports[0]["batchId"],
            "epoch_ms": spans[0].ms,
            "start_ms": (spans[0].end_s - started_s) * 1000,
            "median_ms": statistics.median(span.ms for span in spans[-load.epochs :]),
        }
        (folder / "unfinished").write_text(json.dumps(told))
        (folder / "unfinished").rename(folder / f"{turn}.json")
        while not query.awaitTermination(_POLL_INTERVAL_S):
            check_interrupted()


def _end_with_parent() -> None:
    """Leave nothing behind when the benchmark itself is killed."""
    sys.stdin.read()
    os._exit(1)


def _make_snapshots(lab: Lab, load: _Load, snapshots: int, snapshot_epochs: int) -> dict[str, Any]:
    """Run until some snapshots have been made, with epochs between them."""
    lab.spark.conf.set(_SNAPSHOT_SETTING, snapshot_epochs)
    query: Any = load.side(lab).start(lab.new_folder("snapshot"))
    lab.spark.conf.unset(_SNAPSHOT_SETTING)
    try:
        wait_for_epochs(query, load.first)
        last_before = query.status["anabranch"]["lastSnapshot"]
        with _watching() as spans:
            for end in range(load.end, load.end + _PATIENCE * snapshots * (snapshot_epochs + load.epochs), 10):
                wait_for_epochs(query, end)
                during, without = _divided(data_epochs(query)[load.first :], spans)
                made = [span.ms for span in spans if span.end_s < math.inf]
                if len(made) >= snapshots and during and len(without) >= max(load.epochs, len(during)):
                    break
            else:
                raise BenchmarkError(
                    f"{len(made)} snapshots were made and {len(without)} epochs were without one, not {snapshots} and "
                    f"{load.epochs}. Give a greater --snapshot-epochs, or fewer --snapshots or --keys."
                )
        last = query.status["anabranch"]["lastSnapshot"]
    finally:
        with lab.silence():
            query.stop()
    if last is None or last == last_before:
        raise BenchmarkError("Snapshots failed; see the warnings of anabranch.control.epochs.maintenance.")
    return {
        "side": ANABRANCH,
        _MEDIAN: statistics.median(without),
        _WORST: max(during),
        _DURING: statistics.median(during),
        # Of more epochs, one is slow by chance sooner.
        _SLOWEST: max(without[-len(during) :]),
        "epochs": {"during a snapshot": during, "without": without},
        "snapshots": made,
    }


@contextmanager
def _watching() -> Iterator[list[_Span]]:
    """Note when snapshots are being made; one that is not complete has no end."""
    spans: list[_Span] = []
    closed = threading.Event()

    def watch() -> None:
        while not closed.wait(_SAMPLE_INTERVAL_S):
            is_made = any(thread.name == _UPKEEP_THREAD for thread in threading.enumerate())
            was_made = bool(spans) and spans[-1].end_s == math.inf
            if is_made and not was_made:
                spans.append(_Span(time.time(), math.inf))
            elif was_made and not is_made:
                spans[-1] = _Span(spans[-1].start_s, time.time())

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield spans
    finally:
        closed.set()
        watcher.join()


def _divided(reports: Sequence[Mapping[str, Any]], spans: Sequence[_Span]) -> tuple[list[float], list[float]]:
    """Return the times of the epochs during which a snapshot was made, and of the others."""
    during = [epoch for epoch in map(_Span.of, reports) if any(epoch.shared_ms(span) for span in spans)]
    without = [epoch for epoch in map(_Span.of, reports) if epoch not in during]
    return [epoch.ms for epoch in during], [epoch.ms for epoch in without]


def _lines(part: Part, runs: Sequence[Mapping[str, Any]], *, with_budget: bool) -> list[Line]:
    lines: list[Line] = []
    for side in _SIDES if part == Part.DRIVER else (ANABRANCH,):
        own = [run for run in runs if (run["part"], run["side"]) == (part, side)]
        figures = {name: _figure(own, name) for name in (_MEDIAN, _WORST, _NOTICED, _OUTAGE) if name in own[0]}
        ratio = None
        if part == Part.WORKER:
            ratio = Ratio.of(_figure(own, _UNDETECTED), figures[_MEDIAN])
        elif part == Part.SNAPSHOT:
            ratio = Ratio.of(figures[_WORST], _figure(own, _SLOWEST))
        elif side == ANABRANCH:
            ratio = Ratio.of(figures[_OUTAGE], lines[0].figures[_OUTAGE])
        lines.append(Line(part, side, figures, ratio, _BUDGETS.get(part) if with_budget else None))
    return lines


def _note(part: Part, runs: Sequence[Mapping[str, Any]]) -> str:
    """Say what the cost is of, and the figures that have no column."""
    if part == Part.DRIVER:
        return (
            "driver: killed with all of its processes, and started again; the time from when Spark is there to the end "
            "of the first epoch, against Spark's own state (RocksDB, with a recent snapshot)"
        )
    more = ", ".join(f"{name}: {_figure(runs, name).text()}" for name in _MORE[part])
    if part == Part.SNAPSHOT:
        return f"snapshot: the slowest epoch while one is made, against the slowest of as many others. {more}"
    return (
        "worker: one is killed; the epoch that reports its loss, less the time until it was noticed, against the "
        f"median before. {more}. {parts_note('its last run', runs[-1]['report']['anabranch']['durationMs'])}"
    )


def _figure(runs: Sequence[Mapping[str, Any]], name: str) -> Figure:
    return Figure(tuple(float(run[name]) for run in runs))


if __name__ == "__main__":
    _load = json.loads(sys.argv[4])
    _drive(sys.argv[1], Path(sys.argv[2]), sys.argv[3], _Load(**{**_load, "setup": Setup(**_load["setup"])}))
