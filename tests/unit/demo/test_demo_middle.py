"""When a run rescales by itself: in the middle of its time, or of its files."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from anabranch.core.errors import UnsupportedError
from anabranch.demo.meter import RunFigures
from anabranch.demo.options import DemoOptions
from anabranch.demo.run import Middle


@dataclass
class FakeQuery:
    asked: list[dict[str, Any]] = field(default_factory=list)
    ended: bool = False

    def rescale(self, **wanted: Any) -> None:
        if self.ended:
            raise UnsupportedError("The query has ended.")
        self.asked.append(wanted)


def snapshot(elapsed_s: float, epochs: int = 0) -> RunFigures:
    return RunFigures(elapsed_s, epochs, None, 0, 0, 0.0, 0.0, {}, ())


def looks(options: DemoOptions, *snapshots: RunFigures, files: int | None = None) -> list[dict[str, Any]]:
    """What is asked for after these looks."""
    query, middle = FakeQuery(), Middle(options, files)
    for each in snapshots:
        middle.rescale_if_due(query, each)  # type: ignore[arg-type]
    return query.asked


def test_a_run_is_rescaled_once_in_the_middle() -> None:
    options = DemoOptions(seconds=30)
    assert looks(options, snapshot(0), snapshot(14.9)) == []
    wanted = {"workers": 4, "parallelism": 4, "stage": 3}
    assert looks(options, snapshot(14.9), snapshot(15.2), snapshot(16.2)) == [wanted]


def test_a_run_is_rescaled_when_it_is_told_to_or_never() -> None:
    assert looks(DemoOptions(seconds=30, rescale_at=2), snapshot(1.9)) == []
    assert looks(DemoOptions(seconds=30, rescale_at=2), snapshot(2)) != []
    assert looks(DemoOptions(seconds=30, rescale_to=0), snapshot(29)) == []


def test_recorded_events_may_be_half_read_before_half_of_the_time_is_up() -> None:
    options = DemoOptions(seconds=30, input=Path())
    assert looks(options, snapshot(3, epochs=4), files=10) == []
    assert looks(options, snapshot(3, epochs=5), files=10) != []
    assert looks(DemoOptions(seconds=30, input=Path(), rescale_at=9), snapshot(3, epochs=9), files=10) == []


def test_a_query_that_has_just_ended_is_left_alone() -> None:
    query, middle = FakeQuery(ended=True), Middle(DemoOptions(seconds=30), None)
    for _ in range(2):
        middle.rescale_if_due(query, snapshot(20))  # type: ignore[arg-type]
    assert query.asked == []
