"""The demonstration job in a real Spark: five stages, every row counted exactly once, and files to look at."""

import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import urllib.request
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession
from rich.console import Console

from anabranch.control.strategies import MIGRATIONS
from anabranch.demo import presentation
from anabranch.demo.job import LatencySink, build_job, start_job
from anabranch.demo.meter import RunFigures
from anabranch.demo.options import DemoOptions, find_recorded
from anabranch.demo.outcome import Ending
from anabranch.demo.output import OutputDirectory, claim_output
from anabranch.demo.run import run_demo
from anabranch.demo.session import StopRequest
from anabranch.demo.view import command_text
from anabranch.workload import WorkloadSpec, generate, read_latencies, write_files
from support.redis_server import RedisServer, running_redis

PATIENCE_S = 120


@pytest.fixture
def redis_server() -> Iterator[RedisServer]:
    with running_redis() as server:
        yield server


class Looks:
    """A view that keeps what it is shown."""

    def __init__(self) -> None:
        self.snapshots: list[RunFigures] = []

    def show(self, snapshot: RunFigures, note: str = "") -> None:
        del note
        self.snapshots.append(snapshot)

    def say(self, text: str) -> None:
        pass


def expected_counts(events: pa.Table) -> Counter[str]:
    """How many events of each server pass the filter."""
    columns = zip(events.column("id").to_pylist(), events.column("server_name").to_pylist(), strict=True)
    return Counter(server for number, server in columns if number % 4 != 0)


def test_every_row_is_counted_once_whichever_way_the_run_is_rescaled_and_the_ways_are_compared(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(presentation, "_WARM_UP_S", 1.0)
    options = DemoOptions(
        seconds=2, rate=75, keys=30, skew=0.5, work_ms=1, workers=1, rescale_to=2, drain_limit_s=PATIENCE_S
    )
    expected = expected_counts(generate(WorkloadSpec(keys=30, skew=0.5), 0, 150))
    console = Console(file=io.StringIO(), width=120)
    with claim_output(tmp_path / "out") as output:
        outcome = presentation.Presentation(spark, None, console, live=False).compare(options, output)
    assert (outcome.ending, outcome.error) == (Ending.COMPLETE, None)
    summaries = json.loads(output.summary.read_text())
    assert list(summaries) == list(MIGRATIONS) == ["lazy", "eager", "restart"]
    for migration, summary in summaries.items():
        part = OutputDirectory(output.path / migration)
        check_run(summary, part, expected)
        (rescale,) = summary["rescales"]
        assert (rescale["state"], rescale["strategy"]) == ("done", migration)
        # Rows were on their way when it was asked for, and are among those of the time of the rescale.
        assert rescale["latency_ms"]["during"]["count"] > 0
        assert rescale["longest_gap_during_ms"]
        assert "<!-- rescale: 2 workers -->" in part.pictures[0].read_text()
    said = console.file.getvalue()  # type: ignore[attr-defined]
    assert re.search(r"\(in ms\) +took.*\n *lazy +\d.*\n *eager +\d.*\n *restart +\d", said), said
    assert "--compare" not in said
    drawn = output.comparison[0].read_text()
    assert [drawn.count(f"<!-- {text} -->") for text in (*MIGRATIONS, "rescale: 2 workers")] == [1, 1, 1, 3]
    assert output.comparison[1].read_bytes().startswith(b"\x89PNG")


def check_run(summary: Mapping[str, Any], output: OutputDirectory, expected: Counter[str]) -> None:
    """Every row came through, each once, and there are files to look at."""
    assert (summary["ending"], summary["error"]) == ("complete", None)
    assert summary["rows"] == {"source": 150, "sink": expected.total()}
    assert (summary["state"]["keys"], summary["state"]["counted"]) == (len(expected), expected.total())
    assert len(summary["workers"]) == 2
    assert all(each["key_groups"] and each["keys"] and not each["pending_groups"] for each in summary["workers"])
    assert summary["latency_ms"]["p50_ms"] > 0
    lines = read_latencies(output.latencies)
    assert len(lines.latency_ms) == expected.total()
    # Rows arrive 13 ms apart over two seconds, and no row is at the sink before it has arrived.
    assert 1500 < lines.ingestion_ms.max() - lines.ingestion_ms.min() < 2000
    assert lines.latency_ms.min() > 0
    assert output.pictures[1].read_bytes().startswith(b"\x89PNG")
    assert output.pictures[1].stat().st_size > 10_000


def test_the_request_in_the_view_gives_the_job_a_worker_more_also_with_a_shared_store(
    spark: SparkSession, tmp_path: Path, redis_server: RedisServer
) -> None:
    options = DemoOptions(
        seconds=60, rate=20, keys=30, work_ms=0, workers=1, rescale_to=0, store="redis", redis_url=redis_server.url,
        drain_limit_s=PATIENCE_S,
    )  # fmt: skip
    stop = StopRequest()

    class Curl(Looks):
        """Types the command that the view shows, and stops the run when the new worker has its share."""

        said: Mapping[str, Any] | None = None

        def show(self, snapshot: RunFigures, note: str = "") -> None:
            super().show(snapshot, note)
            if self.said is None and snapshot.epochs:
                assert snapshot.url is not None
                _, url = command_text(snapshot.url).split()
                with urllib.request.urlopen(url, timeout=PATIENCE_S) as answer:
                    self.said = json.load(answer)
            if len(snapshot.workers) == 2 and all(worker.keys for worker in snapshot.workers):
                stop.ask()

    view = Curl()
    with claim_output(tmp_path / "out") as output:
        outcome = run_demo(spark, options, None, output, view, stop)
    assert (outcome.ending, outcome.error) == (Ending.INTERRUPTED, None)
    (rescale,) = outcome.last.rescales
    assert view.said is not None
    assert (rescale.number, rescale.what) == (view.said["number"], "2 workers, parallelism 3 of stage 3")
    assert sum(worker.key_groups for worker in outcome.last.workers) == 1024


def test_recorded_rows_are_counted_per_server_and_leave_junk(
    spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = WorkloadSpec(keys=20)
    write_files(spec, tmp_path / "input", rows=300, files=2, format="csv")
    recorded = find_recorded(tmp_path / "input")
    options = DemoOptions(input=recorded.directory, work_ms=0, junk_bytes=64, store="rocksdb", workers=1)
    (tmp_path / "epochs").mkdir()
    sink = LatencySink(tmp_path / "epochs")
    query = start_job(build_job(spark, options, recorded), options, sink, tmp_path / "checkpoint")
    try:
        query.processAllAvailable()
        counts = {row["server_name"]: row["count"] for row in query.state("count", "count").collect()}
        junk = Counter(row["server_name"] for row in query.state("count", "junk").collect())
        query.explain()
    finally:
        query.stop()
    expected = expected_counts(generate(spec, 0, 300))
    assert counts == expected
    assert junk == expected
    assert sink.rows_of(0) + sink.rows_of(1) == expected.total()
    plan = capsys.readouterr().out.split("== Physical plan ==")[0].splitlines()
    stages = [line.split(":")[0].lstrip(" ") for line in plan[1:6]]
    assert stages == ["0", "1 'filter'", "2 'work' parallelism=2", "*3 'count'", "4 'sink'"]
    assert "record_latency" in plan[5]


def test_a_query_that_fails_ends_the_run_with_its_error(spark: SparkSession, tmp_path: Path) -> None:
    options = DemoOptions(seconds=30, rate=20, keys=5, work_ms=0, workers=1, drain_limit_s=PATIENCE_S)
    with claim_output(tmp_path / "out") as output:

        class Saboteur(Looks):
            def show(self, snapshot: RunFigures, note: str = "") -> None:
                super().show(snapshot, note)
                shutil.rmtree(output.epochs, ignore_errors=True)

        outcome = run_demo(spark, options, None, output, Saboteur(), StopRequest())
        written = output.write_results(outcome.to_json(options), title="test")
    assert (outcome.ending, outcome.counted) == (Ending.FAILED, None)
    assert "The foreachBatch function failed" in str(outcome.error)
    assert output.summary in written


@pytest.mark.usefixtures("_quick_java")
def test_ctrl_c_ends_a_run_with_its_summary(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "anabranch", "demo", "--seconds", "600", "--rate", "20", "--keys", "10"]
    command += ["--work-ms", "1", "--workers", "1", "--rescale-to", "2", "--rescale-at", "1"]
    command += ["--output", str(tmp_path / "out")]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stdout is not None
        # Whatever goes wrong, the test ends.
        limit = threading.Timer(2 * PATIENCE_S, os.killpg, (process.pid, signal.SIGKILL))
        limit.start()
        try:
            for line in process.stdout:
                if re.search("epoch [1-9].*rescale 2 workers.*: done", line):
                    break
            # As a terminal does it: to the job and to every process that it has started, new workers among them.
            os.killpg(process.pid, signal.SIGINT)
            output, errors = process.communicate()
        finally:
            limit.cancel()
    assert (process.returncode, errors) == (0, "")
    assert "Stopped on request." in output
    assert "With --compare, the job runs once with each migration (lazy, eager, restart)" in output
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert (summary["ending"], summary["error"]) == ("interrupted", None)
    assert summary["rows"]["sink"] == len(read_latencies(tmp_path / "out" / "latency.csv").latency_ms) > 0
