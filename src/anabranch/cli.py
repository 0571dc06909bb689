"""The command ``anabranch``."""

from __future__ import annotations

import logging
import os
from typing import Annotated

import typer

from anabranch.cli_checkpoint import checkpoint_app
from anabranch.cli_control import drain, scale, status, stop, workers
from anabranch.cli_history import savepoint
from anabranch.core.errors import AnabranchError
from anabranch.core.settings import STORES
from anabranch.demo.command import demo
from anabranch.workload.command import workgen

app = typer.Typer(
    name="anabranch",
    help="Elastic, disaggregated state for PySpark Structured Streaming.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback()
def _commands() -> None:
    """Elastic, disaggregated state for PySpark Structured Streaming."""


@app.command()
def worker(
    host: Annotated[str, typer.Option(help="Address to listen on; others than loopback need a token.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0: any free one.")] = 0,
    store: Annotated[str, typer.Option(help=f"Where state is kept: {' or '.join(STORES)}.")] = "memory",
    redis_url: Annotated[
        str, typer.Option(envvar="ANABRANCH_REDIS_URL", help="Where the shared store is, with --store redis.")
    ] = "redis://localhost:6379/0",
    state_path: Annotated[str, typer.Option(help="Directory for local state; empty: a temporary one.")] = "",
    token: Annotated[str, typer.Option(envvar="ANABRANCH_TOKEN", help="Shared secret of workers and queries.")] = "",
    worker_id: Annotated[str, typer.Option("--id", help="Name of this worker; empty: made from host and pid.")] = "",
    join: Annotated[str, typer.Option(help="HOST:PORT of a running query's url: take part in that job.")] = "",
    verbose: Annotated[bool, typer.Option("--verbose", help="Log what happens.")] = False,
) -> None:
    """Run a state worker until it is told to stop."""
    from anabranch.worker.process import WorkerOptions, run_worker

    logging.basicConfig(
        level=logging.INFO if verbose else logging.WARNING, format="%(asctime)s %(levelname)s %(name)s %(message)s"
    )
    if store not in STORES:
        raise typer.BadParameter(f"{store!r} is not a store; it can be {' or '.join(STORES)}.", param_hint="--store")
    run_worker(
        WorkerOptions(
            host=host,
            port=port,
            store=store,
            redis_url=redis_url,
            state_path=state_path or None,
            token=token,
            worker_id=worker_id or f"worker-{host}-{os.getpid()}",
            exit_with_parent=False,
            join=join,
        )
    )


app.command()(workgen)
app.command()(demo)
app.command()(savepoint)
app.command()(status)
app.command()(workers)
app.command()(scale)
app.command()(drain)
app.command()(stop)
app.add_typer(checkpoint_app)


def main() -> None:
    """Entry point: errors are one sentence, not a stack trace."""
    try:
        app()
    except AnabranchError as error:
        typer.echo(f"Error: {error}", err=True)
        raise SystemExit(1) from None
