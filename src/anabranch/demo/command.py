"""The command that runs the demonstration: ``anabranch demo``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from anabranch.core.errors import AnabranchError, SettingsError
from anabranch.core.settings import STORES
from anabranch.demo.options import DemoOptions, flag

if TYPE_CHECKING:
    from rich.console import Console

    from anabranch.demo.output import OutputDirectory
    from anabranch.demo.recorded import RecordedEvents
    from anabranch.demo.run import Outcome

_USAGE = 2
_INTERRUPTED = 130
#: Options that describe generated events, and mean nothing for recorded ones.
_GENERATOR_OPTIONS = ("rate", "keys", "skew")


def demo(
    context: typer.Context,
    seconds: Annotated[float, typer.Option(help="How long events arrive.")] = 30.0,
    rate: Annotated[float, typer.Option(help="Events a second.")] = 200.0,
    keys: Annotated[int, typer.Option(help="How many different server names.")] = 100_000,
    skew: Annotated[float, typer.Option(help="Zipf exponent over the server names; 0 is uniform.")] = 0.0,
    workers: Annotated[int, typer.Option(help="How many state workers to start.")] = 2,
    parallelism: Annotated[int, typer.Option(help="In how many partitions the stages work.")] = 2,
    store: Annotated[str, typer.Option(help=f"Where workers keep state: {' or '.join(STORES)}.")] = "memory",
    work_ms: Annotated[float, typer.Option(help="CPU time for each row of stage 2.")] = 5.0,
    count_ms: Annotated[float, typer.Option(help="CPU time for each row of stage 3.")] = 0.0,
    junk_bytes: Annotated[int, typer.Option(help="State that each row adds in stage 3, besides the count.")] = 0,
    input: Annotated[
        Path | None,
        typer.Option(help="Read recorded events of 'anabranch workgen' from this directory, one file an epoch."),
    ] = None,
    output: Annotated[Path, typer.Option(help="The directory for the results.")] = Path("demo-output"),
    trigger: Annotated[str, typer.Option(help="How often an epoch begins; 0: as soon as the last has ended.")] = (
        "0 seconds"
    ),
    view: Annotated[bool, typer.Option("--view/--no-view", help="Live on a terminal, or lines of text.")] = True,
    master: Annotated[str, typer.Option(help="The Spark master to run on.")] = "local[2]",
) -> None:
    """Run a job of five stages on generated or recorded edits, watch it live, and measure its latency.

    Stages: 0 source, 1 filter (id % 4 != 0), 2 work that costs CPU time, 3 count per server, 4 latency at the sink.
    """
    try:
        if input is not None:
            _refuse_generator_options(context)
        options = DemoOptions(
            seconds=seconds, rate=rate, keys=keys, skew=skew, workers=workers, parallelism=parallelism, store=store,
            work_ms=work_ms, count_ms=count_ms, junk_bytes=junk_bytes, input=input, trigger=trigger,
        )  # fmt: skip
        outcome = _run(options, output, master, live=view)
    except SettingsError as error:
        typer.echo(f"anabranch demo: {error}", err=True)
        raise typer.Exit(_USAGE) from error
    except AnabranchError as error:
        typer.echo(f"anabranch demo: {error}", err=True)
        raise typer.Exit(1) from error
    except KeyboardInterrupt:
        typer.echo("anabranch demo: stopped at once, so there is no summary.", err=True)
        raise typer.Exit(_INTERRUPTED) from None
    if outcome.error is not None:
        typer.echo(f"anabranch demo: the query failed: {outcome.error}", err=True)
        raise typer.Exit(1)


def _refuse_generator_options(context: typer.Context) -> None:
    for name in _GENERATOR_OPTIONS:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise SettingsError(
                f"{flag(name)} describes generated events, but --input is given. Leave one of the two out."
            )


def _run(options: DemoOptions, directory: Path, master: str, *, live: bool) -> Outcome:
    """Check everything that can be checked, then start Spark."""
    from anabranch.demo.output import claim_output
    from anabranch.demo.recorded import find_recorded
    from anabranch.demo.session import check_java, check_master, open_spark

    check_master(master)
    recorded = None if options.input is None else find_recorded(options.input)
    check_java()
    with claim_output(directory) as output:
        # Rich, Spark and Arrow take their time to import, which a wrong option need not wait for.
        from rich.console import Console

        console = Console()
        console.print("Starting Spark and the state workers; this takes some seconds.", highlight=False)
        with open_spark(master, parallelism=options.parallelism, log=output.log) as spark:
            outcome = _watch(spark, options, recorded, output, console, live=live)
        _report(outcome, options, output, console)
        return outcome


def _watch(
    spark: object,
    options: DemoOptions,
    recorded: RecordedEvents | None,
    output: OutputDirectory,
    console: Console,
    *,
    live: bool,
) -> Outcome:
    from anabranch.demo.interrupts import StopRequest, stop_on_signals
    from anabranch.demo.run import run_demo
    from anabranch.demo.view import open_view

    stop = StopRequest()
    with stop_on_signals(stop), open_view(console, options, live=live) as view:
        return run_demo(spark, options, recorded, output, view, stop)  # type: ignore[arg-type]


def _report(outcome: Outcome, options: DemoOptions, output: OutputDirectory, console: Console) -> None:
    from anabranch.demo.view import summary_table, workers_table

    summary = outcome.to_json(options)
    source = f"{options.input}" if options.input is not None else f"{options.rate:g} rows/s"
    files = output.write_results(summary, title=f"anabranch demo: {source}, {options.workers} workers")
    console.print()
    console.print(summary_table(summary), highlight=False)
    console.print()
    console.print(workers_table(outcome.last.workers), highlight=False)
    console.print()
    waiting = options.rows - outcome.last.source_rows if options.input is None else None
    endings = {
        "complete": "Every row came through.",
        "time": "The time was up"
        + (f", and {waiting:,} rows were still waiting. Lower --rate or --work-ms." if waiting else "."),
        "interrupted": "Stopped on request.",
        "failed": "The query failed.",
    }
    console.print(endings[outcome.ending], highlight=False)
    for path in [*files, output.checkpoint]:
        console.print(f"  {path}", soft_wrap=True, highlight=False)
