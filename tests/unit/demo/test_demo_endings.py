"""When a run ends: once every row is through and no rescale is under way that will be done, or when its time is up."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

from anabranch.demo.interrupts import StopRequest
from anabranch.demo.meter import Snapshot
from anabranch.demo.options import DemoOptions
from anabranch.demo.rescales import RescaleFigures
from anabranch.demo.run import Ending, Middle, _watch

UNDER_WAY = RescaleFigures(1, "4 workers", "migrating", "", 0, None, 3, *[0] * 7)
DONE = dataclasses.replace(UNDER_WAY, state="done", ended_ms=5)


class FakeMeter:
    """A run of which a second passes with each look."""

    def __init__(self, rows: int, rescale: RescaleFigures) -> None:
        self.elapsed_s = 0.0
        self._rows = rows
        self._rescale = rescale

    def read(self) -> Snapshot:
        self.elapsed_s += 1
        return Snapshot(self.elapsed_s, 3, None, self._rows, 0, 0.0, 0.0, {}, (), rescales=(self._rescale,))

    def read_rescales(self) -> tuple[RescaleFigures, ...]:
        self.elapsed_s += 1
        return (self._rescale,)


@pytest.mark.parametrize(
    ("drain", "rows", "rescale", "ending"),
    [
        (True, 200, DONE, Ending.COMPLETE),
        (True, 200, UNDER_WAY, Ending.TIME),
        (True, 199, DONE, Ending.TIME),
        (False, 200, UNDER_WAY, Ending.COMPLETE),  # without a drain, there is nothing to wait for
        (False, 199, UNDER_WAY, Ending.TIME),
    ],
)
def test_a_run_is_complete_when_all_rows_are_through_and_what_will_be_done_is_done(
    drain: bool, rows: int, rescale: RescaleFigures, ending: Ending
) -> None:
    options = DemoOptions(seconds=2, rate=100, rescale_to=0, drain=drain, drain_limit_s=3)
    meter: Any = FakeMeter(rows, rescale)
    query: Any = SimpleNamespace(isActive=True)
    view: Any = SimpleNamespace(show=lambda *_: None)
    assert _watch(query, meter, options, Middle(options, None), view, StopRequest()) is ending
