"""``python -m bench NAME [options]``."""

from __future__ import annotations

import sys
from collections.abc import Callable

import typer

from anabranch.core.errors import AnabranchError
from bench.durability import durability
from bench.growth import growth
from bench.harness import BenchmarkError
from bench.latency import latency
from bench.machine import is_busy
from bench.memory import memory
from bench.operators import operators
from bench.processor import processor
from bench.recovery import recovery
from bench.report import say
from bench.rescale import rescale
from bench.session import was_interrupted
from bench.steady import steady
from bench.workloads import FAMILIES

BENCHMARKS: dict[str, Callable[..., None]] = {
    "steady": steady,
    "processor": processor,
    "operators": operators,
    "latency": latency,
    "growth": growth,
    "memory": memory,
    "recovery": recovery,
    "durability": durability,
    "rescale": rescale,
}
_INTERRUPTED = 130
_HELP = ("--help", "-h")

app = typer.Typer(
    name="python -m bench",
    help="Benchmarks of Anabranch against Spark's own state.",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": list(_HELP)},
)
for _name, _command in BENCHMARKS.items():
    app.command(_name)(_command)


def main(arguments: list[str]) -> int:
    """Run a benchmark, or a family of the benchmark `operators` by its own name; return the exit code."""
    if arguments and arguments[0] in FAMILIES:
        arguments = ["operators", "--only", *arguments]
    if not arguments or arguments[0] not in [*BENCHMARKS, *_HELP]:
        problem = f"There is no benchmark {arguments[0]!r}." if arguments else "Which benchmark?"
        known = ", ".join([*BENCHMARKS, *FAMILIES])
        typer.echo(f"{problem} Give one of {known}, with --help for its options.", err=True)
        return 2
    if is_busy() and not set(_HELP) & set(arguments):
        say("Other processes keep this machine busy: take the numbers with care.")
    try:
        app(arguments)
    except Exception as error:
        # Whatever breaks once everything is being taken down is of no interest.
        if was_interrupted():
            return _INTERRUPTED
        if not isinstance(error, (AnabranchError, BenchmarkError)):
            raise
        typer.echo(f"Error: {error}", err=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
