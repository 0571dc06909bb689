"""What the HTTP API answers, as JSON Schema: every field that a running query sends, and which it always does."""

from __future__ import annotations

from typing import Any

from anabranch.control.strategies import MIGRATIONS

#: The states of a rescale, of which the last three are final.
RESCALE_STATES = ("waiting", "migrating", "done", "failed", "replaced")
#: A worker that drains still serves what it has not handed over.
WORKER_STATES = ("joining", "serving", "draining")


def _object(doc: str, required: tuple[str, ...] = (), /, **properties: dict[str, Any]) -> dict[str, Any]:
    """Without names of required ones, all are. Further fields are allowed: clients ignore what they do not know."""
    return {
        "type": "object",
        "description": doc,
        "properties": properties,
        "required": list(required or properties),
    }


def _list(doc: str, items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "description": doc, "items": items}


def _count(doc: str = "") -> dict[str, Any]:
    return {"type": "integer", "minimum": 0, **({"description": doc} if doc else {})}


def _text(doc: str = "") -> dict[str, Any]:
    return {"type": "string", **({"description": doc} if doc else {})}


def _flag(doc: str) -> dict[str, Any]:
    return {"type": "boolean", "description": doc}


def _epoch(doc: str) -> dict[str, Any]:
    return {"type": "integer", "minimum": -1, "description": f"{doc}; -1: none yet"}


def _by_name(doc: str, values: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "description": doc, "additionalProperties": values}


_WORKER_IDS = {"type": "array", "items": _text()}
_STAGE = _count("the number of a stage")

#: How much state a rescale or migration moves.
_MOVES = {
    "groupsMoving": _count("key groups that change their owner"),
    "groupsPending": _count("those of them that have not arrived"),
    "rowsFetched": _count("entries of state that came because they were needed"),
    "rowsDrained": _count("entries of state that came in the background"),
    "bytesFetched": _count(),
    "bytesDrained": _count(),
    "changeMs": _count("how long the change of the route held up the epoch that it came before"),
    "seconds": {"type": "number", "minimum": 0, "description": "since it began; of one that is over, until then"},
}

_CHANGE = _object(
    "Workers that were lost, started or left before an epoch.",
    lost=_WORKER_IDS,
    started=_WORKER_IDS,
    left=_WORKER_IDS,
    keyGroups=_count("key groups that have another owner since"),
    routeVersion=_count(),
    durationMs=_count(),
)

#: By the names that the table of endpoints uses.
SCHEMAS: dict[str, dict[str, Any]] = {
    "Index": _object(
        "The job, and the paths of the API by name.",
        job={"$ref": "#/components/schemas/Job"},
        links=_by_name("paths", _text()),
    ),
    "Job": _object(
        "The job as a whole.",
        id=_text("of Spark's query, the same after a restart"),
        runId=_text("of this run of the query"),
        name={"type": ["string", "null"], "description": "the name of the query, if it has one"},
        checkpoint=_text("where the job's checkpoint is"),
        epoch=_epoch("the last committed epoch"),
        durableEpoch=_epoch("the last epoch that is safe whatever dies"),
        routeVersion=_count("the route in force"),
        keyGroups=_count(),
        workers=_count("how many workers have key groups"),
        migrating=_flag("whether state is on its way to new owners"),
        rescale={
            "anyOf": [{"$ref": "#/components/schemas/Rescale"}, {"type": "null"}],
            "description": "the rescale that was asked for last",
        },
    ),
    "Stage": _object(
        "A stage, with state or without.",
        number=_count(),
        name=_text(),
        stateful=_flag("whether it has a key and state"),
        operations=_list("what it does", _text()),
        parallelism=_count("its partitions; 0: as many as Spark chooses"),
    ),
    "Worker": _object(
        "A state worker. Of one that joins or drains, not all is said.",
        ("id", "address"),
        id=_text(),
        address=_text("host:port"),
        state={"enum": list(WORKER_STATES)},
        pid=_count(),
        keyGroups=_count("key groups that it owns"),
        pendingGroups=_count("those of them that have not all arrived"),
        frozenGroups=_count("key groups that it keeps for their new owners"),
        load=_count("keys that it was asked for lately, and further rows of theirs"),
        rows=_count("entries of state"),
        bytes=_count("their size"),
        variables=_list(
            "by state variable",
            _object("What it holds of one.", stage=_STAGE, variable=_text(), rows=_count(), bytes=_count()),
        ),
    ),
    "Route": _object(
        "Which worker owns which key groups.",
        version=_count(),
        firstEpoch=_count("the epoch from which on it is in force"),
        workers={"type": "array", "items": _text(), "description": "ids"},
        owners=_list("for each key group, the position of its owner in workers", _count()),
        keyGroups=_by_name("how many key groups each worker owns", _count()),
    ),
    "Epoch": _object(
        "The report of an epoch.",
        (
            *("epoch", "run", "routeVersion", "workers", "durableEpoch", "repairs", "changes", "migrating"),
            *("changedRows", "changedBytes", "changedVariables", "droppedRows", "durationMs", "watermarkMs"),
        ),
        epoch=_count(),
        run=_count("counts how often epochs were run by this driver, repetitions included"),
        routeVersion=_count(),
        workers=_count(),
        durableEpoch=_epoch("the last epoch that was safe when this one ended"),
        repairs=_list("changes because of lost workers", _CHANGE),
        changes=_list("all changes among workers before this epoch", _CHANGE),
        migrating=_flag("whether state was on its way to new owners"),
        changedRows=_count("entries of state that were set or removed"),
        changedBytes=_count("the size of the change files"),
        changedVariables=_list(
            "by state variable",
            _object("What was changed of one.", stage=_STAGE, variable=_text(), put=_count(), removed=_count()),
        ),
        droppedRows=_list("by stage, rows that came too late", _object("Of one stage.", stage=_STAGE, rows=_count())),
        lateRows=_count("late rows that were written to where writeStream.lateRows says"),
        durationMs=_by_name("how long each step took", _count()),
        watermarkMs={"type": ["integer", "null"], "description": "the watermark, in milliseconds since 1970"},
    ),
    "Rescale": _object(
        "What was asked for, and how far it is.",
        number=_count("counts the rescales of this driver"),
        what=_text("in words"),
        state={"enum": list(RESCALE_STATES)},
        message=_text("why it failed or cannot complete, or what it was replaced by"),
        workers={"type": ["integer", "null"], "minimum": 1, "description": "how many to have; null: as many as before"},
        parallelism=_by_name("by the number of the stage, how many partitions to have", _count()),
        startedEpoch={"type": ["integer", "null"], "minimum": 0, "description": "the first epoch under the new route"},
        **_MOVES,
    ),
    "Migration": _object(
        "A change of the route, and how much of the state that it moves has arrived.",
        number=_count(),
        strategy={"enum": list(MIGRATIONS)},
        routeVersion=_count("the route since then"),
        firstEpoch=_count("the first epoch under that route"),
        startedAt={"type": "number", "minimum": 0, "description": "in seconds since 1970"},
        joined=_WORKER_IDS,
        left=_WORKER_IDS,
        done=_flag("whether all state has arrived"),
        **_MOVES,
    ),
    "Savepoint": _object("A savepoint that is complete.", epoch=_count("the epoch it is as of"), path=_text()),
    "Stopping": _object("The job is about to stop.", stopping={"const": True}),
    "Health": _object("The API answers.", status={"const": "ok"}),
    "OpenApi": {"type": "object", "description": "An OpenAPI document."},
    "Error": _object("What went wrong, and what to do.", error=_text()),
}
