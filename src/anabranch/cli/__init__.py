"""The command ``anabranch``."""

from __future__ import annotations

import logging
import os
from typing import Annotated

import typer

from anabranch.cli.checkpoint import checkpoint_app, savepoint
from anabranch.cli.job_api import TlsAuthority, TlsCertificate, TlsKey, Token
from anabranch.cli.jobs import drain, scale, status, stop, workers
from anabranch.cli.jobs import token as show_token
from anabranch.core.errors import AnabranchError
from anabranch.demo.command import demo
from anabranch.worker.stores import STORES
from anabranch.workload.command import workgen

logger = logging.getLogger(__name__)

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
    context: typer.Context,
    host: Annotated[str, typer.Option(help="Address to listen on; others than loopback need a token.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0: any free one.")] = 0,
    store: Annotated[str, typer.Option(help=f"Where state is kept: {' or '.join(STORES)}.")] = "memory",
    redis_url: Annotated[
        str, typer.Option(envvar="ANABRANCH_REDIS_URL", help="Where the shared store is, with --store redis.")
    ] = "redis://localhost:6379/0",
    state_path: Annotated[str, typer.Option(help="Directory for local state; empty: a temporary one.")] = "",
    token: Token = "",
    tls_certificate: TlsCertificate = "",
    tls_key: TlsKey = "",
    tls_authority: TlsAuthority = "",
    worker_id: Annotated[str, typer.Option("--id", help="Name of this worker; empty: made from host and pid.")] = "",
    join: Annotated[str, typer.Option(help="HOST:PORT of a running query's url: take part in that job.")] = "",
    verbose: Annotated[bool, typer.Option("--verbose", help="Log what happens.")] = False,
) -> None:
    """Run a state worker until it is told to stop."""
    from anabranch.wire.credentials import Credentials
    from anabranch.worker.server.process import WorkerOptions, run_worker

    logging.basicConfig(
        level=logging.INFO if verbose else logging.WARNING, format="%(asctime)s %(levelname)s %(name)s %(message)s"
    )
    if store not in STORES:
        raise typer.BadParameter(f"{store!r} is not a store; it can be {' or '.join(STORES)}.", param_hint="--store")
    _warn_of_command_line(context, redis_url)
    run_worker(
        WorkerOptions(
            host=host,
            port=port,
            store=store,
            redis_url=redis_url,
            state_path=state_path or None,
            credentials=Credentials(token.strip(), tls_certificate, tls_key, tls_authority),
            worker_id=worker_id or f"worker-{host}-{os.getpid()}",
            exit_with_parent=False,
            join=join,
        )
    )


def _warn_of_command_line(context: typer.Context, redis_url: str) -> None:
    """Everybody on the machine can read the command lines of processes."""
    given = {
        name
        for name in ("token", "redis_url")
        if (source := context.get_parameter_source(name)) is not None and source.name == "COMMANDLINE"
    }
    if "@" not in redis_url:
        given.discard("redis_url")
    for name in sorted(given):
        logger.warning(
            "all users of this machine can read --%s in the command line of this process; set ANABRANCH_%s instead",
            name.replace("_", "-"),
            name.upper(),
        )


for command in (workgen, demo, savepoint, status, workers, scale, drain, stop):
    app.command()(command)
app.command("token")(show_token)
app.add_typer(checkpoint_app)


def main() -> None:
    """Entry point: errors are one sentence, not a stack trace."""
    try:
        app()
    except AnabranchError as error:
        typer.echo(f"Error: {error}", err=True)
        raise SystemExit(1) from None
