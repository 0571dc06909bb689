"""The command that runs the demonstration: ``anabranch demo``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from anabranch.control.strategies import MIGRATIONS
from anabranch.core.errors import AnabranchError, SettingsError
from anabranch.demo.options import DemoOptions, find_recorded, flag
from anabranch.worker.stores import STORES

if TYPE_CHECKING:
    from anabranch.demo.outcome import Outcome

_USAGE = 2
_INTERRUPTED = 130
#: Options that describe generated events, and mean nothing for recorded ones.
_GENERATOR_OPTIONS = ("rate", "keys", "skew")
#: How long events arrive in a single run, and in each of those that are compared.
_SECONDS, _SECONDS_COMPARED = 30.0, 20.0

_Seconds = Annotated[
    float | None,
    typer.Option(help="How long events arrive.", show_default=f"{_SECONDS:g}, or {_SECONDS_COMPARED:g} with --compare"),
]
_Input = Annotated[
    Path | None,
    typer.Option(help="Read recorded events of 'anabranch workgen' from this directory, one file an epoch."),
]
_RoutingCache = Annotated[
    bool,
    typer.Option(
        "--routing-cache/--no-routing-cache", help="Tasks keep the route of their epoch, or ask a worker for it."
    ),
]
_Drained = Annotated[
    bool, typer.Option("--drain/--no-drain", help="Lazy: state moves in the background as well, or only on demand.")
]


def demo(
    context: typer.Context,
    seconds: _Seconds = None,
    rate: Annotated[float, typer.Option(help="Events a second.")] = DemoOptions.rate,
    keys: Annotated[int, typer.Option(help="How many different server names.")] = DemoOptions.keys,
    skew: Annotated[float, typer.Option(help="Zipf exponent over the server names; 0 is uniform.")] = DemoOptions.skew,
    workers: Annotated[int, typer.Option(help="How many state workers to start.")] = DemoOptions.workers,
    parallelism: Annotated[int, typer.Option(help="In how many partitions the stages work.")] = DemoOptions.parallelism,
    store: Annotated[str, typer.Option(help=f"Where workers keep state: {' or '.join(STORES)}.")] = DemoOptions.store,
    redis_url: Annotated[
        str | None, typer.Option(help="The Redis of --store redis, e.g. redis://localhost:6379/0.")
    ] = None,
    rescale_to: Annotated[
        int | None,
        typer.Option(help="Rescale to so many workers during the run; 0: do not.", show_default="twice as many"),
    ] = None,
    rescale_at: Annotated[
        float | None, typer.Option(help="When to rescale, in seconds from the start.", show_default="the middle")
    ] = None,
    migration: Annotated[
        str, typer.Option(help=f"How state follows a rescale: {' or '.join(MIGRATIONS)}.")
    ] = DemoOptions.migration,
    routing_cache: _RoutingCache = True,
    drain: _Drained = True,
    compare: Annotated[
        bool, typer.Option("--compare", help="Run once with each --migration, and draw the runs side by side.")
    ] = False,
    work_ms: Annotated[float, typer.Option(help="CPU time for each row of stage 2.")] = DemoOptions.work_ms,
    count_ms: Annotated[float, typer.Option(help="CPU time for each row of stage 3.")] = DemoOptions.count_ms,
    junk_bytes: Annotated[
        int, typer.Option(help="State that each row adds in stage 3, besides the count.")
    ] = DemoOptions.junk_bytes,
    input: _Input = None,
    output: Annotated[Path, typer.Option(help="The directory for the results.")] = Path("demo-output"),
    trigger: Annotated[
        str, typer.Option(help="How often an epoch begins; 0: as soon as the last has ended.")
    ] = DemoOptions.trigger,
    view: Annotated[bool, typer.Option("--view/--no-view", help="Live on a terminal, or lines of text.")] = True,
    master: Annotated[str, typer.Option(help="The Spark master to run on.")] = "local[2]",
) -> None:
    """Run a job of five stages on generated or recorded edits, rescale it meanwhile, and measure its latency.

    Stages: 0 source, 1 filter (id % 4 != 0), 2 work that costs CPU time, 3 count per server, 4 latency at the sink.
    """
    try:
        _check_combinations(context, rescale_to, compare=compare, drain=drain, is_recorded=input is not None)
        run_s = (_SECONDS_COMPARED if compare else _SECONDS) if seconds is None else seconds
        options = DemoOptions(
            seconds=run_s, rate=rate, keys=keys, skew=skew, workers=workers, parallelism=parallelism, store=store,
            redis_url=redis_url, rescale_to=rescale_to, rescale_at=rescale_at, migration=migration,
            routing_cache=routing_cache, drain=drain, work_ms=work_ms, count_ms=count_ms, junk_bytes=junk_bytes,
            input=input, trigger=trigger,
        )  # fmt: skip
        outcome = _run(options, output, master, compare=compare, live=view)
    except AnabranchError as error:
        typer.echo(f"anabranch demo: {error}", err=True)
        raise typer.Exit(_USAGE if isinstance(error, SettingsError) else 1) from error
    except KeyboardInterrupt:
        typer.echo("anabranch demo: stopped at once, so there is no summary.", err=True)
        raise typer.Exit(_INTERRUPTED) from None
    if outcome.error is not None:
        typer.echo(f"anabranch demo: the query failed: {outcome.error}", err=True)
        raise typer.Exit(1)


def _check_combinations(
    context: typer.Context, rescale_to: int | None, *, compare: bool, drain: bool, is_recorded: bool
) -> None:
    """Refuse options that contradict each other."""
    given = {name for name in context.params if _is_given(context, name)}
    for name in _GENERATOR_OPTIONS:
        if is_recorded and name in given:
            raise SettingsError(
                f"{flag(name)} describes generated events, but --input is given. Leave one of the two out."
            )
    if compare and "migration" in given:
        raise SettingsError("--compare runs with every --migration, but one is given. Leave one of the two out.")
    if compare and not drain:
        raise SettingsError("--compare runs with every --migration, but --no-drain is about lazy only. Leave it out.")
    if compare and rescale_to == 0:
        raise SettingsError("--compare is about rescales, but --rescale-to is 0. Leave one of the two out.")


def _is_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _run(options: DemoOptions, directory: Path, master: str, *, compare: bool, live: bool) -> Outcome:
    """Check everything that can be checked, then start Spark and run."""
    from anabranch.demo.output import claim_output
    from anabranch.demo.session import check_java, check_master, open_spark

    check_master(master)
    recorded = None if options.input is None else find_recorded(options.input)
    check_java()
    with claim_output(directory) as output:
        # Rich, Spark and Arrow take their time to import, which a wrong option need not wait for.
        from rich.console import Console

        from anabranch.workload.plot import missing_library

        console = Console()
        if missing := missing_library():
            console.print(missing, highlight=False, markup=False, soft_wrap=True)
        console.print("Starting Spark and the state workers; this takes some seconds.", highlight=False)
        with open_spark(master, parallelism=options.parallelism, log=output.log) as spark:
            from anabranch.demo.presentation import Presentation

            presentation = Presentation(spark, recorded, console, live)
            return presentation.compare(options, output) if compare else presentation.run(options, output)
