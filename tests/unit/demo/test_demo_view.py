"""What is shown: figures read off a query and its sink, as a live view, as lines, and as a summary."""

import io
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from anabranch.core.errors import UnsupportedError
from anabranch.demo.meter import Meter, Snapshot, WorkerFigures
from anabranch.demo.options import DemoOptions
from anabranch.demo.sink import LatencySink
from anabranch.demo.view import PlainView, open_view, plain_line, render, size_text, summary_table
from anabranch.workload.latency import Latencies

START_S = datetime(2024, 1, 1, tzinfo=UTC).timestamp()


class FakeQuery:
    def __init__(self) -> None:
        self.recentProgress: list[dict[str, Any]] = []
        self.ended = False

    def report(self, epoch: int, *, rows: int, began_s: float, duration_ms: int) -> None:
        began = datetime.fromtimestamp(START_S + began_s, UTC)
        text = began.isoformat(timespec="milliseconds").replace("+00:00", "Z")
        report = {"batchId": epoch, "numInputRows": rows, "timestamp": text}
        self.recentProgress.append(report | {"durationMs": {"triggerExecution": duration_ms}})

    def workers(self) -> list[dict[str, Any]]:
        if self.ended:
            raise UnsupportedError("The query has ended.")
        variables = [{"variable": "count", "rows": 7}, {"variable": "junk", "rows": 90}]
        return [{"id": "worker-1", "keyGroups": 1024, "rows": 97, "bytes": 5000, "variables": variables}]


class Bench:
    """A meter with clocks in the test's hands."""

    def __init__(self, folder: Path) -> None:
        self.now_s = 0.0
        self.query = FakeQuery()
        self.sink = LatencySink(folder, monotonic_s=lambda: self.now_s)
        self.meter = Meter(self.query, self.sink, monotonic_s=lambda: self.now_s, clock_s=lambda: START_S + self.now_s)

    def run_epoch(self, epoch: int, *, rows: int, kept: int, latency_ms: int) -> None:
        """An epoch of one second."""
        self.now_s += 1
        self.sink.note(epoch, Latencies(np.zeros(kept, np.int64), np.full(kept, latency_ms)))
        self.query.report(epoch, rows=rows, began_s=self.now_s - 1, duration_ms=1000)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def text_of(renderable: Any) -> str:
    console = Console(file=io.StringIO(), width=100)
    console.print(renderable)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_a_job_that_has_just_started_has_figures_too(bench: Bench) -> None:
    snapshot = bench.meter.read()
    assert (snapshot.epochs, snapshot.last, snapshot.source_rows_per_s) == (0, None, 0.0)
    assert "none yet" in plain_line(snapshot)
    assert "none yet" in text_of(render(snapshot, DemoOptions()))


def test_rows_and_rates_are_those_of_whole_epochs(bench: Bench) -> None:
    for epoch in range(8):
        bench.run_epoch(epoch, rows=200, kept=150, latency_ms=100 * epoch)
    bench.now_s += 0.5
    snapshot = bench.meter.read()
    assert (snapshot.epochs, snapshot.source_rows, snapshot.sink_rows) == (8, 1600, 1200)
    assert (snapshot.source_rows_per_s, snapshot.sink_rows_per_s) == pytest.approx((200, 150))
    assert snapshot.last is not None
    assert (snapshot.last.epoch, snapshot.last.duration_ms) == (7, 1000)
    # The rows of the last five seconds: those of epochs 3 to 7.
    assert snapshot.latency_ms == {"p50_ms": 500, "p95_ms": 700, "p99_ms": 700, "max_ms": 700}
    assert [name for name, _, _ in snapshot.rates()] == ["source", "filter", "work", "count", "sink"]
    assert [rows for _, _, rows in snapshot.rates()] == [1600, 1600, 1200, 1200, 1200]


def test_a_report_that_nothing_came_is_no_epoch(bench: Bench) -> None:
    bench.run_epoch(0, rows=10, kept=8, latency_ms=5)
    bench.query.report(1, rows=0, began_s=bench.now_s, duration_ms=3)
    assert bench.meter.read().epochs == 1
    bench.query.report(1, rows=4, began_s=bench.now_s, duration_ms=100)
    assert bench.meter.read().epochs == 2


def test_a_standstill_shows_as_a_rate_of_zero(bench: Bench) -> None:
    bench.run_epoch(0, rows=10, kept=8, latency_ms=5)
    bench.now_s += 60
    snapshot = bench.meter.read()
    assert (snapshot.source_rows_per_s, snapshot.latency_ms) == (0.0, {})


def test_workers_that_are_gone_are_shown_as_they_were(bench: Bench) -> None:
    expected = WorkerFigures("worker-1", key_groups=1024, keys=7, rows=97, bytes=5000)
    assert list(bench.meter.read().workers) == [expected]
    bench.query.ended = True
    assert list(bench.meter.read().workers) == [expected]


@pytest.fixture
def snapshot(bench: Bench) -> Snapshot:
    for epoch in range(3):
        bench.run_epoch(epoch, rows=2000, kept=1500, latency_ms=1234)
    return bench.meter.read()


def test_the_live_view_shows_stages_epoch_latency_and_workers(snapshot: Snapshot) -> None:
    lines = [" ".join(line.split()) for line in text_of(render(snapshot, DemoOptions(), "a note")).splitlines()]
    assert "0 source 2,000 6,000" in lines
    assert "3 count 1,500 4,500" in lines
    assert "epoch 2 (1,000 ms)" in lines
    assert "latency p50 1,234 ms p95 1,234 ms p99 1,234 ms" in lines
    assert "worker-1 1,024 7 5.0 kB" in lines
    assert lines[0].endswith("3 of 30 s a note")


def test_without_a_terminal_there_is_a_line_every_second_look(snapshot: Snapshot) -> None:
    console = Console(file=io.StringIO(), width=40)
    with open_view(console, DemoOptions(), live=True) as view:
        assert isinstance(view, PlainView)
        for note in ("", "", "", "stopping"):
            view.show(snapshot, note)
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert len(lines) == 3
    assert lines[0] == plain_line(snapshot)
    assert lines[-1].endswith("keys 7  state 5.0 kB  stopping")


def test_the_summary_has_every_figure() -> None:
    summary = {
        "rows": {"source": 1000, "sink": 750},
        "epochs": 12,
        "elapsed_s": 5.04,
        "latency_ms": {"p50_ms": 100, "p95_ms": 200, "p99_ms": 300, "max_ms": 4000},
        "state": {"keys": 400, "bytes": 12_345_678, "counted": 750},
    }
    text = text_of(summary_table(summary))
    for expected in ("1,000 from the source, 750 at the sink", "12 in 5.0 s", "median 100 ms", "max 4,000 ms"):
        assert expected in text
    assert "400 keys, 12.3 MB" in text
    assert "750 rows, by the counts" in text
    empty = summary | {"latency_ms": {}, "state": {"keys": 0, "bytes": 0, "counted": None}}
    assert "latency" not in text_of(summary_table(empty))


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (2_500_000, "2.5 MB"), (10**16, "10,000.0 TB")],
)
def test_sizes_are_short(size_bytes: int, text: str) -> None:
    assert size_text(size_bytes) == text
