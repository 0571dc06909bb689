"""Stages behind a join go by a watermark that is behind by as long as rows may wait in the join."""

from types import SimpleNamespace
from typing import Any

from anabranch.engine.segments import Segment, watermark_delays_ms
from anabranch.engine.taskepoch import TaskEpoch


def stage(number: int, output_delay_ms: int = 0) -> Any:
    return SimpleNamespace(spec=SimpleNamespace(number=number), output_delay_ms=output_delay_ms)


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


def test_without_a_watermark_there_is_nothing_to_be_behind() -> None:
    epoch = TaskEpoch(epoch=3, run=0, processing_time_ms=9000, delays_ms={5: 500})
    assert epoch.of_stage(5).watermark_ms is None
