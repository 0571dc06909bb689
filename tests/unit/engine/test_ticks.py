"""Wishes for epochs without rows, as the source of ticks turns them into offsets."""

from __future__ import annotations

from typing import Any

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable

from anabranch.engine.spark.ticks import TICK, TickReader, Ticks


@pytest.fixture
def ticks() -> Any:
    made = Ticks()
    yield made
    made.close()


def offset(reader: TickReader, start: int) -> int:
    return int(reader.latestOffset({TICK: start}, ReadAllAvailable())[TICK])


def test_nothing_moves_before_the_first_wish(ticks: Ticks) -> None:
    reader = TickReader(str(ticks.file))
    assert [offset(reader, 0), offset(reader, 7)] == [0, 7]


def test_a_wish_is_one_epoch_however_often_spark_asks(ticks: Ticks) -> None:
    reader = TickReader(str(ticks.file))
    ticks.wish()
    assert [offset(reader, 4), offset(reader, 4), offset(reader, 5), offset(reader, 5)] == [5, 5, 5, 5]
    ticks.wish()
    assert [offset(reader, 5), offset(reader, 6)] == [6, 6]


def test_a_wish_while_its_predecessor_is_under_way_is_kept(ticks: Ticks) -> None:
    reader = TickReader(str(ticks.file))
    ticks.wish()
    assert offset(reader, 0) == 1
    ticks.wish()
    assert [offset(reader, 1), offset(reader, 2)] == [2, 2]


def test_only_epochs_with_rows_are_followed_by_another(ticks: Ticks) -> None:
    reader = TickReader(str(ticks.file))
    ticks.note_epoch(had_rows=False)
    assert offset(reader, 3) == 3
    ticks.note_epoch(had_rows=True)
    assert offset(reader, 3) == 4


def test_a_restart_makes_up_for_the_epoch_that_the_last_driver_may_have_missed(ticks: Ticks) -> None:
    reader = TickReader(str(ticks.file))
    ticks.note_restart()
    assert [offset(reader, 3), offset(reader, 4)] == [4, 4]


def test_a_query_that_has_ended_wishes_for_nothing(ticks: Ticks) -> None:
    reader = TickReader(str(ticks.file))
    ticks.close()
    ticks.wish()
    assert offset(reader, 3) == 3
    assert not ticks.file.parent.exists()


def test_where_spark_s_setting_forbids_it_no_epoch_follows_but_a_wish_still_counts() -> None:
    ticks = Ticks(after_rows=False)
    try:
        reader = TickReader(str(ticks.file))
        ticks.note_epoch(had_rows=True)
        ticks.note_restart()
        assert offset(reader, 3) == 3
        ticks.wish()
        assert offset(reader, 3) == 4
    finally:
        ticks.close()
