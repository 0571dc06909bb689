"""Stages behind a join go by a watermark that is behind by as long as rows may wait in the join."""

from types import SimpleNamespace
from typing import Any

from anabranch.engine.segments import Segment, watermark_delays_ms
from anabranch.engine.stages import StageClock
from anabranch.engine.tasks import TaskEpoch


def stage(number: int, output_delay_ms: int = 0, clock: StageClock = StageClock.EVENT_TIME) -> Any:
    return SimpleNamespace(spec=SimpleNamespace(number=number), output_delay_ms=output_delay_ms, clock=clock)


def test_delays_add_up_behind_the_stages_that_cause_them() -> None:
    stages = [stage(1), stage(4, 500), stage(5), stage(7, 20), stage(8)]
    assert watermark_delays_ms([Segment(each) for each in stages]) == {1: 0, 4: 0, 5: 500, 7: 500, 8: 520}


def test_where_streams_meet_the_one_that_is_furthest_behind_counts() -> None:
    read: Any = SimpleNamespace()
    segments = [
        Segment(stage(1, 500), inputs=(read,)),
        Segment(stage(2, 20), inputs=(read, 0)),
        Segment(stage(5, 30), inputs=(read,)),
        Segment(None, inputs=(2, 1)),
        Segment(stage(7)),
    ]
    assert watermark_delays_ms(segments) == {1: 0, 2: 500, 5: 0, 7: 520}


def test_no_watermark_passes_a_stage_that_goes_by_the_time_of_day() -> None:
    read: Any = SimpleNamespace()
    by_day = stage(1, clock=StageClock.PROCESSING_TIME)
    segments = [
        Segment(by_day, inputs=(read,)),
        Segment(stage(2, 500)),
        Segment(stage(3)),
        Segment(stage(4), inputs=(2, read)),
    ]
    delays_ms = watermark_delays_ms(segments)
    assert delays_ms == {1: 0, 2: None, 3: None, 4: 0}
    epoch = TaskEpoch(epoch=3, run=0, processing_time_ms=9000, watermark_ms=7000, delays_ms=delays_ms)
    assert [epoch.of_stage(number).watermark_ms for number in (1, 3, 4)] == [7000, 0, 7000]
    assert epoch.of_stage(3).late_watermark_ms is None


def test_a_task_sees_the_watermark_of_its_stage() -> None:
    # Stands for Spark's local properties, as the driver sets and a task reads them.
    held: dict[str, str] = {}
    properties: Any = SimpleNamespace(setLocalProperty=held.__setitem__, getLocalProperty=held.get)
    properties.sparkContext = properties
    epoch = TaskEpoch(epoch=3, run=0, processing_time_ms=9000, watermark_ms=7000, delays_ms={4: 0, 5: 500})
    epoch.announce(properties)
    received = TaskEpoch.of(properties)
    assert received == epoch
    assert [received.of_stage(number).watermark_ms for number in (4, 5)] == [7000, 6500]
    assert received.of_stage(5).processing_time_ms == 9000


def test_no_stage_is_so_far_behind_that_rows_before_1970_are_not_late() -> None:
    epoch = TaskEpoch(epoch=0, run=0, processing_time_ms=9, watermark_ms=200, late_watermark_ms=0, delays_ms={5: 500})
    assert (epoch.of_stage(5).watermark_ms, epoch.of_stage(5).late_watermark_ms) == (0, 0)


def test_without_a_watermark_there_is_nothing_to_be_behind() -> None:
    epoch = TaskEpoch(epoch=3, run=0, processing_time_ms=9000, delays_ms={5: 500})
    assert epoch.of_stage(5).watermark_ms is None
