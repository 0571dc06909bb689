"""Queries that go by processing time, and what they give if each epoch runs when Spark has logged that it did."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
from pyspark import cloudpickle
from pyspark.sql import Row
from pyspark.sql.streaming.state import GroupState
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

# Tasks run in processes that do not have this package on their path.
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # type: ignore[no-untyped-call]

#: How long a key may be away, and how long its tags and values are known: a few epochs, and less than a restart takes.
_AWAY_MS = 1_500
_KNOWN_MS = 2_500

#: The time of an epoch in milliseconds, and its rows: key, value, tag, number of the file.
TimedEpoch = tuple[int, Sequence[tuple[str, int, str, int]]]
#: Rows of output, and the final state by the names of its variables.
Result = tuple[list[tuple[Any, ...]], dict[str, list[tuple[Any, ...]]]]


def times_logged(checkpoint: Path) -> list[int]:
    """When Spark planned each epoch, in milliseconds: what it has logged is what every repetition has to go by."""
    logged = sorted((checkpoint / "offsets").glob("[0-9]*"), key=lambda path: int(path.name))
    return [int(json.loads(path.read_text().splitlines()[1])["batchTimestampMs"]) for path in logged]


# ------------------------------------------------------------------------------------------- timers, time to live

#: The variables that are empty once every key has been away for long enough.
PAUSES_LEAVE_NOTHING_IN = ("total", "tags", "lately")


class Pauses(StatefulProcessor):
    """Notes with every row what a key did lately, and says when the key has been away for a while."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._handle = handle
        self._rows = handle.getValueState("rows", "n bigint")
        self._total = handle.getValueState("total", "total bigint")
        self._tags = handle.getMapState("tags", "tag string", "n bigint", _KNOWN_MS)
        self._lately = handle.getListState("lately", "v bigint", _KNOWN_MS)

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:
        now_ms = timerValues.getCurrentProcessingTimeInMs()
        for timer in list(self._handle.listTimers()):
            self._handle.deleteTimer(timer)
        self._handle.registerTimer(now_ms + _AWAY_MS)
        taken = sorted((row.v, row.tag) for row in rows)
        self._rows.update(((self._rows.get() or (0,))[0] + len(taken),))
        total = (self._total.get() or (0,))[0] + sum(value for value, _ in taken)
        self._total.update((total,))
        for _, tag in taken:
            self._tags.updateValue((tag,), ((self._tags.getValue((tag,)) or (0,))[0] + 1,))
        self._lately.appendList([(value,) for value, _ in taken])
        tags = sorted((tag, n) for (tag,), (n,) in self._tags.iterator())
        lately = sorted(value for (value,) in self._lately.get())
        yield Row(k=key[0], total=total, at_ms=now_ms, about=f"{tags} {lately}")

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        now_ms = timerValues.getCurrentProcessingTimeInMs()
        late_ms = now_ms - expiredTimerInfo.getExpiryTimeInMs()
        total = (self._total.get() or (0,))[0]
        self._total.clear()
        yield Row(k=key[0], total=total, at_ms=now_ms, about=f"away, noticed {late_ms} ms later")

    def close(self) -> None:
        pass


def pauses(rows: Any) -> Any:
    """Works on a DataFrame of Spark's as well."""
    output = "k string, total bigint, at_ms bigint, about string"
    return rows.groupBy("k").transformWithState(Pauses(), output, "update", "processingTime")


@dataclass
class _Pause:
    """What the model knows of a key: its timer, and when each tag and value is forgotten."""

    rows: int = 0
    total: int = 0
    due_ms: int | None = None
    tags: dict[str, tuple[int, int]] = field(default_factory=dict)
    lately: list[tuple[int, int]] = field(default_factory=list)

    def forget(self, now_ms: int) -> None:
        self.tags = {tag: entry for tag, entry in self.tags.items() if entry[1] > now_ms}
        self.lately = [entry for entry in self.lately if entry[1] > now_ms]

    def take(self, taken: Sequence[tuple[int, str]], now_ms: int) -> str:
        until_ms = now_ms + _KNOWN_MS
        self.rows += len(taken)
        self.total += sum(value for value, _ in taken)
        self.due_ms = now_ms + _AWAY_MS
        for _, tag in taken:
            self.tags[tag] = self.tags.get(tag, (0, 0))[0] + 1, until_ms
        self.lately += [(value, until_ms) for value, _ in taken]
        tags = sorted((tag, n) for tag, (n, _) in self.tags.items())
        return f"{tags} {sorted(value for value, _ in self.lately)}"


def model_pauses(epochs: Sequence[TimedEpoch]) -> Result:
    """The rows of all epochs, and the state once every key has been away: nothing is left but the numbers of rows."""
    keys: dict[str, _Pause] = {}
    output: list[tuple[Any, ...]] = []
    for now_ms, rows in epochs:
        for pause in keys.values():
            pause.forget(now_ms)
        for key, taken in _by_key(rows).items():
            pause = keys.setdefault(key, _Pause())
            about = pause.take(taken, now_ms)
            output.append((key, pause.total, now_ms, about))
        for key, pause in keys.items():
            if pause.due_ms is not None and pause.due_ms <= now_ms:
                output.append((key, pause.total, now_ms, f"away, noticed {now_ms - pause.due_ms} ms later"))
                pause.total, pause.due_ms = 0, None
    left: dict[str, list[tuple[Any, ...]]] = {name: [] for name in PAUSES_LEAVE_NOTHING_IN}
    return output, {**left, "rows": sorted((key, pause.rows) for key, pause in keys.items())}


# ------------------------------------------------------------------------------------------------------ time-outs


def timeouts(rows: Any) -> Any:
    """What each key has added up to, and once more when it has been away. Works on a DataFrame of Spark's as well."""

    def note(key: Any, frames: Iterator[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
        now_ms = state.getCurrentProcessingTimeMs()
        n, total = state.get if state.exists else (0, 0)
        is_over = state.hasTimedOut
        if is_over:
            state.remove()
        else:
            for frame in frames:
                n, total = n + len(frame), total + int(frame.v.sum())
            state.update((n, total))
            state.setTimeoutDuration(_AWAY_MS)
        yield pd.DataFrame({"k": [key[0]], "n": [n], "total": [total], "at_ms": [now_ms], "over": [is_over]})

    output = "k string, n bigint, total bigint, at_ms bigint, over boolean"
    return rows.groupBy("k").applyInPandasWithState(
        note, output, "n bigint, total bigint", "update", "ProcessingTimeTimeout"
    )


def model_timeouts(epochs: Sequence[TimedEpoch]) -> Result:
    """The rows of all epochs; no state is left once every key has been away."""
    keys: dict[str, tuple[int, int, int]] = {}
    output: list[tuple[Any, ...]] = []
    for now_ms, rows in epochs:
        arrived = _by_key(rows)
        for key, taken in arrived.items():
            n, total, _ = keys.get(key, (0, 0, 0))
            n, total = n + len(taken), total + sum(value for value, _ in taken)
            keys[key] = n, total, now_ms + _AWAY_MS
            output.append((key, n, total, now_ms, False))
        # A key times out after its time, not at it, and not if it has rows.
        for key in [key for key, (_, _, due_ms) in keys.items() if due_ms < now_ms and key not in arrived]:
            n, total, _ = keys.pop(key)
            output.append((key, n, total, now_ms, True))
    return output, {"state": []}


def _by_key(rows: Sequence[tuple[str, int, str, int]]) -> dict[str, list[tuple[int, str]]]:
    found: dict[str, list[tuple[int, str]]] = {}
    for key, value, tag, _ in rows:
        found.setdefault(key, []).append((value, tag))
    return {key: sorted(taken) for key, taken in found.items()}
