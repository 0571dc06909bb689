"""The table of the HTTP API: each endpoint, what it takes and does. Routes, checks and OpenAPI are made from it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from anabranch.core.settings import MAX_PARALLELISM, MAX_WORKERS

EPOCHS_SHOWN = 20
EPOCHS_SHOWN_MAX = 1000
#: Stages are numbered from 0 at the source, and no plan comes near this many.
STAGE_NUMBER_MAX = 100_000
#: Longer names, addresses and paths are mistakes.
TEXT_CHARACTERS_MAX = 4096


class JobControl(Protocol):
    """What the HTTP API asks of a running job. Every method may be called from any thread, several at a time.

    Answers are JSON documents; `answers.SCHEMAS` says which fields each has at least. Errors of `core.errors` reach the
    client with their text.
    """

    def job(self) -> dict[str, Any]:
        """The job as a whole: id, last committed epoch, number of workers, and the rescale that was asked for last."""

    def stages(self) -> list[dict[str, Any]]:
        """The stages, in order, with number, name and parallelism."""

    def workers(self) -> list[dict[str, Any]]:
        """The workers, with id, address, state, and what they hold."""

    def route(self) -> dict[str, Any]:
        """The route in force."""

    def epochs(self, limit: int) -> list[dict[str, Any]]:
        """Reports of the last epochs, newest first."""

    def migrations(self) -> list[dict[str, Any]]:
        """The changes of the route by this driver, newest first, and whether all state has arrived."""

    def rescale(self, workers: int | None, parallelism: int | None, stage: int | str | None) -> dict[str, Any]:
        """Begin a rescale, and say how far it is."""

    def scale_out(self, stage: int | str | None) -> dict[str, Any]:
        """Begin to add a worker to those asked for, and a task to the stage, if one is named; say how far that is."""

    def drain(self, worker: str) -> dict[str, Any]:
        """Begin to move everything away from a worker, which then leaves, and say how far that is."""

    def join(self, address: str) -> dict[str, Any]:
        """Let a running worker take part. Of one that takes part already, say so: a worker may ask twice."""

    def savepoint(self, path: str) -> dict[str, Any]:
        """Save the job in a place of its own."""

    def stop(self) -> None:
        """Stop the job after the epoch that is running."""


Values = Mapping[str, Any]


@dataclass(frozen=True)
class Field:
    """A value that an endpoint takes: in the path, the query or the body."""

    name: str
    doc: str
    example: Any
    #: Both: a number or a name.
    is_number: bool = False
    is_text: bool = False
    low: int = 0
    high: int = 0
    required: bool = False
    default: Any = None
    #: A text must look like this, which is what `looks` says.
    pattern: str = ""
    looks: str = "a text"

    def fault(self, value: Any) -> str | None:
        """What is wrong with a value, as a sentence that says what is right; None if nothing is."""
        # For Python, true is a number.
        if self.is_number and isinstance(value, int) and not isinstance(value, bool):
            if self.low <= value <= self.high:
                return None
        elif self.is_text and isinstance(value, str):
            fits = 0 < len(value) <= TEXT_CHARACTERS_MAX and value.isprintable()
            if fits and re.fullmatch(self.pattern or ".*", value):
                return None
        shown = repr(value) if len(repr(value)) <= 60 else f"{repr(value)[:60]}…"
        return f"{self.name} is {shown}; it must be {self.in_words}, such as {self.example!r}."

    @property
    def in_words(self) -> str:
        number = f"a whole number from {self.low} to {self.high}"
        if self.is_number and self.is_text:
            return f"{number} or {self.looks}"
        return number if self.is_number else self.looks

    def from_text(self, text: str) -> Any:
        """What a text of the query stands for."""
        return int(text) if self.is_number and re.fullmatch(r"-?[0-9]{1,18}", text) else text

    def schema(self) -> dict[str, Any]:
        """As JSON Schema."""
        number: dict[str, Any] = {"type": "integer", "minimum": self.low, "maximum": self.high}
        text: dict[str, Any] = {"type": "string", "minLength": 1, "maxLength": TEXT_CHARACTERS_MAX}
        if self.pattern:
            text["pattern"] = f"^{self.pattern}$"
        if self.is_number and self.is_text:
            chosen: dict[str, Any] = {"anyOf": [number, text]}
        else:
            chosen = number if self.is_number else text
        if self.default is not None:
            chosen["default"] = self.default
        return chosen | {"examples": [self.example]}


@dataclass(frozen=True)
class Endpoint:
    """One thing that can be asked of the job."""

    method: str
    path: str
    name: str
    summary: str
    #: The name of the answer's schema in `answers.SCHEMAS`, and whether the answer is a list of them.
    answer: str
    many: bool = False
    #: None: the server answers by itself.
    call: Callable[[JobControl, Values], Any] | None = None
    in_path: tuple[Field, ...] = ()
    in_query: tuple[Field, ...] = ()
    in_body: tuple[Field, ...] = ()
    #: At least one of these must be given.
    one_of: tuple[str, ...] = ()
    changes: bool = False
    status: int = 200
    #: Needs no token, wherever the client is.
    is_public: bool = False


_STAGE = Field(
    "stage",
    "number or name of a stateful stage",
    3,
    is_number=True,
    is_text=True,
    high=STAGE_NUMBER_MAX,
    looks="the name of a stage",
)
_STAGE_NEEDED = Field(
    "stage",
    "number or name of the stateful stage that needs more capacity",
    3,
    is_number=True,
    is_text=True,
    high=STAGE_NUMBER_MAX,
    looks="the name of a stage",
    required=True,
)
_WORKERS = Field("workers", "how many workers the job is to have", 4, is_number=True, low=1, high=MAX_WORKERS)
_PARALLELISM = Field(
    "parallelism",
    "partitions of the stage, or of all stateful stages",
    8,
    is_number=True,
    low=1,
    high=MAX_PARALLELISM,
)
_LIMIT = Field("limit", "how many epochs", 5, is_number=True, low=1, high=EPOCHS_SHOWN_MAX, default=EPOCHS_SHOWN)
_WORKER = Field("worker", "id of a worker", "worker-3", is_text=True, looks="the id of a worker", required=True)
_ADDRESS = Field(
    "address",
    "where the driver reaches the worker, as host:port",
    "10.0.0.5:7077",
    is_text=True,
    required=True,
    # A port from 1 to 65535, so that nobody else has to look.
    pattern=(
        r"(?:[A-Za-z0-9_.-]+|\[[0-9A-Fa-f:.]+(?:%[A-Za-z0-9_.-]+)?\])"
        r":(?:[1-9][0-9]{0,3}|[1-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5])"
    ),
    looks="host:port",
)
_PATH = Field(
    "path",
    "where the savepoint goes: a new path or URL, as the driver sees it",
    "savepoints/before-upgrade",
    is_text=True,
    looks="a path or URL",
    required=True,
)


def _rescale(control: JobControl, values: Values) -> dict[str, Any]:
    return control.rescale(values.get("workers"), values.get("parallelism"), values.get("stage"))


def _scale_out(control: JobControl, values: Values) -> dict[str, Any]:
    return control.scale_out(values.get("stage"))


ENDPOINTS: tuple[Endpoint, ...] = (
    Endpoint("GET", "/", "index", "The job, and where to find the rest.", "Index"),
    Endpoint("GET", "/job", "job", "The job as a whole.", "Job", call=lambda c, _: c.job()),
    Endpoint("GET", "/stages", "stages", "The stages of the job.", "Stage", many=True, call=lambda c, _: c.stages()),
    Endpoint("GET", "/workers", "workers", "The workers.", "Worker", many=True, call=lambda c, _: c.workers()),
    Endpoint("GET", "/route", "route", "Which worker owns which key groups.", "Route", call=lambda c, _: c.route()),
    Endpoint(
        "GET",
        "/epochs",
        "epochs",
        "The last epochs, newest first.",
        "Epoch",
        many=True,
        call=lambda c, v: c.epochs(v["limit"]),
        in_query=(_LIMIT,),
    ),
    Endpoint(
        "GET",
        "/migrations",
        "migrations",
        "The changes of the route since the driver started, newest first.",
        "Migration",
        many=True,
        call=lambda c, _: c.migrations(),
    ),
    Endpoint("GET", "/health", "health", "Whether the API answers. Needs no token.", "Health", is_public=True),
    Endpoint("GET", "/openapi.json", "openapi", "This description.", "OpenApi"),
    Endpoint(
        "POST",
        "/rescale",
        "rescale",
        "Change the number of workers, the parallelism, or both, while the job runs.",
        "Rescale",
        call=_rescale,
        in_body=(_WORKERS, _PARALLELISM, _STAGE),
        one_of=("workers", "parallelism"),
        changes=True,
    ),
    Endpoint(
        "GET",
        "/scale",
        "scale_by_get",
        "Give a stage one worker's worth more capacity. GET is for this machine only.",
        "Rescale",
        call=_scale_out,
        in_query=(_STAGE_NEEDED,),
        changes=True,
    ),
    Endpoint(
        "POST",
        "/scale",
        "scale",
        "Add a worker, and give a stage one worker's worth more capacity, if one is named.",
        "Rescale",
        call=_scale_out,
        in_query=(_STAGE,),
        changes=True,
    ),
    Endpoint(
        "POST",
        "/workers",
        "join",
        "Let a running worker take part in the job.",
        "Worker",
        call=lambda c, v: c.join(v["address"]),
        in_body=(_ADDRESS,),
        changes=True,
    ),
    Endpoint(
        "POST",
        "/workers/{worker}/drain",
        "drain",
        "Move everything away from a worker, so that it can leave.",
        "Rescale",
        call=lambda c, v: c.drain(v["worker"]),
        in_path=(_WORKER,),
        changes=True,
    ),
    Endpoint(
        "POST",
        "/savepoint",
        "savepoint",
        "Save the job in a place of its own. The answer comes when that is done.",
        "Savepoint",
        call=lambda c, v: c.savepoint(v["path"]),
        in_body=(_PATH,),
        changes=True,
    ),
    Endpoint(
        "POST",
        "/stop",
        "stop",
        "Stop the job after the epoch that is running.",
        "Stopping",
        changes=True,
        status=202,
    ),
)

#: A GET that changes something must be looked at as closely as a POST.
CHANGED_BY_GET = frozenset(each.path for each in ENDPOINTS if each.changes and each.method == "GET")
PUBLIC = frozenset(each.path for each in ENDPOINTS if each.is_public)
