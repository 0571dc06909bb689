"""Points at which a driver ends without a word, or is held up, between two steps of an epoch."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from anabranch.control import owned_checkpoint as claims_module
from anabranch.control import resume as resume_module
from anabranch.control.coordinator import Coordinator
from anabranch.control.epochs import durability as durability_module
from anabranch.control.epochs.executor import EpochExecutor
from anabranch.control.membership import assignment as assigning_module
from anabranch.control.membership import change as changing_module
from anabranch.control.membership.change import ChangeInProgress
from anabranch.control.membership.cluster import Cluster
from anabranch.core import epoch_events as events
from anabranch.engine.loop import EpochLoop
from anabranch.engine.spark.sinks import FileSink
from soak.places import Places

#: Says where a driver is to crash, such as ``manifest:after:3``: after writing the manifest of epoch 3.
VARIABLE = "SOAK_CRASH"
#: In the same form, where it is to stop until it is told to go on.
HOLD_VARIABLE = "SOAK_HOLD"
EXIT_CODE = 9
_LOOK_INTERVAL_S = 0.001

#: In the order in which they are passed. Several workers prepare and commit side by side: "between" is after the first.
POINTS = (
    "begin:before",
    "begin:after",
    "sink:before",
    "sink:after",
    "seal:before",
    "seal:after",
    "prepare:before",
    "prepare:between",
    "manifest:before",
    "manifest:after",
    "commit:before",
    "commit:between",
    "spark-commit:before",
    "spark-commit:after",
)
#: Points within the start of a query, which have no epoch.
START_POINTS = ("claim:after", "route:before", "open:before", "open:after")
#: Points within a change of the workers, be it a rescale or a repair, in order; the first change is meant.
CHANGE_POINTS = ("change:before", "reroute:after", "assign-one:after", "assign:after", "migrate:after")
_ALL_POINTS = (*POINTS, *START_POINTS, *CHANGE_POINTS)


#: What happens at a point.
Action = Callable[[], None]
_Applies = Callable[..., bool]


def crash() -> None:
    os._exit(EXIT_CODE)


def hold(places: Places) -> None:
    """Say that the point is reached, and wait for the word to go on."""
    places.held.touch()
    pause = threading.Event()
    while not places.go.exists():
        pause.wait(_LOOK_INTERVAL_S)


def install(text: str, action: Action, checkpoint: Path) -> None:
    """Make this process act at a point, such as ``sink:before:3``, or ``claim:after``."""
    step, when, *rest = text.split(":")
    if f"{step}:{when}" not in _ALL_POINTS:
        raise ValueError(f"There is no crash point {text!r}. There are: {', '.join(_ALL_POINTS)}.")
    epoch = int(rest[0]) if rest else -1
    if (step, when) == ("spark-commit", "after"):
        _watch_for(checkpoint / "commits" / str(epoch), action)
        return
    target, name, applies = _places_of(step, epoch)
    # Spark commits when the function of foreachBatch returns.
    earlier = when == "before" and step != "spark-commit"
    setattr(target, name, _around(getattr(target, name), applies, action, earlier=earlier))


def _around(function: Callable[..., Any], applies: _Applies, action: Action, *, earlier: bool) -> Callable[..., Any]:
    def acting(*arguments: Any, **named: Any) -> Any:
        applied = applies(*arguments, **named)
        if applied and earlier:
            action()
        result = function(*arguments, **named)
        if applied and not earlier:
            action()
        return result

    return acting


def _places_of(step: str, epoch: int) -> tuple[Any, str, _Applies]:
    """The function to act before or after, and whether a call of it is meant."""

    def is_asked(kind: type[events.PrepareOn | events.CommitOn]) -> _Applies:
        return lambda _, asked: isinstance(asked, kind) and asked.epoch == epoch

    def is_epoch(*arguments: Any) -> bool:
        return bool(arguments[-1] == epoch)

    def is_in_change(*arguments: Any) -> bool:
        """Key groups are assigned when a query starts, too; then no route was in force before."""
        return arguments[-1].before is not None

    def always(*_: Any, **__: Any) -> bool:
        return True

    found: dict[str, tuple[Any, str, _Applies]] = {
        "begin": (Coordinator, "begin", is_epoch),
        "sink": (FileSink, "write", is_epoch),
        "seal": (Coordinator, "missing", is_epoch),
        "prepare": (EpochExecutor, "_ask", is_asked(events.PrepareOn)),
        "manifest": (durability_module, "write_manifest", lambda _, manifest: manifest.epoch == epoch),
        "commit": (EpochExecutor, "_ask", is_asked(events.CommitOn)),
        "spark-commit": (EpochLoop, "__call__", is_epoch),
        "claim": (claims_module, "save_shape", always),
        "route": (resume_module, "save_route", always),
        "open": (resume_module, "carry_out", always),
        "change": (Cluster, "change", always),
        "reroute": (changing_module, "save_route", always),
        "assign": (changing_module, "carry_out", always),
        "assign-one": (assigning_module, "_assign", is_in_change),
        "migrate": (ChangeInProgress, "_note_made", always),
    }
    return found[step]


def _watch_for(file: Path, action: Action) -> None:
    def watch() -> None:
        pause = threading.Event()
        while not file.exists():
            pause.wait(_LOOK_INTERVAL_S)
        action()

    threading.Thread(target=watch, daemon=True).start()
