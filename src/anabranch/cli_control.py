"""The commands about a running job: ``anabranch status``, ``scale``, ``drain``, ``workers`` and ``stop``.

They ask the HTTP API of the job. Tables are for people, ``--json`` is what the API answered, for programs.
"""

from __future__ import annotations

import http.client
import json
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer
from rich import box
from rich.filesize import decimal
from rich.table import Table

from anabranch.cli_checkpoint import AsJson, tell
from anabranch.core.errors import AnabranchError, EpochError, SettingsError, WorkerError
from anabranch.core.settings import DEFAULT_CONTROL_PORT, MAX_PARALLELISM, MAX_WORKERS

DEFAULT_URL = f"http://localhost:{DEFAULT_CONTROL_PORT}"
#: The API answers at once, except that a change may wait for the epoch that runs.
_ANSWER_TIMEOUT_S = 120.0
_LOOK_INTERVAL_S = 0.3
_WAIT_S_MAX = 24 * 3600.0
_FINAL = ("done", "failed", "replaced")

Url = Annotated[str, typer.Option("--url", envvar="ANABRANCH_URL", help="Where the HTTP API of the job is.")]
Token = Annotated[str, typer.Option("--token", envvar="ANABRANCH_TOKEN", help="The token of the job, if it has one.")]

#: The columns of tables: what an answer calls them, what people do, and how values are written.
_WORKER_COLUMNS = {
    "id": "worker",
    "address": "address",
    "state": "state",
    "keyGroups": "#key groups",
    "rows": "#rows",
    "bytes": "#size",
    "pid": "#pid",
}
_STAGE_COLUMNS = {"number": "#stage", "name": "name", "parallelism": "#parallelism"}
_RESCALE_COLUMNS = {
    "number": "#rescale",
    "what": "what",
    "state": "state",
    "groupsMoving": "#key groups moving",
    "groupsPending": "#not yet there",
    "seconds": "#seconds",
}
_MIGRATION_COLUMNS = {
    "number": "#migration",
    "routeVersion": "#route",
    "groupsMoving": "#key groups moving",
    "groupsPending": "#not yet there",
    "seconds": "#seconds",
}


def status(url: Url = DEFAULT_URL, token: Token = "", as_json: AsJson = False) -> None:
    """Show a running job: its last epoch, stages, workers, and rescales that are under way."""
    api = _Api(url, token)
    document = {name: api.get(f"/{name}") for name in ("job", "stages", "workers", "migrations")}
    job = document["job"]
    line = f"{_named(job)}: epoch {job['epoch']} is committed, {_counted(job['workers'], 'worker')}"
    if "routeVersion" in job:
        line += f", route version {job['routeVersion']}"
    parts: list[str | Table] = [f"{line}.", _table("Stages", _STAGE_COLUMNS, document["stages"])]
    parts.append(_table("Workers", _WORKER_COLUMNS, document["workers"]))
    if job.get("rescale") is not None:
        parts.append(_table("Last rescale", _RESCALE_COLUMNS, [job["rescale"]]))
    under_way = [each for each in document["migrations"] if not each["done"]]
    if under_way:
        parts.append(_table("Migrations under way", _MIGRATION_COLUMNS, under_way))
    tell(as_json, document, *parts)


def workers(url: Url = DEFAULT_URL, token: Token = "", as_json: AsJson = False) -> None:
    """Show the workers of a running job, and what each holds."""
    found = _Api(url, token).get("/workers")
    tell(as_json, found, _table("Workers", _WORKER_COLUMNS, found))


def scale(
    workers: Annotated[int | None, typer.Option(min=1, max=MAX_WORKERS, help="How many workers to have.")] = None,
    parallelism: Annotated[
        int | None, typer.Option(min=1, max=MAX_PARALLELISM, help="Partitions of the stage, or of all stages.")
    ] = None,
    stage: Annotated[
        str | None, typer.Option(help="Number or name of a stage; alone: one worker's worth more capacity for it.")
    ] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Return when all state has moved.")] = False,
    url: Url = DEFAULT_URL,
    token: Token = "",
    as_json: AsJson = False,
) -> None:
    """Rescale a running job while it runs. Without options: one more worker."""
    api = _Api(url, token)
    job = _named(api.get("/job"))
    chosen = None if stage is None else int(stage) if stage.isascii() and stage.isdigit() else stage
    if workers is None and parallelism is None:
        # The job adds to what was asked for before, be it there yet or not.
        begun = api.post("/scale" if chosen is None else f"/scale?{urllib.parse.urlencode({'stage': chosen})}")
    else:
        wanted = {"workers": workers, "parallelism": parallelism, "stage": chosen}
        begun = api.post("/rescale", {name: value for name, value in wanted.items() if value is not None})
    _tell_rescale(api, job, begun, wait=wait, as_json=as_json)


def drain(
    worker: Annotated[str, typer.Argument(help="The id of the worker; see anabranch workers.", show_default=False)],
    wait: Annotated[bool, typer.Option("--wait", help="Return when all state has moved.")] = False,
    url: Url = DEFAULT_URL,
    token: Token = "",
    as_json: AsJson = False,
) -> None:
    """Move everything away from a worker, so that it can leave."""
    api = _Api(url, token)
    job = _named(api.get("/job"))
    begun = api.post(f"/workers/{urllib.parse.quote(worker, safe='')}/drain")
    _tell_rescale(api, job, begun, wait=wait, as_json=as_json)


def stop(url: Url = DEFAULT_URL, token: Token = "", as_json: AsJson = False) -> None:
    """Stop a running job after the epoch that is running. It resumes from its checkpoint when it is started again."""
    api = _Api(url, token)
    job = _named(api.get("/job"))
    tell(as_json, api.post("/stop"), f"{job}: stops after the epoch that is running.")


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """The API never redirects, and the token is for nobody else."""

    def redirect_request(self, *_: Any) -> None:
        return None


class _Api:
    """The HTTP API of a job."""

    def __init__(self, url: str, token: str) -> None:
        self._url = _checked(url)
        self._headers = {"content-type": "application/json", "accept": "application/json"}
        if token:
            # Headers are sent as Latin-1, whatever the token is made of.
            self._headers["authorization"] = f"Bearer {token.strip()}".encode().decode("latin-1")
        # Never by way of a proxy: it would be shown the token.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirects())

    def get(self, path: str) -> Any:
        return self._ask(urllib.request.Request(self._url + path, headers=self._headers))

    def post(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        data = json.dumps(body or {}).encode()
        return self._ask(urllib.request.Request(self._url + path, data, self._headers, method="POST"))

    def _ask(self, request: urllib.request.Request) -> Any:
        try:
            with self._opener.open(request, timeout=_ANSWER_TIMEOUT_S) as response:
                if "anabranch-api" not in response.headers:
                    raise self._no_job()
                return json.load(response)
        except urllib.error.HTTPError as error:
            with error:
                raise self._refused(error.code, error.read()) from None
        except TimeoutError:
            raise WorkerError(
                f"The job at {self._url} did not answer within {_ANSWER_TIMEOUT_S:g} s. See the log of its driver."
            ) from None
        except OSError as error:
            reason = getattr(error, "reason", error)
            text = getattr(reason, "strerror", None) or str(reason) or type(reason).__name__
            raise SettingsError(
                f"No job answers at {self._url} ({text}). Start the job, or name its HTTP API with --url or "
                "ANABRANCH_URL."
            ) from None
        except (ValueError, http.client.HTTPException):
            raise self._no_job() from None

    def _refused(self, status: int, body: bytes) -> AnabranchError:
        try:
            sentence = str(json.loads(body)["error"])
        except (ValueError, KeyError, TypeError):
            return self._no_job()
        if status == 401:
            sentence += " Here: --token or ANABRANCH_TOKEN."
        kind = {409: EpochError, 503: WorkerError}.get(status, SettingsError if status < 500 else AnabranchError)
        return kind(sentence)

    def _no_job(self) -> SettingsError:
        return SettingsError(
            f"What answers at {self._url} is not a job. Name the HTTP API of the job with --url or ANABRANCH_URL."
        )


def _checked(url: str) -> str:
    try:
        parts = urllib.parse.urlsplit(url)
        is_whole = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        is_whole = False
    if not is_whole or not url.isprintable() or " " in url:
        raise SettingsError(f"{url!r} is not the URL of a job. Write --url http://HOST:PORT, such as {DEFAULT_URL}.")
    return url.rstrip("/")


def _named(job: Mapping[str, Any]) -> str:
    """Which job this is. Several may run on one machine, and the one at the default port need not be the one meant."""
    name = f" {job['name']!r}" if job.get("name") else ""
    return f"Job {job['id']}{name} with the checkpoint {job['checkpoint']}"


def _tell_rescale(api: _Api, job: str, begun: Mapping[str, Any], *, wait: bool, as_json: bool) -> None:
    progress = _finished(api, begun) if wait else begun
    if progress["state"] in ("failed", "replaced"):
        verb = "failed" if progress["state"] == "failed" else "was replaced"
        reason = progress.get("message") or "see the log of the driver."
        raise EpochError(f"Rescale {progress['number']} {verb}: {reason}")
    tell(as_json, progress, f"{job}:", _table("Rescale", _RESCALE_COLUMNS, [progress]))


def _finished(api: _Api, begun: Mapping[str, Any]) -> Mapping[str, Any]:
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


def _table(title: str, columns: Mapping[str, str], rows: Sequence[Mapping[str, Any]]) -> Table:
    """Columns of numbers, whose names begin with #, are set to the right. What no row has is left out."""
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    shown = [name for name in columns if any(name in row for row in rows)]
    for name in shown:
        heading = columns[name].removeprefix("#")
        table.add_column(heading, justify="left" if heading == columns[name] else "right", overflow="fold")
    for row in rows:
        table.add_row(*(_written(name, row.get(name)) for name in shown))
    return table


def _written(name: str, value: Any) -> str:
    if value is None:
        return ""
    if name == "bytes":
        return decimal(int(value))
    return f"{value:,}" if name in ("rows", "keyGroups") else str(value)


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"
