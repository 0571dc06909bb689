"""What is shown: figures read off a query and its sink, as a live view, as lines, and as a summary."""

import io
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from anabranch.core.errors import UnsupportedError
from anabranch.demo.job import LatencySink
from anabranch.demo.meter import Meter, RunFigures, WorkerFigures
from anabranch.demo.options import DemoOptions
from anabranch.demo.presentation import compare_table, rescale_report, summary_table
from anabranch.demo.view import PlainView, latency_lines, open_view, plain_line, render, size_text, workers_table
from anabranch.workload.latency import Latencies

START_S = datetime(2024, 1, 1, tzinfo=UTC).timestamp()


class FakeRescale:
    """A rescale with its progress in the test's hands."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.state, self.seconds, self.pending = "waiting", 0.0, 0

    def progress(self) -> dict[str, Any]:
        moved = {"rowsFetched": 12, "rowsDrained": 3456, "bytesFetched": 400, "bytesDrained": 70_000, "changeMs": 9}
        return moved | {
            "number": self.number,
            "what": "4 workers",
            "state": self.state,
            "message": "",
            "startedEpoch": 3,
            "groupsMoving": 512,
            "groupsPending": self.pending,
            "seconds": self.seconds,
        }


class FakeQuery:
    def __init__(self) -> None:
        self.recentProgress: list[dict[str, Any]] = []
        self.last_rescale: FakeRescale | None = None
        self.url: str | None = "http://127.0.0.1:9008"
        self.ended = False
        self.pending = 0

    def report(self, epoch: int, *, rows: int, began_s: float, duration_ms: int, position: int | None = None) -> None:
        began = datetime.fromtimestamp(START_S + began_s, UTC)
        text = began.isoformat(timespec="milliseconds").replace("+00:00", "Z")
        report: dict[str, Any] = {"batchId": epoch, "numInputRows": rows, "timestamp": text}
        if position is not None:
            report["sources"] = [{"endOffset": {"row": position}}]
        self.recentProgress.append(report | {"durationMs": {"triggerExecution": duration_ms}})

    def workers(self) -> list[dict[str, Any]]:
        if self.ended:
            raise UnsupportedError("The query has ended.")
        variables = [{"variable": "count", "rows": 7}, {"variable": "junk", "rows": 90}]
        groups = {"keyGroups": 1024, "pendingGroups": self.pending, "frozenGroups": 128 if self.pending else 0}
        return [{"id": "worker-1", **groups, "rows": 97, "bytes": 5000, "variables": variables}]


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


def worker_of(key_groups: int = 1024, pending: int = 0) -> WorkerFigures:
    return WorkerFigures(
        worker="worker-1", key_groups=key_groups, pending_groups=pending, frozen_groups=0, keys=7, rows=97, bytes=5000
    )


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
    expected = worker_of()
    assert list(bench.meter.read().workers) == [expected]
    bench.query.ended = True
    assert list(bench.meter.read().workers) == [expected]


def test_a_report_that_is_lost_in_a_restart_loses_no_rows(bench: Bench) -> None:
    bench.run_epoch(0, rows=10, kept=8, latency_ms=5)
    bench.sink.note(1, Latencies(np.zeros(7, np.int64), np.full(7, 5)))
    bench.sink.note(2, Latencies(np.zeros(3, np.int64), np.full(3, 5)))
    bench.query.report(2, rows=4, began_s=bench.now_s, duration_ms=100, position=24)
    snapshot = bench.meter.read()
    assert (snapshot.epochs, snapshot.source_rows, snapshot.sink_rows) == (2, 24, 18)


def test_a_rescale_is_followed_from_when_it_was_asked_for_to_its_end(bench: Bench) -> None:
    bench.now_s = 10
    first = bench.query.last_rescale = FakeRescale(1)
    first.seconds = 0.25
    (waiting,) = bench.meter.read_rescales()
    assert (waiting.asked_ms, waiting.ended_ms) == (START_S * 1000 + 9750, None)
    bench.now_s, first.seconds, first.state, first.pending = 11, 1.25, "migrating", 200
    # Another is asked for meanwhile; the first is followed all the same.
    bench.query.last_rescale = FakeRescale(2)
    assert [rescale.state for rescale in bench.meter.read().rescales] == ["migrating", "waiting"]
    bench.now_s, first.seconds, first.state, first.pending = 14, 2.5, "done", 0
    snapshot = bench.meter.read()
    done, _ = snapshot.rescales
    assert (done.asked_ms, done.ended_ms, done.state) == (waiting.asked_ms, START_S * 1000 + 12_250, "done")
    assert (done.seconds(snapshot.now_ms), done.groups_moving, done.rows_drained) == (2.5, 512, 3456)
    assert snapshot.elapsed_at_s(done.asked_ms) == pytest.approx(9.75)
    assert snapshot.is_rescaling


@pytest.fixture
def snapshot(bench: Bench) -> RunFigures:
    for epoch in range(3):
        bench.run_epoch(epoch, rows=2000, kept=1500, latency_ms=1234)
    return bench.meter.read()


def test_the_live_view_shows_stages_epoch_latency_and_workers(snapshot: RunFigures) -> None:
    lines = [" ".join(line.split()) for line in text_of(render(snapshot, DemoOptions(), "a note")).splitlines()]
    assert "0 source 2,000 6,000" in lines
    assert "3 count 1,500 4,500" in lines
    assert "epoch 2 (1,000 ms)" in lines
    assert "latency p50 1,234 ms p95 1,234 ms p99 1,234 ms" in lines
    assert f"worker-1 1,024 7 5.0 kB {'█' * 18}" in lines
    assert lines[0].endswith("3 of 30 s a note")
    assert "rescale to 4 workers, 15 s after the start" in lines
    assert lines[-1].endswith("curl http://localhost:9008/scale?stage=3")


def test_the_live_view_shows_how_far_a_rescale_is(bench: Bench) -> None:
    bench.run_epoch(0, rows=20, kept=15, latency_ms=100)
    rescale = bench.query.last_rescale = FakeRescale(1)
    rescale.state, rescale.seconds, rescale.pending, bench.query.pending = "migrating", 0.5, 200, 512
    lines = [" ".join(line.split()) for line in text_of(render(bench.meter.read(), DemoOptions())).splitlines()]
    assert f"worker-1 1,024 512 128 7 5.0 kB {'█' * 9}{'░' * 9}" in lines
    assert "rescale 4 workers: migrating, 0.5 s, 312 of 512 key groups have arrived" in lines
    assert "moved 12 rows (400 B) fetched on demand, 3,456 rows (70.0 kB) drained" in lines
    assert "4 workers: migrating, 0.5 s, 312 of 512" in plain_line(bench.meter.read())


def test_bars_are_as_long_as_workers_own_key_groups() -> None:
    text = text_of(workers_table([worker_of(600), worker_of(300, pending=1), worker_of(0)]))
    assert [line.count("█") for line in text.splitlines()[1:]] == [18, 8, 0]
    assert [line.count("░") for line in text.splitlines()[1:]] == [0, 1, 0]


def test_latency_over_time_is_a_line_with_gaps_and_marks(bench: Bench) -> None:
    bench.now_s = 9.5
    for epoch, latency_ms in enumerate((100, 100, 200, 0, 800, 100)):
        if latency_ms:
            bench.run_epoch(epoch, rows=10, kept=10, latency_ms=latency_ms)
        else:
            bench.now_s += 1
    rescale = bench.query.last_rescale = FakeRescale(1)
    rescale.seconds = 2.9
    median, high, marks = (line.plain for line in latency_lines(bench.meter.read(), 30))
    assert median == " " * 10 + "▂▂▃ █▂  p50, from 0 to 800 ms"
    assert high == " " * 10 + "▂▂▃ █▂  p99"
    assert marks == " " * 12 + "▲▔▔▔ rescale"


def test_without_a_terminal_there_are_lines_now_and_then_and_when_there_is_news(bench: Bench) -> None:
    console = Console(file=io.StringIO(), width=40)
    with open_view(console, DemoOptions(), live=True) as view:
        assert isinstance(view, PlainView)
        for note in ("", "", "", "stopping"):
            view.show(bench.meter.read(), note)
            bench.now_s += 1
        rescale = bench.query.last_rescale = FakeRescale(1)
        view.show(bench.meter.read(), "stopping")
        rescale.state = "done"
        view.show(bench.meter.read(), "stopping")
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert lines[0] == "HTTP API at http://127.0.0.1:9008; another worker: curl http://localhost:9008/scale?stage=3"
    assert [line.split(" s ")[0].strip() for line in lines[1:]] == ["0.0", "2.0", "3.0", "4.0", "4.0"]
    assert lines[3].endswith("workers 1  keys 7  state 5.0 kB  stopping")
    assert "rescale 4 workers: done" in lines[5]


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


RESCALE = {
    "what": "4 workers",
    "strategy": "lazy",
    "state": "done",
    "message": "",
    "asked_s": 15.0,
    "seconds": 1.94,
    "groups_moving": 512,
    "rows_fetched": 12,
    "bytes_fetched": 400,
    "rows_drained": 3456,
    "bytes_drained": 70_000,
    "latency_ms": {
        "before": {"count": 900, "p50_ms": 300, "p95_ms": 400, "p99_ms": 500, "max_ms": 600},
        "during": {"count": 80, "p50_ms": 310, "p95_ms": 410, "p99_ms": 510, "max_ms": 1610},
        "after": {"count": 0},
    },
    "median_epoch_before_ms": 200,
    "slowest_epoch_during_ms": 300,
    "median_gap_before_ms": 250,
    "longest_gap_during_ms": 1000,
}


def test_the_report_of_a_rescale_has_every_figure() -> None:
    lines = [" ".join(line.split()) for line in text_of(rescale_report(RESCALE)).splitlines()]
    assert lines == [
        "rescale 4 workers (lazy), asked for at 15.0 s: done after 1.9 s",
        "latency rows median p95 p99 max",
        "before 900 300 ms 400 ms 500 ms 600 ms",
        "during 80 310 ms 410 ms 510 ms 1,610 ms",
        "after 0",
        "epochs slowest during it 300 ms, median before 200 ms: 1.5 times as long",
        "output longest gap during it 1,000 ms, median before 250 ms: 4.0 times as long",
        "moved 512 key groups: 12 rows (400 B) fetched on demand, 3,456 rows (70.0 kB) drained",
    ]
    failed = RESCALE | {"state": "failed", "message": "No room.", "seconds": None, "strategy": "restart"}
    text = text_of(rescale_report(failed | {"slowest_epoch_during_ms": None, "median_gap_before_ms": None}))
    assert "failed (No room.)" in text
    assert "slowest" not in text
    assert "1,000 ms, median" not in text
    assert "read from the checkpoint" in text


def test_strategies_are_compared_line_by_line() -> None:
    undone = {"rescales": [RESCALE | {"seconds": None}]}
    text = text_of(compare_table({"lazy": {"rescales": [RESCALE]}, "eager": undone, "restart": {"rescales": []}}))
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert lines[2:] == [
        "lazy 1,940 500 510 1,610 300 1,000 250",
        "eager not done 500 510 1,610 300 1,000 250",
        "restart none",
    ]


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (2_500_000, "2.5 MB"), (10**16, "10,000.0 TB")],
)
def test_sizes_are_short(size_bytes: int, text: str) -> None:
    assert size_text(size_bytes) == text
