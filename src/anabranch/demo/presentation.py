"""Runs with all that is around them: the view, the report at the end, the files; one run, or one of each strategy."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession
from rich.console import Console

from anabranch.core.settings import MIGRATIONS
from anabranch.demo.interrupts import StopRequest, stop_on_signals
from anabranch.demo.options import DemoOptions
from anabranch.demo.output import OutputDirectory
from anabranch.demo.panels import workers_table
from anabranch.demo.recorded import RecordedEvents
from anabranch.demo.report import compare_table, rescale_report, summary_table
from anabranch.demo.run import Ending, Outcome, run_demo
from anabranch.demo.view import open_view

#: How long the job runs before the runs that are compared, so that the first of them does not pay for a cold Spark.
_WARM_UP_S = 5.0
_COMPARISON = (
    f"With --compare, the job runs once with each migration ({', '.join(MIGRATIONS)}), and one picture shows latency "
    "and throughput of all of them over time."
)


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
        """Run once with each strategy; the last outcome, which is that of the first run that did not end well."""
        self._say("\nWarming up: a short run that does not count.")
        with _scratch_output() as scratch:
            outcome = self._watch(
                dataclasses.replace(options, seconds=_WARM_UP_S, rescale_to=0, rescale_at=None), scratch
            )
        summaries: dict[str, dict[str, Any]] = {}
        for migration in MIGRATIONS:
            if outcome.ending in (Ending.FAILED, Ending.INTERRUPTED):
                break
            self._say(f"\nMigration: {migration}")
            chosen = dataclasses.replace(options, migration=migration)
            part = output.part(migration)
            outcome = self._run(chosen, part)
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
        self._report(outcome, options, output)
        return outcome

    def _watch(self, options: DemoOptions, output: OutputDirectory) -> Outcome:
        stop = StopRequest()
        with stop_on_signals(stop), open_view(self.console, options, live=self.live) as view:
            return run_demo(self.spark, options, self.recorded, output, view, stop)

    def _report(self, outcome: Outcome, options: DemoOptions, output: OutputDirectory) -> None:
        summary = outcome.to_json(options)
        files = output.write_results(summary, title=f"{_title(options)}, {options.setup}")
        self.console.print()
        for part in (
            summary_table(summary),
            *(rescale_report(rescale) for rescale in summary["rescales"]),
            workers_table(outcome.last.workers),
        ):
            self.console.print(part, highlight=False)
            self.console.print()
        if options.workers_after and not summary["rescales"] and outcome.ending is not Ending.FAILED:
            self._say("The run ended before it was rescaled. Choose an earlier --rescale-at.")
        self._say(_ending_text(outcome, options))
        self._say_paths([*files, output.checkpoint])

    def _say(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False)

    def _say_paths(self, paths: Sequence[Path]) -> None:
        for path in paths:
            self.console.print(f"  {path}", soft_wrap=True, highlight=False, markup=False)


@contextmanager
def _scratch_output() -> Iterator[OutputDirectory]:
    with tempfile.TemporaryDirectory(prefix="anabranch-demo-") as folder:
        output = OutputDirectory(Path(folder))
        output.epochs.mkdir()
        yield output


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
