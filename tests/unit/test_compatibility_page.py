"""The page on compatibility names every method of PySpark's that has to do with state, and says what is true."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, GroupedData
from pyspark.sql.streaming import DataStreamWriter, StreamingQuery
from pyspark.sql.streaming.state import GroupState
from pyspark.sql.streaming.stateful_processor import (
    ExpiredTimerInfo,
    ListState,
    MapState,
    StatefulProcessor,
    StatefulProcessorHandle,
    TimerValues,
    ValueState,
)

from anabranch.api.grouped import GroupedStream
from anabranch.api.query import StreamQuery
from anabranch.api.stream import SORTING_METHODS, STATELESS_METHODS, Stream
from anabranch.api.writer import StreamWriter
from anabranch.operators.process.handles import LocalHandle
from anabranch.operators.process.state_variables import LocalListState, LocalMapState, LocalValueState

PAGE = (Path(__file__).parents[2] / "docs" / "compatibility.md").read_text()
STATUSES = {"supported", "differs", "not supported"}
#: PySpark's classes, with those of ours that take their place; None where PySpark's own are used.
CLASSES: dict[type, type | None] = {
    StatefulProcessorHandle: LocalHandle,
    ValueState: LocalValueState,
    ListState: LocalListState,
    MapState: LocalMapState,
    StatefulProcessor: None,
    TimerValues: None,
    ExpiredTimerInfo: None,
    GroupState: None,
    GroupedData: GroupedStream,
    DataFrame: Stream,
    DataStreamWriter: StreamWriter,
    StreamingQuery: StreamQuery,
}


def public(kind: Any) -> set[str]:
    return {name for name in dir(kind) if not name.startswith("_")}


def told(title: str, page: str = PAGE) -> dict[str, str]:
    """What the page says about each method of a class."""
    section = re.split(r"^#{2,3} ", page.split(f"\n### {title}\n", 1)[1], maxsplit=1, flags=re.MULTILINE)[0]
    found: dict[str, str] = {}
    for names, status in re.findall(r"^\| (`.*?`) \| ([a-z ]+) \|", section, flags=re.MULTILINE):
        for name in re.findall(r"`(\w+)`", names):
            assert name not in found, f"{title}: {name} is there twice"
            found[name] = status
    return found


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_each_public_method_of_pyspark_is_on_the_page(kind: type) -> None:
    statuses = told(kind.__name__)
    assert set(statuses.values()) <= STATUSES
    assert public(kind) - set(statuses) == set(), "these are missing from docs/compatibility.md"
    assert set(statuses) - public(kind) == set(), "these are not PySpark's"


@pytest.mark.parametrize("kind", [kind for kind, ours in CLASSES.items() if ours], ids=lambda kind: kind.__name__)
def test_what_the_page_says_is_there_is_there_and_nothing_else(kind: type) -> None:
    has = public(CLASSES[kind])
    if kind is DataFrame:
        has |= {*STATELESS_METHODS, *SORTING_METHODS}
    found = {name for name, status in told(kind.__name__).items() if status != "not supported"}
    assert found == has & public(kind)
