"""Runs with all that is around them: the view, the report at the end, the files; one run, or one of each strategy."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table

from anabranch.control.strategies import MIGRATIONS
from anabranch.demo.options import DemoOptions, RecordedEvents
from anabranch.demo.outcome import Ending, Outcome
from anabranch.demo.output import OutputDirectory
from anabranch.demo.run import run_demo
from anabranch.demo.session import StopRequest, stop_on_signals
from anabranch.demo.view import grid, moved_text, open_view, plain_table, size_text, workers_table

#: How long the job runs before the runs that are compared, so that the first of them does not pay for a cold Spark.
_WARM_UP_S = 5.0
_COMPARISON = (
    f"With --compare, the job runs once with each migration ({', '.join(MIGRATIONS)}), and one picture shows latency "
    "and throughput of all of them over time."
)
_PERCENTILES = {"p50_ms": "median", "p95_ms": "p95", "p99_ms": "p99", "max_ms": "max"}


@dataclass(frozen=True)
class Presentation:
    """Where runs take place, and where they are shown."""

    spark: SparkSession
    recorded: RecordedEvents | None
    console: Console
    live: bool

    def run(self, options: DemoOptions, output: OutputDirectory) -> Outcome:
        """Run once, and tell how it went, and how it can be compared."""
        outcome = self._run(options, output)
        if options.workers_after and options.drain and outcome.ending is not Ending.FAILED:
            self._say(_COMPARISON)
        return outcome

    def compare(self, options: DemoOptions, output: OutputDirectory) -> Outcome:
        """Run once with each strategy; return the last outcome, which is that of the first run that ended badly."""
        self._say("\nWarming up: a short run that does not count.")
        with tempfile.TemporaryDirectory(prefix="anabranch-demo-") as folder:
            scratch = OutputDirectory(Path(folder))
            scratch.epochs.mkdir()
            short = dataclasses.replace(options, seconds=_WARM_UP_S, rescale_to=0, rescale_at=None)
            outcome = self._watch(short, scratch)
        summaries: dict[str, dict[str, Any]] = {}
        for migration in MIGRATIONS:
            if outcome.ending in (Ending.FAILED, Ending.INTERRUPTED):
                break
            self._say(f"\nMigration: {migration}")
            chosen = dataclasses.replace(options, migration=migration)
            outcome = self._run(chosen, output.part(migration))
            summaries[migration] = outcome.to_json(chosen)
        files = output.write_comparison(summaries, title=_title(options))
        if summaries:
            self.console.print()
            self.console.print(compare_table(summaries), highlight=False)
        self.console.print()
        self._say_paths(files)
        return outcome

    def _run(self, options: DemoOptions, output: OutputDirectory) -> Outcome:
        outcome = self._watch(options, output)
        summary = outcome.to_json(options)
        files = output.write_results(summary, title=f"{_title(options)}, {options.setup}")
        self.console.print()
        rescales = [rescale_report(rescale) for rescale in summary["rescales"]]
        for part in (summary_table(summary), *rescales, workers_table(outcome.last.workers)):
            self.console.print(part, highlight=False)
            self.console.print()
        if options.workers_after and not rescales and outcome.ending is not Ending.FAILED:
            self._say("The run ended before it was rescaled. Choose an earlier --rescale-at.")
        self._say(_ending_text(outcome, options))
        self._say_paths([*files, output.checkpoint])
        return outcome

    def _watch(self, options: DemoOptions, output: OutputDirectory) -> Outcome:
        stop = StopRequest()
        with stop_on_signals(stop), open_view(self.console, options, live=self.live) as view:
            return run_demo(self.spark, options, self.recorded, output, view, stop)

    def _say(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False)

    def _say_paths(self, paths: Sequence[Path]) -> None:
        for path in paths:
            self.console.print(f"  {path}", soft_wrap=True, highlight=False, markup=False)


def _ending_text(outcome: Outcome, options: DemoOptions) -> str:
    waiting = options.rows - outcome.last.source_rows if options.input is None else 0
    match outcome.ending:
        case Ending.COMPLETE:
            return "Every row came through."
        case Ending.TIME if waiting > 0:
            return f"The time was up, and {waiting:,} rows were still waiting. Lower --rate or --work-ms."
        case Ending.TIME:
            return "The time was up."
        case Ending.INTERRUPTED:
            return "Stopped on request."
        case Ending.FAILED:
            return "The query failed."


def _title(options: DemoOptions) -> str:
    source = f"{options.input}" if options.input is not None else f"{options.rate:g} rows/s"
    after = f" to {options.workers_after}" if options.workers_after else ""
    return f"anabranch demo: {source}, {options.workers}{after} workers"


def summary_table(summary: Mapping[str, Any]) -> Table:
    """Show the figures of a run that has ended."""
    rows, latency, state = summary["rows"], summary["latency_ms"], summary["state"]
    lines = {
        "rows": f"{rows['source']:,} from the source, {rows['sink']:,} at the sink",
        "epochs": f"{summary['epochs']:,} in {summary['elapsed_s']:.1f} s",
    }
    if latency:
        lines["latency"] = ", ".join(f"{label} {latency[name]:,} ms" for name, label in _PERCENTILES.items())
    lines["state"] = f"{state['keys']:,} keys, {size_text(state['bytes'])}"
    if state["counted"] is not None:
        lines["counted"] = f"{state['counted']:,} rows, by the counts in the state"
    return grid(lines)


def rescale_report(rescale: Mapping[str, Any]) -> RenderableType:
    """Show what a rescale did: latency around it, its slowest epoch, the gap in the output, and what moved how."""
    head = f"{rescale['what']} ({rescale['strategy']}), asked for at {rescale['asked_s']:.1f} s: {rescale['state']}"
    if rescale["message"]:
        head += f" ({rescale['message']})"
    elif rescale["seconds"] is not None:
        head += f" after {rescale['seconds']:.1f} s"
    table = plain_table("latency", "rows", *_PERCENTILES.values())
    for phase in ("before", "during", "after"):
        figures = rescale["latency_ms"][phase]
        cells = [f"{figures[name]:,} ms" if name in figures else "" for name in _PERCENTILES]
        table.add_row(phase, f"{figures['count']:,}", *cells)
    epoch_ms, gap_ms = rescale["slowest_epoch_during_ms"], rescale["longest_gap_during_ms"]
    lines = {}
    if epoch_ms is not None:
        lines["epochs"] = f"slowest during it {_against(epoch_ms, rescale['median_epoch_before_ms'])}"
    if gap_ms is not None:
        lines["output"] = f"longest gap during it {_against(gap_ms, rescale['median_gap_before_ms'])}"
    lines["moved"] = _moved(rescale)
    return Group(grid({"rescale": head}), Padding(Group(table, grid(lines)), (0, 0, 0, 2)))


def compare_table(summaries: Mapping[str, Mapping[str, Any]]) -> Table:
    """Show the first rescale of each run, by its strategy."""
    table = plain_table(
        *("migration\n(in ms)", "took", "p99\nbefore", "p99\nduring", "max\nduring", "slowest\nepoch"),
        *("longest\ngap", "usual\ngap"),
    )
    for name, summary in summaries.items():
        if not summary["rescales"]:
            table.add_row(name, "none")
            continue
        rescale = summary["rescales"][0]
        before, during = (rescale["latency_ms"][phase] for phase in ("before", "during"))
        figures_ms = (
            *(before.get("p99_ms"), during.get("p99_ms"), during.get("max_ms"), rescale["slowest_epoch_during_ms"]),
            *(rescale["longest_gap_during_ms"], rescale["median_gap_before_ms"]),
        )
        took = "not done" if rescale["seconds"] is None else f"{rescale['seconds'] * 1000:,.0f}"
        table.add_row(name, took, *("" if value is None else f"{value:,}" for value in figures_ms))
    return table


def _moved(rescale: Mapping[str, Any]) -> str:
    if rescale["strategy"] == "restart":
        return "everything was stopped, and read from the checkpoint by the new workers"
    if not rescale["groups_moving"]:
        return "nothing had to move"
    how = ("rows_fetched", "bytes_fetched", "rows_drained", "bytes_drained")
    return f"{rescale['groups_moving']:,} key groups: {moved_text(*(rescale[name] for name in how))}"


def _against(worst_ms: int, usual_ms: int | None) -> str:
    if not usual_ms:
        return f"{worst_ms:,} ms"
    return f"{worst_ms:,} ms, median before {usual_ms:,} ms: {worst_ms / usual_ms:.1f} times as long"
