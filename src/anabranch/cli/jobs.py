"""The commands about a running job: ``anabranch status``, ``scale``, ``drain``, ``workers``, ``stop`` and ``token``.

They ask the HTTP API of the job. Tables are for people, ``--json`` is what the API answered, for programs.
"""

from __future__ import annotations

import threading
import time
import urllib.parse
from collections.abc import Mapping
from typing import Annotated, Any

import typer
from rich.table import Table

from anabranch.cli.job_api import JobApi, reaching_a_job
from anabranch.cli.output import AsJson, report_table, tell
from anabranch.core.errors import EpochError, SettingsError
from anabranch.core.reports import MigrationReport, RescaleReport, StageReport, WorkerReport
from anabranch.core.settings import MAX_PARALLELISM, MAX_WORKERS

_LOOK_INTERVAL_S = 0.3
_WAIT_S_MAX = 24 * 3600.0
_FINAL = ("done", "failed", "replaced")


@reaching_a_job
def status(api: JobApi, as_json: AsJson = False) -> None:
    """Show a running job: its last epoch, stages, workers, and rescales that are under way."""
    document = {name: api.get(f"/{name}") for name in ("job", "stages", "workers", "migrations")}
    job = document["job"]
    line = f"{_named(job)}: epoch {job['epoch']} is committed, {_counted(job['workers'], 'worker')}"
    if "routeVersion" in job:
        line += f", route version {job['routeVersion']}"
    parts: list[str | Table] = [f"{line}.", report_table("Stages", StageReport, document["stages"])]
    parts.append(report_table("Workers", WorkerReport, document["workers"]))
    if job.get("rescale") is not None:
        parts.append(report_table("Last rescale", RescaleReport, [job["rescale"]]))
    under_way = [each for each in document["migrations"] if not each["done"]]
    if under_way:
        parts.append(report_table("Migrations under way", MigrationReport, under_way))
    tell(as_json, document, *parts)


@reaching_a_job
def workers(api: JobApi, as_json: AsJson = False) -> None:
    """Show the workers of a running job, and what each holds."""
    found = api.get("/workers")
    tell(as_json, found, report_table("Workers", WorkerReport, found))


@reaching_a_job
def scale(
    api: JobApi,
    workers: Annotated[int | None, typer.Option(min=1, max=MAX_WORKERS, help="How many workers to have.")] = None,
    parallelism: Annotated[
        int | None, typer.Option(min=1, max=MAX_PARALLELISM, help="Partitions of the stage, or of all stages.")
    ] = None,
    stage: Annotated[
        str | None, typer.Option(help="Number or name of a stage; alone: one worker's worth more capacity for it.")
    ] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Return when all state has moved.")] = False,
    as_json: AsJson = False,
) -> None:
    """Rescale a running job while it runs. Without options: one more worker."""
    job = _named(api.get("/job"))
    chosen = None if stage is None else int(stage) if stage.isascii() and stage.isdigit() else stage
    if workers is None and parallelism is None:
        # The job adds to what was asked for before, be it there yet or not.
        begun = api.post("/scale" if chosen is None else f"/scale?{urllib.parse.urlencode({'stage': chosen})}")
    else:
        wanted = {"workers": workers, "parallelism": parallelism, "stage": chosen}
        begun = api.post("/rescale", {name: value for name, value in wanted.items() if value is not None})
    _tell_rescale(api, job, begun, wait=wait, as_json=as_json)


@reaching_a_job
def drain(
    api: JobApi,
    worker: Annotated[str, typer.Argument(help="The id of the worker; see anabranch workers.", show_default=False)],
    wait: Annotated[bool, typer.Option("--wait", help="Return when all state has moved.")] = False,
    as_json: AsJson = False,
) -> None:
    """Move everything away from a worker, so that it can leave."""
    job = _named(api.get("/job"))
    begun = api.post(f"/workers/{urllib.parse.quote(worker, safe='')}/drain")
    _tell_rescale(api, job, begun, wait=wait, as_json=as_json)


@reaching_a_job
def stop(api: JobApi, as_json: AsJson = False) -> None:
    """Stop a running job after the epoch that is running. It resumes from its checkpoint when it is started again."""
    job = _named(api.get("/job"))
    tell(as_json, api.post("/stop"), f"{job}: stops after the epoch that is running.")


@reaching_a_job
def token(api: JobApi) -> None:
    """Print the token of a job of this user on this machine, for programs that ask its HTTP API themselves."""
    if not api.token:
        raise SettingsError(
            "No job of this user on this machine answers there. Name its HTTP API with --url, and run the command as "
            "the user who runs the job."
        )
    typer.echo(api.token)


def _named(job: Mapping[str, Any]) -> str:
    """Which job this is. Several may run on one machine, and the one at the default port need not be the one meant."""
    name = f" {job['name']!r}" if job.get("name") else ""
    return f"Job {job['id']}{name} with the checkpoint {job['checkpoint']}"


def _tell_rescale(api: JobApi, job: str, begun: Mapping[str, Any], *, wait: bool, as_json: bool) -> None:
    progress = _finished(api, begun) if wait else begun
    if progress["state"] in ("failed", "replaced"):
        verb = "failed" if progress["state"] == "failed" else "was replaced"
        reason = progress.get("message") or "see the log of the driver."
        raise EpochError(f"Rescale {progress['number']} {verb}: {reason}")
    tell(as_json, progress, f"{job}:", report_table("Rescale", RescaleReport, [progress]))


def _finished(api: JobApi, begun: Mapping[str, Any]) -> Mapping[str, Any]:
    """The last report of a rescale."""
    number, progress = begun["number"], begun
    deadline_s, pause = time.monotonic() + _WAIT_S_MAX, threading.Event()
    while progress["state"] not in _FINAL:
        if time.monotonic() > deadline_s:
            raise EpochError(f"Rescale {number} is still under way. See anabranch status.")
        pause.wait(_LOOK_INTERVAL_S)
        progress = api.get("/job")["rescale"] or {}
        if progress.get("number") != number:
            raise EpochError(f"Another rescale was asked for after rescale {number}. See anabranch status.")
    return progress


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"
