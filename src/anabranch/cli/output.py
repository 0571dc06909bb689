"""What commands print: tables for people, JSON for programs."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from typing import Annotated, Any

import typer
from msgspec import Struct
from rich import box
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from anabranch.core.reports import properties

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]

#: Of tables that go to a file or another program: paths should stay in one piece.
_PLAIN_WIDTH = 200


def tell(as_json: bool, document: Any, *parts: str | Table) -> None:
    """Prints JSON for programs, or sentences and tables for people."""
    if as_json:
        typer.echo(json.dumps(document, indent=2))
        return
    # Names of users are printed as they are, whatever brackets they have.
    console = Console(markup=False, highlight=False, emoji=False, width=None if sys.stdout.isatty() else _PLAIN_WIDTH)
    for part in parts:
        console.print(part, soft_wrap=isinstance(part, str))


def table(title: str, *columns: str) -> Table:
    """An empty table. Columns of numbers, whose names begin with #, are set to the right; long paths are folded."""
    made = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for column in columns:
        name = column.removeprefix("#")
        made.add_column(name, justify="left" if name == column else "right", overflow="fold")
    return made


def report_table(title: str, kind: type[Struct], rows: Iterable[Mapping[str, Any]]) -> Table:
    """A table of reports of one kind, as the HTTP API answers them.

    Columns are the fields that have a title. Those that no row has are left out, as an older job does not tell them.
    """
    rows = list(rows)
    shown = {name: schema for name, schema in properties(kind).items() if "title" in schema}
    shown = {name: schema for name, schema in shown.items() if any(name in row for row in rows)}
    marks = ["#" if schema.get("type") in ("integer", "number") else "" for schema in shown.values()]
    made = table(title, *(mark + schema["title"] for mark, schema in zip(marks, shown.values(), strict=True)))
    for row in rows:
        made.add_row(*(_written(name, row.get(name)) for name in shown))
    return made


def _written(name: str, value: Any) -> str:
    if value is None:
        return ""
    if name == "bytes":
        return decimal(int(value))
    return f"{value:,}" if name in ("rows", "keyGroups") else str(value)
